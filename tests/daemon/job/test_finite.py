"""Tests when the daemon says that a state has turned non-finite."""

from __future__ import annotations

from ckptd.daemon.job.finite import turned_non_finite
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from tests.support.cases import each_case


def checkpoint(step: int, non_finite: int | None, attempt: int = 1) -> StoredCheckpoint:
    return StoredCheckpoint(
        "gpt", f"step-{step}.a{attempt}", attempt, step, step, 100, (), user_tag=False,
        non_finite=non_finite,
    )  # fmt: skip


@each_case(
    ("before", "now", "warns"),
    [
        ([], (1, 0), False),
        ([], (1, None), False),
        ([], (1, 3), True),
        ([(1, 0)], (2, 3), True),
        ([(1, None)], (2, 3), True),
        ([(1, 0), (2, 5)], (3, 3), False),
        ([(1, 5), (2, 0)], (3, 3), True),
        ([(1, 0), (2, 5)], (3, 0), False),
        ([(1, 0, 1), (2, 5, 1)], (2, 3, 2), True),
        ([(1, 5, 2), (9, 0, 1)], (2, 3, 2), False),
    ],
)
def test_the_first_checkpoint_of_each_turn_warns(
    before: list[tuple[int, ...]], now: tuple[int, ...], warns: bool
) -> None:
    found = turned_non_finite([checkpoint(*each) for each in before], checkpoint(*now), "")
    assert bool(found) is warns


def test_the_warning_names_the_newest_finite_checkpoint_and_what_to_do() -> None:
    before = [checkpoint(1, 0), checkpoint(2, 0), checkpoint(3, None)]
    assert turned_non_finite(before, checkpoint(4, 1), "/ckpts/gpt/step-4.a1") == (
        "the state has turned non-finite: 1 value of the parameters and the optimizer state in "
        "gpt/step-4.a1 is NaN or infinite; the newest checkpoint without such values is "
        "step-2.a1; `ckptd show /ckpts/gpt/step-4.a1` names the tensors, and retention=[..., "
        "ckptd.Finite()] keeps the newest finite checkpoint"
    )
    assert "no checkpoint of the job is known to be finite" in turned_non_finite(
        [], checkpoint(4, 2), ""
    )
