"""Compares two checkpoints without torch and without a daemon: keys, shapes, dtypes,
values, the distance between tensors, and what is known of the runs that saved them.

Tensors are read one after another, in blocks of rows, so that memory is bounded
whatever the size of the checkpoints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ckptd.shared.array_checkpoint import ArrayCheckpoint, Range
from ckptd.shared.formats.bounds import is_flat
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.plain_values import Undecoded
from ckptd.shared.formats.plan import RUN_FACTS, element_size
from ckptd.shared.system.collector import paused_collector

BLOCK = 32 << 20
"""The most bytes of a tensor that are read at once, unless one row has more."""
PIECE = 1 << 20
"""The number of elements that are converted to numbers at once."""
Path = tuple[Any, ...]
"""The keys that lead to a value."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs in its shape, its dtype or its bits.

    Each pair is of A and B. elements: how many differ, or None if the shapes or the
    dtypes do. l2: the L2 norm of the difference, over the elements that are finite in
    both. relative: the same relative to the L2 norm of A; None if that is 0, or an
    element differs that is not finite in A or B. max_abs: the largest absolute
    difference. non_finite: how many elements are NaN or infinite. These are None where the
    shapes differ or the dtype is none of numbers.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    elements: int | None
    l2: float | None
    relative: float | None
    max_abs: float | None
    non_finite: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A plain value that differs, such as a learning rate, by its path in the state."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """The difference between the checkpoints A and B.

    The tensors are in the order of their relative difference, the largest first. same:
    how many tensors and values are the same. runs: the facts that differ of the runs that
    saved them, such as the commit; None stands for a fact that is not known.
    """

    only_a: list[str]
    only_b: list[str]
    tensors: list[TensorDifference]
    values: list[ValueDifference]
    same_tensors: int
    same_values: int
    runs: list[ValueDifference] = field(default_factory=list)

    @property
    def is_none(self) -> bool:
        """True if the two hold the same state, whatever runs have saved it."""
        return not (self.only_a or self.only_b or self.tensors or self.values)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ckptd diff --json` prints. Numbers that JSON cannot
        hold are null, and values that it cannot hold are texts.
        """
        return {
            "equal": self.is_none,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "tensors": [
                {
                    key: None if isinstance(value, float) and not math.isfinite(value) else value
                    for key in TensorDifference.__slots__
                    for value in (getattr(found, key),)
                }
                for found in self.tensors
            ],
            "values": [
                {"name": found.name, "a": _plain(found.a), "b": _plain(found.b)}
                for found in self.values
            ],
            "same": {"tensors": self.same_tensors, "values": self.same_values},
            "runs": [{"name": found.name, "a": found.a, "b": found.b} for found in self.runs],
        }


@paused_collector()
def difference(a: ArrayCheckpoint, b: ArrayCheckpoint) -> CheckpointDifference:
    """Compare two checkpoints. Raises IntegrityError, NewerFormat, StorageError."""
    tensors_a, tensors_b = a.keys(), b.keys()
    values_a, values_b = _leaves(a), _leaves(b)
    both = set(tensors_b)
    shared = [name for name in tensors_a if name in both]
    packed, others = _packed(shared, a, b)
    found = list(itertools.chain.from_iterable(_packed_differences(one, a, b) for one in packed))
    for names in _batches(others, a, b):
        held = None  # those of the batch before are freed first
        held = (a.arrays(names), b.arrays(names)) if len(names) > 1 else None
        found += [
            one for name in names if (one := _tensor_difference(name, a, b, held)) is not None
        ]
    order = {name: number for number, name in enumerate(shared)}
    found.sort(
        key=lambda one: (-math.inf if one.relative is None else -one.relative, order[one.name])
    )
    values, same = [], 0
    for path, value in values_a.items():
        if path not in values_b:
            continue
        one, other = _read_blob(a, value), _read_blob(b, values_b[path])
        if _same(one, other):
            same += not isinstance(value, _Tensor)
        else:
            values.append(ValueDifference(_name(path), _told(one), _told(other)))
    return CheckpointDifference(
        _only(tensors_a, values_a, tensors_b, values_b),
        _only(tensors_b, values_b, tensors_a, values_a),
        found,
        values,
        len(shared) - len(found),
        same,
        run_differences(a.manifest, b.manifest),
    )


