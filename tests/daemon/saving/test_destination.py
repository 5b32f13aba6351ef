"""Tests daemons with two destinations: a stage for jobs of one node, and the root
behind it for jobs of several nodes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ckptd.agent import Agent, Checkpoint
from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.recovery import scan_job
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.saving.destination import Destination
from ckptd.daemon.stage import uploader
from ckptd.shared import names
from ckptd.shared.formats.receipt import DELETED, Abandonment
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.repository import Repository
from tests.agent.test_several_nodes import JOB, begin, close, recover, sockets, take
from tests.crash.hung import make_calls_wait
from tests.crash.node_trainer import state_of
from tests.crash.nodes import STORAGE_CALLS
from tests.shared.samples import write_checkpoint
from tests.support import trainers
from tests.support.daemons import until
from tests.support.nodes import Node, Nodes, nodes
from tests.support.ranks import HERE, Ranks
from tests.support.saving import Journal

KEEP = ("--keep-last", "2")


def wait_long_after_a_failed_upload() -> None:
    uploader.FIRST_PAUSE = 600.0


@pytest.fixture
def two() -> Iterator[Nodes]:
    """Two nodes that share a root, each with a stage of its own.

    An upload that fails is not tried again by itself.
    """
    with nodes(2, *KEEP, staged=True, first=wait_long_after_a_failed_upload) as made:
        yield made


def steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in a root."""
    repository = open_root(root)
    found = [
        names.parse_tag_directory(tag)
        for tag in repository.tags(JOB)
        if repository.is_committed(JOB, tag)
    ]
    return sorted(parsed.step or 0 for parsed in found if parsed)


def stage_of(node: Node) -> Path:
    assert node.stage is not None
    return node.stage


def root_of(place: Nodes) -> Path:
    assert isinstance(place.root, Path)
    return place.root


def status(node: Node) -> dict[str, Any]:
    assert node.daemon is not None
    return node.daemon.status()


def upload(step: int) -> str:
    """Take a step, and return its state once it is in the root."""
    pending = HERE["agent"].snapshot(state_of(step), step=step)
    return str(pending.wait("uploaded", timeout=60).state)


def leave_on_stage(two: Nodes, *later: int) -> None:
    """Save step 5 on node 1 and upload it.

    Then move the root to `away`, and save the later steps, which stay on the stage.
    """
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 1, 1))
        assert ranks.call(upload, 5) == ["uploaded"] * 2
        root_of(two).rename(two.path / "away")
        for step in later:
            assert ranks.call(take, step) == [""] * 2
        until(lambda: status(two[1])["stage"]["problem"], "problem")
        ranks.call(close)


def test_a_destination_deletes_only_what_it_has_itself(tmp_path: Path) -> None:
    """The two destinations of a daemon have the same jobs, and each has checkpoints of
    its own.
    """
    calls, config = (
        StorageCalls(60.0),
        Config(root=tmp_path / "root", socket=tmp_path / "s", keep_last=1),
    )
    made = []
    for name, known in (("stage", [1, 2]), ("root", [3, 4, 5])):
        for step in known:
            write_checkpoint(tmp_path / name, JOB, step=step)
        journal: Any = Journal()
        one = Destination(
            config,
            open_root(tmp_path / name),
            journal,
            Catalog(),
            calls,
            mock.Mock(),
            Counter(),
            Events(),
        )
        asyncio.run(scan_job(one.repository, one.catalog.job(JOB), calls))
        # As if they had been applied before.
        one.catalog.job(JOB).policies = tuple(config.retention)
        made.append(one)
    stage, root = made
    asyncio.run(root.retain(JOB))
    assert (steps(tmp_path / "stage"), steps(tmp_path / "root")) == ([1, 2], [5])
    assert asyncio.run(stage.deleter.make_room(stage.catalog.job(JOB), 1))
    assert not asyncio.run(root.deleter.make_room(root.catalog.job(JOB), 1))
    assert (steps(tmp_path / "stage"), steps(tmp_path / "root")) == ([2], [5])
    calls.close()


@pytest.mark.usefixtures("processes")
def test_a_job_of_several_nodes_is_saved_straight_to_the_root(two: Nodes) -> None:
    where = sockets(two, 0, 0, 1, 1)
    with Ranks(4) as ranks:
        ranks.call(begin, where)
        for step in range(1, 5):
            assert ranks.call(upload, step) == ["uploaded"] * 4
        until(lambda: status(two[0])["counters"]["retired"] == 2, "retention in the root")
        assert steps(root_of(two)) == [3, 4]
        now = status(two[0])
        assert (now["stage"]["waiting"], now["counters"]["uploaded"]) == (0, 0)
        assert (
            now["jobs"][0]["last_durable"]["step"] == now["jobs"][0]["last_uploaded"]["step"] == 4
        )
        ranks.call(close)
    assert [steps(stage_of(node)) for node in two] == [[], []]
    with Ranks(3) as ranks:
        assert (
            ranks.call(recover, sockets(two, 1, 0, 1)) == [(4, names.tag_directory(4, None, 1))] * 3
        )


