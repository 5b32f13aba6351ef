"""Defines the verb `ckptd drain`, which saves what is in the memory of a node only before
the node goes, and says what has not left it in time.

It is made for hooks: the preStop hook of Kubernetes, a notice of a spot instance, an
epilog of Slurm. If no daemon serves the node, the command itself looks whether a
snapshot is in memory only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ckptd.daemon.commands import neighbours
from ckptd.daemon.job import dues
from ckptd.daemon.memory import unsaved
from ckptd.daemon.memory.unsaved import UnsavedSnapshot
from ckptd.shared import errors as e
from ckptd.shared.command import PLACE, configured_root, json_option, socket_option, speaks
from ckptd.shared.location import Location, located
from ckptd.shared.storage.locate import is_root, meant
from ckptd.shared.system import machine
from ckptd.shared.units import count_text, share_text, size_text
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel, NoDaemon
from ckptd.shared.wire.session import DRAIN

MOST_SECONDS = 86400.0
"""The longest deadline."""
_USUAL = "ckptd drain ROOT"
_PAUSE = 0.2  # seconds before a daemon that was lost is looked for again


@dataclass(frozen=True, slots=True)
class Outcome:
    """The snapshots that have left this node, and those that have not.

    root: the root that is served or was named, or "" if it is not known. seconds: the
    deadline. saved: job and tag of what has left. owed: what has not; `more` counts
    what is not in it. unsaved: without a daemon, the snapshots that are in memory only,
    by root. daemon: True if a daemon was asked.
    """

    root: str
    seconds: float
    daemon: bool = True
    saved: Sequence[str] = ()
    owed: Sequence[m.Due] = ()
    more: int = 0
    unsaved: Mapping[str, Sequence[UnsavedSnapshot]] = field(default_factory=dict)

    @property
    def drained(self) -> bool:
        return not (self.owed or self.unsaved)

    def row(self) -> dict[str, Any]:
        """Return what `ckptd drain --json` prints."""
        return {
            "drained": self.drained,
            "daemon": self.daemon,
            "root": self.root or None,
            "saved": list(self.saved),
            "owed": [
                {
                    "job": due.job,
                    "attempt": due.attempt,
                    "step": due.step,
                    "tag": due.tag,
                    "state": due.state,
                    "reason": due.reason or None,
                    "done_bytes": due.done,
                    "total_bytes": due.total,
                }
                for due in self.owed
            ],
            "more": self.more,
            "unsaved": [
                {"root": root or None, **snapshot.row()}
                for root, found in self.unsaved.items()
                for snapshot in found
            ],
        }


@click.command(short_help="Save what is in memory only, before a node goes.")
@click.argument("root", type=PLACE, required=False)
@click.option("--job", default="", help="Drain this job only. Default: all jobs of the daemon.")
@click.option(
    "--deadline",
    type=float,
    default=60.0,
    metavar="SECONDS",
    help="Seconds after which the command ends, whether or not all has left. Default: 60.",
)
@socket_option
@json_option
@speaks
def drain(
    root: Location | None, job: str, deadline: float, socket: Path | None, as_json: bool
) -> None:
    """Save what is in the memory of this node only, before the node goes: with the daemon
    that serves ROOT, or else the one at --socket, or else that of CKPTD_ROOT.

    Made for the preStop hook of Kubernetes, a notice that a spot instance ends, and an
    epilog of Slurm. The daemon runs on, and trainers may train on. The command ends once
    all snapshots that were sealed when it began are on storage, and no longer wait on
    the stage, or after the deadline. The daemon then continues to save.

    The exit code is 0 if nothing is owed any more, and 1 if something has not left: the
    command prints one line for each snapshot, with the reason and what to do. If there
    is no daemon, the exit code is 0 if no snapshot is in memory only.
    """
    if not 0 <= deadline <= MOST_SECONDS:
        raise e.InvalidConfig(
            f"--deadline is {deadline:g}: expected seconds from 0 to {MOST_SECONDS:g}"
        )
    named = root
    if root is None and socket is None:
        root = configured_root()
    outcome = _drained(root, socket, job, deadline)
    if isinstance(named, Path) and outcome.drained and not (outcome.daemon or is_root(named)):
        raise e.NotFound(f"no daemon serves {named}, which is no root{meant(named)}")
    if as_json:
        click.echo(json.dumps(outcome.row(), indent=1))
    else:
        click.echo(text(outcome))
    if not outcome.drained:
        sys.exit(1)


class _Lost(e.DaemonUnreachable):
    """Raised if a daemon of `root` is lost before it has answered."""

    def __init__(self, error: e.DaemonUnreachable, root: Location) -> None:
        super().__init__(str(error))
        self.root = root


def _drained(root: Location | None, socket: Path | None, job: str, seconds: float) -> Outcome:
    """Have the daemon drain the node, or look into its memory if there is no daemon.

    A daemon that ends meanwhile saves what it owes by itself. The command then waits for
    its end, or for the next daemon. Raises DaemonUnreachable if a daemon may be there and
    does not answer; Busy if it cannot be found from here.
    """
    until, lost = time.monotonic() + seconds, None
    while True:
        try:
            channel = _connection(root, socket, seconds)
            if channel is None:
                return _without_a_daemon(lost or root, job, seconds, until)
            return _with_the_daemon(channel, job, seconds, until)
        except (e.DaemonUnreachable, e.Busy) as error:
            lost = error.root if isinstance(error, _Lost) else lost
            if lost is None or time.monotonic() >= until:
                raise
        time.sleep(_PAUSE)


def _connection(root: Location | None, socket: Path | None, seconds: float) -> Channel | None:
    """Return a connection to the daemon, or None if there is no daemon."""
    try:
        return neighbours.connection(root, socket, _USUAL, seconds + neighbours.TIMEOUT)
    except NoDaemon:
        return None


def _with_the_daemon(channel: Channel, job: str, seconds: float, until: float) -> Outcome:
    """Have a daemon drain the node. Raises VersionMismatch if it cannot; _Lost."""
    with closing(channel):
        root = located(channel.welcome.root)
        if DRAIN not in channel.welcome.features:
            raise e.VersionMismatch(
                f"the daemon of {root} is of an older version that cannot drain: restart it with "
                f"this version, or use `ckptd stop`, which saves what is owed, too"
            )
        left = max(0.0, until - time.monotonic())
        try:
            channel.send(m.Drain(id=channel.new_id(), job=job, seconds=left))
            reply = channel.receive()[0]
        except e.DaemonUnreachable as error:
            raise _Lost(error, root) from None
    if isinstance(reply, m.Error):
        raise e.from_wire(reply.code, reply.message)
    assert isinstance(reply, m.Drained)
    return Outcome(str(root), seconds, saved=reply.saved, owed=reply.owed, more=reply.more)


def _without_a_daemon(root: Location | None, job: str, seconds: float, until: float) -> Outcome:
    """Look into the memory of this node. Raises Busy if a daemon that cannot be found
    from here uses it.
    """
    found = unsaved.without_a_daemon(
        Path(os.environ.get("CKPTD_SHM_DIR") or "/dev/shm"),
        machine.configured_state_dir(),
        root,
        max(1.0, until - time.monotonic()),
    )
    chosen = {
        place: [snapshot for snapshot in snapshots if job in ("", snapshot.job)]
        for place, snapshots in found.items()
    }
    return Outcome(
        "" if root is None else str(root),
        seconds,
        daemon=False,
        unsaved={place: snapshots for place, snapshots in chosen.items() if snapshots},
    )


# -- what is printed


def text(outcome: Outcome) -> str:
    """Return one line for each thing that has left or has not, and one about all."""
    where = f" for {outcome.root}" if outcome.root else ""
    if not outcome.daemon:
        lines = [
            unsaved.text(found, root or "their root") for root, found in outcome.unsaved.items()
        ]
        return "\n".join(lines) or (
            f"no daemon runs{where} on {machine.host()}, and no snapshot is in its memory only: "
            f"nothing is owed"
        )
    lines = [f"saved {place}" for place in outcome.saved]
    lines += [due_text(due, outcome.root) for due in outcome.owed]
    if outcome.drained:
        lines.append(f"nothing is owed to {outcome.root} any more")
    else:
        count = len(outcome.owed) + outcome.more
        lines.append(
            f"{count_text(count, 'snapshot')} did not leave {machine.host()} within "
            f"{outcome.seconds:g} s; the daemon continues to save"
        )
    return "\n".join(lines)


def due_text(due: m.Due, root: str) -> str:
    """Return one line about a snapshot that has not left the node: the reason, and what
    to do.
    """
    share = f"{share_text(due.done, due.total)}, {size_text(due.total - due.done)} left"
    what, todo = {
        dues.WAITING: (
            "waits for its turn, or for other nodes to seal it",
            "let all ranks call snapshot for this step, and give it more time with --deadline",
        ),
        dues.SAVING: (f"is still being written: {share}", "give it more time with --deadline"),
        dues.FAILED: (
            f"its save has failed: {due.reason}",
            "remove the cause, for example make room, and drain again",
        ),
        dues.DELIVERED: (
            "is saved by this node, and other nodes have not delivered their parts",
            f"`ckptd status {root} --job {due.job}` names them",
        ),
        dues.UPLOADING: (
            "is on the stage, and waits for its upload"
            + (f": {share}" if due.total else "")
            + (f": {due.reason}" if due.reason else ""),
            "give it more time with --deadline"
            if not due.reason
            else "mend what the reason names, and drain again",
        ),
    }.get(due.state, (due.state, "`ckptd status` tells more"))
    return f"NOT SAVED: {due.job}/{due.tag} {what}. To do: {todo}"
