"""Tests snapshots whose copies continue after the call, as from an accelerator: here
the copies wait until a gate is open.

The plan says that every tensor is on a device, so that all copies go through the fake
lane of `test_fences.py`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.copy import mapped_slot
from ckptd.agent.copy import sealer as sealer_module
from ckptd.agent.copy.checked_copy import CheckedCopy
from ckptd.agent.copy.fences import Fences, Transfer
from ckptd.agent.copy.lanes import Mark, StreamLane
from ckptd.agent.copy.sealer import Sealer, _Seal
from ckptd.agent.plan.kept_plan import KeptPlan, PlanInUse
from ckptd.agent.plan.layout import Layout
from ckptd.shared.errors import CkptdError, InvalidRequest, SnapshotFailed
from ckptd.shared.formats.plan import signature
from tests.agent.copy.test_fences import Device, FakeLane, FakeMark, mesh, stepped
from tests.support.daemons import Daemon

__all__ = ["mesh"]


class GatedMark(FakeMark):
    def query(self) -> bool:
        assert isinstance(self._device, Gated)
        if self._device.error is not None:
            raise self._device.error
        if self._device.gate.is_set():
            self.synchronize()
        return self.is_reached()

    def synchronize(self) -> None:
        assert isinstance(self._device, Gated)
        assert self._device.gate.wait(60)
        super().synchronize()


class Gated(Device):
    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.error: Exception | None = None

    def open_soon(self) -> None:
        threading.Timer(0.3, self.gate.set).start()


class GatedLane(FakeLane):
    def mark(self) -> Mark:
        return GatedMark(self._device, self._device.side)


@pytest.fixture
def device() -> Gated:
    return Gated()


@pytest.fixture
def agent(daemon: Daemon, device: Gated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    original = KeptPlan.renew

    def elsewhere(self: KeptPlan, *arguments: Any) -> PlanInUse:
        found = original(self, *arguments)
        layout = found.layout
        items = [msgspec.structs.replace(item, device="cuda") for item in layout.plan.items]
        plan = msgspec.structs.replace(layout.plan, items=items)
        return replace(
            found, layout=Layout(plan, plan.encode(), signature(plan.encode())), unlike=None
        )

    monkeypatch.setattr(KeptPlan, "renew", elsewhere)
    monkeypatch.setattr(KeptPlan, "valid", False)  # so that the plan is made at every snapshot
    made = Agent("job", socket=daemon.home.socket)
    made._link.handovers.sealer._fences = Fences(lambda _: GatedLane(device), lambda: False)
    yield made
    device.gate.set()
    if not made.closed:
        made.close()


def saved(daemon: Daemon, step: int) -> torch.Tensor:
    with Checkpoint.open(daemon.home.root / "job", step) as checkpoint:
        return checkpoint.tensor("w")


def test_a_slot_is_sealed_after_its_copies_with_the_values_of_the_call(
    agent: Agent, daemon: Daemon, device: Gated
) -> None:
    w = torch.arange(1000.0)
    pending = agent.snapshot({"w": w}, step=1)
    device.does(lambda: w.fill_(-1))
    assert (pending.state, pending.done) == ("staged", False)
    with pytest.raises(TimeoutError):
        pending.wait("sealed", timeout=0.1)
    device.gate.set()
    pending.wait("durable", timeout=60)
    assert torch.equal(saved(daemon, 1), torch.arange(1000.0))
    device.run(device.training)
    assert torch.equal(w, torch.full((1000,), -1.0))


def test_a_slot_is_taken_until_the_copies_are_done(
    agent: Agent, daemon: Daemon, device: Gated
) -> None:
    """The other slot holds the newest complete snapshot."""
    device.gate.set()
    agent.snapshot({"w": torch.zeros(10)}, step=0).wait("durable", timeout=60)
    device.gate.clear()
    pending, skipped = (
        agent.snapshot({"w": torch.full((10,), float(step))}, step=step, on_busy="skip")
        for step in (1, 2)
    )
    assert (pending.state, skipped.state) == ("staged", "skipped")
    device.gate.set()
    pending.wait("durable", timeout=60)
    assert torch.equal(saved(daemon, 1), torch.full((10,), 1.0))


def test_slots_are_not_replaced_during_a_copy(agent: Agent, daemon: Daemon, device: Gated) -> None:
    first = agent.snapshot({"w": torch.full((10,), 1.0)}, step=1)
    device.open_soon()
    second = agent.snapshot({"w": torch.full((1_000_000,), 2.0)}, step=2)
    for pending, size in ((first, 10), (second, 1_000_000)):
        pending.wait("durable", timeout=60)
        assert torch.equal(saved(daemon, pending.step), torch.full((size,), float(pending.step)))


def test_close_waits_for_the_copies(agent: Agent, daemon: Daemon, device: Gated) -> None:
    agent.snapshot({"w": torch.full((10,), 5.0)}, step=1, persist=False)
    device.open_soon()
    agent.close()
    assert torch.equal(saved(daemon, 1), torch.full((10,), 5.0))


def test_close_ends_in_time_though_the_device_hangs(agent: Agent, device: Gated) -> None:
    """The memory of the slots stays: copies into it may still come."""
    slots = agent._link.handovers.slots
    pending = agent.snapshot({"w": torch.full((10,), 2.0)}, step=2, persist=False)
    data = slots.get(pending._snapshot.segment).data
    with pytest.raises(SnapshotFailed, match=r"have not ended within 0\.1 s: the device hangs"):
        agent.close(timeout=0.1)
    assert (agent.closed, slots.names, pending.state) == (True, [], "staged")
    assert any(data is left for left in mapped_slot._left)


def test_a_slot_is_given_back_only_once_its_copies_are_over(
    agent: Agent, device: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another snapshot would be sealed while they write to it."""
    handovers, returned = agent._link.handovers, list[str]()
    monkeypatch.setattr(handovers.returns, "give_back", lambda slot, *_: returned.append(slot.name))
    device.error = RuntimeError("error 900")
    pending = agent.snapshot({"w": torch.full((10,), 1.0)}, step=1)
    with pytest.raises(CkptdError, match="error 900"):
        pending.wait("sealed", timeout=60)
    handovers.wait_for_threads()
    assert returned == []
    device.error = None
    device.gate.set()
    agent.snapshot({"w": torch.full((10,), 2.0)}, step=2).wait("sealed", timeout=60)


