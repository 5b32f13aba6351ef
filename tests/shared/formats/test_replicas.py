"""The digests of ranks are compared group by group, and the sentence names keys, ranks
and the remedy.
"""

from __future__ import annotations

import pytest

from ckptd.shared.formats.replicas import (
    MOST_KEYS,
    Difference,
    ReplicaDigests,
    compare,
    decode_keys,
    encode_keys,
    sentence,
)
from ckptd.shared.formats.snapshot_request import SnapshotRequest

A, B = b"groupAAA", b"groupBBB"


def held(
    digests: str, group: bytes = A, keys: list[str] | None = None, each: int = 1
) -> ReplicaDigests:
    """Digests of one letter for each run."""
    return ReplicaDigests(
        group,
        b"".join(letter.encode() * 4 for letter in digests),
        each,
        encode_keys(keys) if keys else b"",
    )


def test_equal_ranks_and_ranks_of_different_groups_do_not_differ() -> None:
    assert compare({0: [held("xyz")], 1: [held("xyz")]}) == []
    assert compare({0: [held("xyz")], 1: [held("xyw", B)]}) == []
    assert compare({0: [held("xyz")], 1: [held("xy")]}) == []
    assert compare({0: [], 1: [held("x")]}) == []


def test_the_runs_that_differ_are_named_by_the_rank_that_tells_the_keys() -> None:
    keys = ["a", "b", "c"]
    found = compare({0: [held("xyz", keys=keys)], 1: [held("wyw")], 2: [held("xyz")]})
    assert found == [Difference([[0, 2], [1]], ["a", "c"], 1, 2)]
    assert sentence(7, found).startswith(
        "step 7 failed: a, c are not the same on rank 1 as on ranks 0, 2. "
    )
    assert "per_rank(...)" in sentence(7, found)


def test_each_group_is_compared_by_itself() -> None:
    found = compare(
        {0: [held("x", keys=["a"]), held("y", B, ["b"])], 1: [held("x")], 2: [held("z", B)]}
    )
    assert [(one.ranks, one.keys) for one in found] == [([[0], [2]], ["b"])]
    assert sentence(1, found).startswith("step 1 failed: b is not the same on ranks 0 and 2. ")


def test_runs_of_several_tensors_are_named_by_their_first_keys() -> None:
    found = compare({0: [held("xy", keys=["a", "k"], each=10)], 1: [held("xz", each=10)]})
    assert (
        "at least one of 10 tensors from each of k on are not the same on ranks 0 and 1"
        in sentence(1, found)
    )


def test_without_keys_the_number_is_named() -> None:
    assert "a tensor that these ranks share is not the same" in sentence(
        1, compare({0: [held("x")], 1: [held("y")]})
    )
    assert "2 tensors that these ranks share are not the same" in sentence(
        1, compare({0: [held("xx")], 1: [held("yy")]})
    )


def test_more_than_two_versions_are_listed() -> None:
    found = compare({rank: [held("xyz"[rank % 3], keys=["a"])] for rank in range(6)})
    assert "a is not the same on ranks 0, 3; ranks 1, 4; ranks 2, 5" in sentence(1, found)


def test_buffers_of_a_batch_norm_have_a_remedy_of_their_own() -> None:
    found = compare({0: [held("x", keys=["m.running_mean"])], 1: [held("y")]})
    assert "pass the module itself instead of its state_dict()" in sentence(1, found)


def test_keys_that_are_damaged_or_too_long_are_no_keys() -> None:
    assert decode_keys(encode_keys(["a", "b"])) == ["a", "b"]
    assert (decode_keys(b""), decode_keys(b"junk")) == ([], [])
    assert encode_keys(["k" * MOST_KEYS]) == b""


@pytest.mark.parametrize("replicas", [[], [held("xy", keys=["a", "b"]), held("z", B, each=3)]])
def test_they_travel_in_the_request_document(replicas: list[ReplicaDigests]) -> None:
    request = SnapshotRequest(replicas=replicas)
    assert SnapshotRequest.decode(request.encode()) == request
    assert (b"replicas" in request.encode()) == bool(replicas), (
        "left out as before, so that older documents stay the same"
    )
