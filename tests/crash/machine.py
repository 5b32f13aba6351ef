"""Puts a job through any order of events, drawn by Hypothesis: start, snapshot, kill,
power cut, full disk, recovery, forget, pin.

`python -m tests.crash.machine --steps 2000 [--seed N]`. It uses real daemons, real
trainers, SIGKILL, and the ext4 image of `power.py` where one can be mounted. With
`--store`, the root is in an object store, and there is no power cut and no full disk.
After every step: what is recovered must be, bit for bit, what was captured, and as new
as what was promised, and a running daemon must answer. At the end of each example the
job must save again, every checkpoint must verify, and shared memory must be empty.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, ClassVar, TypeVar, cast

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from ckptd.agent import Agent, Checkpoint, CkptdError
from ckptd.daemon.commands import forgetting
from ckptd.shared import names
from ckptd.shared.errors import NotFound
from ckptd.shared.storage.locate import open_root
from tests.crash import places
from tests.crash.images import Image, Unavailable, fill
from tests.crash.oracle import NOTHING, Key, Oracle
from tests.support import forks, trainers
from tests.support.daemons import Daemon
from tests.support.seen_chains import CHAINS, chained

SIZE = 4000
KEEP = 5
"""Chains of several deltas need more than three checkpoints."""
OPTIONS = (
    "--keep-last", str(KEEP), "--codec", "zstd:1", "--threads", "1", "--deltas", "small",
)  # fmt: skip
SECONDS = 120.0

F = TypeVar("F", bound=Callable[..., None])

done: Counter[str] = Counter()
"""Number of steps taken, by name, and that of the checkpoints with chains of deltas."""


def serve(pipe: Connection, socket: Any, environ: Mapping[str, str]) -> None:
    """Run as a trainer that executes the commands that it gets."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    logging.disable()
    agent: Agent | None = None
    pendings: dict[int, Any] = {}
    while True:
        command, *arguments = pipe.recv()
        try:
            if command == "begin":
                agent, recovered = trainers.begin(socket, SIZE)
                answer: Any = (agent.attempt, recovered)
            elif command == "snapshot":
                step, persist = arguments
                assert agent is not None
                pendings[step] = agent.snapshot(
                    trainers.expected(step, SIZE), step=step, persist=persist
                )
                answer = pendings[step].state
            elif command == "wait":
                pending = pendings[arguments[0]]
                pending.wait("durable", timeout=SECONDS)
                answer = pending.state
            else:
                assert agent is not None
                agent.close()
                answer = "closed"
        except CkptdError as error:
            answer = error
        except BaseException as error:
            answer = AssertionError(repr(error))
        pipe.send(answer)


def when(holds: Callable[[Any], bool]) -> Callable[[F], F]:
    """Skip the step unless `holds`.

    Hypothesis's `precondition` does not fit: what is drawn must not depend on when a
    daemon finds its disk full.
    """

    def wrap(function: F) -> F:
        @functools.wraps(function)
        def step(self: Any, **drawn: Any) -> None:
            if holds(self):
                function(self, **drawn)

        return cast(F, step)

    return wrap


def _key(tag: str) -> Key:
    """Return (attempt, step) of a checkpoint's directory.

    This rig uses no tags of its own.
    """
    parsed = names.parse_tag_directory(tag)
    assert parsed is not None
    assert parsed.step is not None
    return parsed.attempt, parsed.step


