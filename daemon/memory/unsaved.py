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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckptd.daemon.job.catalog import Catalog
from ckptd.daemon.memory.slots import Slots
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError, NotFound, StorageError
from ckptd.shared.formats.segment import SegmentHeader, SlotState, read_header, this_boot
from ckptd.shared.location import located
from ckptd.shared.storage.locate import existing_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.fs import closing_at_end

STORAGE_SECONDS = 30.0
"""The seconds for which `left_behind` waits for a root or a stage that does not answer.

Its snapshots then count as not saved.
"""


@dataclass(frozen=True, slots=True)
class UnsavedSnapshot:
    """A snapshot that is complete in the memory of this node, and not on storage.

    `directories`: the directories with its segments. `reason`: why it could not be
    saved, or "" if that is not known.
    """

    job: str
    attempt: int
    step: int
    directories: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return (
            f"step {self.step} of job {self.job} (attempt {self.attempt}) is in memory only, in "
            f"{', '.join(self.directories)}{why}"
        )

    def row(self) -> dict[str, Any]:
        """Return the entry of this snapshot in `ckptd stop --json`."""
        return {**asdict(self), "directories": list(self.directories)}


def text(unsaved: Sequence[UnsavedSnapshot], root: object) -> str:
    """Return one line about the unsaved snapshots of a daemon that has ended.

    It says where each snapshot lies, how long it stays there, and how to save it.
    """
    they, them = ("It stays", "it") if len(unsaved) == 1 else ("They stay", "them")
    return (
        f"NOT SAVED: {'; '.join(map(str, unsaved))}. {they} there until the machine or the "
        f"container "
        f"restarts, or until `ckptd gc --delete` deletes {them}. To save {them}, remove the cause "
        f"(on a full "
        f"disk, make room), then start a daemon for {root} on {machine.host()} again, which saves "
        f"{them}"
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
    found: list[UnsavedSnapshot] = []
    for name, sealed in sorted(_sealed(_directories(status)).items()):
        job = jobs.get(name, {})
        whole = {
            key: headers
            for key, headers in sealed.items()
            if _is_complete(headers.values(), job.get("ranks_here"))
        }
        keys = sorted(whole) if job.get("ranks_here") else sorted(whole)[-1:]
        durable = job.get("last_durable") or {}
        saved, problem = _saved(
            status,
            name,
            [key for key in keys if key != (durable.get("attempt"), durable.get("step"))],
        )
        saved |= set(keys) & {(durable.get("attempt"), durable.get("step"))}
        for key in keys:
            if key not in saved and key >= max(saved, default=key):
                error = job.get("last_error") or {}
                reason = problem or (
                    error["reason"]
                    if error.get("step") == key[1]
                    else f"the daemon's log{log} says why"
                )
                found.append(
                    UnsavedSnapshot(
                        name, *key, tuple(sorted({place for place, _ in whole[key]})), reason
                    )
                )
    return found


def _directories(status: dict[str, Any]) -> Iterator[str]:
    memory = status["shared_memory"]
    yield memory["directory"]
    if memory.get("disk_directory"):  # a daemon of an older version does not report it
        yield memory["disk_directory"]


def _sealed(
    directories: Iterable[str],
) -> dict[str, dict[tuple[int, int], dict[tuple[str, str], SegmentHeader]]]:
    """Return the header of each sealed segment, by job, by (attempt, step), and by
    directory and name.
    """
    found: dict[str, dict[tuple[int, int], dict[tuple[str, str], SegmentHeader]]] = defaultdict(
        lambda: defaultdict(dict)
    )
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
            except (IntegrityError, OSError):
                # The next daemon has just released the segment, or does not save it
                # either.
                continue
            if (
                header.state is SlotState.SEALED
                and header.step is not None
                and header.boot_id == this_boot()
                and not header.peer_replica
            ):
                found[header.job][header.attempt, header.step][directory, name] = header
    return found


def _is_complete(headers: Collection[SegmentHeader], ranks_here: Collection[int] | None) -> bool:
    """Return True if all ranks of this node have sealed the snapshot.

    ranks_here: the ranks of this node, or None if all ranks of the job are on it.
    """
    wanted = set(ranks_here or range(next(iter(headers)).world_size))
    return wanted <= {header.rank for header in headers}


def _saved(
    status: dict[str, Any], job: str, keys: Sequence[tuple[int, int]]
) -> tuple[set[tuple[int, int]], str]:
    """Return the keys that have a checkpoint on the stage or in the root.

    Also returns the reason why storage could not be read, or "" if it was read.
    """
    stage = (status.get("stage") or {}).get("directory")
    places = [*([stage] if stage else []), status["root"]]
    found: set[tuple[int, int]] = set()
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
    reading.join(STORAGE_SECONDS)
    if reading.is_alive():
        return (
            set(),
            f"{' and '.join(places)} did not answer within {STORAGE_SECONDS:g} s, so that it may "
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
