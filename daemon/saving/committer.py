"""Commits checkpoints by publishing their manifests, journals commits, and undoes saves
that will not be committed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from ckptd.daemon import log_events
from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.finite import turned_non_finite
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import Journal, JournalBroken
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.errors import AlreadyExists, CkptdError, IntegrityError, StorageError
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.plan import Plan
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.units import rank_list
from ckptd.shared.wire.lifecycle import Event

log = logging.getLogger("ckptd.saver")

Document = tuple[PartEntry, Plan, SnapshotRequest]
"""A durable part: its entry in the manifest, its plan and its request."""


class Committer:
    """Commits the checkpoints of one repository. `catalog`: what is known to be in it."""

    def __init__(
        self,
        codec: str,
        journal: Journal,
        repository: Repository,
        catalog: Catalog,
        calls: StorageCalls,
        events: Events,
    ) -> None:
        """codec: the codec setting, for the manifest."""
        self._codec = codec
        self._journal = journal
        self._repository = repository
        self._catalog = catalog
        self._calls = calls
        self._events = events

    def manifest(
        self, snapshot: Snapshot, parts: Sequence[PartEntry], plan: Plan, request: SnapshotRequest
    ) -> Manifest:
        """Return the manifest of a checkpoint, given its parts in the order of the
        ranks, and the plan and the request of rank 0.
        """
        return Manifest.of(
            plan, request, list(parts), job=snapshot.job, attempt=snapshot.attempt,
            step=snapshot.step, tag=snapshot.directory, seq=self._catalog.job(snapshot.job).seq + 1,
            codec=self._codec,
        )  # fmt: skip

    async def commit(self, snapshot: Snapshot, documents: list[Document]) -> None:
        """Commit a checkpoint whose ranks are all on this node, and record the commit.

        All parts must be durable.

        documents: entry, plan and request of each part, in the order of the ranks.
        Raises IntegrityError if the part of a rank is missing or the plans differ,
        AlreadyExists if the tag has a manifest already, OSError, StorageError.
        """
        if [entry.rank for entry, _, _ in documents] != list(range(snapshot.world_size)):
            raise IntegrityError(
                f"only the parts of {rank_list([e.rank for e, _, _ in documents])} are durable; "
                f"expected {snapshot.world_size} parts"
            )
        if len({plan.global_plan for _, plan, _ in documents}) != 1:
            raise IntegrityError(f"{snapshot.job}/{snapshot.tag}: its ranks sealed different plans")
        _, plan, request = documents[0]
        manifest = self.manifest(snapshot, [entry for entry, _, _ in documents], plan, request)
        failpoint("commit.starting")
        try:
            await self._calls.run(lambda: self._publish(snapshot, manifest))
        except FileExistsError:
            raise AlreadyExists(
                f"{snapshot.job}/{snapshot.tag} is committed already; choose another tag"
            ) from None
        failpoint("commit.durable")
        await self.record(snapshot, manifest)

    def _publish(self, snapshot: Snapshot, manifest: Manifest) -> None:
        data, objects = manifest.split()
        self._repository.publish_manifest(snapshot.job, snapshot.tag, data, objects=objects)

    async def record(self, snapshot: Snapshot, manifest: Manifest) -> None:
        """Record a commit, which is durable, in the catalog and in the journal, and
        report the snapshot as saved.

        A record that the journal has no room for is left out: the commit has not
        failed. Raises JournalBroken.
        """
        checkpoint = StoredCheckpoint.of(manifest)
        job = self._catalog.job(snapshot.job)
        if warning := turned_non_finite(
            job.live_checkpoints(), checkpoint, self._repository.where(job.name, checkpoint.tag)
        ):
            log_events.STATE_NON_FINITE.log(
                log, "%s", warning, job=job.name, tag=checkpoint.tag, step=checkpoint.step,
                values=checkpoint.non_finite,
            )  # fmt: skip
            self._events.remark(job.name, warning)
        job.commit(checkpoint)
        try:
            await self.journal_commit(checkpoint)
        except JournalBroken:
            raise
        except StorageError as error:  # the manifest is the truth, and the next start finds it
            log.warning(
                "%s/%s is committed, and the journal lacks the record: %s",
                snapshot.job,
                snapshot.directory,
                error,
            )
        failpoint("commit.journaled")
        snapshot.move(Event.COMMIT)
        self._events.saved(snapshot)

    async def journal_commit(self, checkpoint: StoredCheckpoint) -> None:
        """Journal that a checkpoint is committed, which ends all intents for it."""
        await self._journal.append(
            r.Committed(
                job=checkpoint.job,
                attempt=checkpoint.attempt,
                step=checkpoint.step,
                tag=checkpoint.tag,
                seq=checkpoint.seq,
            )
        )

    async def drop(
        self,
        job: str,
        tag: str,
        attempt: int,
        step: int,
        reason: str,
        ranks: Collection[int] | None = None,
    ) -> None:
        """Delete the files that the journal names for a checkpoint that will not be
        committed, and journal that they are gone.

        ranks: the ranks whose parts were to be saved, or None for all. A daemon that saves
        peer replicas writes the parts of several nodes for one checkpoint, each in a save
        of its own.

        If the checkpoint has a manifest after all, the files that the manifest names
        stay. If that manifest cannot be read, or if a receipt of several nodes may
        still lead to one, nothing is deleted. Raises OSError, StorageError.
        """
        place = f"{job}/{tag}"
        known = list(self._journal.state.staged.get(place, {}))
        staged = [file for file in known if ranks is None or _rank_of(file) in ranks]
        if not staged:
            return
        try:
            outcome = await self._calls.run(lambda: self._repository.outcome(job, tag))
            keep = set(outcome.files) if isinstance(outcome, Manifest) else set()
            receipts = (
                await self._calls.run(lambda: self._repository.receipts(job, tag))
                if outcome is None
                else []
            )
        except CkptdError:
            log.error(
                "%s has a manifest or a receipt that cannot be read: nothing in it is deleted",
                place,
            )
            return
        if any(part.file in staged for receipt in receipts for part in receipt.parts):
            log.info("%s has been delivered, and is undecided: nothing in it is deleted", place)
            return
        await self._calls.run(
            lambda: self._repository.delete_unfinished(
                job, tag, [file for file in staged if file not in keep]
            )
        )
        others = len(staged) < len(known)
        if not keep and not others:
            await self._calls.run(lambda: self._repository.delete_tag(job, tag))
        await self._journal.append(
            r.Dropped(
                job=job, attempt=attempt, step=step, tag=tag, reason=reason,
                files=staged if others else [],
            )
        )  # fmt: skip


def _rank_of(file: str) -> int | None:
    """Return the rank of a part file, or None for another file."""
    parsed = names.parse_part_file(file)
    return None if parsed is None else parsed[0]
