"""The hand-over of a snapshot to the daemon: acquire a slot, fill it, then seal or
abandon it.

Every save of a rank takes these steps:

    request -> reserve -> acquire -> copy or fill -> seal
                                                  -> abandon

`Handovers.open` registers a hand-over before any message is sent, and `end` ends its
registration. Ctrl-C may come between any two instructions. The next call then runs
`end_interrupted` on every hand-over that is still registered: a slot whose header
says sealed is handed over, and any other slot is given back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from ckptd.agent.copy.fences import Transfer
from ckptd.agent.copy.mapped_slot import Documents, MappedSlot, batches
from ckptd.agent.copy.sealer import Sealer
from ckptd.agent.copy.slots import MappedSlots
from ckptd.agent.handover.slot_reports import MAX_REASON, Returns, Seals
from ckptd.agent.link.client import Client
from ckptd.agent.link.slot_requests import SlotRequest
from ckptd.agent.pending import PendingSnapshot
from ckptd.agent.plan.layout import Layout
from ckptd.agent.threads.flag import Waiters
from ckptd.shared.errors import CkptdError, IntegrityError, InternalError, SnapshotFailed
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.lifecycle import Event

_BATCH = 256 << 20
"""Bytes of the sources that `fill` copies in one batch. A planner may make them for the
copy, so they must not all exist at once.
"""


class Handover:
    """One snapshot on its way into a slot. `Handovers.open` makes it.

    If a method raises, the caller must report the error with `Handovers.fail` and then
    call `Handovers.end`, which gives the slot back.
    """

    def __init__(
        self, handovers: Handovers, pending: PendingSnapshot, slot_request: SlotRequest
    ) -> None:
        self.pending = pending
        self.slot_request = slot_request
        self.kept = ""
        """The segment that `end` does not give back, because its seal is under way
        or the caller holds it; "" if there is none.
        """
        self.at_once = False
        """True if all later writes wait for the copies, also those of an optimizer."""
        self._all = handovers
        self._slot: MappedSlot | None = None
        self._beside: Transfer | None = None
        self.copying = False  # True once copies into the slot may have begun
        self._held = False
        self._ready_by: float | None = None

    def __repr__(self) -> str:
        return f"<Handover step {self.pending.step} {self.pending.state} in {self._slot!r}>"

    @property
    def slot(self) -> MappedSlot:
        """The slot. May be used only after `acquire` has returned."""
        assert self._slot is not None
        return self._slot

    def begin(self) -> None:
        """Register the step, so that the daemon's news reach the snapshot."""
        self._all.pending[self.pending.attempt, self.pending.step] = self.pending

    def request(self, deadline: float) -> None:
        """Send the request for a slot, unless it is under way.

        The daemon answers an early request while the caller captures and plans.
        """
        self.slot_request.ask(deadline)

    def check_not_refused(self) -> None:
        """Wait for the answer to an early request, if one was sent.

        If the slot is refused, skip the step and raise SnapshotFailed.
        """
        if self.slot_request.asked and not self.slot_request.answer():
            self._skip(self.slot_request.why)

    def reserve(self, needed: int, deadline: float, device: torch.device | None = None) -> None:
        """Make sure that each slot has `needed` bytes, and that one slot is requested.

        Slots that are too small are replaced by larger ones. That would also replace a
        slot that another hand-over of this process has filled and not sealed, so this
        first waits until such a slot is sealed. `deadline` is a time of the monotonic
        clock. `device` is the accelerator that the state is on, or None.

        Raises SnapshotFailed if that seal does not come by the deadline, if copies from
        an accelerator into the present slots have not ended by then, or if the
        larger slots are not made by then; in the last case the step is skipped.
        Raises QuotaExceeded or SharedMemoryFull if shared memory does not suffice,
        StorageError if the slots cannot be mapped, and DaemonUnreachable.
        """
        all_, slots = self._all, self._all.slots
        self.pending.nbytes = needed
        # Else a step that was filled before, and needs a larger slot now, would wait
        # for itself.
        all_.no_longer_filled(self.pending)
        if not slots.fit(needed, device) and not all_.wait_until_sealed(deadline):
            raise SnapshotFailed(
                "larger slots are needed, and another save of this process has not sealed its "
                "slot in time"
            )
        if not slots.ensure(needed, deadline, device):
            why = "the slots in shared memory are still being made; a later snapshot can use them"
            all_.pass_over(
                self.pending, SnapshotFailed(f"step {self.pending.step} was skipped: {why}")
            )
            self._skip(why)
        if self.slot_request.segment not in slots:
            self.slot_request.ask(deadline)
        self._ready_by = None if device is None else deadline

    def acquire(self) -> MappedSlot:
        """Wait for the slot, and return it.

        If none is free by the deadline of the request, skip the step and raise
        SnapshotFailed. A slot for copies from an accelerator is waited for until it is
        page-locked, or until the deadline of `reserve`: a copy into memory that is not
        holds the training too, and takes several times as long.
        """
        if not self.slot_request.answer():
            self._skip(self.slot_request.why)
        self._slot = slot = self._all.slots.get(self.slot_request.take())
        self._all.granted(self.pending, slot)
        if self._ready_by is not None:
            slot.ready.wait(max(0.0, self._ready_by - time.monotonic()))
            self.pending.unlocked = slot.unlocked
        return slot

    def _skip(self, why: str) -> None:
        self.pending.skip(why)
        self._all.pending.pop((self.pending.attempt, self.pending.step), None)
        raise self.pending.why

    def copy(
        self,
        sources: list[torch.Tensor],
        layout: Layout,
        modules: list[torch.nn.Module],
        unlike: list[int] | None = None,
        captured: Iterable[torch.Tensor] = (),
    ) -> Transfer | None:
        """Copy one source for each item of the layout.

        Sources on the CPU may change as soon as this returns. For `unlike` see
        `Sources`. `captured` are the tensors of the state, DTensors included.

        Returns the transfer of the sources on accelerators, for `seal_after`, or None
        if there are none. If it is still running when `load_state_dict` of one of the
        `modules` is called, the load is ordered behind it.
        """
        self.copying = True
        transfer = self.slot.fill(
            sources,
            layout,
            self.pending.step,
            lambda to, of: self._all.sealer.carry(to, of, modules, captured, at_once=self.at_once),
            unlike,
        )
        beside, self._beside = self._beside, None
        return (
            transfer if beside is None else beside if transfer is None else transfer.joined(beside)
        )

    def beside(self, device: torch.device, work: Callable[[], None]) -> None:
        """Run work that reads tensors on an accelerator, in the lane of the copies.

        The seal waits for the work. Call this before `copy`.
        """
        done = self._all.sealer.beside(device, work)
        self._beside = done if self._beside is None else self._beside.joined(done)

    def fill(self, layout: Layout, source: Callable[[int], torch.Tensor], *, singly: bool) -> None:
        """Copy `source(number)` into the slot for the number of every item of the
        layout, and wait until all items are copied.

        singly: copy one item at a time, because `source` may return the same memory at
        every call.
        """
        slot, sealer = self.slot, self._all.sealer
        self.copying = True
        slot.begin(layout, self.pending.step)
        for numbers in batches(layout, 1 if singly else _BATCH):
            transfer = slot.copy(
                [source(number) for number in numbers],
                layout,
                numbers,
                lambda to, of: sealer.carry(to, of, []),
            )
            if transfer is not None:
                sealer.finish(transfer)

    def hold(self) -> None:
        """Keep the filled slot beyond `end`, so that a later call can `seal` or
        `abandon` it.
        """
        self._all.filled.add(self.pending)
        self._held = True
        self.kept = self.slot.name

    def seal(self, layout: Layout, documents: Documents) -> None:
        """Write the documents, seal the slot, and hand it over to the daemon.

        May run while another hand-over waits for a slot.

        Raises QuotaExceeded if the documents do not fit, and the error of the snapshot
        if it has failed meanwhile.
        """
        self.pending.move(Event.STAGE)
        self.slot.seal(layout, documents)
        self.pending.move(Event.SEAL)
        self._all.seals.hand_over(self.pending)
        failpoint("agent.handed_over")
        self._held = False
        self._all.no_longer_filled(self.pending)

    def seal_after(self, transfer: Transfer | None, layout: Layout, documents: Documents) -> None:
        """Seal the slot at once if `transfer` is None, otherwise on another thread once
        the transfer is complete.

        The step counts as taken when this returns.
        """
        if transfer is None:
            self.seal(layout, documents)
        self._all.last_step = self.pending.step
        if transfer is not None:
            self._all.sealer.later(
                self.slot.name, transfer, partial(self.seal, layout, documents), self._seal_failed
            )
        self.kept = self.slot.name

    def _seal_failed(self, error: Exception) -> None:
        step = self.pending.step
        self._all.fail(
            self.pending,
            error
            if isinstance(error, CkptdError)
            else InternalError(f"snapshot of step {step}: {error!r}"),
        )
        self._all.give_back(self, self.slot, error)

    def abandon(self, error: BaseException) -> None:
        """Fail the step on all ranks and give the held slot back.

        Does nothing if no slot is held.
        """
        if not self._held:
            return
        self._held = False
        self._all.no_longer_filled(self.pending)
        self._all.pending.pop((self.pending.attempt, self.pending.step), None)
        self.pending.fail(error if isinstance(error, CkptdError) else InternalError(repr(error)))
        self._all.give_back(self, self.slot, error)


