"""Defines the `ckptd` command line: ps, stop, gc, doctor, ls, show, verify,
forget, pin, unpin, and the verbs of other modules.

Commands print text for people, and JSON for programs with `--json`. The exit codes are
those of `ckptd.shared.command`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from ckptd.daemon.commands import neighbours, report
from ckptd.daemon.commands.copying import copy
from ckptd.daemon.commands.diff_command import diff
from ckptd.daemon.commands.drain_command import drain
from ckptd.daemon.commands.history_command import history
from ckptd.daemon.commands.interval_command import interval
from ckptd.daemon.commands.logs_command import logs
from ckptd.daemon.commands.page_command import page
from ckptd.daemon.commands.run_command import default_socket, run
from ckptd.daemon.commands.status_command import status
from ckptd.daemon.commands.top_command import top
from ckptd.daemon.memory import unsaved
from ckptd.shared import __version__, native_code
from ckptd.shared import errors as e
from ckptd.shared.command import (
    CHECKPOINT,
    MEMORY_ONLY,
    PLACE,
    ask_before_deleting,
    chosen,
    complete_path,
    configured_root,
    json_option,
    socket_option,
    speaks,
    step_option,
)
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Location, located
from ckptd.shared.retention import parse
from ckptd.shared.storage.choice import Named
from ckptd.shared.storage.locate import find_job_or_checkpoint
from ckptd.shared.storage.repository import Repository
from ckptd.shared.storage.standalone import StandaloneCheckpoint
from ckptd.shared.units import count_text

_EXAMPLES = """\b
Start the daemon of this node:     ckptd run --root /ckpts
See what it is doing:              ckptd status; ckptd top
List all daemons; stop one:        ckptd ps; ckptd stop /ckpts
Save what is owed before a node goes: ckptd drain /ckpts --deadline 25
List what has been saved:          ckptd ls /ckpts
Look at one checkpoint:            ckptd show /ckpts/JOB
See what a step has changed:       ckptd diff /ckpts/JOB/100 /ckpts/JOB/200
Check every byte of a job:         ckptd verify /ckpts/JOB
Delete old ones:                   ckptd forget /ckpts/JOB --keep 'LatestN(5)' --dry-run
Keep one whatever happens:         ckptd pin /ckpts/JOB/TAG
Check that this node is fit:       ckptd doctor --root /ckpts
How often to save a job:           ckptd interval /ckpts/JOB --mtbf 12h
Start a job from a model:          ckptd adopt path/to/model /ckpts/JOB
Take one elsewhere:                ckptd export /ckpts/JOB --to hf --out model
See how fast it is here:           ckptd bench --root /ckpts
"""


_VERBS = {
    "adopt": "Start a job from a checkpoint that was saved elsewhere.",
    "bench": "Measure ckptd and its peers on this machine.",
    "export": "Write a checkpoint in the format of another tool.",
    "import": "Make a checkpoint of one that another tool wrote.",
}
"""The verbs that need torch, and what they do. Entry points of the group "ckptd.verbs"
say where they are.
"""


_MEANT = {
    "forget": ("rm", "remove", "del", "delete", "prune", "purge"),
    "ls": ("list", "dir", "jobs", "checkpoints"),
    "show": ("info", "inspect", "describe", "cat"),
    "verify": ("check", "fsck", "validate"),
    "diff": ("compare", "cmp"),
    "logs": ("log", "tail", "journal"),
    "copy": ("cp", "sync", "push", "pull", "mirror"),
    "run": ("start", "serve", "daemon"),
    "stop": ("kill", "shutdown"),
    "drain": ("flush", "evacuate", "evict"),
    "status": ("stat", "stats", "health"),
    "top": ("htop", "monitor", "dashboard", "live"),
    "ps": ("daemons",),
    "gc": ("clean", "cleanup"),
    "pin": ("lock", "hold", "keep"),
    "unpin": ("unlock", "release"),
    "interval": ("mtbf", "frequency"),
    "export": ("convert",),
    "bench": ("benchmark",),
}
"""The names that other tools give to the commands, by the command that is meant."""


class Commands(click.Group):
    """The commands of ckptd. A name that another tool would give to one of them is
    answered with the command that is meant.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        for command, others in _MEANT.items():
            if args[0] in others and not ctx.resilient_parsing:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {command!r}?")
        return super().resolve_command(ctx, args)


