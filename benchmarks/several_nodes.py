"""Measures what several nodes cost: how long a snapshot holds the training, the board's
traffic, when all nodes know, and a recovery.

`python -m benchmarks.several_nodes [--megabytes N] [--steps N]`. Two ranks save the
same state on one node and on two nodes, whose daemons run on this machine and share a
directory. The two ways take turns. If SeaweedFS is installed, two nodes then share an
object store. A state that is divided between the ranks is recovered from what the nodes
still hold, and from storage once their memory is lost.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.rows import Row, keep, settled
from ckptd.agent import Agent
from ckptd.shared import names
from ckptd.shared.location import Location, Url
from ckptd.shared.storage.locate import open_root
from tests.support import stores
from tests.support.nodes import Nodes, nodes
from tests.support.ranks import HERE, Ranks

TWO = "two"
"""The job that is on two nodes."""


class _Found(NamedTuple):
    """The results for some jobs. held: the seconds for which each step held the
    training, by job. known: the seconds from the last receipt of each step of `TWO`
    until all its ranks knew that the step is durable. traffic: the requests of each
    rank for one step of `TWO`.
    """

    held: dict[str, list[float]]
    known: list[float]
    traffic: list[dict[str, float]]


class _Counted:
    """A client of the job's store that counts the requests that change or read a key."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.counts = {"set": 0, "get": 0, "check": 0, "multi_get": 0}

    def __getattr__(self, name: str) -> Any:
        if name in self.counts:
            self.counts[name] += 1
        return getattr(self._store, name)


def set_up(environ: dict[str, str]) -> None:
    os.environ.update(environ)


