"""Tests names of enum members, classes and constants: what they stand for is found
again, or refused by key, and no module is imported.
"""

from __future__ import annotations

import enum
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent.state.packer import Packer
from ckptd.agent.state.references import (
    constant_parts,
    make_class,
    make_constant,
    make_flag,
    make_member,
)
from ckptd.agent.state.tree import Unavailable
from ckptd.agent.state.values import decode
from ckptd.shared.errors import NotFound, UnsavableValue
from tests.support import kinds
from tests.support.cases import each_case


def again(value: Any) -> Any:
    return decode(Packer().encode({"x": value}))["x"]


@each_case("value", [*kinds.FLAGS, *kinds.ENUMS, *kinds.CLASSES, *kinds.CONSTANTS], ids=str)
def test_every_value_comes_back_as_the_same_object(value: Any) -> None:
    found = again(value)
    assert type(found) is type(value)
    assert str(found) == str(value)
    assert found is value or not isinstance(
        value, (enum.Enum, type, torch.layout, torch.memory_format, torch.qscheme, torch.dtype)
    )


def test_a_class_that_another_process_cannot_find_is_refused_by_key() -> None:
    class Local(enum.Flag):
        A = 1
        B = 2

    class Net(torch.nn.Module):
        pass

    where = (
        r"class tests.agent.state.test_references.test_a_class_.*<locals>.{} is defined "
        r"inside "
        r"a "
        r"function: define the class at the top"
    )
    for value in (Local.A, Local(3)):
        with pytest.raises(
            UnsavableValue,
            match=r"^mode\.0: .*cannot be found by another process, because "
            + where.format("Local"),
        ):
            Packer().encode({"mode": [value]})
    with pytest.raises(
        UnsavableValue,
        match=r"^net: class .*Net cannot be found by another process, because "
        + where.format("Net"),
    ):
        Packer().encode({"net": Net})
    Made = enum.Enum("Made", "A")
    with pytest.raises(UnsavableValue, match=r"^x: .* is not what its module has under that name"):
        Packer().encode({"x": Made.A})


def test_a_flag_that_its_class_cannot_make_again_is_refused_by_key() -> None:
    bits = int.__new__(kinds.Bits, 5)
    bits._name_, bits._value_ = None, 5
    with pytest.raises(
        UnsavableValue,
        match=r"^x: flag .* cannot be made again from its members; save its value \(flag.value\)$",
    ):
        Packer().encode({"x": bits})


@each_case(
    "value",
    [len, torch.nn.functional.relu, Path, Exception, kinds.Outer, re.Pattern],
    ids=lambda value: value.__name__.replace("<", ""),
)
def test_functions_and_other_classes_are_refused(value: Any) -> None:
    with pytest.raises(UnsavableValue, match="^x: a value of type "):
        Packer().encode({"x": value})


@each_case(
    ("module", "qualname"),
    [
        ("subprocess", "Popen"),
        ("builtins", "eval"),
        ("builtins", "type"),
        ("os", "system"),
        ("antigravity", "X"),
        ("torch", "nn"),
        ("", ""),
    ],
)
def test_a_file_names_only_classes_of_certain_kinds_that_are_imported(
    module: str, qualname: str
) -> None:
    before = set(sys.modules)
    with pytest.raises(NotFound):
        make_class([module, qualname])
    with pytest.raises(NotFound):
        make_member([module, qualname, "A"])
    with pytest.raises(NotFound):
        make_flag([module, qualname, ["A"], 0])
    assert set(sys.modules) == before


def test_members_that_are_gone_are_named() -> None:
    module = kinds.__name__
    with pytest.raises(
        NotFound,
        match=r"^the checkpoint holds Access\.Z of module .*, and Access no longer has such a "
        r"member$",
    ):
        make_member([module, "Access", "Z"])
    with pytest.raises(
        NotFound,
        match=r"^the checkpoint holds Access\.R\|Z of module .*, and Access no longer has such a "
        r"member$",
    ):
        make_flag([module, "Access", ["R", "Z"], 0])
    with pytest.raises(
        NotFound,
        match=r"^the checkpoint holds Access\.R\|0x100 of module .*, and Access no longer has such "
        r"a flag$",
    ):
        make_flag([module, "Access", ["R"], 256])
    with pytest.raises(
        NotFound,
        match=r"^the checkpoint holds Colour\.RED of module .*, where Colour is no longer a Flag$",
    ):
        make_flag([module, "Colour", ["RED"], 0])


def test_constants_that_this_torch_lacks_are_named() -> None:
    for kind, text in (
        ("layout", "channels_last"),
        ("memory_format", "strided"),
        ("qscheme", "float32"),
        ("finfo", "float1"),
        ("layout", "nn"),
    ):
        with pytest.raises(NotFound, match=re.escape(f"{text!r}: install a newer torch")):
            make_constant([kind, text])
    assert constant_parts(torch.float32) is None


def test_a_name_that_is_lacking_takes_the_place_of_its_value_only() -> None:
    document = Packer().encode({"a": kinds.Colour.RED, "b": 1}).replace(b"Colour", b"Cooler")
    found = decode(document)
    assert found["b"] == 1
    assert isinstance(found["a"], Unavailable)
    assert Packer().encode(found) == document


@pytest.mark.parametrize(
    ("kind", "dtype"), [("finfo", "int64"), ("iinfo", "float32"), ("iinfo", "no_dtype")]
)
def test_limits_of_a_dtype_that_has_none_are_not_available(kind: str, dtype: str) -> None:
    with pytest.raises(NotFound, match=dtype):
        make_constant([kind, dtype])
