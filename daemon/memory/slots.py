"""The segments of this node: creates, opens, adopts and releases them in shared memory,
within the quota.

This module owns the files in the tmpfs and one read-write descriptor of each. It knows
nothing of snapshots beyond the header of each segment. A trainer counts as alive while
it holds its flock on a segment, through a descriptor that the daemon has passed on
and keeps no copy of.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from ckptd.daemon.memory.segment_directory import SegmentDirectory
from ckptd.shared import names
from ckptd.shared.errors import (
    IntegrityError,
    InvalidName,
    NewerFormat,
    NotFound,
    OutOfInodes,
    QuotaExceeded,
    SharedMemoryFull,
    StorageError,
    storage_errors,
)
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.segment import (
    RootMark,
    SegmentHeader,
    SlotState,
    read_header,
    read_root_mark,
    this_boot,
    write_header,
    write_root_mark,
)
from ckptd.shared.system import huge_pages, memory_limit
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.fs import READ, FileSystem
from ckptd.shared.system.memory_limit import MemoryLimit
from ckptd.shared.system.numa import UNKNOWN, near
from ckptd.shared.units import size_text

log = logging.getLogger("ckptd.slots")


@dataclass(slots=True, eq=False)
class Slot:
    """A segment, and the daemon's own descriptor of its file.

    `directory` is where the file lies. `header` is the header as it was last read, and
    `nbytes` the length of the file. `pins` is the number of readers that keep the
    descriptor open. `released` is True after `Slots.release`. `outgrown` is True once
    the rank has a larger slot instead; the segment is then unlinked as soon as no step
    is in it. `lent` is True once a reader may have the segment open: its memory is then
    freed at the release, also if a process has it open.
    """

    name: str
    directory: SegmentDirectory
    descriptor: Descriptor
    header: SegmentHeader
    nbytes: int
    pins: int = 0
    released: bool = False
    outgrown: bool = False
    lent: bool = False

    @property
    def fd(self) -> int:
        """The number of the descriptor.

        Raises NotFound once the slot is released and no longer pinned.
        """
        if self.descriptor.closed:
            raise self.gone()
        return self.descriptor.fileno()

    @contextmanager
    def pinned(self) -> Iterator[int]:
        """Context manager.

        While it is held, the descriptor stays open for worker threads, even if the slot
        is released meanwhile.

        Yields the number of the descriptor. Raises NotFound if the slot has been
        released already.
        """
        if self.released:
            raise self.gone()
        self.pins += 1
        try:
            yield self.fd
        finally:
            self.pins -= 1
            if self.released and not self.pins:
                self.free()

    def free(self) -> None:
        """Close the descriptor of a segment that is unlinked, and free its memory."""
        self.directory.free(self.descriptor, self.nbytes if self.lent else 0)

    def gone(self) -> NotFound:
        """Return the error for a slot that has been released."""
        return NotFound(f"segment {self.name} has been released: that copy in memory is lost")

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Context manager.

        The same as `pinned`, for reads: an OSError becomes a StorageError that names
        the segment.
        """
        with self.pinned() as fd:
            try:
                yield fd
            except OSError as error:
                raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> StorageError:
        return StorageError.of(
            f"read the segment {self.name} of job {self.header.job} in {self.directory.path}", error
        )

    @property
    def owner(self) -> tuple[str, int, int]:
        """The rank that owns the slot, as (job, attempt, rank)."""
        return (self.header.job, self.header.attempt, self.header.rank)

    def refresh(self) -> SegmentHeader:
        """Read the header again, because the trainer may have changed it.

        Return the new header.

        Raises NotFound as `fd` does, IntegrityError if the header is damaged or belongs
        to another segment, and StorageError if it cannot be read now.
        """
        try:
            header = read_header(self.fd)
        except OSError as error:
            raise self._unreadable(error) from None
        mine, its = self.header, header
        if (mine.job, mine.attempt, mine.rank, mine.capacity, mine.chunk_size) != (
            its.job,
            its.attempt,
            its.rank,
            its.capacity,
            its.chunk_size,
        ):
            raise IntegrityError(
                f"segment {self.name} does not have the header that it was made with"
            )
        self.header = header
        return header

    def __repr__(self) -> str:
        return (
            f"<Slot {self.name[:8]} {self.header.job}.a{self.header.attempt} rank "
            f"{self.header.rank} {self.header.state.name}>"
        )


