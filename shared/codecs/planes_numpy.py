"""Splits words into planes of bytes and joins them again, with NumPy: stands in for
`_planes.c` where that could not be compiled.

NumPy is imported at the first call, since a daemon that uses another codec then saves
13 MB and a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_Bytes = bytes | bytearray | memoryview

_TILE = 1 << 16
"""The number of words that are processed at a time, so that they stay in the cache of a
core.
"""


def split(raw: _Bytes, *planes: _Bytes) -> None:
    """Fill plane i with byte i of each word of `raw`, after the word is rotated left by
    one bit. Byte 0 is the lowest byte.
    """
    import numpy as np

    for tile, bytes_of_planes, turned, moved in _tiles(raw, planes):
        np.left_shift(tile, 1, out=turned)
        np.bitwise_or(turned, np.right_shift(tile, 8 * len(planes) - 1, out=moved), out=turned)
        for number, plane in enumerate(bytes_of_planes):
            np.copyto(plane, np.right_shift(turned, 8 * number, out=moved), casting="unsafe")


def join(raw: _Bytes, *planes: _Bytes) -> None:
    """Fill `raw` with the words whose planes are given: the inverse of `split`."""
    import numpy as np

    for tile, bytes_of_planes, turned, moved in _tiles(raw, planes):
        turned[:] = 0
        for number, plane in enumerate(bytes_of_planes):
            np.copyto(moved, plane)
            np.bitwise_or(turned, np.left_shift(moved, 8 * number, out=moved), out=turned)
        np.right_shift(turned, 1, out=tile)
        np.bitwise_or(tile, np.left_shift(turned, 8 * len(planes) - 1, out=moved), out=tile)


def _tiles(raw: _Bytes, planes: tuple[_Bytes, ...]) -> Iterator[tuple[Any, list[Any], Any, Any]]:
    """Yield each tile of the words, the bytes of each plane that belong to it, and two
    arrays for words that are used for all tiles.
    """
    import numpy as np

    words, whole = (
        np.frombuffer(raw, f"<u{len(planes)}"),
        [np.frombuffer(plane, np.uint8) for plane in planes],
    )
    one, other = np.empty(_TILE, words.dtype), np.empty(_TILE, words.dtype)
    for start in range(0, len(words), _TILE):
        tile = words[start : start + _TILE]
        yield (
            tile,
            [plane[start : start + len(tile)] for plane in whole],
            one[: len(tile)],
            other[: len(tile)],
        )
