"""Says where each test of an earlier commit is now: `python -m tests.support.moved COMMIT`.

A test function that still stands in its file under its name is kept. `tests/moved.tsv`
has a line for each other one, and for each one whose cases were merged: the function,
by which test it was replaced, `replaced` or `deleted`, and why. This checks that no function of the
commit is missing from both, and that no line is wrong. It needs git; `--write` adds the
missing lines of the files given, which have the same columns.
"""

from __future__ import annotations

import ast
import csv
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "moved.tsv"
HEAD = ["test", "by", "what", "why"]


def functions(source: str, path: str) -> Iterator[str]:
    """Yield the id of each test function of a file, without its cases."""
    for node in ast.parse(source).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            name = getattr(inner, "name", "")
            if name.startswith("test"):
                within = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
                yield f"{path}::{within}{name}"


def at(commit: str) -> set[str]:
    """Return the test functions of a commit."""
    listed = _git("ls-tree", "-r", "--name-only", commit, "tests").split()
    return {
        test
        for path in listed
        if Path(path).name.startswith("test_") and path.endswith(".py")
        for test in functions(_git("show", f"{commit}:{path}"), path)
    }


def now() -> set[str]:
    """Return the test functions of the working tree."""
    return {
        test
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for test in functions(path.read_text(), str(path.relative_to(ROOT)))
    }


def problems(before: set[str], present: set[str], rows: Iterable[list[str]]) -> list[str]:
    """Return what is wrong with the rows of the table, a sentence each."""
    found, told = [], set()
    for test, by, what, why in rows:
        told.add(test)
        if test not in before:
            found.append(f"{test} was never there")
        elif what == "replaced" and by not in present:
            found.append(f"{test} is said to be replaced by {by}, which is not there")
        elif what == "deleted" and test in present:
            found.append(f"{test} is said to be deleted, and is there")
        elif what not in ("replaced", "deleted") or not why:
            found.append(f"{test} is neither replaced nor deleted for a reason")
    missing = before - present - told
    return found + sorted(f"{test} is gone, and no line says why" for test in missing)


def read(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return [row for row in csv.reader(file, delimiter="\t") if row and row != HEAD]


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def main(arguments: list[str]) -> int:
    before, present = at(arguments[0]), now()
    rows = {row[0]: row for row in (read(TABLE) if TABLE.exists() else [])}
    if arguments[1:2] == ["--write"]:
        for path in arguments[2:]:
            rows |= {
                row[0]: row for row in read(Path(path)) if row[0] in before and row[2] != "kept"
            }
        with TABLE.open("w", newline="") as file:
            csv.writer(file, delimiter="\t", lineterminator="\n").writerows(
                [HEAD, *(rows[test] for test in sorted(rows))]
            )
    found = problems(before, present, rows.values())
    print(*found, sep="\n")
    replaced = sum(what == "replaced" for _, _, what, _ in rows.values())
    print(
        f"{len(before)} test functions: {len(before) - len(rows)} kept as they were, "
        f"{replaced} replaced, {len(rows) - replaced} deleted; {len(found)} problems"
    )
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
