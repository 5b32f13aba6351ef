"""How ranks begin an attempt together: they must share a node and a daemon, and rank 0 claims the number for all."""

from __future__ import annotations

import msgspec

from ckptd.agent.client import Client
from ckptd.agent.exchange import Ranks
from ckptd.shared import messages as m
from ckptd.shared.errors import CkptdError, InternalError, InvalidRequest
from ckptd.shared.segment import this_boot

CALL_SECONDS = 30.0
BEGIN_SECONDS = 120.0  # that one rank may come later than another: processes start, import and read data at their own pace


def begin(ranks: Ranks, error: CkptdError | None, client: Client | None = None, job: str = "") -> int:
    """The attempt that all ranks of the job begin. Raises `error`, if this rank has one, or that of another rank, on all ranks."""

    def claim(said: list[bytes]) -> list[bytes]:
        places = [msgspec.msgpack.decode(one, type=tuple[bytes, str, str]) for one in said]
        for rank, place in enumerate(places):
            for what, own, other in zip(("machine", "root", "job"), places[0], place, strict=True):
                if own != other:
                    names = "" if what == "machine" else f" ({own} and {other})"
                    raise InvalidRequest(f"ranks 0 and {rank} have not the same {what}{names}: a job's ranks share one node and daemon")
        assert client is not None
        return [msgspec.msgpack.encode(_begin(client, job, ranks, 0))] * len(said)

    mine: bytes | CkptdError
    if client is None:
        mine = error or InternalError("no daemon and no reason")
    else:
        mine = msgspec.msgpack.encode((this_boot(), client.welcome.root, job))
    attempt = msgspec.msgpack.decode(ranks.round("begin", mine, claim, BEGIN_SECONDS), type=int)
    assert client is not None
    return attempt if ranks.rank == 0 else _begin(client, job, ranks, attempt)


def _begin(client: Client, job: str, ranks: Ranks, attempt: int) -> int:
    began, _ = client.call(
        lambda n: m.Begin(id=n, job=job, rank=ranks.rank, world_size=ranks.world_size, attempt=attempt), m.Began, CALL_SECONDS
    )
    return began.attempt
