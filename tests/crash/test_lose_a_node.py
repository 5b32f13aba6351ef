"""Tests that the example of three nodes loses a node and gets it back.

`make demo` plays the other losses of a node or a rank, and judges them as a test would.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import lose_a_node
from examples.nodes import ElasticRun, refusal


def copied(run: ElasticRun, step: int) -> int:
    """Wait until this step or a later one is copied. Return which."""
    run.wait_until(lambda: lose_a_node.last_copied(run) >= step, f"a copy of step {step}")
    return lose_a_node.last_copied(run)


def came_back(run: ElasticRun, ranks: int) -> int:
    """Wait until so many ranks have recovered. Return the step."""

    def found() -> list[str]:
        return re.findall(rf"of {ranks} on \S+: step (\d+) came back", run.printed())

    run.wait_until(lambda: len(found()) >= ranks, f"the recovery of {ranks} ranks")
    (step,) = set(found())
    return int(step)


@pytest.mark.timeout(600)
@pytest.mark.skipif(refusal() != "", reason=refusal())
def test_a_node_leaves_a_job_that_goes_on_without_it_and_comes_back(tmp_path: Path) -> None:
    run = ElasticRun(
        tmp_path, "elastic", 3, 100_000, "--wait-every 5",
        trainer=lose_a_node.TRAINER, environ=lose_a_node.ENVIRON,
    )  # fmt: skip
    run.fewest = 2
    try:
        run.start_nodes()
        run.start()
        safe = copied(run, 10)
        run.lose(1)
        step = came_back(run, 2)
        assert step >= safe
        safe = copied(run, step + 5)
        run.nodes[1].start()
        run.join(1)
        step = came_back(run, 3)
        assert step >= safe
        copied(run, step + 5)
        losses = run.computed()
    finally:
        run.end()
    # The same steps on another number of ranks: the losses differ by rounding only.
    assert {step for step, _ in losses} == set(range(1, losses[-1][0] + 1))
    last = dict(losses)
    assert [loss for _, loss in losses] == pytest.approx([last[step] for step, _ in losses], 1e-2)
