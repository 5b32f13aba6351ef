"""Tests that what a recovery copies to a device was verified, and that a buffer is kept as
long as copies from it run, with a lane that copies as late as it may.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as Split
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.agent import Checkpoint, StorageReader, StorageWriter
from ckptd.agent.convert.load_model import load_model
from ckptd.agent.copy import lanes as lanes_module
from ckptd.agent.plan.layout import memory
from ckptd.agent.read import loader, upload
from ckptd.agent.read.loader import empty_on, load
from ckptd.agent.read.saved import Reads, Saved, Shard
from ckptd.agent.read.upload import Upload, Wanted
from ckptd.agent.state.dtypes import copyable, dtype_name
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.plan import Alias, ChunkRange, Item
from tests.support.storage import part_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CPU = torch.device("cpu")
CHUNK = 64
SIZES = [40, 3, 500, 1, 0, 130, 64, 17, 300]  # bytes of the shards


@dataclass
class Slot:
    """A packed slot of random bytes, with one chunk that may be damaged."""

    data: torch.Tensor
    damaged: int = -1
    remote: bool = False
    reads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.raw = bytes(memory(self.data, len(self.data)))
        self.ranges = [
            ChunkRange(at, min(CHUNK, len(self.raw) - at), 1)
            for at in range(0, len(self.raw), CHUNK)
        ]

    def read_chunk(self, number: int, raw: memoryview) -> None:
        self.read_pieces(number, [raw])

    def read_pieces(self, number: int, pieces: list[memoryview]) -> bool:
        self.reads.append(number)
        at = self.ranges[number].offset
        for piece in pieces:
            piece[:] = self.raw[at : at + len(piece)]
            at += len(piece)
        if number == self.damaged:
            raise IntegrityError("damaged")
        return True


class LateMark:
    def __init__(self, lane: LateLane, number: int) -> None:
        self._lane, self._number = lane, number

    def query(self) -> bool:
        return self._lane.done >= self._number

    def synchronize(self) -> None:
        while self._lane.done < self._number:
            self._lane.works[self._lane.done]()
            self._lane.done += 1


class LateLane:
    """A lane whose work runs only when somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.works: list[Callable[[], None]] = []
        self.done = 0
        lanes.append(self)

    def begin(self) -> None:
        self.works.append(lambda: None)

    def run(self, work: Callable[[], None]) -> None:
        self.works.append(work)

    def mark(self) -> LateMark:
        return LateMark(self, len(self.works))


