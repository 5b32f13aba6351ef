"""Programs as plain data: what a training script holds, how it changes before the
recovery, and how the recovery is called.

Everything here can be written as JSON, compared and made smaller. `build.py` makes
objects of it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Block:
    """A submodule of a model.

    `kind` is a key of `modules.MODULES`. `wrapper` is a key of `modules.WRAPPERS`, or
    "" for none.
    """

    name: str
    kind: str
    size: int = 4
    wrapper: str = ""
    frozen: bool = False
    tied_to: str = ""
    """The name of another block of the same model whose `weight` this block shares, or
    "".
    """


@dataclass(frozen=True, slots=True)
class Model:
    """A module in the state.

    container: a key of `modules.CONTAINERS`, which says what holds the blocks.
    wrappers: keys of `modules.WRAPPERS`, the outermost first. dtype: the name of a
    dtype that the parameters are converted to, or "". copy_of: the key of the model of
    which this one is an averaged copy, or "". deep: the copy is a plain deep copy, not
    an `AveragedModel`. transform: what happens to the memory of the parameters before
    the recovery: "", "freed" or "meta".
    """

    key: str
    blocks: tuple[Block, ...] = ()
    container: str = "attributes"
    wrappers: tuple[str, ...] = ()
    dtype: str = ""
    channels_last: bool = False
    copy_of: str = ""
    deep: bool = False
    transform: str = ""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer in the state.

    kind: a key of `optimizers.OPTIMIZERS`. models and bares: the keys of the models and
    bare parameters that it trains. grouping: a key of `optimizers.GROUPINGS`. named:
    the parameters are passed with their names. tensor_lr: the learning rate is a
    tensor. extra: the groups have settings of the caller's own. hooks: keys of
    `optimizers.HOOKS`. wrapped: the optimizer lies in an object with a `state_dict` of
    its own. skip: the names of blocks whose parameters the optimizer does not train.
    lr: the learning rate.
    """

    key: str
    kind: str
    models: tuple[str, ...] = ()
    bares: tuple[str, ...] = ()
    grouping: str = "one"
    reverse: bool = False
    named: bool = False
    tensor_lr: bool = False
    empty_group: bool = False
    extra: bool = False
    hooks: tuple[str, ...] = ()
    wrapped: bool = False
    skip: tuple[str, ...] = ()
    lr: float = 0.01


@dataclass(frozen=True, slots=True)
class Extra:
    """Anything else in the state: kind is a key of `extras.EXTRAS`.

    `of` is the key of the optimizer that a scheduler follows.

    variant: 0 for the program that saves; another number makes an object of the same
    kind with other contents. setting: a setting of the object that the program passes
    to its constructor.
    """

    key: str
    kind: str
    of: str = ""
    variant: int = 0
    setting: int = 10


@dataclass(frozen=True, slots=True)
class Program:
    """A training script: the entries of its state in order, and the number of steps
    that it trains.

    dtype: the default dtype while the program runs, "" for float32. seed: chooses the
    initial values.
    """

    models: tuple[Model, ...] = ()
    extras: tuple[Extra, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    steps: int = 2
    seed: int = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """The call of the recovery.

    only: the keys of the state that are recovered; all if empty. keep and strict: the
    arguments of `recover`. context: what `build.context` takes, under which `recover`
    is called. snapshots: how many snapshots the saving program takes with one agent.
    between: what the saving program does between them, a key of `build.BETWEEN`. saved:
    the keys of the state that are saved; all if empty. source: where the snapshot comes
    from, "memory" or "storage". fresh: a process recovers that has never seen the
    saving program.
    """

    strict: bool = True
    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    context: str = ""
    snapshots: int = 1
    between: str = ""
    saved: tuple[str, ...] = ()
    source: str = "memory"
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """A program that saves, the program that recovers, and the call.

    `changes` names what was changed between the two.
    """

    before: Program
    after: Program
    call: Call = field(default_factory=Call)
    changes: tuple[str, ...] = ()
    seed: int = -1


def to_json(pair: Pair) -> str:
    """Return the pair as one line, without the fields that have their default values."""
    return json.dumps(_plain(pair))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {one.name: (getattr(value, one.name), one) for one in dataclasses.fields(value)}
        return {
            name: _plain(found) for name, (found, one) in fields.items() if found != one.default
        }
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value


def from_json(text: str) -> Pair:
    """Return the pair that `to_json` has written."""
    made = json.loads(text)
    return Pair(
        _program(made["before"]),
        _program(made["after"]),
        Call(**_tuples(made.get("call", {}))),
        tuple(made.get("changes", ())),
        made.get("seed", -1),
    )


def _program(made: dict[str, Any]) -> Program:
    models = tuple(
        Model(
            **{
                **_tuples(one),
                "blocks": tuple(Block(**_tuples(block)) for block in one.get("blocks", ())),
            }
        )
        for one in made.get("models", ())
    )
    optimizers = tuple(Optimizer(**_tuples(one)) for one in made.get("optimizers", ()))
    extras = tuple(Extra(**_tuples(one)) for one in made.get("extras", ()))
    return Program(
        models,
        extras,
        optimizers,
        **{key: made[key] for key in ("steps", "seed", "dtype") if key in made},
    )


def _tuples(made: dict[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) and key != "blocks" else value
        for key, value in made.items()
    }
