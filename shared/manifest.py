"""The manifest of a checkpoint, whose publication is the commit: its fields, encoding and decoding (FORMAT.md, section 4).

This module does no I/O.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from ckptd.shared import sealed_json
from ckptd.shared.bounds import MAX_DEPTH_READ, deeper_than
from ckptd.shared.collector import paused_collector
from ckptd.shared.errors import IntegrityError, NewerFormat
from ckptd.shared.names import parse_part_file
from ckptd.shared.plan import Described, Plan, Size, Writer, origin
from ckptd.shared.retention import MAX_TEXT, MOST_POLICIES
from ckptd.shared.snapshot_request import SnapshotRequest

FORMAT = "ckptd-manifest"
VERSION = 1
_FILES, _LINKED_FILES = "files", "linked-files"
FEATURES = frozenset({_FILES, _LINKED_FILES})
MAX_MANIFEST = 256 << 20
Name = Annotated[str, msgspec.Meta(max_length=256)]


class PartEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The entry of one part in a manifest.

    rank: the rank that wrote the part.
    file: the name of the part file.
    bytes: the size of all its files on storage, in bytes.
    raw_bytes: the size of its chunks in the packed slot, in bytes.
    items: the number of items in the plan.
    index_sha256: the sha256 of the index document, in hexadecimal digits.
    files: the number of its files, which is 1 if it has no data files.
    linked_bytes: the size of those of its files that belong to older checkpoints, too, in bytes.
    """

    rank: Size
    file: str
    bytes: Size
    raw_bytes: Size
    items: Size
    index_sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    files: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)] = 1
    linked_bytes: Size = 0

    @property
    def new_bytes(self) -> int:
        """The size of the files that were written for this part, in bytes."""
        return self.bytes - self.linked_bytes


class Metadata(TypedDict, total=False):
    """The metadata of DCP as plain data: lists, dicts, numbers and texts."""

    state_dict_metadata: dict[str, Described]
    planner_data: None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    version: int = VERSION
    features: list[str] = []
    job: Name
    attempt: Size
    step: Size | None
    tag: Name
    seq: Size
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    created: Name
    parts: list[PartEntry]
    metadata: Metadata
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    user_content: Any
    writer: Writer
    retention: Annotated[list[Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]], msgspec.Meta(max_length=MOST_POLICIES)] | None = None
    """The retention policies of the job, as text. They count until a newer checkpoint has others. None: the snapshot had no policies."""

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
        """Return the manifest of a checkpoint. `plan` and `request` are those of rank 0; `parts` are in the order of their ranks."""
        return cls(
            features=[
                *([_FILES] if any(part.files > 1 for part in parts) else []),
                *([_LINKED_FILES] if any(part.linked_bytes for part in parts) else []),
            ],
            job=job,
            attempt=attempt,
            step=step,
            tag=tag,
            seq=seq,
            world_size=len(parts),
            created=datetime.fromtimestamp(request.created, UTC).isoformat(timespec="seconds"),
            parts=parts,
            metadata={"state_dict_metadata": plan.metadata or {}, "planner_data": None},
            metrics=plain_metrics(request.metrics),
            user_content=msgspec.json.decode(request.user_content),
            writer={**plan.writer, "codec": codec},
            retention=request.retention,
        )

    def encode(self) -> bytes:
        """Return the bytes of the file. Raises IntegrityError if there are more than MAX_MANIFEST, because no reader would accept them."""
        members = msgspec.to_builtins(self)
        if self.retention is None:
            del members["retention"]
        data = sealed_json.encode(members)
        if len(data) > MAX_MANIFEST:
            raise IntegrityError(
                f"manifest would have {len(data):,d} bytes, and readers accept at most {MAX_MANIFEST:,d}: "
                "save fewer tensors, or on fewer ranks"
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return the manifest in `data`.

        Raises IntegrityError if the manifest is damaged, incomplete or inconsistent, and NewerFormat if a newer ckptd has written it.
        """
        if len(data) > MAX_MANIFEST:
            raise IntegrityError(f"manifest has more than {MAX_MANIFEST:,d} bytes; no ckptd writes such a manifest")
        sealed_json.check(data, "manifest")
        try:
            probe = _PROBE_DECODER.decode(data)
            if probe.format == FORMAT and (probe.version > VERSION or not FEATURES.issuperset(probe.features)):
                raise NewerFormat(f"manifest was written by a newer ckptd (version {probe.version}): upgrade this one")
            with paused_collector():
                manifest = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise IntegrityError(f"manifest cannot be read: {error}") from None
        if manifest.format != FORMAT:
            raise IntegrityError(f"manifest has the format {manifest.format!r}; expected {FORMAT!r}")
        if len(manifest.parts) != manifest.world_size or any(part.rank != rank for rank, part in enumerate(manifest.parts)):
            ranks = ", ".join(str(part.rank) for part in manifest.parts[:8]) + (", ..." if len(manifest.parts) > 8 else "")
            raise IntegrityError(f"manifest of {manifest.world_size} ranks lists parts of ranks [{ranks}]")
        if deeper_than(manifest.user_content, MAX_DEPTH_READ):
            raise IntegrityError(f"manifest has user_content that is nested more than {MAX_DEPTH_READ} levels deep")
        for part in manifest.parts:
            parsed = parse_part_file(part.file)
            if parsed is None or parsed[0] != part.rank:
                raise IntegrityError(f"manifest names {part.file!r}, which is not the name of a part of rank {part.rank}")
        return manifest

    @property
    def origin(self) -> str:
        """The script, host and user that saved the checkpoint, in words, or "" if it does not say."""
        return origin(self.writer)

    @property
    def created_at(self) -> float:
        """The time in `created` as Unix seconds, or NaN if `created` is not a valid time."""
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
    def new_bytes(self) -> int:
        """The size of the files that were written for this checkpoint, in bytes."""
        return sum(part.new_bytes for part in self.parts)

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key of the checkpoints of a job: attempt, step (-1 if there is none) and seq. Clocks do not order checkpoints."""
        return (self.attempt, -1 if self.step is None else self.step, self.seq)


class _Probe(msgspec.Struct):
    format: str
    version: int
    features: list[str] = []


def plain_metrics(metrics: dict[str, float]) -> dict[str, float | Literal["nan", "inf", "-inf"]]:
    """Return the metrics as JSON can hold them: NaN and the infinities become the texts `nan`, `inf` and `-inf`."""
    return {key: value if math.isfinite(value) else _WORDS[str(value)] for key, value in metrics.items()}


_WORDS: dict[str, Literal["nan", "inf", "-inf"]] = {"nan": "nan", "inf": "inf", "-inf": "-inf"}


_PROBE_DECODER = msgspec.json.Decoder(_Probe)
_DECODER = msgspec.json.Decoder(Manifest)
