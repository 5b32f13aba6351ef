"""The test vectors of deltas: checkpoints whose chunks are stored as their differences
from chunks of older checkpoints, sound ones and ones that must be refused (FORMAT.md,
section 3).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from crc32c import crc32c

from ckptd.shared.formats.binary import ALIGN, align
from ckptd.shared.formats.part import DELTAS, LINKED_FILES, SEVERAL_FILES
from tests.vectors.build import (
    ATTEMPT,
    JOB,
    STEP,
    Checkpoint,
    Files,
    Part,
    Tensor,
    frame,
    header,
    nonce_of,
    planes,
    whole,
)
from tests.vectors.refused import Edit, Refused, put, reheaded, remover, setter
from tests.vectors.sound import Vector, expected, of_version_2, reference, state_of

RAW, ZSTD, PLANES, DELTA = range(4)
FEATURES = ("files", "linked-files", "deltas")


# -- stored forms


def stored_form(
    listed: int,
    body: bytes,
    gaps: bytes = b"",
    *,
    codec: int = RAW,
    gap_bytes: int | None = None,
    gaps_stored: int | None = None,
) -> bytes:
    """Return a delta of these pieces.

    The number of gap bytes and their stored length are those of `gaps` unless given.
    """
    number = len(gaps) if gap_bytes is None else gap_bytes
    length = len(gaps) if gaps_stored is None else gaps_stored
    return struct.pack("<4I", listed, codec, number, length) + gaps + body


def delta_words(data: bytes, base: bytes, width: int) -> list[bytes]:
    highest = 1 << 8 * width - 1
    found = []
    for at in range(0, len(data), width):
        newer, older = (int.from_bytes(each[at : at + width], "little") for each in (data, base))
        word = (newer - older) % (2 * highest)
        found.append((word ^ (highest - 1) if word & highest else word).to_bytes(width, "little"))
    return found


def gaps_of(places: Sequence[int]) -> bytes:
    """Return the gap bytes that list the words at these places."""
    found, at = b"", 0
    for place in places:
        found += b"\xff" * ((place - at) // 255) + bytes([(place - at) % 255])
        at = place + 1
    return found


def delta(
    data: bytes,
    base: bytes,
    width: int,
    *,
    dense: bool = False,
    codec: int = RAW,
    framed: bool = False,
) -> bytes:
    """Return a chunk as a delta of `base`, with elements of `width` bytes.

    dense: lists all words, and otherwise those that differ. codec: that of the listed
    words. framed: stores the gap bytes as a frame of zstd.
    """
    size = min(width, 8)
    words = delta_words(data, base, size)
    places = [place for place, word in enumerate(words) if dense or any(word)]
    body = b"".join(words[place] for place in places)
    gaps = b"" if len(places) == len(words) else gaps_of(places)
    kept = frame(gaps) if framed else gaps
    assert len(kept) < len(gaps) or not framed
    return stored_form(
        len(places),
        planes(body, width) if codec == PLANES else body,
        kept,
        codec=codec,
        gap_bytes=len(gaps),
    )


def shifted(data: bytes, width: int, changes: Mapping[int, int] | Callable[[int], int]) -> bytes:
    """Return words of `width` bytes with numbers added to them, by their places."""
    most, found = 1 << 8 * width, b""
    for place in range(len(data) // width):
        word = int.from_bytes(data[place * width : (place + 1) * width], "little")
        more = changes.get(place, 0) if isinstance(changes, Mapping) else changes(place)
        found += ((word + more) % most).to_bytes(width, "little")
    return found


# -- checkpoints


@dataclass(frozen=True)
class Stored:
    """A chunk as an older part has stored it, and its raw bytes."""

    codec: int
    data: bytes
    raw: bytes


@dataclass(frozen=True)
class Older:
    """A file of an older part, and the chunks in it that a new part needs.

    stored: the chunks by their numbers, in the order of their places. origin: the number
    of the file in the older part. file: its bytes, or None to make a data file that has
    these chunks.
    """

    step: int
    stored: Mapping[int, Stored]
    origin: int = 1
    file: bytes | None = None

    def places(self) -> dict[int, int]:
        """Return the offset of each chunk in the file, by the number of the chunk."""
        found, at = {}, ALIGN
        for number, each in self.stored.items():
            found[number], at = at, at + align(len(each.data))
        return found

    def content(self) -> bytes:
        """Return the bytes of the file."""
        if self.file is not None:
            return self.file
        index = {"job": JOB, "attempt": ATTEMPT, "step": self.step, "rank": 0, "world_size": 1}
        head = header(index, nonce_of(0, self.step), self.origin, SEVERAL_FILES)
        return head + b"".join(
            each.data.ljust(align(len(each.data)), b"\0") for each in self.stored.values()
        )


def delta_part(
    tensors: Sequence[Tensor],
    own: Mapping[int, bytes],
    older: Sequence[Older],
    *,
    unchanged: Sequence[int] = (),
    edit_index: Edit = lambda index: index,
    **options: Any,
) -> Part:
    """Return a part with chunks that are deltas.

    own: the deltas that the part stores itself, by the numbers of their chunks. older:
    the linked files, the oldest first. Each chunk in the first file that has it is
    whole, and a delta of the file before in each later one. unchanged: the numbers of
    chunks that are the deltas in the last file that has them.
    """
    bases: list[list[Any]] = []
    last: dict[int, list[int]] = {}
    for number, file in enumerate(older, 1):
        for chunk, at in file.places().items():
            each = file.stored[chunk]
            below = last.setdefault(chunk, [0])
            bases.append(
                [
                    number,
                    at,
                    len(each.data),
                    each.codec,
                    crc32c(each.raw),
                    crc32c(each.data),
                    below[-1] if each.codec == DELTA else 0,
                ]
            )
            below.append(len(bases))
    at_home = {number: (DELTA, data) for number, data in own.items()}
    elsewhere: dict[int, dict[int, int]] = {number: {} for number in range(1, len(older) + 1)}
    for chunk in unchanged:
        entry = bases[last[chunk].pop() - 1]
        elsewhere[entry[0]][chunk] = entry[1]
        kept = older[entry[0] - 1].stored[chunk]
        at_home[chunk] = kept.codec, kept.data

    def indexed(index: dict[str, Any]) -> dict[str, Any]:
        based = [
            last[number][-1] if at_home.get(number, (RAW,))[0] == DELTA else 0
            for number in range(len(index["chunks"]))
        ]
        edited: dict[str, Any] = edit_index(index | {"bases": bases, "based": based})
        return edited

    return Part(
        tensors,
        state_of([each.fqn for each in tensors]),
        metadata=whole(tensors),
        encode=lambda number, data, width: at_home.get(number, (RAW, data)),
        linked={
            number: (
                "",
                file.content(),
                [nonce_of(0, file.step), file.origin, file.step],
                elsewhere[number],
            )
            for number, file in enumerate(older, 1)
        },
        edit_index=indexed,
        **options,
    )


def vector(about: str, part: Part, **options: Any) -> Vector:
    return Vector(
        about,
        Checkpoint([part], **{"features": FEATURES} | options),
        expected(part.tensors),
        {each.fqn: reference(each.fqn) for each in part.tensors},
    )


# -- sound checkpoints


def words_of(width: int, count: int) -> bytes:
    """Return words that do not repeat, and that use all their bytes."""
    most = 1 << 8 * width
    return b"".join(
        (0x0123_4567_89AB_CDEF * (place + 1) % most).to_bytes(width, "little")
        for place in range(count)
    )


def chain() -> Vector:
    """Return a checkpoint whose chunks are each the third delta in their chain."""
    kinds = (
        ("complex", "complex128", 8),
        ("doubles", "float64", 8),
        ("singles", "int32", 4),
        ("halves", "bfloat16", 2),
        ("bytes", "uint8", 1),
    )
    tensors, stages = [], []
    for name, dtype, width in kinds:
        words = 300
        first = words_of(width, words)
        second = shifted(first, width, lambda place: place % 7 - 3)
        third = shifted(second, width, {3: 100, 90: -1, 91: 5, 299: -100})
        fourth = shifted(third, width, lambda place: place % 100 + 1 if place % 3 == 2 else 0)
        whole_words = words // 2 if dtype == "complex128" else words
        tensors.append(Tensor(name, dtype, (whole_words,), fourth))
        stages.append((2 * width if dtype == "complex128" else width, first, second, third, fourth))
    wholes = [RAW, PLANES, ZSTD, PLANES, RAW]
    forms = {RAW: lambda data, width: data, ZSTD: lambda data, width: frame(data), PLANES: planes}
    older = [
        Older(
            970,
            {
                number: Stored(codec, forms[codec](stage[1], stage[0]), stage[1])
                for number, (codec, stage) in enumerate(zip(wholes, stages, strict=True))
            },
        ),
        Older(
            980,
            {
                number: Stored(
                    DELTA,
                    delta(stage[2], stage[1], stage[0], dense=True, codec=PLANES),
                    stage[2],
                )
                for number, stage in enumerate(stages)
            },
        ),
        Older(
            990,
            {
                number: Stored(DELTA, delta(stage[3], stage[2], stage[0]), stage[3])
                for number, stage in enumerate(stages)
            },
        ),
    ]
    own = {
        number: delta(
            stage[4],
            stage[3],
            stage[0],
            framed=True,
            codec=PLANES if number % 2 == 0 else RAW,
        )
        for number, stage in enumerate(stages)
    }
    values = msgspec.msgpack.encode(state_of([each.fqn for each in tensors]))
    bases = [each.data for file in older for each in file.stored.values()]
    more = {"chain": 3, "read_bytes": sum(map(len, [*bases, *own.values(), values]))}
    return vector(
        "chains of three deltas, of words of 8 (also for elements of 16 bytes), 4, 2 and 1 bytes: "
        "the first lists all words, in planes; the second few words, with gap bytes as they are; "
        "the third a third of the words, with gap bytes in a frame, and in planes or as they are",
        delta_part(tensors, own, older),
        edit_members=lambda members: (
            members | {"parts": [entry | more for entry in members["parts"]]}
        ),
    )


def forms() -> Vector:
    """Return a checkpoint whose deltas have unusual stored forms."""
    doubles, singles, halves, few = (
        words_of(8, 4),
        words_of(4, 2000),
        words_of(2, 40),
        words_of(1, 1100),
    )
    far = {254: 1, 509: 1, 510: 2, 767: 3, 1280: -4, 1999: -5}
    extremes = {0: 0x7FFF, 1: 0x8000, 2: 0x8001, 3: -1, 4: 1, 39: 0xFFFF}
    zeros = delta(halves, halves, 2, dense=True)
    newer = [
        doubles,
        shifted(singles, 4, far),
        shifted(halves, 2, extremes),
        shifted(few, 1, {1: 1}),
    ]
    words = delta_words(newer[2], halves, 2)
    own = [
        delta(newer[0], doubles, 8),
        delta(newer[1], singles, 4),
        stored_form(40, b"".join(words)),
        stored_form(1, b"\x01", b"\x01\xff\xff\xff\xff"),
    ]
    assert len(zeros) == 16 + 80
    names = [("doubles", "float64"), ("singles", "float32"), ("halves", "int16"), ("few", "int8")]
    tensors = [
        Tensor(name, dtype, (len(data) // width,), data)
        for (name, dtype), data, width in zip(names, newer, (8, 4, 2, 1), strict=True)
    ]
    wholes = [doubles, singles, halves, few]
    older = [
        Older(980, {number: Stored(RAW, data, data) for number, data in enumerate(wholes)}),
        Older(990, {2: Stored(DELTA, zeros, halves)}),
    ]
    return vector(
        "deltas without a listed word; with gaps of 254, 255, 256 and more words, and a last word "
        "that is listed; with differences of all signs and sizes, and listed words that are 0; "
        "and with gap bytes behind the last listed word",
        delta_part(tensors, dict(enumerate(own)), older),
    )


def unchanged() -> Vector:
    """Return a checkpoint that links the part file of a checkpoint with deltas."""
    first = [words_of(4, 300), words_of(2, 300), words_of(1, 300)]
    second = [
        shifted(data, width, {5: 1, 250: -1}) for data, width in zip(first, (4, 2, 1), strict=True)
    ]
    third = shifted(second[1], 2, {0: 1})
    names = [("frozen", "float32"), ("moved", "int16"), ("replaced", "uint8")]

    def tensors(content: Sequence[bytes]) -> list[Tensor]:
        return [
            Tensor(name, dtype, (300,), data)
            for (name, dtype), data in zip(names, content, strict=True)
        ]

    stored = {
        number: Stored(DELTA, delta(second[number], first[number], width), second[number])
        for number, width in enumerate((4, 2, 1))
    }
    oldest = Older(980, {number: Stored(RAW, data, data) for number, data in enumerate(first)})
    before = delta_part(
        tensors(second),
        {number: each.data for number, each in stored.items()},
        [oldest],
        step=990,
        tag="step-00000990.a0002",
    )
    files, _ = before.built()
    linked = Older(990, stored, origin=0, file=next(iter(files.values())))
    assert linked.content()[12] == SEVERAL_FILES | LINKED_FILES | DELTAS

    def later(index: dict[str, Any]) -> dict[str, Any]:
        return index | {"bases": [[*base, "later"] for base in index["bases"]]}

    return vector(
        "a chunk that has not changed, and is a delta in a linked file, which was a part file with "
        "deltas; a linked file that has only bases; bases that no chunk needs; and members at the "
        "end of each base that no version knows",
        delta_part(
            tensors([second[0], third, b"\x07" * 300]),
            {1: delta(third, second[1], 2)},
            [oldest, linked],
            unchanged=[0],
            edit_index=later,
        ),
    )


def long_chain(deltas: int) -> Part:
    """Return a part with a chunk whose chain has so many deltas."""
    content = words_of(2, 20)
    older = [Older(100, {0: Stored(RAW, content, content)})]
    for number in range(1, deltas + 1):
        before, content = content, shifted(content, 2, {number % 20: number})
        if number < deltas:
            older.append(
                Older(100 + number, {0: Stored(DELTA, delta(content, before, 2), content)})
            )
    tensors = [Tensor("halves", "bfloat16", (20,), content)]
    return delta_part(tensors, {0: delta(content, before, 2)}, older)


def longest() -> Vector:
    return vector("a chain of 64 deltas, the most that there may be", long_chain(64))


def without_feature() -> Vector:
    return vector(
        "the manifest does not name the feature `deltas`: a reader that knows deltas does not "
        "compare `features` with the parts",
        sample(),
        features=FEATURES[:2],
    )


def columns() -> Vector:
    return of_version_2(
        "a manifest of version 2 with the longest chain and the bytes to read of each part",
        lambda members: (
            members
            | {
                "parts": members["parts"]
                | {name: [0] * len(members["parts"]["bytes"]) for name in ("chain", "read_bytes")}
            }
        ),
    )


SOUND = {
    "deltas": chain,
    "deltas-forms": forms,
    "deltas-unchanged": unchanged,
    "deltas-longest-chain": longest,
    "deltas-without-feature": without_feature,
    "version-2-deltas": columns,
}


# -- checkpoints that must be refused

WORDS = 600
OLDEST = words_of(2, WORDS)
OLDER = shifted(OLDEST, 2, lambda place: 1 if place % 3 == 2 else 0)
NEWEST = shifted(OLDER, 2, {5: 1, 300: -1, 599: 7})
SAMPLE = [Tensor("halves", "bfloat16", (WORDS,), NEWEST), Tensor("mask", "bool", (3,), b"\1\0\1")]
OWN = delta(NEWEST, OLDER, 2)
FILES = (
    Older(980, {0: Stored(RAW, OLDEST, OLDEST)}),
    Older(990, {0: Stored(DELTA, delta(OLDER, OLDEST, 2, framed=True), OLDER)}),
)


def sample(own: bytes = OWN, older: Sequence[Older] = FILES, **options: Any) -> Part:
    """Return a part whose first chunk is a delta of a delta, which this part stores
    itself. The first base is in file 1, and the second one in file 2.
    """
    return delta_part(SAMPLE, {0: own}, older, **options)


def built(part: Part) -> Files:
    return Checkpoint([part], features=FEATURES).built()


def without_deltas(**options: Any) -> Files:
    names = [each.fqn for each in SAMPLE]
    return Checkpoint([Part(SAMPLE, state_of(names), metadata=whole(SAMPLE), **options)]).built()


def indexes() -> Iterator[tuple[str, Refused]]:
    def case(
        name: str,
        about: str,
        *edits: Callable[[dict[str, Any]], None],
        check: str = "deltas",
        newer: bool = False,
        **options: Any,
    ) -> tuple[str, Refused]:
        def edited(index: dict[str, Any]) -> dict[str, Any]:
            for edit in edits:
                edit(index)
            return index

        part = sample(edit_index=edited, **options)
        return f"deltas-{name}", Refused(about, check, "open", built(part), newer)

    def base_in(file: int) -> Callable[[dict[str, Any]], None]:
        return lambda index: index["bases"].append([file, *index["bases"][0][1:]])

    def of_base(number: int, field: int, to: int) -> Callable[[dict[str, Any]], None]:
        return setter("bases", number, field, to=to)

    yield case("based-short", "`based` has a chunk too few", setter("based", to=[2, 0]))
    yield case("based-long", "`based` has a chunk too many", setter("based", to=[2, 0, 0, 0]))
    yield case("based-missing", "there are bases, and no `based`", remover("based"))
    yield case("based-beyond", "a chunk names a base 3, and there are 2", setter("based", 0, to=3))
    yield (
        "deltas-based-alone",
        Refused(
            "`based` has a number for each chunk, and there are no bases",
            "deltas",
            "open",
            without_deltas(edit_index=lambda index: index | {"based": [0, 0, 0]}),
        ),
    )
    yield case("no-base", "a chunk with codec 3 has no base", setter("based", 0, to=0))
    yield case("needless-base", "a chunk with codec 0 has a base", setter("based", 1, to=1))
    yield case("whole-with-base", "a base with codec 0 has a base", of_base(1, 3, RAW))
    yield case("base-without-base", "a base with codec 3 has none", of_base(1, 6, 0))
    yield case("loop", "a base is its own base", of_base(1, 6, 2))
    yield case(
        "loop-of-two",
        "two bases are the bases of each other",
        of_base(0, 3, DELTA),
        of_base(0, 6, 2),
    )
    yield case(
        "order",
        "the base of a base comes behind it in the list",
        lambda index: index["bases"].reverse(),
        of_base(0, 6, 2),
        setter("based", 0, to=1),
    )
    yield case("base-beyond", "a base names a base 9, and there are 2", of_base(1, 6, 9))
    for name, about, file in (
        ("own-file", "a base is in the part file itself", 0),
        ("no-file", "a base is in a data file that there is not", 9),
    ):
        yield case(name, about, base_in(file))
    yield case("place-header", "a base begins in the header of its file", of_base(0, 1, 0))
    yield case("place-unaligned", "a base begins at no multiple of 4096", of_base(1, 1, ALIGN + 8))
    yield case("place-behind", "a base begins behind its file", of_base(0, 1, 1 << 40))
    yield case("place-end", "a base ends behind its file", of_base(0, 2, ALIGN + 1))
    yield case("length-0", "a base has the stored length 0", of_base(0, 2, 0))
    yield case(
        "length-large", "a base has a stored length of 16 MiB and a byte", of_base(0, 2, 0x1000001)
    )
    yield case("codec", "a base has codec 7", of_base(0, 3, 7), check="codec", newer=True)
    yield case(
        "unused-file",
        "a linked file has neither a chunk nor a base",
        lambda index: index["bases"].pop(),
        setter("based", 0, to=1),
        check="chunk-places",
    )
    for name, about, edit in (
        ("member-negative", "a base has a negative offset", of_base(0, 1, -1)),
        ("member-text", "the codec of a base is a text", setter("bases", 0, 3, to="raw")),
        ("member-short", "a base has a member too few", lambda index: index["bases"][0].pop()),
        ("member-map", "`based` is a map", setter("based", to={"0": 2})),
    ):
        yield case(name, about, edit, check="index-members")
    yield (
        "deltas-long-chain",
        Refused("a chain of 65 deltas", "deltas", "open", built(long_chain(65))),
    )
    yield "deltas-not-linked", _not_linked()


def _not_linked() -> Refused:
    """Return a checkpoint that has a chunk in a data file of its own, and a base at the
    place of that chunk.
    """
    mask = SAMPLE[1].data
    own_file = Older(STEP, {1: Stored(RAW, mask, mask)}, origin=3)

    def edited(index: dict[str, Any]) -> dict[str, Any]:
        index["linked"].pop()
        return index

    part = sample(older=[*FILES, own_file], unchanged=[1], edit_index=edited)
    about = "a base is in a data file that is not linked"
    return Refused(about, "deltas", "open", built(part))


def files_of_deltas() -> Iterator[tuple[str, Refused]]:
    def case(
        name: str,
        about: str,
        check: str,
        ending: str,
        edit: Callable[[bytes], bytes],
        at: str = "open",
        *,
        newer: bool = False,
    ) -> tuple[str, Refused]:
        files = built(sample())
        number = ending.count(".") - 1
        [file] = [each for each in files if each.endswith(ending) and each.count(".") == 2 + number]
        files[file] = edit(files[file])
        return f"deltas-{name}", Refused(about, check, at, files, newer)

    yield case(
        "feature-missing",
        "the header does not say that there are bases",
        "part-identity",
        ".ckpt",
        lambda data: reheaded(data, features=SEVERAL_FILES | LINKED_FILES),
    )
    yield (
        "deltas-feature-needless",
        Refused(
            "the header says that there are bases, and there is none",
            "part-identity",
            "open",
            without_deltas(
                edit_files=lambda files: {
                    name: reheaded(data, features=DELTAS) for name, data in files.items()
                }
            ),
        ),
    )
    yield case(
        "linked-feature",
        "the header of a linked file has an unknown feature bit",
        "linked-files",
        ".0001.ckpt",
        lambda data: reheaded(data, features=SEVERAL_FILES | 1 << 31),
        newer=True,
    )
    yield case(
        "stored-crc",
        "one bit of a delta is another",
        "chunk-stored-crc",
        ".ckpt",
        lambda data: put(data, ALIGN + 20, bytes([data[ALIGN + 20] ^ 1])),
        "read",
    )
    for number, what in ((1, "whole base"), (2, "base that is a delta")):
        yield case(
            f"base-{number}-stored-crc",
            f"one bit of a {what} is another",
            "chunk-stored-crc",
            f".000{number}.ckpt",
            lambda data: put(data, ALIGN + 40, bytes([data[ALIGN + 40] ^ 1])),
            "read",
        )
        yield case(
            f"base-{number}-padding",
            f"a byte behind a {what} is not zero",
            "chunk-padding",
            f".000{number}.ckpt",
            lambda data: data[:-1] + b"\1",
            "read",
        )


def checksums() -> Iterator[tuple[str, Refused]]:
    def case(name: str, about: str, edit: Callable[[dict[str, Any]], None]) -> tuple[str, Refused]:
        def edited(index: dict[str, Any]) -> dict[str, Any]:
            edit(index)
            return index

        files = built(sample(edit_index=edited))
        return f"deltas-{name}", Refused(about, "chunk-raw-crc", "read", files)

    yield case(
        "raw-crc",
        "the crc32c of the raw bytes is another",
        setter("chunks", 0, 6, to=crc32c(OLDER)),
    )
    yield case(
        "base-raw-crc",
        "the whole base has another crc32c of its raw bytes",
        setter("bases", 0, 4, to=crc32c(OLDER)),
    )
    yield case(
        "another-base",
        "a chunk has the whole base as its base, and is a delta of the other one",
        setter("based", 0, to=1),
    )


def stored_forms() -> Iterator[tuple[str, Refused]]:
    def case(
        name: str, about: str, stored: bytes, check: str = "codec", **options: Any
    ) -> tuple[str, Refused]:
        files = built(sample(stored, **options))
        return f"delta-{name}", Refused(about, check, "read", files)

    three = b"".join(word for word in delta_words(NEWEST, OLDER, 2) if any(word))
    gaps = gaps_of([5, 300, 599])
    every = b"".join(delta_words(NEWEST, OLDER, 2))
    # Each second word is listed, from the second one on.
    half, even = bytes(600), b"\1" * 300
    assert stored_form(3, three, gaps) == OWN
    yield case("head", "the first 16 bytes are cut short", OWN[:15])
    yield case(
        "listed-beyond", "more words are listed than there are", stored_form(601, every + b"\0\0")
    )
    yield case(
        "listed-huge",
        "4,294,967,295 words are listed, in planes",
        stored_form(0xFFFFFFFF, planes(every, 2), codec=PLANES),
    )
    for codec in (ZSTD, DELTA, 9):
        yield case(
            f"codec-{codec}",
            f"the listed words have codec {codec}: damage, and no newer version",
            stored_form(3, frame(three) if codec == ZSTD else three, gaps, codec=codec),
        )
    yield case(
        "gaps-of-all",
        "all words are listed, and there are gap bytes",
        stored_form(WORDS, every, bytes(WORDS)),
    )
    yield case(
        "gaps-of-none",
        "no word is listed, and there are gap bytes",
        stored_form(0, b"", b"\xff\xff"),
    )
    yield case(
        "trailing-of-none", "a byte follows a delta without a listed word", stored_form(0, b"\0")
    )
    yield case(
        "gaps-none",
        "some words are listed, and there are no gap bytes",
        stored_form(3, three),
    )
    yield case(
        "gaps-too-few",
        "the gap bytes list a word too few",
        stored_form(3, three, gaps_of([5, 300])),
    )
    yield case(
        "gaps-too-many",
        "the gap bytes list a word too many",
        stored_form(3, three, gaps_of([5, 6, 300, 599])),
    )
    yield case(
        "gaps-beyond",
        "the gap bytes list a word behind the chunk",
        stored_form(3, three, gaps_of([5, 300, 600])),
    )
    yield case(
        "gaps-far-beyond",
        "599 gap bytes of 254 list words far behind the chunk",
        stored_form(599, bytes(1198), b"\xfe" * 599),
    )
    yield case(
        "gaps-behind",
        "the gap bytes move the place beyond the end of the chunk, behind the last listed word",
        stored_form(3, three, gaps + b"\xff"),
    )
    yield case(
        "gaps-more-than-words",
        "there are more gap bytes than words",
        stored_form(3, three, frame(bytes(601)), gap_bytes=601),
    )
    yield case(
        "gaps-longer",
        "the stored form of the gap bytes is longer than they are",
        stored_form(3, three, frame(gaps), gap_bytes=len(gaps)),
    )
    yield case(
        "gaps-stored-beyond",
        "the gap bytes end behind the chunk",
        stored_form(3, b"", gaps, gap_bytes=WORDS, gaps_stored=WORDS),
    )
    for name, about, content in (
        ("size", "a frame of gap bytes names another content size", frame(even, size=299)),
        (
            "bomb",
            "a frame of gap bytes names a content size of 1 TiB",
            frame(even, size=1 << 40),
        ),
        ("short", "a frame of gap bytes has a byte less than it names", frame(even[:-1], size=300)),
        ("window", "a frame of gap bytes has a window of 256 KiB", frame(even, window=18)),
        (
            "no-size",
            "a frame of gap bytes names no content size",
            frame(even, window=17, sized=False),
        ),
        ("two", "gap bytes in two frames", frame(even) + frame(b"")),
        ("trailing", "a byte follows a frame of gap bytes", frame(even) + b"\0"),
        ("garbage", "gap bytes that are shorter than their number, and no frame", even[:20]),
        ("empty", "gap bytes that are stored in no byte", b""),
    ):
        yield case(f"frame-{name}", about, stored_form(300, half, content, gap_bytes=300))
    yield case(
        "words-short", "the listed words are a byte too short", stored_form(3, three[:-1], gaps)
    )
    yield case("words-long", "a byte follows the listed words", stored_form(3, three + b"\0", gaps))
    yield case(
        "planes-short",
        "the planes of the listed words have a word too few",
        stored_form(3, planes(three[2:], 2), gaps, codec=PLANES),
    )
    yield case(
        "planes-trailing",
        "a byte follows the planes of the listed words",
        stored_form(3, planes(three, 2) + b"\0", gaps, codec=PLANES),
    )
    yield case(
        "planes-method",
        "a plane of the listed words has method 2",
        stored_form(3, planes(three, 2, lambda _, plane: (2, plane)), gaps, codec=PLANES),
    )
    yield case(
        "planes-bomb",
        "a plane of the listed words is a frame that names 1 TiB",
        stored_form(
            3,
            planes(three, 2, lambda _, plane: (1, frame(plane, size=1 << 40))),
            gaps,
            codec=PLANES,
        ),
    )
    yield case(
        "other",
        "a sound delta of another chunk",
        stored_form(3, three, gaps_of([5, 300, 598])),
        "chunk-raw-crc",
    )
    broken = Stored(DELTA, stored_form(3, three, gaps_of([5, 300])), OLDER)
    yield case(
        "base-form",
        "a base is a delta whose gap bytes list a word too few",
        OWN,
        older=[FILES[0], Older(990, {0: broken})],
    )
    yield case(
        "base-raw-length",
        "a whole base is stored as it is, in a word less than its chunk has",
        OWN,
        older=[Older(980, {0: Stored(RAW, OLDEST[:-2], OLDEST)}), FILES[1]],
    )


_CASES = (indexes, files_of_deltas, checksums, stored_forms)
REFUSED = {name: refused for cases in _CASES for name, refused in cases()}
"""All of them, by name."""
