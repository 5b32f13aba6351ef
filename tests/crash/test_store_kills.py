"""Kills the trainer or the daemon at every failpoint while the root lies in an object
store, as `test_failpoints.py` does on a disk.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptd.shared.system import failpoints
from tests.crash.test_failpoints import die_at
from tests.support import stores
from tests.support.daemons import Home

KINDS = ("seaweed", "rclone")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Servers]:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as running:
        yield running


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, servers: stores.Servers) -> Iterator[Home]:
    with stores.home_in(servers.get(request.param)) as made:
        yield made


@pytest.mark.parametrize("point", failpoints.AGENT + failpoints.DAEMON)
def test_death_at_every_point(place: Home, point: str) -> None:
    die_at(place, point)
