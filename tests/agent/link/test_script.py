"""Tests how a main script gives an unnamed job its name."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ckptd.agent.link.script import (
    check_same_run,
    is_outside,
    look_for_other_script,
    script,
    script_job,
    script_path,
    storable,
)
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.storage.repository import Repository
from tests.support.cases import each_case
from tests.support.commands import ckptd
from tests.support.daemons import Home
from tests.support.forged import forge
from tests.support.scripts import python


@each_case(
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


@each_case(
    ("attributes", "session", "interactive", "found"),
    [
        ({"__file__": "{here}/link.py"}, "", False, "{here}/train.py"),
        ({"__file__": "{here}/train.py"}, "/x/y.ipynb", True, "{here}/train.py"),
        ({}, "", False, ""),
        ({}, "", True, "{here}"),
        ({}, "{here}/a.ipynb", True, "{here}/a.ipynb"),
        ({"__vsc_ipynb_file__": "{here}/b.ipynb"}, "", True, "{here}/b.ipynb"),
    ],
)
def test_the_path_is_that_of_the_script_or_of_the_notebook(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attributes: dict[str, str],
    session: str,
    interactive: bool,
    found: str,
) -> None:
    here = Path(os.path.realpath(tmp_path))
    (here / "link.py").symlink_to(here / "train.py")
    monkeypatch.chdir(here)
    monkeypatch.setenv("JPY_SESSION_NAME", session.format(here=here))
    monkeypatch.setattr("ckptd.agent.link.script.is_interactive", lambda: interactive)
    main = ModuleType("__main__")
    for name, value in attributes.items():
        setattr(main, name, value.format(here=here))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert script_path() == found.format(here=here)


def test_a_path_that_is_no_text_can_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storable("/x/\udcff.py") == "/x/\\udcff.py"
    assert storable("/x" * 1000) == "/x" * 512
    monkeypatch.setattr("ckptd.agent.link.script.is_interactive", lambda: True)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))

    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    assert script_path() == ""


TRAIN = """\
import logging, sys, threading, torch, ckptd
logging.basicConfig(format="LOG %(message)s")
state = {"w": torch.zeros(3)}
recovered = ckptd.recover(state)
ckptd.snapshot(state, step=recovered.step + 1 if recovered else 0)
for thread in threading.enumerate():
    if thread.name == "ckptd-script":
        thread.join(60)
ckptd.close()
"""


@pytest.mark.usefixtures("processes")
def test_scripts_of_one_name_that_meet_in_one_job_are_told(place: Home, tmp_path: Path) -> None:
    """The private daemon of the root serves all of them, and ends with the test."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")},
        "CKPTD_ROOT": str(place.root),
        "CKPTD_IDLE_TIMEOUT": "1",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(TRAIN)

    def told(name: str, *arguments: str, job: str = "") -> list[str]:
        named = {**environment, "CKPTD_JOB": job} if job else environment
        script = tmp_path / name / "train.py"
        done = python(script, *arguments, environment=named, directory=tmp_path)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stderr.splitlines() if "newest checkpoint" in line]

    def line(difference: str) -> list[str]:
        return [
            f"LOG job 'train' has its name from the main script, and its newest checkpoint was "
            f"saved {difference}. If the two do not train the same thing, set CKPTD_JOB or job= to "
            f"another name for one of them"
        ]

    assert told("a") == told("a") == []
    paths = [str(Path(os.path.realpath(tmp_path)) / name / "train.py") for name in ("a", "b")]
    assert told("b") == line(f"by another one: {paths[0]}, while this is {paths[1]}")
    assert told("b") == [], "its own checkpoint is the newest now"
    command = shlex.join((sys.executable, f"{tmp_path}/b/train.py"))
    assert told("b", "--lr", "1") == line(
        f"with other arguments: {command}, while this is {command} --lr 1"
    )
    assert told("b", "--lr", "1") == [], "a supervisor starts the same command line again"
    assert told("a", "--lr", "2", job="train") == [], "the job was named"
    assert told("b") == line(
        f"by another one and with other arguments: "
        f"{shlex.join((sys.executable, f'{tmp_path}/a/train.py'))} --lr 2 ({paths[0]}), "
        f"while this is {command} ({paths[1]})"
    )
    shown = ckptd("show", f"{place.root}/train/newest").stdout
    assert f"  script         {paths[1]}\n" in shown
    # Outside of the working directory, the script may be a program that starts others.
    done = python(
        tmp_path / "b" / "train.py", "a", environment=environment, directory=tmp_path / "a"
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        f"InvalidRequest: the main script lies outside of the working directory, and the newest "
        f"checkpoint of job 'train', which has its name, was saved with other arguments: "
        f"{command}, while this is {command} a: set CKPTD_JOB or job= to 'train' to go on from "
        f"that checkpoint, or to another name to begin a job"
    )


