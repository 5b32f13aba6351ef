"""Which checkpoint a recovery owes, given what was acknowledged, forgotten by hand and pinned. Pure; used by `machine.py`."""

from __future__ import annotations

from collections.abc import Collection

Key = tuple[int, int]
"""(attempt, step): checkpoints are ordered by it."""
NOTHING: Key = (0, -1)


class Oracle:
    """Keeps the acknowledged checkpoints of one job that must still be there, under a retention of the `keep` newest.

    `forgotten` holds the keys that a person has deleted. The rig knows only the commits that were acknowledged to it; the daemon may have
    committed others, and retention may have counted them. Retention deletes a checkpoint only while `keep` newer ones are committed, and
    never brings their number below `keep`. So a checkpoint that nobody has forgotten can be missing without a newer one in its place only
    if `keep` newer ones were forgotten by hand after it was last seen.
    """

    def __init__(self, keep: int) -> None:
        self.forgotten: set[Key] = set()
        self._keep = keep
        self._sealed = NOTHING
        self._durable: dict[Key, int] = {}
        """Acknowledged as durable, and how many newer checkpoints were forgotten since it was last known to be there."""
        self._pinned: set[Key] = set()

    def sealed(self, key: Key) -> None:
        """A snapshot was acknowledged as sealed: it is owed for as long as the node stands."""
        self._sealed = max(self._sealed, key)

    def durable(self, key: Key) -> None:
        """A snapshot was acknowledged as durable: it is owed whatever happens to the node."""
        self._durable[key] = 0

    def pin(self, key: Key, *, remove: bool = False) -> None:
        """A pin was set, so the checkpoint was there then, and retention cannot delete it; or a pin, if there was one, was removed."""
        if key in self._durable and (key in self._pinned or not remove):
            self._durable[key] = 0
        (self._pinned.discard if remove else self._pinned.add)(key)

    def forget(self, key: Key, left: Collection[Key]) -> None:
        """A person has deleted a checkpoint; afterwards those in `left` were seen to be there."""
        self.forgotten.add(key)
        self._durable.pop(key, None)
        for known in self._durable:
            if known in left or known in self._pinned:
                self._durable[known] = 0
            elif known < key:
                self._durable[known] += 1
        if self._sealed <= key:  # a newer seal may have taken its place in memory, and that one is deleted
            self._sealed = NOTHING

    def cut_power(self) -> None:
        """Everything that was in memory is lost."""
        self._sealed = NOTHING

    @property
    def owed(self) -> Key:
        """The oldest checkpoint that a recovery may bring back now."""
        return max([self._sealed, *(key for key, forgotten in self._durable.items() if forgotten < self._keep)])
