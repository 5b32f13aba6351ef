"""Tests the simulated disk: without a power cut it equals the real one, and every state
that a cut may leave of a recipe is sound.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.fs import make_directories, opened_directory, publish, sync_parents
from tests.crash.disk import EMPTY, LOST, TOP, TORN, WHOLE, Disk, Recorder, Step, Tree, every_fate


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    (tmp_path / "disk").mkdir()
    return Recorder(tmp_path / "disk", Disk())


def listed(where: Path) -> dict[str, object]:
    return {
        path.name: listed(path) if path.is_dir() else path.read_bytes()
        for path in sorted(where.iterdir())
    }


def plain(tree: Tree) -> dict[str, object]:
    return {
        name: content if isinstance(content, bytes) else plain(content)
        for name, (_, content) in tree.items()
    }


def at(recorder: Recorder, moment: int | None = None) -> Disk:
    disk = Disk()
    for step in recorder.steps[:moment]:
        disk.do(step)
    return disk


def cuts(recorder: Recorder, first: int = 0) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield every tree that may be left: after every operation from `first` on, for
    every fate of the pending changes.
    """
    for moment in range(first, len(recorder.steps) + 1):
        disk = at(recorder, moment)
        for fate in every_fate(disk.pending()):
            yield moment, plain(disk.after_cut(fate))


def at_random(recorder: Recorder, top: Path, chance: Random) -> None:
    """Do one random operation that the file system allows, or none."""
    place = chance.choice([top, *(path for path in top.iterdir() if path.is_dir())])
    name, other = (f"{chance.randrange(4)}" for _ in range(2))
    with opened_directory(recorder, str(place)) as directory:
        try:
            match chance.randrange(9):
                case 0 if place == top:
                    recorder.make_directory(f"d{name}", directory)
                case 1:
                    recorder.rename(name, other, directory, replace=chance.random() < 0.5)
                case 2:
                    recorder.unlink(name, directory)
                case 3:
                    recorder.sync_directory(directory)
                case 8:
                    recorder.link(name, directory, other, directory)
                case 4 if place != top:
                    with opened_directory(recorder, str(top)) as parent:
                        recorder.remove_directory(place.name, parent)
                case _:
                    fd = recorder.create(name, directory)
                    try:
                        recorder.allocate(fd, chance.randrange(1, 3000))
                        recorder.write(
                            fd, chance.randbytes(chance.randrange(2000)), chance.randrange(2000)
                        )
                        recorder.truncate(fd, chance.randrange(3000))
                        if chance.random() < 0.5:
                            recorder.sync(fd)
                    finally:
                        recorder.close(fd)
        except OSError:
            pass


@pytest.mark.parametrize("seed", range(30))
def test_the_simulated_page_cache_equals_the_real_file_system(
    recorder: Recorder, tmp_path: Path, seed: int
) -> None:
    chance, top = Random(seed), tmp_path / "disk"
    for _ in range(60):
        at_random(recorder, top, chance)
        assert plain(at(recorder).cached()) == listed(top)
    assert len(recorder.steps) > 30
    os.sync()
    again = tmp_path / "again"
    again.mkdir()
    Recorder(again, at(recorder))
    assert listed(again) == listed(top)


def test_a_write_is_lost_whole_torn_or_empty(recorder: Recorder, tmp_path: Path) -> None:
    with opened_directory(recorder, str(tmp_path / "disk")) as directory:
        fd = recorder.create("a", directory)
        recorder.write(fd, b"o" * 1024, 0)
        recorder.sync(fd)
        recorder.sync_directory(directory)
        recorder.write(fd, b"n" * 1536, 0)
        recorder.close(fd)
    disk = at(recorder)

    def left(what: int, seed: int = 0) -> object:
        return plain(disk.after_cut(lambda _: (what, seed)))["a"]

    assert left(LOST) == b"o" * 1024
    assert left(WHOLE) == b"n" * 1536
    assert left(EMPTY) == b"o" * 1024 + b"\0" * 512
    sectors = {b"o": b"o" * 512, b"n": b"n" * 512, b"\0": b"\0" * 512}
    torn = {left(TORN, seed) for seed in range(50)}
    assert torn == {
        sectors[a] + sectors[b] + sectors[c]
        for a in (b"o", b"n")
        for b in (b"o", b"n")
        for c in (b"\0", b"n")
    }


