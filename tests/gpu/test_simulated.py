"""Tests the acceptance script itself, on simulated lanes, so that it works on the day
when there is a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.gpu import table
from tests.gpu.__main__ import FIRST
from tests.gpu.faults import FAULTS, WITHOUT, Fault, change, planted
from tests.gpu.rig import Rig
from tests.gpu.table import (
    CHECKS,
    CONDITIONS,
    NO_DEVICE,
    FaultNotPlanted,
    Line,
    passes,
    run,
    skipped,
)

SETTINGS = {"simulated": True, "gigabytes": 0.002, "kills": 1}


HIDES = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in {} else find(name, path, target)

PathFinder.find_spec = find_spec
"""


def development_packages() -> set[str]:
    """Return the packages that ckptd does not need, as names of modules."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = {
        re.split(r"[\[<>=;]", requirement)[0].replace("-", "_")
        for extra in set(extras) - {"torch"}
        for requirement in extras[extra]
    }
    assert {"pytest", "hypothesis", "rich"} < found
    return found


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="only without an accelerator")
def test_every_check_passes_or_is_skipped_by_name(tmp_path: Path) -> None:
    """The script runs without the packages that only developers of ckptd install."""
    file = tmp_path / "lines.json"
    (tmp_path / "sitecustomize.py").write_text(HIDES.format(development_packages()))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--json", str(file)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    lines = json.loads(file.read_text())
    assert [line for line in lines if line["verdict"] == "FAIL"] == [], ended.stdout + ended.stderr
    assert ended.returncode == 0
    assert {line["part"] for line in lines} == set(CHECKS) >= set(FIRST)
    assert {line["figure"] for line in lines if line["verdict"] == "SKIP"} == set(CONDITIONS)
    # Each line has a fault that turns it red, and no fault names another line.
    found: dict[str, set[tuple[str, str]]] = {"PASS": set(), "SKIP": set()}
    for line in lines:
        if not {line["part"], line["what"]} & set(WITHOUT):
            found[line["verdict"]].add((line["part"], line["what"]))
    red = {(fault.check, what) for fault in FAULTS for what in fault.red}
    here = {(fault.check, what) for fault in FAULTS if fault.simulated for what in fault.red}
    assert found["PASS"] | found["SKIP"] == red
    assert found["PASS"] == here - found["SKIP"]
    assert len(found["PASS"]) >= 25
    assert "simulated lanes. Rates and the driver are not tested" in ended.stdout


def test_every_check_has_a_fault_or_a_reason_to_have_none() -> None:
    assert set(CHECKS) == {fault.check for fault in FAULTS} | (set(CHECKS) & set(WITHOUT))
    assert all(fault.red and all(plant.__doc__ for plant in fault.plants) for fault in FAULTS)


def test_faults_of_a_gpu_change_code_that_is_there() -> None:
    rig: Any = SimpleNamespace(simulated=False)
    for plant in {plant for fault in FAULTS for plant in fault.plants}:
        try:
            plant(rig)
        finally:
            patch.stopall()


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="only without an accelerator")
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.simulated], ids=str)
def test_each_check_turns_red_by_its_fault(fault: Fault) -> None:
    line = planted(fault, SETTINGS)
    assert line.verdict == "PASS", line.figure


def gone(rig: Rig) -> None:
    change(table, "no such name", None)


@pytest.mark.usefixtures("processes")
def test_a_fault_whose_code_is_gone_is_an_error() -> None:
    with pytest.raises(FaultNotPlanted, match="env: AttributeError"):
        planted(Fault("env", [gone], ["device"]), SETTINGS)


@pytest.mark.usefixtures("processes")
def test_a_check_that_its_fault_leaves_green_is_a_line_that_fails() -> None:
    line = planted(Fault("env", [], ["device"]), SETTINGS)
    assert (line.verdict, line.figure) == ("FAIL", "red: 0 lines; not red: ['device']")


def wrongly_skipped(rig: Rig) -> Iterator[Line]:
    yield skipped("here", NO_DEVICE)


@pytest.mark.usefixtures("processes")
def test_a_skip_whose_condition_does_not_hold_is_a_line_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CHECKS, "here", wrongly_skipped)
    monkeypatch.setitem(table.CONDITIONS, NO_DEVICE, lambda: False)
    (line,) = run("here", SETTINGS)
    assert (line.verdict, line.figure) == ("FAIL", "was skipped: needs a GPU, which is not so here")


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
