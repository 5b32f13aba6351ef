"""Reports to the daemon which granted slots are sealed and which are given back, again
after each lost connection, until the daemon has confirmed it.
"""

from __future__ import annotations

import logging
import weakref

from ckptd.agent.copy.mapped_slot import MappedSlot
from ckptd.agent.link.client import Client
from ckptd.agent.pending import NOT_SET, PendingSnapshot
from ckptd.shared.errors import CkptdError, SnapshotFailed, from_wire
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.lifecycle import Event

log = logging.getLogger("ckptd.agent")

MAX_REASON = 4096
"""The most characters of a reason that are sent to the daemon."""


class Seals:
    """The reports of one rank's seals to its daemon.

    `pending` has the snapshots that are not durable yet, by attempt and step.
    `Handovers` shares it, and adds to it.
    """

    def __init__(self, client: Client, pending: dict[tuple[int, int], PendingSnapshot]) -> None:
        self._client, self._pending = client, pending
        self._news: m.Uploads | None = None
        # The reason why the slots of this attempt are not copied to other nodes, or "".
        self.not_copied = NOT_SET
        self._copies = m.PeerReplicas(re=0, attempt=0)
        self._copying: weakref.WeakValueDictionary[tuple[int, int], PendingSnapshot] = (
            weakref.WeakValueDictionary()
        )
        # Those of `_copying` whose slot is filled again.
        self._refilled = weakref.WeakSet[PendingSnapshot]()
        self._uploading: weakref.WeakValueDictionary[tuple[int, int], PendingSnapshot] = (
            weakref.WeakValueDictionary()
        )

    def hand_over(self, pending: PendingSnapshot) -> None:
        """Report a seal to the daemon, without waiting for the save.

        If the connection is lost, `hand_over_again` reports it later.
        """
        self._copying.setdefault((pending.attempt, pending.step), pending)
        self._settle_copies()
        held = round(pending.held, 6)
        self._client.post(
            lambda n: m.Seal(
                id=n,
                segment=pending.segment,
                attempt=pending.attempt,
                step=pending.step,
                held=held,
                cost=pending.cost_before,
                uncompared=pending.uncompared,
                unlocked=pending.unlocked,
            ),
            lambda reply: self._answered(pending, reply),
        )

    def hand_over_again(self) -> None:
        """Report every sealed snapshot that is not durable yet.

        Called on a new connection.
        """
        for pending in list(self._pending.values()):
            if pending.state == "sealed":
                self.hand_over(pending)

    def _answered(self, pending: PendingSnapshot, reply: m.Reply) -> None:
        if isinstance(reply, m.Error):
            self.finish(pending, from_wire(reply.code, reply.message))
        elif isinstance(reply, m.Sealed) and reply.durable:
            self.finish(pending, None)

    def finish(self, pending: PendingSnapshot, error: CkptdError | None) -> None:
        """Record that a snapshot is durable, or that it has failed with `error`.

        The first outcome counts.
        """
        self._pending.pop((pending.attempt, pending.step), None)
        if pending.done:
            return
        if error is None:
            if self._client.welcome.stage:
                pending.expect_upload()
                self._uploading[pending.attempt, pending.step] = pending
            pending.move(Event.COMMIT)
            if (
                (news := self._news) is not None
                and news.attempt == pending.attempt
                and pending.step in news.uploaded
            ):
                # The daemon has sent them before it confirmed the seal, on a new
                # connection.
                self.follow_uploads(news)
        else:
            pending.fail(error)

    def follow_uploads(self, news: m.Uploads) -> None:
        """Record which durable checkpoints are in the root, and which can no longer be
        uploaded.
        """
        self._news = news
        for (attempt, step), pending in list(self._uploading.items()):
            if attempt != news.attempt or step in news.waiting:
                continue
            del self._uploading[attempt, step]
            pending.upload(
                None
                if step in news.uploaded
                else SnapshotFailed(f"step {step} is not in the root, {_NOT_UPLOADED}")
            )

    def follow_copies(self, news: m.PeerReplicas) -> None:
        """Record which snapshots all nodes have copied to their peers, and which will
        not be copied any more.
        """
        self._copies = news
        self._settle_copies()

    def _settle_copies(self) -> None:
        for (attempt, step), pending in list(self._copying.items()):
            known = self._copies
            news = known if attempt == known.attempt else m.PeerReplicas(re=0, attempt=attempt)
            newest = max(news.replicated, default=-1)
            if step in news.replicated:
                pending.replicate(None)
            elif news.alone:
                pending.replicate(SnapshotFailed(f"step {step} is not copied: {news.alone}"))
            elif step < newest:
                pending.replicate(
                    SnapshotFailed(f"step {step} is not copied, because step {newest} is")
                )
            elif pending in self._refilled and step != news.replicating:
                pending.replicate(
                    SnapshotFailed(
                        f"step {step} is not copied: a newer snapshot has replaced it in memory "
                        f"first"
                    )
                )
            else:
                continue
            self._copying.pop((attempt, step), None)  # two threads may settle the same one

    def refill(self, segment: str) -> None:
        """Record that the slot in a segment is granted for another snapshot. The daemon
        grants no slot that it still has to copy.
        """
        for pending in list(self._copying.values()):
            if pending.segment == segment:
                self._refilled.add(pending)
        self._settle_copies()

    def stop_copying(self, error: CkptdError) -> None:
        """Raise `error` in the threads that wait for a copy."""
        for key, pending in list(self._copying.items()):
            self._copying.pop(key, None)
            pending.replicate(error)

    def fail_all(self, error: CkptdError) -> None:
        """Fail every snapshot that is not durable, because the daemon or this agent is
        gone. Uploads are not followed any longer.
        """
        for pending in list(self._pending.values()):
            self.finish(pending, error)
        self.stop_following(error)

    def stop_following(self, error: CkptdError) -> None:
        """Raise `error` in the threads that wait for an upload or a copy."""
        self.stop_copying(error)
        for key, pending in list(self._uploading.items()):
            del self._uploading[key]
            pending.upload(error)


