"""Tests that this version recovers a node that commit 5811ec8 left when its processes
were killed (see golden/make_node.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.agent import Checkpoint
from ckptd.daemon.journal import file as jf
from ckptd.daemon.journal import records as r
from ckptd.shared import names
from ckptd.shared.formats.segment import SegmentHeader, SlotState, read_header, this_boot
from ckptd.shared.system import machine
from tests.golden import make_node
from tests.golden.make_node import HALFWAY, JOBS, PINNED, RETIRING, WRITTEN
from tests.support.daemons import Home, running
from tests.support.ranks import Ranks

ARCHIVE = Path(__file__).parents[1] / "golden" / "v1" / "node.tar.xz"
KEEP_ALL = ("--keep-last", "0")
"""Retention is off: anything that this daemon deletes, it deletes because the journal
says so.
"""


@pytest.fixture
def node(place: Home) -> Home:
    """The node as the killed processes of 5811ec8 left it. No process runs on it yet."""
    make_node.unpack(ARCHIVE, place)
    return place


def files(place: Home) -> dict[str, bytes]:
    """Return the content of every file of the root, except those of this host's daemon."""
    found = {
        str(path.relative_to(place.root)): path.read_bytes()
        for path in place.root.rglob("*")
        if path.is_file()
    }
    return {
        name: data
        for name, data in found.items()
        if not name.startswith(f"{names.CONTROL}/{machine.host()}/")
    }


def under(found: dict[str, bytes], job: str, tag: str) -> dict[str, bytes]:
    """Return the files of one checkpoint, with their content."""
    return {name: data for name, data in found.items() if name.startswith(f"{job}/{tag}/")}


def headers(place: Home) -> list[SegmentHeader]:
    """Return the header of every segment."""
    found = []
    for path in place.segment_files():
        with path.open("rb") as file:
            found.append(read_header(file.fileno()))
    return found


def test_the_archive_holds_what_make_node_describes(node: Home) -> None:
    committed = list(make_node.committed(node))
    assert committed == sorted((job, tag) for job, left in JOBS.items() for tag in left.committed)
    sealed = {
        (h.job, h.rank, (h.attempt, h.step)) for h in headers(node) if h.state is SlotState.SEALED
    }
    assert {h.boot_id for h in headers(node)} == {this_boot()}
    assert {
        (job, rank, left.newest) for job, left in JOBS.items() for rank in range(left.ranks)
    } <= sealed
    # Where versions before 0.2 kept it.
    (journal,) = (node.root / names.CONTROL / machine.host() / names.JOURNAL).iterdir()
    number = names.parse_journal_file(journal.name)
    assert number is not None
    scan = jf.scan(journal.read_bytes(), number)
    assert scan.ending is jf.Ending.CLEAN
    state = r.decode_state(scan.records[0].payload)
    for record in scan.records[1:]:
        state.apply(r.decode(record.type, record.payload))
    assert set(state.retiring) == {"/".join(RETIRING)}
    assert set(state.staged) == {"/".join(HALFWAY), "/".join(WRITTEN)}
    assert [part is None for part in state.staged["/".join(HALFWAY)].values()] == [True]
    assert [part is None for part in state.staged["/".join(WRITTEN)].values()] == [False]


def test_every_job_is_recovered_and_every_begun_save_and_deletion_is_settled(node: Home) -> None:
    before = files(node)
    with running(node, *KEEP_ALL) as daemon:
        recovered = {}
        for job, left in JOBS.items():
            with Ranks(left.ranks) as ranks:
                found = ranks.call(make_node.begin, node.socket, job)
                assert [(key, wrong) for _, key, _, wrong in found] == [
                    (left.newest, [])
                ] * left.ranks, job
                assert {attempt for attempt, *_ in found} == {left.newest[0] + 1}
                recovered[job] = {source for _, _, source, _ in found}
                ranks.call(make_node.snapshot, job, 100, True, "durable")
                ranks.call(make_node.close)
        assert recovered == {job: {"memory"} for job in JOBS}
        counters = daemon.status()["counters"]
        assert {name: counters[name] for name in ("journal_corrupt", "journal_torn_tails",
        "verify_failures", "failed")} == {
            "journal_corrupt": 0, "journal_torn_tails": 0, "verify_failures": 0, "failed": 0,
        }  # fmt: skip
    after = files(node)

    assert sum(len(left.committed) for left in JOBS.values()) > len(JOBS)
    for job, left in JOBS.items():
        for tag in left.committed:
            wanted = {} if (job, tag) == RETIRING else under(before, job, tag)
            assert under(after, job, tag) == wanted, f"{job}/{tag} is not as it was"
    staged = set(under(before, *HALFWAY))
    assert len(staged) == 1
    assert not staged & set(after), "a part that was not durable was not swept"
    kept = {name: data for name, data in under(before, *WRITTEN).items() if name.endswith(".ckpt")}
    assert set(under(after, *WRITTEN)) == {*kept, "/".join((*WRITTEN, names.MANIFEST))}, (
        "the durable part was not committed"
    )
    assert kept.items() <= after.items()
    pin = f"{names.CONTROL}/{names.PINS}/{'/'.join(PINNED)}"
    assert after[pin] == before[pin]


def test_every_checkpoint_verifies(node: Home) -> None:
    with running(node, *KEEP_ALL) as daemon:
        assert daemon.stop() == 0  # a stopping daemon saves the newest snapshots in memory
    committed = list(make_node.committed(node))
    saved = [
        (job, names.tag_directory(left.newest[1], None, left.newest[0]))
        for job, left in JOBS.items()
    ]
    kept = {(job, tag) for job, left in JOBS.items() for tag in left.committed} - {RETIRING}
    assert set(committed) == kept | {*saved, HALFWAY, WRITTEN}
    for job, tag in committed:
        with Checkpoint.open(node.root / job, tag) as checkpoint:
            assert checkpoint.verify() > 0
            assert checkpoint.step is not None
            wanted = make_node.tensors(job, checkpoint.step)
            assert set(checkpoint.keys()) == set(wanted)
            loaded = {name: checkpoint.tensor(name) for name in wanted}
            assert make_node.differences(loaded, wanted) == [], f"{job}/{tag}"
