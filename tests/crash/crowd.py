"""Kills trainers at random microseconds in a crowd: 2 to 50 jobs share one daemon, and
the healthy ones must not notice.

`python -m tests.crash.crowd --count 200 [--seed N] [--minutes M]`. Half of the jobs are
healthy: they save step after step, some steps in memory only and some durably. Now and
then they compare the newest snapshot in memory bit for bit. The trainers of the other
jobs, the victims, are killed in every phase of their lives, half of them while the
daemon makes their slots. Some victims get slots of up to 256 MB, so that making them
takes a while. When all trainers are gone, every acknowledged snapshot must be there,
and the daemon must have as many descriptors and segments as after its start.

`--audit 2000` kills 2000 victims. Whenever all trainers are gone, it prints the
daemon's descriptors, segments, resident memory and journal bytes. At the end it says
whether any of them grows.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing.connection
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch

from ckptd.agent import Agent, Checkpoint, CkptdError
from tests.crash import places
from tests.crash.places import Where
from tests.support import forks, trainers
from tests.support.daemons import Daemon, Home, holds, home

SIZE = 2000
OPTIONS = ("--keep-last", "2", "--codec", "zstd:1", "--threads", "2")
ENVIRONMENT = {
    "CKPTD_MEMORY_TTL": "0.5",
    "CKPTD_SHM_QUOTA": str(5 << 30),
    "CKPTD_STALL_BUDGET": "30",
}
PHASES = ("born", "begun", "making slots", "mapped", "recovering", "filling", "sealed", "durable")
LONGEST = {
    "born": 0.02, "begun": 0.005, "making "
        "slots": 0.0, "mapped": 0.01, "recovering": 0.02, "filling": 0.01, "sealed": 0.02,
        "durable": 0.02,
}  # fmt: skip
"""Longest time in seconds from the begin of a phase to the kill. For "making slots" it
depends on the size of the slots.
"""
SLOWEST = 1.5e9
"""Least speed at which a daemon makes slots, in bytes per second."""
TINY = (0, 0, 8 << 20)
BIG = (*TINY, 64 << 20, 64 << 20, 128 << 20, 256 << 20)
"""Sizes of the slots of a victim, in bytes of state. Victims that are killed while
slots are made draw from BIG, and all others from TINY, which costs less.
"""
JOBS = (2, 3, 5, 8, 13, 21, 34, 50)
NO_MEMORY = "no shared memory"
NO_ROOM = 3
"""Exit code of a victim whose slots did not fit into shared memory."""
LANES = 4
"""Number of victims that run at once. With slots of 256 MB they take 2 GB."""
OF_A_ROUND = 100
SECONDS = 60.0
WRONG = ("Traceback", "internal error", "could not be settled", "Bad file descriptor")
"""Texts that the daemon writes into its log only if something is wrong with the daemon
itself.
"""


# -- the trainers


def victim(
    socket: Path, job: str, diary: trainers.Diary, pipe: Connection, big: int, early: bool
) -> None:
    """Run until killed, and report each phase to `pipe`.

    big: capacity of the slots, 0 for small ones. early: make the slots before
    recovering.
    """
    with _reported(diary):
        _tell(pipe, "born")
        agent = Agent(job, socket=socket)
        _tell(pipe, "begun")
        if early:
            _make_slots(agent, pipe, big)
        _tell(pipe, "recovering")
        first = _recover(agent, diary)
        if not early:
            _make_slots(agent, pipe, big)
        for step in itertools.count(first + 1):
            _tell(pipe, "filling")
            pending = agent.snapshot(
                trainers.expected(step % 50, SIZE), step=step, persist=step % 3 > 0
            )
            if pending.state in ("sealed", "durable"):
                diary.note("sealed", pending.attempt, step)
                _tell(pipe, "sealed")
                if pending.persist:
                    pending.wait("durable", timeout=SECONDS)
                    diary.note("durable", pending.attempt, step)
                    _tell(pipe, "durable")


def healthy(
    socket: Path, job: str, diary: trainers.Diary, pause: float, stop: Path, close: bool
) -> None:
    """Save until `stop` exists, and check every answer.

    Then close, or wait to be killed with a snapshot that is only in memory.
    """
    with _reported(diary):
        agent = Agent(job, socket=socket)
        step = _recover(agent, diary)
        while not stop.exists():
            step += 1
            _save(agent, diary, step, persist=step % 2 == 0)
            if step % 5 == 0:
                _compare(agent, step)
            time.sleep(pause)
        _save(agent, diary, step + 1, persist=False)
        if close:
            agent.close()
        diary.note("finished", agent.attempt, step + 1)
        if not close:
            time.sleep(600)


def survivor(socket: Path, job: str, diary: trainers.Diary) -> None:
    """Recover the state of a killed healthy trainer, then close."""
    with _reported(diary):
        agent = Agent(job, socket=socket)
        _recover(agent, diary)
        agent.close()


class _reported:
    """Write an exception into a file beside the diary.

    A lack of shared memory is not reported, because it is no fault of the daemon.
    """

    def __init__(self, diary: trainers.Diary) -> None:
        self._path = diary.path.with_suffix(".wrong")
        torch.set_num_threads(1)
        logging.disable()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        if isinstance(error, CkptdError) and error.code in ("quota", "shm-full"):
            sys.exit(NO_ROOM)
        if error is not None:
            self._path.write_text("".join(traceback.format_exception(error)))


def _tell(pipe: Connection, phase: str) -> None:
    pipe.send_bytes(bytes([PHASES.index(phase)]))


def _make_slots(agent: Agent, pipe: Connection, big: int) -> None:
    """Have slots made and mapped for `big` bytes of state.

    The state itself is never touched.
    """
    _tell(pipe, "making slots")
    agent.prepare({"big": torch.empty(big, dtype=torch.uint8)} if big else trainers.blank(SIZE))
    agent._link.handovers.wait_for_threads()
    _tell(pipe, "mapped")


def _recover(agent: Agent, diary: trainers.Diary) -> int:
    """Recover, compare every bit, and return the step, or 0 if there is no checkpoint."""
    state = trainers.blank(SIZE)
    found = agent.recover(state)
    if found is None:
        diary.note("recovered", 0, -1)
        return 0
    assert not found.passed_over, found
    trainers.assert_equal(state, found.step % 50, SIZE)
    diary.note("recovered", found.attempt, found.step)
    return found.step


def _save(agent: Agent, diary: trainers.Diary, step: int, *, persist: bool) -> None:
    pending = agent.snapshot(trainers.expected(step % 50, SIZE), step=step, persist=persist)
    if pending.state not in ("sealed", "durable"):
        raise AssertionError(
            f"step {step} of healthy job {agent.job} is {pending.state}"
        ) from pending.error
    diary.note("sealed", pending.attempt, step)
    if persist:
        pending.wait("durable", timeout=SECONDS)
        diary.note("durable", pending.attempt, step)


def _compare(agent: Agent, step: int) -> None:
    """Compare the snapshot in memory bit for bit. It must be that of this step."""
    state = trainers.blank(SIZE)
    found = agent.recover(state)
    assert found is not None
    assert (found.attempt, found.step, found.source) == (agent.attempt, step, "memory"), found
    trainers.assert_equal(state, step % 50, SIZE)


# -- the daemon's resources


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources of the daemon at a moment when no trainer runs.

    All sizes are in bytes.
    """

    kills: int
    descriptors: int
    segments: int
    resident: int
    journal: int

    def __str__(self) -> str:
        return f"{self.kills:8,d}{self.descriptors:13,d}{self.segments:10,d}{self.resident / 1e6:13.1f}{self.journal / 1e6:12.2f}"  # noqa: E501


