"""Sources of a snapshot are refused when they are not what was meant, and leave no
descriptor and no lock behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.agent.copy import checked_copy
from ckptd.agent.read.sources import load_blob, newer, open_checkpoint, open_memory
from ckptd.agent.state.tree import TensorRef
from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound, UnsavableValue
from ckptd.shared.formats.segment import read_header, write_check, write_header
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.locate import open_root
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system.descriptor import Descriptor
from tests.shared.samples import sample_plan
from tests.support.descriptors import opened as descriptors
from tests.support.forged import forge
from tests.support.tmpfs import sealed_slot

TAG = "step-00000001.a0001"


@pytest.fixture
def slot() -> Iterator[Descriptor]:
    with sealed_slot(
        sample_plan(), SnapshotRequest(metrics={"loss": 0.5}, user_content='{"epoch":3}')
    ) as sealed:
        yield sealed


# -- memory


def test_a_snapshot_in_memory_has_what_was_asked_for_with_it(slot: Descriptor) -> None:
    opened = open_memory([slot], 1, 5, TAG)
    assert (opened.tag, opened.metrics, opened.user_content, opened.manifest) == (
        TAG,
        {"loss": 0.5},
        {"epoch": 3},
        None,
    )
    assert opened.verify() == sum(chunk.length for chunk in opened.sources[0].ranges)
    opened.close()
    opened.close()
    assert slot.closed


@pytest.mark.skipif(
    checked_copy.copy_bytes is None, reason="no compiler was found when ckptd was installed"
)
def test_the_memory_of_a_snapshot_is_unmapped_when_it_is_closed(slot: Descriptor) -> None:
    path = os.readlink(f"/proc/self/fd/{slot.fileno()}")

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(path)

    opened = open_memory([slot], 1, 5, TAG)
    opened.verify()
    assert mappings() == 1
    opened.close()
    assert mappings() == 0


def damage(slot: Descriptor, how: str) -> None:
    fd, header = slot.fileno(), read_header(slot.fileno())
    if how == "filled again":
        write_header(fd, header.next(type(header.state).FILLING, step=6))
    elif how == "cut short":
        os.ftruncate(fd, header.file_length - 1)
    elif how == "a byte of the plan":
        os.pwrite(fd, b"\xff", header.data_offset + header.plan.offset)
    elif how == "without checksums":
        write_check(fd, header, [])
    elif how == "values over the tensors":
        write_header(fd, header.next(header.state, signature=header.signature, plan=header.plan,
        request=header.request,
                                     values=type(header.values)(0, 8, 0)))  # fmt: skip


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("filled again", "the slot of step 5 has been filled again"),
        ("cut short", "the slot of step 5 has been cut short"),
        ("a byte of the plan", "plan document of job 'gpt', step 5, is damaged in memory"),
        ("without checksums", "the slot of step 5 has no checksums"),
        (
            "values over the tensors",
            "the slot of step 5 is damaged: its values overlap its tensors",
        ),
    ],
)
def test_a_slot_that_is_not_what_was_sealed_is_refused_and_closed(
    slot: Descriptor, how: str, words: str
) -> None:
    damage(slot, how)
    with pytest.raises(IntegrityError, match=f"^{words}$"):
        open_memory([slot], 1, 5, TAG)
    assert slot.closed


# -- storage


@pytest.fixture
def storage(tmp_path: Path) -> Repository:
    forge(tmp_path, (4,), [[((0,), (2,))], [((2,), (2,))]])
    return open_root(tmp_path)


def test_an_open_checkpoint_cannot_be_deleted(storage: Repository) -> None:
    opened = open_checkpoint(storage, "gpt", TAG)
    assert f"pid {os.getpid()}" in storage.readers("gpt", TAG)
    assert (opened.manifest is not None, opened.verify() > 0, opened.document(1)["state"]) == (
        True,
        True,
        {"w": TensorRef("w")},
    )
    opened.close()
    assert (storage.readers("gpt", TAG), descriptors(Path(storage.where()))) == ("", [])


def test_a_checkpoint_that_is_not_closed_is_closed_with_its_object(storage: Repository) -> None:
    opened = open_checkpoint(storage, "gpt", TAG)
    assert descriptors(Path(storage.where())) != []
    del opened
    assert descriptors(Path(storage.where())) == []


def test_a_forked_child_does_not_release_the_lock_of_its_parent(storage: Repository) -> None:
    opened = open_checkpoint(storage, "gpt", TAG)
    child = os.fork()
    if child == 0:
        opened.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert storage.readers("gpt", TAG) != ""
    opened.close()
    assert storage.readers("gpt", TAG) == ""


def altered(storage: Repository, **changes: Any) -> None:
    """Replace members of the manifest's first part."""
    manifest = storage.read_manifest("gpt", TAG)
    first = msgspec.structs.replace(manifest.parts[0], **changes)
    path = Path(storage.where()) / "gpt" / TAG / "manifest.json"
    path.write_bytes(msgspec.structs.replace(manifest, parts=[first, *manifest.parts[1:]]).encode())


