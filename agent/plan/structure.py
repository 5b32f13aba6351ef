"""Detects whether the structure that a plan depends on has changed, and finds the live
tensors behind the plan's items.

Nothing here keeps a tensor alive. The comparison runs at every snapshot, so ten
thousand tensors are compared in one call, or in columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckptd.agent.state.tensor_check import check_tensor
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats.plan import Item, Plan

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: of a ShardedTensor the first
    local shard, or an empty tensor if it has none.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    if isinstance(tensor, ShardedTensor):
        return (
            tensor.local_shards()[0].tensor
            if tensor.local_shards()
            else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        )
    return tensor


def local_parts(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `local_part` of each tensor."""
    return list(tensors if PLAIN.issuperset(map(type, tensors)) else map(local_part, tensors))


def accelerator_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device of the first tensor that is on an accelerator, or None."""
    devices = dict.fromkeys(map(_device, tensors))
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


def current_accelerator(plan: Plan) -> torch.device | None:
    """Return the current device of this thread if an item of the plan is on such an
    accelerator, or None.
    """
    kind = next((item.device for item in plan.items if item.device not in ("cpu", "meta")), None)
    return None if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def _placement(tensor: torch.Tensor) -> object:
    if isinstance(tensor, DTensor):
        return tensor._spec
    if isinstance(tensor, ShardedTensor):
        return [
            (tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
            for shard in tensor.local_shards()
        ]
    return None


@dataclass(frozen=True, slots=True)
class Sharing:
    """The devices of a list of tensors, and the way in which these tensors share
    storages.

    `devices` and `storages` have one entry for each tensor. Storages are numbered in
    the order in which they first occur. `shared` are the numbers of the tensors that
    share a storage with another one. For each of them `places` has the offset in the
    storage, whether the tensor is a negative view, and whether it is a conjugate view.
    A tensor that shares its storage with no other has no entry in `places`, because it
    is copied right in any case.
    """

    devices: list[torch.device]
    storages: list[int]
    shared: list[int]
    places: list[tuple[int, bool, bool]]

    @classmethod
    def of(cls, parts: list[torch.Tensor]) -> Sharing:
        held = map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, parts))
        numbers: dict[int, int] = {}
        storages = [numbers.setdefault(storage, len(numbers)) for storage in held]
        often = Counter(storages) if len(numbers) < len(storages) else Counter()
        shared = [n for n, storage in enumerate(storages) if often[storage] > 1] if often else []
        return cls(list(map(_device, parts)), storages, shared, _places(parts, shared))

    def holds(self, parts: list[torch.Tensor]) -> bool:
        """Return True if this still describes the tensors, which must be at the same
        addresses as before.
        """
        return not self.shared or _places(parts, self.shared) == self.places


def _places(parts: list[torch.Tensor], numbers: list[int]) -> list[tuple[int, bool, bool]]:
    return [
        (int(parts[n].storage_offset()), parts[n].is_neg(), parts[n].is_conj()) for n in numbers
    ]


_BLOCK = 256
"""Tensors that are compared together. They stay in the CPU's cache, and temporary
objects are freed before the collector counts them.
"""
Columns = tuple[list[Any], ...]
"""The types, dtypes, shapes, strides and requires_grad of a block of tensors."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure of a state's tensors, on which a layout depends.

    It keeps no tensor alive.

    `blocks` has the columns of each block of tensors. `special` has the type,
    requires_grad and placement of each tensor whose class is not in PLAIN, for example
    a sharded tensor. `addresses` may change while the structure stays the same, as long
    as `sharing` does not change. `guard` finds out faster than `blocks` that nothing
    has changed. It is None if these tensors have no usable guard.
    """

    names: list[str]
    special: list[object]
    blocks: list[Columns]
    addresses: list[int]
    sharing: Sharing
    guard: Callable[..., bool] | None

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> tuple[Structure, list[torch.Tensor]]:
        """Return the structure of these tensors, and this rank's part of each.

        Raises UnsavableValue for a tensor without one address of its own, such as a
        sparse or nested tensor or a DTensor of wrapper subclasses, and for a tensor
        whose storage is too small.
        """
        parts, special = _parts(list(tensors.values()))
        try:
            addresses = list(map(torch.Tensor.data_ptr, parts))
            blocks = [_columns(parts[block]) for block in _blocks(len(parts))]
            sharing = Sharing.of(parts)
        except RuntimeError:  # raised by torch for these tensors
            for name, tensor in tensors.items():
                check_tensor(name, tensor)
            raise
        _check_memory(tensors, parts)
        return cls(list(tensors), special, blocks, addresses, sharing, _guard(parts)), parts

    def again(
        self, tensors: dict[str, torch.Tensor]
    ) -> tuple[Structure, list[torch.Tensor]] | None:
        """Return the structure of these tensors and this rank's part of each, or None
        if they do not have this structure any more.

        Raises UnsavableValue for a tensor whose storage has become too small.
        """
        if list(tensors) != self.names:
            return None
        parts, special = _parts(list(tensors.values()))
        if special != self.special:
            return None
        guard = self.guard
        try:
            if guard is None or not _passes(guard, parts):
                # It also rejects inference tensors and one tensor under two names: from
                # now on the columns decide.
                guard = None
                if any(
                    _columns(parts[block]) != before
                    for block, before in zip(_blocks(len(parts)), self.blocks, strict=True)
                ):
                    return None
            addresses = list(map(torch.Tensor.data_ptr, parts))
        except (
            RuntimeError
        ):  # raised by torch for sparse and nested tensors, which have no single address
            return None
        if addresses == self.addresses:
            # The same list object, so that values derived from it can be kept.
            addresses = self.addresses
        else:
            # Needed only if an address has changed, because a storage that shrinks
            # moves.
            _check_memory(tensors, parts)
        if not (
            self.sharing.holds(parts)
            if addresses is self.addresses
            else Sharing.of(parts) == self.sharing
        ):
            return None
        return replace(self, addresses=addresses, guard=guard), parts


def reach(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last element of a
    tensor.

    The tensor must not be empty.
    """
    if tensor.is_contiguous():
        return tensor.nbytes
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return extent * tensor.element_size()


