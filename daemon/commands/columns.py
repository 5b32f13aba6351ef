"""Arranges the checkpoints that `ckptd ls` lists: their order, and their columns, which
are what the manifest says, and each metric.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckptd.daemon.commands.report import as_table, chain_text, has_deltas
from ckptd.daemon.commands.restore_time import seconds_text
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.units import printable, size_text, some_text, span_text

ListedRow = dict[str, Any]
"""A row of `report.listing`, for one checkpoint."""
_DEFAULT = ("job", "tag", "step", "attempt", "ranks", "size", "of_raw", "created", "marks")
"""The columns of a listing whose user has named none, if no checkpoint has deltas."""
METRIC = "metric:"
"""A column of this name and a metric's is the metric, if a column has the same name."""
_MOST_NAMED = 20


def arranged(
    rows: Sequence[ListedRow],
    shown: str | None,
    sort: str | None,
    *,
    reverse: bool,
    as_json: bool,
    now: float,
) -> str:
    """Return a listing as the user wants it, as text or as JSON.

    shown: the names of the columns, with commas between them, or None for the usual
    ones and that of `sort`; JSON then has all members of each row. sort: the name of a
    column to sort by, or None. reverse: list the greatest first. now: the time from
    which ages count, in Unix seconds. Raises InvalidRequest for a column that is not
    there.
    """
    names = usual_columns(rows) if shown is None else named_columns(shown)
    if not rows:
        return "[]" if as_json else "no checkpoints yet"
    if sort is not None:
        (column,) = columns([sort], rows, now)
        rows = ordered(rows, column, reverse=reverse)
        if shown is None and sort not in names:
            names.append(sort)
    if as_json and shown is None:
        return json.dumps(rows, indent=1)
    chosen = columns(names, rows, now)
    return json.dumps(as_objects(rows, chosen), indent=1) if as_json else table(rows, chosen)


def usual_columns(rows: Sequence[ListedRow]) -> list[str]:
    """Return the names of the columns of a listing whose user has named none."""
    names = list(_DEFAULT)
    if has_deltas(rows):
        at = names.index("created")
        names[at:at] = ["new", "chain"]
    return names


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a listing.

    value: returns a number or a text to sort by, or None if the row has none. text:
    words such a value for people.
    """

    name: str
    title: str
    value: Callable[[ListedRow], Any]
    text: Callable[[Any], str] = str


def columns(names: Sequence[str], rows: Sequence[ListedRow], now: float) -> list[Column]:
    """Return the columns of these names.

    now: the time from which ages count, in Unix seconds. Raises InvalidRequest, with the
    columns that there are, for a name that is neither a column nor a metric of a row.
    """
    metrics = dict.fromkeys(name for row in rows for name in row.get("metrics", ()))
    found = _own(now)
    for name in metrics:
        found[METRIC + name] = Column(METRIC + name, name, _metric(name), _number)
        found.setdefault(name, Column(name, name, _metric(name), _number))
    for name in names:
        if name not in found:
            raise _unknown(name, list(_own(now)), sorted(metrics))
    return [found[name] for name in names]


def _own(now: float) -> dict[str, Column]:
    def age(row: ListedRow) -> float | None:
        try:
            return round(max(0.0, now - datetime.fromisoformat(row["created"]).timestamp()), 1)
        except (KeyError, ValueError, OverflowError, OSError):
            return None

    def member(name: str) -> Callable[[ListedRow], Any]:
        return lambda row: row.get(name)

    def ratio(row: ListedRow) -> float | None:
        return row["bytes"] / row["raw_bytes"] if row.get("raw_bytes") else None

    def marks(row: ListedRow) -> str | None:
        return ", ".join(mark for mark in ("newest", "pinned") if row[mark]) or None

    found = [
        Column("job", "JOB", member("job")),
        Column("tag", "TAG", member("tag")),
        Column("step", "STEP", member("step")),
        Column("attempt", "ATTEMPT", member("attempt")),
        Column("seq", "SEQ", member("seq")),
        Column("ranks", "RANKS", member("world_size")),
        Column("size", "SIZE", member("bytes"), size_text),
        Column("raw", "RAW", member("raw_bytes"), size_text),
        Column("of_raw", "OF RAW", ratio, lambda value: f"{value:.0%}"),
        Column("new", "NEW", member("new_bytes"), size_text),
        Column("chain", "CHAIN", member("chain"), chain_text),
        Column("read", "READ", member("restored_bytes"), size_text),
        Column("restore", "RESTORE", member("restore_seconds"), seconds_text),
        Column("created", "CREATED", member("created")),
        Column("age", "AGE", age, span_text),
        Column("non_finite", "NON-FINITE", member("non_finite")),
        Column("marks", "MARKS", marks),
    ]
    return {column.name: column for column in found}


def _metric(name: str) -> Callable[[ListedRow], float | None]:
    def value(row: ListedRow) -> float | None:
        found = row.get("metrics", {}).get(name)
        return None if found is None else float(found)  # of "nan", "inf" and "-inf", too

    return value


def _number(value: float) -> str:
    return f"{value:.6g}"


def _unknown(name: str, own: list[str], metrics: list[str]) -> InvalidRequest:
    near = difflib.get_close_matches(name, [*own, *metrics], n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    known = f"the columns are {', '.join(own)}"
    there = (
        f", and the metrics here are {some_text(metrics, _MOST_NAMED)}"
        if metrics
        else ", and no checkpoint here has metrics"
    )
    return InvalidRequest(printable(f"there is no column {name!r}; {known}{there}{hint}"))


def named_columns(text: str) -> list[str]:
    """Return the names in the value of `--columns`. Raises InvalidRequest."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InvalidRequest(
            f"--columns {text!r} has an empty name: expected names with commas between them, like "
            f"step,val_loss,size,age"
        )
    return names


def ordered(rows: Sequence[ListedRow], column: Column, *, reverse: bool = False) -> list[ListedRow]:
    """Return the rows in the order of a column: the least first, or the greatest.

    NaN comes behind all numbers, and rows without a value last, in either order. Rows of
    one value stay in the order that they had.
    """

    def kind(row: ListedRow) -> int:
        value = column.value(row)
        return 2 if value is None else 1 if value != value else 0

    sound = [row for row in rows if kind(row) == 0]
    sound.sort(key=lambda row: column.value(row), reverse=reverse)
    others = [row for row in rows if kind(row)]
    return [*sound, *sorted(others, key=kind)]


def table(rows: Sequence[ListedRow], chosen: Sequence[Column]) -> str:
    """Return the rows as text, with "-" for a value that is missing, and the reason why
    a checkpoint is damaged at the end of its row.
    """

    def cell(row: ListedRow, column: Column) -> str:
        value = column.value(row)
        return "-" if value is None else column.text(value)

    lines = [[column.title for column in chosen] + [""]]
    lines += [
        [cell(row, column) for column in chosen]
        + [f"DAMAGED: {row['damaged']}" if row["damaged"] else ""]
        for row in rows
    ]
    return "\n".join(as_table(lines))


def as_objects(rows: Sequence[ListedRow], chosen: Sequence[Column]) -> list[dict[str, Any]]:
    """Return an object for each row, with the values by the names of their columns, null
    for a value that is missing, and `damaged`.

    NaN and the infinities, which JSON does not have, are the texts `nan`, `inf` and
    `-inf`.
    """

    def plain(value: Any) -> Any:
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)

    return [
        {column.name: plain(column.value(row)) for column in chosen} | {"damaged": row["damaged"]}
        for row in rows
    ]
