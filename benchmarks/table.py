"""Prints the table of all rows that the benchmarks of today have measured, and draws
the times of the saves and the sizes of the deltas.

`python -m benchmarks.table`; `make bench` ends with it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, Row

SAVED, STORED = "fp32 weights and moments", "stored bytes / raw bytes"
DRAWN = {
    "held, steady / best stager of dcp.async_save": ("held", f"held, {SAVED}", "seconds"),
    "seal to durable, raw / O_DIRECT write": ("durable", f"durable, {SAVED}", "seconds"),
    "size of bf16 at RL rates": ("deltas-rl", "a step of fine-tuning, bf16", STORED),
    "size of bf16 5 steps apart": ("deltas-5-steps", "5 steps of pre-training, bf16", STORED),
}
"""The rows whose values are drawn, with the name of the drawing, its title and the label
of its axis.
"""


def rows_of(file: Path) -> list[Row]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return [
        Row(**{name: value for name, value in row.items() if name != "verdict"}) for row in found
    ]


def draw(values: dict[str, float], title: str, label: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.4 * len(values) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh(
        list(values),
        list(values.values()),
        color=["tab:blue" if name.startswith("ckptd") else "tab:gray" for name in values],
    )
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title)
    figure.savefig(file)


def main() -> None:
    today = time.strftime("%Y-%m-%d")
    rows = {file: rows_of(file) for file in sorted(RESULTS.glob(f"{today}-*.json"))}
    for file, found in rows.items():
        print(f"\n{file.stem.removeprefix(f'{today}-')}")
        for row in found:
            print(row.text())
        for row in found:
            if row.name in DRAWN:
                name, title, label = DRAWN[row.name]
                draw(row.beside, title, label, RESULTS / f"{today}-{name}.svg")
    verdicts = [row.verdict for found in rows.values() for row in found]
    print(
        f"\n{verdicts.count('PASS')} rows pass, {verdicts.count('FAIL')} fail, "
        f"{verdicts.count('-')} have no limit"
    )


if __name__ == "__main__":
    main()
