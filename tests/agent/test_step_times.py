"""Tests what a snapshot costs the training, with a clock of the test's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.pending import PendingSnapshot
from ckptd.agent.step_times import StepTimes
from ckptd.daemon.commands import report
from ckptd.shared.errors import SnapshotFailed
from ckptd.shared.wire.lifecycle import Event
from tests.support.daemons import Home, running


class Training:
    """A training of one parameter, whose steps take as long as the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.times = StepTimes(lambda: self.now)
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def steps(self, *seconds: float) -> None:
        for taken in seconds:
            self.now += taken
            self.optimizer.step()

    def snapshot(self, stall: float = 0.0) -> PendingSnapshot:
        pending = PendingSnapshot(1)
        self.now += stall
        pending.stall = stall
        pending.seal()
        self.times.begin(pending)
        return pending


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.times.close()


def test_a_snapshot_costs_its_call_and_what_its_steps_take_longer(training: Training) -> None:
    training.steps(7.0, 1.0, 1.0, 1.0)
    pending = training.snapshot(stall=0.25)
    assert pending.lost_seconds is None
    training.steps(1.0)
    assert pending.lost_seconds == pytest.approx(0.25)
    training.steps(1.5, 1.25)
    assert pending.lost_seconds == pytest.approx(1.0)
    pending.move(Event.COMMIT)
    training.steps(1.5)  # the save ended while this step ran
    assert pending.lost_seconds == pytest.approx(1.5)
    training.steps(3.0)
    assert pending.lost_seconds == pytest.approx(1.5), "the save was over"
    assert training.times.last is pending
    assert training.times.usual == 1.0


def test_steps_beside_a_save_do_not_count_as_usual(training: Training) -> None:
    training.steps(7.0, 1.0, 1.0, 1.0)
    training.snapshot()
    training.steps(*[2.0] * 100)
    assert training.times.usual == 1.0


def test_nothing_is_known_without_quiet_steps(training: Training) -> None:
    first = training.snapshot()
    training.steps(7.0, 1.0, 1.0)
    assert (first.lost_seconds, training.times.usual, training.times.last) == (None, None, None)


def test_a_validation_beside_a_save_is_not_taken_for_its_cost(training: Training) -> None:
    training.steps(7.0, 1.0, 1.0, 1.0)
    pending = training.snapshot(stall=0.5)
    training.steps(600.0)
    assert pending.lost_seconds == pytest.approx(2.5)


def test_a_snapshot_in_memory_only_costs_until_it_is_sealed(training: Training) -> None:
    training.steps(7.0, 1.0, 1.0, 1.0)
    pending = PendingSnapshot(1, persist=False)
    pending.stall = 0.5
    pending.seal()
    training.times.begin(pending)
    training.steps(1.0, 5.0)
    assert pending.lost_seconds == pytest.approx(0.0), (
        "the first step took as long as usual, with the call"
    )


def test_steps_are_slower_because_of_the_save_and_not_of_snapshots_taken_meanwhile(
    training: Training,
) -> None:
    training.steps(7.0, 1.0, 1.0, 1.0)
    saved = training.snapshot(stall=0.25)
    training.steps(1.5)
    between = PendingSnapshot(2, persist=False)
    training.now += 0.125
    between.stall = 0.125
    between.seal()
    training.times.begin(between)
    training.steps(1.5)
    saved.move(Event.COMMIT)
    training.steps(1.25, 1.0)
    assert saved.lost_seconds == pytest.approx(1.5)
    assert between.lost_seconds == 0.125
    assert training.times.last is saved
    assert training.times.usual == 1.0


def test_the_daemon_hears_of_the_last_save_and_not_of_later_snapshots_in_memory(
    training: Training,
) -> None:
    training.steps(7.0, 1.0, 1.0, 1.0)
    training.snapshot().move(Event.COMMIT)
    training.steps(2.0, 1.0)
    later = PendingSnapshot(2, persist=False)
    later.seal()
    training.times.begin(later)
    training.steps(1.0, 1.0)
    cost = training.times.cost
    assert cost is not None
    assert cost.step == 1
    assert cost.seconds == pytest.approx(1.0)


