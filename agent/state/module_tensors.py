"""The parameters and the persistent buffers of a module, by canonical name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ckptd.agent.state.wrappers import canonical_keys


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and the persistent buffers of a module by name, tied ones
    under all their names.
    """
    return canonical_keys(module, raw_tensors(module))


def raw_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the same by raw name, as in the state dict of the module."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        persistent = {
            name: tensor
            for name, tensor in part._buffers.items()
            if name not in part._non_persistent_buffers_set
        }
        for name, tensor in (part._parameters | persistent).items():
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def missing(own: Mapping[str, torch.Tensor], theirs: Collection[str]) -> list[str]:
    """Return the keys of a module whose tensor a checkpoint has under no name."""
    there = {id(tensor) for name, tensor in own.items() if name in theirs}
    return [name for name, tensor in own.items() if id(tensor) not in there]


def difference(name: str, shape: tuple[int, ...], dtype: torch.dtype, own: torch.Tensor) -> str:
    """Return what is wrong with a pair of tensors, or "" if the saved one, which has
    this shape and dtype, can be copied into the module's own.
    """
    if tuple(own.shape) != shape:
        return f"{name}: the checkpoint has shape {list(shape)}, the model {list(own.shape)}"
    with_fractions = own.dtype.is_floating_point or own.dtype.is_complex
    lost = (dtype.is_complex and not own.dtype.is_complex) or (
        dtype.is_floating_point and not with_fractions
    )
    if lost or str(dtype).startswith("torch.q"):
        return (
            f"{name}: the checkpoint has {dtype}, the model {own.dtype}, which cannot hold "
            f"its values"
        )
    return ""
