"""Tests that a run which saves nothing says so: at the first mistake of the caller, in
`close`, and when the process ends.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, default, snapshot
from ckptd.agent.handover.outcomes import Outcomes
from ckptd.agent.pending import Pending, PendingSnapshot
from ckptd.daemon.commands.report import status_text
from ckptd.shared.errors import (
    CallerError,
    InvalidName,
    InvalidRequest,
    RecoveryFailed,
    SnapshotFailed,
    UnsavableValue,
)
from ckptd.shared.wire.lifecycle import Event
from tests.support.daemons import Daemon, Home, until
from tests.support.scripts import python

GOOD = {"x": torch.ones(3)}


class Odd:
    pass


BAD = {"x": torch.ones(3), "odd": Odd()}


@dataclass
class Run:
    agent: Agent
    failed: list[Pending]

    def take(self, state: Any, step: Any, **options: Any) -> Pending:
        return self.agent.snapshot(state, step=step, on_failure=self.failed.append, **options)


@pytest.fixture
def job(daemon: Daemon) -> Run:
    return Run(Agent("job", socket=daemon.home.socket), [])


@pytest.mark.parametrize(
    ("state", "options", "error", "why"),
    [
        (BAD, {"step": 1}, UnsavableValue, "^odd: "),
        (GOOD, {"step": -1}, InvalidRequest, "^step is -1; expected an integer from 0 to "),
        (GOOD, {"step": 1.5}, InvalidRequest, "^step is 1.5; expected an integer"),
        (GOOD, {"step": 1, "tag": "a/b"}, InvalidName, "a/b"),
        (
            GOOD,
            {"step": 1, "on_busy": "later"},
            InvalidRequest,
            "^on_busy is 'later'; expected 'wait' or 'skip'",
        ),
        (
            GOOD,
            {"step": 1, "on_error": "no"},
            InvalidRequest,
            "^on_error is 'no'; expected 'raise-until-sealed', 'raise' or 'log'",
        ),
    ],
)
def test_a_mistake_of_the_caller_is_raised_until_a_snapshot_is_sealed(
    job: Run, state: Any, options: dict[str, Any], error: type[CallerError], why: str
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=why):
            job.take(state, **options)
    job.take(GOOD, 5).wait("sealed", timeout=60)
    later = {**options, "step": 6 if options["step"] == 1 else options["step"]}
    pending = job.take(state, **later)
    assert isinstance(pending.error, error)
    until(lambda: len(job.failed) == 3, "calls of on_failure")
    assert [failed.state for failed in job.failed] == ["failed"] * 3
    assert job.failed[-1] == pending
    if "on_error" not in options:
        with pytest.raises(error, match=why):
            job.take(state, **later, on_error="raise")
    job.agent.close()


def test_a_new_attempt_begins_with_raising_again(job: Run) -> None:
    job.take(GOOD, 5).wait("durable", timeout=60)
    job.take(GOOD, 6).wait("durable", timeout=60)
    job.agent.recover({"x": torch.zeros(3)}, step=5)
    with pytest.raises(UnsavableValue):
        job.take(BAD, 6)
    job.agent.close()


def test_close_raises_if_snapshots_were_asked_for_and_none_was_sealed(job: Run) -> None:
    for step in (1, 2):
        assert isinstance(job.take(BAD, step, on_error="log").error, UnsavableValue)
    with pytest.raises(
        SnapshotFailed,
        match=r"^nothing of this run was saved: none of its 2 snapshots .* step 2: odd: ",
    ):
        job.agent.close()
    assert job.agent.closed
    job.agent.close()


def test_close_says_nothing_if_no_snapshot_was_asked_for_or_one_was_sealed(
    daemon: Daemon, job: Run
) -> None:
    Agent("other", socket=daemon.home.socket).close()
    job.take(BAD, 1, on_error="log")
    job.take(GOOD, 2, persist=False)
    job.agent.close()


def test_status_counts_the_failures_of_an_agent_that_is_alone_and_shows_the_last(
    daemon: Daemon, job: Run
) -> None:
    job.take(BAD, 3, on_error="log")
    status = daemon.status()
    (shown,) = status["jobs"]
    assert status["counters"]["failed"] == 1
    assert shown["last_error"]["step"] == 3
    assert "odd: " in shown["last_error"]["reason"]
    assert 0 <= shown["last_error"]["age_seconds"] < 600
    assert shown["last_durable"] is None
    job.take(GOOD, 3).wait("durable", timeout=60)  # the same step, in a state that can be saved
    (shown,) = daemon.status()["jobs"]
    assert 0 <= shown["last_durable"]["age_seconds"] < 600
    assert shown["last_error"]["step"] == 3
    job.agent.close()


def test_status_counts_the_steps_that_are_refused(daemon: Daemon, job: Run) -> None:
    job.take(GOOD, 4).wait("durable", timeout=60)
    for count, step in ((1, 4), (2, -3)):
        assert isinstance(job.take(GOOD, step, on_error="log").error, InvalidRequest)
        status = daemon.status()
        assert status["counters"]["failed"] == count
        assert status["jobs"][0]["last_error"]["step"] is None
        assert str(step) in status["jobs"][0]["last_error"]["reason"]
    assert "  LAST ERROR     job: 0 s ago: step" in status_text(status)
    assert job.take(GOOD, 5).wait("durable", timeout=60).state == "durable"
    job.agent.close()


def test_an_error_in_on_failure_is_logged_and_changes_nothing(
    job: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(pending: Pending) -> None:
        raise RuntimeError("no")

    pending = job.agent.snapshot(BAD, step=1, on_error="log", on_failure=fails)
    assert isinstance(pending.error, UnsavableValue)
    until(lambda: "on_failure of the snapshot of step 1" in caplog.text, "log of the exception")
    job.agent.snapshot(GOOD, step=2)
    job.agent.close()


def test_on_failure_may_wait_and_holds_no_snapshot(job: Run) -> None:
    """A callback posts to a chat, for example, or waits for another snapshot."""
    entered, may_go, waited = threading.Event(), threading.Event(), threading.Event()
    later: list[Pending] = []

    def posts(pending: Pending) -> None:
        entered.set()
        may_go.wait(60)
        later[0].wait("durable", timeout=60)
        waited.set()

    job.agent.snapshot(BAD, step=1, on_error="log", on_failure=posts)
    assert entered.wait(60)
    later.append(job.agent.snapshot(GOOD, step=2).wait("durable", timeout=60))
    may_go.set()
    assert waited.wait(60)
    job.agent.close()


def test_any_integer_is_a_step(job: Run) -> None:
    assert job.take(GOOD, torch.tensor(4)).wait("durable", timeout=60).step == 4
    assert job.take(GOOD, torch.tensor([5]).numpy()[0]).wait("durable", timeout=60).step == 5
    assert isinstance(job.take(GOOD, True).error, InvalidRequest)
    job.agent.close()


# -- the end of a process

SCRIPT = """
import os, sys
import torch
from ckptd.agent import Agent
agent = Agent("job", socket=sys.argv[1])
steps = {"bad": object(), "good": 1}
for step, word in enumerate(sys.argv[2:]):
    pending = agent.snapshot({"x": torch.ones(3), "value": steps[word]}, step=step, on_error="log")
    if word == "good":
        pending.wait("sealed", timeout=60)
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [(["bad", "bad"], True), (["bad", "good"], False), (["good", "bad"], False), ([], False)],
)
def test_a_process_that_ends_without_close_and_has_saved_nothing_leaves_a_line(
    daemon: Daemon, words: list[str], told: bool
) -> None:
    ended = python("-c", SCRIPT, daemon.home.socket, *words)
    assert ended.returncode == 0, ended.stderr
    assert (
        "ckptd: nothing of this run was saved: none of its 2 snapshots could be saved"
        in ended.stderr
    ) == told


