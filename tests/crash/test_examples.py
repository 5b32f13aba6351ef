"""Tests the examples that lose a node or a rank."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.shared import names
from examples import lose_a_node
from examples.nodes import ElasticRun, refusal
from examples.runs import RECOVERED, Run, check_checkpoints, check_losses
from tests.support import stores
from tests.test_examples import TINY, TRAINER, environment


@pytest.mark.skipif(refusal() != "", reason=refusal())
def test_two_nodes_of_which_one_is_lost_and_a_root_in_an_object_store(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as servers:
        run = [
            sys.executable,
            "-m",
            "examples.two_nodes",
            "--out",
            str(tmp_path),
            "--root",
            f"s3://bucket/{names.new_nonce().hex()}",
        ]
        environ = environment(tmp_path) | servers.get("seaweed").environ
        done = subprocess.run(
            run, env=environ, cwd=TRAINER.parents[1], timeout=400, capture_output=True, text=True
        )
    assert "Everything came back as it was." in done.stdout, done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.skipif(refusal() != "", reason=refusal())
def test_three_nodes_of_which_one_is_lost_with_snapshots_that_are_only_in_memory(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.lose_a_node", "--out", str(tmp_path)],
        env=environment(tmp_path),
        cwd=TRAINER.parents[1],
        timeout=400,
        capture_output=True,
        text=True,
    )
    assert "Everything came back as it was." in done.stdout, done.stdout + done.stderr
    assert "No step that had been copied was lost" in done.stdout


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


def test_a_run_on_two_ranks_of_which_one_is_killed_gives_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_IDLE_TIMEOUT", "1")
    whole, killed = (
        Run(tmp_path, name, 12, " ".join(TINY[:8]) + " --every 4", ranks=2, restarts=restarts)
        for name, restarts in (("whole", 0), ("killed", 1))
    )
    try:
        whole.start()
        whole.wait_for_end()
        killed.start()
        killed.wait_for(8)
        killed.kill_rank(1)  # torchrun starts both ranks again
        killed.wait_for_end()
        came_back = RECOVERED.findall(killed.printed())
        assert len(came_back) == 2
        assert {(step, attempt) for step, attempt, *_ in came_back} <= {
            ("4", "1"),
            ("8", "1"),
            ("12", "1"),
        }
        assert check_losses(whole, killed) >= 12
        assert check_checkpoints(whole, killed) > 30
    finally:
        whole.end()
        killed.end()
