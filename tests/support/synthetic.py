"""Synthetic jobs: what each rank of a job of any size would describe and plan, without
its processes and without its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ckptd.agent.plan.by_rule import WHOLE, ByRule, Ruled, Structured, Summary, digest_of
from ckptd.agent.plan.layout import Layout, Local, Row
from ckptd.agent.plan.rule_shares import Decision, decide, representatives
from ckptd.shared.formats.sharding import Mesh, Splits, place


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a synthetic job.

    `mesh` is the number of its kind of mesh, or WHOLE if each rank has all of it.
    """

    fqn: str
    size: tuple[int, ...]
    mesh: int = WHOLE
    splits: Splits = ()
    dtype: str = "float32"
    buffer: bool = False
    base: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A synthetic job.

    meshes: for each kind of mesh, a function that returns the mesh of a rank. has: True
    if a rank has a tensor. content: stands for the digest of a tensor's bytes on a
    rank.
    """

    world_size: int
    tensors: Sequence[Tensor]
    meshes: Sequence[Callable[[int], Mesh]] = ()
    values: dict[str, bytes] | None = None
    has: Callable[[Tensor, int], bool] = lambda tensor, rank: True
    content: Callable[[Tensor, int], bytes] = lambda tensor, rank: b"12345678"
    extras: Callable[[int], list[Row]] = lambda rank: []

    def description(self, rank: int) -> ByRule:
        """Return what `ByRule.of` returns for the tensors of this rank."""
        rows, numbers, found, contents = (
            list[Row](),
            list[int | None](),
            list[Ruled](),
            dict[Any, list[tuple[str, bytes]]](),
        )
        meshes = [of(rank) for of in self.meshes]
        coordinates = [mesh.coordinate_of(rank) for mesh in meshes]
        for tensor in self.tensors:
            if not self.has(tensor, rank):
                continue
            digest = b"" if tensor.buffer else self.content(tensor, rank)
            whole = tensor.mesh == WHOLE
            offsets, sizes = (0,) * len(tensor.size), tensor.size
            if not whole:
                coordinate = coordinates[tensor.mesh]
                assert coordinate is not None
                offsets, sizes = place(tensor.size, meshes[tensor.mesh], tensor.splits, coordinate)
            ruled = Ruled(
                tensor.fqn,
                tensor.dtype,
                tensor.size,
                tensor.mesh,
                tensor.splits,
                tensor.buffer,
                tensor.base,
                digest if whole else b"",
            )
            found.append(ruled)
            if 0 in sizes and not whole:
                numbers.append(None)
            else:
                numbers.append(len(rows))
                rows.append(Row(
                    tensor.fqn, tensor.dtype, tensor.size, offsets, sizes, None, "cpu", False, True,
                    tensor.buffer, digest, tensor.base,
                ))  # fmt: skip
            if not whole:
                contents.setdefault((tensor.mesh, ruled.along), []).extend(
                    [(tensor.fqn, digest)] if digest and 0 not in sizes else []
                )
        structured = Structured([mesh.shape for mesh in meshes], found, self.values or {})
        extras = self.extras(rank)
        summary = Summary(
            digest_of(structured),
            meshes,
            [
                digest_of(contents[family]) if contents[family] else b""
                for family in structured.families()
            ],
            extras,
        )
        first = len(rows)
        return ByRule(
            Local([*rows, *extras]),
            structured,
            summary,
            numbers,
            list(range(first, first + len(extras))),
        )

    def summaries(self) -> Iterator[Summary]:
        return (self.description(rank).summary for rank in range(self.world_size))

    def plan(self) -> Planned | None:
        """Plan as the ranks would, all of them here.

        Return None if they would have to send their items.
        """
        described = [self.description(rank) for rank in range(self.world_size)]
        summaries = [one.summary for one in described]
        structures = {
            name: Structured.decode(described[rank].structured.encode())
            for name, rank in representatives(summaries).items()
        }
        decision = decide(summaries, structures)
        if decision is None:
            return None
        layouts = [
            one.lay_out(
                decision.shares[one.summary.structure],
                rank,
                decision.metadata if rank == 0 else None,
            )
            for rank, one in enumerate(described)
        ]
        return Planned(decision, layouts)

    def changed(self, **changes: Any) -> Job:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a synthetic job: the decision of rank 0, and the layout of each rank."""

    decision: Decision
    layouts: list[Layout]

    @property
    def meshes(self) -> list[Mesh]:
        found = self.layouts[0].plan.meshes
        return [] if isinstance(found, msgspec.UnsetType) else found

    def stored(self) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
        """Return offsets, sizes and rank of every item that is written, by fqn."""
        found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}
        for rank, layout in enumerate(self.layouts):
            for item in layout.plan.items:
                found.setdefault(item.fqn, []).append((item.offsets, item.sizes, rank))
        return found


def fsdp(world_size: int) -> Callable[[int], Mesh]:
    """Return one mesh of all ranks."""
    return lambda rank: Mesh((world_size,), 0, (1,))


def grid(rows: int, columns: int) -> Callable[[int], Mesh]:
    """Return one mesh of two dimensions."""
    return lambda rank: Mesh((rows, columns), 0, (columns, 1))


def rows_of(columns: int) -> Callable[[int], Mesh]:
    """Return a mesh for each group of `columns` ranks in a row, as tensor parallelism
    inside a node has it.
    """
    return lambda rank: Mesh((columns,), rank // columns * columns, (1,))


def transformer(
    layers: int, width: int, *, mesh: int, splits: Splits, whole: int = 2
) -> list[Tensor]:
    """Return the tensors of a transformer and of AdamW: weight and two moments of seven
    matrices and two vectors a layer.
    """
    found = []
    for layer in range(layers):
        for name, size in (
            *((f"attention.{part}", (width, width)) for part in ("wq", "wk", "wv", "wo")),
            *((f"feed_forward.w{part}", (4 * width, width)) for part in (1, 2, 3)),
            ("attention_norm", (width,)),
            ("ffn_norm", (width,)),
        ):
            own = splits if len(size) > 1 else tuple(split for split in splits if split[1] == 0)
            for prefix, suffix in (
                ("model", "weight"),
                ("optim.state", "weight.exp_avg"),
                ("optim.state", "weight.exp_avg_sq"),
            ):
                found.append(Tensor(f"{prefix}.layers.{layer}.{name}.{suffix}", size, mesh, own))
    return found + [
        Tensor(f"model.rope.{number}", (width,), buffer=True) for number in range(whole)
    ]
