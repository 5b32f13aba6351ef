"""Tests when to snapshot: seconds converted to steps, the best interval, and ranks that
always agree.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.agent import Agent, Schedule, close, schedule
from ckptd.agent.agent import link_of
from ckptd.agent.pending import Pending, PendingSnapshot
from ckptd.agent.schedule import Pace
from ckptd.shared.errors import SnapshotFailed
from ckptd.shared.interval import THIRD_SLOT, Costs, Failures, SaveLevel, choose
from ckptd.shared.wire.lifecycle import Event
from tests.shared.samples import steady
from tests.support.cases import each_case
from tests.support.daemons import Daemon, Home, running
from tests.support.ranks import HERE, Ranks

# -- seconds converted to steps


def walk(
    every: int, seconds_of: Any, interval: Any, steps: int
) -> tuple[list[tuple[int, bool]], int]:
    """Return the due steps, whether each went to storage, and how often the ranks had
    to agree.
    """
    pace, now, again, asked, due = Pace(), 1000.0, 0, 0, []
    for step in range(steps):
        now += seconds_of(step)
        if step < again:
            continue
        word = pace.decide(step, now, interval, every=every)
        assert word.again > step
        again, asked = word.again, asked + 1
        if word.due:
            due.append((step, word.persist))
    return due, asked


def gaps(due: list[tuple[int, bool]]) -> list[int]:
    found = [step for step, _ in due]
    return [later - earlier for earlier, later in pairwise(found)]


def test_every_hundred_seconds_with_steps_of_one_second() -> None:
    due, asked = walk(1, lambda step: 1.0, 100.0, 2000)
    assert set(gaps(due)) == {100}
    assert due[0] == (100, True)
    assert len(due) == 19
    assert asked < 12 * len(due)  # about once for each halving


def test_steps_that_are_longer_than_the_interval() -> None:
    assert [step for step, _ in walk(1, lambda step: 7.0, 5.0, 10)[0]] == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
    ]


def test_steps_that_become_slower_or_faster() -> None:
    due, _ = walk(1, lambda step: 1.0 if step < 500 else 4.0 if step < 800 else 0.5, 100.0, 3000)
    found = gaps(due)
    assert found[:4] == [100] * 4
    assert found.count(25) > 8
    assert set(found[-5:]) == {200}


def test_each_nth_goes_to_storage() -> None:
    due, _ = walk(3, lambda step: 1.0, 10.0, 100)
    assert [persist for _, persist in due] == [False, False, True] * 3


def test_an_unknown_pace_is_measured_at_once() -> None:
    assert walk(1, lambda step: 1.0, None, 3)[0] == [(0, True), (1, True), (2, True)]


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (0, "S    mmS"),
        (1, "Sm   mSm"),
        (sys.maxsize, "SmmmmSmm"),
    ],
)
def test_a_save_has_snapshots_to_memory_beside_it_if_they_fit_and_no_second_save(
    beside: int, said: str
) -> None:
    pace, found = Pace(), ""
    for step in range(9):
        under_way = beside if 1 < step < 6 else None
        every = 1 if step < 2 else 3
        word = pace.decide(step, 10.0 * step, 10.0, every=every, beside=under_way)
        found += "S" if word.persist else "m" if word.due else " "
    assert found == " " + said


def test_a_storage_save_that_had_to_wait_is_the_next_one() -> None:
    pace = Pace()
    words = [
        pace.decide(step, 10.0 * step, 10.0, every=2, beside=9 if 3 <= step <= 6 else None)
        for step in range(9)
    ]
    assert [word.persist for word in words] == [False] * 2 + [True] + [False] * 4 + [True, False]


def test_the_time_of_a_step_is_a_median() -> None:
    pace = Pace()
    assert pace.step == 0.0
    for step, now in enumerate((0.0, 0.5, 1.0, 60.0, 60.5)):
        pace.decide(step, now, 0.1)
    assert pace.step == 0.5


@steady
@given(st.lists(st.floats(0.01, 50.0), min_size=5, max_size=200), st.floats(0.05, 500.0))
def test_no_two_snapshots_are_much_closer_than_the_interval(
    seconds: list[float], interval: float
) -> None:
    now, again, agains = 0.0, 0, []
    taken = [seconds[0]]  # the interval begins at the first step
    pace = Pace()
    for step, took in enumerate(seconds):
        now += took
        if step >= again:
            word = pace.decide(step, now, interval)
            again = word.again
            agains.append((step, again))
            if word.due:
                taken.append(now)
    assert [pair for pair in agains if pair[0] >= pair[1]] == []
    shortest = interval - max(seconds) / 2 - 1e-6
    assert [gap for one, next in pairwise(taken) if (gap := next - one) < shortest] == []


def test_a_few_quick_steps_do_not_delay_the_next_decision_much() -> None:
    pace = Pace()
    assert [pace.decide(step, 0.0, 1e300).again for step in (0, 1, 3, 9)] == [1, 3, 9, 27]
    assert not pace.decide(27, 60.0, 100.0).due
    assert pace.decide(35, 100.0, 100.0).due


# -- what a training script sees


@each_case(
    ("given", "options", "words"),
    [
        ((), {}, "give exactly one of them"),
        ((), {"every_steps": 5, "every_seconds": 5}, "give exactly one of them"),
        (("auto",), {"every_steps": 5, "mtbf": 5}, "give exactly one of them"),
        (("always",), {}, "the mode is 'always'"),
        (
            ("auto",),
            {},
            'mtbf=, the mean seconds between two failures of the job, and "auto" must be given '
            "together",
        ),
        ((), {"every_steps": 5, "mtbf": 5}, '"auto" must be given together'),
        ((), {"every_steps": 0}, "every_steps is 0; expected a number from 1 up"),
        ((), {"every_steps": 2.0}, "every_steps is 2.0"),
        (
            (),
            {"every_seconds": -1},
            "every_seconds is -1; expected a finite number of seconds above 0",
        ),
        ((), {"every_seconds": math.inf}, "every_seconds is inf"),
        (("auto",), {"mtbf": True}, "mtbf is True"),
        (("auto",), {"mtbf": 9, "mtbf_node": 0}, "mtbf_node is 0; expected a finite number"),
        (
            ("auto",),
            {"mtbf": 9, "mtbf_node": 8},
            "mtbf_node is 8, and mtbf is 9: expected at least",
        ),
        ((), {"every_steps": 5, "mtbf_node": 8}, "mtbf_node= needs mtbf=, the mean seconds"),
        ((), {"every_steps": 5, "persist_every": 0}, "persist_every is 0"),
        ((), {"every_steps": 5, "replicate_every": 1.5}, "replicate_every is 1.5"),
    ],
)
def test_an_invalid_schedule_is_refused(given: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(*given, **options)


def test_every_steps_is_followed(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    when = Schedule(every_steps=3, persist_every=2, agent=agent)
    taken = []
    for step in range(1, 14):
        pending = when.snapshot({"x": torch.full((4,), step)}, step=step, metrics={"loss": 0.5})
        assert when.due(step) == (pending is not None)
        if pending is not None:
            pending.wait("sealed", timeout=60)
            taken.append((pending.step, pending.persist))
    assert taken == [(3, False), (6, True), (9, False), (12, True)]
    assert when.interval is None
    agent.close()
    assert sorted(path.name for path in (daemon.home.root / "job").glob("step*")) == [
        "step-00000006.a0001",
        "step-00000012.a0001",
    ]


class Taken:
    """An agent that notes what it is asked to copy to other nodes."""

    attempt, world_size, closed = 1, 1, False

    def __init__(self) -> None:
        self.copied: list[tuple[int, bool, bool | None]] = []

    def snapshot(
        self, state: Any, *, step: int, persist: bool, replicate: bool | None = None
    ) -> Pending:
        self.copied.append((step, persist, replicate))
        return Pending(PendingSnapshot(step))


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"replicate_every": 2}, [(3, True, False), (6, True, True), (9, True, False)]),
        (
            {"replicate_every": 2, "persist_every": 3},
            [(3, False, False), (6, False, True), (9, True, False)],
        ),
        ({}, [(3, True, None), (6, True, None), (9, True, None)]),
    ],
)
def test_each_nth_snapshot_is_copied_to_other_nodes(
    options: dict[str, Any], taken: list[tuple[int, bool, bool | None]]
) -> None:
    agent = Taken()
    when = Schedule(every_steps=3, agent=cast(Agent, agent), **options)
    for step in range(1, 11):
        when.snapshot({}, step=step)
    assert agent.copied == taken


def test_without_replicate_every_the_caller_says_what_is_copied() -> None:
    agent = Taken()
    when = Schedule(every_steps=1, agent=cast(Agent, agent))
    when.snapshot({}, step=1, replicate=False)
    assert agent.copied == [(1, True, False)]


def test_copies_and_saves_are_counted_apart() -> None:
    pace = Pace()
    words = [pace.decide(step, float(step), 1.0, every=3, copy_every=2) for step in range(1, 8)]
    assert [(word.due, word.persist, word.replicate) for word in words] == [
        (False, False, False),
        (True, False, False),
        (True, False, True),
        (True, True, False),
        (True, False, True),
        (True, False, False),
        (True, True, True),
    ]


class Clock:
    """A replacement of `time` in which each step takes a second."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(schedule, "time", made)
    return made


