"""Tests daemons with two destinations: a stage for jobs of one node, and the root behind it for jobs of several nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ckptd.daemon import uploader
from ckptd.shared import names
from ckptd.shared.storage.locate import open_root
from tests.agent.test_several_nodes import HERE, JOB, begin, close, recover, sockets, state_of, take
from tests.support.daemons import until
from tests.support.nodes import Node, Nodes
from tests.support.ranks import Ranks

KEEP = ("--keep-last", "2")


def wait_long_after_a_failed_upload() -> None:
    uploader.FIRST_PAUSE = 600.0


@pytest.fixture
def two() -> Iterator[Nodes]:
    """Two nodes that share a root, each with a stage of its own. An upload that fails is not tried again by itself."""
    made = Nodes(2)
    try:
        for node in made:
            node.put_stage()
            node.start(*KEEP, first=wait_long_after_a_failed_upload)
        yield made
    except BaseException:
        print(made.logs())
        raise
    finally:
        made.remove()


def steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in a root."""
    repository = open_root(root)
    found = [names.parse_tag_directory(tag) for tag in repository.tags(JOB) if repository.is_committed(JOB, tag)]
    return sorted(parsed[1] or 0 for parsed in found if parsed)


def stage_of(node: Node) -> Path:
    assert node.stage is not None
    return node.stage


def upload(step: int) -> str:
    """Take a step, and return its state once it is in the root."""
    pending = HERE["agent"].snapshot(state_of(step), step=step)
    return str(pending.wait("uploaded", timeout=60).state)


def test_a_job_of_several_nodes_is_saved_straight_to_the_root(two: Nodes) -> None:
    where = sockets(two, 0, 0, 1, 1)
    with Ranks(4) as ranks:
        ranks.call(begin, where)
        for step in range(1, 5):
            assert ranks.call(upload, step) == ["uploaded"] * 4
        until(lambda: steps(two.root) == [3, 4], "retention in the root")
        status = two[0].daemon.status()
        assert (status["stage"]["waiting"], status["counters"]["uploaded"], status["counters"]["retired"]) == (0, 0, 2)
        assert status["jobs"][0]["last_durable"]["step"] == status["jobs"][0]["last_uploaded"]["step"] == 4
        ranks.call(close)
    assert [steps(stage_of(node)) for node in two] == [[], []]
    with Ranks(3) as ranks:
        assert ranks.call(recover, sockets(two, 1, 0, 1)) == [(4, names.tag_directory(4, None, 1))] * 3


def test_it_may_move_to_one_node_and_back(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
    with Ranks(2) as ranks:
        assert ranks.call(recover, sockets(two, 1, 1)) == [(5, names.tag_directory(5, None, 1))] * 2
        assert ranks.call(upload, 6) == ["uploaded"] * 2
        assert steps(stage_of(two[1])) == [6]
        ranks.call(close)
    with Ranks(2) as ranks:
        assert ranks.call(recover, sockets(two, 0, 1)) == [(6, names.tag_directory(6, None, 2))] * 2
        assert ranks.call(take, 7) == [""] * 2
    assert steps(two.root) == [6, 7]


def test_several_nodes_recover_what_only_the_stage_of_one_node_has(two: Nodes) -> None:
    """The node does not have rank 0, and its daemon does not upload the checkpoint by itself yet."""
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 1, 1))
        assert ranks.call(upload, 5) == ["uploaded"] * 2
        two.root.rename(two.path / "away")
        assert ranks.call(take, 6) == [""] * 2
        until(lambda: two[1].daemon.status()["stage"]["problem"], "problem")
        ranks.call(close)
    (two.path / "away").rename(two.root)
    assert steps(two.root) == [5]
    with Ranks(2) as ranks:
        assert ranks.call(recover, sockets(two, 0, 1)) == [(6, names.tag_directory(6, None, 1))] * 2
    assert steps(two.root) == [5, 6]


@pytest.mark.parametrize("point", ["persist.intended", "persist.journaled", "receipt.starting", "receipt.durable", "outcome.known"])
def test_a_daemon_that_dies_during_a_save_goes_on_with_it(two: Nodes, point: str) -> None:
    two[1].kill()
    two[1].start(*KEEP, failpoints=f"{point}=kill@2")
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
        ranks.begin(take, 6)
        daemon = two[1].daemon
        assert daemon is not None
        assert daemon.died() != 0
        two[1].start(*KEEP)
        assert ranks.results() == [""] * 2
    assert steps(two.root) == [5, 6]
    repository = open_root(two.root)
    for tag in repository.tags(JOB):
        kept = set(repository.read_manifest(JOB, tag).files)
        parts = {names.part_of(file) for file in repository.files(JOB, tag)}
        assert {part for part in parts if part} == {names.part_of(file) for file in kept if names.part_of(file)}


def test_trainers_that_die_leave_their_newest_common_step_in_the_root(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(partial(take, persist=False), 5) == [""] * 2
        until(lambda: all(node.daemon.status()["jobs"][0]["last_sealed"] for node in two), "seals")
        for rank in range(2):
            ranks.kill(rank)
    until(lambda: steps(two.root) == [5], "save")
    assert [steps(stage_of(node)) for node in two] == [[], []]


def test_a_stage_may_be_added_and_taken_away_between_two_runs(two: Nodes) -> None:
    for step, staged in ((5, False), (6, True), (7, False)):
        for node in two:
            node.kill()
            node.stage = stage_of(node) if staged else None
            node.start(*KEEP)
            node.put_stage()
        with Ranks(2) as ranks:
            found = ranks.call(recover, sockets(two, 0, 1))
            assert [one and one[0] for one in found] == [None if step == 5 else step - 1] * 2
            assert ranks.call(take, step) == [""] * 2


def test_a_node_that_is_lost_with_its_stage_costs_nothing(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
    two[1].lose()
    shutil.rmtree(stage_of(two[1]), ignore_errors=True)
    two[1].start(*KEEP)
    with Ranks(2) as ranks:
        assert ranks.call(recover, sockets(two, 0, 1)) == [(5, names.tag_directory(5, None, 1))] * 2
