"""The codec setting `auto`: encodes a chunk with `planes` while the storage is busy,
and stores it as it is while the storage would wait.

The decision falls chunk by chunk. A chunk is encoded if the storage has work to do for
as long as encoding takes: another write is under way, and writes have lately taken
clearly longer than encoding. Then encoding costs no time, and saves some, because there
is less to write. Any other chunk goes to the storage at once. So the storage never
waits for an encoder, and an encoder is not idle while the storage is the slower of the
two, whatever their speeds are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptd.shared.codecs.planes import Planes

_MARGIN = 1.5
"""The least ratio of the time of a write to that of encoding, which also takes a core
from reading and checksums.
"""
_MARGIN_ALONE = 8.0
"""The least ratio while no write is under way. The storage then waits, and a chunk that
becomes a sixth smaller must make up for that.
"""
_FORGET = 0.99
"""The factor by which the remembered time of encoding shrinks with each chunk that is
not encoded, so that it is measured again.
"""
_SMALL_SHARE = 0.25
"""The greatest share of its bytes with which a delta is stored at any speed of the
storage. Writing it and making it then hardly take longer than writing the chunk.
"""
_LEAST_WRITE = 1 << 18
"""The least bytes of a write that is measured. The time of a shorter one says little
about the speed of the storage.
"""
_WEIGHT = 0.25
"""The weight of the newest measurement in a moving average. The last ten count for
nearly all.
"""


class _Pace:
    """A moving average of the seconds that a byte takes; 0.0 before the first
    measurement.
    """

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0

    def add(self, seconds: float, nbytes: int) -> None:
        newest = seconds / max(nbytes, 1)
        self.seconds_per_byte += (newest - self.seconds_per_byte) * (
            _WEIGHT if self.seconds_per_byte else 1.0
        )


class Auto:
    """The encoder for the setting `auto`.

    The parts that are written at the same time share one, since they share the storage.

    clock: the seconds of a clock that never goes back.
    """

    number, name, usage = Planes.number, "auto", "auto"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._planes, self._clock = Planes(), clock
        self._writes = 0
        self._writing = _Pace()
        self._encoding = _Pace()
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, option: str) -> Auto | None:
        return None if option else cls()

    def encode(self, raw: memoryview, element_size: int, stored: memoryview) -> int | None:
        with self._lock:
            margin = _MARGIN if self._writes else _MARGIN_ALONE
            if (
                not self._writing.seconds_per_byte
                or self._writing.seconds_per_byte < margin * self._encoding.seconds_per_byte
            ):
                self._encoding.seconds_per_byte *= _FORGET
                return None
        begun = self._clock()
        length = self._planes.encode(raw, element_size, stored)
        with self._lock:
            self._encoding.add(self._clock() - begun, raw.nbytes)
        return length

    def pays(self, share: float) -> bool:
        with self._lock:
            saved = (1 - share) * self._writing.seconds_per_byte
            return share <= _SMALL_SHARE or saved > _MARGIN * self._encoding.seconds_per_byte > 0

    @contextmanager
    def writing(self, nbytes: int) -> Iterator[None]:
        begun = self._clock()
        with self._lock:
            self._writes += 1
        try:
            yield
        finally:
            with self._lock:
                self._writes -= 1
                if nbytes >= _LEAST_WRITE:
                    self._writing.add(self._clock() - begun, nbytes)
