"""Moves the journal that an earlier version of ckptd kept in a POSIX root to the local
directory where it is kept now.

The order of steps makes a crash harmless at any point. First a file that only a newer
version can read takes the place of the first journal file, so that an earlier version
refuses the root. Then the journal files are copied. At the end they are renamed in the
root.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from crc32c import crc32c

from ckptd.shared import names
from ckptd.shared.formats.binary import NEWER, preamble
from ckptd.shared.system.fs import (
    FileSystem,
    closing_at_end,
    make_directories,
    opened_directory,
    publish,
    read_small,
)

log = logging.getLogger("ckptd.storage")

MAGIC = b"CKPTDJNL"
BARRIER = names.journal_file(0)
"""The name of the file that stops earlier versions. They read journal files in the
order of their numbers, and never gave the number 0.
"""
MOVED_SUFFIX = ".moved"
_BODY = 44
"""The bytes of a journal header that its crc32c protects."""
_LARGEST = 4 << 20
"""The length in bytes of every journal file of an earlier version."""


def move(fs: FileSystem, directory: int, called: str, target: Path) -> None:
    """Move the journal files in an open directory to the directory `target`, unless
    they have been moved before. Raises OSError.

    called: the path of the open directory, for messages.
    """
    left = [
        name
        for name, _ in fs.entries(directory)
        if name != BARRIER and names.parse_journal_file(name) is not None
    ]
    if not left:
        return
    _stop_earlier_versions(fs, directory)
    if target.exists():  # an earlier start has copied them, and died before it could rename them
        log.warning(
            "%s: the journal files there are no longer used, because there is a newer journal in "
            "%s",
            called,
            target,
        )
    else:
        _copy(fs, directory, left, target)
        log.warning("%s: the journal is kept in %s from now on, on the local disk", called, target)
    for name in left:
        fs.rename(name, name + MOVED_SUFFIX, directory, replace=True)
    fs.sync_directory(directory)


def _stop_earlier_versions(fs: FileSystem, directory: int) -> None:
    if BARRIER not in (name for name, _ in fs.entries(directory)):
        body = preamble(MAGIC, version=NEWER).ljust(_BODY, b"\0")
        publish(
            fs,
            BARRIER,
            directory,
            (body + crc32c(body).to_bytes(4, "little")).ljust(64, b"\0"),
            replace=False,
        )
    fs.sync_directory(directory)  # the start that published it may have died before it was durable


def _copy(fs: FileSystem, source: int, files: list[str], target: Path) -> None:
    """Copy the files to a new directory, which appears under its name once all copies
    are durable.
    """
    unfinished = target.with_name(target.name + names.TMP_SUFFIX)
    make_directories(fs, unfinished)
    with opened_directory(fs, str(unfinished)) as directory:
        for name, _ in fs.entries(directory):
            fs.unlink(name, directory)  # left by an earlier start that died
        for name in files:
            with closing_at_end(fs.create(name, directory, mode=0o600), fs.close) as fd:
                fs.write(fd, read_small(fs, name, source, _LARGEST), 0)
                fs.sync(fd)
        fs.sync_directory(directory)
    os.chmod(unfinished, 0o700)
    with opened_directory(fs, str(target.parent)) as parent:
        fs.rename(unfinished.name, target.name, parent, replace=False)
        fs.sync_directory(parent)
