"""Tests what a starting daemon does with the remains of another one: each is finished,
undone, or left for the next start.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.daemon import recovery
from ckptd.daemon.composition import Components
from ckptd.daemon.config import Config
from ckptd.daemon.job.catalog import Catalog, Job
from ckptd.daemon.journal import records as r
from ckptd.daemon.journal.journal import Journal, JournalBroken
from ckptd.daemon.journal.place import journal_directory
from ckptd.daemon.process.service import Service
from ckptd.daemon.recovery import drop_deleted, scan_job
from ckptd.daemon.root.served_root import ServedRoot
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.errors import Busy, NewerFormat, StorageError
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.receipt import Abandonment, Receipt
from ckptd.shared.formats.segment import RootMark
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.fs import FileSystem, PosixFileSystem
from tests.shared.samples import NONCE, write_checkpoint
from tests.support import chains
from tests.support.daemons import Home, recover_only
from tests.support.events import logged

TAG = "step-00001000.a0002"
STRAY = names.part_file(0, bytes(range(1, 17)))


class Failing(PosixFileSystem):
    """A file system on which every call of one kind fails."""

    def __init__(self, call: str) -> None:
        setattr(self, call, self._fail)

    def _fail(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class Root:
    """A root as a daemon left it."""

    def __init__(self, place: Path) -> None:
        self.path, self._place = place / "root", place
        (place / "shm").mkdir()
        self.storage = open_root(self.path)
        self._state = place / "state"

    def _directory(self) -> AbstractContextManager[int]:
        self.path.joinpath(names.CONTROL).mkdir(parents=True, exist_ok=True)
        return journal_directory(PosixFileSystem(), self._state, self.path, self.storage)

    async def journal(self, *records: r.Record) -> None:
        """The journal that the daemon wrote."""
        with self._directory() as directory, ThreadPoolExecutor(1) as pool:
            journal = Journal.open(PosixFileSystem(), directory, pool)
            journal.start()
            await journal.append(*records)
            await journal.close()

    def left(self) -> r.JournalState:
        """What is under way according to the journal."""
        with self._directory() as directory, ThreadPoolExecutor(1) as pool:
            return Journal.open(PosixFileSystem(), directory, pool).state

    async def start(self, fs: FileSystem | None = None) -> Components:
        config = Config(
            root=self.path,
            socket=self._place / "s",
            state_dir=self._state,
            shm_dir=self._place / "shm",
            threads=1,
        )
        return await recover_only(config, fs)

    def files(self) -> list[str]:
        return self.storage.files("gpt", TAG)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def durable(manifest: Manifest, rank: int = 0) -> r.PartDurable:
    part = manifest.parts[rank]
    return r.PartDurable(
        job="gpt",
        attempt=2,
        step=1000,
        rank=rank,
        tag=TAG,
        file=part.file,
        bytes=part.bytes,
        index_sha256=part.index_sha256,
    )


def staging(file: str, rank: int = 0) -> r.Staging:
    return r.Staging(job="gpt", attempt=2, step=1000, rank=rank, tag=TAG, file=file)


async def uncommitted(root: Root, world_size: int = 1, files: int = 1) -> Manifest:
    """Leave parts of all ranks, durable and in the journal.

    Return the manifest that was about to be published.
    """
    manifest = write_checkpoint(root.path, world_size=world_size, files=files)
    (root.path / "gpt" / TAG / names.MANIFEST).unlink()
    await root.journal(
        *(staging(part.file, part.rank) for part in manifest.parts),
        *(durable(manifest, n) for n in range(world_size)),
    )
    return manifest


@pytest.fixture
def calls() -> Iterator[StorageCalls]:
    made = StorageCalls(60.0)
    yield made
    made.close()


# -- the scan


async def test_a_root_that_is_gone_cannot_be_scanned(root: Root, calls: StorageCalls) -> None:
    with pytest.raises(StorageError, match=f"list {root.path}/gpt"):
        await scan_job(root.storage, Job("gpt"), calls)


async def test_a_checkpoint_that_was_deleted_by_hand_is_known_no_longer(
    root: Root, calls: StorageCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that is not there, or is another one, proves nothing."""
    job, idle = Job("gpt"), Job("idle")
    for step in (1000, 2000, 3000):
        write_checkpoint(root.path, step=step)
    await scan_job(root.storage, job, calls)

    async def known() -> list[int]:
        await drop_deleted(root.storage, [job, idle], calls)
        return sorted(c.step or 0 for c in job.live_checkpoints())

    place = root.path / "gpt"
    assert await known() == [1000, 2000, 3000]
    shutil.rmtree(place / "step-00003000.a0002")
    with monkeypatch.context() as patch:
        patch.setattr(root.storage.storage, "is_lost", lambda: True)
        assert await known() == [1000, 2000, 3000]
    assert await known() == [1000, 2000]
    root.path.rename(root.path.with_name("elsewhere"))
    assert await known() == [1000, 2000]
    root.path.with_name("elsewhere").rename(root.path)
    shutil.rmtree(place)
    assert await known() == []


