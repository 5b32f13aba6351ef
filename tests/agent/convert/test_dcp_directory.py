"""Tests the files of a DCP directory. `test_export.py` reads whole directories."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from ckptd.agent import Checkpoint
from ckptd.agent.convert import dcp_directory
from ckptd.agent.convert.ckptd_directory import contents_of
from ckptd.agent.convert.dcp_directory import Planned, write_directory
from ckptd.shared.errors import InvalidRequest
from tests.agent.convert.saved import save


@pytest.mark.parametrize(("most", "files"), [(1 << 30, 1), (400, 5), (1, 10)])
def test_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, files: int) -> None:
    monkeypatch.setattr(dcp_directory, "_FILE_BYTES", most)
    state = {f"x{number}": torch.full((50,), float(number)) for number in range(10)} | {"epoch": 3}
    out = tmp_path / "out"
    out.mkdir()
    with Checkpoint.open(save(state, tmp_path / "checkpoint")) as checkpoint:
        contents = contents_of(checkpoint.opened)
        write_directory(out, Planned(contents.tree), contents, lambda length: None)
    assert len(list(out.glob("*.distcp"))) == files
    metadata = FileSystemReader(out).read_metadata()
    assert list(metadata.state_dict_metadata) == list(state)
    assert metadata.storage_meta is not None


def test_a_state_that_is_no_dict_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="^a DCP checkpoint holds a dict, and the chosen part is a list: choose another with `only`$"):
        Planned([1])
