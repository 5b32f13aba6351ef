"""The manifest of a checkpoint, whose publication is the commit: its fields, encoding
and decoding (FORMAT.md, section 4).

This module does no I/O.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.formats import metadata_object, sealed_json
from ckptd.shared.formats.bounds import MAX_DEPTH_READ, deeper_than
from ckptd.shared.formats.metadata_object import MetadataObjectEntry
from ckptd.shared.formats.part import PartReader
from ckptd.shared.formats.plan import Described, Meshes, Plan, Size, Writer, origin
from ckptd.shared.formats.snapshot_request import SnapshotRequest
from ckptd.shared.names import parse_part_file, part_file
from ckptd.shared.retention import MAX_TEXT, MOST_POLICIES
from ckptd.shared.system.collector import paused_collector

FORMAT = "ckptd-manifest"
VERSION = 2
_FILES, _LINKED_FILES, _DELTAS = "files", "linked-files", "deltas"
_METADATA_OBJECT = "metadata-object"
FEATURES = frozenset({_FILES, _LINKED_FILES, _DELTAS, _METADATA_OBJECT})
DELETER_FEATURES: frozenset[str] = frozenset()
"""The features that this version knows of those that a deleter must know. None are
defined so far.
"""
MAX_MANIFEST = 256 << 20
MOST_INLINE = 1 << 20
"""The most bytes of a manifest of a checkpoint in a root that has the metadata itself.
Every scan of a job reads all its manifests.
"""
Label = Annotated[str, msgspec.Meta(max_length=256)]


class PartEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The entry of one part in a manifest.

    rank: the rank that wrote the part. file: the name of the part file. bytes: the size
    of all its files on storage, in bytes. raw_bytes: the size of its chunks in the
    packed slot, in bytes. items: the number of items in the plan. index_sha256: the
    sha256 of the index document, in hexadecimal digits. files: the number of its files,
    which is 1 if it has no data files. linked_bytes: the size of those of its files
    that belong to older checkpoints, too, in bytes. non_finite: how many values of its
    parameters and optimizer state are NaN or infinite, or None if they were not counted.
    chain: the number of deltas in its longest chain. read_bytes: the stored bytes of its
    chunks and their bases, or 0 if it has no bases.
    """

    rank: Size
    file: str
    bytes: Size
    raw_bytes: Size
    items: Size
    index_sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    files: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)] = 1
    linked_bytes: Size = 0
    non_finite: Size | None = None
    chain: Size = 0
    read_bytes: Size = 0

    @property
    def new_bytes(self) -> int:
        """The size of the files that were written for this part, in bytes."""
        return self.bytes - self.linked_bytes

    @property
    def restored_bytes(self) -> int:
        """The stored bytes that a restore of the part reads. Without deltas, it is the
        size of all its files, since a restore reads nearly all of them.
        """
        return self.read_bytes or self.bytes


