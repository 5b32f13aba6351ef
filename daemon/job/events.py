"""Reports what has happened in a daemon, to the parts that act on it.

The saver and the claims report events, and know none of the parts that act on them.
`subscribe` in `composition.py` says which part acts on which event; `App` adds itself
to `on_changed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.snapshot import Snapshot


@dataclass(slots=True)
class Events:
    """The events of one daemon, each with the functions to call, in their order.

    A function is called at once, on the event loop, before the report returns.
    """

    on_saved: list[Callable[[Snapshot], None]] = field(default_factory=list)
    on_settled: list[Callable[[Job], None]] = field(default_factory=list)
    on_claim_lost: list[Callable[[Job, int], None]] = field(default_factory=list)
    on_remark: list[Callable[[str, str], None]] = field(default_factory=list)
    on_changed: list[Callable[[], None]] = field(default_factory=list)

    def saved(self, snapshot: Snapshot) -> None:
        """Report that a snapshot is durable, or that its save has failed."""
        for call in self.on_saved:
            call(snapshot)

    def settled(self, job: Job) -> None:
        """Report that slots of a job may be free now: after a commit, at the end of each
        save, and when the checksums of a step are known, so that the board may show it.
        """
        for call in self.on_settled:
            call(job)
        self.changed()

    def claim_lost(self, job: Job, attempt: int) -> None:
        """Report that another daemon has claimed the number of an attempt that began in
        memory.
        """
        for call in self.on_claim_lost:
            call(job, attempt)

    def remark(self, job: str, text: str) -> None:
        """Report a warning about the storage, which the trainer of this job is to log."""
        for call in self.on_remark:
            call(job, text)

    def changed(self) -> None:
        """Report that work has ended, or that a client has come or gone: a private
        daemon without either ends.
        """
        for call in self.on_changed:
            call()
