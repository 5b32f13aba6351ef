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


def scatter(
    piece: _Writable, first: int, width: int, places: bytearray, /, *words_and_gaps: _Bytes
) -> bool:
    """Add the packed delta words of one delta after another to those of a piece of the
    chunk that their gaps place there. The piece begins at the word `first`.

    Return True if each word of each delta has found its place in the pieces so far.
    `places` says between the pieces how far each delta has been added, and is zero
    before the first one.
    """
    import numpy as np

    newer, sound = _words(piece, width), True
    end = first + len(newer)
    so_far = np.frombuffer(places, np.uint64).reshape(-1, 3)
    for number, (words, gaps) in enumerate(
        zip(words_and_gaps[::2], words_and_gaps[1::2], strict=True)
    ):
        begun, place, taken = map(int, so_far[number])
        packed, passed = _words(words, width)[taken:], np.frombuffer(gaps, np.uint8)[begun:]
        lists = passed < _PASS
        # Behind each byte: the words that were listed, and the place.
        counts = np.cumsum(lists)
        ends = place + np.cumsum(passed, dtype=np.int64) + counts
        later = np.flatnonzero(lists & ((ends > end) | (counts > len(packed))))
        used = int(later[0]) if len(later) else len(passed)
        at = ends[:used][lists[:used]] - 1
        newer[at - first] += _fold(packed[: len(at)])
        place = int(ends[used - 1]) if used else place
        so_far[number] = begun + used, place, taken + len(at)
        sound = sound and used == len(passed) and len(at) == len(packed) and place <= end
    return sound


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
