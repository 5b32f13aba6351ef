"""Copies from an accelerator into slots on a stream beside the training's, and
page-locks the memory of slots.

Works with any device type of `torch.accelerator`. A lane begins behind everything that
the training has enqueued so far, and enqueuing copies in it does not block the CPU.
Every copy across the bus takes microseconds to enqueue, and a device takes only so many
in advance, so tensors that lie side by side in the slot are first gathered on the
device, in one buffer of a lane. Without page-locked memory the
copies are several times slower and may block the CPU.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

from ckptd.shared.errors import InternalError

log = logging.getLogger("ckptd.agent")

# An H200 takes about a thousand copies and kernels before the call that enqueues the
# next one waits for the device.
SMALL = 16 << 20  # bytes of a tensor that is gathered with its neighbours, at most
GATHERED = 64 << 20  # bytes that cross the bus at once, at most
_SPARE = 4 << 20  # bytes that must be free beside a new buffer, as torch rounds its size up
LOCKED = 64 << 30  # bytes of a slot's data that are locked at once, at most
_ALIGNED = 16  # bytes that a thread of the device reads or writes at once
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
CAPTURED = (
    "a CUDA graph is being captured on this thread, and the copies of a snapshot cannot be a part "
    "of the graph: take the snapshot before or after the capture"
)
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device's context
_NO_MEMORY = 2  # cudaErrorMemoryAllocation
_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered
_CAPTURING = 900  # cudaErrorStreamCaptureUnsupported
LOCK_SECONDS = 15.0
"""Seconds that the end of this process waits for a lock that is under way. 64 GiB are
locked in about half of that.
"""
_ending = False
_locking: set[object] = set()  # the calls of `lock_pages` that are under way


class Mark(Protocol):
    """A point in a lane that is reached once everything before it is done.

    `torch.Event` is one.
    """

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Lane(Protocol):
    """A queue of copies from one device that runs beside the caller's stream.

    Call `begin`, then `copy`, `mark` and `hold_back`.
    """

    def begin(self) -> None:
        """Make later copies wait for everything that the caller has enqueued so far, so
        that they copy its results.
        """

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None: ...

    def run(self, work: Callable[[], None]) -> None:
        """Call `work`. The kernels and copies that it launches go into this lane."""

    def mark(self) -> Mark: ...

    def hold_back(self, mark: Mark) -> None:
        """Make everything that the caller enqueues from now on wait for `mark`.

        Does not block the CPU.
        """


class StreamLane:
    """A lane on a stream of its own, for any device type of `torch.accelerator`.

    Its calls come from threads with other current devices: that which drains lanes, and
    that of a training which names its device everywhere and sets none. To record an event
    or to wait for one, torch goes to the device and back, and the way back makes a context
    on a device that has none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._kept: torch.Tensor | None = None
        self._refused = False

    def prepare(self) -> None:
        """Make the buffer of this lane, before the training has filled the device."""
        with self._current():
            self._buffer()

    def begin(self) -> None:
        with on(self._device):
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), self._current():
            buffer = self._buffer()
            most = GATHERED if buffer is None else buffer.nbytes
            for group in groups(targets, sources, most):
                self._gather(group, buffer)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Context manager. Make the stream the current one of this thread."""
        with on(self._device), self._again():
            yield

    def _again(self) -> torch.Stream:
        """Return a new object for the stream: some versions of torch refuse to enter one
        that is entered already, for example by another thread.
        """
        return torch.Stream(
            stream_id=self._stream.stream_id,
            device_index=self._stream.device_index,
            device_type=self._stream.device_type,
        )

    def _buffer(self) -> torch.Tensor | None:
        """Return the memory in which tensors are gathered, or None if the device is full.

        It is kept: the device may be full at the next call. On a device that is nearly
        full, it has `SMALL` bytes. torch is asked for that once, even if it has to
        give back memory that it keeps for the training.
        """
        for length in (GATHERED, SMALL):
            once = length == SMALL and not self._refused
            if self._kept is None and (has_room(self._device, length) or once):
                try:
                    self._kept = torch.empty(length, dtype=torch.uint8, device=self._device)
                except torch.OutOfMemoryError:
                    self._refused = True
        return self._kept

    def run(self, work: Callable[[], None]) -> None:
        with torch.no_grad(), self._current():
            work()

    @staticmethod
    def _gather(
        group: list[tuple[torch.Tensor, torch.Tensor]], buffer: torch.Tensor | None
    ) -> None:
        """Copy tensors that lie side by side in the slot, through the buffer if they fit.

        The bus then waits for the next piece to be gathered, and the small copies of the
        training get their turn. They would wait for all copies that follow one another.
        """
        first, length = group[0][0].data_ptr(), sum(target.nbytes for target, _ in group)
        if buffer is None or length > buffer.nbytes:
            for target, source in group:
                target.copy_(source, non_blocking=True)
            return
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for target, source in group:
            at = target.data_ptr() - first
            mirror = (
                buffer[at : at + target.nbytes]
                .view(target.dtype)
                .as_strided(target.shape, target.stride())
            )
            by_dtype[target.dtype][0].append(mirror)
            by_dtype[target.dtype][1].append(source)
        for mirrors, originals in by_dtype.values():
            torch._foreach_copy_(mirrors, originals)
        whole = group[0][0].untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
            whole, first - whole.data_ptr(), (length,), (1,)
        )
        flat.copy_(buffer[:length], non_blocking=True)

    def mark(self) -> Mark:
        with on(self._device):
            return StreamMark(self._device, self._stream.record_event(torch.Event(self._device)))

    def hold_back(self, mark: Mark) -> None:
        assert isinstance(mark, StreamMark)
        with on(self._device):
            torch.accelerator.current_stream(self._device).wait_event(mark.event)


class StreamMark:
    """An event of a stream, which any thread may wait for.

    Each thread has a current device of its own, at first device 0. The first call of a
    thread to the driver makes a context on it, which takes memory there.
    """

    def __init__(self, device: torch.device, event: torch.Event) -> None:
        self._device, self.event = device, event

    def query(self) -> bool:
        with on(self._device):
            return self.event.query()

    def synchronize(self) -> None:
        with on(self._device):
            self.event.synchronize()


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Context manager. Make `device` the current device of this thread, and let its calls
    run beside the capture of a graph in another thread.

    Otherwise, while torch captures, the driver refuses to lock pages and to wait for
    events in every thread, and the capture fails, too. torch's allocators do the same.
    """
    with torch.get_device_module(device).device(device):
        before = _exchange_capture_mode(_RELAXED)
        try:
            yield
        finally:
            _exchange_capture_mode(before)


