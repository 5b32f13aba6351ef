"""What `snapshot()` returns: where that snapshot is on its way, to be looked at or waited for from any thread."""

from __future__ import annotations

import logging
import threading

from ckptd.agent.threads.call_lock import Nested, call_around
from ckptd.agent.threads.flag import Waiters
from ckptd.shared.errors import CkptdError, SnapshotFailed
from ckptd.shared.lifecycle import Event, SnapshotState, step

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
_RANK = {"staged": 0, "sealed": 1, "durable": 2}


class Pending:
    """One snapshot. `stall`: seconds that training was held; `error`: why it failed or was skipped, else None."""

    def __init__(self, step: int, attempt: int = 0, *, persist: bool = True) -> None:
        self.step = step
        self.attempt = attempt
        self.persist = persist
        self.stall = 0.0
        self.error: CkptdError | None = None
        self.segment = ""
        self._state = SnapshotState.NEW
        self._was_sealed = False
        self._over = False  # replaced in memory: it will not become durable
        self._lock = threading.RLock()
        self._waiters = Waiters()

    @property
    def state(self) -> str:
        """ "staged", "sealed", "durable", "failed" or "skipped"."""
        return _SHOWN[self._state]

    @property
    def done(self) -> bool:
        """Nothing more will happen."""
        return self._state in (SnapshotState.DURABLE, SnapshotState.FAILED, SnapshotState.SKIPPED)

    def wait(self, state: str = "durable", timeout: float | None = None) -> Pending:
        """Until the snapshot is "staged", "sealed" (in memory, whole) or "durable" (committed to storage); returns itself.

        Raises the reason if it cannot come to that any more, TimeoutError after `timeout` seconds. A snapshot with `persist=False` becomes
        durable only if its trainer dies or closes while it is the newest. Raises Busy where it would have to wait inside another call of
        this thread, as in a signal handler that interrupts `snapshot`: nothing goes on until the handler returns.
        """
        if state not in _RANK:
            raise ValueError(f"there is no state {state!r} to wait for: use 'staged', 'sealed' or 'durable'")
        settled = self._reached(state) or self.done or self._over
        if not settled and (outer := call_around()):
            raise Nested("wait()", f"{outer}()")
        if not self._waiters.wait_for(lambda: self._reached(state) or self.done or self._over, timeout):
            raise TimeoutError(f"step {self.step} is {self.state}, not {state}, after {timeout} s")
        if not self._reached(state):
            assert self.error is not None
            raise self.error
        return self

    def _reached(self, state: str) -> bool:
        if state == "sealed" and self._was_sealed:
            return True
        return self.state in _RANK and _RANK[self.state] >= _RANK[state] and self._state is not SnapshotState.NEW

    def __repr__(self) -> str:
        why = f": {self.error}" if self.error else ""
        return f"<Pending step {self.step} of attempt {self.attempt} {self.state}{why}>"

    # For the agent alone.

    @property
    def why(self) -> CkptdError:
        return self.error or SnapshotFailed(f"step {self.step} is {self.state}")

    @property
    def granted(self) -> bool:
        return self._state is not SnapshotState.NEW

    def move(self, event: Event) -> None:
        """Raises the reason if it has failed meanwhile: another rank could not take it."""
        with self._lock:
            if self._state is SnapshotState.FAILED:
                raise self.why
            after = step(self._state, event)
            log.debug("snapshot %d: %s -> %s", self.step, self._state.value, after.value)
            self._was_sealed = self._was_sealed or after is SnapshotState.SEALED
            self._state = after
        self._waiters.notify()

    def seal(self) -> None:
        """Go as far as sealed, from wherever Ctrl-C has stopped it after the slot's header had said so."""
        for before, event in ((SnapshotState.NEW, Event.GRANT), (SnapshotState.FILLING, Event.STAGE), (SnapshotState.STAGED, Event.SEAL)):
            if self._state is before:
                self.move(event)

    def fail(self, error: CkptdError) -> None:
        """From any state; the first reason counts."""
        with self._lock:
            if self.done:
                return
            self.error = error
            self._state = step(self._state, Event.FAIL)
            log.warning("snapshot of step %d failed: %s", self.step, error)
        self._waiters.notify()

    def skip(self, reason: str) -> None:
        with self._lock:
            self.error = SnapshotFailed(f"step {self.step} was skipped: {reason}")
            self._state = step(self._state, Event.REFUSE)
            log.warning("snapshot of step %d skipped: %s", self.step, reason)
        self._waiters.notify()

    def supersede(self) -> None:
        """Its slot is being filled again: a memory-only snapshot has had its time."""
        with self._lock:
            if not self.done:
                self.error = SnapshotFailed(f"step {self.step} was kept in memory only, and a newer snapshot has replaced it there")
                self._over = True
        self._waiters.notify()
