"""A DCP `LoadPlan` executed on an open checkpoint: tensors where its planner resolves them, then what is no tensor, as bytes."""

from __future__ import annotations

import io

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner

from ckptd.agent.loading import execute
from ckptd.agent.save_plan import loads_as_weights
from ckptd.agent.sources import Opened
from ckptd.shared.errors import UnsavableValue


def read_plan(opened: Opened, plan: LoadPlan, planner: LoadPlanner, *, weights_only: bool = True) -> None:
    """Everything is verified before the planner gets it.

    Raises NotFound, StructureMismatch, IntegrityError, OSError; UnsavableValue for bytes that DCP's own planner could bring back only by
    running pickled code.
    """
    execute(opened.saved, [read for read in plan.items if read.type is not LoadItemType.BYTE_IO], planner)
    unpickles = isinstance(planner, DefaultLoadPlanner) and type(planner).load_bytes is DefaultLoadPlanner.load_bytes
    for read in plan.items:
        if read.type is LoadItemType.BYTE_IO:
            data = opened.blob(read.storage_index.fqn)
            if weights_only and unpickles and not loads_as_weights(data):
                raise UnsavableValue(
                    f"{read.storage_index.fqn}: it can only be loaded by running pickled code; say weights_only=False to StorageReader if "
                    "nobody else could have written it"
                )
            planner.load_bytes(read, io.BytesIO(data))
