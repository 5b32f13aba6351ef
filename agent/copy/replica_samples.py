"""Digests, at every snapshot, a sample of the tensors that other ranks hold too, so
that the daemon can compare the ranks.

A rank copies only its own share of such tensors. The sample is therefore read from the
tensors themselves: two cache lines of each tensor, at a place that depends on the step
and is the same on all ranks. In addition, each snapshot digests a range of all bytes.
The ranges of `every` snapshots at regular distances make up all bytes. On the CPU, one
call of NumPy gathers the samples of all tensors. On an accelerator, one kernel in the
lane of the copies gathers them, and they are digested on the host once the copies are
done.

The digests need not withstand an attacker. They tell a wrong copy from a right one by
its bytes, so that NaNs are compared like any other value.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from crc32c import crc32c
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from ckptd.agent.plan.layout import Row, digest, weigh
from ckptd.agent.plan.replica_groups import ReplicaGroup
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.replicas import (
    DIGEST,
    GROUP,
    MOST_DIGESTS,
    MOST_GROUPS,
    MOST_KEYS,
    ReplicaDigests,
    encode_keys,
)

log = logging.getLogger("ckptd.agent")

choose_pieces: Callable[[Any, Any, Any, int], None] | None = None
digest_pieces: Callable[[Any, int, Any, Any], None] | None = None
"""The functions of `_checked_copy.c`, or None where it could not be compiled."""
with suppress(ImportError):
    from ckptd.agent.copy._checked_copy import choose_pieces, digest_pieces

SAMPLE = 128
"""The bytes that are sampled of each tensor at each snapshot.

They are two cache lines side by side, which cost one cache miss.
"""
ELEMENTS = 8
"""The elements that are sampled of a tensor whose elements do not lie in C order.

The lines of such a tensor may differ between ranks that hold the same values.
"""

_Words = npt.NDArray[np.uint64]
_ODD = [
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x27D4EB2F165667C5,
    0xFF51AFD7ED558CCD,
    0xC4CEB9FE1A85EC53,
]
"""Odd constants of well-known hash functions (xxHash, MurmurHash3)."""
_OF_WORD = np.array(
    [_ODD[n % 4] * (2 * n + 3) % (1 << 64) | 1 for n in range(SAMPLE // 8)], dtype=np.uint64
)


def _mixed(numbers: _Words) -> _Words:
    """Return numbers in which every bit depends on all bits of the given numbers.

    This is the finalizer of MurmurHash3.
    """
    numbers = numbers ^ (numbers >> np.uint64(33))
    numbers *= np.uint64(_ODD[4])
    numbers ^= numbers >> np.uint64(33)
    numbers *= np.uint64(_ODD[5])
    return numbers ^ (numbers >> np.uint64(33))


def _of_step(step: int, salt: int) -> np.uint64:
    return np.uint64((step * _ODD[1] + salt * _ODD[2]) % (1 << 64))


class _AllMemory:
    """All memory of this process as one array of overlapping records.

    With one call, NumPy gathers records at any addresses from it.
    """

    BASE = 4096
    """The first address. NumPy takes the address 0 for the absence of memory."""

    def __init__(self, width: int) -> None:
        self.__array_interface__ = {
            "shape": (1 << 55,), "strides": (1,), "typestr": f"|V{width}", "data": (self.BASE,
            True), "version": 3,
        }  # fmt: skip


_records: dict[int, npt.NDArray[Any]] = {}


def _gather(addresses: _Words, width: int) -> npt.NDArray[np.uint8]:
    """Return `width` bytes from each address, row by row.

    The caller guarantees that the memory is there.
    """
    if width not in _records:
        _records[width] = np.asarray(_AllMemory(width))
    found = _records[width][(addresses - np.uint64(_AllMemory.BASE)).view(np.int64)]
    return found.view(np.uint8).reshape(len(addresses), width)


def _digested(rows: npt.NDArray[np.uint8]) -> _Words:
    """Return a digest of each row of bytes. A difference in one word always changes it."""
    count, width = rows.shape
    if width % 8:
        padded = np.zeros((count, -(-width // 8) * 8), dtype=np.uint8)
        padded[:, :width] = rows
        rows = padded
    words = np.ascontiguousarray(rows).view(np.uint64)
    return _mixed(
        (words * _OF_WORD[: words.shape[1]]).sum(axis=1, dtype=np.uint64) + np.uint64(width)
    )


def _digested_at(addresses: _Words, width: int) -> _Words:
    """Return a digest of the `width` bytes at each address, as `_digested` computes it."""
    if digest_pieces is None:
        return _digested(_gather(addresses, width))
    found = np.empty(len(addresses), dtype=np.uint64)
    digest_pieces(addresses, width, _OF_WORD, found)
    return found


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The tensors on one device from which pieces of one width are sampled.

    tensors: their numbers among the compared tensors. seeds: for each tensor, a number
    that depends on its place in its group. each: the number of pieces of each tensor.
    room: for tensors in C order, the number of places at which a piece can begin; for
    other tensors, the number of their elements. extent: the bytes from the first to the
    last element in memory. shape, stride: for tensors that are not in C order, their
    shapes and strides in elements.
    """

    width: int
    tensors: npt.NDArray[np.intp]
    seeds: _Words
    each: int
    room: _Words
    extent: _Words
    shape: _Words | None = None
    stride: npt.NDArray[np.int64] | None = None

    def addresses(self, starts: _Words, step: int) -> _Words:
        """Return the addresses of the pieces at this step.

        starts: the addresses of all compared tensors.
        """
        found = starts[self.tensors]
        if choose_pieces is None or self.each > 1 or self.shape is not None:
            return (found + self.offsets(step)).ravel()
        choose_pieces(found, self.seeds, self.room, int(_of_step(step, 0)))
        return found

    def offsets(self, step: int) -> _Words:
        """Return the places of the pieces at this step, in bytes from the start of each
        tensor.

        The result has one row for each piece of a tensor.
        """
        found = np.empty((self.each, len(self.tensors)), dtype=np.uint64)
        for number in range(self.each):
            found[number] = _mixed(self.seeds + _of_step(step, number)) % self.room
        if self.shape is None or self.stride is None:
            return found
        return self._by_stride(found, self.shape, self.stride)

    def _by_stride(self, elements: _Words, shape: _Words, stride: npt.NDArray[np.int64]) -> _Words:
        """Return the places of elements, given their numbers in C order."""
        offsets = np.zeros(elements.shape, dtype=np.int64)
        for dimension in range(shape.shape[1] - 1, -1, -1):
            offsets += (elements % shape[:, dimension]).view(np.int64) * stride[:, dimension]
            elements = elements // shape[:, dimension]
        return (offsets * self.width).view(np.uint64)


