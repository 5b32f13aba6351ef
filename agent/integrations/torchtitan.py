"""torchtitan: a checkpoint manager that saves and resumes with ckptd.

from ckptd.integrations.torchtitan import CheckpointManager

Trainer.Config(checkpoint=CheckpointManager.Config(enable=True, interval=50), ...)

Tried with torchtitan 0.3.0 and torch 2.13. These methods of its manager are private:
`_save`, `_load`, `_close`, `_should_save`, `_save_last_step` and `_find_load_step`.
"""

from __future__ import annotations

import copy
import logging
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.agent import default
from ckptd.agent.agent import Agent, link_of
from ckptd.agent.convert.load_model import load_model
from ckptd.agent.pending import Pending
from ckptd.agent.state.capture import rng_state, set_rng_state, tensors_in
from ckptd.agent.state.naming import is_stateful
from ckptd.agent.state.tree import per_rank
from ckptd.integrations.framework import check_version
from ckptd.shared.errors import CkptdError, InvalidRequest, NotFound
from ckptd.shared.names import MANIFEST
from ckptd.shared.retention import LatestN, PreserveAll, checked

log = logging.getLogger("ckptd.agent")

_LOWEST, _BELOW = "0.3", "0.4"
_MODEL, _OPTIMIZER, _DATALOADER, _TRAIN_STATE = "model", "optimizer", "dataloader", "train_state"
"""The names that torchtitan gives to the parts of a training state."""
_PER_RANK = (_DATALOADER, _TRAIN_STATE)
_KEY = "torchtitan"
"""The key in the `user_content` of a snapshot."""
_DURABLE_SECONDS = 600.0
_open: list[Snapshots] = []
"""The manager of this process that uses its agent, if there is one."""

CheckpointManager: Any
"""The class that `_manager` makes when it is first asked for."""


def __getattr__(name: str) -> Any:
    """Return the class `CheckpointManager`, which torchtitan is imported for.

    Raises InvalidRequest for a version of torchtitan that was not tried.
    """
    if name == "CheckpointManager":
        return _manager()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _manager() -> type:
    """Return the class of managers, a subclass of torchtitan's.

    Raises InvalidRequest for a version of torchtitan that was not tried.
    """
    check_version("torchtitan", _LOWEST, _BELOW)
    from torchtitan.components.checkpointer import AsyncMode
    from torchtitan.components.checkpointer import CheckpointManager as Base

    class CheckpointManager(Base):  # type: ignore[misc]
        """A manager that takes a snapshot where torchtitan's writes a checkpoint, and
        that resumes from the newest snapshot.

        What torchtitan writes in its own format stays its own: the model at the last
        step, a seed checkpoint, and what is loaded while ckptd has nothing to recover.

        agent: the `Agent` to use, which stays open. Default: the agent of this process,
        which `close` closes.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(Base.Config):  # type: ignore[misc]
            """The settings of torchtitan's manager.

            async_mode: with "disabled", `save` returns once the snapshot is durable.
            With the others, it returns once the state is copied. keep_latest_k: the
            number of checkpoints to keep; 0 keeps all.
            """

            async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"

        def __init__(
            self, config: Any, *, states: dict[str, Any], agent: Agent | None = None, **parts: Any
        ) -> None:
            # torchtitan would make a process group for its own asynchronous saves.
            without_group = copy.copy(config)
            without_group.async_mode = AsyncMode.DISABLED.value
            super().__init__(without_group, states=states, **parts)
            if not self.enable:
                return
            self.async_mode = AsyncMode(config.async_mode)
            self._snapshots = Snapshots(self.states, self.folder, self.keep_latest_k, agent)

        @torch.no_grad()
        def _save(self, curr_step: int, last_step: bool = False) -> bool:
            if not self._should_save(curr_step, last_step):
                return False
            if curr_step == 0:  # a seed, which other meshes load
                return bool(super()._save(curr_step, last_step))
            if last_step and self.last_save_model_only:
                # First: a run whose last step is saved does not come here again.
                self._save_last_step(curr_step)
            if self._snapshots.has(curr_step):
                log.warning(
                    "step %d is saved already: save() was called again, or by a second manager",
                    curr_step,
                )
                return False
            pending = self._snapshots.take(curr_step)
            self.save_future = None
            if last_step or self.async_mode is AsyncMode.DISABLED:
                _wait(pending)
            else:
                self.save_future = pending.future()
            return pending.state not in ("failed", "skipped")

        @torch.no_grad()
        def _load(self, step: int = -1) -> bool:
            excluded = self.exclude_from_loading
            if unknown := sorted(set(excluded) - self.states.keys()):
                raise InvalidRequest(
                    f"exclude_from_loading names {unknown[0]!r}, and the states are "
                    f"{', '.join(sorted(self.states))}: name one of these"
                )
            if self._snapshots.load(None if step == -1 else step, excluded):
                if step == -1:
                    self._snapshots.compare(self._find_load_step())
                return True
            path = self.initial_load_path
            if path and step == self._find_load_step() == -1 and _is_checkpoint(path):
                _load_model(self.states[_MODEL].model, path, self.initial_load_model_only)
                return True
            try:
                return bool(super()._load(step))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{error}, and {self._snapshots.lacks(step)}") from error
            except CheckpointException as error:
                raise InvalidRequest(
                    f"{self._snapshots.lacks(step)}, and torchtitan cannot load what is in "
                    f"{self.folder}: if that is only the model of a finished run, use another "
                    f"folder, or name its checkpoint in initial_load_path"
                ) from error

        def _close(self) -> None:
            super()._close()
            self._snapshots.close()

        def __del__(self) -> None:
            """End the threads of torchtitan. An agent is closed by `close` alone."""
            if getattr(self, "enable", False):
                super()._close()

    for made in (CheckpointManager, CheckpointManager.Config):
        made.__qualname__ = made.__qualname__.rpartition("<locals>.")[2]
    return CheckpointManager


def _wait(pending: Pending) -> None:
    """Wait until a snapshot is durable. Log the reason if that fails."""
    try:
        pending.wait("durable", _DURABLE_SECONDS)
    except (CkptdError, TimeoutError) as error:
        log.error("step %d is not durable: %s", pending.step, error)


def _is_checkpoint(path: str) -> bool:
    """Return True if a path is a checkpoint of ckptd."""
    return (Path(path) / MANIFEST).is_file()


def _load_model(parts: list[torch.nn.Module], path: str, model_only: bool) -> None:
    """Load the model of a checkpoint of ckptd, as the beginning of another run.

    Raises InvalidRequest unless only the model is wanted, or if a part of the model is
    not in the checkpoint, and the errors of `load_model`.
    """
    if not model_only:
        raise InvalidRequest(
            f"initial_load_path is {path}, a checkpoint of ckptd, of which another run can load "
            f"the model alone: set initial_load_model_only=True, or set CKPTD_JOB to its job to go "
            f"on with that run"
        )
    for part in parts:
        missing = load_model(part, path, strict=len(parts) == 1).missing
        if missing:
            raise InvalidRequest(
                f"{path} lacks {', '.join(missing[:3])}: give initial_load_path a checkpoint of "
                f"the same model"
            )
    log.info("the model of %s is loaded", path)


def _value(own: Any) -> Any:
    return own.state_dict() if is_stateful(own) else own


class _Whole:
    """A state dict that is captured as that of an object. ckptd does not search it for
    modules, which takes long in the settings of a thousand parameters.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def _captured(own: Any) -> Any:
    return _Whole(own.state_dict()) if is_stateful(own) else own


