"""Loads the tensors of a snapshot into a module that is there already, in place and by
name, such as the model of a process that serves what another one trains.

What was loaded into a module last is remembered, so that tensors that have not changed
since are not read.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ckptd.agent.plan.structure import lacking_memory, local_part
from ckptd.agent.read.loader import load, needed_shards
from ckptd.agent.read.saved import Shard
from ckptd.agent.read.sources import Opened
from ckptd.agent.read.staged_source import StagedSource, chunks_of, fingerprint, staged_source
from ckptd.agent.state.module_tensors import difference, missing, raw_tensors, tensors_of
from ckptd.agent.state.tensor_check import is_expanded, is_uninitialized
from ckptd.agent.state.tree import ObjectNode, TensorRef
from ckptd.agent.state.tree import inside as inside_of
from ckptd.agent.state.wrappers import current_names, flattens, raw_names, unwrapped
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound, StructureMismatch
from ckptd.shared.units import some_text

_EXTRA = "_extra_state"
_SECOND = re.compile(r"#[0-9]+$")
"""The end of the name of a tensor whose key makes the name of another one."""
_MOST_NAMED = 10
"""The most differences that an error names."""


@dataclass(frozen=True, slots=True)
class LoadedInto:
    """The result of `Checkpoint.load_into`.

    loaded: the names of the tensors in the checkpoint that were written. unchanged:
    those that the module had already. missing: with `strict=False`, the keys of the
    module that the checkpoint lacks. nbytes: the bytes that were read from memory or
    from storage.
    """

    loaded: list[str]
    unchanged: list[str]
    missing: list[str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Held:
    """The content of a tensor of a module since the last load.

    fingerprint: that of the saved tensor. times: how many versions in a row had it.
    address, version: of the tensor after the load, to notice that it was changed.
    """

    fingerprint: tuple[object, ...]
    times: int
    address: int
    version: int

    def still_in(self, tensor: torch.Tensor) -> bool:
        return self.version >= 0 and (self.address, self.version) == _state_of(tensor)


_held: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, _Held]] = weakref.WeakKeyDictionary()
"""The tensors of each module after its last load, by their keys. A module that is being
written, or was left half written, is not in it.
"""


def load_into(
    opened: Opened,
    module: torch.nn.Module,
    *,
    prefix: str,
    strict: bool,
    staged: bool,
) -> LoadedInto:
    """Fill the parameters and persistent buffers of a module.

    See `Checkpoint.load_into`. Raises OSError, too.
    """
    saved = opened.saved
    if flattens(module):
        raise InvalidRequest(
            "FSDP1 has flattened parameters of this module: load into the module before it is "
            "wrapped, or use FSDP2"
        )
    with not_gone(opened):
        wanted, lacking = _matched(opened, unwrapped(module), prefix, strict=strict)
        destinations = {name: tensor.detach() for name, tensor in wanted.items()}
        shards = needed_shards(saved, destinations)
        prints = {name: tuple(map(fingerprint, found)) for name, found in shards.items()}
        before = _held.get(module, {})
        times = {
            name: before[name].times + 1
            if name in before
            and before[name].fingerprint == prints[name]
            and before[name].still_in(wanted[name])
            else 1
            for name in wanted
        }
        # Two chunks that differ have the same crc32c by a chance of 2**-32, which is too
        # high for chunks that change at every step: one version more must agree.
        unchanged = [name for name in wanted if times[name] > 2]
        changed = {name: tensor for name, tensor in destinations.items() if times[name] <= 2}
        read = stage(shard for name in changed for shard in shards[name]) if staged else 0
    _held.pop(module, None)
    with nullcontext() if staged else not_gone(opened, overwritten=True):
        loaded = load(saved, changed)
    _held[module] = {
        name: _Held(prints[name], times[name], *_state_of(tensor))
        for name, tensor in wanted.items()
    }
    return LoadedInto(list(changed), unchanged, lacking, read if staged else loaded)


@contextmanager
def not_gone(opened: Opened, *, overwritten: bool = False) -> Iterator[None]:
    """Context manager for reads of a snapshot.

    Raises VersionGone at its end, or in place of an error, if the snapshot was replaced
    in memory meanwhile.
    """
    try:
        yield
    except (IntegrityError, OSError, RecursionError):
        opened.check_not_gone(overwritten=overwritten)
        raise
    opened.check_not_gone(overwritten=overwritten)


def stage(shards: Iterable[Shard]) -> int:
    """Read the chunks of these shards into memory, and return the number of bytes."""
    chunks: dict[StagedSource, set[int]] = {}
    for shard in shards:
        chunks.setdefault(staged_source(shard.source), set()).update(chunks_of(shard))
    return sum(source.stage(numbers) for source, numbers in chunks.items())


def _matched(
    opened: Opened, module: torch.nn.Module, prefix: str, *, strict: bool
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors of the module by the name that they have in the checkpoint, a
    tied one under one name, and the keys of the module that the checkpoint lacks.

    Raises StructureMismatch, which names all that differs, and NotFound.
    """
    saved, inside = opened.saved, f"{prefix}." if prefix else ""
    own = tensors_of(module)
    names = {n.removeprefix(inside): n for n in saved.names() if n.startswith(inside)}
    if any(_SECOND.search(key) for key in names) or not names.keys() <= own.keys():
        names = _by_path(opened, prefix) or names
    theirs = [key for key in names if key.rpartition(".")[2] != _EXTRA]
    if own and not theirs:
        raise NotFound(
            f"{opened.tag} has no tensor below {prefix!r}: name the key of the state that the "
            f"module was saved under with prefix=; the checkpoint has "
            f"{some_text(sorted({name.split('.')[0] for name in saved.names()}), 5)}"
        )
    current = current_names(raw_names(module, raw_tensors(module)), theirs)
    named = {current[key]: names[key] for key in theirs}
    lacking = missing(own, named)
    unexpected = [name for name in named if name not in own]
    differ: list[str] = []
    wanted: dict[int, tuple[str, torch.Tensor]] = {}
    for name, full in named.items():
        if name not in own:
            continue
        tensor = own[name]
        if problem := _unwritable(tensor):
            differ.append(f"{name} {problem}")
        elif problem := difference(name, saved.shape(full)[1], saved.dtype(full), tensor):
            differ.append(problem)
        wanted.setdefault(id(tensor), (full, tensor))
    if strict and lacking:
        differ.append(f"not in the checkpoint: {some_text(lacking)}")
    if strict and unexpected:
        differ.append(f"not in the module: {some_text(unexpected)}")
    if strict and (lacking or unexpected):
        differ.append("pass strict=False to leave these keys out")
    if differ:
        raise StructureMismatch(
            f"the module does not fit {opened.tag} below {prefix!r}: "
            f"{'; '.join(differ[: _MOST_NAMED + 1])}"
        )
    return dict(wanted.values()), lacking


