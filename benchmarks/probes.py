"""Measures one row of `benchmarks.perf` with the version of ckptd that Python finds:
`python benchmarks/probes.py ROW`.

It calls public names only, so that it also runs an earlier version. It prints one line
of JSON: for each figure the seconds of ckptd and of the peer, which moves the same
bytes right before, call by call; the bytes that the peer moves; and the CPU seconds and
the peak of memory of the trainer and of the daemon.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Pairs = list[tuple[float, float]]
"""The seconds of ckptd and of the peer, for each call."""
CALLS = 9


@contextmanager
def agent(*options: str) -> Iterator[Any]:
    """Context manager. Start a daemon, and return an agent of it."""
    from ckptd.agent import Agent

    with tempfile.TemporaryDirectory(prefix="ckptd-perf-") as place:
        command = [sys.executable, "-c", "from ckptd.daemon.commands.cli import main; main()"]
        places = ["--root", f"{place}/root", "--socket", f"{place}/s", "--state-dir", place]
        daemon = subprocess.Popen(
            [*command, "run", *places, "--keep-last", "1", *options], stderr=subprocess.DEVNULL
        )
        try:
            while not Path(place, "s").exists():
                time.sleep(0.01)
            made = Agent("perf", socket=f"{place}/s")
            yield made
            made.close()
        finally:
            daemon.terminate()
            daemon.wait()


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class State:
    """Tensors, warm memory for a plain copy of them, and a file for their bytes."""

    def __init__(self, count: int, elements: int) -> None:
        torch.manual_seed(0)
        self.tensors = {f"t{n}": torch.randn(elements, device="cpu") for n in range(count)}
        self._copies = [torch.empty_like(tensor) for tensor in self.tensors.values()]
        self.nbytes = 4 * count * elements
        self.step = 0
        self.copy()

    def change(self) -> None:
        torch._foreach_mul_(list(self.tensors.values()), 1.0001)
        self.step += 1

    def copy(self) -> None:
        torch._foreach_copy_(self._copies, list(self.tensors.values()))

    def write(self) -> None:
        """Write the bytes to a new file, and sync it and its directory."""
        with tempfile.TemporaryDirectory(prefix="ckptd-perf-") as place:
            with Path(place, "file").open("wb", buffering=0) as file:
                for tensor in self._copies:
                    file.write(tensor.numpy().tobytes())
                os.fsync(file.fileno())
            directory = os.open(place, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)


def snapshots(of: State, to: Any, persist: bool, peer: Callable[[], object]) -> Pairs:
    """Return the seconds of calls of `snapshot`, or until they are durable."""
    found = []
    for _ in range(CALLS):
        of.change()
        beside = timed(peer)

        def save() -> None:
            pending = to.snapshot(of.tensors, step=of.step, persist=persist)
            if persist:
                pending.wait("durable")

        found.append((timed(save), beside))
        time.sleep(0.1)  # the daemon looks at a sealed slot
    return found


def memory(count: int, elements: int) -> dict[str, Pairs]:
    """Measure snapshots to memory, and recoveries from it.

    The first snapshot is a single call, which only a large state makes worth a figure.
    """
    of = State(count, elements)
    with agent() as to:
        to.prepare(of.tensors)
        time.sleep(4)  # as long as a training trains before its first snapshot, at least
        first, *held = snapshots(of, to, False, of.copy)
        recovered = []
        for _ in range(CALLS):
            of.change()
            to.snapshot(of.tensors, step=of.step, persist=False).wait("sealed")
            time.sleep(0.1)
            beside = timed(of.copy)
            recovered.append((timed(lambda: to.recover(of.tensors)), beside))
            assert to.recover(of.tensors).source == "memory"
            time.sleep(0.1)
    figures = {"held": held, "recover": recovered}
    return figures | ({"first snapshot": [first]} if of.nbytes > 1 << 28 else {})


def storage(count: int, elements: int, codec: str) -> dict[str, Pairs]:
    """Measure the time until a snapshot is durable, beside a plain write."""
    of = State(count, elements)
    with agent("--codec", codec) as to:
        to.prepare(of.tensors)
        time.sleep(0.5)
        return {"durable": snapshots(of, to, True, of.write)[1:]}


def steps() -> dict[str, Pairs]:
    """Measure four steps of a training with a snapshot in the first, beside four without."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device="cpu") for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(512, 1024, device="cpu")

    def train() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

    train()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    found, pending = [], []
    with agent() as to:
        to.prepare(state)
        for step in range(CALLS):
            quiet = timed(train)

            def save(step: int = step) -> None:
                pending.append(to.snapshot(state, step=step))
                train()

            found.append((timed(save), quiet))
            pending[-1].wait("durable")
    return {"4 steps with a snapshot": found[1:]}


def start() -> dict[str, Pairs]:
    """Measure `import ckptd`, beside a Python that imports nothing."""

    def python(code: str) -> float:
        return timed(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    return {"import": [(python("import ckptd"), python("")) for _ in range(CALLS)]}


def idle() -> dict[str, Pairs]:
    """Measure the memory of an idle daemon in GB, beside a Python that imports nothing."""

    def own(pid: int) -> float:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1e6

    with agent():
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        with subprocess.Popen([sys.executable], stdin=subprocess.PIPE) as python:
            time.sleep(1)
            found = own(int(children[0])), own(python.pid)
            python.kill()
    return {"idle memory": [found]}


ROWS: dict[str, Callable[[], dict[str, Pairs]]] = {
    "15 tensors of 40 MB": lambda: memory(15, 10_000_000),
    "1 tensor of 4 kB": lambda: memory(1, 1000),
    "10,000 tensors of 256 B": lambda: memory(10_000, 64),
    "300 MB, raw": lambda: storage(15, 5_000_000, "raw"),
    "300 MB, planes": lambda: storage(15, 5_000_000, "planes"),
    "4 kB, raw": lambda: storage(1, 1000, "raw"),
    "a training of 300 MB": steps,
    "a process": start,
    "a daemon": idle,
}
"""The states, by name, with the function that measures their figures."""


def main() -> None:
    found = ROWS[sys.argv[1]]()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    said = {
        "figures": found,
        "cpu": sum(one.ru_utime + one.ru_stime for one in used),
        "peak": sum(one.ru_maxrss for one in used) * 1024,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
