"""Describes a committed checkpoint as the daemon knows it from its manifest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.names import parse_tag_directory
from ckptd.shared.retention import Policy, understood

LITTLE_ROOM = 5
"""The log, `ckptd status` with and without `--check`, `doctor`, `top` and the alert
CkptdLittleRoom warn if fewer checkpoints than this still fit.
"""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint, as its manifest describes it.

    `step`: None if it was saved without a step. `user_tag`: True if the user chose the
    tag. `created`: Unix seconds by the trainer's clock, NaN if unknown. `retention`:
    the policies of the job itself, None if the manifest has none. `new_bytes`: the
    bytes of its files that no older checkpoint has, 0 if unknown. `files`: its part
    files and its metadata object. `non_finite`: how many values of parameters and of
    optimizer state are NaN or infinite, None if they were not counted. `chain`: the
    number of deltas in its longest chain, 0 if it is whole. `restored_bytes`: the stored
    bytes that a restore reads, 0 if unknown.
    """

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
    new_bytes: int = 0
    non_finite: int | None = None
    chain: int = 0
    restored_bytes: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> StoredCheckpoint:
        name = parse_tag_directory(manifest.tag)
        return cls(
            manifest.job, manifest.tag, manifest.attempt, manifest.step, manifest.seq,
            manifest.nbytes, tuple(manifest.files), name is None or name.by_user,
            manifest.created_at, manifest.numbers,
            understood(manifest.retention) if manifest.retention else None, manifest.new_bytes,
            manifest.non_finite, manifest.chain, manifest.restored_bytes,
        )  # fmt: skip

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.attempt, -1 if self.step is None else self.step, self.seq)
