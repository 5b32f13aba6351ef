"""Reports the ranks of a job and what is in their slots, for `ckptd status --json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptd.daemon.job.catalog import Job, Step
from ckptd.daemon.job.ranks import NOT_KNOWN
from ckptd.daemon.memory.slots import Slot

MAX_RANKS, MAX_ALL_RANKS = 64, 1000
"""The most ranks of one job, and of all jobs, in one status report."""
FREE, FILLING, SEALED = "free", "filling", "sealed"
"""The states of a slot before the snapshot in it has sealed on all ranks. Afterwards it
has the state of the snapshot.
"""


def all_ranks_report(
    jobs: Iterable[Job], slots: Mapping[str, Iterable[Slot]]
) -> dict[str, dict[str, Any]]:
    """Return the parts of the jobs' reports that are about ranks, by job.

    slots: the slots by job. Jobs with connected ranks get their ranks first, because
    all jobs together get at most `MAX_ALL_RANKS`.
    """
    found, left = dict[str, dict[str, Any]](), MAX_ALL_RANKS
    for job in sorted(jobs, key=lambda job: (not job.ranks.connected, job.name)):
        found[job.name] = ranks_report(job, slots.get(job.name, ()), min(MAX_RANKS, left))
        left -= len(found[job.name]["ranks"])
    return found


def ranks_report(job: Job, slots: Iterable[Slot], most: int) -> dict[str, Any]:
    """Return the part of a job's report that is about its ranks: `ranks`, those of the
    newest attempt that are on this node, by number, and `ranks_not_shown`, how many
    others there are.

    slots: the slots of the job. most: how many ranks are returned at most. A rank whose
    process is not known, as after a restart of the daemon, has no `pid`.
    """
    holders = {segment: step for step in job.steps.values() for segment in step.slots}
    held: dict[int, list[dict[str, Any]]] = {rank: [] for rank in job.ranks.owners}
    for slot in sorted(slots, key=lambda slot: slot.header.slot):
        if slot.header.attempt == job.attempt and not slot.header.peer_replica:
            found = _slot(slot, holders.get(slot.name))
            held.setdefault(slot.header.rank, []).append(found)
    shown = sorted(held)[:most]
    return {
        "ranks": [_rank(job, rank, held[rank]) for rank in shown],
        "ranks_not_shown": len(held) - len(shown),
    }


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
