"""Decides on rank 0 which rank writes which tensors, from descriptions by rule.

The work grows with the number of tensors and the number of ranks, not with their
product. Where the descriptions contradict each other, or leave open whether they do,
`decide` gives up, and the ranks send their items instead: `shares.py` then plans, or
names the difference.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptd.agent.plan.by_rule import WHOLE, Family, Ruled, RuledShare, Structured, Summary, stacked
from ckptd.agent.plan.replica_groups import ALONE, SharedRows
from ckptd.agent.plan.shares import Offer, share_out
from ckptd.shared.formats.plan import HIDDEN
from ckptd.shared.formats.sharding import Mesh, Splits, replicas


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan of all ranks. shares: by the digest of a structure. metadata: that of
    all tensors, for the plan document of rank 0.
    """

    shares: dict[bytes, RuledShare]
    metadata: dict[str, Any]


def representatives(summaries: Sequence[Summary]) -> dict[bytes, int]:
    """Return the lowest rank of each class, by the digest of its structure."""
    found: dict[bytes, int] = {}
    for rank, summary in enumerate(summaries):
        found.setdefault(summary.structure, rank)
    return found


def decide(summaries: Sequence[Summary], structures: Mapping[bytes, Structured]) -> Decision | None:
    """Return the plan of all ranks, or None if the ranks must send their items.

    summaries: of all ranks, in their order. structures: one of each class, by its
    digest. Raises UnsavableValue if the extras of two ranks contradict each other.
    """
    try:
        return _Planning(summaries, structures).decide()
    except _GivesUp:
        return None


