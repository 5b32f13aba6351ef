"""Tests that a descriptor is closed once, and that its number is never used afterwards."""

from __future__ import annotations

import os

import pytest

from ckptd.shared.system.descriptor import Descriptor


def test_a_second_close_does_not_close_the_file_that_has_got_the_number() -> None:
    made = Descriptor(os.open("/dev/null", os.O_RDONLY))
    number = made.fileno()
    made.close()
    other = os.open("/dev/zero", os.O_RDONLY)
    os.dup2(other, number)
    made.close()
    assert os.read(number, 2) == b"\0\0"
    os.close(number)
    if other != number:
        os.close(other)


def test_it_is_closed_with_the_object() -> None:
    made = Descriptor(os.open("/dev/null", os.O_RDONLY))
    number = made.fileno()
    del made
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_closed_descriptor_has_no_number() -> None:
    made = Descriptor(os.open("/dev/null", os.O_RDONLY))
    made.close()
    assert made.closed
    with pytest.raises(ValueError, match="closed"):
        made.fileno()
