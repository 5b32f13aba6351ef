"""Makes the daemon's reads of segments fail: what is sealed is still there for the
daemon that can read again.

`python -m tests.crash.reads --rounds 20 [--seed N]`. A step is sealed in memory only,
and the daemon and the trainer are killed. The next daemon meets errors when it opens or
reads segments, from one call to another. A trainer recovers from it, and may get an
error, but no wrong value. The daemon after that one has no faults, and must give back
the sealed step, bit for bit.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from ckptd.agent import CkptdError
from tests.crash.hung import Trainer
from tests.crash.rounds import main, run_rounds
from tests.support.daemons import Daemon, Home

CALLS = ("open", "pread", "preadv")
ERRORS = (errno.EIO, errno.ENOMEM, errno.EMFILE)
OPTIONS = ("--keep-last", "2", "--codec", "raw", "--threads", "1")
MOST = 40
"""The highest number of the first call that fails. A start with two segments makes
about half as many.
"""


def make_reads_fail(directory: Path, first: int, last: int, error: int) -> None:
    """Make the calls number `first` to `last` of this process fail that open or read a
    file in the directory.
    """
    numbers = itertools.count(1)

    def touches(argument: Any, descriptor: Any) -> bool:
        try:
            if isinstance(argument, int):
                path = Path(os.readlink(f"/proc/self/fd/{argument}"))
            elif isinstance(descriptor, int):
                path = Path(os.readlink(f"/proc/self/fd/{descriptor}"), argument)
            else:
                path = Path(argument)
        except (OSError, TypeError):
            return False
        return path.is_relative_to(directory) and path != directory

    def patch(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if touches(arguments[0], options.get("dir_fd")) and first <= next(numbers) <= last:
                raise OSError(error, os.strerror(error))
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in CALLS:
        patch(name)


class Round:
    """Three daemons, one after the other. The second one cannot read some of the time."""

    def __init__(self, place: Home, chance: Random, done: Counter[str]) -> None:
        self._place, self._chance, self._done = place, chance, done
        self._left = ExitStack()

    def live(self) -> None:
        with self._left:
            self._live()

    def _live(self) -> None:
        self._seal()
        first = self._chance.randint(1, MOST)
        last = first + self._chance.choice((0, 0, 1, 5, 1 << 30))
        error = self._chance.choice(ERRORS)
        faults = f"{errno.errorcode[error]} at calls {first} to {last}"
        answer = self._faulty(partial(make_reads_fail, self._place.segments, first, last, error))
        assert answer is not None, (
            f"the recovery found nothing, with {faults}, although step 1 is durable"
        )
        outcome = f"error {answer.code} {answer}" if isinstance(answer, CkptdError) else str(answer)
        found, daemon = self._recovered()
        assert isinstance(found, tuple), (
            f"{found!r} without faults, after {faults}, where the recovery gave {outcome}"
        )
        assert found[1] == 2, (
            f"step {found[1]} came back from {found[2]}, after {faults}, where the recovery gave "
            f"{outcome}"
        )
        assert daemon.stop() == 0
        self._done["reads that fail"] += 1
        self._done[f"  {outcome}"] += 1

    def _seal(self) -> None:
        """Make step 1 durable and seal step 2 in memory, then kill the daemon and the
        trainer.
        """
        daemon = self._daemon(True)
        trainer = self._trainer()
        assert trainer.ask("begin") is None
        assert trainer.ask("snapshot", 1, True) in ("sealed", "durable")
        assert trainer.ask("durable", 1) is None
        assert trainer.ask("snapshot", 2, False) == "sealed"
        daemon.kill()
        trainer.kill()

    def _faulty(self, patch: Any) -> Any:
        """Return the answer of a recovery from a daemon that cannot read, or a sentence
        if the daemon does not start.
        """
        daemon = self._daemon(patch, wait=False)
        if not daemon.reached_ready():
            daemon.died()
            return "the daemon does not start"
        trainer = self._trainer()
        answer = trainer.ask("begin")
        if self._chance.random() < 0.5:
            time.sleep(self._chance.uniform(0, 0.5))
        if self._chance.random() < 0.5:
            daemon.kill()
        trainer.kill()
        if daemon.process.poll() is None:
            daemon.stop()
        return answer

    def _recovered(self) -> tuple[Any, Daemon]:
        daemon = self._daemon(True)
        trainer = self._trainer()
        found = trainer.ask("begin")
        trainer.kill()
        return found, daemon

    def _daemon(self, forked: Any, *, wait: bool = True) -> Daemon:
        daemon = Daemon(self._place, *OPTIONS, forked=forked)
        self._left.callback(daemon.close)
        return daemon.wait_ready() if wait else daemon

    def _trainer(self) -> Trainer:
        made = Trainer(self._place.socket, "job")
        self._left.callback(made.kill)
        return made


def run(rounds: int, number: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how many daemons could not read, how recoveries from them ended, and what
    was lost. `number` is the random seed.
    """
    return run_rounds(
        lambda place, chance, done: Round(place, chance, done).live(), rounds, number, seconds
    )


if __name__ == "__main__":
    main(__doc__, run)
