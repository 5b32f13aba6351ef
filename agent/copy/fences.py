"""Orders copies from accelerators before later writes to their sources, so that a
snapshot is never torn and never stale.

Writes to the tensors of an optimizer are held back late: only that optimizer's next
step waits for their copies. Until then nothing writes to these tensors, and the copies
overlap with forward and backward. Writes to all other sources are held back at once:
the caller's stream waits for their copies. The training waits on its streams only,
never on the CPU.

The version counters of the tensors show whether anything else wrote to a late source.
If so, the snapshot fails, and from then on writes to every source are held back at
once. An operation on a DTensor raises only the DTensor's own counter, not that of the
local tensor, so both are compared.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptd.agent.copy.lanes import CAPTURED, Lane, Mark, StreamLane, capturing
from ckptd.shared.errors import InvalidRequest, SnapshotFailed

log = logging.getLogger("ckptd.agent")


@dataclass(slots=True, eq=False)
class Transfer:
    """Copies that are under way.

    marks: a point behind each group of copies, with its lane. sources: the tensors that
    are copied, kept alive until the copies are done. late: the marks that the next step
    of an optimizer waits for. versions: the late sources and the DTensors that they
    belong to, with their version counters from when their copies were enqueued. torn:
    True if a source may have changed while it was copied.
    """

    marks: list[tuple[Lane, Mark]] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    late: list[tuple[Lane, Mark]] = field(default_factory=list)
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    torn: bool = False

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
        self._lock = threading.Lock()
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
        waits for the late copies. `captured` are the tensors of the state, which
        include the DTensors whose local tensors are among the sources. With `at_once`, no
        copy is late.

        Raises InvalidRequest while the caller's stream is captured into a graph. After
        any error, copies into the targets may be under way until `everything` is done.
        """
        if self._capturing():
            raise InvalidRequest(CAPTURED)
        transfer = Transfer(sources=list(sources))
        owned = self._owned() if self._may_wait and not at_once else set()
        by_device: dict[torch.device, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for number, source in enumerate(sources):
            late = _storage(source) in owned and not source.is_inference()
            by_device[source.device][late].append(number)
        for device, numbers in by_device.items():
            self._enqueue(transfer, self._lane(device), targets, *numbers)
        if transfer.late:
            held = {_storage(source) for source, _ in transfer.versions}
            transfer.versions += [
                (tensor, tensor._version)
                for tensor in captured
                if isinstance(tensor, DTensor) and _storage(tensor) in held
            ]
            with self._lock:
                self._under_way.append(transfer)
            for module in modules:
                if module not in self._modules:
                    self._modules[module] = module.register_load_state_dict_pre_hook(
                        self._before_load
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
                    transfer.versions += [(sources[n], sources[n]._version) for n in numbers]

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
                self._under_way.remove(known)
        transfer.sources.clear()
        transfer.versions.clear()
        if transfer.torn:
            self._may_wait = False
            raise SnapshotFailed(
                "something other than its optimizer wrote to a parameter while it was being "
                "copied; from now on, training waits for "
                "every copy at once"
            )

    def everything(self) -> Transfer:
        """Return a transfer that is done once every copy is, that was enqueued in any
        lane so far.
        """
        return Transfer(marks=[(lane, lane.mark()) for lane in list(self._lanes.values())])

    def close(self) -> None:
        self._hook.remove()
        for handle in self._modules.values():
            handle.remove()

    def adopt(self, lanes: dict[torch.device, Lane]) -> None:
        """Use lanes that were made before."""
        self._lanes |= lanes

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = self._lane_of(device)
        return self._lanes[device]

    def _owned(self) -> set[int]:
        """Return the addresses of the storages that only an optimizer's step writes to.

        Optimizers that may step inside a graph are left out, because the replay of a
        graph calls no hook.
        """
        found: set[int] = set()
        for optimizer in self._optimizers:
            if optimizer not in self._graphed and not any(
                group.get("capturable") for group in optimizer.param_groups
            ):
                tensors = [p for group in optimizer.param_groups for p in group["params"]]
                tensors += [
                    v
                    for state in optimizer.state.values()
                    for v in state.values()
                    if isinstance(v, torch.Tensor)
                ]
                found.update(map(_storage, tensors))
        found.discard(_NOWHERE)
        return found

    # -- hooks

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Register the optimizer, and make its step wait for the late copies.

        An optimizer whose step is captured into a graph will step again at each replay
        without this hook, so its tensors are never late.
        """
        self._optimizers.add(optimizer)
        if self._capturing():
            self._graphed.add(optimizer)
            with self._lock:
                # A stream that is being captured cannot wait, and the graph may be
                # replayed before the copies are done.
                for transfer in self._under_way:
                    transfer.torn = True
        else:
            self._hold_back()

    def _before_load(self, *_: Any) -> None:
        self._hold_back()

    def _hold_back(self) -> None:
        """Make the current streams of this thread wait for all late copies that are
        still under way. May run on any thread.
        """
        if self._under_way:
            with self._lock:
                for transfer in self._under_way:
                    self._check(transfer)
                    for lane, mark in transfer.late:
                        lane.hold_back(mark)

    def _check(self, transfer: Transfer) -> None:
        """Mark the transfer as torn if a late source was written to before it was held
        back for the first time.

        Later calls find nothing to check: writes after that first time are ordered
        behind the copies.
        """
        changed = any(source._version != version for source, version in transfer.versions)
        transfer.versions.clear()
        transfer.torn = transfer.torn or changed


_NOWHERE = 0


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor, or of the local tensor of a
    DTensor, or `_NOWHERE` for a subclass that consists of other tensors.
    """
    try:
        return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())
    except RuntimeError:
        return _NOWHERE
