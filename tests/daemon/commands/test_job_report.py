"""Tests of `ckptd status --job`: which nodes have delivered, from storage alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.job_report import job_report, job_text
from ckptd.shared import names
from ckptd.shared.errors import NotFound
from ckptd.shared.formats.receipt import Abandonment, encode
from ckptd.shared.storage.locate import open_root
from tests.shared.formats.test_receipt import receipt
from tests.support.forged import Shards, forge


def deliver(
    root: Path, step: int, *ranks: int, attempt: int = 1, number: int = 1, **changes: Any
) -> str:
    """Publish the receipt of a node whose lowest rank names it.

    Return the name of the try's directory.
    """
    tag = names.try_directory(names.tag_directory(step, None, attempt), number)
    open_root(root).publish_receipt(receipt(*ranks, attempt=attempt, step=step, tag=tag, **changes))
    return tag


def abandon(root: Path, tag: str, step: int, reason: str) -> None:
    made = Abandonment(job="gpt", attempt=1, step=step, tag=tag, code="storage", reason=reason)
    open_root(root).publish_manifest("gpt", tag, encode(made))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root whose job has a checkpoint of two nodes, step 3, and one of one
    node before it.
    """
    whole: Shards = [((0,), (4,))]
    forge(tmp_path, (4,), [whole], step=2, seq=1)
    forge(tmp_path, (4,), [whole], step=3, seq=2)
    deliver(tmp_path, 3, 0, 1)
    deliver(tmp_path, 3, 2, 3)
    open_root(tmp_path).claim("gpt", 1)
    return tmp_path


def rows(root: Path) -> list[tuple[str, str, list[tuple[str | None, list[int], str]]]]:
    return [
        (
            save["tag"],
            save["state"],
            [(node["node"], node["ranks"], node["state"]) for node in save["nodes"]],
        )
        for save in job_report(root, "gpt")["saves"]
    ]


NEWEST = (
    "step-00000003.a0001",
    "committed",
    [("node0", [0, 1], "delivered"), ("node2", [2, 3], "delivered")],
)


def test_the_newest_checkpoint_names_its_nodes(root: Path) -> None:
    report = job_report(root, "gpt")
    assert (report["job"], report["root"], report["attempt"], report["newest"]) == (
        "gpt",
        str(root),
        1,
        NEWEST[0],
    )
    assert rows(root) == [NEWEST]


def test_a_node_that_has_not_delivered_is_named_by_its_last_receipt(root: Path) -> None:
    tag = deliver(root, 5, 0, 1)
    assert rows(root) == [
        NEWEST,
        (tag, "undecided", [("node0", [0, 1], "delivered"), ("node2", [2, 3], "missing")]),
    ]
    tag = deliver(root, 6, 0, 1, world_size=5)
    assert rows(root)[-1][2] == [
        ("node0", [0, 1], "delivered"),
        ("node2", [2, 3], "missing"),
        (None, [4], "missing"),
    ]


def test_a_save_that_no_node_has_delivered_is_shown(root: Path) -> None:
    (root / "gpt" / "step-00000004.a0001").mkdir()
    assert rows(root) == [NEWEST]
    (root / "gpt" / "step-00000004.a0001" / "rank-00000.00.part").touch()
    assert rows(root) == [NEWEST, ("step-00000004.a0001", "undecided", [])]
    assert (
        "step-00000004.a0001  undecided  -      -      no node has delivered yet"
        in job_text(job_report(root, "gpt")).splitlines()
    )


def test_an_abandoned_try_says_why_and_the_next_one_follows(root: Path) -> None:
    first = deliver(
        root,
        5,
        2,
        3,
        code="storage",
        reason="ranks 2, 3 on node2: No space left on device",
        parts=[],
    )
    abandon(root, first, 5, "ranks 2, 3 on node2: No space left on device")
    second = deliver(root, 5, 0, 1, number=2)
    assert [row[:2] for row in rows(root)] == [
        NEWEST[:2],
        (first, "abandoned"),
        (second, "undecided"),
    ]
    assert job_text(job_report(root, "gpt")).splitlines() == [
        f"job gpt in {root}, attempt 1: newest checkpoint step-00000003.a0001",
        "SAVE                    STATE      NODE   RANKS",
        "step-00000003.a0001     committed  node0  0-1    delivered",
        "                                   node2  2-3    delivered",
        "step-00000005.a0001     abandoned  node2  2-3    could not save",
        "step-00000005.a0001.t2  undecided  node0  0-1    delivered",
        "                                   node2  2-3    has not delivered",
        "step-00000005.a0001 is abandoned: ranks 2, 3 on node2: No space left on device",
    ]


