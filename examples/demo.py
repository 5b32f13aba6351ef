"""Shows that training under ckptd goes on bit for bit after it was killed: what `make demo` runs, in less than three minutes.

It trains train_gpt.py once in peace, and once with two deaths at random moments: first the trainer alone is killed and must come back from
memory; then trainer, daemon and everything in shared memory go, and it must come back from storage. Every loss that was ever computed and
every value in the last checkpoint are compared with those of the first run.

Exit code 0 only if nothing differs and both recoveries came from where they should. Leaves roots, logs and losses.png in --out, and wipes
what an earlier demo left there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
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

import torch

from ckptd.agent import Checkpoint
from ckptd.shared import names

TRAINER = Path(__file__).with_name("train_gpt.py")
STEPS, EVERY = 40, 8
ARGUMENTS = f"--steps {STEPS} --every {EVERY} --batch 4 --context 96".split()  # a third of a second a step on two idle cores
SETTINGS = {
    "CKPTD_KEEP_LAST": "3",  # ten checkpoints of 120 MB, the default, would be much for a demo
    "OMP_WAIT_POLICY": "passive",  # on two busy cores, threads that spin made a step take 1.8 to 3.4 s instead of 0.7 to 0.9 s
    "MKL_DYNAMIC": "FALSE",  # else the matrix products may take fewer threads on a busy machine, and round the last bit otherwise
    "MKL_CBWR": "AUTO,STRICT",  # nor may a buffer's alignment matter (oneMKL, "Getting Reproducible Results with Conditional NR")
}
NOT_FOR_THE_TRAINER = ("CKPTD_ROOT", "CKPTD_SOCKET", "CKPTD_JOB", "CKPTD_CONFIG")
RECOVERED = re.compile(r"^recovered step (\d+) of attempt (\d+) from (\w+) in ([\d.]+) s$", re.MULTILINE)
HEADINGS = ("killed", "in step", "back to step", "from", "within", "redone")
BEGUN = time.monotonic()


class DemoFailed(Exception):
    """Something is not as it must be; the text says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What was killed while which step was computed, and what the next attempt then said it had recovered."""

    killed: str
    at: int
    step: int
    attempt: int
    source: str
    seconds: float

    def row(self) -> tuple[str, ...]:
        return self.killed, str(self.at), str(self.step), self.source, f"{self.seconds:.2f} s", str(self.at - 1 - self.step)


class Run:
    """One training run in a root of its own. `start` it, `wait_for` a step, `kill` it, `start` it again, `wait_for_end`, and `end`."""

    def __init__(self, out: Path, name: str) -> None:
        self.root, self.log, self.losses, self.lines = (out / f"{name}{suffix}" for suffix in ("", ".log", ".json", ".json.jsonl"))
        self.slots = Path(os.environ.get("CKPTD_SHM_DIR", "/dev/shm")) / names.segment_directory(self.root)
        self._trainer: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Always with a private daemon, whatever this shell is set up for."""
        others = {key: value for key, value in os.environ.items() if key not in NOT_FOR_THE_TRAINER}
        command = [sys.executable, str(TRAINER), "--root", str(self.root), "--losses", str(self.losses), *ARGUMENTS]
        with open(self.log, "ab") as log:
            self._trainer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=SETTINGS | others)

    def wait_until(self, met: Callable[[], bool], what: str) -> None:
        """Raises DemoFailed if the trainer ends before."""
        assert self._trainer is not None
        while not met():
            if self._trainer.poll() is not None and not met():
                raise DemoFailed(f"the trainer ended before {what}; {self.log} says:\n{self.printed()[-2000:]}")
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
        """(step, loss) of every step that any attempt has computed, as time went. A line that a kill cut off does not count."""
        found = []
        for line in self.lines.read_text().splitlines() if self.lines.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                found.append((int(entry["step"]), float(entry["loss"])))
        return found

    def result(self) -> dict[int, float]:
        """Losses by step, as the finished trainer has them: through its checkpoints, across all kills."""
        return {int(step): float(loss) for step, loss in json.loads(self.losses.read_text()).items()}

    def status(self) -> dict[str, Any] | None:
        """What `ckptd status` says of the private daemon; None if there is none."""
        command = [sys.executable, "-m", "ckptd.daemon", "status", "--json", "--socket", str(names.private_socket(self.root))]
        said: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE).stdout)
        return said if said.get("ready") else None

    def kill(self) -> int:
        """SIGKILL to the trainer; the step that it was computing."""
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer.wait()
        return max((step for step, _ in self.computed()), default=0) + 1

    def end(self) -> None:
        """Neither processes nor shared memory are left; the daemon may finish its work first."""
        self.kill()
        if (status := self.status()) is not None:
            end_process(status["pid"], signal.SIGTERM)
        shutil.rmtree(self.slots, ignore_errors=True)


