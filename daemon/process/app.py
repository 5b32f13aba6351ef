"""Runs a daemon: serves clients until a signal or an error ends it, or, for a private
daemon, until nothing is left to do.

Nothing listens before the root is locked and recovered. SIGTERM, SIGINT and SIGHUP save
what is owed, then end; a second SIGTERM or SIGINT ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from ckptd.daemon import log_events, tasks
from ckptd.daemon.composition import Components, opened
from ckptd.daemon.config import Config
from ckptd.daemon.memory import unsaved
from ckptd.daemon.memory.unsaved import UnsavedSnapshot
from ckptd.daemon.process import limits, notify
from ckptd.daemon.process.listener import Door, listen_for_http
from ckptd.daemon.process.server import Server
from ckptd.daemon.process.service import Service
from ckptd.daemon.process.vitals import Vitals
from ckptd.daemon.telemetry.telemetry import Telemetry
from ckptd.shared import __version__, native_code
from ckptd.shared.errors import CkptdError, StorageError
from ckptd.shared.system.fs import FileSystem, PosixFileSystem

log = logging.getLogger("ckptd")

_START_SECONDS = 10.0
"""Seconds that a start goes on after SIGTERM. What an earlier daemon left in memory is
then saved, if the storage answers.
"""


_SOCKET_SECONDS = 1.0
"""Between two looks whether the file of the socket is still there."""


class App:
    """One daemon, from its start to its end.

    `run` serves until the daemon is told to end. It raises CkptdError if the daemon
    cannot start, or if an error ends it. Once `run` has returned, `unsaved` lists the
    snapshots that could not be saved and are in memory only. The last line of the log
    names them.
    """

    def __init__(self, config: Config, ready_fd: int = -1, fs: FileSystem | None = None) -> None:
        """ready_fd: a descriptor that READY and a newline are written to once the
        daemon serves clients, or -1.
        """
        self._config, self._ready_fd = config, ready_fd
        # Counted before the daemon opens any descriptor itself.
        self._inherited = limits.used() - limits.STANDARD - (ready_fd >= 0)
        self._fs = fs or PosixFileSystem()
        self._stop = asyncio.Event()
        self._fatal: BaseException | None = None
        self._serving: Serving | None = None
        self._started = time.monotonic()
        self.unsaved: list[UnsavedSnapshot] = []

    @property
    def ready(self) -> bool:
        """True while clients are served."""
        return self._serving is not None and self._serving.ready

    async def run(self) -> None:
        listener = self._http_listener()
        try:
            with Telemetry(
                listener, self._config.metrics_file, required=not self._config.private
            ) as telemetry:
                await self._run(telemetry)
        finally:
            if listener is not None and (address := self._config.http_address) and address.path:
                address.path.unlink(missing_ok=True)

    def _http_listener(self) -> socket.socket | None:
        """Return the socket for metrics and probes, or None if there are to be none.

        Raises the errors of `listen_for_http`. A private daemon logs them instead:
        several trainers of a node may have the same settings, and their saves need no
        metrics.
        """
        address = self._config.http_address
        if address is None:
            return None
        try:
            return listen_for_http(address)
        except CkptdError as error:
            if not self._config.private:
                raise
            log.warning("no metrics and no probes are served: %s", error)
            return None

    async def _run(self, telemetry: Telemetry) -> None:
        async with opened(
            self._config,
            self._fs,
            failed=self._end,
            locked=self._handle_signals,
            lost=self._lost_root,
        ) as parts:
            door = Door(self._config.socket, self._config.root)
            try:
                telemetry.locked()
                await parts.tell_socket(door.path)
                self._serving = Serving(
                    parts, self._stop, self._started, self._ready_fd, self._lost_root, telemetry,
                    self._descriptors(),
                )  # fmt: skip
                await self._serving.run(door, lambda: self._fatal is None)
                self.unsaved = self._serving.unsaved()
            finally:
                door.close()
        if self.unsaved:
            log_events.MEMORY_UNSAVED.log(
                log,
                "%s",
                unsaved.text(self.unsaved, self._config.root),
                snapshots=len(self.unsaved),
            )
        if self._fatal is not None:
            raise self._fatal

    def _descriptors(self) -> limits.DescriptorPlan:
        """Return the plan that divides the file descriptors of this daemon.

        Log a warning if the limit of open files is too low for `max_connections`.
        """
        config = self._config
        own = limits.OWN + max(0, self._inherited) + (config.http_address is not None)
        plan = limits.DescriptorPlan(config.segments, config.open_files, own)
        limits.check(plan, limits.soft_limit())
        if warning := plan.warning(limits.soft_limit(), config.max_connections):
            log.warning("%s", warning)
        return plan

    def _handle_signals(self) -> None:
        """Handle SIGTERM, SIGINT and SIGHUP from now on.

        Before this call nothing is owed, and the default action ends a start that
        hangs. A SIGHUP that nohup(1) has turned off stays off.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: int) -> None:
        if self._stop.is_set() and number == signal.SIGHUP:
            return  # a terminal that closes may send it twice, and nobody asks for haste
        left = [] if self._serving is None else self._serving.unsaved()
        if self._stop.is_set():
            log.error(
                "a second signal ends this daemon at once. %s",
                unsaved.text(left, self._config.root) if left else "Everything is saved",
            )
            os._exit(130)
        if self._serving is None:
            asyncio.get_running_loop().call_later(_START_SECONDS, self._give_up)
        what = f" ({'; '.join(map(str, left))})" if left else ""
        log_events.DAEMON_STOPPING.log(
            log, "stopping: saving the newest snapshots that are not durable yet%s", what
        )
        self._stop.set()

    def _give_up(self) -> None:
        """End a start that has been told to stop and still waits for the storage."""
        if self._serving is None:
            log.error(
                "the storage does not answer, and this start ends; the next daemon finds what is "
                "in memory"
            )
            os._exit(128 + signal.SIGTERM)

    def _end(self, error: BaseException) -> None:
        """End with this error, so that a fresh start can sort it out: the journal
        cannot be trusted any more, or a task has failed.
        """
        if self._fatal is None:
            log_events.DAEMON_FAILED.log(log, "%s; ending", error, reason=str(error))
            self._fatal = error
            self._stop.set()

    def _lost_root(self) -> None:
        """End, because nothing can be saved and another daemon may serve the place.

        The next daemon finds the snapshots in memory.
        """
        kind, place = (
            ("root", self._config.root)
            if self._config.stage is None
            else ("stage", self._config.stage)
        )
        self._end(
            StorageError(
                f"the {kind} {place} has been deleted, moved or replaced; the snapshots in memory "
                f"stay there, and the next daemon saves them if the same root is at "
                f"{self._config.root} then"
            )
        )


