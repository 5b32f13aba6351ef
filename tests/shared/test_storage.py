"""Tests checkpoints in a directory tree: commits, the hint, deletion, and links that are not followed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound
from ckptd.shared.fs import PosixFileSystem
from ckptd.shared.locks import exclude, release
from ckptd.shared.manifest import Manifest
from ckptd.shared.names import MANIFEST, part_file
from ckptd.shared.scatter import verify
from ckptd.shared.storage import PosixStorage, StandaloneStorage, Storage, check_manifest_place
from tests.shared.samples import NONCE, write_checkpoint

TAG = "step-00001000.a0002"
PART = part_file(0, NONCE)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


class Recorder(PosixFileSystem):
    """Records the names of the directories that were made, and how often any was synced."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def make_directory(self, name: str, directory: int) -> bool:
        made = super().make_directory(name, directory)
        self.steps.append(f"make {name} {made}")
        return made

    def sync_directory(self, directory: int) -> None:
        self.steps.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{directory}'))}")
        super().sync_directory(directory)


def test_posix_storage_implements_the_protocol(storage: PosixStorage) -> None:
    checked: Storage = storage
    assert checked.jobs() == []


# -- directories


def test_ensure_syncs_a_parent_before_anything_inside_counts(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    recorder = Recorder()
    storage = PosixStorage(root, recorder)
    storage.make_tag("gpt", TAG)
    assert recorder.steps == ["make gpt True", "sync root", f"make {TAG} True", "sync gpt"]
    assert (root / "gpt" / TAG).is_dir()
    recorder.steps.clear()
    storage.make_tag("gpt", TAG)
    assert recorder.steps == ["make gpt False", f"make {TAG} False"]


def test_an_empty_root_holds_nothing(storage: PosixStorage) -> None:
    assert storage.jobs() == []
    assert storage.tags("gpt") == []
    assert storage.files("gpt", TAG) == []
    assert storage.read_newest("gpt") is None
    with pytest.raises(NotFound, match=f"no checkpoint gpt/{TAG} in {storage.root}"):
        storage.read_manifest("gpt", TAG)


def test_a_root_that_is_gone_is_an_error_not_an_empty_list(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PosixStorage(tmp_path / "gone").jobs()


def test_tags_of_a_root_that_is_gone_are_an_error_not_an_empty_list(tmp_path: Path) -> None:
    """An empty list means that nothing was ever saved. `recover` would then start a new history while a mount is missing."""
    with pytest.raises(FileNotFoundError):
        PosixStorage(tmp_path / "gone").tags("gpt")


def test_listing_leaves_out_what_is_not_ours(tmp_path: Path, storage: PosixStorage) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / ".ckptd").mkdir()
    (tmp_path / "README").write_text("not a job")
    (tmp_path / "link").symlink_to("gpt")
    (tmp_path / "gpt" / "notes").mkdir()
    (tmp_path / "gpt" / "newest").write_text("x")
    (tmp_path / "gpt" / "best.a0001").mkdir()
    assert storage.jobs() == ["gpt"]
    assert storage.tags("gpt") == ["best.a0001", TAG]
    assert storage.files("gpt", TAG) == ["manifest.json", PART]


def test_a_directory_that_cannot_be_a_job_is_not_listed(tmp_path: Path, storage: PosixStorage) -> None:
    """The root of an ext4 file system has a `lost+found` that only root may list."""
    (tmp_path / "lost+found").mkdir(0o700)
    (tmp_path / "gpt").mkdir()
    assert storage.jobs() == ["gpt"]


# -- manifests


def test_publish_and_read_a_manifest(tmp_path: Path, storage: PosixStorage) -> None:
    manifest = write_checkpoint(tmp_path)
    os.unlink(tmp_path / "gpt" / TAG / "manifest.json")
    with pytest.raises(NotFound):
        storage.read_manifest("gpt", TAG)
    storage.publish_manifest("gpt", TAG, manifest.encode())
    assert storage.read_manifest("gpt", TAG) == manifest
    assert (tmp_path / "gpt" / TAG / "manifest.json").read_bytes() == manifest.encode()
    assert storage.files("gpt", TAG) == ["manifest.json", PART]


def test_a_commit_is_never_overwritten(tmp_path: Path, storage: PosixStorage) -> None:
    manifest = write_checkpoint(tmp_path)
    with pytest.raises(FileExistsError):
        storage.publish_manifest("gpt", TAG, msgspec.structs.replace(manifest, seq=8).encode())
    assert storage.read_manifest("gpt", TAG) == manifest


def test_a_commit_needs_its_directory(storage: PosixStorage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.publish_manifest("gpt", TAG, b"{}")


def test_a_refused_commit_leaves_a_directory_that_can_be_deleted(tmp_path: Path, storage: PosixStorage) -> None:
    manifest = write_checkpoint(tmp_path)
    with pytest.raises(FileExistsError):
        storage.publish_manifest("gpt", TAG, manifest.encode())
    storage.delete_files("gpt", TAG, ["manifest.json", PART])
    assert storage.delete_tag("gpt", TAG)
    assert not (tmp_path / "gpt" / TAG).exists()


def test_a_damaged_manifest_is_named_and_not_called_missing(tmp_path: Path, storage: PosixStorage) -> None:
    write_checkpoint(tmp_path)
    path = tmp_path / "gpt" / TAG / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(IntegrityError, match=f"^gpt/{TAG}: manifest is cut short"):
        storage.read_manifest("gpt", TAG)
    path.write_bytes(b"")
    with pytest.raises(IntegrityError):
        storage.read_manifest("gpt", TAG)
    path.write_bytes(_newer(whole))
    with pytest.raises(NewerFormat, match=f"^gpt/{TAG}: "):
        storage.read_manifest("gpt", TAG)


def _newer(data: bytes) -> bytes:
    import hashlib

    body = data[: data.index(b'"sha256"')].replace(b'"version": 1', b'"version": 2')
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


@pytest.mark.parametrize("place", ["step-00001001.a0002", "step-00001000.a0003", "best.a0002", "step-000001000.a0002"])
def test_a_manifest_in_a_wrong_place_is_no_checkpoint(tmp_path: Path, storage: PosixStorage, place: str) -> None:
    write_checkpoint(tmp_path)
    shutil.copytree(tmp_path / "gpt" / TAG, tmp_path / "gpt" / place)
    with pytest.raises(IntegrityError, match=rf"gpt/{place}: the manifest there is that of gpt/{TAG}"):
        storage.read_manifest("gpt", place)


def test_check_manifest_place(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path)
    check_manifest_place(manifest, "gpt", TAG)
    users = msgspec.structs.replace(manifest, tag="best.a0002")
    check_manifest_place(users, "gpt", "best.a0002")
    wrong: list[tuple[Manifest, str]] = [
        (msgspec.structs.replace(manifest, step=1001), TAG),
        (msgspec.structs.replace(manifest, step=None), TAG),
        (msgspec.structs.replace(manifest, attempt=1), TAG),
        (users, TAG),
        (users, "best.a0003"),
        (msgspec.structs.replace(manifest, tag="nonsense"), "nonsense"),
    ]
    for other, tag in wrong:
        with pytest.raises(IntegrityError):
            check_manifest_place(other, "gpt", tag)


# -- parts


def test_open_part(tmp_path: Path, storage: PosixStorage) -> None:
    manifest = write_checkpoint(tmp_path, world_size=2)
    for part in manifest.parts:
        reader = storage.open_part("gpt", TAG, part.file, part.index_sha256)
        try:
            assert verify(reader) == part.raw_bytes
            assert reader.index.rank == part.rank
            assert reader.name == f"gpt/{TAG}/{part.file}"
        finally:
            os.close(reader.fileno())


def descriptors_into(path: Path) -> list[str]:
    """Return the descriptors that this process has open below `path`."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith(str(path))]


def test_a_missing_or_damaged_part_is_an_integrity_error_and_leaks_no_descriptor(tmp_path: Path, storage: PosixStorage) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(IntegrityError, match=f"^gpt/{TAG}/{part_file(1, NONCE)} is missing"):
        storage.open_part("gpt", TAG, part_file(1, NONCE))
    with pytest.raises(IntegrityError, match=f"^gpt/{TAG}/{PART}: index"):
        storage.open_part("gpt", TAG, PART, "0" * 64)
    os.truncate(tmp_path / "gpt" / TAG / PART, 4096)
    with pytest.raises(IntegrityError, match=f"^gpt/{TAG}/{PART}: part trailer"):
        storage.open_part("gpt", TAG, PART)
    assert descriptors_into(tmp_path) == []


# -- the hint


def test_newest(tmp_path: Path, storage: PosixStorage) -> None:
    (tmp_path / "gpt").mkdir()
    storage.publish_newest("gpt", TAG)
    assert (tmp_path / "gpt" / "newest").read_bytes() == b"step-00001000.a0002\n"
    assert storage.read_newest("gpt") == TAG
    storage.publish_newest("gpt", "step-00001001.a0002")
    assert storage.read_newest("gpt") == "step-00001001.a0002"
    assert [p.name for p in (tmp_path / "gpt").iterdir()] == ["newest"]


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"gpt\n", b"../../x\n", TAG.encode() + b"\n\n", TAG.encode() + b" ", b"\xff" * 20, TAG.encode() * 20]
)
def test_an_impossible_hint_is_ignored(tmp_path: Path, storage: PosixStorage, text: bytes) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "newest").write_bytes(text)
    assert storage.read_newest("gpt") is None


# -- deletion


def test_delete_files_and_tag(tmp_path: Path, storage: PosixStorage) -> None:
    write_checkpoint(tmp_path, world_size=2)
    assert storage.delete_tag("gpt", TAG) is False  # the directory is not empty
    storage.delete_files("gpt", TAG, ["manifest.json", "not there"])
    assert storage.files("gpt", TAG) == [PART, part_file(1, NONCE)]
    storage.delete_files("gpt", TAG, [PART, part_file(1, NONCE)])
    storage.delete_files("gpt", TAG, [PART])  # deleting it again does nothing
    assert storage.delete_tag("gpt", TAG) is True
    assert storage.delete_tag("gpt", TAG) is True
    assert storage.tags("gpt") == []
    storage.delete_files("gpt", TAG, [PART])
    assert list((tmp_path / "gpt").iterdir()) == []


def test_data_files_go_with_their_part(tmp_path: Path, storage: PosixStorage) -> None:
    write_checkpoint(tmp_path, world_size=2, files=3)
    assert [len([f for f in storage.files("gpt", TAG) if f.startswith(f"rank-0000{rank}")]) for rank in (0, 1)] == [3, 3]
    other = part_file(0, NONCE[::-1], 1)  # of a running save
    (tmp_path / "gpt" / TAG / other).write_bytes(b"")
    storage.delete_files("gpt", TAG, [PART])
    assert storage.files("gpt", TAG) == ["manifest.json", *sorted([other, *(part_file(1, NONCE, number) for number in (0, 1, 2))])]
    (tmp_path / "gpt" / TAG / part_file(1, NONCE)).unlink()  # deleted earlier, except for its data files
    storage.delete_files("gpt", TAG, [part_file(1, NONCE)])
    assert storage.files("gpt", TAG) == ["manifest.json", other]


def test_a_part_of_several_files_is_opened(tmp_path: Path, storage: PosixStorage) -> None:
    (part,) = write_checkpoint(tmp_path, files=3).parts
    reader = storage.open_part("gpt", TAG, part.file, part.index_sha256)
    assert (reader.nbytes, 1 + len(reader.index.files), part.files) == (part.bytes, 3, 3)
    assert verify(reader) == part.raw_bytes
    os.close(reader.fileno())
    data_file = tmp_path / "gpt" / TAG / part_file(0, NONCE, 2)
    moved = data_file.with_name("elsewhere")
    data_file.rename(moved)
    with pytest.raises(IntegrityError, match=f"^gpt/{TAG}/{PART}: its data file {data_file.name} is missing"):
        storage.open_part("gpt", TAG, PART)
    data_file.symlink_to(moved)
    with pytest.raises(OSError, match="symbolic links"):
        storage.open_part("gpt", TAG, PART)


def test_a_directory_with_a_file_of_another_program_is_not_deleted(tmp_path: Path, storage: PosixStorage) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "gpt" / TAG / "notes.txt").write_text("mine")
    storage.delete_files("gpt", TAG, ["manifest.json", PART])
    assert storage.delete_tag("gpt", TAG) is False
    assert (tmp_path / "gpt" / TAG / "notes.txt").read_text() == "mine"


def test_deletion_is_synced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    recorder = Recorder()
    storage = PosixStorage(tmp_path, recorder)
    storage.delete_files("gpt", TAG, ["manifest.json"])
    assert recorder.steps == [f"sync {TAG}"]
    storage.delete_files("gpt", TAG, [PART])
    storage.delete_tag("gpt", TAG)
    assert recorder.steps == [f"sync {TAG}", f"sync {TAG}", "sync gpt"]


# -- links


USES: list[Callable[[PosixStorage], object]] = [
    lambda s: s.read_manifest("gpt", TAG),
    lambda s: s.open_part("gpt", TAG, PART),
    lambda s: s.publish_manifest("gpt", TAG, b"{}"),
    lambda s: s.publish_newest("gpt", TAG),
    lambda s: s.make_tag("gpt", TAG),
]


@pytest.mark.parametrize("use", USES, ids=["read_manifest", "open_part", "publish_manifest", "publish_newest", "make_tag"])
def test_a_job_that_is_a_link_is_not_followed(tmp_path: Path, use: Callable[[PosixStorage], object]) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    write_checkpoint(outside)
    root.mkdir()
    (root / "gpt").symlink_to(outside / "gpt")
    before = sorted(str(p) for p in outside.rglob("*"))
    with pytest.raises((OSError, NotFound)):
        use(PosixStorage(root))
    assert sorted(str(p) for p in outside.rglob("*")) == before


@pytest.mark.parametrize("link", ["gpt", f"gpt/{TAG}"], ids=["job", "tag"])
def test_nothing_is_deleted_through_a_link(tmp_path: Path, link: str) -> None:
    """Something else has taken the name of a directory. The files that ckptd had there are gone, and files elsewhere are not ckptd's."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    write_checkpoint(outside)
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(outside / link)
    before = sorted(str(p) for p in outside.rglob("*"))
    storage = PosixStorage(root)
    storage.delete_files("gpt", TAG, ["manifest.json", PART])
    assert storage.files("gpt", TAG) == []
    assert storage.delete_tag("gpt", TAG) is True
    assert sorted(str(p) for p in outside.rglob("*")) == before
    assert (root / link).is_symlink()


@pytest.mark.parametrize("taken", ["gpt", f"gpt/{TAG}"], ids=["job", "tag"])
def test_files_of_a_directory_that_has_become_a_file_are_gone(tmp_path: Path, storage: PosixStorage, taken: str) -> None:
    write_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / taken)
    (tmp_path / taken).write_text("mine")
    assert storage.files("gpt", TAG) == []
    storage.delete_files("gpt", TAG, ["manifest.json", PART])
    assert storage.delete_tag("gpt", TAG) is True
    assert (tmp_path / taken).read_text() == "mine"


def test_a_directory_in_the_place_of_a_part_is_left_alone(tmp_path: Path, storage: PosixStorage) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "gpt" / TAG / PART).unlink()
    (tmp_path / "gpt" / TAG / PART).mkdir()
    storage.delete_files("gpt", TAG, [PART, "manifest.json"])
    assert storage.files("gpt", TAG) == [PART]
    assert storage.delete_tag("gpt", TAG) is False


