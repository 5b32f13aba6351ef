"""Tests that the state dicts of modules among the values of a state keep their
versions, as torch's own round trip does it.
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
from ckptd.agent.state.state_dicts import attach_versions, take_versions
from ckptd.agent.state.tree import ObjectNode, PerRank
from tests.support.daemons import Daemon
from tests.support.saved_states import Checkpoint
from tests.support.versioned import LaterSame, Same, of_torch, weights


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
