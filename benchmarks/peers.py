"""Measures copies in the memory of other nodes: how long a step takes from its seal until
it is replicated, what that costs the training, and how fast a replaced node reads its
state out of the memory of its peer.

`python -m benchmarks.peers [--megabytes N] [--rounds N]`. Two nodes with one rank each
run on this machine, each with a daemon. The rate of the transport is that of the same
kind of connection between two such processes, measured in turn with the rest: in both
directions at once beside the copies, which each rank sends and receives, and in one
direction beside the recovery. The replaced node recovers from its peer and, with the
peer's memory gone too, from the disk, and from a disk that is slowed down to 0.2 GB/s.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rows import Row, drop_pages, keep, settled
from ckptd import per_rank
from ckptd.agent import Agent
from ckptd.agent.copy.mapping import map_segment, present
from ckptd.agent.link.arguments import job_store
from ckptd.agent.peers.pair import Pair, finish
from tests.support.nodes import Nodes, nodes
from tests.support.ranks import HERE, Ranks

JOB = "peers"
_UNDER_WAY = 2
_CHUNK = 8 << 20


# -- on each rank


def begin(sockets: list[Path], megabytes: Sequence[int]) -> None:
    """Make the agent, and a state of as many megabytes as `megabytes` has for this rank."""
    rank = dist.get_rank()
    HERE["agent"] = Agent(JOB, socket=sockets[rank])
    torch.manual_seed(rank)
    HERE["weight"] = torch.randn((megabytes[rank] << 20) // 4 // 1024, 1024, device="cpu")
    HERE["state"] = {"weight": per_rank(HERE["weight"])}
    HERE["step"] = 0


def connect() -> None:
    """Make a connection of the kind that carries copies, in each direction."""
    rank = dist.get_rank()
    HERE["pairs"] = [
        Pair(job_store(), f"bench/{sender}", first=rank == sender, seconds=60.0)
        for sender in range(2)
    ]


def transport(nbytes: int, senders: Sequence[int]) -> float:
    """Send `nbytes` from each rank in `senders` into the memory of the other rank, and
    return the seconds.
    """
    rank, data = dist.get_rank(), HERE["weight"].view(torch.uint8).view(-1)
    into = torch.full((nbytes,), 1, dtype=torch.uint8, device="cpu")  # written, as a state is
    dist.barrier()
    begun = time.perf_counter()
    under_way: dict[int, list[Any]] = {sender: [] for sender in senders}
    for offset in range(0, nbytes, _CHUNK):
        length = min(_CHUNK, nbytes - offset)
        for sender, works in under_way.items():
            pair = HERE["pairs"][sender]
            works.append(
                pair.begin_send(data[offset : offset + length])
                if sender == rank
                else pair.begin_receive(into[offset : offset + length])
            )
            if len(works) == _UNDER_WAY:
                finish(works.pop(0), 60.0)
    for works in under_way.values():
        for work in works:
            finish(work, 60.0)
    return time.perf_counter() - begun


def copy() -> float:
    """Take a snapshot in memory, and return the seconds from its seal until it is
    replicated.
    """
    HERE["step"] += 1
    pending = HERE["agent"].snapshot(HERE["state"], step=HERE["step"], persist=False)
    pending.wait("sealed")
    begun = time.perf_counter()
    pending.wait("replicated", timeout=300)
    return time.perf_counter() - begun


def work(seconds: float) -> int:
    """Multiply matrices for so long, and return how many."""
    a = torch.randn(256, 256, device="cpu")
    until, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        a = (a @ a).clamp(-1, 1)
        count += 1
    return count


def work_beside(seconds: float, *, replicate: bool) -> int:
    """Take a snapshot in memory, then multiply matrices, and return how many."""
    HERE["step"] += 1
    pending = HERE["agent"].snapshot(
        HERE["state"], step=HERE["step"], persist=False, replicate=replicate
    )
    pending.wait("sealed")
    dist.barrier()
    done = work(seconds)
    if replicate:
        pending.wait("replicated", timeout=300)
    return done


def save() -> None:
    """Save a snapshot, and wait until it is replicated and durable."""
    HERE["step"] += 1
    pending = HERE["agent"].snapshot(HERE["state"], step=HERE["step"])
    pending.wait("replicated", timeout=300)
    pending.wait("durable", timeout=300)


def recover(sockets: list[Path], megabytes: Sequence[int], *, slow: bool) -> tuple[float, int]:
    """Recover into zeros, from a disk that is slowed down if `slow`. Return the seconds,
    and the bytes that came from the memory of the other node.
    """
    begin(sockets, megabytes)
    return _recover(slow=slow)


def recover_beside(sockets: list[Path], megabytes: Sequence[int]) -> tuple[float, float, int]:
    """Recover into zeros, right after the transport has carried as many bytes over a new
    connection. Return the seconds of both, and the bytes that came from the other node.
    """
    begin(sockets, megabytes)
    connect()
    beside = transport(megabytes[1] << 20, (1,))
    seconds, copied = _recover()
    return seconds, beside, copied


def _slow_reads() -> AbstractContextManager[None]:
    # An earlier version of ckptd, which has not all that this module imports, is measured
    # with a fast disk only.
    from benchmarks.delta_saves import slow_reads

    return slow_reads()


def _recover(*, slow: bool = False) -> tuple[float, int]:
    HERE["weight"].zero_()
    dist.barrier()
    begun = time.perf_counter()
    with _slow_reads() if slow else nullcontext():
        found = HERE["agent"].recover(HERE["state"])
    assert found is not None
    return time.perf_counter() - begun, found.peer_bytes


# -- the measurements


def measure_copies(place: Nodes, megabytes: int, rounds: int) -> list[Row]:
    sockets = [node.home.socket for node in place]
    nbytes = megabytes << 20
    with Ranks(2) as ranks:
        ranks.call(begin, sockets, (megabytes, megabytes))
        ranks.call(connect)
        ranks.call(copy)
        rates, copies, plain, beside = [], [], [], []
        for _ in range(rounds):
            rates.append(max(ranks.call(transport, nbytes, (0, 1))))
            copies.append(max(ranks.call(copy)))
            plain.append(sum(ranks.call(_plain_work, 2.0)))
            beside.append(sum(ranks.call(_beside_work, 2.0)))
        ratio, lost = _ratio(copies, rates), 1 - _ratio(beside, plain)
        return [
            Row(
                name="seal to replicated / bytes at the transport's rate", value=ratio, unit="x",
                limit=1.3, beside={
                    "MB": megabytes, "seconds": median(copies),
                    "GB/s": nbytes / 1e9 / median(copies),
                    "transport GB/s": nbytes / 1e9 / median(rates),
                },
            ),
            Row(
                name="work lost while a snapshot is copied, in 2 s", value=100 * lost, unit="%",
            ),
        ]  # fmt: skip


def _plain_work(seconds: float) -> int:
    return work_beside(seconds, replicate=False)


def _beside_work(seconds: float) -> int:
    return work_beside(seconds, replicate=True)


def measure_recovery(place: Nodes, megabytes: int, rounds: int) -> list[Row]:
    """Measure the recovery of a replaced node from its peer and from disks, and from a
    peer that reads as much of its own memory meanwhile.
    """
    nbytes, small, both = megabytes << 20, (1, megabytes), (megabytes, megabytes)
    times: dict[str, list[float]] = {way: [] for way in ("peer", "slow disk", "disk", "busy")}
    rates = []
    for _ in range(rounds):
        rates.append(_transported(place, megabytes))
        _saved(place, small)
        for way in ("peer", "slow disk", "disk", "busy"):
            if way == "busy":
                _saved(place, both)
            for node in place[1:] if way in ("peer", "busy") else place:
                node.lose()
                node.start()
            state = both if way == "busy" else small
            seconds, copied = _recovered(place, state, slow=way == "slow disk")
            assert (copied >= nbytes) == (way in ("peer", "busy")), (way, copied)
            times[way].append(seconds)
    peer = times["peer"]
    return [
        Row(
            name="recovery of a replaced node: rate / transport's rate",
            value=_ratio(rates, peer), unit="x", limit=0.6, at_most=False,
            beside={
                "MB": megabytes, "seconds": median(peer), "GB/s": nbytes / 1e9 / median(peer),
                "transport GB/s": nbytes / 1e9 / median(rates),
                "while the peer reads as much": _ratio(rates, times["busy"]),
            },
        ),
        Row(
            name="recovery of a replaced node: a disk of 0.2 GB/s / the peer",
            value=_ratio(times["slow disk"], peer), unit="x", limit=2.0, at_most=False,
            beside={"this disk / the peer": _ratio(times["disk"], peer)},
        ),
    ]  # fmt: skip


def recoveries(megabytes: int, calls: int) -> tuple[list[tuple[float, float]], float]:
    """Return the seconds of recoveries of a replaced node from its peer, each with those
    of the transport, and the share of the peer's slot that is in huge pages.
    """
    found, state = list[tuple[float, float]](), (1, megabytes)
    with nodes(2, environ={"CKPTD_REPLICAS": "1"}) as place:
        sockets = [node.home.socket for node in place]
        _saved(place, state)
        share = huge_share(max(place[0].segments(), key=lambda file: file.stat().st_size))
        for _ in range(calls):
            place[1].lose()
            place[1].start()
            with Ranks(2) as ranks:
                seconds, beside, copied = ranks.call(recover_beside, sockets, state)[1]
            assert copied >= megabytes << 20, copied
            found.append((seconds, beside))
    return found, share


def huge_share(segment: Path) -> float:
    """Return the share of a segment's pages that this process maps as parts of huge pages."""
    length = segment.stat().st_size
    with segment.open("rb") as file:
        mapped = map_segment(file.fileno(), length, writable=False)
    with present(ctypes.addressof(mapped), length):
        lines = Path("/proc/self/smaps").read_text().partition(str(segment))[2].splitlines()
    huge = next(line for line in lines if line.startswith("ShmemPmdMapped"))
    return int(huge.split()[1]) * 1024 / length


