"""Which daemon, job and step a path names, and which link of this process a save uses: with links and daemons that are fakes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.agent.dcp import targets
from ckptd.agent.dcp.targets import Claim, Target, attach, claim, leave_all
from ckptd.agent.link.launch import Place
from ckptd.agent.threads.call_lock import CallLock
from ckptd.shared import messages as m
from ckptd.shared.errors import AlreadyExists, DaemonUnreachable, InvalidName, InvalidRequest, SnapshotFailed
from ckptd.shared.segment import this_boot
from tests.support.clock import Clock
from tests.support.fake_daemon import FakeDaemon, fake_daemon
from tests.support.forged import forge


class FakeLink:
    """In the place of a RankLink."""

    def __init__(self, root: Path, *, job: str = "gpt", rank: int = 0, world_size: int = 1, attempt: int = 1, last_step: int = -1) -> None:
        self.root, self.job, self.rank, self.world_size, self.attempt = str(root), job, rank, world_size, attempt
        self.place = Place(Path("/run/s"), None, private=False)
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
        attempt = told.round("begin", b"", lambda said: [b"\x07"], 1.0)[0]
        self.begun.append((told.rank, told.world_size, attempt))
        made = FakeLink(self.root, job=job, rank=told.rank, world_size=told.world_size, attempt=attempt)
        self.links.append(made)
        return made

    def link(self, *, own: bool = False, **options: Any) -> FakeLink:
        made = FakeLink(self.root, **options)
        self.links.append(made)
        if own:
            self.own[str(self.root), made.job] = made
        return made

    def target(self, name: str = "step-5") -> Target:
        step = int(name.removeprefix("step-")) if name.startswith("step-") else None
        return Target("/run/s", str(self.root), "gpt", None if step is not None else name, step)


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
    tmp_path: Path, daemon: FakeDaemon, path: str, expected: tuple[str, str | None, int | None] | None
) -> None:
    found = Target.of(tmp_path / path, str(daemon.socket))
    assert (found and (found.job, found.tag, found.step)) == expected
    if found is not None:
        assert (found.socket, found.root) == (str(daemon.socket), str(tmp_path))
        assert found.path == tmp_path / "gpt" / (found.tag or "step-5")


def test_names_that_cannot_be_are_refused(tmp_path: Path, daemon: FakeDaemon) -> None:
    for path in ("a b/best", "gpt/a b", "gpt/step-x"):
        with pytest.raises(InvalidName):
            Target.of(tmp_path / path, str(daemon.socket))


def test_a_link_of_this_process_is_found_without_asking_anybody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_place", lambda *_: pytest.fail("a daemon is asked"))
    known = world.link()
    assert Target.of(world.root / "gpt" / "best", None) == Target("/run/s", str(world.root), "gpt", "best", None)
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
    monkeypatch.setattr("ckptd.shared.names.default_sockets", lambda: [dead])
    if named == "environment":
        monkeypatch.setenv("CKPTD_SOCKET", str(dead))
    if named is None:
        assert Target.of(tmp_path / "gpt" / "best", None) is None
    else:
        with pytest.raises(DaemonUnreachable):
            Target.of(tmp_path / "gpt" / "best", str(dead) if named == "argument" else None)


def test_no_private_daemon_is_started_for_a_path_outside_its_root(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.shared.names.default_sockets", list)
    monkeypatch.setattr(Place, "connect", lambda place: pytest.fail("a daemon is started"))
    assert Target.of(tmp_path / "gpt" / "best", None) is None
    monkeypatch.setenv("CKPTD_ROOT", str(tmp_path / "root"))
    assert Target.of(tmp_path / "elsewhere" / "best", None) is None


# -- claims


def test_the_first_save_begins_an_attempt_and_the_next_goes_on_in_it(world: World) -> None:
    first, over = claim(world.target("step-5"), 1, overwrite=False)
    assert (first.attempt, first.step, first.boot, world.begun) == (7, 5, this_boot(), [(0, 1, 7)])
    (link,) = world.links
    assert len(link.saving) == 1
    over()
    assert link.saving == set()
    link.handovers.last_step = 5
    assert claim(world.target("step-6"), 1, overwrite=False)[0].attempt == 7
    assert len(world.begun) == 1


def test_a_step_that_does_not_follow_begins_the_next_attempt(world: World) -> None:
    before = world.link(own=True, last_step=5, attempt=3)
    found, _ = claim(world.target("step-5"), 1, overwrite=False)
    assert (found.attempt, before.closed) == (7, [targets.EXIT_SECONDS])


def test_a_step_that_does_not_follow_the_callers_own_agent_is_refused(world: World) -> None:
    world.link(last_step=5, attempt=3)
    with pytest.raises(
        InvalidRequest, match="^step 5 does not follow step 5, the last of attempt 3 of this process's own Agent: call recover"
    ):
        claim(world.target("step-5"), 1, overwrite=False)
    assert claim(world.target("step-6"), 1, overwrite=False)[0].attempt == 3


def test_a_tag_gets_the_next_step_of_several_ranks(world: World) -> None:
    link = world.link(own=True, world_size=2, last_step=5)
    assert (claim(world.target("best"), 2, overwrite=False)[0].step, link.last_step) == (6, 6)
    world.link(own=True, job="gpt", world_size=1, attempt=2)
    assert claim(world.target("best"), 1, overwrite=False)[0].step is None


def test_a_checkpoint_that_is_there_is_left_or_begins_a_new_attempt(world: World) -> None:
    forge(world.root, (1,), [[((0,), (1,))]], step=9, attempt=3)
    world.link(own=True, last_step=3, attempt=3)
    with pytest.raises(AlreadyExists, match=r"^Checkpoint already exists: gpt/step-00000009\.a0003; choose another name"):
        claim(world.target("step-9"), 1, overwrite=False)
    assert claim(world.target("step-9"), 1, overwrite=True)[0].attempt == 7


def test_a_tag_of_the_callers_own_agent_cannot_be_overwritten(world: World) -> None:
    made = forge(world.root, (1,), [[((0,), (1,))]], step=9, attempt=3)
    made.rename(made.with_name("best.a0003"))
    world.link(attempt=3)
    with pytest.raises(InvalidRequest, match="^tag 'best' is taken in attempt 3 of this process's own Agent, which cannot be overwritten"):
        claim(world.target("best"), 1, overwrite=True)


def test_a_save_without_the_daemon_in_its_place_is_not_overwritten(world: World) -> None:
    made = forge(world.root, (1,), [[((0,), (1,))]], step=9)
    made.rename(made.with_name("step-9"))
    with pytest.raises(AlreadyExists, match="it was saved without the daemon: move it away, or choose another path$"):
        claim(world.target("step-9"), 1, overwrite=True)


def test_to_overwrite_waits_for_the_saves_of_this_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert claim(world.target("step-9"), 1, overwrite=True)[0].attempt == 3
    assert len(clock.slept) == 3
    link.saving.add("a save that never ends")
    clock.ends = lambda: None
    begun = clock.now
    claim(world.target("step-10"), 1, overwrite=True)
    assert clock.now - begun == pytest.approx(1.0, abs=0.02)


def test_a_link_that_another_process_has_overtaken_is_let_go(world: World) -> None:
    old = world.link(own=True, attempt=3)
    old.current = False
    assert claim(world.target("step-5"), 1, overwrite=False)[0].attempt == 7
    assert (old.let_gone, len(world.begun)) == (1, 1)


def test_the_newest_attempt_of_this_process_is_used(world: World) -> None:
    for attempt in (2, 4, 3):
        world.link(attempt=attempt)
    world.link(attempt=9, job="bert")
    world.link(attempt=9, world_size=2)
    assert claim(world.target("step-5"), 1, overwrite=False)[0].attempt == 4


# -- the other ranks


def test_a_rank_attaches_to_the_claimed_attempt(world: World) -> None:
    known = world.link(rank=1, world_size=2, attempt=4)
    claimed = Claim(world.target(), 4, 5, this_boot())
    assert attach(claimed, 1, 2) is known  # type: ignore[comparison-overlap]
    made = attach(Claim(world.target(), 5, 5, this_boot()), 1, 2)
    assert (made.attempt, world.begun) == (5, [(1, 2, 5)])
    with pytest.raises(InvalidRequest, match="^ranks 0 and 1 are on different nodes, "):
        attach(Claim(world.target(), 4, 5, bytes(16)), 1, 2)


# -- the end


def test_at_exit_every_link_of_ones_own_is_closed(world: World) -> None:
    first, second, agents = world.link(own=True), world.link(own=True, job="bert"), world.link(job="x")
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
