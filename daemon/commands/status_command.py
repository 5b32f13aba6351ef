"""Defines the verb `ckptd status`: once, again and again, or as an exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from ckptd.daemon.commands import health, neighbours, report
from ckptd.daemon.commands.job_report import job_report, job_text
from ckptd.daemon.commands.restart import gone_root, restart_advice
from ckptd.daemon.commands.stored_jobs import stored_jobs, stored_jobs_text
from ckptd.daemon.commands.watch import Watchable, watch, watch_option
from ckptd.daemon.job.stored_checkpoint import LITTLE_ROOM
from ckptd.shared import errors as e
from ckptd.shared.command import (
    PLACE,
    SPAN,
    as_object,
    configured_root,
    json_option,
    socket_option,
    speaks,
)
from ckptd.shared.location import Location
from ckptd.shared.storage.locate import is_root, meant

_USUAL = "ckptd status ROOT"


@click.command(cls=Watchable, short_help="Tell what a daemon is doing.")
@click.argument("root", type=PLACE, required=False)
@click.option(
    "--job",
    help="Tell from storage which nodes of this job have delivered its last steps. Needs no daemon "
    "if ROOT is given.",
)
@watch_option
@click.option(
    "--check",
    is_flag=True,
    help='Print "ok" with exit code 0, or one line for each problem with exit code 1.',
)
@click.option(
    "--max-age",
    type=SPAN,
    help="With --check: the most time since the newest durable checkpoint of a job that runs, "
    "like 90s, 30m, 12h or 7d. Default: no limit.",
)
@click.option(
    "--min-room",
    type=click.IntRange(min=0),
    help=f"With --check: how many more checkpoints of a job that runs must fit on the disk. "
    f"Default: {LITTLE_ROOM}.",
)
@socket_option
@json_option
@speaks
def status(
    root: Location | None,
    job: str | None,
    again: float | None,
    check: bool,
    max_age: float | None,
    min_room: int | None,
    socket: Path | None,
    as_json: bool,
) -> None:
    """Tell what the daemon is doing: the one that serves ROOT, or else the one at
    --socket, or else that of CKPTD_ROOT. Exit code 0 only if it is ready.

    If no daemon serves that root, the command says so, and tells what storage has. The
    exit code is then 14.

    With --job, tell which nodes have delivered the last steps of a job. The exit code
    does not depend on that.

    With --check, tell whether all is well, for cron, systemd and probes: the daemon is
    ready and quick, the last saves have succeeded, no checkpoint is damaged, more
    checkpoints fit on the disk, and with --max-age the newest ones are young enough.
    """
    if check and job is not None:
        raise e.InvalidRequest("--check judges the whole daemon: leave out --job, or --check")
    if check and again is not None:
        raise e.InvalidRequest("--check answers once: leave out --watch, or --check")
    if not check and (max_age is not None or min_room is not None):
        raise e.InvalidRequest("--max-age and --min-room are limits of --check: add --check")
    if root is None and socket is None:
        root = configured_root()
    if job is not None:
        _tell_job(root, socket, job, again, as_json=as_json)
    elif check:
        found = _asked(root, socket)
        room = LITTLE_ROOM if min_room is None else min_room
        _check(found, health.problems(found, max_age=max_age, min_room=room), as_json=as_json)
    elif again is not None:
        _tell_again(neighbours.AskedDaemon(root, socket, _USUAL), again, as_json=as_json)
    else:
        _tell_once(root, socket, as_json=as_json)


def _asked(root: Location | None, socket: Path | None) -> dict[str, Any]:
    """Return the status of the daemon. Raises DaemonUnreachable, which says how to start
    the daemon of a root. Storage is not asked, because it may hang.
    """
    try:
        return neighbours.AskedDaemon(root, socket, _USUAL).status()
    except e.DaemonUnreachable as error:
        if root is None:
            raise
        raise e.DaemonUnreachable(f"{error}{_advice(root, error)}") from None


def _advice(root: Location, error: e.DaemonUnreachable) -> str:
    """Return what to add to an error about a root that no daemon serves.

    A daemon that is stopped is continued, and no other is started.
    """
    return "" if isinstance(error, neighbours.DaemonStopped) else restart_advice(root)


def _tell_once(root: Location | None, socket: Path | None, *, as_json: bool) -> None:
    try:
        found = neighbours.AskedDaemon(root, socket, _USUAL).status()
    except e.DaemonUnreachable as error:
        if root is None:
            raise
        _tell_from_storage(root, error, as_json=as_json)
    click.echo(json.dumps(found, indent=1) if as_json else report.status_text(found))
    if not found["ready"]:
        sys.exit(1)


def _tell_again(asked: neighbours.AskedDaemon, seconds: float, *, as_json: bool) -> NoReturn:
    def tell(columns: int | None) -> str:
        found = asked.status()
        return json.dumps(found) if as_json else report.status_text(found, columns)

    watch(tell, seconds, as_json=as_json)


def _tell_job(
    root: Location | None, socket: Path | None, job: str, seconds: float | None, *, as_json: bool
) -> None:
    def told() -> dict[str, Any]:
        usual = f"ckptd status ROOT --job {job}"
        return job_report(neighbours.served_root(socket, usual) if root is None else root, job)

    def tell(columns: int | None) -> str:
        return json.dumps(told()) if as_json else job_text(told(), columns)

    if seconds is not None:
        watch(tell, seconds, as_json=as_json)
    click.echo(json.dumps(told(), indent=1) if as_json else job_text(told()))


def _check(status: dict[str, Any], wrong: list[health.Problem], *, as_json: bool) -> None:
    click.echo(
        json.dumps(health.health_json(wrong), indent=1)
        if as_json
        else health.health_text(wrong, status)
    )
    if wrong:
        sys.exit(1)


def _tell_from_storage(root: Location, error: e.DaemonUnreachable, *, as_json: bool) -> NoReturn:
    """Print what a root has that no daemon serves, and exit.

    Raises DaemonUnreachable if it is no root, with what was probably meant.
    """
    if not is_root(root):
        hint = "" if "did you mean" in str(error) else meant(root) or gone_root(root)
        raise e.DaemonUnreachable(f"{error}{hint}")
    found = stored_jobs(root)
    if as_json:
        click.echo(json.dumps({**as_object(error), "storage": found}, indent=1))
    else:
        click.echo(f"ckptd: {error}{_advice(root, error)}. This is what storage has:", err=True)
        click.echo(stored_jobs_text(found))
    sys.exit(error.exit_code)