def test_every_seconds_is_followed(daemon: Daemon, clock: Clock) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    when = Schedule(every_seconds=10, agent=agent)
    due = []
    for step in range(45):
        clock.now += 1
        if when.snapshot({"x": torch.ones(4)}, step=step) is not None:
            due.append(step)
    assert due == [10, 20, 30, 40]
    assert when.interval == 10.0
    agent.close()


def test_a_new_attempt_restarts_the_schedule(daemon: Daemon, clock: Clock) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    when = Schedule(every_seconds=10, agent=agent)
    due = []
    for round_ in range(2):
        for step in range(15):
            clock.now += 1
            pending = when.snapshot({"x": torch.ones(4)}, step=step)
            if pending is not None:
                due.append((round_, step, pending.wait("durable", timeout=60).attempt))
        if round_ == 0:
            agent.snapshot({"x": torch.ones(4)}, step=40).wait("durable", timeout=60)
            agent.recover({"x": torch.zeros(4)}, step=10)
    assert due == [(0, 10, 1), (1, 10, 2)]
    agent.close()


class Costly:
    """Snapshots of an agent that have the costs that a test gives them. A save ends when
    the clock says so.
    """

    def __init__(self, agent: Agent, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agent = agent
        self.held = self.durable = 0.0
        self.lost: float | None = None
        self._clock = clock
        self._saving: list[tuple[float, PendingSnapshot, Pending]] = []
        self._snapshot = agent.snapshot
        monkeypatch.setattr(agent, "snapshot", self.take)

    def take(self, *arguments: Any, **options: Any) -> Pending:
        taken = self._snapshot(*arguments, **options)
        taken.wait("sealed", timeout=60)
        shown = PendingSnapshot(taken.step, taken.attempt, persist=taken.persist)
        shown.stall = self.held
        shown.seal()
        if taken.persist:
            self._saving.append((self._clock.now + self.durable, shown, taken))
        return Pending(shown)

    def follow(self, when: Schedule, steps: range) -> list[tuple[int, bool]]:
        """Return the steps that were due, and whether each went to storage."""
        due = []
        for step in steps:
            self._clock.now += 1
            while self._saving and self._saving[0][0] <= self._clock.now:
                _, shown, taken = self._saving.pop(0)
                taken.wait("durable", timeout=60)
                shown.lost_seconds, shown.durable_seconds = self.lost, self.durable
                shown.move(Event.COMMIT)
            pending = when.snapshot({"x": torch.ones(4)}, step=step)
            if pending is not None:
                due.append((step, pending.persist))
        return due


@pytest.fixture
def costly(daemon: Daemon, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Costly]:
    agent = Agent("job", socket=daemon.home.socket)
    yield Costly(agent, clock, monkeypatch)
    agent.close()


def choices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("a snapshot to")]


