"""Defines the records of the journal, and the state that they add up to (FORMAT.md,
section 7).

Records are assertions that are merged by maximum, so that applying a record twice
changes nothing. This module does no I/O: `journal.py` stores the records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from ckptd.shared.formats.membership import Membership


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class Begun(Record, frozen=True, kw_only=True):
    job: str
    attempt: int
    world_size: int
    node: Membership | None = None


class RankSealed(Record, frozen=True, kw_only=True):
    job: str
    attempt: int
    step: int
    rank: int
    world_size: int
    tag: str
    segment: str
    generation: int
    persist: bool


class _OfPart(Record, frozen=True, kw_only=True):
    """A record about the part of one rank."""

    job: str
    attempt: int
    step: int
    rank: int
    tag: str
    file: str


class Staging(_OfPart, frozen=True, kw_only=True):
    """The intent to write a part."""


class PartDurable(_OfPart, frozen=True, kw_only=True):
    """The record that all files of a part are durable."""

    bytes: int
    index_sha256: str


class Committed(Record, frozen=True, kw_only=True):
    job: str
    attempt: int
    step: int | None
    tag: str
    seq: int


class Dropped(Record, frozen=True, kw_only=True):
    """The record that the files of a save are gone.

    `files`: empty if they are all that are staged for the checkpoint. Otherwise the
    daemon also saves the parts of other ranks there, and these stay.
    """

    job: str
    attempt: int
    step: int
    tag: str
    reason: str
    files: list[str] = []


class Retiring(Record, frozen=True, kw_only=True):
    job: str
    tag: str
    files: list[str]


class Retired(Record, frozen=True, kw_only=True):
    job: str
    tag: str


class JobState(msgspec.Struct, omit_defaults=True):
    """The part of the journal's state that is about one job.

    `attempt`: the newest attempt. `world_size`: the number of its ranks. `sealed_step`:
    the highest step of that attempt for which a seal was seen, -1 if there is none.
    `seq`: the highest `seq` of a committed checkpoint of the job. `node`: the share of
    this node in the newest attempt, None if all its ranks are on this node.
    """

    attempt: int = 0
    world_size: int = 1
    sealed_step: int = -1
    seq: int = 0
    node: Membership | None = None


class JournalState(msgspec.Struct):
    """The sum of the journal's records: the jobs by name, and the saves and deletions
    that are under way.

    `staged`: {job/tag: {file: PartDurable, or None until the part is durable}}.
    `retiring`: {job/tag: files to delete}.
    """

    jobs: dict[str, JobState] = {}
    staged: dict[str, dict[str, PartDurable | None]] = {}
    retiring: dict[str, list[str]] = {}

    def forget_all_but(self, live: Collection[str]) -> None:
        busy = {key.split("/")[0] for key in (*self.staged, *self.retiring)}
        self.jobs = {name: job for name, job in self.jobs.items() if name in busy or name in live}

    def apply(self, record: Record) -> None:
        match record:
            case Begun():
                self._reach(record, -1)
            case RankSealed():
                self._reach(record, record.step)
            case Staging():
                self.staged.setdefault(place(record), {}).setdefault(record.file, None)
            case PartDurable():
                self.staged.setdefault(place(record), {})[record.file] = record
            case Committed():
                job = self.jobs.setdefault(record.job, JobState())
                job.seq = max(job.seq, record.seq)
                self.staged.pop(place(record), None)
                # The deletion was that of an earlier checkpoint of this name, which is
                # gone.
                self.retiring.pop(place(record), None)
            case Dropped():
                staged = self.staged.pop(place(record), {})
                left = {file: staged[file] for file in staged if file not in record.files}
                if record.files and left:
                    self.staged[place(record)] = left
            case Retiring():
                self.retiring[place(record)] = record.files
            case Retired():
                self.retiring.pop(place(record), None)

    def _reach(self, record: Begun | RankSealed, step: int) -> None:
        """Update the job if the record is from a newer attempt, or from a later step of
        the same attempt.
        """
        job = self.jobs.setdefault(record.job, JobState())
        if (record.attempt, step) > (job.attempt, job.sealed_step):
            if isinstance(record, Begun) or record.attempt > job.attempt:
                job.node = record.node if isinstance(record, Begun) else None
            job.attempt = record.attempt
            job.world_size = record.world_size
            job.sealed_step = step


def place(record: Any) -> str:
    """Return `job/tag`, the key of a checkpoint and its files in the journal's state."""
    return f"{record.job}/{record.tag}"


