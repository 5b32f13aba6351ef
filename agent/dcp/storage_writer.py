"""Implements DCP's StorageWriter and AsyncStager: `dcp.save(state,
storage_writer=StorageWriter(path))`.

A save to `<root>/<job>/<tag>`, under the root of a daemon, goes through slots in shared
memory, and the daemons of the ranks commit it. At any other path, or if the ranks do
not all save together, this process writes the same format directly into that directory.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import storage as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptd.agent.dcp.metadata import place_of, set_version
from ckptd.agent.dcp.standalone import StandalonePart, commit, is_named
from ckptd.agent.dcp.targets import (
    RankDaemon,
    SaveTicket,
    SlotPart,
    Target,
    fail_step,
    issue_tickets,
)
from ckptd.agent.dcp.tickets import Ticket, receive, send, show, shown
from ckptd.agent.plan.save_plan import Resolved, check_complete, plain_metadata, values_of
from ckptd.shared.codecs import codec as codecs
from ckptd.shared.errors import (
    AlreadyExists,
    CkptdError,
    IntegrityError,
    InvalidRequest,
    StorageError,
    storage_errors,
)
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.part_writer import Spread
from ckptd.shared.formats.plan import HIDDEN
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.location import Location, is_place, located
from ckptd.shared.storage.locate import attempts_of, check_no_other_tool, open_standalone
from ckptd.shared.storage.standalone import StandaloneCheckpoint
from ckptd.shared.units import rank_list

log = logging.getLogger("ckptd.agent")

# Names the result that carries a rank's part to the coordinator; no item can have this
# name.
_PART = HIDDEN + "part"
_ROOM = 1 << 16  # bytes of a slot for the documents, before those that each item needs are added
# Bytes of the coordinator's slot for each item of any rank, in addition to six times
# the length of its name.
_ROOM_OF_ITEM = 200


@dataclass(slots=True)
class _Save:
    """The state of one save on this rank.

    Each thread has its own, because `async_save` runs each save on another thread.

    coordinates: True if this rank commits: the coordinator, or every rank with
    `use_collectives=False`. room: bytes that the metadata needs in the coordinator's
    slot. ticket: set on the coordinator once it has decided; None on other ranks.
    holding: the turn and the locks to release when the save is over. pid: the process
    that owns the save.
    """

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
        """Discard the part unless it is committed, and end the save.

        Does nothing in a forked child, which does not own the save.
        """
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
    """A DCP storage writer that saves to ckptd, for `dcp.save` and `dcp.async_save` (in
    a thread or a process), with any DCP planner.

    path: `<root>/<job>/<tag>` under the root of a daemon, or any directory outside. A
    `checkpoint_id` given to DCP replaces it. A tag `step-<number>` saves that step.
    overwrite: True replaces the checkpoint at the path. Under a root the new one is
    saved in a new attempt, and the older one is deleted after that, unless it is pinned
    or being read. Outside, the `.metadata` of a checkpoint of DCP is replaced, and
    DCP's data files stay. codec, threads, files_per_rank, bytes_per_file (0: no limit):
    for saves without the daemon. The daemon saves by its own settings. socket: the
    daemon's. Without it, the daemon is found as for `Agent`. weights_only: False also
    saves values that only pickled code can bring back, if the planner pickles them.

    A save is durable when `dcp.save` returns, or when the future of `dcp.async_save` is
    done. Every item is accounted for: a failure on one rank fails the whole save and
    leaves no checkpoint.

    Ranks that do not all save together (`no_dist`, `use_collectives=False`, a smaller
    process group) write by themselves, without the daemon. With `use_collectives=False`
    each rank writes a checkpoint of its own, in `<path>/rank-<rank>`.

    Raises InvalidConfig for an unknown codec, or a number of files or bytes that is out
    of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        codec: str = "auto",
        threads: int | None = None,
        files_per_rank: int = 1,
        bytes_per_file: int = 0,
        socket: str | os.PathLike[str] | None = None,
        weights_only: bool = True,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        codecs.encoder(codec)
        self.spread = Spread.checked(files_per_rank, bytes_per_file)
        self.overwrite = overwrite
        self.codec = codec
        self.threads = threads
        self.weights_only = weights_only
        self.socket = None if socket is None else os.fspath(socket)
        self._path = None if path is None else located(path)
        self._local = threading.local()
        self.save_id = secrets.token_hex(8)
        """The random id of the last save that has begun. The `StorageMeta` in the
        metadata of that save has it too.
        """

    def __getstate__(self) -> dict[str, Any]:
        """Return the writer without the saves that are under way, for a process that
        saves in the background.
        """
        return {key: value for key, value in self.__dict__.items() if key != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    @property
    def checkpoint_id(self) -> str | None:
        path = getattr(self._local, "path", self._path)
        return None if path is None else str(path)

    def _where(self) -> Location:
        path: Location | None = getattr(self._local, "path", self._path)
        if path is None:
            raise InvalidRequest(
                "StorageWriter has no path: give it one, or pass checkpoint_id= to dcp.save"
            )
        return path

    @property
    def _save(self) -> _Save:
        found: _Save = self._local.save
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if this is a path in a file system, or a URL of an object store
        that ckptd knows.
        """
        return is_place(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        path = getattr(self._local, "path", self._path)
        return StorageMeta(
            checkpoint_id=None if path is None else place_of(path), save_id=self.save_id
        )

    def write(self, path: str, state_dict: Any, **kwargs: Any) -> Any:
        """Refuse a call of `torch.distributed.checkpoint._experimental`, whose
        checkpointers write files of `torch.save` for each rank.
        """
        raise InvalidRequest(
            "a Checkpointer of torch.distributed.checkpoint._experimental needs a "
            "CheckpointWriter of its own, which writes a file of "
            "torch.save for each rank: pass StorageWriter to dcp.save or dcp.async_save instead"
        )

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Return a copy of the state on the CPU, for a save on another thread or in
        another process.
        """
        self.close()
        return super().stage(state_dict)

    # -- DCP's calls, in their order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, and discard the remains of a failed one.

        `checkpoint_id`, if given, replaces the path.
        """
        self.close()
        self.save_id = secrets.token_hex(8)
        if checkpoint_id:
            self._local.path = located(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        rank, use_collectives = kwargs.get("rank"), bool(kwargs.get("use_collectives", True))
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        self.close()
        self._local.save = _Save(
            rank, is_coordinator or not use_collectives, use_collectives, self.save_id
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Show the coordinator which daemon this rank has. The plan stays as it is."""
        save = self._save
        if not save.coordinates:
            show(self._where(), save.rank, RankDaemon.of(self._where(), self.socket))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide where this save goes, and send each rank its ticket.

        No data is written yet.

        Runs on the coordinator. Raises AlreadyExists, InvalidName, InvalidRequest,
        StorageError, and the daemon's errors.
        """
        save, path, together = self._save, self._where(), len(plans)
        if not save.use_collectives:
            path = path / f"rank-{save.rank:05d}"
        saves: Sequence[SaveTicket | None] = [None] * together
        if save.use_collectives and together == (
            dist.get_world_size() if dist.is_initialized() else 1
        ):
            target = Target.of(path, self.socket)
            if target is not None:
                saves, over = issue_tickets(target, shown(path, together), overwrite=self.overwrite)
                save.holding.callback(over)
        if saves[0] is None:
            self._begin_alone(path)
        global_plan = secrets.token_bytes(32)
        tickets = [
            Ticket(str(path), rank, together, global_plan, one) for rank, one in enumerate(saves)
        ]
        save.ticket = tickets[0]
        send(tickets)
        save.room = sum(
            6 * len(write.index.fqn) + _ROOM_OF_ITEM for plan in plans for write in plan.items
        )
        return plans

    def _begin_alone(self, path: Location) -> None:
        checkpoint = open_standalone(path)
        with storage_errors(f"save {path}"):
            if beside := attempts_of(path):
                raise AlreadyExists(
                    f"Checkpoint already exists: {path.parent / beside[max(beside)]}; only its "
                    f"daemon may save another one of this name"
                )
            self._repair_marker(checkpoint, path)
            if not self.overwrite:
                for place in dict.fromkeys((self._where(), path)):
                    check_no_other_tool(place, "choose another directory, or pass overwrite=True")
            checkpoint.make()
            if not self.overwrite and checkpoint.has_manifest():
                raise AlreadyExists(
                    f"Checkpoint already exists in {path}; choose another directory, or pass "
                    f"overwrite=True"
                )
            self._save.holding.enter_context(checkpoint.saving())

    @staticmethod
    def _repair_marker(checkpoint: StandaloneCheckpoint, path: Location) -> None:
        try:
            checkpoint.repair_marker()
        except OSError as error:
            log.warning(
                "the marker .metadata in %s could not be repaired after an interrupted save: %s",
                path,
                error,
            )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part.

        The coordinator's part is completed by `finish`, which has the metadata.
        """
        save = self._save
        ticket = save.ticket or receive(str(self._where()), save.rank)
        try:
            results = self._write(save, ticket, plan, planner)
        except BaseException as error:
            if save.part is None and ticket.save is not None and ticket.world_size > 1:
                with suppress(CkptdError):  # without it, the other ranks wait for `rank_timeout`
                    fail_step(
                        ticket.save,
                        ticket.rank,
                        ticket.world_size,
                        f"rank {ticket.rank}: {error}",
                    )
            save.drop(str(error))
            if isinstance(error, OSError):
                raise StorageError.of(f"save {ticket.path}", error) from None
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(
        self, save: _Save, ticket: Ticket, plan: SavePlan, planner: SavePlanner
    ) -> list[WriteResult]:
        resolved = save.resolved = Resolved.of(plan, planner, weights_only=self.weights_only)
        layout = resolved.lay_out(global_plan=ticket.global_plan)
        save.part = part = self._part(ticket)
        part.write(layout, resolved, _ROOM + len(layout.document) + save.room)
        entry = None
        if not save.coordinates:
            entry = part.finish(layout, values_of(None), _request(ticket, part))
            save.part = save.resolved = None
            if isinstance(part, SlotPart):
                part.close()
            # this rank does not learn of the commit, so its part stays locked until
            # this writer saves again or is deleted
            else:
                save.holding.callback(part.close)
        written = [
            WriteResult(resolved.writes[row.key].index, row.nbytes, (row.sizes, row.dtype))
            for row in resolved.rows
        ]
        return [*written, WriteResult(MetadataIndex(_PART), 0, (ticket.rank, entry))]

    def _part(self, ticket: Ticket) -> SlotPart | StandalonePart:
        if ticket.save is not None:
            return SlotPart(ticket.save, ticket.rank, ticket.world_size)
        return StandalonePart(
            open_standalone(located(ticket.path)),
            ticket.rank,
            ticket.world_size,
            codecs.encoder(self.codec),
            self.threads,
            self.spread,
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, once every rank has written its part.

        It is durable when this returns.

        Runs on the coordinator. Raises AlreadyExists if another save has committed
        there meanwhile; InvalidRequest if an item or a part is missing; StorageError;
        and the daemon's errors.
        """
        save = self._save
        assert save.ticket is not None
        try:
            self._finish(save, save.ticket, metadata, results)
        except FileExistsError:
            raise AlreadyExists(
                f"another save has committed a checkpoint in {save.ticket.path} in the meantime"
            ) from None
        except OSError as error:
            raise StorageError.of(f"save {save.ticket.path}", error) from None
        finally:
            save.drop("the checkpoint is not complete")
        metadata.storage_meta = StorageMeta(
            checkpoint_id=place_of(self._where()), save_id=save.save_id
        )
        set_version(metadata)

    def _finish(
        self, save: _Save, ticket: Ticket, metadata: Metadata, results: list[list[WriteResult]]
    ) -> None:
        part, resolved = save.part, save.resolved
        assert part is not None
        assert resolved is not None
        every = [result for of_rank in results for result in of_rank]
        check_complete(
            metadata,
            [
                (result.index, result.storage_data[0])
                for result in every
                if result.index.fqn != _PART
            ],
        )
        parts: dict[int, PartEntry | None] = dict(
            result.storage_data for result in every if result.index.fqn == _PART
        )
        if sorted(parts) != list(range(ticket.world_size)):
            raise InvalidRequest(
                f"parts of {rank_list(sorted(parts))} were written; expected one of each of "
                f"{ticket.world_size} ranks; nothing was saved"
            )
        written = [list[tuple[MetadataIndex, str]]() for _ in parts]
        for of_rank in results:
            (rank,) = (result.storage_data[0] for result in of_rank if result.index.fqn == _PART)
            written[rank] += [
                (result.index, result.storage_data[1])
                for result in of_rank
                if result.index.fqn != _PART
            ]
        layout = resolved.lay_out(
            global_plan=ticket.global_plan, metadata=plain_metadata(metadata, written)
        )
        parts[ticket.rank] = part.finish(
            layout, values_of(metadata, save_id=save.save_id), _request(ticket, part)
        )
        if isinstance(part, SlotPart):
            part.wait()
            if self.overwrite:
                part.forget_older()
            return
        checkpoint = open_standalone(located(ticket.path))
        entries = [entry for _, entry in sorted(parts.items()) if entry is not None]
        # A manifest may name the part from now on, so that `drop` must not discard it.
        save.part = None
        try:
            commit(
                checkpoint,
                layout,
                entries,
                _request(ticket, part),
                self.codec,
                overwrite=self.overwrite,
                nonce=part.nonce,
            )
        except BaseException:
            if is_named(checkpoint, entries[ticket.rank].file):
                part.close()
            else:
                part.discard("")
            raise
        try:
            checkpoint.mark(part.nonce.hex())
        except OSError as error:
            log.warning(
                "the checkpoint in %s is durable, but programs that look for .metadata will miss "
                "it: %s",
                ticket.path,
                error,
            )
        part.close()
        save.holding.close()
        try:
            checkpoint.sweep()
        except (OSError, IntegrityError) as error:
            log.warning("%s: files of an earlier save could not be deleted: %s", ticket.path, error)

    def close(self) -> None:
        """Discard the remains of a failed save.

        Slots are kept for the next save, and freed when the process exits.
        """
        if hasattr(self._local, "save"):
            self._save.drop()


def _request(ticket: Ticket, part: SlotPart | StandalonePart) -> SnapshotRequest:
    if ticket.save is None or not isinstance(part, SlotPart):
        return SnapshotRequest(created=time.time())
    return SnapshotRequest(tag=ticket.save.target.tag, created=time.time(), node=part.node)
