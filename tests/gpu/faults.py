"""Faults of ckptd that turn the checks red, in one table: `python -m tests.gpu --planted`
runs each check once with each of its faults, and all lines that the fault names must say
FAIL.

Faults with `simulated=False` can be seen on a GPU only, and have not been run yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from ckptd.agent.copy import fences, lanes, mapped_slot, numa, sealer, slots
from ckptd.agent.copy.fences import Fences, Transfer
from ckptd.agent.copy.lanes import StreamLane
from ckptd.agent.copy.sealer import Sealer
from ckptd.agent.pending import PendingSnapshot
from ckptd.agent.read import upload
from ckptd.agent.read.upload import Upload
from tests.gpu.order import KINDS
from tests.gpu.rig import Rig
from tests.gpu.simulated import SimulatedLane
from tests.gpu.table import Line, Plant, passes, run, skipped

# -- copies


def nothing_waits(rig: Rig) -> None:
    """No write of the training waits for the copies."""
    change(lane_of(rig), "hold_back", lambda self, mark: None)


def copied_in_the_call(rig: Rig) -> None:
    """The call returns only once everything is copied, so that no fence is needed."""
    original = lane_of(rig).copy

    def copy(self: Any, targets: Any, sources: Any) -> None:
        original(self, targets, sources)
        self.mark().synchronize()

    change(lane_of(rig), "copy", copy)


def a_tensor_is_skipped(rig: Rig) -> None:
    """The first tensor of each group is not copied."""
    original = Fences._enqueue

    def enqueue(
        transfer: Transfer, lane: Any, targets: Any, at_once: list[int], late: list[int]
    ) -> None:
        original(transfer, lane, targets, at_once[1:], late[1:])

    change(Fences, "_enqueue", staticmethod(enqueue))


def sealed_early(rig: Rig) -> None:
    """A slot is sealed before its marks are reached."""
    change(Transfer, "done", lambda self: True)
    change(Transfer, "wait", lambda self: None)


def the_call_waits(rig: Rig) -> None:
    """The call waits for the copies on the CPU."""
    original = Fences.start

    def start(self: Fences, *arguments: Any, **options: Any) -> Transfer:
        transfer = original(self, *arguments, **options)
        transfer.wait()
        return transfer

    change(Fences, "start", start)


def the_call_takes_long(rig: Rig) -> None:
    """The call holds the training for 8 s."""
    original = Fences.start

    def start(self: Fences, *arguments: Any, **options: Any) -> Transfer:
        time.sleep(8)
        return original(self, *arguments, **options)

    change(Fences, "start", start)


def no_versions(rig: Rig) -> None:
    """The version counters of the tensors are not compared."""
    change(Fences, "_check", lambda self, transfer, ordered=None: None)


def local_versions(rig: Rig) -> None:
    """The counters of DTensors are not compared, only those of their local tensors."""
    original = Fences._check

    def check(self: Fences, transfer: Transfer, *ordered: Any) -> None:
        transfer.versions[:] = [
            known for known in transfer.versions if not isinstance(known[0], DTensor)
        ]
        original(self, transfer, *ordered)

    change(Fences, "_check", check)


def late_anyway(rig: Rig) -> None:
    """Copies of an optimizer's tensors are late, also with hold="now"."""
    original = Fences.start
    change(Fences, "start", lambda self, *arguments, at_once=False: original(self, *arguments))


def only_storages(rig: Rig) -> None:
    """Every tensor of an optimizer must have a storage."""

    def storage(tensor: Any) -> int:
        return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())

    change(fences, "_storage", storage)


# -- page locks


def no_lock(rig: Rig) -> None:
    """Slots are said to be page-locked, and are not."""
    for module in lanes, mapped_slot:
        change(module, "lock_pages", lambda address, length, device: True)


def lock_refused(rig: Rig) -> None:
    """No slot can be page-locked."""
    for module in lanes, mapped_slot:
        change(module, "lock_pages", lambda address, length, device: False)


def slow_lock(rig: Rig) -> None:
    """Locking takes 3 s a GB longer."""
    original = lanes.lock_pages

    def lock(address: int, length: int, device: torch.device) -> bool:
        time.sleep(3e-9 * length)
        return original(address, length, device)

    change(lanes, "lock_pages", lock)


def old_lock_stays(rig: Rig) -> None:
    """Memory that was locked before at the address of a slot stays locked."""
    change(lanes, "_REGISTERED", -1)


def one_piece(rig: Rig) -> None:
    """Only the first piece of a tensor that two locks share is copied."""
    original = lanes.pieces
    change(lanes, "pieces", lambda *arguments: original(*arguments)[:1])


def other_device(rig: Rig) -> None:
    """Threads call the driver for their own current device, which is device 0."""
    change(lanes, "on", lambda device: nullcontext())


