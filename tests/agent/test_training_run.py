"""Tests the `with` statement around a training loop: what it recovers, saves and says,
and how SIGTERM and SIGKILL end it.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptd.agent import Agent, Batches, Checkpoint, Schedule, default, training, training_run
from ckptd.agent.training_run import Training
from ckptd.shared.errors import InvalidRequest, SnapshotFailed, UnsavableValue
from tests.support import scripts
from tests.support.cases import each_case
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Ranks

SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import ckptd

torch.manual_seed(0)
data = TensorDataset(torch.randn(50, 4))
batches = ckptd.Batches(DataLoader(data, batch_size=8, shuffle=True))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
optimizer = torch.optim.AdamW(model.parameters())
dies_at, signal_number = int(sys.argv[1]), int(sys.argv[2])
state = {"model": model, "optim": optimizer, "data": batches}
with ckptd.training(state, every=3) as run:
    for step, (batch,) in zip(run.steps(20), batches):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item().hex(), flush=True)
        if step == dies_at:
            os.kill(os.getpid(), signal_number)
print("done")
"""


def lines(
    daemon: Daemon, place: Path, job: str, dies_at: int = -1, number: int = 0
) -> tuple[list[str], int]:
    """Run the script. Return the lines that it prints, without logs, and its exit code."""
    (place / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "CKPTD_SOCKET": str(daemon.home.socket), "CKPTD_JOB": job}
    script, words = place / "train.py", (str(dies_at), str(int(number)))
    ended = scripts.run(script, *words, environment=environment)
    printed = [line for line in ended.output.splitlines() if line[0].isdigit() or line == "done"]
    return printed, ended.code


@pytest.fixture
def agent(daemon: Daemon) -> Iterator[Agent]:
    made = Agent("job", socket=daemon.home.socket)
    yield made
    made.close()


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value)}


@pytest.mark.parametrize(
    ("number", "code", "again"), [(signal.SIGKILL, -9, 12), (signal.SIGTERM, 143, 14)]
)
def test_a_run_that_is_killed_has_the_losses_of_one_that_is_not(
    daemon: Daemon, tmp_path: Path, number: signal.Signals, code: int, again: int
) -> None:
    """After SIGKILL in step 13 the snapshot of step 12 is recovered or, if its copy was
    killed, that of step 9. SIGTERM lets step 13 end, and saves it.
    """
    whole, ended = lines(daemon, tmp_path, "whole")
    assert (ended, len(whole), whole[-1]) == (0, 21, "done")
    first, ended = lines(daemon, tmp_path, "killed", 13, number)
    assert (ended, first) == (code, whole[:14])
    second, ended = lines(daemon, tmp_path, "killed")
    assert ended == 0
    assert second == whole[-len(second) :]
    assert int(second[0].split()[0]) in {again, again + 1} - ({15} if code == 143 else set())
    third, ended = lines(daemon, tmp_path, "killed")
    assert (third, ended) == (["done"], 0)


