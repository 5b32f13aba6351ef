"""An optimizer is compared with a saved one and filled from it: by the names of its
parameters, and only if both are of one kind.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptd.agent import Agent
from ckptd.shared.errors import StructureMismatch
from tests.oracle.optimizers import EightBitMomentum
from tests.oracle.prints import text
from tests.oracle.tensors import Doubled
from tests.support.cases import each_case
from tests.support.daemons import Daemon
from tests.support.ranks import Ranks
from tests.support.refusals import refuses
from tests.support.saved_states import Checkpoint

Trained = tuple[torch.nn.ParameterDict, torch.optim.Adam]


def trained(
    names: tuple[str, ...] = ("a", "b"), *, lr: float = 0.1, groups: bool = False
) -> Trained:
    """A model, and its optimizer after one step, each parameter in a group of its own
    if `groups`.
    """
    model = torch.nn.ParameterDict(
        {
            name: torch.nn.Parameter(torch.ones(2) * (number + 1))
            for number, name in enumerate(names)
        }
    )
    parameters = list(model.values())
    optimizer = torch.optim.Adam(
        [{"params": [p], "lr": lr * (n + 1)} for n, p in enumerate(parameters)]
        if groups
        else parameters,
        lr=lr,
    )
    sum(p.square().sum() for p in parameters).backward()
    optimizer.step()
    return model, optimizer


def fresh(names: tuple[str, ...] = ("a", "b"), **options: Any) -> Trained:
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(2)) for name in names})
    return model, torch.optim.Adam(list(model.values()), **{"lr": 9.0, **options})


def moments(model: torch.nn.ParameterDict, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: {key: value.tolist() for key, value in optimizer.state[p].items()}
        for name, p in model.items()
        if p in optimizer.state
    }


@pytest.mark.parametrize("stepped", [False, True], ids=["before its first step", "after it"])
def test_an_optimizer_gets_its_state_by_the_names_of_its_parameters(stepped: bool) -> None:
    model, optimizer = trained()
    other, into = trained(("b", "a"), lr=9.0) if stepped else fresh(("b", "a"))
    kept = {p: dict(state) for p, state in into.state.items()}
    Checkpoint({"model": model, "optim": optimizer}).recover({"model": other, "optim": into})
    assert moments(other, into) == moments(model, optimizer)
    assert into.param_groups[0]["lr"] == 0.1
    assert len(kept) == (2 if stepped else 0)
    assert all(into.state[p]["exp_avg"] is state["exp_avg"] for p, state in kept.items())


def test_a_parameter_keeps_the_settings_that_it_was_saved_with_in_whatever_group_it_is_now() -> (
    None
):
    model, optimizer = trained(groups=True)
    other, into = trained(groups=True)
    into.param_groups.reverse()
    Checkpoint({"model": model, "optim": optimizer}).recover({"model": other, "optim": into})
    assert [group["lr"] for group in into.param_groups] == [0.2, 0.1]


def test_state_that_an_optimizer_of_torch_cannot_take_is_refused_before_anything_is_written() -> (
    None
):
    """With `strict=False` the class is not compared, and Adam's `__setstate__` looks
    for a step in the state of each parameter.
    """

    def of(fill: float, make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, Any]:
        model = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.full((2,), fill)) for name in "ab"}
        )
        for parameter in model.values():
            parameter.grad = torch.ones(2)
        return {"model": model, "optim": make(model.values())}

    saving = of(1.0, lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9))
    saving["optim"].step()
    state = of(7.0, lambda parameters: torch.optim.Adam(parameters, lr=0.25))
    words = (
        "optim: torch.optim.adam.Adam cannot take the state that the checkpoint has: "
        "KeyError('step')"
    )
    refuses(Checkpoint(saving), state, words, {"strict": False, "keep": ["optim"]}, strict=False)
    assert state["model"]["a"].tolist() == [0.5, 0.5]
    assert (dict(state["optim"].state), state["optim"].param_groups[0]["lr"]) == ({}, 0.25)


class Unready(torch.optim.SGD):
    """An optimizer with a `state_dict` of its own, which raises."""

    def state_dict(self) -> Any:
        raise KeyError("not yet")


def test_an_optimizer_whose_state_dict_raises_is_refused_before_anything_is_written() -> None:
    def of(kind: type[torch.optim.SGD], fill: float) -> dict[str, Any]:
        model = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.full((2,), fill))})
        return {"model": model, "optim": kind(model.values(), lr=fill)}

    saved, state = Checkpoint(of(torch.optim.SGD, 1.0)), of(Unready, 0.5)
    weight = state["model"]["a"]
    with pytest.raises(StructureMismatch) as caught:
        saved.recover(state, strict=False)
    assert str(caught.value) == (
        f"optim: the state_dict() of {__name__}.Unready raised KeyError('not yet'): call it when "
        f"it works, or leave it out; nothing was "
        "written. To recover the rest, call recover(state, strict=False, keep=['optim'])"
    )
    assert (weight.tolist(), state["optim"].param_groups[0]["lr"]) == ([0.5, 0.5], 0.5)
    saved.recover(state, strict=False, keep=["optim"])
    assert weight.tolist() == [1.0, 1.0]


def quantized_into_shards(kind: str) -> tuple[str, list[float], list[str]]:
    """Runs on a rank.

    Return the refusal, the local weight after it, and the keys of the moments that the
    remedy leaves alone.
    """
    logging.getLogger("ckptd").setLevel(logging.ERROR)

    state: dict[str, Any]

    def of(parameter: torch.nn.Parameter) -> dict[str, Any]:
        return {
            "model": torch.nn.ParameterDict({"a": parameter}),
            "optim": EightBitMomentum([parameter], lr=0.1),
        }

    saving = of(torch.nn.Parameter(torch.ones(4)))
    saving["model"]["a"].grad = torch.ones(4)
    saving["optim"].step()
    saved, mesh = Checkpoint(saving), init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp1":
        whole = FullyShardedDataParallel(
            torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(4))}),
            device_id=torch.device("cpu"),
        )
        state = {"model": whole, "optim": EightBitMomentum(whole.parameters(), lr=0.1)}
    else:
        state = of(torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])))
    with pytest.raises(StructureMismatch) as caught:
        saved.recover(state)
    local = next(iter(state["model"].parameters())).detach()
    local = local._local_tensor if isinstance(local, DTensor) else local
    return str(caught.value), local.tolist(), list(map(str, state["optim"].state))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "dtensor",
            "optim.state.a.momentum: the checkpoint has a tensor of class "
            "tests.oracle.tensors.EightBit, which consists of several "
            "tensors, and the parameter is a DTensor: it cannot be divided as the parameter is; "
            "nothing was written. To recover the "
            "rest, call recover(state, keep=['optim.state.a'])",
        ),
        (
            "fsdp1",
            "optim: the state_dict() of tests.oracle.optimizers.EightBitMomentum raised "
            "NotImplementedError(",
        ),
    ],
)  # fmt: skip
def test_a_quantized_moment_is_refused_where_its_parameter_is_divided_now(
    kind: str, sentence: str
) -> None:
    """Otherwise each rank would have a whole moment for its shard of the parameter,
    and the next step would raise.
    """
    with Ranks(1) as ranks:
        (found,) = ranks.call(quantized_into_shards, kind)
    assert found[0].startswith(sentence)
    assert found[1:] == ([0.0] * 4, [])


def flat_without_state(
    saved_groups: list[dict[str, Any]], groups: list[dict[str, Any]], strict: bool
) -> tuple[str, list[Any]]:
    """Runs on a rank.

    Recover SGD that has not stepped into one over an FSDP1 module. Return the refusal
    and the settings then.

    The parameters are in the first group.
    """
    logging.getLogger("ckptd").setLevel(logging.ERROR)

    def of(settings: list[dict[str, Any]]) -> dict[str, Any]:
        torch.manual_seed(0)
        module = FullyShardedDataParallel(
            torch.nn.Linear(2, 2), use_orig_params=True, device_id=torch.device("cpu")
        )
        first, *others = settings
        made = [
            {"params": list(module.parameters()), **first},
            *({"params": [], **one} for one in others),
        ]
        return {"model": module, "optim": torch.optim.SGD(made, lr=0.1)}

    state = of(groups)
    saved = Checkpoint(of(saved_groups))
    try:
        saved.bind(state, strict=strict).finish(lambda name: saved.tensors[name])
        said = ""
    except StructureMismatch as error:
        said = str(error).partition("; nothing was written")[0]
    return said, [(group["lr"], group["momentum"]) for group in state["optim"].param_groups]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("saved", "own", "strict", "said", "settings"),
    [
        ([{"lr": 0.5}], [{}], True, "", [(0.5, 0)]),
        (
            [{"momentum": 0.9}],
            [{}],
            True,
            "optim.param_groups.0.momentum: the checkpoint has 0.9, the state 0; the two keep "
            "different state",
            [(0.1, 0)],
        ),
        ([{"momentum": 0.9}], [{}], False, "", [(0.1, 0.9)]),
        (
            [{}, {"lr": 0.5}],
            [{}],
            False,
            "optim.param_groups: the checkpoint has 2 groups, the optimizer 1, and no state that "
            "says which parameters are in which",
            [(0.1, 0)],
        ),
    ],
)  # fmt: skip
def test_settings_of_an_optimizer_over_flat_parameters_are_compared_before_its_first_step(
    saved: list[dict[str, Any]],
    own: list[dict[str, Any]],
    strict: bool,
    said: str,
    settings: list[Any],
) -> None:
    with Ranks(1) as ranks:
        assert ranks.call(flat_without_state, saved, own, strict) == [(said, settings)]


def test_parameters_of_different_settings_cannot_come_into_one_group() -> None:
    model, optimizer = trained(groups=True)
    other, into = fresh()
    with pytest.raises(StructureMismatch) as caught:
        Checkpoint({"model": model, "optim": optimizer}).bind({"model": other, "optim": into})
    assert str(caught.value) == (
        "optim.param_groups.0: the checkpoint has the parameters of this group in groups with "
        "different settings (it has 2 groups, the "
        "optimizer 1); nothing was written. To recover the rest, call recover(state, "
        "keep=['optim'])"
    )


@pytest.mark.parametrize(
    ("rates", "merged"),
    [
        ((torch.tensor(0.5), torch.tensor(0.5)), True),
        ((torch.tensor(0.5), torch.tensor(0.25)), False),
        ((torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)), False),
        ((torch.tensor(0.5), torch.tensor([0.5])), False),
    ],
)
def test_groups_whose_settings_are_equal_tensors_may_be_merged(
    rates: tuple[torch.Tensor, ...], merged: bool
) -> None:
    model, optimizer = trained(groups=True)
    other, into = fresh(lr=torch.tensor(9.0), foreach=False)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    saved, state = Checkpoint({"model": model, "optim": optimizer}), {"model": other, "optim": into}
    if merged:
        saved.recover(state)
        assert into.param_groups[0]["lr"].item() == 0.5
        assert moments(other, into) == moments(model, optimizer)
    else:
        words = (
            "optim.param_groups.0: the checkpoint has the parameters of this group in groups with "
            "different settings (it has 2 groups, the optimizer 1)"
        )
        refuses(saved, state, words, {"keep": ["optim"]})


@pytest.mark.parametrize("second", [0.0, 1.0], ids=["equal", "different"])
def test_settings_may_be_arrays(second: float) -> None:
    """NumPy compares arrays element by element, so that `==` gives no answer."""

    def of(groups: int, fill: float) -> dict[str, Any]:
        model = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.full((2,), fill)) for name in "ab"}
        )
        parts = [[one] for one in model.values()] if groups == 2 else [list(model.values())]
        made = [
            {"params": part, "scales": np.arange(3.0) + second * number, "none": np.zeros(0)}
            for number, part in enumerate(parts)
        ]
        return {"model": model, "optim": torch.optim.SGD(made, lr=fill)}

    saved, state = Checkpoint(of(2, 0.5)), of(2, 0.25)
    state["optim"].param_groups[0]["scales"] = np.zeros(2)
    saved.recover(state)
    assert [group["scales"].tolist() for group in state["optim"].param_groups] == [
        [0, 1, 2],
        [second, 1 + second, 2 + second],
    ]
    one = of(1, 0.25)
    if second:
        with pytest.raises(
            StructureMismatch,
            match=r"^optim\.param_groups\.0: .* in groups with different settings",
        ):
            saved.recover(one)
    else:
        saved.recover(one)
        assert one["optim"].param_groups[0]["lr"] == 0.5


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
    Checkpoint(dict(zip(("model", "optim"), fresh(), strict=True))).recover(
        {"model": other, "optim": into}
    )
    assert (len(into.state), into.param_groups[0]["lr"]) == (0, 9.0)


def test_state_of_another_dtype_replaces_the_optimizers_own() -> None:
    """In the dtype in which it was saved, on the device of its parameter; a step
    counter stays on the CPU.
    """
    model, optimizer = trained()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double()
    other, into = trained()
    Checkpoint({"model": model, "optim": optimizer}).recover({"model": other, "optim": into})
    assert {state["exp_avg"].dtype for state in into.state.values()} == {torch.float64}
    binding = Checkpoint({"model": model, "optim": optimizer}).bind(
        dict(zip(("model", "optim"), fresh(), strict=True))
    )
    assert set(binding.fresh.values()) == {torch.device("cpu")}


def test_a_setting_that_is_a_tensor_is_filled_in_place_if_the_optimizer_has_one() -> None:
    rate = torch.tensor(0.5)
    model, optimizer = fresh(lr=torch.tensor(0.25), capturable=False)
    other, into = fresh(lr=rate)
    Checkpoint({"model": model, "optim": optimizer}).recover({"model": other, "optim": into})
    assert into.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    plain = fresh()
    Checkpoint({"model": model, "optim": optimizer}).recover(
        dict(zip(("model", "optim"), plain, strict=True))
    )
    assert plain[1].param_groups[0]["lr"].item() == 0.25


def test_a_tensor_that_is_a_setting_of_two_groups_is_not_filled_with_the_settings_of_both() -> None:
    def program(*rates: torch.Tensor) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        groups = [
            {"params": [parameter], "lr": rate}
            for parameter, rate in zip(model.parameters(), rates, strict=True)
        ]
        return {"model": model, "optim": torch.optim.SGD(groups)}

    common = torch.tensor(9.0)
    state = program(common, common)
    Checkpoint(program(torch.tensor(0.5), torch.tensor(0.25))).recover(state)
    assert [group["lr"].item() for group in state["optim"].param_groups] == [0.5, 0.25]


def test_an_optimizer_with_other_parameters_is_refused_by_name() -> None:
    model, optimizer = trained()
    other, into = fresh(("a", "c"))
    with pytest.raises(
        StructureMismatch,
        match=r"^2 keys \(model\.c, optim\.param_groups\.c\) are in the state and not in the "
        r"checkpoint;",
    ):
        Checkpoint({"model": model, "optim": optimizer}).bind({"model": other, "optim": into})


def test_entries_of_no_parameter_keep_their_key_as_in_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    into = torch.optim.SGD([parameter], lr=1.0)
    saved = {
        "state": {0: "not a dict", 7: {"of": "nobody"}},
        "param_groups": [{"params": [0], "lr": 0.5}],
    }
    Checkpoint({"optim": saved}).recover({"optim": into})
    assert (dict(into.state), into.param_groups[0]["lr"]) == (
        {parameter: {}, 7: {"of": "nobody"}},
        0.5,
    )


# -- optimizers of another kind


def of_kind(make: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    """Return a model and an optimizer that has taken a step."""
    model = torch.nn.ParameterDict(
        {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(3))}
    )
    optimizer = make(model.parameters(), lr=0.1, **options)
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optim": optimizer}


adamw, sgd = partial(of_kind, torch.optim.AdamW), partial(of_kind, torch.optim.SGD)
Make = Callable[[], dict[str, Any]]


@pytest.mark.parametrize(
    ("saver", "user", "words"),
    [
        (adamw, sgd, "optim: the checkpoint has the optimizer AdamW"),
        (partial(adamw, amsgrad=True), adamw,
         "optim.param_groups.0.amsgrad: the checkpoint has True"),
        (sgd, partial(sgd, momentum=0.9), "optim.param_groups.0.momentum: the checkpoint has 0"),
    ],
)  # fmt: skip
def test_an_optimizer_of_another_kind_is_refused_unless_strict_is_off(
    saver: Make, user: Make, words: str
) -> None:
    saved, place = saver(), user()
    with pytest.raises(StructureMismatch, match=f"^{words}"):
        Checkpoint(saved).bind(place)
    Checkpoint(saved).bind(place, strict=False)


def test_one_group_cannot_become_two() -> None:
    model, optimizer = trained()
    other, into = trained(groups=True)
    with pytest.raises(
        StructureMismatch,
        match=r"^optim\.param_groups: the checkpoint has the parameters of its group 0 together",
    ):
        Checkpoint({"model": model, "optim": optimizer}).bind({"model": other, "optim": into})
    Checkpoint({"model": model, "optim": optimizer}).recover(
        {"model": other, "optim": into}, strict=False
    )


def test_a_scheduler_of_another_class_is_refused() -> None:
    optimizer = of_kind(torch.optim.SGD)["optim"]
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    step = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    with pytest.raises(
        StructureMismatch, match="^sched: the checkpoint has the scheduler CosineAnnealingLR"
    ):
        Checkpoint({"sched": cosine}).bind({"sched": step})
    assert step.state_dict()["step_size"] == 5


def test_restored_settings_are_named_and_kept_ones_stay() -> None:
    saved, place = of_kind(torch.optim.SGD, weight_decay=0.5), of_kind(torch.optim.SGD)
    place["optim"].param_groups[0]["lr"] = 7.0
    assert Checkpoint(saved).bind(place)._leaves.overridden == [
        "optim.param_groups.0.lr 0.1 (was 7.0)",
        "optim.param_groups.0.weight_decay 0.5 (was 0)",
    ]
    binding = Checkpoint(saved).bind(place, keep=["optim.*.lr", "nothing"])
    assert binding._leaves.overridden == ["optim.param_groups.0.weight_decay 0.5 (was 0)"]
    assert binding.kept == {"optim.*.lr"}
    Checkpoint(saved).recover(place, keep=["optim.*.lr"])
    assert (
        place["optim"].param_groups[0]["lr"],
        place["optim"].param_groups[0]["weight_decay"],
    ) == (7.0, 0.5)


def test_any_key_may_be_kept_even_one_that_the_checkpoint_lacks() -> None:
    state = {"w": torch.zeros(2), "epoch": 1, "new": 5}
    Checkpoint({"w": torch.ones(2), "epoch": 9}).recover(state, keep=["w", "new"])
    assert (state["w"].tolist(), state["epoch"], state["new"]) == ([0.0, 0.0], 9, 5)  # type: ignore[attr-defined]


def two_modules(model: int, head: int, fill: float) -> dict[str, Any]:
    """Two modules with so many layers each, which are numbered, and one optimizer after
    a step.
    """
    state: dict[str, Any] = {
        key: torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(layers)))
        for key, layers in (("model", model), ("head", head))
    }
    parameters = [parameter for module in state.values() for parameter in module.parameters()]
    for number, parameter in enumerate(parameters):
        torch.nn.init.constant_(parameter, fill + number)
    state["optim"] = optimizer = torch.optim.Adam(parameters, lr=0.1)
    sum(p.pow(2).sum() for p in parameters).backward()
    optimizer.step()
    return state


def moments_by_key(state: dict[str, Any]) -> dict[str, float]:
    return {
        f"{key}.{name}": state["optim"].state[parameter]["exp_avg"].mean().item()
        for key in ("model", "head")
        for name, parameter in state[key].named_parameters()
    }


@each_case(
    ("before", "after"),
    [((2, 1), (2, 2)), ((2, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (2, 1)), ((1, 1), (2, 1))],
)
def test_moments_follow_their_parameter_whatever_names_the_other_modules_have(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    """An optimizer has a name that two modules have with the key of the module, and a
    name of one module without it.
    """
    saved, state = two_modules(*before, 1.0), two_modules(*after, 50.0)
    wanted, own = moments_by_key(saved), moments_by_key(state)
    Checkpoint(saved).recover(state, strict=False)
    assert moments_by_key(state) == {key: wanted.get(key, value) for key, value in own.items()}


def test_moments_stay_with_their_parameter_beside_a_module_whose_parameters_have_another_form() -> (
    None
):
    """The other module has a plain tensor of the same name, and no part in the
    optimizer.
    """

    def made(fill: float) -> dict[str, Any]:
        plain, parts = torch.nn.Linear(2, 1, bias=False), torch.nn.Module()
        parts.weight = torch.nn.Parameter(Doubled(torch.full((2,), fill), torch.zeros(2)))
        optim = torch.optim.SGD([parts.weight], lr=0.1, momentum=0.9)
        optim.state[parts.weight]["momentum_buffer"] = torch.full((2,), fill)
        return {"plain": plain, "parts": parts, "optim": optim}

    for strict in (True, False):
        state = made(0.0)
        Checkpoint(made(3.0)).recover(state, strict=strict)
        assert state["optim"].state[state["parts"].weight]["momentum_buffer"].tolist() == [3.0, 3.0]


def test_a_step_that_two_parameters_shared_is_counted_apart(daemon: Daemon) -> None:
    """In checkpoints of earlier versions, all parameters of a flat one have the same
    `step`.
    """
    model, optimizer = trained()
    first, second = model.values()
    optimizer.state[second]["step"] = optimizer.state[first]["step"]
    other, into = fresh()
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"model": model, "optim": optimizer}, step=1).wait("durable", timeout=60)
    agent.recover({"model": other, "optim": into})
    agent.close()
    sum(p.square().sum() for p in other.values()).backward()
    into.step()
    assert [entry["step"].item() for entry in into.state.values()] == [2, 2]


def test_a_setting_that_only_the_callers_optimizer_has_may_be_kept() -> None:
    """The group has no parameters any more, so nothing says which saved settings would
    be its own.
    """
    model, optimizer = trained()
    other = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(2))})
    into = torch.optim.Adam([{"params": [], "lr": 9.0}])
    saved, keep = Checkpoint({"model": model, "optim": optimizer}), ["optim.param_groups.*.lr"]
    assert saved.bind({"model": other, "optim": into}, strict=False, keep=keep).kept == set(keep)
    saved.recover({"model": other, "optim": into}, strict=False, keep=keep)
    assert torch.equal(other["a"], model["a"])
    assert into.param_groups[0]["lr"] == 9.0


def test_an_optimizer_of_which_no_parameter_is_in_the_checkpoint_is_refused() -> None:
    model, optimizer = trained()
    other, into = trained(lr=0.5)
    before = moments(other, into)
    renamed = torch.nn.ModuleDict({"block": other})
    with pytest.raises(
        StructureMismatch,
        match=r"^optim: no parameter of the optimizer is in the checkpoint, .*keep=\['optim'\]",
    ):
        Checkpoint({"model": model, "optim": optimizer}).bind(
            {"other": renamed, "optim": into}, strict=False
        )
    assert moments(other, into) == before != {}
    assert into.param_groups[0]["lr"] == 0.5


# -- optimizers that load in their own way


class Rounds(torch.optim.Adam):
    """Counts its steps in its own state dict."""

    rounds = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.rounds += 1
        return super().step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds = state_dict["rounds"]
        super().load_state_dict(
            {key: value for key, value in state_dict.items() if key != "rounds"}
        )


class Wrapped(torch.optim.Adam):
    """Has a state dict of another form."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["inner"])


