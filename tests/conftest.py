"""Fixtures for every test: a place for a daemon, and a daemon in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemons import Daemon, Home, home, running


@pytest.fixture
def place() -> Iterator[Home]:
    """A root and a socket, without a daemon."""
    with home() as made:
        yield made


@pytest.fixture
def daemon(place: Home) -> Iterator[Daemon]:
    """A daemon that is ready, with default settings. It is forked, because there are hundreds. `running` starts one as a user does."""
    with running(place, forked=True) as started:
        yield started
