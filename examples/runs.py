"""Training runs for demo.py: they are started, killed, watched through their output,
and compared bit for bit.

A run has a root and a private daemon of its own. A run on several ranks is started by
torchrun, which ends the other ranks when one dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import randbelow
from typing import Any

import psutil

import ckptd
from ckptd.daemon.commands.neighbours import daemon_status
from ckptd.shared import names
from ckptd.shared.system import machine

TRAINER = Path(__file__).with_name("train_gpt.py")
SETTINGS = {
    # The default of ten checkpoints, of 120 MB each, would be too much for a demo.
    "CKPTD_KEEP_LAST": "3",
    # With several threads, losses differed in their last bits on a busy machine, before
    # anything was killed.
    "OMP_NUM_THREADS": "1",
    # Buffer alignment may not matter either (oneMKL, "Getting Reproducible Results with
    # Conditional NR").
    "MKL_CBWR": "AUTO,STRICT",
    # Ranks that torchrun 2.13 starts again, or on a new node, would find the addresses of
    # dead ranks in its store.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
NOT_FOR_THE_TRAINER = ("CKPTD_ROOT", "CKPTD_SOCKET", "CKPTD_JOB", "CKPTD_CONFIG")
# Ranks may share a line.
RECOVERED = re.compile(
    r"recovered step (\d+) of attempt (\d+) from (\w+) in ([\d.]+) s(?: on rank \d+)?"
)
HEADINGS = ("killed", "in step", "back to step", "from", "within", "redone")
BEGUN = time.monotonic()
_SECONDS = 60.0


class DemoFailed(Exception):
    """Raised when a result is not as expected. The text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill: the process that died, the step that it computed, and the step that came back."""

    killed: str
    at: int
    step: int
    source: str
    seconds: float

    def row(self) -> tuple[str, ...]:
        return (
            self.killed,
            str(self.at),
            str(self.step),
            self.source,
            f"{self.seconds:.2f} s",
            str(self.at - 1 - self.step),
        )


def status_of(socket: Path) -> dict[str, Any]:
    """Return what `ckptd status --json` prints of the daemon at this socket, or {} if no
    daemon answers.
    """
    try:
        return daemon_status(socket)
    except ckptd.CkptdError:
        return {}


def newest(status: dict[str, Any], kind: str) -> int:
    """Return the newest step that a daemon has in memory ("last_sealed") or in storage
    ("last_durable"), given its status. 0: none.
    """
    jobs = status.get("jobs")
    return (jobs[0][kind] or {"step": 0})["step"] if jobs else 0


class Run:
    """One training run in a root of its own.

    `start` it, `wait_for` a step, `kill` it, `start` it again, `wait_for_end`, and
    `end`. `restarts`: how often torchrun starts the ranks again by itself.
    """

    def __init__(
        self,
        out: Path,
        name: str,
        steps: int,
        arguments: str,
        ranks: int = 1,
        trainer: Path = TRAINER,
        restarts: int = 0,
    ) -> None:
        self.steps, self.ranks, self.trainer, self.restarts = steps, ranks, trainer, restarts
        self._arguments = f"--steps {steps} {arguments}".split()
        self.root, self.log, self.losses, self.lines = (
            out / f"{name}{suffix}" for suffix in ("", ".log", ".json", ".json.jsonl")
        )
        self.slots = Path(os.environ.get("CKPTD_SHM_DIR", "/dev/shm")) / machine.segment_directory(
            self.root
        )
        self._trainer: subprocess.Popen[bytes] | None = None
        self._printed_before = 0

    def start(self) -> None:
        """Start the run, always with a private daemon, whatever the environment of this
        shell says.
        """
        others = {key: value for key, value in os.environ.items() if key not in NOT_FOR_THE_TRAINER}
        launcher = [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks),
            "--max-restarts", str(self.restarts),
        ]  # fmt: skip
        command = [
            sys.executable, *(launcher if self.ranks > 1 else []),
            str(self.trainer), "--root", str(self.root), "--losses", str(self.losses),
        ]  # fmt: skip
        self._printed_before = len(self.printed())
        with open(self.log, "ab") as log:
            self._trainer = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=SETTINGS | others,
            )

    @property
    def job(self) -> Path:
        """The directory of the job in the root."""
        return self.root / self.trainer.stem

    def wait_until(self, met: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds. Raises DemoFailed if the trainer ends before."""
        while not met():
            assert self._trainer is not None
            if self._trainer.poll() is not None and not met():
                raise DemoFailed(
                    f"the trainer ended before {what}; {self.log} says:\n{self.printed()[-2000:]}"
                )
            time.sleep(0.02)

    def wait_for(self, step: int) -> None:
        self.wait_until(lambda: any(done >= step for done, _ in self.computed()), f"step {step}")

    def wait_for_end(self) -> None:
        self.wait_until(self.losses.exists, "its end")
        assert self._trainer is not None
        self._trainer.wait()

    def printed(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def computed(self) -> list[tuple[int, float]]:
        """Return (step, loss) of every step that any attempt has computed, in order of
        time. A line that a kill cut off does not count.
        """
        found = []
        for line in self.lines.read_text().splitlines() if self.lines.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                found.append((int(entry["step"]), float(entry["loss"])))
        return found

    def result(self) -> dict[int, float]:
        """Return the losses by step from the finished trainer, which has carried them
        through its checkpoints across all kills.
        """
        return {
            int(step): float(loss) for step, loss in json.loads(self.losses.read_text()).items()
        }

    def status(self) -> dict[str, Any]:
        """Return the status of the private daemon, or {} if there is none."""
        return status_of(machine.private_socket(self.root))

    def recovery(self, killed: str, at: int, source: str, known: int) -> Kill:
        """Wait until every rank has recovered since the last `start`.

        Raises DemoFailed unless all of them have recovered the same step, from `source`,
        and no older one than `known`, which the daemon had reported.
        """

        def found() -> list[tuple[str, ...]]:
            return RECOVERED.findall(self.printed()[self._printed_before :])

        self.wait_until(lambda: len(found()) >= self.ranks, "every rank had recovered")
        (step, _, tier, seconds), *others = found()
        kill = Kill(killed=killed, at=at, step=int(step), source=tier, seconds=float(seconds))
        say(f"Recovered step {kill.step} from {kill.source} in {kill.seconds:.2f} s.")
        if any((step, tier) != (other[0], other[2]) for other in others):
            raise DemoFailed(f"the ranks have recovered different things: {found()}")
        if kill.source != source or kill.step < known:
            raise DemoFailed(f"step {known} or a newer one should have come from {source}")
        return kill

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in the order of ranks."""
        assert self._trainer is not None
        if self.ranks == 1:
            return [psutil.Process(self._trainer.pid)]
        return sorted(
            psutil.Process(self._trainer.pid).children(),
            key=lambda process: int(process.environ()["RANK"]),
        )

    def kill_rank(self, rank: int) -> int:
        """SIGKILL one rank, and wait until torchrun has ended the others.

        Return the step that they were computing.
        """
        processes = self.processes()
        processes[rank].kill()
        psutil.wait_procs(processes, timeout=_SECONDS)
        return self.computing()

    def computing(self) -> int:
        """Return the step after the last one whose loss was written."""
        return max((step for step, _ in self.computed()), default=0) + 1

    def kill(self) -> int:
        """SIGKILL the trainer with all its ranks.

        Return the step that it was computing.
        """
        if self._trainer is not None and self._trainer.poll() is None:
            others = psutil.Process(self._trainer.pid).children() if self.ranks > 1 else []
            self._trainer.kill()
            self._trainer.wait()
            for process in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return self.computing()

    def end(self) -> None:
        """End all processes and free their shared memory.

        The daemon may finish its work first.
        """
        self.kill()
        if status := self.status():
            end_process(status["pid"], signal.SIGTERM)
        shutil.rmtree(self.slots, ignore_errors=True)


def end_process(pid: int, number: signal.Signals) -> None:
    """Signal a process that is not a child of this one, and return when it is dead."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        signal.pidfd_send_signal(descriptor, number)
        select.select([descriptor], [], [], _SECONDS)
        os.close(descriptor)


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:5.1f} s  {text}", flush=True)


