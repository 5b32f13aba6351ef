"""Values of every kind that a snapshot accepts, and those that it refuses by key, for
tests that load them in another process.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import random
import sys
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler as schedulers
from torch.torch_version import TorchVersion


class Colour(enum.Enum):
    RED = "red"
    CRIMSON = "red"  # noqa: PIE796 (an alias)
    PAIR = (1, 2)
    NOT_A_NUMBER = float("nan")


class Level(enum.IntEnum):
    LOW = 1
    MINIMUM = 1
    HIGH = 2


class Word(str, enum.Enum):  # noqa: UP042 (it differs from a StrEnum)
    A = "a"


class Text(enum.StrEnum):
    B = "b"


class Access(enum.Flag):
    R = enum.auto()
    W = enum.auto()
    X = enum.auto()
    RW = R | W
    READ = R


class Bits(enum.IntFlag):
    A = 1
    B = 2
    WIDE = 12


class Kept(enum.Flag, boundary=enum.KEEP):
    A = 1
    B = 4


class Outer:
    class Inner(enum.Flag):
        P = 1
        Q = 2

    class Network(torch.nn.Module):
        pass


class Scheduler(schedulers.StepLR):
    pass


FLAGS: list[Any] = [
    *map(Access, range(8)),
    *map(Bits, range(20)),
    Bits(-1),
    Bits(1 << 70),
    *map(Kept, range(9)),
    Kept(-3),
    *map(Outer.Inner, range(4)),
]
ENUMS: list[Any] = [*Colour, Colour.CRIMSON, *Level, Level.MINIMUM, Word.A, Text.B, enum.KEEP]
CLASSES: list[Any] = [
    *(cls for cls in vars(torch.optim).values() if isinstance(cls, type)),
    *(cls for cls in vars(schedulers).values() if isinstance(cls, type) and issubclass(cls,
    schedulers.LRScheduler)), *(cls for cls in vars(torch.nn).values() if isinstance(cls,
    type) and issubclass(cls, torch.nn.Module)), Outer.Network, Scheduler, Colour, torch.Tensor,
    torch.nn.Parameter, int, float, str, bytes, list, dict, tuple, set, frozenset, type(None), bool,
    complex, object, bytearray, collections.OrderedDict, collections.Counter,
    collections.defaultdict, collections.deque,
]  # fmt: skip
CONSTANTS: list[Any] = [
    *(value for value in vars(torch).values() if isinstance(value, (torch.layout,
    torch.memory_format, torch.qscheme, torch.dtype))), torch.finfo(torch.float8_e4m3fn),
    torch.finfo(torch.float64), torch.iinfo(torch.uint8), TorchVersion("2.9.1"),
    torch.device("cpu"), torch.device("meta", 3), torch.device("cuda:1"), torch.Size([2, 0]),
]  # fmt: skip


def stream(content: str | bytes, position: int) -> Any:
    made: Any = io.BytesIO(content) if isinstance(content, bytes) else io.StringIO(content)
    made.seek(position)
    return made


def _numbers(rng: random.Random) -> list[Any]:
    nan = np.frombuffer(rng.randbytes(6) + b"\xf1\x7f", np.float64)[0].item()
    return [
        0,
        -1,
        True,
        False,
        1.0,
        -0.0,
        0.0,
        nan,
        float("inf"),
        2**63,
        2**64 - 1,
        -(2**63),
        rng.getrandbits(200),
        -(2**64),
        rng.random(),
        None,
    ]


HASHED: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([*_numbers(rng), "", "ünï", b"", b"\x00\xff", rng.randbytes(3),
    complex(1, -0.0)]), lambda rng: rng.choice(FLAGS),
    lambda rng: rng.choice(ENUMS),
    lambda rng: rng.choice(CLASSES),
    lambda rng: rng.choice(CONSTANTS[:-8]),
    lambda rng: rng.choice([np.int64(3), np.float32(-0.0), np.bool_(True), np.str_("x"),
    np.datetime64("2026-01-02"), np.float64(0.1)]), lambda rng: rng.choice([
        dt.datetime(2026, 1, 2, 3, 4, 5, 6, zoneinfo.ZoneInfo("Europe/Zurich")), dt.date(2026, 1,
        2), dt.timedelta(-1, 3), decimal.Decimal("1.50"),
        fractions.Fraction(-1, 3), uuid.UUID(int=7), range(3, 10**30, 7), dt.time(1, 2,
        tzinfo=dt.UTC), pathlib.PurePosixPath("/a"), pathlib.Path("b"),
        pathlib.PureWindowsPath("c:/d"),
    ]),
]  # fmt: skip
LEAVES: list[Callable[[random.Random], Any]] = [
    *HASHED,
    lambda rng: rng.choice(CONSTANTS),
    lambda rng: stream(rng.randbytes(rng.randrange(5)), rng.randrange(7)),
    lambda rng: stream("ab\n\ud7ff"[: rng.randrange(5)], rng.randrange(4)),
    lambda rng: bytearray(rng.randbytes(3)),
    lambda rng: np.asfortranarray(
        np.arange(6).reshape(2, 3).astype(rng.choice(["<i2", ">f4", "U3", "M8[s]", "S2", "?"]))
    ),
    lambda rng: np.zeros(2, dtype=[("a", "<i4"), ("b", "<f8", (2,))]),
]


def hashed(rng: random.Random, levels: int = 2) -> Any:
    """Return a value that may be a key of a dict."""
    if levels and rng.random() < 0.2:
        return rng.choice([tuple, frozenset])(
            hashed(rng, levels - 1) for _ in range(rng.randrange(3))
        )
    return rng.choice(HASHED)(rng)


def value(rng: random.Random, levels: int = 3) -> Any:
    """Return a value of any kind that a snapshot accepts, other than a tensor."""
    if not levels or rng.random() < 0.3:
        return rng.choice(LEAVES)(rng)
    count = rng.randrange(4)
    kind = rng.choice(
        ["list", "tuple", "deque", "set", "dict", "texts", "ordered", "counter", "default", "same"]
    )
    if kind == "same":
        one = rng.choice([0.5, 3, True, "a", b"b", None])
        return rng.choice([list, tuple, collections.deque])([one] * count)
    if kind in ("list", "tuple", "deque"):
        items = [value(rng, levels - 1) for _ in range(count)]
        return (
            collections.deque(items, count + 1)
            if kind == "deque"
            else items
            if kind == "list"
            else tuple(items)
        )
    if kind == "set":
        return rng.choice([set, frozenset])(hashed(rng) for _ in range(count))
    if kind == "counter":
        return collections.Counter({hashed(rng): n for n in range(count)})
    pairs = [
        (f"k{n}" if kind == "texts" else hashed(rng), value(rng, levels - 1)) for n in range(count)
    ]
    if kind == "default":
        return collections.defaultdict(rng.choice([int, list, dict, None]), pairs)
    return collections.OrderedDict(pairs) if kind == "ordered" else dict(pairs)


def state(seed: int, values: int) -> dict[str, Any]:
    """Return a state of random values: the same for the same seed, in every process.

    It has every leaf of the lists above once.
    """
    rng = random.Random(seed)
    fixed = {
        "flags": FLAGS,
        "enums": ENUMS,
        "classes": CLASSES,
        "constants": CONSTANTS,
        "numbers": _numbers(rng),
    }
    return {**fixed, "random": [value(rng) for _ in range(values)]}


def described(found: Any) -> Any:
    """Return a text of a value and of everything in it, with types, bits and order.

    Equal texts mean equal values.
    """
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    if isinstance(found, (set, frozenset)):
        return kind, sorted(map(repr, map(described, found)))
    if isinstance(found, dict):
        pairs = [(described(key), described(item)) for key, item in found.items()]
        return kind, pairs, repr(getattr(found, "default_factory", None))
    if isinstance(found, (list, tuple, collections.deque)):
        return kind, list(map(described, found)), getattr(found, "maxlen", None)
    if isinstance(found, enum.Enum):
        return (
            kind,
            found.name,
            getattr(found, "_value_", None) if isinstance(found, enum.Flag) else "",
        )
    if isinstance(found, float):
        return kind, np.float64(found).tobytes().hex()
    if isinstance(found, (np.ndarray, np.generic)):
        return (
            kind,
            str(found.dtype),
            found.shape,
            found.tobytes().hex(),
            getattr(found, "flags", None) and found.flags.f_contiguous,
        )
    if isinstance(found, (io.BytesIO, io.StringIO)):
        return kind, found.getvalue(), found.tell()
    return kind, repr(found), getattr(found, "fold", None)


def main() -> None:
    """Load the checkpoint of a job and compare it with the state of a seed, as `python
    -m tests.support.kinds JOB SEED VALUES`.
    """
    from ckptd.agent import Checkpoint

    with Checkpoint.open(sys.argv[1]) as checkpoint:
        found = checkpoint.load()
    expected = state(int(sys.argv[2]), int(sys.argv[3]))
    assert list(found) == list(expected)
    for key, items in expected.items():
        assert len(found[key]) == len(items), key
        for number, (its, mine) in enumerate(zip(found[key], items, strict=True)):
            assert described(its) == described(mine), (key, number, its, mine)
    print(sum(map(len, expected.values())), "values are as they were saved")


if __name__ == "__main__":
    import tests.support.kinds as program  # the enums are those of the module, not of this script

    program.main()
