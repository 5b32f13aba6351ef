"""Keeps the daemon's log file small: a full file becomes `FILE.1`, and a new one
begins.
"""

from __future__ import annotations

import io
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

from ckptd.shared.errors import InvalidConfig
from ckptd.shared.system.owners import open_log


class RotatingLog(RotatingFileHandler):
    """Writes to the log file at `path`, which has at most `most` bytes and a line.

    One older file is kept.

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

    def doRollover(self) -> None:
        assert self.stream is not None
        full = os.fstat(self.stream.fileno())
        followers = [fd for fd in (1, 2) if os.path.samestat(os.fstat(fd), full)]
        super().doRollover()
        assert self.stream is not None
        for fd in followers:
            os.dup2(self.stream.fileno(), fd)
