"""Commits the steps of several nodes, by a two-phase commit over storage (FORMAT.md,
section 11).

Each node publishes a receipt once its parts are durable. The daemon of rank 0 collects
the receipts, and publishes the manifest or an abandonment. Both have the same name, so
that a try has one outcome even if two daemons publish. A daemon relies only on an
outcome that it has read. An abandonment ends one try of a step. If the step must still
be saved, the next try has a directory of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.saving.committer import Document
from ckptd.daemon.saving.destination import Destination
from ckptd.shared import names
from ckptd.shared.errors import (
    AlreadyExists,
    CkptdError,
    Fenced,
    IntegrityError,
    SnapshotFailed,
    StorageError,
    from_wire,
    storage_errors,
)
from ckptd.shared.formats import receipt as rc
from ckptd.shared.formats import replicas
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.plan import Plan
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.system import machine
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.units import rank_list
from ckptd.shared.wire.lifecycle import SnapshotState

log = logging.getLogger("ckptd.joint")

_FIRST_LOOK = 0.01  # seconds between the first two reads of the storage; the pauses grow
_LAST_LOOK, _LAST_REMOTE_LOOK = 0.1, 1.0
LATE_SECONDS = 5.0
"""Seconds for which a new attempt waits for the receipts of nodes that were in an
earlier attempt and are not in this one. The nodes of this attempt have delivered.
"""
_REMEMBERED = 100
"""The number of checkpoints that a daemon without rank 0 remembers. It deletes no
checkpoints, so it does not need them all.
"""
_STOP_SECONDS = 20.0
"""Seconds for which the daemon of rank 0, when it is stopped, waits for the receipts of
the other nodes.
"""


class Undecided(SnapshotFailed):
    """Raised when the outcome of a try is not known. No file of the try may be deleted."""


class Abandoned(Exception):
    """Raised when a try was abandoned, for the reason in `error`. Its files may be
    deleted.
    """

    def __init__(self, error: CkptdError) -> None:
        self.error = error


class Joint:
    """The commits of one daemon in jobs of several nodes.

    destination: the root. timeout: seconds for which the daemon of rank 0 waits for the
    other nodes before it abandons a try. remote: True if the storage is remote, and is
    therefore read less often. stopping: returns True once the daemon must end.
    """

    def __init__(
        self,
        destination: Destination,
        timeout: float,
        *,
        remote: bool,
        stopping: Callable[[], bool],
    ) -> None:
        self._catalog = destination.catalog
        self._committer = destination.committer
        self._repository = destination.repository
        self._root = destination
        self._calls = destination.calls
        self._timeout = timeout
        self._last_look = _LAST_REMOTE_LOOK if remote else _LAST_LOOK
        self._stopping = stopping

    # -- this node delivers

    async def open_try(self, job: Job, snapshot: Snapshot) -> rc.Receipt | Manifest | None:
        """Set the directory of a snapshot to that of its first try that is not abandoned.

        Return the manifest if the step is committed, the receipt of this node if this
        node has delivered, or None if this node must write its parts. Raises
        AlreadyExists if another step has the tag, Fenced if another run has the number
        of the attempt, OSError, IntegrityError.
        """
        number = 1
        while True:
            snapshot.directory = names.try_directory(snapshot.tag, number)
            found = await self._calls.run(
                lambda: self._repository.outcome(snapshot.job, snapshot.directory)
            )
            if isinstance(found, Manifest) and (found.attempt, found.step) != snapshot.key:
                raise AlreadyExists(
                    f"tag {snapshot.tag!r} of job {snapshot.job!r} is taken; choose another tag"
                )
            if isinstance(found, Manifest):
                return found
            if found is None:
                receipt = await self._own_receipt(snapshot)
                if receipt is None or not receipt.code:
                    if receipt is not None:
                        self._delivered(job, snapshot)
                    return receipt
                # No other outcome is possible.
                await self._decide(snapshot, rc.AbandonTry(receipt.code, receipt.reason))
            number += 1

    @staticmethod
    def _delivered(job: Job, snapshot: Snapshot) -> None:
        snapshot.delivered = True
        job.changed.notify()

    async def _own_receipt(self, snapshot: Snapshot) -> rc.Receipt | None:
        node = snapshot.node
        assert node is not None
        file = names.receipt_file(node.ranks[0])
        found = await self._calls.run(
            lambda: self._repository.receipt(snapshot.job, snapshot.directory, file)
        )
        if found is not None and (found.attempt, found.step) != snapshot.key:
            raise AlreadyExists(
                f"step {found.step} of job {snapshot.job!r} has the tag {snapshot.tag!r} already; "
                f"choose another tag"
            )
        if found is not None and found.node != node:
            raise Fenced(
                f"another run of job {snapshot.job!r} is also in attempt {snapshot.attempt}, and "
                f"has saved step {snapshot.step} from {found.host}: start this run again"
            )
        return found

    async def deliver(self, job: Job, snapshot: Snapshot, documents: list[Document]) -> None:
        """Publish the receipt of this node, whose parts are durable.

        If this node has published a receipt in this try before, that receipt counts.

        Raises Abandoned if this node has reported a failure of this try before,
        AlreadyExists and Fenced as `open_try` does, IntegrityError if the ranks of this
        node sealed different plans, OSError.
        """
        if len({plan.global_plan for _, plan, _ in documents}) != 1:
            raise IntegrityError(f"{snapshot.job}/{snapshot.tag}: its ranks sealed different plans")
        receipt = self._receipt(
            snapshot, [entry for entry, _, _ in documents], documents[0][1].global_plan.hex(), None,
            replicas.of_node({entry.rank: request.replicas for entry, _, request in documents}),
        )  # fmt: skip
        failpoint("receipt.starting")
        counts = await self._publish(snapshot, receipt)
        failpoint("receipt.durable")
        if counts.parts != receipt.parts:
            # Another node has delivered on behalf of this one, or this one for itself.
            await self._calls.run(
                lambda: self._repository.delete_unfinished(
                    snapshot.job, snapshot.directory, [part.file for part in receipt.parts]
                )
            )
        if counts.code:
            await self._decide(snapshot, rc.AbandonTry(counts.code, counts.reason))
            raise Abandoned(from_wire(counts.code, counts.reason))
        self._delivered(job, snapshot)

    async def _publish(self, snapshot: Snapshot, receipt: rc.Receipt) -> rc.Receipt:
        """Publish a receipt of this node. Return the receipt that counts: this one, or an
        earlier receipt of this node in the same try.
        """
        try:
            await self._calls.run(lambda: self._repository.publish_receipt(receipt))
        except FileExistsError:
            return await self._own_receipt(snapshot) or receipt
        return receipt

    def _receipt(
        self, snapshot: Snapshot, parts: list[PartEntry], global_plan: str,
        error: CkptdError | None, shared: Sequence[replicas.OfNode] = (),
    ) -> rc.Receipt:  # fmt: skip
        assert snapshot.node is not None
        return rc.Receipt(
            job=snapshot.job, attempt=snapshot.attempt, step=snapshot.step, tag=snapshot.directory,
            node=snapshot.node, host=machine.host(), world_size=snapshot.world_size,
            global_plan=global_plan, parts=parts, code=error.code if error is not None else "",
            reason="" if error is None else f"{self._named(snapshot)}: "
                f"{error}"[: rc.MAX_REASON], replicas=list(shared),
        )  # fmt: skip

    @staticmethod
    def _named(snapshot: Snapshot) -> str:
        assert snapshot.node is not None
        return f"{rank_list(snapshot.node.ranks)} on {machine.host()}"

    async def refuse(self, job: Job, snapshot: Snapshot, error: CkptdError) -> bool:
        """Report that this node cannot save a step in its present try, so that no other
        node waits for its parts. Retry while the storage fails.

        snapshot: a copy of the snapshot, because a later save of the step may give the
        original another directory meanwhile.

        Return True if the parts of this node in the try are not needed. Return False if
        this node has delivered them before, if the storage has not taken the report
        within the `timeout` of this object, or if the daemon stops or the next attempt
        begins meanwhile.
        """
        loop, pause = asyncio.get_running_loop(), _FIRST_LOOK
        until = loop.time() + self._timeout
        while not self._stopping() and loop.time() < until and snapshot.attempt == job.attempt:
            try:
                await self._root.ready(job)  # the root may be gone or replaced
                found = await self._calls.run(
                    lambda: self._repository.outcome(snapshot.job, snapshot.directory)
                )
                if found is not None:
                    return isinstance(found, rc.Abandonment)
                return bool(
                    (await self._publish(snapshot, self._receipt(snapshot, [], "", error))).code
                )
            except Fenced:
                return True
            except (OSError, CkptdError) as problem:
                log.debug(
                    "%s/%s: its failure cannot be reported yet: %s",
                    snapshot.job,
                    snapshot.directory,
                    problem,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10 * self._last_look)
        return False

    async def refuse_lost(self, job: Job, durable: Snapshot) -> None:
        """Report the older steps of an attempt that an earlier daemon of this node held,
        and that were lost with its memory, so that no other node waits for their parts.

        durable: a step of the attempt that is durable. Nothing of older steps is needed
        then. Raises OSError, StorageError.
        """
        assert durable.node is not None
        tags = await self._calls.read(f"list {job.name}", partial(self._repository.tags, job.name))
        for tag in sorted(tags):
            parsed = names.parse_tag_directory(tag)
            if (
                parsed is None
                or parsed.step is None
                or parsed.attempt != durable.attempt
                or parsed.step >= durable.step
                or tag in self._catalog.job(job.name).checkpoints
                or job.snapshot((parsed.attempt, parsed.step)) is not None
            ):
                continue
            lost = Snapshot(
                job.name, parsed.attempt, parsed.step, tag, durable.world_size, persist=True,
                state=SnapshotState.FAILED, node=durable.node,
            )  # fmt: skip
            error = SnapshotFailed(
                f"step {parsed.step} was lost with the memory of the daemon that held it"
            )
            if await self.refuse(job, lost, error) and durable.node.leads:
                await self.abandon_refused(lost)

    async def abandon_refused(self, snapshot: Snapshot) -> bool:
        """Abandon a try in which this node has delivered, if another node has reported a
        failure. Return True if the try is abandoned.
        """
        try:
            found = await self._calls.run(
                lambda: self._repository.outcome(snapshot.job, snapshot.directory)
            )
            if found is None:
                receipts = await self._receipts(snapshot.job, snapshot.directory, (), late=False)
                refused = next((receipt for receipt in receipts if receipt.code), None)
                if refused is None:
                    return False
                # No other outcome is possible.
                await self._decide(snapshot, rc.AbandonTry(refused.code, refused.reason))
                found = await self._calls.run(
                    lambda: self._repository.outcome(snapshot.job, snapshot.directory)
                )
        except (OSError, CkptdError):
            return False
        return isinstance(found, rc.Abandonment)

    # -- the outcome

    async def finish(self, job: Job, snapshot: Snapshot) -> None:
        """Wait for the outcome of a try, and record the commit. If rank 0 is on this node,
        decide the outcome.

        Raises Abandoned; Undecided if the outcome is not known after `timeout`, when the
        daemon stops, or, if no rank waits for it, when a later checkpoint is durable;
        OSError.
        """
        assert snapshot.node is not None
        loop = asyncio.get_running_loop()
        begun, stopped, pause = loop.time(), 0.0, _FIRST_LOOK
        receipts: list[rc.Receipt] = []
        while True:
            late = loop.time() - begun > self._timeout
            try:
                if (found := await self._outcome(job, snapshot, receipts, late=late)) is not None:
                    break
            except OSError as error:  # the storage may answer again
                if late:
                    raise
                log.debug(
                    "%s/%s: the outcome cannot be read now: %s",
                    snapshot.job,
                    snapshot.directory,
                    error,
                )
            now = loop.time()
            stopped = stopped or (now if self._stopping() else 0.0)
            over = stopped and (not snapshot.node.leads or now - stopped > _STOP_SECONDS)
            # Another node may have freed a step that is older than the newest checkpoint, and never
            # deliver it. Memory that nobody waits for would be kept until `timeout`.
            over = over or (not snapshot.is_awaited and job.is_durable_after(snapshot.key))
            if over or now - begun > self._timeout + LATE_SECONDS:
                raise Undecided(self._why_undecided(snapshot, receipts, now - begun))
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, self._last_look)
        failpoint("outcome.known")
        if isinstance(found, rc.Abandonment):
            raise Abandoned(from_wire(found.code, found.reason))
        if (found.attempt, found.step) != snapshot.key:
            raise AlreadyExists(
                f"step {found.step} of job {snapshot.job!r} has the tag {snapshot.tag!r} already; "
                f"choose another tag"
            )
        await self._committer.record(snapshot, found)
        if snapshot.node.leads:
            log.info(
                "checkpoint %s/%s: committed with the parts of all nodes",
                snapshot.job,
                snapshot.directory,
            )
        else:
            self._catalog.job(snapshot.job).forget_older(_REMEMBERED)

    async def _outcome(
        self, job: Job, snapshot: Snapshot, receipts: list[rc.Receipt], *, late: bool
    ) -> Manifest | rc.Abandonment | None:
        """Return the outcome of a try, or None if it is undecided. On the node of rank 0,
        decide it first if the receipts allow it.

        receipts: filled with the receipts of the try, if rank 0 is on this node. late:
        True if the wait for missing receipts is over.
        """
        read = partial(self._repository.outcome, snapshot.job, snapshot.directory)
        found = await self._calls.run(read)
        if found is not None or snapshot.node is None or not snapshot.node.leads:
            return found
        verdict: rc.CommitTry | rc.AbandonTry | None
        try:
            receipts[:] = await self._receipts(
                snapshot.job, snapshot.directory, receipts, late=late
            )
            verdict = rc.decide(
                receipts, snapshot.world_size, late=late and snapshot.attempt == job.attempt
            )
        except IntegrityError as error:  # a receipt is damaged, or a newer ckptd has written it
            verdict = rc.AbandonTry(error.code, str(error))
        if verdict is None:
            return None
        await self._decide(snapshot, verdict)
        return await self._calls.run(read)

    async def _receipts(
        self, job: str, tag: str, known: Sequence[rc.Receipt], *, late: bool
    ) -> list[rc.Receipt]:
        """Return the receipts of a try.

        Receipts that are `known` are not read again, because a receipt never changes.

        late: True if a missing receipt ends the try. The directory is then listed again.
        """
        if late:
            await self._calls.run(partial(self._repository.refresh_listing, job, tag))
        return await self._calls.run(partial(self._repository.receipts, job, tag, known))

    def _why_undecided(self, snapshot: Snapshot, receipts: list[rc.Receipt], seconds: float) -> str:
        """Return the reason why the outcome is not known. It names the ranks that have
        not delivered, if this daemon has read receipts.
        """
        waited = (
            f"step {snapshot.step} is not known to be durable after {seconds:.0f} s: "
            f"{self._named(snapshot)} delivered"
        )
        if not receipts:
            return f"{waited}, and the daemon of rank 0 has published no outcome"
        missing = sorted(
            set(range(snapshot.world_size)).difference(
                *(receipt.node.ranks for receipt in receipts)
            )
        )
        return f"{waited}, and {rank_list(missing)} did not"

    async def _decide(self, snapshot: Snapshot, verdict: rc.CommitTry | rc.AbandonTry) -> None:
        """Publish the manifest or the abandonment of a try.

        If another daemon has published one before, that one counts. Raises OSError,
        IntegrityError.
        """
        data: bytes | None = None
        objects: dict[str, bytes] = {}
        if isinstance(verdict, rc.CommitTry):
            try:
                plan, request = await self._calls.run(partial(self._first_part, snapshot, verdict))
                manifest = self._committer.manifest(snapshot, verdict.parts, plan, request)
                data, objects = await self._calls.run(manifest.split)
            except IntegrityError as error:
                # A part is gone or damaged, or the manifest is too large for readers.
                verdict = rc.AbandonTry(error.code, str(error))
        if isinstance(verdict, rc.AbandonTry):
            abandonment = rc.Abandonment(
                job=snapshot.job, attempt=snapshot.attempt, step=snapshot.step,
                tag=snapshot.directory, code=verdict.code[:64],
                reason=verdict.reason[: rc.MAX_REASON],
            )  # fmt: skip
            data = rc.encode(abandonment)
        assert data is not None
        failpoint("outcome.starting")
        with suppress(FileExistsError):
            by = names.new_nonce().hex()
            await self._calls.run(
                lambda: self._repository.publish_manifest(
                    snapshot.job, snapshot.directory, data, objects=objects, by=by
                )
            )
        failpoint("outcome.durable")

    def _first_part(
        self, snapshot: Snapshot, verdict: rc.CommitTry
    ) -> tuple[Plan, SnapshotRequest]:
        """Check that all part files exist, and return the plan and the request in the
        part of rank 0.

        Raises IntegrityError if a part file is missing, or that of rank 0 is damaged;
        OSError.
        """
        there = set(self._repository.files(snapshot.job, snapshot.directory))
        for part in verdict.parts:
            if part.file not in there:
                raise IntegrityError(f"{snapshot.job}/{snapshot.directory}/{part.file} is missing")
        first = verdict.parts[0]
        with closing(
            self._repository.open_part(
                snapshot.job, snapshot.directory, first.file, first.index_sha256
            )
        ) as reader:
            return reader.plan, SnapshotRequest.decode(reader.index.request)

    # -- earlier attempts

    async def decide_past(self, job: Job, delivered: int) -> None:
        """Decide the undecided tries of earlier attempts, and delete the files of
        abandoned tries.

        Call this only on the daemon of rank 0 of the newest attempt, after the nodes of
        that attempt have delivered, and after the root was scanned for the job.

        delivered: an earlier attempt all of whose nodes have delivered. In tries of
        other attempts, receipts may still come, and are waited for. A step that has
        only parts is waited for, too, if it is newer than all checkpoints. Raises
        StorageError.
        """
        there = self._catalog.job(job.name)
        until, newest = asyncio.get_running_loop().time() + LATE_SECONDS, there.newest_checkpoint()
        patience = until + LATE_SECONDS  # until when a failure of the storage is tried again
        saved = (0, -1) if newest is None else newest.order[:2]
        for tag in sorted(there.uncommitted):
            parsed = names.parse_tag_directory(tag)
            if parsed is None or parsed.attempt >= job.attempt:
                continue
            for left in (2, 1, 0):
                try:
                    awaited = parsed.order > saved and await self._has_parts(job, tag)
                    await self._decide_one(
                        job,
                        tag,
                        parsed.attempt,
                        0.0 if parsed.attempt == delivered else until,
                        awaited=awaited,
                    )
                    break
                except OSError as error:
                    problem = StorageError.of(f"decide {job.name}/{tag}", error, served=True)
                    # One failure of the storage must not cost a step that all nodes
                    # have delivered.
                    if left and asyncio.get_running_loop().time() < patience:
                        await asyncio.sleep(self._last_look)
                    elif problem.is_no_damage:
                        raise problem from None
                    else:
                        log.warning("%s; its files stay", problem)
                except IntegrityError as error:
                    log.warning(
                        "the outcome of %s/%s cannot be decided, and its files stay: %s",
                        job.name,
                        tag,
                        error,
                    )
                    break

    async def _has_parts(self, job: Job, tag: str) -> bool:
        files = await self._calls.read(
            f"list {job.name}/{tag}", partial(self._repository.files, job.name, tag)
        )
        return any(map(names.part_of, files))

    async def _decide_one(
        self, job: Job, tag: str, attempt: int, until: float, *, awaited: bool
    ) -> None:
        """Decide one try of an earlier attempt, or do nothing if it has no receipts.

        until: the time of the event loop until which missing receipts are waited for.
        awaited: True to wait for the first receipt, too.
        """
        pause = _FIRST_LOOK
        receipts: list[rc.Receipt] = []
        while True:
            found = await self._calls.read(
                f"read the outcome of {job.name}/{tag}",
                partial(self._repository.outcome, job.name, tag),
            )
            if isinstance(found, Manifest):
                self._catalog.job(job.name).commit(StoredCheckpoint.of(found))
                log.info(
                    "checkpoint %s/%s: committed from the receipts of its nodes", job.name, tag
                )
                return
            if isinstance(found, rc.Abandonment):
                if found.code != rc.DELETED:
                    job.abandoned[tag] = found
                # The abandonment stays for one more attempt, so that a late daemon of
                # the old attempt can read it.
                keep = [names.MANIFEST] if attempt == job.attempt - 1 else []
                try:
                    await self._calls.run(partial(self._repository.sweep_tag, job.name, tag, keep))
                except OSError as error:
                    log.warning(
                        "%s", StorageError.of(f"delete what is left of {job.name}/{tag}", error)
                    )
                return
            over = asyncio.get_running_loop().time() > until
            late = bool(receipts) and over
            async with self._calls.deadline(f"read the receipts of {job.name}/{tag}"):
                receipts = await self._receipts(job.name, tag, receipts, late=late)
            if not receipts and (over or not awaited):
                # Either one node has saved the step alone, and its journal says so, or
                # no node has delivered.
                return
            first = receipts[0] if receipts else None
            verdict = None if first is None else rc.decide(receipts, first.world_size, late=late)
            if first is not None and verdict is not None:
                past = Snapshot(
                    job.name,
                    attempt,
                    first.step,
                    tag,
                    first.world_size,
                    persist=True,
                    state=SnapshotState.WRITTEN,
                    node=first.node,
                )
                await self._decide(past, verdict)
                continue
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, self._last_look)

    # -- after a restart of the daemon

    async def roll_forward(self, job: Job, snapshot: Snapshot, documents: list[Document]) -> bool:
        """Deliver parts that an earlier daemon of this node has made durable, unless it
        has delivered them. Return False if the parts are not needed.

        They are needed while the try is undecided and no newer attempt has begun.
        """
        with storage_errors(f"deliver {snapshot.job}/{snapshot.directory}", served=True):
            if (
                await self._calls.run(
                    lambda: self._repository.outcome(snapshot.job, snapshot.directory)
                )
                is not None
            ):
                return False
            if (receipt := await self._own_receipt(snapshot)) is not None:
                # It may name other parts: a node and the holder of its copies may both save.
                files = {part.file for part in receipt.parts}
                return files == {entry.file for entry, _, _ in documents}
            newest = await self._calls.run(lambda: self._repository.newest_attempt(snapshot.job))
            if newest > snapshot.attempt or [entry.rank for entry, _, _ in documents] != list(
                snapshot.ranks
            ):
                return False
            await self.deliver(job, snapshot, documents)
        return True