@dataclass(frozen=True, slots=True, eq=False)
class ForeignSlot:
    """A slot whose segment was made for another root than the one that is served, and
    the mark of that root.
    """

    slot: Slot
    mark: RootMark


class Slots:
    """All segments of one root.

    Their files lie in one directory of the tmpfs `shm_dir`, which is locked for one
    daemon of the machine.

    The lock in the root is not enough: a daemon under another host name has another
    lock there, and would remove the segments of this daemon. A segment that does not
    fit into the tmpfs, or into the memory limit of this process's control group, may go
    to the directory `overflow` on the local disk, if that is given.

    `path` is the directory in the tmpfs, and `slots` maps the name of each segment to
    its slot. `used`, `on_disk` and `quota` are in bytes: of the segments in the tmpfs,
    of those on the disk, and of all together. An argument `quota` of 0 stands for nine
    tenths of the tmpfs, and then only the tmpfs counts.

    `mark` names the root, and is written into each new segment; None for segments of no
    root in particular. `foreign` maps the name of each segment that was made for
    another root to its slot. Such a segment is counted in `used`, and is neither in
    `slots` nor ever changed before `admit` or `drop`.
    """

    def __init__(
        self,
        fs: FileSystem,
        shm_dir: Path,
        directory: str,
        quota: int,
        overflow: Path | None = None,
        system: Path = Path("/"),
    ) -> None:
        """Raises Busy, StorageError.

        If there is no tmpfs, all segments go to `overflow`. system: the root directory
        of the machine, below which the limits of control groups are read.
        """
        self._fs, self._overflow = fs, overflow
        self._system = system
        # The limit of memory that the last segment did not fit into, or None if that was
        # the tmpfs or the quota.
        self._limit: MemoryLimit | None = None
        self._disk = (
            SegmentDirectory(fs, overflow, on_disk=True)
            if overflow is not None and overflow.exists()
            else None
        )
        try:
            self._memory = SegmentDirectory(fs, shm_dir / directory)
        except StorageError as error:
            if overflow is None:
                raise
            log.warning("%s", error)
            self._memory = self._disk or self._open_disk(shm_dir)
        self._limited = quota > 0
        self.quota = quota or psutil.disk_usage(str(self._memory.path)).total * 9 // 10
        self.mark: RootMark | None = None
        self.slots: dict[str, Slot] = {}  # used on the event loop only
        self.foreign: dict[str, ForeignSlot] = {}
        self._marked: set[str] = set()  # the adopted segments of this root that have a mark
        self.used = self.on_disk = 0  # bytes

    @property
    def path(self) -> Path:
        return self._memory.path

    @property
    def disk_directory(self) -> str | None:
        """The directory of the segments on the disk, or None if there are none."""
        return str(self._disk.path) if self._disk is not None else None

    def remark(self, slots: Sequence[Slot]) -> str:
        """Return a sentence for the owner of new slots that are on the disk, or "" if
        none of them is.
        """
        if not any(slot.directory.on_disk for slot in slots):
            return ""
        if self._memory.on_disk:
            return (
                f"there is no shared memory that can be used, so the slots are files in "
                f"{self._overflow}, which are slower: set shm_dir"
            )
        remedy = "make the tmpfs larger (docker: --shm-size), or set shm_dir to another one"
        if self._limit is not None:
            remedy = "raise the limit (docker: --memory)"
        return (
            f"the slots do not fit into {self._short(self.path.parent)}, and are files in "
            f"{self._overflow} now, which are slower: {remedy}"
        )

    def _short(self, tmpfs: Path) -> str:
        """Name the limit or the tmpfs that the last segment did not fit into."""
        if self._limit is None:
            return str(tmpfs)
        return f"the memory limit of {size_text(self._limit.limit)} of {self._limit.group}"

    def _check_limit(self, size: int, directory: SegmentDirectory) -> None:
        """Raise SharedMemoryFull if the kernel might kill a process of this control
        group once it has `size` more bytes.
        """
        limit = memory_limit.tightest(self._system)
        if limit is not None and size > limit.free:
            self._limit = limit
            raise self._full(size, directory)

    def may_overflow(self, error: QuotaExceeded | SharedMemoryFull) -> bool:
        """Return True if the segment that has met this error may go to the disk
        instead. A quota that was set is never exceeded.
        """
        return self._overflow is not None and (
            isinstance(error, SharedMemoryFull) or not self._limited
        )

    def _check_quota(self, size: int, taken: int) -> None:
        """Raise QuotaExceeded if `size` more bytes do not fit into the quota beside the
        bytes already `taken`.
        """
        if taken + size > self.quota:
            raise QuotaExceeded(
                f"a slot of {size_text(size)} does not fit: {size_text(taken)} of the quota of "
                f"{size_text(self.quota)} are taken; "
                "raise shm_quota, take fewer slots, or save less"
            )

    def _count(self, slot: Slot, sign: int) -> None:
        if slot.directory.on_disk:
            self.on_disk += sign * slot.nbytes
        else:
            self.used += sign * slot.nbytes

    def create_on_disk(self, header: SegmentHeader) -> Slot:
        """Make a new segment on the local disk, and return its slot.

        Any thread may call this; the caller then calls `add`.

        Raises QuotaExceeded, SharedMemoryFull or StorageError. After an error no file
        is left.
        """
        assert self._overflow is not None
        if self._limited:
            self._check_quota(self._length(header), self.used + self.on_disk)
        return self._create(header, UNKNOWN, self._disk or self._open_disk(self.path.parent))

    def _open_disk(self, tmpfs: Path) -> SegmentDirectory:
        """Open the directory for segments on the disk, which is made if it is missing.

        Raises Busy, StorageError.
        """
        assert self._overflow is not None
        if self._disk is None:
            with storage_errors(f"make {self._overflow.parent}"):
                self._overflow.parent.mkdir(parents=True, exist_ok=True)
            self._disk = SegmentDirectory(self._fs, self._overflow, on_disk=True)
            log.warning(
                "slots that do not fit into %s go to files in %s, which are slower",
                self._short(tmpfs),
                self._overflow,
            )
        return self._disk

    def move_in(self, directory: int, name: str, *, on_disk: bool = False) -> None:
        """Move a segment here from the directory of a former path of this root, before
        `adopt`. Raises OSError, StorageError, Busy.
        """
        here = (self._disk or self._open_disk(self.path.parent)) if on_disk else self._memory
        os.rename(name, name, src_dir_fd=directory, dst_dir_fd=here.fd)

    def create(self, header: SegmentHeader, node: int = UNKNOWN) -> Slot:
        """Make a new segment near to the NUMA node `node`, and return its slot.

        Any thread may call this; the caller then calls `add`.

        Raises QuotaExceeded, SharedMemoryFull or StorageError, or OSError if the file
        cannot be made. After an error no file is left.
        """
        self._limit = None
        self._check_quota(self._length(header), self.used + (self.on_disk if self._limited else 0))
        return self._create(header, node, self._memory)

    def _create(self, header: SegmentHeader, node: int, directory: SegmentDirectory) -> Slot:
        freeing = directory.freeing
        try:
            return self._create_once(header, node, directory)
        except SharedMemoryFull:
            if not freeing:
                raise
        wait(freeing)
        return self._create_once(header, node, directory)

    def _create_once(self, header: SegmentHeader, node: int, directory: SegmentDirectory) -> Slot:
        size, name = self._length(header), names.new_segment_file()
        if directory.in_memory:
            self._check_limit(size, directory)
        failpoint("slot.creating")
        try:
            fd = self._fs.create(name, directory.fd, mode=0o600)
        except OSError as error:
            raise self._failure(error, size, directory) from None
        try:
            with near(node):
                if directory.in_memory:
                    huge_pages.take(fd, size)
                self._fs.allocate(fd, size)
            if self.mark is not None:
                # The mark is written before the header, so that a segment with a valid
                # header has its mark.
                write_root_mark(fd, header, self.mark)
            write_header(fd, header)
            failpoint("slot.created")
        except BaseException as error:
            os.close(fd)
            self._fs.unlink(name, directory.fd)
            if not isinstance(error, OSError):
                raise
            raise self._failure(error, size, directory) from None
        return Slot(name, directory, Descriptor(fd), header, size)

    def _length(self, header: SegmentHeader) -> int:
        return header.file_length + (0 if self.mark is None else ALIGN)

    def _failure(
        self, error: OSError, size: int, directory: SegmentDirectory
    ) -> SharedMemoryFull | StorageError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            return StorageError.of(f"make a segment in {directory.path}", error)
        if isinstance(error, OutOfInodes):
            return SharedMemoryFull(
                f"no inodes are left in {directory.path} for a slot, however much space is free; "
                "delete files there, or mount it with more (nr_inodes=)"
            )
        return self._full(size, directory)

    def _full(self, size: int, directory: SegmentDirectory) -> SharedMemoryFull:
        free = [
            size_text(psutil.disk_usage(str(each.path)).free) for each in (self._memory, directory)
        ]
        also = f", and {free[1]} in {directory.path} on the disk" if directory.on_disk else ""
        if (limit := self._limit) is not None:
            return SharedMemoryFull(
                f"no room for a slot of {size_text(size)} in {self._short(self.path)}: "
                f"{size_text(limit.used)} are used, so that new slots may take "
                f"{size_text(limit.free)}{also}; raise the limit (docker: --memory), or save less"
            )
        return SharedMemoryFull(
            f"no room for a slot of {size_text(size)} in {self.path.parent}: {free[0]} are "
            f"free{also}; "
            "make it larger (docker: --shm-size) or set shm_dir to another tmpfs"
        )

    def add(self, slot: Slot) -> Slot:
        """Register a slot, count its bytes as used, and return it."""
        self.slots[slot.name] = slot
        self._count(slot, 1)
        return slot

    def open_again(self, slot: Slot, *, write: bool) -> int:
        """Open the segment again, as a new open file description, and return the
        descriptor. The caller must close it.

        Raises NotFound if the slot is released, or if its file has been removed or
        replaced. Raises StorageError if a resource of the machine, such as descriptors,
        has run out.
        """
        if slot.descriptor.closed:
            raise slot.gone()
        try:
            fd = os.open(slot.name, READ | (os.O_RDWR if write else 0), dir_fd=slot.directory.fd)
        except OSError as problem:
            error = StorageError.of(f"open the segment {slot.name}", problem)
            if error.is_no_damage:
                raise error from None
            raise NotFound(
                f"segment {slot.name} has been removed from {slot.directory.path}: that copy in "
                f"memory is lost"
            ) from None
        if os.fstat(fd).st_ino != os.fstat(slot.fd).st_ino:
            os.close(fd)
            raise NotFound(
                f"segment {slot.name} has been replaced in {slot.directory.path}: that copy in "
                f"memory is lost"
            )
        return fd

    def get(self, name: str) -> Slot:
        """Return the slot of the segment `name`. Raises NotFound if there is none."""
        try:
            return self.slots[name]
        except KeyError:
            raise NotFound(f"there is no segment {name[:64]!r}") from None

    def of(self, job: str, attempt: int, rank: int) -> list[Slot]:
        """Return the slots of one rank, in the order of their numbers."""
        found = [slot for slot in self.slots.values() if slot.owner == (job, attempt, rank)]
        return sorted(found, key=lambda slot: slot.header.slot)

    def release(self, slot: Slot) -> None:
        """Unlink the segment and forget the slot. A second call does nothing.

        A trainer that still maps the segment keeps its pages until it unmaps them. A
        reader does not: it may hang for as long as it likes, and nobody counts pages
        that it would keep.
        """
        if slot.released:
            return
        slot.released = True
        failpoint("slot.releasing")
        if self.slots.pop(slot.name, None) is not None:
            self._count(slot, -1)
        try:
            self._fs.unlink(slot.name, slot.directory.fd)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            log.warning("a directory has the name of segment %s: it is left alone", slot.name)
        if not slot.pins:
            slot.free()
        failpoint("slot.released")

    def is_held(self, slot: Slot) -> bool:
        """Return True if a trainer still holds its lock on the segment, or if the lock
        cannot be tested because a resource has run out.

        Return False if the file has been removed or replaced.
        """
        try:
            fd = self.open_again(slot, write=True)
        except NotFound:
            return False
        except StorageError:
            return True  # the lock cannot be tested, so the trainer counts as alive
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def adopt(self) -> list[Slot]:
        """Register the segments that an earlier daemon has left, and return those of
        this root.

        Segments that are incomplete, damaged or from another boot are removed, and those
        that say sealed and name no step. Other files, segments of a newer ckptd and
        segments that cannot be opened or read are left alone. A segment that was made for
        another root than `mark` names goes to `foreign`; one in which nothing is sealed
        and that no trainer holds is removed. Raises StorageError if a segment cannot be
        opened because a resource has run out.
        """
        for directory in self._directories():
            self._adopt(directory)
        return list(self.slots.values())

    def _directories(self) -> list[SegmentDirectory]:
        if self._disk is None or self._disk is self._memory:
            return [self._memory]
        return [self._memory, self._disk]

    def _adopt(self, directory: SegmentDirectory) -> None:
        for name in os.listdir(directory.fd):
            if not names.is_segment_file(name):
                continue
            try:
                fd = os.open(name, READ | os.O_RDWR, dir_fd=directory.fd)
            except OSError as problem:
                error = StorageError.of(f"open the segment {name}", problem)
                if error.is_no_damage:  # a recovery would not find a snapshot that is sealed in it
                    raise error from None
                log.warning("%s: left alone", error)
                continue
            try:
                header = read_header(fd)
                names.check_name("job", header.job)
                if header.boot_id != this_boot():
                    raise IntegrityError("it was made before this machine's last boot")
                if header.state is SlotState.SEALED and header.step is None:
                    raise IntegrityError("its header says sealed, and names no step")
                size = os.fstat(fd).st_size
                if size < header.file_length:
                    raise IntegrityError("it is cut short")
                mark = _root_mark(fd, name, header)
            except NewerFormat as error:
                log.warning("segment %s left alone: %s", name, error)
                os.close(fd)
                continue
            except OSError as error:  # of a disk, which may pass: a snapshot may be sealed in it
                log.error(
                    "segment %s left alone: %s; a snapshot may be in it, so restart this daemon "
                    "once it can be read",
                    name,
                    error,
                )
                os.close(fd)
                continue
            except (IntegrityError, InvalidName) as error:
                log.warning("segment %s removed: %s", name, error)
                os.close(fd)
                self._fs.unlink(name, directory.fd)
                continue
            # An earlier daemon may have lent it.
            slot = Slot(name, directory, Descriptor(fd), header, size, lent=True)
            if mark is None or self.mark is None or mark.identity == self.mark.identity:
                self.add(slot)
                if mark is not None:
                    self._marked.add(name)
                continue
            self.foreign[name] = ForeignSlot(slot, mark)
            self._count(slot, 1)
            if header.state is not SlotState.SEALED and not self.is_held(slot):
                self.drop(slot)

    def admit(self, slots: Sequence[Slot]) -> list[Slot]:
        """Turn foreign slots into slots of this root, and return them.

        Later daemons take them for their own. Raises OSError. All of these slots are
        then still foreign in this daemon, and the call may be repeated.
        """
        if self.mark is not None:
            for slot in slots:
                write_root_mark(slot.fd, slot.header, self.mark)
        for slot in slots:
            del self.foreign[slot.name]
            self.slots[slot.name] = slot
        return list(slots)

    def set_aside_half_admitted(self) -> None:
        """Make the slots of an attempt foreign again if the attempt has foreign slots,
        too.

        An earlier daemon has then died while it admitted the slots of that attempt. No
        attempt has slots of both kinds otherwise, because no run of a job with foreign
        slots begins.
        """
        marks = {
            (each.slot.header.job, each.slot.header.attempt): each.mark
            for each in self.foreign.values()
        }
        for slot in list(self.slots.values()):
            if (
                slot.name in self._marked
                and (mark := marks.get((slot.header.job, slot.header.attempt))) is not None
            ):
                self.foreign[slot.name] = ForeignSlot(self.slots.pop(slot.name), mark)

    def drop(self, slot: Slot) -> None:
        """Delete a foreign slot, with the snapshot that is sealed in it."""
        del self.foreign[slot.name]
        self.slots[slot.name] = slot
        self.release(slot)

    def close(self) -> None:
        """Close the descriptors.

        The files stay for the next daemon; the directories are removed if they are
        empty.
        """
        for slot in [*self.slots.values(), *(each.slot for each in self.foreign.values())]:
            slot.descriptor.close()
        for directory in self._directories():
            directory.close()
        self.slots.clear()
        self.foreign.clear()


def _root_mark(fd: int, name: str, header: SegmentHeader) -> RootMark | None:
    """Return the root mark of a segment, or None if it has none or a damaged one.

    Raises NewerFormat, OSError.
    """
    try:
        return read_root_mark(fd, header)
    except NewerFormat:
        raise
    except IntegrityError as error:
        log.warning("segment %s counts as one of this root: %s", name, error)
        return None
