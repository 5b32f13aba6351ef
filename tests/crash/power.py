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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

from ckptd.shared import failpoints
from tests.crash.lives import ANY, Lives
from tests.support.daemons import Home, home

EXT4_IOC_SHUTDOWN = 0x8004587D
FLUSHED, NOT_FLUSHED = 1, 2
"""Whether the file system's own journal reaches the disk; data that was not synced never does."""


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


class Machine(Lives):
    """Lives on a disk that loses its power when one ends; what was in memory is gone."""

    def __init__(self, place: Home, disk: Image, seed: int) -> None:
        super().__init__(place, seed, promises=("durable",))
        place.root = disk.where / "root"
        self._disk = disk

    def cut(self) -> None:
        self._disk.stop(self.chance.choice([FLUSHED, NOT_FLUSHED]))

    def outlives(self) -> bool:
        return False

    def mend(self) -> None:
        shutil.rmtree(self._place.segments, ignore_errors=True)
        self._disk.again()


def run(cuts: int, seed: int, seconds: float = float("inf")) -> Machine:
    """Raises Unavailable."""
    end = time.monotonic() + seconds
    with home() as place, image() as disk:
        machine = Machine(place, disk, seed)
        for number, point in enumerate(islice(cycle([*failpoints.DAEMON, ANY]), cuts)):
            if time.monotonic() > end or machine.problems:
                break
            machine.live(point, 1 if number <= len(failpoints.DAEMON) else machine.chance.choice([1, 1, 2, 3]))
        machine.rest()
        return machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    machine = run(options.cuts, options.seed)
    for point, count in sorted(machine.hit.items()):
        print(f"{point:24} {count}")
    print(*machine.problems, sep="\n")
    print(f"{machine.hit.total()} power cuts at {len(machine.hit)} points, seed {options.seed}, {len(machine.problems)} lost")
    sys.exit(bool(machine.problems))


if __name__ == "__main__":
    main()
