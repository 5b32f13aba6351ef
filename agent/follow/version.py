"""A version of a job that is followed: one of its snapshots, as a `Checkpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from ckptd.agent.read.checkpoint import Checkpoint, opened_of
from ckptd.agent.read.loader import materialize, needed_shards
from ckptd.agent.read.module_loader import stage
from ckptd.agent.read.sources import Opened

Order = tuple[int, int, int]
"""Attempt, step and, of checkpoints without steps, the number of the save."""


class Version(Checkpoint):
    """A snapshot of a job as a version of it, made by `follow`.

    It is open until the next one is taken. Its order, and its digest, tell it from every
    other one of the job.

    rolled_back: True if the training has gone back: the step is not higher than that of
    the version before, because a later attempt has recovered an earlier step.
    """

    def __init__(
        self,
        job: str,
        opened: Opened,
        patterns: Sequence[str] = (),
        before: Order | None = None,
    ) -> None:
        """before: the order of the version before."""
        super().__init__(job, opened)
        manifest = opened.manifest
        self.order = order_of(self.attempt, self.step, 0 if manifest is None else manifest.seq)
        self.rolled_back = goes_back(self.order, before)
        self._patterns = patterns

    def keys(self) -> list[str]:
        """Return the names of the tensors that are followed.

        Raises IntegrityError, StorageError.
        """
        names = super().keys()
        if not self._patterns:
            return names
        return [name for name in names if any(fnmatchcase(name, p) for p in self._patterns)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are followed, by name, as new tensors on the CPU, all
        of the same step.

        Raises VersionGone, IntegrityError, StorageError.
        """
        with self._reading(self.tag):
            return materialize(opened_of(self).saved, self.keys())

    def pull(self) -> int:
        """Read what is followed into memory, and return the number of bytes that were
        read. Chunks that have not changed since the version before are not read again
        from storage. Raises VersionGone, IntegrityError, StorageError.
        """
        with self._reading(self.tag):
            saved, names = opened_of(self).saved, self.keys()
            wholes = {
                name: torch.empty(saved.shape(name)[1], device="meta", dtype=saved.dtype(name))
                for name in names
            }
            found = needed_shards(saved, wholes).values()
            return stage(shard for shards in found for shard in shards)


def order_of(attempt: int, step: int | None, seq: int = 0) -> Order:
    """Return the place of a version among those of its job."""
    return (attempt, -1, seq) if step is None else (attempt, step, 0)


def goes_back(order: Order, before: Order | None) -> bool:
    """Return True if a version is of a later attempt than the one before, and its step
    is not higher.
    """
    return before is not None and order[0] > before[0] and -1 < order[1] <= before[1]
