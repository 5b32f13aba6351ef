"""Appends the daemon's records durably to journal files, and replays these files when
the daemon starts (FORMAT.md, section 7).

`Journal.open` replays the files that an earlier daemon left. `Journal.start` then
writes the whole state to a new file. It appends to an old file only if there is no room
for a new one. One task writes the journal: it collects the records that wait, writes
them with one fdatasync on a thread, and then wakes their callers.

The journal holds intents. The truth about checkpoints is in the manifests and in the
headers of sealed slots.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from ckptd.daemon.journal import file as jf
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.directory import JournalDirectory
from ckptd.daemon.tasks import watched
from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, NewerFormat, StorageError
from ckptd.shared.names import TMP_SUFFIX
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.fs import NO_ROOM, FileSystem, read_small

log = logging.getLogger("ckptd.journal")

MAX_UNDER_WAY = 1 << 20
"""The most bytes that the saves and deletions under way may take in the encoded state.

Beyond them, new ones are refused.

A journal file has room for twice as much.
"""
MARGIN = 256 << 10
"""Bytes that the first records of a new journal file leave free, at least, for later
records.
"""


_NEVER_GIVEN = 1 << 63
"""No journal file ever gets this number or a higher one, because the daemon numbers its
files one by one.

A file with such a number was not made by ckptd, and there might be no higher number
left for the next file.
"""
_NOT_A_JOURNAL = {errno.EFBIG: "it has grown", errno.ELOOP: "it is a symbolic link"}
"""Errors of a read which show that a journal file has been tampered with, and the
problem that each one stands for.
"""
_Encoded = tuple[r.Record, int, bytes]
"""A record, the number of its type, and its payload."""


class JournalBroken(StorageError):
    """A failure of the journal's writer, such as a failed write or sync.

    After it no record can be promised to be durable. The daemon must end and be started
    again.
    """

    retry = False


@dataclass(frozen=True, slots=True)
class _Begun:
    """An open journal file to append to.

    `end` is the offset behind its last record; `crc` and `sequence` are those of that
    record.
    """

    fd: int
    number: int
    salt: bytes
    end: int
    crc: int
    sequence: int


@dataclass(frozen=True, slots=True)
class _Last:
    """The newest journal file as it was replayed.

    `good` holds its bytes up to the end of its last good record; `crc` and `sequence`
    are those of that record.
    """

    number: int
    good: bytes
    salt: bytes
    crc: int
    sequence: int


class Journal:
    """The journal of one daemon.

    Call `open`, then `start`, then `append` and `post`, and `close` at the end.

    `state`: the state that all durable records add up to. `torn` and `corrupt`: how
    many of the replayed files had a torn tail, and how many were corrupt. `records`:
    how many records were read from the newest file that had any.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: int,
        pool: ThreadPoolExecutor,
        on_broken: Callable[[JournalBroken], None],
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._pool = pool
        self.state = r.JournalState()
        self.torn = self.corrupt = 0
        self.records = 0
        self._fd = -1
        self._number = 0
        self._salt = b""
        self._end = jf.FILE_SIZE
        self._crc = self._sequence = self._durable = 0
        self._files = JournalDirectory(fs, directory)
        # Number of the newest file that is known to hold the whole state: older files
        # are not needed.
        self._whole = 0
        self._last: _Last | None = None
        self._waiting: list[tuple[_Encoded, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._posted: set[asyncio.Task[None]] = set()
        self._broken: JournalBroken | None = None
        self._on_broken = on_broken

    @property
    def place(self) -> str:
        """The path of the journal's directory, or its descriptor if that has no path."""
        try:
            return os.readlink(f"/proc/self/fd/{self._directory}")
        except OSError:  # no /proc, or the directory of a test
            return f"descriptor {self._directory}"

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        directory: int,
        pool: ThreadPoolExecutor,
        *,
        strict: bool = False,
        on_broken: Callable[[JournalBroken], None] = lambda error: None,
    ) -> Journal:
        """Replay the journal files in `directory`, and return the journal.

        No record is written before `start`.

        on_broken: called on the event loop with the error if the writer fails. After
        that every `append` raises the same JournalBroken.

        A torn tail is copied aside. Without `strict` a corrupt file is copied or moved
        aside, and `state` holds the records that could be read: the caller rebuilds the
        rest by a scan of manifests and sealed slots.

        Raises NewerFormat if a newer ckptd wrote the journal, StorageError if a file
        cannot be read, and, with `strict`, IntegrityError if a file is corrupt.
        """
        journal, doing = cls(fs, directory, pool, on_broken), "list the journal's directory"
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
                raise IntegrityError(
                    "its number is higher than that of any journal file that ckptd makes"
                )
            self._number = number
            data = read_small(self._fs, name, self._directory, jf.FILE_SIZE)
            scan = jf.scan(data, number)
            for record in scan.records:
                state = self._apply(state, record)
            if scan.ending is jf.Ending.CORRUPT:
                problem = "a record that was durable is damaged"
            elif (
                len(data) < jf.FILE_SIZE
            ):  # a journal file has its full length before it gets its name
                problem = f"it has {len(data):,d} bytes; expected {jf.FILE_SIZE:,d}"
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
                raise IntegrityError(
                    f"journal {name} is corrupt ({problem}); start without --strict-journal to "
                    f"rebuild it by a scan"
                )
            self.corrupt += 1
            log.error(
                "journal %s is corrupt (%s): set aside, state rebuilt from manifests and sealed "
                "slots",
                name,
                problem,
            )
            if not data:
                self._files.move_aside(name)
            elif not self._files.copy_aside(name, data, ".corrupt") and scan is None:
                self._files.make_way(name)
        elif scan is not None and scan.ending is jf.Ending.TORN:
            self.torn += 1
            log.warning(
                "journal %s has a torn tail after %d records: nothing acknowledged was in it",
                name,
                len(scan.records),
            )
            self._files.copy_aside(name, data[scan.end :].rstrip(b"\0"), ".torn")
        self._last = None
        if scan is not None and scan.records:
            self._crc = scan.last_crc
            self.state = state
            self.records = len(scan.records)
            if len(data) == jf.FILE_SIZE:
                self._whole = number
                self._last = _Last(
                    number,
                    data[: scan.end],
                    scan.header.salt,
                    scan.last_crc,
                    scan.records[-1].sequence,
                )

    def _apply(self, state: r.JournalState, raw: jf.RawRecord) -> r.JournalState:
        try:
            if raw.type == r.STATE and raw.version <= jf.PAYLOAD_VERSION:
                return r.decode_state(raw.payload)
            if raw.type not in r.TYPES or raw.version > jf.PAYLOAD_VERSION:
                if raw.flags & jf.IGNORABLE:
                    return state
                raise NewerFormat(
                    f"the journal holds records of type {raw.type}, version {raw.version}, of a "
                    f"newer ckptd: upgrade this one"
                )
            state.apply(r.decode(raw.type, raw.payload))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise IntegrityError(f"a record of type {raw.type} cannot be read: {error}") from None
        return state

    def start(self, live: Collection[str] = ()) -> None:
        """Write the whole state to a new file, then drop the old files.

        If there is no room for a new file, append to the newest old one.

        Jobs that are not in `live` and have no save or deletion under way are removed
        from the state: storage knows their attempts. Raises OSError.
        """
        self.state.forget_all_but(live)
        try:
            begun = self._begin()
        except OSError as error:
            if error.errno not in NO_ROOM or self._last is None:
                raise
            log.warning(
                "%s: the journal continues in its last file",
                StorageError.of("begin a new journal file", error),
            )
            self._use(self._go_on(self._last))
        else:
            self._publish(begun)
        self._last = None

    async def append(self, *records: r.Record) -> None:
        """Append records, and return once they are durable.

        Raises JournalBroken if the journal's writer has failed. Raises StorageError if
        a record is too large, if there is no room for a new file, or if a record
        announces a save or deletion while too many are under way. After a StorageError
        none of the records has been written, unless more than `MAX_PAYLOAD` bytes of
        records were waiting: then some of them may have been.
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
        """Append a record that nothing depends on, and call `done` once it is durable.

        The caller need not await the returned task.

        If the record cannot be appended, the log says so and `done` is not called. A
        failure of the writer is left to `on_broken`.
        """
        task = watched(self._post(record, done), "journaling")
        # Asyncio has only a weak reference: without this one the task could be
        # collected before it ends.
        self._posted.add(task)
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
                raise StorageError(
                    f"the journal cannot hold a {kind} record of {len(payload):,d} bytes; "
                    f"expected at most {jf.MAX_PAYLOAD:,d}"
                )
        if (
            any(isinstance(record, r.Staging | r.Retiring) for record, _, _ in encoded)
            and r.under_way(self.state) > MAX_UNDER_WAY
        ):
            raise self._full()

    def _full(self) -> StorageError:
        staged, retiring = len(self.state.staged), len(self.state.retiring)
        return StorageError(
            f"the journal is full of {staged:,d} failed saves and {retiring:,d} deletions whose "
            f"files could not be deleted: "
            "see the daemon's log for the reason, fix it, and restart ckptd"
        )

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            error: StorageError | None = self._broken
            try:
                if error is None:
                    await asyncio.get_running_loop().run_in_executor(
                        self._pool, self._write_batch, [record for record, _ in batch]
                    )
            except StorageError as problem:
                error = problem
            # whatever it is, no caller may wait for ever, and no later record may count
            # as durable
            except Exception as problem:
                if not isinstance(problem, OSError):
                    log.exception("the journal's writer failed")
                broken = isinstance(problem, OSError) and JournalBroken.of(
                    "write the journal", problem
                )
                error = self._broken = broken or JournalBroken(
                    f"cannot write the journal: {problem!r}"
                )  # type: ignore[assignment]
                self._on_broken(self._broken)  # type: ignore[arg-type]
            for _, future in batch:
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    def _write_batch(self, batch: list[_Encoded]) -> None:
        """Write records durably, in groups of about `MAX_PAYLOAD` bytes at most.

        Each group takes one write and one sync.
        """
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
            chunk, crc = jf.encode_record(
                self._salt, crc, jf.RawRecord(kind, 0, sequence, self._durable, payload)
            )
            data += chunk
        failpoint("journal.writing")
        self._fs.write(self._fd, data, start)
        failpoint("journal.syncing")
        self._fs.sync_data(self._fd)
        failpoint("journal.synced")
        self._end = start + len(data)
        self._crc = crc
        self._sequence = sequence
        self._durable = sequence
        for record, _, _ in group:
            self.state.apply(record)

    def _begin(self) -> _Begun:
        """Write the whole state durably to a new file under a temporary name, and
        return it. If that fails, the journal stays as it is.
        """
        number = self._number + 1
        failpoint("journal.rotating")
        # A directory has this name: try the next number.
        while not self._files.drop(names.journal_file(number) + TMP_SUFFIX):
            number += 1
        header = jf.FileHeader(number, secrets.token_bytes(16), self._crc)
        data, crc, sequence = bytearray(header.encode()), header.crc, 0
        records, left_out = r.encode_whole(
            self.state, jf.MAX_STATE, jf.FILE_SIZE - jf.HEADER_SIZE - MARGIN
        )
        if left_out:
            log.warning(
                "the journal has no room for the names of %d files of failed saves; "
                "if this daemon dies before it has deleted them, they stay",
                left_out,
            )
        for kind, payload in records:
            sequence += 1
            chunk, crc = jf.encode_record(
                header.salt, crc, jf.RawRecord(kind, 0, sequence, 0, payload)
            )
            data += chunk
        fd = self._files.write_new(
            names.journal_file(number) + TMP_SUFFIX, bytes(data), self._whole
        )
        return _Begun(fd, number, header.salt, len(data), crc, sequence)

    def _publish(self, begun: _Begun) -> None:
        """Rename a new file to its final name, append to it from now on, and drop the
        old files.
        """
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
        self._fd = begun.fd
        self._number = begun.number
        self._salt = begun.salt
        self._whole = begun.number
        self._end = begun.end
        self._crc = begun.crc
        self._sequence = begun.sequence
        self._durable = begun.sequence

    def _go_on(self, last: _Last) -> _Begun:
        """Open the newest file to append to it.

        Before that, write its good records again in place, with zeros behind them, and
        sync.

        Writing them again is necessary because a sync of an earlier daemon may have
        failed: then the records are in the page cache, but not on the disk.
        """
        fd = self._files.write_over(names.journal_file(last.number), last.good)
        # The daemon that renamed the file may have died before it synced the name.
        self._fs.sync_directory(self._directory)
        return _Begun(fd, last.number, last.salt, len(last.good), last.crc, last.sequence)

    async def close(self) -> None:
        if self._writer is not None:
            await asyncio.wait([self._writer])
        if self._fd >= 0:
            self._fs.close(self._fd)
            self._fd = -1
