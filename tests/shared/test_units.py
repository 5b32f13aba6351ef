"""Tests how sizes, times and lists are worded, and how sizes and times are read."""

from __future__ import annotations

import re

import pytest

from ckptd.shared.units import (
    count_text,
    ordinal,
    parse_size,
    parse_span,
    progress_text,
    ranges_text,
    rank_list,
    share_text,
    short_span_text,
    size_text,
    some_text,
    span_text,
)
from tests.support.cases import each_case


@each_case(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (22_680_000, "22.7 MB"),
        (24e9, "24.0 GB"),
        (1.5e15, "1500.00 TB"),
    ],
)
def test_sizes_have_the_unit_that_fits(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


@each_case(
    ("done", "total", "text"),
    [
        (0, 0, "0 of 0 B"),
        (7, 999, "7 of 999 B"),
        (0, 41_943_040, "0.0 of 41.9 MB"),
        (3_100_000_000, 8_000_000_000, "3.1 of 8.0 GB"),
        (40_000_000_000, 1_500_000_000_000, "0.04 of 1.50 TB"),
    ],
)
def test_a_share_has_the_unit_of_the_whole(done: int, total: int, text: str) -> None:
    assert share_text(done, total) == text


@pytest.mark.parametrize(
    ("rate", "left", "text"),
    [
        (None, None, "3.1 of 8.0 GB"),
        (1_200_000_000, 4.1, "3.1 of 8.0 GB at 1.2 GB/s, 4 s left"),
        (1_000, 4.9e6, "3.1 of 8.0 GB at 1.0 kB/s, 1361 h 6 min left"),
    ],
)
def test_progress_has_rate_and_time_left_once_they_are_known(
    rate: int | None, left: float | None, text: str
) -> None:
    assert progress_text(31 * 10**8, 8 * 10**9, rate, left) == text


def test_one_is_singular() -> None:
    assert [count_text(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_long_lists_end_with_the_number_of_the_others() -> None:
    assert some_text([]) == ""
    assert some_text(["a"]) == "a"
    assert some_text(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert some_text(range(1008)) == "0, 1, 2, 3, 4, 5, 6, 7 and 1,000 more"
    assert some_text(["a", "b"], 1) == "a and 1 more"
    assert rank_list([2]) == "rank 2"
    assert rank_list([1, 2]) == "ranks 1, 2"
    assert rank_list(range(11)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"
    assert rank_list([]) == "ranks "


@each_case(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min"), (3599, "59 min"), (7380, "2 h 3 min")],
)
def test_times_have_minutes_from_one_minute_on(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_ranges_join_numbers_that_follow_each_other() -> None:
    assert ranges_text([]) == ""
    assert ranges_text([4]) == "4"
    assert ranges_text([0, 1, 2, 3, 6, 8, 9]) == "0-3, 6, 8-9"
    assert ranges_text(range(0, 20, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 2 more"


@each_case(
    ("text", "size"),
    [
        ("0", 0), ("24", 24), ("1k", 1000), ("1K", 1000), ("1Ki", 1024), ("1KiB", 1024), ("1kB",
        1000), ("3M", 3 * 10**6), ("3Mi", 3 << 20), ("24G", 24 * 10**9), ("24Gi", 24 << 30), ("2T",
        2 * 10**12), ("2TiB", 2 << 40), ("1.5G", 1_500_000_000), ("0.5Ki", 512), (" 8 Mi ",
        8 << 20), ("7b", 7),
    ],
)  # fmt: skip
def test_sizes_are_parsed_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@each_case(
    "text",
    [
        "",
        "k",
        "-1",
        "+1",
        "1 2",
        "1.",
        ".5",
        "1,5G",
        "1e3",
        "0x10",
        "1GG",
        "1Pi",
        "1i",
        "1ib",
        "one",
        "inf",
        "nan",
        "1\n2",
        "9" * 400,
    ],
)
def test_anything_but_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@each_case(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("30m", 1800),
        (" 1.5 h ", 5400),
        ("7d", 604800),
        ("4w", 2419200),
        ("20ms", 0.02),
        ("0", 0),
    ],
)
def test_times_are_read_with_their_units(text: str, seconds: float) -> None:
    assert parse_span(text) == seconds


@each_case("text", ["", "m", "30 minutes", "-1m", "1e3", "nan", "inf", "1h30m", "٣m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_span(text)


@each_case(
    ("seconds", "text"),
    [
        (0.0, "0 ms"), (0.00012, "0.12 ms"), (0.02, "20 ms"), (0.9994, "999 ms"), (1, "1.0 s"),
        (19.34, "19.3 s"), (99.97, "100 s"), (150, "2.5 min"), (7199, "120 min"),
        (9000, "2.5 h"), (200 * 3600, "8.3 days"),
    ],
)  # fmt: skip
def test_a_short_span_has_one_unit(seconds: float, text: str) -> None:
    assert short_span_text(seconds) == text


def test_ordinals() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111, 1003)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th", "1,003rd",
    ]  # fmt: skip
