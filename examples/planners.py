"""Shows custom planners of torch.distributed.checkpoint on ckptd.

They rename keys, cast, balance bytes over ranks, keep notes, load with a cast, load one
tensor, and load into a model without memory.

    python -m examples.planners DIR
    torchrun --nproc-per-node 2 -m examples.planners DIR

If DIR is ROOT/JOB under the root of a running daemon, the daemon saves. Otherwise this
process saves. Each part prints what it has shown.
"""

from __future__ import annotations

import dataclasses
import io
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from ckptd import Checkpoint, StorageReader, StorageWriter


class Rename(DefaultSavePlanner):
    """Saves `transformer.*` as `model.*`, for an implementation with those names."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {
            key.replace("transformer", "model", 1): value for key, value in state_dict.items()
        }
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Half(DefaultSavePlanner):
    """Saves floating point tensors as float16."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None and item.tensor_data.properties.dtype.is_floating_point:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) and data.is_floating_point() else data


class Balance(DefaultSavePlanner):
    """Lets the rank with the fewest bytes so far write what all ranks hold, the largest
    item first.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        planned, metadata = super().create_global_plan(all_plans)
        kept = {
            (item.index.fqn, item.index.offset): item for plan in planned for item in plan.items
        }
        holders: dict[Any, list[int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders.setdefault((item.index.fqn, item.index.offset), []).append(rank)
        shares: list[list[WriteItem]] = [[] for _ in planned]
        load = [0] * len(planned)
        for key, item in sorted(kept.items(), key=lambda pair: -_nbytes(pair[1])):
            rank = min(holders[key], key=load.__getitem__)
            shares[rank].append(item)
            load[rank] += _nbytes(item)
        return [
            dataclasses.replace(plan, items=share)
            for plan, share in zip(planned, shares, strict=True)
        ], metadata


class Notes(DefaultSavePlanner):
    """Adds a note of its own to the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        notes = {**metadata.planner_data, "tokenizer": {"vocabulary": 50_257}}
        return plans, dataclasses.replace(metadata, planner_data=notes)


class Double(DefaultLoadPlanner):
    """Reads tensors as float64, whatever dtype the model has, and then copies them into
    place.
    """

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=torch.float64)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def main(base: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64))
    state = {"transformer": model.state_dict(), "epoch": 3}

    dcp.save(
        state, storage_writer=StorageWriter(base / "renamed", overwrite=True), planner=Rename()
    )
    loaded: dict[str, Any] = {
        "model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()},
        "epoch": 0,
    }
    dcp.load(loaded, storage_reader=StorageReader(base / "renamed"))
    assert all(
        torch.equal(loaded["model"][key], value) for key, value in model.state_dict().items()
    )
    say("renamed: transformer.* is model.*")

    dcp.save(state, storage_writer=StorageWriter(base / "half", overwrite=True), planner=Half())
    with Checkpoint.open(base / "half") as checkpoint:
        assert checkpoint.metadata("transformer.0.weight")[0] is torch.float16
    dcp.load(state, storage_reader=StorageReader(base / "half"), planner=Double())
    assert all(torch.equal(value, value.half().float()) for value in model.state_dict().values())
    say("half: saved as float16, loaded into float32 by way of float64")

    dcp.save(
        state, storage_writer=StorageWriter(base / "balanced", overwrite=True), planner=Balance()
    )
    with Checkpoint.open(base / "balanced") as checkpoint:
        shares = [part.raw_bytes for part in checkpoint.manifest.parts]
    say(f"balanced: the ranks wrote {', '.join(f'{share:,d}' for share in shares)} bytes")

    dcp.save(state, storage_writer=StorageWriter(base / "notes", overwrite=True), planner=Notes())
    assert StorageReader(base / "notes").read_metadata().planner_data["tokenizer"] == {
        "vocabulary": 50_257
    }
    say("notes: planner_data came back")

    with Checkpoint.open(base / "renamed") as checkpoint:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        weight = checkpoint.tensor("model.0.weight", device=device, dtype=torch.float16)
        row = checkpoint.tensor("model.0.weight", slices=[7])
    assert torch.equal(weight[7].cpu(), row.half())
    say(f"one tensor: {list(weight.shape)} as {weight.dtype} on {weight.device.type}")

    with torch.device("meta"):
        late = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64))
    late.to_empty(device="cpu")
    dcp.load({"transformer": late.state_dict()}, storage_reader=StorageReader(base / "notes"))
    assert all(
        torch.equal(late.state_dict()[key], value) for key, value in model.state_dict().items()
    )
    say("meta: a model that was made without memory has its weights")


def say(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    if dist.is_initialized():
        dist.destroy_process_group()