async def test_a_scan_finds_sound_damaged_and_unfinished_checkpoints(
    root: Root, calls: StorageCalls, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job("gpt")
    for step in (1000, 2000, 3000, 4000, 5000, 6000):
        write_checkpoint(root.path, step=step)
    await scan_job(root.storage, job, calls)
    assert sorted(job.checkpoints) == [f"step-0000{n}000.a0002" for n in (1, 2, 3, 4, 5, 6)]
    place = root.path / "gpt"
    shutil.rmtree(place / "step-00001000.a0002")
    (place / "step-00002000.a0002" / names.MANIFEST).unlink()
    (place / "step-00003000.a0002" / names.MANIFEST).write_bytes(b"{}")
    (place / "step-00004000.a0002" / names.MANIFEST).unlink()
    (place / "step-00004000.a0002" / names.MANIFEST).mkdir()
    (place / "step-00005000.a0002" / names.MANIFEST).unlink()
    # Opening a FIFO for reading would wait for a writer.
    os.mkfifo(place / "step-00005000.a0002" / names.MANIFEST)
    (place / "step-00006000.a0002" / names.MANIFEST).rename(place / "manifest")
    (place / "step-00006000.a0002" / names.MANIFEST).symlink_to(place / "manifest")
    writer = os.open(place / "step-00005000.a0002" / names.MANIFEST, os.O_RDWR)
    await scan_job(root.storage, job, calls)
    os.close(writer)
    assert job.checkpoints == {}
    assert sorted(job.damaged) == [f"step-0000{n}000.a0002" for n in (3, 4, 5, 6)]
    told = {event["tag"]: event["reason"] for event in logged(caplog, "checkpoint.damaged")}
    assert told == job.damaged
    assert (
        job.damaged["step-00004000.a0002"]
        == job.damaged["step-00005000.a0002"]
        == "manifest.json is not a regular file"
    )
    assert (
        "cannot read the manifest of gpt/step-00006000.a0002: Too many levels of symbolic links"
        in job.damaged["step-00006000.a0002"]
    )


@pytest.mark.parametrize("problem", [errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN])
async def test_a_lack_of_descriptors_or_of_the_server_is_not_taken_for_damage(
    root: Root, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """Otherwise an older checkpoint, or none, would be recovered."""

    def read(*_: Any) -> Manifest:
        raise OSError(problem, os.strerror(problem))

    write_checkpoint(root.path)
    monkeypatch.setattr(Repository, "read_manifest", read)
    with pytest.raises(StorageError, match=f"cannot read the manifest of gpt/{TAG}: ") as failed:
        await root.start()
    assert failed.value.errno == problem


async def test_a_manifest_of_a_newer_ckptd_is_not_called_damaged(
    root: Root, calls: StorageCalls
) -> None:
    """No older checkpoint is recovered in its place: the recovery says that ckptd must
    be upgraded.
    """
    write_checkpoint(root.path)
    newer = write_checkpoint(root.path, step=2000)
    path = root.path / "gpt" / "step-00002000.a0002" / names.MANIFEST
    path.write_bytes(msgspec.structs.replace(newer, version=3).encode())
    parts = await root.start()
    job = parts.catalog.job("gpt")
    assert (list(job.checkpoints), job.damaged, list(job.newer)) == (
        [TAG],
        {},
        ["step-00002000.a0002"],
    )
    served = ServedRoot(
        parts.repository, calls, RootMark(parts.identity, str(root.path)), lambda: None
    )
    service = Service(dataclasses.replace(parts, calls=calls, served=served))
    with pytest.raises(
        NewerFormat,
        match="gpt/step-00002000.a0002 is newer than every checkpoint that this ckptd can read",
    ):
        await service.find("gpt", None)
    assert [candidate.tag for candidate in (await service.find("gpt", 1000)).candidates] == [TAG]


async def test_a_manifest_that_this_user_may_not_read_is_not_called_damaged(
    root: Root, calls: StorageCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No older checkpoint is recovered in its place, and the job goes on once its mode
    is corrected, without a restart.
    """
    write_checkpoint(root.path)
    write_checkpoint(root.path, step=2000)
    hidden, read = "step-00002000.a0002", Repository.read_manifest

    def refuse(repository: Repository, job: str, tag: str) -> Manifest:
        if tag == hidden:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return read(repository, job, tag)

    with monkeypatch.context() as patched:
        patched.setattr(Repository, "read_manifest", refuse)
        parts = await root.start()
        job = parts.catalog.job("gpt")
        assert (list(job.checkpoints), job.damaged, list(job.denied)) == ([TAG], {}, [hidden])
        served = ServedRoot(
            parts.repository, calls, RootMark(parts.identity, str(root.path)), lambda: None
        )
        service = Service(dataclasses.replace(parts, calls=calls, served=served))
        with pytest.raises(
            StorageError,
            match=f"gpt/{hidden} is newer than .*: Permission denied .*; or .* with step=",
        ):
            await service.find("gpt", None)
        assert [one.tag for one in (await service.find("gpt", 1000)).candidates] == [TAG]
    await drop_deleted(parts.repository, [job], calls)
    assert (list(job.checkpoints), job.denied) == ([TAG, hidden], {})


async def test_a_daemon_that_only_starts_deletes_no_checkpoint(root: Root) -> None:
    """The checkpoints may have been trained under another `keep_last`.

    Only `newest` is repaired.
    """
    tags = [write_checkpoint(root.path, step=step).tag for step in range(1, 31)]
    await root.start()
    assert root.storage.tags("gpt") == tags
    assert root.storage.read_newest("gpt") == tags[-1]


async def test_a_segment_that_cannot_be_opened_for_lack_of_a_resource_ends_the_start(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = root._place / "shm" / machine.segment_directory(root.path)
    place.mkdir(mode=0o700)
    segment = place / f"{'0' * 32}.seg"
    segment.write_bytes(b"")
    opened = os.open

    def full(path: Any, *arguments: Any, **options: Any) -> int:
        if path == segment.name:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(
        StorageError, match=f"cannot open the segment {segment.name}: Too many open files in system"
    ):
        await root.start()
    assert segment.exists()


async def test_a_root_that_cannot_be_read_ends_the_start(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def jobs(self: Repository) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Repository, "jobs", jobs)
    with pytest.raises(StorageError, match="cannot use the root"):
        await root.start()


async def test_jobs_with_something_under_way_are_known_from_the_journal(root: Root) -> None:
    begun = r.Begun(job="gpt", attempt=5, world_size=3)
    committed = r.Committed(job="other", attempt=1, step=3, tag="step-00000003.a0001", seq=9)
    other = r.Staging(job="other", attempt=1, step=4, rank=0, tag="step-00000004.a0001", file=STRAY)
    await root.journal(begun, staging(STRAY), committed, other)
    parts = await root.start()
    found = {
        name: (job.attempt, job.world_size, job.seq) for name, job in parts.catalog.jobs.items()
    }
    assert found == {"gpt": (5, 3, 0), "other": (0, 1, 9)}


# -- what was being deleted


async def test_a_deletion_is_finished(root: Root) -> None:
    manifest = write_checkpoint(root.path)
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    parts = await root.start()
    assert root.storage.tags("gpt") == []
    assert (parts.catalog.job("gpt").checkpoints, root.left().retiring) == ({}, {})


@pytest.mark.parametrize("how", ["pinned", "read"])
async def test_a_deletion_is_cancelled_if_the_checkpoint_is_pinned_or_read_since(
    root: Root, how: str
) -> None:
    manifest = write_checkpoint(root.path)
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    held = None
    if how == "pinned":
        root.storage.pin("gpt", TAG)
    else:
        held = root.storage.lease("gpt", TAG)
    parts = await root.start()
    assert root.storage.tags("gpt") == [TAG]
    assert (list(parts.catalog.job("gpt").checkpoints), root.left().retiring) == ([TAG], {})
    if held is not None:
        held.close()


async def test_a_deletion_that_had_begun_is_finished_though_a_reader_has_come_too_late(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has a lease, and finds that the manifest is gone.

    The parts would be left behind for ever.
    """
    manifest = write_checkpoint(root.path)
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    root.storage.delete_files("gpt", TAG, [names.MANIFEST])

    def busy(self: Repository, job: str, tag: str) -> None:
        raise Busy("it is being read")

    monkeypatch.setattr(Repository, "exclude", busy)
    await root.start()
    assert (root.storage.tags("gpt"), root.left().retiring) == ([], {})


@pytest.mark.parametrize("committed", [True, False])
async def test_a_finished_deletion_leaves_an_abandonment_where_an_older_attempt_might_commit(
    root: Root, committed: bool
) -> None:
    manifest = write_checkpoint(root.path)
    await root.journal(
        r.Begun(job="gpt", attempt=3, world_size=2, node=Membership(run_id="0" * 32, ranks=[0])),
        r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]),
    )
    receipt = Receipt(
        job="gpt", attempt=2, step=1000, tag=TAG, node=Membership(run_id="0" * 32, ranks=[0]),
        host="node0", world_size=2, global_plan="0" * 64, parts=[], code="storage",
        reason="no room",
    )  # fmt: skip
    root.storage.publish_receipt(receipt)
    assert root.storage.claim("gpt", 3)
    if not committed:
        root.storage.bury("gpt", TAG, 2, 1000)
    parts = await root.start()
    assert root.storage.files("gpt", TAG) == [names.MANIFEST]
    assert isinstance(root.storage.outcome("gpt", TAG), Abandonment)
    assert (parts.catalog.job("gpt").checkpoints, root.left().retiring) == ({}, {})


async def test_a_recovery_lists_the_job_without_the_cache_of_a_network_file_system(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(root.path)
    calls, job, listed = StorageCalls(60.0), Catalog().job("gpt"), list[str]()
    problem = [errno.EIO, errno.EROFS, errno.EIO]

    def refresh_listing(self: Repository, job: str, tag: str | None = None) -> None:
        listed.append(job)
        raise OSError(number := problem.pop(0), os.strerror(number))

    monkeypatch.setattr(Repository, "refresh_listing", refresh_listing)
    await scan_job(root.storage, job, calls)
    assert listed == []
    await scan_job(root.storage, job, calls, fresh=True)
    assert (listed, list(job.checkpoints)) == (["gpt"], [TAG])
    job.node = Membership(run_id="0" * 32, ranks=[0])
    await scan_job(root.storage, job, calls, fresh=True)
    with pytest.raises(StorageError, match="Input/output error"):
        await scan_job(root.storage, job, calls, fresh=True)
    calls.close()


async def test_a_deletion_is_finished_though_the_manifest_cannot_be_read(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_checkpoint(root.path)
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))

    def fail(self: Repository, job: str, tag: str) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Repository, "is_committed", fail)
    await root.start()
    assert (root.storage.tags("gpt"), root.left().retiring) == ([], {})


