"""Kills a daemon with a stage at every failpoint: nothing that was durable is lost, and
everything that waited is uploaded afterwards.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.agent import Agent, Checkpoint
from ckptd.shared import names
from ckptd.shared.location import Location, Url
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import failpoints
from tests.crash import test_failpoints as without_stage
from tests.support import stores, trainers
from tests.support.daemons import Daemon, Home, home, running, until

ARGUMENTS = ("--codec", "zstd:1", "--files-per-rank", "2")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Servers]:
    with stores.Servers(tmp_path_factory.mktemp("stores")) as running:
        yield running


@pytest.fixture(params=["directory", "seaweed"])
def place(
    request: pytest.FixtureRequest, servers: stores.Servers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Home]:
    with home() as made:
        if request.param != "directory":
            server = servers.get(request.param)
            made.root = Url("s3", "bucket", (names.new_nonce().hex(),))  # type: ignore[assignment]
            made.environ = dict(server.environ)
            for name, value in server.environ.items():
                monkeypatch.setenv(name, value)
        made.environ["CKPTD_STAGE"] = str(made.path / "stage")
        yield made


def check_root(root: Location, steps: list[int]) -> None:
    """Check that the root has exactly these steps, bit for bit, and no other file of a
    checkpoint.
    """
    repository, found = open_root(root), []
    for tag in repository.tags("job"):
        files = Counter(names.part_of(name) or name for name in repository.files("job", tag))
        if not files:
            continue  # a store may list an empty prefix for a while
        with Checkpoint.open(root / "job", tag) as checkpoint:
            checkpoint.verify()
            assert checkpoint.step is not None
            trainers.assert_equal(checkpoint.load(), checkpoint.step)
            assert files == {"manifest.json": 1} | {
                part.file: part.files for part in checkpoint.manifest.parts
            }
            found.append(checkpoint.step)
    assert sorted(found) == steps


def marked(place: Home, tag: str) -> list[Path]:
    """Return the files of a checkpoint in the root that `mark` has marked, if the root
    is a directory.
    """
    return (
        [file for file in (place.root / "job" / tag).iterdir() if file.stat().st_mtime == 1]
        if isinstance(place.root, Path)
        else []
    )


def mark(place: Home, tag: str) -> None:
    """Mark the files of a checkpoint in the root, if the root is a directory.

    Those that other checkpoints have, too, are left out.
    """
    if isinstance(place.root, Path):
        files = [file for file in (place.root / "job" / tag).iterdir() if file.stat().st_nlink == 1]
        assert files
        for file in files:
            os.utime(file, (1, 1))


@pytest.mark.parametrize("point", failpoints.STAGE)
def test_an_upload_that_is_killed_is_finished_by_the_next_daemon(place: Home, point: str) -> None:
    with running(place, *ARGUMENTS, failpoints=f"{point}=kill@2", forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot(trainers.expected(1), step=1).wait("uploaded", timeout=60)
        pending = agent.snapshot(trainers.expected(2), step=2).wait("durable", timeout=60)
        assert daemon.died() == -signal.SIGKILL, place.log_text()
        daemon.close()
    if point == "upload.copied":
        mark(place, "step-00000002.a0001")
    with running(place, *ARGUMENTS, forked=True) as daemon:
        assert pending.wait("uploaded", timeout=60).state == "uploaded"
        agent.snapshot(trainers.expected(3), step=3).wait("uploaded", timeout=60)
        agent.close()
        assert daemon.stop() == 0
    check_root(place.root, [1, 2, 3])
    assert marked(place, "step-00000002.a0001") == [], (
        "a file of a directory may look whole, and be lost in a power cut"
    )
    shutil.rmtree(place.path / "stage")
    with running(place, *ARGUMENTS, forked=True):
        agent = Agent("job", socket=place.socket)
        state = trainers.blank()
        found = agent.recover(state)
        assert found is not None
        assert (found.step, found.source) == (3, "storage")
        trainers.assert_equal(state, 3)
        agent.close()


@pytest.mark.parametrize("point", ["upload.intended", "upload.copied"])
def test_files_of_an_upload_that_nobody_finishes_are_deleted(place: Home, point: str) -> None:
    """The stage is lost with its disk, or the daemon is started without it."""
    with running(place, *ARGUMENTS, failpoints=f"{point}=kill@2", forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot(trainers.expected(1), step=1).wait("uploaded", timeout=60)
        agent.snapshot(trainers.expected(2), step=2).wait("durable", timeout=60)
        assert daemon.died() == -signal.SIGKILL, place.log_text()
        daemon.close()
    trainers.vanish(agent)
    shutil.rmtree(place.path / "stage")
    shutil.rmtree(place.segments)
    with running(place, *ARGUMENTS, forked=True) as daemon:
        until(
            lambda: not open_root(place.root).files("job", "step-00000002.a0001"),
            "end of the unfinished upload",
        )
        assert daemon.stop() == 0
    check_root(place.root, [1])


def check_storage(root: Location) -> None:
    """Have a daemon upload what waits, and the next ones finish the deletions that the
    end of each has interrupted. Then check the root as without a stage.
    """
    place, repository = _places[root], open_root(root)

    def is_whole(tag: str) -> bool:
        files = list(repository.files("job", tag))
        return not files or names.MANIFEST in files

    def serve_until(condition: Callable[[Daemon], bool], what: str) -> None:
        daemon = Daemon(place, *without_stage.KEEP, forked=True).wait_ready()
        try:
            until(lambda: daemon.status()["stage"]["root_known"] and condition(daemon), what)
        finally:
            assert daemon.stop() == 0

    serve_until(lambda daemon: not daemon.status()["stage"]["waiting"], "end of the uploads")
    while not all(map(is_whole, repository.tags("job"))):
        serve_until(lambda _: all(map(is_whole, repository.tags("job"))), "end of the deletions")
    original(root)


original = without_stage.check_storage
_places: dict[Location, Home] = {}


@pytest.mark.parametrize("point", failpoints.AGENT + failpoints.DAEMON + failpoints.STAGE)
def test_death_at_every_point_with_a_stage(
    place: Home, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(without_stage, "check_storage", check_storage)
    monkeypatch.setattr(failpoints, "DAEMON", failpoints.DAEMON + failpoints.STAGE)
    monkeypatch.setitem(_places, place.root, place)
    without_stage.die_at(place, point)
