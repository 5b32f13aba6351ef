"""Makes the daemon's n-th system call of one kind kill it or fail: promises are kept,
and the next daemon continues.

`python -m tests.crash.calls --runs 60 [--seed N]`. It needs strace, which injects the
faults (`-e inject`). So a fault hits what the kernel is asked for, wherever in the
program the call is made. The daemons follow one another on one root and one shared
memory. Each trainer compares every bit of what it recovers, which must be as new as
what was sealed or durable before.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch

from ckptd.agent import CkptdError
from tests.crash.lives import SIZE, STEPS
from tests.support import forks, trainers
from tests.support.daemons import Daemon, Home, home

DURABLE = (
    "pwrite64",
    "fsync",
    "fdatasync",
    "renameat",
    "renameat2",
    "unlinkat",
    "fallocate",
    "ftruncate",
    "mkdirat",
)
"""The system calls that durability depends on."""
ALL = (*DURABLE, "openat", "sendmsg")
FAULTS = ("signal=SIGKILL", "error=EIO", "error=ENOSPC")
FIRST = {"openat": 300}  # the earlier calls are those of Python's own start


class Unavailable(Exception):
    """Raised when strace is not installed, or may not trace."""


def train(socket: Path, diary: trainers.Diary) -> None:
    """Recover and compare, then save step after step.

    A failed step is written into the diary, and the next one is tried.
    """
    torch.set_num_threads(1)
    logging.disable()
    try:
        agent, recovered = trainers.begin(socket, SIZE)
        diary.note("recovered", *(recovered or (0, -1)))
        for step in range(1, STEPS + 1):
            pending = agent.snapshot(trainers.expected(step, SIZE), step=step)
            if pending.state in ("sealed", "durable"):
                diary.note("sealed", pending.attempt, step)
            try:
                pending.wait("durable", timeout=60)
                diary.note("durable", pending.attempt, step)
            except CkptdError:
                diary.note("failed", pending.attempt, step)
    except CkptdError:
        pass  # the daemon was gone before it could begin
    except BaseException:
        diary.note("wrong", 0, 0)
        raise
    diary.note("finished", 0, 0)
    time.sleep(600)


def live(place: Home, diary: trainers.Diary, fault: str) -> str:
    """Run one daemon with this fault.

    Return "died", "failed" (a snapshot failed) or "went on".
    """
    under = (
        "strace",
        "-D",
        "-f",
        "-qq",
        "--seccomp-bpf",
        "-o",
        "/dev/null",
        "-e",
        f"inject={fault}",
    )
    daemon = Daemon(
        place,
        "--keep-last",
        "2",
        "--threads",
        "1",
        environment={"CKPTD_STALL_BUDGET": "1"},
        under=under,
    )
    finished, failed = diary.count("finished"), diary.count("failed")
    trainer = None
    try:
        if daemon.reached_ready():
            trainer = forks.context().Process(target=train, args=(place.socket, diary), daemon=True)
            trainer.start()
            while (
                daemon.process.poll() is None
                and trainer.is_alive()
                and diary.count("finished") == finished
            ):
                time.sleep(0.001)
        if daemon.process.poll() is not None:
            return "died"
        return "failed" if diary.count("failed") > failed else "went on"
    finally:
        if trainer is not None:
            trainer.kill()
            trainer.join()
        daemon.close()


def older(diary: trainers.Diary) -> list[str]:
    """Return a problem for each recovery that was older than what was promised before
    it.
    """
    promised, problems = (0, -1), []
    for word, key in diary.read():
        if word == "wrong":
            problems.append("a recovered state differs, or a trainer met something unforeseen")
        elif word == "recovered":
            if key < promised:
                problems.append(f"{key} was recovered, and {promised} was promised")
            # Not the maximum: the newest promised snapshots may have been damaged and
            # skipped.
            promised = key
        elif word in ("sealed", "durable"):
            promised = max(promised, key)
    return problems


def run(
    runs: int, seed: int, seconds: float = float("inf"), kinds: tuple[str, ...] = ALL
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Return how often the daemons ended in which way, by fault, and what was lost.

    Raises Unavailable.
    """
    if shutil.which("strace") is None:
        raise Unavailable("strace is not installed")
    chance, ends, problems = Random(seed), Counter[tuple[str, str]](), list[str]()
    end = time.monotonic() + seconds
    with home() as place:
        diary = trainers.Diary(place.path / "diary")
        for number in range(runs):
            if time.monotonic() > end or problems:
                break
            call, fault = kinds[number % len(kinds)], FAULTS[number // len(kinds) % len(FAULTS)]
            nth = FIRST.get(call, 0) + chance.randrange(1, 60 if call in FIRST else 16)
            how = live(place, diary, f"{call}:{fault}:when={nth}")
            ends[f"{call} {fault}", how] += 1
            problems += [f"{call}:{fault}:when={nth}: {problem}" for problem in older(diary)]
        if not problems:
            # Without a fault: everything comes back, and steps are saved again.
            live(place, diary, "quotactl:error=EIO")
            last = list(diary.read())[-2:]
            if [word for word, _ in last] != ["durable", "finished"]:
                problems.append(
                    f"without a fault the last trainer ended with {last}: "
                    f"{place.log_text()[-2000:]}"
                )
            problems += older(diary)
    return ends, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    ends, problems = run(options.runs, options.seed)
    for (fault, how), count in sorted(ends.items()):
        print(f"{fault:32} {how:8} {count}")
    print(*problems, sep="\n")
    print(f"{ends.total()} faults, seed {options.seed}, {len(problems)} lost")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
