"""Programs on one or two ranks as plain data: what each rank holds, how the replicas
are spoilt, and what changes before the recovery.

`spread_rank.py` makes objects of a program on a rank, and `spread_judge.py` judges a
pair.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from random import Random
from typing import Any

from tests.oracle.judge import Verdict

KINDS = ("ddp", "replicated", "fsdp1", "fsdp1-flat", "fsdp2", "tp")
REPLICATED = ("ddp", "replicated")
"""The kinds of programs whose ranks hold the same tensors."""
ELEMENTWISE = ("momentum", "sgd", "adam", "adamw", "amsgrad", "rmsprop", "adagrad")
"""Optimizers that treat each element by itself. Keys of `spread_rank.OPTIMIZERS`."""
OPTIMIZERS = (*ELEMENTWISE, "eight-bit")
LAYERS = ("linear", "small", "norm", "embedding")
EXPERTS = ("module", "tensor", "dict", "trained", "inside")
"""Where the experts of a rank lie: in a module, a tensor or a dict, in a module with an
optimizer of its own, or inside the model.
"""
SPOILT = ("parameter", "moment", "expert", "element", "buffer")
FULL = (1, 2, 4)
"""Within how many snapshots all bytes of replicas are compared, where single elements
differ.
"""


@dataclass(frozen=True, slots=True)
class Spread:
    """A program on `world` ranks.

    layers: members of `LAYERS`; two layers that tensor parallelism splits come first.
    grouping: "one", "decay" (two groups), "empty" (a second group without parameters)
    or "empty first". frozen: the number of the layer that does not train, or -1.
    compiled: the model is in torch.compile's wrapper. copied: the state has another
    module. own: the state has values of each rank's own, marked with `per_rank`.
    experts: a member of `EXPERTS`, or "": where each rank has tensors of its own under
    equal keys. marked: they are marked with `per_rank`.
    """

    kind: str
    world: int = 2
    layers: tuple[str, ...] = ()
    optimizer: str = "adam"
    grouping: str = "one"
    frozen: int = -1
    compiled: bool = False
    copied: bool = False
    own: bool = False
    experts: str = ""
    marked: bool = False
    seed: int = 0
    steps: int = 2

    @property
    def unmarked(self) -> bool:
        """True if the ranks differ in tensors that have equal keys: no snapshot of this
        program may succeed.
        """
        return bool(self.experts) and not self.marked and self.world > 1


@dataclass(frozen=True, slots=True)
class SpreadPair:
    """Two programs, and from where the second recovers: "memory" or "storage".

    spoilt: a member of `SPOILT`, or "": how the replicas of the saving program begin to
    differ, before the snapshot with the number `when`. compare: the setting
    CKPTD_COMPARE_REPLICAS, or 0 if it is not set. stride: how many steps are between
    two snapshots.
    """

    before: Spread
    after: Spread
    source: str = "memory"
    spoilt: str = ""
    when: int = 0
    compare: int = 0
    stride: int = 1
    changes: tuple[str, ...] = ()
    seed: int = -1


def to_json(pair: SpreadPair) -> str:
    return json.dumps(asdict(pair))


def from_json(line: str) -> SpreadPair:
    """Return the pair that `to_json` has written."""
    made = json.loads(line)
    programs = {
        which: Spread(**{**made[which], "layers": tuple(made[which]["layers"])})
        for which in ("before", "after")
    }
    return SpreadPair(**{**made, **programs, "changes": tuple(made["changes"])})


def make(seed: int) -> SpreadPair:
    """Return the pair of a seed."""
    chance = Random(seed)
    before = Spread(
        chance.choice(KINDS),
        chance.choice((1, 2, 2, 2)),
        tuple(chance.choice(LAYERS) for _ in range(chance.choice((0, 1, 2)))),
        chance.choice(OPTIMIZERS),
        chance.choice(("one", "one", "decay", "empty", "empty first")),
        chance.choice((-1, -1, -1, 0)),
        chance.random() < 0.15,
        chance.random() < 0.15,
        chance.random() < 0.2,
        seed=chance.randrange(1000),
        steps=chance.choice((0, 1, 2, 2)),
    )
    after = replace(before, seed=before.seed + 1, steps=chance.choice((0, 0, 1)))
    pair = SpreadPair(
        before,
        after,
        chance.choice(("memory", "storage")),
        stride=chance.choice((1, 1, 3, 10)),
        seed=seed,
    )
    pair = _possible(pair)
    for _ in range(chance.choice((0, 1, 1, 2))):
        name = chance.choice(
            (
                "kind",
                "kind",
                "world",
                "world",
                "compiled",
                "copied",
                "spoilt",
                "spoilt",
                "optimizer",
                "experts",
                "experts",
            )
        )
        pair = replace(_changed(chance, pair, name), changes=(*pair.changes, name))
    return pair


def _changed(chance: Random, pair: SpreadPair, name: str) -> SpreadPair:
    before, after = pair.before, pair.after
    if name == "kind":
        after = replace(after, kind=chance.choice(KINDS))
    elif name == "world":
        after = replace(after, world=3 - after.world, own=False)
        before = replace(before, own=False)
    elif name == "optimizer":
        after = replace(after, optimizer=chance.choice(OPTIMIZERS))
    elif name == "spoilt":
        how = chance.choice((*SPOILT, "element"))
        kinds = (*REPLICATED, "tp") if how == "element" else REPLICATED
        layers = (*before.layers, "norm") if how == "buffer" else before.layers
        before = replace(
            before, world=2, kind=chance.choice(kinds), layers=layers, own=False, steps=2
        )
        after = replace(before, seed=1)
        compare = chance.choice(FULL) if how == "element" else chance.choice((0, 1))
        pair = replace(pair, spoilt=how, when=chance.choice((0, 1, 1, 2)), compare=compare)
    elif name == "experts":
        experts, marked = chance.choice(EXPERTS), chance.random() < 0.5
        before = replace(before, experts=experts, marked=marked, world=2)
        after = replace(after, experts=experts, marked=marked, world=2)
    else:
        after = (
            replace(after, compiled=not after.compiled)
            if name == "compiled"
            else replace(after, copied=not after.copied)
        )
    return _possible(replace(pair, before=before, after=after))


def _possible(pair: SpreadPair) -> SpreadPair:
    """Return the pair without what its kinds of programs cannot do.

    FSDP1 cannot freeze a layer, or have flat parameters compiled or in two groups.
    Experts inside the model cannot be marked, and need a kind that leaves them alone.
    Values of each rank's own cannot go to another number of ranks.
    """
    before, after = pair.before, pair.after
    kinds = {before.kind, after.kind}
    limits: dict[str, Any] = {}
    if any(kind.startswith("fsdp1") for kind in kinds):
        limits |= {"frozen": -1}
    if "fsdp1-flat" in kinds:
        limits |= {"compiled": False} | ({"grouping": "one"} if before.grouping == "decay" else {})
    if before.experts == "inside":
        limits |= {"marked": False} | (
            {} if kinds <= {*REPLICATED, "tp"} else {"experts": "module"}
        )
    if before.world != after.world or pair.spoilt:
        limits |= {"experts": "", "marked": False}
    return replace(pair, before=replace(before, **limits), after=replace(after, **limits))


def shrink(
    pair: SpreadPair, verdict: Verdict, judge: Callable[[SpreadPair], Verdict]
) -> tuple[SpreadPair, Verdict]:
    """Return a pair with as many plain fields as still give a verdict of the same kind."""
    for one in fields(Spread):
        value = getattr(PLAIN, one.name)
        both = replace(
            pair,
            before=replace(pair.before, **{one.name: value}),
            after=replace(pair.after, **{one.name: value}),
        )
        for smaller in (
            both,
            replace(pair, after=replace(pair.after, **{one.name: getattr(pair.before, one.name)})),
        ):
            if (
                smaller != pair
                and one.name != "seed"
                and (found := judge(smaller)).kind == verdict.kind
            ):
                pair, verdict = smaller, found
                break
    return pair, verdict


PLAIN = Spread("replicated", optimizer="sgd", steps=1)
"""The program that a smaller pair comes close to."""


def features(pair: SpreadPair) -> tuple[str, ...]:
    """Return what is not plain in a pair, and what differs between its two programs."""
    found = {f"spoilt {pair.spoilt}"} if pair.spoilt else set()
    for one in fields(Spread):
        mine, theirs = getattr(pair.before, one.name), getattr(pair.after, one.name)
        if one.name not in ("seed", "steps", "layers") and (mine, theirs) != 2 * (
            getattr(PLAIN, one.name),
        ):
            found.add(f"{one.name} {mine}" + (f" -> {theirs}" if theirs != mine else ""))
    return tuple(sorted(found))
