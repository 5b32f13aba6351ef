"""Measures this version beside an earlier one, by turns, and fails if a figure has
become worse.

`python -m benchmarks.perf [--rounds N] [--long] [--rows A;B] [--keep]`, which is `make
perf`. The earlier version is the commit in the file `baseline`, which a release moves.
It is built once, below `.perf/`. Each round measures every row of `probes.py` with both
versions, each in a process of its own, the one or the other first. A figure is the
median of the values of ckptd divided by those of a peer, which does the same with the
same bytes right before. Its change is that of this version divided by that of the
earlier one, round by round, and its spread are the quartiles of its changes. A figure is
worse if its change is above 1 by more than its spread, and by 5 % at least. The rows with
such figures are measured once more, in as many rounds, and fail if these rounds say so,
too. A figure that the earlier version does not have is printed without a change.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.probes import ROWS, SELDOM
from benchmarks.rows import settled

HERE = Path(__file__).parent
HISTORY = HERE.parent / "docs" / "explanation" / "figures-by-commit.md"
SHORT, LONG = 3, 12  # rounds: about twelve minutes, and an hour
_SELDOM = 7
"""The long form measures the rows of `SELDOM` in one of so many rounds."""
LIMITS = {
    ("15 tensors of 40 MB", "held"): 0.75,
    ("15 tensors of 40 MB", "recover"): 2.0,
    ("100 tensors of 2 MB", "durable"): 2.0,
    ("a process", "import"): 1.5,
    ("a daemon", "idle memory"): 8.0,
}
"""The greatest figures, for `--here`, in units of the peer."""
_TOLERATED = 1.05

Said = dict[str, Any]
"""The findings of a probe: one line of JSON."""


def spread(changes: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of some changes, and their quartiles."""
    if len(changes) == 1:
        return changes[0], changes[0], changes[0]
    low, middle, high = quantiles(changes, n=4, method="inclusive")
    return middle, low, high


def is_worse(changes: Sequence[float]) -> bool:
    """Return True if a figure has changed for the worse, by more than its spread. Of fewer
    than four changes, all must say so.
    """
    if not changes:
        return False
    middle, low, _ = spread(changes)
    return (low if len(changes) > 3 else min(changes)) > 1 and middle > _TOLERATED


def fails(first: Sequence[float], again: Sequence[float]) -> bool:
    """Return True if a figure is worse in the first rounds, and once more in those after
    them.
    """
    return is_worse(first) and is_worse(again)


