"""Checks the plans of a snapshot together: every tensor is whole, and the metadata
describe what the parts hold (FORMAT.md, section 3).

A plan that is sound by itself may still have a hole in a tensor, contradict the plan of
another rank, or lack what the metadata promise. A reader would refuse such a
checkpoint. This module does no I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.coverage import check_alike, two_sizes
from ckptd.shared.formats.manifest import MOST_INLINE
from ckptd.shared.formats.metadata_object import check_entry, stored_places
from ckptd.shared.formats.plan import BLOB, HIDDEN, Alias, Described, Item, Plan
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
    stored = _Stored(plans)
    if len(plans) == world_size:
        check_alike(stored.tensors())
    names = frozenset(name for name in stored.held if not name.startswith(HIDDEN))
    first = plans.get(0)
    if first is None:
        return names if len(plans) == world_size else None
    described = first.metadata or {}
    if missing := sorted(names - described.keys()):
        lack = "do not describe" if described else "are missing: they must describe"
        raise IntegrityError(
            f"the metadata in the plan of rank 0 {lack} {missing[0]!r}, which rank "
            f"{stored.held[missing[0]].a_rank} stores"
        )
    _Metadata(first, world_size).check(stored, plans)
    return names | described.keys()


@dataclass(frozen=True, slots=True, eq=False)
class _Holding:
    """The dtype and the size of a tensor, and the ranks that store each of its shards.

    The place of a blob is None. Tensors that are alike in all of this share one object, so
    that it is checked once.
    """

    dtype: str
    size: Shape
    boxes: dict[Box | None, list[int]]
    is_alias: bool = False

    @property
    def a_rank(self) -> int:
        return next(iter(self.boxes.values()))[0]

    @classmethod
    def of_all(cls, name: str, holdings: Sequence[_Holding]) -> _Holding:
        """Return all shards of a tensor, given those of each part and item.

        Raises IntegrityError if they cannot be shards of one tensor.
        """
        first, boxes = holdings[0], defaultdict[Box | None, list[int]](list)
        for holding in holdings:
            if first.is_alias != holding.is_alias:
                raise IntegrityError(f"{name!r} is an item and an alias at once")
            if first.dtype != holding.dtype:
                raise IntegrityError(
                    f"{name!r} has two dtypes: {first.dtype}, and {holding.dtype} in the plan of "
                    f"rank {holding.a_rank}"
                )
            if first.size != holding.size and first.dtype != BLOB:
                raise two_sizes(name, first.size, holding.size)
            for box, ranks in holding.boxes.items():
                boxes[box] += ranks
        return cls(first.dtype, first.size, dict(boxes), first.is_alias)


class _Stored:
    """The tensors of all parts. `held` has them by name."""

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self.held: dict[str, _Holding] = {}
        self._several: dict[str, list[_Holding]] = {}
        for rank, plan in sorted(plans.items()):
            self._add(plan, rank)
        joined: dict[tuple[_Holding, ...], _Holding] = {}
        for name, holdings in self._several.items():
            key = tuple(holdings)
            if key not in joined:
                joined[key] = _Holding.of_all(name, holdings)
            self.held[name] = joined[key]

    def _add(self, plan: Plan, rank: int) -> None:
        kinds = [(item.dtype, item.size, item.offsets, item.sizes) for item in plan.items]
        firsts = dict(zip(reversed(kinds), reversed(plan.items), strict=True))
        made = {kind: _item_holding(item, rank) for kind, item in firsts.items()}
        self._put([item.fqn for item in plan.items], list(map(made.__getitem__, kinds)))
        self._put(
            [alias.fqn for alias in plan.aliases],
            [_alias_holding(alias, rank) for alias in plan.aliases],
        )

    def _put(self, names: list[str], holdings: list[_Holding]) -> None:
        found = dict(zip(names, holdings, strict=True))
        if len(found) == len(names) and self.held.keys().isdisjoint(found):
            self.held.update(found)
            return
        for name, holding in zip(names, holdings, strict=True):
            if (known := self.held.get(name)) is None:
                self.held[name] = holding
            else:
                self._several.setdefault(name, [known]).append(holding)

    def tensors(self) -> list[tuple[str, Shape, set[Box], int]]:
        """Return the items that are tensors, as `check_alike` takes them."""
        firsts = dict(zip(reversed(self.held.values()), reversed(self.held), strict=True))
        return [
            (firsts[holding], holding.size, set(holding.boxes), count)  # type: ignore[arg-type]
            for holding, count in Counter(self.held.values()).items()
            if holding.dtype != BLOB and not holding.is_alias
        ]


def _item_holding(item: Item, rank: int) -> _Holding:
    if item.dtype != BLOB:
        return _Holding(item.dtype, item.size, {(item.offsets, item.sizes): [rank]})
    if len(item.size) != 1 or item.sizes != item.size or any(item.offsets):
        raise IntegrityError(
            f"{item.fqn!r} is a value of the size {list(item.size)} at {list(item.offsets)}; "
            f"expected one dimension, at 0"
        )
    return _Holding(item.dtype, item.size, {None: [rank]})


def _alias_holding(alias: Alias, rank: int) -> _Holding:
    if alias.fqn.startswith(HIDDEN):
        raise IntegrityError(f"the alias {alias.fqn!r} has the name of a hidden item")
    whole = (0,) * len(alias.size), alias.size
    return _Holding(alias.dtype, alias.size, {whole: [rank]}, is_alias=True)


_MOST_SPREAD = 1 << 18
"""The most shards of a job of several nodes that are checked for holes and overlaps by
the metadata. More would take many seconds.
"""
_BYTES_OF_A_PART = 512
"""The most bytes of the entry of a part in a manifest."""


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
        if hidden := next((name for name in self._entries if name.startswith(HIDDEN)), ""):
            raise IntegrityError(
                f"the metadata have an entry for {hidden!r}, but a name that starts with "
                f"{HIDDEN!r} is the name of a hidden item, which must not appear in the "
                f"metadata"
            )
        spread: list[tuple[str, Shape, set[Box], int]] = []
        # Many tensors that are stored alike share their entry, too: it is checked once.
        alike = defaultdict[tuple[int, int], list[str]](list)
        held = stored.held.get
        for name, entry in self._entries.items():
            alike[id(held(name)), id(entry)].append(name)
        for several in alike.values():
            name, entry = several[0], self._entries[several[0]]
            places = self._check_entry(name, entry, held(name), plans)
            if len(plans) < self._world_size and "chunks" in entry:
                spread.append((name, tuple(entry["size"]), places, len(several)))
        if sum(len(places) * count for _, _, places, count in spread) <= _MOST_SPREAD:
            check_alike(spread)

    def _check_entry(
        self, name: str, entry: Described, found: _Holding | None, plans: Mapping[int, Plan]
    ) -> set[Any]:
        """Compare an entry with what these ranks hold, and return the places of its
        shards.
        """
        check_entry(name, entry, self._meshes, self._world_size)
        size = tuple(entry.get("size", ()))
        if found is not None and (
            found.dtype != entry["dtype"] or (found.dtype != BLOB and found.size != size)
        ):
            raise IntegrityError(
                f"the metadata say that {name!r} has the dtype {entry['dtype']} and the size "
                f"{list(size)}; rank {found.a_rank} stores it as {found.dtype} of the size "
                f"{list(found.size)}"
            )
        there: Mapping[Box | None, list[int]] = {} if found is None else found.boxes
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
        return places

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
