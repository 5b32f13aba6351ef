"""Defines `ckptd run`, which runs the daemon in this process."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptd.shared import errors as e
from ckptd.shared.command import MEMORY_ONLY, complete_path, complete_word, speaks
from ckptd.shared.system import machine

if TYPE_CHECKING:
    from ckptd.daemon.config import Config


@click.command(short_help="Run the daemon of this node.")
@click.option(
    "--root",
    shell_complete=complete_path,
    help="Directory for the checkpoints of all jobs; made if missing.",
)
@click.option(
    "--stage",
    shell_complete=complete_path,
    help="Directory on a local disk where checkpoints are committed before they are uploaded to "
    "the root.",
)
@click.option(
    "--socket",
    shell_complete=complete_path,
    help="Unix socket to listen on. Default: /run/ckptd/USER.sock, else "
    "$XDG_RUNTIME_DIR/ckptd.sock.",
)
@click.option(
    "--state-dir",
    shell_complete=complete_path,
    help="Directory on a local disk for the journal. Default: /var/lib/ckptd for root, else "
    "~/.local/state/ckptd.",
)
@click.option(
    "--codec",
    shell_complete=complete_word("auto", "raw", "planes", "zstd"),
    help="How chunks are stored: auto, raw, zstd, zstd:LEVEL (1-19) or planes. Default: auto.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    envvar="CKPTD_CONFIG",
    help="TOML file with any of the settings.",
)
@click.option(
    "--keep-last", type=int, help="Checkpoints of a job to keep; 0 keeps all. Default: 10."
)
@click.option(
    "--keep",
    multiple=True,
    metavar="POLICY",
    help="A policy for what else to keep, like EveryNSteps(1000) or BestN('loss',3). Repeatable.",
)
@click.option(
    "--make-room",
    is_flag=True,
    default=None,
    help="Let a save on a full disk delete the job's oldest checkpoints early.",
)
@click.option(
    "--root-quota",
    help="Bytes that all checkpoints may hold before a warning, like 2TB. Default: 0, no limit.",
)
@click.option("--slots", type=int, help="Slots in shared memory for each rank. Default: 2.")
@click.option(
    "--shm-dir", shell_complete=complete_path, help="A tmpfs for the slots. Default: /dev/shm."
)
@click.option(
    "--shm-quota",
    help="Shared memory that all slots may take, like 24G. Default: nine tenths of the tmpfs.",
)
@click.option(
    "--memory-ttl",
    type=float,
    help="Seconds that a dead trainer's newest snapshot stays in memory. Default: 900.",
)
@click.option(
    "--threads",
    type=int,
    help="Threads for checksums; twice as many write. Default: one for each CPU, 8 at most.",
)
@click.option(
    "--cpus", help="CPUs for the worker threads, like 0-3,8. Default: all that the daemon may use."
)
@click.option(
    "--files-per-rank",
    type=int,
    help="Files that a rank's part of a checkpoint is spread over. Default: 1.",
)
@click.option(
    "--bytes-per-file",
    help="Bytes that a file of a checkpoint may have, like 4G. Default: 0, no limit.",
)
@click.option(
    "--link-unchanged/--no-link-unchanged",
    default=None,
    help="Link the files of unchanged tensors, or write them each time.",
)
@click.option(
    "--deltas",
    shell_complete=complete_word("auto", "small", "off"),
    help="How to store tensors that change little: auto for deltas where they take no more time, "
    "small where they take less room, or off. "
    "Default: auto.",
)
@click.option(
    "--foreign-memory",
    shell_complete=complete_word("refuse", "adopt", "drop"),
    help="How to treat snapshots in memory that were saved for another root: refuse, adopt or "
    "drop. Default: refuse.",
)
@click.option(
    "--log-file",
    shell_complete=complete_path,
    help="File for the log; at 10 MiB it becomes FILE.1. Default: standard error.",
)
@click.option(
    "--log-level",
    shell_complete=complete_word("debug", "info", "warning", "error"),
    help="debug, info, warning or error. Default: info.",
)
@click.option(
    "--log-format",
    shell_complete=complete_word("text", "json"),
    help="text, or json: one object for each line, with the event and its facts. Default: text.",
)
@click.option(
    "--history/--no-history",
    default=None,
    help="Keep a history of what the daemon did, or keep none.",
)
@click.option(
    "--on-event",
    metavar="COMMAND|URL",
    help="Command or webhook that is told of failed saves, little room and the like.",
)
@click.option(
    "--http",
    metavar="ADDRESS",
    help="Serve metrics and probes at 127.0.0.1:PORT or unix:PATH. Default: not at all.",
)
@click.option(
    "--metrics-file",
    shell_complete=complete_path,
    help="Write the metrics into this .prom file every 15 s, for the node exporter.",
)
@click.option(
    "--overflow/--no-overflow",
    default=None,
    help="Put slots that do not fit into shared memory on the disk, or refuse them.",
)
@click.option(
    "--strict-journal",
    is_flag=True,
    default=None,
    help="Refuse to start on a corrupt journal instead of rebuilding it.",
)
@click.option("--private", is_flag=True, default=None, hidden=True)
@click.option("--ready-fd", type=int, default=-1, hidden=True)
@speaks
def run(file: Path | None, ready_fd: int, **flags: Any) -> None:
    """Run the daemon of this node, in the foreground.

    The daemon ends on SIGTERM, SIGHUP or Ctrl-C, after it has saved the newest snapshot
    that is not on storage yet. The exit code is 15 if a snapshot could not be saved: the
    last line of the log then names the snapshots that are in memory only. Every setting
    can also be given in the config file (`keep_last = 5`) or in the environment
    (`CKPTD_KEEP_LAST=5`). Flags override the environment, which overrides the file.
    """
    from ckptd.daemon import config as settings

    given = {key: value for key, value in flags.items() if value not in (None, ())}
    if (
        "socket" not in given
        and "CKPTD_SOCKET" not in os.environ
        and not (file and "socket" in settings.read_file(file))
    ):
        given["socket"] = str(default_socket())
    config = settings.load(given, os.environ, file)
    _give_way()  # before any thread starts, because a thread has the class of its parent
    _set_up_logging(config)
    faulthandler.enable()  # SIGSEGV or SIGABRT then leaves a traceback of every thread in the log
    from ckptd.daemon.process import limits
    from ckptd.daemon.process.app import App

    limits.check(limits.DescriptorPlan(config.segments, config.open_files), limits.raise_limit())
    app = App(config, ready_fd)
    try:
        _event_loop_runner()(app.run)
    except e.CkptdError as error:
        _end_past_hung_threads(error.exit_code, str(error))
        raise
    code = MEMORY_ONLY if app.unsaved else 0
    _end_past_hung_threads(code)
    sys.exit(code)


def _set_up_logging(config: Config) -> None:
    """Send the lines of the log to the log file or to standard error, and the events
    also to the history and to `on_event`.

    Those get events of all levels, whatever `log_level` is.
    """
    from ckptd.daemon.process.rotating_log import RotatingLog
    from ckptd.daemon.telemetry.log_format import formatter_for

    file = config.log_file
    handler: logging.Handler = (
        logging.StreamHandler(sys.stderr) if file is None else RotatingLog(file)
    )
    stream = sys.stderr if file is None else None
    handler.setFormatter(formatter_for(config.log_format, stream, os.environ))
    handler.setLevel(config.log_level.upper())
    handlers = [handler]
    if config.history:
        from ckptd.daemon.telemetry.history import History

        handlers.append(History(machine.history_file(config.state_dir, config.root)))
    if config.on_event:
        from ckptd.daemon.telemetry.on_event import OnEvent

        handlers.append(OnEvent(config.on_event))
    logging.basicConfig(level=min(handler.level for handler in handlers), handlers=handlers)


def _end_past_hung_threads(code: int, error: str = "") -> None:
    """End the process with this exit code if threads still wait for a disk that hangs.

    `error` is printed first. Without this, Python would wait for these threads, and no
    new daemon could start.
    """
    from ckptd.daemon.root.storage_calls import hung_threads

    if names_of_them := hung_threads():
        logging.getLogger("ckptd.run").warning(
            "the disk still blocks %s: exiting without waiting for them", ", ".join(names_of_them)
        )
        if error:
            click.echo(f"ckptd: {error}", err=True)
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)


def _give_way() -> None:
    """Move this process to the scheduling class SCHED_BATCH: a message that wakes it
    then never preempts a running trainer; sched(7).
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:
            logging.getLogger("ckptd.run").debug(
                "cannot change the scheduling class to SCHED_BATCH: %s", error
            )


def _event_loop_runner() -> Callable[[Callable[[], Any]], None]:
    import asyncio

    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop

    def run_app(make: Callable[[], Any]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(make())

    return run_app


def default_socket() -> Path:
    """Return the path of the socket of a daemon that is given none.

    Raises InvalidConfig if no usual place for it can be written.
    """
    places = machine.default_sockets()
    system = places[0].parent
    if os.access(system, os.W_OK) or (os.geteuid() == 0 and not system.exists()):
        return places[0]
    if len(places) > 1:
        return places[1]
    raise e.InvalidConfig(
        f"no directory found for the socket: {system} is not writable, and XDG_RUNTIME_DIR is not "
        f"set to a directory that belongs to uid {os.geteuid()} and in which no other user can "
        f"replace a socket: pass the path of a socket with --socket PATH"
    )