@pytest.mark.parametrize("use", USES[:3], ids=["read_manifest", "open_part", "publish_manifest"])
def test_a_tag_that_is_a_link_is_not_followed(tmp_path: Path, use: Callable[[PosixStorage], object]) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    write_checkpoint(outside)
    (root / "gpt").mkdir(parents=True)
    (root / "gpt" / TAG).symlink_to(outside / "gpt" / TAG)
    before = sorted(str(p) for p in outside.rglob("*"))
    with pytest.raises((OSError, NotFound)):
        use(PosixStorage(root))
    assert sorted(str(p) for p in outside.rglob("*")) == before


def test_files_that_are_links_are_not_followed(tmp_path: Path, storage: PosixStorage) -> None:
    write_checkpoint(tmp_path)
    place = tmp_path / "gpt" / TAG
    for name in ("manifest.json", PART):
        (place / name).rename(tmp_path / name)
        (place / name).symlink_to(tmp_path / name)
    (tmp_path / "gpt" / "newest").symlink_to(tmp_path / "manifest.json")
    with pytest.raises(OSError) as caught:
        storage.read_manifest("gpt", TAG)
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(OSError) as caught:
        storage.open_part("gpt", TAG, PART)
    assert caught.value.errno == errno.ELOOP
    assert storage.read_newest("gpt") is None
    storage.publish_newest("gpt", TAG)
    assert not (tmp_path / "gpt" / "newest").is_symlink()
    storage.delete_files("gpt", TAG, [PART])
    assert (tmp_path / PART).exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_anything_but_a_regular_file_counts_as_damage_and_blocks_no_reader(
    tmp_path: Path, storage: PosixStorage, make: Callable[[Path], None]
) -> None:
    write_checkpoint(tmp_path)
    place = tmp_path / "gpt" / TAG
    for name in ("manifest.json", PART):
        (place / name).unlink()
        make(place / name)
    if make is os.mkfifo:
        writer = os.open(place / "manifest.json", os.O_RDWR)  # while a process has the other end open, a read would wait for ever
    with pytest.raises(IntegrityError, match="manifest.json is not a regular file"):
        storage.read_manifest("gpt", TAG)
    with pytest.raises(IntegrityError, match=f"{PART} is not a regular file"):
        storage.open_part("gpt", TAG, PART)
    if make is os.mkfifo:
        os.close(writer)


