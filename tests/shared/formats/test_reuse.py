"""Tests which chunks of a new part are taken from an older one, without files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ckptd.shared.codecs.delta import DELTA
from ckptd.shared.formats import reuse
from ckptd.shared.formats.binary import ALIGN, align
from ckptd.shared.formats.part import Chunk, Linked
from ckptd.shared.formats.plan import ChunkRange
from ckptd.shared.formats.reuse import (
    MOST_LINKED,
    BaseOffer,
    ChunkCheck,
    Reuse,
    StoredChunk,
    StoredFile,
    StoredPart,
    choose,
    is_steady,
    may_have_delta,
    new_hasher,
)
from tests.support.cases import each_case

NONCE = bytes(16)


def ranges(count: int, length: int = 10 * ALIGN) -> list[ChunkRange]:
    return [ChunkRange(number * length, length, 4) for number in range(count)]


def checks(count: int, *changed: int) -> list[ChunkCheck]:
    """Return the checks of so many chunks.

    Those in `changed` differ from the usual ones.
    """
    return [
        ChunkCheck(number + 1000 * (number in changed), bytes([number % 250, number in changed]))
        for number in range(count)
    ]


def stored(placed: list[int], sizes: dict[int, int] | None = None, **changes: Any) -> StoredPart:
    """Return a part whose chunk n is in file placed[n].

    Each file is as long as its chunks and a header, unless `sizes` says otherwise.
    """
    found = ranges(len(placed))
    files = [
        StoredFile(
            "tag",
            f"file-{n}",
            ALIGN + sum(c.length for c, f in zip(found, placed, strict=True) if f == n),
            Linked(0, NONCE, n, 1),
        )
        for n in range(max(placed) + 1)
    ]
    for number, size in (sizes or {}).items():
        files[number] = StoredFile("tag", f"file-{number}", size, Linked(0, NONCE, number, 1))
    usual = checks(len(placed))
    chunks = [
        StoredChunk(
            Chunk(c.offset, c.length, ALIGN, c.length, 0, c.element_size, usual[n].crc, 7),
            placed[n],
        )
        for n, c in enumerate(found)
    ]
    made: dict[str, Any] = {
        "attempt": 1,
        "world_size": 1,
        "chunks": chunks,
        "digests": [c.digest for c in usual],
    }
    return StoredPart(**{**made, "files": files, **changes})


def test_all_chunks_of_an_equal_part_are_reused() -> None:
    before = stored([0, 0, 1, 1])
    found = choose(before, ranges(4), checks(4))
    assert {offset: known.entry for offset, known in found.chunks.items()} == {
        c.entry.raw_offset: c.entry for c in before.chunks
    }
    assert [found.files[known.file].name for known in found.chunks.values()] == [
        "file-0",
        "file-0",
        "file-1",
        "file-1",
    ]
    assert found.apart == frozenset()


def test_a_changed_chunk_is_written_again() -> None:
    found = choose(stored([0, 0, 0, 0]), ranges(4), checks(4, 1))
    assert sorted(found.chunks) == [c.offset for n, c in enumerate(ranges(4)) if n != 1]
    assert found.apart == frozenset()


def test_an_equal_checksum_is_not_enough() -> None:
    """A chunk with the same crc32c and another digest has changed; whether it may stay
    in its file for longer is not known.
    """
    other = [
        ChunkCheck(check.crc, b"other") if number == 2 else check
        for number, check in enumerate(checks(4))
    ]
    found = choose(stored([0] * 4), ranges(4), other)
    assert ranges(4)[2].offset not in found.chunks
    assert len(found.chunks) == 3


@pytest.mark.parametrize("missing", ["new", "old"])
def test_without_digests_nothing_is_reused(missing: str) -> None:
    before = stored([0] * 4, digests=[b""] * 4) if missing == "old" else stored([0] * 4)
    now = checks(4) if missing == "old" else [ChunkCheck(check.crc) for check in checks(4)]
    for wanted in (now, [ChunkCheck(check.crc) for check in checks(4)]):
        found = choose(before, ranges(4), wanted)
        assert (found.files, found.chunks) == ([], {})
        assert found.apart == {c.offset for c in ranges(4)}


def test_a_chunk_of_another_size_place_or_kind_is_another_chunk() -> None:
    for other in (
        ChunkRange(0, 9 * ALIGN, 4),
        ChunkRange(0, 10 * ALIGN, 2),
        ChunkRange(64, 10 * ALIGN, 4),
    ):
        assert choose(stored([0]), [other], checks(1)).chunks == {}


def test_a_file_is_linked_only_if_half_of_it_is_needed() -> None:
    two = 2 * align(ranges(1)[0].length)
    for size, linked in ((2 * two, True), (2 * two + 1, False)):
        found = choose(stored([0, 0, 1, 1], {1: size}), ranges(4), checks(4))
        assert ("file-1" in [file.name for file in found.files]) is linked
        assert found.apart == (frozenset() if linked else {c.offset for c in ranges(4)[2:]})


def test_a_few_small_chunks_get_no_file_of_their_own() -> None:
    before = stored([0] * 128, {0: 1 << 40})
    assert choose(before, ranges(128), checks(128, *range(126))).apart == {
        c.offset for c in ranges(128)[126:]
    }
    assert choose(before, ranges(128), checks(128, *range(127))).apart == frozenset()


def test_of_too_many_files_the_most_useful_are_linked() -> None:
    placed = [*range(MOST_LINKED + 3), MOST_LINKED + 1]
    found = choose(stored(placed), ranges(len(placed)), checks(len(placed)))
    assert len(found.files) == MOST_LINKED
    assert f"file-{MOST_LINKED + 1}" in [file.name for file in found.files]
    assert len(found.apart) == len(placed) - len(found.chunks) == 3


def test_a_part_of_which_little_stays_is_not_steady() -> None:
    before = stored([0] * 128)
    assert is_steady(None, ranges(128), checks(128))
    assert is_steady(before, ranges(128), checks(128, *range(126)))
    assert not is_steady(before, ranges(128), checks(128, *range(127)))


def test_digests_tell_chunks_apart_and_need_no_whole_buffer() -> None:
    whole, pieces = new_hasher(), new_hasher()
    whole.update(b"ab" * 1000)
    for piece in (b"ab" * 999, b"a", b"b"):
        pieces.update(piece)
    assert whole.digest() == pieces.digest()
    assert len(whole.digest()) == 16
    pieces.update(b"c")
    assert whole.digest() != pieces.digest()


# -- deltas


def delta(base: StoredChunk, file: int, length: int = ALIGN) -> StoredChunk:
    """Return a chunk in `file` that is stored as a delta of `base`."""
    entry = msgspec.structs.replace(base.entry, codec=DELTA, stored_length=length)
    return StoredChunk(entry, file, base)


def chains(*lengths: int) -> StoredPart:
    """Return a part with a chunk for each number: that of the deltas in its chain.

    File 0 has the whole chunks, and file n the n-th deltas. All are short enough to be
    worth a link for one chunk.
    """
    part = stored([0] * len(lengths), {0: ALIGN})
    chunks = []
    for chunk, deltas in zip(part.chunks, lengths, strict=True):
        for number in range(1, deltas + 1):
            chunk = delta(chunk, number)
        chunks.append(chunk)
    files = [
        *part.files,
        *(
            StoredFile("tag", f"file-{n}", ALIGN, Linked(0, NONCE, n, 1))
            for n in range(1, 1 + max(lengths))
        ),
    ]
    return replace(part, chunks=chunks, files=files)


def offered(before: StoredPart, *numbers: int) -> list[int]:
    """Return the numbers of the chunks that may be stored as deltas, of those that are
    worth it.
    """
    count = len(before.chunks)
    found = choose(before, ranges(count), None, dict.fromkeys(numbers or range(count), 0.01))
    return [n for n, chunk in enumerate(ranges(count)) if chunk.offset in found.offers]


def test_a_chain_that_is_long_or_large_gets_no_more_deltas() -> None:
    assert offered(chains(0, 1, 2, 4)) == [0, 1, 2, 3]
    # Five deltas of a tenth are half of the whole chunk, and one more is beyond it.
    assert offered(chains(0, 1, 2, 5)) == [0, 1, 2]


@each_case("deltas", [0, 1, 5])
@each_case(("share", "may"), [(0.01, True), (0.5, True), (0.51, False)])
def test_a_delta_of_more_than_half_of_a_whole_chunk_fits_no_chain(
    share: float, may: bool, deltas: int
) -> None:
    """Compare the delta with the whole chunk, however long the chain is at present."""
    [chunk] = chains(deltas).chunks
    assert may_have_delta(chunk, share) is may


@each_case("most", [0, 1, 4, 9, 10])
def test_a_part_has_at_most_so_many_bases_and_the_shortest_chains_go_on(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader refuses an index that is too long."""
    monkeypatch.setattr(reuse, "MOST_BASES", most)
    before = chains(3, 1, 2, 0)  # the deltas of these have 4 + 2 + 3 + 1 bases
    assert offered(before) == {0: [], 1: [3], 4: [1, 3], 9: [1, 2, 3], 10: [0, 1, 2, 3]}[most]


