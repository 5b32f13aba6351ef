"""Tests the two steps of a copy; `test_copying.py` tests whole copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.daemon.stage.copier import CheckpointCopier
from ckptd.shared.errors import NotFound
from ckptd.shared.storage.locate import open_root
from tests.shared.samples import write_checkpoint


def test_parts_without_a_manifest_are_no_checkpoint(tmp_path: Path) -> None:
    source, target = open_root(tmp_path / "source"), open_root(tmp_path / "target")
    made = write_checkpoint(tmp_path / "source")
    target.storage.serve("host").close()
    copier = CheckpointCopier(source, target)
    one = copier.planned("gpt", made.tag)
    assert one.manifest is not None
    copied = copier.copy_parts(one, one.manifest, lambda length: None)
    with pytest.raises(NotFound):
        target.read_manifest("gpt", one.tag)
    copier.publish(one, copied)
    assert target.read_manifest_document("gpt", one.tag) == source.read_manifest_document(
        "gpt", one.tag
    )
    assert (target.read_newest("gpt"), copier.planned("gpt", one.tag).there) == (one.tag, True)
