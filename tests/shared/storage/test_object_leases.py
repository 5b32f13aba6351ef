"""Tests leases and marks in an object store, with a clock of their own."""

from __future__ import annotations

import errno
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from obstore.store import MemoryStore

from ckptd.shared import names
from ckptd.shared.errors import Busy, RemoteError
from ckptd.shared.storage import locks, object_leases
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_leases import SECONDS, Held, Leases
from ckptd.shared.system import machine
from tests.support.clock import Clock
from tests.support.in_turn import InTurn, interleavings

LEASES, MARKS = ".ckptd/leases/gpt/x", ".ckptd/retiring/gpt/x"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket(MemoryStore(), "memory://bucket")


def names_in(bucket: Bucket, prefix: str) -> list[str]:
    return [found.name for found in bucket.children(prefix)[1]]


def left(bucket: Bucket, prefix: str, name: str = "left") -> None:
    """Leave a lease or a mark of a process that has died."""
    bucket.put(f"{prefix}/{name}", b"host 123 1", create=False)


def excluded(leases: Leases) -> bool:
    try:
        with leases.exclude("gpt/x", "it"):
            return True
    except Busy:
        return False


def test_the_lease_of_a_dead_reader_counts_until_it_has_not_changed_for_a_while(
    bucket: Bucket,
) -> None:
    clock = Clock()
    leases = Leases(bucket, names.CONTROL, clock.monotonic)
    left(bucket, LEASES)
    assert not excluded(leases)
    clock.now += SECONDS - 1
    assert not excluded(leases)
    bucket.put(f"{LEASES}/left", b"host 123 2", create=False)  # it was alive
    assert not excluded(leases)
    clock.now += SECONDS - 1
    assert not excluded(leases)
    clock.now += 2
    assert excluded(leases)
    assert (names_in(bucket, LEASES), names_in(bucket, MARKS), leases._seen) == ([], [], {})