HEAD = f"{'kills':>8}{'descriptors':>13}{'segments':>10}{'resident MB':>13}{'journal MB':>12}"
GROWTH = {"descriptors": 0.0, "segments": 0.0, "resident": 12e6, "journal": 5e6}
"""How much larger the last quarter of the samples may be than the second. The journal
has one or, for a moment, two files of 4 MiB.
"""


def growing(samples: Sequence[Sample]) -> list[str]:
    """Return the resources that grow from the second quarter of the samples to the
    last. The first quarter is the warm-up.
    """
    quarter = len(samples) // 4
    if quarter == 0:
        return []
    found = []
    for name, allowed in GROWTH.items():
        values = [getattr(sample, name) for sample in samples]
        before, after = (
            statistics.median(values[quarter : 2 * quarter]),
            statistics.median(values[-quarter:]),
        )
        if after - before > allowed:
            found.append(
                f"{name} grows: {before:,.0f} in the second quarter of the kills, {after:,.0f} in "
                f"the last"
            )
    return found


# -- the crowd


class Crowd:
    """One daemon, and rounds of healthy jobs and victims.

    `hits` counts the kills by phase, and `problems` lists what was lost.
    """

    def __init__(self, place: Home, number: int) -> None:
        self.hits: Counter[str] = Counter()
        self.problems: list[str] = []
        self.samples: list[Sample] = []
        self._place, self._chance = place, Random(number)
        self._diaries: dict[str, trainers.Diary] = {}
        self._lock = threading.Lock()
        self._noted: dict[str, int] = {}
        self._rounds = 0
        self._daemon = Daemon(place, *OPTIONS, environment=ENVIRONMENT).wait_ready()
        self._start = self._at_rest()

    def close(self) -> None:
        self._daemon.close()

    # -- one round

    def round(self, kills: int, end: float, jobs: int = 0) -> None:
        """Run one round.

        Start the healthy jobs, and kill victims until their number is reached or `end`
        has come. Then let all trainers end, and check that nothing was lost.
        """
        self._rounds += 1
        self._noted = {job: len(diary.read()) for job, diary in self._diaries.items()}
        jobs = jobs or self._chance.choice(JOBS)
        stop, crowd = self._place.path / f"stop-{self._rounds}", dict[str, Any]()
        closing = {}
        try:
            for n in range(max(1, jobs // 2)):
                job, closing[job] = f"healthy-{n}", n % 2 == 1
                pause = 0.005 if n < 2 else 0.5
                crowd[job] = self._spawn(healthy, job, self._diary(job), pause, stop, closing[job])
            self._wait(
                lambda: all("sealed" in self._said(job) for job in crowd),
                crowd,
                "healthy job at work",
            )
            self._kill_victims(
                kills, end, [f"victim-{n}" for n in range(max(1, jobs - len(crowd)))], crowd
            )
            stop.touch()
            self._wait(
                lambda: all("finished" in self._said(job) for job in crowd),
                crowd,
                "healthy job at its end",
            )
            for job, process in crowd.items():
                if not closing[job]:
                    process.kill()
                process.join()
                if not self.problems and not closing[job]:
                    self._spawn(survivor, job, self._diary(job)).join()
        finally:
            for process in crowd.values():
                process.kill()
                process.join()
        self._look()

    def _spawn(self, function: Callable[..., None], *arguments: Any) -> Any:
        process = forks.context().Process(
            target=function, args=(self._place.socket, *arguments), daemon=True
        )
        with self._lock:
            process.start()
        return process

    def _diary(self, job: str) -> trainers.Diary:
        return self._diaries.setdefault(job, trainers.Diary(self._place.path / f"{job}.diary"))

    def _said(self, job: str) -> list[str]:
        """Return the words that a healthy job has written into its diary in this round."""
        return [word for word, _ in self._diary(job).read()[self._noted.get(job, 0) :]]

    def _wait(self, condition: Callable[[], bool], crowd: dict[str, Any], what: str) -> None:
        """Wait until the condition holds, the daemon has ended, or a healthy trainer
        has ended by itself.
        """
        until = time.monotonic() + SECONDS
        while not condition() and not self._broken(crowd):
            if time.monotonic() > until:
                self.problems.append(f"no {what} within {SECONDS:.0f} s")
                return
            time.sleep(0.01)

    def _broken(self, crowd: dict[str, Any]) -> bool:
        """Return True if this round should not go on."""
        if self._daemon.process.poll() is not None:
            return True
        return bool(self.problems) or any(
            self._wrong(job).exists() for job in [*crowd, *self._diaries]
        )

    def _wrong(self, job: str) -> Path:
        return self._place.path / f"{job}.wrong"

    # -- victims

    def _kill_victims(self, kills: int, end: float, jobs: list[str], crowd: dict[str, Any]) -> None:
        """Kill victims in several lanes at once.

        Each lane has jobs of its own, so that no victim takes over the job of one that
        still runs.
        """
        for job in jobs:
            # Made now, so that no lane adds a diary while another lane iterates over
            # them.
            self._diary(job)
        lanes = min(LANES, len(jobs))
        goal = self.hits.total() + kills
        seeds = [self._chance.getrandbits(32) for _ in range(lanes)]

        def lane(number: int) -> None:
            chance, mine = Random(seeds[number]), jobs[number::lanes]
            while self.hits.total() < goal and time.monotonic() < end and not self._broken(crowd):
                try:
                    self._kill_one(chance, chance.choice(mine))
                except Exception:
                    self.problems.append(f"the rig failed: {traceback.format_exc()}")

        threads = [threading.Thread(target=lane, args=(number,)) for number in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _kill_one(self, chance: Random, job: str) -> None:
        """Start a victim, wait until it reaches a phase, and kill it a random time
        later.
        """
        phase = "making slots" if chance.random() < 0.5 else chance.choice(PHASES)
        big = chance.choice(BIG if phase == "making slots" else TINY)
        longest = LONGEST[phase] or 0.01 + 2 * big / SLOWEST
        ours, theirs = forks.context().Pipe(duplex=False)
        process = self._spawn(victim, job, self._diary(job), theirs, big, chance.random() < 0.7)
        theirs.close()
        reached = ""
        try:
            while reached != phase:
                if not ours.poll(SECONDS):
                    self.problems.append(
                        f"a victim hangs when it is {reached or 'started'}: {self._tail()}"
                    )
                    break
                reached = PHASES[ours.recv_bytes()[0]]
            time.sleep(chance.uniform(0, longest))
        except EOFError:
            pass  # the victim has ended by itself
        process.kill()
        multiprocessing.connection.wait([process.sentinel])
        # `start` in another lane also polls every child, and only one of them can read
        # the exit code
        with self._lock:
            process.join()
        try:
            while ours.poll():
                reached = PHASES[ours.recv_bytes()[0]]
        except EOFError:
            pass
        ours.close()
        with self._lock:
            self.hits[reached if process.exitcode == -signal.SIGKILL else NO_MEMORY] += 1
        if process.exitcode not in (-signal.SIGKILL, NO_ROOM) and not self._wrong(job).exists():
            self.problems.append(f"{job} ended with {process.exitcode} when it was {reached}")

    # -- what must hold

    def _look(self) -> None:
        """Check, after all trainers are gone, that no acknowledged snapshot is lost and
        that the daemon has freed everything.
        """
        if self._daemon.process.poll() is not None:
            self.problems.insert(0, f"the daemon ended with {self._daemon.died()}")
        for job in self._diaries:
            if self._wrong(job).exists():
                self.problems.append(f"{job}: {self._wrong(job).read_text()[-1500:]}")
        if not self.problems and not holds(
            lambda: (self._descriptors(), len(self._place.segment_files())) == (self._start, 0), 20
        ):
            self.problems.append(
                f"{self._descriptors() - self._start:+d} descriptors, "
                f"{len(self._place.segment_files())} segments when all are gone"
            )
        for line in self._place.log_text().splitlines():
            if any(word in line for word in WRONG):
                self.problems.append(f"the daemon's log: {line}")
                break
        for job, diary in self._diaries.items():
            self.problems += [f"{job}: {problem}" for problem in older(diary)]
            if self._daemon.process.poll() is None and not self.problems:
                self.problems += [
                    f"{job}: {problem}"
                    for problem in self._examine(job, diary.newest("sealed", "durable"))
                ]
        if self.problems:
            self.problems[-1] += f"\n{self._tail()}"
        else:
            self._sample()

    def _examine(self, job: str, owed: tuple[int, int]) -> list[str]:
        """Load the newest checkpoint on storage.

        All trainers are gone, so it must be as new as what was acknowledged.
        """
        if owed == (0, -1):
            return []
        try:
            with Checkpoint.open(str(self._place.root / job)) as checkpoint:
                assert checkpoint.step is not None
                trainers.assert_equal(checkpoint.load(), checkpoint.step % 50, SIZE)
                found = (checkpoint.attempt, checkpoint.step)
        except (CkptdError, AssertionError) as error:
            return [f"{owed} was acknowledged: {error!r}"]
        return (
            []
            if found >= owed
            else [f"{owed} was acknowledged, and the newest in storage is {found}"]
        )

    def _tail(self) -> str:
        return self._place.log_text()[-2000:]

    def _descriptors(self) -> int:
        """Return how many descriptors the daemon has open, without its connections to
        an object store, which it keeps for a while.
        """
        process = Path(f"/proc/{self._daemon.process.pid}")
        try:
            remote = {
                f"socket:[{line.split()[9]}]"
                for line in (process / "net/tcp").read_text().splitlines()[1:]
            }
            return sum(os.readlink(link) not in remote for link in (process / "fd").iterdir())
        except OSError:
            return -1  # the daemon has ended, or a descriptor was closed meanwhile

    def _at_rest(self) -> int:
        """Return the number of descriptors once it has been stable for a while.

        Shortly after its start, a daemon still closes one.
        """
        seen: list[int] = []
        while len(seen) < 10 or len(set(seen[-10:])) > 1:
            seen.append(self._descriptors())
            time.sleep(0.02)
        return seen[-1]

    def _sample(self) -> None:
        resident = int(
            Path(f"/proc/{self._daemon.process.pid}/statm").read_text().split()[1]
        ) * os.sysconf("SC_PAGE_SIZE")
        control = self._place.journal
        journal = sum(path.stat().st_size for path in control.iterdir())
        self.samples.append(
            Sample(
                self.hits.total(),
                self._descriptors(),
                len(self._place.segment_files()),
                resident,
                journal,
            )
        )


def older(diary: trainers.Diary) -> list[str]:
    """Return a problem for each recovery that was older than what had been acknowledged
    before it.
    """
    owed, problems = (0, -1), []
    for word, key in diary.read():
        if word == "recovered" and key < owed:
            problems.append(f"{key} was recovered, and {owed} was acknowledged")
        elif word in ("sealed", "durable"):
            owed = max(owed, key)
    return problems


def run(
    count: int,
    number: int,
    seconds: float,
    jobs: int = 0,
    tell: Callable[[Sample], None] = lambda _: None,
    where: Where = home,
) -> tuple[Counter[str], list[str]]:
    """Return how many victims were killed in each phase, and what was lost.

    count: number of victims to kill, unless `seconds` are over earlier. number: the
    random seed. jobs: size of the crowd, or 0 for a new size in each round. tell:
    called with a sample whenever all trainers are gone.
    """
    end = time.monotonic() + seconds
    with where() as place:
        crowd = Crowd(place, number)
        try:
            while crowd.hits.total() < count and time.monotonic() < end and not crowd.problems:
                crowd.round(min(OF_A_ROUND, count - crowd.hits.total()), end, jobs)
                for sample in crowd.samples[-1:]:
                    tell(sample)
            return crowd.hits, crowd.problems + growing(crowd.samples)
        finally:
            crowd.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--jobs", type=int, default=0, help="of each round; else 2 to 50")
    parser.add_argument(
        "--audit",
        type=int,
        default=0,
        metavar="KILLS",
        help="print what the daemon holds after every hundred",
    )
    places.add_option(parser)
    options = parser.parse_args()
    if options.audit:
        print(HEAD, flush=True)
    tell = (lambda sample: print(sample, flush=True)) if options.audit else (lambda sample: None)
    begun = time.monotonic()
    hits, problems = run(
        options.audit or options.count,
        options.seed,
        60 * options.minutes,
        options.jobs,
        tell,
        places.where(options.store),
    )
    print(*(f"{phase:16} {hits[phase]}" for phase in (*PHASES, NO_MEMORY)), *problems, sep="\n")
    print(
        f"{hits.total()} kills in {time.monotonic() - begun:.0f} s, seed {options.seed}, "
        f"{len(problems)} lost"
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
