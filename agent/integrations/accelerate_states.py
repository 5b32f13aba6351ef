"""`save_state` and `load_state` of an Accelerator that take and load snapshots.

A directory that is given to `save_state` gets a small file with the step of the
snapshot. `load_state` reads this file. So a program that lists its directories, deletes
them, or keeps files of its own in them works as before.

These private attributes of the Accelerator are read, which list the hooks:
`_save_model_state_pre_hook` and `_load_model_state_pre_hook`.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckptd.shared.errors import (
    CkptdError,
    IntegrityError,
    InvalidRequest,
    NotFound,
    storage_errors,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("ckptd.agent")

REFERENCE = "ckptd.json"
"""The name of the file with the job, the attempt and the step of a snapshot."""
_BEGUN = f".{REFERENCE}"
"""The name of this file before the snapshot is taken. It then has no reference."""


class StateCalls:
    """The methods `save_state` and `load_state` of one Accelerator, with the arguments of
    accelerate.

    run: the `TrainingRun` that saves and loads the state.
    """

    def __init__(self, accelerator: Accelerator, run: Any) -> None:
        self._accelerator = accelerator
        self._run = run
        self._load_directory = accelerator.load_state

    def replace(self) -> None:
        """Let the Accelerator call these methods instead of its own."""
        methods: dict[str, Any] = {"save_state": self.save_state, "load_state": self.load_state}
        vars(self._accelerator).update(methods)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **options: Any,
    ) -> Path | None:
        """Take a snapshot, write a reference to it into a directory, and return the
        directory.

        It returns when the snapshot is in the memory of the daemon, which saves it to
        storage later.

        output_dir: the directory. With `automatic_checkpoint_naming`, accelerate
            chooses its name. None takes a snapshot without a reference.
        safe_serialization: ignored.
        options: those of `Agent.snapshot`, such as `tag` and `metrics`.

        Raises the errors of `TrainingRun.save`. Raises InvalidRequest if a hook has
        changed the weights that are saved, or needs a directory; and for an automatic
        name that has other files.
        """
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        each = project.save_on_each_node
        writes = accelerator.is_local_main_process if each else accelerator.is_main_process
        directory = self._new_directory(output_dir)
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            if writes:
                (directory / _BEGUN).touch()
        self._call_save_hooks(directory)
        # The snapshot has the number of the next directory.
        project.iteration += 1
        try:
            step, attempt = self._run.save(**options)
        except BaseException:
            project.iteration -= 1
            raise
        if directory is not None and writes:
            reference = {"job": self._run.agent.job, "attempt": attempt, "step": step}
            written = directory / _BEGUN
            with written.open("w") as file:
                file.write(json.dumps(reference) + "\n")
                file.flush()
                os.fsync(file.fileno())
            written.replace(directory / REFERENCE)
            self._delete_old(directory)
        accelerator.wait_for_everyone()
        return directory

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load the snapshot to which a directory refers.

        A directory without a reference, which accelerate itself has saved, is loaded as
        by accelerate.

        input_dir: the directory. None takes the newest directory, with
            `automatic_checkpoint_naming`, and otherwise the newest snapshot.
        load_kwargs, options: those of accelerate, for a directory of accelerate.

        Raises InvalidRequest for these, if a directory refers to a snapshot of another
        job, or to one in whose place there is another; NotFound if there is no
        directory or no snapshot; IntegrityError if a reference is damaged, StorageError
        if it cannot be read; and the errors of `TrainingRun.load`.
        """
        directory, reference = self._shared(input_dir)
        if directory is not None and reference is None:
            self._load_directory(str(directory), load_kwargs, **options)
            return
        if given := sorted({**(load_kwargs or {}), **options}.keys() - {"map_location"}):
            raise InvalidRequest(
                f"load_state() was called with {', '.join(given)}, which a snapshot cannot follow: "
                "leave it out, or call ckptd.recover() with the option that you need"
            )
        job = self._run.agent.job
        if reference is not None and reference["job"] != job:
            raise InvalidRequest(
                f"{directory} refers to a snapshot of job {reference['job']!r}, and this is job "
                f"{job!r}: set CKPTD_JOB={reference['job']} to load it"
            )
        keep = self._call_load_hooks(directory)
        step = None if reference is None else reference["step"]
        found = self._run.load("load_state()", step=step, keep=keep)
        if found is None:
            raise NotFound(f"job {job!r} has no snapshot: call save_state() first")
        if reference is not None and found.attempt != reference["attempt"]:
            raise InvalidRequest(
                f"{directory} refers to step {step} of attempt {reference['attempt']}, and attempt "
                f"{found.attempt} has saved this step again: what was loaded is of attempt "
                f"{found.attempt}; load a directory of that attempt"
            )

    def _new_directory(self, output_dir: str | os.PathLike[str] | None) -> Path | None:
        """Return the directory for a reference."""
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming:
            return None if output_dir is None else Path(output_dir).expanduser()
        parent = Path(accelerator.project_dir) / "checkpoints"
        directory = parent / f"checkpoint_{accelerator.save_iteration}"
        if directory.exists() and not (directory / REFERENCE).exists() and not _is_begun(directory):
            raise InvalidRequest(
                f"{directory} exists already, and ckptd has not made it: set "
                "accelerator.project_configuration.iteration to the first free number"
            )
        accelerator.wait_for_everyone()  # before another rank makes it
        return directory

    def _delete_old(self, newest: Path) -> None:
        """With automatic names, delete directories that are older than the newest ones."""
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        if limit is not None and accelerator.is_main_process:
            others = [one for one in _numbered(newest.parent) if one != newest]
            for old in others[: max(0, len(others) + 1 - limit)]:
                log.info("%s is deleted, because total_limit is %d", old, limit)
                shutil.rmtree(old)

    def _shared(
        self, input_dir: str | os.PathLike[str] | None
    ) -> tuple[Path | None, dict[str, Any] | None]:
        """Return the directory to load, and the reference in it, as the main process finds
        them.
        """
        from accelerate.utils import broadcast_object_list

        found: list[Any] = [None, None, None]
        if self._accelerator.is_main_process:
            try:
                found[:2] = self._find(input_dir)
            except CkptdError as error:  # which the other processes would wait for
                found[2] = error
        broadcast_object_list(found)
        if found[2] is not None:
            raise found[2]
        return found[0], found[1]

    def _find(
        self, input_dir: str | os.PathLike[str] | None
    ) -> tuple[Path | None, dict[str, Any] | None]:
        accelerator = self._accelerator
        if input_dir is not None:
            directory = Path(input_dir).expanduser()
            if not directory.is_dir():
                raise NotFound(f"{directory} is no directory: give one of save_state()")
            if _is_begun(directory):
                raise NotFound(
                    f"{directory} refers to no snapshot, because its save_state() did not end: "
                    f"give another directory"
                )
        elif accelerator.project_configuration.automatic_checkpoint_naming:
            parent = Path(accelerator.project_dir) / "checkpoints"
            found = [one for one in _numbered(parent) if not _is_begun(one)]
            if not found:
                raise NotFound(f"{parent} has no directory of save_state()")
            directory = found[-1]
        else:
            return None, None
        return directory, _read(directory / REFERENCE)

    def _call_save_hooks(self, directory: Path | None) -> None:
        """Call the hooks of `register_save_state_pre_hook`.

        A hook may save models into the directory. The snapshot has them all the same.
        Raises InvalidRequest if a hook changes weights, and if there is no directory.
        """
        accelerator = self._accelerator
        if not accelerator._save_model_state_pre_hook:
            return
        if directory is None:
            raise InvalidRequest(
                "a hook of register_save_state_pre_hook() needs a directory: call "
                "save_state(output_dir)"
            )
        models = accelerator._models
        weights = (
            [] if self._sharded else [accelerator.get_state_dict(m, unwrap=False) for m in models]
        )
        before = [dict(one) for one in weights]
        for hook in accelerator._save_model_state_pre_hook.values():
            hook(models, weights, str(directory))
        for one in weights:
            if not any(_same(one, old) for old in before):
                raise InvalidRequest(
                    "a hook of register_save_state_pre_hook() has changed the weights, but a "
                    "snapshot has those of the model: change the model, or let the hook save what "
                    "it makes, and remove it from the list"
                )

    def _call_load_hooks(self, directory: Path | None) -> tuple[str, ...]:
        """Call the hooks of `register_load_state_pre_hook`, and return patterns of the
        models that they have removed from the list, and loaded themselves.
        """
        accelerator = self._accelerator
        if not accelerator._load_model_state_pre_hook:
            return ()
        if directory is None:
            raise InvalidRequest(
                "a hook of register_load_state_pre_hook() needs a directory: call "
                "load_state(input_dir)"
            )
        models = [] if self._sharded else list(accelerator._models)
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, str(directory))
        left = {id(one) for one in models}
        return tuple(
            f"models.{number}.*"
            for number, one in enumerate(accelerator._models)
            if not self._sharded and id(one) not in left
        )

    @property
    def _sharded(self) -> bool:
        """True if the models are sharded. Then accelerate gives them to no hook."""
        return str(self._accelerator.distributed_type.value) == "FSDP"


