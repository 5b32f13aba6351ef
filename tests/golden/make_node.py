"""Writes a golden node: a root, its journal and its sealed segments, as the daemon and
agent of one version leave them when both are killed.

Run the script with the code of that version, from a checkout of its commit:

    cd CHECKOUT && PYTHONPATH=. .venv/bin/python THIS_REPOSITORY/tests/golden/make_node.py THIS_REPOSITORY/tests/golden/v1/node.tar.xz

It never overwrites an archive, because nodes of that version are in use.
`v1/node.tar.xz` was written by commit 5811ec8. The archive holds `root/` and
`segments/`. Only the host's name and the boot id in it belong to a machine: the host's
directory is called HOST, and `unpack` gives the segments the boot id of the running
kernel.

Three daemons serve seven jobs one after the other, each under the same root. `JOBS`
says how far each job came. The third daemon is killed by a failpoint while one part is
not journaled yet, one manifest has its temporary name, and one checkpoint is about to
be deleted.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import io
import os
import random
import signal
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptd.agent import Agent, per_rank
from ckptd.daemon.commands import forgetting
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.segment import SegmentHeader, this_boot
from ckptd.shared.system import machine
from tests.support.daemons import Daemon, Home, home, until
from tests.support.ranks import HERE, Ranks
from tests.support.storage import source

HOST = "HOST"
"""The placeholder for the name of the host in the archive."""
FIRST = ("--codec", "zstd:1", "--keep-last", "2", "--threads", "4")
SECOND = ("--codec", "raw", "--files-per-rank", "2", "--keep-last", "2", "--threads", "4")
THIRD = FIRST
ENVIRONMENT = {"CKPTD_CHUNK_SIZE": "65536"}
FAILPOINTS = "persist.synced=hang@1,commit.synced=hang@1,retire.intended=kill@1"


@dataclasses.dataclass(frozen=True)
class Left:
    """How far a job came before its processes were killed.

    `newest` is the (attempt, step) that must be recovered; it is in memory, and in
    storage too unless `memory_only`. `committed` are the directories that hold a
    manifest.
    """

    newest: tuple[int, int]
    committed: tuple[str, ...]
    ranks: int = 1
    memory_only: bool = False


JOBS = {
    "plain": Left(
        (1, 4), ("best.a0001", "step-00000001.a0001", "step-00000003.a0001"), memory_only=True
    ),
    "wide": Left((1, 3), ("step-00000001.a0001", "step-00000002.a0001"), ranks=2, memory_only=True),
    "again": Left((2, 7), ("step-00000005.a0001", "step-00000006.a0002"), memory_only=True),
    "pinned": Left((1, 4), ("step-00000001.a0001", "step-00000003.a0001", "step-00000004.a0001")),
    "retiring": Left((1, 3), ("step-00000001.a0001", "step-00000002.a0001", "step-00000003.a0001")),
    "halfway": Left((1, 2), ("step-00000001.a0001",)),
    "written": Left((1, 2), ("step-00000001.a0001",)),
}
RETIRING = ("retiring", "step-00000001.a0001")
"""The journal holds the intent to delete this checkpoint; its manifest is still there."""
HALFWAY = ("halfway", "step-00000002.a0001")
"""The part is written, but not journaled as durable. It must be swept, and the step
must be saved again from memory.
"""
WRITTEN = ("written", "step-00000002.a0001")
"""The part is journaled as durable, but the manifest still has its temporary name. The
step must be committed from this part.
"""
PINNED = ("pinned", "step-00000001.a0001")
TAG_OF = {("plain", 2): "best"}


# -- what the trainers save; plain arithmetic, so that every version of torch gets the same bits


def tensors(job: str, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a job at one step, each in one piece."""
    start = 1000 * list(JOBS).index(job) + step
    return {
        "weight": torch.arange(start, start + 301, dtype=torch.float32) / 8,
        "half": (torch.arange(64) + start % 97).to(torch.bfloat16),
        "matrix": (torch.arange(6 * 5, dtype=torch.float64).reshape(6, 5) + start).t(),
        "count": torch.tensor(start),
    }


