"""Loads the weights of a model from a checkpoint of any format, by name, as the start
of a fine-tuning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptd.agent.convert.contents import Contents, Leaf, children, model_of, replaced
from ckptd.agent.convert.formats import opened
from ckptd.agent.convert.selection import Selection, part_of
from ckptd.agent.read.loader import copy_any
from ckptd.agent.state.module_tensors import difference, raw_tensors, tensors_of
from ckptd.agent.state.module_tensors import missing as missing_keys
from ckptd.agent.state.wrappers import canonical_keys, current_names, flattens, raw_names, unwrapped
from ckptd.agent.threads.interruptible import interruptible
from ckptd.shared.errors import InvalidRequest, StructureMismatch, storage_errors
from ckptd.shared.location import located
from ckptd.shared.units import some_text

log = logging.getLogger("ckptd.agent")
_EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The keys that a load has not touched.

    missing: keys of the model that the checkpoint does not have; they are as they were.
    unexpected: keys of the checkpoint that the model does not have. on_meta: parameters
    and buffers of the model that are still on the meta device, and need values before
    the model can run.
    """

    missing: list[str]
    unexpected: list[str]
    on_meta: list[str]


@interruptible
def load_model(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    which: str | int = "newest",
    only: str = "",
    rename: Sequence[tuple[str, str]] = (),
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    device: str | torch.device = "cpu",
) -> LoadedModel:
    """Fill the parameters and buffers of a model from a checkpoint, and return the keys
    that were not touched.

    path: the job of a ckptd checkpoint, or the checkpoint itself; a model directory in
    the Hugging Face layout; a safetensors file; a file of torch.save; or a directory of
    DCP. which: for a job, as for `Checkpoint.open`. only: the dotted name of the part
    of the state that is the model. Without it, this is the part "model", or the only
    module in the checkpoint, or the whole. rename: pairs of a regular expression and
    its replacement, applied to every name of the checkpoint in turn. names: names in
    the model by names in the checkpoint, which come first. strict: True raises
    StructureMismatch if a key is missing or unexpected. A tied weight is not missing if
    it is there under another name. device: of the memory for parameters and buffers
    that are on the meta device. They become new objects: make the optimizer afterwards.

    Tensors keep the dtype, the device and, as DTensors, the placements that they have
    in the model; values are converted, but not complex ones to real ones, or
    floating-point ones to integers. The extra states of modules (`set_extra_state`) are
    loaded, too. From a ckptd checkpoint, a rank reads only the stored shards that
    overlap its own. Every rank calls this by itself: if the job is still running, pass
    a step or a tag as `which`.

    Nothing is changed before every name and shape has been compared. Raises
    StructureMismatch; NotFound; InvalidRequest for wrong arguments or a model that
    FSDP1 has flattened; UnsavableValue, IntegrityError and StorageError as
    `Checkpoint.open` and `import_checkpoint` do. If the bytes of a tensor turn out to
    be damaged, the model is partly overwritten, or has memory without values if it was
    on the meta device.
    """
    with storage_errors(f"read {path}"), opened(located(path), which) as (_, contents, _):
        selection = Selection(only or model_of(contents), None, tuple(rename), names or {})
        return load_contents(model, contents, selection, strict=strict, device=device)


def load_contents(
    model: torch.nn.Module,
    contents: Contents,
    selection: Selection,
    *,
    strict: bool,
    device: str | torch.device,
) -> LoadedModel:
    """Fill the parameters and buffers of a model from selected contents.

    See `load_model`.
    """
    if flattens(model):
        raise InvalidRequest(
            "FSDP1 has flattened parameters of this model: load the weights before it is wrapped, "
            "or use FSDP2"
        )
    module = unwrapped(model)
    own, extra = tensors_of(module), _extra_states(module)
    leaves, theirs = _divided(selection, contents)
    current = current_names(
        raw_names(module, [*raw_tensors(module), *_raw_extra_states(module)]), [*leaves, *theirs]
    )
    leaves, theirs = (
        {current[name]: leaf for name, leaf in leaves.items()},
        {current[name]: value for name, value in theirs.items()},
    )
    missing = [*missing_keys(own, leaves), *(name for name in extra if name not in theirs)]
    found = LoadedModel(
        missing, [name for name in (*leaves, *theirs) if name not in own and name not in extra], []
    )
    _compare(own, leaves, found if strict else None)
    wanted = {name: leaf for name, leaf in leaves.items() if name in own}
    give_memory(module, {id(own[name]) for name in wanted}, device)
    filled = tensors_of(module)
    _fill({name: filled[name] for name in wanted}, wanted, contents)
    for name, value in theirs.items():
        if name in extra:
            extra[name].set_extra_state(
                replaced(value, Leaf, lambda leaf: next(contents.read([leaf]))[1])
            )
    found.on_meta.extend(on_meta(module))
    return found


