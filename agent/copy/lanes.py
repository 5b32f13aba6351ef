"""Copies from one accelerator into slots, on a stream of their own beside the training's. Generic over `torch.accelerator`.

A lane is begun behind what the training has enqueued so far; nothing here blocks the CPU. Small tensors that lie side by side in the slot
are first gathered on the device, since every copy across the bus costs microseconds to enqueue. Page-locking a slot's memory is
here too: without it the copies are several times slower and may hold the CPU.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch

log = logging.getLogger("ckptd.agent")

SMALL = 256 << 10  # bytes; at 25 GB/s as long on the bus as a copy takes to enqueue
GATHERED = 16 << 20  # bytes gathered on the device at once
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device's context
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered


class Mark(Protocol):
    """A place in a lane that is reached once everything before it is done: `torch.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Lane(Protocol):
    def begin(self) -> None:
        """What is copied from now on is as of now."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None: ...

    def mark(self) -> Mark: ...

    def hold_back(self, mark: Mark) -> None:
        """What the caller enqueues from now on comes after `mark`; the CPU goes on."""


class StreamLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def begin(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), self._stream:
            for run in runs(targets):
                if len(run) == 1:
                    targets[run[0]].copy_(sources[run[0]], non_blocking=True)
                else:
                    self._gather([targets[n] for n in run], [sources[n] for n in run])

    def _gather(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        first, length = targets[0].data_ptr(), sum(target.nbytes for target in targets)
        try:
            buffer = torch.empty(length, dtype=torch.uint8, device=self._device)  # freed to this stream, which has used it alone
        except torch.OutOfMemoryError:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for target, source in zip(targets, sources, strict=True):
            at = target.data_ptr() - first
            mirror = buffer[at : at + target.nbytes].view(target.dtype).as_strided(target.shape, target.stride())
            by_dtype[target.dtype][0].append(mirror)
            by_dtype[target.dtype][1].append(source)
        for mirrors, originals in by_dtype.values():
            torch._foreach_copy_(mirrors, originals)
        whole = targets[0].untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8).set_(whole, first - whole.data_ptr(), (length,), (1,))
        flat.copy_(buffer, non_blocking=True)

    def mark(self) -> Mark:
        mark: Mark = self._stream.record_event(torch.Event(self._device))
        return mark

    def hold_back(self, mark: Mark) -> None:
        torch.accelerator.current_stream(self._device).wait_event(mark)  # type: ignore[arg-type]


def capturing() -> bool:
    """Whether the caller's stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def runs(targets: Sequence[torch.Tensor]) -> list[list[int]]:
    """Numbers of targets that go together: small ones that lie side by side, in order; every other one alone."""
    found: list[list[int]] = []
    end, gathered = -1, GATHERED
    for number, target in enumerate(targets):
        start, length = target.data_ptr(), target.nbytes
        if length <= SMALL and start == end and gathered + length <= GATHERED:
            found[-1].append(number)
            gathered += length
        else:
            found.append([number])
            gathered = length if length <= SMALL else GATHERED
        end = start + length
    return found


def lock_pages(address: int, length: int) -> bool:
    """Let the accelerator read and write this memory by itself; False, with a reason in the log, where that is refused or unknown.

    To be called by the process that uses it, on any thread. https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or not length:
        return False
    if device.type != "cuda":
        log.warning("slots are not page-locked: ckptd knows how for CUDA and ROCm alone, not for %s; copies are slower", device.type)
        return False
    error = int(torch.cuda.cudart().cudaHostRegister(address, length, _PORTABLE))  # type: ignore[no-untyped-call]
    if error:
        log.warning(
            "slots could not be page-locked (CUDA error %d, %.1f GB): copies are slower and hold the training; is LimitMEMLOCK too small?",
            error, length / 1e9,
        )  # fmt: skip
    return error == 0


def unlock_pages(address: int) -> None:
    error = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    if error not in (0, _NOT_REGISTERED):
        log.warning("slots could not be unlocked: CUDA error %d", error)
