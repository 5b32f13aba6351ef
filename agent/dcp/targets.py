"""Finds the daemon, job and step that a path names, and writes a rank's part of a DCP save into a slot of that daemon.

The coordinator claims the attempt, and sends it to the other ranks. A process keeps the links to daemons that it has made for a save, uses
them for the next save, and closes them when it exits.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.agent.copy.mapped_slot import Documents, document_offsets
from ckptd.agent.handover.handover import Handover
from ckptd.agent.handover.rank_link import SAVE_SECONDS, RankLink, links
from ckptd.agent.link.launch import find_place
from ckptd.agent.link.rounds import Told
from ckptd.agent.pending import Pending
from ckptd.agent.plan.layout import Layout
from ckptd.agent.plan.save_plan import Resolved, resolves_by_itself
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared import names
from ckptd.shared.errors import AlreadyExists, CkptdError, DaemonUnreachable, InternalError, InvalidRequest, SnapshotFailed, StorageError
from ckptd.shared.location import Location, located
from ckptd.shared.segment import this_boot
from ckptd.shared.snapshot_request import SnapshotRequest
from ckptd.shared.storage.locate import attempts_of, job_and_tag, open_root, open_standalone

log = logging.getLogger("ckptd.agent")

EXIT_SECONDS = 5.0
_LOOK_SECONDS = 0.01
_STEP = re.compile(r"step-([0-9]{1,18})")
_calls = CallLock()
_own: dict[tuple[str, str], RankLink] = {}  # by root and job; the links that `StorageWriter` has made itself


@dataclass(frozen=True, slots=True)
class Target:
    """The checkpoint that `<root>/<job>/<tag>` names at the daemon of `root`.

    socket: the daemon's, or None for the private daemon of `root`. tag: a tag of the caller's own, or None if the tag is `step-<number>`.
    step: that number, or None if there is a tag.
    """

    socket: str | None
    root: str
    job: str
    tag: str | None
    step: int | None

    @property
    def path(self) -> Location:
        return located(self.root) / self.job / (self.tag or f"step-{self.step}")

    @classmethod
    def of(cls, path: Location, socket: str | None) -> Target | None:
        """Return the target of a path, or None if the path is not `<root>/<job>/<tag>` under the root of a daemon of this node.

        Raises InvalidName for a job or a tag that cannot be a name; DaemonUnreachable if a named socket, or the private daemon of the root,
        does not answer; and the other errors of a connection.
        """
        path = path.parent.resolve() / path.name
        found = _daemon(path, socket)
        if found is None:
            return None
        place, root = found
        named = job_and_tag(path, root)
        assert named is not None
        job, tag = names.check_name("job", named[0]), named[1]
        step = _STEP.fullmatch(tag)
        if step is not None:
            return cls(place, str(root), job, None, int(step[1]))
        return cls(place, str(root), job, names.check_user_tag(tag), None)


def _daemon(path: Location, socket: str | None) -> tuple[str | None, Location] | None:
    """Return socket and root of the daemon under whose root `path` is a tag, or None. The socket of a private daemon is None."""
    for known in links():
        root = located(known.root)
        if socket in (None, str(known.place.socket)) and job_and_tag(path, root):
            return None if known.place.private else str(known.place.socket), root
    try:
        place = find_place(socket, None)
    except DaemonUnreachable:
        if socket or os.environ.get("CKPTD_SOCKET"):
            raise
        return None
    if place.private and place.root is not None and not job_and_tag(path, place.root):
        return None  # a private daemon would be started for nothing
    try:
        channel = place.connect()
    except DaemonUnreachable:
        if socket or os.environ.get("CKPTD_SOCKET") or place.private:
            raise
        return None  # a socket file that a dead daemon has left at a default place
    channel.close()
    root = located(channel.welcome.root)
    if not job_and_tag(path, root):
        return None
    return None if place.private else str(place.socket), root


@dataclass(frozen=True, slots=True)
class Claim:
    """The attempt and the step that the coordinator has claimed for one save.

    step: None if the only rank takes its next step, which it chooses when it writes. boot: the boot id of the coordinator's node.
    """

    target: Target
    attempt: int
    step: int | None
    boot: bytes


def claim(target: Target, world_size: int, *, overwrite: bool) -> tuple[Claim, Callable[[], None]]:
    """Claim the attempt and the step of a save for all ranks. Return the claim, and a function to call once the save is over.

    Runs on the coordinator. A step that does not follow the last one begins a new attempt, and so does a tag that is overwritten. With
    `overwrite`, and before a new attempt, this waits up to `SAVE_SECONDS` for other saves of this process.

    Raises AlreadyExists; InvalidRequest if a new attempt is needed and the present one is that of the caller's Agent; the daemon's errors.
    """
    try:
        alone = open_standalone(target.path).has_manifest()
    except OSError as error:
        raise StorageError.of(f"look for a checkpoint at {target.path}", error) from None
    if alone:
        raise AlreadyExists(
            f"Checkpoint already exists in {target.path}, and it was saved without the daemon: move it away, or choose another path"
        )
    until = time.monotonic() + SAVE_SECONDS
    while True:
        with _calls("save"):
            held = _current(target, world_size)
            directory = names.tag_directory(target.step, target.tag, held.attempt)
            taken = open_root(target.root).has_manifest(target.job, directory)
            if taken and not overwrite:
                raise AlreadyExists(f"Checkpoint already exists: {target.job}/{directory}; choose another name, or pass overwrite=True")
            begins_next = taken or (target.step is not None and target.step <= held.last_step)
            if begins_next and held not in _own.values():
                whose = f"attempt {held.attempt} of this process's own Agent"
                if target.step is None:
                    raise InvalidRequest(f"tag {target.tag!r} is taken in {whose}, which cannot be overwritten: choose another tag")
                raise InvalidRequest(
                    f"step {target.step} does not follow step {held.last_step}, the last of {whose}: call recover() to go back"
                )
            if not held.saving or not (overwrite or begins_next) or time.monotonic() > until:
                return _claimed(target, _begin(target, 0, world_size, None) if begins_next else held, world_size)
        time.sleep(_LOOK_SECONDS)  # a save on another thread may be the one to overwrite, and a new attempt would end it


def _claimed(target: Target, held: RankLink, world_size: int) -> tuple[Claim, Callable[[], None]]:
    token, step = _Token(), target.step
    held.saving.add(token)
    if step is None and world_size > 1:
        step = held.handovers.last_step = held.last_step + 1
    return Claim(target, held.attempt, step, this_boot()), lambda: held.saving.discard(token)


class _Token:
    """A mark for a save in `RankLink.saving`. That set holds it weakly, so a save that Ctrl-C has ended leaves the set by itself."""


def _current(target: Target, world_size: int) -> RankLink:
    """Return rank 0's link in the newest attempt that this process knows, or begin an attempt.

    The link of an Agent of the caller is returned even after another process has begun a newer attempt: the daemon then refuses the save.
    """
    held = _find(target, 0, world_size, None)
    if held is None:
        return _begin(target, 0, world_size, None)
    if held in _own.values() and not held.is_current():  # another process has begun a newer attempt of this job
        held.let_go()
        return _begin(target, 0, world_size, None)
    return held


def attach(claimed: Claim, rank: int, world_size: int) -> RankLink:
    """Return the link of this rank in the claimed attempt, or make one. Raises InvalidRequest if this rank is not on rank 0's node."""
    if claimed.boot != this_boot():
        raise InvalidRequest(
            f"ranks 0 and {rank} are on different nodes, but a job's ranks must share one node and daemon: save outside its root"
        )
    with _calls("save"):
        held = _find(claimed.target, rank, world_size, claimed.attempt)
        return held or _begin(claimed.target, rank, world_size, claimed.attempt)


