"""Runs a round with followers, and tests that each wrong version is found; see
`followers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crash import followers
from tests.crash.followers import Checks, Key, Places, digest, model_of


@dataclass
class Version:
    """A version as `follow` gives it, with the values of any step."""

    attempt: int
    step: int
    values: dict[str, torch.Tensor]
    own: list[Any]
    rolled_back: bool = False

    def load(self) -> dict[str, Any]:
        return {"model": self.values, "step": self.step, "own": self.own}


def version(attempt: int, step: int, **changes: Any) -> Version:
    own = [(rank, attempt, step) for rank in range(followers.RANKS)]
    return Version(attempt, step, model_of((attempt, step)), own, **changes)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Return the files of two ranks that have taken steps 1 to 3 twice."""
    made = Places(tmp_path, tmp_path / "s")
    for key in [(run, step) for run in (1, 2) for step in (1, 2, 3)]:
        for rank in range(followers.RANKS):
            write(made, rank, key)
    return made


def write(places: Places, rank: int, key: Key) -> None:
    model = model_of(key)
    part = model["weight"].chunk(followers.RANKS)[rank]
    places.diary(rank).note(f"taken:{digest(part, model['bias'])}", *key)


def test_versions_that_are_right_are_accepted(places: Places) -> None:
    checks = Checks(places)
    for one in (version(1, 1), version(1, 3), version(2, 2, rolled_back=True), version(2, 3)):
        assert checks.of(one) == ""


def test_each_wrong_version_is_named(places: Places) -> None:
    mixed, other_rank = version(1, 2), version(1, 2)
    mixed.values["weight"][-1] = model_of((1, 1))["weight"][-1]
    other_rank.own[1] = (1, 1, 1)
    write(places, 0, (1, 4))
    first = Version(2, 1, model_of((1, 1)), [])
    for one, said in (
        (mixed, "(1, 2) has a part of rank 1 that it had not written"),
        (version(1, 4), "(1, 4) has a part of rank 1 that it had not written"),
        (other_rank, "step 2 and [(0, 1, 2), (1, 1, 1)], not [(0, 1, 2), (1, 1, 2)]"),
        (Version(1, 3, model_of((1, 2)), []), "version of step 3 has the values of step 2"),
        (version(1, 1), "(1, 1) came after (1, 1)"),
        (version(2, 1), "rolled_back is False for (2, 1) after (1, 1)"),
        (version(1, 2, rolled_back=True), "rolled_back is True for (1, 2) after (1, 1)"),
    ):
        checks = Checks(places)
        assert checks.of(version(1, 1)) == ""
        assert checks.of(one) == said
    checks = Checks(places)
    assert checks.of(first) == "step 1 and [], not [(0, 1, 1), (1, 1, 1)]"
    assert checks.of(version(2, 2)) == "attempt 2 has values of another training"


def test_ranks_are_quiet_once_each_waits_and_has_sealed_its_last_step(places: Places) -> None:
    diaries = [places.diary(rank) for rank in range(followers.RANKS)]

    def quiet_after(*notes: tuple[int, str, int]) -> bool:
        for rank, word, step in notes:
            diaries[rank].note(word, 2, step)
        return followers.are_quiet(diaries)

    assert not quiet_after((0, "sealed", 3), (1, "sealed", 3))
    assert not quiet_after((0, "waits", 3), (1, "taken", 4), (1, "sealed", 4), (1, "waits", 4))
    assert not quiet_after((0, "taken", 4), (0, "waits", 4))
    assert quiet_after((0, "failed", 4))


def test_a_follower_gets_every_version_right_while_processes_die() -> None:
    done, problems = followers.run(1, number=7)
    assert problems == []
    assert done["  rounds"] == 1
    assert done["  versions"] > 0
