"""Tests former bugs of `StorageWriter` and `StorageReader`: concurrent commits, deaths
and forks in between, other attempts, planners that reuse their memory, unusual tensors,
hostile files.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.testing._internal.two_tensor import TwoTensor

from ckptd.agent import Agent, Checkpoint, StorageReader, StorageWriter
from ckptd.agent.dcp.standalone import StandalonePart
from ckptd.agent.dcp.targets import leave_all
from ckptd.agent.plan.save_plan import Resolved
from ckptd.agent.read.checkpoint import opened_of
from ckptd.shared.codecs import codec
from ckptd.shared.errors import CkptdError, IntegrityError, NotFound
from ckptd.shared.formats.part_writer import Spread
from ckptd.shared.formats.plan import BLOB, Alias, Item, Plan, Region
from ckptd.shared.storage.standalone import StandaloneDirectory
from ckptd.shared.system.storage_seam import Closable
from tests.agent.dcp.test_storage_writer import Place, blank, refused, same, spot, state
from tests.shared.samples import WRITER
from tests.support import forks
from tests.support.daemons import Daemon
from tests.support.scripts import python
from tests.support.storage import source
from tests.support.strangers import KINDS, holding, open_place

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore::FutureWarning"
)
__all__ = ["spot"]


@pytest.fixture
def gpt(daemon: Daemon) -> Iterator[Path]:
    yield daemon.home.root / "gpt"
    leave_all()


# -- commits


@pytest.mark.parametrize("overwrite", [True, False])
def test_of_concurrent_saves_to_one_directory_one_is_whole(tmp_path: Path, overwrite: bool) -> None:
    for number in range(40):
        where = tmp_path / ("same" if overwrite else str(number))
        threads = [
            threading.Thread(target=try_save, args=(where, seed, overwrite)) for seed in (1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with Checkpoint.open(where) as checkpoint:
            assert checkpoint.tensor("a")[0].item() in (1.0, 2.0)
            assert checkpoint.verify() > 0


def try_save(where: Path, seed: int, overwrite: bool) -> None:
    try:
        dcp.save(
            {"a": torch.full((100,), float(seed))},
            storage_writer=StorageWriter(where, overwrite=overwrite),
        )
    except dcp.CheckpointException:
        assert not overwrite


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(5, "the directory could not be synced")]
)
def test_an_interruption_after_the_commit_does_not_undo_it(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = StandaloneDirectory.commit

    def interrupted(self: StandaloneDirectory, data: bytes, *, overwrite: bool, nonce: str) -> None:
        commit(self, data, overwrite=overwrite, nonce=nonce)
        raise error

    dcp.save(state(1), storage_writer=StorageWriter(tmp_path))
    monkeypatch.setattr(StandaloneDirectory, "commit", interrupted)
    with pytest.raises(BaseException):  # noqa: B017 (DCP wraps the one and not the other)
        dcp.save(state(2), storage_writer=StorageWriter(tmp_path, overwrite=True))
    assert same(Checkpoint.open(tmp_path).load(), state(2))


def planned() -> Resolved:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.zeros(4)}, None, True)
    return Resolved.of(
        planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0][0]),
        planner,
        weights_only=True,
    )


AT_THE_END = """
import sys, torch, torch.distributed.checkpoint as dcp
from ckptd.agent import StorageWriter
dcp.async_save({"a": torch.arange(5_000_000)}, storage_writer=StorageWriter(sys.argv[1]))
"""


@pytest.mark.usefixtures("processes")
def test_an_async_save_that_is_the_last_statement_is_finished(spot: Place) -> None:
    variables = {
        **os.environ,
        **({"CKPTD_SOCKET": str(spot.daemon.home.socket)} if spot.daemon else {}),
    }
    ended = python("-c", AT_THE_END, spot.path("last"), environment=variables)
    assert ended.returncode == 0, ended.stderr
    with Checkpoint.open(spot.path("last")) as checkpoint:
        assert torch.equal(checkpoint.tensor("a"), torch.arange(5_000_000))


def test_a_checkpoint_deleted_or_overwritten_while_it_is_opened_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    for number in (1, 2, 3):
        dcp.save(
            {"a": torch.full((2,), number)}, storage_writer=StorageWriter(tmp_path / str(number))
        )
    before = StandaloneDirectory(tmp_path / "1").read_manifest()
    for part in (tmp_path / "1").glob("rank-*"):
        part.unlink()
    (tmp_path / "1" / "manifest.json").unlink()
    with pytest.raises(NotFound):
        Checkpoint.of(StandaloneDirectory(tmp_path / "1"), "standalone", before)
    before = StandaloneDirectory(tmp_path / "2").read_manifest()
    dcp.save(
        {"a": torch.full((2,), 22)}, storage_writer=StorageWriter(tmp_path / "2", overwrite=True)
    )
    with Checkpoint.of(StandaloneDirectory(tmp_path / "2"), "standalone", before) as checkpoint:
        assert checkpoint.tensor("a")[0].item() == 22
        assert checkpoint.manifest.parts != before.parts
    for part in (tmp_path / "3").glob("rank-*"):
        part.unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        Checkpoint.open(tmp_path / "3")


# -- locks of a process that may only read


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", KINDS)
def test_locks_of_another_user_delay_only_the_sweep(kind: str) -> None:
    """The locks are on directory, manifest and part.

    An exclusive flock on the directory once blocked loads and saves for ever.
    """
    with open_place() as place:
        where = place / "latest"
        dcp.save(state(1), storage_writer=StorageWriter(where))
        with holding(kind, where, *where.iterdir()):
            loaded = blank()
            dcp.load(loaded, storage_reader=StorageReader(where))
            assert same(loaded, state(1))
            with Checkpoint.open(where) as checkpoint:
                dcp.save(state(2), storage_writer=StorageWriter(where, overwrite=True))
                assert same(checkpoint.load(), state(1))
            dcp.load(loaded, storage_reader=StorageReader(where))
            assert same(loaded, state(2))
            assert len(list(where.glob("*.ckpt"))) == 2
        dcp.save(state(3), storage_writer=StorageWriter(where, overwrite=True))
        assert same(Checkpoint.open(where).load(), state(3))
        assert len(list(where.iterdir())) == 3


@pytest.mark.usefixtures("processes")
def test_a_reader_without_the_lock_on_the_directory_keeps_its_parts() -> None:
    """The other process has ended when the checkpoint is overwritten, so that only the
    lock on the part is left.
    """
    with open_place() as place:
        where = place / "latest"
        dcp.save(state(1), storage_writer=StorageWriter(where, files_per_rank=3))
        with holding("flock-ex", where):
            checkpoint = Checkpoint.open(where)
        with checkpoint:
            dcp.save(state(2), storage_writer=StorageWriter(where, overwrite=True))
            checkpoint.verify()
            assert same(checkpoint.load(), state(1))
        dcp.save(state(3), storage_writer=StorageWriter(where, overwrite=True))
        assert len(list(where.iterdir())) == 3


@pytest.mark.usefixtures("processes")
def test_a_save_without_the_lock_on_the_directory_is_not_swept() -> None:
    with open_place() as place:
        where = place / "latest"
        dcp.save(state(1), storage_writer=StorageWriter(where))
        storage = StandaloneDirectory(where)
        with holding("flock-ex", where), storage.saving():
            part = StandalonePart(storage, 0, 1, codec.encoder("raw"), 1, Spread(2, 0))
            resolved = planned()
            part.write(resolved.lay_out(global_plan=b""), resolved, 0)
        begun = set(where.glob(f"rank-00000.{part.nonce.hex()}*"))
        unpublished = where / f"manifest.json.{part.nonce.hex()}.tmp"
        unpublished.write_bytes(b"{")
        dcp.save(state(2), storage_writer=StorageWriter(where, overwrite=True))
        assert begun
        assert set(where.iterdir()) >= {*begun, unpublished}
        part.close()
        dcp.save(state(3), storage_writer=StorageWriter(where, overwrite=True))
        assert len(list(where.iterdir())) == 3


def test_a_part_that_is_swept_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flock on the directory is missing, because another user may keep this process
    from taking it.
    """
    hold = StandaloneDirectory.hold
    swept: list[str] = []

    def late(self: StandaloneDirectory, file: str) -> Closable:
        if len(swept) < 2:
            swept.append(file)
            number = len(swept)
            dcp.save(state(number), storage_writer=StorageWriter(tmp_path, overwrite=True))
            assert not (tmp_path / file).exists()
        return hold(self, file)

    dcp.save(state(8), storage_writer=StorageWriter(tmp_path))
    monkeypatch.setattr(StandaloneDirectory, "hold", late)
    monkeypatch.setattr(
        StandaloneDirectory, "share", lambda self: source(os.open(self.path, os.O_RDONLY))
    )
    dcp.save(state(9), storage_writer=StorageWriter(tmp_path, overwrite=True))
    assert len(swept) == 2
    assert same(Checkpoint.open(tmp_path).load(), state(9))
    assert len(list(tmp_path.iterdir())) == 3


