"""Saves any object with SageMaker's `save`, and loads it with `load`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckptd.agent.convert.export import export
from ckptd.agent.convert.formats import one_sentence
from ckptd.agent.pending import Pending
from ckptd.agent.read.checkpoint import Checkpoint, opened_of
from ckptd.agent.read.loader import materialize
from ckptd.agent.smp.runs import (
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
from ckptd.agent.state.tree import any_node, empty_like, filled, like, per_rank, tensor_names
from ckptd.shared.errors import NotFound, UnsavableValue, storage_errors
from ckptd.shared.location import local
from ckptd.shared.names import check_name
from ckptd.shared.storage.locate import is_root
from ckptd.shared.units import some_text

_JOB = "objects"


def save(obj: Any, f: str | os.PathLike[str], partial: bool = True) -> Pending:
    """Save an object, such as a state dict. All ranks call this.

    obj: of this rank: containers, tensors and values as for `Agent.snapshot`. f:
        DIR/NAME; DIR becomes the root of a daemon, unless it lies below a root.
    partial: True copies the object of each rank and returns, and the daemon saves the
        copies as a checkpoint of the job "objects" in DIR. Sharded tensors (DTensor,
        ShardedTensor) are saved by their shards, each once. Everything else is saved
        for each rank, also if it is the same on all. A later save of the same name is
        another checkpoint, and both stay. False writes the file `f` as torch.save does,
        with whole tensors, and returns when it is there. All that is not sharded must
        then be the same on all ranks. A checkpoint with the same content stays in the
        job "objects".

    Returns the `Pending` of the snapshot. Raises InvalidName for NAME; InvalidRequest
    for an object with a module or an optimizer; UnsavableValue; AlreadyExists if the
    file `f` exists, with partial=False; the errors of `Agent`, of `Agent.snapshot` with
    on_error="raise", and of `export`. An error of rank 0 with the file is a
    StorageError on other ranks.
    """
    where, name = _place(f)
    check_plain("the object", obj)
    state = {"object": _by_rank(obj) if partial else obj}
    run = run_in(where, _JOB)
    if not partial:
        on_rank_0(run.agent, where / name, lambda: check_absent(where / name))
        run.agent._kept_plan.invalidate()  # the ranks compare their values when they plan
    run.highest += 1
    pending = run.agent.snapshot(
        state,
        step=run.highest,
        rng=False,
        user_content={"tag": name if partial else ""},
        on_error="raise",
        hold="now",
    )
    if partial:
        run.saved[name] = pending
    else:
        pending.wait("durable")
        on_rank_0(
            run.agent,
            where / name,
            lambda: export(
                run.place.path, "torch", where / name, which=pending.step, only="object"
            ),
        )
    return pending


def load(
    f: str | os.PathLike[str], map_location: str | torch.device | None = None, partial: bool = True
) -> Any:
    """Return the object of this rank that `save` has saved under this name: the newest
    one. Every rank calls this by itself.

    f: as for `save`. map_location: the device of the tensors; default: the CPU.
    partial: as it was for `save`; False reads the file `f` with
    `torch.load(weights_only=True)`.

    Tensors that were sharded come whole. To load each shard into its place, use
    `resume_from_checkpoint`. On another number of ranks than saved it, rank n gets the
    object of rank n modulo the number of those ranks.

    Raises NotFound if there is no such object; IntegrityError if it is damaged;
    StorageError; the error of the save if this process has saved it last, and that has
    failed.
    """
    where, name = _place(f)
    if not partial:
        if not (where / name).is_file():
            raise NotFound(f"{where / name} is not there, or is no file")
        with one_sentence(where / name):
            return torch.load(where / name, weights_only=True, map_location=map_location or "cpu")
    run = known_run(where, _JOB)
    if run is not None and name in run.saved:
        run.saved[name].wait("durable")
    place = job_place(where, _JOB)
    found = manifests(place) if is_root(place.root) else []
    named = [manifest for manifest in found if tag_of(manifest.user_content) == name]
    if not named:
        there = (
            some_text(
                list(
                    dict.fromkeys(
                        tag for one in reversed(found) if (tag := tag_of(one.user_content))
                    )
                )
            )
            or "none"
        )
        raise NotFound(f"no object {name!r} in {where}; there are {there}")
    with Checkpoint.open(place.path / named[-1].tag) as checkpoint:
        return _of_rank(checkpoint, torch.device(map_location or "cpu"))


def _place(f: str | os.PathLike[str]) -> tuple[Path, str]:
    directory, name = os.path.split(os.fspath(f))
    return local(directory or ".", "path").resolve(), check_name("name", name)


def _by_rank(value: Any) -> Any:
    """Return a tree in which everything but the sharded tensors is marked as this
    rank's own.
    """
    if isinstance(value, (DTensor, ShardedTensor)):
        return value
    if not any_node(value, lambda node: isinstance(node, (DTensor, ShardedTensor))):
        return per_rank(value)
    if isinstance(value, dict):
        made = empty_like(value)
        made.update({key: _by_rank(member) for key, member in value.items()})
        return made
    if type(value) not in (list, tuple):
        raise UnsavableValue(
            f"a {type(value).__name__} has a sharded tensor in it: save it in a dict, a list or a "
            f"tuple"
        )
    return like(value, [_by_rank(member) for member in value])


def _of_rank(checkpoint: Checkpoint, device: torch.device) -> Any:
    rank = source_rank(
        "the object",
        checkpoint.manifest.world_size,
        dist.get_rank() if dist.is_initialized() else 0,
    )
    with storage_errors(f"read {checkpoint.tag}"):
        tree = opened_of(checkpoint).document(rank)["state"]["object"]
        made = materialize(opened_of(checkpoint).saved, tensor_names(tree))
    return filled(tree, lambda name: made[name].to(device))