def test_a_synced_file_without_its_name_is_lost_and_a_name_may_be_without_its_file(
    recorder: Recorder, tmp_path: Path
) -> None:
    with opened_directory(recorder, str(tmp_path / "disk")) as directory:
        fd = recorder.create("a", directory)
        recorder.write(fd, b"abc", 0)
        recorder.sync(fd)
        recorder.rename("a", "b", directory, replace=False)
        recorder.close(fd)
        assert {frozenset(left) for _, left in cuts(recorder, 4)} == {
            frozenset(),
            frozenset("a"),
            frozenset("b"),
        }
        recorder.sync_directory(directory)
    assert [left for _, left in cuts(recorder, 5)] == [{"b": b"abc"}]


def test_operations_outside_the_directory_are_not_listed(
    recorder: Recorder, tmp_path: Path
) -> None:
    with opened_directory(recorder, str(tmp_path)) as directory:
        fd = recorder.create("a", directory)
        recorder.write(fd, b"abc", 0)
        recorder.sync(fd)
        recorder.close(fd)
        recorder.make_directory("b", directory)
    assert recorder.steps == []


def test_a_step_may_be_made_to_fail(tmp_path: Path) -> None:
    def before(step: Step) -> None:
        if step.kind == "create":
            raise OSError(28, "full")

    recorder = Recorder(tmp_path, Disk(), before)
    with (
        opened_directory(recorder, str(tmp_path)) as directory,
        pytest.raises(OSError, match="full"),
    ):
        recorder.create("a", directory)
    assert (recorder.steps, listed(tmp_path)) == ([], {})


# -- exhaustive tests of the recipes


@pytest.mark.parametrize("replace", [True, False])
def test_a_published_file_is_whole_or_as_before_and_then_stays(
    recorder: Recorder, tmp_path: Path, replace: bool
) -> None:
    old, new = b"old" * 400, b"new" * 500
    with opened_directory(recorder, str(tmp_path / "disk")) as directory:
        if replace:
            publish(recorder, "a", directory, old, replace=False)
        first = len(recorder.steps)
        publish(recorder, "a", directory, new, replace=replace)
    before, moments = old if replace else None, list(cuts(recorder, first))
    assert len(moments) >= 20
    for moment, left in moments:
        assert left.get("a") in ((new,) if moment == len(recorder.steps) else (before, new)), moment


def test_made_directories_survive_a_power_cut(recorder: Recorder, tmp_path: Path) -> None:
    root = tmp_path / "disk" / "a" / "root"
    make_directories(recorder, root)
    PosixStorage(root, recorder).ensure("job/tag.a0001")
    assert [left for _, left in cuts(recorder, len(recorder.steps))] == [
        {"a": {"root": {"job": {"tag.a0001": {}}}}}
    ]


def test_directories_made_by_a_dead_process_survive_a_power_cut(
    recorder: Recorder, tmp_path: Path
) -> None:
    """A process made the directories, and was killed before it had synced them.

    The next process cannot know whether they are synced.
    """
    root = tmp_path / "disk" / "root"
    for path in (root, root / "job", root / "job" / "tag.a0001"):
        with opened_directory(recorder, str(path.parent)) as directory:
            recorder.make_directory(path.name, directory)
        if path == root:
            make_directories(recorder, root)
    PosixStorage(root, recorder).ensure("job/tag.a0001")
    assert [left for _, left in cuts(recorder, len(recorder.steps))] == [
        {"root": {"job": {"tag.a0001": {}}}}
    ]


