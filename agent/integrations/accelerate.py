"""Saves and resumes a training loop of Hugging Face accelerate.

Tried with accelerate 1.15.0.

These private attributes of the Accelerator are read, which list what it has prepared:
`_models`, `_optimizers`, `_schedulers`, `_dataloaders` and `_custom_objects`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptd.agent import default
from ckptd.agent.agent import Agent
from ckptd.agent.pending import Pending
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.schedule import Schedule
from ckptd.agent.state.tree import per_rank
from ckptd.integrations.framework import attach_once, check_version, schedule_of
from ckptd.integrations.loader import (
    Position,
    PositionedBatches,
    makes_batches,
    moved,
    replay,
    size_of,
)
from ckptd.shared.errors import CkptdError, InvalidRequest, SnapshotFailed

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("ckptd.agent")

_VERSIONS = ("1.15", "1.16")
_PREPARED = ("models", "optimizers", "schedulers", "custom_objects")
_DURABLE_SECONDS = 600.0


def attach(
    accelerator: Accelerator,
    *,
    every_steps: int | None = None,
    schedule: Schedule | None = None,
    agent: Agent | None = None,
) -> TrainingRun:
    """Load the newest snapshot into what the Accelerator has prepared, and return the
    run that goes on from it.

    Call it on every rank, after `accelerator.prepare()` and
    `register_for_checkpointing()`. Then train on the batches of `TrainingRun.batches`.

    every_steps: take a snapshot after each optimizer step that is a multiple of it.
    schedule: a `ckptd.Schedule`, instead of `every_steps`.
    agent: the agent that saves and recovers. Default: the one of this process.

    Raises InvalidRequest for a version of accelerate with which this was not tried, for
    invalid arguments, if ckptd is attached to this Accelerator already, if nothing is
    prepared, and with DeepSpeed or Megatron-LM. Raises the errors of `Agent.recover`,
    and SnapshotFailed if another rank has not called `attach`.
    """
    check_version("accelerate", *_VERSIONS)
    chosen = schedule_of(schedule, every_steps, agent)
    if (kind := str(accelerator.distributed_type.value)) in ("DEEPSPEED", "MEGATRON_LM"):
        raise InvalidRequest(
            f"this Accelerator uses {kind}, which keeps the state of the optimizer to itself: "
            "attach ckptd to an Accelerator with DDP or FSDP"
        )
    if not accelerator._models:
        raise InvalidRequest("no model is prepared: call attach() after accelerator.prepare()")
    attach_once(accelerator, "Accelerator")
    return TrainingRun(accelerator, chosen, chosen.agent)


class TrainingRun:
    """A training over the batches of a prepared loader, made by `attach`.

    step: the number of optimizer steps that are done. recovered: the snapshot that was
    loaded, or None if there was none.
    """

    def __init__(self, accelerator: Accelerator, schedule: Schedule, agent: Agent | None) -> None:
        self._accelerator = accelerator
        self._schedule = schedule
        self._given = agent
        self._counts = self._count()
        self._position: Position | None = None
        self._begun = False
        state = self._components() | {"run": per_rank(None)}
        recover = default.recover if agent is None else agent.recover
        try:
            found = recover(state, on_reshape=lambda key, values: values[0])
        except SnapshotFailed as error:
            raise SnapshotFailed(f"{error}. Every rank must call attach()") from error
        self.recovered: Recovered | None = found
        self.step = 0 if found is None else found.step
        self._saved: dict[str, Any] = state["run"].value if found is not None else {}
        self._asked = self.step
        if found is not None:
            accelerator.step = self._saved["accumulated"]

    def batches(
        self, dataloader: Any, *, epochs: int, steps: int | None = None
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield the epoch, the optimizer step and the batch, for each batch that is not
        trained yet.

        Epochs count from 0, and steps from 1: batches whose gradients are accumulated
        have the same step. A step is over when the loop asks for the next batch and the
        Accelerator has synchronized the gradients. A snapshot is then taken if one is
        due, and always after the last step. If nothing is left to do, this says so and
        yields nothing.

        dataloader: the loader, as `accelerator.prepare` has returned it.
        epochs: the number of passes over it.
        steps: end after this number of optimizer steps, even within an epoch.

        Raises InvalidRequest if the loader is not prepared, if something was prepared
        after `attach`, if the data have another length than those of the snapshot, and
        if it is called a second time.
        """
        if self._begun:
            raise InvalidRequest(
                "batches() was called already: ckptd keeps the position in one loader. Loop over "
                "other loaders, such as those of an evaluation, as before"
            )
        if not any(dataloader is known for known in self._accelerator._dataloaders):
            raise InvalidRequest(
                "this loader is not prepared: pass the one that accelerator.prepare() has returned"
            )
        if self._count() != self._counts:
            raise InvalidRequest(
                "something was prepared or registered after attach(), which would not be saved: "
                "call attach() after everything is prepared"
            )
        self._begun = True
        return self._batches(dataloader, epochs, steps)

    def _batches(
        self, loader: Any, epochs: int, steps: int | None
    ) -> Iterator[tuple[int, int, Any]]:
        resumed = None
        if self.recovered is not None:
            way_out = "give the same data, or name another job with CKPTD_JOB"
            saved = Position(**self._saved["position"])
            resumed = moved(saved, self._saved["data"], self._size(loader), self.step, way_out)
            if resumed.epoch >= epochs or (steps is not None and self.step >= steps):
                log.warning("nothing is left to do: step %d is saved", self.step)
                return
            log.info("training resumes after step %d, in epoch %d", self.step, resumed.epoch)
        for epoch in range(0 if resumed is None else resumed.epoch, epochs):
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            if resumed is None:
                self._position = Position.at(loader, epoch)
                # After the last step of the epoch before.
                self._take(loader)
                given = iter(loader)
            else:
                self._position, given = resumed, self._replayed(loader, resumed)
                resumed = None
            for batch in PositionedBatches(given, self._position, in_process=makes_batches(loader)):
                yield epoch, self.step + 1, batch
                if not self._accelerator.sync_gradients:
                    continue
                self.step += 1
                if self.step == steps:
                    break
                if not getattr(loader, "end_of_dataloader", False):
                    self._take(loader)
            if self.step == steps:
                break
        else:
            self._position = Position.at(loader, epochs)
        self._finish(loader)

    def _replayed(self, loader: Any, position: Position) -> Iterator[Any]:
        """Return the batches after the position, and set the random generators to what
        they were when the snapshot was taken.
        """
        log.info("%d batches of epoch %d are read again", position.batches, position.epoch)
        batches = replay(loader, position)
        if position.batches and self.recovered is not None:
            self.recovered.restore_rng()
        return batches

    def _count(self) -> list[int]:
        return [len(getattr(self._accelerator, f"_{name}")) for name in _PREPARED]

    def _components(self) -> dict[str, Any]:
        """Return what the Accelerator has prepared, by its kind."""
        found = {name: list(getattr(self._accelerator, f"_{name}")) for name in _PREPARED}
        if (scaler := self._accelerator.scaler) is not None:
            found["scaler"] = scaler
        return found

    def _size(self, loader: Any) -> dict[str, Any]:
        accelerator = self._accelerator
        samples = getattr(loader, "total_batch_size", None)
        return size_of(loader, samples or 1, accelerator.gradient_accumulation_steps)

    def _state(self, loader: Any) -> dict[str, Any]:
        assert self._position is not None
        values = {
            "position": self._position.values(),
            "data": self._size(loader),
            "accumulated": self._accelerator.step,
        }
        return self._components() | {"run": per_rank(values)}

    def _take(self, loader: Any) -> Pending | None:
        """Take a snapshot if one is due after the step that is over."""
        if self.step <= self._asked:
            return None
        self._asked = self.step
        if not self._schedule.due(self.step):
            return None
        return self._schedule.snapshot(self._state(loader), step=self.step)

    def _finish(self, loader: Any) -> None:
        """Save the state after the last step, and wait until it is durable."""
        if self.step <= self._asked:
            return
        self._asked = self.step
        take = default.snapshot if self._given is None else self._given.snapshot
        pending = take(self._state(loader), step=self.step)
        try:
            pending.wait("durable", _DURABLE_SECONDS)
        except (CkptdError, TimeoutError) as error:
            log.error("the last step, %d, is not durable: %s", self.step, error)
