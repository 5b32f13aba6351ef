"""Tests that a drain saves what is owed while trainers train on, with real daemons, and
says what has not left the node.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptd.agent import Agent, Checkpoint
from ckptd.daemon.process.drain import FIRST_PAUSE, LONGEST_PAUSE, LOOK_SECONDS
from ckptd.shared.errors import NotFound, from_wire
from ckptd.shared.formats.segment import read_header
from ckptd.shared.location import Location
from ckptd.shared.storage.locate import open_root
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel
from ckptd.shared.wire.session import DRAIN
from tests.crash.node_trainer import check, state_of
from tests.support import trainers
from tests.support.daemons import Home, running, until
from tests.support.nodes import Nodes, nodes
from tests.support.ranks import HERE, Ranks

pytestmark = pytest.mark.usefixtures("processes")

FULL = "persist.writing=error(ENOSPC)"
STALLED = "persist.writing=sleep(60)"
LONG = 100.0
"""A deadline that no test reaches: the drain ends because nothing is owed any more."""


def drain(socket: Path, seconds: float = LONG, job: str = "") -> m.Drained:
    with closing(Channel(socket, 10.0, later=seconds + 30.0)) as channel:
        assert DRAIN in channel.welcome.features
        channel.send(m.Drain(id=channel.new_id(), job=job, seconds=seconds))
        reply = channel.receive()[0]
    if isinstance(reply, m.Error):
        raise from_wire(reply.code, reply.message)
    assert isinstance(reply, m.Drained)
    return reply


def in_memory(place: Home, step: int, job: str = "gpt") -> Agent:
    """Return a trainer of this process that has sealed a step in memory only."""
    agent = Agent(job, socket=place.socket)
    agent.snapshot({"w": torch.arange(1000.0) + step}, step=step, persist=False).wait(
        "sealed", timeout=60
    )
    return agent


def shown(reply: m.Drained) -> list[tuple[str, str]]:
    return [(due.job, due.state) for due in reply.owed]


def committed(root: Location, job: str) -> list[int]:
    repository = open_root(root)
    return sorted(
        repository.read_manifest(job, tag).step or 0
        for tag in repository.tags(job)
        if repository.is_committed(job, tag)
    )


# -- the trainer trains on


def train_on(socket: Path, sealed: Path) -> None:
    """Take snapshots in memory only for ever, and write each sealed step to a file."""
    agent = Agent(trainers.JOB, socket=socket)
    step = 0
    while True:
        step += 1
        agent.snapshot(trainers.expected(step), step=step, persist=False).wait("sealed")
        written = sealed.with_suffix(".new")
        written.write_text(str(step))
        written.replace(sealed)  # so that a reader never finds an empty file


def test_what_was_sealed_survives_the_loss_of_the_node_while_the_trainer_trains_on(
    place: Home,
) -> None:
    told = place.path / "sealed"
    with running(place, forked=True) as daemon, Ranks(1) as ranks:
        ranks.begin(train_on, place.socket, told)
        until(lambda: told.exists() and int(told.read_text()) > 5, "steps in memory")
        before = int(told.read_text())
        reply = drain(place.socket)
        after = int(told.read_text())
        assert (reply.owed, len(reply.saved)) == ([], 1)
        until(lambda: int(told.read_text()) > after, "further steps")
        ranks.kill(0)
        daemon.kill()
    shutil.rmtree(place.segments)
    with Checkpoint.open(place.root / trainers.JOB, "newest") as checkpoint:
        step = checkpoint.step
        assert step is not None
        assert step >= before
        assert reply.saved == [f"{trainers.JOB}/{checkpoint.tag}"]
    with running(place, forked=True):
        _, recovered = trainers.begin(place.socket)  # compares the state bit for bit
        assert recovered == (1, step)


def test_a_daemon_that_owes_nothing_says_so_at_once(place: Home) -> None:
    with running(place, "--log-format", "json", forked=True):
        assert drain(place.socket) == m.Drained(re=2)
        agent = in_memory(place, 5)
        assert drain(place.socket).saved == ["gpt/step-00000005.a0001"]
        assert drain(place.socket) == m.Drained(re=2)
        agent.close()
        assert drain(place.socket) == m.Drained(re=2)
    assert [event["saved"] for event in place.events("drain.done")] == [0, 1, 0, 0]
    assert place.events("drain.left") == []


def test_a_trainer_whose_snapshot_is_drained_learns_that_it_is_durable(place: Home) -> None:
    with running(place, forked=True):
        agent = Agent("gpt", socket=place.socket)
        pending = agent.snapshot({"w": torch.ones(9)}, step=5, persist=False).wait("sealed")
        drain(place.socket)
        assert pending.wait("durable", timeout=60).state == "durable"
        agent.close()


def test_a_trainer_that_has_just_died_is_drained(place: Home) -> None:
    with running(place, forked=True):
        trainers.vanish(in_memory(place, 5))
        assert drain(place.socket).owed == []
        assert committed(place.root, "gpt") == [5]


def test_one_job_or_all_jobs_are_drained(place: Home) -> None:
    with running(place, forked=True):
        agents = [in_memory(place, 5, job) for job in ("a", "b", "c")]
        with pytest.raises(NotFound, match="no job 'd'; the jobs that it has: a, b, c"):
            drain(place.socket, job="d")
        assert drain(place.socket, job="b").saved == ["b/step-00000005.a0001"]
        jobs = ("a", "b", "c")
        assert [committed(place.root, job) for job in jobs] == [[], [5], []]
        saved = drain(place.socket).saved  # in the order in which the saves have ended
        assert sorted(saved) == ["a/step-00000005.a0001", "c/step-00000005.a0001"]
        for agent in agents:
            trainers.vanish(agent)


# -- what does not leave


def test_a_full_disk_is_told_with_the_job_and_the_reason(place: Home) -> None:
    """No other try is under way at the deadline, which comes before the first pause ends."""
    with running(place, "--log-format", "json", forked=True, failpoints=FULL):
        agents = [in_memory(place, 5, job) for job in ("a", "b")]
        reply = drain(place.socket, seconds=0.9 * FIRST_PAUSE)
        assert len(place.events("save.failed")) == 2  # one try each
        assert (reply.saved, shown(reply)) == ([], [("a", "failed"), ("b", "failed")])
        assert ["No space left on device" in due.reason for due in reply.owed] == [True, True]
        for agent in agents:
            trainers.vanish(agent)
    (event,) = place.events("drain.left")
    assert (event["saved"], event["owed"]) == (0, 2)


def test_a_save_that_has_failed_is_tried_again_until_it_succeeds(place: Home) -> None:
    assert LOOK_SECONDS < FIRST_PAUSE < LONGEST_PAUSE
    with running(place, forked=True, failpoints=f"{FULL}@1"):
        agent = in_memory(place, 5)
        assert drain(place.socket).saved == ["gpt/step-00000005.a0001"]
        trainers.vanish(agent)


def test_a_save_that_is_too_slow_says_how_far_it_is_and_goes_on(place: Home) -> None:
    with running(place, forked=True, failpoints="persist.index=sleep(4)"):
        agent = in_memory(place, 5)
        reply = drain(place.socket, seconds=1.0)
        (due,) = reply.owed
        assert (due.state, due.step, due.tag) == ("saving", 5, "step-00000005.a0001")
        assert due.total > 4000
        assert 0 < due.done <= due.total
        assert drain(place.socket).owed == []
        assert committed(place.root, "gpt") == [5]
        trainers.vanish(agent)


def test_a_save_that_waits_for_another_one_says_so(place: Home) -> None:
    with running(place, forked=True, failpoints=STALLED):
        agent = Agent("gpt", socket=place.socket)
        agent.snapshot({"w": torch.ones(9)}, step=5).wait("sealed", timeout=60)
        agent.snapshot({"w": torch.ones(9)}, step=6, persist=False).wait("sealed", timeout=60)
        reply = drain(place.socket, seconds=0.5)
        assert [(due.step, due.state, due.total) for due in reply.owed] == [(6, "waiting", 0)]
        trainers.vanish(agent)


def test_the_deadline_may_be_over_at_once(place: Home) -> None:
    """Check that the reply names what is owed, which is then being saved."""
    with running(place, forked=True):
        agent = in_memory(place, 5)
        assert [due.step for due in drain(place.socket, seconds=0.0).owed] == [5]
        until(lambda: committed(place.root, "gpt") == [5], "save")
        trainers.vanish(agent)


def test_a_newer_snapshot_that_has_replaced_one_whose_save_has_failed_is_saved(
    place: Home,
) -> None:
    with running(place, forked=True, failpoints=f"{FULL}@1") as daemon:
        agent = in_memory(place, 5)
        replies: list[m.Drained] = []
        draining = threading.Thread(target=lambda: replies.append(drain(place.socket)))
        draining.start()
        until(lambda: daemon.status()["counters"]["failed"] == 1, "failure")
        agent.snapshot({"w": torch.ones(9)}, step=6, persist=False).wait("sealed", timeout=60)
        draining.join()
        assert [reply.owed for reply in replies] == [[]]
        assert committed(place.root, "gpt") in ([5], [6])
        trainers.vanish(agent)


def test_damaged_memory_is_told_before_the_deadline(place: Home) -> None:
    """No further try can save it, so that the drain does not wait."""
    with running(place, forked=True) as daemon:
        agent = in_memory(place, 5)
        until(lambda: not daemon.status()["jobs"][0]["pending"], "check")
        for path in place.segment_files():
            with path.open("r+b") as file:
                header = read_header(file.fileno())
                file.seek(header.data_offset)
                file.write(b"\xff" * 64)
        (due,) = drain(place.socket).owed
        assert due.state == "failed"
        assert "has changed in memory since it was sealed" in due.reason
        trainers.vanish(agent)


# -- a stage


@pytest.fixture
def stage(place: Home) -> Path:
    return place.path / "stage"


def test_what_is_on_the_stage_is_owed_until_it_is_in_the_root(place: Home, stage: Path) -> None:
    with running(
        place, "--stage", str(stage), forked=True, failpoints="upload.intended=error(EIO)@1"
    ):
        agent = in_memory(place, 5)
        assert drain(place.socket).saved == ["gpt/step-00000005.a0001"]
        assert committed(place.root, "gpt") == [5]
        trainers.vanish(agent)


def test_an_upload_that_does_not_succeed_is_told(place: Home, stage: Path) -> None:
    with running(
        place, "--stage", str(stage), forked=True, failpoints="upload.intended=error(EIO)"
    ):
        agent = Agent("gpt", socket=place.socket)
        agent.snapshot({"w": torch.ones(9)}, step=5).wait("durable", timeout=60)
        agent.snapshot({"w": torch.ones(9)}, step=6, persist=False).wait("sealed", timeout=60)
        reply = drain(place.socket, seconds=1.5)
        assert [(due.step, due.state) for due in reply.owed] == [(6, "uploading"), (5, "uploading")]
        assert all("Input/output error" in due.reason for due in reply.owed)
        assert committed(stage, "gpt") == [5, 6]
        trainers.vanish(agent)


# -- several nodes


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes(2) as made:
        yield made


def hold(where: list[Path], steps: list[int], pause: float = 0.0) -> None:
    """Take steps in memory only, on this rank."""
    if "agent" not in HERE:
        HERE["agent"] = Agent("gpt", socket=where[dist.get_rank()])
    for step in steps:
        HERE["agent"].snapshot(state_of(step), step=step, persist=False).wait("sealed", timeout=60)
        time.sleep(pause)


def test_a_step_of_several_nodes_is_saved_by_all_of_them_and_survives_them(two: Nodes) -> None:
    """The other node hears of the drain at its next look at the board."""
    where = [node.home.socket for node in two]
    with Ranks(2) as ranks:
        ranks.call(hold, where, [5])
        ranks.begin(hold, where, list(range(6, 60)), 0.05)
        reply = drain(where[1])
        assert reply.owed == []
        ranks.results()
        for node in two:
            node.lose()
    saved = committed(two.root, "gpt")
    assert f"gpt/step-{saved[-1]:08d}.a0001" in reply.saved
    for node in two:
        node.start()
    with Ranks(2) as ranks:
        assert ranks.call(recover, where) == [saved[-1]] * 2


def recover(where: list[Path]) -> int | None:
    state: dict[str, Any] = state_of(-1)
    found = Agent("gpt", socket=where[dist.get_rank()]).recover(state)
    if found is None or found.step is None:
        return None
    check(state, found.step)
    return found.step


def test_all_nodes_save_the_step_that_one_node_is_drained_of(two: Nodes) -> None:
    """The node without rank 0 looks at the board after its next step at the latest."""
    where = [node.home.socket for node in two]
    with Ranks(2) as ranks:
        ranks.call(hold, where, [5])
        ranks.begin(hold, where, list(range(6, 60)), 0.05)
        assert drain(where[0]).owed == []
        ranks.results()
        assert committed(two.root, "gpt") != []
