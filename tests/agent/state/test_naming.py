"""The parameters of an optimizer have the names of the modules that hold them; and kept
names are used as long as they hold.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import ChainMap
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ckptd.agent import per_rank
from ckptd.agent.state.capture import capture
from ckptd.agent.state.naming import (
    KeptNames,
    Names,
    buffer_names,
    find,
    learned_names,
    with_current_names,
)
from tests.support.wrapped import Scaled


def test_objects_are_found_by_their_keys() -> None:
    one, two, three = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    state = {
        "a": one,
        "list": [torch.ones(1), (two, 5)],
        "own": per_rank({"c": three}),
        "tensors": {"x": torch.ones(1)},
    }
    assert list(find(state, "", nn.Linear)) == [("a", one), ("list.1.0", two), ("own.c", three)]
    assert list(find(one, "", nn.Linear)) == [("", one)]
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
    state = {
        "t": Training(one, Pair(two, three)),
        "n": SimpleNamespace(inner=one),
        "c": ChainMap({"a": two}),
    }
    found = [("t.model", one), ("t.pair.x", two), ("n.inner", one), ("c.maps.0.a", two)]
    assert list(find(state, "", nn.Linear)) == found
    assert buffer_names(state) == [
        f"t.pair.y.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    assert set(buffer_names(state)) <= capture(state).tensors.keys()
    assert list(find(Loader(inner=one), "", nn.Linear)) == []


def test_buffers_are_named_with_the_key_of_their_module() -> None:
    module = nn.Sequential(nn.DataParallel(nn.BatchNorm1d(2)))
    expected = ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    assert buffer_names({"model": module}) == [f"model.{name}" for name in expected]
    assert buffer_names(module) == expected


def test_parameters_and_optimizer_state_are_learned_and_nothing_else() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> torch.Tensor:
            return torch.ones(1)

        def set_extra_state(self, state: torch.Tensor) -> None: ...

    model = nn.Sequential(Extra(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    state = {"model": model, "parts": [model[1], optimizer], "modelled": torch.ones(1), "n": 1}
    moments = ("step", "exp_avg", "exp_avg_sq")
    keys = ("0.weight", "0.bias", "1.weight", "1.bias")
    wanted = [f"model.{key}" for key in keys] + ["parts.0.weight", "parts.0.bias"]
    wanted += [f"parts.1.state.{key}.{moment}" for key in keys for moment in moments]
    assert learned_names(state, capture(state).tensors) == frozenset(wanted)
    assert learned_names(model, capture(model).tensors) == frozenset(keys)
    assert learned_names({"w": torch.ones(1)}, ["w"]) is None
    assert learned_names({"m": nn.BatchNorm1d(1, affine=False)}, ["m.running_mean"]) == frozenset()


def sgd(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1)


def named(state: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    return Names(state).of(optimizer)


def test_names_do_not_depend_on_modules_whose_parameters_the_optimizer_does_not_hold() -> None:
    model = nn.Linear(1, 1)
    optimizer, average = sgd(*model.parameters()), copy.deepcopy(model)
    for state in (
        {"model": model},
        {"model": model, "ema": average},
        {"ema": average, "model": model},
        [average, {"m": model}],
    ):
        assert named(state, optimizer) == ["weight", "bias"]


def test_each_optimizer_has_names_of_its_own() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    names = Names(
        {"g": one, "d": two, "opt_g": sgd(*one.parameters()), "opt_d": sgd(*two.parameters())}
    )
    assert list(map(names.of, names.optimizers)) == [["weight", "bias"]] * 2


def test_parameters_of_two_modules_with_one_name_get_the_keys_of_their_modules() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)
    optimizer = sgd(one.weight, one.bias, two.weight)
    assert named({"a": one, "b": two}, optimizer) == ["a.weight", "bias", "b.weight"]
    assert named({"a": one, "again": one, "b": two}, optimizer) == ["a.weight", "bias", "b.weight"]


def test_a_part_of_a_module_beside_it_changes_no_name() -> None:
    model = nn.ModuleDict({"body": nn.Linear(1, 1), "head": nn.Linear(1, 1)})
    optimizer = sgd(*model.parameters())
    whole = ["body.weight", "body.bias", "head.weight", "head.bias"]
    for state in (
        {"model": model},
        {"model": model, "head": model["head"]},
        {"head": model["head"], "body": model["body"], "model": model},
    ):
        assert named(state, optimizer) == whole
    of_head = sgd(*model["head"].parameters())
    assert named({"model": model, "head": model["head"]}, of_head) == ["head.weight", "head.bias"]
    assert named({"head": model["head"], "model": model}, of_head) == ["weight", "bias"]


def test_the_module_that_holds_most_of_the_rest_comes_next() -> None:
    a, b, c, d = (nn.Parameter(torch.ones(1)) for _ in range(4))
    one, two, three = (
        nn.ParameterDict(held)
        for held in ({"a": a, "b": b, "c": c}, {"p": b, "q": c}, {"x": c, "y": d})
    )
    places = {"two": two, "three": three, "one": one}
    assert named(places, sgd(a, b, c, d)) == ["a", "b", "c", "y"]
    assert named(places, sgd(b, c, d)) == ["p", "q", "y"]
    many = [nn.ParameterDict({f"p{n}": nn.Parameter(torch.ones(1))}) for n in range(200)]
    assert named(many, sgd(*(p for one in many for p in one.parameters()))) == [
        f"p{n}" for n in range(200)
    ]


def test_names_that_would_be_equal_with_the_keys_of_the_modules_too_become_numbers() -> None:
    one, two = (
        nn.ParameterDict({"w": nn.Parameter(torch.ones(1))}),
        nn.ParameterDict({"w": nn.Parameter(torch.ones(1))}),
    )
    assert named({"a": {"b": one}, "a.b": two}, sgd(one["w"], two["w"])) == [0, 1]


def test_a_tied_parameter_has_its_first_name() -> None:
    module = nn.ModuleDict(
        {"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)}
    )
    module["head"].weight = module["embed"].weight
    assert named(module, sgd(*module.parameters())) == ["embed.weight"]


def test_a_bare_tensor_has_its_key_as_its_name() -> None:
    module, bare, plain = (
        nn.Linear(1, 1),
        nn.Parameter(torch.ones(1)),
        torch.ones(1, requires_grad=True),
    )
    optimizer = sgd(module.weight, bare, plain)
    state = {
        "model": module,
        "extra": {"temperature": bare, "other": torch.ones(1)},
        "all": [plain, torch.ones(2)],
    }
    assert named(state, optimizer) == ["weight", "extra.temperature", "all.0"]
    assert named({"model": module, "weight": bare, "t": per_rank(plain)}, optimizer) == [
        "model.weight",
        "weight",
        "t",
    ]


def test_a_parameter_without_a_name_leaves_the_others_theirs() -> None:
    module, one, two = nn.Linear(1, 1), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert named({"m": module}, sgd(module.bias, module.weight)) == ["bias", "weight"]
    assert named({"m": module}, sgd(one, module.weight, two, module.bias)) == [
        0,
        "weight",
        1,
        "bias",
    ]
    assert Names().of(sgd(one, two)) == [0, 1]
    assert Names().flattened_by(sgd(one)) is None


def saved_groups(*names: Any, **settings: Any) -> dict[str, Any]:
    return {
        "state": {name: {"of": name} for name in names},
        "param_groups": [{"params": list(names), **settings}],
    }


def test_names_of_earlier_versions_are_understood() -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    state, optimizer = {"model": nn.DataParallel(model)}, sgd(*model.parameters())
    expected = {
        "state": {"0.weight": {"of": "w"}, "0.bias": {"of": "b"}},
        "param_groups": [{"params": ["0.weight", "0.bias"]}],
    }
    for weight, bias in (
        ("0.module.weight", "0.module.bias"), ("model.0.module.weight", "0.module.bias"),
        ("model.0.weight", "0.bias"), (0, 1),
    ):  # fmt: skip
        saved = {
            "state": {weight: {"of": "w"}, bias: {"of": "b"}},
            "param_groups": [{"params": [weight, bias]}],
        }
        assert with_current_names(saved, optimizer, Names(state)) == expected
    for names in (("1.weight",), ("ema.0.weight",), (0,), (0, 1, 2)):
        assert with_current_names(saved_groups(*names), optimizer, Names(state)) == saved_groups(
            *names
        )


def test_an_old_name_that_could_mean_two_parameters_is_not_understood() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    state, optimizer = {"a": one, "b": two}, sgd(one.weight, two.weight)
    assert with_current_names(saved_groups("weight"), optimizer, Names(state)) == saved_groups(
        "weight"
    )
    both = saved_groups("weight", "model.weight")
    # Both are the name of one parameter.
    assert with_current_names(both, sgd(one.weight), Names({"model": one})) == both


def test_a_name_follows_the_key_of_its_tensor() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    state, optimizer = {"a": one, "b": two, "copy": nn.Linear(1, 1)}, sgd(one.weight, two.weight)
    for tensors, name in (
        (["a.weight"], "a.weight"),
        (["copy.weight", "b.weight"], "b.weight"),
        (["a.weight", "b.weight"], "weight"),
    ):
        saved = with_current_names(
            saved_groups("weight"),
            optimizer,
            Names(state),
            lambda _, tensors=tensors: tensors,  # type: ignore[misc]
        )
        assert saved == {"state": {name: {"of": "weight"}}, "param_groups": [{"params": [name]}]}


def test_the_name_of_a_tensor_that_its_module_no_longer_has_is_not_that_of_another_parameter() -> (
    None
):
    state: dict[str, Any] = {
        "a": nn.Sequential(),
        "b": (module := nn.Linear(1, 1)),
        "c": nn.Linear(1, 1),
    }
    optimizer = sgd(module.weight)
    for tensors, name in (
        (["a.weight"], "a.weight"),
        (["renamed.weight"], "weight"),
        (["c.weight"], "weight"),
        ([], "weight"),
    ):
        saved = with_current_names(
            saved_groups("weight"),
            optimizer,
            Names(state),
            lambda _, tensors=tensors: tensors,  # type: ignore[misc]
        )
        assert saved["param_groups"] == [{"params": [name]}]


def test_the_names_that_torch_keeps_in_a_group_are_left_out() -> None:
    module = nn.Linear(1, 1)
    saved = saved_groups("weight", param_names=["w"], lr=2.0)
    assert with_current_names(saved, sgd(module.weight), Names({"m": module})) == saved_groups(
        "weight", lr=2.0
    )


class Kept:
    """Kept names, and how often they had to be looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names, self.looked_up = KeptNames(), 0
        look_up = Names.held

        def count(names: Names) -> Any:
            self.looked_up += names._held is None
            return look_up(names)

        monkeypatch.setattr(Names, "held", count)

    def of(self, state: Any) -> list[Any]:
        names = self.names.of(state)
        return [key for optimizer in names.optimizers for key in names.of(optimizer)]