@pytest.mark.usefixtures("processes")
def test_a_missing_setting_is_raised_by_the_first_snapshot(
    place: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CKPTD_ROOT", str(place.root))
    monkeypatch.setenv("CKPTD_JOB", "not/a name")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # Or else this process would end with a line about it.
    monkeypatch.setattr(default, "_without_agent", Outcomes())
    with pytest.raises(InvalidName):
        snapshot(GOOD, step=1)
    assert isinstance(snapshot(GOOD, step=1, on_error="log").error, InvalidName)
    with pytest.raises(
        SnapshotFailed,
        match=r"^nothing of this run was saved: .*; the last error, of step 1: .*'not/a name'",
    ):
        default.close()


# -- counting, without a daemon


def ended(outcomes: Outcomes, step: int, *events: Event, error: str = "") -> None:
    pending = PendingSnapshot(step, 3, note=outcomes.note)
    for event in events:
        pending.move(event)
    if error:
        pending.fail(SnapshotFailed(error))


def test_the_sentence_about_failures_names_their_number_and_the_last_reason() -> None:
    outcomes = Outcomes()
    assert outcomes.complaint() == ""
    ended(outcomes, 7, error="no room")
    assert (
        outcomes.complaint()
        == "nothing of this run was saved: its only snapshot failed; the last error, of step 7: "
        "no room"
    )
    ended(outcomes, 8, error="no disk")
    assert (
        outcomes.complaint()
        == "nothing of this run was saved: none of its 2 snapshots could be saved; the last "
        "error, of step 8: no disk"
    )
    ended(outcomes, 9, Event.GRANT, Event.STAGE, Event.SEAL)
    assert outcomes.sealed_in == 3
    assert outcomes.complaint() == ""


# -- objects that fail


class Loader:
    """An object with a state, which fails when `broken` says so."""

    broken = ""

    def state_dict(self) -> dict[str, int]:
        if self.broken == "saving":
            raise RuntimeError("it was never iterated")
        return {"position": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.broken == "loading":
            raise KeyError("position")


def test_an_object_whose_state_dict_raises_is_named_by_its_key(job: Run) -> None:
    loader = Loader()
    loader.broken = "saving"
    sentence = (
        r"^data\.loader: the state_dict\(\) of .*Loader raised RuntimeError\('it was "
        r"never "
        r"iterated'\): call it when it works"
    )
    with pytest.raises(UnsavableValue, match=sentence):
        job.take({"data": {"loader": loader}}, 1)
    assert set(job.take({"data": {"loader": loader}}, 1, unsavable="skip").unsaved or {}) == {
        "data.loader"
    }
    job.agent.close()


def test_an_object_whose_load_state_dict_raises_is_named_with_a_remedy(job: Run) -> None:
    job.take({"x": torch.ones(3), "loader": Loader()}, 1).wait("durable", timeout=60)
    loader = Loader()
    loader.broken = "loading"
    state = {"x": torch.zeros(3), "loader": loader}
    sentence = (
        r"^loader: load_state_dict\(\) of .*Loader raised "
        r"KeyError\('position'\); "
        r".*keep=\['loader'\]"
    )
    with pytest.raises(RecoveryFailed, match=sentence) as caught:
        job.agent.recover(state)
    assert caught.value.overwritten
    assert job.agent.recover(state, keep=["loader"]) is not None
    assert state["x"].tolist() == [1.0] * 3  # type: ignore[attr-defined]
    job.agent.close()
