"""Decides after which steps to snapshot, and which snapshots go to storage: every n
steps, every n seconds, or as often as is worth the cost.

Rank 0 alone converts seconds to steps. Its decision, a `Word`, says whether a snapshot
is due now, whether the snapshot goes to storage, and at which step all ranks ask again.
That step lies about halfway to the next snapshot, so the ranks communicate about once
for each halving of the time that is left. Between those steps they exchange nothing.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec

from ckptd.agent import default
from ckptd.agent.agent import Agent, link_of
from ckptd.agent.pending import Pending, PendingSnapshot
from ckptd.agent.threads.call_lock import CallLock, Nested
from ckptd.shared.errors import CkptdError, InvalidRequest
from ckptd.shared.interval import (
    THIRD_SLOT,
    Costs,
    Failures,
    Intervals,
    choose,
    share_of_time,
)

log = logging.getLogger("ckptd.agent")

_AWAY_SECONDS = 60.0
"""Seconds until a store that has not answered is asked again."""
_AGAIN_SECONDS = 30.0
"""Seconds between two snapshots in "auto" mode while their cost is unknown, because
none has become durable yet.
"""
_MEASURED = 5
"""The number of the last snapshots whose costs count in "auto" mode."""
_QUIET_STEPS = 4
"""Steps between two saves while it is not known how much a save slows the steps beside
it. Those without a save show how long a step usually takes.
"""
_TOLD = 1.5
"""A choice is logged again when an interval has changed by this factor."""


class Word(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0 at one step.

    `due` is True if a snapshot is due now. `persist` is True if that snapshot goes to
    storage. `again` is the step at which to ask again. `replicate` is True if that
    snapshot is copied to the memory of other nodes.
    """

    due: bool
    persist: bool
    again: int
    replicate: bool = True


