"""The link of a rank over a real connection to a daemon that answers what the test
tells it to.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import Store  # type: ignore[attr-defined]

from ckptd.agent.handover import rank_link
from ckptd.agent.handover.rank_link import RankLink, links
from ckptd.agent.link.rounds import Alone, Told
from ckptd.agent.pending import PendingSnapshot
from ckptd.shared.errors import (
    Busy,
    CkptdError,
    DaemonUnreachable,
    Fenced,
    InvalidRequest,
    SnapshotFailed,
    StorageError,
    StructureChanged,
)
from ckptd.shared.formats.membership import Membership
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import NoDaemon
from ckptd.shared.wire.lifecycle import Event
from tests.support.daemons import until
from tests.support.fake_daemon import SECONDS, Connection, FakeDaemon, fake_daemon


class World:
    """A daemon, the calls of a rank on threads, and the link once it is made."""

    def __init__(self, daemon: FakeDaemon, pool: ThreadPoolExecutor) -> None:
        self.daemon, self.pool = daemon, pool
        self.planned_again = 0
        self.link: RankLink

    def _structure_changed(self) -> None:
        self.planned_again += 1

    def linking(self, ranks: Any = None, job: str | None = "gpt") -> Future[RankLink]:
        return self.pool.submit(
            RankLink, ranks or Alone(), job, socket=self.daemon.socket,
            structure_changed=self._structure_changed
        )  # fmt: skip

    def linked(self, ranks: Any = None) -> Connection:
        """Make the link, and return the daemon's end of its connection."""
        making = self.linking(ranks)
        connection = self.daemon.accepted()
        connection.attach(3)
        self.link = making.result(SECONDS)
        return connection

    def during(self, call: Callable[[], Any], *answers: Callable[[], None]) -> Any:
        """Run a call of the rank while the daemon does this."""
        running = self.pool.submit(call)
        for answer in answers:
            answer()
        return running.result(SECONDS)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in ("CKPTD_ROOT", "CKPTD_JOB", "CKPTD_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    with fake_daemon() as daemon, ThreadPoolExecutor(4) as pool:
        made = World(daemon, pool)
        yield made
        if hasattr(made, "link"):
            made.link.let_go()


def done(connection: Connection, kind: type[m.Request]) -> Callable[[], None]:
    return lambda: connection.reply(m.Done(re=connection.next(kind).id))


def sealed(link: RankLink, step: int) -> PendingSnapshot:
    """A snapshot that is sealed and not durable yet."""
    pending = PendingSnapshot(step, link.attempt)
    pending.segment = f"{step}.seg"
    for event in (Event.GRANT, Event.STAGE, Event.SEAL):
        pending.move(event)
    link.handovers.pending[link.attempt, step] = pending
    return pending


def test_a_link_begins_an_attempt(world: World) -> None:
    making = world.linking()
    connection = world.daemon.accepted()
    begin = connection.next(m.Begin)
    assert (begin.job, begin.rank, begin.world_size, begin.attempt) == ("gpt", 0, 1, 0)
    connection.reply(m.Began(re=begin.id, attempt=3))
    world.link = link = making.result(SECONDS)
    assert (
        link.job,
        link.attempt,
        link.last_step,
        link.root,
        link.stall_budget,
        link.ranks.scope,
    ) == ("gpt", 3, -1, "/ckpts", 5.0, "gpt")
    assert (link.closed, link.usable, link in links()) == (False, True, True)
    assert repr(link) == "gpt attempt 3 rank 0 of 1, connected"


def test_an_attempt_that_cannot_begin_leaves_no_connection(world: World) -> None:
    making = world.linking()
    connection = world.daemon.accepted()
    connection.reply(
        m.Error(re=connection.next(m.Begin).id, code=StorageError.code, message="the disk is full")
    )
    with pytest.raises(StorageError, match="^the disk is full$"):
        making.result(SECONDS)
    assert connection.ended.wait(SECONDS)


def test_a_job_without_a_name_is_refused_and_the_other_ranks_hear_of_it(world: World) -> None:
    heard: list[object] = []

    class Listening(Alone):
        def round(self, topic: str, mine: bytes | CkptdError, *more: Any) -> bytes:
            heard.append(mine)
            return super().round(topic, mine, *more)

    making = world.linking(Listening(), None)
    connection = world.daemon.accepted()
    with pytest.raises(InvalidRequest, match="^this daemon serves several jobs"):
        making.result(SECONDS)
    assert [type(one) for one in heard] == [InvalidRequest]
    assert connection.ended.wait(SECONDS)
    world.daemon.refuse()
    with pytest.raises(DaemonUnreachable):
        world.linking(Listening()).result(SECONDS)
    assert [type(one) for one in heard] == [InvalidRequest, NoDaemon]


# -- news


def test_news_reach_the_snapshot_of_their_attempt_and_step(world: World) -> None:
    connection = world.linked()
    one, other, older = sealed(world.link, 1), sealed(world.link, 2), PendingSnapshot(1, 2)
    world.link.handovers.pending[2, 1] = older
    connection.reply(
        m.Progress(re=0, attempt=3, step=1, state="durable"),
        m.Progress(
            re=0, attempt=3, step=2, state="failed", reason="disk full", code=StorageError.code
        ),
        m.Progress(re=0, attempt=3, step=9, state="durable"),
    )
    until(lambda: other.done, "news")
    assert (one.state, type(other.error), str(other.error), older.state) == (
        "durable",
        StorageError,
        "disk full",
        "staged",
    )
    assert list(world.link.handovers.pending) == [(2, 1)]


class Two(Alone):
    """The rounds of rank 0 of two, in which rank 1 says the same as rank 0."""

    world_size = 2


def test_ranks_that_have_not_called_are_named_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    connection = world.linked(Two())
    met, apart, later, last = (sealed(world.link, step) for step in (1, 2, 3, 4))
    for pending in (met, apart, later):
        pending.begun = time.perf_counter() - 5.0
    apart.meets = later.meets = False
    connection.reply(
        m.Waiting(re=0, attempt=3, step=1, ranks=[1]),  # a round names the rank
        m.Waiting(re=0, attempt=3, step=9, ranks=[1]),  # this rank has not called, either
        m.Waiting(re=0, attempt=2, step=2, ranks=[1]),  # of another attempt
        m.Waiting(re=0, attempt=3, step=2, ranks=[0, 1]),  # this rank has called since
        m.Waiting(re=0, attempt=3, step=2, ranks=[1]),
        m.Waiting(re=0, attempt=3, step=3, ranks=[1]),
        m.Progress(re=0, attempt=3, step=4, state="durable"),
    )
    until(lambda: last.done, "news")
    (text,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert text.startswith("rank 1 has not called snapshot(step=2) yet, and rank 0 has waited for ")
    assert (met.state, apart.state, later.state) == ("sealed", "sealed", "sealed")


@pytest.mark.parametrize(("here", "hint"), [([0], True), ([0, 1], False)])
def test_the_daemon_of_ranks_on_another_node_may_hang_instead(
    world: World, caplog: pytest.LogCaptureFixture, here: list[int], hint: bool
) -> None:
    connection = world.linked(Two())
    world.link.node = Membership(run_id="0" * 32, ranks=here)
    pending, last = sealed(world.link, 1), sealed(world.link, 2)
    pending.begun, pending.meets = time.perf_counter() - 5.0, False
    connection.reply(
        m.Waiting(re=0, attempt=3, step=1, ranks=[1]),
        m.Progress(re=0, attempt=3, step=2, state="durable"),
    )
    until(lambda: last.done, "news")
    (text,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert text.endswith("; or the daemon of its node hangs.") == hint
    assert ("Is it called on rank 0 only?" in text) != hint


def test_a_remark_about_the_storage_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    connection = world.linked()
    pending = sealed(world.link, 1)
    connection.reply(
        m.Remark(re=0, text="job gpt: the root has room for 2 more of its checkpoints"),
        m.Progress(re=0, attempt=3, step=1, state="durable"),
    )
    until(lambda: pending.done, "news")
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert record.getMessage() == "job gpt: the root has room for 2 more of its checkpoints"
    assert pending.state == "durable"


def test_a_changed_structure_makes_the_ranks_plan_again(world: World) -> None:
    connection = world.linked()
    one, other = sealed(world.link, 1), sealed(world.link, 2)
    connection.reply(
        m.Progress(
            re=0,
            attempt=3,
            step=1,
            state="failed",
            reason="rank 1 has planned again",
            code=StructureChanged.code,
        ),
        m.Progress(re=0, attempt=3, step=2, state="failed", reason="no reason"),
    )
    until(lambda: other.done, "news")
    assert (type(one.error), type(other.error), world.planned_again) == (
        StructureChanged,
        SnapshotFailed,
        1,
    )


def test_a_slot_that_is_granted_too_late_is_given_back(world: World) -> None:
    connection = world.linked()
    call = world.link.client.begin(lambda n: m.Acquire(id=n, step=4, wait=0.0))
    world.link.client.drop(call)
    connection.reply(m.Granted(re=connection.next(m.Acquire).id, segment="a.seg", step=4))
    abandon = connection.next(m.Abandon)
    assert (abandon.segment, abandon.step) == ("a.seg", 4)


# -- lost connections


def test_a_new_connection_resumes_the_attempt_and_reports_what_is_sealed(world: World) -> None:
    connection = world.linked()
    one = sealed(world.link, 1)
    connection.hang_up()
    again = world.daemon.accepted()
    begin = again.next(m.Begin)
    assert (begin.job, begin.attempt) == ("gpt", 3)
    again.reply(m.Began(re=begin.id, attempt=3))
    seal = again.next(m.Seal)
    assert (seal.segment, seal.attempt, seal.step) == ("1.seg", 3, 1)
    again.reply(m.Sealed(re=seal.id, durable=True))
    one.wait("durable", SECONDS)
    assert one.state == "durable"


def test_a_newer_attempt_fails_what_is_sealed(world: World) -> None:
    connection = world.linked()
    one = sealed(world.link, 1)
    connection.hang_up()
    again = world.daemon.accepted()
    again.reply(m.Error(re=again.next(m.Begin).id, code=Fenced.code, message="attempt 4 has begun"))
    with pytest.raises(Fenced, match="^attempt 4 has begun$"):
        one.wait("durable", SECONDS)
    until(lambda: not world.link.usable, "end")
    assert (world.link.closed, world.link in links()) == (False, False)


def test_a_link_whose_next_attempt_is_about_to_begin_does_not_resume_the_old_one(
    world: World,
) -> None:
    connection = world.linked()
    world.link.interrupted = True
    connection.hang_up()
    again = world.daemon.accepted()
    assert world.link.client.wait_connected(SECONDS)
    assert again.requests.empty()


# -- attempts


def test_the_next_attempt_starts_over(world: World) -> None:
    connection = world.linked()
    world.link.handovers.last_step = 7
    world.during(world.link.begin_next, lambda: connection.attach(4))
    assert (
        world.link.attempt,
        world.link.last_step,
        world.link.interrupted,
        world.planned_again,
    ) == (4, -1, False, 1)


def test_a_begin_that_was_interrupted_is_done_by_the_next_call(world: World) -> None:
    connection = world.linked()
    world.link.interrupted = True
    world.during(world.link.ready, lambda: connection.attach(4))
    assert (world.link.attempt, world.link.interrupted) == (4, False)
    world.link.ready()


def test_on_several_ranks_all_must_recover_after_an_interrupted_begin(world: World) -> None:
    world.linked(Told(0, 2, Store))
    world.link.interrupted = True
    with pytest.raises(
        InvalidRequest, match="was interrupted while it began the next attempt: call recover"
    ):
        world.link.ready()


def test_a_step_of_dcp_follows_the_last(world: World) -> None:
    world.linked()
    steps = [world.link.open_step(step, None).pending.step for step in (None, None, 9, None, 4)]
    assert (steps, world.link.last_step) == ([0, 1, 9, 10, 4], 10)
    assert sorted(world.link.handovers.pending) == [(3, 0), (3, 1), (3, 4), (3, 9), (3, 10)]


def test_the_other_ranks_hear_of_a_refused_snapshot_when_the_outer_call_ends(world: World) -> None:
    connection = world.linked(Told(0, 2, Store))
    pending = PendingSnapshot(5, 3)
    with world.link.calls("snapshot"):
        world.link.refuse(pending, Busy("snapshot() is running"))
        assert connection.requests.empty()
    abandon = connection.next(m.Abandon)
    assert (abandon.segment, abandon.step, abandon.reason, pending.state) == (
        "",
        5,
        "snapshot() is running",
        "failed",
    )


# -- questions to the daemon


@pytest.mark.parametrize(
    ("jobs", "current"),
    [
        ([{"job": "gpt", "attempt": 3}, {"job": "bert", "attempt": 9}], True),
        ([{"job": "gpt", "attempt": 4}], False),
        ([], True),
    ],
)
def test_an_attempt_is_current_until_the_daemon_has_a_newer_one(
    world: World, jobs: list[Any], current: bool
) -> None:
    connection = world.linked()
    report = json.dumps({"jobs": jobs})

    def answer() -> None:
        connection.reply(m.StatusReport(re=connection.next(m.Status).id, report=report))

    assert world.during(world.link.is_current, answer) == current


def test_checkpoints_are_forgotten_by_their_directories(world: World) -> None:
    connection = world.linked()

    def answer() -> None:
        request = connection.next(m.Forget)
        assert (request.job, request.tags) == ("gpt", ["a.a0001", "b.a0001"])
        connection.reply(m.Forgotten(re=request.id, refused={"b.a0001": "pinned"}))

    assert world.during(lambda: world.link.forget(["a.a0001", "b.a0001"]), answer) == {
        "b.a0001": "pinned"
    }


def test_a_durable_checkpoint_is_waited_for_while_there_is_a_daemon(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = world.linked()
    one, lost = sealed(world.link, 1), sealed(world.link, 2)
    world.during(
        lambda: world.link.wait_durable(one),
        lambda: connection.reply(m.Progress(re=0, attempt=3, step=1, state="durable")),
    )
    monkeypatch.setattr(rank_link, "AWAY_SECONDS", 0.0)
    world.daemon.refuse()
    connection.hang_up()
    with pytest.raises(
        DaemonUnreachable,
        match="^the daemon is gone; sealed snapshots stay in shared memory, and the next daemon "
        "will save them",
    ):
        world.link.wait_durable(lost)


# -- closing


def test_close_makes_the_newest_durable_and_detaches(world: World) -> None:
    connection = world.linked()
    world.during(world.link.close, done(connection, m.Persist), done(connection, m.Detach))
    assert (world.link.closed, world.link.usable, repr(world.link)) == (
        True,
        False,
        "gpt attempt 3 rank 0 of 1, closed",
    )
    assert connection.ended.wait(SECONDS)
    world.link.close()
    with pytest.raises(InvalidRequest, match="^this agent is closed; make another one$"):
        world.link.ready()


def test_after_an_error_in_close_the_link_is_closed_all_the_same(world: World) -> None:
    connection = world.linked()
    one = sealed(world.link, 1)

    def refuse() -> None:
        connection.reply(
            m.Error(
                re=connection.next(m.Persist).id, code=SnapshotFailed.code, message="not durable"
            )
        )

    with pytest.raises(SnapshotFailed, match="^not durable$"):
        world.during(world.link.close, refuse)
    assert (world.link.closed, str(one.error)) == (True, "the agent was closed first")
    assert connection.requests.empty(), (
        "the daemon must take the rank for dead, and save what it has"
    )


def test_close_without_a_daemon_says_where_the_snapshot_is(world: World) -> None:
    connection = world.linked()
    world.daemon.refuse()
    connection.hang_up()
    until(lambda: not world.link.client.connected, "loss")
    world.link.client.welcome = m.Welcome(re=0, version=1, stall_budget=0.0)
    assert repr(world.link).endswith("without a daemon")
    with pytest.raises(
        DaemonUnreachable, match="^the daemon is gone; sealed snapshots stay in shared memory"
    ):
        world.link.close()
    assert world.link.closed


def test_a_let_go_that_ctrl_c_interrupts_is_finished_by_the_next_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = world.linked()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(world.link.client, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.link.let_go()
    assert not connection.ended.is_set()
    world.link.close()
    assert connection.ended.wait(SECONDS)


def test_a_forked_child_has_a_closed_link(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not use its parent's connection, and a call of the parent must not hold
    it up.
    """
    connection = world.linked()
    # A fork duplicates every descriptor.
    parents = os.dup(world.link.client._channel._socket.fileno())
    child = os.getpid() + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child)
        with world.link.calls("snapshot"):
            world.link._forget()
            world.link.close()
    assert (world.link.closed, world.link in links(), connection.ended.is_set()) == (
        True,
        False,
        False,
    )
    connection.hang_up()
    until(lambda: not world.link.client._thread.is_alive(), "end")
    os.close(parents)
