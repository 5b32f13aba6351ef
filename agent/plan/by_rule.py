"""Describes the tensors of one rank by rule, so that ranks of the same structure need
not send their items to each other.

A rank sends a `Summary`, which is small. Ranks whose summaries name the same structure
have the same `Structured` document, and one of them sends it. `rule_shares.py` decides
from these on rank 0. A tensor that no rule describes is listed in the summary, shard by
shard.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import zstandard
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptd.agent.plan.layout import Layout, Local, Row, lay_out
from ckptd.agent.plan.replica_groups import ALONE, ReplicaGroup, SharedRows, grouped, members
from ckptd.agent.plan.structure import PLAIN
from ckptd.agent.state.dtypes import dtype_name
from ckptd.shared.formats.plan import element_size
from ckptd.shared.formats.sharding import Mesh, Splits, place, replica_of

_LEVEL = 1
"""The zstd level of a document. The names in it repeat, so that level 1 leaves a
twentieth. Level 3 takes longer.
"""


class Ruled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor of a structure.

    Its first fields are the same on all ranks that have the tensor.

    size: the size of the whole tensor, in elements. mesh: the number of its mesh in the
    summary, or WHOLE if the rank has the whole tensor. splits: its divisions along the
    mesh. buffer, base: as in `Row`. digest: the digest of the bytes, for a whole tensor
    that is compared between ranks. in_order: as in `Row`, which may differ between
    ranks.
    """

    fqn: str
    dtype: str
    size: tuple[int, ...]
    mesh: int
    splits: Splits = ()
    buffer: bool = False
    base: str = ""
    digest: bytes = b""
    in_order: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * element_size(self.dtype)

    @property
    def along(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which the tensor is divided."""
        return tuple(sorted(along for along, _ in self.splits))


WHOLE = -1
Family = tuple[int, tuple[int, ...]]
"""Tensors whose replicas are on the same ranks: the number of their mesh, and the
dimensions of it along which they are divided.
"""


class Structured(msgspec.Struct, frozen=True):
    """The structure of the ranks of one class.

    It has nothing that differs between them.

    shapes: the shapes of the meshes. values: a digest of each plain value, by key.
    """

    shapes: list[tuple[int, ...]]
    tensors: list[Ruled]
    values: dict[str, bytes]

    def encode(self) -> bytes:
        return zstandard.compress(msgspec.msgpack.encode(self), _LEVEL)

    @classmethod
    def decode(cls, data: bytes) -> Structured:
        return _DECODER.decode(zstandard.decompress(data))

    def families(self) -> list[Family]:
        """Return the families of its tensors that are divided, in the order of their
        first tensors.
        """
        return list(
            dict.fromkeys(
                (tensor.mesh, tensor.along) for tensor in self.tensors if tensor.mesh != WHOLE
            )
        )


class Summary(msgspec.Struct, frozen=True):
    """The part of a description that each rank sends.

    structure: the digest of the rank's `Structured`, 16 bytes. meshes: the meshes of
    the tensors. contents: for each family a digest of the bytes of its tensors that are
    compared between ranks, or b"" if there are none. extras: the rows of all tensors
    without a rule.
    """

    structure: bytes
    meshes: list[Mesh]
    contents: list[bytes]
    extras: list[Row]


class RuledShare(msgspec.Struct, frozen=True):
    """The items that the ranks of one class are to write.

    meshes: the meshes of all tensors of the job. mesh: for each tensor of the
    structure, the number of its mesh among these, or WHOLE. choice: for each tensor,
    the number of the replica that is stored, or for a whole tensor the rank that stores
    it. dropped: by rank, the numbers of the extras that it does not write. global_plan:
    the digest of the plan that all ranks share. groups: the ranks of each replica group
    of whole tensors. group: for each whole tensor, the number of its group, and ALONE
    for any other tensor. held: by rank, the replica groups of its extras. scattered:
    the numbers of the tensors of the structure that are not in C order on every rank.
    aliases: by rank, the names of the extras that it lists as aliases.
    """

    meshes: list[Mesh]
    mesh: list[int]
    choice: list[int]
    dropped: dict[int, list[int]]
    global_plan: bytes
    groups: list[list[int]] = []
    group: list[int] = []
    held: dict[int, SharedRows] = {}
    scattered: list[int] = []
    aliases: dict[int, list[str]] = {}


@dataclass(frozen=True, slots=True)
class ByRule:
    """The description of one rank.

    `rows` has for each tensor of the structure the number of its row, or None if its
    shard is empty.

    `extras` are the numbers of the rows in `summary.extras`.
    """

    local: Local
    structured: Structured
    summary: Summary
    rows: list[int | None]
    extras: list[int]

    @classmethod
    def of(
        cls,
        local: Local,
        tensors: dict[str, torch.Tensor],
        values: dict[str, bytes],
        rank: int,
        buffers: Collection[str] = (),
    ) -> ByRule:
        """Describe the rows of `local`, which are those of `tensors`.

        values: the digests of the plain values, by key. buffers: the names of the
        modules' buffers.
        """
        meshes = _Meshes(rank, buffers)
        found: list[Ruled] = []
        numbers: list[int | None] = []
        extras: list[int] = []
        contents: dict[Family, Any] = {}
        of_tensor: dict[str, list[int]] = {}
        # Of a tensor in a `per_rank` value, which the other ranks do not have.
        own_name = re.compile(rf"@{rank}(\.|$)")
        for number, row in enumerate(local.rows):
            of_tensor.setdefault(row.fqn, []).append(number)
        # A hidden item has rows, and a tensor whose shard is empty has none.
        for name in dict.fromkeys([*tensors, *of_tensor]):
            tensor, own = tensors.get(name), of_tensor.get(name, [])
            if own_name.search(name):
                extras += own
                continue
            if tensor is None or type(tensor) in PLAIN:
                row = local.rows[own[0]]
                found.append(
                    Ruled(
                        row.fqn,
                        row.dtype,
                        row.size,
                        WHOLE,
                        (),
                        row.buffer,
                        row.base,
                        row.digest,
                        row.in_order,
                    )
                )
                numbers.append(own[0])
                continue
            ruled = meshes.describe(name, tensor, [local.rows[number] for number in own])
            if ruled is None:
                extras += own
                continue
            found.append(ruled)
            numbers.append(own[0] if own else None)
            digests = contents.setdefault((ruled.mesh, ruled.along), [])
            digests += (
                [(name, local.rows[own[0]].digest)] if own and local.rows[own[0]].digest else []
            )
        structured = Structured([mesh.shape for mesh in meshes.found], found, values)
        summary = Summary(
            digest_of(structured),
            meshes.found,
            [
                digest_of(contents[family]) if contents[family] else b""
                for family in structured.families()
            ],
            [local.rows[number] for number in extras],
        )
        return cls(local, structured, summary, numbers, extras)

    def lay_out(self, share: RuledShare, rank: int, metadata: dict[str, Any] | None) -> Layout:
        """Return the layout of what this rank writes.

        `metadata` describes the tensors of all ranks; it is None on all ranks but rank
        0.
        """
        kept, aliases = list[int](), set(share.aliases.get(rank, ()))
        coordinates = [mesh.coordinate_of(rank) for mesh in share.meshes]
        for tensor, number, mesh, choice in zip(
            self.structured.tensors, self.rows, share.mesh, share.choice, strict=True
        ):
            if number is None:
                continue
            if mesh == WHOLE:
                if choice == rank:
                    aliases.update([tensor.fqn] if tensor.base else [])
                    kept += [] if tensor.base else [number]
                continue
            coordinate = coordinates[mesh]
            assert coordinate is not None
            splits = stacked(tensor.splits, share.meshes[mesh], self.structured.shapes[tensor.mesh])
            if replica_of(share.meshes[mesh], splits, coordinate) == choice:
                kept.append(number)
        dropped = set(share.dropped.get(rank, ()))
        kept += [number for place, number in enumerate(self.extras) if place not in dropped]
        return lay_out(
            self.local,
            sorted(kept),
            aliases=aliases,
            metadata=metadata,
            global_plan=share.global_plan,
            meshes=[] if metadata is None else share.meshes,
        )

    def replica_groups(self, share: RuledShare, rank: int) -> list[ReplicaGroup]:
        """Return the replica groups of this rank."""
        coordinates = [mesh.coordinate_of(rank) for mesh in share.meshes]
        wholes = [tuple(group) for group in share.groups]
        known: dict[tuple[int, Splits], tuple[int, ...]] = {}
        found: list[tuple[int, tuple[int, ...]]] = []
        scattered = [row for number in share.scattered if (row := self.rows[number]) is not None]
        for tensor, number, mesh, group in zip(
            self.structured.tensors, self.rows, share.mesh, share.group, strict=False
        ):
            if number is None or tensor.buffer or not self.local.rows[number].nbytes:
                continue
            if mesh == WHOLE:
                if group != ALONE and self.local.rows[number].digest:
                    found.append((number, wholes[group]))
                continue
            coordinate = coordinates[mesh]
            assert coordinate is not None
            place = (
                mesh,
                stacked(tensor.splits, share.meshes[mesh], self.structured.shapes[tensor.mesh]),
            )
            if place not in known:
                known[place] = members(
                    share.meshes[mesh], sorted(along for along, _ in place[1]), coordinate
                )
            found.append((number, known[place]))
        if (held := share.held.get(rank)) is not None:
            ranks = [tuple(group) for group in held.groups]
            found += [
                (self.extras[place], ranks[group])
                for place, group in enumerate(held.of_row)
                if group != ALONE
            ]
            scattered += [self.extras[place] for place in held.scattered]
        return grouped(self.local.rows, found, scattered)


def stacked(splits: Splits, mesh: Mesh, shape: Sequence[int]) -> Splits:
    """Return the splits of a tensor along `mesh`, given those along its own mesh, which
    has this shape.

    `mesh` is the tensor's own mesh, or several meshes of that shape in a row.
    """
    more = len(mesh.shape) - len(shape)
    return tuple((along + more, dimension) for along, dimension in splits)


class _Meshes:
    """Collects the meshes of a rank's tensors.

    Tensors that are sharded alike are looked at once.
    """

    def __init__(self, rank: int, buffers: Collection[str]) -> None:
        self.found: list[Mesh] = []
        self._rank, self._buffers = rank, buffers
        self._numbers: dict[Mesh, int] = {}
        self._known: dict[object, tuple[int, Splits, tuple[int, ...]] | None] = {}

    def describe(self, name: str, tensor: torch.Tensor, rows: Sequence[Row]) -> Ruled | None:
        """Return the description of a tensor, or None if no rule gives its shard on
        this rank. `rows` has its row, or is empty.
        """
        if not isinstance(tensor, DTensor) or not tensor.numel() or len(rows) > 1:
            return None
        key = (tensor.device_mesh, tensor.placements)
        if key not in self._known:
            self._known[key] = self._rule_of(tensor)
        found = self._known[key]
        if found is None:
            return None
        number, splits, coordinate = found
        size = tuple(tensor.shape)
        where = place(size, self.found[number], splits, coordinate)
        if (
            (0 not in where[1])
            if not rows
            else (rows[0].size, (rows[0].offsets, rows[0].sizes)) != (size, where)
        ):
            return None
        dtype = rows[0].dtype if rows else dtype_name(tensor._local_tensor.dtype)
        return Ruled(
            name,
            dtype,
            size,
            number,
            splits,
            name in self._buffers,
            in_order=not rows or rows[0].in_order,
        )

    def _rule_of(self, tensor: DTensor) -> tuple[int, Splits, tuple[int, ...]] | None:
        """Return the number of the tensor's mesh, its splits, and this rank's
        coordinate, or None if there is no rule.
        """
        ranks = tensor.device_mesh.mesh
        splits = _splits_of(tensor.placements, tuple(ranks.shape))
        mesh = Mesh.of(tuple(ranks.shape), ranks.flatten().tolist())
        coordinate = mesh.coordinate_of(self._rank)
        if (
            splits is None
            or coordinate is None
            or coordinate != tuple(tensor.device_mesh.get_coordinate() or ())
        ):
            return None
        if mesh not in self._numbers:
            self._numbers[mesh] = len(self.found)
            self.found.append(mesh)
        return self._numbers[mesh], splits, coordinate


def _splits_of(placements: Sequence[Any], shape: Sequence[int]) -> Splits | None:
    """Return the order in which a tensor is divided, or None if the placements are of a
    kind without a rule.

    A `_StridedShard` is divided after the later dimensions of the mesh that divide the
    same dimension of the tensor, as its split factor says. The other dimensions are
    divided in the order of the mesh.
    """
    order: list[tuple[int, int, int]] = []
    for along, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement).__name__ == "_StridedShard":
            later = [
                other
                for other in range(along + 1, len(placements))
                if getattr(placements[other], "dim", None) == placement.dim
            ]
            if math.prod(shape[other] for other in later) != placement.split_factor:
                return None
            order.append((max(later, default=along), 1 + len(placements) - along, along))
        elif type(placement) is Shard:
            order.append((along, 0, along))
        else:
            return None
    return tuple((along, placements[along].dim) for *_, along in sorted(order))


def digest_of(described: Structured | Sequence[tuple[str, bytes]]) -> bytes:
    """Return the digest of a structure, or of the names and digests of tensors that are
    compared between ranks.
    """
    return hashlib.blake2b(msgspec.msgpack.encode(described), digest_size=16).digest()


_DECODER = msgspec.msgpack.Decoder(Structured)
