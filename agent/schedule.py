"""Decides after which steps to snapshot: every n steps, every n seconds, or as often as
is worth the cost.

Rank 0 alone converts seconds to steps. Its decision, a `Word`, says whether a snapshot
is due now, whether the snapshot goes to storage, and at which step all ranks ask again.
That step lies about halfway to the next snapshot, so the ranks communicate about once
for each halving of the time that is left. Between those steps they exchange nothing.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from typing import Any

import msgspec

from ckptd.agent import default
from ckptd.agent.agent import Agent, link_of
from ckptd.agent.pending import Pending, PendingSnapshot
from ckptd.agent.threads.call_lock import CallLock, Nested
from ckptd.shared.errors import CkptdError, InvalidRequest
from ckptd.shared.interval import best_interval

log = logging.getLogger("ckptd.agent")

_AWAY_SECONDS = 60.0
"""Seconds until a store that has not answered is asked again."""
_AGAIN_SECONDS = 30.0
"""Seconds between two snapshots in "auto" mode while their cost is unknown, because
none has succeeded yet.
"""


class Word(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0 at one step.

    `due` is True if a snapshot is due now. `persist` is True if that snapshot goes to
    storage. `again` is the step at which to ask again.
    """

    due: bool
    persist: bool
    again: int


class Pace:
    """The pace of the snapshots, kept by rank 0: it converts the interval from seconds
    to steps.

    Every `persist_every`-th snapshot that is due goes to storage.
    """

    def __init__(self, persist_every: int) -> None:
        self._persist_every = persist_every
        self._taken = 0
        self._before: tuple[int, float] | None = None  # step and time of the last decision
        # Step and time of the last snapshot that was due, or of the first decision.
        self._last = (0, 0.0)

    def decide(self, step: int, now: float, interval: float | None, *, busy: bool = False) -> Word:
        """Return the decision at `step`.

        `now` is the time in seconds, of a monotonic clock.

        `interval` is the number of seconds between two snapshots, and may change from
        call to call. None makes a snapshot due at once, to measure its cost. `busy` is
        True while the last save is still under way: then no snapshot is due.
        """
        if self._before is None:
            self._before = self._last = step, now
            due, ahead = interval is None and not busy, 1
        else:
            seen, waited = step - self._last[0], now - self._last[1]
            per_step = max(waited / seen, (now - self._before[1]) / (step - self._before[0]), 1e-9)
            due = not busy and (interval is None or waited + per_step / 2 >= interval)
            left = 0.0 if interval is None else interval if due else interval - waited
            # Limited by the steps seen so far, since a few steps do not show how long a
            # thousand will take.
            ahead = int(max(1.0, min(left / per_step / 2, 2.0 * seen)))
            self._before = step, now
        if due:
            self._last, self._taken = (step, now), self._taken + 1
        return Word(due, due and self._taken % self._persist_every == 0, step + ahead)


