"""Commits of steps of several nodes: each node has its own `Joint`, and all share one
storage.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from obstore.store import MemoryStore

from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.journal import records as r
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.saving import joint as joint_module
from ckptd.daemon.saving.destination import Destination
from ckptd.daemon.saving.joint import Abandoned, Joint, Undecided
from ckptd.shared import names
from ckptd.shared.errors import AlreadyExists, Fenced, IntegrityError, NotFound, StorageError
from ckptd.shared.formats import receipt as rc
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.storage_seam import Storage
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.shared.samples import TAG, sample_plan, write_parts
from tests.support import store_model
from tests.support.saving import Journal

CLAIM = "0123456789abcdef" * 2
KEY = (2, 1000)
PLAN = sample_plan(3 << 16)


class Node:
    """A node that knows the job as attempt 2 of four ranks.

    `told` has the states in which its ranks heard of the snapshot.
    """

    def __init__(
        self, storage: Storage, *ranks: int, claim: str = CLAIM, timeout: float = 60.0
    ) -> None:
        self.repository, self.calls, self.journal = (
            Repository(storage),
            StorageCalls(60.0),
            Journal(),
        )
        self.told: list[SnapshotState] = []
        self.stopping = False
        self.catalog = Catalog()
        self.root = Destination(
            Config(root=Path("/root"), socket=Path("/s"), codec="raw"), self.repository,
            self.journal, self.catalog,  # type: ignore[arg-type]
            self.calls, mock.Mock(), Counter(),
            Events(on_saved=[lambda s: self.told.append(s.state)]),
        )  # fmt: skip
        self.joint = Joint(self.root, timeout, remote=False, stopping=lambda: self.stopping)
        self.share = Membership(run_id=claim, ranks=list(ranks))
        self.job = self.catalog.job("gpt")
        self.job.attempt, self.job.world_size, self.job.node = 2, 4, self.share
        self.snapshot = Snapshot(
            "gpt", *KEY, TAG, 4, persist=True, state=SnapshotState.WRITTEN, node=self.share
        )

    def write(self, ranks: list[int] | None = None) -> list[tuple[PartEntry, Any, SnapshotRequest]]:
        """Write parts into the directory of the try, and return their documents."""
        made = write_parts(self.repository.part_files("gpt", self.snapshot.directory), world_size=4)
        return [(made.parts[rank], PLAN, SnapshotRequest()) for rank in ranks or self.share.ranks]

    async def deliver(self) -> None:
        assert await self.joint.open_try(self.job, self.snapshot) is None
        await self.joint.deliver(self.job, self.snapshot, self.write())

    async def settle(self) -> None:
        await self.joint.finish(self.job, self.snapshot)

    @property
    def outcome(self) -> Any:
        return self.repository.outcome("gpt", self.snapshot.directory)


Make = Callable[..., Node]


@pytest.fixture(params=["posix", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a node with these ranks. All nodes share a root."""
    store = MemoryStore()
    made: list[Node] = []

    def node(*ranks: int, **options: Any) -> Node:
        shared = (
            ObjectStorage(Bucket(store, "memory://root"), "digest")
            if request.param == "memory"
            else PosixStorage(tmp_path)
        )
        made.append(Node(shared, *ranks, **options))
        return made[-1]

    yield node
    for one in made:
        one.calls.close()


async def both(*nodes: Node) -> None:
    await asyncio.gather(*(node.settle() for node in nodes))


# -- the usual way


