"""Computes the oldest checkpoint that a recovery may return, from what was
acknowledged, forgotten by hand and pinned.

The functions here are pure. `machine.py` uses them.
"""

from __future__ import annotations

from collections.abc import Collection

Key = tuple[int, int]
"""(attempt, step), the order of checkpoints."""
NOTHING: Key = (0, -1)


class Oracle:
    """Keeps the acknowledged checkpoints of one job that must still be there, under a
    retention of the `keep` newest.

    `forgotten` holds the keys that a person has deleted. The rig knows only the commits
    that were acknowledged to it; the daemon may have committed others, and retention
    may have counted them. Retention deletes a checkpoint only while `keep` newer ones
    are committed, and never brings their number below `keep`. So a checkpoint that
    nobody has forgotten can be missing without a newer one in its place only if `keep`
    newer ones were forgotten by hand after it was last seen.
    """

    def __init__(self, keep: int) -> None:
        self.forgotten: set[Key] = set()
        self._keep = keep
        self._sealed = NOTHING
        self._durable: dict[Key, int] = {}
        """The keys acknowledged as durable, each with the number of newer checkpoints
        that were forgotten since it was last known to be there.
        """
        self._pinned: set[Key] = set()

    def sealed(self, key: Key) -> None:
        """Record that a snapshot was acknowledged as sealed.

        It must not be lost as long as the node stands.
        """
        self._sealed = max(self._sealed, key)

    def durable(self, key: Key) -> None:
        """Record that a snapshot was acknowledged as durable.

        It must not be lost whatever happens to the node.
        """
        self._durable[key] = 0

    def pin(self, key: Key, *, remove: bool = False) -> None:
        """Record that a pin was set or removed.

        When a pin is set, the checkpoint is there, and retention cannot delete it from
        then on.
        """
        if key in self._durable and (key in self._pinned or not remove):
            self._durable[key] = 0
        (self._pinned.discard if remove else self._pinned.add)(key)

    def forget(self, key: Key, left: Collection[Key]) -> None:
        """Record that a person has deleted a checkpoint.

        Those in `left` were seen to be there afterwards.
        """
        self.forgotten.add(key)
        self._durable.pop(key, None)
        for known in self._durable:
            if known in left or known in self._pinned:
                self._durable[known] = 0
            elif known < key:
                self._durable[known] += 1
        # A newer sealed snapshot may have replaced this one in memory, and the newer
        # one has been deleted.
        if self._sealed <= key:
            self._sealed = NOTHING

    def cut_power(self) -> None:
        """Record a power cut: everything that was only in memory is lost."""
        self._sealed = NOTHING

    @property
    def owed(self) -> Key:
        """Return the oldest checkpoint that a recovery may bring back now."""
        return max(
            [
                self._sealed,
                *(key for key, forgotten in self._durable.items() if forgotten < self._keep),
            ]
        )
