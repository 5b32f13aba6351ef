"""Tests that a second run of a job is refused while the first one is alive, waits for
one that ends, and may take over.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.link import attempt
from ckptd.shared import names
from ckptd.shared.errors import Fenced, JobRunning
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.storage.locate import open_root
from tests.support import forks
from tests.support.daemons import Daemon, until
from tests.support.nodes import Node, Nodes, beat_fast


class Trainer:
    """Another process, with an agent of the same job. `run`: the id of its torchrun."""

    def __init__(self, socket: Path, run: str = "") -> None:
        context = forks.context()
        self._connection, its = context.Pipe()
        self.process = context.Process(target=train, args=(its, socket, run), daemon=True)
        self.process.start()
        its.close()
        assert self._connection.recv() == "sealed"
        assert self.process.pid is not None
        self.pid = self.process.pid

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def tell(self, line: str) -> str:
        self._connection.send(line)
        return str(self._connection.recv())


def train(connection: Connection[str, str], socket: Path, run: str) -> None:
    """Save step 7. Then do what is said, and save step 8."""
    os.environ["TORCHELASTIC_RUN_ID"] = run
    agent = Agent("job", socket=socket)
    agent.snapshot({"x": torch.full((3,), 7.0)}, step=7).wait("sealed", timeout=60)
    connection.send("sealed")
    while True:
        line = connection.recv()
        try:
            if line == "recover":
                agent.recover({"x": torch.zeros(3)}, step=7)
            elif line == "close":
                agent.close()
            state = {"x": torch.full((3,), 8.0)}
            agent.snapshot(state, step=8, on_error="log").wait("sealed", timeout=60)
            connection.send("saved")
        except Exception as error:
            connection.send(type(error).__name__)


@pytest.fixture
def trainer(daemon: Daemon) -> Iterator[Trainer]:
    made = Trainer(daemon.home.socket)
    yield made
    made.end()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "WAIT_SECONDS", 0.1)


def test_a_second_run_is_refused_and_the_first_one_still_saves(
    daemon: Daemon, trainer: Trainer, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        JobRunning,
        match=rf"^job 'job' is running already, in process {trainer.pid} since 20.* UTC: "
        rf"stop that run",
    ):
        Agent("job", socket=daemon.home.socket)
    assert (
        caplog.text.count("waiting 0.1 s for the end of another run: job 'job' is running already")
        == 1
    )
    assert trainer.tell("save") == "saved"


def test_a_second_run_that_takes_over_ends_the_saving_of_the_first(
    daemon: Daemon, trainer: Trainer, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Agent("job", socket=daemon.home.socket, takeover=True)) as agent:
        assert agent.attempt == 2
        assert trainer.tell("save") == "Fenced"
        assert f"in process {trainer.pid} since" in daemon.home.log_text()
    trainer.process.kill()
    trainer.process.join()
    again = Trainer(daemon.home.socket)
    monkeypatch.setenv("CKPTD_TAKEOVER", "1")
    with closing(Agent("job", socket=daemon.home.socket)) as agent:
        assert agent.attempt == 4
    again.end()


def test_a_run_that_was_taken_over_does_not_take_the_job_back(
    daemon: Daemon, trainer: Trainer, impatient: None
) -> None:
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


def test_an_agent_that_was_closed_runs_no_longer_although_its_process_lives(
    daemon: Daemon, trainer: Trainer, impatient: None
) -> None:
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


# -- runs on two nodes that share a root


@pytest.fixture
def two(processes: None) -> Iterator[Nodes]:
    made = Nodes(2)
    try:
        for node in made:
            node.start(first=beat_fast)
        yield made
    finally:
        print(made.logs())
        made.remove()


@pytest.fixture
def distant(two: Nodes) -> Iterator[Trainer]:
    """A trainer on the first node, whose heartbeat is there."""
    made = Trainer(two[0].home.socket, "gpt-7")
    until(lambda: beating(two) == [1], "the heartbeat")
    yield made
    made.end()


def beating(place: Nodes) -> list[int]:
    return HeartbeatStore(open_root(place.root).storage).attempts("job")


def watched(node: Node) -> bool:
    """Return True if the daemon of this node has watched the heartbeat of another one."""
    return "watching the heartbeat of another run" in node.home.log_text()


def test_a_second_run_on_another_node_is_refused_and_the_first_one_still_saves(
    two: Nodes, distant: Trainer, impatient: None
) -> None:
    refusal = (
        rf"^job 'job' is running already, in process {distant.pid} on node0 since "
        rf"20.* "
        rf"UTC: stop that run, .* takeover=True"
    )
    with pytest.raises(JobRunning, match=refusal):
        Agent("job", socket=two[1].home.socket)
    assert distant.tell("save") == "saved"
    assert open_root(two.root).newest_attempt("job") == 1, "the refused run has claimed nothing"


def test_a_run_on_another_node_may_take_over_and_both_save(two: Nodes, distant: Trainer) -> None:
    with closing(Agent("job", socket=two[1].home.socket, takeover=True)) as agent:
        assert agent.attempt == 2
        agent.snapshot({"x": torch.zeros(3)}, step=9).wait("durable", timeout=60)
        assert distant.tell("save") == "saved"
        until(lambda: beating(two) == [2], "the end of the heartbeat that is no longer the newest")
        assert (
            "attempt 2 has begun on another node, while attempt 1 is running here"
            in two[0].home.log_text()
        )
    assert not watched(two[1])
    until(lambda: beating(two) == [], "the end of the heartbeat")


@pytest.mark.parametrize("how", ["close", "death"])
def test_a_run_that_has_ended_on_another_node_is_not_waited_for(
    two: Nodes, distant: Trainer, how: str
) -> None:
    if how == "close":
        assert distant.tell("close") == "InvalidRequest"
    else:
        distant.end()
    until(lambda: beating(two) == [], "the end of the heartbeat")
    with closing(Agent("job", socket=two[1].home.socket)) as agent:
        assert agent.attempt == 2
    assert not watched(two[1])


def test_a_run_on_a_node_that_is_lost_is_watched_until_its_heartbeat_is_dead(
    two: Nodes, distant: Trainer
) -> None:
    two[0].lose()
    distant.end()
    with closing(Agent("job", socket=two[1].home.socket)) as agent:
        assert agent.attempt == 2
        until(lambda: beating(two) == [2], "the heartbeat of the second run in place of the first")
    assert watched(two[1])


def test_a_run_that_comes_back_on_its_node_does_not_wait(two: Nodes, distant: Trainer) -> None:
    two[0].kill()
    distant.end()
    two[0].start(first=beat_fast)
    assert beating(two) == [1], "the heartbeat was left by the daemon that was killed"
    with closing(Agent("job", socket=two[0].home.socket)) as agent:
        assert agent.attempt == 2
        until(lambda: beating(two) == [2], "the heartbeat of the second attempt")
    assert not watched(two[0])


def test_the_workers_of_one_torchrun_are_one_run_on_all_nodes(
    two: Nodes, distant: Trainer, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "gpt-7")
    with closing(Agent("job", socket=two[1].home.socket)) as agent:
        assert agent.attempt == 2
    assert not watched(two[1])


def test_a_run_is_known_while_and_after_its_daemon_is_started_again(
    two: Nodes, distant: Trainer, impatient: None
) -> None:
    # So that it does not reconnect yet, and only its lock shows that it lives.
    os.kill(distant.pid, signal.SIGSTOP)
    two[0].kill()
    two[0].start(first=beat_fast)
    with pytest.raises(JobRunning, match=rf"in process {distant.pid} on node0 since"):
        Agent("job", socket=two[1].home.socket)
    os.kill(distant.pid, signal.SIGCONT)
    assert distant.tell("save") == "saved"


def test_heartbeats_that_cannot_be_kept_or_read_hold_nobody_up(two: Nodes, impatient: None) -> None:
    assert isinstance(two.root, Path)
    place = two.root / names.runs("job")
    place.parent.mkdir(parents=True)
    place.write_text("not a directory")
    first = Trainer(two[0].home.socket)
    try:
        assert first.tell("save") == "saved"
        with closing(Agent("job", socket=two[1].home.socket)) as agent:
            agent.snapshot({"x": torch.zeros(3)}, step=9).wait("durable", timeout=60)
        until(
            lambda: "the heartbeat of attempt 1 cannot be kept" in two[0].home.log_text(),
            "a line in the log",
        )
        assert (
            "begins without knowing whether it is running on another node" in two[1].home.log_text()
        )
    finally:
        first.end()
