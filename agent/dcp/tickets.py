"""Passes the coordinator's decision on one save, a ticket, to each rank over the job's store.

DCP sends a plan to each rank, but a planner that caches plans replaces it by the plan of an earlier save. So a ticket does not travel in a
plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

from ckptd.agent.dcp.targets import Claim
from ckptd.shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Ticket:
    """The coordinator's decision for one rank and one save.

    claimed: the claim for a save through a daemon, or None if the ranks write the checkpoint themselves. global_plan: 32 random bytes that
    all ranks of this save share, and no other save has.
    """

    path: str
    rank: int
    world_size: int
    global_plan: bytes
    claimed: Claim | None


def send(tickets: list[Ticket]) -> None:
    """Publish the tickets of ranks 1 and up. Runs on the coordinator, before DCP sends out the plans."""
    if len(tickets) > 1:
        store = _store()
        for ticket in tickets[1:]:
            store.set(_key(ticket.path, ticket.rank), msgspec.msgpack.encode(ticket))  # type: ignore[arg-type]  # the store takes bytes too


def receive(path: str, rank: int) -> Ticket:
    """Return this rank's ticket, and remove it from the store. Runs after DCP has sent out the plans.

    Raises InvalidRequest if there is no ticket, because the coordinator saves to another path.
    """
    if dist.is_initialized():
        store, key = _store(), _key(path, rank)
        if store.check([key]):
            encoded = store.get(key)
            store.delete_key(key)  # so that a later save to another path does not find it
            return _DECODER.decode(encoded)
    raise InvalidRequest(f"this rank saves to {path}, but the coordinator saves to another path: use the same path on all ranks")


def _store() -> Store:
    """Return a new connection to the store of the default process group. A thread that waits on an existing connection blocks it."""
    group = dist.group.WORLD
    assert group is not None
    return PrefixStore("ckptd-tickets", _get_process_group_store(group).clone())  # type: ignore[attr-defined]


def _key(path: str, rank: int) -> str:
    return f"{rank}:{path}"


_DECODER = msgspec.msgpack.Decoder(Ticket)
