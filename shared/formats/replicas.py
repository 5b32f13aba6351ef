"""Compares ranks that hold the same tensors by digests, at every snapshot (FORMAT.md,
section 3).

A replica group is a set of ranks that hold the same shards of the same tensors, so that
only one rank stores each shard. Every rank of a group puts digests of these tensors
into its request document. A daemon that has read the documents of several ranks
compares the digests. This module does no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import zstandard

from ckptd.shared.units import rank_list

GROUP = 8
DIGEST = 4
"""The bytes of the name of a group, and of one digest."""
MOST_GROUPS = 1024
MOST_DIGESTS = 1024
"""The most digests of one rank, over all its groups. A group of more tensors has one
digest for several of them.
"""
MOST_KEYS = 256 << 10
"""The most bytes of the keys of one group, before they are compressed."""


class ReplicaDigests(msgspec.Struct, frozen=True, array_like=True):
    """The digests of the tensors of one rank in one replica group.

    group: the name of the group. It depends on the bytes that were digested, so that
        digests under different names must not be compared.
    digests: DIGEST bytes for each run of `each` tensors, in the order of their keys.
    each: the number of tensors of a run. The last run may have fewer.
    keys: the first key of each run, as `encode_keys` encodes them. Empty on all ranks
        of a node but the lowest one of the group.
    """

    group: Annotated[bytes, msgspec.Meta(min_length=GROUP, max_length=GROUP)]
    digests: Annotated[bytes, msgspec.Meta(max_length=DIGEST * MOST_DIGESTS)]
    each: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)] = 1
    keys: Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS)] = b""

    def runs(self) -> list[bytes]:
        """Return the digest of each run."""
        return [self.digests[at : at + DIGEST] for at in range(0, len(self.digests), DIGEST)]


Replicas = Annotated[list[ReplicaDigests], msgspec.Meta(max_length=MOST_GROUPS)]


def encode_keys(keys: Sequence[str]) -> bytes:
    """Return the keys as a compressed list, or b"" if they are longer than readers
    accept.
    """
    packed = msgspec.msgpack.encode(list(keys))
    return zstandard.compress(packed, 1) if len(packed) <= MOST_KEYS else b""


def decode_keys(data: bytes) -> list[str]:
    """Return the keys, or [] if `data` is empty or damaged.

    Digests can be compared without keys.
    """
    try:
        return (
            _KEYS.decode(zstandard.ZstdDecompressor().decompress(data, max_output_size=MOST_KEYS))
            if data
            else []
        )
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError):
        return []


@dataclass(frozen=True, slots=True)
class Difference:
    """A replica group whose ranks hold different copies.

    ranks: the sets of ranks that agree with each other, the largest set first. keys:
    the first keys of the runs that differ, or [] if no rank has sent its keys. each:
    the number of tensors of a run. count: the number of runs that differ.
    """

    ranks: list[list[int]]
    keys: list[str]
    each: int
    count: int


def compare(held: Mapping[int, Iterable[ReplicaDigests]]) -> list[Difference]:
    """Return the groups in which ranks differ, given the digests of each rank.

    A group is not compared if only one of the ranks has it.
    """
    groups: dict[tuple[bytes, int], dict[int, ReplicaDigests]] = {}
    for rank, found in held.items():
        for one in found:
            groups.setdefault((one.group, len(one.digests)), {})[rank] = one
    return [
        difference
        for of_rank in groups.values()
        if (difference := _difference(of_rank)) is not None
    ]


def _difference(of_rank: Mapping[int, ReplicaDigests]) -> Difference | None:
    sets: dict[bytes, list[int]] = {}
    for rank in sorted(of_rank):
        sets.setdefault(of_rank[rank].digests, []).append(rank)
    if len(sets) <= 1:
        return None
    runs = [of_rank[ranks[0]].runs() for ranks in sets.values()]
    differ = [
        number for number, digests in enumerate(zip(*runs, strict=True)) if len(set(digests)) > 1
    ]
    keys = next((keys for rank in sorted(of_rank) if (keys := decode_keys(of_rank[rank].keys))), [])
    return Difference(
        sorted(sets.values(), key=lambda ranks: (-len(ranks), ranks)),
        [keys[n] for n in differ if n < len(keys)], next(iter(of_rank.values())).each, len(differ),
    )  # fmt: skip


class OfNode(msgspec.Struct, frozen=True, array_like=True):
    """The digests of one replica group on one node, whose ranks agree. ranks: the ranks
    of the group on this node.
    """

    ranks: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]],
        msgspec.Meta(min_length=1, max_length=65_536),
    ]
    digests: ReplicaDigests


def of_node(held: Mapping[int, Iterable[ReplicaDigests]]) -> list[OfNode]:
    """Return the groups of one node, given the digests of its ranks, which agree.

    The keys of a group come from the lowest rank of the group on the node.
    """
    found: dict[bytes, tuple[list[int], ReplicaDigests]] = {}
    for rank in sorted(held):
        for one in held[rank]:
            found.setdefault(one.group, ([], one))[0].append(rank)
    return [OfNode(ranks, one) for ranks, one in found.values()]


def compare_nodes(nodes: Iterable[Sequence[OfNode]]) -> list[Difference]:
    """Return the groups in which ranks of different nodes differ."""
    held: dict[int, list[ReplicaDigests]] = {}
    for node in nodes:
        for group in node:
            for rank in group.ranks:
                held.setdefault(rank, []).append(group.digests)
    return compare(held)


MOST_BRIEFS = 256
"""The most groups of one node that the board lists. If a node has more, its step is
compared by the receipts only.
"""


class Brief(msgspec.Struct, frozen=True, array_like=True):
    """A replica group of one node in few bytes, for the board. key: the first key of
    the group, or "".
    """

    group: Annotated[bytes, msgspec.Meta(min_length=GROUP, max_length=GROUP)]
    digest: Annotated[bytes, msgspec.Meta(max_length=GROUP)]
    ranks: Annotated[str, msgspec.Meta(max_length=100)]
    key: Annotated[str, msgspec.Meta(max_length=100)] = ""


def briefs(groups: Sequence[OfNode]) -> list[Brief]:
    """Return the groups of one node in few bytes, or [] if they are too many."""
    found = []
    for one in groups if len(groups) <= MOST_BRIEFS else ():
        keys = decode_keys(one.digests.keys)
        digest = hashlib.blake2b(one.digests.digests, digest_size=GROUP).digest()
        found.append(
            Brief(
                one.digests.group, digest, rank_list(one.ranks)[:100], keys[0][:100] if keys else ""
            )
        )
    return found


def apart(nodes: Iterable[Sequence[Brief]]) -> str:
    """Return a phrase that says where the nodes differ, or "" if they agree."""
    first: dict[bytes, Brief] = {}
    for node in nodes:
        for one in node:
            other = first.setdefault(one.group, one)
            if other.digest != one.digest:
                key = other.key or one.key
                first_key = f" (the first of these tensors is {key})" if key else ""
                return (
                    f"at least one of the tensors that {other.ranks} and {one.ranks} share "
                    f"differs between "
                    f"them{first_key}: mark what is each rank's own with per_rank(...)"
                )
    return ""


_MOST_NAMED = 5
_OF_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
"""The names of buffers of batch normalization, which each rank changes on its own.

