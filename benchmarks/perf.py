"""Measures this version beside an earlier one, by turns, and fails if a figure has
become worse.

`python -m benchmarks.perf [--rounds N] [--long] [--rows A;B] [--keep]`, which is `make
perf`. The earlier version is the commit in the file `baseline`, which a release moves.
It is built once, below `.perf/`. Each round measures every row of `probes.py` with both
versions, each in a process of its own, the one or the other first. A figure is the
median of the seconds of ckptd divided by those of a plain copy or a plain write of the
same bytes right before. Its change is that of this version divided by that of the
earlier one, round by round. A figure fails if its change is above 1 by more than its
spread: if three quarters of the rounds say that it is worse, by 3 % at least.

`--here` measures this version alone, and fails past twice the limits in `LIMITS`. CI
runs it. `--keep` adds a line for each figure to the page `HISTORY`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.probes import ROWS
from benchmarks.rows import settled

HERE = Path(__file__).parent
HISTORY = HERE.parent / "docs" / "explanation" / "figures-by-commit.md"
SHORT, LONG = 4, 24  # rounds: about ten minutes, and an hour
LIMITS = {
    ("15 tensors of 40 MB", "held"): 0.75,
    ("15 tensors of 40 MB", "recover"): 2.0,
    ("300 MB, raw", "durable"): 2.0,
    ("a process", "import"): 1.5,
    ("a daemon", "idle memory"): 8.0,
}
"""The greatest figures, for `--here`, in units of the peer."""
_TOLERATED = 1.03


@dataclass
class Measured:
    """A figure of both versions.

    `ratios` has a value for each round: the median of the seconds of ckptd over those of
    the peer. `cpu` has seconds, and `peak` bytes, of all figures of the row.
    """

    ratios: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    peak: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, version: str, pairs: list[list[float]], said: dict[str, Any]) -> None:
        self.ratios[version].append(median(mine / peer for mine, peer in pairs))
        self.cpu[version].append(said["cpu"])
        self.peak[version].append(said["peak"])
        if version == "this":
            self.seconds += [mine for mine, _ in pairs]

    def change(self) -> tuple[float, float, float]:
        """Return the median and the quartiles of this version over the other."""
        each = [a / b for a, b in zip(self.ratios["this"], self.ratios["other"], strict=True)]
        low, middle, high = quantiles(each, n=4, method="inclusive")
        return middle, low, high

    def text(self) -> str:
        found = f"{median(self.ratios['this']):8.3f} x  {median(self.seconds) * 1000:9.2f} ms"
        if "other" in self.ratios:
            middle, low, high = self.change()
            found += (
                f"  before {median(self.ratios['other']):8.3f} x  change {middle:5.2f} "
                f"({low:.2f} to {high:.2f})"
            )
        usage = {
            what: " to ".join(
                f"{median(values[v]) / unit:.{digits}f}" for v in ("other", "this") if v in values
            )
            for what, values, unit, digits in (
                ("cpu s", self.cpu, 1, 1),
                ("peak MB", self.peak, 1e6, 0),
            )
        }
        return f"{found}  cpu {usage['cpu s']} s, peak {usage['peak MB']} MB"


def built(commit: str) -> Path:
    """Build a commit, unless it is built already, and return a directory to import it
    from.
    """
    place = HERE.parent / ".perf" / commit
    if not place.exists():
        with tempfile.TemporaryDirectory() as source:
            archive = Path(source, "tar")
            subprocess.run(["git", "archive", "-o", str(archive), commit], check=True)
            with tarfile.open(archive) as tar:
                tar.extractall(Path(source, "tree"), filter="data")
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
            subprocess.run([*install, str(place), str(Path(source, "tree"))], check=True)
    return place


def probe(row: str, version: Path | None) -> dict[str, Any]:
    """Measure a row with the version in a directory, or with this one."""
    settled()
    environment = os.environ | ({} if version is None else {"PYTHONPATH": str(version)})
    command = [sys.executable, "-W", "ignore", str(HERE / "probes.py"), row]
    said = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def measure(rows: list[str], rounds: int, other: Path | None) -> dict[tuple[str, str], Measured]:
    found = defaultdict[tuple[str, str], Measured](Measured)
    versions: list[tuple[str, Path | None]] = [("this", None)]
    if other is not None:
        versions.append(("other", other))
    for number in range(rounds):
        for row in rows:
            for version, place in versions if number % 2 else reversed(versions):
                said = probe(row, place)
                for name, pairs in said["figures"].items():
                    found[row, name].add(version, pairs, said)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, help=f"{SHORT} by default, {LONG} with --long")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--rows", default=";".join(ROWS), help="with semicolons between them")
    parser.add_argument("--here", action="store_true", help="this version alone")
    parser.add_argument("--keep", action="store_true", help="add the figures to the history")
    options = parser.parse_args()
    rows, commit = options.rows.split(";"), (HERE / "baseline").read_text().strip()
    if options.here:
        rows = [row for row in rows if any(row == of for of, _ in LIMITS)]
    if unknown := set(rows) - set(ROWS):
        parser.error(f"no such row: {sorted(unknown)}. There are {list(ROWS)}")
    rounds = options.rounds or (1 if options.here else LONG if options.long else SHORT)
    if rounds < 2 and not options.here:
        parser.error("two versions need two rounds at least, with each of them first")
    found = measure(rows, rounds, None if options.here else built(commit))
    failed = 0
    for (row, name), measured in found.items():
        limit = LIMITS.get((row, name))
        if options.here:
            if limit is None:
                continue
            wrong = median(measured.ratios["this"]) > 2 * limit
        else:
            wrong = measured.change()[1] > 1 and measured.change()[0] > _TOLERATED
        failed += wrong
        print(f"{'FAIL' if wrong else 'PASS'}  {row:24}{name:24}{measured.text()}", flush=True)
    if options.keep:
        keep(found, commit)
    print(f"{len(found)} figures in {rounds} rounds, {failed} worse")
    return 1 if failed else 0


def keep(found: dict[tuple[str, str], Measured], before: str) -> None:
    """Add a line for each figure to the table of figures by commit."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    with HISTORY.open("a") as file:
        for (row, name), measured in found.items():
            middle, low, high = measured.change()
            ratio = median(measured.ratios["this"])
            file.write(
                f"| {time.strftime('%Y-%m-%d')} | {commit} | {before[:8]} | {row} | {name} "
                f"| {ratio:.3f} | {middle:.2f} ({low:.2f} to {high:.2f}) |\n"
            )


if __name__ == "__main__":
    sys.exit(main())
