"""Measures planning and metadata of jobs that are too large for this machine.

One rank and rank 0 run, and the others are simulated.

`python -m benchmarks.scale [--tensors N] [--ranks N]`. The tensors are DTensors of a
process group without processes, whose shards on this rank have no elements to speak of.
What the other ranks would send is what this rank sends, because they have the same
structure. The requests to the job's store are not in the times. DCP's own planner plans
the same tensors for as few ranks as it can in reasonable time.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import secrets
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import zstandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.rows import Row, keep
from ckptd.agent.plan.by_rule import ByRule, RuledShare, Structured, Summary
from ckptd.agent.plan.layout import plan_locally
from ckptd.agent.plan.rule_shares import decide, representatives
from ckptd.shared import names
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.metadata_object import MetadataReader
from ckptd.shared.formats.plan import Plan
from ckptd.shared.formats.snapshot_request import SnapshotRequest

_PEER_RANKS = 4
"""The ranks for which DCP plans. Its work grows with their number."""


def state_of(
    count: int, mesh: DeviceMesh, placements: list[list[Placement]]
) -> dict[str, torch.Tensor]:
    """Return `count` tensors, named like those of a transformer and of AdamW, divided
    in these ways by turns.
    """
    kinds = ("model.{}", "optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq")
    blocks = [f"layers.{{}}.attention.w{part}.weight" for part in "qkvo"] + [
        f"layers.{{}}.feed_forward.w{part}.weight" for part in (1, 2, 3)
    ]
    local, found = torch.zeros(1, 1), dict[str, torch.Tensor]()
    for number in range(count):
        block, kind = divmod(number, len(kinds))
        layer, part = divmod(block, len(blocks))
        found[kinds[kind].format(blocks[part].format(layer))] = DTensor.from_local(
            local, mesh, placements[part % len(placements)], run_check=False
        )
    return found


class Memory:
    """The memory that this process needs at most from now on, beyond what it has now."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak (proc(5))
        self._before = self._status("VmRSS")

    def gigabytes(self) -> float:
        return (self._status("VmHWM") - self._before) / 1e6

    @staticmethod
    def _status(key: str) -> int:
        line = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(key)
        )
        return int(line.split()[1])


def planned(name: str, state: dict[str, torch.Tensor], ranks: int) -> tuple[list[Row], Plan]:
    """Plan by rule as all ranks would.

    Return the rows, and the plan document of rank 0.
    """
    memory, begun = Memory(), time.perf_counter()
    described = ByRule.of(plan_locally(state, world_size=ranks), state, {}, 0)
    summary, structure = msgspec.msgpack.encode(described.summary), described.structured.encode()
    local = time.perf_counter()
    summaries = [msgspec.msgpack.decode(summary, type=Summary) for _ in range(ranks)]
    structures = {each: Structured.decode(structure) for each in representatives(summaries)}
    decision = decide(summaries, structures)
    assert decision is not None
    (share,) = (
        zstandard.compress(msgspec.msgpack.encode(each)) for each in decision.shares.values()
    )
    decided = time.perf_counter()
    layout = described.lay_out(
        msgspec.msgpack.decode(zstandard.decompress(share), type=RuledShare), 0, decision.metadata
    )
    seconds = time.perf_counter() - begun
    gigabytes, up, down = memory.gigabytes(), len(summary) + len(structure), len(share)
    beside = {
        "describe": local - begun,
        "decide": decided - local,
        "lay out": seconds - (decided - begun),
    }
    return [
        Row(name=f"{name}: first plan, all of it one after the "
            f"other", value=seconds, unit="s", limit=10, beside=beside),
        Row(name=f"{name}: memory that it took", value=gigabytes, unit="GB", limit=2),
        Row(
            name=f"{name}: traffic of the rank with the "
                f"most", value=(up + down) / 1e6, unit="MB", limit=1,
            beside={"of every other "
                "rank": (len(summary) + down) / 1e6, "plan document of rank "
                    "0": len(layout.document) / 1e6},
        ),
    ], layout.plan  # fmt: skip


class _Counted:
    """An object in memory that counts what is read of it."""

    remote = False

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, list[int]()
        self.size = len(data)

    def view(self, offset: int, length: int) -> memoryview:
        self.reads.append(length)
        return memoryview(self.data)[offset : offset + length]

    def read(self, buffer: memoryview, offset: int) -> int:
        raise AssertionError("a metadata object is read by views")

    def close(self) -> None:
        pass


