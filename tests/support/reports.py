"""Makes status reports of a daemon, for tests of what is drawn from them."""

from __future__ import annotations

from typing import Any


def job_report(name: str = "gpt", **changes: Any) -> dict[str, Any]:
    """Return the object of a job in a status report: one that runs, with nothing wrong."""
    return {
        "job": name,
        "attempt": 2,
        "last_sealed": {"attempt": 2, "step": 400, "tag": "step-00000400.a0002"},
        "last_durable": {
            "attempt": 2, "step": 380, "tag": "step-00000380.a0002", "age_seconds": 12.0,
        },
        "room_for": 97,
        "last_error": None,
        "pending": [],
        "saving": [],
        "delivered": [],
        "host": "node1",
        "ranks_here": None,
        "ranks_connected": 1,
        "running_seconds": 60.0,
        "unlocked_bytes": 0,
        "training_cost": None,
        "announced": "",
        "damaged": {},
        "newer": {},
        "ranks": [
            {
                "rank": 0, "pid": 4712, "connected": True,
                "slots": [
                    {"bytes": 10**9, "state": "writing", "step": 400},
                    {"bytes": 10**9, "state": "free", "step": None},
                ],
            }
        ],
    } | changes  # fmt: skip


def status_report(*jobs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a status report with these jobs."""
    return {
        "ready": True,
        "version": "0.1.0",
        "pid": 4711,
        "root": "/ckpts",
        "socket": "/run/ckptd.sock",
        "history": None,
        "stage": None,
        "uptime_seconds": 100.0,
        "rss_bytes": 41_200_000,
        "cpu_seconds": 5.0,
        "event_loop_lag_seconds": 0.002,
        "disk_free_bytes": 54_700_000_000,
        "descriptors": {"accepting_paused": None},
        "jobs_not_shown": 0,
        "jobs": list(jobs),
        "shared_memory": {"used_bytes": 85_400_000, "quota_bytes": 22_700_000_000},
        "counters": {"sealed": 12, "persisted": 11, "skipped": 3, "failed": 1},
    } | changes


SAVING = {
    "attempt": 2, "step": 400, "tag": "step-00000400.a0002", "age_seconds": 2.6,
    "done_bytes": 3_100_000_000, "total_bytes": 8_000_000_000,
    "bytes_per_second": 1_200_000_000, "seconds_left": 4.1,
}  # fmt: skip
"""A save that is under way, as a report has it."""