async def test_a_deletion_that_had_begun_is_finished_though_it_is_pinned(root: Root) -> None:
    manifest = write_checkpoint(root.path)
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    root.storage.pin("gpt", TAG)
    root.storage.delete_files("gpt", TAG, [names.MANIFEST])
    await root.start()
    assert root.storage.tags("gpt") == []


async def test_a_deletion_takes_data_files_too(root: Root) -> None:
    manifest = write_checkpoint(root.path, files=3)
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    root.storage.delete_files("gpt", TAG, [names.MANIFEST])
    (root.path / "gpt" / TAG / manifest.parts[0].file).unlink()
    await root.start()
    assert (root.storage.tags("gpt"), root.left().retiring) == ([], {})


async def test_a_deletion_of_several_nodes_takes_the_files_of_earlier_tries(root: Root) -> None:
    """The manifest does not name them, and the receipts, which tell of several nodes,
    were deleted before the daemon died.
    """
    manifest = write_checkpoint(root.path)
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    root.storage.delete_files("gpt", TAG, [names.MANIFEST])
    (root.path / "gpt" / TAG / STRAY).write_bytes(b"of an earlier try")
    await root.start()
    assert (root.storage.tags("gpt"), root.left().retiring) == ([], {})


async def test_a_start_succeeds_though_the_journal_has_no_room_for_the_end_of_a_deletion(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_checkpoint(root.path)
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    append = Journal.append

    async def full(self: Journal, record: r.Record) -> None:
        if isinstance(record, r.Retired):
            raise StorageError("the journal has no room", errno.ENOSPC)
        await append(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", full)
        await root.start()
    assert list(root.left().retiring) == [f"gpt/{TAG}"]
    await root.start()
    assert (root.storage.tags("gpt"), root.left().retiring) == ([], {})


async def test_a_damaged_checkpoint_whose_deletion_is_finished_is_not_counted(root: Root) -> None:
    manifest = write_checkpoint(root.path)
    (root.path / "gpt" / TAG / names.MANIFEST).write_bytes(b"damaged")
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    parts = await root.start()
    assert root.storage.tags("gpt") == []
    assert parts.catalog.job("gpt").damaged == {}


async def test_a_deletion_that_fails_is_left_for_the_next_start(root: Root) -> None:
    manifest = write_checkpoint(root.path)
    await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    await root.start(Failing("remove_directory"))
    assert list(root.left().retiring) == [f"gpt/{TAG}"]
    await root.start()
    assert (root.storage.tags("gpt"), root.left().retiring) == ([], {})


# -- what was being saved


async def test_of_a_committed_checkpoint_only_files_staged_beside_it_are_deleted(
    root: Root,
) -> None:
    manifest = write_checkpoint(root.path)
    part = manifest.parts[0].file
    place = root.path / "gpt" / TAG
    for name in (STRAY, STRAY.replace(".ckpt", ".0001.ckpt"), "manifest.json.tmp", "notes.txt"):
        (place / name).write_bytes(b"x")
    await root.journal(staging(STRAY), staging(part))
    await root.start()
    assert root.files() == sorted([names.MANIFEST, part, "notes.txt"])
    assert root.left().staged == {}


@pytest.mark.parametrize(("world_size", "files"), [(1, 1), (3, 1), (2, 3)])
async def test_durable_parts_of_all_ranks_are_committed(
    root: Root, world_size: int, files: int
) -> None:
    manifest = await uncommitted(root, world_size, files)
    await root.start()
    found = root.storage.read_manifest("gpt", TAG)
    assert (found.parts, found.attempt, found.step, found.world_size) == (
        manifest.parts,
        2,
        1000,
        world_size,
    )
    assert found.features == (["files"] if files > 1 else [])
    assert root.storage.read_newest("gpt") == TAG
    assert root.left().staged == {}


async def dropped(root: Root) -> None:
    await root.start()
    assert root.storage.tags("gpt") == []
    assert root.left().staged == {}


async def test_durable_parts_of_only_some_ranks_are_not_committed(root: Root) -> None:
    manifest = write_checkpoint(root.path, world_size=2)
    (root.path / "gpt" / TAG / names.MANIFEST).unlink()
    await root.journal(
        *(staging(part.file, part.rank) for part in manifest.parts), durable(manifest, 0)
    )
    await dropped(root)


async def test_a_part_that_is_not_durable_is_not_committed(root: Root) -> None:
    (root.path / "gpt" / TAG).mkdir(parents=True)
    (root.path / "gpt" / TAG / STRAY).write_bytes(b"half")
    await root.journal(staging(STRAY))
    await dropped(root)


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: bytes(len(data)), lambda data: None],
    ids=["cut", "zeros", "gone"],
)
@pytest.mark.parametrize("file", [names.part_file(0, NONCE), names.part_file(0, NONCE, 1)])
async def test_a_damaged_part_is_not_committed(
    root: Root, file: str, damage: Callable[[bytes], bytes | None]
) -> None:
    await uncommitted(root, files=2)
    part = root.path / "gpt" / TAG / file
    changed = damage(part.read_bytes())
    part.unlink()
    if changed is not None:
        part.write_bytes(changed)
    await dropped(root)


