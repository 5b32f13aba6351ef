"""Builds the one document that is the page, and the policy that the browser keeps.

The document has its style and its script in it, and the policy names their digests: a
browser runs nothing else, and loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

MOST_BYTES = 300_000
"""The most bytes that the document may have."""


@cache
def document() -> bytes:
    """Return the page as HTML."""
    return (
        _part("page.html")
        .replace("/* style */", _part("page.css"))
        .replace("/* script */", _part("page.js"))
        .encode()
    )


@cache
def policy() -> str:
    """Return the content security policy of every answer."""
    return "; ".join([
        "default-src 'none'",
        f"script-src '{_digest(_part('page.js'))}'",
        f"style-src '{_digest(_part('page.css'))}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ])  # fmt: skip


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
