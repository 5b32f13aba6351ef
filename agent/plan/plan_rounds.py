"""Plans a snapshot with the other ranks: by rule if the descriptions of all ranks fit
together, and otherwise item by item.

By rule takes two rounds: each rank sends a summary, and then one rank of each class
sends the structure of the class. If rank 0 finds that a rule does not hold, or that two
ranks may differ, a third round follows, in which each rank sends all its items. The
third round also names what differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import zstandard

from ckptd.agent.link.rounds import RankGroup
from ckptd.agent.plan.by_rule import ByRule, RuledShare, Structured, Summary
from ckptd.agent.plan.layout import Layout, Local
from ckptd.agent.plan.replica_groups import ReplicaGroup
from ckptd.agent.plan.rule_shares import Decision, decide, representatives
from ckptd.agent.plan.shares import Offer, Share, share_out
from ckptd.shared.errors import CkptdError


@dataclass(frozen=True, slots=True)
class Description:
    """The description of what this rank could write: its rows, the digests of its plain
    values by key, and the same by rule.
    """

    local: Local
    values: dict[str, bytes]
    by_rule: ByRule

    @classmethod
    def of(
        cls,
        local: Local,
        tensors: dict[str, torch.Tensor],
        values: dict[str, bytes],
        rank: int,
        buffers: set[str],
    ) -> Description:
        """Describe `local`, which has the rows of `tensors`.

        `buffers` are the names of the modules' buffers.
        """
        return cls(local, values, ByRule.of(local, tensors, values, rank, buffers))


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The result of a planning for this rank.

    local: the items that it could write. layout: the layout of the items that it does
    write. groups: its replica groups.
    """

    local: Local
    layout: Layout
    groups: list[ReplicaGroup]


@dataclass(slots=True)
class PlanRounds:
    """The rounds of one planning.

    `topic` is its name in the job's store, `deadline` a time of the monotonic clock.

    `unwanted` returns an error as soon as the plan is no longer wanted.
    """

    ranks: RankGroup
    topic: str
    deadline: float
    unwanted: Callable[[], CkptdError | None]
    _summaries: list[Summary] = field(default_factory=list)
    _representatives: dict[bytes, int] = field(default_factory=dict)
    _decision: Decision | None = None

    def run(self, describe: Callable[[], Description]) -> PlanResult:
        """Plan with the other ranks, and return the result for this rank.

        An error of `describe` is raised on all ranks.

        Raises UnsavableValue if the ranks contradict each other, and the errors of a
        round.
        """
        found: list[Description] = []

        def summary() -> bytes:
            found.append(describe())
            return msgspec.msgpack.encode(found[0].by_rule.summary)

        wanted = self._round("classes", summary, self._choose_representatives)
        mine = found[0]
        answer = self._round(
            "structures", lambda: mine.by_rule.structured.encode() if wanted else b"", self._decide
        )
        if answer:
            metadata = None if self._decision is None else self._decision.metadata
            ruled = _RULED_SHARE.decode(zstandard.decompress(answer))
            layout = mine.by_rule.lay_out(ruled, self.ranks.rank, metadata)
            return PlanResult(
                mine.local, layout, mine.by_rule.replica_groups(ruled, self.ranks.rank)
            )
        answer = self._round(
            "items", lambda: msgspec.msgpack.encode(Offer(mine.local.rows, mine.values)), _share_out
        )
        share = _SHARE.decode(answer)
        return PlanResult(mine.local, share.lay_out(mine.local), share.replica_groups(mine.local))

    def _round(
        self, name: str, say: Callable[[], bytes], decided: Callable[[list[bytes]], list[bytes]]
    ) -> bytes:
        mine: bytes | CkptdError
        try:
            mine = say()
        except CkptdError as error:
            mine = error
        return self.ranks.round(
            f"{self.topic}/{name}",
            mine,
            decided,
            max(0.0, self.deadline - time.monotonic()),
            self.unwanted,
        )

    # -- on rank 0

    def _choose_representatives(self, said: list[bytes]) -> list[bytes]:
        """Return b"1" for each rank that is to send the structure of its class, and b""
        for the others.
        """
        self._summaries = [_SUMMARY.decode(one) for one in said]
        self._representatives = representatives(self._summaries)
        chosen = set(self._representatives.values())
        return [b"1" if rank in chosen else b"" for rank in range(len(said))]

    def _decide(self, said: Sequence[bytes]) -> list[bytes]:
        """Return the share of each rank's class, or b"" for all ranks if they must send
        their items.
        """
        structures = {
            name: Structured.decode(said[rank]) for name, rank in self._representatives.items()
        }
        self._decision = decide(self._summaries, structures)
        if self._decision is None:
            return [b""] * len(said)
        shares = {
            name: zstandard.compress(msgspec.msgpack.encode(share))
            for name, share in self._decision.shares.items()
        }
        return [shares[summary.structure] for summary in self._summaries]


def _share_out(said: list[bytes]) -> list[bytes]:
    return [
        msgspec.msgpack.encode(share) for share in share_out([_OFFER.decode(one) for one in said])
    ]


_SUMMARY = msgspec.msgpack.Decoder(Summary)
_RULED_SHARE = msgspec.msgpack.Decoder(RuledShare)
_OFFER = msgspec.msgpack.Decoder(Offer)
_SHARE = msgspec.msgpack.Decoder(Share)
