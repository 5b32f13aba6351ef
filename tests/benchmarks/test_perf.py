"""The decision of `make perf`, with given numbers: which figures are worse, and which
changes are noise.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import perf
from benchmarks.perf import Measured, fails, figures, is_worse, report, spread, usage
from benchmarks.probes import ROWS, SELDOM
from tests.support.cases import each_case


def said(*pairs: tuple[float, float], lost: float | None = None) -> dict[str, Any]:
    figure = {"pairs": pairs, "peer": "plain copy", "nbytes": 3_000_000_000, "pages": "slot warm"}
    return {"figures": {"held": figure}, "threads": 2, "cpu": 1.5, "peak": 2e6, "lost": lost}


def test_the_spread_of_changes_are_their_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0, 4.0)
    assert spread([1.5]) == (1.5, 1.5, 1.5)


@each_case(
    ("why", "changes", "worse"),
    [
        ("all rounds say so", [1.2, 1.25, 1.3], True),
        ("three of four rounds say so", [0.99, 1.1, 1.2, 1.3], True),
        ("two of three rounds say so", [0.96, 1.1, 1.2], False),
        ("two of four rounds say so", [0.9, 0.95, 1.1, 1.3], False),
        ("the spread reaches 1", [0.8, 0.99, 1.05, 1.3], False),
        ("a wide spread above 1", [1.01, 1.5, 3.0], True),
        ("less than is tolerated", [1.04, 1.04, 1.05], False),
        ("better", [0.7, 0.8, 0.75], False),
        ("the same", [1.0, 1.0, 1.0], False),
        ("a count that never varies, 3 before and 4 now", [4 / 3] * 3, True),
        ("the earlier version lacks the figure", [], False),
    ],
)
def test_a_figure_is_worse_by_more_than_its_spread(
    why: str, changes: list[float], worse: bool
) -> None:
    assert is_worse(changes) is worse


@each_case(
    ("why", "first", "again", "failed"),
    [
        ("both times", [1.1, 1.2, 1.3], [1.1, 1.1, 1.2], True),
        ("the first time only", [1.1, 1.2, 1.3], [0.95, 1.0, 1.1], False),
        ("the second time only", [0.9, 1.0, 1.1], [1.2, 1.2, 1.3], False),
    ],
)
def test_a_figure_fails_if_it_is_worse_twice(
    why: str, first: list[float], again: list[float], failed: bool
) -> None:
    assert fails(first, again) is failed


def test_a_change_is_that_of_the_ratios_of_one_round() -> None:
    row = {
        # The machine is half as fast in the second round, for the peer, too.
        "this": [said((2.0, 1.0), (2.2, 1.0), (9.0, 1.0)), said((4.4, 2.0))],
        "other": [said((1.0, 1.0), (1.1, 1.0), (1.2, 1.0)), said((2.2, 2.0))],
    }
    assert Measured("held", row).changes == [2.0, 2.0]


def test_a_figure_that_the_earlier_version_lacks_has_no_change() -> None:
    found = Measured("held", {"this": [said((2.0, 1.0))], "other": []})
    assert found.changes == []
    said_of_it = "2.000 x plain copy (3.00 GB/s) 2.000 to 2.000 slot warm"
    assert " ".join(found.text().split()) == said_of_it


def test_a_row_says_what_it_has_used(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"this": [said((3.0, 1.0), lost=0.25)] * 2, "other": [said((2.0, 1.0), lost=0.125)] * 2}
    measured = {"15 tensors": row}
    report(figures(measured), {("15 tensors", "held")}, measured)
    head, figure = capsys.readouterr().out.splitlines()
    assert head == (
        "15 tensors: 2 threads, cpu 1.5 to 1.5 s, peak 2 to 2 MB, lost step time 125 to 250 ms"
    )
    assert " ".join(figure.split()) == (
        "FAIL held 3.000 x plain copy (3.00 GB/s) change 1.50 (1.50 to 1.50) slot warm"
    )
    assert usage({"this": [said((1.0, 1.0))]}).endswith("lost step time - ms")


def test_rows_are_measured_by_turns_and_seldom_ones_not_in_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def probe(row: str, version: object) -> dict[str, Any] | None:
        calls.append((row, "this" if version is None else "other"))
        return None if (row, version) == ("a process", perf.HERE) else said((1.0, 1.0))

    monkeypatch.setattr(perf, "probe", probe)
    (seldom, *_) = SELDOM
    found = perf.measure(["a process", seldom], 2, perf.HERE)
    assert calls == [
        ("a process", "other"), ("a process", "this"), (seldom, "other"), (seldom, "this"),
        ("a process", "this"), ("a process", "other"),
    ]  # fmt: skip
    assert {row: {v: len(each) for v, each in of.items()} for row, of in found.items()} == {
        "a process": {"this": 2},
        seldom: {"other": 1, "this": 1},
    }


def test_the_limits_are_those_of_rows_that_exist() -> None:
    assert {row for row, _ in perf.LIMITS} <= ROWS.keys()
    assert not ROWS.keys() & SELDOM.keys()
