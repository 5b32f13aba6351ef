"""Measures what an idle daemon costs: the time to ready, and resident memory.

`python -m benchmarks.daemon [--runs N] [--records N]`

The time is from `fork` to the ready message on the pipe, with the start of Python. The
memory is the daemon's own RSS one second later. Then it is started again on a journal
of that many records.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import Journal
from ckptd.shared.system.fs import PosixFileSystem
from tests.support.daemons import Daemon, Home, home

MOST_RSS, MOST_SECONDS = 60e6, 0.5


def fill(place: Home, records: int) -> None:
    """Write a journal of this many records: for each save that it is staged, and that
    it is committed.
    """
    directory = os.open(place.journal, os.O_RDONLY)
    with ThreadPoolExecutor(1) as pool:
        journal = Journal.open(PosixFileSystem(), directory, pool)
        journal.start(["job"])

        async def write() -> None:
            for step in range(records // 2):
                tag = f"step-{step:08d}.a0001"
                await journal.append(
                    r.Staging(
                        job="job",
                        attempt=1,
                        step=step,
                        rank=0,
                        tag=tag,
                        file=f"rank-00000.{step:032x}.ckpt",
                    ),
                    r.Committed(job="job", attempt=1, step=step, tag=tag, seq=step + 1),
                )
            await journal.close()

        asyncio.run(write())
        found = Journal.open(PosixFileSystem(), directory, pool)
    os.close(directory)
    assert found.records >= records, f"a journal of {found.records} records"


def with_journal(records: int) -> tuple[float, float]:
    """Return the seconds to ready, and those of the recovery, with a journal of this
    many records.
    """
    with home() as place:
        Daemon(place).wait_ready().stop()
        fill(place, records)
        begun = time.perf_counter()
        daemon = Daemon(place).wait_ready()
        took = time.perf_counter() - begun
        daemon.stop()
        return took, float(place.log_text().split(" ready in ")[-1].split(" s")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--records", type=int, default=10_000)
    options = parser.parse_args()
    seconds, rss, inside = [], [], []
    for _ in range(options.runs):
        with home() as place:
            begun = time.perf_counter()
            daemon = Daemon(place).wait_ready()
            seconds.append(time.perf_counter() - begun)
            time.sleep(1)
            rss.append(psutil.Process(daemon.process.pid).memory_info().rss)
            inside.append(float(place.log_text().split(" ready in ")[1].split(" s")[0]))
            daemon.stop()
    spread = f"median of {len(seconds)}; least {min(seconds):.3f}, most {max(seconds):.3f}"
    print(
        f"time to ready   {statistics.median(seconds):.3f} s ({spread}); wanted: at most "
        f"{MOST_SECONDS} s"
    )
    print(f"  of it recovery {statistics.median(inside):.3f} s")
    again = [with_journal(options.records) for _ in range(options.runs)]
    whole, own = (statistics.median(times) for times in zip(*again, strict=True))
    print(
        f"with {options.records:,d} records {whole:.3f} s, of it recovery {own:.3f} s; wanted: "
        f"recovery in at most {MOST_SECONDS} s"
    )
    print(
        f"idle RSS        {statistics.median(rss) / 1e6:.1f} MB (most {max(rss) / 1e6:.1f}); "
        f"wanted: at most {MOST_RSS / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
