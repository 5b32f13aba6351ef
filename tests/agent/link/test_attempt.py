"""Tests how ranks begin one attempt together, or all of them learn which rank runs elsewhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ckptd.agent.link import attempt
from ckptd.agent.link.client import Client
from ckptd.agent.link.rounds import Exchange
from ckptd.shared import messages as m
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, InvalidRequest


@dataclass
class Served:
    """Replaces a client, as far as the begin of an attempt needs one."""

    welcome: m.Welcome
    attempt: int = 0

    def call(self, make: Any, kind: type[m.Began], timeout: float) -> tuple[m.Began, tuple[()]]:
        self.attempt = make(1).attempt or 7
        return m.Began(re=1, attempt=self.attempt), ()


def welcome(instance: str = "", root: str = "/ckpts") -> m.Welcome:
    return m.Welcome(re=1, version=1, root=root, instance=instance)


def meet(*ranks: tuple[m.Welcome, str]) -> list[int | CkptdError]:
    """Return the result of each rank, given the replies of its daemon and its job name."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

    def go(rank: int) -> int | CkptdError:
        said, job = ranks[rank]
        try:
            return attempt.begin(Exchange(store, rank, len(ranks)), None, cast(Client, Served(said)), job)
        except CkptdError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(go, range(len(ranks))))


def refused(*ranks: tuple[m.Welcome, str]) -> str:
    """Return the message of the error that all ranks get."""
    found = meet(*ranks)
    assert {type(one) for one in found} == {InvalidRequest}
    (sentence,) = {str(one) for one in found}
    return sentence


@pytest.mark.parametrize("instances", [("aa", "aa", "aa"), ("", "", ""), ("aa", "", "aa")])
def test_ranks_of_one_daemon_begin_one_attempt(instances: tuple[str, ...]) -> None:
    assert meet(*((welcome(instance), "gpt") for instance in instances)) == [7, 7, 7]


def test_containers_of_one_node_with_two_daemons_are_refused() -> None:
    assert refused((welcome("aa"), "gpt"), (welcome("aa"), "gpt"), (welcome("bb"), "gpt")) == (
        f"ranks 0 and 2 are served by different daemons (nodes {names.host()} and {names.host()}): "
        "a job's ranks must be on one node with one daemon in this version"
    )


def test_a_rank_on_another_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    boots = iter([bytes(16), bytes(15) + b"\1"])
    monkeypatch.setattr(attempt, "this_boot", lambda: next(boots))
    assert "ranks 0 and 1 are served by different daemons" in refused((welcome(), "gpt"), (welcome(), "gpt"))


def test_a_rank_with_another_root_is_refused() -> None:
    assert refused((welcome("aa", "/a"), "gpt"), (welcome("bb", "/b"), "gpt")) == (
        "rank 1 uses root /b, rank 0 uses /a: start all ranks with the same CKPTD_ROOT and one daemon"
    )


def test_a_rank_with_another_job_name_is_refused() -> None:
    assert refused((welcome("aa"), "gpt"), (welcome("aa"), "bert")) == (
        "rank 1 uses the job name 'bert', rank 0 uses 'gpt': use the same job name on all ranks"
    )
