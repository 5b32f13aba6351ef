"""The messages between agent and daemon as frozen structs, with encoder and decoder
(PROTOCOL.md, section 3).

The bounds of the fields are checked while a message is decoded.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ckptd.shared.errors import ProtocolError
from ckptd.shared.formats.membership import MOST_RANKS, Membership
from ckptd.shared.formats.plan import Size
from ckptd.shared.system.numa import UNKNOWN
from ckptd.shared.wire.board import MOST_STEPS, Answer, Holding, StepNumber

Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
AttemptNumber = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """A message from a client.

    `id` is higher than every id before it on the connection.
    """

    id: Id


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """A message from the daemon that answers a request.

    `re` is the id of that request. It is 0 in an Error that ends the connection.
    """

    re: Id


class Notification(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """A message that the daemon sends to a rank without a request.

    `re` is 0.
    """

    re: Id


class Hello(Request, frozen=True, kw_only=True, tag="hello"):
    min_version: int
    max_version: int
    features: list[str] = []
    client: Annotated[str, msgspec.Meta(max_length=256)] = ""


class CopySettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a daemon for copies in the memory of other nodes.

    `domain`: the failure domain of its node, such as a rack, or "" if it has no name.
    `bandwidth`: the most bytes a second that a rank may send to its peer, or 0 for no
    limit.
    """

    domain: Annotated[str, msgspec.Meta(max_length=128)] = ""
    bandwidth: Size = 0


class Welcome(Reply, frozen=True, kw_only=True, tag="welcome"):
    """The reply to Hello.

    `settings` has the `CKPTD_*` variables of a private daemon, except its place; None
    if not told.

    `identity` is that of the root, which tells two roots at the same path of two nodes
    apart. `stage` is the directory in which checkpoints are committed before they are
    uploaded to the root, or "".

    `copies`: the settings of the daemon for copies in the memory of other nodes, or None
    if it makes none.
    """

    version: int
    features: list[str] = []
    daemon: str = ""
    root: str = ""
    private: bool = False
    slots: int = 2
    chunk_size: int = 0
    stall_budget: float = 10.0
    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""
    settings: dict[str, str] | None = None
    identity: Annotated[str, msgspec.Meta(max_length=64)] = ""
    stage: str = ""
    copies: CopySettings | None = None


class Status(Request, frozen=True, kw_only=True, tag="status"):
    pass


class StatusReport(Reply, frozen=True, kw_only=True, tag="status-report"):
    report: str


class Begin(Request, frozen=True, kw_only=True, tag="begin"):
    """A request that begins an attempt, or joins or resumes one.

    `run` identifies the launch to which this process belongs, or is "".

    `wait`: seconds to wait for the end of another run of the job before the request is
    refused, or None to end that run's saving at once. `node`: the membership of this
    node in an attempt of several nodes, or None if all ranks are on one node.
    `foreign_memory`: the treatment of snapshots of the job in memory that were saved
    for another root: "refuse", "adopt" or "drop", or "" for the setting of the daemon.
    `identity`: the identity of the root for which the given attempt was begun, or "" if
    that is not known.
    """

    job: Name
    rank: Rank
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]
    attempt: AttemptNumber = 0
    run: Annotated[str, msgspec.Meta(max_length=256)] = ""
    wait: Annotated[float, msgspec.Meta(ge=0, le=3600)] | None = None
    node: Membership | None = None
    foreign_memory: Annotated[str, msgspec.Meta(max_length=16)] = ""
    identity: Annotated[str, msgspec.Meta(max_length=64)] = ""


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
    """The reply to Allocate.

    Two descriptors come with each segment, in this order: one to map, and one to hold
    the trainer's flock on.

    `remark` is a sentence that the agent logs, or "".
    """

    segments: list[HeldSegment]
    remark: str = ""


class Replan(Request, frozen=True, kw_only=True, tag="plan"):
    """A request that announces that this rank plans the step again, and `why`.

    It comes before the rank exchanges plans with the others.
    """

    step: StepNumber
    why: Annotated[str, msgspec.Meta(max_length=65536)] = ""


