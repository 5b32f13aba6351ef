"""Requests for a slot. A request is sent early, so that the daemon wakes up and answers while the state is being captured.

A request is sent again after a lost connection, and to a daemon that is stopping, until the deadline.
"""

from __future__ import annotations

import time

from ckptd.agent.link.client import Call, Client
from ckptd.agent.threads.call_lock import Nested
from ckptd.shared import messages as m
from ckptd.shared.errors import Busy, DaemonUnreachable

GRACE_SECONDS = 2.0  # beyond its budget that a daemon may take to say that there is no slot
_AGAIN_SECONDS = 0.05


class SlotRequest:
    """One snapshot's question: `ask`, `answer`, `take`; then, whatever came of it, `drop`: what was granted and not taken is given back.

    `segment`: what is granted. `why`: why the step is skipped. `taken`: the segments that `take` has given out.
    """

    def __init__(self, client: Client, step: int, tag: str | None) -> None:
        self.segment = self.why = ""
        self.step = step
        self._client, self._tag = client, tag
        self._begun = self._deadline = 0.0
        self._call: Call | None = None
        self._calls: list[Call] = []  # each is here before it is sent, so that Ctrl-C cannot lose its answer
        self.taken: list[str] = []

    @property
    def asked(self) -> bool:
        return self._begun > 0

    def ask(self, deadline: float) -> None:
        """Send the question, if it is not under way; also again, for what was granted is no more."""
        self._deadline, self._begun = deadline, self._begun or time.monotonic()
        if self._call is None:
            self.segment = ""
            try:
                self._call = self._send()
            except Nested:
                raise
            except (DaemonUnreachable, Busy):
                pass  # `answer` asks again

    def _send(self) -> Call:
        wait = self._left()
        self._calls.append(call := Call())
        return self._client.begin(lambda n: m.Acquire(id=n, step=self.step, name=self._tag, wait=wait), call)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def answer(self) -> bool:
        """Whether a segment is granted. Raises DaemonUnreachable, Busy, and what the daemon says."""
        while not self.segment and not self.why:
            try:
                call, self._call = self._call or self._send(), None
                reply, _ = self._client.finish(call, m.Reply, self._left() + GRACE_SECONDS)
            except Nested:
                raise
            except (DaemonUnreachable, Busy):
                wait = self._left()
                time.sleep(min(wait, _AGAIN_SECONDS))
                if not self._client.wait_connected(wait) or time.monotonic() >= self._deadline:
                    raise
                continue
            if isinstance(reply, m.Granted):
                self.segment = reply.segment
            else:
                assert isinstance(reply, m.Refused)
                self.why = f"{reply.reason} (waited {time.monotonic() - self._begun:.1f} s)"
        return bool(self.segment)

    def take(self) -> str:
        """The segment. From now on it is the caller's to give back."""
        self.taken.append(self.segment)
        segment, self.segment = self.segment, ""
        return segment

    def drop(self) -> None:
        """Give back what was granted and not taken, also what is granted later. May be called again."""
        self.segment = ""
        while self._calls:
            call = self._calls[0]
            reply = self._client.abandon(call)
            if isinstance(reply, m.Granted) and reply.segment not in self.taken:
                self._client.give_back(reply)
            self._calls.remove(call)  # not before: Ctrl-C may come in between
        self._call = None

    @property
    def lost(self) -> bool:
        """Return True if the daemon may have granted a slot without an answer having come: Ctrl-C and a lost connection can lose one."""
        return any(call.reply is None and (call.error is None or isinstance(call.error, DaemonUnreachable)) for call in self._calls)
