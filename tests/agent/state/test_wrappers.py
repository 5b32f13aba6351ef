"""Wrappers at any depth leave no trace in the names of a module, and no other part of a
name is lost.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from ckptd.agent.state import wrappers
from ckptd.agent.state.wrappers import (
    canonical_keys,
    canonical_names,
    current_names,
    flattens,
    raw_names,
    unwrapped,
)

compiled: Any = partial(torch.compile, backend="eager")
WRAPPERS = {
    "data parallel": nn.DataParallel,
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
    "compiled data parallel": lambda module: compiled(nn.DataParallel(module)),
    "data parallel compiled": lambda module: nn.DataParallel(compiled(module)),
    "all": lambda module: checkpoint_wrapper(compiled(nn.DataParallel(checkpoint_wrapper(module)))),
}
wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def model(wrap: Any = lambda module: module) -> nn.Module:
    """A module with a wrapper at three depths."""
    inner = nn.Sequential(wrap(nn.Linear(2, 2)), nn.ReLU(), nn.BatchNorm1d(2))
    return wrap(nn.ModuleDict({"encoder": wrap(inner), "module": nn.Linear(1, 1)}))  # type: ignore[no-any-return]


@wrapped
def test_wrappers_leave_no_trace_at_any_depth(wrap: Any) -> None:
    plain, made = list(model().state_dict()), model(wrap)
    assert canonical_names(made, made.state_dict()) == plain
    assert canonical_names(made, [name for name, _ in nn.Module.named_parameters(made)]) == [
        name for name, _ in model().named_parameters()
    ]
    assert raw_names(made, made.state_dict()) == dict(zip(plain, made.state_dict(), strict=True))


def test_the_name_of_a_wrapper_class_is_that_of_torch() -> None:
    """The wrappers are known by name.

    A class that torch has moved or renamed would no longer be one.
    """
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
    from torch.distributed.fsdp import FullyShardedDataParallel

    known = (
        nn.DataParallel,
        nn.parallel.DistributedDataParallel,
        AveragedModel,
        OptimizedModule,
        ActivationWrapper,
        FullyShardedDataParallel,
    )
    assert {f"{cls.__module__}.{cls.__qualname__}" for cls in known} == wrappers._WRAPPERS.keys()


def test_attributes_of_the_users_own_stay_in_the_names() -> None:
    made = nn.ModuleDict(
        {
            "module": nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)}),
            "_orig_mod": nn.DataParallel(nn.Linear(1, 1, bias=False)),
        }
    )
    assert canonical_names(made, made.state_dict()) == [
        "module._orig_mod.weight",
        "module._orig_mod.bias",
        "_orig_mod.weight",
    ]
    outer = nn.DataParallel(made)
    assert canonical_names(outer, outer.state_dict()) == [
        "module._orig_mod.weight",
        "module._orig_mod.bias",
        "_orig_mod.weight",
    ]


def test_the_average_of_a_model_has_the_names_of_the_model() -> None:
    for average in (
        AveragedModel(model()),
        AveragedModel(nn.DataParallel(model())),
        AveragedModel(model(compiled)),
    ):
        assert canonical_names(average, average.state_dict()) == [
            "n_averaged",
            *model().state_dict(),
        ]


def test_a_wrapper_that_would_make_two_names_equal_stays() -> None:
    inner = nn.ParameterDict(
        {"n_averaged": nn.Parameter(torch.ones(1)), "w": nn.Parameter(torch.ones(1))}
    )
    for average in (AveragedModel(inner), AveragedModel(nn.DataParallel(inner))):
        assert canonical_names(average, average.state_dict()) == [
            "n_averaged",
            "module.n_averaged",
            "module.w",
        ]

    class Counted(nn.DataParallel[nn.Module]):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.weight = nn.Parameter(torch.ones(1))
            self.extra = nn.Parameter(torch.ones(1))

    clash, apart = (
        Counted(nn.Linear(1, 1)),
        Counted(nn.ParameterDict({"w": nn.Parameter(torch.ones(1))})),
    )
    assert canonical_names(clash, clash.state_dict()) == list(clash.state_dict())
    assert canonical_names(apart, apart.state_dict()) == ["weight", "extra", "w"]


def test_two_keys_never_become_one_name() -> None:
    made = nn.DataParallel(nn.Linear(1, 1))
    raw = ["module.weight", "module.bias", "weight"]  # a hook has added the last one
    assert canonical_names(made, raw) == raw


def test_keys_that_no_submodule_explains_keep_what_is_not_a_wrapper() -> None:
    made = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    raw = [
        "0.module._extra_state",
        "0.module.added.module.by_a_hook",
        "module.weight",
        "elsewhere.module.weight",
        "0.module",
    ]
    assert canonical_names(made, raw) == [
        "0._extra_state",
        "0.added.module.by_a_hook",
        "module.weight",
        "elsewhere.module.weight",
        "0.module",
    ]


@wrapped
def test_the_names_of_a_state_dict_are_kept_while_they_hold(
    wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = mock.Mock(side_effect=wrappers._names)
    monkeypatch.setattr(wrappers, "_names", look_up)
    made, plain = model(wrap), list(model().state_dict())
    for _ in range(3):
        assert list(canonical_keys(made, made.state_dict())) == plain
    assert look_up.call_count <= 1
    assert list(canonical_keys(made, dict.fromkeys(list(made.state_dict())[1:]))) == plain[1:]


def test_kept_names_are_derived_again_when_a_wrapper_has_become_another_module() -> None:
    made = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    assert list(canonical_keys(made, made.state_dict())) == ["0.weight", "0.bias"]
    made[0] = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert list(canonical_keys(made, made.state_dict())) == ["0.module.weight", "0.module.bias"]


def test_raw_and_former_names_are_understood() -> None:
    made = nn.Sequential(nn.DataParallel(compiled(nn.Linear(1, 1))))
    raw_of = raw_names(made, made.state_dict())
    assert list(raw_of) == ["0.weight", "0.bias"]
    assert current_names(raw_of, ["0.module._orig_mod.weight", "0.module.bias"]) == {
        "0.module._orig_mod.weight": "0.weight",
        "0.module.bias": "0.bias",
    }
    assert current_names(raw_of, ["0._orig_mod.weight"]) == {"0._orig_mod.weight": "0.weight"}
    assert current_names(raw_of, ["1.module.weight", "0.module.weight", "0.weight"]) == {
        "1.module.weight": "1.module.weight", "0.module.weight": "0.module.weight",
        "0.weight": "0.weight",
    }  # fmt: skip


def test_the_users_module_is_found_in_its_wrappers() -> None:
    module = nn.Linear(1, 1)
    assert unwrapped(nn.DataParallel(nn.DataParallel(module))) is module
    assert unwrapped(module) is module
    assert not flattens(module)
