"""Asks whether there is anything to recover, without beginning an attempt."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from ckptd.agent.link.arguments import job_name
from ckptd.agent.link.launch import find_place
from ckptd.agent.read.checkpoint import Checkpoint
from ckptd.agent.threads.interruptible import interruptible
from ckptd.shared.errors import NotFound, from_wire
from ckptd.shared.location import located
from ckptd.shared.wire import messages as m


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest state of a job that can be recovered.

    step: its step, or None if it was saved without one. attempt: the attempt that saved
    it. tag: the name that its directory has or would have. source: "memory" or
    "storage".
    """

    step: int | None
    attempt: int
    tag: str
    source: str


@interruptible
def newest(
    job: str | None = None,
    root: str | os.PathLike[str] | None = None,
    *,
    socket: str | os.PathLike[str] | None = None,
) -> Newest | None:
    """Return the newest state of a job that can be recovered, or None if there is none.

    No attempt begins, no process group is needed, and a run of the job that is alive is
    not disturbed. On several nodes, the memory of this node is asked, and the storage.
    A private daemon is started if none runs, because a trainer that was killed may have
    left its snapshot in memory.

    job: name of the training run. Default: as for `Agent`.
    root: directory or URL of the checkpoints. Default: as for `Agent`.
    socket: path of the daemon's Unix socket. Default: as for `Agent`.

    Raises InvalidName for the name of the job; InvalidRequest if the job has no name, or
    if the daemon serves another root; DaemonUnreachable, Forbidden; StorageError, and
    IntegrityError if every checkpoint of the job is damaged.
    """
    place = find_place(socket, root)
    channel = place.connect()
    try:
        channel.send(m.Status(id=channel.new_id()))
        reply = channel.receive()[0]
    finally:
        channel.close()
    if isinstance(reply, m.Error):
        raise from_wire(reply.code, reply.message)
    assert isinstance(reply, m.StatusReport)
    status = json.loads(reply.report)
    name = job_name(job, private=status["private"])
    held = next((one["last_sealed"] for one in status["jobs"] if one["job"] == name), None)
    stored = _stored(status["root"], name)
    kept = held and Newest(held["step"], held["attempt"], held["tag"], "memory")
    return max((one for one in (stored, kept) if one), key=_order, default=None)


def _order(one: Newest) -> tuple[int, int, bool]:
    """Return the place of a state among others: a later one, or the same one in memory,
    is higher.
    """
    return one.attempt, -1 if one.step is None else one.step, one.source == "memory"


def _stored(root: str, job: str) -> Newest | None:
    """Return the newest sound checkpoint on storage."""
    try:
        with Checkpoint.open(located(root) / job) as found:
            return Newest(found.step, found.attempt, found.tag, "storage")
    except NotFound:
        return None
