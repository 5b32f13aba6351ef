"""Says which snapshots are in memory only when a daemon ends, where they lie, and how
they come to storage.

The daemon itself knows this from its catalog. `ckptd stop` must know it even of a
daemon that was killed while it ended. It therefore reads what that daemon has left: the
headers of the segments say which snapshots are sealed, and the manifests say which are
saved.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.job.snapshot import Key
from ckptd.daemon.memory import moved_root
from ckptd.daemon.memory.foreign_memory import SHOWN
from ckptd.daemon.memory.slots import Slots
from ckptd.shared import names
from ckptd.shared.errors import Busy, CkptdError, IntegrityError, NotFound, StorageError
from ckptd.shared.formats.segment import (
    RootMark,
    SegmentHeader,
    SlotState,
    read_header,
    read_root_mark,
    this_boot,
)
from ckptd.shared.location import Location, located
from ckptd.shared.storage.locate import existing_root, open_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine, root_lock
from ckptd.shared.system.fs import closing_at_end

STORAGE_SECONDS = 30.0
"""The seconds for which `left_behind` waits for a root or a stage that does not answer.

Its snapshots then count as not saved.
"""


@dataclass(frozen=True, slots=True)
class UnsavedSnapshot:
    """A snapshot that is complete in the memory of this node, and not on storage.

    `directories`: the directories with its segments. `reason`: why it could not be
    saved, or "" if that is not known. `other_root`: the identity of the root that it was
    saved for, if another root is at that place now, or "".
    """

    job: str
    attempt: int
    step: int
    directories: tuple[str, ...]
    reason: str = ""
    other_root: str = ""

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return (
            f"step {self.step} of job {self.job} (attempt {self.attempt}) is in memory only, in "
            f"{', '.join(self.directories)}{why}"
        )

    def row(self) -> dict[str, Any]:
        """Return the entry of this snapshot in `ckptd stop --json`."""
        row = {**asdict(self), "directories": list(self.directories)}
        return row if self.other_root else {k: v for k, v in row.items() if k != "other_root"}


def text(unsaved: Sequence[UnsavedSnapshot], root: object) -> str:
    """Return one line about the unsaved snapshots of a daemon that has ended.

    It says where each snapshot lies, how long it stays there, and how to save it.
    """
    they, them = ("It stays", "it") if len(unsaved) == 1 else ("They stay", "them")
    others = sorted({each.other_root[:SHOWN] for each in unsaved if each.other_root})
    remedies = []
    if not all(each.other_root for each in unsaved):
        remedies.append(
            f"To save {them}, remove the cause (on a full disk, make room), then start a daemon "
            f"for {root} on {machine.host()} again, which saves {them}"
        )
    if others:
        remedies.append(
            f"No daemon saves what belongs to root {' or '.join(others)} until you decide: mount "
            f"or restore that root at {root} and start the daemon again, or set "
            f"CKPTD_FOREIGN_MEMORY for one run: `adopt` saves it to the root that is there now, "
            f"and `drop` deletes it"
        )
    return (
        f"NOT SAVED: {'; '.join(map(str, unsaved))}. {they} there until the machine or the "
        f"container restarts, or until `ckptd gc --delete` deletes {them}. {'. '.join(remedies)}"
    )


def in_memory_only(catalog: Catalog, slots: Slots) -> list[UnsavedSnapshot]:
    """Return the snapshots that are in memory only, by the daemon's catalog.

    This is the newest snapshot of a job on one node, and of a job on several nodes each
    snapshot that another node may need.
    """
    found = []
    for job in sorted(catalog.jobs.values(), key=lambda job: job.name):
        for snapshot in job.unsaved():
            segments = [
                slots.slots[seal.segment]
                for seal in snapshot.seals.values()
                if seal.segment in slots.slots
            ]
            places = tuple(sorted({str(slot.directory.path) for slot in segments}))
            found.append(
                UnsavedSnapshot(job.name, snapshot.attempt, snapshot.step, places, snapshot.reason)
            )
    return found


def waiting_text(status: dict[str, Any]) -> str:
    """Return the names of the snapshots that a daemon is still saving, or "" if there
    are none.

    `status` is the status of the daemon.
    """
    told = []
    for job in status["jobs"]:
        sealed, durable = job["last_sealed"], job["last_durable"] or {}
        if sealed and (sealed["attempt"], sealed["step"]) != (
            durable.get("attempt"),
            durable.get("step"),
        ):
            told.append(
                str(
                    UnsavedSnapshot(
                        job["job"], sealed["attempt"], sealed["step"], tuple(_directories(status))
                    )
                )
            )
    return "; ".join(told)


def left_behind(status: dict[str, Any]) -> list[UnsavedSnapshot]:
    """Return the snapshots that a daemon that has ended has left in memory only.

    `status` is its last status. A snapshot counts as not saved if storage does not
    answer within STORAGE_SECONDS. Its reason then says so.
    """
    jobs = {job["job"]: job for job in status["jobs"]}
    log = f" {status['log_file']}" if status.get("log_file") else ""
    stage = (status.get("stage") or {}).get("directory")
    places = [*([stage] if stage else []), status["root"]]
    sealed = defaultdict[tuple[str, str], dict[Key, list[_Segment]]](lambda: defaultdict(list))
    for segment in _segments(_directories(status)):
        if (key := segment.sealed) is not None:
            other = segment.other_root(status.get("identity"))
            sealed[segment.header.job, other][key].append(segment)
    found: list[UnsavedSnapshot] = []
    for (name, other), snapshots in sorted(sealed.items()):
        if other:
            found += _of_other_root(name, snapshots, other, status["root"])
            continue
        job = jobs.get(name, {})
        here = job.get("ranks_here")
        whole = {key: held for key, held in snapshots.items() if _is_complete(held, here)}
        durable, error = job.get("last_durable") or {}, job.get("last_error") or {}
        found += _not_saved(
            name, whole, everything=bool(here), places=places,
            known=(durable.get("attempt"), durable.get("step")),
            reasons={error.get("step"): error.get("reason")},
            otherwise=f"the daemon's log{log} says why",
        )  # fmt: skip
    return found


def without_a_daemon(
    shm_dir: Path, state_dir: Path, root: Location | None, seconds: float | None = None
) -> dict[str, list[UnsavedSnapshot]]:
    """Return the snapshots of this user that are in the memory of this node and not in
    their root, by root, if no daemon is there.

    root: only the memory of this root counts, or None for that of all roots whose
    directories no daemon uses. state_dir: that of the daemon, which may have segments on
    its disk. seconds: instead of STORAGE_SECONDS.

    Raises Busy if a daemon uses the memory of `root`, or if that of another user was not
    asked by the superuser.
    """
    ranks = defaultdict[tuple[str, str, int], set[int]](set)
    sealed = defaultdict[tuple[str, str, str], dict[Key, list[_Segment]]](lambda: defaultdict(list))
    identity = None if root is None else _identity(root)
    for directory in _of_roots(shm_dir, state_dir, root):
        for segment in _segments([str(directory)]):
            header, place = segment.header, segment.place if root is None else str(root)
            ranks[place, header.job, header.attempt].add(header.rank)
            if (key := segment.sealed) is not None:
                sealed[place, header.job, segment.other_root(identity)][key].append(segment)
    found: dict[str, list[UnsavedSnapshot]] = {}
    for (place, name, other), snapshots in sorted(sealed.items()):
        if other:
            found.setdefault(place, []).extend(_of_other_root(name, snapshots, other, place))
            continue
        here = {key: ranks[place, name, key[0]] for key in snapshots}
        whole = {key: held for key, held in snapshots.items() if _is_complete(held, here[key])}
        # A job has other nodes if not all its ranks have segments here.
        shared = any(len(here[key]) < held[0].header.world_size for key, held in whole.items())
        places = [place] if place else []
        unsaved = list(_not_saved(name, whole, everything=shared, places=places, seconds=seconds))
        if unsaved:
            found.setdefault(place, []).extend(unsaved)
    if root is not None and (
        moved := list(_elsewhere(shm_dir, state_dir, root, identity, seconds))
    ):
        found.setdefault(str(root), []).extend(moved)
    return found


def _of_roots(shm_dir: Path, state_dir: Path, root: Location | None) -> Iterator[Path]:
    """Yield the directories of segments that no daemon uses: of one root, or of all.

    They are those of this user; of the superuser, those of the owner of the root, or of
    all users.
    """
    uid, superuser = os.getuid(), os.geteuid() == 0
    if root is None:
        found = [
            *sorted(shm_dir.glob(f"ckptd-{'[0-9]*' if superuser else uid}-*")),
            *sorted((state_dir / machine.host()).glob("*/segments")),
        ]
    else:
        owner = root_lock.owner_of(root) if superuser else None
        name = machine.segment_directory(root, uid if owner is None else owner)
        found = [
            shm_dir / name,
            *sorted(shm_dir.glob(f"{name}.*")),
            machine.state_directory(state_dir, root) / "segments",
        ]
    for directory in found:
        if directory.is_symlink():  # which no daemon has made
            continue
        if not moved_root.is_used(directory):
            yield directory
        elif root is None and (other := directory.stat().st_uid) not in (0, uid):
            raise Busy(
                f"a daemon of uid {other} uses {directory}, and was not asked: name its root"
            )
        elif root is not None:
            raise Busy(
                f"a daemon that cannot be found from here, perhaps in another container, uses "
                f"{directory}: name its socket with --socket PATH"
            )


def _elsewhere(
    shm_dir: Path, state_dir: Path, root: Location, identity: str | None, seconds: float | None
) -> Iterator[UnsavedSnapshot]:
    """Yield the snapshots of a root that are in memory only, and in the directory of a path
    where the root was before. A daemon may use that directory for another root.
    """
    own = machine.segment_directory(root)
    directories = [
        *(d for d in sorted(shm_dir.glob(f"ckptd-{os.getuid()}-*")) if not d.name.startswith(own)),
        *sorted((state_dir / machine.host()).glob("*/segments")),
    ]
    for found in moved_root.held_elsewhere(directories, root, identity) if identity else ():
        held = found.held
        key = held.attempt, held.step
        wait = STORAGE_SECONDS if seconds is None else seconds
        saved, problem = _saved([str(root)], held.job, [key], wait)
        if key not in saved:
            why = f"it was saved for this root when that was at {held.root.place}"
            if found.used:
                why += f", whose daemon uses it now: `ckptd stop {held.root.place}` stops that one"
            yield UnsavedSnapshot(held.job, *key, (str(found.directory),), problem or why)


def _identity(root: Location) -> str | None:
    """Return the identity of a root, or None if it has none, or cannot be read, which the
    caller tells.
    """
    try:
        return open_root(root).known_identity()
    except (CkptdError, OSError):
        return None


def _of_other_root(
    job: str, snapshots: Mapping[Key, list[_Segment]], identity: str, place: str
) -> Iterator[UnsavedSnapshot]:
    """Yield the newest snapshot of a job that was saved for another root than the one that
    is at `place` now. It is compared with no checkpoint, because the steps and attempts of
    the two roots have nothing to do with each other.
    """
    key = max(snapshots)
    directories = tuple(sorted({segment.directory for segment in snapshots[key]}))
    reason = f"it was saved for root {identity[:SHOWN]}, and {place} has another root now"
    yield UnsavedSnapshot(job, *key, directories, reason, identity)


def _not_saved(
    job: str,
    whole: dict[Key, list[_Segment]],
    *,
    everything: bool,
    places: Sequence[str],
    known: tuple[int | None, int | None] = (None, None),
    reasons: Mapping[int | None, str | None] = MappingProxyType({}),
    otherwise: str = "",
    seconds: float | None = None,
) -> Iterator[UnsavedSnapshot]:
    """Yield those snapshots of a job that are needed and not saved.

    whole: the segments of each complete snapshot. everything: True if each of them may
    be needed, because the job has other nodes, and not only the newest. places: the
    stage and the root. known: the newest checkpoint that is known. reasons: why the save
    of a step has failed. `otherwise` is the reason for the other steps.
    """
    keys = sorted(whole) if everything else sorted(whole)[-1:]
    wait = STORAGE_SECONDS if seconds is None else seconds
    saved, problem = _saved(places, job, [key for key in keys if key != known], wait)
    saved |= {key for key in keys if key == known}
    for key in keys:
        if key not in saved and key >= max(saved, default=key):
            directories = tuple(sorted({segment.directory for segment in whole[key]}))
            reason = problem or reasons.get(key[1]) or otherwise
            yield UnsavedSnapshot(job, *key, directories, reason)


def _directories(status: dict[str, Any]) -> Iterator[str]:
    memory = status["shared_memory"]
    yield memory["directory"]
    if memory.get("disk_directory"):  # a daemon of an older version does not report it
        yield memory["disk_directory"]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment in a directory: its header, and its root, if it is known."""

    directory: str
    header: SegmentHeader
    root: RootMark | None

    @property
    def place(self) -> str:
        """The place of its root, or ""."""
        return "" if self.root is None else self.root.place

    def other_root(self, identity: str | None) -> str:
        """Return the identity of its root if that is another one than `identity`, or ""."""
        known = "" if self.root is None else self.root.identity
        return known if identity and known != identity else ""

    @property
    def sealed(self) -> Key | None:
        """The attempt and the step of the snapshot that it holds, or None."""
        header = self.header
        if header.state is not SlotState.SEALED or header.step is None:
            return None
        return header.attempt, header.step


