"""Measures what a state of very many small tensors costs: planning, capture, opening a
checkpoint, and recovery, beside DCP.

`python -m benchmarks.many [--tensors N] [--rounds N]`. One rank; each tensor has 16
elements, so that nearly all of the time goes into the handling of tensors. Each round
uses a new job: its first snapshot follows `prepare`, as at the start of a training.
"""

from __future__ import annotations

import argparse
import shutil
import time
import warnings
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.rows import Row, keep, settled
from ckptd.agent import Agent, Checkpoint
from ckptd.agent.bench.ways import timed
from tests.support.daemons import home, running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-dcp", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    state: dict[str, Any] = {
        f"layers.{number}.weight": torch.randn(16) for number in range(options.tensors)
    }
    times = defaultdict[str, list[float]](list)
    with home() as place, running(place) as _:
        for number in range(options.rounds):
            job = f"many-{number}"
            agent = Agent(job, socket=place.socket)
            times["prepare"].append(timed(lambda agent=agent: agent.prepare(state)))  # type: ignore[misc]
            agent._link.handovers.slots.wait()
            time.sleep(1)
            for step, name in enumerate(("first", "second", "third")):
                settled()
                begun = time.perf_counter()
                pending = agent.snapshot(state, step=step)
                times[name].append(time.perf_counter() - begun)
                pending.wait("durable")
                times[f"{name} durable"].append(time.perf_counter() - begun)
            agent.close()
            times["open"].append(timed(lambda job=job: Checkpoint.open(place.root / job)))  # type: ignore[misc]
            other = Agent(job, socket=place.socket)
            times["recover"].append(timed(lambda other=other: other.recover(state)))  # type: ignore[misc]
            other.close()
            if not options.without_dcp:
                settled()
                path = place.path / "dcp"
                times["dcp.save"].append(
                    timed(
                        lambda path=path: save(  # type: ignore[misc]
                            state, storage_writer=FileSystemWriter(path), no_dist=True
                        )
                    )
                )
                times["dcp.load"].append(
                    timed(
                        lambda path=path: load(  # type: ignore[misc]
                            state, storage_reader=FileSystemReader(path), no_dist=True
                        )
                    )
                )
                shutil.rmtree(path)
    seconds = {name: median(values) for name, values in times.items()}
    saved = {"dcp.save": seconds["dcp.save"]} if "dcp.save" in seconds else {}
    loaded = {"dcp.load": seconds["dcp.load"]} if "dcp.load" in seconds else {}
    label = f"{options.tensors:,d} tensors"
    keep(
        [
            Row(
                name=f"{label}: held, first after prepare",
                value=seconds["first"],
                unit="s",
                limit=0.5,
                beside=saved,
            ),
            Row(
                name=f"{label}: held, third",
                value=seconds["third"],
                unit="s",
                beside={"second": seconds["second"]},
            ),
            Row(
                name=f"{label}: durable, third",
                value=seconds["third durable"],
                unit="s",
                beside={"first": seconds["first durable"]},
            ),
            Row(name=f"{label}: open", value=seconds["open"], unit="s", limit=0.5),
            Row(
                name=f"{label}: recover",
                value=seconds["recover"],
                unit="s",
                limit=2.0,
                beside=loaded,
            ),
            Row(name=f"{label}: prepare", value=seconds["prepare"], unit="s"),
        ],
        f"many-{options.tensors}",
    )


if __name__ == "__main__":
    main()