def _ratio(ones: list[float], others: list[float]) -> float:
    """Return the median of the ratios of each round."""
    return median(one / other for one, other in zip(ones, others, strict=True))


def _transported(place: Nodes, megabytes: int) -> float:
    """Return the seconds that the transport takes from one rank to the other."""
    with Ranks(2) as ranks:
        ranks.call(begin, [node.home.socket for node in place], (megabytes, 1))
        ranks.call(connect)
        seconds: float = max(ranks.call(transport, megabytes << 20, (0,)))
    return seconds


def _saved(place: Nodes, megabytes: tuple[int, int]) -> None:
    """Save a state of so many megabytes on each rank, and wait until it is replicated."""
    with Ranks(2) as ranks:
        ranks.call(begin, [node.home.socket for node in place], megabytes)
        ranks.call(save)


def _recovered(place: Nodes, megabytes: tuple[int, int], *, slow: bool) -> tuple[float, int]:
    """Recover on two ranks, and return what `recover` has returned on rank 1."""
    drop_pages(place.path)
    settled()
    with Ranks(2) as ranks:
        sockets = [node.home.socket for node in place]
        found: tuple[float, int] = ranks.call(partial(recover, slow=slow), sockets, megabytes)[1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="of the state of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with nodes(2, environ={"CKPTD_REPLICAS": "1"}) as place:
        rows = measure_copies(place, options.megabytes, options.rounds)
    with nodes(2, environ={"CKPTD_REPLICAS": "1"}) as place:
        rows += measure_recovery(place, options.megabytes, options.rounds)
    keep(rows, "peers")


if __name__ == "__main__":
    main()
