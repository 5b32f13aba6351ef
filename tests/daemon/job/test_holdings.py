"""Test the board of a node: its holdings, the consequences of the answer, and that the
rules together keep every promise.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest

from ckptd.daemon.job import decisions as d
from ckptd.daemon.job import holdings, peer_replicas
from ckptd.daemon.job.catalog import Job, Step
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.errors import SnapshotFailed
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.receipt import CommitTry
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.wire import board
from ckptd.shared.wire.board import Answer, Holding
from ckptd.shared.wire.lifecycle import SnapshotState
from ckptd.shared.wire.messages import Progress, Waiting
from tests.support.cases import each_case
from tests.support.node_model import Model, Rules

NODE = Membership(run_id="0" * 32, ranks=[2, 3])


def job(*snapshots: Snapshot, **changes: Any) -> Job:
    """Return a job of four ranks. Ranks 2 and 3 are here."""
    fields: dict[str, Any] = {"attempt": 1, "world_size": 4, "node": NODE} | changes
    made = Job("gpt", **fields)
    for rank in NODE.ranks:
        made.ranks.join(Owner("gpt", 1, rank, 4))
    for snapshot in snapshots:
        for rank in snapshot.seals:
            made.occupy(f"{snapshot.step}/{rank}", rank, snapshot.key)
        made.step(snapshot.key).snapshot = snapshot
    return made


def snapshot(
    step: int,
    state: SnapshotState = SnapshotState.SEALED,
    *,
    sealed: tuple[int, ...] = (2, 3),
    persist: bool = True,
    checked: bool = True,
) -> Snapshot:
    made = Snapshot("gpt", 1, step, f"step-{step:08d}.a0001", 4, persist, state=state, node=NODE)
    checks = [ChunkCheck(1)] if checked else None
    made.seals = {rank: RankSeal(rank, f"{step}/{rank}", 1, b"", checks=checks) for rank in sealed}
    return made


# -- what is shown


def test_steps_that_all_ranks_of_the_node_have_sealed_are_held() -> None:
    made = job(
        snapshot(4, SnapshotState.DURABLE),
        snapshot(5),
        snapshot(6, SnapshotState.FILLING, sealed=(2,)),
    )
    made.sealed = (1, 5)
    assert holdings.holding(made, "node1") == Holding(held=[4, 5], done=5, ranks=[2, 3])


def test_a_step_is_held_once_its_checksums_are_known() -> None:
    made = job(snapshot(5, checked=False))
    assert holdings.holding(made, "node1") == Holding(held=[], done=4, ranks=[2, 3])


def test_steps_that_a_drain_of_this_node_has_asked_for_are_shown() -> None:
    made = job(snapshot(4), snapshot(5), snapshot(6, SnapshotState.FILLING, sealed=(2,)))
    for step in (5, 6):
        made.step((1, step)).snapshot.drained = True  # type: ignore[union-attr]
    assert holdings.holding(made, "node1").drained == [5]


@each_case(
    ("held", "saved"),
    [
        (snapshot(5, persist=False), [5]),
        (snapshot(5, persist=True), []),  # it is saved anyway
        (snapshot(5, SnapshotState.FAILED, persist=False), []),
        (snapshot(5, SnapshotState.DURABLE, persist=False), []),
        (snapshot(5, SnapshotState.FILLING, persist=False), []),
        (snapshot(6, persist=False), []),
    ],
)
def test_a_step_that_another_node_drains_is_saved_here_too(
    held: Snapshot, saved: list[int]
) -> None:
    made = job(held, answer=Answer(common=[5, 6], drained=[4, 5]))
    assert [found.step for found in holdings.drained(made)] == saved


def test_a_step_older_than_a_checkpoint_is_not_saved_for_another_node() -> None:
    made = job(snapshot(5, persist=False), answer=Answer(common=[5], drained=[5]))
    tag = "step-00000006.a0001"
    made.commit(StoredCheckpoint("gpt", tag, 1, 6, 1, 1, (), user_tag=False))
    assert holdings.drained(made) == []


def test_a_step_that_failed_here_is_done_and_says_why() -> None:
    made = job(snapshot(4))
    made.step((1, 5)).failure = ("storage", "rank 3: disk full")
    made.step((1, 6)).refusal = "every slot is still being saved"
    assert holdings.holding(made, "node1") == Holding(
        held=[4],
        done=6,
        failed={
            5: ("storage", "rank 3: disk full (on node1)"),
            6: ("snapshot-failed", "step 6 is skipped: every slot is still being saved (on node1)"),
        },
        ranks=[2, 3],
    )


def test_a_snapshot_whose_check_failed_is_done_and_not_held() -> None:
    made = job(snapshot(5, SnapshotState.FAILED, checked=False))
    assert holdings.holding(made, "node1") == Holding(held=[], done=5, ranks=[2, 3])


def test_a_step_that_a_rank_has_not_come_to_yet_holds_up_all_later_ones() -> None:
    made = job(snapshot(5, SnapshotState.FILLING, sealed=(2,)), snapshot(6))
    assert holdings.holding(made, "node1").done == 4


def test_a_new_attempt_has_done_nothing() -> None:
    assert holdings.holding(job(sealed=(0, 9)), "node1") == Holding(ranks=[2, 3])


def test_steps_of_earlier_attempts_are_not_shown() -> None:
    made = job(snapshot(5), attempt=2)
    made.checkpoints["x.a0001"] = StoredCheckpoint("gpt", "x.a0001", 1, 4, 1, 1, (), user_tag=True)
    assert holdings.holding(made, "node1") == Holding(ranks=[2, 3])
    made.checkpoints["x.a0002"] = StoredCheckpoint("gpt", "x.a0002", 2, 7, 1, 1, (), user_tag=True)
    assert holdings.holding(made, "node1") == Holding(durable=7, ranks=[2, 3])


def slow(step: int, *, came: tuple[int, ...], overdue: bool = True) -> Step:
    """Return a step that ranks of the node came to a while ago.

    None of them has sealed it.
    """
    made = Step((1, step), begun=True, overdue=overdue, came=set(came))
    made.slots = {f"{step}/{rank}": rank for rank in came}
    return made


def begun(*steps: Step, **changes: Any) -> Holding:
    made = job(**changes)
    made.steps.update({step.key: step for step in steps})
    return holdings.holding(made, "node1")


def test_a_step_that_is_begun_shows_the_ranks_that_have_not_come_to_it() -> None:
    assert begun(slow(5, came=(2,))).begun == {5: [3]}
    assert begun(slow(5, came=(2, 3))).begun == {5: []}  # both ranks copy
    assert begun(Step((1, 5), came={2}, slots={"5/2": 2})).begun == {}  # not a while ago
    failed, refused = slow(5, came=(2,)), slow(6, came=(2,))
    failed.failure, refused.refusal = ("storage", "full"), "every slot is still being saved"
    assert begun(failed, refused).begun == {}


def test_a_step_that_is_sealed_and_not_checked_yet_is_begun_and_no_rank_is_missing() -> None:
    made = job(snapshot(5, checked=False))
    made.step((1, 5)).begun = True
    assert holdings.holding(made, "node1").begun == {5: []}
    made = job(snapshot(5))
    made.step((1, 5)).begun = True
    assert holdings.holding(made, "node1").begun == {}


def test_a_step_is_overdue_until_it_is_settled() -> None:
    assert begun(slow(5, came=(2,))).overdue == [5]
    assert begun(slow(5, came=(2,), overdue=False)).overdue == []
    assert begun(slow(5, came=(2,)), slow(6, came=(2,)), answer=Answer(common=[5])).overdue == [6]
    assert begun(slow(5, came=(2,)), answer=Answer(dead={5: ("storage", "full")})).overdue == []
    held = job(snapshot(5), snapshot(6, SnapshotState.FAILED))
    held.step((1, 5)).overdue = held.step((1, 6)).overdue = True
    assert holdings.holding(held, "node1").overdue == [5]
    held.checkpoints["x.a0001"] = StoredCheckpoint("gpt", "x.a0001", 1, 5, 1, 1, (), user_tag=True)
    assert holdings.holding(held, "node1").overdue == []


def test_the_missing_ranks_of_a_step_are_told_once() -> None:
    made = job(answer=Answer(missing={5: [0, 3]}))
    assert holdings.missing(made, Answer()) == [
        d.Tell(Waiting(re=0, attempt=1, step=5, ranks=[0, 3]))
    ]
    assert holdings.missing(made, Answer(missing={5: [0, 1, 3]})) == []
    assert holdings.missing(job(), Answer()) == []


# -- what follows from the answer


def test_a_dead_step_fails_with_the_reason_of_the_other_node() -> None:
    filling, memory, saving = (
        snapshot(5, SnapshotState.FILLING, sealed=(2,)),
        snapshot(6, persist=False),
        snapshot(7),
    )
    made = job(
        filling,
        memory,
        saving,
        answer=Answer(dead=dict.fromkeys((5, 6, 7, 8), ("storage", "disk full (on node0)"))),
    )
    actions = holdings.answered(made)
    assert {action.key for action in actions if isinstance(action, d.Fail)} == {(1, 5), (1, 6)}
    messages = [a.message for a in actions if isinstance(a, d.Tell)]
    assert {(m.step, m.code, m.reason) for m in messages if isinstance(m, Progress)} == {
        (5, "storage", "disk full (on node0)"), (6, "storage", "disk full (on node0)"),
    }  # fmt: skip


def test_a_save_waits_until_all_nodes_hold_the_step() -> None:
    waiting = snapshot(5)
    made = job(waiting)
    assert not made.may_save(waiting)
    made.answer = Answer(common=[4])
    assert not made.may_save(waiting)
    made.answer = Answer(common=[4, 5])
    assert made.may_save(waiting)
    made.answer = Answer(dead={5: ("snapshot-failed", "not taken on node0")})
    with pytest.raises(SnapshotFailed, match="not taken on node0"):
        made.may_save(waiting)


def test_a_save_does_not_wait_for_a_board_that_nobody_carries() -> None:
    waiting = snapshot(5)
    made = job(waiting)
    made.ranks.remove(made.ranks.owners[3])
    assert made.may_save(waiting)
    assert job(waiting, attempt=2).may_save(waiting)


def test_a_snapshot_in_memory_only_stays_until_all_nodes_hold_a_newer_one() -> None:
    old, new = snapshot(5, persist=False), snapshot(6, persist=False)
    made = job(old, new)
    assert made.releasable() == []
    made.answer = Answer(common=[5])
    assert made.releasable() == []
    made.answer = Answer(common=[5, 6])
    assert made.releasable() == [old]


def test_all_that_is_held_is_owed_when_a_trainer_is_gone() -> None:
    old, new, dead = (
        snapshot(5, persist=False),
        snapshot(6, persist=False),
        snapshot(7, SnapshotState.FAILED),
    )
    made = job(old, new, dead, answer=Answer(dead={7: ("snapshot-failed", "x")}))
    assert made.owed() == [old, new]
    made.commit(StoredCheckpoint("gpt", "step-00000005.a0001", 1, 5, 1, 1, (), user_tag=False))
    assert made.owed() == [new]


def test_a_dead_step_frees_its_slots_at_once_and_replaces_nothing() -> None:
    common, dead = snapshot(1, persist=False), snapshot(2, SnapshotState.FAILED)
    made = job(common, dead, answer=Answer(common=[1], dead={2: ("snapshot-failed", "x")}))
    assert made.releasable() == [dead]
    assert made.newest_in_memory() is common
    assert job(dead, answer=made.answer).releasable() == [dead]


def test_a_newer_durable_step_replaces_all_older_ones_whatever_the_board_says() -> None:
    old, new = snapshot(5, persist=False), snapshot(6, SnapshotState.DURABLE)
    made = job(old, new)
    assert made.releasable() == []
    made.commit(StoredCheckpoint("gpt", "step-00000006.a0001", 1, 6, 1, 1, (), user_tag=False))
    assert made.releasable() == [old]


def test_a_step_that_failed_on_storage_is_kept_until_all_nodes_hold_a_newer_one() -> None:
    failed, new = snapshot(5, SnapshotState.FAILED), snapshot(6)
    made = job(failed, new, answer=Answer(common=[5]))
    assert made.releasable() == []
    made.answer = Answer(common=[5, 6])
    assert made.releasable() == [failed]


def test_steps_of_an_earlier_attempt_are_kept_until_a_newer_one_is_durable() -> None:
    old, newer = snapshot(5, persist=False), snapshot(6)
    made = job(old, newer, attempt=2, answer=Answer(common=[5, 6, 7]))
    assert made.releasable() == []
    made.commit(StoredCheckpoint("gpt", "step-00000006.a0001", 1, 6, 1, 1, (), user_tag=False))
    assert made.releasable() == [old]


def test_what_a_node_gives_up_at_the_end_of_memory_ttl() -> None:
    kept, delivered, twice, dead = (snapshot(step, SnapshotState.FAILED) for step in (4, 5, 6, 7))
    delivered.delivered, twice.abandoned, kept.abandoned = True, 2, 1
    made = job(kept, delivered, twice, dead, answer=Answer(dead={7: ("snapshot-failed", "x")}))
    assert d.given_up(made) == [d.Release(one.key) for one in (delivered, twice, dead)]
    assert kept in made.owed()


# -- the rules together


YES, NO = True, False


def test_no_order_of_events_breaks_a_promise() -> None:
    """These are all states of two nodes that take two steps, and none of them is stuck.

    `make trust` visits the states of three steps.
    """
    for persist, losses in product(product((YES, NO), repeat=2), (0, 1)):
        visited, problem = Model(persist, losses=losses).explore()
        assert (problem, visited > 1_500) == ("", True), (persist, losses)


def test_no_order_of_events_loses_a_replicated_step() -> None:
    """These are all states of two nodes that take one or two steps, if copies fail and one
    node is lost at any moment.
    """
    for replicate, states in (((YES,), 900), ((YES, YES), 20_000)):
        visited, problem = replicating(replicate, losses=1, breaks=True).explore()
        assert (problem, visited > states) == ("", True), replicate


def test_no_random_walk_loses_a_replicated_step() -> None:
    """`make trust` takes other walks."""
    for persist, count in product(((NO,) * 6, (NO, YES, NO, NO, YES, NO)), (2, 3)):
        model = replicating(
            (YES, YES, NO, YES, YES, NO), persist=persist, count=count, losses=1, failures=True,
            breaks=True,
        )  # fmt: skip
        events, problem = model.wander(15, seed=1)
        assert (problem, events > 200) == ("", True), (persist, count)


def replicating(replicate: tuple[bool, ...], **changes: Any) -> Model:
    """Return a model of nodes that have room for replicated steps."""
    fields: dict[str, Any] = {"persist": (NO,) * len(replicate), "slots": 3, "failures": False}
    return Model(replicate=replicate, **(fields | changes))


def without(*, persist: bool = NO, **rules: Any) -> Model:
    """Return a model of nodes that take three steps, with other rules."""
    return Model((persist,) * 3, rules=Rules(**rules))


def _local(job: Job, snapshot: Snapshot, newest: Snapshot) -> bool:
    return snapshot.key < newest.key


def _newest(job: Job) -> list[Snapshot]:
    newest = job.newest_in_memory()
    return (
        [newest]
        if newest is not None
        and newest.state is SnapshotState.SEALED
        and not job.is_durable(*newest.key)
        else []
    )


def _hasty(nodes: dict[str, Holding], before: Answer) -> Answer:
    return board.answer(
        {
            name: Holding(held=node.held, done=10**6, durable=node.durable)
            for name, node in nodes.items()
        },
        before,
    )


def _forgetful(nodes: dict[str, Holding], before: Answer) -> Answer:
    return board.answer(
        {name: Holding(held=node.held, done=node.done) for name, node in nodes.items()},
        Answer(dead=before.dead),
    )


def _silent(holding: Holding, written: Holding | None, heard: Answer) -> bool:
    return written is None or bool(set(holding.held) - set(written.held))


def _patient(nodes: dict[str, Holding], before: Answer) -> Answer:
    return Answer(common=board.answer(nodes, before).common)


def _partial(receipts: list[Any], world_size: int, *, late: bool) -> CommitTry | None:
    return CommitTry(receipts[0], []) if receipts else None


def _once_common(job: Job, snapshot: Snapshot, newest: Snapshot) -> bool:
    return job.is_durable_after(snapshot.key) or any(
        snapshot.step < step for step in job.answer.common
    )


def _while_copies_are_made(job: Job, snapshot: Snapshot, newest: Snapshot) -> bool:
    decide = _once_common if job.answer.alone else Job.is_replaced
    return decide(job, snapshot, newest)


def _once_held(job: Job, replica: Snapshot) -> bool:
    return any(replica.key < snapshot.key for snapshot in job.snapshots)


def _unless_left_behind(job: Job, replica: Snapshot) -> bool:
    """Decide without the last rule of `is_needless`."""
    return job.is_durable(*replica.key) or any(
        replica.step < step for step in job.answer.replicated
    )


def _one_copy(nodes: dict[str, Holding], before: Answer) -> Answer:
    found = board.answer(nodes, before)
    copied = {step for node in nodes.values() for step in node.hosted}
    return msgspec.structs.replace(found, replicated=sorted({*found.replicated, *copied}))


def _after_the_end(nodes: dict[str, Holding], before: Answer) -> Answer:
    found = board.answer(nodes, before)
    going_on = board.answer(
        {name: msgspec.structs.replace(node, alone="") for name, node in nodes.items()},
        msgspec.structs.replace(before, alone=""),
    )
    return msgspec.structs.replace(found, replicated=going_on.replicated)


def _without_end(nodes: dict[str, Holding], before: Answer) -> Answer:
    found = board.answer(nodes, before)
    return msgspec.structs.replace(found, replicating=before.replicating) if found.alone else found


def _by_itself(job: Job) -> int:
    newest = job.newest_in_memory()
    return newest.step if newest is not None and newest.replicate else -1


def _none(job: Job) -> list[Snapshot]:
    return []


def _last_copy(job: Job) -> list[Snapshot]:
    return peer_replicas.owed(job)[-1:]


def _no_copies(holding: Holding, written: Holding | None, known: Answer) -> bool:
    return board.is_news(msgspec.structs.replace(holding, hosted={}), written, known)


def _no_gap(holding: Holding, written: Holding | None, known: Answer) -> bool:
    return board.is_news(holding, written, msgspec.structs.replace(known, replicating=-1))


LONG = (YES, YES, NO, YES, YES, NO, YES)
BROKEN: dict[str, tuple[Model, str]] = {
    "a node frees by itself": (without(is_replaced=_local), "comes back"),
    "a node saves only its newest": (without(owed=_newest), "comes back"),
    "a step is called dead too early": (without(answer=_hasty, persist=YES), "comes back"),
    "durable steps do not count": (
        without(answer=_forgetful, persist=YES),
        "a step that is committed is called dead",
    ),
    "missing receipts do not count": (
        without(decide=_partial, persist=YES),
        "is committed without the parts of a node",
    ),
    "failures are not told": (without(is_news=_silent, persist=YES), "waits for ever"),
    "failures of steps in memory are not told": (
        without(is_news=_silent),
        "has no slot for another step",
    ),
    "no step is dead": (without(answer=_patient, persist=YES), "waits for ever"),
    "no step in memory is dead": (without(answer=_patient), "has no slot for another step"),
    "slots are freed once a newer step is common": (
        replicating((YES, YES), losses=1, rules=Rules(is_replaced=_once_common)),
        "comes back",
    ),
    "a copy is overwritten once a newer step is held": (
        replicating((YES, YES), losses=1, rules=Rules(is_needless=_once_held)),
        "comes back",
    ),
    "one whole copy is enough": (
        replicating((YES,), losses=1, rules=Rules(answer=_one_copy)),
        "comes back",
    ),
    "nothing is saved on behalf": (
        replicating((YES,), losses=1, rules=Rules(owed_on_behalf=_none)),
        "comes back",
    ),
    "only the newest copy is saved on behalf": (
        replicating((YES, YES, NO), losses=1, rules=Rules(owed_on_behalf=_last_copy)),
        "comes back",
    ),
    "slots of replicated steps are freed when the copies end": (
        replicating(
            (YES, YES), losses=1, breaks=True, rules=Rules(is_replaced=_while_copies_are_made)
        ),
        "comes back",
    ),
    "steps are replicated after the copies have ended": (
        replicating((YES, YES), losses=1, breaks=True, rules=Rules(answer=_after_the_end)),
        "comes back",
    ),
    "copies that have failed go on": (
        replicating((YES,), breaks=True, rules=Rules(answer=_without_end)),
        "copied for ever",
    ),
    "whole copies are not told": (
        replicating((YES,), rules=Rules(is_news=_no_copies)),
        "copied for ever",
    ),
    "a step that is no longer held is not told": (
        replicating((YES, YES, NO), rules=Rules(is_news=_no_gap)),
        "copied for ever",
    ),
    "two slots": (replicating((YES, NO, NO), slots=2), "has no slot for another step"),
    "two lost nodes": (replicating((YES,), losses=2, covered=2), "comes back"),
    "each node chooses the step to copy": (
        replicating(LONG, slots=4, rules=Rules(replicating=_by_itself)),
        "waits for ever for a place",
    ),
    "copies that will never be whole are kept": (
        replicating(LONG, slots=4, rules=Rules(is_needless=_unless_left_behind)),
        "waits for ever for a place",
    ),
}
"""Jobs that a switched-off rule breaks, or a shortage, and the promise that is broken."""


def test_every_rule_that_is_switched_off_is_found() -> None:
    found = {name: model.wander(2_000, seed=3)[1] for name, (model, _) in BROKEN.items()}
    assert {
        name: found[name] for name, (_, text) in BROKEN.items() if text not in found[name]
    } == {}


def test_a_rule_whose_loss_no_short_walk_meets_is_found() -> None:
    model = replicating((YES, YES), losses=1, rules=Rules(replicating=_by_itself))
    assert "comes back" in model.explore()[1]