def other_node(rig: Rig) -> None:
    """Slots are on the node of device 0."""
    original = numa.home_node
    change(slots, "home_node", lambda device: original(device and torch.device(device.type, 0)))


def strict_capture(rig: Rig) -> None:
    """Other threads call the driver in the mode in which a capture refuses it."""
    change(lanes, "_exchange_capture_mode", lambda mode: mode)


# -- the memory and the bus of the device


def in_its_stream(rig: Rig) -> None:
    """Copies run on the stream of the training."""
    change(StreamLane, "_current", lambda self: nullcontext())


def no_pieces(rig: Rig) -> None:
    """Copies follow one another on the bus without a pause."""
    change(StreamLane, "_buffer", lambda self: None)


def much_memory(rig: Rig) -> None:
    """Each copy asks for all memory of the device."""
    original = StreamLane._buffer

    def buffer(self: StreamLane) -> Any:
        _, total = torch.cuda.mem_get_info(self._device)
        with suppress(torch.OutOfMemoryError):
            torch.empty(total, dtype=torch.uint8, device=self._device)
        return original(self)

    change(StreamLane, "_buffer", buffer)


# -- recovery


def buffer_reused(rig: Rig) -> None:
    """A buffer of a recovery is filled again before the copies from it are done."""
    original = Upload.fill

    def fill(self: Upload, *arguments: Any) -> int:
        if not rig.simulated:
            rig.busy(500)  # a device would be faster than the reads
        return original(self, *arguments)

    change(Upload, "fill", fill)
    change(upload._Buffer, "wait", lambda self: self.marks.clear())


def a_piece_is_skipped(rig: Rig) -> None:
    """The first piece of each buffer of a recovery is not copied."""
    original = upload._send
    change(upload, "_send", lambda buffer, pieces: original(buffer, pieces[1:]))


def pageable(rig: Rig) -> None:
    """A recovery copies from memory that is not page-locked, tensor by tensor."""
    change(Upload, "goes_to", staticmethod(lambda device: False))


def more_memory(rig: Rig) -> None:
    """A recovery needs three GB more on the device and on the host, beside the state."""
    original = Upload.fill

    def fill(self: Upload, *arguments: Any) -> int:
        more = [torch.ones(3 << 30, dtype=torch.uint8, device=d) for d in ("cpu", rig.device)]
        read = original(self, *arguments)
        more.clear()
        return read

    change(Upload, "fill", fill)


# -- the end


def joined_at_the_end(rig: Rig) -> None:
    """The interpreter joins the thread that seals."""

    def start(work: Callable[[], None], arguments: tuple[()]) -> None:
        threading.Thread(target=work, daemon=False).start()

    change(sealer, "_thread", SimpleNamespace(start_new_thread=start))


def exit_waits(rig: Rig) -> None:
    """The process waits at its end for the copies, without a limit."""
    change(sealer, "_wait_at_the_end", lambda: [found.wait() for found in sealer._all])


def close_waits(rig: Rig) -> None:
    """close() waits for the copies without a limit."""
    original = Sealer.wait
    change(Sealer, "wait", lambda self, segment=None, timeout=None: original(self, segment))


def never_told(rig: Rig) -> None:
    """A snapshot that is not copied when its agent is closed does not fail."""
    change(PendingSnapshot, "supersede", lambda self, why="": None)


def change(place: Any, name: str, value: object) -> None:
    """Replace an attribute, which must exist, until this process ends."""
    patch.object(place, name, value).start()


def lane_of(rig: Rig) -> Any:
    return SimulatedLane if rig.simulated else StreamLane


@dataclass(frozen=True, slots=True)
class Fault:
    """Faults that are planted together in a check, and its lines that they turn red.

    simulated: True if they do so on simulated lanes, too, except for lines that are
    skipped there. devices: how many GPUs that takes.
    """

    check: str
    plants: Sequence[Plant]
    red: Sequence[str]
    simulated: bool = True
    devices: int = 1

    def shows(self, settings: dict[str, Any]) -> bool:
        """Return True if the faults can turn the check red on this machine."""
        return self.simulated if settings["simulated"] else settings["devices"] >= self.devices

    def __str__(self) -> str:
        return f"{self.check}, {' and '.join(plant.__name__ for plant in self.plants)}"


