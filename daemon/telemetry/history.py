"""Keeps what a daemon did, in a small SQLite file for each root, for `ckptd history`.

The file has at most `MAX_EVENTS` events; the oldest go first. It says what happened and
decides nothing, so the daemon goes on without it if it cannot be written.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from ckptd.daemon.telemetry.background import BackgroundHandler, LoggedEvent
from ckptd.shared.errors import NewerFormat, NotFound, StorageError
from ckptd.shared.system.settings import nearest

log = logging.getLogger("ckptd.history")

VERSION = 1
"""The version of the file, its `user_version`."""
GATHER_SECONDS = 2.0
"""Events of so many seconds are written together: the disk is synced for each write. A
daemon that is killed loses those that it has not written yet.
"""
MAX_EVENTS = 100_000
"""About 30 MB, and five weeks of a job that saves once a minute."""
_decode_facts = msgspec.json.Decoder(dict[str, Any]).decode
_SPARE = 1_000
"""The file is cut back to `MAX_EVENTS` whenever it has so many more."""
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, time REAL NOT NULL, "
    "name TEXT NOT NULL, level INTEGER NOT NULL, job TEXT NOT NULL, text TEXT NOT NULL, "
    "facts TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS events_by_job ON events (job, id)",
    f"PRAGMA user_version = {VERSION}",
)
"""The statements that make a new file, in one transaction with its first events. Earlier
versions had one for each, and may have left a file that lacks the last ones.
"""


class History(BackgroundHandler):
    """A handler that writes the events of the log to the history at `file`.

    A damaged file is set aside as `FILE.damaged`. A file that a newer ckptd has made is
    left alone. While the file cannot be written, the log says so once, and the events
    of that time are missing.
    """

    def __init__(self, file: Path, most: int = MAX_EVENTS) -> None:
        super().__init__("ckptd-history", gather_seconds=GATHER_SECONDS)
        self._file, self._most = file, most
        self._problem = ""

    def take(self, events: Sequence[LoggedEvent]) -> None:
        try:
            self._write(events)
        except (NewerFormat, OSError, sqlite3.Error) as error:
            problem = _reason(error)
            if problem != self._problem:
                log.warning("the history %s is not written: %s", self._file, problem)
            self._problem = problem
            return
        if self._problem:
            log.info("the history %s is written again", self._file)
        self._problem = ""

    def _write(self, events: Sequence[LoggedEvent]) -> None:
        try:
            self._insert(events)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            aside = self._file.with_name(f"{self._file.name}.damaged")
            self._file.with_name(f"{self._file.name}-journal").unlink(missing_ok=True)
            self._file.replace(aside)
            log.warning(
                "the history %s is damaged (%s): it is set aside as %s, and a new one begins",
                self._file, error, aside.name,
            )  # fmt: skip
            self._insert(events)

    def _insert(self, events: Sequence[LoggedEvent]) -> None:
        # A connection for each batch: an idle daemon keeps no memory and no lock for it.
        with closing(sqlite3.connect(self._file, timeout=5.0)) as found, found:
            (version,) = found.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise _newer(self._file, version)
            if version == 0:
                self._file.chmod(0o600)
                found.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA:
                    found.execute(statement)
            found.executemany(
                "INSERT INTO events (time, name, level, job, text, facts) VALUES (?,?,?,?,?,?)",
                [
                    (
                        event.time,
                        event.name,
                        event.level,
                        event.job,
                        event.text,
                        msgspec.json.encode(event.facts).decode(),
                    )
                    for event in events
                ],
            )
            first, last = found.execute("SELECT min(id), max(id) FROM events").fetchone()
            if last - first >= self._most + _SPARE:
                found.execute("DELETE FROM events WHERE id <= ?", (last - self._most,))


def read_history(
    file: Path,
    *,
    job: str | None = None,
    names: Sequence[str] = (),
    since: float = 0.0,
    limit: int = 100,
) -> list[LoggedEvent]:
    """Return the newest events of a history, oldest first: at most `limit`, from
    `since` (Unix seconds) on, and of this job and with these names if they are given.

    Raises NotFound if there is no history or none of this job, NewerFormat if a newer
    ckptd has made it, and StorageError if it is damaged or cannot be read.
    """
    if not file.exists():
        raise NotFound(
            f"there is no history {file}: a daemon writes one while it serves the root; if it has "
            f"another state_dir, set CKPTD_STATE_DIR to that"
        )
    wanted, values = ["time >= ?"], list[Any]([since])
    if job is not None:
        wanted.append("job = ?")
        values.append(job)
    if names:
        wanted.append(f"name IN ({','.join('?' * len(names))})")
        values += names
    with _open_to_read(file) as found:
        (version,) = found.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise _newer(file, version)
        if version == 0:
            raise NotFound(f"the history {file} has no events yet")
        rows = found.execute(
            "SELECT time, name, level, text, facts FROM events "
            f"WHERE {' AND '.join(wanted)} ORDER BY id DESC LIMIT ?",
            (*values, limit),
        ).fetchall()
        jobs = (
            []
            if rows or job is None
            else [name for (name,) in found.execute("SELECT DISTINCT job FROM events")]
        )
    if not rows and job is not None and job not in jobs:
        near = nearest(job, filter(None, jobs))
        raise NotFound(
            f"the history {file} has no job {job!r}" + (f"; did you mean {near!r}?" if near else "")
        )
    return [
        LoggedEvent(time, name, level, text, _facts(facts))
        for time, name, level, text, facts in reversed(rows)
    ]


@contextmanager
def _open_to_read(file: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as found:
            yield found
    except sqlite3.Error as error:
        what = "is damaged" if _is_damage(error) else "cannot be read"
        raise StorageError(
            f"the history {file} {what} ({error}): move it away, and the daemon begins a new one"
        ) from None


def _facts(text: str) -> Mapping[str, Any]:
    with suppress(msgspec.MsgspecError):
        return _decode_facts(text)
    return {}


def _is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _newer(file: Path, version: int) -> NewerFormat:
    return NewerFormat(
        f"the history {file} has version {version}, and this ckptd knows versions up to {VERSION}: "
        f"use the ckptd that wrote it, or move the file away"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
