"""The preamble that starts every binary file, and the sizes that all binary files have
in common (FORMAT.md, section 0).
"""

from __future__ import annotations

import struct

from crc32c import crc32c

from ckptd.shared.errors import IntegrityError, NewerFormat

ALIGN = 4096
VERSION = 1
NEWER = VERSION + 1
"""The version of a file that this version of ckptd, and every earlier one, refuses to
read.
"""
PREAMBLE = struct.Struct("<8sHHI")
_CRC = struct.Struct("<I")
NO_STEP = (1 << 64) - 1
"""The step in a header of a slot or part that has none."""
PIECE = 1 << 20
"""The bytes that are read and checked at a time. They stay in the cache of a core: a
pass over whole chunks took 1.5 times as long.
"""


def align(length: int) -> int:
    """Return `length` rounded up to a multiple of ALIGN, the unit of O_DIRECT in bytes."""
    return -(-length // ALIGN) * ALIGN


def preamble(magic: bytes, features: int = 0, version: int = VERSION) -> bytes:
    return PREAMBLE.pack(magic, version, 0, features)


def check_preamble(
    data: bytes | memoryview, magic: bytes, what: str, known: int = 0, *, body: int = 0
) -> None:
    """Check the preamble at the start of `data`, which must hold at least 16 bytes.

    `what` is the name of the data in error texts.

    body: the number of bytes from the preamble on that the crc32c after them protects,
    or 0 if the caller compares it. The crc32c is compared before the version, so that a
    damaged version is not taken for a newer one.

    Raises IntegrityError if the data does not start with `magic`, if the padding is not
    zero, or if the crc32c differs. Raises NewerFormat if the version is not from 1 to
    VERSION, or if a feature bit is set that is not in `known`.
    """
    found, version, zero, features = PREAMBLE.unpack_from(data)
    if found != magic or zero:
        raise IntegrityError(f"{what} does not begin with {magic.decode()}")
    if body and _CRC.unpack_from(data, body)[0] != crc32c(data[:body]):
        raise IntegrityError(f"{what} does not match its checksum")
    if version > VERSION or version < 1 or features & ~known:
        raise NewerFormat(
            f"{what} was written by a newer ckptd (version {version}, features {features:#x}): "
            f"upgrade this one"
        )


def check_zero(data: bytes | memoryview, what: str) -> None:
    if bytes(data).count(0) != len(data):  # `any` takes a hundred times as long
        raise IntegrityError(f"{what}: padding is not zero")
