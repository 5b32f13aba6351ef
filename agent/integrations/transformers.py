"""Saves and resumes a Trainer of Hugging Face transformers, and the trainers derived
from it, such as Seq2SeqTrainer and trl's SFTTrainer.

Tried with transformers 5.3.0, 5.23.0 and 5.24.0, accelerate 1.15.0, trl 1.16.0 and peft
0.21.2.

A snapshot is taken between two optimizer steps: after the Trainer has logged, evaluated
and saved, and before it asks for the next batches. The Trainer has no public call at
this point, so these methods of the given Trainer are replaced: `_init_training_state`,
`_prepare_for_training`, `_run_epoch` and `get_batch_samples`.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from ckptd.agent import default
from ckptd.agent.agent import Agent
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.schedule import Schedule
from ckptd.agent.state.tree import per_rank
from ckptd.agent.training_run import check_one_model
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
    from transformers import Trainer

log = logging.getLogger("ckptd.agent")

_VERSIONS = ("5.3", "5.25")

_REPLACED = (
    "get_train_dataloader",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "get_batch_samples",
)
_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""The fields of TrainerState that are brought back. The others follow from the
arguments of the run that resumes.
"""
_COUNTERS = (
    "current_flos",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "_total_train_tokens",
)
"""The attributes of a Trainer that count what it has not logged yet. The last is
SFTTrainer's.
"""
_METRICS = ("_metrics", "_stored_metrics")
"""The attributes in which trainers of trl collect lists of metrics until they log."""


def attach(
    trainer: Trainer,
    *,
    every_steps: int | None = None,
    schedule: Schedule | None = None,
    agent: Agent | None = None,
) -> None:
    """Make `trainer.train()` resume from the newest snapshot, and take snapshots.

    Call it on every rank, before `train()`.

    trainer: the Trainer. `train()` looks for a snapshot of the job before its first
        step. The step of a snapshot is the Trainer's `global_step`.
    every_steps: take a snapshot after each optimizer step that is a multiple of it.
    schedule: a `ckptd.Schedule`, instead of `every_steps`.
    agent: the agent that saves and recovers. Default: the one of this process, which
        `train()` makes if there is none.

    Raises InvalidRequest for a version of transformers with which this was not tried;
    for invalid arguments; if ckptd is attached to this Trainer already; if its training
    has begun; and for a Trainer that uses DeepSpeed. `train()` then raises the errors
    of `Agent.recover`; InvalidRequest if the training data have another length, unless
    `ignore_data_skip` is set, for a hyperparameter search, and if
    `resume_from_checkpoint` names a checkpoint that is newer than the newest snapshot;
    and SnapshotFailed if another rank has not called `attach`.
    """
    check_version("transformers", *_VERSIONS)
    from transformers import Trainer

    chosen = schedule_of(schedule, every_steps, agent)
    if not isinstance(trainer, Trainer):
        raise InvalidRequest(
            f"attach() got a {type(trainer).__name__}; expected a Trainer of transformers"
        )
    if trainer.is_in_train or trainer.state.global_step:
        raise InvalidRequest(
            "the training of this Trainer has begun already: call attach() before train(); if an "
            "earlier train() has failed, make a new Trainer"
        )
    if trainer.is_deepspeed_enabled:
        raise InvalidRequest(
            "this Trainer uses DeepSpeed, which keeps the state of the optimizer to itself: "
            "attach ckptd to a Trainer without DeepSpeed, for example with FSDP"
        )
    attach_once(trainer, "Trainer")
    attached = _Attached(trainer, chosen)
    for name in _REPLACED:
        _replace(trainer, name, getattr(attached, name.lstrip("_")))
    trainer.add_callback(_callback()(attached))


def _replace(trainer: Trainer, name: str, by: Callable[..., Any]) -> None:
    """Replace a method of one Trainer by `by(original, arguments)`.

    `arguments` is a dict of the arguments by name.
    """
    original = getattr(trainer, name)
    signature = inspect.signature(original)

    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return by(original, bound.arguments)

    setattr(trainer, name, called)


