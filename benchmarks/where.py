"""Measures where the time of a snapshot, a save and a recovery goes: each step by
itself, beside the whole.

`python -m benchmarks.where [--copies N] [--rounds N]`. The state is that of `saves.py`.
The steps of the agent are timed where they run; `ckptd bench` prints those of a snapshot
for each call, tensor and MB. Those of the daemon are repeated here with its own functions
and as many threads, one step at a time, so that their sum is longer than a save, which
does them at the same time. `docs/explanation/where-time-goes.md` explains the result.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from crc32c import crc32c

from benchmarks.rows import Row, keep, settled
from benchmarks.saves import state_and_rounds
from ckptd.agent import Agent
from ckptd.agent.bench.budget import STEPS, timing
from ckptd.agent.bench.ways import DirectWrite, PlainCopy, State, timed
from ckptd.agent.read.saved import Reads
from ckptd.agent.read.slot_source import SlotSource
from ckptd.shared.codecs.codec import encoder
from ckptd.shared.formats.binary import PIECE
from ckptd.shared.formats.plan import DEFAULT_CHUNK
from ckptd.shared.formats.reuse import new_hasher
from ckptd.shared.system.fs import read_exactly
from tests.support.daemons import home, running

RECOVERY = {
    "read, verify and copy": (Reads, "run"),
    "open and check the slots": (SlotSource, "__init__"),
}


def daemon_steps(state: State) -> dict[str, float]:
    """Return the seconds that each step of a save takes by itself, with as many threads
    as a daemon has here.
    """
    threads, nbytes = min(8, os.cpu_count() or 1), sum(tensor.nbytes for tensor in state.values())
    slot = os.memfd_create("slot")
    data = torch.cat([tensor.flatten() for tensor in state.values()]).numpy().view("uint8")
    os.truncate(slot, len(data))
    for start in range(0, len(data), 1 << 30):
        os.pwrite(slot, data[start : start + (1 << 30)].tobytes(), start)
    planes = encoder("planes")
    buffers = defaultdict[int, list[mmap.mmap]](
        lambda: [mmap.mmap(-1, DEFAULT_CHUNK), mmap.mmap(-1, DEFAULT_CHUNK)]
    )

    def each(work: Callable[[memoryview, memoryview, int], object]) -> float:
        def one(start: int) -> None:
            raw, stored = (
                memoryview(buffer) for buffer in buffers[start // DEFAULT_CHUNK % (2 * threads)]
            )
            work(raw[: min(DEFAULT_CHUNK, len(data) - start)], stored, start)

        with ThreadPoolExecutor(threads) as pool:
            return timed(lambda: list(pool.map(one, range(0, len(data), DEFAULT_CHUNK))))

    def pieces(chunk: memoryview, start: int, *use: Callable[[memoryview], object]) -> None:
        for at in range(0, len(chunk), PIECE):
            piece = chunk[: min(PIECE, len(chunk) - at)]
            read_exactly(slot, piece, start + at)
            for function in use:
                function(piece)

    with home() as place:
        write = DirectWrite(nbytes)
        settled()
        found = {
            "read the slot": each(lambda raw, _, start: pieces(raw, start)),
            "and checksums": each(lambda raw, _, start: pieces(raw, start, crc32c)),
            "and digests": each(
                lambda raw, _, start: pieces(raw, start, crc32c, new_hasher().update)
            ),
            "encode, planes": each(
                lambda raw, stored, start: (
                    read_exactly(slot, raw, start),
                    planes.encode(raw, 4, stored[: len(raw)]),
                )
            ),
            "write": write(state, place.path / "file")[1],
        }
    os.close(slot)
    return found


def main() -> None:
    state, rounds = state_and_rounds(__doc__)
    times, copy = defaultdict[str, list[float]](list), PlainCopy(state)
    with home() as place, running(place, "--codec", "raw", "--keep-last", "1"):
        agent = Agent("bench", socket=place.socket)
        agent.prepare(state)
        agent._link.handovers.slots.wait()
        for step in range(rounds + 1):
            torch._foreach_mul_(list(state.values()), 1.0001)
            settled()
            with timing(STEPS) as found:
                pending = agent.snapshot(state, step=step)
                pending.wait("sealed")
            sealed = time.perf_counter()
            pending.wait("durable")
            found |= {"snapshot": pending.stall, "save, raw": time.perf_counter() - sealed}
            with timing(RECOVERY) as steps:
                recovered = agent.recover(state)
            assert recovered is not None
            assert recovered.source == "memory"
            found |= steps | {"recovery from memory": recovered.seconds}
            if step:  # the first round warms up
                found |= {"plain copy": copy(state, place.path)[0]} | daemon_steps(state)
                for name, seconds in found.items():
                    times[name].append(seconds)
        agent.close()
    keep(
        [Row(name=name, value=1000 * median(found), unit="ms") for name, found in times.items()],
        "where",
    )


if __name__ == "__main__":
    main()
