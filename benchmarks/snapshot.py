"""Measures how long one save holds the training, and how long it takes: ckptd and torch's own ways, in one process, on the same bytes.

`python -m benchmarks.snapshot [--megabytes N] [--rounds N]`. The state is fp32 weights and two Adam moments, normally distributed, in 384
tensors. "held" is the time until the call returns. "total" is the time until the bytes are safe by each one's own standard: ckptd is
durable (fsync, manifest, fsync of the directory), DCP has synced its files, torch.save has written and synced one file.

The rounds are interleaved, because the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from ckptd.agent import Agent
from tests.support.daemons import Daemon, home

Times = tuple[float, float]
"""The seconds held and the seconds in total."""


def make_state(megabytes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = max(1, megabytes * 250_000 // 3 // 128 // 256)
    return {
        f"{kind}.{n}": torch.randn(rows, 256, generator=generator) * scale
        for kind, scale in (("weight", 0.02), ("exp_avg", 1e-3), ("exp_avg_sq", 1e-6))
        for n in range(128)
    }


def torch_save(state: dict[str, Any], path: Path) -> Times:
    begun = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    taken = time.perf_counter() - begun
    return taken, taken


def dcp_save(state: dict[str, Any], path: Path) -> Times:
    begun = time.perf_counter()
    save(state, storage_writer=FileSystemWriter(path, thread_count=2))
    taken = time.perf_counter() - begun
    return taken, taken


def dcp_async_save(state: dict[str, Any], path: Path) -> Times:
    begun = time.perf_counter()
    future: Any = async_save(state, storage_writer=FileSystemWriter(path, thread_count=2))
    held = time.perf_counter() - begun
    future.result()
    return held, time.perf_counter() - begun


def ckptd_with(agent: Agent) -> Callable[[dict[str, Any], Path], Times]:
    step = 0

    def snapshot(state: dict[str, Any], path: Path) -> Times:
        nonlocal step
        step += 1
        begun = time.perf_counter()
        pending = agent.snapshot(state, step=step)
        held = time.perf_counter() - begun
        pending.wait("durable")
        return held, time.perf_counter() - begun

    return snapshot


def first_and_steady(state: dict[str, Any], place: Any, *, prepared: bool) -> tuple[float, float]:
    """Return the time held by the first snapshot, and by later ones (median of 5)."""
    agent = Agent("first", socket=place.socket)
    if prepared:
        agent.prepare(state)
        agent._link.handovers.slots.settle()  # a training would continue meanwhile
    held = []
    for step in range(6):
        pending = agent.snapshot(state, step=step)
        held.append(pending.stall)
        pending.wait("durable")
    agent.close()
    return held[0], statistics.median(held[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29512", rank=0, world_size=1)
    state = make_state(options.megabytes)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    print(f"state {nbytes / 1e9:.2f} GB in {len(state)} tensors, {torch.get_num_threads()} threads, {options.rounds} rounds, interleaved\n")
    results: dict[str, list[Times]] = defaultdict(list)
    sizes: dict[str, int] = {}
    with home() as zstd, home() as raw, home() as files:
        daemons = [Daemon(zstd, "--keep-last", "1").wait_ready(), Daemon(raw, "--keep-last", "1", "--codec", "raw").wait_ready()]
        agents = [Agent("bench", socket=zstd.socket), Agent("bench", socket=raw.socket)]
        for agent in agents:
            agent.prepare(state)
            agent._link.handovers.slots.settle()
        ways: dict[str, Callable[[dict[str, Any], Path], Times]] = {
            "ckptd (zstd)": ckptd_with(agents[0]),
            "ckptd (raw)": ckptd_with(agents[1]),
            "dcp.async_save": dcp_async_save,
            "dcp.save, 2 threads": dcp_save,
            "torch.save + fsync": torch_save,
        }
        for number in range(options.rounds + 1):
            for name, way in ways.items():
                path = files.path / f"{number}"
                times = way(state, path)
                if number:  # the first round warms up
                    results[name].append(times)
                if path.exists():
                    sizes[name] = sum(f.stat().st_size for f in path.rglob("*")) if path.is_dir() else path.stat().st_size
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        for agent, place, name in zip(agents, (zstd, raw), ("ckptd (zstd)", "ckptd (raw)"), strict=True):
            agent.close()
            sizes[name] = sum(f.stat().st_size for f in (place.root / "bench").rglob("*.ckpt"))
        print(f"{'':<22}{'held, median':>14}{'held, most':>13}{'total':>9}{'GB/s':>7}{'size':>7}{'held, ours (zstd) = 1':>24}")
        ours = statistics.median(held for held, _ in results["ckptd (zstd)"])
        for name, measured in results.items():
            held, total = statistics.median(h for h, _ in measured), statistics.median(t for _, t in measured)
            print(
                f"{name:<22}{held:>12.3f} s{max(h for h, _ in measured):>11.3f} s{total:>7.2f} s{nbytes / total / 1e9:>7.2f}"
                f"{sizes[name] / nbytes:>7.1%}{held / ours:>24.2f}"
            )
        print("\nfirst snapshot of a new trainer against later ones:")
        for prepared in (True, False):
            first, steady = first_and_steady(state, raw, prepared=prepared)
            word = "after prepare()" if prepared else "without prepare()"
            print(f"  {word:<18} first {first:.3f} s, later {steady:.3f} s: {first / steady:.2f} times (wanted after prepare: at most 2)")
        for daemon in daemons:
            daemon.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