class Serving:
    """A daemon that has recovered, while clients may use it.

    `stop` is set to end it. `lost_root` is called if the root is gone. `telemetry`
    shows how it is doing. `descriptors` is the plan for the limit of open files.
    """

    def __init__(
        self,
        parts: Components,
        stop: asyncio.Event,
        started: float,
        ready_fd: int,
        lost_root: Callable[[], None],
        telemetry: Telemetry,
        descriptors: limits.DescriptorPlan,
    ) -> None:
        self._parts = parts
        self._stop = stop
        self._ready_fd = ready_fd
        self._vitals = Vitals(parts, started, lost_root)
        self._telemetry = telemetry
        self.ready = False
        self._idle: asyncio.TimerHandle | None = None
        self._service = Service(parts)
        self._server = Server(parts, self._service, self._vitals, descriptors)
        native_code.warn_once(log)
        parts.events.on_changed.append(self.consider_leaving)

    async def run(self, door: Door, may_save: Callable[[], bool]) -> None:
        """Serve until `stop` is set; then save what is owed, if `may_save` returns
        True.
        """
        config, parts = self._parts.config, self._parts
        self._accept(door)
        keeping = tasks.watched(self._keep(door), "the watch over the socket")
        parts.orphans.watch()
        watching = tasks.watched(self._vitals.watch(), "the watchdog")
        self.ready = True
        self._telemetry.ready(
            parts, lambda: self._vitals.disk_free, lambda: self._vitals.refusals.count
        )
        notify.notify("READY=1")
        if self._ready_fd >= 0:
            with suppress(BrokenPipeError):  # the process that waits for this may be dead
                os.write(self._ready_fd, b"READY\n")
            os.close(self._ready_fd)
        log_events.DAEMON_READY.log(
            log, "ckptd %s ready in %.3f s: root %s, socket %s",
            __version__, self._vitals.uptime, config.root, door.path,
            version=__version__, seconds=self._vitals.uptime,
            root=str(config.root), socket=str(door.path),
        )  # fmt: skip
        self.consider_leaving()
        await self._stop.wait()
        self.ready = False
        self._telemetry.ending()
        notify.notify("STOPPING=1")
        parts.engine.stopping = True
        if may_save():
            # Clients are served meanwhile: a request to begin is told that the daemon
            # stops.
            await parts.orphans.drain()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        self._accepting.cancel()
        if parts.uploader is not None:
            parts.uploader.stop()
        await self._server.close()
        watching.cancel()
        await asyncio.gather(self._accepting, watching, return_exceptions=True)

    def _accept(self, door: Door) -> None:
        self._accepting = tasks.watched(self._server.serve(door.listener), "accepting connections")
        self._service.socket = door.path

    async def _keep(self, door: Door) -> None:
        """Keep the daemon reachable while the file of its socket vanishes."""
        problem = ""
        while True:
            await asyncio.sleep(_SOCKET_SECONDS)
            before, old = door.path, door.listener
            try:
                if not door.mend():
                    continue
            except CkptdError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.error("the socket %s is gone, and no client can connect: %s", before, error)
                continue
            problem = ""
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            old.close()
            self._accept(door)
            await self._parts.tell_socket(door.path)
            log.warning("the socket %s was gone; clients connect to %s now", before, door.path)

    def unsaved(self) -> list[UnsavedSnapshot]:
        """Return the snapshots that are in memory only at this moment."""
        return unsaved.in_memory_only(self._parts.catalog, self._parts.slots)

    # -- a private daemon

    def consider_leaving(self) -> None:
        """Start the idle timer of a private daemon if nobody is connected, nothing is
        in memory and nothing is under way.
        """
        parts = self._parts
        if not parts.config.private or not self.ready:
            return
        needed = (
            self._server.connections or parts.slots.slots or parts.saver.busy or parts.orphans.busy
        )
        needed = needed or (parts.uploader is not None and parts.uploader.busy)
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if not needed:
            self._idle = asyncio.get_running_loop().call_later(
                parts.config.idle_timeout, self._leave
            )

    def _leave(self) -> None:
        log.info("no clients, slots or work are left: this private daemon ends")
        self._stop.set()