def test_unchanged_chunks_with_chains_count_among_the_bases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = chains(3, 1, 2, 0)
    for most, wanted in ((5, []), (6, [3]), (8, [1, 3])):
        monkeypatch.setattr(reuse, "MOST_BASES", most)
        found = choose(before, ranges(4), checks(4, 1, 3), {1: 0.01, 3: 0.01})
        assert set(found.chunks) == {ranges(4)[n].offset for n in (0, 2)}
        assert set(found.offers) == {ranges(4)[n].offset for n in wanted}


def test_a_chunk_is_left_only_if_every_file_of_its_chain_can_be_linked() -> None:
    before = chains(2, 1, 0)
    same = {chunk.entry.raw_offset: chunk for chunk in before.chunks}
    offers = {1 + offset: BaseOffer(chunk, 0.5) for offset, chunk in same.items()}
    every = Reuse(before.files, same, offers, frozenset(same))
    for positions, left in (
        ({0, 1, 2}, 3), ({0, 1}, 2), ({0}, 1), ({0, 2}, 1), ({1, 2}, 0), (set[int](), 0),
    ):  # fmt: skip
        found = every.of(positions)
        assert len(found.chunks) == len(found.offers) == left
        assert found.apart == every.apart
        kept = [*found.chunks.values(), *(offer.base for offer in found.offers.values())]
        # Each file is still the one that it was, and every file is used.
        assert {found.files[link.file].name for chunk in kept for link in chunk.chain()} == {
            file.name for file in found.files
        }
        for offset, chunk in found.chunks.items():
            assert [found.files[link.file] for link in chunk.chain()] == [
                before.files[link.file] for link in same[offset].chain()
            ]
