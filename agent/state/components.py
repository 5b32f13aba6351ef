"""Takes apart tensors whose values lie in other tensors: sparse tensors, nested tensors
and wrapper subclasses, like quantized weights.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptd.agent.state.records import Fields, Kind
from ckptd.shared.errors import NotFound

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_ALIASES = (torch.Size, torch.dtype, torch.device, torch.layout, enum.Enum)
_CONTEXT, _SIZE, _STRIDE = "__context__", "__size__", "__stride__"


def kind_of_tensor(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor that is taken apart, a key of `TENSOR_KINDS`, or ""
    for any other tensor.
    """
    if (
        (type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested)
        or isinstance(tensor, (DTensor, ShardedTensor))
        or tensor.is_meta
    ):
        return ""
    if tensor.is_nested:
        return "nested" if getattr(tensor, "_ragged_idx", 1) == 1 else ""
    if type(tensor) in _PLAIN:
        return "sparse" if tensor.layout in _SPARSE else ""
    return "subclass" if is_traceable_wrapper_subclass(tensor) else ""


# -- sparse

_SPARSE: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_LAYOUTS = {str(layout): layout for layout in _SPARSE}


def _sparse_fields(tensor: torch.Tensor) -> Fields:
    tensor = tensor.detach()
    parts = {name.strip("_"): getattr(tensor, name)() for name in _SPARSE[tensor.layout]}
    return {
        "layout": str(tensor.layout),
        "size": list(tensor.shape),
        "coalesced": tensor.layout is torch.sparse_coo and tensor.is_coalesced(),
        **parts,
    }


def _make_sparse(fields: Fields, cls: str = "") -> torch.Tensor:
    size, layout, values = fields["size"], _LAYOUTS[fields["layout"]], fields["values"]
    made: dict[str, Any] = {
        "size": size,
        "dtype": values.dtype,
        "device": values.device,
        "check_invariants": True,
    }
    # With checked invariants: indices from a file could lie outside the tensor.
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            fields["indices"], values, is_coalesced=fields["coalesced"] or None, **made
        )
    compressed, plain = (fields[name] for name in _SPARSE[layout][:2])
    return torch.sparse_compressed_tensor(compressed, plain, values, layout=layout, **made)


def _into_sparse(place: torch.Tensor, fields: Fields) -> torch.Tensor:
    made = _make_sparse(fields).to(place.dtype)
    if isinstance(place, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=place.requires_grad)
    return made.requires_grad_(place.requires_grad)


def _sparse_differs(place: torch.Tensor, fields: Fields) -> str:
    theirs, ours = (fields["layout"], fields["size"]), (str(place.layout), list(place.shape))
    return (
        ""
        if theirs == ours
        else f"the checkpoint has a {theirs[0]} tensor of shape {theirs[1]}, the state a {ours[0]} "
        f"one of {ours[1]}"
    )


# -- nested


def _make_nested(fields: Fields, cls: str = "") -> torch.Tensor:
    parts = fields["parts"]
    like: dict[str, Any] = (
        {"dtype": parts[0].dtype, "device": parts[0].device} if parts else {"device": "cpu"}
    )
    return torch.nested.nested_tensor(
        parts, layout=torch.jagged if fields["jagged"] else torch.strided, **like
    )


# -- wrapper subclasses


def _subclass_fields(tensor: Any) -> Fields:
    names, context = tensor.__tensor_flatten__()
    fields: Fields = {name: _detached(getattr(tensor, name)) for name in names}
    known = {_CONTEXT: context} if _is_plain(context) else {}
    return {**fields, **known, _SIZE: list(tensor.shape), _STRIDE: list(tensor.stride())}


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _is_plain(value: Any) -> bool:
    """Return True if the context of a subclass consists of plain values only, so that
    it can be saved and compared.
    """
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, _ALIASES)


def _subclass_differs(place: Any, fields: Fields) -> str:
    own = _subclass_fields(place)
    for name, what in ((_SIZE, "shape"), (_CONTEXT, "settings")):
        if name in own and name in fields and own[name] != fields[name]:
            return (
                f"the checkpoint has a {type(place).__name__} of {what} {fields[name]}, the state "
                f"one of {own[name]}"
            )
    return ""


def _into_subclass(place: Any, fields: Fields) -> Any:
    """Put the new components, such as sparse ones, into the wrapper.

    The others have been filled in place.
    """
    for name in place.__tensor_flatten__()[0]:
        if kind_of_tensor(fields[name]) and fields[name] is not getattr(place, name):
            setattr(place, name, fields[name])
    return place


def _subclass_named(cls: str) -> Any:
    """Return the subclass of this name, or None if its module is not imported.

    The module is not imported here, because a file must not choose which code runs.
    """
    module, _, name = cls.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return (
        found
        if isinstance(found, type)
        and issubclass(found, torch.Tensor)
        and hasattr(found, "__tensor_unflatten__")
        else None
    )


def _subclass_lacks(fields: Fields, cls: str) -> str:
    if _subclass_named(cls) is None:
        return (
            f"the checkpoint holds a tensor of class {cls}: import module "
            f"{cls.rpartition('.')[0]} before loading"
        )
    if _CONTEXT not in fields:
        return (
            f"a tensor of class {cls} can only be loaded into a state that has it already: its "
            f"settings could not be saved"
        )
    return ""


def _make_subclass(fields: Fields, cls: str) -> Any:
    """Make a tensor of a subclass. Raises NotFound if this process cannot make it."""
    if why := _subclass_lacks(fields, cls):
        raise NotFound(why)
    parts = {
        name: value for name, value in fields.items() if name not in (_CONTEXT, _SIZE, _STRIDE)
    }
    unflatten: Callable[..., Any] = _subclass_named(cls).__tensor_unflatten__
    return unflatten(parts, fields[_CONTEXT], torch.Size(fields[_SIZE]), tuple(fields[_STRIDE]))


def size_of(kind: str, fields: Any) -> tuple[int, ...] | None:
    """Return the shape of a saved tensor of a wrapper subclass, given its kind and its
    fields, or None for any other saved object.
    """
    return tuple(fields[_SIZE]) if kind == "subclass" else None


TENSOR_KINDS: dict[str, Kind] = {
    "sparse": Kind(
        _sparse_fields,
        _into_sparse,
        _make_sparse,
        whole=True,
        values="values",
        required=("layout", "size"),
        differs=_sparse_differs,
    ),
    "nested": Kind(
        lambda tensor: {
            "jagged": tensor.layout is torch.jagged,
            "parts": list(tensor.detach().unbind()),
        },
        lambda place, fields: (
            _make_nested(fields).to(place.dtype).requires_grad_(place.requires_grad)
        ),
        _make_nested,
        whole=True,
        values="parts",
        required=("jagged", "parts"),
    ),
    "subclass": Kind(
        _subclass_fields,
        _into_subclass,
        _make_subclass,
        required=(_SIZE, _STRIDE),
        differs=_subclass_differs,
        lacks=_subclass_lacks,
    ),
}
