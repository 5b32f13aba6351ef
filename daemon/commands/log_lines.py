"""Reads the log of a daemon line by line, over its rotations, and selects the lines that
are about one job.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from ckptd.shared.errors import storage_errors

_BLOCK = 1 << 20
POLL_SECONDS = 0.25
"""The time between two looks for new lines."""


class LogFiles:
    """The files of a log at `path`: the current one, and the one before, `path.1`.

    `there` yields the lines that they hold, and `more` those that are written later, also
    into files that take their place. `rest` is the beginning of a last line that is not
    whole yet. Use it in a `with` statement.
    """

    def __init__(self, path: Path) -> None:
        """Raises StorageError if neither file is there, or one cannot be read."""
        self._path = path
        self._older = path.with_name(f"{path.name}.1")
        self._rest = b""
        self._first: BinaryIO | None = None
        with self._errors():
            # In this order, a rotation meanwhile makes one file of the two, and loses none.
            self._current = _opened(path)
            older = _opened(self._older)
            if self._current is None and older is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if older and self._current and _identity(older) == _identity(self._current):
            older.close()
        else:
            self._first = older

    def _errors(self) -> AbstractContextManager[None]:
        return storage_errors(f"read the log {self._path}")

    def there(self) -> Iterator[str]:
        """Yield the whole lines that the files hold now, without their ends, oldest
        first. Raises StorageError.
        """
        with self._errors():
            for file in (self._first, self._current):
                if file is not None:
                    yield from self._split(_all_of(file))

    def more(self, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
        """Yield each line that is written after `there`, once it is whole. Never ends.

        Raises StorageError.
        """
        with self._errors():
            while True:
                yield from self._split(self._turned())
                if self._current is not None:
                    yield from self._split(_all_of(self._current))
                sleep(POLL_SECONDS)

    @property
    def rest(self) -> str:
        return self._rest.decode(errors="backslashreplace")

    def _split(self, blocks: Iterable[bytes]) -> Iterator[str]:
        for data in blocks:
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                yield line.decode(errors="backslashreplace")

    def _turned(self) -> Iterator[bytes]:
        """Go on to the file that has taken the place of the current one, if there is
        one. Yield the end of the current one.
        """
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return  # between the two renames of a rotation
        before = self._current
        if before is not None and (now.st_dev, now.st_ino) == _identity(before):
            if now.st_size < before.tell():
                before.seek(0)  # it was emptied
            return
        new = _opened(self._path)
        if new is None:
            return
        self._current = new
        if before is None:
            return
        with before:
            yield from _all_of(before)
            older = _opened(self._older)
            if older is not None:
                with older:
                    # There may have been two rotations since the last look.
                    if _identity(older) not in (_identity(before), _identity(new)):
                        yield from _all_of(older)

    def close(self) -> None:
        for file in (self._first, self._current):
            if file is not None:
                file.close()

    def __enter__(self) -> LogFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _identity(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _all_of(file: BinaryIO) -> Iterator[bytes]:
    while data := file.read(_BLOCK):
        yield data


_BEGINNING = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|\{")
"""The beginning of an entry. Lines that begin otherwise, as those of a traceback do,
belong to the entry before.
"""


class EntriesOf:
    """The lines about a job, or all lines if the job is None.

    About a job are the entries that have `job NAME`, `NAME/` or the quoted name, and JSON
    objects whose fact `job` is the name.
    """

    def __init__(self, job: str | None) -> None:
        self._job = job
        name = re.escape(job or "")
        self._said = re.compile(
            rf"\bjob {name}(?![\w-]|\.\w)|(?<![\w.-]){name}/|(?<=['\"]){name}(?=['\"])"
        )
        self._wanted = job is None

    def keeps(self, line: str) -> bool:
        """Return True if a line is wanted. The lines are given in their order."""
        if self._job is not None and _BEGINNING.match(line):
            text, job = _entry(line)
            self._wanted = self._said.search(text) is not None if job is None else job == self._job
        return self._wanted


def _entry(line: str) -> tuple[str, str | None]:
    """Return the text of an entry, and the job that its facts name, or None."""
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return line, None
    facts = found.get("facts")
    job = facts.get("job") if isinstance(facts, dict) else None
    return str(found.get("text", "")), job if isinstance(job, str) else None
