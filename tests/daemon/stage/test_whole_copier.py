"""Tests copies that are whole, and copies that keep chains: within a kind of root, and to
another kind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from obstore.store import MemoryStore

from ckptd.agent import Checkpoint
from ckptd.daemon.commands.cli import main
from ckptd.daemon.commands.copying import Copier
from ckptd.daemon.commands.report import verification
from ckptd.daemon.stage import whole_copier
from ckptd.daemon.stage.whole_copier import WholeCopier
from ckptd.shared import names
from ckptd.shared.errors import AlreadyExists
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.location import Location, Url
from ckptd.shared.storage import locate
from ckptd.shared.storage.bucket import Bucket
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.storage.repository import Repository
from tests.support import chains
from tests.support.daemons import Home, home

TAGS = [chains.tag(step) for step in chains.STEPS]


@pytest.fixture(scope="module")
def saved() -> Iterator[Home]:
    """A root with a job whose checkpoints have chains."""
    with home() as place:
        chains.save_job(place)
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


def copied(source: Location, target: Location, *, whole: bool = False) -> list[str]:
    """Copy, and return the tags of the copies."""
    rows = list(Copier(source, target, whole=whole).run())
    assert [row["error"] for row in rows] == [None] * len(rows)
    return [row["tag"] for row in rows if row["copied"]]


def manifests(root: Location) -> dict[str, Manifest]:
    repository = locate.open_root(root)
    return {tag: repository.read_manifest("job", tag) for tag in repository.tags("job")}


def assert_sound(root: Location, *tags: str) -> None:
    """Assert that these are the checkpoints in a root, and that each has the bits of its
    step.
    """
    assert list(manifests(root)) == list(tags)
    assert [result["error"] for result in verification(root)] == [None] * len(tags)
    for tag in tags:
        with Checkpoint.open(root / "job", tag) as checkpoint:
            assert checkpoint.step is not None
            chains.assert_state(checkpoint.load(), checkpoint.step)


def files(root: Location, tag: str) -> list[str]:
    return [name for name in locate.open_root(root).files("job", tag) if names.part_of(name)]


def test_the_job_of_these_tests_has_chains(saved: Home) -> None:
    assert tuple(found.chain for found in manifests(saved.root).values()) == chains.CHAINS


def test_a_copy_keeps_the_chain(saved: Home, target: Location, tmp_path: Path) -> None:
    assert copied(saved.root, target) == TAGS
    assert_sound(target, *TAGS)
    assert manifests(target) == manifests(saved.root)
    assert copied(target, tmp_path / "back") == TAGS
    assert_sound(tmp_path / "back", *TAGS)
    rooms = [
        locate.open_root(root).storage.exclusive_bytes([f"job/{tag}" for tag in TAGS])
        for root in (saved.root, tmp_path / "back")
    ]
    assert rooms[0] == rooms[1], "each file is in the copy once"


def test_a_checkpoint_is_copied_with_its_chain_alone(saved: Home, target: Location) -> None:
    assert copied(saved.root / "job" / TAGS[-1], target) == TAGS[-1:]
    assert_sound(target, TAGS[-1])
    assert manifests(target)[TAGS[-1]].chain == chains.CHAINS[-1]


def test_files_are_linked_in_a_copy_whose_origin_is_gone(saved: Home, tmp_path: Path) -> None:
    """The checkpoint that wrote the base may have been deleted before the others came."""
    for step in (4, 5, 6):
        assert copied(saved.root / "job" / chains.tag(step), tmp_path) == [chains.tag(step)]
    directories = [tmp_path / "job" / tag for tag in TAGS[3:]]
    taken = [
        {(f.stat().st_ino, f.stat().st_size) for f in place.glob("rank-*")} for place in directories
    ]
    # the whole base, and the deltas of the steps 3 and 4
    assert len(taken[0] & taken[1] & taken[2]) == 3
    assert len(taken[1] & taken[2]) == 4
    for place in directories[:2]:
        shutil.rmtree(place)
    assert_sound(tmp_path, TAGS[-1])


def test_a_whole_copy_has_no_deltas_and_no_links(
    saved: Home, target: Location, tmp_path: Path
) -> None:
    counted = list[int]()
    copier = Copier(saved.root, target, whole=True)
    rows = list(copier.run(counted.append))
    assert sum(counted) == sum(
        found.parts[0].raw_bytes if found.chain else found.nbytes
        for found in manifests(saved.root).values()
    )
    assert_sound(target, *TAGS)
    assert [row["tag"] for row in rows] == TAGS
    for row, (tag, found) in zip(rows, manifests(target).items(), strict=True):
        source = manifests(saved.root)[tag]
        assert (row["tag"], row["bytes"]) == (tag, found.nbytes)
        assert (found.chain, found.new_bytes) == (0, found.nbytes)
        assert not {"linked-files", "deltas"} & set(found.features)
        assert source.with_parts(found.parts) == found
        assert len(files(target, tag)) == found.parts[0].files
    assert copied(saved.root, target, whole=True) == []
    assert copied(target, tmp_path / "back") == TAGS
    assert_sound(tmp_path / "back", *TAGS)


def test_what_an_interrupted_whole_copy_has_left_is_replaced(saved: Home, target: Location) -> None:
    source = saved.root / "job" / TAGS[-1]

    def interrupt(length: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Copier(source, target, whole=True).run(interrupt))
    assert copied(source, target, whole=True) == TAGS[-1:]
    assert_sound(target, TAGS[-1])
    assert len(files(target, TAGS[-1])) == manifests(target)[TAGS[-1]].parts[0].files


def test_a_copy_of_the_other_kind_is_another_checkpoint(saved: Home, target: Location) -> None:
    whole = saved.root / "job" / TAGS[-1]
    assert copied(whole, target) == TAGS[-1:]
    with pytest.raises(AlreadyExists, match="is a copy with linked files: delete it"):
        Copier(whole, target, whole=True)
    repository = locate.open_root(target)
    repository.delete_files("job", TAGS[-1], [*repository.files("job", TAGS[-1])])
    assert copied(whole, target, whole=True) == TAGS[-1:]
    with pytest.raises(AlreadyExists, match="is another checkpoint than"):
        Copier(whole, target)


def test_a_damaged_base_is_not_copied(saved: Home, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(saved.root, source)
    place = source / "job" / TAGS[-1]
    (base,) = [
        f
        for f in place.glob("rank-*")
        if f.stat().st_size == max(f.stat().st_size for f in place.glob("rank-*"))
    ]
    with base.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * 64)
    ran = CliRunner().invoke(
        main, ["copy", str(place), str(tmp_path / "target"), "--whole", "--json"]
    )
    assert ran.exit_code == 13
    assert "does not match its checksum" in json.loads(ran.stdout)[0]["error"]
    assert not (tmp_path / "target" / "job").exists() or not list(
        (tmp_path / "target" / "job").iterdir()
    )


def test_bytes_that_a_store_has_changed_are_found(
    saved: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WholeCopier._write_whole

    def wrongly(self: WholeCopier, *arguments: object) -> object:
        entry = write(self, *arguments)  # type: ignore[arg-type]
        with (tmp_path / "job" / TAGS[-1] / entry.file).open("r+b") as file:
            file.seek(8192)
            file.write(b"\xff" * 64)
        return entry

    monkeypatch.setattr(whole_copier.WholeCopier, "_write_whole", wrongly)
    (row,) = Copier(saved.root / "job" / TAGS[-1], tmp_path, whole=True).run()
    assert "does not match its checksum" in row["error"]
    assert Repository.tags(locate.open_root(tmp_path), "job") == []
