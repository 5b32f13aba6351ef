"""What the daemon measures of itself: with a loop that is held up, a disk that hangs,
and a save that stands still.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.process import notify, vitals
from ckptd.daemon.process.vitals import Vitals, rss_bytes
from ckptd.daemon.telemetry.overdue import Overdue
from ckptd.shared.storage.locate import open_root
from tests.support.events import logged

MEGABYTE = 1 << 20


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As much of a daemon as is measured. A measurement is taken every millisecond."""
    monkeypatch.setattr(vitals, "_PERIOD_SECONDS", 0.001)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    (tmp_path / "root").mkdir()
    with ThreadPoolExecutor(1) as pool:
        yield SimpleNamespace(
            saver=SimpleNamespace(busy=False), pipelines=[SimpleNamespace(chunks_done=0)],
            calls=SimpleNamespace(pool=pool), config=SimpleNamespace(storage_timeout=0.0),
            repository=open_root(tmp_path / "root"), catalog=Catalog(),
        )  # fmt: skip


def watched(
    found: Vitals, condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Watch until the condition is true."""

    async def watch() -> None:
        task = asyncio.ensure_future(found.watch())
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it is never measured"
            await asyncio.sleep(0)
            meanwhile()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(watch())


def test_the_disk_is_measured_and_systemd_is_told(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(notify, "notify", told.append)
    found = Vitals(parts, time.monotonic() - 100)
    assert (found.disk_free, found.uptime >= 100) == (None, True)
    watched(found, lambda: found.disk_free is not None and told)
    assert found.disk_free is not None
    assert abs(found.disk_free - psutil.disk_usage(str(tmp_path)).free) < 10_000 * MEGABYTE
    assert set(told) == {"WATCHDOG=1"}


def test_a_loop_that_is_held_up_is_seen(parts: Any) -> None:
    found, lags = Vitals(parts, time.monotonic()), list[float]()

    def hold() -> None:
        time.sleep(0.05)
        lags.append(found.lag)

    watched(found, lambda: len(lags) > 3, hold)
    assert max(lags) > 0.02


def test_a_root_that_is_gone_has_no_free_space(parts: Any, tmp_path: Path) -> None:
    parts.config.storage_timeout = 60.0
    found, root = Vitals(parts, time.monotonic()), tmp_path / "root"

    def remove() -> None:
        if found.disk_free is not None and root.exists():
            root.rmdir()

    watched(found, lambda: found.disk_free is None and not root.exists(), remove)


def test_a_disk_that_hangs_is_measured_once_and_counts_as_gone(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, go, asked = Vitals(parts, time.monotonic()), threading.Event(), list[int]()

    def hang() -> int:
        asked.append(1)
        go.wait(60)
        return 7

    async def watch() -> None:
        task = asyncio.ensure_future(found.watch())
        while found.disk_free is None:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(parts.repository.storage, "free", hang)
        while found.disk_free is not None or not asked:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert len(asked) == 1
        go.set()
        while found.disk_free != 7:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(watch())


@pytest.mark.parametrize(
    ("busy", "writes", "warns"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_save_that_stands_still_is_logged(
    parts: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    busy: bool,
    writes: bool,
    warns: bool,
) -> None:
    monkeypatch.setattr(vitals, "_STUCK_SECONDS", 0.02)
    told: list[str] = []
    monkeypatch.setattr(notify, "notify", told.append)
    parts.saver.busy = busy

    def write() -> None:
        parts.pipelines[0].chunks_done += writes

    watched(Vitals(parts, time.monotonic()), lambda: len(told) > 60, write)
    warnings = [text for text in caplog.messages if text.startswith("no chunk has been written")]
    assert bool(warnings) == warns == bool(logged(caplog, "save.stuck"))
    assert len(warnings) < 20  # of 60 measurements: each time that the silence has doubled


def test_jobs_are_looked_at_for_saves_that_are_overdue(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "LOOK_SECONDS", 0.0)
    looked: list[list[str]] = []
    monkeypatch.setattr(
        Overdue, "look", lambda self, jobs, now: looked.append([job.name for job in jobs])
    )
    parts.catalog.job("gpt")
    watched(Vitals(parts, time.monotonic()), lambda: bool(looked))
    assert looked[0] == ["gpt"]


def test_jobs_are_not_overdue_because_the_daemon_itself_was_stopped(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(vitals, "_HELD_UP_SECONDS", 0.5)
    looked: list[float] = []
    monkeypatch.setattr(Overdue, "look", lambda self, jobs, now: looked.append(time.monotonic()))
    held: list[float] = []

    def hold() -> None:
        if not held:
            time.sleep(1.0)
            held.append(time.monotonic())

    watched(Vitals(parts, time.monotonic()), lambda: bool(looked), hold)
    assert looked[0] - held[0] > 0.4


def test_the_period_is_that_of_the_watchdog(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setenv("WATCHDOG_USEC", "5000000")
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Vitals(parts, 0.0).watch())
    assert slept == [2.5]


def test_memory_is_measured_unless_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cast(int, rss_bytes()) > MEGABYTE

    def run_out(self: psutil.Process) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(psutil.Process, "memory_info", run_out)
    assert rss_bytes() is None


def test_a_root_is_lost_if_it_is_missing_in_two_measurements_in_a_row(parts: Any) -> None:
    seen = [True, False, True, False, *[True] * 3]
    lost: list[int] = []

    class Storage:
        def free(self) -> int:
            return 1

        def is_lost(self) -> bool:
            return seen.pop(0) if seen else True

    parts.repository = SimpleNamespace(storage=Storage())
    found = Vitals(parts, time.monotonic(), lambda: lost.append(len(seen)))
    watched(found, lambda: not seen)
    assert lost == [1]
