"""Cuts, removes, replaces or damages segments of shared memory at random moments, as
another process of the same user could.

`python -m tests.crash.segments --damages 200 [--seed N]`. The daemon must survive all
of it and answer. It maps no segment, because a mapping that is cut short would kill it
with SIGBUS. A trainer whose own segment is cut may die of that. The next trainer gets
back, bit for bit, at least what was durable. At the end the job saves again, and
nothing is left over.
"""

from __future__ import annotations

import argparse
import os
import signal
import stat
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.crash.lives import GAVE_UP, OPTIONS, SIZE, STEPS, examine, train
from tests.support import forks, trainers
from tests.support.daemons import Daemon, Home, holds, home, running

HEADER = 4096
KINDS = ("cut", "remove", "replace", "another", "header")
SECONDS = 60.0
SLOWLY = "seal.received=sleep(0.002),persist.created=sleep(0.002),slot.created=sleep(0.002)"


def damage(path: Path, kind: str, chance: Random) -> None:
    """Damage a segment.

    Raises OSError if it has disappeared, or is no longer a regular file: opening a FIFO
    would block this process.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} has been replaced already")
    size = found.st_size
    if kind == "cut":
        os.truncate(
            path,
            chance.choice([0, 1, HEADER - 1, HEADER, chance.randrange(size + 1), max(0, size - 1)]),
        )
    elif kind == "remove":
        path.unlink()
    elif kind == "replace":
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    elif kind == "another":
        path.unlink()
        chance.choice(
            [path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/etc/passwd")]
        )()
    else:
        with path.open("r+b") as file:
            at = chance.randrange(3 * HEADER)  # the two copies of the header, then the checksums
            file.seek(at)
            for byte in file.read(1):  # the file has no byte there if it has been cut already
                file.seek(at)
                file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def round_of(
    place: Home, daemon: Daemon, diary: trainers.Diary, kind: str, chance: Random
) -> tuple[bool, str]:
    """Run a trainer, and damage a segment at some moment.

    Return whether that was done, and what went wrong.
    """
    durable, begun = diary.newest("durable"), len(diary.read())
    trainer = forks.context().Process(
        target=train, args=(place.socket, diary, "", True), daemon=True
    )
    trainer.start()
    done, at = False, chance.randrange(0, 2 * STEPS)
    until = time.monotonic() + SECONDS
    while trainer.is_alive() and not any(word == "finished" for word, _ in diary.read()[begun:]):
        if not done and len(diary.read()) - begun >= at and (found := place.segment_files()):
            time.sleep(chance.uniform(0, 0.01))
            try:
                damage(chance.choice(found), kind, chance)
                done = True
            except OSError:
                pass
        if time.monotonic() > until:
            trainer.kill()
            return done, f"{kind}: the trainer hangs"
        time.sleep(0.0005)
    trainer.kill()
    trainer.join()
    recovered = [key for word, key in diary.read()[begun:] if word == "recovered"]
    if daemon.process.poll() is not None:
        return done, f"{kind}: the daemon ended: {place.log_text()[-2000:]}"
    if (place.path / "wrong").exists():
        return done, f"{kind}: {(place.path / 'wrong').read_text()}"
    if recovered and recovered[0] < durable:
        return done, f"{kind}: {recovered[0]} was recovered, and {durable} was durable"
    if not daemon.status()["ready"]:
        return done, f"{kind}: the daemon is not ready any more"
    if trainer.exitcode not in (-signal.SIGKILL, -signal.SIGBUS) and not done:
        gave_up = place.path / "gave up"
        why = gave_up.read_text() if trainer.exitcode == GAVE_UP and gave_up.exists() else ""
        # This also happens on a machine that is busy for longer than the stall budget.
        if "was skipped" not in why:
            return done, f"{kind}: the trainer ended with {trainer.exitcode}; {why}"
    return done, ""


def run(damages: int, seed: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how many damages of each kind were done, and what went wrong."""
    chance, kinds, end = Random(seed), Counter[str](), time.monotonic() + seconds
    with home() as place:
        diary = trainers.Diary(place.path / "diary")
        problem = ""
        environment = {"CKPTD_STALL_BUDGET": "0.5", "CKPTD_MEMORY_TTL": "1"}
        with running(place, *OPTIONS, failpoints=SLOWLY, environment=environment) as daemon:
            before = descriptors(daemon)
            while kinds.total() < damages and time.monotonic() < end and not problem:
                kind = chance.choice(KINDS)
                done, problem = round_of(place, daemon, diary, kind, chance)
                kinds[kind] += done
            problems = [problem] if problem else []
            begun = len(diary.read())
            trainer = forks.context().Process(
                target=train, args=(place.socket, diary, "", False), daemon=True
            )
            trainer.start()
            trainer.join()
            words = Counter(word for word, _ in diary.read()[begun:])
            left = daemon.status()["shared_memory"]["segments"]
            if (
                words["durable"] < STEPS
                or left
                or not holds(lambda: descriptors(daemon) <= before, 10)
            ):
                problems.append(
                    f"without faults: {words}, {left} segments, {descriptors(daemon) - before} "
                    f"descriptors: {place.log_text()[-2000:]}"
                )
        newest, unsound = examine(place.root, SIZE)
        if newest < diary.newest("durable"):
            problems.append(
                f"{diary.newest('durable')} was durable, and the newest there is {newest}"
            )
        return kinds, problems + unsound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    kinds, problems = run(options.damages, options.seed)
    print(*(f"{kind:10} {count}" for kind, count in kinds.most_common()), *problems, sep="\n")
    print(f"{kinds.total()} damages, seed {options.seed}, {len(problems)} lost")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
