"""Tests that the rate of restores is that of recoveries, and never an assumption."""

from __future__ import annotations

from pathlib import Path

from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import History
from ckptd.daemon.telemetry.restore_rate import RestoreRate, rate_of, read_rate
from tests.support.cases import each_case


def recovery(job: str = "gpt", **facts: float | str) -> LoggedEvent:
    return LoggedEvent(1.0, "job.recovered", 20, "recovered", {"job": job, **facts})


@each_case(
    "facts",
    [
        {},
        {"seconds": 2.0, "bytes": 5},  # from memory, or of an earlier daemon
        {"restored_bytes": 5},
        {"restored_bytes": 5, "seconds": 0.0},
        {"restored_bytes": 0, "seconds": 2.0},
        {"restored_bytes": "5", "seconds": 2.0},
    ],
)
def test_without_a_measured_recovery_there_is_no_rate(facts: dict[str, float | str]) -> None:
    assert rate_of([LoggedEvent(1.0, "job.recovered", 20, "recovered", facts)]) is None


def test_the_median_of_the_last_recoveries_counts() -> None:
    found = rate_of([recovery(restored_bytes=nbytes, seconds=2.0) for nbytes in (9, 2, 4, 6, 8, 2)])
    assert found == RestoreRate(2.0, 5)
    assert found.seconds(10) == 5.0


def test_the_history_has_the_recoveries_of_each_job(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite3"
    assert read_rate(file, "gpt") is None
    history = History(file)
    history.take([
        recovery(restored_bytes=30, seconds=3.0), recovery("bert", restored_bytes=8, seconds=1.0),
    ])  # fmt: skip
    history.close()
    assert read_rate(file, "gpt") == RestoreRate(10.0, 1)
    assert read_rate(file, "other") is None
    file.write_bytes(b"SQLite format 3\0" + b"x" * 4096)
    assert read_rate(file, "gpt") is None
