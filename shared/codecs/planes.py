"""The codec `planes`: splits the words of a chunk into planes of bytes, and compresses
the planes that shrink (FORMAT.md, section 3).

The exponents of trained floating-point numbers vary little, and their mantissas look
random. Each word is rotated left by one bit, which makes the exponent one whole byte
and moves the sign behind the mantissa. The plane of the exponents then shrinks to about
a third, by entropy coding alone. Planes that do not shrink are stored as they are.
ZipNN (https://arxiv.org/abs/2411.05239) describes the idea.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import zstandard

from ckptd.shared.errors import IntegrityError

try:
    from ckptd.shared.codecs._planes import join, split
except ImportError:  # no compiler was found when ckptd was installed
    from ckptd.shared.codecs.planes_numpy import join, split
try:
    from ckptd.shared.codecs._huffman import compress as _huffman
except ImportError:
    _huffman = None  # type: ignore[assignment]

PLANES = 2
_AS_IT_IS, _ZSTD = 0, 1
_ENTRY = struct.Struct("<II")
"""The entry of a plane: its method, and the length of its stored form in bytes."""
_SAMPLES, _SAMPLE = 4, 1 << 13
"""The number of samples of a plane that show how it shrinks, and the bytes of each."""
_LEAST_SAMPLE, _FEWEST = 1 << 9, 64
"""The least bytes of a sample. Above that, a sample has at most one byte in so many, so
that the samples of a short plane do not take as long as the plane.
"""
_WORTH = 0.97
"""A plane is stored as it is unless a sample shrinks below this share: decoding it
would cost more than it saves.
"""
_REPETITIVE = 0.9
"""A plane is searched for matches if a sample takes less than this share of the bytes
that it takes without matches.
"""
_WINDOW_LOG = 17
_Compressor = Callable[[memoryview, memoryview], int | None]
"""Writes a frame of a plane into a buffer, and returns its length, or None if the frame
does not fit.
"""


def word_size(element_size: int) -> int:
    """Return the bytes of a word in a chunk of such elements.

    An element of 16 bytes is a complex number, two words.
    """
    return {2: 2, 4: 4, 8: 8, 16: 8}.get(element_size, 1)


class Contexts(threading.local):
    """The zstd contexts of one thread, since zstandard does not allow threads to share
    a context.
    """

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level
        common = {"window_log": _WINDOW_LOG, "write_content_size": True}
        self._runs = zstandard.ZstdCompressor(
            compression_params=parameters(1, min_match=7, hash_log=6, chain_log=6, **common)
        )
        self._matches = zstandard.ZstdCompressor(compression_params=parameters(1, **common))
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)

    def entropy(self, plane: memoryview, room: memoryview) -> int | None:
        """Write a frame of bytes that hardly repeat, such as exponents, into `room`. No
        matches are looked for, because all that these shrink is by entropy coding.

        Return the length of the frame, or None if it does not fit.
        """
        if _huffman is None:
            return self.runs(plane, room)
        length = _huffman(plane, room)
        return None if length < 0 else length

    def runs(self, plane: memoryview, room: memoryview) -> int | None:
        """Write a frame as `entropy` does, of bytes that are nearly all the same: a code
        of Huffman takes a bit for each of them, and a match hardly any.
        """
        return _placed(self._runs.compress(plane), room)

    def matches(self, plane: memoryview, room: memoryview) -> int | None:
        """Write a frame as `entropy` does, of integers, masks and text. Matches are
        looked for as by zstd's level 1.
        """
        return _placed(self._matches.compress(plane), room)

    def decompress(self, frame: memoryview, length: int, what: str) -> bytes:
        """Return the content of a frame, which has `length` bytes.

        `what` names the content in an error. Raises IntegrityError.
        """
        try:
            head = zstandard.get_frame_parameters(frame)
            if head.content_size != length or head.window_size > max(1 << _WINDOW_LOG, length):
                raise IntegrityError(
                    f"{what} of {length} bytes has a frame header that says {head.content_size}"
                )
            content: bytes = self._decompressor.decompress(
                frame, max_output_size=length, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise IntegrityError(f"{what} cannot be decoded: {error}") from None
        if len(content) != length:
            raise IntegrityError(f"{what} of {length} bytes decodes to {len(content)}")
        return content


class Planes:
    """The codec that stores each chunk as planes of bytes, one for each byte of a word.

    contexts: the zstd contexts of the calling thread.
    """

    number, name, usage = PLANES, "planes", "planes"

    def __init__(self) -> None:
        self.contexts = Contexts()

    @classmethod
    def parse(cls, option: str) -> Planes | None:
        return None if option else cls()

    def encode(self, raw: memoryview, element_size: int, stored: memoryview) -> int | None:
        """Write the stored form of the chunk `raw` into `stored`, and return its
        length, or None if it would fill `stored`. See `Encoder.encode`.
        """
        width = word_size(element_size)
        words = raw.nbytes // width
        if not words or raw.nbytes % width:
            return None
        compressors = self._compressors(raw, width)
        first = next(
            (number for number, compress in enumerate(compressors) if compress is not None), None
        )
        start = width * _ENTRY.size
        if first is None or start + first * words >= stored.nbytes:
            return None
        # The planes before the first one that shrinks are split straight into their
        # places.
        planes = [
            stored[start + number * words : start + (number + 1) * words] for number in range(first)
        ]
        # Not kept: an idle daemon holds no buffers.
        rest = memoryview(bytearray((width - first) * words))
        planes += [rest[number * words : (number + 1) * words] for number in range(width - first)]
        _split(raw, planes)
        for number, (plane, compress) in enumerate(zip(planes, compressors, strict=True)):
            room = stored[start : start + words - 1]
            length = None if compress is None else compress(plane, room)
            method = _AS_IT_IS if length is None else _ZSTD
            if length is None:
                length = words
                if start + length >= stored.nbytes:
                    return None
                if number >= first:
                    stored[start : start + length] = plane
            _ENTRY.pack_into(stored, number * _ENTRY.size, method, length)
            start += length
        if start >= stored.nbytes:
            return None
        return start

    def writing(self, nbytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    def decode(self, stored: memoryview, raw: memoryview, element_size: int) -> None:
        """Decode `stored` into `raw`, which has exactly the raw length.

        Raises IntegrityError if that is not possible.
        """
        width = word_size(element_size)
        words, start = raw.nbytes // width, width * _ENTRY.size
        if raw.nbytes % width or len(stored) < start:
            raise IntegrityError(
                f"a chunk of {raw.nbytes} bytes is stored as {len(stored)} bytes of planes, which "
                f"is not possible"
            )
        planes = []
        for method, length in _ENTRY.iter_unpack(stored[:start]):
            planes.append(self._plane(method, stored[start : start + length], length, words))
            start += length
        if start != len(stored):
            raise IntegrityError(
                f"the planes of a chunk take {start} bytes, but {len(stored)} are stored"
            )
        if width == 1:
            raw[:] = planes[0]
        else:
            join(raw, *planes)

    def _plane(self, method: int, body: memoryview, length: int, words: int) -> bytes | memoryview:
        """Return the bytes of one plane, one for each word. Raises IntegrityError."""
        if (
            len(body) != length
            or method not in (_AS_IT_IS, _ZSTD)
            or (method == _AS_IT_IS and length != words)
        ):
            raise IntegrityError(
                f"a plane of {words} bytes is stored by method {method} in {len(body)} of "
                f"{length} bytes"
            )
        if method == _AS_IT_IS:
            return body
        return self.contexts.decompress(body, words, "a plane")

    def _compressors(self, raw: memoryview, width: int) -> list[_Compressor | None]:
        """Return for each plane the compressor that suits it, or None if it does not
        shrink. Samples from all over the chunk decide.
        """
        words, contexts = raw.nbytes // width, self.contexts
        length = min(words, _SAMPLE, max(_LEAST_SAMPLE, words // _FEWEST))
        starts = range(0, words - length + 1, max(1, (words - length) // (_SAMPLES - 1)))
        room = memoryview(bytearray(length))
        found: list[_Compressor | None] = [None] * width
        for start in starts:
            planes = [memoryview(bytearray(length)) for _ in range(width)]
            _split(raw[start * width : (start + length) * width], planes)
            for number, plane in enumerate(planes):
                runs, matches = (
                    compress(plane, room) or length
                    for compress in (contexts.runs, contexts.matches)
                )
                if runs == matches == length:  # nor does a code of Huffman, which takes longer
                    continue
                entropy = contexts.entropy(plane, room) or length
                if matches < _REPETITIVE * min(entropy, runs):
                    found[number] = contexts.matches
                elif found[number] != contexts.matches and runs < _REPETITIVE * entropy:
                    found[number] = contexts.runs
                elif min(entropy, runs) < _WORTH * length and found[number] is None:
                    found[number] = contexts.entropy
        return found


def _placed(frame: bytes, room: memoryview) -> int | None:
    """Copy a frame into `room`, and return its length, or None if it does not fit."""
    if len(frame) > len(room):
        return None
    room[: len(frame)] = frame
    return len(frame)


def _split(raw: memoryview, planes: list[memoryview]) -> None:
    """Fill the planes with the bytes of the words of `raw`.

    A word of one byte is not rotated, and is its own plane.
    """
    if len(planes) == 1:
        planes[0][:] = raw
    else:
        split(raw, *planes)
