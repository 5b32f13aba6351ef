"""Checks what a seal describes before it is acknowledged, so that what is acknowledged
can be loaded (PROTOCOL.md, section 3).

`read_sealed` reads one slot and checks what it says by itself. `SealCheck.compare`
compares the slots of all ranks of this node once the last of them is sealed. Both run
on worker threads. Neither needs torch, so that values that only torch can decode are
not checked.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

from ckptd.daemon.chunks.pipeline import SealedSlot
from ckptd.daemon.job.snapshot import SlotContents
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.bounds import MAX_DEPTH
from ckptd.shared.formats.plan_check import check_plans
from ckptd.shared.formats.segment import SegmentHeader, read_document
from ckptd.shared.formats.values_check import check_values

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
    """The check of one daemon. Any number of threads may call it."""

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
