"""Tests how a main script gives an unnamed job its name."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from ckptd.agent.link.script import script, script_job


@pytest.mark.parametrize(
    ("file", "module", "found", "job"),
    [
        ("/home/me/train.py", None, "train.py", "train"),
        ("/venv/bin/litgpt", None, "litgpt", "litgpt"),
        ("/x/my train(2).py", None, "my train(2).py", "my-train-2-"),
        ("/x/.py", None, ".py", "default"),
        ("/x/train.v2.py", None, "train.v2.py", "train.v2"),
        ("/x/gpt/__main__.py", "__main__", "gpt", "gpt"),
        ("/x/gpt/train.py", "gpt.train", "gpt.train", "train"),
        ("/x/gpt/__main__.py", "gpt.__main__", "gpt", "gpt"),
        (None, None, "", "default"),
    ],
)
def test_the_name_comes_from_the_main_module(
    monkeypatch: pytest.MonkeyPatch, file: str | None, module: str | None, found: str, job: str
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(module, None) if module else None
    if file:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert (script(), script_job()) == (found, job)


def test_a_real_script_and_an_interactive_session(tmp_path: Path) -> None:
    code = "from ckptd.agent.link.script import script_job; print(script_job())"
    (tmp_path / "tune.py").write_text(code)
    commands = {"tune": ["tune.py"], "default": ["-c", code]}
    for job, command in commands.items():
        assert (
            subprocess.run(
                [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True
            ).stdout
            == f"{job}\n"
        )
