"""The code of the ranks in crash tests.

They save a state that follows from the step's number alone, small or sharded by FSDP2.

In the small state one tensor is sharded over the ranks, two are the same on all ranks,
and some values are each rank's own. `extra` changes its shape at every hundredth step,
so that all ranks plan again there. The functions before "under torchrun" are for
`tests.support.ranks`: a rank keeps its agent and its pendings in `HERE`. Run as a
module, this is the training script of `rank_kills.py`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ckptd.agent import Agent, CkptdError, per_rank
from ckptd.shared.system import failpoints
from ckptd.shared.wire import messages as m
from tests.support.ranks import HERE
from tests.support.trainers import JOB, Diary

SIZE = 40_002  # not divisible by 4: the shards differ in size
LAYERS, COLUMNS, BLOCK = 4, 512, 128

# Torch's store resolves each peer's name: 5 s without a DNS server.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

Outcome = tuple[str, str, str]
"""How a snapshot ended: its state, the kind of its error, and the message."""


def whole(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors that the ranks share, each whole."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(SIZE, generator=generator),
        "bias": torch.randn(SIZE // 10, generator=generator),
        "extra": torch.randn(step // 100 + 1, generator=generator),
    }


def own(step: int, rank: int) -> dict[str, Any]:
    """Return the values that belong to this rank alone."""
    return {"rank": rank, "step": step, "tensor": torch.full((3 + rank,), 10.0 * step + rank)}


def state_of(step: int) -> dict[str, Any]:
    """Return the whole state as this rank saves it."""
    made = whole(step)
    return {
        **made,
        "weight": _shard(made["weight"]),
        "step": step,
        "own": per_rank(own(step, dist.get_rank())),
    }


def blank(step: int) -> dict[str, Any]:
    """Return a state into which this step can be recovered."""
    made = {name: torch.zeros_like(tensor) for name, tensor in whole(step).items()}
    mine = {"rank": -1, "step": -1, "tensor": torch.zeros(3 + dist.get_rank())}
    return {**made, "weight": _shard(made["weight"]), "step": -1, "own": per_rank(mine)}


def _shard(tensor: torch.Tensor) -> DTensor:
    if "mesh" not in HERE:
        HERE["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    mesh: DeviceMesh = HERE["mesh"]
    local = tensor.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def differences(state: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return the keys under which two states of this rank are not bit for bit the same."""
    return [key for key in wanted if not _same(state[key], wanted[key])]


