"""Keeps one checkpoint by itself in a directory or prefix outside every root, and
sweeps what failed saves have left there.
"""

from __future__ import annotations

import errno
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, NotFound
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.storage import locks
from ckptd.shared.storage.marker import MARKER, is_marked
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.posix_streams import PosixSource
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.fs import FileSystem
from ckptd.shared.system.storage_seam import Closable, Source

if TYPE_CHECKING:  # obstore is imported only for a URL
    from ckptd.shared.storage.object_store import ObjectStorage

_SWEPT_AT_ONCE = 64
"""The most parts that a sweep locks at once. Each takes an open descriptor."""


class StandaloneCheckpoint(Repository, ABC):
    """A directory or a prefix that holds one checkpoint.

    Every job and tag means this place.
    """

    job, tag, attempt = "standalone", "standalone.a0001", 1

    def _name(self, *parts: str) -> str:
        return "/".join(parts[2:])

    def _called(self, job: str, tag: str, file: str) -> str:
        return self.where(job, tag, file)

    @abstractmethod
    def make(self) -> None:
        """Prepare the place for a save."""

    def read_manifest(self, job: str = job, tag: str = tag) -> Manifest:
        """Return the manifest, whatever job and tag it names: the checkpoint may have
        been moved or copied here.
        """
        return self._read_manifest(job, tag, f"no checkpoint in {self.where()}", self.where())[0]

    def has_manifest(self, job: str = job, tag: str = tag) -> bool:
        return super().has_manifest(job, tag)

    def commit(self, data: bytes, *, overwrite: bool, nonce: str) -> None:
        """Publish the manifest.

        If several savers commit at once without `overwrite`, one succeeds, where the
        storage can tell.

        nonce: of a part that the caller has locked. Until the lock is released, no
        other save sweeps the unpublished manifest. Raises FileExistsError, OSError;
        after an OSError the manifest may be there nevertheless.
        """
        self.storage.publish(names.MANIFEST, data, replace=overwrite, by=nonce)

    def mark(self, nonce: str) -> None:
        """Publish the marker of the committed checkpoint.

        It replaces one of DCP. `nonce`: as for `commit`. Raises OSError.
        """
        failpoint("marker.starting")
        self.storage.publish(names.MARKER, MARKER, replace=True, by=nonce, points="marker")
        failpoint("marker.durable")

    def repair_marker(self) -> None:
        """Publish the marker that a manifest lacks, or delete a marker without a
        manifest. Leave DCP's own metadata. Raises OSError.
        """
        marked = is_marked(self.storage)
        if marked and not self.has_manifest():
            self.storage.delete("", [names.MARKER])
            marked = False  # another save may have committed since, and its marker may be deleted
        if not marked and self.has_manifest() and not self.storage.exists(names.MARKER):
            self.storage.publish(names.MARKER, MARKER, replace=False, by=names.new_nonce().hex())

    def hold(self, file: str) -> Closable:
        """Keep a part from being swept until the result is closed.

        Raises FileNotFoundError if it has been swept, Busy, IntegrityError.
        """
        return ExitStack()

    def share(self) -> Closable:
        """Keep earlier versions of ckptd, which lock no parts, from sweeping until the
        result is closed.
        """
        return ExitStack()

    def saving(self) -> AbstractContextManager[Closable]:
        """Keep earlier versions of ckptd from sweeping while the caller saves.

        The lock on each part does so for this version.
        """
        return closing(self.share())

    @abstractmethod
    def sweep(self) -> None:
        """Remove files that the committed checkpoint does not need.

        Raises OSError, IntegrityError, NotFound.
        """

    def _named(self) -> set[str]:
        """Return the names of the parts of the committed checkpoint."""
        return set(self.read_manifest().files)


