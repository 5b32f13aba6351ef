"""Tests that the metadata of a checkpoint are read where they are: in the manifest, or
in an object beside it.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats import manifest as manifests
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.storage.metadata import metadata_objects, open_metadata, tensors
from ckptd.shared.storage.posix import PosixStorage
from ckptd.shared.storage.repository import Repository
from tests.shared.samples import write_checkpoint


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(PosixStorage(tmp_path))


def described(repository: Repository, tmp_path: Path, whole: Manifest | None = None) -> Manifest:
    """Return the manifest of a checkpoint whose metadata are in an object.

    `whole`: its manifest so far, if it is written already.
    """
    whole = whole or write_checkpoint(tmp_path)
    path = tmp_path / whole.job / whole.tag / "manifest.json"
    path.unlink()
    with mock.patch.object(manifests, "MOST_INLINE", 0):
        data, objects = whole.split()
    repository.publish_manifest(whole.job, whole.tag, data, objects=objects)
    return repository.read_manifest(whole.job, whole.tag)


def test_the_entries_are_the_same_in_both_places(repository: Repository, tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path)
    assert tensors(repository, whole.job, whole.tag, whole) == (
        whole.metadata["state_dict_metadata"],
        [],
    )
    assert whole.metadata["state_dict_metadata"]
    assert metadata_objects(repository, whole.job, whole.tag, whole) == {}
    small = described(repository, tmp_path, whole)
    assert small.metadata == {}
    assert tensors(repository, small.job, small.tag, small) == (
        whole.metadata["state_dict_metadata"],
        [],
    )
    assert list(metadata_objects(repository, small.job, small.tag, small)) == [small.files[-1]]


def test_an_object_that_is_missing_or_damaged_is_named(
    repository: Repository, tmp_path: Path
) -> None:
    small = described(repository, tmp_path)
    file = tmp_path / small.job / small.tag / small.files[-1]
    called = f"{small.job}/{small.tag}/{file.name}"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"?")
    with pytest.raises(IntegrityError, match=f"^the index of {called} does not match"):
        open_metadata(repository, small.job, small.tag, small)
    file.write_bytes(b"?" + data[1:])
    with pytest.raises(IntegrityError, match=f"^{called} does not begin with CKPTDMET"):
        metadata_objects(repository, small.job, small.tag, small)
    file.unlink()
    with pytest.raises(IntegrityError, match=f"^{called} is missing$"):
        tensors(repository, small.job, small.tag, small)


def test_a_commit_that_is_repeated_publishes_the_same_object(
    repository: Repository, tmp_path: Path
) -> None:
    small = described(repository, tmp_path)
    objects = metadata_objects(repository, small.job, small.tag, small)
    with pytest.raises(FileExistsError):
        repository.publish_manifest(small.job, small.tag, small.encode(), objects=objects)
    assert metadata_objects(repository, small.job, small.tag, small) == objects


def test_a_directory_is_removed_with_the_object_of_a_commit_that_did_not_happen(
    repository: Repository, tmp_path: Path
) -> None:
    small = described(repository, tmp_path)
    repository.delete_files(
        small.job, small.tag, [*(part.file for part in small.parts), "manifest.json"]
    )
    assert repository.files(small.job, small.tag) == [small.files[-1]]
    assert repository.delete_tag(small.job, small.tag)
    assert not (tmp_path / small.job / small.tag).exists()
