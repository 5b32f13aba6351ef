"""Measures what comparing replicas costs: seconds for which a snapshot holds the
training, with and without, in the same rounds.

`python -m benchmarks.replicas [--tensors N] [--elements N] [--rounds N]`. Two ranks
hold the same tensors on the CPU. Each has one job that compares and one that does
not, and takes a snapshot of each in turn. A round counts with the longer time of the two ranks.
The time that the calling thread was on a processor is measured, too: on a machine with
other work it is the better figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
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
    parser.add_argument("--every", type=int, default=1000, help="the setting compare_replicas")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(_rank, (place, options), nprocs=2)  # type: ignore[attr-defined]


def _rank(rank: int, place: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    state = {
        f"layers.{number}.weight": torch.randn(options.elements)
        for number in range(options.tensors)
    }
    root = Path(place) / "root"
    jobs = {
        name: Agent(name, root=root, compare_replicas=every)
        for name, every in (("without", 0), ("with", options.every))
    }
    held: dict[str, list[float]] = {name: [] for name in jobs}
    busy: dict[str, list[float]] = {name: [] for name in jobs}
    for step in range(options.rounds + 10):
        order = list(jobs) if step % 2 else list(reversed(jobs))
        for name in order:
            for tensor in state.values():
                tensor += 1
            dist.barrier()
            begun = time.thread_time()
            pending = jobs[name].snapshot(state, step=step, persist=False)
            used = time.thread_time() - begun
            pending.wait("sealed", timeout=60)
            both: list[Any] = [None, None]
            dist.all_gather_object(both, (pending.stall, used))
            held[name].append(max(each[0] for each in both))
            busy[name].append(max(each[1] for each in both))
    if rank == 0:
        measured = {"held": _row(held), "on_processor": _row(busy)}
        about = {
            "tensors": options.tensors,
            "elements": options.elements,
            "every": options.every,
            "rounds": options.rounds,
        }
        print(json.dumps(about | measured))
    for agent in jobs.values():
        agent.close()
    dist.destroy_process_group()


def _row(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the medians in milliseconds, and how much more the comparison takes.

    The first rounds do not count.
    """
    counted = {name: found[10:] for name, found in times.items()}
    medians = {name: statistics.median(found) for name, found in counted.items()}
    more = statistics.median(
        one - other for one, other in zip(counted["with"], counted["without"], strict=True)
    )
    row = {f"{name}_ms": round(1000 * median, 3) for name, median in medians.items()}
    return row | {
        "more_ms": round(1000 * more, 3),
        "more_percent": round(100 * more / medians["without"], 2),
    }


if __name__ == "__main__":
    main()
