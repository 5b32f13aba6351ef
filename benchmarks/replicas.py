"""Measures what comparing replicas costs: seconds for which a snapshot holds the training, with and without, in the same rounds.

`python -m benchmarks.replicas [--tensors N] [--elements N] [--rounds N]`. Two ranks hold the same tensors on the CPU. Each has two jobs,
one of which compares nothing, and takes a snapshot of each in turn. A round counts with the longer time of the two ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ckptd.agent import Agent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=int, default=100, help="the setting compare_replicas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(_rank, (place, options), nprocs=2)  # type: ignore[no-untyped-call]


def _rank(rank: int, place: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    state = {f"layers.{number}.weight": torch.randn(options.elements) for number in range(options.tensors)}
    root = Path(place) / "root"
    jobs = {name: Agent(name, root=root, compare_replicas=every) for name, every in (("without", 0), ("with", options.every))}
    held: dict[str, list[float]] = {name: [] for name in jobs}
    for step in range(options.rounds + 10):
        order = list(jobs) if step % 2 else list(reversed(jobs))
        for name in order:
            for tensor in state.values():
                tensor += 1
            dist.barrier()
            pending = jobs[name].snapshot(state, step=step, persist=False)
            pending.wait("sealed", timeout=60)
            both: list[Any] = [None, None]
            dist.all_gather_object(both, pending.stall)
            held[name].append(max(both))
    if rank == 0:
        print(json.dumps(_row(options, {name: times[10:] for name, times in held.items()})))
    for agent in jobs.values():
        agent.close()
    dist.destroy_process_group()


def _row(options: argparse.Namespace, held: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(times) for name, times in held.items()}
    more = statistics.median(one - other for one, other in zip(held["with"], held["without"], strict=True))
    return {
        "tensors": options.tensors, "elements": options.elements, "every": options.every, "rounds": options.rounds,
        "held_ms": {name: round(1000 * median, 3) for name, median in medians.items()},
        "more_ms": round(1000 * more, 3), "more_percent": round(100 * more / medians["without"], 2),
    }  # fmt: skip


if __name__ == "__main__":
    main()
