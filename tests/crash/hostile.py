"""Calls the whole public API with hostile files: every error must be a CkptdError of
one line.

`python -m tests.crash.hostile --tries 500 [--seed N]`. A try makes one of three things:
a checkpoint whose documents are nonsense and whose checksums are right (the grammar is
that of `nonsense.py`), a sound checkpoint in which files were damaged, or a checkpoint
of another tool in which files were damaged. Then it calls everything that reads it:
`Checkpoint`, `ArrayCheckpoint`, `StorageReader`, `recover`, `load_model`, `export`,
`import_checkpoint`, `ckptd.agent.smp` and the commands. What succeeds is not judged
here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from crc32c import crc32c

from ckptd.agent import Agent, Checkpoint, CkptdError, StorageReader, smp
from ckptd.agent.convert import FORMATS, export, import_checkpoint, load_model
from ckptd.daemon.commands.cli import main as command
from ckptd.shared.array_checkpoint import ArrayCheckpoint
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.binary import ALIGN, align
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.part import Chunk, PartIndex, encode_end, encode_header
from ckptd.shared.formats.plan import MIN_CHUNK, Region, align_region, chunk_ranges, with_values
from ckptd.shared.names import new_nonce, part_file, tag_directory
from tests.crash import nonsense
from tests.shared.samples import WRITER
from tests.support.daemons import Home, home, running

JOB, OTHER = "gpt", "other"
COMMANDS = ("show", "show --keys", "show --json", "ls", "verify", "verify --json")


# -- checkpoints whose documents are nonsense


def forge(case: nonsense.Case, root: Path, step: int) -> bool:
    """Write a case as a committed checkpoint whose checksums are right.

    Return False if it cannot be written as one.
    """
    tag = tag_directory(step, None, 1)
    place = root / JOB / tag
    place.mkdir(parents=True, exist_ok=True)
    entries = []
    for rank, part in enumerate(case.parts):
        plan, values = nonsense.plan_bytes_of(part), nonsense.values_bytes_of(part)
        regions = [
            Region(*region)
            for region in part.regions
            if region[2] in (1, 2, 4, 8, 16) and region[0] + region[1] < 1 << 22
        ]
        start = align_region(
            max([len(part.data), *(region.offset + region.length for region in regions)])
        )
        slot = part.data.ljust(start, b"\0") + values
        body, chunks, nonce = bytearray(ALIGN), list[Chunk](), new_nonce()
        for found in chunk_ranges(with_values(regions, (start, len(values))), MIN_CHUNK):
            raw = slot[found.offset : found.offset + found.length]
            chunks.append(
                Chunk(
                    found.offset,
                    found.length,
                    len(body),
                    len(raw),
                    0,
                    found.element_size,
                    crc32c(raw),
                    crc32c(raw),
                )
            )
            body += raw.ljust(align(len(raw)), b"\0")
        index = PartIndex(
            job=JOB, attempt=1, step=step, rank=rank, world_size=len(case.parts), tag=tag,
            signature=hashlib.sha256(plan).digest(), plan=plan,
            request=nonsense.request_bytes_of(part), values=(start, len(values)),
            chunk_size=MIN_CHUNK, chunks=chunks,
        )  # fmt: skip
        body[:ALIGN] = encode_header(index, nonce)
        data = bytes(body) + encode_end(len(body), index.encode())
        (place / part_file(rank, nonce)).write_bytes(data)
        entries.append(
            PartEntry(
                rank=rank, file=part_file(rank, nonce), bytes=len(data),
                raw_bytes=sum(c.raw_length for c in chunks), items=len(part.items),
                index_sha256=hashlib.sha256(index.encode()).hexdigest(),
            )
        )  # fmt: skip
    metadata: Any = {"state_dict_metadata": case.parts[0].metadata, "planner_data": None}
    manifest = Manifest(
        job=JOB, attempt=1, step=step, tag=tag, seq=step, world_size=len(case.parts),
        created="2026-01-02T03:04:05+00:00", parts=entries, metadata=metadata, metrics={},
        user_content=None, writer={**WRITER, "codec": "raw"},
    )  # fmt: skip
    try:
        data, objects = manifest.split()
    except (
        IntegrityError,
        TypeError,
        KeyError,
        AttributeError,
        ValueError,
        msgspec.MsgspecError,
    ):  # no manifest can hold such metadata
        return False
    for name, stored in objects.items():
        (place / name).write_bytes(stored)
    (place / "manifest.json").write_bytes(data)
    return True


# -- files that were damaged


def damage(place: Path, chance: Random) -> str:
    """Damage one or two files below a directory, or the file itself.

    Return what was done.
    """
    files = (
        sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    )
    done = []
    for path in chance.sample(files, min(len(files), chance.randrange(1, 3))):
        data = bytearray(path.read_bytes())
        how = chance.choice(
            ["flip", "cut", "empty", "noise", "text", "gone", "directory", "sealed"]
        )
        if how == "flip":
            for _ in range(chance.randrange(1, 30)):
                if data:
                    data[
                        chance.choice(
                            [chance.randrange(len(data)), chance.randrange(min(len(data), 300))]
                        )
                    ] = chance.randrange(256)
        elif how == "cut":
            del data[chance.randrange(len(data) + 1) :]
        elif how == "empty":
            data.clear()
        elif how == "noise":
            data[:] = chance.randbytes(chance.randrange(3000))
        elif how == "text":
            data[:] = chance.choice(
                [
                    b"{}",
                    b"[" * 5000,
                    b'{"a": ' * 3000,
                    b"null",
                    b"\xff\xfe",
                    b"0" * 5000,
                    b'{"__metadata__": 7}',
                ]
            )
        elif how == "sealed" and path.name == "manifest.json":
            data[:] = _resealed(bytes(data), chance)
        if how in ("gone", "directory"):
            path.unlink()
            if how == "directory":
                path.mkdir()
        else:
            path.write_bytes(data)
        done.append(f"{path.name} {how}")
    return ", ".join(done)


def _resealed(data: bytes, chance: Random) -> bytes:
    """Return a manifest in which one member has another value, with a digest that is
    right.
    """
    members = json.loads(data)
    del members["sha256"]
    name = chance.choice(sorted(members))
    members[name] = chance.choice(
        [None, 0, -1, 1 << 70, "x", "", [], {}, [{}], {"a": {}}, 1.5, True, ["x"], members[name]]
    )
    if (
        chance.random() < 0.3
        and isinstance(members.get("parts"), list)
        and members["parts"]
        and isinstance(members["parts"][0], dict)
    ):
        members["parts"][0][chance.choice(sorted(members["parts"][0]))] = chance.choice(
            [0, -1, "../../etc/passwd", "", None, 1 << 62]
        )
    lines = ",\n".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in members.items())
    body = ("{\n" + lines + ",\n").encode()
    return body + b'"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


# -- everything that reads


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer0 = torch.nn.Linear(3, 2)


def _everything(opened: Any) -> None:
    """Call each member of an open checkpoint."""
    repr(opened)
    for name in opened.keys()[:20]:
        calls: list[Callable[[str], Any]] = (
            [opened.array, opened.shape, opened.dtype]
            if isinstance(opened, ArrayCheckpoint)
            else [
                opened.metadata,
                opened.tensor,
                partial(opened.tensor, slices=(0,)),
                partial(opened.tensor, dtype=torch.float64),
            ]
        )
        for call in calls:
            try:
                call(name)
            except CkptdError:
                pass


def _opened(kind: Any, path: Path, how: str) -> None:
    """Open a checkpoint and call its method `how`, or each method that takes the name
    of a tensor if `how` is "".
    """
    with kind.open(path) as checkpoint:
        if how:
            getattr(checkpoint, how)()
        else:
            _everything(checkpoint)


def calls_on(path: Path, out: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each call that reads a checkpoint of ckptd, with its name."""
    for where in (path, path.parent):
        for kind in (Checkpoint, ArrayCheckpoint):
            for how in ("", "load", "verify"):
                yield f"{kind.__name__}.{how}", partial(_opened, kind, where, how)
    yield "Checkpoint.open by step", partial(Checkpoint.open, path.parent, 1)
    yield "StorageReader", partial(_dcp_load, path)
    yield "smp.load", partial(smp.load, path / "object")
    yield "smp.load of a file", partial(smp.load, path / "manifest.json", partial=False)
    for number, to in enumerate(FORMATS):
        yield f"export to {to}", partial(export, path, to, out / f"exported-{number}")
    yield from calls_on_any(path, out)


