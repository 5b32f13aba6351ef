"""The seam to the operating system: every file system call that durability depends on,
and every read and listing of a root.

Paths are single names relative to an open directory, and links are never followed. A
test puts its own `FileSystem` here, to lose what was not synced, or to let a call fail.
Calls raise OSError; the callers translate it, once.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from ckptd.shared.errors import IntegrityError, OutOfInodes
from ckptd.shared.names import TMP_SUFFIX
from ckptd.shared.system.failpoints import failpoint

Buffer = bytes | bytearray | memoryview | mmap.mmap


def page_aligned(data: bytes) -> mmap.mmap:
    """Return a copy of `data` in page-aligned memory, which O_DIRECT needs.

    `data` must not be empty.
    """
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    return buffer


_RENAME_NOREPLACE = 1  # linux/fs.h
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening a file that other users may have made: no link is followed, and a
FIFO does not block.
"""


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers that mean that no blocks, no inodes or no quota are left."""


class FileSystem(Protocol):
    """The calls of a POSIX file system that ckptd needs.

    `directory` is an open descriptor of a directory.
    """

    def open_directory(self, name: str, directory: int | None = None) -> int: ...
    def entries(self, directory: int) -> list[tuple[str, bool]]: ...
    def stat(self, name: str, directory: int) -> os.stat_result: ...
    def make_directory(self, name: str, directory: int) -> bool: ...
    def open(self, name: str, directory: int, *, write: bool = False) -> int: ...
    def size(self, fd: int) -> int: ...
    def read(self, fd: int, buffer: memoryview, offset: int) -> int: ...
    def create(
        self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666
    ) -> int: ...
    def allocate(self, fd: int, length: int) -> None: ...
    def write(self, fd: int, data: Buffer, offset: int) -> None: ...
    def truncate(self, fd: int, length: int) -> None: ...
    def punch(self, fd: int, length: int) -> None: ...
    def sync(self, fd: int) -> None: ...
    def sync_data(self, fd: int) -> None: ...
    def sync_directory(self, directory: int) -> None: ...
    def close(self, fd: int) -> None: ...
    def rename(self, old: str, new: str, directory: int, *, replace: bool) -> None: ...
    def link(self, old: str, old_directory: int, new: str, directory: int) -> None: ...
    def unlink(self, name: str, directory: int) -> None: ...
    def remove_directory(self, name: str, directory: int) -> None: ...


class PosixFileSystem:
    """The file system of the operating system."""

    def open_directory(self, name: str, directory: int | None = None) -> int:
        return os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory
        )

    def entries(self, directory: int) -> list[tuple[str, bool]]:
        """Return the names in a directory, sorted, each with True if it is a directory
        and not a link.
        """
        with os.scandir(directory) as entries:
            return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)

    def stat(self, name: str, directory: int) -> os.stat_result:
        """Return the status of a file, or of the link itself if the name is a link."""
        return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def make_directory(self, name: str, directory: int) -> bool:
        """Make a directory. Return False if it exists. The caller syncs `directory`."""
        try:
            os.mkdir(name, dir_fd=directory)
        except FileExistsError:
            return False
        except OSError as error:
            raise _explained(error, directory) from None
        return True

    def open(self, name: str, directory: int, *, write: bool = False) -> int:
        """Open a file that another user may have made, for reading or for both.

        A FIFO does not block.

        Raises IntegrityError if it is not a regular file.
        """
        fd = os.open(name, (os.O_RDWR if write else 0) | READ, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise IntegrityError(f"{name} is not a regular file")
        return fd

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`.

        Return the number of bytes read, which is smaller than the buffer only at the
        end of the file.
        """
        return read_exactly(fd, buffer, offset)

    def create(self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666) -> int:
        """Create a file and open it for reading and writing.

        O_DIRECT is used if `direct` is True and the file system supports it. Raises
        OSError if the file cannot be created or if its name exists already.
        """
        try:
            return self._create(name, directory, direct, mode)
        except OSError as error:
            raise _explained(error, directory) from None

    def _create(self, name: str, directory: int, direct: bool, mode: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        if direct:
            try:
                return os.open(name, flags | os.O_DIRECT, mode, dir_fd=directory)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # A file system without O_DIRECT may have created the file before it
                # refused.
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
        return os.open(name, flags, mode, dir_fd=directory)

    def allocate(self, fd: int, length: int) -> None:
        os.posix_fallocate(fd, 0, length)

    def write(self, fd: int, data: Buffer, offset: int) -> None:
        """Write all of `data`, or raise OSError."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            if written == 0:
                raise OSError(errno.EIO, "the kernel wrote nothing")
            view = view[written:]
            offset += written

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def punch(self, fd: int, length: int) -> None:
        """Free the first `length` bytes of a file, which keeps its length and has zeros
        there. Unlike after a truncation, a process that maps the file is not ended by
        SIGBUS.
        """
        if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, 0, length):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_data(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, directory: int) -> None:
        try:
            os.fsync(directory)
        except OSError as error:
            # EINVAL: a file system that has no such sync and needs none
            if error.errno != errno.EINVAL:
                raise

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: str, new: str, directory: int, *, replace: bool) -> None:
        """Rename a file within a directory.

        Raises FileExistsError if `new` exists and `replace` is False.
        """
        if replace:
            os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)
            return
        result = _renameat2(
            directory, os.fsencode(old), directory, os.fsencode(new), _RENAME_NOREPLACE
        )
        if result == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), new)
        os.link(old, new, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        os.unlink(old, dir_fd=directory)

    def link(self, old: str, old_directory: int, new: str, directory: int) -> None:
        """Give a file a second name. Raises FileExistsError if `new` is there."""
        os.link(old, new, src_dir_fd=old_directory, dst_dir_fd=directory, follow_symlinks=False)

    def unlink(self, name: str, directory: int) -> None:
        os.unlink(name, dir_fd=directory)

    def remove_directory(self, name: str, directory: int) -> None:
        os.rmdir(name, dir_fd=directory)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def _explained(error: OSError, directory: int) -> OSError:
    """Return OutOfInodes if the creation of a file has failed for want of an inode, and
    otherwise the error itself.
    """
    if error.errno != errno.ENOSPC:
        return error
    space = os.fstatvfs(directory)
    if space.f_files and not space.f_favail:
        return OutOfInodes(errno.ENOSPC, "no inodes are left", error.filename)
    return error


def _renameat2(*arguments: int | bytes) -> int:
    try:
        return int(_libc.renameat2(*arguments))
    except AttributeError:  # the libc is older than glibc 2.28
        ctypes.set_errno(errno.ENOSYS)
        return -1


@contextmanager
def closing_at_end(fd: int, close: Callable[[int], None] = os.close) -> Iterator[int]:
    """Context manager. Yield an open file descriptor, and close it at the end."""
    try:
        yield fd
    finally:
        close(fd)


def opened_directory(
    fs: FileSystem, name: str, directory: int | None = None
) -> AbstractContextManager[int]:
    return closing_at_end(fs.open_directory(name, directory), fs.close)


def make_directories(fs: FileSystem, path: Path) -> None:
    """Make the directory `path` and its missing parents durably. Raises OSError.

    An empty directory that exists is synced again, because its maker may have died
    before it was durable.
    """
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for made in reversed(missing):
        if made.is_dir() and os.listdir(made):
            continue
        try:
            with opened_directory(fs, str(made.parent.resolve())) as parent:
                fs.make_directory(made.name, parent)
                fs.sync_directory(parent)
        except PermissionError:
            if not made.is_dir():
                raise


def sync_parents(fs: FileSystem, path: Path) -> None:
    """Make the names of `path` and of all its parents durable.

    A process that made one of them may have died before it was.

    Parents that this user may not open are left out: this user has made none of their
    entries. Raises OSError.
    """
    for parent in path.resolve().parents:
        with suppress(PermissionError), opened_directory(fs, str(parent)) as directory:
            fs.sync_directory(directory)


def publish(
    fs: FileSystem,
    name: str,
    directory: int,
    data: bytes,
    *,
    replace: bool,
    points: str | None = None,
    by: str = "",
    durable: bool = True,
) -> None:
    """Make `data` appear whole and durable under `name`: write a temporary file, fsync
    it, rename it, fsync the directory.

    Without `durable`, nothing is synced: the file may be lost or damaged if the machine
    loses its power.

    A temporary file that a dead process has left is removed first. If several processes
    may publish one name at once, `by` keeps their temporary files apart. `points` is
    the prefix of the failpoints to pass. Raises FileExistsError if the name is taken
    and `replace` is False, else OSError.
    """
    temporary = f"{name}.{by}{TMP_SUFFIX}" if by else name + TMP_SUFFIX
    with suppress(FileNotFoundError):
        fs.unlink(temporary, directory)
    fd = fs.create(temporary, directory)
    try:
        with closing_at_end(fd, fs.close):
            if points and failpoint(f"{points}.written"):
                fs.write(fd, data[: len(data) // 2], 0)
                raise OSError(errno.EIO, "short write")
            fs.write(fd, data, 0)
            if durable:
                fs.sync(fd)
        if points:
            failpoint(f"{points}.synced")
        fs.rename(temporary, name, directory, replace=replace)
    except BaseException:
        with suppress(OSError):
            fs.unlink(temporary, directory)
        raise
    if points:
        failpoint(f"{points}.renamed")
    if durable:
        fs.sync_directory(directory)


def read_small(fs: FileSystem, name: str, directory: int, limit: int) -> bytes:
    """Return the content of a file of at most `limit` bytes.

    Raises OSError (EFBIG if the file is longer), IntegrityError if it is not a regular
    file.
    """
    with closing_at_end(fs.open(name, directory), fs.close) as fd:
        size = fs.size(fd)
        if size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", name)
        data = bytearray(size)
        return bytes(data[: fs.read(fd, memoryview(data), 0)])


def read_exactly(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset`.

    Return the number of bytes read, which is smaller than the buffer only at the end of
    the file.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
