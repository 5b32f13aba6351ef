"""Counts the checkpoints whose chunks are chains of deltas, so that a rig can tell
whether it has tried any.
"""

from __future__ import annotations

from ckptd.shared.errors import CkptdError
from ckptd.shared.location import Location
from ckptd.shared.storage.locate import open_root, tags_of
from tests.support.trainers import JOB

CHAINS = " checkpoints with chains"
"""The name by which a rig counts the checkpoints with chains that it has seen. It
begins with a space, so that `trust` does not count it as a try.
"""
SEVERAL = 2
"""The least number of deltas of a chain that counts."""


def chained(root: Location, job: str = JOB) -> set[str]:
    """Return the directories of the committed checkpoints that have a chain of several
    deltas, and whose manifest can be read.
    """
    repository, found = open_root(root), set[str]()
    for tag in tags_of(repository, job):
        try:
            parts = repository.read_manifest(job, tag).parts
        except (OSError, CkptdError):
            continue  # it is not committed, damaged, or has been deleted since
        if max(part.chain for part in parts) >= SEVERAL:
            found.add(tag)
    return found
