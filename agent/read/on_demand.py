"""Reads checkpoints with a metadata object: a part is opened when a tensor in it is first needed (FORMAT.md, section 10)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptd.agent.read.saved import Saved, Shard
from ckptd.shared.errors import IntegrityError, NotFound
from ckptd.shared.metadata_object import MetadataReader
from ckptd.shared.part import PartReader
from ckptd.shared.plan import BLOB, HIDDEN, Alias, ChunkRange, Described, Item, Plan
from ckptd.shared.sharding import Place, Rule, stored_shards


class PartOnDemand:
    """The part of one rank as a `ChunkSource`. `open_part` opens and checks it, at the first call that needs it.

    Every call may raise the errors of `open_part`: IntegrityError, OSError.
    """

    def __init__(self, open_part: Callable[[], PartReader], *, remote: bool) -> None:
        self.remote = remote
        self._open_part = open_part
        self._lock = threading.Lock()
        self._reader: PartReader | None = None
        self._items: dict[tuple[str, tuple[int, ...]], Item] = {}
        self._aliases: dict[str, Alias] = {}

    @property
    def reader(self) -> PartReader:
        with self._lock:
            if self._reader is None:
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

    def find(self, fqn: str, place: Place | None) -> tuple[Item, Alias | None]:
        """Return the item at this place of a tensor, or of a blob if the place is None. For an alias, return the item that holds it, too.

        Raises IntegrityError if the part has neither.
        """
        name, reader = self.reader.name, self.reader
        item = self._items.get((fqn, (0,) if place is None else place[0]))
        if item is not None and (item.dtype == BLOB if place is None else item.sizes == place[1]):
            return item, None
        alias = self._aliases.get(fqn)
        if alias is None or place is None or (alias.size, any(place[0])) != (place[1], False):
            raise IntegrityError(f"{name} does not have {fqn!r} as the metadata of the checkpoint say")
        return next(item for item in reader.plan.items if item.fqn == alias.base), alias

    def close(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


@dataclass(slots=True)
class SavedOnDemand(Saved):
    """The contents of a checkpoint whose metadata are in an object. `shards`, `aliases` and `blobs` have what has been asked for.

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
                self._entries[name] = self.metadata_reader.find(name)
            return self._entries.get(name)

    def _all_entries(self) -> dict[str, Described | None]:
        with self._held:
            if not self._all:
                assert self.metadata_reader is not None
                self._entries = dict(self.metadata_reader.entries())
                self._all = True
            return self._entries

    def names(self) -> list[str]:
        return [name for name, entry in self._all_entries().items() if entry is not None and entry["dtype"] != BLOB]

    def __contains__(self, name: str) -> bool:
        entry = self._entry(name)
        return entry is not None and entry["dtype"] != BLOB and not name.startswith(HIDDEN)

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and size as the metadata say. No part is opened."""
        entry = self._entry(name)
        if entry is None or entry["dtype"] == BLOB:
            raise NotFound(f"no tensor {name!r}; the checkpoint has {len(self.names())}, such as {', '.join(sorted(self.names())[:3])}")
        return entry["dtype"], tuple(entry.get("size", ()))

    def blob_names(self) -> set[str]:
        return {name for name, entry in self._all_entries().items() if entry is not None and entry["dtype"] == BLOB}

    def check_all_whole(self) -> None:
        for name in self._all_entries():
            self.ensure(name)
        Saved.check_all_whole(self)

    def ensure(self, name: str) -> None:
        """Open the parts that have the tensor or blob. Raises IntegrityError if one of them does not have it, OSError."""
        with self._held:
            if name in self.shards or name in self.aliases or name in self.blobs:
                return
            entry = self._entry(name)
            if entry is None:
                return
            shards, aliases = list[Shard](), list[tuple[Shard, Alias]]()
            for place, rank in self._stored(entry):
                item, alias = self.parts[rank].find(name, place)
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

    def _stored(self, entry: Described) -> Iterator[tuple[Place | None, int]]:
        """Yield the place of each stored shard and the rank that stores it. The place of a blob is None."""
        if "rule" in entry:
            assert self.metadata_reader is not None
            rule = entry["rule"] if isinstance(entry["rule"], Rule) else Rule(*entry["rule"])
            yield from stored_shards(entry["size"], self.metadata_reader.meshes[rule.mesh], rule)
        elif entry["dtype"] == BLOB:
            yield None, entry.get("ranks", [0])[0]
        else:
            ranks = entry.get("ranks", [0] * len(entry["chunks"]))
            for (offsets, sizes), rank in zip(entry["chunks"], ranks, strict=True):
                yield (tuple(offsets), tuple(sizes)), rank
