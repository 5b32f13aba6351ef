"""Measures what a checkpoint costs if 99 % of the state has not changed since the
checkpoint before, as in fine-tuning with LoRA.

`python -m benchmarks.frozen [--copies N] [--rounds N]`. The state is that of
`saves.py`, with another tensor of a hundredth of its bytes. Only that tensor changes.
In each round a new job saves the state twice. "seconds" begins when the state has been
copied, and ends when it is durable. `dcp.save` stores everything each time, and is
measured beside it.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.rows import Row, keep, settled
from benchmarks.saves import state_and_rounds
from ckptd.agent import Agent
from ckptd.agent.bench.ways import State, WithAgent, timed
from tests.support.daemons import home, running


def measured(state: State, adapter: torch.Tensor, codec: str) -> tuple[list[float], list[int]]:
    """Return the seconds and the bytes on the disk of a first and a second checkpoint."""
    seconds, sizes = [], []
    with home() as place, running(place, "--codec", codec):
        agent = Agent("bench", socket=place.socket)
        agent.prepare(state)
        agent._link.handovers.slots.wait()
        ckptd = WithAgent(agent)
        for _ in range(2):
            adapter.mul_(1.0001)
            settled()
            before = on_disk(place.root)
            seconds.append(ckptd(state, place.root)[1])
            sizes.append(on_disk(place.root) - before)
        agent.close()
    return seconds, sizes


def on_disk(root: Path) -> int:
    """Return the bytes that the files below a directory take, each file once."""
    found = [path.stat() for path in root.rglob("*.ckpt")]
    return sum({status.st_ino: 512 * status.st_blocks for status in found}.values())


def main() -> None:
    state, rounds = state_and_rounds(__doc__)
    adapter = torch.randn(sum(tensor.numel() for tensor in state.values()) // 100)
    state["adapter"] = adapter
    times, ratios = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for _ in range(rounds):
        for codec in ("raw", "auto", "planes"):
            seconds, sizes = measured(state, adapter, codec)
            times[f"{codec}, first"].append(seconds[0])
            times[f"{codec}, second"].append(seconds[1])
            ratios[codec].append(sizes[1] / sizes[0])
        with home() as place:
            settled()
            times["dcp.save"].append(
                timed(
                    lambda: save(
                        state,
                        storage_writer=FileSystemWriter(place.path / "dcp", thread_count=2),
                        no_dist=True,
                    )
                )
            )
    taken = {name: median(found) for name, found in times.items()}
    rows = []
    for codec, found in ratios.items():
        rows.append(
            Row(
                name=f"99 % frozen, {codec}: bytes of the second / first",
                value=median(found),
                unit="x",
                limit=0.03,
            )
        )
        share = taken[f"{codec}, second"] / taken[f"{codec}, first"]
        rows.append(
            Row(
                name=f"99 % frozen, {codec}: seconds of the second / first",
                value=share,
                unit="x",
                limit=0.2,
                beside=taken,
            )
        )
    keep(rows, "frozen")


if __name__ == "__main__":
    main()
