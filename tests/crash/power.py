"""Power cuts of a real ext4: at every failpoint of the daemon, and at random moments.

`python -m tests.crash.power --cuts 60 [--seed N]`; needs root, for the loop mount. The file system is stopped as a power cut would stop
it (EXT4_IOC_SHUTDOWN, linux/fs/ext4/ext4.h; with and without its journal flushed), shared memory is emptied, everything is killed, and the
image is mounted again. The next daemon recovers, and the next trainer compares every bit of what it gets: never older than what was
durable.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from ckptd.agent import Checkpoint
from ckptd.shared import failpoints
from tests.support import trainers
from tests.support.daemons import Daemon, Home, home

EXT4_IOC_SHUTDOWN = 0x8004587D
FLUSHED, NOT_FLUSHED = 1, 2
"""Whether the file system's own journal reaches the disk; data that was not synced never does."""
SIZE = 4000
STEPS = 4
OPTIONS = ("--keep-last", "2", "--codec", "zstd:1")
ANY = "any moment"


class Unavailable(Exception):
    """This machine has no loop mounts for us."""


class Image:
    """An ext4 in a file in memory, mounted at `where`."""

    def __init__(self, megabytes: int = 64) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="ckptd-power-", dir="/dev/shm"))
        self._file, self.where = self._place / "image", self._place / "mnt"
        self.where.mkdir()
        with self._file.open("wb") as file:
            file.truncate(megabytes << 20)
        try:
            _run("mkfs.ext4", "-q", "-F", str(self._file))
            self._mount()
        except (OSError, subprocess.CalledProcessError) as error:
            shutil.rmtree(self._place)
            raise Unavailable(f"mounting an image needs root and mkfs.ext4: {error}") from None

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._file), str(self.where))

    def _unmount(self) -> None:
        for _ in range(100):
            if subprocess.run(["umount", str(self.where)], check=False, capture_output=True).returncode == 0:
                return
            time.sleep(0.05)  # whoever was killed has not closed its files yet
        raise RuntimeError(f"{self.where} is still in use")

    def stop(self, how: int) -> None:
        fd = os.open(self.where, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(fd)

    def again(self) -> None:
        self._unmount()
        self._mount()

    def close(self) -> None:
        self._unmount()
        shutil.rmtree(self._place)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def image() -> Iterator[Image]:
    made = Image()
    try:
        yield made
    finally:
        made.close()


class Machine:
    """A daemon and a trainer on a disk that loses its power again and again; `problems`: what was lost."""

    def __init__(self, place: Home, disk: Image, seed: int) -> None:
        self.problems: list[str] = []
        self.hit: Counter[str] = Counter()
        place.root = disk.where / "root"
        self._place, self._disk, self._chance = place, disk, Random(seed)
        self._diary = trainers.Diary(place.path / "diary")

    def live(self, point: str) -> None:
        """Recover, save, and lose power at this point; or at some moment, if it is not come to."""
        nth = 1 if point.startswith("start.") else self._chance.choice([1, 1, 1, 2, 3])
        daemon = Daemon(self._place, *OPTIONS, failpoints="" if point == ANY else f"{point}=kill@{nth}")
        trainer: Any = None
        lives = self._diary.count("finished")
        try:
            if daemon.reached_ready():
                trainer = trainers.start(self._place.socket, self._diary, 1, STEPS, size=SIZE, wait_every=1)
                until = time.monotonic() + (self._chance.uniform(0, 1) if point == ANY else 60)
                while (
                    daemon.process.poll() is None
                    and trainer.is_alive()
                    and self._diary.count("finished") == lives
                    and time.monotonic() < until
                ):
                    time.sleep(0.001)
                if not trainer.is_alive() and daemon.process.poll() is None:
                    self.problems.append(f"at {point}: the trainer ended with {trainer.exitcode}")
            reached = daemon.process.poll() is not None
            self._disk.stop(self._chance.choice([FLUSHED, NOT_FLUSHED]))
            self.hit[point if reached else ANY] += 1
        finally:
            if trainer is not None:
                trainer.kill()
                trainer.join()
            daemon.close()
        shutil.rmtree(self._place.segments, ignore_errors=True)
        self._disk.again()
        self._look(point)

    def _look(self, point: str) -> None:
        """Whether each recovery was as new as what had been durable before it; and that every manifest there is sound."""
        durable = (0, -1)
        for word, key in self._diary.read():
            if word == "recovered" and key < durable:
                self.problems.append(f"at {point}: {key} was recovered, and {durable} was durable")
            durable = max(durable, key) if word == "durable" else durable
        found = (0, -1)
        for tag in sorted((self._place.root / trainers.JOB).glob("*/manifest.json")):
            try:
                with Checkpoint.open(self._place.root / trainers.JOB, tag.parent.name) as checkpoint:
                    assert checkpoint.step is not None
                    trainers.assert_equal(checkpoint.load(), checkpoint.step, SIZE)
                    found = max(found, (checkpoint.attempt, checkpoint.step))
            except Exception as error:
                self.problems.append(f"at {point}: {tag.parent.name}: {error!r}")
        if found < durable:
            self.problems.append(f"at {point}: {durable} was durable, and the newest there is {found}")


def run(cuts: int, seed: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """How often each point lost its power, and what was lost. Raises Unavailable."""
    points = [*failpoints.DAEMON, ANY]
    end = time.monotonic() + seconds
    with home() as place, image() as disk:
        machine = Machine(place, disk, seed)
        for number in range(cuts):
            if time.monotonic() > end or machine.problems:
                break
            machine.live(points[number % len(points)])
        return machine.hit, machine.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    hit, problems = run(options.cuts, options.seed)
    for point, count in sorted(hit.items()):
        print(f"{point:24} {count}")
    print(*problems, sep="\n")
    print(f"{hit.total()} power cuts at {len(hit)} points, seed {options.seed}, {len(problems)} lost")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
