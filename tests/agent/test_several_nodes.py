"""Jobs whose ranks are on several nodes, each with a daemon of its own."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner

from ckptd.agent import Agent, LatestN, per_rank
from ckptd.agent.link import attempt as link_attempt
from ckptd.daemon.commands.job_report import job_report
from ckptd.daemon.commands.report import status_text
from ckptd.daemon.engine import steps
from ckptd.shared import names
from ckptd.shared.errors import CkptdError, ForeignMemory, JobRunning
from ckptd.shared.location import Url
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import machine
from tests.crash.node_trainer import check, state_of
from tests.support import stores
from tests.support.daemons import until, warn_soon
from tests.support.nodes import Nodes, beat_fast, nodes
from tests.support.ranks import HERE, Lend, Ranks

pytestmark = pytest.mark.usefixtures("processes")

JOB = "gpt"
Sockets = list[Path]


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes(2) as made:
        yield made


def sockets(place: Nodes, *where: int) -> Sockets:
    """Return the socket of each rank, given the node of each rank."""
    return [place[node].home.socket for node in where]


# -- what the ranks do


def begin(where: Sockets, **options: Any) -> tuple[int, list[int]]:
    """Make the agent of this rank. Return its attempt and the ranks of its node."""
    HERE["agent"] = agent = Agent(JOB, socket=where[dist.get_rank()], **options)
    return agent.attempt, [] if agent._link.node is None else agent._link.node.ranks


def recover(where: Sockets) -> tuple[int, str] | None:
    """Recover, and compare every value. Return the step and the tag that came back."""
    if "agent" not in HERE:
        begin(where)
    state = state_of(-1)
    found = HERE["agent"].recover(state, on_reshape=lambda key, values: values[-1])
    if found is None:
        return None
    check(state, found.step)
    return found.step, found.tag


def take(step: int, **options: Any) -> str:
    """Take a step, wait until it is durable or has failed, and return the error, or ""."""
    pending = HERE["agent"].snapshot(state_of(step), step=step, **options)
    try:
        if options.get("persist", True):
            pending.wait("durable", timeout=60)
        return str(pending.error or "")
    except CkptdError as error:
        return str(error)


def take_unlike(step: int, odd: int) -> str:
    """Take a step in which the rank `odd` has a value that cannot be saved."""
    own = (dist.get_rank(), step) if dist.get_rank() != odd else open(__file__)  # noqa: SIM115
    state = state_of(step) | {"own": per_rank(own)}
    pending = HERE["agent"].snapshot(state, step=step, on_error="log")
    try:
        pending.wait("durable", timeout=60)
    except CkptdError as error:
        return str(error)
    return ""


def take_some(first: int, last: int, **options: Any) -> list[str]:
    """Take steps without waiting for any. Return what became of them."""
    pending = []
    for step in range(first, last + 1):
        pending.append(HERE["agent"].snapshot(state_of(step), step=step, **options))
        time.sleep(0.02)
    deadline = time.monotonic() + 60
    while (
        any(each.state in ("sealed", "filling", "staged") and each.persist for each in pending)
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    return [each.state for each in pending]


def close() -> None:
    HERE["agent"].close()


# -- the usual way


def test_a_checkpoint_of_two_nodes_is_a_checkpoint_like_any_other(two: Nodes, pool: Lend) -> None:
    where = sockets(two, 0, 0, 1, 1)
    with pool(4) as ranks:
        assert ranks.call(begin, where) == [(1, [0, 1]), (1, [0, 1]), (1, [2, 3]), (1, [2, 3])]
        assert ranks.call(take, 5) == [""] * 4
        assert ranks.call(take, 6) == [""] * 4
        ranks.call(close)
    repository = open_root(two.root)
    manifest = repository.read_manifest(JOB, names.tag_directory(6, None, 1))
    assert [part.rank for part in manifest.parts] == [0, 1, 2, 3]
    assert repository.read_newest(JOB) == manifest.tag
    until(lambda: all(not list(node.shm.rglob("*.seg")) for node in two), "freed slots")


@pytest.mark.parametrize("where", [(0, 1, 0, 1), (0, 1, 1), (1, 0), (0, 0), (1,)])
def test_it_is_recovered_on_other_nodes_and_other_numbers_of_ranks(
    two: Nodes, where: tuple[int, ...], pool: Lend
) -> None:
    with pool(4) as ranks:
        ranks.call(begin, sockets(two, 0, 0, 1, 1))
        assert ranks.call(take, 5) == [""] * 4
    with pool(len(where)) as ranks:
        tag = names.tag_directory(5, None, 1)
        assert ranks.call(recover, sockets(two, *where)) == [(5, tag)] * len(where)
        assert ranks.call(take, 6) == [""] * len(where)


def test_tags_metrics_and_retention(two: Nodes, pool: Lend) -> None:
    where = sockets(two, 0, 1)
    with pool(2) as ranks:
        ranks.call(_begin_keeping, where, 2)
        for step in range(1, 6):
            assert ranks.call(take_with_metrics, step, "best" if step == 3 else None) == [""] * 2
    repository = open_root(two.root)
    kept = ["best.a0001", "step-00000004.a0001", "step-00000005.a0001"]
    until(lambda: repository.tags(JOB) == kept, "retention")
    assert repository.read_manifest(JOB, "best.a0001").numbers == {"loss": 0.3}


def _begin_keeping(where: Sockets, count: int) -> None:
    begin(where, retention=LatestN(count))


def take_with_metrics(step: int, tag: str | None) -> str:
    return take(step, tag=tag, metrics={"loss": step / 10}, user_content={"epoch": step})


def test_a_planner_of_dcp(two: Nodes, pool: Lend) -> None:
    with pool(2) as ranks:
        ranks.call(_begin_planned, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
    with pool(2) as ranks:
        ranks.call(_begin_planned, sockets(two, 1, 0))
        assert ranks.call(_recover_planned) == [5, 5]


def _begin_planned(where: Sockets) -> None:
    begin(where, planner=DefaultSavePlanner())


def _recover_planned() -> int:
    state = {key: value for key, value in state_of(-1).items() if isinstance(value, torch.Tensor)}
    found = HERE["agent"].recover(state)
    assert torch.equal(state["replicated"], state_of(5)["replicated"])
    return int(found.step)


# -- calls that a rank does not make


class Kept(logging.Handler):
    """Keeps the warnings that name ranks which have not called."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.warned = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "not called" in record.getMessage():
            self.texts.append(record.getMessage())
            self.warned.set()


