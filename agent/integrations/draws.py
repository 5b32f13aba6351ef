"""Tells whether the samples of a data loader depend on random numbers that nobody can set
again: numbers that worker processes draw, or that come from a generator which the data
set keeps. After a recovery, such samples must be loaded again from the beginning of the
epoch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

_ITEMS = 64
"""The number of items of a container that are searched for a generator."""
_THINGS = 1000
"""The number of objects that one search visits."""


class WorkerWatch:
    """The two functions that a DataLoader calls in each of its workers, which note there
    that random numbers were drawn.

    drawn: True once a worker has drawn a random number for a sample, or if its data set
    keeps a generator. A batch that was received is always taken into account.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Put the functions into `loader`, until `remove`."""
        self._init, self._collate = loader.worker_init_fn, loader.collate_fn
        self._flag = torch.zeros(1, device="cpu", dtype=torch.uint8)
        self._flag.share_memory_()  # type: ignore[no-untyped-call]
        # Workers that exist already call the functions that they were started with.
        self._flag.fill_(loader.__dict__.get("_iterator") is not None)
        self._state: Any = None
        loader.worker_init_fn, loader.collate_fn = self.worker_begins, self.collate

    def remove(self, loader: DataLoader[Any]) -> None:
        """Give the loader its own functions back."""
        loader.worker_init_fn, loader.collate_fn = self._init, self._collate

    @property
    def drawn(self) -> bool:
        return bool(self._flag.item())

    def worker_begins(self, number: int) -> None:
        """Note the random generators of a worker that begins."""
        if self._init is not None:
            self._init(number)
        self._state = _generators()

    def collate(self, samples: Any) -> Any:
        """Return the batch of some samples, which were just loaded."""
        batch = self._collate(samples)
        if not self.drawn:
            worker = get_worker_info()
            kept = keeps_generator(self._collate, None if worker is None else worker.dataset)
            self._flag.fill_(kept or self._state != _generators())
        return batch


def keeps_generator(*things: Any) -> bool:
    """Return True if a random generator is found in the attributes of these objects, or
    in the objects and containers that these hold.
    """
    left, seen = list(things), dict[int, Any]()
    while left and len(seen) < _THINGS:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, (ModuleType, type, torch.Tensor)):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, (random.Random, torch.Generator)):
            return True
        if type(thing).__module__.startswith("numpy.random"):
            return True
        left += _inside(thing)
    return False


def _inside(thing: Any) -> Iterator[Any]:
    """Yield the objects that an object holds."""
    if isinstance(thing, dict):
        yield from islice(thing.values(), _ITEMS)
    elif isinstance(thing, (list, tuple, set)):
        yield from islice(thing, _ITEMS)
    yield from getattr(thing, "__dict__", {}).values()
    for name in ("__self__", "func", "args", "keywords"):
        if callable(thing) and (found := getattr(thing, name, None)) is not None:
            yield found
    for cell in getattr(thing, "__closure__", None) or ():
        with suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents


def _generators() -> Any:
    """Return the states of the generators of this process, without those of devices,
    which a worker must not use.
    """
    drawn: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    if "numpy" in sys.modules:
        import numpy as np

        state: Any = np.random.get_state()
        drawn += [state[1].tobytes(), state[2:]]
    return drawn