def _by_path(opened: Opened, prefix: str) -> dict[str, str]:
    """Return the names of the tensors below a prefix by their keys there, as the tree of
    the state has them.

    Two keys of a state may make one name, as "model.weight" beside the module "model":
    the second tensor then has another name, and only the tree tells which is which.
    The contents of the value at the prefix come first, then those that lie deeper.
    """
    known, inside = set(opened.saved.names()), f"{prefix}." if prefix else ""
    found: list[tuple[bool, int, str, str]] = []
    for path, name in _references(opened.tree([]), ()):
        key = ".".join(path)
        if name in known and key.startswith(inside):
            begins = any(".".join(path[:length]) == prefix for length in range(len(path)))
            found.append((begins, len(path), key.removeprefix(inside), name))
    there = any(begins for begins, *_ in found)
    return {
        key: name
        for begins, _, key, name in sorted(found, key=lambda one: one[1])
        if begins or not there
    }


def _references(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys that lead to each tensor in a decoded tree, and its name."""
    if isinstance(tree, TensorRef):
        yield path, tree.fqn
    elif isinstance(tree, ObjectNode):
        yield from _references(tree.tree, path)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _references(value, (*path, str(key)))
    else:
        for number, value in enumerate(inside_of(tree) or ()):
            yield from _references(value, (*path, str(number)))


def _unwritable(tensor: torch.Tensor) -> str:
    """Return the reason why a tensor of a module cannot be written in place, or ""."""
    if is_uninitialized(tensor):
        return "has no memory yet: run one forward pass of the lazy module first"
    if tensor.is_meta:
        return "is on the meta device: give the module memory (to_empty)"
    local = local_part(tensor)
    if lacking := lacking_memory(local):
        return f"was freed, {lacking}: give it memory first"
    if is_expanded(local):
        return "is expanded, so that its elements share memory: clone() it first"
    return ""


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor and its version, which torch raises at each change
    in place. A tensor that was made in inference mode has none, and -1 stands for it.
    """
    local = local_part(tensor)
    return local.data_ptr(), -1 if local.is_inference() else local._version
