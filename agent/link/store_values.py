"""Values of any size in the job's store: put, waited for and taken.

A value lies in the store in pieces, because the store's server accepts no large ones.
The first piece has their number. A value may instead be the name of another one, which
several ranks read and nobody takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]

from ckptd.shared.errors import CkptdError

PREFIX = "ckptd"
# Bytes; the store's server accepts values of at most 8 MiB (TCPStoreLibUvBackend.cpp).
_PIECE = 4 << 20
# Seconds between polls; the store's `wait` prints warnings on a timeout, and cannot be
# cancelled.
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.03
_LOOKS_PER_SECOND = 10_000  # of all ranks together; a TCPStore answers a few times as many
# The store's own timeout for a value that another rank has removed after it was seen.
GONE_SECONDS = 2.0

Unwanted = Callable[[], CkptdError | None]


class StoreValues:
    """The values that one rank puts and takes.

    `client` is a client of the store that nothing else uses.

    operations: the number of requests to the store. asked_at: when the request was made
    that the store has not answered yet, or None. All calls raise RuntimeError, as torch
    does, if the store's server is gone.
    """

    def __init__(self, client: Store, world_size: int) -> None:
        client.set_timeout(timedelta(seconds=GONE_SECONDS))
        self._store = PrefixStore(PREFIX, client)
        self._last_look = max(_LAST_LOOK, world_size / _LOOKS_PER_SECOND)
        self.operations = 0
        self.asked_at: float | None = None

    def put(self, key: str, value: bytes) -> None:
        count = pieces(value)
        # The reader waits for the first piece, which holds their number.
        for number in reversed(range(count)):
            self._set(
                f"{key}/{number}",
                (count.to_bytes(4, "little") if number == 0 else b"")
                + value[number * _PIECE : (number + 1) * _PIECE],
            )

    def put_name(self, key: str, name: str) -> None:
        """Put the name of another value.

        Who takes it gets that value, which stays in the store.
        """
        self._set(f"{key}/0", bytes(4) + name.encode())

    def remove(self, key: str, count: int) -> None:
        """Remove a value of so many pieces, if it is there."""
        for number in range(count):
            with self._asking():
                self._store.delete_key(f"{key}/{number}")

    def there(self, *keys: str) -> bool:
        """Return True if the store has all of these values."""
        with self._asking():
            return bool(self._store.check([f"{key}/0" for key in keys]))

    def wait_for(self, keys: list[str], deadline: float, unwanted: Unwanted) -> bool:
        """Wait until the store has all of these values.

        Return False after the deadline. Raises the error of `unwanted`.
        """
        pause = _FIRST_LOOK
        while not self.there(*keys):
            if (error := unwanted()) is not None:
                raise error
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, self._last_look)
        return True

    def take(self, key: str, deadline: float, unwanted: Unwanted) -> bytes | None:
        """Wait for a value, remove it from the store, and return it.

        Return None after the deadline. Raises the error of `unwanted`.
        """
        return self.take_all([key])[0] if self.wait_for([key], deadline, unwanted) else None

    def take_all(self, keys: list[str]) -> list[bytes]:
        """Return values that the store has, and remove them from the store.

        Raises RuntimeError after `GONE_SECONDS`, and removes nothing, if another rank
        has removed one of them.
        """
        found = []
        for key, first in zip(keys, self._get([f"{key}/0" for key in keys]), strict=True):
            count = int.from_bytes(first[:4], "little")
            found.append(self._whole(key, first) if count else self.read(first[4:].decode()))
            self.remove(key, count or 1)
        return found

    def read(self, key: str) -> bytes:
        """Return a value that the store has, and leave it there."""
        return self._whole(key, self._get([f"{key}/0"])[0])

    def _whole(self, key: str, first: bytes) -> bytes:
        return first[4:] + b"".join(
            self._get(
                [f"{key}/{number}" for number in range(1, int.from_bytes(first[:4], "little"))]
            )
        )

    def _get(self, names: list[str]) -> list[bytes]:
        """Return pieces that the store has. One request gets them all.

        A store that is slow to answer is asked again for as long as it has them;
        `asked_at` is then the time of the first request. Raises RuntimeError if another
        rank has removed one of them.
        """
        if not names:
            return []
        with self._asking():
            while True:
                try:
                    found: list[bytes] = (
                        self._store.multi_get(names)
                        if len(names) > 1
                        else [self._store.get(names[0])]
                    )
                    return found
                except DistStoreError:  # after `GONE_SECONDS`
                    if not self._store.check(names):
                        raise

    def _set(self, name: str, piece: bytes) -> None:
        with self._asking():
            self._store.set(name, piece)  # type: ignore[arg-type]  # the store takes bytes, too

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self.operations += 1
        self.asked_at = time.monotonic()
        try:
            yield
        finally:
            self.asked_at = None


def pieces(value: bytes) -> int:
    """Return the number of pieces that the value is stored in."""
    return -(-len(value) // _PIECE) or 1
