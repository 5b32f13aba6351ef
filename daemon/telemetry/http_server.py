"""Serves pages over HTTP from a thread with an event loop of its own, so that they are
answered while the daemon's loop is stuck.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import socket
import sys
import termios
import threading
import time
import traceback
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import TypeVar

from ckptd.daemon.telemetry.http_answers import (
    MAX_HEAD_BYTES,
    EventStream,
    Page,
    Pages,
    respond,
)

log = logging.getLogger("ckptd.http")

T = TypeVar("T")

MAX_CLIENTS = 16
"""The most clients at once. Each needs a file descriptor, and the training needs most
of them.
"""
REQUEST_SECONDS = 5.0
"""The seconds that a client has to send its request. One that takes nothing of the answer
for as long is dropped.
"""
STREAM_BUFFER_BYTES = 64 << 10
"""The bytes that the kernel keeps of a stream for a client that does not read."""
LOG_AGAIN_SECONDS = 60.0
"""The seconds until a failure of the same kind is logged again."""
_clock = time.monotonic
_END_SECONDS = 2.0
_ACCEPT_AGAIN_SECONDS = 1.0
"""The seconds until the next try when a client cannot be accepted."""


class HttpServer:
    """A server of `pages` at a socket that listens already.

    `start` starts the thread, and `close` ends it and closes the socket. A subclass may
    replace `reply`, whose work is cancelled when the client leaves.
    """

    def __init__(
        self,
        listener: socket.socket,
        pages: Pages,
        *,
        most_clients: int = MAX_CLIENTS,
        serves: str = "metrics and probes are",
    ) -> None:
        """most_clients: the most clients at once. serves: subject and verb for the log."""
        self._listener, self._pages = listener, pages
        self._most_clients, self._serves = most_clients, serves
        self._thread = threading.Thread(target=self._run, name="ckptd-http", daemon=True)
        # The loop of asyncio, because another one would take more memory.
        self._loop = asyncio.SelectorEventLoop()
        self._stop = asyncio.Event()
        self._clients = dict[asyncio.Task[None], socket.socket]()
        # Those that have not sent a whole request, or have their whole answer, the oldest
        # first. They give way when there are too many clients.
        self._idle = dict[asyncio.Task[None], None]()
        self._logged = dict[tuple[type[Exception], str, int], float]()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless a client still reads its answer. Then the end of the
        process ends it.
        """
        with suppress(RuntimeError):  # the loop has failed, and is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception:
            log.exception("%s no longer served; saving goes on", self._serves)
        finally:
            self._listener.close()

    async def _serve(self) -> None:
        self._listener.setblocking(False)
        accepting = asyncio.create_task(self._accept())
        try:
            await self._stop.wait()
        finally:
            accepting.cancel()
            asyncio.get_running_loop().remove_reader(self._listener)

    async def _accept(self) -> None:
        """Accept clients one by one, so that no more descriptors are open than clients may
        be, and one.
        """
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._listener, ready.set)
        while True:
            await ready.wait()
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                ready.clear()
            except ConnectionError:
                pass  # the client has left
            except OSError:
                loop.remove_reader(self._listener)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                loop.add_reader(self._listener, ready.set)
            else:
                try:
                    await self._admit(client)
                except BaseException:
                    client.close()
                    raise
            await asyncio.sleep(0)  # so that the clients get their turns

    async def _admit(self, client: socket.socket) -> None:
        client.setblocking(False)
        if len(self._clients) >= self._most_clients and self._idle:
            await self._drop(next(iter(self._idle)))
        if len(self._clients) < self._most_clients:
            task = asyncio.get_running_loop().create_task(self._answer(client))
            self._clients[task] = client
            self._idle[task] = None
            task.add_done_callback(self._closed)
        else:
            self._refuse(client)
            client.close()

    async def _drop(self, task: asyncio.Task[None]) -> None:
        """End a client that is idle."""
        self._refuse(self._clients[task])
        task.cancel()
        await asyncio.wait({task})

    def _refuse(self, client: socket.socket) -> None:
        """Tell a client that there are too many, if it can be told without waiting."""
        answer = Page.of(
            HTTPStatus.SERVICE_UNAVAILABLE, f"{self._most_clients} clients are served already"
        ).encoded()
        with suppress(OSError):
            client.send(answer)
            client.shutdown(socket.SHUT_WR)
            # Closing with bytes that are not read would make the kernel reset the
            # connection, and the answer could be lost.
            client.recv(MAX_HEAD_BYTES)

    def _closed(self, task: asyncio.Task[None]) -> None:
        """Close the connection of a client. All is sent, or nothing more is to be sent."""
        self._idle.pop(task, None)
        self._clients.pop(task).close()

    async def _answer(self, client: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=client, limit=MAX_HEAD_BYTES)
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits for the client
        try:
            answer = await self._response(reader)
            if isinstance(answer, EventStream):
                await _while_connected(reader, _stream(answer, writer))
            else:
                await self._send_whole(answer, reader, writer)
        except (OSError, EOFError):  # TimeoutError is an OSError
            pass  # the client has left, or does not read
        finally:
            writer.transport.abort()
        with suppress(OSError):  # the error of the connection, which is logged if nobody takes it
            await writer.wait_closed()

    async def _send_whole(
        self, answer: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._set_idle(False)
        writer.write(answer)
        await _drain(writer)
        writer.write_eof()
        self._set_idle(True)
        async with asyncio.timeout(REQUEST_SECONDS):
            # Closing before the client has sent all would make the kernel reset the
            # connection, and the answer could be lost.
            await reader.read(MAX_HEAD_BYTES)

    def _set_idle(self, idle: bool) -> None:
        """Say whether the client of the task that runs may give way to others."""
        task = asyncio.current_task()
        assert task is not None  # only tasks call this
        self._idle.pop(task, None)
        if idle:
            self._idle[task] = None

    async def _response(self, reader: asyncio.StreamReader) -> bytes | EventStream:
        """Read a request, and return the response.

        Raises EOFError if the client leaves before the response is there.
        """
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return Page.of(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"a request may have at most {MAX_HEAD_BYTES} bytes",
            ).encoded()
        except TimeoutError:
            return Page.of(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request did not come within {REQUEST_SECONDS:.0f} s",
            ).encoded()
        self._set_idle(False)
        try:
            return await _while_connected(reader, self.reply(head))
        except EOFError:
            raise
        except Exception as error:
            self._log_failure(error)
            return Page.of(
                HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; the log says why"
            ).encoded()

    def _log_failure(self, error: Exception) -> None:
        """Log a failure, unless one of its kind at its place was logged a short time ago."""
        last = list(traceback.walk_tb(error.__traceback__))[-1]
        kind = (type(error), last[0].f_code.co_filename, last[1])
        now = _clock()
        if now - self._logged.get(kind, -math.inf) >= LOG_AGAIN_SECONDS:
            self._logged[kind] = now
            log.error("a page cannot be made; saving goes on", exc_info=error)

    async def reply(self, head: bytes) -> bytes | EventStream:
        """Return the response to a request, given its head."""
        return respond(head, self._pages)


async def _while_connected(reader: asyncio.StreamReader, work: Coroutine[None, None, T]) -> T:
    """Return the result of `work`. Cancel it when the client leaves, and raise EOFError."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(reader))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise EOFError
        return await doing
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(reader: asyncio.StreamReader) -> None:
    """Return when the client has left. What it still sends is dropped."""
    while await reader.read(MAX_HEAD_BYTES):
        pass


async def _stream(answer: EventStream, writer: asyncio.StreamWriter) -> None:
    """Send the pieces of a stream as they come. Raises TimeoutError if the client does
    not read.
    """
    # A client that does not read is noticed once this much waits for it.
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BUFFER_BYTES
    )
    writer.write(answer.head)
    async with aclosing(answer.pieces) as pieces:
        async for piece in pieces:
            writer.write(piece)
            await _drain(writer)


async def _drain(writer: asyncio.StreamWriter) -> None:
    """Wait until the kernel has all that was written. Raises TimeoutError if the client
    takes nothing for `REQUEST_SECONDS`.
    """
    waiting = _waiting(writer)
    while True:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await writer.drain()
            return
        except TimeoutError:
            before, waiting = waiting, _waiting(writer)
            if waiting >= before:
                raise


def _waiting(writer: asyncio.StreamWriter) -> int:
    """Return how many bytes the client has not taken, those in the kernel among them."""
    sock = writer.get_extra_info("socket")
    found = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    return writer.transport.get_write_buffer_size() + int.from_bytes(found, sys.byteorder)