class StandaloneDirectory(StandaloneCheckpoint):
    """A directory that holds one checkpoint, whose parts are locked by those who write
    and read them.
    """

    def __init__(self, path: Path, fs: FileSystem | None = None) -> None:
        self._posix = PosixStorage(path, fs)
        super().__init__(self._posix)
        self.path = path

    def make(self) -> None:
        """Make the directory and its missing parents durably."""
        self._posix.ensure("")

    # -- keeping files from being swept

    def hold(self, file: str) -> Closable:
        return self._open_part_file(self.job, self.tag, file)

    def _open_part_file(self, job: str, tag: str, file: str) -> Source:
        return self.storage.lease(file, self.storage.where(file))

    def share(self) -> Closable:
        """Lock the directory.

        The lock is not waited for: any process that may read the directory can refuse
        it.
        """
        with self._posix.directory() as directory:
            shared = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        with suppress(OSError):  # the lock was refused, or this file system has none
            fcntl.flock(shared, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return PosixSource(self._posix.fs, shared, leased=True)

    # -- sweeping

    def sweep(self) -> None:
        """Remove the files of failed saves and of checkpoints that were written over.

        Files that a reader or another saver has locked stay for the next sweep. Raises
        OSError, IntegrityError, NotFound.
        """
        keep = self._named()
        with self._posix.directory() as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # An earlier version of ckptd, which locks no parts, may be reading or
                # saving.
                return
            left = list(self._left(keep).items())
            for first in range(0, len(left), _SWEPT_AT_ONCE):
                self._sweep(fd, dict(left[first : first + _SWEPT_AT_ONCE]))

    def _all_files(self) -> Iterator[str]:
        return (entry.name for entry in self.storage.children(""))

    def _left(self, keep: set[str]) -> dict[str, list[str]]:
        """Return the files that may be swept, by the name of the file whose lock
        decides.
        """
        left: dict[str, list[str]] = {}
        unpublished = []
        for file in filter(names.is_standalone_file, self._all_files()):
            part = names.part_of(file)
            # Of a checkpoint that was copied out of a root: no saver writes one here.
            if names.is_metadata_file(file):
                if file not in keep:
                    left.setdefault(file, []).append(file)
            elif part is None:
                unpublished.append(file)
            elif part not in keep:
                left.setdefault(part, []).append(file)
        # Listed again, because a listing may lack a part that was created while it was
        # made.
        if unpublished:
            parts = {
                parsed[1].hex(): file
                for file in self._all_files()
                if (parsed := names.parse_part_file(file)) is not None
            }
            for file in unpublished:
                left.setdefault(parts.get(names.publisher_of(file) or "", file), []).append(file)
        return left

    def _sweep(self, directory: int, left: dict[str, list[str]]) -> None:
        """Remove the files whose lock is free.

        Each part is locked before the manifest is read: its saver commits before it
        unlocks.
        """
        with ExitStack() as locked:
            free = [files for lock, files in left.items() if self._lock(lock, directory, locked)]
            keep = self._named()
            self.delete_files(
                self.job,
                self.tag,
                [file for files in free for file in files if names.part_of(file) not in keep],
            )

    def _lock(self, file: str, directory: int, locked: ExitStack) -> bool:
        """Take the exclusive lock of a part until `locked` is closed.

        Return True also for a file that no process can have locked.
        """
        try:
            fd = self._posix.fs.open(file, directory, write=True)
        except (FileNotFoundError, IntegrityError):
            return True  # data files whose part is gone, or no regular file
        except OSError as error:
            # A link; another user's part stays, because its readers cannot be seen.
            return error.errno == errno.ELOOP
        locked.callback(locks.release, fd)
        return locks.exclude(fd)


class StandaloneObjects(StandaloneCheckpoint):
    """A prefix in an object store that holds one checkpoint.

    Without locks, the parts of a save that is under way cannot be told from those of a
    save that has failed. A sweep therefore deletes only the parts of the checkpoint
    that this save has replaced. The reader of that checkpoint is told that it is gone.
    """

    def __init__(self, storage: ObjectStorage) -> None:
        super().__init__(storage)
        self._objects = storage
        self._replaced: list[str] = []

    def make(self) -> None:
        """Measure now what the commit needs to know: a process that is about to end can
        start no threads.
        """
        self._objects.creates_once  # noqa: B018  # it is remembered

    def commit(self, data: bytes, *, overwrite: bool, nonce: str) -> None:
        if overwrite:
            try:
                self._replaced = self.read_manifest().files
            except (NotFound, IntegrityError):
                self._replaced = []
        super().commit(data, overwrite=overwrite, nonce=nonce)

    def sweep(self) -> None:
        """Remove the parts of the checkpoint that the last `commit` has replaced."""
        keep = self._named()
        self.delete_files(self.job, self.tag, [file for file in self._replaced if file not in keep])
