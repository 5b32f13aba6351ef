"""Damages files exhaustively: every bit and every length of a journal and a manifest,
and random bits of parts.

`python -m tests.crash.damage [--journal BYTES] [--parts N] [--seed N]`. A damaged
journal must be read as it was, or be reported as corrupt, or be read as a shorter
journal, which may lack no record that a later record calls durable. A damaged manifest
must be refused. A checkpoint with a damaged part must be refused or load bit for bit:
the gaps between the chunks hold no data.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest import mock

from ckptd.agent import Agent, Checkpoint
from ckptd.daemon.journal import file as jf
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import Journal
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.system.fs import PosixFileSystem
from tests.shared.samples import flip
from tests.support.daemons import home, running
from tests.support.trainers import JOB, assert_equal, expected

Tally = tuple[int, list[str]]
"""The number of damaged files that were tried, and the problems that were found."""


def journal_of(size: int) -> tuple[bytes, list[jf.RawRecord]]:
    """Return the bytes of a full journal file of `size` bytes, and its records."""
    with (
        tempfile.TemporaryDirectory() as place,
        mock.patch.object(jf, "FILE_SIZE", size),
        ThreadPoolExecutor(1) as pool,
    ):
        directory = os.open(place, os.O_RDONLY)
        journal = Journal.open(PosixFileSystem(), directory, pool)
        journal.start()

        async def fill() -> None:
            step = 0
            while journal._end + 400 < size:
                step += 1
                common = {
                    "job": "gpt",
                    "attempt": 1,
                    "step": step,
                    "rank": 0,
                    "tag": f"step-{step:08d}.a0001",
                }
                await journal.append(
                    r.Staging(**common, file=f"rank-00000.{secrets.token_hex(16)}.ckpt")  # type: ignore[arg-type]
                )
            await journal.close()

        asyncio.run(fill())
        os.close(directory)
        data = (Path(place) / os.listdir(place)[0]).read_bytes()
    return data, jf.scan(data, 1).records


def misread(damaged: bytes, records: list[jf.RawRecord]) -> str:
    """Return what is wrong with the way in which a damaged journal is read, or "" if
    nothing is.
    """
    try:
        found = jf.scan(damaged, 1)
    except IntegrityError:
        return ""
    if found.records != records[: len(found.records)]:
        return "it reads as something else"
    lost = records[len(found.records) :]
    if found.ending is jf.Ending.CORRUPT or not lost:
        return ""
    if found.ending is jf.Ending.CLEAN:
        return f"{len(lost)} records are gone, and nobody says so"
    proof = [record for record in lost[1:] if record.durable >= lost[0].sequence]
    return (
        f"record {lost[0].sequence} is called torn, and record {proof[0].sequence} says it was "
        f"durable"
        if proof
        else ""
    )


def journal_bits(size: int) -> Tally:
    data, records = journal_of(size)
    problems = [
        f"bit {bit}: {why}" for bit in range(8 * size) if (why := misread(flip(data, bit), records))
    ]
    return 8 * size, problems


def journal_lengths(size: int) -> Tally:
    """Cut the journal file to every length.

    Each cut must be reported as corrupt, because a journal file has its full length
    before it gets its name.
    """
    data, _ = journal_of(size)
    problems = []
    with (
        tempfile.TemporaryDirectory() as place,
        mock.patch.object(jf, "FILE_SIZE", size),
        ThreadPoolExecutor(1) as pool,
    ):
        directory = os.open(place, os.O_RDONLY)
        for length in range(size + 1):
            for name in os.listdir(place):
                os.unlink(Path(place) / name)
            (Path(place) / "0000000000000001.log").write_bytes(data[:length])
            with _quiet():
                journal = Journal.open(PosixFileSystem(), directory, pool)
            if (journal.corrupt, journal.torn) != (int(length < size), 0):
                problems.append(
                    f"cut to {length} of {size} bytes: {journal.corrupt} corrupt, {journal.torn} "
                    f"torn"
                )
        os.close(directory)
    return size + 1, problems


@contextmanager
def _quiet() -> Iterator[None]:
    with mock.patch("ckptd.daemon.journal.journal.log"):
        yield


@contextmanager
def checkpoint() -> Iterator[Path]:
    """Context manager.

    Yields the directory of a checkpoint that holds a small state in two files.
    """
    with home() as place:
        with running(place, "--codec", "zstd:1", "--files-per-rank", "2"):
            agent = Agent(JOB, socket=place.socket)
            agent.snapshot(expected(3, 500), step=3).wait("durable", timeout=120)
            agent.close()
        (tag,) = (place.root / JOB).glob("step-*")
        yield tag


def manifest_bits(tag: Path) -> Tally:
    data = (tag / "manifest.json").read_bytes()
    damaged = [(f"bit {bit}", flip(data, bit)) for bit in range(8 * len(data))]
    damaged += [(f"cut to {length} bytes", data[:length]) for length in range(len(data))]
    problems = []
    for what, changed in damaged:
        try:
            Manifest.decode(changed)
        except IntegrityError:
            continue
        problems.append(f"manifest, {what}: it is accepted")
    return len(damaged), problems


def part_bits(tag: Path, count: int, seed: int) -> Tally:
    chance, problems = Random(seed), list[str]()
    files = {path: path.read_bytes() for path in sorted(tag.glob("rank-*"))}
    assert len(files) == 2
    bytes_used = {
        path: [at for at in range(len(data)) if data[at]] + list(range(128))
        for path, data in files.items()
    }
    for number in range(count):
        kind, part = number % 4, chance.choice(list(files))
        data, used = files[part], bytes_used[part]
        bit = (
            8 * chance.choice(used) + chance.randrange(8)
            if kind
            else 8 * chance.randrange(len(data))
        )
        what, changed = (
            (f"bit {bit}", flip(data, bit))
            if kind < 3
            else (f"cut at {bit // 8}", data[: bit // 8])
        )
        part.write_bytes(changed)
        try:
            with Checkpoint.open(tag.parent, tag.name) as opened:
                assert_equal(opened.load(), 3, 500)
        except IntegrityError:
            continue
        except Exception as error:
            problems.append(f"{part.name}, {what}: {error!r}")
            continue
        finally:
            part.write_bytes(data)
        if kind == 3:
            problems.append(f"{part.name}, {what}: it is accepted")
    return count, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--journal", type=int, default=4096, help="bytes")
    parser.add_argument("--parts", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    kinds = {
        "journal, every bit": journal_bits(options.journal),
        "journal, every length": journal_lengths(options.journal),
    }
    with checkpoint() as tag:
        kinds["manifest, every bit and length"] = manifest_bits(tag)
        kinds["part"] = part_bits(tag, options.parts, options.seed)
    for kind, (count, problems) in kinds.items():
        print(f"{kind}: {count} tried, {len(problems)} wrong", *problems[:20], sep="\n  ")
    sys.exit(any(problems for _, problems in kinds.values()))


if __name__ == "__main__":
    main()
