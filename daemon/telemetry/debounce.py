"""Decides which events are reported and which are left out, so that a storm of events
makes few reports, and the last event of each kind is told. A daemon that ends has little
time for the reports that are left.

The caller passes the time, in seconds of the monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.daemon.telemetry.background import LoggedEvent

QUIET_SECONDS = 60.0
"""The least seconds between two reports of one event of one job."""
MAX_KINDS = 1_000
"""The most pairs of event and job that are told apart within a quiet time. All others
share one.
"""

EventReport = tuple[LoggedEvent, int]
"""An event that is reported, and how many of its kind were left out before it."""


@dataclass(slots=True)
class _Kind:
    """The events of one kind since its last report.

    `held` is the last of the `left_out` events, or None if there are none.
    """

    reported: float
    held: LoggedEvent | None = None
    left_out: int = 0


class Debounce:
    """A record of the last reports, by event and job.

    The first event of a kind is reported at once. The next ones are left out for the
    quiet time. Then the last of them is reported, and another quiet time begins.
    """

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet = quiet_seconds
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def now_or_later(self, event: LoggedEvent, now: float) -> EventReport | None:
        """Return the report of an event that has just happened, or None if it is left
        out and may be reported later.
        """
        key = (event.name, event.job)
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
            self._forget(now)
            if len(self._kinds) >= MAX_KINDS:
                key = ("", "")
        kind = self._kinds.get(key)
        if kind is not None and now < kind.reported + self._quiet:
            kind.held, kind.left_out = event, kind.left_out + 1
            return None
        left_out = 0 if kind is None else kind.left_out
        self._kinds[key] = _Kind(now)
        return event, left_out

    def due(self, now: float) -> list[EventReport]:
        """Return the reports of the events that were left out and whose quiet time is
        over.
        """
        return [
            self._report(kind, now)
            for kind in self._kinds.values()
            if kind.held is not None and now >= kind.reported + self._quiet
        ]

    def rest(self) -> list[EventReport]:
        """Return the reports of all events that were left out, because no more time
        will pass. The newest events come first: the caller may not get to the others.
        """
        left = [
            self._report(kind, kind.reported) for kind in list(self._kinds.values()) if kind.held
        ]
        return sorted(left, key=lambda report: report[0].time, reverse=True)

    def pause(self, now: float) -> float | None:
        """Return the seconds until a report is due, or None if nothing is left out."""
        times = [kind.reported for kind in self._kinds.values() if kind.held is not None]
        return max(0.0, min(times) + self._quiet - now) if times else None

    def _report(self, kind: _Kind, now: float) -> EventReport:
        assert kind.held is not None
        report = kind.held, kind.left_out - 1
        kind.reported = now
        kind.held, kind.left_out = None, 0
        return report

    def _forget(self, now: float) -> None:
        """Forget the kinds with nothing held whose quiet time is over."""
        self._kinds = {
            key: kind
            for key, kind in self._kinds.items()
            if kind.held is not None or now < kind.reported + self._quiet
        }