def test_names_are_kept_while_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, module = Kept(monkeypatch), nn.Linear(2, 2)
    state: dict[str, Any] = {
        "model": nn.Sequential(nn.Sequential(module)),
        "optim": sgd(*module.parameters()),
    }
    names = ["0.0.weight", "0.0.bias"]
    for _ in range(3):
        assert kept.of(state) == names
    assert kept.looked_up == 1
    # The storage has moved, in the module and in the optimizer.
    module.weight.data = torch.zeros(2, 2)
    assert (kept.of(state), kept.looked_up) == (names, 1)
    module.weight = nn.Parameter(torch.zeros(2, 2))  # the optimizer has the old one
    assert (kept.of(state), kept.looked_up) == ([0, names[1]], 2)
    assert (kept.of(state), kept.looked_up) == ([0, names[1]], 3)
    state["optim"] = sgd(*reversed(list(module.parameters())))
    assert (kept.of(state), kept.of(state), kept.looked_up) == (names[::-1], names[::-1], 4)
    del module.bias
    module.register_parameter("offset", nn.Parameter(torch.zeros(2)))
    state["optim"] = sgd(*module.parameters())
    assert (kept.of(state), kept.looked_up) == (["0.0.weight", "0.0.offset"], 5)
    state["model"] = nn.Sequential(nn.DataParallel(module))
    assert (kept.of(state), kept.looked_up) == (["0.weight", "0.offset"], 6)
    # The names are the same, and no wrapper has them.
    state["model"] = nn.Sequential(nn.ModuleDict({"module": module}))
    assert (kept.of(state), kept.looked_up) == (["0.module.weight", "0.module.offset"], 7)


