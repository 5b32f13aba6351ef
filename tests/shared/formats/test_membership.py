"""Tests that a wrong membership of a node is found."""

from __future__ import annotations

import msgspec
import pytest

from ckptd.shared.formats.membership import Membership
from tests.support.cases import each_case

CLAIM = "0123456789abcdef" * 2


@each_case(
    ("ranks", "rank", "world_size", "problem"),
    [
        ([0, 1], 0, 4, ""),
        ([1, 3], 3, 4, ""),
        ([1, 0], 0, 4, "the ranks of the node are not in ascending order"),
        ([1, 1], 1, 4, "the ranks of the node are not in ascending order"),
        ([0, 1], 2, 4, "rank 2 is not among the ranks of its node: ranks 0, 1"),
        (
            [2, 4],
            2,
            4,
            "rank 4 of the node does not exist: the job has 4 ranks, numbered from 0",
        ),
        (
            [0, 1],
            0,
            2,
            "the node has all ranks of the job, so the job is not one of several nodes",
        ),
    ],
)
def test_a_wrong_membership_is_described(
    ranks: list[int], rank: int, world_size: int, problem: str
) -> None:
    assert Membership(run_id=CLAIM, ranks=ranks).problem(rank, world_size) == problem


def test_the_node_of_rank_0_leads() -> None:
    assert [Membership(run_id=CLAIM, ranks=ranks).leads for ranks in ([0, 3], [1, 2])] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    "share",
    [
        {"claim": "A" * 32, "ranks": [0]},
        {"claim": CLAIM + "0", "ranks": [0]},
        {"claim": CLAIM, "ranks": []},
    ],
)
def test_a_membership_with_a_bad_run_id_or_without_ranks_is_refused(
    share: dict[str, object],
) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(share), type=Membership)
