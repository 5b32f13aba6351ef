"""Measures saves and recoveries in an object store: with ckptd, with obstore alone, and
with DCP through fsspec and s3fs.

`python -m benchmarks.object_store [--megabytes N] [--rounds N]`. The store is SeaweedFS
on this machine. All ways move the same bytes, raw, and take turns. obstore alone tries
several sizes of parts and numbers of requests at once; its best is the limit. DCP needs
the package s3fs, and is left out without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import obstore
import torch
import torch.distributed.checkpoint as dcp
from obstore.store import S3Store

from benchmarks.rows import Row, keep, settled
from ckptd.agent import Agent
from ckptd.shared.location import Url
from tests.support import stores
from tests.support.daemons import Home, home, running

BUCKET = "bench"
PARTS = (8 << 20, 16 << 20)
AT_ONCE = (4, 8, 16, 32)


def made(nbytes: int) -> dict[str, Any]:
    tensors = 48
    return {
        "model": {
            f"layers.{number}.weight": torch.randn(nbytes // tensors // 4)
            for number in range(tensors)
        }
    }


class Alone:
    """obstore without anything else: the bytes of the state as one object."""

    def __init__(self, server: stores.Server, nbytes: int) -> None:
        self.store = S3Store(
            BUCKET, endpoint=server.environ["AWS_ENDPOINT_URL"], access_key_id=stores.KEY,
            secret_access_key=stores.SECRET, region=stores.REGION,
            client_options={"allow_http": True}, prefix="alone",
        )  # fmt: skip
        self.data = torch.randn(nbytes // 4).numpy().tobytes()
        self.target = bytearray(nbytes)

    def save(self, part: int, at_once: int) -> float:
        begun = time.perf_counter()
        obstore.put(
            self.store,
            "object",
            memoryview(self.data),
            use_multipart=True,
            chunk_size=part,
            max_concurrency=at_once,
        )
        return time.perf_counter() - begun

    def load(self, part: int, at_once: int) -> float:
        view, begun = memoryview(self.target), time.perf_counter()

        def fetch(offset: int) -> None:
            length = min(part, len(view) - offset)
            view[offset : offset + length] = memoryview(
                obstore.get_range(self.store, "object", start=offset, length=length)
            )

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(fetch, range(0, len(view), part)))
        return time.perf_counter() - begun


def with_ckptd(place: Home, state: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds until a snapshot is durable, and those of its recovery from
    storage, into tensors that exist.
    """
    agent = Agent("job", socket=place.socket)
    for step in range(2):  # fault in the pages of both slots
        agent.snapshot(state, step=step, persist=False).wait("sealed")
    settled()
    begun = time.perf_counter()
    agent.snapshot(state, step=2).wait("durable")
    saved = time.perf_counter() - begun
    agent.close()
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    agent = Agent("job", socket=place.socket)
    begun = time.perf_counter()
    recovered = agent.recover(target)
    loaded = time.perf_counter() - begun
    agent.close()
    assert recovered is not None
    assert recovered.source == "storage"
    assert all(
        torch.equal(target["model"][name], tensor) for name, tensor in state["model"].items()
    )
    return saved, loaded


def with_dcp(state: dict[str, Any], number: int) -> tuple[float, float]:
    where = f"s3://{BUCKET}/dcp/{number}"
    settled()
    begun = time.perf_counter()
    dcp.save(state, checkpoint_id=where)
    saved = time.perf_counter() - begun
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    begun = time.perf_counter()
    dcp.load(target, checkpoint_id=where)
    return saved, time.perf_counter() - begun


def best(call: Callable[[int, int], float], times: dict[tuple[int, int], list[float]]) -> None:
    for part in PARTS:
        for at_once in AT_ONCE:
            settled()
            times[part, at_once].append(call(part, at_once))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    nbytes = options.megabytes * 1_000_000
    state = made(nbytes)
    has_s3fs = importlib.util.find_spec("s3fs") is not None
    found = defaultdict[str, list[float]](list)
    put, got = (
        defaultdict[tuple[int, int], list[float]](list),
        defaultdict[tuple[int, int], list[float]](list),
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        stores.seaweed(Path(directory) / "store") as server,
        home() as place,
    ):
        stores.make_bucket(server, BUCKET)
        os.environ.update(server.environ)
        place.root, place.environ = Url("s3", BUCKET, ("ckpts",)), server.environ  # type: ignore[assignment]
        alone = Alone(server, nbytes)
        with running(place, "--codec", "raw", "--no-link-unchanged", "--keep-last", "1"):
            for number in range(options.rounds):
                best(alone.save, put)
                best(alone.load, got)
                for name, seconds in zip(
                    ("ckptd: save", "ckptd: load"), with_ckptd(place, state), strict=True
                ):
                    found[name].append(seconds)
                if has_s3fs:
                    for name, seconds in zip(
                        ("dcp + s3fs: save", "dcp + s3fs: load"),
                        with_dcp(state, number),
                        strict=True,
                    ):
                        found[name].append(seconds)
    found["obstore: save"] = min(put.values(), key=median)
    found["obstore: load"] = min(got.values(), key=median)
    rate = {name: nbytes / 1e6 / median(seconds) for name, seconds in found.items()}
    rows = [
        Row(name=name, value=value, unit="MB/s", beside={"MB": float(options.megabytes)})
        for name, value in sorted(rate.items())
    ]
    for action in ("save", "load"):
        ours = rate[f"ckptd: {action}"]
        rows.append(
            Row(
                name=f"{action}: ckptd / obstore alone",
                value=ours / rate[f"obstore: {action}"],
                unit="x",
                limit=0.9,
                at_most=False,
            )
        )
        if has_s3fs:
            rows.append(
                Row(
                    name=f"{action}: ckptd / dcp + s3fs",
                    value=ours / rate[f"dcp + s3fs: {action}"],
                    unit="x",
                    limit=2,
                    at_most=False,
                )
            )
    keep(rows, "object-store")


if __name__ == "__main__":
    main()
