"""Tests checkpoints in a directory tree: commits, the hint, deletion, and links that
are not followed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.scatter import verify
from ckptd.shared.names import part_file
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository, check_manifest_place
from ckptd.shared.system.fs import PosixFileSystem
from tests.shared.samples import NONCE, write_checkpoint
from tests.support.cases import each_case

TAG = "step-00001000.a0002"
PART = part_file(0, NONCE)


@pytest.fixture
def storage(tmp_path: Path) -> Repository:
    return open_root(tmp_path)


class Recorder(PosixFileSystem):
    """A file system that records the directories that are made or synced."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def make_directory(self, name: str, directory: int) -> bool:
        made = super().make_directory(name, directory)
        self.steps.append(f"make {name} {made}")
        return made

    def sync_directory(self, directory: int) -> None:
        self.steps.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{directory}'))}")
        super().sync_directory(directory)


# -- directories


def test_ensure_syncs_a_parent_before_anything_inside_counts(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    recorder = Recorder()
    storage = PosixStorage(root, recorder)
    storage.ensure(f"gpt/{TAG}")
    assert recorder.steps == ["make gpt True", "sync root", f"make {TAG} True", "sync gpt"]
    assert (root / "gpt" / TAG).is_dir()
    recorder.steps.clear()
    storage.ensure(f"gpt/{TAG}")
    assert recorder.steps == ["make gpt False", f"make {TAG} False"]


def test_an_empty_root_holds_nothing(storage: Repository) -> None:
    assert storage.jobs() == []
    assert storage.tags("gpt") == []
    assert storage.files("gpt", TAG) == []
    assert storage.read_newest("gpt") is None
    with pytest.raises(NotFound, match=f"no checkpoint gpt/{TAG} in {storage.where()}"):
        storage.read_manifest("gpt", TAG)


def test_a_root_that_is_gone_is_an_error_not_an_empty_list(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_root(tmp_path / "gone").jobs()


def test_tags_of_a_root_that_is_gone_are_an_error_not_an_empty_list(tmp_path: Path) -> None:
    """An empty list means that nothing was ever saved.

    `recover` would then start a new history while a mount is missing.
    """
    with pytest.raises(FileNotFoundError):
        open_root(tmp_path / "gone").tags("gpt")


def test_listings_leave_out_names_that_are_not_ckptds(tmp_path: Path, storage: Repository) -> None:
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


def test_a_directory_that_cannot_be_a_job_is_not_listed(
    tmp_path: Path, storage: Repository
) -> None:
    """The root of an ext4 file system has a `lost+found` that only root may list."""
    (tmp_path / "lost+found").mkdir(0o700)
    (tmp_path / "gpt").mkdir()
    assert storage.jobs() == ["gpt"]


# -- manifests


def test_publish_and_read_a_manifest(tmp_path: Path, storage: Repository) -> None:
    manifest = write_checkpoint(tmp_path)
    os.unlink(tmp_path / "gpt" / TAG / "manifest.json")
    with pytest.raises(NotFound):
        storage.read_manifest("gpt", TAG)
    storage.publish_manifest("gpt", TAG, manifest.encode())
    assert storage.read_manifest("gpt", TAG) == manifest
    assert (tmp_path / "gpt" / TAG / "manifest.json").read_bytes() == manifest.encode()
    assert storage.files("gpt", TAG) == ["manifest.json", PART]


def test_a_commit_is_never_overwritten(tmp_path: Path, storage: Repository) -> None:
    manifest = write_checkpoint(tmp_path)
    with pytest.raises(FileExistsError):
        storage.publish_manifest("gpt", TAG, msgspec.structs.replace(manifest, seq=8).encode())
    assert storage.read_manifest("gpt", TAG) == manifest


def test_a_commit_needs_its_directory(storage: Repository) -> None:
    with pytest.raises(FileNotFoundError):
        storage.publish_manifest("gpt", TAG, b"{}")


def test_a_refused_commit_leaves_a_directory_that_can_be_deleted(
    tmp_path: Path, storage: Repository
) -> None:
    manifest = write_checkpoint(tmp_path)
    with pytest.raises(FileExistsError):
        storage.publish_manifest("gpt", TAG, manifest.encode())
    storage.delete_files("gpt", TAG, ["manifest.json", PART])
    assert storage.delete_tag("gpt", TAG)
    assert not (tmp_path / "gpt" / TAG).exists()


def test_a_damaged_manifest_is_named_and_not_called_missing(
    tmp_path: Path, storage: Repository
) -> None:
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

    body = data[: data.index(b'"sha256"')].replace(b'"version": 1', b'"version": 3')
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


@pytest.mark.parametrize(
    "place", ["step-00001001.a0002", "step-00001000.a0003", "best.a0002", "step-000001000.a0002"]
)
def test_a_manifest_in_a_wrong_place_is_no_checkpoint(
    tmp_path: Path, storage: Repository, place: str
) -> None:
    write_checkpoint(tmp_path)
    shutil.copytree(tmp_path / "gpt" / TAG, tmp_path / "gpt" / place)
    with pytest.raises(
        IntegrityError, match=rf"gpt/{place}: the manifest there is that of gpt/{TAG}"
    ):
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


def test_open_part(tmp_path: Path, storage: Repository) -> None:
    manifest = write_checkpoint(tmp_path, world_size=2)
    assert len(manifest.parts) == 2
    for part in manifest.parts:
        reader = storage.open_part("gpt", TAG, part.file, part.index_sha256)
        try:
            assert verify(reader) == part.raw_bytes
            assert reader.index.rank == part.rank
            assert reader.name == f"gpt/{TAG}/{part.file}"
        finally:
            reader.close()


def descriptors_into(path: Path) -> list[str]:
    """Return the descriptors that this process has open below `path`."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith(str(path))]


def test_a_missing_or_damaged_part_is_an_integrity_error_and_leaks_no_descriptor(
    tmp_path: Path, storage: Repository
) -> None:
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


def test_newest(tmp_path: Path, storage: Repository) -> None:
    (tmp_path / "gpt").mkdir()
    storage.publish_newest("gpt", TAG)
    assert (tmp_path / "gpt" / "newest").read_bytes() == b"step-00001000.a0002\n"
    assert storage.read_newest("gpt") == TAG
    storage.publish_newest("gpt", "step-00001001.a0002")
    assert storage.read_newest("gpt") == "step-00001001.a0002"
    assert [p.name for p in (tmp_path / "gpt").iterdir()] == ["newest"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"gpt\n",
        b"../../x\n",
        TAG.encode() + b"\n\n",
        TAG.encode() + b" ",
        b"\xff" * 20,
        TAG.encode() * 20,
    ],
)
def test_an_impossible_hint_is_ignored(tmp_path: Path, storage: Repository, text: bytes) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "newest").write_bytes(text)
    assert storage.read_newest("gpt") is None


# -- deletion


def test_delete_files_and_tag(tmp_path: Path, storage: Repository) -> None:
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


def test_data_files_go_with_their_part(tmp_path: Path, storage: Repository) -> None:
    write_checkpoint(tmp_path, world_size=2, files=3)
    assert [
        len([f for f in storage.files("gpt", TAG) if f.startswith(f"rank-0000{rank}")])
        for rank in (0, 1)
    ] == [3, 3]
    other = part_file(0, NONCE[::-1], 1)  # of a running save
    (tmp_path / "gpt" / TAG / other).write_bytes(b"")
    storage.delete_files("gpt", TAG, [PART])
    assert storage.files("gpt", TAG) == [
        "manifest.json",
        *sorted([other, *(part_file(1, NONCE, number) for number in (0, 1, 2))]),
    ]
    # Deleted earlier, except for its data files.
    (tmp_path / "gpt" / TAG / part_file(1, NONCE)).unlink()
    storage.delete_files("gpt", TAG, [part_file(1, NONCE)])
    assert storage.files("gpt", TAG) == ["manifest.json", other]


def test_a_part_of_several_files_is_opened(tmp_path: Path, storage: Repository) -> None:
    (part,) = write_checkpoint(tmp_path, files=3).parts
    reader = storage.open_part("gpt", TAG, part.file, part.index_sha256)
    assert (reader.nbytes, 1 + len(reader.index.files), part.files) == (part.bytes, 3, 3)
    assert verify(reader) == part.raw_bytes
    reader.close()
    data_file = tmp_path / "gpt" / TAG / part_file(0, NONCE, 2)
    moved = data_file.with_name("elsewhere")
    data_file.rename(moved)
    with pytest.raises(
        IntegrityError, match=f"^gpt/{TAG}/{PART}: its data file {data_file.name} is missing"
    ):
        storage.open_part("gpt", TAG, PART)
    data_file.symlink_to(moved)
    with pytest.raises(OSError, match="symbolic links"):
        storage.open_part("gpt", TAG, PART)


def test_a_directory_with_a_file_of_another_program_is_not_deleted(
    tmp_path: Path, storage: Repository
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "gpt" / TAG / "notes.txt").write_text("mine")
    storage.delete_files("gpt", TAG, ["manifest.json", PART])
    assert storage.delete_tag("gpt", TAG) is False
    assert (tmp_path / "gpt" / TAG / "notes.txt").read_text() == "mine"


def test_deletion_is_synced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    recorder = Recorder()
    storage = open_root(tmp_path, recorder)
    storage.delete_files("gpt", TAG, ["manifest.json"])
    assert recorder.steps == [f"sync {TAG}"]
    storage.delete_files("gpt", TAG, [PART])
    storage.delete_tag("gpt", TAG)
    assert recorder.steps == [f"sync {TAG}", f"sync {TAG}", "sync gpt"]


# -- links


USES: list[Callable[[Repository], object]] = [
    lambda s: s.read_manifest("gpt", TAG),
    lambda s: s.open_part("gpt", TAG, PART),
    lambda s: s.publish_manifest("gpt", TAG, b"{}"),
    lambda s: s.publish_newest("gpt", TAG),
    lambda s: s.part_files("gpt", TAG).create(PART, 4096, None),
]


@each_case(
    "use",
    USES,
    ids=["read_manifest", "open_part", "publish_manifest", "publish_newest", "part_files"],
)
def test_a_job_that_is_a_link_is_not_followed(
    tmp_path: Path, use: Callable[[Repository], object]
) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    write_checkpoint(outside)
    root.mkdir()
    (root / "gpt").symlink_to(outside / "gpt")
    before = sorted(str(p) for p in outside.rglob("*"))
    with pytest.raises((OSError, NotFound, IntegrityError)):
        use(open_root(root))
    assert sorted(str(p) for p in outside.rglob("*")) == before


@pytest.mark.parametrize("link", ["gpt", f"gpt/{TAG}"], ids=["job", "tag"])
def test_nothing_is_deleted_through_a_link(tmp_path: Path, link: str) -> None:
    """Something else has taken the name of a directory.

    The files that ckptd had there are gone, and files elsewhere are not ckptd's.
    """
    outside, root = tmp_path / "outside", tmp_path / "root"
    write_checkpoint(outside)
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(outside / link)
    before = sorted(str(p) for p in outside.rglob("*"))
    storage = open_root(root)
    storage.delete_files("gpt", TAG, ["manifest.json", PART])
    assert storage.files("gpt", TAG) == []
    assert storage.delete_tag("gpt", TAG) is True
    assert sorted(str(p) for p in outside.rglob("*")) == before
    assert (root / link).is_symlink()


@pytest.mark.parametrize("taken", ["gpt", f"gpt/{TAG}"], ids=["job", "tag"])
def test_files_of_a_directory_that_has_become_a_file_are_gone(
    tmp_path: Path, storage: Repository, taken: str
) -> None:
    write_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / taken)
    (tmp_path / taken).write_text("mine")
    assert storage.files("gpt", TAG) == []
    storage.delete_files("gpt", TAG, ["manifest.json", PART])
    assert storage.delete_tag("gpt", TAG) is True
    assert (tmp_path / taken).read_text() == "mine"


def test_a_directory_in_the_place_of_a_part_is_left_alone(
    tmp_path: Path, storage: Repository
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "gpt" / TAG / PART).unlink()
    (tmp_path / "gpt" / TAG / PART).mkdir()
    storage.delete_files("gpt", TAG, [PART, "manifest.json"])
    assert storage.files("gpt", TAG) == [PART]
    assert storage.delete_tag("gpt", TAG) is False


@pytest.mark.parametrize("use", USES[:3], ids=["read_manifest", "open_part", "publish_manifest"])
def test_a_tag_that_is_a_link_is_not_followed(
    tmp_path: Path, use: Callable[[Repository], object]
) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    write_checkpoint(outside)
    (root / "gpt").mkdir(parents=True)
    (root / "gpt" / TAG).symlink_to(outside / "gpt" / TAG)
    before = sorted(str(p) for p in outside.rglob("*"))
    with pytest.raises((OSError, NotFound, IntegrityError)):
        use(open_root(root))
    assert sorted(str(p) for p in outside.rglob("*")) == before


def test_files_that_are_links_are_not_followed(tmp_path: Path, storage: Repository) -> None:
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
    tmp_path: Path, storage: Repository, make: Callable[[Path], None]
) -> None:
    write_checkpoint(tmp_path)
    place = tmp_path / "gpt" / TAG
    for name in ("manifest.json", PART):
        (place / name).unlink()
        make(place / name)
    if make is os.mkfifo:
        # While a process has the other end open, a read would wait for ever.
        writer = os.open(place / "manifest.json", os.O_RDWR)
    with pytest.raises(IntegrityError, match="manifest.json is not a regular file"):
        storage.read_manifest("gpt", TAG)
    with pytest.raises(IntegrityError, match=f"{PART} is not a regular file"):
        storage.open_part("gpt", TAG, PART)
    if make is os.mkfifo:
        os.close(writer)


def test_the_root_alone_may_be_a_link(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "real")
    (tmp_path / "root").symlink_to("real")
    assert open_root(tmp_path / "root").read_manifest("gpt", TAG) == manifest
