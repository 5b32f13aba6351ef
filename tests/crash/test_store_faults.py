"""The short version of `python -m tests.crash.store_faults`: each request is spoiled
once in each way, and some pairs. `make trust` draws other pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptd.shared.storage.repository import Repository
from tests.crash import store_faults
from tests.crash.store_faults import Requests, behind, save_read_and_forget
from tests.support import stores
from tests.support.fault_proxy import FAULTS, proxied

SEED = 1
SECONDS = 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Server]:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as running:
        yield running.get("seaweed")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_request_loses_nothing_and_is_survived_or_told(
    server: stores.Server, fault: str
) -> None:
    told = 0
    with proxied(server.port) as proxy:
        requests = Requests.count(proxy, server)
        assert min(requests.saving, requests.reading, requests.deleting) > 4
        for number in range(requests.all):
            with behind(proxy, server) as storage:
                told += save_read_and_forget(Repository(storage), proxy, requests, {number: fault})[
                    0
                ]
    assert told <= requests.all // (1 if fault in ("409", "412", "truncated") else 4)


def test_pairs_of_faults_lose_nothing(server: stores.Server) -> None:
    tried, lost = store_faults.run(10_000, SEED, SECONDS)
    assert lost == []
    assert tried.total() > 0
