"""What torch's own `load_state_dict` does to an optimizer, done to one that is written
into directly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptd.agent.state.optimizers import (
    class_of,
    steps_on_device,
    tell,
    unshared,
    without_state,
    without_wrappers,
)


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


@pytest.mark.parametrize(
    ("option", "expected"), [({}, False), ({"capturable": True}, True), ({"fused": True}, True)]
)
def test_a_step_counter_is_on_the_device_as_torch_has_it(
    option: dict[str, Any], expected: bool
) -> None:
    first, second = parameter(), parameter()
    optimizer = torch.optim.Adam(
        [{"params": [first]}, {"params": [second], **option}], foreach=False
    )
    assert [steps_on_device(optimizer, p) for p in (first, second)] == [False, expected]


def test_settings_of_an_older_torch_get_their_defaults() -> None:
    """`Optimizer.load_state_dict` ends with `__setstate__`, which adds them."""
    optimizer = torch.optim.Adam([parameter()])
    del optimizer.param_groups[0]["amsgrad"]
    tell(optimizer)
    assert optimizer.param_groups[0]["amsgrad"] is False


def test_a_class_with_a_load_of_its_own_is_asked_to_load() -> None:
    loaded: list[Any] = []

    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            loaded.append(state_dict)
            super().load_state_dict(state_dict)

    optimizer = Own([parameter()], lr=0.5)
    tell(optimizer)
    assert [state["param_groups"][0]["lr"] for state in loaded] == [0.5]


def test_an_optimizer_that_was_saved_before_its_first_step_keeps_its_parameters() -> None:
    first, second = parameter(), parameter()
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [second]}])
    optimizer.step()
    without_state(optimizer, [{"params": ["x"], "lr": 0.5}])
    assert (dict(optimizer.state), optimizer.param_groups[0]["params"],
    [g["lr"] for g in optimizer.param_groups]) == (
        {}, [first], [0.5, 0.001],
    )  # fmt: skip


def test_wrappers_of_optimizers_and_schedulers_are_known_by_what_they_hold() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    class Wrapper:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def step(self) -> None: ...
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    class Trainer:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

    assert without_wrappers(Wrapper(scheduler)) is scheduler
    assert class_of(Wrapper(scheduler)) == class_of(scheduler) == "torch.optim.lr_scheduler.StepLR"
    sequence = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [scheduler, torch.optim.lr_scheduler.StepLR(optimizer, 2)], [1]
    )
    for other in (Trainer(scheduler), Wrapper(None), sequence, scheduler, optimizer, Wrapper, 5):
        assert without_wrappers(other) is other


def test_scalar_tensors_in_one_memory_are_copied() -> None:
    step, moment = torch.tensor(3.0), torch.ones(2)
    state = {name: {"step": step.detach(), "moment": moment, "n": 1} for name in "ab"} | {"c": 5}
    found = unshared(state)
    assert found == state
    assert found["a"]["step"].data_ptr() == step.data_ptr() != found["b"]["step"].data_ptr()
    assert found["b"]["moment"] is moment
