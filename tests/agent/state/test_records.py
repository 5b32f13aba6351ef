"""Tests the kinds of records: which objects they are, and how their fields come back
into an object of the caller's.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import types
from collections import ChainMap, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptd.agent.state.records import KINDS, kind_of
from tests.support.cases import each_case


@dataclasses.dataclass
class Open:
    a: int
    b: Any = None
    c: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int


class Pair(NamedTuple):
    x: int
    y: int = 0


class Config:
    """Behaves like a configuration of transformers."""

    __module__ = "transformers.models.tiny"

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Config:
        return cls(**settings)


class Derived(Config):
    __module__ = "mine"


@each_case(
    ("value", "kind"),
    [
        (Open(1), "dataclass"),
        (Frozen(1), "dataclass"),
        (Pair(1), "namedtuple"),
        (argparse.Namespace(a=1), "namespace"),
        (SimpleNamespace(a=1), "simple-namespace"),
        (ChainMap({}), "chain-map"),
        (slice(1), "slice"),
        (Config(a=1), "config"),
        (Derived(a=1), "config"),
        (torch.Generator(), "generator"),
        (np.random.default_rng(), "numpy-generator"),
        (np.random.RandomState(), "numpy-random-state"),
        (random.Random(), "python-random"),
        (random.SystemRandom(), ""),
        (Open, ""),
        ((1, 2), ""),
        (torch.Size([1]), ""),
        (torch.ones(2).max(0), ""),
        ({}, ""),
        (defaultdict(int), ""),
        (object(), ""),
        (types.MappingProxyType({}), ""),
    ],
)
def test_which_objects_are_records(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


def fields(value: Any) -> dict[str, Any]:
    return KINDS[kind_of(value)].fields(value)


def restore(place: Any, saved: dict[str, Any]) -> Any:
    return KINDS[kind_of(place)].restore(place, saved)


def test_an_open_object_is_changed_and_a_frozen_one_replaced() -> None:
    place = Open(1)
    assert restore(place, {"a": 2, "b": [3], "c": 4}) is place
    assert (place.a, place.b, place.c) == (2, [3], 4)
    frozen = Frozen(1)
    assert restore(frozen, {"a": 1}) is frozen
    assert restore(frozen, {"a": 2}) == Frozen(2)
    assert frozen == Frozen(1)
    assert restore(Pair(1, 2), {"y": 5}) == Pair(1, 5)
    config = Config(a=1, old=2)
    assert restore(config, {"a": 3}) is config
    assert vars(config) == {"a": 3}
    for namespace in (argparse.Namespace(a=1), SimpleNamespace(a=1)):
        assert restore(namespace, {"a": 2}) is namespace
        assert namespace.a == 2
    chain = ChainMap({"a": 1})
    assert restore(chain, {"maps": [{"a": 2}, {"b": 3}]}) is chain
    assert chain == {"a": 2, "b": 3}
    assert restore(slice(0), {"start": 1, "stop": 2, "step": None}) == slice(1, 2)


@each_case(
    ("make", "draw"),
    [
        (lambda: torch.Generator(), lambda g: torch.rand(3, generator=g).tolist()),
        (lambda: np.random.default_rng(), lambda g: g.random(3).tolist()),
        (lambda: np.random.Generator(np.random.MT19937()), lambda g: g.normal(size=3).tolist()),
        (lambda: np.random.RandomState(), lambda g: g.normal(size=3).tolist()),
        (lambda: random.Random(), lambda g: [g.gauss(0, 1) for _ in range(3)]),
    ],
)
def test_a_generator_goes_on_where_it_was(make: Any, draw: Any) -> None:
    generator, other = make(), make()
    draw(generator)
    saved = fields(generator)
    expected = draw(generator)
    assert KINDS[kind_of(other)].differs(other, saved) == ""
    assert restore(other, saved) is other
    assert draw(other) == expected


def test_a_generator_of_another_type_is_refused() -> None:
    saved = fields(np.random.Generator(np.random.MT19937()))
    assert KINDS["numpy-generator"].differs(np.random.default_rng(), saved) == (
        "the checkpoint has a generator of type MT19937, the state one of type PCG64"
    )
    assert KINDS["generator"].differs(torch.Generator(), {"device": "cuda", "state": b""}) == (
        "the checkpoint has a generator of device cuda, the state one of device cpu"
    )


def test_records_of_the_standard_library_are_made_without_an_object_of_the_callers() -> None:
    for value in (
        argparse.Namespace(a=1),
        SimpleNamespace(a=1),
        ChainMap({"a": 1}, {"b": 2}),
        slice(1, None, 2),
    ):
        made = KINDS[kind_of(value)].alone(fields(value), "")
        assert (type(made), made) == (type(value), value)
    assert KINDS["dataclass"].alone({"a": 1}, f"{__name__}.Open") == {"a": 1}
    assert Open in vars(sys.modules[__name__]).values()
