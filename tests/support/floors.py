"""Prints how much of each package the tests cover, and fails if it is less than the
package's floor: `make coverage-all`.

Reads what `coverage combine` has left. A statement counts as one, and so does each way
out of a branch. Lower a floor only together with the reason; raise it when more is
covered.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOORS = {"agent": 97, "daemon": 97, "shared": 98}
"""The least percentage of statements and branches together, by package: what was
measured, rounded down.
"""


@dataclass(slots=True)
class Tally:
    """Counts of one package."""

    statements: int = 0
    branches: int = 0
    covered: int = 0

    @property
    def percent(self) -> float:
        """The percentage of statements and branches together that is covered. 0 for a
        package that was not measured.
        """
        return 100.0 * self.covered / max(1, self.statements + self.branches)


def tallies(report: dict[str, Any]) -> dict[str, Tally]:
    """Return the tally of each package, from the report of `coverage json`."""
    found = {package: Tally() for package in FLOORS}
    for name, file in report["files"].items():
        package = next((part for part in Path(name).parts if part in FLOORS), None)
        if package is not None:
            summary, tally = file["summary"], found[package]
            tally.statements += summary["num_statements"]
            tally.branches += summary["num_branches"]
            tally.covered += summary["covered_lines"] + summary["covered_branches"]
    return found


def table(found: dict[str, Tally]) -> str:
    lines = [f"{'package':<10}{'statements':>12}{'branches':>10}{'covered':>10}{'floor':>8}"]
    for package, tally in found.items():
        lines.append(
            f"{package:<10}{tally.statements:>12}{tally.branches:>10}{tally.percent:>9.2f}%{FLOORS[package]:>7}%"
        )
    return "\n".join(lines)


def below(found: dict[str, Tally]) -> list[str]:
    """Return the packages that are covered less than their floor."""
    return [package for package, tally in found.items() if tally.percent < FLOORS[package]]


def main() -> int:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [sys.executable, "-m", "coverage", "json", "-q", "-o", file.name], check=True
        )
        found = tallies(json.loads(Path(file.name).read_text()))
    print(table(found))
    if not (packages := below(found)):
        return 0
    print(f"below the floor: {', '.join(packages)}")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
