"""Waits for copies from accelerators on a thread of its own, and seals each slot once
its copies are done.

A device may hang, for example in a collective that another rank has left. So the thread
asks the device again and again instead of waiting in the driver, nobody waits for the
thread without a limit at the end, and the interpreter does not join it.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ckptd.agent.copy.fences import Fences, Transfer
from ckptd.agent.copy.lanes import capturing, stay_on
from ckptd.agent.threads.flag import Flag, Waiters
from ckptd.shared.errors import SnapshotFailed

log = logging.getLogger("ckptd.agent")

EXIT_SECONDS = 30.0
"""Seconds that a process waits at its end for copies that are under way."""
_STOP_SECONDS = 1.0
_PAUSES = 0.0002, 0.005  # the shortest and the longest time between two questions, in seconds


@dataclass(slots=True, eq=False)
class _Seal:
    """The seal of a slot that is due once its copies are done."""

    segment: str
    transfer: Transfer
    seal: Callable[[], None]
    failed: Callable[[Exception], None]


class Sealer:
    """The thread that waits for transfers from accelerators and then seals their slots.

    Call `carry`, then `later` or `finish`, or `once_idle` after an error; `wait` before
    slots are replaced; `close` at the end. There are no hooks before `prepare` or the
    first `carry`, and no thread before the first `later`, so a trainer without
    accelerators has neither.
    """

    def __init__(self) -> None:
        self._fences: Fences | None = None
        self._device: torch.device | None = None  # of the last copies
        self._seals: list[_Seal] = []  # the first of them is under way
        self._changed = Waiters()
        self._started, self._over = threading.Lock(), Flag()
        self._stopped = False

    def prepare(self, device: torch.device) -> None:
        """Note from now on which optimizers step, and which of them in a graph. Make the
        lane of a device, with its memory there, because the device may be full later.

        No lane is made for a device that is not of CUDA or ROCm, or while a graph is
        captured.
        """
        fences = self._made()
        if device.type == "cuda" and not capturing():
            fences.prepare(device)

    def _made(self) -> Fences:
        if self._fences is None:
            self._fences = Fences()
        return self._fences

    def carry(
        self,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        modules: list[torch.nn.Module],
        captured: Iterable[torch.Tensor] = (),
        *,
        at_once: bool = False,
    ) -> Transfer:
        """Enqueue the copies of `sources` into `targets`, and return the transfer.

        `Fences.start` has the whole contract.
        """
        self._device = next((source.device for source in sources), self._device)
        return self._made().start(targets, sources, modules, captured, at_once=at_once)

    def beside(self, device: torch.device, work: Callable[[], None]) -> Transfer:
        """Run work in the lane of a device, and return its transfer.

        Later writes of the training wait for the work.
        """
        self._device = device
        return self._made().beside(device, work)

    def later(
        self,
        segment: str,
        transfer: Transfer,
        seal: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Call `seal` on the thread once the transfer is finished.

        Call `failed` with the error if the copies may be torn, or if `seal` raises.
        segment: the name of the filled segment, for `wait`.
        """
        self._seals.append(_Seal(segment, transfer, seal, failed))
        self._start()

    def _start(self) -> None:
        """Make sure that the thread runs: Ctrl-C may have come before its start."""
        if self._seals and not self._started.locked():
            # Runs before the handlers that were registered earlier, which may close links.
            if not _all:
                atexit.register(_wait_at_the_end)
            _all.add(self)
            _thread.start_new_thread(self._run, ())
        self._changed.notify()

    def finish(self, transfer: Transfer) -> None:
        """Wait until every copy of the transfer is done. Ctrl-C ends the wait.

        Raises SnapshotFailed if a source may have changed while it was copied, or if this
        is closed before.
        """
        assert self._fences is not None
        if not self._reached(transfer):
            raise SnapshotFailed("the agent was closed before the snapshot was copied")
        self._fences.finish(transfer)

    def _run(self) -> None:
        if not self._started.acquire(blocking=False):
            return
        try:
            while not self._stopped:
                self._changed.wait_for(lambda: self._seals or self._stopped)
                if self._seals and self._settle(self._seals[0]):
                    del self._seals[0]
                    self._changed.notify()
        finally:
            self._over.set()

    def _settle(self, due: _Seal) -> bool:
        """Seal a slot, or report why it cannot be sealed. Return False if this is closed
        before the copies are done.
        """
        try:
            if self._device is not None:
                stay_on(self._device)
            if not self._reached(due.transfer):
                return False
            self.finish(due.transfer)
            due.seal()
        except Exception as error:
            try:
                due.failed(error)
            except Exception:
                log.exception("segment %s", due.segment)
        return True

    def _reached(self, transfer: Transfer) -> bool:
        """Wait until every copy of the transfer is done. Return False if this is closed
        before.
        """
        begun = time.monotonic()
        while not transfer.done():
            # The pauses are short beside the time that the copies take, and long beside
            # that of a question, for which the training has to let this thread run.
            pause = min(max((time.monotonic() - begun) / 50, _PAUSES[0]), _PAUSES[1])
            if self._changed.wait_for(lambda: self._stopped, pause):
                return False
        return True

    def once_idle(self, give_back: Callable[[], None]) -> None:
        """Call `give_back` once all copies that were ever enqueued are done: now if they
        are, and otherwise later, on the thread.

        This includes copies whose transfer the caller never got because of Ctrl-C.
        `give_back` is not called if the device has failed and does not tell, or if this
        is closed before.
        """
        if self._fences is None:
            give_back()
            return
        try:
            everything = self._fences.everything()
            idle = everything.done()
            if idle:
                self.finish(everything)
        except Exception as error:
            _not_used_again(error)
            return
        if idle:
            give_back()
        else:
            self.later("", everything, give_back, _not_used_again)

    def is_sealing(self, segment: str) -> bool:
        """Return True if a seal is under way for this segment."""
        return any(due.segment == segment for due in list(self._seals))

    def wait(self, segment: str | None = None, timeout: float | None = None) -> bool:
        """Wait until no seal is under way for `segment`, or for any segment if it is
        None, and return True.

        Return False after `timeout` seconds, or if this is closed before.
        """

        def idle() -> bool:
            return not any(segment in (None, due.segment) for due in list(self._seals))

        self._start()
        self._changed.wait_for(lambda: self._stopped or idle(), timeout)
        return idle()

    def close(self, timeout: float | None = None) -> bool:
        """Wait for the seals that are under way, for at most `timeout` seconds, and end
        the thread. Return False if copies may still be under way.
        """
        ended = self.wait(timeout=timeout)
        self.stop()
        if self._fences is not None:
            self._fences.close()
        return ended

    def stop(self) -> None:
        """End the thread without the seals that are under way."""
        self._stopped = True
        self._changed.notify()
        if self._started.locked():
            self._over.wait(_STOP_SECONDS)

    def forget(self) -> None:
        """Forget the parent's seals and hooks. Runs in a forked child, which has no such
        thread.

        The events of the parent's copies stay: a driver cannot be used in a forked child,
        and torch ends the process if an event cannot be destroyed.
        """
        _of_parents.append((self, self._seals))
        self._stopped, self._seals = True, []
        if self._fences is not None:
            self._fences.close()
        self._over.set()


def _wait_at_the_end() -> None:
    """Wait for the copies that are under way, because their thread ends with the
    process.
    """
    deadline = time.monotonic() + EXIT_SECONDS
    for sealer in tuple(_all):
        if not sealer.wait(timeout=max(0.0, deadline - time.monotonic())):
            log.warning(
                "copies from an accelerator have not ended within %g s, and the process ends "
                "without sealing their snapshots",
                EXIT_SECONDS,
            )
        sealer.stop()


def _not_used_again(error: Exception) -> None:
    log.warning(
        "a slot is not used again, because the device does not tell whether copies into the slot "
        "are still under way: %s",
        error,
    )


_all: weakref.WeakSet[Sealer] = weakref.WeakSet()
_of_parents: list[object] = []  # in a forked child
