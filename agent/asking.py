"""Asking the daemon for a slot. The question is sent while there is something else to do: waking the daemon, and being woken, takes time.

After a lost connection, or of a daemon that stops, it is asked again until the deadline.
"""

from __future__ import annotations

import time

from ckptd.agent.client import Call, Client
from ckptd.shared import messages as m
from ckptd.shared.errors import Busy, DaemonUnreachable

GRACE_SECONDS = 2.0  # beyond its budget that a daemon may take to say that there is no slot
_AGAIN_SECONDS = 0.05


class Asking:
    """One snapshot's question. Whoever does not come to `answer` must `drop` it: a slot that is granted meanwhile is given back."""

    def __init__(self, client: Client, step: int, tag: str | None, deadline: float) -> None:
        self._client, self._step, self._tag, self._deadline = client, step, tag, deadline
        self._begun = time.monotonic()
        self._call: Call | None = None
        try:
            self._call = self._ask()
        except (DaemonUnreachable, Busy):
            pass  # `answer` asks again

    def _ask(self) -> Call:
        wait = self._left()
        return self._client.begin(lambda n: m.Acquire(id=n, step=self._step, name=self._tag, wait=wait))

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def answer(self) -> tuple[str, str]:
        """The segment that is granted, or "" and why the step is skipped. Raises DaemonUnreachable, Busy, and what the daemon says."""
        while True:
            try:
                call, self._call = self._call or self._ask(), None
                reply, _ = self._client.finish(call, m.Reply, self._left() + GRACE_SECONDS)
            except (DaemonUnreachable, Busy):
                wait = self._left()
                time.sleep(min(wait, _AGAIN_SECONDS))
                if not self._client.wait_connected(wait) or time.monotonic() >= self._deadline:
                    raise
                continue
            if isinstance(reply, m.Granted):
                return reply.segment, ""
            assert isinstance(reply, m.Refused)
            return "", f"{reply.reason} (waited {time.monotonic() - self._begun:.1f} s)"

    def drop(self) -> None:
        if self._call is not None:
            self._client.drop(self._call)
            self._call = None
