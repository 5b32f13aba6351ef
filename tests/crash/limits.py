"""Makes descriptors, memory, disk space or inodes run out and come back: the daemon
must serve again and lose nothing.

`python -m tests.crash.limits --tries 100 [--seed N]`. In each try a real daemon lacks
one resource: open files (from the start, or by prlimit while it works), memory (a
cgroup), space or inodes of its disk at the start, or places in the backlog of its
socket. Or the operating system takes something from a daemon that runs, at each phase
of its life: its socket or the directory of that, the memory of its cgroup, the inodes
of its disk, the size that its files may have, or the directory of its log. Meanwhile
jobs save and are killed, and more clients come than fit. Then the shortage ends. The
daemon must answer, or must have ended with a reason and an exit code; in that case a
fresh daemon must serve. Every job gets back, bit for bit, at least what was
acknowledged. No checkpoint is deleted, and the number of the daemon's descriptors
returns to that of the start.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import torch

from ckptd.agent import Agent, CkptdError
from ckptd.shared import errors
from ckptd.shared.system import memory_limit
from ckptd.shared.wire.channel import Channel
from tests.crash import images
from tests.support import forks, trainers
from tests.support.daemons import Daemon, Home, holds, home

SIZE = 4000
STEPS = 3
JOBS = 3
MOST = 140
"""Number of descriptors that the jobs of a try need, including those for clients that
come and go, with some to spare.
"""
STORM = 300
PLENTY = 4096
SECONDS = 30.0
"""Timeout in seconds for an answer after the shortage has ended. It measures nothing."""
OPTIONS = ("--keep-last", "0", "--codec", "zstd:1", "--threads", "2")
# Segments of dead jobs take descriptors until then.
ENVIRONMENT = {"CKPTD_STALL_BUDGET": "1", "CKPTD_MEMORY_TTL": "1"}


def work(socket: Path, diary: trainers.Diary, job: str) -> None:
    """Run as a trainer: make an agent, retrying while that fails, then save step after
    step, and note each outcome in the diary.
    """
    torch.set_num_threads(1)
    logging.disable()
    while True:
        with suppress(CkptdError):
            agent = Agent(job, socket=socket)
            break
        diary.note("refused", 0, 0)
        time.sleep(0.05)
    for step in range(1, STEPS + 1):
        pending = agent.snapshot(
            trainers.expected(100 * agent.attempt + step, SIZE), step=100 * agent.attempt + step
        )
        if pending.state in ("sealed", "durable"):
            diary.note("sealed", pending.attempt, pending.step)
        try:
            pending.wait("durable", timeout=5)
            diary.note("durable", pending.attempt, pending.step)
        except CkptdError:
            diary.note("failed", pending.attempt, max(0, pending.step))
    diary.note("finished", 0, 0)
    time.sleep(600)


def descriptors(daemon: Daemon) -> list[str]:
    """Return what each descriptor of the daemon refers to."""
    found = []
    for fd in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(fd.readlink()))
    return sorted(found)


class Try:
    """One shortage, with a root and shared memory of its own.

    `problems` lists what was lost, and who was not served.
    """

    def __init__(self, place: Home, chance: Random, what: str) -> None:
        self.place, self.chance, self.what = place, chance, what
        self.problems: list[str] = []
        self.counts = Counter[str]()
        self.diaries = {
            f"job-{number}": trainers.Diary(place.path / f"diary-{number}")
            for number in range(JOBS)
        }
        self._trainers: list[Any] = []
        self._clients: list[socket.socket] = []

    def problem(self, text: str) -> None:
        self.problems.append(f"{self.what}: {text}\n{self.place.log_text()[-1500:]}")

    # -- the shortage

    def start(self, *jobs: str) -> None:
        for job in jobs:
            trainer = forks.context().Process(
                target=work, args=(self.place.socket, self.diaries[job], job), daemon=True
            )
            trainer.start()
            self._trainers.append(trainer)

    def clients(self, count: int) -> None:
        """Connect this many clients. Some of them stay silent.

        Clients that do not fit into the backlog are closed again.
        """
        for _ in range(count):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                client.connect(str(self.place.socket))
            except OSError as error:
                client.close()
                if error.errno != errno.EAGAIN:
                    return  # the daemon has ended
                self.counts["turned away by the backlog"] += 1
                continue
            self._clients.append(client)

    def hang_up(self, count: int | None = None) -> None:
        gone, self._clients = self._clients[:count], self._clients[len(self._clients[:count]) :]
        for client in gone:
            client.close()

    def kill_trainers(self) -> None:
        for trainer in self._trainers:
            trainer.kill()
            trainer.join()
        self._trainers.clear()

    def under_way(self, daemon: Daemon) -> None:
        """Let the jobs work while clients come and go, and kill them at a random
        moment. The time begins once a job has heard from the daemon.
        """
        holds(
            lambda: (
                any(diary.read() for diary in self.diaries.values())
                or daemon.process.poll() is not None
            ),
            SECONDS,
        )
        until = time.monotonic() + self.chance.uniform(0.2, 0.8)
        while time.monotonic() < until and daemon.process.poll() is None:
            self.clients(self.chance.randrange(20))
            time.sleep(0.02)
            self.hang_up(self.chance.randrange(20))
        self.kill_trainers()

    # -- afterwards

    def ended(self, daemon: Daemon, *, by_kernel: bool = False) -> bool:
        """Return True if the daemon has ended. It must have logged the reason."""
        code = daemon.process.poll()
        if code is None:
            return False
        last = (self.place.log_text().strip().splitlines() or [""])[-1]
        self.counts["ended with a sentence"] += 1
        if code == 0 or (code < 0 and not (by_kernel and code == -signal.SIGKILL)):
            self.problem(f"the daemon ended with {code}")
        elif code > 0 and not last.startswith("ckptd: "):
            self.problem(f"the daemon ended with {code} and no sentence")
        return True

    def fresh(self, daemon: Daemon) -> Daemon:
        daemon.close()
        return Daemon(self.place, *OPTIONS, environment=ENVIRONMENT)

    def answers(self, daemon: Daemon) -> bool:
        """Return True once the daemon answers, or False if it ends or does not answer
        in time.
        """

        def asked() -> bool:
            try:
                return bool(daemon.status()["ready"])
            except CkptdError:
                return daemon.process.poll() is not None

        return holds(asked, SECONDS) and daemon.process.poll() is None

    def attach(self, job: str) -> Agent:
        """Return an agent of this job.

        While the daemon answers Busy, this retries. Raises CkptdError.
        """
        until = time.monotonic() + SECONDS
        while True:
            try:
                return Agent(job, socket=self.place.socket)
            except errors.Busy:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def serves(self, daemon: Daemon, own: int | None) -> None:
        """Check that every job gets back what was acknowledged and can save again, and
        that no descriptor has leaked.
        """
        for job, diary in self.diaries.items():
            promised = max((diary.newest("sealed", "durable"), (0, -1)))
            try:
                agent = self.attach(job)
                state = trainers.blank(SIZE)
                recovered = agent.recover(state)
                found = (recovered.attempt, recovered.step) if recovered else (0, -1)
                if found < promised:
                    self.problem(f"{job}: {found} was recovered, and {promised} was acknowledged")
                elif recovered is not None:
                    trainers.assert_equal(state, recovered.step, SIZE)
                    self.counts["recovered"] += 1
                step = 100 * agent.attempt
                agent.snapshot(trainers.expected(step, SIZE), step=step).wait(
                    "durable", timeout=SECONDS
                )
                agent.close()
            except (CkptdError, AssertionError) as error:
                self.problem(f"{job} is not served: {error!r}")
            for attempt, step in {key for word, key in diary.read() if word == "durable"}:
                if not (
                    self.place.root / job / f"step-{step:08d}.a{attempt:04d}" / "manifest.json"
                ).exists():
                    self.problem(
                        f"{job}: {attempt, step} was durable, and has no manifest any more"
                    )
        if own is not None and not holds(lambda: len(descriptors(daemon)) <= own, SECONDS):
            self.problem(
                f"{own} descriptors were open at the start, now there are more: "
                f"{', '.join(descriptors(daemon))}"
            )

    def finish(self, daemon: Daemon, own: int | None, *, by_kernel: bool = False) -> Daemon:
        """Check the daemon after the shortage has ended.

        If it has ended, start another one. Return the daemon that runs.
        """
        if self.ended(daemon, by_kernel=by_kernel):
            daemon, own = self.fresh(daemon), None
            if not daemon.reached_ready():
                self.problem("a fresh daemon does not start")
                return daemon
        if not self.answers(daemon):
            if self.ended(daemon, by_kernel=by_kernel):
                return self.finish(daemon, None)
            self.problem("the daemon is alive and does not answer any more")
            return daemon
        self.serves(daemon, own)
        return daemon

    def close(self) -> None:
        self.hang_up()
        self.kill_trainers()


def _limited(case: Try, soft: int, hard: int) -> Daemon:
    return Daemon(
        case.place, *OPTIONS, environment=ENVIRONMENT, under=("prlimit", f"--nofile={soft}:{hard}")
    )


def few_from_the_start(case: Try, limit: int) -> Daemon:
    """Run a daemon with a hard limit of `limit` open files.

    At the end, prlimit raises the limit.
    """
    daemon = _limited(case, limit, limit)
    own = None
    if daemon.reached_ready():
        own = len(descriptors(daemon))
        case.start(*case.diaries)
        case.under_way(daemon)
        case.hang_up()
        raise_hard(daemon)
    else:
        daemon.died()
        case.counts["did not start"] += 1
    return case.finish(daemon, own)


def fewer_meanwhile(case: Try, limit: int) -> Daemon:
    """Lower the soft limit to `limit` while the daemon works, so that clients wait.

    Then raise it again.
    """
    daemon = _limited(case, PLENTY, PLENTY).wait_ready()
    own, pid = len(descriptors(daemon)), daemon.process.pid
    case.start(*case.diaries)
    holds(lambda: any(diary.count("sealed") for diary in case.diaries.values()), SECONDS)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, PLENTY))
    case.clients(20)
    case.under_way(daemon)
    case.clients(20)
    time.sleep(0.1)
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (PLENTY, PLENTY))
    case.hang_up()
    return case.finish(daemon, own)


def storm(case: Try, limit: int) -> Daemon:
    """Connect `STORM` clients at once, more than fit and more than the backlog holds.

    Each must be served or be told to retry later.
    """
    daemon = _limited(case, MOST, MOST).wait_ready()
    own = len(descriptors(daemon))
    case.start("job-0")
    told = Counter[str]()

    def client() -> None:
        until = time.monotonic() + SECONDS
        word = "nobody"
        while time.monotonic() < until and word == "nobody":
            try:
                Channel(case.place.socket, SECONDS).close()
                word = "served"
            except errors.Busy:
                word = "told to come later"
            except (
                errors.DaemonUnreachable
            ) as error:  # the backlog is full, or the daemon has closed the connection
                if "does not answer" in str(error):
                    break
                time.sleep(0.01)
        told[word] += 1

    threads = [threading.Thread(target=client) for _ in range(STORM)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    case.counts["clients of a storm"] += STORM
    if told["nobody"]:
        case.problem(f"{told['nobody']} of {STORM} clients had no answer")
    case.under_way(daemon)
    case.hang_up()
    raise_hard(daemon)
    return case.finish(daemon, own)


def raise_hard(daemon: Daemon) -> None:
    """Raise the daemon's limit of descriptors, if this process may.

    Otherwise the shortage ends when the clients leave.
    """
    with suppress(ProcessLookupError, PermissionError):
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (PLENTY, PLENTY))


def little_memory(case: Try, megabytes: int) -> Daemon:
    """Run the daemon in a cgroup of this many megabytes. The kernel may kill it."""
    with cgroup(megabytes) as group:
        under = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        daemon = Daemon(case.place, *OPTIONS, environment=ENVIRONMENT, under=under)
        if daemon.reached_ready():
            case.start(*case.diaries)
            case.under_way(daemon)
            case.hang_up()
        else:
            daemon.died()
            case.counts["did not start"] += 1
        return case.finish(daemon, None, by_kernel=True)


@contextmanager
def cgroup(megabytes: int) -> Iterator[Path]:
    """Context manager.

    Yields a cgroup with a memory limit: of version 2 if it has the memory controller,
    else of version 1. Raises Unavailable.
    """
    top = Path("/sys/fs/cgroup")
    two = top / "cgroup.controllers"
    second = two.exists() and "memory" in two.read_text().split()
    group, file = (top, "memory.max") if second else (top / "memory", "memory.limit_in_bytes")
    group /= f"ckptd-limits-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(str(megabytes << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise images.Unavailable(f"no cgroup with a memory limit can be made: {error}") from None
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # the process continues without the limit, until it is closed
                (group.parent / "cgroup.procs").write_text(pid)
        for _ in range(100):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)


def full_at_the_start(case: Try, inodes: bool) -> Daemon:
    """Start the daemon again on a disk without space, or without inodes.

    Raises Unavailable.
    """
    with ExitStack() as held:
        image = images.Image(16)
        held.callback(image.close)
        case.place.root = image.where / "root"
        held.callback(lambda: shutil.rmtree(case.place.segments, ignore_errors=True))
        before = _limited(case, PLENTY, PLENTY).wait_ready()
        case.start("job-0")
        holds(lambda: bool(case.diaries["job-0"].count("finished")), SECONDS)
        before.kill()
        case.kill_trainers()
        exhaust(image.where, inodes=inodes)
        daemon = _limited(case, PLENTY, PLENTY)
        try:
            if daemon.reached_ready():
                case.start("job-1")
                case.under_way(daemon)
                case.hang_up()
            else:
                daemon.died()
                case.counts["did not start"] += 1
            shutil.rmtree(image.where / "ballast")
            daemon = case.finish(daemon, None)
        finally:
            case.close()
            daemon.close()
        return daemon


def exhaust(where: Path, *, inodes: bool) -> None:
    ballast = where / "ballast"
    ballast.mkdir()
    if not inodes:
        with (ballast / "file").open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                images.fill(file, size)
        return
    with suppress(OSError):
        for number in range(1 << 20):
            (ballast / str(number)).touch()


class Taking:
    """A thing that an operating system takes away from a running daemon, and gives back.

    `options` are those of the daemon, and `under` is the command that starts it.
    `descriptors` is the number of those that it needs more from then on.
    """

    options: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    descriptors = 0

    def __init__(self, case: Try, held: ExitStack) -> None:
        """Make what the daemon needs. `held` is closed after the try.

        Raises Unavailable.
        """

    def take(self, daemon: Daemon) -> None:
        raise NotImplementedError

    def give_back(self, daemon: Daemon) -> None:
        pass

    def problem(self, daemon: Daemon) -> str:
        """Return what was wrong while it was taken away, or ""."""
        return ""


class TakeMemory(Taking):
    """The limit of the cgroup is lowered until no slot fits: slots go to the disk, and
    the kernel kills nobody. Another process of the group holds most of the memory.
    """

    descriptors = 1  # of the directory for slots on the disk

    def __init__(self, case: Try, held: ExitStack) -> None:
        self._group = held.enter_context(cgroup(4096))
        self._limit = self._group / "memory.limit_in_bytes"
        if not self._limit.exists():
            self._limit = self._group / "memory.max"
        self.under = ("sh", "-c", f'echo $$ > {self._group}/cgroup.procs; exec "$@"', "sh")
        hold = f"held = bytearray({HOG}); print(flush=True); import time; time.sleep(600)"
        hog = subprocess.Popen([*self.under, sys.executable, "-c", hold], stdout=subprocess.PIPE)
        held.callback(hog.wait)
        held.callback(hog.kill)
        assert hog.stdout is not None
        hog.stdout.readline()

    def take(self, daemon: Daemon) -> None:
        self._before = daemon.status()["shared_memory"]["used_bytes"]
        limit = memory_limit.tightest()  # of this process, which is in a parent of the group
        used = memory_limit._limit(self._group)
        assert used is not None
        assert limit is None or limit.free > HOG, limit
        self._limit.write_text(str(used.used + HOG // 12))  # less than what is reserved

    def give_back(self, daemon: Daemon) -> None:
        self._limit.write_text(str(4 << 30))

    def problem(self, daemon: Daemon) -> str:
        try:
            now = daemon.status()["shared_memory"]
        except CkptdError as error:
            return f"the daemon in a full cgroup does not answer: {error}"
        if now["used_bytes"] > self._before:
            return f"slots went to a full cgroup: {now}"
        return ""


class TakeInodes(Taking):
    """The disk of the root and the state has space, and no inode is left."""

    def __init__(self, case: Try, held: ExitStack) -> None:
        image = images.Image(64)
        held.callback(image.close)
        case.place.root = image.where / "root"
        held.callback(lambda: shutil.rmtree(case.place.segments, ignore_errors=True))
        self._where = image.where

    def take(self, daemon: Daemon) -> None:
        exhaust(self._where, inodes=True)

    def give_back(self, daemon: Daemon) -> None:
        shutil.rmtree(self._where / "ballast")


class TakeFileSize(Taking):
    """No file may be longer than a page, as with `ulimit -f`: not even the log."""

    def take(self, daemon: Daemon) -> None:
        self._set(daemon, 4096)

    def give_back(self, daemon: Daemon) -> None:
        self._set(daemon, resource.RLIM_INFINITY)

    def _set(self, daemon: Daemon, size: int) -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(
                daemon.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY)
            )


class TakeLog(Taking):
    """The directory of the log is deleted, and made again later."""

    def __init__(self, case: Try, held: ExitStack) -> None:
        self._log = case.place.path / "logs" / "daemon.log"
        self._log.parent.mkdir()
        self.options = ("--log-file", str(self._log))

    def take(self, daemon: Daemon) -> None:
        shutil.rmtree(self._log.parent)

    def give_back(self, daemon: Daemon) -> None:
        self._log.parent.mkdir()


class TakeSocket(Taking):
    """The file of the socket is deleted, as by a cleaner of temporary files. The daemon
    makes it again.
    """

    def __init__(self, case: Try, held: ExitStack) -> None:
        self._socket = case.place.socket = case.place.path / "run" / "s"
        self._socket.parent.mkdir(mode=0o700)

    def take(self, daemon: Daemon) -> None:
        self._socket.unlink()

    def give_back(self, daemon: Daemon) -> None:
        self._socket.parent.mkdir(mode=0o700, exist_ok=True)
        holds(lambda: self._socket.exists() or daemon.process.poll() is not None, SECONDS)


class TakeRuntimeDirectory(TakeSocket):
    """The directory of the socket is deleted, as by logind at the last logout, and made
    again later: the daemon comes back to it.
    """

    def take(self, daemon: Daemon) -> None:
        shutil.rmtree(self._socket.parent)


TAKINGS: dict[str, type[Taking]] = {
    "socket": TakeSocket,
    "runtime directory": TakeRuntimeDirectory,
    "memory": TakeMemory,
    "inodes": TakeInodes,
    "file size": TakeFileSize,
    "log": TakeLog,
}
PHASES = ("idle", "sealed", "dead", "end")
"""When it is taken: before the first job, once a job has sealed, once the jobs are dead
and the daemon saves what they have left, or while it ends.
"""
HOG = 300 << 20


def taken(case: Try, what: str, phase: str) -> Daemon:
    """Take something from a daemon that runs, and give it back when the jobs are dead.

    Raises Unavailable.
    """
    with ExitStack() as held:
        taking = TAKINGS[what](case, held)
        daemon = Daemon(
            case.place, *OPTIONS, *taking.options, environment=ENVIRONMENT, under=taking.under
        ).wait_ready()
        try:
            own: int | None = len(descriptors(daemon))
            if phase == "idle":
                taking.take(daemon)
            case.start(*case.diaries)
            if phase == "sealed":
                holds(
                    lambda: any(diary.count("sealed") for diary in case.diaries.values()), SECONDS
                )
                taking.take(daemon)
            case.under_way(daemon)
            case.hang_up()
            if phase in ("dead", "end"):
                taking.take(daemon)
            if problem := taking.problem(daemon):
                case.problem(problem)
            if phase == "end" and daemon.process.poll() is None:
                daemon.process.terminate()
                code = daemon.process.wait(SECONDS)
                if code not in (0, 1, 15):
                    case.problem(f"the daemon that was told to end has ended with {code}")
                taking.give_back(daemon)
                daemon, own = case.fresh(daemon), None
            else:
                taking.give_back(daemon)
            daemon = case.finish(daemon, own and own + taking.descriptors)
        finally:
            case.close()
            daemon.close()
        return daemon


def kinds(chance: Random) -> Iterator[tuple[str, Callable[[Try], Daemon]]]:
    """Yield the tries in order. Every limit comes once before any limit comes again."""
    while True:
        limits = list(range(16, MOST))
        takings = [(what, phase) for what in TAKINGS for phase in PHASES]
        chance.shuffle(limits)
        chance.shuffle(takings)
        for number, limit in enumerate(limits):
            low = 3 if number % 3 == 0 else limit // 2
            yield "files while it works", lambda case, low=low: fewer_meanwhile(case, low)  # type: ignore[misc]
            yield "files from the start", lambda case, limit=limit: few_from_the_start(case, limit)  # type: ignore[misc]
            what, phase = takings[number % len(takings)]
            yield f"{what} taken, {phase}", lambda case, w=what, p=phase: taken(case, w, p)  # type: ignore[misc]
            if number % 4 == 0:
                yield "full disk at the start", lambda case: full_at_the_start(case, inodes=False)
                yield "no inodes at the start", lambda case: full_at_the_start(case, inodes=True)
                yield "memory", lambda case, limit=limit: little_memory(case, 20 + limit // 2)  # type: ignore[misc]
                yield "storm of clients", lambda case: storm(case, MOST)


def run(count: int, number: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how many tries of each kind were made, with their outcomes, and what was
    lost. `number` is the random seed.
    """
    chance, done, problems = Random(number), Counter[str](), list[str]()
    end = time.monotonic() + seconds
    for tried, (kind, act) in enumerate(kinds(chance)):
        if tried >= count or time.monotonic() > end or problems:
            break
        with home() as place:
            case, daemon = Try(place, chance, f"try {tried}, {kind}"), None
            try:
                daemon = act(case)
                done[kind] += 1
            except images.Unavailable as error:
                done[f"not tried: {kind}: {error}"] += 1
            finally:
                case.close()
                if daemon is not None:
                    daemon.close()
            done += Counter({f"  {word}": times for word, times in case.counts.items()})
            problems += case.problems
    return done, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    begun = time.monotonic()
    done, problems = run(options.tries, options.seed, options.seconds)
    print(*(f"{kind:40} {count}" for kind, count in done.items()), *problems, sep="\n")
    print(f"{time.monotonic() - begun:.1f} s, seed {options.seed}, {len(problems)} lost")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
