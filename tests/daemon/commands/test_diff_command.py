"""Tests the verb `ckptd diff`: how checkpoints are named, its text and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from ckptd.agent import Agent
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.diff_command import difference_text
from ckptd.shared import array_diff
from ckptd.shared.array_diff import CheckpointDifference, ValueDifference
from ckptd.shared.formats.manifest import Manifest
from tests.support import stores
from tests.support.commands import ckptd
from tests.support.daemons import home, running
from tests.support.storage import part_in


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A root with two steps of a job, whose daemon has ended."""
    with home() as place, running(place, forked=True) as daemon:
        agent = Agent("gpt", socket=place.socket)
        for step in (1, 2):
            state = {
                "w": torch.tensor([3.0, 4.0]) * step,
                "b": torch.tensor([[1.0, step / 0.5 - 2 or float("nan")]]),
                "same": torch.ones(2),
                "groups": [{"lr": 0.1 / step, "name": "all"}],
            }
            agent.snapshot(state, step=step).wait("durable", timeout=60)
        agent.close()
        daemon.stop()
        yield place.root


def ran(*typed: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["diff", *map(str, typed)])
    return done.exit_code, done.output


def test_each_difference_is_a_line(root: Path) -> None:
    code, said = ran(root / "gpt" / "1", root / "gpt")
    assert code == 1
    assert said.split("\n") == [
        "A  gpt/step-00000001.a0001",
        "B  gpt/step-00000002.a0001",
        "",
        "TENSOR  SHAPE   DTYPE    DIFFER  RELATIVE  L2  MAX ABS  NOT FINITE",
        "b       [1, 2]  float32  1       inf       0   0        A 1, B 0",
        "w       [2]     float32  2       1         5   4        -",
        "",
        "VALUE        A    B",
        "groups.0.lr  0.1  0.05",
        "",
        "2 tensors and 1 value differ, 0 keys are in one only; 1 tensor and 1 value are the same",
        "",
    ]


