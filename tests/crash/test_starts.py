"""Ends some starts on a root that hangs; see `starts.py`."""

from __future__ import annotations

import pytest

from tests.crash import starts
from tests.support.daemons import Home


@pytest.mark.parametrize("number", [1, 10, 20, 30, 40, 50, 60, 70, 80])
@pytest.mark.parametrize("repeat", [False, True], ids=["one SIGTERM", "many"])
def test_a_start_on_a_root_that_hangs_at_any_time_can_be_ended(
    place: Home, number: int, repeat: bool
) -> None:
    starts.leave(place)
    starts.end_start(place, number, repeat=repeat)


def test_what_a_start_that_hangs_has_left_comes_back() -> None:
    done, problems = starts.run(4, number=1)
    assert problems == []
    assert done["starts that hang"] == 4