def _find(target: Target, rank: int, world_size: int, attempt: int | None) -> RankLink | None:
    for known in sorted(links(), key=lambda known: -known.attempt):
        who = (known.root, known.job, known.rank, known.world_size)
        if who == (target.root, target.job, rank, world_size) and attempt in (None, known.attempt):
            return known
    return None


def _begin(target: Target, rank: int, world_size: int, attempt: int | None) -> RankLink:
    key = (target.root, target.job)
    before = _own.pop(key, None)
    if before is not None:
        _leave(before)
    root = target.root if target.socket is None else None
    made = _own[key] = RankLink(Told(rank, world_size, attempt), target.job, socket=target.socket, root=root, takeover=True)
    return made


def _leave(link: RankLink) -> None:
    try:
        link.close(EXIT_SECONDS)
    except CkptdError as error:  # saves that were acknowledged are not lost
        log.debug("a link was closed before its last save was durable: %s", error)


@atexit.register
def leave_all() -> None:
    """Close the links that this process has made for DCP: make everything acknowledged durable, and free the slots. Runs at exit."""
    with _calls("leave_all"):
        while _own:
            _leave(_own.popitem()[1])


class SlotPart:
    """This rank's part of a save, in a slot. Call `write`, then `finish`, then `wait` or `close`. After a failure call `discard`."""

    def __init__(self, claimed: Claim, rank: int, world_size: int) -> None:
        self._link = attach(claimed, rank, world_size)
        self._link.saving.add(self)
        self._pid = os.getpid()
        self._claimed = claimed
        self._handover: Handover | None = None
        self._layout: Layout | None = None
        self._resolved: Resolved | None = None

    @property
    def _pending(self) -> Pending:
        assert self._handover is not None
        return self._handover.pending

    def write(self, layout: Layout, resolved: Resolved, room: int) -> None:
        """Copy the items of the layout into a slot that has `room` bytes for the documents. A second call fills a larger slot.

        Raises SnapshotFailed if there is no slot within `SAVE_SECONDS`, and the errors of the planner. The step then fails on all ranks.
        """
        self._layout, self._resolved = layout, resolved
        link, handovers, target = self._link, self._link.handovers, self._claimed.target
        deadline = time.monotonic() + SAVE_SECONDS
        with link.calls("save"):
            link.ready()
            before = self._handover
            if before is None:
                handover = link.open_step(self._claimed.step, target.tag)
            else:
                handover = handovers.open(before.pending, target.tag)
            try:
                handover.reserve(document_offsets(layout, 0, 0)[-1] + room, deadline)
                handover.acquire()
                handover.fill(layout, resolved.sources_of(layout), singly=resolves_by_itself(resolved.planner))
            except Exception as error:
                handovers.fail(handover.pending, error if isinstance(error, CkptdError) else InternalError(repr(error)))
                handovers.settle(handover)
                raise
            self._handover = handover  # before `hold`, because a held slot is given back by `discard` alone, which needs this
            handover.hold()
            handovers.settle(handover)

    def finish(self, layout: Layout, values: bytes, request: SnapshotRequest) -> None:
        """Seal the slot. If the documents do not fit, fill a larger one first. `layout` is the one written, now with the metadata."""
        assert self._handover is not None
        assert self._layout is not None
        assert self._resolved is not None
        documents = Documents(values, request.encode())
        if documents.offsets(layout)[-1] > self._handover.slot.capacity:
            room = documents.offsets(layout)[-1] - document_offsets(self._layout, 0, 0)[-1]
            self.write(self._layout, self._resolved, room)
        self._handover.seal(layout, documents)
        self._resolved = None

    def wait(self) -> None:
        """Wait until the step is durable on all ranks, and end this save. Raises the reason if the step cannot become durable."""
        try:
            self._link.wait_durable(self._pending)
        finally:
            self.close()

    def forget_older(self) -> None:
        """Delete the checkpoints that this save replaces: those of the same name in older attempts. A failure is logged."""
        target = self._claimed.target
        older = [tag for attempt, tag in attempts_of(target.path).items() if attempt < self._claimed.attempt]
        try:
            for why in (self._link.forget(older) if older else {}).values():
                log.warning("an older save of this name could not be deleted: %s", why)
        except CkptdError as error:
            log.warning("older saves of %s could not be deleted: %s", target.path, error)

    def close(self) -> None:
        """End this save in this process. The daemon has the slot, and will save or release it."""
        self._link.saving.discard(self)

    def discard(self, why: str) -> None:
        """Abandon a slot that is not sealed: the step fails on all ranks. Does nothing in a forked child, which does not own the save."""
        if os.getpid() != self._pid:
            return
        self.close()
        if self._handover is not None:
            self._resolved = None
            self._handover.abandon(SnapshotFailed(why))


def _after_fork() -> None:
    global _calls
    _calls = CallLock()  # the thread that held the old lock is not in the child
    _own.clear()


os.register_at_fork(after_in_child=_after_fork)
