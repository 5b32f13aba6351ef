"""Copies of snapshots in the memory of other nodes: what comes back when a node is lost
with its memory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.agent import Agent, Schedule
from ckptd.daemon.engine import orphans
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, NotFound, SnapshotFailed
from ckptd.shared.storage.locate import open_root
from tests.crash.node_trainer import check, state_of
from tests.support.daemons import until
from tests.support.nodes import Node, Nodes, nodes
from tests.support.ranks import HERE, Ranks

pytestmark = pytest.mark.usefixtures("processes")

JOB = "gpt"
REPLICAS = {"CKPTD_REPLICAS": "1"}
Sockets = list[Path]


@pytest.fixture
def three() -> Iterator[Nodes]:
    with nodes(3, environ=REPLICAS) as made:
        yield made


def sockets(place: Nodes, *where: int) -> Sockets:
    """Return the socket of each rank, given the node of each rank."""
    return [place[node].home.socket for node in where]


def begin(where: Sockets) -> None:
    HERE["agent"] = Agent(JOB, socket=where[dist.get_rank()])


def copy(step: int, **options: Any) -> str:
    """Take a snapshot that is kept in memory, and wait until it is copied to the other
    nodes. Return the error, or "".
    """
    pending = HERE["agent"].snapshot(state_of(step), step=step, persist=False, **options)
    try:
        pending.wait("replicated", timeout=60)
    except (CkptdError, TimeoutError) as error:
        return str(error)
    assert pending.replicated
    return ""


def recover(where: Sockets) -> tuple[int, str] | None:
    """Recover, and compare every value. Return the step and the source."""
    begin(where)
    state = state_of(-1)
    found = HERE["agent"].recover(state, on_reshape=lambda key, values: values[-1])
    if found is None:
        return None
    check(state, found.step)
    return found.step, found.source


def close() -> None:
    HERE["agent"].close()


def replicas(node: Node) -> list[tuple[int, list[int]]]:
    """Return the step and the ranks of each peer replica that a node holds."""
    assert node.daemon is not None
    (found,) = (job for job in node.daemon.status()["jobs"] if job["job"] == JOB)
    return [(each["step"], each["ranks"]) for each in found["peer_replicas"]]


def until_off(node: Node, words: str) -> None:
    """Wait until the status of a node says that no copies are made, for this reason."""
    assert node.daemon is not None
    daemon = node.daemon

    def is_off() -> bool:
        (found,) = (job for job in daemon.status()["jobs"] if job["job"] == JOB)
        return words in (found["replicas_off"] or "")

    until(is_off, f"{words!r} in the status")


# -- one node is lost with its memory


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_step_that_was_only_in_memory_comes_back_without_the_node(
    three: Nodes, lost: int
) -> None:
    where = sockets(three, 0, 0, 1, 1, 2, 2)
    with Ranks(6) as ranks:
        ranks.call(begin, where)
        assert ranks.call(copy, 5) == [""] * 6
        assert ranks.call(copy, 6) == [""] * 6
        three[lost].lose()
    three[lost].start()
    with Ranks(6) as ranks:
        assert ranks.call(recover, where) == [(6, "storage")] * 6
        ranks.call(close)


def hurry() -> None:
    """Have this daemon save nothing on behalf of another node before the next attempt."""
    orphans.BEHALF_SECONDS = 3600.0


def begin_save(step: int) -> None:
    """Take a snapshot that is to be saved, and do not wait for it."""
    HERE["agent"].snapshot(state_of(step), step=step, replicate=False).wait("sealed", timeout=60)


def test_a_node_that_comes_back_with_its_disk_has_lost_its_memory_all_the_same() -> None:
    """A save was under way, so that its journal knows the attempt before. But it has
    nothing to deliver of that attempt.
    """
    with nodes(3, environ=REPLICAS, first=hurry) as three:
        where = sockets(three, 0, 1, 2)
        three[1].kill()
        three[1].start(failpoints="persist.created=kill", first=hurry)
        with Ranks(3) as ranks:
            ranks.call(begin, where)
            assert ranks.call(copy, 5) == [""] * 3
            ranks.call(begin_save, 6)
            assert three[1].daemon is not None
            three[1].daemon.died()
            three[1].lose(disk=False)
        three[1].start(first=hurry)
        with Ranks(3) as ranks:
            assert ranks.call(recover, where) == [(5, "storage")] * 3
            ranks.call(close)


def test_each_node_holds_the_copies_of_one_other_node(three: Nodes) -> None:
    with Ranks(6) as ranks:
        ranks.call(begin, sockets(three, 0, 0, 1, 1, 2, 2))
        assert ranks.call(copy, 5) == [""] * 6
        assert [replicas(node) for node in three] == [[(5, [4, 5])], [(5, [0, 1])], [(5, [2, 3])]]
        assert ranks.call(copy, 6) == [""] * 6
        ranks.call(close)
    until(lambda: all(not list(node.shm.rglob("*.seg")) for node in three), "freed memory")


def test_a_step_is_delivered_for_a_lost_node_without_a_next_attempt(
    three: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ranks(3) as ranks:
        ranks.call(begin, sockets(three, 0, 1, 2))
        assert ranks.call(copy, 5) == [""] * 3
        three[1].lose()
    repository = open_root(three.root)

    def is_committed() -> bool:
        try:
            return repository.read_manifest(JOB, names.tag_directory(5, None, 1)).step == 5
        except NotFound:
            return False

    until(is_committed, "a commit with the parts of the lost node")


@pytest.mark.parametrize("again", [0, 1])
def test_copies_outlive_the_daemon_that_holds_them(three: Nodes, again: int) -> None:
    where = sockets(three, 0, 1, 2)
    with Ranks(3) as ranks:
        ranks.call(begin, where)
        assert ranks.call(copy, 5) == [""] * 3
        three[again].kill()
        three[again].start()
        before = (again - 1) % 3  # the node whose copies it holds
        until(lambda: replicas(three[again]) == [(5, [before])], "adopted copies")
        assert ranks.call(copy, 6) == [""] * 3
        three[before].lose()
    three[before].start()
    with Ranks(3) as ranks:
        assert ranks.call(recover, where) == [(6, "storage")] * 3


@pytest.mark.parametrize("count", [1, 2])
def test_the_job_goes_on_with_fewer_nodes(three: Nodes, count: int) -> None:
    """With one node, the node that is not lost and not part of the new attempt delivers
    its own parts, and the node of the attempt those of the lost one.
    """
    with Ranks(3) as ranks:
        ranks.call(begin, sockets(three, 0, 1, 2))
        assert ranks.call(copy, 5) == [""] * 3
        three[2].lose()
    where = sockets(three, *range(count))
    with Ranks(count) as ranks:
        found = ranks.call(recover, where)
    assert found == [(5, "storage")] * count


@pytest.mark.parametrize("left", [0, 1])
def test_the_job_goes_on_at_once_with_the_only_node_that_is_left(left: int) -> None:
    with nodes(2, environ=REPLICAS, first=hurry) as two:
        with Ranks(3) as ranks:
            ranks.call(begin, sockets(two, 0, 1, 1))
            assert ranks.call(copy, 5) == [""] * 3
            two[1 - left].lose()
        with Ranks(2) as ranks:
            assert ranks.call(recover, sockets(two, left, left)) == [(5, "storage")] * 2
            ranks.call(close)


def test_a_second_node_may_be_lost_after_the_job_has_replicated_again(three: Nodes) -> None:
    where = sockets(three, 0, 1, 2)
    for attempt, lost in enumerate((1, 2, 0)):
        with Ranks(3) as ranks:
            if attempt:
                assert ranks.call(recover, where) == [(attempt * 10, "storage")] * 3
            else:
                ranks.call(begin, where)
            step = (attempt + 1) * 10
            assert ranks.call(copy, step) == [""] * 3
            three[lost].lose()
        three[lost].start()
    with Ranks(3) as ranks:
        assert ranks.call(recover, where) == [(30, "storage")] * 3


# -- not every snapshot is copied


def take(first: int, last: int, every: int) -> list[str]:
    """Take snapshots in memory, copy every n-th, and return their states."""
    pending = []
    for step in range(first, last + 1):
        each = HERE["agent"].snapshot(
            state_of(step), step=step, persist=False, replicate=step % every == 0
        )
        each.wait("sealed", timeout=60)
        pending.append(each)
    copied = [each for each in pending if each.step % every == 0]
    copied[-1].wait("replicated", timeout=60)
    return [each.state for each in pending]


def test_snapshots_between_those_that_are_copied_find_slots(three: Nodes) -> None:
    where = sockets(three, 0, 1, 2)
    with Ranks(3) as ranks:
        ranks.call(begin, where)
        assert ranks.call(take, 1, 20, 10) == [["sealed"] * 20] * 3
        assert ranks.call(take, 21, 27, 21) == [["sealed"] * 7] * 3
        three[1].lose()
    three[1].start()
    with Ranks(3) as ranks:
        assert ranks.call(recover, where) == [(21, "storage")] * 3


def follow_schedule(steps: range) -> list[int]:
    """Take a snapshot at every step, wait until those that the schedule copies are
    copied, and return their steps.
    """
    when, copied = Schedule(every_steps=1, replicate_every=3, agent=HERE["agent"]), []
    for step in steps:
        pending = when.snapshot(state_of(step), step=step)
        assert pending is not None
        try:
            copied.append(pending.wait("replicated", timeout=60).step)
        except SnapshotFailed as error:
            assert "a schedule copies only some snapshots" in str(error)  # noqa: PT017
    return copied


def test_a_schedule_copies_each_nth_snapshot(three: Nodes) -> None:
    with Ranks(3) as ranks:
        ranks.call(begin, sockets(three, 0, 1, 2))
        assert ranks.call(follow_schedule, range(1, 8)) == [[3, 6]] * 3
        ranks.call(close)


def test_a_step_that_is_not_to_be_copied_says_so(three: Nodes) -> None:
    with Ranks(3) as ranks:
        ranks.call(begin, sockets(three, 0, 1, 2))
        assert (
            ranks.call(partial(copy, replicate=False), 5)
            == [
                "the snapshot is not copied to other nodes: it was taken with replicate=False, or "
                "a schedule copies only some snapshots"
            ]
            * 3
        )


# -- there are no copies


def test_a_daemon_without_replicas_turns_them_off_for_all(three: Nodes) -> None:
    three[1].kill()
    three[1].home.environ["CKPTD_REPLICAS"] = "0"
    three[1].start()
    with Ranks(3) as ranks:
        ranks.call(begin, sockets(three, 0, 1, 2))
        said = ranks.call(copy, 5)
        assert all("is set to replicas = 0, and others to 1: set the same" in each for each in said)
        for node in three:
            until_off(node, "set the same")
        assert ranks.call(close) == [None] * 3


def test_nodes_of_one_domain_have_no_peer() -> None:
    environ = REPLICAS | {"CKPTD_DOMAIN": "rack7"}
    with nodes(2, environ=environ) as two, Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        said = ranks.call(copy, 5)
        assert all("all 2 nodes are in the domain 'rack7'" in each for each in said)
        for node in two:
            until_off(node, "in the domain 'rack7'")
        ranks.call(close)


def test_ranks_of_one_node_have_no_peer() -> None:
    with nodes(1, environ=REPLICAS) as one, Ranks(2) as ranks:
        ranks.call(begin, sockets(one, 0, 0))
        said = "the snapshot is not copied to other nodes: all ranks of the job are on one node"
        assert ranks.call(copy, 5) == [said] * 2
        ranks.call(close)


def test_a_quota_without_room_for_copies_ends_them_and_not_the_training() -> None:
    with nodes(2, environ=REPLICAS | {"CKPTD_SHM_QUOTA": "1200k"}) as two, Ranks(2) as ranks:
        where = sockets(two, 0, 1)
        ranks.call(begin, where)
        said = ranks.call(copy, 5)
        assert all("of the quota of 1.2 MB are taken" in each for each in said), said
        assert ranks.call(saved, 6) == [""] * 2
        assert all("of the quota of 1.2 MB are taken" in each for each in ranks.call(copy, 7))
        ranks.call(close)


def saved(step: int) -> str:
    """Take a snapshot, wait until it is durable, and return the error, or ""."""
    pending = HERE["agent"].snapshot(state_of(step), step=step)
    try:
        pending.wait("durable", timeout=60)
    except CkptdError as error:
        return str(error)
    return ""


# -- the end of a process

EXIT = """
import atexit, sys, threading, time
from types import SimpleNamespace

