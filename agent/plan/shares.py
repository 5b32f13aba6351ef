"""Decides on rank 0 which rank writes which items, and so makes the plan that all ranks
share.

DCP's planner decides with `create_global_plan`: an item that several ranks hold is
written once, and the bytes are balanced over the ranks. Before that, the offers of the
ranks are compared: dtypes and shapes, the bytes of replicated tensors, and plain
values. A difference fails the snapshot with an error that names the key and the ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckptd.agent.plan.layout import Layout, Local, Row, RowKey, lay_out
from ckptd.agent.plan.replica_groups import ALONE, ReplicaGroup, SharedRows, grouped, held_by_each
from ckptd.agent.state.dtypes import dtype_of, sizeless
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats.plan import HIDDEN


class Offer(msgspec.Struct, frozen=True):
    """The items that one rank could write, as sent to rank 0.

    `values` has a digest of each plain value, by key.
    """

    rows: list[Row]
    values: dict[str, bytes] = {}


class Share(msgspec.Struct, frozen=True):
    """The items that one rank is to write.

    `rows` are the numbers of the rank's rows, and `aliases` the fqns of its aliases.
    `global_plan` is the digest of the plan that all ranks share. `metadata` describes
    the tensors of all ranks. It is None on every rank but rank 0. `held` has the
    replica groups of the rank's rows.
    """

    rows: list[int]
    aliases: list[str]
    global_plan: bytes
    metadata: dict[str, Any] | None = None
    held: SharedRows = SharedRows()

    def lay_out(self, local: Local) -> Layout:
        return lay_out(
            local,
            self.rows,
            aliases=set(self.aliases),
            metadata=self.metadata,
            global_plan=self.global_plan,
        )

    def replica_groups(self, local: Local) -> list[ReplicaGroup]:
        ranks = [tuple(group) for group in self.held.groups]
        shared = (
            (number, ranks[group])
            for number, group in enumerate(self.held.of_row)
            if group != ALONE
        )
        return grouped(local.rows, shared, self.held.scattered)


def share_out(offers: list[Offer]) -> list[Share]:
    """Return one share for each rank, in rank order.

    Raises UnsavableValue, naming the key, if the offers of two ranks contradict each
    other or the shards do not make up whole tensors.
    """
    if len(offers) == 1 and all(row.sizes == row.size for row in offers[0].rows):
        # One rank that has all writes all.
        kept = [[number for number, row in enumerate(offers[0].rows) if not row.base]]
    else:
        kept = _planned(offers)
    aliases = _place_aliases(offers, kept)
    metadata = _metadata(offers, kept, aliases)
    global_plan = hashlib.sha256(msgspec.msgpack.encode([metadata, kept, aliases])).digest()
    held = held_by_each([offer.rows for offer in offers]) if len(offers) > 1 else [SharedRows()]
    return [
        Share(rows, aliases[rank], global_plan, metadata if rank == 0 else None, held[rank])
        for rank, rows in enumerate(kept)
    ]


def _planned(offers: list[Offer]) -> list[list[int]]:
    """Compare the offers, and return for each rank the numbers of the rows that DCP's
    planner gives to it. Raises as `share_out`.
    """
    _compare_values(offers)
    _compare_rows(offers)
    plans = [_save_plan(rows) for rows in _without_copies_of_buffers(offers)]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, is_coordinator=True)
    try:
        finished, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise UnsavableValue(
            f"the shards of all ranks do not make whole tensors: {error}"
        ) from None
    kept: list[list[int]] = []
    for offer, plan in zip(offers, finished, strict=True):
        wanted = {(write.index.fqn, tuple(write.index.offset or ())) for write in plan.items}
        kept.append(
            [number for number, row in enumerate(offer.rows) if row.key in wanted and not row.base]
        )
    return kept


def _place_aliases(offers: list[Offer], kept: list[list[int]]) -> list[list[str]]:
    """Return the aliases that each rank lists.

    An alias is listed by the first rank that both has the alias and writes the base
    tensor of the alias. If no rank that has the alias writes the base, the first rank
    that has the alias writes it as an item. The row of that item is added to `kept`. A
    tensor that is an item on any rank is not listed as an alias.
    """
    written = [
        {offer.rows[number].fqn for number in rows}
        for offer, rows in zip(offers, kept, strict=True)
    ]
    items = {row.fqn for offer in offers for row in offer.rows if not row.base}
    aliases: list[list[str]] = [[] for _ in offers]
    held: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        for number, row in enumerate(offer.rows):
            if row.base and row.fqn not in items:
                held[row.fqn].append((rank, number))
    for fqn, places in held.items():
        beside = next(
            (rank for rank, number in places if offers[rank].rows[number].base in written[rank]),
            None,
        )
        if beside is not None:
            aliases[beside].append(fqn)
        else:
            rank, number = places[0]
            kept[rank].append(number)
    return aliases


def _compare_values(offers: list[Offer]) -> None:
    first: dict[str, tuple[int, bytes]] = {}
    for rank, offer in enumerate(offers):
        for key, found in offer.values.items():
            other, expected = first.setdefault(key, (rank, found))
            if found != expected:
                where = f"{key or 'the state'} differs between ranks {other} and {rank}"
                raise UnsavableValue(
                    f"{where}: make it the same on all ranks, or mark it as each rank's own with "
                    f"per_rank(...)"
                )


def _compare_rows(offers: list[Offer]) -> None:
    shapes: dict[str, tuple[int, str, tuple[int, ...]]] = {}
    copies: dict[RowKey, tuple[int, bytes]] = {}
    covered: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    for rank, offer in enumerate(offers):
        for row in offer.rows:
            other, dtype, size = shapes.setdefault(row.fqn, (rank, row.dtype, row.size))
            if (row.dtype, row.size) != (dtype, size):
                raise UnsavableValue(
                    f"{row.fqn} is {dtype} {list(size)} on rank {other} and {row.dtype} "
                    f"{list(row.size)} on rank {rank}: a tensor "
                    "must be the same on all ranks, a shard (a DTensor), or marked as each rank's "
                    "own (per_rank)"
                )
            covered[row.fqn][row.offsets] = math.prod(row.sizes)
            if row.digest:
                other, bytes_there = copies.setdefault(row.key, (rank, row.digest))
                if row.digest != bytes_there:
                    raise UnsavableValue(
                        f"{row.fqn} differs between ranks {other} and {rank}, and is not split "
                        f"between them: make it a DTensor over all "
                        "ranks, give different tensors different keys, or mark it as each rank's "
                        "own with per_rank(...)"
                    )
    for fqn, parts in covered.items():
        if sum(parts.values()) != math.prod(shapes[fqn][2]):
            raise UnsavableValue(
                f"{fqn}: the shards of all ranks hold {sum(parts.values())} of its "
                f"{math.prod(shapes[fqn][2])} elements"
            )


def _without_copies_of_buffers(offers: list[Offer]) -> Iterable[list[Row]]:
    """Yield, rank by rank, the rows that are given to DCP's planner.

    Rows that may become aliases are left out.

    A buffer of a module is taken from the lowest rank that has it, as
    DistributedDataParallel does, because the buffers of the other ranks may differ.
    """
    taken: set[RowKey] = set()
    for offer in offers:
        yield [row for row in offer.rows if not row.base and not (row.buffer and row.key in taken)]
        taken |= {row.key for row in offer.rows if row.buffer and not row.base}


def _save_plan(rows: list[Row]) -> SavePlan:
    """Return the rows as DCP's plan.

    All items are of type SHARD: DCP refuses a TENSOR after a SHARD of the same name. The
    dtype of a tensor whose dtype has no size is uint8.
    """
    return SavePlan([
        WriteItem(
            index=MetadataIndex(row.fqn, torch.Size(row.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(row.offsets), torch.Size(row.sizes)),
                properties=TensorProperties(
                    dtype=torch.uint8 if sizeless(row.dtype) else dtype_of(row.dtype)
                ),
                size=torch.Size(row.size),
            ),
        )
        for row in rows
    ])  # fmt: skip


def _metadata(
    offers: list[Offer], kept: list[list[int]], aliases: list[list[str]]
) -> dict[str, Any]:
    """Return DCP's `state_dict_metadata` of all ranks as plain data, without hidden
    items, and the rank that stores each shard.

    kept, aliases: the numbers of the rows that each rank writes, and the aliases that
    it lists.
    """
    described: dict[str, Any] = {}
    rows = [row for offer in offers for row in offer.rows if not row.fqn.startswith(HIDDEN)]
    for row in [*(row for row in rows if not row.base), *(row for row in rows if row.base)]:
        chunk = [row.offsets, row.sizes]
        entry = described.get(row.fqn)
        if entry is None:
            described[row.fqn] = {"dtype": row.dtype, "size": row.size, "chunks": [chunk]}
        elif chunk not in entry["chunks"]:
            entry["chunks"].append(chunk)
    if len(offers) > 1:
        stored = {
            offer.rows[number].key: rank
            for rank, offer in enumerate(offers)
            for number in kept[rank]
        }
        listed = {fqn: rank for rank, fqns in enumerate(aliases) for fqn in fqns}
        for fqn, entry in described.items():
            if any(
                ranks := [
                    stored.get((fqn, offsets), listed.get(fqn, 0)) for offsets, _ in entry["chunks"]
                ]
            ):
                entry["ranks"] = ranks
    return described
