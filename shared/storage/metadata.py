"""Reads the metadata of a checkpoint, whether it is in the manifest or in a metadata
object (FORMAT.md, section 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.metadata_object import MetadataReader
from ckptd.shared.formats.plan import Described
from ckptd.shared.formats.sharding import Mesh
from ckptd.shared.storage.repository import Repository


def open_metadata(repository: Repository, job: str, tag: str, manifest: Manifest) -> MetadataReader:
    """Open the metadata object that a manifest names.

    The caller closes it. Raises IntegrityError if it is missing or damaged, OSError.
    """
    entry = manifest.metadata_object
    assert entry is not None
    called = f"{job}/{tag}/{entry.file}"
    try:
        source = repository.open_file(job, tag, entry.file)
    except FileNotFoundError:
        raise IntegrityError(f"{called} is missing") from None
    try:
        return MetadataReader(source, entry, manifest.world_size, called)
    except BaseException:
        source.close()
        raise


def metadata_objects(
    repository: Repository, job: str, tag: str, manifest: Manifest
) -> dict[str, bytes]:
    """Return the bytes of the metadata object, if there is one, by its name.

    They are verified. Raises IntegrityError, OSError.
    """
    if manifest.metadata_object is None:
        return {}
    with closing(open_metadata(repository, job, tag, manifest)) as reader:
        reader.verify()
        return {manifest.metadata_object.file: reader.whole()}


def tensors(
    repository: Repository, job: str, tag: str, manifest: Manifest
) -> tuple[dict[str, Described], Sequence[Mesh]]:
    """Return the entries of all tensors and blobs, by name, and the meshes of their
    rules. Raises IntegrityError, OSError.
    """
    if manifest.metadata_object is None:
        return manifest.metadata.get("state_dict_metadata", {}), manifest.metadata.get("meshes", [])
    with closing(open_metadata(repository, job, tag, manifest)) as reader:
        return dict(reader.entries()), reader.meshes
