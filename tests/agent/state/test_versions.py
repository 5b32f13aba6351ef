"""Tests that submodules are loaded with the versions that they were saved with, as torch's own round trip does it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.state.capture import capture, values_document
from ckptd.agent.state.values import decode
from ckptd.agent.state.versions import merged_versions, versions_of, with_versions
from tests.support.daemons import Daemon
from tests.support.saved_states import Checkpoint


class Scale(torch.nn.Module):
    """The class of the first program: it keeps the logarithm of its factor."""

    def __init__(self) -> None:
        super().__init__()
        self.log = torch.nn.Parameter(torch.zeros(2))


class LaterScale(torch.nn.Module):
    """The class of a later program, which keeps the factor itself."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.zeros(2))
        self.seen: list[Any] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.seen.append(local_metadata.get("version"))
        if local_metadata.get("version", 0) < 2:
            state_dict[f"{prefix}factor"] = state_dict.pop(f"{prefix}log").exp()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Same(torch.nn.Module):
    """A class whose values changed their meaning with version 2, and not their names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))


class LaterSame(Same):
    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version") == 1:
            state_dict[f"{prefix}w"] = state_dict[f"{prefix}w"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Whole(torch.nn.Sequential):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, assign)


def of_torch(saved: torch.nn.Module, module: torch.nn.Module, **options: Any) -> dict[str, list[float]]:
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    module.load_state_dict(torch.load(file), **options)
    return weights(module)


def weights(module: torch.nn.Module) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("outer", [torch.nn.Sequential, Whole])
@pytest.mark.parametrize(("before", "after"), [(Scale, LaterScale), (Same, LaterSame), (LaterScale, LaterScale), (LaterSame, LaterSame)])
def test_a_class_migrates_what_its_older_version_has_saved(outer: type[Any], before: type[Any], after: type[Any]) -> None:
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
    before, after = torch.nn.Sequential(Same(), LaterSame()), torch.nn.Sequential(LaterSame(), LaterSame())
    expected = of_torch(before, torch.nn.Sequential(LaterSame(), LaterSame()))
    saved = torch.compile(before, backend="eager") if outer else before
    module = after if outer else torch.compile(after, backend="eager")
    Checkpoint({"model": saved}).recover({"model": module})
    assert weights(after) == expected == {"0.w": [10.0, 10.0], "1.w": [1.0, 1.0]}


def test_a_submodule_that_is_new_has_no_metadata() -> None:
    saved, module = torch.nn.Sequential(LaterScale()), torch.nn.Sequential(LaterScale(), LaterSame(), Same())
    Checkpoint({"model": saved}).recover({"model": module}, strict=False)
    own = module.state_dict()
    found = with_versions(module, own, ["0.factor"], {"0": {"version": 2}})
    assert found == {"": {"version": 1}, "0": {"version": 2}}
    assert with_versions(module, own, ["0.factor"], None) is own._metadata  # type: ignore[attr-defined]
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
    first, second = {"versions": {"m": {"0": {"version": 2}, "1": {"version": 5}}}}, {"versions": {"m": {"1": {"version": 3}}, "n": {}}}
    assert merged_versions([first, second, {}], None) == {"m": {"0": {"version": 2}, "1": {"version": 5}}, "n": {}}
    assert merged_versions([first, second], 1)["m"] == {"0": {"version": 2}, "1": {"version": 3}}
    assert merged_versions([{}], 0) == {}


def test_versions_come_back_from_a_checkpoint(daemon: Daemon) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    agent.snapshot({"model": torch.nn.Sequential(Scale(), LaterSame())}, step=1).wait("durable", timeout=60)
    module = torch.nn.Sequential(LaterScale(), LaterSame())
    assert agent.recover({"model": module}) is not None
    assert weights(module) == {"0.factor": [1.0, 1.0], "1.w": [1.0, 1.0]}
    agent.close()
