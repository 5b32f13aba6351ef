"""Ranks find each other through the job's store, and what a peer does not send is read
from storage.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ckptd.agent.link.rounds import Exchange
from ckptd.agent.peers import chunk_exchange
from ckptd.agent.peers.chunk_exchange import ChunkExchange
from ckptd.agent.read.slot_source import SlotSource
from ckptd.agent.read.sources import Opened, open_checkpoint
from ckptd.shared.errors import IntegrityError, SnapshotFailed
from ckptd.shared.formats import manifest as manifests
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import tag_directory
from ckptd.shared.storage.locate import open_root
from tests.shared.samples import sample_plan, write_checkpoint
from tests.support.tmpfs import sealed_slot

TAG = tag_directory(5, None, 1)


@pytest.fixture
def slot() -> Iterator[SlotSource]:
    """The slot of rank 0, in the memory of its node."""
    with sealed_slot(sample_plan(), SnapshotRequest()) as sealed:
        yield SlotSource(sealed.fileno(), 1, 5)


@pytest.fixture
def ranks() -> Iterator[list[Exchange]]:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield [Exchange(store, rank, 2) for rank in range(2)]
    del store


def written(root: Path, *, large: bool = False, damaged: bool = False) -> Manifest:
    """Write a checkpoint of the slot. If it is large, its parts are opened on demand."""
    repository, manifest = open_root(root), write_checkpoint(root, step=5, attempt=1)
    directory = root / "gpt" / manifest.tag
    if large:
        (directory / "manifest.json").unlink()
        with mock.patch.object(manifests, "MOST_INLINE", 0):
            document, objects = manifest.split()
        repository.publish_manifest("gpt", manifest.tag, document, objects=objects)
    if damaged:
        file = directory / manifest.parts[0].file
        reader = repository.open_part("gpt", manifest.tag, file.name)
        data, places = bytearray(file.read_bytes()), [each.offset for each in reader.index.chunks]
        reader.close()
        for place in places:
            data[place] ^= 0xFF
        file.write_bytes(data)
    return manifest


def opened(root: Path, slots: dict[int, SlotSource]) -> Opened:
    return open_checkpoint(open_root(root), "gpt", TAG, slots=slots, slots_later=True)


def offers(*exchanges: ChunkExchange) -> list[dict[str, Any]]:
    return [exchange.offer({0: 100}) for exchange in exchanges]


@pytest.mark.parametrize("large", [False, True])
def test_a_rank_reads_from_another_and_not_from_storage(
    tmp_path: Path, slot: SlotSource, ranks: list[Exchange], large: bool
) -> None:
    written(tmp_path, large=large, damaged=True)
    with closing(opened(tmp_path, {0: slot})) as first, closing(opened(tmp_path, {})) as second:
        serving = ChunkExchange(ranks[0], "gpt", first, {0: slot}, 60.0)
        reading = ChunkExchange(ranks[1], "gpt", second, {}, 60.0)
        said = offers(serving, reading)
        assert [(one["serves"], one["wants"]) for one in said] == [([0], []), ([], [(0, 100)])]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda each: each.begin(said), (serving, reading)))
        assert second.part(0).remote
        assert not first.part(0).remote
        assert second.verify() == reading.bytes_read > 0
        served = list(serving._threads)
        reading.end_reading()
        serving.close()
        reading.close()
        assert len(served) == 1
        assert not served[0].is_alive()
    assert slot.bytes_read == serving.bytes_read == 0


def test_if_no_rank_lacks_anything_no_connection_is_made(
    tmp_path: Path, slot: SlotSource, ranks: list[Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    with closing(opened(tmp_path, {0: slot})) as found:
        exchanges = [ChunkExchange(each, "gpt", found, {0: slot}, 60.0) for each in ranks]
        monkeypatch.setattr(Exchange, "new_client", None)
        before = set(threading.enumerate())
        for exchange in exchanges:
            exchange.begin(offers(*exchanges))
        assert before.issuperset(threading.enumerate())
        assert found.verify() == slot.bytes_read


def test_a_rank_that_does_not_come_is_replaced_by_storage(
    tmp_path: Path,
    slot: SlotSource,
    ranks: list[Exchange],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(chunk_exchange, "SECONDS", 0.2)
    written(tmp_path)
    with closing(opened(tmp_path, {})) as found:
        gone = ChunkExchange(ranks[0], "gpt", found, {0: slot}, 60.0)
        reading = ChunkExchange(ranks[1], "gpt", found, {}, 60.0)
        with caplog.at_level(logging.WARNING, "ckptd.agent"):
            reading.begin(offers(gone, reading))
        assert found.verify() > reading.bytes_read == 0
        reading.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("nothing is read from the memory of rank 0: ")


def test_a_reader_that_does_not_come_is_not_waited_for(
    tmp_path: Path, slot: SlotSource, ranks: list[Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_exchange, "SECONDS", 0.2)
    written(tmp_path)
    with closing(opened(tmp_path, {0: slot})) as first, closing(opened(tmp_path, {})) as second:
        serving = ChunkExchange(ranks[0], "gpt", first, {0: slot}, 60.0)
        serving.begin(offers(serving, ChunkExchange(ranks[1], "gpt", second, {}, 60.0)))
        (thread,) = serving._threads
        serving.close()
        assert not thread.is_alive()


def _no_store(self: Exchange) -> Store:
    raise SnapshotFailed("the job's store cannot be reached: it is gone")


def test_without_the_store_storage_is_read(
    tmp_path: Path,
    slot: SlotSource,
    ranks: list[Exchange],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Exchange, "new_client", _no_store)
    written(tmp_path)
    with closing(opened(tmp_path, {0: slot})) as first, closing(opened(tmp_path, {})) as second:
        exchanges = [
            ChunkExchange(ranks[0], "gpt", first, {0: slot}, 60.0),
            ChunkExchange(ranks[1], "gpt", second, {}, 60.0),
        ]
        said = offers(*exchanges)
        with caplog.at_level(logging.WARNING, "ckptd.agent"):
            for exchange in exchanges:
                exchange.begin(said)
        assert second.verify() > exchanges[1].bytes_read == 0
    assert [record.getMessage() for record in caplog.records] == [
        "this rank exchanges no chunks with a peer, and reads storage: the job's store cannot "
        "be reached: it is gone"
    ] * 2


def test_a_damaged_part_is_not_opened_for_an_offer_if_it_is_not_needed(
    tmp_path: Path, ranks: list[Exchange]
) -> None:
    manifest = written(tmp_path, large=True)
    file = tmp_path / "gpt" / manifest.tag / manifest.parts[0].file
    file.write_bytes(b"\xff" * file.stat().st_size)
    with closing(opened(tmp_path, {})) as found:
        exchange = ChunkExchange(ranks[0], "gpt", found, {}, 60.0)
        assert exchange.offer({})["wants"] == []
        with pytest.raises(IntegrityError):
            exchange.offer({0: 100})
