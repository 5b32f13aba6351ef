"""Makes the file or directory of an export beside its place, checks what was written,
and then publishes it whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from crc32c import crc32c

from ckptd.shared import names
from ckptd.shared.errors import AlreadyExists, Busy, IntegrityError, InvalidRequest, StorageError
from ckptd.shared.storage.locate import is_root
from ckptd.shared.storage.locks import description_lock
from ckptd.shared.system.fs import PosixFileSystem, opened_directory
from ckptd.shared.units import size_text

_PIECE, _STEP = 8 << 20, 64 << 20
"""The bytes that are written at a time, and those after which the check begins of what
was written.
"""
_SPARE = 16 << 20
"""The bytes beside the tensors that an export may take: names, shapes and plain values."""

_MADE, _LOCK = "made", "lock"
"""The directory that a continued export fills, and the file that it locks. The results
are beside them.
"""

OnProgress = Callable[[int], None]
"""Called with the number of bytes that have been written since the last call."""


def check_place(out: Path, nbytes: int, key: str = "") -> None:
    """Check that an export or import of `nbytes` bytes can be made at `out`. key: that
    of `continued`, whose finished files count as made.

    Raises AlreadyExists if `out` exists, InvalidRequest if `out` is the place of a
    checkpoint of a job, StorageError if its directory does not or has
    no room, OSError.
    """
    if os.path.lexists(out):
        raise AlreadyExists(f"{out} exists already: choose another name, or remove it first")
    if names.parse_tag_directory(out.name) is not None and is_root(out.parent.parent):
        raise InvalidRequest(
            f"{out} is the place of a checkpoint of the job {out.parent}, which only a daemon "
            f"makes: give it to the job with `ckptd adopt PATH {out.parent}`, or choose another "
            f"place"
        )
    if not out.parent.is_dir():
        raise StorageError(f"{out.parent} is not a directory: make it first")
    begun = _beside(out, key) / _MADE
    if key and begun.is_dir():
        nbytes -= sum(
            file.stat().st_size for file in begun.iterdir() if result_of(file) is not None
        )
    free = shutil.disk_usage(out.parent).free
    if free < nbytes + _SPARE:
        raise StorageError(
            f"no room for {size_text(nbytes)} at {out}: {size_text(free)} are free there"
        )


@contextmanager
def published(out: Path, *, directory: bool) -> Iterator[Path]:
    """Context manager.

    Yields a new path beside `out` where a file or directory is to be made, and then
    renames it to `out`.

    The name begins with a dot and ends in ".partial". In the end nothing is left there,
    also after an error, unless this process is killed. Raises AlreadyExists if another
    program has made `out` meanwhile, OSError.
    """
    beside = _beside(out, names.new_nonce().hex()[:8])
    if directory:
        beside.mkdir()
    try:
        yield beside
        _publish(beside, out)
    finally:
        _remove(beside)


@contextmanager
def continued(out: Path, key: str) -> Iterator[Path]:
    """Context manager.

    Yields a directory to be renamed to `out` as `published` does, or the one that an
    interrupted process has left.

    key: 16 hexadecimal digits that identify the contents. Only a directory that was
    begun with the same key is continued. It then has the files for which `finish` was
    called, if their bytes are still those that were written, and no others. It stays if
    this process is killed or interrupted (KeyboardInterrupt), and not after an error.
    Where the file system has no locks, nothing is continued.

    Raises Busy if another export is making the same directory, and otherwise as
    `published` does.
    """
    place = _beside(out, key)
    lock = _lock(place, out)
    if lock is None:
        place = _beside(out, names.new_nonce().hex()[:8])
        place.mkdir()
    made = place / _MADE
    try:
        made.mkdir(exist_ok=True)
        for file in made.iterdir():
            if not _is_sound(file):
                file.unlink()
                _result(file).unlink(missing_ok=True)
        for kept in place.glob("*.result"):
            if not (made / kept.name.removesuffix(".result")).exists():
                kept.unlink()
        yield made
        _publish(made, out)
        _remove(place)
    except Exception:
        _remove(place)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _lock(place: Path, out: Path) -> int | None:
    """Make a directory and lock it.

    Return the descriptor that holds the lock, or None if the file system has no locks.
    Raises Busy.
    """
    while True:
        place.mkdir(exist_ok=True)
        try:
            lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # another process has removed the directory
        try:
            granted = description_lock(lock, fcntl.F_WRLCK)
            if granted is False:
                raise Busy(f"another export is writing {out}: wait until it ends")
            if granted is None:
                _remove(place)
                os.close(lock)
                return None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(place / _LOCK)):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # another process has removed the directory before this one had the lock


def result_of(file: Path) -> Any:
    """Return the result that `finish` has kept for a file of a continued directory, or
    None if it was not called for this file.
    """
    kept = _kept(file)
    return None if kept is None else kept[2]


def finish(file: CheckedFile, result: Any) -> None:
    """Keep a result, which JSON can express and which is not None, for a file that was
    written by appending, and is closed.
    """
    with CheckedFile(_result(file.path), lambda length: None) as kept:
        kept.write(json.dumps([file.tell(), file.crc, result]).encode())


def _kept(file: Path) -> tuple[int, int, Any] | None:
    try:
        size, crc, result = json.loads(_result(file).read_bytes())
    except (FileNotFoundError, ValueError, TypeError):  # it was not kept, or not completely
        return None
    return (size, crc, result) if file.is_file() and file.stat().st_size == size else None


def _is_sound(file: Path) -> bool:
    """Return True if a file is finished and has the bytes that were written."""
    kept, crc = _kept(file), 0
    if kept is None:
        return False
    with file.open("rb") as data:
        while piece := data.read(_PIECE):
            crc = crc32c(piece, crc)
    return crc == kept[1]


def _result(file: Path) -> Path:
    return file.parent.with_name(f"{file.name}.result")


def _beside(out: Path, mark: str) -> Path:
    short = out.name.encode(errors="surrogateescape")[:100].decode(errors="ignore")
    return out.with_name(f".{short}.{mark}.partial")


def _publish(beside: Path, out: Path) -> None:
    fs = PosixFileSystem()
    if beside.is_dir():
        with opened_directory(fs, str(beside)) as made:
            fs.sync_directory(made)
    with opened_directory(fs, str(out.parent)) as parent:
        try:
            fs.rename(os.path.relpath(beside, out.parent), out.name, parent, replace=False)
        except FileExistsError:
            raise AlreadyExists(
                f"{out} was made by another program meanwhile: choose another name"
            ) from None
        fs.sync_directory(parent)


def _remove(beside: Path) -> None:
    if beside.is_dir():
        shutil.rmtree(beside)
    else:
        beside.unlink(missing_ok=True)


class CheckedFile:
    """A file that is compared with the checksums of what is written into it.

    Use it in a `with` statement.

    What was written is synced, and read back from the disk as far as the kernel can be
    asked to, on a thread that is one step behind. Raises OSError; also IntegrityError,
    at the end at the latest, if the disk returns other bytes.
    """

    def __init__(self, path: Path, progress: OnProgress, *, exists: bool = False) -> None:
        """`exists`: True if the file is there already, and bytes in it are to be
        replaced. Otherwise raises FileExistsError if it is.
        """
        self.path, self._progress = path, progress
        self._file = os.open(
            path, os.O_RDWR | os.O_CLOEXEC | (0 if exists else os.O_CREAT | os.O_EXCL), 0o666
        )
        self._written: list[tuple[int, int, int]] = []
        self.crc = 0
        """The crc32c of everything that was appended."""
        self._unchecked, self._position = 0, 0
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="ckptd-check")
        self._checking: Future[None] | None = None
        self.failure: BaseException | None = None
        """The error of the last `write`. torch.save raises a RuntimeError in its place."""

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes. Return their number."""
        try:
            self.write_at(self._position, data)
        except BaseException as error:
            self.failure = error
            raise
        self._position += len(data)
        self.crc = crc32c(data, self.crc)
        return len(data)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Do nothing. torch.save calls this."""

    def write_at(self, position: int, data: bytes | memoryview) -> None:
        """Write bytes at a position. No byte may be written twice."""
        with memoryview(data) as view:
            for start in range(0, len(view), _PIECE):
                piece, at = view[start : start + _PIECE], position + start
                self._written.append((at, len(piece), crc32c(piece)))
                done = 0
                while done < len(piece):
                    done += os.pwrite(self._file, piece[done:], at + done)
                self._unchecked += len(piece)
                if self._unchecked >= _STEP:
                    self._check_behind()
                self._progress(len(piece))

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._check_behind()
                self._wait()
                os.fsync(self._file)
        finally:
            self._behind.shutdown()
            os.close(self._file)

    def _check_behind(self) -> None:
        """Have everything checked that was written since the last call, once the check
        before it has ended.
        """
        self._wait()
        self._checking = self._behind.submit(self._check, self._written)
        self._written, self._unchecked = [], 0

    def _wait(self) -> None:
        if self._checking is not None:
            self._checking.result()

    def _check(self, written: list[tuple[int, int, int]]) -> None:
        os.fdatasync(self._file)
        buffer = bytearray(_PIECE)
        for at, length, crc in written:
            os.posix_fadvise(self._file, at, length, os.POSIX_FADV_DONTNEED)
            with memoryview(buffer)[:length] as piece:
                if os.preadv(self._file, [piece], at) != length or crc32c(piece) != crc:
                    raise IntegrityError(
                        f"{self.path.name}: the bytes at {at} are not those that were written"
                    )
