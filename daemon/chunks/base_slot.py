"""Reads the slot of the checkpoint before, whose chunks are the bases of deltas.

The slot is the trainer's, and may be filled again at any time: no trainer waits for a
base to be freed. So each base is verified when it is read, and a chunk without a sound
base is stored whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.shared.codecs.delta import Delta
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.plan import ChunkRange
from ckptd.shared.formats.segment import SegmentHeader, read_data

_SAMPLES, _SAMPLE = 4, 1 << 13
"""The number of samples that show how a chunk shrinks, and the bytes of each."""
_delta = Delta()


class Foreseen(NamedTuple):
    """The delta that a chunk is likely to get.

    share: its stored bytes, as a fraction of those of the chunk. listed: the share of the
    words that it lists.
    """

    share: float
    listed: float


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

    def foreseen(self, slot: SealedSlot, chunk: ChunkRange) -> Foreseen | None:
        """Return the delta that a chunk of `slot` is likely to get, by samples from all
        over the chunk, or None if it would be as long as the chunk.

        The base is not verified, so that the result means nothing for a slot that has
        been filled again.
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
        return Foreseen(delta / len(newer), _delta.listed(room, len(newer), size))


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
