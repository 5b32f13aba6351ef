"""Tests that submodules are loaded with the versions that they were saved with, also
from state dicts among the values of a state, as torch's own round trip does it.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, per_rank
from ckptd.agent import Checkpoint as Package
from ckptd.agent.convert import export, import_checkpoint
from ckptd.agent.state.capture import Habits, capture, values_document
from ckptd.agent.state.tree import ObjectNode, PerRank
from ckptd.agent.state.values import decode
from ckptd.agent.state.versions import (
    attach_versions,
    merged_versions,
    metadata_for_loading,
    plain_metadata,
    take_versions,
    versions_of,
)
from tests.support.cases import each_case
from tests.support.daemons import Daemon
from tests.support.saved_states import Checkpoint
from tests.support.versioned import LaterSame, LaterScale, Same, Scale, of_torch, weights


class Whole(torch.nn.Sequential):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, assign)


@each_case("outer", [torch.nn.Sequential, Whole])
@each_case(
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


# -- state dicts among the values of a state


def round_trip(state: Any) -> Any:
    """Return what torch.load gives back of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def metadata(state: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = state._metadata
    return found


def stack(*parts: type[Any]) -> torch.nn.Module:
    return torch.nn.Sequential(
        *(part() for part in parts), torch.nn.ReLU(), torch.nn.BatchNorm1d(2)
    )


def loaded(module: torch.nn.Module, state: Any) -> dict[str, list[float]]:
    module.load_state_dict(state)
    return weights(module)


@pytest.mark.parametrize("place", ["state dict", "empty"])
def test_a_state_dict_among_the_values_comes_back_with_its_versions(place: str) -> None:
    """The metadata, and the result of `load_state_dict`, are those of torch's round
    trip.
    """
    saved, module = stack(Same, LaterSame).state_dict(), stack(LaterSame, LaterSame)
    expected = loaded(stack(LaterSame, LaterSame), round_trip(saved))
    state: dict[str, Any] = {
        "list": [{"sd": module.state_dict() if place == "state dict" else OrderedDict()}]
    }
    Checkpoint({"list": [{"sd": saved}]}).recover(state)
    found = state["list"][0]["sd"]
    assert metadata(found) == metadata(round_trip(saved)) == metadata(saved)
    assert metadata(found) is not metadata(saved)
    assert loaded(module, found) == expected
    assert expected["0.w"] == [10.0, 10.0]


class Trainer:
    """An object whose state dict has that of its model, as those of many libraries
    have.
    """

    def __init__(self, *parts: type[Any]) -> None:
        self.model = stack(*parts)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 1, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


def test_an_object_gets_the_state_dict_of_its_model_with_the_versions() -> None:
    saved, after, expected = Trainer(Same), Trainer(LaterSame), Trainer(LaterSame)
    expected.load_state_dict(round_trip(saved.state_dict()))
    Checkpoint({"trainer": saved}).recover({"trainer": after})
    assert weights(after.model) == weights(expected.model)
    assert weights(after.model)["0.w"] == [10.0, 10.0]


def test_a_state_dict_comes_back_into_a_module_and_that_of_a_module_into_a_state_dict() -> None:
    saved, module = stack(Same), stack(LaterSame)
    expected = of_torch(saved, stack(LaterSame))
    Checkpoint({"model": saved.state_dict()}).recover({"model": module})
    assert weights(module) == expected
    again = stack(LaterSame)
    state = {"model": again.state_dict()}
    Checkpoint({"model": saved}).recover(state)
    assert loaded(again, state["model"]) == expected
    assert metadata(state["model"])["0"] == {"version": 1}


def test_a_key_that_only_the_state_has_keeps_its_own_version() -> None:
    saved, module = (
        stack(Same).state_dict(),
        torch.nn.Sequential(LaterSame(), torch.nn.ReLU(), torch.nn.BatchNorm1d(2), LaterSame()),
    )
    state = {"sd": module.state_dict()}
    Checkpoint({"sd": saved}).recover(state, strict=False)
    assert metadata(state["sd"]) == {**metadata(saved), "3": {"version": 2}}
    kept = {"sd": stack(LaterSame).state_dict()}
    Checkpoint({"sd": saved}).recover(kept, keep=["sd.0.w"])
    assert metadata(kept["sd"]) == {**metadata(saved), "0": {"version": 2}}


def test_versions_of_state_dicts_on_several_ranks(daemon: Daemon) -> None:
    """The stages of a pipeline have state dicts with different keys, and each rank may
    have one of its own.
    """
    stages = [stack(LaterSame).state_dict(), OrderedDict({"9.w": torch.ones(1)})]
    stages[1]._metadata = {"": {"version": 1}, "9": {"version": 4}}  # type: ignore[attr-defined]
    own = [
        per_rank({"sd": stack(Same).state_dict()}),
        per_rank({"sd": stack(LaterSame).state_dict()}),
    ]
    checkpoint = Checkpoint(
        *({"sd": stage, "own": one} for stage, one in zip(stages, own, strict=True))
    )
    state: dict[str, Any] = {"sd": OrderedDict(), "own": per_rank({"sd": OrderedDict()})}
    checkpoint.recover(state, own=1, strict=False)
    assert metadata(state["sd"])["9"] == {"version": 4}
    assert metadata(state["own"].value["sd"])["0"] == {"version": 2}


def test_a_checkpoint_is_loaded_with_the_versions_of_its_state_dicts(daemon: Daemon) -> None:
    agent, model = Agent("gpt", socket=daemon.home.socket), stack(Same, LaterSame)
    agent.snapshot(
        {"sd": model.state_dict(), "model": model, "own": per_rank([model.state_dict()])}, step=1
    ).wait("durable", timeout=60)
    agent.close()
    tree = Package.open(daemon.home.root / "gpt").load()
    expected = of_torch(model, stack(LaterSame, LaterSame))
    assert metadata(tree["sd"]) == metadata(model.state_dict()) == metadata(tree["own"][0])
    for found in (tree["sd"], tree["model"], tree["own"][0]):
        assert loaded(stack(LaterSame, LaterSame), found) == expected


def test_versions_go_through_the_file_of_torch(daemon: Daemon) -> None:
    """A module and a state dict keep their versions in an export, and a state dict does
    in an import.
    """
    agent, model, work = (
        Agent("gpt", socket=daemon.home.socket),
        stack(Same, LaterSame),
        daemon.home.path,
    )
    agent.snapshot({"sd": model.state_dict(), "model": model}, step=1).wait("durable", timeout=60)
    agent.close()
    export(daemon.home.root / "gpt", "torch", work / "out.pt")
    import_checkpoint(work / "out.pt", work / "imported")
    expected = of_torch(model, stack(LaterSame, LaterSame))
    for tree in (torch.load(work / "out.pt"), Package.open(work / "imported").load()):
        assert metadata(tree["sd"]) == metadata(model.state_dict())
        for found in tree.values():
            assert loaded(stack(LaterSame, LaterSame), found) == expected


def test_the_state_dicts_in_a_decoded_tree_are_found_by_their_keys() -> None:
    """Keys may contain dots. A dict that is no state dict of a module stays as it is."""
    inner, plain = OrderedDict({"w": 1}), {"w": 1}
    tree = {
        "a.b": [({"c": inner},)],
        "p": PerRank(OrderedDict()),
        "m": ObjectNode("module", {"x.w": 1}),
        "d": plain,
        3: OrderedDict(),
    }
    versions = {
        "a.b.0.0.c": {"": {"version": 5}},
        "p@2": {"": {"version": 6}},
        "m": {"x": {"version": 7}},
        "d": {"": {"version": 8}},
    }
    found = attach_versions(tree, {**versions, "3": {}}, 2)
    assert found["a.b"][0][0]["c"] is inner
    assert metadata(inner) == {"": {"version": 5}}
    assert metadata(found["p"].value) == {"": {"version": 6}}
    assert metadata(found["m"].tree) == {"": {"version": 1}, "x": {"version": 7}}
    assert found["m"].tree == {"x.w": 1}
    assert metadata(found[3]) == {}
    assert found["d"] is plain
    assert attach_versions(tree, {}, 0) is tree


def test_a_state_dict_without_versions_changes_none() -> None:
    place = OrderedDict({"w": 1})
    place._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    take_versions(place, OrderedDict({"w": 2}), ["w"])
    assert metadata(place) == {"": {"version": 2}}
