"""One rank of a job at its daemon: the connection, the slots, and what is on its way. `Agent` and `StorageWriter` stand on it.

After a lost connection it takes up its work by itself; after a newer attempt has begun everything under way fails.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable

import torch

from ckptd.agent.copy.fences import Transfer
from ckptd.agent.copy.mapped_slot import Documents, MappedSlot, batches
from ckptd.agent.copy.sealer import Sealer
from ckptd.agent.copy.slots import MappedSlots
from ckptd.agent.handover.grants import MOST_REASON, Grants
from ckptd.agent.handover.seals import Seals
from ckptd.agent.link.arguments import job_name
from ckptd.agent.link.attempt import begin
from ckptd.agent.link.client import Client
from ckptd.agent.link.launch import find_place
from ckptd.agent.link.rounds import Ranks
from ckptd.agent.pending import Pending
from ckptd.agent.plan.layout import Layout
from ckptd.agent.threads.call_lock import CallLock
from ckptd.agent.threads.flag import Waiters
from ckptd.shared import messages as m
from ckptd.shared.errors import CkptdError, DaemonUnreachable, InternalError, InvalidRequest, SnapshotFailed, StructureChanged, from_wire
from ckptd.shared.failpoints import failpoint
from ckptd.shared.lifecycle import Event

log = logging.getLogger("ckptd.agent")

CALL_SECONDS = 30.0
CLOSE_SECONDS = 600.0
SAVE_SECONDS = 600.0  # for a slot, when the caller waits for the save anyway
AWAY_SECONDS = 60.0
_BATCH = 256 << 20  # bytes that are copied at once, of sources that may be made for it


class Attachment:
    """`attempt`: the one that it belongs to; `last_step`: the last that it has captured in it, or -1.

    Raises DaemonUnreachable, InvalidName, InvalidRequest, StorageError; SnapshotFailed if a rank does not come.
    """

    def __init__(
        self, ranks: Ranks, job: str | None, *, socket: str | os.PathLike[str] | None = None, root: str | os.PathLike[str] | None = None
    ) -> None:
        self._ranks = ranks
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.calls = CallLock(self._tidy)
        self._pending: dict[tuple[int, int], Pending] = {}
        self._closed = self._gone = False
        self._beginning = False
        """True while a next attempt has begun and its slots and plans are not in order yet: Ctrl-C may come in between."""
        self._refused: deque[Pending] = deque()  # nested calls, which the other ranks are told of when the outer call ends
        self._pid = os.getpid()
        self.attempt = 0
        self.last_step = -1
        self._sealer = Sealer()
        self.saving: weakref.WeakSet[object] = weakref.WeakSet()
        """Saves that DCP has planned, from their first byte until they are durable or given up."""
        self._filled: set[Pending] = set()  # by `fill`, and not sealed yet
        self._sealed = Waiters()
        try:
            self.place = find_place(socket, root)
            self._client = Client(
                self.place, resume=self._resume, news=self._news, lost=lambda error: self._seals.fail_all(error), late=self._late
            )
        except CkptdError as error:
            begin(self._ranks, error)
            raise
        self._seals = Seals(self._client, self._pending)
        self._slots = MappedSlots(self._client, self._sealer.settle)
        self._grants = Grants(self._client, self._slots, self._sealer, self._hand_over_interrupted, self._fail)
        try:
            self._begin(job)
        except BaseException:
            self._client.close()
            raise
        _attachments.add(self)

    @property
    def closed(self) -> bool:
        """Also in a forked child, which needs an agent of its own."""
        return self._closed

    def _begin(self, job: str | None) -> None:
        """Begin the next attempt with the other ranks. Steps start over; slots of the attempt before are gone."""
        try:
            self.job = job_name(job, private=self._client.welcome.private)
        except CkptdError as error:
            begin(self._ranks, error)
            raise
        attempt = begin(self._ranks, None, self._client, self.job)
        self.last_step, self.attempt = -1, attempt
        self._ranks.scope = self.job
        failpoint("agent.begun")

    @property
    def root(self) -> str:
        return self._client.welcome.root

    @property
    def usable(self) -> bool:
        """Neither closed nor behind a newer attempt."""
        return not self._closed and not self._client.closed

    def is_current(self) -> bool:
        """Return True if this attempt is still the newest of the job. Raises DaemonUnreachable."""
        reply, _ = self._client.call(lambda n: m.Status(id=n), m.StatusReport, CALL_SECONDS)
        return all(job["attempt"] == self.attempt for job in json.loads(reply.report)["jobs"] if job["job"] == self.job)

    def forget(self, tags: list[str]) -> dict[str, str]:
        """Delete checkpoints of this job, by their directories; why not, of each that stays. Raises DaemonUnreachable, StorageError."""
        reply, _ = self._client.call(lambda n: m.Forget(id=n, job=self.job, tags=tags), m.Forgotten, SAVE_SECONDS)
        return reply.refused

    # -- what is on its way

    def _tidy(self) -> None:
        """Settle what an interrupted call has left, and what was refused while this one was in. Runs when a call enters and leaves."""
        if self._closed:
            if not self._gone and os.getpid() == self._pid:
                self.let_go()
            return
        self._grants.settle_interrupted()
        while self._refused:
            pending = self._refused.popleft()
            self._pass_over(pending, pending.why)

    def _fail(self, pending: Pending, error: CkptdError) -> None:
        if pending.state == "skipped":
            return  # and whoever is to know it does
        pending.fail(error)
        self._no_longer_filled(pending)
        self._pass_over(pending, error)

    def _pass_over(self, pending: Pending, reason: CkptdError) -> None:
        """What this rank has not, no rank has: the others need not wait for it."""
        known = self._pending.get((pending.attempt, pending.step))
        if known is pending:
            del self._pending[pending.attempt, pending.step]
        first = known is pending or (known is None and pending.step > self.last_step)  # and no second call of a step that is taken
        if self.world_size > 1 and first and pending.step >= 0 and not self._closed:
            why = str(reason)[:MOST_REASON]
            self._client.post(lambda n: m.Abandon(id=n, step=pending.step, reason=why, code=reason.code), lambda _: None)

    def fill(
        self,
        pending: Pending | int | None,
        tag: str | None,
        layout: Layout,
        needed: int,
        source: Callable[[int], torch.Tensor],
        *,
        wait: float = SAVE_SECONDS,
        singly: bool = False,
        taken: Callable[[Pending, MappedSlot], None] = lambda *_: None,
    ) -> tuple[Pending, MappedSlot]:
        """A slot of `needed` bytes for a step that is planned elsewhere, filled with what `source` gives for each number of an item.

        pending: the step, or None for the next; or of an earlier call, in the place of whose slot there is to be a larger one. singly:
        `source` may give the same memory each time. taken: called with what is returned, while Ctrl-C can still not lose it. To be followed
        by `seal` or `give_up`.

        For a call that has entered by `calls`, and made `ready`. Raises what the daemon says, SnapshotFailed if there is no slot within
        `wait` seconds (the step is then skipped), and what `source` raises; the slot is given up then, and with it the step, on all ranks.
        """
        deadline = time.monotonic() + wait
        if not isinstance(pending, Pending):
            pending = Pending(self.last_step + 1 if pending is None else pending, self.attempt)
        self.last_step = max(self.last_step, pending.step)
        self._pending[pending.attempt, pending.step] = pending
        question = self._grants.ask(pending, tag)
        asking = question.asking
        self._filled.discard(pending)
        try:
            if not self._slots.fit(needed) and not self._none_filled(deadline):
                raise SnapshotFailed("larger slots are needed, and another save of this process has not sealed its own in time")
            if not self._slots.ensure(needed, deadline):
                why = "the slots in shared memory are still being made; a later snapshot will find them"
                self._pass_over(pending, SnapshotFailed(f"step {pending.step} was skipped: {why}"))
                self._skip(pending, why)
                raise pending.why
            asking.ask(deadline)
            if not asking.answer():
                self._skip(pending, asking.why)
                raise pending.why
            slot = self._slots.get(asking.take())
            self._take(pending, slot)
            slot.begin(pending.step)
            for numbers in batches(layout, 1 if singly else _BATCH):
                transfer = slot.copy([source(number) for number in numbers], layout, numbers, self._carry)
                if transfer is not None:
                    self._sealer.finish(transfer)
        except Exception as error:
            self._fail(pending, error if isinstance(error, CkptdError) else InternalError(repr(error)))
            self._grants.settle(question)
            raise
        self._filled.add(pending)
        taken(pending, slot)
        question.kept = slot.name
        self._grants.settle(question)
        return pending, slot

    def _none_filled(self, deadline: float) -> bool:
        """Once nothing is filled that is not sealed: its slot would go with the others when larger ones are made."""
        return self._sealed.wait_for(lambda: not self._filled, max(0.0, deadline - time.monotonic()))

    def _no_longer_filled(self, pending: Pending) -> None:
        self._filled.discard(pending)
        self._sealed.notify()

    def _take(self, pending: Pending, slot: MappedSlot) -> None:
        """The slot is this snapshot's from now on."""
        for old in [p for p in list(self._pending.values()) if p.segment == slot.name and not p.persist]:
            self._pending.pop((old.attempt, old.step), None)
            old.supersede()
        pending.segment = slot.name
        self._sealer.settle(slot.name)  # of a step that was given up meanwhile
        if not pending.granted:
            pending.move(Event.GRANT)
        failpoint("agent.granted")

    def _skip(self, pending: Pending, why: str) -> None:
        pending.skip(why)
        self._pending.pop((pending.attempt, pending.step), None)

    def _carry(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Transfer:
        return self._sealer.carry(targets, sources, [])

    def give_up(self, pending: Pending, slot: MappedSlot, error: BaseException) -> None:
        """What `fill` has filled will not be sealed."""
        self._no_longer_filled(pending)
        self._pending.pop((pending.attempt, pending.step), None)
        pending.fail(error if isinstance(error, CkptdError) else InternalError(repr(error)))
        self._grants.give_back(slot, pending.step, error)

    def seal(self, pending: Pending, slot: MappedSlot, layout: Layout, documents: Documents) -> None:
        """Hand over what `fill` has filled, also while another `fill` waits for the slot. Raises QuotaExceeded if the documents do not
        fit: fill another slot, or give it up."""
        self._seal(pending, slot, layout, documents)
        self._no_longer_filled(pending)

    def wait_durable(self, pending: Pending) -> None:
        """Wait until it is committed. Raises the reason if it cannot be, DaemonUnreachable after `AWAY_SECONDS` without a daemon."""
        while True:
            try:
                pending.wait("durable", timeout=1.0)
                return
            except TimeoutError:
                if not self._client.wait_connected(AWAY_SECONDS):
                    raise DaemonUnreachable(
                        "the daemon is gone; what is sealed waits in shared memory for the next one, which will save it"
                    ) from None

    def _seal(self, pending: Pending, slot: MappedSlot, layout: Layout, documents: Documents) -> None:
        pending.move(Event.STAGE)
        slot.seal(layout, documents)
        pending.move(Event.SEAL)
        self._seals.hand_over(pending)
        failpoint("agent.handed_over")

    def _not_sealed(self, pending: Pending, slot: MappedSlot, error: Exception) -> None:
        self._fail(pending, error if isinstance(error, CkptdError) else InternalError(f"snapshot of step {pending.step}: {error!r}"))
        self._grants.give_back(slot, pending.step, error)

    def _plan_anew(self) -> None:
        """The structure has changed on some ranks only."""

    def _settle(self) -> None:
        """Wait until other threads have sealed, and have made their slots."""
        self._sealer.settle()
        self._slots.settle()

    def _hand_over_interrupted(self, pending: Pending) -> None:
        """Hand over a slot that was sealed before Ctrl-C ended its call."""
        self.last_step = max(self.last_step, pending.step)
        self._pending[pending.attempt, pending.step] = pending
        self._seals.hand_over(pending)

    def _news(self, progress: m.Progress) -> None:
        pending = self._pending.get((progress.attempt, progress.step))
        if progress.code == StructureChanged.code:
            self._plan_anew()
        if pending is not None:
            self._seals.finish(
                pending, None if progress.state == "durable" else from_wire(progress.code or "snapshot-failed", progress.reason)
            )

    def _late(self, reply: m.Reply) -> None:
        """An answer that nobody waits for any more: a slot granted too late is given back."""
        if isinstance(reply, m.Granted):
            self._grants.owe(reply.segment, reply.step)

    # -- a daemon that comes and goes

    def _resume(self) -> None:
        """Resume the attempt on a new connection, and tell again of every seal that has no answer."""
        if not self.attempt or self._beginning:
            return  # the call that begins the next attempt says so itself
        began, _ = self._client.call(
            lambda n: m.Begin(id=n, job=self.job, rank=self.rank, world_size=self.world_size, attempt=self.attempt), m.Began, CALL_SECONDS
        )
        self._slots.keep({segment.segment for segment in began.held})
        self._grants.pay_again()
        self._seals.hand_over_again()

    # -- the end

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Make the newest snapshot durable, then free the slots.

        Raises SnapshotFailed if it could not be saved, DaemonUnreachable if that is not known within `timeout` seconds. The agent is closed
        in any case, and the daemon goes on as if the process had died.

        A process that ends without it counts as dead: the daemon saves the newest snapshot unasked and keeps it in memory for a while.
        """
        with self.calls("close"):
            if self._closed:
                return
            self._settle()
            try:
                if not self._client.wait_connected(self._client.welcome.stall_budget):
                    raise DaemonUnreachable(
                        "the daemon is gone; what is sealed waits in shared memory for the next one, which will save it"
                    )
                self._client.call(lambda n: m.Persist(id=n), m.Done, timeout)
                self._client.call(lambda n: m.Detach(id=n), m.Done, CALL_SECONDS)
            finally:
                self.let_go()

    def let_go(self) -> None:
        """Close without a word to the daemon, which takes this process for dead. May be called again, should Ctrl-C have come."""
        self._closed = True
        self._sealer.close()
        self._client.close()
        self._slots.drop()
        for pending in list(self._pending.values()):
            if pending.persist:
                self._seals.finish(pending, SnapshotFailed("the agent was closed first"))
            else:
                pending.supersede()
        self._gone = True

    def ready(self) -> None:
        """Check that the agent is open. Finish beginning the attempt that Ctrl-C has interrupted, if this rank has nobody to agree with."""
        self._check_open()
        if self._beginning:
            if self.world_size > 1:
                raise InvalidRequest("recover() was interrupted while it began the next attempt: call recover() again, on all ranks")
            self._begin_next()

    def _begin_next(self) -> None:
        """Begin the next attempt: the daemon takes this attempt's slots back, and saves what is owed of it."""
        self._beginning = True
        self._settle()
        self._begin(self.job)
        self._slots.drop()
        self._grants.owe_nothing()
        self._plan_anew()
        self._beginning = False

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this agent is closed; make another one")

    def _forget(self) -> None:
        """In a forked child: neither the parent's connection nor its locks may live on in here."""
        self._closed, self.calls = True, CallLock()
        self._client.forget()
        self._slots.forget()


def attachments() -> list[Attachment]:
    """Those of this process that may be used."""
    return [attachment for attachment in list(_attachments) if attachment.usable]


_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def _after_fork() -> None:
    for attachment in list(_attachments):
        attachment._forget()


os.register_at_fork(after_in_child=_after_fork)