@pytest.mark.usefixtures("processes")
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
    until(lambda: steps(root_of(two)) == [6, 7], "retention in the root")


@pytest.mark.usefixtures("processes")
def test_several_nodes_recover_what_only_the_stage_of_one_node_has(two: Nodes) -> None:
    """The node does not have rank 0, and its daemon does not upload the checkpoint by
    itself yet.
    """
    leave_on_stage(two, 6)
    (two.path / "away").rename(root_of(two))
    assert steps(root_of(two)) == [5]
    with Ranks(2) as ranks:
        assert ranks.call(recover, sockets(two, 0, 1)) == [(6, names.tag_directory(6, None, 1))] * 2
    assert steps(root_of(two)) == [5, 6]


@pytest.mark.usefixtures("processes")
def test_a_damaged_checkpoint_on_a_stage_gives_way_to_the_one_before(two: Nodes) -> None:
    leave_on_stage(two, 6, 7)
    part = next((stage_of(two[1]) / JOB / names.tag_directory(7, None, 1)).glob("rank-*.ckpt"))
    data = bytearray(part.read_bytes())
    data[4096] ^= 1
    part.write_bytes(data)
    (two.path / "away").rename(root_of(two))
    with Ranks(2) as ranks:
        # On one node, with its stage.
        assert ranks.call(recover, sockets(two, 1, 1)) == [(6, names.tag_directory(6, None, 1))] * 2
    with Ranks(2) as ranks:
        assert ranks.call(passed_over, sockets(two, 1, 0)) == [(6, 1)] * 2


def passed_over(where: list[Path]) -> tuple[int, int]:
    """Recover. Return the step, and the number of newer checkpoints that are damaged."""
    begin(where)
    found = HERE["agent"].recover(state_of(-1), on_reshape=lambda key, values: values[-1])
    return found.step, len(found.passed_over)


@pytest.mark.usefixtures("processes")
def test_a_save_that_cannot_be_undone_holds_up_its_job_only(two: Nodes) -> None:
    """An earlier daemon has left a save to the root, and its files cannot be deleted
    now.
    """
    two[0].kill()
    two[0].start(*KEEP, failpoints="persist.intended=kill@2")
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
        ranks.begin(take, 6)
        daemon = two[0].daemon
        assert daemon is not None
        assert daemon.died() != 0
        for rank in range(2):
            ranks.kill(rank)
    two[0].start(*KEEP, first=delete_nothing_unfinished)
    other = Agent("other", socket=two[0].home.socket)
    assert (
        other.snapshot(trainers.expected(1), step=1).wait("uploaded", timeout=60).state
        == "uploaded"
    )
    other.close()
    assert "could not be finished or undone" in two[0].home.log_text()
    two[0].kill()
    two[0].start(*KEEP)
    with Ranks(2) as ranks:
        found = ranks.call(recover, sockets(two, 0, 1))
        assert {one[0] for one in found} <= {5, 6}
        assert ranks.call(take, 7) == [""] * 2


def delete_nothing_unfinished() -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    Repository.delete_unfinished = fail  # type: ignore[method-assign,assignment]


@pytest.mark.usefixtures("processes")
def test_an_upload_of_another_job_holds_up_no_recovery(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
    two[0].kill()
    two[0].start(*KEEP, failpoints="upload.copied=hang")
    other = Agent("other", socket=two[0].home.socket)
    other.snapshot(trainers.expected(1), step=1).wait("durable", timeout=60)
    until(lambda: status(two[0])["stage"]["uploading"], "upload")
    with Ranks(2) as ranks:
        assert (
            ranks.call(recover, sockets(two, 0, 1), timeout=60.0)
            == [(5, names.tag_directory(5, None, 1))] * 2
        )
    other.close()


@pytest.mark.usefixtures("processes")
def test_a_root_that_hangs_holds_up_no_save_to_the_stage(two: Nodes) -> None:
    hung = two.path / "hung"
    two[0].kill()
    two[0].start(*KEEP, first=partial(make_calls_wait, hung, root_of(two), STORAGE_CALLS))
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
        other = Agent("other", socket=two[0].home.socket)
        hung.touch()
        ranks.begin(take, 6)
        for step in range(1, 4):
            assert (
                other.snapshot(trainers.expected(step), step=step).wait("durable", timeout=60).state
                == "durable"
            )
        hung.unlink()
        assert ranks.results() == [""] * 2
        other.close()


@pytest.mark.usefixtures("processes")
def test_a_root_that_is_gone_gets_no_files(two: Nodes) -> None:
    """Another directory has its place, as under a mount point that is empty."""
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
        root_of(two).rename(two.path / "away")
        root_of(two).mkdir()
        ranks.begin(take, 6)
        until(lambda: all("is it mounted" in node.home.log_text() for node in two), "failure")
        assert list(root_of(two).rglob("*")) == []
        root_of(two).rmdir()
        (two.path / "away").rename(root_of(two))
        assert all("is it mounted" in reason for reason in ranks.results())
        assert ranks.call(take, 7) == [""] * 2


@pytest.mark.usefixtures("processes")
def test_a_deleted_checkpoint_of_an_older_attempt_leaves_an_abandonment_behind_a_stage(
    two: Nodes,
) -> None:
    for attempt in (1, 2):
        with Ranks(2) as ranks:
            ranks.call(recover, sockets(two, 0, 1))
            for step in (2 * attempt, 2 * attempt + 1):
                assert ranks.call(take, step) == [""] * 2
    until(lambda: steps(root_of(two)) == [4, 5], "retention")
    outcome = open_root(root_of(two)).outcome(JOB, names.tag_directory(2, None, 1))
    assert isinstance(outcome, Abandonment)
    assert outcome.code == DELETED


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "point",
    [
        "persist.intended",
        "persist.journaled",
        "receipt.starting",
        "receipt.durable",
        "outcome.known",
    ],
)
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
    assert steps(root_of(two)) == [5, 6]
    repository = open_root(two.root)
    tags = repository.tags(JOB)
    assert tags == [names.tag_directory(step, None, 1) for step in (5, 6)]
    for tag in tags:
        kept = set(repository.read_manifest(JOB, tag).files)
        parts = {names.part_of(file) for file in repository.files(JOB, tag)}
        assert {part for part in parts if part} == {
            names.part_of(file) for file in kept if names.part_of(file)
        }


