"""Tests that a stage belongs to one root: what is refused, and what is accepted while
the root does not answer.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.daemon.root.storage_calls import StorageCalls
from ckptd.daemon.stage.root import StageRoot, check_apart, check_is_no_stage
from ckptd.shared.errors import Busy, IntegrityError, InvalidConfig, StorageError
from ckptd.shared.location import Url
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine

Join = Callable[[Path], StageRoot]


@pytest.fixture
def stage(tmp_path: Path) -> Repository:
    made = open_root(tmp_path / "stage")
    made.storage.serve(machine.host()).close()
    return made


@pytest.fixture
def calls() -> Iterator[StorageCalls]:
    made = StorageCalls(60.0)
    yield made
    made.close()


@pytest.fixture
def join(stage: Repository, calls: StorageCalls) -> Join:
    return lambda root: StageRoot(open_root(root), root, stage, calls)


def test_a_stage_belongs_to_one_root(tmp_path: Path, stage: Repository, join: Join) -> None:
    first = join(tmp_path / "a")
    assert first.identity == open_root(tmp_path / "a").identity()
    first.close()
    other = open_root(tmp_path / "b")
    other.storage.serve(machine.host()).close()
    other.identity()
    with pytest.raises(InvalidConfig, match="the stage belongs to"):
        join(tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "moved")
    join(tmp_path / "moved").close()  # the same root at another place
    with pytest.raises(
        InvalidConfig, match=f"is the stage of {tmp_path / 'moved'}: start the daemon with"
    ):
        check_is_no_stage(stage)
    check_is_no_stage(open_root(tmp_path / "moved"))


def test_one_daemon_has_the_root(tmp_path: Path, stage: Repository, join: Join) -> None:
    first = join(tmp_path / "a")
    with pytest.raises(Busy, match="already serves"):
        join(tmp_path / "a")
    first.close()
    join(tmp_path / "a").close()


def test_a_root_that_is_not_there_is_neither_made_nor_taken_for_another(
    tmp_path: Path, stage: Repository, join: Join
) -> None:
    """As under the mount point of a file system that is not mounted."""
    first = join(tmp_path / "a")
    first.close()
    (tmp_path / "a").rename(tmp_path / "unmounted")
    (tmp_path / "a").mkdir()
    later = join(tmp_path / "a")
    assert later.identity == first.identity
    with pytest.raises(StorageError, match="is it mounted"):
        later.open()
    assert list((tmp_path / "a").iterdir()) == []
    (tmp_path / "a").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "a")
    later.open()
    later.close()


def test_the_first_start_needs_the_root(
    tmp_path: Path, stage: Repository, calls: StorageCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = open_root(tmp_path / "a")

    def fail(host: str) -> None:
        raise OSError(errno.ETIMEDOUT, "no answer")

    monkeypatch.setattr(root.storage, "serve", fail)
    with pytest.raises(StorageError, match="cannot use the root"):
        StageRoot(root, tmp_path / "a", stage, calls)
    assert stage.stage_document() is None


def test_a_root_with_checkpoints_of_its_own_is_no_stage(
    tmp_path: Path, stage: Repository, join: Join
) -> None:
    (tmp_path / "stage" / "gpt" / "step-00000001.a0001").mkdir(parents=True)
    with pytest.raises(
        InvalidConfig,
        match="is a root with checkpoints of its own: name an empty directory as the stage",
    ):
        join(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_root_that_hangs_does_not_keep_the_daemon_from_its_start(
    tmp_path: Path, stage: Repository, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = join(tmp_path / "a")
    first.close()
    impatient, answered = StorageCalls(0.05), threading.Event()
    root = open_root(tmp_path / "a")
    serve = root.storage.serve
    monkeypatch.setattr(root.storage, "serve", lambda host: (answered.wait(60), serve(host))[1])
    later = StageRoot(root, tmp_path / "a", stage, impatient)
    assert later.identity == first.identity
    answered.set()
    later.open()
    later.close()
    impatient.close()


@pytest.mark.parametrize("document", [b"", b"{}", b'{"root": "/a", "identity": "no"}', b"\xff"])
def test_a_damaged_document_is_told(
    tmp_path: Path, stage: Repository, join: Join, document: bytes
) -> None:
    stage.publish_stage(document)
    with pytest.raises(IntegrityError, match="does not say whose stage this is"):
        join(tmp_path / "a")


def test_links_do_not_hide_that_stage_and_root_lie_in_each_other(tmp_path: Path) -> None:
    (tmp_path / "root" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "root" / "inner")
    for stage, root in (("link", "root"), ("root", "link"), ("root", "root")):
        with pytest.raises(InvalidConfig, match="lie in each other"):
            check_apart(tmp_path / stage, tmp_path / root)
    check_apart(tmp_path / "link", tmp_path / "other")
    check_apart(tmp_path / "link", Url("s3", "bucket"))
