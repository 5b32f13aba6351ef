"""The preamble and the alignment that all binary files have in common (FORMAT.md, section 0)."""

from __future__ import annotations

import struct

from ckptd.shared.errors import IntegrityError, NewerFormat

ALIGN = 4096
VERSION = 1
PREAMBLE = struct.Struct("<8sHHI")


def align(length: int) -> int:
    """Round up to the unit of O_DIRECT."""
    return -(-length // ALIGN) * ALIGN


def preamble(magic: bytes, features: int = 0) -> bytes:
    return PREAMBLE.pack(magic, VERSION, 0, features)


def check_preamble(data: bytes | memoryview, magic: bytes, what: str, known: int = 0) -> None:
    """Raises IntegrityError for another magic, NewerFormat for a version or a feature bit that is not `known`."""
    found, version, zero, features = PREAMBLE.unpack_from(data)
    if found != magic or zero:
        raise IntegrityError(f"{what} does not begin as {magic.decode()}")
    if version > VERSION or version < 1 or features & ~known:
        raise NewerFormat(f"{what} was written by a newer ckptd (version {version}, features {features:#x}): upgrade this one")


def check_zero(data: bytes | memoryview, what: str) -> None:
    if any(data):
        raise IntegrityError(f"{what}: padding is not zero")
