"""Tests DCP's saves and loads in an object store, outside every root and without a
daemon.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.agent import Checkpoint, StorageReader, StorageWriter
from ckptd.shared import names
from ckptd.shared.errors import NotFound, StorageError
from ckptd.shared.location import Url, located
from ckptd.shared.storage import locate
from tests.agent.convert.saved import one_process
from tests.support import stores
from tests.support.scripts import python


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Servers]:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as running:
        yield running


@pytest.fixture
def place(servers: stores.Servers, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a prefix that nothing has."""
    for name, value in servers.get("seaweed").environ.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{names.new_nonce().hex()}"


def save(state: dict[str, Any], place: str, **options: Any) -> None:
    with one_process():
        dcp.save(state, storage_writer=StorageWriter(place, **options))


def objects(place: str) -> list[str]:
    url = located(place)
    assert isinstance(url, Url)
    return [entry.name for entry in locate.object_storage(url).children("") if not entry.nested]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"step": 7},
        {"w": torch.arange(10.0)},
        {"w": torch.arange(3_000_000.0), "b": torch.ones(3, dtype=torch.bfloat16)},
    ],
)
def test_a_state_comes_back(place: str, state: dict[str, Any]) -> None:
    save(state, place)
    found = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for name, value in state.items()
    }
    with one_process():
        dcp.load(found, storage_reader=StorageReader(place))
    assert found.keys() == state.keys()
    assert all(
        torch.equal(torch.as_tensor(found[name]), torch.as_tensor(state[name])) for name in state
    )
    with Checkpoint.open(place) as checkpoint:
        checkpoint.verify()


def test_a_checkpoint_is_replaced_and_its_parts_are_deleted(place: str) -> None:
    save({"w": torch.zeros(5)}, place)
    before = set(objects(place))
    save({"w": torch.ones(5)}, place, overwrite=True)
    assert before & set(objects(place)) == {"manifest.json", ".metadata"}
    with Checkpoint.open(place) as checkpoint:
        assert checkpoint.tensor("w").tolist() == [1.0] * 5


@pytest.mark.usefixtures("processes")
def test_a_background_save_is_finished_although_the_script_ends(place: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp\n"
        "from ckptd.agent import StorageWriter\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/group', rank=0, "
        f"world_size=1)\n"
        "dcp.async_save({'w': torch.arange(2_000_000.0)}, "
        "storage_writer=StorageWriter(sys.argv[1]))\n"
    )
    done = python(script, place)
    with Checkpoint.open(place) as checkpoint:
        assert checkpoint.tensor("w")[-1].item() == 1_999_999.0, done.stderr


def test_an_outage_is_not_taken_for_a_missing_checkpoint(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": torch.zeros(5)}, place)
    with pytest.raises(NotFound):
        Checkpoint.open(f"{place}-other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for cache in (locate.object_storage, sys.modules["ckptd.shared.storage.bucket"]._connect):
        cache.cache_clear()
    with pytest.raises(StorageError, match="check the credentials in AWS_ACCESS_KEY_ID"):
        Checkpoint.open(place)
    with (
        pytest.raises(CheckpointException, match="check the credentials in AWS_ACCESS_KEY_ID"),
        one_process(),
    ):
        dcp.load({"w": torch.zeros(5)}, storage_reader=StorageReader(place))
    for cache in (locate.object_storage, sys.modules["ckptd.shared.storage.bucket"]._connect):
        cache.cache_clear()
