"""Tests that a lock on a checkpoint never changes which step `recover` returns."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptd.agent import Agent
from ckptd.shared.errors import Busy
from ckptd.shared.storage import locks
from ckptd.shared.storage.locate import open_root
from tests.support.daemons import Home, running
from tests.support.strangers import KINDS, holding
from tests.support.trainers import assert_equal, blank, expected

NEWEST = "step-00000002.a0001"


@pytest.fixture
def saved(processes: None, place: Home) -> Path:
    """Return the directory of a job with two steps on storage and none in memory, which
    every user may read.
    """
    place.path.chmod(0o755)
    with running(place, forked=True):
        agent = Agent("gpt", socket=place.socket)
        for step in (1, 2):
            agent.snapshot(expected(step), step=step).wait("durable", timeout=60)
        agent.close()
    shutil.rmtree(place.segments, ignore_errors=True)
    return place.root / "gpt"


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_of_another_user_on_the_newest_manifest_brings_back_no_older_step(
    place: Home, saved: Path, kind: str
) -> None:
    with holding(kind, saved / NEWEST / "manifest.json"), running(place, forked=True):
        agent = Agent("gpt", socket=place.socket)
        state = blank()
        recovered = agent.recover(state)
        agent.close()
    assert recovered is not None
    assert (recovered.step, recovered.source, recovered.passed_over) == (2, "storage", [])
    assert_equal(state, 2)


def test_a_deleters_lock_on_the_newest_manifest_is_busy(
    place: Home, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "SECONDS", 0.1)
    with running(place, forked=True):
        agent = Agent("gpt", socket=place.socket)
        state = blank()
        with (
            open_root(place.root).exclude("gpt", NEWEST),
            pytest.raises(Busy, match=f"checkpoint gpt/{NEWEST} in .* cannot be read now"),
        ):
            agent.recover(state)
        assert state["step"] == -1
        recovered = agent.recover(state)
        agent.close()
    assert recovered is not None
    assert (recovered.step, recovered.passed_over) == (2, [])
    assert_equal(state, 2)