class _GivesUp(Exception):
    """Raised if a rule does not hold on all ranks, or if that cannot be told from the
    descriptions.
    """


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """A group of ranks that each have the same whole tensors.

    There is one object for each group.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Divided:
    """Tensors that are divided alike: the number of their mesh in the plan, and their
    splits along it.
    """

    mesh: int
    splits: Splits


@dataclass(frozen=True, slots=True)
class _Extras:
    """The plan of the tensors without a rule.

    dropped: by rank, the numbers of the extras that it does not write. aliases: by
    rank, the names of the extras that it lists as aliases. metadata: that of all
    extras. held: by rank, the replica groups of its extras.
    """

    dropped: dict[int, list[int]] = field(default_factory=dict)
    aliases: dict[int, list[str]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    held: dict[int, SharedRows] = field(default_factory=dict)


Holders = tuple[tuple[bytes, int], ...]
"""The classes that have a tensor, each with the number of its mesh there."""


class _Planning:
    def __init__(
        self, summaries: Sequence[Summary], structures: Mapping[bytes, Structured]
    ) -> None:
        self._summaries, self._structures = summaries, structures
        self._ranks: dict[bytes, list[int]] = defaultdict(list)
        for rank, summary in enumerate(summaries):
            self._ranks[summary.structure].append(rank)
        self._families: dict[bytes, list[Family]] = {
            name: each.families() for name, each in structures.items()
        }
        self._meshes: dict[Mesh, int] = {}
        self._placed: dict[tuple[Holders, Splits], _Whole | _Divided] = {}
        self._wholes: dict[tuple[int, ...], _Whole] = {}

    def decide(self) -> Decision:
        self._compare_values()
        held: dict[str, list[tuple[bytes, Ruled]]] = defaultdict(list)
        for name, structure in self._structures.items():
            for tensor in structure.tensors:
                held[tensor.fqn].append((name, tensor))
        placed = {fqn: self._place(having) for fqn, having in held.items()}
        choices = self._choose({fqn: having[0][1] for fqn, having in held.items()}, placed)
        extras = self._plan_extras(held.keys())
        meshes = list(self._meshes)
        decided = {
            name: _mesh_and_choice(structure, placed, choices)
            for name, structure in sorted(self._structures.items())
        }
        told = [
            [summary.structure for summary in self._summaries],
            *decided.values(),
            meshes,
            sorted(extras.dropped.items()),
            sorted(extras.aliases.items()),
            extras.metadata,
        ]
        global_plan = hashlib.sha256(msgspec.msgpack.encode(told)).digest()
        wholes = {each: number for number, each in enumerate(self._wholes.values())}
        groups = [list(each.ranks) for each in wholes]
        group_of = {
            fqn: wholes[where] if isinstance(where, _Whole) and len(where.ranks) > 1 else ALONE
            for fqn, where in placed.items()
        }
        scattered = {
            fqn for fqn, having in held.items() if not all(tensor.in_order for _, tensor in having)
        }
        shares = {}
        for name, each in decided.items():
            fqns = [tensor.fqn for tensor in self._structures[name].tensors]
            out_of_order = [number for number, fqn in enumerate(fqns) if fqn in scattered]
            group = [group_of[fqn] for fqn in fqns]
            shares[name] = RuledShare(
                meshes,
                *each,
                extras.dropped,
                global_plan,
                groups,
                group,
                extras.held,
                out_of_order,
                extras.aliases,
            )
        metadata = {
            fqn: _described(having[0][1], placed[fqn], choices[fqn])
            for fqn, having in held.items()
            if not fqn.startswith(HIDDEN)
        }
        return Decision(shares, metadata | extras.metadata)

    def _compare_values(self) -> None:
        first: dict[str, bytes] = {}
        for structure in self._structures.values():
            if any(
                first.setdefault(key, digest) != digest for key, digest in structure.values.items()
            ):
                raise _GivesUp

    def _place(self, having: Sequence[tuple[bytes, Ruled]]) -> _Whole | _Divided:
        """Return where a tensor is.

        `having` has each class that has it, with its description there.
        """
        first = having[0][1]
        for _, other in having[1:]:
            same = (other.dtype, other.size, other.splits, other.buffer, other.base, other.digest)
            if same != (
                first.dtype,
                first.size,
                first.splits,
                first.buffer,
                first.base,
                first.digest,
            ):
                raise _GivesUp
        holders: Holders = tuple((name, tensor.mesh) for name, tensor in having)
        if (known := self._placed.get((holders, first.splits))) is None:
            known = self._placed[holders, first.splits] = self._place_anew(holders, first)
        return known

    def _place_anew(self, holders: Holders, tensor: Ruled) -> _Whole | _Divided:
        ranks = sorted(rank for name, _ in holders for rank in self._ranks[name])
        if any(mesh == WHOLE for _, mesh in holders):
            if not all(mesh == WHOLE for _, mesh in holders):
                raise _GivesUp
            return self._wholes.setdefault(tuple(ranks), _Whole(tuple(ranks)))
        of_rank = {
            rank: self._summaries[rank].meshes[mesh]
            for name, mesh in holders
            for rank in self._ranks[name]
        }
        several = sorted(set(of_rank.values()), key=lambda mesh: mesh.all_ranks())
        inside = [rank for mesh in several for rank in mesh.all_ranks()]
        # A rank of a mesh lacks the tensor, or has it on another mesh.
        apart = sorted(inside) != ranks or any(
            of_rank[rank] != mesh for mesh in several for rank in mesh.all_ranks()
        )
        if apart or len({mesh.shape for mesh in several}) > 1:
            raise _GivesUp
        mesh = (
            several[0] if len(several) == 1 else Mesh.of((len(several), *several[0].shape), inside)
        )
        splits = stacked(tensor.splits, mesh, several[0].shape)
        self._compare_contents(
            mesh,
            splits,
            {rank: (name, number) for name, number in holders for rank in self._ranks[name]},
            tensor.along,
        )
        return _Divided(self._meshes.setdefault(mesh, len(self._meshes)), splits)

    def _compare_contents(
        self,
        mesh: Mesh,
        splits: Splits,
        held: Mapping[int, tuple[bytes, int]],
        own_along: tuple[int, ...],
    ) -> None:
        """Give up unless the digests of all replicas are the same.

        `held`: the class of each rank, and the number of its mesh there.
        """
        along = sorted(each for each, _ in splits)
        first: dict[tuple[int, ...], bytes] = {}
        for rank, coordinate in zip(mesh.all_ranks(), mesh.coordinates(), strict=True):
            name, number = held[rank]
            digest = self._summaries[rank].contents[self._families[name].index((number, own_along))]
            if first.setdefault(tuple(coordinate[each] for each in along), digest) != digest:
                raise _GivesUp

    def _choose(
        self, tensors: Mapping[str, Ruled], placed: Mapping[str, _Whole | _Divided]
    ) -> dict[str, int]:
        """Choose which replica of each tensor is stored: those of one group of ranks in
        equal shares by bytes, the largest first.

        A buffer is stored by the lowest rank that has it, because buffers of other
        ranks may differ. An alias is listed beside its base.
        """
        choices: dict[str, int] = {}
        groups: dict[object, list[Ruled]] = defaultdict(list)
        for fqn, tensor in tensors.items():
            where = placed[fqn]
            if tensor.base:
                continue
            if tensor.buffer:
                choices[fqn] = where.ranks[0] if isinstance(where, _Whole) else 0
            elif isinstance(where, _Whole):
                groups[id(where)].append(tensor)
            else:
                groups[where.mesh, tuple(sorted(along for along, _ in where.splits))].append(tensor)
        for number, members in enumerate(groups.values()):
            where = placed[members[0].fqn]
            sharers = (
                list(where.ranks)
                if isinstance(where, _Whole)
                else range(replicas(list(self._meshes)[where.mesh], where.splits))
            )
            for tensor, sharer in zip(
                members,
                _in_equal_shares([t.nbytes for t in members], len(sharers), number),
                strict=True,
            ):
                choices[tensor.fqn] = sharers[sharer]
        for fqn, tensor in tensors.items():
            if tensor.base:
                base = tensors.get(tensor.base)
                if base is None or base.base or placed[tensor.base] != placed[fqn]:
                    raise _GivesUp
                choices[fqn] = choices[tensor.base]
        return choices

    def _plan_extras(self, ruled: Any) -> _Extras:
        """Plan the tensors without a rule."""
        if not any(summary.extras for summary in self._summaries):
            return _Extras()
        if any(row.fqn in ruled for summary in self._summaries for row in summary.extras):
            raise _GivesUp
        shares = share_out([Offer(summary.extras) for summary in self._summaries])
        dropped = {
            rank: sorted(set(range(len(summary.extras))).difference(share.rows))
            for rank, (summary, share) in enumerate(zip(self._summaries, shares, strict=True))
        }
        return _Extras(
            {rank: rows for rank, rows in dropped.items() if rows},
            {rank: sorted(share.aliases) for rank, share in enumerate(shares) if share.aliases},
            shares[0].metadata or {},
            {rank: share.held for rank, share in enumerate(shares) if share.held.groups},
        )


def _mesh_and_choice(
    structure: Structured, placed: Mapping[str, _Whole | _Divided], choices: Mapping[str, int]
) -> tuple[list[int], list[int]]:
    where = [placed[tensor.fqn] for tensor in structure.tensors]
    return [each.mesh if isinstance(each, _Divided) else WHOLE for each in where], [
        choices[tensor.fqn] for tensor in structure.tensors
    ]


def _in_equal_shares(sizes: Sequence[int], sharers: int, start: int) -> list[int]:
    """Return for each size the number of its sharer: by falling size, each goes to the
    sharer with the least so far.

    Of equals, the first one from `start` on takes it, so that the leftovers of several
    groups are not all the same rank's.
    """
    if sharers == 1:
        return [0] * len(sizes)
    found = [0] * len(sizes)
    loads = [(0, order, (order + start) % sharers) for order in range(sharers)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        load, order, sharer = loads[0]
        heapq.heapreplace(loads, (load + sizes[number], order, sharer))
        found[number] = sharer
    return found


def _described(tensor: Ruled, where: _Whole | _Divided, choice: int) -> dict[str, Any]:
    """Return the entry of a tensor in the metadata of a plan document (FORMAT.md,
    section 3).
    """
    if isinstance(where, _Whole):
        chunk = [[0] * len(tensor.size), tensor.size]
        return {"dtype": tensor.dtype, "size": tensor.size, "chunks": [chunk]} | (
            {"ranks": [choice]} if choice else {}
        )
    return {"dtype": tensor.dtype, "size": tensor.size, "rule": [where.mesh, where.splits, choice]}