@dataclass(slots=True)
class Sampled:
    """The samples of one snapshot. Copies from accelerators fill `rows` and `sums`.

    Call `ReplicaSamples.digests` once these copies are done. values: the digest of each
    compared tensor. names: the name of each replica group. rows: the bytes that are
    gathered on an accelerator, by pieces. sums: the numbers of tensors with the digests
    of their ranges, as tensors in host memory. kept: the tensors that must live until
    the copies are done.
    """

    values: _Words
    names: list[bytes]
    rows: list[tuple[_Pieces, torch.Tensor]] = field(default_factory=list)
    sums: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)


Queue = Callable[[torch.device, Callable[[], None]], None]
"""A function that runs work in the lane of a device.

It makes later writes of the training wait for the work.
"""


class ReplicaSamples:
    """The samples of the tensors that this rank compares with other ranks while a plan
    is kept.

    Keeps no tensor alive. `room` is the most bytes that the digests add to a request
    document.
    """

    def __init__(
        self, groups: Sequence[ReplicaGroup], rows: Sequence[Row], tensors: dict[str, torch.Tensor],
        parts: Sequence[torch.Tensor], rank: int, node: Membership | None, every: int,
    ) -> None:  # fmt: skip
        """Choose the tensors to compare, and the pieces to sample.

        groups: the replica groups of the plan, with the numbers of `rows`. parts: this
        rank's part of each of `tensors`. every: the setting `compare_replicas`.
        """
        if len(groups) > MOST_GROUPS:
            log.warning(
                "this rank shares tensors with %d sets of ranks, and only %d of them are compared",
                len(groups),
                MOST_GROUPS,
            )
            groups = groups[:MOST_GROUPS]
        self._every = every
        numbers = {name: number for number, name in enumerate(tensors)}
        self._each = max(1, -(-sum(len(group.rows) for group in groups) // MOST_DIGESTS))
        self._numbers: list[int] = []  # for each compared tensor, its number among `parts`
        # Compared tensors that are lazy views, so that their bytes in memory are not
        # their values.
        self._lazy: list[int] = []
        self._scattered: set[int] = set()  # compared tensors that are not in C order on every rank
        self._groups: list[_Group] = []
        told, seeds = 0, list[int]()
        for group in groups:
            kept = [number for number in group.rows if _has_one_part(tensors[rows[number].fqn])]
            mine = [rows[number] for number in kept]
            first = len(self._numbers)
            self._scattered.update(
                first + place for place, number in enumerate(kept) if number in group.scattered
            )
            self._numbers += [numbers[row.fqn] for row in mine]
            seeds += range(len(mine))
            definition = msgspec.msgpack.encode(
                [
                    group.ranks,
                    [(row.fqn, row.offsets, row.sizes, row.dtype) for row in mine],
                    self._each,
                ]
            )
            keys = [row.fqn for row in mine[:: self._each]]
            here = (
                group.ranks
                if node is None
                else [other for other in group.ranks if other in set(node.ranks)]
            )
            length = sum(map(len, keys))
            tells = rank == here[0] and told + length <= MOST_KEYS
            told += length if tells else 0
            self._groups.append(
                _Group(
                    hashlib.sha256(definition).digest(),
                    first,
                    list(accumulate(row.nbytes for row in mine)),
                    encode_keys(keys) if tells else b"",
                )
            )
        self._pieces = self._divide(
            [parts[number] for number in self._numbers],
            np.array(seeds, dtype=np.uint64) * np.uint64(_ODD[0]),
        )
        self._on_cpu = [parts[number].device.type == "cpu" for number in self._numbers]
        self._order = np.array(
            [index for group in self._groups for index in range(len(group.ends))], dtype=np.uint64
        ) * np.uint64(_ODD[3])
        self._picked = np.array(self._numbers, dtype=np.intp)
        self._known: tuple[list[int] | None, _Words] = None, np.empty(0, dtype=np.uint64)
        digests = sum(DIGEST * -(-len(group.ends) // self._each) for group in self._groups)
        self.room = 64 + digests + sum(GROUP + len(group.keys) + 32 for group in self._groups)

    @property
    def devices(self) -> list[torch.device]:
        """The accelerators that tensors are sampled on."""
        return [device for device in self._pieces if device.type != "cpu"]

    def _divide(
        self, parts: Sequence[torch.Tensor], seeds: _Words
    ) -> dict[torch.device, list[_Pieces]]:
        """Return the pieces that are sampled on each device."""
        kinds: dict[tuple[torch.device, int, int, bool], list[int]] = defaultdict(list)
        for number, part in enumerate(parts):
            if part.is_neg() or part.is_conj() or part._is_zerotensor():
                self._lazy.append(number)
            elif number in self._scattered:
                kinds[part.device, part.element_size(), part.dim(), True].append(number)
            else:
                kinds[part.device, min(SAMPLE, part.nbytes), 0, False].append(number)
        found: dict[torch.device, list[_Pieces]] = defaultdict(list)
        for (device, width, _, strided), numbers in kinds.items():
            these = np.array(numbers, dtype=np.intp)
            extent = np.array([_extent(parts[n]) for n in numbers], dtype=np.uint64)
            if strided:
                room = np.array([parts[n].numel() for n in numbers], dtype=np.uint64)
                shape = np.array([tuple(parts[n].shape) for n in numbers], dtype=np.uint64)
                stride = np.array([parts[n].stride() for n in numbers], dtype=np.int64)
                found[device].append(
                    _Pieces(width, these, seeds[these], ELEMENTS, room, extent, shape, stride)
                )
            else:
                room = np.array([parts[n].nbytes - width + 1 for n in numbers], dtype=np.uint64)
                found[device].append(_Pieces(width, these, seeds[these], 1, room, extent))
        return found

    def take(
        self,
        parts: Sequence[torch.Tensor],
        addresses: list[int],
        step: int,
        before: int,
        queue: Queue,
    ) -> Sampled:
        """Sample the tensors as they are now.

        `queue` runs the work for tensors on accelerators.

        parts: this rank's part of each tensor of the state. addresses: the address of
        each part, in another list if one of them has changed. before: the step of the
        last snapshot, or -1. If the steps come at regular distances, every range has
        had its turn after `every` steps.
        """
        if self._known[0] is not addresses:
            self._known = addresses, np.array(addresses, dtype=np.uint64)[self._picked]
        starts = self._known[1]
        turn = step // max(1, step - before) % self._every
        name = b"".join(each.to_bytes(8, "little") for each in (turn, self._every, step))
        names = [
            hashlib.blake2b(group.definition + name, digest_size=GROUP).digest()
            for group in self._groups
        ]
        sampled = Sampled(np.zeros(len(self._numbers), dtype=np.uint64), names)
        for device, pieces in self._pieces.items():
            if device.type == "cpu":
                for each in pieces:
                    _add(
                        sampled.values, each, _digested_at(each.addresses(starts, step), each.width)
                    )
            else:
                queue(
                    device,
                    partial(
                        _sample_on, device, pieces, starts, parts, self._numbers, step, sampled
                    ),
                )
        for number in self._lazy:
            part = parts[self._numbers[number]]
            if part.device.type == "cpu":
                _add_ranges(sampled.values, [(number, int.from_bytes(digest(part), "little"))])
            else:
                queue(part.device, partial(_sum_on, [(number, part)], sampled))
        self._sweep(sampled, parts, starts, turn, queue)
        return sampled

    def _sweep(
        self,
        sampled: Sampled,
        parts: Sequence[torch.Tensor],
        starts: _Words,
        turn: int,
        queue: Queue,
    ) -> None:
        """Digest the range of bytes whose turn it is.

        A tensor that is not in C order is digested as a whole when its first byte is in
        the range.
        """
        here: list[tuple[int, int]] = []
        elsewhere: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        lazy = set(self._lazy)
        for group in self._groups:
            for place, begin, end in group.window(turn, self._every):
                number = group.first + place
                part = parts[self._numbers[number]]
                if number in lazy or (begin and number in self._scattered):
                    continue
                on_cpu = self._on_cpu[number]
                if number in self._scattered and on_cpu:
                    here.append((number, int.from_bytes(digest(part), "little")))
                elif number in self._scattered:
                    elsewhere[part.device].append((number, part))
                elif on_cpu:
                    here.append(
                        (
                            number,
                            crc32c(
                                (ctypes.c_char * (end - begin)).from_address(
                                    int(starts[number]) + begin
                                )
                            ),
                        )
                    )
                else:
                    elsewhere[part.device].append(
                        (number, part.detach().reshape(-1).view(torch.uint8)[begin:end])
                    )
        _add_ranges(sampled.values, here)
        for device, found in elsewhere.items():
            queue(device, partial(_sum_on, found, sampled))

    def digests(self, sampled: Sampled) -> list[ReplicaDigests]:
        """Return the digests for the request document, once the copies from
        accelerators are done.
        """
        for pieces, rows in sampled.rows:
            _add(sampled.values, pieces, _digested(rows.numpy()))
        _add_ranges(sampled.values, [(number, int(total)) for number, total in sampled.sums])
        mixed = _mixed(sampled.values + self._order)
        found = []
        for group, name in zip(self._groups, sampled.names, strict=True):
            count = len(group.ends)
            mine = mixed[group.first : group.first + count]
            runs = (
                np.add.reduceat(mine, np.arange(0, count, self._each))
                if self._each > 1 and count
                else mine
            )
            found.append(
                ReplicaDigests(
                    name, (runs >> np.uint64(32)).astype("<u4").tobytes(), self._each, group.keys
                )
            )
        return found


def _has_one_part(tensor: torch.Tensor) -> bool:
    """Return False for a ShardedTensor with several shards on this rank.

    `parts` has only the first of them.
    """
    return not isinstance(tensor, ShardedTensor) or len(tensor.local_shards()) == 1


def _extent(part: torch.Tensor) -> int:
    return part.element_size() * (
        1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """A replica group.

    definition: a digest of its ranks and tensors. first: the number of its first tensor
    among the compared tensors. ends: for each tensor, the bytes of all tensors of the
    group up to its end. keys: the encoded keys for the request document.
    """

    definition: bytes
    first: int
    ends: list[int]
    keys: bytes

    def window(self, turn: int, every: int) -> list[tuple[int, int, int]]:
        """Return the range of bytes whose turn it is, tensor by tensor.

        Each entry has the place of a tensor in the group, and the begin and the end of
        its bytes.
        """
        total = self.ends[-1] if self.ends else 0
        begin, end = total * turn // every, total * (turn + 1) // every
        place = bisect_right(self.ends, begin)
        found = []
        while begin < end:
            start = self.ends[place - 1] if place else 0
            until = min(end, self.ends[place])
            found.append((place, begin - start, until - start))
            begin, place = until, place + 1
        return found


def _add_ranges(values: _Words, found: Sequence[tuple[int, int]]) -> None:
    """Add the digests of ranges to the digests of their tensors.

    `found` has pairs of the number of a tensor and a digest. Each tensor occurs at most
    once.
    """
    if found:
        digests = np.array([(digest + 1) % (1 << 64) for _, digest in found], dtype=np.uint64)
        values[[number for number, _ in found]] += _mixed(digests)


def _add(values: _Words, pieces: _Pieces, digests: _Words) -> None:
    """Add the digests of pieces to the digests of their tensors."""
    found = digests.reshape(pieces.each, len(pieces.tensors))
    for number in range(1, pieces.each):
        found[0] += found[number] * np.uint64(2 * number + 1)
    values[pieces.tensors] += found[0]


# -- on accelerators


class _DeviceMemory:
    """A range of the memory of a CUDA or ROCm device, which torch takes for a tensor of
    bytes.
    """

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def device_memory(device: torch.device, address: int, length: int) -> torch.Tensor | None:
    """Return the memory from `address` on as one tensor, or None if torch cannot do
    this.

    Not all of that range need be memory: only the bytes that a kernel reads are
    touched.
    """
    if device.type != "cuda":
        return None
    return torch.as_tensor(_DeviceMemory(address, length), dtype=torch.uint8, device=device)


def _sample_on(
    device: torch.device, pieces: Sequence[_Pieces], starts: _Words, parts: Sequence[torch.Tensor],
    numbers: Sequence[int], step: int, sampled: Sampled, whole: Callable[[torch.device, int, int],
    torch.Tensor | None] = device_memory,
) -> None:  # fmt: skip
    """Gather the pieces on an accelerator, and begin to copy them to the host.

    Runs in the lane of the device.
    """
    offsets = [each.offsets(step) for each in pieces]
    lowest = min(int(starts[each.tensors].min()) for each in pieces)
    highest = max(int((starts[each.tensors] + each.extent).max()) for each in pieces)
    memory_ = whole(device, lowest, highest - lowest)
    for each, offset in zip(pieces, offsets, strict=True):
        if memory_ is not None:
            places = torch.from_numpy(
                (starts[each.tensors] + offset - np.uint64(lowest)).ravel().view(np.int64)
            )
            here = places.pin_memory() if torch.accelerator.is_available() else places
            on_device = here.to(device, non_blocking=True)
            rows = memory_.take(
                on_device.unsqueeze(1) + torch.arange(each.width, dtype=torch.int64, device=device)
            )
            sampled.kept += [here, on_device, rows]
        else:
            places_of = [
                (n, int(at)) for row in offset for n, at in zip(each.tensors, row, strict=True)
            ]
            rows = torch.stack([_piece(parts[numbers[n]], each, at) for n, at in places_of])
        sampled.rows.append((each, _to_host(rows)))


def _piece(part: torch.Tensor, pieces: _Pieces, offset: int) -> torch.Tensor:
    """Return one piece of a tensor as bytes."""
    part = part.detach()
    if pieces.shape is None:
        return part.reshape(-1).view(torch.uint8)[offset : offset + pieces.width]
    return part.as_strided((1,), (1,), part.storage_offset() + offset // pieces.width).view(
        torch.uint8
    )


def _sum_on(found: Sequence[tuple[int, torch.Tensor]], sampled: Sampled) -> None:
    """Digest ranges of tensors on their accelerator, and begin to copy the digests to
    the host.

    Runs in the lane of the device.
    """
    totals = _to_host(torch.stack([weigh(flat) for _, flat in found]))
    sampled.sums += [(number, totals[at]) for at, (number, _) in enumerate(found)]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(
        tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=torch.accelerator.is_available()
    )
    host.copy_(tensor, non_blocking=True)
    return host
