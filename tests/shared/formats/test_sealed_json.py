"""Documents with their own digest."""

from __future__ import annotations

import json

import pytest

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats import sealed_json

MEMBERS = {"name": "grün", "list": [1, 2.5, None], "map": {"a": True}}
DOCUMENT = sealed_json.encode(MEMBERS)


def test_a_document_is_json_with_one_member_on_each_line() -> None:
    read = json.loads(DOCUMENT)
    assert len(read.pop("sha256")) == 64
    assert read == MEMBERS
    assert len(DOCUMENT.splitlines()) == len(MEMBERS) + 3
    sealed_json.check(DOCUMENT, "document")


def test_every_flipped_bit_is_found() -> None:
    for position in range(8 * len(DOCUMENT)):
        damaged = bytearray(DOCUMENT)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(IntegrityError, match="^document "):
            sealed_json.check(bytes(damaged), "document")


def test_every_document_that_is_cut_short_is_found() -> None:
    assert len(DOCUMENT) > 79
    for length in range(len(DOCUMENT)):
        with pytest.raises(
            IntegrityError, match="^document is cut short: it does not end with its digest"
        ):
            sealed_json.check(DOCUMENT[:length], "document")


def test_the_tail_has_79_bytes_and_is_not_searched_for() -> None:
    """FORMAT.md, section 4."""
    tail = b'"sha256": "' + 64 * b"0" + b'"\n}\n'
    assert len(tail) == sealed_json._END_LENGTH == 79
    document = sealed_json.encode({"text": tail.decode(), "more": 1})
    sealed_json.check(document, "a document")
    for changed in (
        document + b"\n",
        document[:-1],
        document.replace(b'"sha256": "', b'"sha256":"'),
        document + tail,
    ):
        with pytest.raises(IntegrityError):
            sealed_json.check(changed, "a document")
