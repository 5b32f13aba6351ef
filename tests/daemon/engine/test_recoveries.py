"""Tests that a daemon learns of recoveries: once for all ranks of a job, in its log, its
metrics and its history, and that no recovery depends on it.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from typing import Any

import msgspec
import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.engine.recoveries import Recoveries
from ckptd.daemon.log_events import event_of, facts_of
from ckptd.shared.errors import InvalidRequest
from ckptd.shared.wire import messages as m
from tests.support.commands import ckptd
from tests.support.daemons import Home, running, until
from tests.support.events import logged
from tests.support.ranks import Ranks

REPORT = m.ReportRecovery(
    id=1, step=30, attempt=2, tag="best.a0002", source="memory", seconds=0.25, bytes=2_000_000
)
FACTS = {
    "job": "gpt", "tag": "best.a0002", "step": 30, "attempt": 2, "source": "memory",
    "seconds": 0.25, "bytes": 2_000_000,
}  # fmt: skip


def test_a_report_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    recoveries = Recoveries()
    recoveries.add("gpt", 0, REPORT)
    recoveries.add(
        "bert", 0, msgspec.structs.replace(REPORT, step=None, source="storage", seconds=20)
    )
    assert recoveries.counts == {"memory": 1, "storage": 1}
    found = recoveries.times.distribution()
    assert (sum(found.counts), found.seconds) == (2, 20.25)
    assert [event_of(record) for record in caplog.records] == ["job.recovered"] * 2
    first, second = map(facts_of, caplog.records)
    assert first == FACTS
    assert "step" not in second
    recoveries.add("gpt", 0, REPORT, 5)
    assert facts_of(caplog.records[2]) == FACTS, "from memory, nothing of storage was read"
    recoveries.add("gpt", 0, msgspec.structs.replace(REPORT, source="storage"), 5)
    assert facts_of(caplog.records[3])["restored_bytes"] == 5
    assert caplog.messages[0] == "job gpt has recovered best.a0002 (2.0 MB) from memory in 0.25 s"


def test_damage_that_a_recovery_has_passed_over_is_an_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage = "gpt/step-00000040.a0002 in storage: chunk 0 does not match its checksum"
    Recoveries().add(
        "gpt", 0, msgspec.structs.replace(REPORT, passed_over=[damage, "odd: cut short"] * 20)
    )
    told = logged(caplog, "checkpoint.damaged")
    assert told[:2] == [
        {
            "job": "gpt", "tag": "step-00000040.a0002",
            "reason": "in storage: chunk 0 does not match its checksum",
        },
        {"job": "gpt", "tag": "odd", "reason": "cut short"},
    ]  # fmt: skip
    assert len(told) == 16


def test_a_source_that_is_not_known_is_refused_and_not_counted() -> None:
    recoveries = Recoveries()
    with pytest.raises(InvalidRequest, match="'tape'; expected one of memory, stage, storage$"):
        recoveries.add("gpt", 0, msgspec.structs.replace(REPORT, source="tape"))
    with pytest.raises(InvalidRequest, match="rank 1 reports a recovery"):
        recoveries.add("gpt", 1, REPORT)
    assert (recoveries.counts, sum(recoveries.times.distribution().counts)) == ({}, 0)


def events(place: Home) -> list[dict[str, Any]]:
    """Return the facts of the recoveries in the log of a daemon."""
    lines = map(json.loads, place.log_text().splitlines())
    return [line["facts"] for line in lines if line.get("event") == "job.recovered"]


STATE = {"w": torch.arange(1000, dtype=torch.float32)}


def train(socket: str, steps: int) -> tuple[int, str] | None:
    """Run a job as one rank of the group does: recover, take snapshots, and end. Return
    step and source of the recovery.
    """
    with closing(Agent("gpt", socket=socket)) as agent:
        state = {"w": torch.zeros(1000)}
        recovered = agent.recover(state)
        for step in range(10, 10 + steps):
            agent.snapshot(STATE, step=step).wait("durable", timeout=60)
        return None if recovered is None else (recovered.step, recovered.source)


@pytest.mark.usefixtures("processes")
def test_a_recovery_of_two_ranks_counts_once_and_is_in_the_history(place: Home) -> None:
    with running(place, "--log-format", "json", forked=True):
        with Ranks(2) as ranks:
            assert ranks.call(train, str(place.socket), 1) == [None, None]
            assert ranks.call(train, str(place.socket), 0) == [(10, "storage")] * 2
        until(lambda: events(place), "event")
        (facts,) = events(place)
        assert facts.pop("seconds") > 0
        assert facts.pop("bytes") >= STATE["w"].nbytes
        assert facts.pop("restored_bytes") > 0
        assert facts == {
            "job": "gpt", "tag": "step-00000010.a0001", "step": 10, "attempt": 1,
            "source": "storage",
        }  # fmt: skip

        asked = ("history", "gpt", "--socket", place.socket, "--event", "job.recovered")
        until(lambda: "recovered" in ckptd(*asked).stdout, "line of the history")
        told = ckptd(*asked).stdout.splitlines()[1]
        assert "job.recovered  gpt  10" in told
        assert "job gpt has recovered step-00000010.a0001 (" in told


@pytest.mark.usefixtures("processes")
def test_a_daemon_that_hangs_after_the_last_answer_delays_no_recovery(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(place, "--log-format", "json", forked=True) as daemon:
        train(str(place.socket), 1)
        agent = Agent("gpt", socket=place.socket)
        monkeypatch.setattr(agent, "_prepare", lambda state: None)  # which asks the daemon
        monkeypatch.setattr(
            agent._advice, "recovered", lambda step: os.kill(daemon.process.pid, signal.SIGSTOP)
        )
        try:
            recovered = agent.recover({"w": torch.zeros(1000)})
            assert recovered is not None
            assert (recovered.step, events(place)) == (10, [])
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        until(lambda: events(place), "event")
        monkeypatch.setattr(agent._advice, "recovered", lambda step: daemon.kill())
        assert agent.recover({"w": torch.zeros(1000)}) is not None
        assert len(events(place)) == 1
        agent._link.client.close()
