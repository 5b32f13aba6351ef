"""Reports the ranks of a job and what is in their slots, for `ckptd status --json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptd.daemon.job.catalog import Job, Step
from ckptd.daemon.job.ranks import NOT_KNOWN
from ckptd.daemon.memory.slots import Slot

FREE, FILLING, SEALED = "free", "filling", "sealed"
"""The states of a slot before the snapshot in it has sealed on all ranks. Afterwards it
has the state of the snapshot.
"""


def ranks_report(job: Job, slots: Iterable[Slot], most: int) -> list[dict[str, Any]]:
    """Return the ranks of the newest attempt of a job that are on this node, by number.

    slots: the slots of the job. most: how many ranks are returned at most. A rank whose
    process is not known, as after a restart of the daemon, has no `pid`.
    """
    holders = {segment: step for step in job.steps.values() for segment in step.slots}
    held: dict[int, list[dict[str, Any]]] = {rank: [] for rank in job.ranks.owners}
    for slot in sorted(slots, key=lambda slot: slot.header.slot):
        if slot.header.attempt == job.attempt:
            found = _slot(slot, holders.get(slot.name))
            held.setdefault(slot.header.rank, []).append(found)
    return [_rank(job, rank, held[rank]) for rank in sorted(held)[:most]]


def _rank(job: Job, rank: int, slots: list[dict[str, Any]]) -> dict[str, Any]:
    owner = job.ranks.owners.get(rank)
    process = NOT_KNOWN if owner is None else owner.process
    return {
        "rank": rank,
        "pid": process.pid or None,
        "connected": owner is not None and owner.notify is not None,
        "slots": slots,
    }


def _slot(slot: Slot, step: Step | None) -> dict[str, Any]:
    if step is None:
        return {"bytes": slot.nbytes, "state": FREE, "step": None}
    if step.snapshot is None or slot.header.rank not in step.snapshot.seals:
        state = FILLING
    else:
        state = SEALED if step.filling else step.snapshot.state.value
    return {"bytes": slot.nbytes, "state": state, "step": step.number}
