"""Measures how fast chunks are encoded, and how fast a storage takes them, and tells
from that whether a delta would be durable as soon as the whole chunk.

Encoders and storage work at the same time, so that a save takes as long as the slower
of the two. A delta is smaller than a whole chunk. It pays where the storage is the
slower one, or where few words differ, because then it is made faster, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MOST_IN_VAIN = 0.03
"""The most time that attempts at deltas may take in vain, as a share of the time that
the part takes whole.
"""
LEAST = 1 << 18
"""The least bytes of a chunk or of a write that is measured. The time of a shorter one
says little about a speed.
"""
WEIGHT = 0.25
"""The weight of the newest measurement in a moving average. The last ten count for
nearly all.
"""
_NO_LATER = 1.1
"""The most time that a delta may take, as a multiple of that of the whole chunk. The
speeds are not known better than that, and the delta takes far fewer bytes.
"""
_READ, _LISTED = 0.35, 1.75
"""The time of a delta, as a share of that in which `planes` encodes the chunk: the base
is read and subtracted, and then the words that differ are encoded, whose bytes shrink in
more planes. The deltas that are made correct the sum.
"""
_FORGET = 0.01
"""The share by which that correction is forgotten with each delta that does not pay, so
that a disturbed measurement does not count for ever.
"""


class ByteTime:
    """A moving average of the seconds that a byte takes; 0.0 before the first
    measurement.
    """

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0

    def add(self, seconds: float, nbytes: int, weight: float = WEIGHT) -> None:
        newest = seconds / max(nbytes, 1)
        self.seconds_per_byte += (newest - self.seconds_per_byte) * (
            weight if self.seconds_per_byte else 1.0
        )


@dataclass(slots=True, eq=False)
class Spent:
    """The time that the cores of the node have spent on a chunk, once it is encoded."""

    seconds: float = 0.0


class Speeds:
    """The speeds of a storage and of the encoders that write to it.

    The parts that are written at the same time share one. Each speed is that of the
    whole node: with 2 cores that encode, a byte takes half the time that one of them
    needs, and writes that wait for each other do not count twice.
    """

    def __init__(self, cores: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """cores: the number of threads that can encode without waiting for each other.

        clock: the seconds of a clock that never goes back.
        """
        self._cores, self._clock = cores, clock
        self._lock = threading.Lock()
        self._encoders = 0
        # Of all whole chunks, and of those alone that did shrink.
        self._whole, self._encoding = ByteTime(), ByteTime()
        # The time that deltas take, in units of the time that they are expected to take.
        self._correction = 1.0
        self._storage = ByteTime()
        # The writes under way, and the time since which the storage has worked on them.
        self._writes, self._since = 0, 0.0

    @contextmanager
    def encoding(self) -> Iterator[Spent]:
        """Context manager. Held while a chunk is encoded, or its delta is made."""
        spent = Spent()
        with self._lock:
            self._encoders += 1
            sharing = self._encoders
        begun = self._clock()
        try:
            yield spent
        finally:
            seconds = self._clock() - begun
            with self._lock:
                spent.seconds = seconds / max(self._cores, sharing, self._encoders)
                self._encoders -= 1

    def add_whole(self, spent: Spent, nbytes: int, *, shrunk: bool) -> None:
        """Count a chunk of `nbytes` that was encoded. `shrunk`: False if it is stored as
        it is.
        """
        if nbytes >= LEAST:
            with self._lock:
                self._whole.add(spent.seconds, nbytes)
                if shrunk:
                    self._encoding.add(spent.seconds, nbytes)

    def add_delta(self, spent: Spent, nbytes: int, listed: float) -> None:
        """Count a delta of a chunk of `nbytes` that lists this share of its words."""
        with self._lock:
            expected = nbytes * self._encoding.seconds_per_byte * _work(listed)
            if nbytes >= LEAST and expected:
                self._correction += (spent.seconds / expected - self._correction) * WEIGHT

    @contextmanager
    def writing(self, nbytes: int) -> Iterator[None]:
        """Context manager. Held while `nbytes` are written to the storage."""
        counts = nbytes >= LEAST
        with self._lock:
            if counts and not self._writes:
                self._since = self._clock()
            self._writes += counts
        try:
            yield
        finally:
            with self._lock:
                self._writes -= counts
                if counts:
                    now = self._clock()
                    self._storage.add(now - self._since, nbytes)
                    self._since = now

    def whole_seconds(self, nbytes: float, stored: float) -> float:
        """Return how long chunks of `nbytes` take that are stored whole in `stored`
        bytes, or 0.0 if no speed is known.
        """
        with self._lock:
            return max(
                nbytes * self._whole.seconds_per_byte, stored * self._storage.seconds_per_byte
            )

    def delta_seconds(self, nbytes: float, stored: float, listed: float) -> float:
        """Return how long deltas of chunks of `nbytes` take that list this share of the
        words, and are stored in `stored` bytes.
        """
        with self._lock:
            made = self._encoding.seconds_per_byte * _work(listed) * self._correction
            return max(nbytes * made, stored * self._storage.seconds_per_byte)

    def delta_pays(self, share: float, listed: float, whole: float) -> bool:
        """Return True if a delta would be durable no later than the whole chunk.

        Nothing is known before the first chunks are written; then it returns True.

        share, whole: the stored bytes of the delta and of the whole chunk, as fractions
        of the bytes of the chunk. listed: the share of the words that differ.
        """
        limit = self.whole_seconds(1, whole)
        if not limit or self.delta_seconds(1, share, listed) <= _NO_LATER * limit:
            return True
        with self._lock:
            self._correction += (1.0 - self._correction) * _FORGET
        return False


def _work(listed: float) -> float:
    """Return the time in which a delta is made, in units of the time in which `planes`
    encodes the chunk.
    """
    return _READ + _LISTED * listed
