"""Segments in /dev/shm as a daemon makes them for a rank, without a daemon."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptd.shared.descriptor import Descriptor
from ckptd.shared.plan import MIN_CHUNK
from ckptd.shared.segment import SegmentHeader, write_header


class Tmpfs:
    """A directory in /dev/shm."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self, name: str, capacity: int, *, job: str = "gpt", attempt: int = 1) -> tuple[Descriptor, Descriptor]:
        """Make a free segment. Returns its two descriptors: one to map, and one to hold the trainer's lock on."""
        header = SegmentHeader(job=job, attempt=attempt, rank=0, world_size=1, slot=0, capacity=capacity, chunk_size=MIN_CHUNK)
        path = self.directory / name
        data = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.posix_fallocate(data.fileno(), 0, header.file_length)
        write_header(data.fileno(), header)
        return data, self.opened(name)

    def opened(self, name: str) -> Descriptor:
        return Descriptor(os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC))


@contextmanager
def tmpfs() -> Iterator[Tmpfs]:
    directory = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    try:
        yield Tmpfs(directory)
    finally:
        shutil.rmtree(directory)
