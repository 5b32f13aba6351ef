"""Follows which ranks of a job are here and which have left, and sends them the daemon's news.

A rank owns slots from its first request to the end of its process, so it outlives its connection. This module does no I/O of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckptd.shared.messages import Progress


@dataclass(slots=True, eq=False)
class Owner:
    """One rank of one attempt of a job, which owns slots. `notify` is None while its connection is lost."""

    job: str
    attempt: int
    rank: int
    world_size: int
    notify: Callable[[Progress], None] | None = None

    @property
    def identity(self) -> tuple[str, int, int]:
        return (self.job, self.attempt, self.rank)


@dataclass(slots=True)
class Ranks:
    """The ranks of one job. `owners` has the ranks of the newest attempt that have begun and not left.

    `gone` has the ranks of the newest attempt that have left, each with "ended" or "closed"; it stays empty in a job of one rank. `former`
    has the owners of earlier attempts: as long as they are connected, they may wait for the snapshots that they left.
    """

    owners: dict[int, Owner] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    former: list[Owner] = field(default_factory=list)

    def join(self, owner: Owner) -> None:
        """Add a rank of the newest attempt, in place of an earlier owner of the same rank."""
        self.owners[owner.rank] = owner
        self.gone.pop(owner.rank, None)

    def remove(self, owner: Owner) -> None:
        """Remove an owner, whose slots then belong to nobody. Does nothing if another owner has taken its place."""
        if self.is_here(owner):
            del self.owners[owner.rank]

    def leave(self, owner: Owner, how: str) -> None:
        """Remove an owner of the newest attempt, and record how its rank has left: "ended" or "closed"."""
        self.remove(owner)
        if owner.world_size > 1 and owner.rank not in self.owners:
            self.gone[owner.rank] = how

    def retire(self, attempt: int) -> list[Owner]:
        """Move the owners of all attempts before `attempt` to `former`, and return them."""
        retired = [owner for owner in self.owners.values() if owner.attempt < attempt]
        for owner in retired:
            del self.owners[owner.rank]
        self.former += retired
        self.gone.clear()
        return retired

    def has(self, attempt: int, rank: int) -> bool:
        """Return True if the slots of this rank of this attempt have an owner."""
        owner = self.owners.get(rank)
        return owner is not None and owner.attempt == attempt

    def is_here(self, owner: Owner) -> bool:
        """Return True if this owner has not left and no later connection of its rank has replaced it."""
        return self.owners.get(owner.rank) is owner

    def tell(self, message: Progress) -> None:
        """Send a message to every connected rank, those of earlier attempts too."""
        self.former = [owner for owner in self.former if owner.notify is not None]
        for owner in [*self.owners.values(), *self.former]:
            if owner.notify is not None:
                owner.notify(message)
