"""Spoils requests of a save, a recovery and a deletion in an object store, and checks
that nothing is lost and no failure is silent.

`python -m tests.crash.store_faults --rounds 500 [--seed N]`. Each round spoils two
requests, in ways that are drawn. `test_store_faults.py` spoils each request once in
each way. The store is SeaweedFS, behind a proxy. A client repeats what it may repeat.
Where it cannot, the operation fails, and the same operation succeeds after it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ckptd.shared import names
from ckptd.shared.errors import Busy, IntegrityError, NotFound, StorageError
from ckptd.shared.formats.scatter import verify
from ckptd.shared.location import Url
from ckptd.shared.storage import bucket as buckets
from ckptd.shared.storage import object_leases
from ckptd.shared.storage.bucket import open_bucket
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.storage.repository import Repository
from tests.crash.images import Unavailable
from tests.shared.samples import TAG, write_parts
from tests.support import stores
from tests.support.fault_proxy import FAULTS, Proxy, proxied


@contextmanager
def behind(proxy: Proxy, server: stores.Server) -> Iterator[ObjectStorage]:
    """Yield a root in the store behind the proxy, with a client that does not wait
    long.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            server.environ | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        ).items():
            patch.setenv(name, value)
        quick: dict[str, Any] = {
            "init_backoff": timedelta(milliseconds=1),
            "max_backoff": timedelta(milliseconds=5),
            "base": 2,
        }
        patch.setattr(
            buckets,
            "RETRIES",
            {"max_retries": 4, "retry_timeout": timedelta(seconds=20), "backoff": quick},
        )
        patch.setattr(
            buckets,
            "CLIENT",
            {"timeout": timedelta(seconds=0.4), "connect_timeout": timedelta(seconds=2)},
        )
        patch.setattr(object_leases, "RETRY_SECONDS", 0.01)
        patch.setattr(object_leases, "SECONDS", 0.3)
        proxy.timeout = 0.6
        nonce = names.new_nonce().hex()
        bucket = open_bucket(Url("s3", "bucket", (nonce,)))
        # the race of the probe takes longer than this client waits
        bucket.put(".ckptd/capabilities.json", b'{"creates_once":true}', create=False)
        storage = ObjectStorage(bucket, nonce[:16])
        assert storage.creates_once
        yield storage


def save(root: Repository) -> bytes:
    """Claim an attempt and save a checkpoint of two ranks, as a daemon does.

    Return the manifest.
    """
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


@dataclass(frozen=True, slots=True)
class Requests:
    """The number of requests that a save, a recovery and a deletion take without
    faults.
    """

    saving: int
    reading: int
    deleting: int

    @classmethod
    def count(cls, proxy: Proxy, server: stores.Server) -> Requests:
        with behind(proxy, server) as storage:
            root = Repository(storage)
            proxy.begin()
            manifest = save(root)
            saving = len(proxy.seen)
            proxy.begin()
            read_back(root, manifest)
            reading = len(proxy.seen)
            proxy.begin()
            forget(root)
            return cls(saving, reading, len(proxy.seen))

    @property
    def all(self) -> int:
        return self.saving + self.reading + self.deleting


def save_read_and_forget(
    root: Repository, proxy: Proxy, requests: Requests, faults: Mapping[int, str]
) -> tuple[int, int]:
    """Save a checkpoint, read it, and delete it, while the requests of these numbers
    are spoiled.

    The requests are numbered through all three, as without faults. Return how many
    failures were told, and how many faults came: a fault does not come if its request
    is not made. Raises AssertionError if something is lost, or fails without an error.
    """
    told, left = 0, dict(faults)

    def spoil_from(first: int) -> None:
        proxy.begin(lambda number, method, path: left.pop(first + number, ""))

    spoil_from(0)
    try:
        manifest = save(root)
    except (OSError, StorageError, AssertionError):
        told += 1
        proxy.begin()
        with (
            pytest.raises((NotFound, IntegrityError))
            if not root.has_manifest("gpt", TAG)
            else ExitStack()
        ):
            root.read_manifest("gpt", TAG)
        root = Repository(root.storage)
        root.delete_unfinished("gpt", TAG, root.files("gpt", TAG))
        assert root.claim("gpt", 3) or root.claim("gpt", 4)
        manifest = write_parts(root.part_files("gpt", TAG), world_size=2).encode()
        root.publish_manifest("gpt", TAG, manifest)
    spoil_from(requests.saving)
    for _ in range(1 + len(faults)):
        try:
            read_back(root, manifest)
            break
        except (OSError, IntegrityError):
            told += 1
    else:
        raise AssertionError("the checkpoint cannot be read")
    spoil_from(requests.saving + requests.reading)
    for _ in range(100):
        try:
            forget(root)
            break
        except Busy:  # the end of a lease or a mark failed, and it is found dead later
            time.sleep(0.02)
        except NotFound:  # the manifest is gone, as for a deleter that goes on after a failure
            proxy.begin()
            root.delete_files("gpt", TAG, root.files("gpt", TAG))
            break
        except OSError:
            told += 1
    proxy.begin()
    assert root.files("gpt", TAG) == []
    return told, len(faults) - len(left)


_ONE = " only one of two faults came"
"""The name by which such a round is counted. It begins with a space, so that `trust`
does not count it.
"""


def run(rounds: int, seed: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Go so many rounds, or as many as fit into `seconds`.

    Return how often each fault came, and what was lost.
    """
    if stores.program("weed") is None:
        raise Unavailable("SeaweedFS is not installed")
    chance, until = random.Random(seed), time.monotonic() + seconds
    tried, lost = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as place, stores.Servers(Path(place)) as servers:
        server = servers.get("seaweed")
        with proxied(server.port) as proxy:
            requests = Requests.count(proxy, server)
            while tried.total() < rounds and time.monotonic() < until and not lost:
                first, second = sorted(chance.sample(range(requests.all), 2))
                faults = {first: chance.choice(FAULTS), second: chance.choice(FAULTS)}
                came = 2
                with behind(proxy, server) as storage:
                    try:
                        _, came = save_read_and_forget(Repository(storage), proxy, requests, faults)
                    except Exception as error:
                        lost.append(f"requests spoiled: {faults}: {error!r}")
                tried[" and ".join(sorted(faults.values())) if came == 2 else _ONE] += 1
    return tried, lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    begun = time.monotonic()
    tried, lost = run(options.rounds, options.seed)
    pairs = tried.total() - tried.pop(_ONE, 0)
    print(
        f"{pairs} pairs of faults ({len(tried)} kinds), seed {options.seed}, "
        f"{time.monotonic() - begun:.0f} s, {len(lost)} lost"
    )
    for sentence in lost:
        print("LOST", sentence)
    return bool(lost)


if __name__ == "__main__":
    raise SystemExit(main())
