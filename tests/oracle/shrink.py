"""Makes a pair that fails smaller, as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from tests.oracle.judge import Verdict
from tests.oracle.program import Block, Call, Extra, Model, Optimizer, Pair, Program

Edit = Callable[[Pair], Pair]
"""Takes something out of both programs of a pair, or makes it plainer. Returns an equal
pair if there is nothing to do.
"""
MOST_PASSES = 4
PLAINER: dict[type, dict[str, tuple[Any, ...]]] = {
    Model: {"wrappers": ((),), "container": ("attributes",), "dtype": ("",),
    "channels_last": (False,),
        "deep": (False,), "transform": ("",)},
    Block: {"kind": ("linear", "buffers"), "wrapper": ("",), "frozen": (False,), "tied_to": ("",),
    "size": (2,)}, Optimizer: {
        "kind": ("sgd", "momentum", "adam"), "grouping": ("one",), "reverse": (False,),
        "named": (False,), "tensor_lr": (False,), "empty_group": (False,), "extra": (False,),
        "hooks": ((),), "wrapped": (False,), "skip": ((),), "lr": (0.01,),
    },
    Extra: {"setting": (10,)},
    Call: {"strict": (True,), "keep": ((),), "only": ((),), "context": ("",), "snapshots": (1,),
    "between": ("",), "saved": ((),),
        "source": ("memory",), "fresh": (False,)},
}  # fmt: skip
"""The plainest values of each field, of every kind of thing."""


def shrink(pair: Pair, verdict: Verdict, judge: Callable[[Pair], Verdict]) -> tuple[Pair, Verdict]:
    """Return the smallest pair that was found with a verdict of the same kind."""
    for _ in range(MOST_PASSES):
        before = pair
        for edit in list(edits(pair)):
            smaller = edit(pair)
            if (
                smaller != pair
                and _whole(smaller)
                and (found := judge(smaller)).kind == verdict.kind
            ):
                pair, verdict = smaller, found
        if pair == before:
            break
    return pair, verdict


def edits(pair: Pair) -> Iterator[Edit]:
    """Yield everything that may make a pair smaller, the boldest first."""
    programs = (pair.before, pair.after)
    yield partial(_of_both, change=lambda which: replace(which, extras=()))
    yield partial(_of_both, change=lambda which: replace(which, extras=(), optimizers=()))
    for key in _keys(programs, "models", "optimizers", "extras"):
        yield partial(_of_both, change=partial(_without, key=key))
    for name in {
        block.name: None for which in programs for model in which.models for block in model.blocks
    }:
        yield partial(_of_both, change=partial(_without_block, name=name))
        for field, values in PLAINER[Block].items():
            for value in values:
                yield partial(
                    _of_both, change=partial(_set_block, name=name, field=field, value=value)
                )
    for kind in ("models", "optimizers", "extras"):
        for key in _keys(programs, kind):
            thing = next(
                one for which in programs for one in getattr(which, kind) if one.key == key
            )
            for field, values in PLAINER[type(thing)].items():
                for value in values:
                    yield partial(
                        _of_both, change=partial(_set, kind=kind, key=key, field=field, value=value)
                    )
                    yield partial(
                        _of_after,
                        change=partial(_set, kind=kind, key=key, field=field, value=value),
                    )
    for field, values in PLAINER[Call].items():
        yield partial(_of_call, field=field, value=values[0])
    for most in (0, 1, 2):
        yield partial(_of_both, change=partial(_with_steps, most=most))
        yield partial(_of_after, change=partial(_with_steps, most=most))
    yield lambda pair: replace(
        pair, before=replace(pair.before, seed=0), after=replace(pair.after, seed=1)
    )


def _whole(pair: Pair) -> bool:
    """Return True if each program has a model, and each model has a block."""
    return all(
        which.models
        and all(
            model.blocks or model.copy_of in {one.key for one in which.models}
            for model in which.models
        )
        for which in (pair.before, pair.after)
    )


def _keys(programs: tuple[Program, ...], *kinds: str) -> list[str]:
    return list(
        dict.fromkeys(
            one.key for kind in kinds for which in programs for one in getattr(which, kind)
        )
    )


def _of_both(pair: Pair, change: Callable[[Program], Program]) -> Pair:
    return replace(pair, before=change(pair.before), after=change(pair.after))


def _of_after(pair: Pair, change: Callable[[Program], Program]) -> Pair:
    return replace(pair, after=change(pair.after))


def _of_call(pair: Pair, field: str, value: Any) -> Pair:
    return replace(pair, call=replace(pair.call, **{field: value}))


def _with_steps(which: Program, most: int) -> Program:
    return replace(which, steps=min(which.steps, most))


def _without(which: Program, key: str) -> Program:
    gone = {key, *(model.key for model in which.models if model.copy_of == key)}
    optimizers = tuple(
        replace(
            one,
            models=tuple(k for k in one.models if k not in gone),
            bares=tuple(k for k in one.bares if k not in gone),
        )
        for one in which.optimizers
        if one.key not in gone
    )
    kept = {one.key for one in optimizers}
    return replace(
        which,
        models=tuple(one for one in which.models if one.key not in gone),
        optimizers=optimizers,
        extras=tuple(
            one for one in which.extras if one.key not in gone and (not one.of or one.of in kept)
        ),
    )


def _without_block(which: Program, name: str) -> Program:
    def change(model: Model) -> Model:
        blocks = tuple(
            replace(b, tied_to="" if b.tied_to == name else b.tied_to)
            for b in model.blocks
            if b.name != name
        )
        return replace(model, blocks=blocks)

    return replace(which, models=tuple(map(change, which.models)))


def _set(which: Program, kind: str, key: str, field: str, value: Any) -> Program:
    things: Any = getattr(which, kind)
    change: Any = {
        kind: tuple(_plainer(one, field, value) if one.key == key else one for one in things)
    }
    return replace(which, **change)


def _set_block(which: Program, name: str, field: str, value: Any) -> Program:
    def change(model: Model) -> Model:
        return replace(
            model,
            blocks=tuple(
                _plainer(one, field, value) if one.name == name else one for one in model.blocks
            ),
        )

    return replace(which, models=tuple(map(change, which.models)))


def _plainer(thing: Any, field: str, value: Any) -> Any:
    """Give a field a plainer value, unless it has one that is as plain already."""
    values = PLAINER[type(thing)][field]
    mine = getattr(thing, field)
    return (
        thing
        if mine in values and values.index(mine) <= values.index(value)
        else replace(thing, **{field: value})
    )


def features(pair: Pair) -> tuple[str, ...]:
    """Return what is not plain in a pair: two pairs of one kind of fault with the same
    features fail for the same reason, most likely.
    """
    found: set[str] = set()
    for which in (pair.before, pair.after):
        things: tuple[Any, ...] = (
            *which.models,
            *which.optimizers,
            *which.extras,
            *(block for model in which.models for block in model.blocks),
        )
        for thing in things:
            found |= _unusual(thing)
    found |= {
        f"{name} {value}"
        for name, value in _fields(pair.call).items()
        if value != PLAINER[Call][name][0]
    }
    before, after = _by_key(pair.before), _by_key(pair.after)
    for key in before.keys() & after.keys():
        found |= {
            f"other {name}"
            for name, value in _fields(before[key]).items()
            if value != _fields(after[key])[name]
        } - {"other variant"}
    if before.keys() != after.keys():
        found.add("other keys")
    elif list(before) != list(after):
        found.add("other order")
    return tuple(sorted(found))


def _fields(thing: Any) -> dict[str, Any]:
    return {
        one.name: getattr(thing, one.name)
        for one in dataclasses.fields(thing)
        if one.name not in ("key", "name", "blocks")
    }


def _unusual(thing: Any) -> set[str]:
    plain = PLAINER[type(thing)]
    found = {
        f"{name} {value}"
        for name, value in _fields(thing).items()
        if name in plain and value != plain[name][0]
    }
    found -= {f"size {getattr(thing, 'size', '')}", f"kind {getattr(thing, 'kind', '')}"}
    if getattr(thing, "kind", "linear") not in ("linear", "sgd"):
        found.add(thing.kind)
    return found


def _by_key(which: Program) -> dict[str, Any]:
    every: tuple[Any, ...] = (*which.models, *which.optimizers, *which.extras)
    return {one.key: one for one in every} | {
        f"{model.key}.{block.name}": block for model in which.models for block in model.blocks
    }