class Metadata(TypedDict, total=False):
    """The metadata of DCP as plain data: lists, dicts, numbers and texts."""

    state_dict_metadata: dict[str, Described]
    planner_data: None
    meshes: Meshes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest of either version.

    `split` makes version 2 of one that would be large. `decode` returns both in the
    same form.
    """

    format: str = FORMAT
    version: int = 1
    features: list[str] = []
    job: Label
    attempt: Size
    step: Size | None
    tag: Label
    seq: Size
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    created: Label
    parts: list[PartEntry]
    metadata: Metadata = {}
    """The metadata of DCP. Empty if it is in the metadata object."""
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    user_content: Any
    writer: Writer
    retention: (
        Annotated[
            list[Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]],
            msgspec.Meta(max_length=MOST_POLICIES),
        ]
        | None
    ) = None
    """The retention policies of the job, as text. They count until a newer checkpoint
    has others. None: the snapshot had no policies.
    """
    deleter_features: list[Label] = []
    """The features that a process must know before it deletes anything in the job."""
    metadata_object: MetadataObjectEntry | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        request: SnapshotRequest,
        parts: list[PartEntry],
        *,
        job: str,
        attempt: int,
        step: int | None,
        tag: str,
        seq: int,
        codec: str,
    ) -> Manifest:
        """Return the manifest of a checkpoint.

        `plan` and `request` are those of rank 0; `parts` are in the order of their
        ranks.
        """
        return cls(
            features=_features_of(parts),
            job=job,
            attempt=attempt,
            step=step,
            tag=tag,
            seq=seq,
            world_size=len(parts),
            created=datetime.fromtimestamp(request.created, UTC).isoformat(timespec="seconds"),
            parts=parts,
            metadata=_metadata_of(plan),
            metrics=plain_metrics(request.metrics),
            user_content=msgspec.json.decode(request.user_content),
            writer={**plan.writer, "codec": codec},
            retention=request.retention,
        )

    def with_parts(self, parts: list[PartEntry]) -> Manifest:
        """Return the manifest of a checkpoint that has the same content in other parts."""
        kept = [name for name in self.features if name not in (_FILES, _LINKED_FILES, _DELTAS)]
        return msgspec.structs.replace(self, parts=parts, features=[*_features_of(parts), *kept])

    def split(self) -> tuple[bytes, dict[str, bytes]]:
        """Return the bytes of the file, and the objects that must be durable before it,
        by name.

        If the manifest would have more than MOST_INLINE bytes, that is a metadata
        object. Raises IntegrityError if readers would refuse one of them, for example
        because it is too large.
        """
        if (
            self.metadata_object is not None or len(msgspec.json.encode(self)) <= MOST_INLINE
        ):  # as good as exact, and a hundred times faster
            return self.encode(), {}
        stored, entry = metadata_object.encode(
            self.metadata.get("state_dict_metadata", {}),
            self.metadata.get("meshes", []),
            self.world_size,
        )
        small = msgspec.structs.replace(
            self,
            version=VERSION,
            features=[*self.features, _METADATA_OBJECT],
            metadata={},
            metadata_object=entry,
        )
        return small.encode(), {entry.file: stored}

    def encode(self) -> bytes:
        """Return the bytes of the file.

        Raises IntegrityError if there are more than MAX_MANIFEST, because no reader
        would accept them.
        """
        members = {
            name: value
            for name, value in msgspec.to_builtins(self).items()
            if value or name not in _OPTIONAL
        }
        if self.retention is None:
            del members["retention"]
        if self.metadata_object is not None:
            del members["metadata"]
            members["parts"] = msgspec.to_builtins(_Columns.of(self.parts))
        data = sealed_json.encode(members)
        if len(data) > MAX_MANIFEST:
            raise IntegrityError(
                f"manifest would have {len(data):,d} bytes, and readers accept at most "
                f"{MAX_MANIFEST:,d}: "
                "save fewer tensors, or on fewer ranks"
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return the manifest in `data`.

        Raises IntegrityError if the manifest is damaged, incomplete or inconsistent,
        and NewerFormat if a newer ckptd has written it.
        """
        if len(data) > MAX_MANIFEST:
            raise IntegrityError(
                f"manifest has more than {MAX_MANIFEST:,d} bytes; no ckptd writes such a manifest"
            )
        sealed_json.check(data, "manifest")
        try:
            probe = _PROBE_DECODER.decode(data)
            if probe.format == FORMAT and (
                probe.version > VERSION or not FEATURES.issuperset(probe.features)
            ):
                unknown = ", ".join(map(repr, sorted(set(probe.features) - FEATURES)))
                what = f"version {probe.version}{f', features {unknown}' if unknown else ''}"
                raise NewerFormat(
                    f"manifest was written by a newer ckptd ({what}): upgrade this one"
                )
            with paused_collector():
                manifest = (
                    _SMALL_DECODER.decode(data).whole()
                    if probe.version == VERSION
                    else _DECODER.decode(data)
                )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise IntegrityError(f"manifest cannot be read: {error}") from None
        if manifest.format != FORMAT:
            raise IntegrityError(
                f"manifest has the format {manifest.format!r}; expected {FORMAT!r}"
            )
        if len(manifest.parts) != manifest.world_size or any(
            part.rank != rank for rank, part in enumerate(manifest.parts)
        ):
            ranks = ", ".join(str(part.rank) for part in manifest.parts[:8]) + (
                ", ..." if len(manifest.parts) > 8 else ""
            )
            raise IntegrityError(
                f"manifest of {manifest.world_size} ranks lists parts of ranks [{ranks}]"
            )
        if deeper_than(manifest.user_content, MAX_DEPTH_READ):
            raise IntegrityError(
                f"manifest has user_content that is nested more than {MAX_DEPTH_READ} levels deep"
            )
        for part in manifest.parts:
            parsed = parse_part_file(part.file)
            if parsed is None or parsed[0] != part.rank:
                raise IntegrityError(
                    f"manifest names {part.file!r}, which is not the name of a part of rank "
                    f"{part.rank}"
                )
        return manifest

    def check_part(self, part: PartEntry, reader: PartReader) -> None:
        """Raise IntegrityError unless `reader` reads the part that `part` describes."""
        index = reader.index
        if (
            index.attempt,
            index.step,
            index.rank,
            len(reader.plan.items),
            1 + len(index.files),
        ) != (self.attempt, self.step, part.rank, part.items, part.files):
            raise IntegrityError(f"{reader.name} is not the part that the manifest describes")

    @property
    def files(self) -> list[str]:
        """The names of the part files, without their data files, and of the metadata
        object.
        """
        found = [part.file for part in self.parts]
        return [*found, self.metadata_object.file] if self.metadata_object is not None else found

    @property
    def unknown_deleter_features(self) -> list[str]:
        """The features without which this version must delete nothing in the job."""
        return sorted(set(self.deleter_features) - DELETER_FEATURES)

    @property
    def tensors(self) -> int:
        """The number of tensors and blobs that the metadata describes."""
        known = self.metadata_object
        return (
            known.tensors
            if known is not None
            else len(self.metadata.get("state_dict_metadata", {}))
        )

    @property
    def origin(self) -> str:
        """The script, host and user that saved the checkpoint, in words, or "" if it
        does not say.
        """
        return origin(self.writer)

    @property
    def created_at(self) -> float:
        """The time in `created` as Unix seconds, or NaN if `created` is not a valid
        time.
        """
        try:
            return datetime.fromisoformat(self.created).timestamp()
        except (ValueError, OverflowError, OSError):
            return math.nan

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics as numbers. The texts `nan`, `inf` and `-inf` are converted back."""
        return {key: float(value) for key, value in self.metrics.items()}

    @property
    def nbytes(self) -> int:
        """The size of all parts on storage, in bytes."""
        return sum(part.bytes for part in self.parts)

    @property
    def non_finite(self) -> int | None:
        """The number of values of its parameters and optimizer state that are NaN or
        infinite, or None if they were not counted in all parts.
        """
        counts = [part.non_finite for part in self.parts if part.non_finite is not None]
        return sum(counts) if len(counts) == len(self.parts) else None

    @property
    def new_bytes(self) -> int:
        """The size of the files that were written for this checkpoint, in bytes."""
        return sum(part.new_bytes for part in self.parts)

    @property
    def chain(self) -> int:
        """The number of deltas in the longest chain of its parts, 0 if it is whole."""
        return max(part.chain for part in self.parts)

    @property
    def restored_bytes(self) -> int:
        """The stored bytes that a restore reads, as of its parts."""
        return sum(part.restored_bytes for part in self.parts)

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key of the checkpoints of a job: attempt, step (-1 if there is none)
        and seq. Clocks do not order checkpoints.
        """
        return (self.attempt, -1 if self.step is None else self.step, self.seq)


