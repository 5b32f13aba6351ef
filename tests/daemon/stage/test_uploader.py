"""Tests a real daemon with a stage: what is durable where, what is uploaded and
deleted, and what a recovery reads.

The root is a directory, except where the test is about an object store.
`tests/crash/test_stage.py` kills the daemon.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from ckptd.agent import Agent, Checkpoint, StorageReader, StorageWriter
from ckptd.agent.pending import Milestone
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.report import status_text
from ckptd.daemon.stage.uploader import FIRST_PAUSE, LONGEST_PAUSE
from ckptd.shared import names
from ckptd.shared.errors import SnapshotFailed, StorageError, VersionMismatch
from ckptd.shared.location import Location, Url
from ckptd.shared.storage.locate import open_root
from ckptd.shared.wire.channel import Channel
from tests.shared.samples import write_checkpoint
from tests.support import chains, stores, trainers
from tests.support.daemons import Daemon, Home, running, until

KEEP = ("--keep-last", "2", "--codec", "raw")


def tags(root: Location) -> list[int]:
    """Return the steps of the checkpoints in a root, oldest first."""
    repository = open_root(root)
    found = [tag for tag in repository.tags("job") if repository.is_committed("job", tag)]
    return sorted(parsed.step or 0 for tag in found if (parsed := names.parse_tag_directory(tag)))


@pytest.fixture
def stage(place: Home) -> Path:
    return place.path / "stage"


def with_stage(place: Home, *arguments: str, failpoints: str = "") -> Any:
    return running(
        place,
        "--stage",
        str(place.path / "stage"),
        *KEEP,
        "--log-format",
        "json",
        *arguments,
        failpoints=failpoints,
        forked=True,
    )


def save(agent: Agent, *steps: int, wait: Milestone = "durable") -> None:
    for step in steps:
        agent.snapshot(trainers.expected(step), step=step).wait(wait, timeout=60)


def without_root(place: Home) -> Path:
    """Move the root away, as if its file system were not mounted. Return its new place."""
    away = place.path / "away"
    place.root.rename(away)
    return away


def recovered(place: Home, step: int, source: str) -> None:
    agent = Agent("job", socket=place.socket)
    state = trainers.blank()
    found = agent.recover(state)
    assert found is not None
    assert (found.step, found.source, found.passed_over) == (step, source, [])
    trainers.assert_equal(state, step)
    agent.close()


@pytest.mark.usefixtures("processes")
def test_a_checkpoint_is_durable_on_the_stage_and_then_uploaded(place: Home, stage: Path) -> None:
    with with_stage(place) as daemon:
        agent = Agent("job", socket=place.socket)
        pending = agent.snapshot(trainers.expected(1), step=1).wait("durable", timeout=60)
        assert pending.state in ("durable", "uploaded")
        assert tags(stage) == [1]
        assert pending.wait("uploaded", timeout=60).state == "uploaded"
        assert pending.wait("durable").done
        assert tags(place.root) == [1]
        assert open_root(place.root).read_newest("job") == "step-00000001.a0001"
        save(agent, 2, 3, 4, wait="uploaded")
        until(lambda: tags(place.root) == [3, 4], "retention in the root")
        until(lambda: tags(stage) == [4], "end of the local copies that are in the root")
        until(lambda: not daemon.status()["stage"]["uploading"], "end of the upload")
        status = daemon.status()
        assert status["stage"] | {"directory": ""} == {
            "directory": "", "root_known": True, "waiting": 0, "waiting_bytes": 0,
            "oldest_age_seconds": None, "uploading": None, "problem": "", "refused": {},
        }  # fmt: skip
        assert (status["counters"]["uploaded"], status["counters"]["retired"]) == (4, 2)
        assert f"{stage} (" in status_text(status)
        assert "everything is uploaded" in status_text(status)
        assert "step 4" in status_text(status)
        agent.close()
        recovered(place, 4, "stage")
        assert daemon.stop() == 0
    Checkpoint.open(place.root / "job").verify()


def test_a_failed_upload_is_tried_again_soon_and_then_less_often() -> None:
    assert 0 < FIRST_PAUSE < LONGEST_PAUSE


@pytest.mark.usefixtures("processes")
def test_without_a_stage_what_is_durable_is_in_the_root(place: Home) -> None:
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        assert (
            agent.snapshot(trainers.expected(1), step=1).wait("uploaded", timeout=60).state
            == "durable"
        )
        assert daemon.status()["stage"] is None
        agent.close()


@pytest.mark.usefixtures("processes")
def test_saves_go_on_while_the_root_is_away(place: Home, stage: Path) -> None:
    with with_stage(place) as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, wait="uploaded")
        away = without_root(place)
        save(agent, 2, 3, 4, 5)
        pending = agent.snapshot(trainers.expected(6), step=6).wait("durable", timeout=60)
        with pytest.raises(TimeoutError, match="step 6 is durable, not uploaded, after"):
            pending.wait("uploaded", timeout=0.2)
        # Steps 2 to 4 are not uploaded at all.
        until(lambda: tags(stage) == [5, 6], "retention on the stage")
        assert not place.root.exists()
        until(lambda: daemon.status()["stage"]["problem"], "problem")
        status = daemon.status()
        assert "is it mounted" in status["stage"]["problem"]
        assert (status["stage"]["waiting"], status["jobs"][0]["waiting"]) == (
            2,
            ["step-00000005.a0001", "step-00000006.a0001"],
        )
        assert status["stage"]["waiting_bytes"] > 0
        assert status["stage"]["oldest_age_seconds"] >= 0
        assert "2 checkpoints (" in status_text(status)
        assert "not uploaded yet, the oldest for" in status_text(status)
        assert "on the stage only (step 1 uploaded)" in status_text(status)
        assert tags(away) == [1]  # the last checkpoint in the root stays, whatever is on the stage
        away.rename(place.root)
        pending.wait("uploaded", timeout=60)
        until(lambda: tags(place.root) == [5, 6], "upload of what waited")
        (stopped,) = place.events("uploads.stopped")
        assert "is it mounted" in stopped["reason"]
        assert place.events("uploads.resumed") == [{}]
        assert [event["step"] for event in place.events("upload.done")] == [1, 5, 6]
        without_root(place)
        last = agent.snapshot(trainers.expected(7), step=7).wait("durable", timeout=60)
        agent.close()
        with pytest.raises(
            SnapshotFailed,
            match="the agent was closed before the upload of this checkpoint was reported",
        ):
            last.wait("uploaded", timeout=60)


@pytest.mark.usefixtures("processes")
def test_a_step_that_is_deleted_before_its_upload_says_so(place: Home, stage: Path) -> None:
    with with_stage(place):
        agent = Agent("job", socket=place.socket)
        save(agent, 1, wait="uploaded")
        away = without_root(place)
        pending = agent.snapshot(trainers.expected(2), step=2).wait("durable", timeout=60)
        save(agent, 3, 4, 5)
        with pytest.raises(
            SnapshotFailed, match="step 2 is not in the root, and does not wait for its upload"
        ):
            pending.wait("uploaded", timeout=60)
        assert pending.state == "durable"
        away.rename(place.root)
        agent.close()


@pytest.mark.usefixtures("processes")
def test_a_stop_leaves_what_waits_to_the_next_daemon(place: Home, stage: Path) -> None:
    with with_stage(place) as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, wait="uploaded")
        away = without_root(place)
        save(agent, 2)
        agent.close()
        assert daemon.stop() == 0
    assert (tags(stage)[-1], tags(away)) == (2, [1])
    with with_stage(place) as daemon:  # it starts without the root
        assert daemon.status()["stage"]["waiting"] >= 1
        away.rename(place.root)
        recovered(place, 2, "stage")
        until(
            lambda: daemon.status()["stage"]["waiting"] == 0 and tags(place.root) == [1, 2],
            "upload",
        )
        assert daemon.stop() == 0
    shutil.rmtree(stage)
    with with_stage(place):
        recovered(place, 2, "storage")
    Checkpoint.open(place.root / "job").verify()


@pytest.mark.usefixtures("processes")
def test_a_recovery_without_the_root_raises_unless_the_stage_has_the_newest(
    place: Home, stage: Path
) -> None:
    with with_stage(place):
        agent = Agent("job", socket=place.socket)
        save(agent, 1, wait="uploaded")
        agent.close()
        agent = Agent("job", socket=place.socket)
        away = without_root(place)
        state = trainers.blank()
        found = agent.recover(state)
        assert found is not None
        assert (found.step, found.source) == (1, "stage")
        trainers.assert_equal(state, 1)
        away.rename(place.root)
        agent.close()
    shutil.rmtree(stage)
    with with_stage(place):
        recovered(place, 1, "storage")
        agent = Agent("job", socket=place.socket)
        away = without_root(place)
        with pytest.raises(StorageError, match="is it mounted"):
            agent.recover(trainers.blank())
        agent.close()
        away.rename(place.root)
        recovered(place, 1, "storage")


@pytest.mark.usefixtures("processes")
def test_a_damaged_copy_on_the_stage_gives_way_to_the_one_in_the_root(
    place: Home, stage: Path
) -> None:
    with with_stage(place):
        agent = Agent("job", socket=place.socket)
        save(agent, 1, 2, wait="uploaded")
        agent.close()
        until(lambda: tags(stage) == [2], "end of the local copy")
        part = next((stage / "job" / "step-00000002.a0001").glob("rank-*.ckpt"))
        data = bytearray(part.read_bytes())
        data[5000] ^= 1
        part.write_bytes(data)
        agent = Agent("job", socket=place.socket)
        state = trainers.blank()
        found = agent.recover(state)
        assert found is not None
        assert (found.step, found.source, len(found.passed_over)) == (2, "storage", 1)
        trainers.assert_equal(state, 2)
        agent.close()


@pytest.mark.usefixtures("processes")
def test_a_damaged_checkpoint_is_not_uploaded_and_stays(place: Home, stage: Path) -> None:
    with with_stage(
        place, "--no-link-unchanged", failpoints="upload.intended=sleep(1)@2"
    ) as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, wait="uploaded")
        pending = agent.snapshot(trainers.expected(2), step=2).wait("durable", timeout=60)
        part = next((stage / "job" / "step-00000002.a0001").glob("rank-*.ckpt"))
        data = bytearray(part.read_bytes())
        data[4096] ^= 1  # the first byte of a chunk, whichever lies there
        part.write_bytes(data)
        with pytest.raises(SnapshotFailed, match="step 2 is not in the root"):
            pending.wait("uploaded", timeout=60)
        (why,) = daemon.status()["stage"]["refused"].values()
        assert "does not match its checksum" in why
        assert "NOT UPLOADED   job/step-00000002.a0001" in status_text(daemon.status())
        (failed,) = place.events("upload.failed")
        assert (failed["tag"], failed["reason"]) == ("step-00000002.a0001", why)
        assert tags(place.root) == [1]
        assert open_root(place.root).files("job", "step-00000002.a0001") == []
        save(agent, 3, wait="uploaded")  # the others are uploaded
        assert 2 in tags(stage)
        agent.close()


@pytest.mark.usefixtures("processes")
def test_forget_deletes_both_copies(place: Home, stage: Path) -> None:
    with with_stage(place):
        agent = Agent("job", socket=place.socket)
        save(agent, 1, 2, wait="uploaded")
        agent.close()
        done = CliRunner().invoke(
            main,
            ["forget", f"{place.root}/job/step-00000002", "--socket", str(place.socket), "--json"],
        )
        assert (done.exit_code, json.loads(done.stdout)[0]["error"]) == (0, None), done.output
        assert (tags(stage), tags(place.root)) == ([], [1])
        recovered(place, 1, "storage")
        agent = Agent("job", socket=place.socket)
        save(agent, 3, wait="uploaded")
        agent.close()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CKPTD_STAGE", str(stage))
        environment.setenv("CKPTD_STATE_DIR", str(place.state))
        # Without a daemon.
        done = CliRunner().invoke(main, ["forget", f"{place.root}/job/step-00000003", "--json"])
    assert (done.exit_code, json.loads(done.stdout)[0]["error"]) == (0, None), done.output
    assert (tags(stage), tags(place.root)) == ([], [1])
    open_root(place.root).pin("job", "step-00000001.a0001")
    with with_stage(place):
        done = CliRunner().invoke(
            main,
            ["forget", f"{place.root}/job/step-00000001", "--yes", "--socket", str(place.socket)],
        )
        assert "is pinned" in done.output
        assert tags(place.root) == [1]


@pytest.mark.usefixtures("processes")
def test_a_client_that_knows_no_stage_is_refused(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_stage(place):
        monkeypatch.setattr("ckptd.shared.wire.session.STAGE", "another feature")
        with pytest.raises(
            VersionMismatch, match="knows nothing of stages, and would miss the newest checkpoints"
        ):
            Channel(place.socket, 10.0)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("arguments", [["--root", "other"], ["--root", "stage"]])
def test_a_stage_serves_one_daemon_and_one_root(
    place: Home, stage: Path, arguments: list[str]
) -> None:
    with with_stage(place):
        place.root = place.path / arguments[1]
        second = Daemon(
            place,
            *(["--stage", str(stage)] if arguments[1] != "stage" else []),
            "--socket",
            str(place.path / "t"),
            forked=True,
        )
        assert not second.reached_ready()
        assert second.died() != 0
        assert f"another ckptd already serves {stage}" in place.log_text()
        second.close()
    place.root = place.path / "stage"
    second = Daemon(place, forked=True)
    assert not second.reached_ready()
    assert f"{stage} is the stage of {place.path / 'root'}" in place.log_text()
    second.close()


@pytest.mark.usefixtures("processes")
def test_a_full_stage_deletes_copies_that_are_in_the_root(place: Home, stage: Path) -> None:
    with with_stage(place, failpoints="persist.created=error(ENOSPC)@2") as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, wait="uploaded")
        save(agent, 2)
        assert 1 not in tags(stage)
        assert daemon.status()["counters"]["failed"] == 0
        agent.close()


@pytest.mark.usefixtures("processes")
def test_a_stage_that_is_full_of_what_waits_fails_the_step(place: Home, stage: Path) -> None:
    """Not even `make_room` deletes what waits."""
    full = "persist.created=error(ENOSPC)@3"
    with with_stage(place, "--make-room", "--no-link-unchanged", failpoints=full) as daemon:
        agent = Agent("job", socket=place.socket)
        until(lambda: daemon.status()["stage"]["root_known"], "root")
        away = without_root(place)
        save(agent, 1, 2)
        with pytest.raises(StorageError, match="No space left on device"):
            save(agent, 3)
        assert tags(stage) == [1, 2]
        away.rename(place.root)
        save(agent, 4, wait="uploaded")
        agent.close()


@pytest.mark.usefixtures("processes")
def test_a_job_that_has_moved_on_is_not_led_back(place: Home, stage: Path) -> None:
    """Another node has begun the next attempt: what this node still uploads is older,
    and this node deletes nothing in the root.
    """
    with with_stage(place) as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, 2, wait="uploaded")
        away = without_root(place)
        save(agent, 3, 4)
        elsewhere = open_root(away)
        assert elsewhere.claim("job", 2)
        write_checkpoint(away, "job", step=2, attempt=2)
        elsewhere.publish_newest("job", "step-00000002.a0002")
        away.rename(place.root)
        until(lambda: daemon.status()["stage"]["waiting"] == 0, "upload")
        assert tags(place.root) == [1, 2, 2, 3, 4]
        assert open_root(place.root).read_newest("job") == "step-00000002.a0002"
        agent.close()
        agent = Agent("job", socket=place.socket)
        assert agent._link.attempt == 3
        agent.close()


@pytest.mark.usefixtures("processes")
def test_a_checkpoint_that_somebody_has_deleted_from_the_stage_is_not_waited_for(
    place: Home, stage: Path
) -> None:
    with with_stage(place) as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, wait="uploaded")
        away = without_root(place)
        save(agent, 2)
        shutil.rmtree(stage / "job" / "step-00000002.a0001")
        away.rename(place.root)
        until(lambda: daemon.status()["stage"]["waiting"] == 0, "end of the wait")
        save(agent, 3, wait="uploaded")
        assert tags(place.root) == [1, 3]
        agent.close()


@pytest.mark.usefixtures("processes")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
def test_a_save_through_dcp_is_in_the_root_when_it_returns(place: Home, stage: Path) -> None:
    """The caller of a save through DCP has named a path, and may read it next."""
    with with_stage(place):
        for step in range(1, 4):
            state = {"weight": torch.full((50_000,), float(step))}
            path = place.root / "job" / f"step-{step}"
            dcp.save(state, storage_writer=StorageWriter(path, socket=place.socket))
            found = {"weight": torch.zeros(50_000)}
            dcp.load(found, storage_reader=StorageReader(path))
            assert torch.equal(found["weight"], state["weight"])


@pytest.mark.usefixtures("processes")
def test_a_private_daemon_stays_until_everything_is_uploaded(place: Home, stage: Path) -> None:
    with with_stage(place) as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, wait="uploaded")
        away = without_root(place)
        save(agent, 2)
        agent.close()
        assert daemon.stop() == 0
    place.environ = {"CKPTD_IDLE_TIMEOUT": "0"}
    with with_stage(place, "--private") as daemon:
        until(lambda: daemon.status()["stage"]["problem"], "problem")
        assert daemon.process.poll() is None
        away.rename(place.root)
        assert daemon.died() == 0
    assert tags(place.root) == [1, 2]


CHAIN = (1, 2, 3, 4, 5, 6, 7)
CHAINED = ("--codec", "planes", "--keep-last", "4")


def save_chain(place: Home) -> None:
    """Save checkpoints with chains on a stage, and wait for their uploads and for the
    retention of both places.
    """
    place.environ = {**place.environ, **chains.SMALL_CHUNKS}
    with with_stage(place, *CHAINED) as daemon:
        agent = Agent("job", socket=place.socket)
        for step in CHAIN:
            agent.snapshot(chains.state_of(step), step=step).wait("uploaded", timeout=60)
        agent.close()
        until(lambda: tags(place.root) == list(CHAIN[-4:]), "retention in the root")
        until(lambda: tags(place.path / "stage") == [CHAIN[-1]], "retention on the stage")
        assert daemon.stop() == 0


def check_chain(root: Location) -> None:
    for step in tags(root):
        with Checkpoint.open(root / "job", chains.tag(step)) as checkpoint:
            checkpoint.verify()
            chains.assert_state(checkpoint.load(), step)


@pytest.mark.usefixtures("processes")
def test_a_chain_is_uploaded_and_its_files_are_linked(place: Home, stage: Path) -> None:
    save_chain(place)
    check_chain(place.root)
    check_chain(stage)
    repository = open_root(place.root)
    found = [repository.read_manifest("job", chains.tag(step)) for step in CHAIN[-4:]]
    assert any(one.chain for one in found)
    assert all(one.chain < len(found) - 1 for one in found), "one checkpoint is outside each chain"
    places = [place.root / "job" / one.tag for one in found]
    taken = [{file.stat().st_ino for file in where.glob("rank-*")} for where in places]
    shared = [len(before & after) for before, after in itertools.pairwise(taken)]
    assert shared == [one.parts[0].files - 2 if one.chain else 0 for one in found[1:]]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("gone", ["stage", "root"])
def test_a_chain_whose_base_is_gone_is_uploaded(place: Home, stage: Path, gone: str) -> None:
    place.environ = {**chains.SMALL_CHUNKS}
    with with_stage(place, *CHAINED) as daemon:
        agent = Agent("job", socket=place.socket)
        for step in (1, 2, 3, 4):
            agent.snapshot(chains.state_of(step), step=step).wait("uploaded", timeout=60)
        away = without_root(place)
        for step in (5, 6):
            agent.snapshot(chains.state_of(step), step=step).wait("durable", timeout=60)
        place_of = stage if gone == "stage" else away
        for step in (4, 5) if gone == "stage" else (3, 4):
            shutil.rmtree(place_of / "job" / chains.tag(step), ignore_errors=True)
        away.rename(place.root)
        agent.snapshot(chains.state_of(7), step=7).wait("uploaded", timeout=60)
        agent.close()
        until(lambda: not daemon.status()["stage"]["waiting"], "uploads")
    assert open_root(place.root).read_manifest("job", chains.tag(7)).chain
    assert tags(place.root)[-1] == 7
    check_chain(place.root)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Server]:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as running:
        yield running.get("seaweed")


@pytest.fixture
def bucket(place: Home, server: stores.Server, monkeypatch: pytest.MonkeyPatch) -> Url:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    place.environ = server.environ
    url = Url("s3", "bucket", (names.new_nonce().hex(),))
    place.root = url  # type: ignore[assignment]
    return url


@pytest.mark.usefixtures("processes")
def test_a_store_has_every_bit_once_it_is_uploaded(place: Home, stage: Path, bucket: Url) -> None:
    with with_stage(place) as daemon:
        agent = Agent("job", socket=place.socket)
        save(agent, 1, 2, 3, wait="uploaded")
        agent.close()
        until(lambda: tags(bucket) == [2, 3], "retention in the store")
        assert daemon.stop() == 0
    with Checkpoint.open(bucket / "job") as checkpoint:
        checkpoint.verify()
        trainers.assert_equal(checkpoint.load(), 3)
    shutil.rmtree(stage)
    with with_stage(place):
        recovered(place, 3, "storage")


@pytest.mark.usefixtures("processes")
def test_a_chain_is_in_a_store_once_it_is_uploaded(place: Home, stage: Path, bucket: Url) -> None:
    save_chain(place)
    assert tags(bucket) == list(CHAIN[-4:])
    check_chain(bucket)
    repository = open_root(bucket)
    lengths = [repository.read_manifest("job", chains.tag(step)).chain for step in CHAIN[-4:]]
    assert any(lengths)


@pytest.mark.usefixtures("processes")
def test_the_stage_alone_serves_while_the_store_is_down(
    place: Home, stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stores.program("weed") is None:
        pytest.skip("seaweed is not installed")
    place.root = Url("s3", "bucket", (names.new_nonce().hex(),))  # type: ignore[assignment]
    with stores.seaweed(tmp_path / "store") as server:
        stores.make_bucket(server, "bucket")
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        place.environ = server.environ | {"CKPTD_STORAGE_TIMEOUT": "2"}
        with with_stage(place) as daemon:
            agent = Agent("job", socket=place.socket)
            save(agent, 1, wait="uploaded")
            server.process.kill()
            server.process.wait()
            save(agent, 2)  # as fast as before
            agent.close()
            recovered(place, 2, "stage")
            daemon.kill()
        with with_stage(place):  # a daemon that starts without the store
            recovered(place, 2, "stage")
        with Checkpoint.open(stage / "job") as checkpoint:
            trainers.assert_equal(checkpoint.load(), 2)
