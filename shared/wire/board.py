"""The board of an attempt of several nodes: the steps that each node holds, and the
answer of rank 0's node to all of them.

The agents carry these values through the job's store, because the daemons open no ports
to each other. The board saves work, and correctness does not depend on it: a node that
gets no answer saves every step that it holds, and the storage decides which steps are
complete. With an answer, a node does not write steps that cannot be complete, and frees
snapshots that are kept in memory only. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec

from ckptd.shared.formats.membership import MOST_RANKS
from ckptd.shared.formats.replicas import MOST_BRIEFS, Brief, apart

MOST_STEPS = 64
"""The most steps that one value on the board lists. A node has at most 8 slots for each
rank, so it holds fewer at any time.
"""
MOST_TEXT = 400
"""The most characters of a reason on the board."""

StepNumber = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
ShortText = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
RankNumbers = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]], msgspec.Meta(max_length=MOST_RANKS)
]


class Holding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The steps of one attempt that one node holds.

    held: the steps that all ranks of the node have sealed, and whose slots are not free
        yet.
    done: of the steps up to this one, the node will seal none but those in `held`. It
        is -1 before the first step.
    durable: the newest step that the node knows to be durable, or -1.
    failed: the code and the reason of each of the last steps that the node could not
        take.
    ranks: the ranks of the node. An older daemon leaves them out.
    begun: for each step that the node began some time ago and does not hold yet, the
        ranks of the node that have not come to it.
    overdue: the steps for which a rank of the node has waited long.
    replicas: for each step in `held`, digests of the tensors that ranks of the node
        share with ranks of other nodes.
    wanted: the steps in `held` that are to be copied to peers.
    hosted: for each step, the lowest rank of each node whose whole snapshot this node
        holds a copy of; left out if there is none.
    alone: the reason why this node makes no peer replicas any more, or "".
    drained: the steps in `held` that a drain of this node has asked for.
    """

    held: Annotated[list[StepNumber], msgspec.Meta(max_length=MOST_STEPS)] = []
    done: Annotated[int, msgspec.Meta(ge=-1, lt=10**18)] = -1
    durable: Annotated[int, msgspec.Meta(ge=-1, lt=10**18)] = -1
    failed: Annotated[
        dict[StepNumber, tuple[ShortText, ShortText]], msgspec.Meta(max_length=MOST_STEPS)
    ] = {}
    ranks: RankNumbers = []
    begun: Annotated[dict[StepNumber, RankNumbers], msgspec.Meta(max_length=MOST_STEPS)] = {}
    overdue: Annotated[list[StepNumber], msgspec.Meta(max_length=MOST_STEPS)] = []
    replicas: Annotated[
        dict[StepNumber, Annotated[list[Brief], msgspec.Meta(max_length=MOST_BRIEFS)]],
        msgspec.Meta(max_length=MOST_STEPS),
    ] = {}
    wanted: Annotated[list[StepNumber], msgspec.Meta(max_length=MOST_STEPS)] = []
    hosted: Annotated[dict[StepNumber, RankNumbers], msgspec.Meta(max_length=MOST_STEPS)] = {}
    alone: ShortText = ""
    drained: Annotated[list[StepNumber], msgspec.Meta(max_length=MOST_STEPS)] = []


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of rank 0's node to all nodes.

    common: the last steps that all nodes hold or have held, ascending. A node may save
        them, and may free older steps that will not be saved.
    dead: the code and the reason of each step that a node holds and another node will
        never seal. Such a step can never be complete.
    missing: the first step that is overdue on a node, with the ranks of all nodes that
        have not come to it. Empty if no step is overdue.
    replicating: the step that all nodes copy to their peers now, or -1. One step at a
        time, because a step is worth nothing in a peer unless all nodes have copied it.
    replicated: the last steps that all nodes have copied to their peers, ascending.
    alone: the reason why no node makes peer replicas any more in this attempt, or "".
    drained: the steps in `common` that a drain of a node has asked for. Each node saves
        them, because a checkpoint needs the parts of all nodes.
    """

    common: Annotated[list[StepNumber], msgspec.Meta(max_length=MOST_STEPS)] = []
    dead: Annotated[
        dict[StepNumber, tuple[ShortText, ShortText]], msgspec.Meta(max_length=MOST_STEPS)
    ] = {}
    missing: Annotated[dict[StepNumber, RankNumbers], msgspec.Meta(max_length=1)] = {}
    replicating: Annotated[int, msgspec.Meta(ge=-1, lt=10**18)] = -1
    replicated: Annotated[list[StepNumber], msgspec.Meta(max_length=MOST_STEPS)] = []
    alone: ShortText = ""
    drained: Annotated[list[StepNumber], msgspec.Meta(max_length=MOST_STEPS)] = []


def answer(nodes: Mapping[str, Holding], before: Answer) -> Answer:
    """Return the answer to the holdings of all nodes.

    nodes: the holding of each node, by the name of the node. before: the last answer.

    A step becomes common once every node holds it. It becomes dead in two cases: ranks
    of different nodes hold different copies of a tensor that they share, or one node
    holds the step and another node is done with it and does not hold it. A step that is
    common or dead stays so.

    A step that is durable, or older than a durable step, never becomes dead, because a
    node without it may have held and freed it.
    """
    listed = [set(node.held) for node in nodes.values()]
    everywhere = (
        set.intersection(*listed) - before.dead.keys() - set(before.common) if listed else set()
    )
    differ = {
        step: why
        for step in everywhere
        if (why := apart(node.replicas.get(step, ()) for node in nodes.values()))
    }
    common = set(before.common).union(everywhere - differ.keys())
    durable = max((node.durable for node in nodes.values()), default=-1)
    dead = before.dead | {
        step: ("snapshot-failed", f"step {step} failed: {why}"[:MOST_TEXT])
        for step, why in differ.items()
    }
    for step in set().union(*listed) - common - dead.keys():
        if step <= durable:
            continue
        for name, node in nodes.items():
            if step not in node.held and node.done >= step:
                code, reason = node.failed.get(
                    step, ("snapshot-failed", f"step {step} was not taken on {name}")
                )
                dead[step] = (code, reason)
                break
    alone = before.alone or next((node.alone for node in nodes.values() if node.alone), "")
    # Without a step to copy, the nodes have begun to free their own slots of the last one.
    copied = set[int]() if alone else _copied(nodes.values(), common)
    replicated = sorted({*before.replicated, *copied})
    drained = {*before.drained, *(step for node in nodes.values() for step in node.drained)}
    return Answer(
        common=sorted(common)[-MOST_STEPS:],
        dead={step: dead[step] for step in sorted(dead)[-MOST_STEPS:]},
        missing=_missing(nodes.values(), {*common, *dead}, durable),
        replicating=-1
        if alone
        else replicating(nodes.values(), before.replicating, common, replicated),
        replicated=replicated[-MOST_STEPS:],
        alone=alone,
        drained=sorted(drained.intersection(common))[-MOST_STEPS:],
    )


def _copied(nodes: Collection[Holding], common: Collection[int]) -> set[int]:
    """Return the common steps that every node has copied whole to another node."""
    leaders = {node.ranks[0] for node in nodes if node.ranks}
    return {
        step
        for step in common
        if leaders and leaders <= {rank for node in nodes for rank in node.hosted.get(step, ())}
    }


def replicating(
    nodes: Collection[Holding], before: int, common: Collection[int], replicated: Collection[int]
) -> int:
    """Return the step that all nodes copy to their peers next, or -1.

    before: the step that they copy now, or -1. It stays until it is replicated, or until
    a node no longer holds it. The next one is the newest common step that all nodes
    hold and are to copy, if no step after it is replicated.
    """
    if not nodes:
        return -1
    wanted = set.intersection(*(set(node.held).intersection(node.wanted) for node in nodes))
    newest = max(replicated, default=-1)
    if before in wanted and before > newest:
        return before
    return max((step for step in wanted.intersection(common) if step > newest), default=-1)


def _missing(
    nodes: Collection[Holding], decided: Collection[int], durable: int
) -> dict[int, list[int]]:
    """Return the first overdue step to which ranks have not come, with these ranks.

    Return {} if there is no such step.

    decided: the steps that are common or dead. durable: the newest step that is durable
    on a node.
    """
    overdue = {step for node in nodes for step in node.overdue if step > durable}
    for step in sorted(overdue.difference(decided)):
        if ranks := sorted(rank for node in nodes for rank in _not_come(node, step)):
            return {step: ranks[:MOST_RANKS]}
    return {}


def _not_come(node: Holding, step: int) -> list[int]:
    """Return the ranks of a node that have not come to a step."""
    return [] if step in node.held or step <= node.done else node.begun.get(step, node.ranks)


def is_news(holding: Holding, written: Holding | None, known: Answer) -> bool:
    """Return True if another node may wait for a change in the holding of this node.

    written: the holding that the node has written last, or None if it has written none.
    known: the last answer that the node has read.

    No node waits to learn that a step of the answer has become durable, or is freed.
    """
    if (
        written is None
        or holding.done != written.done
        or holding.failed.keys() - written.failed.keys()
        or any(ranks != written.begun.get(step) for step, ranks in holding.begun.items())
        or holding.alone != written.alone
        or set(holding.drained).difference(written.drained)
        or any(ranks != written.hosted.get(step) for step, ranks in holding.hosted.items())
        or (known.replicating in written.held and known.replicating not in holding.held)
    ):
        return True
    changed = set(holding.held).symmetric_difference(written.held)
    changed.update(set(holding.overdue).difference(written.overdue))
    return any(is_open(step, holding, known) for step in changed)


def is_open(step: int, holding: Holding, known: Answer) -> bool:
    """Return True if, as far as a node knows, a step is neither durable nor common nor
    dead.

    holding: the holding of the node. known: the last answer that it has read.
    """
    return step > holding.durable and step not in known.common and step not in known.dead


def waits_for_copies(holding: Holding, known: Answer) -> bool:
    """Return True if a node waits for news of peer replicas: a step that it is to copy is
    neither replicated nor dead, or the other nodes do not know yet that it makes no more
    copies.

    known: the last answer that the node has read.
    """
    if known.alone or holding.alone:
        return not known.alone
    newest = max(known.replicated, default=-1)
    return any(step > newest and step not in known.dead for step in holding.wanted)


def is_quiet(nodes: Mapping[str, Holding], given: Answer) -> bool:
    """Return True if no node waits for another one: all nodes are done with the same
    steps, and every step that a node holds is durable, common or dead.

    given: the last answer to all nodes.
    """
    durable = max((node.durable for node in nodes.values()), default=-1)
    return len({node.done for node in nodes.values()}) == 1 and not any(
        waits_for_copies(node, given)
        or any(step > durable and is_open(step, node, given) for step in node.held)
        or any(step > durable and step not in given.drained for step in node.drained)
        for node in nodes.values()
    )
