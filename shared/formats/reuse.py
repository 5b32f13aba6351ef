"""Decides which chunks of a new part are those of an older part, and which are stored
as deltas of these; the files of the older part are then linked (FORMAT.md, section 3).

The daemon that wrote the older part remembers it as a `StoredPart`. This module does no
I/O.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import xxhash

from ckptd.shared.formats.binary import align
from ckptd.shared.formats.part import Chunk, Linked
from ckptd.shared.formats.plan import ChunkRange

MOST_LINKED = 64
"""The most files that one part links."""
MOST_IN_CHAIN = 16
"""The most deltas in a chain that is written. A reader accepts more. Each delta of one
word in 66 adds about a tenth to the time that a disk takes for the whole chunk.
"""
MOST_BASES = 1 << 19
"""The most bases of a part that is written. Their entries take 20 MB of its index, and a
reader refuses an index of more than 256 MiB. Small chunks would have more bases than
that after some saves.
"""
MOST_SHARE, MOST_SHARE_FOR_BYTES = 0.25, 0.5
"""The most bytes of all deltas of a chain, as a share of those of its whole chunk. So a
restore reads at most a quarter more than without deltas, and at most half more where the
user wants small checkpoints at any price.
"""
_LEAST_SAVED = 1 << 13
"""The least bytes that a delta must save. Stored chunks are padded to 4096 bytes."""
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


class StoredChunk(NamedTuple):
    """A chunk that is stored: its entry, the position of its file in a list of files,
    and its base if it is a delta.
    """

    entry: Chunk
    file: int
    base: StoredChunk | None = None

    def chain(self) -> Iterator[StoredChunk]:
        """Yield the chunk, its base, the base of that, and so on to the whole chunk."""
        link: StoredChunk | None = self
        while link is not None:
            yield link
            link = link.base

    @property
    def whole_share(self) -> float:
        """The stored bytes of the whole chunk of the chain, as a fraction of its raw bytes."""
        *_, whole = self.chain()
        return whole.entry.stored_length / max(1, whole.entry.raw_length)

    @property
    def length_of_chain(self) -> int:
        """The number of deltas in the chain, and one for the whole chunk."""
        return sum(1 for _ in self.chain())

    def moved(self, positions: Mapping[int, int]) -> StoredChunk:
        """Return the chunk and its chain with other positions of their files, by the
        present ones.
        """
        base = None if self.base is None else self.base.moved(positions)
        return StoredChunk(self.entry, positions[self.file], base)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that has been written, as the daemon that wrote it remembers it.

    chunks, digests: each chunk with its place in `files`, and its digest (or b"").
    files: all files of the part, by their numbers. steady: True unless nearly all
    chunks differ from those of the part before it. Without a part before it, it is
    steady. signature: that of its plan. non_finite: for each chunk with values that are
    not finite, by its offset in the packed slot, the values by the numbers of their
    tensors; None if they were not counted. resisting: the offsets of the chunks that
    were not worth a delta.
    """

    attempt: int
    world_size: int
    chunks: list[StoredChunk]
    digests: list[bytes]
    files: list[StoredFile]
    steady: bool = True
    signature: bytes = b""
    non_finite: dict[int, Counter[int]] | None = None
    resisting: frozenset[int] = frozenset()

    @property
    def deltas(self) -> int:
        """The number of chunks that are stored as deltas, linked ones included."""
        return sum(chunk.base is not None for chunk in self.chunks)

    def places(self, ranges: Sequence[ChunkRange]) -> dict[int, int]:
        """Map the number of each chunk of `ranges` to that of the chunk at its place in
        this part, if there is one of the same length and element size.
        """
        here = {
            (one.entry.raw_offset, one.entry.raw_length, one.entry.element_size): place
            for place, one in enumerate(self.chunks)
        }
        found = {}
        for number, chunk in enumerate(ranges):
            place = here.get((chunk.offset, chunk.length, chunk.element_size))
            if place is not None:
                found[number] = place
        return found


class BaseOffer(NamedTuple):
    """A chunk that may be the base of a delta, and the expected length of the delta, as
    a fraction of that of the chunk.
    """

    base: StoredChunk
    share: float


@dataclass(frozen=True, slots=True)
class Reuse:
    """The chunks that a new part need not store, or only as deltas, if the files of
    older parts can be linked.

    chunks: the chunks that need not be stored, by their offsets in the packed slot.
    files: the files to link. offers: the bases of chunks that may be stored as deltas,
    by the offsets of these chunks. apart: the offsets of chunks that are stored in
    files of their own, because a later part is likely to link them: deltas, chunks that
    may have deltas, and chunks that have not changed, but whose file is not worth a
    link.
    """

    files: list[StoredFile] = field(default_factory=list)
    chunks: dict[int, StoredChunk] = field(default_factory=dict)
    offers: dict[int, BaseOffer] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()

    def of(self, positions: Collection[int]) -> Reuse:
        """Return what is left if only the files at these positions can be linked."""
        chunks = {
            offset: chunk
            for offset, chunk in self.chunks.items()
            if all(link.file in positions for link in chunk.chain())
        }
        offers = {
            offset: offer
            for offset, offer in self.offers.items()
            if all(link.file in positions for link in offer.base.chain())
        }
        used = {
            link.file
            for chunk in (*chunks.values(), *(offer.base for offer in offers.values()))
            for link in chunk.chain()
        }
        moved = {position: number for number, position in enumerate(sorted(used))}
        return Reuse(
            [self.files[position] for position in moved],
            {offset: chunk.moved(moved) for offset, chunk in chunks.items()},
            {
                offset: BaseOffer(offer.base.moved(moved), offer.share)
                for offset, offer in offers.items()
            },
            self.apart,
        )


