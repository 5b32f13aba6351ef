"""Tells what the numbers of one tensor in a checkpoint are like: norm, least and
greatest, share of values that are not finite, and a histogram. Needs no torch.

A tensor is read block by block, however large it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.array_diff import BLOCK, PIECE, Array, Norm, floats, numbers
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.formats.plan import element_size
from ckptd.shared.units import size_text

MOST_WHOLE = 256 << 20
"""The most bytes of a tensor that are read at once, where it cannot be read by rows."""
BINS = 48


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """The statistics of the numbers in a tensor.

    Everything but `non_finite` is about the finite elements, and is None if there are
    none or the dtype is none of numbers. magnitudes: the elements are complex, and all
    is about their absolute values. bins: how many elements lie in each of `BINS` parts of
    equal width between minimum and maximum; a single one if no float64 lies between the
    parts, as when these are equal, and none if their distance is too large for a float.
    """

    elements: int
    non_finite: int | None
    norm: float | None
    mean: float | None
    minimum: float | None
    maximum: float | None
    bins: tuple[int, ...]
    magnitudes: bool


def tensor_statistics(
    checkpoint: ArrayCheckpoint, name: str, stopped: Callable[[], bool] = lambda: False
) -> TensorStatistics:
    """Return what the numbers of a tensor are like. Its bytes are read twice.

    stopped: returns True if the result is not wanted any more, which ends the work with
    InterruptedError. Raises NotFound, IntegrityError, StorageError; InvalidRequest if
    the tensor is larger than `MOST_WHOLE` and cannot be read by rows.
    """
    found = _Found(checkpoint.dtype(name))
    for piece in _pieces(checkpoint, name, stopped):
        found.add(piece)
    if found.finite and math.isfinite(found.maximum - found.minimum):
        edges = np.linspace(found.minimum, found.maximum, BINS + 1)
        bins = np.zeros(BINS if (np.diff(edges) > 0).all() else 1, np.int64)
        for piece in _pieces(checkpoint, name, stopped):
            bins += (
                np.histogram(piece, BINS, (found.minimum, found.maximum))[0]
                if len(bins) > 1
                else len(piece)
            )
        found.bins = tuple(bins.tolist())
    return found.told(math.prod(checkpoint.shape(name)))


class _Found:
    """The statistics of a tensor of this dtype after some of its pieces."""

    def __init__(self, dtype: str) -> None:
        self._known = numbers(np.empty(0, np.uint8), dtype) is not None
        self._magnitudes = dtype.startswith("complex")
        self._norm, self._sum = Norm(), 0.0
        self.finite = 0
        self.minimum, self.maximum = math.inf, -math.inf
        self.bins: tuple[int, ...] = ()

    def add(self, piece: Array) -> None:
        """Add the finite numbers of a piece."""
        if len(piece):
            self.finite += len(piece)
            self.minimum = min(self.minimum, float(piece.min()))
            self.maximum = max(self.maximum, float(piece.max()))
            with np.errstate(over="ignore"):
                self._sum += float(piece.sum())
            self._norm.add(np.abs(piece))

    def told(self, elements: int) -> TensorStatistics:
        if not self.finite:
            missing = elements if self._known else None
            return TensorStatistics(elements, missing, None, None, None, None, (), self._magnitudes)
        return TensorStatistics(
            elements, elements - self.finite, self._norm.value, self._sum / self.finite,
            self.minimum, self.maximum, self.bins, self._magnitudes,
        )  # fmt: skip


def _pieces(checkpoint: ArrayCheckpoint, name: str, stopped: Callable[[], bool]) -> Iterator[Array]:
    """Yield the finite numbers of a tensor as float64, a piece at a time; those of a
    complex one as absolute values.
    """
    dtype = checkpoint.dtype(name)
    size = element_size(dtype) or 1
    for block in _blocks(checkpoint, name, size):
        raw = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        for start in range(0, len(raw), PIECE * size):
            if stopped():
                raise InterruptedError(f"{name} is not looked at any more")
            values = numbers(raw[start : start + PIECE * size], dtype)
            if values is None:
                return
            values = np.abs(values) if values.dtype.kind == "c" else floats(values)
            finite = np.isfinite(values)
            yield values if finite.all() else values[finite]


def _blocks(checkpoint: ArrayCheckpoint, name: str, size: int) -> Iterator[Array]:
    shape = checkpoint.shape(name)
    row, whole = math.prod(shape[1:]) * size, math.prod(shape) * size
    if whole <= BLOCK:
        yield checkpoint.array(name)
        return
    by_rows = bool(shape) and checkpoint.is_in_order(name)
    if (row if by_rows else whole) > MOST_WHOLE:
        raise InvalidRequest(
            f"{name} cannot be read in parts of less than {size_text(row if by_rows else whole)}, "
            f"and at most {size_text(MOST_WHOLE)} are read at once: read it with ArrayCheckpoint"
        )
    if not by_rows:
        yield checkpoint.array(name)
        return
    count = max(1, BLOCK // max(row, 1))
    for start in range(0, shape[0], count):
        yield checkpoint.rows(name, start, min(start + count, shape[0]))
