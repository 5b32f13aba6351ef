"""Runs the checks of the accelerator path and prints their table: `python -m tests.gpu
[--only torn,kill] [--long] [--gigabytes N] [--json FILE] [--planted]`.

It needs torch and what ckptd itself needs, no network and no test tools. Every check
prints its lines as it finds them, and the file is written after each line. The exit
code is 1 if a line says FAIL. Rates are compared with torch's own pinned copy in the
same process; the last column has what an H100 with PCIe Gen5 x16 should reach.

Without a GPU the same checks run on simulated lanes (`simulated.py`), with small
states. That shows the order of copies and writes and what a kill leaves. What it cannot
show is skipped by name.

With --planted, the checks themselves are checked: each runs with a fault of ckptd
(`faults.py`), and must say FAIL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tests.gpu.source
from tests.gpu import cost, memory, order, several, survival
from tests.gpu.faults import FAULTS, planted
from tests.gpu.table import CHECKS, Line, as_json, run

FIRST = ["env", "bus", "torn", "writes", "held3000", "kill", "sealed", "steps", "recover"]
"""The most important checks come first."""
assert all((cost, memory, order, several, survival, tests.gpu.source))  # they register their checks


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--only", default="", help="names of checks, with commas")
    parser.add_argument("--long", action="store_true", help="16 GB and 30 kills")
    parser.add_argument("--gigabytes", type=float, help="the size of a large state")
    parser.add_argument("--planted", action="store_true", help="plant a fault in each check")
    parser.add_argument("--json", type=Path, help="the file for the lines")
    options = parser.parse_args()
    simulated = not torch.accelerator.is_available()
    settings = {
        "simulated": simulated,
        "gigabytes": options.gigabytes or (0.016 if simulated else 16 if options.long else 4),
        "kills": 30 if options.long else 2 if simulated else 6,
        "long": options.long,
        "devices": 0 if simulated else torch.accelerator.device_count(),
    }
    names = [name for name in options.only.split(",") if name] or [
        *FIRST,
        *(name for name in CHECKS if name not in FIRST),
    ]
    if unknown := set(names) - set(CHECKS):
        parser.error(f"no such check: {sorted(unknown)}. There are {list(CHECKS)}")
    if simulated:
        print("No GPU: copies run on simulated lanes. Rates and the driver are not tested.")
    lines, begun = [], time.perf_counter()
    for name in names:
        for line in with_faults(name, settings) if options.planted else run(name, settings):
            print(f"{time.perf_counter() - begun:5.0f} s  {name:9}  {line}", flush=True)
            lines.append(as_json(name, line))
            if options.json:
                options.json.write_text(json.dumps(lines, indent=1) + "\n")
    counts = {v: sum(line["verdict"] == v for line in lines) for v in ("PASS", "FAIL", "SKIP")}
    print(f"{counts}, {time.perf_counter() - begun:.0f} s")
    return 1 if counts["FAIL"] else 0


def with_faults(name: str, settings: dict[str, Any]) -> Iterator[Line]:
    """Yield a line for each fault of a check that can be seen here."""
    for fault in FAULTS:
        if fault.check == name and fault.shows(settings):
            yield planted(fault, settings)


if __name__ == "__main__":
    sys.exit(main())
