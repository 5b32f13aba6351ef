"""Makes a pair that fails smaller, as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.oracle.judge import Verdict
from tests.oracle.program import Call, Model, Optimizer, Pair, Program

MOST_TRIES = 250


def shrink(pair: Pair, verdict: Verdict, judge: Callable[[Pair], Verdict]) -> tuple[Pair, Verdict]:
    """Return the smallest pair that was found with a verdict of the same kind."""
    tries, smaller = 0, True
    while smaller and tries < MOST_TRIES:
        smaller = False
        for candidate in candidates(pair):
            tries += 1
            found = judge(candidate)
            if found.kind == verdict.kind:
                pair, verdict, smaller = candidate, found, True
                break
            if tries >= MOST_TRIES:
                break
    return pair, verdict


def candidates(pair: Pair) -> Iterator[Pair]:
    """Yield pairs that are a little smaller or plainer than this one, the boldest first."""
    for key in [one.key for one in (*pair.before.models, *pair.before.optimizers, *pair.before.extras, *pair.after.extras, *pair.after.models)]:
        made = _both(pair, lambda which: _without(which, key))  # noqa: B023 (called at once)
        if made != pair and made.before.models and made.after.models:
            yield made
    for name in {block.name for which in (pair.before, pair.after) for model in which.models for block in model.blocks}:
        made = _both(pair, lambda which: _without_block(which, name))  # noqa: B023
        if all(model.blocks or model.copy_of for which in (made.before, made.after) for model in which.models):
            yield made
    for before, after in _plainer(pair.before, pair.after):
        yield replace(pair, before=before, after=after)
    plain = Call()
    for field in dataclasses.fields(Call):
        if getattr(pair.call, field.name) != getattr(plain, field.name):
            yield replace(pair, call=replace(pair.call, **{field.name: getattr(plain, field.name)}))
    for which in ("before", "after"):
        steps = getattr(pair, which).steps
        if steps:
            yield replace(pair, **{which: replace(getattr(pair, which), steps=steps - 1)})


def _both(pair: Pair, change: Callable[[Program], Program]) -> Pair:
    return replace(pair, before=change(pair.before), after=change(pair.after))


def _without(which: Program, key: str) -> Program:
    gone = {key, *(model.key for model in which.models if model.copy_of == key)}
    optimizers = tuple(
        replace(one, models=tuple(k for k in one.models if k not in gone), bares=tuple(k for k in one.bares if k not in gone))
        for one in which.optimizers
        if one.key not in gone
    )
    kept = {one.key for one in optimizers}
    return replace(
        which,
        models=tuple(one for one in which.models if one.key not in gone),
        optimizers=optimizers,
        extras=tuple(one for one in which.extras if one.key not in gone and (not one.of or one.of in kept)),
    )


def _without_block(which: Program, name: str) -> Program:
    return replace(
        which,
        models=tuple(
            replace(model, blocks=tuple(replace(b, tied_to="" if b.tied_to == name else b.tied_to) for b in model.blocks if b.name != name))
            for model in which.models
        ),
    )




def _plainer(before: Program, after: Program) -> Iterator[tuple[Program, Program]]:
    """Yield both programs with one field of one thing at its plainest value in both, or with the same value in both."""
    for kind in ("models", "optimizers", "extras"):
        for thing in getattr(before, kind):
            for field in dataclasses.fields(thing):
                if field.name in ("key", "name", "blocks", "variant", "of", "copy_of", "models", "bares"):
                    continue
                values = [field.default] if field.default is not dataclasses.MISSING else []
                if field.name == "kind" and isinstance(thing, Optimizer):
                    values = ["sgd", "momentum", "adam"]
                for value in values:
                    made = tuple(_set(which, kind, thing.key, field.name, value) for which in (before, after))
                    if made != (before, after):
                        yield made[0], made[1]
    for model in before.models:
        for block in model.blocks:
            for name, value in (("kind", "linear"), ("wrapper", ""), ("frozen", False), ("tied_to", ""), ("size", 2)):
                made = tuple(_set_block(which, model.key, block.name, name, value) for which in (before, after))
                if made != (before, after):
                    yield made[0], made[1]
    for name, value in (("dtype", ""), ("seed", 0)):
        if getattr(before, name) != value and name != "seed":
            yield replace(before, **{name: value}), replace(after, **{name: value})


def _set(which: Program, kind: str, key: str, name: str, value: Any) -> Program:
    return replace(which, **{kind: tuple(replace(one, **{name: value}) if one.key == key else one for one in getattr(which, kind))})


def _set_block(which: Program, key: str, block: str, name: str, value: Any) -> Program:
    def change(model: Model) -> Model:
        if model.key != key:
            return model
        return replace(model, blocks=tuple(replace(one, **{name: value}) if one.name == block else one for one in model.blocks))

    return replace(which, models=tuple(map(change, which.models)))
