"""Reads and writes single objects of an object store, as sources and sinks."""

from __future__ import annotations

import errno
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain

from ckptd.shared.errors import RemoteError
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.system.fs import Buffer

FIRST = 64 << 10
"""The bytes of an object that are read when it is opened: small objects take one
request, and large ones show their header in it.
"""
LEAST_PART = 8 << 20
MOST_PARTS = 9_000
"""A multipart upload has at most 10,000 parts. The size of an object is only estimated
when its upload begins.
"""


class ObjectSource:
    """An object that is open for reading. `closed` is called once at its end."""

    remote = True

    def __init__(
        self, bucket: Bucket, name: str, closed: Callable[[], None] = lambda: None
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._closed = closed
        found, self._first = bucket.open(name, FIRST)
        self.size = found.size

    def read(self, buffer: memoryview, offset: int) -> int:
        found = self.view(offset, len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def view(self, offset: int, length: int) -> memoryview:
        length = max(0, min(length, self.size - offset))
        if offset + length <= len(self._first):
            return memoryview(self._first)[offset : offset + length]
        return self._bucket.read(self._name, offset, length) if length else memoryview(b"")

    def close(self) -> None:
        self._closed()


class ObjectSink:
    """An object that is being uploaded, in the order in which its data is appended.

    Nobody sees it before `finish`.

    A thread uploads parts of `part_size` bytes, `at_once` at the same time, and
    `append` waits while so many are under way. `ended` is called once, when the upload
    has ended.
    """

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        head: bytes,
        part_size: int,
        at_once: int,
        ended: Callable[[], None],
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._part_size = part_size
        self._at_once = at_once
        self._ended = ended
        self._pieces: queue.Queue[bytes | None] = queue.Queue(1)  # None is the end
        self._lock = threading.Lock()
        self._discarded = False
        self._error: Exception | None = None
        self.size = len(head)
        self._head = head
        self._thread = threading.Thread(target=self._upload, name="ckptd-write-upload", daemon=True)
        self._thread.start()

    def append(self, data: Buffer) -> int:
        with self._lock:
            offset, self.size = self.size, self.size + len(data)
            self._send(bytes(data))  # a copy, because the caller uses its buffer again
        return offset

    def finish(self, head: bytes | None = None) -> None:
        self._send(None)
        self._thread.join()
        if self._error is not None:
            self._raise_unless_written(self._error)

    def _raise_unless_written(self, error: Exception) -> None:
        """Raise the error of the upload, unless only the answer to its last request was
        lost: no other process uses this name.
        """
        if isinstance(error, OSError) and error.errno in (
            errno.EIO,
            errno.ETIMEDOUT,
            errno.EHOSTUNREACH,
            errno.ENOENT,
        ):
            with suppress(OSError):
                if self._bucket.head(self._name).size == self.size:
                    return
        raise error

    def discard(self) -> None:
        self._discarded = True
        with suppress(Exception):  # the upload has failed, and has been aborted
            self._send(None)
        if sys.is_finalizing():
            return  # threads no longer run, and cannot be waited for
        self._thread.join()
        with suppress(OSError):  # left to a later sweep: by the daemon, from its journal
            self._bucket.delete([self._name])

    def _send(self, piece: bytes | None) -> None:
        """Hand a piece to the thread. Raises the error of the upload if that has ended."""
        while self._thread.is_alive():
            try:
                self._pieces.put(piece, timeout=0.5)
                return
            except queue.Full:
                continue
        if piece is not None and self._error is not None:
            raise self._error

    def _upload(self) -> None:
        try:
            pieces, begun, length = self._all_pieces(), list[bytes](), 0
            while length < self._part_size and (piece := next(pieces, None)) is not None:
                begun.append(piece)
                length += len(piece)
            if length < self._part_size:
                # One request instead of three.
                self._bucket.put(self._name, b"".join(begun), create=False)
            else:
                self._bucket.upload(
                    self._name, chain(begun, pieces), self._part_size, self._at_once
                )
        except Exception as error:
            self._error = error
        except BaseException as error:
            self._error = RemoteError(
                errno.EIO, f"the upload has ended with {type(error).__name__}", self._name
            )
        finally:
            self._ended()

    def _all_pieces(self) -> Iterator[bytes]:
        yield self._head
        while (piece := self._pieces.get()) is not None:
            yield piece
        if self._discarded:
            # Obstore then aborts the upload.
            raise InterruptedError(errno.EINTR, "the object was discarded", self._name)