class Verb(click.Command):
    """A verb of a package that this one does not import.

    It is loaded when it is called.
    """

    def load(self) -> click.Command:
        """Import the verb. Raises ClickException if that is not possible."""
        assert self.name is not None
        for found in entry_points(group="ckptd.verbs", name=self.name):
            try:
                command: click.Command = found.load()
                return command
            except e.CkptdError as error:  # torch is missing or too old
                raise click.ClickException(str(error)) from None
        raise click.ClickException(
            f"this installation of ckptd has no verb {self.name}: install it again"
        )

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        return self.load().make_context(info_name, args, parent, **extra)


def _print_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the version, and that native code is missing if it is."""
    if not asked or context.resilient_parsing:
        return
    click.echo(f"ckptd, version {__version__}")
    if problem := native_code.problem():
        click.echo(problem)
    context.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="Save the state of PyTorch training jobs.",
    epilog=_EXAMPLES,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def main() -> None:
    """ckptd saves the state of PyTorch training jobs without stopping them, and brings
    it back after any crash.

    In the training script: `from ckptd import recover, snapshot`. Without a running
    daemon, set CKPTD_ROOT and the trainer starts a private one.
    """


@main.command(short_help="List your daemons on this node.")
@json_option
@speaks
def ps(as_json: bool) -> None:
    """List all daemons of this user on this node, private ones too."""
    rows = [neighbour.row() for neighbour in neighbours.find_all()]
    click.echo(json.dumps(rows, indent=1) if as_json else report.daemons_text(rows))


@main.command(short_help="Stop a daemon, after it has saved what it owes.")
@click.argument("root", type=PLACE, required=False)
@socket_option
@click.option(
    "--timeout",
    default=600.0,
    help="Seconds to wait until the daemon has saved what it owes. Default: 600.",
)
@json_option
@speaks
def stop(root: Location | None, socket: Path | None, timeout: float, as_json: bool) -> None:
    """Stop the daemon that serves ROOT, or else the one at --socket, or else that of
    CKPTD_ROOT.

    The daemon first saves the newest snapshots in memory. A running trainer then waits
    for the next daemon. If the daemon was private, the trainer starts the next one
    itself. The exit code is 15 if a snapshot could not be saved, for example because
    the disk is full, and is in memory only.
    """
    found = neighbours.named(root, socket)
    neighbours.stop(found, timeout)
    served = found.status["root"] if found.status else "no root that it told"
    left = unsaved.left_behind(found.status) if found.status else []
    if as_json:
        click.echo(
            json.dumps(
                {"pid": found.pid, "stopped": True, "unsaved": [each.row() for each in left]}
            )
        )
    else:
        click.echo(f"stopped pid {found.pid}, which served {served}")
        if left:
            click.echo(f"ckptd: {unsaved.text(left, served)}", err=True)
    if left:
        sys.exit(MEMORY_ONLY)


@main.command(short_help="List or delete what dead daemons have left.")
@click.option(
    "--delete",
    is_flag=True,
    help="Delete what is listed, with the snapshots that are sealed in it.",
)
@click.option("--yes", is_flag=True, help="Do not ask before snapshots are deleted.")
@click.option(
    "--shm-dir", type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="CKPTD_SHM_DIR", help="The directory of the segments. Default: /dev/shm.",
)  # fmt: skip
@json_option
@speaks
def gc(delete: bool, yes: bool, shm_dir: Path | None, as_json: bool) -> None:
    """List the segments and sockets that dead daemons have left, with owner and size.

    Segments and sockets in use are left out. The next daemon of a root saves the
    snapshots that are sealed in its segments. Delete them only if no daemon will serve
    that root again. The command asks before it deletes snapshots. Without a terminal,
    and with --json, it needs --yes.
    """
    from ckptd.daemon.commands import leftovers

    everything = list(leftovers.find(Path("/dev/shm") if shm_dir is None else shm_dir))
    holds = [(found, held) for found in everything for held in found.holds]
    if delete and holds and not yes:
        ask_before_deleting(
            f"{count_text(len(holds), 'sealed snapshot')}, which the next daemon would save if "
            f"storage does not have them yet",
            [f"{held} in {found.path}" for found, held in holds],
            "or start a daemon for their roots", never=as_json,
        )  # fmt: skip
    rows = [
        {
            "path": str(found.path), "owner": found.owner, "bytes": found.nbytes,
            "holds": list(found.holds),
            "deleted": delete and found.nbytes is not None and leftovers.delete(found),
        }
        for found in everything
    ]  # fmt: skip
    click.echo(
        json.dumps(rows, indent=1) if as_json else report.leftovers_text(rows, delete=delete)
    )


@main.command(short_help="Check that this node is fit for a daemon.")
@click.option(
    "--root",
    shell_complete=complete_path,
    envvar="CKPTD_ROOT",
    help="Directory for the checkpoints; without it only the node is checked.",
)
@click.option(
    "--stage",
    shell_complete=complete_path,
    envvar="CKPTD_STAGE",
    help="Directory on a local disk in front of the root, if the daemon is to have one.",
)
@click.option(
    "--socket",
    shell_complete=complete_path,
    envvar="CKPTD_SOCKET",
    help="Unix socket that the daemon is to listen on. Default: as for run.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    envvar="CKPTD_CONFIG",
    help="TOML file with the daemon's settings.",
)
@json_option
@speaks
def doctor(
    root: str | None, stage: str | None, socket: str | None, file: Path | None, as_json: bool
) -> None:
    """Check that this node is fit for a daemon: limits, shared memory, the root, the
    socket's directory, the kernel.

    Run it as the daemon's user, where the daemon is to run. The exit code is 1 if a
    check fails; warnings do not change it.
    """
    from ckptd.daemon import config as settings
    from ckptd.daemon.commands import doctor as checks
    from ckptd.daemon.commands.doctor_check import FAILED

    known = {
        **(settings.read_file(file) if file else {}),
        **({"root": root} if root is not None else {}),
        **({"socket": socket} if socket else {}),
    }
    known |= {"stage": stage} if stage else {}
    given = {key: str(known[key]) for key in ("stage",) if "root" in known and key in known}
    given |= {
        "root": str(known.get("root", "/")),
        "socket": str(known["socket"] if "socket" in known else default_socket()),
    }
    taken = ("CKPTD_CONFIG", "CKPTD_ROOT", "CKPTD_SOCKET", "CKPTD_STAGE")
    environment = {key: value for key, value in os.environ.items() if key not in taken}
    found = list(
        checks.check_all(settings.load(given, environment, file), with_root="root" in known)
    )
    failed = any(check.level == FAILED for check in found)
    if as_json:
        rows = [
            {"name": check.name, "level": check.level, "message": check.message, **check.values}
            for check in found
        ]
        click.echo(json.dumps({"ok": not failed, "checks": rows}, indent=1))
    else:
        click.echo(checks.text(found))
    if failed:
        sys.exit(1)


@main.command(short_help="List the checkpoints under a root.")
@click.argument("path", type=CHECKPOINT, required=False)
@step_option
@click.option(
    "--columns",
    "shown",
    metavar="NAME,...",
    help="What to show: job, tag, step, attempt, seq, ranks, size, raw, of_raw, new, chain, "
    "read, restore, created, age, non_finite, marks, and any metric.",
)
@click.option(
    "--sort",
    metavar="NAME",
    help="List in the order of this column or metric, the least first. NaN and rows without a "
    "value come last.",
)
@click.option("--reverse", is_flag=True, help="With --sort: list the greatest first.")
@socket_option
@json_option
@speaks
def ls(
    path: Named | None,
    step: int | None,
    shown: str | None,
    sort: str | None,
    reverse: bool,
    socket: Path | None,
    as_json: bool,
) -> None:
    """List the checkpoints of all jobs under a root, or of one job.

    PATH is DIR (the root), DIR/JOB, or the directory of one checkpoint. The default is
    the root of the daemon at --socket, or else CKPTD_ROOT.
    """
    if reverse and sort is None:
        raise e.InvalidRequest("--reverse turns the order of --sort round: add --sort NAME")
    root = configured_root() if socket is None else None
    if path is not None:
        place = chosen(path, step)
    elif step is not None:
        raise e.InvalidRequest(f"--step {step} needs a job: `ckptd ls DIR/JOB --step {step}`")
    else:
        place = root or neighbours.served_root(socket, "ckptd ls ROOT")
    rows = report.listing(place)
    if as_json or "restore" in (sort, *(shown or "").split(",")):
        from ckptd.daemon.commands.restore_time import add_restore_times

        add_restore_times(place, rows)
    if shown is None and sort is None:
        click.echo(json.dumps(rows, indent=1) if as_json else report.listing_text(rows))
        return
    from ckptd.daemon.commands.columns import arranged

    said = arranged(rows, shown, sort, reverse=reverse, as_json=as_json, now=time.time())
    click.echo(said)


@main.command(short_help="Describe one checkpoint.")
@click.argument("path", type=CHECKPOINT)
@step_option
@click.option("--keys", is_flag=True, help="List every tensor with its shape and dtype.")
@json_option
@speaks
def show(path: Named, step: int | None, keys: bool, as_json: bool) -> None:
    """Describe one checkpoint: DIR/JOB/TAG, the newest one of DIR/JOB, or a directory
    outside every root that is a checkpoint.

    In place of TAG there may be a step, `newest`, or `best:METRIC`, which is the
    checkpoint with the least value of a metric (`best:METRIC:max`: the greatest). All
    commands that take a checkpoint understand this.
    """
    place = chosen(path, step)
    manifest = report.manifest_at(place)
    for damaged in report.damaged_newer(place, manifest):
        click.echo(f"ckptd: skipped: {damaged}", err=True)
    repository, job, tag = find_job_or_checkpoint(place)
    title = report.title(repository, job, tag or manifest.tag)
    tensors, meshes = report.tensors_of(repository, job, manifest) if keys else (None, ())
    restore = "" if as_json else _restore_line(repository, job, manifest)
    non_finite = [] if as_json else report.non_finite_lines(repository, job, manifest)
    said = (
        json.dumps(report.manifest_json(manifest, tensors, meshes), indent=1)
        if as_json
        else report.manifest_text(manifest, title, tensors, non_finite, restore)
    )
    click.echo(said)


def _restore_line(repository: Repository, job: str, manifest: Manifest) -> str:
    """Return what a restore of a checkpoint reads, and how long it would take."""
    from ckptd.daemon.commands.restore_time import rate_of_job, restore_text

    by_itself = isinstance(repository, StandaloneCheckpoint)
    rate = None if by_itself else rate_of_job(located(repository.where()), job)
    return restore_text(manifest.restored_bytes, rate)


@main.command(short_help="Check every byte of checkpoints.")
@click.argument("path", type=CHECKPOINT)
@step_option
@json_option
@speaks
def verify(path: Named, step: int | None, as_json: bool) -> None:
    """Check every byte, tensor and value of a checkpoint (DIR/JOB/TAG), or of all of a
    job (DIR/JOB) or of a root (DIR).

    PATH may also be a checkpoint outside every root. Nothing is changed. The exit code
    is 13 if anything is damaged. Values that only torch can decode are counted and not
    checked.
    """
    results = []
    for result in report.verification(chosen(path, step)):
        results.append(result)
        if not as_json:
            click.echo(report.verification_text(result))
    if as_json:
        click.echo(json.dumps(results, indent=1))
    if any(not result["ok"] for result in results):
        sys.exit(e.IntegrityError.exit_code)


@main.command(short_help="Delete checkpoints.")
@click.argument("path", type=CHECKPOINT)
@step_option
@click.option(
    "--keep",
    multiple=True,
    metavar="POLICY",
    help="For a job: what to keep, like LatestN(5) or BestN('loss',3). Repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option(
    "--explain",
    is_flag=True,
    help="Only say of each checkpoint of a job whether it would stay, and why.",
)
@click.option(
    "--yes",
    is_flag=True,
    help="Do not ask before more than half of a job's checkpoints are deleted.",
)
@socket_option
@json_option
@speaks
def forget(
    path: Named,
    step: int | None,
    keep: tuple[str, ...],
    dry_run: bool,
    explain: bool,
    yes: bool,
    socket: Path | None,
    as_json: bool,
) -> None:
    """Delete a checkpoint (DIR/JOB/TAG), or all of a job (DIR/JOB) that no --keep
    policy keeps.

    Policies: LatestN(n), LatestDuration(seconds), EveryNSteps(n),
    EveryNSeconds(seconds), Daily(n), Weekly(n), BestN('metric', n, 'min' or 'max'),
    Finite(n), CustomSteps([...]), PreserveAll(). MaxBytes('500GB') and MaxAge('30d')
    limit what the others keep. They never delete the newest checkpoint, a checkpoint with a user
    tag, or a step of an earlier attempt that the newest attempt has not reached. A
    checkpoint that is pinned or being read is never deleted. A policy over a metric
    that no checkpoint of the job has is an error, and nothing is deleted.

    If more than half of the job's checkpoints would be deleted, the command lists them
    and asks first. Without a terminal, and with --json, it needs --yes. The exit code
    is 11 if a checkpoint that was to be deleted is still there.

    With --explain, nothing is deleted. Without --keep, it is about the policies that
    the job has.
    """
    from ckptd.daemon.commands import forgetting, retention_report

    try:
        policies = [parse(text) for text in keep]
    except ValueError as error:
        raise e.InvalidConfig(f"--keep: {error}") from None
    if explain:
        said = retention_report.explained(chosen(path, step), policies)
        click.echo(
            json.dumps(said, indent=1) if as_json else retention_report.explanation_text(said)
        )
        return
    deletion = forgetting.planned(chosen(path, step), policies)
    rows = deletion.rows
    if not dry_run:
        if deletion.is_large and not yes:
            listed = [report.forgotten_text(row, dry_run=True) for row in deletion.doomed]
            ask_before_deleting(deletion.extent, listed, "or --dry-run to list them", never=as_json)
        deletion.run(socket)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        for row in rows:
            click.echo(report.forgotten_text(row, dry_run=dry_run))
        if not rows:
            click.echo("nothing to delete")
    if any(row["error"] for row in rows):
        sys.exit(e.Busy.exit_code)


@main.command(short_help="Keep a checkpoint from being deleted.")
@click.argument("path", type=CHECKPOINT)
@step_option
@click.option("--remove", is_flag=True, help="Remove the pin, as `ckptd unpin` does.")
@json_option
@speaks
def pin(path: Named, step: int | None, remove: bool, as_json: bool) -> None:
    """Keep a checkpoint (DIR/JOB/TAG, or the newest of DIR/JOB) from being deleted, by
    retention or by hand, until the pin is removed.
    """
    _pin(path, step, remove=remove, as_json=as_json)


@main.command(short_help="Let a pinned checkpoint be deleted again.")
@click.argument("path", type=CHECKPOINT)
@step_option
@json_option
@speaks
def unpin(path: Named, step: int | None, as_json: bool) -> None:
    """Remove the pin of a checkpoint (DIR/JOB/TAG, or the newest of DIR/JOB)."""
    _pin(path, step, remove=True, as_json=as_json)


def _pin(path: Named, step: int | None, *, remove: bool, as_json: bool) -> None:
    from ckptd.daemon.commands import forgetting

    job, tag, has_pin = forgetting.pin(chosen(path, step), remove=remove)
    removed = "no longer pinned" if has_pin else "was not pinned"
    click.echo(
        json.dumps({"job": job, "tag": tag, "pinned": not remove})
        if as_json
        else f"{job}/{tag}: {removed if remove else 'pinned'}"
    )


main.add_command(copy)
main.add_command(diff)
main.add_command(drain)
main.add_command(history)
main.add_command(interval)
main.add_command(logs)
main.add_command(page)
main.add_command(run)
main.add_command(status)
main.add_command(top)
for _name, _does in _VERBS.items():
    main.add_command(Verb(_name, short_help=_does))

if __name__ == "__main__":
    main()
