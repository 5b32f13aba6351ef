"""Keeps objects in an object store: Amazon S3 and all that speak its protocol, Google
Cloud Storage, Azure Blob Storage.

Bulk data goes to names of its own by multipart uploads. Small objects appear whole with
one request. What the store guarantees is measured, not concluded from its name
(`object_probe.py`).
"""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec

from ckptd.shared import names
from ckptd.shared.errors import Busy, RemoteError, storage_errors
from ckptd.shared.storage import object_probe
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_leases import Leases
from ckptd.shared.storage.object_streams import LEAST_PART, MOST_PARTS, ObjectSink, ObjectSource
from ckptd.shared.system import root_lock
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.system.local_lock import LocalLock
from ckptd.shared.system.storage_seam import Entry

_UPLOAD_MEMORY = 128 << 20
"""The bytes that all uploads of a storage together have under way, as far as each has
at least two parts.
"""
_MOST_TO_COPY = 5 * 1000**3
"""The largest object that a store copies with one request."""
_CONFLICTS = 5
_CONFLICT_SECONDS = 0.2


class _Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The object `.ckptd/capabilities.json` (FORMAT.md, section 6)."""

    creates_once: bool


_decoder = msgspec.json.Decoder(_Capabilities)
_CAPABILITIES = f"{names.CONTROL}/{names.CAPABILITIES}"
_MOST_OF_CAPABILITIES = 4096


class ObjectStorage:
    """The objects of one bucket below a prefix.

    `digest` names the root in the names of local files.
    """

    head_last = False
    shares_links = False

    def __init__(self, bucket: Bucket, digest: str) -> None:
        self._bucket, self._digest = bucket, digest
        self._leases = Leases(bucket, names.CONTROL)
        self._uploads = 0
        self._lock = threading.Lock()
        # Tokens of claims that have failed, and may be there nevertheless.
        self._unsure: dict[str, str] = {}

    @functools.cached_property
    def creates_once(self) -> bool:
        """True if the store creates an object for only one of several callers.

        This is measured once, and remembered in the root.
        """
        try:
            return _decoder.decode(
                self._bucket.get(_CAPABILITIES, _MOST_OF_CAPABILITIES)
            ).creates_once
        except (FileNotFoundError, msgspec.DecodeError):
            once = self.measure()
        self._bucket.put(
            _CAPABILITIES, msgspec.json.encode(_Capabilities(creates_once=once)), create=False
        )
        return once

    def measure(self) -> bool:
        """Return True if the store creates an object for only one of several callers
        now, whatever the root remembers. Raises OSError.
        """
        return object_probe.creates_once(self._bucket)

    def copies(self) -> bool:
        """Return True if the store makes copies of objects, as `link` needs them, now.

        Raises OSError.
        """
        return object_probe.copies(self._bucket)

    def where(self, name: str = "") -> str:
        return self._bucket.where(name)

    def children(self, prefix: str) -> list[Entry]:
        prefixes, objects = self._bucket.children(prefix)
        found = {Entry(name.rstrip("/").rpartition("/")[2], True) for name in prefixes}
        found |= {
            Entry(name, False) for entry in objects if (name := entry.name.rpartition("/")[2])
        }
        return sorted(found)

    def refresh_listing(self, prefix: str, file: str) -> None:
        pass  # a store lists what is there

    def exists(self, name: str) -> bool:
        try:
            self._bucket.head(name)
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> ObjectSource:
        return ObjectSource(self._bucket, name)

    def create(self, name: str, size: int, head: bytes | None = None) -> ObjectSink:
        """Begin an upload.

        The name must be one that no other process uses: an object of this name would be
        replaced.
        """
        assert head is not None
        part_size = max(LEAST_PART, -(-size // MOST_PARTS))
        with self._lock:
            self._uploads += 1
            at_once = max(2, _UPLOAD_MEMORY // (part_size * self._uploads))
        return ObjectSink(self._bucket, name, head, part_size, at_once, self._ended)

    def _ended(self) -> None:
        with self._lock:
            self._uploads -= 1

    def link(self, name: str, new: str, size: int) -> bool:
        """Have the store make a copy, which takes room but no time on the network."""
        if size > _MOST_TO_COPY:
            return False
        if self.exists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        try:
            if self._bucket.head(name).size != size:
                return False
            self._bucket.copy(name, new)
            return self._bucket.head(new).size == size
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                # The store may still carry the copy out, so that the name must not be
                # used for anything else.
                raise
            return False

    def publish(
        self,
        name: str,
        data: bytes,
        *,
        replace: bool,
        by: str = "",
        points: str | None = None,
        durable: bool = True,
    ) -> None:
        """An object that has these bytes already counts as published: the store may
        have lost the answer to an earlier request.
        """
        if points:
            if failpoint(f"{points}.written"):
                raise OSError(errno.EIO, "short write")
            failpoint(f"{points}.synced")
        if replace:
            self._bucket.put(name, data, create=False)
        else:
            self._create_small(name, data)
        if points:
            failpoint(f"{points}.renamed")

    def _create_small(self, name: str, data: bytes) -> None:
        for _ in range(_CONFLICTS):
            with suppress(FileExistsError):
                if not self.creates_once and self.exists(name):
                    raise FileExistsError
                self._bucket.put(name, data, create=self.creates_once)
                return
            try:
                if self._bucket.get(name, max(len(data), 1)) == data:
                    return
            except (
                FileNotFoundError
            ):  # the store refused two requests that met, and neither was carried out
                time.sleep(_CONFLICT_SECONDS)
                continue
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        raise RemoteError(
            errno.EIO,
            "the store refuses to create the object, because of a conflict each time",
            name,
        )

    def delete(self, prefix: str, files: list[str], *, unpublished: str = "") -> None:
        self._bucket.delete([f"{prefix}/{file}" if prefix else file for file in files])

    def remove(self, prefix: str) -> bool:
        prefixes, objects = self._bucket.children(prefix)
        return not objects and all(self.remove(inner.rstrip("/")) for inner in prefixes)

    def claim(self, name: str) -> bool:
        """Create an object with a random token, by which a repeated request recognises
        its own.

        Where the store creates nothing exclusively, the token is part of the name, and
        the claim counts if it is then the only one: of several callers at the same
        time, all may fail.
        """
        with self._lock:
            token = self._unsure.pop(name, None) or names.new_nonce().hex()
        try:
            return self._claim(name, token)
        except OSError:
            with self._lock:
                self._unsure[name] = token
            raise

    def _claim(self, name: str, token: str) -> bool:
        if self.creates_once:
            try:
                self._create_small(name, token.encode())
            except FileExistsError:
                return False
            return True
        prefix, _, file = name.rpartition("/")
        if self._claims(prefix, file) - {f"{file}.{token}"}:
            return False
        self._bucket.put(f"{name}.{token}", token.encode(), create=False)
        return self._claims(prefix, file) == {f"{file}.{token}"}

    def _claims(self, prefix: str, file: str) -> set[str]:
        return {
            entry.name
            for entry in self.children(prefix)
            if entry.name == file or entry.name.startswith(f"{file}.")
        }

    # -- leases

    def lease(self, name: str, called: str) -> ObjectSource:
        """Put a lease, and open the object.

        A reader without the right to write gets no lease, and may find the object gone
        at any time.
        """
        held = self._leases.lease(name, called)
        try:
            return ObjectSource(
                self._bucket, name, held.close if held is not None else lambda: None
            )
        except BaseException:
            if held is not None:
                held.close()
            raise

    def exclude(self, name: str, called: str) -> AbstractContextManager[None]:
        return self._leases.exclude(name, called)

    def holders(self, name: str, called: str) -> str:
        return self._leases.holders(name)

    # -- the root

    def serve(self, host: str) -> Descriptor:
        """Check that the bucket can be written, and lock the root on this machine.

        End the deletions of a daemon that died here.

        Raises Busy, StorageError.
        """
        with storage_errors(f"use {self.where()} as the root for checkpoints"):
            lock = LocalLock.take(root_lock.object_lock(self._digest, host))
            if lock is None:
                raise Busy(
                    f"another ckptd already serves {self.where()}: use that one, or stop it first"
                )
            try:
                object_probe.check(self._bucket)
                self._leases.end_marks(host)
            except BaseException:
                lock.close()
                raise
        return lock

    def is_lost(self) -> None:
        return None

    def take_journal(self, host: str, target: Path) -> None:
        pass  # no version of ckptd has kept a journal in an object store

    def refusal(self, prefix: str) -> str:
        return ""

    def exclusive_bytes(self, prefixes: Collection[str]) -> int:
        """Every object has one name: links are copies."""
        return sum(entry.size for prefix in prefixes for entry in self._bucket.children(prefix)[1])

    def free(self) -> int | None:
        return None
