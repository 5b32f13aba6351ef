"""Fixtures for every test: a place for a daemon, and a daemon in it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

# The tests start a thousand processes. Without these two lines each of them might
# compile all of ckptd, and let OpenMP's threads spin.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A job in the background of a shell ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.support.daemons import Daemon, Home, home, running


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """Fail a test that silences the loggers, because a later test in this process would
    then look for a line that never comes.
    """
    yield
    silenced = [
        logger.name
        for name in ("ckptd", "ckptd.agent", "ckptd.daemon")
        if (logger := logging.getLogger(name)).level or logger.disabled
    ]
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    assert (silenced, disabled) == ([], logging.NOTSET)


@pytest.fixture
def place() -> Iterator[Home]:
    """A root and a socket, without a daemon."""
    with home() as made:
        yield made


@pytest.fixture
def daemon(place: Home) -> Iterator[Daemon]:
    """A daemon that is ready, with default settings.

    It is forked, because there are hundreds. `running` starts one as a user does.
    """
    with running(place, forked=True) as started:
        yield started