def test_a_snapshot_that_fails_ends_though_the_device_hangs(
    agent: Agent, device: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for the copies gives the slot back later."""
    handovers, returned = agent._link.handovers, list[str]()
    monkeypatch.setattr(handovers.returns, "give_back", lambda slot, *_: returned.append(slot.name))

    def fail(*_: Any) -> None:
        raise RuntimeError("no more copies")

    with monkeypatch.context() as patch:
        patch.setattr(CheckedCopy, "copy", fail)
        with pytest.raises(CkptdError, match="no more copies"):
            agent.snapshot({"w": torch.ones(10)}, step=1, on_error="raise")
    assert (returned, handovers._open) == ([], [])
    assert not handovers.wait_for_threads(0.05)
    device.gate.set()
    assert handovers.wait_for_threads(60)
    assert len(returned) == 1
    agent.snapshot({"w": torch.ones(10)}, step=2).wait("sealed", timeout=60)


def test_close_ends_in_time_after_ctrl_c_in_a_snapshot_of_a_device_that_hangs(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckedCopy, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            agent.snapshot({"w": torch.ones(10)}, step=1)
    with pytest.raises(SnapshotFailed, match=r"have not ended within 0\.1 s"):
        agent.close(timeout=0.1)
    assert agent.closed


def test_recover_waits_for_the_copies_and_counts_the_step(agent: Agent, device: Gated) -> None:
    device.gate.set()
    agent.snapshot({"w": torch.full((10,), 1.0)}, step=1).wait("durable", timeout=60)
    device.gate.clear()
    agent.snapshot({"w": torch.full((10,), 2.0)}, step=2)
    device.open_soon()
    state = {"w": torch.zeros(10)}
    recovered = agent.recover(state)
    assert recovered is not None
    assert torch.equal(state["w"], torch.full((10,), 2.0))
    assert (recovered.step, agent.attempt) == (2, 1)
    agent.snapshot({"w": torch.full((10,), 3.0)}, step=3).wait("durable", timeout=60)


def test_a_snapshot_while_a_graph_is_captured_is_refused_before_the_state_is_read(
    agent: Agent, device: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unread:
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("reads the state")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr("ckptd.agent.agent.capturing", lambda: True)
        with pytest.raises(InvalidRequest, match="a CUDA graph is being captured on this thread"):
            agent.snapshot({"x": Unread()}, step=1, on_error="raise")
    device.gate.set()
    agent.snapshot({"w": torch.zeros(10)}, step=2).wait("sealed", timeout=60)


def test_a_torn_copy_fails_only_its_snapshot(
    agent: Agent, daemon: Daemon, device: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences = agent._link.handovers.sealer._fences
    assert fences is not None
    with monkeypatch.context() as patch:
        patch.setattr(
            fences, "finish", lambda transfer: (_ for _ in ()).throw(SnapshotFailed("torn"))
        )
        torn = agent.snapshot({"w": torch.full((10,), 1.0)}, step=1)
        device.gate.set()
        with pytest.raises(SnapshotFailed, match="^torn$"):
            torn.wait("sealed", timeout=60)
    for step in (2, 3, 4):  # in both slots
        agent.snapshot({"w": torch.full((10,), float(step))}, step=step).wait("durable", timeout=60)
        assert torch.equal(saved(daemon, step), torch.full((10,), float(step)))


def test_a_write_to_a_dtensor_during_its_copy_fails_the_snapshot(
    agent: Agent, device: Gated, mesh: DeviceMesh
) -> None:
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    stepped(parameter, device)
    pending = agent.snapshot({"w": parameter}, step=1)
    with torch.no_grad():
        parameter.mul_(2)
    device.gate.set()
    with pytest.raises(SnapshotFailed, match="other than its optimizer wrote"):
        pending.wait("sealed", timeout=60)
    agent.snapshot({"w": parameter}, step=2).wait("sealed", timeout=60)


def test_a_write_of_a_device_to_pinned_memory_is_waited_for(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU reads such memory, and `non_blocking=True` returns before it is written."""
    w, asked = torch.zeros(10), list[int]()

    def is_pinned(tensors: Iterable[torch.Tensor]) -> bool:
        asked.append(len(list(tensors)))
        return True

    monkeypatch.setattr("ckptd.agent.agent.pinned", is_pinned)
    monkeypatch.setattr("ckptd.agent.agent.wait_for_streams", lambda tensors: w.add_(1))
    agent = Agent("job", socket=daemon.home.socket)
    for step in (1, 2):
        agent.snapshot({"w": w}, step=step).wait("durable", timeout=60)
        assert torch.equal(saved(daemon, step), torch.full((10,), float(step)))
    assert asked == [1]  # again only for other memory
    agent.close()


# -- the thread itself


class FakeFences:
    """In the place of Fences: `finish` waits for the gate of a transfer, and raises its
    error if it has one.
    """

    def __init__(self) -> None:
        self.gates: dict[int, threading.Event] = {}
        self.errors: dict[int, Exception] = {}
        self.closed = 0

    def transfer(self, error: Exception | None = None, *, ready: bool = True) -> Transfer:
        made = Transfer()
        self.gates[id(made)] = gate = threading.Event()
        if ready:
            gate.set()
        if error is not None:
            self.errors[id(made)] = error
        return made

    def finish(self, transfer: Transfer) -> None:
        assert self.gates[id(transfer)].wait(60)
        if id(transfer) in self.errors:
            raise self.errors[id(transfer)]

    def everything(self) -> Transfer:
        return self.transfer()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def fences() -> FakeFences:
    return FakeFences()


@pytest.fixture
def sealer(fences: FakeFences) -> Iterator[Sealer]:
    made = Sealer()
    made._fences = cast(Fences, fences)
    yield made
    for gate in fences.gates.values():
        gate.set()
    made.close()


def test_slots_are_sealed_in_order_once_their_copies_are_done(
    sealer: Sealer, fences: FakeFences
) -> None:
    done: list[str] = []
    first, second = fences.transfer(ready=False), fences.transfer()
    sealer.later("a", first, lambda: done.append("a"), lambda error: done.append(str(error)))
    sealer.later("b", second, lambda: done.append("b"), lambda error: done.append(str(error)))
    assert done == []
    fences.gates[id(first)].set()
    sealer.wait()
    assert done == ["a", "b"]


def test_torn_copies_and_seals_that_fail_are_reported(sealer: Sealer, fences: FakeFences) -> None:
    done: list[str] = []

    def fail() -> None:
        raise OSError("no seal")

    sealer.later(
        "a",
        fences.transfer(SnapshotFailed("torn")),
        lambda: done.append("a"),
        lambda error: done.append(str(error)),
    )
    sealer.later("b", fences.transfer(), fail, lambda error: done.append(str(error)))
    sealer.wait()
    assert done == ["torn", "no seal"]


def test_only_the_seal_of_the_named_segment_is_waited_for(
    sealer: Sealer, fences: FakeFences
) -> None:
    """The next one is still under way."""
    done: list[str] = []
    second = fences.transfer(ready=False)
    sealer.later("a", fences.transfer(), lambda: done.append("a"), lambda error: None)
    sealer.later("b", second, lambda: done.append("b"), lambda error: None)
    sealer.wait("a")
    sealer.wait("of no seal")
    assert done == ["a"]
    fences.gates[id(second)].set()
    sealer.wait("b")
    assert done == ["a", "b"]


def test_without_accelerators_there_are_neither_hooks_nor_a_thread() -> None:
    made = Sealer()
    idle: list[bool] = []
    made.once_idle(lambda: idle.append(True))
    made.wait()
    assert idle == [True]
    assert (made._fences, made._started.locked()) == (None, False)
    made.close()


def test_close_waits_for_the_seals_and_removes_the_hooks(
    sealer: Sealer, fences: FakeFences
) -> None:
    done: list[str] = []
    sealer.later("a", fences.transfer(), lambda: done.append("a"), lambda error: None)
    sealer.once_idle(lambda: done.append("idle"))
    assert sealer.close()
    assert (sorted(done), fences.closed) == (["a", "idle"], 1)
    assert sealer._over.is_set()


def test_an_optimizer_that_was_captured_after_prepare_is_copied_at_once(
    device: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay announces nothing, also if the optimizer steps without the graph later."""
    capturing = True
    made = Sealer()
    monkeypatch.setattr(
        sealer_module, "Fences", lambda: Fences(lambda _: GatedLane(device), lambda: capturing)
    )
    made.prepare(torch.device("xpu"))  # of no driver, so that no lane is made
    parameter, other = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizer = stepped(parameter, device)
    capturing = False
    optimizer.step()
    stepped(other, device)
    slots = [torch.empty(4), torch.empty(4)]
    transfer = made.carry(slots, [parameter, other], [])
    assert [(len(transfer.marks), len(transfer.late))] == [(2, 1)]
    device.gate.set()
    made.finish(transfer)
    made.close()


def test_the_thread_stays_on_the_device_whose_events_it_drops(
    sealer: Sealer, fences: FakeFences, monkeypatch: pytest.MonkeyPatch
) -> None:
    stayed: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(
        sealer_module, "stay_on", lambda device: stayed.append((device, threading.get_ident()))
    )
    sealer._device = torch.device("cuda:1")
    sealed: list[int] = []
    sealer.later(
        "a", fences.transfer(), lambda: sealed.append(threading.get_ident()), lambda error: None
    )
    assert sealer.wait(timeout=60)
    assert stayed == [(torch.device("cuda:1"), sealed[0])]


def test_a_forked_child_keeps_the_events_of_its_parent_and_has_no_hooks(
    device: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, torch would end the process when an event is destroyed, and refuse to wait."""
    kept: list[object] = []
    monkeypatch.setattr(sealer_module, "_of_parents", kept)
    made = Sealer()
    made._fences = Fences(lambda _: GatedLane(device), lambda: False)
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = stepped(parameter, device)
    transfers = [made.carry([torch.empty(4)], [parameter], []) for _ in range(2)]
    marks = [weakref.ref(mark) for transfer in transfers for _, mark in transfer.marks]
    made._seals = [_Seal("a", each, lambda: None, lambda error: None) for each in transfers]
    transfers.clear()
    made.forget()
    before = len(device.training.operations)
    optimizer.step()
    assert len(device.training.operations) == before + 1  # the step waits for nothing
    assert made.wait(timeout=0)
    made._fences = None
    del made, optimizer
    device.side.operations.clear()
    device.training.operations.clear()
    assert all(mark() is not None for mark in marks)


class Hung:
    """A mark of a device that hangs."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("waits without a limit")


def hung() -> Transfer:
    return Transfer(marks=[(cast(Any, None), Hung())])


def test_nobody_waits_longer_than_asked_for_a_device_that_hangs(
    sealer: Sealer, fences: FakeFences, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sealer.later("a", hung(), lambda: done.append("a"), lambda error: done.append(str(error)))
    sealer.later("b", fences.transfer(), lambda: done.append("b"), lambda error: None)
    assert not sealer.wait("b", timeout=0.01)
    monkeypatch.setattr(fences, "everything", hung)
    sealer.once_idle(lambda: done.append("given back"))
    assert [sealer.is_sealing(segment) for segment in ("a", "b", "c")] == [True, True, False]
    assert not sealer.close(timeout=0.01)
    assert (sealer._over.is_set(), done) == (True, [])
    assert not sealer.wait()  # closed, and no longer waited for
    with pytest.raises(SnapshotFailed, match="closed before the snapshot was copied"):
        sealer.finish(hung())


def test_a_seal_whose_failure_cannot_be_reported_does_not_end_the_thread(
    sealer: Sealer, fences: FakeFences
) -> None:
    done: list[str] = []

    def fail(*_: object) -> None:
        raise OSError("no seal")

    sealer.later("a", fences.transfer(), fail, fail)
    sealer.later("b", fences.transfer(), lambda: done.append("b"), lambda error: None)
    assert sealer.wait(timeout=60)
    assert done == ["b"]


def test_a_forked_child_waits_for_no_seal_of_its_parent(sealer: Sealer) -> None:
    sealer.later("a", hung(), lambda: None, lambda error: None)
    sealer.forget()
    assert sealer.wait(timeout=60)
    assert sealer.close()


@pytest.mark.usefixtures("processes")
def test_the_interpreter_ends_while_a_device_hangs() -> None:
    """The thread that waits for the device is not joined without a limit."""
    script = """
from ckptd.agent.copy import sealer
from tests.agent.copy.test_sealer import FakeFences, hung
sealer.EXIT_SECONDS = 0.1
made = sealer.Sealer()
made._fences = fences = FakeFences()
made.later("a", fences.transfer(), lambda: print("sealed"), print)
made.later("b", hung(), lambda: print("sealed"), print)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "sealed\n"
    assert "have not ended within 0.1 s, and the process ends without" in ended.stderr


def test_the_memory_of_a_lane_is_made_before_the_first_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later, the training may have filled the device."""
    prepared: list[int | None] = []

    class PreparedLane(StreamLane):
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def prepare(self) -> None:
            prepared.append(self.index)

    monkeypatch.setattr(sealer_module, "Fences", lambda: Fences(PreparedLane))
    made, second = Sealer(), torch.device("cuda", 1)
    for device in (second, second, torch.device("xpu", 0)):
        made.prepare(device)
    assert prepared == [1]
    assert made._fences is not None
    lane = made._fences._lane(second)
    made.carry([], [], [])
    made.prepare(second)
    assert (prepared, made._fences._lane(second)) == ([1], lane)
    made.close()
    capturing = Sealer()
    monkeypatch.setattr(sealer_module, "capturing", lambda: True)
    capturing.prepare(second)
    assert prepared == [1]
    capturing.close()