@each_case(
    ("path", "prefix", "outside"),
    [
        ("", "/usr", False),
        ("{here}/train.py", "/usr", False),
        ("{here}/a/train.py", "{here}/.venv", False),
        ("{here}/.venv/bin/litgpt", "{here}/.venv", True),
        ("{here}-2/train.py", "/usr", True),
        ("{here}/train.py", "/", False),
        ("/x/train.py", "/usr", True),
    ],
)
def test_a_script_outside_of_the_working_directory_is_known(
    path: str, prefix: str, outside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.path.realpath(tmp_path)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "prefix", prefix.format(here=here))
    assert is_outside(path.format(here=here)) is outside


@each_case(
    ("variable", "interactive", "command", "refused"),
    [
        ("", False, "python a/train.py --lr 2", True),
        ("", False, "/x/python -u train.py --lr 1", False),
        ("none", False, "python a/train.py --lr 2", False),  # torchrun -m corp.train
        ("", True, "python -m ipykernel_launcher -f 2.json", False),
        ("", False, "", False),  # an earlier version has saved
    ],
)
def test_a_program_that_starts_others_asks_for_a_name(
    variable: str,
    interactive: bool,
    command: str,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = forge(tmp_path, (1,), [[((0,), (1,))]])
    (tmp_path / "gpt" / "newest").write_text(f"{made.name}\n")
    writer = {"command": command} if command else {}
    monkeypatch.setattr(Repository, "read_manifest", lambda *_: SimpleNamespace(writer=writer))
    monkeypatch.setattr(sys, "orig_argv", ["python", "/x/train.py", "--lr", "1"])
    monkeypatch.setattr("ckptd.agent.link.script.is_interactive", lambda: interactive)
    monkeypatch.setattr("ckptd.agent.link.script.script_path", lambda: "/x/train.py")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if variable:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", variable)
    with pytest.raises(InvalidRequest) if refused else nullcontext():
        check_same_run(str(tmp_path), "gpt")
    check_same_run(str(tmp_path), "other")


@each_case(
    ("file", "module"),
    [
        ("/x/ray/default_worker.py", None),
        ("/x/submitit/core/_submit.py", "submitit.core._submit"),
        ("/venv/bin/celery", None),
    ],
)
def test_a_launcher_gives_a_job_no_name(
    monkeypatch: pytest.MonkeyPatch, file: str, module: str | None
) -> None:
    main = ModuleType("__main__")
    main.__spec__, main.__file__ = ModuleSpec(module, None) if module else None, file
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(InvalidRequest, match=r"it gives this job no name: name it with CKPTD_JOB"):
        script_job()


def test_a_job_that_cannot_be_read_is_not_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ckptd.agent")

    def told() -> list[str]:
        """Return what the search has logged. An agent of another test may log, too."""
        return [record.getMessage() for record in caplog.records if record.module == "script"]

    look_for_other_script(str(tmp_path), "none").join(60)
    assert told() == []
    made = forge(tmp_path, (1,), [[((0,), (1,))]])
    (tmp_path / "gpt" / "newest").write_text(f"{made.name}\n")
    look_for_other_script(str(tmp_path), "gpt").join(60)
    assert told() == [], "a checkpoint of an earlier version has no path"
    (made / "manifest.json").write_text("{}")
    look_for_other_script(str(tmp_path), "gpt").join(60)
    (line,) = told()
    assert line.startswith("who saved job gpt is not known: ")


@pytest.mark.usefixtures("processes")
def test_a_real_script_and_an_interactive_session(tmp_path: Path) -> None:
    code = "from ckptd.agent.link.script import script_job; print(script_job())"
    (tmp_path / "tune.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "tune.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "tune\n"
    assert python("-c", code).stdout == "default\n"
