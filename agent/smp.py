"""Saves and resumes with the calls of the SageMaker model parallel library: `save_checkpoint` and `resume_from_checkpoint`.

The signatures are those of https://sagemaker.readthedocs.io/en/stable/api/training/smp_versions/latest/smd_model_parallel_pytorch.html. A
partial checkpoint is one of ckptd, of the job "partial" in the directory. A full checkpoint is a file of torch.save, with whole tensors.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptd.agent.agent import Agent
from ckptd.agent.convert.contents import Contents, with_leaves
from ckptd.agent.convert.export import export
from ckptd.agent.convert.formats import one_sentence
from ckptd.agent.convert.load_model import give_memory, load_contents, on_meta, tensors_of
from ckptd.agent.convert.selection import Selection
from ckptd.agent.pending import Pending
from ckptd.agent.state.naming import find, parameter_names, unwrapped
from ckptd.agent.state.tree import PerRank, per_rank
from ckptd.shared.errors import AlreadyExists, IntegrityError, InvalidRequest, NotFound, StorageError, StructureMismatch
from ckptd.shared.manifest import Manifest
from ckptd.shared.names import check_name
from ckptd.shared.retention import LatestN, PreserveAll, checked
from ckptd.shared.storage.locate import is_root, open_root
from ckptd.shared.units import some_text

log = logging.getLogger("ckptd.agent")
_JOB, _SUFFIX = "partial", ".pt"
State = dict[str, Any]


@dataclass(slots=True)
class _Run:
    """A directory that this process uses: its agent, the highest step in it, and the steps of the tags that this process has saved."""

    agent: Agent
    highest: int
    steps: dict[str, int] = field(default_factory=dict)


_runs: dict[str, _Run] = {}
"""The directories that this process uses, by their paths."""


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    user_content: Any = None,
    num_kept_partial_checkpoints: int | None = None,
) -> Pending:
    """Save a model, an optimizer and the caller's own content. All ranks call this.

    path: a directory, which becomes the root of a daemon. tag: a name, such as "total_steps1000".
    partial: True copies the state and returns. The daemon saves it, replicas once, and it can be resumed on any number of ranks. False also
        writes `<path>/<tag>.pt` with whole tensors, and returns when that file is there. No rank holds all of it in memory.
    user_content: of this rank, for example the position of its data loader. For partial=False, plain values that
        `torch.load(weights_only=True)` reads.
    num_kept_partial_checkpoints: how many checkpoints stay, the newest ones. An older one is deleted once a newer one is durable. Default:
        all of them. A file of a full checkpoint is never deleted.

    Returns the `Pending` of the snapshot. Raises InvalidName for a tag; InvalidRequest without a model and an optimizer, or for a number of
    kept checkpoints below 1; AlreadyExists if the file exists; the errors of `Agent`, of `Agent.snapshot` with on_error="raise", and of
    `export`.
    """
    where = Path(os.path.realpath(path))
    check_name("tag", tag)
    if model is None and optimizer is None:
        raise InvalidRequest("save_checkpoint saves a model, an optimizer or both: pass at least one")
    file = where / f"{tag}{_SUFFIX}"
    if not partial and file.exists():
        raise AlreadyExists(f"{file} exists already: choose another tag, or remove it first")
    kept = num_kept_partial_checkpoints
    if kept is not None and (type(kept) is not int or kept < 1):
        raise InvalidRequest(f"num_kept_partial_checkpoints is {kept!r}; expected a number from 1 up, or None for all")
    if any(list(find(user_content, "", kind)) for kind in (torch.nn.Module, torch.optim.Optimizer)):
        raise InvalidRequest("user_content has a module or an optimizer: save its state_dict() instead")
    run = _run(where)
    agent = run.agent
    if partial:
        agent.retention = checked(PreserveAll() if kept is None else LatestN(kept))
    content = per_rank({"rank": agent.rank, "content": user_content})
    state = {"model": model, "optimizer": optimizer, "user_content": content}
    state = {name: value for name, value in state.items() if value is not None}
    run.highest = run.steps[tag] = _next_step(tag, run.highest)
    pending = agent.snapshot(state, step=run.highest, user_content={"tag": tag}, on_error="raise")
    if not partial:
        pending.wait("durable")
        _on_rank_0(agent, lambda: export(where / _JOB, "torch", file, which=pending.step))
    return pending


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
    load_optimizer: bool = True,
    translate_function: Callable[[State], State] | None = None,
    device: str | torch.device = "cpu",
) -> Any:
    """Load a model and an optimizer in place, and return the `user_content` of this rank. All ranks call this.

    path: as for `save_checkpoint`. tag: of the checkpoint; default: the newest one, also if it is only in memory so far.
    partial: True resumes a partial checkpoint, on the same or another number of ranks. False loads the file of a full one.
    strict: False allows keys to be missing in the model or in the checkpoint. load_optimizer: False leaves the optimizer as it is.
    translate_function: for a full checkpoint, takes the state dict of the model and returns one with the names of this model. It needs
        load_optimizer=False, because it does not translate the names in an optimizer.
    device: of the memory for parameters that are on the meta device. They become new objects: make the optimizer afterwards.

    On another number of ranks than saved it, rank n gets the user content of rank n modulo the number of those ranks.

    Raises NotFound if there is no such checkpoint; StructureMismatch if it does not fit; InvalidRequest for wrong arguments; the errors of
    `Agent.recover` and `load_model`.
    """
    where = Path(os.path.realpath(path))
    if not partial:
        return _resume_full(where, tag, model, optimizer if load_optimizer else None, strict, translate_function, device)
    if translate_function is not None:
        raise InvalidRequest("translate_function: only for partial=False; a partial checkpoint has the names of the model that saved it")
    if str(where) not in _runs and not is_root(where):
        raise NotFound(f"no partial checkpoint in {where}")
    run = _run(where)
    step = run.steps.get(tag) if tag is not None else None
    if tag is not None and step is None:
        step = _step_of(where, tag)
    state: State = {"model": model, "optimizer": optimizer if load_optimizer else None, "user_content": per_rank(None)}
    with ExitStack() as undone:
        if model is not None:
            late = {id(tensor) for tensor in tensors_of(unwrapped(model)).values() if tensor.is_meta}
            if late and not strict:
                raise InvalidRequest("a model on the meta device needs strict=True: keys that the checkpoint lacks would have no values")
            undone.callback(give_memory(model, late, device))
        recovered = run.agent.recover(
            state,
            step=step,
            strict=strict,
            keep=[name for name in ("model", "optimizer") if state[name] is None],
            on_reshape=lambda key, values: _of_rank(values, run.agent.rank),
        )
        if recovered is None:
            raise NotFound(f"no partial checkpoint in {where}")
        undone.pop_all()
    if model is not None:
        on_meta(model)
    own = state["user_content"]
    return (own.value if isinstance(own, PerRank) else own)["content"]


def close() -> None:
    """Wait until everything that was captured is durable, and end the agents. Without this call, the daemon saves it all the same."""
    while _runs:
        _runs.popitem()[1].agent.close()


def _run(where: Path) -> _Run:
    run = _runs.get(str(where))
    if run is None or run.agent.closed:
        agent = Agent(_JOB, root=where)  # makes the root
        steps = [manifest.step for manifest in _manifests(where) if manifest.step is not None]
        run = _runs[str(where)] = _Run(agent, max(steps, default=-1))
    return run


def _of_rank(values: list[Any], rank: int) -> Any:
    if rank >= len(values):
        log.warning("user_content was saved on %d ranks: rank %d gets that of rank %d", len(values), rank, rank % len(values))
    return values[rank % len(values)]


def _manifests(where: Path) -> list[Manifest]:
    """Return the manifests of the partial checkpoints, the newest last. Damaged ones are left out. Raises StorageError."""
    repository, found = open_root(where), list[Manifest]()
    try:
        for name in repository.tags(_JOB):
            try:
                found.append(repository.read_manifest(_JOB, name))
            except (NotFound, IntegrityError):
                continue
    except OSError as error:
        raise StorageError.of(f"list {where}", error) from None
    return sorted(found, key=lambda manifest: manifest.order)


def _tag_of(manifest: Manifest) -> str:
    content = manifest.user_content
    return str(content.get("tag", "")) if isinstance(content, dict) else ""


def _step_of(where: Path, tag: str) -> int:
    manifests = _manifests(where)
    steps = [manifest.step for manifest in manifests if _tag_of(manifest) == tag and manifest.step is not None]
    if not steps:
        tags = ", ".join(_tag_of(manifest) for manifest in manifests[-8:]) or "none"
        raise NotFound(f"no partial checkpoint {tag!r} in {where}; there are {tags}")
    return steps[-1]


def _next_step(tag: str, highest: int) -> int:
    """Return the step to save: the number at the end of the tag if no step is higher, otherwise one more than the highest step.

    Steps of earlier runs count, so that a step has one tag.
    """
    number = re.search(r"(\d{1,15})$", tag)
    return max(highest + 1, int(number[1]) if number else 0)


def _on_rank_0(agent: Agent, call: Callable[[], object]) -> None:
    """Call a function on rank 0, while the other ranks wait. If it raises, all ranks raise the error."""
    failure: Exception | None = None
    if agent.rank == 0:
        try:
            call()
        except Exception as error:
            failure = error
    if agent.world_size > 1:
        said = [None if failure is None else str(failure)]
        dist.broadcast_object_list(said, src=0)
        if agent.rank and said[0] is not None:
            raise StorageError(f"rank 0 could not write the full checkpoint: {said[0]}")
    if failure is not None:
        raise failure


def _resume_full(
    where: Path,
    tag: str | None,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
    translate: Callable[[State], State] | None,
    device: str | torch.device,
) -> Any:
    if model is None:
        raise InvalidRequest("a full checkpoint is loaded into a model: pass it, because the names in an optimizer are its own")
    if translate is not None and optimizer is not None:
        raise InvalidRequest("translate_function translates the names of the model only: pass load_optimizer=False")
    file = where / f"{check_name('tag', tag)}{_SUFFIX}" if tag is not None else _newest_file(where)
    if not file.is_file():
        raise NotFound(f"no full checkpoint {file}")
    with one_sentence(file):
        loaded = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    if not isinstance(loaded, dict) or not {"model", "user_content"} <= loaded.keys():
        raise NotFound(f"{file} is no full checkpoint of save_checkpoint with a model: load it with load_model")
    if optimizer is not None and "optimizer" not in loaded:
        raise NotFound(f"{file} has no optimizer: pass load_optimizer=False")
    restored = None if optimizer is None else _state_of(model, optimizer, loaded["optimizer"], strict=strict)
    weights = loaded["model"] if translate is None else translate(loaded["model"])
    if not isinstance(weights, dict):
        raise InvalidRequest(f"translate_function returned a {type(weights).__name__}; expected a state dict")
    load_contents(model, Contents(with_leaves(weights), lambda leaves: {}), Selection(), strict=strict, device=device)
    if optimizer is not None and restored is not None:
        optimizer.load_state_dict(restored)
    content = loaded["user_content"]
    rank = dist.get_rank() if dist.is_initialized() else 0
    return _of_rank(content if isinstance(content, list) else [content], rank)["content"]


def _state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: State, *, strict: bool) -> State:
    """Return a saved state, which has names of parameters, as `load_state_dict` of this optimizer takes it.

    Raises StructureMismatch if the optimizer has a parameter that no saved group has, or one that is in no module. With `strict` off, such
    parameters keep their state and settings.
    """
    names = parameter_names(model).of
    groups = {name: group for group in saved["param_groups"] for name in group["params"]}
    made, number, lacking = optimizer.state_dict(), 0, list[str]()
    for mine, group in zip(made["param_groups"], optimizer.param_groups, strict=True):
        for parameter in group["params"]:
            name = names.get(id(parameter), "a parameter that is not in the model")
            if name not in groups:
                lacking.append(name)
            else:
                mine.update({key: value for key, value in groups[name].items() if key != "params"})
                made["state"].pop(number, None)
                if name in saved["state"]:
                    made["state"][number] = {key: _placed(value, parameter) for key, value in saved["state"][name].items()}
            number += 1
    if lacking and strict:
        raise StructureMismatch(f"the checkpoint has no state of the optimizer for {some_text(lacking)}: pass strict=False to keep theirs")
    return made


def _placed(value: Any, parameter: torch.Tensor) -> Any:
    """Return a moment as it has to be for a parameter: sharded as that is. Any other value stays."""
    if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        whole = value.to(parameter.device_mesh.device_type)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def _newest_file(where: Path) -> Path:
    files = sorted(where.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        raise NotFound(f"no full checkpoint in {where}")
    return files[-1]
