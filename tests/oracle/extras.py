"""What a state holds beside modules and optimizers: schedulers, scalers, generators,
bare tensors, and plain values of every type.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import enum
import io
import pathlib
import random
import types
import uuid
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import lr_scheduler as s


class Phase(enum.Enum):
    WARM = 1
    HOT = "two"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class Name(enum.StrEnum):
    A = "a"
    B = "b"


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Settings:
    lr: float
    names: list[str]
    table: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    depth: int
    path: pathlib.PurePosixPath


class Meter:
    """Counts with an average, and has a state of its own, as users' metrics do."""

    def __init__(self, total: float) -> None:
        self.total, self.values = total, torch.zeros(2)

    def update(self, number: int) -> None:
        self.total += number
        self.values = self.values + number

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.values = state["total"], state["values"].clone()


def _buffer(data: bytes) -> io.BytesIO:
    return io.BytesIO(data)


VALUES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "int": (lambda: 7, lambda: 0),
    "bool": (lambda: True, lambda: False),
    "big": (lambda: -(1 << 200), lambda: 0),
    "uint64": (lambda: (1 << 64) - 1, lambda: 1),
    "float": (lambda: 0.1, lambda: 0.0),
    "negative-zero": (lambda: -0.0, lambda: 0.0),
    "nan": (lambda: float("nan"), lambda: 0.0),
    "inf": (lambda: [float("inf"), float("-inf"), 5e-324], lambda: [0.0]),
    "complex": (lambda: complex(1, float("nan")), lambda: 0j),
    "str": (lambda: "ä\0\u2028", lambda: ""),
    "bytes": (lambda: b"\0\xff", lambda: b""),
    "bytearray": (lambda: bytearray(b"\0\xff"), lambda: bytearray()),
    "none": (lambda: None, lambda: None),
    "none-to-value": (lambda: 3, lambda: None),
    "value-to-none": (lambda: None, lambda: 3),
    "list": (lambda: [1, [2, (3,)], {"a": None}], list),
    "losses": (lambda: [0.5, 0.25, 3.0], lambda: [0.5]),
    "mixed-list": (lambda: [1, 1.0, True, None, "x"], list),
    "bools": (lambda: [True, False], list),
    "ints": (lambda: [1, -1, 1 << 40], list),
    "tuple": (lambda: (1, "x", (2.0,)), lambda: (0, "", (0.0,))),
    "set": (lambda: {1, "a", (2, 3)}, set),
    "frozenset": (lambda: frozenset({b"x"}), frozenset),
    "dict": (lambda: {"a": 1, "b": {"c": [2]}}, lambda: {"a": 0, "b": {"c": []}}),
    "dict-into-empty": (lambda: {"a": 1, "b": torch.ones(2)}, dict),
    "keys": (
        lambda: {1: "a", (2, 3): "b", None: "c", 1.5: 4, True is False: 5},
        lambda: {1: "", (2, 3): "", None: "", 1.5: 0, False: 0},
    ),
    "int-keys": (
        lambda: {0: torch.ones(2), 1: torch.zeros(2)},
        lambda: {0: torch.zeros(2), 1: torch.ones(2)},
    ),
    "dotted": (
        lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        lambda: {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
    ),
    "ordered": (
        lambda: collections.OrderedDict(b=1, a=2),
        lambda: collections.OrderedDict(b=0, a=0),
    ),
    "reordered": (
        lambda: collections.OrderedDict(b=1, a=2),
        lambda: collections.OrderedDict(a=0, b=0),
    ),
    "counter": (lambda: collections.Counter("aab"), lambda: collections.Counter("ab")),
    "deque": (lambda: collections.deque([1, 2], maxlen=3), lambda: collections.deque(maxlen=3)),
    "deque-of-tensors": (
        lambda: collections.deque([torch.ones(2)], maxlen=3),
        lambda: collections.deque(maxlen=3),
    ),
    "defaultdict": (lambda: _default(list, a=[1]), lambda: _default(list, a=[])),
    "defaultdict-lambda": (lambda: _default(float, a=1.5), lambda: _default(float, a=0.0)),
    "chainmap": (
        lambda: collections.ChainMap({"a": 1}, {"b": 2}),
        lambda: collections.ChainMap({"a": 0}, {"b": 0}),
    ),
    "namedtuple": (lambda: Point(1, torch.ones(2)), lambda: Point(0, torch.zeros(2))),
    "dataclass": (
        lambda: Settings(0.5, ["a"], torch.ones(2)),
        lambda: Settings(0.0, [], torch.zeros(2)),
    ),
    "frozen-dataclass": (
        lambda: Frozen(3, pathlib.PurePosixPath("/a")),
        lambda: Frozen(0, pathlib.PurePosixPath(".")),
    ),
    "namespace": (
        lambda: argparse.Namespace(lr=1, name="x"),
        lambda: argparse.Namespace(lr=0, name=""),
    ),
    "simple-namespace": (
        lambda: types.SimpleNamespace(a=1, b=[2]),
        lambda: types.SimpleNamespace(a=0, b=[]),
    ),
    "datetime": (
        lambda: dt.datetime(2024, 2, 29, 1, 2, 3, 4, dt.UTC),
        lambda: dt.datetime(1970, 1, 1),
    ),
    "zoned": (
        lambda: dt.datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        lambda: dt.datetime(1970, 1, 1),
    ),
    "date": (lambda: [dt.date(2024, 2, 29), dt.time(1, 2), dt.timedelta(-1, 5)], list),
    "decimal": (lambda: Decimal("0.10"), lambda: Decimal(0)),
    "decimal-nan": (lambda: Decimal("-Infinity"), lambda: Decimal(0)),
    "fraction": (lambda: Fraction(1, 3), lambda: Fraction(0)),
    "uuid": (lambda: uuid.UUID(int=5), lambda: uuid.UUID(int=0)),
    "enum": (lambda: Phase.HOT, lambda: Phase.WARM),
    "int-enum": (lambda: Level.HIGH, lambda: Level.LOW),
    "str-enum": (lambda: Name.B, lambda: Name.A),
    "flag": (lambda: Rights.READ, lambda: Rights.WRITE),
    "flag-composite": (lambda: Rights.READ | Rights.RUN, lambda: Rights.READ),
    "flag-empty": (lambda: Rights(0), lambda: Rights.READ),
    "int-flag": (lambda: Bits.ONE | Bits.TWO, lambda: Bits.ONE),
    "int-flag-beyond": (lambda: Bits(8), lambda: Bits.ONE),
    "enum-keys": (lambda: {Phase.HOT: 1}, lambda: {Phase.HOT: 0}),
    "path": (lambda: pathlib.Path("/a/b"), lambda: pathlib.Path(".")),
    "pure-path": (lambda: pathlib.PureWindowsPath("c:/x"), lambda: pathlib.PureWindowsPath(".")),
    "array": (
        lambda: np.arange(6, dtype=np.float32).reshape(2, 3).T,
        lambda: np.zeros((3, 2), dtype=np.float32),
    ),
    "array-0d": (lambda: np.array(3, dtype=np.int16), lambda: np.array(0, dtype=np.int16)),
    "array-times": (
        lambda: np.array(["2024-02-29", "NaT"], dtype="datetime64[D]"),
        lambda: np.zeros(2, dtype="datetime64[D]"),
    ),
    "array-records": (
        lambda: np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        lambda: np.zeros(1, dtype=[("a", "i4"), ("b", "f8")]),
    ),
    "array-text": (lambda: np.array(["a", "bc"]), lambda: np.array(["", ""])),
    "scalar": (lambda: np.float32(0.1), lambda: np.float32(0)),
    "scalar-bool": (lambda: np.bool_(True), lambda: np.bool_(False)),
    "scalar-time": (lambda: np.datetime64("2024-02-29"), lambda: np.datetime64("1970-01-01")),
    "np-dtype": (lambda: np.dtype("float16"), lambda: np.dtype("int8")),
    "dtype": (lambda: torch.bfloat16, lambda: torch.float32),
    "device": (lambda: torch.device("cpu", 0), lambda: torch.device("meta")),
    "size": (lambda: torch.Size([2, 3]), lambda: torch.Size([])),
    "bytesio": (lambda: _buffer(b"abc"), lambda: _buffer(b"")),
    "layout": (lambda: torch.strided, lambda: torch.sparse_coo),
    "memory-format": (lambda: torch.channels_last, lambda: torch.contiguous_format),
    "class": (lambda: torch.optim.AdamW, lambda: torch.optim.SGD),
    "plain-class": (lambda: dict, lambda: list),
    "slice": (lambda: slice(1, None, 2), lambda: slice(None)),
    "range": (lambda: range(1, 10, 3), lambda: range(0)),
    "ellipsis": (lambda: ..., lambda: ...),
    "tensor": (lambda: torch.arange(6.0).reshape(2, 3), lambda: torch.zeros(2, 3)),
    "tensor-strided": (lambda: torch.arange(6.0).reshape(2, 3).t(), lambda: torch.zeros(2, 3).t()),
    "tensor-channels": (
        lambda: (
            torch.arange(16.0).reshape(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
        ),
        lambda: torch.zeros(1, 4, 2, 2),
    ),
    "tensor-expanded": (lambda: torch.ones(1).expand(3), lambda: torch.zeros(3)),
    "tensor-bool": (lambda: torch.tensor([True, False]), lambda: torch.tensor([False, False])),
    "tensor-int8": (
        lambda: torch.tensor([-5], dtype=torch.int8),
        lambda: torch.tensor([0], dtype=torch.int8),
    ),
    "tensor-uint16": (
        lambda: torch.tensor([65535], dtype=torch.uint16),
        lambda: torch.tensor([0], dtype=torch.uint16),
    ),
    "tensor-float8": (
        lambda: torch.tensor([1.5]).to(torch.float8_e5m2),
        lambda: torch.tensor([0.0]).to(torch.float8_e5m2),
    ),
    "tensor-nan": (
        lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
        lambda: torch.zeros(3),
    ),
    "tensor-sparse": (lambda: torch.eye(3).to_sparse(), lambda: torch.zeros(3, 3).to_sparse()),
    "tensor-csr": (lambda: torch.eye(3).to_sparse_csr(), lambda: torch.ones(3, 3).to_sparse_csr()),
    "tensor-conj": (lambda: torch.tensor([1 + 2j]).conj(), lambda: torch.tensor([0j])),
    "tensor-neg": (lambda: torch.tensor([1 + 2j]).conj().imag, lambda: torch.tensor([0.0])),
    "tensor-view": (lambda: torch.arange(10.0)[3:7], lambda: torch.zeros(4)),
    "tensors-aliased": (lambda: _aliased(1.0), lambda: _aliased(0.0)),
    "tensor-list": (
        lambda: [torch.ones(2), torch.zeros(1)],
        lambda: [torch.zeros(2), torch.ones(1)],
    ),
    "tensor-list-grown": (lambda: [torch.ones(2), torch.zeros(1)], list),
    "tensor-tuple": (lambda: (torch.ones(2), 5), lambda: (torch.zeros(2), 0)),
    "tensor-requires-grad": (
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.zeros(2, requires_grad=True),
    ),
    "generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda: torch.Generator().manual_seed(4),
    ),
    "np-generator": (lambda: np.random.default_rng(3), lambda: np.random.default_rng(4)),
    "np-random-state": (lambda: np.random.RandomState(3), lambda: np.random.RandomState(4)),
    "python-random": (lambda: random.Random(3), lambda: random.Random(4)),
    "meter": (lambda: Meter(2.0), lambda: Meter(0.0)),
    "list-of-meters": (lambda: [Meter(2.0), Meter(3.0)], lambda: [Meter(0.0), Meter(0.0)]),
    "dict-of-meters": (lambda: {"a": Meter(2.0)}, lambda: {"a": Meter(0.0)}),
    "shared-list": (lambda: _twice([1, 2]), lambda: _twice([0])),
}
"""The kinds of plain values, each with a function for the value that is saved, and one
for the value that the recovering program has.
"""


