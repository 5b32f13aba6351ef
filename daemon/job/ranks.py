"""Follows which ranks of a job are here and which have left, and sends them the
daemon's news.

A rank owns slots from its first request to the end of its process, so it outlives its
connection. This module does no I/O of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptd.shared.units import some_text
from ckptd.shared.wire.board import Holding
from ckptd.shared.wire.messages import Notification, Uploads


@dataclass(frozen=True, slots=True)
class Process:
    """The process of a rank.

    Each field has its default if it is not known, as after a restart of the daemon
    until the rank reconnects.

    `started`: when it started, in Unix seconds. `run`: an id that the workers of one
    launch share, even after they were started again.
    """

    pid: int = 0
    started: float = 0.0
    run: str = ""

    def belongs_with(self, other: Process) -> bool:
        """Return True if the two are the same process, or workers of one launch."""
        return self.pid == other.pid > 0 or self.run == other.run != ""


NOT_KNOWN = Process()


@dataclass(slots=True, eq=False)
class Owner:
    """A rank of one attempt of a job, which owns slots.

    `notify` is None while its connection is lost.

    `shown`: what this node holds, as it was last sent to the rank for the board.
    `uploads`: the uploads that it was last told of. `unlocked`: bytes of the slot of its
    last snapshot that an accelerator copied into while they were not page-locked.
    """

    job: str
    attempt: int
    rank: int
    world_size: int
    notify: Callable[[Notification], None] | None = None
    process: Process = NOT_KNOWN
    shown: Holding | None = None
    uploads: Uploads | None = None
    unlocked: int = 0

    @property
    def identity(self) -> tuple[str, int, int]:
        return (self.job, self.attempt, self.rank)


@dataclass(slots=True)
class Ranks:
    """The ranks of one job.

    `owners` has the ranks of the newest attempt that have begun and not left.

    `gone` has the ranks of the newest attempt that have left, each with "ended" or
    "closed"; it stays empty in a job of one rank. `former` has the owners of earlier
    attempts: as long as they are connected, they may wait for the snapshots that they
    left.
    """

    owners: dict[int, Owner] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    former: list[Owner] = field(default_factory=list)

    @property
    def unlocked(self) -> int:
        """The bytes of slots of connected ranks that are not page-locked, as of their
        last snapshots.
        """
        return sum(owner.unlocked for owner in self.owners.values() if owner.notify is not None)

    @property
    def connected(self) -> int:
        """The number of ranks of the newest attempt whose connection stands."""
        return sum(owner.notify is not None for owner in self.owners.values())

    @property
    def are_closed(self) -> bool:
        """True if all ranks of the newest attempt that have been here have closed their
        agents.
        """
        return not self.owners and bool(self.gone) and set(self.gone.values()) == {"closed"}

    def join(self, owner: Owner) -> None:
        """Add a rank of the newest attempt, in place of an earlier owner of the same
        rank.
        """
        self.owners[owner.rank] = owner
        self.gone.pop(owner.rank, None)

    def remove(self, owner: Owner) -> None:
        """Remove an owner, whose slots then belong to nobody.

        Does nothing if another owner has taken its place.
        """
        if self.is_here(owner):
            del self.owners[owner.rank]

    def leave(self, owner: Owner, how: str) -> None:
        """Remove an owner of the newest attempt, and record how its rank has left:
        "ended" or "closed".
        """
        self.remove(owner)
        if owner.world_size > 1 and owner.rank not in self.owners:
            self.gone[owner.rank] = how

    def retire(self, attempt: int) -> list[Owner]:
        """Remove the owners of all attempts before `attempt`, and return them.

        Those that are connected move to `former`.
        """
        retired = [owner for owner in self.owners.values() if owner.attempt < attempt]
        for owner in retired:
            del self.owners[owner.rank]
        self.former += [owner for owner in retired if owner.notify is not None]
        self.gone.clear()
        return retired

    def disconnect(self, owner: Owner) -> None:
        """Send nothing more to an owner, whose connection is lost or has another owner
        now. An owner of an earlier attempt is forgotten.
        """
        owner.notify = None
        self.former = [other for other in self.former if other is not owner]

    def has(self, attempt: int, rank: int) -> bool:
        """Return True if the slots of this rank of this attempt have an owner."""
        owner = self.owners.get(rank)
        return owner is not None and owner.attempt == attempt

    def is_here(self, owner: Owner) -> bool:
        """Return True if this owner has not left and no later connection of its rank
        has replaced it.
        """
        return self.owners.get(owner.rank) is owner

    def others(self, process: Process) -> list[Owner]:
        """Return the owners if they belong to another run than `process`, in the order
        of their ranks, and otherwise no owner.
        """
        here = [self.owners[rank] for rank in sorted(self.owners)]
        return [] if any(owner.process.belongs_with(process) for owner in here) else here

    def tell(self, message: Notification) -> None:
        """Send a message to every connected rank, those of earlier attempts too."""
        for owner in [*self.owners.values(), *self.former]:
            if owner.notify is not None:
                owner.notify(message)

    def tell_first(self, message: Notification) -> None:
        """Send a message to rank 0, if it is connected."""
        first = self.owners.get(0)
        if first is not None and first.notify is not None:
            first.notify(message)


def processes(owners: Sequence[Owner]) -> str:
    """Return a phrase that names the processes of the owners, and since when the oldest
    of them runs.
    """
    pids = sorted({owner.process.pid for owner in owners} - {0})
    if not pids:
        return (
            "a process that this daemon cannot see, or that has not reconnected since the daemon "
            "started"
        )
    shown = some_text(pids, 4)
    started = min((owner.process.started for owner in owners if owner.process.started), default=0.0)
    since = time.strftime(" since %Y-%m-%d %H:%M:%S UTC", time.gmtime(started)) if started else ""
    return f"{'process' if len(pids) == 1 else 'processes'} {shown}{since}"
