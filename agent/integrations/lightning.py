"""ckptd for Lightning's `Trainer`: `attach(trainer, every_n_steps=50)`, then
`trainer.fit(model)` as before.

Tried with lightning 2.5.0, 2.5.6 and 2.6.6, pytorch-lightning 2.6.6, torch 2.13 and
torchdata 0.11.

A snapshot is taken between two batches, after everything that Lightning does for the
first of them: validation, schedulers and logging. Lightning's own checkpoints are taken
in the middle of this, by hooks, and a training that continues from one of them leaves
out the rest. After the last batch of an epoch the snapshot is taken once the end of the
epoch is done, too.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from ckptd.agent import default
from ckptd.agent.agent import Agent, recover_after_part
from ckptd.agent.convert.load_model import load_model
from ckptd.agent.link.arguments import Hold, job_name
from ckptd.agent.link.launch import find_place
from ckptd.agent.pending import Pending
from ckptd.agent.read.checkpoint import Checkpoint
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.schedule import Schedule
from ckptd.agent.state.capture import rng_state, set_rng_state
from ckptd.agent.state.tree import per_rank
from ckptd.agent.training_run import check_one_model
from ckptd.integrations.fit_changes import (
    FitChanges,
    accumulated,
    add_groups,
    restore,
)
from ckptd.integrations.framework import (
    attach_once,
    calls_of,
    check_version,
    schedule_of,
)
from ckptd.integrations.sampler_order import (
    SamplerOrder,
    held_states,
    order_of,
    set_held_states,
)
from ckptd.shared.errors import InvalidRequest, StructureMismatch
from ckptd.shared.location import located
from ckptd.shared.storage.locate import open_root, tags_of

log = logging.getLogger("ckptd.agent")

_LOWEST, _BELOW = "2.5", "2.7"
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
_PACKED = "a small tensor"
_SMALL = 64
"""The number of elements up to which a tensor is saved as a value."""
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before"


def attach(
    trainer: Any,
    *,
    every_n_steps: int | None = None,
    schedule: Schedule | None = None,
    agent: Agent | None = None,
) -> None:
    """Let `trainer.fit` continue from the newest snapshot, and take snapshots.

    Call this once, on every rank, before `fit`. `fit(ckpt_path="last")` does the same
    as `fit()`. With "best", it continues from the step with the best value of what a
    callback of the trainer monitors, and `validate`, `test` and `predict` load the
    model of the newest or the best step. If `fit` is given a file, the file is loaded
    only while ckptd has nothing to recover.

    trainer: a `Trainer` of `lightning` or `pytorch_lightning`.
    every_n_steps: a number of optimizer steps, from 1.
    schedule: a `Schedule` in place of `every_n_steps`.
    agent: the `Agent` to use, which stays open. Default: the agent of this process,
        which is closed when `fit` ends.

    Raises InvalidRequest if `trainer` is not a Trainer, for a version of Lightning or a
    strategy with which this was not tried, if the trainer is attached already or its
    training has begun, and for invalid arguments.
    """
    package = _package_of(trainer)
    check_version(package.partition(".")[0].replace("_", "-"), _LOWEST, _BELOW)
    chosen = schedule_of(schedule, every_n_steps, agent, called="every_n_steps")
    _check_strategy(trainer.strategy)
    if trainer.training or trainer.fit_loop.total_batch_idx >= 0:
        raise InvalidRequest(
            f"the training of this Trainer has begun, and is at step {trainer.global_step}: call "
            f"attach() before fit()"
        )
    attach_once(trainer, "Trainer")
    attachment = _Attachment(trainer, chosen)
    # The first callback: it recovers before the others see the model, and takes the
    # last snapshot before they change the model.
    trainer.callbacks.insert(0, _callback_class(package)(attachment))


def _package_of(trainer: Any) -> str:
    """Return the package of a Trainer: "lightning.pytorch" or "pytorch_lightning"."""
    for cls in type(trainer).__mro__:
        for package in ("lightning.pytorch", "pytorch_lightning"):
            if cls.__name__ == "Trainer" and cls.__module__.startswith(f"{package}."):
                return package
    raise InvalidRequest(
        f"{type(trainer).__name__} is not a Trainer of lightning or pytorch_lightning: pass the "
        f"Trainer whose fit() trains the model"
    )


def _check_strategy(strategy: Any) -> None:
    launcher = type(strategy.launcher).__name__
    if launcher == "_MultiProcessingLauncher":
        raise InvalidRequest(
            "this strategy starts the ranks from within fit(), so that they would not be attached: "
            'use strategy="ddp", or start the ranks with torchrun'
        )
    if not any(cls.__name__ in _STRATEGIES for cls in type(strategy).__mro__):
        raise InvalidRequest(
            f"ckptd was not tried with {type(strategy).__name__}: use the strategy auto, ddp, fsdp "
            f"or ModelParallelStrategy, or call ckptd.snapshot() and ckptd.recover() yourself"
        )


class _Attachment:
    """The snapshots and the recovery of one Trainer.

    Its methods are called by the callback, and by the methods of the trainer's loops
    that it wraps.
    """

    def __init__(self, trainer: Any, schedule: Schedule) -> None:
        self._trainer = trainer
        self._schedule = schedule
        self._given = schedule.agent
        self._active = False
        self._progress = _Progress(trainer)
        self._recovered: Recovered | None = None  # until the training goes on from it
        self._place: tuple[str, str] | None = None  # root and job, once they are known
        self._wanted = ""
        self._file = ""
        self._last_step = -1
        self._global_step = -1
        self._logged: dict[str, Any] = {}  # the metrics at the end of the step before
        self._left: Callable[[], None] | None = None
        self._pending: Pending | None = None
        fit_loop = trainer.fit_loop
        _wrap(trainer._checkpoint_connector, "_select_ckpt_path", self._select)
        _wrap(fit_loop, "_load_combined_loader_states", self._loaders_are_made)
        _wrap(fit_loop, "on_advance_end", self._epoch_ends)
        _wrap(fit_loop.epoch_loop, "reset", self._batches_are_reset)
        _wrap(fit_loop.epoch_loop, "on_run_start", self._batches_begin)
        _wrap(fit_loop.epoch_loop, "on_advance_end", self._batch_ends)

    # -- recovering

    def _select(
        self, original: Callable[..., Any], state_fn: Any, ckpt_path: Any, **options: Any
    ) -> Any:
        """Return the file that Lightning loads, or None if ckptd has what is asked for."""
        self._wanted = ckpt_path if ckpt_path in ("last", "best") else ""
        if self._wanted:
            return None
        found = original(state_fn, ckpt_path, **options)
        self._file = "" if found is None else str(found)
        return found

    def fit_starts(self) -> None:
        """Recover the newest or the best snapshot."""
        trainer = self._trainer
        if trainer.fast_dev_run:
            log.warning("fast_dev_run: ckptd recovers and saves nothing")
            return
        agent = self._given or default.default_agent("attach")
        self._place = agent.root, agent.job
        step = self._best()[0] if self._wanted == "best" else None
        self._active = True
        self._progress.begin()
        check_one_model(self._given, trainer.lightning_module)
        recovered = self._recover(agent, step)
        say = import_module(f"{_package_of(trainer)}.utilities.rank_zero").rank_zero_info
        if recovered is None:
            if not self._file:
                say("ckptd: there is nothing to recover, the training starts from the beginning")
            return
        self._progress.apply()
        self._note_metrics()
        self._recovered = recovered
        self._last_step = recovered.step
        self._global_step = trainer.global_step
        if self._inside_epoch and trainer.fit_loop._combined_loader is not None:
            # `configure_optimizers` has asked for the number of steps, for which Lightning
            # makes the loaders and their iterators before there is a position.
            trainer.fit_loop._load_combined_loader_states()
            iter(trainer.fit_loop._data_fetcher)
        if self._file:
            trainer._checkpoint_connector._loaded_checkpoint = {}
            log.warning(
                "the training goes on from step %d, which ckptd has saved: ckpt_path=%s is read "
                "and not used; name another job with CKPTD_JOB to begin with that file",
                recovered.step,
                self._file,
            )
        if not self._is_finished(recovered.step):
            say(f"ckptd: the training goes on from step {recovered.step}, from {recovered.source}")

    def _recover(self, agent: Agent, step: int | None) -> Recovered | None:
        """Recover a step, or the newest snapshot.

        Parameter groups that hooks had added by then are added first.
        """
        state, progress = self._state(), self._progress
        try:
            return agent.recover(state, step=step, on_reshape=progress.reshape)
        except StructureMismatch as error:
            mismatch = error

        def with_groups() -> dict[str, Any]:
            if not progress.add_groups():
                raise mismatch
            return self._state()

        part = {"lightning": progress}
        return recover_after_part(
            agent, state, part, with_groups, step=step, on_reshape=progress.reshape
        )

    def _is_finished(self, step: int) -> bool:
        """Return True, and say so, if the snapshot is the end of the training."""
        trainer = self._trainer
        epochs, limit = trainer.fit_loop.epoch_progress.current.processed, trainer.max_epochs
        reached = ""
        if -1 < trainer.max_steps <= trainer.global_step:
            reached = f"max_steps={trainer.max_steps} is reached"
        elif limit is not None and -1 < limit <= epochs:
            reached = f"max_epochs={limit} is reached"
        elif trainer.should_stop:
            reached = "a callback has stopped the training"
        if not reached:
            return False
        log.warning("nothing is left to do: step %d is saved, and %s", step, reached)
        for callback in trainer.callbacks:
            if _averages_of(callback):
                # The snapshot has the weights before this call at the end of the run.
                callback.on_train_end(trainer, trainer.lightning_module)
        return True

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        averages = {
            f"{number}": value
            for number, callback in enumerate(trainer.callbacks)
            for value in _averages_of(callback)
        }
        return {
            "model": trainer.strategy.model,
            "optimizers": [one for one in trainer.optimizers if one.param_groups],
            "lightning": self._progress,
            **({"averages": averages} if averages else {}),
        }

    def train_starts(self) -> None:
        """Restore what the start of `fit` has reset."""
        if self._recovered is not None:
            self._progress.train_starts()

    def epoch_starts(self) -> None:
        """Continue with the random numbers of the snapshot, if it was taken at the end
        of an epoch.
        """
        if self._recovered is not None:
            self._progress.set_generators()
            self._go_on(self._recovered)

    def _go_on(self, recovered: Recovered) -> None:
        self._progress.restore_changes()
        recovered.restore_rng()
        self._recovered = None

    def _loaders_are_made(self, original: Callable[[], None]) -> None:
        original()
        if not self._trainer.fast_dev_run:
            self._progress.data.begin(
                self._trainer.fit_loop._combined_loader.flattened,
                self._progress if self._inside_epoch else None,
            )

    @property
    def _inside_epoch(self) -> bool:
        """True until the training goes on from a snapshot that was taken inside an epoch."""
        return self._recovered is not None and self._progress.inside_epoch

    def _batches_are_reset(self, original: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            if self._inside_epoch:
                warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            original()

    def _batches_begin(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Begin the batches of an epoch, or go on with the batch after the snapshot."""
        data, recovered = self._progress.data, self._recovered
        if self._active and not self._inside_epoch:
            data.note_generators()
        if recovered is not None and self._inside_epoch:
            data.load_again(fetcher)
        original(fetcher)
        if recovered is not None and self._inside_epoch:
            # The snapshot was taken between two batches: no batch and no validation has
            # to be finished. The fit loop would leave out schedulers at the end of an
            # epoch that it restarts.
            _set_in_loops(self._trainer.fit_loop, "_restarting", False)
            self._progress.restore_results()
            self._go_on(recovered)

    # -- saving

    def _batch_ends(self, original: Callable[[Any], None], fetcher: Any) -> None:
        try:
            original(fetcher)
        except SystemExit as error:
            if type(error).__name__ == "SIGTERMException" and self._trainer.world_size == 1:
                if self._trainer.validating:
                    log.warning(
                        "SIGTERM came during a validation, which a snapshot cannot go on with: the "
                        "newest snapshot is that of step %d",
                        self._last_step,
                    )
                else:
                    self._after_batch(last=False)
                    self._take(self._step, now=True)
            raise
        loop, trainer = self._trainer.fit_loop.epoch_loop, self._trainer
        stopped = trainer.should_stop and trainer.fit_loop._can_stop_early
        self._after_batch(last=loop._is_training_done or stopped)

    def _after_batch(self, *, last: bool) -> None:
        """Take a snapshot if one is due, or later if this is the last batch of its
        epoch.
        """
        if not self._active:
            return
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        self._progress.data.forget_before(loop.batch_progress.current.completed)
        if loop._should_accumulate() or trainer.global_step == self._global_step:
            return  # the gradients are not saved
        self._global_step = trainer.global_step
        self._progress.inside_epoch = not last
        if last:
            # Callbacks that come next may put average weights into the model.
            self._left = partial(self._take, self._step, hold="now")
        else:
            self._take(self._step)
            self._note_metrics()

    def _epoch_ends(self, original: Callable[[], None]) -> None:
        original()
        if self._left is not None:
            take, self._left = self._left, None
            take()
            self._note_metrics()

    @property
    def _step(self) -> int:
        """The number of batches after which an optimizer has stepped, which loggers call
        the step, too.
        """
        return int(self._trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _take(self, step: int, *, now: bool = False, hold: Hold = "late") -> None:
        state, metrics = self._state(), self._metrics()
        if now:
            if step > self._last_step:
                take = calls_of(self._given).snapshot
                self._pending = take(state, step=step, metrics=metrics, hold="now")
                self._last_step = step
        else:
            taken = self._schedule.snapshot(state, step=step, metrics=metrics, hold=hold)
            if taken is not None:
                self._pending = taken
                self._last_step = step

    def _metrics(self) -> dict[str, float]:
        """Return the values that were logged in this step.

        Values of an earlier validation belong to the weights of an earlier step.
        """
        return {
            name: float(value)
            for name, value in self._trainer._logger_connector._callback_metrics.items()
            if value is not self._logged.get(name)
            and (not isinstance(value, torch.Tensor) or value.numel() == 1)
        }

    def _note_metrics(self) -> None:
        self._logged = dict(self._trainer._logger_connector._callback_metrics)

    def train_ends(self) -> None:
        """Save the last step."""
        if self._active and self._step > self._last_step:
            self._progress.inside_epoch = False
            self._take(self._step, now=True)

    def fit_ends(self) -> None:
        """Make the last snapshot durable."""
        if not self._active:
            return
        self.stop()
        if self._given is None:
            default.close()
        elif self._pending is not None:
            self._pending.wait()

    def stop(self) -> None:
        """Take no more snapshots, and give the loaders their samplers back."""
        self._active = False
        self._recovered = self._left = None
        self._progress.data.end()
        self._trainer.fit_loop.epoch_loop.val_loop._restarting = False

    # -- reading

    def evaluation_starts(self) -> None:
        """Load the model of the newest or the best checkpoint, if it was asked for."""
        if not self._wanted or self._trainer.state.fn == "fit":
            return
        root, job = self._found_place()
        tag = self._best()[1] if self._wanted == "best" else "newest"
        place = str(located(root) / job)
        load_model(self._trainer.strategy.model, place, which=tag, only="model")
        log.info("the model is that of %s/%s", job, tag)

    def _found_place(self) -> tuple[str, str]:
        """Return the root and the job, without beginning an attempt."""
        if self._given is not None:
            return self._given.root, self._given.job
        if self._place is None:
            place = find_place(None, None)
            channel = place.connect()
            channel.close()
            self._place = channel.welcome.root, job_name(None, private=place.private)
        return self._place

    def _best(self) -> tuple[int | None, str]:
        """Return the step and the tag of the checkpoint with the best value."""
        monitor, mode = self._monitored()
        root, job = self._found_place()
        place = located(root) / job
        found = []
        for tag in tags_of(open_root(located(root)), job):
            with Checkpoint.open(place, tag) as one:
                value = one.metrics.get(monitor)
                if value is not None and value == value and one.step is not None:
                    better = -value if mode == "max" else value
                    found.append((better, -one.attempt, -one.step, tag))
        if not found:
            raise InvalidRequest(
                f'ckpt_path="best": no checkpoint in {place} has a value of {monitor!r}; let '
                f'snapshots fall on the steps that log it, or use ckpt_path="last"'
            )
        best = min(found)
        return -best[2], best[3]

    def _monitored(self) -> tuple[str, str]:
        """Return the name of the value that a callback monitors, and "min" or "max"."""
        callbacks = [*self._trainer.checkpoint_callbacks, *self._trainer.callbacks]
        for callback in callbacks:
            if getattr(callback, "monitor", None):
                return callback.monitor, getattr(callback, "mode", "min")
        raise InvalidRequest(
            'ckpt_path="best": no callback of the Trainer monitors a value; add '
            'ModelCheckpoint(monitor=...) or EarlyStopping(monitor=...), or use ckpt_path="last"'
        )


class _Progress:
    """The progress of the Trainer beside the model and the optimizers, as a value of
    the state.

    inside_epoch: True if the snapshot is taken inside an epoch, and False at its end.
    reshaped: True if the number of ranks has changed since the recovered snapshot.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.inside_epoch = False
        self.reshaped = False
        self.data = _Data()
        self._changes = FitChanges()
        self._found: dict[str, Any] = {}

    def begin(self) -> None:
        """Begin a call of `fit`."""
        self.reshaped = False
        self._found = {}
        self._changes.begin(self._trainer)

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        loaders = loops["state_dict"].pop("combined_loader", [])
        connector, current = trainer._logger_connector, trainer.fit_loop.epoch_loop.batch_progress
        return {
            "loops": loops,
            "inside_epoch": self.inside_epoch,
            "should_stop": trainer.should_stop,
            "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
            "precision": trainer.precision_plugin.state_dict(),
            "rank": per_rank(
                _packed(
                    {
                        "loaders": loaders,
                        # A value that a scheduler monitors may differ between ranks.
                        "schedulers": [
                            one.scheduler.state_dict() for one in trainer.lr_scheduler_configs
                        ],
                        "data": self.data.state(current.current.completed),
                        "callbacks": {
                            one.state_key: held
                            for one in trainer.callbacks
                            if (held := one.state_dict())
                        },
                        "hooks": self._hooks(loops),
                        "changes": self._changes.state(trainer),
                        "callback_metrics": dict(connector._callback_metrics),
                        "logged_metrics": dict(connector._logged_metrics),
                        "progress_bar_metrics": dict(connector._progress_bar_metrics),
                        "results": self._results() if self.inside_epoch else {},
                        "metrics": _metric_states(trainer.lightning_module),
                    }
                )
            ),
        }

    def _hooks(self, loops: Any) -> dict[str, Any]:
        """Return what the hooks of the user's classes save."""
        given = self._checkpoint(loops)
        made = dict(given)
        for owner, arguments in self._owners("on_save_checkpoint"):
            owner.on_save_checkpoint(*arguments, made)
        datamodule = self._trainer.datamodule
        return {
            "datamodule": {} if datamodule is None else datamodule.state_dict(),
            "checkpoint": {key: value for key, value in made.items() if key not in given},
        }

    def _checkpoint(self, loops: Any) -> dict[str, Any]:
        """Return what a hook finds in the checkpoint of Lightning."""
        trainer = self._trainer
        module = trainer.lightning_module
        used = any(True for _ in self._owners("on_save_checkpoint", "on_load_checkpoint"))
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": import_module(_package_of(trainer)).__version__,
            "state_dict": module.state_dict() if used else {},
            "loops": {"fit_loop": loops},
        }

    def _owners(self, *hooks: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yield the objects whose class has one of the hooks, and the first arguments of
        the hook.

        Averages of weights are saved as they are, because their hook would exchange
        them with the weights.
        """
        trainer = self._trainer
        package = _package_of(trainer)
        base = import_module(f"{package}.callbacks").Callback
        module = trainer.lightning_module
        for callback in trainer.callbacks:
            if not _averages_of(callback) and _overrides(callback, base, hooks):
                yield callback, (trainer, module)
        if _overrides(module, import_module(package).LightningModule, hooks):
            yield module, ()

    def _results(self) -> dict[str, Any]:
        """Return the sums of the values that were logged in this epoch."""
        return {
            key: {name: getattr(one, name) for name in _SUMS if hasattr(one, name)}
            for key, one in self._trainer.fit_loop.epoch_loop._results.items()
            if one.is_tensor and one.meta.on_epoch and not one.has_reset
        }

    # -- recovering

    def reshape(self, key: str, values: list[Any]) -> Any:
        """Return the value of another rank, because the number of ranks has changed."""
        self.reshaped = True
        return values[min(self._trainer.global_rank, len(values) - 1)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a recovered state for `apply`."""
        device = self._trainer.strategy.root_device
        self._found = {**state, "rank": _unpacked(state["rank"], device)}

    def apply(self) -> None:
        """Bring the recovered state into the trainer."""
        trainer, found = self._trainer, self._found
        rank, loops = found["rank"], trainer.fit_loop
        self.inside_epoch = found["inside_epoch"]
        trainer.should_stop = found["should_stop"]
        trainer.precision_plugin.load_state_dict(found["precision"])
        for config, held in zip(trainer.lr_scheduler_configs, rank["schedulers"], strict=True):
            config.scheduler.load_state_dict(held)
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            setattr(trainer._logger_connector, f"_{name}", dict(rank[name]))
        modules = dict(trainer.lightning_module.named_modules())
        for name, held in () if self.reshaped else rank["metrics"].items():
            _load_metric(modules[name], held)
        for callback in trainer.callbacks:
            if callback.state_key in rank["callbacks"]:
                callback.load_state_dict(rank["callbacks"][callback.state_key])
                if hasattr(callback, "_internal_optimizer_metadata"):
                    # A BaseFinetuning would put the settings with which groups were added in
                    # place of those that are recovered.
                    callback._restarting = False
        hooks = rank["hooks"]
        if trainer.datamodule is not None and hooks["datamodule"]:
            trainer.datamodule.load_state_dict(hooks["datamodule"])
        made = {**self._checkpoint(found["loops"]), **hooks["checkpoint"]}
        for owner, arguments in self._owners("on_load_checkpoint"):
            owner.on_load_checkpoint(*arguments, made)
        loops.load_state_dict(found["loops"])
        if not self.inside_epoch:
            # Lightning would restart an epoch that has ended.
            _set_in_loops(loops, "_restarting", False)
            _set_in_loops(loops, "_resuming_from_checkpoint", False)
            # No sanity check: it would reset what was recovered.
            loops.epoch_loop.val_loop._restarting = True
        elif not self.reshaped:
            loops._combined_loader_states_to_load = rank["loaders"]

    def position(self, samples_per_batch: int, states: list[dict[str, Any]]) -> tuple[int, bool]:
        """Return the number of batches of this epoch that were trained on, and True if
        the batches are those of the run that was saved.

        If the number of samples in a batch has changed, the position is rounded down,
        and the loops are set to it.
        """
        loop = self._trainer.fit_loop.epoch_loop
        batches = int(loop.batch_progress.current.completed)
        samples = states[0].get("samples", batches) if states else batches
        if not states or "began" not in states[0] or samples == batches * samples_per_batch:
            return batches, not self.reshaped
        every = accumulated(self._trainer, self._saved_changes())
        position = samples // samples_per_batch // every * every
        log.warning(
            "the batch size or the number of ranks has changed: the position in the epoch is kept "
            "in samples, and sample %d is batch %d now%s",
            samples,
            position,
            f"; {rest} samples are trained on twice"
            if (rest := samples - position * samples_per_batch)
            else "",
        )
        current = loop.batch_progress.current
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, position)
        return position, False

    def add_groups(self) -> bool:
        """Add the parameter groups that hooks had added by the snapshot, and return True
        if there are some.
        """
        return add_groups(self._trainer, self._saved_changes())

    def _saved_changes(self) -> dict[str, Any]:
        """Return the changes of the recovered snapshot, which earlier versions did not
        save.
        """
        return dict(self._found.get("rank", {}).get("changes", {}))

    def restore_changes(self) -> None:
        """Make the changes again that hooks had made by the snapshot.

        Hooks at the start of the training have run: Lightning's check that nothing
        accumulates before its scheduler does is one of them.
        """
        restore(self._trainer, self._saved_changes())

    def saved_data(self) -> list[dict[str, Any]]:
        """Return the states of the loaders of the recovered snapshot."""
        return list(self._found["rank"]["data"])

    def set_generators(self) -> None:
        """Set the generators of the loaders as they were at the end of the epoch."""
        self.data.set_generators(self.saved_data())

    def train_starts(self) -> None:
        """Set what only the start of the training knows or resets."""
        loops = self._trainer.fit_loop
        loops._last_train_dl_reload_epoch = self._found["reloaded"]
        if not self.inside_epoch:
            loops.epoch_loop.val_loop._restarting = False

    def restore_results(self) -> None:
        """Restore the sums of the values that were logged in this epoch."""
        if self.reshaped:
            log.warning(
                "the number of ranks has changed: means over this epoch begin with the next batch"
            )
            return
        rank, trainer = self._found["rank"], self._trainer
        waiting = dict(rank["results"])
        results = trainer.fit_loop.epoch_loop._results

        def first_update(original: Callable[..., None], key: str, *arguments: Any) -> None:
            # A result has no state before its value is logged: only that call knows how
            # its values are reduced.
            for name, value in waiting.pop(key, {}).items():
                held = getattr(results[key], name)
                setattr(results[key], name, value.to(held.device))
            original(key, *arguments)

        _wrap(results, "update_metrics", first_update)
        # As after the first batch of an epoch, at which results are reset.
        trainer._logger_connector._first_loop_iter = False


