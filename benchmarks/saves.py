"""Measures how long a save holds the training, and how long it takes until it is
durable: ckptd, its peers, and the machine's limits.

`python -m benchmarks.saves [--copies N] [--rounds N]`. The state is a trained model and
its moments (`trained.py`), several times over, in fp32. All ways run in one process on
the same bytes, in another order each round. Every tensor changes between the rounds,
and each measurement starts with an idle disk. "held" is the time until the call
returns. "durable" begins when the state has been copied, which for ckptd is the seal,
and ends when the bytes are synced.

Limits: a copy into memory that is there already, and an O_DIRECT write of the same
bytes from shared memory, 16 MiB at a time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
import warnings
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, save

from benchmarks.rows import Row, keep, settled
from benchmarks.trained import trained
from ckptd.agent import Agent
from ckptd.agent.bench.ways import (
    DirectWrite,
    PlainCopy,
    State,
    Times,
    Way,
    WithAgent,
    by_dcp_async_save,
    by_dcp_save,
    by_torch_save,
    timed,
)
from tests.support.daemons import Daemon, home


def copies_of(state: dict[str, State], copies: int) -> State:
    """Return the tensors of a state several times over, as memory of their own, each
    under a name of its own.
    """
    return {
        f"{copy}.{kind}.{name}": t.clone()
        for copy in range(copies)
        for kind, named in state.items()
        for name, t in named.items()
    }


def change(state: State) -> None:
    """Change nearly every bit of the mantissas, and hardly the statistics."""
    torch._foreach_mul_(list(state.values()), 1.0001)


def dcp_zstandard(state: State, path: Path) -> Times:
    taken = timed(
        lambda: save(
            state, storage_writer=FileSystemWriter(path, thread_count=2, _extensions=[ZStandard()])
        )
    )
    return taken, taken


class TorchCheckpointing:
    """The asynchronous save of torch_checkpointing (`pip install torch-checkpointing`),
    which copies on this thread and writes in a child.

    It writes with O_DIRECT by default, which fails on ext4 for files of most sizes, so
    here it writes through the page cache. It syncs nothing, so the sync of its files is
    added.
    """

    def __init__(self) -> None:
        peer, staging = (
            import_module("torch_checkpointing"),
            import_module("torch_checkpointing.staging"),
        )
        files = import_module("torch_checkpointing.storage.filesystem")
        stager = staging.CheckpointStagerConfig(
            use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._manager = peer.CheckpointManager(
            peer.CheckpointManager.Config(
                save=peer.AsyncCheckpointSaverConfig(staging_config=stager),
                storage_config=files.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def __call__(self, state: State, path: Path) -> Times:
        begun = time.perf_counter()
        saving = self._manager.save(str(path), {"state": state})
        held = time.perf_counter() - begun
        saving.result()
        for file in path.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return held, time.perf_counter() - begun - held

    def close(self) -> None:
        self._manager.close()


class Orbax:
    """The asynchronous save of orbax (`pip install orbax-checkpoint`), which has no way to
    save tensors of torch: it is given NumPy arrays over their memory. It copies them on
    this thread, and syncs what it writes.
    """

    def __init__(self) -> None:
        peer = import_module("orbax.checkpoint")
        self._checkpointer = peer.AsyncCheckpointer(peer.PyTreeCheckpointHandler())

    def __call__(self, state: State, path: Path) -> Times:
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        begun = time.perf_counter()
        self._checkpointer.save(path, arrays)
        held = time.perf_counter() - begun
        self._checkpointer.wait_until_finished()
        return held, time.perf_counter() - begun - held

    def close(self) -> None:
        self._checkpointer.close()


def most_memory(pid: int) -> float:
    """Return the most memory that a process has had, in MB.

    The slots do not count: the daemon reads them, and does not map them.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        * 1024
        / 1e6
    )


