"""Defines `ckptd interval`, which computes how often a job should be saved."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from typing import Any

import click

from ckptd.daemon.commands.history_command import history_file
from ckptd.daemon.commands.report import as_table
from ckptd.shared.command import CHECKPOINT, SPAN, chosen, json_option, speaks
from ckptd.shared.errors import InvalidRequest, NotFound
from ckptd.shared.interval import (
    THIRD_SLOT,
    Costs,
    Failures,
    Intervals,
    SaveLevel,
    choose,
    share_of_time,
)
from ckptd.shared.storage.choice import Named
from ckptd.shared.storage.locate import find_job_or_checkpoint
from ckptd.shared.units import count_text, short_span_text

_SAVES = 20
"""The number of the job's last saves whose costs count."""


@click.command(short_help="Compute how often a job should be saved.")
@click.argument("path", type=CHECKPOINT, required=False)
@click.option(
    "--mtbf",
    type=SPAN,
    required=True,
    help="Mean time between two failures of the whole job, like 3h.",
)
@click.option(
    "--mtbf-node",
    type=SPAN,
    help="Mean time between two failures of the job that lose the memory of a node.",
)
@click.option("--held", type=SPAN, help="Time for which a snapshot holds the training, like 20ms.")
@click.option(
    "--lost",
    type=SPAN,
    help="Training time that a snapshot costs if it goes to storage, --held included.",
)
@click.option("--durable", type=SPAN, help="Time until a snapshot is durable on storage.")
@click.option("--restore", type=SPAN, default=None, help="Time that a recovery from storage takes.")
@click.option("--step", type=SPAN, help="Time that a step of the training takes.")
@json_option
@speaks
def interval(
    path: Named | None,
    mtbf: float,
    mtbf_node: float | None,
    held: float | None,
    lost: float | None,
    durable: float | None,
    restore: float | None,
    step: float | None,
    as_json: bool,
) -> None:
    """Compute how often to snapshot to memory and to storage, so that the least time is
    lost to saves and failures.

    PATH is DIR/JOB: the costs are then those of the job's last saves on this node, from
    the history. Options come before what was measured. Without PATH, --held and
    --durable are needed, and no daemon is asked.

    The schedule "auto" chooses in the same way. docs/how-to/how-often.md explains it.
    """
    if mtbf_node is not None and mtbf_node < mtbf:
        raise InvalidRequest(
            f"--mtbf-node is {short_span_text(mtbf_node)}, less than --mtbf: the failures that "
            f"lose a node are some of all failures, so the time between them is longer"
        )
    if lost is not None and held is not None and lost < held:
        raise InvalidRequest(
            f"--lost is {short_span_text(lost)}, less than --held: give the whole time that the "
            f"training loses, with the time for which it is held"
        )
    saves = 0
    if path is not None:
        known, usual, saves = _of_job(path)
        costs = Costs(held or known.held, durable or known.durable, lost or known.lost)
        step = step or usual
    elif held is None or durable is None:
        missing = "--held" if held is None else "--durable"
        raise InvalidRequest(
            f"{missing} is missing: give --held and --durable, or the path of a job (DIR/JOB), "
            f"whose history has them"
        )
    else:
        costs = Costs(held, durable, lost)
    failures = Failures(mtbf, mtbf_node)
    best = choose(costs.levels(failures, restore or 0.0), step=step or 0.0)
    click.echo(
        json.dumps(as_object(best, costs, failures, saves), indent=1)
        if as_json
        else told(best, costs, failures, saves)
    )


def _of_job(path: Named) -> tuple[Costs, float, int]:
    """Return what the last saves of a job have cost, the time of its steps or 0.0, and
    the number of those saves.
    """
    from ckptd.daemon.telemetry.history import read_history  # SQLite

    place = chosen(path)
    _, job, tag = find_job_or_checkpoint(place)
    if tag is not None:
        raise InvalidRequest(f"{place} is a checkpoint: name its job, DIR/JOB")
    file = history_file(place.parent, None)
    saves = [
        event.facts for event in read_history(file, job=job, names=["save.done"], limit=_SAVES)
    ]
    if not saves:
        raise NotFound(f"the history {file} has no save of job {job!r}: give --held and --durable")
    steps = [float(save["step_seconds"] or 0.0) for save in saves if "step_seconds" in save]
    return Costs.measured(saves), statistics.median(steps) if steps else 0.0, len(saves)


