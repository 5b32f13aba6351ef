"""Tests the directories that this process saves to with SageMaker's calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptd.agent import smp
from ckptd.agent.smp.runs import known_run, manifests, run_in, source_rank, tag_of


def test_a_run_is_made_once_and_again_after_close(root: Path) -> None:
    assert known_run(root, "partial") is None
    run = run_in(root, "partial")
    assert run_in(root, "partial") is run
    assert known_run(root, "partial") is run
    assert run_in(root, "objects") is not run
    smp.close()
    assert known_run(root, "partial") is None
    assert run.agent.closed
    run = run_in(root, "partial")
    run.agent.close()
    assert known_run(root, "partial") is None


def test_manifests_are_in_order_and_damaged_ones_are_left_out(root: Path) -> None:
    run = run_in(root, "partial")
    for step, tag in ((1, "a"), (5, "b"), (7, "c")):
        run.agent.snapshot({"w": torch.ones(1)}, step=step, user_content={"tag": tag}).wait("durable", timeout=60)
    next((root / "partial").glob("step-00000005.*/manifest.json")).write_bytes(b"{}")
    assert [(found.step, tag_of(found.user_content)) for found in manifests(root, "partial")] == [(1, "a"), (7, "c")]
    smp.close()
    assert run_in(root, "partial").highest == 7
    assert manifests(root, "none") == []


def test_content_of_other_tools_has_no_tag(root: Path) -> None:
    run = run_in(root, "partial")
    run.agent.snapshot({"w": torch.ones(1)}, step=1, user_content=["x"]).wait("durable", timeout=60)
    assert [tag_of(found.user_content) for found in manifests(root, "partial")] == [""]


def test_values_of_fewer_ranks_are_shared_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert [source_rank("data", 2, rank) for rank in range(2)] == [0, 1]
    assert caplog.messages == []
    assert source_rank("data", 2, 3) == 1
    assert caplog.messages == ["data was saved on 2 ranks: rank 3 gets that of rank 1"]