def test_the_root_alone_may_be_a_link(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "real")
    (tmp_path / "root").symlink_to("real")
    assert PosixStorage(tmp_path / "root").read_manifest("gpt", TAG) == manifest


# -- a directory that is one checkpoint


@pytest.fixture
def alone(tmp_path: Path) -> StandaloneStorage:
    """A directory that is one checkpoint, with a part of three files."""
    write_checkpoint(tmp_path, floats=3 << 16, files=3)
    return StandaloneStorage(tmp_path / "gpt" / TAG)


def files_of(storage: StandaloneStorage) -> set[str]:
    return set(os.listdir(storage.root))


def other(number: int = 0, rank: int = 0) -> str:
    return part_file(rank, bytes([rank] * 16), number)


def test_a_sweep_deletes_everything_that_is_left(alone: StandaloneStorage) -> None:
    before = files_of(alone)
    for file in (other(), other(1), other(2), other(7, rank=3), f"{MANIFEST}.{'ab' * 16}.tmp", f"{MANIFEST}.{NONCE.hex()}.tmp"):
        (alone.root / file).write_bytes(b"left")
    (alone.root / other(0, rank=5)).symlink_to("/etc/passwd")
    (alone.root / "notes.txt").write_text("mine")
    alone.sweep()
    assert files_of(alone) == {*before, "notes.txt"}


