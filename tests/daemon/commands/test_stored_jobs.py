"""Tests what `ckptd status` tells of a root that no daemon serves."""

from __future__ import annotations

import json

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.commands.stored_jobs import stored_jobs, stored_jobs_text
from ckptd.shared.errors import NotFound
from tests.support.commands import ckptd
from tests.support.daemons import Home, running
from tests.support.forged import forge
from tests.support.trainers import vanish


@pytest.mark.usefixtures("processes")
def test_status_tells_from_storage_that_no_daemon_runs(place: Home) -> None:
    with running(place, forked=True) as daemon:
        agent = Agent("gpt", socket=place.socket)
        for step in (1, 2):
            agent.snapshot({"w": torch.ones(3)}, step=step).wait("durable", timeout=60)
        agent.close()
        assert ckptd("status", "--socket", place.socket).returncode == 0
        daemon.stop()
    told = ckptd("status", place.root)
    assert told.returncode == 14
    assert told.stderr.startswith("ckptd: no daemon of uid ")
    assert f" serves {place.root}" in told.stderr
    assert told.stderr.endswith(
        f". If its daemon has ended, start it: `ckptd run --root {place.root}`, or `systemctl "
        f"start` with its unit. What is in memory is saved then. This is what storage has:\n"
    )
    assert (
        f"start it: `ckptd run --root {place.root}`"
        in ckptd("status", place.root, "--check").stderr
    )
    assert told.stderr.count("\n") == 1
    title, row = told.stdout.splitlines()
    assert title.split() == ["JOB", "CHECKPOINTS", "NEWEST", "SIZE", "CREATED"]
    assert row.split()[:3] == ["gpt", "2", "step-00000002.a0001"]
    found = json.loads(ckptd("status", place.root, "--json").stdout)
    assert (found["error"]["code"], found["exit"]) == ("unreachable", 14)
    (job,) = found["storage"]["jobs"]
    assert (job["job"], job["checkpoints"], job["damaged"], job["step"]) == ("gpt", 2, 0, 2)
    assert found["storage"]["in_memory_only"] == []


@pytest.mark.usefixtures("processes")
def test_what_a_killed_daemon_has_left_in_memory_is_named(place: Home) -> None:
    with running(place, forked=True) as daemon:
        agent = Agent("gpt", socket=place.socket)
        agent.snapshot({"w": torch.ones(3)}, step=1).wait("durable", timeout=60)
        agent.snapshot({"w": torch.ones(3)}, step=2, persist=False).wait("sealed", timeout=60)
        daemon.kill()
        vanish(agent)
    assert stored_jobs(place.root)["in_memory_only"] == [{"job": "gpt", "attempt": 1, "step": 2}]
    assert ckptd("status", place.root).stdout.splitlines()[-1] == (
        "step 2 of job gpt (attempt 1) is in the memory of this node only: the next daemon of "
        "this root saves it"
    )


def test_damaged_checkpoints_are_counted(place: Home) -> None:
    for step in (1, 2):
        made = forge(place.root, (1,), [[((0,), (1,))]], step=step)
    (made / "manifest.json").write_text("{}")
    found = stored_jobs(place.root)
    (job,) = found["jobs"]
    assert (job["checkpoints"], job["damaged"], job["newest"]) == (1, 1, "step-00000001.a0001")
    assert stored_jobs_text(found).splitlines()[1].endswith("DAMAGED: 1")


@pytest.mark.usefixtures("processes")
def test_a_root_without_checkpoints_and_none_at_all(place: Home) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        stored_jobs(place.root)
    (place.root / "gpt").mkdir(parents=True)
    assert stored_jobs_text(stored_jobs(place.root)) == "no checkpoints yet"
    told = ckptd("status", place.root / "gpt")
    assert (told.returncode, told.stdout) == (14, "")


@pytest.mark.usefixtures("processes")
def test_a_root_that_is_misspelt_is_answered_with_the_one_that_was_meant(place: Home) -> None:
    forge(place.root, (1,), [[((0,), (1,))]])
    (place.root / ".ckptd").mkdir()
    told = ckptd("status", place.root.with_name("roto"))
    assert (told.returncode, told.stdout) == (14, "")
    assert told.stderr.endswith(f": did you mean {place.root}?\n")
