"""Cuts the power of a real ext4 at every failpoint of the daemon, and at random
moments.

`python -m tests.crash.power --cuts 60 [--seed N]`; needs root, for the loop mount. The
file system is stopped as by a power cut (EXT4_IOC_SHUTDOWN, linux/fs/ext4/ext4.h; with
and without a flush of its journal), shared memory is emptied, every process is killed,
and the image is mounted again. The next daemon recovers, and the next trainer compares
every bit of what it gets, which must not be older than what was durable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from contextlib import closing
from itertools import cycle, islice

from ckptd.shared.system import failpoints
from tests.crash.images import FLUSHED, NOT_FLUSHED, Image
from tests.crash.lives import ANY, Lives, report
from tests.support.daemons import Home, home


class Machine(Lives):
    """Runs daemons and trainers on a disk that loses its power at each death.

    What was in memory is then gone.
    """

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
    """Run `cuts` power cuts. Raises Unavailable."""
    end = time.monotonic() + seconds
    with home() as place, closing(Image()) as disk:
        machine = Machine(place, disk, seed)
        for number, point in enumerate(islice(cycle([*failpoints.DAEMON, ANY]), cuts)):
            if time.monotonic() > end or machine.problems:
                break
            machine.live(
                point,
                1 if number <= len(failpoints.DAEMON) else machine.chance.choice([1, 1, 2, 3]),
            )
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
