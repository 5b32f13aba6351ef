"""Makes the objects of a program, and trains them.

Gradients follow from the values, the name and the number of the step alone, so that any
two runs with the same state train alike, whatever the model would compute. A
parameter's name is that of its block: it does not depend on wrappers, or on the order
of the state.
"""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tests.oracle import modules
from tests.oracle.extras import BARES, SCALERS, SCHEDULERS, Meter, bare, value
from tests.oracle.optimizers import HOOKS, OPTIMIZERS, Holder, groups_of
from tests.oracle.program import Model, Optimizer, Program

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|inner)\."
)


def canonical(name: str) -> str:
    """Return the name of a parameter without the parts that wrappers insert."""
    return _WRAPPERS.sub("", name)


@dataclass(slots=True)
class Run:
    """The objects of a program.

    `state` is what the program passes to `snapshot` and `recover`: all of `objects`, or
    some of them.

    optimizers: the optimizers themselves, by key, inside their holders. names: the name
    of each parameter, by id.
    """

    program: Program
    state: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    trained: int = 0

    def step(self) -> list[float]:
        """Train one step. Return the losses of all optimizers."""
        self.trained += 1
        self.objects |= self.state  # a recovery may have put new objects there
        losses = []
        for plan in self.program.optimizers:
            losses.append(self._step_of(plan))
        for extra in self.program.extras:
            found: Any = self.objects.get(extra.key)
            if extra.kind == "plateau":
                found.step(1.0 / self.trained if self.trained < 2 else 1.0)
            elif extra.kind in SCHEDULERS:
                found.step()
            elif isinstance(found, Meter):
                found.update(self.trained)
        for model in self.program.models:
            found = self.objects[model.key]
            if model.deep:
                _follow(found, self.objects[model.copy_of])
            elif model.copy_of:
                found.update_parameters(self.objects[model.copy_of])
            else:
                modules.advance(found, self.trained)
        return losses

    def _step_of(self, plan: Optimizer) -> float:
        optimizer, kind = self.optimizers[plan.key], OPTIMIZERS[plan.kind]
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]

        def closure() -> float:
            total = 0.0
            for parameter in parameters:
                parameter.grad = None
                if parameter.requires_grad:
                    grad = gradient(parameter, self.names[id(parameter)], self.trained)
                    parameter.grad = grad.to_sparse(1) if kind.sparse else grad
                    total += float(grad.detach().abs().double().sum())
            return total

        scaler = next(
            (self.objects[extra.key] for extra in self.program.extras if extra.kind in SCALERS),
            None,
        )
        if kind.closure and not parameters:
            return 0.0
        if kind.closure:
            return float(optimizer.step(closure))
        loss = closure()
        if (
            scaler is not None
            and scaler.is_enabled()
            and plan is self.program.optimizers[0]
            and not kind.sparse
        ):
            scaler.scale(torch.ones(()))
            scaler.update(8.0 + self.trained)
        if kind.fused or any(group.get("fused") for group in optimizer.param_groups):
            _check_moments(optimizer)
        optimizer.step()
        return loss


