"""The limit of open files: how many descriptors a rank takes, and how many ranks fit
into the limit of this process.

A `DescriptorPlan` only calculates. `server.py` refuses clients by the plan, so that the
daemon does not run out of descriptors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from dataclasses import dataclass

from ckptd.shared.errors import Busy, InvalidConfig

CONNECTION = 3
"""Descriptors of a rank's connection: the socket, a pidfd of the trainer, and a copy of
the pidfd that is watched for the trainer's death.

The constants here were measured with /proc/PID/fd. A rank with 2 slots takes 5
descriptors, including the 2 of its segments
(`tests/daemon/process/test_limits.py::test_descriptors_of_a_rank_are_as_planned`).
"""
SAVING = 2
"""Descriptors of a save besides its part files: the directory of the checkpoint, and a
manifest or lease. A recovery takes no more.
"""
STANDARD = 3
"""Descriptors of the standard streams."""
OWN = STANDARD + 14
"""Descriptors of a daemon without clients: the standard streams, 9 of uvloop (asyncio
has fewer), the lock of the root, the journal and its directory, the directory of the
segments, and the listening socket.
"""
SPARE = 24
"""Descriptors for short uses: segments on their way to a trainer (2 for each slot), a
new journal file, directories that are being read.
"""

_MOST_NUMBERS = 65536
"""The descriptors that are tried one after the other where `/proc/self/fd` cannot be
read. The system gives the lowest free number.
"""

HOW_TO_RAISE = (
    "raise it with LimitNOFILE= in the systemd unit, `ulimit -n`, or `docker run --ulimit nofile=N`"
)


@dataclass(frozen=True, slots=True)
class DescriptorPlan:
    """A plan for the descriptors of one daemon.

    `slots` is the number of slots of a rank, and `files` the most files of a part that
    are open at once. `own` is the number of descriptors that are open without any
    client.
    """

    slots: int
    files: int = 1
    own: int = OWN

    @property
    def per_rank(self) -> int:
        """The number of descriptors that are planned for a rank.

        A rank at rest takes fewer: `CONNECTION`, and one for each slot. The plan counts
        each slot twice, because a job that is started again still holds the segments of
        the run before, until its own first snapshot is saved. It counts a save for each
        rank, because each rank may be a job of its own that is being saved.
        """
        return CONNECTION + 2 * self.slots + SAVING + self.files

    @property
    def least(self) -> int:
        """The smallest limit of open files with which the daemon can serve one rank."""
        return self.needed(1)

    def needed(self, ranks: int) -> int:
        """Return the limit of open files that this number of ranks needs."""
        return self.own + SPARE + self.per_rank * ranks

    def ranks(self, limit: int) -> int:
        """Return how many ranks fit into this limit of open files."""
        return max(0, (limit - self.own - SPARE) // self.per_rank)

    def fits(self, limit: int, connections: int, new: int, segments: int) -> bool:
        """Return True if one more client can be accepted within the limit of open
        files.

        connections: the number of open connections. new: how many of them have not
        begun an attempt, and so may still get slots. segments: the number of all
        segments, whether their trainer is connected, is dead, or has not reconnected
        after a restart of the daemon.
        """
        ranks = connections + 1
        held = max(segments + self.slots * (new + 1), 2 * self.slots * ranks)
        return self.own + SPARE + (CONNECTION + SAVING + self.files) * ranks + held <= limit

    def warning(self, limit: int, most: int) -> str:
        """Return a warning if `most` connections do not fit into the limit, or an empty
        string if they do.
        """
        if self.ranks(limit) >= most:
            return ""
        return (
            f"max_connections is {most}, but only {self.ranks(limit)} of them fit into the limit "
            f"of {limit} open files (RLIMIT_NOFILE): "
            f"more are refused. {most} clients need a limit of {self.needed(most)}: "
            f"{HOW_TO_RAISE}; or set max_connections={self.ranks(limit)}"
        )

    def refusal(self, limit: int, connections: int) -> Busy:
        """Return the error for a client that does not fit into the limit beside the
        open connections.
        """
        return Busy(
            f"this daemon has {connections} clients and no room for another one within its limit "
            f"of {limit} open files (RLIMIT_NOFILE): "
            f"try again later, or start the daemon with a higher limit ({HOW_TO_RAISE})"
        )


def soft_limit() -> int:
    """Return how many descriptors this process may have open (the soft RLIMIT_NOFILE)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, which needs no privilege.

    Return the soft limit that is then in force.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # A process may inherit a hard limit above fs.nr_open, but the kernel lets
            # no process set one.
            pass
    return soft_limit()


def check(plan: DescriptorPlan, limit: int) -> None:
    """Raise InvalidConfig if not one rank fits into the limit."""
    if limit < plan.least:
        raise InvalidConfig(
            f"the limit of {limit} open files (RLIMIT_NOFILE) is too low: a daemon with "
            f"{plan.slots} slots needs {plan.least} for one rank "
            f"and {plan.per_rank} more for each other one; {HOW_TO_RAISE}"
        )


def used() -> int:
    """Return how many descriptors this process has open, or its limit if not even one
    is left to count them with.
    """
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the descriptor of the listing itself
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return soft_limit()
        # This system hides the directory.
        return sum(map(_is_open, range(min(soft_limit(), _MOST_NUMBERS))))


def _is_open(number: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return False
    return True
