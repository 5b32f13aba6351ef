"""`StorageWriter` for `torch.distributed.checkpoint`, also an `AsyncStager`: dcp.save(state, storage_writer=StorageWriter(path)).

Under the root of a daemon of this node, as `<root>/<job>/<tag>`, a save goes through slots in shared memory, and the daemon commits it. At
any other path this process writes the same format right into that directory.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import storage as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptd.agent.dcp.standalone import StandalonePart, commit, is_named
from ckptd.agent.dcp.targets import SlotPart, Target, claim
from ckptd.agent.dcp.tickets import Ticket, receive, send
from ckptd.agent.plan.save_plan import Resolved, check_complete, plain_metadata, values_of
from ckptd.agent.read.sources import attempts_of
from ckptd.shared import codec as codecs
from ckptd.shared.errors import AlreadyExists, IntegrityError, InvalidRequest, StorageError
from ckptd.shared.manifest import PartEntry
from ckptd.shared.part_writer import Spread
from ckptd.shared.plan import HIDDEN
from ckptd.shared.snapshot_request import SnapshotRequest
from ckptd.shared.storage import StandaloneStorage

log = logging.getLogger("ckptd.agent")

_PART = HIDDEN + "part"  # the name of no item: what carries a rank's part to the coordinator
_ROOM = 1 << 16  # bytes in a slot for documents that are small; and for each item of all ranks, beside its name six times
_ROOM_OF_ITEM = 200


@dataclass(slots=True)
class _Save:
    """One save on its way. Each thread has its own: `async_save` runs each on another."""

    rank: int = 0
    coordinates: bool = True
    use_collectives: bool = True
    save_id: str = ""
    room: int = 0
    ticket: Ticket | None = None
    part: SlotPart | StandalonePart | None = None
    resolved: Resolved | None = None
    holding: ExitStack = field(default_factory=ExitStack)
    pid: int = field(default_factory=os.getpid)

    def drop(self, why: str = "another rank could not save its part") -> None:
        """What is not committed is discarded. Nothing in a forked child, whose it is not."""
        if os.getpid() != self.pid:
            return
        part, self.part, self.resolved = self.part, None, None
        try:
            if part is not None:
                part.discard(why)
        finally:
            self.holding.close()

    def __del__(self) -> None:
        self.drop()


class StorageWriter(dcp.StorageWriter, BlockingAsyncStager):
    """Saves what any DCP planner plans, with `dcp.save` and `dcp.async_save` (in a thread or a process).

    path: `<root>/<job>/<tag>`, or any directory outside; may come as DCP's `checkpoint_id` instead. A tag `step-<number>` is that step.
    overwrite: True takes the place of what is there; under a root in a new attempt; the older one goes then, unless it is pinned or read.
    codec, threads, files_per_rank, bytes_per_file (0: no limit): of a save outside every root; under a root the daemon's count. socket: the
    daemon's; else as for `Agent`.
    weights_only: False takes values that only pickled code can bring back, if your planner pickles them.

    A save that returns is durable. Every item is accounted for: what fails on one rank fails the save, and leaves no checkpoint. Ranks that
    do not all save together (`no_dist`, `use_collectives=False`, a smaller process group) write by themselves, without the daemon; with
    `use_collectives=False` each its own checkpoint, in `<path>/rank-<rank>`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        codec: str = "zstd",
        threads: int | None = None,
        files_per_rank: int = 1,
        bytes_per_file: int = 0,
        socket: str | os.PathLike[str] | None = None,
        weights_only: bool = True,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        codecs.encoder(codec)
        self.spread = Spread.checked(files_per_rank, bytes_per_file)
        self.overwrite, self.codec, self.threads, self.weights_only = overwrite, codec, threads, weights_only
        self.socket = None if socket is None else os.fspath(socket)
        self._path = None if path is None else _absolute(path)
        self._local = threading.local()
        self.save_id = secrets.token_hex(8)
        """Of the last save that has begun; `StorageMeta` of its metadata has it."""

    def __getstate__(self) -> dict[str, Any]:
        """As it was made, for a process that saves in the background."""
        return {key: value for key, value in self.__dict__.items() if key != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    @property
    def checkpoint_id(self) -> str | None:
        path = getattr(self._local, "path", self._path)
        return None if path is None else str(path)

    def _where(self) -> Path:
        path: Path | None = getattr(self._local, "path", self._path)
        if path is None:
            raise InvalidRequest("StorageWriter has no path: give it one, or say checkpoint_id= to dcp.save")
        return path

    @property
    def _save(self) -> _Save:
        found: _Save = self._local.save
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of a file system."""
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A copy on the CPU, for a save on another thread or in another process."""
        self.close()
        return super().stage(state_dict)

    # -- DCP's calls, in their order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins. What a failed one has left is discarded."""
        self.close()
        self.save_id = secrets.token_hex(8)
        if checkpoint_id:
            self._local.path = _absolute(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        rank, use_collectives = kwargs.get("rank"), bool(kwargs.get("use_collectives", True))
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        self.close()
        self._local.save = _Save(rank, is_coordinator or not use_collectives, use_collectives, self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide where this save goes. Raises AlreadyExists, InvalidName, StorageError, and what the daemon says; nothing is written
        yet."""
        save, path, together = self._save, self._where(), len(plans)
        if not save.use_collectives:
            path = path / f"rank-{save.rank:05d}"
        claimed = None
        if save.use_collectives and together == (dist.get_world_size() if dist.is_initialized() else 1):
            target = Target.of(path, self.socket)
            if target is not None:
                claimed, over = claim(target, together, overwrite=self.overwrite)
                save.holding.callback(over)
        if claimed is None:
            self._begin_alone(path)
        global_plan = secrets.token_bytes(32)
        tickets = [Ticket(str(path), rank, together, global_plan, claimed) for rank in range(together)]
        save.ticket = tickets[0]
        send(tickets)
        save.room = sum(6 * len(write.index.fqn) + _ROOM_OF_ITEM for plan in plans for write in plan.items)
        return plans

    def _begin_alone(self, path: Path) -> None:
        storage = StandaloneStorage(path)
        try:
            if beside := attempts_of(path):
                raise AlreadyExists(f"Checkpoint already exists: {path.parent / beside[max(beside)]}; only its daemon may save beside it")
            storage.ensure()
            if not self.overwrite and storage.has_manifest():
                raise AlreadyExists(f"Checkpoint already exists in {path}; choose another directory, or say overwrite=True")
            self._save.holding.enter_context(storage.saving())
        except OSError as error:
            raise StorageError.of(f"save {path}", error) from None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's part. On the coordinator it is finished by `finish`, which has the metadata."""
        save = self._save
        ticket = save.ticket or receive(str(self._where()), save.rank)
        try:
            results = self._write(save, ticket, plan, planner)
        except BaseException as error:
            save.drop(str(error))
            if isinstance(error, OSError):
                raise StorageError.of(f"save {ticket.path}", error) from None
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, save: _Save, ticket: Ticket, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        resolved = save.resolved = Resolved.of(plan, planner, weights_only=self.weights_only)
        layout = resolved.lay_out(global_plan=ticket.global_plan)
        save.part = part = self._part(ticket)
        part.write(layout, resolved, _ROOM + len(layout.document) + save.room)
        entry = None
        if not save.coordinates:
            entry = part.finish(layout, values_of(None), _request(ticket))
            save.part = save.resolved = None
            if isinstance(part, SlotPart):
                part.close()
            else:  # this rank does not learn when the coordinator commits: its part stays locked until this writer's next save or end
                save.holding.callback(part.close)
        written = [WriteResult(resolved.writes[row.key].index, row.nbytes, row.sizes) for row in resolved.rows]
        return [*written, WriteResult(MetadataIndex(_PART), 0, (ticket.rank, entry))]

    def _part(self, ticket: Ticket) -> SlotPart | StandalonePart:
        if ticket.claimed is not None:
            return SlotPart(ticket.claimed, ticket.rank, ticket.world_size)
        storage = StandaloneStorage(Path(ticket.path))
        return StandalonePart(storage, ticket.rank, ticket.world_size, codecs.encoder(self.codec), self.threads, self.spread)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The commit, on the coordinator, once every rank has its part: durable when it returns."""
        save = self._save
        assert save.ticket is not None
        try:
            self._finish(save, save.ticket, metadata, [result for of_rank in results for result in of_rank])
        except FileExistsError:
            raise AlreadyExists(f"{save.ticket.path} holds a checkpoint that another save has made meanwhile") from None
        except OSError as error:
            raise StorageError.of(f"save {save.ticket.path}", error) from None
        finally:
            save.drop("the checkpoint is not complete")
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=save.save_id)

    def _finish(self, save: _Save, ticket: Ticket, metadata: Metadata, results: list[WriteResult]) -> None:
        part, resolved = save.part, save.resolved
        assert part is not None
        assert resolved is not None
        check_complete(metadata, [(result.index, result.storage_data) for result in results if result.index.fqn != _PART])
        parts: dict[int, PartEntry | None] = dict(result.storage_data for result in results if result.index.fqn == _PART)
        if sorted(parts) != list(range(ticket.world_size)):
            raise InvalidRequest(f"parts of ranks {sorted(parts)} have come, of {ticket.world_size}; nothing was saved")
        layout = resolved.lay_out(global_plan=ticket.global_plan, metadata=plain_metadata(metadata))
        parts[ticket.rank] = part.finish(layout, values_of(metadata, save_id=save.save_id), _request(ticket))
        if isinstance(part, SlotPart):
            part.wait()
            if self.overwrite:
                part.forget_older()
            return
        storage = StandaloneStorage(Path(ticket.path))
        entries = [entry for _, entry in sorted(parts.items()) if entry is not None]
        save.part = None  # from now on the manifest says what becomes of it
        try:
            commit(storage, layout, entries, _request(ticket), self.codec, overwrite=self.overwrite, nonce=part.nonce)
        except BaseException:
            if is_named(storage, entries[ticket.rank].file):
                part.close()
            else:
                part.discard("")
            raise
        part.close()
        save.holding.close()
        try:
            storage.sweep()
        except (OSError, IntegrityError) as error:
            log.warning("%s: what an earlier save has left is still there: %s", ticket.path, error)

    def close(self) -> None:
        """What a failed save has left is discarded. Slots are kept for the next save, and freed at the end of the process."""
        if hasattr(self._local, "save"):
            self._save.drop()


def _request(ticket: Ticket) -> SnapshotRequest:
    return SnapshotRequest(tag=None if ticket.claimed is None else ticket.claimed.target.tag, created=time.time())


def _absolute(path: str | os.PathLike[str]) -> Path:
    if not StorageWriter.validate_checkpoint_id(path):
        raise InvalidRequest(f"{os.fspath(path)!r} is no path of a file system; ckptd saves to directories")
    return Path(os.path.abspath(path))
