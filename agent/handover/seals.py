"""Tells the daemon of every seal, again after a lost connection, until the snapshot is durable or has failed."""

from __future__ import annotations

from ckptd.agent.link.client import Client
from ckptd.agent.pending import Pending
from ckptd.shared import messages as m
from ckptd.shared.errors import CkptdError, from_wire
from ckptd.shared.lifecycle import Event


class Seals:
    """`pending`: the snapshots on their way, by attempt and step. It is shared with `Handovers`, which adds to it."""

    def __init__(self, client: Client, pending: dict[tuple[int, int], Pending]) -> None:
        self._client, self._pending = client, pending

    def hand_over(self, pending: Pending) -> None:
        """Tell the daemon of a seal, and do not wait for the save. If the daemon is away, `hand_over_again` tells it later."""
        self._client.post(
            lambda n: m.Seal(id=n, segment=pending.segment, attempt=pending.attempt, step=pending.step),
            lambda reply: self._answered(pending, reply),
        )

    def hand_over_again(self) -> None:
        """Tell the daemon, on a new connection, of every seal that has no answer yet."""
        for pending in list(self._pending.values()):
            if pending.state == "sealed":
                self.hand_over(pending)

    def _answered(self, pending: Pending, reply: m.Reply) -> None:
        if isinstance(reply, m.Error):
            self.finish(pending, from_wire(reply.code, reply.message))
        elif isinstance(reply, m.Sealed) and reply.durable:
            self.finish(pending, None)

    def finish(self, pending: Pending, error: CkptdError | None) -> None:
        """Take note that a snapshot is durable, or why it has failed. The first word counts."""
        self._pending.pop((pending.attempt, pending.step), None)
        if pending.done:
            return
        if error is None:
            pending.move(Event.COMMIT)
        else:
            pending.fail(error)

    def fail_all(self, error: CkptdError) -> None:
        for pending in list(self._pending.values()):
            self.finish(pending, error)
