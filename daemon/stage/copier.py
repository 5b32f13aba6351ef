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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain

from ckptd.shared import names
from ckptd.shared.errors import AlreadyExists, Busy, CkptdError, IntegrityError, NotFound
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


@dataclass(frozen=True, slots=True)
class Copied:
    """A checkpoint whose parts are durable at the destination, for `publish`.

    manifest, data: the manifest of the copy, and its bytes. objects: the metadata
    object, if there is one, by its name.
    """

    manifest: Manifest
    data: bytes
    objects: dict[str, bytes]


class CheckpointCopier:
    """Copies checkpoints from one repository to another, under the names that they
    have. The copies have the same files.

    For each checkpoint, call `planned`, then `copy`, or `copy_parts` and `publish`. If
    these raise IntegrityError or NotFound, `undo` deletes what they have copied.
    """

    def __init__(self, source: Repository, destination: Repository) -> None:
        self._from, self._to = source, destination
        # For each job, the places of files at the destination, by the names that they
        # were written under.
        self._linkable: dict[str, dict[str, str]] = {}

    def size(self, manifest: Manifest) -> int:
        """Return the bytes that the progress of a copy adds up to."""
        return manifest.nbytes

    def planned(self, job: str, tag: str) -> Copying:
        """Return what is known of a checkpoint and of its copy.

        Raises NotFound, AlreadyExists if the destination has another one.
        """
        pinned = tag in self._from.pins(job)
        try:
            manifest, data = self._from.read_manifest_document(job, tag)
        except IntegrityError as error:
            return Copying(job, tag, None, b"", pinned, there=False, error=str(error))
        there = self._is_there(job, tag, manifest, data)
        return Copying(job, tag, manifest, data, pinned, there=there)

    def _is_there(self, job: str, tag: str, manifest: Manifest, data: bytes) -> bool:
        """Return True if the destination has a copy of the checkpoint.

        Raises AlreadyExists if it has another checkpoint.
        """
        found = self._document_there(job, tag)
        if found not in (None, data):
            raise self._other(job, tag)
        return found is not None

    def _other(self, job: str, tag: str) -> AlreadyExists:
        return AlreadyExists(
            f"{self._to.where(job, tag)} is another checkpoint than "
            f"{self._from.where(job, tag)}: copy to another root"
        )

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
            self._to.delete_files(one.job, one.tag, self._named(manifest))
            self._to.delete_tag(one.job, one.tag)

    def _named(self, manifest: Manifest) -> list[str]:
        """Return the names of the files that a copy may have made."""
        return manifest.files

    def copy(self, one: Copying, manifest: Manifest, progress: OnBytes) -> int:
        """Copy a checkpoint, unless another copy was faster.

        Return the bytes of the copy.
        """
        if self._is_there(one.job, one.tag, manifest, one.data):
            return manifest.nbytes
        copied = self.copy_parts(one, manifest, progress)
        self.publish(one, copied)
        return copied.manifest.nbytes

    def copy_parts(self, one: Copying, manifest: Manifest, progress: OnBytes) -> Copied:
        """Copy and verify the parts of a checkpoint, which must not have been committed
        at the destination.
        """
        if one.pinned:
            self._to.pin(one.job, one.tag)  # before a daemon there sees the checkpoint
        with closing(self._from.lease(one.job, one.tag)):
            parts = [self._copy_part(one, manifest, part, progress) for part in manifest.parts]
            objects = metadata_objects(self._from, one.job, one.tag, manifest)
        if parts == manifest.parts:
            return Copied(manifest, one.data, objects)
        made = manifest.with_parts(parts)
        return Copied(made, made.encode(), objects)

    def publish(self, one: Copying, copied: Copied) -> None:
        """Commit the copy, and let the hint `newest` name it if it is the newest there."""
        self._to.publish_manifest(one.job, one.tag, copied.data, objects=copied.objects)
        newest, order = self._to.read_newest(one.job), copied.manifest.order
        try:
            older = newest is None or self._to.read_manifest(one.job, newest).order < order
        except (NotFound, IntegrityError):
            older = True
        if older:
            self._to.publish_newest(one.job, one.tag)

    def _copy_part(
        self, one: Copying, manifest: Manifest, part: PartEntry, progress: OnBytes
    ) -> PartEntry:
        """Copy the files of a part, verify the copies, and return the entry of the copy.

        Files that an interrupted copy has left are used if they are sound.
        """
        with closing(
            self._from.open_part(one.job, one.tag, part.file, part.index_sha256)
        ) as source:
            self._copy_files(one, part, source, progress)
            try:
                self._verify(one, part)
            except IntegrityError:
                verify(source)  # raises first if the source itself is damaged
                self._to.delete_files(one.job, one.tag, [part.file])
                self._copy_files(one, part, source, progress)
                self._verify(one, part)
        return part

    def _copy_files(
        self, one: Copying, part: PartEntry, source: PartReader, progress: OnBytes
    ) -> None:
        for number, name in enumerate(_files(part, source)):
            self._copy_file(one, name, source, number, progress)

    def _copy_file(
        self, one: Copying, name: str, part: PartReader, number: int, progress: OnBytes
    ) -> None:
        place = f"{one.job}/{one.tag}/{name}"
        with closing(self._from.storage.open(place)) as source:
            if source.size < ALIGN or source.size % ALIGN:
                raise IntegrityError(
                    f"{place} has {source.size} bytes; expected a multiple of {ALIGN}"
                )
            origin = _origin(part, number)
            if self._has(place, source.size) or self._linked(one, place, origin, source.size):
                progress(source.size)
            else:
                self._write(place, source, progress)
        if one.job in self._linkable:
            self._linkable[one.job].update({name: place, origin or name: place})

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

    def _linked(self, one: Copying, place: str, origin: str | None, size: int) -> bool:
        """Link a file of an older checkpoint at the destination, where the source has
        linked it too. Return False if there is none.

        origin: the name that the file was written under, or None if it is not linked.
        """
        if origin is None:
            return False
        if one.job not in self._linkable:
            self._linkable[one.job] = {
                file: f"{one.job}/{tag}/{file}"
                for tag in self._to.tags(one.job)
                for file in self._to.files(one.job, tag)
            } | self._links_before(one)
        older = self._linkable[one.job].get(origin)
        return older is not None and self._to.storage.link(older, place, size)

    def _links_before(self, one: Copying) -> dict[str, str]:
        """Return the places of the files that the checkpoint before has linked, by the
        names that they were written under: the checkpoint that a file was written for
        may be gone.
        """
        wanted, found = names.parse_tag_directory(one.tag), dict[str, str]()
        older = [
            (parsed.order, tag)
            for tag in self._to.tags(one.job)
            if (parsed := names.parse_tag_directory(tag)) is not None
            and wanted is not None
            and parsed.order < wanted.order
        ]
        if not older:
            return found
        _, tag = max(older)
        # Otherwise the files are copied: what is wrong there does not concern the copy.
        with suppress(CkptdError, OSError):
            for part in self._to.read_manifest(one.job, tag).parts:
                if part.linked_bytes:
                    with closing(
                        self._to.open_part(one.job, tag, part.file, part.index_sha256)
                    ) as reader:
                        for number, name in enumerate(_files(part, reader)):
                            if (origin := _origin(reader, number)) is not None:
                                found[origin] = f"{one.job}/{tag}/{name}"
        return found

    def _verify(self, one: Copying, part: PartEntry) -> None:
        with closing(self._to.open_part(one.job, one.tag, part.file, part.index_sha256)) as reader:
            verify(reader)


def _origin(part: PartReader, number: int) -> str | None:
    """Return the name under which a file of a part was written for an older part, or
    None if it was written for this part.
    """
    link = next((link for link in part.index.linked if link.number == number), None)
    return None if link is None else names.part_file(part.index.rank, link.nonce, link.origin)


@contextmanager
def one_at_a_time(destination: Location) -> Iterator[None]:
    """Context manager.

    Keep every other `ckptd copy` of this user on this machine out of the same root.
    Raises Busy.
    """
    lock = LocalLock.take(f"copy-{machine.root_digest(destination)}")
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
