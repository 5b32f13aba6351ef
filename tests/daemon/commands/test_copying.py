"""Tests `ckptd copy` between directories and object stores: what is copied, verified,
continued and refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from click.testing import CliRunner, Result
from obstore.store import MemoryStore

from ckptd.agent import Agent, Checkpoint
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.copying import Copier
from ckptd.daemon.stage.copier import CheckpointCopier
from ckptd.shared import names
from ckptd.shared.errors import AlreadyExists, Busy, InvalidRequest, NotFound
from ckptd.shared.formats import manifest as manifests
from ckptd.shared.formats.scatter import verify
from ckptd.shared.location import Location, Url
from ckptd.shared.storage import locate
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.storage.repository import Repository
from tests.shared.samples import write_checkpoint
from tests.support import trainers
from tests.support.daemons import Home, home, running
from tests.support.storage import part_in

STEPS = (5, 6, 7)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A root with three checkpoints of one job, one of them pinned, and one of
    another job.
    """
    with home() as place, running(place, "--codec", "raw", "--keep-last", "0", forked=True):
        for job in ("gpt", "bert"):
            agent = Agent(job, socket=place.socket)
            for step in STEPS if job == "gpt" else STEPS[:1]:
                agent.snapshot(trainers.expected(step), step=step).wait("durable")
            agent.close()
        locate.open_root(place.root).pin("gpt", "step-00000006.a0001")
        yield place


@pytest.fixture(params=["directory", "store"])
def target(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Location:
    """The place of a new root."""
    if request.param == "directory":
        return tmp_path / "copies"
    made = dict[Url, ObjectStorage]()

    def storage(url: Url) -> ObjectStorage:
        if url not in made:
            made[url] = ObjectStorage(Bucket(MemoryStore(), str(url)), names.new_nonce().hex()[:16])
        return made[url]

    monkeypatch.setattr(locate, "object_storage", storage)
    return Url("s3", "bucket", (names.new_nonce().hex(),))


def tags_in(root: Location) -> dict[str, list[str]]:
    repository = locate.open_root(root)
    return {job: repository.tags(job) for job in repository.jobs()}


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}.a0001" for number in numbers]


def assert_sound(root: Location, job: str = "gpt") -> None:
    """Assert that each checkpoint has the state of its step, bit for bit."""
    for tag in locate.open_root(root).tags(job):
        with Checkpoint.open(root / job, tag) as checkpoint:
            assert checkpoint.step is not None
            trainers.assert_equal(checkpoint.load(), checkpoint.step)


def copied(source: Location, target: Location) -> list[str]:
    return [row["tag"] for row in Copier(source, target).run() if row["copied"]]


def test_a_root_is_copied_with_its_jobs_pins_and_hint(saved: Home, target: Location) -> None:
    counted = list[int]()
    copier = Copier(saved.root, target)
    rows = list(copier.run(counted.append))
    assert sum(counted) == sum(row["bytes"] for row in rows)
    assert [(row["job"], row["tag"], row["error"]) for row in rows] == [
        ("bert", *steps(5), None), *(("gpt", tag, None) for tag in steps(*STEPS)),
    ]  # fmt: skip
    assert tags_in(target) == {"bert": steps(5), "gpt": steps(*STEPS)}
    repository = locate.open_root(target)
    assert (repository.pins("gpt"), repository.read_newest("gpt")) == (set(steps(6)), *steps(7))
    assert names.is_identity(repository.identity())
    assert repository.identity() != locate.open_root(saved.root).identity()
    assert_sound(target)
    for tag in steps(*STEPS):
        assert repository.read_manifest_document("gpt", tag) == locate.open_root(
            saved.root
        ).read_manifest_document("gpt", tag)
    assert copied(saved.root, target) == []


def test_one_job_or_one_checkpoint_is_copied(saved: Home, target: Location) -> None:
    assert copied(saved.root / "gpt" / "step-00000006", target) == steps(6)
    assert locate.open_root(target).read_newest("gpt") == steps(6)[0]
    assert copied(saved.root / "gpt", target) == steps(5, 7)
    assert tags_in(target) == {"gpt": steps(*STEPS)}
    assert locate.open_root(target).read_newest("gpt") == steps(7)[0]


def test_a_copy_comes_back(saved: Home, target: Location, tmp_path: Path) -> None:
    copied(saved.root, target)
    assert copied(target, tmp_path / "back") == [*steps(5), *steps(*STEPS)]
    assert_sound(tmp_path / "back")


