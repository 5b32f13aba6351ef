"""Checks sealed slots: their documents before the seal is acknowledged, and the bytes
of their chunks afterwards.

What is acknowledged can be loaded (PROTOCOL.md, section 3). `read_sealed` reads one
slot and checks its documents. `SealCheck.compare` compares the slots of all ranks of
this node once the last of them is sealed. Both run on worker threads. Neither needs
torch, so that values that only torch can decode are not checked. `SlotChecksums`
computes the checksums of the chunks once, or compares them with those that the slot
has.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

from ckptd.daemon.chunks.pipeline import Pipeline
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.job.catalog import LastPart
from ckptd.daemon.job.snapshot import RankSeal, SlotContents, Snapshot
from ckptd.daemon.memory.slots import Slots
from ckptd.daemon.tasks import all_of
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.bounds import MAX_DEPTH
from ckptd.shared.formats.plan_check import check_plans
from ckptd.shared.formats.segment import SegmentHeader, read_document, write_check
from ckptd.shared.formats.values_check import check_values
from ckptd.shared.system.failpoints import failpoint

_LEVELS = 2 * MAX_DEPTH + 2
"""The most levels of a values document. A level of the state may take two levels of the
document. Python 3.11 decodes hardly more.
"""
_MOST_KNOWN = 8
"""The most sets of plans that are remembered as sound. A structure seldom changes, and
a node seldom runs more jobs than this.
"""


def read_sealed(fd: int, header: SegmentHeader) -> tuple[SealedSlot, SlotContents]:
    """Read a sealed slot and check its documents.

    Raises IntegrityError if a document is damaged or not sound, naming the tensor or
    the key, and NewerFormat.
    """
    sealed = SealedSlot.read(fd, header)
    checked = check_values(read_document(fd, header, header.values, "values"), _LEVELS)
    return sealed, SlotContents(header.signature, sealed.plan, checked.tensors)


class SealCheck:
    """The check of documents of one daemon. Any number of threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sound: OrderedDict[
            tuple[int, frozenset[tuple[int, bytes]]], frozenset[str] | None
        ] = OrderedDict()

    def compare(self, contents: Mapping[int, SlotContents], world_size: int) -> None:
        """Compare the slots of all ranks of this node, given by rank.

        Raises IntegrityError, naming the tensor, if a reader would refuse the snapshot.
        """
        names = self._names(contents, world_size)
        if names is None:
            return
        for rank, each in contents.items():
            if not names.issuperset(each.tensors):
                unknown = min(set(each.tensors) - names)
                raise IntegrityError(
                    f"the values of rank {rank} name the tensor {unknown!r}, which no rank stores"
                )

    def _names(
        self, contents: Mapping[int, SlotContents], world_size: int
    ) -> frozenset[str] | None:
        key = world_size, frozenset((rank, each.signature) for rank, each in contents.items())
        with self._lock:
            if key in self._sound:
                self._sound.move_to_end(key)
                return self._sound[key]
        names = check_plans({rank: each.plan for rank, each in contents.items()}, world_size)
        with self._lock:
            self._sound[key] = names
            while len(self._sound) > _MOST_KNOWN:
                self._sound.popitem(last=False)
        return names


class SlotChecksums:
    """The checks of the chunks of one daemon."""

    def __init__(self, slots: Slots, pipeline: Pipeline) -> None:
        self._slots, self._pipeline = slots, pipeline

    async def check(self, snapshot: Snapshot, stored: Mapping[int, LastPart]) -> None:
        """Check each slot of the snapshot once: compute its checksums, and write them
        into the segment.

        If checksums are there already, compare with them instead. A slot that came from
        the trainer with checksums is not read here. Several callers at the same time
        share one check. stored: the parts of the last save whose unchanged chunks the
        next save links, by rank; it then needs digests, too. Raises IntegrityError if a
        slot has changed since it was sealed, NotFound if it has been released.
        """
        with snapshot.held():
            async with snapshot.checking:
                await all_of(
                    [
                        self._check_seal(snapshot, seal, stored.get(seal.rank))
                        for seal in snapshot.seals.values()
                        if seal.checks is None
                    ]
                )

    async def _check_seal(
        self, snapshot: Snapshot, seal: RankSeal, before: LastPart | None
    ) -> None:
        slot = self._slots.get(seal.segment)
        header = slot.header
        with slot.pinned() as fd:
            sealed = await self._pipeline.run(lambda: SealedSlot.read(fd, header))
            digests = before is not None and before.part.steady
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
