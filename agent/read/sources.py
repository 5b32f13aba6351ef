"""Opens the sources of a snapshot: sealed slots in memory, or the parts of a
checkpoint. Both are verified as they are read.
"""

from __future__ import annotations

import io
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from ckptd.agent.plan.save_plan import load_weights
from ckptd.agent.read.on_demand import OPENED_AT_ONCE, OpenPart, PartOnDemand, SavedOnDemand
from ckptd.agent.read.saved import Saved, torch_version
from ckptd.agent.read.slot_source import PartWithSlot, SlotSource
from ckptd.agent.read.staged_source import ChunkMemory, StagedSource, slots_of
from ckptd.agent.state.merge import bare, merge
from ckptd.agent.state.tree import TensorRef, Unavailable, filled, tensor_names, unavailable
from ckptd.agent.state.values import decode
from ckptd.agent.state.versions import attach_versions
from ckptd.shared.errors import (
    IntegrityError,
    NewerFormat,
    NotFound,
    UnsavableValue,
    VersionGone,
)
from ckptd.shared.formats.manifest import Manifest, PartEntry
from ckptd.shared.formats.part import ChunkSource
from ckptd.shared.formats.plan import Writer
from ckptd.shared.formats.scatter import scatter, verify
from ckptd.shared.formats.segment import SegmentHeader
from ckptd.shared.storage.metadata import open_metadata
from ckptd.shared.storage.repository import Repository
from ckptd.shared.storage.standalone import StandaloneCheckpoint
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.system.storage_seam import Closable


