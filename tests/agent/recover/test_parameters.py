"""Tests what a recovery knows of the parameters that a saved optimizer held: their
shapes and dtypes, and which of them stay.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from ckptd.agent.read.saved import Saved
from ckptd.agent.recover.options import Options
from ckptd.agent.recover.parameters import Form, SavedParameters, kept_parameters
from ckptd.agent.state.naming import Names
from tests.oracle.prints import text
from tests.oracle.tensors import Doubled
from tests.support.refusals import refusal, refuses
from tests.support.saved_states import Checkpoint

F32, BF16 = torch.float32, torch.bfloat16


def trained(
    rows: int, fill: float = 1.0, dtype: torch.dtype = F32, steps: int = 1
) -> dict[str, Any]:
    """Return a model with an embedding of so many rows, and its optimizer after some
    steps.
    """
    model = nn.ModuleDict({"emb": nn.Embedding(rows, 2), "head": nn.Linear(2, 2, bias=False)}).to(
        dtype
    )
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}
    for _ in range(steps):
        step(state)
    return state


def step(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    state["optim"].step()


def parameters_of(checkpoint: Checkpoint) -> SavedParameters:
    return SavedParameters(checkpoint.trees[0], cast(Saved, checkpoint), checkpoint.forms)


def test_the_forms_are_those_of_the_saved_modules() -> None:
    found = parameters_of(Checkpoint(trained(3)))
    assert found.forms("optim", "emb.weight") == [Form((3, 2), F32)]
    assert found.forms("optim", "model.emb.weight") == [Form((3, 2), F32)], (
        "a name that an earlier version has"
    )
    assert found.forms("optim", "other") == []


def test_a_name_may_stand_for_each_tensor_that_has_it_in_a_module() -> None:
    found = parameters_of(
        Checkpoint(
            {
                "one": nn.Linear(2, 3, bias=False),
                "two": nn.Linear(4, 5),
                "bare": nn.Parameter(torch.ones(7)),
            }
        )
    )
    assert [list(found.tensors(name)) for name in ("weight", "bias", "one.weight", "bare",
    "other")] == [
        ["one.weight", "two.weight"], ["two.bias"], ["one.weight"], ["bare"], [],
    ]  # fmt: skip


def test_a_name_of_several_modules_may_stand_for_any_of_them() -> None:
    both = {
        "one": nn.Linear(2, 3, bias=False),
        "two": nn.Linear(4, 5, bias=False),
        "bare": nn.Parameter(torch.ones(7)),
    }
    found = parameters_of(Checkpoint(both))
    assert found.forms("optim", "weight") == [Form((3, 2), F32), Form((5, 4), F32)]
    assert found.forms("optim", "bare") == [Form((7,), F32)]


def test_parameters_that_are_not_in_the_state_are_recorded() -> None:
    """Only for an optimizer that has such parameters, because the others are in the
    checkpoint anyway.
    """
    whole, alone = trained(3), trained(4, dtype=BF16)
    checkpoint = Checkpoint({**whole, "alone": alone["optim"]})
    assert checkpoint.forms == [{"alone": [[0, "bfloat16", [4, 2]], [1, "bfloat16", [2, 2]]]}]
    found = parameters_of(checkpoint)
    assert (found.forms("alone", 0), found.forms("optim", "emb.weight")) == (
        [Form((4, 2), BF16)],
        [Form((3, 2), F32)],
    )
    assert Checkpoint(whole).forms == []


def test_kept_parameters_are_found_by_their_keys() -> None:
    from ckptd.agent.recover.leaves import Leaves

    state = trained(3)
    emb, head = state["model"].parameters()

    def kept(*patterns: str) -> frozenset[int]:
        leaves = Leaves(cast(Saved, None), Options(keep=patterns), {}, cast(Any, None))
        return kept_parameters(Names(state), leaves.is_kept)

    assert kept() == kept("optim.param_groups.*.lr") == frozenset()
    assert kept("model.emb.weight") == kept("*emb*") == {id(emb)}
    assert kept("model") == kept("model.*") == {id(emb), id(head)}


# -- shapes


def entry(state: dict[str, Any], name: str) -> str:
    return text(state["optim"].state.get(state["model"].get_parameter(name), "none"))


@pytest.mark.parametrize("steps", [0, 2], ids=["before its first step", "after it"])
def test_a_grown_vocabulary_is_refused_and_keep_keeps_the_parameter_and_its_moments(
    steps: int,
) -> None:
    saved, state = trained(3), trained(4, 0.0, steps=steps)
    before = text(state["model"].emb), entry(state, "emb.weight")
    words = "model.emb.weight: the checkpoint has shape [3, 2], the state [4, 2]"
    refuses(Checkpoint(saved), state, words, {"keep": ["model.emb.weight"]})
    assert (text(state["model"].emb), entry(state, "emb.weight")) == before
    assert text(state["model"].head) == text(saved["model"].head)
    assert entry(state, "head.weight") == entry(saved, "head.weight")
    step(state)


@pytest.mark.parametrize("steps", [0, 2], ids=["before its first step", "after it"])
@pytest.mark.parametrize("whole", [False, True], ids=["optimizer alone", "model was not saved"])
def test_moments_of_another_shape_are_refused_if_only_the_optimizer_is_recovered(
    steps: int, whole: bool
) -> None:
    saved, state = trained(3), trained(4, 0.0, steps=steps)
    place = state if whole else {"optim": state["optim"]}
    name = "emb.weight" if whole else "0"
    before = entry(state, "emb.weight")
    options = {"strict": False} if whole else {}
    words = (
        f"optim.state.{name}: the parameter had shape [3, 2] when it was saved, and has [4, 2] now"
    )
    refuses(
        Checkpoint({"optim": saved["optim"]}),
        place,
        words,
        {**options, "keep": [f"optim.state.{name}"]},
        **options,
    )
    assert entry(state, "emb.weight") == before
    assert entry(state, "head.weight") == entry(saved, "head.weight")
    step(state)


def test_state_of_another_shape_than_its_parameter_is_no_difference() -> None:
    """The shape of the parameter is compared, never that of its state, which may be
    factored or packed.
    """

    def factored(fill: float) -> dict[str, Any]:
        model = nn.Linear(4, 8, bias=False)
        nn.init.constant_(model.weight, fill)
        optimizer = torch.optim.Adafactor(model.parameters())
        model.weight.grad = torch.full_like(model.weight, fill)
        optimizer.step()
        return {"model": model, "optim": optimizer}

    saved, state = factored(2.0), factored(1.0)
    assert {
        tuple(value.shape) for value in saved["optim"].state[saved["model"].weight].values()
    } == {(), (1, 4), (8, 1)}
    Checkpoint(saved).recover(state)
    assert text(state) == text(saved)


# -- dtypes


def test_moments_follow_the_dtype_of_their_parameter_if_that_has_changed() -> None:
    state = trained(3, 0.0, BF16, steps=0)
    Checkpoint(trained(3)).recover(state)
    assert {name: value.dtype for name,
        value in state["optim"].state[state["model"].emb.weight].items()} == {
        "step": F32, "exp_avg": BF16, "exp_avg_sq": BF16,
    }  # fmt: skip
    step(state)
    back = trained(3, 0.0)
    Checkpoint(state).recover(back)
    assert {value.dtype for value in back["optim"].state[back["model"].emb.weight].values()} == {
        F32
    }


def test_moments_of_a_higher_precision_than_their_parameter_keep_it() -> None:
    saved = trained(3, dtype=BF16)
    for values in saved["optim"].state.values():
        values["exp_avg"] = values["exp_avg"].float() / 3
    for state in (trained(3, 0.0, BF16), trained(3, 0.0, BF16, steps=0)):
        Checkpoint(saved).recover(state)
        assert text(state) == text(saved)


def test_recorded_dtypes_are_followed_too() -> None:
    state = trained(3, 0.0, BF16, steps=0)
    Checkpoint({"optim": trained(3)["optim"]}).recover({"optim": state["optim"]})
    assert {
        value.dtype
        for name, value in state["optim"].state[state["model"].emb.weight].items()
        if name != "step"
    } == {BF16}


@pytest.mark.parametrize("has_state", [False, True])
def test_moments_that_consist_of_several_tensors_follow_the_dtype_too(has_state: bool) -> None:
    def made(value: float, dtype: torch.dtype, has_state: bool) -> dict[str, Any]:
        parameter = torch.nn.Parameter(
            Doubled(torch.full((2,), value, dtype=dtype), torch.zeros(2, dtype=dtype))
        )
        optim = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        if has_state:
            high, low = (
                torch.full((2,), value, dtype=torch.float64),
                torch.zeros(2, dtype=torch.float64),
            )
            optim.state[parameter]["momentum_buffer"] = Doubled(high, low)
        return {"model": torch.nn.ParameterDict({"a": parameter}), "optim": optim}

    state = made(0.0, BF16, has_state)
    Checkpoint(made(3.0, F32, True)).recover(state)
    moment = state["optim"].state[state["model"]["a"]]["momentum_buffer"]
    assert (moment.high.dtype, moment.low.dtype, moment.high.tolist()) == (BF16, BF16, [3.0, 3.0])


def test_moments_in_several_tensors_keep_their_dtype_where_the_optimizer_has_made_others() -> None:
    def made(dtype: torch.dtype) -> dict[str, Any]:
        parameter = torch.nn.Parameter(torch.ones(2))
        optim = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        optim.state[parameter]["momentum_buffer"] = Doubled(
            torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype)
        )
        return {"model": torch.nn.ParameterDict({"a": parameter}), "optim": optim}

    state = made(F32)
    Checkpoint(made(torch.float64)).recover(state)
    assert state["optim"].state[state["model"]["a"]]["momentum_buffer"].high.dtype == torch.float64


@pytest.mark.parametrize("has_state", [False, True])
def test_complex_moments_of_a_parameter_that_is_real_now_are_refused(has_state: bool) -> None:
    def made(dtype: torch.dtype, has_state: bool) -> dict[str, Any]:
        parameter = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        optim = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        if has_state:
            optim.state[parameter]["momentum_buffer"] = torch.ones(2, dtype=dtype)
        return {"optim": optim}

    words, _ = refusal(Checkpoint(made(torch.complex64, True)), made(BF16, has_state))
    assert words.startswith("optim.state.0.momentum_buffer: "), words
    assert "complex64" in words


def test_an_optimizer_without_its_modules_says_that_the_names_are_theirs() -> None:
    saved, state = trained(3), trained(3, 0.0)
    words, call = refusal(Checkpoint(saved), {"optim": state["optim"]}, strict=False)
    assert words == (
        "optim: no parameter of the optimizer is in the checkpoint, which has emb.weight, "
        "head.weight, while the optimizer has 0, 1: the "
        "names come from the modules, so put the modules into the state, too"
    )
    assert call == {"strict": False, "keep": ["optim"]}
    Checkpoint(saved).recover(state)
    assert text(state) == text(saved)
