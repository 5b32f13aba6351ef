"""The position in the batches of a data loader, and the replay that finds it again.

A batch may depend on random numbers that are drawn when the loader begins an epoch, for
the order of the samples and the seeds of the workers, and on numbers that are drawn
while a sample or a batch is made. A replay sets the generators to what they were at
these moments. So it works for any loader that gives the same batches from the same
random numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ckptd.agent.state.capture import rng_state, set_rng_state
from ckptd.shared.errors import InvalidRequest

log = logging.getLogger("ckptd.agent")

_PARTS = ("base_dataloader", "batch_sampler", "sampler", "dataset")
"""The attributes under which the parts of a loader hold generators and seeds."""
_HELD = ("generator", "synchronized_generator", "initial_seed")


@dataclass
class Position:
    """The position in one epoch of a loader.

    epoch: the number of the epoch, from 0. skipped: the batches at its beginning that
    were left out without being loaded. batches: the batches that were given after
    these. begin: the random generators when the iteration began. held: the states of
    the generators that the loader itself holds, at that time, and the seeds of its
    samplers. ahead: the random generators before the last batch was given, or None if
    workers make the batches.
    """

    epoch: int
    skipped: int = 0
    batches: int = 0
    begin: dict[str, Any] = field(default_factory=rng_state)
    held: dict[str, Any] = field(default_factory=dict)
    ahead: dict[str, Any] | None = None

    @classmethod
    def at(cls, loader: Any, epoch: int, skipped: int = 0) -> Position:
        """Return the position at the beginning of an epoch, before `iter(loader)`."""
        return cls(epoch, skipped, held={key: _saved(value) for key, value in _held(loader)})

    def values(self) -> dict[str, Any]:
        """Return the fields as plain values, which a snapshot saves."""
        return asdict(self)

    def restore(self, loader: Any) -> None:
        """Set the random generators, and those of the loader, to their states at the
        beginning of the epoch.
        """
        for holder, name, key in _holders(loader):
            if key in self.held:
                value, saved = getattr(holder, name), self.held[key]
                if isinstance(value, torch.Generator):
                    value.set_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8))
                else:
                    setattr(holder, name, saved)
        set_rng_state(self.begin)


class PositionedBatches:
    """An iterator over the batches of an epoch that keeps the position.

    in_process: True if this process makes the batches, and not workers.
    """

    def __init__(self, batches: Iterator[Any], position: Position, *, in_process: bool) -> None:
        self.position = position
        self._batches = batches
        self._in_process = in_process

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._in_process:
            self.position.ahead = rng_state()
        batch = next(self._batches)
        self.position.batches += 1
        return batch


def makes_batches(loader: Any) -> bool:
    """Return True if the loader makes its batches in this process, without workers."""
    return getattr(loader, "num_workers", 0) == 0


def replay(loader: Any, position: Position) -> Iterator[Any]:
    """Load the batches before the position again, and return the iterator that gives
    the batches after it.

    Then the random generators must be set to what they were when the position was
    saved. Raises InvalidRequest if the loader has fewer batches.
    """
    position.restore(loader)
    batches: Iterator[Any] = iter(loader)
    for number in range(position.batches):
        if number == position.batches - 1 and position.ahead is not None:
            set_rng_state(position.ahead)
        try:
            next(batches)
        except StopIteration:
            raise InvalidRequest(
                f"the data end after {number} batches of epoch {position.epoch}, but "
                f"{position.batches} were trained when the snapshot was taken: give the loader "
                "the same data, or start another job (CKPTD_JOB)"
            ) from None
    return batches


def size_of(loader: Any, samples: int, accumulated: int) -> dict[str, Any]:
    """Return what a position depends on: the number of samples in the data, or None for
    a stream, in one batch of all ranks, and the number of batches in a step.
    """
    try:
        length = len(loader.dataset)
    except (TypeError, AttributeError):
        length = None
    return {"length": length, "samples": samples, "accumulated": accumulated}


def moved(
    position: Position, then: dict[str, Any], now: dict[str, Any], step: int, way_out: str
) -> Position:
    """Return a saved position in the batches of this run, which may have another size.

    `then` and `now` are results of `size_of`. Raises InvalidRequest if the data have
    another length; `way_out` says how to go on.
    """
    if now["length"] != then["length"]:
        raise InvalidRequest(
            f"the training data have {now['length']} samples, and had {then['length']} when step "
            f"{step} was saved, so that the position in them is lost: {way_out}"
        )
    if now == then:
        return position
    samples = (position.skipped + position.batches) * then["samples"]
    batches = samples // now["samples"]
    batches -= batches % now["accumulated"]
    log.warning(
        "a step now takes %d samples, in batches of %d, and took %d, in batches of %d, when step "
        "%d was saved: the epoch resumes at sample %d, after %d samples were trained; a learning "
        "rate schedule goes on with the number of steps",
        now["samples"] * now["accumulated"], now["samples"],
        then["samples"] * then["accumulated"], then["samples"],
        step, batches * now["samples"], samples,
    )  # fmt: skip
    return replace(position, skipped=0, batches=batches, ahead=None)


def _holders(loader: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield each part of a loader that holds a generator or a seed, the name of the
    attribute, and the key under which it is saved.
    """
    seen: set[int] = set()
    parts = [("", loader)]
    for path, part in parts:
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


def _held(loader: Any) -> Iterator[tuple[str, Any]]:
    for holder, name, key in _holders(loader):
        yield key, getattr(holder, name)


def _saved(value: torch.Generator | int) -> bytes | int:
    return value if isinstance(value, int) else value.get_state().numpy().tobytes()
