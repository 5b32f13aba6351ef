"""Decides, by pure functions, what becomes of the peer replicas of a job: the copies of
snapshots of other nodes in the memory of this node.

A peer replica can do what the snapshot itself can: it is saved on behalf of its node if
that node is lost, and it is read by a recovery.
"""

from __future__ import annotations

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.decisions import MOST_TRIES
from ckptd.daemon.job.snapshot import Key, Snapshot
from ckptd.shared.wire.board import MOST_STEPS
from ckptd.shared.wire.lifecycle import SnapshotState


def hosted(job: Job) -> dict[int, list[int]]:
    """Return, for each step of the newest attempt, the lowest rank of each node whose
    whole snapshot this node holds a copy of.
    """
    found: dict[int, list[int]] = {}
    for (key, leader), replica in sorted(job.peer_replicas.items()):
        if key[0] == job.attempt and replica.in_memory:
            found.setdefault(key[1], []).append(leader)
    return {step: found[step] for step in sorted(found)[-MOST_STEPS:]}


def is_needless(job: Job, replica: Snapshot) -> bool:
    """Return True if the memory of a peer replica may be used for another one.

    A step may be freed only once all nodes have copied a newer one to their peers, or
    once it is durable or dead. If each node went by what it holds itself, a node could be
    lost while others copy the newer step, and no step would be left whose copies are
    whole. A step that will not be copied by all nodes any more is worth nothing either.
    """
    if replica.holds or replica.state in (SnapshotState.WRITING, SnapshotState.WRITTEN):
        return False
    if job.is_durable(*replica.key) or job.is_durable_after(replica.key):
        return True
    if replica.attempt < job.attempt:
        return False
    answer, step = job.answer, replica.step
    return (
        step in answer.dead
        or any(step < newer for newer in answer.replicated)
        or (step < answer.replicating and step not in answer.replicated)
    )


def outlived(job: Job) -> list[Snapshot]:
    """Return the peer replicas of earlier attempts whose memory may be freed, because this
    node holds a snapshot of the newest attempt.

    Until then a recovery may read them.
    """
    newest = job.newest_in_memory()
    if newest is None or newest.attempt < job.attempt:
        return []
    return needless(job, before=job.attempt)


def needless(job: Job, before: int | None = None) -> list[Snapshot]:
    """Return the peer replicas whose memory may be used for something else.

    If `before` is given, return only those of earlier attempts.
    """
    found = [replica for replica in job.peer_replicas.values() if is_needless(job, replica)]
    return [replica for replica in found if before is None or replica.attempt < before]


def unfinished(job: Job) -> list[Snapshot]:
    """Return the peer replicas that are not whole and will never be: those of earlier
    attempts, and all once no rank is left on this node.
    """
    return [replica for replica in job.peer_replicas.values() if _is_unfinished(job, replica)]


def _is_unfinished(job: Job, replica: Snapshot) -> bool:
    return not replica.in_memory and (replica.attempt < job.attempt or not job.ranks.owners)


def owed(job: Job) -> list[Snapshot]:
    """Return the peer replicas that this node must save because nobody else may, oldest
    first: those of `unsaved` that are not being saved.
    """
    return [
        replica
        for replica in unsaved(job)
        if replica.state in (SnapshotState.SEALED, SnapshotState.FAILED)
    ]


def unsaved(job: Job) -> list[Snapshot]:
    """Return the whole peer replicas that neither their own node nor this one is known to
    have delivered, oldest first.
    """
    saved = job.newest_durable()
    floor = saved.order[:2] if saved is not None else (0, -1)
    return [
        replica
        for (key, _), replica in sorted(job.peer_replicas.items())
        if replica.in_memory
        and key > floor
        and not (replica.delivered or job.is_dead(replica) or job.is_durable(*key))
    ]


def expired(job: Job) -> list[Snapshot]:
    """Return the peer replicas to free once `memory_ttl` is over: those that are
    needless, those that will never be whole, those that this node has delivered, and
    those of which two tries were abandoned.
    """
    return [
        replica
        for replica in job.peer_replicas.values()
        if is_needless(job, replica)
        or _is_unfinished(job, replica)
        or ((replica.delivered or replica.abandoned >= MOST_TRIES) and not replica.holds)
    ]


def of_step(job: Job, key: Key) -> list[Snapshot]:
    """Return the peer replicas of one step."""
    return [replica for (its, _), replica in job.peer_replicas.items() if its == key]


def segments(job: Job, attempt: int, rank: int) -> dict[str, tuple[Key, int]]:
    """Return the segments that hold or receive a copy of a slot of this rank, each with
    its step and the lowest rank of its node; -1 if the copy is not whole yet.
    """
    found = {
        segment: (key, -1)
        for segment, (key, of) in job.receiving.items()
        if of == rank and key[0] == attempt
    }
    for (key, leader), replica in job.peer_replicas.items():
        if key[0] == attempt and rank in replica.seals:
            found[replica.seals[rank].segment] = (key, leader)
    return found