def test_the_mark_of_a_dead_deleter_is_waited_for_and_then_ignored(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    leases = Leases(bucket, names.CONTROL, clock.monotonic)
    left(bucket, MARKS)
    monkeypatch.setattr(locks, "SECONDS", 0.0)
    with pytest.raises(
        Busy,
        match="^it cannot be read now, because process 123 on host is deleting it, or checks "
        "whether it may be deleted; try again later",
    ):
        leases.lease("gpt/x", "it")
    assert names_in(bucket, LEASES) == []
    clock.now += SECONDS
    held = leases.lease("gpt/x", "it")
    assert held is not None
    assert (names_in(bucket, LEASES), names_in(bucket, MARKS)) == ([held.name], [])
    held.close()
    assert names_in(bucket, LEASES) == []


def test_a_deleter_that_gives_way_leaves_no_mark(bucket: Bucket) -> None:
    leases = Leases(bucket, names.CONTROL)
    held = leases.lease("gpt/x", "it")
    assert held is not None
    with (
        pytest.raises(Busy, match=rf"^it is being read, or deleted, by process {os.getpid()} on "),
        leases.exclude("gpt/x", "it"),
    ):
        pass
    assert names_in(bucket, MARKS) == []
    held.close()
    left(bucket, MARKS)
    assert not excluded(leases)
    assert names_in(bucket, MARKS) == [f"{MARKS}/left"]


def test_a_reader_and_a_deleter_that_meet_never_both_go_on(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees the other at the last moment: after it has put its own object, and
    before it has looked.
    """
    monkeypatch.setattr(locks, "SECONDS", 0.0)
    leases, other, put = Leases(bucket, names.CONTROL), Leases(bucket, names.CONTROL), Held.put
    found = []

    def put_and_meet(self: Held) -> None:
        put(self)
        with mock.patch.object(Held, "put", put):
            found.append(excluded(other))

    with mock.patch.object(Held, "put", put_and_meet):
        held = leases.lease("gpt/x", "it")
    assert held is not None
    assert found == [False]
    held.close()

    def put_and_read(self: Held) -> None:
        put(self)
        with mock.patch.object(Held, "put", put), pytest.raises(Busy):
            other.lease("gpt/x", "it")

    with mock.patch.object(Held, "put", put_and_read):
        assert excluded(leases)


def test_a_held_lease_is_renewed_until_it_is_closed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_leases, "RENEWAL_SECONDS", 0.01)
    leases = Leases(bucket, names.CONTROL)
    held = leases.lease("gpt/x", "it")
    assert held is not None
    # Returns once the lease has been renewed.
    assert leases.holders("gpt/x") == f"process {os.getpid()} on {machine.host()}"
    held.close()
    assert (leases.holders("gpt/x"), names_in(bucket, LEASES)) == ("", [])


def test_a_renewal_that_fails_is_tried_again(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_leases, "RENEWAL_SECONDS", 0.01)
    leases, put, failures = Leases(bucket, names.CONTROL), Held.put, iter([False, True, True])

    def sometimes(self: Held) -> None:
        if next(failures, False):
            raise OSError("no answer")
        put(self)

    monkeypatch.setattr(Held, "put", sometimes)
    held = leases.lease("gpt/x", "it")
    assert held is not None
    assert leases.holders("gpt/x")
    held.close()


def test_a_reader_that_may_not_write_has_no_lease(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bucket, "put", mock.Mock(side_effect=PermissionError))
    assert Leases(bucket, names.CONTROL).lease("gpt/x", "it") is None


@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00", b"host", b"../x 1 2", b"host 12x 1", b"x" * 1000]
)
def test_what_another_process_has_written_is_not_trusted(bucket: Bucket, content: bytes) -> None:
    bucket.put(f"{LEASES}/left", content, create=False)
    leases = Leases(bucket, names.CONTROL)
    with (
        pytest.raises(Busy, match="^it is being read, or deleted, by another process$"),
        leases.exclude("gpt/x", "it"),
    ):
        pass


def test_a_forked_child_does_not_end_the_lease_of_its_parent(
    bucket: Bucket, tmp_path: Path
) -> None:
    held = Leases(bucket, names.CONTROL).lease("gpt/x", "it")
    assert held is not None
    with mock.patch("os.getpid", return_value=held._pid + 1):
        held.close()
    assert names_in(bucket, LEASES) == [held.name]
    held.close()
    assert names_in(bucket, LEASES) == []


def test_in_every_interleaving_no_deleter_takes_what_a_reader_has_leased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader puts its lease, looks for marks and looks at the object; the deleter
    puts its mark, looks twice, and deletes.
    """
    monkeypatch.setattr(locks, "SECONDS", 0.0)
    ends, schedules = Counter[tuple[bool, bool]](), interleavings(3, 5)
    assert len(schedules) == 56
    with ThreadPoolExecutor(2) as pool:
        for schedule in schedules:
            bucket = InTurn(schedule)
            Bucket.put(bucket, "gpt/x", b"data", create=False)

            def read(bucket: InTurn = bucket) -> Held | None:
                bucket.caller.number = 0
                try:
                    held = Leases(bucket, names.CONTROL).lease("gpt/x", "it")
                    assert held is not None
                    bucket.head("gpt/x")
                except (Busy, FileNotFoundError):
                    return None
                finally:
                    bucket.leave()
                return held

            def delete(bucket: InTurn = bucket) -> bool:
                bucket.caller.number = 1
                try:
                    with Leases(bucket, names.CONTROL).exclude("gpt/x", "it"):
                        bucket.delete(["gpt/x"])
                except Busy:
                    return False
                finally:
                    bucket.leave()
                return True

            reading, deleting = pool.submit(read), pool.submit(delete)
            held = reading.result()
            ends[held is not None, deleting.result()] += 1
            if held is not None:
                held.close()
    assert set(ends) == {(True, False), (False, True), (False, False)}


def test_a_full_store_can_be_read_and_deleted_from(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("gpt/x", b"data", create=False)
    monkeypatch.setattr(
        Bucket, "put", mock.Mock(side_effect=RemoteError(errno.ENOSPC, "the store answered 507"))
    )
    leases = Leases(bucket, names.CONTROL)
    assert leases.lease("gpt/x", "it") is None
    with leases.exclude("gpt/x", "it"):
        bucket.delete(["gpt/x"])
    monkeypatch.setattr(
        Bucket, "put", mock.Mock(side_effect=RemoteError(errno.EIO, "the store answered 500"))
    )
    with pytest.raises(RemoteError):
        leases.lease("gpt/x", "it")
    with pytest.raises(RemoteError), leases.exclude("gpt/x", "it"):
        pass