class Handovers:
    """The hand-overs of one rank, and the state that they share.

    `last_step` is the last step that this rank has taken in its attempt, or -1.
    `pending` has the snapshots that are not durable yet, by attempt and step. `filled`
    has the snapshots whose slot is filled and held, but not sealed.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.last_step = -1
        self.pending: dict[tuple[int, int], PendingSnapshot] = {}
        self.filled: set[PendingSnapshot] = set()
        self.sealer = Sealer()
        self.slots = MappedSlots(client, lambda timeout: self.sealer.wait(timeout=timeout))
        self.seals = Seals(client, self.pending)
        self.returns = Returns(client)
        self._open: list[Handover] = []
        self._sealed = Waiters()

    def open(self, pending: PendingSnapshot, tag: str | None) -> Handover:
        """Register a hand-over, and return it.

        No message is sent yet. The caller must end it with `end`.
        """
        handover = Handover(self, pending, SlotRequest(self._client, pending.step, tag))
        self._open.append(handover)
        return handover

    def end(self, handover: Handover) -> None:
        """Give back every slot that was granted for this hand-over and is not kept, and
        end its registration.
        """
        for slot in self._granted_to(handover):
            self.give_back(handover, slot, handover.pending.error)
        self._close(handover)

    def give_back(self, handover: Handover, slot: MappedSlot, error: BaseException | None) -> None:
        """Give a slot back, once no copy into the slot can still be under way. Does not
        wait.

        The slot is kept if the device does not tell. Another snapshot would be sealed
        while these copies write to it.
        """
        give_back = partial(self.returns.give_back, slot, handover.pending.step, error)
        if handover.copying:
            self.sealer.once_idle(give_back)
        else:
            give_back()

    def end_interrupted(self) -> None:
        """End every hand-over whose call was interrupted.

        No other call of this rank may be under way.

        A slot whose header says sealed is handed over. One whose seal is under way is
        left to the thread that seals it. Any other slot is given back, and its step
        fails.
        """
        for handover in tuple(self._open):
            self._end_interrupted(handover)
            self._close(handover)

    def _end_interrupted(self, handover: Handover) -> None:
        pending, sealed = handover.pending, bool(handover.kept)
        for slot in self._granted_to(handover):
            if self.sealer.is_sealing(slot.name):
                sealed = True  # by another thread, which also reports a failure
            elif not sealed and self._is_sealed(slot, pending):
                sealed = True
                pending.segment = slot.name
                pending.seal()
                self.last_step = max(self.last_step, pending.step)
                self.pending[pending.attempt, pending.step] = pending
                self.seals.hand_over(pending)
            else:
                self.give_back(handover, slot, pending.error)
        if not sealed:
            self.fail(
                pending, SnapshotFailed(f"the snapshot of step {pending.step} was interrupted")
            )

    @staticmethod
    def _is_sealed(slot: MappedSlot, pending: PendingSnapshot) -> bool:
        try:
            header = slot.refresh()
        except (IntegrityError, OSError, ValueError):
            return False
        return (header.state, header.step, header.attempt) == (
            SlotState.SEALED,
            pending.step,
            pending.attempt,
        ) and pending.error is None

    def _granted_to(self, handover: Handover) -> list[MappedSlot]:
        """Return the slots that may be granted for this hand-over, except the kept one.

        If an answer was lost, these are all slots.
        """
        names = self.slots.names if handover.slot_request.lost else handover.slot_request.taken
        found = [self.slots.find(name) for name in names if name != handover.kept]
        return [slot for slot in found if slot is not None]

    def _close(self, handover: Handover) -> None:
        handover.slot_request.drop()
        if handover in self._open:
            self._open.remove(handover)

    def granted(self, pending: PendingSnapshot, slot: MappedSlot) -> None:
        """Record that the slot is granted for this snapshot.

        A memory-only snapshot that was in the slot is superseded.
        """
        for old in [
            p for p in list(self.pending.values()) if p.segment == slot.name and not p.persist
        ]:
            self.pending.pop((old.attempt, old.step), None)
            old.supersede()
        self.seals.refill(slot.name)
        pending.segment = slot.name
        # Wait for copies of a failed step, which may still write to the slot.
        self.sealer.wait(slot.name)
        if not pending.granted:
            pending.move(Event.GRANT)
        failpoint("agent.granted")

    def fail(self, pending: PendingSnapshot, error: CkptdError) -> None:
        """Fail a snapshot on all ranks.

        Does nothing if it was skipped, because the other ranks know of the skip.
        """
        if pending.state == "skipped":
            return
        pending.fail(error)
        self.no_longer_filled(pending)
        self.pass_over(pending, error)

    def pass_over(self, pending: PendingSnapshot, reason: CkptdError) -> None:
        """Report to the daemon that this rank will not seal the step.

        The step then fails on all ranks, and no rank waits for it.

        If the step is negative, or an earlier call has taken it, the daemon only counts
        the failure. The report is not repeated after a lost connection.
        """
        known = self.pending.get((pending.attempt, pending.step))
        if known is pending:
            del self.pending[pending.attempt, pending.step]
        # True if an earlier call has taken this step: the snapshot of that call must
        # not fail.
        taken = known is not pending and (known is not None or pending.step <= self.last_step)
        refused = taken or pending.step < 0
        # With a slot, the daemon knows of the step.
        if not self._client.closed and not (refused and pending.segment):
            step, why = None if refused else pending.step, str(reason)[:MAX_REASON]
            self._client.post(
                lambda n: m.Abandon(id=n, step=step, reason=why, code=reason.code), lambda _: None
            )

    def wait_until_sealed(self, deadline: float) -> bool:
        """Wait until no filled slot is unsealed, and return True.

        Return False at the deadline.
        """
        return self._sealed.wait_for(lambda: not self.filled, max(0.0, deadline - time.monotonic()))

    def no_longer_filled(self, pending: PendingSnapshot) -> None:
        self.filled.discard(pending)
        self._sealed.notify()

    def wait_for_threads(self, timeout: float | None = None) -> bool:
        """Wait until no other thread is sealing a slot, then until none is making slots:
        at most `timeout` seconds for each.

        Return False if copies from an accelerator take longer. Return True otherwise,
        even if slots are still being made.
        """
        ended = self.sealer.wait(timeout=timeout)
        if ended:
            self.slots.wait(timeout)
        return ended

    def start_attempt(self) -> None:
        """Forget the slots of the previous attempt, which the daemon has taken back."""
        self.slots.drop()
        self.returns.clear()
        self.seals.stop_copying(
            SnapshotFailed("the next attempt has begun before the snapshot was copied")
        )

    def resume(self, held: set[str]) -> None:
        """Resume on a new connection, and repeat the returned slots and the seals that
        the daemon has not answered.

        `held` has the segments that the daemon still keeps for this rank. Other slots
        are forgotten.
        """
        self.slots.keep(held)
        self.returns.send_again()
        self.seals.hand_over_again()

    def close(self, *, copies_ended: bool = True) -> None:
        """Release the slots, and fail every snapshot that is not durable.

        May be called again after Ctrl-C has interrupted it. `copies_ended` is False if
        copies into the slots may be under way.
        """
        if copies_ended:
            self.slots.drop()
        else:
            self.slots.leave()
        self.seals.stop_copying(
            SnapshotFailed("the agent was closed before the snapshot was copied")
        )
        self.seals.stop_following(
            SnapshotFailed("the agent was closed before the upload of this checkpoint was reported")
        )
        for pending in list(self.pending.values()):
            if pending.persist:
                self.seals.finish(pending, SnapshotFailed("the agent was closed first"))
            else:
                pending.supersede("the agent was closed")
