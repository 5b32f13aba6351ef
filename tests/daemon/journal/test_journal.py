"""Tests the journal on a real file system, and on one that fails on command."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from ckptd.daemon.journal import file as jf
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.directory import JournalDirectory
from ckptd.daemon.journal.journal import MAX_UNDER_WAY, Journal, JournalBroken
from ckptd.shared.errors import IntegrityError, NewerFormat, StorageError
from ckptd.shared.system import failpoints
from ckptd.shared.system.fs import Buffer, FileSystem, PosixFileSystem
from tests.shared.samples import flip, resealed

FIRST = "0000000000000001.log"
SECOND = "0000000000000002.log"
THIRD = "0000000000000003.log"
SPARE = "spare"
HANG = 5.0  # seconds after which a call counts as hanging


class FaultyFileSystem(PosixFileSystem):
    """A file system with faults.

    `faults[call]` is called before each such call, and may raise. `calls` lists the
    calls that changed anything.
    """

    def __init__(self) -> None:
        self.faults: dict[str, Callable[[], None]] = {}
        self.calls: list[str] = []

    def _pass(self, call: str) -> None:
        self.calls.append(call)
        self.faults.get(call, lambda: None)()

    def create(self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666) -> int:
        self._pass("create")
        return super().create(name, directory, direct=direct, mode=mode)

    def allocate(self, fd: int, length: int) -> None:
        self._pass("allocate")
        super().allocate(fd, length)

    def write(self, fd: int, data: Buffer, offset: int) -> None:
        self._pass("write")
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._pass("sync")
        super().sync(fd)

    def sync_data(self, fd: int) -> None:
        self._pass("sync_data")
        super().sync_data(fd)

    def sync_directory(self, directory: int) -> None:
        self._pass("sync_directory")
        super().sync_directory(directory)

    def rename(self, old: str, new: str, directory: int, *, replace: bool) -> None:
        self._pass("rename")
        super().rename(old, new, directory, replace=replace)

    def link(self, old: str, old_directory: int, new: str, directory: int) -> None:
        self._pass("link")
        super().link(old, old_directory, new, directory)

    def unlink(self, name: str, directory: int) -> None:
        super().unlink(name, directory)
        self._pass("unlink")


def fail(number: int) -> Callable[[], None]:
    def raise_it() -> None:
        raise OSError(number, os.strerror(number))

    return raise_it


class Place:
    """A directory for journals, and access to its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.pool = ThreadPoolExecutor(2)
        self.fs = FaultyFileSystem()
        self.told: list[JournalBroken] = []
        self._opened: list[Journal] = []

    def open(self, *, strict: bool = False, fs: FileSystem | None = None) -> Journal:
        journal = Journal.open(
            fs or self.fs, self.fd, self.pool, strict=strict, on_broken=self.told.append
        )
        self._opened.append(journal)
        return journal

    def started(self, *live: str) -> Journal:
        """Open and start a journal, as a daemon does whose storage holds the jobs
        `live`.
        """
        journal = self.open()
        journal.start(live or ("gpt",))
        return journal

    def names(self) -> list[str]:
        """Return all names except that of the spare."""
        return sorted(path.name for path in self.path.iterdir() if path.name != SPARE)

    @property
    def spare(self) -> Path:
        return self.path / SPARE

    def contents(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.path.iterdir()}

    def scan(self, name: str = FIRST) -> jf.Scan:
        return jf.scan((self.path / name).read_bytes(), int(name[:16], 16))

    def add(self, *records: jf.RawRecord, name: str = FIRST, version: int = 1) -> None:
        """Append records to a file while no journal has it open, as another version of
        ckptd would.
        """
        data, found = bytearray((self.path / name).read_bytes()), self.scan(name)
        end, crc = found.end, found.last_crc
        for record in records:
            encoded, crc = jf.encode_record(found.header.salt, crc, record)
            if version != 1:
                head = bytearray(encoded)
                head[14:16] = version.to_bytes(2, "little")
                crc = crc32c(
                    bytes(head[4 : jf.RECORD_SIZE + len(record.payload)]), crc32c(found.header.salt)
                )
                head[:4] = crc.to_bytes(4, "little")
                encoded = bytes(head)
            data[end : end + len(encoded)] = encoded
            end += len(encoded)
        (self.path / name).write_bytes(data)

    def close(self) -> None:
        for journal in self._opened:
            if journal._fd >= 0:
                os.close(journal._fd)
        self.pool.shutdown()
        os.close(self.fd)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    failpoints.arm("")
    made.close()


def begun(attempt: int, job: str = "gpt") -> r.Begun:
    return r.Begun(job=job, attempt=attempt, world_size=2)


def staging(number: int) -> r.Staging:
    return r.Staging(
        job="gpt",
        attempt=1,
        step=number,
        rank=0,
        tag=f"step-{number:08d}.a0001",
        file=f"file-{number}",
    )


def bulky(number: int, length: int = 900_000) -> r.Dropped:
    """Return a large record that leaves nothing in the state."""
    return r.Dropped(
        job="gpt", attempt=1, step=number, tag=f"t{number}", reason=f"{number}" + "x" * length
    )


def decoded(scan: jf.Scan) -> list[r.Record]:
    """Return all records behind the STATE record."""
    return [r.decode(record.type, record.payload) for record in scan.records[1:]]


async def ended(journal: Journal, call: asyncio.Task[None]) -> BaseException | None:
    """Return what a call raised.

    Fails the test if the call neither returned nor raised.
    """
    await asyncio.wait([call], timeout=HANG)
    if not call.done():
        writer = journal._writer
        died_of = writer.exception() if writer is not None and writer.done() else None
        call.cancel()
        pytest.fail(f"append hangs; its writer died of {died_of!r}")
    return call.exception()


# -- normal operation


