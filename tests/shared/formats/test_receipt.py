"""Receipts, abandonments, and what follows from the receipts of a try."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats import receipt as rc
from ckptd.shared.formats import sealed_json
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.replicas import OfNode, ReplicaDigests, encode_keys
from tests.support.cases import each_case

CLAIM = "0123456789abcdef" * 2
TAG = "step-00000005.a0002"


def part(rank: int) -> PartEntry:
    return PartEntry(
        rank=rank,
        file=f"rank-{rank:05d}.{CLAIM}.ckpt",
        bytes=10,
        raw_bytes=9,
        items=1,
        index_sha256="0" * 64,
    )


def receipt(*ranks: int, world_size: int = 4, claim: str = CLAIM, **changes: Any) -> rc.Receipt:
    made = rc.Receipt(
        job="gpt", attempt=2, step=5, tag=TAG, node=Membership(run_id=claim, ranks=list(ranks)),
        host=f"node{ranks[0]}", world_size=world_size, global_plan="aa",
        parts=[part(rank) for rank in ranks],
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


FAILED = receipt(2, 3, parts=[], code="storage", reason="ranks 2, 3 on node2: no space")


# -- documents


@pytest.mark.parametrize("made", [receipt(0, 1), FAILED])
def test_receipts_come_back(made: rc.Receipt) -> None:
    assert rc.Receipt.decode(rc.encode(made)) == made
    assert not rc.is_abandonment(rc.encode(made))


def test_abandonments_come_back_and_are_known_by_their_first_line() -> None:
    made = rc.Abandonment(job="gpt", attempt=2, step=5, tag=TAG, code="storage", reason="no space")
    assert rc.Abandonment.decode(rc.encode(made)) == made
    assert rc.is_abandonment(rc.encode(made))


@each_case(
    ("made", "reason"),
    [
        (
            receipt(1, 0),
            "receipt has a wrong list of the ranks of its node: the ranks of the node are not in "
            "ascending order",
        ),
        (
            receipt(0, 1, parts=[part(0)]),
            "receipt does not have one part for each of ranks 0, 1, the ranks of its node",
        ),
        (
            receipt(0, 1, parts=[part(1), part(0)]),
            "receipt does not have one part for each of ranks 0, 1, the ranks of its node",
        ),
        (
            receipt(0, parts=[msgspec.structs.replace(part(0), file="../rank-00000.ckpt")]),
            "receipt names '../rank-00000.ckpt', which is not the name of a part of rank 0",
        ),
        (
            receipt(0, parts=[msgspec.structs.replace(part(1), rank=0)]),
            "receipt names 'rank-00001.",
        ),
        (
            receipt(0, format="ckptd-manifest"),
            "receipt has the format 'ckptd-manifest'; expected 'ckptd-receipt'",
        ),
    ],
)
def test_receipts_that_cannot_be_are_refused(made: rc.Receipt, reason: str) -> None:
    with pytest.raises(IntegrityError) as error:
        rc.Receipt.decode(rc.encode(made))
    assert str(error.value).startswith(reason)


def test_a_receipt_of_any_size_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = rc.encode(receipt(0))
    monkeypatch.setattr(rc, "MAX_RECEIPT", len(data))
    assert rc.Receipt.decode(data) == receipt(0)
    monkeypatch.setattr(rc, "MAX_RECEIPT", len(data) - 1)
    with pytest.raises(IntegrityError, match="^receipt has more than "):
        rc.Receipt.decode(data)


def test_a_newer_version_is_not_damage() -> None:
    with pytest.raises(NewerFormat, match=r"^receipt was written by a newer ckptd \(version 2\)"):
        rc.Receipt.decode(rc.encode(receipt(0, version=2)))


def test_a_document_of_other_members_is_refused() -> None:
    with pytest.raises(IntegrityError, match="^abandonment cannot be read: "):
        rc.Abandonment.decode(sealed_json.encode({"format": "ckptd-abandonment", "version": 1}))


# -- what follows


def test_receipts_of_all_ranks_commit_in_any_order() -> None:
    made = [receipt(0, 3), receipt(1), receipt(2)]
    for several in itertools.permutations(made):
        verdict = rc.decide(several, 4, late=False)
        assert isinstance(verdict, rc.CommitTry)
        assert [one.rank for one in verdict.parts] == [0, 1, 2, 3]
        assert verdict.first is made[0]


def test_missing_receipts_are_waited_for_until_it_is_late() -> None:
    for several in ([], [receipt(0, 1)], [receipt(1)]):
        assert rc.decide(several, 4, late=False) is None
    assert rc.decide([receipt(0, 1)], 4, late=True) == rc.AbandonTry(
        "snapshot-failed", "ranks 2, 3 did not deliver (delivered: ranks 0, 1 on node0)"
    )
    assert rc.decide([], 2, late=True) == rc.AbandonTry(
        "snapshot-failed", "ranks 0, 1 did not deliver (no node has delivered)"
    )


@pytest.mark.parametrize("several", [[receipt(0, 1), FAILED], [FAILED], [FAILED, receipt(0, 1)]])
def test_a_failure_ends_the_try_at_once(several: list[rc.Receipt]) -> None:
    assert rc.decide(several, 4, late=False) == rc.AbandonTry(
        "storage", "ranks 2, 3 on node2: no space"
    )


def test_receipts_that_differ_are_never_joined() -> None:
    for late in (False, True):
        verdict = rc.decide([receipt(0, 1), receipt(2, 3, claim="f" * 32)], 4, late=late)
        assert verdict == rc.AbandonTry(
            "fenced",
            "ranks 0, 1 on node0 and ranks 2, 3 on node2 belong to two runs of the job that "
            "have the same attempt number: start the job again",
        )
        verdict = rc.decide([receipt(0, 1), receipt(2, 3, global_plan="bb")], 4, late=late)
        assert verdict == rc.AbandonTry(
            "snapshot-failed",
            "ranks 0, 1 on node0 and ranks 2, 3 on node2 have saved by different plans",
        )
        verdict = rc.decide([receipt(0, 1), receipt(1, 2)], 4, late=late)
        assert verdict == rc.AbandonTry("internal", "two nodes have delivered parts of rank 1")


def of_rank(rank: int, digests: bytes) -> rc.Receipt:
    keys = encode_keys(["a", "b"]) if rank == 0 else b""
    return receipt(
        rank, world_size=2, replicas=[OfNode([rank], ReplicaDigests(b"groupAAA", digests, 1, keys))]
    )


def test_receipts_of_nodes_whose_ranks_differ_in_what_they_share_are_never_joined() -> None:
    first, alike, unlike = of_rank(0, b"aaaabbbb"), of_rank(1, b"aaaabbbb"), of_rank(1, b"aaaaXXXX")
    assert rc.Receipt.decode(rc.encode(unlike)) == unlike
    assert isinstance(rc.decide([first, alike], 2, late=False), rc.CommitTry)
    found = rc.decide([first, unlike], 2, late=False)
    assert isinstance(found, rc.AbandonTry)
    assert found.reason.startswith("step 5 failed: b is not the same on ranks 0 and 1. ")
    assert isinstance(rc.decide([first, receipt(1, world_size=2)], 2, late=False), rc.CommitTry), (
        "an older node has no digests"
    )