_SUMS = ("value", "cumulated_batch_size")


class _Data:
    """The positions in the loaders of the current epoch.

    If each loader takes its samples by number, the sampler repeats its order, and what
    was trained on is not loaded again. Loaders that save their state are Lightning's
    matter. Of all others the batches are loaded again.
    """

    def __init__(self) -> None:
        self._loaders: list[Any] = []
        self._orders: list[SamplerOrder] = []
        self._lengths: list[int] = []
        self._generators: dict[str, Any] = {}
        self._again = 0
        self._stateful = False

    def begin(self, loaders: list[Any], progress: _Progress | None) -> None:
        """Begin with new loaders.

        If `progress` is given, the epoch goes on from its position.
        """
        self.end()
        self._loaders = loaders
        self._stateful = all(
            hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
            for loader in loaders
        )
        self._orders = [order for loader in loaders if (order := order_of(loader)) is not None]
        if len(self._orders) == len(loaders):
            self._lengths = [len(loader) for loader in loaders]
        elif not self._stateful:
            self.end()
            log.warning(
                "a data loader neither takes its samples by number nor saves its position: after a "
                "recovery inside an epoch, the batches before the position are loaded again; "
                "torchdata's StatefulDataLoader saves its position"
            )
        if progress is None:
            self.note_generators()
        elif not self._stateful:
            self._resume(progress)

    def _resume(self, progress: _Progress) -> None:
        """Make the next pass over the loaders go on from a saved position."""
        saved = progress.saved_data()
        per_batch = self._orders[0].samples_per_batch if self._orders else 1
        position, same = progress.position(per_batch, saved)
        parts = [
            (order, state, _in_pass(position, length))
            for order, length, state in zip(self._orders, self._lengths, saved, strict=False)
        ]
        for order, state, _ in parts:
            order.check(state)
        again = {order.loaded_again(state, batches) for order, state, batches in parts}
        self._generators = saved[0]["generators"]
        set_rng_state(self._generators["global"])
        for loader, held in zip(self._loaders, self._generators["own"], strict=False):
            set_held_states(loader, held)
        if len(again) == 1:
            (self._again,) = again
            for order, state, batches in parts:
                order.repeat(state, batches, skip=batches - self._again, same=same)
        else:
            self._again = position

    def note_generators(self) -> None:
        """Note the random generators before the iterators of an epoch are made."""
        if not self._stateful:
            own = [held_states(loader) for loader in self._loaders]
            self._generators = {"global": rng_state(), "own": own}

    def load_again(self, fetcher: Any) -> None:
        """Load batches before the position again, if nothing else brings back what
        depends on them.
        """
        for _ in range(self._again):
            next(fetcher)
        fetcher.fetched -= self._again
        self._again = 0

    def state(self, batches: int) -> list[dict[str, Any]]:
        """Return the state of each loader after this number of batches of the epoch."""
        if self._stateful:
            return []
        states = [
            order.state(_in_pass(batches, length))
            for order, length in zip(self._orders, self._lengths, strict=True)
        ]
        first, *others = states or [{}]
        return [first | {"generators": self._generators}, *others]

    def set_generators(self, saved: list[dict[str, Any]]) -> None:
        """Set the generators of the loaders as they were when `saved` was made.

        Raises InvalidRequest if the length of a data set has changed.
        """
        for order, state in zip(self._orders, saved, strict=False):
            order.check(state)
            order.set_generators(state)

    def forget_before(self, batches: int) -> None:
        for order, length in zip(self._orders, self._lengths, strict=True):
            order.forget_before(_in_pass(batches, length))

    def end(self) -> None:
        """Give the loaders their samplers back."""
        for order in self._orders:
            order.remove()
        self._orders = []
        self._lengths = []
        self._again = 0


