"""Trains on ranks of several nodes for the rigs in `nodes.py` and `peers.py`, and writes
every promise into the diary of its rank.
"""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptd.agent import Agent, Pending, per_rank
from ckptd.shared.errors import CkptdError
from ckptd.shared.system import failpoints
from tests.support.trainers import JOB, Diary, drifting

ROWS, COLUMNS, DRIFT = 24, 50, 480
KINDS = [(True, True)] * 3 + [(False, True)] * 6 + [(True, False), (False, False)]
"""`persist` and `replicate` of the snapshots that `train_with_copies` takes, each as often
as it is here.
"""


def state_of(step: int) -> dict[str, Any]:
    """Return the state of this rank after `step`: two sharded tensors, one with few words
    that change at a step; a replicated tensor; one that seldom changes; and values of the
    rank's own.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + step
    drift = drifting(step, DRIFT * COLUMNS).reshape(DRIFT, COLUMNS)

    def sharded(tensor: torch.Tensor) -> DTensor:
        here = list(tensor.chunk(world_size))
        mine = here[rank] if rank < len(here) else tensor[:0]
        return DTensor.from_local(
            mine.clone(), mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride(),
            run_check=False,
        )  # fmt: skip

    return {
        "sharded": sharded(whole),
        "drift": sharded(drift),
        "replicated": torch.full((5000,), float(step)),
        "seldom": torch.full((40_000,), float(step // 5)),
        "step": step,
        "own": per_rank((rank, step)),
    }


def check(state: dict[str, Any], step: int) -> None:
    """Assert that a state that came back is, bit for bit, the one of this step, on
    whatever number of ranks it was saved.
    """
    wanted = state_of(step)
    for key in ("sharded", "drift"):
        assert torch.equal(state[key].to_local(), wanted[key].to_local()), (
            f"{key} differs at step {step}"
        )
    for key in ("replicated", "seldom"):
        assert torch.equal(state[key], wanted[key]), f"{key} differs at step {step}"
    assert state["step"] == step, (state["step"], step)


def recover(socket: Path, diary: Diary) -> tuple[Agent, int]:
    """Return an agent that has recovered, and the step that came back, or -1."""
    agent = Agent(JOB, socket=socket)
    state = state_of(-1)
    found = agent.recover(state, on_reshape=lambda key, values: values[0])
    if found is None:
        diary.note("recovered", 0, -1)
        return agent, -1
    assert not found.passed_over, found.passed_over
    check(state, found.step)
    diary.note("recovered", found.attempt, found.step)
    if found.source == "storage":
        diary.note("durable", found.attempt, found.step)
    return agent, found.step


def train(
    socket: Path, diary: Diary, steps: int, armed: str, persist: bool, wait_every: int, pause: float
) -> str:
    """Recover, then take so many steps. Return "" or the error that ended the training."""
    failpoints.arm(armed)
    agent, last = recover(socket, diary)
    pending = []
    try:
        for step in range(last + 1, last + 1 + steps):
            taken = agent.snapshot(state_of(step), step=step, persist=persist)
            if taken.state in ("sealed", "durable"):
                diary.note("sealed", taken.attempt, step)
                pending.append(taken)
            if wait_every and step % wait_every == 0 and persist:
                taken.wait("durable", timeout=60)
            for done in [each for each in pending if each.state == "durable"]:
                diary.note("durable", done.attempt, done.step)
                pending.remove(done)
            dist.all_reduce(torch.ones(1))
            time.sleep(pause)
    except (
        CkptdError,
        RuntimeError,
        TimeoutError,
    ) as error:  # another rank or a daemon has died: a real training would end here
        return repr(error)
    return ""


def train_with_copies(socket: Path, diary: Diary, armed: str, seed: int, pause: float) -> str:
    """Recover, then take snapshots of mixed kinds, as the seed says, until an error, which
    is returned. The seed must be the same on all ranks.
    """
    failpoints.arm(armed)
    agent, last = recover(socket, diary)
    chance, pending = Random(seed), list[Pending]()
    try:
        for step in itertools.count(last + 1):
            persist, replicate = chance.choice(KINDS)
            state = state_of(step)
            taken = agent.snapshot(state, step=step, persist=persist, replicate=replicate)
            if taken.state in ("sealed", "durable"):
                diary.note("sealed", taken.attempt, step)
                pending.append(taken)
                threading.Thread(target=_note_copies, args=(taken, diary), daemon=True).start()
            if persist and chance.random() < 0.3:
                taken.wait("durable", timeout=60)
            for done in [each for each in pending if each.state == "durable"]:
                diary.note("durable", done.attempt, done.step)
                pending.remove(done)
            dist.all_reduce(torch.ones(1))
            time.sleep(pause)
    except (CkptdError, RuntimeError, TimeoutError) as error:
        return repr(error)
    raise AssertionError("the steps do not end")


def _note_copies(taken: Pending, diary: Diary) -> None:
    """Write into the diary that a snapshot is replicated, as soon as that is known."""
    try:
        taken.wait("replicated", timeout=60)
    except (CkptdError, TimeoutError):
        return
    diary.note("replicated", taken.attempt, taken.step)


def close_after_a_step(socket: Path, diary: Diary) -> None:
    """Recover, make one step durable, and close the agent."""
    agent, last = recover(socket, diary)
    agent.snapshot(state_of(last + 1), step=last + 1).wait("durable", timeout=60)
    agent.close()