def stay_on(device: torch.device) -> None:
    """Make `device` the current device of this thread from now on.

    A thread that drops events needs it: torch destroys an event on its device, and then
    sets the device from before, which makes a context there if there is none. `on` is no
    help, because nobody knows when the last reference is gone.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _exchange_capture_mode(mode: int) -> int:
    """Set the capture mode of this thread, and return the one before. Does nothing
    without a driver of NVIDIA.
    """
    driver, value = _driver(), ctypes.c_int(mode)
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def has_room(device: torch.device, length: int) -> bool:
    """Return False if the device is known to have fewer than `length` bytes to spare.

    torch would wait for the device, and give back all memory that it keeps for the
    training, before it says so.
    """
    if device.type != "cuda":
        return True
    with on(device):
        free, _ = torch.cuda.mem_get_info(device)
    return free >= length + _SPARE


def capturing() -> bool:
    """Return True if the caller's stream is being captured into a graph. Initializes no
    device.
    """
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def pinned(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if a device may still write to one of these tensors on the CPU, because
    its memory is page-locked. Initializes no device.
    """
    kind = torch.accelerator.current_accelerator()
    return (
        kind is not None
        and torch.get_device_module(kind).is_initialized()
        and any(tensor.is_cpu and tensor.is_pinned() for tensor in tensors)
    )


def wait_for_streams(tensors: Iterable[torch.Tensor]) -> None:
    """Wait on the CPU for everything that the caller has enqueued in the current streams
    of the accelerators that tensors are on, or of the current accelerator if none is on
    one.
    """
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    if not devices:
        devices.add(torch.device(kind.type, torch.accelerator.current_device_index()))
    for device in devices:
        with on(device):
            stream = torch.accelerator.current_stream(device)
            stream.record_event(torch.Event(device)).synchronize()


