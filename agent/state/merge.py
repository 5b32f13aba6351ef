"""Compares the plain values of all ranks by digest when they plan, and merges their
trees into one for a recovery.

The recovery may run on another set of ranks. Ranks may hold different keys, as the
stages of a pipeline do; the merged tree has all of them. A value that several ranks
hold was equal on all of them when they planned. Parameter groups of optimizers are
matched by the parameters in them, never by their number.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptd.agent.state.packer import Packer
from ckptd.agent.state.tree import (
    RECORDS,
    ObjectNode,
    PerRank,
    TensorRef,
    Unsaved,
    empty_like,
    like,
)
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats.bounds import is_flat, is_group, joined_groups


@dataclass(frozen=True, slots=True)
class OfRanks:
    """The node of a merged tree that takes the place of a `per_rank` value.

    `values` has the value of each rank that saved one, in rank order. `own` is the
    index of this rank's value in `values`. It is None if this rank saved none, or if
    none of the merged trees is this rank's.
    """

    values: list[Any]
    own: int | None


def value_digests(tree: Any) -> dict[str, bytes]:
    """Return a digest of 8 bytes for every plain value that must be equal on all ranks
    that hold it, by key.

    Tensors, `per_rank` values and values that were left out have no digest. The
    contents of a dict have digests of their own; the digest of the dict itself does not
    depend on its keys. The same holds for a list that contains tensors or containers;
    its own digest depends on its length. The settings of a parameter group have a
    digest under the name of each parameter in the group. Raises UnsavableValue for an
    optimizer that numbers its parameters, because the numbers of different ranks would
    be mixed up.
    """
    return {
        key: hashlib.blake2b(Packer().encode(value), digest_size=8).digest()
        for key, value in _shared(tree, "")
    }


def _shared(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    prefix = f"{path}." if path else ""
    if isinstance(tree, (TensorRef, PerRank, Unsaved)):
        return
    if isinstance(tree, ObjectNode):
        yield from _shared(tree.tree, path)
    elif is_optimizer(tree):
        for group in tree["param_groups"]:
            if any(type(name) is int for name in group["params"]):
                raise UnsavableValue(
                    f"{path or 'the state'}: each rank numbers the parameters of this optimizer "
                    f"state by itself, so that ranks could mix "
                    "them up: pass the optimizer itself, with the module that holds its "
                    "parameters, and a bare parameter under a key"
                )
            settings = {key: value for key, value in group.items() if key != "params"}
            yield from (
                (f"{prefix}param_groups.{name}", _without_tensors(settings))
                for name in group["params"]
            )
        yield from _shared(
            {key: value for key, value in tree.items() if key != "param_groups"}, path
        )
    elif isinstance(tree, dict):
        yield path, "a dict"
        for key, value in tree.items():
            yield from _shared(value, f"{prefix}{key}")
    elif (
        isinstance(tree, (list, tuple, deque))
        and not is_flat(tree)
        and any(isinstance(item, _NESTED) for item in tree)
    ):
        yield path, f"{len(tree)} items"
        for number, value in enumerate(tree):
            yield from _shared(value, f"{prefix}{number}")
    else:
        yield path, tree


_NESTED = (TensorRef, PerRank, ObjectNode, dict, list, tuple, deque)


def _without_tensors(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if not isinstance(value, TensorRef)}


def has_own(tree: Any) -> bool:
    """Return True if a merged tree contains a `per_rank` value."""
    if isinstance(tree, OfRanks):
        return True
    if isinstance(tree, ObjectNode):
        return has_own(tree.tree)
    if not isinstance(tree, (dict, list, tuple, deque)):
        return False
    items = tree.values() if isinstance(tree, dict) else tree
    return not is_flat(items) and any(map(has_own, items))


def is_optimizer(tree: Any) -> bool:
    """Return True if the tree has the form of an optimizer's state dict, either torch's
    own or DCP's.
    """
    groups = tree.get("param_groups") if isinstance(tree, dict) and "state" in tree else None
    return isinstance(groups, list) and all(map(is_group, groups))


@dataclass(frozen=True, slots=True)
class Own:
    """The difference between a dict of a merged tree and the same dict on this rank.

    `node` is the dict of the merged tree, and `others` are its keys that only other
    ranks had. `groups` are the parameter groups as this rank had them, or None if the
    dict is not the state of an optimizer.
    """

    node: dict[Any, Any]
    others: frozenset[Any]
    groups: list[dict[str, Any]] | None = None


Foreign = dict[int, Own]
"""An Own for each dict of a merged tree that differs from this rank's, by the id of its
node. Own keeps the node alive: no id is reused.
"""


def merge(trees: Sequence[Any], own: int | None = None, foreign: Foreign | None = None) -> Any:
    """Merge the trees of all ranks, given in rank order, into one tree that has the
    keys of all.

    A value that several ranks hold comes from rank `own`, if `own` is given and that
    rank holds it, and otherwise from the lowest rank that does. `foreign`, if given, is
    filled with the differences between rank `own` and the merged tree, for a later call
    of `own_part`.
    """
    order = list(range(len(trees)))
    if own is not None:
        order.insert(0, order.pop(own))
    return _merge([(rank, trees[rank]) for rank in order], own, {} if foreign is None else foreign)


def own_part(tree: Any, foreign: Foreign) -> Any:
    """Return a merged tree without the keys and the parameter groups that only other
    ranks had.
    """
    if not foreign:
        return tree
    if isinstance(tree, ObjectNode):
        return ObjectNode(tree.kind, own_part(tree.tree, foreign), tree.cls)
    if isinstance(tree, dict):
        own = foreign.get(id(tree), Own(tree, frozenset()))
        made = empty_like(tree)
        made.update(
            {key: own_part(value, foreign) for key, value in tree.items() if key not in own.others}
        )
        if own.groups is not None:
            made["param_groups"] = own.groups
        return made
    if type(tree) not in (list, tuple, deque) or is_flat(tree):
        return tree
    return like(tree, [own_part(item, foreign) for item in tree])


def _merge(held: list[tuple[int, Any]], own: int | None, foreign: Foreign) -> Any:
    _, first = held[0]
    if isinstance(first, PerRank):
        of_ranks = sorted(
            ((rank, value.value) for rank, value in held if isinstance(value, PerRank)),
            key=lambda pair: pair[0],
        )
        return OfRanks(
            [value for _, value in of_ranks],
            next((n for n, (rank, _) in enumerate(of_ranks) if rank == own), None),
        )
    if isinstance(first, ObjectNode):
        trees = [(rank, value.tree) for rank, value in held if isinstance(value, ObjectNode)]
        return ObjectNode(first.kind, _merge(trees, own, foreign), first.cls)
    if is_optimizer(first):
        return _merge_optimizers(
            [(rank, value) for rank, value in held if is_optimizer(value)], own, foreign
        )
    if isinstance(first, dict):
        if len(held) == 1 and is_flat(first.values()):
            return first
        made = empty_like(first)
        if len(held) == 1:
            # Nearly all values of a large state are tensors.
            rank = held[0][0]
            made.update({
                key: value if type(value) is TensorRef else _merge([(rank, value)], own, foreign)
                for key, value in first.items()
            })  # fmt: skip
            return made
        for key in {key: None for _, value in held if isinstance(value, dict) for key in value}:
            made[key] = _merge(
                [
                    (rank, value[key])
                    for rank, value in held
                    if isinstance(value, dict) and key in value
                ],
                own,
                foreign,
            )
        if len(with_metadata := [value for _, value in held if hasattr(value, "_metadata")]) > 1:
            merged = {
                prefix: entry
                for value in reversed(with_metadata)
                for prefix, entry in value._metadata.items()
            }
            made._metadata = merged  # type: ignore[attr-defined]
        if held[0][0] == own and len(made) > len(first):
            foreign[id(made)] = Own(made, frozenset(key for key in made if key not in first))
        return made
    if (
        type(first) in (list, tuple, deque)
        and not is_flat(first)
        and any(isinstance(item, _NESTED) for item in first)
    ):
        alike = [
            (rank, value)
            for rank, value in held
            if type(value) is type(first) and len(value) == len(first)
        ]
        return like(
            first,
            [
                _merge([(rank, value[n]) for rank, value in alike], own, foreign)
                for n in range(len(first))
            ],
        )
    return first


def bare(tree: Any) -> Any:
    """Return a merged tree as plain containers.

    An object with a state_dict becomes its state dict. A record stays; `filled`
    replaces it. A `per_rank` value becomes the list of the values of all ranks, or the
    value itself if only one rank saved it.
    """
    if isinstance(tree, ObjectNode):
        return (
            ObjectNode(tree.kind, bare(tree.tree), tree.cls)
            if tree.kind in RECORDS
            else bare(tree.tree)
        )
    if isinstance(tree, OfRanks):
        values = [bare(value) for value in tree.values]
        return values[0] if len(values) == 1 else values
    if isinstance(tree, dict):
        made = empty_like(tree)
        made.update(
            tree if is_flat(tree.values()) else {key: bare(value) for key, value in tree.items()}
        )
        return made
    if type(tree) not in (list, tuple, deque) or is_flat(tree):
        return tree
    return like(tree, [bare(item) for item in tree])


def _merge_optimizers(
    held: list[tuple[int, dict[str, Any]]], own: int | None, foreign: Foreign
) -> dict[str, Any]:
    """Merge optimizers so that each parameter is in one group.

    The settings of a parameter's group come from the first rank in `held` that has the
    parameter. If several ranks have the same group without parameters, the result has
    it once.
    """
    rest = [
        (rank, {key: value for key, value in optimizer.items() if key != "param_groups"})
        for rank, optimizer in held
    ]
    made: dict[str, Any] = _merge(rest, own, foreign)
    made["param_groups"] = joined_groups(optimizer["param_groups"] for _, optimizer in held)
    if held[0][0] == own and len(held) > 1:
        others = foreign[id(made)].others if id(made) in foreign else frozenset()
        foreign[id(made)] = Own(made, others, held[0][1]["param_groups"])
    return made
