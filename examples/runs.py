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
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from ckptd import Checkpoint
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
}
NOT_FOR_THE_TRAINER = ("CKPTD_ROOT", "CKPTD_SOCKET", "CKPTD_JOB", "CKPTD_CONFIG")
# Ranks may share a line.
RECOVERED = re.compile(
    r"recovered step (\d+) of attempt (\d+) from (\w+) in ([\d.]+) s(?: on rank \d+)?"
)
HEADINGS = ("killed", "in step", "back to step", "from", "within", "redone")
BEGUN = time.monotonic()


class DemoFailed(Exception):
    """Raised when a result is not as expected. The text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One kill: what was killed, which step was being computed, and what the next
    attempt recovered.
    """

    killed: str
    at: int
    step: int
    attempt: int
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
    """Return what `ckptd status` reports of the daemon at this socket."""
    command = [sys.executable, "-m", "ckptd.daemon", "status", "--json", "--socket", str(socket)]
    said: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE).stdout)
    return said


class Run:
    """One training run in a root of its own.

    `start` it, `wait_for` a step, `kill` it, `start` it again, `wait_for_end`, and
    `end`.
    """

    def __init__(
        self,
        out: Path,
        name: str,
        steps: int,
        arguments: str,
        ranks: int = 1,
        trainer: Path = TRAINER,
    ) -> None:
        self.steps, self.ranks, self.trainer = steps, ranks, trainer
        self._arguments = f"--steps {steps} {arguments}".split()
        self.root, self.log, self.losses, self.lines = (
            out / f"{name}{suffix}" for suffix in ("", ".log", ".json", ".json.jsonl")
        )
        self.slots = Path(os.environ.get("CKPTD_SHM_DIR", "/dev/shm")) / machine.segment_directory(
            self.root
        )
        self._trainer: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the run, always with a private daemon, whatever the environment of this
        shell says.
        """
        others = {key: value for key, value in os.environ.items() if key not in NOT_FOR_THE_TRAINER}
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(self.ranks),
        ]
        command = [
            sys.executable,
            *(launcher if self.ranks > 1 else []),
            str(self.trainer),
            "--root",
            str(self.root),
            "--losses",
            str(self.losses),
        ]
        with open(self.log, "ab") as log:
            self._trainer = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=SETTINGS | others,
            )

    def wait_until(self, met: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds. Raises DemoFailed if the trainer ends before."""
        assert self._trainer is not None
        while not met():
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

    def status(self) -> dict[str, Any] | None:
        """Return what `ckptd status` reports of the private daemon, or None if there is
        none.
        """
        said = status_of(machine.private_socket(self.root))
        return said if said.get("ready") else None

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
        """SIGKILL one rank; torchrun ends the others and itself.

        Return the step that they were computing.
        """
        assert self._trainer is not None
        self.processes()[rank].kill()
        self._trainer.wait()
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
        return max((step for step, _ in self.computed()), default=0) + 1

    def end(self) -> None:
        """End all processes and free their shared memory.

        The daemon may finish its work first.
        """
        self.kill()
        if (status := self.status()) is not None:
            end_process(status["pid"], signal.SIGTERM)
        shutil.rmtree(self.slots, ignore_errors=True)


def end_process(pid: int, number: signal.Signals) -> None:
    """Signal a process that is not a child of this one, and return when it is dead."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        signal.pidfd_send_signal(descriptor, number)
        select.select([descriptor], [], [], 60)
        os.close(descriptor)


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:5.1f} s  {text}", flush=True)


def wipe(out: Path, *runs: Run) -> None:
    """Remove what an earlier demo left, even a killed one: its daemons must not keep
    using roots that are made again.
    """
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        run.end()
        if (run.root / names.CONTROL).exists():  # otherwise the directory was not made by a demo
            shutil.rmtree(run.root)
        for file in (run.log, run.losses, run.lines):
            file.unlink(missing_ok=True)
    (out / "losses.png").unlink(missing_ok=True)


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
        Checkpoint.open(reference.root / reference.trainer.stem) as a,
        Checkpoint.open(interrupted.root / interrupted.trainer.stem) as b,
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
    """Yield every tensor and plain value of a nested state as bytes, with its path."""
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {
            name: leaf
            for key, item in items
            for name, leaf in leaves(item, f"{path}.{key}").items()
        }
    return {path: tree.numpy().tobytes() if isinstance(tree, torch.Tensor) else repr(tree).encode()}


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