class Schedule:
    """A schedule that decides after which steps to snapshot.

    Make it in one of three ways: `Schedule(every_steps=500)`,
    `Schedule(every_seconds=600)`, or `Schedule("auto", mtbf=6 * 3600)`. Then call
    `snapshot` or `due` after every step, on every rank, with a schedule that was made
    with the same arguments. The clock of rank 0 decides. A rank that does not get the
    decision within the stall budget misses that snapshot, and takes part again in the
    next one.

    every_steps: an integer from 1. A snapshot is due at each step that is a multiple of
        it.
    every_seconds: seconds, more than 0. A snapshot is due that long after the last one
        that was due. The first is due that long after the first step that is asked
        about.
    mode: "auto" chooses the interval that loses the least time to saves and failures.
        It takes the median of the time for which the last five snapshots have held the
        training. The first snapshot is due at once. None is due while the last one that
        goes to storage is still being saved.
    mtbf: seconds, more than 0: the mean time between two failures of the whole job.
        Goes with "auto" only, which needs it.
    persist_every: an integer from 1, by default 1. Each n-th snapshot that is due goes
        to storage; the others stay in memory.
    agent: the `Agent` that takes the snapshots. Default: the agent of this process,
        which the function `snapshot` also uses.

    Raises ValueError if the arguments are invalid, or do not choose exactly one of the
    three ways.
    """

    def __init__(
        self,
        mode: str | None = None,
        /,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        persist_every: int = 1,
        mtbf: float | None = None,
        agent: Agent | None = None,
    ) -> None:
        if mode not in (None, "auto"):
            raise ValueError(
                f'the mode is {mode!r}; expected "auto", every_steps= or every_seconds='
            )
        if sum(given is not None for given in (mode, every_steps, every_seconds)) != 1:
            raise ValueError(
                'a schedule is every_steps=, every_seconds= or "auto": give exactly one of them'
            )
        if (mode is None) != (mtbf is None):
            raise ValueError(
                'mtbf=, the mean seconds between two failures of the job, and "auto" must be '
                "given together"
            )
        self._every_steps = None if every_steps is None else _whole("every_steps", every_steps)
        self._every_seconds = (
            None if every_seconds is None else _seconds("every_seconds", every_seconds)
        )
        self._mtbf = None if mtbf is None else _seconds("mtbf", mtbf)
        self._persist_every = _whole("persist_every", persist_every)
        self.agent = agent
        self._calls = CallLock()
        self._agent: Agent | None = None  # the agent that everything set in `_begin` belongs to
        self._begin(None)

    def _begin(self, agent: Agent | None) -> None:
        """Start over, for another agent or the next attempt."""
        if agent is not None and agent is not self._agent:
            link = link_of(agent)
            link.schedules += 1
            self._number = link.schedules
        self._agent, self._attempt = agent, 0 if agent is None else agent.attempt
        self._word, self._about = Word(False, False, 0), -1
        self._heard = 0
        self._again = 0
        self._not_before = 0.0
        self._pace = Pace(self._persist_every)
        self._stalls: deque[float] = deque(maxlen=5)
        self._saving: Pending | None = None
        self._asked = False

    def _current(self) -> Agent:
        agent = self.agent or default.default_agent()
        if agent is not self._agent or agent.attempt != self._attempt:
            self._begin(agent)
        return agent

    @property
    def interval(self) -> float | None:
        """The seconds between two snapshots; None with `every_steps`, or if the
        interval is not known yet.

        With "auto", each rank has its own value, and that of rank 0 counts. It is known
        once a snapshot has been taken.
        """
        if self._mtbf is None:
            return self._every_seconds
        return best_interval(statistics.median(self._stalls), self._mtbf) if self._stalls else None

    def due(self, step: int) -> bool:
        """Return True if a snapshot is due after this step.

        Call this after every step, on every rank.

        All ranks get the same answer, except a rank that does not get the decision of
        rank 0 in time: it gets False. If there is no usable agent, this returns True,
        so that `snapshot` reports the reason.

        Raises Busy inside another call of this thread, for example in a signal handler:
        the decision must not change while the interrupted call uses it.
        """
        with self._calls("due"):
            return self._due(step)

    def _due(self, step: int) -> bool:
        if self._every_steps is not None:
            self._word = Word(
                step % self._every_steps == 0,
                step // self._every_steps % self._persist_every == 0,
                0,
            )
            return self._word.due
        try:
            agent = self._current()
        except Nested:
            raise
        except CkptdError:
            self._word = Word(True, True, 0)  # so that `snapshot` reports the reason
            return True
        if step < self._about and agent.world_size == 1:
            self._begin(agent)  # a notebook runs its loop again
        if step != self._about:
            self._word, self._about = self._ask(agent, step), step
        return self._word.due

    def snapshot(self, state: Any, *, step: int, **options: Any) -> Pending | None:
        """Take a snapshot if one is due after this step.

        Return its `Pending`, or None if no snapshot is due.

        `options` are those of `Agent.snapshot`, except `persist`, which the schedule
        decides. Like `Agent.snapshot`, this never raises because a save failed. Inside
        another call of this thread, the returned `Pending` has failed with Busy.
        """
        try:
            if not self.due(step):
                return None
        except Nested as error:
            failed = PendingSnapshot(step)
            failed.fail(error)
            return Pending(failed)
        take = self.agent.snapshot if self.agent is not None else default.snapshot
        pending = take(state, step=step, persist=self._word.persist, **options)
        if pending.state not in ("failed", "skipped"):
            self._stalls.append(pending.stall)
            self._saving = pending if pending.persist else self._saving
        return pending

    def _ask(self, agent: Agent, step: int) -> Word:
        nothing = Word(False, False, 0)
        if agent.closed:
            return Word(True, True, 0)  # so that `snapshot` reports that the agent is closed
        if step < self._again or time.monotonic() < self._not_before:
            return nothing
        while True:
            topic, late = (
                f"schedule/{self._attempt}/{self._number}/{self._heard}",
                self._about >= self._again,
            )
            try:
                heard = link_of(agent).broadcast(topic, lambda: self._decide(step), late=late)
            except Nested:
                raise
            except CkptdError as error:
                log.warning("step %d: cannot decide whether a snapshot is due: %s", step, error)
                self._not_before = time.monotonic() + _AWAY_SECONDS
                return nothing
            if heard is None:
                return nothing
            said_at, word = _DECODER.decode(heard)
            self._heard, self._again = self._heard + 1, word.again
            if said_at == step:
                return word
            # This rank is late: the decision is for an earlier step, and its snapshot
            # is missed. If the ranks ask again at this step or earlier, the next
            # decision is in the store already, or rank 0 is about to make it.
            if step < word.again:
                return nothing

    def _decide(self, step: int) -> bytes:
        interval = self.interval
        if interval is None and self._asked:
            interval = _AGAIN_SECONDS
        self._asked = True
        busy = self._mtbf is not None and self._saving is not None and not self._saving.done
        return msgspec.msgpack.encode(
            (step, self._pace.decide(step, time.monotonic(), interval, busy=busy))
        )


def check_same_agent(schedule: Schedule, agent: Agent | None) -> None:
    """Raise InvalidRequest if `agent` is given, and the schedule has another one."""
    if agent is not None and schedule.agent is not agent:
        raise InvalidRequest(
            "the schedule takes its snapshots with another agent: give the agent to it, as in "
            "Schedule(every_seconds=600, agent=agent)"
        )


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a number from 1 up")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; expected a finite number of seconds above 0")
    return float(value)


_DECODER = msgspec.msgpack.Decoder(tuple[int, Word])
