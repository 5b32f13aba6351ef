"""Tests what can be recovered, as told without beginning an attempt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent, Newest, newest
from ckptd.shared.errors import DaemonUnreachable, IntegrityError, InvalidName, InvalidRequest
from tests.support import trainers
from tests.support.daemons import Daemon, Home, running, until


def test_nothing_is_there_before_the_first_snapshot(daemon: Daemon) -> None:
    assert newest("job", socket=daemon.home.socket) is None


def test_the_newest_state_is_in_memory_and_then_on_storage(daemon: Daemon) -> None:
    socket = daemon.home.socket
    agent = Agent("job", socket=socket)
    agent.snapshot({"w": torch.ones(3)}, step=1).wait("durable", timeout=60)
    assert newest("job", socket=socket) == Newest(1, 1, "step-00000001.a0001", "memory")
    agent.snapshot({"w": torch.ones(3)}, step=2, persist=False)
    sealed = Newest(2, 1, "step-00000002.a0001", "memory")
    until(lambda: newest("job", socket=socket) == sealed, "the daemon has heard of the seal")
    assert agent.attempt == 1, "asking begins no attempt"
    agent.close()
    assert newest("job", socket=socket) == Newest(2, 1, "step-00000002.a0001", "storage")
    assert newest("other", socket=socket) is None


@pytest.mark.usefixtures("processes")
def test_what_a_killed_trainer_has_left_in_memory_is_found_by_the_next_daemon(
    place: Home,
) -> None:
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"w": torch.ones(3)}, step=1, persist=False)
        daemon.kill()
        trainers.vanish(agent)
    with running(place, forked=True):
        found = newest("job", socket=place.socket)
        assert found is not None
        assert (found.step, found.attempt) == (1, 1)


def test_checkpoints_that_are_all_damaged_are_not_nothing(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"w": torch.ones(3)}, step=1).wait("durable", timeout=60)
    agent.close()
    manifest = daemon.home.root / "job" / "step-00000001.a0001" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    with pytest.raises(IntegrityError):
        newest("job", socket=daemon.home.socket)


def test_bad_input_is_refused(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTD_JOB", raising=False)
    socket = daemon.home.socket
    with pytest.raises(InvalidName):
        newest("../job", socket=socket)
    with pytest.raises(InvalidRequest, match="^this daemon serves several jobs: name this job "):
        newest(socket=socket)
    with pytest.raises(InvalidRequest, match="uses root "):
        newest("job", tmp_path, socket=socket)
    with pytest.raises(DaemonUnreachable):
        newest("job", socket=tmp_path / "none")
