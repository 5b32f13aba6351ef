"""Measures recoveries on the ranks that saved: with the same partition, without that
promise, and with `dcp.load`.

`python -m benchmarks.partition [--gigabytes N] [--tensors N] [--rounds N]`. Four ranks
on the CPU hold a model and its moments, 5.2 GB in all by default, every tensor sharded
by rows. The ways take turns, and the slowest rank counts. The files are in the page
cache as far as there is room for them.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.rows import Row, keep
from ckptd.agent import Agent
from tests.support.daemons import home, running
from tests.support.ranks import HERE, Ranks

RANKS = 4
WAYS = ("recover", "same partition", "dcp.load")


def made(tensors: int, nbytes: int) -> dict[str, Any]:
    """Return the state of this rank: weights and two moments of fp32, and the step of
    each parameter, as AdamW has them.
    """
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    columns = max(1, nbytes // (3 * tensors) // RANKS // 4 // 4)

    def sharded() -> DTensor:
        return DTensor.from_local(torch.randn(4, columns), mesh, [Shard(0)], run_check=False)

    names = [f"layers.{number}.weight" for number in range(tensors)]
    moments = {
        name: {"step": torch.tensor(1.0), "exp_avg": sharded(), "exp_avg_sq": sharded()}
        for name in names
    }
    return {"model": {name: sharded() for name in names}, "optimizer": {"state": moments}}


def save(socket: Path, place: Path, tensors: int, nbytes: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    HERE["state"] = made(tensors, nbytes)
    dcp.save(HERE["state"], checkpoint_id=place / "dcp")
    for _ in range(2):  # the second agent recovers, from storage
        agent = HERE["agent"] = Agent("job", socket=socket)
        # Two of this size would leave no room for the page cache.
        agent._link.handovers.slots.count = 1
        if agent.attempt == 1:
            agent.snapshot(HERE["state"], step=1).wait("durable")
            agent.close()


def restore(way: str, place: Path) -> float:
    """Return the seconds that this rank needs to restore its state."""
    dist.barrier()
    begun = time.perf_counter()
    if way == "dcp.load":
        dcp.load(HERE["state"], checkpoint_id=place / "dcp")
    else:
        found = HERE["agent"].recover(HERE["state"], same_partition=way == "same partition")
        assert found is not None
        assert found.source == "storage"
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.2)
    parser.add_argument(
        "--tensors", type=int, default=4000, help="Parameters; each has two moments and a step."
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    times = defaultdict[str, list[float]](list)
    with home() as place, running(place, "--codec", "raw"), Ranks(RANKS) as ranks:
        ranks.call(save, place.socket, place.path, options.tensors, int(1e9 * options.gigabytes))
        for number in range(options.rounds + 1):
            for way in WAYS:
                seconds = max(ranks.call(restore, way, place.path))
                if number:  # the first round brings the files into the page cache
                    times[way].append(seconds)
    found = {way: median(times[way]) for way in WAYS}
    beside = {"tensors": 4.0 * options.tensors, "GB": options.gigabytes}
    rows = [Row(name=f"{way}: seconds", value=found[way], unit="s", beside=beside) for way in WAYS]
    rows.append(
        Row(
            name="same partition / recover",
            value=found["same partition"] / found["recover"],
            unit="x",
            limit=1.0,
        )
    )
    rows.append(
        Row(
            name="same partition / dcp.load",
            value=found["same partition"] / found["dcp.load"],
            unit="x",
            limit=1.0,
        )
    )
    keep(rows, "partition")


if __name__ == "__main__":
    main()
