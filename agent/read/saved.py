"""Holds the contents of a checkpoint, or of a snapshot in memory, by name: the shards
of each tensor, and the sources that have them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptd.agent.plan.structure import firsts
from ckptd.agent.state.dtypes import dtype_of, plain_name
from ckptd.shared.errors import IntegrityError, NotFound, StructureMismatch
from ckptd.shared.formats.coverage import check_alike, check_cover, two_dtypes, two_sizes
from ckptd.shared.formats.part import ChunkSource
from ckptd.shared.formats.plan import BLOB, HIDDEN, Alias, Item, Writer, c_order
from ckptd.shared.formats.scatter import ReadTarget, scatter
from ckptd.shared.formats.sharding import Box
from ckptd.shared.system.collector import paused_collector


class Shard(msgspec.Struct, frozen=True, gc=False):
    """A stored shard of a tensor, or a blob: its source, and the item of that source's
    plan that describes it.
    """

    source: ChunkSource
    item: Item

    @property
    def stride(self) -> tuple[int, ...]:
        return self.item.stride if self.item.stride is not None else c_order(self.item.sizes)


class Reads:
    """Shards, or ranges of shards, that are read together, each into memory of its
    length.

    Call `add` for each, then `run`.
    """

    def __init__(self) -> None:
        self._targets: dict[int, tuple[ChunkSource, list[ReadTarget]]] = {}

    def add(self, shard: Shard, view: memoryview, begin: int = 0) -> None:
        """Have the bytes of a shard, from `begin` on, read into `view`."""
        if view:
            self._targets.setdefault(id(shard.source), (shard.source, []))[1].append(
                (shard.item.offset + begin, view)
            )

    def add_all(self, shards: Sequence[Shard], views: Sequence[memoryview]) -> None:
        """Have the bytes of each shard read into the view of its length."""
        offsets = map(attrgetter("item.offset"), shards)
        found = list(zip(map(attrgetter("source"), shards), offsets, views, strict=True))
        for source in {id(source): source for source, _, _ in found}.values():
            self._targets.setdefault(id(source), (source, []))[1].extend(
                (offset, view) for of, offset, view in found if of is source and view
            )

    def run(self, threads: int | None = None) -> int:
        """Read and verify all of them.

        Return the number of raw bytes read. Raises IntegrityError, OSError.
        """
        return sum(
            scatter(source, targets, threads=threads) for source, targets in self._targets.values()
        )


@dataclass(slots=True)
class Saved:
    """The contents of a checkpoint, or of a snapshot in memory, by name.

    shards: the stored shards of each tensor. aliases: tensors inside the storage of
    another tensor, each with the shard that holds it.
    """

    shards: dict[str, list[Shard]] = field(default_factory=dict)
    aliases: dict[str, tuple[Shard, Alias]] = field(default_factory=dict)
    blobs: dict[str, Shard] = field(default_factory=dict)
    """The values that are no tensors, in a save that DCP has planned: bytes that
    torch.save or the caller's planner has written.
    """
    torch_version: str = ""
    """The version of torch that saved the checkpoint, such as "2.13.0", or "" if it is
    unknown.
    """
    _checked: set[str] = field(default_factory=set)
    """Names of the tensors that `check_whole` need not look at again."""
    _known: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    """The sizes and dtypes that `described` and `dtype` have found: a recovery asks for
    those of a tensor ten times.
    """

    @classmethod
    @paused_collector()
    def of(cls, sources: Sequence[ChunkSource]) -> Saved:
        saved = cls()
        for source in sources:
            saved.torch_version = torch_version(source.plan.writer) or saved.torch_version
            own: dict[str, Shard] = {}
            for item in source.plan.items:
                if item.dtype == BLOB:
                    saved.blobs[item.fqn] = Shard(source, item)
                    continue
                if item.fqn in saved.shards:
                    first = saved.shards[item.fqn][0].item
                    if first.size != item.size:
                        raise two_sizes(item.fqn, first.size, item.size)
                    if first.dtype != item.dtype:
                        raise two_dtypes(item.fqn, first.dtype, item.dtype)
                own[item.fqn] = Shard(source, item)
                saved.shards.setdefault(item.fqn, []).append(own[item.fqn])
            saved.aliases |= {alias.fqn: (own[alias.base], alias) for alias in source.plan.aliases}
        if twice := saved.blobs.keys() & (saved.shards.keys() | saved.aliases.keys()):
            raise IntegrityError(f"{min(twice)} is a tensor and a value at once")
        return saved

    def names(self) -> list[str]:
        return [name for name in [*self.shards, *self.aliases] if not name.startswith(HIDDEN)]

    def __contains__(self, name: str) -> bool:
        self.ensure(name)
        return (name in self.shards or name in self.aliases) and not name.startswith(HIDDEN)

    def describe(self, name: str) -> Alias | Item:
        """Return the alias of a tensor, or the item of its first shard.

        Either has the tensor's dtype and size. Raises NotFound.
        """
        self.ensure(name)
        if name in self.aliases:
            return self.aliases[name][1]
        if name in self.shards and not name.startswith(HIDDEN):
            return self.shards[name][0].item
        raise NotFound(
            f"no tensor {name!r}; the checkpoint has {len(self.names())}, such as "
            f"{', '.join(sorted(self.names())[:3])}"
        )

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the name of the dtype, as in a plan document, and the size of a
        tensor. Raises NotFound.
        """
        described = self.describe(name)
        return described.dtype, tuple(described.size)

    def described(self, names: Sequence[str]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the size and the dtype of each tensor. Raises as `dtype`."""
        known = list(map(self._known.get, names))
        if None not in known:
            return cast(list[tuple[tuple[int, ...], torch.dtype]], known)
        self.ensure_all(names)
        entries = [
            shards[0].item if (shards := self.shards.get(name)) and name[:1] != HIDDEN
            else self.describe(name)
            for name in names
        ]  # fmt: skip
        kinds = [(entry.size, entry.dtype) for entry in entries]
        of_kind = {kind: (kind[0], self.dtype(name)) for kind, name in firsts(kinds, names).items()}
        found = list(map(of_kind.__getitem__, kinds))
        self._known.update(zip(names, found, strict=True))
        return found

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises NotFound for an unknown name, and for a dtype that this torch does not
        have.
        """
        if (known := self._known.get(name)) is not None:
            return known[1]
        dtype, size = self.shape(name)
        try:
            return self._known.setdefault(name, (size, dtype_of(dtype)))[1]
        except NotFound:
            needed = (
                f"torch {self.torch_version}, which saved it, or a newer one"
                if self.torch_version
                else "a newer torch"
            )
            raise NotFound(
                f"{name} has dtype {plain_name(dtype)}, which torch {torch.__version__} does not "
                f"have: install {needed}"
            ) from None

    def blob_names(self) -> Collection[str]:
        """Return the names of all blobs."""
        return self.blobs.keys()

    def metadata(self, names: Iterable[str] | None = None) -> Metadata:
        """Return DCP's metadata of these tensors, or of every tensor and blob that can
        be asked for. Raises NotFound as `dtype`.
        """
        entries: dict[str, Any] = {}
        for name in self.names() if names is None else names:
            described = self.describe(name)
            size = torch.Size(described.size)
            if isinstance(described, Alias):
                chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
            else:
                chunks = [
                    ChunkStorageMetadata(torch.Size(s.item.offsets), torch.Size(s.item.sizes))
                    for s in self.shards[name]
                ]
            entries[name] = TensorStorageMetadata(
                TensorProperties(dtype=self.dtype(name)), size, chunks
            )
        if names is None:
            entries.update(dict.fromkeys(self.blob_names(), BytesStorageMetadata()))
        return Metadata(state_dict_metadata=entries)

    def ensure(self, name: str) -> None:
        """Make sure that `shards`, `aliases` and `blobs` have everything of this name."""
        if name not in self.shards:  # most are asked for ten times
            self.ensure_all((name,))

    def ensure_all(self, names: Collection[str]) -> None:
        """Make sure that `shards`, `aliases` and `blobs` have everything of these names.

        A subclass may look for it only now.
        """

    def read_blobs(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of blobs, by name, verified.

        Raises NotFound, IntegrityError, OSError.
        """
        found, reads = dict[str, bytearray](), Reads()
        for name in names:
            self.ensure(name)
            if name not in self.blobs:
                raise NotFound(f"no value {name!r} in this checkpoint")
            shard = self.blobs[name]
            found[name] = bytearray(shard.item.length)
            reads.add(shard, memoryview(found[name]))
        reads.run()
        return {name: bytes(data) for name, data in found.items()}

    def check_whole(self, name: str) -> None:
        """Raise IntegrityError if the shards of a tensor have holes or overlap."""
        self.ensure(name)
        if name not in self._checked and name in self.shards:
            if self.shard_of_whole(name) is None:
                check_cover(name, *self._boxes(name))
            self._checked.add(name)

    def check_each_whole(self, names: Sequence[str]) -> None:
        """Call `check_whole` for each of these tensors that is not checked yet."""
        self.ensure_all(names)
        for name in names:
            if name not in self._checked:
                self.check_whole(name)

    def check_box(self, name: str, box: Box) -> None:
        """Raise StructureMismatch unless a shard with exactly this place and size is
        stored. The tensor counts as checked from now on.
        """
        if self.shard_at(name, box) is None:
            mine = f"{list(box[1])} at {list(box[0])}"
            raise StructureMismatch(
                f"{name}: this rank has the shard {mine}, which was not saved as one: recover "
                f"without same_partition"
            )
        self._checked.add(name)

    def shard_at(self, name: str, box: Box | None) -> Shard | None:
        """Return the stored shard of a tensor with exactly this place and size, or None
        if there is none.
        """
        self.ensure(name)
        return next(
            (
                shard
                for shard in self.shards.get(name, ())
                if (shard.item.offsets, shard.item.sizes) == box
            ),
            None,
        )

    def shards_at(self, names: Sequence[str], boxes: Sequence[Box | None]) -> list[Shard | None]:
        """Return `shard_at` for each of these tensors."""
        return [
            shards[0]
            if (shards := self.shards.get(name))
            and (shards[0].item.offsets, shards[0].item.sizes) == box
            else self.shard_at(name, box)
            for name, box in zip(names, boxes, strict=True)
        ]

    def shard_of_whole(self, name: str) -> Shard | None:
        """Return the shard of a tensor that is stored as one, which is then the whole
        tensor, otherwise None.
        """
        self.ensure(name)
        shards = self.shards.get(name, ())
        return (
            shards[0] if len(shards) == 1 and shards[0].item.sizes == shards[0].item.size else None
        )

    def check_all_whole(self) -> None:
        """Raise IntegrityError if the shards of any tensor have holes or overlap."""
        whole, divided = list[str](), list[str]()
        for name, shards in self.shards.items():
            alone = len(shards) == 1 and shards[0].item.sizes == shards[0].item.size
            (whole if alone else divided).append(name)
        # One check for all that are whole. Their number allows more work on the others.
        check_alike(
            [(name, *self._boxes(name), 1) for name in divided]
            + [(name, *self._boxes(name), len(whole)) for name in whole[:1]]
        )
        self._checked.update(self.shards)

    def _boxes(self, name: str) -> tuple[tuple[int, ...], set[Box]]:
        shards = self.shards[name]
        return shards[0].item.size, {(shard.item.offsets, shard.item.sizes) for shard in shards}


def torch_version(writer: Writer) -> str:
    """Return the version of torch in the `writer` of a plan or a manifest, such as
    "2.13.0", or "" if it is unknown.
    """
    version = re.match(r"\d+(\.\d+)*", writer.get("torch", ""))
    return version[0] if version else ""
