"""Keeps the daemon's log file small: a full file becomes `FILE.1`, and a new one
begins.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from ckptd.shared.errors import InvalidConfig
from ckptd.shared.system.owners import open_log

log = logging.getLogger("ckptd.log")


class RotatingLog(RotatingFileHandler):
    """Writes to the log file at `path`, which has at most `most` bytes and a line.

    One older file is kept. A file that was moved or deleted is begun again.

    Standard output and standard error follow to the new file if they were the old one,
    as in a private daemon. A traceback of the interpreter is then at the end of the
    log. Raises InvalidConfig if the file cannot be opened.
    """

    def __init__(self, path: Path, most: int = 10 << 20) -> None:
        try:
            super().__init__(path, maxBytes=most, backupCount=1)
        except OSError as error:
            raise InvalidConfig(
                f"cannot write the log_file {path}: {error.strerror or error}"
            ) from None

    def _open(self) -> io.TextIOWrapper:
        return os.fdopen(
            open_log(Path(self.baseFilename)), "a", encoding="utf-8", errors="backslashreplace"
        )

    def emit(self, record: logging.LogRecord) -> None:
        self._begin_again_if_gone()
        super().emit(record)

    def _begin_again_if_gone(self) -> None:
        """Begin a new file if the file was moved or deleted, as `logrotate` and cleaners
        do: nobody would find the lines in the old one.

        As long as its directory is gone, the lines go to the old file.
        """
        if self.stream is None:
            return
        try:
            there = os.stat(self.baseFilename)
        except OSError:
            there = None
        if there is not None and os.path.samestat(there, os.fstat(self.stream.fileno())):
            return
        try:
            new = self._open()
        except OSError:
            return
        with self._followed():
            self.stream.close()
            self.stream = new
        log.warning("the log file was moved or deleted, and a new one begins")

    def doRollover(self) -> None:
        with self._followed():
            super().doRollover()

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """Context manager in which the stream is replaced. Standard output and standard
        error follow if they were the old file.
        """
        assert self.stream is not None
        old = os.fstat(self.stream.fileno())
        followers = [fd for fd in (1, 2) if os.path.samestat(os.fstat(fd), old)]
        yield
        assert self.stream is not None
        for fd in followers:
            os.dup2(self.stream.fileno(), fd)