async def test_a_new_journal_is_one_file_with_an_empty_state(place: Place) -> None:
    journal = place.open()
    assert place.names() == []
    assert journal.state == r.JournalState()
    journal.start(["gpt"])
    assert place.names() == [FIRST]
    path = place.path / FIRST
    assert path.stat().st_size == jf.FILE_SIZE == 4 << 20
    assert path.stat().st_blocks * 512 >= jf.FILE_SIZE  # preallocated, not sparse
    assert path.stat().st_mode & 0o777 == 0o600
    found = place.scan()
    assert found.header == jf.FileHeader(1, found.header.salt, 0)
    assert found.records == [jf.RawRecord(r.STATE, 0, 1, 0, r.encode_state(r.JournalState()))]
    assert found.ending is jf.Ending.CLEAN
    await journal.close()


async def test_appended_records_survive_a_death(place: Place) -> None:
    journal = place.started()
    await journal.append(begun(1))
    await journal.append(staging(5), staging(6))
    state = journal.state
    assert state.jobs["gpt"].attempt == 1
    assert set(state.staged) == {"gpt/step-00000005.a0001", "gpt/step-00000006.a0001"}
    found = place.scan()
    assert [(record.sequence, record.durable) for record in found.records] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 2),
    ]
    assert decoded(found) == [begun(1), staging(5), staging(6)]

    again = place.open()  # the first journal was never closed
    assert (again.state, again.records, again.torn, again.corrupt) == (state, 4, 0, 0)


async def test_a_new_daemon_begins_a_new_file_with_the_whole_state(place: Place) -> None:
    journal = place.started()
    await journal.append(begun(3), staging(5))
    await journal.close()
    before = place.contents()
    again = place.open()
    assert place.contents() == before  # opening alone changes nothing
    again.start(["gpt"])
    assert place.names() == [SECOND]
    assert [record.type for record in place.scan(SECOND).records] == [r.STATE]
    assert r.decode_state(place.scan(SECOND).records[0].payload) == journal.state == again.state
    await again.append(begun(4))
    assert place.open().state.jobs["gpt"].attempt == 4
    assert place.scan(SECOND).header.salt != jf.scan(before[FIRST], 1).header.salt


async def test_a_file_is_never_reused(place: Place) -> None:
    for number in range(1, 6):
        journal = place.started()
        await journal.append(begun(number))
        await journal.close()
        assert place.names() == [f"{number:016x}.log"]
    assert place.open().state.jobs["gpt"].attempt == 5


async def test_an_existing_file_is_never_replaced(place: Place) -> None:
    journal = place.open()
    (place.path / FIRST).write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        journal.start(["gpt"])
    assert (place.path / FIRST).read_bytes() == b"somebody's"


async def test_records_appended_at_once_share_one_write_and_one_sync(place: Place) -> None:
    journal = place.started()
    place.fs.calls.clear()
    await asyncio.gather(*(journal.append(staging(n)) for n in range(50)))
    assert place.fs.calls == ["write", "sync_data"]
    assert decoded(place.scan()) == [staging(n) for n in range(50)]
    assert {record.durable for record in place.scan().records[1:]} == {1}


async def test_nothing_is_acknowledged_before_the_sync(place: Place) -> None:
    journal = place.started()
    reached, go_on = threading.Event(), threading.Event()

    def stall() -> None:
        reached.set()
        assert go_on.wait(HANG)

    place.fs.faults["sync_data"] = stall
    task = asyncio.create_task(journal.append(begun(1)))
    await asyncio.get_running_loop().run_in_executor(None, reached.wait, HANG)
    assert not task.done()
    assert journal.state == r.JournalState()
    go_on.set()
    await task
    assert journal.state.jobs["gpt"].attempt == 1


async def test_a_cancelled_append_does_not_fail_the_others(place: Place) -> None:
    journal = place.started()
    first, second = (
        asyncio.create_task(journal.append(begun(1))),
        asyncio.create_task(journal.append(staging(1))),
    )
    await asyncio.sleep(0)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    await journal.append(staging(2))
    assert decoded(place.scan()) == [begun(1), staging(1), staging(2)]


async def test_an_append_of_no_records_writes_nothing(place: Place) -> None:
    journal = place.started()
    place.fs.calls.clear()
    await journal.append()
    assert place.fs.calls == []


async def test_close_waits_for_appends_under_way(place: Place) -> None:
    journal = place.started()
    task = asyncio.create_task(journal.append(begun(1)))
    await asyncio.sleep(0)
    await journal.close()
    await task
    assert decoded(place.scan()) == [begun(1)]


# -- rotation


async def test_a_full_file_is_followed_by_another(place: Place) -> None:
    journal = place.started()
    await journal.append(begun(1), staging(5))
    for number in range(9):
        await journal.append(bulky(number))
    assert place.names() == ["0000000000000003.log"]
    assert {path.stat().st_size for path in place.path.iterdir()} == {jf.FILE_SIZE}
    found = place.scan("0000000000000003.log")
    assert r.decode_state(found.records[0].payload) == journal.state
    assert decoded(found) == [bulky(8)]
    assert [(record.sequence, record.durable) for record in found.records] == [(1, 0), (2, 1)]
    again = place.open()
    assert again.state == journal.state
    assert again.state.staged == {"gpt/step-00000005.a0001": {"file-5": None}}


async def test_files_are_chained(place: Place) -> None:
    """FORMAT.md, section 7: the header holds the crc of the last record of the file
    before.
    """
    journal = place.started()
    for number in range(4):
        await journal.append(bulky(number))
    last = place.scan().last_crc
    await journal.append(bulky(4))
    assert place.names() == [SECOND]
    assert place.scan(SECOND).header.previous_crc == last != 0


async def test_files_are_chained_over_a_restart(place: Place) -> None:
    journal = place.started()
    await journal.append(begun(1))
    last = place.scan().last_crc
    place.started()
    assert place.scan(SECOND).header.previous_crc == last != 0


