"""Reads the slot of the checkpoint before, whose chunks are the bases of deltas.

The slot is the trainer's, and may be filled again at any time: no trainer waits for a
base to be freed. So each base is verified when it is read, and a chunk without a sound
base is stored whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.shared.codecs.delta import Delta
from ckptd.shared.codecs.planes import Planes
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.plan import ChunkRange
from ckptd.shared.formats.segment import SegmentHeader, read_data

_SAMPLES, _SAMPLE = 4, 1 << 13
"""The number of samples that show how a chunk shrinks, and the bytes of each."""
_WORTH = 0.9
"""A chunk is worth a delta if that takes less than this share of what `planes` leaves of
the chunk. A restore reads both the delta and its base.
"""
_LEAST_SAVED = 1 << 13
"""The least bytes that a delta must save. Stored chunks are padded to 4096 bytes."""
_delta, _planes = Delta(), Planes()


@dataclass(frozen=True, slots=True)
class BaseSlot:
    """A slot that may still hold the snapshot that the last checkpoint of a rank was
    written from.

    `fd` is a descriptor of its segment, and `header` the header that it had then.
    """

    fd: int
    header: SegmentHeader

    def read(self, chunk: ChunkRange, buffer: memoryview, crc: int) -> bool:
        """Read the base of a chunk into the first bytes of `buffer`.

        Return False unless the bytes have this crc32c.
        """
        try:
            return crc == read_data(
                self.fd, self.header, chunk.offset, chunk.length, buffer[: chunk.length]
            )
        except (IntegrityError, OSError):
            return False

    def share(self, slot: SealedSlot, chunk: ChunkRange) -> float | None:
        """Return the share of its bytes that a chunk of `slot` is likely to take as a
        delta, or None if it is not worth one. Samples from all over the chunk decide.

        The base is not verified, so that the share of a slot that has been filled again
        means nothing.
        """
        newer, older = bytearray(), bytearray()
        try:
            for offset, length in _samples(chunk):
                for fd, header, sample in (
                    (slot.fd, slot.header, newer),
                    (self.fd, self.header, older),
                ):
                    piece = memoryview(bytearray(length))
                    read_data(fd, header, offset, length, piece)
                    sample += piece
        except (IntegrityError, OSError):
            return None
        room, size = memoryview(bytearray(len(newer))), chunk.element_size
        delta = _delta.encode(memoryview(newer), memoryview(older), size, room)
        if delta is None:
            return None
        planes = _planes.encode(memoryview(newer), size, room) or len(newer)
        if delta >= _WORTH * planes or (planes - delta) * chunk.length < _LEAST_SAVED * len(newer):
            return None
        return delta / len(newer)


def _samples(chunk: ChunkRange) -> Iterator[tuple[int, int]]:
    """Yield the offset and the length of each sample of a chunk, in bytes.

    The samples are whole words, and the sample of a short chunk is the chunk.
    """
    if chunk.length <= _SAMPLES * _SAMPLE:
        yield chunk.offset, chunk.length
        return
    for number in range(_SAMPLES):
        at = (chunk.length - _SAMPLE) * number // (_SAMPLES - 1) // 64 * 64
        yield chunk.offset + at, _SAMPLE
