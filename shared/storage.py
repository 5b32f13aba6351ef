"""Stores checkpoints: the protocol of a storage, and its implementation on a POSIX file system.

Names are (job, tag directory, file), and are checked by `names.py` before they come here. Every call is relative to directory descriptors
and follows no link below the root. A call that returns is durable: files are synced before their directories, and the parent of a directory
before anything in it counts. Calls raise OSError; the callers translate it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from ckptd.shared import locks, names
from ckptd.shared.errors import IntegrityError, NotFound
from ckptd.shared.fs import READ, FileSystem, PosixFileSystem, make_directories, open_regular, opened_directory, publish, read_small
from ckptd.shared.manifest import MAX_MANIFEST, Manifest
from ckptd.shared.part import PartReader

_SWEPT_AT_ONCE = 64
"""The most parts that a sweep locks at once. Each takes an open descriptor."""


class Storage(Protocol):
    """The operations of a storage that the daemon and the readers use."""

    def jobs(self) -> list[str]: ...
    def tags(self, job: str) -> list[str]: ...
    def files(self, job: str, tag: str) -> list[str]: ...
    def read_manifest(self, job: str, tag: str) -> Manifest: ...
    def has_manifest(self, job: str, tag: str) -> bool: ...
    def open_part(self, job: str, tag: str, file: str, index_sha256: str | None = None) -> PartReader: ...
    def read_newest(self, job: str) -> str | None: ...
    def make_tag(self, job: str, tag: str) -> None: ...
    def publish_manifest(self, job: str, tag: str, data: bytes) -> None: ...
    def publish_newest(self, job: str, tag: str) -> None: ...
    def remove_newest(self, job: str) -> None: ...
    def pins(self, job: str) -> set[str]: ...
    def delete_files(self, job: str, tag: str, files: list[str]) -> None: ...
    def delete_tag(self, job: str, tag: str) -> bool: ...


class PosixStorage:
    """Checkpoints in a directory tree below `root`, which must exist. Only the root itself may be a link."""

    def __init__(self, root: Path, fs: FileSystem | None = None) -> None:
        self.root = root
        self.fs = fs or PosixFileSystem()
        self._durable: set[tuple[str, ...]] = set()  # directories whose names this process knows to be durable

    @contextmanager
    def directory(self, *parts: str) -> Iterator[int]:
        """Yield an open descriptor of the directory `root/part/part`. Raises FileNotFoundError, NotADirectoryError."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                inner = self.fs.open_directory(part, fd)
                self.fs.close(fd)
                fd = inner
            yield fd
        finally:
            self.fs.close(fd)

    def ensure(self, *parts: str) -> None:
        """Make the directory `root/part/part` durably. One that exists is synced too: its maker may have died before it was durable."""
        for depth, part in enumerate(parts):
            path = parts[: depth + 1]
            with self.directory(*parts[:depth]) as parent:
                if self.fs.make_directory(part, parent) or path not in self._durable:
                    self.fs.sync_directory(parent)
            self._durable.add(path)

    def _list(self, *parts: str) -> list[str]:
        with self.directory(*parts) as fd:
            return sorted(os.listdir(fd))

    def jobs(self) -> list[str]:
        """Return the names of all jobs that have a directory."""
        with self.directory() as fd, os.scandir(fd) as entries:
            return sorted(e.name for e in entries if names.is_name(e.name) and e.is_dir(follow_symlinks=False))

    def tags(self, job: str) -> list[str]:
        """Return the tag directories of a job, committed or not. Raises OSError if the root cannot be listed."""
        with self.directory():
            pass
        try:
            return [name for name in self._list(job) if names.parse_tag_directory(name)]
        except FileNotFoundError:
            return []

    def files(self, job: str, tag: str) -> list[str]:
        """Return the names of all files in a tag's directory; none if there is no such directory. Raises OSError."""
        try:
            return self._list(job, tag)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read_manifest(self, job: str, tag: str) -> Manifest:
        """Return the manifest. Raises NotFound if nothing is committed, IntegrityError if it is damaged or of another checkpoint."""
        manifest = self._read_manifest(job, tag, f"no checkpoint {job}/{tag} in {self.root}", f"{job}/{tag}")
        check_manifest_place(manifest, job, tag)
        return manifest

    def _read_manifest(self, job: str, tag: str, missing: str, name: str) -> Manifest:
        try:
            with self.directory(job, tag) as fd:
                return Manifest.decode(read_small(names.MANIFEST, fd, MAX_MANIFEST))
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(missing) from None
        except IntegrityError as error:
            raise type(error)(f"{name}: {error}") from None

    def has_manifest(self, job: str, tag: str) -> bool:
        """Return True if there is a manifest, intact or damaged. Raises OSError."""
        try:
            with self.directory(job, tag) as fd:
                os.stat(names.MANIFEST, dir_fd=fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def open_part(self, job: str, tag: str, file: str, index_sha256: str | None = None) -> PartReader:
        """Open a part. The caller closes `reader.fileno()`. Raises IntegrityError if the part is missing or damaged."""
        name = f"{job}/{tag}/{file}"
        try:
            fd = self._open_beside(job, tag, file)
        except FileNotFoundError:
            raise IntegrityError(f"{name} is missing") from None
        try:
            return PartReader(fd, name, index_sha256, lambda beside: self._open_beside(job, tag, beside))
        except BaseException:
            os.close(fd)
            raise

    def _open_beside(self, job: str, tag: str, file: str) -> int:
        with self.directory(job, tag) as directory:
            return open_regular(file, directory)

    def read_newest(self, job: str) -> str | None:
        """Return the tag directory that the hint `newest` names, unverified, or None if there is no such hint."""
        try:
            with self.directory(job) as fd:
                name = read_small(names.NEWEST, fd, 300).decode("ascii", "replace").removesuffix("\n")
        except (OSError, IntegrityError):
            return None
        return name if names.parse_tag_directory(name) else None

    def make_tag(self, job: str, tag: str) -> None:
        self.ensure(job, tag)

    def publish_manifest(self, job: str, tag: str, data: bytes) -> None:
        """Commit: publish the manifest. Raises FileExistsError if the tag has one already."""
        with self.directory(job, tag) as fd:
            publish(self.fs, names.MANIFEST, fd, data, replace=False, points="commit")

    def publish_newest(self, job: str, tag: str) -> None:
        with self.directory(job) as fd:
            publish(self.fs, names.NEWEST, fd, f"{tag}\n".encode(), replace=True)

    def remove_newest(self, job: str) -> None:
        """Remove the hint `newest` of a job that has no checkpoint any more."""
        with self.directory(job) as fd:
            self._unlink(names.NEWEST, fd)
            self.fs.sync_directory(fd)

    def pins(self, job: str) -> set[str]:
        """Return the tag directories that are pinned."""
        try:
            return {name for name in self._list(names.CONTROL, names.PINS, job) if names.parse_tag_directory(name)}
        except FileNotFoundError:
            return set()

    def pin(self, job: str, tag: str) -> None:
        """Pin a checkpoint durably. The caller holds a lease on it."""
        self.ensure(names.CONTROL, names.PINS, job)
        with self.directory(names.CONTROL, names.PINS, job) as fd:
            try:
                self.fs.close(self.fs.create(tag, fd))
            except FileExistsError:
                pass  # the process that pinned it may have died before the pin was durable
            self.fs.sync_directory(fd)

    def unpin(self, job: str, tag: str) -> None:
        """Remove the pin of a checkpoint, if it has one."""
        try:
            with self.directory(names.CONTROL, names.PINS, job) as fd:
                self._unlink(tag, fd)
                self.fs.sync_directory(fd)
        except FileNotFoundError:
            pass

    def _unlink(self, name: str, directory: int) -> None:
        try:
            self.fs.unlink(name, directory)
        except FileNotFoundError:
            pass

    def delete_files(self, job: str, tag: str, files: list[str]) -> None:
        """Delete those of the files that are there, and the data files of parts among them, and sync the directory.

        A file counts as gone if something else has taken its name or that of its directory: that is not ckptd's and stays. Raises OSError.
        """
        try:
            with self.directory(job, tag) as fd:
                parts = {file for file in files if names.parse_part_file(file)}
                for file in [*files, *(file for file in (os.listdir(fd) if parts else []) if names.part_of(file) in parts)]:
                    try:
                        self._unlink(file, fd)
                    except IsADirectoryError:
                        pass
                self.fs.sync_directory(fd)
        except (FileNotFoundError, NotADirectoryError):
            pass

    def delete_tag(self, job: str, tag: str) -> bool:
        """Remove the tag's directory if it is empty. Return True if it is gone, durably, also if it has become a file. Raises OSError."""
        self._durable.discard((job, tag))
        try:
            with self.directory(job) as fd:
                try:
                    self.fs.remove_directory(tag, fd)
                except (FileNotFoundError, NotADirectoryError):
                    pass  # the process that removed it may have died before that was durable
                self.fs.sync_directory(fd)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False  # a file in it is not ckptd's
        return True


class StandaloneStorage(PosixStorage):
    """A directory that holds one checkpoint by itself, outside every root. Every job and tag means this directory."""

    job, tag, attempt = "standalone", "standalone.a0001", 1

    @contextmanager
    def directory(self, *parts: str) -> Iterator[int]:
        with super().directory() as fd:
            yield fd

    def ensure(self, *parts: str) -> None:
        make_directories(self.fs, self.root)

    def has_manifest(self, job: str = job, tag: str = tag) -> bool:
        return super().has_manifest(job, tag)

    def read_manifest(self, job: str = job, tag: str = tag) -> Manifest:
        """Return the manifest, whatever job and tag it names: the checkpoint may have been moved or copied here."""
        return self._read_manifest(job, tag, f"no checkpoint in {self.root}", str(self.root))

    def commit(self, data: bytes, *, overwrite: bool, nonce: str | None = None) -> None:
        """Publish the manifest. If several savers commit at once without `overwrite`, one succeeds.

        nonce: of a part that the caller has locked. Until the lock is released, no other save sweeps the unpublished manifest.
        Raises FileExistsError, OSError; after an OSError the manifest may be there nevertheless.
        """
        with self.directory() as fd:
            publish(self.fs, names.MANIFEST, fd, data, replace=overwrite, by=nonce or names.new_nonce().hex())

    def sweep(self) -> None:
        """Remove the files of failed saves and of checkpoints that were written over.

        Files that a reader or another saver has locked stay for the next sweep. Raises OSError, IntegrityError, NotFound.
        """
        keep = self._named()
        with self.directory() as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return  # an earlier version of ckptd, which locks no parts, may be reading or saving
            left = list(self._left(fd, keep).items())
            for first in range(0, len(left), _SWEPT_AT_ONCE):
                self._sweep(fd, dict(left[first : first + _SWEPT_AT_ONCE]))

    def _named(self) -> set[str]:
        """Return the names of the parts of the committed checkpoint."""
        return {part.file for part in self.read_manifest().parts}

    def _left(self, directory: int, keep: set[str]) -> dict[str, list[str]]:
        """Return the files that may be swept, by the name of the file whose lock decides."""
        left: dict[str, list[str]] = {}
        unpublished = []
        for file in filter(names.is_standalone_file, os.listdir(directory)):
            part = names.part_of(file)
            if part is None:
                unpublished.append(file)
            elif part not in keep:
                left.setdefault(part, []).append(file)
        if unpublished:  # listed again, because a listing may lack a part that was created while it was made
            parts = {parsed[1].hex(): file for file in os.listdir(directory) if (parsed := names.parse_part_file(file)) is not None}
            for file in unpublished:
                nonce = file.removeprefix(f"{names.MANIFEST}.").removesuffix(names.TMP_SUFFIX)
                left.setdefault(parts.get(nonce, file), []).append(file)
        return left

    def _sweep(self, directory: int, left: dict[str, list[str]]) -> None:
        """Remove the files whose lock is free. Each part is locked before the manifest is read: its saver commits before it unlocks."""
        with ExitStack() as locked:
            free = [files for lock, files in left.items() if self._lock(lock, directory, locked)]
            keep = self._named()
            self.delete_files(self.job, self.tag, [file for files in free for file in files if names.part_of(file) not in keep])

    def _lock(self, file: str, directory: int, locked: ExitStack) -> bool:
        """Take the exclusive lock of a part until `locked` is closed. Return True also for a file that no process can have locked."""
        try:
            fd = open_regular(file, directory, os.O_RDWR | READ)
        except (FileNotFoundError, IntegrityError):
            return True  # data files whose part is gone, or no regular file
        except OSError as error:
            return error.errno == errno.ELOOP  # a link; another user's part stays, because its readers cannot be seen
        locked.callback(locks.release, fd)
        return locks.exclude(fd)

    def hold(self, file: str) -> int:
        """Return a descriptor of a part that keeps `sweep` from removing it, until `locks.release` closes it.

        Raises FileNotFoundError if the part has been swept, Busy, IntegrityError, OSError.
        """
        fd = super()._open_beside(self.job, self.tag, file)
        try:
            if not locks.wait_to_share(fd, f"{self.root / file}"):
                raise FileNotFoundError(errno.ENOENT, "it has been swept", file)
        except BaseException:
            locks.release(fd)
            raise
        return fd

    def _open_beside(self, job: str, tag: str, file: str) -> int:
        return self.hold(file) if names.parse_part_file(file) is not None else super()._open_beside(job, tag, file)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Keep earlier versions of ckptd from sweeping while the caller saves. The lock on each part does so for this version."""
        fd = self.share()
        try:
            yield
        finally:
            locks.release(fd)

    def share(self) -> int:
        """Return a descriptor of the directory that keeps earlier versions of ckptd from sweeping, until `locks.release` closes it.

        The lock is not waited for: any process that may read the directory can refuse it.
        """
        with self.directory() as fd:
            shared = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        try:
            fcntl.flock(shared, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            pass  # refused, or no locks here
        return shared


def check_manifest_place(manifest: Manifest, job: str, tag: str) -> None:
    """Raise IntegrityError if the manifest lies in the directory of another checkpoint."""
    parsed = names.parse_tag_directory(tag)
    if parsed is None or (manifest.tag, manifest.attempt) != (tag, parsed[2]) or (parsed[1] is not None and manifest.step != parsed[1]):
        raise IntegrityError(f"{job}/{tag}: the manifest there is that of {manifest.job}/{manifest.tag}")


__all__ = ["PosixStorage", "StandaloneStorage", "Storage", "check_manifest_place", "opened_directory"]