def on_meta(module: torch.nn.Module) -> list[str]:
    """Return the names of parameters and buffers that are on the meta device, and warn
    of them.
    """
    found = [
        name
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if tensor.is_meta
    ]
    if found:
        log.warning("still on the meta device, and without values: %s", some_text(found))
    return found


def _extra_states(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that have a state of their own kind (`get_extra_state`), by
    the key that it has in a state dict.
    """
    return canonical_keys(module, _raw_extra_states(module))


def _raw_extra_states(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    base = torch.nn.Module.get_extra_state
    named = module.named_modules(remove_duplicate=False)
    return {
        f"{name}.{_EXTRA}" if name else _EXTRA: part
        for name, part in named
        if type(part).get_extra_state is not base
    }


def _divided(selection: Selection, contents: Contents) -> tuple[dict[str, Leaf], dict[str, Any]]:
    """Return the selected tensors by name, and the extra states of modules by name,
    which may be any values.
    """
    part = part_of(contents.tree, selection.only)
    items = list(children(part) or ()) if isinstance(part, dict) else []
    theirs = {
        selection.new_name(key): value
        for key, value in items
        if isinstance(key, str) and key.rpartition(".")[2] == _EXTRA
    }
    leaves, _ = selection.flat(contents.tree)
    inside = tuple(f"{key}." for key in theirs)
    return {
        name: leaf
        for name, leaf in leaves.items()
        if name not in theirs and not name.startswith(inside)
    }, theirs


def _compare(
    own: Mapping[str, torch.Tensor], leaves: Mapping[str, Leaf], strictly: LoadedModel | None
) -> None:
    """Raise StructureMismatch, naming what differs: shapes and, with `strictly`, keys
    that only one side has.
    """
    differ = [
        problem
        for name, leaf in leaves.items()
        if name in own and (problem := difference(name, leaf.shape, leaf.saved, own[name]))
    ]
    if strictly is not None:
        if strictly.missing:
            differ.append(f"not in the checkpoint: {some_text(strictly.missing)}")
        if strictly.unexpected:
            differ.append(f"not in the model: {some_text(strictly.unexpected)}")
        if strictly.missing or strictly.unexpected:
            differ.append(
                "give the names that the model has with `rename` or `names`, or pass strict=False "
                "to leave these keys out"
            )
    if differ:
        raise StructureMismatch(f"the model does not fit the checkpoint: {'; '.join(differ[:11])}")


def give_memory(
    module: torch.nn.Module, wanted: set[int], device: str | torch.device
) -> Callable[[], None]:
    """Replace the parameters and buffers with these ids that are on the meta device by
    such with memory. Tied ones stay tied.

    Return a function that puts those on the meta device back.
    """
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for part in module.modules():
        for values in (part._parameters, part._buffers):
            for name, tensor in values.items():
                if tensor is None or id(tensor) not in wanted or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor.detach(), device=device)
                    made[id(tensor)] = (
                        torch.nn.Parameter(empty, tensor.requires_grad)
                        if values is part._parameters
                        else empty
                    )
                before.append((values, name, tensor))
                values[name] = made[id(tensor)]  # type: ignore[assignment]

    def undo() -> None:
        for values, name, tensor in before:
            values[name] = tensor

    return undo


def _fill(
    places: Mapping[str, torch.Tensor], leaves: Mapping[str, Leaf], contents: Contents
) -> None:
    """Copy each leaf into the tensor of its name."""
    with torch.no_grad():
        if contents.fill is not None:
            contents.fill([(leaves[name], tensor.detach()) for name, tensor in places.items()])
            return
        for name, (_, tensor) in zip(leaves, contents.read(leaves.values()), strict=True):
            place = places[name].detach()
            if isinstance(place, DTensor):
                whole = tensor.to(device=place.device_mesh.device_type, dtype=place.dtype)
                tensor = distribute_tensor(
                    whole, place.device_mesh, place.placements, src_data_rank=None
                ).to_local()
                place = place.to_local()
            copy_any(place, tensor)
