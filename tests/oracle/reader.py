"""Reads the snapshot of a pair as a process that is no rank of the job, and compares it
with what was saved and with what `recover` gives.

The reader is the `Checkpoint` of the newest snapshot in memory.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptd.agent import Checkpoint
from ckptd.agent.state.records import kind_of
from ckptd.shared.errors import NotFound, StructureMismatch
from tests.oracle.build import Run, build, canonical
from tests.oracle.prints import text
from tests.oracle.program import Model, Pair
from tests.oracle.references import dump, read
from tests.oracle.rules import OWN_LOADERS

SHARE = 4
"""One pair in so many is read: a reading costs as much as another recovery."""
SECONDS = 60.0
"""The longest wait until the daemon lends a step that a trainer has sealed."""
Recover = Callable[[dict[str, Any]], None]


def is_read(pair: Pair) -> bool:
    """Return True if the snapshot of this pair is read, too.

    A program that changes between its snapshots cannot be built again in one piece, and
    one with an expanded buffer cannot be recovered into.
    """
    spread = any(block.kind == "spread" for model in pair.before.models for block in model.blocks)
    return pair.seed % SHARE == 0 and not pair.call.between and not spread


def newest(job: str, socket: Path, step: int) -> Checkpoint:
    """Return the newest snapshot of a job in memory, once it is this step.

    Raises NotFound if it never is.
    """
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            found = Checkpoint.newest_in_memory(job, socket=socket)
            if found.step == step:
                return found
            found.close()
        except NotFound:
            pass
        if time.monotonic() > deadline:
            raise NotFound(f"step {step} of {job} was sealed, and is not lent to a reader")
        time.sleep(0.002)


def differences_of(pair: Pair, run: Run, checkpoint: Checkpoint, recover: Recover) -> str:
    """Return the first differences of what a reader gives, or "".

    run: the saving program, as it is since the snapshot.
    """
    tree = checkpoint.load()
    target = _other(pair)
    state = {
        key: target.state[key] if _is_object(run.state[key]) else _blank(value)
        for key, value in tree.items()
    }
    filled = _other(pair)
    found = list(_unlike_saved(run, tree))
    found += _unlike_by_name(run, checkpoint, tree)
    loaded = [
        key
        for key in tree
        if isinstance(run.state[key], nn.Module) and _load_into(pair, filled, key, checkpoint)
    ]
    recover(state)
    for key in loaded:
        found += _unlike(f"{key} by load_into", _held(filled.state[key]), _held(state[key]))
    for key, value in tree.items():
        if isinstance(state[key], nn.Module):
            found += _unlike(key, _named(value), _named(state[key].state_dict()))
        elif not _is_object(run.state[key]) and text(value) != text(state[key]):
            found.append(f"{key}: reader {text(value)} / recovered {text(state[key])}")
    return "; ".join(found[:3])


def _other(pair: Pair) -> Run:
    """Return the saving program with other values in its modules."""
    made = build(replace(pair.before, seed=pair.before.seed + 1))
    made.step()  # gives lazy modules their parameters
    return made


def _is_object(value: Any) -> bool:
    """Return True for a module, and for a value that `Checkpoint.load` gives in another
    form, such as a namedtuple or a generator.
    """
    return isinstance(value, nn.Module) or bool(kind_of(value))


def _blank(value: Any) -> Any:
    """Return a copy whose tensors and floats have other values."""
    if type(value) is torch.Tensor:
        return torch.zeros_like(value)
    if isinstance(value, torch.Tensor):
        return copy.deepcopy(value)  # of a subclass, which zeros_like would not keep
    if isinstance(value, dict):
        made = value.copy()
        made.update({key: _blank(item) for key, item in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(map(_blank, value))
    return 0.625 if type(value) is float else value


def _unlike_saved(run: Run, tree: dict[str, Any]) -> Iterator[str]:
    """Yield the entries other than modules and optimizers that are not as torch.save
    has them, and the keys that differ.
    """
    saved = read(dump(run.state))
    if list(saved) != list(tree):
        yield f"keys: reader {list(tree)} / saved {list(saved)}"
    for key, value in saved.items():
        if not _is_object(run.state[key]) and key not in run.optimizers:
            value = value.data if isinstance(value, nn.Parameter) else value
            if text(tree.get(key)) != text(value):
                yield f"{key}: reader {text(tree.get(key))} / saved {text(value)}"


def _unlike_by_name(run: Run, checkpoint: Checkpoint, tree: dict[str, Any]) -> Iterator[str]:
    """Yield the tensors of modules that differ when they are read by name, or whose
    name, dtype or shape does.
    """
    names = set(checkpoint.keys())
    for key, value in tree.items():
        if not isinstance(run.state[key], nn.Module):
            continue
        for name, tensor in value.items():
            full = f"{key}.{name}"
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
                continue
            if full not in names:
                yield f"{full} is not among the keys"
            elif checkpoint.metadata(full) != (tensor.dtype, tensor.shape):
                yield f"{full}: {checkpoint.metadata(full)} / {tensor.dtype}, {tensor.shape}"
            elif text(checkpoint.tensor(full)) != text(tensor):
                yield f"{full}: alone {text(checkpoint.tensor(full))} / {text(tensor)}"


def _load_into(pair: Pair, filled: Run, key: str, checkpoint: Checkpoint) -> bool:
    """Load a module by name.

    Return False if it has a state dict of its own form, loads in a way of its own, or
    has tensors that consist of several: then it is not compared, and may be refused.
    """
    plain = _is_plain(pair, key)
    try:
        checkpoint.load_into(filled.state[key], prefix=key)
    except StructureMismatch:
        if plain:
            raise
    return plain


def _is_plain(pair: Pair, key: str) -> bool:
    by_key: dict[str, Model] = {model.key: model for model in pair.before.models}
    model = by_key[key]
    source = by_key.get(model.copy_of, model)
    return (
        "overridden" not in (*model.wrappers, *source.wrappers)
        and not any(block.wrapper == "overridden" for block in source.blocks)
        and not any(block.kind in (*OWN_LOADERS, "doubled") for block in source.blocks)
    )


def _held(module: nn.Module) -> dict[str, str]:
    """Return the parameters and persistent buffers of a module as texts."""
    persistent = {canonical(name) for name in module.state_dict()}
    both = (*module.named_parameters(), *module.named_buffers())
    return {canonical(n): text(t) for n, t in both if canonical(n) in persistent}


def _named(values: dict[str, Any]) -> dict[str, str]:
    return {canonical(name): text(value) for name, value in values.items()}


def _unlike(what: str, mine: dict[str, str], theirs: dict[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*mine, *theirs)):
        if mine.get(name) != theirs.get(name):
            yield f"{what}, {name}: reader {mine.get(name)} / recovered {theirs.get(name)}"
