"""Spoils each request of a save, a recovery and a deletion in an object store, in each way that a store or a network can."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest

from ckptd.shared import names
from ckptd.shared.errors import Busy, IntegrityError, NotFound, StorageError
from ckptd.shared.location import Url
from ckptd.shared.scatter import verify
from ckptd.shared.storage import bucket as buckets
from ckptd.shared.storage import object_leases
from ckptd.shared.storage.bucket import open_bucket
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.storage.repository import Repository
from tests.shared.samples import TAG, write_parts
from tests.support import stores
from tests.support.fault_proxy import FAULTS, Proxy, proxied


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Server]:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as running:
        yield running.get("seaweed")


@contextmanager
def behind(proxy: Proxy, server: stores.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    """Yield a root in the store behind the proxy, with a client that does not wait long."""
    for name, value in (server.environ | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}).items():
        monkeypatch.setenv(name, value)
    quick: dict[str, Any] = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}
    monkeypatch.setattr(buckets, "RETRIES", {"max_retries": 4, "retry_timeout": timedelta(seconds=20), "backoff": quick})
    monkeypatch.setattr(buckets, "CLIENT", {"timeout": timedelta(seconds=0.4), "connect_timeout": timedelta(seconds=2)})
    monkeypatch.setattr(object_leases, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(object_leases, "SECONDS", 0.3)
    proxy.timeout = 0.6
    nonce = names.new_nonce().hex()
    bucket = open_bucket(Url("s3", "bucket", (nonce,)))
    bucket.put(
        ".ckptd/capabilities.json", b'{"creates_once":true}', create=False
    )  # the race of the probe takes longer than this client waits
    yield ObjectStorage(bucket, nonce[:16])


def save(root: Repository) -> bytes:
    """Claim an attempt and save a checkpoint of two ranks, as a daemon does. Return the manifest."""
    root.storage.serve("host").close()
    assert root.claim("gpt", 2)
    manifest = write_parts(root.part_files("gpt", TAG), world_size=2).encode()
    root.publish_manifest("gpt", TAG, manifest)
    root.publish_newest("gpt", TAG)
    return manifest


def read_back(root: Repository, manifest: bytes) -> None:
    """Read every byte of the checkpoint, with a lease, as a recovery does."""
    assert root.tags("gpt") == [TAG]
    lease = root.lease("gpt", TAG)
    assert root.read_manifest("gpt", TAG).encode() == manifest
    for part in root.read_manifest("gpt", TAG).parts:
        reader = root.open_part("gpt", TAG, part.file, part.index_sha256)
        assert verify(reader) == part.raw_bytes
        reader.close()
    lease.close()


def forget(root: Repository) -> None:
    parts = [part.file for part in root.read_manifest("gpt", TAG).parts]
    with root.exclude("gpt", TAG):
        root.delete_files("gpt", TAG, [names.MANIFEST])
    root.delete_files("gpt", TAG, parts)


def requests(proxy: Proxy, server: stores.Server, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Return how many requests a save, a recovery and a deletion take."""
    with behind(proxy, server, monkeypatch) as storage:
        assert storage.creates_once
        counts = []
        for action in (save, None, forget):
            proxy.begin()
            if action is save:
                manifest = save(Repository(storage))
            elif action is None:
                read_back(Repository(storage), manifest)
            else:
                forget(Repository(storage))
            counts.append(len(proxy.seen))
    return counts[0], counts[1], counts[2]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_request_loses_nothing_and_is_survived_or_told(
    server: stores.Server, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A client repeats what it may repeat. Where it cannot, the operation fails, and the same operation succeeds after it."""
    told = 0
    with proxied(server.port) as proxy:
        saving, reading, deleting = requests(proxy, server, monkeypatch)
        assert min(saving, reading, deleting) > 4
        for number in range(saving + reading + deleting):
            with behind(proxy, server, monkeypatch) as storage:
                assert storage.creates_once
                root, chosen = Repository(storage), [number]

                def choose(count: int, method: str, path: str, chosen: list[int] = chosen) -> str:
                    if chosen and count == chosen[0]:
                        chosen.clear()
                        return fault
                    return ""

                told += _one_run(root, proxy, choose, chosen, saving, reading)
    assert told <= (saving + reading + deleting) // (1 if fault in ("409", "412", "truncated") else 4)


def _one_run(root: Repository, proxy: Proxy, choose: Any, chosen: list[int], saving: int, reading: int) -> int:
    told = 0
    proxy.begin(choose)
    try:
        manifest = save(root)
    except (OSError, StorageError, AssertionError):
        told += 1
        with pytest.raises((NotFound, IntegrityError)) if not root.has_manifest("gpt", TAG) else ExitStack():
            root.read_manifest("gpt", TAG)
        root = Repository(root.storage)
        root.delete_unfinished("gpt", TAG, root.files("gpt", TAG))
        proxy.begin()
        assert root.claim("gpt", 3) or root.claim("gpt", 4)
        manifest = write_parts(root.part_files("gpt", TAG), world_size=2).encode()
        root.publish_manifest("gpt", TAG, manifest)
    if chosen:
        chosen[0] -= saving
        proxy.begin(choose)
    for _ in range(2):
        try:
            read_back(root, manifest)
            break
        except (OSError, IntegrityError):
            told += 1
    else:
        pytest.fail("the checkpoint cannot be read")
    if chosen:
        chosen[0] -= reading
        proxy.begin(choose)
    for _ in range(100):
        try:
            forget(root)
            break
        except Busy:  # the end of a lease or a mark failed, and it is found dead later
            time.sleep(0.02)
        except NotFound:  # the manifest is gone, as for a deleter that goes on after a failure
            root.delete_files("gpt", TAG, root.files("gpt", TAG))
            break
        except OSError:
            told += 1
    assert root.files("gpt", TAG) == []
    return told
