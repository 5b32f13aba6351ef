"""Tests that a daemon checks its root before anything of its memory could get into
another one, also before it notices by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.agent import Agent, Checkpoint
from ckptd.daemon.job.catalog import Job
from ckptd.daemon.root import served_root
from ckptd.daemon.root.served_root import ServedRoot
from ckptd.shared import names
from ckptd.shared.errors import ForeignMemory, StorageError
from ckptd.shared.formats.segment import RootMark
from ckptd.shared.storage.locate import open_root
from tests.support import stores
from tests.support.cases import each_case
from tests.support.daemons import Home, running, until
from tests.support.replaced_roots import (
    LAST,
    SENTENCE,
    SIZE,
    choice,
    recovered_by,
    take_away,
    train_and_die,
)
from tests.support.trainers import expected


@pytest.mark.usefixtures("processes")
def test_a_daemon_that_has_not_noticed_yet_refuses_too(place: Home) -> None:
    # It looks at its root every few minutes.
    with running(place, forked=True, environment={"WATCHDOG_USEC": "600000000"}) as daemon:
        train_and_die(place)
        until(lambda: daemon.status()["disk_free_bytes"] is not None, "first look at the disk")
        take_away(place)
        place.root.mkdir()
        with pytest.raises(ForeignMemory, match=SENTENCE):
            Agent("job", socket=place.socket)
        assert list(place.root.iterdir()) == []
        assert daemon.died() == 1
        assert place.segment_files()


@pytest.mark.usefixtures("processes")
def test_a_daemon_that_has_not_noticed_yet_saves_nothing_into_another_root(place: Home) -> None:
    with running(place, forked=True, environment={"WATCHDOG_USEC": "600000000"}) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot(expected(1, SIZE), step=1).wait("durable", timeout=60)
        take_away(place)
        place.root.mkdir()
        agent.snapshot(expected(2, SIZE), step=2).wait("sealed", timeout=60)
        assert daemon.died() == 1
        assert list(place.root.iterdir()) == []
        assert "has been deleted, moved or replaced; the snapshots in memory" in place.log_text()


@pytest.mark.usefixtures("processes")
def test_a_training_goes_on_saving_after_the_file_of_the_identity_has_vanished(
    place: Home,
) -> None:
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot(expected(1, SIZE), step=1).wait("durable", timeout=60)
        known = daemon.status()["identity"]
        (place.root / names.CONTROL / names.IDENTITY).unlink()
        for step in (2, 3):
            agent.snapshot(expected(step, SIZE), step=step).wait("durable", timeout=60)
        assert open_root(place.root).known_identity() == known
        agent.close()


# -- object stores


def delete_all(home: Home) -> None:
    """Delete every object below the root, as `aws s3 rm --recursive` does."""
    storage = open_root(home.root).storage

    def below(prefix: str) -> None:
        entries = storage.children(prefix)
        for entry in entries:
            if entry.nested:
                below(f"{prefix}/{entry.name}" if prefix else entry.name)
        storage.delete(prefix, [entry.name for entry in entries if not entry.nested])

    below("")


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(stores.program("weed") is None, reason="SeaweedFS is not installed")
def test_a_root_in_an_object_store_has_an_identity_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores.seaweed(tmp_path / "store") as server, stores.home_in(server) as place:
        with running(place, forked=True, environment=place.environ) as daemon:
            train_and_die(place)
            until(
                lambda: open_root(place.root).read_newest("job") == "step-00000003.a0001",
                "hint, which follows the answer",
            )
            delete_all(place)
            # Nothing but a new run makes this daemon look.
            with pytest.raises(ForeignMemory, match=SENTENCE):
                Agent("job", socket=place.socket)
            assert daemon.died() == 1
            assert open_root(place.root).known_identity() is None
        with running(place, forked=True, environment=place.environ):
            for _ in range(2):
                with pytest.raises(ForeignMemory, match=SENTENCE):
                    Agent("job", socket=place.socket)
            there = open_root(place.root)
            # This store keeps empty prefixes.
            assert [file for tag in there.tags("job") for file in there.files("job", tag)] == []
            assert (there.read_newest("job"), there.storage.children(names.attempts("job"))) == (
                None,
                [],
            )
            with choice(monkeypatch, "adopt"):
                agent = Agent("job", socket=place.socket)
            assert recovered_by(agent) == (LAST, "memory")
            agent.snapshot(expected(LAST + 1, SIZE), step=LAST + 1).wait("durable", timeout=60)
            agent.close()
        with Checkpoint.open(f"{place.root}/job") as checkpoint:
            assert checkpoint.step == LAST + 1


# -- the decision


class Told:
    """The storage of a root whose identity each look may find to be another one, and
    what the daemon then did.
    """

    def __init__(self, *found: str | Exception | None, staged: bool = False) -> None:
        self.found, self.ended = list(found), False
        self.restored = ""
        self.root = ServedRoot(self, self, RootMark("ab" * 16, "/ckpts"), self.end, staged=staged)  # type: ignore[arg-type]

    def known_identity(self) -> str | None:
        answer = self.found.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def restore_identity(self, identity: str) -> str | None:
        self.restored = identity
        return self.known_identity() if self.found else None

    async def run(self, call: Callable[[], str | None]) -> str | None:
        return call()

    def end(self) -> None:
        self.ended = True


@each_case(
    "found",
    [
        ("ab" * 16,),
        (None, "ab" * 16),
        ("cd" * 16, "ab" * 16),
        (OSError(5, "I/O error"),),
        (TimeoutError(),),
        (None, OSError(5, "I/O error")),
    ],
    ids=[
        "there",
        "moved away and back",
        "replaced and back",
        "unreadable",
        "hung",
        "gone, then unreadable",
    ],
)
async def test_a_root_counts_as_lost_only_if_two_looks_say_so(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_root, "AGAIN_SECONDS", 0.0)
    told = Told(*found)
    await told.root.check(Job("job"))
    assert (told.found, told.ended) == ([], False)


async def test_a_root_behind_a_stage_may_be_missing_but_not_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_root, "AGAIN_SECONDS", 0.0)
    told = Told(None, "cd" * 16, "cd" * 16, staged=True)
    await told.root.check(Job("job"))
    assert not told.ended
    with pytest.raises(StorageError, match="has been deleted, moved or replaced"):
        await told.root.check(Job("job"))
    assert told.ended


@pytest.mark.parametrize("found", [None, "cd" * 16])
async def test_a_job_that_is_not_in_memory_gets_an_error_that_a_retry_helps_against(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_root, "AGAIN_SECONDS", 0.0)
    told = Told(found, found)
    with pytest.raises(
        StorageError,
        match="the root /ckpts has been deleted, moved or replaced, and this daemon is about to "
        "end",
    ) as caught:
        await told.root.check(Job("job"))
    assert (caught.value.retry, told.ended) == (True, True)


@pytest.mark.parametrize("found", [None, "cd" * 16])
async def test_a_save_does_not_begin_without_its_root_and_the_daemon_ends(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_root, "AGAIN_SECONDS", 0.0)
    await Told("ab" * 16).root.check_before_save()
    told = Told(found, found)
    with pytest.raises(StorageError, match="has been deleted, moved or replaced"):
        await told.root.check_before_save()
    assert told.ended
    staged = Told(None, staged=True)
    with pytest.raises(StorageError, match="there is no root at /ckpts: is it mounted"):
        await staged.root.check_before_save()
    assert (staged.ended, staged.restored) == (False, "")


async def test_an_identity_whose_file_alone_has_vanished_is_written_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served_root, "AGAIN_SECONDS", 0.0)
    before, begin = Told(None, None, "ab" * 16), Told(None, None, "ab" * 16)
    await before.root.check_before_save()
    await begin.root.check(Job("job"))
    for told in (before, begin):
        assert (told.ended, told.restored) == (False, "ab" * 16)
    assert "had vanished, and is written again" in caplog.text


async def test_a_save_does_not_begin_if_the_root_cannot_be_read() -> None:
    with pytest.raises(
        StorageError, match="cannot read the identity of the root /ckpts: Input/output error"
    ):
        await Told(OSError(5, "I/O error")).root.check_before_save()
