"""Tests the fields of DCP's metadata that describe a save, against those that DCP's own
storage sets.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.agent import StorageReader, StorageWriter
from ckptd.agent.dcp.metadata import place_of
from ckptd.shared.location import located

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_save_and_its_metadata_say_what_those_of_dcp_say(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "n": 1}
    theirs = dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    writer, reader = StorageWriter(tmp_path / "ours"), StorageReader(tmp_path / "ours")
    planned = writer.storage_meta()
    ours = dcp.save(state, storage_writer=writer)
    read = reader.read_metadata()
    reader.close()
    assert ours.storage_meta is not None
    assert theirs.storage_meta is not None
    assert read.storage_meta is not None
    for meta in (planned, ours.storage_meta, read.storage_meta):
        assert meta.checkpoint_id == tmp_path / "ours"
        assert type(meta.checkpoint_id) is type(theirs.storage_meta.checkpoint_id)
    assert ours.storage_meta.save_id == read.storage_meta.save_id == writer.save_id
    assert (
        getattr(ours, "version", None)
        == getattr(read, "version", None)
        == getattr(theirs, "version", None)
    )


def test_a_writer_without_a_path_has_no_checkpoint_id() -> None:
    assert StorageWriter().storage_meta().checkpoint_id is None


def test_a_url_is_text() -> None:
    assert place_of(located("s3://bucket/runs/x")) == "s3://bucket/runs/x"
