"""When to snapshot: every so many steps, every so many seconds, or as often as pays.

Seconds become steps on rank 0 alone. All ranks know at which step they hear the next word from it: whether there is a snapshot now, whether
it goes to storage, and at which step to ask again; about once for every halving of the time that is left. Between those nothing is asked.
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
from ckptd.agent.agent import Agent
from ckptd.agent.pending import Pending
from ckptd.agent.threads.call_lock import CallLock, Nested
from ckptd.shared.errors import CkptdError

log = logging.getLogger("ckptd.agent")

_AWAY_SECONDS = 60.0
"""Until a store that has not answered is asked again."""
_AGAIN_SECONDS = 30.0
"""Between snapshots of which none has succeeded yet, so that it is not known what they cost."""


def best_interval(cost: float, mtbf: float) -> float:
    """Seconds of training between two saves that hold it for `cost` seconds each, so that least is lost to saving and failing.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), equation 37; its first term
    is J. W. Young's of 1974.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


class Word(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 says at a step: snapshot now? to storage? when to ask again."""

    due: bool
    persist: bool
    again: int


class Pace:
    """Of rank 0: makes steps of seconds. `interval` may change from call to call; None: a snapshot at once, to learn what it costs."""

    def __init__(self, persist_every: int) -> None:
        self._persist_every = persist_every
        self._taken = 0
        self._before: tuple[int, float] | None = None  # step and time of the last decision
        self._last = (0, 0.0)  # of the last snapshot that was due, or of the first decision

    def decide(self, step: int, now: float, interval: float | None, *, busy: bool = False) -> Word:
        """`busy`: nothing is due as long as what was saved last is still under way."""
        if self._before is None:
            self._before = self._last = step, now
            due, ahead = interval is None and not busy, 1
        else:
            seen, waited = step - self._last[0], now - self._last[1]
            per_step = max(waited / seen, (now - self._before[1]) / (step - self._before[0]), 1e-9)
            due = not busy and (interval is None or waited + per_step / 2 >= interval)
            left = 0.0 if interval is None else interval if due else interval - waited
            ahead = int(max(1.0, min(left / per_step / 2, 2.0 * seen)))  # a few steps do not tell how long a thousand take
            self._before = step, now
        if due:
            self._last, self._taken = (step, now), self._taken + 1
        return Word(due, due and self._taken % self._persist_every == 0, step + ahead)


class Schedule:
    """`Schedule(every_steps=500)`, `Schedule(every_seconds=600)`, or `Schedule("auto", mtbf=6 * 3600)`.

    every_steps: at steps that are multiples of it. every_seconds: that long after the last, or after the first step that is asked about.
    "auto": as often as least is lost to saving and failing, by what snapshots have held the training for and `mtbf`, the mean seconds
    between two failures of the whole job; never while the one before is still being saved.
    persist_every: each n-th of its snapshots goes to storage, the others stay in memory. agent: else the one of this process.

    Every rank asks about every step that it has trained, with a schedule that was made alike; ranks always agree. Raises ValueError.
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
            raise ValueError(f'the mode is {mode!r}; expected "auto", every_steps= or every_seconds=')
        if sum(given is not None for given in (mode, every_steps, every_seconds)) != 1:
            raise ValueError('a schedule is every_steps=, every_seconds= or "auto": give exactly one of them')
        if (mode is None) != (mtbf is None):
            raise ValueError('mtbf, the mean seconds between two failures of the job, goes with "auto", and "auto" with it')
        self._every_steps = None if every_steps is None else _whole("every_steps", every_steps)
        self._every_seconds = None if every_seconds is None else _seconds("every_seconds", every_seconds)
        self._mtbf = None if mtbf is None else _seconds("mtbf", mtbf)
        self._persist_every = _whole("persist_every", persist_every)
        self._given = agent
        self._calls = CallLock()
        self._agent: Agent | None = None  # the one that `_word` and all below it are about
        self._begin(None)

    def _begin(self, agent: Agent | None) -> None:
        """Ranks count anew in each attempt."""
        if agent is not None and agent is not self._agent:
            agent.schedules += 1
            self._number = agent.schedules
        self._agent, self._attempt = agent, 0 if agent is None else agent.attempt
        self._word, self._about = Word(False, False, 0), -1
        self._heard, self._again, self._not_before = 0, 0, 0.0
        self._pace = Pace(self._persist_every)
        self._stalls: deque[float] = deque(maxlen=5)
        self._saving: Pending | None = None
        self._asked = False

    def _current(self) -> Agent:
        agent = self._given or default.default_agent()
        if agent is not self._agent or agent.attempt != self._attempt:
            self._begin(agent)
        return agent

    @property
    def interval(self) -> float | None:
        """Seconds between two snapshots; None if that goes by steps, or is not known yet. Of "auto", on rank 0."""
        if self._mtbf is None:
            return self._every_seconds
        return best_interval(statistics.median(self._stalls), self._mtbf) if self._stalls else None

    def due(self, step: int) -> bool:
        """Return True if a snapshot is due after this step, the same on all ranks. Ask about every step.

        Raises Busy inside another call of this thread, as in a signal handler: what ranks have agreed on must not change under it.
        """
        with self._calls("due"):
            return self._due(step)

    def _due(self, step: int) -> bool:
        if self._every_steps is not None:
            self._word = Word(step % self._every_steps == 0, step // self._every_steps % self._persist_every == 0, 0)
            return self._word.due
        try:
            agent = self._current()
        except Nested:
            raise
        except CkptdError:
            self._word = Word(True, True, 0)  # so that the snapshot says what is wrong
            return True
        if step != self._about:
            self._word, self._about = self._ask(agent, step), step
        return self._word.due

    def snapshot(self, state: Any, *, step: int, **options: Any) -> Pending | None:
        """`Agent.snapshot` of what is due after this step, with its `options`; None if nothing is."""
        try:
            if not self.due(step):
                return None
        except Nested as error:
            failed = Pending(step)
            failed.fail(error)
            return failed
        take = self._given.snapshot if self._given is not None else default.snapshot
        pending = take(state, step=step, persist=self._word.persist, **options)
        if pending.state not in ("failed", "skipped"):
            self._stalls.append(pending.stall)
            self._saving = pending if pending.persist else self._saving
        return pending

    def _ask(self, agent: Agent, step: int) -> Word:
        nothing = Word(False, False, 0)
        if agent.closed:
            return Word(True, True, 0)  # as above
        if step < self._again or time.monotonic() < self._not_before:
            return nothing
        while True:
            topic, late = f"schedule/{self._attempt}/{self._number}/{self._heard}", self._about >= self._again
            try:
                heard = agent.hear(topic, lambda: self._decide(step), late=late)
            except Nested:
                raise
            except CkptdError as error:
                log.warning("step %d: whether a snapshot is due cannot be told: %s", step, error)
                self._not_before = time.monotonic() + _AWAY_SECONDS
                return nothing
            if heard is None:
                return nothing
            said_at, word = msgspec.msgpack.decode(heard, type=tuple[int, Word])
            self._heard, self._again = self._heard + 1, word.again
            if said_at == step:
                return word
            if step < word.again:  # that snapshot is missed; else what has been said since is there already, or about to be said
                return nothing

    def _decide(self, step: int) -> bytes:
        interval = self.interval
        if interval is None and self._asked:
            interval = _AGAIN_SECONDS
        self._asked = True
        busy = self._mtbf is not None and self._saving is not None and not self._saving.done
        return msgspec.msgpack.encode((step, self._pace.decide(step, time.monotonic(), interval, busy=busy)))


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a number from 1 up")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; expected seconds, more than 0")
    return float(value)