lanes: list[LateLane] = []
locked: list[tuple[str, int]] = []


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the CPU for an accelerator."""
    lanes.clear()
    locked.clear()

    def lock(address: int, length: int, device: torch.device) -> bool:
        locked.append(("locked", length))
        return True

    monkeypatch.setattr(upload, "StreamLane", LateLane)
    monkeypatch.setattr(upload, "lock_pages", lock)
    monkeypatch.setattr(lanes_module, "unlock_pages", lambda *_: locked.append(("unlocked", 0)))
    monkeypatch.setattr(Upload, "goes_to", staticmethod(lambda device: True))
    monkeypatch.setattr(upload, "BUFFER", 200)
    yield
    assert [what for what, _ in locked].count("locked") == locked.count(("unlocked", 0))


def item(name: str, offset: int, length: int, dtype: str = "uint8", **other: Any) -> Item:
    size = (length // (4 if dtype == "float32" else 1),)
    values: dict[str, Any] = {
        "fqn": name, "dtype": dtype, "size": size, "offsets": (0,), "sizes": size, "stride": None,
        "device": "cuda", "requires_grad": False, "offset": offset,
    }  # fmt: skip
    return Item(**(values | other))


def shards(damaged: int = -1) -> tuple[Slot, list[Wanted]]:
    torch.manual_seed(0)
    slot = Slot(torch.randint(0, 256, (sum(SIZES),), dtype=torch.uint8), damaged)
    starts = [0, *accumulate(SIZES)]
    return slot, [
        Wanted(
            torch.zeros(size, dtype=torch.uint8),
            Shard(slot, item(f"t{n}", starts[n], size)),  # type: ignore[arg-type]
            0,
            (1,),
        )
        for n, size in enumerate(SIZES)
    ]


def right(slot: Slot, wanted: Wanted) -> bool:
    at = wanted.shard.item.offset
    return torch.equal(wanted.tensor, slot.data[at : at + len(wanted.tensor)])


@pytest.mark.parametrize("buffer", [50, 70, 200, 1000, 10_000])
def test_bytes_arrive_although_copies_are_late(
    monkeypatch: pytest.MonkeyPatch, buffer: int
) -> None:
    """A buffer that is filled again before its copies are done would give them other bytes."""
    monkeypatch.setattr(upload, "BUFFER", buffer)
    slot, wanted = shards()
    with Upload() as sending:
        sending.fill(wanted[::-1])
        assert all(right(slot, one) for one in wanted)
        assert sum(lane.done for lane in lanes) == sum(len(lane.works) for lane in lanes)


def test_there_are_two_buffers_for_all_fills_of_a_recovery() -> None:
    slot, wanted = shards()
    with Upload() as sending:
        for part in (wanted, wanted[:1], wanted[2:]):
            sending.fill(part)
            assert all(right(slot, one) for one in part)
        assert locked == [("locked", 200)] * 2
    assert locked == [("locked", 200)] * 2 + [("unlocked", 0)] * 2


def test_a_buffer_is_as_small_as_what_is_read() -> None:
    slot, wanted = shards()
    with Upload() as sending:
        for part in (wanted[:1], wanted):
            sending.fill(part)
            assert all(right(slot, one) for one in part)
    assert (
        locked == [("locked", 56), ("unlocked", 0)] + [("locked", 200)] * 2 + [("unlocked", 0)] * 2
    )


def test_one_buffer_is_filled_while_the_other_is_copied() -> None:
    _, wanted = shards()
    with Upload() as sending:
        held: list[int] = []
        read = Reads.run

        def run(self: Any, threads: int | None = None) -> int:
            held.append(len(lanes[0].works) - lanes[0].done)
            return read(self, threads)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reads, "run", run)
            sending.fill(wanted)
    assert held[0] < held[1]
    assert min(held[1:]) >= 1, "a read waited for the copies of the other buffer"


def test_few_chunks_are_read_twice() -> None:
    slot, wanted = shards()
    with Upload() as sending:
        sending.fill(wanted)
    assert len(slot.reads) <= len(slot.ranges) + 2
    assert set(slot.reads) == set(range(len(slot.ranges)))


def test_nothing_that_was_not_verified_is_copied() -> None:
    _, wanted = shards(damaged=11)
    with pytest.raises(IntegrityError), Upload() as sending:
        sending.fill(wanted)
    assert lanes[0].done == len(lanes[0].works), "copies still run"
    damaged = slice(11 * CHUNK, 12 * CHUNK)
    for one in wanted:
        tensor, shard = one.tensor, one.shard
        begin, end = shard.item.offset, shard.item.offset + shard.item.length
        inside = tensor[max(0, damaged.start - begin) : max(0, min(damaged.stop, end) - begin)]
        assert not inside.any()
    assert any(one.tensor.any() for one in wanted), "no batch came before the damaged one"


def test_without_locked_memory_a_recovery_is_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    slot, wanted = shards()
    with Upload() as sending:
        sending.fill(wanted)
    assert all(right(slot, one) for one in wanted)
    assert locked == []
    assert caplog.messages == [
        "loading is slower, because its buffer cannot be page-locked: [Errno 24] Too many open "
        "files"
    ]


def test_a_driver_that_refuses_to_lock_a_buffer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver would log each further refusal."""
    asked: list[int] = []

    def refuse(address: int, length: int, device: torch.device) -> bool:
        asked.append(length)
        return False

    monkeypatch.setattr(upload, "lock_pages", refuse)
    slot, wanted = shards()
    with Upload() as sending:
        sending.fill(wanted)
        assert len(sending._buffers) == 2
    assert all(right(slot, one) for one in wanted)
    assert asked == [200]


def saved() -> tuple[Saved, dict[str, torch.Tensor]]:
    """Return a checkpoint of seven tensors, and their values."""
    values = {
        "plain": torch.rand(6), "turned": torch.rand(12), "learned": torch.rand(5),
        "base": torch.rand(8), "half": torch.rand(4),
    }  # fmt: skip
    slot = Slot(torch.cat([value.view(torch.uint8) for value in values.values()]))
    other = {"turned": {"size": (3, 4), "sizes": (3, 4), "offsets": (0, 0), "stride": (1, 3)}}
    found, at = Saved(), 0
    for name, value in values.items():
        one = item(
            name,
            at,
            value.nbytes,
            "float32",
            **other.get(name, {}),
            requires_grad=name == "learned",
        )
        found.shards[name] = [Shard(slot, one)]  # type: ignore[arg-type]
        at += value.nbytes
    values["turned"] = values["turned"].as_strided((3, 4), (1, 3))
    values["view"] = values["base"][2:5]
    alias = Alias(fqn="view", base="base", dtype="float32", size=(3,), stride=(1,), offset=8)
    found.aliases["view"] = found.shards["base"][0], alias
    return found, values


