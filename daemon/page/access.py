"""Decides who may read the page. This module knows no sockets.

A page of another site can make a browser send requests to this machine. Such a request
has another `Host` or `Origin`, or says in `Sec-Fetch-Site` that it comes from another
site. An address that other machines can reach also needs a token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import parse_qs

from ckptd.daemon.telemetry.http_answers import HttpRequest, Page, is_here

MIN_TOKEN = 16
"""The fewest characters of a token."""
MAX_TOKEN = 512
"""The most characters of a token. The head of a request has to hold one, beside all
other headers of a browser.
"""
_WELCOME = b"""<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">
<title>ckptd</title><p><a href="/">Open the page</a>
"""


class Access:
    """The rules of one page.

    token: the token that a reader needs, or "" for none. names: the names of this
    machine that the `Host` header may have beside the loopback ones and IP addresses.
    """

    def __init__(self, token: str = "", names: Iterable[str] = (), port: int = 0) -> None:
        """port: the port of the page, which tells its cookie from those of other pages
        of this machine.
        """
        self._token = token.encode()
        self._names = frozenset(name.lower() for name in names)
        self._cookie = f"ckptd-page-{port}"
        # The browser keeps this, and not the token itself.
        self._pass = hmac.new(self._token, b"ckptd page", hashlib.sha256).hexdigest()

    def refusal(self, request: HttpRequest) -> Page | None:
        """Return the page that refuses a request, or None if it may be answered."""
        if not self._is_own_host(request.host):
            return Page.of(
                HTTPStatus.FORBIDDEN,
                "the Host header must name this machine: localhost, an IP address or its host "
                "name, with any port",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in (
            f"http://{request.host.lower()}",
            f"https://{request.host.lower()}",
        ):
            return Page.of(HTTPStatus.FORBIDDEN, "only this page itself may ask for its data")
        site = request.headers.get("sec-fetch-site", "none")
        if request.path != "/" and site not in ("same-origin", "none"):
            return Page.of(HTTPStatus.FORBIDDEN, "only this page itself may ask for its data")
        if self._token and not self._has_token(request) and not self._brings_token(request):
            return Page(
                HTTPStatus.UNAUTHORIZED,
                b"this page needs its token: open /?token=TOKEN once, or send the header "
                b"Authorization: Bearer TOKEN\n",
                headers=(("WWW-Authenticate", "Bearer"),),
            )
        return None

    def entry(self, request: HttpRequest) -> Page | None:
        """Return the page that turns the token in the address of a request into a
        cookie, or None if the request is not of that kind.

        The page leads on to the address without the token. It does so by itself and not
        by a redirect: after a link on another site, a browser would send no cookie that
        is SameSite=Strict to where it is redirected.
        """
        if not self._token or request.path != "/" or not self._brings_token(request):
            return None
        cookie = f"{self._cookie}={self._pass}; Path=/; HttpOnly; SameSite=Strict"
        return Page(HTTPStatus.OK, _WELCOME, "text/html; charset=utf-8", (("Set-Cookie", cookie),))

    def _is_own_host(self, host: str) -> bool:
        if is_here(host):
            return True
        if not self._token:
            return False
        name, colon, port = host.rpartition(":")
        if not colon or host.endswith("]"):
            name = host
        elif not (port.isascii() and port.isdigit()):
            return False
        # An address cannot be made to point elsewhere, which a name of a stranger can.
        return name.lower() in self._names or _is_address(name)

    def _has_token(self, request: HttpRequest) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(token.strip().encode(), self._token):
            return True
        for cookie in request.headers.get("cookie", "").replace(",", ";").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self._cookie and _same(value.encode(), self._pass.encode()):
                return True
        return False

    def _brings_token(self, request: HttpRequest) -> bool:
        try:
            given = parse_qs(request.query, max_num_fields=8)
        except ValueError:
            return False
        return any(_same(token.encode(), self._token) for token in given.get("token", ()))


def _is_address(name: str) -> bool:
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return False
    return True


def _same(a: bytes, b: bytes) -> bool:
    """Compare in a time that does not depend on where the two differ."""
    return hmac.compare_digest(hashlib.sha256(a).digest(), hashlib.sha256(b).digest())
