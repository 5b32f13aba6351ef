"""Measures what the page costs a daemon, and how soon a reader can use it.

`python -m benchmarks.page [--checkpoints N] [--ranks N] [--readers N] [--seconds S]`

A real daemon has that many checkpoints, each of as many ranks, and that many connected
ranks, each of a job of its own. A task in its event loop sleeps for 10 ms again and
again, and notes how much later it wakes. Rounds with the page, its readers and a client
that never reads take turns with rounds without them. Then a real Chromium opens the page
while the readers read (`apt-get install chromium chromium-driver`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.rows import Row, keep
from ckptd.agent import Agent
from ckptd.daemon.page.document import MOST_BYTES, document
from ckptd.daemon.process.vitals import Vitals
from ckptd.shared import names
from ckptd.shared.storage.locate import open_root
from tests.support.browser import CHROMIUM, DRIVER, Browser, browser
from tests.support.daemons import Home, home, running
from tests.support.page import Served

MOST_LAG, MOST_SECONDS = 0.005, 1.0
_NAP = 0.01
_ROUNDS = 10
_SETTLE = 2.0
"""The seconds in which the readers list the checkpoints."""
_USABLE = """
const at = setInterval(() => {
  if (document.querySelectorAll(ROWS).length >= COUNT
      && document.getElementById('verdict').dataset.level === 'well') {
    window.usable = performance.now();
    clearInterval(at);
  }
}, 5);
"""


class Lags:
    """The lateness of a daemon's event loop. `install` is called in its process."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def install(self) -> None:
        watch = Vitals.watch

        async def watched(vitals: Vitals) -> None:
            sampling = asyncio.ensure_future(self._sample())
            try:
                await watch(vitals)
            finally:
                sampling.cancel()

        setattr(Vitals, "watch", watched)  # noqa: B010  # the daemon is this process alone

    async def _sample(self) -> None:
        with self._file.open("a", buffering=1) as file:
            while True:
                begun = time.monotonic()
                await asyncio.sleep(_NAP)
                woken = time.monotonic()
                file.write(f"{begun} {woken - begun - _NAP}\n")

    def within(self, seconds: float) -> list[float]:
        """Wait so long, and return the lags of that time, the least first."""
        begun = time.monotonic()
        time.sleep(seconds)
        ended = time.monotonic()
        found = (line.split() for line in self._file.read_text().splitlines()[:-1])
        return sorted(float(lag) for at, lag in found if begun <= float(at) < ended)


def fill(place: Home, checkpoints: int, ranks: int) -> None:
    """Save one checkpoint, and publish its manifest again for other steps and ranks."""
    with running(place, forked=True):
        agent = Agent("large", socket=place.socket)
        state = {f"layer.{number}.weight": torch.randn(8, 8) for number in range(100)}
        agent.snapshot(state, step=0, metrics={"loss": 2.5}).wait("durable", timeout=60)
        agent.close()
    repository = open_root(place.root)
    first = repository.read_manifest("large", names.tag_directory(0, None, 1))
    for step in range(1, checkpoints):
        tag = names.tag_directory(step, None, 1)
        parts = [
            msgspec.structs.replace(
                first.parts[0], rank=rank, file=names.part_file(rank, names.new_nonce())
            )
            for rank in range(ranks)
        ]
        manifest = msgspec.structs.replace(
            first, step=step, tag=tag, seq=step + 1, world_size=ranks, parts=parts,
            metrics={"loss": 2.5 / step},
        )  # fmt: skip
        directory = place.root / "large" / tag
        directory.mkdir()
        (directory / names.MANIFEST).write_bytes(manifest.encode())