atexit.register(lambda: print([t.name for t in threading.enumerate()]))

from torch.distributed import TCPStore
from ckptd.agent.peers.replicator import Replicator

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = SimpleNamespace(welcome=SimpleNamespace(copies=None))


def store():
    return TCPStore("127.0.0.1", server.port, is_master=False)


ranks = [Replicator(client, store, "p", rank, 1, 1 - rank, [1 - rank], None) for rank in (0, 1)]
while sum(len(rank._pairs) for rank in ranks) < 4:
    time.sleep(0.01)
sys.exit(3)
"""
"""Two ranks that wait for a step to copy, and for copies."""


def test_no_thread_of_copies_is_left_when_the_interpreter_exits() -> None:
    """A thread that returned from gloo after that would abort the process."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("['MainThread']\n", 3), done.stderr


# -- the job ends


def close_during_a_copy(step: int) -> None:
    """Close the agent once a snapshot is durable, and its copy is still under way."""
    HERE["agent"].snapshot(state_of(step), step=step).wait("durable", timeout=60)
    HERE["agent"].close()


def test_a_copy_that_the_end_of_the_job_interrupts_leaves_no_segment() -> None:
    slow = dict.fromkeys(range(3), "agent.copy.offered=sleep(10)")
    with nodes(3, environ=REPLICAS) as three, Ranks(3, armed=slow) as ranks:
        ranks.call(begin, sockets(three, 0, 1, 2))
        ranks.call(close_during_a_copy, 5)
        until(lambda: not any(node.segments() for node in three), "end of all segments")
