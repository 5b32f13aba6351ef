"""The kinds of modules that programs are made of: torch's own, and modules with hooks,
buffers and methods of users' kinds.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.oracle.tensors import Doubled, Tagged


class Buffers(nn.Module):
    """Has buffers of several dtypes, one of them not saved."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("mean", torch.randn(size))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.rand(size) > 0.5)
        self.register_buffer("codes", torch.randint(0, 255, (size,), dtype=torch.uint8))
        self.register_buffer("cache", torch.randn(size), persistent=False)
        self.register_buffer("nothing", None)


class Resized(nn.Module):
    """Has a buffer that grows while it trains, and that its own `_load_from_state_dict`
    makes as long as the saved one.
    """

    queue: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("queue", torch.randn(1))

    def advance(self, number: int) -> None:
        self.queue = torch.cat([self.queue, self.queue.new_full((1,), 0.5 * number)])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}queue" in state_dict:
            self.queue = self.queue.new_empty(state_dict[f"{prefix}queue"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class PreHook(nn.Module):
    """Saves its weight under another name than its own, and reads that name in a hook
    before loading.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    @staticmethod
    def _rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        state_dict[f"{prefix}old_weight"] = state_dict.pop(f"{prefix}weight")

    @staticmethod
    def _rename_back(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        if f"{prefix}old_weight" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old_weight")


class Converted(nn.Module):
    """Saves its weight multiplied by two, and divides in a hook before loading."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_state_dict_post_hook(self._double)
        self.register_load_state_dict_pre_hook(self._halve)

    @staticmethod
    def _double(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2

    @staticmethod
    def _halve(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 2


class PostHook(nn.Module):
    """Derives a buffer that is not saved from its weight, in a hook after loading."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("derived", torch.zeros(size), persistent=False)
        self.register_load_state_dict_post_hook(self._derive)

    @staticmethod
    def _derive(module: Any, incompatible: Any) -> None:
        module.derived = module.weight.detach() * 3


class OwnLoad(nn.Module):
    """Has a `_load_from_state_dict` that stores the saved tensor in another place, as
    sequence-parallel and quantized layers do.
    """

    scale: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[f"{prefix}packed"] = torch.cat([self.weight.detach(), self.scale.reshape(1)])

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: Any,
    ) -> None:
        if f"{prefix}packed" not in state_dict:
            missing.append(f"{prefix}packed")
            return
        packed = state_dict[f"{prefix}packed"]
        with torch.no_grad():
            self.weight.copy_(packed[:-1])
            self.scale.copy_(packed[-1])

    def advance(self, number: int) -> None:
        self.scale.mul_(1.5)


class ExtraState(nn.Module):
    """Has a plain value and a tensor beside its parameters, which it saves itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.seen, self.table = 0, torch.zeros(size)

    def advance(self, number: int) -> None:
        self.seen += number
        self.table = self.table + number

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "table": self.table}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen, self.table = state["seen"], state["table"].clone()


class Overridden(nn.Module):
    """Overrides `state_dict` and `load_state_dict`: saves its parameters in a form of
    its own. Only as a whole model.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.loads = 0

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {f"own.{name}": value for name, value in self.inner.state_dict().items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.loads += 1
        return self.inner.load_state_dict(
            {name.removeprefix("own."): value for name, value in state_dict.items()}, strict, assign
        )


class Grouped(nn.Module):
    """Holds submodules in a list, a dict and a parameter list."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.items = nn.ModuleList(
            [nn.Linear(size, size), nn.Sequential(nn.Linear(size, 2), nn.LayerNorm(2))]
        )
        self.named = nn.ModuleDict({"a": nn.Linear(size, 1, bias=False)})
        self.free = nn.ParameterList([torch.randn(size), torch.randn(2, size)])
        self.by_name = nn.ParameterDict({"x": torch.randn(1)})


class Shapes(nn.Module):
    """Has parameters of unusual shapes and strides."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, size))
        self.turned = nn.Parameter(torch.randn(size, 3).t())
        whole = torch.randn(2, size)
        self.first, self.second = nn.Parameter(whole[0]), nn.Parameter(whole[1])


class Spread(nn.Module):
    """Has a buffer whose elements share memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("spread", torch.randn(1).expand(size))


class Averages(nn.Module):
    """Has a buffer of fractions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("number", torch.rand(size))


class Counts(nn.Module):
    """Has the same buffer as `Averages`, in whole numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("number", torch.zeros(size, dtype=torch.int64))


class Complexes(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.complex64))


class Halves(nn.Module):
    """Has parameters and buffers of several floating dtypes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.randn(size).bfloat16())
        self.high = nn.Parameter(torch.randn(size).double())
        self.register_buffer("narrow", torch.randn(size).half())
        self.register_buffer("eight", torch.randn(size).to(torch.float8_e4m3fn))


class Scaled(nn.Module):
    """Has a large buffer, which does not fit into a narrower dtype."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.register_buffer("large", torch.full((size,), 1e30))


def _weight_norm_of_old(size: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(size, size))


class OfTagged(nn.Module):
    """Has a parameter of a plain tensor subclass."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size).as_subclass(Tagged))


class OfDoubled(nn.Module):
    """Has two parameters of a wrapper subclass, whose own address is 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Doubled(torch.randn(size), torch.randn(size)))
        self.other = nn.Parameter(Doubled(torch.randn(size), torch.randn(size)))


