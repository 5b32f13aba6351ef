"""The messages between agent and daemon, as frozen values (PROTOCOL.md, section 3). Bounds are checked while decoding."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ckptd.shared.errors import ProtocolError
from ckptd.shared.numa import UNKNOWN
from ckptd.shared.plan import Size

Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
AttemptNumber = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]
Step = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    id: Id


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    re: Id


class Hello(Request, frozen=True, kw_only=True, tag="hello"):
    min_version: int
    max_version: int
    features: list[str] = []
    client: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Welcome(Reply, frozen=True, kw_only=True, tag="welcome"):
    version: int
    features: list[str] = []
    daemon: str = ""
    root: str = ""
    private: bool = False
    slots: int = 2
    chunk_size: int = 0
    stall_budget: float = 10.0
    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Status(Request, frozen=True, kw_only=True, tag="status"):
    pass


class StatusReport(Reply, frozen=True, kw_only=True, tag="status-report"):
    report: str


class Begin(Request, frozen=True, kw_only=True, tag="begin"):
    job: Name
    rank: Rank
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]
    attempt: AttemptNumber = 0


class HeldSegment(msgspec.Struct, frozen=True, kw_only=True):
    segment: Name
    slot: int
    capacity: Size
    generation: Size


class Began(Reply, frozen=True, kw_only=True, tag="began"):
    attempt: AttemptNumber
    held: list[HeldSegment] = []


class Allocate(Request, frozen=True, kw_only=True, tag="allocate"):
    capacity: Size
    count: Annotated[int, msgspec.Meta(ge=1, le=16)]
    node: Annotated[int, msgspec.Meta(ge=-1, le=65535)] = UNKNOWN


class Segments(Reply, frozen=True, kw_only=True, tag="segments"):
    """Comes with two descriptors for each segment: data, lock."""

    segments: list[HeldSegment]


class Replan(Request, frozen=True, kw_only=True, tag="plan"):
    step: Step
    why: Annotated[str, msgspec.Meta(max_length=65536)] = ""


class Acquire(Request, frozen=True, kw_only=True, tag="acquire"):
    step: Step
    name: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    wait: Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Granted(Reply, frozen=True, kw_only=True, tag="granted"):
    segment: Name
    step: Step | None = None


class Refused(Reply, frozen=True, kw_only=True, tag="refused"):
    reason: str


class Seal(Request, frozen=True, kw_only=True, tag="seal"):
    segment: Name
    attempt: AttemptNumber
    step: Step


class Sealed(Reply, frozen=True, kw_only=True, tag="sealed"):
    """`durable`: it is committed already."""

    durable: bool = False


class Abandon(Request, frozen=True, kw_only=True, tag="abandon"):
    """A slot that will not be sealed, if it is still granted for `step`; or, without a segment, a step that this rank cannot take."""

    segment: Name = ""
    step: Step | None = None
    reason: Annotated[str, msgspec.Meta(max_length=65536)] = ""
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Persist(Request, frozen=True, kw_only=True, tag="persist"):
    pass


class Find(Request, frozen=True, kw_only=True, tag="find"):
    step: Step | None = None


class RecoveryCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """`source` is "memory" or "storage"; `tag` the directory's name, or what it would be."""

    attempt: AttemptNumber
    step: Step | None
    tag: str
    source: str


class Found(Reply, frozen=True, kw_only=True, tag="found"):
    candidates: list[RecoveryCandidate]
    damaged: list[str] = []


class Fetch(Request, frozen=True, kw_only=True, tag="fetch"):
    attempt: AttemptNumber
    step: Step


class Fetched(Reply, frozen=True, kw_only=True, tag="fetched"):
    """Comes with one read-only descriptor for each rank listed."""

    ranks: list[Rank]


class Forget(Request, frozen=True, kw_only=True, tag="forget"):
    """Checkpoints to delete, by their directories."""

    job: Name
    tags: Annotated[list[Annotated[str, msgspec.Meta(max_length=160)]], msgspec.Meta(max_length=1000)]


class Forgotten(Reply, frozen=True, kw_only=True, tag="forgotten"):
    """`refused`: why, of each that is still there; all others are gone."""

    refused: dict[str, str] = {}


class Detach(Request, frozen=True, kw_only=True, tag="detach"):
    pass


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    pass


class Progress(Reply, frozen=True, kw_only=True, tag="progress"):
    attempt: AttemptNumber
    step: Step
    state: str
    reason: str = ""
    code: str = ""


class Error(Reply, frozen=True, kw_only=True, tag="error"):
    code: str
    message: str
    retry: bool = False


Message = (
    Hello | Welcome | Status | StatusReport | Begin | Began | Allocate | Segments | Replan | Acquire | Granted | Refused | Seal | Sealed
    | Abandon | Persist | Find | Found | Fetch | Fetched | Forget | Forgotten | Detach | Done | Progress | Error
)  # fmt: skip

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Request | Reply) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(payload: bytes) -> Message:
    """Raises ProtocolError naming what is wrong with the field."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be understood: {error}") from None
