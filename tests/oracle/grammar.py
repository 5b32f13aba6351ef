"""Makes random pairs: a program from weighted choices, and changes of it.

The same seed always makes the same pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from tests.oracle import extras as x
from tests.oracle import modules, optimizers
from tests.oracle.program import Block, Call, Extra, Model, Optimizer, Pair, Program

T = TypeVar("T")
BLOCKS = tuple(name for name in modules.MODULES if name not in ("lazy", "tagged")) + 3 * ("linear",)
FROM_STORAGE, IN_A_FRESH_PROCESS = 1 / 8, 1 / 16
"""The part of the pairs that recovers from storage, and the part that recovers in a
process of its own.
"""
SCHEDULABLE = tuple(name for name, kind in optimizers.OPTIMIZERS.items() if not kind.single)


def make(seed: int) -> Pair:
    """Return the pair of a seed."""
    chance = Random(seed)
    before = program(chance)
    after = replace(
        before,
        seed=before.seed + 1,
        steps=chance.choice((0, 0, 1, 3)),
        extras=_fresh(before.extras),
    )
    pair = Pair(before, after, Call(), (), seed)
    for _ in range(chance.choice((0, 1, 1, 1, 1, 2))):
        changed = chance.choices(list(CHANGES), [weight for _, weight in CHANGES.values()])[0]
        made = CHANGES[changed][0](chance, pair)
        if made is not None:
            pair = replace(made, changes=(*made.changes, changed))
    source = "storage" if chance.random() < FROM_STORAGE else "memory"
    return replace(
        pair, call=replace(pair.call, source=source, fresh=chance.random() < IN_A_FRESH_PROCESS)
    )


def _fresh(extras: tuple[Extra, ...]) -> tuple[Extra, ...]:
    return tuple(replace(extra, variant=1) for extra in extras)


def program(chance: Random) -> Program:
    """Return a random program."""
    models = [_model(chance, "model")]
    if chance.random() < 0.25:
        models.append(_model(chance, "head"))
    if chance.random() < 0.15 and _copyable(models[0]):
        models.append(Model("ema", copy_of="model", deep=chance.random() < 0.5))
    extras = [
        Extra(f"free{number}", chance.choice(x.BARES))
        for number in range(chance.choice((0, 0, 0, 0, 1, 2)))
    ]
    trained = [model.key for model in models if not model.copy_of]
    bares = tuple(extra.key for extra in extras)
    if len(trained) == 2 and chance.random() < 0.5:
        plans = [
            _optimizer(chance, "optim", ("model",), bares),
            _optimizer(chance, "optim2", ("head",), ()),
        ]
    else:
        plans = [_optimizer(chance, "optim", tuple(trained), bares)]
    if chance.random() < 0.4 and plans[0].kind in SCHEDULABLE:
        extras.append(
            Extra(
                "sched",
                chance.choice(list(x.SCHEDULERS)),
                of=plans[0].key,
                setting=chance.choice((3, 10)),
            )
        )
        if extras[-1].kind in ("cyclic", "onecycle") and not plans[0].kind.startswith(
            ("sgd", "momentum", "adam")
        ):
            extras.pop()
    if chance.random() < 0.15:
        extras.append(Extra("scaler", chance.choice(list(x.SCALERS))))
    extras += [
        Extra(f"value{number}", chance.choice(list(x.VALUES)))
        for number in range(chance.choice((0, 0, 1, 1, 2, 3)))
    ]
    return Program(
        tuple(models),
        tuple(extras),
        tuple(plans),
        chance.choice((0, 1, 2, 2, 2)),
        chance.randrange(1000),
    )


def _copyable(model: Model) -> bool:
    return "overridden" not in model.wrappers and all(
        block.kind in modules.COPYABLE for block in model.blocks
    )


def _model(chance: Random, key: str) -> Model:
    kinds = BLOCKS if chance.random() < 0.6 else modules.PLAIN
    blocks: list[Block] = []
    for number in range(chance.choice((1, 1, 2, 2, 3))):
        kind = chance.choice(kinds)
        tied = [
            block.name
            for block in blocks
            if block.kind == kind and kind in modules.TIEABLE and not block.tied_to
        ]
        blocks.append(
            Block(
                f"{key[0]}{number}",
                kind,
                chance.choice((2, 4))
                if not tied
                else next(block.size for block in blocks if block.name == tied[0]),
                wrapper=chance.choice(modules.TRACELESS) if chance.random() < 0.08 else "",
                frozen=chance.random() < 0.1,
                tied_to=tied[0] if tied and chance.random() < 0.6 else "",
            )
        )
    wrappers = tuple(
        chance.choice(modules.TRACELESS) for _ in range(chance.choice((0, 0, 0, 0, 1, 2)))
    )
    if chance.random() < 0.04:
        wrappers = ("overridden",)
    dtype = chance.choices(("", "bfloat16", "float64", "float16"), (10, 1, 1, 0.5))[0]
    return Model(
        key,
        tuple(blocks),
        chance.choice(list(modules.CONTAINERS)),
        wrappers,
        dtype,
        channels_last=chance.random() < 0.05,
    )


def _optimizer(
    chance: Random, key: str, models: tuple[str, ...], bares: tuple[str, ...]
) -> Optimizer:
    kind = chance.choice(list(optimizers.OPTIMIZERS))
    rare = lambda odds: chance.random() < odds  # noqa: E731 (a line each would hide the odds)
    return Optimizer(
        key,
        kind,
        models,
        bares if rare(0.8) else (),
        chance.choice(list(optimizers.GROUPINGS)) if rare(0.4) else "one",
        reverse=rare(0.1),
        named=rare(0.15),
        tensor_lr=rare(0.1) and kind in ("adam", "adamw", "sgd"),
        empty_group=rare(0.08),
        extra=rare(0.1),
        hooks=(chance.choice(list(optimizers.HOOKS)),) if rare(0.15) else (),
        wrapped=rare(0.06),
    )


# -- changes

Change = Callable[[Random, Pair], Pair | None]
"""Changes the recovering program or the call. Returns None if there is nothing to
change in this pair.
"""


def _after(pair: Pair, **changes: Any) -> Pair:
    return replace(pair, after=replace(pair.after, **changes))


def _change_model(
    chance: Random, pair: Pair, change: Callable[[Model], Model | None]
) -> Pair | None:
    models = list(pair.after.models)
    choices = [number for number, model in enumerate(models) if model.blocks]
    number = chance.choice(choices)
    made = change(models[number])
    if made is None or made == models[number]:
        return None
    models[number] = made
    return _after(pair, models=tuple(models))


def _change_block(
    chance: Random, pair: Pair, change: Callable[[Block, Model], Block | None]
) -> Pair | None:
    def of_model(model: Model) -> Model | None:
        number = chance.randrange(len(model.blocks))
        made = change(model.blocks[number], model)
        if made is None:
            return None
        return replace(model, blocks=(*model.blocks[:number], made, *model.blocks[number + 1 :]))

    return _change_model(chance, pair, of_model)


def _change_one(
    things: Sequence[T], chance: Random, change: Callable[[T], T | None]
) -> tuple[T, ...] | None:
    if not things:
        return None
    number = chance.randrange(len(things))
    made = change(things[number])
    return (
        None
        if made is None or made == things[number]
        else (*things[:number], made, *things[number + 1 :])
    )


def _change_optimizer(
    chance: Random, pair: Pair, change: Callable[[Optimizer], Optimizer | None]
) -> Pair | None:
    made = _change_one(pair.after.optimizers, chance, change)
    return None if made is None else _after(pair, optimizers=made)


def _change_extra(
    chance: Random, pair: Pair, change: Callable[[Extra], Extra | None]
) -> Pair | None:
    made = _change_one(pair.after.extras, chance, change)
    return None if made is None else _after(pair, extras=made)


def _rewrap(chance: Random, wrappers: tuple[str, ...]) -> tuple[str, ...]:
    own = tuple(name for name in wrappers if name not in modules.TRACELESS)
    return own or tuple(
        chance.choice(modules.TRACELESS) for _ in range(chance.choice((0, 1, 1, 2)))
    )


def _wrapped_model(chance: Random, pair: Pair) -> Pair | None:
    return _change_model(
        chance, pair, lambda model: replace(model, wrappers=_rewrap(chance, model.wrappers))
    )


def _wrapped_block(chance: Random, pair: Pair) -> Pair | None:
    return _change_block(
        chance,
        pair,
        lambda block, _: replace(
            block, wrapper="" if block.wrapper else chance.choice(modules.TRACELESS)
        ),
    )


def _copy_added(chance: Random, pair: Pair) -> Pair | None:
    """Add an averaged copy to the recovering state, or take it away: the other entries
    are recovered.
    """
    models = tuple(model for model in pair.after.models if not model.copy_of)
    if len(models) == len(pair.after.models) and _copyable(models[0]):
        models = (*models, Model("ema", copy_of="model", deep=chance.random() < 0.6))
    made = _after(pair, models=models)
    if chance.random() < 0.5:  # in another process that does not load the copy, or has not saved it
        return replace(made, call=replace(made.call, strict=False))
    both = {model.key for model in pair.before.models} & {model.key for model in models}
    things = (
        *(plan.key for plan in pair.after.optimizers),
        *(extra.key for extra in pair.after.extras),
        *both,
    )
    return (
        replace(made, call=replace(made.call, only=things))
        if len(models) > len(both)
        else replace(made, call=replace(made.call, strict=False))
    )


def _other_order(chance: Random, pair: Pair) -> Pair | None:
    if chance.random() < 0.5:
        return _change_optimizer(chance, pair, lambda plan: replace(plan, reverse=not plan.reverse))
    return _change_model(chance, pair, _turned)


def _turned(model: Model) -> Model | None:
    """Return the model with its blocks in the opposite order, if that changes no names."""
    movable = model.container in ("attributes", "dict", "nested") and not any(
        block.tied_to for block in model.blocks
    )
    return replace(model, blocks=model.blocks[::-1]) if movable else None


def _entries_moved(chance: Random, pair: Pair) -> Pair | None:
    return (
        _after(pair, models=pair.after.models[::-1])
        if not any(model.copy_of for model in pair.after.models)
        else None
    )


def _tied(chance: Random, pair: Pair) -> Pair | None:
    def change(block: Block, model: Model) -> Block | None:
        if block.tied_to:
            return replace(block, tied_to="")
        earlier = model.blocks[: model.blocks.index(block)]
        fit = [
            one.name
            for one in earlier
            if (one.kind, one.size) == (block.kind, block.size) and one.kind in modules.TIEABLE
        ]
        return replace(block, tied_to=chance.choice(fit)) if fit else None

    return _change_block(chance, pair, change)


def _twins(chance: Random, pair: Pair) -> Pair | None:
    """Give both programs two blocks of one kind, and tie them in one of the two."""
    kind, size = chance.choice(modules.TIEABLE), chance.choice((2, 4))
    blocks = (Block("t0", kind, size), Block("t1", kind, size))
    tied = (blocks[0], replace(blocks[1], tied_to="t0"))
    one, other = (blocks, tied) if chance.random() < 0.7 else (tied, blocks)

    def with_blocks(which: Program, added: tuple[Block, ...]) -> Program:
        first = which.models[0]
        container = "attributes" if first.container == "single" else first.container
        others = (model for model in which.models[1:] if not model.copy_of)
        return replace(which, models=(replace(first, blocks=added, container=container), *others))

    call = replace(pair.call, strict=chance.random() < 0.3)
    return replace(
        pair, before=with_blocks(pair.before, one), after=with_blocks(pair.after, other), call=call
    )


def _frozen(chance: Random, pair: Pair) -> Pair | None:
    return _change_block(chance, pair, lambda block, _: replace(block, frozen=not block.frozen))


def _other_trained(chance: Random, pair: Pair) -> Pair | None:
    """Change which blocks an optimizer trains, as unfreezing layers between runs does."""
    names = [block.name for model in pair.after.models for block in model.blocks]
    name = chance.choice(names)
    if chance.random() < 0.5:
        pair = replace(
            pair,
            before=replace(
                pair.before,
                optimizers=tuple(replace(one, skip=(name,)) for one in pair.before.optimizers),
            ),
        )
    else:
        pair = _after(
            pair, optimizers=tuple(replace(one, skip=(name,)) for one in pair.after.optimizers)
        )
    return replace(pair, call=replace(pair.call, strict=chance.random() < 0.3))


def _other_dtype(chance: Random, pair: Pair) -> Pair | None:
    dtypes = ("", "bfloat16", "float16", "float64", "complex64")
    return _change_model(chance, pair, lambda model: replace(model, dtype=chance.choice(dtypes)))


def _lossy_block(chance: Random, pair: Pair) -> Pair | None:
    """Change the dtype of a model that holds complex, very large, or broken numbers."""
    kind = chance.choice(("complex", "scaled", "halves", "averages"))
    wide = replace(
        pair.before.models[0],
        blocks=(Block("c", kind), Block("d", "linear")),
        container="attributes",
        dtype="",
    )
    narrow = replace(
        wide,
        dtype="float16" if kind == "scaled" else chance.choice(("float16", "bfloat16", "float32")),
    )
    if kind == "averages":
        narrow = replace(wide, blocks=(Block("c", "counts"), Block("d", "linear")))
    others = tuple(model for model in pair.after.models[1:] if not model.copy_of)
    before = replace(pair.before, models=(wide, *others))
    return replace(pair, before=before, after=replace(pair.after, models=(narrow, *others)))


def _grown(chance: Random, pair: Pair) -> Pair | None:
    made = _change_block(chance, pair, lambda block, _: replace(block, size=block.size * 2))
    # An optimizer inside an object gets all of its saved state, and so that of what is
    # kept.
    if made is not None and made.call.keep:
        before, after = (
            replace(
                which, optimizers=tuple(replace(plan, wrapped=False) for plan in which.optimizers)
            )
            for which in (made.before, made.after)
        )
        made = replace(made, before=before, after=after)
    if made is not None and chance.random() < 0.3:
        keys = tuple(plan.key for plan in made.after.optimizers)
        return replace(made, call=replace(made.call, only=keys, saved=keys))
    return made


def _other_optimizer(chance: Random, pair: Pair) -> Pair | None:
    kinds = optimizers.ADAMS if chance.random() < 0.5 else tuple(optimizers.OPTIMIZERS)
    if any(extra.of for extra in pair.after.extras):
        kinds = optimizers.ADAMS
    return _change_optimizer(
        chance, pair, lambda plan: replace(plan, kind=chance.choice(kinds), tensor_lr=False)
    )


def _other_setting(chance: Random, pair: Pair) -> Pair | None:
    if chance.random() < 0.4:
        return _change_optimizer(chance, pair, lambda plan: replace(plan, lr=0.5))
    return _change_extra(chance, pair, lambda extra: replace(extra, setting=extra.setting + 4))


def _other_extra(chance: Random, pair: Pair) -> Pair | None:
    def change(extra: Extra) -> Extra:
        if extra.kind in x.SCHEDULERS:
            return replace(
                extra,
                kind=chance.choice(
                    [kind for kind in x.SCHEDULERS if kind not in ("cyclic", "onecycle")]
                ),
            )
        if extra.kind in x.SCALERS:
            return replace(extra, kind=next(kind for kind in x.SCALERS if kind != extra.kind))
        # These come back as dicts of their fields where there is no such object.
        if extra.kind in x.RECORDS:
            return extra
        return replace(
            extra, kind=chance.choice(x.BARES if extra.kind in x.BARES else list(x.VALUES))
        )

    return _change_extra(chance, pair, change)


def _other_scaler(chance: Random, pair: Pair) -> Pair | None:
    def with_scaler(which: Program, kind: str) -> Program:
        return replace(
            which,
            extras=(
                *(extra for extra in which.extras if extra.key != "scaler"),
                Extra("scaler", kind),
            ),
        )

    kinds = list(x.SCALERS) if chance.random() < 0.5 else list(x.SCALERS)[::-1]
    return replace(
        pair, before=with_scaler(pair.before, kinds[0]), after=with_scaler(pair.after, kinds[1])
    )


def _other_keys(chance: Random, pair: Pair) -> Pair | None:
    """Add a key to the recovering state, or take one away."""
    if chance.random() < 0.5 or len(pair.after.extras) == 0:
        made = _after(
            pair,
            extras=(*pair.after.extras, Extra("added", chance.choice(list(x.VALUES)), variant=1)),
        )
    else:
        gone = chance.choice(pair.after.extras)
        plans = tuple(
            replace(plan, bares=tuple(key for key in plan.bares if key != gone.key))
            for plan in pair.after.optimizers
        )
        made = _after(
            pair,
            extras=tuple(extra for extra in pair.after.extras if extra is not gone),
            optimizers=plans,
        )
    return replace(made, call=replace(made.call, strict=chance.random() < 0.4))


def _other_blocks(chance: Random, pair: Pair) -> Pair | None:
    def change(model: Model) -> Model:
        if chance.random() < 0.5 or len(model.blocks) == 1:
            return replace(model, blocks=(*model.blocks, Block("z9", chance.choice(BLOCKS))))
        gone = chance.choice(model.blocks)
        return replace(
            model, blocks=tuple(replace(one, tied_to="") for one in model.blocks if one is not gone)
        )

    made = _change_model(chance, pair, change)
    return made and replace(made, call=replace(made.call, strict=chance.random() < 0.4))


def _renamed(chance: Random, pair: Pair) -> Pair | None:
    made = _change_block(chance, pair, lambda block, _: replace(block, name=f"{block.name}x"))
    if made is None:
        return None
    new = {block.name for model in made.after.models for block in model.blocks}
    models = tuple(
        replace(
            model,
            blocks=tuple(
                replace(one, tied_to=one.tied_to if one.tied_to in new else "")
                for one in model.blocks
            ),
        )
        for model in made.after.models
    )
    return replace(
        _after(made, models=models), call=replace(made.call, strict=chance.random() < 0.5)
    )


def _other_container(chance: Random, pair: Pair) -> Pair | None:
    return _change_model(
        chance,
        pair,
        lambda model: replace(model, container=chance.choice(list(modules.CONTAINERS))),
    )


def _regrouped(chance: Random, pair: Pair) -> Pair | None:
    # Nothing says which group without parameters is which.
    if any(plan.empty_group for plan in pair.after.optimizers):
        return None
    if {plan.key: plan.wrapped for plan in pair.before.optimizers} != {
        plan.key: plan.wrapped for plan in pair.after.optimizers
    }:
        return None  # an object with an optimizer has no names, and the positions would be others
    made = _change_optimizer(
        chance, pair, lambda plan: replace(plan, grouping=chance.choice(list(optimizers.GROUPINGS)))
    )
    return made and replace(made, call=replace(made.call, strict=chance.random() < 0.6))


def _context(chance: Random, pair: Pair) -> Pair | None:
    found = chance.choice(
        (
            "inference",
            "inference",
            "inference",
            "device:meta",
            "dtype:float64",
            "dtype:bfloat16",
            "no-grad",
        )
    )
    return replace(pair, call=replace(pair.call, context=found))


def _not_strict(chance: Random, pair: Pair) -> Pair | None:
    return replace(pair, call=replace(pair.call, strict=False))


def _kept(chance: Random, pair: Pair) -> Pair | None:
    patterns = [f"{plan.key}.param_groups.*.lr" for plan in pair.after.optimizers]
    patterns += [extra.key for extra in pair.after.extras if extra.kind in x.VALUES]
    plain = [
        (model, block)
        for model in pair.after.models
        for block in model.blocks
        if block.kind == "linear" and not block.tied_to
    ]
    for model, block in plain:
        if (
            not any(other.tied_to for other in model.blocks)
            and model.container in ("attributes", "dict")
            and "overridden" not in model.wrappers
        ):
            patterns += 3 * [f"{model.key}.{block.name}.weight"]
    return replace(pair, call=replace(pair.call, keep=(chance.choice(patterns),)))


def _kept_parameter(chance: Random, pair: Pair) -> Pair | None:
    """Keep a parameter of a program that has trained before it recovers: the
    optimizer's state of the parameter stays with it.
    """

    def with_block(which: Program) -> Program:
        first = replace(
            which.models[0],
            blocks=(Block("k0", "linear"), Block("k1", "linear")),
            container="attributes",
            wrappers=(),
        )
        others = tuple(model for model in which.models[1:] if not model.copy_of)
        return replace(which, models=(first, *others), steps=chance.choice((1, 2)))

    call = replace(
        pair.call, keep=(f"{pair.after.models[0].key}.k0.{chance.choice(('weight', 'bias', '*'))}",)
    )
    return replace(pair, before=with_block(pair.before), after=with_block(pair.after), call=call)


def _only(chance: Random, pair: Pair) -> Pair | None:
    which = tuple(
        one.key
        for one in chance.choice((pair.after.optimizers, pair.after.optimizers, pair.after.models))
    )
    saved = which if chance.random() < 0.5 else ()
    return replace(
        pair,
        call=replace(
            pair.call, only=which, saved=saved, strict=bool(saved) or chance.random() < 0.2
        ),
    )


def _no_memory(chance: Random, pair: Pair) -> Pair | None:
    return _change_model(
        chance,
        pair,
        lambda model: replace(model, transform=chance.choice(("freed", "freed", "meta"))),
    )


def _lazy(chance: Random, pair: Pair) -> Pair | None:
    """Recover into a model whose parameters have no shape yet.

    The optimizers do not train them.
    """

    def with_block(which: Program, kind: str) -> Program:
        first = replace(
            which.models[0],
            blocks=(Block("lz", kind), Block("ly", "linear")),
            container="attributes",
            dtype="",
        )
        plans = tuple(replace(plan, skip=("lz",)) for plan in which.optimizers)
        return replace(
            which,
            models=(first, *(model for model in which.models[1:] if not model.copy_of)),
            optimizers=plans,
        )

    return replace(
        pair, before=with_block(pair.before, "linear"), after=with_block(pair.after, "lazy")
    )


def _names_passed(chance: Random, pair: Pair) -> Pair | None:
    return _change_optimizer(chance, pair, lambda plan: replace(plan, named=not plan.named))


def _held(chance: Random, pair: Pair) -> Pair | None:
    # The object has no names, and the positions are others.
    if _groupings(pair.before) != _groupings(pair.after):
        return None
    return _change_optimizer(chance, pair, lambda plan: replace(plan, wrapped=not plan.wrapped))


def _groupings(which: Program) -> dict[str, str]:
    return {plan.key: plan.grouping for plan in which.optimizers}


def _other_form(chance: Random, pair: Pair) -> Pair | None:
    change = chance.choice(("hooks", "tensor_lr", "empty_group", "extra"))
    if change == "hooks":
        return _change_optimizer(
            chance, pair, lambda plan: replace(plan, hooks=(chance.choice(list(optimizers.HOOKS)),))
        )
    if change == "tensor_lr":
        return _change_optimizer(
            chance,
            pair,
            lambda plan: (
                replace(plan, tensor_lr=not plan.tensor_lr)
                if plan.kind in ("adam", "sgd")
                else None
            ),
        )
    toggled: Callable[[Optimizer], Any] = lambda plan: {change: not getattr(plan, change)}  # noqa: E731
    return _change_optimizer(chance, pair, lambda plan: replace(plan, **toggled(plan)))


def _second(chance: Random, pair: Pair) -> Pair | None:
    return replace(
        pair,
        call=replace(
            pair.call, snapshots=2, between=chance.choice(("", "move", "exchange", "swap", "swap"))
        ),
    )


def _subclass_swapped(chance: Random, pair: Pair) -> Pair | None:
    """Exchange two parameters without memory of their own between two snapshots."""

    def with_block(which: Program) -> Program:
        first = replace(
            which.models[0], blocks=(Block("w0", "doubled"),), container="attributes", dtype=""
        )
        return replace(
            which, models=(first, *(model for model in which.models[1:] if not model.copy_of))
        )

    call = replace(pair.call, snapshots=2, between="swap")
    return replace(pair, before=with_block(pair.before), after=with_block(pair.after), call=call)


def _warm(chance: Random, pair: Pair) -> Pair | None:
    before, after = chance.choice(((0, 2), (2, 0), (1, 3), (0, 0)))
    return replace(
        pair, before=replace(pair.before, steps=before), after=replace(pair.after, steps=after)
    )


CHANGES: dict[str, tuple[Change, float]] = {
    "wrapped model": (_wrapped_model, 2),
    "wrapped block": (_wrapped_block, 2),
    "copy added": (_copy_added, 2),
    "other order": (_other_order, 2),
    "named entries moved": (_entries_moved, 1),
    "tied or untied": (_tied, 0.5),
    "twins tied": (_twins, 2),
    "frozen": (_frozen, 1),
    "other parameters trained": (_other_trained, 2),
    "other dtype": (_other_dtype, 2),
    "lossy dtype": (_lossy_block, 2),
    "grown": (_grown, 2),
    "other optimizer": (_other_optimizer, 1.5),
    "other setting": (_other_setting, 1),
    "other kind of value": (_other_extra, 1),
    "other scaler": (_other_scaler, 1),
    "other keys": (_other_keys, 1),
    "other blocks": (_other_blocks, 1),
    "renamed": (_renamed, 1),
    "other container": (_other_container, 0.5),
    "regrouped": (_regrouped, 1.5),
    "context": (_context, 3),
    "not strict": (_not_strict, 1),
    "kept": (_kept, 1.5),
    "kept parameter": (_kept_parameter, 1),
    "only some": (_only, 1.5),
    "no memory": (_no_memory, 1),
    "lazy": (_lazy, 0.5),
    "names passed": (_names_passed, 1.5),
    "held optimizer": (_held, 1),
    "other form": (_other_form, 1),
    "second snapshot": (_second, 2),
    "subclass swapped": (_subclass_swapped, 0.5),
    "warm": (_warm, 2),
}
"""The changes, by name, each with its weight."""