MODULES: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda size: nn.Linear(size, size),
    "conv": lambda size: nn.Conv2d(size, 2, 2),
    "batchnorm": lambda size: nn.BatchNorm1d(size),
    "embedding": lambda size: nn.Embedding(size, 3),
    "layernorm": lambda size: nn.LayerNorm(size),
    "sequential": lambda size: nn.Sequential(
        nn.Linear(size, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 1))
    ),
    "grouped": Grouped,
    "attention": lambda size: nn.MultiheadAttention(size, 1),
    "lstm": lambda size: nn.LSTM(size, 2),
    "buffers": Buffers,
    "resized": Resized,
    "prehook": PreHook,
    "converted": Converted,
    "posthook": PostHook,
    "ownload": OwnLoad,
    "extra": ExtraState,
    "shapes": Shapes,
    "spread": Spread,
    "complex": Complexes,
    "averages": Averages,
    "counts": Counts,
    "halves": Halves,
    "scaled": Scaled,
    "weightnorm": lambda size: parametrizations.weight_norm(nn.Linear(size, size)),
    "oldweightnorm": _weight_norm_of_old,
    "orthogonal": lambda size: parametrizations.orthogonal(nn.Linear(size, size)),
    "spectral": lambda size: parametrizations.spectral_norm(nn.Linear(size, size)),
    "lazy": lambda size: nn.LazyLinear(size),
    "tagged": OfTagged,
    "doubled": OfDoubled,
    "empty": lambda size: nn.Dropout(),
}
"""The kinds of blocks, by name. Each makes a module from a size."""

COPYABLE = frozenset(
    {
        "linear", "conv", "batchnorm", "embedding", "layernorm", "sequential", "grouped",
        "attention", "buffers", "extra", "posthook", "weightnorm",
    }
)  # fmt: skip
"""Kinds that `AveragedModel` can copy."""
PLAIN = (
    "linear",
    "conv",
    "batchnorm",
    "embedding",
    "layernorm",
    "sequential",
    "grouped",
    "buffers",
    "attention",
    "lstm",
)
TIEABLE = ("linear", "embedding", "buffers")
"""Kinds whose `weight` can be shared by two blocks of one kind and size."""


def _compiled(module: nn.Module) -> nn.Module:
    # torch.compile returns a function for what is compiled already
    if hasattr(module, "_orig_mod"):
        return module
    made: Any = torch.compile(module, backend="eager")  # compiles nothing until it is called
    return made  # type: ignore[no-any-return]


def _averaged(module: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(module, use_buffers=True)


def _checkpointed(module: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    made: nn.Module = checkpoint_wrapper(module)
    return made


def _parallel(module: nn.Module) -> nn.Module:
    made: nn.Module = nn.DataParallel(module)
    return made


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": _compiled,
    "parallel": _parallel,
    "checkpointed": _checkpointed,
    "overridden": Overridden,
}
TRACELESS = ("compiled", "parallel", "checkpointed")
"""The wrappers that leave no trace in the names of a checkpoint."""


def _attributes(blocks: dict[str, nn.Module]) -> nn.Module:
    made = nn.Module()
    for name, block in blocks.items():
        made.add_module(name, block)
    return made


def _nested(blocks: dict[str, nn.Module]) -> nn.Module:
    made = nn.Module()
    made.add_module("body", _attributes(blocks))
    made.register_parameter("gain", nn.Parameter(torch.ones(1)))
    return made


def _single(blocks: dict[str, nn.Module]) -> nn.Module:
    """Return the only block itself, so that the names of its parameters have no prefix."""
    return next(iter(blocks.values())) if len(blocks) == 1 else _attributes(blocks)


CONTAINERS: dict[str, Callable[[dict[str, nn.Module]], nn.Module]] = {
    "attributes": _attributes,
    "sequential": lambda blocks: nn.Sequential(*blocks.values()),
    "dict": nn.ModuleDict,
    "nested": _nested,
    "single": _single,
}


def advance(module: nn.Module, number: int) -> None:
    """Change everything in a module that its parameters' optimizer does not: its
    buffers, and what it keeps by itself.
    """
    for part in module.modules():
        if callable(own := getattr(type(part), "advance", None)):
            own(part, number)
        elif type(part) is not Spread:
            for buffer in part._buffers.values():
                if buffer is not None and not buffer.is_meta:
                    _drift(buffer, number)


@functools.singledispatch
def _drift(buffer: torch.Tensor, number: int) -> None:
    with torch.no_grad():
        if buffer.dtype is torch.bool:
            buffer.logical_not_()
        elif buffer.dtype.is_floating_point and buffer.element_size() > 1:
            buffer.mul_(0.5).add_(number)
        elif not buffer.dtype.is_floating_point:
            buffer.add_(1)
