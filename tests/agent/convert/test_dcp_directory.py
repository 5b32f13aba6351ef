"""Tests the files of a DCP directory. `test_export.py` reads whole directories."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

from ckptd.agent import Checkpoint
from ckptd.agent.convert import dcp_directory, dcp_metadata
from ckptd.agent.convert.ckptd_directory import contents_of
from ckptd.agent.convert.contents import Leaf, replaced
from ckptd.agent.convert.dcp_directory import Planned, read_directory, write_directory
from ckptd.agent.convert.importing import import_checkpoint
from ckptd.agent.read.checkpoint import opened_of
from ckptd.shared.errors import IntegrityError, InvalidRequest, UnsavableValue
from tests.agent.convert.saved import STATES, assert_same, one_process, save, save_sharded
from tests.support import sharded
from tests.support.ranks import Ranks


@pytest.mark.parametrize(("most", "files"), [(1 << 30, 1), (400, 5), (1, 10)])
def test_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, files: int
) -> None:
    monkeypatch.setattr(dcp_directory, "_FILE_BYTES", most)
    state = {f"x{number}": torch.full((50,), float(number)) for number in range(10)} | {"epoch": 3}
    out = tmp_path / "out"
    out.mkdir()
    with Checkpoint.open(save(state, tmp_path / "checkpoint")) as checkpoint:
        contents = contents_of(opened_of(checkpoint))
        write_directory(out, Planned(contents.tree), contents, lambda length: None)
    assert len(list(out.glob("*.distcp"))) == files
    metadata = FileSystemReader(out).read_metadata()
    assert list(metadata.state_dict_metadata) == list(state)
    assert metadata.storage_meta is not None


def test_a_state_that_is_no_dict_is_refused() -> None:
    with pytest.raises(
        InvalidRequest,
        match="^a DCP checkpoint holds a dict, and the chosen part is a list: choose another with "
        "`only`$",
    ):
        Planned([1])


def read(directory: Path) -> Any:
    """Return a whole state."""
    contents = read_directory(directory)
    return replaced(contents.tree, Leaf, lambda leaf: next(contents.read([leaf]))[1])


def test_bytes_that_went_through_a_codec_of_dcp(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "dcp", _extensions=[ZStandard()])
    with one_process():
        dcp.save(STATES["nested"], storage_writer=writer, no_dist=True)
    assert_same(read(tmp_path / "dcp"), STATES["nested"])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", ["fsdp2", "2d"])
def test_shards_of_four_ranks_are_put_together(tmp_path: Path, kind: str) -> None:
    with Ranks(4) as ranks:
        ranks.call(sharded.build, kind, 1)
        ranks.call(sharded.train, 1)
        ranks.call(save_sharded, tmp_path / "dcp")
        whole = sharded.together(ranks.call(sharded.whole))
    found = read(tmp_path / "dcp")
    parameters = {
        name: value
        for name, value in whole.items()
        if name.startswith(("model.up.", "model.down."))
    }
    assert len(parameters) == 4
    assert {
        f"model.{name}": sharded.plain(tensor) for name, tensor in found["model"].items()
    }.items() >= parameters.items()
    assert found["count"] == 1


class Custom:
    pass


def test_a_value_that_only_pickled_code_could_load_is_named(tmp_path: Path) -> None:
    with one_process():
        dcp.save(
            {"w": torch.ones(1), "own": Custom()}, checkpoint_id=tmp_path / "dcp", no_dist=True
        )
    with pytest.raises(
        UnsavableValue,
        match=r"^own can only be loaded by running pickled code, .* names tests\..*\.Custom; if",
    ):
        read_directory(tmp_path / "dcp")


def test_a_buffer_of_bytes_is_a_value(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "loader": {"cursor": io.BytesIO(b"row 7")}}
    with one_process():
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = read(tmp_path / "dcp")
    assert found["loader"]["cursor"].getvalue() == b"row 7"
    import_checkpoint(tmp_path / "dcp", tmp_path / "checkpoint")
    with Checkpoint.open(tmp_path / "checkpoint") as checkpoint:
        assert checkpoint.load()["loader"]["cursor"].getvalue() == b"row 7"


def test_damaged_bytes_are_named(tmp_path: Path) -> None:
    with one_process():
        dcp.save({"w": torch.ones(100)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(
        IntegrityError,
        match="__0_0.distcp: the bytes of w cannot be read, or it holds what torch.load",
    ):
        read(tmp_path / "dcp")


@pytest.mark.parametrize("path", [("a", "b", "c"), ("a", "b"), ("a",)])
def test_two_values_at_one_place_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]
) -> None:
    with one_process():
        dcp.save(
            {"a": {"b": torch.ones(1)}, "c": torch.ones(2)},
            checkpoint_id=tmp_path / "dcp",
            no_dist=True,
        )
    right = dcp_metadata.read_metadata

    def wrong(directory: Path) -> Any:
        found = right(directory)
        return found | {"c": replace(found["c"], path=path)}

    monkeypatch.setattr(dcp_directory, "read_metadata", wrong)
    with pytest.raises(IntegrityError, match=r"the path \[.*\] of c in the state conflicts with"):
        read_directory(tmp_path / "dcp")


def test_places_in_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_process():
        dcp.save(
            {f"x{number}": torch.full((1,), float(number)) for number in range(4)},
            checkpoint_id=tmp_path / "dcp",
            no_dist=True,
        )
    paths: dict[str, tuple[str | int, ...]] = {
        "x0": ("list", 2),
        "x1": ("list", 0),
        "x2": ("huge", 1 << 40),
        "x3": ("mixed", "a"),
    }
    right = dcp_metadata.read_metadata
    monkeypatch.setattr(
        dcp_directory,
        "read_metadata",
        lambda place: {name: replace(one, path=paths[name]) for name, one in right(place).items()},
    )
    found = read(tmp_path / "dcp")
    assert [None if one is None else int(one) for one in found["list"]] == [1, None, 0]
    assert int(found["huge"][1 << 40]) == 2
    assert int(found["mixed"]["a"]) == 3


def test_a_state_without_items_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with Checkpoint.open(save({}, tmp_path / "checkpoint")) as checkpoint:
        contents = contents_of(opened_of(checkpoint))
        write_directory(out, Planned(contents.tree), contents, lambda length: None)
    assert FileSystemReader(out).read_metadata().state_dict_metadata == {}
