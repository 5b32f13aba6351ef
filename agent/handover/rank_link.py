"""One rank at the daemon of its node: its attempt, its connection, and the hand-overs that use them.

`Agent` and `StorageWriter` each have one. After a lost connection it resumes by itself. After a newer attempt of the job has begun,
everything under way fails.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable

from ckptd.agent.handover.handover import Handover, Handovers
from ckptd.agent.link.arguments import job_name
from ckptd.agent.link.attempt import begin
from ckptd.agent.link.client import CALL_SECONDS, Client
from ckptd.agent.link.launch import find_place
from ckptd.agent.link.rounds import Ranks
from ckptd.agent.pending import Pending
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared import messages as m
from ckptd.shared.errors import CkptdError, DaemonUnreachable, InvalidRequest, StructureChanged, from_wire
from ckptd.shared.failpoints import failpoint

log = logging.getLogger("ckptd.agent")

CLOSE_SECONDS = 600.0
SAVE_SECONDS = 600.0
"""How long a save that its caller waits for anyway waits for a slot."""
AWAY_SECONDS = 60.0
"""How long a caller that waits for a durable checkpoint waits for a lost daemon to come back."""


class RankLink:
    """One rank in one attempt of a job, connected to its daemon.

    `calls` lets in one public call at a time. `attempt` is the attempt that this rank is in. `saving` has the saves that DCP has planned,
    from their first byte until they are durable or given up. `structure_changed` is called, on any thread, when the ranks must plan again.

    Raises DaemonUnreachable, InvalidName, InvalidRequest, StorageError; SnapshotFailed if a rank does not come.
    """

    def __init__(
        self,
        ranks: Ranks,
        job: str | None,
        *,
        socket: str | os.PathLike[str] | None = None,
        root: str | os.PathLike[str] | None = None,
        structure_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.ranks = ranks
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.calls = CallLock(self._tidy)
        self.attempt = 0
        self.saving: weakref.WeakSet[object] = weakref.WeakSet()
        self.interrupted = False
        """True while the next attempt has begun and the slots and plans of the old one are not gone yet: Ctrl-C may come in between."""
        self._structure_changed = structure_changed
        self._closed = self._gone = False
        self._nested: deque[Pending] = deque()  # snapshots inside another call: the other ranks are told when the outer call ends
        self._pid = os.getpid()
        try:
            self.place = find_place(socket, root)
            self.client = Client(self.place, resume=self._resume, news=self._news, lost=self._lost, late=self._late)
        except CkptdError as error:
            begin(ranks, error)
            raise
        self.handovers = Handovers(self.client, self.world_size)
        try:
            self._begin(job)
        except BaseException:
            self.client.close()
            raise
        _links.add(self)

    @property
    def closed(self) -> bool:
        """True after `close`, and in a forked child, which needs an agent of its own."""
        return self._closed

    @property
    def usable(self) -> bool:
        """True if this is neither closed nor behind a newer attempt."""
        return not self._closed and not self.client.closed

    @property
    def root(self) -> str:
        return self.client.welcome.root

    @property
    def stall_budget(self) -> float:
        """Seconds that a snapshot may hold the training, as the daemon's settings say."""
        return self.client.welcome.stall_budget

    @property
    def last_step(self) -> int:
        """The last step that this rank has taken in its attempt, or -1."""
        return self.handovers.last_step

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self.client.connected else "without a daemon"
        return f"{self.job} attempt {self.attempt} rank {self.rank} of {self.world_size}, {state}"

    # -- attempts

    def _begin(self, job: str | None) -> None:
        """Begin the next attempt together with the other ranks. Steps start over, and the slots of the attempt before are gone."""
        try:
            self.job = job_name(job, private=self.client.welcome.private)
        except CkptdError as error:
            begin(self.ranks, error)
            raise
        attempt = begin(self.ranks, None, self.client, self.job)
        self.handovers.last_step, self.attempt = -1, attempt
        self.ranks.scope = self.job
        failpoint("agent.begun")

    def begin_next(self) -> None:
        """Begin the next attempt. The daemon takes the slots of this one back, and saves what it still owes of it."""
        self.interrupted = True
        self.handovers.wait_for_threads()
        self._begin(self.job)
        self.handovers.start_attempt()
        self._structure_changed()
        self.interrupted = False

    def check_open(self) -> None:
        """Raise InvalidRequest if this is closed."""
        if self._closed:
            raise InvalidRequest("this agent is closed; make another one")

    def ready(self) -> None:
        """Check that this is open. A rank that is alone finishes beginning the attempt that Ctrl-C has interrupted."""
        self.check_open()
        if self.interrupted:
            if self.world_size > 1:
                raise InvalidRequest("recover() was interrupted while it began the next attempt: call recover() again, on all ranks")
            self.begin_next()

    def open_step(self, step: int | None, tag: str | None) -> Handover:
        """Open the hand-over of a step that DCP has planned, or of the next step. The step counts as taken from now on."""
        pending = Pending(self.last_step + 1 if step is None else step, self.attempt)
        handover = self.handovers.open(pending, tag)
        self.handovers.last_step = max(self.last_step, pending.step)
        handover.begin()
        return handover

    def refuse(self, pending: Pending, error: CkptdError) -> None:
        """Fail a snapshot that was made inside another call. The other ranks are told when the outer call ends."""
        pending.fail(error)
        self._nested.append(pending)

    def _tidy(self) -> None:
        """Settle what interrupted and refused calls have left. Runs when a call enters and before it leaves."""
        if self._closed:
            if not self._gone and os.getpid() == self._pid:
                self.let_go()
            return
        self.handovers.settle_interrupted()
        while self._nested:
            pending = self._nested.popleft()
            self.handovers.pass_over(pending, pending.why)

    # -- the daemon

    def is_current(self) -> bool:
        """Return True if this attempt is still the newest of the job. Raises DaemonUnreachable."""
        reply, _ = self.client.call(lambda n: m.Status(id=n), m.StatusReport, CALL_SECONDS)
        return all(job["attempt"] == self.attempt for job in json.loads(reply.report)["jobs"] if job["job"] == self.job)

    def forget(self, tags: list[str]) -> dict[str, str]:
        """Delete checkpoints of this job by their tag directories. Return the reason for each one that stays.

        Raises DaemonUnreachable, StorageError.
        """
        reply, _ = self.client.call(lambda n: m.Forget(id=n, job=self.job, tags=tags), m.Forgotten, SAVE_SECONDS)
        return reply.refused

    def wait_durable(self, pending: Pending) -> None:
        """Wait until the snapshot is committed.

        Raises the reason if it cannot be, DaemonUnreachable after `AWAY_SECONDS` without a daemon.
        """
        while True:
            try:
                pending.wait("durable", timeout=1.0)
                return
            except TimeoutError:
                if not self.client.wait_connected(AWAY_SECONDS):
                    raise DaemonUnreachable(_GONE) from None

    def _news(self, progress: m.Progress) -> None:
        pending = self.handovers.pending.get((progress.attempt, progress.step))
        if progress.code == StructureChanged.code:
            self._structure_changed()
        if pending is not None:
            error = None if progress.state == "durable" else from_wire(progress.code or "snapshot-failed", progress.reason)
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
            lambda n: m.Begin(id=n, job=self.job, rank=self.rank, world_size=self.world_size, attempt=self.attempt), m.Began, CALL_SECONDS
        )
        self.handovers.resume({segment.segment for segment in began.held})

    # -- the end

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Make the newest snapshot durable, then free the slots. `Agent.close` has the whole contract."""
        with self.calls("close"):
            if self._closed:
                return
            self.handovers.wait_for_threads()
            try:
                if not self.client.wait_connected(self.stall_budget):
                    raise DaemonUnreachable(_GONE)
                self.client.call(lambda n: m.Persist(id=n), m.Done, timeout)
                self.client.call(lambda n: m.Detach(id=n), m.Done, CALL_SECONDS)
            finally:
                self.let_go()

    def let_go(self) -> None:
        """Close without telling the daemon, which takes this process for dead. May be called again, after Ctrl-C has interrupted it."""
        self._closed = True
        self.handovers.sealer.close()
        self.client.close()
        self.handovers.close()
        self._gone = True

    def _forget(self) -> None:
        """Close this in a forked child, which must not use its parent's connection and locks."""
        self._closed, self.calls = True, CallLock()
        self.client.forget()
        self.handovers.slots.forget()


_GONE = "the daemon is gone; what is sealed waits in shared memory for the next one, which will save it"


def links() -> list[RankLink]:
    """Return the links of this process that may be used."""
    return [link for link in list(_links) if link.usable]


_links: weakref.WeakSet[RankLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link._forget()


os.register_at_fork(after_in_child=_after_fork)
