"""Tests that submodules are loaded with the versions that they were saved with, as
torch's own round trip does it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.state.capture import Habits, capture, values_document
from ckptd.agent.state.values import decode
from ckptd.agent.state.versions import (
    merged_versions,
    metadata_for_loading,
    plain_metadata,
    versions_of,
)
from tests.support.daemons import Daemon
from tests.support.saved_states import Checkpoint
from tests.support.versioned import LaterSame, LaterScale, Same, Scale, of_torch, weights


class Whole(torch.nn.Sequential):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, assign)


@pytest.mark.parametrize("outer", [torch.nn.Sequential, Whole])
@pytest.mark.parametrize(
    ("before", "after"),
    [(Scale, LaterScale), (Same, LaterSame), (LaterScale, LaterScale), (LaterSame, LaterSame)],
)
def test_a_class_migrates_what_its_older_version_has_saved(
    outer: type[Any], before: type[Any], after: type[Any]
) -> None:
    saved = outer(torch.nn.Linear(2, 2), before(), torch.nn.BatchNorm1d(2))
    with torch.no_grad():
        for parameter in saved[1].parameters():
            parameter.fill_(3)
    expected = of_torch(saved, outer(torch.nn.Linear(2, 2), after(), torch.nn.BatchNorm1d(2)))
    module = outer(torch.nn.Linear(2, 2), after(), torch.nn.BatchNorm1d(2))
    Checkpoint({"model": saved}).recover({"model": module})
    assert weights(module) == expected
    assert Checkpoint({"model": saved}).bind({"model": module}).unused == []


@pytest.mark.parametrize("outer", [False, True])
def test_versions_do_not_depend_on_wrappers(outer: bool) -> None:
    before, after = (
        torch.nn.Sequential(Same(), LaterSame()),
        torch.nn.Sequential(LaterSame(), LaterSame()),
    )
    expected = of_torch(before, torch.nn.Sequential(LaterSame(), LaterSame()))
    saved = torch.compile(before, backend="eager") if outer else before
    module = after if outer else torch.compile(after, backend="eager")
    Checkpoint({"model": saved}).recover({"model": module})
    assert weights(after) == expected == {"0.w": [10.0, 10.0], "1.w": [1.0, 1.0]}


def test_a_submodule_that_is_new_has_no_metadata() -> None:
    saved, module = (
        torch.nn.Sequential(LaterScale()),
        torch.nn.Sequential(LaterScale(), LaterSame(), Same()),
    )
    Checkpoint({"model": saved}).recover({"model": module}, strict=False)
    own = module.state_dict()
    found = metadata_for_loading(module, own, ["0.factor"], {"0": {"version": 2}})
    assert found == {"": {"version": 1}, "0": {"version": 2}}
    assert metadata_for_loading(module, own, ["0.factor"], None) is own._metadata  # type: ignore[attr-defined]
    assert module[0].seen == [2]


def test_only_unusual_versions_are_saved_and_only_plain_values() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), LaterScale(), torch.nn.BatchNorm1d(2))
    assert versions_of(module[0], module[0].state_dict()) == {}
    assert versions_of(module, module.state_dict()) == {"1": {"version": 2}, "2": {"version": 2}}
    assert versions_of(module, dict(module.state_dict())) is None
    state = module.state_dict()
    state._metadata["1"] = {"version": 2, "kind": "a", "tensor": torch.ones(1), "most": 1 << 70}  # type: ignore[attr-defined]
    found = versions_of(module, state)
    assert found == {"1": {"version": 2, "kind": "a", "most": 1 << 70}, "2": {"version": 2}}
    averaged = torch.optim.swa_utils.AveragedModel(LaterSame())
    assert versions_of(averaged, averaged.state_dict()) == {"": {"version": 2}}
    document = decode(values_document(capture({"a": module, "b": module[0], "c": [1]}), rng=False))
    assert document["versions"] == {"a": {"1": {"version": 2}, "2": {"version": 2}}, "b": {}}
    assert "versions" not in decode(values_document(capture({"c": [1]}), rng=False))


def test_versions_of_several_ranks_are_united() -> None:
    first, second = (
        {"versions": {"m": {"0": {"version": 2}, "1": {"version": 5}}}},
        {"versions": {"m": {"1": {"version": 3}}, "n": {}}},
    )
    assert merged_versions([first, second, {}], None) == {
        "m": {"0": {"version": 2}, "1": {"version": 5}},
        "n": {},
    }
    assert merged_versions([first, second], 1)["m"] == {"0": {"version": 2}, "1": {"version": 3}}
    assert merged_versions([{}], 0) == {}


def test_versions_come_back_from_a_checkpoint(daemon: Daemon) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    agent.snapshot({"model": torch.nn.Sequential(Scale(), LaterSame())}, step=1).wait(
        "durable", timeout=60
    )
    module = torch.nn.Sequential(LaterScale(), LaterSame())
    assert agent.recover({"model": module}) is not None
    assert weights(module) == {"0.factor": [1.0, 1.0], "1.w": [1.0, 1.0]}
    agent.close()


def test_metadata_of_another_form_are_left_out() -> None:
    state = OrderedDict({"w": torch.ones(1)})
    assert plain_metadata(state) is None
    for other in (3, None, [1]):
        state._metadata = other  # type: ignore[attr-defined]
        assert plain_metadata(state) is None
    state._metadata = {"": {"version": 1, "t": torch.ones(1), 3: 4}, 5: {"version": 1}, "a": 7}  # type: ignore[attr-defined]
    assert plain_metadata(state) == {"": {"version": 1}}


def test_versions_that_change_between_two_captures_are_saved() -> None:
    """A capture keeps the encoded versions for the next one."""
    module, habits = torch.nn.Sequential(Same()), Habits()
    state = {"sd": module.state_dict(), "model": module}
    for version in (1, 2, 2, 3):
        state["sd"]._metadata["0"]["version"] = version  # type: ignore[attr-defined]
        found = decode(capture(state, habits=habits).versions)
        assert found == {"sd": {"": {"version": 1}, "0": {"version": version}}, "model": {}}
    assert capture({"a": 1}, habits=habits).versions == b""
