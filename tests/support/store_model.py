"""A model of the requests that daemons and readers make to a storage that several nodes
share, carried out in every possible order.

The code of the product runs: the commits of `daemon/saving/joint.py`, the restart of
`daemon/recovery.py`, the deletions of `daemon/saving/deleter.py`, and the leases,
claims and receipts of `shared/storage`. Only the storage is a model. It carries out one
request after another, and chance decides whose request is next, who dies before or
after a request, whose listing is stale, and how far the clock has moved. So each seed
is one order of events. `live` lives one life of a job with two nodes, and returns the
first promise that was broken.

In each life two daemons save a step, and the daemon of rank 0 then deletes the
checkpoint before it. Any of them may die, and starts again. Two runs claim the next
attempt, and the daemon of the one that gets it decides the past. Readers open
checkpoints, and read them later. In lives with a holder, a third daemon has copies of
the second node, and delivers on its behalf; half of these nodes are lost, and the
others deliver the same step themselves.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec

from ckptd.daemon import recovery
from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.events import Events
from ckptd.daemon.job.snapshot import Snapshot
from ckptd.daemon.journal import records as r
from ckptd.daemon.saving.committer import Committer
from ckptd.daemon.saving.destination import Destination
from ckptd.daemon.saving.joint import Abandoned, Joint, Undecided
from ckptd.shared import names
from ckptd.shared.errors import Busy, CkptdError, NotFound
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.receipt import Receipt
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage import object_leases
from ckptd.shared.storage.bucket import ObjectMeta
from ckptd.shared.storage.object_leases import Leases
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.wire.lifecycle import SnapshotState
from tests.shared.samples import encode_part, packed_slot, sample_plan, values_after
from tests.support.saving import Journal
from tests.support.shared_storage import (
    Actor,
    Broken,
    Calls,
    Files,
    SharedStorage,
    done,
    in_storage,
)

JOB, ATTEMPT = "gpt", 2
OLD, NEW = 999, 1000
"""The step that is committed when a life begins, and the step that is saved in it."""
CLAIM = "0123456789abcdef" * 2
PLAN = sample_plan(6)
# Seconds for which the daemon of rank 0 waits for the others: some 15 looks at storage.
_TIMEOUT = 0.5
_TRIES = 3


@functools.cache
def _part(rank: int) -> tuple[PartEntry, bytes]:
    """Return the part of a rank: its entry in the manifest, and its file."""
    values, tag, request = (
        values_after(PLAN),
        names.tag_directory(NEW, None, ATTEMPT),
        SnapshotRequest(node=_share(rank)),
    )
    data, index = encode_part(
        packed_slot(PLAN, values), PLAN, values, attempt=ATTEMPT, step=NEW, rank=rank, world_size=2,
        tag=tag, request=request
    )  # fmt: skip
    digest, raw = (
        hashlib.sha256(index.encode()).hexdigest(),
        sum(chunk.raw_length for chunk in index.chunks),
    )
    return PartEntry(
        rank=rank,
        file="",
        bytes=len(data),
        raw_bytes=raw,
        items=len(PLAN.items),
        index_sha256=digest,
    ), data


def _share(rank: int) -> Membership:
    return Membership(run_id=CLAIM, ranks=[rank])


class Daemon:
    """A process of the daemon of the node that has a rank.

    `journal` is all that earlier processes have left to it.
    """

    def __init__(
        self, world: SharedStorage, journal: Journal, rank: int, *, attempt: int = ATTEMPT
    ) -> None:
        self.world, self.rank = world, rank
        self.repository, self.catalog = Repository(Files(world)), Catalog()
        config = Config(root=Path("/root"), socket=Path("/s"), codec="raw")
        self.calls = cast(Any, Calls())
        on_disk: Any = journal
        self.root = Destination(
            config,
            self.repository,
            on_disk,
            self.catalog,
            self.calls,
            cast(Any, None),
            Counter(),
            Events(),
        )
        self.joint = Joint(self.root, _TIMEOUT, remote=False, stopping=lambda: False)
        self.job = self.catalog.job(JOB)
        self.job.attempt, self.job.world_size, self.job.node = attempt, 2, _share(rank)
        self.followed: list[Snapshot] = []

    def snapshot(self, step: int) -> Snapshot:
        tag = names.tag_directory(step, None, ATTEMPT)
        return Snapshot(
            JOB,
            ATTEMPT,
            step,
            tag,
            2,
            persist=True,
            state=SnapshotState.WRITTEN,
            node=_share(self.rank),
        )

    def scan(self, *, fresh: bool = False) -> None:
        done(recovery.scan_job(self.repository, self.job, self.calls, fresh=fresh))

    def start(self) -> None:
        """Finish what an earlier process of this daemon has begun."""
        self.repository.storage._leases.end_marks(machine.host())  # type: ignore[attr-defined]  # as `serve` does
        self.scan()
        saver: Any = SimpleNamespace(
            front=self.root,
            joint=self.joint,
            follow=lambda job, snapshot: self.followed.append(snapshot),
        )
        for place in list(self.root.journal.state.retiring):
            done(self.root.finish_deletion(place))
        for place in list(self.root.journal.state.staged):
            done(recovery.finish_save(self.root, saver, place))

    def save(self, step: int) -> bool:
        """Save a step that this node holds.

        Return True once it is durable, and False if this daemon does not know what
        became of it.
        """
        for snapshot in self.followed:
            self._settle(snapshot)
        for _ in range(_TRIES):
            snapshot = self.snapshot(step)
            found = done(self.joint.open_try(self.job, snapshot))
            if isinstance(found, Manifest):
                return True
            if found is None:
                try:
                    done(self.joint.deliver(self.job, snapshot, self._write(snapshot)))
                except Abandoned:
                    continue
            outcome = self._settle(snapshot)
            if outcome is not None:
                return outcome
        return False

    def _settle(self, snapshot: Snapshot) -> bool | None:
        """Return True if a try is committed, False if its outcome is not known, and
        None if it is abandoned.
        """
        try:
            done(self.joint.finish(self.job, snapshot))
        except Abandoned as error:
            done(
                self.root.committer.drop(
                    JOB, snapshot.directory, ATTEMPT, snapshot.step, str(error)
                )
            )
            return None
        except Undecided:
            return False
        return True

    def _write(self, snapshot: Snapshot) -> list[Any]:
        entry, data = _part(self.rank)
        file = names.part_file(self.rank, self.world.chance.randbytes(16))
        common: dict[str, Any] = {
            "job": JOB,
            "attempt": ATTEMPT,
            "step": snapshot.step,
            "rank": self.rank,
            "tag": snapshot.directory,
        }
        done(self.root.journal.append(r.Staging(**common, file=file)))
        self.world.put(f"{JOB}/{snapshot.directory}/{file}", data, create=True)
        done(
            self.root.journal.append(
                r.PartDurable(
                    **common, file=file, bytes=entry.bytes, index_sha256=entry.index_sha256
                )
            )
        )
        return [
            (
                msgspec.structs.replace(entry, file=file),
                PLAN,
                SnapshotRequest(node=_share(self.rank)),
            )
        ]

    def retire(self, step: int) -> str:
        """Delete a checkpoint. Return the reason if it stays."""
        self.scan()
        found = [one for one in self.job.checkpoints.values() if one.step == step]
        for old in found:
            if why := done(self.root.deleter.retire(self.job, old)):
                return why
        return ""


class Life:
    """A life of the job.

    `back`: True if the new attempt runs on the nodes of the old one, and therefore
    waits for them. `lost`: True if the second node is lost, and only the holder of its
    copies delivers.
    """

    def __init__(self, seed: int, *, holder: bool = False) -> None:
        chance = self.chance = random.Random(seed)
        self._holder = holder
        self.lost = holder and chance.random() < 0.5
        self.back = chance.random() < 0.5
        self.world = SharedStorage(chance, kills=chance.random() < 0.8)
        self.world.on_change = self._changed
        self.journals = [Journal(), Journal(), Journal()]  # the last one is the holder's
        self.daemons: dict[int, Daemon] = {}
        self.acknowledged = False
        self._attempt = ATTEMPT  # the newest attempt that the two nodes know
        self._claimed: set[int] = set()  # the runs that have the next attempt
        self.forgotten: set[int] = set()
        self._outcomes: dict[str, bytes] = {}
        self._decided_by: dict[str, str] = {}
        self._ended: set[str] = set()
        self._committed: set[int | None] = set()

    def live(self) -> None:
        with in_storage(self.world):
            self._begin()
            for rank in range(1 if self.lost else 2):
                self._start(rank)
            if self._holder:
                self._start_holder()
            for number in range(2):
                self._start_run(number, Journal())
            for number in range(2):
                self.world.add(f"reader {number}", number + 4, self._reader, mortal=True)
            self.world.run()
            if not self.world.broken:
                self._end()

    def _begin(self) -> None:
        """Commit the old step, and claim the attempt."""
        first, second = (
            Daemon(self.world, journal, rank) for rank, journal in enumerate(self.journals[:2])
        )
        assert first.repository.claim(JOB, ATTEMPT)
        delivered = second.snapshot(OLD)
        done(second.joint.deliver(second.job, delivered, second._write(delivered)))
        assert first.save(OLD)
        assert second._settle(delivered)
        self.world.states.clear()
        self.world.stale = self.chance.random() < 0.5

    # -- processes

    def _start(self, rank: int) -> None:
        actor = self.world.add(
            f"daemon {rank}", rank, functools.partial(self._daemon, rank), mortal=True
        )
        actor.died = functools.partial(self._start, rank)

    def _daemon(self, rank: int, actor: Actor) -> None:
        daemon = self.daemons[rank] = Daemon(
            self.world, self.journals[rank], rank, attempt=self._attempt
        )
        daemon.start()
        if not daemon.save(NEW):
            return
        self.acknowledged = True
        if rank == 0:
            self.forgotten.add(OLD)
            for _ in range(3):
                if not daemon.retire(OLD):
                    return
                self.world.sleep(1.0)

    def _start_holder(self) -> None:
        actor = self.world.add("holder", 6, self._hold, mortal=True)
        actor.died = self._start_holder

    def _hold(self, actor: Actor) -> None:
        """Save the step on behalf of the second node."""
        self._idle(5)
        daemon = self.daemons[2] = Daemon(self.world, self.journals[2], 1, attempt=self._attempt)
        daemon.start()
        if daemon.save(NEW):
            self.acknowledged = True

    def _start_run(self, number: int, journal: Journal) -> None:
        node = number if self.back else number + 2
        actor = self.world.add(
            f"run {number}", node, functools.partial(self._newcomer, number, journal), mortal=True
        )
        actor.died = functools.partial(self._start_run, number, journal)

    def _newcomer(self, number: int, journal: Journal, actor: Actor) -> None:
        """Claim the next attempt, and decide the past: the daemon of rank 0 of the new
        attempt.
        """
        if number not in self._claimed:
            self._idle()
        daemon = Daemon(self.world, journal, 0, attempt=ATTEMPT + 1)
        if number in self._claimed:
            daemon.start()
        elif not daemon.repository.claim(JOB, ATTEMPT + 1):
            return
        else:
            self._claimed.add(number)
        if self.back:
            for old in self.daemons.values():
                old.job.attempt = self._attempt = ATTEMPT + 1
            while not all(self._has_delivered(rank) for rank in range(2)):
                self.world.sleep(0.1)
        known, delivered = self.acknowledged or NEW in self._committed, self._delivered()
        daemon.scan(fresh=True)
        done(daemon.joint.decide_past(daemon.job, ATTEMPT if self.back else 0))
        newest = daemon.job.newest_checkpoint()
        found = -1 if newest is None or newest.step is None else newest.step
        # recover() names what it could not read
        excused = NEW in self.forgotten or daemon.job.damaged
        if known and found != NEW and not excused:
            raise Broken(f"step {found} comes back, and step {NEW} was committed")
        # The old rank 0 had waited for a node for too long.
        late = self._decided_by.get(delivered, "").startswith("daemon")
        if delivered and found != NEW and not excused and not late:
            raise Broken(f"step {found} comes back, and step {NEW} was delivered by all nodes")
        if found == NEW and self.chance.random() < 0.7:
            self.forgotten.add(NEW)
            for _ in range(3):
                if not daemon.retire(NEW):
                    return
                self.world.sleep(1.0)

    def _idle(self, most: int = 40) -> None:
        """Let the other processes make some requests first."""
        for _ in range(self.chance.randint(0, most)):
            self.world.sleep(0.0)

    def _has_delivered(self, rank: int) -> bool:
        """Return True if a node has delivered its part in some try, or if its daemon, or
        the holder of its copies, has done what it can.
        """
        prefix, receipt = f"{JOB}/step-{NEW:08d}", names.receipt_file(rank)
        daemon = "holder" if rank and self.lost else f"daemon {rank}"
        ended = any(
            actor.name == daemon and actor.done and not actor.dead for actor in self.world.actors
        )
        return ended or any(
            name.startswith(prefix) and name.endswith(receipt) for name in self.world.objects
        )

    def _delivered(self) -> str:
        """Return the name of the outcome of a try that all nodes have delivered and
        that is undecided, or "".
        """
        for number in range(1, 9):
            prefix = f"{JOB}/{names.try_directory(names.tag_directory(NEW, None, ATTEMPT), number)}"
            outcome = self.world.objects.get(f"{prefix}/{names.MANIFEST}", (b"", 0))[0]
            if not outcome and all(
                f"{prefix}/{names.receipt_file(rank)}" in self.world.objects for rank in range(2)
            ):
                return f"{prefix}/{names.MANIFEST}"
        return ""

    def _reader(self, actor: Actor) -> None:
        """Open a checkpoint, and read its parts some time later."""
        self._idle()
        repository = Repository(Files(self.world))
        tag = names.tag_directory(self.chance.choice((OLD, NEW)), None, ATTEMPT)
        for _ in range(5):
            self.world.sleep(self.chance.uniform(0, 0.5))
            try:
                lease = repository.lease(JOB, tag)
            except (NotFound, Busy):
                continue
            try:
                manifest = repository.read_manifest(JOB, tag)
            except NotFound:  # it is an abandonment
                lease.close()
                continue
            try:
                for part in 4 * manifest.parts:
                    self.world.sleep(self.chance.choice((0.0, 1.0, 40.0)))
                    repository.open_part(JOB, tag, part.file, part.index_sha256).close()
            except CkptdError as error:
                raise Broken(f"a checkpoint that is being read is gone: {error}") from None
            lease.close()
            return

    # -- promises

    def _changed(self, name: str, data: bytes | None) -> None:
        """Check a change of an object that is about to be made."""
        directory, _, file = name.rpartition("/")
        if file == names.MANIFEST and data is not None:
            if name in self._ended and self._parts(name, data):
                self.world.broken.append(f"{name} was deleted, and is published again")
            if self._is_deleted(name, data):
                self._ended.add(name)
            elif self._outcomes.get(name, data) != data:
                self.world.broken.append(f"{name} has two outcomes")
            self._outcomes[name] = data
            self._decided_by[name] = self.world.running
            if self._parts(name, data):
                self._committed.add(names.parse_tag_directory(directory.rpartition("/")[2]).step)  # type: ignore[union-attr]
            for part in self._parts(name, data):
                if part not in self.world.objects:
                    self.world.broken.append(f"{name} is published, and {part} is not there")
        elif file == names.MANIFEST:
            self._ended.add(name)
            self._outcomes.pop(name, None)
        elif data is None and names.parse_part_file(file):
            outcome = f"{directory}/{names.MANIFEST}"
            if outcome in self.world.objects and name in self._parts(
                outcome, self.world.objects[outcome][0]
            ):
                self.world.broken.append(
                    f"{name} is deleted, and belongs to a committed checkpoint"
                )

    def _is_deleted(self, name: str, data: bytes) -> bool:
        """Return True if an abandonment takes the place of a manifest, whose deleter
        has its mark there.
        """
        mark = f"{names.CONTROL}/{names.RETIRING}/{name}/"
        return b'"code": "deleted"' in data and any(
            other.startswith(mark) for other in self.world.objects
        )

    @staticmethod
    def _parts(name: str, outcome: bytes) -> list[str]:
        try:
            return [
                f"{name.rpartition('/')[0]}/{part.file}" for part in Manifest.decode(outcome).parts
            ]
        except CkptdError:
            return []  # an abandonment

    def _end(self) -> None:
        """Check what is left once all processes have ended, and that it can be deleted."""
        world, daemon = self.world, Daemon(self.world, Journal(), 0, attempt=ATTEMPT + 1)
        world.stale = False
        if len(self._claimed) > 1:
            world.broken.append("two runs have the same attempt")
        if self.acknowledged and NEW not in self._committed:
            world.broken.append(f"step {NEW} is called durable, and was never committed")
        # What could not be finished is left for the next start.
        for rank, journal in enumerate(self.journals):
            Daemon(self.world, journal, min(rank, 1), attempt=ATTEMPT + 1).start()
        daemon.scan()
        there = {one.step for one in daemon.job.checkpoints.values()}
        if lost := self._committed - there - self.forgotten:
            world.broken.append(f"steps {lost} are gone")
        world.broken += [f"{name} is in no checkpoint" for name in self._unnamed()]
        # First the marks of dead deleters are found dead, and then the leases of dead
        # readers.
        for _ in range(2):
            for step in sorted(there, key=lambda step: step or 0):
                daemon.retire(step or 0)
            world.pass_time(world.now + object_leases.SECONDS + 1)
        for step in sorted(there, key=lambda step: step or 0):
            if why := daemon.retire(step or 0):
                world.broken.append(f"step {step} can never be deleted: {why}")
        for name in world.objects:
            if names.part_of(name.rpartition("/")[2]) and not self._is_undecided(name):
                world.broken.append(f"{name} is left behind")

    def _unnamed(self) -> list[str]:
        """Return the parts beside a manifest that does not name them."""
        objects = self.world.objects
        named = {
            place.rpartition("/")[0]: self._parts(place, objects[place][0])
            for place in objects
            if place.endswith(f"/{names.MANIFEST}")
        }
        return [
            name
            for name in objects
            if names.part_of(name.rpartition("/")[2])
            and (parts := named.get(name.rpartition("/")[0]))
            and name not in parts
        ]

    def _is_undecided(self, name: str) -> bool:
        outcome = f"{name.rpartition('/')[0]}/{names.MANIFEST}"
        return outcome not in self._outcomes and outcome not in self._ended


def live(seed: int, *, holder: bool = False) -> tuple[int, str]:
    """Live one life. `holder`: True if a third daemon holds copies of the second node.

    Return the number of its states, and the first promise that was broken, or "".
    """
    life = Life(seed, holder=holder)
    life.live()
    return len(life.world.states), life.world.broken[0] if life.world.broken else ""


def run(count: int, number: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Live `count` lives, every other one with a holder, or as many as the time allows.

    Return the number of lives and of their states, and the first promise that was broken.
    `number` is the seed.
    """
    tried, end, first = Counter[str](), time.monotonic() + seconds, number * 1_000_000
    for seed in range(first, first + count):
        states, problem = live(seed, holder=seed % 2 == 1)
        tried.update({"lives": 1, " states": states})
        if problem:
            return tried, [f"seed {seed}: {problem}"]
        if time.monotonic() >= end:
            break
    return tried, []


