"""The matrix of torch and Python: what it reads from pytest, which interpreters it
takes, and when it fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptd.agent.torch_support import LOWEST
from tests import matrix
from tests.matrix import Row


def test_the_lowest_torch_is_that_of_the_agent() -> None:
    assert matrix.lowest() == LOWEST


def test_counts_of_a_run_and_of_one_that_was_broken_off(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    assert matrix.counts(results) == (0, 0, 0)
    results.write_text(
        '<testsuites><testsuite tests="9" failures="3" errors="1" skipped="2"/></testsuites>'
    )
    assert matrix.counts(results) == (3, 4, 2)


@pytest.mark.usefixtures("processes")
def test_an_interpreter_that_does_not_run_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, target in (("shims", "/bin/false"), ("bin", sys.executable)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "python3.77").symlink_to(target)
    monkeypatch.setenv("PATH", f"{tmp_path}/shims")
    assert matrix.interpreter("3.77") is None
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{tmp_path}/bin")
    assert matrix.interpreter("3.77") == f"{tmp_path}/bin/python3.77"
    assert matrix.interpreter(sys.executable) == sys.executable
    assert matrix.interpreter(f"{tmp_path}/none") is None


@pytest.mark.parametrize(
    ("row", "options", "code"),
    [
        (Row("3.11", "2.8", 5, 0, 1), [], 0),
        (Row("3.11", "2.8", 5, 1, 0), [], 1),
        (Row("3.11", "2.8", 0, 0, 1), [], 1),
        (Row("3.11", "2.8", problem="the environment could not be made"), [], 1),
        (Row("3.11", "2.8", 5), ["--python", "3.11", "3.99"], 1),
        (Row("3.11", "2.8", 5), ["--python", "3.11", "3.99", "--skip-missing"], 0),
        (Row("3.11", "2.8", 5), ["--python", "3.99", "--skip-missing"], 1),
    ],
)
def test_exit_status_and_table(
    row: Row,
    options: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        matrix, "interpreter", lambda release: None if release == "3.99" else "/python"
    )
    monkeypatch.setattr(matrix, "run", lambda *_: row)
    monkeypatch.setattr(
        sys, "argv", ["matrix", *(options or ["--python", "3.11"]), "--torch", "2.8"]
    )
    with pytest.raises(SystemExit) as caught:
        matrix.main()
    assert caught.value.code == code
    shown = capsys.readouterr().out.strip().splitlines()
    assert shown[0].split() == ["python", "torch", "passed", "failed", "skipped"]
    assert ("there is no such interpreter on PATH" in shown[-1]) == ("3.99" in options)
    assert (row.problem or str(row.passed)) in shown[1] or shown[1].startswith("3.99 ")
