"""Segments on this node: create, pass, adopt, release, within the quota.

Owns the files in the tmpfs and one read-write descriptor of each. Knows nothing of snapshots beyond the content of a segment's own header.
A trainer's life is judged by the flock that it holds on each of its segments, through a descriptor of which the daemon kept no copy.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from ckptd.shared import names
from ckptd.shared.descriptor import Descriptor
from ckptd.shared.errors import Busy, IntegrityError, InvalidName, NewerFormat, NotFound, QuotaExceeded, SharedMemoryFull, StorageError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import READ, FileSystem
from ckptd.shared.numa import UNKNOWN, near
from ckptd.shared.owners import make_own_directory
from ckptd.shared.segment import SegmentHeader, read_header, this_boot, write_header

log = logging.getLogger("ckptd.slots")


@dataclass(slots=True, eq=False)
class Slot:
    """One segment and the daemon's own descriptor of it. `nbytes`: length of the file; `header`: as it was when last read."""

    name: str
    descriptor: Descriptor
    header: SegmentHeader
    nbytes: int
    pins: int = 0
    released: bool = False

    @property
    def fd(self) -> int:
        """Return the descriptor's number. Raises NotFound once the slot is released and no longer pinned."""
        if self.descriptor.closed:
            raise self.gone()
        return self.descriptor.fileno()

    @contextmanager
    def pinned(self) -> Iterator[int]:
        """Keep the descriptor open while worker threads read from it, even if the slot is released meanwhile. Raises NotFound."""
        if self.released:
            raise self.gone()
        self.pins += 1
        try:
            yield self.fd
        finally:
            self.pins -= 1
            if self.released and not self.pins:
                self.descriptor.close()

    def gone(self) -> NotFound:
        """Return the error for a slot that has been released."""
        return NotFound(f"segment {self.name} has been released: that copy in memory is lost")

    @property
    def owner(self) -> tuple[str, int, int]:
        """(job, attempt, rank)."""
        return (self.header.job, self.header.attempt, self.header.rank)

    def refresh(self) -> SegmentHeader:
        """Read the header again, since the trainer may have changed it.

        Raises NotFound if the slot has been released, IntegrityError if the header is damaged or another segment's.
        """
        header = read_header(self.fd)
        mine, its = self.header, header
        if (mine.job, mine.attempt, mine.rank, mine.capacity, mine.chunk_size) != (
            its.job,
            its.attempt,
            its.rank,
            its.capacity,
            its.chunk_size,
        ):
            raise IntegrityError(f"segment {self.name} is not the one that was made")
        self.header = header
        return header

    def __repr__(self) -> str:
        return f"<Slot {self.name[:8]} {self.header.job}.a{self.header.attempt} rank {self.header.rank} {self.header.state.name}>"


