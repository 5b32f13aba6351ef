"""A wrapper subclass of tensor, as libraries for quantization make them."""

from __future__ import annotations

from typing import Any

import torch


class Scaled(torch.Tensor):
    """Numbers that stand for `data_part * scale`."""

    data_part: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, bits: int) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        made.data_part, made.scale, made.bits = data, scale, bits
        return made

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, bits: int) -> None:
        self.bits = bits

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        return ["data_part", "scale"], {"bits": self.bits}

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, torch.Tensor], context: dict[str, int], size: Any, stride: Any
    ) -> Scaled:
        return Scaled(parts["data_part"], parts["scale"], context["bits"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (one,) = args
            return Scaled(one.data_part, one.scale, one.bits)
        if function is torch.ops.aten.copy_.default:
            ours, theirs = args[:2]
            ours.data_part.copy_(theirs.data_part)
            ours.scale.copy_(theirs.scale)
            return ours
        raise NotImplementedError(f"{function} of Scaled")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scaled({self.data_part!r}, {self.scale!r}, {self.bits})"


class NotATensor:
    """Stands where a forged file might look for a class."""
