"""Writes the parts of a snapshot: one for each rank, all at the same time, and again
where a disk is full or an I/O error may pass.

Each part is written to files with a fresh name. The intent is journaled before the
first file is created, and the part is journaled once it is durable. `saver.py` decides
when a snapshot is saved, and what becomes of its parts.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from ckptd.daemon.chunks.base_slot import BaseSlot
from ckptd.daemon.chunks.governor import Governor
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import LastPart
from ckptd.daemon.job.retention import keeps_all, policies_of
from ckptd.daemon.job.snapshot import RankSeal, Snapshot
from ckptd.daemon.journal import records as r
from ckptd.daemon.memory.slots import Slots
from ckptd.daemon.saving.committer import Document
from ckptd.daemon.saving.destination import Destination
from ckptd.daemon.tasks import all_of
from ckptd.shared import names
from ckptd.shared.codecs import codec
from ckptd.shared.codecs.speeds import Speeds
from ckptd.shared.errors import CkptdError, IntegrityError
from ckptd.shared.formats.manifest import PartEntry
from ckptd.shared.formats.part_writer import PartWriter
from ckptd.shared.formats.reuse import ChunkCheck, StoredPart, most_deltas
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.retention import understood
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.fs import NO_ROOM

log = logging.getLogger("ckptd.saver")

SavedPart = tuple[Document, LastPart]
"""A durable part, and what the next save needs to link its files."""


class PartSaver:
    """Writes the parts of snapshots to one destination."""

    def __init__(
        self,
        config: Config,
        slots: Slots,
        destination: Destination,
        governor: Callable[[str], Governor],
    ) -> None:
        """governor: returns the governor of the saves of a job."""
        self._config = config
        self._slots = slots
        self._journal = destination.journal
        self._repository = destination.repository
        self._pipeline = destination.pipeline
        self._encoder = codec.encoder(config.codec)
        # There are twice as many threads that encode as cores.
        self._speeds = Speeds(max(1, destination.pipeline.writers // 2))
        self._destination, self._governor = destination, governor
        # The jobs whose log says why there are no deltas.
        self._without_bases = set[str]()

    async def save(self, snapshot: Snapshot, checking: asyncio.Future[None]) -> list[SavedPart]:
        """Write the parts of all ranks at the same time, while `checking` checks the
        slots.

        Each part reserves the room that it would take raw. A part that finds no room is
        written again once the others have ended, which then take no more room than they
        need. Only then are older checkpoints deleted for it.
        """
        seals = [seal for _, seal in sorted(snapshot.seals.items())]
        alone = len(seals) == 1

        async def saved(seal: RankSeal) -> SavedPart | None:
            try:
                return await self._save_part(snapshot, seal, checking, alone=alone)
            except OSError as error:
                if alone or error.errno not in NO_ROOM:
                    raise
                return None

        parts = await all_of(map(saved, seals))
        return [
            part or await self._save_part(snapshot, seal, checking, alone=True)
            for seal, part in zip(seals, parts, strict=True)
        ]

    async def _save_part(
        self, snapshot: Snapshot, seal: RankSeal, checking: asyncio.Future[None], *, alone: bool
    ) -> SavedPart:
        """Write the part of one rank.

        `alone`: True if no other part is being written, so that a full disk is really
        full.
        """
        slot = self._slots.get(seal.segment)
        header = slot.header
        before = self._before(snapshot, seal)
        with slot.pinned() as fd, self._base_slot(snapshot.job, before) as base_slot:
            sealed = await self._pipeline.run(lambda: SealedSlot.read(fd, header))
            if header.generation != seal.generation:
                raise IntegrityError(
                    f"{snapshot.job} step {snapshot.step}: the slot was filled again while it was "
                    f"being saved"
                )
            entry, part = await self._write_part(
                snapshot, seal, sealed, checking, before, base_slot, alone=alone
            )
        stored = LastPart(part, seal.segment, header)
        return (entry, sealed.plan, sealed.request), stored

    def _before(self, snapshot: Snapshot, seal: RankSeal) -> LastPart | None:
        """Return the last part of the rank that this attempt has saved, or None if no
        file is to be linked.
        """
        if not self._config.link_unchanged:
            return None
        last = self._destination.catalog.job(snapshot.job).stored.get(seal.rank)
        same = last is not None and (last.part.attempt, last.part.world_size) == (
            snapshot.attempt,
            snapshot.world_size,
        )
        return last if same else None

    @contextmanager
    def _base_slot(self, job: str, before: LastPart | None) -> Iterator[BaseSlot | None]:
        """Context manager.

        Gives the slot of the last part if it has not been filled again, and keeps its
        descriptor open. Gives None if it has, or if there are to be no deltas.
        """
        with ExitStack() as held:
            found = None
            wanted = self._config.deltas != "off" and self._config.codec != "raw"
            if wanted and before is not None:
                with suppress(CkptdError):
                    slot = self._slots.get(before.segment)
                    fd = held.enter_context(slot.pinned())
                    if slot.refresh().generation == before.header.generation:
                        found = BaseSlot(fd, before.header)
                    elif self._config.slots == 2 and job not in self._without_bases:
                        self._without_bases.add(job)
                        log.info(
                            "%s: there are no deltas, because a later snapshot has filled the "
                            "slot of the checkpoint before: a third slot for each rank "
                            "(slots = 3) would keep it",
                            job,
                        )
            yield found

    def _most_deltas(self, snapshot: Snapshot, request: SnapshotRequest) -> int:
        """Return the most deltas that a chain of this job may get.

        A node without rank 0 does not learn which checkpoints retention has deleted, and
        goes by the setting.
        """
        job, own = self._destination.catalog.job(snapshot.job), request.retention
        # With a stage, nearly all are in the root, where retention may be one behind.
        kept = len(job.durable_checkpoints()) - bool(job.in_root)
        if snapshot.node is not None and not snapshot.node.leads:
            kept = 0 if own else min(kept, self._config.keep_last or kept)
        policies = (
            understood(own) if own else policies_of(job.live_checkpoints(), self._config.retention)
        )
        return most_deltas(kept if keeps_all(kept + 1, policies) else kept - 1)

    async def _write_part(
        self,
        snapshot: Snapshot,
        seal: RankSeal,
        sealed: SealedSlot,
        checking: asyncio.Future[None],
        before: LastPart | None,
        base_slot: BaseSlot | None,
        *,
        alone: bool,
    ) -> tuple[PartEntry, StoredPart]:
        """Write the part of one rank to a file with a fresh name.

        Return its entry in the manifest, and what the next save needs to know.

        After an I/O error (EIO) try once more with another file: a file whose sync has
        failed is never trusted again. With the setting `make_room`, a full disk is
        tried again after each older checkpoint that could be deleted. Raises
        IntegrityError if the slot or its checksums are damaged, OSError, StorageError.
        """

        async def wait_for_checks() -> list[ChunkCheck]:
            await asyncio.shield(checking)
            assert seal.checks is not None
            return seal.checks

        rewritten, progress = False, snapshot.progress
        assert progress is not None
        last = None if before is None else before.part
        most = self._most_deltas(snapshot, sealed.request)
        place = snapshot.job, snapshot.directory
        linker = self._repository.linker(*place) if self._config.link_unchanged else None
        while True:
            progress.begin_part(seal.rank)
            nonce = names.new_nonce()
            file = names.part_file(seal.rank, nonce)
            common = {
                "job": snapshot.job,
                "attempt": snapshot.attempt,
                "step": snapshot.step,
                "rank": seal.rank,
                "tag": snapshot.directory,
            }
            await self._journal.append(r.Staging(**common, file=file))  # type: ignore[arg-type]
            failpoint("persist.intended")
            try:
                writer = PartWriter(
                    self._repository.part_files(*place),
                    nonce,
                    self._encoder,
                    self._config.spread,
                    linker,
                    self._speeds,
                )
                governor = self._governor(snapshot.job)
                at_once = (
                    governor.threads
                    if governor.threads == governor.most
                    else -(-governor.threads // len(snapshot.seals))
                )
                entry, stored = await self._pipeline.write_part(
                    sealed,
                    writer,
                    snapshot.directory,
                    wait_for_checks,
                    partial(progress.add, seal.rank),
                    last,
                    at_once,
                    with_digests=self._config.link_unchanged and (last is None or last.steady),
                    base_slot=base_slot if most else None,
                    most_deltas=most,
                    for_bytes=self._config.deltas == "small",
                )
            except OSError as error:
                full = alone and error.errno in NO_ROOM
                if full and await self._make_room(snapshot, writer.needed):
                    continue
                if rewritten or error.errno != errno.EIO:
                    raise
                rewritten = True
                log.warning(
                    "snapshot %s/%s: %s; retrying once with a new file",
                    snapshot.job,
                    snapshot.tag,
                    error.strerror,
                )
                self._destination.counters["rewrites"] += 1
                continue
            await self._journal.append(
                r.PartDurable(
                    **common,  # type: ignore[arg-type]
                    file=file,
                    bytes=entry.bytes,
                    index_sha256=entry.index_sha256,
                )
            )
            failpoint("persist.journaled")
            return entry, stored

    async def _make_room(self, snapshot: Snapshot, needed: int) -> bool:
        """Delete an older checkpoint on a full disk, or a local copy on a full stage.

        Return False if there is none that may be deleted.
        """
        destination = self._destination
        job = destination.catalog.job(snapshot.job)
        if destination.evict is not None:
            return await destination.evict(job)
        may_delete = self._config.make_room and (snapshot.node is None or snapshot.node.leads)
        return may_delete and await destination.deleter.make_room(job, needed)
