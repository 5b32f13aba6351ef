"""Tests preamble, alignment and padding."""

from __future__ import annotations

import struct

import pytest

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats.binary import align, check_preamble, check_zero, preamble
from tests.shared.samples import flip
from tests.support.cases import each_case

MAGIC = b"CKPTDXYZ"


@each_case(
    ("length", "rounded"),
    [(0, 0), (1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (1 << 40, 1 << 40)],
)
def test_align_rounds_up_to_the_unit_of_direct_io(length: int, rounded: int) -> None:
    assert align(length) == rounded


def test_preamble_is_magic_version_and_zeros() -> None:
    assert preamble(MAGIC) == b"CKPTDXYZ\x01\0\0\0\0\0\0\0"
    check_preamble(preamble(MAGIC), MAGIC, "it")
    check_preamble(memoryview(preamble(MAGIC) + b"more"), MAGIC, "it")


@each_case(
    ("magic", "version", "zero", "features", "error"),
    [
        (b"CKPTDXYY", 1, 0, 0, IntegrityError),
        (b"CKPTDXYY", 2, 0, 1, IntegrityError),
        (MAGIC, 1, 1, 0, IntegrityError),
        (MAGIC, 2, 0, 0, NewerFormat),
        (MAGIC, 0, 0, 0, NewerFormat),
        (MAGIC, 1, 0, 1, NewerFormat),
        (MAGIC, 1, 0, 1 << 31, NewerFormat),
    ],
)
def test_other_preambles_are_refused(
    magic: bytes, version: int, zero: int, features: int, error: type[IntegrityError]
) -> None:
    with pytest.raises(IntegrityError, match=r"^it ") as caught:
        check_preamble(struct.pack("<8sHHI", magic, version, zero, features), MAGIC, "it")
    assert type(caught.value) is error


def test_every_flipped_bit_of_a_preamble_is_seen() -> None:
    for bit in range(128):
        with pytest.raises(IntegrityError):
            check_preamble(flip(preamble(MAGIC), bit), MAGIC, "it")


def test_padding_that_is_not_zero_is_refused() -> None:
    check_zero(b"", "it")
    check_zero(bytes(100), "it")
    for at in (0, 50, 99):
        with pytest.raises(IntegrityError, match="it: padding is not zero"):
            check_zero(memoryview(flip(bytes(100), 8 * at + 3)), "it")