def _in_pass(batches: int, length: int) -> int:
    """Return the number of batches of the current pass over a loader, which begins again
    if another loader is longer.
    """
    return (batches - 1) % length + 1 if batches else 0


def _averages_of(callback: Any) -> list[AveragedModel]:
    """Return the averages of the weights that a callback keeps."""
    return [one for one in vars(callback).values() if isinstance(one, AveragedModel)]


def _packed(tree: Any) -> Any:
    """Return a tree with small tensors as bytes.

    Metrics come and go during the training. As values they do not change the plan of a
    snapshot.
    """
    if type(tree) is dict:
        return {key: _packed(value) for key, value in tree.items()}
    if type(tree) is list:
        return [_packed(value) for value in tree]
    if type(tree) is torch.Tensor and tree.numel() <= _SMALL and tree.layout == torch.strided:
        flat = tree.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        kind = str(tree.dtype).removeprefix("torch.")
        return {_PACKED: [kind, list(tree.shape), flat.tobytes(), tree.device.type == "cpu"]}
    return tree


def _unpacked(tree: Any, device: torch.device) -> Any:
    """Return what `_packed` was given, with tensors of an accelerator on `device`."""
    if type(tree) is list:
        return [_unpacked(value, device) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if set(tree) != {_PACKED}:
        return {key: _unpacked(value, device) for key, value in tree.items()}
    kind, shape, data, on_cpu = tree[_PACKED]
    dtype = getattr(torch, kind)
    flat = (
        torch.frombuffer(bytearray(data), dtype=dtype)
        if data
        else torch.empty(0, dtype=dtype, device="cpu")
    )
    return flat.reshape(shape).to("cpu" if on_cpu else device)


def _metric_states(module: torch.nn.Module) -> dict[str, Any]:
    """Return the states of the torchmetrics in a module, which its state dict lacks."""
    return {
        name: {"count": one._update_count, "state": dict(one.metric_state)}
        for name, one in module.named_modules()
        if hasattr(one, "metric_state") and one._update_count
    }


def _load_metric(metric: Any, held: dict[str, Any]) -> None:
    for name, value in held["state"].items():
        moved = (
            [one.to(metric.device) for one in value]
            if isinstance(value, list)
            else value.to(metric.device)
        )
        setattr(metric, name, moved)
    metric._update_count = held["count"]
    metric._computed = None


def _set_in_loops(loop: Any, name: str, value: bool) -> None:
    """Set an attribute of a loop and of the loops in it."""
    setattr(loop, name, value)
    for inner in vars(loop).values():
        if hasattr(inner, "_resuming_from_checkpoint"):
            _set_in_loops(inner, name, value)


def _overrides(owner: Any, base: type, hooks: tuple[str, ...]) -> bool:
    return any(getattr(type(owner), hook) is not getattr(base, hook) for hook in hooks)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Call `around(method, ...)` in place of a method of one object."""
    setattr(owner, name, partial(around, getattr(owner, name)))


@cache
def _callback_class(package: str) -> Any:
    """Return the class of the callback, which must be a subclass of Lightning's."""
    base: Any = import_module(f"{package}.callbacks").Callback

    class CkptdCallback(base):  # type: ignore[misc]
        """The callback that tells an attachment of the trainer's phases."""

        def __init__(self, attachment: _Attachment) -> None:
            self._attachment = attachment

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self._attachment.fit_starts()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._attachment.train_starts()

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self._attachment.epoch_starts()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._attachment.train_ends()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self._attachment.fit_ends()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._attachment.stop()

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self._attachment.evaluation_starts()

        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            self._attachment.evaluation_starts()

        def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
            self._attachment.evaluation_starts()

    return CkptdCallback
