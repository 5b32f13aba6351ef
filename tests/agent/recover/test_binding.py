"""A saved tree and a state are compared and bound without a checkpoint: the saved tensors are in memory, and loading is a copy."""

from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ckptd.agent import per_rank
from ckptd.agent.read.loader import Saved
from ckptd.agent.recover.binding import Binding, mismatch
from ckptd.agent.state.capture import capture
from ckptd.agent.state.dtypes import dtype_name
from ckptd.agent.state.merge import Foreign, merge
from ckptd.agent.state.values import PerRank, decode
from ckptd.shared.errors import StructureMismatch


class Checkpoint:
    """States that were saved, one for each rank, with their tensors in memory."""

    def __init__(self, *states: Any) -> None:
        captured = [capture(state, rank=rank) for rank, state in enumerate(states)]
        self.trees = [decode(one.state) for one in captured]
        self.tensors = {name: tensor.detach().clone() for one in captured for name, tensor in one.tensors.items()}

    def describe(self, name: str) -> Any:
        return SimpleNamespace(size=tuple(self.tensors[name].shape), dtype=dtype_name(self.tensors[name].dtype))

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def bind(self, state: Any, own: int | None = 0, **options: Any) -> Binding:
        foreign: Foreign = {}
        tree = merge(self.trees, own, foreign)
        return Binding(state, tree, cast(Saved, self), foreign=foreign, **{"strict": True, **options})

    def recover(self, state: Any, own: int | None = 0, **options: Any) -> None:
        binding = self.bind(state, own, **options)
        for name, place in binding.in_place.items():
            place.copy_(self.tensors[name])
        binding.finish(lambda name: self.tensors[name].to(binding.fresh[name]) if name in binding.fresh else binding.in_place[name])


class Loader:
    """An object with a state dict, as a data loader has."""

    def __init__(self, position: int = 0) -> None:
        self.position, self.order = position, torch.arange(4) + position
        self.loaded: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Loader({self.position}, {self.order})"

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state
        self.position, self.order = state["position"], state["order"]


def problem(saved: Any, state: Any, **options: Any) -> str:
    """The refusal of a state. Nothing may have been written into it."""
    before = repr(state)
    with pytest.raises(StructureMismatch, match="; nothing was written$") as caught:
        Checkpoint(saved).bind(state, **options)
    assert repr(state) == before
    return str(caught.value).removesuffix("; nothing was written")


# -- values


def test_values_come_back_into_the_callers_own_containers() -> None:
    inner, history, tensor = {"a": 1}, [1], torch.zeros(2)
    state = {"n": 0, "inner": inner, "history": history, "pair": (tensor, 0), "tensors": [tensor, torch.zeros(1)]}
    saved = {
        "n": 7, "inner": {"a": 5}, "history": [1, 2, 3], "pair": (torch.ones(2), 8), "tensors": [torch.ones(2), torch.full((1,), 9.0)],
    }  # fmt: skip
    Checkpoint(saved).recover(state)
    assert (state["n"], inner, history) == (7, {"a": 5}, [1, 2, 3])
    assert state["inner"] is inner
    assert state["history"] is history
    assert cast(Any, state["pair"])[0] is cast(Any, state["tensors"])[0] is tensor
    assert (tensor.tolist(), cast(Any, state["pair"])[1], cast(Any, state["tensors"])[1].tolist()) == ([1.0, 1.0], 8, [9.0])


def test_an_empty_container_takes_what_was_saved() -> None:
    state: dict[str, Any] = {"dict": {}, "list": [], "tuple": ()}
    places = dict(state)
    Checkpoint({"dict": {"w": torch.ones(2), "k": OrderedDict(a=1)}, "list": [torch.ones(1), "x"], "tuple": (1, torch.ones(3))}).recover(
        state
    )
    assert (state["dict"]["w"].tolist(), type(state["dict"]["k"]), state["list"][0].tolist()) == ([1.0, 1.0], OrderedDict, [1.0])
    assert (state["tuple"][0], state["tuple"][1].tolist()) == (1, [1.0] * 3)
    assert state["dict"] is places["dict"]
    assert state["list"] is places["list"]