def begin_step(step: int) -> None:
    """Call `snapshot`, and do not wait for the save."""
    HERE["kept"] = Kept()
    logging.getLogger("ckptd.agent").addHandler(HERE["kept"])
    HERE["pending"] = HERE["agent"].snapshot(state_of(step), step=step)


def wait_for_warning() -> tuple[str, str]:
    """Wait for the warning.

    Return the state of the snapshot, and the warning up to the time waited.
    """
    assert HERE["kept"].warned.wait(60)
    (text,) = HERE["kept"].texts
    return HERE["pending"].state, text.partition(" waited for ")[0]


def end_step() -> str:
    """Wait until the snapshot is durable. Return its state."""
    HERE["pending"].wait("durable", timeout=60)
    return str(HERE["pending"].state)


def warn_later() -> None:
    """Make the daemon of this process name the missing ranks once all others surely
    have come.
    """
    steps.WAIT_SECONDS, steps.BEGUN_SECONDS = 4.0, 0.1


@pytest.mark.parametrize(
    ("callers", "patience"), [((0,), warn_soon), ((3,), warn_soon), ((1, 2, 3), warn_later)]
)
def test_the_ranks_that_have_called_learn_which_ranks_of_all_nodes_have_not(
    callers: tuple[int, ...], patience: Callable[[], None]
) -> None:
    """The ranks keep their plan, and exchange nothing.

    Only the board shows who is missing.

    Rank 0, which writes the answer on the board, may itself be missing.
    """
    missing = [rank for rank in range(4) if rank not in callers]
    named = (
        f"ranks {', '.join(map(str, missing))} have"
        if len(missing) > 1
        else f"rank {missing[0]} has"
    )
    with nodes(2, first=patience) as two, Ranks(4) as ranks:
        ranks.call(begin, sockets(two, 0, 0, 1, 1))
        assert ranks.call(take, 1) == [""] * 4
        ranks.call(begin_step, 2, only=callers)
        assert ranks.call(wait_for_warning, only=callers) == [
            ("sealed", f"{named} not called snapshot(step=2) yet, and rank {rank} has")
            for rank in callers
        ]
        ranks.call(begin_step, 2, only=missing)  # they were only slow
        assert ranks.call(end_step) == ["durable"] * 4


