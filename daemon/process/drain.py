"""Saves the snapshots and uploads that are owed before this node is shut down, and says
what is still owed at the deadline. The daemon runs on, and trainers may train on.

`daemon/job/dues.py` decides what is owed, and says of each debt whether it has left. What
is owed is decided once, when a drain begins: a training that never pauses would
otherwise always owe something.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

from ckptd.daemon import log_events
from ckptd.daemon.composition import Components
from ckptd.daemon.job import dues, stage_decisions
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.dues import Debt, SnapshotDebt, UploadDebt, UploadProgress
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.shared import names
from ckptd.shared.errors import NotFound
from ckptd.shared.units import count_text, some_text
from ckptd.shared.wire.lifecycle import SnapshotState
from ckptd.shared.wire.messages import Drained, Due

log = logging.getLogger("ckptd.drain")

LOOK_SECONDS = 0.05
"""Seconds between two checks of what is still owed."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
"""Seconds before a save that has failed is tried again. The pause doubles with each
failure. A save that has failed before the drain is tried again at once.
"""
MOST_LISTED = 500
"""The most things that one answer lists, so that it fits into a frame."""


class DrainUnderWay:
    """A drain of one job of a daemon, or of all its jobs."""

    def __init__(self, parts: Components, job: str, seconds: float) -> None:
        """Prepare a drain.

        job: the name of the job, or "" for all jobs. seconds: the time to wait.
        """
        self._parts = parts
        self._job, self._seconds = job, seconds
        self._saved: list[str] = []

    async def run(self) -> Drained:
        """Wait until all that is owed now has left this node, or until the time is over.

        Return what has left, and what has not. Saves that are under way at the end go on.
        Raises NotFound if the daemon does not know the job.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        until = begun + self._seconds
        await self._parts.orphans.record_unreported()
        debts = list(self._debts(self._jobs()))
        pause, retry = FIRST_PAUSE, begun
        while debts:
            to_save = [found for debt in debts if (found := debt.to_save) is not None]
            failed = [s for s in to_save if s.state is SnapshotState.FAILED]
            if not failed:
                retry = loop.time() + pause
            elif loop.time() >= retry:
                retry, pause = loop.time() + pause, min(2 * pause, LONGEST_PAUSE)
                self._save(failed)
            self._save(s for s in to_save if s.state is not SnapshotState.FAILED)
            uploads = self._uploads()
            debts, saved = dues.still_owed(debts, uploads)
            self._saved += saved
            if loop.time() >= until or all(debt.is_hopeless(uploads) for debt in debts):
                break
            await asyncio.sleep(min(LOOK_SECONDS, until - loop.time()))
        left = [debt.due(self._uploads()) for debt in debts]
        return self._told([*left, *self._elsewhere()], loop.time() - begun)

    def _elsewhere(self) -> Iterator[Due]:
        """Yield the snapshots of this root that another daemon holds."""
        for found in self._parts.foreign.missed(self._job):
            held = found.held
            tag = names.tag_directory(held.step, None, held.attempt)
            reason = (
                f"the daemon of {held.root.place}, where this root was, keeps it in memory: stop "
                f"both daemons, and start this one again"
            )
            yield Due(
                job=held.job, attempt=held.attempt, step=held.step, tag=tag, state=dues.FAILED,
                reason=reason[: dues.MOST_TEXT],
            )  # fmt: skip

    def _jobs(self) -> list[Job]:
        jobs = self._parts.catalog.jobs
        if not self._job:
            return [job for _, job in sorted(jobs.items())]
        if self._job not in jobs:
            known = some_text(sorted(jobs)) or "none"
            raise NotFound(
                f"this daemon has no job {self._job!r}; the jobs that it has: {known}: leave the "
                f"job out to drain all jobs"
            )
        return [jobs[self._job]]

    def _debts(self, jobs: Iterable[Job]) -> Iterable[Debt]:
        """Yield all that these jobs owe now."""
        uploads = self._uploads()
        for job in jobs:
            yield from (SnapshotDebt(job, snapshot) for snapshot in dues.owed(job))
            if uploads is not None:
                waiting = stage_decisions.waiting(job, uploads.refused.get(job.name, {}))
                yield from (UploadDebt(job, checkpoint) for checkpoint in waiting)

    def _uploads(self) -> UploadProgress | None:
        uploader = self._parts.uploader
        return None if uploader is None else uploader.progress()

    def _save(self, snapshots: Iterable[Snapshot]) -> None:
        """Begin the saves of these snapshots, and show other nodes that they are needed."""
        for snapshot in snapshots:
            snapshot.drained |= not snapshot.persist
            self._parts.steps.save_unasked(snapshot, "this node is being drained")
            self._parts.steps.show(self._parts.catalog.job(snapshot.job))

    def _told(self, owed: list[Due], seconds: float) -> Drained:
        """Log the outcome, and return the reply."""
        if owed:
            places = [f"{due.job}/{due.tag} ({due.state})" for due in owed]
            log_events.DRAIN_LEFT.log(
                log, "drain: %s did not leave this node within %.1f s: %s",
                count_text(len(owed), "snapshot"), seconds, some_text(places),
                saved=len(self._saved), owed=len(owed), seconds=seconds,
            )  # fmt: skip
        else:
            log_events.DRAIN_DONE.log(
                log, "drain: nothing is owed any more after %.1f s; saved: %s",
                seconds, some_text(self._saved) or "nothing",
                saved=len(self._saved), seconds=seconds,
            )  # fmt: skip
        return Drained(
            re=0,
            saved=self._saved[:MOST_LISTED],
            owed=owed[:MOST_LISTED],
            more=len(owed[MOST_LISTED:]),
        )
