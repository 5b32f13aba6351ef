"""Tests how sizes and times are worded."""

from __future__ import annotations

import pytest

from ckptd.shared.units import count_text, size_text, span_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (22_680_000, "22.7 MB"), (24e9, "24.0 GB"), (1.5e15, "1500.00 TB")],
)
def test_sizes_have_the_unit_that_fits(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


def test_one_is_singular() -> None:
    assert [count_text(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min"), (3599, "59 min"), (7380, "2 h 3 min")])
def test_times_have_minutes_from_one_minute_on(seconds: float, text: str) -> None:
    assert span_text(seconds) == text
