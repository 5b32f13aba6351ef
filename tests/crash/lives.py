"""Kills at every pair of failpoints: the second death comes while the remains of the
first are recovered, or after that.

`python -m tests.crash.lives --deaths 3026 [--seed N]`, or `--pairs 1/2`, which tries
one half of all pairs until each has happened. The root is a directory or, with
`--store`, in an object store: SeaweedFS, or rclone with its objects in a directory or
in memory.

Daemons and trainers follow one another on one root and one shared memory, in an order
in which each point comes once after each other point. Often the trainer outlives its
daemon and continues with the next one. Each recovery is compared bit for bit, and must
be as new as what was promised before it. Every manifest that is found must be sound.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from ckptd.agent import Checkpoint, CkptdError
from ckptd.shared import names
from ckptd.shared.location import Location
from ckptd.shared.storage import object_leases
from ckptd.shared.storage.locate import open_root, tags_of
from ckptd.shared.system import failpoints
from tests.crash import places
from tests.crash.places import Where
from tests.support import forks, trainers
from tests.support.daemons import Daemon, Home, home, running
from tests.support.seen_chains import chained

SIZE = 4000
STEPS = 4
OPTIONS = (
    "--keep-last", "6", "--codec", "zstd:1", "--threads", "1", "--files-per-rank", "2",
    "--deltas", "small",
)  # fmt: skip
BUDGET = {"CKPTD_STALL_BUDGET": "1"}
ANY = "any moment"
SECONDS = 60.0
GAVE_UP = 3


def train(
    socket: Path,
    diary: trainers.Diary,
    armed: str,
    linger: bool = True,
    environ: Mapping[str, str] | None = None,
) -> None:
    os.environ.update(environ or {})
    torch.set_num_threads(1)
    logging.disable()
    try:
        trainers.train(socket, diary, 1, STEPS, armed, SIZE, wait_every=1, linger=linger)
    except CkptdError as error:
        diary.path.with_name("gave up").write_text(f"{error.code}: {error}")
        sys.exit(GAVE_UP)  # a trainer may end with an error when its daemon dies
    except BaseException:
        diary.path.with_name("wrong").write_text(traceback.format_exc())
        raise


class Lives:
    """Runs daemons and trainers that die.

    `hit` counts deaths by point, `pairs` has the points that were hit one after the
    other, `chained` the checkpoints with chains of deltas that a death has left, and
    `problems` lists what was lost.
    """

    def __init__(
        self, place: Home, seed: int, promises: tuple[str, ...] = ("sealed", "durable")
    ) -> None:
        """promises: the words in the diary whose steps the next recovery must not lose."""
        self.problems: list[str] = []
        self.hit: Counter[str] = Counter()
        self.pairs: set[tuple[str, str]] = set()
        self.chained: set[str] = set()
        self.chance = Random(seed)
        self._place, self._promises = place, promises
        self._diary = trainers.Diary(place.path / "diary")
        self._trainer: Any = None
        self._begun = 0
        self._before = ""

    def live(self, point: str, nth: int = 1) -> None:
        """Recover, save, and die at this point when it is reached for the n-th time.

        If it is never reached, die at a random moment.
        """
        deadly = f"{point}=kill@{nth}"
        daemon = Daemon(
            self._place,
            *OPTIONS,
            failpoints=deadly if point in failpoints.DAEMON else "",
            environment=BUDGET,
            forked=True,
        )
        try:
            if daemon.reached_ready():
                self._work(daemon, point, deadly if point in failpoints.AGENT else "")
            else:
                daemon.died()
            code = daemon.process.poll()
            if code is not None and (code != -signal.SIGKILL or point not in failpoints.DAEMON):
                self.problems.append(
                    f"at {point}: the daemon ended with {code}: {self._place.log_text()[-2000:]}"
                )
            reached = code is not None if point in failpoints.DAEMON else self._killed()
            wrong = self._place.path / "wrong"
            if wrong.exists():
                self.problems.append(f"at {point}: {wrong.read_text()}")
            self.hit[point if reached else ANY] += 1
            if reached and self._before:
                self.pairs.add((self._before, point))
            self._before = point if reached else ""
            self.cut()
        finally:
            daemon.close()
        if self._trainer is not None and not self.outlives():
            self.end_trainer()
        self.mend()
        self._look(point)

    def _work(self, daemon: Daemon, point: str, armed: str) -> None:
        # Its last steps may have been skipped between two daemons.
        if self._trainer is not None and (armed or self._finished()):
            self.end_trainer()
        if self._trainer is None:
            self._trainer = self._begin(armed)
        until = time.monotonic() + (self.chance.uniform(0, 1) if point == ANY else SECONDS)
        while daemon.process.poll() is None and self._trainer.is_alive() and not self._finished():
            if time.monotonic() > until:
                if point != ANY:
                    self.problems.append(
                        f"at {point}: neither the end nor a death within {SECONDS:.0f} s"
                    )
                break
            time.sleep(0.001)
        if not self._trainer.is_alive() and not (armed and self._killed()) and not _ends(daemon):
            gave_up = self._place.path / "gave up"
            why = (
                gave_up.read_text()
                if self._trainer.exitcode == GAVE_UP and gave_up.exists()
                else ""
            )
            self.problems.append(
                f"at {point}: the trainer ended with {self._trainer.exitcode}, and its daemon "
                f"lives; {why}"
            )

    def _begin(self, armed: str, linger: bool = True) -> Any:
        """Start a trainer."""
        self._begun = len(self._diary.read())
        arguments = self._place.socket, self._diary, armed, linger, self._place.environ
        trainer = forks.context().Process(target=train, args=arguments, daemon=True)
        trainer.start()
        return trainer

    def _killed(self) -> bool:
        return self._trainer is not None and self._trainer.exitcode == -signal.SIGKILL

    def _finished(self) -> bool:
        """Return True if this trainer has taken all its steps."""
        return any(word == "finished" for word, _ in self._diary.read()[self._begun :])

    def rest(self) -> None:
        """Run one trainer without deaths: every step is saved, and nothing is left in
        memory.
        """
        if self._trainer is not None:
            self.end_trainer()
        if self.problems:
            return
        with running(self._place, *OPTIONS) as daemon:
            self._begin("", linger=False).join()
            words = Counter(word for word, _ in self._diary.read()[self._begun :])
            if words["durable"] < STEPS or self._place.segment_files():
                self.problems.append(
                    f"without faults: {words}, {self._place.segment_files()}: "
                    f"{self._place.log_text()[-2000:]}"
                )
            if daemon.stop():
                self.problems.append("without faults: the daemon did not end well")
        self._look("the end")

    def end_trainer(self) -> None:
        self._trainer.kill()
        self._trainer.join()
        self._trainer = None

    # -- what else happens, for subclasses to override

    def cut(self) -> None:
        """Called at the moment of the death."""

    def outlives(self) -> bool:
        """Return True if the trainer shall continue with the next daemon."""
        notes = self._diary.read()[self._begun :]
        at_work = any(word == "sealed" for word, _ in notes) and not self._finished()
        return at_work and self._trainer.is_alive() and self.chance.random() < 0.5

    def mend(self) -> None:
        """Called once every process that had to die is dead."""

    # -- what must hold

    def _look(self, point: str) -> None:
        """Check that each recovery was as new as what had been promised before it, and
        that every manifest is sound.
        """
        promised, durable = (0, -1), self._diary.newest("durable")
        for word, key in self._diary.read():
            if word == "recovered" and key < promised:
                self.problems.append(
                    f"at {point}: {key} was recovered, and {promised} was promised"
                )
            promised = max(promised, key) if word in self._promises else promised
        # No daemon runs that could renew a mark of its deletion.
        with mock.patch.object(object_leases, "SECONDS", 0.5):
            found, problems = examine(self._place.root, SIZE)
        self.problems += [f"at {point}: {problem}" for problem in problems]
        self.chained |= chained(self._place.root)
        if found < durable:
            self.problems.append(
                f"at {point}: {durable} was durable, and the newest there is {found}"
            )


def examine(root: Location, size: int) -> tuple[tuple[int, int], list[str]]:
    """Return (attempt, step) of the newest checkpoint, or (0, -1) if there is none, and
    a problem for each unsound one.
    """
    newest, problems = (0, -1), []
    repository = open_root(root)
    for tag in sorted(tags_of(repository, trainers.JOB)):
        if names.MANIFEST not in repository.files(trainers.JOB, tag):
            continue
        try:
            with Checkpoint.open(str(root / trainers.JOB), tag) as checkpoint:
                assert checkpoint.step is not None
                trainers.assert_equal(checkpoint.load(), checkpoint.step, size)
                newest = max(newest, (checkpoint.attempt, checkpoint.step))
        except Exception as error:
            problems.append(f"{tag}: {error!r}")
    return newest, problems


def _ends(daemon: Daemon) -> bool:
    """Return True if the daemon has ended, or ends within 5 s.

    The trainer may be seen to end first.
    """
    try:
        daemon.died(5)
    except subprocess.TimeoutExpired:
        return False
    return True


def each_after_each(points: Sequence[str]) -> Iterator[str]:
    """Yield a shortest cycle in which every point follows every point, including
    itself: a de Bruijn sequence of order 2.
    """
    for number, one in enumerate(points):
        yield one
        for other in points[number + 1 :]:
            yield one
            yield other
    yield points[0]


def rounds(points: Sequence[str], chance: Random) -> Iterator[tuple[str, int]]:
    """Yield points, and the pass at which each kills.

    At the first pass, a save has no bases yet. From the second or third on, it has.
    """
    while True:
        for point in each_after_each(chance.sample(points, len(points))):
            yield point, chance.choice([1, 1, 2, 3])


def run(deaths: int, seed: int, seconds: float = float("inf"), where: Where = home) -> Lives:
    end = time.monotonic() + seconds
    with where() as place:
        lives = Lives(place, seed)
        for point, nth in islice(
            rounds((*failpoints.AGENT, *failpoints.DAEMON), lives.chance), deaths
        ):
            if time.monotonic() > end or lives.problems:
                break
            lives.live(point, nth)
        lives.rest()
        return lives


class Deaths(Lives):
    """Like `Lives`, but no trainer continues with another daemon, so that each point is
    reached each time.
    """

    def outlives(self) -> bool:
        return False


def run_pairs(
    seed: int, part: int, parts: int, where: Where = home
) -> tuple[Lives, set[tuple[str, str]]]:
    """Hit every point after every point, or one part of these pairs.

    Return the pairs that did not happen even after retries.
    """
    with where() as place:
        lives = Deaths(place, seed)
        order = list(each_after_each((*failpoints.AGENT, *failpoints.DAEMON)))
        piece = order[len(order) * (part - 1) // parts : len(order) * part // parts + 1]
        wanted, todo = set(pairwise(piece)), piece
        for _ in range(4):
            for point in todo:
                if not lives.problems:
                    lives.live(point)
            todo = [point for pair in sorted(wanted - lives.pairs) for point in pair]
        lives.rest()
        return lives, wanted - lives.pairs


def report(lives: Lives, what: str, seed: int) -> int:
    """Print the result. Return the exit code."""
    for point, count in sorted(lives.hit.items()):
        print(f"{point:24} {count}")
    print(*lives.problems, sep="\n")
    tried = f"{lives.hit.total()} {what} at {len(lives.hit)} points, {len(lives.pairs)} pairs"
    tried += f", {len(lives.chained)} checkpoints with chains"
    print(f"{tried}, seed {seed}, {len(lives.problems)} lost")
    return int(bool(lives.problems))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument(
        "--pairs", metavar="K/N", help="every point after every point: the K-th of N parts"
    )
    places.add_option(parser)
    options = parser.parse_args()
    if options.pairs:
        part, _, parts = options.pairs.partition("/")
        lives, missing = run_pairs(
            options.seed, int(part), int(parts or 1), places.where(options.store)
        )
        if not lives.problems:
            print(
                *(f"never came about: {one}, then {other}" for one, other in sorted(missing)),
                sep="\n",
            )
        sys.exit(report(lives, "deaths", options.seed) or bool(missing))
    sys.exit(
        report(
            run(options.deaths, options.seed, where=places.where(options.store)),
            "deaths",
            options.seed,
        )
    )


if __name__ == "__main__":
    main()
