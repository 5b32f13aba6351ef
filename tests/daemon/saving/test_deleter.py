"""What retention and `forget` delete, in which order, and what stays."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import JournalBroken
from ckptd.daemon.recovery import scan_job
from ckptd.shared import names
from ckptd.shared.errors import StorageError
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.receipt import Receipt
from ckptd.shared.retention import BestN, LatestN, MaxAge
from ckptd.shared.storage.repository import Repository
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.shared.samples import write_checkpoint
from tests.support.events import logged
from tests.support.saving import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


# -- what follows a commit


def test_a_changed_policy_deletes_several_only_at_the_second_commit(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoints may have been trained under another policy.

    A person who changed it by mistake has until the second commit to undo that.
    """
    tags = [write_checkpoint(world.root, step=step, attempt=1).tag for step in (1, 2, 3, 4)]
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.run()
    assert world.storage.tags("gpt") == [*tags, world.snapshot.tag]
    assert world.job.announced in caplog.text
    assert logged(caplog, "retention.held") == [{"job": "gpt"}]
    assert world.job.announced.startswith(
        f"4 checkpoints ({tags[0]} to {tags[3]}) are not kept by LatestN(n=1), and will be "
        f"deleted at the next commit"
    )
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert world.storage.tags("gpt") == [world.snapshot.tag]
    assert (world.job.announced, world.counters["retired"]) == ("", 4)


def test_a_changed_policy_deletes_a_single_checkpoint_at_the_first_commit(world: World) -> None:
    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.run()
    assert (world.storage.tags("gpt"), world.job.announced) == ([world.snapshot.tag], "")


