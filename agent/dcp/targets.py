"""Finds the daemon, job and step that a path names, and writes a rank's part of a DCP
save into a slot of that daemon.

The coordinator chooses the attempt and the step, and sends them to the other ranks in
tickets. Those ranks may be on other nodes, with daemons of their own. A process keeps
the links to daemons that it has made for a save, uses them for the next save, and
closes them when it exits.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from ckptd.agent.copy.mapped_slot import Documents, document_offsets
from ckptd.agent.dcp.turns import Turn, take_turn
from ckptd.agent.handover.handover import Handover
from ckptd.agent.handover.rank_link import SAVE_SECONDS, RankLink, links
from ckptd.agent.link.arguments import job_store
from ckptd.agent.link.attempt import BegunAttempt, RankPlace, as_begun
from ckptd.agent.link.launch import find_place
from ckptd.agent.link.rounds import Told
from ckptd.agent.pending import PendingSnapshot
from ckptd.agent.plan.layout import Layout
from ckptd.agent.plan.save_plan import Resolved, resolves_by_itself
from ckptd.agent.plan.structure import current_accelerator
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared import names
from ckptd.shared.errors import (
    AlreadyExists,
    CkptdError,
    DaemonUnreachable,
    InternalError,
    InvalidRequest,
    SnapshotFailed,
    check_step_follows,
    storage_errors,
)
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.segment import this_boot
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.location import Location, located
from ckptd.shared.storage.locate import (
    attempts_of,
    check_no_other_tool,
    job_and_tag,
    open_standalone,
)
from ckptd.shared.system import machine
from ckptd.shared.wire.messages import Welcome

log = logging.getLogger("ckptd.agent")

EXIT_SECONDS = 5.0
_LOOK_SECONDS = 0.01
_STEP = re.compile(r"step-([0-9]{1,18})")
_calls = CallLock()
# By root and job; the links that `StorageWriter` has made itself.
_own: dict[tuple[str, str], RankLink] = {}


@dataclass(frozen=True, slots=True)
class Target:
    """The checkpoint that `<root>/<job>/<tag>` names at the daemon of `root`.

    socket: the socket of the daemon, or None for the private daemon of `root`. tag: the
    tag that the caller chose, or None if the path ends in `step-<number>`. step: that
    number, or None if there is a tag. place: the daemon and the node of the rank that
    has found the target.
    """

    socket: str | None
    root: str
    job: str
    tag: str | None
    step: int | None
    place: RankPlace

    @property
    def path(self) -> Location:
        return located(self.root) / self.job / (self.tag or f"step-{self.step}")

    @classmethod
    def of(cls, path: Location, socket: str | None) -> Target | None:
        """Return the target of a path, or None if the path is not `<root>/<job>/<tag>`
        under the root of a daemon of this node.

        Raises InvalidName for a job or a tag that cannot be a name; DaemonUnreachable
        if a named socket, or the private daemon of the root, does not answer; and the
        other errors of a connection.
        """
        path = path.parent.resolve() / path.name
        found = _daemon(path, socket)
        if found is None:
            return None
        at, root, welcome = found
        named = job_and_tag(path, root)
        assert named is not None
        job, tag = names.check_name("job", named[0]), named[1]
        step, place = _STEP.fullmatch(tag), RankPlace.of(welcome, job)
        if step is not None:
            return cls(at, str(root), job, None, int(step[1]), place)
        return cls(at, str(root), job, names.check_new_tag(tag), None, place)


def _daemon(path: Location, socket: str | None) -> tuple[str | None, Location, Welcome] | None:
    """Return the socket, the root and the Welcome of the daemon whose root holds
    `path`, or None if there is no such daemon. The socket of a private daemon is None.
    """
    for known in links():
        root = located(known.root)
        if socket in (None, str(known.place.socket)) and job_and_tag(path, root):
            return (
                None if known.place.private else str(known.place.socket),
                root,
                known.client.welcome,
            )
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
    return None if place.private else str(place.socket), root, channel.welcome


@dataclass(frozen=True, slots=True)
class RankDaemon:
    """The daemon that serves one rank for the checkpoints of a job.

    `socket` is that of `Target`. `place` is None if the rank has found no daemon, and
    `why` is then the error of the search, or "".
    """

    boot: bytes
    host: str
    socket: str | None = None
    place: RankPlace | None = None
    why: str = ""

    @classmethod
    def of(cls, path: Location, socket: str | None) -> RankDaemon:
        """Return the daemon of this rank.

        An error is passed on to the coordinator and not raised, because the save may
        need no daemon.
        """
        none = cls(this_boot(), machine.host())
        try:
            target = Target.of(path, socket)
        except CkptdError as error:
            return replace(none, why=str(error))
        return none if target is None else replace(none, socket=target.socket, place=target.place)


@dataclass(frozen=True, slots=True)
class SaveTicket:
    """The attempt and the step of one save, with the daemon of the rank that gets this
    ticket.

    step: None if there is only one rank, which chooses its next step when it writes.
    """

    target: Target
    begun: BegunAttempt
    step: int | None


def issue_tickets(
    target: Target, others: Sequence[RankDaemon | None], *, overwrite: bool
) -> tuple[list[SaveTicket], Callable[[], None]]:
    """Choose the attempt and the step of a save for all ranks.

    Return a ticket for each rank, and a function to call once the save is over.

    Runs on the coordinator. A new attempt begins if the step does not follow the last
    step of the attempt, or if the tag is overwritten. A new attempt would end the saves
    of other processes to the same job, so this function waits for them up to
    `SAVE_SECONDS`. With `overwrite`, and before a new attempt, it also waits for other
    saves of this process.

    others: the daemons of ranks 1 and up. A rank uses the coordinator's daemon if its
    own is None, which means not known, or if it has found no daemon and is on the
    coordinator's node.

    Raises AlreadyExists; InvalidRequest if a new attempt is needed and the present one
    is that of the caller's Agent; DaemonUnreachable if a rank on another node has found
    no daemon; the daemon's errors.
    """
    targets = _targets(target, others)
    with storage_errors(f"look for a checkpoint at {target.path}"):
        alone = open_standalone(target.path).has_manifest()
        if not alone:
            check_no_other_tool(target.path, "move it away, or choose another path")
    if alone:
        raise AlreadyExists(
            f"Checkpoint already exists in {target.path}, and it was saved without the daemon: "
            f"move it away, or choose another path"
        )
    until = time.monotonic() + SAVE_SECONDS
    turn = take_turn(target.root, target.job, until)
    try:
        return _issue(targets, turn, until, overwrite=overwrite)
    except BaseException:
        turn.close()
        raise


def _issue(
    targets: Sequence[Target], turn: Turn, until: float, *, overwrite: bool
) -> tuple[list[SaveTicket], Callable[[], None]]:
    target = targets[0]
    while True:
        with _calls("save"):
            held = _current(targets)
            taken = attempts_of(target.path).get(held.attempt)
            if taken and not overwrite:
                raise AlreadyExists(
                    f"Checkpoint already exists: {target.job}/{taken}; choose another name, or "
                    f"pass overwrite=True"
                )
            begins_next = taken is not None or (
                target.step is not None and target.step <= held.last_step
            )
            if begins_next and held not in _own.values():
                whose = f"attempt {held.attempt} of this process's own Agent"
                if target.step is not None:
                    check_step_follows(target.step, held.last_step, whose)
                name = f"tag {target.tag!r}" if target.step is None else f"step {target.step}"
                raise InvalidRequest(
                    f"{name} is taken in {whose}, which cannot be overwritten: choose another"
                )
            if not held.saving or not (overwrite or begins_next) or time.monotonic() > until:
                return _issued(targets, _begin_all(targets) if begins_next else held, turn)
        # A save on another thread may be the one to overwrite, and a new attempt would
        # end it.
        time.sleep(_LOOK_SECONDS)


def _targets(first: Target, others: Sequence[RankDaemon | None]) -> list[Target]:
    """Return the target of each rank.

    first: the target of the coordinator. It names the checkpoint, because the daemon of
    another rank may come from another save of the job.

    Ranks of one daemon get equal places. A daemon is recognised by its socket, too: a
    private daemon without work may have ended after a rank has asked it, and the daemon
    that was started next has another identity.

    Raises DaemonUnreachable if a rank is on another node and has found no daemon.
    """
    found, known = [first], dict.fromkeys(_names(first), first)
    for rank, other in enumerate(others, 1):
        if other is None or (other.place is None and other.boot == first.place.boot):
            found.append(first)
            continue
        if other.place is None:
            why = (
                other.why
                or f"no daemon of that node serves the root {first.root}: start one there with "
                f"`ckptd run --root {first.root}`, as on {first.place.node}"
            )
            raise DaemonUnreachable(
                f"rank {rank} on {other.host} cannot save to {first.path}: {why}"
            )
        target = replace(first, socket=other.socket, place=other.place)
        found.append(next((known[name] for name in _names(target) if name in known), target))
        known |= dict.fromkeys(_names(target), found[-1])
    return found


def _names(target: Target) -> list[tuple[bytes, str, str | None]]:
    """Return the names by which a daemon is recognised: its node and socket, and its
    own identity, unless it is too old to send one.
    """
    boot, host, instance = target.place.boot, target.place.node, target.place.instance
    return [(boot, host, target.socket), *([(boot, "", instance)] if instance else [])]


def _issued(
    targets: Sequence[Target], held: RankLink, turn: Turn
) -> tuple[list[SaveTicket], Callable[[], None]]:
    def over() -> None:
        held.saving.discard(turn)
        turn.close()

    step = targets[0].step
    # The set holds the turn weakly, so that the turn of a save that Ctrl-C has ended
    # drops out by itself.
    held.saving.add(turn)
    if step is None and len(targets) > 1:
        step = held.handovers.last_step = held.last_step + 1
    places, node = [target.place for target in targets], held.node
    begun = (
        [BegunAttempt(held.attempt, None, [])] * len(places)
        if node is None
        else as_begun(held.attempt, places, node.run_id)
    )
    return [SaveTicket(*each, step) for each in zip(targets, begun, strict=True)], over


def _current(targets: Sequence[Target]) -> RankLink:
    """Return the link of rank 0 in the newest attempt that this process knows, or begin
    an attempt.

    If the link belongs to an Agent of the caller, return it even if another process has
    begun a newer attempt. The daemon then refuses the save.
    """
    held = _find(targets[0], 0, len(targets), None)
    if held is None:
        return _begin_all(targets)
    if held in _own.values() and not held.is_current():  # another process has begun a newer one
        held.let_go()
        return _begin_all(targets)
    return held


def attach(ticket: SaveTicket, rank: int, world_size: int) -> RankLink:
    """Return the link of this rank in the attempt of the ticket. Make the link if there
    is none.
    """
    with _calls("save"):
        return _find(ticket.target, rank, world_size, ticket.begun.attempt) or _begin(
            ticket.target,
            Told(rank, world_size, job_store, answer=msgspec.msgpack.encode(ticket.begun)),
        )


def _find(target: Target, rank: int, world_size: int, attempt: int | None) -> RankLink | None:
    for known in sorted(links(), key=lambda known: -known.attempt):
        who = (known.root, known.job, known.rank, known.world_size)
        if who == (target.root, target.job, rank, world_size) and attempt in (None, known.attempt):
            return known
    return None


def _begin_all(targets: Sequence[Target]) -> RankLink:
    """Begin an attempt for all ranks. The other ranks join it when they call `attach`."""
    others = [
        None if target.place == targets[0].place else msgspec.msgpack.encode(target.place)
        for target in targets[1:]
    ]
    return _begin(targets[0], Told(0, len(targets), job_store, others=others))


def _begin(target: Target, told: Told) -> RankLink:
    key = (target.root, target.job)
    before = _own.pop(key, None)
    if before is not None:
        _leave(before)
    root = target.root if target.socket is None else None
    made = _own[key] = RankLink(told, target.job, socket=target.socket, root=root, takeover=True)
    return made


def _leave(link: RankLink) -> None:
    try:
        link.close(EXIT_SECONDS)
    except CkptdError as error:  # saves that were acknowledged are not lost
        log.debug("a link was closed before its last save was durable: %s", error)


@atexit.register
def leave_all() -> None:
    """Close the links that this process has made for DCP: make everything acknowledged
    durable, and free the slots. Runs at exit.
    """
    with _calls("leave_all"):
        while _own:
            _leave(_own.popitem()[1])


def fail_step(ticket: SaveTicket, rank: int, world_size: int, why: str) -> None:
    """Tell the daemon of this rank that the rank will not seal the step of the ticket,
    so that no other rank waits for it.
    """
    with (link := attach(ticket, rank, world_size)).calls("save"):
        handover = link.open_step(ticket.step, ticket.target.tag)
        link.handovers.fail(handover.pending, SnapshotFailed(why))
        link.handovers.end(handover)


class SlotPart:
    """The part of a save that this rank writes into a slot.

    Call `write`, then `finish`, then `wait` or `close`. After a failure call `discard`.
    """

    def __init__(self, ticket: SaveTicket, rank: int, world_size: int) -> None:
        self._link = attach(ticket, rank, world_size)
        self._link.saving.add(self)
        self._pid = os.getpid()
        self._ticket = ticket
        self._handover: Handover | None = None
        self._layout: Layout | None = None
        self._resolved: Resolved | None = None

    @property
    def node(self) -> Membership | None:
        """The membership of this node, or None if all ranks are on one node."""
        return self._link.node

    @property
    def _pending(self) -> PendingSnapshot:
        assert self._handover is not None
        return self._handover.pending

    def write(self, layout: Layout, resolved: Resolved, room: int) -> None:
        """Copy the items of the layout into a slot that has `room` bytes for the
        documents. A second call fills a larger slot.

        Raises SnapshotFailed if there is no slot within `SAVE_SECONDS`, and the errors
        of the planner. The step then fails on all ranks.
        """
        self._layout, self._resolved = layout, resolved
        link, handovers, target = self._link, self._link.handovers, self._ticket.target
        deadline = time.monotonic() + SAVE_SECONDS
        with link.calls("save"):
            link.ready()
            before = self._handover
            if before is None:
                handover = link.open_step(self._ticket.step, target.tag)
            else:
                handover = handovers.open(before.pending, target.tag)
            try:
                needed = document_offsets(layout, 0, 0)[-1] + room
                handover.reserve(needed, deadline, current_accelerator(layout.plan))
                handover.acquire()
                handover.fill(
                    layout, resolved.sources_of(layout), singly=resolves_by_itself(resolved.planner)
                )
            except Exception as error:
                handovers.fail(
                    handover.pending,
                    error if isinstance(error, CkptdError) else InternalError(repr(error)),
                )
                handovers.end(handover)
                raise
            # Set before `hold`: only `discard` gives back a held slot, and it needs the
            # hand-over.
            self._handover = handover
            handover.hold()
            handovers.end(handover)

    def finish(self, layout: Layout, values: bytes, request: SnapshotRequest) -> None:
        """Seal the slot.

        If the documents do not fit into it, fill a larger slot first.

        layout: the layout of `write`, now with the metadata.
        """
        assert self._handover is not None
        assert self._layout is not None
        assert self._resolved is not None
        documents = Documents(values, request.encode())
        if documents.offsets(layout)[-1] > self._handover.slot.header.capacity:
            room = documents.offsets(layout)[-1] - document_offsets(self._layout, 0, 0)[-1]
            self.write(self._layout, self._resolved, room)
        self._handover.seal(layout, documents)
        self._resolved = None

    def wait(self) -> None:
        """Wait until the step is durable on all ranks, and end this save.

        Raises the error of the step if it cannot become durable.
        """
        try:
            self._link.wait_durable(self._pending)
        finally:
            self.close()

    def forget_older(self) -> None:
        """Delete the checkpoints that this save replaces: those of the same name in
        older attempts. A failure is logged.
        """
        target = self._ticket.target
        older = [
            tag
            for attempt, tag in attempts_of(target.path).items()
            if attempt < self._ticket.begun.attempt
        ]
        try:
            for why in (self._link.forget(older) if older else {}).values():
                log.warning("an older save of this name could not be deleted: %s", why)
        except CkptdError as error:
            log.warning("older saves of %s could not be deleted: %s", target.path, error)

    def close(self) -> None:
        """End this save in this process.

        The daemon has the slot, and will save or release it.
        """
        self._link.saving.discard(self)

    def discard(self, why: str) -> None:
        """Abandon the slot, if it is not sealed. The step then fails on all ranks.

        Does nothing in a forked child, which does not own the save.
        """
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