def place(path: Path) -> Path:
    """Return the path as a user types it in this directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def parser(description: str) -> ArgumentParser:
    """Return a parser with the options that all demonstrations have."""
    made = ArgumentParser(description=description)
    made.add_argument(
        "--out",
        type=lambda text: Path(os.path.abspath(text)),
        default="demo-output",
        help="directory for roots, logs and losses; default: %(default)s",
    )
    made.add_argument(
        "--seed",
        type=int,
        default=randbelow(10_000),
        help="seed of the moments of the kills; default: random",
    )
    return made


@contextlib.contextmanager
def running(out: Path, *runs: Run) -> Iterator[None]:
    """Context manager. Removes what an earlier demo left of these runs, and ends them."""
    try:
        wipe(out, *runs)
        yield
    finally:
        for run in runs:
            run.end()


@contextlib.contextmanager
def judged() -> Iterator[None]:
    """Context manager. Turns the outcome of a demonstration into a last sentence and an
    exit code.
    """
    # So that no process is left running after an error either.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except DemoFailed as failure:
        sys.exit(f"FAILED: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)
    say("Everything came back as it was.")


def wipe(out: Path, *runs: Run) -> None:
    """Remove what an earlier demo left, even a killed one: its daemons must not keep
    using roots that are made again.
    """
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        run.end()
        # Otherwise the root was not made by a demo.
        if run.root.parent == out and (run.root / names.CONTROL).exists():
            shutil.rmtree(run.root)
        for file in (run.log, run.losses, run.lines):
            file.unlink(missing_ok=True)


def train_alone(run: Run) -> None:
    """Train a reference run to its end, unless an earlier act has done so."""
    if not run.losses.exists():
        say(f"Training {run.steps} steps without interruption, as the reference.")
        run.start()
        run.wait_for_end()


def compare(reference: Run, interrupted: Run, *kills: Kill) -> None:
    """Wait for the end of both runs, and compare them. Raises DemoFailed if they differ."""
    for run in (reference, interrupted):
        run.wait_for_end()
    say("The training has ended. Comparing it with the reference.")
    if kills:
        print_table([kill.row() for kill in kills])
    computed = check_losses(reference, interrupted)
    print(f"{computed} losses computed for {reference.steps} steps: 0 differ from the reference.")
    count = check_checkpoints(reference, interrupted)
    print(f"{count} tensors and values in the last checkpoint: 0 differ.", flush=True)


def check_losses(reference: Run, interrupted: Run) -> int:
    """Compare all losses that were ever computed, and those of the last attempt, with
    the reference. Return how many were computed.
    """
    counts = set(re.findall(r"(\d+) threads", reference.printed() + interrupted.printed()))
    if len(counts) > 1:
        raise DemoFailed(
            f"nothing can be said of the losses: the attempts ran with "
            f"{' and '.join(sorted(counts))} threads"
        )
    expected, computed = reference.result(), interrupted.computed()
    differing = {step for step, loss in computed if loss.hex() != expected[step].hex()}
    ended_with = interrupted.result()
    differing |= {
        step
        for step in expected
        if step not in ended_with or ended_with[step].hex() != expected[step].hex()
    }
    if differing or len(expected) != reference.steps:
        raise DemoFailed(
            f"{len(differing)} of {reference.steps} steps have another loss: {sorted(differing)}"
        )
    return len(computed)


def check_checkpoints(reference: Run, interrupted: Run) -> int:
    """Compare everything in the last checkpoints: model, optimizer, scheduler, losses.

    Return the number of tensors and values.
    """
    with (
        ckptd.Checkpoint.open(reference.job) as a,
        ckptd.Checkpoint.open(interrupted.job) as b,
    ):
        if (a.step, b.step) != (reference.steps, reference.steps):
            raise DemoFailed(
                f"the last checkpoints are of steps {a.step} and {b.step}, not {reference.steps}"
            )
        expected, found = leaves(a.load()), leaves(b.load())
    if differing := [path for path in expected | found if expected.get(path) != found.get(path)]:
        raise DemoFailed(
            f"the last checkpoints differ in {len(differing)} places: {', '.join(differing[:5])}"
        )
    return len(expected)


def leaves(tree: Any, path: str = "") -> dict[str, bytes]:
    """Return every tensor and plain value of a nested state as bytes, by its path."""
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {
            name: leaf
            for key, item in items
            for name, leaf in leaves(item, f"{path}.{key}").items()
        }
    # Without `import torch`, so that the first line of a demo does not wait for it.
    return {path: tree.numpy().tobytes() if hasattr(tree, "numpy") else repr(tree).encode()}


def print_table(rows: list[tuple[str, ...]]) -> None:
    print()
    if find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(*HEADINGS)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    for row in (HEADINGS, *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