async def test_beside_a_damaged_manifest_no_file_is_touched(root: Root) -> None:
    manifest = await uncommitted(root)
    (root.path / "gpt" / TAG / names.MANIFEST).write_bytes(b"{}")
    parts = await root.start()
    assert root.files() == sorted([names.MANIFEST, manifest.parts[0].file])
    assert list(parts.catalog.job("gpt").damaged) == [TAG]


async def test_files_that_cannot_be_swept_are_left_for_the_next_start(root: Root) -> None:
    (root.path / "gpt" / TAG).mkdir(parents=True)
    (root.path / "gpt" / TAG / STRAY).write_bytes(b"half")
    await root.journal(staging(STRAY))
    await root.start(Failing("remove_directory"))
    assert list(root.left().staged) == [f"gpt/{TAG}"]
    await dropped(root)


@pytest.mark.parametrize("what", ["staged", "committed", "retiring"])
async def test_a_journal_that_breaks_during_a_start_ends_it_and_the_next_start_continues(
    root: Root, what: str
) -> None:
    manifest = await uncommitted(root) if what == "staged" else write_checkpoint(root.path)
    if what == "committed":
        await root.journal(staging(manifest.parts[0].file))
    if what == "retiring":
        await root.journal(r.Retiring(job="gpt", tag=TAG, files=[manifest.parts[0].file]))
    with pytest.raises(JournalBroken):
        await root.start(Failing("sync_data"))
    await root.start()
    assert root.storage.tags("gpt") == ([] if what == "retiring" else [TAG])
    assert (root.left().staged, root.left().retiring) == ({}, {})


