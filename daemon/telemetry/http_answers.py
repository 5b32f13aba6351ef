"""Answers one HTTP request for metrics or a probe. This module knows no sockets.

A page of another site can make a browser send requests to this machine. Such a request
names another host than this machine, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from ckptd.daemon.http_address import LOOPBACK

MAX_HEAD_BYTES = 8192
"""The most bytes of a request line with all headers."""
_PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """The answer to a request: a status, and a body with its type."""

    status: HTTPStatus
    body: bytes
    content_type: str = _PLAIN

    @classmethod
    def of(cls, status: HTTPStatus, sentence: str) -> Page:
        return cls(status, f"{sentence}\n".encode())

    def encoded(self, *, with_body: bool = True) -> bytes:
        """Return the response as it is sent. The connection ends with it."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            + ("Allow: GET, HEAD\r\n" if self.status is HTTPStatus.METHOD_NOT_ALLOWED else "")
            + "Cache-Control: no-store\r\n"
            "X-Content-Type-Options: nosniff\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + (self.body if with_body else b"")


Pages = Mapping[str, Callable[[], Page]]
"""The function that makes each page, by path."""


def respond(head: bytes, pages: Pages) -> bytes:
    """Return the response to a request.

    head: the request line and the headers, with the empty line that ends them.
    """
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, _, rest = lines[0].partition(" ")
    target, _, version = rest.rpartition(" ")
    page = _refusal(method, target, version, lines[1:])
    if page is None:
        make = pages.get(target.partition("?")[0])
        page = make() if make is not None else _not_found(pages)
    return page.encoded(with_body=method != "HEAD")


def _refusal(method: str, target: str, version: str, headers: list[str]) -> Page | None:
    """Return the page that refuses a request, or None if it may be answered."""
    if version not in ("HTTP/1.0", "HTTP/1.1") or not target or " " in target:
        return Page.of(HTTPStatus.BAD_REQUEST, "expected a request of HTTP/1.0 or HTTP/1.1")
    if method not in ("GET", "HEAD"):
        return Page.of(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
    hosts = []
    for line in headers:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            return Page.of(HTTPStatus.BAD_REQUEST, "expected lines `Name: value` as headers")
        if name.lower() == "host":
            hosts.append(value.strip())
    if len(hosts) != 1:
        return Page.of(HTTPStatus.BAD_REQUEST, "expected exactly one Host header")
    if not _is_here(hosts[0]):
        return Page.of(
            HTTPStatus.FORBIDDEN,
            f"the Host header must name this machine: {', '.join(LOOPBACK)}, with any port",
        )
    return None


def _is_here(host: str) -> bool:
    """Return True if a Host header names this machine. A forwarded port may differ."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host.lower() in LOOPBACK
    return name.lower() in LOOPBACK and (port == "" or (port.isascii() and port.isdigit()))


def _not_found(pages: Pages) -> Page:
    return Page.of(HTTPStatus.NOT_FOUND, f"there is no such page; there are {', '.join(pages)}")
