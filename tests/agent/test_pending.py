"""The progress of one snapshot, as threads that wait for it see it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from ckptd.agent.pending import Goal, Pending, PendingSnapshot
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared.errors import Busy, CkptdError, SnapshotFailed, StorageError
from ckptd.shared.wire.lifecycle import Event, IllegalStep
from tests.support.cases import each_case

TO_DURABLE = (Event.GRANT, Event.STAGE, Event.SEAL, Event.COMMIT)


def moved(*events: Event, persist: bool = True) -> PendingSnapshot:
    pending = PendingSnapshot(5, 2, persist=persist)
    for event in events:
        pending.move(event)
    return pending


def waits(snapshot: PendingSnapshot, state: Goal) -> str:
    """What a wait of no time comes to."""
    try:
        return Pending(snapshot).wait(state, timeout=0.0).state
    except TimeoutError as error:
        return str(error)
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"


@each_case(
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
    milestones: tuple[Goal, ...] = ("staged", "sealed", "durable")
    for number, wanted in enumerate(milestones):
        late = f"step 5 is {state}, not {wanted}, after 0.0 s"
        assert waits(pending, wanted) == (state if number < reached else late)


def test_waiting_threads_wake_at_each_move() -> None:
    pending, woken = PendingSnapshot(5), list[str]()
    milestones: tuple[Goal, ...] = ("durable", "staged")
    threads = [
        threading.Thread(target=lambda s=state: woken.append(Pending(pending).wait(s, 60).state))
        for state in milestones
    ]
    for thread in threads:
        thread.start()
    for event in TO_DURABLE:
        pending.move(event)
    for thread in threads:
        thread.join(60)
    assert (len(woken), woken.count("durable") >= 1) == (2, True)


def uploading(*results: CkptdError | None) -> PendingSnapshot:
    pending = PendingSnapshot(5, 2)
    pending.expect_upload()
    for event in TO_DURABLE:
        pending.move(event)
    for result in results:
        pending.upload(result)
    return pending


def superseded() -> PendingSnapshot:
    pending = moved(*TO_DURABLE[:3], persist=False)
    pending.supersede()
    return pending


@each_case(
    ("made", "said"),
    [
        (moved, "staged (being copied into memory)"),
        (lambda: moved(*TO_DURABLE[:2]), "staged (being copied into memory)"),
        (lambda: moved(*TO_DURABLE[:3]), "sealed (in memory, being saved)"),
        (
            lambda: moved(*TO_DURABLE[:3], persist=False),
            "sealed (in memory only, until this process or the daemon ends)",
        ),
        (
            superseded,
            "sealed: step 5 was kept in memory only, and a newer snapshot has replaced it there",
        ),
        (lambda: moved(*TO_DURABLE), "durable (on storage)"),
        (uploading, "durable (on the local disk, being uploaded)"),
        (lambda: uploading(StorageError("it is gone")), "durable (on the local disk)"),
        (lambda: uploading(None), "uploaded (in the root)"),
    ],
)
def test_its_text_says_what_its_state_means(made: Callable[[], PendingSnapshot], said: str) -> None:
    assert repr(Pending(made())) == f"<Pending step 5 of attempt 2: {said}>"


SUPERSEDED = "a newer snapshot has replaced it there"


def end(how: str, pending: PendingSnapshot) -> None:
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
    assert repr(Pending(pending)) == f"<Pending step 5 of attempt 2: {state}: {pending.error}>"


def waits_long(snapshot: PendingSnapshot) -> str:
    try:
        return Pending(snapshot).wait("durable", 60).state
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
    states: tuple[Any, ...] = ("failed", "skipped", "done", "")
    pending = Pending(moved(*TO_DURABLE))
    for state in states:
        refused = (
            f"^state is '{state}'; expected 'staged', 'sealed', 'durable', 'uploaded' or "
            f"'replicated'$"
        )
        with pytest.raises(ValueError, match=refused):
            pending.wait(state)
        with pytest.raises(ValueError, match=refused):
            pending.future(state)


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
    noted: list[PendingSnapshot] = []
    pending = PendingSnapshot(5, note=noted.append)
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


# -- the face


def test_a_pending_shows_its_snapshot() -> None:
    snapshot = moved(Event.GRANT)
    pending = Pending(snapshot)
    snapshot.stall, snapshot.lost_seconds = 0.25, 1.5
    snapshot.nbytes = 4096
    snapshot.segment, snapshot.unsaved = "a.seg", {"x": "a lock"}
    assert (pending.step, pending.attempt, pending.persist) == (5, 2, True)
    assert (pending.stall, pending.lost_seconds, pending.nbytes) == (0.25, 1.5, 4096)
    assert (pending.segment, pending.unsaved) == ("a.seg", {"x": "a lock"})
    assert (pending.state, pending.done, pending.error) == ("staged", False, None)
    snapshot.fail(StorageError("disk full"))
    assert (pending.state, pending.done, pending.error) == ("failed", True, snapshot.error)


def test_a_user_sees_nothing_but_the_documented_members() -> None:
    assert {name for name in dir(Pending) if not name.startswith("_")} == {
        "step", "attempt", "persist", "stall", "lost_seconds", "durable_seconds", "nbytes",
        "error", "segment", "unsaved", "state", "done", "replicated", "wait", "future",
    }  # fmt: skip


def test_the_time_until_durable_is_measured_from_the_call() -> None:
    snapshot = moved(*TO_DURABLE[:-1])
    snapshot.begun = time.perf_counter() - 7.0
    assert Pending(snapshot).durable_seconds is None
    snapshot.move(TO_DURABLE[-1])
    assert Pending(snapshot).durable_seconds == pytest.approx(7.0, abs=1.0)
    assert Pending(moved(*TO_DURABLE)).durable_seconds is None, "dcp.save has no call to count from"


def test_two_of_one_snapshot_are_equal() -> None:
    snapshot = moved()
    assert Pending(snapshot) == Pending(snapshot) != Pending(moved())
    assert len({Pending(snapshot), Pending(snapshot)}) == 1


@pytest.mark.parametrize("until", ["sealed", "durable"])
def test_a_future_completes_when_its_state_is_reached(until: Goal) -> None:
    snapshot = moved()
    pending = Pending(snapshot)
    future = pending.future(until)
    needed = TO_DURABLE.index(Event.SEAL if until == "sealed" else Event.COMMIT)
    for event in TO_DURABLE[:needed]:
        snapshot.move(event)
    assert not future.done()
    snapshot.move(TO_DURABLE[needed])
    assert future.result(60) == pending
    assert pending.wait(until) is pending
    at_once = pending.future(until)
    assert at_once.done()
    assert at_once.result() == pending


@pytest.mark.parametrize(
    ("how", "until"),
    [("fail", "durable"), ("fail", "uploaded"), ("skip", "staged"), ("supersede", "durable")],
)
def test_a_future_fails_with_the_error_of_wait(how: str, until: Goal) -> None:
    snapshot = moved(*(() if how == "skip" else TO_DURABLE[:3]), persist=how != "supersede")
    future = Pending(snapshot).future(until)
    end(how, snapshot)
    with pytest.raises(CkptdError) as waited:
        Pending(snapshot).wait(until, 60)
    assert future.exception(60) is waited.value
    assert Pending(snapshot).future(until).exception(0) is waited.value


def test_a_future_waits_for_the_upload_although_nothing_else_holds_the_snapshot() -> None:
    """The agent holds a snapshot whose upload it follows by a weak reference."""
    snapshot = moved(*TO_DURABLE[:3])
    snapshot.expect_upload()
    snapshot.move(Event.COMMIT)
    future, held = Pending(snapshot).future("uploaded"), weakref.ref(snapshot)
    del snapshot
    gc.collect()
    found = held()
    assert found is not None
    assert not future.done()
    found.upload()
    assert future.result(60).state == "uploaded"


def test_a_cancelled_future_is_forgotten() -> None:
    snapshot = moved(*TO_DURABLE[:3])
    cancelled, other = Pending(snapshot).future(), Pending(snapshot).future()
    assert cancelled.cancel()
    snapshot.move(Event.COMMIT)
    assert other.result(60).state == "durable"
    assert cancelled.cancelled()
    assert not other.cancel()


def test_a_function_of_a_future_may_wait_for_the_thread_that_moves_the_snapshot() -> None:
    snapshot, found = moved(*TO_DURABLE[:2]), list[str]()
    sealed, called = Pending(snapshot).future("sealed"), threading.Event()

    def wait(future: object) -> None:
        found.append(Pending(snapshot).wait("durable", 60).state)
        called.set()

    sealed.add_done_callback(wait)
    snapshot.move(Event.SEAL)
    snapshot.move(Event.COMMIT)
    assert called.wait(60)
    assert found == ["durable"]


async def test_a_coroutine_can_wait() -> None:
    snapshot = moved(*TO_DURABLE[:3])
    waiting = asyncio.wrap_future(Pending(snapshot).future())
    threading.Timer(0.05, snapshot.move, [Event.COMMIT]).start()
    assert (await asyncio.wait_for(waiting, 60)).state == "durable"
    lost = moved(*TO_DURABLE[:3])
    threading.Timer(0.05, lost.fail, [StorageError("disk full")]).start()
    with pytest.raises(StorageError, match="^disk full$"):
        await asyncio.wait_for(asyncio.wrap_future(Pending(lost).future()), 60)


# -- copies in the memory of other nodes

OFF = (
    "SnapshotFailed: the snapshot is not copied to other nodes: set replicas = 1 for the daemons "
    "of all nodes"
)


def to_be_copied(*events: Event, persist: bool = True) -> PendingSnapshot:
    pending = moved(*events, persist=persist)
    pending.expect_copy(None)
    return pending


@each_case("events", range(5))
def test_a_snapshot_that_is_not_copied_says_so_at_once(events: int) -> None:
    assert waits(moved(*TO_DURABLE[:events]), "replicated") == OFF


@pytest.mark.parametrize(("events", "state"), [(3, "sealed"), (4, "durable")])
def test_a_wait_for_the_copies_ends_with_them_and_not_with_the_save(
    events: int, state: str
) -> None:
    pending = to_be_copied(*TO_DURABLE[:events])
    late = f"step 5 is {state}, not replicated, after 0.0 s"
    assert (waits(pending, "replicated"), Pending(pending).replicated) == (late, False)
    future = Pending(pending).future("replicated")
    assert not future.done()
    pending.replicate(None)
    assert (waits(pending, "replicated"), Pending(pending).replicated) == (state, True)
    assert future.result(60) == Pending(pending)
    assert pending.state == state


def test_copies_come_before_the_save_and_are_not_the_save() -> None:
    pending = to_be_copied(*TO_DURABLE[:3])
    pending.replicate(None)
    assert waits(pending, "durable") == "step 5 is sealed, not durable, after 0.0 s"


def test_a_snapshot_that_is_replaced_in_memory_may_still_be_copied() -> None:
    """Check that it is still waited for: its slot is kept while it is copied."""
    pending = to_be_copied(*TO_DURABLE[:3], persist=False)
    pending.supersede()
    assert waits(pending, "replicated") == "step 5 is sealed, not replicated, after 0.0 s"
    pending.replicate(None)
    assert waits(pending, "replicated") == "sealed"


@pytest.mark.parametrize("how", ["fail", "skip"])
def test_a_snapshot_that_fails_is_not_copied(how: str) -> None:
    pending = to_be_copied(*(() if how == "skip" else TO_DURABLE[:2]))
    end(how, pending)
    assert waits(pending, "replicated") == f"{type(pending.error).__name__}: {pending.error}"
    assert Pending(pending).future("replicated").exception(60) is pending.error
    never = moved()
    end(how, never)
    assert waits(never, "replicated") == f"{type(never.error).__name__}: {never.error}"


def test_the_first_word_about_the_copies_counts() -> None:
    lost = to_be_copied(*TO_DURABLE[:3])
    future = Pending(lost).future("replicated")
    lost.replicate(SnapshotFailed("the network is cut"))
    lost.replicate(None)
    assert (waits(lost, "replicated"), lost.replicated) == (
        "SnapshotFailed: the network is cut",
        False,
    )
    assert str(future.exception(60)) == "the network is cut"
    copied = to_be_copied(*TO_DURABLE[:3])
    copied.replicate(None)
    copied.replicate(SnapshotFailed("late"))
    assert (waits(copied, "replicated"), copied.replicated) == ("sealed", True)
    off = moved(*TO_DURABLE[:3])
    off.replicate(None)
    assert (waits(off, "replicated"), off.replicated) == (OFF, False)


def test_a_thread_that_waits_for_the_copies_wakes() -> None:
    pending, found = to_be_copied(*TO_DURABLE[:3]), list[str]()
    thread = threading.Thread(
        target=lambda: found.append(Pending(pending).wait("replicated", 60).state)
    )
    thread.start()
    pending.replicate(None)
    thread.join(60)
    assert found == ["sealed"]