def run_differences(a: Manifest, b: Manifest) -> list[ValueDifference]:
    """Return the facts that differ of the runs that saved two checkpoints: first the
    commit and the command line, last the number of ranks.
    """
    one, other = _run(a), _run(b)
    return [
        ValueDifference(name, one.get(name), other.get(name))
        for name in dict.fromkeys([*RUN_FACTS, *one, *other])
        if one.get(name) != other.get(name)
    ]


def _run(manifest: Manifest) -> dict[str, str]:
    return {name: text for name, text in manifest.writer.items() if text} | {
        "ranks": str(manifest.world_size)
    }


def _only(
    tensors: list[str], values: Mapping[Path, Any], others: list[str], other: Mapping[Path, Any]
) -> list[str]:
    """Return the names of the tensors and values that only one checkpoint has."""
    theirs = set(others)
    return [name for name in tensors if name not in theirs] + [
        _name(path)
        for path, value in values.items()
        if path not in other and not isinstance(value, _Tensor)
    ]


# -- plain values


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The place of a tensor in the state."""

    name: str


@dataclass(frozen=True, slots=True)
class _Blob:
    """The place of a value that only torch can decode, which is read when it is
    compared.
    """

    name: str


def _leaves(checkpoint: ArrayCheckpoint) -> dict[Path, Any]:
    """Return the values of a state by their paths.

    A list or a tuple of numbers and texts is one value, and so is an empty container.
    """
    tensors, found = set(checkpoint.keys()), dict[Path, Any]()

    def visit(value: Any, path: Path) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                visit(item, (*path, key))
        elif isinstance(value, list | tuple) and not is_flat(value):
            for number, item in enumerate(value):
                visit(item, (*path, number))
        else:
            found[path] = value

    visit(checkpoint.tree(lambda name: (_Tensor if name in tensors else _Blob)(name)), ())
    return found


def _read_blob(checkpoint: ArrayCheckpoint, value: Any) -> Any:
    data = checkpoint.blob(value.name) if isinstance(value, _Blob) else None
    return value if data is None else Undecoded("torch", data)


def _same(a: Any, b: Any) -> bool:
    """Return True if two values are the same, also in their types. NaN is the same as
    NaN.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and bool(a.tobytes() == b.tobytes())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (isinstance(a, float) and a != a and b != b)


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _told(value: Any) -> Any:
    """Return a value as it is shown: of what is no plain value, say what it is."""
    if isinstance(value, _Tensor):
        return f"the tensor {value.name}"
    if isinstance(value, Undecoded):
        return f"{len(value.data)} bytes ({value.kind})"
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} {list(value.shape)}"
    return value


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


# -- tensors


