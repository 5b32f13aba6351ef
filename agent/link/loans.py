"""Asks the daemon of this node for the newest snapshot of a job, as a reader that is no
rank and begins no attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd.shared.errors import DaemonUnreachable, VersionMismatch, from_wire
from ckptd.shared.location import Location, located
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel
from ckptd.shared.wire.session import LENDING

ANSWER_SECONDS = 60.0
"""Seconds beyond the wait in which the daemon must answer: it may have to check a
snapshot of many gigabytes first.
"""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A snapshot that the daemon has lent.

    key: its attempt and step. place: the root or the stage with its checkpoint. stored:
    True if the checkpoint is to be read, and slots only in place of its parts. slots:
    descriptors by rank, which the owner of this object must close.
    """

    key: tuple[int, int]
    tag: str
    place: Location
    stored: bool
    slots: dict[int, Descriptor] = field(default_factory=dict)

    def close(self) -> None:
        for descriptor in self.slots.values():
            descriptor.close()


def borrow(
    channel: Channel, job: str, after: tuple[int, int] | None = None, wait: float = 0.0
) -> Borrowed | None:
    """Return the newest snapshot of a job that is later than `after`, or None if there
    is none within `wait` seconds.

    Raises VersionMismatch if the daemon is of an earlier version, DaemonUnreachable,
    and the errors of the daemon.
    """
    if LENDING not in channel.welcome.features:
        raise VersionMismatch(
            f"the daemon of {channel.welcome.root} is ckptd {channel.welcome.daemon}, which lends "
            f"no snapshots: install the same ckptd in both places, and restart the daemon"
        )
    attempt, step = after or (0, None)
    channel.send(m.Lend(id=channel.new_id(), job=job, attempt=attempt, step=step, wait=wait))
    if not channel.wait(wait + ANSWER_SECONDS):
        raise DaemonUnreachable("the daemon does not answer")
    reply = channel.receive()[0]
    if isinstance(reply, m.Error):
        raise from_wire(reply.code, reply.message)
    assert isinstance(reply, m.Lent)
    slots = dict(zip(reply.ranks, channel.take(len(reply.ranks)), strict=True))
    if not reply.source:
        return None
    welcome = channel.welcome
    return Borrowed(
        (reply.attempt, -1 if reply.step is None else reply.step),
        reply.tag,
        located(welcome.stage if reply.source == "stage" else welcome.root),
        reply.source != "memory",
        slots,
    )