def _same(one: Any, other: Any) -> bool:
    # For the contents of per_rank.
    one, other = (getattr(value, "value", value) for value in (one, other))
    if isinstance(one, DTensor):
        return torch.equal(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


# -- commands to the ranks


def begin(socket: Path, job: str) -> int:
    """Make the agent for the following commands. Return its attempt."""
    # Some tests leave the ranks of the attempt before alive.
    agent = HERE["agent"] = Agent(job, socket=socket, takeover=True)
    HERE["pendings"] = {}
    agent.prepare(state_of(1))
    # So that no later snapshot spends its stall budget on new slots.
    agent._link.handovers.wait_for_threads()
    return agent.attempt


def arm(specification: str) -> None:
    failpoints.arm(specification)


def stop_at(point: str) -> None:
    """Send SIGSTOP to this process once, when it reaches the point."""

    def stop() -> bool:
        failpoints.arm("")
        os.kill(os.getpid(), signal.SIGSTOP)
        return False

    failpoints.arm(f"{point}=hang")
    failpoints._armed[point] = failpoints._Point(stop, 0)


def take(
    steps: Sequence[int], pause: float = 0.0, tag: str | None = None, change: str = ""
) -> list[str]:
    """Take one snapshot after another without waiting.

    Return their states right after each call.

    pause: seconds before the first snapshot. change: adds a "tensor" or a "lambda" to
    the state.
    """
    time.sleep(pause)
    found = []
    for step in steps:
        state = state_of(step)
        if change:
            state["more"] = torch.ones(5) if change == "tensor" else lambda: None
        pending = HERE["pendings"][step] = HERE["agent"].snapshot(
            state, step=step, tag=tag, on_error="log"
        )
        state["weight"].to_local().zero_()  # changes after the call must not reach the snapshot
        state["bias"].zero_()
        found.append(pending.state)
    return found


def ends(steps: Sequence[int], seconds: float = 60.0) -> list[Outcome]:
    """Wait until each snapshot is durable or has failed, and return the outcomes.

    A timeout is an outcome as well.
    """
    found = []
    for step in steps:
        pending = HERE["pendings"][step]
        try:
            pending.wait("durable", timeout=seconds)
        except (CkptdError, TimeoutError) as error:
            found.append((pending.state, type(error).__name__, str(error)))
        else:
            found.append((pending.state, "", ""))
    return found


def recover(like: int, wrong: bool = False) -> tuple[int, str, list[str], list[str]]:
    """Recover into a blank state that fits step `like`.

    Return the recovered step, its source, the candidates that were passed over, and the
    keys that differ from what was captured. With `wrong`, the state fits no checkpoint.
    In that case return -1, the kind of the error, its message, and the keys that were
    overwritten nevertheless.
    """
    state = blank(like)
    if wrong:
        state["bias"] = torch.zeros(7)
    before = {**blank(like), "bias": torch.zeros_like(state["bias"])}
    try:
        found = HERE["agent"].recover(state)
    except CkptdError as error:
        return -1, type(error).__name__, [str(error)], differences(state, before)
    assert found is not None
    return found.step, found.source, found.passed_over, differences(state, state_of(found.step))


def hand_over(step: int) -> str:
    """Report a seal to the daemon, whatever has become of the snapshot.

    Return the kind of the error, or "".
    """
    agent, pending = HERE["agent"], HERE["pendings"][step]
    try:
        agent._link.client.call(
            lambda n: m.Seal(id=n, segment=pending.segment, attempt=pending.attempt, step=step),
            m.Sealed,
            60,
        )
    except CkptdError as error:
        return type(error).__name__
    return ""


def close() -> str:
    """Close the agent. Return the kind of the error, or ""."""
    try:
        HERE["agent"].close(timeout=60)
    except CkptdError as error:
        return type(error).__name__
    return ""


# -- under torchrun


def base(number: int, first: int, last: int) -> torch.Tensor:
    """Return rows `first` to `last` of a tensor at step 0.

    They are made in blocks, so that a rank makes little more than its own rows.
    """
    blocks = range(first // BLOCK, -(-last // BLOCK))
    made = [
        torch.randn(BLOCK, COLUMNS, generator=torch.Generator().manual_seed((number << 32) + block))
        for block in blocks
    ]
    return torch.cat([torch.empty(0, COLUMNS), *made])[first - blocks.start * BLOCK :][
        : last - first
    ].clone()


class Training:
    """FSDP2 parameters and Adam's moments, of at least `megabytes` on each of four
    ranks.

    At step n, every element is its value at step 0 plus n. `how` is "fsdp" on any
    number of ranks, or "hsdp" or "tp" (with FSDP2) on two times two ranks.
    """

    def __init__(self, megabytes: int, how: str = "fsdp") -> None:
        # 4 bytes an element, 4 ranks, a parameter and two moments
        rows = megabytes * 1_000_000 // (3 * COLUMNS * LAYERS) + 1
        with torch.device("meta"):
            layers = [
                torch.nn.Linear(COLUMNS, rows + number, bias=False) for number in range(LAYERS)
            ]
        self.model = torch.nn.Sequential(*layers)
        world_size = dist.get_world_size()
        shape = (world_size,) if how == "fsdp" else (2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
        if how == "tp":
            ways: dict[str, ParallelStyle] = {
                str(number): (ColwiseParallel, RowwiseParallel)[number % 2]()
                for number in range(LAYERS)
            }
            parallelize_module(self.model, mesh["inner"], ways)
            mesh = mesh["outer"]
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        self.model.to_empty(device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)

    def state(self, step: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "step": step,
            "own": per_rank((dist.get_rank(), step)),
        }

    def tensors(self) -> list[DTensor]:
        weights: list[Any] = list(self.model.parameters())
        return weights + [
            self.optimizer.state[weight][name]
            for name in ("exp_avg", "exp_avg_sq")
            for weight in weights
        ]

    def bases(self) -> list[torch.Tensor]:
        """Return this rank's rows of each tensor at step 0."""
        found = []
        for number, tensor in enumerate(self.tensors()):
            share = -(-tensor.shape[0] // dist.get_world_size())
            first, last = (
                min(rank * share, tensor.shape[0])
                for rank in (dist.get_rank(), dist.get_rank() + 1)
            )
            found.append(base(number, first, last))
        return found

    def begin(self) -> None:
        """Make the optimizer's state, as its first step would."""
        for weight in self.model.parameters():
            moments = {
                name: torch.zeros_like(weight.detach()) for name in ("exp_avg", "exp_avg_sq")
            }
            self.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}

    def go_to(self, step: int, bases: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor, start in zip(self.tensors(), bases, strict=True):
                torch.add(start, step, out=tensor.to_local())


def train(socket: Path, diary: Diary, megabytes: int) -> None:
    """Recover, check, then snapshot step after step for ever, mostly without waiting,
    and write each promise into the diary.
    """
    training = Training(megabytes)
    agent = Agent(JOB, socket=socket)
    state = training.state(-1)
    recovered = agent.recover(state)
    if recovered is None:
        training.begin()
    bases, step = training.bases(), 0
    if recovered is not None:
        step = recovered.step
        assert not recovered.passed_over, recovered
        wanted = {"step": step, "own": (dist.get_rank(), step)}
        assert differences(state, wanted) == [], (
            f"{state['step']}, {state['own']} came back as step {step}"
        )
        for number, (tensor, start) in enumerate(zip(training.tensors(), bases, strict=True)):
            assert torch.equal(tensor.to_local(), start + step), (
                f"tensor {number} is not what was captured at step {step}"
            )
        diary.note("recovered", recovered.attempt, step)
        step += 1
    pendings = []
    while True:
        training.go_to(step, bases)
        pending = agent.snapshot(training.state(step), step=step)
        if pending.state in ("sealed", "durable"):
            diary.note("sealed", pending.attempt, step)
            pendings.append(pending)
            # Now and then a long step, so that the daemon is done before the next
            # snapshot begins.
            if step % 3 == 0:
                pending.wait("durable")
        for done in [pending for pending in pendings if pending.state == "durable"]:
            diary.note("durable", done.attempt, done.step)
            pendings.remove(done)
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
        step += 1


def recover_whole(socket: Path, megabytes: int, how: str, step: int, source: str) -> None:
    """Recover into this mesh.

    Each tensor, gathered, must equal what four ranks held at that step.
    """
    training = Training(megabytes, how)
    agent = Agent(JOB, socket=socket)
    state = training.state(-1)
    recovered = agent.recover(state, on_reshape=lambda key, found: (key, *found))
    assert recovered is not None
    assert (recovered.step, recovered.source, recovered.passed_over) == (step, source, [])
    own = (
        (dist.get_rank(), step)
        if dist.get_world_size() == 4
        else ("own", *((rank, step) for rank in range(4)))
    )
    assert differences(state, {"step": step, "own": own}) == []
    for number, tensor in enumerate(training.tensors()):
        wanted = base(number, 0, tensor.shape[0]) + step
        assert torch.equal(tensor.full_tensor(), wanted), (
            f"tensor {number} is not what was captured at step {step}"
        )
    agent.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), Diary(Path(f"{sys.argv[2]}.{dist.get_rank()}")), int(sys.argv[3]))