# -- steps that a node cannot take


def test_a_step_that_one_rank_cannot_take_fails_on_all_nodes_and_names_the_rank(
    two: Nodes, pool: Lend
) -> None:
    with pool(4) as ranks:
        ranks.call(begin, sockets(two, 0, 0, 1, 1))
        assert ranks.call(take, 1) == [""] * 4
        found = ranks.call(take_unlike, 2, 3)
        assert all(found)
        assert all("rank 3" in reason or "own" in reason for reason in found), found
        assert ranks.call(take, 3) == [""] * 4
    assert names.tag_directory(2, None, 1) not in open_root(two.root).tags(JOB)


def test_a_node_whose_disk_is_full_is_named_and_later_steps_are_saved(
    two: Nodes, pool: Lend
) -> None:
    two[1].kill()
    two[1].start(failpoints="persist.synced=error(ENOSPC)@2")
    with pool(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 1) == [""] * 2
        first, second = ranks.call(take, 2)
        assert (
            "rank 1 on node1: cannot save gpt/step-00000002.a0001: No space left on device" in first
        )
        assert "No space left on device" in second
        assert ranks.call(take, 3) == [""] * 2


def test_a_step_in_memory_only_comes_back_although_a_node_cannot_save_it_at_first(
    two: Nodes,
) -> None:
    two[1].kill()
    two[1].start(failpoints="persist.synced=error(ENOSPC)@2")
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 1) == [""] * 2
        assert ranks.call(take_in_memory, 2) == ["sealed"] * 2
        assert [found and found[0] for found in ranks.call(recover, sockets(two, 0, 1))] == [2, 2]


def take_in_memory(step: int) -> str:
    pending = HERE["agent"].snapshot(state_of(step), step=step, persist=False)
    pending.wait("sealed", timeout=60)
    return str(pending.state)


def test_steps_that_one_node_skips_are_not_saved_by_the_other(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 1) == [""] * 2
        states = ranks.call(_take_fast, 2, 30)
    assert [step for step, state in enumerate(states[0]) if state == "durable"] == [
        step for step, state in enumerate(states[1]) if state == "durable"
    ], states
    assert "durable" in states[0]


def _take_fast(first: int, last: int) -> list[str]:
    return take_some(first, last, on_busy="skip")


def experts(step: int, persist: bool) -> str:
    """Take a step with experts that the ranks train on their own from step 2 on.

    Return why it failed, or "".
    """
    own = dist.get_rank() if step > 1 else 0
    state = {"router": torch.ones(40), "expert": torch.full((60,), 5.0 + own)}
    pending = HERE["agent"].snapshot(state, step=step, persist=persist)
    try:
        pending.wait("durable" if persist or step > 1 else "sealed", timeout=30)
    except CkptdError as error:
        return str(error)
    return ""


def recover_experts(where: Sockets) -> tuple[int, float]:
    begin(where)
    state = {"router": torch.zeros(40), "expert": torch.zeros(60)}
    found = HERE["agent"].recover(state)
    return found.step, float(state["expert"][0])


