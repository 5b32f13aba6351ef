"""Tests what every storage must do with objects, claims, leases and deletion, and that
checkpoints work on each of them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from obstore.store import MemoryStore

from ckptd.shared import names
from ckptd.shared.errors import Busy, IntegrityError, NotFound
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.heartbeat import MAX_HEARTBEAT, Heartbeat
from ckptd.shared.formats.scatter import verify
from ckptd.shared.location import Url
from ckptd.shared.storage import object_leases
from ckptd.shared.storage.bucket import Bucket, open_bucket
from ckptd.shared.storage.heartbeat_store import HeartbeatStore
from ckptd.shared.storage.object_store import ObjectStorage
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.storage.standalone import StandaloneDirectory
from ckptd.shared.system.storage_seam import Entry, Sink, Storage, read_whole
from tests.shared.samples import TAG, write_parts
from tests.support import stores

SERVERS = ("seaweed", "rclone")
KINDS = ("posix", "memory", *SERVERS)
CREATE_ONCE = tuple(kind for kind in KINDS if kind != "rclone")
"""The kinds that give a new name to exactly one of several callers."""
HEAD = b"head".ljust(ALIGN, b"\0")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Servers]:
    with stores.Servers(tmp_path_factory.mktemp("servers")) as running:
        yield running


def make(
    kind: str, place: Path, servers: stores.Servers, monkeypatch: pytest.MonkeyPatch
) -> Storage:
    if kind == "posix":
        return PosixStorage(place)
    monkeypatch.setattr(object_leases, "RENEWAL_SECONDS", 0.3)
    digest = names.new_nonce().hex()[:16]
    if kind == "memory":
        return ObjectStorage(Bucket(MemoryStore(), f"memory://{digest}"), digest)
    for name, value in servers.get(kind).environ.items():
        monkeypatch.setenv(name, value)
    return ObjectStorage(open_bucket(Url("s3", "bucket", (digest,))), digest)


@pytest.fixture(params=KINDS)
def storage(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    servers: stores.Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> Storage:
    return make(request.param, tmp_path, servers, monkeypatch)


def aligned(data: bytes, blocks: int = 1) -> mmap.mmap:
    """Return page-aligned memory that begins with `data`."""
    made = mmap.mmap(-1, blocks * ALIGN)
    made[: len(data)] = data
    return made


def listed(storage: Storage) -> list[Entry]:
    """Return the children of the root, without those that the storage keeps for itself."""
    return [entry for entry in storage.children("") if entry.name != names.CONTROL]


def creates_once(storage: Storage) -> bool:
    return not isinstance(storage, ObjectStorage) or storage.creates_once


def read(storage: Storage, name: str) -> bytes:
    return read_whole(storage.open(name), 1 << 20, name)


def create(storage: Storage, name: str, *blocks: bytes) -> Sink:
    sink = storage.create(name, (1 + len(blocks)) * ALIGN, HEAD)
    for block in blocks:
        sink.append(aligned(block))
    return sink


# -- objects


def test_an_object_is_whole_once_it_is_finished(storage: Storage) -> None:
    sink = create(storage, "gpt/tag/part")
    assert sink.append(aligned(b"one")) == ALIGN
    assert sink.append(aligned(b"two", 2)) == 2 * ALIGN
    assert sink.size == 4 * ALIGN
    sink.finish()
    data = read(storage, "gpt/tag/part")
    assert (len(data), data[:4], data[ALIGN : ALIGN + 3], data[2 * ALIGN : 2 * ALIGN + 3]) == (
        4 * ALIGN,
        b"head",
        b"one",
        b"two",
    )


def test_more_room_than_is_used_leaves_no_trace(storage: Storage) -> None:
    sink = storage.create("part", 100 * ALIGN, HEAD)
    sink.finish()
    source = storage.open("part")
    assert source.size == ALIGN
    source.close()


def test_threads_append_without_overwriting_one_another(storage: Storage) -> None:
    sink = storage.create("part", ALIGN, HEAD)
    with ThreadPoolExecutor(8) as pool:
        offsets = list(pool.map(lambda n: sink.append(aligned(bytes([n]) * ALIGN)), range(1, 101)))
    sink.finish()
    assert sorted(offsets) == [ALIGN * n for n in range(1, 101)]
    data = read(storage, "part")
    assert [
        data[offset : offset + ALIGN] == bytes([n]) * ALIGN for n, offset in enumerate(offsets, 1)
    ] == [True] * 100


def test_a_discarded_object_is_gone(storage: Storage) -> None:
    create(storage, "tag/part", b"x").discard()
    assert not storage.exists("tag/part")
    finished = create(storage, "tag/part", b"x")
    finished.finish()
    finished.discard()
    assert not storage.exists("tag/part")


def test_a_range_is_read_exactly_or_up_to_the_end(storage: Storage) -> None:
    storage.publish("object", b"0123456789", replace=False)
    source = storage.open("object")
    buffer = bytearray(4)
    assert (source.size, source.read(memoryview(buffer), 3), bytes(buffer)) == (10, 4, b"3456")
    assert (source.read(memoryview(buffer), 8), bytes(buffer[:2])) == (2, b"89")
    assert source.read(memoryview(buffer), 10) == 0
    source.close()


def test_an_open_object_can_be_read_after_it_was_deleted_or_replaced(storage: Storage) -> None:
    storage.publish("object", b"old", replace=False)
    source = storage.open("object")
    storage.publish("object", b"new", replace=True)
    storage.delete("", ["object"])
    assert read_whole(source, 100, "object") == b"old"


def test_publish_replaces_only_if_it_is_asked_to(storage: Storage) -> None:
    storage.publish("object", b"one", replace=False)
    with pytest.raises(FileExistsError):
        storage.publish("object", b"two", replace=False)
    assert read(storage, "object") == b"one"
    storage.publish("object", b"three", replace=True, by="me")
    assert read(storage, "object") == b"three"
    assert listed(storage) == [Entry("object", False)]


@pytest.mark.parametrize("storage", CREATE_ONCE, indirect=True)
def test_one_of_many_publishers_succeeds(storage: Storage) -> None:
    def publish(number: int) -> int:
        try:
            storage.publish("object", bytes([number]), replace=False, by=str(number))
        except FileExistsError:
            return -1
        return number

    assert creates_once(storage)
    with ThreadPoolExecutor(8) as pool:
        won = [number for number in pool.map(publish, range(32)) if number >= 0]
    assert len(won) == 1
    assert read(storage, "object") == bytes(won)


def test_operations_on_missing_objects(storage: Storage) -> None:
    for name in ("object", "no/such/object"):
        assert not storage.exists(name)
        with pytest.raises(FileNotFoundError):
            storage.open(name)
        with pytest.raises(FileNotFoundError):
            storage.lease(name, "it")
        with storage.exclude(name, "it"):
            pass
        assert storage.holders(name, "it") == ""
    assert storage.children("no/such") == []
    storage.delete("no/such", ["object"])
    assert storage.remove("no/such") is True


# -- listing and deleting


def test_children_are_objects_and_prefixes_in_order(storage: Storage) -> None:
    for name in ("b/two/x", "b/one/x", "b/one/y"):
        create(storage, name, b"").finish()
    storage.publish("b/object", b"", replace=False)
    storage.publish("b/one/z", b"", replace=False)
    assert listed(storage) == [Entry("b", True)]
    assert storage.children("b") == [Entry("object", False), Entry("one", True), Entry("two", True)]
    assert [entry.name for entry in storage.children("b/one")] == ["x", "y", "z"]


def test_listing_anew_leaves_nothing_but_the_directory(storage: Storage) -> None:
    create(storage, "gpt/tag/b").finish()
    storage.refresh_listing("gpt/tag", "b")
    assert [entry.name for entry in storage.children("gpt/tag")] == ["b"]
    storage.refresh_listing("bert", "newest")
    assert storage.children("bert") == []


def test_delete_deletes_only_named_objects_and_remove_only_an_empty_prefix(
    storage: Storage,
) -> None:
    for name in ("tag/a", "tag/b", "tagged/a"):
        create(storage, name, b"").finish()
    storage.delete("tag", ["a", "never there"])
    assert storage.remove("tag") is False
    storage.delete("tag", ["a", "b"])
    assert storage.remove("tag") is True
    assert storage.remove("tag") is True
    assert Entry("tagged", True) in listed(storage)
    assert storage.children("tag") == []


def test_a_second_name_of_an_object_outlives_the_first(storage: Storage) -> None:
    create(storage, "gpt/one/part", b"data").finish()
    whole = read(storage, "gpt/one/part")
    assert storage.link("gpt/one/part", "gpt/two/other", len(whole))
    assert [entry.name for entry in storage.children("gpt/two")] == ["other"]
    storage.delete("gpt/one", ["part"])
    assert read(storage, "gpt/two/other") == whole
    assert storage.link("gpt/two/other", "gpt/three/part", len(whole))
    storage.delete("gpt/two", ["other"])
    assert read(storage, "gpt/three/part") == whole


def test_what_has_another_name_elsewhere_is_not_freed_by_deleting_it(storage: Storage) -> None:
    for name in ("job/a/first", "job/b/second"):
        create(storage, name, b"data").finish()
    size = len(read(storage, "job/a/first"))
    assert storage.link("job/a/first", "job/b/linked", size)
    once = 1 if storage.shares_links else 2
    assert storage.exclusive_bytes(["job/a"]) == (0 if storage.shares_links else size)
    assert storage.exclusive_bytes(["job/b"]) == once * size
    assert storage.exclusive_bytes(["job/a", "job/b", "job/none"]) == (1 + once) * size


def test_an_object_that_is_gone_or_has_another_length_gets_no_second_name(storage: Storage) -> None:
    create(storage, "gpt/one/part", b"data").finish()
    size = len(read(storage, "gpt/one/part"))
    assert not storage.link("gpt/one/part", "gpt/two/part", size + 1)
    assert not storage.link("gpt/one/gone", "gpt/two/part", size)
    assert not storage.link("gpt/gone/part", "gpt/two/part", size)
    assert storage.children("gpt/two") == []
    assert storage.link("gpt/one/part", "gpt/two/part", size)
    with pytest.raises(FileExistsError):
        storage.link("gpt/one/part", "gpt/two/part", size)


# -- claims


def test_a_name_is_claimed_once(storage: Storage) -> None:
    assert storage.claim("claims/a0001") is True
    assert storage.claim("claims/a0001") is False
    assert storage.claim("claims/a0002") is True
    assert [names.claimed(entry.name) for entry in storage.children("claims")] == ["a0001", "a0002"]


def test_one_of_many_claimants_succeeds(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = sum(pool.map(lambda _: storage.claim("claims/a0001"), range(32)))
    assert won == 1 if creates_once(storage) else won <= 1
    assert storage.claim("claims/a0002") is True


# -- leases


def test_a_leased_object_cannot_be_excluded(storage: Storage) -> None:
    storage.publish("object", b"data", replace=False)
    first, second = storage.lease("object", "it"), storage.lease("object", "it")
    for source in (first, second):
        assert storage.holders("object", "it") != ""
        with (
            pytest.raises(Busy, match="^it is being read, or deleted"),
            storage.exclude("object", "it"),
        ):
            pass
        source.close()
    assert storage.holders("object", "it") == ""
    with storage.exclude("object", "it"):
        pass


def test_an_excluded_object_cannot_be_leased_or_excluded_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.shared.storage.locks.SECONDS", 0.05)
    storage.publish("object", b"data", replace=False)
    with storage.exclude("object", "it"):
        with pytest.raises(Busy, match="^it cannot be read now"):
            storage.lease("object", "it")
        with pytest.raises(Busy), storage.exclude("object", "it"):
            pass
        assert read(storage, "object") == b"data"  # a reader without a lease is not kept out
    storage.lease("object", "it").close()


# -- the root


def test_one_daemon_of_a_host_serves_the_root(storage: Storage) -> None:
    held = storage.serve("one")
    with pytest.raises(Busy, match="already serves"):
        storage.serve("one")
    other = storage.serve("two")
    held.close()
    storage.serve("one").close()
    other.close()


def test_messages_name_the_place(storage: Storage) -> None:
    assert storage.where("gpt/tag") == f"{storage.where()}/gpt/tag"
    assert storage.refusal("gpt") == ""
    assert storage.free() is None or storage.free() > 0  # type: ignore[operator]


# -- checkpoints, on any storage and in a directory by themselves


@pytest.fixture(params=(*KINDS, "standalone"))
def repository(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    servers: stores.Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> Repository:
    if request.param == "standalone":
        return StandaloneDirectory(tmp_path / "one")
    return Repository(make(request.param, tmp_path, servers, monkeypatch))


def commit(repository: Repository, *, ranks: int = 2, files: int = 1) -> None:
    manifest = write_parts(repository.part_files("gpt", TAG), world_size=ranks, files=files)
    if isinstance(repository, StandaloneDirectory):
        repository.commit(manifest.encode(), overwrite=False, nonce=names.new_nonce().hex())
    else:
        repository.publish_manifest("gpt", TAG, manifest.encode())


@pytest.mark.parametrize("files", [1, 3])
def test_a_committed_checkpoint_is_read_back(repository: Repository, files: int) -> None:
    assert not repository.has_manifest("gpt", TAG)
    with pytest.raises(NotFound):
        repository.read_manifest("gpt", TAG)
    commit(repository, files=files)
    manifest = repository.read_manifest("gpt", TAG)
    assert repository.has_manifest("gpt", TAG)
    for part in manifest.parts:
        reader = repository.open_part("gpt", TAG, part.file, part.index_sha256)
        assert (verify(reader), reader.nbytes, 1 + len(reader.index.files)) == (
            part.raw_bytes,
            part.bytes,
            part.files,
        )
        reader.close()
    assert len(repository.files("gpt", TAG)) == 1 + sum(part.files for part in manifest.parts)


def test_a_second_commit_is_refused(repository: Repository) -> None:
    commit(repository)
    with pytest.raises(FileExistsError):
        commit(repository)


def test_a_missing_part_is_damage(repository: Repository) -> None:
    commit(repository)
    (part, _) = repository.read_manifest("gpt", TAG).parts
    repository.delete_files("gpt", TAG, [part.file])
    with pytest.raises(IntegrityError, match="is missing"):
        repository.open_part("gpt", TAG, part.file)


def test_a_leased_checkpoint_cannot_be_deleted(repository: Repository) -> None:
    commit(repository)
    lease = repository.lease("gpt", TAG)
    assert repository.readers("gpt", TAG)
    with (
        pytest.raises(Busy, match=f"^checkpoint gpt/{TAG} is being read"),
        repository.exclude("gpt", TAG),
    ):
        pass
    lease.close()
    with repository.exclude("gpt", TAG):
        repository.delete_files("gpt", TAG, [names.MANIFEST])
    with pytest.raises(NotFound):
        repository.lease("gpt", TAG)


@pytest.fixture(params=KINDS)
def root(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    servers: stores.Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> Repository:
    return Repository(make(request.param, tmp_path, servers, monkeypatch))


def test_a_deleted_checkpoint_leaves_nothing(root: Repository) -> None:
    commit(root, files=3)
    manifest = root.read_manifest("gpt", TAG)
    assert (root.jobs(), root.tags("gpt")) == (["gpt"], [TAG])
    root.delete_files("gpt", TAG, [names.MANIFEST])
    assert root.delete_tag("gpt", TAG) is False
    root.delete_files("gpt", TAG, [part.file for part in manifest.parts])
    assert root.files("gpt", TAG) == []
    assert root.delete_tag("gpt", TAG) is True
    # A store may list an empty prefix for a while.
    assert all(root.files("gpt", tag) == [] for tag in root.tags("gpt"))


def test_pins_and_the_hint(root: Repository) -> None:
    commit(root)
    assert (root.pins("gpt"), root.read_newest("gpt")) == (set(), None)
    root.pin("gpt", TAG)
    root.pin("gpt", TAG)
    root.publish_newest("gpt", TAG)
    root.publish_newest("gpt", TAG)
    assert (root.pins("gpt"), root.read_newest("gpt")) == ({TAG}, TAG)
    assert [root.unpin("gpt", TAG), root.unpin("gpt", TAG)] == [True, False]
    root.remove_newest("gpt")
    assert (root.pins("gpt"), root.read_newest("gpt")) == (set(), None)


def test_an_attempt_is_claimed_once_and_older_claims_are_deleted(root: Repository) -> None:
    assert root.newest_attempt("gpt") == 0
    assert [root.claim("gpt", number) for number in (1, 2, 2, 3)] == [True, True, False, True]
    assert root.newest_attempt("gpt") == 3
    assert [
        names.claimed(entry.name) for entry in root.storage.children(names.attempts("gpt"))
    ] == ["a0002", "a0003"]
    assert root.claim("gpt", 9) is True
    assert root.newest_attempt("gpt") == 9


def test_heartbeats_are_replaced_listed_and_deleted_and_are_no_job(root: Repository) -> None:
    store = HeartbeatStore(root.storage)
    first = Heartbeat(job="gpt", attempt=2, host="node", boot="0" * 32, beat="0" * 32)
    assert (store.attempts("gpt"), store.read("gpt", 2)) == ([], None)
    store.delete("gpt", [2])
    second = first.again()
    for each in (first, second, msgspec.structs.replace(first, attempt=10)):
        store.publish(each)
    assert store.attempts("gpt") == [2, 10]
    assert store.read("gpt", 2) == second.encode()
    assert (root.jobs(), root.tags("gpt"), root.newest_attempt("gpt"), root.pins("gpt")) == (
        [],
        [],
        0,
        set(),
    )
    root.storage.publish(f"{names.runs('gpt')}/a0003", b"x" * 9999, replace=True)
    assert store.read("gpt", 3) == b"x" * MAX_HEARTBEAT
    root.storage.publish(f"{names.runs('gpt')}/other", b"", replace=True)
    store.delete("gpt", [2, 3, 4])
    assert store.attempts("gpt") == [10]


def test_a_root_has_one_identity(root: Repository) -> None:
    root.storage.serve("host").close()
    identity = root.identity()
    assert names.is_identity(identity)
    assert Repository(root.storage).identity() == identity
    root.storage.publish(f"{names.CONTROL}/{names.IDENTITY}", b"not one\n", replace=True)
    with pytest.raises(IntegrityError, match="does not hold the identity of the root"):
        root.identity()


@pytest.mark.parametrize("root", CREATE_ONCE, indirect=True)
def test_two_daemons_that_look_at_the_same_moment_give_a_root_one_identity(
    root: Repository,
) -> None:
    assert creates_once(root.storage)
    root.storage.serve("host").close()
    identity = root.identity()
    with mock.patch.object(root.storage, "exists", return_value=False):
        assert root.identity() == identity
