"""Serves the page of one root, from a thread with an event loop of its own."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptd.daemon.page.access import Access
from ckptd.daemon.page.checkpoints import Checkpoints
from ckptd.daemon.page.feed import DaemonView, Feed
from ckptd.daemon.page.routes import Routes
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.telemetry.http_answers import EventStream
from ckptd.daemon.telemetry.http_server import HttpServer
from ckptd.shared.location import Location

MOST_CLIENTS = 96
"""The most connections at once. A reader has one for the live data, and one for each
thing that the page asks for.
"""
READ_SECONDS = 30.0
"""The seconds that the storage has to answer."""


class PageServer(HttpServer):
    """A server of the page of one root.

    `start` starts its thread, and `close` ends it and closes the socket. It does not wait
    for threads that still read: they change nothing.
    """

    def __init__(
        self, listener: socket.socket, access: Access, root: Location, daemon: DaemonView,
        own_history: Path,
    ) -> None:  # fmt: skip
        """own_history: the file of the history if no daemon says where it is."""
        super().__init__(listener, {}, most_clients=MOST_CLIENTS, serves="the page is")
        self._calls = StorageCalls(READ_SECONDS)
        self._own_history = own_history
        # Threads of its own: a storage that hangs must not keep the daemon from being asked.
        self._asking = ThreadPoolExecutor(2, thread_name_prefix="ckptd-asking")
        self._feed = Feed(daemon, self._asking, self._history_mark)
        self._routes = Routes(
            access, self._feed, Checkpoints(root), self._history_file, self._calls
        )

    async def reply(self, head: bytes) -> bytes | EventStream:
        return await self._routes.reply(head)

    def close(self) -> None:
        super().close()
        self._calls.close()
        self._asking.shutdown(wait=False, cancel_futures=True)

    def _history_file(self) -> Path | None:
        status = self._feed.status
        if status is None:
            return self._own_history
        file = status.get("history")
        return None if file is None else Path(file)

    def _history_mark(self) -> int:
        file = self._history_file()
        try:
            return 0 if file is None else file.stat().st_mtime_ns
        except OSError:
            return 0