async def test_the_new_file_is_durable_before_the_old_one_is_removed(place: Place) -> None:
    journal = place.started()
    await journal.append(begun(1))
    place.fs.calls.clear()
    place.started()
    assert place.fs.calls == [
        "create",
        "allocate",
        "write",
        "sync",
        "rename",
        "sync_directory",
        "unlink",
        "sync_directory",
    ]


async def test_a_death_between_the_new_file_and_the_removal_of_the_old_loses_nothing(
    place: Place,
) -> None:
    journal = place.started()
    await journal.append(begun(1))
    old = (place.path / FIRST).read_bytes()
    place.started()
    (place.path / FIRST).write_bytes(old)
    (place.path / "0000000000000003.log.tmp").write_bytes(b"half of a file")
    again = place.open()
    assert (again.state, again.corrupt, again.torn) == (journal.state, 0, 0)
    again.start(["gpt"])
    assert place.names() == ["0000000000000003.log"]


async def test_strange_files_are_left_alone(place: Place) -> None:
    for name in ("notes.txt", "1.log", "0000000000000001.log.bak", "x.tmp"):
        (place.path / name).write_text("mine")
    journal = place.started()
    await journal.append(begun(1))
    place.started()
    assert place.names() == ["0000000000000001.log.bak", SECOND, "1.log", "notes.txt", "x.tmp"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_without_room_for_a_new_file_and_without_a_spare_the_caller_may_retry(
    place: Place, number: int
) -> None:
    journal = place.started()
    await journal.append(begun(1))
    for n in range(4):
        await journal.append(bulky(n))
    place.spare.unlink()
    for call in ("allocate", "create", "write", "sync"):
        place.fs.faults = {call: fail(number)}
        with pytest.raises(StorageError, match="cannot begin a new journal file") as caught:
            await journal.append(bulky(4))
        assert not isinstance(caught.value, JournalBroken)
        assert (caught.value.retry, caught.value.errno) == (True, number)
    assert FIRST in place.names()
    assert len(decoded(place.scan())) == 5
    place.fs.faults = {}
    await journal.append(bulky(4))
    await journal.append(begun(2))
    assert place.names() == [SECOND]
    assert decoded(place.scan(SECOND)) == [bulky(4), begun(2)]
    assert place.open().state == journal.state


async def test_a_small_record_still_fits_when_there_is_no_room_for_a_new_file(place: Place) -> None:
    journal = place.started()
    for n in range(4):
        await journal.append(bulky(n))
    place.spare.unlink()
    place.fs.faults = {"allocate": fail(errno.ENOSPC)}
    with pytest.raises(StorageError):
        await journal.append(bulky(4))
    await journal.append(begun(1))
    assert decoded(place.scan())[-1] == begun(1)


async def test_the_first_start_without_room_raises_the_systems_error(place: Place) -> None:
    place.fs.faults = {"allocate": fail(errno.ENOSPC)}
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        place.open().start(["gpt"])
    assert place.names() == []


# -- a full disk


def no_room(place: Place, number: int = errno.ENOSPC) -> None:
    """Make the disk full: files cannot be created or grow, and only allocated space can
    be written.
    """
    place.fs.faults = {"create": fail(number), "allocate": fail(number)}


async def test_a_first_start_makes_a_spare_and_a_later_file_takes_its_place_only_on_a_full_disk(
    place: Place,
) -> None:
    journal = place.started()
    made = ["create", "allocate", "write", "sync", "rename", "sync_directory"]
    assert place.fs.calls == made * 2
    assert place.spare.stat().st_size == jf.FILE_SIZE
    assert place.spare.stat().st_blocks * 512 >= jf.FILE_SIZE
    assert place.spare.stat().st_mode & 0o777 == 0o600
    inode = place.spare.stat().st_ino
    await journal.append(begun(1))
    place.started()
    assert (place.names(), place.spare.stat().st_ino) == ([SECOND], inode)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["create", "allocate"])
async def test_on_a_full_disk_the_spare_becomes_the_new_file_and_the_old_one_the_spare(
    place: Place, call: str, number: int
) -> None:
    journal = place.started()
    await journal.append(begun(1))
    spare, first = place.spare.stat().st_ino, (place.path / FIRST).stat().st_ino
    place.spare.write_bytes(b"\xff" * jf.FILE_SIZE)
    place.fs.faults = {call: fail(number)}
    place.fs.calls.clear()
    again = place.started()
    made = {"create": [], "allocate": ["allocate", "unlink"]}[call]
    steps = [
        "rename",
        "sync_directory",
        "write",
        "sync",
        "rename",
        "sync_directory",
        "rename",
        "sync_directory",
    ]
    assert place.fs.calls == ["create", *made, *steps]
    assert (place.names(), (place.path / SECOND).stat().st_ino, place.spare.stat().st_ino) == (
        [SECOND],
        spare,
        first,
    )
    for n in range(30):  # several times in a row
        await again.append(begun(n), bulky(n))
    assert place.open().state.jobs["gpt"].attempt == 29
    assert place.open().state == again.state
    assert int(place.names()[0][:16], 16) > 5


async def test_a_half_made_file_from_the_spare_becomes_the_spare_again_after_a_death(
    place: Place,
) -> None:
    journal = place.started()
    await journal.append(begun(1))
    place.spare.rename(place.path / f"{SECOND}.tmp")
    no_room(place)
    again = place.started()
    assert place.names() == [SECOND]
    assert place.spare.stat().st_size == jf.FILE_SIZE
    await again.append(begun(2))
    assert place.open().state.jobs["gpt"].attempt == 2


async def test_a_superseded_file_is_used_as_a_spare(place: Place) -> None:
    """A death came between the publication of the second file and the removal of the
    first.
    """
    journal = place.started()
    old = (place.path / FIRST).read_bytes()
    await journal.append(begun(1))
    again = place.started()
    await again.append(begun(2))
    (place.path / FIRST).write_bytes(old)
    place.spare.unlink()
    no_room(place)
    place.fs.calls.clear()
    third = place.started()
    # The name of the second file is durable before the first one is renamed, and the
    # new name is durable before the file is overwritten.
    assert place.fs.calls[:8] == [
        "create",
        "sync_directory",
        "rename",
        "sync_directory",
        "rename",
        "sync_directory",
        "write",
        "sync",
    ]
    assert place.names() == [THIRD]
    assert place.spare.exists()
    assert third.state.jobs["gpt"].attempt == 2
    assert place.open().state == third.state


