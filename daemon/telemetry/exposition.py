"""Renders what the board shows in the text format of Prometheus.

prometheus_client is imported when this module is, which a daemon without metrics never
does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ckptd.daemon.job.durations import Distribution
from ckptd.daemon.telemetry.figures import DaemonFigures, JobFigures, MetricsBoard, Phase
from ckptd.shared import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(board: MetricsBoard) -> bytes:
    """Return all metrics, in the text format of version 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(board))
    return generate_latest(registry)


class _Collector(Collector):
    """Makes metrics of the figures on a board, each time that it is asked."""

    def __init__(self, board: MetricsBoard) -> None:
        self._board = board

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        board = self._board
        yield InfoMetricFamily(
            "ckptd_build", "Version of this ckptd.", value={"version": __version__}
        )
        yield GaugeMetricFamily(
            "ckptd_ready", "1 while clients are served.", float(board.phase is Phase.READY)
        )
        yield GaugeMetricFamily(
            "ckptd_event_loop_lag_seconds",
            "Delay of the event loop. It grows while the loop is stuck.",
            board.lag(time.monotonic()),
        )
        if board.figures is not None:
            yield from _of_the_daemon(board.figures)
            yield from _of_the_jobs(board.figures.jobs)


def _of_the_daemon(figures: DaemonFigures) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "ckptd_snapshots",
        "Snapshots by result. One that failed and was saved later counts for both.",
        labels=["result"],
    )
    for result, count in figures.snapshots.items():
        ended.add_metric([result], count)
    yield ended
    yield CounterMetricFamily(
        "ckptd_snapshots_sealed", "Snapshots that were complete in memory.", figures.sealed
    )
    yield _histogram(
        "ckptd_snapshot_stall_seconds",
        "Time for which a snapshot held the training of a rank.",
        figures.stalls,
    )
    yield _histogram("ckptd_persist_seconds", "Time that a successful save took.", figures.saves)
    persisted = CounterMetricFamily(
        "ckptd_persist_bytes", "Bytes of saves: read from memory, and stored.", labels=["kind"]
    )
    for kind, count in figures.persisted.items():
        persisted.add_metric([kind], count)
    yield persisted
    chunks = CounterMetricFamily(
        "ckptd_persist_chunks",
        "Chunks of saves: written whole, written as deltas, and linked because they have not "
        "changed.",
        labels=["kind"],
    )
    for kind, count in figures.chunks.items():
        chunks.add_metric([kind], count)
    yield chunks
    recoveries = CounterMetricFamily(
        "ckptd_recoveries", "Recoveries of jobs, by what they read.", labels=["source"]
    )
    for source, count in figures.recoveries.items():
        recoveries.add_metric([source], count)
    yield recoveries
    yield _histogram(
        "ckptd_recovery_seconds", "Time that a recovery of a job took.", figures.recovery_times
    )
    yield GaugeMetricFamily(
        "ckptd_pending_bytes", "Sealed bytes that are still to be saved.", figures.pending
    )
    yield CounterMetricFamily(
        "ckptd_verify_failures",
        "Snapshots whose bytes did not match their checksums.",
        figures.verify_failures,
    )
    yield CounterMetricFamily(
        "ckptd_uncompared_snapshots",
        "Snapshots of a rank that were not compared with other ranks, because its device was full.",
        figures.uncompared,
    )
    yield GaugeMetricFamily(
        "ckptd_shm_used_bytes", "Shared memory that slots take.", figures.shm_used
    )
    yield GaugeMetricFamily(
        "ckptd_replica_bytes",
        "Shared memory for copies of slots of other nodes, which is part of the slots.",
        figures.replica_bytes,
    )
    if figures.disk_free is not None:
        yield GaugeMetricFamily(
            "ckptd_disk_free_bytes", "Free bytes under the root.", figures.disk_free
        )
    yield GaugeMetricFamily(
        "ckptd_refused_processes",
        "Living processes that the daemon has refused for longer than a minute.",
        figures.refused,
    )
    yield GaugeMetricFamily("ckptd_jobs", "Jobs that the daemon knows.", figures.jobs_known)


def _histogram(name: str, help_text: str, found: Distribution) -> Metric:
    bounds = [*(repr(bound) for bound in found.bounds), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(found.counts)), strict=True))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=found.seconds)


_JOB_GAUGES = {
    "checkpoints": ("ckptd_checkpoints", "Checkpoints of the job on storage."),
    "damaged": ("ckptd_damaged_checkpoints", "Checkpoints whose manifest cannot be read."),
    "last_step": ("ckptd_last_durable_step", "Step of the newest durable checkpoint."),
    "last_created": (
        "ckptd_last_durable_timestamp_seconds",
        "Unix time at which the newest durable checkpoint was made.",
    ),
    "non_finite": (
        "ckptd_non_finite_values",
        "Values of parameters and optimizer state in the newest durable checkpoint that are NaN "
        "or infinite.",
    ),
    "chain": (
        "ckptd_last_durable_chain",
        "Deltas in the longest chain of the newest durable checkpoint, 0 if it is whole.",
    ),
    "replicated": (
        "ckptd_last_replicated_step",
        "Newest step that all nodes have copied to the memory of other nodes.",
    ),
    "replicas_off": (
        "ckptd_replicas_off",
        "1 if the nodes of the job make no more copies in the memory of other nodes.",
    ),
    "unlocked": (
        "ckptd_unlocked_bytes",
        "Bytes of slots that were not page-locked when the last snapshots were copied into them "
        "from accelerators, which holds the training for longer.",
    ),
    "room": ("ckptd_room_checkpoints", "How many more checkpoints of the job fit."),
    "ranks": ("ckptd_ranks_connected", "Ranks of the job on this node that are connected."),
}
"""Name and description of the metric of each field of JobFigures."""


def _of_the_jobs(jobs: Iterable[JobFigures]) -> Iterator[Metric]:
    for field, (name, help_text) in _JOB_GAUGES.items():
        gauge = GaugeMetricFamily(name, help_text, labels=["job"])
        for job in jobs:
            value = getattr(job, field)
            if value is not None:
                gauge.add_metric([job.name], value)
        yield gauge
