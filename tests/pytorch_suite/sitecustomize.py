"""Replaces DCP's `FileSystemReader` and `FileSystemWriter` by ckptd's, and puts FSDP1
on the CPU.

Python imports a module of this name when it starts, if there is one on its path. If
SUITE_ROOT has the URL of a prefix in an object store, every path that a test gives
stands for a prefix below it.
"""

from __future__ import annotations

import os
from functools import partialmethod
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils
from torch.distributed.fsdp import FullyShardedDataParallel

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


for module in (dcp, filesystem, _storage_utils, format_utils):
    setattr(module, "FileSystemWriter", FileSystemWriter)  # noqa: B010
    setattr(module, "FileSystemReader", FileSystemReader)  # noqa: B010
FullyShardedDataParallel.__init__ = partialmethod(  # type: ignore[assignment, method-assign]
    FullyShardedDataParallel.__init__, device_id=torch.device("cpu")
)
