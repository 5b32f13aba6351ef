"""The codec `planes`: splits the words of a chunk into planes of bytes, and compresses the planes that shrink (FORMAT.md, section 3).

The exponents of trained floating-point numbers vary little, and their mantissas look random. Each word is rotated left by one bit, which
makes the exponent one whole byte and moves the sign behind the mantissa. The plane of the exponents then shrinks to about a third, by
entropy coding alone. Planes that do not shrink are stored as they are. ZipNN (https://arxiv.org/abs/2411.05239) describes the idea.

Only `_split` and `_join` need NumPy, and import it themselves: a daemon that uses another codec saves 13 MB and a tenth of a second.
"""

from __future__ import annotations

import struct
import threading

import zstandard

from ckptd.shared.errors import IntegrityError

PLANES = 2
_AS_IT_IS, _ZSTD = 0, 1
_ENTRY = struct.Struct("<II")
"""How a plane is stored, and the length of its stored form in bytes."""
_TILE = 1 << 16
"""Words that are rotated and split at a time, so that they stay in the cache of a core."""
_SAMPLES, _SAMPLE = 4, 1 << 13
"""How many samples of a plane show whether it shrinks, and the bytes of each."""
_WORTH = 0.97
"""A plane is stored as it is unless a sample shrinks below this share: decoding it would cost more than it saves."""
_WINDOW_LOG = 17


def word_size(element_size: int) -> int:
    """Return the bytes of a word in a chunk of such elements. An element of 16 bytes is a complex number, two words."""
    return {2: 2, 4: 4, 8: 8, 16: 8}.get(element_size, 1)


class Planes:
    """The codec that stores each chunk as planes of bytes, one for each byte of a word."""

    number, name, usage = PLANES, "planes", "planes"

    def __init__(self) -> None:
        self._local = threading.local()  # zstandard does not allow threads to share a context

    @classmethod
    def parse(cls, option: str) -> Planes | None:
        return None if option else cls()

    def encode(self, raw: memoryview, element_size: int) -> bytearray | None:
        """Return the stored form of the chunk `raw`, or None if it would not be smaller. `element_size` is in bytes."""
        width = word_size(element_size)
        if not raw.nbytes or raw.nbytes % width:
            return None
        compressor = self._compressor()
        entries: list[bytes] = []
        bodies: list[bytes | memoryview] = []
        for plane in _split(raw, width):
            frame = compressor.compress(plane) if _shrinks(plane, compressor) else None
            smaller = frame is not None and len(frame) < len(plane)
            body = frame if frame is not None and smaller else plane
            entries.append(_ENTRY.pack(_ZSTD if smaller else _AS_IT_IS, len(body)))
            bodies.append(body)
        length = sum(map(len, entries)) + sum(map(len, bodies))
        return bytearray().join([*entries, *bodies]) if length < raw.nbytes else None

    def decode(self, stored: memoryview, raw: memoryview, element_size: int) -> None:
        """Decode `stored` into `raw`, which has exactly the raw length. Raises IntegrityError if that is not possible."""
        width = word_size(element_size)
        words, start = raw.nbytes // width, width * _ENTRY.size
        if raw.nbytes % width or len(stored) < start:
            raise IntegrityError(f"a chunk of {raw.nbytes} bytes is stored as {len(stored)} bytes of planes, which is not possible")
        planes = []
        for method, length in _ENTRY.iter_unpack(stored[:start]):
            planes.append(self._plane(method, stored[start : start + length], length, words))
            start += length
        if start != len(stored):
            raise IntegrityError(f"the planes of a chunk take {start} bytes, but {len(stored)} are stored")
        _join(planes, raw, width)

    def _plane(self, method: int, body: memoryview, length: int, words: int) -> bytes | memoryview:
        """Return the bytes of one plane, one for each word. Raises IntegrityError."""
        if len(body) != length or method not in (_AS_IT_IS, _ZSTD) or (method == _AS_IT_IS and length != words):
            raise IntegrityError(f"a plane of {words} bytes is stored by method {method} in {len(body)} of {length} bytes")
        if method == _AS_IT_IS:
            return body
        try:
            frame = zstandard.get_frame_parameters(body)
            if frame.content_size != words or frame.window_size > max(1 << _WINDOW_LOG, words):
                raise IntegrityError(f"a plane of {words} bytes has a frame header that says {frame.content_size}")
            plane: bytes = self._decompressor().decompress(body, max_output_size=words, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"a plane cannot be decoded: {error}") from None
        if len(plane) != words:
            raise IntegrityError(f"a plane of {words} bytes decodes to {len(plane)}")
        return plane

    def _compressor(self) -> zstandard.ZstdCompressor:
        """Return this thread's compressor. It looks for few matches, because nearly all that such planes shrink is by entropy coding."""
        found: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if found is None:
            parameters = zstandard.ZstdCompressionParameters.from_level(
                1, min_match=7, hash_log=6, chain_log=6, window_log=_WINDOW_LOG, write_content_size=True
            )
            found = self._local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        return found

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        found: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if found is None:
            found = self._local.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
        return found


def _shrinks(plane: memoryview, compressor: zstandard.ZstdCompressor) -> bool:
    """Return True if one of the samples from all over the plane shrinks enough."""
    if len(plane) <= _SAMPLES * _SAMPLE:
        return True
    starts = range(0, len(plane) - _SAMPLE + 1, (len(plane) - _SAMPLE) // (_SAMPLES - 1))
    return any(len(compressor.compress(plane[start : start + _SAMPLE])) < _WORTH * _SAMPLE for start in starts)


def _split(raw: memoryview, width: int) -> list[memoryview]:
    """Rotate the words of `raw` left by one bit, and return their bytes as planes, the lowest byte first."""
    if width == 1:
        return [raw]
    import numpy as np

    words = np.frombuffer(raw, f"<u{width}")
    planes = np.empty((width, len(words)), np.uint8)
    rotated, carried = np.empty(_TILE, words.dtype), np.empty(_TILE, words.dtype)
    for start in range(0, len(words), _TILE):
        tile = words[start : start + _TILE]
        made = np.left_shift(tile, 1, out=rotated[: len(tile)])
        made |= np.right_shift(tile, 8 * width - 1, out=carried[: len(tile)])
        planes[:, start : start + len(tile)] = made.view(np.uint8).reshape(-1, width).T
    return [plane.data for plane in planes]


def _join(planes: list[bytes | memoryview], raw: memoryview, width: int) -> None:
    """Fill `raw` with the words whose planes are given: the inverse of `_split`."""
    if width == 1:
        raw[:] = planes[0]
        return
    import numpy as np

    words, arrays = np.frombuffer(raw, f"<u{width}"), [np.frombuffer(plane, np.uint8) for plane in planes]
    rotated = np.empty(_TILE, words.dtype)
    by_byte = rotated.view(np.uint8).reshape(-1, width)
    for start in range(0, len(words), _TILE):
        tile = words[start : start + _TILE]
        for number, plane in enumerate(arrays):
            by_byte[: len(tile), number] = plane[start : start + len(tile)]
        np.left_shift(rotated[: len(tile)], 8 * width - 1, out=tile)
        tile |= np.right_shift(rotated[: len(tile)], 1, out=rotated[: len(tile)])
