"""Subtracts and adds words with NumPy: stands in for `_delta.c` where that could not be
compiled.

NumPy is imported at the first call, since a daemon that writes no deltas then saves
13 MB and a tenth of a second.
"""

from __future__ import annotations

from typing import Any

_Bytes = bytes | bytearray | memoryview
_Writable = bytearray | memoryview

_PASS = 255
"""The gap byte that passes over as many words and places none."""


def subtract(raw: _Bytes, base: _Writable, width: int, /) -> int:
    """Replace each word of `base` by its delta word, and return how many are not 0."""
    import numpy as np

    newer, older = _pair(raw, base, width)
    older[:] = _fold(newer - older)
    return int(np.count_nonzero(older))


def pack(words: _Writable, width: int, gaps: _Writable, /) -> int:
    """Move the words that are not 0 to the front, and write their places into `gaps`.

    Return how many bytes of `gaps` were written, or -1 if it has no room for them.
    """
    import numpy as np

    found = _words(words, width)
    places = np.flatnonzero(found)
    distances = np.diff(places, prepend=-1) - 1
    written = np.full(len(places) + int((distances // _PASS).sum()), _PASS, np.uint8)
    written[np.arange(len(places)) + np.cumsum(distances // _PASS)] = distances % _PASS
    if len(written) > len(gaps):
        return -1
    np.frombuffer(gaps, np.uint8)[: len(written)] = written
    found[: len(places)] = found[places]
    return len(written)


def add(raw: _Writable, words: _Bytes, width: int, /) -> None:
    """Add each delta word to the word of `raw` at the same place."""
    newer, packed = _pair(raw, words, width)
    newer += _fold(packed)


def scatter(pieces: tuple[_Writable, ...], width: int, /, *words_and_gaps: _Bytes) -> bool:
    """Add the packed delta words of one delta after another to the words of a chunk at
    their places, which the gaps after them name. The chunk lies in pieces of whole words.

    Return False if the gaps of a delta do not place each of its words inside the chunk.
    """
    import numpy as np

    newer = [_words(piece, width) for piece in pieces]
    bounds = np.cumsum([0, *map(len, newer)])
    for words, gaps in zip(words_and_gaps[::2], words_and_gaps[1::2], strict=True):
        packed, passed = _words(words, width), np.frombuffer(gaps, np.uint8)
        places = passed < _PASS
        # Behind each byte: the words that were passed over and placed so far.
        ends = np.cumsum(passed, dtype=np.int64) + np.cumsum(places)
        at = ends[places] - 1
        if len(at) != len(packed) or (len(ends) and ends[-1] > bounds[-1]):
            return False
        cuts = np.searchsorted(at, bounds)
        for number, piece in enumerate(newer):
            here = slice(cuts[number], cuts[number + 1])
            piece[at[here] - bounds[number]] += _fold(packed[here])
    return True


def _words(buffer: _Bytes, width: int) -> Any:
    import numpy as np

    return np.frombuffer(buffer, f"<u{width}")


def _pair(one: _Bytes, other: _Bytes, width: int) -> tuple[Any, Any]:
    """Return the words of two buffers. Raises ValueError if their lengths differ, because
    NumPy would repeat a single word as often as needed.
    """
    if len(one) != len(other):
        raise ValueError(
            f"expected buffers of one length, not of {len(one)} and {len(other)} bytes"
        )
    return _words(one, width), _words(other, width)


def _fold(words: Any) -> Any:
    """Invert all bits below the highest one where that is set: the way from a
    difference to its delta word, and back.
    """
    highest = words >> (8 * words.itemsize - 1)
    return words ^ ((0 - highest) >> 1)
