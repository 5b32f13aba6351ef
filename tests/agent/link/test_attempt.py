"""Tests how ranks begin one attempt together, or all of them learn which rank runs
elsewhere.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ckptd.agent.link import attempt
from ckptd.agent.link.client import Client
from ckptd.agent.link.rounds import Exchange
from ckptd.shared.errors import CkptdError, DaemonUnreachable, InvalidRequest, JobRunning
from ckptd.shared.system import machine
from ckptd.shared.wire import messages as m


@dataclass
class Served:
    """Replaces a client, as far as the begin of an attempt needs one."""

    welcome: m.Welcome
    attempt: int = 0
    ends: int = 0
    """The number of calls that fail because the daemon ends."""
    comes_back: bool = True

    def call(self, make: Any, kind: type[m.Began], timeout: float) -> tuple[m.Began, tuple[()]]:
        if "refuses" in self.welcome.features:
            raise JobRunning("job 'gpt' is running already")
        if self.ends:
            self.ends -= 1
            raise DaemonUnreachable("the connection to the daemon was lost")
        self.attempt = make(1).attempt or 7
        return m.Began(re=1, attempt=self.attempt), ()

    def wait_connected(self, budget: float) -> bool:
        return self.comes_back


def welcome(
    instance: str = "",
    root: str = "/ckpts",
    identity: str = "",
    *,
    refuses: bool = False,
    **settings: Any,
) -> m.Welcome:
    """Return the welcome of a daemon.

    If it `refuses`, another run of the job is alive on its node.
    """
    features = ["nodes", *(["refuses"] if refuses else [])] if instance else []
    return m.Welcome(
        re=1, version=1, features=features, root=root, instance=instance, identity=identity,
        **settings,
    )  # fmt: skip


def meet(*ranks: tuple[m.Welcome, str]) -> list[attempt.BegunAttempt | CkptdError]:
    """Return the result of each rank, given the replies of its daemon and its job name."""
    store = TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )

    def go(rank: int) -> attempt.BegunAttempt | CkptdError:
        said, job = ranks[rank]
        try:
            return attempt.begin(
                Exchange(store, rank, len(ranks)), None, cast(Client, Served(said)), job
            )
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
    assert (
        meet(*((welcome(instance), "gpt") for instance in instances))
        == [attempt.BegunAttempt(7, None, [])] * 3
    )


def test_ranks_of_several_daemons_are_on_several_nodes() -> None:
    """The ranks of a node need not follow one another, and containers of one machine
    are nodes, too.
    """
    first, second = welcome("aa"), welcome("bb")
    found = meet((first, "gpt"), (second, "gpt"), (first, "gpt"), (second, "gpt"))
    shares = [begun.node for begun in found if isinstance(begun, attempt.BegunAttempt)]
    assert [share and share.ranks for share in shares] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert len({share.run_id for share in shares if share is not None}) == 1
    assert {
        (begun.attempt, tuple(begun.leaders))
        for begun in found
        if isinstance(begun, attempt.BegunAttempt)
    } == {(7, (0, 1))}


def test_every_attempt_of_several_nodes_has_an_identity_of_its_own() -> None:
    claims = {
        begun.node.run_id  # type: ignore[union-attr]
        for _ in range(2)
        for begun in meet((welcome("aa"), "gpt"), (welcome("bb"), "gpt"))
        if begun.node  # type: ignore[union-attr]
    }
    assert len(claims) == 2


def test_machines_are_nodes_even_if_their_daemons_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    boots = iter([bytes(16), bytes(15) + b"\1"])
    monkeypatch.setattr(attempt, "this_boot", lambda: next(boots))
    assert refused((welcome(), "gpt"), (welcome(), "gpt"))


def test_an_old_daemon_is_named() -> None:
    old = m.Welcome(re=1, version=1, root="/ckpts", instance="bb")
    assert refused((welcome("aa"), "gpt"), (old, "gpt")) == (
        f"the daemon on {machine.host()} knows no jobs of several nodes: install this version of "
        f"ckptd on all nodes"
    )


def test_an_error_of_one_node_is_raised_on_all() -> None:
    found = meet(
        (welcome("aa"), "gpt"), (welcome("bb", refuses=True), "gpt"), (welcome("bb"), "gpt")
    )
    assert [str(error) for error in found] == ["rank 1: job 'gpt' is running already"] * 3
    assert {type(error) for error in found} == {JobRunning}


def test_roots_of_one_path_that_are_not_the_same_are_refused() -> None:
    assert refused(
        (welcome("aa", identity="1" * 32), "gpt"), (welcome("bb", identity="2" * 32), "gpt")
    ) == (
        f"the root /ckpts of rank 1 on {machine.host()} is not that of rank 0 on {machine.host()}, "
        f"although it has the same path: "
        "use a directory of a shared file system, or an object store"
    )


def test_a_rank_with_another_root_is_refused() -> None:
    assert refused((welcome("aa", "/a"), "gpt"), (welcome("bb", "/b"), "gpt")) == (
        f"rank 1 on {machine.host()} uses root /b, rank 0 on {machine.host()} uses /a: give all "
        f"daemons the same root (--root or CKPTD_ROOT)"
    )


def test_a_rank_with_another_job_name_is_refused() -> None:
    assert refused((welcome("aa"), "gpt"), (welcome("aa"), "bert")) == (
        "rank 1 uses the job name 'bert', rank 0 uses 'gpt': use the same job name on all ranks"
    )


@pytest.mark.parametrize(
    ("ends", "comes_back", "begins"), [(1, True, True), (2, True, False), (1, False, False)]
)
def test_a_rank_that_is_alone_asks_the_next_daemon_if_the_first_one_ends(
    ends: int, comes_back: bool, begins: bool
) -> None:
    served = Served(welcome(), ends=ends, comes_back=comes_back)
    alone = SimpleNamespace(rank=0, world_size=1)
    if begins:
        assert attempt._begin(cast(Client, served), "gpt", cast(Any, alone), 0, None) == 7
    else:
        with pytest.raises(DaemonUnreachable, match="^the connection to the daemon was lost$"):
            attempt._begin(cast(Client, served), "gpt", cast(Any, alone), 0, None)


def test_of_several_ranks_none_asks_again() -> None:
    """The others have heard of the first daemon."""
    served = Served(welcome(), ends=1)
    with pytest.raises(DaemonUnreachable):
        attempt._begin(
            cast(Client, served), "gpt", cast(Any, SimpleNamespace(rank=0, world_size=2)), 0, None
        )


# -- copies in the memory of other nodes


ON: dict[str, Any] = {"copies": m.CopySettings()}
RACK: dict[str, Any] = {"copies": m.CopySettings(domain="rack7")}


def copies(*nodes: dict[str, Any]) -> list[tuple[int, tuple[int, ...], str]]:
    """Return the peer, the sources and the reason of each rank, given the settings of the
    daemon of each node. Each node has two ranks.
    """
    daemons = [welcome(f"node{number}", **settings) for number, settings in enumerate(nodes)]
    found = meet(*((daemon, "gpt") for daemon in daemons for _ in range(2)))
    return [
        (begun.peer, begun.sources, begun.alone)
        for begun in found
        if isinstance(begun, attempt.BegunAttempt)
    ]


def test_each_rank_learns_where_its_copies_go_and_whose_copies_come() -> None:
    assert copies(ON, ON, ON) == [
        (2, (4,), ""), (3, (5,), ""), (4, (0,), ""), (5, (1,), ""), (0, (2,), ""), (1, (3,), ""),
    ]  # fmt: skip


def test_copies_are_off_by_default() -> None:
    assert copies({}, {}) == [(-1, (), "")] * 4


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (
            (ON, {}),
            "is set to replicas = 0, and others to 1: set the same on all",
        ),
        (
            (
                RACK,
                RACK,
            ),
            "all 2 nodes are in the domain 'rack7', and none could hold the copies of another one",
        ),
    ],
)
def test_all_ranks_learn_why_there_are_no_copies(
    nodes: tuple[dict[str, Any], ...], why: str
) -> None:
    found = copies(*nodes)
    assert [(peer, sources) for peer, sources, _ in found] == [(-1, ())] * 4
    assert all(why in said for _, _, said in found)
