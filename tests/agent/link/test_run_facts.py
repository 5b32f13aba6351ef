"""Tests that checkpoints tell the commit and the command of a run, and no secret."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptd.agent.link.run_facts import arguments_in, command_of, commit_of, own_command, run_facts
from tests.support.cases import each_case

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(place: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(place), *names, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "code"
    (place / "deep").mkdir(parents=True)
    git(place, "init", "-q", "-b", "main")
    git(place, "commit", "-q", "--allow-empty", "-m", "one")
    return place


@pytest.mark.usefixtures("processes")
def test_the_commit_is_that_of_git_however_it_is_stored(repository: Path, tmp_path: Path) -> None:
    script = repository / "deep" / "train.py"
    first = git(repository, "rev-parse", "HEAD")
    assert commit_of(script) == first
    git(repository, "pack-refs", "--all")
    assert commit_of(script) == first
    git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "two")
    second = git(tmp_path / "tree", "rev-parse", "HEAD")
    assert commit_of(tmp_path / "tree" / "train.py") == second != first
    git(repository, "checkout", "-q", "--detach")
    assert commit_of(script) == first


@pytest.mark.parametrize("content", ["ref: refs/heads/gone", "nonsense", "", "\x00"])
def test_a_repository_that_cannot_be_read_has_no_commit(tmp_path: Path, content: str) -> None:
    assert commit_of(tmp_path / "train.py") == ""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(content)
    assert commit_of(tmp_path / "train.py") == ""


@each_case(
    ("words", "told"),
    [
        (["python", "train.py", "--lr", "3e-4"], "python train.py --lr 3e-4"),
        (["train.py", "--name", "a b"], "train.py --name 'a b'"),
        (["t", "--hf-token", "abc", "--x"], "t --hf-token *** --x"),
        (["t", "--api_key=abc", "wandb.apiKey=def"], "t --api_key=*** wandb.apiKey=***"),
        (["t", "--auth", "--x", "1"], "t --auth --x 1"),
        (["t", "PASSWORD=a=b"], "t PASSWORD=***"),
        (["t", "s3://u:p@host/x"], "t s3://***@host/x"),
        (["t", "hf_abcdefghijklmnop12345"], "t ***"),
        (["t", "--key=AKIAIOSFODNN7EXAMPLE"], "t --key=***"),
        (["t", "--model=meta-llama/Llama-3.1-8B"], "t --model=meta-llama/Llama-3.1-8B"),
        (["t", "--out", "/data/runs/2026-11-26/a.pt"], "t --out /data/runs/2026-11-26/a.pt"),
    ],
)
def test_a_command_is_told_without_its_secrets(words: list[str], told: str) -> None:
    assert command_of(words) == told


@each_case(
    ("command", "arguments"),
    [
        ("python", []),
        ("python -", []),
        ("python train.py --lr 1", ["--lr", "1"]),
        ("/x/python3 -u -W ignore -X dev train.py -m 'a b'", ["-m", "a b"]),
        ("python -Werror::m -um corp.train a b", ["a", "b"]),
        ("python -m corp.train a", ["a"]),
        ("python -I --check-hash-based-pycs never -c 'import x' y", ["import x", "y"]),
        ("python /venv/bin/litgpt finetune --key=***", ["finetune", "--key=***"]),
        ("python train.py 'a b", ["'a", "b"]),
    ],
)
def test_arguments_do_not_depend_on_the_interpreter(command: str, arguments: list[str]) -> None:
    assert arguments_in(command) == arguments


def test_a_child_of_multiprocessing_has_the_command_line_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "python")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    code = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", code, "--multiprocessing-fork"])
    assert own_command() == "python train.py --lr 1"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "train.py"])
    assert own_command() == "python -u train.py"


@pytest.mark.usefixtures("processes")
def test_the_runs_of_trackers_are_told(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    run = SimpleNamespace(url="https://wandb.ai/a/b/runs/c", id="c")
    active = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: active))
    monkeypatch.setattr(sys, "orig_argv", ["python", "x" * 2000 + "\udcff"])
    facts = run_facts(str(repository / "train.py"))
    assert facts == {
        "commit": git(repository, "rev-parse", "HEAD"),
        "command": ("python '" + "x" * 2000)[:1024],
        "wandb": "https://wandb.ai/a/b/runs/c",
        "mlflow": "r1",
    }
    run.url = None
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: 1 / 0))
    facts = run_facts("")
    assert (facts["wandb"], "mlflow" in facts, "commit" in facts) == ("c", False, False)