def manifest_of(plan: Plan, ranks: int) -> Manifest:
    """Return a manifest of this plan, whose parts have sizes as in a real job."""
    parts = [
        PartEntry(
            rank=rank, file=names.part_file(rank, secrets.token_bytes(16)),
            bytes=(1 << 30) + 4096 * (rank % 97), raw_bytes=(1 << 30) + rank, items=len(plan.items),
            index_sha256=secrets.token_hex(32),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    tag, request = names.tag_directory(1, None, 1), SnapshotRequest(created=0.0)
    return Manifest.of(
        plan, request, parts, job="gpt", attempt=1, step=1, tag=tag, seq=1, codec="auto"
    )


def metadata(name: str, plan: Plan, ranks: int, limit: float) -> list[Row]:
    manifest = manifest_of(plan, ranks)
    begun = time.perf_counter()
    small, objects = manifest.split()
    seconds = time.perf_counter() - begun
    stored = b"".join(objects.values())
    size = Row(
        name=f"{name}: manifest and metadata "
            f"object", value=(len(small) + len(stored)) / 1e6, unit="MB", limit=limit,
        beside={"manifest": len(small) / 1e6, "written in s": seconds},
    )  # fmt: skip
    begun = time.perf_counter()
    read = Manifest.decode(small)
    if read.metadata_object is None:
        return [size]
    source = _Counted(stored)
    fqn = sorted(plan.metadata or {})[12_345 % len(plan.metadata or {})]
    found = MetadataReader(source, read.metadata_object, ranks, "metadata").find(fqn)
    looked_up = time.perf_counter() - begun
    assert found is not None
    megabytes = (len(small) + sum(source.reads)) / 1e6
    return [
        size,
        Row(name=f"{name}: reads to find one tensor, manifest "
            f"included", value=1 + len(source.reads), unit="reads", limit=3),
        Row(name=f"{name}: bytes to find one tensor, manifest "
            f"included", value=megabytes, unit="MB", limit=1, beside={"s": looked_up}),
    ]  # fmt: skip


def peer(state: dict[str, torch.Tensor]) -> Row:
    """Plan with DCP's planner: the local plan of one rank, and the global plan of
    `_PEER_RANKS` ranks that have sent the same one.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    begun = time.perf_counter()
    planner.set_up_planner(dict(state), is_coordinator=True)
    plan = planner.create_local_plan()
    local = time.perf_counter()
    sent = pickle.dumps(plan)
    several = [pickle.loads(sent) for _ in range(_PEER_RANKS)]  # as DCP sends it
    try:
        planner.create_global_plan(several)
    except ValueError:
        pass  # the plans of one rank do not make up whole tensors; it is found at the end
    seconds = time.perf_counter()
    return Row(
        name=f"DCP's planner on {_PEER_RANKS} ranks", value=seconds - begun, unit="s",
        beside={"local plan": local - begun, "traffic of each rank in MB": len(sent) / 1e6},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4096)
    args = parser.parse_args()
    # DCP warns of every tensor of the simulated plans
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    flat = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("fsdp",))
    grid = init_device_mesh("cpu", (args.ranks // 8, 8), mesh_dim_names=("replicate", "shard"))
    rows: list[Row] = []
    state = state_of(args.tensors, flat, [[Shard(0)]])
    called = f"{args.tensors:,} x {args.ranks:,}"
    found, plan = planned(f"{called}, FSDP2", state, args.ranks)
    rows += [
        *found,
        *metadata(called, plan, args.ranks, 50),
        *metadata(f"{args.tensors:,} x 15,000", plan, 15_000, 100),
    ]
    rows.append(peer(state))
    state = state_of(
        args.tensors, grid, [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)]]
    )
    found, plan = planned(f"{called}, two dimensions", state, args.ranks)
    rows += [*found, *metadata(f"{called}, two dimensions", plan, args.ranks, 50)]
    _, plan = planned("3,400", state_of(3400, flat, [[Shard(0)]]), args.ranks)
    rows += metadata(f"3,400 x {args.ranks:,}", plan, args.ranks, 10)
    keep(rows, "scale")


if __name__ == "__main__":
    main()
