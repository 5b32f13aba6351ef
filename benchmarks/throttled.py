"""Measures how long a part takes with `raw`, `planes` and `auto`, to storages of
several speeds.

`python -m benchmarks.throttled [--megabytes N] [--rounds N]`. The daemon's pipeline
writes a sealed slot of trained fp32 tensors. A storage of a given speed carries out one
write at a time, drops the bytes, and takes as long as that speed allows; the last
storage is the disk. The three codecs take turns. `auto` is compared with the better of
the other two.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.rows import Row, keep, settled
from benchmarks.trained import trained
from ckptd.daemon.chunks.pipeline import Pipeline
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.shared.codecs.codec import Encoder, encoder
from ckptd.shared.formats.part_writer import PartWriter
from ckptd.shared.formats.plan import DEFAULT_CHUNK, Region, chunk_ranges
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.formats.segment import SegmentHeader
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.system.fs import Buffer
from ckptd.shared.system.storage_seam import Creator, Sink
from tests.shared.samples import NONCE, sample_plan
from tests.support.daemons import home
from tests.support.storage import files_in

CODECS = ("raw", "planes", "auto")


class Throttled:
    """A sink that drops what it gets, at `rate` bytes per second.

    All sinks of one storage share its `lock`.
    """

    size = 0

    def __init__(self, rate: float, lock: threading.Lock) -> None:
        self._rate, self._lock = rate, lock

    def append(self, data: Buffer) -> int:
        with self._lock:
            offset, self.size = self.size, self.size + len(data)
            time.sleep(len(data) / self._rate)
        return offset

    def finish(self, head: bytes | None = None) -> None:
        pass

    def discard(self) -> None:
        pass


def sealed_slot(megabytes: int) -> SealedSlot:
    """Return a sealed slot of trained tensors, in shared memory."""
    header = SegmentHeader(
        job="bench",
        attempt=1,
        rank=0,
        world_size=1,
        slot=0,
        capacity=megabytes * 1_000_000,
        chunk_size=DEFAULT_CHUNK,
        step=1,
    )
    fd, length = os.memfd_create("slot"), 0
    for tensor in [tensor for named in trained().state().values() for tensor in named.values()]:
        data = tensor.numpy().tobytes()[: header.capacity - length]
        length += os.pwrite(fd, data, header.data_offset + length)
    plan = sample_plan()
    ranges = chunk_ranges([Region(0, length // 4 * 4, 4)], DEFAULT_CHUNK)
    return SealedSlot(fd, header, plan, None, plan.encode(), SnapshotRequest(), ranges, None)


async def written(
    pipeline: Pipeline, slot: SealedSlot, codec: Encoder, storage: float | Path
) -> tuple[float, float]:
    """Return the seconds that the part takes, and its size as a share of the slot's."""
    lock, files = threading.Lock(), files_in(storage) if isinstance(storage, Path) else None

    def create(name: str, size: int, head: bytes | None) -> Sink:
        return (
            files.create(name, size, head)
            if files is not None
            else Throttled(float(str(storage)), lock)
        )

    checks = await pipeline.checksum(slot)

    async def known() -> list[ChunkCheck]:
        return checks

    begun = time.perf_counter()
    entry, _ = await pipeline.write_part(
        slot,
        PartWriter(Creator(create, head_last=True), NONCE, codec),
        "step-00000001.a0001",
        known,
    )
    return time.perf_counter() - begun, entry.bytes / entry.raw_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    slot, threads, rows = sealed_slot(options.megabytes), len(os.sched_getaffinity(0)), list[Row]()
    pipeline = Pipeline(threads, 128 << 20, DEFAULT_CHUNK)
    with home() as place:
        place.path.joinpath("disk").mkdir()
        for name, storage in (
            ("0.2 GB/s", 0.2e9),
            ("1 GB/s", 1e9),
            ("3 GB/s", 3e9),
            ("the disk", place.path / "disk"),
        ):
            # Kept from save to save, as in the daemon.
            encoders = {codec: encoder(codec) for codec in CODECS}
            times, sizes = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
            for number in range(options.rounds + 1):
                for codec in CODECS:
                    settled()
                    seconds, size = asyncio.run(written(pipeline, slot, encoders[codec], storage))
                    for file in place.path.joinpath("disk").iterdir():
                        file.unlink()
                    if number:  # the first round warms up
                        times[codec].append(seconds)
                        sizes[codec].append(size)
            auto, best = median(times["auto"]), min(median(times["raw"]), median(times["planes"]))
            beside = {f"{codec} s": median(times[codec]) for codec in CODECS} | {
                "size of auto": median(sizes["auto"])
            }
            rows.append(
                Row(
                    name=f"auto / better of raw and planes, {name}",
                    value=auto / best,
                    unit="x",
                    limit=1.05,
                    beside=beside,
                )
            )
    pipeline.close()
    keep(rows, "throttled")


if __name__ == "__main__":
    main()
