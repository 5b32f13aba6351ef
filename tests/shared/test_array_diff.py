"""Tests the comparison of checkpoints against torch's own arithmetic."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.agent import Agent
from ckptd.shared import array_diff
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.array_diff import CheckpointDifference, difference, numbers
from ckptd.shared.formats.part import PartReader
from tests.agent.convert.saved import DTYPES, bits, random
from tests.crash.hostile import forge
from tests.shared.test_array_checkpoint import pieces
from tests.support.cases import each_case
from tests.support.daemons import Daemon, home, running

_JOBS = itertools.count()


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    """A daemon for all tests of this file. Each test saves to a job of its own."""
    with home() as place, running(place, forked=True) as daemon:
        yield daemon


def saved(served: Daemon, *states: Any) -> Path:
    """Save each state as one step of a new job. Return the directory of the job."""
    job = f"job{next(_JOBS)}"
    for step, state in enumerate(states):
        # Each is an attempt of its own, whose structure may differ.
        agent = Agent(job, socket=served.home.socket)
        agent.snapshot(state, step=step).wait("durable", timeout=60)
        agent.close()
    return served.home.root / job


def compared(served: Daemon, a: Any, b: Any) -> CheckpointDifference:
    job = saved(served, a, b)
    with ArrayCheckpoint.open(job, 0) as one, ArrayCheckpoint.open(job, 1) as other:
        return difference(one, other)


# -- numbers


@each_case(
    "name",
    ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"],
)
def test_every_code_of_the_8_bit_floats_is_the_number_of_torch(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(getattr(torch, name)).to(torch.float32).double().numpy()
    found = numbers(codes.numpy(), name)
    np.testing.assert_array_equal(found, expected)


def test_every_code_of_bfloat16_is_the_number_of_torch() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    expected = torch.from_numpy(codes.copy()).view(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(numbers(codes, "bfloat16"), expected)


def test_a_dtype_that_is_none_of_numbers_has_none() -> None:
    codes = np.zeros(2, np.uint8)
    assert [numbers(codes, name) for name in ("float4_e2m1fn_x2", "bits8", "bcomplex32")] == [
        None
    ] * 3


# -- tensors


def test_the_figures_are_those_of_torch(served: Daemon) -> None:
    """Random bits hold NaN, infinities and denormals."""
    a = {str(dtype)[6:]: random(dtype, 40, 3) for dtype in DTYPES}
    b = {str(dtype)[6:]: random(dtype, 40, 3, seed=2) for dtype in DTYPES}
    found = {one.name: one for one in compared(served, a, b).tensors}
    assert sorted(found) == sorted(a)
    for name, one in found.items():
        wide = torch.complex128 if "complex" in name else torch.float64
        x, y = a[name].to(wide).reshape(-1), b[name].to(wide).reshape(-1)
        both = x.isfinite() & y.isfinite()
        apart = (x[both] - y[both]).abs().numpy()
        scale = apart.max()
        l2 = scale * math.sqrt(((apart / scale) ** 2).sum())
        size = x[both].abs().numpy()
        norm = size.max() * math.sqrt(((size / size.max()) ** 2).sum())
        assert one.non_finite == (int((~x.isfinite()).sum()), int((~y.isfinite()).sum())), name
        assert one.max_abs == pytest.approx(scale, rel=1e-12), name
        assert one.l2 == pytest.approx(l2, rel=1e-12), name
        assert one.relative == (None if not both.all() else pytest.approx(l2 / norm, rel=1e-12)), (
            name
        )
        raw = np.frombuffer(bits(a[name]), f"V{a[name].element_size()}")
        other = np.frombuffer(bits(b[name]), f"V{b[name].element_size()}")
        assert one.elements == int((raw != other).sum()), name


def test_what_is_the_same_is_not_listed(served: Daemon) -> None:
    state = {"x": random(torch.float32, 50), "n": math.nan, "e": torch.empty(0, 3), "t": (1, "a")}
    found = compared(served, state, state)
    assert found.is_none
    assert (found.same_tensors, found.same_values) == (2, 2)
    assert found == CheckpointDifference([], [], [], [], 2, 2)


def test_the_largest_relative_difference_comes_first(served: Daemon) -> None:
    a = {
        "small": torch.tensor([100.0, 0.0]),
        "large": torch.tensor([3.0, 4.0]),
        "from zero": torch.zeros(2),
        "to nan": torch.ones(2),
        "shape": torch.ones(2),
        "dtype": torch.ones(2),
        "sign of zero": torch.zeros(2),
        "gone": torch.ones(1),
        "same nan": torch.tensor([math.nan, 1.0]),
    }
    b = {
        "small": torch.tensor([101.0, 0.0]),
        "large": torch.tensor([0.0, 0.0]),
        "from zero": torch.ones(2),
        "to nan": torch.tensor([math.nan, 3.0]),
        "shape": torch.ones(3),
        "dtype": torch.ones(2, dtype=torch.bfloat16),
        "sign of zero": torch.tensor([-0.0, 0.0]),
        "came": torch.ones(1),
        "same nan": torch.tensor([math.nan, 3.0]),
    }
    found = compared(served, a, b)
    assert (found.only_a, found.only_b, found.same_tensors) == (["gone"], ["came"], 0)
    assert [
        (one.name, one.elements, one.l2, one.relative, one.max_abs, one.non_finite)
        for one in found.tensors
    ] == [
        ("from zero", 2, math.sqrt(2), None, 1.0, (0, 0)),
        ("to nan", 2, 2.0, None, 2.0, (0, 1)),
        ("shape", None, None, None, None, None),
        ("same nan", 1, 2.0, 2.0, 2.0, (1, 1)),
        ("large", 2, 5.0, 1.0, 4.0, (0, 0)),
        ("small", 1, 1.0, 0.01, 1.0, (0, 0)),
        ("dtype", None, 0.0, 0.0, 0.0, (0, 0)),
        ("sign of zero", 1, 0.0, 0.0, 0.0, (0, 0)),
    ]
    assert found.tensors[2].shapes == ((2,), (3,))
    assert found.tensors[6].dtypes == ("float32", "bfloat16")


def test_large_integers_and_extreme_floats_are_exact(served: Daemon) -> None:
    def double(value: float) -> torch.Tensor:
        return torch.full((2,), value, dtype=torch.float64)

    a = {"i": torch.tensor([2**62, -(2**63)]), "f": double(1e300), "tiny": double(1e-300)}
    b = {"i": torch.tensor([2**62 + 1, 2**63 - 1]), "f": double(2e300), "tiny": double(3e-300)}
    found = {one.name: one for one in compared(served, a, b).tensors}
    assert (found["i"].max_abs, found["i"].elements) == (float(2**64 - 1), 2)
    assert found["f"].relative == pytest.approx(1.0)
    assert found["f"].l2 == pytest.approx(math.sqrt(2) * 1e300)
    assert found["tiny"].relative == pytest.approx(2.0)
    one = compared(served, {"i": torch.tensor([2**62])}, {"i": torch.tensor([2**62 + 1])})
    assert one.tensors[0].max_abs == 1.0


def test_aliases_and_transposed_tensors_are_compared(served: Daemon) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    other = weight + 1
    a = {
        "a": weight,
        "b": weight,
        "rows": weight[1:],
        "turned": weight.t(),
        "own": torch.ones(3, 2).t(),
    }
    b = {"a": other, "b": other, "rows": other[1:], "turned": other.t(), "own": torch.ones(2, 3)}
    found = compared(served, a, b)
    assert {one.name: one.l2 for one in found.tensors} == {
        "a": pytest.approx(math.sqrt(12)), "b": pytest.approx(math.sqrt(12)),
        "rows": pytest.approx(math.sqrt(8)), "turned": pytest.approx(math.sqrt(12)),
    }  # fmt: skip
    assert found.same_tensors == 1  # strides are no content


def test_many_tensors_at_once_have_the_figures_of_each_alone(
    served: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random bits hold NaN and infinities; `same` does not differ, and zeros have no norm."""

    def state(seed: int) -> dict[str, torch.Tensor]:
        return {
            f"{str(dtype)[6:]}.{number}": random(dtype, 1 + number, 2, seed=seed + number)
            for dtype in DTYPES
            for number in range(4)
        }

    fixed = {"float32.same": torch.ones(3), "float64.zero": torch.zeros(2, dtype=torch.float64)}
    large = {"float64.large": torch.tensor([1e300, math.inf], dtype=torch.float64)}
    other = {"float64.large": torch.tensor([-1e300, 1.0], dtype=torch.float64)}
    job = saved(
        served,
        {**state(10), **fixed, **large},
        {**state(50), **fixed, "float64.zero": fixed["float64.zero"] + 1, **other},
    )
    with ArrayCheckpoint.open(job, 0) as one, ArrayCheckpoint.open(job, 1) as two:
        together = {found.name: found for found in difference(one, two).tensors}
        monkeypatch.setattr(array_diff, "_packed", lambda names, a, b: ([], list(names)))
        alone = difference(one, two)
    assert together.keys() == {found.name for found in alone.tensors}
    assert "float32.same" not in together
    for each in alone.tensors:
        found = together[each.name]
        assert found.elements == each.elements, each.name
        assert (found.non_finite, found.max_abs) == (each.non_finite, each.max_abs), each.name
        assert found.l2 == pytest.approx(each.l2, rel=1e-12), each.name
        assert found.relative == (each.relative and pytest.approx(each.relative, rel=1e-12))