@contextmanager
def page(place: Home) -> Iterator[Served]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptd.daemon", "page", "--socket", str(place.socket), "--http",
         "127.0.0.1:0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield Served(int(line.split("http://127.0.0.1:")[1].partition("/")[0]))
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def reading(served: Served, readers: int) -> Iterator[None]:
    """Have readers follow the live data and list the checkpoints once, and a slow client
    that reads nothing.
    """
    with ExitStack() as held:
        slow = served.connect(slow=True)
        held.callback(slow.close)
        ended = threading.Event()
        threads = []
        for _ in range(readers):
            connection = served.connect()
            held.callback(connection.close)

            def read(connection: Any = connection) -> None:
                assert len(served.json("/api/checkpoints?job=large")["checkpoints"]) > 1
                while not ended.is_set():
                    connection.recv(1 << 16)  # not decoded: browsers do that elsewhere

            threads.append(threading.Thread(target=read))
            threads[-1].start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def usable(window: Browser, url: str, rows: str, count: int) -> float:
    """Return the seconds from the request until the page shows so many rows."""
    script = _USABLE.replace("ROWS", repr(rows)).replace("COUNT", str(count))
    made = window.devtools("Page.addScriptToEvaluateOnNewDocument", source=script)
    window.open("about:blank")
    window.open(url)
    window.until(lambda: window.run("return window.usable"), "usable page")
    window.devtools("Page.removeScriptToEvaluateOnNewDocument", **made)
    return float(window.run("return window.usable")) / 1000


def p99(lags: list[float]) -> float:
    """Return the lag that one in a hundred exceeds, given sorted ones."""
    return lags[int(len(lags) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    rows = [Row(name="the document", value=len(document()) / 1000, unit="kB",
                limit=MOST_BYTES / 1000)]  # fmt: skip
    with home() as place:
        fill(place, options.checkpoints, options.ranks)
        lags = Lags(place.path / "lags")
        with running(place, "--keep-last", "0", forked=lags.install):
            agents = [Agent(f"job-{n}", socket=place.socket) for n in range(options.ranks)]
            for agent in agents:
                agent.snapshot({"w": torch.ones(9)}, step=1).wait("durable", timeout=60)
            without, having = list[list[float]](), list[list[float]]()
            opened, listed = list[float](), list[float]()
            for _ in range(_ROUNDS):
                without.append(lags.within(options.seconds))
                with page(place) as served, reading(served, options.readers):
                    time.sleep(_SETTLE)
                    having.append(lags.within(options.seconds))
            if CHROMIUM is not None and DRIVER is not None:
                with page(place) as served, reading(served, options.readers), browser() as window:
                    for _ in range(5):
                        opened.append(
                            usable(window, served.url, "#view-overview tbody tr", options.ranks)
                        )
                        listed.append(
                            usable(
                                window, f"{served.url}#checkpoints/large",
                                "#view-checkpoints tbody tr", min(100, options.checkpoints),
                            )
                        )  # fmt: skip
            for agent in agents:
                agent.close()
    # The rounds of a pair follow each other, so other work on the machine is in both.
    more = statistics.median(
        p99(one) - p99(other) for one, other in zip(having, without, strict=True)
    )
    beside = dict[str, float]()
    for name, found in (("with", having), ("without", without)):
        for word, values in (
            ("median", [statistics.median(one) for one in found]),
            ("p99", [p99(one) for one in found]),
            ("most", [one[-1] for one in found]),
        ):
            beside[f"{name} {word} ms"] = 1000 * statistics.median(values)
    rows.append(
        Row(
            name=f"p99 of the loop's lag, {options.readers} readers less none", value=1000 * more,
            unit="ms", limit=1000 * MOST_LAG, beside=beside,
        )
    )  # fmt: skip
    for name, seconds in (("overview", opened), ("list of checkpoints", listed)):
        if seconds:
            rows.append(
                Row(name=f"{name} usable after, median of {len(seconds)}",
                    value=statistics.median(seconds), unit="s", limit=MOST_SECONDS,
                    beside={"most": max(seconds)})
            )  # fmt: skip
    keep(rows, "page")


if __name__ == "__main__":
    main()
