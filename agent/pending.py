"""`Pending`, the result of `snapshot()`: the progress of one snapshot, which any thread
may read or wait for.

`PendingSnapshot` is the state behind it, which only the agent sees and changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Literal, get_args

from ckptd.agent.threads.call_lock import Nested, call_around
from ckptd.agent.threads.callbacks import Callbacks
from ckptd.agent.threads.flag import Waiters
from ckptd.shared.errors import CkptdError, SnapshotFailed
from ckptd.shared.wire.lifecycle import Event, SnapshotState, step
from ckptd.shared.wire.messages import TrainingCost

log = logging.getLogger("ckptd.agent")

Milestone = Literal["staged", "sealed", "durable", "uploaded"]
"""A state that a snapshot reaches on its way, in order, and that a thread can wait for."""
Goal = Literal[Milestone, "replicated"]
"""A goal that a thread can wait for: a milestone, or a copy of the snapshot in the memory
of other nodes.
"""
PendingState = Literal[Milestone, "failed", "skipped"]

_SHOWN: dict[SnapshotState, PendingState] = {
    SnapshotState.NEW: "staged",
    SnapshotState.FILLING: "staged",
    SnapshotState.STAGED: "staged",
    SnapshotState.SEALED: "sealed",
    SnapshotState.DURABLE: "durable",
    SnapshotState.FAILED: "failed",
    SnapshotState.SKIPPED: "skipped",
}
NOT_COPIED = "the snapshot is not copied to other nodes: "
NOT_SET = NOT_COPIED + "set replicas = 1 for the daemons of all nodes"
_MILESTONES: tuple[PendingState, ...] = get_args(Milestone)


class Pending:
    """One snapshot on its way to storage.

    `snapshot()` returns it; any thread may read it or wait. Two of the same snapshot
    are equal.
    """

    __slots__ = ("_snapshot",)

    def __init__(self, snapshot: PendingSnapshot) -> None:
        self._snapshot = snapshot

    @property
    def step(self) -> int:
        return self._snapshot.step

    @property
    def attempt(self) -> int:
        return self._snapshot.attempt

    @property
    def persist(self) -> bool:
        """True if the snapshot is to be saved to storage, False if it is kept in memory
        only.
        """
        return self._snapshot.persist

    @property
    def stall(self) -> float:
        """Seconds for which the call of `snapshot` held the training; 0.0 until that
        call returns.
        """
        return self._snapshot.stall

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's state in its slot; 0 until the state is planned."""
        return self._snapshot.nbytes

    @property
    def lost_seconds(self) -> float | None:
        """Seconds by which the training is behind because of this snapshot: the time in
        the call of `snapshot`, and the extra time of the steps until it was durable.

        None until an optimizer has ended a step after the snapshot, or if fewer than 3
        steps have been timed while no snapshot was being saved. Noise in the step times
        may make it negative.
        """
        return self._snapshot.lost_seconds

    @property
    def durable_seconds(self) -> float | None:
        """Seconds from the call of `snapshot` until the checkpoint was durable; None
        until then.
        """
        return self._snapshot.durable_seconds

    @property
    def error(self) -> CkptdError | None:
        """The reason if the snapshot failed, was skipped, or was kept in memory only and
        can no longer become durable; otherwise None.
        """
        return self._snapshot.error

    @property
    def segment(self) -> str:
        """The name of its slot's segment, "" until a slot is granted."""
        return self._snapshot.segment

    @property
    def unsaved(self) -> dict[str, str] | None:
        """With unsavable="skip", the reason for each key that was left out of the
        snapshot, otherwise None.
        """
        return self._snapshot.unsaved

    @property
    def state(self) -> PendingState:
        """The state of the snapshot: "staged", "sealed", "durable", "uploaded",
        "failed" or "skipped".

        "staged": this rank's slot is not complete yet. "sealed": this rank's slot is
        complete, in memory. "durable": the checkpoint is committed to storage, with the
        parts of all ranks. If the daemon has a stage, and the job is on one node only,
        "durable" means that it is committed on the local disk of this node. "uploaded":
        the daemon has a stage, and the checkpoint is committed in the root. Without a
        stage, a durable checkpoint is in the root. "failed" and "skipped": `error` has
        the reason.
        """
        return self._snapshot.state

    @property
    def replicated(self) -> bool:
        """True once all nodes have copied the snapshot to the memory of other nodes."""
        return self._snapshot.replicated

    @property
    def done(self) -> bool:
        """True if the save is over: the state is "durable", "uploaded", "failed" or
        "skipped".
        """
        return self._snapshot.done

    def wait(self, state: Goal = "durable", timeout: float | None = None) -> Pending:
        """Wait until the snapshot has reached `state`, or a later one, and return this
        Pending.

        state: "staged" (a slot is granted), "sealed" (this rank's slot is complete, in
            memory), "durable" (the checkpoint is committed to storage, by all ranks),
            "uploaded" (it is committed in the root) or "replicated" (all nodes have
            copied it to the memory of other nodes, whether or not it is durable). If the
            daemon has a stage, "durable" means the local disk of this node. If that disk is
            lost, so is the checkpoint, until it is "uploaded". Without a stage, the two are
            the same. A snapshot with `persist=False` becomes durable only if its trainer
            dies or closes, or the daemon stops, while it is the newest.
        timeout: seconds to wait. Default: no limit.

        Raises `error` if the snapshot can no longer reach that state; TimeoutError
        after `timeout` seconds; ValueError for an unknown state. Raises Busy if it
        would have to wait inside another call of this thread, for example in a signal
        handler that interrupts `snapshot`: the interrupted call cannot continue until
        the handler returns.
        """
        self._snapshot.wait(state, timeout)
        return self

    def future(self, until: Goal = "durable") -> Future[Pending]:
        """Return a future whose result is this Pending, once the snapshot has reached
        the state `until` or a later one.

        It has the exception that `wait` would raise if the snapshot can no longer reach
        that state. `await asyncio.wrap_future(pending.future())` waits in a coroutine.
        To cancel the future changes nothing about the save. Functions that the future
        calls run on another thread. Unlike `wait`, `result()` does not refuse to wait
        inside another call of this thread.

        until: a state, as for `wait`. Raises ValueError for an unknown state.
        """
        _check(until)
        future: Future[Pending] = Future()
        self._snapshot.follow(future, until)
        return future

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pending) and self._snapshot is other._snapshot

    def __hash__(self) -> int:
        return hash(self._snapshot)

    def __repr__(self) -> str:
        meaning = self._snapshot.meaning
        return (
            f"<Pending step {self.step} of attempt {self.attempt}: {self.state}"
            f"{f' ({meaning})' if meaning else ''}{f': {self.error}' if self.error else ''}>"
        )