class Snapshots:
    """The snapshots of the states of a manager, by the names that torchtitan gives them.

    states: the states of the manager, objects with a state_dict for the most part.
    folder: the folder of torchtitan's own checkpoints. keep: the number of checkpoints
    to keep, or 0 for all. agent: the agent, or None for that of this process.
    """

    def __init__(self, states: dict[str, Any], folder: str, keep: int, agent: Agent | None) -> None:
        self._states, self._folder = states, folder
        self._keep, self._given = keep, agent
        self._step: int | None = None  # that was recovered

    def take(self, step: int) -> Pending:
        """Take a snapshot."""
        self._begin("save")
        take = default.snapshot if self._given is None else self._given.snapshot
        state = {
            name: per_rank(_value(own)) if name in _PER_RANK else _captured(own)
            for name, own in self._states.items()
        }
        return take(state, step=step, user_content={_KEY: {"folder": self._place()}})

    def has(self, step: int) -> bool:
        """Return True if this run has taken the snapshot of a step."""
        return self._begin("save").last_step == step

    def load(self, step: int | None, excluded: list[str]) -> bool:
        """Load a step, the newest if it is None, into the states.

        excluded: the names of the states that stay as they are. Returns False if ckptd
        does not have it. Raises the errors of `recover`, and InvalidRequest if the
        snapshot belongs to another run, or to another number of data-parallel ranks.
        """
        agent = self._begin("load")
        # Their state is made by `state_dict`, with a step that counts.
        without_state = [one for one in self._optimizers() if not one.state]
        state: dict[str, Any] = {
            name: None if name in excluded else self._destination(name, own)
            for name, own in self._states.items()
        }
        try:
            found = agent.recover(state, step=step, keep=excluded, on_reshape=self._reshaped)
        except NotFound:
            if step is None:  # the checkpoints of this job have another name
                raise
            found = None
        if found is None:
            log.info("job %s in %s has nothing to recover", agent.job, agent.root)
            for one in without_state:
                one.state.clear()
            return False
        self._check_folder(agent, found)
        for name, own in self._states.items():
            if name in excluded:
                continue
            value = state[name].value if name in _PER_RANK else state[name]
            if is_stateful(own):
                own.load_state_dict(value)
            else:
                self._states[name] = value
        if (loader := self._states.get(_DATALOADER)) is not None:
            _draw_apart(loader)
        self._step = found.step
        log.info("step %d is recovered from %s", found.step, found.source)
        return True

    def compare(self, step: int) -> None:
        """Warn if torchtitan's folder has a later step than the one that was recovered."""
        if self._step is not None and step > self._step:
            log.warning(
                "training goes on after step %d, the newest that ckptd has; %s has step %d, which "
                "torchtitan has written: set load_step to begin there",
                self._step,
                self._folder,
                step,
            )

    def lacks(self, step: int) -> str:
        """Return the phrase that says where ckptd has no such step."""
        agent = self._begin("load")
        what = "nothing to recover" if step == -1 else f"no step {step} either"
        return f"job {agent.job!r} in {agent.root} has {what}"

    def close(self) -> None:
        """Close the agent of this process. Does nothing for an agent that was given.

        Raises the errors of `Agent.close`, unless another error is being handled.
        """
        if self not in _open:
            return
        _open.remove(self)
        try:
            default.close()
        except CkptdError as error:
            if sys.exc_info()[1] is None or sys.exc_info()[1] is error:
                raise
            log.error("the newest snapshot could not be made durable: %s", error)

    def _begin(self, call: str) -> Agent:
        """Return the agent, which keeps as many checkpoints as the manager says.

        Raises the errors of `Agent`, and InvalidRequest if the manager of another model
        uses it in this process.
        """
        if self._given is None and self not in _open:
            if _open and _open[0]._parts() != self._parts():
                raise InvalidRequest(
                    "the CheckpointManager of another model is open in this process, and one job "
                    "has one training: close() that manager first, or give each manager an Agent "
                    "of its own"
                )
            _open[:] = [self]
        agent = self._given or default.default_agent(call)
        if agent.retention is None:
            agent.retention = checked(LatestN(self._keep) if self._keep else PreserveAll())
        return agent

    def _destination(self, name: str, own: Any) -> Any:
        """Return the place in the state of a recovery for a part of the training state.

        The tensors are filled in place, and their keys must agree. Any other part is
        replaced as a whole.
        """
        if name in _PER_RANK:
            return per_rank(None)
        value = _value(own)
        return value if name in (_MODEL, _OPTIMIZER) or tensors_in(value, name) else None

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return list(getattr(self._states.get(_OPTIMIZER), "optimizers", ()))

    def _parts(self) -> list[int]:
        return [id(part) for part in self._states[_MODEL].model]

    def _place(self) -> str:
        return self._folder if "://" in self._folder else str(Path(self._folder).absolute())

    def _check_folder(self, agent: Agent, found: Any) -> None:
        """Compare the folder of the run that was saved with that of this run.

        To torchtitan another folder is another run. Raises InvalidRequest for a job
        without a name, because the main script of all runs is the same; the name that
        a user has given counts more than the folder.
        """
        saved = (found.user_content or {}).get(_KEY, {}).get("folder")
        if saved in (None, self._place()):
            return
        text = (
            f"job {agent.job!r} in {agent.root} was saved by the run whose checkpoint folder is "
            f"{saved}, and the folder of this run is {self._place()}"
        )
        if link_of(agent).unnamed:
            raise InvalidRequest(
                f"{text}: set CKPTD_JOB to a name of its own for a new run, or to {agent.job} to "
                f"go on with that one"
            )
        log.warning("%s: it goes on after step %d of that run", text, found.step)

    def _reshaped(self, key: str, values: list[Any]) -> Any:
        """Return the value for this rank after the number of ranks has changed."""
        if key != _DATALOADER:
            return values[0]
        loader = self._states[_DATALOADER]
        own = loader.state_dict() if is_stateful(loader) else None
        for value in values:
            if own is None or (
                isinstance(value, dict)
                and value.keys() == own.keys()
                and value.get("world_size") == own.get("world_size")
            ):
                return value
        raise InvalidRequest(
            "the position of the data loader was saved on another number of data-parallel ranks, "
            "and torchtitan cannot divide it: use as many as before, or begin the data again with "
            'exclude_from_loading=["dataloader"]'
        )


def _draw_apart(loader: Any) -> None:
    """Leave the random generators as they are when the loader begins to iterate.

    It draws a seed then, which the run that was saved has drawn before.
    """
    own = type(loader)

    class Resumed(own):  # type: ignore[misc, valid-type]
        """The loader until its first iteration."""

        def __iter__(self) -> Any:
            self.__class__ = own
            before = rng_state()
            given = iter(self)
            set_rng_state(before)
            return given

    loader.__class__ = Resumed
