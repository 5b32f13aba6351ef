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
from ckptd.shared.codecs.speeds import LEAST, WEIGHT, ByteTime

_MARGIN = 1.5
"""The least ratio of the time of a write to that of encoding, which also takes a core
from reading and checksums.
"""
_MARGIN_ALONE = 8.0
"""The least ratio while no write is under way. The storage then waits, and a chunk that
becomes a sixth smaller must make up for that.
"""
_FORGET = 0.995
"""The factor by which the remembered time of encoding counts less with each chunk that
is not encoded, so that it is measured again: after 220 chunks where encoding takes three
times as long as it may.
"""


class Auto:
    """The encoder for the setting `auto`.

    The parts that are written at the same time share one, since they share the storage.

    clock: the seconds of a clock that never goes back.
    """

    number, name, usage = Planes.number, "auto", "auto"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._planes, self._clock = Planes(), clock
        self._writes = 0
        self._writing = ByteTime()
        self._encoding = ByteTime()
        # How much of the time of encoding counts, as long as it is not measured again.
        self._remembered = 1.0
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, option: str) -> Auto | None:
        return None if option else cls()

    def encode(self, raw: memoryview, element_size: int, stored: memoryview) -> int | None:
        with self._lock:
            margin = _MARGIN if self._writes else _MARGIN_ALONE
            if (
                not self._writing.seconds_per_byte
                or self._writing.seconds_per_byte
                < margin * self._remembered * self._encoding.seconds_per_byte
            ):
                self._remembered *= _FORGET
                return None
            forgotten, self._remembered = 1.0 - self._remembered, 1.0
        begun = self._clock()
        length = self._planes.encode(raw, element_size, stored)
        with self._lock:
            self._encoding.add(self._clock() - begun, raw.nbytes, max(WEIGHT, forgotten))
        return length

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
                if nbytes >= LEAST:
                    self._writing.add(self._clock() - begun, nbytes)
