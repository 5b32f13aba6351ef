"""Tests page-locking and its fallback, with a CUDA runtime that returns given errors."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptd.agent.copy import lanes
from ckptd.shared.errors import InternalError

THIRD = torch.device("cuda", 3)


class Runtime:
    """Stands for `torch.cuda.cudart()`. It returns `answers` in turn, and the last one
    again and again. `current` is the device on which it is asked, and `during` returns
    what is noted beside each call.
    """

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.current = 0
        self.during: Callable[[], int] = lambda: self.current
        self.asked: list[tuple[object, ...]] = []

    def _answer(self, *asked: object) -> int:
        self.asked.append((self.during(), *asked))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        return self._answer(address, length, flags)

    def cudaHostUnregister(self, address: int) -> int:
        return self._answer(address)

    def cudaGetErrorString(self, error: int) -> str:
        return f"text of {error}"

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before


def runtime(monkeypatch: pytest.MonkeyPatch, *answers: int) -> Runtime:
    made = Runtime(*answers)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_pages_are_locked_and_unlocked_on_the_device_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked on device 0, the driver would take memory there for each rank of a node."""
    cuda = runtime(monkeypatch, 0)
    assert lanes.lock_pages(4096, 8192, THIRD)
    lanes.unlock_pages(4096, THIRD)
    assert (cuda.asked, cuda.current) == ([(3, 4096, 8192, 1), (3, 4096)], 0)


def test_any_thread_waits_for_a_mark_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = runtime(monkeypatch, 0)

    class Event:
        def query(self) -> bool:
            return cuda.current == 3

        def synchronize(self) -> None:
            cuda.asked.append((cuda.current,))

    mark = lanes.StreamMark(THIRD, Event())  # type: ignore[arg-type]
    mark.synchronize()
    assert (mark.query(), cuda.asked, cuda.current) == (True, [(3,)], 0)


def test_calls_of_other_threads_run_beside_the_capture_of_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the driver refuses them, and the capture fails."""
    cuda, mode = runtime(monkeypatch, 0), [0]

    def exchange(new: Any) -> int:
        mode[0], new._obj.value = new._obj.value, mode[0]
        return 0

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(lanes, "_driver", lambda: driver)
    cuda.during = lambda: mode[0]
    lanes.lock_pages(4096, 8192, THIRD)
    lanes.unlock_pages(4096, THIRD)
    assert ([asked[0] for asked in cuda.asked], mode) == ([2, 2], [0])


def test_a_lane_asks_nothing_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch makes a context on device 0 for a training that sets no device."""
    cuda, on = runtime(monkeypatch, 0), list[int]()

    def note(*_: object) -> None:
        on.append(cuda.current)

    class Lane(lanes.StreamLane):
        def __init__(self) -> None:
            self._device = THIRD
            self._stream: Any = SimpleNamespace(wait_stream=note)

        def _again(self) -> Any:
            note()
            return nullcontext()

    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: SimpleNamespace(wait_event=note)
    )
    lane = Lane()
    lane.begin()
    lane.run(note)
    lane.hold_back(lanes.StreamMark(THIRD, torch.Event.__new__(torch.Event)))
    assert (on, cuda.current) == ([3] * 4, 0)


