"""Tests that a job is followed: bit for bit, while it trains at full speed, over restarts
of the daemon and of the training, and in its root.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckptd import follow
from ckptd.agent import Agent
from ckptd.agent.follow import follower
from ckptd.agent.follow.version import Version
from ckptd.agent.read.slot_source import SlotSource
from ckptd.agent.threads.flag import Flag
from ckptd.shared.errors import (
    DaemonUnreachable,
    Forbidden,
    IntegrityError,
    InvalidName,
    InvalidRequest,
    NotFound,
    StorageError,
    VersionGone,
    VersionMismatch,
)
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.plan import MIN_CHUNK
from ckptd.shared.system import machine
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.session import LENDING
from tests.support import trainers
from tests.support.daemons import Daemon, Home, running, until
from tests.support.fake_daemon import Connection, fake_daemon
from tests.support.forks import context
from tests.support.ranks import HERE, Ranks
from tests.support.sharded import Net, agent, build, train

SIZE = 40_000


def model_of(step: int) -> nn.Linear:
    """Return the model that the trainer of these tests has after `step`."""
    model = nn.Linear(SIZE, 1)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, SIZE, generator=generator))
        model.bias.fill_(step)
    return model


def equals(model: nn.Module, step: int) -> bool:
    wanted = model_of(step).state_dict()
    return all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def snapshot(trained: Agent, step: int, **options: Any) -> None:
    state = {"model": model_of(step), "other": torch.full((SIZE,), step)}
    trained.snapshot(state, step=step, **options).wait("sealed", timeout=60)


class Training:
    """A training that takes snapshots as fast as it can, on a thread."""

    def __init__(self, home: Home) -> None:
        self.step, self._stop = -1, threading.Event()
        self._agent = Agent("gpt", socket=home.socket)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for step in itertools.count():
            if self._stop.is_set():
                break
            snapshot(self._agent, step, persist=step % 10 == 0)
            self.step = step
        self._agent.close()

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("into", [True, False])
def test_every_version_is_one_step_bit_for_bit_at_full_speed(daemon: Daemon, into: bool) -> None:
    module, steps = nn.Linear(SIZE, 1), list[int]()
    with Training(daemon.home):
        versions = follow("gpt", into=module if into else None, socket=daemon.home.socket)
        while len(steps) < 30:
            version = next(versions)
            assert version.step is not None
            if not into:
                try:
                    version.load_into(module)
                except VersionGone:
                    continue
            assert equals(module, version.step)
            assert not version.rolled_back
            steps.append(version.step)
    assert steps == sorted(set(steps))


def test_a_version_that_is_replaced_while_it_is_loaded_is_skipped(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, module = Agent("gpt", socket=daemon.home.socket), nn.Linear(SIZE, 1)
    read, left = SlotSource.read_pieces, [1]

    def slowly(self: SlotSource, number: int, pieces: Any) -> bool:
        left[0] -= 1
        if left[0] == 0:
            for step in (2, 3, 4):
                snapshot(trained, step)
        return read(self, number, pieces)

    snapshot(trained, 1)
    monkeypatch.setattr(SlotSource, "read_pieces", slowly)
    with follow("gpt", into=module, socket=daemon.home.socket) as versions:
        version = next(versions)
    assert version.step in (3, 4)
    assert equals(module, version.step)
    trained.close()


def test_a_module_that_is_left_half_written_is_reported(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, module = Agent("gpt", socket=daemon.home.socket), nn.Linear(SIZE, 1)
    snapshot(trained, 1)
    until(lambda: in_memory(daemon.home), "a snapshot in memory")
    gone = iter([False])  # before the first byte is written
    monkeypatch.setattr(SlotSource, "is_gone", lambda self: next(gone, True))
    with follow("gpt", into=module, socket=daemon.home.socket, timeout=0.0) as versions:
        found = follower.VersionFeed._look
        looks = iter([True, False])
        monkeypatch.setattr(
            follower.VersionFeed,
            "_look",
            lambda self, seconds: found(self, seconds) if next(looks, False) else None,
        )
        with pytest.raises(VersionGone, match="half overwritten until another") as error:
            next(versions)
    assert error.value.overwritten
    trained.close()


def in_memory(home: Home) -> bool:
    with follow("gpt", socket=home.socket, timeout=0.0, interval=0.01) as versions:
        try:
            return next(versions).in_memory
        except (NotFound, StopIteration):
            return False


def read_on(socket: Path, pipe: Any) -> None:
    """Follow the job, and send each step, in a process of its own."""
    module = nn.Linear(SIZE, 1)
    for version in follow("gpt", into=module, socket=socket):
        assert version.step is not None
        pipe.send((version.step, equals(module, version.step)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_dies_or_hangs_neither_holds_the_training_nor_memory(
    daemon: Daemon, number: int
) -> None:
    ours, theirs = context().Pipe()
    reader = context().Process(target=read_on, args=(daemon.home.socket, theirs), daemon=True)
    with Training(daemon.home) as training:
        reader.start()
        assert reader.pid is not None
        step, sound = ours.recv()
        assert sound
        os.kill(reader.pid, number)
        until(lambda: training.step > step + 20, "a training that goes on")
    files = Path(f"/proc/{reader.pid}/fd")
    if number == signal.SIGSTOP:
        opened = [link for link in files.iterdir() if ".seg" in os.readlink(link)]
        until(lambda: not any(os.stat(link).st_blocks for link in opened), "memory that is free")
        os.kill(reader.pid, signal.SIGCONT)
    reader.kill()
    reader.join()


@pytest.mark.usefixtures("processes")
def test_a_daemon_and_a_training_that_end_and_come_back(place: Home) -> None:
    module, steps = nn.Linear(SIZE, 1), list[tuple[int | None, bool]]()

    def take() -> None:
        version = next(versions)
        assert version.step is not None
        assert equals(module, version.step)
        steps.append((version.step, version.rolled_back))

    with running(place, forked=True) as daemon:
        versions = follow("gpt", socket=place.socket, into=module, interval=0.05)
        trained = Agent("gpt", socket=place.socket)
        snapshot(trained, 1)
        take()
        trainers.vanish(trained)
        daemon.kill()
    with running(place, forked=True):
        trained = Agent("gpt", socket=place.socket)
        state = {"model": nn.Linear(SIZE, 1), "other": torch.zeros(SIZE, dtype=torch.int64)}
        found = trained.recover(state)
        assert found is not None
        assert found.step == 1
        snapshot(trained, 2)
        take()
        trained.close()
        again = Agent("gpt", socket=place.socket)
        again.recover(state, step=1)
        snapshot(again, 2)
        take()
        again.close()
    assert steps == [(1, False), (2, False), (2, True)]
    versions.close()


@pytest.mark.usefixtures("processes")
def test_a_daemon_that_has_just_ended_is_soon_asked_for_again(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feed that was in memory waits long for each answer, but not for the daemon."""
    waits, wait = list[float](), Flag.wait

    def noted(self: Flag, seconds: float | None = None) -> bool:
        assert seconds is not None
        waits.append(seconds)
        return wait(self, min(seconds, 0.05))

    with running(place, forked=True) as daemon:
        versions = follow("gpt", socket=place.socket, interval=5.0, timeout=3.0)
        trained = Agent("gpt", socket=place.socket)
        snapshot(trained, 1, persist=False)
        assert next(versions).in_memory
        trainers.vanish(trained)
        daemon.kill()
        monkeypatch.setattr(Flag, "wait", noted)
        assert list(versions) == []
    versions.close()
    assert waits[0] == follower._BACK_SECONDS
    assert max(waits) <= 5.0


