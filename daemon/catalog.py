"""What is known of every snapshot and checkpoint. Pure: values and decisions, no I/O; the engine acts on what is decided here.

Everything is ordered by (attempt, step), never by a clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptd.shared import lifecycle, names
from ckptd.shared.lifecycle import Event, SnapshotState
from ckptd.shared.manifest import Manifest, PartEntry
from ckptd.shared.retention import Policy, understood

log = logging.getLogger("ckptd.catalog")

Key = tuple[int, int]
"""(attempt, step)."""
_REMEMBERED = 64  # steps that were given up, so that a late rank is told why


@dataclass(slots=True, eq=False)
class RankSeal:
    """One rank's share of a snapshot: the slot that holds it, and its part once that is durable."""

    rank: int
    segment: str
    generation: int
    signature: bytes
    global_plan: bytes = b""
    persist: bool = True
    checked: bool = False
    part: PartEntry | None = None


@dataclass(slots=True, eq=False)
class Snapshot:
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
    unwanted: bool = False
    """Its rank has detached: its slots are free as soon as it is durable."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Its slots are being read: they may not be filled again before that is over."""
        self.holds += 1
        try:
            yield
        finally:
            self.holds -= 1

    @property
    def key(self) -> Key:
        return (self.attempt, self.step)

    @property
    def complete(self) -> bool:
        """Sealed by all ranks."""
        return len(self.seals) == self.world_size

    @property
    def missing(self) -> list[int]:
        """Ranks that have not sealed it."""
        return [rank for rank in range(self.world_size) if rank not in self.seals]

    @property
    def in_memory(self) -> bool:
        return self.complete and self.state not in (SnapshotState.RELEASED, SnapshotState.FILLING)

    def move(self, event: Event) -> None:
        """Raises IllegalStep, changing nothing."""
        after = lifecycle.step(self.state, event)
        log.info("snapshot %s/%s: %s -> %s", self.job, self.tag, self.state.value, after.value)
        self.state = after

    def __repr__(self) -> str:
        return f"<Snapshot {self.job}/{self.tag} {self.state.value} {len(self.seals)}/{self.world_size}>"


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed one, as its manifest says."""

    job: str
    tag: str
    attempt: int
    step: int | None
    seq: int
    nbytes: int
    files: tuple[str, ...]
    user_tag: bool
    created: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)
    retention: tuple[Policy, ...] | None = None

    @classmethod
    def of(cls, manifest: Manifest, *, user_tag: bool) -> StoredCheckpoint:
        return cls(
            manifest.job, manifest.tag, manifest.attempt, manifest.step, manifest.seq, manifest.nbytes,
            tuple(part.file for part in manifest.parts), user_tag, manifest.created_at, manifest.numbers,
            understood(manifest.retention) if manifest.retention else None,
        )  # fmt: skip

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.attempt, -1 if self.step is None else self.step, self.seq)


@dataclass(slots=True)
class Job:
    """`attempt`: the newest one begun; only it may seal. `damaged`: tags whose manifest could not be read, with the reason; `newer`: tags
    whose manifest a newer ckptd has written.

    `policies`: those that retention last went by, None before this daemon's first commit in the job; `announced`: the deletion that the
    next commit will bring, as a sentence, or "". `sealed`: the newest snapshot that all ranks have sealed, whatever has become of it.
    `given_up`: code and reason of steps that failed before all ranks had sealed them; `gone`: ranks of `attempt` that "ended" or "closed".
    """

    name: str
    attempt: int = 0
    world_size: int = 1
    snapshots: dict[Key, Snapshot] = field(default_factory=dict)
    checkpoints: dict[str, StoredCheckpoint] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    newer: dict[str, str] = field(default_factory=dict)
    retiring: set[str] = field(default_factory=set)
    policies: tuple[Policy, ...] | None = None
    announced: str = ""
    sealed: Key = (0, -1)
    seq: int = 0
    given_up: dict[Key, tuple[str, str]] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)

    def newest_checkpoint(self) -> StoredCheckpoint | None:
        return max(self.live_checkpoints(), key=lambda c: c.order, default=None)

    def live_checkpoints(self) -> list[StoredCheckpoint]:
        return [c for c in self.checkpoints.values() if c.tag not in self.retiring]

    def newest_in_memory(self) -> Snapshot | None:
        return max((s for s in self.snapshots.values() if s.in_memory), key=lambda s: s.key, default=None)

    def unreadable_beyond(self, best: tuple[int, int | None] | None, step: int | None) -> str:
        """Return why `best`, (attempt, step) of the best candidate, may not be recovered: a newer ckptd has written a later checkpoint.

        `step`: the step that the caller wants, or None for the newest. A user's own tag, whose name tells no step, counts as later within
        its attempt. Return "" if there is no such checkpoint.
        """
        for tag, why in sorted(self.newer.items(), reverse=True):
            parsed = names.parse_tag_directory(tag)
            assert parsed is not None
            its = (parsed[2], math.inf if parsed[1] is None else parsed[1])
            if (step is None or parsed[1] in (None, step)) and (best is None or its > (best[0], -1 if best[1] is None else best[1])):
                return f"checkpoint {self.name}/{tag} is later than any that this ckptd can read: {why}; or ask for an older one by step="
        return ""

    def is_durable(self, attempt: int, step: int) -> bool:
        return any((c.attempt, c.step) == (attempt, step) for c in self.live_checkpoints())

    def commit(self, checkpoint: StoredCheckpoint) -> None:
        self.checkpoints[checkpoint.tag] = checkpoint
        self.seq = max(self.seq, checkpoint.seq)

    def give_up(self, key: Key, code: str, reason: str) -> None:
        self.given_up[key] = (code, reason)
        while len(self.given_up) > _REMEMBERED:
            self.given_up.pop(next(iter(self.given_up)))

    def releasable(self) -> list[Snapshot]:
        """Snapshots whose slots may be reused: a newer one is sealed by all ranks, and nothing more is to come of this one."""
        newest = self.newest_in_memory()
        if newest is None:
            return []
        return [
            s for s in self.snapshots.values()
            if self.is_settled(s) and (s.key < newest.key or (s.unwanted and s.state is SnapshotState.DURABLE))
        ]  # fmt: skip

    def is_settled(self, snapshot: Snapshot) -> bool:
        """Nothing is under way for it, and nothing is owed."""
        if snapshot.holds:
            return False
        if snapshot.state in (SnapshotState.DURABLE, SnapshotState.FAILED):
            return True
        return snapshot.state is SnapshotState.SEALED and not snapshot.persist

    def owed(self) -> Snapshot | None:
        """What to save unasked when the trainer is gone: the newest sealed snapshot, unless it is durable or on its way."""
        newest = self.newest_in_memory()
        if newest is None or newest.state not in (SnapshotState.SEALED, SnapshotState.FAILED) or self.is_durable(*newest.key):
            return None
        return newest


class Catalog:
    """All jobs of this daemon."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}

    def job(self, name: str) -> Job:
        return self.jobs.setdefault(name, Job(name))
