"""JSON documents that end with their own digest, so that one that is cut short or
altered is noticed (FORMAT.md, section 4).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.bounds import check_json

_END = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_END_LENGTH = len('"sha256": ""\n}\n') + 64


def encode(members: Mapping[str, Any]) -> bytes:
    """Return the document: one line for each member, and a last one with the sha256 of
    all bytes before it.
    """
    body = (
        "{\n" + "".join(f"{json.dumps(key)}: {_dump(value)},\n" for key, value in members.items())
    ).encode()
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def check(data: bytes, called: str) -> None:
    """Raise IntegrityError, whose text begins with `called`, if the document is cut
    short, altered, or holds too many objects.
    """
    end = _END.fullmatch(data[-_END_LENGTH:])
    if end is None:
        raise IntegrityError(
            f"{called} is cut short: it does not end with its digest ({len(data)} bytes)"
        )
    if hashlib.sha256(data[:-_END_LENGTH]).hexdigest().encode() != end[1]:
        raise IntegrityError(f"{called} does not match its digest")
    check_json(data, called)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
