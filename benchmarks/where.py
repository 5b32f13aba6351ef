"""Measures where the time of a snapshot, a save and a recovery goes: each step by
itself, beside the whole.

`python -m benchmarks.where [--copies N] [--rounds N]`. The state is that of `saves.py`.
The steps of the agent are timed where they run. Those of the daemon are repeated here
with its own functions and as many threads, one step at a time, so that their sum is
longer than a save, which does them at the same time.
`docs/explanation/where-time-goes.md` explains the result.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
from crc32c import crc32c

from benchmarks.rows import Row, keep, settled
from benchmarks.saves import state_and_rounds
from ckptd.agent import Agent
from ckptd.agent import agent as agent_module
from ckptd.agent.bench.ways import DirectWrite, PlainCopy, State, timed
from ckptd.agent.handover.handover import Handover
from ckptd.agent.plan.kept_plan import KeptPlan
from ckptd.agent.read import loader, sources
from ckptd.shared.codecs.codec import encoder
from ckptd.shared.formats.binary import PIECE
from ckptd.shared.formats.plan import DEFAULT_CHUNK
from ckptd.shared.formats.reuse import new_hasher
from ckptd.shared.system.fs import read_exactly
from tests.support.daemons import home, running

Times = dict[str, list[float]]


@contextmanager
def timing(times: Times, steps: dict[str, tuple[Any, str]]) -> Iterator[None]:
    """Context manager.

    While it is held, the seconds of each call of these functions are added to `times`.
    """

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                times[name].append(time.perf_counter() - begun)

        return call

    with ExitStack() as held:
        for name, (owner, attribute) in steps.items():
            held.enter_context(
                mock.patch.object(owner, attribute, wrapped(name, getattr(owner, attribute)))
            )
        yield


SNAPSHOT = {
    "state_dict and "
    "names": (agent_module, "capture"), "compare the "
        "structure": (KeptPlan, "reuse"), "wait for slot": (Handover, "acquire"),
    "copy": (Handover, "copy"), "plain values and random "
        "generators": (agent_module, "values_document"), "seal": (Handover, "seal_after"),
}  # fmt: skip
RECOVERY = {
    "read, verify and copy": (loader, "scatter"),
    "open and check the slots": (sources, "read_header"),
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
            found: Times = defaultdict(list)
            with timing(found, SNAPSHOT):
                pending = agent.snapshot(state, step=step)
                pending.wait("sealed")
            sealed = time.perf_counter()
            pending.wait("durable")
            found["snapshot"], found["save, raw"] = [pending.stall], [time.perf_counter() - sealed]
            with timing(found, RECOVERY):
                recovered = agent.recover(state)
            assert recovered is not None
            assert recovered.source == "memory"
            found["recovery from memory"], found["plain copy"] = (
                [recovered.seconds],
                [copy(state, place.path)[0]],
            )
            for name, seconds in (daemon_steps(state) if step else {}).items():
                found[name] = [seconds]
            if step:  # the first round warms up
                for name, each in found.items():
                    times[name].append(sum(each))
        agent.close()
    keep(
        [Row(name=name, value=1000 * median(found), unit="ms") for name, found in times.items()],
        "where",
    )


if __name__ == "__main__":
    main()
