"""Tests the file that marks a checkpoint by itself, and how checkpoints of other tools
are known.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ckptd.shared.storage.marker import MAGIC, MARKER, other_tool
from ckptd.shared.storage.marker import is_marked as has_marker
from ckptd.shared.storage.posix import PosixStorage
from tests.support.cases import each_case


def is_marked(path: Path) -> bool:
    return has_marker(PosixStorage(path))


def known(path: Path) -> tuple[str, str, str | None] | None:
    return other_tool(PosixStorage(path))


def test_a_marker_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    assert not is_marked(tmp_path / "missing")
    assert not is_marked(tmp_path)
    for content, expected in (
        (b"", False),
        (MAGIC[:-1], False),
        (MAGIC, True),
        (MARKER, True),
        (b"\x80" + MARKER, False),
    ):
        (tmp_path / ".metadata").write_bytes(content)
        assert is_marked(tmp_path) == expected
    assert len(MAGIC) == 16
    assert len(MARKER) <= 4096


def test_a_link_or_a_directory_is_no_marker(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "real").write_bytes(MARKER)
    (tmp_path / "one" / ".metadata").symlink_to(tmp_path / "real")
    (tmp_path / "two" / ".metadata").mkdir(parents=True)
    assert not is_marked(tmp_path / "one")
    assert not is_marked(tmp_path / "two")


def test_no_pickle_can_be_read_from_a_marker() -> None:
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(MARKER)  # it is no pickle: that is what this shows


@each_case(
    ("file", "tool", "importable"),
    [
        (".metadata", "torch.distributed.checkpoint itself", ""),
        ("__12.metadata", "torch.distributed.checkpoint itself", None),
        ("model.safetensors", "Hugging Face", ""),
        ("model.safetensors.index.json", "Hugging Face", ""),
        ("pytorch_model.bin", "Hugging Face", "pytorch_model.bin"),
        ("adapter_model.safetensors", "Hugging Face", "adapter_model.safetensors"),
        ("_CHECKPOINT_METADATA", "Orbax", None),
    ],
)
def test_a_checkpoint_of_another_tool_is_known_by_a_file(
    tmp_path: Path, file: str, tool: str, importable: str | None
) -> None:
    (tmp_path / "notes.txt").touch()
    assert known(tmp_path) is None
    (tmp_path / file).touch()
    assert known(tmp_path) == (tool, file, importable)


def test_a_marked_directory_a_file_and_nothing_are_of_no_other_tool(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(MARKER)
    assert (known(tmp_path), known(tmp_path / "missing"), known(tmp_path / ".metadata")) == (
        None,
        None,
        None,
    )
