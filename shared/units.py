"""Words sizes, times and lists for people: `22.7 MB`, `3 min`, `a, b and 3 more`, reads
sizes and times that people type, and makes any text fit for a terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_SIZES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b?", re.IGNORECASE)
_SPAN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(ms|[smhdw]?)")
_SPAN_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(text: str) -> int:
    """Return the number that a text stands for: `"24G"` is 24 * 10**9, `"8Mi"` is 8 *
    2**20. Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    number = float(match[1]) * _SIZES[match[2].lower()] if match else math.inf
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number)


def size_text(nbytes: float) -> str:
    """Return a number of bytes in the unit that fits, with decimal prefixes (1 kB is
    1000 bytes).
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def share_text(done: int, total: int) -> str:
    """Return a part of a number of bytes, in the unit of the whole: `3.1 of 8.0 GB`."""
    number, unit = size_text(total).split(" ")
    power = {"B": 0, "kB": 1, "MB": 2, "GB": 3, "TB": 4}[unit]
    decimals = len(number.partition(".")[2])
    return f"{done / 1000**power:.{decimals}f} of {number} {unit}"


def progress_text(done: int, total: int, rate: float | None, left: float | None) -> str:
    """Return how much of a number of bytes is done, and with a known rate how long the
    rest will take: `3.1 of 8.0 GB at 1.2 GB/s, 4 s left`.

    rate: bytes per second. left: seconds.
    """
    share = share_text(done, total)
    if rate is None or left is None:
        return share
    return f"{share} at {size_text(rate)}/s, {span_text(left)} left"


def count_text(count: int, noun: str) -> str:
    """Return the number with its noun, which gets an "s" unless the number is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some_text(names: Sequence[object], most: int = 8) -> str:
    """Return the first names with commas between them, and the number of the others:
    `a, b and 3 more`.
    """
    return ", ".join(map(str, names[:most])) + (
        f" and {len(names) - most:,d} more" if len(names) > most else ""
    )


def rank_list(ranks: Sequence[int]) -> str:
    """Return "rank 2", "ranks 1, 2", or the first eight ranks and the number of the
    others.
    """
    return f"rank{'s' if len(ranks) != 1 else ''} {some_text(ranks)}"


def span_text(seconds: float) -> str:
    """Return a time as hours and minutes, as minutes, or as seconds if it is less than
    a minute.
    """
    minutes, hours = divmod(int(seconds // 60), 60)[::-1]
    return (
        f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
    )


def short_span_text(seconds: float) -> str:
    """Return a time in one unit, with about three digits: `20 ms`, `19.3 s`, `2.5 min`.

    Times below two minutes are in seconds, and below two hours in minutes.
    """
    for least, unit, name in (
        (2 * 86400, 86400, "days"), (7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"),
    ):  # fmt: skip
        if seconds >= least:
            return f"{seconds / unit:.{0 if seconds / unit >= 99.95 else 1}f} {name}"
    return f"{seconds * 1000:.3g} ms"


def ordinal(number: int) -> str:
    """Return a number as in "the 2nd"."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,d}{'th' if number % 100 in (11, 12, 13) else ending}"


def parse_span(text: str) -> float:
    """Return the seconds that a text stands for: `30m` is 1800, and a number without a
    unit is one of seconds. The units are ms, s, m, h, d and w. Raises ValueError.
    """
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return float(match[1]) * _SPAN_SECONDS[match[2]]


def ranges_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, like `0-3, 6`, and after eight of them the
    number of the other ranges.
    """
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return some_text([str(low) if low == high else f"{low}-{high}" for low, high in ranges])


def printable(text: str) -> str:
    """Escape characters that a terminal obeys instead of showing: control characters,
    line feeds, and marks of the text's direction.
    """
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )
