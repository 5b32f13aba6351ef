"""The whole of a plain training loop: recovery, the schedule, SIGTERM and the end, in
one `with`.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType, TracebackType
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptd.agent import default
from ckptd.agent.agent import Agent, link_of
from ckptd.agent.batches import Batches, known
from ckptd.agent.link.interactive import is_interactive
from ckptd.agent.link.rounds import Exchange
from ckptd.agent.pending import Pending
from ckptd.agent.recover.options import OnReshape
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.schedule import Schedule, check_same_agent
from ckptd.agent.threads.interruptible import interruptible
from ckptd.shared.errors import CkptdError, InvalidRequest

T = TypeVar("T")

log = logging.getLogger("ckptd.agent")

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EXIT_CODE = 128 + signal.SIGTERM
_LATEST = 16
"""The number of snapshots among which the newest durable one is looked for."""
_KILLED = re.compile(r"^DataLoader worker .* killed by signal: Terminated")
_DEAD = re.compile(r"^DataLoader worker .* (killed by signal: Terminated|exited unexpectedly)")
_SIGTERM_SECONDS = 1.0
"""The time within which SIGTERM reaches all processes that it is sent to."""


def training(
    state: Any,
    *,
    every: int | str | Schedule,
    agent: Agent | None = None,
    strict: bool = True,
    keep: Sequence[str] = (),
    on_reshape: OnReshape | None = None,
) -> Training:
    """Return the run of a training loop, for a `with` statement.

    with ckptd.training(state, every="10m") as run:
        for step in run.steps(1000):
            loss = train_step()
            run.metrics = {"loss": loss}

    Entering it recovers the newest snapshot into `state`. `run.steps` then yields the
    steps that are left, and takes a snapshot after each step at which one is due, and
    after the last. Leaving it makes the newest snapshot durable and closes the agent.
    All ranks do the same.

    SIGTERM lets the current step end, saves it, and ends the process with exit code
    143. The last line says which step is saved. On several ranks, all of them end after
    the same step. Workers of a `Batches` outlive a SIGTERM to all processes. The death of
    other workers by it does not end the step.

    state: as for `snapshot`.
    every: a number of steps, a time such as "90s", "10m" or "2h", or a `Schedule`.
    agent: the `Agent` to use. Default: the agent of this process.
    strict, keep, on_reshape: as for `recover`.

    Raises InvalidRequest if `every` is none of these, or a Schedule of another agent.
    """
    schedule = every if isinstance(every, Schedule) else _schedule(every, agent)
    check_same_agent(schedule, agent)
    return Training(state, schedule, strict=strict, keep=keep, on_reshape=on_reshape)


def _schedule(every: object, agent: Agent | None) -> Schedule:
    seconds = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smhd])", every) if isinstance(every, str) else None
    try:
        if seconds is not None:
            return Schedule(every_seconds=float(seconds[1]) * _SECONDS[seconds[2]], agent=agent)
        if isinstance(every, int):
            return Schedule(every_steps=every, agent=agent)
    except ValueError:
        pass
    raise InvalidRequest(
        f"every is {every!r}; expected a number of steps from 1 up, a time such as '90s', '10m' or "
        f"'2h', or a Schedule"
    )


_trained: dict[tuple[str, str], weakref.ref[Module]] = {}
"""The models that this process has trained with its own agent, by root and job."""


def check_one_model(given: Agent | None, model: Module | None) -> None:
    """Check that this process does not train a second model in one job: it would go on
    from the snapshots of the first.

    given: the agent that the caller of the training has chosen, for whom nothing is
    checked, or None. Raises InvalidRequest for another model. At the prompt and in a
    notebook, where a cell may make its model again, warns instead.
    """
    if given is not None or model is None:
        return
    agent = default.default_agent("training")
    first = _trained.setdefault((agent.root, agent.job), weakref.ref(model))
    if first() is model:
        return
    if is_interactive():
        log.warning(
            "job %r goes on with another model in this process; for another training, restart the "
            "kernel with another CKPTD_JOB, or give each training an agent=ckptd.Agent(NAME)",
            agent.job,
        )
        return
    raise InvalidRequest(
        f"this process has trained another model in job {agent.job!r}, whose snapshots would be "
        f"loaded into this one: give each training an agent of its own, such as "
        f"agent=ckptd.Agent({agent.job + '-2'!r})"
    )


class Training:
    """The run of a training loop, made by `training`.

    recovered: the snapshot that was recovered, or None at the very first start. step: the
    step that runs, or the last one that has run or was recovered, or -1 before the first.
    It has a value behind the loop even if no step was left, when the variable of the
    loop has none. pending: the `Pending` of the last snapshot, or None. metrics: numbers
    of this step by name, which are saved if a snapshot is taken after it.
    """

    def __init__(self, state: Any, schedule: Schedule, **options: Any) -> None:
        self.recovered: Recovered | None = None
        self.step = -1
        self.pending: Pending | None = None
        self.metrics: dict[str, float] = {}
        self._state, self._schedule = state, schedule
        self._given = schedule.agent
        self._options = options
        self._next = self._rank = 0
        self._total: int | None = None  # of the loop that runs, 0 after it, None before it
        self._entered = self._stop = False
        self._terminated = False
        self._handler: Any = None
        self._ranks: _StopStep | None = None
        self._taken: deque[Pending] = deque(maxlen=_LATEST)
        self._workers = _LoaderWorkers(lambda: self._terminated)
        self._watch = _Watch()

    def __enter__(self) -> Training:
        """Recover, and take over SIGTERM, if this is the main thread.

        Raises the errors of `Agent` and `recover`.
        """
        agent = self._given or default.default_agent("training")
        for model in islice(_found_in(self._state, Module), 1):
            check_one_model(self._given, model)
        self.recovered = agent.recover(self._state, **self._options)
        if self.recovered is not None:
            if self.recovered.step < 0:
                raise InvalidRequest(
                    f"the checkpoint {self.recovered.tag} has no step, from which the training "
                    f"could go on: recover it with ckptd.recover(), and count the steps yourself"
                )
            self.step = self.recovered.step
            self._next = self.step + 1
        ranks = link_of(agent).ranks
        if isinstance(ranks, Exchange):
            self._ranks = _StopStep(ranks.new_client(), f"{agent.job}/stop/{agent.attempt}")
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        self._rank = agent.rank
        self._entered = True
        self._watch.begin(self._state)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Make the newest snapshot durable, and close the agent.

        Raises the errors of `close`, unless the loop itself has raised one.
        """
        self._entered = False
        preempted = False
        self._watch.end()
        if kind is None:
            self._warn_of_early_end()
        close: Callable[[], None] = default.close if self._given is None else self._given.close
        try:
            preempted = self._terminated and self._ends_without_workers(error)
            close()
        except CkptdError as failure:
            if kind is None:
                raise
            log.error("the newest snapshot could not be made durable: %s", failure)
        finally:
            self._put_handlers_back()
        if preempted or (self._terminated and isinstance(error, SystemExit)):
            log.warning("SIGTERM: %s", self._what_is_saved())
        if preempted:
            raise SystemExit(_EXIT_CODE) from error

    @property
    def next_step(self) -> int:
        """The step that `steps` yields next."""
        return self._next

    def steps(self, total: int) -> Iterator[int]:
        """Yield the steps from the first that is not saved yet to `total - 1`.

        The code after the `yield`, the body of the loop, is one step of training. A
        step ends when the next one is asked for: the snapshots are taken then. Call
        `stop` to end early; a step that is left by `break` is not saved.

        Raises InvalidRequest outside the `with` statement, and if `total` is not an
        integer from 1 up. Raises SystemExit after SIGTERM.
        """
        if isinstance(total, bool) or not isinstance(total, int) or total < 1:
            raise InvalidRequest(f"the number of steps is {total!r}; expected a number from 1 up")
        if not self._entered:
            raise InvalidRequest(
                "steps() is called outside the with statement: write `with ckptd.training(...) as "
                "run:` around the loop"
            )
        return self._steps(total)

    def _steps(self, total: int) -> Iterator[int]:
        if self._next >= total:
            log.warning("nothing is left to do: step %d of %d is saved", self._next - 1, total)
        elif self.recovered is not None and self._total is None and self._rank == 0:
            # A warning, because Python shows nothing below it by default.
            log.warning(
                "the run goes on with step %d of %d: step %d was recovered from %s",
                self._next,
                total,
                self.recovered.step,
                self.recovered.source,
            )
        self._total = total
        self._watch.check_order()
        while self._next < total:
            if self._handler is not None:  # on the main thread
                self._workers.watch()
            self.step = self._next
            yield self._next
            step, self._next = self._next, self._next + 1
            ends = self._ends_at(step)
            self._snapshot(step, last=ends or self._next == total)
            self.metrics = {}
            if self._terminated and ends:
                raise SystemExit(_EXIT_CODE)
            if ends:
                self._stop = False
                break
        self._total = 0

    def _ends_without_workers(self, error: BaseException | None) -> bool:
        """Return True if SIGTERM has ended the workers of a loader that was asked for a
        batch of the next step, and take a snapshot of the step before.

        All ranks that train together end up here, if their loaders have given the same
        number of batches.
        """
        done = self._next - 1
        if not isinstance(error, RuntimeError) or not _DEAD.search(str(error)):
            return False
        if self._watch.stepped or done < 0:  # the state is that of no step
            return False
        log.warning("SIGTERM has ended the workers of a DataLoader too: %s", error)
        newest = self.pending or self.recovered
        if newest is None or newest.step != done:
            self._snapshot(done, last=True)
        return True

    def _put_handlers_back(self) -> None:
        self._workers.end()
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)

    def _what_is_saved(self) -> str:
        """Return a sentence that says which step is durable after SIGTERM."""
        last = self._next - 1
        durable = [pending.step for pending in self._taken if pending.state == "durable"]
        if not durable and self.recovered is not None:
            durable = [self.recovered.step]
        newest = f"step {durable[-1]} is the newest that is" if durable else "no step is"
        if durable and durable[-1] == last:
            return f"step {last} is saved, and is the last one of this process"
        why = self.pending.error if self.pending is not None and self.pending.step == last else None
        return f"step {last}, the last one of this process, is not saved: {why}; {newest}"

    def _warn_of_early_end(self) -> None:
        """Warn if the loop has not come to the end of its steps."""
        if self._total is None:
            log.warning(
                "nothing was saved: run.steps() was not called inside the with statement; write "
                "`for step in run.steps(N):` around the training"
            )
        elif self._total:
            newest = self.pending or self.recovered
            log.warning(
                "the loop was left in step %d of %d, which is not saved: %s; to end early, call "
                "run.stop(), and for a loader that ends before the steps do, use "
                "ckptd.Batches(loader)",
                self._next,
                self._total,
                "no step is" if newest is None else f"step {newest.step} is the newest",
            )

    def stop(self) -> None:
        """End `steps` after the current step, on all ranks, and save that step."""
        self._stop = True

    def _snapshot(self, step: int, *, last: bool) -> None:
        due = self._schedule.due(step)  # also at the last step: the ranks decide it together
        taken: Pending | None = None
        if last:
            take = default.snapshot if self._given is None else self._given.snapshot
            # After the loop, the caller may put averaged weights into the parameters.
            taken = take(self._state, step=step, metrics=self.metrics or None, hold="now")
        elif due:
            taken = self._schedule.snapshot(self._state, step=step, metrics=self.metrics or None)
        if taken is not None:
            self.pending = taken
            self._taken.append(taken)
            self._watch.saved(step)
        self._watch.next_step()

    def _ends_at(self, step: int) -> bool:
        """Return True if the run ends after this step, on all ranks."""
        wanted = self._stop or self._terminated
        if self._ranks is None:
            return wanted
        ends = self._ranks.ends_at(step, wanted=wanted, signalled=self._terminated)
        self._terminated |= self._ranks.signalled
        return ends

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True
        log.warning("SIGTERM: the run ends after this step")


class _LoaderWorkers:
    """The workers of any DataLoader, whose death by the SIGTERM of a preemption must not
    end the step that is to be saved.

    The handler of SIGCHLD that a DataLoader has set raises RuntimeError then, anywhere in
    the step, which has its batch already. `ckptd.Batches` keeps its workers alive.

    terminated: returns True once this process has got SIGTERM itself.
    """

    def __init__(self, terminated: Callable[[], bool]) -> None:
        self._terminated = terminated
        self._before: Any = None

    def watch(self) -> None:
        """Take the place of the handler of SIGCHLD, if there is one."""
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._on_child:
            self._before = handler
            signal.signal(signal.SIGCHLD, self._on_child)

    def end(self) -> None:
        """Put the handler back, unless another one was set since."""
        if self._before is not None and signal.getsignal(signal.SIGCHLD) == self._on_child:
            signal.signal(signal.SIGCHLD, self._before)

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before(number, frame)
        except RuntimeError as error:
            if not _KILLED.search(str(error)):
                raise
            # A worker may get its signal before this process, whose handler runs inside
            # this wait.
            deadline = time.monotonic() + _SIGTERM_SECONDS
            while not self._terminated() and time.monotonic() < deadline:
                time.sleep(0.01)
            if not self._terminated():
                raise
            log.warning("SIGTERM has ended a worker of a DataLoader too: %s", error)


