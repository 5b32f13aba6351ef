"""Measures what deltas change for saves and restores, on states that are really trained.

`python -m benchmarks.delta_saves [--rounds N]`. The daemon's pipeline writes a sealed
slot whose state is a step, or some steps, after that of the checkpoint before, with the
codec `auto`, with deltas and without, in turns: to a storage of 0.2 GB/s, which carries
out one write at a time and drops the bytes, and to the disk. Then a real daemon saves
weights of two consecutive steps in turns, until the longest chain is reached, and the
newest checkpoint is loaded, beside one that is whole: at 0.2 GB/s, from the disk, and
from the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import Tensor

from benchmarks.delta_states import MixedState, fine_tuning, pretraining
from benchmarks.rows import Row, drop_pages, keep, settled
from benchmarks.throttled import Throttled
from ckptd.agent import Agent, Checkpoint
from ckptd.daemon.chunks.base_slot import BaseSlot
from ckptd.daemon.chunks.pipeline import Pipeline
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.shared.codecs.codec import Encoder, encoder
from ckptd.shared.codecs.speeds import Speeds
from ckptd.shared.formats.part_writer import PartWriter
from ckptd.shared.formats.plan import DEFAULT_CHUNK, Region, chunk_ranges
from ckptd.shared.formats.reuse import MOST_IN_CHAIN, ChunkCheck, StoredFile, StoredPart
from ckptd.shared.formats.segment import SegmentHeader
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.system.fs import Buffer
from ckptd.shared.system.storage_seam import Creator, Sink
from tests.shared.samples import sample_plan
from tests.support.daemons import home, running
from tests.support.storage import files_in

SLOW = 0.2e9
"""The bytes per second of the slow storage."""


def weights(state: MixedState) -> list[Tensor]:
    return list(state.weights.values())


def everything(state: MixedState) -> list[Tensor]:
    groups = (state.master, state.exp_avg, state.exp_avg_sq, state.weights)
    return [tensor for group in groups for tensor in group.values()]


@contextmanager
def sealed(tensors: Iterable[Tensor], step: int) -> Iterator[SealedSlot]:
    """Context manager. Gives a sealed slot of tensors, those of 4 bytes first."""
    by_size = defaultdict[int, list[Tensor]](list)
    for tensor in tensors:
        by_size[tensor.element_size()].append(tensor)
    regions, end = list[Region](), 0
    for size in sorted(by_size, reverse=True):
        length = sum(tensor.nbytes for tensor in by_size[size])
        regions.append(Region(end, length, size))
        end = (end + length + 63) // 64 * 64
    header = SegmentHeader(
        job="bench", attempt=1, rank=0, world_size=1, slot=0, capacity=end,
        chunk_size=DEFAULT_CHUNK, step=step,
    )  # fmt: skip
    fd = os.memfd_create("slot")
    try:
        for region in regions:
            at = header.data_offset + region.offset
            for tensor in by_size[region.element_size]:
                at += os.pwrite(fd, tensor.contiguous().view(torch.uint8).numpy().data, at)
        plan = sample_plan()
        yield SealedSlot(
            fd, header, plan, None, plan.encode(), SnapshotRequest(),
            chunk_ranges(regions, DEFAULT_CHUNK), None,
        )  # fmt: skip
    finally:
        os.close(fd)


class _Linker:
    """A linker of a storage that drops its bytes, or of a directory."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def link(self, older: StoredFile, name: str) -> bool:
        if self.directory is not None:
            os.link(self.directory / older.name, self.directory / name)
        return True

    def remove(self, name: str) -> None:
        if self.directory is not None:
            (self.directory / name).unlink()


async def save(
    pipeline: Pipeline,
    slot: SealedSlot,
    codec: Encoder,
    speeds: Speeds,
    directory: Path | None,
    before: StoredPart | None = None,
    base: SealedSlot | None = None,
) -> tuple[float, float, StoredPart]:
    """Write a part to a directory, with the deltas that are durable as soon, or to the
    slow storage, with those that make it smaller.

    Return the seconds from the checksums of the seal to the durable part, the share of
    newly written bytes in those of the state, and the part.
    """
    lock, files = threading.Lock(), None if directory is None else files_in(directory)

    def create(name: str, size: int, head: bytes | None) -> Sink:
        return Throttled(SLOW, lock) if files is None else files.create(name, size, head)

    checks = await pipeline.checksum(slot)

    async def known() -> list[ChunkCheck]:
        return checks

    begun = time.perf_counter()
    entry, part = await pipeline.write_part(
        slot,
        PartWriter(
            Creator(create, head_last=True),
            os.urandom(16),
            codec,
            linker=_Linker(directory),
            speeds=speeds,
        ),
        "step-00000001.a0001",
        known,
        before=before,
        base_slot=None if base is None else BaseSlot(base.fd, base.header),
        most_deltas=MOST_IN_CHAIN,
        for_bytes=directory is None,
    )
    return time.perf_counter() - begun, entry.new_bytes / entry.raw_bytes, part


