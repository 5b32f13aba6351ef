"""The root that SageMaker's calls save to in tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.agent import smp
from tests.support.daemons import Daemon


@pytest.fixture
def root(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the root of a daemon, as a path for SageMaker's calls."""
    monkeypatch.setenv("CKPTD_SOCKET", str(daemon.home.socket))
    yield daemon.home.root
    smp.close()