_NOT_UPLOADED = (
    "and does not wait for its upload: it was deleted from the stage or from the root, or it "
    "cannot be uploaded; `ckptd status` and the "
    "daemon's log say which"
)


class Returns:
    """The slots that one rank gives back, remembered until the daemon confirms them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._unconfirmed: dict[tuple[str, int | None], tuple[str, str]] = {}
        """The reason and its error code, by segment and step."""

    def give_back(self, slot: MappedSlot, step: int, error: BaseException | None) -> None:
        """Mark the slot as free if it still belongs to `step`, and return it to the
        daemon with `error` as the reason.
        """
        try:
            if slot.header.step == step and slot.header.state is not SlotState.FREE:
                slot.clear()
        except (
            OSError,
            ValueError,
        ) as problem:  # its descriptors are closed, because a larger slot has replaced it
            log.debug("slot %s: %s", slot.name[:8], problem)
        self.send(slot.name, step, error)

    def send(self, segment: str, step: int | None, error: BaseException | None = None) -> None:
        """Return to the daemon a segment that was granted for `step`, with `error` as
        the reason. Does not wait for the answer.
        """
        code = error.code if isinstance(error, CkptdError) else ""
        self._unconfirmed[segment, step] = ("" if error is None else str(error)[:MAX_REASON], code)
        self._post(segment, step)

    def send_again(self) -> None:
        """Send again every return that the daemon has not confirmed.

        Called on a new connection.
        """
        for segment, step in tuple(self._unconfirmed):
            self._post(segment, step)

    def clear(self) -> None:
        """Forget all unconfirmed segments.

        Called when their attempt is over: its segments are gone.
        """
        self._unconfirmed.clear()

    def _post(self, segment: str, step: int | None) -> None:
        reason, code = self._unconfirmed.get((segment, step), ("", ""))
        self._client.post(
            lambda n: m.Abandon(id=n, segment=segment, step=step, reason=reason, code=code),
            lambda _: self._confirmed(segment, step),
        )

    def _confirmed(self, segment: str, step: int | None) -> None:
        self._unconfirmed.pop((segment, step), None)
