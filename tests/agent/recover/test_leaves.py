"""Tests that an error in a loader of the caller's says that the state is partly
overwritten, and that ckptd's own errors pass.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.agent.recover.leaves import load_into, loader_of
from ckptd.agent.recover.options import Options
from ckptd.shared.errors import IntegrityError, RecoveryFailed


class Place:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.loaded = error, list[Any]()

    def load_state_dict(self, state: Any, strict: bool = True) -> str:
        if self.error is not None:
            raise self.error
        self.loaded.append((state, strict))
        return "loaded"


def test_an_object_is_given_its_state_and_the_options() -> None:
    place = Place()
    assert load_into(place, {"a": 1}, "place", Options(), strict=False) == "loaded"
    assert place.loaded == [({"a": 1}, False)]


def test_an_error_of_the_caller_names_the_key_and_the_class() -> None:
    with pytest.raises(RecoveryFailed) as caught:
        load_into(Place(ValueError("no")), {}, "loader.x", Options(step=4, keep=("a",)))
    assert caught.value.overwritten
    assert str(caught.value) == (
        f"loader.x: load_state_dict() of {__name__}.Place raised ValueError('no'); the state is "
        f"partly overwritten: rebuild it, with this object set up so that it can load its saved "
        "state, and recover again. To leave this object as it is, call "
        "recover(state, step=4, keep=['a', 'loader.x'])"
    )
    with (
        pytest.raises(RecoveryFailed, match=r"^the state: load_state_dict"),
        loader_of(Place(), "", Options()),
    ):
        raise KeyError("step")


def test_an_error_of_ckptd_passes() -> None:
    with pytest.raises(IntegrityError, match="^damaged$"):
        load_into(Place(IntegrityError("damaged")), {}, "x", Options())
