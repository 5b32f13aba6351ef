"""The package `ckptd` itself: what it offers, when it imports that, and that nothing can be
imported under two names.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module

import pytest

import ckptd
import ckptd.agent
import ckptd.shared.errors
import ckptd.shared.retention
from tests.support.rooms import FACE, ROOT, modules, tree


def run(code: str) -> str:
    """Return what a fresh interpreter prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=120,
        check=False,
    )
    return (done.stderr or done.stdout).splitlines()[-1]


def test_it_offers_what_the_agent_offers_and_every_error() -> None:
    errors = {
        name
        for name, found in vars(ckptd.shared.errors).items()
        if isinstance(found, type)
        and issubclass(found, ckptd.CkptdError)
        and found.__module__ == ckptd.shared.errors.__name__
    }
    assert set(ckptd.__all__) == {"__version__", *ckptd.agent.__all__, *errors}
    assert ckptd.__all__ == sorted(ckptd.__all__, key=lambda name: (not name[0].isupper(), name))
    assert [name for name in dir(ckptd) if name[:2] != "__"] == sorted(
        name for name in ckptd.__all__ if name[:2] != "__"
    )


def test_the_names_for_type_checkers_are_those_of_the_module() -> None:
    (block,) = (
        node
        for node in tree(ROOT / FACE).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    shown = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert set(shown) == set(ckptd.__all__)
    for name, module in shown.items():
        assert module is not None
        assert getattr(ckptd, name) is getattr(sys.modules[module], name)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "statement",
    [
        "import ckptd",
        "import ckptd.daemon.commands.cli",
        "from ckptd import CkptdError, LatestN, __version__",
        "from ckptd.shared.errors import CkptdError",
    ],
)
def test_no_torch_is_imported_for_what_needs_none(statement: str) -> None:
    loaded = "import sys; print(sorted({'torch', 'numpy', 'ckptd.agent'} & set(sys.modules)))"
    assert run(f"{statement}\n{loaded}") == "[]"


@pytest.mark.usefixtures("processes")
def test_the_first_use_of_a_name_imports_the_agent() -> None:
    use = "import sys, ckptd; ckptd.per_rank"
    assert run(f"{use}; print('torch' in sys.modules, 'per_rank' in vars(ckptd))") == "True True"


@pytest.mark.usefixtures("processes")
def test_without_torch_a_name_of_the_agent_says_what_to_do() -> None:
    without = "import sys; sys.modules['torch'] = None; import ckptd"
    assert run(f"{without}; print(ckptd.LatestN(3))") == "LatestN(n=3)"
    for use in ("ckptd.snapshot", "from ckptd import Agent"):
        assert run(f"{without}; {use}") == (
            "ckptd.shared.errors.UnsupportedTorch: ckptd.agent needs torch 2.8 or newer, and "
            "there is none: install it with pip install 'torch>=2.8'"
        )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="^module 'ckptd' has no attribute 'snapshots'$"):
        _ = ckptd.snapshots  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="^cannot import name 'snapshots' from 'ckptd'"):
        exec("from ckptd import snapshots")


# -- one name for each class


def test_the_face_cannot_be_imported_under_a_second_name() -> None:
    with pytest.raises(ImportError, match=r"^import ckptd instead of ckptd\.agent\.face$"):
        import_module("ckptd.agent.face")


@pytest.mark.usefixtures("processes")
def test_no_file_and_no_class_is_loaded_twice() -> None:
    """Imports every module in one process, and looks for files that were loaded under two
    names and for classes of one name that differ.
    """
    code = f"""
import collections, importlib, os, sys
for name in {sorted(name for name in modules() if not name.endswith("__main__"))!r}:
    importlib.import_module(name)
for name in sys.modules["ckptd"].__all__:
    getattr(sys.modules["ckptd"], name)
files, places = collections.defaultdict(set), collections.defaultdict(set)
ours = {{name: module for name, module in sys.modules.items()
        if (getattr(module, "__file__", None) or "").startswith({str(ROOT)!r} + "/")
        and ".venv" not in module.__file__}}
for name, module in ours.items():
    files[os.path.realpath(module.__file__)].add(name)
    for found in vars(module).values():
        if isinstance(found, type) and found.__module__ in ours:
            places[found.__qualname__].add((found.__module__, id(found)))
            assert getattr(sys.modules[found.__module__], found.__qualname__.split(".")[0])
twice = [sorted(names) for names in files.values() if len(names) > 1]
public = {{name: sorted(at) for name, at in places.items()
          if len(at) > 1 and not name.startswith("_")}}
print(len(ours) > 100, twice, public)
"""
    assert run(code) == "True [] {}"
