"""The rows of the benchmark's table: each compares a measured value with what is wanted
of it, and fails visibly.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
_QUIET, _MOST_SETTLING = 0.3, 5.0
"""A disk is idle if its counters do not change for so many seconds. A disk that others
use is not waited for any longer than this.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table: one measured value, and the limit that it must keep.

    value: the value, in `unit`. limit: the least value that passes, or the greatest if
    `at_most` is True; None if the row is only printed. beside: other values measured in
    the same run, of peers and of the machine's limits, in the same unit unless their
    name says otherwise.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_most: bool = True
    beside: dict[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return "-"
        return (
            "PASS"
            if (self.value <= self.limit if self.at_most else self.value >= self.limit)
            else "FAIL"
        )

    def text(self) -> str:
        wanted = (
            ""
            if self.limit is None
            else f"{'at most' if self.at_most else 'at least'} {self.limit:g}"
        )
        beside = ", ".join(f"{name} {value:.4g}" for name, value in self.beside.items())
        return (
            f"{self.verdict:<5}{self.name:<58}{self.value:>9.3f} "
            f"{self.unit:<10}{wanted:<17}{beside}"
        )


def settled() -> None:
    """Wait until the disk is idle: it has written everything that earlier rounds have
    left to it, and discarded their files.
    """
    os.sync()
    device = Path(tempfile.gettempdir()).stat().st_dev
    counters = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    before, end = "", time.monotonic() + _MOST_SETTLING
    while time.monotonic() < end:
        now = counters.read_text() if counters.exists() else ""
        if before == now and before:
            return
        before = now
        time.sleep(_QUIET)


def drop_pages(place: Path) -> None:
    """Drop the files below a directory from the page cache."""
    for path in place.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # a page that is not yet on the disk would stay
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def machine() -> dict[str, Any]:
    """Return the facts about this machine that the figures depend on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    return {
        "cpu": model or platform.processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "python": platform.python_version(), "torch": torch.__version__,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }  # fmt: skip


def keep(rows: list[Row], topic: str) -> None:
    """Print the rows, and write them as JSON beside the earlier results."""
    for row in rows:
        print(row.text(), flush=True)
    file = RESULTS / f"{time.strftime('%Y-%m-%d')}-{topic}.json"
    file.write_text(
        json.dumps(
            {
                "machine": machine(),
                "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
            },
            indent=1,
        )
        + "\n"
    )
