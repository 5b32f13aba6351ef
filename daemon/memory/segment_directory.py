"""A directory for the segments of one root, which one daemon of the machine has locked,
and which no other user may enter.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ckptd.shared.errors import Busy, StorageError
from ckptd.shared.system import machine
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.fs import FileSystem
from ckptd.shared.system.owners import make_own_directory

log = logging.getLogger("ckptd.slots")


class SegmentDirectory:
    """A claimed directory: `path`, and the descriptor `fd` that holds its lock.

    It is made with mode 0700 if it is missing.

    If another user has taken the name, a directory beside it with a random suffix is
    used. `on_disk` is True if the directory is meant to be on a disk, and `in_memory` is
    True if it is in a tmpfs.

    Raises Busy if another daemon holds the lock, and StorageError if the directory
    cannot be made or other users may enter it.
    """

    def __init__(self, fs: FileSystem, plain: Path, *, on_disk: bool = False) -> None:
        _check_mode(plain)
        self.on_disk = on_disk
        self._fs = fs
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckptd-free")
        self._freeing: set[Future[None]] = set()
        while True:
            try:
                self.path = make_own_directory(plain)
                self.fd = fs.open_directory(str(self.path))
            except FileNotFoundError:
                if not plain.parent.is_dir():
                    raise StorageError(
                        f"there is no directory {plain.parent}: mount a tmpfs there, or set "
                        f"shm_dir to another one"
                    ) from None
                continue  # the previous daemon has just removed it
            except OSError as error:
                raise StorageError.of(f"make {plain}", error) from None
            self._lock()
            if self._is_in_place():
                break
            os.close(self.fd)
        self.in_memory = machine.file_system(self.path) == machine.TMPFS
        if self.path != plain:
            log.warning("another user has taken the name %s: segments go to %s", plain, self.path)

    def _lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.fd)
            raise Busy(
                f"another ckptd on this machine, perhaps in a container with another host name, "
                f"uses {self.path} for a root "
                "with the same path: use that daemon, stop it first, or set shm_dir to another "
                "tmpfs"
            ) from None
        except OSError as error:
            os.close(self.fd)
            raise StorageError.of(f"lock {self.path}", error) from None

    def _is_in_place(self) -> bool:
        """Return True if `path` is still the directory that was opened: the previous
        daemon may have removed it before it was locked.
        """
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def free(self, descriptor: Descriptor, punched: int = 0) -> None:
        """Close the descriptor of a segment that is unlinked.

        The system then frees the memory of the segment, which takes seconds for tens of
        gigabytes. So a thread closes the last descriptor.

        punched: the number of bytes from the start that are freed even if another
        process has the segment open, and then reads zeros there.
        """
        try:
            last = Descriptor(os.dup(descriptor.fileno()))
        except OSError:  # this process has no descriptor left
            descriptor.close()
            return
        descriptor.close()
        task = self._pool.submit(self._free, last, punched)
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    def _free(self, last: Descriptor, punched: int) -> None:
        try:
            if punched:
                self._fs.punch(last.fileno(), punched)
        except OSError as error:  # the readers then keep the memory until they close it
            log.warning("the memory of a segment that was lent is not freed yet: %s", error)
        finally:
            last.close()

    @property
    def freeing(self) -> list[Future[None]]:
        """The segments whose memory is being freed. Any thread may wait for them."""
        return list(self._freeing)

    def close(self) -> None:
        """Give up the directory, and remove it if it is empty.

        The memory of freed segments is free afterwards.
        """
        self._pool.shutdown()
        try:
            os.rmdir(self.path)
        except OSError:
            pass
        os.close(self.fd)


def _check_mode(plain: Path) -> None:
    """Raise StorageError if the directory exists and other users may enter it.

    No other directory is then used instead.

    This one may hold segments.
    """
    try:
        status = os.lstat(plain)
    except OSError:
        return
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077:
        raise StorageError(
            f"{plain} belongs to uid {status.st_uid} with mode {status.st_mode & 0o777:o}; "
            "expected mode 700, so that no other user can enter it: remove it"
        )
