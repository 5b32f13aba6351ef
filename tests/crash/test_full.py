"""Tests a root without a free block, or without a free inode: the daemon starts, memory
is recovered, and deleting a checkpoint makes room.

It needs a real ext4 in memory, and is skipped where no image can be mounted.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.commands import forgetting
from ckptd.daemon.journal.journal import Journal
from ckptd.daemon.journal.records import JournalState
from ckptd.shared import names
from ckptd.shared.errors import SnapshotFailed, StorageError
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system.fs import PosixFileSystem, opened_directory
from tests.crash.images import FewInodes, Image, Unavailable, fill
from tests.support import trainers
from tests.support.daemons import Daemon, Home, running, until

SIZE = 50_000


class Full:
    """A small disk with a root on it, and the function that uses the disk up."""

    def __init__(self, disk: Image, place: Home, use_up: Callable[[Path], None]) -> None:
        self.disk, self.place, self._use_up = disk, place, use_up

    def use_up(self) -> None:
        self._use_up(self.disk.where)

    @property
    def journal(self) -> Path:
        return self.place.journal

    def tags(self) -> list[str]:
        return sorted(
            path.parent.name for path in (self.place.root / trainers.JOB).glob("*/manifest.json")
        )


def no_blocks(where: Path) -> None:
    with (where / "hog").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            fill(file, size)
    with (
        pytest.raises(OSError, match="No space left"),
        (where / "one more").open("wb", buffering=0) as file,
    ):
        file.write(bytes(4096))
    (where / "one more").unlink()


def no_inodes(where: Path) -> None:
    (where / "hog").mkdir()
    with pytest.raises(OSError, match="No space left"):
        touch(where / "hog", 100_000)


def touch(where: Path, count: int) -> None:
    for number in range(count):
        (where / f"{number}").touch()


@pytest.fixture(params=["blocks", "inodes"])
def full(request: pytest.FixtureRequest, place: Home) -> Iterator[Full]:
    try:
        disk = Image(32) if request.param == "blocks" else FewInodes(32)
    except Unavailable as error:
        pytest.skip(str(error))
    place.root = disk.where / "root"
    try:
        yield Full(disk, place, no_blocks if request.param == "blocks" else no_inodes)
    finally:
        place.remove()
        disk.close()


OPTIONS = ("--keep-last", "0", "--deltas", "off")
"""Without deltas, which link files, so that each checkpoint that is deleted makes room."""


def let_go(agent: Agent) -> None:
    """End a trainer as SIGKILL would: it sends nothing, and its locks are released."""
    agent._link.client.close()
    agent._link.handovers.slots.drop()


def life(full: Full, before: Callable[[], None] = lambda: None) -> None:
    """Make steps 1 to 3 durable, and seal step 4 in memory only.

    Then kill daemon and trainer, and use up the disk.
    """
    with running(full.place, *OPTIONS) as daemon:
        agent = Agent(trainers.JOB, socket=full.place.socket)
        for step in (1, 2, 3):
            agent.snapshot(trainers.expected(step, SIZE), step=step).wait("durable", timeout=60)
        assert (
            agent.snapshot(trainers.expected(4, SIZE), step=4, persist=False).wait("sealed").state
            == "sealed"
        )
        daemon.kill()
    let_go(agent)
    before()
    full.use_up()


def recover(full: Full) -> tuple[Agent, str, int | None]:
    agent, state = Agent(trainers.JOB, socket=full.place.socket), trainers.blank(SIZE)
    recovered = agent.recover(state)
    assert recovered is not None
    assert recovered.step is not None
    trainers.assert_equal(state, recovered.step, SIZE)
    return agent, recovered.source, recovered.step


def forget(full: Full, tags: list[str], socket: Path | None) -> None:
    for tag in tags:
        deletion = forgetting.planned(full.place.root / trainers.JOB / tag, [])
        deletion.run(socket)
        (row,) = deletion.rows
        assert (row["deleted"], row["error"]) == (True, None)
        assert tag not in full.tags()


def goes_on(full: Full, which: slice) -> None:
    """Check, on the full disk, that memory is recovered, checkpoints can be deleted,
    and the next save becomes durable.
    """
    place = full.place
    with running(place, *OPTIONS):
        agent, source, step = recover(full)
        assert (source, step) == ("memory", 4)
        # Two checkpoints, because the blocks of one do not suffice for another.
        forget(full, full.tags()[which], place.socket)
        assert (
            agent.snapshot(trainers.expected(5, SIZE), step=5).wait("durable", timeout=60).state
            == "durable"
        )
        agent.close()
        until(
            lambda: open_root(place.root).read_newest(trainers.JOB) == "step-00000005.a0002",
            "newest",
        )


@pytest.mark.parametrize("which", [slice(0, 2), slice(2, 0, -1)], ids=["the oldest", "the newest"])
def test_a_daemon_starts_on_a_full_disk_and_room_can_be_made(full: Full, which: slice) -> None:
    life(full)
    goes_on(full, which)
    assert sorted(path.name for path in full.journal.iterdir()) == [
        "0000000000000002.log",
        names.JOURNAL_SPARE,
    ]


def test_a_daemon_starts_on_a_full_disk_without_a_spare_journal_file(full: Full) -> None:
    """The root of an older ckptd, or one whose spare file was deleted."""
    life(full, before=lambda: (full.journal / names.JOURNAL_SPARE).unlink(missing_ok=True))
    goes_on(full, slice(0, 2))
    assert sorted(path.name for path in full.journal.iterdir()) == ["0000000000000001.log"]
    subprocess.run(["rm", "-r", str(full.disk.where / "hog")], check=True)
    with running(full.place):
        assert sorted(path.name for path in full.journal.iterdir()) == [
            "0000000000000002.log",
            names.JOURNAL_SPARE,
        ]


def test_forget_makes_room_while_no_daemon_runs(full: Full) -> None:
    life(full)
    forget(full, full.tags()[:2], None)
    # After that there was also room to save the snapshot in memory.
    assert full.tags() == ["step-00000003.a0001", "step-00000004.a0001"]


def test_every_start_on_a_full_disk_succeeds(full: Full) -> None:
    life(full)
    for _ in range(3):
        with running(full.place, *OPTIONS) as daemon:
            daemon.kill()
    goes_on(full, slice(0, 2))


@pytest.mark.parametrize("full", ["blocks"], indirect=True)
def test_a_read_only_root_is_reported_in_one_sentence(full: Full) -> None:
    with running(full.place):
        pass
    subprocess.run(["mount", "-o", "remount,ro", str(full.disk.where)], check=True)
    daemon = Daemon(full.place)
    assert daemon.died() == 1
    daemon.close()
    told = full.place.log_text().splitlines()[-1]
    assert (
        told == f"ckptd: cannot use {full.place.root} as the root for checkpoints: Read-only file "
        f"system (mounted read-only: after a disk error the kernel's log says why)"
    )


@pytest.mark.parametrize("taken", ["the job", "the tag"])
def test_failed_saves_leave_nothing_in_the_journal(place: Home, taken: str) -> None:
    """A file has the name of a directory that each save needs, so every save fails.

    The journal forgets each failed save.
    """
    job = place.root / trainers.JOB
    with running(place, environment={"CKPTD_STALL_BUDGET": "60"}):
        agent = Agent(trainers.JOB, socket=place.socket)
        agent.snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
        until(lambda: (job / names.NEWEST).exists(), "newest")
        if taken == "the job":
            shutil.rmtree(job)
            job.write_text("mine")
        for step in range(2, 30):
            if taken == "the tag":
                (job / f"step-{step:08d}.a0001").write_text("mine")
            with pytest.raises((SnapshotFailed, StorageError), match="Not a directory|File exists"):
                agent.snapshot({"x": torch.ones(3)}, step=step).wait("durable", timeout=60)
        until(lambda: journal_state(place).staged == {}, "end of the last save")
        let_go(agent)
    with running(place):
        until(lambda: journal_state(place).staged == {}, "end of what was saved unasked")


def journal_state(place: Home) -> JournalState:
    """Return the state that a replay of a copy of the running daemon's journal gives."""
    with tempfile.TemporaryDirectory() as copy, ThreadPoolExecutor(1) as pool:
        for path in place.journal.glob("*.log"):
            shutil.copy(path, copy)
        with opened_directory(PosixFileSystem(), copy) as directory:
            journal = Journal.open(PosixFileSystem(), directory, pool, strict=True)
            return journal.state
