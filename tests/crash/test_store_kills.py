"""Kills the trainer or the daemon at every failpoint while the root lies in an object store, as `test_failpoints.py` does on a disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptd.shared import failpoints, names
from ckptd.shared.location import Url
from tests.crash.test_failpoints import die_at
from tests.support import stores
from tests.support.daemons import Home, home

KINDS = ("seaweed", "rclone")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Servers]:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as running:
        yield running


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, servers: stores.Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    server = servers.get(request.param)
    with home() as made:
        made.root = Url("s3", "bucket", (names.new_nonce().hex(),))  # type: ignore[assignment]
        made.environ = server.environ
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.mark.parametrize("point", failpoints.AGENT + failpoints.DAEMON)
def test_death_at_every_point(place: Home, point: str) -> None:
    die_at(place, point)
