"""Decides which chunks of a new part are those of an older part, whose files are then
linked (FORMAT.md, section 3).

The daemon that wrote the older part remembers it as a `StoredPart`. This module does no
I/O.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import xxhash

from ckptd.shared.formats.binary import align
from ckptd.shared.formats.part import Chunk, Linked
from ckptd.shared.formats.plan import ChunkRange

MOST_LINKED = 64
"""The most files that one part links."""
_STEADY = 64
"""Unchanged chunks count if at least one byte in so many is theirs. Otherwise they are
written again with the others.
"""
_KEY = secrets.randbits(64)


class ChunkCheck(NamedTuple):
    """The checksum of a chunk: its crc32c, and the digest that `new_hasher` makes, or
    b"" if it was not computed.
    """

    crc: int
    digest: bytes = b""


def new_hasher() -> xxhash.xxh3_128:
    """Return an object that computes a digest of 16 bytes, as those of hashlib do.

    It is XXH3 with a random key of this process. Two chunks agree in it by chance with
    a probability of 2**-128. It is no protection against a trainer that makes two
    chunks agree on purpose; such a trainer harms its own checkpoints only.
    """
    return xxhash.xxh3_128(seed=_KEY)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a committed part, which later parts may link.

    tag, name: the tag directory that holds it, and its name there. size: its length in
    bytes. origin: the part that it was written for, and its number in that part, as the
    index of a part that links it has them; the number in the linking part is not set.
    """

    tag: str
    name: str
    size: int
    origin: Linked


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that has been written, as the daemon that wrote it remembers it.

    chunks, digests, placed: the entry, the digest (or b"") and the number of the file
    of each chunk. files: all files of the part, by their numbers. steady: True unless
    nearly all chunks differ from those of the part before it. Without a part before it,
    it is steady. signature: that of its plan. non_finite: for each chunk with values
    that are not finite, by its offset in the packed slot, the values by the numbers of
    their tensors; None if they were not counted.
    """

    attempt: int
    world_size: int
    chunks: list[Chunk]
    digests: list[bytes]
    placed: list[int]
    files: list[StoredFile]
    steady: bool = True
    signature: bytes = b""
    non_finite: dict[int, Counter[int]] | None = None


class Known(NamedTuple):
    """A chunk of an older part: its entry, and the position of its file in
    `Reuse.files`.
    """

    chunk: Chunk
    file: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """The chunks that a new part need not store, if their files can be linked.

    chunks: these chunks, by their offsets in the packed slot. files: the files to link.
    apart: the offsets of other chunks that have not changed, but whose file is not
    worth a link. They are stored in files of their own, which will be worth it.
    """

    files: list[StoredFile] = field(default_factory=list)
    chunks: dict[int, Known] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()


NOTHING = Reuse()


def unchanged(
    before: StoredPart, ranges: Sequence[ChunkRange], checks: Sequence[ChunkCheck]
) -> dict[int, int]:
    """Return the numbers of the chunks that have the crc32c of the chunk there in the
    part `before`, each with its number in that part.
    """
    places = {chunk.raw_offset: number for number, chunk in enumerate(before.chunks)}
    found = {}
    for number, (chunk, check) in enumerate(zip(ranges, checks, strict=True)):
        place = places.get(chunk.offset)
        if place is not None:
            old = before.chunks[place]
            if (old.raw_length, old.element_size, old.raw_crc) == (
                chunk.length,
                chunk.element_size,
                check.crc,
            ):
                found[number] = place
    return found


def choose(before: StoredPart, ranges: Sequence[ChunkRange], checks: Sequence[ChunkCheck]) -> Reuse:
    """Return the chunks of `before` that a part with the chunks `ranges` need not
    store. `checks` has the checksum of each chunk.

    A file is worth a link if the new part needs at least half of its bytes: the file
    takes its room for as long as it is linked.
    """
    likely = unchanged(before, ranges, checks)
    same = {
        ranges[number].offset: place
        for number, place in likely.items()
        if checks[number].digest and checks[number].digest == before.digests[place]
    }
    needed = Counter[int]()
    for place in same.values():
        needed[before.placed[place]] += align(before.chunks[place].stored_length)
    linked = [
        file
        for file, nbytes in needed.most_common(MOST_LINKED)
        if 2 * nbytes >= before.files[file].size
    ]
    positions = {file: position for position, file in enumerate(linked)}
    chunks = {
        offset: Known(before.chunks[place], positions[before.placed[place]])
        for offset, place in same.items()
        if before.placed[place] in positions
    }
    apart = frozenset(ranges[number].offset for number in likely) - chunks.keys()
    return Reuse(
        [before.files[file] for file in linked],
        chunks,
        apart if _counts(apart, ranges) else frozenset(),
    )


def is_steady(
    before: StoredPart | None, ranges: Sequence[ChunkRange], checks: Sequence[ChunkCheck]
) -> bool:
    """Return True if so many chunks are those of the part `before` that the next save
    should look for them before it writes.
    """
    return before is None or _counts(
        {ranges[number].offset for number in unchanged(before, ranges, checks)}, ranges
    )


def _counts(offsets: Container[int], ranges: Sequence[ChunkRange]) -> bool:
    """Return True if the chunks at these offsets are more than a small part of all
    chunks.
    """
    return _STEADY * sum(chunk.length for chunk in ranges if chunk.offset in offsets) >= sum(
        chunk.length for chunk in ranges
    )


class Linker(Protocol):
    """The place in which the files of one part are linked."""

    def link(self, older: StoredFile, name: str) -> bool:
        """Link a file of an older part, under `name`, into the directory of the new
        part.

        Return False if the file cannot be linked.
        """

    def remove(self, name: str) -> None:
        """Remove a name that `link` has given, or do nothing if that fails."""
