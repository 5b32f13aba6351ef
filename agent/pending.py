"""`Pending`, the result of `snapshot()`: the progress of one snapshot, which any thread
may read or wait for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ckptd.agent.threads.call_lock import Nested, call_around
from ckptd.agent.threads.flag import Waiters
from ckptd.shared.errors import CkptdError, SnapshotFailed
from ckptd.shared.wire.lifecycle import Event, SnapshotState, step
from ckptd.shared.wire.messages import TrainingCost

log = logging.getLogger("ckptd.agent")

_SHOWN = {
    SnapshotState.NEW: "staged",
    SnapshotState.FILLING: "staged",
    SnapshotState.STAGED: "staged",
    SnapshotState.SEALED: "sealed",
    SnapshotState.DURABLE: "durable",
    SnapshotState.FAILED: "failed",
    SnapshotState.SKIPPED: "skipped",
}
_RANK = {"staged": 0, "sealed": 1, "durable": 2, "uploaded": 3}


class Pending:
    """One snapshot on its way to storage.

    `snapshot()` returns it; any thread may read it or wait.

    step, attempt: the step and the attempt of the snapshot.
    persist: True if the snapshot is to be saved to storage, False if it is kept in
        memory only.
    stall: seconds for which the call of `snapshot` held the training; 0.0 until that
        call returns.
    lost_seconds: seconds by which the training is behind because of this snapshot: its
        call, and the steps that took longer than usual until it was durable. None until
        a step of an optimizer has ended, and if fewer than 3 undisturbed steps are
        known. The noise of the step times may make it negative.
    error: the reason if the snapshot failed, was skipped, or was kept in memory only
        and can no longer become durable; otherwise None.
    segment: the name of its slot's segment, "" until a slot is granted.
    unsaved: with unsavable="skip", the reason for each key that was left out of the
        snapshot, otherwise None.
    """

    def __init__(
        self,
        step: int,
        attempt: int = 0,
        *,
        persist: bool = True,
        note: Callable[[Pending], object] = lambda pending: None,
    ) -> None:
        """`note` is called with this Pending when its state has become "sealed" or
        final, on the thread that has changed the state.
        """
        self.step = step
        self.attempt = attempt
        self.persist = persist
        self.stall = 0.0
        self.lost_seconds: float | None = None
        self.cost_before: TrainingCost | None = None
        self.begun: float | None = None
        self.error: CkptdError | None = None
        self.segment = ""
        self.meets = True
        """False if this rank keeps its plan, and so meets the other ranks in no round
        for this step.
        """
        self.unsaved: dict[str, str] | None = None
        self._state = SnapshotState.NEW
        self._was_sealed = False
        # True if the daemon has a stage, and so a durable checkpoint may be on the
        # local disk only
        self._local = False
        self._uploaded = False
        # The reason why a durable checkpoint cannot become "uploaded" any more.
        self._never: CkptdError | None = None
        self._over = False  # True once a memory-only snapshot can no longer become durable
        self._note = note
        self._lock = threading.RLock()
        self._waiters = Waiters()

    @property
    def state(self) -> str:
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
        return "uploaded" if self._uploaded else _SHOWN[self._state]

    @property
    def done(self) -> bool:
        """True if the save is over: the state is "durable", "uploaded", "failed" or
        "skipped".
        """
        return self._state in (SnapshotState.DURABLE, SnapshotState.FAILED, SnapshotState.SKIPPED)

    def wait(self, state: str = "durable", timeout: float | None = None) -> Pending:
        """Wait until the snapshot has reached `state`, or a later one, and return this
        Pending.

        state: "staged" (a slot is granted), "sealed" (this rank's slot is complete, in
            memory), "durable" (the checkpoint is committed to storage, by all ranks) or
            "uploaded" (it is committed in the root). If the daemon has a stage,
            "durable" means the local disk of this node. If that disk is lost, so is the
            checkpoint, until it is "uploaded". Without a stage, the two are the same. A
            snapshot with `persist=False` becomes durable only if its trainer dies or
            closes, or the daemon stops, while it is the newest.
        timeout: seconds to wait. Default: no limit.

        Raises `error` if the snapshot can no longer reach that state; TimeoutError
        after `timeout` seconds; ValueError for an unknown state. Raises Busy if it
        would have to wait inside another call of this thread, for example in a signal
        handler that interrupts `snapshot`: the interrupted call cannot continue until
        the handler returns.
        """
        if state not in _RANK:
            raise ValueError(
                f"state is {state!r}; expected 'staged', 'sealed', 'durable' or 'uploaded'"
            )
        settled = self._settled(state)
        if not settled and (outer := call_around()):
            raise Nested("wait()", f"{outer}()")
        if not self._waiters.wait_for(lambda: self._settled(state), timeout):
            raise TimeoutError(f"step {self.step} is {self.state}, not {state}, after {timeout} s")
        if not self._reached(state):
            error = self.error or self._never
            assert error is not None
            raise error
        return self

    def _settled(self, state: str) -> bool:
        """Return True if the snapshot has reached the state, or can no longer reach it."""
        if (
            self._reached(state)
            or self._over
            or self._state in (SnapshotState.FAILED, SnapshotState.SKIPPED)
        ):
            return True
        return self._never is not None and self._state is SnapshotState.DURABLE

    def _reached(self, state: str) -> bool:
        if state == "sealed" and self._was_sealed:
            return True
        if state == "uploaded" and self._state is SnapshotState.DURABLE and not self._local:
            return True
        return (
            self.state in _RANK
            and _RANK[self.state] >= _RANK[state]
            and self._state is not SnapshotState.NEW
        )

    def __repr__(self) -> str:
        why = f": {self.error}" if self.error else ""
        return f"<Pending step {self.step} of attempt {self.attempt} {self.state}{why}>"

    # For the agent only.

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
        self._waiters.notify()

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
            self._state = after
        self._waiters.notify()
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
        self._waiters.notify()
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
        self._waiters.notify()
        self._note(self)

    def supersede(self, why: str = "a newer snapshot has replaced it there") -> None:
        """Record that a memory-only snapshot can no longer become durable, because its
        slot is filled again or the agent closes.
        """
        with self._lock:
            if not self.done:
                self.error = SnapshotFailed(f"step {self.step} was kept in memory only, and {why}")
                self._over = True
        self._waiters.notify()
