"""Begins an attempt on all ranks together: they find out which of them share a node,
and rank 0 claims the number for all.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ckptd.agent.link.arguments import foreign_memory, launch_id
from ckptd.agent.link.client import CALL_SECONDS, Client
from ckptd.agent.link.placement import NodePlace, holders, peer_rank
from ckptd.agent.link.rounds import RankGroup
from ckptd.shared.errors import (
    CkptdError,
    DaemonUnreachable,
    InternalError,
    InvalidRequest,
    JobRunning,
)
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.segment import this_boot
from ckptd.shared.system import machine
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.session import NODES

log = logging.getLogger("ckptd.agent")

# How long one rank waits for another: processes start, import and read data at their
# own pace.
BEGIN_SECONDS = 120.0
# How long a run waits for the end of another run of its job, such as a killed one that
# it replaces.
WAIT_SECONDS = 10.0


class BegunAttempt(NamedTuple):
    """An attempt that has begun.

    attempt: its number. node: the membership of this node, or None if all ranks are on
    one node. leaders: the lowest rank of each node. peer: the rank to which this rank
    copies its slots, or -1 if there are no copies. sources: the ranks that copy their
    slots to this one. alone: the reason why there are no copies, although the daemons
    were set to make them, or "".
    """

    attempt: int
    node: Membership | None
    leaders: list[int]
    peer: int = -1
    sources: tuple[int, ...] = ()
    alone: str = ""


def begin(
    ranks: RankGroup,
    error: CkptdError | None,
    client: Client | None = None,
    job: str = "",
    *,
    takeover: bool = False,
) -> BegunAttempt:
    """Begin an attempt together with the other ranks of the job, and return it.

    The ranks of one daemon are on one node.

    With `takeover`, another run of the job that is alive can no longer save. Without
    it, this one is refused after `WAIT_SECONDS`.

    A rank that cannot begin passes its `error` and no `client`. That error is raised on
    all ranks, and so are the errors of the claim by rank 0: InvalidRequest if the ranks
    do not share root and job, JobRunning, and other errors of the daemon. Raises
    SnapshotFailed if a rank does not come within `BEGIN_SECONDS`. After the claim the
    other ranks begin the attempt at their daemons. An error there is raised on that
    rank only if all ranks are on one node, or if `ranks` is a `Told`, and otherwise on
    all ranks.
    """

    def claim(said: list[bytes]) -> list[bytes]:
        places = [_PLACE_DECODER.decode(one) for one in said]
        for rank, place in enumerate(places):
            _check_same(places[0], place, rank)
        identity = secrets.token_hex(16)
        assert client is not None
        attempt = _claim(client, job, ranks, _nodes(places, identity)[0], takeover)
        return [msgspec.msgpack.encode(begun) for begun in as_begun(attempt, places, identity)]

    mine: bytes | CkptdError = (
        error or InternalError("there is no connection to a daemon, and no error that says why")
        if client is None
        else msgspec.msgpack.encode(RankPlace.of(client.welcome, job))
    )
    begun = _BEGUN_DECODER.decode(ranks.round("begin", mine, claim, BEGIN_SECONDS))
    assert client is not None
    if begun.node is None:
        attempt = (
            begun.attempt if ranks.rank == 0 else _begin(client, job, ranks, begun.attempt, None)
        )
        return BegunAttempt(attempt, None, [])
    joined: bytes | CkptdError = b""
    if ranks.rank != 0:
        try:
            _begin(
                client, job, ranks, begun.attempt, None if takeover else WAIT_SECONDS, begun.node
            )
        except CkptdError as failure:
            joined = failure
    ranks.round("joined", joined, lambda said: said, BEGIN_SECONDS)
    return begun


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place where one rank runs, and its job.

    `boot` is the boot id of its node, and `node` its host name. `instance` identifies
    its daemon, and is "" from an old daemon. `root` is the root of that daemon, and
    `identity` that of the root, "" from an old daemon. `nodes` is True if the daemon
    knows several nodes. `copies` is True if the daemon makes copies in the
    memory of other nodes, and `domain` is the failure domain of its node.
    """

    boot: bytes
    node: str
    instance: str
    root: str
    job: str
    identity: str = ""
    nodes: bool = False
    copies: bool = False
    domain: str = ""

    @classmethod
    def of(cls, welcome: m.Welcome, job: str) -> RankPlace:
        """Return the place of this process, given the greeting of its daemon."""
        return cls(
            this_boot(),
            machine.host(),
            welcome.instance,
            welcome.root,
            job,
            welcome.identity,
            NODES in welcome.features,
            welcome.copies is not None,
            "" if welcome.copies is None else welcome.copies.domain,
        )


