"""Tests that the documents say what the code does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ckptd.daemon.config import FIELDS
from tests.support import diagrams, manual, scripts

ROOT = Path(__file__).parents[1]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/crash/RUNS.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "shared").glob("*.md")),
]


def test_life_cycles_are_drawn_from_the_tables() -> None:
    assert diagrams.PAGE.read_text() == diagrams.page(), (
        "run python -m tests.support.diagrams --write"
    )


def test_the_manual_pages_are_made_from_the_commands() -> None:
    there = {page.name: page.read_text() for page in manual.DIRECTORY.iterdir()}
    assert there == manual.pages(), "run `make man`"


CALLS = ROOT / "docs" / "reference" / "calls.md"
"""The page whose table has a line of Python in the last cell of each row."""


def test_every_link_has_a_target() -> None:
    links = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert len(links) > 100
    assert [
        f"{page}: {target}" for page, target in links if not (page.parent / target).exists()
    ] == []


def test_ckptd_is_installed_from_a_clone_and_not_by_a_name_that_no_index_has() -> None:
    """Neither a page, nor an example, nor an error names the distribution."""
    code = [
        path
        for room in ("agent", "daemon", "shared", "examples")
        for path in (ROOT / room).rglob("*.py")
    ]
    named = re.compile(r"""ckptd\[|pip\s+install\s+["'`]*ckptd""")
    assert [str(page) for page in [*PAGES, *code] if named.search(page.read_text())] == []


def test_every_test_that_the_documents_name_exists() -> None:
    """`::test_name` alone is in the file that was named last."""
    found, missing = 0, []
    for page in PAGES:
        known: list[str] = []
        for file, name in re.findall(
            r"`(?:tests/)?((?:\w+/)*test_\w+\.py)?(?:::(test_\w+))?`", page.read_text()
        ):
            if file:
                known = re.findall(r"def (test_\w+)", (ROOT / "tests" / file).read_text())
            if name:
                found += 1
            if name and name not in known:
                missing.append(f"{page}: {name} is not in {file or 'the file named last'}")
    assert (missing, found > 100) == ([], True)


def test_every_promise_names_its_test() -> None:
    text = (ROOT / "docs" / "explanation" / "what-comes-back.md").read_text()
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and not line.endswith("| shown by |")
    ]
    assert len(rows) > 40
    assert [row for row in rows if not re.search(r"::test_\w+`", row.rpartition(" | ")[2])] == []


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    missing = [
        name
        for name in FIELDS
        if name not in ("private", "idle_timeout") and f"| `{name}` |" not in text
    ]
    assert missing == []


def examples(page: Path) -> list[str]:
    """Return the fenced blocks marked `python`, and the lines of the table of calls."""
    text = page.read_text()
    lines = re.findall(r"^\|[^|]*\|.*\| `(.*)` \|$", text, re.MULTILINE) if page == CALLS else []
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) + lines


EXAMPLES = {page: found for page in PAGES if (found := examples(page))}


def test_pages_have_examples() -> None:
    assert len(EXAMPLES[CALLS]) >= 25
    assert len(EXAMPLES) >= 5


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_run(page: Path, tmp_path: Path) -> None:
    """The examples of a page run one after the other, in one process, with a private
    daemon.
    """
    environment = {
        **os.environ, "CKPTD_ROOT": str(tmp_path / "ckpts"), "XDG_RUNTIME_DIR": str(tmp_path),
        "CKPTD_IDLE_TIMEOUT": "1", "CKPTD_MEMORY_TTL": "0.1",
    }  # fmt: skip
    for name in ("CKPTD_SOCKET", "CKPTD_JOB"):
        environment.pop(name, None)
    script = tmp_path / "page.py"
    # Without the pauses for which a larger model would compute.
    script.write_text("\n".join(EXAMPLES[page]).replace("time.sleep(0.1)", "time.sleep(0)"))
    ended = scripts.run(script, environment=environment)
    assert ended.code == 0, ended.output
