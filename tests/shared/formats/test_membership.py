"""Test that shares of a node that cannot be are found."""

from __future__ import annotations

import msgspec
import pytest

from ckptd.shared.formats.membership import Membership

CLAIM = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("ranks", "rank", "world_size", "problem"),
    [
        ([0, 1], 0, 4, ""),
        ([1, 3], 3, 4, ""),
        ([1, 0], 0, 4, "its ranks are not in ascending order"),
        ([1, 1], 1, 4, "its ranks are not in ascending order"),
        ([0, 1], 2, 4, "it has the ranks 0 to 1, which do not fit rank 2 of 4 ranks"),
        ([2, 4], 2, 4, "it has the ranks 2 to 4, which do not fit rank 2 of 4 ranks"),
        ([0, 1], 0, 2, "it has all ranks of the job, which is then on one node"),
    ],
)
def test_what_is_wrong_with_a_share(
    ranks: list[int], rank: int, world_size: int, problem: str
) -> None:
    assert Membership(claim=CLAIM, ranks=ranks).problem(rank, world_size) == problem


def test_the_node_of_rank_0_leads() -> None:
    assert [Membership(claim=CLAIM, ranks=ranks).leads for ranks in ([0, 3], [1, 2])] == [
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
def test_a_share_with_another_claim_or_without_ranks_is_refused(share: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(share), type=Membership)
