"""Tests `ckptd history` with a real daemon, after its end, and its mistakes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.commands.history_command import history_text
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.history import History
from ckptd.shared.system import machine
from tests.support.commands import ckptd
from tests.support.daemons import Home, holds, running


def save(place: Home, steps: int) -> None:
    agent = Agent("gpt", socket=place.socket)
    for step in range(1, steps + 1):
        agent.snapshot({"w": torch.arange(1000.0)}, step=step).wait("durable", timeout=60)
    agent.close()


@pytest.mark.usefixtures("processes")
def test_the_history_outlives_the_daemon_and_its_checkpoints(place: Home) -> None:
    place_of = {"CKPTD_STATE_DIR": str(place.state)}
    with running(place, "--keep-last", "1", "--log-level", "error", forked=True) as daemon:
        save(place, 3)
        asked = ("history", "gpt", "--socket", place.socket, "--event", "save.done", "--json")
        assert holds(lambda: len(json.loads(ckptd(*asked).stdout or "[]")) == 3, 60)
        told = json.loads(ckptd(*asked).stdout)
        both = ("history", "--socket", place.socket, "--event", "checkpoint.deleted", "--json")
        assert holds(lambda: len(json.loads(ckptd(*both).stdout or "[]")) == 2, 60)
        daemon.stop()
    assert [(one["event"], one["job"], one["facts"]["step"]) for one in told] == [
        ("save.done", "gpt", step) for step in (1, 2, 3)
    ]
    assert min(one["facts"]["bytes"] for one in told) > 4000
    after = ckptd("history", "--root", place.root, "--json", environment=place_of)
    names = [one["event"] for one in json.loads(after.stdout)]
    assert [names[0], names[-1]] == ["daemon.ready", "daemon.stopping"]
    assert names.count("checkpoint.deleted") == 2
    text = ckptd("history", "gpt", "--limit", "2", environment=place_of | {
        "CKPTD_ROOT": str(place.root),
    })  # fmt: skip
    assert text.stdout.splitlines()[0].split() == [
        "TIME", "AGE", "EVENT", "JOB", "STEP", "SIZE", "NEW", "HELD", "DURABLE",
    ]  # fmt: skip
    assert len(text.stdout.splitlines()) == 3
    named = ckptd("history", place.root / "gpt", "--limit", "2", environment=place_of)
    assert named.stdout == text.stdout


@pytest.mark.usefixtures("processes")
def test_a_daemon_may_keep_no_history(place: Home) -> None:
    with running(place, "--no-history", forked=True):
        told = ckptd("history", "--socket", place.socket)
    assert (told.returncode, told.stderr) == (
        10,
        f"ckptd: the daemon of {place.root} keeps no history: its setting `history` is off, or it "
        f"is older than this command\n",
    )
    assert not list(place.state.rglob("history*"))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--event", "save.fail"), "there is no such event; did you mean save.failed?"),
        (("--since", "soon"), "'soon' is no time: expected more than 0, like 90s, 30m, 12h or 7d"),
        ((), "there is no history"),
    ],
)
def test_a_mistake_gets_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    told = ckptd(
        "history", "--root", tmp_path, *arguments, environment={"CKPTD_STATE_DIR": str(tmp_path)}
    )
    assert told.returncode != 0
    assert words in told.stderr


def test_a_table_has_what_is_known_of_each_event() -> None:
    told = LoggedEvent(
        0.0, "save.done", 20, "saved it", {"job": "gpt", "step": 7, "bytes": 2e6,
                                           "held_seconds": 0.01, "durable_seconds": 1.5,
                                           "written_bytes": 3e4, "chunks": 128,
                                           "delta_chunks": 12, "chain": 5},
    )  # fmt: skip
    failed = LoggedEvent(5.0, "save.failed", 40, "the disk\nis full", {"job": "gpt"})
    lines = history_text([told, failed], 3 * 86400.0).splitlines()
    assert lines[1].split()[2:] == [
        "3", "d", "save.done", "gpt", "7", "2.0", "MB", "30.0", "kB", "0.010", "s", "1.500",
        "s", "12", "of", "128", "chunks", "as", "deltas,", "chain", "5",
    ]  # fmt: skip
    assert lines[2].endswith(
        r"save.failed  gpt  -     -       -        -        -        the disk\nis full"
    )
    assert history_text([], 0.0) == "nothing is known"


@pytest.mark.usefixtures("processes")
def test_a_long_text_is_cut_on_a_terminal_only(tmp_path: Path) -> None:
    long = LoggedEvent(5.0, "save.failed", 40, "x" * 500, {"job": "gpt"})
    assert history_text([long], 9.0).endswith("  " + "x" * 500)
    assert history_text([long], 9.0, most=120).endswith("  " + "x" * 120)
    file = machine.history_file(tmp_path / "state", tmp_path)
    file.parent.mkdir(parents=True)
    history = History(file)
    history.take([long])
    history.close()
    asked = ("history", "--root", str(tmp_path))
    state = {"CKPTD_STATE_DIR": str(tmp_path / "state")}
    assert ckptd(*asked, environment=state).stdout.count("x") == 500
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "ckptd.daemon", *asked],
        stdout=theirs, env=os.environ | state, timeout=120, check=True,
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert (done.returncode, shown.count(b"x")) == (0, 120)


@pytest.mark.usefixtures("processes")
def test_without_a_daemon_the_root_is_to_be_named(tmp_path: Path) -> None:
    told = ckptd("history", "--socket", tmp_path / "none")
    assert told.returncode == 14
    assert told.stderr.endswith("; without a daemon, name the root: `ckptd history --root ROOT`\n")