def test_only_tensors_that_need_no_conversion_go_through_the_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, values = saved()
    sent: list[str] = []
    fill = Upload.fill

    def noted(self: Upload, wanted: Any, threads: int | None = None) -> int:
        wanted = list(wanted)
        sent.extend(one.shard.item.fqn for one in wanted)
        return fill(self, wanted, threads)

    monkeypatch.setattr(Upload, "fill", noted)
    state: dict[str, torch.Tensor] = {
        "plain": torch.zeros(6), "turned": torch.zeros(4, 3).t(), "base": torch.zeros(8),
        "learned": torch.nn.Parameter(torch.zeros(5)), "half": torch.zeros(4, dtype=torch.float16),
    }  # fmt: skip
    versions = {name: tensor._version for name, tensor in state.items()}
    with Upload() as sending:
        load(found, state, upload=sending)
    assert sorted(sent) == ["base", "learned", "plain", "turned"]
    assert all(torch.equal(state[name], values[name].to(state[name].dtype)) for name in state)
    # A snapshot whose copies are under way is found to be torn by the versions.
    assert all(state[name]._version > versions[name] for name in state)
    state["turned"] = torch.zeros(3, 4)
    with Upload() as sending, torch.inference_mode():
        state["plain"] = torch.zeros(6)
        load(found, {name: state[name] for name in ("plain", "turned")}, upload=sending)
    assert sorted(sent) == ["base", "learned", "plain", "turned", "turned"]
    assert torch.equal(state["turned"], values["turned"])


def test_nothing_changes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upload, "goes_to", staticmethod(lambda device: False))
    found, values = saved()
    state = {"plain": torch.zeros(6), "turned": torch.zeros(4, 3).t(), "view": torch.zeros(3)}
    load(found, state)
    assert all(torch.equal(state[name], values[name]) for name in state)
    assert (lanes, locked) == ([], [])


def test_new_tensors_of_a_device_are_made_there() -> None:
    """On the host, and then copied, they would need the memory of the whole optimizer."""
    found, values = saved()
    with Upload() as sending:
        made = empty_on(found, dict.fromkeys(values, CPU))
        assert sorted(made) == ["half", "plain", "turned"]
        load(found, made, upload=sending)
        assert loader.materialize(found, ["base", "view", "learned"])["learned"].requires_grad
    assert all(torch.equal(made[name], values[name]) for name in made)
    assert made["turned"].stride() == (1, 3)


# -- tensors that are read by another sharding than their own


@dataclass
class Stored:
    """A checkpoint of sharded tensors, and their values."""

    slot: Slot
    saved: Saved
    values: dict[str, torch.Tensor]


def stored() -> Stored:
    """Return tensors that were saved by 3 ranks, by rows, columns or planes, or by one."""
    torch.manual_seed(0)
    values = {
        "rows": torch.rand(7, 5), "few rows": torch.rand(2, 9), "columns": torch.rand(6, 8),
        "narrow": torch.rand(20, 4).bfloat16(), "planes": torch.rand(2, 7, 3),
        "bias": torch.rand(11), "copied": torch.rand(5, 4), "turned": torch.rand(6, 5).t(),
        "scalar": torch.tensor(3.0), "small": torch.rand(9, 4).to(torch.float8_e4m3fn),
        "flag": torch.rand(13) > 0.5, "phase": torch.rand(3, 4, dtype=torch.complex128),
    }  # fmt: skip
    dims = {"columns": 1, "narrow": 1, "planes": 1, "copied": None, "turned": None, "scalar": None}
    data, shards, at = list[torch.Tensor](), dict[str, list[tuple[Any, ...]]](), 0
    for name, value in values.items():
        dim = dims.get(name, 0)
        begin = 0
        chunks = [value] if dim is None else [*value.chunk(3, dim), value.narrow(dim, 0, 0)]
        for part in chunks:
            # Packed in the order of the strides, as in a slot.
            raw = (
                torch.empty_like(part) if dim is None else torch.empty(part.shape, dtype=part.dtype)
            )
            raw.copy_(part)
            flat = raw.as_strided((raw.numel(),), (1,)).view(torch.uint8)
            offsets = tuple(begin if n == dim else 0 for n in range(value.dim()))
            shards.setdefault(name, []).append((at, flat.numel(), offsets, raw))
            data.append(flat)
            at, begin = at + flat.numel(), begin + (0 if dim is None else part.shape[dim])
    found = Stored(Slot(torch.cat(data)), Saved(), values)
    for name, parts in shards.items():
        found.saved.shards[name] = [
            Shard(
                found.slot,  # type: ignore[arg-type]
                item(
                    name,
                    at,
                    length,
                    dtype_name(raw.dtype),
                    size=tuple(values[name].shape),
                    offsets=offsets,
                    sizes=tuple(raw.shape),
                    stride=None if raw.is_contiguous() else raw.stride(),
                ),
            )
            for at, length, offsets, raw in parts
        ]
    return found