def _check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if a moment has another shape than its parameter: a fused
    kernel would read memory that is not its own.
    """
    for parameter, entry in optimizer.state.items():
        for name, moment in entry.items():
            if (
                isinstance(moment, torch.Tensor)
                and moment.dim()
                and moment.shape != parameter.shape
            ):
                raise RuntimeError(
                    f"{name} has shape {list(moment.shape)}, and its parameter "
                    f"{list(parameter.shape)}"
                )


@torch.no_grad()
def _follow(copied: nn.Module, source: nn.Module) -> None:
    for mine, theirs in zip(copied.parameters(), source.parameters(), strict=True):
        mine.lerp_(theirs, 0.25)


def _modules(run: Run) -> list[nn.Module]:
    return [found for found in run.state.values() if isinstance(found, nn.Module)]


def _swap(run: Run) -> None:
    """Exchange two parameters of one shape in a module. The optimizer keeps both."""
    for module in (part for whole in _modules(run) for part in whole.modules()):
        for (one, first), (other, second) in pairwise(module._parameters.items()):
            if (
                first is not None
                and second is not None
                and first.shape == second.shape
                and first.dtype == second.dtype
            ):
                module._parameters[one], module._parameters[other] = second, first
                return


def _move(run: Run) -> None:
    """Give every parameter other memory."""
    for parameter in (one for module in _modules(run) for one in module.parameters()):
        if type(parameter) is nn.Parameter:
            parameter.data = parameter.data.clone()


def _exchange(run: Run) -> None:
    """Exchange the memory of two parameters of one shape."""
    found: dict[Any, torch.Tensor] = {}
    for parameter in (one for module in _modules(run) for one in module.parameters()):
        if type(parameter) is not nn.Parameter:  # torch puts no plain memory into a subclass
            continue
        other = found.setdefault((parameter.shape, parameter.dtype), parameter)
        if other is not parameter:
            parameter.data, other.data = other.data, parameter.data
            return


BETWEEN: dict[str, Callable[[Run], None]] = {"swap": _swap, "move": _move, "exchange": _exchange}


def between(run: Run, name: str) -> None:
    """Change the objects of a run as a training script may between two snapshots, and
    name its parameters again.
    """
    if name:
        BETWEEN[name](run)
        run.names = {}
        for found, parameter in _parameters(run):
            run.names.setdefault(id(parameter), found)


def gradient(parameter: torch.Tensor, name: str, number: int) -> torch.Tensor:
    """Return a gradient that differs between parameters, elements and steps, and
    depends on the values.
    """
    plain = parameter.detach()
    shift = zlib.crc32(f"{name}/{number}".encode()) % 97 / 97 - 0.5
    places = (
        torch.arange(plain.numel(), dtype=torch.float64, device=plain.device).reshape(plain.shape)
        / 64
    )
    wide = plain.to(torch.complex128 if plain.is_complex() else torch.float64)
    if type(wide) is not torch.Tensor:
        wide = (
            wide + 0
            if not isinstance(wide, torch.Tensor)
            else torch.add(wide, 0.0).as_subclass(torch.Tensor)
        )
    return (torch.tanh(wide) * 0.25 + places + shift).to(plain.dtype)


def build(program: Program) -> Run:
    """Make the objects of a program, with initial values that follow from its seed."""
    before = torch.get_default_dtype()
    torch.manual_seed(program.seed)
    if program.dtype:
        torch.set_default_dtype(getattr(torch, program.dtype))
    try:
        return _build(program)
    finally:
        torch.set_default_dtype(before)


def _build(program: Program) -> Run:
    run = Run(program)
    for model in program.models:
        run.state[model.key] = _model(model, run)
    for extra in program.extras:
        if extra.kind in BARES:
            run.state[extra.key] = bare(extra.kind, extra.setting)
    for name, parameter in _parameters(run):
        run.names.setdefault(id(parameter), name)
    for plan in program.optimizers:
        _optimizer(plan, run)
    for extra in program.extras:
        if extra.kind in SCHEDULERS:
            run.state[extra.key] = SCHEDULERS[extra.kind](run.optimizers[extra.of], extra.setting)
        elif extra.kind in SCALERS:
            run.state[extra.key] = SCALERS[extra.kind](extra.setting)
        elif extra.kind not in BARES:
            run.state[extra.key] = value(extra.kind, extra.variant)
    run.objects = dict(run.state)
    return run


def _model(model: Model, run: Run) -> nn.Module:
    if model.copy_of:
        source = run.state[model.copy_of]
        if model.deep:
            made: nn.Module = copy.deepcopy(source)
            return made.requires_grad_(False)
        return torch.optim.swa_utils.AveragedModel(
            source, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
    blocks: dict[str, nn.Module] = {}
    for block in model.blocks:
        made = modules.MODULES[block.kind](block.size)
        if model.dtype:
            made = made.to(getattr(torch, model.dtype))
        if block.tied_to in blocks:
            made.weight = _base(blocks[block.tied_to]).weight
        if block.frozen:
            made.requires_grad_(False)
        blocks[block.name] = modules.WRAPPERS[block.wrapper](made) if block.wrapper else made
    whole = modules.CONTAINERS[model.container](blocks)
    if model.channels_last:
        whole = whole.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for name in reversed(model.wrappers):
        whole = modules.WRAPPERS[name](whole)
    return whole


def _base(module: nn.Module) -> nn.Module:
    while inner := next(
        (
            part
            for name, part in module.named_children()
            if f"{name}." in ("_orig_mod.", "module.", "_checkpoint_wrapped_module.")
        ),
        None,
    ):
        module = inner
    return module


def _parameters(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    for model in run.program.models:
        for name, parameter in run.state[model.key].named_parameters():
            yield f"{model.key}:{canonical(name)}", parameter
    for extra in run.program.extras:
        if extra.kind in BARES:
            yield f"{extra.key}:", run.state[extra.key]


def _optimizer(plan: Optimizer, run: Run) -> None:
    kind = OPTIMIZERS[plan.kind]
    named = [
        (name, parameter)
        for name, parameter in _parameters(run)
        if name.partition(":")[0] in (*plan.models, *plan.bares)
        and not isinstance(parameter, nn.parameter.UninitializedParameter)
        and not set(name.partition(":")[2].split(".")) & set(plan.skip)
        and kind.accepts(parameter)
    ]
    if plan.reverse:
        named.reverse()
    groups = groups_of(
        named,
        plan.grouping,
        with_names=plan.named,
        extra=plan.extra,
        empty=plan.empty_group,
        single=kind.single,
    )
    if not groups:
        groups = [{"params": []}]
    lr: Any = torch.tensor(plan.lr) if plan.tensor_lr else plan.lr
    made = kind.make(groups, lr)
    for name in plan.hooks:
        HOOKS[name](made)
    run.optimizers[plan.key] = made
    run.state[plan.key] = Holder(made) if plan.wrapped else made


def damage(run: Run) -> None:
    """Take the memory of the models that the program says have none: freed storages,
    and parameters on the meta device.
    """
    for model in run.program.models:
        module = run.state[model.key]
        if model.transform == "freed":
            for parameter in module.parameters():
                parameter.untyped_storage().resize_(0)
        elif model.transform == "meta":
            module.to("meta")


def context(name: str) -> Any:
    """Return the context manager under which a recovery is called, by the name that
    `Call.context` gives.
    """
    if name == "inference":
        return torch.inference_mode()
    if name.startswith("device:"):
        return torch.device(name.partition(":")[2])
    if name.startswith("dtype:"):
        return _default_dtype(getattr(torch, name.partition(":")[2]))
    if name == "no-grad":
        return torch.no_grad()
    return nullcontext()


class _default_dtype:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._before)
