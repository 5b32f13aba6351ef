"""Reads checkpoints with a metadata object: a part is opened when a tensor in it is
first needed (FORMAT.md, section 10).
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

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

    def find(self, fqn: str, entry: Described, place: Box | None) -> tuple[Item, Alias | None]:
        """Return the item at this place of a tensor, or of a blob if the place is None.

        For an alias, return the item that holds it, too.

        `entry` describes the tensor or blob. Raises IntegrityError if the part has
        neither, or has another dtype or size.
        """
        reader = self.reader
        item, alias = (
            self._items.get((fqn, (0,) if place is None else place[0])),
            self._aliases.get(fqn),
        )
        if item is not None and place is None and item.dtype == entry["dtype"] == BLOB:
            return item, None
        wanted = (entry["dtype"], tuple(entry.get("size", ())))
        if (
            item is not None
            and place is not None
            and (item.dtype, item.size, item.sizes) == (*wanted, place[1])
        ):
            return item, None
        if (
            alias is not None
            and place is not None
            and (alias.dtype, alias.size, alias.size) == (*wanted, place[1])
        ):
            return next(item for item in reader.plan.items if item.fqn == alias.base), alias
        raise IntegrityError(
            f"{reader.name} does not have {fqn!r} as the metadata of the checkpoint say"
        )

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
        with self._held:
            for name in self._all_entries():
                self.ensure(name)
        Saved.check_all_whole(self)

    def ensure(self, name: str) -> None:
        """Open the parts that have the tensor or blob.

        Raises IntegrityError if one of them does not have it, OSError.
        """
        if name in self.shards:  # it is there whole, and most are asked for ten times
            return
        with self._held:
            if name in self.shards or name in self.aliases or name in self.blobs:
                return
            entry = self._entry(name)
            if entry is None:
                return
            shards, aliases = list[Shard](), list[tuple[Shard, Alias]]()
            for place, rank in stored_places(
                entry, self.metadata_reader.meshes if self.metadata_reader else ()
            ):
                item, alias = self.parts[rank].find(name, entry, place)
                shard = Shard(self.parts[rank], item)
                if alias is not None:
                    aliases.append((shard, alias))
                else:
                    shards.append(shard)
            if entry["dtype"] == BLOB:
                self.blobs[name] = shards[0]
            elif aliases:
                self.aliases[name] = aliases[0]
            else:
                self.shards[name] = shards
