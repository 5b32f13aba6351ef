"""Measures what a snapshot of 1, 4 and 16 GB on an accelerator costs the training, and
compares it with the bus and with DCP.

`python -m benchmarks.accelerator [--gigabytes 1 4 16] [--rounds N]`. For each size, in
one process and interleaved, it measures the CPU time held by `snapshot()`, by
`dcp.async_save` with its pinned stager, and by a blocking copy; the rate of the copy
(bytes over the time from the call until "sealed") and the rate of one large pinned
copy; and the time of the steps around a snapshot and of steps without one.

It exits with a message if there is no accelerator.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from ckptd.agent import Agent
from tests.support.daemons import home, running


class Training:
    """fp32 weights of a third of the size, and their two Adam moments.

    A step multiplies through every layer.
    """

    def __init__(self, gigabytes: float) -> None:
        width = 4096
        layers = max(1, round(gigabytes * 1e9 / 3 / 4 / width / width))
        self.device = torch.accelerator.current_accelerator()
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        ).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.data = torch.randn(2048, width, device=self.device)
        for _ in range(3):
            self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        return [
            *self.model.parameters(),
            *(v for s in self.optimizer.state.values() for v in s.values() if v.numel() > 1),
        ]

    def step(self) -> None:
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, steps: int) -> list[float]:
        """Return the seconds of each step. The end of the step waits for the device."""
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            self.step()
            torch.accelerator.synchronize()
            times.append(time.perf_counter() - begun)
        return times


def bus_rate(device: torch.device) -> float:
    """Return the rate of one large copy into pinned memory, in GB/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(5):
        torch.accelerator.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        rates.append(source.nbytes / 1e9 / (time.perf_counter() - begun))
    return max(rates)


def measure(gigabytes: float, rounds: int) -> None:
    training = Training(gigabytes)
    total = sum(tensor.nbytes for tensor in training.tensors())
    assert training.device is not None
    rate = bus_rate(training.device)
    held, copied, blocking, dcp, around = [], [], [], [], []
    host = [
        torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in training.tensors()
    ]
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=True,
        )
    )
    with (
        home() as place,
        running(place, "--codec", "raw") as _,
        tempfile.TemporaryDirectory() as other,
    ):
        agent = Agent("bench", socket=place.socket)
        agent.prepare(training.state)
        quiet = training.timed(10)
        for step in range(rounds + 1):
            torch.accelerator.synchronize()
            begun = time.perf_counter()
            pending = agent.snapshot(training.state, step=step, persist=False)
            steps = training.timed(3)
            pending.wait("sealed")
            sealed = time.perf_counter() - begun
            torch.accelerator.synchronize()
            begun = time.perf_counter()
            torch._foreach_copy_(host, [tensor.detach() for tensor in training.tensors()])
            torch.accelerator.synchronize()
            now = time.perf_counter()
            flat = {
                str(number): tensor.detach() for number, tensor in enumerate(training.tensors())
            }
            saving = async_save(
                flat, storage_writer=FileSystemWriter(f"{other}/{step}"), async_stager=stager
            )
            taken = time.perf_counter() - now
            assert isinstance(saving, AsyncSaveResponse)
            saving.upload_completion.result()
            if step:  # the first call of each kind allocates its buffers
                held.append(pending.stall)
                copied.append(total / 1e9 / sealed)
                blocking.append(now - begun)
                dcp.append(taken)
                around.append(sum(steps) - 3 * statistics.median(quiet))
        agent.close()
    stager.close()
    print(
        f"{total / 1e9:6.1f} GB  held {1000 * statistics.median(held):8.2f} ms  dcp.async_save "
        f"{1000 * statistics.median(dcp):8.2f} ms  "
        f"blocking copy {1000 * statistics.median(blocking):8.2f} ms  copy "
        f"{statistics.median(copied):5.1f} of {rate:5.1f} GB/s  "
        f"three steps around it {1000 * statistics.median(around):+8.2f} ms (a step: "
        f"{1000 * statistics.median(quiet):.2f} ms)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        sys.exit("no accelerator here: this benchmark needs one")
    place = tempfile.mkdtemp()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{place}/store", rank=0, world_size=1
    )
    for gigabytes in options.gigabytes:
        measure(gigabytes, options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
