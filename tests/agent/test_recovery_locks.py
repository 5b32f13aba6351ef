"""A process that may only read the checkpoints cannot change which step `recover` returns."""

from __future__ import annotations

import shutil

import pytest
import torch

from ckptd.agent import Agent
from tests.support.daemons import Home, running
from tests.support.strangers import KINDS, holding
from tests.support.trainers import assert_equal, blank, expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_strangers_lock_on_the_newest_manifest_does_not_bring_back_an_older_step(place: Home, kind: str) -> None:
    place.path.chmod(0o755)
    with running(place, forked=True):
        agent = Agent("gpt", socket=place.socket)
        for step in (1, 2):
            agent.snapshot(expected(step), step=step).wait("durable", timeout=60)
        agent.close()
    shutil.rmtree(place.segments, ignore_errors=True)
    newest = place.root / "gpt" / "step-00000002.a0001" / "manifest.json"
    with holding(kind, newest), running(place, forked=True):
        agent = Agent("gpt", socket=place.socket)
        state = blank()
        recovered = agent.recover(state)
        agent.close()
    assert recovered is not None
    assert (recovered.step, recovered.source, recovered.passed_over) == (2, "storage", [])
    assert_equal(state, 2)
    assert torch.equal(state["weight"], expected(2)["weight"])