class _Watch:
    """Looks for mistakes in a loop that would make a recovered run another one.

    stepped: True if an optimizer has stepped in the step that runs.
    """

    def __init__(self) -> None:
        self._batches: list[Batches] = []
        self._before: list[int] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.stepped = False
        self._said: set[str] = set()
        self._hook: Any = None

    def begin(self, state: Any) -> None:
        self._batches = list(_found_in(state, Batches))
        self._before = [one.drawn for one in self._batches]
        self._hook = register_optimizer_step_post_hook(self._note)

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        self._optimizers.add(optimizer)
        self.stepped = True

    def check_order(self) -> None:
        """Raise InvalidRequest if a batch was drawn before the first step."""
        if self._before != [one.drawn for one in self._batches]:
            raise InvalidRequest(
                "a batch was drawn before the first step, which would shift the position that is "
                "saved: write `zip(run.steps(N), batches)`, with run.steps first"
            )

    def next_step(self) -> None:
        self.stepped = False

    def saved(self, step: int) -> None:
        """Warn of what the snapshot of this step lacks."""
        if any(one.drawn and not one.saved for one in known):
            self._say(
                "a ckptd.Batches is used that is not part of the state: its position is not saved, "
                'and a recovered run begins its data again; add it, as in {"data": batches}'
            )
        if self._optimizers and not self.stepped and any(map(_has_gradients, self._optimizers)):
            self._say(
                "no optimizer has stepped in step %d, which is saved, and gradients are not: a "
                "recovered run loses those that are accumulated; let one step of run.steps() be "
                "one step of the optimizer",
                step,
            )

    def _say(self, sentence: str, *arguments: object) -> None:
        """Log a warning once."""
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning(sentence, *arguments)


