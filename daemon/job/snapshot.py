"""A snapshot in memory: the seals of the ranks of this node, its state, the slots that
hold it, and the progress of its save.

This module does no I/O. A snapshot is known by its `Key`, and ordered by it, never by a
clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.plan import Plan
from ckptd.shared.formats.replicas import Brief, ReplicaDigests
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.wire import lifecycle
from ckptd.shared.wire.lifecycle import Event, SnapshotState
from ckptd.shared.wire.messages import TrainingCost

log = logging.getLogger("ckptd.catalog")

Key = tuple[int, int]
"""The attempt and the step of a snapshot, which identify it within its job."""


@dataclass(frozen=True, slots=True)
class SlotContents:
    """Holds the plan in the slot of one rank, with its signature.

    `tensors`: the names of the tensors that its values name.
    """

    signature: bytes
    plan: Plan
    tensors: Collection[str]


@dataclass(slots=True, eq=False)
class RankSeal:
    """The share of one rank in a snapshot, and the slot that holds this share.

    `generation`: the generation of the slot at the seal. `checks`: the checksum of each
    chunk of the slot, or None until they have been computed. `training_held`: seconds
    for which the snapshot held the training of this rank, or 0.0 if the rank has not
    said so. `cost`: what an earlier snapshot has cost the training of this rank, or
    None. `uncompared`: True if the device of this rank had too little memory to make
    `replicas`. `node`: the membership of this node, as the rank has sent it. `replicas`:
    digests of the tensors that other ranks hold, too. `contents`: what the slot
    describes, or None once the ranks of this node have been compared.
    """

    rank: int
    segment: str
    generation: int
    signature: bytes
    global_plan: bytes = b""
    persist: bool = True
    node: Membership | None = None
    checks: list[ChunkCheck] | None = None
    training_held: float = 0.0
    cost: TrainingCost | None = None
    uncompared: bool = False
    replicas: Sequence[ReplicaDigests] = ()
    contents: SlotContents | None = None


@dataclass(slots=True)
class SaveProgress:
    """The progress of one save.

    `total`: bytes of the slots of all ranks. `begun`: when the save began, in seconds
    of a monotonic clock.
    """

    total: int
    begun: float
    _done: dict[int, int] = field(default_factory=dict)

    def begin_part(self, rank: int) -> None:
        """Count the part of `rank` from 0. Called again when the part is written again."""
        self._done[rank] = 0

    def add(self, rank: int, nbytes: int) -> None:
        self._done[rank] += nbytes

    @property
    def done(self) -> int:
        """The bytes that are done."""
        return min(sum(self._done.values()), self.total)

    def report(self, now: float) -> dict[str, float | int | None]:
        """Return the age of the save, the bytes that are done and in all, the bytes per
        second, and the seconds left. The last two are None at the start.
        """
        done, age = self.done, max(0.0, now - self.begun)
        rate = done / max(age, 1e-6)
        return {
            "age_seconds": round(age, 3),
            "done_bytes": done,
            "total_bytes": self.total,
            "bytes_per_second": round(rate) if done else None,
            "seconds_left": round((self.total - done) / rate, 1) if done else None,
        }


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of all ranks of this node at one step of one attempt, in memory.

    `tag`: the name of the directory, for the first try. `persist`: True if it is to be
    saved. `reason` and `code`: message and error code of its last failure, or "".
    `holds`: how many times `held` is in use now. `node`: the membership of this node,
    or None if it has all ranks of the job. `directory`: the name of the directory of
    the last try.
    """

    job: str
    attempt: int
    step: int
    tag: str
    world_size: int
    persist: bool
    state: SnapshotState = SnapshotState.FILLING
    seals: dict[int, RankSeal] = field(default_factory=dict)
    reason: str = ""
    code: str = ""
    holds: int = 0
    progress: SaveProgress | None = None
    """The share of the save that is done, as SaveProgress; None before the save writes
    its first part.
    """
    unwanted: bool = False
    """True once a rank has detached: the slots are then free as soon as the snapshot is
    durable.
    """
    node: Membership | None = None
    directory: str = ""
    replicate: bool = False
    """True if it is to be copied to the memory of another node."""
    peer_replica: bool = False
    """True if it is the copy of a snapshot of another node, whose ranks and membership
    it has.
    """
    delivered: bool = False
    """True once the receipt of this node is durable, until its try is abandoned."""
    abandoned: int = 0
    """The number of its tries that were abandoned."""
    unasked: bool = False
    """True if no rank has requested the save: its trainer was gone, the daemon was
    stopping, or a node was drained.
    """
    drained: bool = False
    """True if a drain of this node has asked for it."""
    counted: str = ""
    """The counter that this snapshot is in, "persisted" or "failed", or "" if its save
    has not ended yet.
    """

    briefs: list[Brief] | None = None
    """The briefs of the replica groups for the board, or None until they are needed."""

    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the slots are being checked."""

    def __post_init__(self) -> None:
        self.directory = self.directory or self.tag

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager.

        While it is held, the slots of the snapshot are being read and are not reused.
        """
        self.holds += 1
        try:
            yield
        finally:
            self.holds -= 1

    @property
    def is_awaited(self) -> bool:
        """True if a rank of this node may wait for the outcome of its save."""
        return not (self.peer_replica or self.drained)

    @property
    def key(self) -> Key:
        return (self.attempt, self.step)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of this node, or of the node that this is a copy of."""
        return self.node.ranks if self.node is not None else range(self.world_size)

    @property
    def complete(self) -> bool:
        """True if all ranks of this node have sealed the snapshot."""
        return len(self.seals) == len(self.ranks)

    @property
    def missing(self) -> list[int]:
        """The ranks of this node that have not sealed the snapshot."""
        return [rank for rank in self.ranks if rank not in self.seals]

    @property
    def checked(self) -> bool:
        """True if the checksums of all slots are known."""
        return all(seal.checks is not None for seal in self.seals.values())

    @property
    def in_memory(self) -> bool:
        return self.complete and self.state not in (SnapshotState.RELEASED, SnapshotState.FILLING)

    def move(self, event: Event) -> None:
        """Change the state as `lifecycle` says.

        Raises IllegalStep, and changes nothing, if the event cannot follow the state.
        """
        after = lifecycle.step(self.state, event)
        log.debug("snapshot %s/%s: %s -> %s", self.job, self.tag, self.state.value, after.value)
        self.state = after

    def __repr__(self) -> str:
        return (
            f"<Snapshot {self.job}/{self.tag} {self.state.value} "
            f"{len(self.seals)}/{self.world_size}>"
        )
