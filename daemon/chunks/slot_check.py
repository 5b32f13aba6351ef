"""Checks sealed slots: computes the checksums of their chunks once, or compares them
with those that are there.
"""

from __future__ import annotations

from ckptd.daemon.chunks.pipeline import Pipeline, SealedSlot
from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.memory.slots import Slots
from ckptd.daemon.tasks import all_of
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.segment import write_check
from ckptd.shared.system.failpoints import failpoint


class SlotCheck:
    """The checks of one daemon.

    `link_unchanged`: as in the settings; the next save then needs digests of unchanged
    chunks, too.
    """

    def __init__(
        self, catalog: Catalog, slots: Slots, pipeline: Pipeline, *, link_unchanged: bool
    ) -> None:
        self._catalog, self._slots, self._pipeline, self._link_unchanged = (
            catalog,
            slots,
            pipeline,
            link_unchanged,
        )

    async def check(self, snapshot: Snapshot) -> None:
        """Check each slot of the snapshot once: compute its checksums, and write them
        into the segment.

        If checksums are there already, compare with them instead. A slot that came from
        the trainer with checksums is not read here. Several callers at the same time
        share one check. Raises IntegrityError if a slot has changed since it was
        sealed, NotFound if it has been released.
        """
        with snapshot.held():
            async with snapshot.checking:
                await all_of(
                    [
                        self._check_seal(snapshot, seal)
                        for seal in snapshot.seals.values()
                        if seal.checks is None
                    ]
                )

    async def _check_seal(self, snapshot: Snapshot, seal: RankSeal) -> None:
        slot = self._slots.get(seal.segment)
        header = slot.header
        with slot.pinned() as fd:
            sealed = await self._pipeline.run(lambda: SealedSlot.read(fd, header))
            before = self._catalog.job(snapshot.job).stored.get(seal.rank)
            digests = self._link_unchanged and before is not None and before.steady
            checks = await self._pipeline.checksum(sealed, with_digests=digests)
            # A trainer raises it before it changes the first byte.
            if slot.refresh().generation != seal.generation:
                raise IntegrityError(
                    f"{snapshot.job} step {snapshot.step}: the slot was filled again while it was "
                    f"being checked"
                )
            crcs = [check.crc for check in checks]
            if sealed.crcs is None:
                write_check(fd, header, crcs)
            elif sealed.crcs != crcs:
                raise IntegrityError(
                    f"{snapshot.job} step {snapshot.step}: the copy in memory has changed since "
                    f"it was sealed"
                )
        seal.checks = checks
        failpoint("seal.checked")
