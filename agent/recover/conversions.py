"""Judges what a recovery would lose: values that another dtype cannot hold, and
different tensors that would share one memory.

The dtypes alone decide some cases. The saved values decide the others, and are read
once more for this, before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckptd.agent.plan.structure import firsts, local_part, local_parts, reach
from ckptd.agent.read.loader import copy_any
from ckptd.agent.read.saved import Saved
from ckptd.agent.state.dtypes import copyable
from ckptd.shared.formats.plan import Alias

Read = Callable[[Mapping[str, torch.Tensor]], object]
"""A function that fills the given tensors, by name, with the saved values."""
_BATCH = 512 << 20  # bytes of saved values that are read at once


def refused(saved: torch.dtype, own: torch.dtype) -> str:
    """Return the reason why values of one dtype never fit into another, or ""."""
    if saved.is_complex and not own.is_complex:
        return "its imaginary parts would be lost"
    if saved.is_floating_point and not (own.is_floating_point or own.is_complex):
        return "its fractions would be lost"
    return "" if _convertible(saved, own) else "torch does not convert one to the other"


@cache
def _convertible(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return True if torch converts values of one dtype to another.

    For example, torch converts no values of fewer than 8 bits.
    """
    saved, own = _real(saved), _real(own)
    if saved == own:
        return True
    try:
        torch.zeros(saved.itemsize, dtype=torch.uint8, device="cpu").view(saved).to(own)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _real(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the real part of a complex dtype, and any other dtype as it
    is.
    """
    return dtype.to_real() if dtype.is_complex else dtype


def narrows(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return True if values of one dtype may change when they are converted to another."""
    if saved == own or not _convertible(saved, own):
        return False
    # Torch promotes no 8-bit floating-point types.
    if saved.is_floating_point and 1 in (saved.itemsize, own.itemsize):
        return saved.itemsize > 1 or not _holds_all(saved, _real(own))
    try:
        if saved.is_floating_point or saved.is_complex or not own.is_floating_point:
            return torch.promote_types(saved, own) != own
    except RuntimeError:  # torch promotes no unsigned integers either, except uint8
        return not _covers(saved, own)
    # Integers into floating-point numbers, which hold only some of them exactly.
    return saved.itemsize >= own.itemsize


@cache
def _holds_all(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return True if `own` has every value of the 8-bit floating-point type `saved`."""
    values, converted = _values(saved), _values(saved, own)
    return torch.equal(values.isnan(), converted.isnan()) and torch.equal(
        values.nan_to_num(), converted.nan_to_num()
    )


def _values(eighth: torch.dtype, to: torch.dtype = torch.float32) -> torch.Tensor:
    """Return all values of an 8-bit floating-point type after a conversion to another
    dtype.

    They are returned as float64, with which torch computes.
    """
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(eighth).to(to).to(torch.float64)


def _covers(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return True if every value of one dtype of integers is a value of another one."""
    return (
        torch.bool not in (saved, own)
        and not any(dtype.is_floating_point or dtype.is_complex for dtype in (saved, own))
        and torch.iinfo(own).min <= torch.iinfo(saved).min
        and torch.iinfo(saved).max <= torch.iinfo(own).max
    )


def lost(values: torch.Tensor, own: torch.dtype) -> str:
    """Return what the conversion of these values to another dtype would lose, or ""."""
    try:
        if not (values.is_floating_point() or values.is_complex()):
            return (
                f"integers would change in {_short(own)}" if _integers_change(values, own) else ""
            )
        before = values if values.dtype.itemsize > 1 else values.to(torch.float32)
        if own.itemsize == 1:
            return _lost_in_eight_bits(before, own)
        lossy = bool((torch.isfinite(before) & ~torch.isfinite(values.to(own))).any())
        return f"finite values would become infinite in {_short(own)}" if lossy else ""
    except (
        RuntimeError,
        NotImplementedError,
    ):  # torch computes nothing with this dtype, and thus cannot convert it either
        return ""


def _integers_change(values: torch.Tensor, own: torch.dtype) -> bool:
    """Return True if a conversion changes integers, also one whose way back restores
    them, such as that of -1 into unsigned integers.
    """
    converted = values.to(own)
    if not torch.equal(converted.to(values.dtype), values):
        return True
    signed, own_signed = _is_signed(values.dtype), _is_signed(own)
    return signed != own_signed and bool(((values if signed else converted) < 0).any())


def _is_signed(dtype: torch.dtype) -> bool:
    return (
        dtype.is_floating_point
        or dtype.is_complex
        or (dtype != torch.bool and torch.iinfo(dtype).min < 0)
    )


def _lost_in_eight_bits(values: torch.Tensor, own: torch.dtype) -> str:
    """Return what the conversion of these values to an 8-bit floating-point type would
    lose, or "".

    The range of the type decides, because torch converts a value beyond it to infinity,
    to NaN or to the largest value, depending on the type, the version of torch and the
    device.
    """
    largest, limit, signed, infinite = _range_of(own)
    finite = torch.isfinite(values)
    beyond = (values.abs() >= limit) | (finite & ~torch.isfinite(values.to(own).to(torch.float32)))
    if infinite and bool((beyond & finite).any()):
        return f"finite values would become infinite in {_short(own)}"
    if not infinite and bool(beyond.any()):
        return f"{_short(own)} holds no values beyond {largest:g}"
    return (
        f"negative values would lose their sign in {_short(own)}"
        if not signed and bool((values < 0).any())
        else ""
    )


class _Range8(NamedTuple):
    """The range of an 8-bit floating-point type.

    largest: the largest finite value. limit: the number half a step above it; numbers
    below this limit are rounded to `largest`. signed: True if the type has negative
    values. infinite: True if the type has infinities.
    """

    largest: float
    limit: float
    signed: bool
    infinite: bool


@cache
def _range_of(eighth: torch.dtype) -> _Range8:
    # torch.finfo is not used, because the `eps` that it has for float8_e5m2fnuz in
    # torch 2.13 is wrong.
    values: list[float] = _values(eighth).tolist()
    finite = sorted(value for value in values if math.isfinite(value))
    largest, eps = finite[-1], min(value for value in finite if value > 1) - 1
    half_a_step = math.ldexp(eps, math.frexp(largest)[1] - 2)
    return _Range8(largest, largest + half_a_step, finite[0] < 0, math.inf in values)


def converted_losses(
    saved: Saved, wanted: Mapping[str, tuple[torch.Tensor | None, torch.dtype]], read: Read
) -> Iterator[tuple[str, str]]:
    """Yield (name, loss) for each saved tensor whose values do not fit into their new
    dtype.

    `wanted` has the destination of each tensor, or None for a tensor that is made as a
    whole, and the new dtype. The values are read in batches.
    """
    batch: dict[str, torch.Tensor] = {}
    size = 0
    for name, (place, dtype) in wanted.items():
        if isinstance(place, ShardedTensor) or not narrows(saved.dtype(name), dtype):
            continue
        batch[name] = _like(place, saved, name)
        size += local_part(batch[name]).nbytes
        if size > _BATCH:
            yield from _losses(batch, wanted, read)
            batch, size = {}, 0
    yield from _losses(batch, wanted, read)


def _losses(
    batch: dict[str, torch.Tensor],
    wanted: Mapping[str, tuple[torch.Tensor | None, torch.dtype]],
    read: Read,
) -> Iterator[tuple[str, str]]:
    if batch:
        read(batch)
    for name, values in batch.items():
        if loss := lost(local_part(values), wanted[name][1]):
            yield name, loss


def _like(place: torch.Tensor | None, saved: Saved, name: str) -> torch.Tensor:
    """Return new memory for the part of a saved tensor that goes to `place`, in the
    saved dtype.
    """
    if isinstance(place, DTensor):
        return torch.empty_like(place.detach(), dtype=saved.dtype(name))
    return torch.empty(tuple(saved.describe(name).size), dtype=saved.dtype(name), device="cpu")


def unequal(
    saved: Saved, pairs: Iterable[tuple[str, str]], read: Read
) -> Iterator[tuple[str, str]]:
    """Yield each pair of names whose saved tensors have another dtype, another shape or
    other bytes. Reads all of them at once.
    """
    pairs = list(pairs)
    values = {name: _like(None, saved, name) for name in chain.from_iterable(pairs)}
    if values:
        read(values)
    for one, other in pairs:
        alike = (values[one].dtype, values[one].shape) == (values[other].dtype, values[other].shape)
        if not alike or not _same_bits(values[one], values[other]):
            yield one, other


# -- one memory


def sharing(destinations: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of the destinations that overlap in memory, group by group.

    Shards of a ShardedTensor are not examined.
    """
    places: Sequence[torch.Tensor] = list(destinations.values())
    names = list(destinations)
    if ShardedTensor in set(map(type, places)):
        names = [name for name in names if not isinstance(destinations[name], ShardedTensor)]
        places = [destinations[name] for name in names]
    parts = local_parts(places)
    devices = set(map(_device, parts))
    if len(devices) == 1:
        return _overlapping(names, parts)
    groups: list[list[str]] = []
    for device in devices:
        here = [number for number, part in enumerate(parts) if part.device == device]
        groups += _overlapping([names[n] for n in here], [parts[n] for n in here])
    return groups


_device, _dtype, _shape = attrgetter("device"), attrgetter("dtype"), attrgetter("shape")


def _overlapping(names: Sequence[str], parts: Sequence[torch.Tensor]) -> list[list[str]]:
    """Return the names of the tensors of one device that overlap in memory, group by
    group.
    """
    kinds = list(
        zip(map(_dtype, parts), map(_shape, parts), map(torch.Tensor.stride, parts), strict=True)
    )
    spans = {
        kind: reach(part) if part.numel() else 0 for kind, part in firsts(kinds, parts).items()
    }
    import numpy as np

    begins = np.fromiter(map(torch.Tensor.data_ptr, parts), np.uint64, len(parts))
    lengths = np.fromiter(map(spans.__getitem__, kinds), np.uint64, len(parts))
    order = np.argsort(begins, kind="stable")
    order = order[(begins[order] > 0) & (lengths[order] > 0)]
    ends = np.maximum.accumulate((begins + lengths)[order])
    apart = np.flatnonzero(begins[order][1:] >= ends[:-1]) + 1
    if len(apart) + 1 >= len(order):
        return []
    return [
        [names[number] for number in group] for group in np.split(order, apart) if len(group) > 1
    ]


def shared_losses(
    saved: Saved, destinations: Mapping[str, torch.Tensor], read: Read
) -> Iterator[tuple[str, str]]:
    """Yield two names for each destination whose saved tensor differs from another one
    in the same memory: the other name, and its own.
    """
    for names in sharing(destinations):
        if not _were_shared_alike(saved, destinations, names):
            values = {name: _like(destinations[name], saved, name) for name in names}
            read(values)
            written = {
                name: (local_part(destinations[name]), local_part(values[name])) for name in names
            }
            while pair := _overwritten(written):
                yield pair
                del written[pair[1]]


def _were_shared_alike(
    saved: Saved, destinations: Mapping[str, torch.Tensor], names: Sequence[str]
) -> bool:
    """Return True if the saved tensors shared memory in the same way as the
    destinations.
    """
    if any(not isinstance(saved.describe(name), Alias) for name in names):
        return False
    aliases = [saved.aliases[name][1] for name in names]
    parts = [local_part(destinations[name]) for name in names]
    first, begin = aliases[0], parts[0].data_ptr()
    return all(
        alias.base == first.base
        and alias.offset - first.offset == part.data_ptr() - begin
        and (tuple(alias.size), tuple(alias.stride)) == (tuple(part.shape), part.stride())
        and saved.dtype(name) == part.dtype
        for name, alias, part in zip(names, aliases, parts, strict=True)
    )


def _overwritten(
    written: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> tuple[str, str] | None:
    """Return the names of two destinations where one overwrites the other, or None.

    Writes the values into a copy of the memory that the destinations share. `written`
    has the destination and the value of each name.
    """
    begin = min(place.data_ptr() for place, _ in written.values()) // 16 * 16
    length = max(place.data_ptr() + reach(place) for place, _ in written.values()) - begin
    scratch = torch.zeros(length, dtype=torch.uint8, device="cpu").untyped_storage()
    views: dict[str, torch.Tensor] = {}
    for name, (place, value) in written.items():
        at = (place.data_ptr() - begin) // place.element_size()
        view = torch.empty(0, dtype=place.dtype, device="cpu").set_(
            scratch, at, place.shape, place.stride()
        )
        views[name] = view
        copy_any(view, value)
        for other, before in views.items():
            if other != name and not _same_bits(before, written[other][1].to(before.dtype)):
                return other, name
    return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (
        copyable(tensor.cpu()).contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)
    )
    return torch.equal(one, other)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
