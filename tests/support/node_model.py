"""A model of a job on several nodes, whose nodes decide with the functions of the
product, and which is searched for broken promises.

A state has what each node holds, what is on the board, and what is in storage.
`explore` visits every state that some order of events leads to: a node seals or fails a
step, shows what it holds, hears the answer, frees a slot, saves; all trainers die; a
node loses its memory; the next attempt decides the past. The job has one rank on each
node, and `slots` slots for each rank. No event is undone, so a job that lives comes to
rest. It must then have settled every step, and have a slot for the next one: otherwise
it is stuck.

The decisions are those of `shared/wire/board.py`, `shared/formats/receipt.py`,
`daemon/job/holdings.py` and `daemon/job/catalog.py`. A `Rules` object names them, so
that a test can switch one off and see that the search finds what it prevents.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ckptd.daemon.job import holdings
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


class NodeState(NamedTuple):
    """The knowledge of one node.

    `slots`: (step, state) of each step in memory. `taken`: the last step that it sealed
    or failed.

    `failed`: the steps that it could not take. `heard`: the common and the dead steps
    of the last answer. `durable`: the last step that it knows to be durable.
    """

    slots: tuple[tuple[int, str], ...] = ()
    taken: int = 0
    failed: frozenset[int] = frozenset()
    heard: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    durable: int = 0


class State(NamedTuple):
    """A state of the model.

    `shown`: the holdings on the board. `answer`: the answer there. `receipts`: (step,
    node).

    `committed`, `abandoned`: the outcomes. `dead`: True once all trainers are dead.
    `promised`: the newest step that must come back. `lost`: the number of nodes that
    have lost their memory.
    """

    nodes: tuple[NodeState, ...]
    shown: tuple[tuple[tuple[int, ...], int, int, frozenset[int]], ...]
    answer: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    receipts: frozenset[tuple[int, int]] = frozenset()
    committed: frozenset[int] = frozenset()
    abandoned: frozenset[int] = frozenset()
    dead: bool = False
    promised: int = 0
    lost: int = 0


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


@dataclass(frozen=True, slots=True)
class Model:
    """The search.

    `persist`: whether each step is to be saved, from step 1 on. `losses`: how many
    nodes may lose their memory.
    """

    persist: tuple[bool, ...]
    count: int = 2
    slots: int = 2
    losses: int = 0
    rules: Rules = Rules()

    def explore(self, most: int = 10_000_000) -> tuple[int, str]:
        """Visit states breadth first, `most` at most.

        Return their number, and the first broken promise, or "".
        """
        start = State((NodeState(),) * self.count, (((), -1, -1, frozenset()),) * self.count)
        seen, left = {start}, deque([start])
        while left and len(seen) < most:
            state = left.popleft()
            if problem := self.problem(state):
                return len(seen), f"{problem}: {state}"
            rests = not state.dead
            for after in self.events(state):
                rests = rests and after.dead
                if after not in seen:
                    seen.add(after)
                    left.append(after)
            if rests and (problem := self.stuck(state)):
                return len(seen), f"{problem}: {state}"
        return len(seen), ""

    # -- promises

    def problem(self, state: State) -> str:
        if state.committed & state.abandoned:
            return "a step has two outcomes"
        for step in state.committed:
            if any((step, node) not in state.receipts for node in range(self.count)):
                return f"step {step} is committed without the parts of a node"
        if state.committed & state.answer[1]:
            return "a step that is committed is called dead"
        if state.dead and (back := self.recovered(state)) is not None and back < state.promised:
            return f"step {back} comes back, and {state.promised} was promised"
        return ""

    def recovered(self, state: State) -> int | None:
        """Return the step that the next attempt recovers, or None if a node has not
        delivered all that it owes yet.
        """
        for number, node in enumerate(state.nodes):
            if any(
                self._job(state, number).steps[1, step].snapshot in self._owed(state, number)
                for step, _ in node.slots
            ):
                return None
        found = set(state.committed)
        for step in {step for step, _ in state.receipts} - state.abandoned:
            if isinstance(self._verdict(state, step, late=True), CommitTry):
                found.add(step)
        return max(found, default=0)

    def stuck(self, state: State) -> str:
        """Return why a job that lives cannot go on if nothing happens but its death, or
        "".
        """
        for number, node in enumerate(state.nodes):
            for step, where in node.slots:
                if where == SAVED or (where == HELD and self.persist[step - 1]):
                    return f"node {number} waits for ever with step {step}"
            if len(self._kept(self._job(state, number), node)) >= self.slots:
                return f"node {number} has no slot for another step"
        return ""

    # -- events

    def events(self, state: State) -> Iterator[State]:
        for number, node in enumerate(state.nodes):
            if not state.dead:
                yield from self._take(state, number, node)
                yield from self._show(state, number)
                if node.heard != state.answer:
                    yield self._hear(state, number, node)
            yield from self._save(state, number, node)
            yield from self._learn(state, number, node)
            if state.lost < self.losses and node.slots:
                # A step that is durable must come back all the same.
                after = self._with(state, number, node._replace(slots=()))
                yield after._replace(
                    lost=state.lost + 1, promised=max(state.committed, default=0), dead=True
                )
        if not state.dead:
            yield from self._answer(state)
            yield state._replace(dead=True)
        for step in {step for step, _ in state.receipts} - state.committed - state.abandoned:
            if (step, 0) in state.receipts and isinstance(
                self._verdict(state, step, late=False), CommitTry
            ):
                yield self._promise(state._replace(committed=state.committed | {step}))

    def _take(self, state: State, number: int, node: NodeState) -> Iterator[State]:
        step = node.taken + 1
        if step > len(self.persist):
            return
        yield self._with(state, number, node._replace(taken=step, failed=node.failed | {step}))
        kept = self._kept(self._job(state, number), node)
        if len(kept) < self.slots:
            kept[step] = HELD
            yield self._promise(
                self._with(
                    state, number, node._replace(taken=step, slots=tuple(sorted(kept.items())))
                )
            )

    def _kept(self, job: Job, node: NodeState) -> dict[int, str]:
        """Return the slots that stay occupied when the node needs one for another step.

        Those of dead steps are freed at once.
        """
        kept, newest = (
            {step: where for step, where in node.slots if where != FAILED},
            job.newest_in_memory(),
        )
        for snapshot in job.snapshots:
            if (
                snapshot.step in kept
                and newest is not None
                and len(kept) >= self.slots
                and job.is_settled(snapshot)
                and self._replaced(job, snapshot, newest)
            ):
                del kept[snapshot.step]
        return kept

    def _replaced(self, job: Job, snapshot: Snapshot, newest: Snapshot) -> bool:
        # The new step replaces the newest one, which the daemon would free once the new
        # one is sealed.
        return self.rules.is_replaced(job, snapshot, newest)

    def _show(self, state: State, number: int) -> Iterator[State]:
        found = holdings.holding(self._job(state, number), f"node{number}")
        value = (tuple(found.held), found.done, found.durable, frozenset(found.failed))
        if self.rules.is_news(
            found, _shown(state.shown[number]), _answer_of(state.nodes[number].heard)
        ):
            yield state._replace(shown=(*state.shown[:number], value, *state.shown[number + 1 :]))

    def _answer(self, state: State) -> Iterator[State]:
        shown = {f"node{number}": _shown(value) for number, value in enumerate(state.shown)}
        found = self.rules.answer(shown, _answer_of(state.answer))
        value = frozenset(found.common), frozenset(found.dead)
        if value != state.answer:
            yield state._replace(answer=value)

    def _hear(self, state: State, number: int, node: NodeState) -> State:
        return self._with(state, number, node._replace(heard=state.answer))

    def _save(self, state: State, number: int, node: NodeState) -> Iterator[State]:
        job, owed = self._job(state, number), self._owed(state, number)
        for step, where in node.slots:
            snapshot = job.steps[1, step].snapshot
            assert snapshot is not None
            if any(
                isinstance(action, Fail) and action.key == snapshot.key
                for action in holdings.answered(job)
            ):
                yield self._move(state, number, step, FAILED)
            wanted = (self.persist[step - 1] and where == HELD) or snapshot in owed
            if not wanted or step in state.abandoned:
                continue
            try:
                if self.rules.may_save(job, snapshot):
                    yield self._move(state, number, step, SAVED)._replace(
                        receipts=state.receipts | {(step, number)}
                    )
            except CkptdError:  # the step is dead
                yield self._move(state, number, step, FAILED)
            break  # saves run in the order of the seals

    def _learn(self, state: State, number: int, node: NodeState) -> Iterator[State]:
        for step, where in node.slots:
            if where == SAVED and step in state.committed:
                after = self._move(state, number, step, DURABLE)
                yield self._with(
                    after, number, after.nodes[number]._replace(durable=max(node.durable, step))
                )

    # -- the product's view

    def _owed(self, state: State, number: int) -> list[Snapshot]:
        return self.rules.owed(self._job(state, number)) if state.dead else []

    def _verdict(
        self, state: State, step: int, *, late: bool
    ) -> CommitTry | receipt.AbandonTry | None:
        found = [
            _receipt(step, node, self.count)
            for node in range(self.count)
            if (step, node) in state.receipts
        ]
        return self.rules.decide(found, self.count, late=late)

    def _job(self, state: State, number: int) -> Job:
        return _job(state.nodes[number], number, self.count, self.persist, here=not state.dead)

    def _promise(self, state: State) -> State:
        """Raise the promise to the newest step that all nodes have sealed, while no
        memory is lost, or that is committed.
        """
        sealed = [{s for s, w in node.slots if w != FAILED} for node in state.nodes]
        common = set.intersection(*sealed) if not state.lost else set()
        return state._replace(promised=max([state.promised, *common, *state.committed]))

    def _move(self, state: State, number: int, step: int, to: str) -> State:
        node = state.nodes[number]
        return self._with(
            state,
            number,
            node._replace(slots=tuple((s, to if s == step else where) for s, where in node.slots)),
        )

    @staticmethod
    def _with(state: State, number: int, node: NodeState) -> State:
        return state._replace(nodes=(*state.nodes[:number], node, *state.nodes[number + 1 :]))


@functools.lru_cache(maxsize=1 << 16)
def _job(node: NodeState, number: int, count: int, persist: tuple[bool, ...], *, here: bool) -> Job:
    """Return the daemon's knowledge of the job on a node."""
    share = Membership(run_id=CLAIM, ranks=[number])
    job = Job("gpt", attempt=1, world_size=count, node=share, answer=_answer_of(node.heard))
    if here:
        job.ranks.join(Owner("gpt", 1, number, count))
    for step, where in node.slots:
        snapshot = Snapshot(
            "gpt",
            1,
            step,
            f"step-{step:08d}.a0001",
            count,
            persist[step - 1],
            state=_STATES[where],
            node=share,
        )
        snapshot.seals[number] = RankSeal(number, f"{step}", 1, b"", checks=[])
        job.occupy(f"{step}", number, (1, step)).snapshot = snapshot
    for step in node.failed:
        job.step((1, step)).failure = ("snapshot-failed", "no memory")
    job.sealed = (1, node.taken) if node.taken else (0, -1)
    if node.durable:
        job.checkpoints[f"step-{node.durable:08d}.a0001"] = _stored(node.durable)
    return job


def _stored(step: int) -> StoredCheckpoint:
    return StoredCheckpoint("gpt", f"step-{step:08d}.a0001", 1, step, step, 1, (), user_tag=False)


@functools.lru_cache
def _answer_of(value: tuple[frozenset[int], frozenset[int]]) -> Answer:
    common, dead = value
    return Answer(
        common=sorted(common), dead=dict.fromkeys(sorted(dead), ("snapshot-failed", "dead"))
    )


@functools.lru_cache
def _shown(value: tuple[tuple[int, ...], int, int, frozenset[int]]) -> Holding:
    held, done, durable, failed = value
    return Holding(
        held=list(held),
        done=done,
        durable=durable,
        failed=dict.fromkeys(failed, ("snapshot-failed", "")),
    )


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
        job="gpt", attempt=1, step=step, tag=f"step-{step:08d}.a0001", node=Membership(run_id=CLAIM,
        ranks=[node]), host=f"node{node}", world_size=count, global_plan="00", parts=[part],
    )  # fmt: skip
