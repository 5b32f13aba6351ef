"""Replaces DCP's `FileSystemReader` and `FileSystemWriter` by ckptd's, puts FSDP1 on
the CPU, and forks the ranks of the tests.

If SUITE_STOCK is set, DCP's reader and writer stay. If SUITE_ROOT has the URL of a
prefix in an object store, every path that a test gives stands for a prefix below it.

The ranks of a test are forked from a server that has imported torch, instead of
importing it one by one. That saves most of the time.
"""

from __future__ import annotations

import multiprocessing
import os
from functools import partialmethod
from typing import Any

import torch
import torch._dynamo  # the first DTensor of a process would import it
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase

from ckptd.agent import StorageReader, StorageWriter


def placed(path: Any) -> Any:
    root = os.environ.get("SUITE_ROOT")
    return (
        f"{root}{os.path.abspath(path)}"
        if root and path is not None and "://" not in str(path)
        else path
    )


class FileSystemWriter(StorageWriter):
    """ckptd's writer, with the arguments and defaults of DCP's."""

    def __init__(
        self, path: Any, single_file_per_rank: bool = True, sync_files: bool = True,
        thread_count: int = 1, per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False, overwrite: bool = True, **_: Any,
    ) -> None:  # fmt: skip
        # The tests save pickled objects.
        super().__init__(
            placed(path), overwrite=overwrite, threads=thread_count, weights_only=False
        )

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(placed(checkpoint_id))


class FileSystemReader(StorageReader):
    def __init__(self, path: Any, _extension_registry: Any = None) -> None:
        # As in the writer, the reader sees only files of these tests.
        # The tests have written these files themselves.
        super().__init__(placed(path), weights_only=False)

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(placed(checkpoint_id))


for module in (
    () if os.environ.get("SUITE_STOCK") else (dcp, filesystem, _storage_utils, format_utils)
):
    setattr(module, "FileSystemWriter", FileSystemWriter)  # noqa: B010
    setattr(module, "FileSystemReader", FileSystemReader)  # noqa: B010
FullyShardedDataParallel.__init__ = partialmethod(  # type: ignore[assignment, method-assign]
    FullyShardedDataParallel.__init__, device_id=torch.device("cpu")
)


def spawn_processes(self: Any) -> None:
    self._start_processes(multiprocessing.get_context("forkserver").Process)


MultiProcessTestCase._spawn_processes = spawn_processes  # type: ignore[method-assign]
torch.accelerator.current_device_index = lambda: "cpu"  # type: ignore[assignment,return-value]  # where torch compares ShardedTensors
