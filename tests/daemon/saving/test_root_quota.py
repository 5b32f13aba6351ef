"""Tests the bytes that count against the quota of a root, and when the log warns."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

from ckptd.agent import Agent, MaxBytes
from ckptd.daemon.commands.report import status_text
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.daemon.saving.root_quota import RootQuota, used_bytes
from ckptd.shared.names import tag_directory
from tests.support.daemons import Home, running, until


def holding(name: str, *sizes: tuple[int, int]) -> Job:
    """Return a job with a checkpoint of these bytes and new bytes for each pair."""
    job = Job(name)
    for step, (nbytes, new_bytes) in enumerate(sizes, 1):
        tag = tag_directory(step, None, 1)
        job.commit(
            StoredCheckpoint(
                name, tag, 1, step, step, nbytes, (), user_tag=False, new_bytes=new_bytes
            )
        )
    return job


def test_files_that_checkpoints_share_count_once() -> None:
    assert used_bytes([]) == used_bytes([holding("none")]) == 0
    shared = holding("gpt", (100, 100), (101, 1), (102, 2))
    assert used_bytes([shared]) == 103
    assert used_bytes([shared, holding("bert", (50, 0), (60, 0))]) == 213
    del shared.checkpoints[tag_directory(1, None, 1)]  # the next one now has the shared files
    assert used_bytes([shared]) == 103


def chained(*checkpoints: tuple[int, int, int]) -> Job:
    """Return a job with a checkpoint of 100 bytes or more for each number in the job,
    length of its chain, and attempt. Its new bytes are 2 if it has a chain.
    """
    job = Job("gpt")
    for seq, chain, attempt in checkpoints:
        tag, new = tag_directory(seq, None, attempt), 2 if chain else 100
        job.commit(
            StoredCheckpoint(
                "gpt", tag, attempt, seq, seq, 100 + 2 * chain, (), user_tag=False, new_bytes=new,
                chain=chain,
            )
        )  # fmt: skip
    return job


def test_a_base_counts_once_for_the_checkpoints_that_have_its_chain() -> None:
    assert used_bytes([chained((1, 0, 1), (2, 1, 1), (3, 2, 1))]) == 104
    assert used_bytes([chained((2, 1, 1), (3, 2, 1))]) == 104, "the whole one is deleted"
    assert used_bytes([chained((1, 0, 1), (9, 2, 1))]) == 204, "another chain began between"
    assert used_bytes([chained((1, 0, 1), (2, 1, 2))]) == 202, "an attempt begins whole"


def test_copies_that_a_store_makes_count_each_time() -> None:
    job = chained((1, 0, 1), (2, 1, 1))
    assert used_bytes([job], shared=False) == 202
    assert RootQuota(10, shared=False).report([job]) == {"used_bytes": 202, "quota_bytes": 10}


def test_a_checkpoint_that_is_being_deleted_does_not_count() -> None:
    job = holding("gpt", (100, 100), (40, 40))
    job.retiring.add(tag_directory(2, None, 1))
    assert used_bytes([job]) == 100


def test_each_crossing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    quota, told = RootQuota(250), []
    with caplog.at_level(logging.INFO):
        for count in (1, 2, 3, 4, 2, 1, 3):
            told.append(quota.watch([holding("gpt", *[(100, 100)] * count)]).split(";")[0])
    over = "the checkpoints under the root hold 300 B, more than its root_quota of 250 B"
    assert told == ["", "", over, "", "", "", over]
    assert caplog.messages == [
        "the checkpoints under the root hold 200 B, within its root_quota of 250 B again"
    ]


def test_without_a_quota_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    quota, jobs = RootQuota(0), [holding("gpt", (1 << 60, 1 << 60))]
    assert (quota.watch(jobs), quota.report(jobs), caplog.text) == ("", None, "")
    assert RootQuota(1 << 59).report(jobs) == {"used_bytes": 1 << 60, "quota_bytes": 1 << 59}


@pytest.mark.usefixtures("processes")
def test_a_daemon_warns_of_the_root_and_limits_the_job(
    place: Home, caplog: pytest.LogCaptureFixture
) -> None:
    """The root may hold less than the limit of the job lets it. Only the limit deletes
    anything. The daemon's log, the trainer's and `status` say that the quota is exceeded.
    """
    state = {"w": torch.arange(250_000.0)}  # 1 MB
    options = ("--codec", "raw", "--root-quota", "1500kB", "--log-format", "json")
    with running(place, *options, forked=True) as daemon:
        agent = Agent("gpt", socket=place.socket, retention=[MaxBytes("3500kB")])
        for step in range(1, 6):
            state["w"] = state["w"] + 1
            agent.snapshot(state, step=step).wait("durable", timeout=60)
            until(partial(has, place, min(step, 3)), "retention")
        agent.close()
        status, log = daemon.status(), place.log_text()
    assert tags(place) == [tag_directory(step, None, 1) for step in (3, 4, 5)]
    assert status["root_quota"]["quota_bytes"] == 1_500_000
    assert 3_000_000 < status["root_quota"]["used_bytes"] <= 3_500_000
    assert "OVER QUOTA     the checkpoints hold 3" in status_text(status)
    said = "more than its root_quota of 1.5 MB; nothing is deleted for that"
    assert (log.count(said), caplog.text.count(said)) == (1, 1)
    assert place.events("quota.exceeded") == [{"job": "gpt", "quota_bytes": 1_500_000}]


def has(place: Home, count: int) -> bool:
    return len(tags(place)) == count


def tags(place: Home) -> list[str]:
    return sorted(path.name for path in (place.root / "gpt").glob("step-*"))