@pytest.mark.parametrize("ends_after", [1, 4, 7])
def test_an_interrupted_copy_goes_on(saved: Home, target: Location, ends_after: int) -> None:
    blocks = 0

    def interrupt(length: int) -> None:
        nonlocal blocks
        blocks += 1
        if blocks == ends_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Copier(saved.root / "gpt", target).run(interrupt))
    committed = {tag for tag in steps(*STEPS) if locate.open_root(target).has_manifest("gpt", tag)}
    assert set(copied(saved.root / "gpt", target)) == set(steps(*STEPS)) - committed
    assert_sound(target)


def test_what_a_killed_copy_has_left_is_verified(saved: Home, tmp_path: Path) -> None:
    """A file of the right length may have a hole: its room was allocated before its
    bytes came.
    """
    copied(saved.root / "gpt", tmp_path)
    tag = tmp_path / "gpt" / steps(6)[0]
    (tag / "manifest.json").unlink()
    damaged = part_in(tag)
    with damaged.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))
    assert copied(saved.root / "gpt", tmp_path) == steps(6)
    assert_sound(tmp_path)
    (tag / "manifest.json").unlink()
    os.truncate(part_in(tag), 4096)
    assert copied(saved.root / "gpt", tmp_path) == steps(6)
    assert_sound(tmp_path)


def test_a_metadata_object_that_a_copy_has_left_damaged_is_written_again(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "own", step=5, attempt=1)
    own, directory = locate.open_root(tmp_path / "own"), tmp_path / "own" / "gpt" / manifest.tag
    (directory / "manifest.json").unlink()
    with mock.patch.object(manifests, "MOST_INLINE", 0):
        document, objects = manifest.split()
    own.publish_manifest("gpt", manifest.tag, document, objects=objects)
    assert copied(tmp_path / "own" / "gpt", tmp_path / "copies") == [manifest.tag]
    (name,) = objects
    there = tmp_path / "copies" / "gpt" / manifest.tag
    (there / "manifest.json").unlink()
    (there / name).write_bytes(bytes(len(objects[name])))
    assert copied(tmp_path / "own" / "gpt", tmp_path / "copies") == [manifest.tag]
    assert (there / name).read_bytes() == objects[name]


def test_files_that_were_linked_are_linked_again(saved: Home, tmp_path: Path) -> None:
    assert {file.stat().st_nlink for file in (saved.root / "gpt").rglob("*.ckpt")} == {1, 2}
    copied(saved.root / "gpt", tmp_path)
    for file in (saved.root / "gpt").rglob("*.ckpt"):
        assert (tmp_path / file.relative_to(saved.root)).stat().st_nlink == file.stat().st_nlink


@pytest.fixture
def own(saved: Home, tmp_path: Path) -> Path:
    """A root of this test, with the same checkpoints."""
    copied(saved.root, tmp_path / "own")
    return tmp_path / "own"


def test_a_damaged_checkpoint_is_told_and_leaves_nothing(own: Path, target: Location) -> None:
    damaged = part_in(own / "gpt" / steps(6)[0])
    data = bytearray(damaged.read_bytes())
    data[4100] ^= 1
    damaged.write_bytes(data)
    (own / "gpt" / steps(5)[0] / "manifest.json").write_bytes(b"{}")
    rows = {row["tag"]: row for row in Copier(own / "gpt", target).run()}
    assert [rows[tag]["copied"] for tag in steps(*STEPS)] == [False, False, True]
    assert "does not match its checksum" in rows[steps(6)[0]]["error"]
    assert rows[steps(5)[0]]["error"].startswith("gpt/step-00000005.a0001: ")
    assert [tag for tag in steps(*STEPS) if locate.open_root(target).files("gpt", tag)] == steps(7)
    assert_sound(target)


def test_a_copy_that_the_destination_damages_is_made_again_once(
    saved: Home, tmp_path: Path
) -> None:
    calls = list[str]()

    def damage(self: CheckpointCopier, one: Any, part: Any) -> None:
        calls.append(part.file)
        if len(calls) == 1:
            file = tmp_path / one.job / one.tag / part.file
            os.truncate(file, 4096)
        reader = self._to.open_part(one.job, one.tag, part.file, part.index_sha256)
        verify(reader)
        reader.close()

    with mock.patch.object(CheckpointCopier, "_verify", damage):
        assert copied(saved.root / "gpt" / "step-00000005", tmp_path) == steps(5)
    assert len(calls) == 2
    assert_sound(tmp_path)


