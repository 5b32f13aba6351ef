"""Reads sealed slots: their documents, and the bytes of their chunks with checksums."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

from crc32c import crc32c

from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.non_finite import Learned
from ckptd.shared.formats.plan import ChunkRange, Plan, chunk_ranges, with_values
from ckptd.shared.formats.reuse import ChunkCheck, new_hasher
from ckptd.shared.formats.segment import (
    SegmentHeader,
    read_check,
    read_document,
    read_pieces,
)
from ckptd.shared.formats.snapshot_request import SnapshotRequest


class Plans:
    """A cache of plans that were decoded and found sound, by signature, with the places
    whose values should be finite.

    Their documents take at most `most` bytes, unless only one is kept.

    A structure seldom changes, and decoding a plan of ten thousand items takes 50 ms.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[Plan, Learned | None, int]] = OrderedDict()

    def decode(self, signature: bytes, document: bytes) -> tuple[Plan, Learned | None]:
        """Return the plan of `document`, which has this signature, and the places whose
        values should be finite, or None if the plan names none.

        Raises IntegrityError if it is not a sound plan.
        """
        with self._lock:
            if signature in self._known:
                self._known.move_to_end(signature)
                return self._known[signature][:2]
        plan = Plan.decode(document)
        learned = Learned.of(plan)
        with self._lock:
            if signature not in self._known:
                self._known[signature] = plan, learned, len(document)
                self._size += len(document)
            while self._size > self._most and len(self._known) > 1:
                self._size -= self._known.popitem(last=False)[1][2]
        return plan, learned


_plans = Plans(most=32 << 20)  # bytes of documents; a decoded plan takes several times as many


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """A sealed slot whose documents were read and verified.

    `fd` is a descriptor of its segment. `plan_document` is the plan as it was sealed.
    `learned` are the places whose values are counted, None if the plan names none.
    `ranges` are all chunks of the slot, in order. `crcs` are their checksums from the
    check area, or None if it has none.
    """

    fd: int
    header: SegmentHeader
    plan: Plan
    learned: Learned | None
    plan_document: bytes
    request: SnapshotRequest
    ranges: list[ChunkRange]
    crcs: list[int] | None

    @classmethod
    def read(cls, fd: int, header: SegmentHeader) -> SealedSlot:
        """Read and verify the documents of a sealed slot, and read its check area.

        Raises IntegrityError if a document is damaged or the plan is not sound.
        """
        document = read_document(fd, header, header.plan, "plan")
        if hashlib.sha256(document).digest() != header.signature:
            raise IntegrityError(
                f"plan document of {header.job} step {header.step} is not the one that was sealed"
            )
        plan, learned = _plans.decode(header.signature, document)
        request = SnapshotRequest.decode(read_document(fd, header, header.request, "request"))
        values = (header.values.offset, header.values.length)
        if values[0] < plan.data_length or plan.data_length > header.capacity:
            raise IntegrityError(
                f"documents of {header.job} step {header.step} overlap its tensors"
            )
        ranges = chunk_ranges(with_values(plan.regions, values), header.chunk_size)
        crcs = read_check(fd, header)
        return cls(
            fd,
            header,
            plan,
            learned,
            document,
            request,
            ranges,
            crcs if crcs is not None and len(crcs) == len(ranges) else None,
        )

    def compare(self, number: int, sealed: int, found: int) -> None:
        """Raise IntegrityError if the crc32c that was `found` for the chunk of this
        number is not that of the seal.
        """
        if sealed != found:
            raise IntegrityError(
                f"chunk {number} of {self.header.job} step {self.header.step} has changed in "
                f"memory since it was sealed"
            )

    def check(
        self,
        chunk: ChunkRange,
        buffer: memoryview,
        *,
        with_digest: bool,
        non_finite: Counter[int] | None = None,
    ) -> ChunkCheck:
        """Read a chunk through `buffer`, and return its checksum, with its digest on
        request.

        A buffer that is as long as the chunk holds its bytes afterwards. `non_finite`, if
        given, gets how many values are not finite, by the numbers of their tensors. They
        are counted while the bytes are in the CPU's cache.
        """
        crc, hasher, at = 0, new_hasher() if with_digest else None, chunk.offset
        for piece in read_pieces(self.fd, self.header, chunk.offset, chunk.length, buffer):
            crc = crc32c(piece, crc)
            if hasher is not None:
                hasher.update(piece)
            if non_finite is not None and self.learned is not None:
                non_finite.update(self.learned.count(piece, at))
            at += len(piece)
        return ChunkCheck(crc, b"" if hasher is None else hasher.digest())

    def digest(self, chunk: ChunkRange, buffer: memoryview) -> bytes:
        """Read a chunk through `buffer`, and return its digest."""
        hasher = new_hasher()
        for piece in read_pieces(self.fd, self.header, chunk.offset, chunk.length, buffer):
            hasher.update(piece)
        return hasher.digest()
