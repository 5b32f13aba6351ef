"""Tests the reader of DCP's `.metadata`: it accepts all that DCP writes, and runs and
imports nothing.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ckptd.agent.convert.dcp_metadata import METADATA, MetadataEntry, Piece, read_metadata
from ckptd.shared.errors import CkptdError, IntegrityError, NotFound, UnsavableValue
from tests.agent.convert.saved import one_process


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a checkpoint of DCP, saved with a path as `checkpoint_id`, which its
    metadata then has.
    """
    with one_process():
        dcp.save(
            {"net": {"w": torch.ones(2, 3)}, "runs": [{"m": torch.ones(4)}, 2]},
            checkpoint_id=tmp_path / "dcp",
            no_dist=True,
        )
    return tmp_path / "dcp"


def changed(directory: Path, change: Callable[[Metadata], Any]) -> Path:
    """Write other metadata, which `change` has changed or returns."""
    metadata = FileSystemReader(directory).read_metadata()
    made = change(metadata)
    (directory / METADATA).write_bytes(pickle.dumps(made or metadata))
    return directory


def test_everything_that_dcp_writes(directory: Path) -> None:
    found, file = read_metadata(directory), "__0_0.distcp"
    plain, w, m = (found[name].pieces[0].length for name in ("runs.1", "net.w", "runs.0.m"))
    assert found == {
        "net.w": MetadataEntry(
            torch.float32, (2, 3), [Piece(file, plain, w, (0, 0), (2, 3))], ("net", "w")
        ),
        "runs.0.m": MetadataEntry(
            torch.float32, (4,), [Piece(file, plain + w, m, (0,), (4,))], ("runs", 0, "m")
        ),
        "runs.1": MetadataEntry(None, (), [Piece(file, 0, plain)], ("runs", 1)),
    }
    assert plain + w + m == (directory / file).stat().st_size


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


MARK = "hostile-mark"
HOSTILE = {
    "system": Call(os.system, f"touch {MARK}"),
    "eval": Call(eval, f"open({MARK!r}, 'w')"),
    "open": Call(io.open, MARK, "w"),
    "exec": Call(exec, f"open({MARK!r}, 'w')"),
    "getattr": Call(getattr, "x", "upper"),
    "torch.load": Call(torch.load, MARK),
    "torch.hub": Call(torch.hub.load, MARK),
    "import": Call(__import__, "antigravity"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", ["whole", "meta", "planner"])
def test_a_hostile_pickle_is_not_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)

    def change(metadata: Metadata) -> Any:
        if place == "whole":
            return HOSTILE[name]
        if place == "meta":
            metadata.storage_meta = StorageMeta(checkpoint_id=HOSTILE[name])  # type: ignore[arg-type]
        else:
            metadata.planner_data["net.w"] = HOSTILE[name]
        return None

    metadata = FileSystemReader(directory).read_metadata()
    (directory / METADATA).write_bytes(pickle.dumps(change(metadata) or metadata))
    with pytest.raises(
        UnsavableValue,
        match=r"\.metadata: it names \S+, which is neither a class of DCP's metadata nor a dtype; "
        r"nothing was run$",
    ):
        read_metadata(directory)
    assert not (tmp_path / MARK).exists()
    assert "antigravity" not in sys.modules


def test_no_class_is_changed_by_a_pickle(directory: Path) -> None:
    """A pickle can set attributes of the classes that it names, not only of their
    objects.
    """
    hostile = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93N}(\x8c\x07versionK\x01u\x86b."  # noqa: E501
    (directory / METADATA).write_bytes(hostile)
    before = dict(vars(Metadata))
    with pytest.raises(IntegrityError, match=r"\.metadata is damaged: "):
        read_metadata(directory)
    assert dict(vars(Metadata)) == before


def _without_storage(metadata: Metadata) -> None:
    metadata.storage_data.pop(
        next(index for index in metadata.storage_data if index.fqn == "net.w")
    )


def _elsewhere(path: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    return change


def _at(offset: int) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.offset = offset

    return change


def _size(metadata: Metadata) -> None:
    metadata.state_dict_metadata["net.w"].size = torch.Size([2, 4])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_storage, "net.w has 1 shards, and those that are stored are 0 others"),
        (
            _elsewhere("../other"),
            r"it names the file '\.\./other', which is not in the directory of the checkpoint",
        ),
        (
            _elsewhere("/etc/passwd"),
            "it names the file '/etc/passwd', which is not in the directory",
        ),
        (_elsewhere("gone"), "the file gone is not there: the checkpoint is not complete"),
        (_at(1 << 40), "the file __0_0.distcp is cut short"),
        (_at(-1), "where sizes belong"),
        (_size, "net.w"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", 3), "is damaged"),
    ],
)
def test_metadata_that_cannot_be_right_is_refused(
    directory: Path, change: Callable[[Metadata], None], said: str
) -> None:
    with pytest.raises(IntegrityError, match=said):
        read_metadata(changed(directory, change))


def test_a_path_that_no_state_has_is_not_used(directory: Path) -> None:
    for path in (("runs", -1), (), ("x",) * 101, [1], ("runs", 1.5), 3):
        made = changed(
            directory,
            lambda metadata, path=path: metadata.planner_data.update({"runs.1": path}),  # type: ignore[misc]
        )
        assert read_metadata(made)["runs.1"].path == ("runs.1",)


def test_a_shard_that_would_take_more_than_its_bytes_is_refused(directory: Path) -> None:
    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata["net.w"]
        entry.size = entry.chunks[0].sizes = torch.Size([1 << 31, 1 << 10])

    with pytest.raises(
        IntegrityError,
        match=r"net.w: a shard of shape \[2147483648, 1024\] cannot be in 1,\d+ bytes$",
    ):
        read_metadata(changed(directory, change))


def test_metadata_of_any_length_is_not_read(directory: Path) -> None:
    os.truncate(directory / METADATA, (1 << 30) + 1)
    with pytest.raises(
        IntegrityError, match="has 1,073,741,825 bytes; expected at most 1,073,741,824$"
    ):
        read_metadata(directory)


def test_no_metadata(tmp_path: Path) -> None:
    with pytest.raises(
        NotFound, match=r"has no \.metadata: it is no DCP checkpoint, or its save did not end$"
    ):
        read_metadata(tmp_path)


def test_damaged_bytes_are_one_sentence(directory: Path) -> None:
    """Every length, and a flipped bit in every byte: the result is the same, another
    sound entry, or one error of ckptd.
    """
    whole, chance = (directory / METADATA).read_bytes(), random.Random(1)
    for cut in range(0, len(whole), 7):
        (directory / METADATA).write_bytes(whole[:cut])
        with pytest.raises(IntegrityError):
            read_metadata(directory)
    refused = []
    for place in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << chance.randrange(8)
        (directory / METADATA).write_bytes(flipped)
        try:
            read_metadata(directory)
        except CkptdError as error:
            refused.append(str(error))
    assert not any("\n" in sentence for sentence in refused)
    assert len(whole) // 6 < len(refused) < len(whole) // 3, "at least half of the bytes count"
