"""Measures what a snapshot costs in steady state beyond `state_dict()` and the copy,
and how long the agent's threads hold the GIL.

`python -m benchmarks.steady [--rounds N] [--ranks N]`. The tensors are small (64
elements), so that handling them costs more than copying them. The time held, and the
time of the state dicts and of the same copy, are measured alternately in one process,
each after a pause, and the medians are subtracted. Store operations are those of all
snapshots after the first: they must be 0. A trainer of one rank has one core, and the
daemon has the others. Several ranks run where the system puts them.

The GIL: the training thread only reads the clock. A gap between two readings is time in
which something else ran. The daemon runs on other cores, so this is the agent or the
system. "CPU" is the CPU time of the trainer's other threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.rows import Row, keep
from ckptd.agent import Agent
from tests.support.daemons import home, running
from tests.support.ranks import HERE, Ranks

TENSORS = (1_000, 10_000)
PAUSE = 0.05  # as after a training step: the caches are cold, and the daemon is done with the slot


def plain(count: int) -> dict[str, Any]:
    return {f"layers.{number}.weight": torch.randn(64) for number in range(count)}


def objects(count: int) -> dict[str, Any]:
    """Return a module and an optimizer that has stepped: one weight and three tensors
    of state for each parameter.
    """
    model = torch.nn.ModuleList(torch.nn.Linear(64, 1, bias=False) for _ in range(count // 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def dicts(state: dict[str, Any]) -> None:
    """Make the state dicts alone, which the caller would pay for in any case."""
    for value in state.values():
        if hasattr(value, "state_dict"):
            value.state_dict()


def median(times: list[float]) -> float:
    return 1000 * statistics.median(times)


def cost(socket: Path, kind: str, count: int, rounds: int) -> tuple[float, float, float, int]:
    """Return the milliseconds held, those of the state dicts and of the copy, and the
    store operations after the first snapshot.
    """
    torch.set_num_threads(1)
    agent = Agent(f"{kind}-{count}", socket=socket)
    state = (plain if kind == "tensors" else objects)(count)
    targets, sources = [[torch.empty(64) for _ in range(count)] for _ in range(2)]
    held, in_dicts, in_copy, before = [], [], [], 0
    for step in range(rounds + 2):
        time.sleep(PAUSE)
        pending = agent.snapshot(state, step=step, persist=False)
        pending.wait("sealed")
        time.sleep(PAUSE)
        begun = time.perf_counter()
        dicts(state)
        then = time.perf_counter()
        torch._foreach_copy_(targets, sources)
        if step >= 2:
            held.append(pending.stall)
            in_dicts.append(then - begun)
            in_copy.append(time.perf_counter() - then)
        else:
            before = agent._link.ranks.operations
    operations = agent._link.ranks.operations - before
    pending.wait("sealed")
    agent.close()
    return median(held), median(in_dicts), median(in_copy), operations


def on_a_rank(daemon: int | None, *arguments: Any) -> tuple[float, float, float, int]:
    HERE.clear()
    if daemon is not None:
        apart(daemon)
    return cost(*arguments)


def gaps(seconds: float) -> tuple[float, float]:
    """Return the longest time between two readings of the clock, and the sum of the
    times above 1 ms, in milliseconds.
    """
    longest = total = 0.0
    last = begun = time.perf_counter()
    while last - begun < seconds:
        now = time.perf_counter()
        longest = max(longest, now - last)
        total += now - last if now - last > 0.001 else 0.0
        last = now
    return 1000 * longest, 1000 * total


def others() -> float:
    """Return the milliseconds of CPU that the other threads of this process have used."""
    return 1000 * (time.process_time() - time.thread_time())


def apart(daemon: int) -> None:
    """Pin this process to one core, and the daemon to the others."""
    first, *rest = sorted(os.sched_getaffinity(0))
    for thread in psutil.Process(daemon).threads():
        os.sched_setaffinity(thread.id, rest or [first])
    os.sched_setaffinity(0, {first})


def hold(socket: Path, daemon: int) -> None:
    torch.set_num_threads(1)
    apart(daemon)
    state = {f"{number}": torch.randn(1 << 20) for number in range(128)}  # 0.5 GB
    print(
        f"{'gaps of the training thread in 2 s':40s} {'longest':>10s} {'above 1 ms':>12s} "
        f"{'CPU':>10s}"
    )
    show("without ckptd")
    show("without ckptd")
    agent = Agent("gil", socket=socket)
    agent.prepare(state)
    show("while slots of 0.5 GB are prepared")
    for step in range(3):
        agent.snapshot(state, step=step)
        show("while a snapshot of 0.5 GB is saved")
    agent.close()


def show(what: str) -> None:
    before = others()
    longest, total = gaps(2)
    print(f"{what:40s} {longest:7.2f} ms {total:9.1f} ms {others() - before:7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(
        f"{'tensors':>8s} {'given as':>12s} {'ranks':>6s} {'held':>10s} {'state_dict()':>13s} "
        f"{'copy':>10s} {'the rest':>10s} {'store':>6s}"
    )
    rows = []
    for ranks in (1, options.ranks):
        with home() as place, running(place) as daemon, Ranks(ranks) as processes:
            elsewhere = daemon.process.pid if ranks == 1 else None
            for count in TENSORS:
                for kind in ("tensors", "objects"):
                    found = processes.call(
                        on_a_rank, elsewhere, place.socket, kind, count, options.rounds, timeout=600
                    )
                    held, in_dicts, in_copy, _ = found[0]
                    if ranks > 1:
                        in_copy /= ranks  # replicated: each rank copies its share only
                    rest, operations = held - in_dicts - in_copy, sum(one[3] for one in found)
                    times = f"{held:7.2f} ms {in_dicts:10.2f} ms {in_copy:7.2f} ms {rest:7.2f} ms"
                    if count == 1000:
                        rows.append(Row(
                            name=f"1,000 {kind}, {ranks} ranks: held beyond state_dict() and "
                                f"copy", value=rest, unit="ms", limit=1.5,
                            beside={"held": held, "state_dict()": in_dicts, "copy": in_copy},
                        ))  # fmt: skip
                    print(f"{count:8,d} {kind:>12s} {ranks:6d} {times} {operations:6d}", flush=True)
    with home() as place, running(place) as daemon:
        hold(place.socket, daemon.process.pid)
    keep(rows, "steady")


if __name__ == "__main__":
    main()
