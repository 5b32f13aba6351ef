"""Saves and resumes a model, an optimizer and the caller's own content with
`save_checkpoint` and `resume_from_checkpoint`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ckptd.agent.convert.export import export
from ckptd.agent.convert.load_model import give_memory, on_meta
from ckptd.agent.pending import Pending
from ckptd.agent.smp.full import SUFFIX, StateDict, resume_full
from ckptd.agent.smp.runs import (
    JobPlace,
    check_absent,
    check_plain,
    job_place,
    known_run,
    manifests,
    on_rank_0,
    run_in,
    source_rank,
    tag_of,
)
from ckptd.agent.state.module_tensors import tensors_of
from ckptd.agent.state.tree import PerRank, per_rank
from ckptd.agent.state.wrappers import unwrapped
from ckptd.agent.threads.interruptible import interruptible
from ckptd.shared.errors import InvalidRequest, NotFound
from ckptd.shared.location import local
from ckptd.shared.names import check_name
from ckptd.shared.retention import LatestN, PreserveAll, checked
from ckptd.shared.storage.locate import is_root

_JOB = "partial"


@interruptible
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

    path: a directory, which becomes the root of a daemon, unless it lies below a
        root.
    tag: a name, such as "total_steps1000".
    partial: True copies the state and returns. The daemon saves it, replicas once, and
        it can be resumed on any number of ranks. False also writes `<path>/<tag>.pt`
        with whole tensors, and returns when that file is there. No rank holds all of it
        in memory.
    user_content: of this rank, for example the position of its data loader. For
        partial=False, plain values that `torch.load(weights_only=True)` reads.
    num_kept_partial_checkpoints: how many checkpoints stay, the newest ones. An older
        one is deleted once a newer one is durable. Default: all of them. A file of a
        full checkpoint is never deleted.

    Returns the `Pending` of the snapshot. Raises InvalidName for a tag; InvalidRequest
    without a model and an optimizer, or for a number of kept checkpoints below 1;
    AlreadyExists if the file exists; the errors of `Agent`, of `Agent.snapshot` with
    on_error="raise", and of `export`.
    """
    where = local(path, "path").resolve()
    check_name("tag", tag)
    if model is None and optimizer is None:
        raise InvalidRequest(
            "save_checkpoint saves a model, an optimizer or both: pass at least one"
        )
    file = where / f"{tag}{SUFFIX}"
    kept = num_kept_partial_checkpoints
    if kept is not None and (type(kept) is not int or kept < 1):
        raise InvalidRequest(
            f"num_kept_partial_checkpoints is {kept!r}; expected a number from 1 up, or None for "
            f"all"
        )
    check_plain("user_content", user_content)
    run = run_in(where, _JOB)
    agent = run.agent
    if not partial:
        on_rank_0(agent, file, lambda: check_absent(file))
    else:
        agent.retention = checked(PreserveAll() if kept is None else LatestN(kept))
    content = per_rank({"rank": agent.rank, "content": user_content})
    state = {"model": model, "optimizer": optimizer, "user_content": content}
    state = {name: value for name, value in state.items() if value is not None}
    run.highest = _next_step(tag, run.highest)
    pending = run.saved[tag] = agent.snapshot(
        state, step=run.highest, user_content={"tag": tag}, on_error="raise", hold="now"
    )
    if not partial:
        pending.wait("durable")
        on_rank_0(agent, file, lambda: export(run.place.path, "torch", file, which=pending.step))
    return pending


