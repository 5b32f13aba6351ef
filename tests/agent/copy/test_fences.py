"""Tests the order of copies and writes on an accelerator, with two queues in place of
its streams.

Enqueued operations run only when the test says so, in the worst order that the waits
allow: the training as far ahead as it can, or the copies.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptd.agent.copy.fences import Fences
from ckptd.agent.copy.lanes import GATHERED, SMALL, Mark, groups
from ckptd.agent.plan.structure import local_part
from ckptd.shared.errors import InvalidRequest, SnapshotFailed
from tests.oracle.tensors import EightBit

Operation = Callable[[], object]


class Queue:
    """A queue of operations. The first `done` of them have run."""

    def __init__(self) -> None:
        self.operations: list[Operation | FakeMark] = []
        self.done = 0

    def advance(self) -> bool:
        """Run the next operation.

        Return False if there is none, or if it waits for another queue.
        """
        if self.done == len(self.operations):
            return False
        operation = self.operations[self.done]
        if isinstance(operation, FakeMark):
            if not operation.is_reached():
                return False
        else:
            operation()
        self.done += 1
        return True


class FakeMark:
    def __init__(self, device: Device, queue: Queue) -> None:
        self._device, self._queue, self._at = device, queue, len(queue.operations)

    def is_reached(self) -> bool:
        return self._queue.done >= self._at

    def query(self) -> bool:
        return self.is_reached()

    def synchronize(self) -> None:
        self._device.run(self._queue, until=self)


class Device:
    """A device. `training` is the stream of the caller, and `side` that of the copies."""

    def __init__(self) -> None:
        self.training, self.side = Queue(), Queue()

    def run(self, first: Queue, until: FakeMark | None = None) -> None:
        """Run `first` as far as possible, then the other queue, and repeat until
        nothing is left or `until` is reached.
        """
        second = self.side if first is self.training else self.training
        while not (until is not None and until.is_reached()):
            if not first.advance() and not second.advance():
                assert until is None, "the mark is never reached: the queues wait for each other"
                return

    def does(self, operation: Operation) -> None:
        self.training.operations.append(operation)


class FakeLane:
    def __init__(self, device: Device) -> None:
        self._device = device

    def begin(self) -> None:
        self._device.side.operations.append(FakeMark(self._device, self._device.training))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._device.side.operations.append(
                lambda target=target, source=source: target.copy_(source.detach())  # type: ignore[misc]
            )

    def run(self, work: Callable[[], None]) -> None:
        self._device.side.operations.append(work)

    def mark(self) -> Mark:
        return FakeMark(self._device, self._device.side)

    def hold_back(self, mark: Mark) -> None:
        assert isinstance(mark, FakeMark)
        self._device.training.operations.append(mark)


class QueuedSGD(torch.optim.SGD):
    """An optimizer that enqueues its step, as on an accelerator."""

    def __init__(self, parameters: list[torch.Tensor], device: Device) -> None:
        super().__init__(parameters, lr=1.0)
        self._queue = device

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        def subtract() -> None:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.data.sub_(1.0)

        self._queue.does(subtract)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def fences(device: Device) -> Iterator[Fences]:
    made = Fences(lambda _: FakeLane(device), lambda: False)
    yield made
    made.close()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(params=["training first", "copies first"])
def order(request: pytest.FixtureRequest, device: Device) -> Callable[[], None]:
    return lambda: device.run(device.training if request.param == "training first" else device.side)


def stepped(parameter: torch.Tensor, device: Device) -> QueuedSGD:
    """Return an optimizer that has stepped once, so that it is known."""
    optimizer = QueuedSGD([parameter], device)
    optimizer.step()
    device.run(device.training)
    return optimizer


def test_a_copy_has_all_writes_that_were_enqueued_before(
    fences: Fences, device: Device, order: Callable[[], None]
) -> None:
    source, slot = torch.zeros(4), torch.empty(4)
    device.does(lambda: source.fill_(1))
    fences.start([slot], [source], [])
    order()
    assert slot.tolist() == [1, 1, 1, 1]


def test_a_copy_has_no_write_that_was_enqueued_after(
    fences: Fences, device: Device, order: Callable[[], None]
) -> None:
    source, slot = torch.ones(4), torch.empty(4)
    fences.start([slot], [source], [])
    device.does(lambda: source.fill_(2))  # nothing announces writes to an EMA copy or a buffer
    order()
    assert slot.tolist() == [1, 1, 1, 1]
    assert source.tolist() == [2, 2, 2, 2]


def test_a_parameter_is_copied_while_forward_and_backward_run(
    fences: Fences, device: Device
) -> None:
    parameter, slot = torch.nn.Parameter(torch.ones(4)), torch.empty(4)
    optimizer = stepped(parameter, device)
    happened = []
    transfer = fences.start([slot], [parameter], [])
    device.side.operations.append(lambda: happened.append("copied"))
    device.does(lambda: happened.append("forward"))
    optimizer.step()
    device.run(device.training)
    assert happened == ["forward", "copied"]
    assert slot.tolist() == [0, 0, 0, 0]
    assert parameter.tolist() == [-1, -1, -1, -1]
    fences.finish(transfer)


def test_a_write_that_is_not_counted_comes_after_the_copies_that_hold_back_at_once(
    fences: Fences, device: Device, order: Callable[[], None]
) -> None:
    parameter, slot = torch.nn.Parameter(torch.ones(4)), torch.empty(4)
    stepped(parameter, device)
    transfer = fences.start([slot], [parameter], [], at_once=True)
    device.does(lambda: parameter.data.copy_(torch.full((4,), 9.0)))
    order()
    assert slot.tolist() == [0, 0, 0, 0]
    fences.finish(transfer)


def test_the_next_step_comes_after_the_copy(
    fences: Fences, device: Device, order: Callable[[], None]
) -> None:
    parameter, slot = torch.nn.Parameter(torch.ones(4)), torch.empty(4)
    optimizer = stepped(parameter, device)
    transfer = fences.start([slot], [parameter], [])
    optimizer.step()
    optimizer.step()
    order()
    assert (slot.tolist(), parameter.tolist()) == ([0, 0, 0, 0], [-2, -2, -2, -2])
    fences.finish(transfer)


def test_state_of_an_optimizer_is_copied_late_and_the_rest_at_once(
    fences: Fences, device: Device
) -> None:
    parameter, other, slots = (
        torch.nn.Parameter(torch.ones(4)),
        torch.ones(4),
        [torch.empty(4) for _ in range(3)],
    )
    optimizer = stepped(parameter, device)
    moment = optimizer.state[parameter]["momentum_buffer"] = torch.ones(4)
    transfer = fences.start(slots, [parameter, moment, other], [])
    assert [len(transfer.marks), len(transfer.late), len(transfer.versions)] == [2, 1, 2]
    waits = [
        operation for operation in device.training.operations if isinstance(operation, FakeMark)
    ]
    assert len(waits) == 1
    device.run(device.training)
    assert [slot.tolist() for slot in slots] == [[0.0] * 4, [1.0] * 4, [1.0] * 4]


def test_everything_is_copied_at_once_until_an_optimizer_has_stepped(
    fences: Fences, device: Device
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    QueuedSGD([parameter], device)
    assert fences.start([torch.empty(4)], [parameter], []).late == []


def test_a_write_by_something_else_fails_the_snapshot_and_ends_late_copies(
    fences: Fences, device: Device
) -> None:
    parameter, slot = torch.nn.Parameter(torch.ones(4)), torch.empty(4)
    stepped(parameter, device)
    transfer = fences.start([slot], [parameter], [])
    with torch.no_grad():
        parameter.mul_(7)
    device.run(device.training)
    with pytest.raises(
        SnapshotFailed, match="something other than its optimizer wrote to a parameter"
    ):
        fences.finish(transfer)
    again = fences.start([slot], [parameter], [])
    assert again.late == []
    fences.finish(again)
    assert slot.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("torn_by", ["a write", "a captured step"])
def test_a_torn_copy_stays_torn_after_the_next_step(
    fences: Fences, device: Device, torn_by: str
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = stepped(parameter, device)
    transfer = fences.start([torch.empty(4)], [parameter], [])
    if torn_by == "a write":
        with torch.no_grad():
            parameter.mul_(7)
    else:
        fences._capturing = lambda: True
    optimizer.step()
    device.run(device.training)
    reason = {"a write": "something other than its optimizer", "a captured step": "CUDA graph"}
    with pytest.raises(SnapshotFailed, match=reason[torn_by]):
        fences.finish(transfer)


def test_a_captured_step_does_not_tear_copies_that_are_done(fences: Fences, device: Device) -> None:
    parameter, slot = torch.nn.Parameter(torch.ones(4)), torch.empty(4)
    optimizer = stepped(parameter, device)
    transfer = fences.start([slot], [parameter], [])
    device.run(device.side)
    fences._capturing = lambda: True
    optimizer.step()
    fences.finish(transfer)
    assert slot.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("write", [torch.Tensor.mul_, lambda p, x: p.copy_(p.detach() * x)])
def test_a_write_to_a_dtensor_fails_the_snapshot(
    fences: Fences,
    device: Device,
    mesh: DeviceMesh,
    write: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    """An in-place write to a DTensor does not change the version of its local tensor."""
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    stepped(parameter, device)
    module = torch.nn.Module()
    module.weight = parameter
    captured = module.state_dict().values()
    transfer = fences.start(
        [torch.empty(4)], [local_part(tensor) for tensor in captured], [], captured
    )
    with torch.no_grad():
        write(parameter, 7)
    device.run(device.training)
    with pytest.raises(SnapshotFailed, match="wrote to a parameter while"):
        fences.finish(transfer)


def laid_out(sizes: Sequence[tuple[int, int]]) -> tuple[torch.nn.Parameter, list[torch.Tensor]]:
    """Return a flat parameter and parameters in its memory, each with a version counter
    of its own.
    """
    flat, parts = torch.nn.Parameter(torch.ones(6)), list[torch.Tensor]()
    for begin, end in sizes:
        part = torch.nn.Parameter(torch.empty(0))
        part.data = flat.data[begin:end]
        parts.append(part)
    return flat, parts


def test_a_write_to_the_flat_parameter_of_an_optimizer_fails_the_snapshot_of_its_parts(
    fences: Fences, device: Device
) -> None:
    flat, parts = laid_out([(0, 2), (2, 6)])
    stepped(flat, device)
    sources = [part.detach() for part in parts]
    transfer = fences.start([torch.empty(2), torch.empty(4)], sources, [], sources)
    assert transfer.late
    with torch.no_grad():
        flat.mul_(7)
    device.run(device.training)
    with pytest.raises(SnapshotFailed, match="wrote to a parameter while"):
        fences.finish(transfer)


def test_a_write_to_a_part_of_memory_that_is_copied_as_a_whole_fails_the_snapshot(
    fences: Fences, device: Device
) -> None:
    """The plan copies the memory of tensors that overlap through a tensor of its own."""
    flat, parts = laid_out([(0, 4), (2, 6)])
    stepped(flat, device)
    whole = torch.empty(0, dtype=torch.uint8).set_(flat.untyped_storage(), 0, (24,), (1,))
    transfer = fences.start([torch.empty(24, dtype=torch.uint8)], [whole], [], parts)
    assert transfer.late
    with torch.no_grad():
        parts[1].mul_(7)
    device.run(device.training)
    with pytest.raises(SnapshotFailed, match="wrote to a parameter while"):
        fences.finish(transfer)


def test_memory_that_a_parameter_leaves_is_kept_until_it_is_copied(
    fences: Fences, device: Device
) -> None:
    """Otherwise torch would give it to the training, which is not behind the copies."""
    parameter = torch.nn.Parameter(torch.ones(4))
    stepped(parameter, device)
    left = parameter.untyped_storage()._weak_ref()
    transfer = fences.start([torch.empty(4)], [parameter], [])
    parameter.data = torch.zeros(4)
    assert not torch.UntypedStorage._expired(left)
    fences.finish(transfer)
    assert torch.UntypedStorage._expired(left)
    torch.UntypedStorage._free_weak_ref(left)


def test_memory_that_is_freed_before_it_is_copied_fails_the_snapshot(
    fences: Fences, device: Device
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    stepped(parameter, device)
    moment = parameter.detach()
    transfer = fences.start([torch.empty(4)], [moment], [])
    device.run(device.side)
    moment.untyped_storage().resize_(0)
    with pytest.raises(SnapshotFailed, match="or freed its memory"):
        fences.finish(transfer)


def test_only_the_dtensors_that_are_copied_late_are_watched(
    fences: Fences, device: Device, mesh: DeviceMesh, order: Callable[[], None]
) -> None:
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    buffer = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer, slots = stepped(parameter, device), [torch.empty(4), torch.empty(4)]
    transfer = fences.start(
        slots, [local_part(parameter), local_part(buffer)], [], [parameter, buffer]
    )
    optimizer.step()
    with torch.no_grad():
        parameter.add_(0)
        buffer.add_(0)
    order()
    fences.finish(transfer)
    assert [slot.tolist() for slot in slots] == [[0.0] * 4, [1.0] * 4]


def test_optimizer_state_of_several_tensors_is_passed_over(fences: Fences, device: Device) -> None:
    """A wrapper subclass has no storage, so no optimizer owns its inner tensors."""
    parameter, other = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    moment = EightBit(torch.ones(4, dtype=torch.int8), torch.ones(1))
    stepped(other, device).state[other]["momentum_buffer"] = moment
    stepped(parameter, device)
    part = moment.codes
    slots = [torch.empty(4), torch.empty_like(part)]
    transfer = fences.start(slots, [parameter, part], [])
    assert (len(transfer.marks), len(transfer.late), len(transfer.versions)) == (2, 1, 1)
    fences.finish(transfer)
    assert slots[0].tolist() == [0.0] * 4


def test_a_write_after_the_step_of_the_optimizer_fails_nothing(
    fences: Fences, device: Device
) -> None:
    parameter, slot = torch.nn.Parameter(torch.ones(4)), torch.empty(4)
    optimizer = stepped(parameter, device)
    transfer = fences.start([slot], [parameter], [])
    optimizer.step()
    device.does(lambda: parameter.data.mul_(7))
    with torch.no_grad():
        parameter.add_(0)
    device.run(device.training)
    fences.finish(transfer)
    assert slot.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("announced", ["a step", "a load"])
def test_a_write_to_the_parameter_of_another_optimizer_still_fails_the_snapshot(
    fences: Fences, device: Device, announced: str
) -> None:
    """Only the stream of the announced write waits for the copies. Another stream may write to
    the parameters of the other optimizer.
    """
    module, other = torch.nn.Linear(2, 2, bias=False), torch.nn.Parameter(torch.ones(4))
    optimizer = stepped(module.weight, device)
    stepped(other, device)
    slots = [torch.empty(2, 2), torch.empty(4)]
    transfer = fences.start(slots, [module.weight, other], [module])
    if announced == "a step":
        optimizer.step()
    else:
        module.load_state_dict({"weight": torch.zeros(2, 2)})
    with torch.no_grad():
        other.mul_(7)
    device.run(device.training)
    with pytest.raises(SnapshotFailed, match="something other than its optimizer"):
        fences.finish(transfer)


def test_load_state_dict_comes_after_the_copy(fences: Fences, device: Device) -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    stepped(module.weight, device)
    transfer = fences.start([torch.empty(2, 2)], [module.weight], [module])
    before = len(device.training.operations)
    module.load_state_dict({"weight": torch.zeros(2, 2)})
    assert [
        isinstance(operation, FakeMark) for operation in device.training.operations[before:]
    ] == [True]
    fences.finish(transfer)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_a_module_whose_load_waits_can_be_copied_and_pickled(
    fences: Fences, device: Device, copied: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    """As for an average of the weights. The copy has memory of its own, and waits for nothing."""
    module = torch.nn.Linear(2, 2, bias=False)
    stepped(module.weight, device)
    transfer = fences.start([torch.empty(2, 2)], [module.weight], [module])
    other = copied(module)
    before = len(device.training.operations)
    other.load_state_dict({"weight": torch.zeros(2, 2)})
    assert len(device.training.operations) == before
    module.load_state_dict({"weight": torch.zeros(2, 2)})
    assert len(device.training.operations) == before + 1
    fences.finish(transfer)


def test_an_optimizer_that_steps_in_a_graph_is_copied_at_once(device: Device) -> None:
    capturing = False
    fences = Fences(lambda _: FakeLane(device), lambda: capturing)
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = stepped(parameter, device)
    assert fences.start([torch.empty(4)], [parameter], []).late
    capturing = True
    optimizer.step()
    capturing = False
    assert fences.start([torch.empty(4)], [parameter], []).late == []
    fences.close()


def test_no_copy_begins_while_a_graph_is_captured(fences: Fences, device: Device) -> None:
    fences._capturing = lambda: True
    with pytest.raises(InvalidRequest, match="a CUDA graph is being captured on this thread"):
        fences.start([torch.empty(4)], [torch.ones(4)], [])
    assert device.side.operations == []


def test_a_signal_handler_may_copy_while_it_interrupts_the_hook_of_a_step(
    fences: Fences, device: Device
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    stepped(parameter, device)

    def interrupted() -> None:
        with fences._lock:
            fences.start([torch.empty(4)], [parameter], [])

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_everything_is_done_once_every_copy_is(fences: Fences, device: Device) -> None:
    fences.start([torch.empty(4)], [torch.ones(4)], [])
    everything = fences.everything()
    assert not everything.done()
    device.run(device.side)
    assert everything.done()


def test_an_optimizer_that_could_step_in_a_graph_is_copied_at_once(
    fences: Fences, device: Device
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    stepped(parameter, device).param_groups[0]["capturable"] = True
    assert fences.start([torch.empty(4)], [parameter], []).late == []


def test_sources_live_until_they_are_copied(fences: Fences, device: Device) -> None:
    source, slot = torch.ones(4), torch.empty(4)
    transfer = fences.start([slot], [source], [])
    assert transfer.sources == [source]
    fences.finish(transfer)
    assert (transfer.sources, slot.tolist()) == ([], [1, 1, 1, 1])


def test_a_copy_that_cannot_be_enqueued_waits_for_no_other(
    fences: Fences, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter, slot = torch.nn.Parameter(torch.ones(4)), torch.empty(4)
    stepped(parameter, device)
    original, calls = FakeLane.copy, []

    def second_fails(
        lane: FakeLane, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        calls.append(targets)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        original(lane, targets, sources)

    monkeypatch.setattr(FakeLane, "copy", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        fences.start([slot, torch.empty(4)], [torch.full((4,), 3.0), parameter], [])
    everything = fences.everything()
    assert (device.side.done, everything.done()) == (0, False)
    device.run(device.side)
    assert (everything.done(), slot.tolist()) == (True, [3, 3, 3, 3])


@pytest.mark.parametrize("written", [False, True])
def test_a_transfer_that_nobody_finishes_holds_no_tensor_once_it_is_done(
    fences: Fences, device: Device, written: bool
) -> None:
    """Ctrl-C may have come between. It is judged by the writes until then, nevertheless."""
    parameter = torch.nn.Parameter(torch.ones(4))
    stepped(parameter, device)
    transfer = fences.start([torch.empty(4)], [parameter], [])
    assert fences._under_way == [transfer]
    if written:
        with torch.no_grad():
            parameter.mul_(7)
    everything = fences.everything()
    device.run(device.side)
    fences.finish(everything)
    assert (fences._under_way, bool(transfer.torn)) == ([], written)
    with torch.no_grad():
        parameter.mul_(7)
    with pytest.raises(SnapshotFailed) if written else nullcontext():
        fences.finish(transfer)


def test_neighbouring_copies_are_merged() -> None:
    slot = torch.empty(4 * SMALL, dtype=torch.uint8)
    pieces = [
        slot[0:100],
        slot[100:300],
        slot[304:400],
        slot[400:500],
        slot[500 : 501 + SMALL],
        slot[501 + SMALL : 600 + SMALL],
    ]
    assert [len(group) for group in groups(pieces, pieces, GATHERED)] == [2, 2, 2]
    many = torch.empty(2 * GATHERED, dtype=torch.uint8).split(SMALL)
    assert [len(group) for group in groups(many, many, GATHERED)] == [GATHERED // SMALL] * 2
    assert [len(group) for group in groups(many, many, SMALL)] == [1] * (2 * GATHERED // SMALL)
    assert list(groups([], [], GATHERED)) == []


def test_work_beside_the_copies_reads_what_was_written_before_and_nothing_later(
    fences: Fences, device: Device, order: Callable[[], None]
) -> None:
    """This is how a sample of tensors that this rank does not copy is taken."""
    source, read = torch.zeros(4), list[float]()
    device.does(lambda: source.fill_(1))
    beside = fences.beside(torch.device("cpu"), lambda: read.extend(source.tolist()))
    device.does(lambda: source.fill_(2))
    slot = torch.empty(4)
    transfer = fences.start([slot], [source], []).joined(beside)
    order()
    assert (read, slot.tolist()) == ([1, 1, 1, 1], [2, 2, 2, 2])
    fences.finish(transfer)


def test_a_transfer_is_done_once_the_work_beside_it_is(fences: Fences, device: Device) -> None:
    done: list[bool] = []
    transfer = fences.start([torch.empty(4)], [torch.ones(4)], []).joined(
        fences.beside(torch.device("cpu"), lambda: done.append(True))
    )
    assert done == []
    fences.finish(transfer)
    assert done == [True]