@pytest.mark.usefixtures("processes")
def test_a_damaged_version_is_passed_over(place: Home, caplog: pytest.LogCaptureFixture) -> None:
    with running(place, "--codec", "raw", forked=True):
        trained = Agent("gpt", socket=place.socket)
        for step in (1, 2, 3):
            snapshot(trained, step)
        trained.close()
        until(lambda: (place.root / "gpt" / "newest").exists(), "newest")
    [file] = (place.root / "gpt" / "step-00000003.a0001").glob("rank-*.ckpt")
    data = bytearray(file.read_bytes())
    data[data.index(model_of(3).weight.detach().numpy().tobytes())] ^= 1
    file.write_bytes(data)
    module = nn.Linear(SIZE, 1)
    with follow("gpt", root=place.root, into=module, interval=0.05, timeout=1.0) as versions:
        assert [version.step for version in versions] == [2]
    assert equals(module, 2)
    assert "a damaged version is passed over: gpt/step-00000003.a0001" in caplog.text


def test_names_that_no_tensor_has_are_an_error(daemon: Daemon) -> None:
    trained = Agent("gpt", socket=daemon.home.socket)
    snapshot(trained, 1)
    with (
        follow("gpt", socket=daemon.home.socket, keys="zzz.*", timeout=30) as versions,
        pytest.raises(NotFound, match=r"no tensor of gpt step 1 matches zzz\.\*: `Checkpoint"),
    ):
        next(versions)
    trained.close()


