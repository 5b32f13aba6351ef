"""Keeps objects in the memory of this process, as an object store would: without renames, appends and kernel locks. For tests."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptd.shared.errors import Busy
from ckptd.shared.fs import Buffer
from ckptd.shared.storage.protocol import Entry


class MemoryStorage:
    """The objects of one root, which end with this instance. `fail` may be set to a function that raises OSError for an operation.

    `fail(operation, name)` is called with the name of a method and of an object or prefix. This is done by `children`, `exists`, `open`,
    `create`, `link`, `publish`, `delete`, `remove`, `claim`, `lease` and `exclude`, and by `append` and `finish` of a sink.
    """

    head_last = False

    def __init__(self, root: str = "memory:") -> None:
        self._root = root
        self._lock = threading.RLock()
        self._objects: dict[str, bytes] = {}
        self._leases: Counter[str] = Counter()
        self._excluded: set[str] = set()
        self._served: set[str] = set()

    def fail(self, operation: str, name: str) -> None:
        """Do nothing. A test replaces this function with one that raises OSError where an operation is to fail."""

    def where(self, name: str = "") -> str:
        return f"{self._root}/{name}" if name else self._root

    def children(self, prefix: str) -> list[Entry]:
        self.fail("children", prefix)
        start = f"{prefix}/" if prefix else ""
        with self._lock:
            below = [name.removeprefix(start).partition("/") for name in self._objects if name.startswith(start)]
        return sorted({Entry(child, bool(slash)) for child, slash, _ in below})

    def exists(self, name: str) -> bool:
        self.fail("exists", name)
        return name in self._objects

    def open(self, name: str) -> MemorySource:
        self.fail("open", name)
        return MemorySource(self._read(name), lambda: None)

    def _read(self, name: str) -> bytes:
        try:
            return self._objects[name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None

    def create(self, name: str, size: int, head: bytes | None = None) -> MemorySink:
        self.fail("create", name)
        assert head is not None
        return MemorySink(self, name, head)

    def link(self, name: str, new: str, size: int) -> bool:
        self.fail("link", new)
        with self._lock:
            found = self._objects.get(name)
            if found is None or len(found) != size:
                return False
            self._put(new, found, replace=False)
        return True

    def publish(self, name: str, data: bytes, *, replace: bool, by: str = "", points: str | None = None) -> None:
        self.fail("publish", name)
        self._put(name, data, replace=replace)

    def _put(self, name: str, data: bytes, *, replace: bool) -> None:
        with self._lock:
            if name in self._objects and not replace:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            self._objects[name] = data

    def delete(self, prefix: str, files: list[str], *, unpublished: str = "") -> None:
        self.fail("delete", prefix)
        with self._lock:
            for file in files:
                self._objects.pop(f"{prefix}/{file}" if prefix else file, None)

    def remove(self, prefix: str) -> bool:
        self.fail("remove", prefix)
        return not self.children(prefix)

    def claim(self, name: str) -> bool:
        self.fail("claim", name)
        try:
            self._put(name, b"", replace=False)
        except FileExistsError:
            return False
        return True

    # -- leases

    def lease(self, name: str, called: str) -> MemorySource:
        self.fail("lease", name)
        with self._lock:
            data = self._read(name)
            if name in self._excluded:
                raise Busy(f"{called} cannot be read now: it has been locked for deletion")
            self._leases[name] += 1
        return MemorySource(data, lambda: self._return(name))

    def _return(self, name: str) -> None:
        with self._lock:
            self._leases[name] -= 1

    @contextmanager
    def exclude(self, name: str, called: str) -> Iterator[None]:
        self.fail("exclude", name)
        with self._lock:
            absent = name not in self._objects
            if not absent:
                if self._leases[name] or name in self._excluded:
                    raise Busy(f"{called} is being read, or deleted")
                self._excluded.add(name)
        try:
            yield
        finally:
            if not absent:
                self._excluded.discard(name)

    def holders(self, name: str, called: str) -> str:
        return f"{self._leases[name]} readers in this process" if self._leases[name] else ""

    # -- the root

    def serve(self, host: str) -> MemorySource:
        with self._lock:
            if host in self._served:
                raise Busy(f"another ckptd already serves {self._root}")
            self._served.add(host)
        return MemorySource(b"", lambda: self._served.discard(host))

    def take_journal(self, host: str, target: Path) -> None:
        pass  # earlier versions kept no journal here

    def refusal(self, prefix: str) -> str:
        return ""

    def is_lost(self) -> bool:
        return False

    def free(self) -> int | None:
        return None


class MemorySource:
    """An object as it was when it was opened. Deleting or replacing the object does not change it."""

    remote = False

    def __init__(self, data: bytes, closed: Callable[[], None]) -> None:
        self._data, self._closed = data, closed
        self.size = len(data)

    def read(self, buffer: memoryview, offset: int) -> int:
        found = self._data[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def view(self, offset: int, length: int) -> memoryview:
        return memoryview(self._data)[offset : offset + length]

    def close(self) -> None:
        self._closed()


class MemorySink:
    """An object that nobody sees before `finish`."""

    def __init__(self, storage: MemoryStorage, name: str, head: bytes) -> None:
        self._storage, self._name = storage, name
        self._data = bytearray(head)
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return len(self._data)

    def append(self, data: Buffer) -> int:
        self._storage.fail("append", self._name)
        with self._lock:
            offset = len(self._data)
            self._data += data
        return offset

    def finish(self, head: bytes | None = None) -> None:
        self._storage.fail("finish", self._name)
        self._storage._put(self._name, bytes(self._data), replace=False)

    def discard(self) -> None:
        self._storage._objects.pop(self._name, None)
