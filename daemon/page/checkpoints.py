"""Reads the checkpoints of a root for the page: lists, manifests, tensors.

All calls block, and change nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec

from ckptd.shared import names
from ckptd.shared.errors import IntegrityError, NotFound, storage_errors
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.plan import BLOB, HIDDEN, element_size
from ckptd.shared.location import Location
from ckptd.shared.storage.locate import open_root, tags_of
from ckptd.shared.storage.metadata import tensors
from ckptd.shared.storage.repository import Repository

MOST_LISTED = 5_000
"""The most checkpoints, and the most tensors of one, that are listed."""
FRESH_SECONDS = 2.0
"""A list that is not older is given to further readers."""
_MOST_KEPT = 50_000
_MOST_JOBS = 16
"""The most jobs whose list is kept."""
_MOST_PARTS = 100


class Checkpoints:
    """The checkpoints of one root."""

    def __init__(self, root: Location) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._rows = dict[tuple[str, str], dict[str, Any]]()
        self._listings = dict[str, tuple[float, dict[str, Any]]]()

    def jobs(self) -> list[str]:
        """Return the names of the jobs, sorted. Raises StorageError."""
        with storage_errors(f"list {self._root}"):
            return sorted(self._repository().jobs())

    def listing(self, job: str) -> dict[str, Any]:
        """Return the checkpoints of a job, the newest first, and how many more there are.

        A manifest is read once, and the list is at most `FRESH_SECONDS` old. Raises
        NotFound, StorageError.
        """
        names.check_name("job", job)
        with self._lock:  # so that readers who come together read the root once
            made, listing = self._listings.get(job, (0.0, None))
            if listing is None or time.monotonic() - made > FRESH_SECONDS:
                listing = self._listing(job)
                if len(self._listings) >= _MOST_JOBS:
                    self._listings.clear()
                self._listings[job] = (time.monotonic(), listing)
            return listing

    def _listing(self, job: str) -> dict[str, Any]:
        repository = self._repository()
        with storage_errors(f"list {job}"):
            newest, pinned = repository.read_newest(job), repository.pins(job)
            found = dict(self._known(repository, job))
        if not found and job not in self.jobs():
            raise NotFound(f"there is no job {job} in {self._root}")
        rows = sorted(found.values(), key=_order, reverse=True)
        return {
            "job": job,
            "checkpoints": [
                {**row, "newest": row["tag"] == newest, "pinned": row["tag"] in pinned}
                for row in rows[:MOST_LISTED]
            ],
            "more": max(0, len(rows) - MOST_LISTED),
        }

    def _known(self, repository: Repository, job: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the row of each checkpoint by its tag, and forget those that are gone."""
        there = [tag for tag in tags_of(repository, job) if repository.is_committed(job, tag)]
        kept, present = self._rows, set(there)
        for key in [key for key in kept if key[0] == job and key[1] not in present]:
            del kept[key]
        for tag in there:
            row = kept.get((job, tag))
            if row is None:
                try:
                    row = _row(tag, repository.read_manifest(job, tag))
                except NotFound:
                    continue  # deleted meanwhile
                except IntegrityError as error:
                    yield tag, {"tag": tag, "damaged": str(error)}
                    continue
                if len(kept) < _MOST_KEPT:
                    kept[(job, tag)] = row
            yield tag, row

    def details(self, job: str, tag: str) -> dict[str, Any]:
        """Return what a checkpoint is, with its tensors.

        Raises NotFound, IntegrityError, StorageError.
        """
        repository, called = self._named(job, tag)
        with storage_errors(f"read {called}"):
            manifest = repository.read_manifest(job, tag)
            entries, _ = tensors(repository, job, tag, manifest)
        shown = json.loads(manifest.encode())
        shown.pop("metadata", None)
        # The same form for every version: version 2 stores the parts by columns.
        shown["parts"] = msgspec.to_builtins(manifest.parts[:_MOST_PARTS])
        listed = [
            _tensor(name, entry.get("size", ()), entry["dtype"])
            for name, entry in entries.items()
            if "dtype" in entry and entry["dtype"] != BLOB and not name.startswith(HIDDEN)
        ]
        return {
            **_row(tag, manifest),
            "job": job,
            "tensors": listed[:MOST_LISTED],
            "tensors_in_all": len(listed),
            "other_values": len(entries) - len(listed),
            "parts_not_shown": max(0, len(manifest.parts) - _MOST_PARTS),
            "manifest": shown,
        }

    def manifest(self, job: str, tag: str) -> bytes:
        """Return the manifest as it is stored. Raises as `details`."""
        repository, called = self._named(job, tag)
        with storage_errors(f"read {called}"):
            return repository.read_manifest_document(job, tag)[1]

    def statistics(
        self, job: str, tag: str, tensor: str, stopped: Callable[[], bool]
    ) -> dict[str, Any]:
        """Return the statistics of the numbers in a tensor.

        The checkpoint is not deleted meanwhile. stopped: returns True if the result is
        not wanted any more, which ends the work with InterruptedError. Raises NotFound,
        IntegrityError, Busy, InvalidRequest, StorageError.
        """
        # NumPy takes memory that a page without this call saves.
        from ckptd.shared.array_checkpoint import ArrayCheckpoint
        from ckptd.shared.array_statistics import tensor_statistics

        repository, called = self._named(job, tag)
        with storage_errors(f"read {called}"), closing(repository.lease(job, tag)):
            manifest = repository.read_manifest(job, tag)
            with ArrayCheckpoint(
                manifest,
                lambda part: repository.open_part(job, tag, part.file, part.index_sha256),
            ) as checkpoint:
                found = tensor_statistics(checkpoint, tensor, stopped)
                told: dict[str, Any] = msgspec.to_builtins(found)
                return {
                    "name": tensor, "shape": list(checkpoint.shape(tensor)),
                    "dtype": checkpoint.dtype(tensor), **told,
                }  # fmt: skip

    def _named(self, job: str, tag: str) -> tuple[Repository, str]:
        """Return the repository, and the name of a checkpoint for messages.

        Raises InvalidName, or NotFound if no checkpoint has such a tag.
        """
        names.check_name("job", job)
        if names.parse_tag_directory(tag) is None:
            raise NotFound(
                f"{tag[:80]!r} is not the tag of a checkpoint; expected one like "
                f"step-00001000.a0001"
            )
        return self._repository(), f"{job}/{tag}"

    def _repository(self) -> Repository:
        return open_root(self._root)


def _row(tag: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "tag": tag,
        "attempt": manifest.attempt,
        "step": manifest.step,
        "seq": manifest.seq,
        "world_size": manifest.world_size,
        "bytes": manifest.nbytes,
        "raw_bytes": sum(part.raw_bytes for part in manifest.parts),
        "new_bytes": manifest.new_bytes,
        "chain": manifest.chain,
        "restored_bytes": manifest.restored_bytes,
        "created": manifest.created_at,
        "metrics": manifest.metrics,
        "non_finite": manifest.non_finite,
        "damaged": None,
    }


def _order(row: dict[str, Any]) -> tuple[int, int]:
    """Return what puts the newest checkpoint last; a damaged one counts by its name."""
    parsed = names.parse_tag_directory(row["tag"])
    assert parsed is not None  # only such directories are listed
    step = parsed.step if row["damaged"] else row["step"]
    return parsed.attempt, -1 if step is None else step


def _tensor(name: str, size: Any, dtype: str) -> dict[str, Any]:
    elements = 1
    for length in size:
        elements *= length
    return {
        "name": name,
        "shape": list(size),
        "dtype": dtype.partition("/")[0],
        "bytes": elements * (element_size(dtype) or 1),
    }
