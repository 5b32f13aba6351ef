"""Keeps the heartbeats of runs in a root, on any storage (FORMAT.md, section 6).

Calls raise OSError; the callers translate it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ckptd.shared import names
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.heartbeat import MAX_HEARTBEAT, Heartbeat
from ckptd.shared.system.storage_seam import Storage


class HeartbeatStore:
    """The heartbeats of one root."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def where(self, job: str) -> str:
        """Return the location of the heartbeats of a job, as text for messages."""
        return self._storage.where(names.runs(job))

    def attempts(self, job: str) -> list[int]:
        """Return the attempts of a job that have a heartbeat, alive or not, in
        ascending order.
        """
        found = (
            names.parse_attempt_file(entry.name)
            for entry in self._storage.children(names.runs(job))
            if not entry.nested
        )
        return sorted({attempt for attempt in found if attempt is not None})

    def read(self, job: str, attempt: int) -> bytes | None:
        """Return the bytes of a heartbeat, or None if there is none.

        Of a longer object, only the first `MAX_HEARTBEAT` bytes are returned.

        Raises IntegrityError if something else, such as a FIFO, has its name.
        """
        try:
            source = self._storage.open(f"{names.runs(job)}/{names.attempt_file(attempt)}")
        except FileNotFoundError:
            return None
        try:
            return bytes(source.view(0, MAX_HEARTBEAT))
        finally:
            source.close()

    def publish(self, heartbeat: Heartbeat) -> None:
        """Publish a heartbeat, in place of the one before it.

        It need not survive a power failure, and nothing is synced.
        """
        prefix = names.runs(heartbeat.job)
        name = f"{prefix}/{names.attempt_file(heartbeat.attempt)}"
        publish = partial(
            self._storage.publish, name, heartbeat.encode(), replace=True, durable=False
        )
        try:
            publish()
        except (
            FileNotFoundError
        ):  # the job has had no heartbeat yet, and a created object makes the directory
            self._storage.create(
                f"{prefix}/{names.new_nonce().hex()}{names.TMP_SUFFIX}", ALIGN, b""
            ).discard()
            publish()

    def delete(self, job: str, attempts: Iterable[int]) -> None:
        """Delete the heartbeats of these attempts, if they exist, and what an
        unfinished publication of them has left.
        """
        files = [names.attempt_file(attempt) for attempt in attempts]
        self._storage.delete(
            names.runs(job), [*files, *(file + names.TMP_SUFFIX for file in files)]
        )
