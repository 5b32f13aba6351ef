"""Tests which checkpoints retention deletes, and which it never deletes."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.job import retention
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.names import tag_directory
from ckptd.shared.retention import (
    BestN,
    Daily,
    EveryNSteps,
    LatestN,
    MaxAge,
    MaxBytes,
    Policy,
    PreserveAll,
)
from tests.shared.samples import steady
from tests.support.cases import each_case


def to_retire(checkpoints: list[StoredCheckpoint], keep_last: int) -> list[StoredCheckpoint]:
    return retention.to_retire(checkpoints, [LatestN(keep_last) if keep_last else PreserveAll()])


def make(
    attempt: int, step: int | None, user_tag: str | None = None, seq: int = 0
) -> StoredCheckpoint:
    tag = tag_directory(step or 0, user_tag, attempt)
    return StoredCheckpoint("gpt", tag, attempt, step, seq, 1, (), user_tag is not None)


def keys(checkpoints: list[StoredCheckpoint]) -> list[tuple[int, int | None]]:
    return [(c.attempt, c.step) for c in checkpoints]


def test_checkpoints_beyond_the_newest_are_deleted_oldest_first() -> None:
    checkpoints = [make(1, step) for step in (30, 10, 50, 20, 40)]
    assert keys(to_retire(checkpoints, 2)) == [(1, 10), (1, 20), (1, 30)]
    assert keys(to_retire(checkpoints, 4)) == [(1, 10)]
    assert to_retire(checkpoints, 5) == []
    assert to_retire(checkpoints, 6) == []


def test_zero_keeps_all() -> None:
    assert to_retire([make(1, step) for step in range(100)], 0) == []


def test_of_no_checkpoints_none_is_deleted() -> None:
    assert to_retire([], 1) == []


def test_a_user_tag_is_never_deleted_and_does_not_count() -> None:
    checkpoints = [make(1, 1, "best"), make(1, 2), make(1, 3), make(1, 4, "other")]
    assert keys(to_retire(checkpoints, 1)) == [(1, 2)]
    assert to_retire([make(1, step, f"tag{step}") for step in range(5)], 1) == []


def test_an_older_attempt_stays_until_its_step_is_passed() -> None:
    older = [make(1, 100), make(1, 200)]
    assert to_retire([*older, make(2, 50)], 1) == []
    assert to_retire([*older, make(2, 99)], 1) == []
    assert keys(to_retire([*older, make(2, 100)], 1)) == [(1, 100)]
    assert keys(to_retire([*older, make(2, 150)], 1)) == [(1, 100)]
    assert keys(to_retire([*older, make(2, 150), make(2, 250)], 1)) == [
        (1, 100),
        (1, 200),
        (2, 150),
    ]


def test_a_user_tag_does_not_pass_a_step() -> None:
    """Retention relies only on checkpoints without a user tag."""
    assert to_retire([make(1, 100), make(2, 50), make(2, 150, "best")], 1) == []


def test_attempts_count_before_steps() -> None:
    assert keys(to_retire([make(1, 10), make(2, 20), make(3, 5)], 2)) == []
    assert keys(to_retire([make(1, 5), make(2, 20), make(3, 5)], 2)) == [(1, 5)]


def test_checkpoints_without_steps_are_ordered_by_number() -> None:
    checkpoints = [make(1, None, seq=seq) for seq in (3, 1, 2)]
    assert [c.seq for c in to_retire(checkpoints, 1)] == [1, 2]


def test_the_policies_of_the_newest_checkpoint_that_has_any_are_in_force() -> None:
    older = dataclasses.replace(make(1, 1), retention=(LatestN(1),))
    newer = dataclasses.replace(make(1, 2), retention=(EveryNSteps(3),))
    tagged = dataclasses.replace(make(1, 3, "mine"), retention=(PreserveAll(),))
    saved = [older, tagged, newer, make(2, 1)]
    assert retention.policies_of(saved, [LatestN(7)]) == (EveryNSteps(3),)
    assert retention.policies_of([tagged, make(2, 1)], [LatestN(7)]) == (LatestN(7),)


# -- a policy that cannot choose


def measured(step: int, **metrics: float) -> StoredCheckpoint:
    return dataclasses.replace(make(1, step), metrics=metrics)


SAVED = [measured(step, val_loss=float(step), train=1.0) for step in range(1, 9)]
WRONG = BestN("valloss", 2)
WHY = (
    "BestN('valloss', 2) cannot choose: no checkpoint has the metric 'valloss' (their metrics are "
    "'train', 'val_loss'); did you mean 'val_loss'?"
)


def test_a_policy_over_a_metric_that_no_checkpoint_has_deletes_nothing() -> None:
    several: list[list[Policy]] = [
        [WRONG],
        [WRONG, LatestN(1)],
        [LatestN(1), EveryNSteps(4), WRONG],
    ]
    for policies in several:
        assert retention.to_retire(SAVED, policies) == []
        assert retention.obstacle(SAVED, policies) == WHY
        own = [*SAVED[:-1], dataclasses.replace(SAVED[-1], retention=tuple(policies))]
        assert (retention.to_retire(own, [LatestN(1)]), retention.obstacle(own, [LatestN(1)])) == (
            [],
            WHY,
        )
        assert keys(retention.to_retire(own, [LatestN(7)], insisted=True)) == [(1, 1)]
    assert retention.obstacle(SAVED, [BestN("val_loss", 2)]) == ""


def test_a_policy_that_cannot_choose_is_no_obstacle_while_nothing_would_be_deleted_anyway() -> None:
    """A young job has not measured anything yet.

    A person at the command line is told of a wrong name in any case.
    """
    assert retention.obstacle(SAVED, [WRONG, LatestN(8)]) == ""
    assert retention.obstacle(SAVED[:1], [WRONG]) == ""
    assert retention.obstacle(SAVED[:2], [WRONG], pinned=[SAVED[0].tag]) == ""
    assert retention.obstacle(SAVED, [WRONG, LatestN(8)], insisted=True) == WHY
    assert retention.obstacle([], [WRONG], insisted=True) == ""


def test_a_metric_that_only_a_user_tag_has_does_not_count() -> None:
    """Policies choose only among the other checkpoints."""
    mine = dataclasses.replace(make(1, 9, "best"), metrics={"valloss": 1.0})
    assert retention.obstacle([*SAVED, mine], [WRONG]) == WHY


# -- limits and reasons


DAY = 86400
HISTORY = [
    dataclasses.replace(make(1, step), created=step * DAY, nbytes=100) for step in range(1, 7)
]


def reasons(
    checkpoints: list[StoredCheckpoint], *policies: Policy, pinned: tuple[str, ...] = ()
) -> list[tuple[int | None, bool, str]]:
    rulings = retention.judged(checkpoints, policies, pinned)
    return [(v.checkpoint.step, v.kept, v.reason) for v in rulings]


def test_each_checkpoint_is_kept_or_deleted_for_a_reason() -> None:
    tagged = dataclasses.replace(make(1, 0, "best"), created=0.0, nbytes=1 << 40)
    policies = (Daily(5), EveryNSteps(2), MaxAge("3d"), MaxBytes(250))
    assert reasons([tagged, *HISTORY], *policies, pinned=(HISTORY[0].tag,)) == [
        (0, True, "it has a tag of your own"),
        (1, True, "it is pinned"),
        (2, False, "it is 4.0 days older than the newest, more than MaxAge('3d') allows"),
        (3, False, "the job would hold more than MaxBytes('250B') allows"),
        (4, False, "the job would hold more than MaxBytes('250B') allows"),
        (5, False, "the job would hold more than MaxBytes('250B') allows"),
        (6, True, "it is the newest"),
    ]  # fmt: skip
    assert reasons(HISTORY, EveryNSteps(2), LatestN(3)) == [
        (1, False, "no policy keeps it"),
        (2, True, "kept by EveryNSteps(2)"),
        (3, False, "no policy keeps it"),
        (4, True, "kept by EveryNSteps(2), LatestN(3)"),
        (5, True, "kept by LatestN(3)"),
        (6, True, "it is the newest"),
    ]
    assert reasons([make(1, 9), make(2, 5)], MaxBytes(1)) == [
        (9, True, "attempt 2 has not reached its step"),
        (5, True, "it is the newest"),
    ]
    assert retention.judged([], [MaxBytes(1)]) == []


def test_a_policy_that_cannot_choose_is_an_obstacle_to_limits_too() -> None:
    said = retention.obstacle(SAVED, [WRONG, MaxBytes(1)])
    assert said == retention.obstacle(SAVED, [WRONG, MaxBytes(1 << 40)]) == WHY


def test_a_limit_of_age_announces_several_deletions_first() -> None:
    """The clock of the trainer that made the newest checkpoint may be wrong."""
    wrong = [*HISTORY[:-1], dataclasses.replace(HISTORY[-1], created=1e10)]
    gone = [v for v in retention.judged(wrong, [MaxAge("30d")]) if not v.kept]
    assert keys([v.checkpoint for v in gone]) == [(1, step) for step in (1, 2, 3, 4, 5)]
    assert retention.unforeseen(gone, (), changed=False) == gone
    known = {v.checkpoint.tag for v in gone}
    assert retention.unforeseen(gone, known, changed=False) == []
    assert retention.unforeseen(gone, {*known} - {gone[0].checkpoint.tag}, changed=False) == []
    assert retention.unforeseen(gone[:1], (), changed=True) == []
    assert retention.unforeseen(gone, known, changed=True) == gone
    by_bytes = [v for v in retention.judged(HISTORY, [MaxBytes(200)]) if not v.kept]
    assert keys([v.checkpoint for v in by_bytes]) == [(1, step) for step in (1, 2, 3, 4)]
    assert retention.unforeseen(by_bytes, (), changed=False) == []


@steady
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 30), st.booleans(), st.integers(0, 40)),
        unique_by=lambda t: t[:2],
        max_size=15,
    ),
    st.lists(
        st.sampled_from((
            MaxBytes(1), MaxBytes(500), MaxAge("3d"), MaxAge("20d"), Daily(3), LatestN(4),
            EveryNSteps(5),
        )), max_size=3,
    ),
)  # fmt: skip
def test_limits_delete_nothing_that_no_policy_deletes_and_nothing_more_the_next_time(
    shapes: list[tuple[int, int, bool, int]], policies: list[Policy]
) -> None:
    checkpoints = [
        dataclasses.replace(
            make(attempt, step, "mine" if user else None), created=day * DAY / 2, nbytes=100
        )
        for attempt, step, user, day in shapes
    ]
    gone = retention.to_retire(checkpoints, policies)
    allowed = retention.to_retire(checkpoints, [LatestN(1)])
    assert {c.tag for c in gone} <= {c.tag for c in allowed}
    unlimited = [p for p in policies if not isinstance(p, MaxAge | MaxBytes)] or [PreserveAll()]
    fewer = retention.to_retire(checkpoints, unlimited)
    assert {c.tag for c in fewer} <= {c.tag for c in gone}
    assert retention.to_retire([c for c in checkpoints if c not in gone], policies) == []


@steady
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 30), st.booleans()),
        unique_by=lambda t: t[:2],
        max_size=25,
    ),
    st.integers(1, 6),
)
def test_user_tags_the_newest_and_unpassed_steps_are_never_deleted(
    shapes: list[tuple[int, int, bool]], keep: int
) -> None:
    checkpoints = [make(attempt, step, "mine" if user else None) for attempt, step, user in shapes]
    gone = to_retire(checkpoints, keep)
    assert not [c for c in gone if c.user_tag]
    own = sorted((c for c in checkpoints if not c.user_tag), key=lambda c: c.order)
    assert not set(keys(gone)) & set(keys(own[-keep:]))
    assert keys(gone) == sorted(keys(gone))
    for c in gone:
        assert (
            any(k.attempt > c.attempt and (k.step or 0) >= (c.step or 0) for k in own)
            or c.attempt == own[-1].attempt
        )
    again = [c for c in checkpoints if c not in gone]
    assert to_retire(again, keep) == []  # a second run deletes nothing more


@each_case(
    ("policies", "keeps"),
    [
        ([PreserveAll()], True),
        ([LatestN(3)], True),
        ([LatestN(2)], False),
        ([LatestN(2), EveryNSteps(10)], False),
        ([LatestN(3), MaxAge("3d")], False),
        ([PreserveAll(), MaxBytes("3GB")], False),
        ([Daily(7)], False),
    ],
)
def test_policies_that_surely_delete_none_of_three(policies: list[Policy], keeps: bool) -> None:
    assert retention.keeps_all(3, policies) is keeps
    if keeps:
        assert retention.to_retire([make(1, step) for step in range(3)], policies) == []
