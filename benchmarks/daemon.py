"""What an idle daemon costs: time from start to ready, and resident memory. `python -m benchmarks.daemon [--runs N]`

Time is from `fork` to the ready word on the pipe, Python's own start included; memory is the daemon's own RSS one second later.
"""

from __future__ import annotations

import argparse
import statistics
import time

import psutil

from tests.support.daemons import Daemon, home

MOST_RSS, MOST_SECONDS = 60e6, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    seconds, rss, inside = [], [], []
    for _ in range(parser.parse_args().runs):
        with home() as place:
            begun = time.perf_counter()
            daemon = Daemon(place).wait_ready()
            seconds.append(time.perf_counter() - begun)
            time.sleep(1)
            rss.append(psutil.Process(daemon.process.pid).memory_info().rss)
            inside.append(float(place.log_text().split(" ready in ")[1].split(" s")[0]))
            daemon.stop()
    spread = f"median of {len(seconds)}; least {min(seconds):.3f}, most {max(seconds):.3f}"
    print(f"time to ready   {statistics.median(seconds):.3f} s ({spread}); wanted: at most {MOST_SECONDS} s")
    print(f"  of it recovery {statistics.median(inside):.3f} s")
    print(f"idle RSS        {statistics.median(rss) / 1e6:.1f} MB (most {max(rss) / 1e6:.1f}); wanted: at most {MOST_RSS / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
