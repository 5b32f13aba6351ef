"""Tests that a second run of a job is refused while the first one is alive, waits for one that ends, and may take over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.link import attempt
from ckptd.shared.errors import Fenced, JobRunning
from tests.support.daemons import Daemon

TRAINER = """
import sys, torch
from ckptd.agent import Agent
agent = Agent("job", socket=sys.argv[1])
agent.snapshot({"x": torch.full((3,), 7.0)}, step=7).wait("sealed", timeout=60)
print("sealed", flush=True)
for line in sys.stdin:
    try:
        if line == "recover\\n":
            agent.recover({"x": torch.zeros(3)}, step=7)
        elif line == "close\\n":
            agent.close()
        agent.snapshot({"x": torch.full((3,), 8.0)}, step=8, on_error="log").wait("sealed", timeout=60)
        print("saved", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


class Trainer:
    """Another process, with an agent of the same job."""

    def __init__(self, daemon: Daemon) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(daemon.home.socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.heard()

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.heard()


@pytest.fixture
def trainer(daemon: Daemon) -> Iterator[Trainer]:
    made = Trainer(daemon)
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "WAIT_SECONDS", 0.1)


def test_a_second_run_is_refused_and_the_first_one_still_saves(
    daemon: Daemon, trainer: Trainer, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(JobRunning, match=rf"^job 'job' is running already, in process {trainer.process.pid} since 20.* UTC: stop that run"):
        Agent("job", socket=daemon.home.socket)
    assert caplog.text.count("waiting 0.1 s for the end of another run: job 'job' is running already") == 1
    assert trainer.tell("save") == "saved"


def test_a_second_run_that_takes_over_ends_the_saving_of_the_first(
    daemon: Daemon, trainer: Trainer, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Agent("job", socket=daemon.home.socket, takeover=True)) as agent:
        assert agent.attempt == 2
        assert trainer.tell("save") == "Fenced"
        assert f"in process {trainer.process.pid} since" in daemon.home.log_text()
    trainer.process.kill()
    trainer.process.wait()
    again = Trainer(daemon)
    monkeypatch.setenv("CKPTD_TAKEOVER", "1")
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        assert agent.attempt == 4
    again.process.kill()
    again.process.communicate()


def test_a_run_that_was_taken_over_does_not_take_the_job_back(daemon: Daemon, trainer: Trainer, impatient: None) -> None:
    with closing(Agent("job", socket=daemon.home.socket, takeover=True)) as agent:
        agent.snapshot({"x": torch.zeros(3)}, step=9).wait("durable", timeout=60)
        assert trainer.tell("recover") == "Fenced"
        agent.snapshot({"x": torch.zeros(3)}, step=10).wait("durable", timeout=60)


def test_a_second_run_waits_for_the_end_of_a_killed_one(daemon: Daemon, trainer: Trainer) -> None:
    trainer.process.kill()  # the second run may come before its death is noticed
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        state = {"x": torch.zeros(3)}
        recovered = agent.recover(state)
        assert recovered is not None
        assert (agent.attempt, recovered.step, state["x"].tolist()) == (2, 7, [7.0] * 3)


def test_an_agent_that_was_closed_runs_no_longer_although_its_process_lives(daemon: Daemon, trainer: Trainer, impatient: None) -> None:
    assert trainer.tell("close") == "InvalidRequest"
    Agent("job", socket=daemon.home.socket).close()


def test_one_process_may_have_several_agents_and_go_back(daemon: Daemon, impatient: None) -> None:
    first = Agent("job", socket=daemon.home.socket)
    first.snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
    first.snapshot({"x": torch.ones(3)}, step=2).wait("durable", timeout=60)
    assert first.recover({"x": torch.zeros(3)}, step=1) is not None
    assert first.attempt == 2
    second = Agent("job", socket=daemon.home.socket)
    assert second.attempt == 3
    second.close()
    with pytest.raises(Fenced):
        first.close()