@contextmanager
def without(rule: str) -> Iterator[None]:
    """Context manager. Switch off one of the `RULES` in the code of the product."""
    with ExitStack() as changed:
        for place, name, new in RULES[rule][1]:
            changed.enter_context(mock.patch.object(place, name, new))
        yield


def _put_always(self: SharedStorage, name: str, data: bytes, *, create: bool) -> None:
    self.request(lambda: self.change(name, data))


def _none_of(kind: str) -> Callable[..., list[ObjectMeta]]:
    find = Leases._alive

    def alive(self: Leases, asked: str, name: str, but: str = "") -> list[ObjectMeta]:
        return [] if asked == kind else find(self, asked, name, but)

    return alive


async def _drop_whatever(
    self: Committer, job: str, tag: str, attempt: int, step: int, reason: str
) -> None:
    self._repository.delete_unfinished(
        job, tag, list(self._journal.state.staged.get(f"{job}/{tag}", {}))
    )


def _no_mark_is_dead(self: Leases, found: ObjectMeta) -> bool:
    return True


def _leave_nothing(self: Repository, job: str, tag: str, attempt: int, step: int) -> None:
    self.delete_files(job, tag, [names.MANIFEST])


async def _publish_blindly(self: Joint, snapshot: Snapshot, receipt: Receipt) -> Receipt:
    with suppress(FileExistsError):
        self._repository.publish_receipt(receipt)
    return receipt


