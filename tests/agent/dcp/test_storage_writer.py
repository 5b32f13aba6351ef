"""Tests `dcp.save`, `async_save` and `load` through ckptd in one process, in a
directory of its own and under the root of a daemon.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckptd.agent import Agent, Checkpoint, StorageReader, StorageWriter
from ckptd.agent.dcp.targets import leave_all
from ckptd.daemon.commands.forgetting import pin
from ckptd.shared import names
from ckptd.shared.errors import AlreadyExists, CkptdError, InvalidRequest, NotFound
from ckptd.shared.storage.marker import MARKER
from ckptd.shared.system import failpoints
from tests.support.shared_daemon import LentDaemon

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore::FutureWarning"
)


class Place:
    """The place of a save, and what lies there."""

    def __init__(self, base: Path, daemon: LentDaemon | None) -> None:
        self.base, self.daemon = base, daemon

    def path(self, name: str) -> Path:
        return self.base / name

    def writer(self, name: str, **options: Any) -> StorageWriter:
        return StorageWriter(
            self.path(name), socket=self.daemon.home.socket if self.daemon else None, **options
        )

    def files(self) -> dict[str, list[str]]:
        """Return the files of each checkpoint directory."""
        found = {
            where.name: sorted(p.name for p in where.iterdir())
            for where in self.base.iterdir()
            if where.is_dir()
        }
        return {name: files for name, files in found.items() if files}


@pytest.fixture
def daemon(shared_daemon: LentDaemon) -> Iterator[LentDaemon]:
    yield shared_daemon
    leave_all()


@pytest.fixture(params=["alone", "daemon"])
def spot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "alone":
        yield Place(tmp_path, None)
        return
    daemon = request.getfixturevalue("shared_daemon")
    daemon.directory.mkdir()
    yield Place(daemon.directory, daemon)
    leave_all()


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 30)).sum().backward()
    optimizer.step()
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "half": torch.randn(9, 7).bfloat16().t(),
        "number": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "history": [seed, torch.arange(5) + seed, {"deep": "text"}],
        "epoch": seed,
    }


def blank() -> dict[str, Any]:
    """Return the same tensors with other values."""
    made = state(99)
    made["epoch"] = -1
    return made


def same(one: Any, other: Any) -> bool:
    """Return True if both are equal bit for bit, with the same types."""
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
            one.contiguous().view(-1).view(torch.uint8),
            other.contiguous().view(-1).view(torch.uint8),
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def directories(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def refused(function: Any, *arguments: Any, **options: Any) -> str:
    """Return the last line of the error that DCP raises.

    It has the name and message of ckptd's error.
    """
    with pytest.raises(dcp.CheckpointException) as caught:
        function(*arguments, **options)
    return str(caught.value).strip().splitlines()[-1].removeprefix("ckptd.shared.errors.")


@pytest.mark.usefixtures("processes")
def test_a_saved_state_is_loaded(spot: Place) -> None:
    dcp.save(state(1), storage_writer=spot.writer("first"))
    loaded = blank()
    dcp.load(loaded, storage_reader=StorageReader(spot.path("first")))
    assert same(loaded, state(1))


@pytest.mark.usefixtures("processes")
def test_checkpoint_id_replaces_the_path(spot: Place) -> None:
    writer = StorageWriter(socket=spot.daemon.home.socket if spot.daemon else None)
    for seed in (1, 2):
        dcp.save(state(seed), checkpoint_id=spot.path(f"save-{seed}"), storage_writer=writer)
    reader = StorageReader()
    for seed in (2, 1):
        loaded = blank()
        dcp.load(loaded, checkpoint_id=spot.path(f"save-{seed}"), storage_reader=reader)
        assert same(loaded, state(seed))


@pytest.mark.usefixtures("processes")
def test_async_save_has_the_values_of_its_call(spot: Place) -> None:
    changing = state(1)
    future = dcp.async_save(changing, storage_writer=spot.writer("later"))
    changing["model"]["weight"].zero_()
    changing["history"][1].zero_()
    future.result()  # type: ignore[union-attr]
    loaded = blank()
    dcp.load(loaded, storage_reader=StorageReader(spot.path("later")))
    assert same(loaded, state(1))


@pytest.mark.usefixtures("processes")
def test_saves_of_one_writer_may_overlap(spot: Place) -> None:
    writer = spot.writer("unused")
    futures = [
        dcp.async_save(state(n), checkpoint_id=spot.path(f"save-{n}"), storage_writer=writer)
        for n in range(4)
    ]
    for n, future in enumerate(futures):
        future.result()  # type: ignore[union-attr]
        assert same(Checkpoint.open(spot.path(f"save-{n}")).load(), state(n))


def test_the_writer_is_a_stager_and_can_be_pickled() -> None:
    # Nothing is read here.
    writer = StorageWriter("/ckpts/gpt/best", codec="zstd:3", overwrite=True, weights_only=False)
    assert isinstance(writer, AsyncStager)
    # Pickled on this line; DCP sends a writer to its own process so.
    other = pickle.loads(pickle.dumps(writer))
    assert (other.checkpoint_id, other.codec, other.overwrite, other.weights_only) == (
        "/ckpts/gpt/best",
        "zstd:3",
        True,
        False,
    )


# -- what is written, and how else it can be read


def test_a_save_outside_every_root_is_one_directory(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "deep" / "er"))
    marker, manifest, part = sorted(p.name for p in (tmp_path / "deep" / "er").iterdir())
    assert (marker, manifest) == (".metadata", "manifest.json")
    assert names.parse_part_file(part) is not None


def test_under_a_root_the_daemon_commits(daemon: LentDaemon) -> None:
    socket = daemon.home.socket
    dcp.save(state(), storage_writer=StorageWriter(daemon.directory / "best", socket=socket))
    dcp.save(state(), storage_writer=StorageWriter(daemon.directory / "step-7", socket=socket))
    assert directories(daemon.directory) == ["best.a0001", "step-00000007.a0001"]
    (job,) = daemon.status()["jobs"]
    assert (job["job"], job["attempt"], job["last_durable"]["step"]) == (daemon.job, 1, 7)
    leave_all()
    assert daemon.status()["shared_memory"]["segments"] == 0


@pytest.mark.parametrize("path", ["best", "a/b/best", ".ckptd/best"])
def test_at_another_depth_under_a_root_the_process_writes_itself(
    daemon: LentDaemon, path: str
) -> None:
    dcp.save(
        state(), storage_writer=StorageWriter(daemon.home.root / path, socket=daemon.home.socket)
    )
    assert (daemon.home.root / path / "manifest.json").is_file()
    assert daemon.status()["jobs"] == []


@pytest.mark.usefixtures("processes")
def test_a_save_can_be_read_without_dcp(spot: Place) -> None:
    dcp.save(state(3), storage_writer=spot.writer("read"))
    with Checkpoint.open(spot.path("read")) as checkpoint:
        assert same(checkpoint.load(), state(3))
        assert same(checkpoint.tensor("model.weight", slices=(2,)), state(3)["model"]["weight"][2])
        assert sorted(checkpoint.keys())[:2] == ["empty", "half"]
        assert "epoch" not in checkpoint.keys()  # noqa: SIM118 (a method of ours)
        assert checkpoint.verify() > 0


def test_recover_brings_a_save_through_dcp_back(daemon: LentDaemon) -> None:
    dcp.save(
        state(4),
        storage_writer=StorageWriter(daemon.directory / "step-7", socket=daemon.home.socket),
    )
    leave_all()
    agent = Agent(daemon.job, socket=daemon.home.socket)
    loaded = blank()
    recovered = agent.recover(loaded)
    assert recovered is not None
    assert (recovered.step, recovered.source) == (7, "storage")
    assert same(loaded, state(4))
    agent.close()


def test_a_snapshot_is_loaded_by_dcp(daemon: LentDaemon) -> None:
    agent = Agent(daemon.job, socket=daemon.home.socket)
    agent.snapshot(state(5), step=3).wait("durable", timeout=60)
    agent.close()
    loaded = blank()
    dcp.load(loaded, storage_reader=StorageReader(daemon.directory / "step-3"))
    assert same(loaded, state(5))


def test_tensors_that_overlap_are_loaded_without_a_template(daemon: LentDaemon) -> None:
    """The storage in which both lie is an item of its own, without a name of the
    user's.
    """
    agent = Agent(daemon.job, socket=daemon.home.socket)
    base = torch.arange(15.0)
    agent.snapshot({"a": base[:10], "b": base[5:]}, step=1, rng=False).wait("durable", timeout=60)
    agent.close()
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(
        found, StorageReader(daemon.directory / "step-1"), planner=planner, no_dist=True
    )
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": base[:10].tolist(),
        "b": base[5:].tolist(),
    }


def test_an_agent_of_this_process_is_used(daemon: LentDaemon) -> None:
    agent = Agent(daemon.job, socket=daemon.home.socket)
    agent.snapshot(state(1), step=10).wait("durable", timeout=60)
    dcp.save(
        state(2),
        storage_writer=StorageWriter(daemon.directory / "best", socket=daemon.home.socket),
    )
    assert agent.attempt == 1
    agent.snapshot(state(3), step=12).wait("durable", timeout=60)
    going_back = StorageWriter(daemon.directory / "step-3", socket=daemon.home.socket)
    assert "recover() to go back" in refused(dcp.save, state(), storage_writer=going_back)
    again = StorageWriter(daemon.directory / "best", socket=daemon.home.socket, overwrite=True)
    assert (
        "tag 'best' is taken in attempt 1 of this process's own Agent, which cannot be overwritten"
        in refused(dcp.save, state(), storage_writer=again)
    )
    agent.close()
    assert directories(daemon.directory) == [
        "best.a0001",
        "step-00000010.a0001",
        "step-00000012.a0001",
    ]


# -- saving again


@pytest.mark.usefixtures("processes")
def test_a_name_that_is_taken_is_refused(spot: Place) -> None:
    dcp.save(state(1), storage_writer=spot.writer("taken"))
    before = spot.files()
    reason = refused(dcp.save, state(2), storage_writer=spot.writer("taken"))
    assert reason.startswith("AlreadyExists: ")
    assert reason.endswith("pass overwrite=True")
    assert spot.files() == before
    assert same(Checkpoint.open(spot.path("taken")).load(), state(1))


@pytest.mark.usefixtures("processes")
def test_overwrite_replaces_the_checkpoint(spot: Place) -> None:
    for seed in (1, 2, 3):
        dcp.save(state(seed), storage_writer=spot.writer("latest", overwrite=True))
        loaded = blank()
        dcp.load(loaded, storage_reader=StorageReader(spot.path("latest")))
        assert same(loaded, state(seed))
    if spot.daemon is None:
        # Nothing of the earlier checkpoints is left.
        assert [len(files) for files in spot.files().values()] == [3]
    else:
        assert directories(spot.daemon.directory) == ["latest.a0003"]


def test_a_part_is_spread_over_several_files(tmp_path: Path) -> None:
    """A save in one file follows in the same place.

    Other files beside it are left alone.
    """
    (tmp_path / "notes.txt").write_text("mine")
    for files, seed in ((3, 1), (2, 2), (1, 3)):
        dcp.save(
            state(seed),
            storage_writer=StorageWriter(
                tmp_path, overwrite=True, codec="raw", files_per_rank=files
            ),
        )
        assert len(list(tmp_path.glob("*.ckpt"))) == files
        loaded = blank()
        dcp.load(loaded, storage_reader=StorageReader(tmp_path))
        assert same(loaded, state(seed))
        with Checkpoint.open(tmp_path) as checkpoint:
            checkpoint.verify()
            assert same(checkpoint.load(), state(seed))
    assert sorted(path.name for path in tmp_path.iterdir())[:3] == [
        ".metadata",
        "manifest.json",
        "notes.txt",
    ]


def test_a_reader_of_an_overwritten_checkpoint_can_finish(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=StorageWriter(tmp_path, files_per_rank=3))
    with Checkpoint.open(tmp_path) as checkpoint:
        for seed in (2, 3):
            dcp.save(state(seed), storage_writer=StorageWriter(tmp_path, overwrite=True))
        checkpoint.verify()
        assert same(checkpoint.load(), state(1))
        assert same(Checkpoint.open(tmp_path).load(), state(3))
    dcp.save(state(4), storage_writer=StorageWriter(tmp_path, overwrite=True))
    assert len(list(tmp_path.iterdir())) == 3


def test_bytes_per_file_limits_the_length_of_files(tmp_path: Path) -> None:
    large = {"weight": torch.arange(12 << 20, dtype=torch.float32)}  # 48 MiB
    dcp.save(large, storage_writer=StorageWriter(tmp_path, codec="raw", bytes_per_file=20 << 20))
    lengths = [path.stat().st_size for path in tmp_path.glob("*.ckpt")]
    assert len(lengths) == 3  # of two chunks of 8 MiB
    assert max(lengths) <= 20 << 20
    loaded = {"weight": torch.zeros(12 << 20)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path))
    assert torch.equal(loaded["weight"], large["weight"])


def test_impossible_numbers_and_lengths_of_files_are_refused() -> None:
    with pytest.raises(CkptdError, match="files_per_rank is 0; expected 1 to 64"):
        StorageWriter(files_per_rank=0)
    with pytest.raises(CkptdError, match="bytes_per_file is 1000; expected 0"):
        StorageWriter(bytes_per_file=1000)


def test_overwriting_keeps_a_pinned_checkpoint(daemon: LentDaemon) -> None:
    path = daemon.directory / "latest"
    for seed in (1, 2, 3):
        dcp.save(
            state(seed),
            storage_writer=StorageWriter(path, socket=daemon.home.socket, overwrite=True),
        )
        if seed == 1:
            pin(path.parent / "latest.a0001", remove=False)
    assert directories(path.parent) == ["latest.a0001", "latest.a0003"]
    assert same(Checkpoint.open(path.parent / "latest.a0001").load(), state(1))


def test_a_step_behind_the_last_begins_a_new_attempt(daemon: LentDaemon) -> None:
    for number in (7, 9, 8):
        dcp.save(
            state(number),
            storage_writer=StorageWriter(
                daemon.directory / f"step-{number}", socket=daemon.home.socket
            ),
        )
    leave_all()
    assert directories(daemon.directory) == [
        "step-00000007.a0001",
        "step-00000008.a0002",
        "step-00000009.a0001",
    ]


def test_files_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=StorageWriter(tmp_path))
    left = tmp_path / names.part_file(0, names.new_nonce())
    left.write_bytes(b"half")
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    dcp.save(state(2), storage_writer=StorageWriter(tmp_path, overwrite=True))
    assert not left.exists()
    assert mine.exists()


# -- checkpoints of other tools, and the marker for programs that look for `.metadata`


def stock(path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(path))


def hugging_face(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (stock, "torch.distributed.checkpoint itself (.metadata)"),
        (hugging_face, "Hugging Face (model"),
    ],
)
def test_a_save_beside_a_checkpoint_of_another_tool_is_refused(
    spot: Place, make: Callable[[Path], None], said: str
) -> None:
    for name in ("theirs", "step-7"):
        make(spot.path(name))
        before = sorted(spot.path(name).iterdir())
        error = refused(dcp.save, {"a": torch.zeros(3)}, storage_writer=spot.writer(name))
        assert error.startswith(f"AlreadyExists: {spot.path(name)} holds a checkpoint of {said}")
        assert sorted(spot.path(name).iterdir()) == before
    assert directories(spot.base) == ["step-7", "theirs"]


def test_a_save_of_each_rank_beside_a_checkpoint_of_dcp_is_refused(tmp_path: Path) -> None:
    stock(tmp_path)
    with pytest.raises(
        AlreadyExists, match="holds a checkpoint of torch.distributed.checkpoint itself"
    ):
        dcp.save(
            {"a": torch.zeros(3)}, storage_writer=StorageWriter(tmp_path), use_collectives=False
        )
    dcp.save(
        {"a": torch.zeros(3)},
        storage_writer=dcp.FileSystemWriter(tmp_path / "x"),
        use_collectives=False,
    )
    with pytest.raises(
        AlreadyExists,
        match=r"holds a checkpoint of torch.distributed.checkpoint itself \(__0.metadata\)",
    ):
        dcp.save(
            {"a": torch.zeros(3)},
            storage_writer=StorageWriter(tmp_path / "x"),
            use_collectives=False,
        )


def test_overwriting_a_checkpoint_of_dcp_leaves_nothing_that_dcp_would_read(tmp_path: Path) -> None:
    stock(tmp_path)
    dcp.save({"a": torch.full((3,), 2.0)}, storage_writer=StorageWriter(tmp_path, overwrite=True))
    assert Checkpoint.open(tmp_path).load()["a"].tolist() == [2.0] * 3
    with pytest.raises(pickle.UnpicklingError):
        dcp.FileSystemReader(tmp_path).read_metadata()


def test_a_checkpoint_in_the_root_of_a_daemon_has_no_marker(daemon: LentDaemon) -> None:
    spot = Place(daemon.directory, daemon)
    spot.base.mkdir()
    dcp.save({"a": torch.ones(3)}, storage_writer=spot.writer("first"))
    assert list(spot.base.rglob("manifest.json"))
    assert not list(spot.base.rglob(".metadata"))
    leave_all()


def test_programs_that_look_for_metadata_find_a_checkpoint_outside_every_root(
    tmp_path: Path,
) -> None:
    """DCP's own reader refuses the marker, and ckptd's own checks do not take it for a
    checkpoint of DCP.
    """
    spot = Place(tmp_path, None)
    dcp.save({"a": torch.ones(3)}, storage_writer=spot.writer("first"))
    marker = spot.path("first") / ".metadata"
    assert marker.read_bytes() == MARKER
    with pytest.raises(pickle.UnpicklingError, match="invalid load key, '#'"):
        dcp.FileSystemReader(spot.path("first")).read_metadata()
    assert refused(dcp.save, {"a": torch.zeros(3)}, storage_writer=spot.writer("first")).startswith(
        f"AlreadyExists: Checkpoint already exists in {spot.path('first')}"
    )
    dcp.save({"a": torch.zeros(3)}, storage_writer=spot.writer("first", overwrite=True))
    assert Checkpoint.open(spot.path("first")).load()["a"].tolist() == [0.0] * 3
    assert marker.read_bytes() == MARKER


def test_a_marker_that_cannot_be_written_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failpoints.arm("marker.written=error(ENOSPC)")
    try:
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path))
    finally:
        failpoints.arm("")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"the checkpoint in {tmp_path} is durable, but programs that look for .metadata will miss "
        f"it: [Errno 28] No space left on device"
    ]
    assert len(list(tmp_path.iterdir())) == 2
    assert "already exists" in refused(
        dcp.save, {"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path)
    )
    # Repaired by the next save, although it was refused.
    assert (tmp_path / ".metadata").read_bytes() == MARKER
    (tmp_path / "manifest.json").unlink()
    failpoints.arm("marker.starting=error(EIO)")
    try:
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path))
    finally:
        failpoints.arm("")
    assert not (tmp_path / ".metadata").exists()  # deleted when the save began


# -- planners


class Renamed(DefaultSavePlanner):
    """Gives every name a prefix."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(
            {f"old-{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator
        )


