"""Attempts that begin in memory while the disk hangs, and are claimed once it answers."""

from __future__ import annotations

import asyncio

import pytest

from ckptd.daemon.catalog import Job
from ckptd.daemon.claims import Claims
from ckptd.shared.errors import Fenced, StorageError


class Storage:
    """Plays `Attempts`: answers with `number` once `answers` is set, or fails."""

    def __init__(self, number: int) -> None:
        self.number, self.answers, self.fails, self.asked = number, asyncio.Event(), False, 0

    async def claim(self, job: str, known: int) -> int:
        self.asked += 1
        await self.answers.wait()
        if self.fails:
            raise StorageError("Input/output error")
        return self.number


def claims(storage: Storage) -> Claims:
    return Claims(storage, seconds=0.01)  # type: ignore[arg-type]


async def test_a_storage_that_answers_decides() -> None:
    storage = Storage(7)
    storage.answers.set()
    made = claims(storage)
    assert await made.claim(Job("gpt"), 2) == 7
    await made.claimed(Job("gpt"), 7)
    assert storage.asked == 1


async def test_a_job_that_is_in_memory_begins_without_the_disk_and_is_saved_with_it() -> None:
    storage, job = Storage(3), Job("gpt", attempt=2)
    made = claims(storage)
    assert await made.claim(job, 2) == 3
    saving = asyncio.create_task(made.claimed(job, 3))
    await asyncio.sleep(0.02)
    assert not saving.done()
    storage.answers.set()
    await saving
    await made.claimed(job, 3)
    assert storage.asked == 1


async def test_a_job_that_nobody_knows_cannot_begin() -> None:
    with pytest.raises(StorageError, match="cannot claim an attempt of job 'gpt': the storage has not answered"):
        await claims(Storage(1)).claim(Job("gpt"), 0)


async def test_a_claim_that_fails_is_tried_again_by_the_next_save() -> None:
    storage, job = Storage(3), Job("gpt", attempt=2)
    made = claims(storage)
    await made.claim(job, 2)
    storage.fails = True
    storage.answers.set()
    with pytest.raises(StorageError, match="Input/output error"):
        await made.claimed(job, 3)
    storage.fails = False
    await made.claimed(job, 3)
    assert storage.asked == 2


async def test_a_number_that_another_daemon_has_claimed_is_lost() -> None:
    storage, job, lost = Storage(9), Job("gpt", attempt=2), list[tuple[str, int]]()
    made = claims(storage)
    made.lost = lambda job, attempt: lost.append((job.name, attempt))
    assert await made.claim(job, 2) == 3
    storage.answers.set()
    with pytest.raises(Fenced, match="attempt 3 of job 'gpt' was claimed by another daemon first"):
        await made.claimed(job, 3)
    await asyncio.sleep(0)
    assert lost == [("gpt", 9)]
