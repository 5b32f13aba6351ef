"""Tests the text for Prometheus: it is read back with the parser of the library."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptd.daemon.job.durations import Distribution
from ckptd.daemon.telemetry.exposition import render
from ckptd.daemon.telemetry.figures import DaemonFigures, JobFigures, MetricsBoard, Phase
from ckptd.shared import __version__

DOCS = Path(__file__).parents[3] / "docs"
FIGURES = DaemonFigures(
    jobs=(
        JobFigures("gpt", 3, 30, 1.7e9 + 0.25, 7, 2, 1, 5, 3, 40, 1, 60),
        JobFigures('odd "name"\\\n', 1, None, None, None, 0, 0),
        JobFigures("new"),
    ),
    jobs_known=1003,
    snapshots={"durable": 5, "failed": 2, "skipped": 1},
    sealed=8,
    verify_failures=1,
    uncompared=6,
    stalls=Distribution((0.1, 1.0), (4, 0, 2), 12.5),
    saves=Distribution((1.0,), (5, 0), 2.5),
    persisted={"raw": 1 << 40, "stored": 7},
    chunks={"whole": 5, "delta": 12, "linked": 3},
    recoveries={"memory": 3, "stage": 0, "storage": 1},
    recovery_times=Distribution((1.0,), (3, 1), 9.5),
    pending=100,
    shm_used=200,
    replica_bytes=60,
    disk_free=300,
    refused=4,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def shown(board: MetricsBoard) -> Samples:
    """Return the value of each sample, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(render(board).decode())
        for sample in family.samples
    }


@pytest.fixture
def board() -> MetricsBoard:
    made = MetricsBoard(time.monotonic() + 1000, 1.0)
    made.figures, made.phase = FIGURES, Phase.READY
    return made


def test_the_figures_of_the_daemon(board: MetricsBoard) -> None:
    found = shown(board)
    assert {key: value for key, value in found.items() if "job" not in dict(key[1])} == {
        ("ckptd_build_info", (("version", __version__),)): 1,
        ("ckptd_ready", ()): 1,
        ("ckptd_event_loop_lag_seconds", ()): 0,
        ("ckptd_snapshots_total", (("result", "durable"),)): 5,
        ("ckptd_snapshots_total", (("result", "failed"),)): 2,
        ("ckptd_snapshots_total", (("result", "skipped"),)): 1,
        ("ckptd_snapshots_sealed_total", ()): 8,
        ("ckptd_snapshot_stall_seconds_bucket", (("le", "0.1"),)): 4,
        ("ckptd_snapshot_stall_seconds_bucket", (("le", "1.0"),)): 4,
        ("ckptd_snapshot_stall_seconds_bucket", (("le", "+Inf"),)): 6,
        ("ckptd_snapshot_stall_seconds_count", ()): 6,
        ("ckptd_snapshot_stall_seconds_sum", ()): 12.5,
        ("ckptd_persist_seconds_bucket", (("le", "1.0"),)): 5,
        ("ckptd_persist_seconds_bucket", (("le", "+Inf"),)): 5,
        ("ckptd_persist_seconds_count", ()): 5,
        ("ckptd_persist_seconds_sum", ()): 2.5,
        ("ckptd_persist_bytes_total", (("kind", "raw"),)): 1 << 40,
        ("ckptd_persist_bytes_total", (("kind", "stored"),)): 7,
        ("ckptd_persist_chunks_total", (("kind", "whole"),)): 5,
        ("ckptd_persist_chunks_total", (("kind", "delta"),)): 12,
        ("ckptd_persist_chunks_total", (("kind", "linked"),)): 3,
        ("ckptd_recoveries_total", (("source", "memory"),)): 3,
        ("ckptd_recoveries_total", (("source", "stage"),)): 0,
        ("ckptd_recoveries_total", (("source", "storage"),)): 1,
        ("ckptd_recovery_seconds_bucket", (("le", "1.0"),)): 3,
        ("ckptd_recovery_seconds_bucket", (("le", "+Inf"),)): 4,
        ("ckptd_recovery_seconds_count", ()): 4,
        ("ckptd_recovery_seconds_sum", ()): 9.5,
        ("ckptd_pending_bytes", ()): 100,
        ("ckptd_verify_failures_total", ()): 1,
        ("ckptd_uncompared_snapshots_total", ()): 6,
        ("ckptd_shm_used_bytes", ()): 200,
        ("ckptd_replica_bytes", ()): 60,
        ("ckptd_disk_free_bytes", ()): 300,
        ("ckptd_refused_processes", ()): 4,
        ("ckptd_jobs", ()): 1003,
    }


