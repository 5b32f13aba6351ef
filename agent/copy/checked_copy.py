"""Copies tensors on the CPU into a slot, and bytes out of a slot, and computes their
checksums in the same pass.

The copy is made in C (`_checked_copy.c`), on as many threads as torch uses. It takes
less time than torch's, which computes no checksums. Where `_checked_copy.c` could not
be compiled, torch copies, and the daemon computes the checksums after the seal.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

import torch
from crc32c import crc32c

from ckptd.agent.copy.mapping import present
from ckptd.agent.plan.structure import PLAIN
from ckptd.agent.state.dtypes import COPYABLE, copyable
from ckptd.shared.formats.plan import Region

copy_bytes: Callable[[list[int], list[int], list[int], list[int], int, int], list[int]] | None = (
    None
)
"""`copy` of `_checked_copy.c`, or None where that could not be compiled."""
with suppress(ImportError):
    from ckptd.agent.copy._checked_copy import copy as copy_bytes

_address, _stride, _is_neg, _is_conj = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    torch.Tensor.is_neg,
    torch.Tensor.is_conj,
)
# Such as some gradients: torch knows that they are zero, and gives them no memory.
_has_no_memory = torch.Tensor._is_zerotensor
_dtype, _shape, _is_cpu = attrgetter("dtype"), attrgetter("shape"), attrgetter("is_cpu")


@dataclass(frozen=True, slots=True)
class Targets:
    """The places of consecutive items in a slot: dense tensors over its memory, and
    their attributes in columns.

    views: returns the tensors of all items of the slot, which most copies do not need.
    first: the number of the first of these items.
    """

    views: Callable[[], list[torch.Tensor]]
    first: int
    addresses: list[int]
    lengths: list[int]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> Targets:
        addresses, lengths = list(map(_address, tensors)), [tensor.nbytes for tensor in tensors]
        return cls(
            lambda: tensors,
            0,
            addresses,
            lengths,
            list(map(_dtype, tensors)),
            list(map(_shape, tensors)),
            list(map(_stride, tensors)),
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.views()[self.first : self.first + len(self.addresses)]

    def part(self, numbers: slice) -> Targets:
        """Return some of these places."""
        return Targets(
            self.views, self.first + numbers.indices(len(self.addresses))[0],
            self.addresses[numbers], self.lengths[numbers],
            self.dtypes[numbers], self.shapes[numbers], self.strides[numbers],
        )  # fmt: skip

    def unlike(self, sources: Sequence[torch.Tensor]) -> list[int]:
        """Return the numbers of the sources that differ from their targets in dtype or
        layout, so that a copy must convert them.
        """
        if (
            PLAIN.issuperset(map(type, sources))
            and all(map(_is_cpu, sources))
            and list(map(_dtype, sources)) == self.dtypes
            and list(map(_shape, sources)) == self.shapes
            and list(map(_stride, sources)) == self.strides
            and not any(map(_is_neg, sources))
            and not any(map(_is_conj, sources))
            and not any(map(_has_no_memory, sources))
        ):
            return []
        return [
            number
            for number, pair in enumerate(zip(self.tensors, sources, strict=True))
            if not _are_alike(*pair)
        ]


def _are_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return True if the bytes of the source are those that the target is to have, in
    the same order.
    """
    return (
        (
            type(source) in PLAIN
            and source.is_cpu
            and source.dtype == target.dtype
            and source.shape == target.shape
        )
        and (
            source.stride() == target.stride()
            or (source.is_contiguous() and target.is_contiguous())
        )
        and not (source.is_neg() or source.is_conj() or source._is_zerotensor())
    )


class CheckedCopy:
    """One copy of the items of a plan into a slot, in their order.

    Call `copy` for the first items, then for those that follow, and so on. After the
    last items, `checks` has the checksums.
    """

    def __init__(self, regions: Iterable[Region], chunk_size: int) -> None:
        """regions: those of the plan, which its items fill without a gap. chunk_size:
        that of the slot, in bytes.
        """
        self._chunk_size = chunk_size
        self._ends = list(accumulate(
            min(chunk_size, region.length - at) for region in regions for at in range(0,
            region.length, chunk_size)
        ))  # fmt: skip
        self._copied = 0
        self._crcs: list[int] = []
        self._crc_so_far = 0  # that of the bytes that are copied of the next chunk
        self._checked = copy_bytes is not None

    def skip_checks(self) -> None:
        """Make `checks` return None, because some items are copied in another way."""
        self._checked = False

    def copy(
        self, targets: Targets, sources: Sequence[torch.Tensor], unlike: Sequence[int] | None = None
    ) -> None:
        """Copy each source into its target.

        A source has the shape of its target. Its dtype and layout may differ.

        unlike: what `targets.unlike(sources)` returns, if it is known already.
        """
        if copy_bytes is None:
            _copy_by_torch(targets.tensors, sources)
            return
        if unlike is None:
            unlike = targets.unlike(sources)
        if unlike:
            sources = list(sources)
            tensors = targets.tensors
            _copy_by_torch([tensors[n] for n in unlike], [sources[n] for n in unlike])
            for number in unlike:
                sources[number] = tensors[number]  # only its checksum is still wanted
        begin, self._copied = self._copied, self._copied + sum(targets.lengths)
        done, complete = len(self._crcs), bisect_right(self._ends, self._copied)
        # The last part begins a chunk, or is empty.
        ends = [end - begin for end in [*self._ends[done:complete], self._copied]]
        found = copy_bytes(
            targets.addresses,
            list(map(_address, sources)),
            targets.lengths,
            ends,
            torch.get_num_threads(),
            self._crc_so_far,
        )
        self._crc_so_far = found.pop()
        self._crcs += found

    def checks(self, values: bytes) -> list[int] | None:
        """Return the crc32c of each chunk: those of the items, then those of the values
        document. Return None if some are not known.
        """
        if not self._checked or len(self._crcs) < len(self._ends):
            return None
        pieces = memoryview(values)
        return self._crcs + [
            crc32c(pieces[at : at + self._chunk_size])
            for at in range(0, len(values), self._chunk_size)
        ]


def copy_out(address: int, pieces: Sequence[memoryview]) -> int:
    """Copy the bytes of a mapped segment, from `address` on, into one buffer after
    another. Return the crc32c of all of them.

    Runs on the calling thread only. Raises OSError, and copies nothing, if the memory
    cannot be read. `copy_bytes` must not be None.
    """
    with present(address, sum(map(len, pieces))):
        return copy_pieces(address, pieces)


def copy_pieces(address: int, pieces: Sequence[memoryview]) -> int:
    """Copy bytes of this process's own memory, from `address` on, into one buffer after
    another. Return the crc32c of all of them.

    Other threads run meanwhile.
    """
    pieces = [piece for piece in pieces if len(piece)]
    lengths = [len(piece) for piece in pieces]
    targets = [ctypes.addressof(ctypes.c_char.from_buffer(piece)) for piece in pieces]
    sources = list(accumulate(lengths, initial=address))[:-1]
    if copy_bytes is not None:
        (crc,) = copy_bytes(targets, sources, lengths, [sum(lengths)], 1, 0)
        return crc
    crc = 0
    for target, source, piece in zip(targets, sources, pieces, strict=True):
        ctypes.memmove(target, source, len(piece))
        crc = crc32c(piece, crc)
    return crc


def _copy_by_torch(targets: list[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if not COPYABLE.issuperset(map(_dtype, targets)):
        targets, sources = list(map(copyable, targets)), list(map(copyable, sources))
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, list(sources))
