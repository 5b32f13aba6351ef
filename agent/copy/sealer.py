"""Waits for copies from accelerators on a thread of its own, and seals each slot once
its copies are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ckptd.agent.copy.fences import Fences, Transfer
from ckptd.agent.copy.lanes import Lane, StreamLane, capturing


class Sealer:
    """The thread that waits for transfers from accelerators and then seals their slots.

    Call `carry`, then `later` or `finish`; `wait` or `drain` before a slot is used
    again; `close` at the end. There are no hooks before the first `carry` and no thread
    before the first `later`, so a trainer without accelerators has neither.
    """

    def __init__(self) -> None:
        self._fences: Fences | None = None
        self._prepared: dict[torch.device, Lane] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptd-seal")
        self._under_way: dict[str, Future[None]] = {}

    def prepare(self, device: torch.device) -> None:
        """Make the lane of a device, with its memory on the device.

        Later, the device may be full. Does nothing for a device that is not of CUDA or
        ROCm, or while a graph is captured.
        """
        if (
            device.type == "cuda"
            and self._fences is None
            and device not in self._prepared
            and not capturing()
        ):
            lane = StreamLane(device)
            lane.prepare()
            self._prepared[device] = lane

    def _made(self) -> Fences:
        if self._fences is None:
            fences = Fences()
            fences.adopt(self._prepared)
            self._fences = fences
        return self._fences

    def carry(
        self,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        modules: list[torch.nn.Module],
        captured: Iterable[torch.Tensor] = (),
    ) -> Transfer:
        """Enqueue the copies of `sources` into `targets`, and return the transfer.

        `Fences.start` has the whole contract.
        """
        return self._made().start(targets, sources, modules, captured)

    def beside(self, device: torch.device, work: Callable[[], None]) -> Transfer:
        """Run work in the lane of a device, and return its transfer.

        Later writes of the training wait for the work.
        """
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
        self._under_way = {
            name: future for name, future in self._under_way.items() if not future.done()
        }
        self._under_way[segment] = self._thread.submit(self._run, transfer, seal, failed)

    def finish(self, transfer: Transfer) -> None:
        """Wait until every copy of the transfer is done.

        Raises SnapshotFailed if a source may have changed while it was copied.
        """
        assert self._fences is not None
        self._fences.finish(transfer)

    def _run(
        self, transfer: Transfer, seal: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        try:
            self.finish(transfer)
            seal()
        except Exception as error:
            failed(error)

    def drain(self) -> None:
        """Wait for every copy that was ever enqueued.

        This includes copies whose transfer the caller never got because of Ctrl-C.
        """
        if self._fences is not None:
            self._fences.drain()

    def wait(self, segment: str | None = None) -> None:
        """Wait until no seal is under way for `segment`, or for any segment if it is
        None.
        """
        for name in list(self._under_way) if segment is None else [segment]:
            if name in self._under_way:
                self._under_way[name].result()
                self._under_way.pop(name, None)

    def close(self) -> None:
        self._thread.shutdown()
        if self._fences is not None:
            self._fences.close()
