"""Tests that a root that was moved finds its memory, and that a copy of a root does not
take it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.memory.moved_root import gather
from ckptd.daemon.memory.slots import Slots
from ckptd.shared import names
from ckptd.shared.errors import ForeignMemory
from ckptd.shared.formats.segment import RootMark, SegmentHeader
from ckptd.shared.system import machine
from ckptd.shared.system.fs import PosixFileSystem
from tests.support.commands import ckptd
from tests.support.daemons import Home, home, running
from tests.support.replaced_roots import LAST, goes_on, recovered_by, train_and_die
from tests.support.trainers import vanish


@pytest.mark.usefixtures("processes")
def test_a_root_that_was_moved_finds_its_memory(place: Home) -> None:
    with running(place, forked=True) as daemon:
        train_and_die(place)
        daemon.kill()
    former = place.segments
    moved = place.path / "moved"
    place.root.rename(moved)
    place.root = moved
    with running(place, forked=True) as daemon:
        assert daemon.status()["foreign_memory"] == []
        agent = Agent("job", socket=place.socket)
        assert recovered_by(agent) == (LAST, "memory")
        goes_on(agent, place, LAST + 1)
    assert not former.exists()


@pytest.mark.usefixtures("processes")
def test_a_step_that_the_daemon_of_the_former_path_holds_is_never_passed_over(place: Home) -> None:
    """A trainer goes on at the former path, and has begun a new root there."""
    with running(place, forked=True) as daemon:
        agent = Agent("job", socket=place.socket)
        agent.snapshot({"w": torch.ones(9)}, step=1).wait("durable", timeout=60)
        agent.snapshot({"w": torch.ones(9)}, step=2, persist=False).wait("sealed", timeout=60)
        daemon.kill()
        vanish(agent)
    with home() as moved:
        moved.root = place.path / "moved"
        place.root.rename(moved.root)
        with running(place, forked=True) as former:
            told = ckptd("drain", moved.root)
            assert told.returncode == 1
            assert "NOT SAVED: step 2 of job job" in told.stdout
            assert f"ckptd stop {place.root}" in told.stdout
            with running(moved, forked=True) as daemon:
                with pytest.raises(ForeignMemory, match="step 2 of attempt 1 .* another daemon"):
                    Agent("job", socket=moved.socket)
                checked = ckptd("status", "--check", moved.root)
                assert checked.returncode == 1
                assert "job job: step 2 of attempt 1 was saved for this root when it was at " in (
                    checked.stdout
                )
                drained = ckptd("drain", moved.root)
                assert drained.returncode == 1
                assert f"the daemon of {place.root}, where this root was" in drained.stdout
                assert Agent("other", socket=moved.socket).recover({"w": torch.ones(1)}) is None
                assert former.stop() == 0
                daemon.stop()
            with running(moved, forked=True):
                agent = Agent("job", socket=moved.socket)
                found = agent.recover({"w": torch.zeros(9)})
                assert found is not None
                assert (found.step, found.source) == (2, "memory")
                agent.close()


@pytest.mark.usefixtures("processes")
def test_a_copy_of_a_root_leaves_the_memory_to_the_root(place: Home) -> None:
    with running(place, forked=True) as daemon:
        train_and_die(place)
        daemon.kill()
    original, before = place.root, place.segment_files()
    place.root = place.path / "copy"
    shutil.copytree(original, place.root)
    with running(place, forked=True):
        agent = Agent("job", socket=place.socket)
        assert recovered_by(agent) == (LAST, "storage")
        agent.close()
    shutil.rmtree(place.segments, ignore_errors=True)
    place.root = original
    assert place.segment_files() == before != []
    with running(place, forked=True):
        agent = Agent("job", socket=place.socket)
        assert recovered_by(agent) == (LAST, "memory")
        agent.close()


# -- the segments themselves


MARK = RootMark("ab" * 16, "")


def segment_of(shm: Path, directory: str, mark: RootMark) -> str:
    """Make a segment as the daemon of a root did, which is dead now.

    Return the name of its file.
    """
    slots = Slots(PosixFileSystem(), shm, directory, 1 << 30)
    slots.mark = mark
    made = slots.create(
        SegmentHeader(
            job="job", attempt=1, rank=0, world_size=1, slot=0, capacity=100, chunk_size=65536
        )
    )
    made.descriptor.close()
    slots.close()
    return made.name


def root_at(path: Path) -> Path:
    """Make a root with the identity of `MARK`."""
    (path / names.CONTROL).mkdir(parents=True)
    (path / names.CONTROL / names.IDENTITY).write_text(f"{MARK.identity}\n")
    return path


def gathered(
    shm: Path, root: Path, disks: Path | None = None, overflow: Path | None = None
) -> list[str]:
    """Gather the segments of a root, and return the names of those that its daemon has
    then.
    """
    slots = Slots(PosixFileSystem(), shm, machine.segment_directory(root), 1 << 30, overflow)
    slots.mark = RootMark(MARK.identity, str(root))
    try:
        gather(slots, root, disks)
        return sorted(slot.name for slot in slots.adopt())
    finally:
        slots.close()


def test_only_segments_of_this_identity_whose_root_is_gone_are_moved(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    root = root_at(tmp_path / "new")
    mine = segment_of(
        shm, f"ckptd-{os.getuid()}-{'1' * 16}", RootMark(MARK.identity, str(tmp_path / "old"))
    )
    other = segment_of(
        shm, f"ckptd-{os.getuid()}-{'1' * 16}", RootMark("cd" * 16, str(tmp_path / "old"))
    )
    segment_of(
        shm,
        f"ckptd-{os.getuid()}-{'2' * 16}",
        RootMark(MARK.identity, str(root_at(tmp_path / "copied"))),
    )
    assert gathered(shm, root) == [mine]
    assert [path.name for path in (shm / f"ckptd-{os.getuid()}-{'1' * 16}").iterdir()] == [other]
    assert gathered(shm, root) == [mine]  # again, as the next daemon does


def test_a_root_behind_another_name_is_the_same_root(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    root = root_at(tmp_path / "disk")
    (tmp_path / "link").symlink_to(root)
    mine = segment_of(
        shm, f"ckptd-{os.getuid()}-{'1' * 16}", RootMark(MARK.identity, str(tmp_path / "link"))
    )
    assert gathered(shm, root) == [mine]
    assert not (shm / f"ckptd-{os.getuid()}-{'1' * 16}").exists()


def test_segments_that_a_daemon_uses_stay_where_they_are(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    used = shm / f"ckptd-{os.getuid()}-{'1' * 16}"
    mine = segment_of(shm, used.name, RootMark(MARK.identity, str(tmp_path / "old")))
    fd = os.open(used, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert gathered(shm, root_at(tmp_path / "new")) == []
    finally:
        os.close(fd)
    assert [path.name for path in used.iterdir()] == [mine]


def test_segments_on_the_disk_are_moved_too(tmp_path: Path) -> None:
    shm, disks = tmp_path / "shm", tmp_path / "state" / "host"
    shm.mkdir()
    (disks / "old").mkdir(parents=True)
    (disks / "new").mkdir()
    mine = segment_of(disks / "old", "segments", RootMark(MARK.identity, str(tmp_path / "old")))
    assert gathered(shm, root_at(tmp_path / "new"), disks, disks / "new" / "segments") == [mine]
    assert [path.name for path in (disks / "new" / "segments").iterdir()] == [mine]
