"""Tests attempts that begin in memory while the disk hangs, and are claimed once it
answers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.root.claims import Claims
from ckptd.shared.errors import Fenced, StorageError

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


class Made(Claims):
    """The claims, with a list of the attempts that were lost to other daemons."""

    def __init__(self, storage: Storage) -> None:
        self.losses: list[int] = []
        super().__init__(
            storage,  # type: ignore[arg-type]
            seconds=0.01,
            on_loss=lambda job, attempt: self.losses.append(attempt),
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