NOTHING = Reuse()


def unchanged(
    before: StoredPart, ranges: Sequence[ChunkRange], checks: Sequence[ChunkCheck]
) -> dict[int, int]:
    """Return the numbers of the chunks that have the crc32c of the chunk there in the
    part `before`, each with its number in that part.
    """
    return {
        number: place
        for number, place in before.places(ranges).items()
        if before.chunks[place].entry.raw_crc == checks[number].crc
    }


def choose(
    before: StoredPart,
    ranges: Sequence[ChunkRange],
    checks: Sequence[ChunkCheck] | None,
    shares: Mapping[int, float] | None = None,
    most_deltas: int = MOST_IN_CHAIN,
    most_share: float = MOST_SHARE_FOR_BYTES,
) -> Reuse:
    """Return the chunks of `before` that a part with the chunks `ranges` need not
    store, and those that may be bases of its deltas.

    `checks` has the checksum of each chunk, or is None if no chunk is expected to be
    unchanged. `shares` has the expected length of the delta of each chunk that is worth
    one and `may_have_delta`, as a fraction of that of the chunk, by the number of the
    chunk. A chain gets at most `most_deltas` deltas, whose bytes are at most `most_share`
    of those of its whole chunk.

    A file is worth a link if the new part needs at least half of its bytes: the file
    takes its room for as long as it is linked.
    """
    shares = shares or {}
    likely = {} if checks is None else unchanged(before, ranges, checks)
    same = {
        ranges[number].offset: before.chunks[place]
        for number, place in likely.items()
        if checks is not None
        and checks[number].digest
        and checks[number].digest == before.digests[place]
    }
    places = before.places(ranges)
    offers = _shortest(
        {
            ranges[number].offset: BaseOffer(before.chunks[places[number]], share)
            for number, share in shares.items()
            if number in places
            and ranges[number].offset not in same
            and _may_extend(before.chunks[places[number]], share, most_deltas, most_share)
        },
        MOST_BASES - sum(chunk.length_of_chain - 1 for chunk in same.values()),
    )
    needed = Counter[int]()
    for chunk in (*same.values(), *(offer.base for offer in offers.values())):
        for link in chunk.chain():
            needed[link.file] += align(link.entry.stored_length)
    linked = {
        file
        for file, nbytes in needed.most_common(MOST_LINKED)
        if 2 * nbytes >= before.files[file].size
    }
    found = Reuse(before.files, same, offers).of(linked)
    apart = frozenset(ranges[number].offset for number in (*likely, *shares)) - found.chunks.keys()
    return replace(found, apart=apart if _counts(apart, ranges) else frozenset())


def most_deltas(left: int) -> int:
    """Return the most deltas that a chain may get, if so many older checkpoints of the
    job are left once retention has deleted others for the new checkpoint.

    The checkpoints of a chain share files, so that damage to one file may damage all of
    them. At least one checkpoint outside the chain is left.
    """
    return max(0, min(MOST_IN_CHAIN, left - 1))


def may_have_delta(
    chunk: StoredChunk, share: float, most_share: float = MOST_SHARE_FOR_BYTES
) -> bool:
    """Return True if a chain may consist of the whole chunk at the end of this one and
    a delta with this share of its bytes, and if the delta is clearly smaller.
    """
    *_, whole = chunk.chain()
    stored, delta = whole.entry.stored_length, share * chunk.entry.raw_length
    return delta <= most_share * stored and stored - delta >= _LEAST_SAVED


def _may_extend(chunk: StoredChunk, share: float, most: int, most_share: float) -> bool:
    """Return True if the chain of a chunk may get one more delta, with this share of
    its bytes.
    """
    *deltas, whole = chunk.chain()
    stored = sum(link.entry.stored_length for link in deltas) + share * chunk.entry.raw_length
    return len(deltas) < most and stored <= most_share * whole.entry.stored_length


def _shortest(offers: Mapping[int, BaseOffer], room: int) -> dict[int, BaseOffer]:
    """Return the offers with the shortest chains that have at most `room` bases
    together.
    """
    kept = dict[int, BaseOffer]()
    for offset, offer in sorted(offers.items(), key=lambda item: item[1].base.length_of_chain):
        room -= offer.base.length_of_chain
        if room < 0:
            break
        kept[offset] = offer
    return kept


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
