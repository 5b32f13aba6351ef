"""Measures what a reader of the newest snapshot costs: the time from the seal until a
module has the weights, and the time that the training loses; and the bytes that a reader
elsewhere fetches.

`python -m benchmarks.readers [--mib N] [--rounds N]`. A process of its own follows the
job into a module, and says when it has each version. The plain copy has the same bytes,
in the same process and round. Steps of the training with and without a reader
alternate in pairs; a step computes on one core, and every fourth one is snapshotted. The
reader elsewhere follows the root, where the weights of two steps of a fine-tuning are saved
in turns; all bytes that its process reads are counted.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from benchmarks.delta_states import fine_tuning
from benchmarks.rows import Row, keep
from ckptd.agent import Agent, Checkpoint, follow
from ckptd.shared.formats.reuse import MOST_IN_CHAIN
from tests.support.daemons import Home, home, running
from tests.support.forks import context

LAYERS = 16
EVERY = 4


def build(mib: int) -> nn.Module:
    width = int((mib * (1 << 20) / 4 / LAYERS) ** 0.5)
    return nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))


def read(socket: Path, mib: int, pipe: Connection) -> None:
    """Follow the job, and send the time at which the module has each version."""
    torch.set_num_threads(1)
    module = build(mib)
    for version in follow("job", into=module, socket=socket):
        pipe.send((version.step, time.monotonic()))


def copied(source: nn.Module, target: nn.Module) -> float:
    begun = time.perf_counter()
    with torch.no_grad():
        for one, other in zip(source.parameters(), target.parameters(), strict=True):
            other.copy_(one)
    return time.perf_counter() - begun


def loaded(socket: Path, target: nn.Module, *, staged: bool) -> float:
    with Checkpoint.newest_in_memory("job", socket=socket) as found:
        begun = time.perf_counter()
        found.load_into(target, staged=staged)
        return time.perf_counter() - begun


def loads(socket: Path, mib: int, rounds: int) -> list[Row]:
    model, target, agent = build(mib), build(mib), Agent("job", socket=socket)
    times: dict[str, list[float]] = {"plain": [], "into": [], "staged": []}
    for step in range(rounds + 1):
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(1e-3)
        agent.snapshot({"model": model}, step=step).wait("durable")
        ways = [
            ("plain", lambda: copied(model, target)),
            ("into", lambda: loaded(socket, target, staged=False)),
            ("staged", lambda: loaded(socket, target, staged=True)),
        ]
        for name, way in ways[step % 3 :] + ways[: step % 3]:
            seconds = way()
            if step:  # the first round faults the memory in
                times[name].append(seconds)
    agent.close()
    plain, into, staged = (statistics.median(times[name]) for name in ("plain", "into", "staged"))
    beside = {"plain": plain, "into": into, "staged": staged}
    return [
        Row(name="load_into, straight / plain copy", value=into / plain, unit="x", limit=1.3,
            beside=beside),
        Row(name="load_into, staged / plain copy", value=staged / plain, unit="x"),
    ]  # fmt: skip


def steps(socket: Path, mib: int, rounds: int) -> list[Row]:
    """Measure steps of a training with a reader that follows it, and with one that is
    stopped by SIGSTOP, in turn.
    """
    torch.set_num_threads(1)
    model, agent = build(mib), Agent("job", socket=socket)
    ours, theirs = context().Pipe()
    reader = context().Process(target=read, args=(socket, mib, theirs), daemon=True)
    reader.start()
    assert reader.pid is not None
    batch, step = torch.randn(64, next(model.parameters()).shape[0]), 0
    sealed: dict[int, float] = {}
    lags: list[float] = []

    def some() -> float:
        nonlocal step
        begun = time.perf_counter()
        for _ in range(EVERY):
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.add_((batch.T @ (batch @ tensor))[: len(tensor)], alpha=-1e-9)
            step += 1
        agent.snapshot({"model": model}, step=step, persist=False).wait("sealed")
        sealed[step] = time.monotonic()
        return time.perf_counter() - begun

    some()
    ours.recv()
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        took = {}
        for stopped in (number % 2 == 0, number % 2 == 1):
            os.kill(reader.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            took[stopped] = some()
            while ours.poll(0 if stopped else 0.2):
                version, when = ours.recv()
                if version == step and not stopped:
                    lags.append(when - sealed[step])
        pairs.append((took[False], took[True]))
    os.kill(reader.pid, signal.SIGKILL)
    reader.join()
    agent.close()
    ratio = statistics.median(with_ / without for with_, without in pairs)
    return [
        Row(name="step with a reader / without, over all", value=100 * (ratio - 1), unit="%",
            limit=2.0),
        Row(name="sealed to loaded by another process", value=statistics.median(lags or [0.0]),
            unit="s"),
    ]  # fmt: skip


def fetches(place: Home) -> list[Row]:
    """Measure what a reader of the root reads for a checkpoint that is stored as deltas."""
    weights = [state.weights for state in fine_tuning()[-2:]]
    raw = sum(tensor.nbytes for tensor in weights[0].values())
    agent = Agent("job", socket=place.socket)
    shares = list[float]()
    with follow("job", root=place.root, keys="*", interval=0.05) as versions:
        for step in range(MOST_IN_CHAIN + 3):
            agent.snapshot({"model": weights[step % 2]}, step=step, rng=False).wait("durable")
            before = _bytes_read()
            found = next(versions).tensors()
            shares.append((_bytes_read() - before) / raw)
            assert all(torch.equal(found[f"model.{k}"], v) for k, v in weights[step % 2].items())
    agent.close()
    return [
        Row(name="elsewhere, weights at RL rates: read / raw", value=statistics.median(shares),
            unit="x", limit=0.03, beside={"the first": shares[0], "the last": shares[-1]}),
    ]  # fmt: skip


def _bytes_read() -> int:
    """Return the bytes that this process has read by system calls, from any file."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    rows: list[Row] = []
    for measure in (loads, steps):
        with home() as place, running(place):
            rows += measure(place.socket, given.mib, given.rounds)
    with home() as place, running(place, "--keep-last", "0"):
        rows += fetches(place)
    keep(rows, "readers")


if __name__ == "__main__":
    main()
