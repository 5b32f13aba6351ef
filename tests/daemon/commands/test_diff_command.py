"""Tests the verb `ckptd diff`: how checkpoints are named, its text and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckptd.agent import Agent
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.diff_command import difference_text
from ckptd.shared import array_diff
from ckptd.shared.array_diff import CheckpointDifference, ValueDifference
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
    assert json.loads(said) == {
        "a": "gpt/step-00000002.a0001", "b": "gpt/step-00000002.a0001", "equal": True,
        "only_a": [], "only_b": [], "tensors": [], "values": [],
        "same": {"tensors": 3, "values": 2},
    }  # fmt: skip


def test_json_has_the_figures(root: Path) -> None:
    code, said = ran(root / "gpt" / "2", root / "gpt" / "1", "--json")
    assert code == 1
    document = json.loads(said)
    assert document["values"] == [{"name": "groups.0.lr", "a": 0.05, "b": 0.1}]
    assert document["tensors"][1] == {
        "name": "w", "shapes": [[2], [2]], "dtypes": ["float32", "float32"], "elements": 2,
        "l2": 5.0, "relative": 0.5, "max_abs": 4.0, "nonfinite": [0, 0],
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
    assert said.startswith("A  gpt/step-00000001.a0001\n")
