"""Checkpoints to convert, one for each kind of content, and the comparison of what
comes back.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ckptd.agent import Checkpoint, StorageWriter
from tests.support.ranks import HERE

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
    torch.bool, torch.complex64,
)  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random(dtype: torch.dtype, *shape: int, seed: int = 1) -> torch.Tensor:
    """Return a tensor of random bits, NaNs and denormals included. Each bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).reshape(shape)


def shared() -> dict[str, Any]:
    """Return a state with tied tensors, a part of a tensor, and a transposed one."""
    weight = random(torch.float32, 6, 4)
    return {
        "a": weight,
        "b": weight,
        "rows": weight[2:4],
        "transposed": weight.t(),
        "own": random(torch.float32, 3, 5).t(),
    }


STATES: dict[str, Any] = {
    **{
        str(dtype).removeprefix("torch."): {"x": random(dtype, 5, 3), "y": random(dtype, 7, seed=2)}
        for dtype in DTYPES
    },
    "shared": shared(),
    "shapes": {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "one": torch.ones(1, 1, 1),
        "large": random(torch.float32, 300, 500),
    },
    "nested": {
        "net": OrderedDict(w=torch.ones(2)),
        "groups": [{"lr": 0.1, "m": torch.zeros(3)}, {"lr": 0.2}],
        "epoch": 3,
        "name": "x",
    },
    "tuples": {"pair": (random(torch.float32, 3), [random(torch.int64, 2), 3]), "plain": (1, "x")},
    "names": {
        "a/b": torch.ones(1),
        "with space": torch.ones(2),
        "ünï": torch.ones(3),
        "0": torch.ones(4),
    },
}


@contextmanager
def one_process() -> Iterator[None]:
    """Context manager.

    While it is held, DCP does not warn that there is no process group, and not of its
    own use of torch (2.8).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled|TypedStorage is deprecated"
        )
        yield


def save(state: Any, path: Path) -> Path:
    """Save a dict as a checkpoint without a daemon, and return its directory."""
    with one_process():
        dcp.save(state, storage_writer=StorageWriter(path), no_dist=True)
    return path


def save_sharded(path: Path) -> None:
    """Save the model of this rank and of all others with DCP. Runs on a rank."""
    dcp.save({"model": HERE["model"].state_dict(), "count": HERE["count"]}, checkpoint_id=path)


def loaded(path: Path) -> Any:
    with Checkpoint.open(path) as checkpoint:
        return checkpoint.load()


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Assert that two states are equal, every tensor bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert bits(found) == bits(expected), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{path}.{number}")
    else:
        assert found == expected, path
