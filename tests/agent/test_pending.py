"""The progress of one snapshot, as threads that wait for it see it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ckptd.agent.pending import Pending
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared.errors import Busy, CkptdError, SnapshotFailed, StorageError
from ckptd.shared.wire.lifecycle import Event, IllegalStep

TO_DURABLE = (Event.GRANT, Event.STAGE, Event.SEAL, Event.COMMIT)


def moved(*events: Event, persist: bool = True) -> Pending:
    pending = Pending(5, 2, persist=persist)
    for event in events:
        pending.move(event)
    return pending


def waits(pending: Pending, state: str) -> str:
    """What a wait of no time comes to."""
    try:
        return pending.wait(state, timeout=0.0).state
    except TimeoutError as error:
        return str(error)
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("events", "state", "granted", "reached"),
    [
        (0, "staged", False, 0),
        (1, "staged", True, 1),
        (2, "staged", True, 1),
        (3, "sealed", True, 2),
        (4, "durable", True, 3),
    ],
)
def test_a_wait_ends_at_its_state_or_a_later_one(
    events: int, state: str, granted: bool, reached: int
) -> None:
    pending = moved(*TO_DURABLE[:events])
    assert (pending.state, pending.done, pending.granted) == (state, state == "durable", granted)
    for number, wanted in enumerate(("staged", "sealed", "durable")):
        late = f"step 5 is {state}, not {wanted}, after 0.0 s"
        assert waits(pending, wanted) == (state if number < reached else late)


def test_waiting_threads_wake_at_each_move() -> None:
    pending, woken = Pending(5), list[str]()
    threads = [
        threading.Thread(target=lambda s=state: woken.append(pending.wait(s, 60).state))
        for state in ("durable", "staged")
    ]
    for thread in threads:
        thread.start()
    for event in TO_DURABLE:
        pending.move(event)
    for thread in threads:
        thread.join(60)
    assert (len(woken), woken.count("durable") >= 1) == (2, True)


SUPERSEDED = "a newer snapshot has replaced it there"


def end(how: str, pending: Pending) -> None:
    {
        "fail": lambda: pending.fail(StorageError("disk full")),
        "skip": lambda: pending.skip("every slot is still being saved"),
        "supersede": pending.supersede,
    }[how]()


@pytest.mark.parametrize(
    ("how", "before", "state", "error"),
    [
        ("fail", TO_DURABLE[:3], "failed", "StorageError: disk full"),
        (
            "skip",
            (),
            "skipped",
            "SnapshotFailed: step 5 was skipped: every slot is still being saved",
        ),
        (
            "supersede",
            TO_DURABLE[:3],
            "sealed",
            "SnapshotFailed: step 5 was kept in memory only, and a newer snapshot has replaced it "
            "there",
        ),
    ],
)
def test_a_wait_raises_the_reason_once_its_state_cannot_come(
    how: str, before: tuple[Event, ...], state: str, error: str
) -> None:
    pending = moved(*before, persist=how != "supersede")
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(waits_long(pending)))
    thread.start()
    end(how, pending)
    thread.join(60)
    assert (found, pending.state, waits(pending, "durable")) == ([error], state, error)
    assert error.endswith(str(pending.error))
    assert repr(pending) == f"<Pending step 5 of attempt 2 {state}: {pending.error}>"


def waits_long(pending: Pending) -> str:
    try:
        return pending.wait("durable", 60).state
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"


def test_a_snapshot_that_was_sealed_and_failed_later_has_been_sealed() -> None:
    pending = moved(*TO_DURABLE[:3])
    pending.fail(StorageError("disk full"))
    assert (waits(pending, "sealed"), waits(pending, "staged")) == (
        "failed",
        "StorageError: disk full",
    )


def test_the_first_error_counts_and_none_comes_after_the_end() -> None:
    pending = moved(Event.GRANT)
    for number in range(3):
        pending.fail(StorageError(str(number)))
    assert str(pending.error) == "0"
    durable = moved(*TO_DURABLE)
    durable.fail(StorageError("late"))
    durable.supersede()
    assert (durable.state, durable.error) == ("durable", None)


@pytest.mark.parametrize("event", TO_DURABLE)
def test_a_failed_snapshot_refuses_every_move_with_its_reason(event: Event) -> None:
    pending = moved(Event.GRANT)
    pending.fail(StorageError("another rank could not take the step"))
    with pytest.raises(StorageError, match="^another rank could not take the step$"):
        pending.move(event)
    with pytest.raises(IllegalStep):
        moved().move(Event.COMMIT)


@pytest.mark.parametrize("events", range(4))
def test_a_seal_makes_up_for_the_moves_that_ctrl_c_left_out(events: int) -> None:
    pending = moved(*TO_DURABLE[:events])
    pending.seal()
    pending.seal()
    assert pending.state == "sealed"


def test_why_has_a_reason_in_any_case() -> None:
    assert str(moved().why) == "step 5 is staged"
    pending = moved()
    pending.fail(StorageError("x"))
    assert pending.why is pending.error


def test_an_unknown_state_is_refused() -> None:
    for state in ("failed", "skipped", "done", ""):
        with pytest.raises(
            ValueError,
            match=f"^state is '{state}'; expected 'staged', 'sealed', 'durable' or 'uploaded'$",
        ):
            moved(*TO_DURABLE).wait(state)


def inside(lock: CallLock, what: Callable[[], object]) -> None:
    with lock("snapshot"):
        what()


def test_a_wait_inside_a_call_of_the_same_thread_is_refused_unless_it_is_over() -> None:
    """The call that moves the snapshot is the one that is interrupted."""
    lock = CallLock()
    with pytest.raises(
        Busy, match=r"^wait\(\) was called while snapshot\(\) of the same thread is still running"
    ):
        inside(lock, lambda: moved(Event.GRANT).wait("sealed", 60))
    inside(lock, lambda: moved(Event.GRANT).wait("staged"))
    failed = moved(Event.GRANT)
    failed.fail(SnapshotFailed("x"))
    with pytest.raises(SnapshotFailed, match="^x$"):
        inside(lock, lambda: failed.wait("durable"))


def test_a_refusal_that_comes_after_a_failure_changes_nothing() -> None:
    """Another rank cannot take the step, and the daemon says so before it refuses the
    slot.
    """
    noted: list[Pending] = []
    pending = Pending(5, note=noted.append)
    pending.fail(StorageError("rank 1 failed"))
    pending.skip("every slot is still being saved")
    assert (pending.state, str(pending.error), noted) == ("failed", "rank 1 failed", [pending])


def test_a_snapshot_that_gets_no_larger_slot_has_failed() -> None:
    """The snapshot was granted a smaller slot before, so it was not skipped."""
    pending = moved(Event.GRANT)
    pending.skip("every slot is still being saved")
    assert (pending.state, str(pending.error)) == (
        "failed",
        "step 5 failed: every slot is still being saved",
    )
