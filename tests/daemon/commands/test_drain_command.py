"""Tests `ckptd drain`: its exit codes and its words, with a daemon and without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.daemon.commands import drain_command, neighbours
from ckptd.daemon.commands.drain_command import Outcome, due_text, text
from ckptd.daemon.memory.unsaved import UnsavedSnapshot
from ckptd.shared.system import machine
from ckptd.shared.wire import messages as m
from tests.support.cases import each_case
from tests.support.commands import ckptd, started
from tests.support.daemons import Daemon, Home, running, until
from tests.support.trainers import vanish

TAG = "step-00000005.a0001"


def in_memory(place: Home, step: int = 5) -> Agent:
    agent = Agent("gpt", socket=place.socket)
    agent.snapshot({"w": torch.arange(9.0) + step}, step=step, persist=False).wait("sealed")
    return agent


def due(state: str, **fields: Any) -> m.Due:
    return m.Due(job="gpt", attempt=1, step=5, tag=TAG, state=state, **fields)


# -- with a daemon


@pytest.mark.usefixtures("processes")
def test_what_is_in_memory_is_saved_as_a_user_does_it(place: Home) -> None:
    """This case runs in processes of their own."""
    with running(place):
        agent = in_memory(place)
        run = started("drain", place.root, "--deadline", 60)
        assert (run.returncode, run.stdout, run.stderr) == (
            0, f"saved gpt/{TAG}\nnothing is owed to {place.root} any more\n", "",
        )  # fmt: skip
        agent.close()
    with Checkpoint.open(place.root / "gpt", "newest") as checkpoint:
        assert torch.equal(checkpoint.tensor("w"), torch.arange(9.0) + 5)


def test_the_daemon_is_found_by_its_socket_or_by_the_variables(daemon: Daemon) -> None:
    place = daemon.home
    said = f"nothing is owed to {place.root} any more\n"
    by_socket = ckptd("drain", "--socket", place.socket)
    by_variable = ckptd("drain", environment={"CKPTD_SOCKET": str(place.socket)})
    assert [run.stdout for run in (by_socket, by_variable)] == [said] * 2


@pytest.mark.usefixtures("processes")
def test_what_does_not_leave_in_time_makes_exit_code_1(place: Home) -> None:
    with running(place, forked=True, failpoints="persist.writing=error(ENOSPC)"):
        agent = in_memory(place)
        run = ckptd("drain", "--socket", place.socket, "--deadline", "0.9")
        assert run.returncode == 1
        first, last = run.stdout.splitlines()
        assert first.startswith(f"NOT SAVED: gpt/{TAG} its save has failed: ")
        assert "No space left on device" in first
        assert first.endswith("To do: remove the cause, for example make room, and drain again")
        assert last == (
            f"1 snapshot did not leave {machine.host()} within 0.9 s; the daemon continues to save"
        )
        vanish(agent)


@pytest.mark.usefixtures("processes")
def test_json_has_all_that_is_owed(place: Home) -> None:
    with running(place, forked=True, failpoints="persist.index=sleep(3)"):
        agent = in_memory(place)
        run = ckptd("drain", "--socket", place.socket, "--deadline", "2", "--json")
        said = json.loads(run.stdout)
        (owed,) = said["owed"]
        assert (run.returncode, said["drained"], said["daemon"]) == (1, False, True)
        assert (said["root"], said["saved"], said["more"]) == (str(place.root), [], 0)
        assert 0 < owed.pop("done_bytes") <= owed.pop("total_bytes")
        assert owed == {
            "job": "gpt", "attempt": 1, "step": 5, "tag": TAG, "state": "saving", "reason": None,
        }  # fmt: skip
        run = ckptd("drain", "--socket", place.socket, "--json")
        assert (run.returncode, json.loads(run.stdout)) == (0, {
            "drained": True, "daemon": True, "root": str(place.root), "saved": [f"gpt/{TAG}"],
            "owed": [], "more": 0, "unsaved": [],
        })  # fmt: skip
        vanish(agent)


def test_a_job_that_the_daemon_does_not_have_is_told(daemon: Daemon) -> None:
    run = ckptd("drain", "--socket", daemon.home.socket, "--job", "nope")
    assert (run.returncode, run.stdout) == (10, "")
    assert "no job 'nope'; the jobs that it has: none" in run.stderr


@each_case(
    ("arguments", "words"),
    [
        (["--deadline", "-1"], "--deadline is -1: expected seconds from 0 to 86400"),
        (["--deadline", "nan"], "--deadline is nan: expected seconds from 0 to 86400"),
        (["--deadline", "1e9"], "--deadline is 1e+09: expected seconds from 0 to 86400"),
        (["--deadline", "soon"], "'soon' is not a valid float"),
        (["a", "b"], "unexpected extra argument"),
        (["--all"], "No such option"),
    ],
)
def test_bad_arguments_make_exit_code_2(arguments: list[str], words: str) -> None:
    run = ckptd("drain", *arguments)
    assert (run.returncode, words in run.stderr) == (2, True), run.stderr


def test_a_daemon_that_cannot_drain_is_told(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_command, "DRAIN", "of a later version")
    run = ckptd("drain", "--socket", daemon.home.socket)
    assert run.returncode != 0
    assert (
        f"the daemon of {daemon.home.root} is of an older version that cannot drain" in run.stderr
    )


@pytest.mark.usefixtures("processes")
def test_a_daemon_that_does_not_answer_is_no_success(place: Home) -> None:
    with running(place) as daemon:
        agent = in_memory(place)
        daemon.process.send_signal(signal.SIGSTOP)
        run = ckptd("drain", place.root, "--deadline", "1")
        daemon.process.send_signal(signal.SIGCONT)
        assert (run.returncode, run.stdout) == (14, "")
        assert f"pid {daemon.process.pid} does not answer" in run.stderr
        vanish(agent)


# -- the daemon ends meanwhile


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_daemon_that_ends_meanwhile(place: Home, how: signal.Signals) -> None:
    """SIGTERM makes it save what it owes first. After SIGKILL, the memory is unsaved."""
    with running(place, failpoints="persist.writing=sleep(2)@1") as daemon:
        agent = in_memory(place)
        runs: list[subprocess.CompletedProcess[str]] = []
        draining = threading.Thread(
            target=lambda: runs.append(ckptd("drain", place.root, "--deadline", "30"))
        )
        draining.start()
        until(lambda: "this node is being drained" in place.log_text(), "drain")
        daemon.process.send_signal(how)
        daemon.died()
        draining.join()
        vanish(agent)
    (run,) = runs
    if how is signal.SIGTERM:
        assert (run.returncode, "nothing is owed" in run.stdout) == (0, True), run.stdout
    else:
        assert run.returncode == 1
        assert (
            f"NOT SAVED: step 5 of job gpt (attempt 1) is in memory only, in {place.segments}"
            in (run.stdout)
        )


# -- without a daemon


@pytest.mark.usefixtures("processes")
def test_a_node_without_a_daemon_and_without_unsaved_memory_owes_nothing(place: Home) -> None:
    with running(place, forked=True):
        pass
    run = ckptd("drain", place.root)
    assert (run.returncode, run.stdout, run.stderr) == (
        0,
        f"no daemon runs for {place.root} on {machine.host()}, and no snapshot is in its memory "
        f"only: nothing is owed\n",
        "",
    )


@pytest.mark.usefixtures("processes")
def test_a_root_that_is_misspelt_is_told(place: Home) -> None:
    with running(place, forked=True):
        pass
    run = ckptd("drain", f"{place.root}t")
    assert (run.returncode, run.stdout) == (10, "")
    assert (
        f"no daemon serves {place.root}t, which is no root: did you mean {place.root}?"
        in run.stderr
    )
    by_variable = ckptd("drain", environment={"CKPTD_ROOT": f"{place.root}t"})
    assert (by_variable.returncode, "nothing is owed" in by_variable.stdout) == (0, True)


@pytest.mark.usefixtures("processes")
def test_unsaved_memory_without_a_daemon_makes_exit_code_1(place: Home) -> None:
    with running(place, forked=True) as daemon:
        agent = in_memory(place)
        daemon.kill()
    vanish(agent)
    run = ckptd("drain", place.root)
    assert run.returncode == 1
    assert run.stdout.startswith(
        f"NOT SAVED: step 5 of job gpt (attempt 1) is in memory only, in {place.segments}. It stays"
    )
    assert f"start a daemon for {place.root} on {machine.host()}" in run.stdout
    assert ckptd("drain", place.root, "--job", "bert").returncode == 0
    row = {
        "root": str(place.root), "job": "gpt", "attempt": 1, "step": 5,
        "directories": [str(place.segments)], "reason": "",
    }  # fmt: skip
    assert json.loads(ckptd("drain", place.root, "--json").stdout) == {
        "drained": False, "daemon": False, "root": str(place.root), "saved": [], "owed": [],
        "more": 0, "unsaved": [row],
    }  # fmt: skip
    with running(place, forked=True) as daemon:
        assert daemon.stop() == 0
    assert ckptd("drain", place.root).returncode == 0


@pytest.mark.usefixtures("processes")
def test_a_named_socket_without_a_daemon_counts_all_memory_of_this_user(place: Home) -> None:
    shm = Path(f"/dev/shm/ckptd-test-drain-{os.getpid()}")
    shm.mkdir(mode=0o700)
    try:
        environment = {"CKPTD_SHM_DIR": str(shm), "CKPTD_SOCKET": str(place.socket)}
        assert ckptd("drain", environment=environment).returncode == 0
        with running(place, "--shm-dir", str(shm), forked=True) as daemon:
            agent = in_memory(place)
            daemon.kill()
        run = ckptd("drain", environment=environment)
        assert (run.returncode, f"start a daemon for {place.root}" in run.stdout) == (1, True)
        vanish(agent)
    finally:
        for path in shm.rglob("*.seg"):
            path.unlink()
        for path in shm.iterdir():
            path.rmdir()
        shm.rmdir()


# -- words


MORE_TIME = "give it more time with --deadline"
HALF = {"done": 3_000_000, "total": 8_000_000}
ON_THE_STAGE = "is on the stage, and waits for its upload"


@each_case(
    ("owed", "what", "todo"),
    [
        (
            due("waiting"),
            "waits for its turn, or for other nodes to seal it",
            f"let all ranks call snapshot for this step, and {MORE_TIME}",
        ),
        (due("saving", **HALF), "is still being written: 3.0 of 8.0 MB, 5.0 MB left", MORE_TIME),
        (
            due("failed", reason="the disk is full"),
            "its save has failed: the disk is full",
            "remove the cause, for example make room, and drain again",
        ),
        (
            due("delivered"),
            "is saved by this node, and other nodes have not delivered their parts",
            "`ckptd status /ckpts --job gpt` names them",
        ),
        (due("uploading"), ON_THE_STAGE, MORE_TIME),
        (due("uploading", **HALF), f"{ON_THE_STAGE}: 3.0 of 8.0 MB, 5.0 MB left", MORE_TIME),
        (
            due("uploading", reason="no network"),
            f"{ON_THE_STAGE}: no network",
            "mend what the reason names, and drain again",
        ),
        (due("copying"), "copying", "`ckptd status` tells more"),
    ],
)
def test_a_line_says_the_reason_and_what_to_do(owed: m.Due, what: str, todo: str) -> None:
    assert due_text(owed, "/ckpts") == f"NOT SAVED: gpt/{TAG} {what}. To do: {todo}"


def test_the_last_line_is_about_all() -> None:
    some = Outcome("/ckpts", 25.0, saved=["a/x"], owed=[due("waiting")], more=3)
    first, second, last = text(some).splitlines()
    assert first == "saved a/x"
    assert second.startswith("NOT SAVED: ")
    assert last.startswith("4 snapshots did not leave ")
    assert last.endswith(" within 25 s; the daemon continues to save")
    assert text(Outcome("/ckpts", 25.0)) == "nothing is owed to /ckpts any more"


def test_without_a_daemon_each_root_has_a_line() -> None:
    unsaved = {
        root: [UnsavedSnapshot("gpt", 1, step, ("/dev/shm/x",))]
        for root, step in (("/a", 5), ("", 6))
    }
    first, second = text(Outcome("", 25.0, daemon=False, unsaved=unsaved)).splitlines()
    assert "step 5 of job gpt" in first
    assert "start a daemon for /a on " in first
    assert "step 6 of job gpt" in second
    assert "start a daemon for their root on " in second
    nothing = text(Outcome("", 25.0, daemon=False))
    assert nothing.startswith(f"no daemon runs on {machine.host()}, and no snapshot is in")


def test_the_time_to_find_a_daemon_counts(place: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Slow:
        welcome = m.Welcome(re=1, version=1, features=["drain"], root=str(place.root))

        def new_id(self) -> int:
            return 2

        def send(self, request: m.Drain) -> None:
            asked.append(request.seconds)

        def receive(self) -> list[m.Drained]:
            return [m.Drained(re=2)]

        def close(self) -> None:
            pass

    def slow(*_: object) -> Any:
        time.sleep(0.05)
        return Slow()

    monkeypatch.setattr(neighbours, "connection", slow)
    assert ckptd("drain", place.root, "--deadline", "10").returncode == 0
    assert [seconds < 10 for seconds in asked] == [True]
