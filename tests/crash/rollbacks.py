"""Rolls trainers back again and again on the same connection, with slow and failing
callbacks, and looks for what is left behind.

`python -m tests.crash.rollbacks --rounds 20 [--seed N]`. A trainer saves, rolls back
with `recover`, and begins with a new agent, in a random order. Some snapshots are
skipped, and their callbacks sleep, wait for other snapshots, or raise. Every recovered
value is compared bit for bit, no message may come twice, and no call may hang. The
daemon may keep no rank, connection, descriptor or segment of a trainer that has closed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch

from ckptd.agent import Agent, CkptdError, Pending
from ckptd.agent.link.arguments import OnBusy
from ckptd.agent.link.client import Client
from ckptd.shared.errors import NotFound, SnapshotFailed
from ckptd.shared.wire import messages as m
from tests.crash.rounds import main
from tests.support import forks, trainers
from tests.support.daemons import Daemon, Home, holds, home

SIZE = 5_000
SECONDS = 120.0
"""Timeout in seconds for a trainer. It measures nothing."""
OPTIONS = ("--keep-last", "2", "--codec", "raw", "--threads", "1")
ENVIRONMENT = {"CKPTD_STALL_BUDGET": "0.05", "CKPTD_MEMORY_TTL": "1"}
SLOWLY = "persist.created=sleep(0.02)"
KEPT = ("Owner", "Connection", "Slot", "Snapshot")
"""The classes of the daemon whose objects are counted."""


def count_on_signal(file: Path) -> None:
    """Make this process write to `file`, on SIGUSR2, how many objects of each class in
    `KEPT` it has.
    """

    def write(*_: Any) -> None:
        gc.collect()
        found = Counter(
            type(one).__name__
            for one in gc.get_objects()
            if str(type(one).__module__).startswith("ckptd.daemon")
        )
        whole = file.with_suffix(".new")
        whole.write_text(json.dumps({name: found[name] for name in KEPT}))
        whole.rename(file)

    signal.signal(signal.SIGUSR2, write)


def train(socket: Path, seed: int, report: Path) -> None:
    """Do what a random trainer does, and write what it did, or what went wrong, to
    `report`.
    """
    torch.set_num_threads(1)
    logging.disable()
    done, problems = Counter[str](), list[str]()
    heard = hear_twice(problems)
    try:
        Rolled(socket, Random(seed), done, problems).run()
    except BaseException as error:
        problems.append(repr(error))
    report.write_text(json.dumps([done, problems, heard]))


def hear_twice(problems: list[str]) -> Counter[str]:
    """Add to `problems` each message that comes to a client a second time.

    Return the number of messages, by type.
    """
    real, seen, count = Client._got, set[tuple[int, bytes]](), Counter[str]()

    def got(self: Client, message: m.Message) -> None:
        if isinstance(message, m.Progress):
            count[type(message).__name__] += 1
            one = (id(self._channel), msgspec.msgpack.encode(message))
            if one in seen:
                problems.append(f"came twice: {message}")
            seen.add(one)
        real(self, message)

    Client._got = got  # type: ignore[method-assign]
    return count


class Rolled:
    """A trainer that rolls back.

    `_step` is the step of its state, and `_saved` has the steps that are sealed or
    durable.
    """

    def __init__(
        self, socket: Path, chance: Random, done: Counter[str], problems: list[str]
    ) -> None:
        self._socket, self._chance, self._done, self._problems = socket, chance, done, problems
        self._agent = Agent("job", socket=socket)
        self._step = 0
        self._pending: list[Pending] = []
        self._calls: list[Pending] = []

    def run(self) -> None:
        self._recover()
        for _ in range(self._chance.randint(5, 40)):
            self._chance.choice(
                (
                    self._snapshot,
                    self._snapshot,
                    self._wait,
                    self._recover,
                    self._recover,
                    self._begin_again,
                )
            )()
        for pending in self._pending:
            if pending.persist:
                self._end(pending)
        self._close()
        failed = [one for one in self._pending if one.state in ("failed", "skipped")]
        if not holds(lambda: len(self._calls) == len(failed), SECONDS):
            self._problems.append(
                f"{len(failed)} snapshots failed, and {len(self._calls)} callbacks were called"
            )

    def _snapshot(self) -> None:
        self._step += 1
        how: OnBusy = self._chance.choice(("skip", "wait"))
        call = self._chance.choice((self._note, self._sleep, self._wait_for_another, self._raise))
        state, persist = trainers.expected(self._step, SIZE), self._chance.random() < 0.8
        self._pending.append(
            self._agent.snapshot(
                state, step=self._step, persist=persist, on_busy=how, on_failure=call
            )
        )
        self._done["snapshots"] += 1

    def _wait(self) -> None:
        for pending in self._pending[-2:]:
            if pending.persist:
                self._end(pending)

    def _recover(self) -> None:
        """Recover the newest step, or an older one, with which the next attempt begins
        on the same connection.
        """
        state, durable = (
            trainers.blank(SIZE),
            sorted({one.step for one in self._pending if one.state == "durable"}),
        )
        step = self._chance.choice([*durable[-2:-1], None])
        try:
            recovered = self._agent.recover(state, step=step)
        except NotFound:  # retention has deleted it
            return
        self._step = 0
        if recovered is not None:
            assert recovered.step is not None
            trainers.assert_equal(state, recovered.step, SIZE)
            self._step = recovered.step
        self._done["rollbacks"] += 1

    def _close(self) -> None:
        try:
            self._agent.close()
        except SnapshotFailed:
            self._done["agents that saved nothing"] += 1

    def _begin_again(self) -> None:
        self._close()
        self._agent = Agent("job", socket=self._socket)
        self._recover()
        self._done["new agents"] += 1

    @staticmethod
    def _end(pending: Pending) -> None:
        try:
            pending.wait("durable", timeout=SECONDS)
        except CkptdError:
            pass  # it was skipped, or a rollback has begun a new attempt

    def _note(self, pending: Pending) -> None:
        self._calls.append(pending)

    def _sleep(self, pending: Pending) -> None:
        time.sleep(0.05)
        self._calls.append(pending)

    def _wait_for_another(self, pending: Pending) -> None:
        for other in self._pending[-3:]:
            if other is not pending and other.persist:
                self._end(other)
        self._calls.append(pending)

    def _raise(self, pending: Pending) -> None:
        self._calls.append(pending)
        raise ValueError("as a callback may")


def kept(daemon: Daemon, file: Path) -> dict[str, int]:
    """Return how many objects and descriptors the daemon has."""
    file.unlink(missing_ok=True)
    os.kill(daemon.process.pid, signal.SIGUSR2)
    assert holds(file.exists, SECONDS)
    found: dict[str, int] = json.loads(file.read_text())
    return found | {"descriptors": len(os.listdir(f"/proc/{daemon.process.pid}/fd"))}


def more(daemon: Daemon, file: Path, before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what the daemon has more of than before, as pairs of then and now.

    Give it some seconds to let go.
    """
    found: dict[str, tuple[int, int]] = {}

    def none() -> bool:
        now = kept(daemon, file)
        found.clear()
        found.update(
            {name: (count, now[name]) for name, count in before.items() if now[name] > count}
        )
        return not found

    holds(none, 20)
    return found


