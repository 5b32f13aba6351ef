"""The journal: appends records durably, one writer, and starts again after any death (FORMAT.md, section 7).

A batch of records is one write and one fdatasync on a thread; then the waiters wake. `Journal.open` replays the files that are there, and
`Journal.start` begins a new file with the whole state. An old file is appended to only where there is no room for a new one. The journal
holds intents; what is true about checkpoints stands in manifests and sealed headers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from ckptd.daemon import journal_file as jf
from ckptd.daemon import records as r
from ckptd.daemon.journal_directory import JournalDirectory
from ckptd.daemon.tasks import watched
from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, NewerFormat, StorageError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import NO_ROOM, FileSystem, read_small
from ckptd.shared.names import TMP_SUFFIX

log = logging.getLogger("ckptd.journal")

MAX_UNDER_WAY = 1 << 20
"""Bytes of the state that saves and deletions under way may take up before new ones are refused; twice that still fits a journal file."""
MARGIN = 256 << 10
"""Bytes that a new journal file has at least for records to come."""


_NEVER_GIVEN = 1 << 63
"""Journal files are numbered one by one: a file of such a number is somebody else's, and none could follow it."""
_NOT_A_JOURNAL = {errno.EFBIG: "it has grown", errno.ELOOP: "it is a symbolic link"}
"""Error numbers of reading that say that a journal file has been tampered with."""
_Encoded = tuple[r.Record, int, bytes]
"""A record, its type and its payload."""


class JournalBroken(StorageError):
    """A journal write or sync failed: nothing can be promised any more; the daemon must end and be started again."""

    retry = False


@dataclass(frozen=True, slots=True)
class _Begun:
    """A journal file that records can be appended to behind `end`: `crc` and `sequence` are those of its last record."""

    fd: int
    number: int
    salt: bytes
    end: int
    crc: int
    sequence: int


@dataclass(frozen=True, slots=True)
class _Last:
    """The newest file as it was replayed: `good` are its bytes up to the end of the last good record."""

    number: int
    good: bytes
    salt: bytes
    crc: int
    sequence: int


