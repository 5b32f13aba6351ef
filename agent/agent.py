"""The agent: one per process and job. Copies state into slots, hands over, takes up again after a lost daemon.

`snapshot` never raises for what goes wrong with saving and never holds the training longer than its budget: the `Pending` tells. `recover`
is the opposite: it raises rather than let history be lost. Not to be used from several threads at once (calls are serialised).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckptd.agent import recovery
from ckptd.agent.arguments import job_name, make_request, rank_and_world_size
from ckptd.agent.capture import capture, optimizer_bytes_to_come
from ckptd.agent.client import Client
from ckptd.agent.launch import find_place
from ckptd.agent.pending import Pending
from ckptd.agent.planning import Layout, Structure, make_layout, sources, structure
from ckptd.agent.preparation import Preparation
from ckptd.agent.recovery import Recovered
from ckptd.agent.staging import Documents, MappedSlot
from ckptd.shared import messages as m
from ckptd.shared.errors import Busy, CkptdError, DaemonUnreachable, InternalError, InvalidRequest, SnapshotFailed, from_wire
from ckptd.shared.failpoints import failpoint
from ckptd.shared.lifecycle import Event
from ckptd.shared.request import Request

log = logging.getLogger("ckptd.agent")

CALL_SECONDS = 30.0
GRACE_SECONDS = 2.0  # beyond its budget that a daemon may take to say that there is no slot
CLOSE_SECONDS = 600.0
_AGAIN_SECONDS = 0.05
_SLACK = 1 << 16


class Agent:
    """Made lazily by `snapshot()` and `recover()` of this package; make one yourself to name job, socket or root.

    job: name of the training run; else CKPTD_JOB, else "default" with a private daemon only.
    socket: the daemon's; else CKPTD_SOCKET, else the default places, else a private daemon is started.
    root: directory of the checkpoints, for a private daemon; else CKPTD_ROOT.
    Raises DaemonUnreachable, InvalidName, InvalidRequest, StorageError.
    """

    def __init__(
        self, job: str | None = None, *, socket: str | os.PathLike[str] | None = None, root: str | os.PathLike[str] | None = None
    ) -> None:
        self.rank, self.world_size = rank_and_world_size()
        place = find_place(socket, root)
        self._lock = threading.RLock()
        self._slots: dict[str, MappedSlot] = {}
        self._layout: tuple[Structure, Layout] | None = None
        self._pending: dict[tuple[int, int], Pending] = {}
        self._preparing: Preparation | None = None
        self._closed = False
        self.attempt = 0
        self.last_step = -1
        self._client = Client(place, resume=self._resume, news=self._news, lost=self._fenced, late=self._late)
        try:
            self.job = job_name(job, private=self._client.welcome.private)
            self._begin()
        except BaseException:
            self._client.close()
            raise
        _agents.add(self)

    @property
    def closed(self) -> bool:
        """Also in a forked child, which needs an agent of its own."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self._client.connected else "without a daemon"
        return f"<Agent {self.job} attempt {self.attempt} rank {self.rank} of {self.world_size}, {state}>"

    def _begin(self) -> None:
        """Claim the next attempt. Steps start over; slots of the attempt before are gone."""
        began, _ = self._client.call(
            lambda n: m.Begin(id=n, job=self.job, rank=self.rank, world_size=self.world_size), m.Began, CALL_SECONDS
        )
        self.attempt, self.last_step = began.attempt, -1
        failpoint("agent.begun")

    # -- saving

    def snapshot(
        self,
        state: Any,
        *,
        step: int,
        tag: str | None = None,
        persist: bool = True,
        on_busy: str = "wait",
        metrics: Mapping[str, float] | None = None,
        user_content: Any = None,
        rng: bool = True,
    ) -> Pending:
        """Copy `state` as it is now, and return; everything else happens in the daemon.

        state: any nesting of tensors, modules, optimizers, objects with a state_dict, and plain values.
        step: 0 or more, higher than the last; tag: a name of its own, kept until deleted by hand.
        persist: False keeps it in memory only, unless this process dies or closes while it is the newest.
        on_busy: "wait" up to the daemon's stall budget (10 s) for a free slot, or "skip" without waiting.
        metrics: numbers for the manifest; user_content: anything JSON can say; rng: capture random generators too.
        """
        begun = time.perf_counter()
        pending = Pending(step if isinstance(step, int) else -1, self.attempt, persist=bool(persist))
        try:
            with self._lock:
                request = make_request(step, tag, persist, on_busy, metrics, user_content)
                self._snapshot(pending, state, request, on_busy, rng)
        except CkptdError as error:
            pending.fail(error)
        except Exception as error:
            log.exception("snapshot of step %s", step)
            pending.fail(InternalError(f"snapshot of step {step}: {error!r}"))
        pending.stall = time.perf_counter() - begun
        return pending

    def _snapshot(self, pending: Pending, state: Any, request: Request, on_busy: str, rng: bool) -> None:
        self._check_open()
        budget = self._client.welcome.stall_budget if on_busy == "wait" else 0.0
        deadline = time.monotonic() + budget
        if not self._client.wait_connected(budget):
            raise DaemonUnreachable("the daemon is gone; training goes on, and snapshots resume when it is back")
        captured = capture(state, rng=rng)
        layout = self._layout_of(captured.tensors)
        documents = Documents(captured.values, request.encode())
        if not self._ensure_slots(documents.capacity(layout), deadline):
            pending.skip("the slots in shared memory are still being made; a later snapshot will find them")
            return
        slot = self._acquire(pending, request.tag, deadline)
        if slot is None:
            return
        for old in [p for p in self._pending.values() if p.segment == slot.name and not p.persist]:
            del self._pending[old.attempt, old.step]
            old.supersede()
        pending.move(Event.GRANT)
        failpoint("agent.granted")
        pending.segment = slot.name
        self._pending[pending.attempt, pending.step] = pending
        try:
            slot.fill(sources(captured.tensors, layout.plan), layout, pending.step)
            pending.move(Event.STAGE)
            slot.seal(layout, documents)
            pending.move(Event.SEAL)
            self.last_step = pending.step
        except BaseException:
            self._pending.pop((pending.attempt, pending.step), None)
            self._abandon(slot)
            raise
        self._hand_over(pending)
        failpoint("agent.handed_over")

    def _layout_of(self, tensors: dict[str, torch.Tensor]) -> Layout:
        found = structure(tensors)
        if self._layout is None or self._layout[0] != found:
            self._layout = (found, make_layout(tensors))
        return self._layout[1]

    def _acquire(self, pending: Pending, tag: str | None, deadline: float) -> MappedSlot | None:
        """A free slot, or None: then the pending is skipped. After a lost connection, or from a daemon that stops, asks again."""
        begun = time.monotonic()
        while True:
            wait = max(0.0, deadline - time.monotonic())
            try:
                reply, _ = self._client.call(self._acquire_request(pending.step, tag, wait), m.Reply, wait + GRACE_SECONDS)
            except (DaemonUnreachable, Busy):
                time.sleep(min(wait, _AGAIN_SECONDS))
                if not self._client.wait_connected(wait) or time.monotonic() >= deadline:
                    raise
                continue
            if isinstance(reply, m.Granted):
                if reply.segment not in self._slots:
                    raise InternalError(f"the daemon granted a segment that this rank has not mapped: {reply.segment[:8]}")
                return self._slots[reply.segment]
            assert isinstance(reply, m.Refused)
            pending.skip(f"{reply.reason} (waited {time.monotonic() - begun:.1f} s)")
            return None

    @staticmethod
    def _acquire_request(step: int, tag: str | None, wait: float) -> Callable[[int], m.Acquire]:
        return lambda n: m.Acquire(id=n, step=step, name=tag, wait=wait)

    def _hand_over(self, pending: Pending) -> None:
        """Tell of the seal without waiting for what becomes of it. If the daemon is away, `_resume` tells again."""
        self._client.post(
            lambda n: m.Seal(id=n, segment=pending.segment, attempt=pending.attempt, step=pending.step),
            lambda reply: self._seal_answered(pending, reply),
        )

    def _seal_answered(self, pending: Pending, reply: m.Reply) -> None:
        if isinstance(reply, m.Error):
            self._finish(pending, from_wire(reply.code, reply.message))
        elif isinstance(reply, m.Sealed) and reply.durable:
            self._finish(pending, None)

    def _abandon(self, slot: MappedSlot) -> None:
        slot.clear()
        self._client.post(lambda n: m.Abandon(id=n, segment=slot.name), lambda _: None)

    def _news(self, progress: m.Progress) -> None:
        pending = self._pending.get((progress.attempt, progress.step))
        if pending is not None:
            self._finish(pending, None if progress.state == "durable" else from_wire(progress.code or "snapshot-failed", progress.reason))

    def _late(self, reply: m.Reply) -> None:
        """An answer that nobody waits for any more: a slot granted too late is given back."""
        if isinstance(reply, m.Granted):
            self._client.post(lambda n: m.Abandon(id=n, segment=reply.segment), lambda _: None)

    def _finish(self, pending: Pending, error: CkptdError | None) -> None:
        self._pending.pop((pending.attempt, pending.step), None)
        if pending.done:
            return
        if error is None:
            pending.move(Event.COMMIT)
        else:
            pending.fail(error)

    # -- slots

    def prepare(self, state: Any) -> None:
        """Get slots for `state` and map their pages in the background, so that the first snapshot is as fast as later ones.

        Called by itself after `recover`. An optimizer that has no state yet is counted with what its kind will have.
        """
        with self._lock:
            self._check_open()
            captured = capture(state, rng=True)
            capacity = Documents(captured.values, b"").capacity(make_layout(captured.tensors)) + optimizer_bytes_to_come(state)
            if self._preparing is not None and not self._preparing.wait(self._client.welcome.stall_budget):
                return
            if self._room() < capacity:
                self._prepare_slots(capacity)

    def _room(self) -> int:
        return min((slot.capacity for slot in self._slots.values()), default=-1)

    def _ensure_slots(self, needed: int, deadline: float) -> bool:
        """Slots for `needed` bytes by `deadline`; False if that takes longer: it goes on in the background, for a later snapshot."""
        preparing = self._preparing
        if preparing is None or preparing.allocated.is_set():
            if self._room() >= needed:
                return True
            preparing = self._prepare_slots(needed)
        if not preparing.wait(deadline - time.monotonic()):
            return False
        if preparing.error is not None:
            raise preparing.error
        return self._room() >= needed or self._ensure_slots(needed, deadline)

    def _prepare_slots(self, needed: int) -> Preparation:
        """Some room to spare, since plain values may grow from step to step."""
        self._preparing = Preparation(self._client, needed + needed // 64 + _SLACK, self._slots)
        return self._preparing

    # -- going back

    def recover(self, state: Any, *, step: int | None = None, strict: bool = True) -> Recovered | None:
        """Bring the newest complete state back into `state`, from memory or storage; None if nothing was ever saved.

        step: that step only. strict: False lets keys be missing on either side.
        Everything is compared before the first byte is written. Raises StructureMismatch, NotFound (for a `step` that is not there),
        RecoveryFailed, StorageError, DaemonUnreachable.
        """
        with self._lock:
            self._check_open()
            if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
                raise InvalidRequest(f"step is {step!r}; expected a number from 0 up")
            self._client.wait_connected(self._client.welcome.stall_budget)
            recovered = recovery.recover(self._client, self.job, state, step=step, strict=strict)
            if recovered is not None and recovered.step < self.last_step:
                self._settle_slots()
                self._begin()  # the daemon takes this attempt's slots back, and saves what is owed of it
                self._drop_slots()
            try:
                self.prepare(state)
            except CkptdError as error:
                log.warning("slots are made at the first snapshot, since this state cannot be saved as it is: %s", error)
        return recovered

    # -- a daemon that comes and goes

    def _resume(self) -> None:
        """On a new connection: take up the attempt, and tell again of every seal that has no answer."""
        if not self.attempt:
            return
        began, _ = self._client.call(
            lambda n: m.Begin(id=n, job=self.job, rank=self.rank, world_size=self.world_size, attempt=self.attempt), m.Began, CALL_SECONDS
        )
        held = {segment.segment for segment in began.held}
        for name in [name for name in self._slots if name not in held]:
            log.warning("a slot is gone from shared memory: what was only there is lost")
            self._slots.pop(name).close_descriptors()
        for pending in list(self._pending.values()):
            if pending.state == "sealed":
                self._hand_over(pending)

    def _fenced(self, error: CkptdError) -> None:
        for pending in list(self._pending.values()):
            self._finish(pending, error)

    # -- the end

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Make the newest snapshot durable, then free the slots.

        Raises SnapshotFailed if it could not be saved, DaemonUnreachable if that is not known within `timeout` seconds. The agent is closed
        in any case, and the daemon goes on as if the process had died.

        A process that ends without it counts as dead: the daemon saves the newest snapshot unasked and keeps it in memory for a while.
        """
        with self._lock:
            if self._closed:
                return
            self._settle_slots()
            try:
                if not self._client.wait_connected(self._client.welcome.stall_budget):
                    raise DaemonUnreachable(
                        "the daemon is gone; what is sealed waits in shared memory for the next one, which will save it"
                    )
                self._client.call(lambda n: m.Persist(id=n), m.Done, timeout)
                self._client.call(lambda n: m.Detach(id=n), m.Done, CALL_SECONDS)
            finally:
                self._closed = True
                self._client.close()
                self._drop_slots()
                for pending in list(self._pending.values()):
                    self._finish(pending, SnapshotFailed("the agent was closed first"))

    def _settle_slots(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _drop_slots(self) -> None:
        for slot in self._slots.values():
            slot.forget()
        self._slots.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this agent is closed; make another one")

    def _forget(self) -> None:
        """In a forked child: neither the parent's connection nor its locks may live on in here."""
        self._closed = True
        self._client.forget()
        for slot in self._slots.values():
            slot.close_descriptors()


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _after_fork() -> None:
    for agent in list(_agents):
        agent._forget()


os.register_at_fork(after_in_child=_after_fork)
