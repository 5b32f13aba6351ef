"""Tests what the state machine's oracle expects after seals, commits, deletions by
hand, pins and power cuts.
"""

from __future__ import annotations

from tests.crash.oracle import NOTHING, Oracle


def committed(*keys: tuple[int, int]) -> Oracle:
    """Return an oracle that keeps the two newest, after these keys were acknowledged as
    sealed and durable.
    """
    made = Oracle(keep=2)
    for key in keys:
        made.sealed(key)
        made.durable(key)
    return made


def test_nothing_is_owed_at_first() -> None:
    assert Oracle(keep=2).owed == NOTHING


def test_the_newest_is_owed() -> None:
    assert committed((1, 1), (1, 3), (1, 2)).owed == (1, 3)


def test_two_attempts_of_one_step_forgotten_by_hand() -> None:
    """Found with seed 1987100287: after step 3 of attempts 1 and 2 were forgotten, the
    machine still expected step 3 of attempt 1.
    """
    oracle = committed((1, 1), (1, 2), (1, 3))
    oracle.sealed((2, 3))  # saved without a request, so it was never acknowledged as durable
    oracle.forget((1, 3), left=[(2, 3)])
    assert oracle.owed == (2, 3)
    oracle.forget((2, 3), left=[])
    assert oracle.owed == NOTHING
    assert oracle.forgotten == {(1, 3), (2, 3)}


def test_the_next_older_one_is_owed_once_the_newest_is_forgotten() -> None:
    oracle = committed((1, 1), (1, 2), (1, 3))
    oracle.forget((1, 3), left=[(1, 2)])
    assert oracle.owed == (1, 2)


def test_a_checkpoint_that_was_seen_is_owed_however_many_newer_ones_were_forgotten() -> None:
    oracle = committed((1, 1))
    for step in (4, 3, 2):
        oracle.forget((1, step), left=[(1, 1)])
    assert oracle.owed == (1, 1)
    oracle.forget((2, 1), left=[])
    assert oracle.owed == (1, 1), "one newer checkpoint is too few for retention"
    oracle.forget((2, 2), left=[])
    assert oracle.owed == NOTHING


def test_forgetting_an_older_checkpoint_does_not_excuse_a_newer_one() -> None:
    oracle = committed((1, 1), (1, 2), (1, 3))
    oracle.forget((1, 1), left=[])
    oracle.forget((1, 2), left=[])
    assert oracle.owed == (1, 3)


def test_a_pinned_one_is_owed_until_the_pin_is_removed_and_two_newer_ones_are_forgotten() -> None:
    oracle = committed((1, 1))
    oracle.pin((1, 1))
    oracle.forget((1, 3), left=[])
    oracle.forget((1, 2), left=[])
    assert oracle.owed == (1, 1)
    oracle.pin((1, 1), remove=True)
    assert oracle.owed == (1, 1)
    oracle.forget((1, 5), left=[])
    oracle.forget((1, 4), left=[])
    assert oracle.owed == NOTHING


def test_removing_a_missing_pin_changes_nothing() -> None:
    oracle = committed((1, 1))
    oracle.forget((1, 3), left=[])
    oracle.pin((1, 1), remove=True)
    oracle.forget((1, 2), left=[])
    assert oracle.owed == NOTHING


def test_a_seal_is_owed_until_the_power_is_cut() -> None:
    oracle = committed((1, 1))
    oracle.sealed((1, 2))
    assert oracle.owed == (1, 2)
    oracle.cut_power()
    assert oracle.owed == (1, 1)


def test_a_seal_is_owed_when_an_older_one_is_forgotten_and_not_when_a_newer_one_is() -> None:
    oracle = committed((1, 1))
    oracle.sealed((1, 3))
    oracle.forget((1, 2), left=[(1, 1)])
    assert oracle.owed == (1, 3)
    oracle.forget((1, 4), left=[(1, 1)])
    assert oracle.owed == (1, 1)