def state_of(job: str, step: int) -> dict[str, Any]:
    """Return this rank's state at one step; of several ranks, `weight` is sharded."""
    made, rank = tensors(job, step), dist.get_rank()
    values: dict[str, Any] = {
        "step": step,
        "history": list(range(step)),
        "own": per_rank({"rank": rank, "seen": 10 * step + rank}),
    }
    if dist.get_world_size() > 1:
        values["weight"] = _shard(made.pop("weight"))
    return {**made, **values}


def blank(job: str) -> dict[str, Any]:
    """Return a state to recover into."""
    made = {name: torch.zeros_like(tensor) for name, tensor in tensors(job, 1).items()}
    values: dict[str, Any] = {"step": -1, "history": [], "own": per_rank({"rank": -1, "seen": -1})}
    if dist.get_world_size() > 1:
        values["weight"] = _shard(made.pop("weight"))
    return {**made, **values}


def _shard(tensor: torch.Tensor) -> DTensor:
    if "mesh" not in HERE:
        HERE["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    local = tensor.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return DTensor.from_local(
        local, HERE["mesh"], [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def differences(state: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return the keys whose values are not the same bit for bit."""
    return [
        key
        for key in sorted({*state, *wanted})
        if key not in state or key not in wanted or not _same(state[key], wanted[key])
    ]


def _same(one: Any, other: Any) -> bool:
    # The value that per_rank holds.
    one, other = (getattr(value, "value", value) for value in (one, other))
    if isinstance(one, DTensor):
        one, other = one.to_local(), other.to_local()
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


# -- commands to the ranks


def begin(socket: Path, job: str) -> tuple[int, tuple[int, int] | None, str, list[str]]:
    """Make an agent and recover.

    Return its attempt, the (attempt, step) that came back, its source, and the keys
    that differ.
    """
    # The states of the generators are saved too: the same in every rank, so that the
    # archive is small.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    agent = HERE["agent"] = Agent(job, socket=socket)
    state = blank(job)
    found = agent.recover(state)
    agent._link.handovers.wait_for_threads()  # the slots are there before the daemon may be killed
    if found is None:
        return agent.attempt, None, "", []
    assert found.step is not None
    return (
        agent.attempt,
        (found.attempt, found.step),
        found.source,
        differences(state, state_of(job, found.step)),
    )


def snapshot(job: str, step: int, persist: bool, wait: str) -> str:
    """Save one step and wait until it is `wait`. Return the state it is in then."""
    pending = HERE["agent"].snapshot(
        state_of(job, step), step=step, tag=TAG_OF.get((job, step)), persist=persist
    )
    pending.wait(wait, timeout=120)
    return str(pending.state)


def close() -> None:
    """Close the agent."""
    HERE["agent"].close()


# -- the three daemons


def make(place: Home) -> None:
    """Leave a node at `place` whose daemon and trainers have been killed."""
    with ExitStack() as stack:
        jobs = {job: stack.enter_context(Ranks(left.ranks)) for job, left in JOBS.items()}

        def save(job: str, *steps: int, persist: bool = True, wait: str = "durable") -> None:
            for step in steps:
                jobs[job].call(snapshot, job, step, persist, wait)

        daemon = stack.enter_context(
            closing(Daemon(place, *FIRST, environment=ENVIRONMENT))
        ).wait_ready()
        for job, ranks in jobs.items():
            ranks.call(begin, place.socket, job)
        for job in ("wide", "halfway", "written", "pinned"):
            save(job, 1)
        save("plain", 1, 2)
        save("retiring", 1, 2)
        forgetting.pin(place.root.joinpath(*PINNED), remove=False)
        save("again", 5)
        jobs["again"].kill(0)
        jobs["again"] = stack.enter_context(Ranks(1))
        ((attempt, recovered, _, wrong),) = jobs["again"].call(begin, place.socket, "again")
        assert (attempt, recovered, wrong) == (2, (1, 5), [])
        daemon.kill()

        daemon = stack.enter_context(closing(_again(place, *SECOND)))
        save("plain", 3)
        save("wide", 2)
        save("again", 6)
        save("pinned", 2, 3, 4)
        until(
            lambda: not place.root.joinpath("pinned", "step-00000002.a0001").exists(), "retention"
        )
        daemon.kill()

        daemon = stack.enter_context(closing(_again(place, *THIRD, failpoints=FAILPOINTS)))
        save("halfway", 2, wait="sealed")
        until(lambda: _part_is_whole(place.root.joinpath(*HALFWAY)), "part of 'halfway'")
        save("written", 2, wait="sealed")
        until(
            lambda: _is_written(place.root.joinpath(*WRITTEN) / "manifest.json.tmp"),
            "manifest of 'written' under its temporary name",
        )
        for job, left in JOBS.items():
            if left.memory_only:
                save(job, left.newest[1], persist=False, wait="sealed")
                until(
                    lambda job=job, left=left: _sealed(daemon, job) == left.newest,  # type: ignore[misc]
                    f"seal of {job!r}",
                )
        jobs["retiring"].begin(snapshot, "retiring", 3, True, "durable")
        assert daemon.died() == -signal.SIGKILL


def _again(place: Home, *options: str, failpoints: str = "") -> Daemon:
    """Start the next daemon, and wait until every rank is connected to it."""
    daemon = Daemon(place, *options, failpoints=failpoints, environment=ENVIRONMENT).wait_ready()
    wanted = {job: left.ranks for job, left in JOBS.items()}
    until(
        lambda: {row["job"]: row["ranks_connected"] for row in daemon.status()["jobs"]} == wanted,
        "rank at the new daemon",
    )
    return daemon


def _sealed(daemon: Daemon, job: str) -> tuple[int, int] | None:
    row = next(row for row in daemon.status()["jobs"] if row["job"] == job)
    return (
        (row["last_sealed"]["attempt"], row["last_sealed"]["step"]) if row["last_sealed"] else None
    )


def _is_written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _part_is_whole(directory: Path) -> bool:
    for part in directory.glob("rank-*"):
        try:
            with part.open("rb") as file:
                PartReader(source(file.fileno()), part.name)
        except (OSError, CkptdError):
            continue
        return True
    return False


# -- the archive


def pack(place: Home) -> bytes:
    """Return the root and the segments as a compressed archive.

    Zeros, most of the journal, take no room in it.
    """
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:xz", preset=9) as archive:
        for top, directory in (("root", place.root), ("segments", place.segments)):
            for path in [directory, *sorted(directory.rglob("*"))]:
                name = "/".join((top, *path.relative_to(directory).parts))
                name = name.replace(
                    f"root/{names.CONTROL}/{machine.host()}", f"root/{names.CONTROL}/{HOST}"
                )
                archive.add(path, name, recursive=False, filter=_without_owner)
    return found.getvalue()


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def unpack(archive: Path, place: Home) -> None:
    """Lay the node out as if its daemon and trainers had been killed on this host,
    since it was booted.
    """
    with tarfile.open(archive) as opened:
        opened.extractall(place.path / "node", filter="data")
    node = place.path / "node"
    (node / "root" / names.CONTROL / HOST).rename(node / "root" / names.CONTROL / machine.host())
    (node / "root").rename(place.root)
    place.segments.mkdir(mode=0o700)
    for segment in sorted((node / "segments").iterdir()):
        descriptor = os.open(
            place.segments / segment.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )
        with open(descriptor, "wb") as file:
            file.write(of_this_boot(segment.read_bytes()))


def of_this_boot(segment: bytes) -> bytes:
    """Return a segment whose header copies carry the boot id of the kernel that runs
    now. A copy never written stays as it is.
    """
    return (
        b"".join(_header_of_this_boot(segment[at : at + ALIGN]) for at in (0, ALIGN))
        + segment[2 * ALIGN :]
    )


def _header_of_this_boot(data: bytes) -> bytes:
    try:
        return dataclasses.replace(SegmentHeader.decode(data), boot_id=this_boot()).encode()
    except IntegrityError:
        return data


def committed(place: Home) -> Iterator[tuple[str, str]]:
    """Yield (job, directory) of every checkpoint that has a manifest."""
    for manifest in sorted(place.root.glob("*/*/manifest.json")):
        yield manifest.parent.parent.name, manifest.parent.name


def main() -> None:
    target = Path(sys.argv[1]).absolute()
    with home() as place:
        make(place)
        wanted = sorted((job, tag) for job, left in JOBS.items() for tag in left.committed)
        found = list(committed(place))
        assert found == wanted, found
        data = pack(place)
    with open(target, "xb") as file:
        file.write(data)
    print(f"{target}: {len(data)} bytes")


if __name__ == "__main__":
    main()