# -- attempts


def begin_another(socket: Path) -> None:
    Agent("gpt", socket=socket, takeover=True).close()


def test_saves_continue_after_another_process_has_saved_to_the_job(
    daemon: Daemon, gpt: Path
) -> None:
    dcp.save(state(1), storage_writer=StorageWriter(gpt / "one", socket=daemon.home.socket))
    process = forks.context().Process(target=begin_another, args=(daemon.home.socket,))
    process.start()
    process.join(60)
    for name in ("two", "three", "step-9"):
        dcp.save(state(2), storage_writer=StorageWriter(gpt / name, socket=daemon.home.socket))
    assert sorted(path.parent.name for path in gpt.glob("*/manifest.json")) == [
        "one.a0001",
        "step-00000009.a0003",
        "three.a0003",
        "two.a0003",
    ]


def save_own_paths(
    ready: Any, socket: Path, job: Path, number: int, said: Any, options: dict[str, Any]
) -> None:
    try:
        ready.wait(60)
        for save in range(3):
            writer = StorageWriter(job / f"of-{number}-{save}", socket=socket)
            dcp.save({"a": torch.full((300_000,), number)}, storage_writer=writer, **options)
        said.put("")
    except BaseException as error:
        said.put(repr(error))


@pytest.mark.parametrize("options", [{}, {"no_dist": True}])
def test_processes_that_save_paths_of_their_own_do_not_fence_one_another(
    daemon: Daemon, gpt: Path, options: dict[str, Any]
) -> None:
    context, savers = forks.context(), 4
    ready, said = context.Barrier(savers), context.Queue()
    arguments = [
        (ready, daemon.home.socket, gpt, number, said, options) for number in range(savers)
    ]
    processes = [context.Process(target=save_own_paths, args=each) for each in arguments]
    for process in processes:
        process.start()
    assert [said.get(timeout=120) for _ in processes] == [""] * savers
    for process in processes:
        process.join(60)
    for number in range(savers):
        for save in range(3):
            assert torch.equal(
                Checkpoint.open(gpt / f"of-{number}-{save}").load()["a"],
                torch.full((300_000,), number),
            )