async def test_a_daemon_whose_journal_breaks_does_not_start(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await uncommitted(root)
    assert manifest

    async def finish_save(*_: Any) -> None:
        raise JournalBroken("cannot write the journal: Input/output error")

    monkeypatch.setattr(recovery, "finish_save", finish_save)
    with pytest.raises(JournalBroken):
        await root.start()


async def test_a_root_of_many_jobs_is_scanned(root: Root) -> None:
    for job in ("a", "b", "c"):
        write_checkpoint(root.path, job)
    parts = await root.start()
    assert sorted(parts.catalog.jobs) == ["a", "b", "c"]
    assert [parts.catalog.job(job).newest_checkpoint().tag for job in "abc"] == [TAG] * 3  # type: ignore[union-attr]


@pytest.mark.usefixtures("processes")
def test_a_commit_from_durable_parts_tells_their_chains(place: Home) -> None:
    """The daemon that wrote the parts may have died before it could commit them."""
    chains.save_job(place)
    repository = open_root(place.root)
    manifests = [repository.read_manifest("job", chains.tag(step)) for step in chains.STEPS]
    parts = [manifest.parts[0] for manifest in manifests]
    found = [
        recovery._read_part(
            repository,
            r.PartDurable(
                job="job", attempt=1, step=step, rank=0, tag=chains.tag(step), file=part.file,
                bytes=part.bytes, index_sha256=part.index_sha256,
            ),
        )[0][0]
        for step, part in zip(chains.STEPS, parts, strict=True)
    ]  # fmt: skip
    assert found == parts
    assert tuple(part.chain for part in found) == chains.CHAINS
