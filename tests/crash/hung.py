"""Tests a disk that hangs: jobs that live in memory continue to seal, and recover from
the daemon whose disk hangs.

`python -m tests.crash.hung --rounds 20 [--seed N]`. Either the disk is frozen (FIFREEZE
of a real ext4, where available), or some of the daemon's calls under its root wait:
open, create, fsync, rename, listing. One job saves to the disk, so that a save is
running when the disk hangs. Another job lives in memory. While the disk hangs, this job
seals, dies, restarts, recovers its newest step bit for bit, and seals again, and the
daemon answers every request. Once the disk answers again, every snapshot that was asked
to be durable becomes durable.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from ckptd.agent import Agent, Checkpoint, CkptdError
from tests.crash.images import Image, Unavailable
from tests.crash.rounds import main, run_rounds
from tests.support import forks, trainers
from tests.support.daemons import Daemon, Home

SIZE = 20_000
SECONDS = 60.0
"""Timeout in seconds for anything that must happen. It measures nothing."""
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h
CALLS = (
    "open",
    "fsync",
    "fdatasync",
    "rename",
    "link",
    "mkdir",
    "unlink",
    "listdir",
    "posix_fallocate",
    "pwrite",
)
OPTIONS = ("--keep-last", "2", "--codec", "raw", "--threads", "1")
ENVIRONMENT = {"CKPTD_STORAGE_TIMEOUT": "1", "CKPTD_STALL_BUDGET": "2"}


def obey(pipe: Any, socket: Path, job: str) -> None:
    """Run as a trainer that executes the commands that it gets over a pipe."""
    torch.set_num_threads(1)
    logging.disable()
    agent: Agent | None = None
    pendings: dict[int, Any] = {}
    while True:
        command, *arguments = pipe.recv()
        answer: Any = None
        try:
            if command == "begin":
                agent, state = Agent(job, socket=socket), trainers.blank(SIZE)
                recovered = agent.recover(state)
                if recovered is not None:
                    trainers.assert_equal(state, recovered.step, SIZE)
                    answer = (recovered.attempt, recovered.step, recovered.source)
            elif command == "snapshot":
                step, persist = arguments
                assert agent is not None
                pendings[step] = agent.snapshot(
                    trainers.expected(step, SIZE), step=step, persist=persist
                )
                answer = pendings[step].state
            else:
                pendings[arguments[0]].wait(command, timeout=SECONDS)
        except (CkptdError, TimeoutError) as error:
            answer = error
        except BaseException as error:
            answer = AssertionError(repr(error))
        pipe.send(answer)


class Trainer:
    """A process that runs `obey`."""

    def __init__(self, socket: Path, job: str) -> None:
        self._pipe, theirs = forks.context().Pipe()
        self._process: Any = forks.context().Process(
            target=obey, args=(theirs, socket, job), daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, *command: Any) -> Any:
        """Send a command, and return the answer.

        Raises AssertionError if the trainer finds something wrong, or hangs.
        """
        self._pipe.send(command)
        assert self._pipe.poll(2 * SECONDS), f"{command} hangs"
        answer = self._pipe.recv()
        if isinstance(answer, AssertionError):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def make_calls_wait(
    flag: Path, root: Path, names: tuple[str, ...], at: Callable[[], bool] = lambda: True
) -> None:
    """Make these calls of this process wait while `flag` exists, if they touch a file
    under `root` and `at()` is true.
    """

    def touches(argument: Any) -> bool:
        if isinstance(argument, bool) or not isinstance(argument, (int, str, os.PathLike)):
            return False
        with suppress(OSError):
            place = (
                os.readlink(f"/proc/self/fd/{argument}")
                if isinstance(argument, int)
                else os.fspath(argument)
            )
            return str(place).startswith(str(root))
        return False

    def patch(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            waits = flag.exists() and any(map(touches, (*arguments, *options.values()))) and at()
            while waits and flag.exists():
                time.sleep(0.02)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in names:
        patch(name)


class Round:
    """One daemon with two jobs, whose disk hangs once."""

    def __init__(self, place: Home, chance: Random, done: Counter[str]) -> None:
        self._place, self._chance, self._done = place, chance, done
        self._flag = place.path / "hangs"
        self._left = ExitStack()

    def live(self) -> None:
        with self._left:
            self._live()

    def _live(self) -> None:
        disk = self._disk()
        names = (
            tuple(self._chance.sample(CALLS, self._chance.randint(1, len(CALLS))))
            if disk is None
            else ()
        )
        first = partial(make_calls_wait, self._flag, self._place.root, names)
        daemon = Daemon(self._place, *OPTIONS, environment=ENVIRONMENT, forked=first).wait_ready()
        self._left.callback(daemon.close)
        saving, living = self._trainer("disk"), self._trainer("memory")
        assert (saving.ask("begin"), living.ask("begin")) == (None, None)
        for step in range(1, 4):
            assert saving.ask("snapshot", step, True) in ("sealed", "durable")
            assert saving.ask("durable", step) is None
            assert living.ask("snapshot", step, False) == "sealed"
        self._sealed(daemon, "memory", 3)
        saving.ask("snapshot", 4, True)
        time.sleep(self._chance.uniform(0, 0.02))
        what = "frozen" if disk is not None else "calls that wait"
        with self._hanging(disk):
            saving.ask("snapshot", 5, True)
            time.sleep(self._chance.uniform(0, 0.2))
            for step in range(4, 4 + self._chance.randint(1, 6)):
                assert living.ask("snapshot", step, False) == "sealed", (
                    f"step {step} is not sealed while the disk is {what}"
                )
                self._sealed(daemon, "memory", step)
            living.kill()
            living = self._trainer("memory")
            recovered = living.ask("begin")
            assert recovered == (1, step, "memory"), (
                f"{recovered} came back, not step {step}, while the disk is {what} {names}"
            )
            assert living.ask("snapshot", step + 1, False) == "sealed"
            self._sealed(daemon, "memory", step + 1)
            assert daemon.status()["pid"] > 0
        assert living.ask("snapshot", step + 2, True) in ("sealed", "durable")
        assert living.ask("durable", step + 2) is None, (
            "the job that lived in memory cannot be saved"
        )
        later = 6
        while saving.ask("snapshot", later, True) not in ("sealed", "durable"):
            later += 1
        assert saving.ask("durable", later) is None, "the job that was being saved cannot go on"
        for job, attempt, newest in (("memory", 2, step + 2), ("disk", 1, later)):
            with Checkpoint.open(self._place.root / job) as checkpoint:
                assert (checkpoint.attempt, checkpoint.step) == (attempt, newest)
                trainers.assert_equal(checkpoint.load(), newest, SIZE)
        self._done[what] += 1

    def _trainer(self, job: str) -> Trainer:
        made = Trainer(self._place.socket, job)
        self._left.callback(made.kill)
        return made

    def _disk(self) -> Image | None:
        """Return an ext4 that can be frozen, in half of the rounds and if this machine
        can mount one.
        """
        if self._chance.random() < 0.5:
            return None
        try:
            disk = self._left.enter_context(closing(Image(64)))
        except Unavailable:
            return None
        self._place.root = disk.where / "root"
        return disk

    @contextmanager
    def _hanging(self, disk: Image | None) -> Iterator[None]:
        if disk is None:
            self._flag.touch()
            try:
                yield
            finally:
                self._flag.unlink()
            return
        fd = os.open(disk.where, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, FIFREEZE, 0)
            try:
                yield
            finally:
                fcntl.ioctl(fd, FITHAW, 0)
        finally:
            os.close(fd)

    def _sealed(self, daemon: Daemon, job: str, step: int) -> None:
        """Wait until the daemon reports that it knows of the seal."""
        end = time.monotonic() + SECONDS
        while True:
            known = next(
                found["last_sealed"] for found in daemon.status()["jobs"] if found["job"] == job
            )
            if known is not None and known["step"] >= step:
                return
            assert time.monotonic() < end, (
                f"the daemon does not take note of step {step}: it knows {known}"
            )
            time.sleep(0.01)


def run(rounds: int, number: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how often the disk hung, by kind of hang, and what went wrong.

    `number` is the random seed.
    """
    return run_rounds(
        lambda place, chance, done: Round(place, chance, done).live(), rounds, number, seconds
    )


if __name__ == "__main__":
    main(__doc__, run)
