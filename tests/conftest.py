"""Fixtures for every test: a place for a daemon, a daemon in it, and the tier of the
test.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.ranks import Lend

# The tests start a thousand processes. Without these two lines each of them might
# compile all of ckptd, and let OpenMP's threads spin.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A job in the background of a shell ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.support import tiers
from tests.support.daemons import Daemon, Home, home, running
from tests.support.shared_daemon import LentDaemon, SharedDaemon, add_log

# Settings of the user would reach the commands and trainers that tests run in this process.
for _name in [name for name in os.environ if name.startswith("CKPTD_")]:
    del os.environ[_name]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage: what is made then lives until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    marks = map(item.get_closest_marker, ("processes", "frameworks"))
    tiers.begin(allowed=any(mark is not None for mark in marks))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    tiers.end()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    with nullcontext() if fixturedef.scope == "function" else tiers.shared():
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in CI that has skipped a test for another reason than the known ones."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and not session.testsfailed:
        skipped = [report.longrepr[2] for report in reporter.stats.get("skipped", ())]
        if unknown := sorted({reason for reason in skipped if not tiers.MAY_SKIP.search(reason)}):
            reporter.write_line(f"CI must not skip a test for these reasons: {unknown}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def processes() -> None:
    """Lets a test start daemons, ranks and interpreters. `make test` leaves it out."""


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
def daemon(place: Home, processes: None) -> Iterator[Daemon]:
    """A daemon that is ready, with default settings.

    It is forked, because there are hundreds. `running` starts one as a user does.
    """
    with running(place, forked=True) as started:
        yield started


@pytest.fixture(scope="session")
def _daemon_of_worker() -> Iterator[SharedDaemon]:
    made = SharedDaemon()
    yield made
    made.close()


@pytest.fixture
def shared_daemon(_daemon_of_worker: SharedDaemon) -> Iterator[LentDaemon]:
    """A daemon that other tests use too, for tests that only save and load, as `job`."""
    with _daemon_of_worker.lent() as lent:
        yield lent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    add_log(report, item)
    return report


@pytest.fixture(scope="session")
def pool(processes: None) -> Iterator[Lend]:
    """Lends ranks that other tests have used before, as in `with pool(2) as ranks`."""
    from tests.support.rank_pool import Pool  # tests without ranks need no torch

    made = Pool()
    yield made.ranks
    made.close()
