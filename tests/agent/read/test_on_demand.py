"""Tests checkpoints whose metadata lie in an object of their own: saved, read one
tensor at a time, recovered, copied and deleted.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ckptd.agent import Agent, Checkpoint, StorageReader, StorageWriter
from ckptd.agent.dcp.targets import leave_all
from ckptd.agent.read.checkpoint import opened_of
from ckptd.agent.read.on_demand import SavedOnDemand
from ckptd.daemon.commands.cli import main
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound
from ckptd.shared.formats import manifest as manifests
from ckptd.shared.formats import metadata_object, plan_check
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.metadata import tensors
from tests.support.daemons import Home, home, running, until
from tests.support.ranks import HERE, Ranks

pytestmark = pytest.mark.usefixtures("processes")

MANY = 900


def lower_limits() -> None:
    """Make the daemon of this process divide the metadata of few tensors as it divides
    those of 18,000.
    """
    for module in (manifests, plan_check):
        vars(module)["MOST_INLINE"] = 48 << 10
    metadata_object.BLOCK = 8 << 10


def state_of(step: int) -> dict[str, Any]:
    base = torch.arange(4.0) + step
    tensors: dict[str, Any] = {
        f"layers.{number:05d}.weight": torch.full((1,), float(number + step))
        for number in range(MANY)
    }
    return {**tensors, "base": base, "tied": base.view(2, 2), "n": step}


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in state.items()
    }


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    assert all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in wanted.items()
    )


def manifest_of(directory: Path) -> Manifest:
    return Manifest.decode((directory / "manifest.json").read_bytes())


def test_one_rank(place: Home, tmp_path: Path) -> None:
    with running(place, "--keep-last", "2", forked=lower_limits):
        agent = Agent("job", socket=place.socket)
        for step in (1, 2, 3):
            agent.snapshot(state_of(step), step=step).wait("durable", timeout=120)
        agent.close()
        first = place.root / "job" / "step-00000001.a0001"
        until(
            lambda: not first.exists(),
            "retention has deleted the first checkpoint, with its metadata object",
        )
    newest = place.root / "job" / "step-00000003.a0001"
    manifest = manifest_of(newest)
    assert (manifest.version, manifest.tensors) == (2, MANY + 2)
    assert (newest / "manifest.json").stat().st_size < 2048
    assert sorted(file.name for file in newest.iterdir()) == sorted(
        [*manifest.files, "manifest.json"]
    )

    with Checkpoint.open(place.root / "job") as checkpoint:
        saved = opened_of(checkpoint).saved
        assert isinstance(saved, SavedOnDemand)
        (part,) = saved.parts
        assert checkpoint.metadata("layers.00007.weight") == (torch.float32, torch.Size([1]))
        assert len(checkpoint.keys()) == MANY + 2
        assert part._reader is None
        assert torch.equal(checkpoint.tensor("layers.00007.weight"), torch.full((1,), 10.0))
        assert part._reader is not None
        assert torch.equal(checkpoint.tensor("tied"), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
        assert torch.equal(checkpoint.tensor("tied", slices=[1]), torch.tensor([5.0, 6.0]))
        for absent in ("layers.99999.weight", "n"):
            with pytest.raises(
                NotFound, match=f"no tensor {absent!r}; the checkpoint has {MANY + 2}, such as base"
            ):
                checkpoint.tensor(absent)
        assert_same(checkpoint.load(), state_of(3))
        assert checkpoint.verify() > 0
        assert f"{MANY + 2} tensors" in repr(checkpoint)
    assert f"{MANY + 2} tensors" in repr(checkpoint)
    for read in (partial(checkpoint.tensor, "base"), checkpoint.load):
        with pytest.raises(InvalidRequest, match="this checkpoint is closed: open it again"):
            read()
    with ArrayCheckpoint.open(place.root / "job") as arrays:
        assert arrays.array("layers.00007.weight").tolist() == [10.0]

    run = CliRunner()
    shown = run.invoke(main, ["show", str(newest), "--keys"])
    assert "layers.00007.weight" in shown.output
    assert f"tensors        {MANY + 2}" in shown.output
    assert "metadata" not in json.loads(run.invoke(main, ["show", str(newest), "--json"]).output)
    listed = json.loads(run.invoke(main, ["show", str(newest), "--json", "--keys"]).output)
    assert listed["metadata"]["state_dict_metadata"]["base"] == {
        "dtype": "float32",
        "size": [4],
        "chunks": [[[0], [4]]],
    }
    copied = run.invoke(main, ["copy", str(place.root), str(tmp_path / "copy")])
    assert copied.exit_code == 0, copied.output
    assert run.invoke(main, ["verify", str(tmp_path / "copy")]).exit_code == 0
    shutil.rmtree(place.root / "job")
    shutil.copytree(tmp_path / "copy" / "job", place.root / "job")
    with running(place, forked=lower_limits):
        agent = Agent("job", socket=place.socket)
        state = zeros_like(state_of(3))
        recovered = agent.recover(state)
        assert recovered is not None
        assert (recovered.step, recovered.source) == (3, "storage")
        assert_same(state, state_of(3))
        agent.close()
    # Outside every root.
    shutil.copytree(tmp_path / "copy" / "job" / newest.name, tmp_path / "alone")
    with Checkpoint.open(tmp_path / "alone") as checkpoint:
        assert_same(checkpoint.load(), state_of(3))


@pytest.fixture(scope="module")
def two_steps() -> Iterator[Path]:
    """A root with two checkpoints of one rank."""
    with home() as made:
        with running(made, forked=lower_limits):
            agent = Agent("job", socket=made.socket)
            for step in (1, 2):
                agent.snapshot(state_of(step), step=step).wait("durable", timeout=120)
            agent.close()
        yield made.root


@pytest.mark.parametrize("damage", ["missing", "index", "block", "part"])
def test_damage_of_the_metadata_object_is_found(place: Home, two_steps: Path, damage: str) -> None:
    shutil.copytree(two_steps, place.root)
    newest = place.root / "job" / "step-00000002.a0001"
    entry = manifest_of(newest).metadata_object
    assert entry is not None
    file = newest / (entry.file if damage != "part" else manifest_of(newest).parts[0].file)
    data = bytearray(file.read_bytes())
    data[{"missing": 0, "part": 0, "index": -5, "block": 100}[damage]] ^= 1
    file.unlink()
    if damage in ("index", "block"):
        file.write_bytes(data)
    verified = CliRunner().invoke(main, ["verify", str(newest)])
    assert verified.exit_code == 13
    assert file.name in verified.output
    if damage != "block":
        with Checkpoint.open(place.root / "job") as checkpoint:
            assert checkpoint.step == 1
    else:
        with (
            Checkpoint.open(place.root / "job") as checkpoint,
            pytest.raises(IntegrityError, match="does not match its checksum"),
        ):
            checkpoint.tensor("base")
    with running(place, forked=lower_limits):
        agent = Agent("job", socket=place.socket)
        state = zeros_like(state_of(1))
        recovered = agent.recover(state)
        assert recovered is not None
        assert (recovered.step, len(recovered.passed_over)) == (1, 1)
        assert_same(state, state_of(1))


def sharded(seed: int) -> dict[str, Any]:
    """Return a state whose tensors are divided, replicated, and of each rank alone, and
    the mesh of all ranks.
    """
    mesh = (
        init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        if dist.get_world_size() > 1
        else init_device_mesh("cpu", (1, 1))
    )
    torch.manual_seed(seed)
    found: dict[str, Any] = {
        f"small.{number:05d}": torch.full((1,), float(number * seed)) for number in range(MANY)
    }
    divisions: list[list[Placement]] = [
        [Replicate(), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
    ]
    for number, placements in enumerate(divisions):
        found[f"divided.{number}"] = distribute_tensor(torch.randn(7, 5), mesh, placements)
    return found


def save(socket: Path) -> None:
    HERE["state"] = sharded(1)
    Agent("job", socket=socket).snapshot(HERE["state"], step=1, rng=False).wait(
        "durable", timeout=120
    )


def whole(state: dict[str, Any]) -> dict[str, list[float]]:
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
        for key, value in state.items()
    }


def saved_state() -> dict[str, list[float]]:
    return whole(HERE["state"])


def recovered_state(socket: Path, same_partition: bool) -> tuple[str, dict[str, list[float]]]:
    state = sharded(2)
    recovered = Agent("job", socket=socket).recover(state, same_partition=same_partition)
    assert recovered is not None
    return recovered.source, whole(state)


@pytest.mark.parametrize(("ranks_after", "same_partition"), [(4, False), (4, True), (1, False)])
def test_shards_by_rule_are_found_on_any_number_of_ranks(
    place: Home, ranks_after: int, same_partition: bool
) -> None:
    with running(place, forked=lower_limits) as daemon:
        with Ranks(4) as ranks:
            ranks.call(save, place.socket)
            wanted = ranks.call(saved_state)[0]
        daemon.kill()
    shutil.rmtree(place.segments)
    (directory,) = (place.root / "job").glob("step-*")
    manifest = manifest_of(directory)
    assert (manifest.version, manifest.world_size) == (2, 4)
    with Checkpoint.open(place.root / "job") as checkpoint:
        divided = {name for name in wanted if name.startswith("divided")}
        assert len(divided) >= 2
        assert {name: checkpoint.tensor(name).tolist() for name in divided} == {
            name: wanted[name] for name in divided
        }
        assert checkpoint.tensor("divided.0", slices=[slice(2, 5), 1]).tolist() == [
            row[1] for row in wanted["divided.0"][2:5]
        ]
    with running(place, forked=lower_limits), Ranks(ranks_after) as ranks:
        for source, found in ranks.call(recovered_state, place.socket, same_partition):
            assert source == "storage"
            assert found == wanted


def save_with_dcp(root: Path, socket: Path) -> None:
    HERE["state"] = sharded(1) | {"count": 7}
    dcp.save(HERE["state"], storage_writer=StorageWriter(root / "job" / "big", socket=socket))


def save_with_planner(socket: Path) -> None:
    HERE["state"] = {
        key: value
        for key, value in sharded(1).items()
        if key.startswith("divided") or key.endswith("7")
    }
    Agent("planned", socket=socket, planner=DefaultSavePlanner()).snapshot(
        HERE["state"], step=1
    ).wait("durable", timeout=120)


def loaded_with_dcp(path: Path) -> dict[str, Any]:
    found = sharded(2) | {"count": 0}
    dcp.load(found, storage_reader=StorageReader(path))
    return {key: value for key, value in found.items() if key == "count"} | whole(
        {k: v for k, v in found.items() if k != "count"}
    )


def test_a_save_that_dcp_has_planned_says_which_rank_has_each_item(place: Home) -> None:
    with running(place, forked=lower_limits):
        with Ranks(2) as ranks:
            ranks.call(save_with_dcp, place.root, place.socket)
            wanted = ranks.call(tensors_of_state)[0]
            ranks.call(save_with_planner, place.socket)
            ranks.call(leave_all)
        with Checkpoint.open(place.root / "job") as checkpoint:
            assert isinstance(opened_of(checkpoint).saved, SavedOnDemand)
            assert all(
                checkpoint.tensor(name).tolist() == values for name, values in wanted.items()
            )
        with Checkpoint.open(place.root / "planned") as checkpoint:
            stored = [
                {(item.fqn, item.offsets) for item in source.plan.items}
                for source in opened_of(checkpoint).sources
            ]
            described = checkpoint.manifest.metadata["state_dict_metadata"]
            places = [
                (rank, (name, tuple(offsets)))
                for name, entry in described.items()
                for (offsets, _), rank in zip(
                    entry["chunks"], entry.get("ranks", [0] * len(entry["chunks"])), strict=True
                )
            ]
            assert len(places) >= len(described) > 0
            assert [place for rank, place in places if place not in stored[rank]] == []
            assert {rank for entry in described.values() for rank in entry.get("ranks", [0])} == {
                0,
                1,
            }
        with Ranks(2) as ranks:
            found = ranks.call(loaded_with_dcp, place.root / "job" / "big")[1]
        assert {name: found[name] for name in wanted} == wanted
        assert found["count"] == 7


def tensors_of_state() -> dict[str, list[float]]:
    return whole(
        {
            key: value
            for key, value in HERE["state"].items()
            if key.startswith("divided") or key == "small.00007"
        }
    )


class Casting(DefaultSavePlanner):
    """Saves bfloat16, while its metadata say float32."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        return found.to(torch.bfloat16) if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize("large", [False, True])
