"""The order in which a data loader takes its samples, which a recovery inside an epoch
repeats without loading the samples that were trained on.

Training draws the same random numbers with this module as without it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from ckptd.agent.state.capture import rng_state, set_rng_state
from ckptd.shared.errors import InvalidRequest


class SamplerOrder:
    """The batch sampler of a DataLoader, or its sampler if it makes no batches, with an
    order that can be repeated.

    It takes the place of that sampler in the loader, until `remove`. Before each pass
    it notes the states of the random generators from which a sampler may draw, and it
    keeps a digest of the samples up to each batch.

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
        size = 1 if self._name == "sampler" else getattr(self.given, "batch_size", 1)
        self.samples_per_batch = (size or 1) * getattr(loader.sampler, "num_replicas", 1)
        self._length = len(loader.dataset)
        self._began: dict[str, Any] = {}
        self._digests: deque[tuple[int, str]] = deque()
        self._repeat: tuple[dict[str, Any], int, bool] | None = None

    def remove(self) -> None:
        """Give the loader its own sampler back."""
        self._loader.__dict__[self._name] = self.given

    def __getattr__(self, name: str) -> Any:
        if name == "given":
            raise AttributeError(name)  # not made yet, as in a copy
        return getattr(self.given, name)

    def __len__(self) -> int:
        return len(self.given)

    def state(self, position: int) -> dict[str, Any]:
        """Return what `repeat` needs after `position` batches of the current pass."""
        self.forget_before(position)
        return {
            "length": self._length,
            "samples": position * self.samples_per_batch,
            "began": self._began,
            "now": self._generators(),
            "digest": self._digests[0][1] if self._digests else "",
        }

    def forget_before(self, position: int) -> None:
        """Forget the digests of the batches before `position`."""
        while self._digests and self._digests[0][0] < position:
            self._digests.popleft()

    def check(self, state: dict[str, Any]) -> None:
        """Raise InvalidRequest if a saved state is that of a data set of another length."""
        if state["length"] != self._length:
            raise InvalidRequest(
                f"the data set had {state['length']} samples when this position was saved, and has "
                f"{self._length} now, so that the order of the epoch is another one: use the same "
                f"data, or begin another job (CKPTD_JOB)"
            )

    def repeat(self, state: dict[str, Any], position: int, *, same: bool = True) -> None:
        """Make the next pass the one that was saved, and leave out its first `position`
        batches.

        `same` is False if the batch size or the number of ranks has changed: then the
        samples are not compared with those of the saved pass.

        Raises InvalidRequest for a data set of another length.
        """
        self.check(state)
        self._repeat = state, position, same

    def set_generators(self, state: dict[str, Any]) -> None:
        """Set the generators of the loader and its samplers as they were when `state`
        was saved.
        """
        self._set_own(state["now"])

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass.

        Raises InvalidRequest if the batches that are left out differ from those that
        were saved.
        """
        (saved, position, same), self._repeat = self._repeat or ({}, 0, True), None
        outer = {}
        if position:
            outer = _global_generators()
            set_rng_state(saved["began"]["global"])
            self._set_own(saved["began"]["own"])
            self._began = saved["began"]
        else:
            self._began = {"global": _global_generators(), "own": self._generators()}
        self._digests.clear()
        digest, number = "", 0
        for number, batch in enumerate(self.given, 1):
            digest = hashlib.sha256(f"{digest}{batch}".encode()).hexdigest()[:16]
            if number >= position:
                self._digests.append((number, digest))
            if number == position:
                set_rng_state(outer)
                if same and digest != saved["digest"]:
                    raise _other_samples(position)
            elif number > position:
                yield batch
        if number < position:
            raise _other_samples(position)

    def _places(self) -> list[Any]:
        """Return the torch generators of the loader and its samplers."""
        inner = getattr(self.given, "sampler", None)
        found = [
            getattr(place, "generator", None)
            for place in (self._loader, self.given, inner, self._loader.sampler)
        ]
        return [one for one in found if isinstance(one, torch.Generator)]

    def _generators(self) -> list[bytes]:
        return [bytes(place.get_state().numpy()) for place in self._places()]

    def _set_own(self, states: list[bytes]) -> None:
        for place, state in zip(self._places(), states, strict=False):
            place.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _global_generators() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch for the CPU."""
    state = rng_state()
    state.pop("devices", None)
    return state


def _other_samples(position: int) -> InvalidRequest:
    return InvalidRequest(
        f"the sampler does not repeat the {position} batches of this epoch that were trained on: "
        f"use the same data, sampler and batch size as before; a sampler that draws from the "
        f"global random generators batch by batch needs a torch.Generator of its own"
    )