class Slots:
    """All segments of one root, in the tmpfs directory `directory`, which is made with mode 0700.

    Where another user has taken that name, a directory beside it with a random suffix is used. It is locked for one daemon of the machine:
    a daemon under another host name has another lock in the root, and would remove this one's segments.
    """

    def __init__(self, fs: FileSystem, shm_dir: Path, directory: str, quota: int) -> None:
        self._fs = fs
        self.path, self._directory = _claim_directory(fs, shm_dir / directory)
        self.quota = quota or psutil.disk_usage(str(shm_dir)).total * 9 // 10
        self.slots: dict[str, Slot] = {}  # the event loop's alone
        self.used = 0  # bytes

    def create(self, header: SegmentHeader, node: int = UNKNOWN) -> Slot:
        """A new segment near to the NUMA node, which `add` is to take up; on any thread.

        Raises QuotaExceeded or SharedMemoryFull, leaving nothing behind.
        """
        size = header.file_length
        if self.used + size > self.quota:
            raise QuotaExceeded(
                f"a slot of {_size(size)} does not fit: {_size(self.used)} of the quota of {_size(self.quota)} are taken; "
                "raise shm_quota, take fewer slots, or save less"
            )
        name = names.new_segment_file()
        failpoint("slot.creating")
        fd = self._fs.create(name, self._directory, mode=0o600)
        try:
            with near(node):
                self._fs.allocate(fd, size)
            write_header(fd, header)
            failpoint("slot.created")
        except BaseException as error:
            os.close(fd)
            self._fs.unlink(name, self._directory)
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                free = psutil.disk_usage(str(self.path)).free
                raise SharedMemoryFull(
                    f"no room for a slot of {_size(size)} in {self.path.parent}: {_size(free)} are free; "
                    "make it larger (docker: --shm-size) or set shm_dir to another tmpfs"
                ) from None
            raise StorageError.of(f"make a segment in {self.path}", error) from None
        return Slot(name, Descriptor(fd), header, size)

    def add(self, slot: Slot) -> Slot:
        self.slots[slot.name] = slot
        self.used += slot.nbytes
        return slot

    def open_again(self, slot: Slot, *, write: bool) -> int:
        """A descriptor of an open file description of its own. Raises NotFound if the name is gone or another file's, StorageError if
        something has run out."""
        if slot.descriptor.closed:
            raise slot.gone()
        try:
            fd = os.open(slot.name, READ | (os.O_RDWR if write else 0), dir_fd=self._directory)
        except OSError as problem:
            error = StorageError.of(f"open the segment {slot.name}", problem)
            if error.is_of_the_machine:
                raise error from None
            raise NotFound(f"segment {slot.name} has been removed from {self.path}: that copy in memory is lost") from None
        if os.fstat(fd).st_ino != os.fstat(slot.fd).st_ino:
            os.close(fd)
            raise NotFound(f"segment {slot.name} has been replaced in {self.path}: that copy in memory is lost")
        return fd

    def get(self, name: str) -> Slot:
        try:
            return self.slots[name]
        except KeyError:
            raise NotFound(f"there is no segment {name[:64]!r}") from None

    def of(self, job: str, attempt: int, rank: int) -> list[Slot]:
        found = [slot for slot in self.slots.values() if slot.owner == (job, attempt, rank)]
        return sorted(found, key=lambda slot: slot.header.slot)

    def release(self, slot: Slot) -> None:
        """Unlink the segment and forget the slot. A second call does nothing.

        A trainer that still maps the segment keeps its pages until it unmaps them.
        """
        if slot.released:
            return
        slot.released = True
        failpoint("slot.releasing")
        if self.slots.pop(slot.name, None) is not None:
            self.used -= slot.nbytes
        try:
            self._fs.unlink(slot.name, self._directory)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            log.warning("a directory is at the name of segment %s: left alone", slot.name)
        if not slot.pins:
            slot.descriptor.close()
        failpoint("slot.released")

    def is_held(self, slot: Slot) -> bool:
        """Whether a trainer still holds its lock."""
        try:
            fd = self.open_again(slot, write=True)
        except NotFound:
            return False
        except StorageError:
            return True  # for all that is known
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def adopt(self) -> list[Slot]:
        """Take up what an earlier daemon left; remove what is of another boot, half made or damaged. Strange names are left alone.

        Raises StorageError if one cannot be opened for something that has run out.
        """
        for name in os.listdir(self._directory):
            if not names.is_segment_file(name):
                continue
            try:
                fd = os.open(name, READ | os.O_RDWR, dir_fd=self._directory)
            except OSError as problem:
                error = StorageError.of(f"open the segment {name}", problem)
                if error.is_of_the_machine:  # what is sealed in it would be lost to those who recover
                    raise error from None
                log.warning("%s: left alone", error)
                continue
            try:
                header = read_header(fd)
                names.check_name("job", header.job)
                if header.boot_id != this_boot():
                    raise IntegrityError("it is of another boot")
                size = os.fstat(fd).st_size
                if size < header.file_length:
                    raise IntegrityError("it is cut short")
            except NewerFormat as error:
                log.warning("segment %s left alone: %s", name, error)
                os.close(fd)
                continue
            except (IntegrityError, InvalidName, OSError) as error:
                log.warning("segment %s removed: %s", name, error)
                os.close(fd)
                self._fs.unlink(name, self._directory)
                continue
            self.add(Slot(name, Descriptor(fd), header, size))
        return list(self.slots.values())

    def close(self) -> None:
        """Let go of the descriptors; the files stay for the next daemon. An empty directory goes."""
        for slot in self.slots.values():
            slot.descriptor.close()
        if not self.slots:
            try:
                os.rmdir(self.path)
            except OSError:
                pass
        self.slots.clear()
        os.close(self._directory)


def _claim_directory(fs: FileSystem, plain: Path) -> tuple[Path, int]:
    """Return the directory for segments and a descriptor that holds its lock. Raises StorageError, or Busy if another daemon holds it."""
    try:
        status = os.lstat(plain)
    except OSError:
        pass
    else:
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077:
            raise StorageError(  # not passed over: segments may be in it
                f"{plain} belongs to uid {status.st_uid} with mode {status.st_mode & 0o777:o}; it must be ours alone (0700): remove it"
            )
    while True:
        try:
            path = make_own_directory(plain)
            directory = fs.open_directory(str(path))
        except FileNotFoundError as error:
            if not plain.parent.is_dir():
                raise StorageError.of(f"make {plain}", error) from None
            continue  # the daemon before has just removed it
        except OSError as error:
            raise StorageError.of(f"make {plain}", error) from None
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(directory)
            raise Busy(
                f"another ckptd on this machine, perhaps in a container with another host name, has its memory for a root of this name in "
                f"{path}: use that one, stop it first, or set shm_dir to another tmpfs"
            ) from None
        if _is_at(path, directory):
            break
        os.close(directory)
    if path != plain:
        log.warning("another user has taken the name %s: segments go to %s", plain, path)
    return path, directory


def _is_at(path: Path, directory: int) -> bool:
    """Return False if the directory was removed, by the daemon before, between opening and locking."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(directory))
    except FileNotFoundError:
        return False


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