RULES: dict[str, tuple[int, list[tuple[Any, str, Any]]]] = {
    "an outcome and a claim are created for one caller only": (
        0,
        [(SharedStorage, "put", _put_always)],
    ),
    "a deleter looks for leases": (6, [(Leases, "_alive", _none_of(names.LEASES))]),
    "a reader looks for the mark of a deleter": (
        10,
        [(Leases, "_alive", _none_of(names.RETIRING))],
    ),
    "a lease or a mark that is not renewed is dead": (
        12,
        [(Leases, "_is_young", _no_mark_is_dead)],
    ),
    "receipts are deleted before the manifest": (
        5499,
        [(Repository, "delete_receipts", lambda self, job, tag: True)],
    ),
    "a listing is fresh before something is called missing": (
        7,
        [(Files, "refresh_listing", lambda self, prefix, file: None)],
    ),
    "parts that a receipt may name stay until their try is abandoned": (
        45,
        [(Committer, "drop", _drop_whatever)],
    ),
    "a deleted checkpoint leaves an abandonment, where an older daemon could publish it": (
        9,
        [(Repository, "bury", _leave_nothing)],
    ),
    "the first receipt counts, and the daemon that is late deletes its parts": (
        22,
        [(Joint, "_publish", _publish_blindly)],
    ),
}
"""The rules of the product that the model needs, by name. Each has the seed of a life
that was broken without it, and what takes it out.
"""
WITH_HOLDER = {"the first receipt counts, and the daemon that is late deletes its parts"}
"""The rules whose lives need the holder of copies."""


def is_needed(rule: str) -> bool:
    """Return True if the life of the rule's seed is broken without the rule."""
    with without(rule):
        return live(RULES[rule][0], holder=rule in WITH_HOLDER)[1] != ""


def main() -> None:
    """Print, for each rule, the first of 10,000 seeds whose life is broken without it.

    A change of the code or of this model may give each seed another life: then the
    seeds in `RULES` are replaced.
    """
    logging.disable()
    for rule, (seed, _) in RULES.items():
        with without(rule):
            holder = rule in WITH_HOLDER
            seeds = (seed, *range(10_000))
            found = next((other for other in seeds if live(other, holder=holder)[1]), None)
        print(f"{rule}: {found}", flush=True)


if __name__ == "__main__":
    main()
