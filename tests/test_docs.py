"""Tests that the documents say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.daemon.config import FIELDS
from tests.support import diagrams, manual

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_the_documents_name_exists(page: Path) -> None:
    known: list[str] = []
    for file, name in re.findall(
        r"`(?:tests/)?((?:\w+/)*test_\w+\.py)?(?:::(test_\w+))?`", page.read_text()
    ):
        if file:
            known = re.findall(r"def (test_\w+)", (ROOT / "tests" / file).read_text())
        assert not name or name in known, (
            f"{page}: {name} is not in {file or 'the file that was named last'}"
        )


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fenced blocks marked `python` run one after the other, in one process, with a
    private daemon.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    if page == CALLS:
        lines = re.findall(r"^\|[^|]*\|.*\| `(.*)` \|$", page.read_text(), re.MULTILINE)
        assert len(lines) >= 25
        blocks += lines
    if not blocks:
        return
    monkeypatch.setenv("CKPTD_ROOT", str(tmp_path / "ckpts"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("CKPTD_IDLE_TIMEOUT", "1")
    monkeypatch.setenv("CKPTD_MEMORY_TTL", "0.1")
    for name in ("CKPTD_SOCKET", "CKPTD_JOB"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
