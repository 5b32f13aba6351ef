"""Measures what metrics cost: scrapes with many jobs and with a stuck loop, and the
memory and time of an idle daemon with and without them.

`python -m benchmarks.metrics [--jobs N] [--checkpoints N] [--idle SECONDS] [--runs N]`

The many jobs are in this process, and are gathered, published and served as in a daemon.
The loop of a real daemon is stuck for 10 s by a failpoint. The idle daemons are real
too; daemons with and without metrics take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import re
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

import psutil
import torch

from ckptd.agent import Agent
from ckptd.daemon.http_address import HttpAddress
from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.durations import SAVES, STALLS, Durations
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.process.listener import listen_for_http
from ckptd.daemon.telemetry.gatherer import Gatherer
from ckptd.daemon.telemetry.telemetry import Telemetry
from tests.support.daemons import home, running
from tests.support.forks import context

MOST_SCRAPE_SECONDS, MOST_RSS, MOST_CPU = 0.05, 6e6, 0.001
STUCK_SECONDS = 10


def scrape(address: str) -> tuple[float, str]:
    """Return the seconds that a scrape takes, and the metrics."""
    begun = time.perf_counter()
    client = http.client.HTTPConnection(address, timeout=60)
    client.request("GET", "/metrics")
    answer = client.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text
    took = time.perf_counter() - begun
    client.close()
    return took, text


def catalog_of(jobs: int, checkpoints: int) -> Catalog:
    made = Catalog()
    for number in range(checkpoints):
        job = made.job(f"job-{number % jobs}")
        job.commit(
            StoredCheckpoint(
                job.name, f"step-{number:08d}.a0001", 1, number, job.seq + 1, 10**9, (),
                user_tag=False, created=time.time(),
            )
        )  # fmt: skip
    return made


async def many(jobs: int, checkpoints: int, runs: int) -> None:
    saver = SimpleNamespace(
        counters=dict.fromkeys(
            ("sealed", "verify_failures", "persisted", "failed", "skipped", "recounted_persisted",
             "recounted_failed", "recounted_skipped"), 0,
        ), saves=Durations(SAVES), stalls=Durations(STALLS),
    )  # fmt: skip
    parts = cast(
        Any,
        SimpleNamespace(
            catalog=catalog_of(jobs, checkpoints), saver=saver, pipelines=[],
            slots=SimpleNamespace(used=0, slots={}),
        ),
    )  # fmt: skip
    gatherer, gathering = Gatherer(parts), list[float]()
    for _ in range(runs + 1):
        begun = time.perf_counter()
        gatherer.figures(10**12)
        gathering.append(time.perf_counter() - begun)
    listener = listen_for_http(HttpAddress("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with Telemetry(listener, None) as telemetry:
        telemetry.ready(parts, lambda: 10**12, lambda: 0)
        await asyncio.sleep(1.5)
        found = [await asyncio.to_thread(scrape, address) for _ in range(runs)]
    took, text = sorted(seconds for seconds, _ in found), found[-1][1]
    assert text.count("ckptd_last_durable_step{") == jobs
    print(
        f"{jobs} jobs, {checkpoints:,d} checkpoints: scrape {statistics.median(took):.4f} s, "
        f"most {took[-1]:.4f} s, {len(text):,d} bytes; wanted: at most {MOST_SCRAPE_SECONDS} s"
    )
    print(
        f"  gathering on the loop: first {gathering[0]:.4f} s, then median "
        f"{statistics.median(gathering[1:]):.4f} s"
    )


def _train(path: Any) -> None:
    Agent("job", socket=path).snapshot({"w": torch.ones(1000)}, step=1)


def stuck() -> None:
    point = f"slot.passing=sleep({STUCK_SECONDS})@1"
    with home() as place, running(place, "--http", "127.0.0.1:0", failpoints=point):
        address = re.findall(r"probes at http://(\S+)", place.log_text())[0]
        trainer = context().Process(target=_train, args=(place.socket,), daemon=True)
        trainer.start()
        took, lags, begun = list[float](), [0.0], time.monotonic()
        while time.monotonic() < begun + 60 and not (lags[-1] == 0.0 and max(lags) > 1):
            seconds, text = scrape(address)
            took.append(seconds)
            lag = float(re.findall(r"^ckptd_event_loop_lag_seconds (\S+)", text, re.MULTILINE)[0])
            lags.append(lag if lag > 1 else 0.0)
            time.sleep(0.1)
        trainer.join()
    print(
        f"loop stuck for {STUCK_SECONDS} s: {sum(lag > 0 for lag in lags)} scrapes meanwhile, most "
        f"{max(took):.4f} s; the lag rose to {max(lags):.1f} s, and back to 0"
    )


def idle(seconds: float, *arguments: str) -> tuple[float, float]:
    """Return the memory of an idle daemon, and its share of a core."""
    with home() as place:
        file = ("--metrics-file", str(place.path / "m.prom")) if arguments else ()
        with running(place, *arguments, *file) as daemon:
            process = psutil.Process(daemon.process.pid)
            time.sleep(2)
            if arguments:
                scrape(re.findall(r"probes at http://(\S+)", place.log_text())[0])
            before = cpu_seconds(process)
            time.sleep(seconds)
            return process.memory_info().rss, (cpu_seconds(process) - before) / seconds


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time of all threads, to the nanosecond."""
    total = 0
    for thread in os.listdir(f"/proc/{process.pid}/task"):
        with open(f"/proc/{process.pid}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--idle", type=float, default=20.0)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    asyncio.run(many(options.jobs, options.checkpoints, options.runs))
    stuck()
    without, having = list[tuple[float, float]](), list[tuple[float, float]]()
    for _ in range(3):
        without.append(idle(options.idle))
        having.append(idle(options.idle, "--http", "127.0.0.1:0"))
    for name, found in (("without", without), ("with", having)):
        rss, cpu = (statistics.median(values) for values in zip(*found, strict=True))
        print(f"idle, {name:7} metrics: {rss / 1e6:.1f} MB, {cpu:.3%} of a core")
    print(f"wanted: at most {MOST_RSS / 1e6:.0f} MB and {MOST_CPU:.1%} of a core more")


if __name__ == "__main__":
    main()
