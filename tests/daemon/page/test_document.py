"""Tests that the document is one, small, and runs nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import re

from ckptd.daemon.page.document import MOST_BYTES, document, policy

TEXT = document().decode()


def test_the_document_is_small() -> None:
    assert 20_000 < len(document()) <= MOST_BYTES


def test_the_policy_allows_the_script_and_the_style_of_the_document_alone() -> None:
    for tag in ("script", "style"):
        (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", TEXT, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy()
    assert "default-src 'none'" in policy()
    assert "frame-ancestors 'none'" in policy()
    assert "unsafe" not in policy()


def test_nothing_is_loaded_from_elsewhere() -> None:
    urls = set(re.findall(r"https?://[^\s'\"]+", TEXT))
    assert urls == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"(?:src|href)=[\"'](?!#|data:)", TEXT) == []
    assert "@import" not in TEXT


def test_no_text_becomes_markup() -> None:
    ways = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(")
    assert [way for way in ways if way in TEXT] == []
    assert re.findall(r"\son\w+=", TEXT) == []
