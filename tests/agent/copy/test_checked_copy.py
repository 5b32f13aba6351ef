"""Copies into memory, and their checksums, against torch's own copy and the library
`crc32c`.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.agent.copy import checked_copy
from ckptd.agent.copy.checked_copy import CheckedCopy, Targets, copy_out, copy_pieces
from ckptd.agent.copy.mapping import map_segment
from ckptd.agent.plan.layout import layout_of, plan_locally
from ckptd.shared.formats.plan import Region, chunk_ranges
from tests.support.cases import each_case
from tests.support.scripts import python

CHUNK = 1 << 16
STEP = 256
"""The most bytes that the copy handles together. It treats what is left in another way."""


@pytest.fixture(scope="module")
def compiled() -> Callable[..., list[int]]:
    if checked_copy.copy_bytes is None:
        pytest.skip("no compiler was found when ckptd was installed")
    return checked_copy.copy_bytes


# -- the copy in C


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_bytes_and_checksums_of_any_pieces_and_parts(
    compiled: Callable[..., list[int]], data: st.DataObject
) -> None:
    sizes = st.integers(0, 700) | st.integers(STEP - 70, STEP + 70) | st.integers(0, 50_000)
    lengths = data.draw(st.lists(sizes, max_size=6))
    total = sum(lengths)
    ends = [*sorted(data.draw(st.lists(st.integers(0, total), max_size=5))), total]
    shift, before = data.draw(st.integers(0, 4096)), data.draw(st.binary(max_size=3))
    source = torch.randint(0, 256, (total + 4096,), dtype=torch.uint8)[shift:][:total]
    place = torch.zeros(total + 200, dtype=torch.uint8)
    target = place[64 + data.draw(st.integers(0, 64)) :][:total]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    addresses = [[tensor.data_ptr() + start for start in starts] for tensor in (target, source)]
    found = compiled(*addresses, lengths, ends, data.draw(st.integers(0, 4)), crc32c(before))
    expected = source.numpy().tobytes()
    assert target.numpy().tobytes() == expected
    assert int(place.to(torch.int64).sum()) == int(source.to(torch.int64).sum()), (
        "bytes beside the target have changed"
    )
    begins = [0, *ends[:-1]]
    assert found == [
        crc32c(expected[begin:end], 0 if number else crc32c(before))
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]


def test_a_source_that_is_its_own_target_is_only_read(
    compiled: Callable[..., list[int]], tmp_path: Path
) -> None:
    data = random.Random(1).randbytes(1_000_001)
    (tmp_path / "a.seg").write_bytes(data)
    with (tmp_path / "a.seg").open("r+b") as file:
        # A store would end this process.
        mapped = map_segment(file.fileno(), len(data), writable=False)
    address = ctypes.addressof(mapped)
    assert compiled([address], [address], [len(data)], [len(data)], 2, 0) == [crc32c(data)]


@pytest.mark.usefixtures("processes")
def test_a_second_import_computes_the_same_checksums(compiled: Callable[..., list[int]]) -> None:
    code = (
        "import sys, ckptd.agent.copy._checked_copy as first; del sys.modules[first.__name__]; "
        "import ctypes, crc32c; "
        "import ckptd.agent.copy._checked_copy as second; data = bytearray(range(256)) * 1000; "
        "at = ctypes.addressof(ctypes.c_char.from_buffer(data)); assert first is not second; "
        "assert [m.copy([at], [at], [len(data)], [len(data)], 1, 0) for m in (first, second)] == "
        "[[crc32c.crc32c(data)]] * 2"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_checksum_is_that_of_the_bytes_that_are_stored_even_if_the_source_changes_meanwhile(
    compiled: Callable[..., list[int]],
) -> None:
    """A recovery copies out of memory that another process may still write to."""
    length, over = 4 << 20, threading.Event()
    source, target = bytearray(length), bytearray(length)
    addresses = [
        ctypes.addressof((ctypes.c_char * length).from_buffer(buffer))
        for buffer in (source, target)
    ]

    def change() -> None:
        value = 0
        while not over.is_set():
            value = (value + 1) % 256
            ctypes.memset(addresses[0], value, length)

    changing = threading.Thread(target=change)
    changing.start()
    torn = copies = 0
    try:
        # On a busy machine, the other thread may not run for many copies.
        while copies < 200 or (torn == 0 and copies < 20_000):
            copies += 1
            assert compiled([addresses[1]], [addresses[0]], [length], [length], 1, 0) == [
                crc32c(target)
            ]
            torn += target.count(target[0]) < length
    finally:
        over.set()
        changing.join()
    assert torn > 0, "no copy met a change"


@each_case(
    ("arguments", "reason"),
    [
        (([1], [1, 2], [0], [0]), "expected as many targets and sources as lengths"),
        (([1], [1], [0], [1]), "expected ends that ascend to the sum of the lengths"),
        (([1, 1], [1, 1], [5, 5], [9]), "expected ends that ascend to the sum of the lengths"),
        (
            ([1, 1], [1, 1], [5, 5], [7, 5, 10]),
            "expected ends that ascend to the sum of the lengths",
        ),
        (([0], [1], [5], [5]), "expected addresses of memory"),
        (([1], [0], [5], [5]), "expected addresses of memory"),
        (([1], [1], [5], []), "expected ends that ascend to the sum of the lengths"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    compiled: Callable[..., list[int]], arguments: tuple[list[int], ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        compiled(*arguments, 1, 0)


@pytest.mark.parametrize("wrong", [-1, 1 << 64, "1", None])
def test_addresses_that_are_none_are_refused(
    compiled: Callable[..., list[int]], wrong: Any
) -> None:
    with pytest.raises((OverflowError, TypeError)):
        compiled([wrong], [1], [0], [0], 1, 0)
    with pytest.raises(TypeError):
        compiled((), [], [], [], 1, 0)


def test_other_threads_run_during_a_copy(compiled: Callable[..., list[int]]) -> None:
    tensor, ticks, over = torch.zeros(64 << 20, dtype=torch.uint8), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    switch = sys.getswitchinterval()
    sys.setswitchinterval(60)  # a thread that does not release the GIL keeps it
    try:
        before = ticks
        for _ in range(20):
            compiled([tensor.data_ptr()], [tensor.data_ptr()], [len(tensor)], [len(tensor)], 1, 0)
        assert ticks > before
    finally:
        sys.setswitchinterval(switch)
        over.set()
        ticking.join()


# -- tensors


def lay_out(
    tensors: dict[str, torch.Tensor],
) -> tuple[list[Region], Targets, bytearray, list[torch.Tensor]]:
    """Return the regions of a plan of these tensors, its targets in a buffer, that
    buffer, and the sources.
    """
    plan = layout_of(plan_locally(tensors).rows, [], metadata=None, global_plan=bytes(32)).plan
    buffer = bytearray(plan.data_length)
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    places = []
    for item in plan.items:
        flat = whole[item.offset : item.offset + item.length].view(tensors[item.fqn].dtype)
        places.append(
            flat.as_strided(item.sizes, item.stride)
            if item.stride is not None
            else flat.view(item.sizes)
        )
    return plan.regions, Targets.of(places), buffer, [tensors[item.fqn] for item in plan.items]


def checksums(regions: list[Region], buffer: bytearray) -> list[int]:
    return [
        crc32c(buffer[chunk.offset : chunk.offset + chunk.length])
        for chunk in chunk_ranges(regions, CHUNK)
    ]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    complex_ = torch.randn(300, dtype=torch.complex64)
    return {
        "floats": torch.randn(40_001),
        "again": torch.randn(7, 5_003),
        "parameter": torch.nn.Parameter(torch.randn(33)),
        "transposed": torch.randn(123, 45).T,
        "every other": torch.randn(20_000)[::2],
        "broadcast": torch.randn(5, 1).expand(5, 7),
        "ones": torch.randn(3, 1, 4).as_strided((3, 1, 4), (4, 77, 1)),
        "bfloat16": torch.randn(100_003, dtype=torch.bfloat16),
        "nan": torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32),
        "double": torch.randn(3, dtype=torch.float64),
        "bool": torch.tensor([True, False, True]),
        "uint16": torch.arange(65_536, dtype=torch.int32).to(torch.uint16),
        "float8": torch.randn(1001).to(torch.float8_e4m3fn),
        "complex": complex_,
        "conjugate": complex_.conj(),
        "negative": complex_.conj().imag,
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(5.0),
    }


@each_case("in_c", [True, False])
@each_case("batch", [1, 4, 100])
def test_every_kind_of_tensor_is_copied_and_checked(
    monkeypatch: pytest.MonkeyPatch, in_c: bool, batch: int
) -> None:
    if not in_c:
        monkeypatch.setattr(checked_copy, "copy_bytes", None)
    elif checked_copy.copy_bytes is None:
        pytest.skip("no compiler was found when ckptd was installed")
    regions, targets, buffer, sources = lay_out(tensors())
    copying = CheckedCopy(regions, CHUNK)
    for first in range(0, len(sources), batch):
        part = slice(first, first + batch)
        if in_c:
            assert (copying.checks(b"") is None) == (first < len(sources))
        copying.copy(targets.part(part), sources[part])
    for target, source in zip(targets.tensors, sources, strict=True):
        assert _bytes(target) == _bytes(source)
    values = bytes(range(256)) * 300
    expected = [*checksums(regions, buffer), crc32c(values[:CHUNK]), crc32c(values[CHUNK:])]
    assert copying.checks(values) == (expected if in_c else None)


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in C's order of its elements."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""


def test_a_source_of_another_dtype_is_converted() -> None:
    regions, targets, buffer, _ = lay_out({"a": torch.zeros(1000), "b": torch.zeros(5)})
    copying = CheckedCopy(regions, CHUNK)
    copying.copy(targets, [torch.arange(1000, dtype=torch.float64), torch.ones(5)])
    assert torch.equal(targets.tensors[0], torch.arange(1000.0))
    assert torch.equal(targets.tensors[1], torch.ones(5))
    in_c = checked_copy.copy_bytes is not None
    assert copying.checks(b"") == (checksums(regions, buffer) if in_c else None)


def test_a_source_without_memory_is_written_as_zeros() -> None:
    """A planner of DCP may return one, as some gradients are."""
    regions, targets, buffer, _ = lay_out({"a": torch.ones(5000)})
    targets.tensors[0].fill_(1.0)
    CheckedCopy(regions, CHUNK).copy(targets, [torch._efficientzerotensor((5000,))])
    assert not any(buffer)


def test_a_source_of_another_shape_is_refused() -> None:
    regions, targets, _, _ = lay_out({"a": torch.zeros(6)})
    with pytest.raises(RuntimeError, match="size"):
        CheckedCopy(regions, CHUNK).copy(targets, [torch.zeros(2, 4)])


def test_only_sources_with_other_bytes_are_converted() -> None:
    found = tensors()
    _, targets, _, sources = lay_out(found)
    unlike = {
        name
        for name, tensor in found.items()
        if any(tensor is sources[n] for n in targets.unlike(sources))
    }
    assert unlike == {"every other", "broadcast", "conjugate", "negative"}
    assert targets.unlike(targets.tensors) == []


def test_no_checksums_are_given_if_some_items_are_copied_elsewhere() -> None:
    regions, targets, _, sources = lay_out({"a": torch.randn(6), "b": torch.randn(100_000)})
    copying = CheckedCopy(regions, CHUNK)
    copying.skip_checks()
    copying.copy(targets, sources)
    assert copying.checks(b"") is None
    assert all(torch.equal(*pair) for pair in zip(targets.tensors, sources, strict=True))


# -- out of a slot


def test_bytes_are_copied_out_into_one_buffer_after_another(
    compiled: Callable[..., list[int]], tmp_path: Path
) -> None:
    data = random.Random(1).randbytes(300_000)
    (tmp_path / "a.seg").write_bytes(data)
    with (tmp_path / "a.seg").open("r+b") as file:
        mapped = map_segment(file.fileno(), len(data), writable=False)
    pieces = [memoryview(bytearray(length)) for length in (0, 7, 100_000, 0, 50_000)]
    assert copy_out(ctypes.addressof(mapped) + 1001, pieces) == crc32c(data[1001:151_008])
    assert b"".join(pieces) == data[1001:151_008]
    assert copy_out(ctypes.addressof(mapped), []) == 0


@pytest.mark.parametrize("with_compiler", [True, False])
def test_bytes_of_this_process_are_copied_into_several_pieces(
    monkeypatch: pytest.MonkeyPatch, with_compiler: bool
) -> None:
    if not with_compiler:
        monkeypatch.setattr(checked_copy, "copy_bytes", None)
    data = torch.randint(0, 256, (150_007,), dtype=torch.uint8)
    pieces = [memoryview(bytearray(length)) for length in (7, 0, 100_000, 50_000)]
    assert copy_pieces(data.data_ptr(), pieces) == crc32c(data.numpy().tobytes())
    assert b"".join(pieces) == data.numpy().tobytes()
    assert copy_pieces(data.data_ptr(), []) == 0