class Pace:
    """The pace of the snapshots, kept by rank 0: it converts the interval from seconds
    to steps.

    step: the median of the seconds that the last steps took, or 0.0 if that is not
    known yet.
    """

    def __init__(self) -> None:
        self._before: tuple[int, float] | None = None  # step and time of the last decision
        # Step and time of the last snapshot that was due, or of the first decision.
        self._last = (0, 0.0)
        self._in_memory = 0  # the snapshots since the last one that went to storage
        self._not_copied = 0  # the snapshots since the last one that went to other nodes
        self._steps: deque[float] = deque(maxlen=9)

    @property
    def step(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0

    def decide(
        self,
        step: int,
        now: float,
        interval: float | None,
        *,
        every: int = 1,
        copy_every: int = 1,
        beside: int | None = None,
    ) -> Word:
        """Return the decision at `step`.

        `now` is the time in seconds, of a monotonic clock.

        `interval` is the number of seconds between two snapshots, and may change from
        call to call. None makes a snapshot due at once, to measure its cost. Each
        `every`-th snapshot goes to storage, and each `copy_every`-th one to the memory
        of other nodes.

        `beside` is None unless the last save is still under way. Then it is the number
        of snapshots that fit into memory beside that save. Further ones are not due,
        and none goes to storage.
        """
        fits = beside is None or self._in_memory < beside
        if self._before is None:
            self._before = self._last = step, now
            due, ahead = interval is None and fits, 1
        else:
            seen, waited = step - self._last[0], now - self._last[1]
            per_step = max((now - self._before[1]) / (step - self._before[0]), 1e-9)
            self._steps.append(per_step)
            per_step = max(waited / seen, per_step)
            due = fits and (interval is None or waited + per_step / 2 >= interval)
            left = 0.0 if interval is None else interval if due else interval - waited
            # Limited by the steps seen so far, since a few steps do not show how long a
            # thousand will take.
            ahead = int(max(1.0, min(left / per_step / 2, 2.0 * seen)))
            self._before = step, now
        persist = due and beside is None and self._in_memory + 1 >= every
        replicate = due and self._not_copied + 1 >= copy_every
        if due:
            self._last = step, now
            self._in_memory = 0 if persist else self._in_memory + 1
            self._not_copied = 0 if replicate else self._not_copied + 1
        return Word(due, persist, step + ahead, replicate)


class Measurements:
    """The costs of the last snapshots, as far as this rank knows them."""

    def __init__(self) -> None:
        self._to_memory: deque[Pending] = deque(maxlen=_MEASURED)
        self._to_storage: deque[Pending] = deque(maxlen=_MEASURED)

    def add(self, pending: Pending) -> None:
        (self._to_storage if pending.persist else self._to_memory).append(pending)

    @property
    def saving(self) -> bool:
        """True while the last snapshot that goes to storage is being saved."""
        return bool(self._to_storage) and not self._to_storage[-1].done

    @property
    def costs(self) -> Costs | None:
        """The medians, or None until a snapshot has become durable."""
        saved = [one for one in self._to_storage if one.durable_seconds is not None]
        if not saved:
            return None
        held = [max(one.stall, one.lost_seconds or 0.0) for one in self._to_memory]
        lost = [one.lost_seconds for one in saved if one.lost_seconds is not None]
        return Costs(
            held=statistics.median_low(held or [one.stall for one in saved]),
            durable=statistics.median_low(one.durable_seconds or 0.0 for one in saved),
            lost=statistics.median_low(lost) if lost else None,
        )


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
    mode: "auto" chooses the interval, and which snapshots go to storage, so that the
        least time is lost to saves and failures. It uses the medians of what the last
        five snapshots have cost: the time for which they have held the training, the
        time that the steps beside a save have lost, and the time until they were
        durable. The first snapshot is due at once, and goes to storage. Until the cost
        of a save is measured, all go to storage. The choice is logged, and `choice`
        returns it.
    mtbf: seconds, more than 0: the mean time between two failures of the whole job, of
        any kind. Goes with "auto" only, which needs it.
    mtbf_node: seconds, at least `mtbf`: the mean time between two failures of the job
        that lose the memory of a node. After the others, a snapshot in memory is
        enough. If it is not given, snapshots are taken to memory as if no failure lost
        a node, and to storage as if each did.
    persist_every: an integer from 1. Each n-th snapshot that is due goes to storage;
        the others stay in memory. Default: 1, or with "auto" as it chooses.
    replicate_every: an integer from 1. Each n-th snapshot that is due is copied to the
        memory of other nodes, if the daemons are set to make copies. Default: 1.
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
        persist_every: int | None = None,
        replicate_every: int | None = None,
        mtbf: float | None = None,
        mtbf_node: float | None = None,
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
        self._failures = _failures(mtbf, mtbf_node)
        self._persist_every = (
            None if persist_every is None else _whole("persist_every", persist_every)
        )
        self._replicate_every = (
            None if replicate_every is None else _whole("replicate_every", replicate_every)
        )
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
        self._pace = Pace()
        self._measured = Measurements()
        self._choice: Intervals | None = None
        self._told: Intervals | None = None  # the choice that was logged last
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

        With "auto", rank 0 alone knows it, once a snapshot has become durable.
        """
        if self._failures is None:
            return self._every_seconds
        return None if self._choice is None else self._choice.interval

    @property
    def choice(self) -> Intervals | None:
        """With "auto", the present choice: the intervals, the costs that they follow
        from, and the share of the time that is expected to be lost.

        None until a snapshot has become durable, on other ranks than rank 0, and
        without "auto".
        """
        return self._choice

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
                step // self._every_steps % (self._persist_every or 1) == 0,
                0,
                step // self._every_steps % (self._replicate_every or 1) == 0,
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
        decides, and `replicate` if it has `replicate_every`. Like `Agent.snapshot`, this
        never raises because a save failed. Inside another call of this thread, the
        returned `Pending` has failed with Busy.
        """
        try:
            if not self.due(step):
                return None
        except Nested as error:
            failed = PendingSnapshot(step)
            failed.fail(error)
            return Pending(failed)
        if self._replicate_every is not None:
            options["replicate"] = self._word.replicate
        take = self.agent.snapshot if self.agent is not None else default.snapshot
        pending = take(state, step=step, persist=self._word.persist, **options)
        if pending.state not in ("failed", "skipped"):
            self._measured.add(pending)
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
                heard = link_of(agent).broadcast(
                    topic, lambda: self._decide(agent, step), late=late
                )
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

    def _decide(self, agent: Agent, step: int) -> bytes:
        now, copy_every = time.monotonic(), self._replicate_every or 1
        if self._failures is None:
            word = self._pace.decide(
                step, now, self._every_seconds, every=self._persist_every or 1,
                copy_every=copy_every,
            )  # fmt: skip
        else:
            slots = link_of(agent).client.welcome.slots
            self._choose(self._failures, slots)
            interval, every, beside = _AGAIN_SECONDS if self._asked else None, 1, 0
            if self._choice is not None:
                interval, every = self._choice.interval, self._choice.every[-1]
                beside = _beside_a_save(slots)
            self._asked = True
            word = self._pace.decide(
                step, now, interval, every=every, copy_every=copy_every,
                beside=beside if self._measured.saving else None,
            )  # fmt: skip
        return msgspec.msgpack.encode((step, word))

    def _choose(self, failures: Failures, slots: int) -> None:
        """Choose by what has been measured until now, and log a choice that is new or
        has changed much.
        """
        costs, step, least, every = self._measured.costs, self._pace.step, 0.0, None
        if costs is None:
            return
        levels = costs.levels(failures)
        if self._persist_every is not None:
            every = (1, self._persist_every)
            levels = replace(costs, lost=costs.lost or costs.held).levels(failures)
        elif costs.lost is None:
            # At most half of the time beside a save: the other steps are the measure.
            least = max(2 * costs.durable, _QUIET_STEPS * step)
        choice = choose(levels, step=step, least=least, every=every)
        self._choice = choice
        if self._told is None or _differ(choice, self._told):
            self._told = choice
            log.info(
                "%s: %s; %s; %s%s of the training time is expected to be lost%s",
                choice, costs, failures, "" if failures.mtbf_node else "at most ",
                share_of_time(choice.lost),
                f"; {THIRD_SLOT}" if choice.needs_third_slot and slots < 3 else "",
            )  # fmt: skip


def _differ(choice: Intervals, other: Intervals) -> bool:
    """Return True if the difference is worth a line in the log."""
    return choice.levels[0].name != other.levels[0].name or any(
        max(one / before, before / one) > _TOLD
        for one, before in zip(choice.intervals, other.intervals, strict=True)
    )


def _beside_a_save(slots: int) -> int:
    """Return how many snapshots each rank can take while the last one is being saved,
    without waiting for a slot.

    The snapshot that is being saved has one slot, and the newest one has another. With
    a third slot, the next one is filled before the newest one is released.
    """
    return 1 if slots < 3 else sys.maxsize


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


def _failures(mtbf: Any, mtbf_node: Any) -> Failures | None:
    if mtbf is None:
        if mtbf_node is not None:
            raise ValueError("mtbf_node= needs mtbf=, the mean seconds between all failures")
        return None
    every = _seconds("mtbf", mtbf)
    node = None if mtbf_node is None else _seconds("mtbf_node", mtbf_node)
    if node is not None and node < every:
        raise ValueError(
            f"mtbf_node is {node:g}, and mtbf is {every:g}: expected at least mtbf, because the "
            f"failures that lose a node are some of all failures"
        )
    return Failures(every, node)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; expected a finite number of seconds above 0")
    return float(value)


_DECODER = msgspec.msgpack.Decoder(tuple[int, Word])
