"""Tests engines of DeepSpeed on the CPU: every stage of ZeRO is killed and resumed, and
recovered on another number of ranks.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptd.agent import Checkpoint
from ckptd.integrations.deepspeed import attach
from ckptd.shared.errors import InvalidRequest
from tests.frameworks.kills import EXAMPLES, Example, lines
from tests.support.daemons import Daemon
from tests.support.launcher import LAUNCHER

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.timeout(900)  # the first use builds an extension

REFUSALS = """
import argparse, sys
import torch
sys.path.insert(0, sys.argv[1])
import train_deepspeed as example
import deepspeed
from ckptd.integrations.deepspeed import attach
from ckptd.shared.errors import InvalidRequest

example.begin()
options = argparse.Namespace(stage=1, bf16=False)

def engine():
    model = torch.nn.Linear(2, 2)
    return deepspeed.initialize(model=model, config=example.configuration(options))[0]

def said(call):
    try:
        call()
    except InvalidRequest as error:
        print("said:", error)

twice, trained = engine(), engine()
attach(twice, every_steps=1)
said(lambda: attach(twice, every_steps=1))
trained.backward(trained(torch.ones(1, 2)).sum())
trained.step()
said(lambda: attach(trained, every_steps=1))
said(lambda: attach(engine(), every_steps=0))
"""


def command(ranks: int, *options: str, steps: int = 10) -> Callable[[Path], list[str]]:
    return lambda losses: [
        sys.executable, str(LAUNCHER), str(ranks), str(EXAMPLES / "train_deepspeed.py"),
        "--steps", str(steps), "--losses", str(losses), *options,
    ]  # fmt: skip


def begin(
    daemon: Daemon, place: Path, job: str, run: Callable[[Path], list[str]], to: str = ""
) -> None:
    """Run the example to its end. Its losses are appended to a file, which has the name of
    the job unless another is given.
    """
    environ = os.environ | {"CKPTD_SOCKET": str(daemon.home.socket), "CKPTD_JOB": job}
    subprocess.run(run(place / (to or job)), env=environ, cwd=place, timeout=300, check=True)


@pytest.mark.parametrize(
    "options",
    [
        ("--stage=0", "--no-bf16"),
        ("--stage=0",),
        ("--stage=1",),
        ("--stage=2", "--no-bf16"),
        ("--stage=3",),
    ],
    ids=" ".join,
)
def test_two_ranks_go_on_as_if_they_had_not_ended(
    daemon: Daemon, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The second start recovers step 3 of 4, and continues with step 4 of 8."""
    for job, steps in (("whole", 8), ("parted", 4), ("parted", 8)):
        begin(daemon, tmp_path, job, command(2, *options, steps=steps))
    whole, parted = lines(tmp_path / "whole"), lines(tmp_path / "parted")
    assert [line.split()[0] for line in parted] == [*"0123", "hash", *"4567", "hash"]
    assert parted[:4] + parted[5:] == whole


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_are_exact_after_a_kill(stage: int) -> None:
    arguments = ("2", str(EXAMPLES / "train_deepspeed.py"), f"--stage={stage}")
    found = Example(LAUNCHER, 10, random.Random(4), arguments).run(1)
    assert (found.problems, found.steps, found.kills) == ([], 10, 1)


def test_the_example_is_exact_after_a_kill() -> None:
    found = Example(EXAMPLES / "train_deepspeed.py", 10, random.Random(5)).run(1)
    assert (found.problems, found.steps, found.kills) == ([], 10, 1)


OVERFLOW = """
import argparse, sys, unittest.mock
sys.path.insert(0, sys.argv[1])
import torch
import train_deepspeed as example
import deepspeed
from ckptd.integrations.deepspeed import attach
from ckptd.shared.errors import InvalidRequest

example.begin()
options = argparse.Namespace(stage=2, bf16=False)
model = torch.nn.Linear(2, 2)
config = example.configuration(options) | {"gradient_accumulation_steps": 1, "scheduler": {}}
engine, *_ = deepspeed.initialize(model=model, config=config)
with attach(engine, every_steps=1) as run:
    for step in run.steps(3):
        taken = engine.basic_optimizer.step
        left_out = (lambda *_: None) if step == 0 else taken
        with unittest.mock.patch.object(engine.basic_optimizer, "step", left_out):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()

second, *_ = deepspeed.initialize(
    model=torch.nn.Linear(2, 2), config=config | {"gradient_accumulation_steps": 2}
)
try:
    with attach(second, every_steps=1, agent=__import__("ckptd").Agent("other")) as run:
        for step in run.steps(3):
            second.backward(second(torch.ones(1, 2)).sum())
            second.step()
except InvalidRequest as error:
    print("said:", error)
"""


def test_a_step_without_state_of_the_optimizer_is_not_saved(daemon: Daemon, tmp_path: Path) -> None:
    """A first step whose gradients overflow leaves none. Later snapshots have it, and one
    between accumulated batches is refused.
    """
    done = subprocess.run(
        [sys.executable, "-c", OVERFLOW, str(EXAMPLES)],
        env=os.environ | {"CKPTD_SOCKET": str(daemon.home.socket), "CKPTD_JOB": "job"},
        cwd=tmp_path, timeout=300, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "step 0 is not saved: the optimizer has no state for some parameters" in done.stderr
    assert "said: step 0 ended after 1 of 2 accumulated batches, whose gradients" in done.stdout
    with Checkpoint.open(daemon.home.root / "job") as found:
        keys = found.keys()
        assert (found.step, "parameters.weight.exp_avg" in keys) == (2, True)


@pytest.mark.parametrize("stage", [1, 3])
def test_another_number_of_ranks_recovers_the_same_weights(
    daemon: Daemon, tmp_path: Path, stage: int
) -> None:
    """The run is finished on two ranks, so that one rank, and three, only hash what they
    have recovered.
    """
    for ranks in (2, 1, 3):
        begin(daemon, tmp_path, "job", command(ranks, f"--stage={stage}", steps=4), f"{ranks}")
    found = {ranks: lines(tmp_path / f"{ranks}") for ranks in (1, 2, 3)}
    assert len(found[2]) == 5
    assert found[1] == found[3] == found[2][4:]
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert checkpoint.step == 3
        moment = checkpoint.tensor("parameters.3.weight.exp_avg_sq")
        assert moment.dtype == torch.float32
        assert moment.shape == (512,)
        assert int((moment > 0).sum()) == 512
        master = checkpoint.tensor("parameters.3.weight.fp32")
        low = checkpoint.tensor("module.3.weight" if stage == 1 else "parameters.3.weight.weight")
        assert torch.equal(master.bfloat16(), low.flatten())


def test_an_engine_that_cannot_be_attached_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^attach\(\) got a Linear; expected the engine, "):
        attach(torch.nn.Linear(1, 1), every_steps=1)
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS, str(EXAMPLES)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("said: ")]
    assert said == [
        "said: ckptd is attached to this engine already: call attach() once",
        "said: this engine has trained already, up to step 0: call attach() before its first batch",
        "said: every_steps is 0; expected a number from 1 up",
    ], done.stderr
