"""Keeps objects as files of a POSIX file system: each prefix is a directory, each
object a file.

Every call is relative to directory descriptors, and follows no link below the root.
Files are synced before their directories, and the parent of a directory before anything
in it counts. Two processes that may delete and read an object meet at a lock on its
file (`locks.py`; FORMAT.md, section 6).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ckptd.shared import names
from ckptd.shared.errors import Busy, IntegrityError, storage_errors
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.storage import locks, old_journal, posix_root
from ckptd.shared.storage.posix_streams import PosixSink, PosixSource
from ckptd.shared.system import machine
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.fs import NO_ROOM, FileSystem, PosixFileSystem, make_directories, publish
from ckptd.shared.system.storage_seam import Entry


class PosixStorage:
    """The objects below the directory `root`. Only the root itself may be a link."""

    head_last = True
    shares_links = True
    # A file is published by a hard link, which only one of several processes can make.
    creates_once = True

    def __init__(self, root: Path, fs: FileSystem | None = None) -> None:
        self.root = root
        self.fs = fs or PosixFileSystem()
        self._durable: set[str] = set()  # prefixes that this process knows to be durable
        self._claims_lock = threading.Lock()
        # The lock file of `serve`, and its status.
        self._lock: tuple[Path, os.stat_result] | None = None
        # Claims that this process has created and failed to sync: `claim` may be
        # repeated for them.
        self._unsynced_claims: set[str] = set()

    def where(self, name: str = "") -> str:
        return str(self.root / name)

    # -- directories

    @contextmanager
    def directory(self, prefix: str = "") -> Iterator[int]:
        """Yield an open descriptor of the directory of a prefix.

        Raises FileNotFoundError, NotADirectoryError.
        """
        fd = self.fs.open_directory(os.path.realpath(self.root))
        try:
            for part in prefix.split("/") if prefix else ():
                inner = self.fs.open_directory(part, fd)
                self.fs.close(fd)
                fd = inner
            yield fd
        finally:
            self.fs.close(fd)

    def ensure(self, prefix: str) -> None:
        """Make the directory of a prefix durably.

        The first call also syncs the name of one that exists: its maker may have died
        before.
        """
        if not prefix:
            make_directories(self.fs, self.root)
            return
        parts = prefix.split("/")
        for depth, part in enumerate(parts):
            path = "/".join(parts[: depth + 1])
            with self.directory("/".join(parts[:depth])) as parent:
                if self.fs.make_directory(part, parent) or path not in self._durable:
                    self.fs.sync_directory(parent)
            self._durable.add(path)

    def children(self, prefix: str) -> list[Entry]:
        try:
            with self.directory(prefix) as directory:
                return [Entry(*found) for found in self.fs.entries(directory)]
        except FileNotFoundError:
            if not prefix:
                raise
        with self.directory():  # the root must exist
            return []

    def remove(self, prefix: str) -> bool:
        """Return True also if something else, such as a file, has taken the name of the
        directory: that is not ckptd's and stays.
        """
        self._durable.discard(prefix)
        parent, _, name = prefix.rpartition("/")
        try:
            with self.directory(parent) as directory:
                # The process that removed it may have died before that was durable.
                with suppress(FileNotFoundError, NotADirectoryError):
                    self.fs.remove_directory(name, directory)
                self.fs.sync_directory(directory)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False  # a file that is not ckptd's is still in it
        return True

    # -- objects

    def exists(self, name: str) -> bool:
        prefix, _, file = name.rpartition("/")
        try:
            with self.directory(prefix) as directory:
                self.fs.stat(file, directory)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def open(self, name: str) -> PosixSource:
        return PosixSource(self.fs, self._open(name))

    def _open(self, name: str) -> int:
        prefix, _, file = name.rpartition("/")
        try:
            with self.directory(prefix) as directory:
                return self.fs.open(file, directory)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "its directory is missing", name) from error

    def create(self, name: str, size: int, head: bytes | None = None) -> PosixSink:
        """Create the file with room for `size` bytes, and make its directory if it is
        missing.
        """
        prefix, _, file = name.rpartition("/")
        self.ensure(prefix)
        with self.directory(prefix) as directory:
            fd = self.fs.create(file, directory, direct=True)
        sink = PosixSink(self.fs, fd, file, lambda: self.directory(prefix), head)
        try:
            self.fs.allocate(fd, size)
        except BaseException:
            sink.discard()
            raise
        return sink

    def refresh_listing(self, prefix: str, file: str) -> None:
        self.create(
            f"{prefix}/{file}.{names.new_nonce().hex()}{names.TMP_SUFFIX}", ALIGN, b""
        ).discard()

    def link(self, name: str, new: str, size: int) -> bool:
        """Make a hard link.

        An error other than a full disk counts as a file system that has none.
        """
        (old_prefix, _, old), (prefix, _, file) = name.rpartition("/"), new.rpartition("/")
        self.ensure(prefix)
        try:
            with self.directory(old_prefix) as old_directory, self.directory(prefix) as directory:
                self.fs.link(old, old_directory, file, directory)
                with suppress(OSError):
                    # Afterwards, because the old name may have become that of another
                    # file.
                    found = self.fs.stat(file, directory)
                    if stat.S_ISREG(found.st_mode) and found.st_size == size:
                        return True
                self.fs.unlink(file, directory)
        except OSError as error:
            if error.errno == errno.EEXIST or error.errno in NO_ROOM:
                raise
        return False

    def publish(
        self,
        name: str,
        data: bytes,
        *,
        replace: bool,
        by: str = "",
        points: str | None = None,
        durable: bool = True,
    ) -> None:
        """Publish a file in a directory that exists, through a temporary name.

        Raises FileNotFoundError if there is no such directory.
        """
        prefix, _, file = name.rpartition("/")
        with self.directory(prefix) as directory:
            publish(
                self.fs,
                file,
                directory,
                data,
                replace=replace,
                by=by,
                points=points,
                durable=durable,
            )

    def delete(self, prefix: str, files: list[str], *, unpublished: str = "") -> None:
        """A file counts as deleted if something else has taken its name or that of its
        directory: that is not ckptd's and stays.
        """
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            self.directory(prefix) as directory,
        ):
            for name in [unpublished + names.TMP_SUFFIX, *files] if unpublished else files:
                with suppress(FileNotFoundError, IsADirectoryError):
                    self.fs.unlink(name, directory)
            self.fs.sync_directory(directory)

    # -- claims

    def claim(self, name: str) -> bool:
        prefix, _, file = name.rpartition("/")
        self.ensure(prefix)
        with self._claims_lock:
            repeated = name in self._unsynced_claims
            self._unsynced_claims.discard(name)
        with self.directory(prefix) as directory:
            created = repeated or self._create_empty(file, directory)
            try:
                # Also if the name is taken: its owner may have died before it was
                # durable.
                self.fs.sync_directory(directory)
            except OSError:
                if created:
                    self._unsynced_claims.add(name)
                raise
        return created

    def _create_empty(self, name: str, directory: int) -> bool:
        """Create an empty file.

        Return False if the name is taken. If no inode is left, make a hard link to an
        empty file that exists.
        """
        try:
            self.fs.close(self.fs.create(name, directory))
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            no_room = error
        try:
            if any(
                self._link(other, directory, name, directory)
                for other, _ in self.fs.entries(directory)
            ):
                return True
            with self.directory(names.control(machine.host())) as control:
                if self._link(names.LOCK, control, name, directory, empty=False):
                    return True
        except FileExistsError:
            return False
        raise no_room

    def _link(
        self, old: str, old_directory: int, new: str, directory: int, *, empty: bool = True
    ) -> bool:
        """Make `new` a hard link to `old`.

        Return False if `old` is no regular file, is not empty although it must be, or
        cannot be linked.

        Raises FileExistsError if `new` is taken.
        """
        try:
            found = self.fs.stat(old, old_directory)
            if not stat.S_ISREG(found.st_mode) or (empty and found.st_size):
                return False
            self.fs.link(old, old_directory, new, directory)
        except FileExistsError:
            raise
        except OSError:  # the file is gone or has too many links, or the file system has no links
            return False
        return True

    # -- leases

    def lease(self, name: str, called: str) -> PosixSource:
        """Hold the shared lock of the file until the source is closed.

        A deleter is waited for up to `locks.SECONDS`. The kernel releases the lock when
        its holder dies, so no lease is ever stale. Where a file system has no locks,
        the file may be deleted while it is read.
        """
        until = time.monotonic() + locks.SECONDS
        while True:
            fd = self._open(name)
            try:
                if locks.wait_to_share(fd, called, until):
                    return PosixSource(self.fs, fd, leased=True)
                if time.monotonic() > until:
                    raise Busy(
                        f"{called} cannot be read now: it was replaced each time before it could "
                        f"be locked; try again later"
                    )
            except BaseException:
                locks.release(fd)
                raise
            locks.release(fd)  # the file was deleted or replaced before it was locked

    @contextmanager
    def exclude(self, name: str, called: str) -> Iterator[None]:
        """Hold the exclusive lock of the file.

        Raises OSError if the file cannot be opened or locked.
        """
        fd = self._open_to_lock(name, called)
        if fd < 0:
            yield
            return
        try:
            if not locks.exclude(fd):
                raise Busy(f"{called} is being read, or deleted, by {locks.holders(fd)}")
            yield
        finally:
            locks.release(fd)

    def holders(self, name: str, called: str) -> str:
        """Wait up to `locks.SECONDS` for another deleter, and look through the
        descriptors of all processes of the machine.

        `exclude` does neither when it names the processes in its error, because a
        daemon waits for it.
        """
        fd = self._open_to_lock(name, called)
        if fd < 0:
            return ""
        until = time.monotonic() + locks.SECONDS
        try:
            while not locks.exclude(fd):
                if not os.fstat(fd).st_nlink:
                    return ""
                # Only readers hold the lock, or a deleter has held it for too long.
                if locks.share(fd) or time.monotonic() > until:
                    locks.unlock(fd)
                    found = locks.holders(fd, search=True)
                    # The last reader may have ended during the search.
                    return "" if locks.exclude(fd) else found
                time.sleep(locks.RETRY_SECONDS)
            return ""
        finally:
            locks.release(fd)

    def _open_to_lock(self, name: str, called: str) -> int:
        """Open a file for writing, as an exclusive lock requires.

        Return -1 if there is no file that a reader can open.

        Raises Busy if this user may not write the file, OSError if it cannot be opened
        for another reason.
        """
        prefix, _, file = name.rpartition("/")
        try:
            with self.directory(prefix) as directory:
                try:
                    return self.fs.open(file, directory, write=True)
                except PermissionError:
                    owner = self.fs.stat(file, directory).st_uid
        except (FileNotFoundError, NotADirectoryError, IntegrityError):
            return -1
        except OSError as error:
            if error.errno != errno.ELOOP:  # a symbolic link, which no reader follows
                raise
            return -1
        remedy = (
            f"delete it as uid {owner}"
            if owner != os.geteuid()
            else "run `chmod u+w` on the manifest first"
        )
        raise Busy(
            f"{called} cannot be deleted by uid {os.geteuid()}: its manifest belongs to uid "
            f"{owner} and may not be written; {remedy}"
        )

    # -- the root

    def serve(self, host: str) -> Descriptor:
        """Make the root and this host's directory in it, check their owners, and lock
        the root.

        A daemon that runs as root accepts other owners.
        """
        with storage_errors(f"use {self.root} as the root for checkpoints"):
            self.ensure("")
            posix_root.check_owner(self.root, posix_root.CHECKPOINTS)
            for prefix in (names.CONTROL, names.control(host)):
                self.ensure(prefix)
                posix_root.check_owner(self.root / prefix, posix_root.RECORDS)
            posix_root.check_control(self.root / names.CONTROL)
            posix_root.warn_if_open_to_all(self.root)
        with self.directory(names.control(host)) as directory:
            lock = posix_root.lock(directory, self.root, host)
        self._lock = (self.root / names.control(host) / names.LOCK, os.fstat(lock.fileno()))
        return lock

    def is_lost(self) -> bool | None:
        if self._lock is None:
            return None
        path, status = self._lock
        try:
            return not os.path.samestat(os.stat(path, follow_symlinks=False), status)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return None

    def take_journal(self, host: str, target: Path) -> None:
        prefix = f"{names.control(host)}/{names.JOURNAL}"
        with suppress(FileNotFoundError), self.directory(prefix) as directory:
            old_journal.move(self.fs, directory, self.where(prefix), target)

    def refusal(self, prefix: str) -> str:
        try:
            with self.directory(prefix) as directory:
                return posix_root.refusal(directory, self.where(prefix))
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def exclusive_bytes(self, prefixes: Collection[str]) -> int:
        names, sizes, links = Counter[int](), dict[int, int](), dict[int, int]()
        for prefix in prefixes:
            with suppress(FileNotFoundError, NotADirectoryError), self.directory(prefix) as inside:
                for name, _ in self.fs.entries(inside):
                    with suppress(FileNotFoundError):
                        found = self.fs.stat(name, inside)
                        names[found.st_ino] += 1
                        sizes[found.st_ino], links[found.st_ino] = found.st_size, found.st_nlink
        return sum(size for inode, size in sizes.items() if names[inode] >= links[inode])

    def free(self) -> int | None:
        try:
            return int(psutil.disk_usage(str(self.root)).free)
        except OSError:
            return None
