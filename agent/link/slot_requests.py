"""Requests to the daemon for a slot, sent early so that it wakes up and answers while
the state is being captured.

Until its deadline, a request is sent again after a lost connection, and after a refusal
by a daemon that is stopping.
"""

from __future__ import annotations

import time

from ckptd.agent.link.client import Call, Client
from ckptd.agent.threads.call_lock import Nested
from ckptd.shared.errors import Busy, DaemonUnreachable
from ckptd.shared.wire import messages as m

GRACE_SECONDS = 2.0  # time after the deadline for the daemon to answer that no slot is free
_AGAIN_SECONDS = 0.05


class SlotRequest:
    """The request of one snapshot for a slot.

    Call `ask`, `answer` and `take`, and then in any case `drop`.

    `segment` is the segment that is granted and not taken, or "". `why` is the reason
    if the step is skipped, or "". `taken` has the segments that `take` has returned.
    """

    def __init__(self, client: Client, step: int, tag: str | None) -> None:
        self.segment = self.why = ""
        self.step = step
        self._client, self._tag = client, tag
        self._begun = self._deadline = 0.0
        self._call: Call | None = None
        # Each is added before it is sent, so that Ctrl-C cannot lose its answer.
        self._calls: list[Call] = []
        self.taken: list[str] = []

    @property
    def asked(self) -> bool:
        """True once `ask` has been called."""
        return self._begun > 0

    def ask(self, deadline: float) -> None:
        """Send the request, unless it is under way.

        Call this again if the granted segment no longer exists: it is then forgotten.
        """
        self._deadline, self._begun = deadline, self._begun or time.monotonic()
        if self._call is None:
            self.segment = ""
            try:
                self._call = self._send()
            except Nested:
                raise
            except (DaemonUnreachable, Busy):
                pass  # `answer` sends the request again

    def _send(self) -> Call:
        wait = self._left()
        self._calls.append(call := Call())
        return self._client.begin(
            lambda n: m.Acquire(id=n, step=self.step, name=self._tag, wait=wait), call
        )

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def answer(self) -> bool:
        """Wait for the answer.

        Return True if a segment is granted, and False if the step is skipped.

        Raises DaemonUnreachable or Busy if there is no answer by the deadline, and any
        other error that the daemon answers with.
        """
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
        """Return the granted segment. From now on the caller must give it back."""
        self.taken.append(self.segment)
        segment, self.segment = self.segment, ""
        return segment

    def drop(self) -> None:
        """Give back every slot that was granted and not taken, even if its grant
        arrives later. May be called again.
        """
        self.segment = ""
        while self._calls:
            call = self._calls[0]
            reply = self._client.abandon(call)
            if isinstance(reply, m.Granted) and reply.segment not in self.taken:
                self._client.give_back(reply)
            self._calls.remove(call)  # only now: after Ctrl-C, another `drop` must find the call
        self._call = None

    @property
    def lost(self) -> bool:
        """True if the daemon may have granted a slot whose answer has not arrived,
        because of Ctrl-C or a lost connection.
        """
        return any(
            call.reply is None and (call.error is None or isinstance(call.error, DaemonUnreachable))
            for call in self._calls
        )
