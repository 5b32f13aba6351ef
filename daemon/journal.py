"""The journal: appends records durably, one writer, and starts again after any death (FORMAT.md, section 7).

A batch of records is one write and one fdatasync on a thread; then the waiters wake. It is opened by `Journal.open`, which replays what is
there and begins a new file with the whole state; an old file is never appended to. It holds intents; what is true about checkpoints
stands in manifests and sealed headers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ckptd.daemon import journal_file as jf
from ckptd.daemon import records as r
from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, NewerFormat, StorageError
from ckptd.shared.failpoints import failpoint
from ckptd.shared.fs import FileSystem, read_small
from ckptd.shared.names import TMP_SUFFIX

log = logging.getLogger("ckptd.journal")


class JournalBroken(StorageError):
    """A journal write or sync failed: nothing can be promised any more; the daemon must end and be started again."""

    retry = False


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
        self._waiting: list[tuple[r.Record, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._broken: JournalBroken | None = None
        self.on_broken: Callable[[JournalBroken], None] = lambda error: None

    @classmethod
    def open(cls, fs: FileSystem, directory: int, pool: ThreadPoolExecutor, *, strict: bool = False) -> Journal:
        """Replay what lies in `directory`. Nothing is written until `start`.

        Raises NewerFormat, or IntegrityError for corruption when `strict`. Without it a corrupt file is set aside, `corrupt` is counted,
        and `state` holds what could be read: the caller rebuilds the rest by a scan.
        """
        journal = cls(fs, directory, pool)
        for number in sorted(n for name in os.listdir(directory) if (n := names.parse_journal_file(name)) is not None):
            journal._replay(number, strict)
            journal._number = number
        return journal

    def _replay(self, number: int, strict: bool) -> None:
        name = names.journal_file(number)
        state, scan, data, problem = r.JournalState(), None, b"", ""
        try:
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
            if error.errno != errno.EFBIG:
                raise
            problem = "it has grown"
        if problem:
            if strict:
                raise IntegrityError(f"journal {name} is corrupt ({problem}); start without --strict-journal to rebuild it by a scan")
            self.corrupt += 1
            if data:
                self._set_aside(name, data, ".corrupt")
            else:
                self._fs.rename(name, f"{name}.corrupt.{secrets.token_hex(4)}", self._directory, replace=False)
            log.error("journal %s is corrupt (%s): set aside, state rebuilt from manifests and sealed slots", name, problem)
        elif scan is not None and scan.ending is jf.Ending.TORN:
            self.torn += 1
            self._set_aside(name, data[scan.end :].rstrip(b"\0"), ".torn")
            log.warning("journal %s has a torn tail after %d records: nothing acknowledged was in it", name, len(scan.records))
        if scan is not None and scan.records:
            self._crc = scan.last_crc
            self.state = state
            self.records = len(scan.records)

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

    def _set_aside(self, name: str, data: bytes, suffix: str) -> None:
        fd = self._fs.create(f"{name}{suffix}.{secrets.token_hex(4)}", self._directory)
        try:
            self._fs.write(fd, data, 0)
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)

    def start(self, live: Collection[str] = ()) -> None:
        """Begin a new file with the whole state, then drop the old ones. Jobs that are not `live` and have nothing under way are
        forgotten: storage knows their attempts. Raises OSError."""
        self.state.forget_all_but(live)
        self._rotate()

    async def append(self, *records: r.Record) -> None:
        """Durable when it returns. Raises JournalBroken; StorageError (retry) if there is no room for a new file."""
        if self._broken:
            raise self._broken
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in records]
        self._waiting += zip(records, futures, strict=True)
        if self._writer is None or self._writer.done():
            self._writer = loop.create_task(self._write_all())
        for result in await asyncio.gather(*futures, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

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

    def _write_batch(self, batch: list[r.Record]) -> None:
        """One write and one sync, or a few if the records do not fit into a file together."""
        group: list[tuple[r.Record, int, bytes]] = []
        size = 0
        for record in batch:
            kind, payload = r.encode(record)
            needed = jf.RECORD_SIZE + len(payload) + 8
            if group and size + needed > jf.MAX_PAYLOAD:
                self._write_group(group, size)
                group, size = [], 0
            group.append((record, kind, payload))
            size += needed
        self._write_group(group, size)

    def _write_group(self, group: list[tuple[r.Record, int, bytes]], size: int) -> None:
        if self._end + size > jf.FILE_SIZE:
            try:
                self._rotate()
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StorageError.of("begin a new journal file", error) from None
                raise
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

    def _rotate(self) -> None:
        number = self._number + 1
        header = jf.FileHeader(number, secrets.token_bytes(16), self._crc)
        state, crc = jf.encode_record(header.salt, header.crc, jf.RawRecord(r.STATE, 0, 1, 0, r.encode_state(self.state)))
        name = names.journal_file(number)
        temporary = name + TMP_SUFFIX
        failpoint("journal.rotating")
        try:
            self._fs.unlink(temporary, self._directory)
        except FileNotFoundError:
            pass
        fd = self._fs.create(temporary, self._directory, mode=0o600)
        try:
            self._fs.allocate(fd, jf.FILE_SIZE)
            self._fs.write(fd, header.encode() + state, 0)
            self._fs.sync(fd)
            self._fs.rename(temporary, name, self._directory, replace=False)
            failpoint("journal.renamed")
            self._fs.sync_directory(self._directory)
        except BaseException:
            self._fs.close(fd)
            raise
        if self._fd >= 0:
            self._fs.close(self._fd)
        self._fd, self._number, self._salt = fd, number, header.salt
        self._end, self._crc, self._sequence, self._durable = jf.HEADER_SIZE + len(state), crc, 1, 1
        failpoint("journal.rotated")
        replaced = False
        for old in os.listdir(self._directory):
            parsed = names.parse_journal_file(old.removesuffix(TMP_SUFFIX))
            if parsed is not None and parsed < number:
                self._fs.unlink(old, self._directory)
                replaced = True
        if replaced:
            self._fs.sync_directory(self._directory)  # or power cuts, one soon after the other, would pile them up

    async def close(self) -> None:
        if self._writer is not None:
            await asyncio.wait([self._writer])
        if self._fd >= 0:
            self._fs.close(self._fd)
            self._fd = -1
