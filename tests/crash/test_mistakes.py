"""Users' mistakes: every command with one word misspelt.

Nothing is deleted, and nothing is reported as done that is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckptd.agent import Agent
from ckptd.daemon.commands.cli import main
from ckptd.shared.system import machine
from tests.daemon.memory.test_unsaved import segment
from tests.support.daemons import home, running

COMMANDS = (
    "ls {root}",
    "ls {root}/gpt",
    "show {root}/gpt/step-00000005.a0001",
    "verify {root}/gpt",
    "verify {root}/gpt/step-00000005",
    "forget {root}/gpt/step-00000005.a0001 --yes",
    "forget {root}/gpt --keep LatestN(1) --yes",
    "forget {root}/gpt --keep BestN('val_loss',1) --yes",
    "forget {root}/gpt --keep LatestDuration(1) --yes",
    "forget {root}/gpt --keep BestN('val_loss',2)",
    "pin {root}/gpt/step-00000005.a0001",
    "pin {root}/gpt/step-00000005.a0001 --remove",
    "unpin {root}/gpt/step-00000005.a0001",
    "show {root}/gpt/newest",
    "show {root}/gpt --step 70",
    "copy {root}/gpt {root}-copy",
    "copy {root} {root}-copy",
    "export {root}/gpt --to torch --out {root}-export --dtype bf16",
    "import {root}.pt --out {root}-import --from torch",
    "adopt {root}.pt {root}/tuned",
    "status {root} --job gpt",
    "stop {root}",
    "drain {root}",
    "doctor --root {root}",
    "gc --delete --yes --shm-dir {root}-shm",
    "ps --json",
    "history gpt --root {root}",
    "interval {root}/gpt --mtbf 3h --mtbf-node 30h",
    "diff {root}/gpt/70 {root}/gpt/newest",
    "logs gpt --root {root}",
    "top {root}",
    "page --root {root} --http 0.0.0.0:0",
    "run --root {root}-new --keep LatestN(1)",
    "bench --root {root}-new",
)
NEW = ("{root}-copy", "{root}-export", "{root}-import", "{root}/tuned", "{root}-new")
"""Words that name what does not exist yet: any other name is as good."""
OTHERS = ("doctor", "stop")
"""Commands that have nothing to misspell but a root, which `doctor` may make and `stop`
looks for.
"""


def misspelt(word: str) -> Iterator[str]:
    """Yield the word without a character at three places, with two exchanged, in
    another case, twice its last character, and empty.
    """
    # The directory of a path stays, so that no other test's files are named.
    start = word.rfind("/") + 1
    for at in sorted({start, (start + len(word)) // 2, len(word) - 1}):
        yield word[:at] + word[at + 1 :]
    for at in range(start, len(word) - 1):
        if word[at].isalpha() and word[at + 1].isalpha() and word[at] != word[at + 1]:
            yield word[:at] + word[at + 1] + word[at] + word[at + 2 :]
            break
    yield word[:start] + word[start:].swapcase()
    yield word + word[-1]
    yield ""


def cases(root: Path) -> Iterator[list[str]]:
    for command in COMMANDS:
        words = command.split()
        typed = [word.format(root=root) for word in words]
        for at, word in enumerate(typed):
            if words[at] in NEW or (words[0] in OTHERS and at == len(words) - 1):
                continue
            for wrong in dict.fromkeys(misspelt(word)):
                if wrong != word:
                    yield [*typed[:at], wrong, *typed[at + 1 :]]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A root with three checkpoints, a file of another tool, and shared memory in which
    a dead trainer has left a snapshot.
    """
    with home() as place:
        with running(place, forked=True):
            agent = Agent("gpt", socket=place.socket)
            for step in (5, 70, 900):
                agent.snapshot(
                    {"w": torch.arange(9.0) * step}, step=step, metrics={"val_loss": 1 / step}
                ).wait("durable", timeout=60)
            agent.close()
        torch.save({"w": torch.ones(3)}, f"{place.root}.pt")
        memory = Path(f"{place.root}-shm")
        memory.mkdir()
        segment(memory / machine.segment_directory(place.root), "a", 1000)
        yield place.root


def content(place: Path) -> dict[str, str]:
    """Return the files below the directory of the root, pins and copies included, with
    a digest of each.
    """
    found = (
        path
        for path in place.parent.rglob("*")
        if path.is_file() and place.parent / "state" not in path.parents
    )
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_no_misspelt_command_deletes_or_claims_anything(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CKPTD_ROOT", "CKPTD_SOCKET"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root.parent))
    monkeypatch.chdir(root.parent)
    before, wrong, tried = content(root), list[str](), 0
    for typed in cases(root):
        told = CliRunner().invoke(main, typed)
        tried += 1
        line = " ".join(word or "''" for word in typed)
        if told.exit_code == 0 or (
            told.exception is not None and not isinstance(told.exception, SystemExit)
        ):
            wrong.append(
                f"{line}: exit code {told.exit_code}: {told.output[:200]} {told.exception!r}"
            )
        if (after := content(root)) != before:
            wrong.append(f"{line}: changed {sorted(after.items() ^ before.items())[:4]}")
            break
    assert wrong == []
    assert tried > 200
    assert "gpt step 1000" in CliRunner().invoke(main, ["gc", "--shm-dir", f"{root}-shm"]).output


def test_every_command_is_misspelt() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(main.commands)