def begin(sockets: list[Path], job: str, nbytes: int) -> None:
    agent = HERE[job] = Agent(job, socket=sockets[dist.get_rank()])
    if (board := agent._link._board) is not None:
        board._store = _Counted(board._store)  # type: ignore[assignment]
    HERE["state"] = {"weights": [torch.randn(nbytes // 4 // 16) for _ in range(16)]}
    agent.prepare(HERE["state"])


def take(job: str, step: int) -> tuple[float, float]:
    """Take a step.

    Return the seconds for which it held the training, and the time at which this rank
    knew that it is durable.
    """
    dist.barrier()
    pending = HERE[job].snapshot(HERE["state"], step=step)
    pending.wait("durable", timeout=300)
    return pending.held, time.time()


def traffic(job: str) -> dict[str, int]:
    board = HERE[job]._link._board
    return dict(board._store.counts) if board is not None else {}


def wait_for_receipts(root: Location, job: str, step: int) -> float:
    """Wait until both receipts of a step are there, and return the time.

    They are looked for every few milliseconds.
    """
    repository, tag = open_root(root), names.tag_directory(step, None, 1)
    while (
        sum(names.parse_receipt_file(file) is not None for file in repository.files(job, tag)) < 2
    ):
        time.sleep(0.002)
    return time.time()


def on_nodes(
    place: Nodes, jobs: dict[str, list[Path]], nbytes: int, steps: int, environ: dict[str, str]
) -> _Found:
    """Take so many steps of each job in turns. `jobs` has the socket of each rank."""
    found = _Found({job: [] for job in jobs}, [], [])
    with Ranks(2) as ranks:
        ranks.call(set_up, environ)
        for job, sockets in jobs.items():
            ranks.call(begin, sockets, job, nbytes)
        for step in range(steps):
            for job in list(jobs)[:: 1 if step % 2 else -1]:
                settled()
                ranks.begin(take, job, step)
                receipts = wait_for_receipts(place.root, job, step) if job == TWO else 0.0
                took = ranks.results(timeout=300)
                if step:  # the first snapshot plans and makes slots
                    found.held[job].append(max(seconds for seconds, _ in took))
                    if job == TWO:
                        found.known.append(max(0.0, max(when for _, when in took) - receipts))
            if step == 0:
                before = ranks.call(traffic, TWO)
        after = ranks.call(traffic, TWO)
    per_step = [
        {key: (now[key] - then[key]) / (steps - 1) for key in now}
        for now, then in zip(after, before, strict=True)
    ]
    return found._replace(traffic=per_step)


def divided(fill: float, nbytes: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((nbytes // 4 // 16,), fill)
    return {
        f"layer{number}": DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)
        for number in range(16)
    }


def save_divided(sockets: list[Path], nbytes: int) -> None:
    agent = Agent("divided", socket=sockets[dist.get_rank()])
    agent.snapshot(divided(7.0, nbytes), step=1).wait("durable", timeout=300)


def load_divided(sockets: list[Path], nbytes: int) -> tuple[float, int]:
    """Recover, and check every value.

    Return the seconds and the bytes that came from memory.
    """
    agent, state = Agent("divided", socket=sockets[dist.get_rank()]), divided(0.0, nbytes)
    dist.barrier()
    found = agent.recover(state)
    assert found is not None
    assert all(bool((tensor.to_local() == 7.0).all()) for tensor in state.values())
    return found.seconds, found.memory_bytes


def recovery(place: Nodes, nbytes: int, environ: dict[str, str], where: str) -> Row:
    """Recover from what the nodes hold, and again after they have lost their memory."""
    sockets = [node.home.socket for node in place]
    seconds = {}
    with Ranks(2) as ranks:
        ranks.call(set_up, environ)
        ranks.call(save_divided, sockets, nbytes // 2)
    for way, from_memory in (("memory", True), ("storage", False)):
        if not from_memory:
            for node in place:
                node.lose()
                node.start()
        settled()
        with Ranks(2) as ranks:
            ranks.call(set_up, environ)
            took = ranks.call(load_divided, sockets, nbytes // 2)
        assert all((read >= nbytes // 2) == from_memory for _, read in took), took
        seconds[f"{way} s"] = max(one for one, _ in took)
    value = seconds["memory s"] / seconds["storage s"]
    return Row(
        name=f"{where}: recovery from the memory of two nodes / from storage",
        value=value,
        unit="x",
        beside=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--megabytes", type=int, default=200, help="of the state, which both ranks hold"
    )
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    nbytes, beside = options.megabytes * 1_000_000, {"MB": float(options.megabytes)}
    with nodes(2, "--codec", "raw", "--no-link-unchanged") as place:
        first, second = (node.home.socket for node in place)
        found = on_nodes(
            place, {"one": [first, first], TWO: [first, second]}, nbytes, options.steps, {}
        )
        again = recovery(place, nbytes, {}, "a directory")
    one, two = median(found.held["one"]), median(found.held[TWO])
    rows = [
        Row(
            name="held on two nodes / on one",
            value=two / one,
            unit="x",
            limit=1.1,
            beside={"one s": one, "two s": two, **beside},
        ),
        Row(
            name="last receipt until durable on all nodes, median",
            value=median(found.known),
            unit="s",
            limit=0.2,
        ),
        Row(
            name="last receipt until durable on all nodes, longest",
            value=max(found.known),
            unit="s",
        ),
        again,
    ]
    for rank, counts in enumerate(found.traffic):
        reads = counts["get"] + counts["multi_get"] + counts["check"]
        rows.append(
            Row(
                name=f"the job's store, rank {rank}: keys written for a snapshot",
                value=counts["set"],
                unit="requests",
                limit=1.0,
            )
        )
        rows.append(
            Row(
                name=f"the job's store, rank {rank}: keys read for a snapshot",
                value=reads,
                unit="requests",
                limit=1.0,
            )
        )
    with tempfile.TemporaryDirectory() as there, ExitStack() as held:
        if stores.program("weed"):
            server = held.enter_context(stores.Servers(Path(there))).get("seaweed")
            os.environ.update(server.environ)
            root = Url("s3", "bucket", ("root",))
            place = held.enter_context(
                nodes(2, "--codec", "raw", root=root, environ=server.environ)
            )
            found = on_nodes(
                place,
                {TWO: [node.home.socket for node in place]},
                nbytes // 10,
                options.steps,
                server.environ,
            )
            rows.append(
                Row(
                    name="SeaweedFS: last receipt until durable on all nodes, median",
                    value=median(found.known),
                    unit="s",
                )
            )
            rows.append(
                Row(
                    name="SeaweedFS: last receipt until durable on all nodes, longest",
                    value=max(found.known),
                    unit="s",
                )
            )
            rows.append(recovery(place, nbytes, server.environ, "SeaweedFS"))
    keep(rows, "several-nodes")


if __name__ == "__main__":
    main()
