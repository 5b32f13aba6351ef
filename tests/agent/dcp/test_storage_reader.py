"""DCP's reader: what it opens, when it closes it, and which path it means.

`test_storage_writer.py` loads whole states with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from ckptd.agent import StorageReader, StorageWriter
from ckptd.agent.dcp.storage_reader import StorageReader as Reader
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound, StorageError
from tests.support.descriptors import opened

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save({"w": torch.arange(4.0)}, storage_writer=StorageWriter(tmp_path / "x"))
    return tmp_path / "x"


def test_a_load_closes_what_it_has_opened(saved: Path) -> None:
    assert StorageReader is Reader
    state = {"w": torch.zeros(4)}
    dcp.load(state, storage_reader=Reader(saved))
    assert (state["w"].tolist(), opened(saved)) == ([0.0, 1.0, 2.0, 3.0], [])


def test_a_reader_that_is_dropped_or_reset_closes_its_checkpoint(saved: Path) -> None:
    reader = Reader(saved)
    reader.read_metadata()
    assert opened(saved) != []
    reader.read_metadata()
    reader.reset()
    assert opened(saved) == []
    reader.read_metadata()
    del reader
    assert opened(saved) == []


def test_each_load_has_an_id_of_its_own(saved: Path) -> None:
    reader = Reader(saved)
    found = []
    for _ in range(2):
        reader.reset()
        meta = reader.read_metadata().storage_meta
        assert meta is not None
        assert (meta.checkpoint_id, meta.load_id) == (saved, reader.load_id)
        found.append(meta.load_id)
    assert len(set(found)) == 2
    reader.close()


def test_an_id_given_to_dcp_replaces_the_path(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    assert reader.checkpoint_id is None
    with pytest.raises(
        InvalidRequest,
        match="^StorageReader has no path: give it one, or pass checkpoint_id= to dcp.load$",
    ):
        reader.read_metadata()
    monkeypatch.chdir(saved.parent)
    reader.reset("x")
    assert reader.checkpoint_id == str(saved)
    reader.reset()
    assert reader.checkpoint_id == str(saved)
    assert [
        Reader.validate_checkpoint_id(path) for path in ("x", saved, "s3://bucket/x", "hdfs://x")
    ] == [True, True, True, False]


def test_metadata_that_was_read_elsewhere_is_opened_by_each_reader(saved: Path) -> None:
    metadata, reader, planner, state = (
        Reader(saved).read_metadata(),
        Reader(saved),
        DefaultLoadPlanner(),
        {"w": torch.zeros(4)},
    )
    reader.set_up_storage_reader(metadata, True)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(plan, planner).wait()
    assert state["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_checkpoint_that_each_rank_has_saved_alone_is_opened_by_its_rank(tmp_path: Path) -> None:
    where = tmp_path / "x"
    dcp.save({"w": torch.full((2,), 3.0)}, storage_writer=StorageWriter(where / "rank-00003"))
    reader = Reader(where)
    with pytest.raises(NotFound):
        reader.read_metadata()
    assert set(reader.read_metadata(rank=3).state_dict_metadata) == {"w"}
    reader.close()
    with pytest.raises(NotFound):
        reader.read_metadata(rank=4)


def test_a_checkpoint_of_all_ranks_is_not_looked_for_under_one(saved: Path) -> None:
    with pytest.raises(
        IntegrityError, match="^the checkpoint in .* cannot be read, and no rank has its own there"
    ):
        Reader(saved).read_metadata(rank=0)


def test_an_error_of_the_machine_names_the_path(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("ckptd.agent.dcp.storage_reader.open_checkpoint", fail)
        with pytest.raises(StorageError, match=f"^cannot read {saved}: "):
            Reader(saved).read_metadata()
    reader, planner = Reader(saved), DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(4)}, reader.read_metadata(), is_coordinator=True)
    monkeypatch.setattr("ckptd.agent.dcp.storage_reader.read_plan", lambda *_, **__: fail())
    with pytest.raises(StorageError, match=f"^cannot read {saved}: "):
        reader.read_data(planner.create_local_plan(), planner)
    assert opened(saved) == []
