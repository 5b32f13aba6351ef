"""Interrupts the agent with Ctrl-C, signal handlers that raise or call it, nested calls,
forks and threads, at any line of any public call.

`python -m tests.crash.interrupts --count 500 [--seed N] [--minutes M]`. It runs a real
daemon and a real trainer. A trace function counts the lines that the main thread runs
in ckptd. At the n-th line a handler raises an exception, makes a nested call, or forks.
Timers do the same between any two instructions, in Python and in C, and handlers that
raise run at each failpoint, too. Another process sends SIGTERM to the trainer or to its
group, with the workers of a data loader, which must go on. The exception of a handler,
and nothing else, must come out of the call. After every try, snapshots must again be
sealed and durable within a few calls, which needs every slot, and `recover` must return
the newest of them, bit for bit. A watchdog reports a hang with the stacks of all
threads.
"""

from __future__ import annotations

import argparse
import dis
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptd.agent
import ckptd.shared
from ckptd.agent import Agent, Batches, CkptdError
from ckptd.shared.errors import Busy
from ckptd.shared.system import failpoints
from tests.crash import places
from tests.crash.places import Where
from tests.support import forks, trainers
from tests.support.daemons import Home, home, running
from tests.support.raising_handlers import RAISED, at_failpoint

SIZE = 500
OPTIONS = ("--keep-last", "3", "--codec", "raw", "--threads", "1")
BUDGET = {"CKPTD_STALL_BUDGET": "1"}
HANG_SECONDS = 60.0
MOST_PROBLEMS = 3
HOLDS = 3
"""Exit code of a forked child that still has its parent's segments."""
FURTHER = 8
"""The number of snapshots after a try. At least one of them must be sealed."""
PLACES = tuple(
    str(Path(path).resolve())
    for package in (ckptd.agent, ckptd.shared)
    for path in package.__path__
)
CALLS = ("snapshot", "recover", "go back", "prepare", "close")
LEFT = (*CALLS, "wait")
"""The calls that a handler that raises must end at once."""
TARGETS = ("process", "group")
NESTED = ("snapshot", "close", "recover")
CHILDREN = ("a child that ends", "a child with an agent")
KINDS = (
    # Most used, and with most state to leave behind.
    *8 * ["Ctrl-C at a line of snapshot", "Ctrl-C from a timer in snapshot"],
    *(f"{name} at a line of {call}" for call in LEFT for name in RAISED),
    *(f"{name} from a timer in {call}" for call in LEFT for name in RAISED),
    *(f"{name} at a failpoint of {call}" for call in CALLS[:4] for name in RAISED),
    *2 * [f"SIGTERM to the {target} in {call}" for call in LEFT for target in TARGETS],
    *(f"{inner} at a line of {call}" for call in CALLS for inner in NESTED),
    *(f"{inner} from a timer in {call}" for call in CALLS for inner in NESTED),
    *(f"{child} at a line of {call}" for call in CALLS for child in CHILDREN),
    "threads",
)


class Wrong(Exception):
    """Raised when a promise is broken."""


@cache
def _unsignalled(code: CodeType) -> frozenset[int]:
    """Return the offsets at which lines of this code begin, and at which Python handles
    no signal. A trace function could raise there.

    These are the calls of `__exit__` at the normal end of `with` statements, and the
    instructions NOP of `try:` lines, which the compiler may leave out of the block of a
    `with` around them.
    """
    found, last = set(), list[dis.Instruction]()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "NOP":
            found.add(instruction.offset)
        last = [*last[-3:], instruction]
        if (
            len(last) == 4
            and all(one.opname == "LOAD_CONST" and one.argval is None for one in last[:3])
            and "CALL" in last[3].opname
        ):
            found.add(last[0].offset)
    return frozenset(found)


class Lines:
    """Counts the lines of ckptd that this thread runs and that a signal could
    interrupt, and calls `act` at the n-th of them.
    """

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.seen = 0
        self._at, self._act = at, act

    @contextmanager
    def traced(self) -> Iterator[None]:
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PLACES) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lasti not in _unsignalled(frame.f_code):
            self.seen += 1
            if self.seen == self._at:
                self._act()
        return self._line


