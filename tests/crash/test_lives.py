"""Tests the order in which failpoints kill."""

from __future__ import annotations

from itertools import islice, pairwise, product
from random import Random

from tests.crash.lives import each_after_each, rounds


def test_every_point_follows_every_point_once() -> None:
    order = list(each_after_each("abcde"))
    assert sorted(pairwise(order)) == sorted(product("abcde", repeat=2))


def test_in_each_round_every_point_kills_after_every_point_at_some_pass() -> None:
    first = list(islice(rounds("abcde", Random(1)), 26))
    assert {nth for _, nth in first} == {1, 2, 3}
    assert set(pairwise(point for point, _ in first)) == set(product("abcde", repeat=2))
