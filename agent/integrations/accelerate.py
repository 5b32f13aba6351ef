"""Saves and resumes a training loop of Hugging Face accelerate.

Tried with accelerate 1.15.0.

These private attributes of the Accelerator are read, which list what it has prepared:
`_models`, `_optimizers`, `_schedulers`, `_dataloaders` and `_custom_objects`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from ckptd.agent import default
from ckptd.agent.agent import Agent
from ckptd.agent.pending import Pending
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.schedule import Schedule
from ckptd.agent.state.tree import per_rank
from ckptd.agent.training_run import check_one_model
from ckptd.integrations.accelerate_states import StateCalls, loader_state, set_loader_state
from ckptd.integrations.framework import (
    attach_once,
    calls_of,
    check_version,
    recover_with,
    schedule_of,
    wait_durable,
)
from ckptd.integrations.loader import (
    Position,
    PositionedBatches,
    moved,
    of_first_rank,
    replay,
    size_of,
)
from ckptd.shared.errors import InvalidRequest

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("ckptd.agent")

_VERSIONS = ("1.15", "1.16")
_PREPARED = ("models", "optimizers", "schedulers", "custom_objects")


def attach(
    accelerator: Accelerator,
    *,
    every_steps: int | None = None,
    schedule: Schedule | None = None,
    save_state: bool = False,
    agent: Agent | None = None,
) -> TrainingRun:
    """Load the newest snapshot into what the Accelerator has prepared, and return the
    run that goes on from it.

    Call it on every rank, after `accelerator.prepare()` and
    `register_for_checkpointing()`. Then train on the batches of `TrainingRun.batches`.

    every_steps: take a snapshot after each optimizer step that is a multiple of it.
    schedule: a `ckptd.Schedule`, instead of `every_steps`.
    save_state: True lets the Accelerator's own `save_state` and `load_state` take and
        load snapshots, too. It may be given alone: then nothing is loaded before
        `load_state` is called, and only `save_state` takes snapshots.
    agent: the agent that saves and recovers. Default: the one of this process.

    Raises InvalidRequest for a version of accelerate with which this was not tried, for
    invalid arguments, if ckptd is attached to this Accelerator already, if nothing is
    prepared, and with DeepSpeed or Megatron-LM. Raises the errors of `Agent.recover`,
    and SnapshotFailed if another rank has not called `attach`.
    """
    check_version("accelerate", *_VERSIONS)
    alone = save_state and every_steps is None and schedule is None
    chosen = None if alone else schedule_of(schedule, every_steps, agent)
    if (kind := str(accelerator.distributed_type.value)) in ("DEEPSPEED", "MEGATRON_LM"):
        raise InvalidRequest(
            f"this Accelerator uses {kind}, which keeps the state of the optimizer to itself: "
            "attach ckptd to an Accelerator with DDP or FSDP"
        )
    if not accelerator._models:
        raise InvalidRequest("no model is prepared: call attach() after accelerator.prepare()")
    attach_once(accelerator, "Accelerator")
    run = TrainingRun(accelerator, chosen, agent if chosen is None else chosen.agent)
    if chosen is not None:
        run.load("attach()")
        run.watch()
    if save_state:
        StateCalls(accelerator, run).replace()
    elif run.recovered is not None:
        accelerator.register_load_state_pre_hook(run.refuse_load)
    _warn_of_scheduler(accelerator)
    return run


def _warn_of_scheduler(accelerator: Accelerator) -> None:
    """Warn if a learning rate scheduler is not prepared, and so begins again after a
    recovery. torch marks the `step` of an optimizer that a scheduler uses.
    """
    if accelerator._schedulers or any(
        isinstance(one, LRScheduler) for one in accelerator._custom_objects
    ):
        return
    steps = (getattr(one, "optimizer", one).step for one in accelerator._optimizers)
    if any(hasattr(step, "_wrapped_by_lr_sched") for step in steps):
        log.warning(
            "a learning rate scheduler uses this optimizer and is not prepared: it begins again "
            "after a recovery; pass it to prepare() or register_for_checkpointing()"
        )


class TrainingRun:
    """A training over the batches of a prepared loader, made by `attach`.

    step: the number of optimizer steps that are done. recovered: the snapshot that was
    loaded, or None if there was none.
    """

    def __init__(
        self, accelerator: Accelerator, schedule: Schedule | None, agent: Agent | None
    ) -> None:
        """Make a run without a snapshot. Without `schedule`, it takes none by itself."""
        self._accelerator = accelerator
        self._schedule = schedule
        self._agent = agent
        self._counts = self._count()
        self._loader: Any = None
        self._position: Position | None = None
        self._begun = self._inside = False
        self._in_step = False
        self._saved: dict[str, Any] = {}
        self._taken: Pending | None = None
        self.recovered: Recovered | None = None
        self.step = self._asked = 0

    @property
    def agent(self) -> Agent:
        """The agent that saves and recovers."""
        return self._agent or default.default_agent("attach")

    def load(self, call: str, **options: Any) -> Recovered | None:
        """Load a snapshot into what is prepared, and go on from it.

        call: the call that every rank makes, for the error text. options: those of
        `Agent.recover`. Returns None if there is no snapshot. Raises the errors of
        `Agent.recover`, and InvalidRequest while a loop of `batches` runs.
        """
        if self._inside:
            raise InvalidRequest(
                f"{call} was called inside the loop of batches(), whose position in the data "
                "cannot change: call it before the loop"
            )
        self._check_counts()
        state = self._components() | {"run": per_rank(None)}
        check_one_model(self._agent, self._accelerator._models[0])
        found = recover_with(self._agent, state, call, of_first_rank, **options)
        if found is None:
            return None
        self.recovered, self._saved = found, state["run"].value
        self.step = self._asked = self._saved["step"]
        self._taken = self._position = None
        accelerator = self._accelerator
        accelerator.step = self._saved["accumulated"]
        accelerator.project_configuration.iteration = self._saved["iteration"]
        if self._saved["position"] is None:
            states = self._saved["loaders"]
            for loader, saved in zip(accelerator._dataloaders, states, strict=False):
                set_loader_state(loader, saved)
        return found

    def watch(self) -> None:
        """Warn if an optimizer steps before the loop of `batches` begins."""
        hooks: list[Any] = []

        def stepped(*_: object) -> None:
            for hook in hooks:
                hook.remove()
            if not self._begun:
                log.warning(
                    "an optimizer steps outside of the loop of run.batches(): attach() takes no "
                    "snapshot there; write `for epoch, step, batch in run.batches(dataloader, "
                    "epochs=...)`, or attach(accelerator, save_state=True) for a loop of your own"
                )

        for one in self._accelerator._optimizers:
            inner = getattr(one, "optimizer", one)
            hooks.append(inner.register_step_post_hook(stepped))

    def refuse_load(self, models: list[Any], directory: str) -> None:
        """Raise InvalidRequest: accelerate would load another state than the run goes on
        from.
        """
        raise InvalidRequest(
            f"load_state({directory!r}) would replace step {self.step}, which attach() has "
            "loaded: leave load_state() out, or give save_state=True to attach()"
        )

    def save(self, **options: Any) -> tuple[int, int]:
        """Save the state now, and return the step and the attempt of the snapshot, once it
        is in the memory of the daemon.

        options: those of `Agent.snapshot`. Nothing is saved twice in one step of
        `batches`. Raises InvalidRequest within accumulated batches, and with a schedule
        outside of the loop of `batches`. Raises the errors of a snapshot.
        """
        if not self._accelerator.sync_gradients:
            raise InvalidRequest(
                "save_state() was called between accumulated batches, whose gradients are not "
                "saved: call it if accelerator.sync_gradients is True"
            )
        self._check_counts()
        if self._schedule is not None and self._position is None:
            raise InvalidRequest(
                "save_state() was called outside of the loop of batches(), so that the position in "
                "the data is not known: call it in this loop, or attach without every_steps and "
                "schedule if the loop is your own"
            )
        step = self.step + self._in_step
        taken = self._taken
        if taken is None or not self._inside or step > self._asked:
            known = -1 if self.recovered is None else self.recovered.step
            number = max(step, self.agent.last_step + 1, known + 1)
            take = calls_of(self._agent).snapshot
            taken = self._taken = take(self._state(step), step=number, **options)
            self._asked = max(step, self._asked)
        elif options:
            raise InvalidRequest(
                f"step {step} is saved already: give {', '.join(options)} to the first "
                "save_state() of a step"
            )
        taken.wait("sealed")
        return taken.step, taken.attempt

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
        after `attach`, if the data have another length than those of the snapshot, if
        `save_state` has saved it in another loop, and if it is called a second time.
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
        self._check_counts()
        if self.recovered is not None and self._saved["position"] is None:
            raise InvalidRequest(
                f"step {self.recovered.step} was saved by save_state() outside of a loop of "
                "batches(), so that its position in the data is not known: load a snapshot from "
                "such a loop, or name another job with CKPTD_JOB"
            )
        self._begun, self._loader = True, dataloader
        return self._batches(dataloader, epochs, steps)

    def _batches(
        self, loader: Any, epochs: int, steps: int | None
    ) -> Iterator[tuple[int, int, Any]]:
        self._inside = True
        try:
            yield from self._epochs(loader, epochs, steps)
        finally:
            self._inside = self._in_step = False
            if self._position is not None and self._position.source is not None:
                self._position.source.remove()

    def _epochs(
        self, loader: Any, epochs: int, steps: int | None
    ) -> Iterator[tuple[int, int, Any]]:
        resumed = None
        if self.recovered is not None:
            way_out = "give the same data, or name another job with CKPTD_JOB"
            self._position = Position(**self._saved["position"])
            then = self._saved["data"]
            resumed = moved(self._position, then, self._size(), self.step, way_out)
            if resumed.epoch >= epochs or (steps is not None and self.step >= steps):
                log.warning("nothing is left to do: step %d is saved", self.step)
                return
            # A warning, because Python shows nothing below it by default.
            log.warning(
                "training resumes after step %d, in epoch %d: the step was recovered from %s",
                self.step, resumed.epoch, self.recovered.source,
            )  # fmt: skip
        for epoch in range(0 if resumed is None else resumed.epoch, epochs):
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            if resumed is None:
                self._position = Position.at(loader, epoch)
                self._take()  # after the last step of the epoch before
                given = iter(loader)
            else:
                assert self.recovered is not None
                self._position, resumed = resumed, None
                given = replay(loader, self._position, self.recovered.restore_rng)
            for batch in PositionedBatches(given, self._position, loader):
                self._in_step = True
                yield epoch, self.step + 1, batch
                self._in_step = False
                if not self._accelerator.sync_gradients:
                    continue
                self.step += 1
                if self.step == steps:
                    break
                if not getattr(loader, "end_of_dataloader", False):
                    self._take()
            if self.step == steps:
                break
        else:
            self._position = Position.at(loader, epochs)
        self._finish()

    def _count(self) -> list[int]:
        return [len(getattr(self._accelerator, f"_{name}")) for name in _PREPARED]

    def _components(self) -> dict[str, Any]:
        """Return what the Accelerator has prepared, by its kind."""
        found = {name: list(getattr(self._accelerator, f"_{name}")) for name in _PREPARED}
        if (scaler := self._accelerator.scaler) is not None:
            found["scaler"] = scaler
        return found

    def _check_counts(self) -> None:
        """Raise InvalidRequest if more is prepared than when the run was made."""
        if self._count() != self._counts:
            raise InvalidRequest(
                "something was prepared or registered after attach(), which would not be saved: "
                "call attach() after everything is prepared"
            )

    def _size(self) -> dict[str, Any]:
        samples = getattr(self._loader, "total_batch_size", None)
        accumulated = self._accelerator.gradient_accumulation_steps
        return size_of(self._loader, samples or 1, accumulated)

    def _state(self, step: int) -> dict[str, Any]:
        accelerator, position = self._accelerator, self._position
        values = {
            "step": step,
            "position": None if position is None else position.values(),
            "data": None if position is None else self._size(),
            "accumulated": accelerator.step,
            "iteration": accelerator.save_iteration,
            "loaders": [loader_state(one) for one in accelerator._dataloaders],
        }
        return self._components() | {"run": per_rank(values)}

    def _take(self) -> None:
        """Take a snapshot if one is due after the step that is over."""
        if self.step <= self._asked:
            return
        self._asked = self.step
        if self._schedule is not None and self._schedule.due(self.step):
            self._taken = self._schedule.snapshot(self._state(self.step), step=self.step)

    def _finish(self) -> None:
        """Save the state after the last step, and wait until it is durable."""
        if self._schedule is not None and self.step > self._asked:
            self._asked = self.step
            take = calls_of(self._agent).snapshot
            wait_durable(take(self._state(self.step), step=self.step))