def test_the_whole_state_may_be_one_value() -> None:
    tensor = torch.zeros(3)
    Checkpoint(torch.ones(3)).recover(tensor)
    assert tensor.tolist() == [1.0] * 3
    items: list[Any] = []
    Checkpoint([1, 2]).recover(items)
    assert items == [1, 2]


def test_a_value_in_the_place_of_another_is_replaced() -> None:
    state: dict[str, Any] = {"a": None, "b": 5, "c": "x"}
    Checkpoint({"a": torch.ones(2), "b": deque([1, torch.ones(1)], 5), "c": {"k": [1]}}).recover(state)
    assert (state["a"].tolist(), state["b"][0], state["b"].maxlen, state["c"]) == ([1.0, 1.0], 1, 5, {"k": [1]})


def test_a_value_that_ckptd_takes_for_an_object_may_be_recovered_as_plain_values() -> None:
    state: dict[str, Any] = {"loader": {}}
    Checkpoint({"loader": Loader(3)}).recover(state)
    assert (state["loader"]["position"], state["loader"]["order"].tolist()) == (3, [3, 4, 5, 6])


EXPANDED = "w: the state's tensor is expanded, so that its elements share memory; clone() it first"
META = "w: the state's tensor is on the meta device; give it memory first (module.to_empty(device=...))"


@pytest.mark.parametrize(
    ("saved", "state", "words"),
    [
        ({"w": torch.ones(2)}, {"w": torch.zeros(3)}, "w: the checkpoint has shape [2], the state [3]"),
        ({"w": 1}, {"w": torch.zeros(3)}, "w: the checkpoint has int, the state a tensor"),
        ({"w": torch.ones(2)}, {"w": torch.zeros(1).expand(2)}, EXPANDED),
        ({"w": torch.ones(2)}, {"w": torch.zeros(2, device="meta")}, META),
        ({"w": torch.ones(2)}, {"w": {"x": 1}}, "w: the checkpoint has a tensor, the state a dict"),
        ({"w": {"x": 1}}, {"w": [torch.zeros(1)]}, "w: the checkpoint has dict, the state a list"),
        ({"w": [torch.ones(1)]}, {"w": [torch.zeros(1), torch.zeros(1)]}, "w: the checkpoint has a list of 1, the state one of 2"),
        ({"w": (1, 2)}, {"w": (1, 2, 3)}, "w: the checkpoint has tuple, the state a tuple of 3"),
        ({"w": [1, 2]}, {"w": (1, 2)}, "w: the checkpoint has list, the state a tuple of 2"),
        ({"w": 1}, {"w": torch.nn.Linear(1, 1)}, "w: the checkpoint has int, the state a module"),
        ({"w": {"x": 1}}, {"w": torch.optim.SGD([torch.zeros(1)])}, "w: the checkpoint has dict, the state an optimizer"),
        ({"w": Loader()}, {"w": torch.zeros(1)}, "w: the checkpoint has an object, the state a tensor"),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, "key a.c is in the state and not in the checkpoint"),
        (torch.ones(1), {"a": 1}, "the state: the checkpoint has a tensor, the state a dict"),
    ],
)  # fmt: skip
def test_a_difference_is_named_and_nothing_is_written(saved: Any, state: Any, words: str) -> None:
    assert problem(saved, state) == words


def test_every_difference_is_counted() -> None:
    assert problem({"w": torch.ones(2), "n": 1}, {"w": torch.zeros(3), "x": 1}) == (
        "key x is in the state and not in the checkpoint (and 1 more differences)"
    )
    assert str(mismatch(["one"])) == "one; nothing was written"


