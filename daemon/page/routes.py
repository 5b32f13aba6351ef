"""Answers the requests of the page: the document, its live data, and what it asks for.

Nothing here changes anything, and what it reads is read by threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from ckptd.daemon.page.access import Access
from ckptd.daemon.page.checkpoints import Checkpoints
from ckptd.daemon.page.document import document, policy
from ckptd.daemon.page.feed import Feed
from ckptd.daemon.page.timeline import NAMES, snapshots
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.http_answers import EventStream, HttpRequest, Page, is_head
from ckptd.daemon.telemetry.http_answers import parse_request as parse
from ckptd.daemon.telemetry.restore_rate import read_rate
from ckptd.shared import errors as e
from ckptd.shared.units import printable

T = TypeVar("T")
MOST_STREAMS = 32
"""The most readers who get live data at once."""
MOST_EVENTS = 3_000
_MOST_FIELDS = 8
_MOST_MEASURES = 4
"""The most tensors that are measured or wait for it."""
_DESCRIBED_AT_ONCE = 2
"""The checkpoints that are read at once. One with 100,000 tensors takes 100 MB meanwhile,
and the processor, which the live data need, too.
"""
_MOST_DESCRIBED = 16
"""The most checkpoints that are read or wait for it."""
_HEADERS = (
    ("Content-Security-Policy", policy()),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)
_STATUSES: tuple[tuple[type[e.CkptdError], HTTPStatus], ...] = (
    (e.NotFound, HTTPStatus.NOT_FOUND),
    (e.Busy, HTTPStatus.SERVICE_UNAVAILABLE),
    (e.CallerError, HTTPStatus.BAD_REQUEST),
)
Query = Mapping[str, str]


class Routes:
    """The answers of one page. `reply` must be called on one event loop.

    history_file: returns the file of the history, which may not be there, or None if the
    daemon keeps none.
    """

    def __init__(
        self,
        access: Access,
        feed: Feed,
        checkpoints: Checkpoints,
        history_file: Callable[[], Path | None],
        calls: StorageCalls,
    ) -> None:
        self._access, self._feed = access, feed
        self._checkpoints, self._calls = checkpoints, calls
        self._history_file = history_file
        self._streams, self._measures = 0, 0
        self._measuring = asyncio.Lock()
        self._describing = asyncio.Semaphore(_DESCRIBED_AT_ONCE)
        self._described = dict[tuple[str, str], asyncio.Future[bytes]]()

    async def reply(self, head: bytes) -> bytes | EventStream:
        """Return the response to a request, given its head."""
        request = parse(head)
        if isinstance(request, Page):
            answer: Page | EventStream = request
        else:
            answer = self._access.refusal(request) or self._access.entry(request) or (
                await self._answer(request)
            )  # fmt: skip
        if isinstance(answer, EventStream):
            return answer
        return _guarded(answer).encoded(with_body=not is_head(head))

    async def _answer(self, request: HttpRequest) -> Page | EventStream:
        try:
            query = _query(request.query)
            match request.path:
                case "/":
                    return Page(HTTPStatus.OK, document(), "text/html; charset=utf-8")
                case "/api/live":
                    return self._live(head_only=request.method == "HEAD")
                case "/api/history":
                    return _json(await self._history(query))
                case "/api/jobs":
                    return _json(await self._calls.read("list the jobs", self._checkpoints.jobs))
                case "/api/checkpoints":
                    return _json(await self._listing(_field(query, "job")))
                case "/api/checkpoint":
                    job, tag = _field(query, "job"), _field(query, "tag")
                    return Page(HTTPStatus.OK, await self._details(job, tag), "application/json")
                case "/api/manifest":
                    job, tag = _field(query, "job"), _field(query, "tag")
                    found = await self._calls.read(
                        f"read {job}/{tag}", lambda: self._checkpoints.manifest(job, tag)
                    )
                    return Page(HTTPStatus.OK, found, "application/json")
                case "/api/tensor":
                    job, tag = _field(query, "job"), _field(query, "tag")
                    return _json(await self._measure(job, tag, _field(query, "name")))
        except e.CkptdError as error:
            return Page.of(_status_of(error), _without_controls(str(error)))
        return Page.of(HTTPStatus.NOT_FOUND, "there is no such page; the page is at /")

    # -- live

    def _live(self, *, head_only: bool) -> Page | EventStream:
        head = _guarded(Page(HTTPStatus.OK, b"", "text/event-stream; charset=utf-8"))
        if head_only:
            return head
        if self._streams >= MOST_STREAMS:
            return Page.of(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{MOST_STREAMS} readers have the page open already: close one of them",
            )
        return EventStream(head.encoded_head(), self._pieces())

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        if self._streams >= MOST_STREAMS:
            return  # others were faster; a browser tries it again
        self._streams += 1
        documents = self._feed.documents()
        try:
            yield b"retry: 2000\n\n"
            async for one in documents:
                yield b"data: " + one + b"\n\n"
        finally:
            self._streams -= 1
            await documents.aclose()

    # -- history

    async def _history(self, query: Query) -> Any:
        # SQLite takes memory that a page without this view saves.
        from ckptd.daemon.telemetry.history import read_history

        since, job = _seconds(query.get("since", "0")), query.get("job")
        file = self._history_file()
        if file is None:
            return _nothing("the daemon keeps no history: its setting `history` is off")

        def read() -> dict[str, Any]:
            def found(names: tuple[str, ...], limit: int) -> list[LoggedEvent]:
                return read_history(file, job=job, names=names, since=since, limit=limit)

            about, events = found(NAMES, MOST_EVENTS + 1), found((), 400)
            return {
                "snapshots": snapshots(about[-MOST_EVENTS:]),
                "truncated": len(about) > MOST_EVENTS,
                "events": [
                    {
                        "time": one.time, "event": one.name, "level": one.level, "job": one.job,
                        "text": one.text[:1000],
                    }
                    for one in reversed(events)
                ],
            }  # fmt: skip

        try:
            return await self._calls.read("read the history", read)
        except e.NotFound as error:
            return _nothing(str(error))

    # -- checkpoints

    async def _listing(self, job: str) -> Any:
        return await self._calls.read(f"list {job}", lambda: self._checkpoints.listing(job))

    async def _details(self, job: str, tag: str) -> bytes:
        """Return what a checkpoint is, as JSON. Readers who ask for the same at the same
        time get the same answer, which is made once.
        """
        key = (job, tag)
        making = self._described.get(key)
        if making is None:
            if len(self._described) >= _MOST_DESCRIBED:
                raise e.Busy("other readers look at many checkpoints: try it again in a moment")
            making = asyncio.ensure_future(self._read_details(job, tag))
            self._described[key] = making

            def made(done: asyncio.Future[bytes]) -> None:
                del self._described[key]
                if not done.cancelled():
                    done.exception()  # which is not logged if all readers have left

            making.add_done_callback(made)
        return await asyncio.shield(making)

    async def _read_details(self, job: str, tag: str) -> bytes:
        file = self._history_file()

        def read() -> bytes:
            found = self._checkpoints.details(job, tag)
            rate = None if file is None else read_rate(file, job)
            seconds = None if rate is None else rate.seconds(found.get("restored_bytes", 0))
            return msgspec.json.encode(found | {"restore_seconds": seconds})

        async with self._describing:
            return await self._calls.read(f"read {job}/{tag}", read)

    async def _measure(self, job: str, tag: str, tensor: str) -> dict[str, Any]:
        """Return the statistics of a tensor, one at a time. The work ends when the reader
        leaves.
        """
        if self._measures >= _MOST_MEASURES:
            raise e.Busy("other readers have tensors measured: try it again in a moment")
        self._measures += 1
        try:
            async with self._measuring:
                left = threading.Event()
                work = asyncio.ensure_future(
                    self._calls.run(
                        lambda: self._checkpoints.statistics(job, tag, tensor, left.is_set)
                    )
                )
                try:
                    return await asyncio.shield(work)
                except asyncio.CancelledError:
                    left.set()
                    await asyncio.wait({work})
                    work.exception()
                    raise
        finally:
            self._measures -= 1


def _guarded(page: Page) -> Page:
    return replace(page, headers=(*page.headers, *_HEADERS))


def _nothing(note: str) -> dict[str, Any]:
    """Return a history without events. note: the reason why there are none."""
    return {"snapshots": [], "truncated": False, "events": [], "note": note}


def _json(found: Any) -> Page:
    return Page(HTTPStatus.OK, msgspec.json.encode(found), "application/json")


def _status_of(error: e.CkptdError) -> HTTPStatus:
    return next(
        (status for kind, status in _STATUSES if isinstance(error, kind)),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )


def _without_controls(text: str) -> str:
    return printable(" ".join(text.split()))


def _query(text: str) -> Query:
    """Return the fields of a query. Raises InvalidRequest."""
    try:
        return dict(
            parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
        )
    except ValueError:
        raise e.InvalidRequest(
            f"expected a query of at most {_MOST_FIELDS} fields in UTF-8, like job=gpt"
        ) from None


def _field(query: Query, name: str) -> str:
    """Return a field that must be there. Raises InvalidRequest."""
    if not query.get(name):
        raise e.InvalidRequest(f"expected {name}= in the query")
    return query[name]


def _seconds(text: str) -> float:
    """Return Unix seconds. Raises InvalidRequest."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e12:
        raise e.InvalidRequest(f"since is {text[:40]!r}; expected a Unix time in seconds")
    return found
