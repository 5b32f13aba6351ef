"""Which daemon, job and step a path names, and which link of this process a save uses:
with links and daemons that are fakes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ckptd.agent.dcp import targets
from ckptd.agent.dcp.targets import RankDaemon, SaveTicket, Target, attach, issue_tickets, leave_all
from ckptd.agent.link.attempt import BegunAttempt, RankPlace, as_begun
from ckptd.agent.link.launch import Place
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared import names
from ckptd.shared.errors import (
    AlreadyExists,
    DaemonUnreachable,
    InvalidName,
    InvalidRequest,
    SnapshotFailed,
)
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.receipt import Abandonment, encode
from ckptd.shared.formats.segment import this_boot
from ckptd.shared.system import machine
from ckptd.shared.wire import messages as m
from tests.support.clock import Clock
from tests.support.fake_daemon import FakeDaemon, fake_daemon
from tests.support.forged import forge


class FakeLink:
    """In the place of a RankLink."""

    def __init__(
        self,
        root: Path,
        *,
        job: str = "gpt",
        rank: int = 0,
        world_size: int = 1,
        attempt: int = 1,
        last_step: int = -1,
    ) -> None:
        self.root, self.job, self.rank, self.world_size, self.attempt = (
            str(root),
            job,
            rank,
            world_size,
            attempt,
        )
        self.place = Place(Path("/run/s"), None, private=False)
        self.client = SimpleNamespace(welcome=m.Welcome(re=0, version=1, root=str(root)))
        self.node: Membership | None = None
        self.handovers = SimpleNamespace(last_step=last_step)
        self.saving: set[object] = set()
        self.current, self.let_gone = True, 0
        self.closed: list[float] = []
        self.close_error: Exception | None = None

    @property
    def last_step(self) -> int:
        return int(self.handovers.last_step)

    def is_current(self) -> bool:
        return self.current

    def let_go(self) -> None:
        self.let_gone += 1

    def close(self, timeout: float) -> None:
        self.closed.append(timeout)
        if self.close_error is not None:
            raise self.close_error


class World:
    """The links of this process, and those that are begun."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.links: list[FakeLink] = []
        self.own: dict[tuple[str, str], Any] = {}
        self.begun: list[tuple[int, int, int | None]] = []
        monkeypatch.setattr(targets, "links", lambda: self.links)
        monkeypatch.setattr(targets, "_own", self.own)
        monkeypatch.setattr(targets, "_calls", CallLock())
        monkeypatch.setattr(targets, "RankLink", self._begin)
        for name in ("CKPTD_SOCKET", "CKPTD_ROOT"):
            monkeypatch.delenv(name, raising=False)

    def _begin(self, told: Any, job: str, **_: Any) -> FakeLink:
        begun = msgspec.msgpack.decode(
            told.round("begin", msgspec.msgpack.encode(self.place()), self._decide, 1.0),
            type=BegunAttempt,
        )
        self.begun.append((told.rank, told.world_size, begun.attempt))
        made = FakeLink(
            self.root, job=job, rank=told.rank, world_size=told.world_size, attempt=begun.attempt
        )
        made.node = begun.node
        self.links.append(made)
        return made

    @staticmethod
    def _decide(said: list[bytes]) -> list[bytes]:
        places = [msgspec.msgpack.decode(one, type=RankPlace) for one in said]
        return [msgspec.msgpack.encode(begun) for begun in as_begun(7, places, "0a" * 16)]

    def link(self, *, own: bool = False, **options: Any) -> FakeLink:
        made = FakeLink(self.root, **options)
        self.links.append(made)
        if own:
            self.own[str(self.root), made.job] = made
        return made

    def target(self, name: str = "step-5") -> Target:
        step = int(name.removeprefix("step-")) if name.startswith("step-") else None
        return Target(
            "/run/s", str(self.root), "gpt", None if step is not None else name, step, self.place()
        )

    def place(self, node: str = "node0") -> RankPlace:
        return RankPlace(
            node.encode(),
            node,
            f"the daemon of {node}",
            str(self.root),
            "gpt",
            "the root",
            nodes=True,
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


# -- paths


@pytest.fixture
def daemon(tmp_path: Path, world: World) -> Iterator[FakeDaemon]:
    with fake_daemon(m.Welcome(re=0, version=1, root=str(tmp_path))) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("gpt/step-5", ("gpt", None, 5)),
        ("gpt/step-00000005", ("gpt", None, 5)),
        ("gpt/best", ("gpt", "best", None)),
        ("gpt", None),
        ("gpt/a/b", None),
        (".ckptd/x", None),
        ("../elsewhere/x", None),
    ],
)
def test_a_path_under_the_root_of_a_daemon_names_a_job_and_a_tag(
    tmp_path: Path,
    daemon: FakeDaemon,
    path: str,
    expected: tuple[str, str | None, int | None] | None,
) -> None:
    found = Target.of(tmp_path / path, str(daemon.socket))
    assert (found and (found.job, found.tag, found.step)) == expected
    where = (
        (str(daemon.socket), str(tmp_path), tmp_path / "gpt" / (found.tag or "step-5"))
        if found
        else None
    )
    assert (found and (found.socket, found.root, found.path)) == where


