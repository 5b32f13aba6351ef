"""Tests that SIGTERM to whole process groups, as torchrun and Slurm send it, costs no
step, although the workers of the data loader get it too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.agent import Checkpoint
from tests.support import scripts
from tests.support.daemons import Daemon
from tests.support.rooms import ROOT

pytestmark = pytest.mark.usefixtures("processes")

TRAINING = """
import os, subprocess, sys, time
import torch
from torch.utils.data import DataLoader
import ckptd

loader = DataLoader(torch.randn(100, 4), num_workers=2, persistent_workers=True)
state = {"model": torch.nn.Linear(4, 4)}
if sys.argv[1] == "Batches":
    loader = state["data"] = ckptd.Batches(loader)
with ckptd.training(state, every=50) as run:
    for step, batch in zip(run.steps(90), loader):
        if step == 16:
            group = f"-{os.getpgrp()}"
            subprocess.run(["kill", "-TERM", "--", group], start_new_session=True)
            time.sleep(0.3)  # the workers die in this step
"""
RANK = """
import os, signal, time
import torch
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")

def train(step):
    if step == 16 and torch.distributed.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun, which signals the groups of its ranks
    time.sleep(0.1 if step >= 16 else 0)
    print(f"step {step}.", flush=True)
"""


@pytest.mark.parametrize("loader", ["Batches", "DataLoader"])
def test_a_training_saves_the_step_in_which_its_group_gets_sigterm(
    daemon: Daemon, tmp_path: Path, loader: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    environment = {**os.environ, "CKPTD_SOCKET": str(daemon.home.socket), "CKPTD_JOB": "job"}
    ended = scripts.run(script, loader, environment=environment)
    assert ended.code == 143, ended.output
    last = "SIGTERM: step 16 is saved, and is the last one of this process"
    assert ended.output.splitlines()[-1] == last
    with Checkpoint.open(daemon.home.root / "job") as found:
        assert found.step == 16


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_of_the_page_about_slurm_saves_its_last_step_under_torchrun(
    daemon: Daemon, tmp_path: Path, ranks: int
) -> None:
    page = (ROOT / "docs/how-to/slurm.md").read_text()
    (loop,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert "  # and train\n" in loop
    script = tmp_path / "train.py"
    script.write_text(RANK + loop.replace("  # and train\n", '; train(state["step"])\n'))
    environment = {
        **os.environ,
        "CKPTD_SOCKET": str(daemon.home.socket),
        "CKPTD_JOB": "job",
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", script],
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
    )
    steps = [int(found) for found in re.findall(r"^step (\d+)\.$", ended.stdout, re.MULTILINE)]
    assert steps.count(max(steps)) == ranks, ended.stderr
    assert 16 <= max(steps) < 30
    with Checkpoint.open(daemon.home.root / "job") as found:
        assert found.step == max(steps)
