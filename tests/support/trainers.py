"""Trainers for tests, and the states that they save.

The state of a step follows from its number alone, so that any process can tell what a
recovery must return, bit for bit.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from ckptd.agent import Agent
from ckptd.shared.system import failpoints
from tests.support.forks import context

JOB = "job"


def drifting(step: int, size: int) -> torch.Tensor:
    """Return random numbers, one in 97 with another value than at the step before.

    A chunk of them is stored as a delta, the more deltas in a row, the longer its
    trainer lives.
    """
    made = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return made + (torch.arange(size) + step) // 97


def _drifting(size: int) -> int:
    """Return how many numbers drift in a state of this size.

    They are the largest part of the first file, so that it is worth a link, and never
    too few for a delta.
    """
    return max(2 * size, 4000)


def expected(step: int, size: int = 50_000) -> dict[str, Any]:
    """Return the state after `step`: float and half tensors, a transposed view, plain
    values, a tensor that seldom changes, and one in which few words change at a step.
    """
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(size, generator=generator)
    return {
        "weight": weight,
        "half": torch.randn(size // 10, generator=generator).bfloat16(),
        "matrix": torch.randn(64, 33, generator=generator).t(),
        "frozen": torch.randn(
            3000, dtype=torch.complex128, generator=torch.Generator().manual_seed(1000 + step // 5)
        ),
        "drift": drifting(step, _drifting(size)),
        "count": torch.tensor(step),
        "step": step,
        "history": list(range(step)),
    }


def blank(size: int = 50_000) -> dict[str, Any]:
    """Return a state to recover into."""
    return {
        "weight": torch.zeros(size),
        "half": torch.zeros(size // 10).bfloat16(),
        "matrix": torch.zeros(64, 33).t(),
        "frozen": torch.zeros(3000, dtype=torch.complex128),
        "drift": torch.zeros(_drifting(size), dtype=torch.float64),
        "count": torch.tensor(-1),
        "step": -1,
        "history": [],
    }


def assert_equal(state: dict[str, Any], step: int, size: int = 50_000) -> None:
    """Assert that the state is, bit for bit, `expected(step)`."""
    wanted = expected(step, size)
    assert set(state) == set(wanted)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert state[key].dtype == value.dtype
            assert torch.equal(state[key], value), f"{key} differs at step {step}"
        else:
            assert state[key] == value, f"{key} differs at step {step}"


class Diary:
    """A file of the promises that a trainer got. It survives SIGKILL of the trainer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._notes: list[tuple[str, tuple[int, int]]] = []

    def __reduce__(self) -> tuple[type[Diary], tuple[Path]]:
        """Pickle the path only, so that the receiving process reads the file again."""
        return Diary, (self.path,)

    def note(self, word: str, attempt: int, step: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{word} {attempt} {step}\n")

    def read(self) -> list[tuple[str, tuple[int, int]]]:
        """Return the word and the (attempt, step) of every note so far."""
        if self.path.exists() and self.path.stat().st_size > self._position:
            with self.path.open() as file:
                file.seek(self._position)
                added = file.read()
            added = added[: added.rfind("\n") + 1]
            self._position += len(added)
            for line in added.splitlines():
                word, attempt, step = line.split()
                self._notes.append((word, (int(attempt), int(step))))
        return self._notes

    def count(self, word: str) -> int:
        return sum(found == word for found, _ in self.read())

    def newest(self, *words: str) -> tuple[int, int]:
        """Return the highest (attempt, step) with one of these words, or (0, -1) if
        there is none.
        """
        return max((key for word, key in self.read() if word in words), default=(0, -1))


def vanish(agent: Agent) -> None:
    """End a trainer of this process as SIGKILL would: it sends nothing, and its locks
    are released. No call of the public face does that.
    """
    agent._link.let_go()


def begin(socket: Path, size: int = 50_000) -> tuple[Agent, tuple[int, int] | None]:
    """Return an agent that has recovered, and the (attempt, step) that came back, or
    None. The state is compared bit for bit.
    """
    agent = Agent(JOB, socket=socket)
    state = blank(size)
    recovered = agent.recover(state)
    if recovered is None:
        return agent, None
    assert recovered.step is not None
    assert_equal(state, recovered.step, size)
    return agent, (recovered.attempt, recovered.step)


def train(
    socket: Path,
    diary: Diary,
    first: int,
    last: int,
    armed: str = "",
    size: int = 50_000,
    wait_every: int = 2,
    linger: bool = True,
) -> None:
    """Recover, then snapshot steps `first` to `last`, and wait for every
    `wait_every`-th to be durable. Then stay alive to be killed.
    """
    failpoints.arm(armed)
    agent, recovered = begin(socket, size)
    diary.note("recovered", *(recovered or (0, -1)))
    for step in range(first, last + 1):
        state = expected(step, size)
        pending = agent.snapshot(state, step=step)
        state["weight"].zero_()  # changes after the call must not reach the snapshot
        if pending.state in ("sealed", "durable"):
            diary.note("sealed", pending.attempt, step)
        if step % wait_every == 0 and pending.state != "failed":
            pending.wait("durable", timeout=120)
            diary.note("durable", pending.attempt, step)
    diary.note("finished", agent.attempt, last)
    if linger:
        time.sleep(600)
    agent.close()


def start(*arguments: Any, **options: Any) -> Any:
    """Start a trainer process, and return it.

    The arguments are those of `train`; `environ` has variables that it needs.
    """
    process = context().Process(target=_train, args=(arguments, options), daemon=True)
    process.start()
    return process


def _train(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    os.environ.update(options.pop("environ", {}))
    torch.set_num_threads(1)
    train(*arguments, **options)
