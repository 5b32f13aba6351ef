"""Tests which format a path has. `test_importing.py` opens them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptd.agent.convert.formats import FORMATS, format_of, is_of_another_tool
from ckptd.shared.errors import InvalidRequest, NotFound
from ckptd.shared.storage.marker import MARKER


def test_formats_are_told_by_their_files(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "torch")
    torch.save({}, tmp_path / "old", _use_new_zipfile_serialization=False)
    save_file({"x": torch.ones(1)}, tmp_path / "safetensors")
    for name, file in (
        ("dcp", ".metadata"),
        ("hf", "model.safetensors.index.json"),
        ("ours", "manifest.json"),
        ("nothing", "config.json"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    assert {name: format_of(tmp_path / name) for name in FORMATS} == {
        name: name for name in FORMATS
    }
    assert format_of(tmp_path / "old") == "torch"
    with pytest.raises(InvalidRequest, match="ours is a checkpoint of ckptd already$"):
        format_of(tmp_path / "ours")
    (tmp_path / "ours" / ".metadata").write_bytes(MARKER)  # as a save through DCP leaves it
    assert not is_of_another_tool(tmp_path / "ours")
    for wanted in ("", "dcp"):
        with pytest.raises(InvalidRequest, match="ours is a checkpoint of ckptd already"):
            format_of(tmp_path / "ours", wanted)
    with pytest.raises(
        NotFound,
        match="nothing is in no format that can be imported: it has neither .metadata, as a DCP "
        "checkpoint, nor ",
    ):
        format_of(tmp_path / "nothing")
    with pytest.raises(NotFound, match="nowhere is not there$"):
        format_of(tmp_path / "nowhere")


def test_a_directory_where_a_file_is_expected(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is a directory; expected one file that torch.load reads$"):
        format_of(tmp_path, "torch")
    assert format_of(tmp_path, "hf") == "hf"
