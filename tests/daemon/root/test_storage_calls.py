"""Tests calls to a disk that hangs: reads time out, changes wait, and the event loop
continues.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared.errors import StorageError


@pytest.fixture
def disk() -> Iterator[threading.Event]:
    """An event on which the disk hangs until it is set."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_read_times_out_with_an_error(disk: threading.Event) -> None:
    calls = StorageCalls(0.05)
    with pytest.raises(
        StorageError, match=r"cannot list /ckpts/gpt: the storage has not answered for 0\.05 s"
    ) as caught:
        await calls.read("list /ckpts/gpt", disk.wait)
    assert (caught.value.errno, caught.value.retry) == (errno.ETIMEDOUT, True)
    calls.seconds = 60.0  # a busy machine may need more than 0.05 s for a thread
    assert await calls.read("list /ckpts/gpt", lambda: "other calls go on") == "other calls go on"
    calls.close()


async def test_a_change_waits_for_as_long_as_it_takes(disk: threading.Event) -> None:
    calls = StorageCalls(0.01)
    change = asyncio.create_task(calls.run(disk.wait))
    await asyncio.sleep(0.1)
    assert not change.done()
    disk.set()
    assert await change is True
    calls.close()


async def test_a_context_manager_is_entered_and_left_on_storage_threads() -> None:
    calls, seen = StorageCalls(60.0), list[tuple[str, bool]]()

    @contextmanager
    def manager() -> Iterator[int]:
        seen.append(("entered", threading.current_thread() is threading.main_thread()))
        try:
            yield 7
        finally:
            seen.append(("left", threading.current_thread() is threading.main_thread()))

    async def use() -> None:
        async with calls.entered(manager()) as value:
            assert value == 7
            raise KeyError

    with pytest.raises(KeyError):
        await use()
    assert seen == [("entered", False), ("left", False)]
    calls.close()
