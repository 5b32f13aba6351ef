"""Tests the order and the columns of `ckptd ls`, with metrics of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckptd.daemon.commands import columns
from ckptd.daemon.commands.cli import main
from ckptd.shared.errors import InvalidRequest
from tests.support.cases import each_case
from tests.support.forged import forge

CREATED = "2026-11-21T00:00:00+00:00"
NOW = 1_795_219_200.0 + 7200  # two hours after CREATED


def row(step: int | None, metrics: dict[str, float | str], **changes: Any) -> columns.ListedRow:
    return {
        "job": "gpt", "tag": f"step-{step}", "newest": False, "pinned": False, "attempt": 1,
        "step": step, "seq": 1, "world_size": 2, "bytes": 1500, "raw_bytes": 2000,
        "new_bytes": 1500, "chain": 0, "restored_bytes": 1400, "created": CREATED,
        "metrics": metrics, "damaged": None, **changes,
    }  # fmt: skip


DAMAGED: columns.ListedRow = {
    "job": "gpt", "tag": "step-9", "newest": False, "pinned": True, "damaged": "cut short",
}  # fmt: skip
ROWS = [
    DAMAGED,
    row(1, {"loss": 0.5}),
    row(2, {"loss": "nan", "steps\n": 1.0}),
    row(3, {}),
    row(4, {"loss": 0.123456789, "size": 7.0}, newest=True, pinned=True),
    row(5, {"loss": "-inf"}, bytes=900, created="yesterday"),
    row(6, {"loss": 0.5}, raw_bytes=0),
]


def steps(sort: str, *, reverse: bool = False) -> list[int | None]:
    (column,) = columns.columns([sort], ROWS, NOW)
    return [found.get("step") for found in columns.ordered(ROWS, column, reverse=reverse)]


def test_nan_comes_behind_all_numbers_and_what_is_missing_last() -> None:
    assert steps("loss") == [5, 4, 1, 6, 2, None, 3]
    assert steps("loss", reverse=True) == [1, 6, 4, 5, 2, None, 3]
    assert steps("step") == [1, 2, 3, 4, 5, 6, None]
    assert steps("size", reverse=True) == [1, 2, 3, 4, 6, 5, None]
    assert steps("metric:size") == [4, None, 1, 2, 3, 5, 6]
    assert steps("age") == [1, 2, 3, 4, 6, None, 5]


def text(shown: str | None, sort: str | None, rows: list[columns.ListedRow] = ROWS) -> list[str]:
    said = columns.arranged(rows, shown, sort, reverse=False, as_json=False, now=NOW)
    return said.split("\n")


def test_metrics_are_columns_and_missing_values_are_dashes() -> None:
    assert text("step,loss,size,age,metric:size", "loss") == [
        "STEP  loss      SIZE    AGE        size",
        "5     -inf      900 B   -          -",
        "4     0.123457  1.5 kB  2 h 0 min  7",
        "1     0.5       1.5 kB  2 h 0 min  -",
        "6     0.5       1.5 kB  2 h 0 min  -",
        "2     nan       1.5 kB  2 h 0 min  -",
        "-     -         -       -          -     DAMAGED: cut short",
        "3     -         1.5 kB  2 h 0 min  -",
    ]


def test_the_usual_columns_get_the_one_that_is_sorted_by() -> None:
    title, first = text(None, "loss", ROWS[4:5])
    assert " ".join(title.split()) == ("JOB TAG STEP ATTEMPT RANKS SIZE OF RAW CREATED MARKS loss")
    assert " ".join(first.split()) == (
        f"gpt step-4 4 1 2 1.5 kB 75% {CREATED} newest, pinned 0.123457"
    )
    assert text(None, "step", ROWS[4:5])[0].endswith("MARKS")


def test_deltas_bring_columns_of_their_own() -> None:
    rows = [row(1, {}), row(2, {}, new_bytes=30, chain=1, restore_seconds=0.25), DAMAGED]
    title, whole, delta, _ = text(None, "step", rows)
    assert title.split()[5:11] == ["SIZE", "OF", "RAW", "NEW", "CHAIN", "CREATED"]
    assert (whole.split()[7:11], delta.split()[7:11]) == (
        ["75%", "1.5", "kB", "whole"],
        ["75%", "30", "B", "1"],
    )
    assert text("new,chain,read,restore", None, rows)[1:] == [
        "1.5 kB  whole  1.4 kB  -",
        "30 B    1      1.4 kB  0.2 s",
        "-       -      -       -        DAMAGED: cut short",
    ]


def test_every_column_has_a_value_and_a_text() -> None:
    names = (
        "job,tag,step,attempt,seq,ranks,size,raw,of_raw,new,chain,read,restore,created,age,marks"
    )
    said = columns.arranged(ROWS[4:5], names, None, reverse=False, as_json=True, now=NOW)
    assert json.loads(said) == [
        {
            "job": "gpt", "tag": "step-4", "step": 4, "attempt": 1, "seq": 1, "ranks": 2,
            "size": 1500, "raw": 2000, "of_raw": 0.75, "new": 1500, "chain": 0, "read": 1400,
            "restore": None, "created": CREATED, "age": 7200.0, "marks": "newest, pinned",
            "damaged": None,
        }
    ]  # fmt: skip


def test_json_has_null_for_what_is_missing_and_texts_for_what_json_lacks() -> None:
    said = columns.arranged(ROWS, "step,loss", "step", reverse=True, as_json=True, now=NOW)
    assert json.loads(said) == [
        {"step": 6, "loss": 0.5, "damaged": None},
        {"step": 5, "loss": "-inf", "damaged": None},
        {"step": 4, "loss": 0.123456789, "damaged": None},
        {"step": 3, "loss": None, "damaged": None},
        {"step": 2, "loss": "nan", "damaged": None},
        {"step": 1, "loss": 0.5, "damaged": None},
        {"step": None, "loss": None, "damaged": "cut short"},
    ]
    whole = columns.arranged(ROWS, None, "step", reverse=False, as_json=True, now=NOW)
    assert json.loads(whole) == [*ROWS[1:], DAMAGED]


@each_case(
    ("shown", "rows", "said"),
    [
        (
            "los", ROWS,
            "there is no column 'los'; the columns are job, tag, step, attempt, seq, ranks, size, "
            "raw, of_raw, new, chain, read, restore, created, age, non_finite, marks, and the "
            "metrics here are loss, size, steps\\n: did you mean 'loss'?",
        ),
        ("zzz", ROWS[3:4], "non_finite, marks, and no checkpoint here has metrics"),
        ("metric:step", ROWS, "there is no column 'metric:step'"),
        ("step,,loss", ROWS, "--columns 'step,,loss' has an empty name"),
        ("", [], "--columns '' has an empty name"),
    ],
)  # fmt: skip
def test_an_unknown_column_is_one_sentence(
    shown: str, rows: list[columns.ListedRow], said: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        columns.arranged(rows, shown, None, reverse=False, as_json=False, now=NOW)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_nothing_is_sorted_of_no_checkpoints() -> None:
    assert text("loss", "loss", []) == ["no checkpoints yet"]
    assert columns.arranged([], "loss", None, reverse=True, as_json=True, now=NOW) == "[]"


def test_the_command_sorts_a_job(tmp_path: Path) -> None:
    for step, metrics in ((1, {"loss": 0.25}), (2, {"loss": 0.125}), (3, {"top": 1.0})):
        forge(tmp_path, (2,), [[((0,), (2,))]], step=step, metrics=metrics)
    job = str(tmp_path / "gpt")
    done = CliRunner().invoke(main, ["ls", job, "--columns", "step,loss,ranks", "--sort", "loss"])
    assert (done.exit_code, done.output) == (
        0,
        "STEP  loss   RANKS\n2     0.125  1\n1     0.25   1\n3     -      1\n",
    )
    wrong = CliRunner().invoke(main, ["ls", job, "--sort", "lost"])
    assert wrong.exit_code == 2
    assert wrong.output.endswith("did you mean 'loss'?\n")
    alone = CliRunner().invoke(main, ["ls", job, "--reverse"])
    assert (alone.exit_code, "add --sort NAME" in alone.output) == (2, True)
