"""The membership of one node in an attempt of several nodes: the ranks that the daemon
of the node serves, and the identity of the attempt.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ckptd.shared.units import rank_list

MOST_RANKS = 65_536
"""The most ranks of one node. The limit only keeps a hostile document from taking much
memory.
"""


class Membership(msgspec.Struct, frozen=True, kw_only=True, rename={"run_id": "claim"}):
    """The membership of one node.

    run_id: the identity of the attempt, 32 hexadecimal digits that rank 0 draws when it
        claims the number of the attempt. The number alone is no identity: a root that
        was restored from a backup may give the same number out again. Files and
        messages call this member `claim`.
    ranks: the ranks that the daemon of the node serves, ascending. They are fewer than
        the ranks of the job.
    """

    run_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    ranks: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]],
        msgspec.Meta(min_length=1, max_length=MOST_RANKS),
    ]

    def problem(self, rank: int, world_size: int) -> str:
        """Return the reason why this cannot be the membership of the node of `rank`, in a
        job of `world_size` ranks, or "" if it can.
        """
        if any(low >= high for low, high in zip(self.ranks, self.ranks[1:], strict=False)):
            return "the ranks of the node are not in ascending order"
        if self.ranks[-1] >= world_size:
            return (
                f"rank {self.ranks[-1]} of the node does not exist: the job has {world_size} "
                "ranks, numbered from 0"
            )
        if rank not in self.ranks:
            return f"rank {rank} is not among the ranks of its node: {rank_list(self.ranks)}"
        if len(self.ranks) == world_size:
            return "the node has all ranks of the job, so the job is not one of several nodes"
        return ""

    @property
    def leads(self) -> bool:
        """True if rank 0 is on this node. The daemon of that node decides for all nodes
        whether a checkpoint is committed.
        """
        return self.ranks[0] == 0
