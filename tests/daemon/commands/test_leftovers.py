"""Tests that what dead daemons have left is found with its size and contents, and that
nothing in use is deleted.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.commands import leftovers
from ckptd.daemon.commands.leftovers import Leftover
from tests.support.commands import ckptd
from tests.support.daemons import Daemon, Home
from tests.support.trainers import vanish


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def killed(processes: None, place: Home, shm: Path) -> Iterator[tuple[Home, Agent, Daemon]]:
    """A daemon that was killed while its trainer waits for the next one."""
    daemon = Daemon(place, "--shm-dir", str(shm), forked=True).wait_ready()
    agent = Agent("gpt", socket=place.socket)
    agent.snapshot({"x": torch.ones(100_000)}, step=5, persist=False).wait("sealed", timeout=60)
    yield place, agent, daemon
    vanish(agent)
    daemon.kill()


def only(shm: Path) -> list[Leftover]:
    return [found for found in leftovers.find(shm) if found.path.parent == shm]


def test_what_a_killed_pair_has_left_is_listed_and_deleted_on_request(
    killed: tuple[Home, Agent, Daemon], shm: Path
) -> None:
    _, agent, daemon = killed
    assert only(shm) == []  # the daemon has locked the directory
    daemon.kill()
    assert only(shm) == []  # the trainer waits for the next daemon
    vanish(agent)
    (found,) = only(shm)
    assert found.holds == ("gpt step 5",)
    assert found.nbytes is not None
    assert found.nbytes > 800_000  # two slots
    listed = ckptd("gc", "--shm-dir", shm)
    assert str(found.path) in listed.stdout
    assert "gpt step 5" in listed.stdout
    assert "can be freed with --delete" in listed.stdout
    assert found.path.exists()
    for options in ([], ["--json"]):
        refused = ckptd("gc", "--shm-dir", shm, "--delete", *options)
        assert refused.returncode == 2
        assert (
            "nothing was deleted, because this would delete 1 sealed snapshot"
            in refused.stdout + refused.stderr
        )
        assert "pass --yes to delete" in refused.stdout + refused.stderr
    assert found.path.exists()
    rows = json.loads(ckptd("gc", "--shm-dir", shm, "--delete", "--yes", "--json").stdout)
    assert [row["deleted"] for row in rows if row["path"] == str(found.path)] == [True]
    assert not found.path.exists()


def test_a_directory_that_came_into_use_is_not_deleted(
    killed: tuple[Home, Agent, Daemon], shm: Path
) -> None:
    place, agent, daemon = killed
    daemon.kill()
    (path,) = [path for path in shm.iterdir() if path.name.startswith("ckptd-")]
    listed = Leftover(path, "me", 1)
    assert not leftovers.delete(listed)  # its trainer lives
    vanish(agent)
    again = Daemon(place, "--shm-dir", str(shm), forked=True).wait_ready()
    assert not leftovers.delete(listed)
    again.kill()


def test_other_names_and_links_are_left_alone(shm: Path) -> None:
    (shm / "ckptd-0-0123456789abcdef").symlink_to(shm)
    (shm / "ckptd-other").mkdir()
    (shm / "ckptd-0-0123456789abcde0").touch()
    assert only(shm) == []
    strange = shm / "ckptd-0-0123456789abcde1"
    strange.mkdir(mode=0o700)
    (strange / "mine").write_text("x")
    (found,) = only(shm)
    assert leftovers.delete(found)
    assert (strange / "mine").exists()
    assert list(leftovers.find(shm / "missing")) == [
        found for found in leftovers.find(shm / "missing") if found.path.is_socket()
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to somebody else")
def test_a_directory_of_another_user_is_shown_without_its_size(shm: Path) -> None:
    strange = shm / "ckptd-0-0123456789abcde1"
    strange.mkdir(mode=0o700)
    os.chown(strange, 65534, 65534)
    (other,) = only(shm)
    assert (other.path, other.nbytes) == (strange, None)


def test_a_socket_without_a_listener_is_a_leftover(
    place: Home, monkeypatch: pytest.MonkeyPatch, shm: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.path))
    stale, live = (
        place.path / "ckptd-0123456789abcdef.sock",
        place.path / "ckptd-0123456789abcde0.sock",
    )
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(live))
        server.listen()
        found = [each for each in leftovers.find(shm) if each.path.parent == place.path]
        assert [each.path for each in found] == [stale]
        assert not leftovers.delete(Leftover(live, "me", 0))
        assert leftovers.delete(found[0])
        assert (stale.exists(), live.exists()) == (False, True)


@pytest.mark.usefixtures("processes")
def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """Otherwise `ckptd gc` would say of a misspelt one that nothing is left in it."""
    for run in (
        ckptd("gc", "--shm-dir", tmp_path / "gone"),
        ckptd("gc", environment={"CKPTD_SHM_DIR": str(tmp_path / "gone")}),
    ):
        assert (run.returncode, run.stdout) == (2, "")
        assert f"Directory '{tmp_path}/gone' does not exist" in run.stderr
