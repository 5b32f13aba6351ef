"""Cuts power on a simulated disk: starts a daemon on every state that a power cut may
leave of a job's operations.

`python -m tests.crash.states --states 20000 [--seed N]`. A daemon is killed at a random
operation, and the next one recovers from the page cache and continues, while changes
that are not synced stay pending. Each state is that of a random moment in the life of a
random daemon. After a recovery from it, everything that was acknowledged before that
moment must be there, bit for bit. `newest` must name the newest checkpoint, no file may
be left over, and no attempt may be claimed twice.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

from ckptd.agent import Agent, Checkpoint, CkptdError
from ckptd.daemon.composition import Components
from ckptd.daemon.config import Config
from ckptd.daemon.journal import file as journal_file
from ckptd.daemon.process.app import App
from ckptd.shared import names
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import machine
from tests.crash.disk import FATES, Disk, Recorder, Step, Tree, lay, some_fate
from tests.support.daemons import recover_only
from tests.support.seen_chains import SEVERAL
from tests.support.trainers import JOB, assert_equal, blank, expected

SIZE = 300
"""Number of elements of the largest tensor. It is small, because the states are laid
out thousands of times.
"""
KEEP = 5
"""Chains of several deltas need more than three checkpoints."""
JOURNAL = 16 << 10
"""Size of a journal file in bytes. It is small, so that there are several files."""


def config(place: Path, shm: Path, files_per_rank: int = 1) -> Config:
    return Config(
        root=place / "root", state_dir=place / "state", socket=place / "s", shm_dir=shm,
        shm_quota=1 << 30, codec="auto", keep_last=KEEP, threads=1, memory_ttl=0.0,
        stall_budget=0.5, chunk_size=64 << 10, strict_journal=True, files_per_rank=files_per_rank,
        deltas="small",
    )  # fmt: skip


@contextmanager
def directory() -> Iterator[Path]:
    """Context manager. Yields a directory in memory, because the disk is simulated."""
    where = Path(tempfile.mkdtemp(prefix="ckptd-states-", dir="/dev/shm"))
    try:
        yield where
    finally:
        shutil.rmtree(where, ignore_errors=True)


@contextmanager
def simulated() -> Iterator[None]:
    """Make journal files small.

    Let every root count as the same path, as if the disk were mounted in one place in
    all lives.
    """
    with (
        mock.patch.object(journal_file, "FILE_SIZE", JOURNAL),
        mock.patch.object(machine, "root_digest", return_value="0" * 16),
    ):
        yield


@dataclass(slots=True)
class Life:
    """What a daemon did from its first operation to its last, and the disk on which it
    began. `notes` has the promises, each with the number of the step before it.
    """

    before: Disk
    steps: list[Step]
    notes: list[tuple[int, tuple[str, Any]]]
    promised: Promises


@dataclass(slots=True)
class Promises:
    """The promises that hold at a moment.

    durable: maps (attempt, step) of each acknowledged checkpoint to its tag. attempt:
    the highest attempt that was claimed.
    """

    durable: dict[tuple[int, int], str | None] = field(default_factory=dict)
    attempt: int = 0

    def with_notes(self, notes: list[tuple[int, tuple[str, Any]]], moment: int) -> Promises:
        made = Promises(dict(self.durable), self.attempt)
        for at, (what, value) in notes:
            if at > moment:
                break
            if what == "attempt":
                made.attempt = max(made.attempt, value)
            else:
                made.durable[value[:2]] = value[2]
        return made


def train(
    socket: Path, note: Callable[[str, Any], None], chance: Random, alive: Callable[[], bool]
) -> None:
    """Run a trainer until the daemon dies."""
    agent = None
    try:
        agent = Agent(JOB, socket=socket)
        note("attempt", agent.attempt)
        state = blank(SIZE)
        recovered = agent.recover(state)
        first = 1 if recovered is None or recovered.step is None else recovered.step + 1
        if recovered is not None and recovered.step is not None:
            assert_equal(state, recovered.step, SIZE)
        for step in range(first, first + 6):
            tag = f"mine-{agent.attempt}-{step}" if chance.random() < 0.2 else None
            pending = agent.snapshot(expected(step, SIZE), step=step, tag=tag)
            while pending.state == "sealed" and alive():
                time.sleep(0.0005)
            pending.wait("durable", timeout=0)
            note("durable", (pending.attempt, step, tag))
        if chance.random() < 0.5:
            agent.close(timeout=5)
    except (CkptdError, TimeoutError):
        pass  # the daemon has died of an injected error
    finally:
        if agent is not None:
            agent._link.client.close()
            agent._link.handovers.slots.drop()


async def live(place: Path, recorder: Recorder, chance: Random) -> None:
    """Run a daemon and a trainer in this process."""
    with directory() as shm:
        app = App(config(place, shm, chance.choice((1, 3))), fs=recorder)
        daemon = asyncio.create_task(app.run())
        while not app.ready and not daemon.done():
            await asyncio.sleep(0.001)
        if not daemon.done():
            await asyncio.to_thread(
                train, place / "s", recorder.note, chance, lambda: not daemon.done()
            )
            app._stop.set()
        try:
            await daemon
        except CkptdError:
            pass


def a_life(
    before: Disk,
    promised: Promises,
    chance: Random,
    fault: Callable[[Step], None] = lambda step: None,
) -> Life:
    with directory() as place, simulated():
        recorder = Recorder(place, before, fault)
        asyncio.run(live(place, recorder, chance))
        return Life(before, recorder.steps, recorder.notes, promised)


def lives(chance: Random, count: int) -> Iterator[Life]:
    """Yield lives of daemons.

    Each begins where the one before was killed. Some meet a full disk, and some a call
    that fails.
    """
    disk, promised = Disk(), Promises()
    for number in range(count):
        faults = (lambda step: None, full(chance), failing(chance))
        life = a_life(disk.copy(), promised, chance, faults[number % 3])
        yield life
        moment = a_moment(life.steps, chance)
        for step in life.steps[:moment]:
            disk.do(step)
        promised = promised.with_notes(life.notes, moment)


def a_moment(steps: list[Step], chance: Random) -> int:
    """Return a random number of operations after which the daemon is killed, often just
    before a directory is synced.
    """
    unsafe = [number for number, step in enumerate(steps) if step.kind == "sync directory"]
    return (
        chance.choice(unsafe)
        if unsafe and chance.random() < 0.5
        else chance.randrange(len(steps) + 1)
    )


def full(chance: Random) -> Callable[[Step], None]:
    """Return a fault: from the n-th new file on, the disk is full."""
    countdown = chance.choice([0, 0, 1, chance.randrange(30)])

    def fault(step: Step) -> None:
        nonlocal countdown
        if step.kind in ("create", "allocate"):
            countdown -= 1
            if countdown < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fault


def failing(chance: Random) -> Callable[[Step], None]:
    """Return a fault: the n-th call of one kind fails."""
    kind, countdown = (
        chance.choice(
            ["write", "sync", "sync directory", "rename", "create", "allocate", "unlink"]
        ),
        chance.randrange(12),
    )
    number = chance.choice([errno.EIO, errno.ENOSPC])

    def fault(step: Step) -> None:
        nonlocal countdown
        if step.kind == kind:
            countdown -= 1
            if countdown == -1:
                raise OSError(number, os.strerror(number))

    return fault


class Examiner:
    """Starts a daemon on what a power cut has left, and checks that every promise was
    kept.

    chained: the number of states with a chain of several deltas.
    """

    def __init__(self) -> None:
        self._sound: set[bytes] = set()
        self.chained = 0

    async def examine(self, tree: Tree, promised: Promises) -> str:
        """Return what is wrong, or "" if nothing is."""
        with directory() as place, directory() as shm:
            lay(tree, place)
            try:
                return self._check(place, await recover_only(config(place, shm)), promised)
            except (CkptdError, AssertionError, OSError) as error:
                return f"{type(error).__name__}: {error}"

    def _check(self, place: Path, parts: Components, promised: Promises) -> str:
        storage, root = open_root(place / "root"), place / "root"
        found, chained = {}, False
        for tag in storage.tags(JOB):
            files = sorted(storage.files(JOB, tag))
            if names.MANIFEST not in files:
                return f"{tag} is not committed and holds {files}"
            manifest = storage.read_manifest(JOB, tag)
            wanted = {part.file: part.files for part in manifest.parts}
            if Counter(names.part_of(file) or file for file in files) != {
                names.MANIFEST: 1,
                **wanted,
            }:
                return f"{tag} holds {files}"
            chained |= max(part.chain for part in manifest.parts) >= SEVERAL
            self._check_content(root, tag, files)
            found[manifest.attempt, manifest.step] = tag
        self.chained += chained
        for key in promised.durable:
            newer = sum(other > key for other in found)
            if key not in found and (promised.durable[key] is not None or newer < KEEP):
                return (
                    f"attempt {key[0]} step {key[1]} was durable and is gone; there are "
                    f"{sorted(found)}"
                )
        newest = storage.read_newest(JOB)
        if found and newest != found[max(found)]:
            return f"newest says {newest}; there are {sorted(found.values())}"
        given = max(storage.newest_attempt(JOB), parts.catalog.job(JOB).attempt)
        if given < promised.attempt:
            return (
                f"attempt {promised.attempt} was given out and is not known any more; the highest "
                f"is {given}"
            )
        return ""

    def _check_content(self, root: Path, tag: str, files: list[str]) -> None:
        digest = hashlib.sha256(
            b"".join((root / JOB / tag / file).read_bytes() for file in files)
        ).digest()
        if digest not in self._sound:
            with Checkpoint.open(root / JOB, tag) as checkpoint:
                checkpoint.verify()
                assert checkpoint.step is not None
                assert_equal(checkpoint.load(), checkpoint.step, SIZE)
            self._sound.add(digest)


OF_A_LIFE, LIVES = 40, 6
"""Number of states of each life, and number of lives on one disk."""


def run(
    states: int, seed: int, seconds: float = float("inf"), most: int = 20
) -> tuple[int, list[str], int]:
    """Return how many different states were examined, what was wrong, and how many of
    the states had chains of deltas.

    Ends after `most` problems.
    """
    chance, examiner, seen, problems = Random(seed), Examiner(), set[bytes](), list[str]()
    end = time.monotonic() + seconds
    while True:
        for life in lives(chance, LIVES):
            with simulated(), asyncio.Runner() as runner:
                for _ in range(OF_A_LIFE):
                    moment = chance.randrange(len(life.steps) + 1)
                    disk, fate = after(life, moment), some_fate(chance)
                    tree = disk.after_cut(fate)
                    key = digest(tree)
                    if key not in seen:
                        seen.add(key)
                        problem = runner.run(
                            examiner.examine(tree, life.promised.with_notes(life.notes, moment))
                        )
                        if problem:
                            fates = ", ".join(
                                f"{step} {FATES[fate(step)[0]]}" for step in disk.pending()
                            )
                            problems.append(
                                f"seed {seed}, after {moment} of {len(life.steps)} operations "
                                f"({fates}): {problem}"
                            )
                    if len(seen) >= states or len(problems) >= most or time.monotonic() > end:
                        return len(seen), problems, examiner.chained


def digest(tree: Tree) -> bytes:
    whole = hashlib.blake2b()
    for name, (_, content) in tree.items():
        whole.update(b"%s %d " % (name.encode(), len(content)))
        whole.update(content if isinstance(content, bytes) else digest(content))
    return whole.digest()


def after(life: Life, moment: int) -> Disk:
    disk = life.before.copy()
    for step in life.steps[:moment]:
        disk.do(step)
    return disk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--most", type=int, default=20, help="problems")
    options = parser.parse_args()
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    torch.set_num_threads(1)
    count, problems, chains = run(options.states, seed, most=options.most)
    for problem in problems:
        print(problem)
    print(f"{count} states, {chains} with chains, seed {seed}, {len(problems)} lost")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
