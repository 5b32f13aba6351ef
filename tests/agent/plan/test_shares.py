"""Tests who writes what, given what each rank could write: everything once, in equal
shares, or an error that names key and ranks.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import msgspec
import pytest

from ckptd.agent.plan.layout import Row
from ckptd.agent.plan.shares import Offer, _planned, share_out
from ckptd.shared.errors import UnsavableValue


def row(fqn: str, size: int, first: int = 0, length: int | None = None, **more: Any) -> Row:
    """Return a row of `length` float32 elements of a tensor of `size`, from element
    `first` on.
    """
    made: dict[str, Any] = {
        "fqn": fqn, "dtype": "float32", "size": (size,), "offsets": (first,),
        "sizes": (size if length is None else length,), "stride": None, "device": "cpu",
        "requires_grad": False, "replicated": length is None,
    }  # fmt: skip
    return Row(**{**made, **more})


def offers(*rows: list[Row]) -> list[Offer]:
    return [Offer(own) for own in rows]


def written(given: list[Offer]) -> list[list[tuple[str, int]]]:
    """Return the (fqn, first) of what each rank writes."""
    return [
        [(offer.rows[n].fqn, offer.rows[n].offsets[0]) for n in share.rows]
        for offer, share in zip(given, share_out(given), strict=True)
    ]


def refusal(given: list[Offer]) -> str:
    with pytest.raises(UnsavableValue) as caught:
        share_out(given)
    return str(caught.value)


def test_replicas_are_written_once_in_equal_shares() -> None:
    rows = [row(f"w{number}", 1000) for number in range(8)]
    found = written(offers(rows, rows))
    assert sorted(chain.from_iterable(found)) == [(f"w{number}", 0) for number in range(8)]
    assert [len(share) for share in found] == [4, 4]


@pytest.mark.parametrize("dtype", ["uint16/2", "int4", "bits8"])
def test_dtypes_whose_size_dcp_may_not_know(dtype: str) -> None:
    rows = [row(f"w{number}", 1000, dtype=dtype) for number in range(4)]
    assert [len(share) for share in written(offers(rows, rows))] == [2, 2]


def test_shares_are_equal_in_bytes_and_not_in_number() -> None:
    rows = [row("large", 3000), *(row(f"w{number}", 1000) for number in range(3))]
    large, small = sorted(written(offers(rows, rows)), key=len)
    assert large == [("large", 0)]
    assert len(small) == 3


def test_an_empty_tensor_may_be_whole_on_a_later_rank_than_the_first_that_has_a_shard() -> None:
    """A DTensor of shape (1, 0) on the mesh [1, 0]: rank 1 has all of it, and rank 0
    nothing, behind its end.
    """
    nothing = Row(
        "w",
        "float32",
        size=(1, 0),
        offsets=(1, 0),
        sizes=(0, 0),
        stride=None,
        device="cpu",
        requires_grad=False,
    )
    given = offers([nothing], [msgspec.structs.replace(nothing, offsets=(0, 0), sizes=(1, 0))])
    assert written(given) == [[("w", 1)], [("w", 0)]]


def test_shards_are_written_by_the_ranks_that_hold_them() -> None:
    given = offers([row("w", 10, 0, 6), row("r", 4)], [row("w", 10, 6, 4)])
    assert written(given) == [[("w", 0), ("r", 0)], [("w", 6)]]
    first, second = share_out(given)
    assert first.metadata == {
        "w": {
            "dtype": "float32",
            "size": (10,),
            "chunks": [[(0,), (6,)], [(6,), (4,)]],
            "ranks": [0, 1],
        },
        "r": {"dtype": "float32", "size": (4,), "chunks": [[(0,), (4,)]]},
    }
    assert second.metadata is None
    assert first.global_plan == second.global_plan


def test_a_shard_that_two_ranks_hold_is_written_once() -> None:
    """This occurs with HSDP."""
    own = [row("w", 10, 0, 5, replicated=True)], [row("w", 10, 5, 5, replicated=True)]
    found = written(offers(own[0], own[1], own[0], own[1]))
    assert sorted(chain.from_iterable(found)) == [("w", 0), ("w", 5)]


def test_buffers_are_written_by_the_lowest_rank() -> None:
    """Buffers may differ, as those of DistributedDataParallel do.

    Rank 0 writes them although other ranks would have less to write.
    """
    busy = [row("mine", 100_000, 0, 100_000), row("mean", 4, buffer=True)]
    assert written(offers(busy, [row("mean", 4, buffer=True)])) == [[("mine", 0), ("mean", 0)], []]


def test_different_plans_have_different_digests() -> None:
    rows = [row("a", 4), row("b", 4)]
    plans = [
        share_out(given)[0].global_plan
        for given in (
            offers(rows, rows),
            offers(rows, rows),
            offers(rows),
            offers(rows[:1], rows[1:]),
        )
    ]
    assert plans[0] == plans[1]
    assert len(set(plans)) == 3


def test_an_alias_is_listed_by_the_rank_that_writes_its_base() -> None:
    base, tied = row("base", 8), row("tied", 8, base="base")
    first, second = share_out(offers([base, tied], [base, tied]))
    assert [first.aliases, second.aliases] == ([["tied"], []] if first.rows else [[], ["tied"]])
    assert sorted([first.rows, second.rows]) == [[], [0]]


def test_an_alias_without_its_base_is_written_as_an_item() -> None:
    """A weight is tied on one stage of a pipeline only, and another stage writes it."""
    base, tied = row("base", 8), row("tied", 8, base="base")
    given = offers([base], [base, tied, row("much", 1000, 0, 1000)])
    shares = share_out(given)
    assert [share.aliases for share in shares] == [[], []]
    assert written(given) == [[("base", 0)], [("much", 0), ("tied", 0)]]
    assert set(shares[0].metadata or {}) == {"base", "tied", "much"}


def test_different_aliases_of_ranks_are_all_written() -> None:
    """Every key is written once, whatever each rank has tied to what."""
    base = row("base", 8)
    given = offers(
        *(
            [base, row(f"tied{rank}", 8, base="base"), row("all", 8, base="base")]
            for rank in range(3)
        )
    )
    shares = share_out(given)
    items = [given[rank].rows[n].fqn for rank, share in enumerate(shares) for n in share.rows]
    aliases = [name for share in shares for name in share.aliases]
    assert sorted(items + aliases) == ["all", "base", "tied0", "tied1", "tied2"]
    assert sorted(aliases)[0] == "all"
    assert len(aliases) == 2


def test_an_alias_that_is_an_item_on_another_rank_is_written_as_an_item() -> None:
    first, second = share_out(
        offers(
            [row("base", 8), row("tied", 8, base="base"), row("only", 2, base="base")],
            [row("tied", 8)],
        )
    )
    assert (first.rows, first.aliases) == ([0], ["only"])
    assert (second.rows, second.aliases) == ([0], [])


def test_tensors_that_differ_between_ranks_are_named() -> None:
    assert re.match(
        r"w is float32 \[4\] on rank 0 and float32 \[5\] on rank 1: ",
        refusal(offers([row("w", 4)], [row("w", 5)])),
    )
    other = row("w", 4, dtype="int32")
    assert re.match(
        r"w is float32 \[4\] on rank 0 and int32 \[4\] on rank 2: ",
        refusal(offers([row("w", 4)], [], [other])),
    )
    alias = row("w", 9, base="base")
    assert re.match(
        r"w is float32 \[4\] on rank 0 and float32 \[9\] on rank 1: ",
        refusal(offers([row("w", 4)], [row("base", 9), alias])),
    )
    tied = [
        [row("base", 4, digest=b"same"), row("w", 4, base="base", digest=digest)]
        for digest in (b"same", b"none")
    ]
    assert re.match(r"w differs between ranks 0 and 1", refusal(offers(*tied)))
    digests = [[row("w", 4, digest=digest)] for digest in (b"same", b"same", b"none")]
    assert re.match(r"w differs between ranks 0 and 2, and is not split", refusal(offers(*digests)))
    assert re.match(
        r"w: the shards of all ranks hold 6 of its 10 elements",
        refusal(offers([row("w", 10, 0, 6)], [row("x", 1)])),
    )
    overlapping = offers([row("w", 10, 0, 6)], [row("w", 10, 5, 4)])
    assert "do not make whole tensors" in refusal(overlapping)


def test_plain_values_that_differ_are_named() -> None:
    given = [Offer([], {"step": b"1", "own": bytes([rank])}) for rank in range(3)]
    assert re.match(r"own differs between ranks 0 and 1: .* per_rank", refusal(given))
    alike = [Offer([], {"step": b"1"}), Offer([], {}), Offer([], {"step": b"1", "more": b"2"})]
    assert [share.rows for share in share_out(alike)] == [[], [], []]


def test_a_rank_may_have_nothing_to_write() -> None:
    shares = share_out(offers([row("w", 4)], []))
    assert [share.rows for share in shares] == [[0], []]
    assert shares[1].global_plan == shares[0].global_plan


def test_one_rank_writes_what_dcps_planner_would_give_it() -> None:
    rows = [
        row("w", 10),
        row("view", 4, base="w"),
        row("b", 6, buffer=True),
        row("n", 0),
        row("v", 3, dtype="bfloat16"),
    ]
    (short,) = share_out(offers(rows))
    assert short.rows == _planned(offers(rows))[0] == [0, 2, 3, 4]
    assert short.aliases == ["view"]
    assert list(short.metadata or {}) == ["w", "b", "n", "v", "view"]


def test_one_rank_with_a_hole_in_a_tensor_is_refused() -> None:
    assert (
        refusal(offers([row("w", 10, 0, 6)]))
        == "w: the shards of all ranks hold 6 of its 10 elements"
    )
