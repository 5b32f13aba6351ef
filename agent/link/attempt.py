"""Begins an attempt on all ranks together: they must share a node and a daemon, and rank 0 claims the number for all."""

from __future__ import annotations

import logging

import msgspec

from ckptd.agent.link.arguments import launch_id
from ckptd.agent.link.client import CALL_SECONDS, Client
from ckptd.agent.link.rounds import Ranks
from ckptd.shared import messages as m
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, InternalError, InvalidRequest, JobRunning
from ckptd.shared.segment import this_boot

log = logging.getLogger("ckptd.agent")

BEGIN_SECONDS = 120.0  # how long one rank waits for another: processes start, import and read data at their own pace
WAIT_SECONDS = 10.0  # how long a run waits for the end of another run of its job, such as a killed one that it replaces


def begin(ranks: Ranks, error: CkptdError | None, client: Client | None = None, job: str = "", *, takeover: bool = False) -> int:
    """Begin an attempt together with the other ranks of the job, and return its number.

    With `takeover`, another run of the job that is alive can no longer save. Without it, this one is refused after `WAIT_SECONDS`.

    A rank that cannot begin passes its `error` and no `client`. That error is raised on all ranks, and so are the errors of the claim by
    rank 0: InvalidRequest if the ranks do not share node, daemon, root and job, JobRunning, and other errors of the daemon. Raises
    SnapshotFailed if a rank does not come within `BEGIN_SECONDS`. After the claim the other ranks begin the attempt at the daemon, and an
    error there is raised on that rank only.
    """

    def claim(said: list[bytes]) -> list[bytes]:
        places = [_PLACE_DECODER.decode(one) for one in said]
        for rank, place in enumerate(places):
            _check_same(places[0], place, rank)
        assert client is not None
        return [msgspec.msgpack.encode(_claim(client, job, ranks, takeover))] * len(said)

    mine: bytes | CkptdError
    if client is None:
        mine = error or InternalError("there is no connection to a daemon, and no error that says why")
    else:
        mine = msgspec.msgpack.encode(_Place(this_boot(), names.host(), client.welcome.instance, client.welcome.root, job))
    attempt: int = msgspec.msgpack.decode(ranks.round("begin", mine, claim, BEGIN_SECONDS))
    assert client is not None
    return attempt if ranks.rank == 0 else _begin(client, job, ranks, attempt, None)


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """The place where one rank runs, and its job.

    `boot` is the boot id of its node, and `node` its host name. `instance` identifies its daemon, and is "" from an old daemon. `root` is
    the root of that daemon.
    """

    boot: bytes
    node: str
    instance: str
    root: str
    job: str


def _check_same(first: _Place, other: _Place, rank: int) -> None:
    """Raise InvalidRequest unless `rank` and rank 0 can share an attempt.

    Nodes are compared by boot id, because the containers of one node share it, while their host names may differ.
    """
    if first.root != other.root:
        raise InvalidRequest(
            f"rank {rank} uses root {other.root}, rank 0 uses {first.root}: start all ranks with the same CKPTD_ROOT and one daemon"
        )
    if first.boot != other.boot or (first.instance and other.instance and first.instance != other.instance):
        raise InvalidRequest(
            f"ranks 0 and {rank} are served by different daemons (nodes {first.node} and {other.node}): "
            "a job's ranks must be on one node with one daemon in this version"
        )
    if first.job != other.job:
        raise InvalidRequest(f"rank {rank} uses the job name {other.job!r}, rank 0 uses {first.job!r}: use the same job name on all ranks")


def _claim(client: Client, job: str, ranks: Ranks, takeover: bool) -> int:
    """Begin the next attempt. If another run of the job is alive and `takeover` is False, wait for its end, and say so."""
    if takeover:
        return _begin(client, job, ranks, 0, None)
    try:
        return _begin(client, job, ranks, 0, 0.0)
    except JobRunning as error:
        log.warning("waiting %g s for the end of another run: %s", WAIT_SECONDS, error)
    return _begin(client, job, ranks, 0, WAIT_SECONDS)


def _begin(client: Client, job: str, ranks: Ranks, attempt: int, wait: float | None) -> int:
    began, _ = client.call(
        lambda n: m.Begin(id=n, job=job, rank=ranks.rank, world_size=ranks.world_size, attempt=attempt, run=launch_id(), wait=wait),
        m.Began,
        CALL_SECONDS + (wait or 0.0),
    )
    return began.attempt


_PLACE_DECODER = msgspec.msgpack.Decoder(_Place)
