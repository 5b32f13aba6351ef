"""Tests how a reader asks for a snapshot: the answers of the daemon, and the sentences
for a daemon that is too old or does not answer.
"""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.link import loans
from ckptd.agent.link.loans import borrow
from ckptd.shared.errors import DaemonUnreachable, InvalidRequest, VersionMismatch
from ckptd.shared.wire.channel import Channel
from tests.support.daemons import Daemon, until


def test_a_snapshot_is_lent_from_memory_and_then_named_on_storage(daemon: Daemon) -> None:
    agent = Agent("gpt", socket=daemon.home.socket)
    with closing(Channel(daemon.home.socket, 10.0)) as channel:
        assert borrow(channel, "gpt", wait=0.01) is None
        agent.snapshot({"a": torch.ones(3)}, step=4).wait("durable", timeout=60)
        loan = borrow(channel, "gpt")
        assert loan is not None
        assert (loan.key, loan.tag, loan.stored) == ((1, 4), "step-00000004.a0001", False)
        (descriptor,) = loan.slots.values()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor.fileno(), b"x", 0)
        loan.close()
        assert borrow(channel, "gpt", (1, 4)) is None
        agent.close()
        until(lambda: (found := borrow(channel, "gpt")) is not None and found.stored, "a name")
        with pytest.raises(InvalidRequest):
            borrow(channel, "../gpt")


def test_a_daemon_of_an_earlier_version_and_one_that_hangs(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Channel(daemon.home.socket, 10.0)) as channel:
        channel.welcome.features.remove("lending")
        with pytest.raises(VersionMismatch, match="which lends no snapshots: install the same"):
            borrow(channel, "gpt")
        channel.welcome.features.append("lending")
        monkeypatch.setattr(loans, "ANSWER_SECONDS", 0.0)
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DaemonUnreachable, match="^the daemon does not answer$"):
                borrow(channel, "gpt", wait=0.1)
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
