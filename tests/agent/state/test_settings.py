"""Tests which settings of optimizers and schedules are told of a script."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, SequentialLR

from ckptd.agent.state.settings import settings_of


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1))


class Wrapper:
    """A scheduler as accelerate wraps it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


def test_settings_are_named_and_what_a_training_changes_is_left_out() -> None:
    optimizer = Adam([parameter()], lr=0.5, weight_decay=0.25)
    assert settings_of({"optim": optimizer, "step": 3}) == (
        "optim: lr 0.5, betas (0.9, 0.999), eps 1e-08, weight_decay 0.25"
    )
    state: dict[str, Any] = {"optim": optimizer, "sched": Wrapper(CosineAnnealingLR(optimizer, 10))}
    text = settings_of(state)
    assert text.startswith("optim: eps 1e-08, weight_decay 0.25, initial_lr 0.5; sched: T_max 10")
    assert "base_lrs [0.5]" in text
    optimizer.step()
    state["sched"].step()
    assert settings_of(state) == text


def test_a_chain_of_schedules_and_several_groups_are_told_apart() -> None:
    def made(steps: int, rate: float = 0.5) -> str:
        groups: list[dict[str, Any]] = [
            {"params": [parameter()]},
            {"params": [parameter()], "lr": rate},
        ]
        optimizer = SGD(groups, lr=0.125)
        chain = SequentialLR(
            optimizer, [ConstantLR(optimizer, 0.5, 3), CosineAnnealingLR(optimizer, steps)], [3]
        )
        return settings_of([optimizer, chain])

    assert "1.initial_lr 0.5" in made(10)
    assert "_schedulers.1.T_max 10" in made(10)
    assert made(10) == made(10)
    assert len({made(10), made(11), made(10, rate=0.25)}) == 3


def test_a_long_text_is_cut_and_differs_all_the_same() -> None:
    def made(last: float) -> str:
        rates = [*([0.5] * 200), last]
        return settings_of({"ü": SGD([{"params": [parameter()], "lr": rate} for rate in rates])})

    one, other = made(0.25), made(0.125)
    assert one[:900] == other[:900]
    assert one != other
    assert len(one) <= len(one.encode()) <= 1000


def test_an_object_that_fails_has_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD([parameter()], lr=0.5)
    broken = CosineAnnealingLR(optimizer, 10)
    monkeypatch.setattr(broken, "state_dict", lambda: 1 / 0)
    assert settings_of({"sched": broken}) == ""
    endless = list[Any]()
    endless.append(endless)
    assert settings_of(endless) == ""
    assert settings_of(None) == settings_of({}) == ""
