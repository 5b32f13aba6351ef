"""Tests the fsync-gate on a real ext4: a disk accepts writes, loses them, reports this
at the next fsync, and then reports success.

`python -m tests.crash.gate --rounds 20 [--seed N]`; needs root. Everything that a
daemon has acknowledged must be there, bit for bit, after the page cache has been
dropped. A program that syncs the same file a second time gets a false success
(https://wiki.postgresql.org/wiki/Fsync_Errors). While the disk starves, a snapshot may
only fail, or the daemon may end. After the disk has been fed, work continues.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from contextlib import closing
from random import Random

from ckptd.agent import Agent, CkptdError, Pending
from ckptd.shared.system.fs import PosixFileSystem
from tests.crash.images import ThinImage
from tests.crash.lives import examine
from tests.crash.rounds import main
from tests.support import trainers
from tests.support.daemons import Daemon, Home, home

SIZE = 200_000
STEPS = 4
OPTIONS = ("--keep-last", "3", "--codec", "raw", "--threads", "1")
BUDGET = {"CKPTD_STALL_BUDGET": "5"}


def buffered() -> None:
    """Disable O_DIRECT, as on a file system without it, so that parts go through the
    page cache.
    """
    create = PosixFileSystem.create
    PosixFileSystem.create = lambda *arguments, direct=False, **options: create(  # type: ignore[method-assign]
        *arguments, **options
    )


class Gate:
    """Runs daemons whose disk starves now and then.

    `ends` counts how the snapshots ended.
    """

    def __init__(self, place: Home, disk: ThinImage, seed: int) -> None:
        self.problems: list[str] = []
        self.ends: Counter[str] = Counter()
        self._place, self._disk, self._chance = place, disk, Random(seed)
        place.root = disk.where / "root"
        self._durable = (0, -1)

    def live(self) -> None:
        daemon = self._daemon()
        try:
            agent, recovered = trainers.begin(self._place.socket, SIZE)
            if (recovered or (0, -1)) < self._durable:
                self.problems.append(f"{recovered} was recovered, and {self._durable} was durable")
            for step in range(1, STEPS + 1):
                daemon = self._save(agent, daemon, step)
        finally:
            self._disk.feed()
            daemon.close()
        agent._link.client.close()
        shutil.rmtree(self._place.segments, ignore_errors=True)
        self._disk.again()
        self._look()

    def _daemon(self) -> Daemon:
        return Daemon(self._place, *OPTIONS, environment=BUDGET, forked=buffered).wait_ready()

    def _save(self, agent: Agent, daemon: Daemon, step: int) -> Daemon:
        """Save one snapshot on a disk that may starve before or during the save.

        Return the daemon that runs afterwards.
        """
        starved = self._chance.random() < 0.6
        if starved and self._chance.random() < 0.5:
            self._disk.starve()
        pending = agent.snapshot(trainers.expected(step, SIZE), step=step)
        if starved:
            time.sleep(self._chance.uniform(0, 0.02))
            self._disk.starve()
        while (
            pending.state not in ("durable", "failed", "skipped") and daemon.process.poll() is None
        ):
            time.sleep(0.001)
        if daemon.process.poll() is None:
            self.ends[pending.state] += 1
            if pending.state == "durable":
                self._durable = (pending.attempt, step)
            elif not starved:
                self.problems.append(
                    f"step {step} is {pending.state}, and the disk is well: {self._why(pending)}"
                )
        else:
            self.ends["the daemon ended"] += 1
            if not starved:
                self.problems.append(
                    f"the daemon ended, and the disk is well: {self._place.log_text()[-2000:]}"
                )
        time.sleep(0.05)  # writes after the acknowledgement may hit the starved disk as well
        ended = daemon.process.poll() is not None
        self._disk.feed()
        if ended or daemon.process.poll() is not None:
            daemon.close()
            daemon = self._daemon()
            if pending.state != "failed":
                pending.wait("durable", timeout=60)
                self._durable = (pending.attempt, step)
        return daemon

    def _why(self, pending: Pending) -> str:
        try:
            pending.wait("durable", timeout=0)
        except (CkptdError, TimeoutError) as error:
            return str(error)
        return ""

    def _look(self) -> None:
        """Check that everything acknowledged is there, now that nothing comes from the
        page cache.
        """
        found, problems = examine(self._place.root, SIZE)
        self.problems += problems
        if found < self._durable:
            self.problems.append(f"{self._durable} was durable, and the newest there is {found}")


def run(rounds: int, seed: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how the snapshots ended, four in each round, and what was lost.

    Raises Unavailable.
    """
    end = time.monotonic() + seconds
    with home() as place, closing(ThinImage()) as disk:
        gate = Gate(place, disk, seed)
        for _ in range(rounds):
            if time.monotonic() > end or gate.problems:
                break
            gate.live()
        if gate.ends.total() >= 80 and not gate.ends["failed"] + gate.ends["the daemon ended"]:
            gate.problems.append("the disk never starved")
        return gate.ends, gate.problems


if __name__ == "__main__":
    main(__doc__, run)
