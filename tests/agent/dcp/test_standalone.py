"""A part that a process writes itself, and the manifest: whole, locked until the
commit, and gone without a trace after a failure.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptd.agent import Checkpoint
from ckptd.agent.dcp import standalone
from ckptd.agent.dcp.standalone import StandalonePart, commit, is_named
from ckptd.agent.plan.layout import Layout
from ckptd.agent.plan.save_plan import Resolved, plain_metadata, values_of
from ckptd.shared.codecs import codec
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.part_writer import Spread
from ckptd.shared.formats.plan import MIN_CHUNK, chunk_ranges
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.standalone import StandaloneDirectory
from ckptd.shared.system.storage_seam import Closable
from tests.support.descriptors import opened

STATE = {
    "w": torch.arange(300_000.0),
    "bytes": torch.arange(70_000, dtype=torch.int64).to(torch.uint8),
    "n": 5,
}


class Save:
    """Saves a state as one part, and commits it, in separate calls."""

    def __init__(
        self, directory: Path, state: dict[str, Any] | None = None, threads: int | None = 2
    ) -> None:
        planner = DefaultSavePlanner()
        planner.set_up_planner(STATE if state is None else state, is_coordinator=True)
        plans, self.metadata = planner.create_global_plan([planner.create_local_plan()])
        self.resolved = Resolved.of(planner.finish_plan(plans[0]), planner, weights_only=True)
        self.storage = StandaloneDirectory(directory)
        self.part = StandalonePart(self.storage, 0, 1, codec.encoder("raw"), threads, Spread(1))

    @property
    def layout(self) -> Layout:
        return self.resolved.lay_out(
            global_plan=bytes(32), metadata=plain_metadata(self.metadata, [])
        )

    def write(self) -> PartEntry:
        self.part.write(self.layout, self.resolved, 1000)
        return self.part.finish(self.layout, values_of(self.metadata), SnapshotRequest())

    def commit(self, entry: PartEntry, *, overwrite: bool = False) -> None:
        commit(
            self.storage,
            self.layout,
            [entry],
            SnapshotRequest(),
            "raw",
            overwrite=overwrite,
            nonce=self.part.nonce,
        )


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make chunks so small that STATE has many of them, and check afterwards that no
    descriptor is left open.
    """
    monkeypatch.setattr(standalone, "DEFAULT_CHUNK", MIN_CHUNK)
    yield
    assert opened(tmp_path) == [], "a descriptor is left open"


@pytest.mark.parametrize("threads", [1, 3, None])
def test_a_committed_part_holds_the_state(tmp_path: Path, threads: int | None) -> None:
    save = Save(tmp_path / "x", threads=threads)
    entry = save.write()
    assert (is_named(save.storage, entry.file), entry.items) == (False, 3)
    save.commit(entry)
    save.part.close()
    assert is_named(save.storage, entry.file)
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        checkpoint.verify()
        found = checkpoint.load()
    assert (
        torch.equal(found["w"], STATE["w"]),  # type: ignore[arg-type]
        torch.equal(found["bytes"], STATE["bytes"]),  # type: ignore[arg-type]
        found["n"],
    ) == (True, True, 5)


def test_a_state_without_tensors_is_a_checkpoint_too(tmp_path: Path) -> None:
    save = Save(tmp_path / "x", {})
    save.commit(save.write())
    save.part.close()
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        assert checkpoint.load() == {}


def test_an_existing_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    first = Save(tmp_path / "x", {"n": 1})
    first.commit(first.write())
    first.part.close()
    second = Save(tmp_path / "x", {"n": 2})
    entry = second.write()
    with pytest.raises(FileExistsError):
        second.commit(entry)
    second.commit(entry, overwrite=True)
    second.part.close()
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        assert checkpoint.load() == {"n": 2}


def test_a_discarded_part_leaves_nothing(tmp_path: Path) -> None:
    save = Save(tmp_path / "x")
    save.part.write(save.layout, save.resolved, 1000)
    assert len(list((tmp_path / "x").iterdir())) == 1
    save.part.discard("another rank could not save its part")
    save.part.discard("again")
    assert list((tmp_path / "x").iterdir()) == []


def test_a_forked_child_takes_nothing_away(tmp_path: Path) -> None:
    save = Save(tmp_path / "x")
    save.part.write(save.layout, save.resolved, 1000)
    child = os.fork()
    if child == 0:
        save.part.discard("the child ends")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list((tmp_path / "x").iterdir())) == 1
    save.part.discard("the parent ends")
    assert list((tmp_path / "x").iterdir()) == []


@pytest.mark.parametrize("tries", [3, standalone._TRIES])
def test_a_part_that_is_swept_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    hold, seen = StandaloneDirectory.hold, list[str]()

    def swept(self: StandaloneDirectory, file: str) -> Closable:
        seen.append(file)
        if len(seen) <= tries:
            (self.path / file).unlink()
            raise FileNotFoundError(file)
        return hold(self, file)

    save = Save(tmp_path / "x")
    monkeypatch.setattr(StandaloneDirectory, "hold", swept)
    if tries < standalone._TRIES:
        entry = save.write()
        assert (entry.file, len(set(seen))) == (seen[-1], tries + 1)
    else:
        with pytest.raises(FileNotFoundError):
            save.write()
        assert len(seen) == tries
    save.part.discard("the test ends")
    assert list((tmp_path / "x").iterdir()) == []


def test_after_a_failed_write_no_other_chunk_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, chunks = Save(tmp_path / "x"), list[int]()
    chunk = save.part._writer.chunk

    def full(*arguments: Any) -> Any:
        chunks.append(1)
        if len(chunks) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return chunk(*arguments)

    monkeypatch.setattr(save.part._writer, "chunk", full)
    with pytest.raises(OSError, match="No space left on device"):
        save.write()
    assert len(chunks) < len(chunk_ranges(save.layout.plan.regions, MIN_CHUNK))
    save.part.discard("disk full")
    assert list((tmp_path / "x").iterdir()) == []


def test_an_interpreter_that_is_shutting_down_finishes_the_save_on_its_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(standalone, "ThreadPoolExecutor", Ending)
    save = Save(tmp_path / "x")
    save.commit(save.write())
    save.part.close()
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        assert checkpoint.load()["n"] == 5


def test_bytes_are_cut_where_the_chunks_are() -> None:
    pieces = standalone._Pieces(
        iter([memoryview(b"abc"), memoryview(b""), memoryview(b"defgh"), memoryview(b"i")])
    )
    found = []
    for length in (2, 0, 5, 2):
        target = bytearray(length)
        pieces.fill(memoryview(target))
        found.append(bytes(target))
    assert found == [b"ab", b"", b"cdefg", b"hi"]


def test_a_part_may_be_named_if_its_manifest_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the manifest cannot be read, the part counts as named, so it is not deleted."""
    storage = StandaloneDirectory(tmp_path)
    assert not is_named(storage, "rank-00000.x.ckpt")
    for error in (OSError(errno.EIO, "Input/output error"), IntegrityError("damaged")):

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(StandaloneDirectory, "read_manifest", fail)
        assert is_named(storage, "rank-00000.x.ckpt")