def test_steps_are_saved_when_due_and_at_the_end(agent: Agent, daemon: Daemon) -> None:
    state = state_of(0.0)
    taken = []
    with training(state, every=4, agent=agent) as run:
        assert (run.recovered, run.step) == (None, -1)
        for step in run.steps(10):
            assert run.next_step == run.step == step
            state["w"].fill_(step)
            run.metrics = {"loss": float(step)}
            taken.append(run.pending and run.pending.step)
    assert taken == [None, 0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert run.pending is not None
    assert (run.pending.step, run.pending.state, agent.closed) == (9, "durable", True)
    with Checkpoint.open(daemon.home.root / "job") as found:
        assert (found.step, found.metrics) == (9, {"loss": 9.0})
        assert found.tensor("w").tolist() == [9.0] * 3


def test_a_run_that_is_finished_says_so(
    agent: Agent, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with training(state_of(1.0), every=100, agent=agent) as run:
        assert list(run.steps(5)) == [0, 1, 2, 3, 4]
    state, later = state_of(0.0), Agent("job", socket=daemon.home.socket)
    caplog.set_level(logging.WARNING, "ckptd.agent")
    with training(state, every=100, agent=later) as run:
        assert list(run.steps(5)) == []
        assert caplog.messages == ["nothing is left to do: step 4 of 5 is saved"]
        assert run.step == 4, "the loop has no variable"
        assert list(run.steps(7)) == [5, 6]
    assert run.step == 6
    assert state["w"].tolist() == [1.0] * 3


def test_stop_ends_after_the_step_and_saves_it(agent: Agent, daemon: Daemon) -> None:
    seen = []
    with training(state_of(0.0), every=100, agent=agent) as run:
        for step in run.steps(50):
            seen.append(step)
            if step == 3:
                run.stop()
    assert seen == [0, 1, 2, 3]
    with Checkpoint.open(daemon.home.root / "job") as found:
        assert found.step == 3


def test_an_error_of_the_loop_is_raised_and_the_newest_snapshot_is_durable(
    agent: Agent, daemon: Daemon
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    during = []

    def loop(run: Training) -> None:
        during.append(signal.getsignal(signal.SIGTERM))
        next(itertools.islice(run.steps(50), 5, None))
        raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        training(state_of(0.0), every=2, agent=agent) as run,
    ):
        loop(run)
    assert during != [before]
    assert agent.closed
    assert signal.getsignal(signal.SIGTERM) == before
    with Checkpoint.open(daemon.home.root / "job") as found:
        assert found.step == 4


def test_the_error_of_the_loop_counts_if_the_end_fails_too(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise SnapshotFailed("no room")

    monkeypatch.setattr(agent, "close", fail)
    with pytest.raises(ZeroDivisionError), training(state_of(0.0), every=2, agent=agent):
        raise ZeroDivisionError
    assert "the newest snapshot could not be made durable: no room" in caplog.messages
    monkeypatch.undo()
    agent = Agent("other", socket=agent._link.place.socket)
    monkeypatch.setattr(agent, "close", fail)
    with pytest.raises(SnapshotFailed), training(state_of(0.0), every=2, agent=agent):
        pass
    monkeypatch.undo()
    agent.close()


@each_case("every", [0, -1, "", "10", "10 minutes", "0m", 2.5, None, "auto"])
def test_an_interval_that_means_nothing_is_refused(every: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^every is .*; expected a number of steps from 1 up"):
        training({}, every=every)


@pytest.mark.parametrize(
    ("every", "seconds"), [("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("2 d", 172800.0)]
)
def test_an_interval_may_be_a_time(every: str, seconds: float) -> None:
    assert training({}, every=every)._schedule.interval == seconds


def test_a_schedule_of_another_agent_is_refused(agent: Agent) -> None:
    schedule = Schedule(every_steps=5)
    with pytest.raises(
        InvalidRequest, match="^the schedule takes its snapshots with another agent: "
    ):
        training({}, every=schedule, agent=agent)
    assert isinstance(training({}, every=schedule), Training)


def test_steps_are_refused_outside_the_with_statement_and_without_a_number(agent: Agent) -> None:
    run = training(state_of(0.0), every=5, agent=agent)
    with pytest.raises(InvalidRequest, match=r"^steps\(\) is called outside the with statement: "):
        run.steps(5)
    with run, pytest.raises(InvalidRequest, match="^the number of steps is 0; expected a number "):
        run.steps(0)


# -- mistakes that would make a recovered run another one


def batches_of(samples: int = 10) -> Batches:
    return Batches(DataLoader(TensorDataset(torch.arange(float(samples))), batch_size=2))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_batches_that_are_drawn_before_the_steps_are_refused(agent: Agent) -> None:
    batches = batches_of()
    with (
        training({"data": {"train": [batches]}}, every=5, agent=agent) as run,
        pytest.raises(InvalidRequest, match=r"^a batch was drawn before the first step, .*`zip\("),
    ):
        list(zip(batches, run.steps(5), strict=False))


def test_batches_that_are_not_in_the_state_are_told(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    batches = batches_of()
    with training(state_of(0.0), every=2, agent=agent) as run:
        list(zip(run.steps(5), batches, strict=False))
    told = warned(caplog)
    assert (len(told), told[0][:58]) == (
        1, "a ckptd.Batches is used that is not part of the state: its"
    )  # fmt: skip


def test_gradients_that_are_not_saved_are_told(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """With a snapshot after every second step, step 2 of four accumulated ones is saved."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with training({"m": model, "o": optimizer}, every=2, agent=agent) as run:
        for step in run.steps(8):
            model(torch.ones(1, 2)).sum().backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    told = warned(caplog)
    assert (len(told), told[0][:61]) == (
        1, "no optimizer has stepped in step 4, which is saved, and gradi"
    )  # fmt: skip


def test_gradients_of_the_step_before_are_no_mistake(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """`zero_grad` may come first in a step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with training({"m": model, "o": optimizer}, every=2, agent=agent) as run:
        for _ in run.steps(6):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert warned(caplog) == []


def test_a_state_that_holds_itself_is_refused_by_its_key(agent: Agent) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with (
        pytest.raises(UnsavableValue, match="^a"),
        training({"a": endless}, every=1, agent=agent) as run,
    ):
        list(run.steps(2))


def test_a_loop_that_ends_before_its_steps_is_told(
    agent: Agent, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with training(state_of(0.0), every=2, agent=agent) as run:
        list(zip(run.steps(9), range(4), strict=False))
    later = Agent("job", socket=daemon.home.socket)
    with training(state_of(0.0), every=2, agent=later):
        pass
    told = warned(caplog)
    assert [one.partition(";")[0] for one in told] == [
        "the loop was left in step 4 of 9, which is not saved: step 2 is the newest",
        "nothing was saved: run.steps() was not called inside the with statement",
    ]


def test_a_second_model_in_one_job_is_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold of a cross-validation would go on from the snapshots of the one before."""
    monkeypatch.setenv("CKPTD_SOCKET", str(daemon.home.socket))
    monkeypatch.setenv("CKPTD_JOB", "fold")
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for steps in (2, 3):
        with training({"all": [model]}, every=1) as run:
            list(run.steps(steps))
    with pytest.raises(InvalidRequest, match="has trained another model in job 'fold', .*fold-2"):
        training({"all": [other]}, every=1).__enter__()
    default.close()
    with training({"all": [other]}, every=1, agent=Agent("2", socket=daemon.home.socket)) as run:
        assert run.recovered is None
        list(run.steps(1))


def test_metrics_belong_to_the_step_in_which_they_were_set(agent: Agent, daemon: Daemon) -> None:
    with training(state_of(0.0), every=4, agent=agent) as run:
        for step in run.steps(5):
            if step == 3:
                run.metrics = {"loss": 3.0}
    with Checkpoint.open(daemon.home.root / "job") as found:
        assert (found.step, found.metrics) == (4, {})


# -- SIGTERM, and workers that die of it

DEAD = "DataLoader worker (pid 1) is killed by signal: Terminated. "
GONE = "DataLoader worker (pid(s) 1, 2) exited unexpectedly"


@contextmanager
def worker_dies(text: str) -> Iterator[Callable[[], None]]:
    """Install a handler of SIGCHLD as a DataLoader does. Return a function that makes it
    raise.
    """

    def handler(*_: object) -> None:
        raise RuntimeError(text)

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        yield lambda: signal.raise_signal(signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


def trained(
    agent: Agent, state: Any, every: int, body: Callable[[Training, int], object]
) -> tuple[int, BaseException | None]:
    """Train up to ten steps. Return the step of the last snapshot, and the exception that
    has left the `with` statement.
    """
    run, error = training(state, every=every, agent=agent), None
    try:
        with run:
            for step in run.steps(10):
                body(run, step)
    except (SystemExit, RuntimeError) as found:
        error = found
    assert run.pending is not None
    return run.pending.step, error


@pytest.mark.parametrize("first", ["this process", "a worker"])
def test_a_worker_that_sigterm_has_ended_does_not_end_the_step(
    agent: Agent, daemon: Daemon, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    def body(run: Training, step: int) -> None:
        if step == 3 and first == "this process":
            signal.raise_signal(signal.SIGTERM)
        elif step == 3:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if step == 3:
            dies()

    with worker_dies(DEAD) as dies:
        last, error = trained(agent, state_of(0.0), 100, body)
    assert isinstance(error, SystemExit)
    assert (error.code, last) == (143, 3)
    assert caplog.messages[-1] == "SIGTERM: step 3 is saved, and is the last one of this process"
    with Checkpoint.open(daemon.home.root / "job") as found:
        assert found.step == 3


@pytest.mark.parametrize(
    ("text", "seconds"), [(DEAD, 0.01), (DEAD.replace("Terminated", "Killed"), 60.0)]
)
def test_a_worker_that_dies_of_anything_else_ends_the_loop(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, text: str, seconds: float
) -> None:
    monkeypatch.setattr(training_run, "_SIGTERM_SECONDS", seconds)
    with worker_dies(text) as dies:
        last, error = trained(agent, state_of(0.0), 2, lambda run, step: step == 3 and dies())
    assert last == 2
    assert str(error) == text


def body_without_workers(run: Training, step: int) -> None:
    """Ask the loader for a batch after SIGTERM, as on several ranks, which end after the
    step that follows.
    """
    if step == 4:
        run._terminated = True
        raise RuntimeError(GONE)


def test_a_loader_without_workers_after_sigterm_has_the_step_before_saved(
    agent: Agent, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    _, error = trained(agent, state_of(0.0), 100, body_without_workers)
    assert isinstance(error, SystemExit)
    assert error.code == 143
    assert caplog.messages[-1] == "SIGTERM: step 3 is saved, and is the last one of this process"
    with Checkpoint.open(daemon.home.root / "job") as found:
        assert found.step == 3


def test_the_state_within_a_step_is_not_saved_after_sigterm(agent: Agent) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())

    def body(run: Training, step: int) -> None:
        optimizer.step()
        body_without_workers(run, step)

    last, error = trained(agent, {"model": model}, 100, body)
    assert (last, str(error)) == (0, GONE)


def test_the_last_line_says_that_the_last_step_is_not_saved(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    def body(run: Training, step: int) -> None:
        if step == 3:
            state["w"] = object()
            signal.raise_signal(signal.SIGTERM)

    state: dict[str, Any] = state_of(0.0)
    last, error = trained(agent, state, 2, body)
    assert isinstance(error, SystemExit)
    assert (error.code, last) == (143, 3)
    assert re.fullmatch(
        r"SIGTERM: step 3, the last one of this process, is not saved: .*; step 2 is the newest "
        r"that is",
        caplog.messages[-1],
        re.DOTALL,
    )


# -- several ranks


def begin(socket: Path) -> int:
    HERE["agent"] = Agent("job", socket=socket)
    return os.getpid()


def train(victim: int, at: int) -> tuple[int, int, Any]:
    """Train until the end. Return the steps, the exit code, and the last `Pending`."""
    agent, steps, code = HERE["agent"], 0, 0
    run = training({"w": torch.zeros(4)}, every=100, agent=agent)
    try:
        with run:
            for step in run.steps(30):
                torch.distributed.all_reduce(torch.zeros(1))
                steps = step
                if (agent.rank, step) == (victim, at):
                    os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as error:
        code = int(str(error.code))
    assert run.pending is not None
    return steps, code, (run.pending.step, run.pending.state)


@pytest.mark.parametrize("victim", [0, 2])
def test_all_ranks_end_after_the_same_step_if_one_gets_sigterm(daemon: Daemon, victim: int) -> None:
    """SIGTERM arrives inside step 7. Step 8 is the first that no rank can have ended."""
    with Ranks(3) as ranks:
        ranks.call(begin, daemon.home.socket)
        found = ranks.call(train, victim, 7)
    assert found == [(8, 143, (8, "durable"))] * 3
    with Checkpoint.open(daemon.home.root / "job") as checkpoint:
        assert checkpoint.step == 8
