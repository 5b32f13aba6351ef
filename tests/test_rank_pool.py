"""Tests the pool of ranks: ranks come back clean, and those that are not clean are
replaced and fail the test that has used them.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptd.agent import Agent
from ckptd.shared.errors import CkptdError
from ckptd.shared.system import failpoints
from tests.support.daemons import Daemon
from tests.support.rank_pool import MOST_GROUPS, LeftBehind, Pool
from tests.support.ranks import HERE, RankFailed

pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture
def few() -> Iterator[Pool]:
    made = Pool(settle=0.2, answer=10.0)
    yield made
    made.close()


def pids(pool: Pool, world_size: int = 2) -> list[int]:
    with pool.ranks(world_size) as ranks:
        return ranks.call(os.getpid)


def change_everything(name: str) -> None:
    HERE["something"] = name
    os.environ["CKPTD_JOB"] = name
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("error")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    failpoints.arm("agent.recover.opened=error(EIO)@1")
    torch.rand(1)


def state() -> dict[str, Any]:
    return {
        "kept": dict(HERE),
        "job": os.environ.get("CKPTD_JOB"),
        "directory": os.getcwd(),
        "signal": repr(signal.getsignal(signal.SIGTERM)),
        "warnings": list(warnings.filters),
        "tensor": str(torch.empty(0)),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "armed": dict(failpoints._armed),
        "random": torch.rand(4).tolist(),
        "total": reduced(),
    }


def reduced() -> float:
    total = torch.ones(1, device="cpu")
    dist.all_reduce(total)
    return total.item()


def test_ranks_are_used_again_and_are_as_they_were(few: Pool) -> None:
    with few.ranks(2) as ranks:
        before, first = ranks.call(state), ranks.call(os.getpid)
        ranks.call(change_everything, "gpt")
    with few.ranks(2) as ranks:
        assert ranks.call(os.getpid) == first
        assert ranks.call(state) == before


def test_ranks_that_are_in_use_are_not_lent_again(few: Pool) -> None:
    with few.ranks(2) as ranks, few.ranks(2) as others:
        assert not {*ranks.call(os.getpid)} & {*others.call(os.getpid)}


def begin(socket: os.PathLike[str]) -> int:
    return Agent("job", socket=socket).attempt


def test_agents_end_with_the_test(few: Pool, daemon: Daemon) -> None:
    for attempt in (1, 2):
        with few.ranks(2) as ranks:
            assert ranks.call(begin, daemon.home.socket) == [attempt] * 2
        (job,) = daemon.status()["jobs"]
        assert job["ranks"] == []


def fail_to_begin(socket: os.PathLike[str]) -> None:
    try:
        Agent("a b", socket=socket)
    except CkptdError as error:
        HERE["error"] = error  # with the frame that has the agent


def test_an_agent_that_could_not_be_made_is_no_hindrance(few: Pool, daemon: Daemon) -> None:
    with few.ranks(2) as ranks:
        ranks.call(fail_to_begin, daemon.home.socket)


def keep_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), name="sleeper", daemon=True).start()


def keep_a_file() -> None:
    HERE["file"] = os.open("/etc/hostname", os.O_RDONLY)


def keep_a_pipe() -> None:
    os.pipe()


def keep_a_segment() -> None:
    number = os.memfd_create("segment")
    os.ftruncate(number, 4096)
    _kept.append(mmap.mmap(number, 4096))


_kept: list[Any] = []


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (keep_a_thread, "the thread sleeper"),
        (keep_a_file, "the descriptor of /etc/hostname"),
        (keep_a_pipe, "the descriptor of pipe, the descriptor of pipe"),
        (keep_a_segment, "the mapping /memfd:segment"),
    ],
)
def test_what_a_test_leaves_in_a_rank_fails_it_and_ends_the_ranks(
    few: Pool, leak: Callable[[], None], named: str
) -> None:
    before = pids(few)
    with pytest.raises(LeftBehind, match=f"rank 1 has .*{named}"), few.ranks(2) as ranks:
        ranks.call(leak, only=[1])
    assert not {*before} & {*pids(few)}


def fail() -> None:
    raise ValueError("no")


def test_ranks_with_which_a_test_has_failed_are_replaced(few: Pool) -> None:
    before = pids(few)
    with pytest.raises(RankFailed, match="ValueError: no"), few.ranks(2) as ranks:
        ranks.call(fail)
    assert not {*before} & {*pids(few)}


def test_a_rank_that_dies_unseen_fails_the_test(few: Pool) -> None:
    before = pids(few)
    with pytest.raises(LeftBehind, match="starts Ranks of its own"), few.ranks(2) as ranks:
        ranks.kill(1)
    assert not {*before} & {*pids(few)}


def test_a_rank_that_hangs_fails_the_test() -> None:
    pool = Pool(answer=0.5)
    with pytest.raises(LeftBehind, match="TimeoutError"), pool.ranks(2) as ranks:
        ranks.begin(time.sleep, 60, only=[0])
    assert len(pids(pool)) == 2
    pool.close()


def test_an_answer_that_nobody_has_taken_fails_the_test(few: Pool) -> None:
    with pytest.raises(LeftBehind, match="answer"), few.ranks(2) as ranks:
        ranks.begin(os.getpid)


def new_groups(number: int) -> None:
    for _ in range(number):
        dist.new_group()


def test_ranks_in_many_groups_are_replaced_without_a_failure(few: Pool) -> None:
    before = pids(few)
    for number, same in ((1, True), (MOST_GROUPS, False)):
        with few.ranks(2) as ranks:
            ranks.call(new_groups, number)
        assert (pids(few) == before) is same
