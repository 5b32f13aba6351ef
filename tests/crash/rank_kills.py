"""Kills a whole torchrun with SIGKILL at random microseconds of its snapshots, and
prints a table of what the kills hit.

`python -m tests.crash.rank_kills --kills 20 --megabytes 256`. Four ranks train a model
sharded by FSDP2. They die together, with or without the daemon. A new torchrun must get
back on every rank, bit for bit, what was captured at the step that it reports, and
nothing older than what all ranks had sealed. At the end, the snapshot in memory is
recovered on a mesh of two times two ranks, and the checkpoint on storage on one, two
and three ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from ckptd.shared import names
from ckptd.shared.errors import CkptdError
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.segment import SlotState, read_header
from tests.crash import rank_trainer
from tests.crash.tally import Tally, wait_for
from tests.support.daemons import Daemon, Home, home
from tests.support.ranks import RankFailed, Ranks
from tests.support.storage import source
from tests.support.trainers import JOB, Diary

PHASES = ("some ranks filling", "all sealed", "writing", "before manifest", "after")
VICTIMS = ("ranks", "daemon too")
RANKS = 4
KEEP = ("--keep-last", "2")
# Longest wait in a phase, in seconds.
_LONGEST_WAIT = dict(zip(PHASES, (0.05, 0.02, 0.3, 0.002, 0.05), strict=True))
_ROOT = Path(__file__).parent.parent.parent
_SECONDS = 300.0  # timeout for any event; it measures nothing
_wait_for = partial(wait_for, seconds=_SECONDS)

Key = tuple[int, int]
"""(attempt, step)."""


class Job:
    """The torchrun that runs now, and the diaries of all earlier runs."""

    def __init__(self, place: Home, megabytes: int) -> None:
        self._place, self._megabytes = place, megabytes
        self._log = place.path / "torchrun.log"
        self.diaries = [Diary(place.path / f"diary.{rank}") for rank in range(RANKS)]
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--max-restarts",
            "0",
            "--nproc-per-node",
            str(RANKS),
        ]
        arguments = [
            "-m",
            "tests.crash.rank_trainer",
            str(self._place.socket),
            str(self._place.path / "diary"),
            str(self._megabytes),
        ]
        with self._log.open("ab") as log:
            self._torchrun = subprocess.Popen(
                [*command, *arguments],
                cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._processes: list[psutil.Process] = []

    @property
    def running(self) -> bool:
        return self._torchrun.poll() is None

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def count(self, word: str) -> list[int]:
        return [sum(said == word for said, _ in diary.read()) for diary in self.diaries]

    def last(self, word: str) -> set[Key]:
        """Return the last keys that the ranks have written with this word."""
        return {[key for said, key in diary.read() if said == word][-1] for diary in self.diaries}

    def promised(self) -> Key:
        """Return the newest key that all ranks have sealed, or that one rank knows to
        be durable, or (0, -1) if there is none.
        """
        noted = [list(diary.read()) for diary in self.diaries]
        sealed = set.intersection(
            *({key for word, key in words if word == "sealed"} for words in noted)
        )
        durable = {key for words in noted for word, key in words if word == "durable"}
        return max(sealed | durable, default=(0, -1))

    def look(self) -> None:
        """List the processes to kill.

        This is done ahead of the kill, because it takes long.
        """
        this = psutil.Process(self._torchrun.pid)
        self._processes = [this, *this.children(recursive=True)]

    def kill(self) -> None:
        """Kill all processes at once."""
        if not self._processes and self.running:
            self.look()
        for process in self._processes:
            if _lives(process):
                process.kill()
        self._torchrun.wait()
        _wait_for(
            lambda: not any(_lives(process) for process in self._processes), "end of all ranks"
        )


def _lives(process: psutil.Process) -> bool:
    """Return True if the process runs.

    A zombie does not count: its parent may be dead as well, so that nobody reaps it.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def phase(place: Home) -> str | None:
    """Return the phase of the uncommitted save that has come furthest, judged by
    headers and files. None before the first snapshot.
    """
    sealed: dict[Key, set[int]] = defaultdict(set)
    begun: set[Key] = set()
    for path in place.segment_files():
        try:
            with path.open("rb") as file:
                header = read_header(file.fileno())
        except (OSError, CkptdError):
            continue
        if header.step is not None and header.state is not SlotState.FREE:
            begun.add((header.attempt, header.step))
            if header.state is SlotState.SEALED:
                sealed[header.attempt, header.step].add(header.rank)
    complete = [key for key, ranks in sealed.items() if len(ranks) == RANKS]
    found = {_saved(place, key) for key in complete}
    if begun and max(begun) > max(complete, default=(0, -1)):
        found.add(PHASES[0])
    return next(
        (
            name
            for name in ("before manifest", "writing", PHASES[0], "all sealed", "after")
            if name in found
        ),
        None,
    )