def test_a_part_that_is_not_the_manifests_is_refused_and_leaves_nothing_open(
    storage: Repository,
) -> None:
    altered(storage, items=7)
    with pytest.raises(
        IntegrityError, match=r"rank-00000\..* is not the part that the manifest describes$"
    ):
        open_checkpoint(storage, "gpt", TAG)
    assert (descriptors(Path(storage.where())), storage.readers("gpt", TAG)) == ([], "")


def test_a_checkpoint_that_is_deleted_while_it_is_opened_is_not_found(storage: Repository) -> None:
    manifest = storage.read_manifest("gpt", TAG)
    shutil.rmtree(Path(storage.where()) / "gpt" / TAG)
    with pytest.raises(NotFound):
        open_checkpoint(storage, "gpt", TAG, manifest)


def test_a_checkpoint_that_is_overwritten_while_it_is_opened_is_opened_again(
    storage: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = storage.read_manifest("gpt", TAG)
    stale = msgspec.structs.replace(
        stale, parts=[msgspec.structs.replace(part, items=9) for part in stale.parts]
    )
    opened = open_checkpoint(storage, "gpt", TAG, stale)
    assert opened.manifest is not None
    assert opened.manifest.parts == storage.read_manifest("gpt", TAG).parts
    opened.close()


# -- values


def test_values_are_blobs_for_dcp(storage: Repository) -> None:
    opened = open_checkpoint(storage, "gpt", TAG)
    metadata = opened.metadata([{"state": {"w": TensorRef("w"), "n": {"epoch": 3}}}, {"state": {}}])
    assert set(metadata.state_dict_metadata) == {"w", "n.epoch"}
    assert load_blob("n.epoch", opened.blobs(["n.epoch"])["n.epoch"]) == 3
    planned = opened.metadata([{"state": {}, "planner_data": {"a": ("a",)}, "save_id": "x"}])
    assert (
        planned.planner_data,
        planned.storage_meta is not None and planned.storage_meta.save_id,
    ) == ({"a": ("a",)}, "x")
    with pytest.raises(NotFound, match="^no value 'nope' in this checkpoint$"):
        opened.blobs(["nope"])
    opened.close()


def test_a_blob_that_only_pickled_code_could_bring_back_is_refused() -> None:
    with pytest.raises(
        UnsavableValue,
        match="^key: it can only be loaded by running pickled code, which ckptd does not do$",
    ):
        load_blob("key", b"\x80\x04N.")


def test_the_error_for_a_newer_format_names_the_checkpoint_once() -> None:
    assert str(newer(NewerFormat("gpt/x: version 2"), "gpt/x", "step=")) == str(
        newer(NewerFormat("version 2"), "gpt/x", "step=")
    )
