"""Parameters have the names of their modules, in any wrapping; and kept names are used as long as they hold."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ckptd.agent import per_rank
from ckptd.agent.state import naming
from ckptd.agent.state.capture import capture, module_state
from ckptd.agent.state.naming import (
    KeptNames,
    Names,
    buffer_names,
    canonical,
    canonical_keys,
    find,
    flattens,
    modules_of,
    parameter_keys,
    parameter_names,
    unwrapped,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("weight", "weight"),
        ("_orig_mod.layer.weight", "layer.weight"),
        ("layer._checkpoint_wrapped_module.weight", "layer.weight"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module._orig_mod.b", "a.b"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("layer._orig_mod", "layer._orig_mod"),
    ],
)
def test_a_canonical_name_has_no_wrapper_in_it(name: str, expected: str) -> None:
    assert canonical(name) == expected
    assert canonical_keys({name: 1, "other": 2}) == {expected: 1, "other": 2}


def test_the_users_module_is_found_in_its_wrappers() -> None:
    module = nn.Linear(1, 1)
    assert unwrapped(nn.DataParallel(nn.DataParallel(module))) is module
    assert unwrapped(module) is module
    assert not flattens(module)


def test_objects_are_found_by_their_keys() -> None:
    one, two, three = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    state = {"a": one, "list": [torch.ones(1), (two, 5)], "own": per_rank({"c": three}), "tensors": {"x": torch.ones(1)}}
    assert list(find(state, "", nn.Linear)) == [("a", one), ("list.1.0", two), ("own.c", three)]
    assert list(find(one, "", nn.Linear)) == [("", one)]
    assert modules_of([one, [two]]) == [one, two]
    assert list(find({1: [one]}, "", nn.Linear)) == [("1.0", one)]


class Pair(NamedTuple):
    x: nn.Module
    y: nn.Module


@dataclass
class Training:
    model: nn.Module
    pair: Pair


class Loader(SimpleNamespace):
    """An object with a state of its own, which nobody looks into."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_objects_in_fields_are_found_by_the_names_of_the_fields() -> None:
    one, two, three = nn.Linear(1, 1), nn.Linear(1, 1), nn.BatchNorm1d(1)
    state = {"t": Training(one, Pair(two, three)), "n": SimpleNamespace(inner=one), "c": ChainMap({"a": two})}
    found = [("t.model", one), ("t.pair.x", two), ("n.inner", one), ("c.maps.0.a", two)]
    assert list(find(state, "", nn.Linear)) == found
    assert buffer_names(state) == [f"t.pair.y.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert set(buffer_names(state)) <= capture(state).tensors.keys()
    assert list(find(Loader(inner=one), "", nn.Linear)) == []


def test_buffers_are_named_with_the_key_of_their_module() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    expected = ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    assert buffer_names({"model": module}) == [f"model.{name}" for name in expected]
    assert buffer_names(module) == expected


def named(state: Any) -> dict[int, str]:
    return parameter_names(state).of


def test_parameters_of_two_modules_with_one_name_get_the_keys_of_their_modules() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)
    names = named({"a": one, "b": two})
    assert [names[id(p)] for p in (one.weight, one.bias, two.weight)] == ["a.weight", "bias", "b.weight"]
    assert set(named({"a": one, "again": one}).values()) == {"weight", "bias"}


def test_a_tied_parameter_has_its_first_name() -> None:
    module = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    module["head"].weight = module["embed"].weight
    assert list(named(module).values()) == ["embed.weight"]


def test_an_optimizer_with_a_parameter_of_no_module_keeps_its_numbers() -> None:
    module, foreign = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    names = parameter_names({"m": module})
    assert parameter_keys(torch.optim.SGD([module.bias, module.weight], lr=1), names) == ["bias", "weight"]
    assert parameter_keys(torch.optim.SGD([module.weight, foreign], lr=1), names) == [0, 1]
    assert Names().flattened_by(torch.optim.SGD([foreign], lr=1)) is None
    assert Names(flattened={id(foreign): module}).flattened_by(torch.optim.SGD([module.bias, foreign], lr=1)) is module


class Kept:
    """Kept names, and how often they had to be looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names, self.looked_up = KeptNames(), 0

        def count(state: Any) -> Names:
            self.looked_up += 1
            return parameter_names(state)

        monkeypatch.setattr(naming, "parameter_names", count)

    def of(self, state: Any) -> list[Any]:
        found = self.names.of(state, [module_state(module) for module in modules_of(state)])
        return [key for _, optimizer in find(state, "", torch.optim.Optimizer) for key in parameter_keys(optimizer, found)]


def test_names_are_kept_while_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, module = Kept(monkeypatch), nn.Linear(2, 2)
    state = {"model": module, "optim": torch.optim.SGD(module.parameters(), lr=1)}
    for _ in range(3):
        assert kept.of(state) == ["weight", "bias"]
    assert kept.looked_up == 1
    module.weight.data = torch.zeros(2, 2)  # the storage has moved, in the module and in the optimizer
    assert (kept.of(state), kept.looked_up) == (["weight", "bias"], 1)
    module.weight = nn.Parameter(torch.zeros(2, 2))  # the optimizer has the old one
    assert (kept.of(state), kept.looked_up) == ([0, 1], 2)
    state["optim"] = torch.optim.SGD(reversed(list(module.parameters())), lr=1)
    assert (kept.of(state), kept.looked_up) == (["bias", "weight"], 3)
    del module.bias
    module.register_parameter("offset", nn.Parameter(torch.zeros(2)))
    state["optim"] = torch.optim.SGD(module.parameters(), lr=1)
    assert (kept.of(state), kept.looked_up) == (["weight", "offset"], 4)


def test_a_parameter_in_no_state_dict_is_looked_up_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(monkeypatch)
    state = {"optim": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)}
    assert [kept.of(state), kept.of(state)] == [[0], [0]]
    assert (kept.looked_up, kept.names.places) == (2, None)
