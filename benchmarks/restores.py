"""Measures how long a recovery takes, from memory and from storage, beside a plain copy
of the state and `dcp.load`.

`python -m benchmarks.restores [--copies N] [--rounds N]`. The state is that of
`saves.py`. Every byte that ckptd brings back is verified. Reads from storage start with
the files out of the page cache, as after a reboot; the figures with a warm cache stand
beside them.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.rows import Row, drop_pages, keep, settled
from benchmarks.saves import state_and_rounds
from ckptd.agent import Agent, Checkpoint
from ckptd.agent.bench.ways import PlainCopy, State, timed
from ckptd.agent.read.checkpoint import opened_of
from ckptd.agent.read.loader import load as fill
from tests.support.daemons import home, running


def from_storage(path: Path, state: State) -> None:
    with Checkpoint.open(path) as checkpoint:
        fill(opened_of(checkpoint).saved, state)


def from_dcp(path: Path, state: State) -> None:
    load(state, storage_reader=FileSystemReader(path), no_dist=True)


def main() -> None:
    state, rounds = state_and_rounds(__doc__)
    times = defaultdict[str, list[float]](list)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    plain, place_of_copy = PlainCopy(state), Path()
    with home() as raw, home() as planes, home() as files:
        for place, codec in ((raw, "raw"), (planes, "planes")):
            with running(place, "--codec", codec) as _:
                agent = Agent("bench", socket=place.socket)
                agent.snapshot(state, step=1).wait("durable")
                agent.close()
        save(
            state, storage_writer=FileSystemWriter(files.path / "dcp", thread_count=2), no_dist=True
        )
        with home() as memory, running(memory, "--codec", "raw") as _:
            agent = Agent("bench", socket=memory.socket)
            agent.snapshot(state, step=1, persist=False).wait("sealed")
            for number in range(rounds + 1):
                for tensor in state.values():
                    tensor.zero_()
                settled()
                found = agent.recover(state)
                assert found is not None
                assert found.source == "memory"
                assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
                round_times = {
                    "recover from memory": found.seconds,
                    "plain copy": plain(state, place_of_copy)[0],
                }
                for cache in ("cold", "warm"):
                    for name, path in (
                        ("raw", raw.root / "bench"),
                        ("planes", planes.root / "bench"),
                        ("dcp.load", files.path / "dcp"),
                    ):
                        settled()
                        if cache == "cold":
                            drop_pages(path)
                        read = from_dcp if name == "dcp.load" else from_storage
                        round_times[f"{name}, {cache}"] = timed(partial(read, path, state))
                if number:  # the first round warms up
                    for name, taken in round_times.items():
                        times[name].append(taken)
            agent.close()
    seconds = {name: median(found) for name, found in times.items()}
    rate = seconds["plain copy"] / seconds["recover from memory"]
    rows = [
        Row(
            name="recover from memory, verified, speed / plain copy",
            value=rate,
            unit="x",
            limit=0.6,
            at_most=False,
            beside=seconds,
        )
    ]
    for codec in ("raw", "planes"):
        for cache in ("cold", "warm"):
            ratio = seconds[f"dcp.load, {cache}"] / seconds[f"{codec}, {cache}"]
            rows.append(
                Row(
                    name=f"dcp.load / load, {codec}, {cache} cache",
                    value=ratio,
                    unit="x",
                    limit=2.0,
                    at_most=False,
                )
            )
    keep(rows, "restores")


if __name__ == "__main__":
    main()
