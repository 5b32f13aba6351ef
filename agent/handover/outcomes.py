"""Counts what became of an agent's snapshots, so that a run that saves nothing does not
end quietly.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial

from ckptd.agent.pending import Pending, PendingSnapshot
from ckptd.agent.threads.callbacks import Callbacks
from ckptd.shared.errors import (
    AlreadyExists,
    CkptdError,
    ForeignMemory,
    InternalError,
    InvalidName,
    InvalidRequest,
    JobRunning,
    UnsavableValue,
)

log = logging.getLogger("ckptd.agent")


MISTAKES = (
    UnsavableValue,
    InvalidRequest,
    InvalidName,
    AlreadyExists,
    JobRunning,
    ForeignMemory,
    InternalError,
)
"""The errors that the caller must mend. Others may end by themselves: after a restart,
older slots may still take the quota for a while.
"""


class Outcomes:
    """The outcomes of the snapshots of one agent.

    `sealed_in` is the last attempt in which one of them was sealed, or 0.
    """

    def __init__(self) -> None:
        self.sealed_in = 0
        self._failed = 0
        self._callbacks = Callbacks()
        self._last: tuple[int, CkptdError] | None = None
        self._unsaved: dict[str, str] = {}
        _all.add(self)

    def note(
        self, pending: PendingSnapshot, on_failure: Callable[[Pending], object] | None = None
    ) -> None:
        """Record that a snapshot was sealed or has ended.

        If it has failed or was skipped, call `on_failure` on another thread, after the
        calls for earlier snapshots, and log its exceptions.
        """
        if pending.state in ("sealed", "durable"):
            self.sealed_in = pending.attempt
            return
        self._failed += 1
        self._last = (pending.step, pending.why)
        if on_failure is not None:
            self._callbacks.call(
                partial(on_failure, Pending(pending)),
                f"on_failure of the snapshot of step {pending.step}",
            )

    def note_unsaved(self, unsaved: dict[str, str]) -> None:
        """Log the keys that a snapshot leaves out, with the reasons, unless the last
        snapshot left out the same.
        """
        if unsaved and unsaved.keys() != self._unsaved.keys():
            log.warning("left out of the snapshots: %s", "; ".join(unsaved.values()))
        self._unsaved = unsaved

    def complaint(self) -> str:
        """Return a sentence that says why nothing was saved, or "" if none has failed.

        A sealed snapshot counts as saved: the daemon sees to it, and `close` raises if
        it cannot.
        """
        if self.sealed_in or self._last is None:
            return ""
        step, error = self._last
        snapshots = (
            "its only snapshot failed"
            if self._failed == 1
            else f"none of its {self._failed} snapshots could be saved"
        )
        return (
            f"nothing of this run was saved: {snapshots}; the last error, of step {step}: {error}"
        )


_all: weakref.WeakSet[Outcomes] = weakref.WeakSet()


def _complain() -> None:
    """Write one line to standard error if this process ends without `close`, and the
    daemon has nothing to save for it either.
    """
    found = list(_all)
    complaints = [outcomes.complaint() for outcomes in found]
    if any(complaints) and not any(outcomes.sealed_in for outcomes in found):
        print(f"ckptd: {next(filter(None, complaints))}", file=sys.stderr)


atexit.register(_complain)
os.register_at_fork(after_in_child=_all.clear)