class Job(RuleBasedStateMachine):
    """A daemon, a trainer and a disk, and the rules for what may happen to them.

    `pinned` holds the tags that were pinned by hand, and `chained` those of the
    checkpoints with chains of deltas that have been there.

    store: the kind of the object store with the root, or None if the root is a
    directory on the disk.
    """

    store: ClassVar[str | None] = None

    @initialize(files_per_rank=st.sampled_from([1, 2]))
    def begin(self, files_per_rank: int) -> None:
        self.held = ExitStack()
        self.place = self.held.enter_context(places.where(self.store)())
        self.options = (*OPTIONS, "--files-per-rank", str(files_per_rank))
        try:
            self.disk: Image | None = Image(32) if self.store is None else None
            if self.disk is not None:
                self.place.root = self.disk.where / "root"
        except Unavailable:
            self.disk = None
        self.daemon: Daemon | None = None
        self.trainer: Any = None
        self.pipe: Any = None
        self.attempt = self.step = 0
        self.persisted: int | None = None
        self.full = False
        self.oracle = Oracle(KEEP)
        self.pinned: set[str] = set()
        self.chained: set[str] = set()
        self.start_daemon()

    def _ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        assert self.pipe.poll(SECONDS), f"{command} takes longer than {SECONDS} s"
        answer = self.pipe.recv()
        if isinstance(answer, AssertionError):
            raise answer
        return answer

    # -- events

    @rule()
    @when(lambda self: self.daemon is None)
    def start_daemon(self) -> None:
        done["start daemon"] += 1
        daemon = Daemon(
            self.place, *self.options, environment={"CKPTD_STALL_BUDGET": "0.5"}, forked=True
        )
        if daemon.reached_ready():
            self.daemon = daemon
        else:
            assert self.full, (
                f"the daemon ended with {daemon.died()}:\n{self.place.log_text()[-3000:]}"
            )
            daemon.close()

    @rule()
    @when(lambda self: self.daemon is not None)
    def kill_daemon(self) -> None:
        done["kill daemon"] += 1
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon = None

    @rule()
    @when(lambda self: self.daemon is not None and not self.full)
    def stop_daemon(self) -> None:
        """Stop the daemon with SIGTERM, as for an upgrade."""
        done["stop daemon"] += 1
        assert self.daemon is not None
        assert self.daemon.stop() == 0
        self.daemon = None

    @rule(count=st.integers(1, 4), persist=st.sampled_from([True, True, False]), wait=st.booleans())
    def train(self, count: int, persist: bool, wait: bool) -> None:
        """Take steps with the trainer, which is started if there is none.

        The daemon may be gone meanwhile.
        """
        if self.trainer is None:
            if self.daemon is None:
                self.start_daemon()
            if self.daemon is None or not self.start_trainer():
                return
        for _ in range(count):
            self.snapshot(persist)
        if wait and self.daemon is not None and self.persisted is not None:
            self.wait()

    def start_trainer(self) -> bool:
        done["start trainer"] += 1
        self.pipe, theirs = forks.context().Pipe()
        self.trainer = forks.context().Process(
            target=serve, args=(theirs, self.place.socket, self.place.environ), daemon=True
        )
        self.trainer.start()
        theirs.close()
        answer = self._ask("begin")
        if isinstance(answer, CkptdError):
            assert self.full, answer
            self._end_trainer()
            return False
        attempt, recovered = answer
        assert attempt > self.attempt, "an attempt was given out twice"
        owed = self.oracle.owed
        assert (recovered or NOTHING) >= owed, f"{recovered} was recovered, and {owed} was promised"
        assert recovered not in self.oracle.forgotten, (
            f"{recovered} was recovered, and was forgotten"
        )
        self.attempt, self.step, self.persisted = attempt, 0, None
        return True

    def snapshot(self, persist: bool) -> None:
        done["snapshot"] += 1
        self.step += 1
        state = self._ask("snapshot", self.step, persist)
        if state in ("sealed", "durable"):
            self.oracle.sealed((self.attempt, self.step))
            self.persisted = self.step if persist else None

    def wait(self) -> None:
        done["wait"] += 1
        answer = self._ask("wait", self.persisted)
        if answer == "durable":
            assert self.persisted is not None
            self.oracle.durable((self.attempt, self.persisted))
        else:
            assert isinstance(answer, CkptdError)
            assert self.full or answer.code not in ("integrity", "internal"), answer
        self.persisted = None

    @rule()
    @when(lambda self: self.trainer is not None)
    def kill_trainer(self) -> None:
        done["kill trainer"] += 1
        self._end_trainer()

    def _end_trainer(self) -> None:
        self.trainer.kill()
        self.trainer.join()
        self.pipe.close()
        self.trainer = None

    @rule(which=st.integers(0, 2))
    @when(lambda self: self.attempt > 0 and not self.full)
    def forget(self, which: int) -> None:
        """Delete a checkpoint through the daemon, or, if no daemon runs, without one."""
        done["forget"] += 1
        for tag in self._tags()[which : which + 1]:
            socket = self.place.socket if self.daemon else None
            try:
                deletion = forgetting.planned(self.place.root / trainers.JOB / tag, [])
                deletion.run(socket)
                (row,) = deletion.rows
            except NotFound:
                return  # the daemon has retired the checkpoint since it was listed
            # The first: retention has deleted it meanwhile.
            excused = ("there is no checkpoint", "in the memory of a running trainer")
            assert row["deleted"] == (tag not in self.pinned) or any(
                words in row["error"] for words in excused
            ), row
            if row["deleted"]:
                self.oracle.forget(_key(tag), [_key(left) for left in self._tags()])

    @rule(which=st.integers(0, 2), remove=st.booleans())
    @when(lambda self: self.attempt > 0)
    def pin(self, which: int, remove: bool) -> None:
        done["pin"] += 1
        for tag in self._tags()[which : which + 1]:
            try:
                forgetting.pin(self.place.root / trainers.JOB / tag, remove=remove)
            except (NotFound, OSError):
                return  # the checkpoint was retired meanwhile, or the disk is full
            (self.pinned.discard if remove else self.pinned.add)(tag)
            self.oracle.pin(_key(tag), remove=remove)

    def _tags(self) -> list[str]:
        """Return the tags of all committed checkpoints, the highest steps first."""
        storage = open_root(self.place.root)
        return [
            tag
            for tag in reversed(storage.tags(trainers.JOB))
            if storage.has_manifest(trainers.JOB, tag)
        ]

    @rule(flushed=st.sampled_from([1, 2]))
    @when(lambda self: self.disk is not None)
    def cut_power(self, flushed: int) -> None:
        done["cut power"] += 1
        assert self.disk is not None
        self.disk.stop(flushed)
        if self.trainer is not None:
            self._end_trainer()
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon = None
        shutil.rmtree(self.place.segments, ignore_errors=True)
        self.disk.again()
        self.oracle.cut_power()
        self.full = (self.disk.where / "hog").exists()

    @rule()
    @when(lambda self: self.disk is not None and not self.full)
    def fill_disk(self) -> None:
        done["fill disk"] += 1
        assert self.disk is not None
        with (self.disk.where / "hog").open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                fill(file, size)
        self.full = True

    @rule()
    @when(lambda self: self.full)
    def free_disk(self) -> None:
        done["free disk"] += 1
        assert self.disk is not None
        (self.disk.where / "hog").unlink()
        self.full = False

    # -- what must hold

    @invariant()
    def answers(self) -> None:
        daemon = getattr(self, "daemon", None)
        if daemon is None:
            return
        if daemon.process.poll() is not None:
            assert self.full, (
                f"the daemon has ended with {daemon.died()}:\n{self.place.log_text()[-3000:]}"
            )
            daemon.close()
            self.daemon = None
            return
        assert daemon.status()["ready"]
        self.chained |= chained(self.place.root)

    def teardown(self) -> None:
        if not hasattr(self, "place"):
            return
        done[CHAINS] += len(self.chained)
        try:
            if sys.exc_info()[0] is None:
                self._end()
        finally:
            if self.trainer is not None:
                self._end_trainer()
            if self.daemon is not None:
                self.daemon.close()
            self.held.close()
            if self.disk is not None:
                self.disk.close()

    def _end(self) -> None:
        """Check that everything that was promised is there, and that the job can save
        again.
        """
        if self.full:
            self.free_disk()
        if self.trainer is not None:
            self.kill_trainer()
        if self.daemon is None:
            self.start_daemon()
        self.start_trainer()
        until = time.monotonic() + SECONDS
        while self._ask("snapshot", self.step + 1, True) not in ("sealed", "durable"):
            self.step += 1
            assert time.monotonic() < until, "no snapshot is taken any more"
        assert self._ask("wait", self.step + 1) == "durable"
        assert self._ask("close") == "closed"
        self._end_trainer()
        assert self.place.segment_files() == []
        assert self.pinned <= set(self._tags()), (
            f"{self.pinned} were pinned, and {self._tags()} are there"
        )
        for tag in self._tags():
            try:
                opened = Checkpoint.open(str(self.place.root / trainers.JOB), tag)
            except NotFound:
                continue  # the daemon has retired the checkpoint since it was listed
            with opened as checkpoint:
                assert checkpoint.step is not None
                trainers.assert_equal(checkpoint.load(), checkpoint.step, SIZE)


def run(steps: int, number: int, of_a_life: int = 100) -> tuple[Counter[str], str]:
    """Return the number of steps taken, by name, that of checkpoints with chains, and
    the first example that broke a
    promise, as Hypothesis prints it, or "".
    """
    done.clear()
    chosen = settings(
        max_examples=max(1, steps // of_a_life), stateful_step_count=of_a_life, deadline=None,
        database=None, print_blob=False, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip
    try:
        run_state_machine_as_test(seed(number)(Job), settings=chosen)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        causes = (error, *getattr(error, "exceptions", ()))
        return done, "\n".join(
            [
                *(f"{type(cause).__name__}: {cause}" for cause in causes),
                *getattr(error, "__notes__", []),
            ]
        )
    return done, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    places.add_option(parser)
    options = parser.parse_args()
    Job.store = options.store
    taken, problem = run(options.steps, options.seed)
    for name, count in taken.most_common():
        print(f"{name:16} {count}")
    print(problem)
    print(f"{taken.total() - taken[CHAINS]} steps, seed {options.seed}, {int(bool(problem))} lost")
    sys.exit(bool(problem))


if __name__ == "__main__":
    main()
