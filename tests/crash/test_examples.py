"""Tests the examples that lose a node or a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.shared import names
from examples.nodes import refusal
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


def test_a_run_on_two_ranks_of_which_one_is_killed_gives_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_IDLE_TIMEOUT", "1")
    whole, killed = (
        Run(tmp_path, name, 12, " ".join(TINY[:8]) + " --every 4", ranks=2)
        for name in ("whole", "killed")
    )
    try:
        whole.start()
        whole.wait_for_end()
        killed.start()
        killed.wait_for(8)
        killed.kill_rank(1)
        killed.start()
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
