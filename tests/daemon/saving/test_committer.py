"""Test commits and drops: storage, journal and catalog afterwards.

`test_saver.py` and `test_joint.py` have whole saves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.journal import records as r
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.saving.committer import Committer, Document
from ckptd.shared.errors import AlreadyExists, IntegrityError
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.receipt import Abandonment, Receipt, encode
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.locate import open_root
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.shared.samples import TAG, sample_plan, write_parts
from tests.support.saving import Journal

PLAN = sample_plan(3 << 16)


class Made:
    """A committer, and the durable parts of a snapshot of two ranks."""

    def __init__(self, root: Path) -> None:
        self.repository, self.calls, self.journal, self.catalog = (
            open_root(root),
            StorageCalls(60.0),
            Journal(),
            Catalog(),
        )
        self.job = self.catalog.job("gpt")
        self.told: list[SnapshotState] = []
        self.committer = Committer(
            "raw", self.journal, self.repository, self.catalog, self.calls,  # type: ignore[arg-type]
            Events(on_saved=[lambda s: self.told.append(s.state)]),
        )  # fmt: skip
        self.snapshot = Snapshot("gpt", 2, 1000, TAG, 2, persist=True, state=SnapshotState.WRITTEN)
        written = write_parts(self.repository.part_files("gpt", TAG), world_size=2)
        self.documents: list[Document] = [(part, PLAN, SnapshotRequest()) for part in written.parts]
        for part in written.parts:
            record = r.Staging(
                job="gpt", attempt=2, step=1000, rank=part.rank, tag=TAG, file=part.file
            )
            self.journal.state.apply(record)

    def commit(self, documents: list[Document]) -> None:
        asyncio.run(self.committer.commit(self.snapshot, documents))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    here = Made(tmp_path)
    yield here
    here.calls.close()


def test_a_commit_is_published_journaled_and_told(made: Made) -> None:
    made.job.seq = 6
    made.commit(made.documents)
    assert made.repository.read_manifest("gpt", TAG).seq == 7
    assert made.journal.records == [r.Committed(job="gpt", attempt=2, step=1000, tag=TAG, seq=7)]
    assert (made.told, made.job.is_durable(2, 1000), made.job.seq) == (
        [SnapshotState.DURABLE],
        True,
        7,
    )


def test_a_commit_that_the_journal_has_no_room_for_is_a_commit(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    """The manifest is published, and the next start finds it."""
    made.journal.refuses = (r.Committed,)
    made.commit(made.documents)
    assert (made.told, made.job.is_durable(2, 1000)) == ([SnapshotState.DURABLE], True)
    assert (
        f"gpt/{TAG} is committed, and the journal lacks the record: cannot begin a new journal file"
        in caplog.text
    )


def test_a_commit_needs_the_parts_of_all_ranks_and_one_plan(made: Made) -> None:
    other = msgspec.structs.replace(PLAN, global_plan=b"other")
    for documents in (
        made.documents[:1],
        made.documents[::-1],
        [made.documents[0], (made.documents[1][0], other, SnapshotRequest())],
    ):
        with pytest.raises(IntegrityError):
            made.commit(documents)
    assert not made.repository.has_manifest("gpt", TAG)


def test_a_tag_is_committed_once(made: Made) -> None:
    made.commit(made.documents)
    with pytest.raises(AlreadyExists, match="is committed already; choose another tag"):
        made.commit(made.documents)


def drop(made: Made) -> None:
    asyncio.run(made.committer.drop("gpt", TAG, 2, 1000, "a reason"))


def test_a_dropped_save_leaves_nothing(made: Made) -> None:
    drop(made)
    assert made.repository.tags("gpt") == []
    assert made.journal.records == [
        r.Dropped(job="gpt", attempt=2, step=1000, tag=TAG, reason="a reason")
    ]
    drop(made)
    assert len(made.journal.records) == 1


def test_parts_of_other_ranks_that_are_being_saved_stay(made: Made) -> None:
    """A daemon that saves a peer replica, too, has two saves of one checkpoint."""
    files = [part.file for part, _, _ in made.documents]
    asyncio.run(made.committer.drop("gpt", TAG, 2, 1000, "a reason", [1]))
    assert made.repository.files("gpt", TAG) == files[:1]
    assert list(made.journal.state.staged[f"gpt/{TAG}"]) == files[:1]
    asyncio.run(made.committer.drop("gpt", TAG, 2, 1000, "a reason", [0]))
    assert made.repository.tags("gpt") == []


def test_parts_that_a_receipt_names_are_dropped_only_after_an_abandonment(made: Made) -> None:
    parts = [part for part, _, _ in made.documents]
    receipt = Receipt(
        job="gpt",
        attempt=2,
        step=1000,
        tag=TAG,
        node=Membership(run_id="0" * 32, ranks=[0, 1]),
        host="a",
        world_size=4,
        parts=parts,
    )
    made.repository.publish_receipt(receipt)
    drop(made)
    assert {part.file for part in parts} <= set(made.repository.files("gpt", TAG))
    ended = Abandonment(job="gpt", attempt=2, step=1000, tag=TAG, code="storage", reason="no space")
    made.repository.publish_manifest("gpt", TAG, encode(ended), by="1" * 32)
    drop(made)
    assert not {part.file for part in parts} & set(made.repository.files("gpt", TAG))


def test_the_parts_of_a_manifest_are_never_dropped(made: Made) -> None:
    staged = dict(made.journal.state.staged)
    made.commit(made.documents)
    made.journal.state.staged = staged
    drop(made)
    assert {part.file for part, _, _ in made.documents} <= set(made.repository.files("gpt", TAG))