def loader_state(loader: Any) -> dict[str, Any]:
    """Return what accelerate saves of a loader: the state of one with a state of its own,
    and the seed and the epoch of a sampler that follows from them.
    """
    found: dict[str, Any] = {}
    if getattr(loader, "use_stateful_dataloader", False):
        file = io.BytesIO()
        torch.save(loader.state_dict(), file)
        found["state"] = file.getvalue()
    if (sampler := _seeded(loader)) is not None:
        found["seed"] = [sampler.initial_seed, sampler.epoch]
    return found


def set_loader_state(loader: Any, saved: dict[str, Any]) -> None:
    """Give a loader the state that `loader_state` has returned."""
    if "state" in saved:
        loader.load_state_dict(torch.load(io.BytesIO(saved["state"]), weights_only=True))
    sampler = _seeded(loader)
    if "seed" in saved and sampler is not None:
        sampler.initial_seed, sampler.epoch = saved["seed"]


def _seeded(loader: Any) -> Any:
    """Return the sampler of a loader if it has a seed and an epoch."""
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return sampler if type(getattr(sampler, "initial_seed", None)) is int else None


def _read(file: Path) -> dict[str, Any] | None:
    """Return the reference in a file, or None if there is no such file.

    Raises IntegrityError for a file that `save_state` has not written, and StorageError
    if the file cannot be read.
    """
    with storage_errors(f"read {file}"):
        try:
            found = json.loads(file.read_bytes())
            return {"job": str(found["job"]), **{n: int(found[n]) for n in ("attempt", "step")}}
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, LookupError):
            raise IntegrityError(
                f"{file} is damaged: delete its directory, or give another one to load_state()"
            ) from None


def _is_begun(directory: Path) -> bool:
    """Return True for a directory that `save_state` has made, and did not finish because
    the process was killed.
    """
    files = {one.name for one in directory.iterdir()}
    return REFERENCE not in files and (not files or _BEGUN in files)


def _numbered(parent: Path) -> list[Path]:
    """Return the directories in `parent` whose names end with a number, by this number."""
    found = [
        (int(number[0]), one)
        for one in (parent.iterdir() if parent.is_dir() else ())
        if (number := re.search(r"\d+$", one.name))
    ]
    return [one for _, one in sorted(found)]


def _same(one: dict[str, Any], old: dict[str, Any]) -> bool:
    """Return True if two dicts have the same values, not only equal ones."""
    return one.keys() == old.keys() and all(one[key] is old[key] for key in one)
