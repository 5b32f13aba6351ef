"""Open files: the limit of this process, the descriptors that a rank takes, and the number of ranks that fit.

Plans with numbers only. `server.py` refuses clients by this plan, so that the daemon does not run out of descriptors.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from ckptd.shared.errors import Busy, InvalidConfig

CONNECTION = 3
"""Descriptors of a rank's connection: the socket, a pidfd of the trainer, and a copy of the pidfd that watches for the trainer's death.

Measured with /proc/PID/fd, like each constant here: a rank with 2 slots takes 5, of which 2 are its segments
(`tests/daemon/test_limits.py::test_descriptors_of_a_rank_are_as_planned`)."""
SAVING = 2
"""Descriptors of a save beside its files: the directory of the checkpoint, and a manifest or lease. A recovery takes no more."""
OWN = 17
"""Descriptors of a daemon without clients: 3 standard streams, 9 of uvloop (asyncio has fewer), the lock, the journal and its directory,
the directory of the segments, the listening socket."""
SPARE = 24
"""Descriptors for moments: segments on their way to a trainer (2 for each slot), a new journal file, directories that are being read."""

HOW_TO_RAISE = "raise it with LimitNOFILE= in the systemd unit, `ulimit -n`, or `docker run --ulimit nofile=N`"


@dataclass(frozen=True, slots=True)
class DescriptorPlan:
    """A plan that divides the descriptors of one daemon. `own`: those that are open without any client."""

    slots: int
    files: int = 1
    own: int = OWN

    @property
    def per_rank(self) -> int:
        """Return how many descriptors are planned for a rank.

        These are more than a rank takes at rest (`CONNECTION` and one for each slot). A job that is started again holds the segments of
        the run before, until its own first snapshot is saved. And each rank may be a job of its own that is being saved.
        """
        return CONNECTION + 2 * self.slots + SAVING + self.files

    @property
    def least(self) -> int:
        """Return the smallest limit with which the daemon can serve one rank."""
        return self.needed(1)

    def needed(self, ranks: int) -> int:
        """Return the limit that so many ranks need."""
        return self.own + SPARE + self.per_rank * ranks

    def ranks(self, limit: int) -> int:
        """Return how many ranks fit into this limit."""
        return max(0, (limit - self.own - SPARE) // self.per_rank)

    def fits(self, limit: int, connections: int, new: int, segments: int) -> bool:
        """Return True if one more client can be accepted.

        `connections` are open, of which `new` have not begun an attempt and so may still get slots. All `segments` count, whether their
        trainer is connected, is dead, or has not come back after a restart of the daemon.
        """
        ranks = connections + 1
        held = max(segments + self.slots * (new + 1), 2 * self.slots * ranks)
        return self.own + SPARE + (CONNECTION + SAVING + self.files) * ranks + held <= limit

    def warning(self, limit: int, most: int) -> str:
        """Return a sentence if `most` connections do not fit into the limit, else an empty string."""
        if self.ranks(limit) >= most:
            return ""
        return (
            f"max_connections is {most}, but only {self.ranks(limit)} clients fit into the limit of {limit} open files (RLIMIT_NOFILE): "
            f"more are refused. {most} clients need a limit of {self.needed(most)}: {HOW_TO_RAISE}; "
            f"or set max_connections={self.ranks(limit)}"
        )

    def refusal(self, limit: int, connections: int) -> Busy:
        """Return the error for a client that does not fit."""
        return Busy(
            f"this daemon has {connections} clients and no room for another one within its limit of {limit} open files (RLIMIT_NOFILE): "
            f"try again later, or start the daemon with a higher limit ({HOW_TO_RAISE})"
        )


def soft_limit() -> int:
    """Return how many descriptors this process may have open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the soft limit. A process may do so without any right."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # a hard limit above the kernel's fs.nr_open can be kept, but not be taken
    return soft_limit()


def check(plan: DescriptorPlan, limit: int) -> None:
    """Raise InvalidConfig if not one rank fits into the limit."""
    if limit < plan.least:
        raise InvalidConfig(
            f"the limit of {limit} open files (RLIMIT_NOFILE) is too low: a daemon with {plan.slots} slots needs {plan.least} for one rank "
            f"and {plan.per_rank} more for each other one; {HOW_TO_RAISE}"
        )


def used() -> int:
    """Return how many descriptors this process has open, or its limit if not even one is left to count them with."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without that of the listing
    except OSError:
        return soft_limit()
