"""A model of a job on several nodes, whose nodes decide with the functions of the
product, and which is searched for broken promises.

A state has what each node holds, what is on the board, and what is in storage.
`explore` visits every state that some order of events leads to: a node seals or fails a
step, shows what it holds, hears the answer, copies a step to its peer, saves; all
trainers die; a node loses its memory; the nodes deliver what they hold, also on behalf
of the lost node; the next attempt decides the past. The job has one rank on each node,
and `slots` slots for each rank. The copies of a node are on the node after it. No event
is undone, so a job that lives comes to rest. It must then have settled every step, and
have a slot for the next one: otherwise it is stuck.

The decisions are those of `shared/wire/board.py`, `shared/formats/receipt.py`, and of
`holdings.py`, `peer_replicas.py` and `catalog.py` in `daemon/job`. The order in which a
copy is made is that of `daemon/engine/peer_copies.py`. A `Rules` object names the
decisions, so that a test can switch one off and see that the search finds what it
prevents.

`run` searches random jobs, and `python -m tests.support.node_model --most 10000000`
large ones.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ckptd.daemon.config import REPLICA_SLOTS
from ckptd.daemon.job import holdings, peer_replicas
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.decisions import Fail
from ckptd.daemon.job.ranks import Owner
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.errors import CkptdError
from ckptd.shared.formats import receipt
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.receipt import CommitTry, Receipt
from ckptd.shared.wire import board
from ckptd.shared.wire.board import Answer, Holding
from ckptd.shared.wire.lifecycle import SnapshotState

CLAIM = "0" * 32
HELD, SAVED, DURABLE, FAILED = "held", "saved", "durable", "failed"
_STATES = {
    HELD: SnapshotState.SEALED, SAVED: SnapshotState.WRITTEN, DURABLE: SnapshotState.DURABLE,
    FAILED: SnapshotState.FAILED,
}  # fmt: skip
_NO_ANSWER = msgspec.msgpack.encode(Answer())
_NO_HOLDING = b""


class NodeState(NamedTuple):
    """The knowledge of one node.

    `slots`: (step, state) of each step in memory. `taken`: the last step that it sealed
    or failed.

    `failed`: the steps that it could not take. `heard`: the last answer that it has
    heard, encoded. `durable`: the last step that it knows to be durable.

    `peers`: the steps of the node before it that it holds copies of. `receiving`: the
    step of that node that it is receiving, or 0. `copied`: the last step that it has
    copied to the node after it. `alone`: True once a copy of its own has failed.
    """

    slots: tuple[tuple[int, str], ...] = ()
    taken: int = 0
    failed: frozenset[int] = frozenset()
    heard: bytes = _NO_ANSWER
    durable: int = 0
    peers: tuple[int, ...] = ()
    receiving: int = 0
    copied: int = 0
    alone: bool = False


class State(NamedTuple):
    """A state of the model.

    `shown`: the holdings on the board, encoded. `answer`: the answer there, encoded.
    `receipts`: (step, node).

    `committed`: the steps with a manifest. `dead`: True once all trainers are dead.
    `promised`: the newest step that must come back. `replicated`: the newest step that
    an answer has called replicated. `lost`: the nodes that have lost their memory.
    """

    nodes: tuple[NodeState, ...]
    shown: tuple[bytes, ...]
    answer: bytes = _NO_ANSWER
    receipts: frozenset[tuple[int, int]] = frozenset()
    committed: frozenset[int] = frozenset()
    dead: bool = False
    promised: int = 0
    replicated: int = 0
    lost: frozenset[int] = frozenset()


def _replicating(job: Job) -> int:
    """Return the step that a node copies to its peer, or -1."""
    return job.answer.replicating


@dataclass(frozen=True, slots=True)
class Rules:
    """The decisions that the model makes, each with the product's own function by
    default.
    """

    answer: Callable[[dict[str, Holding], Answer], Answer] = board.answer
    decide: Callable[..., CommitTry | receipt.AbandonTry | None] = receipt.decide
    is_replaced: Callable[[Job, Snapshot, Snapshot], bool] = Job.is_replaced
    may_save: Callable[[Job, Snapshot], bool] = Job.may_save
    owed: Callable[[Job], list[Snapshot]] = Job.owed
    is_news: Callable[[Holding, Holding | None, Answer], bool] = board.is_news
    replicating: Callable[[Job], int] = _replicating
    is_needless: Callable[[Job, Snapshot], bool] = peer_replicas.is_needless
    owed_on_behalf: Callable[[Job], list[Snapshot]] = peer_replicas.owed


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """The search.

    `persist`: whether each step is to be saved, from step 1 on. `replicate`: whether
    each step is to be copied to a peer; () if there are no peer replicas. `losses`: how
    many nodes may lose their memory. `covered`: of how many lost nodes a replicated
    step is promised to come back.

    `failures`: True if a node may fail to take a step. `breaks`: True if a copy may
    fail.
    """

    persist: tuple[bool, ...]
    replicate: tuple[bool, ...] = ()
    count: int = 2
    slots: int = 2
    losses: int = 0
    covered: int = 1
    failures: bool = True
    breaks: bool = False
    rules: Rules = field(default=Rules(), repr=False)

    def explore(self, most: int = 10_000_000) -> tuple[int, str]:
        """Visit states breadth first, `most` at most.

        Return their number, and the first broken promise with the events that lead to
        it, or "".
        """
        before: dict[State, State | None] = {self.start(): None}
        left = deque(before)
        while left and len(before) < most:
            state = left.popleft()
            afters = [after for _, after in self.events(state)]
            if problem := self.broken(state, afters):
                return len(before), f"{problem}: {self._way(before, state)}"
            for after in afters:
                if after not in before:
                    before[after] = state
                    left.append(after)
        return len(before), ""

    def wander(self, walks: int, seed: int) -> tuple[int, str]:
        """Take random walks, each from the start until nothing more can happen.

        Return the number of events, and the first broken promise with the events that
        lead to it, or "".
        """
        chance, count = random.Random(seed), 0
        for _ in range(walks):
            state, way = self.start(), list[str]()
            # A job dies at a chosen time: most choices would end it early.
            life = chance.randint(1, 30 * len(self.persist) * self.count)
            while True:
                events = list(self.events(state))
                if problem := self.broken(state, [after for _, after in events]):
                    return count, f"{problem}: {', '.join(way)}"
                calm = [one for one in events if one[1].dead == state.dead and not one[1].lost]
                if not events:
                    break
                name, state = chance.choice(
                    events if not calm or len(way) >= life or state.dead else calm
                )
                way.append(name)
                count += 1
        return count, ""

    def start(self) -> State:
        return State((NodeState(),) * self.count, (_NO_HOLDING,) * self.count)

    def _way(self, before: dict[State, State | None], state: State) -> str:
        """Return the events that lead to a state."""
        names = list[str]()
        while (earlier := before[state]) is not None:
            names.append(next(name for name, after in self.events(earlier) if after == state))
            state = earlier
        return ", ".join(reversed(names))

    # -- promises

    def broken(self, state: State, afters: list[State]) -> str:
        """Return the promise that a state breaks, or "".

        afters: the states that follow it.
        """
        rests = not state.dead and all(after.dead for after in afters)
        return self.problem(state) or (self.stuck(state) if rests else "")

    def problem(self, state: State) -> str:
        for step in state.committed:
            if any((step, node) not in state.receipts for node in range(self.count)):
                return f"step {step} is committed without the parts of a node"
        if state.committed & _answer(state.answer).dead.keys():
            return "a step that is committed is called dead"
        if state.dead and (back := self.recovered(state)) is not None and back < state.promised:
            return f"step {back} comes back, and {state.promised} was promised"
        return ""

    def recovered(self, state: State) -> int | None:
        """Return the step that the next attempt recovers, or None if a node has not
        delivered all that it owes yet.
        """
        if any(
            self._owed(state, number) or self._owed_on_behalf(state, number)
            for number in range(self.count)
        ):
            return None
        found = {
            step
            for step in {step for step, _ in state.receipts}
            if isinstance(self._verdict(state, step, late=True), CommitTry)
        }
        return max(found | state.committed, default=0)

    def stuck(self, state: State) -> str:
        """Return why a job that lives cannot go on if nothing happens but its death, or
        "".
        """
        for number, node in enumerate(state.nodes):
            for step, where in node.slots:
                if where == SAVED or (where == HELD and self.persist[step - 1]):
                    return f"node {number} waits for ever with step {step}"
            if len(node.slots) >= self.slots:
                return f"node {number} has no slot for another step"
            if step := self._to_copy(number, node):
                return f"node {number} waits for ever for a place for a copy of step {step}"
        if (step := _answer(state.answer).replicating) >= 0:
            return f"step {step} is copied for ever"
        return ""

    # -- events

    def events(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the name of each event that may happen next, and the state after it.

        Once all trainers are dead and no other node is lost, the nodes deliver all that
        they owe. One order stands for all of them.
        """
        found = self._events(state)
        if state.dead and len(state.lost) == self.losses:
            found = itertools.islice(found, 1)
        return found

    def _events(self, state: State) -> Iterator[tuple[str, State]]:
        for number, node in enumerate(state.nodes):
            if not state.dead:
                yield from self._take(state, number, node)
                yield from self._show(state, number, node)
                yield from self._copy(state, number, node)
                if node.heard != state.answer:
                    yield (
                        f"node {number} hears",
                        self._with(state, number, node._replace(heard=state.answer)),
                    )
            yield from self._save(state, number, node)
            yield from self._save_on_behalf(state, number)
            yield from self._learn(state, number, node)
            if len(state.lost) < self.losses and (node.slots or node.peers):
                yield f"node {number} is lost", self._lose(state, number)
        if not state.dead:
            yield from self._answer(state)
            yield "the trainers die", self._die(state)
        for step in {step for step, _ in state.receipts} - state.committed:
            if (step, 0) in state.receipts and isinstance(
                self._verdict(state, step, late=False), CommitTry
            ):
                yield (
                    f"step {step} is committed",
                    self._promise(state._replace(committed=state.committed | {step})),
                )

    def _take(self, state: State, number: int, node: NodeState) -> Iterator[tuple[str, State]]:
        step = node.taken + 1
        if step > len(self.persist):
            return
        full = len(node.slots) >= self.slots
        if full or self.failures:
            yield (
                f"node {number} does not take step {step}",
                self._with(state, number, node._replace(taken=step, failed=node.failed | {step})),
            )
        if not full:
            sealed = node._replace(taken=step, slots=(*node.slots, (step, HELD)))
            yield (
                f"node {number} seals step {step}",
                self._promise(self._with(state, number, sealed)),
            )

    def _show(self, state: State, number: int, node: NodeState) -> Iterator[tuple[str, State]]:
        found, before = _holding(self, number, node), state.shown[number]
        if found != before and self.rules.is_news(
            _shown(found), _shown(before) if before else None, _answer(node.heard)
        ):
            shown = (*state.shown[:number], found, *state.shown[number + 1 :])
            yield f"node {number} shows", state._replace(shown=shown)

    def _answer(self, state: State) -> Iterator[tuple[str, State]]:
        if not all(state.shown):
            return
        found = _answered(self, state.shown, state.answer)
        if found != state.answer:
            newest = max([state.replicated, *_answer(found).replicated])
            yield "rank 0 answers", state._replace(answer=found, replicated=newest)

    # -- copies to peers

    def _to_copy(self, number: int, node: NodeState) -> int:
        """Return the step that a node has to copy to its peer, or 0."""
        step = self.rules.replicating(_job(self, number, node, here=True))
        held = step in dict(node.slots) and not node.alone
        return step if held and step != node.copied and self.replicate else 0

    def _copy(self, state: State, number: int, node: NodeState) -> Iterator[tuple[str, State]]:
        """Yield the beginning or the end of a copy of a step of this node."""
        step, peer = self._to_copy(number, node), (number + 1) % self.count
        if not step:
            return
        holder = state.nodes[peer]
        if step != holder.receiving:
            left = self._with_place(peer, holder)
            if left is not None:
                begun = holder._replace(peers=left, receiving=step)
                yield (
                    f"node {number} begins to copy step {step}",
                    self._with(state, peer, begun),
                )
            return
        whole = holder._replace(peers=(*holder.peers, step), receiving=0)
        made = self._with(state, peer, whole)
        yield (
            f"node {number} has copied step {step}",
            self._with(made, number, made.nodes[number]._replace(copied=step)),
        )
        if self.breaks:
            # The node may learn of a failure although the copy is whole.
            for name, after in (
                (f"the copy of step {step} of node {number} fails",
                 self._with(state, peer, holder._replace(receiving=0))),
                (f"the copy of step {step} is whole, and node {number} does not hear", made),
            ):  # fmt: skip
                alone = after.nodes[number]._replace(alone=True)
                yield name, self._with(after, number, alone)

    def _with_place(self, number: int, node: NodeState) -> tuple[int, ...] | None:
        """Return the copies that stay when a node makes a place for another one, or None
        if it must keep all. A copy that it is receiving is given up.
        """
        job, before = _job(self, number, node, here=True), (number - 1) % self.count
        for step in sorted(node.peers):
            if self.rules.is_needless(job, job.peer_replicas[(1, step), before]):
                return tuple(other for other in node.peers if other != step)
        return node.peers if len(node.peers) < REPLICA_SLOTS else None

    # -- saves

    def _save(self, state: State, number: int, node: NodeState) -> Iterator[tuple[str, State]]:
        job, owed = self._job(state, number), self._owed(state, number)
        for step, where in node.slots:
            snapshot = job.steps[1, step].snapshot
            assert snapshot is not None
            if not ((self.persist[step - 1] and where == HELD) or snapshot in owed):
                continue
            try:
                if self.rules.may_save(job, snapshot):
                    saved = self._move(state, number, step, SAVED)
                    yield (
                        f"node {number} saves step {step}",
                        saved._replace(receipts=state.receipts | {(step, number)}),
                    )
            except CkptdError:  # the step is dead
                yield (
                    f"node {number} gives up step {step}",
                    self._move(state, number, step, FAILED),
                )
            break  # saves run in the order of the seals

    def _save_on_behalf(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        for step, lost in self._owed_on_behalf(state, number)[:1]:
            yield (
                f"node {number} saves step {step} on behalf of node {lost}",
                state._replace(receipts=state.receipts | {(step, lost)}),
            )

    def _learn(self, state: State, number: int, node: NodeState) -> Iterator[tuple[str, State]]:
        for step, where in node.slots:
            if where == SAVED and step in state.committed:
                slots = _moved(node.slots, step, DURABLE)
                known = node._replace(slots=slots, durable=max(node.durable, step))
                yield (
                    f"node {number} learns that step {step} is durable",
                    self._with(state, number, known),
                )

    # -- the end

    def _die(self, state: State) -> State:
        """Return the state after the death of all trainers, without what then no longer
        matters.
        """
        nodes = tuple(
            NodeState(slots=node.slots, heard=node.heard, durable=node.durable, peers=node.peers)
            for node in state.nodes
        )
        return state._replace(nodes=nodes, shown=(), dead=True)

    def _lose(self, state: State, number: int) -> State:
        """Return the state after the loss of a node. A step that is durable must come
        back all the same, and so must one that was replicated.
        """
        after, lost = self._die(state), state.lost | {number}
        nodes = (*after.nodes[:number], NodeState(), *after.nodes[number + 1 :])
        promised = {*state.committed, state.replicated if len(lost) <= self.covered else 0}
        return after._replace(nodes=nodes, lost=lost, promised=max(promised))

    # -- the product's view

    def _job(self, state: State, number: int) -> Job:
        return _job(self, number, state.nodes[number], here=not state.dead)

    def _owed(self, state: State, number: int) -> list[Snapshot]:
        return _owed(self, number, state.nodes[number]) if state.dead else []

    def _owed_on_behalf(self, state: State, number: int) -> list[tuple[int, int]]:
        """Return step and node of each copy that a node must save for a lost node, and
        that has no receipt yet.
        """
        before = (number - 1) % self.count
        if before not in state.lost or not state.nodes[number].peers:
            return []
        owed = self.rules.owed_on_behalf(self._job(state, number))
        return [(s.step, before) for s in owed if (s.step, before) not in state.receipts]

    def _verdict(
        self, state: State, step: int, *, late: bool
    ) -> CommitTry | receipt.AbandonTry | None:
        nodes = [node for node in range(self.count) if (step, node) in state.receipts]
        return _verdict(self, step, tuple(nodes), late=late)

    def _promise(self, state: State) -> State:
        """Raise the promise to the newest step that all nodes have sealed, while no
        memory is lost, or that is committed.
        """
        sealed = [{s for s, w in node.slots if w != FAILED} for node in state.nodes]
        common = set.intersection(*sealed) if not state.lost else set()
        return state._replace(promised=max([state.promised, *common, *state.committed]))

    def _move(self, state: State, number: int, step: int, to: str) -> State:
        node = state.nodes[number]
        return self._with(state, number, node._replace(slots=_moved(node.slots, step, to)))

    def _with(self, state: State, number: int, node: NodeState) -> State:
        """Return the state with another node, which has freed what it no longer needs."""
        node = _released(self, number, node, here=not state.dead)
        return state._replace(nodes=(*state.nodes[:number], node, *state.nodes[number + 1 :]))


def _moved(slots: tuple[tuple[int, str], ...], step: int, to: str) -> tuple[tuple[int, str], ...]:
    return tuple((s, to if s == step else where) for s, where in slots)


@functools.lru_cache(maxsize=1 << 17)
def _job(model: Model, number: int, node: NodeState, *, here: bool) -> Job:
    """Return the daemon's knowledge of the job on a node."""
    share = Membership(run_id=CLAIM, ranks=[number])
    job = Job("gpt", attempt=1, world_size=model.count, node=share, answer=_answer(node.heard))
    if here:
        job.ranks.join(Owner("gpt", 1, number, model.count))
    for step, where in node.slots:
        snapshot = _snapshot(model, number, step)
        snapshot.state, snapshot.persist = _STATES[where], model.persist[step - 1]
        snapshot.replicate = bool(model.replicate) and model.replicate[step - 1]
        job.occupy(f"{step}", number, (1, step)).snapshot = snapshot
    before = (number - 1) % model.count
    for step in node.peers:
        replica = _snapshot(model, before, step)
        replica.peer_replica = True
        job.peer_replicas[(1, step), before] = replica
    for step in node.failed:
        job.step((1, step)).failure = ("snapshot-failed", "no memory")
    job.sealed = (1, node.taken) if node.taken else (0, -1)
    job.alone = "the peer is gone" if node.alone else ""
    if node.durable:
        job.checkpoints[_tag(node.durable)] = StoredCheckpoint(
            "gpt", _tag(node.durable), 1, node.durable, node.durable, 1, (), user_tag=False
        )
    return job


def _snapshot(model: Model, rank: int, step: int) -> Snapshot:
    """Return the sealed snapshot of the node with this rank."""
    return Snapshot(
        "gpt", 1, step, _tag(step), model.count, persist=False, state=SnapshotState.SEALED,
        seals={rank: RankSeal(rank, f"{step}", 1, b"", checks=[])},
        node=Membership(run_id=CLAIM, ranks=[rank]),
    )  # fmt: skip


@functools.lru_cache(maxsize=1 << 17)
def _released(model: Model, number: int, node: NodeState, *, here: bool) -> NodeState:
    """Return a node without the slots that its daemon frees at once: those of dead
    steps, and of those that a newer one replaces.
    """
    job = _job(model, number, node, here=here)
    for action in holdings.answered(job):
        if isinstance(action, Fail) and action.key[1] in dict(node.slots):
            node = node._replace(slots=_moved(node.slots, action.key[1], FAILED))
    job = _job(model, number, node, here=here)
    newest = job.newest_in_memory()
    freed = {
        snapshot.step
        for snapshot in job.snapshots
        if job.is_settled(snapshot)
        and (
            job.is_dead(snapshot)
            or (newest is not None and model.rules.is_replaced(job, snapshot, newest))
        )
    }
    return node._replace(slots=tuple(slot for slot in node.slots if slot[0] not in freed))


@functools.lru_cache(maxsize=1 << 17)
def _owed(model: Model, number: int, node: NodeState) -> list[Snapshot]:
    """Return what a node without trainers must save."""
    return model.rules.owed(_job(model, number, node, here=False))


@functools.lru_cache(maxsize=1 << 12)
def _verdict(
    model: Model, step: int, nodes: tuple[int, ...], *, late: bool
) -> CommitTry | receipt.AbandonTry | None:
    """Return what rank 0 decides when it finds the receipts of these nodes."""
    found = [_receipt(step, node, model.count) for node in nodes]
    return model.rules.decide(found, model.count, late=late)


@functools.lru_cache(maxsize=1 << 17)
def _holding(model: Model, number: int, node: NodeState) -> bytes:
    """Return what a node shows on the board, encoded."""
    return msgspec.msgpack.encode(holdings.holding(_job(model, number, node, here=True), "a node"))


@functools.lru_cache(maxsize=1 << 17)
def _answered(model: Model, shown: tuple[bytes, ...], before: bytes) -> bytes:
    """Return the answer to the holdings on the board, encoded without the names of nodes
    in its reasons, which make no difference.
    """
    nodes = {f"node{number}": _shown(value) for number, value in enumerate(shown)}
    found = model.rules.answer(nodes, _answer(before))
    return msgspec.msgpack.encode(
        msgspec.structs.replace(
            found,
            dead=dict.fromkeys(found.dead, ("snapshot-failed", "dead")),
            alone="alone" if found.alone else "",
        )
    )


@functools.lru_cache(maxsize=1 << 16)
def _answer(value: bytes) -> Answer:
    return msgspec.msgpack.decode(value, type=Answer)


@functools.lru_cache(maxsize=1 << 16)
def _shown(value: bytes) -> Holding:
    return msgspec.msgpack.decode(value, type=Holding)


def _tag(step: int) -> str:
    return f"step-{step:08d}.a0001"


@functools.lru_cache
def _receipt(step: int, node: int, count: int) -> Receipt:
    part = PartEntry(
        rank=node,
        file=f"rank-{node:05d}.{CLAIM}.ckpt",
        bytes=1,
        raw_bytes=1,
        items=1,
        index_sha256="0" * 64,
    )
    return Receipt(
        job="gpt", attempt=1, step=step, tag=_tag(step), node=Membership(run_id=CLAIM,
        ranks=[node]), host=f"node{node}", world_size=count, global_plan="00", parts=[part],
    )  # fmt: skip


def _searches() -> Iterator[Model]:
    """Yield models that are too large for a test."""
    for persist in ((False,) * 3, (False, True, False), (True,) * 3):
        yield Model(persist, (True, False, True), slots=3, losses=1, breaks=True)
    yield Model((False,) * 3, (True,) * 3, slots=3, losses=1, breaks=True)
    yield Model((False,) * 2, (True,) * 2, count=3, slots=3, losses=1, breaks=True)


def _any_model(chance: random.Random) -> Model:
    """Return a model of a few nodes that take 5 to 9 steps."""
    steps, saved = chance.randint(5, 9), chance.choice((0, 0.3))
    return Model(
        persist=tuple(chance.random() < saved for _ in range(steps)),
        replicate=tuple(chance.random() < 0.6 for _ in range(steps)),
        count=chance.choice((2, 3, 4)),
        slots=chance.choice((3, 4, 5)),
        losses=1,
        failures=chance.random() < 0.4,
        breaks=chance.random() < 0.3,
    )


def _small_model(chance: random.Random) -> Model:
    """Return a model of two nodes that take 2 or 3 steps, with or without copies."""
    steps, copies = chance.choice((2, 3)), chance.random() < 0.6
    return Model(
        persist=tuple(chance.random() < 0.5 for _ in range(steps)),
        replicate=tuple(chance.random() < 0.6 for _ in range(steps)) if copies else (),
        slots=3 if copies else 2,
        losses=chance.choice((0, 1)),
        failures=not copies or chance.random() < 0.3,
        breaks=copies and chance.random() < 0.5,
    )


_WALKS = 50  # of each job
_MOST_STATES = 40_000  # of each job


def run(count: int, number: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Visit the states of random small jobs, and take random walks of larger ones.

    Return the number of states and events, and the first broken promise. `number` is the
    seed.
    """
    tried, end, chance = Counter[str](), time.monotonic() + seconds, random.Random(number)
    while tried.total() < count and (not tried or time.monotonic() < end):
        small, large = _small_model(chance), _any_model(chance)
        states, problem = small.explore(_MOST_STATES)
        events, other = large.wander(_WALKS, chance.getrandbits(32))
        tried.update(states=states, events=events)
        for model, broken in ((small, problem), (large, other)):
            if broken:
                return tried, [f"{model}: {broken}"]
    return tried, []


def main() -> None:
    """Search for longer than the tests do. Print the number and the rate of the states or
    events of each search, and the first broken promise.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--most", type=int, default=1_000_000, help="states of each search")
    parser.add_argument("--walks", type=int, default=10_000, help="random walks, each of any job")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    for model in _searches():
        begun = time.monotonic()
        states, problem = model.explore(asked.most)
        _report(f"{states:,d} states", states, begun, f"{model}: {problem or 'nothing broken'}")
    begun, events, chance = time.monotonic(), 0, random.Random(asked.seed)
    for _ in range(0, asked.walks, _WALKS):
        model = _any_model(chance)
        found, problem = model.wander(_WALKS, chance.randrange(1 << 32))
        events += found
        if problem:
            print(f"{model}: {problem}")
    _report(f"{events:,d} events", events, begun, f"{asked.walks:,d} walks")


def _report(count: str, number: int, begun: float, text: str) -> None:
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    rate = number / (time.monotonic() - begun)
    print(f"{count}, {rate:,.0f} a second, {gigabytes:.1f} GiB: {text}", flush=True)


if __name__ == "__main__":
    main()
