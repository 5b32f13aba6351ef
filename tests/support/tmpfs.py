"""Segments in /dev/shm as a daemon makes them for a rank, without a daemon."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crc32c import crc32c

from ckptd.shared.formats.plan import MIN_CHUNK, Plan, chunk_ranges, with_values
from ckptd.shared.formats.segment import SegmentHeader, read_header, write_check, write_header
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.system.descriptor import Descriptor
from tests.shared.samples import packed_slot, seal, values_after


class Tmpfs:
    """A directory in /dev/shm."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(
        self, name: str, capacity: int, *, job: str = "gpt", attempt: int = 1
    ) -> tuple[Descriptor, Descriptor]:
        """Make a free segment.

        Returns its two descriptors: one to map, and one to hold the trainer's lock on.
        """
        header = SegmentHeader(
            job=job,
            attempt=attempt,
            rank=0,
            world_size=1,
            slot=0,
            capacity=capacity,
            chunk_size=MIN_CHUNK,
        )
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


@contextmanager
def sealed_slot(plan: Plan, request: SnapshotRequest) -> Iterator[Descriptor]:
    """Context manager.

    Yields a slot with step 5 of attempt 1, sealed by its trainer and checked as the
    daemon does.
    """
    with tmpfs() as shm:
        data, lock = shm.make("a.seg", 1 << 20)
        lock.close()
        seal_with_checks(data.fileno(), plan, request)
        yield data
        data.close()


def seal_with_checks(
    fd: int, plan: Plan, request: SnapshotRequest, *, step: int = 5
) -> SegmentHeader:
    """Seal a slot as its trainer does, and write the checksums as the daemon does."""
    sealed, values = seal(fd, read_header(fd), plan, step=step, request=request), values_after(plan)
    packed = packed_slot(plan, values)
    ranges = chunk_ranges(with_values(plan.regions, values), sealed.chunk_size)
    write_check(
        fd,
        sealed,
        [crc32c(bytes(packed[chunk.offset : chunk.offset + chunk.length])) for chunk in ranges],
    )
    return sealed