def test_keys_without_a_place_are_left_to_the_caller() -> None:
    """Another rank may have a place for them."""
    binding = Checkpoint({"w": torch.ones(2), "n": {"a": 1, "b": 2}, "more": 1}).bind({"w": torch.zeros(2), "n": {"a": 0}})
    assert binding.unused == ["key more is in the checkpoint and not in the state", "key n.b is in the checkpoint and not in the state"]


def test_keys_may_be_missing_on_both_sides_if_it_is_not_strict() -> None:
    checkpoint = Checkpoint({"w": torch.ones(2), "n": {"a": 1}, "more": 1})
    state = {"w": torch.zeros(2), "n": {"b": 2}, "less": 3}
    assert checkpoint.bind(state, strict=False).unused == []
    checkpoint.recover(state, strict=False)
    assert (cast(Any, state["w"]).tolist(), state["n"], state["less"]) == ([1.0, 1.0], {"b": 2}, 3)
    with pytest.raises(StructureMismatch, match=r"^w: the checkpoint has shape \[2\], the state \[3\]"):
        checkpoint.bind({"w": torch.zeros(3)}, strict=False)


# -- modules and other objects


class Extra(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return {"version": 3, "table": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_module_is_loaded_in_place_with_its_extra_state() -> None:
    saved, module = Extra(), Extra()
    with torch.no_grad():
        saved.weight.fill_(2)
    weight = module.weight
    Checkpoint({"model": saved}).recover({"model": module})
    assert module.weight is weight
    assert (weight.tolist(), module.extra["version"], module.extra["table"].tolist()) == ([2.0] * 3, 3, [1.0, 1.0])


def weights(module: torch.nn.Module) -> dict[str, Any]:
    return {name: parameter.tolist() for name, parameter in module.named_parameters()}


def test_wrappers_of_a_module_do_not_count() -> None:
    saved, module = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(2, 2))
    Checkpoint({"model": {f"_orig_mod.{name}": value for name, value in saved.state_dict().items()}}).recover({"model": module})
    assert weights(module) == weights(saved)
    wrapped = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    Checkpoint({"model": saved}).recover({"model": wrapped})
    assert weights(wrapped.module) == weights(saved)


def test_a_module_that_lacks_a_key_is_refused() -> None:
    assert problem({"model": torch.nn.Linear(2, 2, bias=False)}, {"model": torch.nn.Linear(2, 2)}) == (
        "key model.bias is in the state and not in the checkpoint"
    )


def test_an_object_loads_its_own_state_dict() -> None:
    loader = Loader()
    Checkpoint({"loader": Loader(5)}).recover({"loader": loader})
    assert (loader.position, loader.order.tolist()) == (5, [5, 6, 7, 8])
    assert loader.loaded.keys() == {"position", "order"}


def test_objects_in_a_list_keep_their_places() -> None:
    loaders = [Loader(), Loader()]
    Checkpoint({"loaders": [Loader(1), Loader(2)]}).recover({"loaders": loaders})
    assert [loader.position for loader in loaders] == [1, 2]
    assert problem({"loaders": [Loader(1)]}, {"loaders": loaders}) == "loaders: the checkpoint has a list of 1, the state one of 2"


# -- optimizers


Trained = tuple[torch.nn.ParameterDict, torch.optim.Adam]


def trained(names: tuple[str, ...] = ("a", "b"), *, lr: float = 0.1, groups: bool = False) -> Trained:
    """A model, and its optimizer after one step, each parameter in a group of its own if `groups`."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2) * (number + 1)) for number, name in enumerate(names)})
    parameters = list(model.values())
    optimizer = torch.optim.Adam([{"params": [p], "lr": lr * (n + 1)} for n, p in enumerate(parameters)] if groups else parameters, lr=lr)
    sum(p.square().sum() for p in parameters).backward()
    optimizer.step()
    return model, optimizer


def fresh(names: tuple[str, ...] = ("a", "b"), **options: Any) -> Trained:
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(2)) for name in names})
    return model, torch.optim.Adam(list(model.values()), **{"lr": 9.0, **options})


def moments(model: torch.nn.ParameterDict, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: {key: value.tolist() for key, value in optimizer.state[p].items()} for name, p in model.items() if p in optimizer.state}


@pytest.mark.parametrize("stepped", [False, True], ids=["before its first step", "after it"])
def test_an_optimizer_gets_its_state_by_the_names_of_its_parameters(stepped: bool) -> None:
    model, optimizer = trained()
    other, into = trained(("b", "a"), lr=9.0) if stepped else fresh(("b", "a"))
    kept = {p: dict(state) for p, state in into.state.items()}
    Checkpoint({"model": model, "optim": optimizer}).recover({"model": other, "optim": into})
    assert moments(other, into) == moments(model, optimizer)
    assert into.param_groups[0]["lr"] == 0.1
    for parameter, state in kept.items():
        assert into.state[parameter]["exp_avg"] is state["exp_avg"]


def test_a_parameter_keeps_the_settings_that_it_was_saved_with_in_whatever_group_it_is_now() -> None:
    model, optimizer = trained(groups=True)
    other, into = trained(groups=True)
    into.param_groups.reverse()
    Checkpoint({"model": model, "optim": optimizer}).recover({"model": other, "optim": into})
    assert [group["lr"] for group in into.param_groups] == [0.2, 0.1]


def test_parameters_of_different_settings_cannot_come_into_one_group() -> None:
    model, optimizer = trained(groups=True)
    other, into = fresh()
    with pytest.raises(StructureMismatch) as caught:
        Checkpoint({"model": model, "optim": optimizer}).bind({"model": other, "optim": into})
    assert str(caught.value) == (
        "optim.param_groups.0: the checkpoint has the parameters of this group in groups with different settings (it has 2 groups, the "
        "optimizer 1); nothing was written"
    )


def test_parameters_without_a_name_are_matched_by_their_numbers() -> None:
    model, optimizer = trained()
    other, into = fresh()
    Checkpoint({"optim": optimizer}).recover({"optim": into})
    assert moments(other, into) == moments(model, optimizer)
    named = fresh()
    Checkpoint({"optim": optimizer}).recover({"model": named[0], "optim": named[1]}, strict=False)
    assert moments(*named) == moments(model, optimizer)


def test_an_optimizer_that_was_saved_without_state_has_none_afterwards() -> None:
    other, into = trained()
    Checkpoint(dict(zip(("model", "optim"), fresh(), strict=True))).recover({"model": other, "optim": into})
    assert (len(into.state), into.param_groups[0]["lr"]) == (0, 9.0)


def test_state_of_another_dtype_replaces_the_optimizers_own() -> None:
    """In the dtype in which it was saved, on the device of its parameter; a step counter stays on the CPU."""
    model, optimizer = trained()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double()
    other, into = trained()
    Checkpoint({"model": model, "optim": optimizer}).recover({"model": other, "optim": into})
    assert {state["exp_avg"].dtype for state in into.state.values()} == {torch.float64}
    binding = Checkpoint({"model": model, "optim": optimizer}).bind(dict(zip(("model", "optim"), fresh(), strict=True)))
    assert set(binding.fresh.values()) == {torch.device("cpu")}


def test_a_setting_that_is_a_tensor_is_filled_in_place_if_the_optimizer_has_one() -> None:
    rate = torch.tensor(0.5)
    model, optimizer = fresh(lr=torch.tensor(0.25), capturable=False)
    other, into = fresh(lr=rate)
    Checkpoint({"model": model, "optim": optimizer}).recover({"model": other, "optim": into})
    assert into.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    plain = fresh()
    Checkpoint({"model": model, "optim": optimizer}).recover(dict(zip(("model", "optim"), plain, strict=True)))
    assert plain[1].param_groups[0]["lr"].item() == 0.25


def test_an_optimizer_with_other_parameters_is_refused_by_name() -> None:
    model, optimizer = trained()
    other, into = fresh(("a", "c"))
    with pytest.raises(StructureMismatch, match=r"^key model\.c is in the state and not in the checkpoint \(and 1 more differences\)"):
        Checkpoint({"model": model, "optim": optimizer}).bind({"model": other, "optim": into})


def test_entries_that_are_no_state_of_a_parameter_are_left_out() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    into = torch.optim.SGD([parameter], lr=1.0)
    saved = {"state": {0: "not a dict", 7: {"of": "nobody"}}, "param_groups": [{"params": [0], "lr": 0.5}]}
    Checkpoint({"optim": saved}).recover({"optim": into})
    assert (dict(into.state), into.param_groups[0]["lr"]) == ({parameter: {}}, 0.5)


# -- values of each rank


def test_a_rank_gets_its_own_value_and_the_mark_stays() -> None:
    checkpoint = Checkpoint(*({"position": per_rank(10 * rank), "shared": 1} for rank in range(3)))
    state = {"position": per_rank(0), "shared": 0}
    checkpoint.recover(state, own=2)
    assert state == {"position": PerRank(20), "shared": 1}
    unmarked = {"position": 0, "shared": 0}
    checkpoint.recover(unmarked, own=1)
    assert unmarked["position"] == 10


def test_a_rank_that_has_saved_none_is_refused_without_a_function_for_it() -> None:
    checkpoint = Checkpoint(*({"position": per_rank(rank)} for rank in range(2)))
    with pytest.raises(StructureMismatch, match="^position is each rank's own, was saved on 2 ranks, none of them this one: "):
        checkpoint.bind({"position": per_rank(0)}, own=None)


def test_on_reshape_makes_the_value_of_a_rank_from_all_of_them() -> None:
    asked: list[tuple[str, list[Any]]] = []

    def reshape(key: str, values: list[Any]) -> Any:
        asked.append((key, values))
        return sum(values) if key == "position" else values[1]

    checkpoint = Checkpoint(*({"position": per_rank(rank + 1), "loader": per_rank(Loader(rank))} for rank in range(2)))
    loader = Loader()
    state = {"position": per_rank(0), "loader": per_rank(loader)}
    checkpoint.recover(state, own=None, on_reshape=reshape)
    assert state["position"] == PerRank(3)
    assert state["loader"].value is loader
    assert loader.position == 1
    assert [key for key, _ in asked] == ["position", "loader"]
    assert asked[0][1] == [1, 2]


def test_own_values_inside_of_rebuilt_containers_keep_their_mark() -> None:
    checkpoint = Checkpoint(
        *({"all": {"deep": [per_rank(rank), "x"], "loader": Loader(rank), "o": OrderedDict(p=per_rank(rank))}} for rank in range(2))
    )
    state: dict[str, Any] = {"all": {}}
    checkpoint.recover(state, own=1)
    assert state["all"]["deep"] == [PerRank(1), "x"]
    assert state["all"]["o"] == OrderedDict(p=PerRank(1))
    assert type(state["all"]["o"]) is OrderedDict


def test_an_object_gets_its_own_values_without_a_mark() -> None:
    class Marked(Loader):
        def state_dict(self) -> dict[str, Any]:
            return {"position": per_rank(self.position), "order": self.order}

    loader = Marked()
    Checkpoint({"loader": Marked(4)}, {"loader": Marked(6)}).recover({"loader": loader}, own=1)
    assert loader.position == 6


def test_what_only_other_ranks_had_does_not_come_into_an_empty_place() -> None:
    checkpoint = Checkpoint({"stage": {"layer0": torch.ones(1)}}, {"stage": {"layer1": torch.ones(2)}})
    state: dict[str, Any] = {"stage": {}}
    checkpoint.recover(state, own=1)
    assert state["stage"].keys() == {"layer1"}


# -- undoing


def test_what_the_comparison_has_made_is_undone_once() -> None:
    binding = Checkpoint({"n": 1}).bind({"n": 0})
    undone: list[int] = []
    binding._undo.append(lambda: undone.append(1))
    binding.discard()
    binding.discard()
    assert undone == [1]