def sabotage_link(place: Place) -> None:
    place.spare.unlink()
    (place.path / "mine").write_bytes(bytes(jf.FILE_SIZE))
    place.spare.symlink_to("mine")


def sabotage_second_name(place: Place) -> None:
    os.link(place.spare, place.path / "mine")


def sabotage_fifo(place: Place) -> None:
    place.spare.unlink()
    os.mkfifo(place.spare)


def sabotage_length(place: Place) -> None:
    os.truncate(place.spare, jf.FILE_SIZE - 1)


def sabotage_owner(place: Place) -> None:
    os.chown(place.spare, 12345, -1)


def sabotage_directory(place: Place) -> None:
    place.spare.unlink()
    place.spare.mkdir()


SABOTAGE = [
    sabotage_link,
    sabotage_second_name,
    sabotage_fifo,
    sabotage_length,
    sabotage_owner,
    sabotage_directory,
]


def content_of_mine(place: Place) -> bytes | None:
    mine = place.path / "mine"
    return mine.read_bytes() if mine.exists() else None


@pytest.mark.parametrize("sabotage", SABOTAGE)
async def test_a_file_that_is_unfit_as_a_spare_is_not_written_to(
    place: Place, sabotage: Callable[[Place], None]
) -> None:
    if sabotage is sabotage_owner and os.getuid():
        pytest.skip("only root gives a file to somebody else")
    journal = place.started()
    await journal.append(begun(1))
    sabotage(place)
    before = content_of_mine(place)
    no_room(place)
    again = place.started()  # the journal continues in its last file
    await again.append(begun(2))
    assert FIRST in place.names()
    place.fs.faults = {}
    third = place.started()
    await third.append(begun(3))
    assert place.open().state.jobs["gpt"].attempt == 3
    if sabotage is not sabotage_directory:
        assert place.spare.lstat().st_size == jf.FILE_SIZE
        assert place.spare.lstat().st_nlink == 1
    assert content_of_mine(place) == before
    no_room(place)
    if sabotage is not sabotage_directory:
        place.started()
        assert "0000000000000003.log" in place.names()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["create", "allocate", "sync", "rename", "sync_directory"])
