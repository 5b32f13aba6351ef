"""Jobs whose checkpoints are stored as deltas, one of the other, for tests of everything
that reads checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ckptd.agent import Agent
from tests.support.daemons import Home, running

STEPS = (1, 2, 3, 4, 5, 6)
CHAINS = (0, 0, 1, 2, 3, 4)
"""The steps of a job, and the lengths of their chains: a chain begins once there is a
checkpoint outside it.
"""
OPTIONS = ("--codec", "planes", "--keep-last", "0", "--deltas", "small")
SMALL_CHUNKS = {"CKPTD_CHUNK_SIZE": str(1 << 16)}
"""The options and the environment of a daemon that stores as deltas whatever gets
smaller by that.
"""
_WORDS = 200_000


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Return a state in which few words change from one step to the next, everywhere."""
    seeded = torch.Generator().manual_seed(0)
    weights = torch.randn(_WORDS, generator=seeded, dtype=torch.float32)
    for number in range(step):
        weights[number::97] += 0.001
    moments = torch.randn(_WORDS // 4, generator=seeded, dtype=torch.float64)
    moments[::50] += step
    return {
        "weights": weights.to(torch.bfloat16).reshape(-1, 100),
        "moments": moments,
        "step": torch.tensor(step, dtype=torch.int32),
    }


def save(agent: Agent, *steps: int) -> None:
    for step in steps:
        agent.snapshot(state_of(step), step=step).wait("durable", timeout=60)


def tag(step: int) -> str:
    return f"step-{step:08d}.a0001"


def save_job(place: Home, *arguments: str, forked: bool | Callable[[], None] = False) -> None:
    """Save a checkpoint of each of STEPS with a daemon of its own, which `forked` may
    change as `running` says.
    """
    with running(place, *OPTIONS, *arguments, environment=SMALL_CHUNKS, forked=forked):
        agent = Agent("job", socket=place.socket)
        save(agent, *STEPS)
        agent.close()


def assert_state(state: dict[str, torch.Tensor], step: int) -> None:
    """Assert that these are the bits of the state of a step."""
    wanted = state_of(step)
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name
