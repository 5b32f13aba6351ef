"""Tests the checks that all integrations make."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from ckptd.agent import Schedule, default
from ckptd.integrations import framework
from ckptd.integrations.framework import (
    attach_once,
    calls_of,
    check_version,
    recover_with,
    schedule_of,
    wait_durable,
)
from ckptd.shared.errors import InvalidRequest, SnapshotFailed
from tests.support.cases import each_case


@each_case(
    ("found", "lowest", "below", "fits"),
    [
        ("5.0", "5.0", "6", True),
        ("5.10.1", "5.9", "6", True),
        ("4.57.2", "5.0", "6", False),
        ("6.0.0rc1", "5.0", "6", False),
        ("2.13.0+cpu", "2.13", "2.14", True),
        ("unknown", "1.0", "2", False),
    ],
)
def test_the_installed_version_must_be_in_the_range(
    monkeypatch: pytest.MonkeyPatch, found: str, lowest: str, below: str, fits: bool
) -> None:
    monkeypatch.setattr(framework, "version", lambda package: found)
    refusal = (
        f"torch {found} is installed, with which ckptd was not tried; install a version from "
        f"{lowest} to below {below}, or call ckptd.snapshot() and ckptd.recover() yourself"
    )
    said = ""
    try:
        check_version("torch", lowest, below)
    except InvalidRequest as error:
        said = str(error)
    assert said == ("" if fits else refusal)


def test_a_framework_that_is_not_installed_is_named() -> None:
    with pytest.raises(
        InvalidRequest,
        match=r"^no-such-package is not installed; expected a version from 1\.0 to below 2$",
    ):
        check_version("no-such-package", "1.0", "2")


def test_a_second_attach_is_refused() -> None:
    class Trainer:
        pass

    first, second = Trainer(), Trainer()
    attach_once(first, "Trainer")
    attach_once(second, "Trainer")
    with pytest.raises(
        InvalidRequest, match=r"^ckptd is attached to this Trainer already: call attach\(\) once$"
    ):
        attach_once(first, "Trainer")


def test_a_schedule_is_given_or_made() -> None:
    given = Schedule(every_seconds=600)
    assert schedule_of(given, None) is given
    made = schedule_of(None, 50)
    assert made.agent is None
    assert [made.due(step) for step in (49, 50, 51)] == [False, True, False]


def test_the_agent_of_a_schedule_is_used() -> None:
    agent: Any = object()
    given = Schedule(every_seconds=600, agent=agent)
    assert schedule_of(given, None) is given
    assert schedule_of(given, None, agent) is given
    assert (given.agent, schedule_of(None, 50, agent).agent) == (agent, agent)
    with pytest.raises(
        InvalidRequest,
        match="^the schedule takes its snapshots with another agent: give the agent to it",
    ):
        schedule_of(Schedule(every_seconds=600), None, agent)


@pytest.mark.parametrize(
    ("schedule", "every_steps", "message"),
    [
        (None, None, "give either every_steps=, a number of steps, or schedule="),
        (Schedule(every_steps=1), 50, "give either every_steps=, a number of steps, or schedule="),
        (None, 0, "every_steps is 0; expected a number from 1 up"),
    ],
)
def test_neither_both_nor_an_invalid_schedule_is_accepted(
    schedule: Any, every_steps: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        schedule_of(schedule, every_steps)


def test_the_package_has_one_name() -> None:
    told = r"^import ckptd\.integrations instead of ckptd\.agent\.integrations$"
    with pytest.raises(ImportError, match=told):
        import_module("ckptd.agent.integrations.framework")


class Alone:
    """An agent whose other rank is missing, and whose snapshot is not saved."""

    step = 7

    def recover(self, state: Any, **options: Any) -> Any:
        asked.append((state, options))
        raise SnapshotFailed("rank 1 is missing")

    def wait(self, state: str, seconds: float) -> None:
        raise TimeoutError(f"not {state}")


asked: list[Any] = []


def test_the_calls_are_those_of_the_agent_or_of_the_process() -> None:
    agent: Any = Alone()
    assert calls_of(agent) is agent
    assert calls_of(None) is default


def test_a_missing_rank_is_told_which_call_to_make() -> None:
    agent: Any = Alone()
    with pytest.raises(
        SnapshotFailed, match=r"^rank 1 is missing\. Every rank must call attach\(\)$"
    ):
        recover_with(agent, "state", "attach()", max, step=3)
    assert asked == [("state", {"on_reshape": max, "step": 3})]


def test_a_last_step_that_is_not_durable_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pending: Any = Alone()
    wait_durable(pending)
    assert caplog.messages == ["the last step, 7, is not durable: not durable"]