def test_auto_chooses_for_memory_and_for_storage(
    costly: Costly, caplog: pytest.LogCaptureFixture
) -> None:
    when = Schedule("auto", mtbf=600.0, mtbf_node=3600.0, agent=costly.agent)
    assert (when.interval, when.choice) == (None, None)
    caplog.set_level(logging.INFO, "ckptd.agent")
    costly.held, costly.lost, costly.durable = 0.1, 5.1, 8.0
    due = costly.follow(when, range(1200))
    expected = choose(Costs(0.1, 8.0, 5.1).levels(Failures(600.0, 3600.0)), step=1.0)
    assert when.choice == expected
    assert when.interval == expected.interval == pytest.approx(11.6, abs=0.1)
    assert expected.every == (1, 16)
    saved = [step for step, persist in due if persist]
    assert due[0] == (0, True)
    assert due[1] == (12, False), "at the interval for memory, once the first one is durable"
    assert set(gaps(due[2:])) <= {11, 12, 13}
    assert set(gaps([(step, True) for step in saved[1:]])) <= set(range(180, 200))
    assert choices(caplog) == [
        f"{expected}: a snapshot to memory costs the training 100 ms, and one to storage 5.1 s, "
        "which is durable after 8.0 s; a failure comes every 10.0 min, and one that loses a node "
        "every 60.0 min; 7.2 % of the training time is expected to be lost"
    ]


