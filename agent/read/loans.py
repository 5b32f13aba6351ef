"""Opens the snapshots that the daemon lends to a reader."""

from __future__ import annotations

from ckptd.agent.link.loans import Borrowed
from ckptd.agent.read.sources import Opened, open_checkpoint, open_memory, open_slots
from ckptd.agent.read.staged_source import ChunkMemory
from ckptd.shared.errors import IntegrityError, VersionGone
from ckptd.shared.storage.locate import open_root


def open_loan(job: str, loan: Borrowed, kept: ChunkMemory) -> Opened:
    """Open a snapshot that was lent: its slots in memory, or its checkpoint, whose parts
    are read from the slots that are lent, while they are there.

    Takes over the descriptors. kept: the memory for chunks that are staged.

    Raises VersionGone if the snapshot has been replaced in memory already; NotFound,
    IntegrityError, OSError.
    """
    if not loan.stored:
        descriptors = [loan.slots[rank] for rank in sorted(loan.slots)]
        try:
            return open_memory(descriptors, *loan.key, loan.tag, kept)
        except IntegrityError as error:
            # The daemon has just checked it.
            raise VersionGone(f"{job}/{loan.tag}: {error}") from None
    slots = open_slots(loan.slots, *loan.key, lent=True)
    try:
        opened = open_checkpoint(open_root(loan.place), job, loan.tag, slots=slots, kept=kept)
    except BaseException:
        loan.close()
        raise
    opened.held[:0] = [*loan.slots.values(), *slots.values()]
    return opened
