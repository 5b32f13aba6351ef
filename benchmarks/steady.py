"""What a snapshot costs in steady state beyond `state_dict()` and the copy, and for how long the agent's threads hold the GIL.

`python -m benchmarks.steady [--rounds N] [--ranks N]`. The tensors are small (64 elements), so that counting them costs more than copying
them. Held time, the state dicts and the same copy are measured alternately in one process, and medians subtracted. Store operations are
those of all snapshots after the first: they must be 0.

The GIL: the training thread does nothing but look at the clock; a gap between two looks is time in which something else ran. Beside it
stands the same loop without ckptd, with another process as busy as the daemon.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ckptd.agent import Agent
from tests.support.daemons import home, running
from tests.support.ranks import HERE, Ranks

TENSORS = (1_000, 10_000)


def plain(count: int) -> dict[str, Any]:
    return {f"layers.{number}.weight": torch.randn(64) for number in range(count)}


def objects(count: int) -> dict[str, Any]:
    """A module and an optimizer that has stepped: a weight, and three tensors of state for each."""
    model = torch.nn.ModuleList(torch.nn.Linear(64, 1, bias=False) for _ in range(count // 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def dicts(state: dict[str, Any]) -> None:
    """What the caller would pay for the state dicts alone."""
    for value in state.values():
        if hasattr(value, "state_dict"):
            value.state_dict()


def median(times: list[float]) -> float:
    return 1000 * statistics.median(times)


def cost(socket: Path, kind: str, count: int, rounds: int) -> tuple[float, float, float, int]:
    """Milliseconds held, in the state dicts and in the copy; store operations after the first snapshot."""
    torch.set_num_threads(1)
    agent = Agent(f"{kind}-{count}", socket=socket)
    state = (plain if kind == "tensors" else objects)(count)
    targets, sources = [[torch.empty(64) for _ in range(count)] for _ in range(2)]
    held, in_dicts, in_copy, before = [], [], [], 0
    for step in range(rounds + 2):
        pending = agent.snapshot(state, step=step, persist=False)
        pending.wait("sealed")
        begun = time.perf_counter()
        dicts(state)
        then = time.perf_counter()
        torch._foreach_copy_(targets, sources)
        if step >= 2:
            held.append(pending.stall)
            in_dicts.append(then - begun)
            in_copy.append(time.perf_counter() - then)
        else:
            before = agent._ranks.operations
        time.sleep(0.05)  # the daemon has looked at the slot
    operations = agent._ranks.operations - before
    pending.wait("sealed")
    agent.close()
    return median(held), median(in_dicts), median(in_copy), operations


def on_a_rank(*arguments: Any) -> tuple[float, float, float, int]:
    HERE.clear()
    return cost(*arguments)


def gaps(seconds: float) -> tuple[float, float]:
    """The longest time between two looks at the clock, and the sum of those above 1 ms, in milliseconds."""
    longest = total = 0.0
    last = begun = time.perf_counter()
    while last - begun < seconds:
        now = time.perf_counter()
        longest = max(longest, now - last)
        total += now - last if now - last > 0.001 else 0.0
        last = now
    return 1000 * longest, 1000 * total


def spin() -> None:
    while True:
        sum(range(10_000))


def hold(socket: Path) -> None:
    torch.set_num_threads(1)
    state = {f"{number}": torch.randn(1 << 20) for number in range(128)}  # 0.5 GB
    other = mp.get_context("spawn").Process(target=spin, daemon=True)
    other.start()
    print(f"{'gaps of the training thread in 2 s':44s} {'longest':>10s} {'above 1 ms':>11s}")
    for _ in range(3):
        show("without ckptd, another process busy", gaps(2))
    other.kill()
    agent = Agent("gil", socket=socket)
    agent.prepare(state)
    show("while slots of 0.5 GB are prepared", gaps(2))
    for step in range(3):
        agent.snapshot(state, step=step)
        show("while a snapshot of 0.5 GB is saved", gaps(2))
    agent.close()


def show(what: str, found: tuple[float, float]) -> None:
    print(f"{what:44s} {found[0]:7.2f} ms {found[1]:8.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(
        f"{'tensors':>8s} {'given as':>12s} {'ranks':>6s} {'held':>10s} {'state_dict()':>13s} {'copy':>10s} {'the rest':>10s} {'store':>6s}"
    )
    for ranks in (1, options.ranks):
        with home() as place, running(place), Ranks(ranks) as processes:
            for count in TENSORS:
                for kind in ("tensors", "objects"):
                    found = processes.call(on_a_rank, place.socket, kind, count, options.rounds, timeout=600)
                    held, in_dicts, in_copy, _ = found[0]
                    if ranks > 1:
                        in_copy /= ranks  # replicated: each rank copies its share
                    rest, operations = held - in_dicts - in_copy, sum(one[3] for one in found)
                    times = f"{held:7.2f} ms {in_dicts:10.2f} ms {in_copy:7.2f} ms {rest:7.2f} ms"
                    print(f"{count:8,d} {kind:>12s} {ranks:6d} {times} {operations:6d}", flush=True)
    with home() as place, running(place):
        hold(place.socket)


if __name__ == "__main__":
    main()