@pytest.mark.parametrize("persist", [True, False])
def test_a_step_in_which_ranks_of_two_nodes_differ_is_no_checkpoint(
    two: Nodes, persist: bool, pool: Lend
) -> None:
    with pool(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(experts, 1, persist) == [""] * 2
        for why in ranks.call(experts, 2, persist):
            assert why.startswith("step 2 failed: "), why
            assert "expert" in why
            assert "per_rank(...)" in why
    with pool(2) as ranks:
        assert ranks.call(recover_experts, sockets(two, 0, 1)) == [(1, 5.0)] * 2


# -- deaths


def test_snapshots_in_memory_only_come_back_after_all_trainers_have_died(two: Nodes) -> None:
    with Ranks(4) as ranks:
        ranks.call(begin, sockets(two, 0, 0, 1, 1))
        for step in range(1, 8):
            assert ranks.call(_take_in_memory, step) == [""] * 4
    with Ranks(4) as ranks:
        assert (
            ranks.call(recover, sockets(two, 0, 0, 1, 1))
            == [(7, names.tag_directory(7, None, 1))] * 4
        )


def _take_in_memory(step: int) -> str:
    return take(step, persist=False)


def test_close_saves_what_is_in_memory_only(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        for step in (1, 2, 3):
            assert ranks.call(_take_in_memory, step) == [""] * 2
        ranks.call(close)
    assert open_root(two.root).read_manifest(JOB, names.tag_directory(3, None, 1)).step == 3


def test_a_node_that_is_lost_and_replaced_by_an_empty_one(two: Nodes) -> None:
    with Ranks(4) as ranks:
        ranks.call(begin, sockets(two, 0, 0, 1, 1))
        assert ranks.call(take, 5) == [""] * 4
        assert ranks.call(_take_in_memory, 6) == [""] * 4
        two[1].lose()  # before the trainers end: at their end it would save step 6
    two[1].start()
    with Ranks(4) as ranks:
        assert (
            ranks.call(recover, sockets(two, 0, 0, 1, 1))
            == [(5, names.tag_directory(5, None, 1))] * 4
        )
        assert ranks.call(take, 6) == [""] * 4


def _refusal(where: Sockets) -> str:
    try:
        begin(where)
    except ForeignMemory as error:
        return str(error)
    return ""


def _decided(where: Sockets, choice: str) -> tuple[int, str] | None:
    os.environ["CKPTD_FOREIGN_MEMORY"] = choice
    return recover(where)


@pytest.mark.parametrize("choice", ["adopt", "drop"])
@pytest.mark.parametrize("lost", [None, 0], ids=["both nodes", "not the node of rank 0"])
def test_memory_of_a_root_that_is_gone_stops_the_run_on_all_nodes(
    two: Nodes, lost: int | None, choice: str
) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
        for node in two:
            node.kill()
    assert isinstance(two.root, Path)
    two.root.rename(two.path / "gone")
    if lost is not None:
        two[lost].lose()
    for node in two:
        node.start()
    with Ranks(2) as ranks:
        for refusal in ranks.call(_refusal, sockets(two, 0, 1)):
            assert f"holds step 5 of attempt 1 of job {JOB!r}, saved for root " in refusal
        assert not (two.root / JOB).exists()
    with Ranks(2) as ranks:
        found = ranks.call(_decided, sockets(two, 0, 1), choice)
        whole = choice == "adopt" and lost is None
        assert found == [(5, names.tag_directory(5, None, 1)) if whole else None] * 2
        assert ranks.call(take, 6) == [""] * 2


def test_clocks_that_are_a_year_apart_change_nothing(two: Nodes) -> None:
    two[1].kill()
    two[1].start("--keep-last", "2", first=_a_year_ahead)
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        for step in (5, 6, 7):
            assert ranks.call(take, step) == [""] * 2
    with Ranks(2) as ranks:  # rank 0, whose daemon commits and deletes, is now a year ahead
        assert ranks.call(recover, sockets(two, 1, 0)) == [(7, names.tag_directory(7, None, 1))] * 2
        for step in (8, 9):
            assert ranks.call(take, step) == [""] * 2
    kept = [names.tag_directory(8, None, 2), names.tag_directory(9, None, 2)]
    repository = open_root(two.root)
    until(
        lambda: [tag for tag in repository.tags(JOB) if repository.is_committed(JOB, tag)] == kept,
        "retention",
    )


def _a_year_ahead() -> None:
    now = time.time
    time.time = lambda: now() + 365 * 86_400


def test_a_job_moves_from_one_node_to_two_and_back(two: Nodes, pool: Lend) -> None:
    for attempt, where in enumerate([(0, 0), (0, 1), (1, 1)], 1):
        with pool(2) as ranks:
            back = ranks.call(recover, sockets(two, *where))
            assert (
                back
                == [
                    None
                    if attempt == 1
                    else (attempt - 1, names.tag_directory(attempt - 1, None, attempt - 1))
                ]
                * 2
            )
            assert ranks.call(_take_in_memory, attempt) == [""] * 2


def test_the_daemon_of_rank_0_may_be_killed_while_the_training_goes_on(two: Nodes) -> None:
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 1) == [""] * 2
        two[0].kill()
        two[0].start()
        until(lambda: two[0].daemon.status()["jobs"][0]["ranks_connected"] == 1, "reconnected rank")
        assert ranks.call(take, 2) == [""] * 2


def test_two_roots_may_have_jobs_of_one_name(two: Nodes) -> None:
    """The two jobs are both in attempt 1, and their boards are in the same store."""
    with nodes(2) as other, Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        ranks.call(_keep_as_other)
        ranks.call(begin, sockets(other, 0, 1))
        assert ranks.call(take, 7) == [""] * 2
        assert ranks.call(_heard) == [[7], [7]]
        assert ranks.call(_heard, "other") == [[], []]


def _keep_as_other() -> None:
    HERE["other"] = HERE["agent"]


def _heard(name: str = "agent") -> list[int]:
    return list(HERE[name]._link._board._known.common)


# -- object stores


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Servers]:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as running:
        yield running


