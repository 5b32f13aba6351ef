"""The share of one node in an attempt of several nodes: the ranks that its daemon
serves, and the identity of the attempt.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST_RANKS = 65_536
"""The most ranks of one node. The limit only keeps a hostile document from taking much
memory.
"""


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one node.

    claim: the identity of the attempt, 32 hexadecimal digits that rank 0 draws when it
        claims the number of the attempt. The number alone is no identity: a root that
        was restored from a backup may give the same number out again.
    ranks: the ranks that the daemon of the node serves, ascending. They are fewer than
        the ranks of the job.
    """

    claim: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    ranks: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]],
        msgspec.Meta(min_length=1, max_length=MOST_RANKS),
    ]

    def problem(self, rank: int, world_size: int) -> str:
        """Return what is wrong with the share if `rank` of `world_size` ranks belongs
        to it, or "" if nothing is.
        """
        if any(low >= high for low, high in zip(self.ranks, self.ranks[1:], strict=False)):
            return "its ranks are not in ascending order"
        if rank not in self.ranks or self.ranks[-1] >= world_size:
            return (
                f"it has the ranks {self.ranks[0]} to {self.ranks[-1]}, which do not fit "
                f"rank "
                f"{rank} of {world_size} ranks"
            )
        return (
            ""
            if len(self.ranks) < world_size
            else "it has all ranks of the job, which is then on one node"
        )

    @property
    def leads(self) -> bool:
        """True if rank 0 is on this node, whose daemon then decides for all nodes
        whether a checkpoint is committed.
        """
        return self.ranks[0] == 0