def test_until_the_cost_of_a_save_is_measured_every_snapshot_goes_to_storage(
    costly: Costly, caplog: pytest.LogCaptureFixture
) -> None:
    when = Schedule("auto", mtbf=600.0, agent=costly.agent)
    caplog.set_level(logging.INFO, "ckptd.agent")
    costly.held, costly.durable = 0.1, 20.0
    due = costly.follow(when, range(200))
    assert [persist for _, persist in due] == [True] * len(due)
    assert set(gaps(due)) == {40}, "half of the steps are not beside a save"
    assert when.choice is not None
    assert (when.choice.every, when.choice.steps) == ((1,), (40,))
    (told,) = choices(caplog)
    assert "what it costs beside the training is not measured yet; a failure comes every" in told
    assert "at most " in told


def test_auto_says_when_its_choice_has_changed_much(
    costly: Costly, caplog: pytest.LogCaptureFixture
) -> None:
    when = Schedule("auto", mtbf=600.0, mtbf_node=3600.0, agent=costly.agent)
    caplog.set_level(logging.INFO, "ckptd.agent")
    costly.durable, begin = 8.0, 0
    for held in (0.1, 0.11, 1.0):
        costly.held, costly.lost = held, held + 5
        costly.follow(when, range(begin, begin + 400))
        begin += 400
    first, last = choices(caplog)
    assert "costs the training 100 ms" in first
    assert "costs the training 1.0 s" in last


def test_auto_says_that_snapshots_to_memory_pause_beside_long_saves(
    costly: Costly, caplog: pytest.LogCaptureFixture
) -> None:
    when = Schedule("auto", mtbf=600.0, mtbf_node=3600.0, agent=costly.agent)
    caplog.set_level(logging.INFO, "ckptd.agent")
    costly.held, costly.lost, costly.durable = 0.1, 5.1, 100.0
    due = costly.follow(when, range(400))
    assert choices(caplog)[-1].endswith(f"expected to be lost; {THIRD_SLOT}")
    assert due[0] == (0, True)
    assert due[1][0] == 100, "nothing is chosen before the first one is durable"
    (second,) = [step for step, persist in due[1:] if persist]
    assert [step for step, _ in due if second < step < second + 100] == [second + 12]