@dataclass(slots=True)
class Opened:
    """An open snapshot that is ready to be loaded.

    While it is open, the checkpoint cannot be deleted. `close` ends that; otherwise it
    ends when the object is garbage-collected.

    tag: the name of the checkpoint's directory. sources: one for each rank, in their
    order. saved: their contents. held: the leases, open parts and slots that `close`
    closes. created: Unix seconds by the trainer's clock, NaN if unknown. manifest: None
    for a snapshot in memory. plain: the values that `metadata` has found, by DCP's
    names for them.
    """

    tag: str
    sources: Sequence[ChunkSource]
    saved: Saved
    metrics: dict[str, float]
    user_content: Any
    held: list[Closable]
    created: float
    manifest: Manifest | None = None
    plain: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        return self._header.step if self.manifest is None else self.manifest.step

    @property
    def attempt(self) -> int:
        return self._header.attempt if self.manifest is None else self.manifest.attempt

    @property
    def writer(self) -> Writer:
        """The facts that are known about the run that saved this, by name."""
        return self.sources[0].plan.writer if self.manifest is None else self.manifest.writer

    @property
    def _header(self) -> SegmentHeader:
        """The header of a snapshot in memory."""
        source = self.sources[0]
        slot = source.inner if isinstance(source, StagedSource) else source
        assert isinstance(slot, SlotSource)
        return slot.header

    @property
    def nbytes(self) -> int:
        """The size of the snapshot of all ranks in memory, in bytes."""
        if self.manifest is not None:
            return sum(part.raw_bytes for part in self.manifest.parts)
        return sum(chunk.length for source in self.sources for chunk in source.ranges)

    def part(self, rank: int) -> ChunkSource:
        """Return the source of a rank. A part that is opened on demand is opened.

        Raises IntegrityError, OSError.
        """
        source = self.sources[rank]
        return source.reader if isinstance(source, PartOnDemand) else source

    def values(self, rank: int = 0) -> bytes:
        """Return the encoded values document of a rank, verified.

        Raises IntegrityError, OSError.
        """
        source = self.sources[rank]
        offset, length = source.values
        document = bytearray(length)
        scatter(source, [(offset, memoryview(document))])
        return bytes(document)

    def document(self, rank: int = 0, refused: list[str] | None = None) -> dict[str, Any]:
        """Return the values document of a rank, decoded, with its blobs loaded and its
        state dicts with their versions.

        refused: gets the reason for each blob that only pickled code could bring back.
        The blob becomes a placeholder then. Raises IntegrityError, OSError;
        UnsavableValue for such a blob if `refused` is None.
        """

        def loaded(name: str) -> Any:
            try:
                return load_blob(name, blobs[name])
            except UnsavableValue as error:
                if refused is None:
                    raise
                refused.append(str(error))
                return Unavailable(str(error))

        found: dict[str, Any] = decode(self.values(rank))
        _check_document(found, rank)
        names = self.saved.blob_names()
        blobs = self.saved.read_blobs(
            [name for name in tensor_names(found["state"]) if name in names] if names else []
        )
        if blobs:
            found["state"] = filled(
                found["state"], lambda name: loaded(name) if name in blobs else TensorRef(name)
            )
        found["state"] = attach_versions(found["state"], found.get("versions", {}), rank)
        return found

    def tree(self, refused: list[str] | None = None) -> Any:
        """Return the state of all ranks as one decoded tree.

        Raises as `document`, which explains `refused`.
        """
        documents = [self.document(rank, refused) for rank in range(len(self.sources))]
        return bare(merge([document["state"] for document in documents]))

    def metadata(self, documents: Sequence[dict[str, Any]] = ()) -> Metadata:
        """Return DCP's metadata: tensors, values and planner data.

        If DCP has not planned the snapshot, its values count as blobs, under the names
        that DCP would give them. After this call `blobs` returns them. documents: the
        decoded values documents of all ranks, if the caller has them. Raises as
        `document`.
        """
        metadata, first = (
            self.saved.metadata(),
            documents[0] if documents else decode(self.values()),
        )
        if "planner_data" in first:
            metadata.planner_data = first["planner_data"]
            metadata.storage_meta = StorageMeta(save_id=first.get("save_id") or None)
            return metadata
        documents = documents or [self.document(rank) for rank in range(len(self.sources))]
        state = filled(
            bare(merge([document["state"] for document in documents])),
            lambda name: torch.empty(0, dtype=torch.float32, device="cpu"),
            records=False,
        )
        flat, metadata.planner_data = (
            flatten_state_dict(state) if isinstance(state, dict) else ({}, {})
        )
        for name, value in flat.items():
            if not isinstance(value, torch.Tensor):
                self.plain[name] = value
                metadata.state_dict_metadata[name] = BytesStorageMetadata()
        return metadata

    def blobs(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return values by name, as bytes that torch.save or the caller's planner has
        written. Raises NotFound, IntegrityError, OSError.
        """
        found = self.saved.read_blobs([name for name in names if name not in self.plain])
        for name in set(names) & self.plain.keys():
            for _, why in unavailable(self.plain[name], name):
                raise NotFound(f"{name}: {why}")
            buffer = io.BytesIO()
            torch.save(self.plain[name], buffer)
            found[name] = buffer.getvalue()
        return found

    def verify(self, sources: Sequence[ChunkSource] | None = None) -> int:
        """Check that every tensor is whole, then read and verify every chunk of
        `sources`, or of all sources if it is None.

        Return the number of raw bytes. Raises IntegrityError, OSError.
        """
        self.saved.check_all_whole()
        return sum(verify(source) for source in (self.sources if sources is None else sources))

    def check_not_gone(self, *, overwritten: bool = False) -> None:
        """Raise VersionGone if a slot that was lent no longer holds the snapshot.

        All that was read before is sound otherwise. overwritten: that of the error.
        """
        if any(slot.is_gone() for slot in slots_of(self.sources)):
            half = "; the module is half overwritten until another version is loaded into it"
            raise VersionGone(
                f"{self.tag} is no longer in the memory of this node: a newer snapshot has "
                f"replaced it while it was read; read that one instead"
                f"{half if overwritten else ''}",
                overwritten=overwritten,
            )

    def close(self) -> None:
        """Close everything that is held open.

        A lease ends, unless this is a forked child. May be called again.

        Each object leaves the list before it is closed, so that none is closed twice.
        """
        while self.held:
            self.held.pop().close()

    def __del__(self) -> None:
        self.close()


def _check_document(document: Any, rank: int) -> None:
    """Raise IntegrityError if a decoded values document is not a map with a state, or
    has versions of another form.
    """
    if not isinstance(document, dict) or "state" not in document:
        raise IntegrityError(f"the values document of rank {rank} has no state")
    versions = document.get("versions", {})
    if not isinstance(versions, dict) or not all(
        isinstance(key, str)
        and isinstance(entries, dict)
        and all(isinstance(entry, dict) for entry in entries.values())
        for key, entries in versions.items()
    ):
        raise IntegrityError(
            f"the values document of rank {rank} is malformed: 'versions' must be a map from "
            f"strings to maps of maps"
        )


def load_blob(name: str, data: bytes) -> Any:
    """Return the value that torch.save has written as `data`.

    Raises UnsavableValue if only pickled code could bring it back.
    """
    try:
        return load_weights(data)
    except Exception:  # torch.load raises errors of many types
        raise UnsavableValue(
            f"{name}: it can only be loaded by running pickled code, which ckptd does not do"
        ) from None


def open_memory(
    descriptors: Sequence[Descriptor],
    attempt: int,
    step: int,
    tag: str,
    kept: ChunkMemory | None = None,
) -> Opened:
    """Open the sealed slots of all ranks as one snapshot.

    Takes over the descriptors, also if it raises IntegrityError.

    descriptors: one for the slot of each rank, in their order. The slots must hold this
    attempt and step. kept: the memory of the reader that the slots are lent to.
    """
    try:
        slots = [
            SlotSource(descriptor.fileno(), attempt, step, mapped=kept is None)
            for descriptor in descriptors
        ]
        sources: Sequence[SlotSource | StagedSource] = (
            slots
            if kept is None
            else [StagedSource(slot, rank, kept) for rank, slot in enumerate(slots)]
        )
        saved = Saved.of(sources)
    except BaseException:
        for descriptor in descriptors:
            descriptor.close()
        raise
    request = slots[0].request
    return Opened(
        tag,
        sources,
        saved,
        dict(request.metrics),
        msgspec.json.decode(request.user_content),
        [*descriptors, *sources],
        request.created,
    )


def open_slots(
    descriptors: Mapping[int, Descriptor], attempt: int, step: int, *, lent: bool = False
) -> dict[int, SlotSource]:
    """Open the slots of some ranks, given and returned by rank, that are sealed, hold
    this attempt and step, and are sound.

    The descriptors stay the caller's. lent: True if the slots are lent to a reader.
    """
    found: dict[int, SlotSource] = {}
    for rank, descriptor in descriptors.items():
        with suppress(IntegrityError, OSError):
            found[rank] = SlotSource(descriptor.fileno(), attempt, step, mapped=not lent)
    return found


def open_checkpoint(
    repository: Repository,
    job: str,
    tag: str,
    manifest: Manifest | None = None,
    slots: Mapping[int, SlotSource] = types.MappingProxyType({}),
    kept: ChunkMemory | None = None,
    *,
    slots_later: bool = False,
) -> Opened:
    """Open a checkpoint, under a lease that keeps it from being deleted.

    manifest: the manifest of the checkpoint, if the caller has read it. slots: slots by
    rank that may still hold what the parts were written from. Chunks are read from
    those that match their part. The slots stay the caller's. kept: memory for a reader
    that stages chunks. slots_later: True if `Opened.part` is to be a PartWithSlot for
    every rank, so that it can be given a slot later.

    If the checkpoint is overwritten meanwhile, the new one is opened. Raises NotFound,
    also if the checkpoint is deleted meanwhile; Busy if a deleter has it locked;
    IntegrityError, OSError.
    """
    manifest = manifest or repository.read_manifest(job, tag)
    while True:
        try:
            return _opened(repository, job, tag, manifest, slots, kept, slots_later)
        except IntegrityError:
            # NotFound if it was deleted, since the manifest is deleted first
            again = repository.read_manifest(job, tag)
            if again.parts == manifest.parts:
                raise
            manifest = again  # the checkpoint was overwritten


def _opened(
    repository: Repository,
    job: str,
    tag: str,
    manifest: Manifest,
    slots: Mapping[int, SlotSource],
    kept: ChunkMemory | None,
    slots_later: bool,
) -> Opened:
    def open_part(part: PartEntry) -> OpenPart:
        reader = repository.open_part(job, tag, part.file, part.index_sha256)
        try:
            # An error that is found later would leave half of the state overwritten.
            reader.check_codecs()
            manifest.check_part(part, reader)
            slot = slots.get(part.rank)
            if slot is not None and not PartWithSlot.match(reader, slot):
                slot = None
            found = reader if slot is None and not slots_later else PartWithSlot(reader, slot)
            return found if kept is None else StagedSource(found, part.rank, kept)
        except BaseException:
            reader.close()
            raise

    lease = repository.lease(job, tag)
    held: list[Closable] = [lease]
    try:
        if isinstance(repository, StandaloneCheckpoint):
            held.append(repository.share())
        if manifest.metadata_object is not None and not isinstance(
            repository, StandaloneCheckpoint
        ):
            sources, saved = _on_demand(
                repository, job, tag, manifest, open_part, held, remote=lease.remote
            )
        else:
            sources = _all_parts(manifest, open_part, held, remote=lease.remote)
            saved = Saved.of(sources)
    except BaseException:
        while held:
            held.pop().close()
        raise
    return Opened(
        tag,
        sources,
        saved,
        manifest.numbers,
        manifest.user_content,
        held,
        manifest.created_at,
        manifest,
    )


def _all_parts(
    manifest: Manifest,
    open_part: Callable[[PartEntry], OpenPart],
    held: list[Closable],
    *,
    remote: bool,
) -> Sequence[ChunkSource]:
    """Open all parts, and add them to `held`."""
    readers: list[OpenPart] = []
    with ExitStack() as threads:
        each = (
            threads.enter_context(ThreadPoolExecutor(OPENED_AT_ONCE, "ckptd-open")).map
            if remote
            else map
        )
        for reader in each(open_part, manifest.parts):
            readers.append(reader)
            held.append(reader)
    return readers


def _on_demand(
    repository: Repository,
    job: str,
    tag: str,
    manifest: Manifest,
    open_part: Callable[[PartEntry], OpenPart],
    held: list[Closable],
    *,
    remote: bool,
) -> tuple[Sequence[ChunkSource], Saved]:
    """Open the metadata object, and add it to `held`, and the parts, which are opened
    later. They must be there already.
    """
    if missing := set(manifest.files).difference(repository.files(job, tag)):
        raise IntegrityError(f"{job}/{tag}/{min(missing)} is missing")
    reader = open_metadata(repository, job, tag, manifest)
    held.append(reader)
    parts = [PartOnDemand(partial(open_part, part), remote=remote) for part in manifest.parts]
    held += parts
    return parts, SavedOnDemand(
        torch_version=torch_version(manifest.writer), metadata_reader=reader, parts=parts
    )


def newer(error: NewerFormat, where: str, how: str) -> NewerFormat:
    """Return the error for a checkpoint that a newer ckptd wrote.

    where: the name of the checkpoint. how: the call or argument by which the caller can
    choose an older checkpoint.
    """
    said = str(error) if str(error).startswith(where) else f"{where}: {error}"
    return NewerFormat(
        f"{said}; it is not damaged: upgrade this ckptd, or name an older checkpoint with {how}"
    )
