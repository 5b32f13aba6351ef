"""Copies single checkpoints so that the copies are whole: no chunk of a copy is a delta,
and no file of it is linked, so that damage of one copy harms no other one.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec

from ckptd.daemon.stage.copier import CheckpointCopier, Copying, OnBytes
from ckptd.shared import names
from ckptd.shared.codecs import codec
from ckptd.shared.errors import AlreadyExists, IntegrityError, InvalidConfig
from ckptd.shared.formats.binary import align
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.part import Chunk, PartReader
from ckptd.shared.formats.part_writer import PartWriter

_MOST_THREADS = 8


class WholeCopier(CheckpointCopier):
    """Copies checkpoints as CheckpointCopier does, but writes each part that has linked
    files again, with all its chunks whole.

    The nonce of such a part follows from that of the source, so that a copy is
    recognised, and what an interrupted copy has left is found.
    """

    def size(self, manifest: Manifest) -> int:
        return sum(p.raw_bytes if p.linked_bytes else p.bytes for p in manifest.parts)

    def _named(self, manifest: Manifest) -> list[str]:
        return [*manifest.files, *map(_whole_file, manifest.parts)]

    def _is_there(self, job: str, tag: str, manifest: Manifest, data: bytes) -> bool:
        """Return True if the destination has a whole copy of the checkpoint.

        Raises AlreadyExists if it has another checkpoint, or a copy with linked files.
        """
        found = self._document_there(job, tag)
        if found is None:
            return False
        linked = any(part.linked_bytes for part in manifest.parts)
        if found == data and linked:
            raise AlreadyExists(
                f"{self._to.where(job, tag)} is a copy with linked files: delete it, or copy to "
                f"another root"
            )
        try:
            there = manifest if found == data else Manifest.decode(found)
        except IntegrityError:
            raise self._other(job, tag) from None
        if manifest.with_parts(there.parts) != there or [part.file for part in there.parts] != [
            _whole_file(p) for p in manifest.parts
        ]:
            raise self._other(job, tag)
        return True

    def _copy_part(
        self, one: Copying, manifest: Manifest, part: PartEntry, progress: OnBytes
    ) -> PartEntry:
        if not part.linked_bytes:
            return super()._copy_part(one, manifest, part, progress)
        self._to.delete_files(one.job, one.tag, [_whole_file(part)])
        with closing(
            self._from.open_part(one.job, one.tag, part.file, part.index_sha256)
        ) as source:
            entry = self._write_whole(one, manifest, part, source, progress)
        self._verify(one, entry)
        return entry

    def _write_whole(
        self,
        one: Copying,
        manifest: Manifest,
        part: PartEntry,
        source: PartReader,
        progress: OnBytes,
    ) -> PartEntry:
        """Write the chunks of a part to files of their own, with the codec of the
        checkpoint, and return the entry of the new part.
        """
        try:
            encoder = codec.encoder(manifest.writer.get("codec", "auto"))
        except InvalidConfig:
            encoder = codec.encoder("auto")
        writer = PartWriter(self._to.part_files(one.job, one.tag), _whole_nonce(part), encoder)
        index = msgspec.structs.replace(
            source.index, chunks=[], files=[], placed=[], linked=[], bases=[], based=[]
        )
        try:
            writer.create(index, source.ranges, len(index.plan) + len(index.request))
            chunks = []
            for chunk in _rewritten(source, writer):
                chunks.append(chunk)
                progress(chunk.raw_length)
            return writer.finish(index, chunks, items=len(source.plan.items))
        except BaseException:
            writer.discard()
            raise


def _rewritten(source: PartReader, writer: PartWriter) -> Iterator[Chunk]:
    """Read, verify and write all chunks of a part on threads, and yield their entries in
    order. Raises IntegrityError, OSError.
    """
    local, room = threading.local(), align(max(chunk.length for chunk in source.ranges))

    def rewrite(number: int) -> Chunk:
        if not hasattr(local, "buffers"):
            local.buffers = mmap.mmap(-1, room), mmap.mmap(-1, room)
        chunk = source.ranges[number]
        with memoryview(local.buffers[0]) as raw, memoryview(local.buffers[1]) as stored:
            source.read_chunk(number, raw[: chunk.length])
            return writer.chunk(chunk, raw, stored, source.index.chunks[number].raw_crc)

    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="ckptd-copy") as pool:
        made = [pool.submit(rewrite, number) for number in range(len(source.ranges))]
        try:
            for one in made:
                yield one.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _whole_nonce(part: PartEntry) -> bytes:
    parsed = names.parse_part_file(part.file)
    assert parsed is not None  # a manifest names no other files
    return hashlib.sha256(b"whole copy of " + parsed[1]).digest()[:16]


def _whole_file(part: PartEntry) -> str:
    """Return the name of the part file in a whole copy."""
    return names.part_file(part.rank, _whole_nonce(part)) if part.linked_bytes else part.file
