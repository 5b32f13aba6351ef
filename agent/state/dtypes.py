"""Names the dtypes of tensors as a plan document does (FORMAT.md, section 3), and views
any tensor in a dtype that torch can copy.

A dtype that the format does not list has its element size in its name, for example
`bcomplex32/4`. A dtype that is new in torch can thus be saved and loaded by a ckptd
that has never heard of it.
"""

from __future__ import annotations

import re
from functools import cache

import torch

from ckptd.shared.errors import IntegrityError, NotFound
from ckptd.shared.formats.plan import BLOB, ITEM_SIZES, element_size

COPYABLE = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
})  # fmt: skip
"""The dtypes that torch copies bit for bit on every device. Of the others it copies
some on some devices only, and some nowhere.
"""
_COPIED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_QUANTIZED = ("qint", "quint")  # a tensor of these has scales beside its elements
_SIZELESS = re.compile(r"u?int[1-7]|bits\w+|.+/\d+")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a plan document."""
    name = str(dtype).removeprefix("torch.")
    return name if name in ITEM_SIZES else f"{name}/{dtype.itemsize}"


def plain_name(name: str) -> str:
    """Return the dtype's name in torch, given its name in a plan document."""
    return name.partition("/")[0]


@cache
def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name in a plan document, and uint8 for a blob.

    Raises NotFound for a dtype that this torch does not have, and IntegrityError for
    one that cannot be a tensor's in a plan document.
    """
    if name == BLOB:
        return torch.uint8
    plain = plain_name(name)
    found = torch_dtype(plain)
    if found.itemsize != element_size(name) or plain.startswith(_QUANTIZED):
        raise IntegrityError(
            f"ckptd saves no tensor of dtype {name!r}: {found} is quantized, or has elements of "
            f"another size"
        )
    return found


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch has under this name. Raises NotFound."""
    # Without getattr, which imports some modules of torch at their first use: `name`
    # may come from a file.
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise NotFound(f"torch {torch.__version__} has no dtype {name!r}: install a newer torch")
    return found


def sizeless(name: str) -> bool:
    """Return True if DCP's planner may not be able to determine the element size of
    this dtype.
    """
    return _SIZELESS.fullmatch(name) is not None


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a view of its elements in a dtype of the same size
    if torch may be unable to copy its own dtype.

    Such a view of a conjugate or negative view is one of a new tensor, so that nothing
    can be written through it.
    """
    return (
        tensor
        if tensor.dtype in COPYABLE
        else tensor.resolve_conj().resolve_neg().view(_COPIED_AS[tensor.element_size()])
    )
