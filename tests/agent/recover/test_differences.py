"""Tests that an error about differences names all of them, and groups keys that differ
in their numbers only.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.agent.recover.differences import Differences, grouped
from ckptd.agent.recover.options import Options
from tests.support.cases import each_case


def fold(key: str, values: list[Any]) -> Any:
    return values[0]


LAYERS = [f"layers.{number}.{name}" for number in range(3) for name in ("weight", "bias")]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Differences(missing=["a"]), "key a is in the state and not in the checkpoint"),
        (Differences(unused=["a", "b"]), "2 keys (a, b) are in the checkpoint and not in the "
            "state"),
        (Differences(["x"], [], ["other", "other"]), "other; key x is in the state and not in the "
            "checkpoint"),
        (Differences(missing=LAYERS), "6 keys (layers.*.weight (3 of them), layers.*.bias (3 of "
            "them)) are in the state and "
                                      "not in the checkpoint"),
    ],
)  # fmt: skip
def test_one_error_names_all_differences(found: Differences, words: str) -> None:
    assert (
        str(found.error())
        == f"{words}; nothing was written. To recover the rest, call recover(state, strict=False)"
    )


@each_case(
    ("found", "call"),
    [
        (Differences(others=["a: other"], to_keep=["a", "a"]), "recover(state, keep=['a'])"),
        (
            Differences(missing=["b"], others=["a: other"], to_keep=["a"]),
            "recover(state, strict=False, keep=['a'])",
        ),
        (
            Differences(others=["other"], to_keep=[f"{layer}.x" for layer in range(9)]),
            "recover(state, keep=['*.x'])",
        ),
        (Differences(others=["apart"], loose=True), "recover(state, strict=False)"),
        (
            Differences(others=["a: other"], to_keep=["a"], options=Options(False)),
            "recover(state, strict=False, keep=['a'])",
        ),
        (
            Differences(unused=["b"], options=Options(keep=("a",))),
            "recover(state, strict=False, keep=['a'])",
        ),
        (
            Differences(unused=["b"], options=Options(step=3)),
            "recover(state, step=3, strict=False)",
        ),
        (
            Differences(
                others=["a: other"],
                to_keep=["a"],
                options=Options(on_reshape=fold, same_partition=True, step=0),
            ),
            "recover(state, step=0, keep=['a'], on_reshape=fold, same_partition=True)",
        ),
        (Differences(others=["other"], to_keep=["a[0].*"]), "recover(state, keep=['a[[]0].[*]'])"),
    ],
)
def test_an_error_says_how_to_recover_the_rest(found: Differences, call: str) -> None:
    assert str(found.error()).endswith(f"; nothing was written. To recover the rest, call {call}")


def test_a_difference_without_a_way_out_promises_none() -> None:
    assert (
        str(Differences(others=["other"], options=Options(False, ("a",))).error())
        == "other; nothing was written"
    )


def test_only_whole_numbers_between_dots_are_grouped() -> None:
    assert grouped(["fc1.weight", "fc2.weight", "0.x", "1.x", "a.7"]) == [
        "fc1.weight",
        "fc2.weight",
        "*.x (2 of them)",
        "a.7",
    ]


def test_a_pattern_in_a_call_matches_no_key_that_would_come_back() -> None:
    refused = [f"layers.{number}.weight" for number in range(9)]
    found = Differences(others=["other"], to_keep=refused, bound=[*refused, "layers.9.weight"])
    assert str(found.error()).endswith(f"call recover(state, keep={refused})")
    # The state of an optimizer is kept by parameter, and bound by tensor.
    kept = [f"optim.state.{number}" for number in range(9)]
    found = Differences(others=["other"], to_keep=kept, bound=[f"{key}.exp_avg" for key in kept])
    assert str(found.error()).endswith("call recover(state, keep=['optim.state.*'])")


def test_an_error_names_the_first_differences_and_counts_the_others() -> None:
    keys = [f"part{letter}" for letter in "abcdefghijkl"]
    found = Differences(missing=keys, others=[f"{key}: other" for key in keys])
    words = str(found.error()).partition("; nothing was written")[0]
    assert words == (
        "parta: other; partb: other; partc: other; partd: other; parte: other; partf: other; "
        "partg: other; parth: other; and 4 more like these; 12 keys (parta, partb, partc, partd, "
        "parte, partf, partg, parth and 4 more) are in the state and not in the checkpoint"
    )