def test_what_a_planner_has_cast_comes_back_in_the_dtype_of_the_state(
    place: Home, large: bool
) -> None:
    more = {f"small.{number:05d}": torch.zeros(1) for number in range(MANY if large else 0)}
    with running(place, forked=lower_limits), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is one process only
        writer = StorageWriter(place.root / "job" / "cast", socket=place.socket)
        dcp.save({"w": torch.arange(8.0) / 3, **more}, storage_writer=writer, planner=Casting())
        leave_all()
    wanted = (torch.arange(8.0) / 3).to(torch.bfloat16)
    with Checkpoint.open(place.root / "job") as checkpoint, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (checkpoint.manifest.version == 2) == large
        assert checkpoint.metadata("w") == (torch.bfloat16, torch.Size([8]))
        assert torch.equal(checkpoint.tensor("w"), wanted)
        assert torch.equal(checkpoint.tensor("w", dtype=torch.float32), wanted.float())
        state = {"w": torch.full((8,), -1.0)}
        dcp.load(state, storage_reader=StorageReader(place.root / "job" / "cast"))
        assert torch.equal(state["w"], wanted.float())


def test_metadata_that_name_what_no_part_has_are_found(two_steps: Path, tmp_path: Path) -> None:
    root = shutil.copytree(two_steps, tmp_path / "root")
    directory = root / "job" / "step-00000002.a0001"
    repository, manifest = open_root(root), manifest_of(directory)
    entries, meshes = tensors(repository, "job", directory.name, manifest)
    data, forged = metadata_object.encode(
        {**entries, "base": {"dtype": "float64", "size": [4], "chunks": [[[0], [4]]]}}, meshes, 1
    )
    (directory / forged.file).write_bytes(data)
    (directory / "manifest.json").write_bytes(
        msgspec.structs.replace(manifest, metadata_object=forged).encode()
    )
    with (
        Checkpoint.open(root / "job") as checkpoint,
        pytest.raises(IntegrityError, match="does not have 'base' as the metadata"),
    ):
        checkpoint.tensor("base")
    data, forged = metadata_object.encode(
        {**entries, "ghost": {"dtype": "float32", "size": [4], "chunks": [[[0], [4]]]}}, meshes, 1
    )
    (directory / forged.file).write_bytes(data)
    (directory / "manifest.json").write_bytes(
        msgspec.structs.replace(manifest, metadata_object=forged).encode()
    )
    verified = CliRunner().invoke(main, ["verify", str(directory)])
    assert verified.exit_code == 13
    assert "ghost: the metadata of the checkpoint name shards that no part has" in verified.output
