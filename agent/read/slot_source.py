"""Reads sealed slots: as the snapshot that they hold, or in place of the parts that
were written from them.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from ckptd.agent.copy.checked_copy import copy_bytes, copy_out
from ckptd.agent.copy.mapping import map_segment
from ckptd.shared.errors import IntegrityError, PeerLost
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.plan import Plan, chunk_ranges, with_values
from ckptd.shared.formats.segment import (
    SlotState,
    read_check,
    read_data,
    read_document,
    read_header,
)
from ckptd.shared.formats.snapshot_request import SnapshotRequest

log = logging.getLogger("ckptd.agent")


class SlotSource:
    """A sealed slot as a `ChunkSource`.

    Checks every chunk against the checksums in the slot's check area.

    Raises IntegrityError if the slot is damaged, has been filled again, or has no
    checksums yet. The descriptor stays the caller's. Call `close` at the end: memory
    that is mapped cannot be freed. `bytes_read` is the length of all chunks that were
    found sound.
    """

    remote = False

    def __init__(self, fd: int, attempt: int, step: int, *, mapped: bool = True) -> None:
        """mapped: False for a slot that is lent: its memory may be freed at any time."""
        self._fd = fd
        header = read_header(fd)
        if header.state is not SlotState.SEALED or (header.attempt, header.step) != (attempt, step):
            raise IntegrityError(f"the slot of step {step} has been filled again")
        if os.fstat(fd).st_size < header.file_length:
            raise IntegrityError(f"the slot of step {step} has been cut short")
        self.header = header
        self.plan = Plan.decode(read_document(fd, header, header.plan, "plan"))
        self.request = SnapshotRequest.decode(read_document(fd, header, header.request, "request"))
        self.values = (header.values.offset, header.values.length)
        if self.values[0] < self.plan.data_length:
            raise IntegrityError(
                f"the slot of step {step} is damaged: its values overlap its tensors"
            )
        self.ranges = chunk_ranges(with_values(self.plan.regions, self.values), header.chunk_size)
        checks = read_check(fd, header)
        if checks is None or len(checks) != len(self.ranges):
            raise IntegrityError(f"the slot of step {step} has no checksums")
        self.checks: Sequence[int] = checks
        self._sound: set[int] = set()
        self._mapped: Any = None
        if mapped and copy_bytes is not None:
            with suppress(OSError):
                self._mapped = map_segment(fd, header.file_length, writable=False)

    def close(self) -> None:
        """Unmap the slot.

        No read may be under way. Later reads go through the descriptor.
        """
        self._mapped = None

    def is_gone(self) -> bool:
        """Return True if the slot no longer holds what it held when it was opened.

        A trainer writes the header before it changes the first byte, so all that was
        read before this call is sound if it returns False.
        """
        try:
            return read_header(self._fd) != self.header
        except (IntegrityError, OSError):
            return True

    def read_chunk(self, number: int, raw: memoryview) -> None:
        self.read_pieces(number, [raw])

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        offset = self.ranges[number].offset
        crc = self._copy_out(offset, pieces)
        if crc is None:
            crc = 0
            for piece in pieces:
                crc = read_data(self._fd, self.header, offset, len(piece), piece, crc)
                offset += len(piece)
        if crc != self.checks[number]:
            raise IntegrityError(
                f"chunk {number} of step {self.header.step} has changed in memory since it was "
                f"sealed"
            )
        self._sound.add(number)
        return True

    @property
    def bytes_read(self) -> int:
        return sum(self.ranges[number].length for number in self._sound)

    def unchecked_chunk(self, number: int) -> torch.Tensor:
        """Return the bytes of a chunk, which must not be written to. Where the slot is
        mapped, they are not copied, and may change until they are used.

        Raises IntegrityError if the slot has been cut short, or OSError.
        """
        place, mapped = self.ranges[number], self._mapped
        if mapped is not None:
            begin = self.header.data_offset + place.offset
            return torch.frombuffer(mapped, dtype=torch.uint8, offset=begin, count=place.length)
        data = bytearray(place.length)
        read_data(self._fd, self.header, place.offset, place.length, memoryview(data))
        return torch.frombuffer(data, dtype=torch.uint8)

    def _copy_out(self, offset: int, pieces: Sequence[memoryview]) -> int | None:
        """Copy bytes of the slot from memory, and return their crc32c.

        Return None if they can only be read through the descriptor.
        """
        mapped = self._mapped
        if mapped is None:
            return None
        try:
            return copy_out(ctypes.addressof(mapped) + self.header.data_offset + offset, pieces)
        except OSError:
            return None


class ReadableSlot(Protocol):
    """A slot in memory that a part was written from."""

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        """Read and verify a chunk into `pieces`, which have the length of the chunk
        together. Return True.

        Raises IntegrityError, OSError or PeerLost if the slot cannot give the chunk.
        Nothing writes to `pieces` after that.
        """


class PartWithSlot:
    """A part as a `ChunkSource` whose chunks are read from the slot that it was written
    from, if there is one. `close` closes the part.

    Once the slot fails to give a chunk, this chunk and all later ones are read from
    storage. The slot stays the caller's. `slot` may be set while no read is under way, and
    `remote` with it, for a slot in the memory of a peer.
    """

    def __init__(self, part: PartReader, slot: ReadableSlot | None) -> None:
        self._part = part
        self.slot = slot
        self.remote = slot is None and part.remote
        self.name = part.name
        self.plan = part.plan
        self.values = part.values
        self.ranges = part.ranges

    @staticmethod
    def match(part: PartReader, slot: SlotSource) -> bool:
        """Return True if the slot has the bytes of the part, by the length and the
        checksum of every chunk.
        """
        return slot.ranges == part.ranges and list(slot.checks) == [
            chunk.raw_crc for chunk in part.index.chunks
        ]

    @property
    def part(self) -> PartReader:
        return self._part

    def close(self) -> None:
        self._part.close()

    def read_chunk(self, number: int, raw: memoryview) -> None:
        if not self._read_slot(number, [raw]):
            self._part.read_chunk(number, raw)

    def read_pieces(self, number: int, pieces: Sequence[memoryview]) -> bool:
        return self._read_slot(number, pieces) or self._part.read_pieces(number, pieces)

    def _read_slot(self, number: int, pieces: Sequence[memoryview]) -> bool:
        slot = self.slot
        if slot is None:
            return False
        try:
            return slot.read_pieces(number, pieces)
        except (IntegrityError, OSError, PeerLost) as error:
            if self.slot is not None:  # otherwise another thread has said so
                self.slot = None
                log.warning(
                    "%s is read from storage, because its copy in memory is lost: %s",
                    self.name,
                    error,
                )
            return False