@contextmanager
def rank_of(world_size: int, rank: int) -> Iterator[DeviceMesh]:
    """Context manager. Make this process one rank of a process group of it alone."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield DeviceMesh("cpu", list(range(world_size)))
    finally:
        dist.destroy_process_group()


def placed(value: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return this rank's part of a tensor as a DTensor."""
    local = value
    if isinstance(placement, Split):
        parts = value.chunk(mesh.size(), placement.dim)
        rank = mesh.get_local_rank()
        empty = value.narrow(placement.dim, 0, 0)
        local = parts[rank] if rank < len(parts) else empty
    return DTensor.from_local(
        local.contiguous(), mesh, [placement], run_check=False, shape=value.shape,
        stride=torch.empty(value.shape).stride(),
    )  # fmt: skip


def states(found: Stored, mesh: DeviceMesh) -> Iterator[dict[str, DTensor]]:
    """Yield the values, placed on this rank in all ways."""
    for placement in (Split(0), Split(1), Replicate()):
        dims = placement.dim + 1 if isinstance(placement, Split) else 0
        yield {
            name: placed(value, mesh, placement if value.dim() >= dims else Replicate())
            for name, value in found.values.items()
        }


def zeros_like(state: dict[str, DTensor]) -> dict[str, DTensor]:
    return {
        name: DTensor.from_local(
            torch.zeros_like(value.to_local()), value.device_mesh, value.placements,
            run_check=False, shape=value.shape, stride=value.stride(),
        )
        for name, value in state.items()
    }  # fmt: skip


def same(one: DTensor, other: DTensor) -> bool:
    ours, theirs = one.to_local(), other.to_local()
    return ours.shape == theirs.shape and torch.equal(
        copyable(ours).contiguous(), copyable(theirs).contiguous()
    )


@pytest.mark.parametrize("buffer", [64, 100, 200, 10_000])
@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_tensors_of_another_sharding_go_through_the_buffers(
    monkeypatch: pytest.MonkeyPatch, buffer: int, world_size: int
) -> None:
    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        # torch copies others through ordinary memory, and waits meanwhile.
        assert source.is_contiguous() or not non_blocking
        return copied(self, source, non_blocking)

    copied = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(upload, "BUFFER", buffer)
    monkeypatch.setattr(loader, "copy_any", lambda *_: pytest.fail("not through the buffers"))
    found, loads, wrong = stored(), 0, list[str]()
    for rank in range(world_size):
        with rank_of(world_size, rank) as mesh:
            for expected in states(found, mesh):
                state = zeros_like(expected)
                before = {name: value.to_local()._version for name, value in state.items()}
                load(found.saved, state)
                loads += 1
                for name, value in state.items():
                    written = value.to_local()._version > before[name]
                    if not same(value, expected[name]) or written != bool(value.to_local().numel()):
                        wrong.append(name)
    assert (wrong, loads) == ([], 3 * world_size)
    assert sum(lane.done for lane in lanes) == sum(len(lane.works) for lane in lanes)


