"""Tests `Checkpoint`: it is opened lazily, read from many threads at once, in any
dtype, and not deleted while it is open.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.agent import Checkpoint, StorageWriter
from ckptd.agent.read.checkpoint import opened_of
from ckptd.agent.read.loader import load
from ckptd.shared.errors import Busy, IntegrityError, NotFound, UnsavableValue
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.storage import locks
from ckptd.shared.storage.repository import Repository
from ckptd.shared.storage.standalone import StandaloneDirectory
from tests.crash.hostile import forge
from tests.crash.nonsense import Case, lay_out, simple_case
from tests.shared.samples import write_checkpoint
from tests.support.cases import each_case
from tests.support.descriptors import opened

Ext, pack = msgspec.msgpack.Ext, msgspec.msgpack.encode
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

COUNT, ELEMENTS = 24, 500_000
"""Tensors of 2 MB, four in each chunk."""


def value(number: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(number))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("checkpoint") / "it"
    state = {f"w{number}": value(number) for number in range(COUNT)}
    dcp.save({**state, "epoch": 3}, storage_writer=StorageWriter(where), no_dist=True)
    return where


@pytest.fixture
def checkpoint(saved: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(saved) as opened:
        yield opened


def called() -> int:
    """Return the number of bytes that this process has read."""
    found = re.search(r"^rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


def test_opening_reads_no_chunk_and_a_tensor_only_its_own(saved: Path) -> None:
    size = sum(file.stat().st_size for file in saved.iterdir())
    before = called()
    with Checkpoint.open(saved) as checkpoint:
        assert checkpoint.metadata("w7") == (torch.float32, torch.Size([ELEMENTS]))
        assert len(checkpoint.keys()) == COUNT
        opened = called()
        assert opened - before < size // 50
        assert torch.equal(checkpoint.tensor("w7"), value(7))
        assert called() - opened < size // 2
        whole = called()
        assert torch.equal(checkpoint.tensor("w7", slices=(slice(100, 200),)), value(7)[100:200])
        assert called() - whole < size // 2


def test_many_threads_may_read_at_once(checkpoint: Checkpoint) -> None:
    def read(number: int) -> bool:
        name, dtype = (
            f"w{number % COUNT}",
            (torch.float32, torch.float16, torch.float64)[number % 3],
        )
        if number % 2:
            part = slice(number * 1_000, number * 1_000 + 5_000)
            return torch.equal(
                checkpoint.tensor(name, dtype=dtype, slices=(part,)),
                value(number % COUNT)[part].to(dtype),
            )
        return torch.equal(checkpoint.tensor(name, dtype=dtype), value(number % COUNT).to(dtype))

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(read, range(4 * COUNT)))


def test_a_checkpoint_can_be_read_in_two_dtypes(checkpoint: Checkpoint) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        read = checkpoint.tensor("w3", dtype=dtype)
        assert read.dtype == dtype
        assert torch.equal(read, value(3).to(dtype))


def test_an_open_checkpoint_is_not_deleted(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SECONDS", 0.1)
    storage = StandaloneDirectory(saved)
    with (
        Checkpoint.open(saved),
        Checkpoint.open(saved),
        pytest.raises(Busy, match="is being read"),
        storage.exclude("", ""),
    ):
        pass
    with storage.exclude("", ""), pytest.raises(Busy, match="has been locked for deletion"):
        Checkpoint.open(saved)
    Checkpoint.open(saved).close()


def test_a_deleters_lock_delays_a_reader_until_it_is_released(saved: Path) -> None:
    storage = StandaloneDirectory(saved)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as looking:
        looking.enter_context(storage.exclude("", ""))
        opening = pool.submit(Checkpoint.open, saved)
        time.sleep(0.2)
        assert not opening.done()
        looking.close()
        opening.result().close()


def test_a_forked_child_holds_no_lease_of_a_closed_checkpoint(saved: Path) -> None:
    opened = Checkpoint.open(saved)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        opened.close()
        with StandaloneDirectory(saved).exclude("", ""):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_close_releases_the_lease_and_the_descriptors(saved: Path) -> None:
    before = opened(saved)
    for _ in range(3):
        Checkpoint.open(saved).close()
    assert opened(saved) == before


def test_a_lock_that_comes_after_the_deletion_raises_not_found(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is unlinked after it is opened and before it is locked."""
    manifest = saved / "manifest.json"
    data = manifest.read_bytes()
    monkeypatch.setattr("fcntl.flock", lambda fd, kind: manifest.unlink())
    with pytest.raises(NotFound, match="no checkpoint"):
        Checkpoint.open(saved)
    monkeypatch.undo()
    manifest.write_bytes(data)
    Checkpoint.open(saved).close()


def test_only_the_newest_manifest_is_read_if_the_names_tell_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step=step, attempt=2)
    write_checkpoint(tmp_path, step=9, attempt=1)
    read: list[str] = []
    read_manifest = Repository.read_manifest

    def noted(self: Repository, job: str, tag: str) -> Manifest:
        read.append(tag)
        return read_manifest(self, job, tag)

    monkeypatch.setattr(Repository, "read_manifest", noted)
    with Checkpoint.open(tmp_path / "gpt") as checkpoint:
        assert (checkpoint.attempt, checkpoint.step) == (2, 3)
    assert read == ["step-00000003.a0002"]
    read.clear()
    with Checkpoint.open(tmp_path / "gpt", 9) as checkpoint:
        assert (checkpoint.attempt, checkpoint.step) == (1, 9)
    assert read == ["step-00000009.a0001"]


