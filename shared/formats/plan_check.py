"""Checks the plans of a snapshot together: every tensor is whole, and the metadata
describe what the parts hold (FORMAT.md, section 3).

A plan that is sound by itself may still have a hole in a tensor, contradict the plan of
another rank, or lack what the metadata promise. A reader would refuse such a
checkpoint. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.coverage import check_all, two_sizes
from ckptd.shared.formats.manifest import MOST_INLINE
from ckptd.shared.formats.metadata_object import check_entry, stored_places
from ckptd.shared.formats.plan import BLOB, HIDDEN, Described, Plan
from ckptd.shared.formats.sharding import Box, Mesh, Rule, Shape, place, replica_of
from ckptd.shared.system.collector import paused_collector


@paused_collector()
def check_plans(plans: Mapping[int, Plan], world_size: int) -> frozenset[str] | None:
    """Check the plans of the ranks of one node, given by rank.

    Return the names that a values document may use.

    world_size: the number of ranks of the job. If it has more ranks than `plans`, whole
    tensors can only be checked by the metadata, and without rank 0 not at all. The
    names are then None.

    Raises IntegrityError, naming the tensor, if a reader would refuse the snapshot.
    """
    stored = _Stored()
    for rank, plan in sorted(plans.items()):
        stored.add(plan, rank)
    if len(plans) == world_size:
        check_all(
            {
                name: (size, set(boxes))  # type: ignore[arg-type]
                for name, (dtype, size, boxes) in stored.items.items()
                if dtype != BLOB
            }
        )
    names = frozenset(
        name for name in (*stored.items, *stored.aliases) if not name.startswith(HIDDEN)
    )
    first = plans.get(0)
    if first is None:
        return names if len(plans) == world_size else None
    described = first.metadata or {}
    if missing := sorted(names - described.keys()):
        lack = "do not describe" if described else "are missing: they must describe"
        raise IntegrityError(
            f"the metadata in the plan of rank 0 {lack} {missing[0]!r}, which rank "
            f"{stored.a_rank_of(missing[0])} stores"
        )
    _Metadata(first, world_size).check(stored, plans)
    return names | described.keys()


Boxes = dict[Box | None, list[int]]


class _Stored:
    """Collects the tensors of all parts.

    `items` and `aliases` have, for each name, its dtype, its size, and the ranks that
    store each of its shards. The place of a blob is None.
    """

    def __init__(self) -> None:
        self.items: dict[str, tuple[str, Shape, Boxes]] = {}
        self.aliases: dict[str, tuple[str, Shape, Boxes]] = {}

    def add(self, plan: Plan, rank: int) -> None:
        for item in plan.items:
            name, dtype, size = item.fqn, item.dtype, item.size
            if dtype == BLOB and (len(size) != 1 or item.sizes != size or any(item.offsets)):
                raise IntegrityError(
                    f"{name!r} is a value of the size {list(size)} at {list(item.offsets)}; "
                    f"expected one dimension, at 0"
                )
            self._put(
                self.items,
                name,
                dtype,
                size,
                None if dtype == BLOB else (item.offsets, item.sizes),
                rank,
            )
        for alias in plan.aliases:
            if alias.fqn.startswith(HIDDEN):
                raise IntegrityError(f"the alias {alias.fqn!r} has the name of a hidden item")
            self._put(
                self.aliases,
                alias.fqn,
                alias.dtype,
                alias.size,
                ((0,) * len(alias.size), alias.size),
                rank,
            )
        if plan.aliases and (both := self.items.keys() & self.aliases.keys()):
            raise IntegrityError(f"{min(both)!r} is an item and an alias at once")

    @staticmethod
    def _put(
        into: dict[str, tuple[str, Shape, Boxes]],
        name: str,
        dtype: str,
        size: Shape,
        box: Box | None,
        rank: int,
    ) -> None:
        known = into.get(name)
        if known is None:
            into[name] = dtype, size, {box: [rank]}
            return
        if known[0] != dtype:
            raise IntegrityError(
                f"{name!r} has two dtypes: {known[0]}, and {dtype} in the plan of rank {rank}"
            )
        if known[1] != size and dtype != BLOB:
            raise two_sizes(name, known[1], size)
        known[2].setdefault(box, []).append(rank)

    def __getitem__(self, name: str) -> tuple[str, Shape, Boxes]:
        return self.items[name] if name in self.items else self.aliases[name]

    def get(self, name: str) -> tuple[str, Shape, Boxes] | None:
        return self.items.get(name) or self.aliases.get(name)

    def a_rank_of(self, name: str) -> int:
        return next(iter(self[name][2].values()))[0]


_MOST_SPREAD = 1 << 18
"""The most shards of a job of several nodes that are checked for holes and overlaps by
the metadata. More would take many seconds.
"""
_BYTES_OF_A_PART = 512
"""The most bytes of the entry of a part in a manifest."""
_USUAL = ({"dtype", "size", "chunks"}, {"dtype", "size", "chunks", "ranks"})
_FIRST = [0]


class _Metadata:
    """The metadata in the plan of rank 0."""

    def __init__(self, plan: Plan, world_size: int) -> None:
        self._entries: Mapping[str, Described] = plan.metadata or {}
        self._meshes: Sequence[Mesh] = plan.meshes or []
        self._world_size = world_size
        for mesh in self._meshes:
            mesh.check(world_size)
        self._coordinates: list[dict[int, Sequence[int]]] = []
        self._names_ranks = world_size == 1 or not self._is_of_earlier_version()

    def _is_of_earlier_version(self) -> bool:
        """Return True if the metadata name no rank, as those of earlier versions, and
        no reader will need the ranks.

        Readers need them if the metadata become an object beside the manifest, because
        they are large.
        """
        return (
            not any("ranks" in entry or "rule" in entry for entry in self._entries.values())
            and len(msgspec.json.encode(self._entries)) + _BYTES_OF_A_PART * (self._world_size + 64)
            <= MOST_INLINE
        )

    def check(self, stored: _Stored, plans: Mapping[int, Plan]) -> None:
        """Raise IntegrityError for the first entry that does not describe what these
        ranks hold.
        """
        self._coordinates = [
            {
                rank: at
                for rank, at in zip(mesh.all_ranks(), mesh.coordinates(), strict=True)
                if rank in plans
            }
            for mesh in self._meshes
        ]
        spread: dict[str, tuple[Shape, set[Box]]] = {}
        for name, entry in self._entries.items():
            if name.startswith(HIDDEN):
                raise IntegrityError(
                    f"the metadata have an entry for {name!r}, but a name that starts with "
                    f"{HIDDEN!r} is the name of a hidden item, which must not appear in the "
                    f"metadata"
                )
            if self._is_usual(entry, stored.items.get(name)):
                continue
            check_entry(name, entry, self._meshes, self._world_size)
            size = tuple(entry.get("size", ()))
            found = stored.get(name)
            if found is not None and (
                found[0] != entry["dtype"] or (found[0] != BLOB and found[1] != size)
            ):
                raise IntegrityError(
                    f"the metadata say that {name!r} has the dtype {entry['dtype']} and the size "
                    f"{list(size)}; rank "
                    f"{stored.a_rank_of(name)} stores it as {found[0]} of the size {list(found[1])}"
                )
            there: Mapping[Box | None, list[int]] = {} if found is None else found[2]
            places = set[Any]()
            for box, rank in self._places(entry):
                if _is_left_out(box, size):
                    continue
                places.add(box)
                if not self._names_ranks and (box in there or len(plans) < self._world_size):
                    continue
                if rank in plans and rank not in there.get(box, ()):
                    raise IntegrityError(
                        f"the metadata say that rank {rank} stores {_shown(name, box)}; the plan "
                        f"of that rank has no such item"
                    )
            for box, ranks in there.items():
                if box not in places and not _is_left_out(box, size):
                    raise IntegrityError(
                        f"rank {ranks[0]} stores {_shown(name, box)}, which the metadata do not "
                        f"describe"
                    )
            if len(plans) < self._world_size and "chunks" in entry:
                spread[name] = size, places
        if sum(len(places) for _, places in spread.values()) <= _MOST_SPREAD:
            check_all(spread)

    @staticmethod
    def _is_usual(entry: Described, found: tuple[str, Shape, Boxes] | None) -> bool:
        """Return True for a sound entry of a tensor that one rank of this node stores
        whole, as most entries are.
        """
        if (
            found is None
            or entry.keys() not in _USUAL
            or len(chunks := entry["chunks"]) != 1
            or len(found[2]) != 1
        ):
            return False
        size, ranks = tuple(entry["size"]), entry.get("ranks", _FIRST)
        box = (tuple(chunks[0][0]), tuple(chunks[0][1]))
        return (
            (entry["dtype"], size, size) == (found[0], found[1], box[1])
            and len(ranks) == 1
            and ranks[0] in found[2].get(box, ())
        )

    def _places(self, entry: Described) -> Iterator[tuple[Box | None, int]]:
        """Yield the place of each shard, and its rank.

        Of a tensor that is divided by a rule, yield only the shards of the ranks of
        this node.
        """
        if "rule" not in entry:
            yield from stored_places(entry, self._meshes)
            return
        rule = entry["rule"] if isinstance(entry["rule"], Rule) else Rule(*entry["rule"])
        mesh = self._meshes[rule.mesh]
        for rank, coordinate in self._coordinates[rule.mesh].items():
            found = place(entry["size"], mesh, rule.splits, coordinate)
            if replica_of(mesh, rule.splits, coordinate) == rule.replica and 0 not in found[1]:
                yield found, rank


def _is_left_out(box: Box | None, size: Shape) -> bool:
    """Return True for a shard without elements of a tensor that has some: such a shard
    need not be stored.
    """
    return box is not None and 0 in box[1] and 0 not in size


def _shown(name: str, box: Box | None) -> str:
    return repr(name) if box is None else f"the shard {list(box[1])} at {list(box[0])} of {name!r}"