async def test_a_spare_that_cannot_be_made_is_no_error(
    place: Place, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = JournalDirectory.make_spare

    def failing(self: JournalDirectory) -> None:
        place.fs.faults = {call: fail(number)}
        make(self)

    monkeypatch.setattr(JournalDirectory, "make_spare", failing)
    journal = place.started()
    place.fs.faults = {}
    await journal.append(begun(1))
    assert [name for name in place.names() if name.endswith(".tmp")] == []
    assert place.open().state.jobs["gpt"].attempt == 1
    monkeypatch.undo()
    place.started()
    assert place.spare.stat().st_size == jf.FILE_SIZE


async def test_half_a_spare_that_cannot_be_deleted_is_no_error(place: Place) -> None:
    (place.path / f"{SPARE}.tmp").mkdir()
    journal = place.started()
    await journal.append(begun(1))
    assert not place.spare.exists()


# -- a full disk without a spare


async def test_without_a_spare_the_journal_continues_in_its_last_file(place: Place) -> None:
    journal = place.started()
    await journal.append(begun(1), staging(5))
    place.spare.unlink()
    no_room(place)
    again = place.started()
    assert (place.names(), again.state) == ([FIRST], journal.state)
    await again.append(begun(2))
    found = place.scan()
    assert [(record.sequence, record.durable) for record in found.records] == [
        (1, 0),
        (2, 1),
        (3, 1),
        (4, 3),
    ]
    assert found.ending is jf.Ending.CLEAN
    third = place.started()
    assert third.state.jobs["gpt"].attempt == 2
    place.fs.faults = {}
    place.started()
    assert (place.names(), place.spare.exists()) == ([SECOND], True)


async def test_a_last_file_that_is_continued_is_rewritten_and_synced(place: Place) -> None:
    """After a failed sync, the page cache may hold data that the disk does not have."""
    data = await _written(place)
    place.spare.unlink()
    no_room(place)
    written: list[tuple[int, bytes]] = []
    write = PosixFileSystem.write
    place.fs.write = lambda fd, data, offset: (  # type: ignore[method-assign]
        written.append((offset, bytes(data))),  # type: ignore[func-returns-value]
        write(place.fs, fd, data, offset),
    )[1]
    place.fs.calls.clear()
    place.started()
    assert written == [(0, data)]
    assert place.fs.calls == ["create", "sync_directory", "sync", "sync_directory"]


async def test_a_torn_tail_is_zeroed_before_the_last_file_is_continued(place: Place) -> None:
    data = await _written(place)
    end = place.scan().end
    (place.path / FIRST).write_bytes(
        data[:end] + b"half a record" + b"\xff" * (len(data) - end - 13)
    )
    place.spare.unlink()
    no_room(place)
    journal = place.started()
    assert (journal.torn, journal.records, place.names()) == (1, 6, [FIRST])
    assert (place.path / FIRST).read_bytes() == data
    await journal.append(begun(2))
    again = place.open(strict=True)
    assert (again.torn, again.state.jobs["gpt"].attempt, len(again.state.staged)) == (0, 2, 4)


async def test_a_corrupt_file_is_continued_behind_its_readable_records(place: Place) -> None:
    data = await _written(place)
    records = place.scan().records
    third = jf.HEADER_SIZE + sum(
        -(-(jf.RECORD_SIZE + len(record.payload)) // 8) * 8 for record in records[:3]
    )
    (place.path / FIRST).write_bytes(flip(data, 8 * (third + 40)))
    place.spare.unlink()
    no_room(place)
    journal = place.started()
    assert (journal.corrupt, journal.records, place.names()) == (1, 3, [FIRST])
    await journal.append(begun(2))
    again = place.open(strict=True)
    assert (again.state.jobs["gpt"].attempt, list(again.state.staged)) == (
        2,
        ["gpt/step-00000000.a0001"],
    )


async def test_a_file_without_readable_records_becomes_the_new_file(place: Place) -> None:
    (place.path / FIRST).write_bytes(bytes(len(await _written(place))))
    place.spare.unlink()
    no_room(place)
    journal = place.started()
    await journal.append(begun(2))
    assert (journal.corrupt, place.names()) == (1, [SECOND])
    assert place.open(strict=True).state.jobs["gpt"].attempt == 2


@pytest.mark.parametrize("damage", ["unreadable with a spare", "cut"])
async def test_a_corrupt_file_is_moved_aside_where_it_cannot_be_copied(
    place: Place, damage: str
) -> None:
    data = await _written(place)
    (place.path / FIRST).write_bytes(bytes(len(data)) if damage != "cut" else bytes(1000))
    no_room(place)
    journal = place.started()
    assert journal.corrupt == 1
    assert [name[:29] for name in place.names()] == [f"{FIRST}.corrupt.", SECOND]


async def test_a_short_file_cannot_be_continued(place: Place) -> None:
    """It was cut behind its records, so it could not be written whole."""
    data = await _written(place)
    (place.path / FIRST).write_bytes(data[: len(data) // 2])
    place.spare.unlink()
    no_room(place)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        place.started()
    assert (place.path / FIRST).read_bytes() == data[: len(data) // 2]


async def test_a_copy_that_fails_half_way_is_removed(place: Place) -> None:
    data = await _written(place)
    end = place.scan().end
    (place.path / FIRST).write_bytes(data[:end] + b"half a record" + data[end + 13 :])
    place.fs.faults = {"write": fail(errno.ENOSPC)}
    assert place.open().torn == 1
    assert place.names() == [FIRST]
    place.fs.faults = {"write": fail(errno.EIO)}
    with pytest.raises(
        StorageError, match=f"cannot read the journal file {FIRST}: Input/output error"
    ):
        place.open()


@pytest.mark.parametrize("call", ["write", "sync", "sync_directory"])
async def test_a_last_file_that_cannot_be_continued_raises_the_systems_error(
    place: Place, call: str
) -> None:
    await _written(place)
    place.spare.unlink()
    no_room(place)
    place.fs.faults[call] = fail(errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        place.started()
    place.fs.faults = {}
    assert len(place.open(strict=True).state.staged) == 4


async def test_a_full_disk_after_the_new_file_has_its_name_breaks_the_journal(place: Place) -> None:
    """Records appended to the old file would be lost then, because the new one is read
    after it.
    """
    journal = place.started()
    for n in range(4):
        await journal.append(bulky(n))
    place.fs.faults = {"sync_directory": fail(errno.ENOSPC)}
    with pytest.raises(JournalBroken):
        await journal.append(bulky(4))
    place.fs.faults = {}
    with pytest.raises(JournalBroken):
        await journal.append(begun(1))
    assert place.names() == [FIRST, SECOND]


@pytest.mark.parametrize(
    "call", ["create", "allocate", "write", "sync", "rename", "sync_directory"]
)
async def test_an_error_of_the_disk_while_rotating_breaks_the_journal(
    place: Place, call: str
) -> None:
    journal = place.started()
    for n in range(4):
        await journal.append(bulky(n))
    place.fs.faults = {call: fail(errno.EIO)}
    with pytest.raises(JournalBroken):
        await journal.append(bulky(4))
    place.fs.faults = {}
    with pytest.raises(JournalBroken):
        await journal.append(begun(1))
    assert place.open().records >= 1  # either file alone is whole


async def test_a_batch_larger_than_a_file_is_spread_over_files(place: Place) -> None:
    journal = place.started()
    await journal.append(*(bulky(n) for n in range(6)), begun(7))
    assert {path.stat().st_size for path in place.path.iterdir()} == {jf.FILE_SIZE}
    assert place.open().state.jobs["gpt"].attempt == 7


@pytest.mark.parametrize(
    "record",
    [bulky(0, 1 << 20), r.Retiring(job="gpt", tag="t", files=["f" * 70] * 16_000)],
    ids=["dropped", "retiring"],
)
async def test_a_record_beyond_the_limit_is_refused_and_breaks_nothing(
    place: Place, record: r.Record
) -> None:
    journal = place.started()
    await journal.append(begun(1))
    with pytest.raises(
        StorageError,
        match=r"^the journal cannot hold a (Dropped|Retiring) record of 1,\d+,\d+ bytes; expected "
        r"at most 1,048,576$",
    ):
        await journal.append(record)
    await journal.append(begun(2))
    assert place.open().state.jobs["gpt"].attempt == 2


async def test_a_state_is_larger_than_other_records_may_be(place: Place) -> None:
    """15,000 parts under way make a STATE record of 2 MiB."""
    journal = place.started()
    parts = [
        r.Staging(job="gpt", attempt=1, step=1, rank=n, tag="t", file=f"{n:0100d}")
        for n in range(15_000)
    ]
    await journal.append(*parts)
    assert jf.MAX_PAYLOAD < len(r.encode_state(journal.state)) < jf.MAX_STATE
    for number in range(4):
        assert await ended(journal, asyncio.create_task(journal.append(bulky(number)))) is None
    assert place.names() != [FIRST]
    assert place.open().state.staged == journal.state.staged


async def test_a_state_that_is_larger_than_a_record_spans_several(place: Place) -> None:
    journal = place.started()
    journal.state.retiring = {f"gpt/t{n}": ["f" * 1000] for n in range(3000)}
    for number in range(5):
        assert await ended(journal, asyncio.create_task(journal.append(bulky(number)))) is None
    assert place.names() == [SECOND]
    found = place.scan(SECOND)
    assert [record.type for record in found.records[:2]] == [r.STATE, r.NUMBERS[r.Retiring]]
    assert [record.durable for record in found.records] == [0] * (len(found.records) - 1) + [
        len(found.records) - 1
    ]
    again = place.started()
    assert again.state == journal.state
    assert place.open().state == journal.state


async def test_a_state_too_large_for_a_file_loses_files_of_failed_saves_and_starts(
    place: Place,
) -> None:
    """The journal of an older ckptd may hold such a state.

    Until these files are deleted, no save begins; records that shrink the state are
    accepted.
    """
    journal = place.started()
    journal.state.staged = {f"gpt/t{n}": {f"{n:01000d}": None} for n in range(4200)}
    again = place.open()
    again.state = journal.state
    again.start(["gpt"])
    kept = place.open().state.staged
    assert 3500 < len(kept) < 4200
    assert kept == {key: again.state.staged[key] for key in kept}
    with pytest.raises(
        StorageError, match="the journal is full of 4,200 failed saves and 0 deletions"
    ):
        await again.append(bulky(1))
    for n in range(4200):
        await again.append(r.Dropped(job="gpt", attempt=1, step=1, tag=f"t{n}", reason="x"))
    await again.append(bulky(1), staging(1))
    assert list(place.open().state.staged) == ["gpt/step-00000001.a0001"]


async def test_too_many_failed_saves_refuse_new_ones_and_nothing_else(place: Place) -> None:
    journal = place.started()
    await journal.append(*(staging(n) for n in range(30_000)))
    assert r.under_way(journal.state) > MAX_UNDER_WAY
    retiring = r.Retiring(job="gpt", tag="t", files=[])
    for refused in (staging(30_000), retiring):
        with pytest.raises(
            StorageError,
            match="^the journal is full of 30,000 failed saves and 0 deletions whose files could "
            "not be deleted: "
            "see the daemon's log for the reason, fix it, and restart ckptd$",
        ):
            await journal.append(begun(1), refused)
    assert "gpt" not in journal.state.jobs  # of the records of one call, all or none are written
    dropped = [
        r.Dropped(job="gpt", attempt=1, step=n, tag=staging(n).tag, reason="x")
        for n in range(30_000)
    ]
    await journal.append(begun(2), *dropped[:15_000])
    assert journal.state.jobs["gpt"].attempt == 2
    await journal.append(staging(30_000), retiring)
    await journal.append(*dropped[15_000:], r.Retired(job="gpt", tag="t"))
    assert list(place.open().state.staged) == ["gpt/step-00030000.a0001"]
    assert place.open().state.retiring == {}


async def test_ten_thousand_failed_saves_leave_nothing(place: Place) -> None:
    journal = place.started()
    for n in range(0, 10_000, 100):
        await journal.append(*(staging(k) for k in range(n, n + 100)))
        await journal.append(
            *(
                r.Dropped(job="gpt", attempt=1, step=k, tag=staging(k).tag, reason="no space")
                for k in range(n, n + 100)
            )
        )
    assert (journal.state.staged, journal.state.retiring, len(r.encode_state(journal.state))) == (
        {},
        {},
        25,
    )
    assert place.open().state == journal.state


async def test_jobs_that_storage_does_not_have_are_forgotten_at_a_start(place: Place) -> None:
    journal = place.started()
    await journal.append(
        begun(1, "live"), begun(2, "gone"), begun(3, "staging"), begun(4, "retiring")
    )
    await journal.append(
        r.Staging(job="staging", attempt=3, step=1, rank=0, tag="t", file="f"),
        r.Retiring(job="retiring", tag="t", files=[]),
    )
    again = place.started("live")
    expected = {"live": 1, "staging": 3, "retiring": 4}
    assert {name: job.attempt for name, job in again.state.jobs.items()} == expected
    assert {name: job.attempt for name, job in place.open().state.jobs.items()} == expected


async def test_a_commit_of_a_job_unknown_to_the_journal_is_accepted(place: Place) -> None:
    """This happens after a journal was set aside.

    The manifests are the truth, and later records are still accepted.
    """
    journal = place.started()
    committed = r.Committed(job="gpt", attempt=1, step=5, tag="t", seq=3)
    assert await ended(journal, asyncio.create_task(journal.append(committed))) is None
    assert journal.state.jobs["gpt"].seq == 3
    assert place.open().state == journal.state


# -- faults


@pytest.mark.parametrize("call", ["write", "sync_data"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
async def test_a_failed_write_or_sync_breaks_the_journal_for_good(
    place: Place, call: str, number: int
) -> None:
    journal = place.started()
    await journal.append(begun(1))
    place.fs.faults = {call: fail(number)}
    with pytest.raises(JournalBroken, match="cannot write the journal") as caught:
        await journal.append(begun(2))
    assert (caught.value.errno, caught.value.retry) == (number, False)
    assert place.told == [caught.value]
    assert journal.state.jobs["gpt"].attempt == 1
    place.fs.faults = {}  # the next sync would report success, although data is lost
    place.fs.calls.clear()
    for attempt in (3, 4):
        with pytest.raises(JournalBroken):
            await journal.append(begun(attempt))
    assert place.fs.calls == []
    assert place.open().state.jobs["gpt"].attempt in (1, 2)


async def test_a_bug_in_the_writer_breaks_the_journal_and_ends_every_append(place: Place) -> None:
    def bug() -> None:
        raise ZeroDivisionError("a bug")

    journal = place.started()
    place.fs.faults = {"write": bug}
    error = await ended(journal, asyncio.create_task(journal.append(begun(1))))
    assert isinstance(error, JournalBroken)
    assert "a bug" in str(error)


async def test_appends_that_wait_behind_a_failed_sync_fail_too(place: Place) -> None:
    journal = place.started()
    reached, go_on = threading.Event(), threading.Event()

    def stall_then_fail() -> None:
        place.fs.faults = {}
        reached.set()
        assert go_on.wait(HANG)
        fail(errno.EIO)()

    place.fs.faults["sync_data"] = stall_then_fail
    first = asyncio.create_task(journal.append(begun(1)))
    await asyncio.get_running_loop().run_in_executor(None, reached.wait, HANG)
    second = asyncio.create_task(journal.append(begun(2)))
    await asyncio.sleep(0)
    place.fs.calls.clear()
    go_on.set()
    done = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(result) for result in done] == [JournalBroken, JournalBroken]
    assert place.fs.calls == []  # the same file is not synced a second time


@pytest.mark.parametrize("point", ["journal.writing", "journal.syncing", "journal.synced"])
async def test_failpoints_of_a_write(place: Place, point: str) -> None:
    journal = place.started()
    failpoints.arm(f"{point}=error(EIO)@1")
    with pytest.raises(JournalBroken):
        await journal.append(begun(1))
    assert len(place.scan().records) == (1 if point == "journal.writing" else 2)


@pytest.mark.parametrize(
    ("point", "names"),
    [
        ("journal.rotating", [FIRST]),
        ("journal.renamed", [FIRST, SECOND]),
        ("journal.rotated", [FIRST, SECOND]),
    ],
)
async def test_failpoints_of_a_rotation(place: Place, point: str, names: list[str]) -> None:
    journal = place.started()
    await journal.append(begun(1))
    failpoints.arm(f"{point}=error(EIO)")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        place.open().start(["gpt"])
    assert place.names() == names
    failpoints.arm("")
    assert place.open().state == journal.state


# -- damage


async def _written(place: Place) -> bytes:
    """Return a file of one attempt and four parts, with one batch each."""
    journal = place.started()
    await journal.append(begun(1))
    for number in range(4):
        await journal.append(staging(number))
    await journal.close()
    return (place.path / FIRST).read_bytes()


async def test_a_torn_tail_is_set_aside_and_left_out(place: Place) -> None:
    data = await _written(place)
    end = place.scan().end
    torn = data[:end] + b"half a record" + data[end + 13 :]
    (place.path / FIRST).write_bytes(torn)
    journal = place.open()
    assert (journal.torn, journal.corrupt, journal.records) == (1, 0, 6)
    assert len(journal.state.staged) == 4
    aside = [name for name in place.names() if name != FIRST]
    assert len(aside) == 1
    assert aside[0].startswith("0000000000000001")
    assert ".torn" in aside[0]
    assert (place.path / aside[0]).read_bytes() == b"half a record"
    assert (place.path / FIRST).read_bytes() == torn
    journal.start(["gpt"])
    await journal.append(begun(2))
    assert place.names() == sorted([aside[0], SECOND])
    assert (place.open().torn, place.open().state.jobs["gpt"].attempt) == (0, 2)


async def test_a_torn_tail_starts_even_a_strict_journal(place: Place) -> None:
    data = await _written(place)
    (place.path / FIRST).write_bytes(data[: place.scan().end - 9].ljust(jf.FILE_SIZE, b"\0"))
    journal = place.open(strict=True)
    assert (journal.torn, journal.corrupt, journal.records) == (1, 0, 5)


def _payload_that_is_no_record(place: Place, data: bytes) -> bytes:
    place.add(jf.RawRecord(2, 0, 7, 6, b"\xc1"))
    return (place.path / FIRST).read_bytes()


def _payload_of_another_record(place: Place, data: bytes) -> bytes:
    place.add(jf.RawRecord(3, 0, 7, 6, msgspec.msgpack.encode({"job": "gpt"})))
    return (place.path / FIRST).read_bytes()


def _payload_that_is_not_utf8(place: Place, data: bytes) -> bytes:
    place.add(jf.RawRecord(9, 0, 7, 6, b"\x82\xa3job\xa2\xff\xfe\xa3tag\xa1t"))
    return (place.path / FIRST).read_bytes()


def _state_that_is_none(place: Place, data: bytes) -> bytes:
    place.add(jf.RawRecord(1, 0, 7, 6, b"\x81\xa4jobs\x07"))
    return (place.path / FIRST).read_bytes()


DAMAGE: dict[str, Callable[[Place, bytes], bytes]] = {
    "a durable record": lambda place, data: flip(data, 8 * 200),
    "the header": lambda place, data: flip(data, 8 * 30),
    "all zeros": lambda place, data: bytes(len(data)),
    "empty": lambda place, data: b"",
    "another number": lambda place, data: jf.FileHeader(2, bytes(16), 0).encode() + bytes(4000),
    "grown": lambda place, data: data + bytes(4096),
    "cut in its zeros": lambda place, data: data[: len(data) // 2],
    "no record": _payload_that_is_no_record,
    "another record": _payload_of_another_record,
    "no UTF-8": _payload_that_is_not_utf8,
    "no state": _state_that_is_none,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
async def test_a_corrupt_file_is_set_aside_and_counted(
    place: Place, damage: Callable[[Place, bytes], bytes]
) -> None:
    damaged = damage(place, await _written(place))
    (place.path / FIRST).write_bytes(damaged)
    journal = place.open()
    assert (journal.corrupt, journal.torn) == (1, 0)
    aside = [name for name in place.names() if name != FIRST]
    assert len(aside) == 1
    assert aside[0].startswith("0000000000000001")
    assert ".corrupt" in aside[0]
    assert (place.path / aside[0]).read_bytes() == damaged
    journal.start(["gpt"])
    await journal.append(begun(9))
    assert place.names() == sorted([aside[0], SECOND])
    again = place.open()
    assert (again.corrupt, again.state.jobs["gpt"].attempt) == (0, 9)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
async def test_a_strict_journal_refuses_and_changes_nothing(
    place: Place, damage: Callable[[Place, bytes], bytes]
) -> None:
    (place.path / FIRST).write_bytes(damage(place, await _written(place)))
    before = place.contents()
    with pytest.raises(
        IntegrityError, match=f"journal {FIRST} is corrupt .* start without --strict-journal"
    ):
        place.open(strict=True)
    assert place.contents() == before


async def test_a_file_that_cannot_be_read_ends_it_in_one_sentence(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _written(place)
    monkeypatch.setattr("ckptd.daemon.journal.journal.read_small", lambda *_: fail(errno.EIO)())
    with pytest.raises(
        StorageError, match=f"^cannot read the journal file {FIRST}: Input/output error "
    ):
        place.open()
    assert place.names() == [FIRST]


async def test_a_directory_that_cannot_be_listed_ends_it_in_one_sentence(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.fs, "entries", lambda _: fail(errno.EIO)())
    with pytest.raises(
        StorageError, match="^cannot list the journal's directory: Input/output error "
    ):
        place.open()


def link_nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, link_nowhere])
async def test_anything_but_a_regular_file_is_set_aside_as_corrupt(
    place: Place, make: Callable[[Path], None]
) -> None:
    make(place.path / FIRST)
    with pytest.raises(IntegrityError, match="is not a regular file|it is a symbolic link"):
        place.open(strict=True)
    journal = place.open()
    assert journal.corrupt == 1
    assert [name.startswith(f"{FIRST}.corrupt.") for name in place.names()] == [True]
    journal.start(["gpt"])
    assert (place.open().corrupt, SECOND in place.names()) == (0, True)


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
async def test_a_file_of_a_number_that_was_never_given_is_set_aside(
    place: Place, number: int
) -> None:
    (place.path / f"{number:016x}.log").write_bytes(b"somebody's")
    journal = place.started()
    assert journal.corrupt == 1
    assert FIRST in place.names()
    assert place.open().corrupt == 0


async def test_directories_with_names_of_the_journal_are_left_alone(place: Place) -> None:
    journal = place.started()
    await journal.append(begun(1))
    for name in ("0000000000000000.log.tmp", f"{SECOND}.tmp", f"{THIRD}.tmp"):
        (place.path / name).mkdir()
    again = place.started()
    await again.append(begun(2))
    directories = ["0000000000000000.log.tmp", f"{SECOND}.tmp", f"{THIRD}.tmp"]
    assert place.names() == sorted([*directories, "0000000000000004.log"])
    assert place.open().state.jobs["gpt"].attempt == 2


async def test_a_journal_that_was_not_started_can_be_closed(place: Place) -> None:
    journal = place.open()
    await journal.close()
    assert place.names() == []


async def test_a_file_set_aside_is_synced(place: Place) -> None:
    (place.path / FIRST).write_bytes(flip(await _written(place), 8 * 200))
    place.fs.calls.clear()
    place.open()
    assert place.fs.calls == ["create", "write", "sync"]


async def test_a_file_set_aside_earlier_is_not_replaced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.daemon.journal.journal.secrets.token_hex", lambda _: "same")
    (place.path / FIRST).write_bytes(await _written(place) + bytes(10))  # the file has grown
    (place.path / f"{FIRST}.corrupt.same").write_bytes(b"evidence")
    with pytest.raises(StorageError, match="File exists"):
        place.open()
    assert (place.path / f"{FIRST}.corrupt.same").read_bytes() == b"evidence"


async def test_the_readable_records_of_a_corrupt_file_count(place: Place) -> None:
    data = await _written(place)
    records = place.scan().records
    third = jf.HEADER_SIZE + sum(
        -(-(jf.RECORD_SIZE + len(record.payload)) // 8) * 8 for record in records[:3]
    )
    (place.path / FIRST).write_bytes(flip(data, 8 * (third + 40)))
    journal = place.open()
    assert journal.records == 3
    assert journal.state.jobs["gpt"].attempt == 1
    assert list(journal.state.staged) == ["gpt/step-00000000.a0001"]


async def test_of_a_corrupt_newest_file_the_one_before_counts(place: Place) -> None:
    data = await _written(place)
    (place.path / SECOND).write_bytes(bytes(100))
    journal = place.open()
    assert (journal.corrupt, journal.records) == (1, 6)
    (place.path / FIRST).write_bytes(data)
    journal.start(["gpt"])
    assert "0000000000000003.log" in place.names()


# -- other versions


async def test_a_newer_record_is_refused_and_nothing_changed(place: Place) -> None:
    await _written(place)
    place.add(jf.RawRecord(77, 0, 7, 6, b"\x80"))
    before = place.contents()
    for strict in (False, True):
        with pytest.raises(NewerFormat, match="type 77"):
            place.open(strict=strict)
    assert place.contents() == before


async def test_a_newer_record_that_may_be_ignored_is_ignored(place: Place) -> None:
    await _written(place)
    place.add(
        jf.RawRecord(77, jf.IGNORABLE, 7, 6, b"anything at all"),
        jf.RawRecord(*_raw(begun(5)), 8, 7, r.encode(begun(5))[1]),
    )
    journal = place.open(strict=True)
    assert (journal.state.jobs["gpt"].attempt, journal.records, journal.corrupt) == (5, 8, 0)


def _raw(record: r.Record) -> tuple[int, int]:
    return r.encode(record)[0], 0


async def test_a_newer_payload_is_refused_and_nothing_changed(place: Place) -> None:
    """FORMAT.md, section 7: the record's header holds the version of its payload."""
    await _written(place)
    place.add(jf.RawRecord(*_raw(begun(5)), 7, 6, r.encode(begun(5))[1]), version=2)
    before = place.contents()
    with pytest.raises(NewerFormat):
        place.open()
    assert place.contents() == before


@pytest.mark.parametrize(("at", "value"), [(8, 2), (12, 1)])
async def test_a_newer_file_is_refused_and_nothing_changed(
    place: Place, at: int, value: int
) -> None:
    data = resealed(await _written(place), at, value, start=0, body=44)
    (place.path / FIRST).write_bytes(data)
    before = place.contents()
    with pytest.raises(NewerFormat):
        place.open()
    assert place.contents() == before