def compared(
    pipeline: Pipeline,
    states: tuple[list[Tensor], list[Tensor]],
    directory: Path | None,
    rounds: int,
) -> dict[str, float]:
    """Return the medians of seconds and shares, with deltas and without, and the seconds
    that the storage needs for all bytes of the state.

    To the slow storage, only saves that store deltas count as such: a chain may be too
    long for one more. On a fast disk few deltas pay.
    """
    times, shares = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with sealed(states[0], 1) as base, sealed(states[1], 2) as slot:
        # Kept from save to save, as in the daemon.
        encoders = {"deltas": encoder("auto"), "whole": encoder("auto"), "raw": encoder("raw")}
        speeds = Speeds(pipeline.writers // 2)
        for number in range(rounds + 1):  # the first round warms up
            for way, codec in encoders.items():
                _, _, part = asyncio.run(save(pipeline, base, codec, speeds, directory))
                # What has not changed little is in a file of its own from the second save on.
                for newer, older in ((slot, base), (base, slot))[: 2 if way == "deltas" else 1]:
                    if directory is not None:
                        settled()
                    had = pipeline.chunks["delta"]
                    seconds, share, part = asyncio.run(
                        save(
                            pipeline, newer, codec, speeds, directory, part,
                            older if way == "deltas" else None,
                        )
                    )  # fmt: skip
                    stored = pipeline.chunks["delta"] > had
                    if number and (stored or way != "deltas" or directory is not None):
                        times[way].append(seconds)
                        shares[way].append(share)
                for file in directory.iterdir() if directory is not None else ():
                    file.unlink()
    return {
        **{f"{way} s": median(found) for way, found in times.items()},
        "written": median(shares["deltas"]), "written without": median(shares["whole"]),
    }  # fmt: skip


def of_saves(rounds: int) -> Iterator[Row]:
    tuning, training = fine_tuning(), pretraining()
    steps = sorted(training)
    cases = {
        "weights, RL rates": (weights(tuning[-2]), weights(tuning[-1]), 0.1, 0.15),
        "weights, 5 steps": (weights(training[steps[0]]), weights(training[steps[1]]), 0.4, 0.5),
        "whole state, 5 steps": (
            everything(training[steps[0]]), everything(training[steps[1]]), None, None,
        ),
    }  # fmt: skip
    pipeline = Pipeline(len(os.sched_getaffinity(0)), 128 << 20, DEFAULT_CHUNK)
    with home() as place:
        disk = place.path / "disk"
        disk.mkdir()
        for name, (older, newer, of_raw, of_whole) in cases.items():
            found = compared(pipeline, (older, newer), None, rounds)
            for other, limit in (("raw", of_raw), ("whole", of_whole)):
                yield Row(
                    name=f"0.2 GB/s, {name}: deltas / {other}",
                    value=found["deltas s"] / found[f"{other} s"],
                    unit="x", limit=limit, beside=found,
                )  # fmt: skip
            found = compared(pipeline, (older, newer), disk, rounds)
            yield Row(
                name=f"the disk, {name}: deltas / without", unit="x", limit=1.05,
                value=found["deltas s"] / found["whole s"], beside=found,
            )  # fmt: skip
    pipeline.close()


def of_restores(rounds: int) -> Iterator[Row]:
    tuning = fine_tuning()
    states = [tuning[-2].weights, tuning[-1].weights]
    with home() as place, running(place, "--keep-last", "0", "--deltas", "small"):
        agent = Agent(job="chain", socket=place.socket)
        for step in range(MOST_IN_CHAIN + 5):
            agent.snapshot({"model": states[step % 2]}, step=step, rng=False).wait("durable")
        agent.close()
        job = place.root / "chain"
        lengths, times = dict[int, int](), defaultdict[tuple[str, int], list[float]](list)
        for step in range(MOST_IN_CHAIN + 5):
            with Checkpoint.open(job, step) as checkpoint:
                lengths[step] = checkpoint.manifest.parts[0].chain
        longest = max(lengths, key=lambda step: lengths[step])
        one = min((step for step in lengths if lengths[step] == 1), default=longest)
        whole = longest - lengths[longest]  # the checkpoint whose bytes the chain begins with
        sources = ("0.2 GB/s", "the disk", "its cache")
        for number, source, step in itertools.product(
            range(rounds + 1), sources, (whole, one, longest)
        ):
            if source == "the disk":
                settled()
                drop_pages(job)
            with slow_reads() if source == "0.2 GB/s" else nullcontext():
                begun = time.perf_counter()
                with Checkpoint.open(job, step) as checkpoint:
                    loaded = checkpoint.load()["model"]
                seconds = time.perf_counter() - begun
            if number:  # the first round warms up
                times[source, step].append(seconds)
            assert all(torch.equal(loaded[k], v) for k, v in states[step % 2].items())
        for source, (name, step, limit) in itertools.product(
            sources, ((f"{lengths[longest]} deltas", longest, 1.5), ("one delta", one, 2.0))
        ):
            seconds = median(times[source, whole])
            yield Row(
                name=f"restore from {source}, {name} / whole", unit="x", limit=limit,
                value=median(times[source, step]) / seconds,
                beside={"whole s": seconds},
            )  # fmt: skip


@contextmanager
def slow_reads() -> Iterator[None]:
    """Context manager. The files are read at the speed of the slow storage."""
    read, lock = os.preadv, threading.Lock()

    def throttled(fd: int, buffers: Sequence[Buffer], offset: int, flags: int = 0) -> int:
        length = read(fd, buffers, offset, flags)
        with lock:
            time.sleep(length / SLOW)
        return length

    with mock.patch.object(os, "preadv", throttled):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in itertools.chain(of_restores(options.rounds), of_saves(options.rounds)):
        print(row.text(), flush=True)
        rows.append(row)
    keep(rows, "delta-saves")


if __name__ == "__main__":
    main()