def test_a_shard_is_read_no_further_than_this_rank_needs() -> None:
    """Rows that other ranks have lie in chunks that are not read."""
    value = torch.rand(400, 8)
    slot = Slot(value.view(torch.uint8).flatten())
    one = item("w", 0, value.nbytes, "float32", size=(400, 8), offsets=(0, 0), sizes=(400, 8))
    found = Saved({"w": [Shard(slot, one)]})  # type: ignore[arg-type]
    with rank_of(4, 2) as mesh:
        state = {"w": placed(torch.zeros(400, 8), mesh, Split(0))}
        load(found, state)
    assert torch.equal(state["w"].to_local(), value[200:300])
    assert len(set(slot.reads)) == 50
    assert len(slot.reads) == 50, "a chunk was read twice"


def test_a_tensor_inside_another_and_one_of_another_layout_go_through_the_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "copy_any", lambda *_: pytest.fail("not through the buffers"))
    found, values = saved()
    state = {"view": torch.zeros(3), "base": torch.zeros(16)[::2], "turned": torch.zeros(3, 4)}
    load(found, state)
    assert all(torch.equal(state[name], values[name]) for name in state)


def test_a_damaged_chunk_of_another_sharding_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither the chunk nor a later one reaches the device."""
    monkeypatch.setattr(upload, "BUFFER", 1 << 20)
    value = 1 + torch.rand(4096, 1024)
    dcp.save({"w": value}, storage_writer=StorageWriter(tmp_path / "x"))
    state: dict[str, DTensor] = {}
    with rank_of(2, 1) as mesh:
        for placement in (Split(0), Split(1)):
            state["w"] = placed(torch.zeros(4096, 1024), mesh, placement)
            dcp.load(state, storage_reader=StorageReader(tmp_path / "x"), no_dist=True)
            assert same(state["w"], placed(value, mesh, placement))
        with part_in(tmp_path / "x").open("r+b") as file:
            file.seek(12 << 20)  # in the second chunk
            file.write(bytes(64))
        for placement in (Split(0), Split(1)):
            state["w"] = placed(torch.zeros(4096, 1024), mesh, placement)
            with pytest.raises(CheckpointException) as raised:
                dcp.load(state, storage_reader=StorageReader(tmp_path / "x"), no_dist=True)
            (error,) = [one for one, _ in raised.value.failures.values()]
            assert isinstance(error, IntegrityError)
            assert "chunk 1 " in str(error)
            local = state["w"].to_local()
            assert not local.any() if placement.dim == 0 else local[:2000].all()
            assert not local[2048:].any()


def test_ctrl_c_waits_for_the_copies_and_unlocks_the_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, read = stored(), Reads.run

    def run(self: Reads, threads: int | None = None) -> int:
        if len(locked) == 2:
            raise KeyboardInterrupt
        return read(self, threads)

    monkeypatch.setattr(Reads, "run", run)
    with rank_of(2, 1) as mesh, pytest.raises(KeyboardInterrupt):
        load(found.saved, zeros_like(next(states(found, mesh))))
    assert lanes[0].done == len(lanes[0].works) > 0
    assert locked == [("locked", 200)] * 2 + [("unlocked", 0)] * 2


def test_a_copy_that_fails_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: LateLane, work: Callable[[], None]) -> None:
        if len(self.works) > 2:
            raise RuntimeError("CUDA error")
        self.works.append(work)

    monkeypatch.setattr(LateLane, "run", run)
    found = stored()
    with rank_of(2, 1) as mesh, pytest.raises(RuntimeError, match="^CUDA error$"):
        load(found.saved, zeros_like(next(states(found, mesh))))
    assert lanes[0].done == len(lanes[0].works) > 0
    assert locked == [("locked", 200)] * 2 + [("unlocked", 0)] * 2


def test_a_model_that_serves_is_filled_through_the_buffers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loader, "copy_any", lambda *_: pytest.fail("not through the buffers"))
    model = torch.nn.Linear(20, 6)
    dcp.save({"model": model.state_dict()}, storage_writer=StorageWriter(tmp_path / "x"))
    others = [torch.nn.Linear(20, 6) for _ in range(4)]
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        for other, staged in zip(others, (True, False), strict=False):
            checkpoint.load_into(other, staged=staged)
        with torch.inference_mode():
            checkpoint.load_into(others[2])
        assert torch.equal(
            checkpoint.tensor("model.weight", dtype=torch.float32), model.weight.detach()
        )
    load_model(others[3], tmp_path / "x")
    for other in others:
        assert torch.equal(other.weight, model.weight)
        assert torch.equal(other.bias, model.bias)
    assert len(lanes) == 5
