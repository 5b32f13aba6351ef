"""Defines `ckptd history`, which prints what the daemons of a root did."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from ckptd.daemon.commands import neighbours
from ckptd.daemon.commands.report import as_table
from ckptd.daemon.log_events import EVENTS
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.shared import errors as e
from ckptd.shared.command import (
    PLACE,
    SPAN,
    complete_word,
    configured_root,
    json_option,
    socket_option,
    speaks,
)
from ckptd.shared.location import Location
from ckptd.shared.system import machine
from ckptd.shared.system.settings import nearest
from ckptd.shared.units import size_text, span_text

_DAY = 86400.0
_MOST = 120
"""The most characters of an event's text that are shown on a terminal."""


@click.command(short_help="Tell what the daemons of a root did.")
@click.argument("job", required=False)
@click.option("--root", type=PLACE, help="The root. Default: that of the daemon, or CKPTD_ROOT.")
@socket_option
@click.option(
    "--since", type=SPAN, default=None, help="Only the last 90s, 30m, 12h or 7d. Default: all."
)
@click.option(
    "--event",
    "names",
    multiple=True,
    metavar="EVENT",
    shell_complete=complete_word(*EVENTS),
    help="Only events of this name, like save.failed. Repeatable.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    help="How many events, the newest ones. Default: 50.",
)
@json_option
@speaks
def history(
    job: str | None,
    root: Location | None,
    socket: Path | None,
    since: float | None,
    names: tuple[str, ...],
    limit: int,
    as_json: bool,
) -> None:
    """Tell what the daemons of a root did on this node: snapshots that were saved or
    failed, checkpoints that were deleted, attempts, and the daemons themselves.

    With JOB, only what is about this job. Checkpoints that are deleted and jobs that
    have ended are in it too. JOB may also be DIR, DIR/JOB or a URL of either, where DIR
    is the root. docs/reference/events.md lists the events.
    """
    from ckptd.daemon.telemetry.history import read_history  # SQLite, which no other verb needs

    for name in names:
        if name not in EVENTS:
            near = nearest(name, EVENTS)
            raise e.InvalidRequest(
                f"--event {name}: there is no such event"
                + (f"; did you mean {near}?" if near else f"; the events are {', '.join(EVENTS)}")
            )
    root, job = neighbours.root_and_job(root, job)
    found = read_history(
        history_file(root, socket),
        job=job,
        names=names,
        since=0.0 if since is None else time.time() - since,
        limit=limit,
    )
    click.echo(
        json.dumps([row(event) for event in found], indent=1)
        if as_json
        else history_text(found, time.time(), most=_MOST if sys.stdout.isatty() else None)
    )


def history_file(root: Location | None, socket: Path | None) -> Path:
    """Return the history of the daemon that serves a root, or else the one at a socket.

    Without a daemon: the one of the root that this user's daemon would write. Raises
    DaemonUnreachable, NotFound.
    """
    root = root or (configured_root() if socket is None else None)
    try:
        status = neighbours.AskedDaemon(root, socket, "ckptd history --root ROOT").status()
    except e.DaemonUnreachable as error:
        if root is None:
            raise e.DaemonUnreachable(
                f"{error}; without a daemon, name the root: `ckptd history --root ROOT`"
            ) from None
        return machine.history_file(machine.configured_state_dir(), root)
    if status.get("history") is None:
        raise e.NotFound(
            f"the daemon of {status['root']} keeps no history: its setting `history` is off, or it "
            f"is older than this command"
        )
    return Path(status["history"])


def row(event: LoggedEvent) -> dict[str, Any]:
    """Return an event as `--json` prints it."""
    return {
        "time": event.time,
        "event": event.name,
        "level": logging.getLevelName(event.level).lower(),
        "job": event.job or None,
        "text": event.text,
        "facts": event.facts,
    }


def history_text(events: list[LoggedEvent], now: float, most: int | None = None) -> str:
    """Return events as a table for people.

    now: in Unix seconds. most: of each text, only so many characters are shown, or all
    with None.
    """
    if not events:
        return "nothing is known"
    head = ("TIME", "AGE", "EVENT", "JOB", "STEP", "SIZE", "NEW", "HELD", "DURABLE", "")
    return "\n".join(as_table([head, *(_cells(event, now, most) for event in events)]))


def _cells(event: LoggedEvent, now: float, most: int | None) -> tuple[str, ...]:
    facts = event.facts
    step = facts.get("step")
    known = event.name in ("save.done", "checkpoint.deleted", "upload.done")
    age = max(0.0, now - event.time)
    return (
        datetime.fromtimestamp(event.time).strftime("%Y-%m-%d %H:%M:%S"),
        f"{age / _DAY:.0f} d" if age >= 2 * _DAY else span_text(age),
        event.name,
        event.job or "-",
        "-" if step is None else str(step),
        _size(facts.get("bytes")),
        _size(facts.get("written_bytes")),
        _seconds(facts.get("held_seconds")),
        _seconds(facts.get("durable_seconds")),
        _deltas(facts) if known else event.text[:most],
    )


def _deltas(facts: Mapping[str, Any]) -> str:
    """Return which part of a save is stored as deltas, in words, or "" for none."""
    chunks = facts.get("delta_chunks")
    if not chunks:
        return ""
    return f"{chunks} of {facts.get('chunks', '?')} chunks as deltas, chain {facts.get('chain')}"


def _size(value: object) -> str:
    return size_text(value) if isinstance(value, int | float) else "-"


def _seconds(value: object) -> str:
    return f"{value:.3f} s" if isinstance(value, int | float) else "-"
