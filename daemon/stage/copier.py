"""Copies single checkpoints from one root to another, of any kind, and verifies every
byte of the copies.

`ckptd copy` and the uploader of a stage use it. A copy that was interrupted leaves
files without a manifest, which the next copy uses if they are sound. Calls raise
OSError; the callers translate it.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain

from ckptd.shared import names
from ckptd.shared.errors import AlreadyExists, Busy, IntegrityError, NotFound
from ckptd.shared.formats.binary import ALIGN
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.scatter import verify
from ckptd.shared.location import Location
from ckptd.shared.storage.metadata import metadata_objects
from ckptd.shared.storage.repository import Repository
from ckptd.shared.system import machine
from ckptd.shared.system.local_lock import LocalLock
from ckptd.shared.system.storage_seam import Source

_BLOCK = 8 << 20
_READS_AHEAD = 8
"""The blocks of one file that are read before they are written."""
OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Copying:
    """A checkpoint that is to be copied.

    manifest: None if it is damaged, with the reason in `error`. data: the bytes of the
    manifest. pinned: True if the checkpoint is pinned. there: True if the destination
    has the checkpoint already, whole and committed.
    """

    job: str
    tag: str
    manifest: Manifest | None
    data: bytes
    pinned: bool
    there: bool
    error: str | None = None


class CheckpointCopier:
    """Copies checkpoints from one repository to another, under the names that they
    have.

    For each checkpoint, call `planned`, then `copy`, or `copy_parts` and `publish`. If
    these raise IntegrityError or NotFound, `undo` deletes what they have copied.
    """

    def __init__(self, source: Repository, destination: Repository) -> None:
        self._from, self._to = source, destination
        # For each job, the checkpoint at the destination that has a file.
        self._linkable: dict[str, dict[str, str]] = {}

    def planned(self, job: str, tag: str) -> Copying:
        """Return what is known of a checkpoint and of its copy.

        Raises NotFound, AlreadyExists if the destination has another one.
        """
        pinned = tag in self._from.pins(job)
        try:
            manifest, data = self._from.read_manifest_document(job, tag)
        except IntegrityError as error:
            return Copying(job, tag, None, b"", pinned, there=False, error=str(error))
        found = self._document_there(job, tag)
        if found not in (None, data):
            raise AlreadyExists(
                f"{self._to.where(job, tag)} is another checkpoint than "
                f"{self._from.where(job, tag)}: copy to another root"
            )
        return Copying(job, tag, manifest, data, pinned, there=found is not None)

    def _document_there(self, job: str, tag: str) -> bytes | None:
        """Return the bytes of the manifest at the destination, b"" if it is damaged, or
        None if there is none.
        """
        try:
            return self._to.read_manifest_document(job, tag)[1]
        except IntegrityError:
            return b""
        except NotFound:
            return None

    def undo(self, one: Copying, manifest: Manifest) -> None:
        """Delete the files of a copy that has failed, unless another copy has been
        committed there meanwhile.
        """
        if not self._to.has_manifest(one.job, one.tag):
            self._to.unpin(one.job, one.tag)
            self._to.delete_files(one.job, one.tag, manifest.files)
            self._to.delete_tag(one.job, one.tag)

    def copy(self, one: Copying, manifest: Manifest, progress: OnBytes) -> None:
        """Copy a checkpoint, unless another copy was faster."""
        if self._document_there(one.job, one.tag) == one.data:
            return
        self.publish(one, manifest, self.copy_parts(one, manifest, progress))

    def copy_parts(self, one: Copying, manifest: Manifest, progress: OnBytes) -> dict[str, bytes]:
        """Copy and verify the parts of a checkpoint, which must not have been committed
        at the destination.

        Return the metadata object, if there is one, by its name, for `publish`.
        """
        if one.pinned:
            self._to.pin(one.job, one.tag)  # before a daemon there sees the checkpoint
        with closing(self._from.lease(one.job, one.tag)):
            for part in manifest.parts:
                self._copy_part(one, part, progress)
            return metadata_objects(self._from, one.job, one.tag, manifest)

    def publish(self, one: Copying, manifest: Manifest, objects: dict[str, bytes]) -> None:
        """Commit the copy, all of whose parts are durable, and let the hint `newest`
        name it if it is the newest there.
        """
        self._to.publish_manifest(one.job, one.tag, one.data, objects=objects)
        newest = self._to.read_newest(one.job)
        try:
            older = newest is None or self._to.read_manifest(one.job, newest).order < manifest.order
        except (NotFound, IntegrityError):
            older = True
        if older:
            self._to.publish_newest(one.job, one.tag)

    def _copy_part(self, one: Copying, part: PartEntry, progress: OnBytes) -> None:
        """Copy the files of a part, and verify the copies.

        Files that an interrupted copy has left are used if they are sound.
        """
        with closing(
            self._from.open_part(one.job, one.tag, part.file, part.index_sha256)
        ) as source:
            for again in (False, True):
                for number, name in enumerate(_files(part, source)):
                    self._copy_file(one, name, source, number, progress)
                try:
                    self._verify(one, part)
                    return
                except IntegrityError:
                    verify(source)  # raises first if the source itself is damaged
                    if again:
                        raise
                    self._to.delete_files(one.job, one.tag, [part.file])

    def _copy_file(
        self, one: Copying, name: str, part: PartReader, number: int, progress: OnBytes
    ) -> None:
        place = f"{one.job}/{one.tag}/{name}"
        with closing(self._from.storage.open(place)) as source:
            if source.size < ALIGN or source.size % ALIGN:
                raise IntegrityError(
                    f"{place} has {source.size} bytes; expected a multiple of {ALIGN}"
                )
            if self._has(place, source.size) or self._linked(one, place, part, number, source.size):
                progress(source.size)
            else:
                self._write(place, source, progress)
        if one.job in self._linkable:
            self._linkable[one.job][name] = one.tag

    def _write(self, place: str, source: Source, progress: OnBytes) -> None:
        blocks, buffer = _blocks(source), mmap.mmap(-1, _BLOCK)
        first = next(blocks)
        sink = self._to.storage.create(place, source.size, bytes(first[:ALIGN]))
        progress(ALIGN)
        try:
            for block in chain([first[ALIGN:]], blocks):
                buffer[: len(block)] = block
                with memoryview(buffer) as whole, whole[: len(block)] as data:
                    sink.append(data)
                progress(len(block))
            sink.finish()
        except BaseException:
            sink.discard()
            raise

    def _has(self, place: str, size: int) -> bool:
        """Return True if the destination has a file of this size.

        One of another size is what an interrupted copy has left: delete it.
        """
        try:
            found = self._to.storage.open(place)
        except FileNotFoundError:
            return False
        found.close()
        if found.size != size:
            prefix, _, file = place.rpartition("/")
            self._to.storage.delete(prefix, [file])
        return found.size == size

    def _linked(self, one: Copying, place: str, part: PartReader, number: int, size: int) -> bool:
        """Link a file of an older checkpoint at the destination, where the source has
        linked it too. Return False if there is none.
        """
        link = next((link for link in part.index.linked if link.number == number), None)
        if link is None:
            return False
        older = names.part_file(part.index.rank, link.nonce, link.origin)
        if one.job not in self._linkable:
            self._linkable[one.job] = {
                file: tag for tag in self._to.tags(one.job) for file in self._to.files(one.job, tag)
            }
        tag = self._linkable[one.job].get(older)
        return tag is not None and self._to.storage.link(f"{one.job}/{tag}/{older}", place, size)

    def _verify(self, one: Copying, part: PartEntry) -> None:
        with closing(self._to.open_part(one.job, one.tag, part.file, part.index_sha256)) as reader:
            verify(reader)


@contextmanager
def one_at_a_time(destination: Location) -> Iterator[None]:
    """Context manager.

    Keep every other `ckptd copy` of this user on this machine out of the same root.
    Raises Busy.
    """
    lock = LocalLock.take(f"copy-{machine.root_digest(destination.resolve())}")
    if lock is None:
        raise Busy(f"another `ckptd copy` writes to {destination}: wait for it")
    try:
        yield
    finally:
        lock.close()


def _files(part: PartEntry, reader: PartReader) -> list[str]:
    """Return the names of the files of a part, the part file first."""
    parsed = names.parse_part_file(part.file)
    assert parsed is not None
    return [names.part_file(*parsed, number) for number in range(1 + len(reader.index.files))]


def _blocks(source: Source) -> Iterator[memoryview]:
    """Yield the content of a file in blocks, and read ahead."""
    under_way: deque[Future[memoryview]] = deque()
    with ThreadPoolExecutor(_READS_AHEAD, thread_name_prefix="ckptd-copy") as pool:
        for offset in range(0, source.size, _BLOCK):
            under_way.append(pool.submit(source.view, offset, min(_BLOCK, source.size - offset)))
            if len(under_way) == _READS_AHEAD:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
