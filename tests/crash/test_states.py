"""Tests moments that the rig would rarely hit, and that the rig reports a broken
promise.
"""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.crash.disk import LOST, Disk, Recorder, Step
from tests.crash.states import (
    Examiner,
    Life,
    Promises,
    a_life,
    after,
    config,
    directory,
    run,
    simulated,
)
from tests.support.daemons import recover_only


@pytest.fixture(scope="module")
def life() -> Life:
    return a_life(Disk(), Promises(), Random(1))


def examine(disk: Disk, promised: Promises) -> str:
    """Examine the state after a power cut that loses everything that is not synced."""
    with simulated():
        return asyncio.run(Examiner().examine(disk.after_cut(lambda _: (LOST, 0)), promised))


def recovered(disk: Disk) -> None:
    """Recover with a daemon that is then killed, and apply its operations to the disk."""
    with directory() as place, directory() as shm, simulated():
        recorder = Recorder(place, disk)
        asyncio.run(recover_only(config(place, shm), recorder))
    for step in recorder.steps:
        disk.do(step)


def before(life: Life, kind: str, name: str, number: int = -1) -> int:
    """Return the number of operations before that one."""
    found = [
        at
        for at, step in enumerate(life.steps)
        if step.kind == kind and name in (step.name, step.other)
    ]
    return found[number]


def test_a_recovery_makes_a_manifest_renamed_by_a_dead_daemon_durable(life: Life) -> None:
    moment = before(life, "rename", "manifest.json") + 1
    *_, (_, (_, key)) = life.notes  # the last promise
    disk = after(life, moment)
    recovered(disk)
    assert examine(disk, Promises({key[:2]: None})) == ""


def test_every_acknowledged_checkpoint_is_durable(life: Life) -> None:
    assert [what for _, (what, _) in life.notes] == ["attempt", *["durable"] * 6]
    for moment, _ in life.notes:
        assert examine(after(life, moment), life.promised.with_notes(life.notes, moment)) == ""


def test_an_attempt_that_is_given_out_twice_is_reported(life: Life) -> None:
    assert "attempt 9 was given out and is not known any more" in examine(
        after(life, len(life.steps)), Promises(attempt=9)
    )


def test_a_sync_that_does_nothing_is_reported(life: Life) -> None:
    lost = [step for step in life.steps if step.kind != "sync"]
    assert (
        examine(
            after(Life(Disk(), lost, [], Promises()), len(lost)),
            life.promised.with_notes(life.notes, len(life.steps)),
        )
        != ""
    )


def test_a_failed_sync_of_a_directory_breaks_no_promise(life: Life) -> None:
    failed: list[Step] = []

    def fault(step: Step) -> None:
        if step.kind == "sync directory" and not failed:
            failed.append(step)
            raise OSError(5, "Input/output error")

    again = a_life(
        after(life, len(life.steps)),
        life.promised.with_notes(life.notes, len(life.steps)),
        Random(2),
        fault,
    )
    assert failed
    assert (
        examine(
            after(again, len(again.steps)), again.promised.with_notes(again.notes, len(again.steps))
        )
        == ""
    )


def test_a_sample_of_states_breaks_no_promise() -> None:
    count, problems, chains = run(150, 1)
    assert (count, problems) == (150, [])
    assert chains > 0
