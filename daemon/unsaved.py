"""Says which snapshots are in memory only when a daemon ends, where they lie, and how they come to storage.

The daemon itself knows that from its catalog. `ckptd stop` reads it from what the daemon has left, since it must also hold for a daemon
that was killed while it ended: the headers of the segments say what is sealed, and the manifests say what is saved.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckptd.daemon.catalog import Catalog
from ckptd.daemon.slots import Slots
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, IntegrityError, NotFound, StorageError
from ckptd.shared.location import located
from ckptd.shared.segment import SegmentHeader, SlotState, read_header, this_boot
from ckptd.shared.storage.locate import existing_root
from ckptd.shared.storage.repository import Repository

STORAGE_SECONDS = 30.0
"""How long `left_behind` waits for a root or a stage that does not answer. Its snapshots then count as not saved."""


@dataclass(frozen=True, slots=True)
class UnsavedSnapshot:
    """A snapshot that is complete in memory, on this node, and not on storage.

    `directories`: where its segments lie. `reason`: why it could not be saved, or "" if that is not known.
    """

    job: str
    attempt: int
    step: int
    directories: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"step {self.step} of job {self.job} (attempt {self.attempt}) is in memory only, in {', '.join(self.directories)}{why}"

    def row(self) -> dict[str, Any]:
        """Return what `ckptd stop --json` prints of it."""
        return {**asdict(self), "directories": list(self.directories)}


def text(unsaved: Sequence[UnsavedSnapshot], root: object) -> str:
    """Return one line about these snapshots of a daemon that has ended: what is where, how long it stays, and how it is saved."""
    them = "it" if len(unsaved) == 1 else "them"
    return (
        f"NOT SAVED: {'; '.join(map(str, unsaved))}. This stays there until the machine or the container restarts, or until "
        f"`ckptd gc --delete` deletes it. To save {them}, remove the cause (on a full disk, make room), and start a daemon for {root} "
        f"on {names.host()} again: it saves {them} at its start"
    )


def in_memory_only(catalog: Catalog, slots: Slots) -> list[UnsavedSnapshot]:
    """Return what is in memory only, as the daemon knows it: of each job the newest snapshot, or all that several nodes may need."""
    found = []
    for job in sorted(catalog.jobs.values(), key=lambda job: job.name):
        for snapshot in job.unsaved():
            segments = [slots.slots[seal.segment] for seal in snapshot.seals.values() if seal.segment in slots.slots]
            places = tuple(sorted({str(slot.directory.path) for slot in segments}))
            found.append(UnsavedSnapshot(job.name, snapshot.attempt, snapshot.step, places, snapshot.reason))
    return found


def waiting_text(status: dict[str, Any]) -> str:
    """Return which snapshots are in memory only, as the status of a daemon tells that is still saving them, or "" if there are none."""
    told = []
    for job in status["jobs"]:
        sealed, durable = job["last_sealed"], job["last_durable"] or {}
        if sealed and (sealed["attempt"], sealed["step"]) != (durable.get("attempt"), durable.get("step")):
            told.append(str(UnsavedSnapshot(job["job"], sealed["attempt"], sealed["step"], tuple(_directories(status)))))
    return "; ".join(told)


def left_behind(status: dict[str, Any]) -> list[UnsavedSnapshot]:
    """Return what a daemon that has ended has left in memory only. `status` is its last status.

    A snapshot counts as not saved if storage does not tell within STORAGE_SECONDS. The reason then says so.
    """
    jobs = {job["job"]: job for job in status["jobs"]}
    log = f" {status['log_file']}" if status.get("log_file") else ""
    found: list[UnsavedSnapshot] = []
    for name, sealed in sorted(_sealed(_directories(status)).items()):
        job = jobs.get(name, {})
        whole = {key: headers for key, headers in sealed.items() if _is_complete(headers.values(), job.get("ranks_here"))}
        keys = sorted(whole) if job.get("ranks_here") else sorted(whole)[-1:]
        durable = job.get("last_durable") or {}
        saved, problem = _saved(status, name, [key for key in keys if key != (durable.get("attempt"), durable.get("step"))])
        saved |= set(keys) & {(durable.get("attempt"), durable.get("step"))}
        for key in keys:
            if key not in saved and key >= max(saved, default=key):
                error = job.get("last_error") or {}
                reason = problem or (error["reason"] if error.get("step") == key[1] else f"the daemon's log{log} says why")
                found.append(UnsavedSnapshot(name, *key, tuple(sorted({place for place, _ in whole[key]})), reason))
    return found


def _directories(status: dict[str, Any]) -> Iterator[str]:
    memory = status["shared_memory"]
    yield memory["directory"]
    if memory.get("disk_directory"):  # a daemon of an older version does not tell it
        yield memory["disk_directory"]


def _sealed(directories: Iterable[str]) -> dict[str, dict[tuple[int, int], dict[tuple[str, str], SegmentHeader]]]:
    """Return the header of each sealed segment, by job, by (attempt, step), and by directory and name."""
    found: dict[str, dict[tuple[int, int], dict[tuple[str, str], SegmentHeader]]] = defaultdict(lambda: defaultdict(dict))
    for directory in directories:
        try:
            files = [name for name in os.listdir(directory) if names.is_segment_file(name)]
        except OSError:
            continue  # the daemon removes an empty directory when it ends
        for name in files:
            try:
                fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue  # the next daemon has just released it
            try:
                header = read_header(fd)
            except (IntegrityError, OSError):
                continue  # the next daemon does not save it either
            finally:
                os.close(fd)
            if header.state is SlotState.SEALED and header.step is not None and header.boot_id == this_boot():
                found[header.job][header.attempt, header.step][directory, name] = header
    return found


def _is_complete(headers: Collection[SegmentHeader], ranks_here: Collection[int] | None) -> bool:
    """Return True if all ranks of this node have sealed the snapshot: those in `ranks_here`, or all of the job if that is None."""
    wanted = set(ranks_here or range(next(iter(headers)).world_size))
    return wanted <= {header.rank for header in headers}


def _saved(status: dict[str, Any], job: str, keys: Sequence[tuple[int, int]]) -> tuple[set[tuple[int, int]], str]:
    """Return those of `keys` that are on storage, on the stage or in the root, and the reason why storage could not tell, or ""."""
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
                said = error if isinstance(error, CkptdError) else StorageError.of(f"read {place}", error)
                problems.append(f"storage does not say whether it is saved: {said}")

    reading = threading.Thread(target=read, daemon=True)  # a hung mount must not hold this command for ever
    reading.start()
    reading.join(STORAGE_SECONDS)
    if reading.is_alive():
        return set(), f"{' and '.join(places)} did not say within {STORAGE_SECONDS:g} s whether it is saved"
    return found, "; ".join(problems)


def _of_storage(repository: Repository, job: str, keys: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the keys that have a checkpoint, or a receipt of a node: the next daemon then finds out what has become of the save."""
    for tag in repository.tags(job):
        parsed = names.parse_tag_directory(tag)
        if parsed is None:
            continue
        for key in keys:
            if parsed[2] != key[0] or parsed[1] not in (None, key[1]):
                continue
            try:
                if repository.read_manifest(job, tag).step == key[1]:
                    yield key
            except IntegrityError:
                continue  # it is damaged, and the copy in memory is needed
            except NotFound:
                files = repository.files(job, tag)
                if names.MANIFEST not in files and any(names.parse_receipt_file(file) is not None for file in files):
                    yield key
