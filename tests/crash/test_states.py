"""Moments that the rig would have to be lucky to hit; and that it says so when a promise is broken."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.crash.disk import LOST, Disk, Recorder, Step
from tests.crash.states import Examiner, Life, Promises, a_life, after, config, directory, run, simulated
from tests.support.daemons import recover_only


@pytest.fixture(scope="module")
def life() -> Life:
    return a_life(Disk(), Promises(), Random(1))


def examine(disk: Disk, promised: Promises) -> str:
    """After a power cut that loses all that is not synced."""
    with simulated():
        return asyncio.run(Examiner().examine(disk.after_cut(lambda _: (LOST, 0)), promised))


def recovered(disk: Disk) -> None:
    """By a daemon that is then killed."""
    with directory() as place, directory() as shm, simulated():
        recorder = Recorder(place, disk)
        asyncio.run(recover_only(config(place, shm), recorder))
    for step in recorder.steps:
        disk.do(step)


def before(life: Life, kind: str, name: str, number: int = -1) -> int:
    """So many operations come before that one."""
    found = [at for at, step in enumerate(life.steps) if step.kind == kind and name in (step.name, step.other)]
    return found[number]


def test_a_manifest_that_was_renamed_by_a_daemon_that_died_is_durable_once_the_next_has_recovered(life: Life) -> None:
    moment = before(life, "rename", "manifest.json") + 1
    *_, (_, (_, key)) = life.notes  # the last to be told
    disk = after(life, moment)
    recovered(disk)
    assert examine(disk, Promises({key[:2]: None})) == ""


def test_what_is_told_is_durable(life: Life) -> None:
    assert [what for _, (what, _) in life.notes] == ["attempt", *["durable"] * 4]
    for moment, _ in life.notes:
        assert examine(after(life, moment), life.promised.with_notes(life.notes, moment)) == ""


def test_an_attempt_that_is_given_out_twice_is_seen(life: Life) -> None:
    assert "attempt 9 was given out and is not known any more" in examine(after(life, len(life.steps)), Promises(attempt=9))


def test_a_sync_that_does_nothing_is_seen(life: Life) -> None:
    lost = [step for step in life.steps if step.kind != "sync"]
    assert examine(after(Life(Disk(), lost, [], Promises()), len(lost)), life.promised.with_notes(life.notes, len(life.steps))) != ""


def test_calls_that_fail_are_met(life: Life) -> None:
    failed: list[Step] = []

    def fault(step: Step) -> None:
        if step.kind == "sync directory" and not failed:
            failed.append(step)
            raise OSError(5, "Input/output error")

    again = a_life(after(life, len(life.steps)), life.promised.with_notes(life.notes, len(life.steps)), Random(2), fault)
    assert failed
    assert examine(after(again, len(again.steps)), again.promised.with_notes(again.notes, len(again.steps))) == ""


def test_a_few_states_of_several_lives() -> None:
    assert run(150, 1) == (150, [])