def test_a_damaged_newest_checkpoint_is_passed_over_unless_it_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, step=step, attempt=1)
    (tmp_path / "gpt" / "step-00000002.a0001" / "manifest.json").write_bytes(b"{}")
    with Checkpoint.open(tmp_path / "gpt") as checkpoint:
        assert checkpoint.step == 1
    for which in (2, "step-00000002", "step-00000002.a0001"):
        with pytest.raises(IntegrityError, match="manifest is cut short"):
            Checkpoint.open(tmp_path / "gpt", which)


def test_parameters_views_and_other_dtypes_are_filled_alike(tmp_path: Path) -> None:
    """Whole tensors are read straight into place.

    The others go through DCP's planner, or through a temporary.
    """
    saved = {
        name: torch.arange(12.0).reshape(3, 4) + number
        for number, name in enumerate(("plain", "parameter", "other", "turned"))
    }
    dcp.save(saved, storage_writer=StorageWriter(tmp_path / "it"), no_dist=True)
    places = {
        "plain": torch.zeros(3, 4), "parameter": torch.nn.Parameter(torch.zeros(3, 4)),
        "other": torch.zeros(3, 4, dtype=torch.float64), "turned": torch.zeros(4, 3).T,
    }  # fmt: skip
    with Checkpoint.open(tmp_path / "it") as checkpoint:
        load(opened_of(checkpoint).saved, places)
    for name, place in places.items():
        assert torch.equal(place.detach().to(torch.float32), saved[name]), name


Change = Callable[[Case], Any]


def odd_value(value: Any) -> Change:
    return lambda case: case.parts[0].values["state"].update(odd=value)


def two_dtypes(case: Case) -> None:
    part = case.parts[0]
    halves = ((0, "float32"), (2, "int32"))
    part.items = [
        ["w", dtype, [4, 2], [at, 0], [2, 2], None, 0, "cpu", False] for at, dtype in halves
    ]
    lay_out(part)


def sparse(size: list[int]) -> msgspec.msgpack.Ext:
    fields = {
        "layout": "torch.sparse_coo",
        "size": size,
        "coalesced": False,
        "indices": Ext(1, b"i"),
        "values": Ext(1, b"v"),
    }
    return Ext(24, pack(["sparse", "", fields]))


UNSOUND: list[tuple[Change, str]] = [
    (odd_value(Ext(1, b"nobody")), "its values name the tensor 'nobody', which no part has"),
    (odd_value(Ext(1, b"~x")), "its values name the tensor '~x', which no part has"),
    (odd_value(Ext(18, b"garbage")), "a value whose bytes are not those of torch.save"),
    (odd_value(Ext(5, pack([[[1], 2]]))), "values document cannot be read"),
    (odd_value(Ext(24, pack(["sparse", "", {"layout": "?", "size": [1]}]))), "a value of kind "
        "sparse cannot be made from its fields"),
    (odd_value(sparse([0, 0])), "a value of kind sparse cannot be made from its fields"),
    (lambda case: vars(case.parts[0]).update(values={"rng": None}), "the values document of rank 0 "
        "has no state"),
    (lambda case: vars(case.parts[0]).update(values=7), "the values document of rank 0 has no "
        "state"),
    (lambda case: case.parts[0].values.update(versions={"model": {"": 7}}), "'versions' must be "
        "a map from strings to maps of maps"),
    (lambda case: two_dtypes(case), "w has two dtypes: int32 and float32"),
]  # fmt: skip


@each_case(("change", "words"), UNSOUND)
def test_verify_finds_everything_that_load_would_refuse(
    tmp_path: Path, change: Change, words: str
) -> None:
    case = simple_case(("w", "float32", [4, 2]), ("i", "int64", [2, 3]), ("v", "float32", [3]))
    change(case)
    assert forge(case, tmp_path, 1)
    for how in ("verify", "load"):
        with (
            pytest.raises(IntegrityError, match=re.escape(words)),
            Checkpoint.open(tmp_path / "gpt", 1) as opened,
        ):
            getattr(opened, how)()


def test_verify_makes_records_from_their_tensors(tmp_path: Path) -> None:
    case = simple_case(("w", "float32", [4, 2]), ("i", "int64", [2, 3]), ("v", "float32", [3]))
    odd_value(sparse([5, 5]))(case)
    assert forge(case, tmp_path, 1)
    with Checkpoint.open(tmp_path / "gpt") as opened:
        assert opened.verify() > 0
        assert opened.load()["odd"].shape == (5, 5)


def test_names_of_parameters_without_a_hash_make_no_optimizer(tmp_path: Path) -> None:
    case = simple_case(("w", "float32", [4, 2]))
    odd_value({"state": {}, "param_groups": [{"params": [[1], {}]}]})(case)
    assert forge(case, tmp_path, 1)
    with Checkpoint.open(tmp_path / "gpt") as opened:
        opened.verify()
        assert opened.load()["odd"]["param_groups"] == [{"params": [[1], {}]}]


def test_verify_says_what_this_process_cannot_judge(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = simple_case(("w", "float3/4", [4, 2]), ("blob", "uint8", [3]))
    part = case.parts[0]
    part.items[-1][1] = "bytes"
    assert part.metadata is not None
    part.metadata["blob"] = {"dtype": "bytes"}
    assert forge(case, tmp_path, 1)
    with Checkpoint.open(tmp_path / "gpt", 1) as opened:
        unchecked: list[str] = []
        opened.verify(unchecked)
        assert [said.split(",")[0] for said in unchecked] == [
            "blob: it can only be loaded by running pickled code", "w has dtype float3",
        ]  # fmt: skip
        assert caplog.messages == []
        opened.verify()
        assert (
            "is sound as far as this process can tell. Not checked: blob: it can only"
            in caplog.messages[0]
        )
        with pytest.raises(UnsavableValue):
            opened.load()
