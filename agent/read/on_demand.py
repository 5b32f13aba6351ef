"""Reads checkpoints with a metadata object: a part is opened when a tensor in it is
first needed (FORMAT.md, section 10).
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter
from typing import Protocol, cast

from ckptd.agent.read.saved import Saved, Shard
from ckptd.shared.errors import IntegrityError, NotFound
from ckptd.shared.formats.metadata_object import MetadataReader, stored_places
from ckptd.shared.formats.part import ChunkSource
from ckptd.shared.formats.plan import BLOB, HIDDEN, Alias, ChunkRange, Described, Item, Plan
from ckptd.shared.formats.sharding import Box

OPENED_AT_ONCE = 16
"""The parts in an object store that are opened at the same time. Each takes several
requests.
"""


_form = attrgetter("dtype", "size", "sizes")


class OpenPart(ChunkSource, Protocol):
    """An open part, or what is read in place of one."""

    @property
    def name(self) -> str: ...

    def close(self) -> None: ...


class PartOnDemand:
    """The part of one rank as a `ChunkSource`.

    `open_part` opens and checks it, at the first call that needs it.

    Every call may raise the errors of `open_part`: IntegrityError, OSError.
    """

    def __init__(self, open_part: Callable[[], OpenPart], *, remote: bool) -> None:
        self.remote = remote
        self._open_part = open_part
        self._lock = threading.Lock()
        self._reader: OpenPart | None = None
        self._closed = False
        self._items: dict[tuple[str, tuple[int, ...]], Item] = {}
        self._aliases: dict[str, Alias] = {}
        self._bases: dict[str, Item] = {}

    @property
    def reader(self) -> OpenPart:
        if (known := self._reader) is not None:
            return known
        with self._lock:
            if self._reader is None:
                if self._closed:
                    raise OSError(errno.EBADF, "the checkpoint is closed")
                reader = self._open_part()
                self._items = {(item.fqn, item.offsets): item for item in reader.plan.items}
                self._aliases = {alias.fqn: alias for alias in reader.plan.aliases}
                bases = {alias.base for alias in reader.plan.aliases}
                self._bases = {item.fqn: item for item in reader.plan.items if item.fqn in bases}
                self._reader = reader
            return self._reader

    @property
    def plan(self) -> Plan:
        return self.reader.plan

    @property
    def values(self) -> tuple[int, int]:
        return self.reader.values

    @property
    def ranges(self) -> list[ChunkRange]:
        return self.reader.ranges

    def read_chunk(self, number: int, raw: memoryview) -> None:
        self.reader.read_chunk(number, raw)

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        return self.reader.read_pieces(number, pieces)

    def find(
        self, names: Sequence[str], entry: Described, place: Box | None
    ) -> list[tuple[Item, Alias | None]]:
        """Return the item at this place of each of these tensors, or of blobs if the
        place is None.

        For an alias, return the item that holds it, too.

        `entry` describes all of the tensors or blobs. Raises IntegrityError if the part
        has neither, or has another dtype or size.
        """
        reader, items, aliases = self.reader, self._items, self._aliases
        offsets, sizes = ((0,), None) if place is None else place
        wanted = (entry["dtype"], tuple(entry.get("size", ())))
        known = [items.get((fqn, offsets)) for fqn in names]
        if None not in known and set(map(_form, known)) == {(*wanted, sizes)}:
            return list(zip(cast(list[Item], known), repeat(None)))  # nearly always
        found = list[tuple[Item, Alias | None]]()
        for fqn, item in zip(names, known, strict=True):
            if item is not None and (
                _form(item) == (*wanted, sizes)
                if sizes is not None
                else item.dtype == entry["dtype"] == BLOB
            ):
                found.append((item, None))
                continue
            alias = aliases.get(fqn)
            if alias is None or (alias.dtype, alias.size, alias.size) != (*wanted, sizes):
                raise IntegrityError(
                    f"{reader.name} does not have {fqn!r} as the metadata of the checkpoint say"
                )
            found.append((self._bases[alias.base], alias))
        return found

    def close(self) -> None:
        """Close the part.

        Later reads raise OSError; the plan of a part that was open stays. May be called
        again.
        """
        with self._lock:
            closed, self._closed = self._closed, True
        if self._reader is not None and not closed:
            self._reader.close()


@dataclass(slots=True)
class SavedOnDemand(Saved):
    """The contents of a checkpoint whose metadata are in an object.

    `shards`, `aliases` and `blobs` have what has been asked for.

    parts: of all ranks, in their order. Any number of threads may ask at once.
    """

    metadata_reader: MetadataReader | None = None
    parts: Sequence[PartOnDemand] = ()
    _entries: dict[str, Described | None] = field(default_factory=dict)
    _all: bool = False
    _held: threading.RLock = field(default_factory=threading.RLock)

    def _entry(self, name: str) -> Described | None:
        with self._held:
            if name not in self._entries and not self._all:
                assert self.metadata_reader is not None
                # Those beside it are often asked for next.
                self._entries |= self.metadata_reader.entries_near(name)
                self._entries.setdefault(name, None)
            return self._entries.get(name)

    def _all_entries(self) -> dict[str, Described | None]:
        with self._held:
            if not self._all:
                assert self.metadata_reader is not None
                self._entries = dict(self.metadata_reader.entries())
                self._all = True
            return self._entries

    def names(self) -> list[str]:
        return [
            name
            for name, entry in self._all_entries().items()
            if entry is not None and entry["dtype"] != BLOB
        ]

    def __contains__(self, name: str) -> bool:
        entry = self._entry(name)
        return entry is not None and entry["dtype"] != BLOB and not name.startswith(HIDDEN)

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and size as the metadata say. No part is opened."""
        entry = self._entry(name)
        if entry is None or entry["dtype"] == BLOB:
            raise NotFound(
                f"no tensor {name!r}; the checkpoint has {len(self.names())}, such as "
                f"{', '.join(sorted(self.names())[:3])}"
            )
        return entry["dtype"], tuple(entry.get("size", ()))

    def blob_names(self) -> set[str]:
        return {
            name
            for name, entry in self._all_entries().items()
            if entry is not None and entry["dtype"] == BLOB
        }

    def check_all_whole(self) -> None:
        if any(part.remote for part in self.parts):
            with ThreadPoolExecutor(OPENED_AT_ONCE, "ckptd-open") as threads:
                list(threads.map(lambda part: part.reader, self.parts))
        self.ensure_all(list(self._all_entries()))
        Saved.check_all_whole(self)

    def ensure_all(self, names: Collection[str]) -> None:
        """Open the parts that have these tensors and blobs.

        Raises IntegrityError if one of them does not have its tensor or blob, OSError.
        """
        if all(map(self.shards.__contains__, names)):
            return
        with self._held:
            alike: dict[int, tuple[Described, list[str]]] = {}
            for name in dict.fromkeys(names):
                if name in self.shards or name in self.aliases or name in self.blobs:
                    continue
                if (entry := self._entries.get(name) or self._entry(name)) is not None:
                    alike.setdefault(id(entry), (entry, []))[1].append(name)
            for entry, described in alike.values():
                self._find(described, entry)

    def _find(self, names: list[str], entry: Described) -> None:
        """Find tensors or blobs that are described by one entry."""
        shards: dict[str, list[Shard]] = {name: [] for name in names}
        meshes = self.metadata_reader.meshes if self.metadata_reader else ()
        aliases = dict[str, tuple[Shard, Alias]]()
        for place, rank in stored_places(entry, meshes):
            part = self.parts[rank]
            for name, (item, alias) in zip(names, part.find(names, entry, place), strict=True):
                if alias is None:
                    shards[name].append(Shard(part, item))
                else:
                    aliases.setdefault(name, (Shard(part, item), alias))
        if entry["dtype"] == BLOB:
            self.blobs.update({name: found[0] for name, found in shards.items()})
            return
        self.aliases.update(aliases)
        # Other threads read a tensor as soon as it is here: at once, and whole.
        self.shards.update(
            {name: found for name, found in shards.items() if name not in aliases}
            if aliases
            else shards
        )