def groups(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], most: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the copies in groups that cross the bus together.

    The targets of a group, all in one slot, lie side by side, in at most `most` bytes
    that were locked at once.
    """
    base = targets[0].untyped_storage().data_ptr() if targets else 0
    group: list[tuple[torch.Tensor, torch.Tensor]] = []
    first = end = 0
    for target, source in zip(targets, sources, strict=True):
        for part in pieces(target, source, base, most):
            start, length = part[0].data_ptr(), part[0].nbytes
            # Large tensors are gathered at full speed only if they are aligned.
            unit = part[0].element_size() if length <= SMALL else _ALIGNED
            if group and (
                start != end
                or start - first + length > most
                or (start - first) % unit
                or not _together(first - base, start - base + length)
            ):
                yield group
                group = []
            if not group:
                first = start
            group.append(part)
            end = start + length
    if group:
        yield group


def pieces(
    target: torch.Tensor, source: torch.Tensor, base: int, most: int
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pieces in which a tensor is copied: at most `most` bytes, and never
    across the memory of two locks, unless the target has gaps.

    base: the address of the first byte of the slot's data. There is no piece of an
    empty tensor.
    """
    at, length, size = target.data_ptr() - base, target.nbytes, target.element_size()
    if length <= most and _together(at, at + length):
        return [(target, source)] if length else []
    order = sorted(range(target.dim()), key=target.stride, reverse=True)
    to = target.permute(order)
    if not to.is_contiguous():
        return [(target, source)]
    of = source.permute(order).contiguous()  # on the device, as torch's copy does it
    sizes = []
    while length:
        sizes.append(min(length, most, LOCKED - at % LOCKED) // size)
        at, length = at + sizes[-1] * size, length - sizes[-1] * size
    return list(
        zip(
            torch.split_with_sizes(to.view(-1), sizes),
            torch.split_with_sizes(of.view(-1), sizes),
            strict=True,
        )
    )


def _together(start: int, end: int) -> bool:
    """Return True if these bytes of a slot's data were locked in one call."""
    return start // LOCKED == max(start, end - 1) // LOCKED


def locks(address: int, length: int, ahead: int) -> Iterator[tuple[int, int]]:
    """Yield address and length of the pieces in which the memory of a slot is locked.

    ahead: the bytes before the slot's data. Drivers of NVIDIA since 580 refuse to lock
    512 GiB in one call, and no driver copies across memory that was locked in two, so
    `groups` knows where a piece ends.
    """
    start, end = 0, ahead + LOCKED
    while start < length:
        yield address + start, min(end, length) - start
        start, end = end, end + LOCKED


def lock_pages(address: int, length: int, device: torch.device) -> bool:
    """Page-lock `length` bytes at `address`, so that accelerators can read and write
    them by themselves. Return True if they are locked.

    `device` is one of these accelerators. The log has the reason if the driver refuses,
    or if ckptd cannot lock pages for this device type. Must be called by the process
    that uses the memory, on a thread that launches no kernels: the driver keeps the last
    error of each thread, and torch raises it at the next launch. Locks nothing if the
    interpreter is ending. Raises InternalError if memory that was here before is still
    locked: the accelerator would write to that instead.
    https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
    """
    _locking.add(call := object())
    try:
        return not _ending and _lock_pages(address, length, device)
    finally:
        _locking.discard(call)


def _lock_pages(address: int, length: int, device: torch.device) -> bool:
    if not length:
        return False
    if device.type != "cuda":
        log.warning(
            "memory for copies is not page-locked, so they are slower: ckptd can page-lock for "
            "CUDA and ROCm only, not for %s",
            device.type,
        )
        return False
    with on(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        answer = runtime.cudaHostRegister(address, length, _PORTABLE)
        if int(answer) == _REGISTERED:
            runtime.cudaHostUnregister(address)
            answer = runtime.cudaHostRegister(address, length, _PORTABLE)
        error = int(answer)
        text = runtime.cudaGetErrorString(answer) if error else ""
    if error == _REGISTERED:
        raise InternalError(
            f"memory that has been unmapped is still page-locked at the address of new memory of "
            f"{length / 1e9:.1f} GB, which the device would not use: unlock memory before "
            f"unmapping it, if this process locks any, and report this otherwise"
        )
    if error:
        log.warning(
            "memory for copies could not be page-locked (CUDA error %d, %s, %.1f GB): they are "
            "slower, and each holds the call that makes it%s",
            error, text, length / 1e9, _cause(error),
        )  # fmt: skip
    return error == 0


@atexit.register
def _end() -> None:
    """Wait for locks that are under way, and let no more begin.

    Before Python 3.14, a thread that comes back from a call of torch after the
    interpreter has ended aborts the process.
    """
    global _ending
    _ending = True
    deadline = time.monotonic() + LOCK_SECONDS
    while _locking and time.monotonic() < deadline:
        time.sleep(0.01)


os.register_at_fork(after_in_child=_locking.clear)  # a child does not have these threads


def _cause(error: int) -> str:
    """Return what may have caused an error of `cudaHostRegister`, for the log, or "".

    NVIDIA's driver checks no limit of locked memory (RLIMIT_MEMLOCK): its open kernel
    module pins pages in `os_lock_user_pages`.
    """
    if error == _CAPTURING:
        return "; a CUDA graph is being captured: capture it before or after `recover`"
    if error != _NO_MEMORY:
        return ""
    limit = (
        "; whether AMD's driver counts it against RLIMIT_MEMLOCK is not known: try `ulimit -l "
        "unlimited`"
        if torch.version.hip
        else ""
    )
    return (
        f"; is there less memory than slots and buffers need, on this machine or within the "
        f"memory limit of the container?{limit}"
    )


def unlock_pages(address: int, device: torch.device) -> None:
    """Undo `lock_pages`, on a thread that launches no kernels and before the memory is
    unmapped.

    The driver keeps the old pages locked otherwise, and copies to whatever is mapped at
    the address next go to those pages.
    """
    with on(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        answer = runtime.cudaHostUnregister(address)
        error = int(answer)
        text = runtime.cudaGetErrorString(answer) if error else ""
    if error not in (0, _NOT_REGISTERED):
        log.warning("memory could not be unlocked: CUDA error %d, %s", error, text)


def unlocking(address: int, device: torch.device) -> Callable[[], None]:
    """Return a call that unlocks memory, but not in a forked child, which has no such
    mapping.
    """
    owner = os.getpid()

    def unlock() -> None:
        if os.getpid() == owner:
            unlock_pages(address, device)

    return unlock
