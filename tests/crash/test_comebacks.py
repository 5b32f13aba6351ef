"""Brings daemons back with less than they had; see `comebacks.py`."""

from __future__ import annotations

from random import Random

import pytest

from tests.crash import comebacks
from tests.crash.comebacks import KINDS, OTHERS, STATE, SUBSETS
from tests.support.ranks import Lend

ALL = frozenset({"state directory", *OTHERS})


def test_each_subset_of_what_can_be_taken_away_is_tried_once() -> None:
    assert len(SUBSETS) == len(set(SUBSETS)) == 3 * 2 ** len(OTHERS)
    assert set().union(*SUBSETS) == {*STATE, *OTHERS} - {""}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "taken", [frozenset({"slots"}), ALL - comebacks.REFUSING], ids=["slots", "all but the root"]
)
def test_a_daemon_that_comes_back_with_less_goes_on_with_its_trainer(
    kind: str, taken: frozenset[str], pool: Lend
) -> None:
    with pool(2) as ranks:
        how = KINDS[kind][0](taken, Random(1), lambda: ranks)
    assert how == ("refused" if kind == "replaced" else "continued")


@pytest.mark.parametrize("thing", [*STATE[1:], *OTHERS[1:]])
def test_a_trainer_of_one_rank_goes_on_whatever_is_taken_or_its_refusal_is_seen(
    thing: str, pool: Lend
) -> None:
    with pool(2) as ranks:
        how = comebacks.alone(frozenset({thing}), Random(1), lambda: ranks)
    assert how == ("refused" if thing in comebacks.REFUSING else "continued")


def test_some_rounds_of_all_kinds() -> None:
    done, problems = comebacks.run(6, number=1)
    assert problems == []
    assert sum(done[kind] for kind in KINDS) == 6