class Halved(DefaultSavePlanner):
    """Saves as float16, as in DCP's documentation."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        item = super().resolve_data(write_item)
        return item if write_item.type is WriteItemType.BYTE_IO else item.to(torch.float16)  # type: ignore[union-attr]


class HalvedUnawares(DefaultSavePlanner):
    """Resolves to another dtype than it has planned."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.to(torch.float16) if isinstance(found, torch.Tensor) else found


class Extra(DefaultSavePlanner):
    """Adds planner data of its own, as in DCP's documentation."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(
            metadata, planner_data={**metadata.planner_data, "my-note": {"seen": (1, 2)}}
        )


class Reading(DefaultLoadPlanner):
    """Records what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        self.planner_data = metadata.planner_data

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.calls.append("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.calls.append(f"resolve {read_item.dest_index.fqn}")
        return torch.empty(read_item.lengths, dtype=torch.float64)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.calls.append(f"commit {read_item.dest_index.fqn}")
        super().resolve_tensor(read_item).copy_(tensor * 2)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.calls.append(f"bytes {read_item.dest_index.fqn}")
        super().load_bytes(read_item, value)


@pytest.mark.usefixtures("processes")
def test_a_planner_may_rename_keys(spot: Place) -> None:
    dcp.save(
        {"a": torch.arange(4), "b": 2}, storage_writer=spot.writer("renamed"), planner=Renamed()
    )
    assert same(
        Checkpoint.open(spot.path("renamed")).load(), {"old-a": torch.arange(4), "old-b": 2}
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("planner", [Halved, HalvedUnawares])
def test_a_planner_may_cast_tensors(spot: Place, planner: type[DefaultSavePlanner]) -> None:
    values = torch.randn(5000)
    dcp.save({"a": values, "b": 2}, storage_writer=spot.writer("cast"), planner=planner())
    with Checkpoint.open(spot.path("cast")) as checkpoint:
        assert checkpoint.metadata("a") == (torch.float16, torch.Size([5000]))
    loaded = {"a": torch.zeros(5000), "b": 0}
    dcp.load(loaded, storage_reader=StorageReader(spot.path("cast")))
    assert same(loaded, {"a": values.half().float(), "b": 2})


@pytest.mark.usefixtures("processes")
def test_planner_data_comes_back(spot: Place) -> None:
    dcp.save({"a": torch.arange(4)}, storage_writer=spot.writer("extra"), planner=Extra())
    planner = Reading()
    dcp.load(
        {"a": torch.zeros(4)}, storage_reader=StorageReader(spot.path("extra")), planner=planner
    )
    assert planner.planner_data == {"a": ("a",), "my-note": {"seen": (1, 2)}}


@pytest.mark.usefixtures("processes")
def test_storage_meta_names_save_and_load(spot: Place) -> None:
    writer, reader = spot.writer("meta"), StorageReader(spot.path("meta"))
    metadata = dcp.save({"a": torch.arange(4)}, storage_writer=writer)
    found = reader.read_metadata().storage_meta
    assert found is not None
    assert metadata.storage_meta is not None
    assert (str(found.checkpoint_id), found.save_id, found.load_id) == (
        str(spot.path("meta")),
        writer.save_id,
        reader.load_id,
    )
    assert metadata.storage_meta.save_id == writer.save_id
    reader.close()


@pytest.mark.usefixtures("processes")
def test_a_load_planner_may_make_its_own_tensors(spot: Place) -> None:
    dcp.save({"a": torch.arange(4.0), "b": 2}, storage_writer=spot.writer("own"))
    planner, loaded = Reading(), {"a": torch.zeros(4), "b": 0}
    dcp.load(loaded, storage_reader=StorageReader(spot.path("own")), planner=planner)
    assert same(loaded, {"a": torch.arange(4.0) * 2, "b": 2})
    assert planner.calls == ["finish_plan", "resolve a", "commit a", "bytes b"]


@pytest.mark.usefixtures("processes")
def test_plans_that_are_cached(spot: Place) -> None:
    """DCP then gives the writer the plan of the first save."""
    writer = spot.writer("unused")
    for n in range(3):
        tensor = torch.full((1000,), float(n))
        dcp.save(
            {"a": tensor},
            checkpoint_id=spot.path(f"save-{n}"),
            storage_writer=writer,
            planner=Cached(),
        )
    assert [Checkpoint.open(spot.path(f"save-{n}")).tensor("a")[0].item() for n in range(3)] == [
        0.0,
        1.0,
        2.0,
    ]


class Cached(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


# -- planners that are wrong


class Dropping(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return replace(new_plan, items=new_plan.items[1:])


class Doubling(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return replace(new_plan, items=[*new_plan.items, new_plan.items[0]])


class Inventing(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        del metadata.state_dict_metadata["b"]
        return plans, metadata


class OfHalfATensor(DefaultSavePlanner):
    """Saves the first two elements of four, and says so in its metadata.

    A reader could not tell the missing ones from damage.
    """

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(
            plan,
            items=[
                replace(plan.items[0], tensor_data=half(plan.items[0].tensor_data)),
                *plan.items[1:],
            ],
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        entries = {
            item.index.fqn: TensorStorageMetadata(
                item.tensor_data.properties, item.tensor_data.size, [item.tensor_data.chunk]
            )
            for plan in all_plans
            for item in plan.items
            if item.tensor_data is not None
        }
        return all_plans, Metadata(state_dict_metadata=dict(entries))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return torch.zeros(2) if write_item.index.fqn == "a" else super().resolve_data(write_item)


def half(data: TensorWriteData | None) -> TensorWriteData:
    assert data is not None
    return replace(data, chunk=ChunkStorageMetadata(torch.Size([0]), torch.Size([2])))


class OfAnotherShape(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return torch.zeros(3)


class Unsure(DefaultSavePlanner):
    """Resolves to another dtype at each call."""

    asked = 0

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.asked += 1
        return torch.zeros(4, dtype=torch.float32 if self.asked % 2 else torch.float64)


class Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        raise KeyError("lost")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("planner", "reason"),
    [
        (Dropping, "InvalidRequest: the planner has dropped a; nothing was saved"),
        (
            Doubling,
            "InvalidRequest: the planner writes a twice on one rank; each item belongs to one "
            "rank, once",
        ),
        (
            Inventing,
            "InvalidRequest: the planner has written items that its metadata lacks: b; nothing "
            "was saved",
        ),
        (
            OfHalfATensor,
            "InvalidRequest: the planner's items do not make up whole tensors: a: only 2 of 4 "
            "elements are stored; nothing was saved",
        ),
        (
            OfAnotherShape,
            "InvalidRequest: a: the planner's item has shape [4], but resolves to a tensor of "
            "shape [3]",
        ),
        (
            Unsure,
            "InvalidRequest: a: the planner resolves it to another dtype or shape than it did "
            "when the save began",
        ),
        (Failing, "KeyError: 'lost'"),
    ],
)
def test_a_planner_that_is_wrong_saves_nothing(
    spot: Place, planner: type[DefaultSavePlanner], reason: str
) -> None:
    wrong = (
        {"a": torch.zeros(4)} if planner is Unsure else {"a": torch.zeros(4), "b": torch.zeros(4)}
    )
    writer = spot.writer("wrong")
    assert refused(dcp.save, wrong, storage_writer=writer, planner=planner()) == reason
    writer.close()
    assert spot.files() == {}
    dcp.save(wrong, storage_writer=spot.writer("wrong"))
    assert same(Checkpoint.open(spot.path("wrong")).load(), wrong)


class IntoAnotherShape(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.zeros(3)


class IntoNothing(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.zeros(4, device="meta")


class Beyond(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return replace(plan, items=[replace(item, lengths=torch.Size([5])) for item in plan.items])


class Elsewhere(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return replace(
            plan,
            items=[
                replace(item, storage_index=replace(item.storage_index, fqn="c"))
                for item in plan.items
            ],
        )


@pytest.mark.parametrize(
    ("planner", "reason"),
    [
        (
            IntoAnotherShape,
            "StructureMismatch: a: the planner reads a piece of shape [4] into a tensor of shape "
            "[3]",
        ),
        (
            IntoNothing,
            "StructureMismatch: a: the planner reads into a tensor on the meta device, which has "
            "no memory",
        ),
        (Beyond, "StructureMismatch: a: the planner reads [5] from [0], and [4] are stored there"),
        (Elsewhere, "NotFound: no tensor 'c'; the checkpoint has 1, such as a"),
    ],
)
def test_a_wrong_load_planner_is_refused(
    tmp_path: Path, planner: type[DefaultLoadPlanner], reason: str
) -> None:
    dcp.save({"a": torch.arange(4)}, storage_writer=StorageWriter(tmp_path))
    loaded = {"a": torch.zeros(4)}
    assert (
        refused(dcp.load, loaded, storage_reader=StorageReader(tmp_path), planner=planner())
        == reason
    )
    assert same(loaded, {"a": torch.zeros(4)})


# -- bad input


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(MARK),)


MARK = Path("unset")


@pytest.mark.usefixtures("processes")
def test_a_buffer_of_bytes_is_data_and_no_code(spot: Place) -> None:
    """The train state of DCP's own example holds a BytesIO."""
    written = io.BytesIO(b"\x00position 7")
    written.seek(3)
    dcp.save({"a": torch.arange(4), "b": written}, storage_writer=spot.writer("buffer"))
    loaded: dict[str, Any] = {"a": torch.zeros(4, dtype=torch.int64), "b": io.BytesIO()}
    dcp.load(loaded, storage_reader=StorageReader(spot.path("buffer")))
    assert loaded["b"].getvalue() == b"\x00position 7"
    with Checkpoint.open(spot.path("buffer")) as checkpoint:
        tree = checkpoint.load()
    assert (tree["b"].getvalue(), tree["b"].tell()) == (b"\x00position 7", 3)


@pytest.mark.usefixtures("processes")
def test_values_that_need_pickled_code_are_refused(
    spot: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.MARK", tmp_path / "ran")
    state = {"a": torch.arange(4), "b": Hostile()}
    reason = refused(dcp.save, state, storage_writer=spot.writer("hostile"))
    assert reason.startswith(
        "UnsavableValue: b: the planner's bytes could not be loaded without running pickled code"
    )
    assert spot.files() == {}
    # Makes the hostile file that is refused below.
    dcp.save(state, storage_writer=spot.writer("hostile", weights_only=False))
    loaded = {"a": torch.zeros(4, dtype=torch.int64), "b": None}
    assert refused(dcp.load, loaded, storage_reader=StorageReader(spot.path("hostile"))).startswith(
        "UnsavableValue: b: "
    )
    with Checkpoint.open(spot.path("hostile")) as checkpoint:
        assert torch.equal(checkpoint.tensor("a"), torch.arange(4))
        with pytest.raises(CkptdError, match="b: it can only be loaded by running pickled code"):
            checkpoint.load()
    assert not MARK.exists()


def not_loaded(
    caplog: pytest.LogCaptureFixture, state: dict[str, Any], reader: StorageReader
) -> str:
    """Return what DCP raises when it loads, and the errors that ckptd logs.

    DCP of torch 2.9 to 2.11 does not say why it fails.
    """
    return "\n".join([refused(dcp.load, state, storage_reader=reader), *logged_errors(caplog)])


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelname) == ("ckptd.agent", "ERROR")
    ]


def test_an_error_is_logged_when_dcp_has_asked_for_the_metadata_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = StorageReader(tmp_path / "none")
    for _ in range(2):
        with pytest.raises(NotFound, match=f"^no checkpoint at {tmp_path}/none, "):
            reader.read_metadata()
        assert logged_errors(caplog) == []
        with pytest.raises(NotFound, match=f"^no checkpoint at {tmp_path}/none/rank-00000, "):
            reader.read_metadata(rank=0)
        assert logged_errors(caplog) == [
            f"no checkpoint at {tmp_path}/none, which is not a directory"
        ]
        caplog.clear()


def test_a_checkpoint_of_dcp_itself_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"{__name__}.MARK", tmp_path / "ran")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    assert "make one of ckptd from it with `ckptd import" in not_loaded(
        caplog, {}, StorageReader(tmp_path / "theirs")
    )
    assert not MARK.exists()


@pytest.mark.parametrize("found", ["nothing", "empty", "file"])
def test_a_directory_without_a_checkpoint_is_an_error(
    tmp_path: Path, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "it"
    if found == "empty":
        where.mkdir()
    elif found == "file":
        where.write_text("text")
    assert f"no checkpoint at {where}" in not_loaded(
        caplog, {"a": torch.zeros(1)}, StorageReader(where)
    )


def test_a_checkpoint_of_a_newer_format_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save({"a": torch.zeros(1)}, storage_writer=StorageWriter(tmp_path))
    manifest = tmp_path / "manifest.json"
    newer = manifest.read_bytes().replace(b'"version": 1', b'"version": 3')
    import hashlib

    body = newer[: newer.rindex(b'"sha256"')]
    manifest.write_bytes(body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode())
    sentence = "written by a newer ckptd (version 3): upgrade this one"
    assert sentence in not_loaded(caplog, {"a": torch.zeros(1)}, StorageReader(tmp_path))


@pytest.mark.usefixtures("processes")
def test_a_damaged_checkpoint_is_refused(spot: Place) -> None:
    dcp.save(state(1), storage_writer=spot.writer("damaged"))
    (part,) = spot.base.glob("*/rank-*.ckpt")
    with part.open("r+b") as file:
        file.seek(4096 + 100)
        file.write(b"\xff\xfe\xfd")
    assert refused(
        dcp.load, blank(), storage_reader=StorageReader(spot.path("damaged"))
    ).startswith("IntegrityError: ")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (
            {"a": torch.zeros(2, device="meta")},
            "UnsavableValue: a: a tensor on the meta device, which has no values",
        ),
        ({"~a": torch.zeros(2)}, "UnsavableValue: ~a: keys may not begin with '~'"),
        (
            {"a": torch.zeros(2).to_sparse()},
            "UnsavableValue: a: a tensor of layout torch.sparse_coo cannot be saved",
        ),
    ],
)
def test_a_value_that_cannot_be_saved_is_named(
    spot: Place, state: dict[str, Any], reason: str
) -> None:
    assert refused(dcp.save, state, storage_writer=spot.writer("cannot")).startswith(reason)
    assert spot.files() == {}


@pytest.mark.usefixtures("processes")
def test_keys_and_shapes_that_do_not_fit_are_refused(spot: Place) -> None:
    dcp.save({"a": torch.zeros(4)}, storage_writer=spot.writer("it"))
    assert "Missing key in checkpoint state_dict: b" in refused(
        dcp.load, {"b": torch.zeros(4)}, storage_reader=StorageReader(spot.path("it"))
    )
    assert (
        "Size mismatch between saved torch.Size([4]) and current: torch.Size([5]) for a"
        in refused(dcp.load, {"a": torch.zeros(5)}, storage_reader=StorageReader(spot.path("it")))
    )


@pytest.mark.parametrize("options", [{"path": "hdfs://bucket/it"}, {"codec": "lzma"}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(CkptdError):
        StorageWriter(**options)


def test_impossible_names_under_a_root_are_refused(daemon: LentDaemon) -> None:
    writer = StorageWriter(daemon.directory / "step-seven", socket=daemon.home.socket)
    assert "InvalidName" in refused(dcp.save, state(), storage_writer=writer)


def test_a_named_socket_that_is_missing_fails_the_save(tmp_path: Path) -> None:
    assert "no daemon listens at" in refused(
        dcp.save, state(), storage_writer=StorageWriter(tmp_path / "a", socket=tmp_path / "s")
    )
    assert not (tmp_path / "a").exists()


def test_a_writer_and_a_reader_need_a_path(caplog: pytest.LogCaptureFixture) -> None:
    assert "StorageWriter has no path" in refused_any(
        dcp.save, state(), storage_writer=StorageWriter()
    )
    assert "StorageReader has no path" in not_loaded(caplog, state(), StorageReader())


def refused_any(function: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises((dcp.CheckpointException, CkptdError)) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_the_checkpointers_of_experimental_dcp_are_refused(tmp_path: Path) -> None:
    experimental = pytest.importorskip("torch.distributed.checkpoint._experimental")
    both = experimental.SyncCheckpointer(
        writer=StorageWriter(tmp_path), reader=StorageReader(tmp_path)
    )
    with pytest.raises(
        InvalidRequest, match="pass StorageWriter to dcp.save or dcp.async_save instead$"
    ):
        both.save(str(tmp_path), {"a": torch.ones(3)})
    with pytest.raises(
        InvalidRequest,
        match=r"pass StorageReader to dcp.load, or call Checkpoint.open\(path\).load\(\)$",
    ):
        both.load(str(tmp_path), {"a": torch.ones(3)})
    both.close()
    assert list(tmp_path.iterdir()) == []