def test_a_snapshot_that_has_failed_at_once_is_not_counted(training: Training) -> None:
    """Snapshots with an invalid step must not reach the daemon, because no message can
    hold such a step.
    """
    training.steps(7.0, 1.0, 1.0, 1.0)
    pending = PendingSnapshot(-1)
    pending.fail(SnapshotFailed("x"))
    training.times.begin(pending)
    training.steps(1.0, 5.0)
    assert (pending.lost_seconds, training.times.last, training.times.cost) == (None, None, None)


@pytest.mark.usefixtures("processes")
def test_a_wrong_step_does_not_disturb_later_snapshots(place: Home) -> None:
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter])
    with running(place, forked=True):
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"w": parameter}, step=1).wait("durable", timeout=60)
        for _ in range(6):
            optimizer.step()
        assert agent.snapshot({"w": parameter}, step=-7).state == "failed"
        optimizer.step()
        agent.snapshot({"w": parameter}, step=2).wait("durable", timeout=60)
        agent.close()


def test_a_signal_handler_may_snapshot_while_a_step_is_counted(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.steps(7.0, 1.0, 1.0, 1.0)
    pending = training.snapshot()
    second: list[PendingSnapshot] = []

    def over(found: PendingSnapshot) -> bool:
        if not second:
            second.append(training.snapshot())
        return found.done

    monkeypatch.setattr("ckptd.agent.step_times._is_over", over)
    training.steps(1.0, 1.0)
    assert pending.lost_seconds == pytest.approx(0.0)
    assert second[0].lost_seconds == pytest.approx(0.0)


def test_snapshots_without_steps_are_not_kept(training: Training) -> None:
    for _ in range(100):
        training.snapshot().move(Event.COMMIT)
    assert len(training.times._on_their_way) < 10


def test_an_optimizer_that_no_longer_steps_is_replaced(training: Training) -> None:
    training.steps(7.0, 1.0, 1.0, 1.0)
    first, training.optimizer = (
        training.optimizer,
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
    )
    training.steps(*[3.0] * 100)
    assert training.times.usual == 3.0
    assert first is not training.optimizer


def test_only_one_optimizer_is_counted(training: Training) -> None:
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    training.steps(7.0)
    for _ in range(5):
        training.now += 0.5
        other.step()
        training.steps(0.5)
    assert training.times.usual == 1.0
    training.optimizer = other
    gc.collect()
    training.steps(9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    assert training.times.usual == 2.0, "the first one is gone, so the next one is counted"


@pytest.mark.usefixtures("processes")
def test_an_agent_measures_real_steps(place: Home) -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 100)).sum().backward()
        optimizer.step()

    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        for _ in range(10):
            step()
        pending = agent.snapshot({"m": model, "o": optimizer}, step=1)
        step()
        assert pending.lost_seconds is not None
        pending.wait("durable", timeout=60)
        step()
        lost = pending.lost_seconds
        assert daemon.status()["jobs"][0]["training_cost"] is None
        agent.snapshot({"m": model, "o": optimizer}, step=2).wait("durable", timeout=60)
        status = daemon.status()
        cost = status["jobs"][0]["training_cost"]
        assert (cost["step"], cost["seconds"]) == (1, pytest.approx(lost))
        assert cost["usual"] > 0
        assert status["jobs"][0]["writers"] >= 1
        assert (
            f"COST           job: the snapshot of step 1 has delayed the training by "
            f"{max(0.0, lost):.3f} s, " in report.status_text(status)
        )
        agent.close()


def test_compiled_steps_are_counted(training: Training) -> None:
    step = torch.compile(training.optimizer.step, backend="eager")
    training.steps(7.0)
    for _ in range(20):
        training.now += 1.0
        step()
    assert training.times.usual == 1.0
    assert len(training.times._quiet) == 20
