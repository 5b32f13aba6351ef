"""Receipts, by which nodes report their durable parts, and abandonments, which end a
try without a checkpoint (FORMAT.md, section 11).

This is a two-phase commit over storage. A receipt is the vote of a node. Once the
receipts of all nodes agree, the daemon of rank 0 publishes the manifest, which commits
the checkpoint. If a node reports a failure, or does not report in time, that daemon
publishes an abandonment instead. The abandonment has the name of the manifest, so that
a try has only one outcome.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats import sealed_json
from ckptd.shared.formats.manifest import Label, PartEntry
from ckptd.shared.formats.membership import MOST_RANKS, Membership
from ckptd.shared.formats.plan import Size
from ckptd.shared.formats.replicas import OfNode, compare_nodes, sentence
from ckptd.shared.names import parse_part_file
from ckptd.shared.units import rank_list, some_text

VERSION = 1
MAX_RECEIPT = 64 << 20
MAX_REASON = 65_536
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
Code = Annotated[str, msgspec.Meta(max_length=64)]


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one node on one try of one step.

    tag: the name of the directory of the try. node: the membership of the node. host:
    the name of the node, for messages. world_size: the number of ranks of the job.
    global_plan: the digest of the plan of all ranks, in hexadecimal digits; "" if the
    save has failed. parts: one entry for each rank of the node, in the order of the
    ranks; empty if the save has failed. code, reason: the error if the save has failed,
    or "". replicas: digests of the tensors that ranks of the node share with other
    ranks.
    """

    format: str = "ckptd-receipt"
    version: int = VERSION
    job: Label
    attempt: Size
    step: Size
    tag: Label
    node: Membership
    host: Label
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    global_plan: Annotated[str, msgspec.Meta(max_length=128)] = ""
    parts: list[PartEntry] = []
    code: Code = ""
    reason: Reason = ""
    replicas: Annotated[list[OfNode], msgspec.Meta(max_length=MOST_RANKS)] = []

    @classmethod
    def decode(cls, data: bytes) -> Receipt:
        """Return the receipt in `data`.

        Raises IntegrityError if it is damaged or inconsistent, NewerFormat if a newer
        ckptd wrote it.
        """
        receipt = _decoded(data, _RECEIPT_DECODER, "receipt", "ckptd-receipt")
        if problem := receipt.node.problem(receipt.node.ranks[0], receipt.world_size):
            raise IntegrityError(f"receipt has a wrong list of the ranks of its node: {problem}")
        if not receipt.code and [part.rank for part in receipt.parts] != receipt.node.ranks:
            raise IntegrityError(
                f"receipt does not have one part for each of {rank_list(receipt.node.ranks)}, the "
                "ranks of its node"
            )
        for part in receipt.parts:
            parsed = parse_part_file(part.file)
            if parsed is None or parsed[0] != part.rank:
                raise IntegrityError(
                    f"receipt names {part.file!r}, which is not the name of a part of rank "
                    f"{part.rank}"
                )
        return receipt

    @property
    def who(self) -> str:
        """The words for the node in messages, such as "ranks 2, 3 on node2"."""
        return f"{rank_list(self.node.ranks)} on {self.host}"


class Abandonment(msgspec.Struct, frozen=True, kw_only=True):
    """The record that a try has ended without a checkpoint.

    It is stored under the name of the manifest. tag: the directory of the try. code,
    reason: the error that has ended the try.
    """

    format: str = "ckptd-abandonment"
    version: int = VERSION
    job: Label
    attempt: Size
    step: Size
    tag: Label
    code: Code
    reason: Reason

    @classmethod
    def decode(cls, data: bytes) -> Abandonment:
        """Return the abandonment in `data`.

        Raises IntegrityError if it is damaged, NewerFormat if a newer ckptd wrote it.
        """
        return _decoded(data, _ABANDONMENT_DECODER, "abandonment", "ckptd-abandonment")


DELETED = "deleted"
"""The code of an abandonment that has replaced the manifest of a deleted checkpoint."""
_HEAD = b'{\n"format": "ckptd-abandonment",\n'
HEAD = len(_HEAD)
"""The number of bytes that tell an abandonment from a manifest."""


