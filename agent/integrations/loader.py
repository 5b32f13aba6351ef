"""The position in the batches of a data loader, and the replay that finds it again.

A batch may depend on random numbers that are drawn when the loader begins an epoch, for
the order of the samples and the seeds of the workers, and on numbers that are drawn
while a sample or a batch is made. A replay sets the generators to what they were at
these moments. So it works for any loader that gives the same batches from the same
random numbers. If the loader takes its samples by number, its sampler leaves out the
batches before the position. Otherwise they are loaded again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ckptd.agent.state.capture import rng_state, set_rng_state
from ckptd.integrations.sampler_order import (
    SamplerOrder,
    held_states,
    order_of,
    set_held_states,
)
from ckptd.shared.errors import InvalidRequest

log = logging.getLogger("ckptd.agent")


@dataclass
class Position:
    """The position in one epoch of a loader.

    epoch: the number of the epoch, from 0. skipped: the batches at its beginning that
    were left out without being loaded. batches: the batches that were given after
    these. begin: the random generators when the iteration began. held: the states of
    the generators that the loader itself holds, at that time, and the seeds of its
    samplers. ahead: the random generators before the last batch was given, or None if
    workers make the batches. order: the saved state of the sampler, or None if it has
    no `SamplerOrder`. source: the `SamplerOrder` of this process, or None.
    """

    epoch: int
    skipped: int = 0
    batches: int = 0
    begin: dict[str, Any] = field(default_factory=rng_state)
    held: dict[str, Any] = field(default_factory=dict)
    ahead: dict[str, Any] | None = None
    order: dict[str, Any] | None = None
    source: SamplerOrder | None = None

    @classmethod
    def at(cls, loader: Any, epoch: int, skipped: int = 0) -> Position:
        """Return the position at the beginning of an epoch, before `iter(loader)`."""
        return cls(epoch, skipped, held=held_states(loader), source=order_of(loader))

    @property
    def total(self) -> int:
        """The batches of the epoch that were left out or given."""
        return self.skipped + self.batches

    def restore(self, loader: Any) -> None:
        """Set the random generators, and those of the loader, to their states at the
        beginning of the epoch.
        """
        self.source = order_of(loader)
        set_held_states(loader, self.held)
        set_rng_state(self.begin)

    def values(self) -> dict[str, Any]:
        """Return the fields as plain values, which a snapshot saves."""
        values = dict(vars(self))
        if (order := values.pop("source")) is not None:
            values["order"] = order.state(self.total) if self.batches else None
        return values


class PositionedBatches:
    """An iterator over the batches of an epoch that keeps the position."""

    def __init__(self, batches: Iterator[Any], position: Position, loader: Any) -> None:
        self.position = position
        self._batches = batches
        self._order = position.source
        # Otherwise workers make the batches, or the order notes the generators.
        self._notes = self._order is None and getattr(loader, "num_workers", 0) == 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._notes:
            self.position.ahead = rng_state()
        batch = next(self._batches)
        self.position.batches += 1
        if self._order is not None:
            self._order.forget_before(self.position.total)
        return batch


def replay(loader: Any, position: Position, then: Callable[[], object]) -> Iterator[Any]:
    """Return the iterator that gives the batches after the position.

    `then` sets the random generators to what they were when the position was saved. It
    is called once the loader has come to the position.

    Raises InvalidRequest if the loader has fewer batches, or gives other samples.
    """
    position.restore(loader)
    order, loaded = position.source, position.batches
    if order is not None and position.order is not None and position.batches:
        same = position.order["digest"] is not None
        loaded = order.loaded_again(position.order, position.batches)
        skip = position.total - loaded
        order.repeat(position.order, position.total, skip=skip, same=same, then=then)
    else:
        order = None
        if position.skipped:
            from accelerate import skip_first_batches

            loader = skip_first_batches(loader, position.skipped)
    if position.total:
        log.info(
            "training goes on after batch %d of epoch %d; %d batches are loaded again",
            position.total, position.epoch, loaded,
        )  # fmt: skip
    batches: Iterator[Any] = iter(loader)
    for number in range(loaded):
        if order is None and number == loaded - 1 and position.ahead is not None:
            set_rng_state(position.ahead)
        try:
            next(batches)
        except StopIteration:
            raise InvalidRequest(
                f"the data end after {number} batches of epoch {position.epoch}, but "
                f"{loaded} were trained when the snapshot was taken: give the loader "
                "the same data, or start another job (CKPTD_JOB)"
            ) from None
    if order is not None:
        return _after_first(batches, order)
    if position.total:
        then()
    return batches


def _after_first(batches: Iterator[Any], order: SamplerOrder) -> Iterator[Any]:
    """Yield the batches. The generators are set once the first one has been loaded, if
    the sampler was not asked for another one before.
    """
    for batch in batches:
        order.go_on()
        yield batch
    order.go_on()


def of_first_rank(key: str, values: list[Any]) -> Any:
    """Return the value of rank 0 for a rank of a run with another number of ranks, whose
    batches have other samples.
    """
    found = values[0]
    if isinstance(found, dict) and (position := found.get("position")):
        found["position"] = position | {"order": _of_other_size(position.get("order"))}
    return found


def _of_other_size(order: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the state of a sampler for batches that differ from the saved ones."""
    return None if order is None else order | {"digest": None}


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
    samples = position.total * then["samples"]
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
    order = _of_other_size(position.order)
    return replace(position, skipped=0, batches=batches, ahead=None, order=order)
