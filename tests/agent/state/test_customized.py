"""Tests which objects are found to load their state in a way of their own, and that
plain ones are proved to be plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.agent.state.customized import (
    loads_by_itself,
    needs_loading,
    optimizer_loads_by_itself,
    parts_with_loaders,
)
from tests.support.cases import each_case


class OwnLoader(nn.Linear):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


class OwnSaver(nn.Linear):
    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._save_to_state_dict(*args, **kwargs)


class OwnState(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


class OwnLoad(nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


def hooked(method: str) -> nn.Module:
    module = nn.Linear(1, 1)
    getattr(module, method)(lambda *args: None)
    return module


def with_own_method(name: str) -> nn.Module:
    """Return a module whose method is replaced on the object, as some libraries do it."""
    module = nn.Linear(1, 1)
    setattr(module, name, getattr(module, name))
    return module


PLAIN: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(1, 1),
    lambda: nn.BatchNorm1d(2),
    lambda: nn.InstanceNorm1d(2, track_running_stats=True),
    lambda: nn.TransformerEncoderLayer(4, 2),
    lambda: nn.LSTM(2, 2),
    lambda: nn.ParameterDict({"a": nn.Parameter(torch.zeros(1))}),
]


@each_case("make", PLAIN)
def test_a_module_of_torch_is_plain(make: Callable[[], nn.Module]) -> None:
    module = nn.Sequential(make())
    assert (loads_by_itself(module), parts_with_loaders(module), needs_loading(module)) == (
        False,
        [],
        False,
    )


@each_case(
    "make",
    [
        lambda: OwnLoader(1, 1),
        lambda: with_own_method("_load_from_state_dict"),
        lambda: hooked("register_load_state_dict_pre_hook"),
        lambda: hooked("_register_load_state_dict_pre_hook"),
        lambda: nn.LazyLinear(1),
    ],
)
def test_a_part_that_changes_what_is_loaded_is_found_by_its_prefix(
    make: Callable[[], nn.Module],
) -> None:
    part = make()
    assert parts_with_loaders(part) == [""]
    assert parts_with_loaders(nn.Sequential(nn.Linear(1, 1), nn.Sequential(part))) == ["1.0."]


def test_parts_inside_of_a_loader_are_its_own_affair() -> None:
    outer = OwnLoader(1, 1)
    outer.inner = hooked("register_load_state_dict_pre_hook")
    assert parts_with_loaders(
        nn.ModuleDict({"outer": outer, "outer2": nn.Sequential(OwnLoader(1, 1))})
    ) == ["outer.", "outer2.0."]


@each_case(
    "make",
    [
        lambda: Extra(1, 1),
        lambda: OwnSaver(1, 1),
        lambda: with_own_method("_save_to_state_dict"),
        lambda: hooked("register_load_state_dict_post_hook"),
        lambda: hooked("register_state_dict_post_hook"),
        lambda: hooked("register_state_dict_pre_hook"),
    ],
)
def test_a_part_that_sees_what_is_loaded_is_found(make: Callable[[], nn.Module]) -> None:
    assert needs_loading(nn.Sequential(nn.Linear(1, 1), make()))
    assert parts_with_loaders(make()) == []


def test_only_the_outermost_module_is_asked_by_torch() -> None:
    for module in (
        OwnState(1, 1),
        OwnLoad(1, 1),
        with_own_method("state_dict"),
        with_own_method("load_state_dict"),
    ):
        assert loads_by_itself(module)
        assert not loads_by_itself(nn.Sequential(module))


def test_hooks_of_torch_distributed_leave_values_as_they_are() -> None:
    def hook(*args: Any) -> None:
        pass

    hook.__module__ = "torch.distributed.fsdp._state"
    module = nn.Linear(1, 1)
    module.register_load_state_dict_pre_hook(hook)
    module.register_load_state_dict_post_hook(hook)
    assert (parts_with_loaders(module), needs_loading(module)) == ([], False)


# -- optimizers


class OwnAdam(torch.optim.Adam):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def optimizer(cls: type[torch.optim.Adam] = torch.optim.Adam) -> torch.optim.Adam:
    return cls([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    "method",
    [
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_an_optimizer_with_hooks_loads_by_itself(method: str) -> None:
    hooked = optimizer()
    handle = getattr(hooked, method)(lambda *args: None)
    assert optimizer_loads_by_itself(hooked)
    handle.remove()
    assert not optimizer_loads_by_itself(hooked)


def test_an_optimizer_with_methods_of_its_own_loads_by_itself() -> None:
    assert optimizer_loads_by_itself(optimizer(OwnAdam))
    plain = optimizer()
    assert not optimizer_loads_by_itself(plain)
    plain.state_dict = plain.state_dict  # type: ignore[method-assign]
    assert optimizer_loads_by_itself(plain)


def test_hooks_of_a_step_are_no_hooks_of_loading() -> None:
    stepping = optimizer()
    stepping.register_step_pre_hook(lambda *args: None)
    torch.optim.lr_scheduler.StepLR(stepping, 1)  # which wraps `step` of this optimizer
    assert not optimizer_loads_by_itself(stepping)
