"""Tests the results of checks."""

from __future__ import annotations

from ckptd.daemon.commands.doctor_check import OK, Check


def test_a_check_has_no_values_unless_they_are_given() -> None:
    one, other = Check("a", OK, "fine"), Check("b", OK, "fine")
    assert one.values == {}
    assert one.values is not other.values