def run(rounds: int, number: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return what the trainers did, and what went wrong. `number` is the random seed."""
    chance, done, end = Random(number), Counter[str](), time.monotonic() + seconds
    with home() as place:
        file = place.path / "kept"
        daemon = Daemon(
            place,
            *OPTIONS,
            failpoints=SLOWLY,
            environment=ENVIRONMENT,
            forked=partial(count_on_signal, file),
        ).wait_ready()
        try:
            before: dict[str, int] = {}
            for _ in range(rounds):
                if time.monotonic() > end:
                    break
                problems = _round(place, chance.getrandbits(32), done)
                if not before:  # the first trainer has made what a daemon keeps
                    before = kept(daemon, file)
                elif left := more(daemon, file, before):
                    problems.append(f"the daemon has more than after the first trainer: {left}")
                if problems:
                    return done, [
                        f"{problem}\n{place.log_text()[-2000:]}" for problem in problems[:3]
                    ]
        finally:
            daemon.close()
    return done, []


def _round(place: Home, seed: int, done: Counter[str]) -> list[str]:
    report = place.path / "report"
    report.unlink(missing_ok=True)
    trainer = forks.context().Process(target=train, args=(place.socket, seed, report), daemon=True)
    trainer.start()
    trainer.join(SECONDS)
    if trainer.is_alive():
        trainer.kill()
        return [f"seed {seed}: the trainer hangs"]
    if not report.exists():
        return [f"seed {seed}: the trainer ended with {trainer.exitcode}"]
    did, problems, heard = json.loads(report.read_text())
    done.update(did)
    done.update({f"  {name}": count for name, count in heard.items()})
    return [f"seed {seed}: {problem}" for problem in problems]


if __name__ == "__main__":
    main(__doc__, run)