@pytest.mark.usefixtures("processes")
def test_the_root_is_followed_and_only_chunks_that_differ_are_fetched(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    read = PartReader.read_pieces

    def counted(self: PartReader, number: int, pieces: Any) -> bool:
        done = read(self, number, pieces)
        fetched.append(number)
        return done

    environment = {"CKPTD_CHUNK_SIZE": str(MIN_CHUNK), "CKPTD_CODEC": "raw"}
    with running(place, environment=environment, forked=True):
        trained = Agent("gpt", socket=place.socket)
        frozen, moving = torch.randn(SIZE), torch.randn(SIZE)
        # As on another node, where no lock of the root names the daemon.
        monkeypatch.setattr(machine, "host", lambda: "elsewhere")
        versions = follow("gpt", root=place.root, keys="*.w", interval=0.02)
        for step in range(3):
            moving[:10] += 1
            state = {"a": {"w": frozen}, "b": {"w": moving}, "c": torch.randn(SIZE)}
            trained.snapshot(state, step=step).wait("durable", timeout=60)
            with monkeypatch.context() as counting:
                counting.setattr(PartReader, "read_pieces", counted)
                version = next(versions)
            assert (version.step, version.in_memory) == (step, False)
            assert version.keys() == ["a.w", "b.w"]
            before, fetched[:] = len(fetched), []
            # The one that has changed, and the one that `b.w` shares with `c`.
            assert before == 2 if step else before > 2
            tensors = version.tensors()
            assert torch.equal(tensors["a.w"], frozen)
            assert torch.equal(tensors["b.w"], moving)
        trained.close()
        versions.close()


def test_a_loop_ends_by_its_timeout_by_close_and_by_ctrl_c(daemon: Daemon) -> None:
    trained, socket = Agent("gpt", socket=daemon.home.socket), daemon.home.socket
    snapshot(trained, 1)
    until(lambda: in_memory(daemon.home), "a snapshot in memory")
    assert [version.step for version in follow("gpt", socket=socket, timeout=0.05)] == [1]
    with follow("gpt", socket=socket) as versions:
        kept = next(versions)
        timer = threading.Timer(0.2, versions.close)
        timer.start()
        assert list(versions) == []
        timer.join()
        assert list(versions) == []
    with pytest.raises(InvalidRequest, match="^this checkpoint is closed"):
        kept.tensor("other")
    waiting = follow("gpt", socket=socket)
    next(waiting)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(waiting)
    timer.join()
    for version in follow("gpt", socket=socket):
        kept = version
        break
    assert equals(loaded(kept), 1), "it stays open after a break"
    trained.close()


def loaded(version: Any) -> nn.Module:
    module = nn.Linear(SIZE, 1)
    version.load_into(module)
    return module


def test_wrong_arguments_and_a_job_that_does_not_exist(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket, root = daemon.home.socket, daemon.home.root
    sentence = f"^there is no snapshot of a job 'gpt' in {root}: it has no job yet$"
    for place in ({"socket": socket}, {"root": root}):
        with pytest.raises(NotFound, match=sentence):
            list(follow("gpt", timeout=0.05, interval=0.01, **place))  # type: ignore[arg-type]
    with pytest.raises(InvalidName):
        follow("../gpt", socket=socket)
    for options in ({"interval": 0.0}, {"timeout": -1.0}):
        with pytest.raises(InvalidRequest, match="expected seconds"):
            follow("gpt", socket=socket, **options)  # type: ignore[arg-type]
    with pytest.raises(DaemonUnreachable):
        follow("gpt", socket=tmp_path / "none")
    monkeypatch.setattr("ckptd.agent.link.loans.LENDING", "not named")
    with pytest.raises(VersionMismatch, match="which lends no snapshots"):
        next(follow("gpt", socket=socket))


@pytest.mark.usefixtures("processes")
def test_a_root_that_cannot_be_read_is_an_error_only_at_the_start(
    place: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(place, forked=True):
        trained = Agent("gpt", socket=place.socket)
        snapshot(trained, 1)
        trained.close()

    def fails(*_: object) -> None:
        raise PermissionError(13, "no")

    for first in (True, False):
        versions = follow("gpt", root=place.root, interval=0.01, timeout=0.05)
        if not first:
            next(versions)
        monkeypatch.setattr(follower.VersionFeed, "_newest_checkpoint", fails)
        if first:
            with pytest.raises(StorageError):
                next(versions)
        else:
            assert list(versions) == []
        monkeypatch.undo()
    assert [r.getMessage() for r in caplog.records if "followed again once" in r.getMessage()]


# -- what the daemon is asked for


@contextmanager
def following(into: nn.Module | None = None) -> Iterator[Connection]:
    """Follow a job of a fake daemon on a thread, which must end once the feed is closed,
    before the daemon answers.
    """
    welcome = m.Welcome(re=0, version=1, root="/none", stall_budget=5.0, features=[LENDING])
    with fake_daemon(welcome) as daemon:
        versions = follow("gpt", into=into, socket=daemon.socket, interval=3600.0)

        def run() -> None:
            with suppress(IntegrityError):  # the error of a module that is half overwritten
                list(versions)

        waiting = threading.Thread(target=run, daemon=True)
        waiting.start()
        try:
            yield daemon.accepted()
        finally:
            versions.close()
            waiting.join(follower._WAIT_SECONDS)
        assert not waiting.is_alive()


def test_close_ends_a_wait_for_the_daemon() -> None:
    with following() as daemon:
        assert daemon.next(m.Lend).wait == follower._WAIT_SECONDS


def test_a_damaged_version_in_memory_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: Version, *_: object, **options: object) -> None:
        raise IntegrityError("damaged")

    opened = SimpleNamespace(attempt=1, step=6, tag="6", manifest=None, close=lambda: None)
    monkeypatch.setattr(follower, "open_loan", lambda *_: opened)
    monkeypatch.setattr(Version, "load_into", damaged)
    with following(nn.Linear(1, 1)) as daemon:
        lent = m.Lent(re=daemon.next(m.Lend).id, attempt=1, step=6, tag="6", source="memory")
        daemon.reply(lent)
        asked = daemon.next(m.Lend)
        assert (asked.attempt, asked.step) == (1, 6)


def test_a_module_that_a_damaged_version_has_left_half_written_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop raises the error at its end, rather than just end."""
    feed = follow("gpt", into=nn.Linear(1, 1), root="/nowhere", timeout=0.0)
    opened: Any = SimpleNamespace(attempt=1, step=6, tag="6", manifest=None, close=lambda: None)
    looks = iter([Version("gpt", opened)])
    monkeypatch.setattr(feed, "_look", lambda seconds: next(looks, None))

    def damaged(self: Version, *_: object, **options: object) -> None:
        raise IntegrityError("damaged")

    monkeypatch.setattr(Version, "load_into", damaged)
    with pytest.raises(IntegrityError, match="^damaged$"):
        next(feed)


# -- several ranks


def take(socket: Path, step: int) -> dict[str, Any]:
    """Snapshot the sharded model of this rank, and return what it holds."""
    model = HERE["model"]
    agent(socket).snapshot({"model": model}, step=step, persist=False).wait("sealed", timeout=60)
    return {
        name: t.full_tensor().detach().numpy().tobytes() for name, t in model.named_parameters()
    }


def load_shards(socket: Path) -> tuple[int | None, dict[str, Any]]:
    """Load the newest version into a fresh sharded model, and return its step."""
    build("fsdp2", seed=77)
    model = HERE["model"]
    with follow("job", into=model, socket=socket) as versions:
        version = next(versions)
        names = model.named_parameters()
        return version.step, {name: t.full_tensor().detach().numpy().tobytes() for name, t in names}


def test_shards_of_several_ranks_are_read_whole_and_into_other_shards(daemon: Daemon) -> None:
    socket, module = daemon.home.socket, Net()
    with Ranks(2) as ranks:
        ranks.call(build, "fsdp2", 3)
        with follow("job", into=module, socket=socket) as versions:
            for step in range(2):
                ranks.call(train, 1)
                saved = ranks.call(take, socket, step)[0]
                version = next(versions)
                assert version.step == step
                mine = module.named_parameters()
                assert {n: t.detach().numpy().tobytes() for n, t in mine} == saved
        assert ranks.call(load_shards, socket) == [(1, saved)] * 2


def test_another_user_is_refused(daemon: Daemon) -> None:
    if os.getuid():
        pytest.skip("becoming another user needs root")
    os.chmod(daemon.home.path, 0o755)
    os.chmod(daemon.home.socket, 0o666)
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            next(follow("gpt", socket=daemon.home.socket))
        except Forbidden:
            os.write(tells, b"forbidden")
        finally:
            os._exit(0)
    os.close(tells)
    os.waitpid(child, 0)
    with open(told, "rb") as words:
        assert words.read() == b"forbidden"
