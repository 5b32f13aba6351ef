"""Tests runs of Ray Train: workers that are killed, the reference that Ray keeps, and
what is refused.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Checkpoint
from ckptd.integrations.ray import attach
from ckptd.shared.errors import InvalidRequest
from tests.frameworks.kills import EXAMPLES, Example
from tests.support.daemons import Daemon

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)

DRIVER = """
import json, os, signal, sys
import ray, ray.train, ray.train.torch, torch
from ckptd.integrations.ray import attach
from ckptd.shared.errors import CkptdError

place, plan = sys.argv[1], json.loads(sys.argv[2])

def refusal(call):
    try:
        call()
    except CkptdError as error:
        return str(error)
    return ""

def train(config):
    context = ray.train.get_context()
    rank, lives = context.get_world_rank(), f"{place}/life-{context.get_world_rank()}"
    with open(lives, "a") as file:
        file.write("x")
    life = os.path.getsize(lives)
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = attach({"model": model, "optim": optimizer}, every_steps=2)
    second = refusal(lambda: attach({}, every_steps=2))
    with run:
        found = run.recovered and [run.recovered.step, run.recovered.source]
        seen, state = [], [float(value.sum()).hex() for value in model.state_dict().values()]
        for step in run.steps(plan["steps"]):
            if life == 1 and rank in plan["die"] and step == 5:
                run.pending.wait("durable")  # of step 4
                os.kill(os.getpid(), signal.SIGKILL)
            torch.manual_seed(step)
            model(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(step)
            if step % 2 == 0:
                run.report({"at": step})
        state = [value.flatten().tolist() for value in model.state_dict().values()]
    with open(f"{place}/found-{rank}-{life}", "w") as file:
        json.dump([found, seen, second, state], file)

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
trainer = ray.train.torch.TorchTrainer(
    train,
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(
        name="my run",
        storage_path=f"{place}/ray",
        failure_config=ray.train.FailureConfig(max_failures=1),
    ),
)
try:
    result = trainer.fit()
except Exception as error:
    told = [None, str(error)]
else:
    told = [result.checkpoint.get_metadata()["ckptd"], result.metrics]
with open(f"{place}/told", "w") as file:
    json.dump(told, file)
"""


def drive(daemon: Daemon, place: Path, **plan: Any) -> Any:
    """Run a driver of Ray Train, and return what it has written."""
    environ = {**os.environ, "CKPTD_SOCKET": str(daemon.home.socket), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(place), json.dumps({"die": [], "steps": 8} | plan)],
        env=environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((place / "told").read_text())


def found(place: Path, rank: int, life: int) -> Any:
    return json.loads((place / f"found-{rank}-{life}").read_text())


@pytest.mark.parametrize("die", [[1], [0, 1]])
def test_workers_that_ray_starts_again_recover_from_memory(
    daemon: Daemon, tmp_path: Path, die: list[int]
) -> None:
    """The reference that Ray keeps is the path of a checkpoint, with the metrics of its
    step.
    """
    reference, metrics = drive(daemon, tmp_path, die=die)
    again = [found(tmp_path, rank, 2) for rank in (0, 1)]
    assert [each[:2] for each in again] == [[[4, "memory"], [5, 6, 7]]] * 2
    assert again[0][3] == again[1][3]
    root = daemon.home.root
    assert (reference, metrics) == (
        {
            "root": str(root),
            "job": "my-run",
            "tag": "step-00000006.a0002",
            "step": 6,
            "attempt": 2,
            "path": f"{root}/my-run/step-00000006.a0002",
        },
        {"at": 6},
    )
    with Checkpoint.open(reference["path"]) as checkpoint:
        assert (checkpoint.step, checkpoint.metrics) == (6, {"at": 6.0})
    with Checkpoint.open(root / "my-run") as newest:
        assert newest.step == 7
        weight, bias = newest.tensor("model.weight"), newest.tensor("model.bias")
    assert [weight.flatten().tolist(), bias.tolist()] == again[0][3]


def test_a_second_attach_is_refused_and_a_lost_root_is_not_silent(
    daemon: Daemon, tmp_path: Path
) -> None:
    """The run is finished, and its checkpoints are deleted: Ray still refers to one."""
    _, metrics = drive(daemon, tmp_path)
    assert metrics == {"at": 6}
    _, seen, second, _ = found(tmp_path, 0, 1)
    assert seen == list(range(8))
    assert second == "ckptd is attached to this worker already: call attach() once"
    job = daemon.home.root / "my-run"
    job.rename(job.with_name("elsewhere"))
    nothing, error = drive(daemon, tmp_path)
    assert nothing is None
    assert (
        f"Ray refers to the snapshot {job}/step-00000006.a0001, and ckptd finds nothing to recover"
    ) in error


def test_attach_is_refused_outside_a_worker() -> None:
    with pytest.raises(InvalidRequest, match=r"^attach\(\) is called outside a worker of Ray "):
        attach({"w": torch.zeros(1)}, every_steps=2)
    with pytest.raises(InvalidRequest, match="^give either every_steps=, a number of steps, or "):
        attach({"w": torch.zeros(1)})


def test_the_example_is_exact_after_a_kill() -> None:
    found = Example(EXAMPLES / "train_ray.py", 12, random.Random(3)).run(1)
    assert (found.problems, found.steps, found.kills) == ([], 12, 1)
