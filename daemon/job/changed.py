"""Wakes the coroutines that wait until something is so, whenever there is news of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Changed:
    """News of one thing, for any number of coroutines.

    Each of them says what it waits for, and looks again at each news. No news is lost
    between its look and its wait, because `notify` wakes all who have looked before.
    count: how many news there were. Code that awaits while it looks compares it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._news = asyncio.Event()

    def notify(self) -> None:
        """Let all who wait look again. Must be called on the event loop."""
        self.count += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def news_after(self, count: int) -> None:
        """Wait until there has been more news than `count`."""
        while self.count <= count:
            await self._news.wait()

    async def wait_until(self, found: Callable[[], T], timeout: float | None = None) -> T:
        """Return the first true result of `found`, which is called now and at each news.

        After `timeout` seconds, return its result then, true or not.
        """
        try:
            async with asyncio.timeout(timeout):
                while not (result := found()):
                    await self._news.wait()
                return result
        except TimeoutError:
            return found()