class Trainer:
    """Runs in the trainer's process, and tries one kind of interruption after another."""

    def __init__(self, socket: Path, segments: Path, seed: int) -> None:
        self._segments, self._reading = segments, False
        self._socket, self._chance = socket, Random(seed)
        self._lines: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._durable: list[int] = []
        self._wrong = ""
        self._to_raise: BaseException = KeyboardInterrupt()
        self._raised: BaseException | None = None
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._handler)
        self._batches: Iterator[Any] | None = None
        self._unraisable: list[BaseException | None] = []
        sys.unraisablehook = lambda told: self._unraisable.append(told.exc_value)
        self._children: list[int] = []
        self.agent = Agent(trainers.JOB, socket=socket)
        self.step = 0
        state = trainers.blank(SIZE)
        recovered = self.agent.recover(state)
        if recovered is not None:
            self.step = recovered.step
            trainers.assert_equal(state, recovered.step, SIZE)
        self.check()
        for call in LEFT:
            lines = Lines(0, lambda: None)
            self._ready(call)
            begun = time.monotonic()
            self._call(call)
            self._seconds[call] = time.monotonic() - begun
            self.check()
            self._ready(call)
            with lines.traced():
                self._call(call)
            self._lines[call] = lines.seen
            self.check()

    def _next(self) -> int:
        self.step += 1
        return self.step

    def _ready(self, call: str) -> None:
        """Prepare for a call, outside the time in which it is interrupted."""
        if call == "wait":
            step = self._next()
            self._pending = self.agent.snapshot(trainers.expected(step, SIZE), step=step)

    def _call(self, call: str) -> None:
        agent, self._reading = self.agent, call in ("recover", "go back")
        match call:
            case "snapshot":
                step = self._next()
                agent.snapshot(trainers.expected(step, SIZE), step=step)
            case "recover":
                agent.recover(trainers.blank(SIZE))
            case "go back":
                agent.recover(trainers.blank(SIZE), step=self._durable[-2])
            case "prepare":
                agent.prepare(trainers.expected(0, SIZE + self._chance.randrange(3) * 100_000))
            case "close":
                agent.close()
            case "wait":
                self._pending.wait("durable", timeout=30)

    def attempt(self, kind: str) -> None:
        """Try one kind of interruption, then check that every promise holds.

        Raises Wrong.
        """
        if kind == "threads":
            self._threads()
        else:
            what, _, call = kind.rpartition(" of " if " of " in kind else " in ")
            target = what.removeprefix("SIGTERM to the ")
            inner, _, where = what.rpartition(" at a " if " at a " in what else " from a ")
            if target != what:
                inner, where = "SignalException", target
            act = (
                self._fork(inner)
                if inner in CHILDREN
                else partial(self._raise, RAISED[inner]())
                if inner in RAISED
                else self._nested(inner)
            )
            self._ready(call)
            self._raised = None
            found: BaseException | None = None
            try:
                with self._interrupted(where, call, act):
                    self._call(call)
            except CkptdError as error:
                found = error
            except BaseException as error:
                if inner not in RAISED:
                    raise
                found = error
            if self._raised not in (None, found, *map(_carried, self._unraisable)):
                told = f"a handler has raised {self._raised!r}, and {found!r} came out"
                raise Wrong(told) from found
            self._unraisable.clear()
            if target != what and self._batches is not None:
                for _ in range(4):  # more than were loaded ahead
                    next(self._batches)
        for child in self._children:
            if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                what = "holds segments of its parent" if code == HOLDS else f"ended with {code}"
                self._wrong = self._wrong or f"a forked child {what}"
        self._children.clear()
        if self._wrong:
            raise Wrong(self._wrong)
        self.check()

    # -- the interruptions, and when they come

    def _interrupted(self, where: str, call: str, act: Callable[[], None]) -> Any:
        match where:
            case "process" | "group":
                return self._signalled(call, where)
            case "line":
                return self._at_line(call, act)
            case "failpoint":
                return at_failpoint(self._chance.choice(failpoints.AGENT), act)
            case _:
                return self._at_time(call, act)

    def _at_line(self, call: str, act: Callable[[], None]) -> Any:
        return Lines(self._chance.randrange(1, self._lines[call] + 1), act).traced()

    @contextmanager
    def _at_time(self, call: str, act: Callable[[], None]) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, lambda *_: act())
        signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-6, 1.2 * self._seconds[call]))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @contextmanager
    def _signalled(self, call: str, target: str) -> Iterator[None]:
        """Have another process send SIGTERM, and wait for it."""
        if self._batches is None:
            data = TensorDataset(torch.arange(64.0))
            # As in a training; this process has the start method of the fork server.
            loader = DataLoader(
                data, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
            )
            self._batches = iter(Batches(loader))
        next(self._batches)
        self._to_raise = RAISED["SignalException"]()
        pid, seconds = os.getpid(), self._chance.uniform(1e-6, 1.2 * self._seconds[call])
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(seconds)
            (os.killpg if target == "group" else os.kill)(pid, signal.SIGTERM)
            os._exit(0)
        self._children.append(child)
        yield
        end = time.monotonic() + HANG_SECONDS / 2
        while self._raised is None:
            time.sleep(0.001)
            if time.monotonic() > end:
                raise Wrong("SIGTERM has not arrived")

    def _raise(self, error: BaseException) -> None:
        """Have a signal handler raise `error`."""

        self._to_raise = error
        signal.raise_signal(signal.SIGUSR2)

    def _handler(self, *_: object) -> None:
        self._raised = self._to_raise
        raise self._raised

    def _nested(self, inner: str) -> Callable[[], None]:
        def act() -> None:
            try:
                if inner == "snapshot":
                    step = self._next()
                    pending = self.agent.snapshot(trainers.expected(step, SIZE), step=step)
                    if pending.state == "failed" and not isinstance(pending.error, CkptdError):
                        self._wrong = f"a nested snapshot failed with {pending.error!r}"
                elif inner == "close":
                    self.agent.close()
                else:
                    self.agent.recover(trainers.blank(SIZE))
            except Busy as error:
                if "set a flag in the handler" not in str(error):
                    self._wrong = f"a nested {inner} was refused with {error!r}"
            except CkptdError:
                pass  # the nested call ran and failed: `check` looks at the result

        return act

    def _fork(self, how: str) -> Callable[[], None]:
        def act() -> None:
            child = os.fork()
            if child:
                self._children.append(child)
                return
            sys.settrace(None)
            code = 1
            try:
                signal.alarm(int(HANG_SECONDS / 2))
                if how == "a child with an agent":
                    own = Agent(f"child-{os.getpid()}", socket=self._socket)
                    pending = own.snapshot(trainers.expected(1, SIZE), step=1)
                    # A machine that stood still has not made the slots in time.
                    if pending.state == "skipped":
                        pending = own.snapshot(trainers.expected(2, SIZE), step=2)
                    pending.wait("durable", timeout=30)
                    own.close()
                code = HOLDS if self._holds_segments() else 0
            except BaseException:
                traceback.print_exc(file=sys.stderr)
            finally:
                os._exit(code)

        return act

    def _holds_segments(self) -> bool:
        """Return True if this process has mapped or opened a segment.

        Segments that a recovery was reading during the fork do not count.
        """
        if self._reading:
            return False
        opened = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        mapped = Path("/proc/self/maps").read_text().splitlines()
        held = [one for one in [*mapped, *opened] if str(self._segments) in one]
        print(*held, sep="\n", file=sys.stderr, end="\n" if held else "")
        return bool(held)

    def _threads(self) -> None:
        def work() -> None:
            for _ in range(3):
                self._call("snapshot")
                with suppress(CkptdError):
                    self._call("prepare")

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join(HANG_SECONDS)

    # -- what must hold

    def check(self) -> None:
        """Check that snapshots are sealed and durable again, in every slot, and that
        the newest comes back. Raises Wrong.
        """
        if self.agent.closed:
            with suppress(CkptdError):
                self.agent.close()
            self.agent = Agent(trainers.JOB, socket=self._socket)
        try:
            for _ in range(3):  # more snapshots than there are slots
                self._saved()
            state = trainers.blank(SIZE)
            recovered = self.agent.recover(state)
            if recovered is None or recovered.step != self.step:
                raise Wrong(f"step {self.step} was durable, and {recovered} was recovered")
            trainers.assert_equal(state, recovered.step, SIZE)
        except (CkptdError, AssertionError, TimeoutError) as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error

    def _saved(self) -> None:
        for _ in range(FURTHER):
            step = self._next()
            pending = self.agent.snapshot(trainers.expected(step, SIZE), step=step)
            if pending.state in ("sealed", "durable"):
                pending.wait("durable", timeout=30)
                self._durable.append(step)
                return
            time.sleep(0.02)
        raise Wrong(f"none of {FURTHER} further snapshots was sealed: {pending.error}")


