"""Defines the verb `ckptd logs`, which prints the log of a daemon."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import click

from ckptd.daemon.commands.log_lines import EntriesOf, LogFiles
from ckptd.daemon.commands.neighbours import AskedDaemon, root_and_job
from ckptd.shared.command import PLACE, configured_root, socket_option, speaks
from ckptd.shared.errors import DaemonUnreachable, NotFound
from ckptd.shared.location import Location
from ckptd.shared.system import machine
from ckptd.shared.units import printable


@click.command(short_help="Print the log of a daemon.")
@click.argument("job", required=False)
@click.option("--follow", "-f", is_flag=True, help="Print new lines as they come, until Ctrl-C.")
@click.option(
    "--lines",
    "-n",
    type=click.IntRange(min=0),
    help="Print only the last so many lines of what is there. Default: all.",
)
@click.option("--root", type=PLACE, help="The root that the daemon serves. Default: CKPTD_ROOT.")
@socket_option
@speaks
def logs(
    job: str | None, follow: bool, lines: int | None, root: Location | None, socket: Path | None
) -> None:
    """Print the log of the daemon of --root, or else the one at --socket, or else that
    of CKPTD_ROOT, the oldest line first. With JOB, print only what is about that job.

    JOB may also be DIR, DIR/JOB or a URL of either, where DIR is the root. If no daemon
    serves the root, the log of its last private daemon is printed.
    """
    root, job = root_and_job(root, job)
    if root is None and socket is None:
        root = configured_root()
    path = log_of(root, socket)
    selection = EntriesOf(job)
    with LogFiles(path) as files:
        there: Iterable[str] = filter(selection.keeps, files.there())
        if lines is not None:
            there = deque(there, maxlen=lines)
        for line in there:
            click.echo(printable(line))
        if follow:
            for line in filter(selection.keeps, files.more()):
                click.echo(printable(line))
        elif files.rest and selection.keeps(files.rest):
            click.echo(printable(files.rest))


def log_of(root: Location | None, socket: Path | None) -> Path:
    """Return the log file of the daemon of a root, or of the one at `socket` or at a
    usual place if `root` is None.

    Raises NotFound if that daemon logs to standard error, DaemonUnreachable if there is
    no daemon, and no private daemon has left a log.
    """
    try:
        status = AskedDaemon(root, socket, "ckptd logs --root ROOT").status()
    except DaemonUnreachable as error:
        if root is None:
            raise
        left = machine.state_directory(machine.configured_state_dir(), root) / "daemon.log"
        if not os.path.lexists(left):
            raise DaemonUnreachable(
                f"{error}; no private daemon has left a log at {left} either. A daemon that was "
                f"started with --log-file has left its log in that file, and one under systemd in "
                f"the journal (`journalctl -u UNIT`); `ckptd history --root {root}` has its last "
                f"events"
            ) from None
        click.echo(
            f"ckptd: no daemon serves {root}. This is the log of its last private daemon:", err=True
        )
        return left
    if status["log_file"] is None:
        raise NotFound(
            f"the daemon of {status['root']} (pid {status['pid']}) logs to its standard error, "
            f"and not to a file: under systemd, read it with `journalctl _PID={status['pid']}`, or "
            f"start the daemon with --log-file FILE"
        )
    return Path(status["log_file"])
