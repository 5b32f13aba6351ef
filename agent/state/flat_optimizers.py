"""Captures and restores the state of an optimizer over parameters that
FullyShardedDataParallel (FSDP1) has flattened.

DCP gathers this state, with all ranks that have shards of a flat parameter. What could
stop one of them is found on all of them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptd.agent.state.optimizers import taken_key, unshared, without_param_names, without_wrappers
from ckptd.shared.errors import UnsavableValue


def flat_optimizer_state(
    optimizer: torch.optim.Optimizer, root: torch.nn.Module, path: str
) -> dict[str, Any]:
    """Return the state of an optimizer over parameters that FSDP1 has flattened in the
    module `root`.

    An optimizer without state on any rank is captured as empty, because DCP's
    `get_optimizer_state_dict` would make it take a step. path: the key of the
    optimizer. Raises UnsavableValue on all ranks if FSDP1 cannot gather the state of
    one of them.
    """
    own = any(isinstance(key, torch.Tensor) for key in optimizer.state)
    if any(_of_all_ranks(root, own)):
        try:
            return flattened_state(optimizer, root, path)
        finally:
            if not own:  # all shards on this rank are empty, and DCP has made state for them
                others = {
                    key: value
                    for key, value in optimizer.state.items()
                    if not isinstance(key, torch.Tensor)
                }
                optimizer.state.clear()
                optimizer.state.update(others)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    return {"state": dict(optimizer.state), "param_groups": without_param_names(groups)}


def _groups(root: torch.nn.Module) -> list[dist.ProcessGroup | None]:
    """Return the process groups over whose ranks FSDP1 has divided parameters of
    `root`.
    """
    modules = FullyShardedDataParallel.fsdp_modules(root)
    divided = [
        module.process_group
        for module in modules
        if module.sharding_strategy is not ShardingStrategy.NO_SHARD
    ]
    return list({id(group): group for group in divided}.values())


def _of_all_ranks(root: torch.nn.Module, own: Any) -> list[Any]:
    """Return `own` of each rank that shares flat parameters of `root` with this one.

    All these ranks must call this.
    """
    found = [own]
    for group in _groups(root):
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, own, group=group)
        found += values
    return found


def flattened_state(
    optimizer: torch.optim.Optimizer, root: torch.nn.Module, path: str
) -> dict[str, Any]:
    """Return the state of an optimizer over flat parameters, from DCP's
    `get_optimizer_state_dict`.

    The groups and the entries that belong to no parameter, which DCP leaves out, are
    added. DCP gives all parameters of a flat parameter the same tensor `step`. Here
    each has a tensor of its own, because an optimizer over a model that is not flat
    adds to the step of each parameter. Raises UnsavableValue on all ranks if FSDP1
    cannot gather the state of one of them.
    """

    def check(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        values = [
            value
            for entry in state["state"].values()
            if isinstance(entry, dict)
            for value in entry.values()
        ]
        in_parts = bool(_groups(root)) and any(
            is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor)
            for value in values
        )
        ranks = _of_all_ranks(root, dist.get_rank() if in_parts else None)
        if holders := sorted(rank for rank in ranks if rank is not None):
            raise UnsavableValue(
                f"{path}: FullyShardedDataParallel cannot gather state that consists of several "
                f"tensors, such as quantized moments; rank "
                f"{holders[0]} has such state: use fully_shard, or an optimizer with plain tensors"
            )

    with _only_parameters(optimizer) as (empty, others), _checked(optimizer, check):
        found: dict[str, Any] = get_optimizer_state_dict(root, optimizer)
    groups = list(found["param_groups"])
    for number, group in empty.items():
        groups.insert(number, {**group, "params": []})
    _check_apart(others, groups)
    return {
        **found,
        "state": {**unshared(found["state"]), **others},
        "param_groups": without_param_names(groups),
    }


@contextmanager
def _checked(
    optimizer: torch.optim.Optimizer, check: Callable[[torch.optim.Optimizer, dict[str, Any]], None]
) -> Iterator[None]:
    """Context manager. Call `check` with each state dict of the optimizer.

    DCP calls `state_dict` after it has made missing state, and before it gathers. A
    class of the caller's that never calls `Optimizer.__init__` is not checked.
    """
    inner = without_wrappers(optimizer)
    if "_optimizer_state_dict_post_hooks" not in vars(inner):
        yield
        return
    hook = inner.register_state_dict_post_hook(check)
    try:
        yield
    finally:
        hook.remove()


def load_flattened_state(
    optimizer: torch.optim.Optimizer, root: torch.nn.Module, state: dict[str, Any]
) -> None:
    """Load a state that `flattened_state` has returned, with DCP's
    `set_optimizer_state_dict`.
    """
    named = {name for group in state["param_groups"] for name in group["params"]}
    of_parameters = {
        **state,
        "state": {key: value for key, value in state["state"].items() if key in named},
        "param_groups": [group for group in state["param_groups"] if group["params"]],
    }
    with _only_parameters(optimizer) as (empty, others):
        set_optimizer_state_dict(root, optimizer, of_parameters)
        others.clear()
        others.update({key: value for key, value in state["state"].items() if key not in named})
        for number, group in empty.items():
            group.update(
                {
                    key: value
                    for key, value in state["param_groups"][number].items()
                    if key != "params"
                }
            )


@contextmanager
def _only_parameters(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[dict[int, dict[str, Any]], dict[Any, Any]]]:
    """Context manager.

    Remove the groups and entries without parameters, because DCP fails on them.

    Yields the removed groups by their number, and the removed entries of the state.
    Both are put back at the end, as they then are.
    """
    groups = optimizer.param_groups
    empty = {number: group for number, group in enumerate(groups) if not group["params"]}
    others = {
        key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)
    }
    groups[:] = [group for group in groups if group["params"]]
    for key in others:
        del optimizer.state[key]
    try:
        yield empty, others
    finally:
        for number, group in empty.items():
            optimizer.param_groups.insert(number, group)
        optimizer.state.update(others)


def _check_apart(others: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    for taken in others.keys() & {name for group in groups for name in group["params"]}:
        raise taken_key(taken)