def test_auto_keeps_the_persist_every_that_is_given(
    costly: Costly, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckptd.agent")
    when = Schedule("auto", mtbf=200.0, persist_every=3, agent=costly.agent)
    costly.held, costly.durable = 1.0, 3.0
    due = costly.follow(when, range(200))
    assert [persist for _, persist in due[:8]] == [True] + [False, False, True] * 2 + [False]
    levels = (SaveLevel("memory", 1.0, 200.0), SaveLevel("storage", 0.0, 200.0, 3.0))
    assert when.choice == choose(levels, step=1.0, every=(1, 3))
    assert "what it costs beside the training is not measured yet" in choices(caplog)[0]


def test_a_store_that_does_not_answer_is_retried_later(
    daemon: Daemon, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    when = Schedule(every_seconds=1, agent=agent)
    asked = []

    def silent(*_: Any, **__: Any) -> bytes:
        asked.append(clock.now)
        raise SnapshotFailed("the job's store has not answered for 5 s")

    with monkeypatch.context() as patch:
        patch.setattr(link_of(agent), "broadcast", silent)
        for step in range(100):
            clock.now += 1
            assert not when.due(step)
    assert asked == [101.0, 161.0]
    clock.now += 60
    due = []
    for step in range(100, 103):
        clock.now += 1
        due.append(when.due(step))
    assert due == [False, True, True]
    agent.close()


def test_without_a_daemon_the_snapshot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_SOCKET", "/nowhere/ckptd.sock")
    when = Schedule(every_seconds=1000)
    pending = when.snapshot({"x": torch.ones(4)}, step=1)
    assert pending is not None
    assert pending.state == "failed"
    assert "no daemon listens at /nowhere/ckptd.sock" in str(pending.error)


# -- ranks


def begin(socket: Any) -> None:
    HERE["agent"] = Agent("job", socket=socket)
    HERE["when"] = Schedule(every_seconds=0.2, persist_every=2, agent=HERE["agent"])


def run(rank: int, steps: range, skew: float, late: int | None) -> list[tuple[int, bool]]:
    """Return the steps that were due on this rank, which has a clock and a pace of its
    own.
    """
    agent, when, taken = HERE["agent"], HERE["when"], []
    for step in steps:
        time.sleep(0.002 + skew * rank)
        if rank == 1 and step == late:
            continue
        pending = when.snapshot({"x": torch.full((4,), step)}, step=step)
        if pending is not None:
            taken.append((step, pending.persist))
    assert agent.world_size == 3
    return taken


def end() -> None:
    HERE["agent"].close()


def test_all_ranks_take_the_same_snapshots(daemon: Daemon) -> None:
    with Ranks(3) as ranks:
        ranks.call(begin, daemon.home.socket)
        for rank in range(3):
            ranks.begin(run, rank, range(400), 0.0005, None, only=[rank])
        taken = ranks.results()
        ranks.call(end)
    assert taken[0] == taken[1] == taken[2]
    assert len(taken[0]) >= 2
    assert [persist for _, persist in taken[0]] == [
        number % 2 == 1 for number in range(len(taken[0]))
    ]


def train(rank: int, socket: Any, steps: int) -> tuple[list[tuple[int, bool]], Any, int]:
    """Train for so many steps, and return the steps that were due, what was chosen, and
    the last step.
    """
    agent = Agent("auto", socket=socket)
    when = Schedule("auto", mtbf=1.0, mtbf_node=1e9, agent=agent)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state, taken = {"model": model, "optim": optimizer}, []
    for step in range(steps):
        model(torch.ones(4, 64)).sum().backward()
        time.sleep(0.002)
        optimizer.step()
        optimizer.zero_grad()
        if (pending := when.snapshot(state, step=step)) is not None:
            taken.append((step, pending.persist))
    chosen, last = when.choice, agent.last_step
    agent.close()
    return taken, chosen, last


def test_a_training_of_two_ranks_has_more_snapshots_in_memory_than_on_storage(
    daemon: Daemon,
) -> None:
    with Ranks(2) as ranks:
        for rank in range(2):
            ranks.begin(train, rank, daemon.home.socket, 700, only=[rank])
        (taken, chosen, last), (other, unknown, _) = ranks.results()
    assert taken == other
    saved = [step for step, persist in taken if persist]
    assert 2 <= len(saved) < len(taken) / 2
    assert (taken[0], unknown) == ((0, True), None)
    assert [level.name for level in chosen.levels] == ["memory", "storage"]
    assert chosen.every[1] > 1
    assert all(level.cost >= 0 for level in chosen.levels)
    on_storage = {int(path.name[5:13]) for path in (daemon.home.root / "auto").glob("step*")}
    assert on_storage == {*saved, last}, "the newest one is saved when the training ends"


class Told:
    """An agent of rank 0, or of another rank that hears what rank 0 has said in time. It is
    its own link.
    """

    closed, attempt, schedules = False, 1, 0

    def __init__(self, said: dict[str, bytes], rank: int) -> None:
        self.said, self.rank, self.waited = said, rank, 0
        self._link = self

    def broadcast(self, topic: str, say: Any, *, late: bool) -> bytes | None:
        if self.rank == 0:
            self.said[topic] = say()
        self.waited += topic not in self.said and not late
        return self.said.get(topic)


@pytest.mark.parametrize(
    ("of_a_step", "interval"),
    [(30.0, 60.0), (30.0, 100.0), (30.0, 20.0), (1.0, 20.0), (1.0, 600.0)],
)
def test_a_rank_that_was_late_once_follows_the_others_again(
    clock: Clock, of_a_step: float, interval: float
) -> None:
    said: dict[str, bytes] = {}
    agents = [Told(said, rank) for rank in range(2)]
    first, second = (Schedule(every_seconds=interval, agent=agent) for agent in agents)  # type: ignore[arg-type]
    apart = []
    for step in range(200 if interval < 100 else 2000):
        clock.now += of_a_step
        # The second call comes before the first rank has decided, and does not wait any
        # longer.
        if step == 40:
            due = second.due(step)
            apart += [step] if first.due(step) != due else []
        elif first.due(step) != second.due(step):
            apart.append(step)
    assert [step for step in apart if step > 41] == []
    assert agents[1].waited <= 1


def test_ranks_that_ask_about_some_steps_only_agree(clock: Clock) -> None:
    said: dict[str, bytes] = {}
    first, second = (Schedule(every_seconds=50, agent=Told(said, rank)) for rank in range(2))  # type: ignore[arg-type]
    due = []
    for step in range(0, 600, 7):
        clock.now += 7
        due.append(first.due(step))
        assert second.due(step) == due[-1]
    assert sum(due) > 8


@pytest.mark.usefixtures("processes")
def test_a_new_agent_of_the_process_restarts_the_schedule(
    place: Home, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_JOB", "job")
    with running(place, forked=True):
        monkeypatch.setenv("CKPTD_SOCKET", str(place.socket))
        when, due = Schedule(every_seconds=10), []
        for step in range(60):
            clock.now += 1
            pending = when.snapshot({"x": torch.ones(4)}, step=step)
            if pending is not None:
                due.append((step, pending.wait("durable", timeout=60).attempt))
            if step == 25:
                close()
        close()
    assert due == [(10, 1), (20, 1), (36, 2), (46, 2), (56, 2)]


def test_a_closed_agent_fails_the_snapshot_with_an_error(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    when = Schedule(every_seconds=1000, agent=agent)
    assert when.snapshot({"x": torch.ones(4)}, step=0) is None
    agent.close()
    pending = when.snapshot({"x": torch.ones(4)}, step=1, on_error="log")
    assert pending is not None
    assert "this agent is closed" in str(pending.error)


def test_a_state_that_cannot_be_saved_is_not_tried_at_every_step(
    daemon: Daemon, clock: Clock
) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    when = Schedule("auto", mtbf=100.0, agent=agent)
    due = []
    for step in range(100):
        clock.now += 1
        pending = when.snapshot({"x": object()}, step=step, on_error="log")
        if pending is not None:
            due.append((step, pending.state))
    assert due == [(step, "failed") for step in (0, 30, 60, 90)]
    with pytest.raises(
        SnapshotFailed,
        match="nothing of this run was saved: none of its 4 snapshots could be saved",
    ):
        agent.close()
