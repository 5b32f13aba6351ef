"""An optimizer is compared with a saved one and filled from it: by the names of its parameters, and only if both are of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptd.shared.errors import StructureMismatch
from tests.support.saved_states import Checkpoint

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
        "optimizer 1); nothing was written. To recover the rest, call recover(state, keep=['optim'])"
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
    with pytest.raises(
        StructureMismatch, match=r"^2 keys \(model\.c, optim\.param_groups\.c\) are in the state and not in the checkpoint;"
    ):
        Checkpoint({"model": model, "optim": optimizer}).bind({"model": other, "optim": into})


def test_entries_of_no_parameter_keep_their_key_as_in_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    into = torch.optim.SGD([parameter], lr=1.0)
    saved = {"state": {0: "not a dict", 7: {"of": "nobody"}}, "param_groups": [{"params": [0], "lr": 0.5}]}
    Checkpoint({"optim": saved}).recover({"optim": into})
    assert (dict(into.state), into.param_groups[0]["lr"]) == ({parameter: {}, 7: {"of": "nobody"}}, 0.5)


# -- optimizers of another kind


def of_kind(make: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    """Return a model and an optimizer that has taken a step."""
    model = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(3))})
    optimizer = make(model.parameters(), lr=0.1, **options)
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optim": optimizer}


@pytest.mark.parametrize(
    ("saved", "place", "words"),
    [
        (of_kind(torch.optim.AdamW), of_kind(torch.optim.SGD), "optim: the checkpoint has the optimizer AdamW"),
        (of_kind(torch.optim.AdamW, amsgrad=True), of_kind(torch.optim.AdamW), "optim.param_groups.0.amsgrad: the checkpoint has True"),
        (of_kind(torch.optim.SGD), of_kind(torch.optim.SGD, momentum=0.9), "optim.param_groups.0.momentum: the checkpoint has 0"),
    ],
)  # fmt: skip
def test_an_optimizer_of_another_kind_is_refused_unless_strict_is_off(saved: dict[str, Any], place: dict[str, Any], words: str) -> None:
    with pytest.raises(StructureMismatch, match=f"^{words}"):
        Checkpoint(saved).bind(place)
    Checkpoint(saved).bind(place, strict=False)


def test_one_group_cannot_become_two() -> None:
    model, optimizer = trained()
    other, into = trained(groups=True)
    with pytest.raises(StructureMismatch, match=r"^optim\.param_groups: the checkpoint has the parameters of its group 0 together"):
        Checkpoint({"model": model, "optim": optimizer}).bind({"model": other, "optim": into})
    Checkpoint({"model": model, "optim": optimizer}).recover({"model": other, "optim": into}, strict=False)


def test_a_scheduler_of_another_class_is_refused() -> None:
    optimizer = of_kind(torch.optim.SGD)["optim"]
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    step = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    with pytest.raises(StructureMismatch, match="^sched: the checkpoint has the scheduler CosineAnnealingLR"):
        Checkpoint({"sched": cosine}).bind({"sched": step})
    assert step.state_dict()["step_size"] == 5


def test_restored_settings_are_named_and_kept_ones_stay() -> None:
    saved, place = of_kind(torch.optim.SGD, weight_decay=0.5), of_kind(torch.optim.SGD)
    place["optim"].param_groups[0]["lr"] = 7.0
    assert Checkpoint(saved).bind(place)._leaves.changed == [
        "optim.param_groups.0.lr 0.1 (was 7.0)",
        "optim.param_groups.0.weight_decay 0.5 (was 0)",
    ]
    binding = Checkpoint(saved).bind(place, keep=["optim.*.lr", "nothing"])
    assert binding._leaves.changed == ["optim.param_groups.0.weight_decay 0.5 (was 0)"]
    assert binding.kept == {"optim.*.lr"}
    Checkpoint(saved).recover(place, keep=["optim.*.lr"])
    assert (place["optim"].param_groups[0]["lr"], place["optim"].param_groups[0]["weight_decay"]) == (7.0, 0.5)


def test_any_key_may_be_kept_even_one_that_the_checkpoint_lacks() -> None:
    state = {"w": torch.zeros(2), "epoch": 1, "new": 5}
    Checkpoint({"w": torch.ones(2), "epoch": 9}).recover(state, keep=["w", "new"])
    assert (state["w"].tolist(), state["epoch"], state["new"]) == ([0.0, 0.0], 9, 5)  # type: ignore[attr-defined]


def test_an_optimizer_of_which_no_parameter_is_in_the_checkpoint_is_refused() -> None:
    model, optimizer = trained()
    other, into = trained(lr=0.5)
    before = moments(other, into)
    renamed = torch.nn.ModuleDict({"block": other})
    with pytest.raises(StructureMismatch, match=r"^optim: no parameter of the optimizer is in the checkpoint, .*keep=\['optim'\]"):
        Checkpoint({"model": model, "optim": optimizer}).bind({"other": renamed, "optim": into}, strict=False)
    assert moments(other, into) == before != {}
    assert into.param_groups[0]["lr"] == 0.5