def test_an_agent_that_is_made_later_is_used_too(daemon: Daemon, gpt: Path) -> None:
    dcp.save(state(1), storage_writer=StorageWriter(gpt / "one", socket=daemon.home.socket))
    agent = Agent("gpt", socket=daemon.home.socket)
    dcp.save(state(2), storage_writer=StorageWriter(gpt / "two", socket=daemon.home.socket))
    agent.snapshot(state(3), step=5).wait("durable", timeout=60)
    agent.close()
    assert sorted(path.parent.name for path in gpt.glob("*/manifest.json")) == [
        "one.a0001",
        "step-00000005.a0002",
        "two.a0002",
    ]


def test_overwriting_waits_for_a_running_save(daemon: Daemon, gpt: Path) -> None:
    writer = StorageWriter(socket=daemon.home.socket, overwrite=True)
    dcp.save(state(0), checkpoint_id=gpt / "latest", storage_writer=writer)
    names_ = ["precious", "latest", "latest", "more"]
    futures = [
        dcp.async_save(state(n), checkpoint_id=gpt / name, storage_writer=writer)
        for n, name in enumerate(names_, 1)
    ]
    for future in futures:
        future.result()  # type: ignore[union-attr]
    assert same(Checkpoint.open(gpt / "precious").load(), state(1))
    assert same(Checkpoint.open(gpt / "more").load(), state(4))


