"""Tests who may read the page."""

from __future__ import annotations

from http import HTTPStatus

from ckptd.daemon.page.access import Access
from ckptd.daemon.telemetry.http_answers import HttpRequest, Page
from tests.support.cases import each_case

TOKEN = "0123456789abcdef"
LOCAL, GUARDED = Access(), Access(TOKEN, ["node7", "node7.lab"], 9420)


def request(target: str = "/", host: str = "localhost:9420", **headers: str) -> HttpRequest:
    path, _, query = target.partition("?")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest("GET", path, query, {"host": host, **named})


def status(access: Access, asked: HttpRequest) -> int:
    page = access.refusal(asked)
    return 200 if page is None else page.status.value


@each_case(
    ("host", "local", "guarded"),
    [
        ("localhost", 200, 200), ("127.0.0.1:9420", 200, 200), ("[::1]:9420", 200, 200),
        ("10.0.0.7:9420", 403, 200), ("[fe80::1]:9420", 403, 200), ("Node7.lab:80", 403, 200),
        ("evil.org", 403, 403), ("localhost.evil.org:9420", 403, 403), ("node7.lab:x", 403, 403),
        ("10.0.0.7.nip.io", 403, 403), ("", 403, 403),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(host: str, local: int, guarded: int) -> None:
    bearer = f"Bearer {TOKEN}"
    assert status(LOCAL, request(host=host)) == local
    assert status(GUARDED, request(host=host, authorization=bearer)) == guarded


@each_case(
    ("origin", "expected"),
    [
        ("http://localhost:9420", 200), ("https://LOCALHOST:9420", 200), ("null", 403),
        ("http://localhost:9421", 403), ("http://evil.org", 403), ("", 403),
        ("http://localhost:9420.evil.org", 403),
    ],
)  # fmt: skip
def test_a_forged_origin_is_refused(origin: str, expected: int) -> None:
    assert status(LOCAL, request("/api/live", origin=origin)) == expected


@each_case(
    ("path", "site", "expected"),
    [
        ("/", "cross-site", 200), ("/api/live", "cross-site", 403), ("/api/live", "same-site", 403),
        ("/api/live", "same-origin", 200), ("/api/manifest", "none", 200),
    ],
)  # fmt: skip
def test_another_site_may_link_to_the_page_and_nothing_else(
    path: str, site: str, expected: int
) -> None:
    assert status(LOCAL, request(path, sec_fetch_site=site)) == expected


@each_case(
    ("headers", "expected"),
    [
        ({}, 401), ({"authorization": f"Bearer {TOKEN}"}, 200), ({"authorization": TOKEN}, 401),
        ({"authorization": f"bearer  {TOKEN} "}, 200), ({"authorization": "Bearer "}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401), ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"cookie": f"ckptd-page-9420={TOKEN}"}, 401), ({"cookie": "ckptd-page-9420="}, 401),
        ({"cookie": f"token={TOKEN}"}, 401),
    ],
)  # fmt: skip
def test_without_the_token_nothing_is_answered(headers: dict[str, str], expected: int) -> None:
    for path in ("/", "/api/live", "/nothing"):
        assert status(GUARDED, request(path, **headers)) == expected


def welcome(target: str) -> Page | None:
    asked = request(target)
    assert GUARDED.refusal(asked) is None
    return GUARDED.entry(asked)


def test_a_token_in_the_address_becomes_a_cookie() -> None:
    page = welcome(f"/?token={TOKEN}")
    assert page is not None
    assert (page.status, TOKEN.encode() in page.body) == (HTTPStatus.OK, False)
    ((name, value),) = page.headers
    cookie, *flags = value.split("; ")
    assert (name, flags) == ("Set-Cookie", ["Path=/", "HttpOnly", "SameSite=Strict"])
    assert TOKEN not in cookie
    asked = request("/api/live", cookie=f"a=b; {cookie}")
    assert (status(GUARDED, asked), GUARDED.entry(asked)) == (200, None)
    other = Access(TOKEN[::-1], (), 9420)
    assert status(other, asked) == 401


@each_case(
    "target",
    ["/?token=", f"/?token={TOKEN}x", "/?token=%ff", "/?x=1", f"/?token={TOKEN}{'&a=1' * 8}"],
)
def test_a_wrong_token_in_the_address_is_refused(target: str) -> None:
    page = GUARDED.refusal(request(target))
    assert page is not None
    assert page.status is HTTPStatus.UNAUTHORIZED
    assert page.body.startswith(b"this page needs its token: open /?token=TOKEN once")
    assert GUARDED.entry(request(target)) is None


def test_a_page_without_a_token_gives_no_cookie() -> None:
    assert LOCAL.entry(request("/?token=")) is None
