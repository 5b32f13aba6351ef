"""The link of one rank to the daemon of its node: its attempt, its connection, and the
hand-overs that use them.

Each `Agent` has a link. `StorageWriter` uses an agent's link of the same root, job and
rank, or makes its own. A link resumes by itself after a lost connection. Once a newer
attempt of the job has begun, every snapshot under way fails.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from ckptd.agent.handover.handover import Handover, Handovers
from ckptd.agent.link.arguments import foreign_memory, job_name, launch_id, may_take_over
from ckptd.agent.link.attempt import BegunAttempt, begin
from ckptd.agent.link.board import Board
from ckptd.agent.link.client import CALL_SECONDS, Client
from ckptd.agent.link.launch import find_place
from ckptd.agent.link.rounds import WARN_SECONDS, Exchange, RankGroup, Told, not_called
from ckptd.agent.link.script import check_same_run, look_for_other_script
from ckptd.agent.peers.replicator import Replicator
from ckptd.agent.pending import NOT_COPIED, NOT_SET, PendingSnapshot
from ckptd.agent.threads.call_lock import CallLock
from ckptd.agent.threads.interruptible import interruptible
from ckptd.agent.threads.reminder import reminder
from ckptd.shared import native_code
from ckptd.shared.errors import (
    CkptdError,
    DaemonUnreachable,
    InvalidRequest,
    SnapshotFailed,
    StructureChanged,
    from_wire,
)
from ckptd.shared.formats.membership import Membership
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.board import Answer
from ckptd.shared.wire.session import PEERS

log = logging.getLogger("ckptd.agent")

CLOSE_SECONDS = 600.0
"""Seconds that `close` waits for the newest snapshot to become durable, by default."""
SAVE_SECONDS = 600.0
"""Seconds that a save through DCP may wait for a slot, since its caller waits for the
save anyway. Also the timeout of `forget`.
"""
AWAY_SECONDS = 60.0
"""Seconds to wait for a lost daemon to come back, for a caller that waits for a durable
checkpoint.
"""


class RankLink:
    """The link of one rank, in one attempt of a job, to its daemon.

    Making it begins or joins an attempt. `calls` admits one public call at a time.
    `attempt` is the attempt that this rank is in, and `node` the membership of this
    node in it, or None if all ranks are on one node. `saving` has the saves through DCP that
    are not over yet. `structure_changed` is called, on any thread, when the ranks must
    plan again. `unnamed` is True if neither the caller nor the environment names the
    job. `takeover` says whether to begin although another run of the job is alive; None
    leaves that to CKPTD_TAKEOVER. `schedules` counts the schedules and the storages of
    frameworks that have used this link: the number gives each one topics of its own in
    the store.

    Raises DaemonUnreachable, Forbidden, InvalidName, InvalidRequest, JobRunning,
    ForeignMemory, StorageError and other errors of the daemon, and SnapshotFailed if a
    rank does not make its agent in time. `begin` in `attempt.py` says which errors are
    raised on all ranks.
    """

    def __init__(
        self,
        ranks: RankGroup,
        job: str | None,
        *,
        socket: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] | None = None,
        takeover: bool | None = None,
        structure_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.ranks = ranks
        self.unnamed = not (job or os.environ.get("CKPTD_JOB"))
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.calls = CallLock(self._tidy)
        self.attempt = 0
        self._root_identity = ""  # that of the root for which the attempt was begun
        self.schedules = 0
        self.node: Membership | None = None
        self._board: Board | None = None
        self._replicator: Replicator | None = None
        self.saving: weakref.WeakSet[object] = weakref.WeakSet()
        self.interrupted = False
        """True from before the next attempt begins until the slots and plan of the old
        one are dropped. Ctrl-C may leave it True.
        """
        self._structure_changed = structure_changed
        # True after `close`, and in a forked child, which needs an agent of its own.
        self.closed = self._gone = False
        self._warned = False  # True once a warning has named ranks that have not called snapshot()
        # Snapshots refused inside another call, for `_tidy` to report to the other
        # ranks.
        self._nested: deque[PendingSnapshot] = deque()
        self._pid = os.getpid()
        try:
            may, self._foreign_memory = may_take_over(takeover), foreign_memory()
            self.place = find_place(socket, root)
            self.client = Client(
                self.place, resume=self._resume, news=self._news, lost=self._lost, late=self._late
            )
        except CkptdError as error:
            begin(ranks, error)
            raise
        self.handovers = Handovers(self.client)
        try:
            self._begin(job, may)
        except BaseException:
            self.client.close()
            raise
        _links.add(self)
        if self.rank == 0:
            native_code.warn_once(log)
        if self.unnamed and self.rank == 0 and self.attempt > 1:
            look_for_other_script(self.root, self.job)

    @property
    def usable(self) -> bool:
        """True if this link is neither closed nor known to be behind a newer attempt."""
        return not self.closed and not self.client.closed

    @property
    def root(self) -> str:
        return self.client.welcome.root

    @property
    def stall_budget(self) -> float:
        """The seconds that a snapshot may hold the training, from the daemon's
        settings.
        """
        return self.client.welcome.stall_budget

    @property
    def last_step(self) -> int:
        """The last step that this rank has taken in its attempt, or -1."""
        return self.handovers.last_step

    def __repr__(self) -> str:
        state = (
            "closed"
            if self.closed
            else "connected"
            if self.client.connected
            else "without a daemon"
        )
        return f"{self.job} attempt {self.attempt} rank {self.rank} of {self.world_size}, {state}"

    # -- attempts

    def _begin(self, job: str | None, takeover: bool) -> None:
        """Begin the next attempt together with the other ranks.

        Steps start over, and the slots of the previous attempt are gone.
        """
        try:
            self.job = job_name(job, private=self.client.welcome.private)
            if self.unnamed and self.rank == 0 and not self.attempt:
                check_same_run(self.root, self.job)
        except CkptdError as error:
            begin(self.ranks, error)
            raise
        self._end_copies()
        self._end_board()
        begun = begin(self.ranks, None, self.client, self.job, takeover=takeover)
        if (stage := self.client.welcome.stage) and self.rank == 0:
            if begun.node is None:
                log.info(
                    "checkpoints are durable in %s, on this node's disk, and are uploaded to %s "
                    "afterwards",
                    stage,
                    self.root,
                )
            else:
                log.info(
                    "a job of several nodes is saved straight to %s: the stage %s is not used",
                    self.root,
                    stage,
                )
        self.handovers.last_step = -1
        self.attempt = begun.attempt
        self._root_identity = self.client.welcome.identity
        self.node = begun.node
        self.ranks.scope = self.job
        if (
            self.node is not None
            and self.rank == self.node.ranks[0]
            and isinstance(self.ranks, Exchange | Told)
        ):
            # The number is that of another attempt, too, under another root.
            self._board = Board(
                self.ranks.new_client(),
                f"{self.job}/board/{self.node.run_id}",
                self.rank,
                begun.leaders,
                partial(self._pass_on, self.attempt),
                (lambda: self.client.connected) if begun.peer >= 0 else None,
            )
        if begun.alone and self.rank == 0:
            log.warning(
                "there are no copies of snapshots in the memory of other nodes: %s", begun.alone
            )
            if PEERS in self.client.welcome.features:
                self.client.post(
                    lambda n: m.CopyFailed(id=n, attempt=begun.attempt, reason=begun.alone),
                    lambda _: None,
                )
        if begun.peer >= 0 and self.node is not None and isinstance(self.ranks, Exchange | Told):
            self._replicator = Replicator(
                self.client, self.ranks.new_client, f"{self.job}/peers/{self.node.run_id}",
                self.rank, self.attempt, begun.peer, begun.sources, self.handovers.slots.sealed,
            )  # fmt: skip
            self.handovers.slots.outgrown = self._replicator.keep
        self.handovers.seals.not_copied = self._not_copied(begun)
        failpoint("agent.begun")

    def _not_copied(self, begun: BegunAttempt) -> str:
        """Return the reason why there are no copies in this attempt, or ""."""
        if begun.peer >= 0:
            return ""
        if begun.alone:
            return NOT_COPIED + begun.alone
        if begun.node is None and self.client.welcome.copies is not None:
            return NOT_COPIED + "all ranks of the job are on one node"
        return NOT_SET

    def _end_copies(self) -> None:
        replicator, self._replicator = self._replicator, None
        if replicator is not None:
            replicator.end()

    def _pass_on(self, attempt: int, answer: Answer) -> None:
        self.client.post(lambda n: m.Heard(id=n, attempt=attempt, answer=answer), lambda _: None)

    def _end_board(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            board.end()

    def begin_next(self) -> None:
        """Begin the next attempt.

        The daemon takes the slots of the current attempt back, and finishes the saves
        that it still owes.
        """
        # After an interruption the daemon may have restarted, and then it takes this
        # process for another run until it has begun again.
        takeover, self.interrupted = self.interrupted, True
        self.handovers.wait_for_threads()
        self._begin(self.job, takeover)
        self.handovers.start_attempt()
        self._structure_changed()
        self.interrupted = False

    def check_open(self) -> None:
        """Raise InvalidRequest if this link is closed."""
        if self.closed:
            raise InvalidRequest("this agent is closed; make another one")

    def ready(self) -> None:
        """Prepare this link for a call. Raises InvalidRequest if it is closed.

        If Ctrl-C has interrupted the begin of the next attempt, a rank that is alone
        begins it now. On several ranks this raises InvalidRequest instead, because all
        ranks must call `recover`.
        """
        self.check_open()
        if self.interrupted:
            if self.world_size > 1:
                raise InvalidRequest(
                    "recover() was interrupted while it began the next attempt: call recover() "
                    "again, on all ranks"
                )
            self.begin_next()

    @interruptible
    def broadcast(
        self, topic: str, say: Callable[[], bytes], *, late: bool = False
    ) -> bytes | None:
        """Return the message of rank 0 on every rank.

        `say` makes the message, and runs on rank 0 only. Another rank waits for the
        message up to the stall budget, and returns None if it has not arrived by then.
        With `late`, that rank has waited for this message before, and does not wait
        again.

        Raises SnapshotFailed if the job's store does not answer, InvalidRequest if this
        link is closed, and Busy inside another call of this thread.
        """
        with self.calls("due"):
            self.ready()
            return self.ranks.broadcast(topic, say, 0.0 if late else self.stall_budget)

    def open_step(self, step: int | None, tag: str | None) -> Handover:
        """Open the hand-over of a step of a DCP save, and return it.

        `step` None is the next step. The step counts as taken from now on.
        """
        pending = PendingSnapshot(self.last_step + 1 if step is None else step, self.attempt)
        handover = self.handovers.open(pending, tag)
        self.handovers.last_step = max(self.last_step, pending.step)
        handover.begin()
        return handover

    def refuse(self, pending: PendingSnapshot, error: CkptdError) -> None:
        """Fail a snapshot that was made inside another call.

        The other ranks learn of it when the outer call ends.
        """
        pending.fail(error)
        self._nested.append(pending)

    def _tidy(self) -> None:
        """End the hand-overs of interrupted calls, and report refused snapshots to the
        other ranks.

        Runs when a public call has taken the lock `calls`, and before it releases it.

        If this link is closed, only finish a `let_go` that was interrupted.
        """
        if self.closed:
            if not self._gone and os.getpid() == self._pid:
                self.let_go()
            return
        self.handovers.end_interrupted()
        while self._nested:
            pending = self._nested.popleft()
            self.handovers.pass_over(pending, pending.why)

    # -- the daemon

    def is_current(self) -> bool:
        """Return True if this attempt is still the newest of the job.

        Raises DaemonUnreachable.
        """
        reply, _ = self.client.call(lambda n: m.Status(id=n), m.StatusReport, CALL_SECONDS)
        return all(
            job["attempt"] == self.attempt
            for job in json.loads(reply.report)["jobs"]
            if job["job"] == self.job
        )

    def forget(self, tags: list[str]) -> dict[str, str]:
        """Delete checkpoints of this job, given the names of their directories.

        Returns the reason for each checkpoint that could not be deleted, keyed by that
        name. Raises DaemonUnreachable, StorageError.
        """
        reply, _ = self.client.call(
            lambda n: m.Forget(id=n, job=self.job, tags=tags), m.Forgotten, SAVE_SECONDS
        )
        return reply.refused

    def wait_durable(self, pending: PendingSnapshot) -> None:
        """Wait until the snapshot is committed in the root: the caller may read the
        path that it has named.

        Raises the error of the snapshot if it cannot be committed, and
        DaemonUnreachable after `AWAY_SECONDS` without a daemon.
        """
        while True:
            try:
                pending.wait("uploaded", timeout=1.0)
                return
            except TimeoutError:
                if not self.client.wait_connected(AWAY_SECONDS):
                    raise self.client.refusal or DaemonUnreachable(_GONE) from None

    def _news(self, news: m.Notification) -> None:
        match news:
            case m.Uploads():
                self.handovers.seals.follow_uploads(news)
            case m.Holds():
                board = self._board
                if board is not None and news.attempt == self.attempt:
                    board.show(news.holding)
            case m.PeerReplicas():
                replicator = self._replicator
                if replicator is not None:
                    replicator.follow(news)
                self.handovers.seals.follow_copies(news)
            case m.Waiting():
                self._warn(news)
            case m.Remark():
                log.warning("%s", news.text)
            case m.Progress():
                self._progress(news)

    def _warn(self, waiting: m.Waiting) -> None:
        """Log once which ranks have not called `snapshot` for a step that this rank has
        called it for.

        If the ranks meet in a round for this step, the round names the ranks that are
        missing.
        """
        pending = self.handovers.pending.get((waiting.attempt, waiting.step))
        if (
            self._warned
            or pending is None
            or pending.meets
            or pending.begun is None
            or self.rank in waiting.ranks  # it has called since the message was sent
        ):
            return
        self._warned = True
        waited = round(time.perf_counter() - pending.begun, 1)
        call = f"snapshot(step={waiting.step})"
        here = range(self.world_size) if self.node is None else self.node.ranks
        why = "" if set(waiting.ranks).issubset(here) else "; or the daemon of its node hangs"
        log.warning("%s", not_called(call, waiting.ranks, self.rank, self.world_size, waited, why))

    def _progress(self, progress: m.Progress) -> None:
        pending = self.handovers.pending.get((progress.attempt, progress.step))
        if progress.code == StructureChanged.code:
            self._structure_changed()
        if pending is not None:
            error = (
                None
                if progress.state == "durable"
                else from_wire(progress.code or "snapshot-failed", progress.reason)
            )
            self.handovers.seals.finish(pending, error)

    def _late(self, reply: m.Reply) -> None:
        """Give back a slot whose grant arrived after its caller had stopped waiting."""
        if isinstance(reply, m.Granted):
            self.handovers.returns.send(reply.segment, reply.step)

    def _lost(self, error: CkptdError) -> None:
        self.handovers.seals.fail_all(error)

    def _resume(self) -> None:
        """Resume the attempt on a new connection."""
        if not self.attempt or self.interrupted:
            return  # the call that begins the next attempt sends its own Begin
        began, _ = self.client.call(
            lambda n: m.Begin(
                id=n,
                job=self.job,
                rank=self.rank,
                world_size=self.world_size,
                attempt=self.attempt,
                run=launch_id(),
                node=self.node,
                foreign_memory=self._foreign_memory,
                identity=self._root_identity,
            ),
            m.Began,
            CALL_SECONDS,
        )
        if self._board is not None:
            self._board.repeat()
        self.handovers.resume({segment.segment for segment in began.held})

    # -- closing

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Make the newest snapshot durable, then free the slots. See `Agent.close`."""
        with self.calls("close"):
            if self.closed:
                return
            ended = self.handovers.wait_for_threads(timeout)
            try:
                if not ended:
                    raise SnapshotFailed(_NOT_COPIED.format(timeout))
                if not self.client.wait_connected(self.stall_budget):
                    raise self.client.refusal or DaemonUnreachable(_GONE)
                with (
                    reminder(log, _CLOSING, WARN_SECONDS) if self.world_size > 1 else nullcontext()
                ):
                    self.client.call(lambda n: m.Persist(id=n), m.Done, timeout)
                self.client.call(lambda n: m.Detach(id=n), m.Done, CALL_SECONDS)
            finally:
                self.let_go(CLOSE_SECONDS if ended else 0.0)

    def let_go(self, timeout: float = CLOSE_SECONDS) -> None:
        """Close this link without a message to the daemon, which then treats this
        process as dead unless the rank has detached.

        May be called again after Ctrl-C has interrupted it. timeout: seconds to wait for
        copies from an accelerator.
        """
        self.closed = True
        self._end_copies()
        self._end_board()
        copies_ended = self.handovers.sealer.close(timeout)
        self.client.close()
        self.handovers.close(copies_ended=copies_ended)
        self._gone = True

    def _forget(self) -> None:
        """Close this link in a forked child, which must not use its parent's connection
        and locks.
        """
        self.closed = True
        self.calls = CallLock()
        self._board = self._replicator = None
        self.client.forget()
        self.handovers.sealer.forget()
        self.handovers.slots.forget()


_CLOSING = (
    "close() waits until the newest snapshot is durable. If only some ranks have sealed that "
    "snapshot, close() "
    "also waits for the other ranks: every rank must make the same calls of snapshot(), and then "
    "call close()"
)
_NOT_COPIED = (
    "the copies of the last snapshot from the accelerator have not ended within {:g} s: the device "
    "hangs, or has much work before them. Once this process has ended, the daemon saves the "
    "snapshot that was sealed before"
)
_GONE = (
    "the daemon is gone; sealed snapshots stay in shared memory, and the next daemon will save them"
)


def links() -> list[RankLink]:
    """Return the usable links of this process."""
    return [link for link in list(_links) if link.usable]


_links: weakref.WeakSet[RankLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link._forget()


os.register_at_fork(after_in_child=_after_fork)
