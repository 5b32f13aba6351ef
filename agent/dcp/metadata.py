"""Fills the fields of DCP's `Metadata` that describe the save as a whole, as DCP's own
file system storage fills them.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

from ckptd.shared.location import Location

VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""The version that this torch gives to metadata, or None if it gives none."""


def set_version(metadata: Metadata) -> None:
    """Set the version of the metadata as `FileSystemWriter` does, where the installed
    torch has one.
    """
    if VERSION is not None and hasattr(metadata, "version"):
        metadata.version = VERSION


def place_of(path: Location) -> str | Path:
    """Return the `checkpoint_id` of a `StorageMeta`: a Path as `FileSystemWriter` has
    it, or the text of a URL.
    """
    return path if isinstance(path, Path) else str(path)
