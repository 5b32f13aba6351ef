"""Tests the directories that this process saves to with SageMaker's calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptd.agent import smp
from ckptd.agent.smp.runs import (
    JobPlace,
    job_place,
    known_run,
    manifests,
    run_in,
    source_rank,
    tag_of,
)
from ckptd.shared.errors import NotFound


@pytest.mark.usefixtures("processes")
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


@pytest.mark.usefixtures("processes")
def test_manifests_are_in_order_and_damaged_ones_are_left_out(root: Path) -> None:
    run = run_in(root, "partial")
    for step, tag in ((1, "a"), (5, "b"), (7, "c")):
        run.agent.snapshot({"w": torch.ones(1)}, step=step, user_content={"tag": tag}).wait(
            "durable", timeout=60
        )
    next((root / "partial").glob("step-00000005.*/manifest.json")).write_bytes(b"{}")
    assert [
        (found.step, tag_of(found.user_content)) for found in manifests(JobPlace(root, "partial"))
    ] == [(1, "a"), (7, "c")]
    smp.close()
    assert run_in(root, "partial").highest == 7
    assert manifests(JobPlace(root, "none")) == []


@pytest.mark.usefixtures("processes")
def test_content_of_other_tools_has_no_tag(root: Path) -> None:
    run = run_in(root, "partial")
    run.agent.snapshot({"w": torch.ones(1)}, step=1, user_content=["x"]).wait("durable", timeout=60)
    assert [tag_of(found.user_content) for found in manifests(JobPlace(root, "partial"))] == [""]


def test_values_of_fewer_ranks_are_shared_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert [source_rank("data", 2, rank) for rank in range(2)] == [0, 1]
    assert caplog.messages == []
    assert source_rank("data", 2, 3) == 1
    assert caplog.messages == ["data was saved on 2 ranks: rank 3 gets that of rank 1"]


@pytest.mark.usefixtures("processes")
def test_a_directory_below_the_root_of_a_daemon_is_no_root(root: Path) -> None:
    """As with the daemon of a node at `/ckpts` and SageMaker's `/ckpts/model_parallel`."""
    where, model = root / "model_parallel", torch.nn.Linear(2, 2)
    with pytest.raises(NotFound):
        smp.resume_from_checkpoint(where, model=model)
    smp.save_checkpoint(where, "steps7", model=model, user_content=7).wait("durable", timeout=60)
    smp.save_checkpoint(where, "whole", partial=False, model=model)
    smp.save({"seen": 3}, where / "loader").wait("durable", timeout=60)
    smp.close()
    assert sorted(path.name for path in root.iterdir() if path.name != ".ckptd") == [
        "model_parallel",
        "model_parallel..objects",
        "model_parallel..partial",
    ]
    assert [path.name for path in where.iterdir()] == ["whole.pt"]
    assert smp.resume_from_checkpoint(where, "steps7", model=torch.nn.Linear(2, 2)) == 7
    assert smp.load(where / "loader") == {"seen": 3}


@pytest.mark.usefixtures("processes")
def test_two_paths_have_two_jobs(root: Path, tmp_path: Path) -> None:
    assert job_place(root, "partial") == JobPlace(root, "partial")
    for name, job in (("a/b", "a..b..partial"), ("a.b", "a.b..partial")):
        assert job_place(root / name, "partial", ask=True) == JobPlace(root, job)
        # Nothing is there yet.
        assert job_place(root / name, "partial") == JobPlace(root / name, "partial")
    for path in (root / "no name", tmp_path / "elsewhere"):
        assert job_place(path, "partial", ask=True) == JobPlace(path, "partial")


@pytest.mark.usefixtures("processes")
def test_a_directory_that_is_a_root_stays_one(root: Path) -> None:
    (root / "inner" / ".ckptd").mkdir(parents=True)
    assert job_place(root / "inner", "partial", ask=True) == JobPlace(root / "inner", "partial")


def test_below_a_root_that_no_daemon_serves_a_directory_is_no_root_either(tmp_path: Path) -> None:
    (tmp_path / "old" / ".ckptd").mkdir(parents=True)
    assert job_place(tmp_path / "old" / "new", "partial", ask=True) == JobPlace(
        tmp_path / "old", "new..partial"
    )
