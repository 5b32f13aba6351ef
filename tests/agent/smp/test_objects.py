"""Saves and loads objects with SageMaker's calls, on one rank and on several."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptd.agent import smp
from ckptd.agent.smp.objects import load, save
from ckptd.shared.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidName,
    InvalidRequest,
    NotFound,
    UnsavableValue,
)
from tests.agent.convert.saved import assert_same
from tests.support.daemons import Daemon
from tests.support.ranks import Ranks
from tests.support.storage import part_in

pytestmark = pytest.mark.usefixtures("processes")

OBJECT = {
    "state": {"w": torch.arange(6.0).reshape(2, 3)},
    "epoch": 3,
    "seen": [(1, "x"), None],
    "groups": [{"lr": 0.1}],
}


def test_an_object_comes_back(root: Path) -> None:
    save(OBJECT, root / "state.pt")
    assert_same(load(root / "state.pt", None), OBJECT)  # waits for the save
    smp.close()
    assert_same(load(root / "state.pt"), OBJECT)


def test_the_newest_of_a_name_is_loaded(root: Path) -> None:
    for number in range(3):
        save({"n": number}, root / "a")
    save({"n": "other"}, root / "b")
    smp.close()
    save({"n": 3}, root / "a")
    assert load(root / "a") == {"n": 3}
    assert load(root / "b") == {"n": "other"}
    with pytest.raises(NotFound, match="^no object 'c' in .*; there are a, b$"):
        load(root / "c")


@pytest.mark.parametrize(
    "value", [torch.ones(3), [1, 2], "text", {"w": torch.ones(2, dtype=torch.bfloat16)}]
)
def test_every_kind_of_object(root: Path, value: Any) -> None:
    for partial in (True, False):
        save(value, root / f"x{partial}", partial)
        assert_same(load(root / f"x{partial}", partial=partial), value)


def test_a_full_object_is_a_file_of_torch(root: Path) -> None:
    save(OBJECT, root / "whole.pt", partial=False)
    assert_same(torch.load(root / "whole.pt", weights_only=True), OBJECT)
    with pytest.raises(
        AlreadyExists, match="whole.pt exists already: choose another name, or remove it first"
    ):
        save(OBJECT, root / "whole.pt", partial=False)
    with pytest.raises(NotFound, match="^no object 'whole.pt' in .*; there are none$"):
        load(root / "whole.pt")


def test_nothing_that_was_saved_is_dropped(root: Path) -> None:
    for number in range(13):  # more than a daemon keeps by default
        save({"n": number}, root / f"x{number}").wait("durable", timeout=60)
    smp.close()
    assert [load(root / f"x{number}")["n"] for number in range(13)] == list(range(13))


def test_a_forked_child_loads_and_begins_no_attempt(root: Path) -> None:
    save({"n": 1}, root / "x").wait("durable", timeout=60)
    if (child := os.fork()) == 0:
        os._exit(load(root / "x")["n"] + 6)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    save({"n": 2}, root / "x").wait("durable", timeout=60)  # this process can still save


def test_bad_input_is_refused(tmp_path: Path, root: Path) -> None:
    for name in ("a b", "..", ".", ""):
        with pytest.raises(InvalidName):
            save({}, f"{root}/{name}")
    save({}, root / "empty")
    with pytest.raises(UnsavableValue):
        save({"f": print}, root / "x")
    with pytest.raises(
        InvalidRequest, match="^the object has a module or an optimizer: save its state_dict"
    ):
        save({"model": torch.nn.Linear(1, 1)}, root / "x")
    with pytest.raises(NotFound, match="no object 'x' in .*; there are none"):
        load(tmp_path / "x")
    with pytest.raises(NotFound, match="is not there, or is no file"):
        load(tmp_path / "x", partial=False)
    (tmp_path / "x").write_bytes(b"no file of torch")
    with pytest.raises(IntegrityError):
        load(tmp_path / "x", partial=False)


def test_damage_is_found(root: Path) -> None:
    save({"w": torch.arange(5000)}, root / "x").wait("durable", timeout=60)
    smp.close()
    part = part_in(next((root / "objects").glob("step-*")))
    data = bytearray(part.read_bytes())
    for at in range(4096, len(data) - 8192, 4096):
        data[at] ^= 1  # the first byte of each chunk
    part.write_bytes(data)
    with pytest.raises(IntegrityError):
        load(root / "x")


# -- several ranks


def sharded(first: float) -> DTensor:
    mesh = DeviceMesh("cpu", list(range(torch.distributed.get_world_size())))
    return DTensor.from_local(
        torch.full((1, 2), first + mesh.get_local_rank()), mesh, [Shard(0)], run_check=False
    )


def save_on_rank(socket: Path, place: Path, partial: bool) -> int:
    os.environ["CKPTD_SOCKET"] = str(socket)
    rank = torch.distributed.get_rank()
    own: dict[str, Any] = {"w": [sharded(1.0)], "same": torch.ones(2)}
    if partial:
        own |= {"own": torch.full((rank + 1,), float(rank)), "rank": rank}
    pending = save(own, place / "x", partial)
    smp.close()
    return pending.step


@dataclass
class Box:
    inside: Any


class Pair(NamedTuple):
    left: Any
    right: Any


def save_containers(socket: Path, place: Path) -> list[str]:
    os.environ["CKPTD_SOCKET"] = str(socket)
    save(OrderedDict(b=(sharded(1.0), 1), a=2), place / "x")
    errors = []
    for holder in (Pair(sharded(1.0), 1), Box(sharded(1.0))):
        try:
            save({"holder": holder}, place / "y")
        except UnsavableValue as error:
            errors.append(str(error))
    smp.close()
    return errors


def test_containers_of_shards_keep_their_types(daemon: Daemon) -> None:
    with Ranks(2) as ranks:
        seconds = []
        for first, second in ranks.call(save_containers, daemon.home.socket, daemon.home.root):
            assert (
                first == "a Pair has a sharded tensor in it: save it in a dict, a list or a tuple"
            )
            seconds.append(second)
        words = (
            "holder.inside: a tensor that is sharded over ranks is no rank's own: take it out of "
            "per_rank(...)"
        )
        own = [f"object@{number}.{words}" for number in (0, 1)]
        # If the other rank has failed the step first.
        told = [f"rank {1 - number}: {own[1 - number]}" for number in (0, 1)]
        assert seconds in (own, [own[0], told[1]], [told[0], own[1]])
    found = load(daemon.home.root / "x")
    assert (type(found), list(found)) == (OrderedDict, ["b", "a"])
    assert (found["b"][0].tolist(), found["b"][1:], found["a"]) == (
        [[1.0, 1.0], [2.0, 2.0]],
        (1,),
        2,
    )


def load_on_rank(place: Path, partial: bool) -> Any:
    return {
        key: value.tolist()
        if isinstance(value, torch.Tensor)
        else [one.tolist() for one in value]
        if isinstance(value, list)
        else value
        for key, value in load(place / "x", partial=partial).items()
    }


WHOLE = {"w": [[[1.0, 1.0], [2.0, 2.0]]], "same": [1.0, 1.0]}


def test_each_rank_gets_its_own_object(daemon: Daemon) -> None:
    with Ranks(2) as ranks:
        ranks.call(save_on_rank, daemon.home.socket, daemon.home.root, True)
        first, second = ranks.call(load_on_rank, daemon.home.root, True)
        assert first == {**WHOLE, "own": [0.0], "rank": 0}
        assert second == {**WHOLE, "own": [1.0, 1.0], "rank": 1}
    with Ranks(3) as ranks:
        found = ranks.call(load_on_rank, daemon.home.root, True)
        assert [one["rank"] for one in found] == [0, 1, 0]


def save_differing(socket: Path, place: Path) -> list[str]:
    """Save an object that differs between ranks, each rank's own first, and return the
    errors of full saves.
    """
    os.environ["CKPTD_SOCKET"] = str(socket)
    own = {"w": sharded(1.0), "rank": torch.distributed.get_rank()}
    save(own, place / "own")
    errors = []
    for name in ("a", "b"):
        try:
            save(own, place / name, partial=False)
        except UnsavableValue as error:
            errors.append(str(error))
        save({**own, "rank": 0}, place / f"same {name}".replace(" ", "-"), partial=False)
    smp.close()
    return errors


def test_a_full_object_that_differs_between_ranks_is_refused_each_time(daemon: Daemon) -> None:
    with Ranks(2) as ranks:
        for errors in ranks.call(save_differing, daemon.home.socket, daemon.home.root):
            assert len(errors) == 2
            assert all("object.rank differs between ranks 0 and 1" in error for error in errors)


def test_a_full_object_has_whole_tensors(daemon: Daemon) -> None:
    with Ranks(2) as ranks:
        ranks.call(save_on_rank, daemon.home.socket, daemon.home.root, False)
        assert ranks.call(load_on_rank, daemon.home.root, False) == [WHOLE, WHOLE]