def test_shards_that_follow_one_another_are_one_piece_of_memory(tmp_path: Path) -> None:
    assert forge(pieces(), tmp_path, 1)
    with ArrayCheckpoint.open(tmp_path / "gpt") as found:
        dtype, shape, ranges = found.placed("w")
        assert (dtype, shape, len(ranges)) == ("float32", (5, 2), 2)
        assert found.read(ranges).tobytes() == np.arange(10, dtype="f4").tobytes()
        assert (
            found.read([ranges[1], ranges[0]])[:16].tobytes()
            == np.arange(6, 10, dtype="f4").tobytes()
        )


# -- blocks


def test_blocks_of_rows_give_the_figures_of_the_whole(
    served: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = {"x": random(torch.bfloat16, 101, 7), "y": torch.arange(1000.0), "z": torch.ones(6, 5)}
    b = {key: value.clone() for key, value in a.items()}
    b["x"][60:] = random(torch.bfloat16, 41, 7, seed=3)
    b["y"][777] = -1.0
    job = saved(served, a, b)
    with ArrayCheckpoint.open(job, 0) as one, ArrayCheckpoint.open(job, 1) as other:
        whole = difference(one, other)
        monkeypatch.setattr(array_diff, "BLOCK", 64)
        monkeypatch.setattr(array_diff, "PIECE", 3)
        parts = difference(one, other)
    assert [one.name for one in whole.tensors] == ["x", "y"]
    for one_block, many in zip(whole.tensors, parts.tensors, strict=True):
        assert (many.name, many.elements, many.max_abs, many.non_finite) == (
            one_block.name, one_block.elements, one_block.max_abs, one_block.non_finite,
        )  # fmt: skip
        assert many.l2 == pytest.approx(one_block.l2, rel=1e-12)
        assert many.relative == (
            one_block.relative and pytest.approx(one_block.relative, rel=1e-12)
        )


def test_rows_come_from_the_shards_that_hold_them(tmp_path: Path) -> None:
    assert forge(pieces(), tmp_path, 1)
    whole = np.arange(10, dtype="f4").reshape(5, 2)
    with ArrayCheckpoint.open(tmp_path / "gpt") as found:
        assert found.is_in_order("w")
        spans = [(low, high) for low in range(5) for high in range(low, 6)]
        read = [found.rows("w", low, high) for low, high in spans]
    assert len(read) == 20
    for (low, high), rows in zip(spans, read, strict=True):
        np.testing.assert_array_equal(rows, whole[low:high])


def test_memory_does_not_grow_with_the_tensors(
    served: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 16 << 20
    x = torch.ones(size)
    job = saved(served, {"x": x}, {"x": x * 2})
    monkeypatch.setattr(array_diff, "BLOCK", 4 << 20)
    monkeypatch.setattr(array_diff, "PIECE", 1 << 16)
    with ArrayCheckpoint.open(job, 0) as one, ArrayCheckpoint.open(job, 1) as other:
        tracemalloc.start()
        try:
            (found,) = difference(one, other).tensors
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert found.elements == size
    assert found.relative == pytest.approx(1.0)
    assert most < size * 4  # less than one of the two tensors


# -- values


def test_a_chunk_of_many_tensors_is_read_once(
    served: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{n}": torch.full((16,), float(n)) for n in range(300)}
    job = saved(served, state, {name: tensor + 1 for name, tensor in state.items()})
    read: list[int] = []

    def counted(part: PartReader, number: int, raw: memoryview) -> None:
        read.append(number)
        original(part, number, raw)

    original = PartReader.read_chunk
    monkeypatch.setattr(PartReader, "read_chunk", counted)
    with ArrayCheckpoint.open(job, 0) as one, ArrayCheckpoint.open(job, 1) as other:
        assert len(difference(one, other).tensors) == 300
    assert 2 <= len(read) <= 8


def test_values_differ_by_value_and_by_type(served: Daemon) -> None:
    a = {
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}],
        "step": 1,
        "flag": True,
        "nan": math.nan,
        "array": np.arange(3),
        "empty": {},
        "long": [*range(50)],
        "blob": torch.eye(2).to_sparse(),
        "was tensor": torch.ones(1),
        "gone": None,
        "nested": {"x": [{"y": 1}]},
    }
    b = {
        **a,
        "groups": [{"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}],
        "step": 1.0,
        "flag": 1,
        "array": np.arange(3.0),
        "empty": [],
        "was tensor": 7,
        "nested": {"x": [{"y": 1}, {"y": 2}]},
    }
    del b["gone"]
    found = compared(served, a, b)
    assert {one.name: (one.a, one.b) for one in found.values} == {
        "groups.0.lr": (0.1, 0.01),
        "groups.0.betas": ((0.9, 0.999), (0.9, 0.95)),
        "step": (1, 1.0),
        "flag": (True, 1),
        "array": ("array of int64 [3]", "array of float64 [3]"),
        "empty": ({}, []),
        "was tensor": ("the tensor was tensor", 7),
    }
    assert (found.only_a, found.only_b) == (["was tensor", "gone"], ["nested.x.1.y"])
    document = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert document["equal"] is False
    assert {"name": "groups.0.betas", "a": [0.9, 0.999], "b": [0.9, 0.95]} in document["values"]


_WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "ml_dtypes"}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
from ckptd.daemon.commands.cli import main
main(["diff", sys.argv[1] + "/0", sys.argv[1] + "/1", "--json"])
"""


@pytest.mark.usefixtures("processes")
def test_neither_torch_nor_ml_dtypes_is_needed(served: Daemon) -> None:
    ones = torch.ones(5)
    a = {"b": ones.bfloat16(), "f": ones.to(torch.float8_e5m2)}
    b = {"b": ones.bfloat16() * 3, "f": (ones * 0.25).to(torch.float8_e5m2)}
    job = saved(served, a, b)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, str(job)],
        capture_output=True, text=True, timeout=60, check=False, env=clean,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert [(one["name"], one["max_abs"]) for one in json.loads(done.stdout)["tensors"]] == [
        ("b", 2.0), ("f", 0.75),
    ]  # fmt: skip