def _saved(place: Home, key: Key) -> str:
    directory = place.root / JOB / names.tag_directory(key[1], None, key[0])
    try:
        files = os.listdir(directory)
    except OSError:
        return "all sealed"
    if names.MANIFEST in files:
        return "after"
    parts = [name for name in files if names.parse_part_file(name)]
    try:
        for name in parts:
            with (directory / name).open("rb") as file:
                PartReader(source(file.fileno()), name)
    except (OSError, CkptdError):
        return "writing"
    return ("all sealed", "writing")[bool(parts)] if len(parts) < RANKS else "before manifest"


def run(
    kills: int,
    megabytes: int,
    seed: int,
    *,
    most: int = 0,
    meshes: Sequence[str] = ("hsdp", "tp"),
    worlds: Sequence[int] = (1, 2, 3),
) -> Tally:
    """Kill at least `kills` times, and more (up to `most`) until each phase was hit.

    Then recover on `meshes` from memory and on `worlds` from storage.
    """
    chance = random.Random(seed)
    result = Tally(PHASES, VICTIMS)
    with home() as place:
        daemon = Daemon(place, *KEEP).wait_ready()
        job = Job(place, megabytes)
        try:
            while result.kills < kills or (result.empty() and result.kills < most):
                wanted = result.wanted(kills)
                victim = VICTIMS[result.kills % len(VICTIMS)]
                known = job.promised()
                _wait_for(lambda k=known: job.promised() > k or not job.running, "snapshot")  # type: ignore[misc]
                assert job.running, f"torchrun ended by itself:\n{job.log()}"
                job.look()
                _wait_for(lambda w=wanted: phase(place) == w, f"phase {wanted!r}")  # type: ignore[misc]
                time.sleep(chance.uniform(0, _LONGEST_WAIT[wanted]))
                daemon.process.send_signal(
                    signal.SIGKILL if victim == "daemon too" else signal.SIGSTOP
                )
                job.kill()
                result.hits[phase(place) or PHASES[0], victim] += 1
                if victim == "daemon too":
                    daemon.close()
                    daemon = Daemon(place, *KEEP).wait_ready()
                else:
                    daemon.process.send_signal(signal.SIGCONT)
                _revive(job, result)
            job.kill()
            daemon = _check_at_the_end(place, daemon, job, megabytes, result, meshes, worlds)
        finally:
            job.kill()
            daemon.close()
    return result


def _revive(job: Job, result: Tally) -> None:
    """Start what was killed again, and check that nothing promised is lost."""
    promised, before = job.promised(), job.count("recovered")
    job.start()

    def recovered() -> bool:
        return all(now > then for now, then in zip(job.count("recovered"), before, strict=True))

    _wait_for(lambda: recovered() or not job.running, "recovery")
    if not recovered():
        result.lost.append(f"no recovery after {promised}:\n{job.log()}")
        job.kill()
        job.start()
        return
    result.recovered += 1
    came_back = job.last("recovered")
    if len(came_back) != 1 or max(came_back) < promised:
        result.lost.append(f"{came_back} came back, {promised} was promised")


def _check_at_the_end(
    place: Home,
    daemon: Daemon,
    job: Job,
    megabytes: int,
    result: Tally,
    meshes: Sequence[str],
    worlds: Sequence[int],
) -> Daemon:
    """Recover from memory on other meshes.

    Then, once the checkpoint is on storage only, recover on other numbers of ranks.
    """
    _wait_for(lambda: daemon.status()["jobs"][0]["ranks_connected"] == 0, "end of the ranks")
    sealed = daemon.status()["jobs"][0]["last_sealed"]
    if (sealed["attempt"], sealed["step"]) < job.promised():
        result.lost.append(f"{sealed} is in memory, {job.promised()} was promised")
    for how in meshes:
        _check(place, RANKS, megabytes, how, sealed["step"], "memory", result)
    assert daemon.stop(timeout=_SECONDS) == 0
    for path in place.segment_files():
        path.unlink()
    daemon = Daemon(place, *KEEP).wait_ready()
    for world_size in worlds:
        _check(place, world_size, megabytes, "fsdp", sealed["step"], "storage", result)
    return daemon


def _check(
    place: Home, world_size: int, megabytes: int, how: str, step: int, source: str, result: Tally
) -> None:
    what = f"step {step} from {source} on {world_size} ranks, {how}"
    try:
        with Ranks(world_size) as ranks:
            ranks.call(
                rank_trainer.recover_whole,
                place.socket,
                megabytes,
                how,
                step,
                source,
                timeout=_SECONDS,
            )
        result.checked.append(f"{what}: equal")
    except RankFailed as error:
        result.lost.append(f"{what}: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    print(
        f"{options.kills} kills of {RANKS} ranks with {options.megabytes} MB of state each, seed "
        f"{options.seed}",
        flush=True,
    )
    return run(options.kills, options.megabytes, options.seed, most=3 * options.kills).report()


if __name__ == "__main__":
    sys.exit(main())
