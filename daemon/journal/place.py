"""Opens the directory of a daemon's journal on the local disk, and moves there a
journal that an earlier version kept in the root.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptd.shared import names
from ckptd.shared.errors import Busy, StorageError, storage_errors
from ckptd.shared.location import Location
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.fs import FileSystem, make_directories, sync_parents
from ckptd.shared.system.owners import stranger

_REMEDY = "set state_dir (--state-dir, CKPTD_STATE_DIR) to a directory of your own on a local disk"


@contextmanager
def journal_directory(
    fs: FileSystem,
    state_dir: Path,
    root: Location,
    repository: Repository,
    known: str | None = None,
) -> Iterator[int]:
    """Context manager.

    Yield an open descriptor of the directory for the root's journal, locked for this
    process.

    The name of the directory ends in the identity of the root, so that another root
    that is mounted at the same path has another journal. known: the identity of a root
    behind a stage, which may not answer now. Otherwise the root must answer.

    Raises StorageError if the directory cannot be made, or belongs to another user;
    Busy if another daemon uses it.
    """
    place = machine.state_directory(state_dir, root)
    with storage_errors(f"use {repository.where()} as the root for checkpoints"):
        identity = known or repository.identity()
    path = place / f"{names.JOURNAL}-{identity}"
    try:
        _make(fs, place)
        if known is None:
            repository.storage.take_journal(machine.host(), path)
        _make(fs, path)
        sync_parents(fs, path)
        directory = fs.open_directory(str(path))
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        _lock(directory, path)
        yield directory
    finally:
        fs.close(directory)


def _make(fs: FileSystem, path: Path) -> None:
    """Make a directory for this user alone, durably.

    Raises StorageError if another user owns it, OSError.
    """
    make_directories(fs, path)
    if reason := stranger(path):
        raise StorageError(f"{reason}, who could replace the journal: {_REMEDY}")
    if os.stat(path).st_uid == os.geteuid():
        path.chmod(0o700)


def _unusable(path: Path, error: OSError) -> StorageError:
    failure = StorageError.of(f"keep the journal in {path}", error)
    return StorageError(f"{failure}: {_REMEDY}", failure.errno)


def _lock(directory: int, path: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(
            f"another ckptd uses the journal in {path}: stop it, or set state_dir to another "
            f"directory"
        ) from None
    except OSError as error:
        raise _unusable(path, error) from None
