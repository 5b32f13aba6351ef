"""The storage seam: named objects below a root, and the operations that every kind of
storage offers on them.

A name is a path like "gpt/step-00001000.a0002/manifest.json"; `names.py` makes and
checks its components. A prefix is the part of a name before a slash, and "" is the
root. Every operation is a blocking call that any thread may make. Operations raise
OSError, with FileNotFoundError and FileExistsError as usual; the callers translate it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ckptd.shared.system.descriptor import Descriptor

if TYPE_CHECKING:  # a reader of files needs this module where there is no POSIX file system
    from ckptd.shared.system.fs import Buffer


class Entry(NamedTuple):
    """One child of a prefix. `nested` is True if the child is itself a prefix."""

    name: str
    nested: bool


class Closable(Protocol):
    """Something that is held until `close`. `close` may be called once."""

    def close(self) -> None: ...


class Source(Closable, Protocol):
    """An object that is open for reading. Several threads may read it at once."""

    remote: bool
    """True if each read is a request over the network: many should be made at once,
    each for as much as possible.
    """

    @property
    def size(self) -> int:
        """The size of the object in bytes."""

    def read(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`.

        Return the number of bytes read, which is smaller than the buffer only at the
        end of the object.
        """

    def view(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset`, or fewer at the end of the object.

        A remote object is asked for them once.
        """


class Sink(Protocol):
    """A new object that is being written.

    Nobody may rely on the object before `finish` has returned.

    All data must lie in page-aligned memory, and its length must be a multiple of
    `ALIGN` bytes. Calls raise OSError.
    """

    @property
    def size(self) -> int:
        """The size of the object so far in bytes, including its first `ALIGN` bytes."""

    def append(self, data: Buffer) -> int:
        """Write `data` behind everything that has been appended, and return its offset.

        Several threads may call this at once.
        """

    def finish(self, head: bytes | None = None) -> None:
        """Make the object durable under its name.

        `head` is for its first `ALIGN` bytes, unless it was given when the sink was
        created.
        """

    def discard(self) -> None:
        """Delete the object, whether it is finished or not. Errors are ignored."""


class Creator(NamedTuple):
    """The way in which the files of one checkpoint are created.

    create: takes the name of a file, its expected size in bytes, and its first `ALIGN`
    bytes if they are known, as `Storage.create` does. head_last: as in `Storage`.
    """

    create: Callable[[str, int, bytes | None], Sink]
    head_last: bool


class Storage(Protocol):
    """The operations of a storage.

    An operation that changes something is durable when it returns.
    """

    head_last: bool
    """True if the first `ALIGN` bytes of an object can be written last."""
    shares_links: bool
    """True if an object with several names takes room once, and False if `link` copies."""

    @property
    def creates_once(self) -> bool:
        """True if `publish` without `replace` succeeds for only one of several callers,
        which jobs of several nodes need.
        """

    def where(self, name: str = "") -> str:
        """Return the location of an object or a prefix, as text for messages."""

    def children(self, prefix: str) -> list[Entry]:
        """Return the children of a prefix, sorted by name.

        Return an empty list if the prefix does not exist. The root must exist.

        Raises NotADirectoryError if something else, such as a file or a link, has the
        name of the prefix.
        """

    def refresh_listing(self, prefix: str, file: str) -> None:
        """Make sure that the next `children` of a prefix returns everything that was
        published before, also by other machines.

        A network file system may list a directory from its cache, but not after this
        machine has changed it. file: a name for an object that may be created and
        deleted for this. Afterwards the prefix exists, where prefixes do.
        """

    def exists(self, name: str) -> bool:
        """Return True if there is an object of this name, intact or damaged."""

    def open(self, name: str) -> Source:
        """Open an object for reading.

        Raises FileNotFoundError, or IntegrityError if it is not a regular file.
        """

    def lease(self, name: str, called: str) -> Source:
        """Open an object as `open` does, and keep it from being deleted until the
        source is closed.

        called: the name of the object in the text of an error. Raises Busy if a deleter
        holds it, or if it is replaced again and again.
        """

    def exclude(self, name: str, called: str) -> AbstractContextManager[None]:
        """Context manager.

        While it is held, no process can lease the object. It does nothing if no reader
        could open the object.

        Raises Busy if a process has leased it, or if this user may not delete it.
        """

    def holders(self, name: str, called: str) -> str:
        """Return the processes that have leased the object, as text, or "" if there are
        none. Raises Busy as `exclude` does.
        """

    def create(self, name: str, size: int, head: bytes | None = None) -> Sink:
        """Begin a new object.

        Raises FileExistsError if the name is taken, which an object store may find only
        when the object is finished.

        size: the expected size in bytes. head: the first `ALIGN` bytes of the object.
        Where `head_last` is True it may be left out, and is then given to `finish`.
        """

    def link(self, name: str, new: str, size: int) -> bool:
        """Give an object of `size` bytes the second name `new`, or make a copy of this
        name. Each name can be deleted without the other.

        The new name is durable once an object has been finished that was created later,
        under the same prefix.

        Return False if there is no such object of that size, or if the storage cannot
        do it. Raises FileExistsError if `new` is taken.
        """

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
        """Make a small object appear whole, or not at all.

        by: a token of the caller, needed if several processes may publish the name at
        once. points: the prefix of the failpoints to pass. durable: False if the object
        may be lost when the machine loses its power, which saves the time of a sync
        where there is one. Raises FileExistsError if the name is taken and `replace` is
        False.
        """

    def delete(self, prefix: str, files: list[str], *, unpublished: str = "") -> None:
        """Delete those of the objects that exist.

        Afterwards everything that a listing of the prefix shows is durable.

        files: children of the prefix. unpublished: the name of an object whose
        unfinished publications are deleted as well.
        """

    def remove(self, prefix: str) -> bool:
        """Remove a prefix that has no objects left.

        Return False if there are objects left.
        """

    def claim(self, name: str) -> bool:
        """Create an empty object. Return False if the name is taken.

        A caller whose claim has raised OSError may repeat it: the object that it has
        created counts as its own.
        """

    def serve(self, host: str) -> Descriptor:
        """Prepare the root for a daemon of this host, and lock it until the result is
        closed.

        Raises Busy if another daemon of this host serves the root, and StorageError if
        the root cannot be used or another user owns it.
        """

    def is_lost(self) -> bool | None:
        """Return True if the root that `serve` has locked is no longer at its place: it
        was deleted, moved or replaced.

        Return None if that cannot be told, for example while a mount does not answer,
        and before `serve`.
        """

    def take_journal(self, host: str, target: Path) -> None:
        """Move the journal that an earlier version of ckptd kept in the root to the
        local directory `target`, if there is one.
        """

    def refusal(self, prefix: str) -> str:
        """Return the reason why checkpoints below the prefix cannot be trusted, or ""
        if they can.
        """

    def exclusive_bytes(self, prefixes: Collection[str]) -> int:
        """Return the bytes of the objects below these prefixes, without those that have
        a name elsewhere too: about what deleting them all makes free.
        """

    def free(self) -> int | None:
        """Return the number of bytes that are free, or None if it is unknown."""


def read_whole(source: Source, limit: int, name: str) -> bytes:
    """Return the content of an object of at most `limit` bytes, and close it.

    Raises OSError (EFBIG if the object is larger).
    """
    try:
        if source.size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", name)
        data = bytearray(source.size)
        return bytes(data[: source.read(memoryview(data), 0)])
    finally:
        source.close()
