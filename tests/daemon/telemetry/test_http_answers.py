"""Tests what is answered to requests, forged and malformed ones too."""

from __future__ import annotations

from http import HTTPStatus

from ckptd.daemon.telemetry.http_answers import Page, Pages, respond
from tests.support.cases import each_case

PAGES: Pages = {"/metrics": lambda: Page(HTTPStatus.OK, b"a 1\n", "text/x"), "/healthz": lambda: (
    Page.of(HTTPStatus.SERVICE_UNAVAILABLE, "late"))}  # fmt: skip


def asked(request: str) -> tuple[int, dict[str, str], bytes]:
    """Return the status, the headers and the body of the response."""
    head, _, body = respond(request.encode("latin-1"), PAGES).partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    assert first.startswith("HTTP/1.1 ")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in rest), body


def get(target: str = "/metrics", host: str = "localhost", method: str = "GET") -> str:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n\r\n"


def test_a_page_is_sent_whole() -> None:
    assert asked(get()) == (
        200,
        {"Content-Type": "text/x", "Content-Length": "4", "Cache-Control": "no-store",
         "X-Content-Type-Options": "nosniff", "Connection": "close"},
        b"a 1\n",
    )  # fmt: skip


def test_a_head_has_the_length_and_no_body() -> None:
    status, headers, body = asked(get(method="HEAD"))
    assert (status, headers["Content-Length"], body) == (200, "4", b"")


def test_a_query_changes_nothing() -> None:
    assert asked(get("/metrics?a=b"))[::2] == (200, b"a 1\n")


def test_a_probe_tells_why() -> None:
    assert asked(get("/healthz"))[::2] == (503, b"late\n")


@each_case("target", ["/", "/metrics/", "//metrics", "/../metrics", "*",
                                    "http://localhost/metrics"])  # fmt: skip
def test_other_pages_do_not_exist(target: str) -> None:
    status, _, body = asked(get(target))
    assert (status, body) == (404, b"there is no such page; there are /metrics, /healthz\n")


@each_case("method", ["POST", "PUT", "DELETE", "OPTIONS", "get", "CONNECT"])
def test_only_reading_is_possible(method: str) -> None:
    status, headers, body = asked(get(method=method))
    assert (status, headers["Allow"], body) == (
        405, "GET, HEAD", b"only GET and HEAD are answered\n",
    )  # fmt: skip


@each_case(
    "host", ["localhost", "LocalHost:9419", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:9419"]
)
def test_hosts_that_name_this_machine(host: str) -> None:
    assert asked(get(host=host))[0] == 200


@each_case(
    "host", ["evil.org", "evil.org:9419", "localhost.evil.org", "127.0.0.1.nip.io", "127.0.0.2",
             "0.0.0.0:9419", "localhost:9419:1", "localhost:x", "::1", ""],
)  # fmt: skip
def test_a_forged_host_is_refused(host: str) -> None:
    status, _, body = asked(get(host=host))
    assert (status, body[:42]) == (403, b"the Host header must name this machine: 12")


@each_case(
    "request_",
    [
        "GET /metrics HTTP/1.1\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nhost: localhost\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nHost : localhost\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nHost\r\n\r\n",
        "GET /metrics HTTP/2.0\r\nHost: localhost\r\n\r\n",
        "GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /metrics\r\nHost: localhost\r\n\r\n",
        "\r\n\r\n",
        "\x16\x03\x01\x02\r\n\r\n",
    ],
)
def test_a_malformed_request_is_refused(request_: str) -> None:
    assert asked(request_)[0] == 400
