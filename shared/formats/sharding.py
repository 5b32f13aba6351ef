"""Sharding by rule: which shard of a tensor each rank of a mesh holds, by arithmetic
(FORMAT.md, section 3).

A rule takes the place of a list with one entry for each shard. It needs no torch:
readers, and the daemon, evaluate it as the agents do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.bounds import MAX_DIMENSIONS

MOST_MESH_DIMENSIONS = 16
MOST_MESH_RANKS = 1 << 24
"""The most ranks of one mesh."""

MeshSize = Annotated[int, msgspec.Meta(ge=1, le=MOST_MESH_RANKS)]
MeshRank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Split = tuple[
    Annotated[int, msgspec.Meta(ge=0, lt=MOST_MESH_DIMENSIONS)],
    Annotated[int, msgspec.Meta(ge=0, lt=MAX_DIMENSIONS)],
]
"""A division of a tensor: the dimension of the mesh, and the dimension of the tensor
that is divided along it.
"""
Splits = Annotated[tuple[Split, ...], msgspec.Meta(max_length=MOST_MESH_DIMENSIONS)]
Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""The offsets and the sizes of a shard in its tensor, one of each for every dimension."""


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """An array of ranks, as torch's DeviceMesh has it.

    The rank at a coordinate is `first` plus the sum of each part of the coordinate
    times its stride. An irregular mesh lists its `ranks` instead, in C order.
    """

    shape: Annotated[
        tuple[MeshSize, ...], msgspec.Meta(min_length=1, max_length=MOST_MESH_DIMENSIONS)
    ]
    first: MeshRank = 0
    strides: Annotated[tuple[MeshRank, ...], msgspec.Meta(max_length=MOST_MESH_DIMENSIONS)] = ()
    ranks: Annotated[tuple[MeshRank, ...], msgspec.Meta(max_length=MOST_MESH_RANKS)] = ()

    @classmethod
    def of(cls, shape: Sequence[int], ranks: Sequence[int]) -> Mesh:
        """Return the mesh of this shape with these ranks, in C order.

        The result is the same for the same mesh.
        """
        step, strides = len(ranks), list[int]()
        for size in shape:
            step //= size
            strides.append(ranks[step] - ranks[0] if size > 1 else 0)
        if min(strides) >= 0:
            regular = cls(tuple(shape), ranks[0], tuple(strides))
            if regular._last() is not None and regular.all_ranks() == list(ranks):
                return regular
        return cls(tuple(shape), ranks=tuple(ranks))

    def check(self, world_size: int) -> None:
        """Raise IntegrityError if this cannot be a mesh of the ranks of a job of this
        size. Then it has no more ranks than the job.
        """
        if self.ranks:
            sound = (
                len(self.ranks) == self.size == len(set(self.ranks))
                and max(self.ranks) < world_size
            )
        else:
            last = self._last()
            sound = last is not None and last < world_size
        if not sound:
            raise IntegrityError(
                f"a mesh of shape {list(self.shape)} does not have one rank of {world_size} for "
                f"each coordinate"
            )

    def _last(self) -> int | None:
        """Return the highest rank of a regular mesh, or None if the strides could give
        one rank to several coordinates.
        """
        if len(self.strides) != len(self.shape):
            return None
        last = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride <= last:
                    return None
                last += stride * (size - 1)
        return self.first + last

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def all_ranks(self) -> list[int]:
        """Return the ranks in C order."""
        if self.ranks:
            return list(self.ranks)
        found = [self.first]
        for size, stride in zip(self.shape, self.strides, strict=True):
            found = [rank + number * stride for rank in found for number in range(size)]
        return found

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Return the coordinates in C order."""
        return itertools.product(*map(range, self.shape))

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank, or None if the mesh does not have it."""
        ranks = self.all_ranks()
        if rank not in ranks:
            return None
        number, found = ranks.index(rank), []
        for size in reversed(self.shape):
            number, part = divmod(number, size)
            found.append(part)
        return tuple(reversed(found))


class Rule(msgspec.Struct, frozen=True, array_like=True):
    """The way in which one tensor is divided among the ranks of a mesh, and which of
    its replicas is stored.

    mesh: its number in a list of meshes. splits: the divisions, in their order. The
    dimensions of the mesh that no split names hold replicas. replica: the number of the
    stored replica, counted in C order along these dimensions.
    """

    mesh: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    splits: Splits
    replica: MeshRank = 0


def place(size: Sequence[int], mesh: Mesh, splits: Splits, coordinate: Sequence[int]) -> Box:
    """Return the place of the shard at a coordinate of the mesh.

    Each split divides what is left of a dimension of the tensor as `torch.chunk` does:
    into pieces of the same size, rounded up. The last pieces may be smaller or empty.
    """
    offsets, sizes = [0] * len(size), list(size)
    for along, dimension in splits:
        piece = -(-sizes[dimension] // mesh.shape[along])
        start = min(coordinate[along] * piece, sizes[dimension])
        offsets[dimension] += start
        sizes[dimension] = min(piece, sizes[dimension] - start)
    return tuple(offsets), tuple(sizes)


def replica_dimensions(mesh: Mesh, splits: Splits) -> list[int]:
    """Return the dimensions of the mesh along which the shards are the same."""
    divided = {along for along, _ in splits}
    return [number for number in range(len(mesh.shape)) if number not in divided]


def replicas(mesh: Mesh, splits: Splits) -> int:
    """Return the number of replicas of each shard."""
    return math.prod(mesh.shape[number] for number in replica_dimensions(mesh, splits))


def replica_of(mesh: Mesh, splits: Splits, coordinate: Sequence[int]) -> int:
    """Return the number of the replica that the rank at a coordinate holds."""
    number = 0
    for along in replica_dimensions(mesh, splits):
        number = number * mesh.shape[along] + coordinate[along]
    return number


def stored_shards(size: Sequence[int], mesh: Mesh, rule: Rule) -> Iterator[tuple[Box, int]]:
    """Yield the place of each stored shard that is not empty, and the rank that stores
    it.
    """
    for rank, coordinate in zip(mesh.all_ranks(), mesh.coordinates(), strict=True):
        if (
            replica_of(mesh, rule.splits, coordinate) == rule.replica
            and 0 not in (found := place(size, mesh, rule.splits, coordinate))[1]
        ):
            yield found, rank


def check_rule(name: str, size: Sequence[int], meshes: Sequence[Mesh], rule: Rule) -> None:
    """Raise IntegrityError if a rule is not valid for a tensor of this size.

    `name` is for the message.
    """
    if rule.mesh >= len(meshes):
        raise IntegrityError(f"{name!r} is divided among a mesh that is not described")
    mesh, along = meshes[rule.mesh], [split[0] for split in rule.splits]
    if len(set(along)) != len(along) or any(number >= len(mesh.shape) for number in along):
        raise IntegrityError(f"{name!r} is divided along dimensions that its mesh does not have")
    if (
        0 in size
        or any(dimension >= len(size) for _, dimension in rule.splits)
        or rule.replica >= replicas(mesh, rule.splits)
    ):
        raise IntegrityError(
            f"{name!r} is divided by a rule that does not fit its size {list(size)}"
        )
