"""Tests that the end of a daemon says which snapshots are in memory only: in its log,
and in the output of `ckptd stop`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent, Checkpoint
from ckptd.daemon.memory import unsaved
from ckptd.daemon.memory.unsaved import UnsavedSnapshot
from ckptd.shared import names
from ckptd.shared.errors import Busy, NotFound
from ckptd.shared.formats.segment import (
    RootMark,
    SegmentHeader,
    SlotState,
    write_header,
    write_root_mark,
)
from ckptd.shared.storage.locate import open_root
from ckptd.shared.system import machine
from ckptd.shared.system.fs import closing_at_end
from tests.shared.samples import write_checkpoint
from tests.support.commands import ckptd
from tests.support.daemons import Home, running, until
from tests.support.trainers import vanish

FULL = "persist.writing=error(ENOSPC)"
STATE = {"w": torch.arange(1000.0)}


def last_line(place: Home) -> str:
    return place.log_text().splitlines()[-1]


def sealed(place: Home, step: int, *, persist: bool = False) -> Agent:
    agent = Agent("gpt", socket=place.socket)
    agent.snapshot({"w": STATE["w"] + step}, step=step, persist=persist).wait("sealed", timeout=60)
    return agent


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("alive", [True, False], ids=["trainer lives", "trainer is gone"])
@pytest.mark.parametrize("persist", [True, False], ids=["failed before", "fails at the stop"])
def test_stop_on_a_full_disk_says_what_is_in_memory_only_and_the_next_daemon_saves_it(
    place: Home, alive: bool, persist: bool
) -> None:
    with running(place, "--log-format", "json", failpoints=FULL, forked=True) as daemon:
        agent = sealed(place, 8, persist=persist)
        if not alive:
            vanish(agent)
        run = ckptd("stop", "--socket", place.socket)
        assert (run.returncode, run.stdout) == (
            15,
            f"stopped pid {daemon.process.pid}, which served {place.root}\n",
        )
        assert run.stderr.startswith(
            f"ckptd: NOT SAVED: step 8 of job gpt (attempt 1) is in memory only, in "
            f"{place.segments}"
        )
        for words in (
            "stays there until the machine or the container restarts",
            "`ckptd gc --delete`",
            f"start a daemon for {place.root} on ",
        ):
            assert words in run.stderr
        assert daemon.died() == 15
    assert place.events("memory.unsaved") == [{"snapshots": 1}]
    said = json.loads(last_line(place))
    assert (said["event"], said["level"]) == ("memory.unsaved", "error")
    assert "NOT SAVED: step 8 of job gpt (attempt 1) is in memory only, in " in said["text"]
    assert "No space left on device" in said["text"]
    vanish(agent)
    with running(place, forked=True) as daemon:
        assert daemon.stop() == 0
    with Checkpoint.open(place.root / "gpt", "newest") as checkpoint:
        assert (checkpoint.step, torch.equal(checkpoint.tensor("w"), STATE["w"] + 8)) == (8, True)


@pytest.mark.usefixtures("processes")
def test_stop_as_json_lists_what_is_in_memory_only(place: Home) -> None:
    with running(place, failpoints=FULL, forked=True) as daemon:
        agent = sealed(place, 8)
        run = ckptd("stop", "--socket", place.socket, "--json")
        row = {
            "job": "gpt",
            "attempt": 1,
            "step": 8,
            "directories": [str(place.segments)],
            "reason": "the daemon's log says why",
        }
        assert (run.returncode, json.loads(run.stdout)) == (
            15,
            {"pid": daemon.process.pid, "stopped": True, "unsaved": [row]},
        )
        vanish(agent)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("tag", [None, "best"])
def test_nothing_is_said_of_what_is_saved(place: Home, tag: str | None) -> None:
    """The segments of a trainer that lives stay for the next daemon."""
    with running(place, forked=True) as daemon:
        agent = Agent("gpt", socket=place.socket)
        for step in (1, 2):
            agent.snapshot(STATE, step=step, tag=tag if step == 2 else None).wait(
                "durable", timeout=60
            )
        run = ckptd("stop", "--socket", place.socket)
        assert (run.returncode, run.stderr) == (0, "")
        assert len(place.segment_files()) == 2
        assert daemon.died() == 0
        vanish(agent)
    assert "NOT SAVED" not in place.log_text()


@pytest.mark.usefixtures("processes")
def test_what_is_on_the_stage_is_saved(place: Home) -> None:
    """The root is not needed for that."""
    with running(
        place,
        "--stage",
        str(place.path / "stage"),
        failpoints="upload.intended=error(EIO)",
        forked=True,
    ) as daemon:
        agent = sealed(place, 8)
        run = ckptd("stop", "--socket", place.socket, "--json")
        assert (run.returncode, json.loads(run.stdout)["unsaved"]) == (0, [])
        assert daemon.died() == 0
        vanish(agent)
    assert not (place.root / "gpt" / "step-00000008.a0001").exists()


@pytest.mark.usefixtures("processes")
def test_stop_of_a_daemon_that_is_killed_meanwhile_says_what_is_in_memory_only(place: Home) -> None:
    with running(place, failpoints="persist.writing=kill", forked=True) as daemon:
        agent = sealed(place, 8)
        run = ckptd("stop", "--socket", place.socket)
        assert daemon.died() == -signal.SIGKILL
        assert run.returncode == 15
        assert "NOT SAVED: step 8 of job gpt (attempt 1) is in memory only" in run.stderr
        vanish(agent)


@pytest.mark.usefixtures("processes")
def test_stop_that_does_not_wait_longer_says_what_is_in_memory_only_until_then(place: Home) -> None:
    with running(place, failpoints="persist.writing=sleep(20)", forked=True) as daemon:
        agent = sealed(place, 8)
        run = ckptd("stop", "--socket", place.socket, "--timeout", "0.5")
        assert (run.returncode, run.stdout) == (11, "")
        assert (
            f"until then, step 8 of job gpt (attempt 1) is in memory only, in {place.segments}: "
            f"wait for it" in run.stderr
        )
        daemon.process.terminate()
        assert daemon.died() == 130
        vanish(agent)
    assert (
        "a second signal ends this daemon at once. NOT SAVED: step 8 of job gpt (attempt 1) is in "
        "memory only" in last_line(place)
    )


@pytest.mark.usefixtures("processes")
def test_a_terminal_that_closes_ends_the_daemon_once_all_is_saved(place: Home) -> None:
    """The kernel and the shell may each send SIGHUP: the second one is no further request."""
    with running(place, failpoints="persist.writing=sleep(1)", forked=True) as daemon:
        agent = sealed(place, 8)
        for _ in range(2):
            daemon.process.send_signal(signal.SIGHUP)
            until(lambda: "stopping: saving" in place.log_text(), "the answer to the signal")
        assert daemon.died() == 0
        vanish(agent)
    assert (place.root / "gpt" / "step-00000008.a0001" / "manifest.json").exists()


@pytest.mark.usefixtures("processes")
def test_the_line_at_the_signal_names_what_is_being_saved(place: Home) -> None:
    """After TimeoutStopSec systemd kills the daemon, which can say nothing then."""
    with running(place, forked=True) as daemon:
        agent = sealed(place, 8)
        until(lambda: daemon.status()["jobs"][0]["last_sealed"] is not None, "the seal")
        assert daemon.stop() == 0
        vanish(agent)
    said = (
        "stopping: saving the newest snapshots that are not durable yet (step 8 of job gpt "
        "(attempt 1) is in memory only, in "
    )
    assert said in place.log_text()


# -- what a daemon has left

WHY = "the daemon's log says why"


def status(place: Home, directory: Path, **job: Any) -> dict[str, Any]:
    memory = {"directory": str(directory), "disk_directory": str(directory / "disk")}
    known = {"job": "gpt", "last_durable": None, "last_error": None, "ranks_here": None, **job}
    return {"root": str(place.root), "stage": None, "shared_memory": memory, "jobs": [known]}


def segment(
    directory: Path,
    name: str,
    step: int,
    rank: int = 0,
    world_size: int = 1,
    mark: RootMark | None = None,
    **fields: Any,
) -> None:
    made = SegmentHeader(
        job="gpt",
        attempt=1,
        rank=rank,
        world_size=world_size,
        slot=0,
        capacity=4096,
        chunk_size=1 << 20,
    )
    header = replace(made, state=SlotState.SEALED, step=step, **fields)
    directory.mkdir(exist_ok=True)
    with (directory / f"{name * 32}.seg").open("w+b") as file:
        file.truncate(header.file_length)
        write_header(file.fileno(), header)
        if mark is not None:
            write_root_mark(file.fileno(), header, mark)


def left(found: list[UnsavedSnapshot]) -> list[tuple[int, tuple[str, ...], str]]:
    return [(each.step, each.directories, each.reason) for each in found]


def test_only_the_newest_snapshot_that_all_ranks_have_sealed_counts(
    place: Home, tmp_path: Path
) -> None:
    segment(tmp_path, "a", 7, 0, 2)
    segment(tmp_path, "b", 7, 1, 2)
    segment(tmp_path / "disk", "c", 8, 0, 2)
    assert left(unsaved.left_behind(status(place, tmp_path))) == [(7, (str(tmp_path),), WHY)]
    segment(tmp_path, "d", 8, 1, 2)
    error = {"step": 8, "reason": "the disk is full"}
    found = unsaved.left_behind(status(place, tmp_path, last_error=error))
    assert left(found) == [(8, (str(tmp_path), str(tmp_path / "disk")), "the disk is full")]
    assert (
        unsaved.left_behind(status(place, tmp_path, last_durable={"attempt": 1, "step": 8})) == []
    )


def test_of_several_nodes_every_step_of_this_node_counts(place: Home, tmp_path: Path) -> None:
    for name, step in (("a", 7), ("b", 8)):
        segment(tmp_path, name, step, 2, 4)
    assert left(unsaved.left_behind(status(place, tmp_path, ranks_here=[2]))) == [
        (7, (str(tmp_path),), WHY),
        (8, (str(tmp_path),), WHY),
    ]
    assert unsaved.left_behind(status(place, tmp_path, ranks_here=[2, 3])) == []
    assert [
        step
        for step, _, _ in left(
            unsaved.left_behind(
                status(place, tmp_path, ranks_here=[2], last_durable={"attempt": 1, "step": 7})
            )
        )
    ] == [8]


def test_a_step_that_this_node_has_delivered_is_left_to_the_next_daemon(
    place: Home, tmp_path: Path
) -> None:
    """Its parts are on storage, and the receipt says so.

    An abandonment takes that back.
    """
    segment(tmp_path, "a", 7, 2, 4)
    told = status(place, tmp_path, ranks_here=[2])
    repository = open_root(place.root)
    repository.storage.serve(machine.host()).close()
    (place.root / "gpt" / "step-00000007.a0001").mkdir(parents=True)
    assert [each.step for each in unsaved.left_behind(told)] == [7]
    (place.root / "gpt" / "step-00000007.a0001" / names.receipt_file(2)).write_bytes(b"a receipt")
    assert unsaved.left_behind(told) == []
    repository.bury("gpt", "step-00000007.a0001", 1, 7)
    assert [each.step for each in unsaved.left_behind(told)] == [7]


def test_a_damaged_manifest_does_not_count_as_saved(place: Home, tmp_path: Path) -> None:
    segment(tmp_path, "a", 5)
    made = write_checkpoint(place.root, step=5, attempt=1, job="gpt")
    assert unsaved.left_behind(status(place, tmp_path)) == []
    (place.root / "gpt" / made.tag / names.MANIFEST).write_bytes(b"{}")
    assert [each.step for each in unsaved.left_behind(status(place, tmp_path))] == [5]


def test_a_segment_of_an_earlier_boot_is_lost_already(place: Home, tmp_path: Path) -> None:
    segment(tmp_path, "a", 7, boot_id=bytes(16))
    (tmp_path / f"{'b' * 32}.seg").write_bytes(b"damaged")
    assert unsaved.left_behind(status(place, tmp_path)) == []


def test_a_root_that_does_not_answer_does_not_hold_the_command(
    place: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(place: object) -> None:
        answers.wait()
        raise NotFound("it was hung")

    segment(tmp_path, "a", 7)
    monkeypatch.setattr(unsaved, "existing_root", hang)
    monkeypatch.setattr(unsaved, "STORAGE_SECONDS", 0.1)
    (found,) = unsaved.left_behind(status(place, tmp_path))
    answers.set()
    assert (
        found.reason == f"{place.root} did not answer within 0.1 s, so that it may be saved or not"
    )


def test_a_storage_that_cannot_be_read_is_named(
    place: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: object) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    segment(tmp_path, "a", 7)
    monkeypatch.setattr(unsaved, "existing_root", fail)
    (found,) = unsaved.left_behind(status(place, tmp_path))
    assert found.reason.startswith(
        f"storage cannot be read, so that it may be saved or not: cannot read {place.root}: "
        f"Permission denied"
    )


def test_several_snapshots_are_one_line(place: Home) -> None:
    found = [
        UnsavedSnapshot("a", 1, 8, ("/dev/shm/x",), "the disk is full"),
        UnsavedSnapshot("b", 2, 9, ("/dev/shm/x", "/var/y")),
    ]
    said = unsaved.text(found, "/ckpts")
    assert said.startswith(
        "NOT SAVED: step 8 of job a (attempt 1) is in memory only, in /dev/shm/x: the disk is "
        "full; step 9 of job b (attempt 2) is in memory only, in /dev/shm/x, /var/y. "
    )
    assert "\n" not in said


FORMER, PRESENT = "ab" * 16, "cd" * 16


def test_memory_of_another_root_needs_a_decision_and_not_the_next_daemon(
    place: Home, tmp_path: Path
) -> None:
    """A checkpoint of the same step in the root that is there now changes nothing."""
    write_checkpoint(place.root, step=7, attempt=1, job="gpt")
    segment(tmp_path, "a", 6, mark=RootMark(FORMER, str(place.root)))
    segment(tmp_path, "b", 7, mark=RootMark(FORMER, str(place.root)))
    (found,) = unsaved.left_behind(status(place, tmp_path) | {"identity": PRESENT})
    assert (found.step, found.other_root, found.row()["other_root"]) == (7, FORMER, FORMER)
    assert found.reason == f"it was saved for root abababab, and {place.root} has another root now"
    said = unsaved.text([found], place.root)
    assert "start a daemon for" not in said
    for words in (
        f"until you decide: mount or restore that root at {place.root}",
        "CKPTD_FOREIGN_MEMORY for one run: `adopt` saves it",
    ):
        assert words in said
    both = unsaved.text([found, UnsavedSnapshot("b", 2, 9, ("/dev/shm/x",))], place.root)
    assert both.index("start a daemon for") < both.index("belongs to root abababab until")
    # The root is back, or not known.
    for identity in (FORMER, None):
        assert unsaved.left_behind(status(place, tmp_path) | {"identity": identity}) == []


# -- without a daemon


def without(
    place: Home, tmp_path: Path, root: Path | None = None, **options: Any
) -> dict[str, list[tuple[int, tuple[str, ...], str]]]:
    found = unsaved.without_a_daemon(tmp_path, tmp_path / "state", root, **options)
    return {where: left(snapshots) for where, snapshots in found.items()}


@pytest.fixture
def memory(place: Home, tmp_path: Path) -> Path:
    """The directory of the segments of the root."""
    return tmp_path / machine.segment_directory(place.root)


def test_the_memory_of_one_root_counts_that_no_daemon_uses(
    place: Home, tmp_path: Path, memory: Path
) -> None:
    assert without(place, tmp_path, place.root) == {}
    segment(memory, "a", 7)
    segment(tmp_path / f"{memory.name}.{'0' * 16}", "b", 8)
    segment(tmp_path / "ckptd-0-0123456789abcdef", "c", 9)
    other = (str(tmp_path / f"{memory.name}.{'0' * 16}"),)
    assert without(place, tmp_path, place.root) == {str(place.root): [(8, other, "")]}


def test_the_segments_on_the_disk_count(place: Home, tmp_path: Path) -> None:
    disk = machine.state_directory(tmp_path / "state", place.root) / "segments"
    disk.parent.mkdir(parents=True)
    segment(disk, "a", 7)
    expected = [(7, (str(disk),), "")]
    assert without(place, tmp_path, place.root) == {str(place.root): expected}
    assert without(place, tmp_path) == {"": expected}


def test_only_what_is_whole_and_not_in_the_root_counts(
    place: Home, tmp_path: Path, memory: Path
) -> None:
    segment(memory, "a", 7, 0, 2)
    segment(memory, "b", 7, 1, 2)
    segment(memory, "c", 8, 0, 2)
    assert without(place, tmp_path, place.root) == {str(place.root): [(7, (str(memory),), "")]}
    write_checkpoint(place.root, step=7, attempt=1, job="gpt")
    assert without(place, tmp_path, place.root) == {}


def test_without_a_daemon_memory_of_another_root_counts_too(
    place: Home, tmp_path: Path, memory: Path
) -> None:
    write_checkpoint(place.root, step=7, attempt=1, job="gpt")
    (place.root / ".ckptd").mkdir(exist_ok=True)
    (place.root / ".ckptd" / "id").write_text(f"{PRESENT}\n")
    segment(memory, "a", 7, mark=RootMark(FORMER, str(place.root)))
    why = f"it was saved for root abababab, and {place.root} has another root now"
    expected = {str(place.root): [(7, (str(memory),), why)]}
    assert without(place, tmp_path, place.root) == expected


def test_every_step_of_several_nodes_counts_that_the_ranks_of_this_node_have_sealed(
    place: Home, tmp_path: Path, memory: Path
) -> None:
    for name, step, rank in (("a", 7, 2), ("b", 7, 3), ("c", 8, 2), ("d", 8, 3), ("e", 9, 2)):
        segment(memory, name, step, rank, 4)
    found = without(place, tmp_path, place.root)[str(place.root)]
    assert [step for step, _, _ in found] == [7, 8]


def test_memory_that_a_daemon_uses_is_its_own_matter(
    place: Home, tmp_path: Path, memory: Path
) -> None:
    """Check that the memory of a root that is named does not pass for empty."""
    segment(memory, "a", 7)
    with closing_at_end(os.open(memory, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert without(place, tmp_path) == {}
        with pytest.raises(Busy, match=f"uses {memory}: name its socket with --socket PATH"):
            without(place, tmp_path, place.root)


@pytest.mark.usefixtures("processes")
def test_the_root_of_a_segment_is_that_of_its_mark(place: Home, tmp_path: Path) -> None:
    with running(place, "--shm-dir", "/dev/shm", forked=True) as daemon:
        agent = sealed(place, 8)
        daemon.kill()
    vanish(agent)
    found = unsaved.without_a_daemon(Path("/dev/shm"), tmp_path, None)
    assert [(each.job, each.step) for each in found[str(place.root)]] == [("gpt", 8)]