def test_a_larger_save_leaves_a_smaller_one_its_slot(daemon: Daemon, gpt: Path) -> None:
    writer = StorageWriter(socket=daemon.home.socket)
    small = {f"key-{n}": torch.tensor(n) for n in range(3000)}
    large = {"a": torch.arange(3_000_000)}
    futures = [
        dcp.async_save(
            small if n % 2 == 0 else large, checkpoint_id=gpt / f"save-{n}", storage_writer=writer
        )
        for n in range(4)
    ]
    for n, future in enumerate(futures):
        future.result()  # type: ignore[union-attr]
        assert same(Checkpoint.open(gpt / f"save-{n}").load(), small if n % 2 == 0 else large)


def test_a_stopped_daemon_does_not_delay_a_snapshot_beside_a_save(
    daemon: Daemon, gpt: Path
) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    agent.snapshot(state(1), step=1).wait("durable", timeout=60)
    agent._link.client.welcome = msgspec.structs.replace(
        agent._link.client.welcome, stall_budget=0.2
    )
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        holding = agent._link.calls
        held = threading.Event()
        release = threading.Event()

        def hold() -> None:
            with holding("save"):
                held.set()
                release.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        pending = agent.snapshot(state(2), step=2, on_busy="skip")
        assert (pending.state, str(pending.error)) == (
            "failed",
            "another save of this process is waiting for a slot",
        )
        release.set()
        thread.join()
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def test_a_bare_checkpoint_beside_those_of_a_daemon_is_refused_by_name(
    daemon: Daemon, gpt: Path
) -> None:
    dcp.save(state(1), storage_writer=StorageWriter(gpt / "latest", socket=daemon.home.socket))
    assert "only its daemon may save another one of this name" in refused(alone, gpt / "latest")
    alone(gpt / "other")
    assert "move it away" in refused(
        dcp.save, state(2), storage_writer=StorageWriter(gpt / "other", socket=daemon.home.socket)
    )
    (gpt / "latest").mkdir()
    (gpt / "latest" / "manifest.json").write_bytes((gpt / "other" / "manifest.json").read_bytes())
    with pytest.raises(NotFound, match="are checkpoints: name the one that you mean"):
        Checkpoint.open(gpt / "latest")


def alone(where: Path) -> None:
    """Save as a process without a daemon does."""
    leave_all()
    dcp.save(state(1), storage_writer=StorageWriter(where, overwrite=True))


@pytest.fixture(autouse=True)
def _nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_the_socket_of_a_dead_daemon_is_ignored(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "ckptd.sock"))
    dcp.save(state(1), storage_writer=StorageWriter(tmp_path / "alone"))
    assert (tmp_path / "alone" / "manifest.json").exists()


# -- planners


class Scratch(DefaultSavePlanner):
    """A planner that resolves everything in the same memory."""

    memory = torch.zeros(4)

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.memory.copy_(super().resolve_data(write_item))  # type: ignore[arg-type]


class ScratchLoad(DefaultLoadPlanner):
    memory = torch.zeros(4)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.memory

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)


@pytest.mark.usefixtures("processes")
def test_planners_may_reuse_their_memory(spot: Place) -> None:
    numbers = {name: torch.full((4,), float(n)) for n, name in enumerate("abc")}
    dcp.save(numbers, storage_writer=spot.writer("scratch"), planner=Scratch())
    loaded = {name: torch.full((4,), 9.0) for name in "abc"}
    dcp.load(loaded, storage_reader=StorageReader(spot.path("scratch")), planner=ScratchLoad())
    assert same(loaded, numbers)


class Shrinking(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        (item,) = new_plan.items
        assert item.tensor_data is not None
        data = replace(
            item.tensor_data, chunk=replace(item.tensor_data.chunk, sizes=torch.Size([2]))
        )
        return replace(new_plan, items=[replace(item, tensor_data=data)])

    def resolve_data(self, write_item: WriteItem) -> Any:
        return torch.zeros(2)


class TensorData(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(
            metadata, planner_data={**metadata.planner_data, "mean": torch.zeros(1)}
        )


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("planner", "reason"),
    [
        (
            Shrinking,
            "InvalidRequest: the planner writes in another size than its metadata says: a; "
            "nothing was saved",
        ),
        (
            TensorData,
            "UnsavableValue: the metadata's planner_data.mean: planner data cannot hold tensors; ",
        ),
    ],
)
def test_a_planner_that_is_wrong(
    spot: Place, planner: type[DefaultSavePlanner], reason: str
) -> None:
    assert refused(
        dcp.save, {"a": torch.zeros(40)}, storage_writer=spot.writer("wrong"), planner=planner()
    ).startswith(reason)
    assert spot.files() == {}


class ToBytes(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item).to(torch.int8)  # type: ignore[union-attr]


@pytest.mark.usefixtures("processes")
def test_a_parameter_that_is_cast_to_integers_can_be_read(spot: Place) -> None:
    dcp.save(
        {"a": torch.nn.Parameter(torch.ones(4))},
        storage_writer=spot.writer("cast"),
        planner=ToBytes(),
    )
    assert same(Checkpoint.open(spot.path("cast")).load(), {"a": torch.ones(4, dtype=torch.int8)})


def test_a_wrapper_without_memory_of_its_own_is_filled(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(4.0)}, storage_writer=StorageWriter(tmp_path))
    target = TwoTensor(torch.zeros(4), torch.zeros(4))
    dcp.load({"a": target}, storage_reader=StorageReader(tmp_path))
    assert torch.equal(target.a, torch.arange(4.0))


