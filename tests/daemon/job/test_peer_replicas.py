"""Test which peer replicas a node shows, may overwrite, frees and saves."""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.daemon.job import holdings, peer_replicas
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.formats.membership import Membership
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.support.cases import each_case

CLAIM = "0" * 32
HERE = Membership(run_id=CLAIM, ranks=[2, 3])
PEER = Membership(run_id=CLAIM, ranks=[0, 1])


def replica(
    step: int,
    *,
    attempt: int = 2,
    state: SnapshotState = SnapshotState.SEALED,
    ranks: tuple[int, ...] = (0, 1),
) -> Snapshot:
    tag = f"step-{step:08d}.a{attempt:04d}"
    made = Snapshot(
        "gpt", attempt, step, tag, 4, persist=False, state=state, node=PEER, peer_replica=True
    )
    made.seals = {rank: RankSeal(rank, f"{step}/{rank}", 1, b"", checks=[]) for rank in ranks}
    return made


def job(*replicas: Snapshot, durable: int = -1, **changes: Any) -> Job:
    """Return a job of four ranks in attempt 2. Ranks 2 and 3 are here."""
    fields: dict[str, Any] = {"attempt": 2, "world_size": 4, "node": HERE} | changes
    made = Job("gpt", **fields)
    made.peer_replicas = {(each.key, each.ranks[0]): each for each in replicas}
    if durable >= 0:
        tag = f"step-{durable:08d}.a0002"
        made.commit(StoredCheckpoint("gpt", tag, 2, durable, durable, 1, (), user_tag=False))
    return made


def steps(found: list[Snapshot]) -> list[int]:
    return [each.step for each in found]


# -- what is shown


def test_whole_copies_of_the_newest_attempt_are_shown() -> None:
    half = replica(7, state=SnapshotState.FILLING, ranks=(0,))
    made = job(replica(5), replica(6), half, replica(4, attempt=1))
    assert peer_replicas.hosted(made) == {5: [0], 6: [0]}
    assert holdings.holding(made, "node1").hosted == {5: [0], 6: [0]}


def test_a_node_that_makes_no_copies_any_more_says_why() -> None:
    made = job(alone="rank 2: the peer is gone")
    assert holdings.holding(made, "node1").alone == "rank 2: the peer is gone"


@pytest.mark.parametrize(
    ("replicate", "alone", "wanted"), [(True, "", [5]), (False, "", []), (True, "a peer", [])]
)
def test_a_step_is_wanted_if_it_is_held_and_to_be_copied(
    replicate: bool, alone: str, wanted: list[int]
) -> None:
    made = job(alone=alone)
    own = Snapshot(
        "gpt", 2, 5, "step-00000005.a0002", 4, persist=False, state=SnapshotState.SEALED,
        node=HERE, replicate=replicate,
    )  # fmt: skip
    own.seals = {rank: RankSeal(rank, f"own/{rank}", 1, b"", checks=[]) for rank in HERE.ranks}
    made.step(own.key).snapshot = own
    assert holdings.holding(made, "node1").wanted == wanted


# -- what may be overwritten


@each_case(
    ("answer", "needless"),
    [
        (Answer(), False),
        (Answer(common=[5, 6, 7]), False),
        (Answer(replicated=[5]), False),
        (Answer(replicated=[5], replicating=6), False),
        (Answer(replicated=[5, 6]), True),
        (Answer(replicating=5), False),
        (Answer(replicating=6), True),  # the nodes have given up on copying step 5
        (Answer(dead={5: ("snapshot-failed", "dead")}), True),
    ],
)
def test_a_copy_is_needed_until_a_later_step_is_replicated(answer: Answer, needless: bool) -> None:
    copy = replica(5)
    assert peer_replicas.is_needless(job(copy, answer=answer), copy) is needless


@pytest.mark.parametrize(("durable", "needless"), [(4, False), (5, True), (6, True)])
def test_a_copy_is_needed_until_its_step_is_durable(durable: int, needless: bool) -> None:
    copy = replica(5)
    assert peer_replicas.is_needless(job(copy, durable=durable), copy) is needless


def test_a_copy_that_is_read_or_saved_is_needed() -> None:
    copy = replica(5)
    with copy.held():
        assert not peer_replicas.is_needless(job(copy, durable=6), copy)
    saving = replica(5, state=SnapshotState.WRITING)
    assert not peer_replicas.is_needless(job(saving, durable=6), saving)


def test_a_copy_of_an_earlier_attempt_is_needed_until_a_later_step_is_durable() -> None:
    copy = replica(5, attempt=1)
    assert not peer_replicas.is_needless(job(copy, answer=Answer(replicated=[9])), copy)
    assert peer_replicas.is_needless(job(copy, durable=1), copy)


