"""Decides whether another run of a job is alive, from what was seen of its heartbeats
in storage (FORMAT.md, section 6).

Pure functions on plain values. Time is the monotonic clock of this daemon only: a
heartbeat is alive if it has changed while this daemon watched it, whatever its writer's
clock says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.shared.formats.heartbeat import Heartbeat

DEAD_SECONDS = 9.0
"""A heartbeat that has not changed for so long is dead. Two renewals fit into this
time, so that one of them may fail or come late.
"""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """The run that wants to begin, and what its node knows.

    run: the id of its launch, or "". host, boot: its node. known: the newest attempt of
    the job that this node has taken part in, or 0. led: True if this node had rank 0 of
    that attempt.
    """

    run: str
    host: str
    boot: str
    known: int = 0
    led: bool = True

    def succeeds(self, attempt: int, heartbeat: Heartbeat | None) -> bool:
        """Return True if the newcomer need not wait for the end of this attempt,
        because it is its own, or older than its own.
        """
        if attempt < self.known or (attempt == self.known and self.led):
            return True
        return heartbeat is not None and (
            (heartbeat.host, heartbeat.boot) == (self.host, self.boot)
            or heartbeat.run == self.run != ""
        )


@dataclass(slots=True)
class Sighting:
    """The latest contents of one heartbeat, and when they were first seen.

    `changed`: True if the heartbeat had other contents before.
    """

    data: bytes
    heartbeat: Heartbeat | None
    first_seen: float
    changed: bool = False

    def is_dead(self, now: float) -> bool:
        return now - self.first_seen >= DEAD_SECONDS


@dataclass(frozen=True, slots=True)
class WatchOn:
    """The verdict that it is not decided yet, so that another look is needed."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """This attempt is alive. `heartbeat`: None if the heartbeat cannot be decoded."""

    attempt: int
    heartbeat: Heartbeat | None


@dataclass(frozen=True, slots=True)
class Admit:
    """No other run is alive.

    `dead`: the attempts whose heartbeats are no longer needed.
    """

    dead: Sequence[int]


Verdict = WatchOn | Refuse | Admit


@dataclass(slots=True)
class Sightings:
    """All that one newcomer has seen of the heartbeats of its job.

    `deadline`: when it stops waiting for the end of a run that is alive.
    """

    job: str
    newcomer: Newcomer
    deadline: float
    _seen: dict[int, Sighting] = field(default_factory=dict)

    def decide(self, found: Mapping[int, bytes], now: float) -> Verdict:
        """Take one look at the heartbeats, given the bytes of each by attempt, and
        return what follows from this and all earlier looks.
        """
        for attempt in self._seen.keys() - found.keys():
            del self._seen[attempt]
        for attempt, data in found.items():
            before = self._seen.get(attempt)
            if before is None or before.data != data:
                self._seen[attempt] = Sighting(
                    data, Heartbeat.decode(data, self.job, attempt), now, changed=before is not None
                )
        own = max(
            (
                attempt
                for attempt, seen in self._seen.items()
                if self.newcomer.succeeds(attempt, seen.heartbeat)
            ),
            default=0,
        )
        others = {
            attempt: seen
            for attempt, seen in self._seen.items()
            if attempt > own and not seen.is_dead(now)
        }
        alive = [attempt for attempt, seen in others.items() if seen.changed]
        if alive and now >= self.deadline:
            return Refuse(max(alive), others[max(alive)].heartbeat)
        return WatchOn() if others else Admit(sorted(self._seen))
