"""Names enum members, classes and constants of torch, and finds what a name stands for,
without importing a module (FORMAT.md, section 3).

A file must not choose which code runs. A name is therefore looked up only in modules
that the program has imported itself, and may stand only for an enum member, for a class
of modules, optimizers, schedulers, tensors or enums, or for a plain type of Python.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ckptd.agent.state.dtypes import torch_dtype
from ckptd.shared.errors import NewerFormat, NotFound, UnsavableValue

_MAIN, _SPAWNED_MAIN = "__main__", "__mp_main__"
"""The names of the main script: as it is started, and in a process that multiprocessing
spawns.
"""
_BASES = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.Tensor,
    enum.Enum,
)
_BUILT_IN = frozenset({
    int, float, bool, str, bytes, bytearray, complex, list, tuple, set, frozenset, dict, type(None),
    object, Counter, OrderedDict, defaultdict, deque,
})  # fmt: skip
_CONSTANTS: dict[str, type] = {
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "qscheme": torch.qscheme,
}


def _found(module: str, qualname: str) -> Any:
    """Return the object that an imported module has under a qualified name, or None."""
    found: Any = sys.modules.get(_MAIN if module == _SPAWNED_MAIN else module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def _place(cls: type, path: str, what: str, instead: str) -> list[str]:
    """Return the module and the qualified name by which another process finds this
    class.

    Raises UnsavableValue if there is no such name. `what` names the value in the error
    text, and `instead` says what to save in its place.
    """
    module = _MAIN if cls.__module__ == _SPAWNED_MAIN else cls.__module__
    if _found(module, cls.__qualname__) is not cls:
        why = (
            "is defined inside a function"
            if "<locals>" in cls.__qualname__
            else "is not what its module has under that name"
        )
        raise UnsavableValue(
            f"{path or 'the state'}: {what} cannot be found by another process, because class "
            f"{module}.{cls.__qualname__} {why}: "
            f"define the class at the top level of a module, or save {instead}"
        )
    return [module, cls.__qualname__]


# -- members of enums


def is_named(member: enum.Enum) -> bool:
    """Return True for a member that its enum has under a name.

    Combinations of flags, and flags without bits, often have none.
    """
    return isinstance(member.name, str) and type(member).__members__.get(member.name) is member


def member_parts(member: enum.Enum, path: str) -> list[Any]:
    """Return the module, the qualified name and the member name of a named enum member.

    Raises UnsavableValue.
    """
    return [
        *_place(type(member), path, f"enum member {member!r}", "its value (member.value)"),
        member.name,
    ]


def flag_parts(flag: enum.Flag, path: str) -> list[Any]:
    """Return the module and the qualified name of a flag, its member names, and its
    other bits.

    The other bits are those that none of these members has. Raises UnsavableValue.
    """
    cls, bits = type(flag), 0
    # Python 3.11 has None for nameless bits
    members = [member for member in flag if isinstance(member, enum.Enum) and is_named(member)]
    for member in members:
        bits |= member.value
    parts = [
        *_place(cls, path, f"flag {flag!r}", "its value (flag.value)"),
        [member.name for member in members],
        flag.value & ~bits,
    ]
    try:
        same = make_flag(parts) is flag
    except (NotFound, ValueError):
        same = False
    if not same:
        raise UnsavableValue(
            f"{path or 'the state'}: flag {flag!r} cannot be made again from its members; save "
            f"its value (flag.value)"
        )
    return parts


def make_member(parts: Any) -> enum.Enum:
    """Return the enum member that the parts from `member_parts` name. Raises NotFound."""
    module, qualname, name = parts
    found: enum.Enum = _enum(module, qualname, name)[name]
    return found


def make_flag(parts: Any) -> enum.Flag:
    """Return the flag that the parts from `flag_parts` name. Raises NotFound."""
    module, qualname, names, value = parts
    text = "|".join([*names, *([hex(value)] if value or not names else [])])
    cls = _enum(module, qualname, text, names)
    if not issubclass(cls, enum.Flag):
        raise NotFound(
            f"the checkpoint holds {qualname}.{text} of module {module}, where {qualname} is no "
            f"longer a Flag"
        )
    for name in names:
        value |= cls[name].value
    try:
        made: enum.Flag = cls(value)
        if type(made) is cls:
            return made
    except ValueError:
        pass
    raise NotFound(
        f"the checkpoint holds {qualname}.{text} of module {module}, and {qualname} no longer has "
        f"such a flag"
    )


def _enum(module: str, qualname: str, text: str, names: list[str] | None = None) -> Any:
    """Return the enum of this name.

    Raises NotFound if it is not imported, or lacks one of these members. `text` names
    the member in the error text.
    """
    found = _found(module, qualname)
    if not isinstance(found, type) or not issubclass(found, enum.Enum):
        raise NotFound(
            f"the checkpoint holds {qualname}.{text} of module {module}: import that module "
            f"before loading"
        )
    if not set([text] if names is None else names) <= found.__members__.keys():
        raise NotFound(
            f"the checkpoint holds {qualname}.{text} of module {module}, and {qualname} no longer "
            f"has such a member"
        )
    return found


# -- classes


def _can_be_named(cls: Any) -> bool:
    return isinstance(cls, type) and (cls in _BUILT_IN or issubclass(cls, _BASES))


def class_parts(cls: Any, path: str) -> list[str] | None:
    """Return the module and the qualified name of a class object.

    Return None for a value that is not such a class. Raises UnsavableValue.
    """
    if not _can_be_named(cls):
        return None
    return (
        ["builtins", "NoneType"]
        if cls is type(None)
        else _place(cls, path, f"class {cls.__qualname__}", "its name, as text")
    )


def make_class(parts: Any) -> type:
    """Return the class that the parts from `class_parts` name. Raises NotFound."""
    module, qualname = parts
    found = (
        type(None) if (module, qualname) == ("builtins", "NoneType") else _found(module, qualname)
    )
    if found is None:
        raise NotFound(
            f"the checkpoint holds class {qualname} of module {module}: import that module before "
            f"loading"
        )
    if not _can_be_named(found):
        raise NotFound(
            f"the checkpoint holds class {qualname} of module {module}, which is no class of "
            f"modules, optimizers, "
            "schedulers, tensors or enums, "
            "and no plain type of Python"
        )
    made: type = found
    return made


# -- constants of torch


def constant_parts(value: Any) -> list[str] | None:
    """Return the kind and the text of a constant of torch, or None for any other value."""
    kind = type(value)
    if kind is TorchVersion:
        return ["version", str(value)]
    if kind is torch.finfo or kind is torch.iinfo:
        return [kind.__name__, value.dtype]
    name = (
        str(value)
        if (kind_name := kind.__name__) in _CONSTANTS and kind is _CONSTANTS[kind_name]
        else ""
    )
    return [kind.__name__, name.removeprefix("torch.")] if name else None


def make_constant(parts: Any) -> Any:
    """Return the constant that the parts from `constant_parts` name.

    Raises NotFound if this torch does not have it, and NewerFormat for an unknown kind.
    """
    kind, text = parts
    if kind == "version":
        return TorchVersion(text)
    if kind in ("finfo", "iinfo"):
        try:
            return (torch.finfo if kind == "finfo" else torch.iinfo)(torch_dtype(text))
        except TypeError:
            raise NotFound(f"torch {torch.__version__} has no {kind} of {text!r}") from None
    if kind not in _CONSTANTS:
        raise NewerFormat(
            f"a value has the unknown kind {kind!r}: it was written by a newer ckptd; upgrade "
            f"this one"
        )
    # Not by getattr, which imports some modules of torch at their first use.
    found = vars(torch).get(text)
    if not isinstance(found, _CONSTANTS[kind]):
        raise NotFound(f"torch {torch.__version__} has no {kind} {text!r}: install a newer torch")
    return found
