"""Implements DCP's StorageReader: `dcp.load(state,
storage_reader=StorageReader(path))`. Needs no daemon.
"""

from __future__ import annotations

import logging
import os
import secrets
from typing import Any

from torch.distributed.checkpoint import storage as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from ckptd.agent.dcp.metadata import place_of, set_version
from ckptd.agent.read.loader import read_plan
from ckptd.agent.read.sources import Opened, open_checkpoint
from ckptd.shared.errors import IntegrityError, InvalidRequest, StorageError, storage_errors
from ckptd.shared.location import Location, is_place, located
from ckptd.shared.names import MANIFEST
from ckptd.shared.storage.locate import find_checkpoint, holds

log = logging.getLogger("ckptd.agent")


class StorageReader(dcp.StorageReader):
    """A DCP storage reader for checkpoints that `StorageWriter` or `snapshot` has
    saved. Works with any DCP planner.

    Everything is verified before the planner gets it.

    path: as for `StorageWriter`, or any directory that holds a checkpoint. A
    `checkpoint_id` given to DCP replaces it. weights_only: False lets DCP's planner
    unpickle values, which can run code. Use it only for files that nobody else can
    write.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, weights_only: bool = True
    ) -> None:
        super().__init__()
        self.weights_only = weights_only
        self._path = None if path is None else located(path)
        self._opened: Opened | None = None
        self._failure = ""  # why the last call of `read_metadata` has failed
        self.load_id = secrets.token_hex(8)
        """The random id of the last load that has begun. The `StorageMeta` in the
        metadata of that load has it too.
        """

    @property
    def checkpoint_id(self) -> str | None:
        return None if self._path is None else str(self._path)

    def _where(self) -> Location:
        if self._path is None:
            raise InvalidRequest(
                "StorageReader has no path: give it one, or pass checkpoint_id= to dcp.load"
            )
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if this is a path in a file system, or a URL of an object store
        that ckptd knows.
        """
        return is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.close()
        self.load_id = secrets.token_hex(8)
        if checkpoint_id:
            self._path = located(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and return its metadata.

        rank: opens the checkpoint that this rank has saved alone, with
        `use_collectives=False`. DCP passes it after a first call without it has failed.
        Raises NotFound, IntegrityError, StorageError.
        """
        first, self._failure = self._failure, ""
        try:
            return self._read_metadata(kwargs.get("rank"))
        except Exception as error:
            self._failure = str(error)
            # Logged, because DCP of torch 2.9 to 2.11 drops the errors of both calls
            # and fails without a reason.
            if "rank" in kwargs:
                log.error("%s", first or error)
            raise

    def _read_metadata(self, rank: int | None) -> Metadata:
        path = self._where()
        self.close()
        with storage_errors(f"read {path}"):
            if rank is not None and holds(path, MANIFEST):
                raise IntegrityError(
                    f"the checkpoint in {path} cannot be read, and no rank has its own there: it "
                    f"was not saved with use_collectives=False"
                )
            opened = self._opened = open_checkpoint(
                *find_checkpoint(path if rank is None else path / f"rank-{rank:05d}")
            )
            metadata = opened.metadata()
        save_id = metadata.storage_meta.save_id if metadata.storage_meta else None
        metadata.storage_meta = StorageMeta(
            checkpoint_id=place_of(path), save_id=save_id, load_id=self.load_id
        )
        set_version(metadata)
        return metadata

    def read(self, path: str, state_dict: Any = None, **kwargs: Any) -> Any:
        """Refuse a call of `torch.distributed.checkpoint._experimental`, whose
        checkpointers read files of `torch.save` for each rank.
        """
        raise InvalidRequest(
            "a Checkpointer of torch.distributed.checkpoint._experimental needs a "
            "CheckpointReader of its own, which reads a file of "
            "torch.save for each rank: pass StorageReader to dcp.load, or call "
            "Checkpoint.open(path).load()"
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        # The metadata was read elsewhere, and this reader has opened nothing yet.
        if self._opened is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan, from only the chunks that hold them, and close
        the checkpoint.

        Raises NotFound, StructureMismatch, IntegrityError, StorageError; UnsavableValue
        for bytes that only pickled code could bring back.
        """
        opened = self._opened
        assert opened is not None
        try:
            read_plan(opened, plan, planner, weights_only=self.weights_only)
        except OSError as error:
            raise StorageError.of(f"read {self._where()}", error) from None
        finally:
            self.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self.close()