def lacking_memory(part: torch.Tensor) -> str:
    """Return a phrase that says how much memory a tensor of one storage needs and has,
    or "" if it has enough.
    """
    if not part.numel() or part.is_meta:
        return ""
    try:
        needed, held = (
            part.storage_offset() * part.element_size() + reach(part),
            part.untyped_storage().nbytes(),
        )
    except (
        RuntimeError,
        NotImplementedError,
    ):  # a subclass that wraps other tensors has no storage of its own
        return ""
    return "" if held >= needed else f"the tensor needs {needed} bytes, and its storage has {held}"


def all_lacking_memory(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers of the tensors for which `lacking_memory` gives a phrase."""
    if not PLAIN.issuperset(map(type, parts)):
        return [number for number, part in enumerate(parts) if lacking_memory(part)]
    kinds = list(zip(map(_dtype, parts), map(_shape, parts), map(_stride, parts), strict=True))
    spans = {
        kind: (part.element_size(), reach(part)) if part.numel() and not part.is_meta else None
        for kind, part in firsts(kinds, parts).items()
    }
    storages = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, parts))
    found = zip(kinds, map(torch.Tensor.storage_offset, parts), storages, strict=True)
    return [
        number
        for number, (kind, offset, held) in enumerate(found)
        if (span := spans[kind]) is not None and held < offset * span[0] + span[1]
    ]


_Kind = TypeVar("_Kind")
_Value = TypeVar("_Value")


def firsts(kinds: Sequence[_Kind], values: Sequence[_Value]) -> dict[_Kind, _Value]:
    """Return the first of the values of each kind.

    Many tensors are of few kinds: what depends on the kind alone is found out once.
    """
    return dict(zip(reversed(kinds), reversed(values), strict=True))


def _check_memory(tensors: dict[str, torch.Tensor], parts: list[torch.Tensor]) -> None:
    """Raise UnsavableValue for a tensor whose storage was freed or has shrunk.

    For example, `untyped_storage().resize_()` can free or shrink a storage.
    """
    for number in all_lacking_memory(parts):
        raise UnsavableValue(
            f"{list(tensors)[number]}: {lacking_memory(parts[number])}: take the snapshot while "
            f"the tensor has its memory, or leave the tensor out of the state"
        )


def _parts(values: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[object]]:
    """Return this rank's part of each tensor, and the entries of `Structure.special`."""
    if PLAIN.issuperset(map(type, values)):
        return values, []
    special: list[object] = [
        (type(tensor), tensor.requires_grad, _placement(tensor))
        for tensor in values
        if type(tensor) not in PLAIN
    ]
    return [tensor if type(tensor) in PLAIN else local_part(tensor) for tensor in values], special


def _blocks(count: int) -> list[slice]:
    return [slice(first, first + _BLOCK) for first in range(0, count, _BLOCK)]


def _columns(parts: list[torch.Tensor]) -> Columns:
    return (
        list(map(type, parts)), list(map(_dtype, parts)), list(map(_shape, parts)),
        list(map(_stride, parts)), list(map(_requires_grad, parts)),
    )  # fmt: skip


def _guard(parts: list[torch.Tensor]) -> Callable[..., bool] | None:
    """Return the check with which torch.compile guards the inputs of its graphs
    (torch/csrc/dynamo/guards.cpp), made for these tensors.

    It compares the same attributes as `_columns`, for all tensors in one call. Return
    None if this torch lacks the check or has it in another form, or if the check
    rejects the very tensors that it was made for.
    """
    try:
        guards: Any = import_module("torch._C._dynamo.guards")
        sizes, strides = (
            list(map(list, map(_shape, parts))),
            list(map(list, map(_stride, parts))),
        )
        with torch.enable_grad():
            made: Callable[..., bool] = guards.TensorGuards(
                *parts, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
            ).check
        return made if _passes(made, parts) else None
    except (
        Exception
    ):  # the interface is private and may fail in any way; `_columns` gives the same answer
        return None


def _passes(guard: Callable[..., bool], parts: list[torch.Tensor]) -> bool:
    # The guard mixes the grad mode into requires_grad, and was made with gradients
    # enabled.
    with torch.enable_grad():
        return guard(*parts)


_sizes_and_stride = attrgetter("sizes", "stride")
_stride = torch.Tensor.stride
_shape, _dtype, _device, _requires_grad = (
    attrgetter(name) for name in ("shape", "dtype", "device", "requires_grad")
)


def difference(before: Structure | None, after: Structure) -> str:
    """Return a phrase that says how the first differing tensor has changed.

    `before` is None if there is no plan yet.
    """
    if before is None:
        return "it has no plan yet"
    old, new = (
        dict(
            zip(
                found.names,
                chain.from_iterable(
                    zip(dtypes, shapes, strict=True) for _, dtypes, shapes, *_ in found.blocks
                ),
                strict=True,
            )
        )
        for found in (before, after)
    )
    for name in [*new, *old]:
        if name not in old:
            return f"{name} is new"
        if name not in new:
            return f"{name} is gone"
        if old[name] != new[name]:
            return f"{name} was {_describe(*old[name])} and is {_describe(*new[name])}"
    return "tensors have another layout, placement or storage"


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


class Sources:
    """A finder of the live tensors behind the items of a plan, for any state that has
    the plan's structure.

    unlike: the numbers of the items whose bytes in the slot are not those of their
    tensor, as for a strided view. device: the accelerator that they are on, or None.
    """

    def __init__(self, structure: Structure, tensors: dict[str, torch.Tensor], plan: Plan) -> None:
        self._plan = plan
        numbers = {name: number for number, name in enumerate(structure.names)}
        self._numbers = [numbers.get(item.fqn, -1) for item in plan.items]
        plain = PLAIN.issuperset(map(type, tensors.values()))
        self._special = [
            n
            for n, (item, number) in enumerate(zip(plan.items, self._numbers, strict=True))
            if number < 0 or (not plain and isinstance(tensors[item.fqn], ShardedTensor))
        ]
        found = self.of(local_parts(list(tensors.values())), tensors)
        self.device = accelerator_of(found)
        kinds = list(zip(
            map(_sizes_and_stride, plan.items), map(type, found), map(_shape, found),
            map(_stride, found), map(_device, found), map(torch.Tensor.is_neg, found),
            map(torch.Tensor.is_conj, found), map(torch.Tensor._is_zerotensor, found), strict=True,
        ))  # fmt: skip
        pairs = list(zip(plan.items, found, strict=True))
        alike = {kind for kind, pair in firsts(kinds, pairs).items() if _has_bytes_of(*pair)}
        self.unlike = [n for n, kind in enumerate(kinds) if kind not in alike]

    def of(self, parts: list[torch.Tensor], tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the live tensor behind each item, in the order of the plan.

        `parts` is this rank's part of each of `tensors`.
        """
        found = [parts[number] for number in self._numbers]
        for number in self._special:
            item = self._plan.items[number]
            tensor = tensors.get(item.fqn)
            found[number] = (
                shard_at(tensor, item.offsets)
                if isinstance(tensor, ShardedTensor)
                else _hidden(tensors, self._plan, item)
            )
        return found


def _has_bytes_of(item: Item, tensor: torch.Tensor) -> bool:
    return (
        (
            type(tensor) in PLAIN
            and tensor.is_cpu
            and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
        )
        and (tensor.is_contiguous() if item.stride is None else tensor.stride() == item.stride)
        and tensor.shape == item.sizes
    )


def shard_at(tensor: ShardedTensor, offsets: tuple[int, ...]) -> torch.Tensor:
    """Return this rank's shard at these offsets, detached."""
    found: torch.Tensor = next(
        s.tensor for s in tensor.local_shards() if tuple(s.metadata.shard_offsets) == offsets
    )
    return found.detach()


def _hidden(tensors: dict[str, torch.Tensor], plan: Plan, item: Item) -> torch.Tensor:
    """Return the bytes of a hidden item: the range of the storage that its aliases
    share.
    """
    alias = next(alias for alias in plan.aliases if alias.base == item.fqn)
    member = tensors[alias.fqn]
    offset = member.storage_offset() * member.element_size() - alias.offset
    return torch.empty(0, dtype=torch.uint8, device=member.device).set_(
        member.untyped_storage(), offset, (item.length,), (1,)
    )