@dataclass
class Measured:
    """A figure of both versions, which the same rounds have measured.

    ratios: for each round, the median of the values of ckptd over those of the peer.
    row: all that the probes of the figure's row have said. name: the figure's.
    """

    name: str
    row: dict[str, list[Said]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ratios(self) -> dict[str, list[float]]:
        return {
            version: [
                median(mine / peer for mine, peer in said["figures"][self.name]["pairs"])
                for said in each
                if self.name in said["figures"]
            ]
            for version, each in self.row.items()
        }

    @property
    def changes(self) -> list[float]:
        """The changes, by round. Empty if the earlier version lacks the figure."""
        each = self.ratios
        return [a / b for a, b in zip(each["this"], each.get("other", []), strict=False)]

    def text(self) -> str:
        mine = [said["figures"][self.name] for said in self.row["this"]]
        pairs = [pair for figure in mine for pair in figure["pairs"]]
        ratio, beside = median(self.ratios["this"]), median(peer for _, peer in pairs)
        found = f"{ratio:9.3f} x {mine[0]['peer']}"
        if mine[0]["nbytes"]:
            found += f" ({mine[0]['nbytes'] / beside / 1e9:.2f} GB/s)"
        found = f"{found:54}"
        if self.changes:
            middle, low, high = spread(self.changes)
            found += f"change {middle:5.2f} ({low:.2f} to {high:.2f})"
        else:
            low, high = min(self.ratios["this"]), max(self.ratios["this"])
            found += f"{low:.3f} to {high:.3f}"
        return f"{found:88}{mine[0]['pages']}"


def usage(row: dict[str, list[Said]]) -> str:
    """Return what a row has used, with the earlier version and with this one."""

    def both(name: str, unit: float, digits: int) -> str:
        found = {
            version: [said[name] / unit for said in row.get(version, ()) if said[name] is not None]
            for version in ("other", "this")
        }
        return " to ".join(f"{median(each):.{digits}f}" for each in found.values() if each) or "-"

    return (
        f"{row['this'][0]['threads']} threads, cpu {both('cpu', 1, 1)} s, peak "
        f"{both('peak', 1e6, 0)} MB, lost step time {both('lost', 1e-3, 0)} ms"
    )


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


def probe(row: str, version: Path | None) -> Said | None:
    """Measure a row with the version in a directory, or with this one.

    Return None if the earlier version cannot do all that the row measures.
    """
    settled()
    environment = os.environ | ({} if version is None else {"PYTHONPATH": str(version)})
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.probes", row]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment,
        cwd=HERE.parent, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write(done.stderr)
        if version is None:
            sys.exit(f"the row {row!r} cannot be measured: see the error above")
        print(f"the earlier version cannot measure the row {row!r}", flush=True)
        return None
    found: Said = json.loads(done.stdout.splitlines()[-1])
    return found


Rows = dict[str, dict[str, list[Said]]]


def measure(rows: Sequence[str], rounds: int, other: Path | None) -> Rows:
    """Return all that the probes of these rows have said, by row and version."""
    found: Rows = {row: defaultdict(list) for row in rows}
    versions: list[tuple[str, Path | None]] = [("this", None)]
    if other is not None:
        versions.append(("other", other))
    for number in range(rounds):
        for row in rows:
            if row in SELDOM and number % _SELDOM:
                continue
            for version, place in versions if number % 2 else reversed(versions):
                if (said := probe(row, place)) is not None:
                    found[row][version].append(said)
    return found


def figures(rows: Rows) -> dict[tuple[str, str], Measured]:
    """Return the figures of these rows, by row and name."""
    return {
        (row, name): Measured(name, said)
        for row, said in rows.items()
        for name in said["this"][0]["figures"]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, help=f"{SHORT} by default, {LONG} with --long")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--rows", help="with semicolons between them")
    parser.add_argument("--here", action="store_true", help="this version alone")
    parser.add_argument("--keep", action="store_true", help="add the figures to the history")
    options = parser.parse_args()
    known = ROWS | SELDOM
    rows = list(known if options.long else ROWS)
    if options.here:
        rows = [row for row in rows if any(row == of for of, _ in LIMITS)]
    elif options.rows:
        rows = options.rows.split(";")
    if unknown := set(rows) - set(known):
        parser.error(f"no such row: {sorted(unknown)}. There are {list(known)}")
    rounds = options.rounds or (1 if options.here else LONG if options.long else SHORT)
    if rounds < 2 and not options.here:
        parser.error("two versions need two rounds at least, with each of them first")
    commit = (HERE / "baseline").read_text().strip()
    other = None if options.here else built(commit)
    measured = measure(rows, rounds, other)
    first = figures(measured)
    if options.here:
        wrong = {
            figure
            for figure, limit in LIMITS.items()
            if median(first[figure].ratios["this"]) > 2 * limit
        }
        first = {figure: first[figure] for figure in LIMITS}
    else:
        suspects = {figure for figure, found in first.items() if is_worse(found.changes)}
        doubtful = list(dict.fromkeys(row for row, _ in suspects))
        for row, name in suspects:
            print(f"once more: {row}: {name}{first[row, name].text()}", flush=True)
        again = figures(measure(doubtful, rounds, other))
        wrong = {
            figure for figure in suspects if fails(first[figure].changes, again[figure].changes)
        }
        first |= {figure: again[figure] for figure in suspects}
    report(first, wrong, measured)
    if options.keep:
        keep(first, commit)
    print(f"{len(first)} figures in {rounds} rounds, the versions by turns, {len(wrong)} worse")
    return 1 if wrong else 0


def report(
    found: dict[tuple[str, str], Measured], wrong: set[tuple[str, str]], measured: Rows
) -> None:
    """Print the figures of each row below what the row has used."""
    for row, said in measured.items():
        print(f"{row}: {usage(said)}")
        for (of, name), figure in found.items():
            if of == row:
                verdict = "FAIL" if (of, name) in wrong else "PASS"
                print(f"  {verdict}  {name:32}{figure.text()}", flush=True)


def keep(found: dict[tuple[str, str], Measured], before: str) -> None:
    """Add a line for each figure to the table of figures by commit."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    with HISTORY.open("a") as file:
        for (row, name), measured in found.items():
            if not measured.changes:
                continue
            middle, low, high = spread(measured.changes)
            ratio = median(measured.ratios["this"])
            file.write(
                f"| {time.strftime('%Y-%m-%d')} | {commit} | {before[:8]} | {row} | {name} "
                f"| {ratio:.3f} | {middle:.2f} ({low:.2f} to {high:.2f}) |\n"
            )


if __name__ == "__main__":
    sys.exit(main())