def _carried(error: BaseException | None) -> BaseException | None:
    """Return the exception of a handler that Python has reported and dropped, because it
    came in a destructor.
    """
    return getattr(error, "error", error)


def serve(pipe: Connection, socket: Path, segments: Path, seed: int, stacks: Path) -> None:
    """Try each kind that comes over the pipe, and answer with what is wrong, or "" if
    nothing is.
    """
    os.setpgid(0, 0)  # so that a signal to the group reaches nobody else
    torch.set_num_threads(1)
    logging.disable()
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        trainer = Trainer(socket, segments, seed)
        pipe.send("")
        while True:
            try:
                trainer.attempt(pipe.recv())
                pipe.send("")
            except BaseException as error:
                pipe.send("".join(traceback.format_exception(error)))


class Watched:
    """A trainer process, seen from outside."""

    def __init__(self, place: Home, seed: int) -> None:
        self._stacks = place.path / "stacks"
        self._pipe, theirs = forks.context().Pipe()
        self._process = forks.context().Process(
            target=serve, args=(theirs, place.socket, place.segments, seed, self._stacks)
        )
        self._process.start()
        theirs.close()

    def answer(self) -> str:
        """Return what is wrong, or "" if nothing is."""
        try:
            if self._pipe.poll(HANG_SECONDS):
                said: str = self._pipe.recv()
                return said
        except EOFError:
            return f"the trainer died with {self._process.exitcode}"
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(1)
        return f"it hangs:\n{self._stacks.read_text()}"

    def attempt(self, kind: str) -> str:
        self._pipe.send(kind)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def run(
    count: int, number: int, seconds: float = float("inf"), where: Where = home
) -> tuple[Counter[str], list[str]]:
    """Try `count` interruptions, or as many as fit into `seconds`, from the seed
    `number`. Return what was tried, and what is wrong.
    """
    chance, tried, problems = Random(number), Counter[str](), list[str]()
    with where() as place, running(place, *OPTIONS, environment=BUDGET, forked=True):
        # From here on, so that a busy machine leaves time for one try at least.
        end = time.monotonic() + seconds
        trainer: Watched | None = None
        try:
            while (
                tried.total() < count and time.monotonic() < end and len(problems) < MOST_PROBLEMS
            ):
                if trainer is None:
                    trainer = Watched(place, chance.getrandbits(32))
                    if wrong := trainer.answer():
                        problems.append(f"before anything was interrupted: {wrong}")
                        break
                kind = chance.choice(KINDS)
                tried[kind] += 1
                if wrong := trainer.attempt(kind):
                    problems.append(f"{kind} (try {tried.total()}, seed {number}): {wrong}")
                    trainer.close()
                    trainer = None
        finally:
            if trainer is not None:
                trainer.close()
    return tried, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    places.add_option(parser)
    options = parser.parse_args()
    begun = time.monotonic()
    tried, problems = run(
        options.count, options.seed, 60 * options.minutes, places.where(options.store)
    )
    for kind, times in sorted(tried.items()):
        print(f"{kind:50} {times}")
    print(*problems, sep="\n")
    print(
        f"{tried.total()} interruptions in {time.monotonic() - begun:.0f} s, seed {options.seed}, "
        f"{len(problems)} wrong"
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
