"""Tests what a daemon lends to readers: which snapshot, as a pure function of the job,
and that a loan holds nothing.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from ckptd.daemon.engine import readers as r
from ckptd.daemon.engine.readers import NOTHING, Readers, newest
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.errors import Busy, InvalidName
from ckptd.shared.formats.membership import Membership
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.daemon.job.test_decisions import rank_seal
from tests.support.core import ConnectedRanks
from tests.support.daemons import Daemon

S = SnapshotState
NODE = Membership(run_id="0" * 32, ranks=[0, 1])


def job(*held: tuple[int, int, SnapshotState], durable: tuple[tuple[int, int], ...] = ()) -> Job:
    """Return a job of two ranks with these snapshots in memory, all of them sealed, and
    these checkpoints.
    """
    made = Job("gpt", attempt=2, world_size=2)
    for attempt, number, state in held:
        snapshot = Snapshot("gpt", attempt, number, f"tag-{number}", 2, persist=True, state=state)
        snapshot.seals = {rank: rank_seal(rank) for rank in (0, 1)}
        made.step((attempt, number)).snapshot = snapshot
    for attempt, number in durable:
        tag = f"step-{number:08d}.a{attempt:04d}"
        made.commit(StoredCheckpoint("gpt", tag, attempt, number, 2, 1, (), user_tag=False))
    return made


def lent(of: Job, after: tuple[int, int] = NOTHING, but: Any = ()) -> tuple[Any, bool] | None:
    """Return the key of the snapshot that is lent, and whether it is lent from memory."""
    found = newest(of, after, but)
    return found and (found[0], found[2] is not None)


def test_the_newest_that_all_ranks_have_sealed_is_lent_from_memory() -> None:
    held = job((2, 5, S.SEALED), (2, 6, S.SEALED), (2, 7, S.FILLING))
    assert lent(held) == ((2, 6), True)
    assert lent(held, after=(2, 5)) == ((2, 6), True)
    assert lent(held, after=(2, 6)) is None
    assert lent(held, after=(1, 99)) == ((2, 6), True), "the attempt counts before the step"
    assert lent(held, but={(2, 6)}) == ((2, 5), True), "one that is damaged is passed over"
    assert lent(job((2, 5, S.FAILED))) == ((2, 5), True), "only its save has failed"
    assert lent(job()) is None


def test_storage_is_named_if_it_has_a_later_snapshot_than_memory() -> None:
    assert lent(job((2, 5, S.SEALED), durable=((1, 9),))) == ((2, 5), True)
    assert lent(job((2, 5, S.DURABLE), durable=((2, 5),))) == ((2, 5), True)
    assert lent(job((2, 5, S.SEALED), durable=((2, 6),))) == ((2, 6), False)
    assert lent(job(durable=((2, 6),))) == ((2, 6), False)
    assert lent(job((2, 5, S.DURABLE), durable=((2, 5),)), but={(2, 5)}) == ((2, 5), False)


def test_of_several_nodes_only_what_is_durable_is_lent() -> None:
    held = job((2, 5, S.DURABLE), (2, 6, S.SEALED), durable=((2, 5),))
    for snapshot in held.snapshots:
        snapshot.node = NODE
    assert lent(held) == ((2, 5), True)


def test_a_loan_holds_nothing_and_is_made_once_the_snapshot_is_checked() -> None:
    ranks = ConnectedRanks(2)
    lender = Readers(ranks.core.catalog, ranks.core.engine.slots, ranks.core.saver)
    ranks.seal(0, 5)
    waiting = ranks.core.spawn(lender.lend("gpt", NOTHING, 60.0))
    ranks.core.tick()
    assert not waiting.done(), "rank 1 has not sealed it"
    ranks.seal(1, 5)
    ranks.core.finish()
    loan = waiting.result()
    assert (loan.key, loan.stored, list(loan.slots)) == ((1, 5), False, [0, 1])
    (snapshot,) = ranks.job.snapshots
    assert snapshot.holds == 0
    assert all(ranks.core.engine.slots.get(seal.segment).lent for seal in snapshot.seals.values())
    loan.close()
    assert ranks.core.run(lender.lend("gpt", (1, 5), 0.0)) is None
    ranks.core.close()


def test_the_readers_that_wait_are_bounded_and_a_job_may_begin_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(r, "MOST_WAITING", 1)
    monkeypatch.setattr(r, "_LOOK_SECONDS", 0.01)

    async def run() -> None:
        catalog = Catalog()
        lender = Readers(catalog, None, None)  # type: ignore[arg-type]
        first = asyncio.ensure_future(lender.lend("gpt", NOTHING, 60.0))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="^1 readers wait for snapshots already"):
            await lender.lend("other", NOTHING, 60.0)
        assert await lender.lend("other", NOTHING, 0.0) is None, "it does not wait"
        with pytest.raises(InvalidName):
            await lender.lend("../x", NOTHING, 0.0)
        assert not catalog.jobs, "asking makes no job"
        catalog.jobs["gpt"] = job(durable=((1, 3),))
        loan = await first
        assert loan is not None
        assert (loan.key, loan.stored, loan.slots) == ((1, 3), True, {})

    asyncio.run(run())


def test_a_reader_that_goes_away_no_longer_waits(daemon: Daemon) -> None:
    for _ in range(r.MOST_WAITING + 1):
        channel = Channel(daemon.home.socket, 10.0)
        channel.send(m.Lend(id=channel.new_id(), job="gpt", wait=3600.0))
        channel.send(m.Status(id=channel.new_id()))
        assert isinstance(channel.receive()[0], m.StatusReport), "the one before no longer waits"
        channel.close()
    assert os.path.exists(daemon.home.socket)
