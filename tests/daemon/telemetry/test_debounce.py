"""Tests which events are reported, with a clock that the tests set."""

from __future__ import annotations

from ckptd.daemon.telemetry import debounce as module
from ckptd.daemon.telemetry.background import LoggedEvent
from ckptd.daemon.telemetry.debounce import Debounce, EventReport


def event(number: int, job: str = "gpt", name: str = "save.failed") -> LoggedEvent:
    return LoggedEvent(1e9, name, 40, str(number), {"job": job})


def reported(debounce: Debounce, *times: float) -> list[tuple[float, str, int]]:
    """Let an event happen at each of these times, and ask in between whenever a report is
    due. Return time, number and count of each report.
    """
    found: list[tuple[float, str, int]] = []

    def add(now: float, *reports: EventReport | None) -> None:
        found.extend((now, one[0].text, one[1]) for one in reports if one is not None)

    now = 0.0
    for number, time in enumerate((*times, float("inf"))):
        while (pause := debounce.pause(now)) is not None and now + pause <= time:
            now += pause
            add(now, *debounce.due(now))
        if time < float("inf"):
            now = time
            add(now, debounce.now_or_later(event(number), now))
    return found


def test_the_first_event_is_reported_at_once_and_the_last_one_later() -> None:
    assert reported(Debounce(60.0), 0.0) == [(0.0, "0", 0)]
    assert reported(Debounce(60.0), 0.0, 1.0, 2.0, 59.9) == [(0.0, "0", 0), (60.0, "3", 2)]
    assert reported(Debounce(60.0), 0.0, 1.0, 61.0, 200.0) == [
        (0.0, "0", 0), (60.0, "1", 0), (120.0, "2", 0), (200.0, "3", 0),
    ]  # fmt: skip


def test_a_storm_is_one_report_in_each_quiet_time_and_its_last_event_is_told() -> None:
    found = reported(Debounce(60.0), *(number * 0.01 for number in range(60_000)))
    assert [time for time, _, _ in found] == [60.0 * number for number in range(11)]
    assert found[-1][1] == "59999"
    assert sum(count for _, _, count in found) + len(found) == 60_000


def test_a_report_that_is_late_goes_with_the_next_event() -> None:
    debounce = Debounce(60.0)
    assert debounce.now_or_later(event(0), 0.0) == (event(0), 0)
    assert debounce.now_or_later(event(1), 1.0) is None
    assert debounce.now_or_later(event(2), 95.0) == (event(2), 1)  # a command took so long
    assert (debounce.due(500.0), debounce.pause(500.0)) == ([], None)


def test_events_and_jobs_are_told_apart() -> None:
    debounce = Debounce(60.0)
    events = [event(0), event(1, job="bert"), event(2, name="room.little"), event(3)]
    assert [debounce.now_or_later(one, 5.0) for one in events] == [
        *((one, 0) for one in events[:3]), None,
    ]  # fmt: skip
    assert debounce.pause(25.0) == 40.0
    assert debounce.due(64.9) == []
    assert debounce.due(65.0) == [(events[3], 0)]


def test_the_pause_ends_with_the_first_report_that_is_due() -> None:
    debounce = Debounce(60.0)
    for time, job in ((0.0, "gpt"), (1.0, "gpt"), (30.0, "bert"), (31.0, "bert")):
        debounce.now_or_later(event(0, job), time)
    assert debounce.pause(40.0) == 20.0


def test_at_the_end_all_that_was_left_out_is_reported() -> None:
    debounce = Debounce(60.0)
    for number in range(4):
        debounce.now_or_later(event(number, job=f"job{number % 2}"), float(number))
    assert [(one.text, count) for one, count in debounce.rest()] == [("2", 0), ("3", 0)]
    assert debounce.rest() == []


def test_at_the_end_the_newest_events_are_reported_first() -> None:
    debounce = Debounce(60.0)
    for number, job in enumerate(("a", "b", "c", "a", "c", "b")):
        happened = LoggedEvent(float(number), "save.failed", 40, str(number), {"job": job})
        debounce.now_or_later(happened, float(number))
    assert [one.text for one, _ in debounce.rest()] == ["5", "4", "3"]


def test_a_storm_over_many_jobs_is_bounded_too() -> None:
    debounce, most = Debounce(60.0), module.MAX_KINDS
    for number in range(3 * most):
        assert (debounce.now_or_later(event(number, job=f"job{number}"), 1.0) is None) == (
            number > most
        )
    ((last, count),) = debounce.due(61.0)
    assert (last.text, count) == (str(3 * most - 1), 2 * most - 2)
    assert debounce.now_or_later(event(0, job="new"), 200.0) == (event(0, job="new"), 0)
    assert len(debounce._kinds) == 1
