"""Judges pairs in one process, with one daemon: each pair is a snapshot and a recovery
through the public `Agent`.

The recovery comes from memory or from storage, and runs in this process or in a fresh
one, as the call of the pair says. A share of the pairs is read by a reader before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.agent import Agent
from ckptd.shared.errors import CkptdError
from tests.oracle import reader
from tests.oracle.build import Run
from tests.oracle.judge import End, Restore, Verdict, judge, recovered
from tests.oracle.program import Call, Pair, from_json, to_json


@dataclass(frozen=True, slots=True)
class Task:
    """A recovery for a fresh process: the pair as JSON, the job that has saved it, and
    the step of its last snapshot.
    """

    pair: str
    job: str
    step: int


class Ended(Exception):
    """A process has ended, or has not answered. `how` and `details` say more."""

    def __init__(self, how: str, details: str) -> None:
        super().__init__(how, details)
        self.how, self.details = how, details


class Jobs:
    """Judges pairs, each with an agent and a job of its own.

    `fresh` has another process do a task, and raises Ended if that one ends.
    """

    def __init__(self, socket: Path, fresh: Callable[[Task], End]) -> None:
        self._socket, self._fresh, self._number = socket, fresh, 0

    def judge(self, pair: Pair) -> Verdict:
        self._number += 1
        job, stored, step = f"pair-{self._number}-{pair.seed}", pair.call.source == "storage", 0
        agent = Agent(job, socket=self._socket)

        def save(state: dict[str, Any], number: int) -> None:
            nonlocal step
            step = number
            agent.snapshot(state, step=number, persist=stored, on_error="raise").wait(
                "durable" if stored else "sealed", timeout=60
            )

        def restore(state: dict[str, Any], call: Call) -> None:
            nonlocal agent
            if stored:  # closing frees the snapshot in memory
                agent.close()
                agent = Agent(job, socket=self._socket)
            restoring(agent, step)(state, call)

        def elsewhere() -> End:
            if stored:
                agent.close()
            return self._fresh(Task(to_json(pair), job, step))

        def read(run: Run) -> str:
            with reader.newest(job, self._socket, step) as checkpoint:
                return reader.differences_of(pair, run, checkpoint, recover_all)

        def recover_all(state: dict[str, Any]) -> None:
            found = agent.recover(state)
            assert found is not None
            assert found.step == step

        try:
            return judge(
                pair,
                save,
                restore,
                elsewhere if pair.call.fresh else None,
                read if reader.is_read(pair) else None,
            )
        except Ended as ended:
            return Verdict(f"the fresh process {ended.how}", ended.details)
        finally:
            with suppress(CkptdError):  # an agent whose only snapshot failed says so again
                agent.close()


def restoring(agent: Agent, step: int) -> Restore:
    """Return a function that recovers with this agent, and checks that the given step
    comes back, from where the call says.
    """

    def restore(state: dict[str, Any], call: Call) -> None:
        found = agent.recover(state, strict=call.strict, keep=call.keep)
        assert found is not None
        assert (found.step, found.source) == (step, call.source)

    return restore


def do(task: Task, socket: Path) -> End:
    """Do the task of a fresh process.

    In memory it takes the job over, because the saving process must keep the snapshot
    until then.
    """
    pair = from_json(task.pair)
    agent = Agent(task.job, socket=socket, takeover=True)
    try:
        return recovered(pair, restoring(agent, task.step))
    finally:
        with suppress(CkptdError):
            agent.close()


def quiet() -> None:
    """Silence the log of the agent, which says much about thousands of pairs."""
    logging.getLogger("ckptd").setLevel(logging.CRITICAL)