class Acquire(Request, frozen=True, kw_only=True, tag="acquire"):
    step: StepNumber
    name: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    wait: Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Granted(Reply, frozen=True, kw_only=True, tag="granted"):
    segment: Name
    step: StepNumber | None = None


class Refused(Reply, frozen=True, kw_only=True, tag="refused"):
    reason: str


class TrainingCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of an earlier snapshot for the training of a rank.

    `seconds`: the time by which the training is behind, the call of `snapshot`
    included. `usual`: seconds that an undisturbed step takes.
    """

    step: StepNumber
    seconds: float
    usual: Annotated[float, msgspec.Meta(ge=0)]


class Seal(Request, frozen=True, kw_only=True, tag="seal"):
    """A request that reports a sealed slot.

    `held`: seconds for which the snapshot held the training, or 0.0 if not known.

    `cost`: that of the last snapshot whose cost is known, or None. `uncompared`: True if
    this rank's device had too little memory to compare the snapshot with other ranks.
    `unlocked`: bytes of the slot that were not page-locked, if an accelerator copied into
    it.
    """

    segment: Name
    attempt: AttemptNumber
    step: StepNumber
    held: Annotated[float, msgspec.Meta(ge=0, le=10**9)] = 0.0
    cost: TrainingCost | None = None
    uncompared: bool = False
    unlocked: Size = 0


class Sealed(Reply, frozen=True, kw_only=True, tag="sealed"):
    """The reply to Seal. `durable` is True if the snapshot is committed already."""

    durable: bool = False


class Abandon(Request, frozen=True, kw_only=True, tag="abandon"):
    """A request that gives back a granted slot, or reports that this rank cannot take a
    step.

    With `segment`, that slot will not be sealed, and the step fails on all ranks unless
    this rank has another slot for it. If `step` is given and the slot is no longer
    granted for it, nothing happens. Without `segment`, the rank cannot take `step`,
    which then fails on all ranks unless this rank has sealed it. With neither, a
    snapshot whose step was wrong is only counted. `reason` and `code` describe the
    error that the ranks get.
    """

    segment: Name = ""
    step: StepNumber | None = None
    reason: Annotated[str, msgspec.Meta(max_length=65536)] = ""
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Persist(Request, frozen=True, kw_only=True, tag="persist"):
    pass


class Heard(Request, frozen=True, kw_only=True, tag="heard"):
    """A request of the lowest rank of a node, which passes on the answer that it has
    found on the board of an attempt.
    """

    attempt: AttemptNumber
    answer: Answer


class Deliver(Request, frozen=True, kw_only=True, tag="deliver"):
    """A request to save all that is in memory of the job.

    The reply comes once that is done. In an attempt of one node, only the snapshots of
    older attempts of several nodes are saved.

    `copies`: True to save the peer replicas of earlier attempts instead, if their own
    nodes have not delivered: these may be lost, or may have lost their memory.
    """

    copies: bool = False


class Delivered(Reply, frozen=True, kw_only=True, tag="delivered"):
    """The reply to Deliver.

    `attempt` is the attempt before this one in which this daemon had `ranks`, or 0 if
    it knows of none. In the reply to a request with `copies`, `ranks` are those whose peer
    replicas this daemon has delivered.

    `world_size`: the ranks of that attempt.
    """

    attempt: AttemptNumber = 0
    world_size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    ranks: Annotated[list[Rank], msgspec.Meta(max_length=MOST_RANKS)] = []


class Find(Request, frozen=True, kw_only=True, tag="find"):
    """A request for the candidates of a recovery.

    `delivered`: an attempt whose nodes have all delivered what they hold, or 0.
    """

    step: StepNumber | None = None
    delivered: AttemptNumber = 0


class RecoveryCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot or checkpoint that may be recovered.

    `source` is "memory", "stage" or "storage".

    `tag` is the name of the checkpoint's directory. For a snapshot in memory it is the
    name that the directory has or would have.
    """

    attempt: AttemptNumber
    step: StepNumber | None
    tag: str
    source: str


class Found(Reply, frozen=True, kw_only=True, tag="found"):
    """The reply to Find.

    `incomplete` has a text for each abandoned try of a step after the best candidate.
    """

    candidates: list[RecoveryCandidate]
    damaged: list[str] = []
    incomplete: list[str] = []


