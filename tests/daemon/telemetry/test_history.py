"""Tests the file with a daemon's history: its bounds, its damage, and its versions."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import _SCHEMA, VERSION, History, read_history
from ckptd.shared.errors import NewerFormat, NotFound, StorageError
from ckptd.shared.system import machine

NAME = "history.sqlite3"


def event(number: int, job: str = "gpt", name: str = "save.done") -> LoggedEvent:
    return LoggedEvent(1_000.0 + number, name, 20, f"text {number}", {"job": job, "step": number})


def written(file: Path, *batches: Sequence[LoggedEvent], most: int = 100) -> History:
    history = History(file, most)
    for batch in batches:
        history.take(batch)
    history.close()
    return history


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / NAME


def test_what_is_written_is_read_again_oldest_first(file: Path) -> None:
    events = [event(1), event(2, job="other"), event(3, name="save.failed")]
    written(file, events[:1], events[1:])
    assert read_history(file) == events
    assert read_history(file, job="gpt") == [events[0], events[2]]
    assert read_history(file, names=["save.failed", "x"]) == [events[2]]
    assert read_history(file, since=1_002.0, limit=1) == [events[2]]
    assert read_history(file, job="gpt", since=2_000.0) == []
    with pytest.raises(NotFound, match="has no job 'gtp'; did you mean 'gpt'[?]$"):
        read_history(file, job="gtp")
    with pytest.raises(NotFound, match='has no job "\'; DROP TABLE events"$'):
        read_history(file, job="'; DROP TABLE events")
    assert os.stat(file).st_mode & 0o777 == 0o600


def test_the_oldest_events_go_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.daemon.telemetry.history._SPARE", 5)
    written(file, *([event(number)] for number in range(104)))
    assert len(read_history(file, limit=1_000)) == 104
    written(file, [event(number) for number in range(104, 110)])
    assert [found.facts["step"] for found in read_history(file, limit=1_000)] == [*range(10, 110)]


@pytest.mark.parametrize("damage", [b"", b"this is no database, and never was", None])
def test_a_damaged_file_is_set_aside(
    file: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    written(file, [event(number) for number in range(200)])
    whole = file.read_bytes()
    file.write_bytes(whole[:4096] + bytes(len(whole) - 4096) if damage is None else damage)
    bad = file.read_bytes()
    written(file, [event(7)])
    assert read_history(file) == [event(7)]
    if damage != b"":  # an empty file is an empty database
        assert (file.parent / f"{NAME}.damaged").read_bytes() == bad
        assert "is damaged" in caplog.text
        assert f"it is set aside as {NAME}.damaged, and a new one begins" in caplog.text


def test_the_file_of_a_newer_version_is_left_alone(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(file, [event(1)])
    found = sqlite3.connect(file)
    found.execute(f"PRAGMA user_version = {VERSION + 1}")
    found.close()
    before = file.read_bytes()
    written(file, [event(2)], [event(3)])
    assert file.read_bytes() == before
    assert [record.getMessage() for record in caplog.records] == [
        f"the history {file} is not written: the history {file} has version 2, and this ckptd "
        f"knows versions up to 1: use the ckptd that wrote it, or move the file away"
    ]
    with pytest.raises(NewerFormat, match="has version 2"):
        read_history(file)


def test_a_history_that_cannot_be_written_is_told_once_and_goes_on_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "later" / NAME
    history = History(file)
    history.take([event(1)])
    history.take([event(2)])
    file.parent.mkdir()
    history.take([event(3)])
    history.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"the history {file} is not written: unable to open database file",
        f"the history {file} is written again",
    ]
    assert read_history(file) == [event(3)]


def test_a_file_that_was_half_made_is_completed(file: Path) -> None:
    """A daemon of an earlier version was killed, or the disk was full."""
    with closing(sqlite3.connect(file)) as made, made:
        made.execute(_SCHEMA[0])
    with pytest.raises(NotFound, match="has no events yet$"):
        read_history(file)
    written(file, [event(1)], [event(2)])
    assert read_history(file) == [event(1), event(2)]


def test_a_file_is_made_with_its_first_events_or_not_at_all(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.daemon.telemetry.history._SCHEMA", (*_SCHEMA[:1], "no SQL"))
    written(file, [event(1)])
    with closing(sqlite3.connect(file)) as found:
        assert found.execute("SELECT name FROM sqlite_schema").fetchall() == []


def test_what_cannot_be_read_says_why(file: Path) -> None:
    with pytest.raises(NotFound, match=r"^there is no history .*set CKPTD_STATE_DIR to that$"):
        read_history(file)
    file.write_bytes(b"this is no database, and never was")
    with pytest.raises(StorageError, match="is damaged .*: move it away"):
        read_history(file)


def test_each_root_has_its_own_history(tmp_path: Path) -> None:
    one, other = (machine.history_file(tmp_path, tmp_path / name) for name in ("one", "other"))
    assert one != other
    assert one.is_relative_to(tmp_path)
    assert one.name == NAME


def test_a_full_disk_under_the_history_is_told_once_and_costs_only_its_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file, full = tmp_path / NAME, LoggedEvent(1.0, "save.done", 20, "x" * 200_000, {})
    written(file, [event(1)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    history = History(file)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
        history.take([full])
        history.take([full])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    history.take([event(2)])
    history.close()
    assert [text.split(":")[0] for text in caplog.messages] == [
        f"the history {file} is not written",
        f"the history {file} is written again",
    ]
    assert read_history(file) == [event(1), event(2)]