RECORDS = frozenset(
    {
        "dataclass", "frozen-dataclass", "namedtuple", "namespace", "simple-namespace", "chainmap",
        "generator", "np-generator", "np-random-state", "python-random",
    }
)  # fmt: skip
"""Objects that come back as dicts of their fields where the recovering program has no
such object.
"""


def _default(factory: Any, **values: Any) -> Any:
    return collections.defaultdict(factory, values)


def _aliased(value: float) -> list[torch.Tensor]:
    whole = torch.full((4,), value)
    return [whole, whole[:2]]


def _twice(value: list[int]) -> dict[str, Any]:
    return {"one": value, "two": value}


def _sequential(optimizer: Any, setting: int) -> Any:
    return s.SequentialLR(
        optimizer,
        [s.ConstantLR(optimizer, total_iters=2), s.ExponentialLR(optimizer, 0.9)],
        milestones=[setting],
    )


def _chained(optimizer: Any, setting: int) -> Any:
    return s.ChainedScheduler(
        [s.ConstantLR(optimizer, total_iters=setting), s.ExponentialLR(optimizer, 0.9)],
        optimizer=optimizer,
    )


SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "step": lambda optimizer, n: s.StepLR(optimizer, n),
    "multistep": lambda optimizer, n: s.MultiStepLR(optimizer, [2, n]),
    "constant": lambda optimizer, n: s.ConstantLR(optimizer, total_iters=n),
    "linear": lambda optimizer, n: s.LinearLR(optimizer, total_iters=n),
    "exponential": lambda optimizer, n: s.ExponentialLR(optimizer, 1 - 1 / (n + 1)),
    "cosine": lambda optimizer, n: s.CosineAnnealingLR(optimizer, T_max=n),
    "restarts": lambda optimizer, n: s.CosineAnnealingWarmRestarts(optimizer, T_0=n),
    "polynomial": lambda optimizer, n: s.PolynomialLR(optimizer, total_iters=n),
    "onecycle": lambda optimizer, n: s.OneCycleLR(
        optimizer, 0.1, total_steps=20 + n, cycle_momentum=False
    ),
    "cyclic": lambda optimizer, n: s.CyclicLR(
        optimizer, 0.001, 0.1, step_size_up=n, cycle_momentum=False
    ),
    "plateau": lambda optimizer, n: s.ReduceLROnPlateau(optimizer, patience=n % 3),
    "lambda": lambda optimizer, n: s.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "multiplicative": lambda optimizer, n: s.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "sequential": _sequential,
    "chained": _chained,
    "swalr": lambda optimizer, n: torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=n),
}
SCALERS: dict[str, Callable[[int], Any]] = {
    "scaler": lambda n: torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=n),
    "scaler-off": lambda n: torch.amp.GradScaler("cpu", enabled=False),
}
BARES = ("bare", "bare-bf16", "bare-2d")
"""Parameters that lie in the state by themselves."""


def bare(kind: str, setting: int) -> torch.nn.Parameter:
    if kind == "bare-bf16":
        return torch.nn.Parameter(torch.randn(3).bfloat16())
    return torch.nn.Parameter(torch.randn(3) if kind == "bare" else torch.randn(3, 2))


def value(kind: str, variant: int) -> Any:
    return VALUES[kind][min(variant, 1)]()
