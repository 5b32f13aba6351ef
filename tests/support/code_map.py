"""Writes the tables of docs/explanation/code-map.md: `python -m tests.support.code_map --write`.

Everything above the marker is prose that people write. Below it, each package has a section,
each room of several modules a section in it, and each module a line with the first sentence of
its docstring.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.rooms import ORDER, ROOT, tree

PAGE = ROOT / "docs" / "explanation" / "code-map.md"
MARKER = "<!-- Written by `python -m tests.support.code_map --write`; do not edit below. -->"


def first_sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring, on one line.

    Raises AssertionError if the docstring does not begin with a sentence.
    """
    summary = " ".join((ast.get_docstring(tree(path)) or "").split("\n\n")[0].split())
    found = re.match(r"(.+?[.!?])(?=\s+[A-Z`]|$)", summary)
    assert found is not None, f"{path}: the docstring does not begin with a sentence"
    return found[1]


def _rows(paths: list[Path]) -> Iterator[str]:
    yield "| file | |"
    yield "|---|---|"
    for path in paths:
        shown = first_sentence(path).replace("|", r"\|")
        yield f"| `{path.relative_to(ROOT)}` | {shown} |"
    yield ""


def tables() -> str:
    """Return the sections of all packages."""
    lines: list[str] = []
    for package in ("shared", "daemon", "agent"):
        here = ROOT / package
        lines += [f"## {package}", "", first_sentence(here / "__init__.py"), ""]
        single = [here / f"{room}.py" for room in ORDER[package] if (here / f"{room}.py").exists()]
        lines += _rows(single)
        for room in (here / name for name in ORDER[package] if (here / name).is_dir()):
            lines += [f"### {package}/{room.name}", "", first_sentence(room / "__init__.py"), ""]
            if files := sorted(set(room.glob("*.py")) - {room / "__init__.py"}):
                lines += _rows(files)
    return "\n".join(lines)


def page() -> str:
    """Return the whole page: the prose that stands there, and new tables."""
    prose, marker, _ = PAGE.read_text().partition(MARKER)
    assert marker, f"{PAGE} lacks the marker"
    return f"{prose}{MARKER}\n\n{tables()}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page())
