"""Tests what makes two optimizers different, and what is only a setting that is
restored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptd.agent.recover.optimizer_check import (
    changed_settings,
    class_difference,
    group_differences,
    not_taken,
    settings_differences,
    state_difference,
)
from ckptd.agent.state.tree import TensorRef
from tests.support.cases import each_case

PARAMETER = torch.nn.Parameter(torch.zeros(2))


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([PARAMETER], lr=0.1)


def cosine() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(sgd(), 5)


class Wrapper(torch.optim.SGD):
    """An optimizer that has another one, as accelerate's has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([PARAMETER], lr=0.1)
        self.optimizer = optimizer


@each_case(
    ("make", "saved", "words"),
    [
        (sgd, "torch.optim.sgd.SGD", ""),
        (sgd, "my.SGD", ""),
        (sgd, "", ""),
        (lambda: Wrapper(sgd()), "torch.optim.sgd.SGD", ""),
        (sgd, "torch.optim.adamw.AdamW", "o: the checkpoint has the optimizer AdamW "
            "(torch.optim.adamw.AdamW), "
                                       "the state SGD (torch.optim.sgd.SGD)"),
        (cosine, "torch.optim.lr_scheduler.StepLR", "o: the checkpoint has the scheduler StepLR "
            "(torch.optim.lr_scheduler.StepLR), "
                                                    "the state CosineAnnealingLR "
                                                    "(torch.optim.lr_scheduler.CosineAnnealingLR)"),
        (object, "x.Loader", ""),
    ],
)  # fmt: skip
def test_optimizers_and_schedulers_must_be_of_the_saved_class(
    make: Callable[[], Any], saved: str, words: str
) -> None:
    assert class_difference(make(), saved, "o") == ([words] if words else [])


def test_settings_that_decide_about_the_state_must_agree() -> None:
    saved = [{"lr": 1.0, "momentum": 0.9, "amsgrad": True}, {"momentum": 0.5}]
    assert settings_differences(
        [{"lr": 2.0, "momentum": 0.1, "amsgrad": False}, {"momentum": 0.0}], saved, "o"
    ) == [
        "o.param_groups.0.amsgrad: the checkpoint has True, the state False; the two keep "
        "different state",
        "o.param_groups.1.momentum: the checkpoint has 0.5, the state 0.0; the two keep different "
        "state",
    ]
    assert settings_differences([{"betas": (0.9, 0.99)}], [{"momentum": 0.5}], "o") == []


def test_state_may_come_later_but_not_be_of_another_kind() -> None:
    adam = {"step": 1, "exp_avg": 2}
    assert state_difference({}, adam, "o") == state_difference(adam, {"step": 1}, "o") == []
    assert state_difference({"step": 1, "sum": 2}, adam, "o") == [
        "o: the checkpoint has exp_avg, step, the state step, sum"
    ]


def test_a_group_may_not_be_split() -> None:
    assert group_differences([["a"], ["b"]], [["a", "b"]], "o") == [
        "o.param_groups: the checkpoint has the parameters of its group 0 together, the state has "
        "them in groups 0, 1 "
        "(1 groups in the checkpoint, 2 in the state)"
    ]
    assert group_differences([["a", "b"]], [["a"], ["b"]], "o") == []
    assert group_differences([["a"]], [["a", "elsewhere"]], "o") == []


def test_state_of_another_class_is_tried_on_a_copy() -> None:
    adam = torch.optim.Adam([PARAMETER], lr=0.1)
    adam.state[PARAMETER] = {"step": torch.tensor(3.0)}
    tensor = TensorRef("o.state.w.exp_avg")
    assert (
        not_taken(adam, "torch.optim.RMSprop", {PARAMETER: {"step": 5, "exp_avg": tensor}}, "o")
        == []
    )
    assert not_taken(adam, "torch.optim.SGD", {PARAMETER: {"exp_avg": tensor}}, "o") == [
        "o: torch.optim.adam.Adam cannot take the state that the checkpoint has: KeyError('step')"
    ]
    # Its own class is not tried.
    assert not_taken(adam, "torch.optim.Adam", {PARAMETER: {"exp_avg": tensor}}, "o") == []
    assert not_taken(Wrapper(sgd()), "", {PARAMETER: {"exp_avg": tensor}}, "o") == []
    assert adam.state == {PARAMETER: {"step": torch.tensor(3.0)}}


def test_changed_settings_are_named_with_both_values() -> None:
    own = {"lr": 0.1, "betas": (0.9, 0.99), "params": [1], "rate": torch.tensor(1.0)}
    assert changed_settings(
        own, {"lr": 0.2, "betas": (0.9, 0.99), "params": [2], "rate": 5.0, "new": 1}, "o"
    ) == ["o.lr 0.2 (was 0.1)"]
    assert changed_settings(own, {"lr": TensorRef("o.lr")}, "o") == []
