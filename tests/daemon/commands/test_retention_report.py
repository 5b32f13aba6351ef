"""Tests the report of what retention policies would do before they are set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptd.daemon.commands import retention_report
from ckptd.daemon.commands.cli import main
from ckptd.shared.errors import IntegrityError, InvalidConfig, InvalidRequest, NewerFormat
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.names import tag_directory
from ckptd.shared.retention import BestN, EveryNSteps, LatestN, MaxBytes
from ckptd.shared.storage.locate import open_root
from tests.shared.samples import write_checkpoint
from tests.support.cases import each_case


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the checkpoints of steps 1 to 5 of the job gpt. Step 2 is pinned."""
    repository = open_root(tmp_path)
    for step in range(1, 6):
        write_checkpoint(tmp_path, step=step, attempt=1)
    repository.pin("gpt", tag(2))
    return tmp_path


def tag(step: int) -> str:
    return tag_directory(step, None, 1)


def test_each_checkpoint_has_a_reason_and_nothing_is_deleted(root: Path) -> None:
    found = retention_report.explained(root / "gpt", [EveryNSteps(3), LatestN(1)])
    assert [(row["tag"], row["kept"], row["reason"]) for row in found["checkpoints"]] == [
        (tag(1), False, "no policy keeps it"),
        (tag(2), True, "it is pinned"),
        (tag(3), True, "kept by EveryNSteps(3)"),
        (tag(4), False, "no policy keeps it"),
        (tag(5), True, "it is the newest"),
    ]
    nbytes = {row["tag"]: row["bytes"] for row in found["checkpoints"]}
    assert found["deleted_bytes"] == nbytes[tag(1)] + nbytes[tag(4)]
    assert found["kept_bytes"] == nbytes[tag(2)] + nbytes[tag(3)] + nbytes[tag(5)]
    assert len(list((root / "gpt").glob("step-*/manifest.json"))) == 5


def test_the_command_prints_a_line_for_each_checkpoint(root: Path) -> None:
    keep = ["--keep", "MaxBytes(1)", "--explain"]
    run = CliRunner().invoke(main, ["forget", str(root / "gpt"), *keep])
    assert run.exit_code == 0
    lines = run.output.splitlines()
    assert lines[0].split() == ["CHECKPOINT", "SIZE", "THEN", "WHY"]
    assert [line.split()[0] for line in lines[1:6]] == [f"gpt/{tag(step)}" for step in range(1, 6)]
    assert lines[1].endswith("deleted  the job would hold more than MaxBytes('1B') allows")
    assert lines[2].endswith("stays    it is pinned")
    assert lines[6].startswith("3 of 5 checkpoints would be deleted (")
    assert lines[6].endswith("), with MaxBytes('1B')")
    again = CliRunner().invoke(main, ["forget", str(root / "gpt"), *keep, "--json"])
    assert json.loads(again.output) == retention_report.explained(root / "gpt", [MaxBytes(1)])
    assert len(list((root / "gpt").glob("step-*/manifest.json"))) == 5


def test_what_forget_deletes_is_what_the_report_says(root: Path) -> None:
    """A limit takes others away in place of a pinned checkpoint."""
    (nbytes,) = {
        row["bytes"]
        for row in retention_report.explained(root / "gpt", [LatestN(9)])["checkpoints"]
    }
    keep = ["--keep", f"MaxBytes({3 * nbytes})"]
    said = retention_report.explained(root / "gpt", [MaxBytes(3 * nbytes)])
    doomed = [row["tag"] for row in said["checkpoints"] if not row["kept"]]
    assert doomed == [tag(1), tag(3)]
    run = CliRunner().invoke(main, ["forget", str(root / "gpt"), *keep, "--dry-run", "--json"])
    assert [row["tag"] for row in json.loads(run.output) if row["error"] is None] == doomed


@each_case(
    ("arguments", "code", "words"),
    [
        (["gpt"], 2, "job 'gpt' has no retention policies of its own: say which to explain"),
        (["gpt", "--keep", "Dayly(7)"], 2, "--keep: there is no retention policy 'Dayly'"),
        (["gpt", "--keep", "BestN('lost', 1)"], 2, "no checkpoint of job 'gpt' would be deleted"),
        ([f"gpt/{tag(3)}", "--keep", "LatestN(1)"], 2, "is one checkpoint, and --explain needs a"),
        (["gtp", "--keep", "LatestN(1)"], 10, "gtp"),
    ],
)
def test_bad_input_is_one_sentence(root: Path, arguments: list[str], code: int, words: str) -> None:
    run = CliRunner().invoke(
        main, ["forget", f"{root}/{arguments[0]}", *arguments[1:], "--explain"]
    )
    assert run.exit_code == code
    assert words in run.output
    assert len(run.output.strip().splitlines()) == 1


def test_what_cannot_be_read_stays(root: Path) -> None:
    repository = open_root(root)
    good: dict[str, Manifest | IntegrityError] = {
        tag(step): repository.read_manifest("gpt", tag(step)) for step in (1, 2)
    }
    found = retention_report.explanation(
        "gpt", good | {"a": IntegrityError("torn"), "b": NewerFormat("3")}, (), [LatestN(1)]
    )
    assert [(row["tag"], row["kept"], row["bytes"] is None) for row in found["checkpoints"]] == [
        (tag(1), False, False),
        (tag(2), True, False),
        ("a", True, True),
        ("b", True, True),
    ]
    assert found["note"].startswith("retention deletes nothing in this job while it has b, which")
    assert found["note"] in retention_report.explanation_text(found)
    with pytest.raises(InvalidConfig, match="would be deleted, because BestN"):
        retention_report.explanation("gpt", good, (), [BestN("lost", 1)])
    with pytest.raises(InvalidRequest, match="has no retention policies of its own"):
        retention_report.explanation("gpt", {}, (), [])