def test_names_that_cannot_be_are_refused(tmp_path: Path, daemon: FakeDaemon) -> None:
    for path in ("a b/best", "gpt/a b", "gpt/step-x"):
        with pytest.raises(InvalidName):
            Target.of(tmp_path / path, str(daemon.socket))


def test_a_link_of_this_process_is_found_without_asking_anybody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "find_place", lambda *_: pytest.fail("a daemon is asked"))
    known = world.link()
    place = RankPlace.of(m.Welcome(re=0, version=1, root=str(world.root)), "gpt")
    assert Target.of(world.root / "gpt" / "best", None) == Target(
        "/run/s", str(world.root), "gpt", "best", None, place
    )
    known.place = Place(Path("/run/s"), world.root, private=True)
    found = Target.of(world.root / "gpt" / "best", None)
    assert found is not None
    assert found.socket is None


def test_a_link_under_another_name_of_the_root_is_found(world: World, tmp_path: Path) -> None:
    world.root = tmp_path / "root"
    world.root.mkdir()
    (tmp_path / "link").symlink_to(world.root)
    world.link()
    found = Target.of(tmp_path / "link" / "gpt" / "best", None)
    assert found is not None
    assert found.root == str(world.root)


@pytest.mark.parametrize("named", ["argument", "environment", None])
def test_a_daemon_that_does_not_answer_is_an_error_if_it_was_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    """Otherwise the process saves by itself."""
    dead = tmp_path / "s"
    dead.touch()
    monkeypatch.setattr("ckptd.shared.system.machine.default_sockets", lambda: [dead])
    if named == "environment":
        monkeypatch.setenv("CKPTD_SOCKET", str(dead))
    if named is None:
        assert Target.of(tmp_path / "gpt" / "best", None) is None
    else:
        with pytest.raises(DaemonUnreachable):
            Target.of(tmp_path / "gpt" / "best", str(dead) if named == "argument" else None)


