"""Tests how events become the life of a snapshot."""

from __future__ import annotations

from ckptd.daemon.page.timeline import snapshots
from ckptd.daemon.telemetry.background import LoggedEvent


def event(time: float, name: str, tag: str = "a", **facts: str | float) -> LoggedEvent:
    return LoggedEvent(time, name, 20, "", {"job": "gpt", "tag": tag, **facts})


def test_a_snapshot_is_sealed_durable_and_deleted() -> None:
    (one,) = snapshots([
        event(100.0, "save.done", step=5, bytes=9, held_seconds=0.5, durable_seconds=4.0),
        event(200.0, "checkpoint.deleted", step=5, bytes=9),
    ])  # fmt: skip
    assert one == {
        "job": "gpt", "tag": "a", "step": 5, "bytes": 9, "held_seconds": 0.5,
        "durable_seconds": 4.0, "sealed": 96.0, "durable": 100.0, "deleted": 200.0,
    }  # fmt: skip


def test_one_that_failed_may_become_durable_later() -> None:
    found = snapshots([
        event(1.0, "save.failed", reason="no room"), event(2.0, "save.failed", "b", reason="x"),
        event(3.0, "save.done"),
    ])  # fmt: skip
    assert [(one.get("failed"), one.get("durable")) for one in found] == [(1.0, 3.0), (2.0, None)]
    assert found[1]["reason"] == "x"


def test_a_tag_that_was_deleted_may_come_again() -> None:
    found = snapshots([
        event(1.0, "save.done"), event(2.0, "checkpoint.deleted"), event(3.0, "save.done"),
        event(4.0, "checkpoint.deleted"),
    ])  # fmt: skip
    assert [(one["durable"], one["deleted"]) for one in found] == [(1.0, 2.0), (3.0, 4.0)]


def test_what_began_before_the_history_and_other_events() -> None:
    events = [event(1.0, "checkpoint.deleted"), event(2.0, "upload.done"),
              LoggedEvent(3.0, "save.failed", 40, "", {"job": "gpt"})]  # fmt: skip
    assert snapshots(events) == [{"job": "gpt", "tag": "a", "deleted": 1.0}]