def _segments(directories: Iterable[str]) -> Iterator[_Segment]:
    """Yield the segments of trainers of this node that can be read."""
    for directory in directories:
        try:
            files = [name for name in os.listdir(directory) if names.is_segment_file(name)]
        except OSError:
            continue  # the daemon removes an empty directory when it ends
        for name in files:
            path, flags = os.path.join(directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with closing_at_end(os.open(path, flags)) as fd:
                    header = read_header(fd)
                    mark = _mark(fd, header)
            except (IntegrityError, OSError):
                # The next daemon has just released the segment, or does not save it
                # either.
                continue
            if header.boot_id == this_boot() and not header.peer_replica:
                yield _Segment(directory, header, mark)


def _mark(fd: int, header: SegmentHeader) -> RootMark | None:
    """Return the root of a segment, or None if it is not known."""
    try:
        return read_root_mark(fd, header)
    except CkptdError:
        return None


def _is_complete(held: Collection[_Segment], ranks_here: Collection[int] | None) -> bool:
    """Return True if all ranks of this node have sealed the snapshot.

    ranks_here: the ranks of this node, or None if all ranks of the job are on it.
    """
    wanted = set(ranks_here or range(next(iter(held)).header.world_size))
    return wanted <= {segment.header.rank for segment in held}


def _saved(
    places: Sequence[str], job: str, keys: Sequence[Key], seconds: float
) -> tuple[set[Key], str]:
    """Return the keys that have a checkpoint on the stage or in the root.

    Also returns the reason why storage could not be read, or "" if it was read.
    """
    found: set[Key] = set()
    problems: list[str] = []

    def read() -> None:
        for place in places:
            try:
                found.update(_of_storage(existing_root(located(place)), job, keys))
            except NotFound:
                continue
            except (CkptdError, OSError) as error:
                said = (
                    error
                    if isinstance(error, CkptdError)
                    else StorageError.of(f"read {place}", error)
                )
                problems.append(f"storage cannot be read, so that it may be saved or not: {said}")

    # A hung mount must not hold this command for ever.
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(seconds)
    if reading.is_alive():
        return (
            set(),
            f"{' and '.join(places)} did not answer within {seconds:g} s, so that it may "
            f"be saved or not",
        )
    return found, "; ".join(problems)


def _of_storage(
    repository: Repository, job: str, keys: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield each key that has a checkpoint, or a receipt of a node.

    A snapshot with a receipt counts as saved, because the next daemon finds out the
    outcome of its save.
    """
    for tag in repository.tags(job):
        parsed = names.parse_tag_directory(tag)
        if parsed is None:
            continue
        for key in keys:
            if parsed.attempt != key[0] or parsed.step not in (None, key[1]):
                continue
            try:
                if repository.read_manifest(job, tag).step == key[1]:
                    yield key
            except IntegrityError:
                continue  # the manifest is damaged, so that the copy in memory is needed
            except NotFound:
                files = repository.files(job, tag)
                if names.MANIFEST not in files and any(
                    names.parse_receipt_file(file) is not None for file in files
                ):
                    yield key
