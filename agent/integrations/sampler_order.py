"""The order in which a data loader takes its samples, which a recovery inside an epoch
repeats without loading the samples that were trained on.

Training draws the same random numbers with this module as without it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ckptd.agent.state.capture import rng_state, set_rng_state
from ckptd.agent.threads.loader_workers import workers_outlive_sigterm
from ckptd.integrations.draws import WorkerWatch, keeps_generator
from ckptd.shared.errors import InvalidRequest

log = logging.getLogger("ckptd.agent")

_PARTS = ("base_dataloader", "batch_sampler", "sampler", "dataset")
"""The attributes under which the parts of a loader hold generators and seeds."""
_HELD = ("generator", "synchronized_generator", "initial_seed")
_END = object()


@dataclass(frozen=True, slots=True)
class _Repeat:
    """A pass that is repeated up to a position.

    state: what `SamplerOrder.state` has returned. position: the batches that were
    trained on. skip: those of them that are left out. same: False if the batches have
    another size now. then: called when the sampler is asked for more batches than it
    had been asked for when the state was saved.
    """

    state: dict[str, Any] = field(default_factory=dict)
    position: int = 0
    skip: int = 0
    same: bool = True
    then: Callable[[], object] | None = None

    @property
    def ahead(self) -> list[dict[str, Any] | None]:
        """The random generators when the batches after the position were asked for."""
        return self.state.get("ahead", []) if self.same else []


@dataclass(frozen=True, slots=True)
class _Asked:
    """A batch that the loader has asked for: its number in the pass, a digest of the
    samples up to it, and the random generators from which it is then loaded, or None if
    a worker loads it.
    """

    number: int
    digest: str
    rng: dict[str, Any] | None


class SamplerOrder:
    """The batch sampler of a DataLoader, or its sampler if it makes no batches, with an
    order that can be repeated.

    It takes the place of that sampler in the loader, until `remove`. Before each pass
    it notes the states of the random generators from which a sampler may draw. For each
    batch it keeps a digest of the samples up to it, and the random generators from
    which it is loaded, because a loader may load batches ahead of the training.

    samples_per_batch: the samples of all ranks in one batch; 1 if they are not known.
    """

    def __init__(self, loader: Any) -> None:
        """Put the order into `loader`, a torch DataLoader of a data set with samples by
        number.
        """
        self._loader = loader
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.given: Any = getattr(loader, self._name)
        if isinstance(self.given, SamplerOrder):
            self.given = self.given.given
        # A DataLoader refuses a new sampler, because its workers may have begun. No
        # iterator of this loader exists yet.
        loader.__dict__[self._name] = self
        self._watch = WorkerWatch(loader) if loader.num_workers else None
        size = 1 if self._name == "sampler" else getattr(self.given, "batch_size", 1)
        self.samples_per_batch = (size or 1) * getattr(loader.sampler, "num_replicas", 1)
        # A data set needs no length if its sampler has one.
        self._length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        self._began: dict[str, Any] = {}
        self._asked: deque[_Asked] = deque()
        self._repeat: _Repeat | None = None
        self._then: Callable[[], object] | None = None

    def remove(self) -> None:
        """Give the loader its own sampler and functions back."""
        self._loader.__dict__[self._name] = self.given
        if self._watch is not None:
            self._watch.remove(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "given":
            raise AttributeError(name)  # not made yet, as in a copy
        return getattr(self.given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the given sampler, if it is not one of this object."""
        own = name.startswith("_") or name in ("given", "samples_per_batch")
        (super().__setattr__ if own else partial(setattr, self.given))(name, value)

    def __len__(self) -> int:
        return len(self.given)

    def state(self, position: int) -> dict[str, Any]:
        """Return what `repeat` needs after `position` batches of the current pass."""
        self.forget_before(position)
        loader, watch, asked = self._loader, self._watch, self._asked
        return {
            "length": self._length,
            "samples": position * self.samples_per_batch,
            "began": self._began,
            "now": held_states(loader),
            "digest": asked[0].digest if asked and asked[0].number == position else "",
            "ahead": [one.rng for one in asked if one.number > position],
            "drawn": (watch is not None and watch.drawn)
            or keeps_generator(loader.dataset, loader.collate_fn),
        }

    def forget_before(self, position: int) -> None:
        """Forget the batches before `position`."""
        while self._asked and self._asked[0].number < position:
            self._asked.popleft()

    def check(self, state: dict[str, Any]) -> None:
        """Raise InvalidRequest if a saved state is that of a data set of another length."""
        if state["length"] != self._length:
            raise InvalidRequest(
                f"the data set had {state['length']} samples when this position was saved, and has "
                f"{self._length} now, so that the order of the epoch is another one: use the same "
                f"data, or begin another job (CKPTD_JOB)"
            )

    def loaded_again(self, state: dict[str, Any], batches: int) -> int:
        """Return how many of the last of these batches must be loaded again.

        All, if random numbers were drawn that only this brings back. Otherwise none in
        this process. Workers take turns, so that those that have begun another round
        load it again: then each worker gets the batches that it would have got.
        """
        if state["drawn"]:
            return batches
        return batches % self._loader.num_workers if self._loader.num_workers else 0

    def repeat(
        self,
        state: dict[str, Any],
        position: int,
        *,
        skip: int | None = None,
        same: bool = True,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Make the next pass the one that was saved, and leave out the first batches.

        position: the batches that were trained on. skip: those that are left out, by
        default all that were trained on. same: False if the batch size or the number of
        ranks has changed: then the samples are not compared with those of the saved
        pass. then: sets the random generators to what they were when the state was
        saved. It is called before the first batch that had not been asked for is
        loaded.

        Logs a warning if the sampler draws from other generators than the saved one.
        Raises InvalidRequest for a data set of another length.
        """
        self.check(state)
        before, now = _kinds(state["began"]["own"]), _kinds(held_states(self._loader))
        if not same and before != now and "initial_seed" not in before & now:
            log.warning(
                "the samples of this epoch are shuffled in another order than before, because the "
                "sampler draws from another random generator: some are trained on twice, and some "
                "are left out; accelerate's use_seedable_sampler=True keeps the order"
            )
        self._repeat = _Repeat(state, position, position if skip is None else skip, same, then)
        self._then = then

    def go_on(self) -> None:
        """Call the `then` of `repeat`, if it was not called yet."""
        then, self._then = self._then, None
        if then is not None:
            then()

    def set_generators(self, state: dict[str, Any]) -> None:
        """Set the generators of the loader and its samplers as they were when `state`
        was saved.
        """
        set_held_states(self._loader, state["now"])

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass.

        Raises InvalidRequest if the batches that were trained on differ from those that
        were saved.
        """
        repeat, self._repeat = self._repeat, None
        self._asked.clear()
        outer = None
        if repeat is None:
            repeat = _Repeat()
            self._began = {"global": rng_state(), "own": held_states(self._loader)}
        else:
            # Batches that are loaded again draw from the generators of the saved pass.
            outer = rng_state() if repeat.skip or not repeat.position else None
            self._began = repeat.state["began"]
            set_rng_state(self._began["global"])
            set_held_states(self._loader, self._began["own"])
        batches, digest = iter(self.given), ""
        for number in count(1):
            after = number - repeat.position
            if after == len(repeat.ahead) + 1:
                self.go_on()
            batch = next(batches, _END)
            if batch is _END:
                break
            digest = hashlib.sha256(f"{digest}{batch}".encode()).hexdigest()[:16]
            if after == 0 and repeat.same and digest != repeat.state["digest"]:
                raise _other_samples(repeat.position)
            if number == max(repeat.skip, 1) and outer is not None:
                set_rng_state(outer)
            if 0 < after <= len(repeat.ahead):
                set_rng_state(repeat.ahead[after - 1] or rng_state())
            if after >= 0:
                rng = None if self._loader.num_workers else rng_state()
                self._asked.append(_Asked(number, digest, rng))
            if number > repeat.skip:
                yield batch
        if number <= repeat.position:
            raise _other_samples(repeat.position)


def order_of(loader: Any) -> SamplerOrder | None:
    """Return the order of a loader, which is put into it if it has none yet.

    None if this is not a DataLoader, also as accelerate prepares it, with a sampler and
    a data set with samples by number. The workers of any loader outlive a SIGTERM that is
    meant for the training.
    """
    base = loader.base_dataloader if type(loader).__name__ == "DataLoaderShard" else loader
    workers_outlive_sigterm(base)
    # A loader of accelerate says that it is a DataLoader.
    if not issubclass(type(base), DataLoader) or type(base).__iter__ is not DataLoader.__iter__:
        return None
    if hasattr(base, "state_dict") or isinstance(base.dataset, IterableDataset):
        return None
    if base is not loader and isinstance(base.sampler, BatchSampler):
        return None  # accelerate asks its type
    placed = base.sampler if base.batch_sampler is None else base.batch_sampler
    return placed if isinstance(placed, SamplerOrder) else SamplerOrder(base)


def held_states(loader: Any) -> dict[str, Any]:
    """Return the states of the generators that the parts of a loader hold, and the seeds
    of its samplers.
    """
    found = {}
    for holder, name, key in _holders(loader):
        value = getattr(holder, name)
        found[key] = value if isinstance(value, int) else value.get_state().numpy().tobytes()
    return found


def set_held_states(loader: Any, states: dict[str, Any]) -> None:
    """Set the generators and the seeds to the values of `held_states`."""
    for holder, name, key in _holders(loader):
        if (saved := states.get(key)) is None:
            continue
        if isinstance(saved, int):
            setattr(holder, name, saved)
        else:
            state = torch.frombuffer(bytearray(saved), dtype=torch.uint8)
            getattr(holder, name).set_state(state)


def _holders(loader: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield each part of a loader that holds a generator or a seed, the name of the
    attribute, and the key under which it is saved.
    """
    seen: set[int] = set()
    parts = [("", loader)]
    for path, part in parts:
        if isinstance(part, SamplerOrder):
            part = part.given
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name in _HELD:
            value = getattr(part, name, None)
            if isinstance(value, torch.Generator) and id(value) not in seen:
                seen.add(id(value))
                yield part, name, path + name
            elif name == "initial_seed" and type(value) is int:
                yield part, name, path + name
        for name in _PARTS:
            if (inner := getattr(part, name, None)) is not None:
                parts.append((f"{path}{name}.", inner))


def _kinds(states: dict[str, Any]) -> set[str]:
    """Return the names of the attributes of `held_states`, without their places."""
    return {key.rpartition(".")[2] for key in states}


def _other_samples(position: int) -> InvalidRequest:
    return InvalidRequest(
        f"the sampler does not repeat the {position} batches of this epoch that were trained on: "
        f"use the same data, sampler and batch size as before; a sampler that draws from the "
        f"global random generators batch by batch needs a torch.Generator of its own"
    )
