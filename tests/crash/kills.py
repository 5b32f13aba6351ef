"""Kills a running job with SIGKILL at random microseconds, and prints a table of what
the kills hit.

`python -m tests.crash.kills --kills 50 --megabytes 256` (or `make kills KILLS=50`). The
trainer, the daemon or both are killed. A survivor continues, and the killed processes
are started again. Every recovery must be equal, bit for bit, to what was captured at
the step that it reports, and never older than what was acknowledged. The phase of a
kill is read from the segment headers and the files that remain.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ckptd.agent import Agent
from ckptd.shared import names
from ckptd.shared.errors import CkptdError
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.segment import SegmentHeader, SlotState, read_header
from tests.crash.tally import Tally, wait_for
from tests.support import forks, trainers
from tests.support.daemons import Daemon, Home, home
from tests.support.storage import source

PHASES = ("filling", "sealed", "writing", "before manifest", "after")
VICTIMS = ("trainer", "daemon", "both")
# In seconds.
_LONGEST_WAIT = {
    "filling": 0.05,
    "sealed": 0.02,
    "writing": 0.3,
    "before manifest": 0.002,
    "after": 0.05,
}


def base(megabytes: int) -> torch.Tensor:
    return torch.randn(megabytes * 250_000, generator=torch.Generator().manual_seed(1))


def job(socket: Path, diary: trainers.Diary, megabytes: int) -> None:
    """Recover and check, then snapshot step after step for ever, and write each promise
    into the diary.
    """
    torch.set_num_threads(1)
    start = base(megabytes)
    weight = torch.zeros_like(start)
    state: dict[str, Any] = {"weight": weight, "step": -1}
    agent = Agent(trainers.JOB, socket=socket)
    recovered = agent.recover(state)
    step = 0
    if recovered is not None:
        assert recovered.step is not None
        assert state["step"] == recovered.step
        assert not recovered.passed_over, recovered
        assert torch.equal(weight, start + recovered.step), (
            f"step {recovered.step} is not what was captured"
        )
        diary.note("recovered", recovered.attempt, recovered.step)
        step = recovered.step + 1
    open_pendings = []
    while True:
        torch.add(start, step, out=weight)
        state["step"] = step
        pending = agent.snapshot(state, step=step)
        if pending.state in ("sealed", "durable"):
            diary.note("sealed", pending.attempt, step)
            open_pendings.append(pending)
        if step % 2:  # half of the snapshots find an idle daemon, the others a busy one
            pending.wait("durable")
        for done in [p for p in open_pendings if p.state == "durable"]:
            diary.note("durable", done.attempt, done.step)
            open_pendings.remove(done)
        time.sleep(0.02)
        step += 1


def _start(place: Home, diary: trainers.Diary, megabytes: int) -> Any:
    process = forks.context().Process(
        target=job, args=(place.socket, diary, megabytes), daemon=True
    )
    process.start()
    return process


def _headers(place: Home) -> list[SegmentHeader]:
    found = []
    for path in place.segment_files():
        try:
            with path.open("rb") as file:
                found.append(read_header(file.fileno()))
        except (OSError, CkptdError):
            continue
    return found


def phase(place: Home) -> str | None:
    """Return the phase of the uncommitted save that has come furthest, judged by
    headers and files. None before the first snapshot.
    """
    headers = [header for header in _headers(place) if header.step is not None]
    found = {_phase(place, header) for header in headers}
    return next(
        (
            name
            for name in ("before manifest", "writing", "filling", "sealed", "after")
            if name in found
        ),
        None,
    )


def _phase(place: Home, header: SegmentHeader) -> str:
    if header.state is SlotState.FILLING:
        return "filling"
    directory = place.root / trainers.JOB / names.tag_directory(header.step, None, header.attempt)
    try:
        files = os.listdir(directory)
    except OSError:
        return "sealed"
    if names.MANIFEST in files:
        return "after"
    parts = [name for name in files if names.parse_part_file(name)]
    if not parts:
        return "sealed"
    try:
        with (directory / parts[0]).open("rb") as file:
            PartReader(source(file.fileno()), parts[0])
    except (OSError, CkptdError):
        return "writing"
    return "before manifest"


def run(kills: int, megabytes: int, seed: int, *, most: int = 0) -> Tally:
    """Kill at least `kills` times, and more (up to `most`) until each phase was hit."""
    chance = random.Random(seed)
    result = Tally(PHASES, VICTIMS)
    with home() as place:
        diary = trainers.Diary(place.path / "diary")
        daemon = Daemon(place, "--keep-last", "2").wait_ready()
        trainer = _start(place, diary, megabytes)
        try:
            while result.kills < kills or (result.empty() and result.kills < (most or 3 * kills)):
                wanted = result.wanted(kills)
                victim = VICTIMS[result.kills // len(PHASES) % len(VICTIMS)]
                attempt = diary.newest("sealed")[0]
                known = diary.newest("sealed")
                wait_for(
                    lambda k=known, t=trainer: diary.newest("sealed") > k or not t.is_alive(),  # type: ignore[misc]
                    "snapshot",
                )
                assert trainer.is_alive(), f"the trainer ended by itself in attempt {attempt}"
                wait_for(lambda w=wanted: phase(place) == w, f"phase {wanted!r}")  # type: ignore[misc]
                time.sleep(chance.uniform(0, _LONGEST_WAIT[wanted]))
                _kill(daemon, trainer, victim)
                hit = phase(place) or "filling"
                result.hits[hit, victim] += 1
                daemon, trainer = _revive(place, diary, daemon, trainer, victim, megabytes, result)
        finally:
            trainer.kill()
            trainer.join()
            daemon.close()
    return result


def _kill(daemon: Daemon, trainer: Any, victim: str) -> None:
    """SIGKILL the victim and SIGSTOP the other process in the same instant, so that the
    phase can be read.
    """
    pids = {
        "trainer": [trainer.pid],
        "daemon": [daemon.process.pid],
        "both": [trainer.pid, daemon.process.pid],
    }[victim]
    others = [pid for pid in (trainer.pid, daemon.process.pid) if pid not in pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    if trainer.pid in pids:
        trainer.join()
    if daemon.process.pid in pids:
        daemon.died()


def _revive(
    place: Home,
    diary: trainers.Diary,
    daemon: Daemon,
    trainer: Any,
    victim: str,
    megabytes: int,
    result: Tally,
) -> tuple[Daemon, Any]:
    """Start the killed processes again, let the survivor continue, and check that
    nothing acknowledged is lost.
    """
    promised = diary.newest("sealed", "durable")
    if victim != "trainer":
        daemon.close()
        daemon = Daemon(place, "--keep-last", "2").wait_ready()
    else:
        os.kill(daemon.process.pid, signal.SIGCONT)
    if victim == "daemon":
        os.kill(trainer.pid, signal.SIGCONT)
        wait_for(
            lambda: diary.newest("durable") >= promised or not trainer.is_alive(),
            "durable snapshot after the daemon's restart",
        )
        if not trainer.is_alive():
            result.lost.append(f"the trainer died with its daemon after {promised}")
        trainer.kill()
        trainer.join()
        promised = diary.newest("sealed", "durable")
    before = sum(word == "recovered" for word, _ in diary.read())
    trainer = _start(place, diary, megabytes)
    wait_for(
        lambda: (
            sum(word == "recovered" for word, _ in diary.read()) > before or not trainer.is_alive()
        ),
        "recovery",
    )
    if sum(word == "recovered" for word, _ in diary.read()) == before:
        result.lost.append(f"no recovery after {promised}")
        trainer = _start(place, diary, megabytes)
        return daemon, trainer
    came_back = [key for word, key in diary.read() if word == "recovered"][-1]
    result.recovered += 1
    if promised > (0, -1) and came_back < promised:
        result.lost.append(f"{came_back} came back, {promised} was acknowledged")
    return daemon, trainer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    print(
        f"{options.kills} kills of a job with {options.megabytes} MB of state, seed {options.seed}",
        flush=True,
    )
    return run(options.kills, options.megabytes, options.seed).report()


if __name__ == "__main__":
    sys.exit(main())
