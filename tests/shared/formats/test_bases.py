"""Tests that a part whose index has impossible bases, or whose files are damaged, is
refused: no reader crashes, or returns bytes that were not saved.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.part import PartReader
from tests.shared.samples import flip, steady
from tests.vectors.build import Files
from tests.vectors.deltas import sample

NUMBERS = st.integers(0, 5) | st.sampled_from(
    [-1, 255, 4095, 4096, 8192, 1 << 24, (1 << 24) + 1, (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 64]
)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS.filter(lambda n: n < 1 << 64) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=20,
)


@dataclass
class Memory:
    """A file in memory, as a source."""

    data: bytes
    remote = False

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, buffer: memoryview, offset: int) -> int:
        found = self.data[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def view(self, offset: int, length: int) -> memoryview:
        return memoryview(self.data)[offset : offset + length]

    def close(self) -> None:
        pass


def content(files: Files) -> dict[int, bytes]:
    """Return the raw bytes of each chunk, by its offset in the packed slot.

    Raises IntegrityError.
    """

    def open_file(name: str) -> Memory:
        if name not in files:
            raise FileNotFoundError(name)
        return Memory(files[name])

    name = next(iter(files))
    reader = PartReader(Memory(files[name]), name, open_file=open_file)
    reader.check_codecs()
    found = {}
    for number, chunk in enumerate(reader.ranges):
        raw = bytearray(chunk.length)
        reader.read_chunk(number, memoryview(raw))
        found[chunk.offset] = bytes(raw)
    return found


def built(**options: Any) -> Files:
    files, _ = sample(**options).built()
    return files


SOUND = content(built())


def edited(members: dict[str, Any]) -> Files:
    return built(edit_index=lambda index: index | members)


def unchanged() -> dict[str, Any]:
    """Return the members of the sound index that say how deltas are decoded."""
    found: dict[str, Any] = {}

    def keep(index: dict[str, Any]) -> dict[str, Any]:
        found.update(msgspec.msgpack.decode(msgspec.msgpack.encode(index)))
        return index

    built(edit_index=keep)
    return {name: found[name] for name in ("bases", "based", "chunks", "placed", "linked", "files")}


def refused_or_sound(members: dict[str, Any]) -> bool:
    """Return True if the part with these members is refused; otherwise its bytes must be
    those that were saved.
    """
    try:
        files = edited(members)
    except (OverflowError, TypeError, AttributeError):  # no msgpack, or no header to write
        return False
    try:
        found = content(files)
    except IntegrityError:
        return True
    assert found == SOUND
    return False


@steady
@given(st.data())
def test_numbers_that_do_not_fit_are_refused(data: st.DataObject) -> None:
    members = unchanged()
    for _ in range(data.draw(st.integers(1, 3))):
        rows = members[data.draw(st.sampled_from(["bases", "bases", "chunks", "linked"]))]
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        field = data.draw(st.integers(0, len(row) - 1))
        near = row[field] + data.draw(st.integers(-1, 1)) if isinstance(row[field], int) else 0
        row[field] = data.draw(st.just(near) | NUMBERS)
    if data.draw(st.integers(0, 3)) == 3:
        members["based"] = data.draw(st.lists(st.integers(0, 4), max_size=5))
    refused_or_sound(members)


@steady
@given(ANYTHING, ANYTHING)
def test_members_of_any_form_are_refused(bases: Any, based: Any) -> None:
    refused_or_sound({"bases": bases, "based": based})
    refused_or_sound({"bases": [*unchanged()["bases"], bases]})
    refused_or_sound({"based": [2, 0, based]})


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_base_of_another_base_is_seen(step: int) -> None:
    """Bases in any order and number: all but the sound chain are refused."""
    bases = unchanged()["bases"]
    chosen = [bases[number % 2] for number in range(step)]
    sound = [base[-1] for base in chosen] == [0, 1] and step == 2
    assert refused_or_sound({"bases": chosen, "based": [len(chosen), 0, 0]}) is not sound


def test_every_flip_is_seen_in_each_file() -> None:
    files, chance = built(), random.Random(3)
    assert len(files) == 3
    for name, data in files.items():
        used = [at for at, byte in enumerate(data) if byte]
        for at in chance.sample(used, 60) + chance.sample(range(len(data)), 60):
            damaged = files | {name: flip(data, 8 * at + chance.randrange(8))}
            with pytest.raises(IntegrityError):
                content(damaged)


@pytest.mark.parametrize("number", [1, 2])
def test_a_linked_file_that_is_missing_or_cut_short_is_seen(number: int) -> None:
    files = built()
    name = list(files)[number]
    with pytest.raises(IntegrityError, match="is missing"):
        content({each: data for each, data in files.items() if each != name})
    for length in (0, 100, 4096, 5000, 8191):
        with pytest.raises(IntegrityError, match="as long as the index says"):
            content(files | {name: files[name][:length]})
