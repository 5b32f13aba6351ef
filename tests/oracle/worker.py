"""Judges pairs in one process, with one daemon: each pair is a snapshot and a recovery from memory through the public `Agent`."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptd.agent import Agent
from ckptd.shared.errors import CkptdError
from tests.oracle.judge import Verdict, judge
from tests.oracle.program import Call, Pair


class Jobs:
    """Judges pairs, each with an agent and a job of its own."""

    def __init__(self, socket: Path) -> None:
        self._socket, self._number = socket, 0

    def judge(self, pair: Pair) -> Verdict:
        self._number += 1
        agent = Agent(f"pair-{self._number}-{pair.seed}", socket=self._socket)
        steps = 0

        def save(state: dict[str, Any], number: int) -> None:
            nonlocal steps
            steps = number
            agent.snapshot(state, step=number, persist=False, on_error="raise").wait("sealed", timeout=60)

        def restore(state: dict[str, Any], call: Call) -> None:
            recovered = agent.recover(state, strict=call.strict, keep=call.keep)
            assert recovered is not None
            assert recovered.step == steps

        try:
            return judge(pair, save, restore)
        finally:
            with suppress(CkptdError):  # an agent whose only snapshot failed says so again
                agent.close()


def quiet() -> None:
    """Silence the log of the agent, which says much about thousands of pairs."""
    logging.getLogger("ckptd").setLevel(logging.CRITICAL)