@cache
def _callback() -> Any:
    """Return the class of the callback, which derives from a class of transformers."""
    from transformers import TrainerCallback

    class CkptdCallback(TrainerCallback):
        """A callback that puts the counters of a Trainer back, which it resets when its
        training begins.
        """

        def __init__(self, attached: _Attached) -> None:
            self._attached = attached

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._attached.train_begins()

    return CkptdCallback


class _Attached:
    """The connection of one Trainer to its agent.

    Each method that is named like one of the Trainer's takes its place.
    """

    def __init__(self, trainer: Trainer, schedule: Schedule) -> None:
        self._trainer = trainer
        self._schedule = schedule
        self._given = schedule.agent
        self._loader: Any = None
        self._begin()

    def _begin(self) -> None:
        """Forget what an earlier call of `train` has left."""
        self._model: torch.nn.Module | None = None
        self._prepared: tuple[Any, Any] | None = None
        self._recovered: Recovered | None = None
        self._saved: dict[str, Any] = {}
        self._loss: Any = None
        self._resumed: Position | None = None
        self._position: Position | None = None
        self._batches: PositionedBatches | None = None
        self._given_iterator: Any = None
        self._asked = 0

    # -- instead of methods of the Trainer

    def get_train_dataloader(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Return the loader that the Trainer makes, and keep it."""
        self._loader = original(**arguments)
        return self._loader

    def init_training_state(
        self, original: Callable[..., Any], arguments: dict[str, Any]
    ) -> tuple[int, int]:
        """Make the state of the Trainer, and load the newest snapshot into it.

        The Trainer asks here at which epoch to begin. Only the snapshot says that, so
        the model and the optimizer are prepared before. Returns the epoch and the
        number of its batches to leave out.
        """
        trainer = self._trainer
        self._begin()
        if arguments["trial"] is not None:
            raise InvalidRequest(
                "ckptd cannot follow a hyperparameter search, whose trials would all resume from "
                "one job: attach it to a new Trainer for each trial, with agent=Agent(job=...)"
            )
        found: tuple[int, int] = original(**arguments)
        theirs, their_step = arguments["resume_from_checkpoint"], trainer.state.global_step
        prepare: Callable[..., Any] = trainer._prepare_for_training
        self._prepared = prepare(arguments["max_steps"], self._loader, theirs)
        self._model = self._prepared[0]
        recovered = self._recover()
        if recovered is None:
            self._asked = their_step
            return found
        if theirs is not None:
            self._compare(os.fspath(theirs), their_step, recovered.step)
        return self._resume(recovered.step, arguments), 0

    def prepare_for_training(
        self, original: Callable[..., Any], arguments: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the model and the loader, which `init_training_state` has prepared."""
        made, self._prepared = self._prepared or original(**arguments), None
        return made

    def run_epoch(self, original: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Run one epoch, from the position of the snapshot if it is the resumed one."""
        epoch, loader = arguments["epoch"], arguments["train_dataloader"]
        self._loader = loader
        self._batches, self._given_iterator = None, None
        if self._resumed is None:
            skipped = 0
            if arguments["resume_from_checkpoint"] and epoch == arguments["epochs_trained"]:
                skipped = arguments["steps_trained_in_current_epoch"]
            self._position = Position.at(loader, epoch, skipped)
        else:
            self._position = self._resumed
            trained = self._resumed.total
            # The Trainer counts from these batches on. It also makes a loader without
            # them, which `get_batch_samples` does not use.
            arguments["resume_from_checkpoint"] = os.devnull if trained else None
            arguments["epochs_trained"] = epoch
            arguments["steps_trained_in_current_epoch"] = trained
            if not trained:
                self._resumed.restore(loader)
                self._resumed = None
        original(**arguments)
        state, position = self._trainer.state, self._position
        if self._trainer.control.should_training_stop or state.global_step >= state.max_steps:
            if position.total >= arguments["steps_in_epoch"]:
                self._position = Position.at(loader, epoch + 1)
            self._finish()
        self._position = None

    def get_batch_samples(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Take a snapshot if one is due after the last step, and return the batches of
        the next step.
        """
        if self._position is None:
            return original(**arguments)
        given = arguments["epoch_iterator"]
        if given is not self._given_iterator:
            self._given_iterator = given
            self._batches = PositionedBatches(
                given if self._resumed is None else self._replayed(self._resumed),
                self._position,
                self._loader,
            )
        step = self._trainer.state.global_step
        if step > self._asked:
            self._asked = step
            if self._schedule.due(step):
                self._schedule.snapshot(self._state(), step=step, metrics=self._metrics(step))
        arguments["epoch_iterator"] = self._batches
        return original(**arguments)

    def train_begins(self) -> None:
        """Put back the counters that the Trainer has just reset."""
        if self._recovered is None:
            return
        trainer = self._trainer
        trainer._tr_loss = self._loss
        for name, value in self._saved["counters"].items():
            setattr(trainer, name, value)
        for name, modes in self._saved["metrics"].items():
            for mode, lists in modes.items():
                getattr(trainer, name)[mode].update(lists)
        if trainer.args.eval_on_start:
            # It was evaluated when the first run began.
            trainer.args.eval_on_start = False

    # -- resuming

    def _recover(self) -> Recovered | None:
        """Load the newest snapshot, and keep the values of this rank.

        Raises the errors of `Agent.recover`.
        """
        loss = torch.zeros((), dtype=torch.float32, device=self._trainer.args.device)
        state = self._components() | {"trainer": per_rank(None), "loss": per_rank(loss)}
        check_one_model(self._given, self._trainer.model)
        call = "attach() before train()"
        self._recovered = recover_with(self._given, state, call, of_first_rank)
        if self._recovered is not None:
            self._saved, self._loss = state["trainer"].value, state["loss"].value
        return self._recovered

    def _compare(self, theirs: str, their_step: int, step: int) -> None:
        """Say that a directory of the Trainer is not used, because the snapshot is not
        older.

        Raises InvalidRequest if it is older.
        """
        job = (self._given or default.default_agent()).job
        if their_step > step:
            raise InvalidRequest(
                f"resume_from_checkpoint={theirs!r} has step {their_step}, and the newest snapshot "
                f"of job {job!r} has step {step}: leave out resume_from_checkpoint to resume from "
                f"step {step}, or name another job with CKPTD_JOB to resume from step {their_step}"
            )
        log.warning(
            "resume_from_checkpoint=%r, of step %d, is not used, because job %r has a snapshot of "
            "step %d; to begin from that directory, name another job with CKPTD_JOB",
            theirs, their_step, job, step,
        )  # fmt: skip

    def _resume(self, step: int, arguments: dict[str, Any]) -> int:
        """Put the state of the Trainer and of its callbacks back.

        Return the epoch in which to resume. Raises InvalidRequest if the training data
        have another length.
        """
        trainer, saved = self._trainer, self._saved
        state = trainer.state
        for name, value in saved["state"].items():
            setattr(state, name, value)
        best = state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            log.warning(
                "the best checkpoint, %s, is no longer there: load_best_model_at_end keeps the "
                "weights of the last step unless a better one comes",
                best,
            )
            state.best_model_checkpoint = None
        self._resume_callbacks(saved["callbacks"])
        self._asked = step
        position = self._moved(Position(**saved["position"]), step)
        if trainer.args.max_steps <= 0:
            per_epoch = arguments["num_update_steps_per_epoch"]
            done = (
                position.epoch * per_epoch
                + position.total // trainer.args.gradient_accumulation_steps
            )
            state.max_steps = step + arguments["max_steps"] - done
        if saved["stopped"] or step >= state.max_steps:
            log.warning("nothing is left to do: step %d of %d is saved", step, state.max_steps)
            return int(arguments["num_train_epochs"])
        assert self._recovered is not None
        # A warning, because Python shows nothing below it by default.
        log.warning(
            "training resumes after step %d of %d, which was recovered from %s",
            step, state.max_steps, self._recovered.source,
        )  # fmt: skip
        self._resumed = position
        return position.epoch

    def _moved(self, position: Position, step: int) -> Position:
        """Return the position in the batches of this run, which may be of another size
        than those of the run that saved it.

        Raises InvalidRequest if the data have another length.
        """
        args, saved, here = self._trainer.args, self._saved["data"], self._data()
        if args.ignore_data_skip:
            log.warning("ignore_data_skip is set: the epoch begins again with its first batch")
            return Position.at(self._loader, position.epoch)
        way_out = (
            "give the same data, or set ignore_data_skip=True to begin the epoch again, or name "
            "another job with CKPTD_JOB"
        )
        return moved(position, saved, here, step, way_out)

    def _replayed(self, position: Position) -> Iterator[Any]:
        """Return the batches after the position, and set the random generators to what
        they were when the snapshot was taken.
        """
        assert self._recovered is not None
        self._resumed = None
        loader = self._loader
        inner = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
        for part in (loader, inner):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(position.epoch)
        return replay(loader, position, self._recovered.restore_rng)

    # -- saving

    def _components(self) -> dict[str, Any]:
        """Return the parts of the state that load in place."""
        trainer = self._trainer
        found = {
            "model": self._model,
            "optimizer": trainer.optimizer,
            "lr_scheduler": trainer.lr_scheduler,
        }
        if (scaler := trainer.accelerator.scaler) is not None:
            found["scaler"] = scaler
        return found

    def _state(self, *, stopped: bool = False) -> dict[str, Any]:
        """Return the whole state, for a snapshot.

        `stopped` is True if the training has ended before its last step.
        """
        trainer = self._trainer
        assert self._position is not None
        values = {
            "state": {name: getattr(trainer.state, name) for name in _STATE},
            "counters": {
                name: getattr(trainer, name) for name in _COUNTERS if name in vars(trainer)
            },
            "metrics": {
                name: {mode: dict(lists) for mode, lists in vars(trainer)[name].items()}
                for name in _METRICS
                if name in vars(trainer)
            },
            "callbacks": [[name, of()] for name, of, _ in self._callbacks()],
            "position": self._position.values(),
            "data": self._data(),
            "stopped": stopped,
        }
        return self._components() | {
            "trainer": per_rank(values),
            "loss": per_rank(trainer._tr_loss),
        }

    def _data(self) -> dict[str, Any]:
        args = self._trainer.args
        accumulated = args.gradient_accumulation_steps
        samples = self._trainer.get_total_train_batch_size(args) // accumulated
        return size_of(self._loader, samples, accumulated)

    def _metrics(self, step: int) -> dict[str, float]:
        """Return the finite numbers that the Trainer has logged at this step."""
        logged: dict[str, Any] = {}
        for entry in reversed(self._trainer.state.log_history):
            if entry.get("step") != step:
                break
            logged = entry | logged
        return {
            name: float(value)
            for name, value in logged.items()
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
        }

    def _finish(self) -> None:
        """Save the state after the last step, and wait until it is durable."""
        state = self._trainer.state
        step = state.global_step
        if step <= self._asked:
            return
        self._asked = step
        saved = self._state(stopped=step < state.max_steps)
        take = calls_of(self._given).snapshot
        wait_durable(take(saved, step=step, metrics=self._metrics(step)))

    # -- callbacks

    def _callbacks(self) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
        """Yield the name of each callback that can save its state, and two functions
        that return and set this state.
        """
        from transformers.trainer_callback import ExportableState

        for callback in self._trainer.callback_handler.callbacks:
            name = type(callback).__qualname__
            if isinstance(callback, ExportableState):
                yield name, partial(_attributes_of, callback), partial(_set_attributes, callback)
            elif hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
                yield name, callback.state_dict, callback.load_state_dict

    def _resume_callbacks(self, saved: list[Any]) -> None:
        """Give each callback the state of the callback with its name."""
        left = list(saved)
        for name, _, load in self._callbacks():
            if (found := next((pair for pair in left if pair[0] == name), None)) is not None:
                left.remove(found)
                load(found[1])
            else:
                log.warning(
                    "the snapshot has no state of the callback %s, which keeps its own", name
                )
        for name, _ in left:
            log.warning("the callback %s, whose state was saved, is not in this Trainer", name)


def _attributes_of(callback: Any) -> Any:
    return callback.state()["attributes"]


def _set_attributes(callback: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(callback, name, value)
