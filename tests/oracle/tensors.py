"""Tensor subclasses of users' kinds: one that is a tensor itself, and two that wrap
tensors and have no memory of their own.
"""

from __future__ import annotations

from typing import Any

import torch


class Tagged(torch.Tensor):
    """A tensor of another class, with memory of its own."""


class Doubled(torch.Tensor):
    """A tensor whose value is the sum of two others. Its own address is 0."""

    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> Doubled:
        made: Doubled = torch.Tensor._make_wrapper_subclass(
            cls, high.shape, dtype=high.dtype, device=high.device
        )
        made.high, made.low = high, low
        return made

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        pass

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"Doubled({self.high}, {self.low})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> Doubled:
        return Doubled(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function in (
            torch.ops.aten.detach.default,
            torch.ops.aten.clone.default,
            torch.ops.aten._to_copy.default,
        ):
            this = arguments[0]
            rest = arguments[1:]
            return Doubled(
                function(this.high, *rest, **options), function(this.low, *rest, **options)
            )
        if function is torch.ops.aten.copy_.default:
            into, source = arguments[:2]
            if isinstance(source, Doubled):
                into.high.copy_(source.high)
                into.low.copy_(source.low)
            else:
                into.high.copy_(source)
                into.low.zero_()
            return into
        if function is torch.ops.aten.empty_like.default:
            return Doubled(torch.empty_like(arguments[0].high), torch.empty_like(arguments[0].low))
        plain = [one.high + one.low if isinstance(one, Doubled) else one for one in arguments]
        made = function(*plain, **options)
        if function._schema.name.endswith("_") and isinstance(arguments[0], Doubled):
            arguments[0].high.copy_(made)
            arguments[0].low.zero_()
            return arguments[0]
        return made


class EightBit(torch.Tensor):
    """A moment of an 8-bit optimizer: a code for each element, and a scale for each
    block of elements.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> EightBit:
        made: EightBit = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        pass

    @classmethod
    def quantized(cls, values: torch.Tensor) -> EightBit:
        """Return the nearest values that this class can hold.

        The number of elements must be a multiple of `BLOCK`.
        """
        blocks = values.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp(min=1e-12)
        codes = (blocks / scale[:, None] * 127).round().to(torch.int8)
        return cls(codes.reshape(values.shape), scale)

    def values_of(self) -> torch.Tensor:
        """Return the values as a plain tensor."""
        return (self.codes.reshape(-1, BLOCK).float() / 127 * self.scale[:, None]).reshape(
            self.codes.shape
        )

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"EightBit({self.codes}, {self.scale})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> EightBit:
        return EightBit(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        this, aten = arguments[0], torch.ops.aten
        if function in (aten.detach.default, aten.clone.default, aten.empty_like.default):
            return EightBit(function(this.codes), function(this.scale))
        if function in (aten.view.default, aten.alias.default, aten._to_copy.default):
            return EightBit(this.codes, this.scale)
        if function is aten.copy_.default:
            source = (
                arguments[1]
                if isinstance(arguments[1], EightBit)
                else EightBit.quantized(arguments[1])
            )
            this.codes.copy_(source.codes)
            this.scale.copy_(source.scale)
            return this
        raise NotImplementedError(f"EightBit has no {function}")  # as torchao's classes do


BLOCK = 2
"""How many elements of an `EightBit` have one scale. torchao's blocks have 256."""

torch.serialization.add_safe_globals([Tagged, Doubled, EightBit])