def as_object(best: Intervals, costs: Costs, failures: Failures, saves: int) -> dict[str, Any]:
    """Return the choice as `--json` prints it."""
    return {
        "saves": saves,
        "costs": {f"{name}_seconds": value for name, value in asdict(costs).items()},
        "mtbf_seconds": failures.mtbf,
        "mtbf_node_seconds": failures.mtbf_node,
        "step_seconds": best.step or None,
        **{name: _choice_object(choice) for name, choice in _around(best).items()},
    }


def _choice_object(choice: Intervals) -> dict[str, Any]:
    steps = choice.steps or [None] * len(choice.levels)
    rows = zip(
        choice.levels, choice.every, choice.intervals, steps, choice.lost_to_saves,
        choice.lost_to_failures, strict=True,
    )  # fmt: skip
    return {
        "lost": choice.lost,
        "levels": [
            {
                "level": level.name, "every": every, "interval_seconds": interval, "steps": count,
                "cost_seconds": level.cost,
                "mtbf_seconds": level.mtbf if math.isfinite(level.mtbf) else None,
                "lost_to_saves": to_saves, "lost_to_failures": to_failures,
            }
            for level, every, interval, count, to_saves, to_failures in rows
        ],
    }  # fmt: skip


def _around(best: Intervals) -> dict[str, Intervals]:
    return {"half": best.scaled(0.5), "best": best, "double": best.scaled(2.0)}


def told(best: Intervals, costs: Costs, failures: Failures, saves: int) -> str:
    """Return the choice for people: a table, and the arithmetic in words.

    saves: the number of saves that the costs are the medians of, or 0.
    """
    rows = [("", *(level.name.upper() for level in best.levels), "LOST")]
    rows += [
        (name, *choice.interval_texts, share_of_time(choice.lost))
        for name, choice in _around(best).items()
    ]
    source = f" (medians of the last {count_text(saves, 'save')})" if saves else ""
    lines = [
        *as_table(rows), "",
        _sentence(str(best)), _sentence(f"{costs}{source}"), _sentence(str(failures)), "",
        *arithmetic(best),
    ]  # fmt: skip
    if costs.lost is None:
        lines.append(
            "Without --lost, it is not known what storage costs beside the training: every "
            "snapshot goes there."
        )
    elif failures.mtbf_node is None:
        lines.append(
            "Without --mtbf-node, each level is planned as if all failures were of its kind: this "
            "is the most that is lost."
        )
    if best.lost > 1:
        lines.append(
            "More time is lost than is trained. With failures this frequent, the true loss is "
            "higher still: save faster, or find what fails."
        )
    if best.needs_third_slot:
        lines.append(_sentence(THIRD_SLOT))
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def arithmetic(choice: Intervals) -> list[str]:
    """Return one line for each level and one for their sum."""
    rows = zip(
        choice.levels, choice.intervals, choice.lost_to_saves, choice.lost_to_failures, strict=True
    )
    lines = [
        f"{level.name}: {short_span_text(level.cost)} every {short_span_text(interval)} lose "
        f"{share_of_time(to_saves)}; {_failing(level, interval)} {share_of_time(to_failures)}"
        for level, interval, to_saves, to_failures in rows
    ]
    return [*lines, f"in all: {share_of_time(choice.lost)} of the training time"]


def _failing(level: SaveLevel, interval: float) -> str:
    parts = [f"half an interval ({short_span_text(interval / 2)})"]
    if level.durable:
        parts.append(f"the time until a snapshot is durable ({short_span_text(level.durable)})")
    if level.restore:
        parts.append(f"the recovery ({short_span_text(level.restore)})")
    if not math.isfinite(level.mtbf):
        return "no failure needs this level:"
    return f"{' and '.join(parts)} every {short_span_text(level.mtbf)} lose"