def test_a_limit_of_age_deletes_several_only_at_the_second_commit(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of the newest checkpoint may be wrong, and no policy has changed."""
    manifests = [write_checkpoint(world.root, step=step, attempt=1) for step in (1, 2, 3, 4)]
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    tags, policies = [manifest.tag for manifest in manifests], (MaxAge("1d"),)
    for tag, created in zip(tags, (10.0, 20.0, 30.0, 1e9), strict=True):
        world.job.checkpoints[tag] = dataclasses.replace(
            world.job.checkpoints[tag], created=created, retention=policies
        )
    world.job.policies = policies
    deleter = world.saver.root.deleter
    asyncio.run(deleter.retain(world.job))
    assert (world.storage.tags("gpt"), world.job.foreseen) == (tags, set(tags[:3]))
    assert world.job.announced in caplog.text
    assert world.job.announced.startswith(
        f"3 checkpoints ({tags[0]} to {tags[2]}) are older than MaxAge(seconds=86400.0) allows by "
        f"the clock of the newest, and will be deleted at the next commit"
    )
    asyncio.run(deleter.retain(world.job))
    assert (world.storage.tags("gpt"), world.job.announced) == (tags[3:], "")


def test_a_policy_over_a_metric_that_no_checkpoint_has_deletes_nothing_and_says_so_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a checkpoint has the metric, the deletion is announced at one commit, and
    follows at the next.
    """
    manifests = [write_checkpoint(world.root, step=step, attempt=1) for step in (1, 2, 3, 4)]
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    for step, manifest in enumerate(manifests):
        known = world.job.checkpoints[manifest.tag]
        world.job.checkpoints[manifest.tag] = dataclasses.replace(
            known, metrics={"val_loss": float(step)}, retention=(BestN("valloss", 1),)
        )
    deleter = world.saver.root.deleter
    said = (
        "nothing is deleted, because BestN('valloss', 1) cannot choose: no checkpoint has the "
        "metric 'valloss' (their metrics are 'val_loss'); did you mean 'val_loss'?"
    )
    for _ in range(3):
        asyncio.run(deleter.retain(world.job))
        assert (len(world.storage.tags("gpt")), world.job.announced) == (4, said)
    assert caplog.text.count(said) == 1
    for step, manifest in enumerate(manifests):
        world.job.checkpoints[manifest.tag] = dataclasses.replace(
            world.job.checkpoints[manifest.tag], metrics={"valloss": float(step)}
        )
    asyncio.run(deleter.retain(world.job))
    assert len(world.storage.tags("gpt")) == 4
    assert "2 checkpoints" in world.job.announced
    asyncio.run(deleter.retain(world.job))
    assert world.storage.tags("gpt") == [manifests[0].tag, manifests[3].tag]
    assert world.job.announced == ""


def test_a_metric_that_only_checkpoints_in_the_root_have_is_known_on_the_stage(
    world: World,
) -> None:
    manifests = [write_checkpoint(world.root, step=step, attempt=1) for step in (1, 2, 3)]
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    for manifest in manifests:
        known = dataclasses.replace(
            world.job.checkpoints[manifest.tag], metrics={}, retention=(BestN("loss", 1),)
        )
        world.job.checkpoints[manifest.tag] = known
    older = dataclasses.replace(known, tag="step-00000000.a0001", step=0, metrics={"loss": 1.0})
    world.job.in_root = {older.tag: older}
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert (len(world.storage.tags("gpt")), world.job.announced) == (3, "")
    world.job.in_root = {}
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert (
        "no checkpoint has the metric 'loss' (they have no metrics at all)" in world.job.announced
    )


def test_room_is_not_made_if_it_would_not_be_enough(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest checkpoint, which stays, links the parts of the older ones, as one with
    deltas of them does.
    """
    manifests = [write_checkpoint(world.root, step=step, attempt=1) for step in (1, 2, 3)]
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    *older, newest = [world.root / "gpt" / manifest.tag for manifest in manifests]
    for number, place in enumerate(older):
        for part in place.glob("rank-*"):
            (newest / f"{part.stem}.{number:04d}.ckpt").hardlink_to(part)
    freed = sum((place / "manifest.json").stat().st_size for place in older)
    monkeypatch.setattr(world.storage.storage, "free", lambda: 100)
    assert not asyncio.run(world.saver.root.deleter.make_room(world.job, 101 + freed))
    assert "would not make enough room" in caplog.text
    assert len(world.storage.tags("gpt")) == 3
    assert asyncio.run(world.saver.root.deleter.make_room(world.job, 100 + freed))
    assert len(world.storage.tags("gpt")) == 2


@pytest.mark.parametrize(
    "features", [[], ["chunk-references"]], ids=["readable", "for a newer reader"]
)
def test_nothing_is_deleted_where_a_checkpoint_has_a_feature_for_deleters_that_is_not_known(
    world: World, caplog: pytest.LogCaptureFixture, features: list[str]
) -> None:
    """A newer ckptd may have made a checkpoint whose chunks lie in an older one."""
    older, newer = (write_checkpoint(world.root, step=step, attempt=1) for step in (3, 4))
    path = world.root / "gpt" / newer.tag / "manifest.json"
    path.write_bytes(
        msgspec.structs.replace(
            newer, deleter_features=["chunk-references"], features=features
        ).encode()
    )
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.run()
    why = (
        f"nothing is deleted in job 'gpt', because {newer.tag} has the feature 'chunk-references' "
        f"for deleters"
    )
    assert features or why in caplog.text  # that a checkpoint is newer is a reason of its own
    assert asyncio.run(world.saver.root.deleter.forget(world.job, older.tag)).startswith(why)
    assert not asyncio.run(world.saver.root.deleter.make_room(world.job, 1))
    assert world.storage.tags("gpt") == [older.tag, newer.tag, world.snapshot.tag]


def test_retention_deletes_nothing_where_a_newer_ckptd_has_saved(world: World) -> None:
    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.job.newer["best.a0001"] = "manifest was written by a newer ckptd"
    world.run()
    assert len(world.storage.tags("gpt")) == 2


def test_the_oldest_is_deleted_once_there_is_a_newer_one(world: World) -> None:
    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.run()
    assert world.storage.tags("gpt") == [world.snapshot.tag]
    assert [type(record) for record in world.journal.records[-2:]] == [r.Retiring, r.Retired]
    assert (world.counters["retired"], world.job.retiring) == (1, set())


@pytest.mark.parametrize("call", ["replace", "remove_directory"])
def test_a_deletion_that_fails_is_retried_after_the_next_commit(world: World, call: str) -> None:
    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.fs.faults[call] = 1, errno.EIO
    world.run()
    assert (world.told, world.counters["tidy_failures"], world.job.retiring) == (
        [SnapshotState.DURABLE],
        1,
        set(),
    )
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert (world.storage.tags("gpt"), world.storage.read_newest("gpt")) == (
        [world.snapshot.tag],
        world.snapshot.tag,
    )


def test_a_storage_error_during_retention_is_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def retire(*_: Any) -> None:
        raise StorageError("no room for the journal")

    write_checkpoint(world.root, step=4, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    monkeypatch.setattr(world.saver.root.deleter, "retire", retire)
    world.run()
    assert (world.told, world.counters["tidy_failures"]) == ([SnapshotState.DURABLE], 1)


def test_retention_of_a_job_without_checkpoints_does_nothing(world: World) -> None:
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert world.storage.read_newest("gpt") is None


# -- what is forgotten, and what stays


def saved_twice(world: World) -> tuple[str, str]:
    """Save two committed checkpoints of the job, and `newest`."""
    for step in (3, 4):
        write_checkpoint(world.root, step=step, attempt=1)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.storage.publish_newest("gpt", "step-00000004.a0001")
    return "step-00000003.a0001", "step-00000004.a0001"


def forget(world: World, tag: str) -> str:
    return asyncio.run(world.saver.root.deleter.forget(world.job, tag))


def test_newest_moves_before_the_newest_checkpoint_is_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = saved_twice(world)
    seen = []
    delete = world.storage.delete_files

    def watched(job: str, tag: str, files: list[str]) -> None:
        seen.append((tag, files[0] == names.MANIFEST, world.storage.read_newest("gpt")))
        delete(job, tag, files)

    monkeypatch.setattr(world.storage, "delete_files", watched)
    assert forget(world, new) == ""
    assert seen == [(new, True, old), (new, False, old)]
    assert forget(world, old) == ""
    assert seen[2:] == [(old, True, None), (old, False, None)]
    assert (world.storage.tags("gpt"), world.job.checkpoints, world.job.retiring) == ([], {}, set())
    assert [type(record) for record in world.journal.records] == [r.Retiring, r.Retired] * 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_newest_is_deleted_on_a_disk_without_room_for_another_hint(
    world: World, number: int
) -> None:
    old, new = saved_twice(world)
    world.fs.faults["create"] = 1, number
    assert forget(world, new) == ""
    assert (world.storage.tags("gpt"), world.storage.read_newest("gpt")) == ([old], None)
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert world.storage.read_newest("gpt") == old


def test_the_newest_is_not_deleted_if_another_hint_cannot_be_written(world: World) -> None:
    _, new = saved_twice(world)
    world.fs.faults["create"] = 1, errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        forget(world, new)
    assert world.storage.read_newest("gpt") == new
    assert world.storage.has_manifest("gpt", new)


def test_a_missing_checkpoint_cannot_be_forgotten(world: World) -> None:
    assert forget(world, "step-00000009.a0001") == "there is no checkpoint gpt/step-00000009.a0001"
    assert world.journal.records == []


def test_a_pinned_or_read_checkpoint_cannot_be_forgotten(world: World) -> None:
    old, new = saved_twice(world)
    world.storage.pin("gpt", old)
    assert forget(world, old) == f"checkpoint gpt/{old} is pinned"
    world.storage.unpin("gpt", old)
    held = world.storage.lease("gpt", old)
    assert forget(world, old).startswith(
        f"checkpoint gpt/{old} is being read, or deleted, by pid {os.getpid()} ("
    )
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert world.storage.tags("gpt") == [old, new]
    held.close()
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert world.storage.tags("gpt") == [new]
    assert (world.job.retiring, world.counters["retired"]) == (set(), 1)


@pytest.mark.parametrize("held", ["pinned", "read", "guarded"])
def test_a_deletion_that_was_begun_is_given_up_only_while_the_manifest_is_there(
    world: World, held: str
) -> None:
    """Without its manifest a checkpoint is lost, and its files would stay for ever."""
    old, new = saved_twice(world)
    intent = r.Retiring(job="gpt", tag=old, files=list(world.job.checkpoints[old].files))
    lease = world.storage.lease("gpt", old) if held == "read" else None
    if held == "pinned":
        world.storage.pin("gpt", old)
    if held == "guarded":
        world.job.guards[new] = "feature"
    for manifest, left in ((True, [old, new]), (False, [new])):
        if not manifest:
            world.storage.delete_files("gpt", old, [names.MANIFEST])
        world.journal.state.apply(intent)
        asyncio.run(world.saver.root.finish_deletion(f"gpt/{old}"))
        assert world.storage.tags("gpt") == left
        assert (list(world.job.checkpoints), world.journal.state.retiring) == (left, {})
    if lease is not None:
        lease.close()
    assert (world.job.retiring, world.counters["retired"]) == (set(), 0)
    records = len(world.journal.records)
    asyncio.run(world.saver.root.finish_deletion(f"gpt/{old}"))  # the intent is gone by then
    assert len(world.journal.records) == records


def test_a_damaged_checkpoint_is_deleted_with_its_parts_and_no_other_file(world: World) -> None:
    old, _ = saved_twice(world)
    place = world.root / "gpt" / old
    (place / names.MANIFEST).write_bytes(b"{}")
    (place / "notes.txt").write_text("mine")
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    assert list(world.job.damaged) == [old]
    assert forget(world, old) == ""
    assert (os.listdir(place), world.job.damaged) == (["notes.txt"], {})


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_that_cannot_be_deleted_is_unchanged(world: World, damaged: bool) -> None:
    old, _ = saved_twice(world)
    if damaged:
        (world.root / "gpt" / old / names.MANIFEST).write_bytes(b"{}")
        asyncio.run(scan_job(world.storage, world.job, world.calls))
    world.fs.faults["remove_directory"] = 1, errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        forget(world, old)
    assert world.job.retiring == set()


@pytest.mark.parametrize(
    "error", [StorageError("no room for the journal"), JournalBroken("cannot write the journal")]
)
def test_a_deletion_that_the_journal_cannot_record_leaves_the_checkpoint_visible(
    world: World, monkeypatch: pytest.MonkeyPatch, error: StorageError
) -> None:
    """Nothing was deleted, so recovery must find the checkpoint."""
    old, new = saved_twice(world)

    async def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(world.journal, "append", full)
    with pytest.raises(type(error)):
        forget(world, new)
    assert sorted(c.tag for c in world.job.live_checkpoints()) == [old, new]
    assert world.job.is_durable(1, 4)


def test_a_checkpoint_that_cannot_be_deleted_does_not_stop_the_others(world: World) -> None:
    write_checkpoint(world.root, step=2, attempt=1)
    _, new = saved_twice(world)
    world.fs.faults["remove_directory"] = 1, errno.EACCES
    world.job.policies = (LatestN(1),)
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert world.storage.tags("gpt") == ["step-00000002.a0001", new]
    assert (world.counters["tidy_failures"], world.counters["retired"], world.job.retiring) == (
        1,
        1,
        set(),
    )


def test_a_directory_in_the_place_of_newest_is_left_alone(world: World) -> None:
    saved_twice(world)
    newest = world.root / "gpt" / names.NEWEST
    newest.unlink()
    newest.mkdir()
    asyncio.run(world.saver.root.deleter.retain(world.job))
    assert world.counters["tidy_failures"] == 1


def test_a_damaged_checkpoint_of_many_files_is_forgotten_by_its_parts(tmp_path: Path) -> None:
    """A record of the journal has room for a limited number of names."""
    world = World(tmp_path)
    (part,) = write_checkpoint(tmp_path / "root", files=3).parts
    tag = "step-00001000.a0002"
    world.job.damaged[tag] = "its manifest cannot be read"
    assert asyncio.run(world.saver.root.deleter.forget(world.job, tag)) == ""
    (intent,) = [record for record in world.journal.records if isinstance(record, r.Retiring)]
    assert intent.files == [part.file]
    assert (world.storage.tags("gpt"), world.job.damaged) == ([], {})
    world.close()


# -- checkpoints of several nodes


def delivered(world: World, attempt: int = 1) -> str:
    """Write a committed checkpoint that has a receipt, and claim the next attempt.

    Return its tag.
    """
    tag = write_checkpoint(world.root, step=1, attempt=attempt).tag
    receipt = Receipt(
        job="gpt", attempt=attempt, step=1, tag=tag, node=Membership(run_id="0" * 32, ranks=[0]),
        host="node0", world_size=2, global_plan="0" * 64, parts=[], code="storage",
        reason="no room",
    )  # fmt: skip
    world.storage.publish_receipt(receipt)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    assert world.storage.claim("gpt", attempt + 1)
    return tag


def retire(world: World, tag: str) -> str:
    return asyncio.run(world.saver.root.deleter.retire(world.job, world.job.checkpoints[tag]))


def test_a_deletion_that_failed_once_leaves_the_abandonment_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag, delete_files = delivered(world), Repository.delete_files

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Repository, "delete_files", fail)
    with pytest.raises(OSError, match="Input/output"):
        retire(world, tag)
    monkeypatch.setattr(Repository, "delete_files", delete_files)
    assert retire(world, tag) == ""
    assert world.storage.files("gpt", tag) == [names.MANIFEST]
    assert not world.storage.is_committed("gpt", tag)


def test_a_full_disk_keeps_no_checkpoint_from_being_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = delivered(world)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Repository, "bury", fail)
    assert retire(world, tag) == ""
    assert world.storage.tags("gpt") == []


def test_a_checkpoint_of_one_node_leaves_nothing(world: World) -> None:
    tag = write_checkpoint(world.root, step=1, attempt=1).tag
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    assert world.storage.claim("gpt", 2)
    assert retire(world, tag) == ""
    assert world.storage.tags("gpt") == []


def test_a_manifest_that_cannot_be_read_can_be_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = write_checkpoint(world.root, step=1, attempt=1).tag

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Repository, "is_committed", fail)
    monkeypatch.setattr(Repository, "read_manifest", fail)
    asyncio.run(scan_job(world.storage, world.job, world.calls))
    assert list(world.job.damaged) == [tag]
    assert asyncio.run(world.saver.root.deleter.forget(world.job, tag)) == ""
    assert world.storage.tags("gpt") == []