class Here(lanes.StreamLane):
    """A lane of this CPU, without a stream."""

    def __init__(self) -> None:
        self._device, self._kept = torch.device("cpu"), None
        self._refused = False

    @contextmanager
    def _current(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize("room", [10_000, 300, 0])
def test_tensors_of_every_size_and_form_arrive(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(lanes, "SMALL", 256)
    monkeypatch.setattr(lanes, "GATHERED", 1024)
    sources = [
        torch.rand(700), torch.arange(20.0), torch.arange(8).to(torch.int8), torch.rand(40, 40).t(),
        torch.tensor(7.0), torch.rand(3, 5, dtype=torch.float64), torch.empty(0), torch.rand(90),
    ]  # fmt: skip
    slot = torch.zeros(sum(8 * source.nbytes for source in sources), dtype=torch.uint8)
    targets, at = [], 0
    for source in sources:
        at = -(-at // source.element_size()) * source.element_size()
        piece = slot[at : at + source.nbytes].view(source.dtype)
        targets.append(piece.view(source.shape))
        at += source.nbytes
    lane = Here()
    monkeypatch.setattr(lanes, "has_room", lambda device, length: length <= room)
    lane._refused = not room
    lane.copy(targets, sources)
    assert (0 if lane._kept is None else lane._kept.nbytes) == {10_000: 1024, 300: 256, 0: 0}[room]
    assert all(map(torch.equal, targets, sources))
    assert not slot[at:].any()


def test_a_large_tensor_crosses_the_bus_in_pieces() -> None:
    """Otherwise each small copy of the training waits for all of it."""
    whole, other = torch.rand(600), torch.rand(600)
    found = [[part.numel() for part, _ in group] for group in lanes.groups([whole], [other], 1024)]
    assert found == [[256], [256], [88]]
    across = whole.view(20, 30).t(), other.view(20, 30).t()
    assert [len(part) for part, _ in lanes.pieces(*across, whole.data_ptr(), 1024)] == [
        256,
        256,
        88,
    ]
    turned = whole.view(20, 30), other.view(30, 20).t()
    assert [len(part) for part, _ in lanes.pieces(*turned, whole.data_ptr(), 1024)] == [
        256,
        256,
        88,
    ]
    Here().copy([turned[0]], [turned[1]])
    assert torch.equal(*turned)


def test_scalars_between_large_tensors_do_not_cross_the_bus_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fused optimizer has one `step` of 4 bytes for each parameter, on the device, and
    each copy across the bus counts in the queue.
    """
    monkeypatch.setattr(lanes, "SMALL", 64)
    monkeypatch.setattr(lanes, "GATHERED", 1024)
    slot, numbers = torch.zeros(610), [150, 1, 150, 1, 100, 100, 1, 60, 1]
    targets = list(torch.split_with_sizes(slot[: sum(numbers)], numbers))
    sources = [torch.rand(number) for number in numbers]
    sizes = [
        [part.numel() for part, _ in group]
        for group in lanes.groups(targets, sources, lanes.GATHERED)
    ]
    # A large tensor that is not aligned in the group before it begins a new one.
    assert sizes == [[150, 1], [150, 1], [100, 100, 1], [60, 1]]
    Here().copy(targets, sources)
    assert all(map(torch.equal, targets, sources))


def test_a_small_tensor_that_is_not_aligned_begins_a_group() -> None:
    slot = torch.zeros(64, dtype=torch.uint8)
    targets = [slot[3:8], slot[8:16].view(torch.float32)]
    sources = [torch.ones(5, dtype=torch.uint8), torch.rand(2)]
    assert [len(group) for group in lanes.groups(targets, sources, lanes.GATHERED)] == [1, 1]
    Here().copy(targets, sources)
    assert all(map(torch.equal, targets, sources))


def test_no_copy_crosses_memory_that_was_locked_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses such a copy."""
    monkeypatch.setattr(lanes, "LOCKED", 4096)
    monkeypatch.setattr(lanes, "GATHERED", 1024)
    slot = torch.zeros(12_000, dtype=torch.uint8)
    base = slot.data_ptr()
    sizes = [100, 4000, 80, 5000, 16, 2040]
    targets = [
        part.view(torch.float32) for part in torch.split_with_sizes(slot[: sum(sizes)], sizes)
    ]
    targets[3] = targets[3].view(50, 25).t()
    sources = [torch.rand(target.shape) for target in targets]
    groups = list(lanes.groups(targets, sources, lanes.GATHERED))
    ends = [
        (group[0][0].data_ptr() - base, group[-1][0].data_ptr() + group[-1][0].nbytes - base)
        for group in groups
    ]
    assert all(start // 4096 == (end - 1) // 4096 and end - start <= 1024 for start, end in ends)
    assert [start for start, _ in ends if start % 4096 == 0] == [0, 4096, 8192]
    Here().copy(targets, sources)
    assert all(map(torch.equal, targets, sources))
    # The locks have the bytes before the data, too, and end where the groups end.
    assert list(lanes.locks(base - 512, 512 + 12_000, 512)) == [
        (base - 512, 512 + 4096), (base + 4096, 4096), (base + 8192, 12_000 - 8192)
    ]  # fmt: skip
    assert list(lanes.locks(base - 512, 512 + 4096, 512)) == [(base - 512, 512 + 4096)]


def test_each_call_makes_a_stream_current_through_an_object_of_its_own() -> None:
    """Before its re-entrance was mended, torch refused to enter one object twice, as two
    threads do.
    """
    lane = Here()
    lane._stream = torch.Stream(stream_id=7, device_index=0, device_type=1)
    one, other = (lane._again() for _ in range(2))
    assert (one is other, one == lane._stream, other == lane._stream) == (False, True, True)


def test_a_full_device_gives_no_buffer_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, full = Here(), [True, True, False]
    monkeypatch.setattr(lanes, "GATHERED", 1024)
    empty = torch.empty

    def some(*arguments: Any, **options: Any) -> torch.Tensor:
        if full.pop(0):
            raise torch.OutOfMemoryError("full")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", some)
    assert lane._buffer() is None
    kept = lane._buffer()
    assert kept is not None
    assert (lane._buffer() is kept, kept.nbytes, full) == (True, 1024, [])


class Device:
    """Stands for a device of CUDA with `free` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free = free
        self.asked: list[int] = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 1 << 40))
        monkeypatch.setattr(lanes, "on", lambda device: nullcontext())
        empty = torch.empty

        def some(length: int, **options: Any) -> torch.Tensor:
            self.asked.append(length)
            if length > self.free:
                raise torch.OutOfMemoryError("full")
            return empty(length, **(options | {"device": "cpu"}))

        monkeypatch.setattr(torch, "empty", some)


def test_torch_is_asked_once_for_more_than_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time, it waits for the device, and gives back what it keeps for the training."""
    device, lane = Device(monkeypatch, 0), Here()
    lane._device = THIRD
    lane.prepare()
    assert (lane._buffer(), lane._buffer(), device.asked) == (None, None, [16 << 20])
    device.free = 24 << 20
    kept = lane._buffer()
    device.free = 0
    assert (lane._buffer() is kept, device.asked) == (True, [16 << 20] * 2)
    assert kept is not None
    assert kept.nbytes == 16 << 20
    device.free, lane = 80 << 20, Here()
    lane._device = THIRD
    lane.prepare()
    assert device.asked[2:] == [64 << 20]


def test_an_empty_slot_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = runtime(monkeypatch, 0)
    assert not lanes.lock_pages(4096, 0, THIRD)
    assert cuda.asked == []


def test_what_was_locked_at_the_address_before_is_unlocked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = runtime(monkeypatch, 712, 0)
    assert lanes.lock_pages(4096, 8192, THIRD)
    assert cuda.asked == [(3, 4096, 8192, 1), (3, 4096), (3, 4096, 8192, 1)]


def test_memory_over_other_locked_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime(monkeypatch, 712, 713, 712)
    with pytest.raises(InternalError, match="is still page-locked at the address of new memory"):
        lanes.lock_pages(4096, 8192, THIRD)


def test_a_refusal_of_the_driver_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime(monkeypatch, 2)
    with caplog.at_level(logging.WARNING):
        assert not lanes.lock_pages(4096, 3_000_000_000, THIRD)
    (message,) = caplog.messages
    assert "memory for copies could not be page-locked (CUDA error 2, text of 2, 3.0 GB)" in message
    assert "memory limit of the container" in caplog.text


@pytest.mark.parametrize(
    ("error", "hip", "words"),
    [(2, "7.0", "AMD's driver"), (900, None, "is being captured"), (801, None, "each holds")],
)
def test_the_log_has_the_causes_of_a_refusal_and_no_limit_that_the_driver_does_not_check(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
    hip: str | None,
    words: str,
) -> None:
    runtime(monkeypatch, error)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert not lanes.lock_pages(4096, 8192, THIRD)
    (message,) = caplog.messages
    assert words in message
    assert ("MEMLOCK" in message) == (hip is not None)


def test_other_accelerators_are_logged_as_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = runtime(monkeypatch, 0)
    with caplog.at_level(logging.WARNING):
        assert not lanes.lock_pages(4096, 8192, torch.device("xpu", 0))
    assert "not for xpu" in caplog.text
    assert cuda.asked == []


def test_unlocking_pages_that_are_not_locked_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime(monkeypatch, 713)
    lanes.unlock_pages(4096, THIRD)
    assert caplog.records == []
    runtime(monkeypatch, 1)
    lanes.unlock_pages(4096, THIRD)
    assert "could not be unlocked: CUDA error 1, text of 1" in caplog.text


def test_asking_whether_a_graph_is_captured_initializes_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not lanes.capturing()


@pytest.mark.parametrize(
    ("initialized", "on_cpu", "expected"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_memory_is_pinned_only_where_a_device_is_in_use(
    monkeypatch: pytest.MonkeyPatch, *, initialized: bool, on_cpu: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    tensor: Any = SimpleNamespace(is_cpu=on_cpu, is_pinned=lambda: True)
    assert lanes.pinned([tensor]) is expected
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert not lanes.pinned([tensor])


def test_the_streams_of_all_devices_of_a_state_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def synchronize(self) -> None:
            waited.append(self.index)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(
        torch.accelerator,
        "current_stream",
        lambda device: SimpleNamespace(record_event=lambda event: event),
    )
    monkeypatch.setattr(torch, "Event", Event)
    runtime(monkeypatch, 0)
    tensors: Any = [
        SimpleNamespace(is_cpu=False, device=THIRD),
        SimpleNamespace(is_cpu=True, device=torch.device("cpu")),
    ]
    lanes.wait_for_streams(tensors)
    lanes.wait_for_streams(tensors[1:])
    assert waited == [3, 1]


@pytest.mark.usefixtures("processes")
def test_the_end_of_the_process_waits_for_a_lock_that_is_under_way() -> None:
    """A thread that came back from torch after that would abort the process."""
    script = """
import _thread, contextlib, threading, time
import torch
from ckptd.agent.copy import lanes

torch.set_num_threads(1)
begun, matrix = threading.Event(), torch.ones(1000, 1000)

class Runtime:
    def cudaHostRegister(self, *_):
        begun.set()
        until = time.monotonic() + 1
        while time.monotonic() < until:
            matrix @ matrix
        return 0

def lock():
    for _ in range(1000):
        if not lanes.lock_pages(4096, 8192, torch.device("cuda", 0)):
            break
    time.sleep(1000)

torch.cuda.cudart = Runtime
lanes.on = lambda device: contextlib.nullcontext()
_thread.start_new_thread(lock, ())
begun.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
