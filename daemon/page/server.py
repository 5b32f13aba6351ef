"""Serves the page of one root, from a thread with an event loop of its own."""

from __future__ import annotations

import socket
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

    `start` starts its thread, and `close` ends it and closes the socket.
    """

    def __init__(
        self, listener: socket.socket, access: Access, root: Location, daemon: DaemonView,
        own_history: Path,
    ) -> None:  # fmt: skip
        """own_history: the file of the history if no daemon says where it is."""
        super().__init__(listener, {}, most_clients=MOST_CLIENTS, serves="the page is")
        self._calls = StorageCalls(READ_SECONDS)
        self._root, self._access = root, access
        self._own_history = own_history
        self._routes: Routes | None = None
        self._feed = Feed(daemon, self._calls.pool, self._history_mark)

    async def reply(self, head: bytes) -> bytes | EventStream:
        if self._routes is None:  # its locks belong to the event loop
            self._routes = Routes(
                self._access, self._feed, Checkpoints(self._root), self._history_file, self._calls
            )
        return await self._routes.reply(head)

    def close(self) -> None:
        super().close()
        self._calls.close()

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
