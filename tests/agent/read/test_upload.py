"""Tests that what a recovery copies to a device was verified, and that a buffer is kept as
long as copies from it run, with a lane that copies as late as it may.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch

from ckptd.agent.plan.layout import memory
from ckptd.agent.read import loader, upload
from ckptd.agent.read.loader import empty_on, load
from ckptd.agent.read.saved import Reads, Saved, Shard
from ckptd.agent.read.upload import Upload
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.plan import Alias, ChunkRange, Item

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
    monkeypatch.setattr(upload, "unlock_pages", lambda *_: locked.append(("unlocked", 0)))
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


def shards(damaged: int = -1) -> tuple[Slot, list[tuple[torch.Tensor, Shard]]]:
    torch.manual_seed(0)
    slot = Slot(torch.randint(0, 256, (sum(SIZES),), dtype=torch.uint8), damaged)
    starts = [0, *accumulate(SIZES)]
    return slot, [
        (
            torch.zeros(size, dtype=torch.uint8),
            Shard(slot, item(f"t{n}", starts[n], size)),  # type: ignore[arg-type]
        )
        for n, size in enumerate(SIZES)
    ]


def right(slot: Slot, tensor: torch.Tensor, shard: Shard) -> bool:
    at = shard.item.offset
    return torch.equal(tensor, slot.data[at : at + len(tensor)])


@pytest.mark.parametrize("buffer", [50, 70, 200, 1000, 10_000])
def test_bytes_arrive_although_copies_are_late(
    monkeypatch: pytest.MonkeyPatch, buffer: int
) -> None:
    """A buffer that is filled again before its copies are done would give them other bytes."""
    monkeypatch.setattr(upload, "BUFFER", buffer)
    slot, wanted = shards()
    with Upload(10_000) as sending:
        sending.fill(wanted[::-1])
        assert all(right(slot, *pair) for pair in wanted)
        assert sum(lane.done for lane in lanes) == sum(len(lane.works) for lane in lanes)


def test_there_are_two_buffers_for_all_fills_of_a_recovery() -> None:
    slot, wanted = shards()
    with Upload(10_000) as sending:
        for part in (wanted[:1], wanted, wanted[2:]):
            sending.fill(part)
            assert all(right(slot, *pair) for pair in part)
        assert locked == [("locked", 200)] * 2
    assert locked == [("locked", 200)] * 2 + [("unlocked", 0)] * 2
    locked.clear()
    slot, wanted = shards()
    with Upload(90) as sending:
        sending.fill([wanted[0]])
    assert locked == [("locked", 90), ("unlocked", 0)]


def test_one_buffer_is_filled_while_the_other_is_copied() -> None:
    _, wanted = shards()
    with Upload(10_000) as sending:
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
    with Upload(10_000) as sending:
        sending.fill(wanted)
    assert len(slot.reads) <= len(slot.ranges) + 2
    assert set(slot.reads) == set(range(len(slot.ranges)))


def test_nothing_that_was_not_verified_is_copied() -> None:
    _, wanted = shards(damaged=11)
    with pytest.raises(IntegrityError), Upload(10_000) as sending:
        sending.fill(wanted)
    assert lanes[0].done == len(lanes[0].works), "copies still run"
    damaged = slice(11 * CHUNK, 12 * CHUNK)
    for tensor, shard in wanted:
        begin, end = shard.item.offset, shard.item.offset + shard.item.length
        inside = tensor[max(0, damaged.start - begin) : max(0, min(damaged.stop, end) - begin)]
        assert not inside.any()
    assert any(tensor.any() for tensor, _ in wanted), "no batch came before the damaged one"


def test_without_locked_memory_a_recovery_is_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    slot, wanted = shards()
    with Upload(10_000) as sending:
        sending.fill(wanted)
    assert all(right(slot, *pair) for pair in wanted)
    assert locked == []
    assert caplog.messages == [
        "a recovery is slower, because its buffer cannot be page-locked: [Errno 24] Too many open "
        "files"
    ]


def test_a_driver_that_refuses_to_lock_a_buffer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its refusal is logged each time."""
    asked: list[int] = []

    def refuse(address: int, length: int, device: torch.device) -> bool:
        asked.append(length)
        return False

    monkeypatch.setattr(upload, "lock_pages", refuse)
    slot, wanted = shards()
    with Upload(10_000) as sending:
        sending.fill(wanted)
        assert len(sending._buffers) == 2
    assert all(right(slot, *pair) for pair in wanted)
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
        sent.extend(shard.item.fqn for _, shard in wanted)
        return fill(self, wanted, threads)

    monkeypatch.setattr(Upload, "fill", noted)
    state: dict[str, torch.Tensor] = {
        "plain": torch.zeros(6), "turned": torch.zeros(4, 3).t(), "base": torch.zeros(8),
        "learned": torch.nn.Parameter(torch.zeros(5)), "half": torch.zeros(4, dtype=torch.float16),
    }  # fmt: skip
    versions = {name: tensor._version for name, tensor in state.items()}
    with Upload(10_000) as sending:
        load(found, state, upload=sending)
    assert sorted(sent) == ["base", "learned", "plain", "turned"]
    assert all(torch.equal(state[name], values[name].to(state[name].dtype)) for name in state)
    # A snapshot whose copies are under way is found to be torn by the versions.
    assert all(state[name]._version > versions[name] for name in state)
    state["turned"] = torch.zeros(3, 4)
    with Upload(10_000) as sending, torch.inference_mode():
        state["plain"] = torch.zeros(6)
        load(found, {name: state[name] for name in ("plain", "turned")}, upload=sending)
    assert sorted(sent) == ["base", "learned", "plain", "turned"]
    assert torch.equal(state["turned"], values["turned"])


def test_without_an_upload_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    found, values = saved()
    state = {"plain": torch.zeros(6), "turned": torch.zeros(4, 3).t()}
    load(found, state)
    assert all(torch.equal(state[name], values[name]) for name in state)
    assert (lanes, locked) == ([], [])


def test_new_tensors_of_a_device_are_made_there() -> None:
    """On the host, and then copied, they would need the memory of the whole optimizer."""
    found, values = saved()
    with Upload(10_000) as sending:
        made = empty_on(found, dict.fromkeys(values, CPU), sending)
        assert sorted(made) == ["half", "plain", "turned"]
        load(found, made, upload=sending)
        assert loader.materialize(found, ["base", "view", "learned"])["learned"].requires_grad
    assert all(torch.equal(made[name], values[name]) for name in made)
    assert made["turned"].stride() == (1, 3)