@pytest.mark.usefixtures("processes")
def test_an_upload_leaves_a_save_of_several_nodes_that_is_under_way_alone(two: Nodes) -> None:
    two[0].kill()
    two[0].start(*KEEP, failpoints="persist.syncing=sleep(2)@2")
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
        ranks.begin(take, 6)
        until(lambda: [job["saving"] for job in status(two[0])["jobs"]] != [[]], "save of step 6")
        other = Agent("other", socket=two[0].home.socket)
        assert (
            other.snapshot(trainers.expected(1), step=1).wait("uploaded", timeout=60).state
            == "uploaded"
        )
        other.close()
        assert ranks.results() == [""] * 2
    Checkpoint.open(root_of(two) / JOB).verify()
    assert steps(root_of(two)) == [5, 6]


@pytest.mark.usefixtures("processes")
def test_trainers_that_die_leave_their_newest_common_step_in_the_root(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(partial(take, persist=False), 5) == [""] * 2
        until(lambda: all(status(node)["jobs"][0]["last_sealed"] for node in two), "seals")
        for rank in range(2):
            ranks.kill(rank)
    until(lambda: steps(root_of(two)) == [5], "save")
    assert [steps(stage_of(node)) for node in two] == [[], []]


@pytest.mark.usefixtures("processes")
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


@pytest.mark.usefixtures("processes")
def test_a_node_that_is_lost_with_its_stage_costs_nothing(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
    two[1].lose()
    shutil.rmtree(stage_of(two[1]), ignore_errors=True)
    two[1].start(*KEEP)
    with Ranks(2) as ranks:
        assert ranks.call(recover, sockets(two, 0, 1)) == [(5, names.tag_directory(5, None, 1))] * 2


def destination(root: Path, calls: StorageCalls, *, make_room: bool = False) -> Destination:
    """Return a destination in which nothing is saved."""
    return Destination(
        Config(root=root, socket=root / "s", make_room=make_room),
        open_root(root),
        mock.Mock(),
        Catalog(),
        calls,
        mock.Mock(),
        Counter(),
        Events(),
    )


def test_each_smaller_number_of_checkpoints_that_fit_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = StorageCalls(60.0)
    root, job = destination(tmp_path, calls), Job("gpt")
    heard: list[tuple[str, str]] = []
    job.commit(StoredCheckpoint("gpt", "step-00000001.a0001", 1, 1, 1, 100, (), user_tag=False))
    with caplog.at_level(logging.WARNING):
        root._events.on_remark.append(lambda name, text: heard.append((name, text)))
        for free in (1000, 350, 340, 250, 1000, 350):
            with mock.patch.object(root.repository.storage, "free", return_value=free):
                asyncio.run(root._warn_of_room(job))
    calls.close()
    told = [record.getMessage().split(" of its")[0] for record in caplog.records]
    assert told == [f"job gpt: the root has room for {count} more" for count in (3, 2, 3)]
    assert heard == [("gpt", record.getMessage()) for record in caplog.records]


def test_the_remark_says_what_to_do(tmp_path: Path) -> None:
    job = Job("gpt")
    for make_room, advice in (
        (False, "delete some (`ckptd forget`)"),
        (True, "the oldest ones are then deleted early"),
    ):
        root = destination(tmp_path, mock.Mock(), make_room=make_room)
        assert advice in root.remark(job, 2, 250)
        assert root.remark(job, 5, 1000) == ""
