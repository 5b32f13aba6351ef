"""Sources and sinks on single files and directories, for tests that have no root."""

from __future__ import annotations

from pathlib import Path

from ckptd.shared.names import parse_part_file
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.posix_streams import PosixSource
from ckptd.shared.system.fs import FileSystem, PosixFileSystem
from ckptd.shared.system.storage_seam import Creator


def part_in(directory: Path) -> Path:
    """Return the part file of a checkpoint of one rank.

    There may be data files beside it, new ones or linked ones.
    """
    [found] = [path for path in directory.iterdir() if parse_part_file(path.name)]
    return found


def source(fd: int) -> PosixSource:
    """Return an open file as a source. Closing the source closes the descriptor."""
    return PosixSource(PosixFileSystem(), fd)


def files_in(directory: Path, fs: FileSystem | None = None) -> Creator:
    """Return the way in which `PartWriter` creates files in a directory."""
    return Creator(PosixStorage(directory, fs).create, PosixStorage.head_last)
