"""Tests attempts that begin in memory while the disk hangs, and are claimed once it
answers. On a real file system, they are claimed even without a free inode, and none is
claimed twice.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.events import Events
from ckptd.daemon.root.claims import MOST_AHEAD, Attempts, Claims
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.errors import Fenced, InvalidRequest, StorageError
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.fs import PosixFileSystem

JOB = Job("gpt", attempt=2)


class Storage:
    """Plays `Attempts`, and answers once `answers` is set.

    taken: numbers of other daemons. fails: number of claims that fail before one
    succeeds.
    """

    def __init__(self, newest: int = 2, *taken: int) -> None:
        self.newest, self.taken, self.fails = newest, {*taken}, 0
        self.answers: Any = asyncio.Event()
        self.each: dict[int, asyncio.Event] = defaultdict(lambda: self.answers)
        self.asked: list[int] = []

    async def check_exclusive(self, job: str) -> None:
        """Take a job of several nodes."""

    async def find_newest(self, job: str) -> int:
        await self.answers.wait()
        return self.newest

    async def claim(self, job: str, attempt: int) -> bool:
        self.asked.append(attempt)
        await self.each[attempt].wait()
        if self.fails:
            self.fails -= 1
            raise StorageError("Input/output error")
        return attempt not in self.taken

    confirm = Attempts.confirm


class Made(Claims):
    """The claims, with a list of the attempts that were lost to other daemons."""

    def __init__(self, storage: Storage) -> None:
        self.losses: list[int] = []
        super().__init__(
            storage,  # type: ignore[arg-type]
            Events(on_claim_lost=[lambda job, attempt: self.losses.append(attempt)]),
            seconds=0.01,
        )


async def test_storage_that_answers_decides_the_number() -> None:
    storage = Storage(6, 7, 8)
    storage.answers.set()
    made = Made(storage)
    assert await made.claim(JOB, 2) == 9
    await made.claimed(JOB, 9)
    assert (storage.asked, made.losses) == ([7, 8, 9], [])


async def test_a_job_in_memory_begins_without_the_disk_and_saves_once_it_answers() -> None:
    storage = Storage()
    made = Made(storage)
    assert await made.claim(JOB, 2) == 3
    saving = asyncio.create_task(made.claimed(JOB, 3))
    await asyncio.sleep(0.02)
    assert not saving.done()
    storage.answers.set()
    await saving
    await made.claimed(JOB, 3)
    assert (storage.asked, made.losses) == ([3], [])


async def test_an_unknown_job_cannot_begin_without_the_disk() -> None:
    with pytest.raises(
        StorageError, match="cannot claim an attempt of job 'gpt': the storage has not answered"
    ):
        await Made(Storage(0)).claim(Job("gpt"), 0)


@pytest.mark.parametrize("hangs", ["the listing", "the claim"])
async def test_an_attempt_of_several_nodes_never_begins_in_memory(hangs: str) -> None:
    """The daemons of the other nodes use its number, too."""
    storage = Storage()
    storage.each[3] = asyncio.Event()
    if hangs == "the claim":
        storage.answers.set()
    with pytest.raises(StorageError, match="the storage has not answered"):
        await Made(storage).claim(JOB, 2, in_memory=False)


@pytest.mark.parametrize("lasts", ["over", "under way"])
async def test_a_claim_for_a_run_that_was_refused_is_that_of_the_next_run(lasts: str) -> None:
    """Otherwise it would take a number that no run has."""
    storage, job = Storage(0), Job("gpt")
    storage.answers.set()
    storage.each[1] = asyncio.Event()
    made = Made(storage)
    with pytest.raises(StorageError, match="the storage has not answered"):
        await made.claim(job, 0)
    if lasts == "over":
        storage.newest = 1
    storage.each[1].set()
    assert await made.claim(job, 0) == 1
    await made.claimed(job, 1)
    assert (storage.asked, made.losses) == ([1], [])


async def test_a_claim_for_a_run_that_was_refused_and_failed_is_made_again() -> None:
    storage, job = Storage(0), Job("gpt")
    storage.answers.set()
    storage.each[1], storage.fails = asyncio.Event(), 1
    made = Made(storage)
    with pytest.raises(StorageError, match="the storage has not answered"):
        await made.claim(job, 0)
    storage.each[1].set()
    await asyncio.sleep(0)
    assert await made.claim(job, 0) == 1
    assert storage.asked == [1, 1]


async def test_two_attempts_begun_in_one_outage_both_belong_to_this_daemon() -> None:
    """The trainer came back twice.

    Whichever claim reaches the disk first, neither counts as another daemon's.
    """
    storage = Storage()
    made = Made(storage)
    storage.each[3], storage.each[4] = asyncio.Event(), asyncio.Event()
    assert await made.claim(JOB, 2) == 3
    assert await made.claim(JOB, 3) == 4
    storage.each[4].set()
    await made.claimed(JOB, 4)
    storage.each[3].set()
    await made.claimed(JOB, 3)
    assert (storage.asked, made.losses) == ([3, 4], [])


async def test_a_claim_that_fails_is_tried_again_by_the_next_save_under_the_same_number() -> None:
    storage = Storage()
    made = Made(storage)
    await made.claim(JOB, 2)
    storage.fails = 1
    storage.answers.set()
    with pytest.raises(StorageError, match="Input/output error"):
        await made.claimed(JOB, 3)
    storage.newest = 4  # a later attempt has been claimed meanwhile
    await made.claimed(JOB, 3)
    assert (storage.asked, made.losses) == ([3, 3], [])


@pytest.mark.parametrize(("newest", "asked"), [(2, []), (1, [2]), (0, [2])])
async def test_an_attempt_that_a_live_trainer_brings_is_claimed_unless_it_is_already(
    newest: int, asked: list[int]
) -> None:
    storage, job = Storage(newest), Job("gpt")
    storage.answers.set()
    made = Made(storage)
    await made.bring(job, 2)
    await made.claimed(job, 2)
    assert (storage.asked, made.losses, made.is_claimed(job, 2)) == (asked, [], True)


async def test_an_attempt_with_a_number_that_no_run_can_have_is_not_claimed() -> None:
    storage, job = Storage(2), Job("gpt")
    storage.answers.set()
    made = Made(storage)
    with pytest.raises(InvalidRequest, match="the newest one in storage is 2: start this run"):
        await made.bring(job, 2 + MOST_AHEAD + 1)
    await made.bring(job, 2 + MOST_AHEAD)
    assert storage.asked == [2 + MOST_AHEAD]


async def test_an_attempt_that_is_brought_after_a_newer_one_has_begun_is_over() -> None:
    storage, job = Storage(3), Job("gpt")
    storage.answers.set()
    made = Made(storage)
    for _ in range(2):  # each of its ranks brings it
        with pytest.raises(Fenced, match="another run has begun a newer attempt"):
            await made.bring(job, 2)
    assert (storage.asked, made.losses) == ([], [2])


@pytest.mark.parametrize(("newest", "losses"), [(2, []), (3, [2])])
async def test_an_attempt_that_is_brought_goes_on_in_memory_and_saves_once_the_disk_answers(
    newest: int, losses: list[int]
) -> None:
    storage, job = Storage(newest), Job("gpt")
    made = Made(storage)
    await made.bring(job, 2)
    assert not made.is_claimed(job, 2)
    saving = asyncio.create_task(made.claimed(job, 2))
    await asyncio.sleep(0.02)
    assert not saving.done()
    storage.answers.set()
    (ended,) = await asyncio.gather(saving, return_exceptions=True)
    assert isinstance(ended, Fenced) == bool(losses)
    assert made.losses == losses


async def test_an_attempt_that_is_brought_while_the_disk_fails_is_looked_for_again() -> None:
    """The number is claimed: a second claim would take it for that of another daemon."""
    storage, job = Storage(1, 2), Job("gpt")
    storage.answers.set()
    storage.fails = 1
    made = Made(storage)
    await made.bring(job, 2)
    storage.newest = 2
    await made.claimed(job, 2)
    assert (storage.asked, made.losses) == ([2], [])


async def test_a_number_that_another_daemon_has_claimed_is_lost_for_every_save() -> None:
    storage = Storage(2, 3)
    made = Made(storage)
    assert await made.claim(JOB, 2) == 3
    storage.answers.set()
    for _ in range(2):
        with pytest.raises(
            Fenced, match="attempt 3 of job 'gpt' was claimed by another daemon first"
        ):
            await made.claimed(JOB, 3)
    assert (made.losses, made.is_lost(JOB, 3), made.is_lost(JOB, 4)) == ([3], True, False)


@pytest.mark.parametrize(("newest", "claims"), [(1, [2]), (2, []), (5, [])])
async def test_an_attempt_that_an_earlier_daemon_did_not_claim_is_claimed_at_the_start(
    newest: int, claims: list[int]
) -> None:
    storage = Storage(newest)
    storage.answers.set()
    made = Made(storage)
    await made.adopt(JOB)
    await made.claimed(JOB, 2)
    assert storage.asked == claims


async def test_a_start_does_not_wait_for_a_disk_that_hangs() -> None:
    storage = Storage(1)
    made = Made(storage)
    async with asyncio.timeout(60):
        await made.adopt(JOB)
    assert storage.asked == []


class Full(PosixFileSystem):
    """A file system without a free inode, or with another fault, once `fault` is set."""

    fault = 0
    no_links = 0

    def create(self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666) -> int:
        if self.fault:
            raise OSError(self.fault, os.strerror(self.fault))
        return super().create(name, directory, direct=direct, mode=mode)

    def link(self, old: str, old_directory: int, new: str, directory: int) -> None:
        if self.no_links:
            raise OSError(self.no_links, os.strerror(self.no_links))
        super().link(old, old_directory, new, directory)


class Place:
    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.fs, self.root = Full(), root
        self.posix = PosixStorage(root, self.fs)
        self.storage = Repository(self.posix)
        self.calls = StorageCalls(60.0)
        self.attempts = Attempts(self.storage, self.calls)
        self._claims = Claims(self.attempts, Events(), seconds=60.0)
        self.claims = root / names.CONTROL / names.ATTEMPTS / "gpt"
        self.lock = root / names.CONTROL / machine.host() / names.LOCK
        self.posix.ensure(names.control(machine.host()))
        self.posix.ensure(names.attempts("gpt"))
        self.lock.touch()

    async def claim(self, known: int) -> int:
        """Begin the next attempt above `known`."""
        return await self._claims.claim(Job("gpt"), known)

    def claimed(self) -> list[str]:
        return sorted(path.name for path in self.claims.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "root")
    yield made
    made.calls.close()


async def test_attempts_increase_and_the_newest_two_claims_are_kept(place: Place) -> None:
    assert [await place.claim(0) for _ in range(4)] == [1, 2, 3, 4]
    assert place.claimed() == ["a0003", "a0004"]
    assert await place.claim(9) == 10


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_without_an_inode_a_claim_is_a_link_to_another(place: Place, number: int) -> None:
    assert await place.claim(0) == 1
    place.lock.unlink()
    place.fs.fault = number
    assert [await place.claim(0) for _ in range(4)] == [2, 3, 4, 5]
    assert place.claimed() == ["a0004", "a0005"]
    assert place.storage.newest_attempt("gpt") == 5
    place.fs.fault = 0
    assert [await place.claim(0) for _ in range(2)] == [6, 7]


async def test_the_first_claim_of_a_job_is_a_link_to_the_lock_file(place: Place) -> None:
    place.fs.fault = errno.ENOSPC
    assert [await place.claim(0) for _ in range(3)] == [1, 2, 3]
    assert place.lock.stat().st_nlink == 3


@pytest.mark.parametrize("full", [False, True])
async def test_a_number_that_is_claimed_already_is_not_used(
    place: Place, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.claims.joinpath("a0001").touch()
    place.claims.joinpath("a0002").touch()
    place.fs.fault = errno.ENOSPC if full else 0
    monkeypatch.setattr(Repository, "newest_attempt", lambda self, job: 0)
    assert await place.claim(0) == 3


@pytest.mark.parametrize("number", [errno.EMLINK, errno.EPERM, errno.ENOSYS])
async def test_without_links_the_error_is_that_there_is_no_room(place: Place, number: int) -> None:
    place.claims.joinpath("a0001").touch()
    place.fs.fault, place.fs.no_links = errno.ENOSPC, number
    with pytest.raises(
        StorageError, match="cannot claim an attempt of job 'gpt' under .*: No space left on device"
    ) as caught:
        await place.claim(0)
    assert caught.value.errno == errno.ENOSPC
    assert place.claimed() == ["a0001"]


async def test_only_an_empty_file_is_linked(place: Place) -> None:
    place.claims.joinpath("a0001").write_text("mine")
    place.claims.joinpath("a0002").symlink_to("a0001")
    place.lock.unlink()
    place.fs.fault = errno.ENOSPC
    with pytest.raises(StorageError, match="No space left on device"):
        await place.claim(0)
    assert place.claimed() == ["a0001", "a0002"]


async def test_another_error_is_not_worked_around(place: Place) -> None:
    place.claims.joinpath("a0001").touch()
    place.fs.fault = errno.EIO
    with pytest.raises(StorageError, match="Input/output error"):
        await place.claim(0)
    assert place.claimed() == ["a0001"]


async def test_exactly_one_number_is_claimed_and_by_one_daemon(place: Place) -> None:
    other = Attempts(place.storage, place.calls)
    assert await place.attempts.claim("gpt", 3) is True
    assert await other.claim("gpt", 3) is False
    # The claim is durable: another run has it now.
    assert await place.attempts.claim("gpt", 3) is False
    assert place.claimed() == ["a0003"]


async def test_a_claim_whose_sync_failed_still_belongs_to_this_daemon(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(place.fs, "sync_directory", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            await place.attempts.claim("gpt", 1)
    assert await place.attempts.claim("gpt", 1) is True
    assert place.claimed() == ["a0001"]


async def test_a_node_that_could_make_the_claim_of_another_node_does_not_share_its_root(
    place: Place, tmp_path: Path
) -> None:
    """The other node has a copy of the root, with its identity, as after `rsync`."""
    copy = tmp_path / "copy"
    shutil.copytree(place.root, copy)
    other = Place(copy)
    attempt = await place.claim(0)
    await place.attempts.check_shared("gpt", attempt)
    await place.attempts.check_shared("gpt", attempt)
    with pytest.raises(InvalidRequest) as caught:
        await other.attempts.check_shared("gpt", attempt)
    assert str(caught.value) == (
        f"{machine.host()} could claim attempt 1 of job 'gpt', which the node of rank 0 has "
        f"claimed: {copy} is another directory on this "
        "node, or its file system lets several nodes create one file; use a shared file system "
        "such as NFS or Lustre, or an object store"
    )
    other.calls.close()


async def test_a_node_that_joins_after_newer_attempts_have_begun_is_not_told_that_it_shares_no_root(
    place: Place,
) -> None:
    """The claim of the attempt that it joins is deleted by then."""
    for _ in range(3):
        await place.claim(0)
    assert place.claimed() == ["a0002", "a0003"]
    await place.attempts.check_shared("gpt", 1)
    assert place.claimed() == ["a0002", "a0003"]
