"""Takes apart objects that consist of named fields, and brings the fields back into the
caller's own objects.

A record is saved as its kind, the full name of its class, and its fields. No class is
ever imported because a file names it. A record is brought back into the object in the
same place of the caller's state. If there is none, `alone` makes a record of the
standard library again, and gives the fields of any other kind as a dict.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import sys
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

Fields = dict[str, Any]
WITH_FIELDS = frozenset({"dataclass", "namedtuple", "namespace", "simple-namespace", "chain-map"})
"""The kinds of records that may hold modules and optimizers."""


def as_dict(fields: Fields, cls: str) -> Any:
    return fields


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of record, as the functions that take such objects apart and bring their
    fields back.

    `fields` takes a record apart. `restore` brings fields back into a record, and
    returns it, or a new one if it cannot be changed. `alone` makes a record from its
    fields and the name of its class. If `whole` is True, the fields come back as new
    objects, and are not filled one by one; `values` names the field whose tensors then
    get the dtype of the record. A file without the `required` fields is damaged.
    `differs` returns the reason why these fields cannot be brought back into this
    record, or "". `lacks` returns the reason why this process cannot make the record
    with `alone`, or "".
    """

    fields: Callable[[Any], Fields]
    restore: Callable[[Any, Fields], Any]
    alone: Callable[[Fields, str], Any] = as_dict
    whole: bool = False
    values: str = ""
    required: tuple[str, ...] = ()
    differs: Callable[[Any, Fields], str] = lambda place, fields: ""
    lacks: Callable[[Fields, str], str] = lambda fields, cls: ""


def kind_of(value: Any) -> str:
    """Return the kind of a record, a key of `KINDS`, or "" if the value is no record."""
    return _kind_of_class(type(value))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)  # a state may have many plain values
def _kind_of_class(cls: type) -> str:
    if (kind := _EXACT.get(cls)) is not None:
        return kind
    if issubclass(cls, tuple):
        return "namedtuple" if hasattr(cls, "_fields") and hasattr(cls, "_replace") else ""
    if _is_config(cls):
        return "config"
    if dataclasses.is_dataclass(cls):
        return "dataclass"
    numpy = sys.modules.get("numpy")
    if numpy is not None and cls is numpy.random.Generator:
        return "numpy-generator"
    return "numpy-random-state" if numpy is not None and cls is numpy.random.RandomState else ""


def _is_config(cls: type) -> bool:
    """Return True for a configuration of Hugging Face transformers, which writes and
    reads itself as a dict.
    """
    return (
        any(base.__module__.partition(".")[0] == "transformers" for base in cls.__mro__)
        and callable(getattr(cls, "to_dict", None))
        and callable(getattr(cls, "from_dict", None))
    )


# -- objects with attributes


def _set_attributes(place: Any, fields: Fields) -> Any:
    vars(place).update(fields)
    return place


def _dataclass_fields(value: Any) -> Fields:
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if hasattr(value, field.name)
    }


def _into_dataclass(place: Any, fields: Fields) -> Any:
    changed = {
        name: value for name, value in fields.items() if getattr(place, name, fields) is not value
    }
    if not changed:
        return place
    made = copy.copy(place) if type(place).__dataclass_params__.frozen else place
    for name, value in changed.items():
        object.__setattr__(made, name, value) if made is not place else setattr(made, name, value)
    return made


def _into_config(place: Any, fields: Fields) -> Any:
    made = type(place).from_dict(fields)
    vars(place).clear()
    vars(place).update(vars(made))
    return place


def _into_chain(place: Any, fields: Fields) -> Any:
    place.maps = fields["maps"]
    return place


def _make_slice(fields: Fields, cls: str = "") -> slice:
    return slice(fields["start"], fields["stop"], fields["step"])


# -- random generators


def _into_torch(place: torch.Generator, fields: Fields) -> torch.Generator:
    place.set_state(torch.frombuffer(bytearray(fields["state"]), dtype=torch.uint8))
    return place


def _into_numpy(place: Any, fields: Fields) -> Any:
    place.bit_generator.state = fields["state"]
    return place


def _into_numpy_legacy(place: Any, fields: Fields) -> Any:
    place.set_state(fields["state"])
    return place


def _into_python(place: random.Random, fields: Fields) -> random.Random:
    place.setstate(fields["state"])
    return place


def _other(what: str, theirs: Any, ours: Any) -> str:
    return (
        ""
        if theirs == ours
        else f"the checkpoint has a generator of {what} {theirs}, the state one of {what} {ours}"
    )


KINDS: dict[str, Kind] = {
    "dataclass": Kind(_dataclass_fields, _into_dataclass),
    "namedtuple": Kind(
        lambda value: value._asdict(), lambda place, fields: place._replace(**fields)
    ),
    "namespace": Kind(
        lambda value: dict(vars(value)),
        _set_attributes,
        lambda fields, cls: argparse.Namespace(**fields),
    ),
    "simple-namespace": Kind(
        lambda value: dict(vars(value)),
        _set_attributes,
        lambda fields, cls: SimpleNamespace(**fields),
    ),
    "chain-map": Kind(
        lambda value: {"maps": value.maps},
        _into_chain,
        lambda fields, cls: ChainMap(*fields["maps"]),
        required=("maps",),
    ),
    "slice": Kind(
        lambda value: {"start": value.start, "stop": value.stop, "step": value.step},
        lambda place, fields: _make_slice(fields),
        _make_slice,
        whole=True,
        required=("start", "stop", "step"),
    ),
    "config": Kind(lambda value: value.to_dict(), _into_config, whole=True),
    "generator": Kind(
        lambda value: {
            "device": value.device.type,
            "state": value.get_state().numpy().tobytes(),
        },
        _into_torch,
        whole=True,
        required=("device", "state"),
        differs=lambda place, fields: _other("device", fields["device"], place.device.type),
    ),
    "numpy-generator": Kind(
        lambda value: {"state": value.bit_generator.state},
        _into_numpy,
        whole=True,
        required=("state",),
        differs=lambda place, fields: _other(
            "type", fields["state"]["bit_generator"], place.bit_generator.state["bit_generator"]
        ),
    ),
    "numpy-random-state": Kind(
        lambda value: {"state": value.get_state(legacy=False)},
        _into_numpy_legacy,
        whole=True,
        required=("state",),
        differs=lambda place, fields: _other(
            "type", fields["state"]["bit_generator"], place.get_state(legacy=False)["bit_generator"]
        ),
    ),
    "python-random": Kind(
        lambda value: {"state": value.getstate()}, _into_python, whole=True, required=("state",)
    ),
}
_EXACT: dict[type, str] = {
    argparse.Namespace: "namespace",
    SimpleNamespace: "simple-namespace",
    ChainMap: "chain-map",
    slice: "slice",
    torch.Generator: "generator",
    random.Random: "python-random",
}
