"""What follows from each event of a step, as tables: the step before, the event, and
the actions.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.daemon.job import decisions as d
from ckptd.daemon.job.catalog import Job, Step
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.errors import (
    AlreadyExists,
    CkptdError,
    Fenced,
    IntegrityError,
    InvalidRequest,
    NotFound,
    SnapshotFailed,
    StorageError,
    StructureChanged,
)
from ckptd.shared.formats.membership import Membership
from ckptd.shared.wire.lifecycle import Event, SnapshotState
from ckptd.shared.wire.messages import Progress, Waiting
from tests.support.cases import each_case

KEY = (1, 5)
TAG = "step-00000005.a0001"
S = SnapshotState


class Timer:
    """Plays a TimerHandle that runs."""

    def cancel(self) -> None:
        pass


def rank_seal(
    rank: int, *, plan: bytes = b"plan", persist: bool = True, node: Membership | None = None
) -> RankSeal:
    return RankSeal(rank, f"slot{rank}", 1, bytes(32), plan, persist, node=node)


def step(
    *,
    sealed: tuple[int, ...] | None = None,
    state: SnapshotState = S.FILLING,
    size: int = 2,
    planned: tuple[int, ...] = (),
    kept: tuple[int, ...] = (),
    timer: bool = True,
    failure: tuple[str, str] | None = None,
    key: tuple[int, int] = KEY,
    persist: bool = True,
) -> Step:
    """A step of a job of two ranks.

    `sealed`: the ranks that have sealed it; None if no slot was granted.
    """
    made = Step(key, failure=failure)
    for rank in planned:
        made.plan_again(rank, "w grew")
    for rank in kept:
        made.keep_plan(rank)
    made.timer = Timer() if timer else None  # type: ignore[assignment]
    if sealed is not None:
        made.slots = {f"slot{rank}": rank for rank in range(size)}
        made.snapshot = Snapshot(
            "gpt", *key, f"step-{key[1]:08d}.a{key[0]:04d}", size, persist, state
        )
        made.snapshot.seals = {rank: rank_seal(rank) for rank in sealed}
    return made


def job(*steps: Step, size: int = 2, attempt: int = 1) -> Job:
    return Job("gpt", attempt=attempt, world_size=size, steps={each.key: each for each in steps})


def told(actions: list[d.Action]) -> list[tuple[str, str, str]]:
    """The state, code and reason of each message."""
    messages = [action.message for action in actions if isinstance(action, d.Tell)]
    return [(m.state, m.code, m.reason) for m in messages if isinstance(m, Progress)]


def raised(actions: list[d.Action]) -> list[tuple[type[CkptdError], str]]:
    return [(type(a.error), str(a.error)) for a in actions if isinstance(a, d.Raise)]


def kinds(actions: list[d.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


# -- a step fails

FAILED = ["Fail", "Tell", "Release", "EndWait"]


def test_a_failed_step_is_marked_told_released_and_settled_in_this_order() -> None:
    message = Progress(re=0, attempt=1, step=5, state="failed", reason="no", code="snapshot-failed")
    expected = [
        d.Fail(KEY, "snapshot-failed", "no"),
        d.Tell(message),
        d.Release(KEY),
        d.EndWait(KEY),
    ]
    assert d.fail(step(sealed=(0,)), SnapshotFailed("no")) == expected


@each_case(
    ("before", "actions"),
    [
        (step(), FAILED),
        (step(sealed=()), FAILED),
        (step(sealed=(0,)), FAILED),
        (step(sealed=(0, 1), state=S.SEALED), ["EndWait"]),
        (step(sealed=(0, 1), state=S.DURABLE), ["EndWait"]),
        (step(sealed=(0, 1), state=S.FAILED), ["EndWait"]),
        (step(failure=("storage", "before")), ["EndWait"]),
    ],
)
def test_only_a_step_that_is_incomplete_can_fail_and_only_once(
    before: Step, actions: list[str]
) -> None:
    assert kinds(d.fail(before, SnapshotFailed("no"))) == actions


@each_case(
    ("planned", "kept", "error", "code"),
    [
        ((0,), (1,), SnapshotFailed("no"), "structure-changed"),
        ((0,), (), SnapshotFailed("no"), "snapshot-failed"),
        ((), (1,), SnapshotFailed("no"), "snapshot-failed"),
        ((0,), (1,), StorageError("no"), "storage"),
        ((0,), (1,), Fenced("no"), "fenced"),
    ],
)
def test_ranks_plan_again_if_only_some_of_them_did(
    planned: tuple[int, ...], kept: tuple[int, ...], error: CkptdError, code: str
) -> None:
    assert told(d.fail(step(planned=planned, kept=kept), error)) == [("failed", code, "no")]


@each_case(
    ("before", "late"),
    [
        (step(sealed=(0,)), "rank 1"),
        (step(sealed=()), "ranks 0, 1"),
        (step(planned=(1,)), "rank 0"),
        (step(planned=(0, 1)), "ranks 0, 1"),
        (step(planned=(1,), sealed=(0,)), "rank 1"),
    ],
)
def test_a_timeout_names_the_ranks_that_are_late(before: Step, late: str) -> None:
    found = told(d.expired(job(before), before, 60.0))
    assert [reason for _, _, reason in found] == [
        f"step 5 failed: {late} did not seal it within 60 s: every rank must call "
        f"snapshot(step=5), not only some of them"
    ]


def granted(**slots: int) -> Step:
    """A step without a seal. `slots`: the rank of each slot that is granted for it."""
    made = step(sealed=())
    made.slots = slots
    return made


def settled(made: Step) -> Step:
    """A step for which a rank has got no slot, and that another rank has sealed since."""
    made.end_wait()
    made.timer = Timer()  # type: ignore[assignment]
    return made


@each_case(
    ("before", "missing"),
    [
        (step(kept=(0,)), [1]),  # rank 0 has requested a slot
        (granted(a=0), [1]),
        (granted(a=0, b=1), []),  # both ranks copy
        (step(sealed=(0,)), []),  # rank 1 copies: it has a slot
        (step(kept=(0, 1)), []),  # both ranks wait for a slot
        (step(planned=(1,)), [0]),
        (step(planned=(1,), kept=(0,)), []),
        (settled(step(kept=(0, 1))), []),  # rank 1 skips the step, and rank 0 has sealed it
        (step(), []),  # no rank has come
        (step(kept=(0,), timer=False), []),  # no rank waits
        (step(kept=(0,), failure=("storage", "full")), []),
        (step(kept=(0,), key=(0, 5)), []),  # of an earlier attempt
    ],
)
def test_the_ranks_that_have_not_come_to_a_step_are_told(before: Step, missing: list[int]) -> None:
    message = Waiting(re=0, attempt=1, step=5, ranks=missing)
    assert d.waiting(job(before), before) == ([d.Tell(message)] if missing else [])


def test_only_ranks_of_this_node_are_told_as_missing_by_this_node() -> None:
    before = step(kept=(2,))
    made = job(before, size=6)
    made.node = Membership(run_id="0" * 32, ranks=[2, 3, 4])
    assert [action.message.ranks for action in d.waiting(made, before)] == [[3, 4]]  # type: ignore[union-attr]


@each_case(
    ("reason", "code", "expected"),
    [
        ("no memory left", "", ("snapshot-failed", "rank 1: no memory left")),
        ("rank 0: no memory left", "storage", ("storage", "rank 0: no memory left")),
        ("ranks 0, 1 differ", "mismatch", ("mismatch", "ranks 0, 1 differ")),
        ("x", "busy", ("snapshot-failed", "rank 1: x")),
        ("x", "structure-changed", ("structure-changed", "rank 1: x")),
        ("x", "of a newer ckptd", ("snapshot-failed", "rank 1: x")),
    ],
)
def test_a_rank_that_passes_over_a_step_gives_the_reason(
    reason: str, code: str, expected: tuple[str, str]
) -> None:
    assert told(d.passed_over(job(), step(sealed=(0,)), 1, reason, code)) == [("failed", *expected)]


@each_case(
    ("before", "actions"),
    [
        (step(timer=False), FAILED),
        (step(sealed=(1,)), FAILED),
        (step(sealed=(0,)), []),
        (step(sealed=(0, 1), state=S.SEALED), []),
        (step(failure=("storage", "x")), ["EndWait"]),
    ],
)
def test_a_rank_that_has_sealed_a_step_cannot_pass_over_it(
    before: Step, actions: list[str]
) -> None:
    assert kinds(d.passed_over(job(), before, 0, "x", "")) == actions


def test_a_rank_that_is_alone_is_not_told_of_its_own_failure_since_it_may_be_trying_again() -> None:
    actions = d.passed_over(job(size=1), step(timer=False), 0, "x", "")
    assert kinds(actions) == ["Fail", "Release", "EndWait"]


def test_the_steps_of_a_rank_that_left_fail_and_first_those_with_slots() -> None:
    steps = [
        step(key=(1, 8), planned=(0,)),  # still planned
        step(key=(1, 5), sealed=(0,)),
        step(key=(1, 6), sealed=(1,)),  # rank 1 has sealed it
        step(key=(1, 4), sealed=(0, 1), state=S.SEALED),
        step(key=(0, 7), sealed=(0,)),  # of another attempt
        step(key=(1, 9), timer=False),  # skipped
    ]
    found = d.left(job(*steps), 1, 1, "ended")
    assert told(found) == [
        ("failed", "snapshot-failed", "step 5 failed: rank 1 ended before it sealed the step"),
        ("failed", "snapshot-failed", "step 8 failed: rank 1 ended before it sealed the step"),
    ]
    assert [action.key for action in found if isinstance(action, d.EndWait)] == [(1, 5), (1, 8)]


def test_a_slot_that_an_earlier_daemon_granted_is_freed_when_its_rank_leaves() -> None:
    adopted = step(timer=False)
    adopted.slots = {"a": 0, "b": 1}
    assert d.left(job(adopted), 1, 1, "closed") == [d.Free(KEY, "b")]


def test_a_newer_attempt_ends_the_incomplete_steps_of_older_ones() -> None:
    steps = [
        step(key=(1, 5), sealed=(0,)),
        step(key=(2, 1), sealed=(0,)),
        step(key=(1, 4), sealed=(0, 1), state=S.WRITING),
        step(key=(1, 6)),
    ]
    found = d.superseded(job(*steps, attempt=2))
    assert [action.key for action in found if isinstance(action, d.Fail)] == [(1, 5)]
    assert [code for _, code, _ in told(found)] == ["fenced"]


# -- a rank plans a step, and requests a slot


def gone(made: Job) -> Job:
    made.ranks.gone = {1: "closed"}
    return made


@each_case(
    ("made", "last_sealed", "error"),
    [
        (job(), -1, None),
        (job(), 4, None),
        (job(), 5, "step 5 does not follow step 5, the last of attempt 1"),
        (job(step(sealed=())), -1, None),
        (job(step(sealed=(1,))), 5, None),
        (job(step(sealed=(0,))), -1, "step 5 does not follow step 5"),
        (job(step(sealed=(0, 1), state=S.DURABLE)), -1, "step 5 does not follow step 5"),
        (job(step(key=(1, 6), sealed=())), -1, "step 5 does not follow step 6"),
        (job(step(key=(0, 6), sealed=())), -1, None),
        (job(step(key=(1, 6))), -1, None),
        (job(step(failure=("storage", "the disk is full"))), -1, "the disk is full"),
        (
            gone(job()),
            -1,
            "rank 1 of attempt 1 of job 'gpt' has closed: no snapshot can be complete without it",
        ),
    ],
)
def test_steps_only_rise_and_a_failed_one_is_not_taken_again(
    made: Job, last_sealed: int, error: str | None
) -> None:
    if error is None:
        d.check_turn(made, 0, KEY, last_sealed)
    else:
        with pytest.raises((InvalidRequest, SnapshotFailed, StorageError)) as caught:
            d.check_turn(made, 0, KEY, last_sealed)
        assert str(caught.value).startswith(error)


def test_a_tag_belongs_to_one_step() -> None:
    made = job(step(sealed=()))
    d.check_tag(made, KEY, TAG, "best")
    with pytest.raises(AlreadyExists, match="tag 'best' is taken in attempt 1 of job 'gpt'"):
        d.check_tag(made, (1, 6), TAG, "best")
    made.checkpoints["best.a0001"] = StoredCheckpoint(
        "gpt", "best.a0001", 1, 2, 1, 1, (), user_tag=True
    )
    with pytest.raises(AlreadyExists):
        d.check_tag(made, KEY, "best.a0001", "best")


CHANGED = (
    "step 5 failed, because the structure of the state changed on some ranks only (rank 0: w "
    "grew; not on rank 1)"
)


@each_case(
    ("before", "actions", "errors"),
    [
        (step(timer=False, planned=(0,)), ["StartTimer"], []),
        (step(planned=(0,)), [], []),
        (step(planned=(0,), kept=(1,), sealed=()), [], []),
        (step(planned=(0,), sealed=(1,)), [], []),
        (
            step(planned=(0,), kept=(1,), sealed=(1,)),
            [*FAILED, "Raise"],
            [(StructureChanged, CHANGED)],
        ),
    ],
)
def test_a_rank_that_plans_again_waits_unless_another_has_sealed_its_old_plan(
    before: Step, actions: list[str], errors: list[tuple[type[CkptdError], str]]
) -> None:
    found = d.planned(before, 15.0)
    assert kinds(found) == actions
    assert [
        (kind, text.split(";")[0] + ";" + text.split(";")[1]) for kind, text in raised(found)
    ] == errors
    assert [action.more for action in found if isinstance(action, d.StartTimer)] == [15.0] * (
        "StartTimer" in actions
    )


@pytest.mark.parametrize(
    ("before", "tag", "actions"),
    [
        (step(timer=False), TAG, ["StartTimer"]),
        (step(), TAG, []),
        (step(sealed=()), TAG, []),
        (step(sealed=()), "best.a0001", [*FAILED, "Raise"]),
    ],
)
def test_all_ranks_give_a_step_one_tag(before: Step, tag: str, actions: list[str]) -> None:
    found = d.requested(before, 1, tag)
    assert kinds(found) == actions
    reason = (
        "rank 1 saves step 5 as 'best.a0001', and another rank saves it as 'step-00000005.a0001': "
        "pass the same tag on all ranks"
    )
    assert raised(found) == ([(SnapshotFailed, reason)] if "Raise" in actions else [])


@pytest.mark.parametrize(
    ("before", "actions"),
    [
        (step(kept=(0,)), [d.EndWait(KEY)]),
        (step(sealed=()), [d.EndWait(KEY)]),
        (step(sealed=(0,)), []),
    ],
)
def test_a_skipped_step_is_waited_for_only_by_ranks_that_have_sealed_it(
    before: Step, actions: list[d.Action]
) -> None:
    assert d.skipped(before, "every slot is still being saved") == actions


def test_a_skipped_step_fails_if_ranks_plan_it() -> None:
    found = d.skipped(step(planned=(1,)), "every slot is still being saved")
    assert told(found) == [
        ("failed", "snapshot-failed", "step 5 is skipped: every slot is still being saved")
    ]


# -- a rank has sealed its slot


def in_storage(made: Job, tag: str, number: int) -> Job:
    made.commit(StoredCheckpoint("gpt", tag, 1, number, 1, 1, (), user_tag=False))
    return made


TAKEN_BACK = "segment slot0 was taken back while its seal of step 5 was being read"


@each_case(
    ("before", "stored", "actions", "error"),
    [
        (step(sealed=()), None, [], None),
        (step(sealed=()), ("other", 5), [], None),
        (step(sealed=()), (TAG, 5), [], None),  # this step, from before a restart of the daemon
        (
            step(sealed=()),
            (TAG, 4),
            [*FAILED, "Free", "Raise"],
            (AlreadyExists, f"tag '{TAG}' of job 'gpt' is taken; choose another tag"),
        ),
        (
            step(failure=("storage", "full")),
            None,
            ["EndWait", "Free", "Raise"],
            (StorageError, "full"),
        ),
        (step(), None, ["Raise"], (NotFound, TAKEN_BACK)),
    ],
)
def test_a_seal_that_has_been_read_is_refused_if_its_step_or_its_tag_is_gone(
    before: Step,
    stored: tuple[str, int] | None,
    actions: list[str],
    error: tuple[type[CkptdError], str] | None,
) -> None:
    made = in_storage(job(before), *stored) if stored else job(before)
    found = d.seal_read(made, before, 0, "slot0", TAG)
    assert kinds(found) == actions
    assert raised(found) == ([error] if error else [])


def test_a_seal_with_another_tag_fails_the_step() -> None:
    before = step(sealed=(1,))
    found = d.seal_read(job(before), before, 0, "slot0", "best.a0001")
    assert kinds(found) == [*FAILED, "Free", "Raise"]
    assert "rank 0 saves step 5 as 'best.a0001'" in told(found)[0][2]


def test_a_damaged_seal_fails_the_step_and_frees_the_slot() -> None:
    found = d.rejected(step(sealed=(1,)), "slot0", IntegrityError("damaged"))
    assert kinds(found) == [*FAILED, "Free", "Raise"]
    assert found[-2] == d.Free(KEY, "slot0")
    assert told(found) == [("failed", "integrity", "damaged")]


@each_case(
    ("before", "seal", "error"),
    [
        (step(sealed=()), rank_seal(1), None),
        (step(sealed=(0,)), rank_seal(1), None),
        (step(sealed=(0,), planned=(0, 1)), rank_seal(1), None),
        (
            step(sealed=(0,)),
            rank_seal(1, plan=b"another"),
            (
                StructureChanged,
                "step 5 failed, because the plan of rank 1 differs from that of rank 0",
            ),
        ),
        (
            step(sealed=(0,)),
            rank_seal(1, persist=False),
            (SnapshotFailed, "step 5 has persist=False on rank 1, but persist=True on rank 0"),
        ),
        (
            step(sealed=(0,)),
            rank_seal(1, node=Membership(run_id="0a" * 16, ranks=[1, 2])),
            (
                SnapshotFailed,
                "step 5 failed: rank 1 says that ranks 1, 2 of run 0a0a0a0a are on this node, and "
                "the ranks that sealed before it say all ranks of the job: start the job again",
            ),
        ),
        (
            step(sealed=(), planned=(0,), kept=(1,)),
            rank_seal(1),
            (StructureChanged, "step 5 failed, because the structure"),
        ),
    ],
)
def test_all_ranks_seal_one_plan_with_one_persist(
    before: Step, seal: RankSeal, error: tuple[type[CkptdError], str] | None
) -> None:
    found = d.seal_journaled(before, seal)
    assert kinds(found) == ([*FAILED, "Free", "Raise"] if error else [])
    for kind, text in raised(found):
        assert error is not None
        assert (kind, text.startswith(error[1])) == (error[0], True)


@each_case(
    ("before", "stored", "actions"),
    [
        (step(sealed=(0,), timer=False), False, [d.StartTimer(KEY)]),
        (step(sealed=(0,)), False, []),
        (step(sealed=(0, 1)), False, [d.EndWait(KEY), d.Move(KEY, Event.SEAL), d.Save(KEY)]),
        (
            step(sealed=(0, 1)),
            True,
            [d.EndWait(KEY), d.Move(KEY, Event.SEAL), d.Move(KEY, Event.COMMIT)],
        ),
        (
            step(sealed=(0, 1), persist=False),
            False,
            [d.EndWait(KEY), d.Move(KEY, Event.SEAL), d.Save(KEY)],
        ),
        (step(sealed=(0, 1), state=S.WRITING), False, []),
    ],
)
def test_the_last_seal_starts_the_save(before: Step, stored: bool, actions: list[d.Action]) -> None:
    made = in_storage(job(before), TAG, 5) if stored else job(before)
    assert d.sealed(made, before) == actions


def test_news_of_a_snapshot() -> None:
    durable, failed = (
        step(sealed=(0, 1), state=S.DURABLE).snapshot,
        step(sealed=(0, 1), state=S.FAILED).snapshot,
    )
    assert durable is not None
    assert failed is not None
    failed.reason, failed.code = "full", "storage"
    assert d.news(durable) == Progress(re=0, attempt=1, step=5, state="durable")
    assert d.news(failed) == Progress(
        re=0, attempt=1, step=5, state="failed", reason="full", code="storage"
    )


# -- slots


def memory(*states: SnapshotState, attempt: int = 1) -> Job:
    """A job whose steps 1, 2, ... of attempt 1 are in these states."""
    made = [
        step(key=(1, number), sealed=(0, 1), state=state, timer=False)
        for number, state in enumerate(states, 1)
    ]
    return job(*made, attempt=attempt)


def test_which_snapshots_are_released() -> None:
    states = (S.DURABLE, S.WRITING, S.FAILED, S.DURABLE)
    made = memory(*states)
    assert d.replaced(made) == [d.Release((1, 1)), d.Release((1, 3))]
    assert d.closed(made, 1) == [d.Release((1, 1)), d.Release((1, 3)), d.Release((1, 4))]
    assert d.closed(made, 2) == []
    assert d.durable(made) == [d.Release((1, 1)), d.Release((1, 4))]
    assert d.durable(made, before=1) == []
    assert d.durable(memory(*states, attempt=2), before=2) == [d.Release((1, 1)), d.Release((1, 4))]


def test_a_snapshot_that_is_being_read_is_not_released() -> None:
    made = memory(S.DURABLE, S.DURABLE)
    first = made.snapshot((1, 1))
    assert first is not None
    with first.held():
        assert (d.replaced(made), d.closed(made, 1), d.durable(made)) == (
            [],
            [d.Release((1, 2))],
            [d.Release((1, 2))],
        )


def with_slots(**segments: int) -> Job:
    """A job with these segments in these steps."""
    made = job()
    for segment, number in segments.items():
        made.occupy(segment, int(segment[1]), (1, number))
    return made


@each_case(
    ("usable", "granted", "blocking"),
    [
        ({0: ["a0", "b0"], 1: ["a1", "c1"]}, None, [(1, 2), (1, 3)]),
        ({0: ["a0", "c0"], 1: ["a1", "c1"]}, None, []),
        ({0: ["a0"], 1: []}, None, [(1, -1), (1, 2)]),
        ({0: ["a0", "b0"], 1: ["c1"]}, (1, 3), []),  # rank 0 has a slot for step 3 already
        ({}, None, []),
    ],
)
def test_which_steps_keep_a_slot_from_a_rank(
    usable: dict[int, list[str]], granted: Any, blocking: list[tuple[int, int]]
) -> None:
    assert d.blocking(with_slots(a0=2, b0=3, a1=2), 1, usable, granted) == blocking


def reading(before: Step, *segments: str) -> Step:
    before.reading = list(segments)
    return before


BUSY = "every slot is still being saved"


@each_case(
    ("made", "blocked", "expected"),
    [
        (job(step(sealed=(0,))), [KEY], ("rank 1 has not sealed step 5 yet", KEY)),
        (job(step(sealed=())), [KEY], ("ranks 0, 1 have not sealed step 5 yet", KEY)),
        (job(reading(step(sealed=(0,)), "slot1")), [KEY], (BUSY, None)),
        (job(step(sealed=(0, 1), state=S.WRITING)), [KEY], (BUSY, None)),
        (job(step(sealed=(), size=1), size=1), [KEY], (BUSY, None)),
        (job(step()), [KEY], (BUSY, None)),
        (job(), [(1, -1), KEY], ("another rank has no slots yet", None)),
        (job(step(sealed=(0,))), [(1, -1), KEY], ("rank 1 has not sealed step 5 yet", KEY)),
    ],
)
def test_the_reason_why_a_step_gets_no_slot(made: Job, blocked: Any, expected: Any) -> None:
    assert d.why_no_slot(made, blocked) == expected


def test_a_rank_may_have_two_slots_for_a_step() -> None:
    made = Step(KEY, slots={"a0": 0, "b0": 0, "a1": 1})
    assert [d.has_another(made, segment) for segment in ("a0", "b0", "a1")] == [True, True, False]