def doubled_rate(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {
        **state,
        "param_groups": [{**group, "lr": group["lr"] * 2} for group in state["param_groups"]],
    }


HOOKS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "load pre hook": lambda optimizer: optimizer.register_load_state_dict_pre_hook(doubled_rate),
    "load post hook": lambda optimizer: optimizer.register_load_state_dict_post_hook(
        lambda one: one.param_groups[0].update(lr=7.0)
    ),
    "state-dict pre hook": lambda optimizer: optimizer.register_state_dict_pre_hook(
        lambda one: one.param_groups[0].update(seen=1)
    ),
    "state-dict post hook": lambda optimizer: optimizer.register_state_dict_post_hook(
        lambda one, state: {**state, "note": 5}
    ),
}


def own_way(kind: str, lr: float, steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, lr)
    torch.nn.init.constant_(model.bias, lr)
    cls = {"own methods": Rounds, "own form": Wrapped}.get(kind, torch.optim.Adam)
    optimizer = cls(model.parameters(), lr=lr)
    HOOKS.get(kind, lambda _: None)(optimizer)
    state = {"model": model, "optim": optimizer}
    for _ in range(steps):
        go_on(state)
    return state


def go_on(state: dict[str, Any]) -> None:
    for number, parameter in enumerate(state["model"].parameters()):
        parameter.grad = torch.full_like(parameter, number + 0.5)
    state["optim"].step()