class Fetch(Request, frozen=True, kw_only=True, tag="fetch"):
    """`check`: False if the slots need not be checked before the reply, because the
    agent compares them with a checkpoint.
    """

    attempt: AttemptNumber
    step: StepNumber
    check: bool = True


class Fetched(Reply, frozen=True, kw_only=True, tag="fetched"):
    """The reply to Fetch.

    One read-only descriptor comes with it for each rank of `ranks`, in the same order.
    """

    ranks: list[Rank]


class Drain(Request, frozen=True, kw_only=True, tag="drain"):
    """A request to save what is in the memory of this node only, before the node goes.

    The reply comes once all that was owed at the time of the request has left this node,
    or after `seconds`. `job`: a job, or "" for all jobs.
    """

    job: Name = ""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=86400)]


class Due(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot that has not left this node: its place, and what keeps it here.

    `state`: "waiting", "saving", "failed", "delivered" or "uploading" (PROTOCOL.md).
    `reason`: why it cannot leave, or "". `done`, `total`: bytes that are written or
    uploaded, and bytes in all; both are 0 if that is not known.
    """

    job: Name
    attempt: AttemptNumber
    step: StepNumber | None
    tag: Annotated[str, msgspec.Meta(max_length=160)]
    state: Annotated[str, msgspec.Meta(max_length=16)]
    reason: Annotated[str, msgspec.Meta(max_length=400)] = ""
    done: Size = 0
    total: Size = 0


class Drained(Reply, frozen=True, kw_only=True, tag="drained"):
    """The reply to Drain.

    `saved`: job and tag of what was owed and has left this node. `owed`: what has not.
    `more`: the number of entries that `owed` has no room for.
    """

    saved: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=320)]], msgspec.Meta(max_length=500)
    ] = []
    owed: Annotated[list[Due], msgspec.Meta(max_length=500)] = []
    more: Size = 0


class Lend(Request, frozen=True, kw_only=True, tag="lend"):
    """A request to lend the newest snapshot of a job, from a reader that is no rank.

    `attempt`, `step`: the snapshot that the reader has; only a later one is an answer.
    With `attempt` 0, the reader has none. `wait`: seconds to wait for a later one.
    """

    job: Name
    attempt: AttemptNumber = 0
    step: StepNumber | None = None
    wait: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


class Lent(Reply, frozen=True, kw_only=True, tag="lent"):
    """The reply to Lend.

    `source` is "memory", "stage" or "storage", or "" if there is no later snapshot.
    One read-only descriptor comes with it for each rank of `ranks`, in the same order.
    """

    attempt: AttemptNumber = 0
    step: StepNumber | None = None
    tag: str = ""
    source: str = ""
    ranks: list[Rank] = []


class Host(Request, frozen=True, kw_only=True, tag="host"):
    """A request for a segment that is to get the peer replica of a slot of another node.

    `rank`, `attempt`, `step`: those of the slot. `capacity`: the bytes of its data that
    are used. `chunk_size`: that of the slot. `mapped`: the segments that this client has
    mapped already.
    """

    rank: Rank
    attempt: AttemptNumber
    step: StepNumber
    capacity: Size
    chunk_size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    mapped: Annotated[list[Name], msgspec.Meta(max_length=64)] = []


class Hosted(Request, frozen=True, kw_only=True, tag="hosted"):
    """A report that the peer replica in `segment` is whole: its header says sealed."""

    segment: Name


class CopyFailed(Request, frozen=True, kw_only=True, tag="copy-failed"):
    """The reason why this rank could not copy its slot to its peer, or receive a copy."""

    attempt: AttemptNumber
    reason: Annotated[str, msgspec.Meta(max_length=65536)]


class ReportRecovery(Request, frozen=True, kw_only=True, tag="recovered"):
    """A report of rank 0 that all ranks have recovered a snapshot.

    `tag` and `source` are those of the candidate. `seconds`: how long the recovery took.
    `bytes`: the size of the whole snapshot in memory. `passed_over`: a text for each
    candidate that was damaged, which begins with its job and tag.
    """

    step: StepNumber | None
    attempt: AttemptNumber
    tag: Annotated[str, msgspec.Meta(max_length=160)]
    source: Annotated[str, msgspec.Meta(max_length=16)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=10**9)]
    bytes: Size
    passed_over: list[str] = []


class Forget(Request, frozen=True, kw_only=True, tag="forget"):
    """A request to delete checkpoints of a job.

    `tags` are the names of their directories.
    """

    job: Name
    tags: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=160)]], msgspec.Meta(max_length=1000)
    ]


class Forgotten(Reply, frozen=True, kw_only=True, tag="forgotten"):
    """The reply to Forget.

    `refused` maps the tag of each checkpoint that is still there to the reason. All
    others are deleted.
    """

    refused: dict[str, str] = {}


class Detach(Request, frozen=True, kw_only=True, tag="detach"):
    pass


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    pass


class Progress(Notification, frozen=True, kw_only=True, tag="progress"):
    """The outcome of a snapshot.

    `state` is "durable" or "failed"; `reason` and `code` say why the snapshot failed.
    """

    attempt: AttemptNumber
    step: StepNumber
    state: str
    reason: str = ""
    code: str = ""


class Waiting(Notification, frozen=True, kw_only=True, tag="waiting"):
    """The ranks that have not come to a step that others wait for.

    Every rank gets this message if its client has the feature `waiting`. Nothing has
    failed.
    """

    attempt: AttemptNumber
    step: StepNumber
    ranks: Annotated[list[Rank], msgspec.Meta(max_length=MOST_RANKS)]


class Remark(Notification, frozen=True, kw_only=True, tag="remark"):
    """A warning about the storage, which rank 0 of a job logs.

    Rank 0 gets this message if its client has the feature `remarks`. Nothing has
    failed.
    """

    text: str


class Holds(Notification, frozen=True, kw_only=True, tag="holds"):
    """The steps that this node holds. The lowest rank of the node writes them to the
    board.
    """

    attempt: AttemptNumber
    holding: Holding


class PeerReplicas(Notification, frozen=True, kw_only=True, tag="peer-replicas"):
    """The progress of peer replicas in an attempt.

    Every rank gets this message if its client has the feature `peers`.

    `replicating`: the step that this rank is to copy to its peer now, or -1.
    `replicated`: the last steps that all nodes have copied to their peers. `alone`: the
    reason why there are no more peer replicas in this attempt, or "".
    """

    attempt: AttemptNumber
    replicating: Annotated[int, msgspec.Meta(ge=-1, lt=10**18)] = -1
    replicated: Annotated[list[StepNumber], msgspec.Meta(max_length=MOST_STEPS)] = []
    alone: str = ""


class Uploads(Notification, frozen=True, kw_only=True, tag="uploads"):
    """The steps of an attempt that are in the root, and those that wait on the stage, if
    the daemon has a stage.

    A step that was durable before this message and is in neither list will not be
    uploaded, or is no longer in the root.
    """

    attempt: AttemptNumber
    uploaded: list[StepNumber] = []
    waiting: list[StepNumber] = []


class Error(Reply, frozen=True, kw_only=True, tag="error"):
    code: str
    message: str
    retry: bool = False


Message = (
    Hello | Welcome | Status | StatusReport | Begin | Began | Allocate | Segments | Replan
    | Acquire | Granted | Refused | Seal | Sealed | Abandon | Persist | Heard | Deliver
    | Delivered | Find | Found | Fetch | Fetched | Drain | Drained | Lend | Lent
    | ReportRecovery | Forget | Forgotten | Host | Hosted | CopyFailed | Detach | Done
    | Progress | Holds | Uploads | PeerReplicas | Waiting | Remark | Error
)  # fmt: skip

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Request | Reply | Notification) -> bytes:
    """Return the msgpack payload for a message."""
    return msgspec.msgpack.encode(message)


def decode(payload: bytes) -> Message:
    """Return the message of a payload.

    Raises ProtocolError if it is not a valid message; the error names the field at
    fault.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be decoded: {error}") from None
