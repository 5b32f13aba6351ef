"""Passes the daemon of each rank to the coordinator, and a ticket, which is the
coordinator's decision on one save, to each rank.

Both go over the job's store, and neither in a plan of DCP: a planner that caches plans
replaces the plan of this save by that of an earlier one.
"""

from __future__ import annotations

import os
import threading

import msgspec
import torch.distributed as dist

from ckptd.agent.dcp.targets import RankDaemon, SaveTicket
from ckptd.agent.link.arguments import job_store
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.location import Location


class Ticket(msgspec.Struct, frozen=True, rename={"save": "claimed"}):
    """The coordinator's decision for one rank and one save.

    global_plan: 32 random bytes that identify this save on all ranks. save: the attempt
    and the step of a save through a daemon, or None if the ranks write the checkpoint
    themselves.
    """

    path: str
    rank: int
    world_size: int
    global_plan: bytes
    save: SaveTicket | None


def show(path: Location, rank: int, found: RankDaemon) -> None:
    """Tell the coordinator which daemon serves this rank.

    Runs on ranks 1 and up, before DCP collects the plans.
    """
    with _lock:
        _own.pop(str(path.parent), None)
        _own[str(path.parent)] = found
        if len(_own) > _MOST_JOBS:
            del _own[next(iter(_own))]
        job_store().set(_daemons_key(rank), msgspec.msgpack.encode(_own))  # type: ignore[arg-type]


_lock = threading.Lock()
_own: dict[str, RankDaemon] = {}
"""The daemons that this rank has shown, by the directory of the job. One key of the
store holds them all, so that a finished job leaves no key behind.
"""
_MOST_JOBS = 32


def shown(path: Location, world_size: int) -> list[RankDaemon | None]:
    """Return the daemons of ranks 1 and up, with None for a rank that saves elsewhere.

    Runs on the coordinator, after it has received the plans.
    """
    if world_size == 1:
        return []
    store, keys = job_store(), [_daemons_key(rank) for rank in range(1, world_size)]
    there = [key for key in keys if store.check([key])] if not store.check(keys) else keys
    found = dict(zip(there, store.multi_get(there) if there else [], strict=True))
    return [
        _DAEMONS_DECODER.decode(found[key]).get(str(path.parent)) if key in found else None
        for key in keys
    ]


def send(tickets: list[Ticket]) -> None:
    """Publish the tickets of ranks 1 and up.

    Runs on the coordinator, before DCP sends out the plans.
    """
    if len(tickets) > 1:
        store = job_store()
        for ticket in tickets[1:]:
            store.set(_key(ticket.path, ticket.rank), msgspec.msgpack.encode(ticket))  # type: ignore[arg-type]  # the store takes bytes too


def receive(path: str, rank: int) -> Ticket:
    """Return this rank's ticket, and remove it from the store.

    Runs after DCP has sent out the plans.

    Raises InvalidRequest if there is no ticket, because the coordinator saves to
    another path.
    """
    if dist.is_initialized():
        store, key = job_store(), _key(path, rank)
        if store.check([key]):
            encoded = store.get(key)
            store.delete_key(key)  # so that a later save to another path does not find it
            return _DECODER.decode(encoded)
    raise InvalidRequest(
        f"this rank saves to {path}, but the coordinator saves to another path: use the same path "
        f"on all ranks"
    )


def _key(path: str, rank: int) -> str:
    return f"ticket/{rank}:{path}"


def _daemons_key(rank: int) -> str:
    return f"daemons/{rank}"


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
_DECODER = msgspec.msgpack.Decoder(Ticket)
_DAEMONS_DECODER = msgspec.msgpack.Decoder(dict[str, RankDaemon])