@contextmanager
def in_store(
    server: stores.Server, monkeypatch: pytest.MonkeyPatch, count: int = 2
) -> Iterator[Nodes]:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    with nodes(
        count, root=Url("s3", "bucket", (names.new_nonce().hex(),)), environ=server.environ
    ) as made:
        yield made


def test_the_root_may_be_an_object_store(
    servers: stores.Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers.get("seaweed")
    with in_store(server, monkeypatch) as place:
        with Ranks(2) as ranks:
            ranks.call(_set, server.environ)
            ranks.call(begin, sockets(place, 0, 1))
            for step in (5, 6):
                assert ranks.call(take, step) == [""] * 2
            assert ranks.call(_take_in_memory, 7) == [""] * 2
        tag = names.tag_directory(7, None, 1)
        with Ranks(2) as ranks:
            ranks.call(_set, server.environ)
            assert ranks.call(recover, sockets(place, 1, 0)) == [(7, tag)] * 2
            assert ranks.call(take, 8) == [""] * 2
        assert [part.rank for part in open_root(place.root).read_manifest(JOB, tag).parts] == [0, 1]


def test_a_store_that_creates_an_object_for_several_callers_is_refused(
    servers: stores.Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers.get("rclone")
    with in_store(server, monkeypatch) as place, Ranks(2) as ranks:
        ranks.call(_set, server.environ)
        found = ranks.call(_refused, sockets(place, 0, 1))
    assert len(set(found)) == 1
    assert "creates an object for several callers at once" in found[0]
    assert "use a store with conditional puts, or a shared file system" in found[0]


def _set(environ: dict[str, str]) -> None:
    os.environ.update(environ)


# -- a second run


def test_a_run_of_several_nodes_is_refused_on_a_node_of_none_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with nodes(3) as place:
        _a_run_is_refused_while_another_one_is_alive(place, {}, monkeypatch)


def test_a_run_is_refused_by_its_heartbeat_in_an_object_store(
    servers: stores.Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers.get("seaweed")
    with in_store(server, monkeypatch, 3) as place:
        _a_run_is_refused_while_another_one_is_alive(place, server.environ, monkeypatch)


def _a_run_is_refused_while_another_one_is_alive(
    place: Nodes, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_attempt, "WAIT_SECONDS", 0.1)
    for node in place:
        node.kill()
        node.start(first=beat_fast)
    beats = HeartbeatStore(open_root(place.root).storage)
    with Ranks(2) as ranks:
        ranks.call(_set, environ)
        ranks.call(begin, sockets(place, 0, 1))
        until(lambda: beats.attempts(JOB) == [1], "the heartbeat")
        with pytest.raises(JobRunning, match=f"in process {ranks.processes[0].pid} on node0 since"):
            Agent(JOB, socket=place[2].home.socket)
        with Ranks(2) as others:
            others.call(_set, environ)
            others.call(_be_impatient)
            refused = others.call(_refused, sockets(place, 2, 1))
            assert all(
                reason.startswith("JobRunning: job 'gpt' is running already, in process")
                for reason in refused
            ), refused
        assert ranks.call(take, 5) == [""] * 2
    until(lambda: beats.attempts(JOB) == [], "the end of the heartbeat")
    with closing(Agent(JOB, socket=place[2].home.socket)) as agent:
        assert agent.attempt == 2


def _be_impatient() -> None:
    link_attempt.WAIT_SECONDS = 0.1


# -- mistakes


def test_two_roots_at_the_same_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with nodes(2) as place:
        for node, root in zip(place, ("a", "b"), strict=True):
            node.kill()
            node.home.root = tmp_path / root
            node.start()
        with Ranks(2) as ranks:
            found = ranks.call(_refused, sockets(place, 0, 1))
    assert len(set(found)) == 1
    assert found[0].startswith(
        f"InvalidRequest: rank 1 on {machine.host()} uses root {tmp_path}/b, rank 0 on "
        f"{machine.host()} uses {tmp_path}/a"
    )


def _refused(where: Sockets) -> str:
    try:
        begin(where)
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_the_status_of_each_node_names_its_steps(two: Nodes, pool: Lend) -> None:
    with pool(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
        for node in (two[0], two[1]):
            (job,) = node.daemon.status()["jobs"]
            assert (job["last_durable"]["step"], job["ranks_connected"]) == (5, 1), json.dumps(job)
            assert (job["host"], job["ranks_here"], job["delivered"]) == (
                node.name,
                [int(node.name[-1])],
                [],
            )
            assert status_text(node.daemon.status()).endswith(f"1 of 1 on {node.name}")


def test_the_status_says_which_step_waits_for_other_nodes(two: Nodes) -> None:
    two[1].kill()
    two[1].start(failpoints="receipt.starting=hang@2")
    with Ranks(2) as ranks:
        ranks.call(begin, sockets(two, 0, 1))
        assert ranks.call(take, 5) == [""] * 2
        ranks.begin(take, 6)
        tag = names.tag_directory(6, None, 1)
        until(lambda: two[0].daemon.status()["jobs"][0]["delivered"] == [tag], "delivered step")
        assert f"{tag} (delivered, waits for other nodes)" in status_text(two[0].daemon.status())
        save = job_report(two.root, JOB)["saves"][-1]
        assert (save["tag"], save["state"]) == (tag, "undecided")
        assert [(node["node"], node["ranks"], node["state"]) for node in save["nodes"]] == [
            ("node0", [0], "delivered"),
            ("node1", [1], "missing"),
        ]
