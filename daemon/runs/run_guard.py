"""Refuses a second run of a job while another one is alive: on this node by its ranks,
on other nodes by its heartbeat in storage.

A takeover is never refused, and neither are the workers of one launch. The heartbeats
are only advice: if the storage does not answer, the run begins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.ranks import Process, processes
from ckptd.daemon.job.sightings import Admit, Newcomer, Refuse, Sightings, WatchOn
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.runs.heartbeats import Heartbeats
from ckptd.shared.errors import CkptdError, JobRunning
from ckptd.shared.formats.heartbeat import Heartbeat
from ckptd.shared.formats.segment import this_boot
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.system import machine

log = logging.getLogger("ckptd.engine")

LOOK_SECONDS = 1.0
"""Seconds between two looks at the heartbeats of other nodes."""
ANSWER_SECONDS = 3.0
"""Seconds that the storage has for one look. A trainer that begins during an outage
waits no longer.
"""
_REMEDIES = (
    "stop that run, give this one another job name (CKPTD_JOB), or take over with "
    "takeover=True (CKPTD_TAKEOVER=1). After a takeover, "
)


class RunGuard:
    """The guard of one daemon. `clock` is monotonic."""

    def __init__(
        self,
        store: HeartbeatStore,
        calls: StorageCalls,
        heartbeats: Heartbeats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._calls = calls
        self._heartbeats = heartbeats
        self._clock = clock

    async def wait_for_end(
        self, job: Job, process: Process, seconds: float, *, everywhere: bool
    ) -> Collection[int]:
        """Wait up to `seconds` for the end of other runs of the job, on this node and,
        with `everywhere`, on the others.

        Returns the attempts whose heartbeats are those of dead runs. A heartbeat that
        this node has not written may have to be watched for longer than `seconds`,
        because only time shows whether it is alive. Raises JobRunning if a run on
        another node is alive then; for this node, `check_alone` does.
        """
        deadline = self._clock() + seconds
        await job.changed.wait_until(lambda: not job.ranks.others(process), seconds)
        return (
            await self._watch(job, process, deadline)
            if everywhere and not job.ranks.others(process)
            else ()
        )

    @staticmethod
    def check_alone(job: Job, process: Process, *, takeover: bool) -> None:
        """Raise JobRunning if another run of the job is alive on this node.

        With `takeover`, only log that.
        """
        others = job.ranks.others(process)
        if not others:
            return
        running = f"job {job.name!r} is running already, in {processes(others)}"
        if not takeover:
            raise JobRunning(f"{running}: {_REMEDIES}the other run can no longer save")
        log.warning("%s; pid %d takes over, and that run can no longer save", running, process.pid)

    def began(self, job: Job, dead: Collection[int]) -> None:
        """Keep a heartbeat for the job, because a rank has joined its newest attempt,
        and delete those of the dead runs.
        """
        self._heartbeats.keep(job, dead)

    # -- other nodes

    async def _watch(self, job: Job, process: Process, deadline: float) -> Collection[int]:
        """Watch the heartbeats of other nodes until it is decided whether a run is
        alive. Raises JobRunning if one is after `deadline`.
        """
        led = job.node is None or job.node.leads
        sightings = Sightings(
            job.name,
            Newcomer(process.run, machine.host(), this_boot().hex(), job.attempt, led),
            deadline,
        )
        said = False
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    found = await self._calls.run(lambda: self._read(job.name))
            except (OSError, CkptdError, TimeoutError) as error:
                why = str(error) or f"the storage has not answered for {ANSWER_SECONDS:g} s"
                log.warning(
                    "job %s begins without knowing whether it is running on another node: %s",
                    job.name,
                    why,
                )
                return ()
            match sightings.decide(found, self._clock()):
                case Admit(dead):
                    return dead
                case Refuse(_, heartbeat):
                    raise JobRunning(_refusal(job.name, heartbeat))
                case WatchOn() if not said:
                    said = True
                    log.info(
                        "job %s: watching the heartbeat of another run in %s",
                        job.name,
                        self._store.where(job.name),
                    )
            await asyncio.sleep(LOOK_SECONDS)

    def _read(self, job: str) -> dict[int, bytes]:
        found = {attempt: self._store.read(job, attempt) for attempt in self._store.attempts(job)}
        return {attempt: data for attempt, data in found.items() if data is not None}


def _refusal(job: str, heartbeat: Heartbeat | None) -> str:
    who = "a process on another node" if heartbeat is None else heartbeat.who
    return (
        f"job {job!r} is running already, in {who}: {_REMEDIES}both runs save, "
        "each under an attempt of its own, and the newest attempt is recovered"
    )
