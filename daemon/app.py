"""Puts the daemon together, starts it, and stops it: lock, recovery, socket, signals, systemd, the private daemon's leave.

Nothing listens before the root is locked and recovered. SIGTERM and SIGINT save what is owed, then end; a second one ends at once.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil

from ckptd.daemon import limits, notify, recovery, roots, tasks
from ckptd.daemon.attempts import Attempts
from ckptd.daemon.catalog import Catalog, Job
from ckptd.daemon.claims import Claims
from ckptd.daemon.config import Config
from ckptd.daemon.engine import Engine
from ckptd.daemon.journal import Journal, JournalBroken
from ckptd.daemon.listener import listen
from ckptd.daemon.orphans import Orphans
from ckptd.daemon.pipeline import Pipeline
from ckptd.daemon.saver import Saver
from ckptd.daemon.server import Server
from ckptd.daemon.slots import Slots
from ckptd.daemon.storage_calls import StorageCalls
from ckptd.shared import __version__, names
from ckptd.shared import messages as m
from ckptd.shared.errors import CkptdError, NewerFormat, StorageError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import FileSystem, PosixFileSystem
from ckptd.shared.session import MAX_VERSION
from ckptd.shared.storage import PosixStorage

log = logging.getLogger("ckptd")

MOST_JOBS, MOST_DAMAGED, MOST_TEXT = 500, 5, 200  # of what one frame has room for


class App:
    """`await run()` is the daemon's life. Raises CkptdError if it cannot begin, or must end."""

    def __init__(self, config: Config, ready_fd: int = -1, fs: FileSystem | None = None) -> None:
        self.config = config
        self._fs = fs or PosixFileSystem()
        self._ready_fd = ready_fd
        self._stop = asyncio.Event()
        self._fatal: BaseException | None = None
        self._ready = False
        self._started = time.monotonic()
        self._idle: asyncio.TimerHandle | None = None
        self._lag = 0.0
        self._disk_free: int | None = None
        self._measuring: float | None = None  # since when a measurement of the disk has been under way
        self._instance = secrets.token_hex(16)

    async def run(self) -> None:
        with ExitStack() as held:
            await self._run(held)
        if self._fatal is not None:
            raise self._fatal

    async def _run(self, held: ExitStack) -> None:
        config, fs = self.config, self._fs
        storage = PosixStorage(config.root, fs)
        control = roots.prepare(config.root, storage)
        with storage.directory(names.CONTROL, names.host()) as directory:
            held.callback(os.close, roots.lock(directory, config.root))
        failpoint("start.locked")
        pipeline = Pipeline(fs, config.threads, config.memory_budget, config.chunk_size, config.spread)
        held.callback(pipeline.close)
        calls = self.calls = StorageCalls(config.storage_timeout)
        held.callback(calls.close)
        journal_thread = ThreadPoolExecutor(1, thread_name_prefix="ckptd-journal")
        held.callback(journal_thread.shutdown, wait=False)
        slots = Slots(fs, config.shm_dir, names.segment_directory(config.root), config.shm_quota)
        held.callback(slots.close)
        self.catalog, self.slots, self.pipeline, self.storage = Catalog(), slots, pipeline, storage
        with storage.directory(*control) as directory:
            self.journal = Journal.open(fs, directory, journal_thread, strict=config.strict_journal)
            claims = Claims(Attempts(storage, calls))
            engine = Engine(config, self.catalog, slots, self.journal, claims, pipeline)
            self.orphans = Orphans(engine, config.memory_ttl)
            self.saver = engine.saver = Saver(
                config, self.catalog, slots, self.journal, storage, pipeline, calls,
                counters=engine.steps.counters, claimed=claims.claimed, tell=engine.steps.tell, settled=self._settled,
            )  # fmt: skip
            self.engine = engine
            self.journal.on_broken = self._end
            tasks.on_failure(self._end)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._signalled)
            await recovery.recover(storage, calls, claims, self.journal, self.catalog, slots, self.saver, self.orphans)
            listener, ours = listen(config.socket)
            try:
                await self._serve(listener)
            finally:
                listener.close()
                if ours:
                    config.socket.unlink(missing_ok=True)
                await self.journal.close()

    async def _serve(self, listener: socket.socket) -> None:
        server = self.server = Server(
            self.engine, self.orphans, max_connections=self.config.max_connections, descriptors=self._descriptors(),
            welcome=self._welcome, status=lambda: json.dumps(self.status()), find=self._find, forget=self.forget,
            changed=self._consider_leaving,
        )  # fmt: skip
        accepting = tasks.watched(server.serve(listener), "accepting connections")
        self.orphans.changed = self._consider_leaving
        self.orphans.watch()
        watchdog = tasks.watched(self._watchdog(), "the watchdog")
        self._ready = True
        notify.notify("READY=1")
        if self._ready_fd >= 0:
            os.write(self._ready_fd, b"READY\n")
            os.close(self._ready_fd)
        took = time.monotonic() - self._started
        log.info("ckptd %s ready in %.3f s: root %s, socket %s", __version__, took, self.config.root, self.config.socket)
        self._consider_leaving()
        await self._stop.wait()
        self._ready = False
        notify.notify("STOPPING=1")
        self.engine.stopping = True
        if self._fatal is None:
            await self.orphans.drain()  # clients are served meanwhile: who wants to begin something is told that the daemon stops
        accepting.cancel()
        await server.close()
        watchdog.cancel()
        await asyncio.gather(accepting, watchdog, return_exceptions=True)

    def _descriptors(self) -> limits.DescriptorPlan:
        """Return the plan for this daemon's descriptors; the log warns if `max_connections` does not fit into the limit."""
        # While adopted snapshots are being saved, descriptors come and go: the daemon's own cannot be counted then.
        now = limits.used() - len(self.slots.slots) - (self._ready_fd >= 0)
        own = limits.OWN if self.saver.busy else max(limits.OWN, now)
        plan = limits.DescriptorPlan(self.config.slots, self.config.files_per_rank, own)
        limits.check(plan, limits.soft_limit())
        if warning := plan.warning(limits.soft_limit(), self.config.max_connections):
            log.warning("%s", warning)
        return plan

    # -- what ends it

    def _signalled(self) -> None:
        if self._stop.is_set():
            os._exit(130)
        log.info("stopping: saving what is owed first")
        self._stop.set()

    def _end(self, error: BaseException) -> None:
        """End with this error, so that a fresh start can sort it out: the journal cannot be trusted any more, or a task has failed."""
        if self._fatal is None:
            log.critical("%s; ending", error)
            self._fatal = error
            self._stop.set()

    def _settled(self, job: Job) -> None:
        self.engine.steps.release_settled(job)
        if not self.orphans.has_timer(job.name):
            self.orphans.start_timer(job)
        self._consider_leaving()

    def _consider_leaving(self) -> None:
        """A private daemon leaves once nobody is connected, nothing is in memory and nothing is under way."""
        if not self.config.private or not self._ready:
            return
        needed = self.server.connections or self.slots.slots or self.saver.busy or self.orphans.busy
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if not needed:
            self._idle = asyncio.get_running_loop().call_later(self.config.idle_timeout, self._leave)

    def _leave(self) -> None:
        log.info("nothing left to do: leaving")
        self._stop.set()

    # -- what is told

    def _welcome(self, request_id: int) -> m.Welcome:
        config = self.config
        return m.Welcome(
            re=request_id, version=MAX_VERSION, daemon=__version__, root=str(config.root), private=config.private,
            slots=config.slots, chunk_size=config.chunk_size, stall_budget=config.stall_budget,
            instance=self._instance,
        )  # fmt: skip

    async def _find(self, job_name: str, step: int | None) -> m.Found:
        """Return the candidates for a recovery, best first: by (attempt, step), memory before storage.

        Raises StorageError; NewerFormat if the newest checkpoint is one that only a newer ckptd can read.
        """
        job = self.catalog.job(job_name)
        in_memory = self.engine.memory_candidates(job_name)
        try:
            await recovery.scan_job(self.storage, job, self.calls)
            stored = job.live_checkpoints()
        except StorageError as error:
            newest = job.newest_in_memory()
            if (
                error.errno != errno.ETIMEDOUT
                or newest is None
                or any((c.attempt, c.step or 0) > newest.key for c in job.live_checkpoints())
            ):
                raise
            log.warning("job %s: %s; what is in memory is newer than every checkpoint that is known, and is offered alone", job.name, error)
            stored = []
        found = [m.RecoveryCandidate(attempt=s.attempt, step=s.step, tag=s.tag, source="memory") for s in in_memory]
        found += [m.RecoveryCandidate(attempt=c.attempt, step=c.step, tag=c.tag, source="storage") for c in stored]
        found = [c for c in found if step is None or c.step == step]
        order = {c.tag: c.seq for c in job.checkpoints.values()}
        found.sort(key=lambda c: (c.attempt, -1 if c.step is None else c.step, c.source == "memory", order.get(c.tag, 0)), reverse=True)
        if why := job.unreadable_beyond((found[0].attempt, found[0].step) if found else None, step):
            raise NewerFormat(why)
        return m.Found(
            re=0, candidates=found[:1000], damaged=[f"{tag}: {why}"[:MOST_TEXT] for tag, why in sorted(job.damaged.items())][:100]
        )

    async def forget(self, job_name: str, tags: Sequence[str]) -> dict[str, str]:
        """Delete these checkpoints, in storage and in memory; why not, of each that stays. Raises StorageError."""
        if job_name not in self.catalog.jobs and job_name not in await self.calls.read("list the jobs", self.storage.jobs):
            return dict.fromkeys(tags, f"there is no job {job_name!r} in {self.config.root}")
        job, refused = self.catalog.job(job_name), {}
        await recovery.scan_job(self.storage, job, self.calls)
        for tag in tags:
            try:
                why = await self.orphans.let_go(job, tag) or await self.saver.deleter.forget(job, tag)
            except JournalBroken:
                raise
            except OSError as error:
                why = str(StorageError.of(f"delete {job_name}/{tag}", error))
            except CkptdError as error:
                why = str(error)
            if why:
                refused[tag] = why
        return refused

    def status(self) -> dict[str, object]:
        """What `ckptd status --json` prints. Bytes and seconds."""
        jobs = []
        for job in sorted(self.catalog.jobs.values(), key=lambda j: j.name)[:MOST_JOBS]:
            sealed, durable = job.newest_in_memory(), job.newest_checkpoint()
            pending = [s.tag for s in job.snapshots.values() if s.persist and not job.is_settled(s)]
            jobs.append({
                "job": job.name,
                "attempt": job.attempt,
                "last_sealed": _where(sealed.attempt, sealed.step, sealed.tag) if sealed else None,
                "last_durable": _where(durable.attempt, durable.step, durable.tag) if durable else None,
                "pending": sorted(pending),
                "ranks_connected": sum(o.job == job.name and o.notify is not None for o in self.engine.owners.values()),
                "announced": job.announced[:MOST_TEXT],
                "damaged": {tag: why[:MOST_TEXT] for tag, why in list(job.damaged.items())[:MOST_DAMAGED]},
                "newer": {tag: why[:MOST_TEXT] for tag, why in list(job.newer.items())[-1:]},
            })  # fmt: skip
        return {
            "ready": self._ready,
            "version": __version__,
            "pid": os.getpid(),
            "root": str(self.config.root),
            "socket": str(self.config.socket),
            "private": self.config.private,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "rss_bytes": _rss(),
            "event_loop_lag_seconds": round(self._lag, 6),
            "disk_free_bytes": self._disk_free,
            "descriptors": {
                "used": limits.used(),
                "limit": limits.soft_limit(),
                "per_rank": self.server.descriptors.per_rank,
                "clients": len(self.server.connections),
                "clients_fit": min(self.config.max_connections, self.server.descriptors.ranks(limits.soft_limit())),
                "accepting_paused": self.server.paused,
            },
            "jobs": jobs,
            "jobs_not_shown": len(self.catalog.jobs) - len(jobs),
            "shared_memory": {
                "used_bytes": self.slots.used,
                "quota_bytes": self.slots.quota,
                "segments": len(self.slots.slots),
                "directory": str(self.slots.path),
            },
            "counters": {
                **{name: self.saver.counters[name] for name in COUNTERS},
                "persist_seconds": round(self.saver.persist_seconds, 3),
                "persist_raw_bytes": self.pipeline.bytes_read,
                "persist_stored_bytes": self.pipeline.bytes_written,
                "journal_torn_tails": self.journal.torn,
                "journal_corrupt": self.journal.corrupt,
                "connections_refused": self.server.refused,
                "accept_pauses": self.server.pauses,
            },
        }

    async def _watchdog(self) -> None:
        """Measure the loop's lag; tell systemd that all is well while the loop runs and busy workers make progress."""
        period = notify.watchdog_seconds() or 1.0
        chunks, stuck_since = -1, time.monotonic()
        while True:
            self._measure_disk()
            before = time.monotonic()
            await asyncio.sleep(period)
            now = time.monotonic()
            self._lag = max(0.0, now - before - period)
            if not self.saver.busy or self.pipeline.chunks_done != chunks:
                chunks, stuck_since = self.pipeline.chunks_done, now
            if now - stuck_since > 120:  # a stuck mount does not stop the service of memory; say so, and go on
                log.warning("no chunk has been written for %.0f s", now - stuck_since)
            notify.notify("WATCHDOG=1")

    def _measure_disk(self) -> None:
        """Find out how much room the root has, None while it is gone or does not answer. One call is under way at a time."""
        if self._measuring is not None:
            if time.monotonic() > self._measuring + self.config.storage_timeout:
                self._disk_free = None
            return
        self._measuring = time.monotonic()
        call = asyncio.get_running_loop().run_in_executor(self.calls.pool, _free, str(self.config.root))
        call.add_done_callback(self._measured)

    def _measured(self, call: asyncio.Future[int | None]) -> None:
        self._measuring = None
        if not call.cancelled():
            self._disk_free = call.result()


COUNTERS = ("sealed", "persisted", "failed", "skipped", "retired", "rewrites", "saved_unasked", "verify_failures", "tidy_failures")


def _free(root: str) -> int | None:
    """Return the bytes that are free under the root, or None if it is gone."""
    try:
        return int(psutil.disk_usage(root).free)
    except OSError:
        return None


def _rss() -> int | None:
    """Return the bytes of memory that this process takes, or None if no descriptor is left to read them."""
    try:
        return int(psutil.Process().memory_info().rss)
    except OSError:
        return None


def _where(attempt: int, step: int | None, tag: str) -> dict[str, object]:
    return {"attempt": attempt, "step": step, "tag": tag}
