"""Chunks on worker threads: all of them, in order, within a budget of memory, and none
after a failure.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from ckptd.daemon.chunks.workers import Buffers, Workers
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.binary import align
from ckptd.shared.formats.plan import ChunkRange

CHUNK = 1 << 16


def ranges(count: int, length: int = CHUNK) -> list[ChunkRange]:
    return [ChunkRange(number * length, length, 4) for number in range(count)]


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("test", 3, 1 << 20, CHUNK, 2)
    yield made
    made.close()


def test_results_come_in_the_order_of_the_chunks(workers: Workers) -> None:
    found = asyncio.run(workers.each(ranges(50), lambda number, buffers: (number, len(buffers))))
    assert found == [(number, 2) for number in range(50)]
    assert workers.chunks_done == 50
    assert asyncio.run(workers.each([], lambda number, buffers: number)) == []


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)
def test_the_buffers_ask_for_huge_pages() -> None:
    workers, size = Workers("test", 1, 64 << 20, 8 << 20, 2), 8 << 20

    def flags(number: int, buffers: Buffers) -> list[bool]:
        """Return for each buffer if its mapping has the flag of MADV_HUGEPAGE
        (proc_pid_smaps(5)).
        """
        found, maps = [], Path("/proc/self/smaps").read_text().split("VmFlags:")
        for buffer in buffers:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            for mapping, following in pairwise(maps):
                lines = [line for line in mapping.splitlines() if "-" in line.split(" ")[0]]
                start, end = (int(number, 16) for number in lines[-1].split(" ")[0].split("-"))
                if start <= address < end:
                    found.append("hg" in following.splitlines()[0].split())
        return found

    assert asyncio.run(workers.each([ChunkRange(0, size, 4)], flags)) == [[True, True]]
    workers.close()


def test_the_threads_have_a_low_priority_and_never_a_higher_one_than_the_process() -> None:
    def of_thread(number: int, buffers: Buffers) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = os.getpriority(os.PRIO_PROCESS, 0)
    for nice, expected in ((own + 3, own + 3), (own - 3, own)):
        workers = Workers("test", 1, 1 << 20, CHUNK, 1, nice)
        assert asyncio.run(workers.each(ranges(1), of_thread)) == [expected]
        workers.close()
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_the_threads_run_on_the_cpus_that_they_are_given() -> None:
    own = os.sched_getaffinity(0)
    workers = Workers("test", 1, 1 << 20, CHUNK, 1, cpus={max(own)})
    assert asyncio.run(
        workers.each(
            ranges(1), lambda number, buffers: os.sched_getaffinity(threading.get_native_id())
        )
    ) == [{max(own)}]
    workers.close()
    assert os.sched_getaffinity(0) == own


def test_no_two_chunks_share_a_buffer_at_once(workers: Workers) -> None:
    def work(number: int, buffers: Buffers) -> bool:
        for buffer in buffers:
            buffer[:8] = number.to_bytes(8, "little")
        threading.Event().wait(0.001)
        return all(buffer[:8] == number.to_bytes(8, "little") for buffer in buffers)

    assert asyncio.run(workers.each(ranges(60), work)) == [True] * 60


@pytest.mark.parametrize(("memory", "most"), [(1, 1), (2 * 2 * CHUNK, 2), (1 << 30, 3)])
def test_the_budget_of_memory_limits_the_chunks_at_once(memory: int, most: int) -> None:
    """One chunk can always be processed, and never more of them than there are threads."""
    workers, running, seen, lock = (
        Workers("test", 3, memory, CHUNK, 2),
        0,
        list[int](),
        threading.Lock(),
    )

    def work(number: int, buffers: Buffers) -> None:
        nonlocal running
        with lock:
            running += 1
            seen.append(running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    asyncio.run(workers.each(ranges(20), work))
    assert max(seen) == most
    assert len(workers._free) <= most
    workers.close()


def test_buffers_are_used_again_and_give_their_pages_back(workers: Workers) -> None:
    seen: set[int] = set()

    def work(number: int, buffers: Buffers) -> bytes:
        seen.update(map(id, buffers))
        before = buffers[0][:8]
        buffers[0][:8] = b"ckptd---"
        return before

    for _ in range(5):
        first = asyncio.run(workers.each(ranges(1), work))
        assert first == [bytes(8)], "an idle buffer keeps pages"
    assert len(seen) == 2


def test_larger_chunks_of_an_earlier_daemon_get_buffers_of_their_own(workers: Workers) -> None:
    sizes = asyncio.run(
        workers.each(
            ranges(2, 3 * CHUNK), lambda number, buffers: [len(buffer) for buffer in buffers]
        )
    )
    assert sizes == [[align(3 * CHUNK)] * 2] * 2
    assert workers._free == []


def test_after_a_failure_no_other_chunk_is_begun(workers: Workers) -> None:
    begun: list[int] = []

    def work(number: int, buffers: Buffers) -> None:
        begun.append(number)
        if number == 4:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        asyncio.run(workers.each(ranges(1000), work))
    assert len(begun) < 20
    assert asyncio.run(workers.each(ranges(3), lambda number, buffers: number)) == [0, 1, 2]


def test_a_cancelled_call_leaves_the_buffers_to_the_next(workers: Workers) -> None:
    go = threading.Event()

    async def cancelled() -> None:
        task = asyncio.ensure_future(workers.each(ranges(10), lambda number, buffers: go.wait(60)))
        await asyncio.sleep(0.01)
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert asyncio.run(workers.each(ranges(5), lambda number, buffers: number)) == [0, 1, 2, 3, 4]


def test_a_chunk_without_a_result_fails_them_all(workers: Workers) -> None:
    class Short(list[ChunkRange]):
        def __len__(self) -> int:
            return 2 if self.asked else super().__len__()

        asked = False

    found = Short(ranges(3))

    def work(number: int, buffers: Buffers) -> int:
        found.asked = True
        return number

    with pytest.raises(IntegrityError, match="^there are 3 results for 2 chunks$"):
        asyncio.run(workers.each(found, work))


def test_closed_workers_do_not_wait_for_what_has_not_begun(workers: Workers) -> None:
    go, begun, done = threading.Event(), threading.Barrier(4), list[int]()

    def work(number: int) -> None:
        begun.wait(60)
        go.wait(60)
        done.append(number)

    async def close() -> None:
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(workers.pool, work, number) for number in range(10)]
        await asyncio.to_thread(begun.wait, 60)
        workers.close()
        go.set()
        await asyncio.wait(calls)
        assert [call.cancelled() for call in calls] == [False] * 3 + [True] * 7

    asyncio.run(close())
    assert sorted(done) == [0, 1, 2]