def test_a_copy_of_an_earlier_attempt_stays_for_recoveries_until_a_new_step_is_in_memory() -> None:
    copy = replica(5, attempt=1)
    made = job(copy, durable=1)
    assert peer_replicas.outlived(made) == []
    own = Snapshot("gpt", 2, 1, "step-00000001.a0002", 4, True, SnapshotState.SEALED, node=HERE)
    own.seals = {rank: RankSeal(rank, f"own/{rank}", 1, b"", checks=[]) for rank in HERE.ranks}
    made.step(own.key).snapshot = own
    assert peer_replicas.outlived(made) == [copy]


# -- own slots


@each_case(
    ("answer", "replaced"),
    [
        (Answer(common=[5, 6]), True),
        (Answer(common=[5, 6], replicated=[5]), False),
        (Answer(common=[5, 6], replicating=5), False),
        (Answer(common=[5, 6], replicated=[5, 6]), True),
        (Answer(common=[5, 6], replicated=[5], alone="the peer is gone"), False),
        (Answer(common=[5, 6], alone="the peer is gone"), True),
    ],
)
def test_a_step_that_is_in_the_peers_keeps_its_slots_until_a_later_one_is(
    answer: Answer, replaced: bool
) -> None:
    made = job(answer=answer)
    old, new = (
        Snapshot(
            "gpt", 2, step, f"step-{step:08d}.a0002", 4, False, SnapshotState.SEALED, node=HERE
        )
        for step in (5, 6)
    )
    assert made.is_replaced(old, new) is replaced


@pytest.mark.parametrize(("replicating", "replaced"), [(5, False), (6, True), (-1, True)])
def test_a_durable_step_keeps_its_slots_while_any_node_still_copies_it(
    replicating: int, replaced: bool
) -> None:
    made = job(answer=Answer(common=[5, 6], replicating=replicating), durable=5)
    old, new = (
        Snapshot("gpt", 2, step, f"step-{step:08d}.a0002", 4, True, state, node=HERE)
        for step, state in ((5, SnapshotState.DURABLE), (6, SnapshotState.SEALED))
    )
    assert made.is_replaced(old, new) is replaced


# -- what is saved on behalf of another node


def test_copies_after_the_newest_durable_step_are_owed() -> None:
    made = job(replica(4), replica(5), replica(6), durable=4)
    assert steps(peer_replicas.owed(made)) == [5, 6]


@pytest.mark.parametrize(
    "state", [SnapshotState.FILLING, SnapshotState.WRITING, SnapshotState.WRITTEN]
)
def test_copies_that_are_not_whole_or_are_being_saved_are_not_owed(state: SnapshotState) -> None:
    assert peer_replicas.owed(job(replica(5, state=state))) == []


def test_copies_that_are_delivered_or_dead_are_not_owed() -> None:
    delivered = replica(5)
    delivered.delivered = True
    dead = Answer(dead={6: ("snapshot-failed", "dead")})
    assert peer_replicas.owed(job(delivered, replica(6), answer=dead)) == []


def test_after_memory_ttl_what_is_needless_or_delivered_is_freed() -> None:
    delivered = replica(6)
    delivered.delivered = True
    made = job(replica(5), delivered, replica(7), durable=5)
    assert steps(peer_replicas.expired(made)) == [5, 6]
    assert steps(peer_replicas.needless(made)) == [5]


@pytest.mark.parametrize(("abandoned", "holds", "freed"), [(1, 0, []), (2, 0, [5]), (2, 1, [])])
def test_after_memory_ttl_a_copy_whose_tries_were_abandoned_twice_is_freed(
    abandoned: int, holds: int, freed: list[int]
) -> None:
    copy = replica(5, state=SnapshotState.FAILED)
    copy.abandoned, copy.holds = abandoned, holds
    assert steps(peer_replicas.expired(job(copy))) == freed


@pytest.mark.parametrize(
    ("attempt", "rank_is_here", "unfinished"), [(2, True, []), (2, False, [6]), (1, True, [6])]
)
def test_a_copy_that_is_not_whole_is_needed_while_a_rank_may_complete_it(
    attempt: int, rank_is_here: bool, unfinished: list[int]
) -> None:
    half = replica(6, attempt=attempt, state=SnapshotState.FILLING, ranks=(0,))
    made = job(replica(5, attempt=attempt), half)
    made.ranks.owners = {2: Owner("gpt", 2, 2, 4)} if rank_is_here else {}
    assert steps(peer_replicas.unfinished(made)) == unfinished
    assert steps(peer_replicas.expired(made)) == unfinished


# -- segments


def test_the_segments_of_a_rank_are_those_that_hold_and_those_that_receive_its_copies() -> None:
    made = job(replica(5), replica(4, attempt=1))
    made.receiving = {"new": ((2, 6), 0), "other": ((2, 6), 1)}
    assert peer_replicas.segments(made, 2, 0) == {"5/0": ((2, 5), 0), "new": ((2, 6), -1)}
    assert peer_replicas.of_step(made, (2, 5)) == [made.peer_replicas[(2, 5), 0]]