class Journal:
    """`await append(record)` returns when it is durable. After JournalBroken every call raises it."""

    def __init__(self, fs: FileSystem, directory: int, pool: ThreadPoolExecutor) -> None:
        self._fs, self._directory, self._pool = fs, directory, pool
        self.state = r.JournalState()
        self.torn = self.corrupt = 0
        self.records = 0
        self._fd = -1
        self._number = 0
        self._salt = b""
        self._end = jf.FILE_SIZE
        self._crc = self._sequence = self._durable = 0
        self._files = JournalDirectory(fs, directory)
        self._whole = 0  # number of the newest file known to hold the whole state: files before it are not needed
        self._last: _Last | None = None
        self._waiting: list[tuple[_Encoded, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._posted: set[asyncio.Task[None]] = set()
        self._broken: JournalBroken | None = None
        self.on_broken: Callable[[JournalBroken], None] = lambda error: None

    @classmethod
    def open(cls, fs: FileSystem, directory: int, pool: ThreadPoolExecutor, *, strict: bool = False) -> Journal:
        """Replay what lies in `directory`. Nothing is written until `start`.

        Raises NewerFormat, StorageError for a file that cannot be read, or IntegrityError for corruption when `strict`. Without `strict` a
        corrupt file is set aside, `corrupt` is counted, and `state` holds what could be read: the caller rebuilds the rest by a scan.
        """
        journal, doing = cls(fs, directory, pool), "list the journal's directory"
        try:
            for number in journal._files.numbers():
                doing = f"read the journal file {names.journal_file(number)}"
                journal._replay(number, strict)
        except OSError as error:
            raise StorageError.of(doing, error) from None
        return journal

    def _replay(self, number: int, strict: bool) -> None:
        name = names.journal_file(number)
        state, scan, data, problem = r.JournalState(), None, b"", ""
        try:
            if number >= _NEVER_GIVEN:
                raise IntegrityError("no journal file was ever given such a number")
            self._number = number
            data = read_small(name, self._directory, jf.FILE_SIZE)
            scan = jf.scan(data, number)
            for record in scan.records:
                state = self._apply(state, record)
            if scan.ending is jf.Ending.CORRUPT:
                problem = "a record is damaged that was durable"
            elif len(data) < jf.FILE_SIZE:  # it was as long as that before it had its name
                problem = f"{len(data):,d} of {jf.FILE_SIZE:,d} bytes are there"
        except NewerFormat:
            raise
        except IntegrityError as error:
            scan, problem = None, str(error)
        except OSError as error:
            if error.errno not in _NOT_A_JOURNAL:
                raise
            problem = _NOT_A_JOURNAL[error.errno]
        if problem:
            if strict:
                raise IntegrityError(f"journal {name} is corrupt ({problem}); start without --strict-journal to rebuild it by a scan")
            self.corrupt += 1
            log.error("journal %s is corrupt (%s): set aside, state rebuilt from manifests and sealed slots", name, problem)
            if not data:
                self._files.move_aside(name)
            elif not self._files.copy_aside(name, data, ".corrupt") and scan is None:
                self._files.make_way(name)
        elif scan is not None and scan.ending is jf.Ending.TORN:
            self.torn += 1
            log.warning("journal %s has a torn tail after %d records: nothing acknowledged was in it", name, len(scan.records))
            self._files.copy_aside(name, data[scan.end :].rstrip(b"\0"), ".torn")
        self._last = None
        if scan is not None and scan.records:
            self._crc = scan.last_crc
            self.state = state
            self.records = len(scan.records)
            if len(data) == jf.FILE_SIZE:
                self._whole = number
                self._last = _Last(number, data[: scan.end], scan.header.salt, scan.last_crc, scan.records[-1].sequence)

    def _apply(self, state: r.JournalState, raw: jf.RawRecord) -> r.JournalState:
        try:
            if raw.type == r.STATE and raw.version <= jf.PAYLOAD_VERSION:
                return r.decode_state(raw.payload)
            if raw.type not in r.TYPES or raw.version > jf.PAYLOAD_VERSION:
                if raw.flags & jf.IGNORABLE:
                    return state
                raise NewerFormat(
                    f"the journal holds records of type {raw.type}, version {raw.version}, of a newer ckptd: upgrade this one"
                )
            state.apply(r.decode(raw.type, raw.payload))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise IntegrityError(f"a record of type {raw.type} cannot be read: {error}") from None
        return state

    def start(self, live: Collection[str] = ()) -> None:
        """Begin a new file with the whole state, then drop the old ones. Without room for it, go on in the newest one.

        Jobs that are not `live` and have nothing under way are forgotten: storage knows their attempts. Raises OSError.
        """
        self.state.forget_all_but(live)
        try:
            begun = self._begin()
        except OSError as error:
            if error.errno not in NO_ROOM or self._last is None:
                raise
            log.warning("%s: the journal goes on in its last file", StorageError.of("begin a new journal file", error))
            self._use(self._go_on(self._last))
        else:
            self._publish(begun)
        self._last = None

    async def append(self, *records: r.Record) -> None:
        """Append records, durable when it returns.

        Raises JournalBroken; StorageError if there is no room for a new file, if a record is too large, or, for a new save or deletion, if
        too many are under way: then none of the records is written.
        """
        if self._broken:
            raise self._broken
        encoded = [(record, *r.encode(record)) for record in records]
        self._check(encoded)
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in records]
        self._waiting += zip(encoded, futures, strict=True)
        if self._writer is None or self._writer.done():
            self._writer = watched(self._write_all(), "writing the journal")
        for result in await asyncio.gather(*futures, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def post(self, record: r.Record, done: Callable[[], object]) -> asyncio.Task[None]:
        """Append a record that nothing depends on, and call `done` once it is durable. Nobody needs to wait for the task.

        A record that finds no room is only logged. A broken journal ends the daemon by itself.
        """
        task = watched(self._post(record, done), "journaling")
        self._posted.add(task)  # a task that nobody has may be garbage before it is done
        task.add_done_callback(self._posted.discard)
        return task

    async def _post(self, record: r.Record, done: Callable[[], object]) -> None:
        try:
            await self.append(record)
            done()
        except JournalBroken:
            pass
        except (OSError, StorageError) as error:
            log.warning("a record is missing from the journal: %s", error)

    def _check(self, encoded: list[_Encoded]) -> None:
        for record, _, payload in encoded:
            if len(payload) > jf.MAX_PAYLOAD:
                kind = type(record).__name__
                raise StorageError(f"the journal cannot take a {kind} record of {len(payload):,d} bytes: {jf.MAX_PAYLOAD:,d} is the most")
        if any(isinstance(record, r.Staging | r.Retiring) for record, _, _ in encoded) and r.under_way(self.state) > MAX_UNDER_WAY:
            raise self._full()

    def _full(self) -> StorageError:
        staged, retiring = len(self.state.staged), len(self.state.retiring)
        return StorageError(
            f"the journal is full of {staged:,d} failed saves and {retiring:,d} deletions whose files could not be deleted: "
            "see the daemon's log for the reason, mend it, and restart ckptd"
        )

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            error: StorageError | None = self._broken
            try:
                if error is None:
                    records = [record for record, _ in batch]
                    await asyncio.get_running_loop().run_in_executor(self._pool, self._write_batch, records)
            except StorageError as problem:
                error = problem
            except Exception as problem:  # whatever it is, nobody may wait for ever, and nothing more is promised
                if not isinstance(problem, OSError):
                    log.exception("the journal's writer failed")
                broken = isinstance(problem, OSError) and JournalBroken.of("write the journal", problem)
                error = self._broken = broken or JournalBroken(f"cannot write the journal: {problem!r}")  # type: ignore[assignment]
                self.on_broken(self._broken)  # type: ignore[arg-type]
            for _, future in batch:
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    def _write_batch(self, batch: list[_Encoded]) -> None:
        """One write and one sync, or a few if the records do not fit into a file together."""
        group: list[_Encoded] = []
        size = 0
        for record, kind, payload in batch:
            needed = jf.RECORD_SIZE + len(payload) + 8
            if group and size + needed > jf.MAX_PAYLOAD:
                self._write_group(group, size)
                group, size = [], 0
            group.append((record, kind, payload))
            size += needed
        self._write_group(group, size)

    def _write_group(self, group: list[_Encoded], size: int) -> None:
        if self._end + size > jf.FILE_SIZE:
            try:
                begun = self._begin()
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise StorageError.of("begin a new journal file", error) from None
                raise
            self._publish(begun)
            if self._end + size > jf.FILE_SIZE:
                raise self._full()
        data, start, crc, sequence = bytearray(), self._end, self._crc, self._sequence
        for _, kind, payload in group:
            sequence += 1
            chunk, crc = jf.encode_record(self._salt, crc, jf.RawRecord(kind, 0, sequence, self._durable, payload))
            data += chunk
        failpoint("journal.writing")
        self._fs.write(self._fd, data, start)
        failpoint("journal.syncing")
        self._fs.sync_data(self._fd)
        failpoint("journal.synced")
        self._end, self._crc, self._sequence, self._durable = start + len(data), crc, sequence, sequence
        for record, _, _ in group:
            self.state.apply(record)

    def _begin(self) -> _Begun:
        """Write the whole state into a new file, durably, under its temporary name. Nothing else changes if that fails."""
        number = self._number + 1
        failpoint("journal.rotating")
        while not self._files.drop(names.journal_file(number) + TMP_SUFFIX):  # it is a directory
            number += 1
        header = jf.FileHeader(number, secrets.token_bytes(16), self._crc)
        data, crc, sequence = bytearray(header.encode()), header.crc, 0
        records, left_out = r.encode_whole(self.state, jf.MAX_STATE, jf.FILE_SIZE - jf.HEADER_SIZE - MARGIN)
        if left_out:
            log.warning(
                "the journal has no room for %d files of failed saves; they are deleted all the same if this daemon lives", left_out
            )
        for kind, payload in records:
            sequence += 1
            chunk, crc = jf.encode_record(header.salt, crc, jf.RawRecord(kind, 0, sequence, 0, payload))
            data += chunk
        fd = self._files.write_new(names.journal_file(number) + TMP_SUFFIX, bytes(data), self._whole)
        return _Begun(fd, number, header.salt, len(data), crc, sequence)

    def _publish(self, begun: _Begun) -> None:
        """Make the new file the journal, then drop the old ones."""
        name = names.journal_file(begun.number)
        try:
            self._fs.rename(name + TMP_SUFFIX, name, self._directory, replace=False)
            failpoint("journal.renamed")
            self._fs.sync_directory(self._directory)
        except BaseException:
            self._fs.close(begun.fd)
            raise
        self._use(begun)
        failpoint("journal.rotated")
        self._files.drop_before(begun.number)
        self._files.make_spare()

    def _use(self, begun: _Begun) -> None:
        if self._fd >= 0:
            self._fs.close(self._fd)
        self._fd, self._number, self._salt, self._whole = begun.fd, begun.number, begun.salt, begun.number
        self._end, self._crc, self._sequence, self._durable = begun.end, begun.crc, begun.sequence, begun.sequence

    def _go_on(self, last: _Last) -> _Begun:
        """Open the newest file to append to it. Its good records are written once more, in place, with zeros behind them, and synced.

        They are written since an earlier daemon's sync may have failed: then the page cache has them, and the disk has not.
        """
        fd = self._files.write_over(names.journal_file(last.number), last.good)
        self._fs.sync_directory(self._directory)  # the daemon that published it may have died before
        return _Begun(fd, last.number, last.salt, len(last.good), last.crc, last.sequence)

    async def close(self) -> None:
        if self._writer is not None:
            await asyncio.wait([self._writer])
        if self._fd >= 0:
            self._fs.close(self._fd)
            self._fd = -1
