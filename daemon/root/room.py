"""Warns in the log when only few more checkpoints of a job fit under the root."""

from __future__ import annotations

import logging

from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared.storage.repository import Repository
from ckptd.shared.units import size_text

log = logging.getLogger("ckptd.saver")

_FEW = 5
"""The log warns if fewer checkpoints than this still fit under the root."""


class Room:
    """The room under the root of one daemon."""

    def __init__(self, config: Config, repository: Repository, calls: StorageCalls) -> None:
        self._config, self._repository, self._calls = config, repository, calls
        self._fit: dict[str, int] = {}  # how many more checkpoints fit, by job; at most _FEW

    async def warn(self, job: Job) -> None:
        """Log a warning if only few more checkpoints like the newest fit under the
        root, each time their number has become smaller.
        """
        free = await self._calls.run(self._repository.storage.free)
        room = job.room_for(free)
        fit = _FEW if room is None else min(_FEW, room)
        if fit < self._fit.get(job.name, _FEW):
            log.warning("%s", self.remark(job, fit, free))
        self._fit[job.name] = fit

    def remark(self, job: Job, fit: int, free: int | None) -> str:
        """Return a warning that only `fit` more checkpoints fit into the `free` bytes
        under the root, or "" if that is enough.
        """
        if fit >= _FEW:
            return ""
        then = "the oldest ones are then deleted early"
        if not self._config.make_room:
            then = (
                "delete some (`ckptd forget`), keep fewer (keep_last), or set make_room, "
                "which "
                "then deletes the oldest ones early"
            )
        return (
            f"job {job.name}: the root has room for {fit} more of its "
            f"checkpoints "
            f"({size_text(free or 0)} free): {then}"
        )