def test_no_private_daemon_is_started_for_a_path_outside_its_root(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.shared.system.machine.default_sockets", list)
    monkeypatch.setattr(Place, "connect", lambda place: pytest.fail("a daemon is started"))
    assert Target.of(tmp_path / "gpt" / "best", None) is None
    monkeypatch.setenv("CKPTD_ROOT", str(tmp_path / "root"))
    assert Target.of(tmp_path / "elsewhere" / "best", None) is None


# -- tickets


def issued(target: Target, world_size: int, *, overwrite: bool) -> SaveTicket:
    """Return the ticket for rank 0. The targets of the other ranks are not known."""
    return issue_tickets(target, [None] * (world_size - 1), overwrite=overwrite)[0][0]


def test_the_first_save_begins_an_attempt_and_the_next_goes_on_in_it(world: World) -> None:
    (first,), over = issue_tickets(world.target("step-5"), [], overwrite=False)
    assert (first, world.begun) == (
        SaveTicket(world.target(), BegunAttempt(7, None, []), 5),
        [(0, 1, 7)],
    )
    (link,) = world.links
    assert len(link.saving) == 1
    over()
    assert link.saving == set()
    link.handovers.last_step = 5
    assert issued(world.target("step-6"), 1, overwrite=False).begun.attempt == 7
    assert len(world.begun) == 1


def test_a_step_that_does_not_follow_begins_the_next_attempt(world: World) -> None:
    before = world.link(own=True, last_step=5, attempt=3)
    found = issued(world.target("step-5"), 1, overwrite=False)
    assert (found.begun.attempt, before.closed) == (7, [targets.EXIT_SECONDS])


def test_a_step_that_does_not_follow_the_callers_own_agent_is_refused(world: World) -> None:
    world.link(last_step=5, attempt=3)
    with pytest.raises(
        InvalidRequest,
        match="^step 5 does not follow step 5, the last of attempt 3 of this process's own Agent: "
        "steps must increase",
    ):
        issued(world.target("step-5"), 1, overwrite=False)
    assert issued(world.target("step-6"), 1, overwrite=False).begun.attempt == 3


def test_a_tag_gets_the_next_step_of_several_ranks(world: World) -> None:
    link = world.link(own=True, world_size=2, last_step=5)
    assert (issued(world.target("best"), 2, overwrite=False).step, link.last_step) == (6, 6)
    world.link(own=True, job="gpt", world_size=1, attempt=2)
    assert issued(world.target("best"), 1, overwrite=False).step is None


def test_a_checkpoint_that_is_there_is_left_or_begins_a_new_attempt(world: World) -> None:
    forge(world.root, (1,), [[((0,), (1,))]], step=9, attempt=3)
    world.link(own=True, last_step=3, attempt=3)
    with pytest.raises(
        AlreadyExists,
        match=r"^Checkpoint already exists: gpt/step-00000009\.a0003; choose another name",
    ):
        issued(world.target("step-9"), 1, overwrite=False)
    assert issued(world.target("step-9"), 1, overwrite=True).begun.attempt == 7


def test_a_tag_of_the_callers_own_agent_cannot_be_overwritten(world: World) -> None:
    made = forge(world.root, (1,), [[((0,), (1,))]], step=9, attempt=3)
    made.rename(made.with_name("best.a0003"))
    world.link(attempt=3)
    with pytest.raises(
        InvalidRequest,
        match="^tag 'best' is taken in attempt 3 of this process's own Agent, which cannot be "
        "overwritten",
    ):
        issued(world.target("best"), 1, overwrite=True)


def test_a_save_without_the_daemon_in_its_place_is_not_overwritten(world: World) -> None:
    made = forge(world.root, (1,), [[((0,), (1,))]], step=9)
    made.rename(made.with_name("step-9"))
    with pytest.raises(
        AlreadyExists,
        match="it was saved without the daemon: move it away, or choose another path$",
    ):
        issued(world.target("step-9"), 1, overwrite=True)


def test_to_overwrite_waits_for_the_saves_of_this_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = world.link(own=True, last_step=3, attempt=3)
    link.saving.add("another save")

    class Pauses(Clock):
        ends: Callable[[], object] = link.saving.clear

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.slept) == 3:
                self.ends()

    clock = Pauses()
    monkeypatch.setattr(targets, "time", clock)
    monkeypatch.setattr(targets, "SAVE_SECONDS", 1.0)
    assert issued(world.target("step-9"), 1, overwrite=True).begun.attempt == 3
    assert len(clock.slept) == 3
    link.saving.add("a save that never ends")
    clock.ends = lambda: None
    begun = clock.now
    issued(world.target("step-10"), 1, overwrite=True)
    assert clock.now - begun == pytest.approx(1.0, abs=0.02)


def test_a_link_that_another_process_has_overtaken_is_let_go(world: World) -> None:
    old = world.link(own=True, attempt=3)
    old.current = False
    assert issued(world.target("step-5"), 1, overwrite=False).begun.attempt == 7
    assert (old.let_gone, len(world.begun)) == (1, 1)


def test_the_newest_attempt_of_this_process_is_used(world: World) -> None:
    for attempt in (2, 4, 3):
        world.link(attempt=attempt)
    world.link(attempt=9, job="bert")
    world.link(attempt=9, world_size=2)
    assert issued(world.target("step-5"), 1, overwrite=False).begun.attempt == 4


# -- the other ranks


def test_a_rank_attaches_to_the_attempt_of_its_ticket(world: World) -> None:
    known = world.link(rank=1, world_size=2, attempt=4)
    assert attach(SaveTicket(world.target(), BegunAttempt(4, None, []), 5), 1, 2) is known  # type: ignore[comparison-overlap]
    made = attach(SaveTicket(world.target(), BegunAttempt(5, None, []), 5), 1, 2)
    assert (made.attempt, world.begun) == (5, [(1, 2, 5)])


def shown(target: Target) -> RankDaemon:
    """Return what the rank of a target shows the coordinator."""
    return RankDaemon(target.place.boot, target.place.node, target.socket, target.place)


def test_each_rank_gets_its_own_daemon_and_the_share_of_its_node(world: World) -> None:
    places = [world.place(node) for node in ("node0", "node1", "node0", "node1")]
    found = [
        Target(f"/run/{place.node}", str(world.root), "gpt", None, 5, place) for place in places
    ]
    tickets, _ = issue_tickets(found[0], [shown(target) for target in found[1:]], overwrite=False)
    assert [one.target for one in tickets] == found
    nodes = [one.begun.node for one in tickets]
    assert [node and node.ranks for node in nodes] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert len({node and node.run_id for node in nodes}) == 1
    assert {tuple(one.begun.leaders) for one in tickets} == {(0, 1)}
    again, _ = issue_tickets(
        replace(found[0], step=6), [shown(target) for target in found[1:]], overwrite=False
    )
    assert ([one.begun for one in again], len(world.begun)) == ([one.begun for one in tickets], 1)