class _Packed(NamedTuple):
    """A tensor of the same dtype and shape in A and B, whose bytes are whole ranges of the
    packed slots of each.

    a, b: the ranges, in C order, as `ArrayCheckpoint.placed` has them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    a: Sequence[Range]
    b: Sequence[Range]


def _packed(
    names: Iterable[str], a: ArrayCheckpoint, b: ArrayCheckpoint
) -> tuple[list[list[_Packed]], list[str]]:
    """Divide names into those of tensors that can be compared many at once, and the others.

    The former are in batches of one dtype, with up to `BLOCK` bytes, in the order of A.
    """
    found, others = list[_Packed](), list[str]()
    for name in names:
        (dtype, shape, one), (*kind, other) = a.placed(name), b.placed(name)
        if one and other and [dtype, shape] == kind and _has_numbers(dtype):
            nbytes = one[0][2] if len(one) == 1 else sum(length for _, _, length in one)
            if 0 < nbytes <= BLOCK:
                found.append(_Packed(name, dtype, shape, nbytes, one, other))
                continue
        others.append(name)
    found.sort(key=lambda one: (one.dtype, one.a[0]))
    batches, nbytes = list[list[_Packed]](), 0
    for packed in found:
        nbytes += packed.nbytes
        if not batches or nbytes > BLOCK or batches[-1][0].dtype != packed.dtype:
            batches.append([])
            nbytes = packed.nbytes
        batches[-1].append(packed)
    return batches, others


def _packed_differences(
    batch: Sequence[_Packed], a: ArrayCheckpoint, b: ArrayCheckpoint
) -> Iterator[TensorDifference]:
    """Yield how the tensors of a batch differ, as far as they do.

    Raises IntegrityError, StorageError.
    """
    raw_a = a.read([place for one in batch for place in one.a])
    raw_b = b.read([place for one in batch for place in one.b])
    width = _size(batch[0].dtype)
    ends = np.cumsum([one.nbytes for one in batch])
    first = start = 0
    while first < len(batch):
        last = max(first + 1, int(np.searchsorted(ends, start + PIECE * width, "right")))
        end = int(ends[last - 1])
        yield from _differences(
            batch[first:last],
            raw_a[start:end],
            raw_b[start:end],
            np.concatenate([[0], ends[first : last - 1] - start]) // width,
        )
        first, start = last, end


def _differences(
    batch: Sequence[_Packed], a: Array, b: Array, starts: Array
) -> Iterator[TensorDifference]:
    """Yield how tensors of one dtype differ, given their bytes one after another, and the
    number of the first element of each.

    The arithmetic is that of `_Distance`, for all tensors at once: one call of NumPy for
    each small tensor would take far longer than what it computes.
    """
    dtype = batch[0].dtype
    differ = _differ(a, b, _size(dtype))
    differing = np.add.reduceat(differ, starts, dtype=np.int64)
    if not differing.any():
        return
    if len(batch) == 1:
        distance = _Distance((dtype, dtype))
        distance.add(a, b)
        yield distance.told(batch[0].name, (batch[0].shape, batch[0].shape))
        return
    x, y = numbers(a, dtype), numbers(b, dtype)
    assert x is not None
    assert y is not None
    finite = np.isfinite(x), np.isfinite(y)
    both = finite[0] & finite[1]
    lacking = [np.add.reduceat(~one, starts, dtype=np.int64).tolist() for one in finite]
    beyond = ~both & (x != y) & ~(np.isnan(x) & np.isnan(y))
    x, y = np.where(both, x, x.dtype.type(0)), np.where(both, y, y.dtype.type(0))
    apart = _apart(x, y)
    figures = zip(
        batch,
        differing.tolist(),
        _norms(apart, starts),
        _norms(np.abs(floats(x)), starts),
        np.maximum.reduceat(apart, starts).tolist(),
        np.add.reduceat(beyond, starts, dtype=np.int64).tolist(),
        *lacking,
        strict=True,
    )
    for one, elements, l2, norm, most, lost, lacking_a, lacking_b in figures:
        if elements:
            yield TensorDifference(
                one.name, (one.shape, one.shape), (dtype, dtype), elements, l2,
                None if lost else _relative(l2, norm), most, (lacking_a, lacking_b),
            )  # fmt: skip


def _norms(values: Array, starts: Array) -> list[float]:
    """Return the L2 norm of each tensor, given the absolute values of all as float64, as
    `Norm` computes it.
    """
    largest = np.maximum.reduceat(values, starts)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    with np.errstate(over="ignore"):
        scaled = values / np.repeat(scale, np.diff(starts, append=len(values)))
        found: list[float] = (scale * np.sqrt(np.add.reduceat(scaled * scaled, starts))).tolist()
    return found


def _relative(l2: float, norm: float) -> float | None:
    return 0.0 if l2 == 0 else l2 / norm if norm else None


_Held = tuple[Mapping[str, Array], Mapping[str, Array]]
"""Tensors of both checkpoints that have been read together."""


def _batches(names: Iterable[str], a: ArrayCheckpoint, b: ArrayCheckpoint) -> Iterator[list[str]]:
    """Divide names into lists of neighbours that have up to `BLOCK` bytes together in each
    checkpoint.

    To read one small tensor takes as long as to read the whole chunk that it is in. A
    larger tensor, or one that shares its memory with others, is in a list of its own.
    """
    batch, nbytes = list[str](), 0
    for name in names:
        alone = not (a.is_in_order(name) and b.is_in_order(name))
        size = max(math.prod(c.shape(name)) * _size(c.dtype(name)) for c in (a, b))
        if batch and (alone or nbytes + size > BLOCK):
            yield batch
            batch, nbytes = [], 0
        if alone:
            yield [name]
        else:
            batch.append(name)
            nbytes += size
    if batch:
        yield batch


def _tensor_difference(
    name: str, a: ArrayCheckpoint, b: ArrayCheckpoint, held: _Held | None
) -> TensorDifference | None:
    """Return how a tensor that both checkpoints have differs, or None if it does not.

    Raises IntegrityError, StorageError.
    """
    shapes = (a.shape(name), b.shape(name))
    dtypes = (a.dtype(name), b.dtype(name))
    if shapes[0] != shapes[1]:
        return TensorDifference(name, shapes, dtypes, None, None, None, None, None)
    # Most tensors of two checkpoints are often the same, and need no arithmetic. The
    # norm of A needs the blocks before the first difference, which are read again.
    distance, same = _Distance(dtypes), 0
    for one, other in _blocks(name, shapes[0], a, b, held):
        if dtypes[0] == dtypes[1] and not distance.differing and np.array_equal(one, other):
            same += 1
        else:
            distance.add(one, other)
    if dtypes[0] == dtypes[1] and not distance.differing:
        return None
    for one, other in itertools.islice(_blocks(name, shapes[0], a, b, held), same):
        distance.add(one, other)
    return distance.told(name, shapes)


def _blocks(
    name: str,
    shape: tuple[int, ...],
    a: ArrayCheckpoint,
    b: ArrayCheckpoint,
    held: _Held | None,
) -> Iterator[tuple[Array, Array]]:
    """Yield the bytes of a tensor in both checkpoints, block by block.

    A tensor that does not lie in C order comes whole, because each block of it would
    read all chunks again.
    """
    if held is not None:
        yield _raw(held[0][name]), _raw(held[1][name])
        return
    row = math.prod(shape[1:]) * max(_size(a.dtype(name)), _size(b.dtype(name)))
    count = max(1, BLOCK // max(row, 1))
    if not shape or shape[0] <= count or not (a.is_in_order(name) and b.is_in_order(name)):
        yield _raw(a.array(name)), _raw(b.array(name))
        return
    for start in range(0, shape[0], count):
        stop = min(start + count, shape[0])
        yield _raw(a.rows(name, start, stop)), _raw(b.rows(name, start, stop))


def _raw(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class _Distance:
    """The distance between two tensors, added up over their blocks.

    differing: the number of elements whose bits differ, if the dtypes are the same.
    """

    def __init__(self, dtypes: tuple[str, str]) -> None:
        self._dtypes = dtypes
        self._sizes = tuple(_size(dtype) for dtype in dtypes)
        self._same_type = dtypes[0] == dtypes[1]
        self._known = all(map(_has_numbers, dtypes))
        self.differing = 0
        self._l2, self._norm = Norm(), Norm()
        self._max = 0.0
        self._non_finite = [0, 0]
        self._beyond = 0  # elements that differ and are not finite in A or B

    def add(self, a: Array, b: Array) -> None:
        """Add the bytes of a block in A and in B."""
        size_a, size_b = self._sizes
        for start in range(0, len(a) // size_a, PIECE):
            one = a[start * size_a : (start + PIECE) * size_a]
            other = b[start * size_b : (start + PIECE) * size_b]
            equal = self._same_type and np.array_equal(one, other)
            if self._same_type and not equal:
                self.differing += int(np.count_nonzero(_differ(one, other, size_a)))
            if self._known:
                self._measure(one, other, equal=equal)

    def _measure(self, a: Array, b: Array, *, equal: bool) -> None:
        x = numbers(a, self._dtypes[0])
        y = x if equal else numbers(b, self._dtypes[1])
        assert x is not None
        assert y is not None
        finite = np.isfinite(x)
        if equal:
            missing = len(x) - int(finite.sum())
            self._non_finite[0] += missing
            self._non_finite[1] += missing
            self._norm.add(np.abs(floats(x if not missing else x[finite])))
            return
        finite_y = np.isfinite(y)
        self._non_finite[0] += len(x) - int(finite.sum())
        self._non_finite[1] += len(y) - int(finite_y.sum())
        both = finite & finite_y
        if not both.all():
            u, v = x[~both], y[~both]
            self._beyond += int(((u != v) & ~(np.isnan(u) & np.isnan(v))).sum())
            x, y = x[both], y[both]
        apart = _apart(x, y)
        self._norm.add(np.abs(floats(x)))
        self._l2.add(apart)
        self._max = max(self._max, float(apart.max(initial=0.0)))

    def told(self, name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorDifference:
        """Return the distance of the tensors of this name."""
        elements = self.differing if self._same_type else None
        if not self._known:
            return TensorDifference(name, shapes, self._dtypes, elements, None, None, None, None)
        l2, norm = self._l2.value, self._norm.value
        return TensorDifference(
            name, shapes, self._dtypes, elements, l2,
            None if self._beyond else _relative(l2, norm), self._max,
            (self._non_finite[0], self._non_finite[1]),
        )  # fmt: skip


class Norm:
    """An L2 norm that is added up without overflow and underflow of the squares."""

    def __init__(self) -> None:
        self._scale, self._sum = 0.0, 0.0

    def add(self, values: Array) -> None:
        """Add absolute values, as float64."""
        largest = float(values.max(initial=0.0))
        if largest == 0.0:
            return
        if largest > self._scale:
            ratio = self._scale / largest
            self._scale, self._sum = largest, self._sum * ratio * ratio
        scaled = values / self._scale if math.isfinite(self._scale) else values
        self._sum += float(np.dot(scaled, scaled))

    @property
    def value(self) -> float:
        return self._scale * math.sqrt(self._sum) if self._scale else 0.0


def _differ(a: Array, b: Array, size: int) -> Array:
    """Return which elements of this size in bytes differ."""
    word = np.dtype(f"u{min(size, 8)}")
    words: Array = a.view(word) != b.view(word)
    if size > 8:
        return np.logical_or.reduce(words.reshape(-1, size // 8), axis=1)  # type: ignore[no-any-return]
    return words


def floats(values: Array) -> Array:
    return values if values.dtype.kind in "fc" else values.astype(np.float64)


def _apart(x: Array, y: Array) -> Array:
    """Return the absolute differences as float64. Those of integers of one type are
    exact before that.
    """
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        less = x < y
        low, high = np.where(less, x, y).view(unsigned), np.where(less, y, x).view(unsigned)
        exact: Array = (high - low).astype(np.float64)
        return exact
    with np.errstate(over="ignore"):
        apart: Array = np.abs(floats(x) - floats(y))
    return apart


# -- numbers from bytes


def _eight_bits(exponent_bits: int, bias: int, *, kind: str) -> Array:
    """Return the numbers of all 256 codes of an 8-bit float.

    kind: "ieee" has infinities and NaN at the highest exponent, "fn" has NaN alone at
    the two codes of all ones, and "fnuz" at the code of negative zero.
    """
    mantissa_bits = 7 - exponent_bits
    found = np.empty(256, np.float64)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> mantissa_bits
        mantissa = code & ((1 << mantissa_bits) - 1)
        value = (
            math.ldexp(mantissa, 1 - bias - mantissa_bits)
            if exponent == 0
            else math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
        )
        if kind == "ieee" and exponent == (1 << exponent_bits) - 1:
            value = math.nan if mantissa else math.inf
        if (kind == "fn" and code & 0x7F == 0x7F) or (kind == "fnuz" and code == 0x80):
            value = math.nan
        found[code] = sign * value
    return found


_EIGHT_BITS = {
    "float8_e4m3fn": _eight_bits(4, 7, kind="fn"),
    "float8_e4m3fnuz": _eight_bits(4, 8, kind="fnuz"),
    "float8_e5m2": _eight_bits(5, 15, kind="ieee"),
    "float8_e5m2fnuz": _eight_bits(5, 16, kind="fnuz"),
    "float8_e8m0fnu": np.array([*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan]),
}
"""The numbers of the 8-bit floats, by their codes. NumPy has none of these dtypes."""
_INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})


@cache
def _size(dtype: str) -> int:
    return element_size(dtype) or 1


@cache
def _has_numbers(dtype: str) -> bool:
    return numbers(np.empty(0, np.uint8), dtype) is not None


def numbers(raw: Array, dtype: str) -> Array | None:
    """Return elements as integers of their own type, as float64 or as complex128, given
    their bytes and the name of their dtype in torch. Return None if the dtype is none of
    numbers.
    """
    if dtype in _INTEGERS:
        return raw.view(dtype)
    if dtype == "bool":
        return raw.view(np.uint8)
    if dtype in _EIGHT_BITS:
        return _EIGHT_BITS[dtype][raw]
    with np.errstate(invalid="ignore"):  # a signaling NaN becomes a quiet one
        if dtype in ("float16", "float32", "float64"):
            return raw.view(dtype).astype(np.float64)
        if dtype == "bfloat16":
            wide = raw.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).astype(np.float64)
        if dtype in ("complex64", "complex128"):
            return raw.view(dtype).astype(np.complex128)
        if dtype == "complex32":
            return raw.view(np.float16).astype(np.float64).view(np.complex128)
    return None
