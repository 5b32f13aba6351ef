"""Writes a checkpoint into a directory without a daemon: each rank writes its part, and
the coordinator the manifest.

The format is the daemon's. The calling thread fills chunks, item after item, and other
threads encode and write them. This takes the memory of a few chunks and one item.
"""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from crc32c import crc32c

from ckptd.agent.plan.layout import Layout
from ckptd.agent.plan.save_plan import Resolved, stream
from ckptd.agent.threads.flag import Flag
from ckptd.shared import names
from ckptd.shared.codecs.codec import Encoder
from ckptd.shared.errors import IntegrityError, NotFound
from ckptd.shared.formats.binary import align
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.part import Chunk, PartIndex
from ckptd.shared.formats.part_writer import PartWriter, Spread
from ckptd.shared.formats.plan import DEFAULT_CHUNK, ChunkRange, Region, align_region, chunk_ranges
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.storage.standalone import StandaloneCheckpoint
from ckptd.shared.system.storage_seam import Closable, Creator, Sink

_MOST_THREADS = 8
_TRIES = 10


class StandalonePart:
    """One rank's part of a checkpoint that is saved without a daemon.

    Construction makes the checkpoint's directory.

    Call `write`, then `finish`, and `close` once the manifest is committed. After a
    failure call `discard`. Every method may raise OSError.
    """

    def __init__(
        self,
        checkpoint: StandaloneCheckpoint,
        rank: int,
        world_size: int,
        encoder: Encoder,
        threads: int | None,
        spread: Spread,
    ) -> None:
        checkpoint.make()
        self._checkpoint = checkpoint
        self._rank = rank
        self._world_size = world_size
        self._threads = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._chunks: list[Chunk] = []
        self._pid = os.getpid()
        self._encoder, self._spread = encoder, spread
        self._lease: Closable | None = None
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self.nonce = names.new_nonce()
        self._files = self._checkpoint.part_files(self._checkpoint.job, self._checkpoint.tag)
        self._writer = PartWriter(
            Creator(self._create_file, self._files.head_last),
            self.nonce,
            self._encoder,
            self._spread,
        )

    def _create_file(self, file: str, size: int, head: bytes | None) -> Sink:
        """Create a file of the part.

        Take the lease of the first, which keeps the whole part from being swept.
        """
        sink = self._files.create(file, size, head)
        if self._lease is None:
            try:
                self._lease = self._checkpoint.hold(file)
            except BaseException:
                sink.discard()
                raise
        return sink

    def write(self, layout: Layout, resolved: Resolved, room: int) -> None:
        """Write the items of a planner. See `write_pieces`."""
        self.write_pieces(layout, stream(layout, resolved), room)

    def write_pieces(self, layout: Layout, pieces: Iterator[memoryview], room: int) -> None:
        """Write the regions of the packed slot, chunk by chunk.

        `pieces` has their bytes. `room`: the bytes for the documents, about.
        """
        ranges = chunk_ranges(layout.plan.regions, DEFAULT_CHUNK)
        self._create(self._index(layout), ranges, room)
        self._chunks = self._write(ranges, pieces)

    def _create(self, index: PartIndex, ranges: list[ChunkRange], room: int) -> None:
        """Create the files and lock the part.

        If another save sweeps the part before it is locked, the part is created again.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                self._writer.create(index, ranges, room)
                return
            except FileNotFoundError:
                self._writer.discard()
                self._end_lease()
                if not tries_left:
                    raise
                self._begin()

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def finish(self, layout: Layout, values: bytes, request: SnapshotRequest) -> PartEntry:
        """Write the values document, the index and the trailer.

        Return the entry of the part, which is now durable.

        layout: that of `write`, except that it may now have the metadata.
        """
        region = Region(align_region(layout.plan.data_length), len(values), 1)
        last = self._write(chunk_ranges([region], DEFAULT_CHUNK), iter([memoryview(values)]))
        index = self._index(layout, request.encode(), (region.offset, region.length))
        return self._writer.finish(index, [*self._chunks, *last], items=len(layout.plan.items))

    def _index(
        self, layout: Layout, request: bytes = b"", values: tuple[int, int] = (0, 0)
    ) -> PartIndex:
        return PartIndex(
            job=self._checkpoint.job, attempt=self._checkpoint.attempt, step=None, rank=self._rank,
            world_size=self._world_size, tag=self._checkpoint.tag, signature=layout.signature,
            plan=layout.document, request=request, values=values, chunk_size=DEFAULT_CHUNK,
            chunks=[],
        )  # fmt: skip

    def discard(self, why: str) -> None:
        """Delete the files of a part that will not be committed.

        Does nothing in a forked child, which does not own the part.
        """
        if not self._closed and os.getpid() == self._pid:
            self._writer.discard()
            self.close()

    def close(self) -> None:
        """Release the lock of the part.

        From now on another save may sweep the part, unless a manifest names it.
        """
        self._end_lease()
        self._closed = True

    def _write(self, ranges: list[ChunkRange], pieces: Iterator[memoryview]) -> list[Chunk]:
        free: queue.SimpleQueue[tuple[mmap.mmap, mmap.mmap]] = queue.SimpleQueue()
        size = align(max((chunk.length for chunk in ranges), default=1))
        for _ in range(min(self._threads + 1, len(ranges))):
            free.put((mmap.mmap(-1, size), mmap.mmap(-1, size)))
        failed = Flag()

        def work(chunk: ChunkRange, buffers: tuple[mmap.mmap, mmap.mmap]) -> Chunk:
            try:
                with memoryview(buffers[0]) as raw, memoryview(buffers[1]) as stored:
                    return self._writer.chunk(chunk, raw, stored, crc32c(raw[: chunk.length]))
            except BaseException:
                failed.set()
                raise
            finally:
                free.put(buffers)

        under_way: list[Future[Chunk]] = []
        source = _Pieces(pieces)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="ckptd-write") as pool:
            for chunk in ranges:
                buffers = free.get()
                if failed.is_set():
                    break
                with memoryview(buffers[0]) as raw:
                    source.fill(raw[: chunk.length])
                under_way.append(_submit(pool, work, chunk, buffers))
        written = [future.result() for future in under_way]  # the first failure is raised
        if len(written) != len(ranges):
            raise IntegrityError(f"only {len(written)} of {len(ranges)} chunks were written")
        return written


def _submit(pool: ThreadPoolExecutor, work: Callable[..., Chunk], *arguments: Any) -> Future[Chunk]:
    try:
        return pool.submit(work, *arguments)
    except (
        RuntimeError
    ):  # the interpreter is shutting down and waits for this save: no pool takes work any more
        done: Future[Chunk] = Future()
        done.set_result(work(*arguments))
        return done


class _Pieces:
    """Bytes that arrive in pieces of any length, and are taken in lengths that the
    caller chooses.
    """

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")

    def fill(self, target: memoryview) -> None:
        at = 0
        while at < len(target):
            if not self._left:
                self._left = next(self._pieces)
            count = min(len(self._left), len(target) - at)
            target[at : at + count] = self._left[:count]
            self._left, at = self._left[count:], at + count


def commit(
    checkpoint: StandaloneCheckpoint,
    layout: Layout,
    parts: list[PartEntry],
    request: SnapshotRequest,
    codec: str,
    *,
    overwrite: bool,
    nonce: bytes,
) -> None:
    """Commit the checkpoint: publish its manifest, which replaces an existing one only
    if `overwrite` is True.

    layout: the coordinator's, with the metadata. parts: in the order of ranks. nonce:
    of the coordinator's part, which is locked.

    Raises FileExistsError, OSError. After an OSError the manifest may be there
    nevertheless.
    """
    manifest = Manifest.of(
        layout.plan,
        request,
        parts,
        job=checkpoint.job,
        attempt=checkpoint.attempt,
        step=None,
        tag=checkpoint.tag,
        seq=1,
        codec=codec,
    )
    checkpoint.commit(manifest.encode(), overwrite=overwrite, nonce=nonce.hex())


def is_named(checkpoint: StandaloneCheckpoint, file: str) -> bool:
    """Return True if the manifest names this part, or if that cannot be determined, so
    that the part must not be deleted.
    """
    try:
        return file in checkpoint.read_manifest().files
    except NotFound:
        return False
    except (OSError, IntegrityError):
        return True
