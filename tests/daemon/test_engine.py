"""The engine with all that it moves, in a thousand random orders of events. No processes, no files, no waiting."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from ckptd.daemon.catalog import Snapshot
from ckptd.shared.lifecycle import Event
from tests.support.interleavings import World

WORLDS, EVENTS, BATCHES = 250, 120, 4


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_invariants_hold_in_every_order_of_events(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    move, counts, world = Snapshot.move, Counter[str](), World(0)

    def moved(snapshot: Snapshot, event: Event) -> None:
        world.moving(snapshot, event)
        move(snapshot, event)

    monkeypatch.setattr(Snapshot, "move", moved)
    world.core.close()
    for seed in range(batch * WORLDS, (batch + 1) * WORLDS):
        world = World(seed)
        world.live(EVENTS)
        world.drain() if seed % 4 == 0 else world.end()
        counts += world.counts
    assert (
        min(counts[kind] for kind in ("granted", "skipped", "steps failed", "seal", "commit", "release")) > WORLDS
    )  # they do get somewhere
