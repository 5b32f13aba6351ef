"""Defines the verb `ckptd diff`, which tells what differs between two checkpoints."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ckptd.daemon.commands.report import as_table, title
from ckptd.shared.command import CHECKPOINT, chosen, json_option, speaks
from ckptd.shared.errors import CkptdError, NotFound, StorageError, storage_errors
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Location
from ckptd.shared.storage.choice import Named
from ckptd.shared.storage.locate import find_job_or_checkpoint, manifests, meant
from ckptd.shared.units import count_text, printable

if TYPE_CHECKING:  # it needs NumPy, which other commands do without
    from ckptd.shared.array_checkpoint import ArrayCheckpoint
    from ckptd.shared.array_diff import CheckpointDifference, TensorDifference

TROUBLE = 2
"""The exit code for an error that has no code of its own, as in diff(1): 1 means that
the checkpoints differ.
"""
_MOST_SHOWN = 60
_MOST_INDENTED = 1000
"""The most tensors that JSON has on lines of their own."""


@click.command(short_help="Tell what differs between two checkpoints.")
@click.argument("a", type=CHECKPOINT)
@click.argument("b", type=CHECKPOINT)
@json_option
@speaks
def diff(a: Named, b: Named, as_json: bool) -> None:
    """Tell what differs between the checkpoints A and B: the keys that only one of them
    has, shapes and dtypes, values such as learning rates, and how far tensors are apart,
    the largest relative difference first; and what differs of the runs that saved them,
    such as the commit and the command line.

    A and B are named as for `ckptd show`: DIR/JOB/TAG, DIR/JOB/STEP, DIR/JOB for its
    newest checkpoint, or a directory that is a checkpoint. Needs neither torch nor a
    daemon. The exit code is 0 if they hold the same state, and 1 if they differ, as that
    of diff.
    """
    from ckptd.shared.array_diff import difference

    try:
        with ExitStack() as held:
            one, other = _opened(chosen(a), held), _opened(chosen(b), held)
            found = difference(one.checkpoint, other.checkpoint)
    except OSError as error:
        raise _trouble(StorageError.of("read a checkpoint", error)) from None
    except CkptdError as error:
        raise _trouble(error) from None
    alike = one.name == other.name
    name_a, name_b = (each.where if alike else each.name for each in (one, other))
    if as_json:
        # With an indent, Python's encoder takes seconds for 100,000 tensors.
        indent = 1 if len(found.tensors) <= _MOST_INDENTED else None
        click.echo(json.dumps({"a": name_a, "b": name_b, **found.as_json()}, indent=indent))
    else:
        click.echo(difference_text(name_a, name_b, found))
    if not found.is_none:
        sys.exit(1)


def _trouble(error: CkptdError) -> CkptdError:
    if error.exit_code == 1:
        error.exit_code = TROUBLE
    return error


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open checkpoint. `name` is its job and tag, `where` its location."""

    name: str
    where: str
    checkpoint: ArrayCheckpoint


def _opened(place: Location, held: ExitStack) -> _Opened:
    """Return a checkpoint, which cannot be deleted until `held` is closed.

    Raises NotFound, IntegrityError, NewerFormat, Busy, StorageError.
    """
    from ckptd.shared.array_checkpoint import ArrayCheckpoint

    repository, job, tag = find_job_or_checkpoint(place)
    if tag is None:
        orders = [
            (found.order, name)
            for name, found in manifests(repository, job)
            if isinstance(found, Manifest)
        ]
        if not orders:
            raise NotFound(f"{place} holds no checkpoint{meant(place)}")
        _, tag = max(orders)
    directory = tag
    with storage_errors(f"read {title(repository, job, tag)}"):
        held.callback(repository.lease(job, tag).close)
        checkpoint = ArrayCheckpoint(
            repository.read_manifest(job, tag),
            lambda part: repository.open_part(job, directory, part.file, part.index_sha256),
        )
        held.callback(checkpoint.close)
    return _Opened(title(repository, job, tag), repository.where(job, tag), checkpoint)


def difference_text(a: str, b: str, found: CheckpointDifference) -> str:
    """Return a difference as text for people."""
    lines = [f"A  {a}", f"B  {b}"]
    if found.tensors:
        titles = (
            "TENSOR", "SHAPE", "DTYPE", "DIFFER", "RELATIVE", "L2", "MAX ABS", "NOT FINITE",
        )  # fmt: skip
        lines += ["", *as_table([titles, *map(_tensor_row, found.tensors)])]
    if found.values:
        rows = [(each.name, _shown(each.a), _shown(each.b)) for each in found.values]
        lines += ["", *as_table([("VALUE", "A", "B"), *rows])]
    lines += _run_lines(found)
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        lines += ["", *(f"only in {name}: {key}" for key in only)] if only else []
    same = (
        f"{count_text(found.same_tensors, 'tensor')} and "
        f"{count_text(found.same_values, 'value')} are the same"
    )
    if found.is_none:
        told = "the states do not differ" if found.runs else "nothing differs"
        return "\n".join(map(printable, [*lines, "", f"{told}: {same}"]))
    alone = len(found.only_a) + len(found.only_b)
    return "\n".join(
        map(
            printable,
            [
                *lines,
                "",
                f"{count_text(len(found.tensors), 'tensor')} and "
                f"{count_text(len(found.values), 'value')} differ, {count_text(alone, 'key')} "
                f"{'is' if alone == 1 else 'are'} in one only; {same}",
            ],
        )
    )


def _run_lines(found: CheckpointDifference) -> list[str]:
    """Return two lines for each fact that differs of the runs: a command line is long,
    and may differ at its end.
    """
    rows = []
    for fact in found.runs:
        rows += [(fact.name, "A", fact.a or "-"), ("", "B", fact.b or "-")]
    return ["", *as_table([("RUN", "", ""), *rows])] if rows else []


def _tensor_row(found: TensorDifference) -> tuple[str, ...]:
    shapes = dict.fromkeys(str(list(shape)) for shape in found.shapes)
    return (
        found.name,
        " -> ".join(shapes),
        " -> ".join(dict.fromkeys(found.dtypes)),
        "-" if found.elements is None else str(found.elements),
        ("-" if found.l2 is None else "inf") if found.relative is None else _g(found.relative),
        "-" if found.l2 is None else _g(found.l2),
        "-" if found.max_abs is None else _g(found.max_abs),
        _not_finite(found.non_finite),
    )


def _not_finite(counts: tuple[int, int] | None) -> str:
    return "A {}, B {}".format(*counts) if counts and any(counts) else "-"


def _g(value: float) -> str:
    return f"{value:.3g}"


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
