"""Refuses tensors that cannot be saved, with an error that names the key and says what
to save instead.
"""

from __future__ import annotations

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats.bounds import MAX_DIMENSIONS

_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def check_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a form whose memory holds its values.

    A sharded tensor is checked and returned as it is. A conjugate or negative view is
    resolved into a new tensor. Raises UnsavableValue for a tensor that is quantized, on
    the meta device or of an unknown class, and for one of more than MAX_DIMENSIONS
    dimensions. Raises it for a sparse or nested tensor, too, which is saved by its
    parts instead. Raises it for a DTensor with a partial placement, since each rank
    holds only a summand, and for a DTensor whose shards are wrapper subclasses.
    """
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise UnsavableValue(
                f"{name}: a DTensor with placements {tensor.placements} holds partial results, "
                f"not values; redistribute() it first"
            )
        if is_traceable_wrapper_subclass(local := tensor._local_tensor):
            raise UnsavableValue(
                f"{name}: cannot save this DTensor, because its shards are of class "
                f"{type(local).__module__}.{type(local).__qualname__}, which consists of several "
                f"tensors that may be divided differently from the DTensor: use plain tensors (for "
                f"example, an optimizer whose state is not quantized), or leave such values out "
                f"(unsavable='skip')"
            )
        check_tensor(name, local)
        return tensor
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            check_tensor(name, shard.tensor.detach())
        return tensor
    check_values(name, tensor)
    if tensor.dim() > MAX_DIMENSIONS:
        raise UnsavableValue(
            f"{name}: a tensor of {tensor.dim()} dimensions cannot be saved; reshape() it to at "
            f"most {MAX_DIMENSIONS}"
        )
    if refusal := _refusal(tensor):
        raise UnsavableValue(f"{name}: {refusal}, or leave it out (unsavable='skip')")
    try:
        return (
            tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
        )
    except RuntimeError:
        raise UnsavableValue(
            f"{name}: a conjugate or negative view of dtype {tensor.dtype} cannot be saved, since "
            f"torch cannot compute its values; "
            "save the tensor that it is a view of"
        ) from None


def _refusal(tensor: torch.Tensor) -> str:
    """Return the reason why a tensor cannot be saved, and what to save instead.

    Return "" if it can be saved.
    """
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"a tensor of type {name} cannot be saved: save a torch.Tensor of its values instead"
    if tensor.is_meta:
        return (
            "a tensor on the meta device, which has no values, cannot be saved: save a tensor "
            "with values instead"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (
            f"a tensor of layout {tensor.layout} cannot be saved: save its values and indices as "
            f"strided tensors instead"
        )
    if tensor.is_quantized:
        parts = ["int_repr()", "q_scale()", "q_zero_point()"]
        if tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            parts = [
                "int_repr()",
                "q_per_channel_scales()",
                "q_per_channel_zero_points()",
                "q_per_channel_axis()",
            ]
        return (
            f"a quantized tensor ({tensor.dtype}) cannot be saved: save its parts instead, which "
            f"are {', '.join(parts[:-1])} and "
            f"{parts[-1]}, or its values, dequantize()"
        )
    if tensor.dtype in _QUANTIZED:  # such a view has no scales
        return (
            f"a view in the quantized dtype {tensor.dtype} cannot be saved: save the tensor that "
            f"it is a view of instead"
        )
    return ""


def check_values(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsavableValue for a tensor that has no values.

    A parameter of a lazy module has none yet, and a fake tensor never has any.
    """
    if is_uninitialized(tensor):
        raise UnsavableValue(
            f"{name}: an uninitialized parameter or buffer of a lazy module cannot be saved: run "
            f"one forward pass before the first snapshot"
        )
    if is_fake(tensor):
        raise UnsavableValue(
            f"{name}: a fake tensor, which has no values, cannot be saved: build the model "
            f"outside of "
            "FakeTensorMode, or leave the tensor out"
        )


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Return True for a parameter or a buffer of a lazy module before its first forward
    pass.

    Most operations on such a tensor raise an error.
    """
    return isinstance(tensor, (UninitializedBuffer, UninitializedParameter))


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True for a tensor of torch's FakeTensorMode."""
    return any(
        f"{base.__module__}.{base.__name__}" == "torch._subclasses.fake_tensor.FakeTensor"
        for base in type(tensor).__mro__
    )


def check_own(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsavableValue for a tensor that is divided among ranks, where one rank's
    own is expected.
    """
    divided = (
        tensor.device_mesh.size() > 1
        and not all(placement.is_replicate() for placement in tensor.placements)
        if isinstance(tensor, DTensor)
        else isinstance(tensor, ShardedTensor)
    )
    if divided:
        raise UnsavableValue(
            f"{name}: a tensor that is sharded over ranks is no rank's own: take it out of "
            f"per_rank(...)"
        )


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return True if several elements of a tensor lie at the same place in memory."""
    if tensor.layout is not torch.strided:
        return False
    strides = tensor.stride()
    return (
        0 in strides
        and tensor.numel() > 0
        and any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, strides, strict=True))
    )
