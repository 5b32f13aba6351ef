"""Tests the plan for descriptors, and that real daemons keep to it."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.process import limits
from ckptd.shared import errors
from ckptd.shared.wire.channel import Channel
from tests.support.daemons import Daemon, Home, running, until


def opened(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def limited(place: Home, soft: int, hard: int, *arguments: str, **environment: str) -> Daemon:
    under = ("prlimit", f"--nofile={soft}:{hard}")
    return Daemon(place, *arguments, under=under, environment=environment)


def test_the_plan_counts_descriptors_for_slots_and_ranks() -> None:
    plan = limits.DescriptorPlan(slots=2)
    assert plan.per_rank == 10
    assert plan.least == 51
    assert [plan.ranks(limit) for limit in (0, 50, 51, 60, 61, 1024)] == [0, 0, 1, 1, 2, 98]
    assert limits.DescriptorPlan(slots=8, files=64).per_rank == 85


@pytest.mark.parametrize("slots", [2, 3, 8])
def test_as_many_clients_are_accepted_as_the_plan_says(slots: int) -> None:
    plan = limits.DescriptorPlan(slots)
    for limit in range(plan.least, 400):
        fit = plan.ranks(limit)
        # No segments of an earlier run are left, or those of as many ranks are.
        for segments in (0, slots * fit):
            accepted = 0
            while plan.fits(limit, accepted, accepted, segments):
                accepted += 1
            assert accepted == fit, (limit, segments)


def test_segments_beyond_the_plan_leave_less_room() -> None:
    plan = limits.DescriptorPlan(2)
    assert plan.ranks(151) == 11
    assert [plan.fits(151, 0, 0, segments) for segments in (102, 103)] == [True, False]


def test_a_limit_that_is_too_low_is_named() -> None:
    plan = limits.DescriptorPlan(2)
    assert plan.warning(61, 2) == ""
    assert plan.warning(51, 2).startswith(
        "max_connections is 2, but only 1 of them fit into the limit of 51 open files"
    )
    assert "2 clients need a limit of 61" in plan.warning(51, 2)
    limits.check(plan, 51)
    with pytest.raises(
        errors.InvalidConfig, match="needs 51 for one rank and 10 more for each other one"
    ):
        limits.check(plan, 50)


def test_used_counts_descriptors() -> None:
    before = limits.used()
    with open(os.devnull):
        assert limits.used() == before + 1


def test_used_counts_descriptors_where_proc_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = limits.used()

    def hidden(path: str) -> list[str]:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", hidden)
    assert limits.used() == counted
    with open(os.devnull):
        assert limits.used() == counted + 1


def test_a_process_without_a_free_descriptor_has_used_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "listdir", full)
    assert limits.used() == limits.soft_limit()


@pytest.mark.usefixtures("processes")
def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = (
        "from ckptd.daemon.process import limits; print(limits.raise_limit(), limits.soft_limit())"
    )
    command = ["prlimit", "--nofile=64:200", sys.executable, "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "200 200\n"


@pytest.mark.usefixtures("processes")
def test_a_daemon_raises_its_own_limit(place: Home) -> None:
    daemon = limited(place, 30, 500).wait_ready()
    assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (500, 500)
    told = daemon.status()["descriptors"]
    assert (told["limit"], told["clients"], told["accepting_paused"]) == (500, 1, None)
    assert told["clients_fit"] == (fit := limits.DescriptorPlan(2, 2).ranks(500))
    assert (
        f"max_connections is 256, but only {fit} of them fit into the limit of 500 open files"
        in place.log_text()
    )
    daemon.stop()


@pytest.mark.usefixtures("processes")
def test_a_daemon_without_room_for_one_rank_does_not_start(place: Home) -> None:
    daemon = limited(place, 50, 50)
    assert daemon.died() == 2
    assert "the limit of 50 open files (RLIMIT_NOFILE) is too low" in place.log_text()
    daemon.close()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("slots", [2, 4])
def test_descriptors_of_a_rank_are_as_planned(place: Home, slots: int) -> None:
    """One idle rank takes one descriptor for its connection and one for each slot.

    The daemon itself takes at most `OWN`.
    """
    with running(place, "--slots", str(slots)) as daemon:
        until(lambda: opened(daemon) <= limits.OWN, "rest")
        own, agents = opened(daemon), []
        assert own >= limits.OWN - 6  # asyncio's own event loop has fewer
        for rank in range(3):
            agents.append(Agent(f"job-{rank}", socket=place.socket))
            agents[-1].snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
            wanted = own + (rank + 1) * (limits.CONNECTION + slots)
            until(lambda wanted=wanted: opened(daemon) == wanted, f"{wanted} descriptors")  # type: ignore[misc]
        for agent in agents:
            agent.close()
        until(lambda: opened(daemon) == own, "return to the start")


@pytest.mark.usefixtures("processes")
def test_clients_beyond_the_limit_get_an_error_before_descriptors_run_out(place: Home) -> None:
    daemon = limited(place, 96, 96).wait_ready()  # room for five ranks
    held = [Channel(place.socket, 30) for _ in range(5)]
    with pytest.raises(
        errors.Busy,
        match="has 5 clients and no room for another one within its limit of 96 open "
        "files.*LimitNOFILE=",
    ):
        Channel(place.socket, 30)
    assert opened(daemon) < 96 - limits.SPARE
    for channel in held:
        channel.close()
    until(lambda: reaches(place), "answer")
    assert daemon.status()["counters"]["accept_pauses"] == 0
    assert daemon.stop() == 0


def reaches(place: Home) -> bool:
    try:
        Channel(place.socket, 30).close()
    except errors.Busy:
        return False
    return True


@pytest.mark.usefixtures("processes")
def test_ranks_that_fit_reconnect_after_a_restart_and_fit_in_a_new_run(
    place: Home, tmp_path: Path
) -> None:
    """The segments of the previous run still exist when all ranks start again."""
    limit = limits.DescriptorPlan(2, 2).needed(3)
    for run in (1, 2):
        daemon = limited(place, limit, limit).wait_ready()
        # This process holds the locks of run 1.
        agents = [Agent(f"job-{rank}", socket=place.socket, takeover=True) for rank in range(3)]
        for rank, agent in enumerate(agents):
            state = {"x": torch.zeros(3)}
            recovered = agent.recover(state)
            assert (recovered and recovered.step) == (run - 1 or None)
            assert torch.equal(
                state["x"], torch.full((3,), float(recovered.step if recovered else 0))
            )
            agent.snapshot({"x": torch.full((3,), float(run))}, step=run).wait(
                "durable", timeout=60
            )
            assert rank < 3
        daemon.kill()
        again = limited(place, limit, limit).wait_ready()
        for agent in agents:
            until(lambda agent=agent: agent._link.client.connected, "connection after the restart")  # type: ignore[misc]
            agent._link.client.close()  # as if its process had ended without a message
        again.stop()


@pytest.mark.usefixtures("processes")
def test_a_daemon_that_ran_out_of_descriptors_accepts_clients_again(place: Home) -> None:
    """Clients that come while no descriptor is left wait, and are served afterwards."""
    daemon = Daemon(place).wait_ready()
    pid = daemon.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The numbers below 3 belong to the standard streams.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(10)]
    for client in waiting:
        client.connect(str(place.socket))
    until(
        lambda: "no client can be accepted: Too many open files" in place.log_text(),
        "word in the log",
    )
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    status = daemon.status()  # behind the earlier clients
    assert (
        status["ready"],
        status["descriptors"]["accepting_paused"],
        status["counters"]["accept_pauses"],
    ) == (True, None, 1)
    for client in waiting:
        client.close()
    until(lambda: opened(daemon) <= limits.OWN, "return to the start")
    assert place.log_text().count("no client can be accepted") == 1
    assert "clients are accepted again" in place.log_text()
    assert daemon.stop() == 0