@each_case("steps", [0, 3], ids=["before its first step", "after it"])
@each_case("kind", [*HOOKS, "own methods", "own form", "plain"])
def test_an_optimizer_that_loads_in_its_own_way_ends_as_after_torchs_round_trip(
    kind: str, steps: int
) -> None:
    saved, ours, theirs = (
        own_way(kind, 0.1, 2),
        own_way(kind, 0.5, steps),
        own_way(kind, 0.5, steps),
    )
    file = io.BytesIO()
    torch.save({key: value.state_dict() for key, value in saved.items()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for key, value in theirs.items():
        value.load_state_dict(loaded[key])
    Checkpoint(saved).recover(ours)
    for _ in range(2):
        assert text(ours) == text(theirs)
        assert vars(ours["optim"]).get("rounds") == vars(theirs["optim"]).get("rounds")
        go_on(ours)
        go_on(theirs)


def test_what_is_kept_stays_in_an_optimizer_that_loads_by_itself() -> None:
    state = own_way("state-dict post hook", 0.5, 3)
    weight, bias = state["model"].parameters()
    before = text(state["optim"].state[weight])
    Checkpoint(own_way("state-dict post hook", 0.1, 1)).recover(
        state, keep=["optim.param_groups.*.lr", "optim.state.weight"]
    )
    assert (state["optim"].param_groups[0]["lr"], text(state["optim"].state[weight])) == (
        0.5,
        before,
    )
    assert state["optim"].state[bias]["step"].item() == 1


# -- refusals, and their exits


def test_the_state_of_one_parameter_may_be_kept() -> None:
    model, optimizer = trained()
    other, into = trained(lr=0.5)
    before = moments(other, into)
    Checkpoint({"model": model, "optim": optimizer}).recover(
        {"model": other, "optim": into}, keep=["optim.state.a"]
    )
    assert moments(other, into) == {"a": before["a"], "b": moments(model, optimizer)["b"]}
    assert other["a"].tolist() == model["a"].tolist()


@pytest.mark.parametrize(
    ("saver", "user", "words"),
    [
        (adamw, sgd,
         "optim: the checkpoint has the optimizer AdamW (torch.optim.adamw.AdamW), the state SGD "
         "(torch.optim.sgd.SGD)"),
        (partial(adamw, amsgrad=True), adamw,
         "optim.param_groups.0.amsgrad: the checkpoint has True, the state False; the two keep "
         "different state"),
    ],
)  # fmt: skip
def test_an_optimizer_of_another_kind_may_be_kept_as_a_whole(
    saver: Make, user: Make, words: str
) -> None:
    saved, place = saver(), user()
    with torch.no_grad():
        saved["model"]["a"].fill_(9)
    before = text(place["optim"])
    refuses(Checkpoint(saved), place, words, {"keep": ["optim"]})
    assert text(place["optim"]) == before
    assert place["model"]["a"].tolist() == [9.0, 9.0]


def test_groups_that_were_split_come_back_with_strict_off() -> None:
    model, optimizer = trained()
    other, into = trained(groups=True)
    words = (
        "optim.param_groups: the checkpoint has the parameters of its group 0 together, the state "
        "has them in groups 0, 1 (1 groups in the "
        "checkpoint, 2 in the state)"
    )
    refuses(
        Checkpoint({"model": model, "optim": optimizer}),
        {"model": other, "optim": into},
        words,
        {"strict": False},
    )
    assert moments(other, into) == moments(model, optimizer)


def test_an_optimizer_without_a_match_may_be_kept() -> None:
    model, optimizer = trained()
    other, into = trained(lr=0.5)
    state = {"other": torch.nn.ModuleDict({"block": other}), "optim": into, "epoch": 0}
    words = (
        "optim: no parameter of the optimizer is in the checkpoint, which has a, b, while the "
        "optimizer has block.a, block.b"
    )
    call = {"strict": False, "keep": ["optim"]}
    before = moments(other, into)
    refuses(
        Checkpoint({"model": model, "optim": optimizer, "epoch": 5}),
        state,
        words,
        call,
        strict=False,
    )
    assert (state["epoch"], moments(other, into)) == (5, before)


def test_layers_that_were_unfrozen_begin_without_state() -> None:
    def program(names: tuple[str, ...]) -> Trained:
        model, _ = trained()
        return model, torch.optim.Adam([model[name] for name in names], lr=0.1)

    model, optimizer = program(("b",))
    model["b"].grad = torch.ones(2)
    optimizer.step()
    other, into = program(("a", "b"))
    state = {"model": other, "optim": into}
    refuses(
        Checkpoint({"model": model, "optim": optimizer}), state,
        "key optim.param_groups.a is in the state and not in the checkpoint", {"strict": False},
    )  # fmt: skip
    assert moments(other, into) == moments(model, optimizer)
    for parameter in other.values():
        parameter.grad = torch.ones(2)
    into.step()
    assert [moments(other, into)[name]["step"] for name in "ab"] == [1.0, 2.0]


def test_another_number_of_parameters_without_names_is_refused() -> None:
    saved, state = trained(("a", "b", "c")), {"optim": fresh()[1], "epoch": 0}
    words = (
        "optim: the checkpoint has 3 parameters without names in this optimizer, the state 2: put "
        "the module that holds them into the state, too"
    )
    refuses(Checkpoint({"optim": saved[1], "epoch": 4}), state, words, {"keep": ["optim"]})
    assert (state["epoch"], moments(saved[0], state["optim"])) == (4, {})  # type: ignore[arg-type]