STATE = 1
TYPES: dict[int, type[Record]] = {
    2: Begun,
    3: RankSealed,
    4: Staging,
    5: PartDurable,
    6: Committed,
    7: Dropped,
    8: Retiring,
    9: Retired,
}
NUMBERS = {cls: number for number, cls in TYPES.items()}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Record]] = {
    number: msgspec.msgpack.Decoder(cls) for number, cls in TYPES.items()
}
_STATE_DECODER = msgspec.msgpack.Decoder(JournalState)


def encode(record: Record) -> tuple[int, bytes]:
    return NUMBERS[type(record)], msgspec.msgpack.encode(record)


def decode(number: int, payload: bytes) -> Record:
    """Return the record of type `number`.

    Raises msgspec.DecodeError if the payload does not fit the type, KeyError if it is
    unknown.
    """
    return _DECODERS[number].decode(payload)


def encode_state(state: JournalState) -> bytes:
    return msgspec.msgpack.encode(state)


def decode_state(payload: bytes) -> JournalState:
    return _STATE_DECODER.decode(payload)


def under_way(state: JournalState) -> int:
    """Return how many bytes of the encoded state describe saves and deletions under
    way.
    """
    return len(msgspec.msgpack.encode((state.staged, state.retiring)))


def encode_whole(state: JournalState, most: int, room: int) -> tuple[list[tuple[int, bytes]], int]:
    """Return the type and payload of each record that a new journal file begins with,
    and how many records were left out.

    The STATE record has at most `most` bytes of payload. The rest of the state follows
    as ordinary records. Records are left out if all of them together would take more
    than `room` bytes of the file; the records of files that are not durable yet are
    left out first.
    """
    whole = encode_state(state)
    if len(whole) <= most:
        return [(STATE, whole)], 0
    first = JournalState()
    left = most - _OF_AN_EMPTY_STATE
    rest: list[Record] = []

    def fits(key: str, value: object) -> bool:
        nonlocal left
        size = len(msgspec.msgpack.encode((key, value)))
        if size > left:
            return False
        left -= size
        return True

    for name, job in state.jobs.items():
        if fits(name, job):
            first.jobs[name] = job
        else:
            rest += _about_job(name, job)
    for key, files in state.retiring.items():
        if fits(key, files):
            first.retiring[key] = files
        else:
            rest.append(Retiring(job=key.split("/")[0], tag=key.split("/")[1], files=files))
    for key, parts in state.staged.items():
        if fits(key, parts):
            first.staged[key] = parts
        else:
            rest += _about_parts(key, parts)
    encoded = [(STATE, encode_state(first))]
    room -= _ROUND_A_RECORD + len(encoded[0][1])
    for number, record in enumerate(sorted(rest, key=lambda record: isinstance(record, Staging))):
        kind, payload = encode(record)
        room -= _ROUND_A_RECORD + len(payload)
        if room < 0:
            return encoded, len(rest) - number
        encoded.append((kind, payload))
    return encoded, 0


_OF_AN_EMPTY_STATE = 64
"""The most bytes that an encoded state takes besides its entries: three keys, and the
headers of four maps of any size.
"""
_ROUND_A_RECORD = 40
"""The most bytes that a record takes in a file besides its payload: its header and its
padding.
"""


def _about_job(name: str, job: JobState) -> Iterator[Record]:
    """Yield records that add up to the state of one job."""
    yield Begun(job=name, attempt=job.attempt, world_size=job.world_size, node=job.node)
    if job.sealed_step >= 0:
        yield RankSealed(
            job=name, attempt=job.attempt, step=job.sealed_step, rank=0, world_size=job.world_size,
            tag="", segment="", generation=0, persist=False,
        )  # fmt: skip
    yield Committed(job=name, attempt=job.attempt, step=None, tag="", seq=job.seq)


def _about_parts(key: str, parts: dict[str, PartDurable | None]) -> Iterator[Record]:
    """Yield records that add up to the files staged for one checkpoint."""
    job, tag = key.split("/")
    for file, part in parts.items():
        yield part or Staging(job=job, attempt=0, step=0, rank=0, tag=tag, file=file)
