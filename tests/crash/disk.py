"""Models what a power cut may leave of a sequence of file operations: everything that
POSIX allows, and nothing else.

`Recorder` does the operations on the real file system and lists them. `Disk` follows
the list, and keeps synced data apart from data that is only in the page cache.
`Disk.after_cut` returns the tree that is found after a power cut, for one legal fate of
each pending change:

* a write is lost, whole or torn: of a torn write, any of its 512-byte sectors are
  written, and the others keep the old data, or zeros beyond the old end;
* a file may have its new length with or without its new data;
* any combination of the pending changes of a directory may be lost: a sync of a file
  says nothing about its name.

A change is durable once an fsync or fdatasync of its file, or an fsync of its
directory, has returned. The page cache survives the death of a process: `Disk.cached`
is the tree that the next process sees, with the same changes still pending.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ckptd.shared.system.fs import Buffer, PosixFileSystem

SECTOR = 512
TOP = 0
"""The node of the directory in which the root is made. It is durable, but its entries
need not be.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    node: the file or directory that it changes. name: the entry in that directory.
    other: the new node or the new name.
    """

    kind: str
    node: int
    name: str = ""
    other: int | str = -1
    offset: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.kind} {self.name or self.node}" + (
            f" [{self.offset}:{self.offset + len(self.data)}]" if self.data else ""
        )


Note = tuple[str, Any]
"""A promise that was made between two operations."""
Tree = dict[str, "tuple[int, bytes | Tree]"]
"""Maps names to nodes and their contents."""


class Recorder(PosixFileSystem):
    """A file system that lists the operations below `top`.

    `before` is called with each step before it is done, and may raise OSError.
    """

    def __init__(
        self, top: Path, disk: Disk, before: Callable[[Step], None] = lambda step: None
    ) -> None:
        """Fill the empty directory `top` with the tree that the next process would see."""
        self.steps: list[Step] = []
        self.notes: list[tuple[int, Note]] = []
        self._before = before
        self._lock = threading.Lock()
        self._nodes = lay(disk.cached(), top)
        self._next = disk.nodes
        self._device = os.stat(top).st_dev

    def note(self, what: str, value: Any) -> None:
        with self._lock:
            self.notes.append((len(self.steps), (what, value)))

    def _node(self, fd: int) -> int:
        found = os.fstat(fd)
        return self._nodes.get(found.st_ino, -1) if found.st_dev == self._device else -1

    def _new(self, fd: int) -> int:
        self._nodes[os.fstat(fd).st_ino] = node = self._next
        self._next += 1
        return node

    def _step(self, step: Step, act: Callable[[], Any]) -> Any:
        if step.node < 0:
            return act()
        with self._lock:
            self._before(step)
            result = act()
            self.steps.append(step)
            return result

    def make_directory(self, name: str, directory: int) -> bool:
        parent = self._node(directory)
        with self._lock:
            if parent >= 0:
                self._before(Step("mkdir", parent, name))
            made = super().make_directory(name, directory)
            if made and parent >= 0:
                fd = self.open_directory(name, directory)
                self.steps.append(Step("mkdir", parent, name, self._new(fd)))
                os.close(fd)
        return made

    def create(self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666) -> int:
        parent = self._node(directory)
        with self._lock:
            if parent >= 0:
                self._before(Step("create", parent, name))
            fd = super().create(name, directory, direct=direct, mode=mode)
            if parent >= 0:
                self.steps.append(Step("create", parent, name, self._new(fd)))
        return fd

    def allocate(self, fd: int, length: int) -> None:
        self._step(
            Step("allocate", self._node(fd), offset=length),
            lambda: super(Recorder, self).allocate(fd, length),
        )

    def write(self, fd: int, data: Buffer, offset: int) -> None:
        node = self._node(fd)
        held = bytes(memoryview(data)) if node >= 0 else b""
        self._step(
            Step("write", node, offset=offset, data=held),
            lambda: super(Recorder, self).write(fd, data, offset),
        )

    def truncate(self, fd: int, length: int) -> None:
        self._step(
            Step("truncate", self._node(fd), offset=length),
            lambda: super(Recorder, self).truncate(fd, length),
        )

    def sync(self, fd: int) -> None:
        self._step(Step("sync", self._node(fd)), lambda: super(Recorder, self).sync(fd))

    def sync_data(self, fd: int) -> None:
        self._step(Step("sync", self._node(fd)), lambda: super(Recorder, self).sync_data(fd))

    def sync_directory(self, directory: int) -> None:
        self._step(
            Step("sync directory", self._node(directory)),
            lambda: super(Recorder, self).sync_directory(directory),
        )

    def rename(self, old: str, new: str, directory: int, *, replace: bool) -> None:
        step = Step("rename", self._node(directory), old, new)
        self._step(step, lambda: super(Recorder, self).rename(old, new, directory, replace=replace))

    def link(self, old: str, old_directory: int, new: str, directory: int) -> None:
        """Record a link to a file that was made without this seam, such as the daemon's
        lock. Such a file is empty, so the link counts as a new empty file.
        """
        found = os.stat(old, dir_fd=old_directory, follow_symlinks=False)
        with self._lock:
            known = found.st_ino in self._nodes
            node = self._nodes.get(found.st_ino, self._next)
            step = Step("link" if known else "create", self._node(directory), new, node)
            if step.node >= 0:
                self._before(step)
            super().link(old, old_directory, new, directory)
            if step.node >= 0:
                self.steps.append(step)
                self._next += not known
                self._nodes[found.st_ino] = node

    def unlink(self, name: str, directory: int) -> None:
        self._step(
            Step("unlink", self._node(directory), name),
            lambda: super(Recorder, self).unlink(name, directory),
        )

    def remove_directory(self, name: str, directory: int) -> None:
        self._step(
            Step("rmdir", self._node(directory), name),
            lambda: super(Recorder, self).remove_directory(name, directory),
        )


@dataclass(slots=True)
class _File:
    synced: bytes = b""
    pending: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class _Directory:
    synced: dict[str, int] = field(default_factory=dict)
    pending: list[Step] = field(default_factory=list)


LOST, WHOLE, TORN, EMPTY = range(4)
FATES = ("lost", "whole", "torn", "empty")
Fate = Callable[[Step], "tuple[int, int]"]
"""Maps a pending change to its fate, and to a seed that selects the sectors of a torn
write. With EMPTY only the length changes.
"""


class Disk:
    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._directories: dict[int, _Directory] = {TOP: _Directory()}

    @property
    def nodes(self) -> int:
        """The number of nodes that have ever existed."""
        return 1 + max((*self._files, *self._directories))

    def copy(self) -> Disk:
        made = Disk()
        made._files = {
            node: _File(file.synced, list(file.pending)) for node, file in self._files.items()
        }
        made._directories = {
            node: _Directory(dict(found.synced), list(found.pending))
            for node, found in self._directories.items()
        }
        return made

    def do(self, step: Step) -> None:
        if step.kind == "sync":
            file = self._files[step.node]
            file.synced, file.pending = _written(file, lambda _: (WHOLE, 0)), []
        elif step.kind == "sync directory":
            directory = self._directories[step.node]
            directory.synced, directory.pending = _entries(directory, lambda _: (WHOLE, 0)), []
        elif step.kind in ("write", "truncate", "allocate"):
            self._files[step.node].pending.append(step)
        else:
            self._directories[step.node].pending.append(step)
            if step.kind == "create":
                self._files[_number(step.other)] = _File()
            elif step.kind == "mkdir":
                self._directories[_number(step.other)] = _Directory()

    def pending(self) -> list[Step]:
        """Return the changes that a power cut may lose, in files and directories that
        can still be reached.
        """
        reached: list[Step] = []
        seen = {TOP}
        waiting = [TOP]
        while waiting:
            node = waiting.pop()
            if node in self._files:
                reached += self._files[node].pending
                continue
            directory = self._directories[node]
            reached += directory.pending
            named = {
                _number(step.other)
                for step in directory.pending
                if step.kind in ("create", "mkdir", "link")
            }
            new = (set(directory.synced.values()) | named) - seen
            seen |= new
            waiting += sorted(new)
        return reached

    def after_cut(self, fate: Fate) -> Tree:
        return self._tree(TOP, fate)

    def cached(self) -> Tree:
        return self._tree(TOP, lambda _: (WHOLE, 0))

    def _tree(self, node: int, fate: Fate) -> Tree:
        return {
            name: (
                inner,
                _written(self._files[inner], fate)
                if inner in self._files
                else self._tree(inner, fate),
            )
            for name, inner in sorted(_entries(self._directories[node], fate).items())
        }


def _number(other: int | str) -> int:
    assert isinstance(other, int)
    return other


def _written(file: _File, fate: Fate) -> bytes:
    content = bytearray(file.synced)
    for step in file.pending:
        what, seed = fate(step)
        if what == LOST:
            continue
        if step.kind == "truncate":
            del content[step.offset :]
        end = step.offset + len(step.data)
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        if what == WHOLE:
            content[step.offset : end] = step.data
        elif what == TORN:
            chance = Random(seed)
            for at in range(step.offset // SECTOR * SECTOR, end, SECTOR):
                if chance.random() < 0.5:
                    first, last = max(at, step.offset), min(at + SECTOR, end)
                    content[first:last] = step.data[first - step.offset : last - step.offset]
    return bytes(content)


def _entries(directory: _Directory, fate: Fate) -> dict[str, int]:
    """Return the entries of a directory.

    A change that survives keeps its node, even if earlier changes of that node are
    lost.
    """
    found, cached = dict(directory.synced), dict(directory.synced)
    for step in directory.pending:
        kept = fate(step)[0] != LOST
        if step.kind in ("create", "mkdir", "link"):
            cached[step.name] = _number(step.other)
            if kept:
                found[step.name] = _number(step.other)
        elif step.kind == "rename":
            assert isinstance(step.other, str)
            if cached[step.name] == cached.get(step.other):
                continue  # both names are links to one file: rename(2) then does nothing
            cached[step.other] = node = cached.pop(step.name)
            if kept:
                found.pop(step.name, None)
                found[step.other] = node
        else:
            cached.pop(step.name)
            if kept:
                found.pop(step.name, None)
    return found


def lay(tree: Tree, where: Path) -> dict[int, int]:
    """Write this tree into an empty directory. Return the node of each inode."""
    made = {os.stat(where).st_ino: TOP}
    for name, (node, content) in tree.items():
        path = where / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.mkdir()
            made |= lay(content, path)
        made[os.stat(path).st_ino] = node
    return made


def every_fate(pending: list[Step]) -> Iterator[Fate]:
    """Yield all combinations of lost and whole changes.

    Then yield each write torn or empty, with all others lost or all others whole.
    """
    numbers = {id(step): number for number, step in enumerate(pending)}

    def of(fates: list[tuple[int, int]]) -> Fate:
        held = copy.copy(fates)
        return lambda step: held[numbers[id(step)]]

    for mask in range(1 << len(pending)):
        yield of([(WHOLE if mask >> number & 1 else LOST, 0) for number in range(len(pending))])
    for number, step in enumerate(pending):
        if step.kind in ("write", "allocate", "truncate"):
            for rest in (LOST, WHOLE):
                for seed in range(3):
                    fates = [(rest, 0)] * len(pending)
                    fates[number] = (TORN, seed) if seed else (EMPTY, 0)
                    yield of(fates)


def some_fate(chance: Random) -> Fate:
    """Return a random fate: mostly whole, mostly lost, or any mix."""
    known: dict[int, tuple[int, int]] = {}
    whole = chance.choice([0.1, 0.5, 0.9])

    def fate(step: Step) -> tuple[int, int]:
        if id(step) not in known:
            drawn = chance.random()
            torn = chance.choice([LOST, TORN, TORN, EMPTY])
            known[id(step)] = (WHOLE, 0) if drawn < whole else (torn, chance.getrandbits(32))
        return known[id(step)]

    return fate
