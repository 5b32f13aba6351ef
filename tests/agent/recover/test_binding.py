"""A saved tree and a state are compared and bound without a checkpoint: the saved
tensors are in memory, and loading is a copy.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, cast

import numpy as np
import pytest
import torch

from ckptd.agent import per_rank
from ckptd.agent.recover.binding import put_into
from ckptd.agent.state.tree import PerRank
from ckptd.shared.errors import RecoveryFailed, StructureMismatch
from tests.agent.test_resharding import Cursor
from tests.oracle.prints import text
from tests.support.cases import each_case
from tests.support.refusals import exit_of, refusal, refuses
from tests.support.saved_states import Checkpoint


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
    with pytest.raises(StructureMismatch, match="; nothing was written") as caught:
        Checkpoint(saved).bind(state, **options)
    assert repr(state) == before
    return str(caught.value).partition("; nothing was written")[0]


# -- objects whose state_dict raises


class Unready(Loader):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("not yet")


@pytest.mark.parametrize("key", ["loader", "loaders.1"])
def test_an_object_whose_state_dict_raises_is_refused_by_its_key(key: str) -> None:
    """The recovery compares the form of this state dict with the saved one."""
    tensor, unready = torch.zeros(2), Unready()

    def of(loader: Loader, weight: torch.Tensor) -> dict[str, Any]:
        return {"w": weight} | ({"loader": loader} if key == "loader" else {"loaders": [0, loader]})

    saved = Checkpoint(of(Loader(3), torch.ones(2)))
    with pytest.raises(StructureMismatch) as caught:
        saved.recover(of(unready, tensor))
    assert str(caught.value) == (
        f"{key}: the state_dict() of {__name__}.Unready raised KeyError('not yet'): call it when "
        f"it works, or leave it out; nothing was "
        f"written. To recover the rest, call recover(state, keep=['{key}'])"
    )
    assert tensor.tolist() == [0.0, 0.0]
    saved.recover(of(unready, tensor), keep=[key])
    assert (tensor.tolist(), unready.loaded) == ([1.0, 1.0], {})


def test_an_object_is_given_an_array_of_records_as_it_was_saved() -> None:
    """NumPy raises TypeError if such an array is compared with a dict."""
    records, loader = np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), Loader()
    with pytest.raises(
        RecoveryFailed,
        match=r"^loader: load_state_dict\(\) of .*Loader raised ValueError\('no field of name "
        r"position'\)",
    ):
        Checkpoint({"loader": records}).recover({"loader": loader})
    assert isinstance(loader.loaded, np.ndarray)


# -- values


def test_values_come_back_into_the_callers_own_containers() -> None:
    inner, history, tensor = {"a": 1}, [1], torch.zeros(2)
    state = {
        "n": 0,
        "inner": inner,
        "history": history,
        "pair": (tensor, 0),
        "tensors": [tensor, torch.zeros(1)],
    }
    saved = {
        "n": 7, "inner": {"a": 5}, "history": [1, 2, 3], "pair": (torch.ones(2), 8),
        "tensors": [torch.ones(2), torch.full((1,), 9.0)],
    }  # fmt: skip
    Checkpoint(saved).recover(state)
    assert (state["n"], inner, history) == (7, {"a": 5}, [1, 2, 3])
    assert state["inner"] is inner
    assert state["history"] is history
    assert cast(Any, state["pair"])[0] is cast(Any, state["tensors"])[0] is tensor
    assert (
        tensor.tolist(),
        cast(Any, state["pair"])[1],
        cast(Any, state["tensors"])[1].tolist(),
    ) == ([1.0, 1.0], 8, [9.0])


@pytest.mark.parametrize(
    "place",
    [
        defaultdict(float, a=0.0, b=0.0),
        OrderedDict(b=0.0, a=0.0),
        Counter(a=1, b=1),
        {"a": 0.0, "b": 0.0},
    ],
)
def test_values_come_into_a_dict_of_another_type_which_stays(place: dict[str, Any]) -> None:
    for saved in ({"a": 2, "b": torch.ones(1)}, OrderedDict(a=2, b=torch.ones(1))):
        state = {"values": place}
        Checkpoint({"values": saved}).recover(state)
        assert state["values"] is place
        assert {key: float(value) for key, value in place.items()} == {"a": 2.0, "b": 1.0}


def test_an_empty_container_takes_what_was_saved() -> None:
    state: dict[str, Any] = {"dict": {}, "list": [], "tuple": ()}
    places = dict(state)
    Checkpoint(
        {
            "dict": {"w": torch.ones(2), "k": OrderedDict(a=1)},
            "list": [torch.ones(1), "x"],
            "tuple": (1, torch.ones(3)),
        }
    ).recover(state)
    assert (state["dict"]["w"].tolist(), type(state["dict"]["k"]), state["list"][0].tolist()) == (
        [1.0, 1.0],
        OrderedDict,
        [1.0],
    )
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
    Checkpoint({"a": torch.ones(2), "b": deque([1, torch.ones(1)], 5), "c": {"k": [1]}}).recover(
        state
    )
    assert (state["a"].tolist(), state["b"][0], state["b"].maxlen, state["c"]) == (
        [1.0, 1.0],
        1,
        5,
        {"k": [1]},
    )


def test_a_value_that_ckptd_takes_for_an_object_may_be_recovered_as_plain_values() -> None:
    state: dict[str, Any] = {"loader": {}}
    Checkpoint({"loader": Loader(3)}).recover(state)
    assert (state["loader"]["position"], state["loader"]["order"].tolist()) == (3, [3, 4, 5, 6])


EXPANDED = "w: the state's tensor is expanded, so that its elements share memory; clone() it first"
META = (
    "w: the state's tensor is on the meta device; give it memory first "
    "(module.to_empty(device=...))"
)


@each_case(
    ("saved", "state", "words"),
    [
        ({"w": torch.ones(2)}, {"w": torch.zeros(3)}, "w: the checkpoint has shape [2], the state "
            "[3]"),
        ({"w": 1}, {"w": torch.zeros(3)}, "w: the checkpoint has int, the state a tensor"),
        ({"w": torch.ones(2)}, {"w": torch.zeros(1).expand(2)}, EXPANDED),
        ({"w": torch.ones(2)}, {"w": torch.zeros(2, device="meta")}, META),
        ({"w": torch.ones(2)}, {"w": {"x": 1}}, "w: the checkpoint has a tensor, the state a dict"),
        ({"w": {"x": 1}}, {"w": [torch.zeros(1)]}, "w: the checkpoint has dict, the state a list"),
        ({"w": [torch.ones(1)]}, {"w": [torch.zeros(1), torch.zeros(1)]}, "w: the checkpoint has a "
            "list of 1, the state one of 2"),
        ({"w": (1, 2)}, {"w": (1, 2, 3)}, "w: the checkpoint has tuple, the state a tuple of 3"),
        ({"w": [1, 2]}, {"w": (1, 2)}, "w: the checkpoint has list, the state a tuple of 2"),
        ({"w": 1}, {"w": torch.nn.Linear(1, 1)}, "w: the checkpoint has int, the state a module"),
        ({"w": Loader()}, {"w": torch.zeros(1)}, "w: the checkpoint has an object, the state a "
            "tensor"),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, "key a.c is in the state and not in the "
            "checkpoint"),
        (torch.ones(1), {"a": 1}, "the state: the checkpoint has a tensor, the state a dict"),
    ],
)  # fmt: skip
def test_a_difference_is_named_and_nothing_is_written(saved: Any, state: Any, words: str) -> None:
    assert problem(saved, state) == words


def test_a_dict_in_the_place_of_an_optimizer_is_named() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert problem({"w": {"x": 1}}, {"w": optimizer}) == (
        "w: the checkpoint has dict, the state an optimizer"
    )


def test_every_difference_is_listed() -> None:
    assert problem({"w": torch.ones(2), "n": 1}, {"w": torch.zeros(3), "x": 1}) == (
        "w: the checkpoint has shape [2], the state [3]; key x is in the state and not in the "
        "checkpoint"
    )


def test_keys_without_a_place_are_left_to_the_caller() -> None:
    """Another rank may have a place for them."""
    binding = Checkpoint({"w": torch.ones(2), "n": {"a": 1, "b": 2}, "more": 1}).bind(
        {"w": torch.zeros(2), "n": {"a": 0}}
    )
    assert binding.unused == ["more", "n.b"]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_an_ordered_dict_gets_the_saved_order(kind: type[dict[str, int]]) -> None:
    place = OrderedDict(b=0, a=0)
    Checkpoint({"v": kind(a=1, b=2)}).recover({"v": place})
    assert list(place.items()) == [("a", 1), ("b", 2)]


def test_keys_may_be_missing_on_both_sides_if_it_is_not_strict() -> None:
    checkpoint = Checkpoint({"w": torch.ones(2), "n": {"a": 1}, "more": 1})
    state = {"w": torch.zeros(2), "n": {"b": 2}, "less": 3}
    assert checkpoint.bind(state, strict=False).unused == ["more", "n.a"]
    checkpoint.recover(state, strict=False)
    assert (cast(Any, state["w"]).tolist(), state["n"], state["less"]) == ([1.0, 1.0], {"b": 2}, 3)
    with pytest.raises(
        StructureMismatch, match=r"^w: the checkpoint has shape \[2\], the state \[3\]"
    ):
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
    assert (weight.tolist(), module.extra["version"], module.extra["table"].tolist()) == (
        [2.0] * 3,
        3,
        [1.0, 1.0],
    )


def weights(module: torch.nn.Module) -> dict[str, Any]:
    return {name: parameter.tolist() for name, parameter in module.named_parameters()}


def test_wrappers_of_a_module_do_not_count() -> None:
    saved, module = (
        torch.nn.Sequential(torch.nn.Linear(2, 2)),
        torch.nn.Sequential(torch.nn.Linear(2, 2)),
    )
    Checkpoint(
        {"model": {f"_orig_mod.{name}": value for name, value in saved.state_dict().items()}}
    ).recover({"model": module})
    assert weights(module) == weights(saved)
    wrapped = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    Checkpoint({"model": saved}).recover({"model": wrapped})
    assert weights(wrapped.module) == weights(saved)


def test_a_module_that_lacks_a_key_is_refused() -> None:
    assert problem(
        {"model": torch.nn.Linear(2, 2, bias=False)}, {"model": torch.nn.Linear(2, 2)}
    ) == ("key model.bias is in the state and not in the checkpoint")


def test_an_object_loads_its_own_state_dict() -> None:
    loader = Loader()
    Checkpoint({"loader": Loader(5)}).recover({"loader": loader})
    assert (loader.position, loader.order.tolist()) == (5, [5, 6, 7, 8])
    assert loader.loaded.keys() == {"position", "order"}


def test_objects_in_a_list_keep_their_places() -> None:
    loaders = [Loader(), Loader()]
    Checkpoint({"loaders": [Loader(1), Loader(2)]}).recover({"loaders": loaders})
    assert [loader.position for loader in loaders] == [1, 2]
    assert (
        problem({"loaders": [Loader(1)]}, {"loaders": loaders})
        == "loaders: the checkpoint has a list of 1, the state one of 2"
    )


# -- values of each rank


def test_a_rank_gets_its_own_value_and_the_mark_stays() -> None:
    checkpoint = Checkpoint(*({"position": per_rank(10 * rank), "shared": 1} for rank in range(3)))
    state = {"position": per_rank(0), "shared": 0}
    checkpoint.recover(state, own=2)
    assert state == {"position": PerRank(20), "shared": 1}
    state["position"].value = 30  # as a training loop does it
    again = {"position": per_rank(0), "shared": 0}
    Checkpoint(state).recover(again)
    assert again == {"position": PerRank(30), "shared": 1}
    unmarked = {"position": 0, "shared": 0}
    checkpoint.recover(unmarked, own=1)
    assert unmarked["position"] == 10


def test_a_rank_that_has_saved_none_is_refused_without_a_function_for_it() -> None:
    checkpoint = Checkpoint(*({"position": per_rank(rank)} for rank in range(2)))
    with pytest.raises(
        StructureMismatch,
        match="^position is each rank's own, was saved on 2 ranks, none of them this one: ",
    ):
        checkpoint.bind({"position": per_rank(0)}, own=None)


def test_on_reshape_makes_the_value_of_a_rank_from_all_of_them() -> None:
    asked: list[tuple[str, list[Any]]] = []

    def reshape(key: str, values: list[Any]) -> Any:
        asked.append((key, values))
        return sum(values) if key == "position" else values[1]

    checkpoint = Checkpoint(
        *({"position": per_rank(rank + 1), "loader": per_rank(Loader(rank))} for rank in range(2))
    )
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
        *(
            {
                "all": {
                    "deep": [per_rank(rank), "x"],
                    "loader": Loader(rank),
                    "o": OrderedDict(p=per_rank(rank)),
                }
            }
            for rank in range(2)
        )
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
    checkpoint = Checkpoint(
        {"stage": {"layer0": torch.ones(1)}}, {"stage": {"layer1": torch.ones(2)}}
    )
    state: dict[str, Any] = {"stage": {}}
    checkpoint.recover(state, own=1)
    assert state["stage"].keys() == {"layer1"}


# -- undoing


def test_what_the_comparison_has_made_is_undone_once() -> None:
    binding = Checkpoint({"n": 1}).bind({"n": 0})
    undone: list[int] = []
    binding._leaves.undo.append(lambda: undone.append(1))
    binding.discard()
    binding.discard()
    assert undone == [1]


# -- what is said, and refused


def remarks(saved: Any, state: Any, **options: Any) -> list[tuple[int, str]]:
    return list(Checkpoint(saved).bind(state, **options).remarks())


def test_narrowing_is_said_once_with_the_number_of_tensors() -> None:
    saved = {
        "net": torch.nn.Linear(2, 2),
        "n": torch.ones(2, dtype=torch.float64),
        "i": torch.ones(2, dtype=torch.int64),
    }
    state = {
        "net": torch.nn.Linear(2, 2).bfloat16(),
        "n": torch.zeros(2),
        "i": torch.zeros(2, dtype=torch.int64),
    }
    assert remarks(saved, state) == [
        (
            logging.WARNING,
            "1 tensors were converted from float64 to float32, which holds fewer digits",
        ),
        (
            logging.WARNING,
            "2 tensors were converted from float32 to bfloat16, which holds fewer digits",
        ),
    ]
    assert remarks(state, saved) == [], "widening loses nothing"


def scheduled(steps: int, *, chain: bool = False) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    if not chain:
        return cosine
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 3)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, cosine], milestones=[3])


def taken(scheduler: Any) -> None:
    scheduler.optimizer.step()
    scheduler.step()


def test_values_that_a_scheduler_was_made_with_are_named_and_may_be_kept() -> None:
    saved, state = {"sched": scheduled(10)}, {"sched": scheduled(20)}
    say = (
        "restored from the checkpoint: sched.T_max 10 (was 20); recover(keep=...) keeps the "
        "caller's"
    )
    assert remarks(saved, state) == [(logging.INFO, say)]
    assert remarks(saved, state, keep=["sched.T_max"]) == []
    taken(saved["sched"])
    Checkpoint(saved).recover(state, keep=["sched.T_max"])
    assert (state["sched"].T_max, state["sched"].last_epoch) == (20, 1)
    Checkpoint(saved).recover(state)
    assert state["sched"].T_max == 10


def test_values_inside_of_a_chain_of_schedulers_are_named_and_may_be_kept() -> None:
    saved, state = {"sched": scheduled(10, chain=True)}, {"sched": scheduled(20, chain=True)}
    say = (
        "restored from the checkpoint: sched._schedulers.1.T_max 10 (was 20); recover(keep=...) "
        "keeps the caller's"
    )
    assert remarks(saved, state) == [(logging.INFO, say)]
    taken(saved["sched"])
    Checkpoint(saved).recover(state, keep=["sched._schedulers.*.T_max"])
    assert (state["sched"]._schedulers[1].T_max, state["sched"].last_epoch) == (20, 1)


def test_settings_of_another_script_are_a_warning_and_progress_is_none() -> None:
    def training(rate: float, steps: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optim": optimizer, "sched": cosine, "data": Loader(position=steps)}

    def told(saved: Any, state: Any) -> list[tuple[int, str]]:
        return list(Checkpoint(saved).bind(state).remarks(same_script=False))

    saved = training(0.5, 10)
    taken(saved["sched"])
    assert told(saved, training(0.25, 20)) == [
        (
            logging.WARNING,
            "settings of the script are replaced by those of the checkpoint: "
            "optim.param_groups.0.initial_lr 0.5 (was 0.25), sched.T_max 10 (was 20), "
            "sched.base_lrs [0.5] (was [0.25]); to keep one as the script has set it, pass its key "
            "in keep=[...] to recover() or training()",
        ),
        (
            logging.INFO,
            f"restored from the checkpoint: optim.param_groups.0.lr "
            f"{saved['optim'].param_groups[0]['lr']!r} (was 0.25), data.position 10 (was 20); "
            f"recover(keep=...) keeps the caller's",
        ),
    ]
    kept = training(0.25, 10)
    Checkpoint(saved).recover(kept, keep=["optim.param_groups.0.initial_lr", "sched.base_lrs"])
    assert (kept["optim"].param_groups[0]["initial_lr"], kept["sched"].base_lrs) == (0.25, [0.25])
    assert [level for level, _ in told(saved, training(0.5, 10))] == [logging.INFO]


def scaler(*, enabled: bool) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", enabled=enabled, init_scale=8.0)


def test_a_scaler_that_was_disabled_and_is_enabled_now_is_refused_before_the_model_is_written() -> (
    None
):
    saved: dict[str, Any] = {"net": torch.nn.Linear(2, 2), "scaler": scaler(enabled=False)}
    state: dict[str, Any] = {"net": torch.nn.Linear(2, 2), "scaler": scaler(enabled=True)}
    words = (
        "scaler: the checkpoint has a scaler that was disabled, and has no state; the scaler of "
        "the state is enabled"
    )
    refuses(Checkpoint(saved), state, words, {"keep": ["scaler"]})
    assert state["scaler"].state_dict()["scale"] == 8.0
    assert text(state["net"]) == text(saved["net"])


@pytest.mark.parametrize("was", [False, True])
def test_a_scaler_that_is_disabled_now_takes_any_state(was: bool) -> None:
    Checkpoint({"scaler": scaler(enabled=was)}).recover({"scaler": scaler(enabled=False)})


def test_the_call_of_a_refusal_repeats_the_options_that_it_was_given() -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(3), "c": 0, "d": 1}
    checkpoint = Checkpoint({"a": torch.ones(2), "b": torch.ones(2), "c": 5})
    words = "b: the checkpoint has shape [2], the state [3]"
    refuses(
        checkpoint, state, words, {"strict": False, "keep": ["a", "b"]}, strict=False, keep=["a"]
    )
    assert (state["a"].tolist(), state["c"], state["d"]) == ([0.0] * 3, 5, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("saved", "place"),
    [
        ({"x": 1}, torch.zeros(3)),
        (1, torch.nn.Linear(1, 1)),
        (torch.ones(2), {"x": 1}),
        ([torch.ones(1)], [torch.zeros(1), torch.zeros(1)]),
    ],
)
def test_a_value_of_another_kind_may_be_kept(saved: Any, place: Any) -> None:
    state = {"w": place, "epoch": 0}
    words, call = refusal(Checkpoint({"w": saved, "epoch": 3}), state)
    assert words.startswith("w: the checkpoint has ")
    assert call == {"keep": ["w"]}
    Checkpoint({"w": saved, "epoch": 3}).recover(state, **call)
    assert state["epoch"] == 3


def test_a_scheduler_of_another_number_of_groups_may_be_kept() -> None:
    def program(groups: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD(
            [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=0.1
        )
        return {"sched": torch.optim.lr_scheduler.StepLR(optimizer, 5), "epoch": groups}

    state = program(2)
    words = "sched: the scheduler was saved for 1 parameter groups, and its optimizer has 2"
    refuses(Checkpoint(program(1)), state, words, {"keep": ["sched"]})
    assert (state["sched"].base_lrs, state["epoch"]) == ([0.1, 0.1], 1)


# -- values that `on_reshape` has returned


def test_values_are_changed_in_place_where_possible() -> None:
    tensor, cursor, inner, items = torch.zeros(3), Cursor(0), Cursor(0), [Cursor(0), 5]
    place = {
        "tensor": tensor,
        "cursor": cursor,
        "deep": {"inner": inner},
        "items": items,
        "gone": 1,
        "n": 1,
    }
    made = {
        "tensor": torch.ones(3),
        "cursor": {"position": 1},
        "deep": {"inner": {"position": 2}, "new": 3},
        "n": 2,
    }
    made["items"] = [{"position": 3}, 6]
    assert put_into(per_rank(place), made) is place
    assert place == {
        "tensor": tensor,
        "cursor": cursor,
        "deep": {"inner": inner, "new": 3},
        "items": items,
        "n": 2,
    }
    assert torch.equal(tensor, torch.ones(3))
    assert [cursor.position, inner.position, items[0].position, items[1]] == [1, 2, 3, 6]  # type: ignore[attr-defined]


def test_values_that_cannot_be_changed_in_place_are_replaced() -> None:
    larger = torch.ones(4)
    assert put_into(torch.zeros(3), larger) is larger
    assert put_into({"a": 1}, [1]) == [1]
    assert put_into([1], [1, 2]) == [1, 2]
    assert put_into(1, "x") == "x"
    assert put_into(None, {"a": 1}) == {"a": 1}


class Casts(torch.nn.Module):
    """A module with a loader of its own, whose weight has any dtype."""

    def __init__(self, dtype: torch.dtype, loads: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.ones(2))
        if loads:
            self.register_load_state_dict_pre_hook(lambda *_: None)


class Overrides(Casts):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return super().load_state_dict(*args, **options)


def _tied() -> dict[str, torch.Tensor]:
    memory = torch.zeros(4)
    return {"a": memory[:3], "b": memory[1:], "c": memory[2:]}


REFUSED: dict[str, tuple[Any, Any]] = {
    "shape": (torch.ones(2), torch.zeros(3)),
    "on the meta device": (torch.ones(2), torch.zeros(2, device="meta")),
    "expanded": (torch.ones(2), torch.zeros(1).expand(2)),
    "complex": (torch.ones(2, dtype=torch.complex64), torch.zeros(2)),
    "module on the meta device": (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to("meta")),
    "part with a loader": (
        torch.nn.Sequential(Casts(torch.complex64, True), torch.nn.Linear(1, 1)),
        torch.nn.Sequential(Casts(torch.float32, True), torch.nn.Linear(1, 1)),
    ),
    "part with a loader on the meta device": (
        torch.nn.Sequential(Casts(torch.float32, True)),
        torch.nn.Sequential(Casts(torch.float32, True)).to("meta"),
    ),
    "method of its own": (Overrides(torch.complex64, False), Overrides(torch.float32, False)),
    "module of other names": (torch.nn.ParameterList([torch.ones(1)]), torch.nn.Linear(1, 1)),
    "three in one memory": (
        {"a": torch.zeros(3), "b": torch.full((3,), 1.0), "c": torch.full((2,), 2.0)},
        _tied(),
    ),
    "many": ([torch.ones(2)] * 20, [torch.zeros(3 if n < 12 else 2) for n in range(20)]),
    "missing": ({"a": 1}, {"a": 1, "b": 2}),
    "star": ({"*": torch.ones(2), "x": 1}, {"*": torch.ones(3), "x": 0}),
}


@each_case("one", REFUSED)
def test_the_call_of_a_refusal_leaves_out_nothing_that_the_same_refusal_names(one: str) -> None:
    """The call is run as it stands, beside a tensor without memory."""
    saved, place = REFUSED[one]
    checkpoint = Checkpoint({"one": saved, "empty": torch.ones(1), "rest": torch.ones(2)})
    for state in (
        {"one": place, "empty": torch.zeros(1), "rest": torch.zeros(2)},
        {"one": place, "empty": torch.zeros(1, device="meta"), "rest": torch.zeros(2)},
    ):
        if one == "three in one memory" and state["empty"].is_meta:
            continue  # the values are compared once all tensors have memory
        with pytest.raises(StructureMismatch) as caught:
            checkpoint.recover(state)
        checkpoint.recover(state, **exit_of(caught.value))
        assert state["rest"].tolist() == [1.0, 1.0]
    if one == "many":
        assert [tensor.sum().item() for tensor in place[12:]] == [2.0] * 8


def test_a_remark_names_the_first_keys_and_counts_the_others() -> None:
    state = {f"part{letter}": 1 for letter in "abcdefghijkl"} | {"rest": 1}
    ((_, said),) = remarks({"rest": 2}, state, strict=False)
    assert said.endswith(": parta, partb, partc, partd, parte, partf, partg, parth and 4 more")