def test_a_deleted_checkpoint_is_not_shown(root: Path) -> None:
    """A newer attempt has deleted it, and has left an abandonment for the daemons of
    the older one.
    """
    open_root(root).bury("gpt", deliver(root, 5, 0, 1), 1, 5)
    assert rows(root) == [NEWEST]


def test_damage_is_shown(root: Path) -> None:
    tag = deliver(root, 5, 0, 1)
    (root / "gpt" / tag / names.MANIFEST).write_bytes(b"{}")
    report = job_report(root, "gpt")
    assert (report["saves"][-1]["state"], report["newest"]) == ("damaged", NEWEST[0])
    assert f"{tag} is damaged: gpt/{tag}: " in job_text(report)


@pytest.mark.parametrize("tag", [NEWEST[0], "step-00000005.a0001"])
def test_a_damaged_receipt_hides_neither_the_checkpoint_nor_the_other_receipts(
    root: Path, tag: str
) -> None:
    if tag != NEWEST[0]:
        deliver(root, 5, 0, 1)
        deliver(root, 5, 2, 3)
    (root / "gpt" / tag / names.receipt_file(2)).write_bytes(b"{}")
    report = job_report(root, "gpt")
    assert (report["newest"], report["saves"][-1]["tag"]) == (NEWEST[0], tag)
    assert next(node["node"] for node in report["saves"][-1]["nodes"]) == "node0"
    assert f"gpt/{tag}/{names.receipt_file(2)}: " in job_text(report)


def test_a_directory_that_cannot_be_read_is_one_row(root: Path) -> None:
    tag = deliver(root, 5, 0, 1)
    (root / "gpt" / tag / names.MANIFEST).symlink_to("elsewhere")
    assert rows(root)[-1][:2] == (tag, "damaged")
    assert rows(root)[0] == NEWEST


def test_a_save_with_a_tag_that_nobody_has_delivered_is_shown(root: Path) -> None:
    (root / "gpt" / "best.a0001").mkdir()
    (root / "gpt" / "best.a0001" / "rank-00000.00.part").touch()
    assert rows(root) == [NEWEST, ("best.a0001", "undecided", [])]


def test_text_from_storage_cannot_write_to_the_terminal(root: Path) -> None:
    deliver(root, 5, 2, 3, code="storage", reason="\x1b]0;title\x07 and\na line", parts=[])
    text = job_text(job_report(root, "gpt"))
    assert "\x1b" not in text
    assert text.splitlines()[-1].startswith("step-00000005.a0001 is undecided: ")


def test_a_job_without_a_checkpoint(tmp_path: Path) -> None:
    tag = deliver(tmp_path, 5, 0, 1)
    report = job_report(tmp_path, "gpt")
    assert (report["newest"], report["attempt"], [save["tag"] for save in report["saves"]]) == (
        None,
        1,
        [tag],
    )
    assert job_text(report).startswith(
        f"job gpt in {tmp_path}, attempt 1: newest checkpoint none\n"
    )


def test_a_job_that_is_not_there(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        NotFound, match=f"^there is no job 'bert' in {root}; `ckptd ls {root}` lists the jobs$"
    ):
        job_report(root, "bert")
    with pytest.raises(NotFound, match="does not exist"):
        job_report(tmp_path / "nowhere", "gpt")


def test_the_command_prints_text_and_json(root: Path) -> None:
    def ckptd(*arguments: str) -> str:
        result = CliRunner().invoke(
            main, ["status", str(root), "--job", "gpt", *arguments], catch_exceptions=False
        )
        assert result.exit_code == 0
        return result.stdout

    assert ckptd() == job_text(job_report(root, "gpt")) + "\n"
    assert json.loads(ckptd("--json")) == job_report(root, "gpt")