def _check_same(first: RankPlace, other: RankPlace, rank: int) -> None:
    """Raise InvalidRequest unless `rank` and rank 0 can share an attempt."""
    if first.root != other.root:
        raise InvalidRequest(
            f"rank {rank} on {other.node} uses root {other.root}, rank 0 on {first.node} uses "
            f"{first.root}: "
            "give all daemons the same root (--root or CKPTD_ROOT)"
        )
    if first.identity and other.identity and first.identity != other.identity:
        raise InvalidRequest(
            f"the root {first.root} of rank {rank} on {other.node} is not that of rank 0 on "
            f"{first.node}, although it has the same path: "
            "use a directory of a shared file system, or an object store"
        )
    if not _same_daemon(first, other) and not (first.nodes and other.nodes):
        old = other if first.nodes else first
        raise InvalidRequest(
            f"the daemon on {old.node} knows no jobs of several nodes: install this version of "
            f"ckptd on all nodes"
        )
    if first.job != other.job:
        raise InvalidRequest(
            f"rank {rank} uses the job name {other.job!r}, rank 0 uses {first.job!r}: use the "
            f"same job name on all ranks"
        )


def _same_daemon(one: RankPlace, other: RankPlace) -> bool:
    """Return True if two ranks have the same daemon.

    Host names are no guide, because containers of one node may have different ones.
    """
    return one.boot == other.boot and (
        one.instance == other.instance or not (one.instance and other.instance)
    )


def as_begun(attempt: int, places: Sequence[RankPlace], identity: str) -> list[BegunAttempt]:
    """Return an attempt as each rank needs it to join.

    places: the places of all ranks. identity: the run id, if they are on several nodes.
    """
    nodes = _nodes(places, identity)
    leaders = sorted({node.ranks[0] for node in nodes if node is not None})
    peers, alone = _peers(places, nodes)
    sources: dict[int, list[int]] = {}
    for rank, peer in peers.items():
        sources.setdefault(peer, []).append(rank)
    return [
        BegunAttempt(
            attempt, node, leaders, peers.get(rank, -1), tuple(sources.get(rank, ())), alone
        )
        for rank, node in enumerate(nodes)
    ]


def _peers(
    places: Sequence[RankPlace], nodes: Sequence[Membership | None]
) -> tuple[dict[int, int], str]:
    """Return the rank to which each rank copies its slots, and the reason why there are
    no copies although a daemon was set to make them, or "".
    """
    by_leader = {
        node.ranks[0]: NodePlace(node.ranks, places[node.ranks[0]].domain)
        for node in nodes
        if node is not None
    }
    wanted = {places[leader].copies for leader in by_leader}
    if not any(wanted):
        return {}, ""
    if len(wanted) > 1:
        off = next(places[leader] for leader in by_leader if not places[leader].copies)
        return {}, (
            f"the daemon on {off.node} is set to replicas = 0, and others to 1: set the same on "
            f"all nodes"
        )
    try:
        holder_of = holders(list(by_leader.values()))
    except InvalidRequest as error:
        return {}, str(error)
    return {
        rank: peer_rank(place, rank, by_leader[holder_of[leader]])
        for leader, place in by_leader.items()
        for rank in place.ranks
    }, ""


def _nodes(places: Sequence[RankPlace], identity: str) -> list[Membership | None]:
    """Return the membership of the node of each rank, or None for each rank if all ranks
    have the same daemon.
    """
    if all(_same_daemon(places[0], place) for place in places):
        return [None] * len(places)
    found: dict[tuple[bytes, str], list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault((place.boot, place.instance), []).append(rank)
    nodes = {key: Membership(run_id=identity, ranks=here) for key, here in found.items()}
    return [nodes[place.boot, place.instance] for place in places]


def _claim(
    client: Client, job: str, ranks: RankGroup, node: Membership | None, takeover: bool
) -> int:
    """Begin the next attempt.

    If another run of the job is alive and `takeover` is False, wait for its end, and
    say so.
    """
    if takeover:
        return _begin(client, job, ranks, 0, None, node)
    try:
        return _begin(client, job, ranks, 0, 0.0, node)
    except JobRunning as error:
        log.warning("waiting %g s for the end of another run: %s", WAIT_SECONDS, error)
    return _begin(client, job, ranks, 0, WAIT_SECONDS, node)


def _begin(
    client: Client,
    job: str,
    ranks: RankGroup,
    attempt: int,
    wait: float | None,
    node: Membership | None = None,
) -> int:
    """Begin or join an attempt, and return its number.

    A daemon may end just then, for example because its root has been deleted. A rank
    that is alone asks the next daemon once.
    """
    foreign = foreign_memory()

    def ask() -> int:
        began, _ = client.call(
            lambda n: m.Begin(
                id=n, job=job, rank=ranks.rank, world_size=ranks.world_size, attempt=attempt,
                run=launch_id(), wait=wait, node=node, foreign_memory=foreign,
            ),
            m.Began,
            CALL_SECONDS + (wait or 0.0),
        )  # fmt: skip
        return began.attempt

    try:
        return ask()
    except DaemonUnreachable:
        if ranks.world_size > 1 or not client.wait_connected(CALL_SECONDS):
            raise
    return ask()


_PLACE_DECODER = msgspec.msgpack.Decoder(RankPlace)
_BEGUN_DECODER = msgspec.msgpack.Decoder(BegunAttempt)
