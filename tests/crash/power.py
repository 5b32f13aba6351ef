"""Power cuts of a real ext4: at every failpoint of the daemon, and at random moments.

`python -m tests.crash.power --cuts 60 [--seed N]`; needs root, for the loop mount. The file system is stopped as a power cut would stop
it (EXT4_IOC_SHUTDOWN, linux/fs/ext4/ext4.h; with and without its journal flushed), shared memory is emptied, everything is killed, and the
image is mounted again. The next daemon recovers, and the next trainer compares every bit of what it gets: never older than what was
durable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from contextlib import closing
from itertools import cycle, islice

from ckptd.shared import failpoints
from tests.crash.images import FLUSHED, NOT_FLUSHED, Image
from tests.crash.lives import ANY, Lives, report
from tests.support.daemons import Home, home


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
    with home() as place, closing(Image()) as disk:
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
    sys.exit(report(run(options.cuts, options.seed), "power cuts", options.seed))


if __name__ == "__main__":
    main()
