"""The public API of a training script: `snapshot`, `recover`, `close`, and the classes
that go with them.

`per_rank` marks a value that differs from rank to rank. `Agent` is the object behind
the functions, and `Schedule` decides when to snapshot. The retention policies, such as
`LatestN`, decide which checkpoints to keep. `Checkpoint` reads a checkpoint without a
daemon. `StorageWriter` and `StorageReader` serve `torch.distributed.checkpoint`.

recovered = recover({"model": model, "optim": optimizer})
for step in range(recovered.step + 1 if recovered else 0, steps):
    ...
    pending = snapshot({"model": model, "optim": optimizer}, step=step)
close()
"""

from __future__ import annotations

# First, because the other imports would fail on an old torch with an error that does
# not say why.
from ckptd.agent import torch_support  # noqa: F401
from ckptd.agent.agent import Agent
from ckptd.agent.batches import Batches
from ckptd.agent.dcp.storage_reader import StorageReader
from ckptd.agent.dcp.storage_writer import StorageWriter
from ckptd.agent.default import close, prepare, recover, snapshot
from ckptd.agent.follow.follower import VersionFeed, follow
from ckptd.agent.follow.newest_state import Newest, newest
from ckptd.agent.follow.version import Version
from ckptd.agent.pending import Pending
from ckptd.agent.read.checkpoint import Checkpoint
from ckptd.agent.read.module_loader import LoadedInto
from ckptd.agent.recover.recovery import Recovered
from ckptd.agent.schedule import Schedule
from ckptd.agent.state.tree import per_rank
from ckptd.agent.threads.loader_workers import outlive_sigterm
from ckptd.agent.training_run import Training, training
from ckptd.shared.errors import CkptdError
from ckptd.shared.retention import (
    BestN,
    CustomSteps,
    Daily,
    EveryNSeconds,
    EveryNSteps,
    Finite,
    LatestDuration,
    LatestN,
    MaxAge,
    MaxBytes,
    PreserveAll,
    Weekly,
)

__all__ = [
    "Agent",
    "Batches",
    "BestN",
    "Checkpoint",
    "CkptdError",
    "CustomSteps",
    "Daily",
    "EveryNSeconds",
    "EveryNSteps",
    "Finite",
    "LatestDuration",
    "LatestN",
    "LoadedInto",
    "MaxAge",
    "MaxBytes",
    "Newest",
    "Pending",
    "PreserveAll",
    "Recovered",
    "Schedule",
    "StorageReader",
    "StorageWriter",
    "Training",
    "Version",
    "VersionFeed",
    "Weekly",
    "close",
    "follow",
    "newest",
    "outlive_sigterm",
    "per_rank",
    "prepare",
    "recover",
    "snapshot",
    "training",
]