def _found_in(state: Any, kind: type[T]) -> Iterator[T]:
    """Yield the objects of a kind in the containers of a state, each once."""
    left, seen = [state], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:  # a container may hold itself, which `snapshot` refuses
            continue
        seen.add(id(one))
        if isinstance(one, kind):
            yield one
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, (list, tuple)):
            left += one


def _has_gradients(optimizer: Optimizer) -> bool:
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    return any(parameter.grad is not None for parameter in parameters)


class _StopStep:
    """The step after which all ranks end, agreed under one key of the job's store.

    A rank that wants to end writes the number of its next step before it begins that
    step. Ranks that train together cannot end that step before this rank takes part in
    it, so that they read the number in time. Ranks that are further, because they do
    not wait for each other, end at once, each at its own step.

    signalled: True if the end was asked for by a signal.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store: Store | None = store
        self._key = key
        self._asked = False
        self.signalled = False

    @interruptible
    def ends_at(self, step: int, *, wanted: bool, signalled: bool) -> bool:
        """Return True if the ranks end after this step.

        Each rank calls this at the end of each step. `wanted` says that this rank wants
        to end. If the store does not answer, each rank decides for itself from then on.
        """
        if self._store is None:
            return wanted
        try:
            if wanted and not self._asked:
                self._asked = True
                self._store.compare_set(self._key, "", f"{step + 1} {int(signalled)}")
            if not self._store.check([self._key]):
                return False
            last, by_signal = self._store.get(self._key).split()
        except RuntimeError as error:
            log.warning("the ranks cannot agree on the step after which they end: %s", error)
            self._store = None
            return wanted
        self.signalled = by_signal == b"1"
        return step >= int(last)
