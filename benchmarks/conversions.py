"""Measures the time, the bytes and the memory of exports and imports, beside the ways
that PyTorch and transformers have.

`python -m benchmarks.conversions [--gigabytes N]`. The state is that of a transformer
with random weights in bf16 and no optimizer, 5 GB by default. Each way runs in a
process of its own, whose most memory (ru_maxrss) counts, without that of the imports.
The files that are read were dropped from the page cache, and the time ends when what
was written is synced.

dcp_to_torch_save, save_pretrained and dcp.load check nothing of what they read or
write, and dcp.load writes nothing. Exports check both, imports check what they write,
and both read it back.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.rows import Row, drop_pages, keep, settled
from ckptd.agent import StorageWriter
from ckptd.agent.convert import FORMATS, export, import_checkpoint
from tests.support.daemons import home

LARGEST = 512 << 20
"""The bytes of the largest tensor."""
SPARE = 512 << 20
"""The memory that a conversion may take beside the largest tensor."""


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    """Return a state dict of about so many bytes: one large embedding, and layers of 32
    MiB.
    """
    state = {"embedding": torch.randn(LARGEST // 2 // 1024, 1024, dtype=torch.bfloat16)}
    for number in range(max(1, (nbytes - LARGEST) >> 25)):
        state[f"layers.{number}.weight"] = torch.randn(4096, 4096, dtype=torch.bfloat16)
    return state


def by_export(to: str) -> Callable[[Path, Path], None]:
    def way(place: Path, out: Path) -> None:
        export(place / "ckptd", to, out, only="model")

    return way


def by_import(name: str) -> Callable[[Path, Path], None]:
    def way(place: Path, out: Path) -> None:
        import_checkpoint(place / name, out, codec="raw")

    return way


def by_dcp_load(place: Path, out: Path) -> None:
    """Load into new tensors, and write nothing."""
    out.mkdir()
    entries = FileSystemReader(place / "dcp").read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in entries.items()
    }
    dcp.load(state, checkpoint_id=place / "dcp", no_dist=True)


def by_dcp_to_torch_save(place: Path, out: Path) -> None:
    dcp_to_torch_save(place / "dcp", out)


def by_save_pretrained(place: Path, out: Path) -> None:
    """Load with dcp.load and write the shards as `save_pretrained` does, with the
    library safetensors.
    """
    from huggingface_hub import save_torch_state_dict

    out.mkdir()

    entries = FileSystemReader(place / "dcp").read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in entries.items()
    }
    dcp.load(state, checkpoint_id=place / "dcp", no_dist=True)
    save_torch_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in state.items()}, out
    )


def _run(pipe: Connection, way: Callable[[Path, Path], None], place: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    way(place, out)
    os.sync()
    pipe.send(
        (
            time.perf_counter() - begun,
            1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        )
    )


def measured(way: Callable[[Path, Path], None], place: Path) -> tuple[float, int, int]:
    """Return the seconds that a way takes in a process of its own, the bytes that it
    writes, and the memory that it takes.
    """
    out = place / "out"
    settled()
    drop_pages(place)
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_run, args=(theirs, way, place, out))
    process.start()
    theirs.close()
    seconds, memory = ours.recv()
    process.join()
    nbytes = sum(
        file.stat().st_size
        for file in (out.rglob("*") if out.is_dir() else [out])
        if file.is_file()
    )
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return seconds, nbytes, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.2)
    warnings.simplefilter("ignore")
    nbytes = int(1e9 * parser.parse_args().gigabytes)
    ways: dict[str, Callable[[Path, Path], None]] = {
        f"export to {to}": by_export(to) for to in FORMATS
    }
    ways |= {
        "dcp_to_torch_save": by_dcp_to_torch_save,
        "dcp.load and save_torch_state_dict": by_save_pretrained,
    }
    with home() as place:
        # So that this process stays small.
        writer = get_context("fork").Process(target=_make, args=(place.path, nbytes))
        writer.start()
        writer.join()
        found = {name: measured(way, place.path) for name, way in ways.items()}
        for to in FORMATS:
            found[f"import from {to}"] = _imported(place.path, to)
        found["dcp.load"] = measured(by_dcp_load, place.path)
    rows = []
    for name, (seconds, size, memory) in found.items():
        beside = {"GB/s": nbytes / seconds / 1e9, "bytes": size / nbytes}
        rows.append(Row(name=f"{name}: seconds", value=seconds, unit="s", beside=beside))
        limit = (LARGEST + SPARE) / 1e6 if "port" in name else None
        rows.append(Row(name=f"{name}: memory", value=memory / 1e6, unit="MB", limit=limit))
    keep(rows, "conversions")


def _imported(place: Path, to: str) -> tuple[float, int, int]:
    """Export to a format, and measure the import of that."""
    if to == "dcp":
        return measured(by_import("dcp"), place)
    source = place / f"{to}-source"
    export(place / "ckptd", to, source, only="model")
    try:
        return measured(by_import(source.name), place)
    finally:
        shutil.rmtree(source) if source.is_dir() else source.unlink()


def _make(place: Path, nbytes: int) -> None:
    state = {"model": state_of(nbytes)}
    dcp.save(state, checkpoint_id=place / "dcp", no_dist=True)
    dcp.save(state, storage_writer=StorageWriter(place / "ckptd", codec="raw"), no_dist=True)


if __name__ == "__main__":
    main()
