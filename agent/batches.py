"""The batches of a data loader, with a position that is part of the state: after a
recovery they continue with the batch after the last one that was trained on.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ckptd.agent.state.tree import per_rank
from ckptd.agent.threads.loader_workers import sigterm_held, workers_outlive_sigterm
from ckptd.shared.errors import InvalidRequest

log = logging.getLogger("ckptd.agent")

_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator", "in_order",
)  # fmt: skip
_WORKER_OPTIONS = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
"""The settings of a DataLoader that has worker processes; others must not be given them."""


class Batches:
    """The batches of a `DataLoader`, epoch after epoch without end, from the saved
    position on.

    Put it into the state, and iterate over it in place of the loader:

    batches = ckptd.Batches(loader)
    state = {"model": model, "optim": optimizer, "data": batches}

    The order of an epoch depends on `seed` and the number of the epoch alone. It is
    drawn from generators of its own, so that it neither changes the random numbers of
    the training nor depends on them. A recovery inside an epoch skips in the sampler:
    no sample is loaded twice. For an iterable data set, which has no sampler, the
    batches before the position are loaded again and left out. Random numbers that
    worker processes draw, as for augmentation, begin again after a recovery.

    The position is kept in samples of all ranks. It stays the same if the number of
    ranks or the batch size changes, and is rounded down to a whole batch.

    loader: a DataLoader with any sampler, workers included, whose settings are taken
        over; or a loader that saves its position itself, with `state_dict` and
        `load_state_dict`, such as torchdata's StatefulDataLoader. Its workers outlive a
        SIGTERM that is meant for the training (`outlive_sigterm`).
    seed: an integer. It must be the same on all ranks, and after a recovery.

    epoch: the number of the epoch, from 0. batch: the number of batches of this epoch
    that have been returned. drawn: the number of batches that this object has returned.
    saved: True once the position was saved or recovered.

    Raises InvalidRequest if `loader` is neither of these.
    """

    def __init__(self, loader: Any, *, seed: int = 0) -> None:
        self.epoch = self.batch = self.drawn = 0
        self.saved = False
        self._seed = seed
        self._loader: _Loader
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            self._loader = _Stateful(loader)
        elif type(loader) is not DataLoader:
            raise InvalidRequest(
                f"{type(loader).__name__} is neither a torch DataLoader nor a loader with "
                f"state_dict() and load_state_dict(): pass one of these, or save the position of "
                f"this loader in the state yourself. Ray's prepare_data_loader() returns a "
                f"DataLoader if it is called with move_to_device=False"
            )
        elif isinstance(loader.dataset, IterableDataset):
            self._loader = _Repeated(loader)
        else:
            self._loader = _Ordered(loader)
            _warn_of_equal_batches(loader)
        workers_outlive_sigterm(self._loader.loader)
        known.add(self)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._loader.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches after the position.

        Raises InvalidRequest if an epoch has no batch.
        """
        while True:
            draws = _Draws(f"{self._seed}/{self.epoch}")
            for batch in self._loader.batches(self.epoch, self.batch, draws):
                self.batch += 1
                self.drawn += 1
                yield batch
            if self.batch == 0:
                raise InvalidRequest(
                    "the data loader has no batch: give it at least one sample for each rank, or "
                    "drop_last=False"
                )
            self.epoch += 1
            self.batch = 0

    def state_dict(self) -> dict[str, Any]:
        self.saved = True
        return {
            "epoch": self.epoch,
            "samples": self.batch * self._loader.samples_per_batch,
            "seed": self._seed,
            **self._loader.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a position.

        Raises InvalidRequest if the seed or the number of samples is another one: the
        order of the epoch is then another one too.
        """
        if state["seed"] != self._seed:
            raise InvalidRequest(
                f"the batches were saved with seed {state['seed']}, and this run has seed "
                f"{self._seed}: use Batches(loader, seed={state['seed']})"
            )
        self.saved = True
        self._loader.load(state)
        self.epoch = state["epoch"]
        self.batch, rest = divmod(state["samples"], self._loader.samples_per_batch)
        if rest:
            log.warning(
                "the saved position is sample %d of epoch %d, and a batch of all ranks has %d "
                "samples now: %d samples are trained on twice",
                state["samples"],
                self.epoch,
                self._loader.samples_per_batch,
                rest,
            )


known: weakref.WeakSet[Batches] = weakref.WeakSet()
"""All objects of this process."""


def _warn_of_equal_batches(loader: DataLoader[Any]) -> None:
    """Warn if all ranks get the same batches: their order depends on the seed alone."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, (RandomSampler, SequentialSampler)) for sampler in samplers):
        log.warning(
            "the sampler of this loader is not distributed: all %d ranks get the same batches, "
            "unless each has a data set of its own; use a DistributedSampler",
            torch.distributed.get_world_size(),
        )


class _Loader(ABC):
    """A data loader that can begin an epoch at any of its batches.

    samples_per_batch: the samples of all ranks in one batch; 1 if they are not known.
    """

    samples_per_batch = 1

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    @abstractmethod
    def batches(self, epoch: int, skip: int, draws: _Draws) -> Iterator[Any]:
        """Yield the batches of an epoch without the first `skip`."""

    def state(self) -> dict[str, Any]:
        """Return what the position needs beside epoch and samples."""
        return {}

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Take over or check what `state` returned."""


class _Stateful(_Loader):
    """A loader that saves its position itself, on each rank."""

    def batches(self, epoch: int, skip: int, draws: _Draws) -> Iterator[Any]:
        if skip == 0:
            _begin_epoch(self.loader, epoch, draws.seed)
        with sigterm_held():
            return iter(self.loader)

    def state(self) -> dict[str, Any]:
        held = self.loader.state_dict()
        return {"loader": per_rank(held) if torch.distributed.is_initialized() else held}

    def load(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])


class _Repeated(_Loader):
    """A loader of an iterable data set: what comes before the position is loaded again."""

    def batches(self, epoch: int, skip: int, draws: _Draws) -> Iterator[Any]:
        with draws, sigterm_held():
            found = iter(self.loader)
        if skip:
            log.warning(
                "the data set is iterable: %d batches are loaded again to find the position", skip
            )
        for number, batch in enumerate(_drawn(found, draws)):
            if number >= skip:
                yield batch

    def load(self, state: dict[str, Any]) -> None:
        """Do nothing: epoch and samples are the whole position."""


class _Ordered(_Loader):
    """A copy of a loader of numbered samples, with an order that can begin at any batch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        batched = loader.batch_sampler is not None
        self._order = _Order(loader.batch_sampler if batched else loader.sampler)
        self._given = loader
        size = getattr(loader.batch_sampler, "batch_size", None) if batched else 1
        self.samples_per_batch = (size or 1) * getattr(loader.sampler, "num_replicas", 1)
        self._length = len(loader.dataset)  # type: ignore[arg-type]
        options: dict[str, Any] = {
            name: getattr(loader, name)
            for name in (*_OPTIONS, *(_WORKER_OPTIONS if loader.num_workers else ()))
        }
        if batched:
            options["batch_sampler"] = self._order
        else:
            options |= {"sampler": self._order, "batch_size": None}
        super().__init__(DataLoader(loader.dataset, **options))

    def batches(self, epoch: int, skip: int, draws: _Draws) -> Iterator[Any]:
        _begin_epoch(self._given, epoch, draws.seed)
        self._order.skip, self._order.draws = skip, draws
        # Of their own, because a loader with persistent workers draws the seeds of its
        # workers in its first epoch only.
        with _Draws(f"{draws.seed}/workers"), sigterm_held():
            return iter(self.loader)

    def state(self) -> dict[str, Any]:
        return {"length": self._length}

    def load(self, state: dict[str, Any]) -> None:
        if state["length"] != self._length:
            raise InvalidRequest(
                f"the data set had {state['length']} samples when this position was saved, and has "
                f"{self._length} now, so that the order of the epoch is another one: use the same "
                f"data, or leave the position as it is with recover(..., keep=[...])"
            )


class _Order:
    """The batches of one epoch, as lists of numbers of samples, or the numbers
    themselves.

    The first `skip` are left out. The sampler draws from `draws`.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.skip = 0
        self.draws = _Draws("")

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        draws, skip = self.draws, self.skip
        with draws:
            found = iter(self._sampler)
        for number, item in enumerate(_drawn(found, draws)):
            if number >= skip:
                yield item


def _begin_epoch(loader: Any, epoch: int, seed: int) -> None:
    """Seed the generators of a loader and its samplers, and tell the samplers the epoch."""
    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    for place in (loader, *samplers):
        if (generator := getattr(place, "generator", None)) is not None:
            generator.manual_seed(seed)
        if hasattr(place, "set_epoch"):
            place.set_epoch(epoch)


def _drawn(found: Iterator[Any], draws: _Draws) -> Iterator[Any]:
    """Yield the items of an iterator that draws from `draws`."""
    while True:
        with draws:
            try:
                item = next(found)
            except StopIteration:
                return
        yield item


class _Draws:
    """Generators apart from those of the training, seeded with a text.

    Inside `with draws:` they are the global generators of Python, NumPy and torch for
    the CPU.
    """

    def __init__(self, text: str) -> None:
        self.seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        self._own: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._outer = _generators()
        if self._own is not None:
            _set_generators(self._own)
            return
        random.seed(self.seed)
        torch.default_generator.manual_seed(self.seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(self.seed % (1 << 32))

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._own = _generators()
            _set_generators(self._outer)


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        random.getstate(),
        torch.default_generator.get_state(),
        None if numpy is None else numpy.random.get_state(),
    )


def _set_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    torch.default_generator.set_state(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
