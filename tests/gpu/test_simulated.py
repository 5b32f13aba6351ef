"""Tests the acceptance script itself, on simulated lanes, so that it works on the day
when there is a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import table
from tests.gpu.__main__ import FIRST
from tests.gpu.rig import Rig
from tests.gpu.table import CHECKS, NO_DEVICE, ONE_DEVICE, Line, passes, run

SETTINGS = {"simulated": True, "gigabytes": 0.001, "kills": 1}


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="only without an accelerator")
def test_every_check_passes_or_is_skipped_by_name(tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--json", str(file)], capture_output=True, text=True
    )
    lines = json.loads(file.read_text())
    assert [line for line in lines if line["verdict"] == "FAIL"] == [], ended.stdout + ended.stderr
    assert ended.returncode == 0
    assert {line["part"] for line in lines} == set(CHECKS) >= set(FIRST)
    skipped = [line["figure"] for line in lines if line["verdict"] == "SKIP"]
    assert set(skipped) <= {NO_DEVICE, ONE_DEVICE}
    assert len(lines) - len(skipped) >= 25
    assert "simulated lanes. Rates and the driver are not tested" in ended.stdout


def raises(rig: Rig) -> Iterator[Line]:
    yield passes("before", True)
    raise ValueError("broken")


def dies(rig: Rig) -> Iterator[Line]:
    yield passes("before", True)
    os._exit(3)


def hangs(rig: Rig) -> Iterator[Line]:
    yield passes("before", True)
    while True:
        os.sched_yield()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("check", "seconds", "figure"),
    [
        (raises, 60, "ValueError: broken"),
        (dies, 60, "its process ended with 3"),
        (hangs, 5, "no answer for 5 s"),
    ],
)
def test_a_check_that_breaks_is_a_line_that_fails(
    monkeypatch: pytest.MonkeyPatch, check: table.Check, seconds: float, figure: str
) -> None:
    monkeypatch.setitem(CHECKS, "broken", check)
    lines = list(run("broken", SETTINGS, seconds))
    assert [(line.verdict, line.what, line.figure) for line in lines][-1] == (
        "FAIL",
        "broken",
        figure,
    )


def test_a_check_may_be_skipped_for_a_named_condition_only() -> None:
    assert table.skipped("a", NO_DEVICE).verdict == "SKIP"
    with pytest.raises(AssertionError):
        table.skipped("a", "I had no time")
