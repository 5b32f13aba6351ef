"""What follows copies from accelerators, off the training thread: waiting until they are done, then the seal."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ckptd.agent.copy.fences import Fences, Transfer


class Sealer:
    """Does nothing, and has no thread, until the first copy from an accelerator."""

    def __init__(self) -> None:
        self._fences: Fences | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptd-seal")
        self._under_way: dict[str, Future[None]] = {}

    def carry(self, targets: list[torch.Tensor], sources: list[torch.Tensor], modules: list[torch.nn.Module]) -> Transfer:
        """Enqueue the copies; see `Fences.start`."""
        if self._fences is None:
            self._fences = Fences()
        return self._fences.start(targets, sources, modules)

    def later(self, segment: str, transfer: Transfer, seal: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """`seal` once the copies are done; `failed` with what it raises, or if they may be torn."""
        self._under_way = {name: future for name, future in self._under_way.items() if not future.done()}
        self._under_way[segment] = self._thread.submit(self._run, transfer, seal, failed)

    def finish(self, transfer: Transfer) -> None:
        """Until the copies are done; raises what is wrong with them."""
        assert self._fences is not None
        self._fences.finish(transfer)

    def _run(self, transfer: Transfer, seal: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        try:
            self.finish(transfer)
            seal()
        except Exception as error:
            failed(error)

    def drain(self) -> None:
        """Wait for every copy that was enqueued, also one that Ctrl-C has kept from being known here."""
        if self._fences is not None:
            self._fences.drain()

    def settle(self, segment: str | None = None) -> None:
        """Until nothing is under way, into that segment or at all."""
        for name in list(self._under_way) if segment is None else [segment]:
            if name in self._under_way:
                self._under_way[name].result()
                self._under_way.pop(name, None)

    def close(self) -> None:
        self._thread.shutdown()
        if self._fences is not None:
            self._fences.close()
