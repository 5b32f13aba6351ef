"""Runs many pairs: a process judges them one after the other, and this one starts
another in its place when it dies.

A pair that ends its process is a fault like any other. The daemon is one for all pairs.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.oracle import grammar, spread, spread_judge
from tests.oracle.judge import End, Verdict
from tests.oracle.program import Pair, from_json, to_json
from tests.oracle.worker import Ended, Jobs, Task, do, quiet
from tests.support.daemons import Daemon, Home, home, running

P = TypeVar("P")
RAW = ("--codec", "raw")
PAIRS_OF_A_DAEMON = 5000
"""A daemon knows 10,000 jobs at most, and each pair is a job."""
SECONDS_OF_A_PAIR = 90.0
"""A pair that takes longer counts as hung. Far more than any pair takes on a busy
machine.
"""
TASKS_OF_A_PROCESS = 48
"""After how many recoveries a fresh process is replaced. To start one imports torch,
which takes as long as a hundred pairs.
"""


class Child:
    """A process that answers one message after the other, and is started again whenever
    it has ended.

    start: the name of multiprocessing's way of starting it. serve: called in the
    process, with the socket of the daemon and its pipe.
    """

    def __init__(self, start: str, serve: Callable[[Path, Connection], None], socket: Path) -> None:
        self._start, self._serve, self._socket = start, serve, socket
        self._process: Any = None
        self._pipe: Connection | None = None

    def ask(self, message: object) -> Any:
        """Return the answer to a first message.

        Starts the process if there is none. Raises Ended if it dies or hangs, and ends
        it.
        """
        if self._process is None or not self._process.is_alive():
            self._begin()
        return self.reply(message)

    def reply(self, message: object) -> Any:
        """Return the answer to a message that the process waits for.

        Raises Ended if it has died, dies or hangs, and ends it.
        """
        assert self._process is not None
        assert self._pipe is not None
        try:
            self._pipe.send(message)
            if self._pipe.poll(SECONDS_OF_A_PAIR):
                return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            self.close()
            raise Ended("died", f"exit code {code}") from None
        self.close()
        raise Ended("hung", f"for {SECONDS_OF_A_PAIR:g} s")

    def _begin(self) -> None:
        self.close()
        starting = get_context(self._start)
        if self._start == "forkserver":
            starting.set_forkserver_preload(["tests.oracle.worker", "torch._dynamo"])
        ours, theirs = starting.Pipe()
        self._process = starting.Process(  # type: ignore[attr-defined]
            target=self._serve, args=(self._socket, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        self._pipe = ours

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


class Judge:
    """A process that judges pairs, and another one that recovers some of them, and is
    made again after a few dozen.
    """

    def __init__(self, socket: Path) -> None:
        self._saving, self._fresh = (
            Child("forkserver", serve, socket),
            Child("spawn", serve_fresh, socket),
        )
        self._tasks = 0

    def __call__(self, pair: Pair) -> Verdict:
        """Return the verdict of a pair: "the process died" or "the process hung" if it
        gave none.
        """
        try:
            answer = self._saving.ask(to_json(pair))
            while isinstance(answer, Task):
                answer = self._saving.reply(self._end(answer))
        except Ended as ended:
            return Verdict(f"the process {ended.how}", ended.details)
        kind, details = answer
        return Verdict(kind, details)

    def _end(self, task: Task) -> End | Ended:
        self._tasks += 1
        if self._tasks % TASKS_OF_A_PROCESS == 0:
            self._fresh.close()
        try:
            end: End = self._fresh.ask(task)
        except Ended as ended:
            return ended
        return end

    def close(self) -> None:
        self._saving.close()
        self._fresh.close()


def serve(socket: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    quiet()

    def fresh(task: Task) -> End:
        pipe.send(task)
        answer: End | Ended = pipe.recv()
        if isinstance(answer, Ended):
            raise answer
        return answer

    jobs = Jobs(socket, fresh)
    while True:
        try:
            pair = from_json(pipe.recv())
        except EOFError:
            os._exit(0)
        try:
            verdict = jobs.judge(pair)
        except (
            Exception
        ) as error:  # of the rig itself, or of torch, while the programs are built and trained
            verdict = Verdict(
                "the rig failed", f"{type(error).__name__}: {error} at {_place(error)}"
            )
        pipe.send((verdict.kind, verdict.details))


def serve_fresh(socket: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    quiet()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer: End | Ended = do(task, socket)
        except Exception as error:
            answer = Ended("failed", f"{type(error).__name__}: {error} at {_place(error)}")
        pipe.send(answer)


def _place(error: BaseException) -> str:
    frame, last = error.__traceback__, ""
    while frame is not None:
        last += f" {Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return last


def _rooted(place: Home, directory: str) -> Home:
    """Put the root of the checkpoints into memory, because each pair begins an attempt
    and closes an agent, and both wait for the disk.
    """
    place.root = Path(directory) / "root"
    return place


def _check_alive(daemon: Daemon) -> None:
    """Raise AssertionError if the daemon has ended: every other pair would fail for
    this reason alone.
    """
    assert daemon.process.poll() is None, f"the daemon has ended with code {daemon.process.poll()}"


class Lane:
    """Judges pairs one after the other.

    A new daemon replaces its daemon after `PAIRS_OF_A_DAEMON` pairs.
    """

    def __init__(self) -> None:
        self._open, self._left = ExitStack(), 0
        self._judge: Judge | None = None
        self._daemon: Daemon | None = None

    def __call__(self, pair: Pair) -> Verdict:
        if self._judge is None or self._daemon is None or not self._left:
            self.close()
            self._judge, self._daemon = self._begin()
            self._left = PAIRS_OF_A_DAEMON
        _check_alive(self._daemon)
        self._left -= 1
        return self._judge(pair)

    def _begin(self) -> tuple[Judge, Daemon]:
        place, memory = (
            self._open.enter_context(home()),
            self._open.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")),
        )
        daemon = self._open.enter_context(running(_rooted(place, memory), *RAW, forked=True))
        judge = Judge(place.socket)
        self._open.callback(judge.close)
        return judge, daemon

    def close(self) -> None:
        self._open.close()


@contextmanager
def judging(lanes: int = 1) -> Iterator[Callable[[Pair], Verdict]]:
    """Context manager.

    Return a function that judges a pair in another process. It may be called by as many
    threads as there are lanes.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as opened:
        free = queue.SimpleQueue[Lane]()
        for _ in range(lanes):
            free.put(opened.enter_context(closing(Lane())))

        def judged(pair: Pair) -> Verdict:
            lane = free.get()
            try:
                return lane(pair)
            finally:
                free.put(lane)

        yield judged


