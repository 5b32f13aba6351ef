"""Orders copies from accelerators before later writes to their sources, so that a
snapshot is never torn and never stale.

Writes to the tensors of an optimizer are held back late: only that optimizer's next
step waits for their copies. Until then nothing writes to these tensors, and the copies
overlap with forward and backward. Writes to all other sources are held back at once:
the caller's stream waits for their copies. The training waits on its streams only,
never on the CPU.

The version counters of the tensors show whether anything else wrote to a late source
before the step of its own optimizer. If so, the snapshot fails, and from then on writes
to every source are held back at once. Tensors over the same memory may have counters of
their own: an operation on a DTensor does not raise that of the local tensor, nor one on
a flat parameter those of the parameters that lie in it. So the counters of all tensors
over this memory are compared, as far as the state and the optimizers have them.

Only the streams know that the copies read this memory. So the storages of the sources
are kept until the copies are done: `tensor.data = other` would free the memory, and
torch would give it to the training. A storage of a late source that has freed its
memory itself fails the snapshot, as a write does.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptd.agent.copy.lanes import CAPTURED, Lane, Mark, StreamLane, capturing
from ckptd.shared.errors import InvalidRequest, SnapshotFailed

log = logging.getLogger("ckptd.agent")


@dataclass(slots=True, eq=False)
class Transfer:
    """Copies that are under way.

    marks: a point behind each group of copies, with its lane. sources: the tensors that
    are copied, kept alive until the copies are done, and `memory` their storages. late:
    the marks that the next step of an optimizer waits for. versions: the late sources
    and the other tensors over their memory, with their version counters and the addresses
    of their storages from when their copies were enqueued. places: the storages of the
    late sources, with their addresses then. Both have only the memory to which no ordered
    write was announced so far. torn: the reason why a source may have changed while it was
    copied, or "".
    """

    marks: list[tuple[Lane, Mark]] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    memory: list[torch.UntypedStorage] = field(default_factory=list)
    late: list[tuple[Lane, Mark]] = field(default_factory=list)
    versions: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)
    places: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    torn: str = ""

    def joined(self, other: Transfer) -> Transfer:
        """Add the marks of a transfer without late copies to this one, and return this
        one.
        """
        self.marks += other.marks
        return self

    def done(self) -> bool:
        """Return True if every copy is done. Does not wait."""
        return all(mark.query() for _, mark in self.marks)

    def wait(self) -> None:
        """Wait on the CPU until every copy is done."""
        for _, mark in self.marks:
            mark.synchronize()


class Fences:
    """The ordering between one agent's copies and its training.

    Call `start` on the training thread, and later `finish` on any thread. In between,
    hooks make optimizer steps and loads of state dicts wait for late copies. `close`
    removes the hooks.
    """

    def __init__(
        self,
        lane_of: Callable[[torch.device], Lane] = StreamLane,
        is_capturing: Callable[[], bool] = capturing,
    ) -> None:
        self._lane_of, self._capturing = lane_of, is_capturing
        self._lanes: dict[torch.device, Lane] = {}
        self._under_way: list[Transfer] = []
        # A signal handler may take a snapshot while a hook runs on the same thread.
        self._lock = threading.RLock()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._graphed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
        self._may_wait = True
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def start(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        modules: Sequence[torch.nn.Module],
        captured: Iterable[torch.Tensor] = (),
        *,
        at_once: bool = False,
    ) -> Transfer:
        """Enqueue the copies of `sources` into `targets` and return the transfer, once
        everything is enqueued.

        The caller's stream waits for the copies that hold back writes at once.
        `modules` are the modules in the state: loading a state dict into one of them
        waits for the late copies. `captured` are the tensors of the state, with those
        that lie in the memory of others, and the DTensors of the local tensors. With
        `at_once`, no copy is late.

        Raises InvalidRequest while the caller's stream is captured into a graph. After
        any error, copies into the targets may be under way until `everything` is done.
        """
        if self._capturing():
            raise InvalidRequest(CAPTURED)
        memory = [tensor.untyped_storage() for tensor in sources]
        transfer = Transfer(sources=list(sources), memory=memory)
        owned = self._owned() if self._may_wait and not at_once else {}
        addresses = list(map(_storage, sources))
        by_device: dict[torch.device, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for number, source in enumerate(sources):
            late = addresses[number] in owned and not source.is_inference()
            by_device[source.device][late].append(number)
        for device, both in by_device.items():
            self._enqueue(transfer, self._lane(device), targets, *both)
        if transfer.late:
            numbers = [number for _, late_ones in by_device.values() for number in late_ones]
            transfer.places = [(memory[n], addresses[n]) for n in numbers]
            held = {addresses[n] for n in numbers}
            others = {id(tensor): tensor for place in held for tensor in owned[place]}
            others |= {id(tensor): tensor for tensor in captured}
            for source in sources:
                others.pop(id(source), None)
            transfer.versions = [(sources[n], sources[n]._version, addresses[n]) for n in numbers]
            transfer.versions += [
                (tensor, tensor._version, place)
                for tensor in others.values()
                if (place := _storage(tensor)) in held and not tensor.is_inference()
            ]
            with self._lock:
                self._under_way.append(transfer)
            for module in modules:
                if module not in self._modules:
                    self._modules[module] = module.register_load_state_dict_pre_hook(
                        _LoadHook(self._before_load)
                    )  # type: ignore[no-untyped-call]
        return transfer

    @staticmethod
    def _enqueue(
        transfer: Transfer,
        lane: Lane,
        targets: Sequence[torch.Tensor],
        at_once: list[int],
        late: list[int],
    ) -> None:
        sources = transfer.sources
        lane.begin()
        # The training waits for the first group at once, so that group is copied first.
        for numbers in (at_once, late):
            if numbers:
                lane.copy([targets[n] for n in numbers], [sources[n] for n in numbers])
                transfer.marks.append((lane, lane.mark()))
                if numbers is at_once:
                    lane.hold_back(transfer.marks[-1][1])
                else:
                    transfer.late.append(transfer.marks[-1])

    def beside(self, device: torch.device, work: Callable[[], None]) -> Transfer:
        """Run work that reads tensors, in the lane of a device, and return its
        transfer.

        Everything that the caller enqueues from now on waits for the work.
        """
        lane = self._lane(device)
        lane.begin()
        lane.run(work)
        mark = lane.mark()
        lane.hold_back(mark)
        return Transfer(marks=[(lane, mark)])

    def finish(self, transfer: Transfer) -> None:
        """Wait on the CPU until every copy is done.

        Raises SnapshotFailed if a source may have changed while it was copied.

        After that error, later transfers hold back writes to every source at once.
        """
        transfer.wait()
        with self._lock:
            self._check(transfer)
            # With those that nobody finishes, because an error or Ctrl-C came between.
            for known in [t for t in self._under_way if t is transfer or t.done()]:
                self._check(known)
                with suppress(ValueError):  # a signal handler has finished it meanwhile
                    self._under_way.remove(known)
        transfer.sources.clear()
        transfer.memory.clear()
        if transfer.torn:
            self._may_wait = False
            raise SnapshotFailed(
                f"{transfer.torn}; from now on, training waits for every copy at once"
            )

    def everything(self) -> Transfer:
        """Return a transfer that is done once all copies are done that were enqueued so
        far, in any lane.
        """
        return Transfer(marks=[(lane, lane.mark()) for lane in list(self._lanes.values())])

    def close(self) -> None:
        self._hook.remove()
        for handle in self._modules.values():
            handle.remove()

    def prepare(self, device: torch.device) -> None:
        """Make the lane of a device, with its memory on the device, unless there is one."""
        if device not in self._lanes and isinstance(lane := self._lane(device), StreamLane):
            lane.prepare()

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = self._lane_of(device)
        return self._lanes[device]

    def _owned(self) -> dict[int, list[torch.Tensor]]:
        """Return the tensors of the optimizers whose step alone writes to them, by the
        addresses of their storages.

        Optimizers that may step inside a graph are left out, because the replay of a
        graph calls no hook.
        """
        found: dict[int, list[torch.Tensor]] = defaultdict(list)
        with self._lock:  # another thread may step an optimizer for the first time
            optimizers = list(self._optimizers)
        for optimizer in optimizers:
            if optimizer not in self._graphed and not any(
                group.get("capturable") for group in optimizer.param_groups
            ):
                for tensor in _tensors(optimizer):
                    found[_storage(tensor)].append(tensor)
        found.pop(_NOWHERE, None)
        return found

    # -- hooks

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Register the optimizer, and make its step wait for the late copies.

        An optimizer whose step is captured into a graph will step again at each replay
        without this hook, so its tensors are never late.
        """
        if optimizer not in self._optimizers:
            with self._lock:
                self._optimizers.add(optimizer)
        if self._capturing():
            self._graphed.add(optimizer)
            with self._lock:
                # A stream that is being captured cannot wait, and the graph may be
                # replayed before the copies are done.
                for transfer in self._under_way:
                    if not transfer.done():
                        transfer.torn = transfer.torn or _CAPTURED_STEP
        else:
            self._hold_back(lambda: _tensors(optimizer))

    def _before_load(self, module: torch.nn.Module) -> None:
        self._hold_back(lambda: [*module.parameters(), *module.buffers()])

    def _hold_back(self, written: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Make the current streams of this thread wait for all late copies that are
        still under way. May run on any thread.

        `written` returns the tensors that are about to be written to on these streams.
        Whatever is written to them later comes behind this write, so they are no longer
        watched. The others are: another stream may write to them, which does not wait.
        """
        if self._under_way:
            with self._lock:
                ordered = set(map(_storage, written()))
                for transfer in list(self._under_way):  # a signal handler may change it
                    self._check(transfer, ordered)
                    for lane, mark in transfer.late:
                        lane.hold_back(mark)

    def _check(self, transfer: Transfer, ordered: Container[int] | None = None) -> None:
        """Mark the transfer as torn if a late source that is still watched was written to,
        or its memory was freed.

        The storages at the addresses in `ordered` are no longer watched, and without that
        argument, none is.
        """
        if any(tensor._version != version for tensor, version, _ in transfer.versions) or any(
            storage.data_ptr() != address for storage, address in transfer.places
        ):
            transfer.torn = transfer.torn or _WRITTEN
        transfer.versions = [
            known for known in transfer.versions if ordered is not None and known[2] not in ordered
        ]
        transfer.places = [
            known for known in transfer.places if ordered is not None and known[1] not in ordered
        ]


class _LoadHook:
    """A hook of a module that calls `call` with the module before a state dict is loaded."""

    def __init__(self, call: Callable[[torch.nn.Module], None]) -> None:
        self._call = call

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        self._call(module)

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace this hook, in copies and pickles of its module, by a function that does
        nothing, for any arguments. It does not need ckptd.
        """
        return getattr, ("", "format")


_NOWHERE = 0
_WRITTEN = (
    "something other than its optimizer wrote to a parameter while it was being copied, or freed "
    "its memory"
)
_CAPTURED_STEP = (
    "the step of an optimizer was captured into a CUDA graph while parameters were being copied, "
    "and a replay of the graph does not wait for the copies"
)


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, and the tensors of its state."""
    return [
        *(p for group in optimizer.param_groups for p in group["params"]),
        *(
            v
            for state in optimizer.state.values()
            for v in state.values()
            if isinstance(v, torch.Tensor)
        ),
    ]


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor, or of the local tensor of a
    DTensor, or `_NOWHERE` for a subclass that consists of other tensors.
    """
    try:
        return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())
    except RuntimeError:
        return _NOWHERE
