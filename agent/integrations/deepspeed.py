"""DeepSpeed: `attach(engine)` saves ZeRO 0 to 3 by parameter, so that any number of ranks
can recover it.

from ckptd.integrations.deepspeed import attach

engine, *_ = deepspeed.initialize(...)
with attach(engine, every_steps=50, state={"data": batches}) as run:
    for step in run.steps(1000):
        train_step(engine, next(data))

Tried with deepspeed 0.19.8. These of its names are private: `_hp_mapping` and `ds_tensor`
of parameters, and `grad_position`, `fp32_partitioned_groups_flat`,
`sub_group_to_group_id` and `persistent_parameters` of the optimizer of ZeRO-3.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

from ckptd.agent import default
from ckptd.agent.agent import Agent
from ckptd.agent.schedule import Schedule
from ckptd.agent.training_run import Training, check_one_model
from ckptd.integrations.framework import attach_once, check_version, schedule_of
from ckptd.shared.errors import InvalidRequest, StructureMismatch

log = logging.getLogger("ckptd.agent")

_SHOWN = 300
"""The characters of a difference that are shown."""
_LOWEST, _BELOW = "0.19.8", "0.20"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
Span = tuple[int, int]
"""The first element of a parameter that a rank holds, and the number of elements."""


def attach(
    engine: Any,
    *,
    every_steps: int | None = None,
    schedule: Schedule | None = None,
    state: Any = None,
    agent: Agent | None = None,
) -> DeepSpeedTraining:
    """Return the run of a training loop, for a `with` statement.

    It is used like the run of `ckptd.training`. Call this on all ranks, after
    `deepspeed.initialize`. Each step of the loop is one step of the optimizer, with all
    its calls of `engine.backward` and `engine.step`. Entering the `with` recovers the
    newest snapshot into the engine and into `state`.

    engine: the engine that `deepspeed.initialize` returns, with ZeRO 0, 1, 2 or 3.
    every_steps: a snapshot is due at each step that is a multiple of this number.
    schedule: a `Schedule`, in place of `every_steps`.
    state: what to save beside the engine, such as {"data": batches}.
    agent: the `Agent` to use. Default: the agent of this process.

    Raises InvalidRequest for a version of DeepSpeed that was not tried, if the engine
    is none, was trained or attached before, or splits the model by pipelines, tensors
    or experts, or keeps its optimizer on NVMe, and for an invalid schedule.
    """
    check_version("deepspeed", _LOWEST, _BELOW)
    from deepspeed import DeepSpeedEngine, PipelineEngine

    chosen = schedule_of(schedule, every_steps, agent)
    if not isinstance(engine, DeepSpeedEngine):
        raise InvalidRequest(
            f"attach() got a {type(engine).__name__}; expected the engine, the first value that "
            f"deepspeed.initialize() returns"
        )
    split = (
        isinstance(engine, PipelineEngine)
        or engine.has_moe_layers
        or engine.dp_world_size != dist.get_world_size()
    )
    if split:
        raise InvalidRequest(
            "this engine splits the model by pipelines, tensors, sequences or experts, and ckptd "
            "can attach to data parallelism alone, with ZeRO 0 to 3: use engine.save_checkpoint()"
        )
    if engine.optimizer is None:
        raise InvalidRequest("this engine has no optimizer: save its module with ckptd.snapshot()")
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise InvalidRequest(
            "this engine keeps its optimizer on NVMe, which ckptd cannot save: use "
            "offload_optimizer with the device cpu, or engine.save_checkpoint()"
        )
    if engine.global_steps or engine.micro_steps:
        raise InvalidRequest(
            f"this engine has trained already, up to step {engine.global_steps}: call attach() "
            f"before its first batch"
        )
    attach_once(engine, "engine")
    # The parts of ZeRO are of any length, which DTensor cannot express.
    warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
    return DeepSpeedTraining(engine, state, chosen)


class DeepSpeedTraining(Training):
    """The run of a training loop of an engine, made by `attach`."""

    def __init__(self, engine: Any, state: Any, schedule: Schedule) -> None:
        super().__init__({}, schedule)
        self._engine, self._agent = engine, schedule.agent
        self._beside = state

    def __enter__(self) -> DeepSpeedTraining:
        """Recover into the engine.

        Raises the errors of `Agent` and `recover`.
        """
        # All ranks must have come before they exchange what they hold.
        if self._agent is None:
            default.default_agent("attach")
        made = _Optimizer(self._engine)
        made.begin()
        self._state = made.state() | ({} if self._beside is None else {"state": self._beside})
        check_one_model(self._agent, self._engine.module)
        try:
            super().__enter__()
        except StructureMismatch as error:
            raise StructureMismatch(
                f"the newest snapshot does not fit this engine, which has ZeRO stage "
                f"{self._engine.zero_optimization_stage()}: go on with the model and the stage "
                f"that were saved, or name another job with CKPTD_JOB. The first difference: "
                f"{str(error)[:_SHOWN]}"
            ) from error
        if self.recovered is None:
            made.reset()
        else:
            made.refresh()
        self._optimizer = made
        return self

    def _snapshot(self, step: int, *, last: bool) -> None:
        engine, batches = self._engine, self._engine.gradient_accumulation_steps()
        if rest := engine.micro_steps % batches:
            raise InvalidRequest(
                f"step {step} ended after {rest} of {batches} accumulated batches, whose gradients "
                f"are not saved: let one step of run.steps() be one step of the optimizer, with "
                f"{batches} calls of engine.step()"
            )
        if self._optimizer.cleared:
            if not self._optimizer.has_stepped():
                log.warning(
                    "step %d is not saved: the optimizer has no state for some parameters yet, "
                    "because their gradients have overflowed or are missing",
                    step,
                )
                return
            # The first step has made the state of the optimizer.
            self._state |= self._optimizer.state()
            self._optimizer.cleared = False
        super()._snapshot(step, last=last)


class _Optimizer:
    """The optimizer of an engine and its master weights, by parameter.

    cleared: True if the state of the optimizer is made by its next step.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self.cleared = engine, False
        self._stage = engine.zero_optimization_stage()
        self._named = dict(engine.module.named_parameters())
        self._basic: torch.optim.Optimizer = engine.basic_optimizer
        zero = engine.optimizer
        self._masters = {
            low: high
            for lows, highs in zip(
                getattr(zero, "fp16_groups", ()), getattr(zero, "fp32_groups", ()), strict=False
            )
            for low, high in zip(lows, highs, strict=True)
        }
        self._flat = self._basic is not zero
        self._spans: dict[str, list[Span | None]] = {}

    def begin(self) -> None:
        """Make the state of the optimizer, and exchange which part of each parameter each
        rank holds.
        """
        if not self._flat:
            return
        if not self._basic.state:
            self.cleared = True
            for group, flat in self._flats():
                _step_by_nothing(self._basic, group, flat)
        own = {name: self._span(one) for name, one in self._named.items()}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        self._spans = {name: [each[name] for each in ranks] for name in own}

    def _flats(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Return the tensors that the optimizer steps, each with its group."""
        groups, zero = self._basic.param_groups, self._engine.optimizer
        if self._stage != 3:
            return [(group, flat) for group in groups for flat in group["params"]]
        # The groups of ZeRO-3 are empty between two steps.
        return [
            (groups[zero.sub_group_to_group_id[number]], flat)
            for number, flat in enumerate(zero.fp32_partitioned_groups_flat)
        ]

    def has_stepped(self) -> bool:
        """Return True if the optimizer has the state of all parameters. A first step whose
        gradients overflow makes none.
        """
        return all(self._basic.state.get(flat) for _, flat in self._flats())

    def reset(self) -> None:
        """Forget the state that `begin` has made: there is nothing to recover."""
        if self.cleared:
            self._basic.state.clear()

    def refresh(self) -> None:
        """Gather what ZeRO-3 keeps whole on all ranks, after its parts were written."""
        self.cleared = False
        if self._stage == 3 and (whole := self._engine.optimizer.persistent_parameters):
            whole[0].partition(whole)
            whole[0].all_gather(whole)

    def state(self) -> dict[str, Any]:
        """Return what is saved of the engine. Tensors are recovered in place."""
        rest = {"engine": _Rest(self._engine, self._basic if self._flat else None)}
        if not self._flat:
            return {"module": self._engine.module, "optim": self._engine.optimizer} | rest
        held = {
            name: {key: self._shard(name, part) for key, part in self._parts(one)}
            for name, one in self._named.items()
            if self._stage == 3 or one.requires_grad
        }
        if self._stage == 3:
            return {"buffers": dict(self._engine.module.named_buffers()), "parameters": held} | rest
        return {"module": self._engine.module, "parameters": held} | rest

    def _span(self, one: Any) -> Span | None:
        if one in self._masters:
            return 0, one.numel()
        if self._stage != 3:
            found = getattr(one, "_hp_mapping", None)
            address = found and found.lp_fragment_address
            return address and (address.start, address.numel)
        size = one.ds_tensor.numel()
        start = size * dist.get_rank()
        held = min(size, one.ds_numel - start)
        return (start, held) if held > 0 else None

    def _parts(self, one: Any) -> Iterator[tuple[str, torch.Tensor | torch.dtype]]:
        """Yield what this rank holds of a parameter, by key: a view, or the dtype of what
        other ranks hold.
        """
        zero, trained = self._engine.optimizer, one.requires_grad
        if self._stage == 3:
            yield "weight", one.ds_tensor.detach()
            if not trained:
                return
            group, start, size = zero.grad_position[zero.get_param_id(one)]
            flat = zero.fp32_partitioned_groups_flat[group]
        elif one in self._masters:
            flat, start, size = self._masters[one], 0, one.numel()
        elif (found := one._hp_mapping) is not None:
            address = found.hp_fragment_address
            flat = self._basic.param_groups[found.param_group_index]["params"][0]
            start, size = address.start, address.numel
        else:
            flat = next(iter(self._basic.state))
            start, size = 0, 0
        for key, whole in (("fp32", flat), *_moments(flat, self._basic)):
            yield key, whole.detach().view(-1).narrow(0, start, size) if size else whole.dtype

    def _shard(self, name: str, part: torch.Tensor | torch.dtype) -> Any:
        one, spans = self._named[name], self._spans[name]
        size = one.ds_numel if self._stage == 3 else one.numel()
        own = spans[dist.get_rank()]
        if all(span == (0, size) for span in spans):
            assert isinstance(part, torch.Tensor)
            return part.narrow(0, 0, size)
        shards = [
            ShardMetadata([span[0]], [span[1]], f"rank:{rank}/{one.device}")
            for rank, span in enumerate(spans)
            if span is not None
        ]
        dtype = part.dtype if isinstance(part, torch.Tensor) else part
        metadata = ShardedTensorMetadata(shards, torch.Size([size]), TensorProperties(dtype=dtype))
        local = []
        if own is not None:
            assert isinstance(part, torch.Tensor)
            placed = ShardMetadata([own[0]], [own[1]], f"rank:{dist.get_rank()}/{one.device}")
            local = [Shard(part.narrow(0, 0, own[1]), placed)]
        return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


class _Rest:
    """The values of an engine that are no tensors of parameters: counters, learning
    rates, the scale of the loss, and the steps of the optimizer.
    """

    def __init__(self, engine: Any, basic: torch.optim.Optimizer | None) -> None:
        self._engine, self._basic = engine, basic

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        scheduler = engine.lr_scheduler
        return {
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "scale": _numbers(getattr(engine.optimizer, "loss_scaler", None)),
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in (self._basic.param_groups if self._basic else ())
            ],
            "steps": _steps(self._basic) if self._basic else {},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned.

        Raises StructureMismatch for another number of parameter groups.
        """
        engine = self._engine
        for name, value in saved["counters"].items():
            setattr(engine, name, value)
        if saved["scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(saved["scheduler"])
        if (scaler := getattr(engine.optimizer, "loss_scaler", None)) is not None:
            for name, value in saved["scale"].items():
                setattr(scaler, name, value)
        if self._basic is None:
            return
        if len(saved["groups"]) != len(self._basic.param_groups):
            raise StructureMismatch(
                f"the engine has {len(self._basic.param_groups)} parameter groups, and "
                f"{len(saved['groups'])} were saved"
            )
        for group, values in zip(self._basic.param_groups, saved["groups"], strict=True):
            group.update(values)
        for held in self._basic.state.values():
            for key, value in saved["steps"].items():
                held[key] = value.clone() if isinstance(value, torch.Tensor) else value


def _moments(flat: Any, basic: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the optimizer that are as long as its parameter."""
    for key, value in basic.state[flat].items():
        if isinstance(value, torch.Tensor) and value.shape == flat.shape:
            yield key, value


def _steps(basic: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what the optimizer holds that is no moment: the same for all parameters,
    because they are always stepped together.
    """
    for flat, held in basic.state.items():
        moments = dict(_moments(flat, basic))
        return {key: value for key, value in held.items() if key not in moments}
    return {}


def _numbers(scaler: Any) -> dict[str, Any]:
    held = {} if scaler is None else vars(scaler)
    return {key: value for key, value in held.items() if isinstance(value, (bool, int, float))}


def _step_by_nothing(
    basic: torch.optim.Optimizer, group: dict[str, Any], flat: torch.Tensor
) -> None:
    """Make the state that an optimizer has for a tensor, by a step that changes no value."""
    before = [(each, each["params"], each["lr"]) for each in basic.param_groups]
    grad = flat.grad
    flat.grad = torch.zeros_like(flat, dtype=flat.dtype, device=flat.device)
    for each, _, _ in before:
        each["params"], each["lr"] = [flat] if each is group else [], 0.0
    basic.step()
    for each, params, rate in before:
        each["params"], each["lr"] = params, rate
    flat.grad = grad
