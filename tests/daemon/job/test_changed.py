"""Tests of the news that coroutines wait for."""

from __future__ import annotations

import asyncio

import pytest

from ckptd.daemon.job.changed import Changed


async def test_all_who_wait_look_at_each_news() -> None:
    changed, values = Changed(), list[int]()

    async def until(length: int) -> int:
        return await changed.wait_until(lambda: len(values) >= length and values[-1])

    waiting = [asyncio.ensure_future(until(length)) for length in (1, 1, 2)]
    await asyncio.sleep(0)
    for value in (7, 8):
        values.append(value)
        changed.notify()
        await asyncio.sleep(0.01)
    assert [await one for one in waiting] == [7, 7, 8]
    assert changed.count == 2


async def test_no_news_is_lost_though_others_begin_to_wait_at_once() -> None:
    """An event that each of them clears loses the news for those who have not begun."""
    changed, found = Changed(), False
    first = asyncio.ensure_future(changed.wait_until(lambda: found))
    await asyncio.sleep(0)
    found = True
    changed.notify()
    second = asyncio.ensure_future(changed.wait_until(lambda: not found, timeout=0.01))
    assert await asyncio.wait_for(first, 10)
    assert not await second


async def test_what_is_so_already_is_not_waited_for() -> None:
    assert await Changed().wait_until(lambda: "so") == "so"


async def test_after_the_time_the_last_look_counts() -> None:
    """Not all that is looked at gives news."""
    looks = list[int]()

    def found() -> bool:
        looks.append(1)
        return len(looks) == 2

    assert await Changed().wait_until(found, timeout=0)
    assert not await Changed().wait_until(lambda: False, timeout=0.01)


async def test_news_that_comes_during_a_look_is_not_waited_for_again() -> None:
    changed = Changed()
    seen = changed.count
    changed.notify()
    await asyncio.wait_for(changed.news_after(seen), 10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(changed.news_after(changed.count), 0.01)


async def test_an_error_of_a_look_is_raised() -> None:
    changed, broken = Changed(), False

    def found() -> bool:
        if broken:
            raise ValueError("broken")
        return False

    waiting = asyncio.ensure_future(changed.wait_until(found))
    await asyncio.sleep(0)
    broken = True
    changed.notify()
    with pytest.raises(ValueError, match="broken"):
        await waiting