@interruptible
def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
    load_optimizer: bool = True,
    translate_function: Callable[[StateDict], StateDict] | None = None,
    same_partition_load: bool = False,
    device: str | torch.device = "cpu",
) -> Any:
    """Load a model and an optimizer in place, and return the `user_content` of this
    rank. All ranks call this.

    path: as for `save_checkpoint`. tag: of the checkpoint; one that another process has
        saved is found once it is durable. Default: the newest checkpoint, also if it is
        only in memory so far.
    partial: True resumes a partial checkpoint, on the same or another number of ranks.
        False loads the file of a full one.
    strict: False allows keys to be missing in the model or in the checkpoint.
        load_optimizer: False leaves the optimizer as it is.
    translate_function: for a full checkpoint, takes the state dict of the model and
        returns one with the names of this model. It needs load_optimizer=False, because
        it does not translate the names in an optimizer.
    same_partition_load: for a partial checkpoint, True promises that as many ranks
        saved it, each with the same shards. This is faster with many tensors.
    device: of the memory for parameters that are on the meta device. They become new
        objects: make the optimizer afterwards.

    On another number of ranks than saved it, rank n gets the user content of rank n
    modulo the number of those ranks.

    Raises NotFound if there is no such checkpoint; StructureMismatch if it does not
    fit; InvalidRequest for wrong arguments; the errors of `Agent.recover` and
    `load_model`.
    """
    where = local(path, "path").resolve()
    if not partial and same_partition_load:
        raise InvalidRequest(
            "same_partition_load: only for partial=True; a full checkpoint has whole tensors"
        )
    if not partial:
        return resume_full(
            where,
            tag,
            model,
            optimizer if load_optimizer else None,
            strict,
            translate_function,
            device,
        )
    if translate_function is not None:
        raise InvalidRequest(
            "translate_function: only for partial=False; a partial checkpoint has the names of "
            "the model that saved it"
        )
    if known_run(where, _JOB) is None and not is_root(job_place(where, _JOB, ask=True).root):
        raise NotFound(f"no partial checkpoint in {where}")
    run = run_in(where, _JOB)
    step = (
        None
        if tag is None
        else run.saved[tag].step
        if tag in run.saved
        else _step_of(where, run.place, tag)
    )
    state: StateDict = {
        "model": model,
        "optimizer": optimizer if load_optimizer else None,
        "user_content": per_rank(None),
    }
    with ExitStack() as undone:
        if model is not None:
            late = {
                id(tensor) for tensor in tensors_of(unwrapped(model)).values() if tensor.is_meta
            }
            if late and not strict:
                raise InvalidRequest(
                    "a model on the meta device needs strict=True: keys that the checkpoint lacks "
                    "would have no values"
                )
            undone.callback(give_memory(model, late, device))
        recovered = run.agent.recover(
            state,
            step=step,
            strict=strict,
            same_partition=same_partition_load,
            keep=[name for name in ("model", "optimizer") if state[name] is None],
            on_reshape=lambda key, values: values[source_rank(key, len(values), run.agent.rank)],
        )
        if recovered is None:
            raise NotFound(f"no partial checkpoint in {where}")
        if tag is not None and (found := tag_of(recovered.user_content)) != tag:
            raise NotFound(
                f"step {step} of {where}, which had the tag {tag!r}, was saved again with the tag "
                f"{found!r}: that was loaded"
            )
        undone.pop_all()
    if model is not None:
        on_meta(model)
    own = state["user_content"]
    return (own.value if isinstance(own, PerRank) else own)["content"]


def _step_of(where: Path, place: JobPlace, tag: str) -> int:
    found = manifests(place)
    steps = [
        manifest.step
        for manifest in found
        if tag_of(manifest.user_content) == tag and manifest.step is not None
    ]
    if not steps:
        tags = ", ".join(tag_of(manifest.user_content) for manifest in found[-8:]) or "none"
        raise NotFound(f"no partial checkpoint {tag!r} in {where}; there are {tags}")
    return steps[-1]


def _next_step(tag: str, highest: int) -> int:
    """Return the step to save: the number at the end of the tag if no step is higher,
    otherwise one more than the highest step.

    Steps of earlier runs count, so that a step has one tag.
    """
    number = re.search(r"(\d{1,15})$", tag)
    return max(highest + 1, int(number[1]) if number else 0)
