"""Knows the file `.metadata` that marks a checkpoint by itself (FORMAT.md, section 1),
and the files of other tools' checkpoints.
"""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

from ckptd.shared import names
from ckptd.shared.errors import IntegrityError
from ckptd.shared.system.storage_seam import Storage

MAGIC = b"#CKPTD-MARKER 1\n"
_TEXT = b"""\
This directory is a checkpoint of ckptd, and its manifest.json describes it.
Load it with ckptd.agent.StorageReader instead of DCP's FileSystemReader,
or convert it with `ckptd export DIR --to dcp --out OTHER`.
This file is here for programs that look for its name. It decides nothing, and holds no pickle.
"""
MARKER = MAGIC + _TEXT


class OtherTool(NamedTuple):
    """The checkpoint of another tool in a directory.

    file: the file by which it is known. importable: what `ckptd import` takes, relative
    to the directory, or None if it can read nothing.
    """

    tool: str
    file: str
    importable: str | None


_DCP, _HUGGING_FACE = "torch.distributed.checkpoint itself", "Hugging Face"
_KNOWN = {
    known.file: known
    for known in (
        OtherTool(_DCP, names.MARKER, ""),
        OtherTool(_HUGGING_FACE, "model.safetensors", ""),
        OtherTool(_HUGGING_FACE, "model.safetensors.index.json", ""),
        OtherTool(_HUGGING_FACE, "pytorch_model.bin", "pytorch_model.bin"),
        OtherTool(_HUGGING_FACE, "pytorch_model.bin.index.json", None),
        OtherTool(_HUGGING_FACE, "adapter_model.safetensors", "adapter_model.safetensors"),
        OtherTool("Orbax", "_CHECKPOINT_METADATA", None),
    )
}
_RANKS_OWN = re.compile(r"__[0-9]+\.metadata")
"""The metadata that a rank has written with `use_collectives=False`."""


def is_marked(storage: Storage) -> bool:
    """Return True if the place has the marker of ckptd. Raises OSError."""
    try:
        source = storage.open(names.MARKER)
    except (FileNotFoundError, NotADirectoryError, IntegrityError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link
            return False
        raise
    try:
        head = memoryview(bytearray(len(MAGIC)))
        return (
            source.size >= len(MAGIC)
            and source.read(head, 0) == len(MAGIC)
            and bytes(head) == MAGIC
        )
    finally:
        source.close()


def other_tool(storage: Storage) -> OtherTool | None:
    """Return the checkpoint of another tool in this place, or None if there is none.

    Raises OSError.
    """
    try:
        found = sorted(entry.name for entry in storage.children("") if not entry.nested)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for name in found:
        if name in _KNOWN and not (name == names.MARKER and is_marked(storage)):
            return _KNOWN[name]
        if _RANKS_OWN.fullmatch(name):
            return OtherTool(_DCP, name, None)
    return None
