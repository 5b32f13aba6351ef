"""Which snapshot comes back, from which tier, and its way into the caller's state.

Candidates are tried best first: highest (attempt, step), memory before storage. Structure is compared before the first byte is written;
damage found later goes on to the next candidate, which overwrites every item. RNG states are set last.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckptd.agent import values
from ckptd.agent.capture import set_rng_state
from ckptd.agent.client import Client
from ckptd.agent.loading import load, materialize
from ckptd.agent.restore import Binding
from ckptd.agent.sources import Opened, open_memory, open_storage
from ckptd.shared import messages as m
from ckptd.shared.errors import IntegrityError, NotFound, RecoveryFailed
from ckptd.shared.failpoints import failpoint
from ckptd.shared.storage import PosixStorage

log = logging.getLogger("ckptd.agent")

FIND_SECONDS = 120.0  # a root with many checkpoints on a slow mount


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What came back. `step`: -1 if that checkpoint has none; `source`: "memory" or "storage"; `passed_over`: newer ones that were damaged,
    and why; `seconds`: how long it took."""

    step: int
    attempt: int
    tag: str
    source: str
    metrics: dict[str, float]
    user_content: Any
    seconds: float
    passed_over: list[str] = field(default_factory=list)


def recover(client: Client, job: str, state: Any, *, step: int | None, strict: bool) -> Recovered | None:
    """See `Agent.recover`."""
    begun = time.monotonic()
    found, _ = client.call(lambda n: m.Find(id=n, step=step), m.Found, FIND_SECONDS)
    failpoint("agent.recover.found")
    passed_over = list(found.damaged)
    overwritten = False
    for candidate in found.candidates:
        where = f"{job}/{candidate.tag} in {candidate.source}"
        try:
            opened = _open(client, job, candidate)
        except (IntegrityError, NotFound, OSError) as error:
            log.warning("%s is passed over: %s", where, error)
            passed_over.append(f"{where}: {error}")
            continue
        failpoint("agent.recover.opened")
        attempt = _Attempt(opened, state, strict=strict)
        try:
            if candidate.source == "memory":
                opened.verify()  # cheap there, and then nothing is overwritten in vain
            attempt.prepare()
            attempt.load()
        except (IntegrityError, OSError) as error:
            overwritten = overwritten or attempt.writing
            log.error("%s is damaged and passed over: %s", where, error)
            passed_over.append(f"{where}: {error}")
            continue
        finally:
            opened.close()
        failpoint("agent.recover.loaded")
        log.info("recovered %s in %.2f s", where, time.monotonic() - begun)
        return Recovered(
            step=-1 if candidate.step is None else candidate.step,
            attempt=candidate.attempt, tag=candidate.tag, source=candidate.source, metrics=opened.metrics,
            user_content=opened.user_content, seconds=time.monotonic() - begun, passed_over=passed_over,
        )  # fmt: skip
    if passed_over:
        after = "; the state is partly overwritten: build it anew before training" if overwritten else "; the state is as it was"
        raise RecoveryFailed(f"no sound checkpoint of job {job!r} is left: {'; '.join(passed_over)}{after}", overwritten=overwritten)
    if step is not None:
        raise NotFound(f"job {job!r} has no checkpoint of step {step}")
    return None


def _open(client: Client, job: str, candidate: m.Candidate) -> Opened:
    if candidate.source == "memory":
        assert candidate.step is not None
        step = candidate.step
        _, descriptors = client.call(lambda n: m.Fetch(id=n, attempt=candidate.attempt, step=step), m.Fetched, FIND_SECONDS)
        return open_memory(descriptors, candidate.attempt, step, candidate.tag)
    return open_storage(PosixStorage(Path(client.welcome.root)), job, candidate.tag)


class _Attempt:
    """One candidate on its way into the state. `writing`: whether the state may have changed."""

    def __init__(self, opened: Opened, state: Any, *, strict: bool) -> None:
        self._opened, self._state, self._strict = opened, state, strict
        self.writing = False

    def prepare(self) -> None:
        """Raises StructureMismatch, having written nothing."""
        document = values.decode(self._opened.values())
        self._rng = document.get("rng")
        self._binding = Binding(self._state, document["state"], self._opened.saved, strict=self._strict)

    def load(self) -> None:
        binding, saved = self._binding, self._opened.saved
        fresh = materialize(saved, [name for name in binding.fresh if name not in binding.in_place])
        failpoint("agent.recover.loading")
        self.writing = True
        load(saved, binding.in_place)

        def resolve(name: str) -> torch.Tensor:
            tensor = fresh.get(name)
            if tensor is None:
                return binding.in_place[name].clone()
            device = binding.fresh[name]
            return tensor if tensor.device.type == device.type == "cpu" else tensor.to(device)

        binding.finish(resolve)
        if self._rng is not None:
            set_rng_state(self._rng)