_OPTIONAL = ("deleter_features", "metadata_object")


class _Columns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parts in a manifest of version 2, column by column."""

    nonces: str
    digests: str
    bytes: list[Size]
    raw_bytes: list[Size]
    items: list[Size]
    files: list[Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]] = []
    linked_bytes: list[Size] = []
    non_finite: list[Size] = []
    chain: list[Size] = []
    read_bytes: list[Size] = []

    @classmethod
    def of(cls, parts: Sequence[PartEntry]) -> _Columns:
        files, linked = [part.files for part in parts], [part.linked_bytes for part in parts]
        counts = [part.non_finite for part in parts if part.non_finite is not None]
        chains, read = [part.chain for part in parts], [part.read_bytes for part in parts]
        return cls(
            nonces=_base64(_nonce(part) for part in parts),
            digests=_base64(bytes.fromhex(part.index_sha256) for part in parts),
            bytes=[part.bytes for part in parts],
            raw_bytes=[part.raw_bytes for part in parts],
            items=[part.items for part in parts],
            files=files if max(files) > 1 else [],
            linked_bytes=linked if any(linked) else [],
            non_finite=counts if len(counts) == len(parts) else [],
            chain=chains if any(chains) else [],
            read_bytes=read if any(read) else [],
        )

    def parts(self, world_size: int) -> list[PartEntry]:
        """Return the parts.

        Raises IntegrityError if the columns do not have one member for each rank.
        """
        nonces, digests = (
            _from_base64(self.nonces, 16, world_size),
            _from_base64(self.digests, 32, world_size),
        )
        columns: list[Sequence[Any]] = [
            self.bytes,
            self.raw_bytes,
            self.items,
            self.files or [1] * world_size,
            self.linked_bytes or [0] * world_size,
            self.non_finite or [None] * world_size,
            self.chain or [0] * world_size,
            self.read_bytes or [0] * world_size,
        ]
        if any(len(column) != world_size for column in columns):
            raise IntegrityError(f"manifest does not describe the parts of {world_size} ranks")
        return [
            PartEntry(
                rank=rank, file=part_file(rank, nonces[rank]), index_sha256=digests[rank].hex(),
                bytes=of_rank[0], raw_bytes=of_rank[1], items=of_rank[2], files=of_rank[3],
                linked_bytes=of_rank[4], non_finite=of_rank[5], chain=of_rank[6],
                read_bytes=of_rank[7],
            )
            for rank, of_rank in enumerate(zip(*columns, strict=True))
        ]  # fmt: skip


def _nonce(part: PartEntry) -> bytes:
    parsed = parse_part_file(part.file)
    if parsed is None:
        raise IntegrityError(f"{part.file!r} is not the name of a part")
    return parsed[1]


def _base64(values: Iterable[bytes]) -> str:
    return base64.b64encode(b"".join(values)).decode()


def _from_base64(text: str, length: int, count: int) -> list[bytes]:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise IntegrityError("manifest has a text that is not base64") from None
    if len(data) != length * count:
        raise IntegrityError(f"manifest does not describe the parts of {count} ranks")
    return [data[at : at + length] for at in range(0, len(data), length)]


class _Small(Manifest, frozen=True, kw_only=True):
    """A manifest of version 2 as it is stored."""

    parts: _Columns  # type: ignore[assignment]
    metadata_object: MetadataObjectEntry

    def whole(self) -> Manifest:
        """Return the manifest with its parts one by one.

        Raises IntegrityError if they are inconsistent.
        """
        return Manifest(
            **(msgspec.structs.asdict(self) | {"parts": self.parts.parts(self.world_size)})
        )


def _features_of(parts: Sequence[PartEntry]) -> list[str]:
    """Return the features that a reader of these parts must know."""
    return [
        *([_FILES] if any(part.files > 1 for part in parts) else []),
        *([_LINKED_FILES] if any(part.linked_bytes for part in parts) else []),
        *([_DELTAS] if any(part.read_bytes for part in parts) else []),
    ]


def _metadata_of(plan: Plan) -> Metadata:
    found: Metadata = {"state_dict_metadata": plan.metadata or {}, "planner_data": None}
    if plan.meshes:
        found["meshes"] = plan.meshes
    return found


def unknown_deleter_features(data: bytes) -> list[str]:
    """Return the features that a deleter must know, and that this version does not, of
    a manifest that a newer ckptd has written.
    """
    try:
        sealed_json.check(data, "manifest")
        return sorted(set(_PROBE_DECODER.decode(data).deleter_features) - DELETER_FEATURES)
    except (IntegrityError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


class _Probe(msgspec.Struct):
    format: str
    version: int
    features: list[str] = []
    deleter_features: list[str] = []


def plain_metrics(metrics: dict[str, float]) -> dict[str, float | Literal["nan", "inf", "-inf"]]:
    """Return the metrics as JSON can hold them: NaN and the infinities become the texts
    `nan`, `inf` and `-inf`.
    """
    return {
        key: value if math.isfinite(value) else _WORDS[str(value)] for key, value in metrics.items()
    }


_WORDS: dict[str, Literal["nan", "inf", "-inf"]] = {"nan": "nan", "inf": "inf", "-inf": "-inf"}


_PROBE_DECODER = msgspec.json.Decoder(_Probe)
_DECODER = msgspec.json.Decoder(Manifest)
_SMALL_DECODER = msgspec.json.Decoder(_Small)