def test_a_sweep_keeps_a_locked_part_and_its_data_files(alone: StandaloneStorage) -> None:
    before = files_of(alone)
    held_files = {other(), other(1), f"{MANIFEST}.{bytes(16).hex()}.tmp"}
    for file in (*held_files, other(0, rank=3)):
        (alone.root / file).write_bytes(b"left")
    held = alone.hold(other())
    alone.sweep()
    assert files_of(alone) == before | held_files
    release(held)
    alone.sweep()
    assert files_of(alone) == before


def test_a_sweep_keeps_the_manifest_of_a_saver_that_has_just_committed(alone: StandaloneStorage) -> None:
    """Where the manifest is published by a link, its temporary name exists for a moment after the commit."""
    unpublished = alone.root / f"{MANIFEST}.{NONCE.hex()}.tmp"
    unpublished.write_bytes(b"left")
    held = alone.hold(PART)
    alone.sweep()
    assert unpublished.exists()
    release(held)
    alone.sweep()
    assert not unpublished.exists()


def test_a_sweep_keeps_a_part_that_is_committed_during_the_sweep(alone: StandaloneStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    named = alone._named()
    answers = [set[str](), named]
    monkeypatch.setattr(alone, "_named", lambda: answers.pop(0))
    before = files_of(alone)
    alone.sweep()
    assert answers == []
    assert files_of(alone) == before


def test_many_left_parts_are_swept(alone: StandaloneStorage) -> None:
    before = files_of(alone)
    for rank in range(150):
        (alone.root / other(0, rank=rank)).write_bytes(b"left")
    open_before = os.listdir("/proc/self/fd")
    alone.sweep()
    assert files_of(alone) == before
    assert os.listdir("/proc/self/fd") == open_before


def test_nothing_is_swept_while_an_earlier_version_has_locked_the_directory(alone: StandaloneStorage) -> None:
    (alone.root / other()).write_bytes(b"left")
    shared = alone.share()
    alone.sweep()
    assert (alone.root / other()).exists()
    release(shared)
    alone.sweep()
    assert not (alone.root / other()).exists()


def test_an_opened_part_is_locked(alone: StandaloneStorage) -> None:
    reader = alone.open_part(alone.job, alone.tag, PART)
    fd = os.open(alone.root / PART, os.O_RDWR)
    assert not exclude(fd)
    assert verify(reader) > 0
    os.close(reader.fileno())
    assert exclude(fd)
    os.close(fd)


def test_a_part_swept_before_it_is_locked_is_reported_as_gone(alone: StandaloneStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(fd: int) -> bool:
        (alone.root / PART).unlink()
        return True

    monkeypatch.setattr("ckptd.shared.locks.share", late)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match="swept"):
        alone.hold(PART)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(IntegrityError, match="is missing"):
        alone.open_part(alone.job, alone.tag, PART)