def test_a_manifest_renamed_by_a_dead_process_stays_once_its_directory_is_swept(
    recorder: Recorder, tmp_path: Path
) -> None:
    storage = PosixStorage(tmp_path / "disk", recorder)
    storage.ensure("job/tag.a0001")
    with storage.directory("job/tag.a0001") as directory:
        fd = recorder.create("manifest.json.tmp", directory)
        recorder.write(fd, b"{}", 0)
        recorder.sync(fd)
        recorder.close(fd)
        recorder.rename("manifest.json.tmp", "manifest.json", directory, replace=False)
    assert any("manifest.json" not in str(left) for _, left in cuts(recorder, len(recorder.steps)))
    open_root(tmp_path / "disk", recorder).delete_unfinished("job", "tag.a0001", [])
    assert [left for _, left in cuts(recorder, len(recorder.steps))] == [
        {"job": {"tag.a0001": {"manifest.json": b"{}"}}}
    ]


def test_a_tag_removed_by_a_dead_process_stays_removed(recorder: Recorder, tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path / "disk", recorder)
    storage.ensure("job/tag.a0001")
    with storage.directory("job") as directory:
        recorder.remove_directory("tag.a0001", directory)
    assert open_root(tmp_path / "disk", recorder).delete_tag("job", "tag.a0001")
    assert [left for _, left in cuts(recorder, len(recorder.steps))] == [{"job": {}}]


def test_a_pin_and_its_removal_survive_a_power_cut(recorder: Recorder, tmp_path: Path) -> None:
    storage = open_root(tmp_path / "disk", recorder)
    storage.pin("job", "tag.a0001")
    assert [left for _, left in cuts(recorder, len(recorder.steps))] == [
        {".ckptd": {"pins": {"job": {"tag.a0001": b""}}}}
    ]
    storage.unpin("job", "tag.a0001")
    assert [left for _, left in cuts(recorder, len(recorder.steps))] == [
        {".ckptd": {"pins": {"job": {}}}}
    ]


def test_a_pin_made_by_a_dead_process_survives_a_power_cut(
    recorder: Recorder, tmp_path: Path
) -> None:
    storage = PosixStorage(tmp_path / "disk", recorder)
    storage.ensure(".ckptd/pins/job")
    with storage.directory(".ckptd/pins/job") as directory:
        recorder.close(recorder.create("tag.a0001", directory))
    Repository(storage).pin("job", "tag.a0001")
    assert [left for _, left in cuts(recorder, len(recorder.steps))] == [
        {".ckptd": {"pins": {"job": {"tag.a0001": b""}}}}
    ]


def test_newest_of_a_job_without_checkpoints_stays_removed(
    recorder: Recorder, tmp_path: Path
) -> None:
    storage = open_root(tmp_path / "disk", recorder)
    PosixStorage(tmp_path / "disk", recorder).ensure("job")
    storage.publish_newest("job", "tag.a0001")
    storage.remove_newest("job")
    assert [left for _, left in cuts(recorder, len(recorder.steps))] == [{"job": {}}]


def test_pending_changes_are_those_that_can_be_reached(recorder: Recorder, tmp_path: Path) -> None:
    with opened_directory(recorder, str(tmp_path / "disk")) as directory:
        fd = recorder.create("a", directory)
        recorder.sync_directory(directory)
        recorder.write(fd, b"abc", 0)
        assert [str(step) for step in at(recorder).pending()] == ["write 1 [0:3]"]
        recorder.unlink("a", directory)
        recorder.sync_directory(directory)
        assert at(recorder).pending() == []
        recorder.close(fd)
    assert recorder.steps[0].node == TOP


def test_parents_that_a_dead_process_made_are_durable_once_they_are_synced(
    recorder: Recorder, tmp_path: Path
) -> None:
    """A daemon was killed after it had made the directories for its journal, and before
    it had synced them.
    """
    path = tmp_path / "disk" / "state" / "host" / "journal"
    for made in (path.parents[1], path.parent, path):
        with opened_directory(recorder, str(made.parent)) as directory:
            recorder.make_directory(made.name, directory)
    assert len({str(left) for _, left in cuts(recorder, len(recorder.steps))}) > 1
    sync_parents(recorder, path)
    assert [left for _, left in cuts(recorder, len(recorder.steps))] == [
        {"state": {"host": {"journal": {}}}}
    ]