async def test_a_checkpoint_exists_once_all_nodes_have_delivered(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    await first.deliver()
    settling = asyncio.create_task(both(first, second))
    await asyncio.sleep(0.1)
    assert first.outcome is None
    await second.deliver()
    await settling
    manifest = first.repository.read_manifest("gpt", TAG)
    assert [part.rank for part in manifest.parts] == [0, 1, 2, 3]
    assert (manifest.tag, manifest.attempt, manifest.step, manifest.seq, manifest.world_size) == (
        TAG,
        *KEY,
        1,
        4,
    )
    for node in (first, second):
        assert node.told == [SnapshotState.DURABLE]
        assert node.job.is_durable(*KEY)
        assert node.journal.records == [
            r.Committed(job="gpt", attempt=2, step=1000, tag=TAG, seq=1)
        ]


async def test_a_node_that_does_not_have_rank_0_decides_nothing(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    await first.deliver()
    await second.deliver()
    settling = asyncio.create_task(second.settle())
    await asyncio.sleep(0.1)
    assert not settling.done()
    await first.settle()
    await settling


async def test_a_node_that_was_killed_after_its_receipt_writes_no_parts_again(make: Make) -> None:
    first = make(0, 1)
    await first.deliver()
    again = make(0, 1)
    found = await again.joint.open_try(again.job, again.snapshot)
    assert isinstance(found, rc.Receipt)
    assert [part.rank for part in found.parts] == [0, 1]
    assert again.snapshot.delivered
    entries = again.write()
    await again.joint.deliver(again.job, again.snapshot, entries)
    assert again.repository.receipts("gpt", TAG) == [found]


async def test_a_step_that_is_committed_is_not_saved_again(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    for node in (first, second):
        await node.deliver()
    await both(first, second)
    again = make(2, 3)
    assert await again.joint.open_try(again.job, again.snapshot) == first.outcome
    other = make(2, 3)
    other.snapshot.step = 1001
    with pytest.raises(AlreadyExists, match="is taken; choose another tag"):
        await other.joint.open_try(other.job, other.snapshot)


# -- failures


async def test_a_failure_of_one_node_ends_the_try_for_all_and_the_next_try_has_its_own_directory(
    make: Make,
) -> None:
    first, second = make(0, 1), make(2, 3)
    await first.deliver()
    assert await second.joint.open_try(second.job, second.snapshot) is None
    assert await second.joint.refuse(
        second.job, second.snapshot, StorageError("cannot save it: No space left on device")
    )
    for node in (first, second):
        with pytest.raises(Abandoned) as error:
            await node.settle()
        assert isinstance(error.value.error, StorageError)
        assert (
            str(error.value.error)
            == f"ranks 2, 3 on {machine.host()}: cannot save it: No space left on device"
        )
        with pytest.raises(NotFound):
            node.repository.read_manifest("gpt", TAG)
    for node in (first, second):
        await node.deliver()
        assert node.snapshot.directory == f"{TAG}.t2"
    await both(first, second)
    manifest = first.repository.read_manifest("gpt", f"{TAG}.t2")
    assert (manifest.tag, manifest.step) == (f"{TAG}.t2", 1000)
    assert first.job.is_durable(*KEY)


async def test_a_node_that_has_delivered_cannot_refuse_any_more(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    await second.deliver()
    assert not await second.joint.refuse(second.job, second.snapshot, StorageError("too late"))
    await first.deliver()
    await both(first, second)
    assert not await second.joint.refuse(second.job, second.snapshot, StorageError("too late"))


async def test_a_refusal_is_repeated_until_the_storage_takes_it(make: Make) -> None:
    node = make(2, 3)
    with mock.patch.object(
        node.repository, "publish_receipt", side_effect=[OSError(5, "I/O error")] * 3 + [None]
    ) as publish:
        assert await node.joint.refuse(node.job, node.snapshot, StorageError("no"))
    assert publish.call_count == 4
    node.job.attempt = 3
    with mock.patch.object(node.repository, "publish_receipt", side_effect=OSError(5, "I/O error")):
        assert not await node.joint.refuse(node.job, node.snapshot, StorageError("no"))


async def test_a_node_that_does_not_deliver_in_time_is_named(make: Make) -> None:
    first = make(0, 1, timeout=0.05)
    await first.deliver()
    with pytest.raises(Abandoned) as error:
        await first.settle()
    assert (
        str(error.value.error)
        == f"ranks 2, 3 did not deliver (delivered: ranks 0, 1 on {machine.host()})"
    )
    late = make(2, 3)
    assert await late.joint.open_try(late.job, late.snapshot) is None
    assert late.snapshot.directory == f"{TAG}.t2"


async def test_a_node_that_hears_nothing_does_not_know(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_module, "LATE_SECONDS", 0.05)
    second = make(2, 3, timeout=0.05)
    await second.deliver()
    with pytest.raises(
        Undecided,
        match=r"is not known to be durable after \d+ s: ranks 2, 3 on .* delivered, and the daemon "
        r"of ",
    ):
        await second.settle()
    assert second.repository.receipts("gpt", TAG) != []


@pytest.mark.parametrize("why", ["peer_replica", "drained"])
async def test_what_no_rank_waits_for_is_given_up_once_a_later_checkpoint_is_durable(
    make: Make, why: str
) -> None:
    second = make(2, 3)
    setattr(second.snapshot, why, True)
    await second.deliver()
    waiting = asyncio.create_task(second.settle())
    assert not (await asyncio.wait([waiting], timeout=0.3))[0]
    later = names.tag_directory(KEY[1] + 1, None, KEY[0])
    second.job.commit(
        StoredCheckpoint("gpt", later, KEY[0], KEY[1] + 1, KEY[1] + 1, 1, (), user_tag=False)
    )
    with pytest.raises(Undecided):
        await asyncio.wait_for(waiting, 20)
    assert second.repository.receipts("gpt", TAG) != []


async def test_a_daemon_that_stops_leaves_its_parts_and_its_receipt(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_module, "_STOP_SECONDS", 0.1)
    first, second = make(0, 1), make(2, 3)
    for node in (first, second):
        node.stopping = True
    await second.deliver()
    with pytest.raises(Undecided):
        await second.settle()
    await first.deliver()
    await first.settle()
    assert first.told == [SnapshotState.DURABLE]
    alone = make(0, 1)
    alone.stopping = True
    alone.snapshot.tag = alone.snapshot.directory = "other.a0002"
    await alone.joint.deliver(alone.job, alone.snapshot, alone.write())
    with pytest.raises(Undecided, match="ranks 2, 3 did not"):
        await alone.settle()


async def test_parts_that_are_gone_are_not_committed(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    for node in (first, second):
        await node.deliver()
    (receipt,) = [one for one in first.repository.receipts("gpt", TAG) if one.node.ranks == [2, 3]]
    first.repository.delete_files("gpt", TAG, [receipt.parts[0].file])
    with pytest.raises(Abandoned):
        await first.settle()
    assert isinstance(first.outcome, rc.Abandonment)
    assert "is missing" in first.outcome.reason


async def test_a_node_that_has_reported_a_failure_goes_on_with_the_next_try_by_itself(
    make: Make,
) -> None:
    """Even if the daemon of rank 0 has not abandoned the try yet: no other outcome is
    possible.
    """
    node = make(2, 3)
    assert await node.joint.refuse(node.job, node.snapshot, StorageError("no space"))
    again = make(2, 3)
    assert await again.joint.open_try(again.job, again.snapshot) is None
    assert (again.snapshot.directory, again.snapshot.delivered) == (f"{TAG}.t2", False)
    assert isinstance(again.repository.outcome("gpt", TAG), rc.Abandonment)


async def test_a_failure_that_is_reported_while_the_parts_are_written_again_counts(
    make: Make,
) -> None:
    node = make(2, 3)
    assert await node.joint.open_try(node.job, node.snapshot) is None
    documents = node.write()
    assert await node.joint.refuse(node.job, node.snapshot, StorageError("no space"))
    with pytest.raises(Abandoned):
        await node.joint.deliver(node.job, node.snapshot, documents)
    assert not node.snapshot.delivered


async def test_steps_that_share_a_tag_are_never_joined(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    second.snapshot.step = 900
    for node in (first, second):
        await node.deliver()
    with pytest.raises(Abandoned, match=None):
        await first.settle()
    assert isinstance(first.outcome, rc.Abandonment)
    assert "have saved steps 1000 and 900 under the same tag" in first.outcome.reason
    later = make(2, 3)
    later.snapshot.tag = later.snapshot.directory = TAG
    with pytest.raises(
        AlreadyExists, match=r"step 900 of job .* has the tag .* already; choose another tag"
    ):
        await later.joint._own_receipt(later.snapshot)


async def test_a_receipt_that_cannot_be_read_ends_the_try(make: Make) -> None:
    first = make(0, 1)
    await first.deliver()
    first.repository.storage.publish(
        f"gpt/{TAG}/{names.receipt_file(2)}", b"no receipt", replace=False
    )
    with pytest.raises(Abandoned):
        await first.settle()
    assert isinstance(first.outcome, rc.Abandonment)
    assert "receipt is cut short" in first.outcome.reason


async def test_a_receipt_in_the_directory_of_another_try_is_damage(make: Make) -> None:
    node = make(0, 1)
    await node.deliver()
    (receipt,) = node.repository.receipts("gpt", TAG)
    node.snapshot.directory = f"{TAG}.t2"
    node.write()
    node.repository.storage.publish(
        f"gpt/{TAG}.t2/{names.receipt_file(0)}", rc.encode(receipt), replace=False
    )
    with pytest.raises(
        IntegrityError, match=f"the receipt there is that of ranks 0, 1 on .* for gpt/{TAG}$"
    ):
        node.repository.receipts("gpt", f"{TAG}.t2")


async def test_a_long_reason_is_cut_to_what_can_be_read(make: Make) -> None:
    node = make(0, 1)
    node.write()
    await node.joint._decide(node.snapshot, rc.AbandonTry("snapshot-failed", "x" * 200_000))
    assert isinstance(node.outcome, rc.Abandonment)
    assert len(node.outcome.reason) == rc.MAX_REASON


# -- two runs, two committers


async def test_two_runs_that_hold_one_number_are_never_joined(make: Make) -> None:
    first, stranger = make(0, 1), make(2, 3, claim="f" * 32)
    for node in (first, stranger):
        await node.deliver()
    with pytest.raises(Abandoned) as error:
        await first.settle()
    assert isinstance(error.value.error, Fenced)
    same = make(0, 1, claim="f" * 32)
    same.snapshot.tag = TAG
    with pytest.raises(Fenced, match="another run of job .* is also in attempt"):
        await same.joint._own_receipt(same.snapshot)


async def test_of_two_committers_one_decides_and_the_other_adopts(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    for node in (first, second):
        await node.deliver()
    again = make(0, 1)
    await asyncio.gather(first.settle(), again.settle(), second.settle())
    assert first.outcome == again.outcome
    assert {one.journal.records[0].seq for one in (first, again)} == {first.outcome.seq}  # type: ignore[attr-defined]


async def test_an_outcome_that_another_daemon_has_published_counts(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    for node in (first, second):
        await node.deliver()
    ended = rc.Abandonment(
        job="gpt", attempt=2, step=1000, tag=TAG, code="snapshot-failed", reason="too late"
    )
    publish = first.repository.publish_manifest

    def lose(job: str, tag: str, data: bytes, **more: Any) -> None:
        publish(job, tag, rc.encode(ended), by="e" * 32)
        publish(job, tag, data, **more)

    with mock.patch.object(first.repository, "publish_manifest", lose), pytest.raises(Abandoned):
        await first.settle()
    with pytest.raises(Abandoned):
        await second.settle()


# -- the past


async def newer(make: Make, *ranks: int, delivered: int = 0) -> Node:
    """Return a node of attempt 3, after it has decided the past."""
    node = make(*ranks)
    node.job.attempt = 3
    node.job.uncommitted = set(node.repository.tags("gpt"))
    await node.joint.decide_past(node.job, delivered)
    return node


async def test_the_next_attempt_commits_what_is_complete(make: Make) -> None:
    for node in (make(0, 1), make(2, 3)):
        await node.deliver()
    late = await newer(make, 0)
    assert late.job.is_durable(*KEY)
    assert [part.rank for part in late.repository.read_manifest("gpt", TAG).parts] == [0, 1, 2, 3]


async def test_the_next_attempt_abandons_what_is_not_complete_at_once_if_all_nodes_have_delivered(
    make: Make,
) -> None:
    await make(0, 1).deliver()
    late = await newer(make, 0, delivered=2)
    assert late.repository.files("gpt", TAG) == [names.MANIFEST]
    assert isinstance(late.repository.outcome("gpt", TAG), rc.Abandonment)
    assert not late.job.checkpoints
    late.job.attempt = 4
    late.job.uncommitted = {TAG}
    await late.joint.decide_past(late.job, 0)
    assert late.repository.tags("gpt") == []


async def test_a_deleted_checkpoint_of_an_older_attempt_is_not_committed_again(make: Make) -> None:
    """The daemon of the older attempt has read the receipts, and is slow."""
    slow = make(0, 1)
    for node in (slow, make(2, 3)):
        await node.deliver()
    receipts = slow.repository.receipts("gpt", TAG)
    late = await newer(make, 0)
    assert late.repository.claim("gpt", 3)
    assert await late.root.deleter.retire(late.job, late.job.checkpoints[TAG]) == ""
    assert late.repository.files("gpt", TAG) == [names.MANIFEST]
    assert not late.repository.is_committed("gpt", TAG)
    verdict = rc.decide(receipts, 4, late=False)
    assert isinstance(verdict, rc.CommitTry)
    # It has read the part of rank 0, too.
    with mock.patch.object(Joint, "_first_part", return_value=(PLAN, SnapshotRequest())):
        await slow.joint._decide(slow.snapshot, verdict)
    assert not late.repository.is_committed("gpt", TAG)
    again = await newer(make, 0)
    assert again.job.abandoned == {}  # recover() does not call it incomplete
    again.job.attempt, again.job.uncommitted = 4, {TAG}
    await again.joint.decide_past(again.job, 0)
    assert again.repository.tags("gpt") == []


async def test_a_deleted_checkpoint_of_this_attempt_leaves_nothing(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    for node in (first, second):
        await node.deliver()
    await first.settle()
    assert await first.root.deleter.retire(first.job, first.job.checkpoints[TAG]) == ""
    assert first.repository.tags("gpt") == []


async def test_the_next_attempt_waits_for_nodes_that_are_not_its_own(make: Make) -> None:
    await make(0, 1).deliver()
    deciding = asyncio.create_task(newer(make, 0, delivered=1))
    await asyncio.sleep(0.1)
    assert not deciding.done()
    await make(2, 3).deliver()
    assert (await deciding).job.is_durable(*KEY)


async def test_directories_without_receipts_are_left_alone(make: Make) -> None:
    node = make(0, 1)
    node.write()
    before = node.repository.files("gpt", TAG)
    assert (await newer(make, 0, delivered=2)).repository.files("gpt", TAG) == before


async def test_the_next_attempt_waits_for_the_first_receipt_of_a_step_that_is_being_saved(
    make: Make,
) -> None:
    first, second = make(0, 1), make(2, 3)
    first.write()
    deciding = asyncio.create_task(newer(make, 0, delivered=1))
    await asyncio.sleep(0.1)
    assert not deciding.done()
    await first.deliver()
    await second.deliver()
    assert (await deciding).job.is_durable(*KEY)


async def test_a_try_that_another_node_has_refused_is_abandoned_by_one_that_has_delivered(
    make: Make,
) -> None:
    first, second = make(0, 1), make(2, 3)
    await first.deliver()
    assert not await first.joint.abandon_refused(first.snapshot)
    assert await second.joint.refuse(second.job, second.snapshot, StorageError("no room"))
    assert await first.joint.abandon_refused(first.snapshot)
    assert isinstance(first.repository.outcome("gpt", TAG), rc.Abandonment)


@pytest.mark.parametrize("lost", [0, 1], ids=["the node of rank 0", "the other node"])
async def test_a_step_that_one_node_has_lost_with_its_memory_is_abandoned(
    make: Make, lost: int
) -> None:
    nodes = [make(0, 1), make(2, 3)]
    kept = nodes[1 - lost]
    await kept.deliver()
    durable = replace(nodes[lost].snapshot, step=1001, tag=names.tag_directory(1001, None, 2))
    await nodes[lost].joint.refuse_lost(nodes[lost].job, durable)
    with pytest.raises(Abandoned) as caught:
        await kept.settle()
    assert "step 1000 was lost with the memory of the daemon" in str(caught.value.error)


async def test_a_step_that_is_in_memory_or_delivered_or_not_older_is_not_reported_as_lost(
    make: Make,
) -> None:
    first, second = make(0, 1), make(2, 3)
    later = replace(first.snapshot, step=1001, tag=names.tag_directory(1001, None, 2))
    await first.deliver()
    await first.joint.refuse_lost(first.job, later)  # delivered
    await second.joint.refuse_lost(second.job, second.snapshot)  # not older
    second.job.step(KEY).snapshot = second.snapshot
    await second.joint.refuse_lost(second.job, replace(later, node=second.share))  # in memory
    await second.deliver()
    await both(first, second)
    assert first.job.is_durable(*KEY)
    await first.joint.refuse_lost(first.job, later)
    assert first.job.is_durable(*KEY)


# -- after a restart


async def test_a_restarted_daemon_delivers_what_is_durable(make: Make) -> None:
    node = make(2, 3)
    documents = node.write()
    assert await node.joint.roll_forward(node.job, node.snapshot, documents)
    assert await node.joint.roll_forward(node.job, node.snapshot, documents)
    assert [receipt.node.ranks for receipt in node.repository.receipts("gpt", TAG)] == [[2, 3]]


async def test_a_restarted_daemon_delivers_nothing_that_is_not_needed(make: Make) -> None:
    node = make(2, 3)
    documents = node.write()
    assert not await node.joint.roll_forward(node.job, node.snapshot, documents[:1])
    node.repository.claim("gpt", 3)
    assert not await node.joint.roll_forward(node.job, node.snapshot, documents)
    assert node.repository.receipts("gpt", TAG) == []


async def test_a_restarted_daemon_does_not_keep_parts_whose_failure_it_has_reported(
    make: Make,
) -> None:
    node = make(2, 3)
    documents = node.write()
    assert await node.joint.refuse(node.job, node.snapshot, StorageError("no space"))
    assert not await node.joint.roll_forward(node.job, node.snapshot, documents)


async def test_a_restarted_daemon_does_not_keep_parts_that_another_one_has_delivered(
    make: Make,
) -> None:
    node, holder = make(2, 3), make(2, 3)
    documents = node.write()
    await holder.deliver()
    assert not await node.joint.roll_forward(node.job, node.snapshot, documents)


async def test_a_receipt_is_read_once(make: Make) -> None:
    first, second = make(0, 1), make(2, 3)
    await first.deliver()
    with mock.patch.object(first.repository, "receipt", wraps=first.repository.receipt) as read:
        settling = asyncio.create_task(both(first, second))
        await asyncio.sleep(0.3)
        await second.deliver()
        await settling
    assert sorted(call.args[2] for call in read.call_args_list) == [
        names.receipt_file(0),
        names.receipt_file(2),
    ]


async def test_ranks_of_a_node_that_sealed_different_plans_deliver_nothing(make: Make) -> None:
    node = make(2, 3)
    documents = node.write()
    other = msgspec.structs.replace(PLAN, global_plan=b"other")
    with pytest.raises(Exception, match="its ranks sealed different plans"):
        await node.joint.deliver(
            node.job, node.snapshot, [documents[0], (documents[1][0], other, SnapshotRequest())]
        )
    assert node.repository.receipts("gpt", TAG) == []


# -- every order of requests


def test_no_order_of_requests_breaks_a_promise() -> None:
    """`make trust` lives other lives."""
    tried, broken = store_model.run(120, 0, float("inf"))
    assert broken == []
    assert tried[" states"] > 80 * 120


def test_a_rule_that_is_switched_off_breaks_one() -> None:
    """If this fails, `python -m tests.support.store_model` looks for another seed."""
    unneeded = [rule for rule in store_model.RULES if not store_model.is_needed(rule)]
    assert unneeded == []