@pytest.mark.usefixtures("processes")
def test_very_many_values_are_saved_and_loaded(spot: Place) -> None:
    values = {f"key-{n}": n for n in range(2000)}
    dcp.save(values, storage_writer=spot.writer("many"))
    loaded = dict.fromkeys(values, -1)
    dcp.load(loaded, storage_reader=StorageReader(spot.path("many")))
    assert loaded == values


# -- hostile files


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(MARK),)


MARK = Path("unset")


class Logging(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        super().load_bytes(read_item, value)


def test_a_planner_that_overrides_load_bytes_runs_no_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.MARK", tmp_path / "ran")
    # Makes the hostile file that is refused below.
    writer = StorageWriter(tmp_path / "it", weights_only=False)
    dcp.save({"b": Hostile()}, storage_writer=writer)
    reason = refused(
        dcp.load, {"b": None}, storage_reader=StorageReader(tmp_path / "it"), planner=Logging()
    )
    assert reason.startswith("UnsavableValue: b: it can only be loaded by running pickled code")
    assert not MARK.exists()


@pytest.mark.parametrize("base", [Item("b", BLOB, (64,), (0,), (64,), None, 0), None])
def test_an_alias_of_a_blob_or_of_several_shards_is_refused(base: Item | None) -> None:
    items = (
        [base]
        if base
        else [Item("b", "uint8", (96,), (32 * n,), (32,), None, 32 * n) for n in range(2)]
    )
    alias = Alias("y", "b", 40, "uint8", (8,), (1,))
    document = Plan(
        regions=[Region(0, 64, 1)], items=items, aliases=[alias], metadata=None, writer=WRITER
    ).encode()
    with pytest.raises(IntegrityError, match="alias 'y' has an impossible base"):
        Plan.decode(document)


def test_a_damaged_manifest_is_not_taken_for_checkpoints_of_each_rank(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1)}, storage_writer=StorageWriter(tmp_path / "rank-00000"))
    dcp.save({"a": torch.zeros(1)}, storage_writer=StorageWriter(tmp_path))
    (tmp_path / "manifest.json").write_bytes(b"{}")
    loaded = {"a": torch.full((1,), 5.0)}
    with pytest.raises((dcp.CheckpointException, CkptdError)):
        dcp.load(loaded, storage_reader=StorageReader(tmp_path))
    assert loaded["a"].item() == 5.0


def test_shards_that_do_not_make_up_a_tensor_are_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(40)}, storage_writer=StorageWriter(tmp_path, codec="raw"))
    with Checkpoint.open(tmp_path) as checkpoint:
        (shard,) = opened_of(checkpoint).saved.shards["a"]
        cut = replace_item(shard.item, sizes=(2,))
        opened_of(checkpoint).saved.shards["a"] = [msgspec.structs.replace(shard, item=cut)]
        with pytest.raises(IntegrityError, match="a: only 2 of 40 elements are stored"):
            checkpoint.load()
        with pytest.raises(IntegrityError, match="a: only 2 of 40 elements are stored"):
            checkpoint.tensor("a", dtype=torch.float32)


def replace_item(item: Item, sizes: tuple[int, ...]) -> Item:
    return Item(
        item.fqn,
        item.dtype,
        item.size,
        item.offsets,
        sizes,
        item.stride,
        item.offset,
        item.device,
        item.requires_grad,
    )