def test_the_figures_of_the_jobs_and_none_for_what_is_not_known(board: MetricsBoard) -> None:
    found = shown(board)
    of_jobs = {
        (name, dict(labels)["job"]): value
        for (name, labels), value in found.items()
        if "job" in dict(labels)
    }
    odd = 'odd "name"\\\n'
    assert of_jobs == {
        ("ckptd_checkpoints", "gpt"): 3, ("ckptd_checkpoints", odd): 1,
        ("ckptd_checkpoints", "new"): 0, ("ckptd_damaged_checkpoints", "gpt"): 1,
        ("ckptd_damaged_checkpoints", odd): 0, ("ckptd_damaged_checkpoints", "new"): 0,
        ("ckptd_last_durable_step", "gpt"): 30,
        ("ckptd_last_durable_timestamp_seconds", "gpt"): 1.7e9 + 0.25,
        ("ckptd_non_finite_values", "gpt"): 5,
        ("ckptd_last_durable_chain", "gpt"): 3,
        ("ckptd_last_replicated_step", "gpt"): 40, ("ckptd_replicas_off", "gpt"): 1,
        ("ckptd_unlocked_bytes", "gpt"): 60, ("ckptd_unlocked_bytes", odd): 0,
        ("ckptd_unlocked_bytes", "new"): 0,
        ("ckptd_room_checkpoints", "gpt"): 7, ("ckptd_ranks_connected", "gpt"): 2,
        ("ckptd_ranks_connected", odd): 0, ("ckptd_ranks_connected", "new"): 0,
    }  # fmt: skip


def test_no_label_but_the_job_is_free(board: MetricsBoard) -> None:
    labels = {name for _, found in shown(board) for name, _ in found}
    assert labels == {"job", "result", "kind", "le", "source", "version"}


def test_before_there_are_figures_the_loop_is_shown() -> None:
    board = MetricsBoard(time.monotonic() - 100, 1.0)
    found = shown(board)
    assert {name for name, _ in found} == {
        "ckptd_build_info", "ckptd_ready", "ckptd_event_loop_lag_seconds",
    }  # fmt: skip
    assert found["ckptd_ready", ()] == 0
    assert found["ckptd_event_loop_lag_seconds", ()] >= 99


def test_free_space_that_is_not_known_is_left_out(board: MetricsBoard) -> None:
    before = shown(board)
    board.figures = DaemonFigures(
        **{name: getattr(FIGURES, name) for name in DaemonFigures.__slots__} | {"disk_free": None}
    )
    assert before.keys() - shown(board).keys() == {("ckptd_disk_free_bytes", ())}


@pytest.mark.parametrize(
    "page", ["monitoring/ckptd-alerts.yml", "monitoring/ckptd-board.json", "how-to/monitor.md"]
)
def test_the_metrics_that_the_documents_name_exist(board: MetricsBoard, page: str) -> None:
    named = set(re.findall(r"\bckptd_[a-z_]+\b", (DOCS / page).read_text()))
    families = {name for name, _ in shown(board)}
    families |= {name.rpartition("_")[0] for name in families}
    assert len(named) >= 7
    assert named - families == set()
