"""Tests the rig that kills the examples of the frameworks, and kills the plain one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.frameworks.kills import EXAMPLES, Example, compare

WHOLE = ["0 0x1.0p+0", "1 0x1.8p+0", "2 0x1.cp+0", "hash ab"]
FORGETFUL = """
import os, sys, time
losses = open(sys.argv[-1], "a")
for step in range(8):
    print(step, (step + os.getpid() * 1e-9).hex(), file=losses, flush=True)
    time.sleep(0.1)
print("hash", "ab", file=losses, flush=True)
"""


def test_equal_lives_have_no_difference() -> None:
    assert compare(WHOLE, [*WHOLE[:2], WHOLE[1], *WHOLE[2:]]) == []


def test_another_loss_and_a_missing_step_are_named() -> None:
    assert compare(WHOLE, [WHOLE[0], "2 0x1.0p+0", "3 0x1.0p+0"]) == [
        "2: 0x1.0p+0 instead of 0x1.cp+0",
        "3: 0x1.0p+0 instead of nothing",
        "1 is missing",
        "hash is missing",
    ]


@pytest.mark.usefixtures("processes")
def test_a_run_that_is_not_exact_is_found(tmp_path: Path) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    found = Example(script, 8, random.Random(1)).run(2)
    assert len([one for one in found.problems if " instead of " in one]) > 2


@pytest.mark.usefixtures("processes")
def test_a_run_that_begins_again_at_its_first_step_is_found(tmp_path: Path) -> None:
    """Each life has the losses of the uninterrupted run."""
    code = FORGETFUL.replace("os.getpid() * 1e-9", "0.5").replace("range(8)", "range(40)")

    script = tmp_path / "again.py"
    script.write_text(code)
    found = Example(script, 40, random.Random(3)).run(4)
    assert found.problems
    assert all(problem.endswith("began at the first one") for problem in found.problems)


@pytest.mark.usefixtures("processes")
def test_the_plain_example_is_exact_after_a_kill() -> None:
    found = Example(EXAMPLES / "plain.py", 30, random.Random(2)).run(2)
    assert (found.problems, found.steps, found.kills) == ([], 30, 2)