@pytest.mark.parametrize("damaged", [False, True])
def test_another_checkpoint_of_the_same_name_is_refused(
    own: Path, target: Location, damaged: bool
) -> None:
    copied(own / "gpt" / "step-00000005", target)
    repository = locate.open_root(target)
    other = msgspec.structs.replace(
        repository.read_manifest("gpt", *steps(5)), created="2020-01-01T00:00:00+00:00"
    )
    repository.delete_files("gpt", steps(5)[0], ["manifest.json"])
    repository.publish_manifest("gpt", steps(5)[0], b"damaged" if damaged else other.encode())
    with pytest.raises(
        AlreadyExists,
        match=r"step-00000005\.a0001 is another checkpoint than .*: copy to another root$",
    ):
        Copier(own / "gpt", target)


def test_what_cannot_be_copied_is_refused(own: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="lies in .* already: name another root to copy to"):
        Copier(own / "gpt", own)
    with pytest.raises(InvalidRequest, match="lies in .* already"):
        Copier(own, own)
    with pytest.raises(NotFound):
        Copier(own / "none", tmp_path / "x")
    (tmp_path / "empty" / ".ckptd").mkdir(parents=True)
    with pytest.raises(NotFound, match="holds no checkpoint"):
        Copier(tmp_path / "empty", tmp_path / "x")
    alone = tmp_path / "alone"
    (own / "gpt" / steps(5)[0]).rename(alone)
    with pytest.raises(
        InvalidRequest,
        match="is a checkpoint outside every root, which belongs to no job: `ckptd adopt`",
    ):
        Copier(alone, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_job_is_no_destination(own: Path, saved: Home) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean the root {own}, with the job 'gpt'"):
        Copier(saved.root, own / "gpt")


def test_a_second_copy_to_the_same_root_is_refused_meanwhile(saved: Home, target: Location) -> None:
    first = Copier(saved.root, target).run()
    next(first)
    with pytest.raises(Busy, match="another `ckptd copy` writes to .*: wait for it"):
        list(Copier(saved.root, target).run())
    list(first)
    assert [row["copied"] for row in Copier(saved.root, target).run()] == [False] * 4


def test_a_checkpoint_that_another_copy_has_committed_stays(own: Path, target: Location) -> None:
    """Plan two copies of one checkpoint, and delete the checkpoint at the source
    between them.
    """
    late = Copier(own / "gpt" / "step-00000005", target)
    copied(own / "gpt" / "step-00000005", target)
    repository = locate.open_root(own)
    repository.delete_files("gpt", steps(5)[0], repository.files("gpt", steps(5)[0]))
    assert [row["error"] for row in late.run()] == [None]
    assert_sound(target)


def test_a_checkpoint_that_is_deleted_before_it_is_copied_is_told(
    own: Path, target: Location
) -> None:
    late = Copier(own / "gpt" / "step-00000006", target)
    repository = locate.open_root(own)
    repository.delete_files("gpt", steps(6)[0], repository.files("gpt", steps(6)[0]))
    (row,) = late.run()
    assert (row["copied"], row["error"]) == (False, f"no checkpoint gpt/{steps(6)[0]} in {own}")
    assert locate.open_root(target).pins("gpt") == set()


def ckptd(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["copy", *map(str, arguments)])


def test_the_command_prints_a_line_or_a_row_for_each(own: Path, tmp_path: Path) -> None:
    done = ckptd(own / "gpt" / "step-00000005", tmp_path / "x")
    assert (done.exit_code, done.stdout.partition(" (")[0]) == (
        0,
        "gpt/step-00000005.a0001: copied",
    )
    done = ckptd(own / "gpt" / "step-00000005", tmp_path / "x")
    assert (done.exit_code, done.stdout) == (0, "gpt/step-00000005.a0001: is there already\n")
    (own / "gpt" / steps(6)[0] / "manifest.json").write_bytes(b"{}")
    done = ckptd(own / "gpt", tmp_path / "x", "--json")
    rows = json.loads(done.stdout)
    assert (done.exit_code, [(row["tag"], row["copied"],
        row["error"] is None) for row in rows]) == (
        13, [(steps(6)[0], False, False), (steps(5)[0], False, True), (steps(7)[0], True, True)],
    )  # fmt: skip
    assert ckptd(own / "gpt", own).exit_code == 2


def test_the_repository_of_a_copy_is_one(own: Path) -> None:
    assert isinstance(locate.open_root(own), Repository)