def test_a_daemon_that_a_rank_has_asked_for_another_save_gets_the_name_of_this_one(
    world: World,
) -> None:
    """Two saves of one job may overlap, and a rank shows its daemon once for both."""
    other = Target("/run/node1", str(world.root), "gpt", "best", None, world.place("node1"))
    tickets, _ = issue_tickets(world.target("step-5"), [shown(other)], overwrite=False)
    assert tickets[1].target == replace(other, tag=None, step=5)


@pytest.mark.parametrize("node", ["node0", "node1"])
def test_a_daemon_that_was_started_again_is_known_by_its_socket(world: World, node: str) -> None:
    """As a private daemon that nobody used for a while, between the questions of two
    ranks.
    """
    targets_ = [
        world.target(),
        *(
            replace(world.target(), socket=f"/run/{node}", place=world.place(node))
            for _ in range(2)
        ),
    ]
    if node == "node0":
        targets_ = [replace(target, socket=None) for target in targets_]
    late = replace(
        targets_[2], place=msgspec.structs.replace(targets_[2].place, instance="the next daemon")
    )
    tickets, _ = issue_tickets(targets_[0], [shown(targets_[1]), shown(late)], overwrite=False)
    nodes = [one.begun.node for one in tickets]
    assert [node and node.ranks for node in nodes] == (
        [None] * 3 if node == "node0" else [[0], [1, 2], [1, 2]]
    )


def test_a_rank_without_a_daemon_uses_that_of_rank_0_on_the_same_node_only(world: World) -> None:
    here, away = (RankDaemon(node.encode(), node) for node in ("node0", "node1"))
    assert [
        one.target for one in issue_tickets(world.target(), [None, here], overwrite=False)[0]
    ] == [world.target()] * 3
    start = (
        f"no daemon of that node serves the root {world.root}: start one there with "
        f"`ckptd run --root {world.root}`, as on node0"
    )
    for why in ("", "the daemon is stopping"):
        with pytest.raises(DaemonUnreachable) as caught:
            issue_tickets(world.target("step-6"), [here, replace(away, why=why)], overwrite=False)
        assert (
            str(caught.value)
            == f"rank 2 on node1 cannot save to {world.root}/gpt/step-6: {why or start}"
        )


def test_an_error_on_the_way_to_a_daemon_is_left_to_the_coordinator(
    tmp_path: Path, daemon: FakeDaemon
) -> None:
    found = RankDaemon.of(tmp_path / "gpt" / "a b", str(daemon.socket))
    assert found.place is None
    assert "'a b'" in found.why
    target = Target.of(tmp_path / "gpt" / "best", str(daemon.socket))
    assert target is not None
    found = RankDaemon.of(tmp_path / "gpt" / "best", str(daemon.socket))
    assert found == RankDaemon(this_boot(), machine.host(), str(daemon.socket), target.place)
    assert RankDaemon.of(tmp_path / "best", str(daemon.socket)) == RankDaemon(
        this_boot(), machine.host()
    )


def test_an_abandonment_is_no_checkpoint_that_would_be_in_the_way(world: World) -> None:
    made = forge(world.root, (1,), [[((0,), (1,))]], step=9, attempt=3)
    world.link(own=True, last_step=3, attempt=3)
    abandonment = Abandonment(
        job="gpt", attempt=3, step=9, tag=made.name, code="storage", reason="disk full"
    )
    (made / names.MANIFEST).write_bytes(encode(abandonment))
    assert issued(world.target("step-9"), 1, overwrite=False).begun.attempt == 3


# -- the end


def test_at_exit_every_link_of_ones_own_is_closed(world: World) -> None:
    first, second, agents = (
        world.link(own=True),
        world.link(own=True, job="bert"),
        world.link(job="x"),
    )
    second.close_error = SnapshotFailed("not durable")
    leave_all()
    assert ([first.closed, second.closed, agents.closed], world.own) == ([[5.0], [5.0], []], {})


def test_a_forked_child_has_no_links_of_its_parent(world: World) -> None:
    world.link(own=True)
    held = targets._calls
    with held("save"):
        targets._after_fork()
        assert targets._calls is not held
        leave_all()
    assert (world.own, world.links[0].closed, os.getpid() > 0) == ({}, [], True)
