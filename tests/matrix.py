"""Runs the tests with several releases of torch and Python, each pair in a new virtual
environment, and prints a table of the results.

`python -m tests.matrix [TEST...] [--torch RELEASE...] [--python RELEASE...]
[--skip-missing] [--workers N]`. Needs only Python and pip. An environment takes up to 8
GB under TMPDIR, and is removed after its run. Exit code 1 unless all tests of all pairs
have passed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
NEWEST = "newest"
BETWEEN = "2.11"
"""Between the lowest release and that of constraints.txt. DCP of torch 2.9 to 2.11
loads in another way than before and after.
"""
PYTHONS = ("3.11", "3.13")
TESTS = ("tests/agent", "tests/shared", "tests/daemon", "tests/test_examples.py")
_VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    `problem` says why there are no results, and is empty if there are.
    """

    python: str
    torch: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problem: str = ""

    @property
    def good(self) -> bool:
        return not self.problem and self.failed == 0 and self.passed > 0


def lowest() -> str:
    """Return the lowest release of torch that pyproject.toml allows."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


def interpreter(release: str) -> str | None:
    """Return the path of the first interpreter of this release on PATH that runs, or
    None. `release` may also be a path.
    """
    places = (
        [Path(release)]
        if os.sep in release
        else [Path(place) / f"python{release}" for place in os.get_exec_path()]
    )
    for place in places:
        # It is run once, because pyenv puts a file on PATH for each release that it
        # has, and those that are not chosen fail.
        if (
            place.is_file()
            and subprocess.run([place, "-V"], capture_output=True, check=False).returncode == 0
        ):
            return str(place)
    return None


def run(python: str, torch: str, tests: list[str], workers: int) -> Row:
    """Make an environment, run the tests in it, and remove it."""
    with tempfile.TemporaryDirectory(prefix="ckptd-matrix-") as place:
        own, results = f"{place}/venv/bin/python", Path(place) / "results.xml"
        asked = "torch" if torch == NEWEST else f"torch=={torch}.*"
        try:
            subprocess.run([python, "-m", "venv", f"{place}/venv"], check=True)
            subprocess.run(
                [
                    own,
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--editable",
                    f"{ROOT}[torch,demo,dev]",
                    asked,
                ],
                check=True,
            )
            versions = subprocess.run(
                [own, "-c", _VERSIONS], check=True, capture_output=True, text=True
            ).stdout.split()
        except subprocess.CalledProcessError:
            return Row(python, torch, problem="the environment could not be made")
        print(f"\n== Python {versions[0]}, torch {versions[1]}", flush=True)
        command = [
            own,
            "-m",
            "pytest",
            "-q",
            "-n",
            str(workers),
            "--dist",
            "worksteal",
            "-p",
            "no:cacheprovider",
            f"--junitxml={results}",
        ]
        status = subprocess.run([*command, *tests], cwd=ROOT, check=False).returncode
        if status not in (0, 1):  # 1 means that tests have failed
            return Row(versions[0], versions[1], problem=f"pytest has ended with status {status}")
        return Row(versions[0], versions[1], *counts(results))


def counts(results: Path) -> tuple[int, int, int]:
    """Return how many tests passed, failed and were skipped, by a file that pytest has
    written. All are 0 if pytest wrote no file.
    """
    if not results.exists():
        return 0, 0, 0
    suites = list(ElementTree.parse(results).getroot().iter("testsuite"))
    ran, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    return ran - failures - errors - skipped, failures + errors, skipped


def table(rows: list[Row]) -> str:
    lines = [f"{'python':<8} {'torch':<16} {'passed':>7} {'failed':>7} {'skipped':>7}"]
    for row in rows:
        numbers = row.problem or f"{row.passed:>7} {row.failed:>7} {row.skipped:>7}"
        lines.append(f"{row.python:<8} {row.torch:<16} {numbers}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "tests", nargs="*", default=TESTS, help=f"what pytest runs (default: {' '.join(TESTS)})"
    )
    parser.add_argument(
        "--torch",
        nargs="+",
        default=[lowest(), BETWEEN, NEWEST],
        help="releases such as 2.11, or `newest`",
    )
    parser.add_argument(
        "--python",
        nargs="+",
        default=PYTHONS,
        help="releases such as 3.13, which are looked for on PATH, or paths",
    )
    parser.add_argument(
        "--skip-missing",
        action="store_true",
        help="a release of Python that is not on PATH is no failure",
    )
    parser.add_argument("--workers", type=int, default=3, help="processes that run tests at once")
    options = parser.parse_args()
    rows, missing = [], []
    for release in options.python:
        python = interpreter(release)
        if python is None:
            missing.append(Row(release, "-", problem="there is no such interpreter on PATH"))
            continue
        rows += [
            run(python, torch, list(options.tests), options.workers) for torch in options.torch
        ]
    print("\n" + table(rows + missing))
    sys.exit(
        0 if rows and all(row.good for row in rows) and (options.skip_missing or not missing) else 1
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the environment is removed
    main()
