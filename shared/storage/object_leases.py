"""Keeps readers and deleters of a checkpoint apart in an object store, which has no locks
(FORMAT.md, section 6).

A reader holds a lease, and a deleter a mark. Each is an object that its holder writes
again and again. A reader puts its lease before it looks for marks, and a deleter puts
its mark before it looks for leases. So if both come at the same time, at least one of
them sees the object of the other, and gives way. If the version of an object has not
changed for `SECONDS` by the clock of the observer, its holder is taken for dead.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ckptd.shared import names
from ckptd.shared.errors import Busy
from ckptd.shared.storage import locks
from ckptd.shared.storage.bucket import Bucket, ObjectMeta
from ckptd.shared.system import machine

SECONDS = 25.0
"""The time without a new version after which the holder of a lease or a mark is taken
for dead.
"""
RENEWAL_SECONDS = 6.0
RETRY_SECONDS = 0.2
_MOST = 300
"""The most bytes that are read of a lease or a mark."""


class Leases:
    """The leases and marks of one bucket.

    `directory` is the prefix below which they are kept.
    """

    def __init__(
        self, bucket: Bucket, directory: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
        self._directory = directory
        self._clock = clock
        # By object of another process: its version, and when that was first seen.
        self._seen: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def lease(self, name: str, called: str) -> Held | None:
        """Return a lease on an object, or None if this process may not write to the store,
        or the store is full. Without a lease, the object may be deleted at any time.

        called: the words for the object in messages, such as "checkpoint gpt/best.a0001".

        If the object is marked for deletion, wait up to `locks.SECONDS` for the end of
        the mark. Raises Busy if the mark is still there.
        """
        held = Held(self._bucket, self._place(names.LEASES, name))
        try:
            held.put()
        except OSError as error:
            if isinstance(error, PermissionError) or error.errno == errno.ENOSPC:
                return None
            raise
        try:
            until = time.monotonic() + locks.SECONDS
            while marks := self._alive(names.RETIRING, name):
                if time.monotonic() > until:
                    who = self._holder(marks[0].name)
                    raise Busy(
                        f"{called} cannot be read now, because {who} is deleting it, or checks "
                        f"whether it may be deleted; try again later"
                    )
                time.sleep(RETRY_SECONDS)
        except BaseException:
            held.close()
            raise
        held.keep()
        return held

    @contextmanager
    def exclude(self, name: str, called: str) -> Iterator[None]:
        """Context manager. While it is held, the object is marked for deletion, and no
        reader can begin to read it.

        Raises Busy if the object has a lease, or another mark.
        """
        mark = Held(self._bucket, self._place(names.RETIRING, name))
        try:
            mark.put()
        except OSError as error:
            # A full store takes no new lease either, so no reader can begin. Only a
            # deletion makes room in it.
            if error.errno != errno.ENOSPC:
                raise
        try:
            if found := self._alive(names.RETIRING, name, but=mark.name) or self._alive(
                names.LEASES, name
            ):
                raise Busy(f"{called} is being read, or deleted, by {self._holder(found[0].name)}")
            mark.keep()
            yield
        finally:
            mark.close()

    def holders(self, name: str) -> str:
        """Return the processes that hold a lease on an object, as text, or "" if there are
        none.

        This waits until a lease is renewed, or all of them are found dead.
        """
        first = dict[str, str]()
        while found := self._alive(names.LEASES, name):
            if renewed := [
                lease.name
                for lease in found
                if first.setdefault(lease.name, lease.version) != lease.version
            ]:
                return ", ".join(sorted(map(self._holder, renewed)))
            time.sleep(RETRY_SECONDS)
        return ""

    def end_marks(self, host: str) -> None:
        """Delete the marks of the deleters of this host.

        The caller must hold the lock of the root on this host: no deleter is then alive
        there.
        """
        prefix = f"{self._directory}/{names.RETIRING}"
        self._bucket.delete(
            [
                mark
                for mark in self._bucket.below(prefix)
                if self._holder(mark).endswith(f" on {host}")
            ]
        )

    def _place(self, kind: str, name: str) -> str:
        return f"{self._directory}/{kind}/{name}/{names.new_nonce().hex()}"

    def _alive(self, kind: str, name: str, but: str = "") -> list[ObjectMeta]:
        """Return the leases or the marks on an object whose holders are alive, and delete
        the others.

        kind: `names.LEASES` or `names.RETIRING`. but: a lease or mark to leave out.
        """
        prefix = f"{self._directory}/{kind}/{name}"
        objects = [found for found in self._bucket.children(prefix)[1] if found.name != but]
        young = [found for found in objects if self._is_young(found)]
        self._bucket.delete([found.name for found in objects if found not in young])
        with self._lock:
            for gone in [seen for seen in self._seen if seen.startswith(f"{prefix}/")]:
                if all(found.name != gone for found in young):
                    del self._seen[gone]
        return young

    def _is_young(self, found: ObjectMeta) -> bool:
        """Return True unless the object has had its present version for `SECONDS`."""
        with self._lock:
            known, since = self._seen.get(found.name, ("", 0.0))
            if known != found.version:
                since = self._clock()
                self._seen[found.name] = found.version, since
            return self._clock() - since < SECONDS

    def _holder(self, name: str) -> str:
        try:
            text = self._bucket.get(name, _MOST).decode("ascii", "replace")
        except OSError:
            return "another process"
        host, pid, *_ = [*text.split(" "), "", ""]
        return (
            f"process {pid} on {host}"
            if names.is_name(host) and pid.isdigit()
            else "another process"
        )


class Held:
    """A lease or a mark of this process. After `keep`, a thread renews it until `close`."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket, self.name = bucket, name
        self._pid = os.getpid()
        self._count = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self) -> None:
        self._count += 1
        self._bucket.put(
            self.name, f"{machine.host()} {self._pid} {self._count}".encode(), create=False
        )

    def keep(self) -> None:
        """Start the thread that writes the object again every `RENEWAL_SECONDS`."""
        self._thread = threading.Thread(target=self._renew, name="ckptd-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._closed.wait(RENEWAL_SECONDS):
            with suppress(OSError):  # the next renewal may succeed
                self.put()

    def close(self) -> None:
        """Delete the object. Does nothing in a forked child, because the object belongs to
        its parent.
        """
        if self._pid != os.getpid():
            return
        self._closed.set()
        # While the interpreter shuts down, threads no longer run.
        if self._thread is not None and not sys.is_finalizing():
            self._thread.join()  # a renewal under way would create the object again
        with suppress(OSError):  # otherwise its holder is taken for dead later
            self._bucket.delete([self.name])
