"""Executes a DCP `LoadPlan` on an open checkpoint: the tensors first, then all other
values as bytes.
"""

from __future__ import annotations

import io

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner

from ckptd.agent.plan.save_plan import loads_as_weights, may_unpickle
from ckptd.agent.read.loader import execute
from ckptd.agent.read.sources import Opened
from ckptd.shared.errors import UnsavableValue


def read_plan(
    opened: Opened, plan: LoadPlan, planner: LoadPlanner, *, weights_only: bool = True
) -> None:
    """Read the items of `plan`.

    Tensors go to the destinations that `planner` resolves, and all other values to its
    `load_bytes`.

    The planner gets verified bytes only. weights_only: refuse bytes that only pickled
    code could bring back.

    Raises NotFound, StructureMismatch, IntegrityError, OSError; UnsavableValue for
    bytes that are refused.
    """
    execute(
        opened.saved,
        [read for read in plan.items if read.type is not LoadItemType.BYTE_IO],
        planner,
    )
    wanted = [read for read in plan.items if read.type is LoadItemType.BYTE_IO]
    blobs = opened.blobs([read.storage_index.fqn for read in wanted])
    for read in wanted:
        data = blobs[read.storage_index.fqn]
        if weights_only and may_unpickle(planner, data) and not loads_as_weights(data):
            # Refused by default: only the caller knows whether the writer of the file
            # can be trusted. The error says how to allow it.
            raise UnsavableValue(
                f"{read.storage_index.fqn}: it can only be loaded by running pickled code; pass "
                "weights_only=False to StorageReader if you trust everyone who could have written "
                "it"
            )
        planner.load_bytes(read, io.BytesIO(data))
