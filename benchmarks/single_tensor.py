"""Measures reading one tensor out of a large checkpoint: seconds, bytes and memory,
compared with `dcp.load`.

`python -m benchmarks.single_tensor [--gb 2] [--place DIR]`. The same bf16 tensors
(normally distributed, so that they hardly compress) are saved by DCP's FileSystemWriter
and by ckptd's StorageWriter, outside every root. Each read is a process of its own that
has imported everything first, and the files are dropped from the page cache before it.
The bytes are those of its read calls (`rchar`) and those that came from the disk. The
memory is the peak of the resident set minus its size before the read. `dcp.load` is
given an empty tensor of the same shape. The reads are repeated in turn `--rounds`
times, and the median is reported.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.rows import drop_pages
from ckptd.agent import Checkpoint, StorageReader, StorageWriter

SHAPE = (16_384, 4_096)  # 134 MB of bf16
ROWS = slice(1_000, 1_016)


def name(number: int) -> str:
    return f"model.layers.{number}.weight"


def save(where: Path, count: int) -> None:
    torch.manual_seed(0)
    block = torch.randn(SHAPE).to(torch.bfloat16)
    state = {name(number): block.roll(number * 4_099, 1).clone() for number in range(count)}
    for kind, writer in (
        ("dcp", dcp.FileSystemWriter(where / "dcp")),
        ("ckptd", StorageWriter(where / "ckptd")),
    ):
        begun = time.perf_counter()
        dcp.save(state, storage_writer=writer, no_dist=True)
        size = sum(file.stat().st_size for file in (where / kind).rglob("*") if file.is_file())
        print(
            f"saved by {kind}: {size / 1e9:.2f} GB in {time.perf_counter() - begun:.1f} s",
            flush=True,
        )


def whole_by_ckptd(where: Path, wanted: str) -> torch.Tensor:
    return Checkpoint.open(where / "ckptd").tensor(wanted)


def half_by_ckptd(where: Path, wanted: str) -> torch.Tensor:
    return Checkpoint.open(where / "ckptd").tensor(wanted, dtype=torch.float16)


def rows_by_ckptd(where: Path, wanted: str) -> torch.Tensor:
    return Checkpoint.open(where / "ckptd").tensor(wanted, slices=(ROWS,))


def loaded(reader: dcp.StorageReader, wanted: str) -> torch.Tensor:
    state = {wanted: torch.empty(SHAPE, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state[wanted]


def whole_by_dcp(where: Path, wanted: str) -> torch.Tensor:
    return loaded(dcp.FileSystemReader(where / "dcp"), wanted)


def half_by_dcp(where: Path, wanted: str) -> torch.Tensor:
    return whole_by_dcp(where, wanted).to(torch.float16)


def rows_by_dcp(where: Path, wanted: str) -> torch.Tensor:
    return whole_by_dcp(where, wanted)[ROWS].clone()


def whole_by_dcp_with_ckptd(where: Path, wanted: str) -> torch.Tensor:
    return loaded(StorageReader(where / "ckptd"), wanted)


READS: dict[str, dict[str, Callable[[Path, str], torch.Tensor]]] = {
    "one tensor": {
        "Checkpoint.tensor": whole_by_ckptd,
        "dcp.load, ckptd's StorageReader": whole_by_dcp_with_ckptd,
        "dcp.load": whole_by_dcp,
    },
    "one tensor in float16": {
        "Checkpoint.tensor": half_by_ckptd,
        "dcp.load, then .to()": half_by_dcp,
    },
    "16 of its rows": {"Checkpoint.tensor": rows_by_ckptd, "dcp.load, then a slice": rows_by_dcp},
}


def status(key: str, file: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def read(where: Path, what: str, by: str, wanted: str) -> None:
    """Read in a process of its own.

    Print what the read took, and a sum that tells whether all readers read the same.
    """
    torch.set_num_threads(2)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    memory, called, fetched = (
        status("VmRSS", "status"),
        status("rchar", "io"),
        status("read_bytes", "io"),
    )
    begun = time.perf_counter()
    tensor = READS[what][by](where, wanted)
    seconds = time.perf_counter() - begun
    called, fetched, memory = (
        status("rchar", "io") - called,
        status("read_bytes", "io") - fetched,
        status("VmHWM", "status") - memory,
    )
    check = tensor.view(torch.int16).sum(dtype=torch.int64).item()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "called": called,
                "fetched": fetched,
                "memory": memory * 1024,
                "check": check,
            }
        )
    )


def taken(where: Path, what: str, by: str, wanted: str) -> dict[str, Any]:
    drop_pages(where)
    command = [
        sys.executable,
        "-m",
        "benchmarks.single_tensor",
        "--place",
        str(where),
        "--read",
        what,
        by,
        wanted,
    ]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return found


def main() -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--place", type=Path, default=None, help="a directory on the disk to measure"
    )
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.place, *options.read)
        return
    where = Path(tempfile.mkdtemp(prefix="ckptd-bench-", dir=options.place))
    try:
        count = max(1, round(options.gb * 1e9 / (2 * SHAPE[0] * SHAPE[1])))
        save(where, count)
        print(
            f"{count} tensors of {2 * SHAPE[0] * SHAPE[1] / 1e6:.0f} MB; median of "
            f"{options.rounds}, files not in the page cache\n"
        )
        print(
            f"{'':34}{'seconds':>9}{'MB read':>10}{'from disk':>11}{'memory, MB':>12}{'ours = 1':>10}"  # noqa: E501
        )
        for what, kinds in READS.items():
            runs: dict[str, list[dict[str, Any]]] = {by: [] for by in kinds}
            for number in range(options.rounds):
                for by in kinds:
                    runs[by].append(taken(where, what, by, name((7 * number + 3) % count)))
            for number in range(options.rounds):
                assert len({of[number]["check"] for of in runs.values()}) == 1, (
                    "they have not read the same"
                )
            print(what)
            ours = statistics.median(run["seconds"] for run in runs["Checkpoint.tensor"])
            for by, of in runs.items():
                seconds, called, fetched, memory = (
                    statistics.median(run[key] for run in of)
                    for key in ("seconds", "called", "fetched", "memory")
                )
                print(
                    f"  "
                    f"{by:32}{seconds:9.3f}{called / 1e6:10.1f}{fetched / 1e6:11.1f}{memory / 1e6:12.1f}{seconds / ours:10.2f}"  # noqa: E501
                )
    finally:
        shutil.rmtree(where)


if __name__ == "__main__":
    main()