def is_abandonment(data: bytes) -> bool:
    """Return True if `data` begins an abandonment and not a manifest.

    The first `HEAD` bytes are enough. The rest may be damaged.
    """
    return data.startswith(_HEAD)


def encode(document: Receipt | Abandonment) -> bytes:
    """Return the bytes of a receipt or an abandonment, with its checksum."""
    members = msgspec.to_builtins(document)
    if not members.get("replicas", True):
        del members["replicas"]
    return sealed_json.encode(members)


@dataclass(frozen=True, slots=True)
class CommitTry:
    """The verdict that all nodes have delivered.

    first: the receipt of rank 0's node. parts: the parts of the checkpoint, in the order
    of the ranks.
    """

    first: Receipt
    parts: list[PartEntry]


@dataclass(frozen=True, slots=True)
class AbandonTry:
    """The verdict that the try cannot become a checkpoint, with the reason."""

    code: str
    reason: str


def decide(
    receipts: Sequence[Receipt], world_size: int, *, late: bool
) -> CommitTry | AbandonTry | None:
    """Return the verdict on a try, or None while a node may still deliver.

    late: True if the wait for receipts is over.

    The try fails if its receipts differ in the run id or in the plan: the nodes then did
    not save the same state, and their parts must never be joined. It also fails if ranks
    of different nodes hold different copies of a tensor that they share.
    """
    for receipt in receipts:
        if receipt.code:
            return AbandonTry(receipt.code, receipt.reason)
    for one, other in itertools.pairwise(receipts):
        if one.node.run_id != other.node.run_id:
            return AbandonTry(
                "fenced",
                f"{one.who} and {other.who} belong to two runs of the job that have the same "
                f"attempt number: start the job again",
            )
        if (one.attempt, one.step, one.world_size) != (other.attempt, other.step, other.world_size):
            return AbandonTry(
                "snapshot-failed",
                f"{one.who} and {other.who} have saved steps {one.step} and {other.step} under "
                f"the same tag",
            )
        if one.global_plan != other.global_plan:
            return AbandonTry(
                "snapshot-failed", f"{one.who} and {other.who} have saved by different plans"
            )
    if differences := compare_nodes(receipt.replicas for receipt in receipts):
        return AbandonTry("snapshot-failed", sentence(receipts[0].step, differences))
    parts = sorted(
        (part for receipt in receipts for part in receipt.parts), key=lambda part: part.rank
    )
    here = [part.rank for part in parts]
    if here == list(range(world_size)):
        return CommitTry(next(receipt for receipt in receipts if receipt.node.leads), parts)
    if len(set(here)) < len(here):
        twice = [rank for rank, after in itertools.pairwise(here) if rank == after]
        return AbandonTry("internal", f"two nodes have delivered parts of {rank_list(twice)}")
    if not late:
        return None
    missing = sorted(set(range(world_size)).difference(here))
    delivered = (
        f"delivered: {some_text([receipt.who for receipt in receipts])}"
        if receipts
        else "no node has delivered"
    )
    return AbandonTry(
        "snapshot-failed",
        f"{rank_list(missing)} did not deliver ({delivered})",
    )


T = TypeVar("T", Receipt, Abandonment)


def _decoded(data: bytes, decoder: msgspec.json.Decoder[T], called: str, expected: str) -> T:
    if len(data) > MAX_RECEIPT:
        raise IntegrityError(
            f"{called} has more than {MAX_RECEIPT:,d} bytes, the limit of the format"
        )
    sealed_json.check(data, called)
    try:
        document = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{called} cannot be read: {error}") from None
    if document.format != expected:
        raise IntegrityError(f"{called} has the format {document.format!r}; expected {expected!r}")
    if document.version > VERSION:
        raise NewerFormat(
            f"{called} was written by a newer ckptd (version {document.version}): upgrade this one"
        )
    return document


_RECEIPT_DECODER = msgspec.json.Decoder(Receipt)
_ABANDONMENT_DECODER = msgspec.json.Decoder(Abandonment)
