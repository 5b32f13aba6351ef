"""Reads one HTTP request, and answers one for metrics or a probe. This module knows no
sockets.

A page of another site can make a browser send requests to this machine. Such a request
names another host than this machine, and is refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from ckptd.daemon.http_address import LOOPBACK

MAX_HEAD_BYTES = 8192
"""The most bytes of a request line with all headers."""
_PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """The answer to a request: a status, a body with its type, and further headers."""

    status: HTTPStatus
    body: bytes
    content_type: str = _PLAIN
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, status: HTTPStatus, sentence: str) -> Page:
        return cls(status, f"{sentence}\n".encode())

    def encoded(self, *, with_body: bool = True) -> bytes:
        """Return the response as it is sent. The connection ends with it."""
        head = self._head(f"Content-Length: {len(self.body)}\r\n")
        return head + (self.body if with_body else b"")

    def encoded_head(self) -> bytes:
        """Return the head of a response whose body has no known length."""
        return self._head("")

    def _head(self, length: str) -> bytes:
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            + length
            + ("Allow: GET, HEAD\r\n" if self.status is HTTPStatus.METHOD_NOT_ALLOWED else "")
            + "".join(f"{name}: {value}\r\n" for name, value in self.headers)
            + "Cache-Control: no-store\r\n"
            "X-Content-Type-Options: nosniff\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode("ascii")


@dataclass(frozen=True, slots=True)
class EventStream:
    """An answer that goes on until the client leaves: a head, then pieces of the body as
    they come.
    """

    head: bytes
    pieces: AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A well-formed GET or HEAD request.

    query: the text behind the question mark, or "". headers: the values by names in
    small letters; several of one name are joined by ", ".
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]

    @property
    def host(self) -> str:
        return self.headers["host"]


Pages = Mapping[str, Callable[[], Page]]
"""The function that makes each page, by path."""


def respond(head: bytes, pages: Pages) -> bytes:
    """Return the response to a request.

    head: the request line and the headers, with the empty line that ends them.
    """
    request = parse_request(head)
    if isinstance(request, Page):
        page = request
    elif not is_here(request.host):
        page = Page.of(
            HTTPStatus.FORBIDDEN,
            f"the Host header must name this machine: {', '.join(LOOPBACK)}, with any port",
        )
    else:
        make = pages.get(request.path)
        page = make() if make is not None else _not_found(pages)
    return page.encoded(with_body=not is_head(head))


def is_head(head: bytes) -> bool:
    """Return True if a request asks for no body."""
    return head.startswith(b"HEAD ")


def parse_request(head: bytes) -> HttpRequest | Page:
    """Return a request, or the page that refuses it because it is malformed or no GET.

    head: the request line and the headers, with the empty line that ends them.
    """
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, _, rest = lines[0].partition(" ")
    target, _, version = rest.rpartition(" ")
    if version not in ("HTTP/1.0", "HTTP/1.1") or not target or " " in target:
        return Page.of(HTTPStatus.BAD_REQUEST, "expected a request of HTTP/1.0 or HTTP/1.1")
    if method not in ("GET", "HEAD"):
        return Page.of(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
    headers = dict[str, str]()
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            return Page.of(HTTPStatus.BAD_REQUEST, "expected lines `Name: value` as headers")
        known = headers.get(name.lower())
        if known is not None and name.lower() == "host":
            return _one_host()
        headers[name.lower()] = value.strip() if known is None else f"{known}, {value.strip()}"
    if "host" not in headers:
        return _one_host()
    path, _, query = target.partition("?")
    return HttpRequest(method, path, query, headers)


def _one_host() -> Page:
    return Page.of(HTTPStatus.BAD_REQUEST, "expected exactly one Host header")


def is_here(host: str) -> bool:
    """Return True if a Host header names this machine. A forwarded port may differ."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host.lower() in LOOPBACK
    return name.lower() in LOOPBACK and (port == "" or (port.isascii() and port.isdigit()))


def _not_found(pages: Pages) -> Page:
    return Page.of(HTTPStatus.NOT_FOUND, f"there is no such page; there are {', '.join(pages)}")
