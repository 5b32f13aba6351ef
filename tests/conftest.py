"""Fixtures that every test may use: a home for a daemon, and a daemon in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemons import Daemon, Home, home, running


@pytest.fixture
def place() -> Iterator[Home]:
    """A root and a socket; nothing runs there yet."""
    with home() as made:
        yield made


@pytest.fixture
def daemon(place: Home) -> Iterator[Daemon]:
    """One that is ready, with default settings; forked, since there are hundreds. `running` starts one as a user does."""
    with running(place, forked=True) as started:
        yield started
