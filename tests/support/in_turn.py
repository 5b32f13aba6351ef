"""A store that carries out the requests of several callers in a given order, to try
every order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from obstore.store import MemoryStore

from ckptd.shared.storage.bucket import Bucket, ObjectMeta

T = TypeVar("T")


class InTurn(Bucket):
    """A store without exclusive creation, whose requests are carried out in the order
    of `schedule`, which has numbers of callers.

    Each caller sets `caller.number` first, and calls `leave` at its end. Requests
    beyond the schedule come in any order.
    """

    def __init__(self, schedule: tuple[int, ...]) -> None:
        super().__init__(MemoryStore(), "memory://x")
        self._left, self._turn = list(schedule), threading.Condition()
        self.caller = threading.local()

    def _in_turn(self, call: Callable[[], T]) -> T:
        with self._turn:
            assert self._turn.wait_for(
                lambda: not self._left or self._left[0] == self.caller.number, 10
            )
            try:
                return call()
            finally:
                del self._left[:1]
                self._turn.notify_all()

    def put(self, name: str, data: bytes, *, create: bool) -> None:
        self._in_turn(lambda: Bucket.put(self, name, data, create=False))

    def children(self, prefix: str) -> tuple[list[str], list[ObjectMeta]]:
        return self._in_turn(lambda: Bucket.children(self, prefix))

    def head(self, name: str) -> ObjectMeta:
        return self._in_turn(lambda: Bucket.head(self, name))

    def delete(self, names: list[str]) -> None:
        self._in_turn(lambda: Bucket.delete(self, names))

    def leave(self) -> None:
        """Give up the turns that are left to this caller."""
        with self._turn:
            self._left = [number for number in self._left if number != self.caller.number]
            self._turn.notify_all()


def interleavings(*requests: int) -> set[tuple[int, ...]]:
    """Return every order of the requests of several callers, given how many each makes."""

    def some(left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not any(left):
            yield ()
        for number, count in enumerate(left):
            if count:
                for rest in some((*left[:number], count - 1, *left[number + 1 :])):
                    yield (number, *rest)

    return set(some(requests))
