"""The torch that ckptd needs: which versions pass, and what a script is told that has
none of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ckptd.agent.torch_support import LOWEST, check
from ckptd.shared.errors import UnsupportedTorch
from tests.support.cases import each_case

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def last_line(code: str, **environment: str) -> str:
    """What a fresh interpreter says last, on its standard error or else on its standard
    output.
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
        env={**os.environ, **environment},
    )
    return (done.stderr or done.stdout).splitlines()[-1]


@each_case(
    "version",
    [
        LOWEST,
        f"{LOWEST}.0a0+34c6371.nv25.8",
        "2.13.0+cpu",
        "2.100.0",
        "3.0.0",
        "a build of its own",
    ],
)
def test_versions_that_pass(version: str) -> None:
    check(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.0.0", "2.7.1+cu126"])
def test_versions_that_are_too_old(version: str) -> None:
    with pytest.raises(UnsupportedTorch) as caught:
        check(version)
    assert isinstance(caught.value, ImportError)
    assert str(caught.value) == (
        f"ckptd works with torch {LOWEST} or newer, and torch {version} is installed: upgrade it "
        f"with pip install 'torch>={LOWEST}'"
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "statement", ["import ckptd.agent", "from ckptd.agent.read.checkpoint import Checkpoint"]
)
def test_an_import_under_an_old_torch_says_what_to_do(tmp_path: Path, statement: str) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.7.1'")
    assert last_line(statement, PYTHONPATH=str(tmp_path)) == (
        "ckptd.shared.errors.UnsupportedTorch: ckptd works with torch 2.8 or newer, and torch "
        "2.7.1 is installed: "
        "upgrade it with pip install 'torch>=2.8'"
    )


@pytest.mark.usefixtures("processes")
def test_an_import_without_torch_says_what_to_do() -> None:
    assert last_line("import sys; sys.modules['torch'] = None; import ckptd.agent") == (
        "ckptd.shared.errors.UnsupportedTorch: ckptd.agent needs torch 2.8 or newer, and there is "
        "none: install it with pip install 'torch>=2.8'"
    )


@pytest.mark.usefixtures("processes")
def test_an_import_that_fails_inside_torch_is_not_taken_for_a_missing_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import a_library_of_torch")
    assert (
        last_line("import ckptd.agent", PYTHONPATH=str(tmp_path))
        == "ModuleNotFoundError: No module named 'a_library_of_torch'"
    )


@pytest.mark.usefixtures("processes")
def test_numpy_is_not_needed_until_a_state_holds_arrays() -> None:
    code = "import sys; sys.modules['numpy'] = None; import ckptd.agent; print('imported')"
    assert last_line(code, PYTHONWARNINGS="ignore") == "imported"


def test_no_installation_replaces_a_torch_that_works() -> None:
    """`pip install ckptd` does not ask for torch, and the extra takes each version from
    the lowest on.
    """
    assert [
        name for name in map(Requirement, PROJECT["dependencies"]) if name.name == "torch"
    ] == []
    extras = {
        extra: [Requirement(one) for one in asked]
        for extra, asked in PROJECT["optional-dependencies"].items()
    }
    asked = [
        (extra, str(one.specifier), one.marker)
        for extra, given in extras.items()
        for one in given
        if one.name == "torch"
    ]
    assert asked == [("torch", f">={LOWEST}", None)]
