"""Tests that the call in an error or a warning has all options of the caller's own
call, and can be pasted.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import pytest

from ckptd.agent.recover.options import Options, pattern_of
from tests.support.cases import each_case


def fold(key: str, values: list[Any]) -> Any:
    return values[0]


@each_case(
    ("options", "call"),
    [
        (Options(), "recover(state)"),
        (Options(step=0), "recover(state, step=0)"),
        (Options(step=np.int64(7)), "recover(state, step=7)"),  # type: ignore[arg-type]
        (Options(False, ("a", "b.*")), "recover(state, strict=False, keep=['a', 'b.*'])"),
        (
            Options(on_reshape=fold, same_partition=True),
            "recover(state, on_reshape=fold, same_partition=True)",
        ),
        (
            Options(on_reshape=lambda key, values: values[0]),
            "recover(state, on_reshape=on_reshape)",
        ),
        (Options(on_reshape=partial(fold)), "recover(state, on_reshape=on_reshape)"),
    ],
)
def test_a_call_has_the_options_that_are_not_the_default(options: Options, call: str) -> None:
    assert options.call() == call


def test_the_text_of_a_call_makes_the_same_call() -> None:
    def recover(state: str, **options: Any) -> dict[str, Any]:
        return {"state": state, **options}

    options = Options(False, ("a",), fold, True, 3)
    # As its reader would.
    made = eval(options.call(step=2), {"recover": recover, "state": "mine", "fold": fold})
    assert made == {
        "state": "mine",
        "step": 2,
        "strict": False,
        "keep": ["a"],
        "on_reshape": fold,
        "same_partition": True,
    }


def test_one_more_key_is_kept() -> None:
    assert (
        Options(keep=("a",), step=1).call_that_keeps("b[0]")
        == "recover(state, step=1, keep=['a', 'b[[]0]'])"
    )


@pytest.mark.parametrize("key", ["a.b", "a[0].*", "what?", "[x]"])
def test_the_pattern_of_a_key_matches_this_key_only(key: str) -> None:
    assert fnmatchcase(key, pattern_of(key))
    assert not fnmatchcase(key.replace("*", "x").replace("?", "x") + ".", pattern_of(key))