def end_process(pid: int, number: signal.Signals) -> None:
    """Signal a process that is not our child, and return when it is dead."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        signal.pidfd_send_signal(descriptor, number)
        select.select([descriptor], [], [], 60)
        os.close(descriptor)


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:5.1f} s  {text}", flush=True)


def wipe(out: Path, *runs: Run) -> None:
    """What an earlier demo left, even one that was killed: its daemons must not go on in roots that are made anew."""
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        run.end()
        if (run.root / names.CONTROL).exists():  # else it is none of ours
            shutil.rmtree(run.root)
        for file in (run.log, run.losses, run.lines):
            file.unlink(missing_ok=True)
    (out / "losses.png").unlink(missing_ok=True)


def train_in_peace(run: Run) -> float:
    """Returns the seconds that a step takes."""
    say(f"Training {STEPS} steps in peace, as the reference.")
    run.start()
    run.wait_for(1)
    begun = time.monotonic()
    run.wait_for(STEPS)
    took = time.monotonic() - begun
    run.wait_for_end()
    return took / (STEPS - 1)


def kill_trainer(run: Run, step: int, delay: float) -> Act:
    """`delay` seconds after `step` has begun. The daemon lives on, and still has the last snapshot in memory."""
    run.wait_for(step - 1)
    time.sleep(delay)
    at = run.kill()
    say(f"Killed the trainer in the middle of step {at}. Starting it again.")
    return start_again(run, "trainer", at, "memory", daemon_says(run)["jobs"][0]["last_sealed"])


def kill_everything(run: Run, step: int, delay: float) -> Act:
    """What a node that goes down takes along: trainer, daemon and shared memory. What is on storage is left."""
    run.wait_for(step - 4)
    said = daemon_says(run)
    run.wait_for(step - 1)
    time.sleep(delay)
    os.kill(said["pid"], signal.SIGSTOP)  # so that it cannot even see that the trainer is dead: both end at the same moment
    at = run.kill()
    end_process(said["pid"], signal.SIGKILL)
    freed = sum(file.stat().st_size for file in run.slots.iterdir())
    shutil.rmtree(run.slots)
    say(f"Killed trainer and daemon in the middle of step {at}, and removed {freed / 1e6:.0f} MB from shared memory. Starting again.")
    return start_again(run, "trainer and daemon", at, "storage", said["jobs"][0]["last_durable"])


def daemon_says(run: Run) -> dict[str, Any]:
    status = run.status()
    if status is None or not status["jobs"]:
        raise DemoFailed(f"the daemon of {run.root} does not answer")
    return status


def start_again(run: Run, killed: str, at: int, source: str, known: dict[str, Any] | None) -> Act:
    """Raises DemoFailed unless the trainer recovers from `source`, and no step older than the one the daemon has said to be there."""
    before = len(RECOVERED.findall(run.printed()))
    run.start()
    run.wait_until(lambda: len(RECOVERED.findall(run.printed())) > before, "it had recovered anything")
    step, attempt, tier, seconds = RECOVERED.findall(run.printed())[before]
    act = Act(killed=killed, at=at, step=int(step), attempt=int(attempt), source=tier, seconds=float(seconds))
    say(f"It has recovered step {act.step} of attempt {act.attempt} from {act.source} in {act.seconds:.2f} s.")
    if act.source != source:
        raise DemoFailed(f"it should have come from {source}")
    if known is None or act.step < known["step"]:
        raise DemoFailed(f"the daemon had {known} before")
    return act


def check_losses(reference: Run, interrupted: Run) -> int:
    """Compares all losses that were ever computed, and those that the last attempt ended with. Returns how many were computed."""
    counts = set(re.findall(r"(\d+) threads", reference.printed() + interrupted.printed()))
    if len(counts) != 1:
        raise DemoFailed(f"nothing can be said of the losses: the attempts ran with {' and '.join(sorted(counts))} threads")
    expected, computed = reference.result(), interrupted.computed()
    differing = {step for step, loss in computed if loss.hex() != expected[step].hex()}
    ended_with = interrupted.result()
    differing |= {step for step in expected if step not in ended_with or ended_with[step].hex() != expected[step].hex()}
    if differing or len(expected) != STEPS:
        raise DemoFailed(f"{len(differing)} of {STEPS} steps have another loss: {sorted(differing)}")
    return len(computed)


def check_checkpoints(reference: Run, interrupted: Run) -> int:
    """Compares all that is in the last checkpoints: model, optimizer, scheduler, losses. Returns how many tensors and values there are."""
    with Checkpoint.open(reference.root / "default") as a, Checkpoint.open(interrupted.root / "default") as b:
        if (a.step, b.step) != (STEPS, STEPS):
            raise DemoFailed(f"the last checkpoints are of steps {a.step} and {b.step}, not {STEPS}")
        expected, found = leaves(a.load()), leaves(b.load())
    if differing := [path for path in expected | found if expected.get(path) != found.get(path)]:
        raise DemoFailed(f"the last checkpoints differ in {len(differing)} places: {', '.join(differing[:5])}")
    return len(expected)


def leaves(tree: Any, path: str = "") -> dict[str, bytes]:
    """Every tensor and plain value of a nested state as bytes, by its path."""
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, item in items for name, leaf in leaves(item, f"{path}.{key}").items()}
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
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def plot(file: Path, reference: Run, interrupted: Run, acts: list[Act]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    expected, found = reference.result(), interrupted.result()
    axes.plot(list(expected), list(expected.values()), color="#9ecae1", linewidth=7, solid_capstyle="round", label="never interrupted")
    axes.plot(list(found), list(found.values()), color="#08306b", linewidth=1.6, linestyle="--", label="killed twice")
    for act, side, height in zip(acts, ("left", "right"), (0.97, 0.75), strict=True):
        axes.axvspan(act.step, act.at, color="#d62728", alpha=0.08, linewidth=0)
        axes.axvline(act.at, color="#d62728", linewidth=1.2)
        text = f"killed {act.killed}\nback to step {act.step}\nfrom {act.source} in {act.seconds:.2f} s"
        beside = (6 if side == "left" else -6, 0)
        where: dict[str, Any] = {
            "xycoords": ("data", "axes fraction"),
            "xytext": beside,
            "textcoords": "offset points",
            "ha": side,
            "va": "top",
        }
        axes.annotate(text, (act.at, height), bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85}, **where)
    axes.set(xlabel="step", ylabel="training loss", title="Two runs, bit for bit the same", xlim=(0, STEPS + 1))
    axes.legend(loc="upper right")
    figure.savefig(file, dpi=120)


def play(out: Path, reference: Run, interrupted: Run, chance: random.Random) -> None:
    seconds = train_in_peace(reference)
    say(f"Training the same in another root, to be killed. A step takes {seconds:.2f} s.")
    interrupted.start()
    acts = [
        kill_trainer(interrupted, chance.randrange(STEPS // 3, STEPS // 2), chance.uniform(0.1, 0.9) * seconds),
        kill_everything(interrupted, chance.randrange(STEPS * 2 // 3, STEPS - 4), chance.uniform(0.1, 0.9) * seconds),
    ]
    interrupted.wait_for_end()
    say("It has come to its end. Comparing.")
    print_table([act.row() for act in acts])
    computed = check_losses(reference, interrupted)
    print(f"{computed} losses computed for {STEPS} steps: 0 differ from the reference.")
    print(f"{check_checkpoints(reference, interrupted)} tensors and values in the last checkpoint: 0 differ.")
    if find_spec("matplotlib"):
        plot(out / "losses.png", reference, interrupted, acts)
        print(f"The losses of both runs: {out / 'losses.png'}")
    print(f"What was saved: ckptd ls {interrupted.root}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a training run twice and compare it with one that was not killed.")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10_000), help="of the moments of the kills; default: by chance")
    args = parser.parse_args()
    out = Path(os.path.abspath(args.out))
    reference, interrupted = Run(out, "reference"), Run(out, "interrupted")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running then either
    say(f"Kills are at random moments; the same again with --seed {args.seed}.")
    try:
        wipe(out, reference, interrupted)
        play(out, reference, interrupted, random.Random(args.seed))
    except DemoFailed as failure:
        sys.exit(f"FAILED: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        reference.end()
        interrupted.end()
    say("Everything came back as it was.")


if __name__ == "__main__":
    main()