class PendingSnapshot:
    """The state of one snapshot, which the agent moves from event to event.

    The fields are those of `Pending`, and these:

    cost_before: what the snapshot before has cost the training, or None if that is not
    known. begun: the time of `time.perf_counter` at which the call of `snapshot` began,
    or None if `dcp.save` takes the snapshot. meets: False if this rank keeps its plan,
    and so meets the other ranks in no round for this step. uncompared: True if the device
    had too little memory to compare the snapshot with other ranks. unlocked: bytes of its
    slot that were not page-locked, if an accelerator copies into it.
    """

    def __init__(
        self,
        step: int,
        attempt: int = 0,
        *,
        persist: bool = True,
        note: Callable[[PendingSnapshot], object] = lambda snapshot: None,
    ) -> None:
        """`note` is called with this snapshot when its state has become "sealed" or
        final, on the thread that has changed the state.
        """
        self.step = step
        self.attempt = attempt
        self.persist = persist
        self.stall = 0.0
        self.nbytes = 0
        self.lost_seconds: float | None = None
        self.durable_seconds: float | None = None
        self.cost_before: TrainingCost | None = None
        self.begun: float | None = None
        self.error: CkptdError | None = None
        self.segment = ""
        self.meets = True
        self.uncompared = False
        self.unlocked = 0
        self.unsaved: dict[str, str] | None = None
        self._state = SnapshotState.NEW
        self._was_sealed = False
        # True if the daemon has a stage, and so a durable checkpoint may be on the
        # local disk only
        self._local = False
        self._uploaded = False
        self.replicated = False
        # The reason why the snapshot is not copied to another node, or never will be.
        self._alone: CkptdError | None = SnapshotFailed(NOT_SET)
        # The reason why a durable checkpoint cannot become "uploaded" any more.
        self._never: CkptdError | None = None
        self._over = False  # True once a memory-only snapshot can no longer become durable
        self._note = note
        self._lock = threading.RLock()
        self._waiters = Waiters()
        self._futures: dict[Future[Pending], Goal] = {}

    @property
    def state(self) -> PendingState:
        return "uploaded" if self._uploaded else _SHOWN[self._state]

    @property
    def meaning(self) -> str:
        """Where the snapshot is in its present state, in words, and what happens to it.

        "" if nothing happens to it any more, and `error` has the reason.
        """
        match self.state:
            case "staged":
                return "being copied into memory"
            case "sealed" if self._over:
                return ""
            case "sealed" if self.persist:
                return "in memory, being saved"
            case "sealed":
                return "in memory only, until this process or the daemon ends"
            case "durable" if self._local and self._never is None:
                return "on the local disk, being uploaded"
            case "durable":
                return f"on {'the local disk' if self._local else 'storage'}"
            case "uploaded":
                return "in the root"
            case _:
                return ""

    @property
    def done(self) -> bool:
        return self._state in (SnapshotState.DURABLE, SnapshotState.FAILED, SnapshotState.SKIPPED)

    def wait(self, state: Goal, timeout: float | None = None) -> None:
        """Wait until the snapshot has reached `state`, or a later one.

        Raises as `Pending.wait`.
        """
        _check(state)
        if not self._settled(state) and (outer := call_around()):
            raise Nested("wait()", f"{outer}()")
        if not self._waiters.wait_for(lambda: self._settled(state), timeout):
            raise TimeoutError(f"step {self.step} is {self.state}, not {state}, after {timeout} s")
        if (error := self._missed(state)) is not None:
            raise error

    def follow(self, future: Future[Pending], until: Goal) -> None:
        """Complete the future once the snapshot has reached the state `until`, or can
        no longer reach it.
        """
        # The reference to this snapshot keeps it alive: the upload of a snapshot that
        # nobody holds is not followed.
        future.add_done_callback(lambda done: self._futures.pop(done, None))
        self._futures[future] = until  # before the check, so that no change is missed
        if self._settled(until):
            self._complete(future, until)

    def _complete(self, future: Future[Pending], until: Goal) -> None:
        """Give the future its result. Does nothing if it is complete or cancelled."""
        if self._futures.pop(future, None) is None or not future.set_running_or_notify_cancel():
            return
        if (error := self._missed(until)) is None:
            future.set_result(Pending(self))
        else:
            future.set_exception(error)

    def _changed(self) -> None:
        """Wake the threads that wait, and complete the futures that are settled.

        A future calls functions of the caller, so each is completed on a thread of its
        own.
        """
        self._waiters.notify()
        for future, until in tuple(self._futures.items()):
            if self._settled(until):
                complete = partial(self._complete, future, until)
                Callbacks().call(complete, f"a future of the snapshot of step {self.step}")

    def _missed(self, state: Goal) -> CkptdError | None:
        """Return the reason why a settled snapshot has not reached the state, or None if
        it has reached it.
        """
        if self._reached(state):
            return None
        failed = self._state in (SnapshotState.FAILED, SnapshotState.SKIPPED)
        error = self._alone if state == "replicated" and not failed else None
        error = error or self.error or self._never
        assert error is not None
        return error

    def _settled(self, state: Goal) -> bool:
        """Return True if the snapshot has reached the state, or can no longer reach it."""
        if state == "replicated" and self._alone is not None:
            return True
        return (
            self._reached(state)
            or (self._over and state != "replicated")
            or self._state in (SnapshotState.FAILED, SnapshotState.SKIPPED)
            or (self._never is not None and self._state is SnapshotState.DURABLE)
        )

    def _reached(self, state: Goal) -> bool:
        if state == "replicated":
            return self.replicated
        return (
            (state == "sealed" and self._was_sealed)
            or (state == "uploaded" and self._state is SnapshotState.DURABLE and not self._local)
            or (
                self.state in _MILESTONES
                and _MILESTONES.index(self.state) >= _MILESTONES.index(state)
                and self._state is not SnapshotState.NEW
            )
        )

    @property
    def why(self) -> CkptdError:
        return self.error or SnapshotFailed(f"step {self.step} is {self.state}")

    @property
    def held(self) -> float:
        """Seconds for which the call of `snapshot` has held the training so far; 0.0 if
        `dcp.save` takes it instead.
        """
        return self.stall or (0.0 if self.begun is None else time.perf_counter() - self.begun)

    @property
    def granted(self) -> bool:
        return self._state is not SnapshotState.NEW

    def expect_upload(self) -> None:
        """Record that the daemon has a stage.

        Called before the snapshot becomes durable.
        """
        self._local = True

    def upload(self, error: CkptdError | None = None) -> None:
        """Record that a durable checkpoint is in the root, or the reason why that can
        no longer be known. The first call counts.
        """
        with self._lock:
            if self._uploaded or self._never is not None:
                return
            self._uploaded, self._never = error is None, error
        self._changed()

    def expect_copy(self, error: CkptdError | None) -> None:
        """Record that the snapshot will be copied to the memory of other nodes, or the
        reason why it will not.
        """
        self._alone = error

    def replicate(self, error: CkptdError | None) -> None:
        """Record that all nodes have copied the snapshot to their peers, or the reason
        why they will not. The first call counts.
        """
        with self._lock:
            if self.replicated or self._alone is not None:
                return
            self.replicated, self._alone = error is None, error
        self._changed()

    def move(self, event: Event) -> None:
        """Apply an event to the state, and wake the waiting threads.

        Raises the error of the snapshot if it has failed meanwhile, for example because
        another rank could not take the step.
        """
        with self._lock:
            if self._state is SnapshotState.FAILED:
                raise self.why
            after = step(self._state, event)
            log.debug("snapshot %d: %s -> %s", self.step, self._state.value, after.value)
            self._was_sealed = self._was_sealed or after is SnapshotState.SEALED
            if after is SnapshotState.DURABLE and self.begun is not None:
                self.durable_seconds = time.perf_counter() - self.begun
            self._state = after
        self._changed()
        if after in (SnapshotState.SEALED, SnapshotState.DURABLE):
            self._note(self)

    def seal(self) -> None:
        """Move to "sealed" from any earlier state.

        Needed if Ctrl-C came after the slot's header was sealed and before this state
        had followed.
        """
        for before, event in (
            (SnapshotState.NEW, Event.GRANT),
            (SnapshotState.FILLING, Event.STAGE),
            (SnapshotState.STAGED, Event.SEAL),
        ):
            if self._state is before:
                self.move(event)

    def fail(self, error: CkptdError) -> None:
        """Mark the snapshot as failed.

        Does nothing if its state is final, so the first error counts.
        """
        with self._lock:
            if self.done:
                return
            self.error = error
            self._state = step(self._state, Event.FAIL)
            log.error(
                "snapshot of step %d failed: %s",
                self.step,
                str(error).removeprefix(f"step {self.step} failed: "),
            )
        self._changed()
        self._note(self)

    def skip(self, reason: str) -> None:
        """Mark the snapshot as skipped because it gets no slot, or as failed if it had
        a smaller slot before.

        Does nothing if its state is final: another rank may have failed the step before
        the refusal arrived.
        """
        with self._lock:
            skipped = self._state is SnapshotState.NEW
            if skipped:
                self.error = SnapshotFailed(f"step {self.step} was skipped: {reason}")
                self._state = step(self._state, Event.REFUSE)
                log.warning("snapshot of step %d skipped: %s", self.step, reason)
        if not skipped:
            self.fail(SnapshotFailed(f"step {self.step} failed: {reason}"))
            return
        self._changed()
        self._note(self)

    def supersede(self, why: str = "a newer snapshot has replaced it there") -> None:
        """Record that a memory-only snapshot can no longer become durable, because its
        slot is filled again or the agent closes.
        """
        with self._lock:
            if not self.done:
                self.error = SnapshotFailed(f"step {self.step} was kept in memory only, and {why}")
                self._over = True
        self._changed()


def _check(state: str) -> None:
    if state not in get_args(Goal):
        raise ValueError(
            f"state is {state!r}; expected 'staged', 'sealed', 'durable', 'uploaded' or "
            f"'replicated'"
        )
