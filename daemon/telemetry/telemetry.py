"""Starts and ends what shows how the daemon is doing, as its settings say."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Self

from ckptd.daemon import tasks
from ckptd.daemon.composition import Components
from ckptd.daemon.telemetry.figures import MetricsBoard, Phase
from ckptd.daemon.telemetry.gatherer import Gatherer
from ckptd.daemon.telemetry.http_answers import Page, Pages
from ckptd.daemon.telemetry.http_server import HttpServer
from ckptd.daemon.telemetry.metrics_file import MetricsFile
from ckptd.daemon.telemetry.probes import health, readiness
from ckptd.daemon.telemetry.publisher import PERIOD_SECONDS, Publisher

log = logging.getLogger("ckptd.telemetry")


class Telemetry:
    """The metrics and probes of one daemon, as a context manager. Without a listener and
    without a file it does nothing.

    `locked`, `ready` and `ending` say in which part of its life the daemon is.
    """

    def __init__(
        self, listener: socket.socket | None, file: Path | None, *, required: bool = True
    ) -> None:
        """listener: a socket that listens, which this object closes, or None. file: the
        metrics file, or None. required: whether a file that cannot be written is an
        error at the start.
        """
        self._required = required
        self._listener, self._file = listener, file
        self._board = MetricsBoard(time.monotonic(), PERIOD_SECONDS)
        self._publisher = Publisher(self._board)
        self._metrics_file: MetricsFile | None = None
        self._held = ExitStack()

    def __enter__(self) -> Self:
        """Start to serve. Must be called on the event loop."""
        if self._listener is None and self._file is None:
            return self
        # Imported here, because it takes memory that a daemon without metrics saves.
        from ckptd.daemon.telemetry import exposition

        render = partial(exposition.render, self._board)
        with ExitStack() as held:
            if self._listener is not None:
                held.callback(self._listener.close)
                pages = _pages(self._board, render, exposition.CONTENT_TYPE)
                server = HttpServer(self._listener, pages)
                server.start()
                held.callback(server.close)
                log.info("metrics and probes at %s", _place(self._listener))
            if self._file is not None:
                self._metrics_file = MetricsFile(self._file, render)
            task = tasks.watched(self._publisher.run(), "publishing metrics", _go_on)
            held.callback(task.cancel)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def locked(self) -> None:
        """Start to write the metrics file: this daemon has its root, and no other daemon
        of this root can write it.

        Raises InvalidConfig if the file cannot be written and is required.
        """
        if self._metrics_file is not None:
            self._metrics_file.start(required=self._required)
            self._held.callback(self._metrics_file.close)

    def ready(
        self,
        parts: Components,
        disk_free: Callable[[], int | None],
        refused: Callable[[], int],
    ) -> None:
        """Show the figures of these parts from now on.

        disk_free: returns the free bytes under the root, or None if they are not known.
        refused: returns how many living processes have been refused for long.
        """
        gatherer = Gatherer(parts)
        self._publisher.gather = lambda: gatherer.figures(disk_free(), refused())
        self._board.phase = Phase.READY

    def ending(self) -> None:
        """Show that the daemon ends."""
        self._board.phase = Phase.ENDING


def _go_on(error: BaseException) -> None:
    """Do nothing with an error that is logged already: saves need no metrics."""


def _pages(board: MetricsBoard, render: Callable[[], bytes], content_type: str) -> Pages:
    def probe(outcome: tuple[bool, str]) -> Page:
        well, sentence = outcome
        return Page.of(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, sentence)

    return {
        "/metrics": lambda: Page(HTTPStatus.OK, render(), content_type),
        "/healthz": lambda: probe(health(board, time.monotonic())),
        "/readyz": lambda: probe(readiness(board)),
    }


def _place(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
