"""Tests that the compiled loops and their stand-in in NumPy do the same, and that the
compiled ones refuse buffers that do not fit.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.codecs import planes_numpy
from tests.shared.samples import steady
from tests.support.cases import each_case

compiled = pytest.importorskip(
    "ckptd.shared.codecs._planes", reason="no compiler was found when ckptd was installed"
)
WIDTHS = (2, 4, 8)


def empty_planes(width: int, words: int) -> list[bytearray]:
    return [bytearray(words) for _ in range(width)]


@steady
@given(st.sampled_from(WIDTHS), st.binary(max_size=300), st.integers(1, 3), st.integers(0, 7))
def test_both_split_and_join_alike(width: int, piece: bytes, times: int, shift: int) -> None:
    """The raw bytes begin at any address, as a range of a buffer may."""
    raw = piece * times * (1 if len(piece) < 200 else 800)
    raw = raw[: len(raw) // width * width]
    words, place = len(raw) // width, memoryview(bytes(shift) + raw)[shift:]
    one, other = empty_planes(width, words), empty_planes(width, words)
    compiled.split(place, *one)
    planes_numpy.split(place, *other)
    assert one == other
    for join in (compiled.join, planes_numpy.join):
        back = bytearray(b"\xee" * (shift + len(raw)))
        join(memoryview(back)[shift:], *one)
        assert back == b"\xee" * shift + raw


@each_case("function", ["split", "join"])
@each_case(
    "sizes",
    [
        (),
        (8,),
        (8, 4),
        (8, 4, 4, 4),
        (8, 4, 3),
        (7, 3, 3),
        (9, 4, 4),
        (16, 4, 4, 4, 5),
        (18,) + (2,) * 9,
        (8, 5, 5),
    ],
)
def test_buffers_that_do_not_fit_are_refused(function: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        getattr(compiled, function)(*map(bytearray, sizes))


def test_a_buffer_that_cannot_be_written_is_refused() -> None:
    with pytest.raises((BufferError, TypeError)):
        compiled.split(bytes(4), bytes(2), bytes(2))
    with pytest.raises((BufferError, TypeError)):
        compiled.join(bytes(4), bytes(2), bytes(2))
    with pytest.raises(TypeError):
        compiled.split(1, 2, 3)


@pytest.mark.usefixtures("processes")
def test_the_codec_works_without_the_compiled_loops() -> None:
    code = """
import sys
sys.modules["ckptd.shared.codecs._planes"] = None
from ckptd.shared.codecs.planes import Planes, split
assert split.__module__ == "ckptd.shared.codecs.planes_numpy"
raw, stored, back = bytes(range(64)) * 5000, bytearray(320_000), bytearray(320_000)
length = Planes().encode(memoryview(raw), 4, memoryview(stored))
Planes().decode(memoryview(stored)[:length], memoryview(back), 4)
assert back == raw
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", env=os.environ, timeout=60)