@pytest.mark.parametrize("shape", [(2,), (0,)], ids=["wrapper subclass", "empty"])
def test_parameters_without_an_address_that_are_swapped_are_named_anew(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int]
) -> None:
    kept = Kept(monkeypatch)
    made = [
        nn.Parameter(Scaled(torch.ones(2), torch.ones(1), 8) if shape == (2,) else torch.ones(0))
        for _ in "ab"
    ]
    assert [p.data_ptr() for p in made] == [0, 0]
    model = nn.ParameterDict({"a": made[0], "b": made[1]})
    state = {"model": model, "optim": sgd(*made)}
    assert (kept.of(state), kept.of(state), kept.looked_up) == (["a", "b"], ["a", "b"], 1)
    model["a"], model["b"] = made[1], made[0]
    assert (kept.of(state), kept.looked_up) == (["b", "a"], 2)


def test_the_names_of_bare_tensors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, module, bare = Kept(monkeypatch), nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    state: dict[str, Any] = {"model": module, "t": bare, "optim": sgd(module.weight, bare)}
    assert (kept.of(state), kept.of(state), kept.looked_up) == (["weight", "t"], ["weight", "t"], 1)
    state = {"model": module, "u": bare, "optim": state["optim"]}
    assert (kept.of(state), kept.looked_up) == (["weight", "u"], 2)