They are compared if their module is saved as a plain dict.
"""


def sentence(step: int, differences: Sequence[Difference]) -> str:
    """Return the reason for the failure of a step whose replicas differ.

    It names keys and ranks, and says what to do.
    """
    parts = [
        f"{_named(one)} {'is' if one.count * one.each == 1 else 'are'} not the same on "
        f"{_apart(one.ranks)}"
        for one in differences[:3]
    ]
    more = (
        f"; and {len(differences) - 3} more groups of ranks differ" if len(differences) > 3 else ""
    )
    keys = [key for one in differences for key in one.keys]
    cause = (
        "mark what is each rank's own with per_rank(...), or give different tensors different keys"
    )
    if keys and all(key.endswith(_OF_BATCH_NORM) for key in keys):
        cause = (
            "pass the module itself instead of its state_dict(): the buffers of a module are "
            "saved from the lowest rank"
        )
    return (
        f"step {step} failed: {'; '.join(parts)}{more}. Ranks held equal copies when they "
        f"planned, and one copy would be saved for all "
        f"of them: {cause}. If the copies must be equal, one rank has computed or stored wrong "
        f"values"
    )


def _named(one: Difference) -> str:
    tensors = one.count * one.each
    if not one.keys:
        return (
            f"{tensors:,d} tensors that these ranks share"
            if tensors > 1
            else "a tensor that these ranks share"
        )
    rest = one.count - min(len(one.keys), _MOST_NAMED)
    shown = ", ".join(one.keys[:_MOST_NAMED]) + (f" and {rest:,d} more" if rest else "")
    return shown if one.each == 1 else f"at least one of {one.each} tensors from each of {shown} on"


def _apart(sets: Sequence[Sequence[int]]) -> str:
    """Return a phrase that names the ranks that differ.

    Examples are `rank 3 as on ranks 0, 1, 2` and `ranks 0 and 1`.
    """
    if len(sets) == 2:
        few, many = sets[1], sets[0]
        if len(few) == len(many) == 1:
            return f"ranks {many[0]} and {few[0]}"
        return f"{rank_list(few)} as on {rank_list(many)}"
    return "; ".join(map(rank_list, sets[:4])) + ("; ..." if len(sets) > 4 else "")


_KEYS = msgspec.msgpack.Decoder(list[str])
