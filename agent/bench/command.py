"""Defines the verb `ckptd bench`, and writes its table."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from ckptd.agent.bench.budget import LIMITS, Budgeted
from ckptd.agent.bench.measure import Report, measure
from ckptd.shared.command import json_option, speaks
from ckptd.shared.location import local
from ckptd.shared.units import size_text


@click.command(short_help="Measure ckptd and its peers on this machine.")
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    required=True,
    envvar="CKPTD_ROOT",
    help="Directory on the disk that is to be measured.",
)
@click.option(
    "--megabytes",
    type=click.IntRange(1),
    default=500,
    help="Size of the state that is saved. Default: 500.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    help="Times that each way is measured; the median counts. Default: 3.",
)
@json_option
@speaks
def bench(root: Path, megabytes: int, rounds: int, as_json: bool) -> None:
    """Measure what saving and loading cost on this machine: with ckptd, and with
    PyTorch's own ways.

    A model is trained, on the accelerator if there is one, and its state is saved in
    turn by each way. A private daemon saves for ckptd; CKPTD_* variables set it up,
    like CKPTD_CODEC=raw. Everything is written into a new directory under --root, and
    deleted at the end.

    The last table tells where the time of a snapshot goes: what each step of the call
    takes for itself, for each tensor and for each MB, and the least that this machine
    needs for it.
    """
    report = measure(
        local(root, "--root"),
        megabytes * 1_000_000,
        rounds,
        lambda text: click.echo(f"{text} ...", err=True),
    )
    click.echo(
        msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
        if as_json
        else text_of(report)
    )


def text_of(report: Report) -> str:
    """Return the report as a table."""
    machine = report.machine
    where = f" on {machine['accelerator']}" if machine["accelerator"] else ""
    lines = [
        f"ckptd {machine['ckptd']}, torch {machine['torch']}, {machine['cpus']} CPUs, load "
        f"{machine['load']:.1f}",
        f"{size_text(report.nbytes)} of fp32 weights and moments in {report.tensors} "
        f"tensors{where}; medians of {report.rounds}",
        "",
        f"{'saving':<26}{'training held':>15}{'then durable':>15}{'stored':>9}",
    ]
    for name, found in report.saves.items():
        until = "" if found.durable == found.held else f"{found.durable:.3f} s"
        stored = f"{found.stored / report.nbytes:.0%}" if found.stored is not None else ""
        lines.append(f"{name:<26}{found.held:>13.3f} s{until:>15}{stored:>9}")
    lines += [
        "",
        f"first snapshot after prepare        {report.first:.3f} s",
        f"training time lost by a snapshot    {report.lost:.3f} s, the call included; a step "
        f"takes {report.step:.3f} s",
        f"memory of the daemon, most          {size_text(report.daemon_peak)}",
        "",
        *(f"{name:<36}{seconds:.3f} s" for name, seconds in report.restores.items()),
        "",
        f"{'a snapshot, in µs for each':<26}{'call':>8}{'tensor':>8}{'MB':>8}"
        f"{'at least: call':>16}{'tensor':>8}{'MB':>8}",
        *(_step_of(name, found) for name, found in report.budget.items()),
    ]
    return "\n".join(lines)


def _step_of(name: str, found: Budgeted) -> str:
    """Return the line of one step of a snapshot, beside the limit of the machine."""
    line = f"{name:<26}"
    for cost, width in ((found.cost, 8), (found.limit, 16)):
        if cost is not None:
            for seconds, digits, wide in (
                (cost.call, 0, width), (cost.tensor, 3, 8), (cost.megabyte, 2, 8),
            ):  # fmt: skip
                line += f"{seconds * 1e6:>{wide}.{digits}f}"
    return line if found.limit is None else f"{line}  {LIMITS[name]}"
