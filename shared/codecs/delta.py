"""The codec `delta`: stores a chunk as its difference from the same chunk of an older
checkpoint (FORMAT.md, section 3).

The words of a trained tensor change little from one checkpoint to the next, and many
not at all. The difference of two words as integers is small where their values are
close, because the bits of floating-point numbers of one sign ascend with their values.
Where few words differ, their places are stored as gaps, and take about as many bits as
information theory asks for. Differences add up, so that a chain of deltas is decoded in
place: one addition for each, and one checksum at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from ckptd.shared.codecs.planes import PLANES, Planes, word_size
from ckptd.shared.errors import IntegrityError

try:
    from ckptd.shared.codecs._delta import add, pack, scatter, subtract
except ImportError:  # no compiler was found when ckptd was installed
    from ckptd.shared.codecs.delta_numpy import add, pack, scatter, subtract

DELTA = 3
MOST_DELTAS = 64
"""The most deltas in a chain that a reader accepts."""
_HEAD = struct.Struct("<IIII")
"""The number of listed words, their codec, the number of gap bytes, and their stored
length in bytes.
"""
_AS_IT_IS = 0
_PLACES = 24
"""The bytes that say how far a delta has been added to the pieces of a chunk."""
_SPARSE = 0.4
"""The greatest share of words that differ with which only these are listed."""


class DecodedDeltas:
    """Decoded deltas of a chunk, which are added to it together, piece by piece: each
    pass over a chunk takes as long as reading it.

    nbytes: the bytes that they take.
    """

    def __init__(self, width: int) -> None:
        self.nbytes = 0
        self._width, self._at = width, 0
        self._dense: list[bytes | memoryview] = []
        self._sparse: list[bytes | memoryview] = []
        self._places = bytearray()

    def append(self, packed: bytes | memoryview, gaps: bytes | memoryview | None) -> None:
        """Append the listed words of a delta, with their gaps, or None if all are listed."""
        self.nbytes += len(packed) + len(gaps or b"")
        if gaps is None:
            self._dense.append(packed)
        else:
            self._sparse += packed, gaps
            self._places += bytes(_PLACES)

    def add_to(self, piece: memoryview) -> None:
        """Add the differences to the next piece of the chunk, which has whole words."""
        end = self._at + len(piece)
        for packed in self._dense:
            add(piece, packed[self._at : end], self._width)
        self._scatter(piece)
        self._at = end

    def check(self) -> None:
        """Check that all have been added, once the pieces are the whole chunk.

        Raises IntegrityError if the gaps of a delta do not fit.
        """
        if not self._scatter(memoryview(bytearray())):
            raise IntegrityError("the gaps of a delta do not place the words that it lists")

    def _scatter(self, piece: memoryview) -> bool:
        return not self._sparse or scatter(
            piece, self._at // self._width, self._width, self._places, *self._sparse
        )


class Delta:
    """The codec that stores a chunk as its difference from a base.

    Any number of threads may use one object.
    """

    def __init__(self) -> None:
        self._planes = Planes()

    def encode(
        self, raw: memoryview, base: memoryview, element_size: int, stored: memoryview
    ) -> int | None:
        """Write the stored form of the chunk `raw` into `stored`, and return its length
        in bytes, or None if it would fill `stored`.

        `base` has the bytes of the base, as many as `raw`. Its content is undefined
        afterwards. `stored` may be `raw` itself, which is then undefined if the result
        is None. `element_size` is in bytes.
        """
        width = word_size(element_size)
        words = raw.nbytes // width
        if raw.nbytes % width or stored.nbytes < _HEAD.size:
            return None
        listed, gaps, taken = subtract(raw, base, width), memoryview(b""), 0
        start = _HEAD.size
        if listed <= _SPARSE * words:
            room = memoryview(bytearray(listed + words // 255))
            taken = pack(base, width, room)
            gaps = room[:taken]
            frame = memoryview(bytearray(taken))
            length = self._planes.contexts.entropy(gaps, frame[:-1]) if taken else None
            gaps = gaps if length is None else frame[:length]
        else:
            listed = words
        packed = base[: listed * width]
        start += len(gaps)
        if start >= stored.nbytes:
            return None
        stored[_HEAD.size : start] = gaps
        body, codec = stored[start : start + packed.nbytes], PLANES
        length = self._planes.encode(packed, element_size, body)
        if length is None:
            length, codec = packed.nbytes, _AS_IT_IS
            if start + length >= stored.nbytes:
                return None
            body[:] = packed
        _HEAD.pack_into(stored, 0, listed, codec, taken, len(gaps))
        return start + length

    @staticmethod
    def listed(stored: memoryview, nbytes: int, element_size: int) -> float:
        """Return the share of the words of a chunk of `nbytes` that a delta lists, which
        `encode` has written.
        """
        listed: int = _HEAD.unpack_from(stored)[0]
        return listed * word_size(element_size) / nbytes

    def decoded(
        self, deltas: Iterable[memoryview], nbytes: int, element_size: int
    ) -> Iterator[DecodedDeltas]:
        """Yield the differences of a chain, whose chunk has `nbytes` bytes. All of them are to
        be added to the bytes of the whole base, in any order.

        Together, they may take much more memory than the chunk, so that the next ones
        are decoded when those before are added. Raises IntegrityError.
        """
        found = DecodedDeltas(word_size(element_size))
        for stored in deltas:
            if found.nbytes > nbytes:
                yield found
                found = DecodedDeltas(word_size(element_size))
            found.append(*self._decode(stored, nbytes, element_size))
        yield found

    def _decode(
        self, stored: memoryview, nbytes: int, element_size: int
    ) -> tuple[bytes | memoryview, bytes | memoryview | None]:
        """Return the listed words of a delta of a chunk of `nbytes` bytes, and its gap
        bytes, or None if it lists all words. Raises IntegrityError.
        """
        width = word_size(element_size)
        words = nbytes // width
        if nbytes % width or len(stored) < _HEAD.size:
            raise IntegrityError(
                f"a chunk of {nbytes} bytes is stored as a delta of {len(stored)} bytes, which is "
                f"not possible"
            )
        listed, codec, taken, length = _HEAD.unpack_from(stored)
        start = _HEAD.size + length
        if (
            listed > words
            or codec not in (_AS_IT_IS, PLANES)
            or not length <= taken <= words
            or (taken > 0 and listed in (0, words))
            or start > len(stored)
        ):
            raise IntegrityError(
                f"a delta of {words} words lists {listed} words by codec {codec} and {taken} gap "
                f"bytes in {length}, which is not possible"
            )
        packed = self._listed(stored[start:], listed * width, codec, element_size)
        if listed == words:
            return packed, None
        gaps: bytes | memoryview = stored[_HEAD.size : start]
        if length < taken:
            gaps = self._planes.contexts.decompress(stored[_HEAD.size : start], taken, "gaps")
        return packed, gaps

    def _listed(self, body: memoryview, nbytes: int, codec: int, element_size: int) -> memoryview:
        """Return the listed words of a delta, `nbytes` together. Raises IntegrityError."""
        if codec == PLANES and nbytes:
            packed = memoryview(bytearray(nbytes))
            self._planes.decode(body, packed, element_size)
            return packed
        if len(body) != nbytes:
            raise IntegrityError(
                f"the listed words of a delta have {nbytes} bytes, but {len(body)} are stored"
            )
        return body
