"""Tests `Checkpoint`: it is opened lazily, read from many threads at once, in any dtype, and not deleted while it is open."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.agent import Checkpoint, StorageWriter
from ckptd.shared.errors import Busy, NotFound
from ckptd.shared.storage import locks
from ckptd.shared.storage.standalone import StandaloneCheckpoint
from tests.support.descriptors import opened

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
        name, dtype = f"w{number % COUNT}", (torch.float32, torch.float16, torch.float64)[number % 3]
        if number % 2:
            part = slice(number * 1_000, number * 1_000 + 5_000)
            return torch.equal(checkpoint.tensor(name, dtype=dtype, slices=(part,)), value(number % COUNT)[part].to(dtype))
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
    storage = StandaloneCheckpoint(saved)
    with Checkpoint.open(saved), Checkpoint.open(saved), pytest.raises(Busy, match="is being read"), storage.exclude("", ""):
        pass
    with storage.exclude("", ""), pytest.raises(Busy, match="has been locked for deletion"):
        Checkpoint.open(saved)
    Checkpoint.open(saved).close()


def test_a_deleters_lock_delays_a_reader_until_it_is_released(saved: Path) -> None:
    storage = StandaloneCheckpoint(saved)
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
        with StandaloneCheckpoint(saved).exclude("", ""):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_close_releases_the_lease_and_the_descriptors(saved: Path) -> None:
    before = opened(saved)
    for _ in range(3):
        Checkpoint.open(saved).close()
    assert opened(saved) == before


def test_a_lock_that_comes_after_the_deletion_raises_not_found(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is unlinked after it is opened and before it is locked."""
    manifest = saved / "manifest.json"
    data = manifest.read_bytes()
    monkeypatch.setattr("fcntl.flock", lambda fd, kind: manifest.unlink())
    with pytest.raises(NotFound, match="no checkpoint"):
        Checkpoint.open(saved)
    monkeypatch.undo()
    manifest.write_bytes(data)
    Checkpoint.open(saved).close()
