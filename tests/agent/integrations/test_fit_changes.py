"""Tests that modes which hooks have changed are noted, and can be set again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.integrations.fit_changes import (
    FitChanges,
    accumulated,
    add_groups,
    changed_flags,
    flags_of,
    restore,
)


def module() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 2, device="cpu"), nn.Sequential(nn.BatchNorm1d(2, device="cpu"), nn.Dropout())
    )


def trainer_of(model: nn.Module, batches: int = 1) -> Any:
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]
    return SimpleNamespace(
        lightning_module=model, accumulate_grad_batches=batches, optimizers=[optimizer]
    )


def test_only_changes_are_noted() -> None:
    trainer, changes = trainer_of(module()), FitChanges()
    changes.begin(trainer)
    assert changes.state(trainer) == {}
    model = trainer.lightning_module
    model[1].eval()
    model[1][0].track_running_stats = False
    model[0].weight.requires_grad_(False)
    trainer.accumulate_grad_batches = 3
    assert changes.state(trainer) == {
        "training": {"1": False, "1.0": False, "1.1": False},
        "track_running_stats": {"1.0": False},
        "requires_grad": {"0.weight": False},
        "accumulate_grad_batches": 3,
    }


def test_changes_are_made_again_and_nothing_else_is_set() -> None:
    trainer, changes = trainer_of(module()), FitChanges()
    changes.begin(trainer)
    trainer.lightning_module[1].eval()
    saved = changes.state(trainer)
    again = trainer_of(module(), batches=4)  # the script accumulates more now
    again.lightning_module[0].requires_grad_(False)
    restore(again, saved)
    assert changed_flags(flags_of(module()), flags_of(again.lightning_module)) == {
        "training": {"1": False, "1.0": False, "1.1": False},
        "requires_grad": {"0.weight": False, "0.bias": False},
    }
    assert again.accumulate_grad_batches == 4
    assert accumulated(again, {"accumulate_grad_batches": 3}) == 3


def test_a_second_fit_has_the_beginning_of_the_first() -> None:
    """A new process would begin with the values of the script, too."""
    trainer, changes = trainer_of(module()), FitChanges()
    changes.begin(trainer)
    trainer.lightning_module[1][1].eval()
    changes.begin(trainer)
    assert changes.state(trainer) == {"training": {"1.1": False}}


def test_a_name_that_the_model_lacks_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(module())
    restore(trainer, {"training": {"2": False, "1": False}, "requires_grad": {"2.bias": False}})
    assert trainer.lightning_module[1].training is False
    assert "hooks have changed the mode of 2, 2.bias since the training began" in caplog.text


def test_groups_that_were_added_are_added_again() -> None:
    trainer, changes = trainer_of(module()), FitChanges()
    changes.begin(trainer)
    group = {"params": [trainer.lightning_module[1][0].bias], "lr": 0.5, "name": "added"}
    trainer.optimizers[0].add_param_group(group)
    saved = changes.state(trainer)
    again = trainer_of(module())
    assert add_groups(again, {}) is False
    assert add_groups(again, saved) is True
    first, added = again.optimizers[0].param_groups
    assert len(first["params"]) == 2
    assert added["params"][0] is again.lightning_module[1][0].bias
    assert (added["lr"], added["name"], added["momentum"]) == (0.5, "added", 0)


def test_groups_of_another_script_are_not_added() -> None:
    trainer = trainer_of(module())
    for names in (["0.weight"], ["none"]):  # an optimizer has it already, and no such parameter
        assert add_groups(trainer, {"groups": [[{"params": names, "lr": 0.1}]]}) is False
    assert add_groups(trainer, {"groups": [[], [{"params": ["1.0.bias"]}]]}) is False
    assert len(trainer.optimizers[0].param_groups) == 1
