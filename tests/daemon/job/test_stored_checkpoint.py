"""Tests what the daemon keeps of a manifest, and the order of checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

from ckptd.daemon.job.stored_checkpoint import StoredCheckpoint
from ckptd.shared.storage.locate import open_root
from tests.shared.samples import write_checkpoint


def stored(attempt: int, step: int | None, seq: int) -> StoredCheckpoint:
    return StoredCheckpoint(
        "gpt", f"{attempt}.{step}.{seq}", attempt, step, seq, 1, (), user_tag=False
    )


def test_it_says_what_the_manifest_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt", step=7, attempt=2)
    (tag,) = open_root(tmp_path).tags("gpt")
    manifest = open_root(tmp_path).read_manifest("gpt", tag)
    found = StoredCheckpoint.of(manifest)
    assert (found.job, found.tag, found.attempt, found.step, found.seq) == (
        "gpt",
        tag,
        2,
        7,
        manifest.seq,
    )
    assert (found.nbytes, found.files, found.user_tag) == (
        manifest.nbytes,
        tuple(manifest.files),
        False,
    )
    assert found.nbytes > 0
    assert found.files
    assert found.retention is None


def test_checkpoints_are_ordered_by_attempt_and_step_and_then_by_seq() -> None:
    first, *others = [
        stored(1, 9, 5),
        stored(2, None, 9),
        stored(2, 3, 1),
        stored(2, 3, 2),
        stored(2, 4, 1),
    ]
    assert sorted([*others, first], key=lambda checkpoint: checkpoint.order) == [first, *others]


def test_a_checkpoint_without_a_time_has_none() -> None:
    assert math.isnan(stored(1, 1, 1).created)