FAULTS = [
    Fault("torn", [copied_in_the_call], ["without the fence (must tear)"]),
    Fault("torn", [nothing_waits], list(KINDS)),
    Fault("unlocked", [a_tensor_is_skipped], ["slots that are not locked"]),
    Fault(
        "writes",
        [no_versions, only_storages],
        ["writes to a parameter", "writes to a DTensor", "8-bit optimizer beside"],
    ),
    Fault("writes", [local_versions], ["writes to a DTensor"]),
    Fault("writes", [late_anyway], ["writes by .data after hold='now'"]),
    Fault("kill", [sealed_early, nothing_waits], ["killed in the copy"]),
    Fault("held8", [sealed_early, nothing_waits], ["bytes of 8 tensors"]),
    Fault("held320", [a_tensor_is_skipped], ["bytes of 320 tensors"]),
    Fault("held3000", [a_tensor_is_skipped], ["bytes of 3000 tensors"]),
    Fault("held30000", [a_tensor_is_skipped], ["bytes of 30000 tensors"], simulated=False),
    Fault("sealed", [a_tensor_is_skipped], ["bytes of 320 tensors"]),
    Fault("steps", [a_tensor_is_skipped], ["bytes beside steps"]),
    Fault("recover", [buffer_reused], ["recovered bits", "the next five losses"]),
    Fault("recover", [a_piece_is_skipped], ["bits of another sharding"]),
    Fault("new", [a_piece_is_skipped], ["bits of a new optimizer", "the next five losses of it"]),
    Fault("lost", [a_tensor_is_skipped], ["the next slots get the bytes"]),
    Fault("workers", [a_tensor_is_skipped], ["forked loader workers"]),
    Fault(
        "errors",
        [joined_at_the_end, close_waits, exit_waits],
        [
            "device assert after the seal",
            "close() of a hung device",
            "exit while the device hangs",
        ],
    ),
    Fault("errors", [never_told], ["its snapshot, which was not copied"]),
    Fault("held8", [the_call_waits], ["held, 8 tensors"], simulated=False),
    Fault("held320", [the_call_waits], ["held, 320 tensors"], simulated=False),
    Fault("held3000", [the_call_waits], ["held, 3000 tensors"], simulated=False),
    Fault("held30000", [the_call_waits], ["held, 30000 tensors"], simulated=False),
    Fault("one_queue", [the_call_waits], ["held, 3000 tensors"], simulated=False),
    Fault("sealed", [the_call_takes_long], ["first snapshot", "rate until sealed"], False),
    Fault(
        "steps",
        [the_call_takes_long],
        [
            "lost to a snapshot, 0.2 s",
            "lost, share of a step of 0.2 s",
            "lost to dcp.async_save, pinned",
        ],
        simulated=False,
    ),
    Fault("item", [no_pieces], ["`.item()` beside a copy"], simulated=False),
    Fault(
        "full",
        [much_memory],
        ["64 MB left, expandable segments", "24 MB left for a new agent"],
        simulated=False,
    ),
    Fault("lock", [no_lock], ["slots are pinned"], simulated=False),
    Fault("lock", [slow_lock], ["fault and lock"], simulated=False),
    Fault("bus", [no_lock], ["copies into a locked slot"], simulated=False),
    Fault("early", [lock_refused], ["a snapshot before the slots are locked"], simulated=False),
    Fault("halves", [one_piece], ["slots that are locked in pieces"], simulated=False),
    Fault("address", [old_lock_stays], ["what was locked before is unlocked"], simulated=False),
    Fault(
        "capture",
        [strict_capture],
        ["capture while slots are made", "capture while a slot is sealed"],
        simulated=False,
    ),
    Fault("recover", [pageable], ["rate of recovery"], simulated=False),
    Fault("recover", [more_memory], ["memory beside the state"], simulated=False),
    Fault("new", [more_memory], ["memory for a new optimizer"], simulated=False),
    Fault("devices", [other_device], ["no context on GPU 0"], simulated=False, devices=2),
    Fault("devices", [other_node], ["pages on the node of the GPU"], simulated=False, devices=2),
    Fault("nccl", [in_its_stream], ["NCCL beside a copy"], simulated=False, devices=2),
]
WITHOUT = {"env": "says where the script runs", "CPU time until sealed": "is a figure only"}
"""The checks and the lines without a fault, with the reason."""


def planted(fault: Fault, settings: dict[str, Any]) -> Line:
    """Run a check with faults. Return a line that says PASS if they have turned red all of
    its lines that they must.
    """
    green, seen, condition = set(fault.red), 0, ""
    with closing(run(fault.check, settings, plants=fault.plants)) as lines:
        for line in lines:
            if line.what in green and line.verdict != "PASS":
                green.remove(line.what)
                seen += line.verdict == "FAIL"
                condition = line.figure if line.verdict == "SKIP" else condition
            if not green:
                break  # what follows does not matter
    if condition and not seen and not green:
        return skipped(str(fault), condition)
    figure = f"red: {seen} lines" + (f"; not red: {sorted(green)}" if green else "")
    return passes(str(fault), seen > 0 and not green, figure, "each line turns red")