def calls_on_any(path: Path, out: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each call that reads a checkpoint in any format, with its name."""
    yield "load_model", partial(load_model, _Model(), path)
    yield "load_model, not strict", partial(load_model, _Model(), path, strict=False)
    yield "import_checkpoint", partial(import_checkpoint, path, out / "imported")
    for verb in COMMANDS:
        yield f"ckptd {verb}", partial(_command, [*verb.split(), str(path)])


def _dcp_load(path: Path) -> None:
    """Call DCP's `load` through the reader.

    DCP puts the errors of all ranks into an exception of its own.
    """
    state = {"model": {"layer0.w": torch.zeros(3, 2)}}
    try:
        dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
    except dcp.CheckpointException as error:
        for failure, _ in error.failures.values():
            if not isinstance(failure, (CkptdError, AssertionError)) and not _OF_DCP.search(
                str(failure)
            ):
                raise failure from None


_OF_DCP = re.compile("Missing key|[Ss]ize mismatch")
"""Matches the errors of DCP's planner for a checkpoint that does not have the caller's
state.
"""


def _command(arguments: list[str]) -> None:
    found = CliRunner().invoke(command, arguments)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    if "Traceback" in found.output:
        raise AssertionError(found.output[-1500:])


class Hostile:
    """The rig. `problems`: each call that raised another error, with its first try."""

    def __init__(self, place: Home, work: Path) -> None:
        self.place, self.work = place, work
        self.counts = Counter[str]()
        self.problems: dict[str, str] = {}
        self._sound = self._make_sound()

    def _make_sound(self) -> dict[str, Path]:
        """Make one sound checkpoint in each format."""
        agent = Agent(OTHER, socket=self.place.socket)
        model = _Model()
        state = {
            "model": model,
            "step": 3,
            "w": torch.ones(4),
            "tuple": (1, [2.5, "x"]),
            "layer0.w": torch.ones(3, 2),
        }
        agent.snapshot(state, step=1).wait("durable", timeout=60)
        agent.close()
        (path,) = (self.place.root / OTHER).glob("step-*")
        found = {"ckptd": path}
        for to in FORMATS:
            out = self.work / f"sound-{to}{'.safetensors' if to == 'safetensors' else ''}"
            export(path, to, out, **({} if to in ("dcp", "torch") else {"only": "model"}))  # type: ignore[arg-type]
            found[to] = out
        return found

    def attempt(self, chance: Random, label: str) -> None:
        self._clear()
        out = self.work / "out"
        kind = chance.choice(["nonsense", "nonsense", "damaged", "another tool"])
        if kind == "another tool":
            to = chance.choice(sorted(FORMATS))
            path, what = self._copy(to), ""
            what = f"{to}: {damage(path, chance)}"
            calls = calls_on_any(path, out)
        elif kind == "damaged":
            path = self.place.root / JOB / self._sound["ckptd"].name
            shutil.copytree(self._sound["ckptd"], path)
            what = damage(path, chance)
            calls = calls_on(path, out)
        else:
            case = nonsense.case_of(chance)
            what = "+".join(case.what) or "sound"
            if not forge(case, self.place.root, 1):
                return
            path = self.place.root / JOB / tag_directory(1, None, 1)
            calls = calls_on(path, out)
        self.counts[kind] += 1
        for name, call in calls:
            out.mkdir()
            self._call(name, call, f"{label}, {what}")
            shutil.rmtree(out)
        if kind != "another tool" and chance.random() < 0.3:
            self._call("recover", self._recover, f"{label}, {what}")
            self.counts[" recoveries"] += 1

    def _copy(self, to: str) -> Path:
        source = self._sound[to]
        path = self.work / f"copy{source.suffix}"
        if source.is_dir():
            shutil.copytree(source, path)
        else:
            shutil.copyfile(source, path)
        return path

    def _clear(self) -> None:
        for path in [self.work / "out", *self.work.glob("copy*"), self.place.root / JOB]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _recover(self) -> None:
        agent = Agent(JOB, socket=self.place.socket)
        try:
            agent.recover({"model": {"layer0.w": torch.zeros(3, 2)}, "step": 0})
        finally:
            agent.close()

    def _call(self, name: str, call: Callable[[], Any], label: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except CkptdError as error:
            if "\n" in str(error):
                self.problems.setdefault(
                    f"{name}: an error of several lines", f"{label}: {error}"[:800]
                )
        except Exception as error:
            trace, last = error.__traceback__, None
            while trace is not None:
                last, trace = trace, trace.tb_next
            where = (
                f"{Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
                if last is not None
                else ""
            )
            kind = f"{name.partition(' to ')[0]}: {type(error).__name__} in {where}"
            self.problems.setdefault(kind, f"{label}: {error}"[:500])


@contextmanager
def hostile() -> Iterator[Hostile]:
    """Context manager. Run a daemon, and yield the rig."""
    with ExitStack() as stack:
        place = stack.enter_context(home())
        stack.enter_context(running(place, "--keep-last", "0", "--codec", "raw", "--threads", "1"))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptd-hostile-")))
        yield Hostile(place, work)


def run(count: int, seed: int, seconds: float = float("inf")) -> tuple[Counter[str], list[str]]:
    """Return how many tries of each kind were made, and which calls raised another
    error.
    """
    end = time.monotonic() + seconds
    with hostile() as made:
        for number in range(count):
            if time.monotonic() > end:
                break
            made.attempt(Random(f"hostile/{seed}/{number}"), f"try {number + 1} of seed {seed}")
        return made.counts, [f"{kind}: {text}" for kind, text in made.problems.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    tried, problems = run(options.tries, options.seed)
    print(*(f"{name:24} {count}" for name, count in sorted(tried.items())), *problems, sep="\n")
    print(
        f"{sum(n for name, n in tried.items() if not name.startswith(' '))} tries, seed "
        f"{options.seed}, {len(problems)} problems"
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