def measured(
    state: State, rounds: int, codecs: tuple[str, ...]
) -> tuple[dict[str, list[Times]], dict[str, int], float, float]:
    """Return the times of every way, the bytes that each one stores, the seconds held
    by ckptd's first snapshot after `prepare`, and the most memory of a daemon in MB.
    """
    nbytes = sum(tensor.nbytes for tensor in state.values())
    results, sizes = defaultdict[str, list[Times]](list), dict[str, int]()
    stack = ExitStack()
    opened = [stack.enter_context(home()) for _ in codecs]
    daemons = [
        Daemon(place, "--keep-last", "1", "--codec", codec).wait_ready()
        for place, codec in zip(opened, codecs, strict=True)
    ]
    for daemon in daemons:
        stack.callback(daemon.stop)
    agents = [Agent("bench", socket=place.socket) for place in opened]
    for agent in agents:
        agent.prepare(state)
        agent._link.handovers.slots.wait()  # a training would continue meanwhile
    ways: dict[str, Way] = {
        **{f"ckptd {codec}": WithAgent(agent) for codec, agent in zip(codecs, agents, strict=True)},
        "plain copy": PlainCopy(state),
        "O_DIRECT write": DirectWrite(nbytes),
        "torch.save": by_torch_save,
        "dcp.save": by_dcp_save,
        "dcp.save + ZStandard": dcp_zstandard,
        "dcp.async_save, thread": by_dcp_async_save,
        "dcp.async_save, process": partial(
            by_dcp_async_save, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        ),
    }
    # Without an accelerator, torch pins no memory, and its pinned stager is the other one.
    for kind, pinned in (("shared", False), ("pinned", True))[: 1 + torch.cuda.is_available()]:
        stager = DefaultStager(StagingOptions(pinned, True, False, False))
        stack.callback(stager.close)
        ways[f"dcp.async_save, cached {kind} stager"] = partial(
            by_dcp_async_save, async_stager=stager
        )
    for package, peer in (
        ("torch_checkpointing", TorchCheckpointing), ("orbax", Orbax),
    ):  # fmt: skip
        if find_spec(package):
            made = peer()
            stack.callback(made.close)
            ways[package] = made
    first = 0.0
    with home() as files:
        for number in range(rounds + 1):
            change(state)
            # No way always follows the same other one.
            for name in Random(number).sample(list(ways), len(ways)):
                way = ways[name]
                settled()
                path = files.path / "file"
                times = way(state, path)
                if number:  # the first round warms up
                    results[name].append(times)
                elif name == "ckptd raw":
                    first = times[0]
                if path.exists():
                    sizes[name] = (
                        sum(f.stat().st_size for f in path.rglob("*"))
                        if path.is_dir()
                        else path.stat().st_size
                    )
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for agent, place, codec in zip(agents, opened, codecs, strict=True):
        agent.close()
        sizes[f"ckptd {codec}"] = sum(
            f.stat().st_size for f in (place.root / "bench").rglob("*.ckpt")
        )
    most = max(most_memory(daemon.process.pid) for daemon in daemons)
    stack.close()
    return {name: results[name] for name in ways}, sizes, first, most


def rows_of(
    results: dict[str, list[Times]], sizes: dict[str, int], first: float, most: float, nbytes: int
) -> list[Row]:
    held = {name: median([time for time, _ in times]) for name, times in results.items()}
    durable = {name: median([time for _, time in times]) for name, times in results.items()}
    best_stager = min(time for name, time in held.items() if "async_save" in name)
    peer = {
        name: time for name, time in durable.items() if name in ("torch_checkpointing", "orbax")
    }
    raw, copy, direct = held["ckptd raw"], held["plain copy"], durable["O_DIRECT write"]
    return [
        Row(name="held, steady / plain "
            "copy", value=raw / copy, unit="x", limit=1.10, beside={"seconds": raw, "copy "
                "s": copy}),
        Row(name="held, steady / best stager of "
            "dcp.async_save", value=raw / best_stager, unit="x", limit=0.5, beside=held),
        Row(name="held, first after prepare / "
            "steady", value=first / raw, unit="x", limit=1.5, beside={"seconds": first}),
        Row(name="seal to durable, raw / O_DIRECT "
            "write", value=durable["ckptd raw"] / direct, unit="x", limit=1.10, beside=durable),
        Row(name="dcp.save / seal to durable, "
            "raw", value=durable["dcp.save"] / durable["ckptd "
                "raw"], unit="x", limit=2.5, at_most=False),
        *(
            Row(name=f"{name} / seal to durable, "
                f"raw", value=time / durable["ckptd raw"], unit="x", beside={"held s": held[name]})
            for name, time in peer.items()
        ),
        Row(
            name="dcp.save + ZStandard / seal to durable, planes",
            value=durable["dcp.save + "
                "ZStandard"] / durable["ckptd planes"], unit="x", limit=2.5, at_most=False,
        ),
        Row(name="memory of the daemon beyond the slots, most", value=most, unit="MB", limit=200.0),
        Row(name="stored size, "
            "planes", value=sizes["ckptd "
                "planes"] / nbytes, unit="", beside={n: s / nbytes for n, s in sizes.items()}),
    ]  # fmt: skip


def state_and_rounds(description: str | None) -> tuple[State, int]:
    """Read `--copies` and `--rounds` from the command line.

    Return the state with so many copies, and the number of rounds.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    state = copies_of(trained().state(), options.copies)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    print(
        f"state {nbytes / 1e9:.2f} GB in {len(state)} tensors, {torch.get_num_threads()} threads, "
        f"{options.rounds} rounds"
    )
    return state, options.rounds


def main() -> None:
    state, rounds = state_and_rounds(__doc__)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29512", rank=0, world_size=1)
    keep(
        rows_of(
            *measured(state, rounds, ("raw", "planes")),
            sum(tensor.nbytes for tensor in state.values()),
        ),
        "saves",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