def test_a_parameter_in_no_module_is_looked_up_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(monkeypatch)
    state = {"optim": sgd(nn.Parameter(torch.ones(1)))}
    assert [kept.of(state), kept.of(state)] == [[0], [0]]
    assert (kept.looked_up, kept.names.places) == (2, None)


def test_names_that_a_module_makes_up_are_looked_up_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Renaming(nn.Linear):
        def named_parameters(self, *args: Any, **options: Any) -> Any:
            return (
                (f"my.{name}", parameter)
                for name, parameter in super().named_parameters(*args, **options)
            )

    kept, module = Kept(monkeypatch), Renaming(1, 1)
    state = {"model": module, "optim": sgd(*module.parameters())}
    assert [kept.of(state), kept.of(state)] == [["my.weight", "my.bias"]] * 2
    assert kept.looked_up == 2


def test_kept_names_keep_no_module_alive() -> None:
    kept, module = KeptNames(), nn.Linear(1, 1)
    kept.of({"model": module, "optim": sgd(*module.parameters())})
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_prefix_does_not_depend_on_whether_parameters_are_tied() -> None:
    """Otherwise untying them would rename a parameter of another module, and its
    moments would not be found.
    """

    def keys(*, tied: bool) -> list[Any]:
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
        head = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
        if tied:
            model[1].weight = model[0].weight
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()])
        return Names({"model": model, "head": head, "optim": optimizer}).of(optimizer)

    assert keys(tied=False) == [
        "model.0.weight",
        "model.1.weight",
        "head.0.weight",
        "head.1.weight",
    ]
    assert keys(tied=True) == ["model.0.weight", "head.0.weight", "head.1.weight"]


def test_a_class_may_override_named_parameters_without_all_arguments() -> None:
    class Own(torch.nn.Linear):
        def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
            return super().named_parameters(prefix, recurse)

    state = {"model": Own(2, 2)}
    optimizer = torch.optim.SGD(state["model"].parameters())
    assert Names({**state, "optim": optimizer}).of(optimizer) == ["weight", "bias"]
