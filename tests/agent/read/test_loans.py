"""Tests that a snapshot that was lent is opened from its slots, or from its checkpoint
with the slots in place of its parts.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.link.loans import Borrowed, borrow
from ckptd.agent.read.loans import open_loan
from ckptd.agent.read.slot_source import PartWithSlot, SlotSource
from ckptd.agent.read.staged_source import ChunkMemory, staged_source
from ckptd.shared.errors import NotFound, VersionGone
from ckptd.shared.wire.channel import Channel
from tests.support.daemons import Daemon


def lent(daemon: Daemon, agent: Agent) -> Borrowed:
    agent.snapshot({"a": torch.arange(50_000)}, step=4).wait("durable", timeout=60)
    with closing(Channel(daemon.home.socket, 10.0)) as channel:
        loan = borrow(channel, "gpt")
    assert loan is not None
    return loan


@pytest.mark.parametrize(("stored", "kind"), [(False, SlotSource), (True, PartWithSlot)])
def test_slots_are_read_alone_or_in_place_of_parts(
    daemon: Daemon, stored: bool, kind: type
) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    loan = replace(lent(daemon, agent), stored=stored)
    opened = open_loan("gpt", loan, ChunkMemory())
    assert (opened.step, opened.attempt, opened.manifest is not None) == (4, 1, stored)
    (source,) = opened.sources
    assert isinstance(staged_source(source).inner, kind)
    staged_source(source).stage([0])
    opened.close()
    assert all(descriptor.closed for descriptor in loan.slots.values())
    agent.close()


def test_a_loan_that_is_over_closes_its_descriptors(daemon: Daemon) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    loan = replace(lent(daemon, agent), key=(1, 3))
    with pytest.raises(VersionGone, match="has been filled again"):
        open_loan("gpt", loan, ChunkMemory())
    assert all(descriptor.closed for descriptor in loan.slots.values())
    agent.snapshot({"a": torch.arange(50_000)}, step=5).wait("durable", timeout=60)
    with closing(Channel(daemon.home.socket, 10.0)) as channel:
        found = borrow(channel, "gpt")
    assert found is not None
    with pytest.raises(NotFound):
        open_loan("gpt", replace(found, tag="step-00000009.a0001", stored=True), ChunkMemory())
    assert all(descriptor.closed for descriptor in found.slots.values())
    agent.close()
