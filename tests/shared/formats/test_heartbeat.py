"""Heartbeats of runs: their bytes, damaged ones, and what a message says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ckptd.shared
from ckptd.shared.formats.heartbeat import MAX_HEARTBEAT, Heartbeat
from tests.support.cases import each_case

BOOT, BEAT = "6f0f0c5ba1a54b7f8e0d1c2b3a495867", "000102030405060708090a0b0c0d0e0f"
MADE = Heartbeat(
    job="gpt",
    attempt=2,
    run="gpt-7",
    host="node1",
    boot=BOOT,
    pid=4711,
    since=1764022080.5,
    beat=BEAT,
)


def test_the_example_of_the_format_is_a_heartbeat() -> None:
    assert ckptd.shared.__file__ is not None
    (example,) = re.findall(
        r'^\{"format":"ckptd-run".*\}$',
        Path(ckptd.shared.__file__).with_name("FORMAT.md").read_text(),
        re.MULTILINE,
    )
    assert MADE.encode().decode() == example
    assert Heartbeat.decode(example.encode(), "gpt", 2) == MADE


def test_the_next_heartbeat_differs_in_its_beat_only() -> None:
    after = MADE.again()
    assert after.beat != MADE.beat
    assert {
        key
        for key, value in json.loads(after.encode()).items()
        if json.loads(MADE.encode())[key] != value
    } == {"beat"}


def test_a_later_version_may_have_more_fields() -> None:
    assert (
        Heartbeat.decode(
            json.dumps(json.loads(MADE.encode()) | {"version": 2, "more": [1]}).encode(), "gpt", 2
        )
        is not None
    )


@each_case(
    "changed",
    [
        {"format": "ckptd-receipt"}, {"job": "other"}, {"job": "x" * 129}, {"attempt": 3},
        {"attempt": -2}, {"run": "x" * 257}, {"host": "a\nb"}, {"host": ""}, {"host": "x" * 129},
        {"boot": "0"}, {"pid": -1}, {"pid": 1 << 32}, {"since": -1.0}, {"since": 1e300},
        {"beat": "x" * 32}, {"beat": None},
    ],
)  # fmt: skip
def test_what_is_no_heartbeat_of_the_attempt_is_none(changed: dict[str, Any]) -> None:
    assert (
        Heartbeat.decode(json.dumps(json.loads(MADE.encode()) | changed).encode(), "gpt", 2) is None
    )


@each_case("data", [b"", b"\0" * 100, b"\xff", MADE.encode()[:-1], b"[" * 4096, b"null"])
def test_damaged_bytes_are_none(data: bytes) -> None:
    assert Heartbeat.decode(data, "gpt", 2) is None


def test_the_longest_heartbeat_is_read_whole() -> None:
    longest = Heartbeat(
        job="x" * 128,
        attempt=999_999_999,
        run="\x00" * 256,
        host="h" * 128,
        boot=BOOT,
        pid=1 << 31,
        since=1e9 / 3,
        beat=BEAT,
    )
    assert len(longest.encode()) <= MAX_HEARTBEAT


@pytest.mark.parametrize(
    ("made", "who"),
    [
        (MADE, "process 4711 on node1 since 2025-11-24 22:08:00 UTC"),
        (Heartbeat(job="gpt", attempt=2, host="node1", boot=BOOT, beat=BEAT), "a process on node1"),
    ],
)
def test_a_message_names_the_process_and_the_node(made: Heartbeat, who: str) -> None:
    assert made.who == who