def test_the_same_checkpoint_differs_in_nothing(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(next((root / "gpt").glob("step-00000001.*")), copy)
    assert ran(root / "gpt" / "1", copy) == (
        0,
        f"A  gpt/step-00000001.a0001\nB  {copy}\n\n"
        "nothing differs: 3 tensors and 2 values are the same\n",
    )
    code, said = ran("--json", root / "gpt" / "newest", root / "gpt" / "step-00000002")
    assert code == 0
    where = str(root / "gpt" / "step-00000002.a0001")
    assert json.loads(said) == {
        "a": where, "b": where, "equal": True, "only_a": [], "only_b": [], "tensors": [],
        "values": [], "same": {"tensors": 3, "values": 2}, "runs": [],
    }  # fmt: skip


def test_json_has_the_figures(root: Path) -> None:
    code, said = ran(root / "gpt" / "2", root / "gpt" / "1", "--json")
    assert code == 1
    document = json.loads(said)
    assert document["values"] == [{"name": "groups.0.lr", "a": 0.05, "b": 0.1}]
    assert document["tensors"][1] == {
        "name": "w", "shapes": [[2], [2]], "dtypes": ["float32", "float32"], "elements": 2,
        "l2": 5.0, "relative": 0.5, "max_abs": 4.0, "non_finite": [0, 0],
    }  # fmt: skip


def test_what_is_in_one_only_and_long_or_evil_values_are_shown_in_lines() -> None:
    values = [ValueDifference("a\n", "x" * 100, "\x1b[2J")]
    found = CheckpointDifference(["t1"], ["t2", "t3"], [], values, 0, 0)
    assert difference_text("A", "B", found).split("\n") == [
        "A  A",
        "B  B",
        "",
        "VALUE  A" + " " * 61 + "B",
        f"a\\n    {'x' * 57}...  \\x1b[2J",
        "",
        "only in A: t1",
        "",
        "only in B: t2",
        "only in B: t3",
        "",
        "0 tensors and 1 value differ, 3 keys are in one only; 0 tensors and 0 values are the same",
    ]


def of_another_run(place: Path) -> Path:
    """Make it look as if another run had saved the checkpoint in a directory."""
    manifest = Manifest.decode((place / "manifest.json").read_bytes())
    writer = manifest.writer | {"commit": "f" * 40, "command": f"python {'x' * 100} --lr 0.2"}
    writer.pop("user")
    (place / "manifest.json").write_bytes(msgspec.structs.replace(manifest, writer=writer).encode())
    return place


def test_what_differs_of_the_runs_is_told_and_is_no_difference(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(next((root / "gpt").glob("step-00000001.*")), copy)
    written = Manifest.decode((copy / "manifest.json").read_bytes()).writer
    of_another_run(copy)
    code, said = ran(root / "gpt" / "1", copy)
    assert code == 0
    assert said.splitlines()[2:] == [
        "",
        "RUN",
        f"commit   A  {written.get('commit', '-')}",
        f"         B  {'f' * 40}",
        f"command  A  {written['command']}",
        f"         B  python {'x' * 100} --lr 0.2",
        f"user     A  {written['user']}",
        "         B  -",
        "",
        "the states do not differ: 3 tensors and 2 values are the same",
    ]
    _, as_json = ran("--json", copy, root / "gpt" / "2")
    runs = {run["name"]: (run["a"], run["b"]) for run in json.loads(as_json)["runs"]}
    assert list(runs) == ["commit", "command", "user"]
    assert runs["user"] == (None, written["user"])


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(stores.program("rclone") is None, reason="rclone is not installed")
def test_a_checkpoint_in_an_object_store_is_compared_with_its_copy(
    root: Path, tmp_path: Path
) -> None:
    with stores.memory(tmp_path / "store") as server:
        stores.make_bucket(server, "bucket")
        store = server.environ
        copied = ckptd("copy", root / "gpt", "s3://bucket/runs", environment=store)
        assert copied.returncode == 0, copied.stderr
        same = ckptd("diff", root / "gpt/2", "s3://bucket/runs/gpt/newest", environment=store)
        stored = ("s3://bucket/runs/gpt/1", "s3://bucket/runs/gpt/2")
        apart = ckptd("diff", *stored, environment=store)
    tag = "gpt/step-00000002.a0001"
    assert (same.returncode, same.stdout) == (
        0,
        f"A  {root}/{tag}\nB  s3://bucket/runs/{tag}\n\n"
        "nothing differs: 3 tensors and 2 values are the same\n",
    )
    assert (apart.returncode, "groups.0.lr  0.1  0.05" in apart.stdout) == (1, True)


def flip(file: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "code", "said"),
    [
        (lambda place: flip(part_in(place)), 13, "{part}: chunk "),
        (lambda place: part_in(place).unlink(), 13, "{part} is missing"),
        (lambda place: flip(place / "manifest.json"), 13, "{place}: manifest"),
        (shutil.rmtree, 10, "no checkpoint 'copy' of job"),
    ],
    ids=["a flipped bit", "no part", "the manifest", "deleted"],
)
def test_a_checkpoint_that_is_damaged_or_deleted_is_named(
    root: Path, tmp_path: Path, harm: Callable[[Path], None], code: int, said: str
) -> None:
    place = tmp_path / "copy"
    shutil.copytree(next((root / "gpt").glob("step-00000001.*")), place)
    part = part_in(place)
    harm(place)
    for typed in ((root / "gpt" / "1", place), (place, root / "gpt" / "1")):
        found, text = ran(*typed)
        assert (found, text.count("\n")) == (code, 1)
        assert text.startswith(f"ckptd: {said.format(place=place, part=part)}")


def test_each_mistake_is_one_sentence_and_never_looks_like_a_difference(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "copy"
    shutil.copytree(next((root / "gpt").glob("step-00000001.*")), place)
    part = part_in(place)
    whole = part.read_bytes()
    missing = ran(root / "gpt" / "1", root / "gpt" / "7")
    part.write_bytes(whole[:-1])
    short = ran(root / "gpt" / "1", place)
    of_root = ran(root, root / "gpt")

    def broken(a: object, b: object) -> CheckpointDifference:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(array_diff, "difference", broken)
    odd = ran(root / "gpt" / "1", root / "gpt" / "2")
    assert [code for code, _ in (missing, short, odd, of_root)] == [10, 13, 2, 10]
    assert [said.count("\n") for _, said in (missing, short, odd, of_root)] == [1] * 4
    assert "has no checkpoint of step 7" in missing[1]
    assert "Input/output error" in odd[1]


def test_the_newest_of_a_job_passes_over_damage(root: Path, tmp_path: Path) -> None:
    job = tmp_path / "gpt"
    shutil.copytree(root / "gpt", job)
    (next(job.glob("step-00000002.*")) / "manifest.json").write_bytes(b"{}")
    code, said = ran(job, root / "gpt" / "1")
    assert code == 0
    assert said.startswith(f"A  {job}/step-00000001.a0001\n")