@contextmanager
def judging_spread() -> Iterator[Callable[[spread.SpreadPair], Verdict]]:
    """Context manager.

    Return a function that judges a pair of programs on one or two ranks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with (
        home() as place,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        running(_rooted(place, memory), *RAW, forked=True) as daemon,
    ):
        pools, lock = spread_judge.Pools(place), threading.Lock()

        def judged(pair: spread.SpreadPair) -> Verdict:
            _check_alive(daemon)
            with lock:  # a pair is judged while an earlier one is made smaller
                return pools.judge(pair)

        try:
            yield judged
        finally:
            pools.close()


def results(
    make: Callable[[int], P],
    seeds: Iterator[int],
    end: float,
    judge: Callable[[P], Verdict],
    lanes: int = 1,
) -> Iterator[tuple[P, Verdict]]:
    """Yield the pair and the verdict of each seed, in their order, until
    `time.monotonic()` is `end`.
    """

    def of(seed: int) -> tuple[P, Verdict]:
        pair = make(seed)
        return pair, judge(pair)

    with ThreadPoolExecutor(lanes) as pool:
        begun = deque(pool.submit(of, seed) for seed in islice(seeds, lanes))
        while begun:
            found = begun.popleft().result()
            if time.monotonic() < end:
                begun.extend(pool.submit(of, seed) for seed in islice(seeds, 1))
            yield found


def run(count: int, number: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Judge `count` pairs, or as many as the time allows.

    Return how they ended, and a line for each fault. `number` is the seed.
    """
    with judging() as judge:
        return _run(grammar.make, judge, count, number, seconds, "")


def run_spread(count: int, number: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Do the same with programs on one or two ranks."""
    with judging_spread() as judge:
        return _run(spread.make, judge, count, number, seconds, " --ranks 2")


def _run(
    make: Callable[[int], P],
    judge: Callable[[P], Verdict],
    count: int,
    number: int,
    seconds: float,
    option: str,
) -> tuple[Counter[str], list[str]]:
    ends, problems, first = Counter[str](), list[str](), number * 1_000_000
    for seed, (_, verdict) in enumerate(
        results(make, iter(range(first, first + count)), time.monotonic() + seconds, judge), first
    ):
        ends["pairs"] += 1
        ends[f"  {verdict.kind}"] += 1
        if not verdict.sound:
            problems.append(
                f"{verdict.kind}: {verdict.details[:300]}: python -m tests.oracle --seed {seed} "
                f"--pairs 1{option}"
            )
    return ends, problems
