"""Tests that attempts are claimed even without a free inode, and that no attempt is
claimed twice.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.daemon.job.catalog import Job
from ckptd.daemon.root.attempts import Attempts
from ckptd.daemon.root.claims import Claims
from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.shared import names
from ckptd.shared.errors import InvalidRequest, StorageError
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.fs import PosixFileSystem


class Full(PosixFileSystem):
    """A file system without a free inode, or with another fault, once `fault` is set."""

    fault = 0
    no_links = 0

    def create(self, name: str, directory: int, *, direct: bool = False, mode: int = 0o666) -> int:
        if self.fault:
            raise OSError(self.fault, os.strerror(self.fault))
        return super().create(name, directory, direct=direct, mode=mode)

    def link(self, old: str, old_directory: int, new: str, directory: int) -> None:
        if self.no_links:
            raise OSError(self.no_links, os.strerror(self.no_links))
        super().link(old, old_directory, new, directory)


class Place:
    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.fs, self.root = Full(), root
        self.posix = PosixStorage(root, self.fs)
        self.storage = Repository(self.posix)
        self.calls = StorageCalls(60.0)
        self.attempts = Attempts(self.storage, self.calls)
        self._claims = Claims(self.attempts, seconds=60.0)
        self.claims = root / names.CONTROL / names.ATTEMPTS / "gpt"
        self.lock = root / names.CONTROL / machine.host() / names.LOCK
        self.posix.ensure(names.control(machine.host()))
        self.posix.ensure(names.attempts("gpt"))
        self.lock.touch()

    async def claim(self, known: int) -> int:
        """Begin the next attempt above `known`."""
        return await self._claims.claim(Job("gpt"), known)

    def claimed(self) -> list[str]:
        return sorted(path.name for path in self.claims.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "root")
    yield made
    made.calls.close()


async def test_attempts_increase_and_the_newest_two_claims_are_kept(place: Place) -> None:
    assert [await place.claim(0) for _ in range(4)] == [1, 2, 3, 4]
    assert place.claimed() == ["a0003", "a0004"]
    assert await place.claim(9) == 10


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_without_an_inode_a_claim_is_a_link_to_another(place: Place, number: int) -> None:
    assert await place.claim(0) == 1
    place.lock.unlink()
    place.fs.fault = number
    assert [await place.claim(0) for _ in range(4)] == [2, 3, 4, 5]
    assert place.claimed() == ["a0004", "a0005"]
    assert place.storage.newest_attempt("gpt") == 5
    place.fs.fault = 0
    assert [await place.claim(0) for _ in range(2)] == [6, 7]


async def test_the_first_claim_of_a_job_is_a_link_to_the_lock_file(place: Place) -> None:
    place.fs.fault = errno.ENOSPC
    assert [await place.claim(0) for _ in range(3)] == [1, 2, 3]
    assert place.lock.stat().st_nlink == 3


@pytest.mark.parametrize("full", [False, True])
async def test_a_number_that_is_claimed_already_is_not_used(
    place: Place, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.claims.joinpath("a0001").touch()
    place.claims.joinpath("a0002").touch()
    place.fs.fault = errno.ENOSPC if full else 0
    monkeypatch.setattr(Repository, "newest_attempt", lambda self, job: 0)
    assert await place.claim(0) == 3


@pytest.mark.parametrize("number", [errno.EMLINK, errno.EPERM, errno.ENOSYS])
async def test_without_links_the_error_is_that_there_is_no_room(place: Place, number: int) -> None:
    place.claims.joinpath("a0001").touch()
    place.fs.fault, place.fs.no_links = errno.ENOSPC, number
    with pytest.raises(
        StorageError, match="cannot claim an attempt of job 'gpt' under .*: No space left on device"
    ) as caught:
        await place.claim(0)
    assert caught.value.errno == errno.ENOSPC
    assert place.claimed() == ["a0001"]


async def test_only_an_empty_file_is_linked(place: Place) -> None:
    place.claims.joinpath("a0001").write_text("mine")
    place.claims.joinpath("a0002").symlink_to("a0001")
    place.lock.unlink()
    place.fs.fault = errno.ENOSPC
    with pytest.raises(StorageError, match="No space left on device"):
        await place.claim(0)
    assert place.claimed() == ["a0001", "a0002"]


async def test_another_error_is_not_worked_around(place: Place) -> None:
    place.claims.joinpath("a0001").touch()
    place.fs.fault = errno.EIO
    with pytest.raises(StorageError, match="Input/output error"):
        await place.claim(0)
    assert place.claimed() == ["a0001"]


async def test_exactly_one_number_is_claimed_and_by_one_daemon(place: Place) -> None:
    other = Attempts(place.storage, place.calls)
    assert await place.attempts.claim("gpt", 3) is True
    assert await other.claim("gpt", 3) is False
    # The claim is durable: another run has it now.
    assert await place.attempts.claim("gpt", 3) is False
    assert place.claimed() == ["a0003"]


async def test_a_claim_whose_sync_failed_still_belongs_to_this_daemon(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(place.fs, "sync_directory", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            await place.attempts.claim("gpt", 1)
    assert await place.attempts.claim("gpt", 1) is True
    assert place.claimed() == ["a0001"]


async def test_a_node_that_could_make_the_claim_of_another_node_does_not_share_its_root(
    place: Place, tmp_path: Path
) -> None:
    """The other node has a copy of the root, with its identity, as after `rsync`."""
    copy = tmp_path / "copy"
    shutil.copytree(place.root, copy)
    other = Place(copy)
    attempt = await place.claim(0)
    await place.attempts.check_shared("gpt", attempt)
    await place.attempts.check_shared("gpt", attempt)
    with pytest.raises(InvalidRequest) as caught:
        await other.attempts.check_shared("gpt", attempt)
    assert str(caught.value) == (
        f"{machine.host()} could claim attempt 1 of job 'gpt', which the node of rank 0 has "
        f"claimed: {copy} is another directory on this "
        "node, or its file system lets several nodes create one file; use a shared file system "
        "such as NFS or Lustre, or an object store"
    )
    other.calls.close()


async def test_a_node_that_joins_after_newer_attempts_have_begun_is_not_told_that_it_shares_no_root(
    place: Place,
) -> None:
    """The claim of the attempt that it joins is deleted by then."""
    for _ in range(3):
        await place.claim(0)
    assert place.claimed() == ["a0002", "a0003"]
    await place.attempts.check_shared("gpt", 1)
    assert place.claimed() == ["a0002", "a0003"]
