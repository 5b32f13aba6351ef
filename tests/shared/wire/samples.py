"""One message of every type, with every field filled in."""

from __future__ import annotations

from ckptd.shared.wire import messages as m
from ckptd.shared.wire.board import Answer, Holding

HELD = m.HeldSegment(
    segment="000102030405060708090a0b0c0d0e0f.seg", slot=1, capacity=200_000, generation=4
)
REQUESTS: tuple[m.Request, ...] = (
    m.Hello(id=1, min_version=1, max_version=1, features=["x"], client="ckptd 0.1.0"),
    m.Status(id=2),
    m.Begin(id=3, job="gpt", rank=0, world_size=2, attempt=2),
    m.Allocate(id=4, capacity=200_000, count=2, node=1),
    m.Acquire(id=5, step=1000, name="best", wait=10.0),
    m.Seal(id=6, segment=HELD.segment, attempt=2, step=1000),
    m.Abandon(id=7, segment=HELD.segment, step=1000, reason="no memory", code="shm-full"),
    m.Persist(id=8),
    m.Find(id=9, step=1000),
    m.Fetch(id=10, attempt=2, step=1000),
    m.Detach(id=11),
    m.Forget(id=13, job="gpt", tags=["step-00001000.a0002", "best.a0001"]),
    m.Replan(id=12, step=1000, why="head.bias is new"),
    m.Heard(
        id=14,
        attempt=2,
        answer=Answer(common=[900], dead={1000: ("storage", "disk full (on node2)")}),
    ),
    m.Deliver(id=15),
    m.Drain(id=21, job="gpt", seconds=25.0),
    m.Lend(id=17, job="gpt", attempt=2, step=900, wait=60.0),
    m.Host(
        id=18,
        rank=3,
        attempt=2,
        step=1000,
        capacity=40 << 20,
        chunk_size=8 << 20,
        mapped=[HELD.segment],
    ),
    m.Hosted(id=19, segment=HELD.segment),
    m.CopyFailed(id=20, attempt=2, reason="the peer is gone"),
    m.ReportRecovery(
        id=16,
        step=1000,
        attempt=2,
        tag="step-00001000.a0002",
        source="memory",
        seconds=1.5,
        bytes=200_000,
    ),
)
REPLIES: tuple[m.Reply | m.Notification, ...] = (
    m.Welcome(
        re=1,
        version=1,
        features=["x"],
        daemon="ckptd 0.1.0",
        root="/ckpts",
        private=True,
        slots=3,
        chunk_size=8 << 20,
        stall_budget=2.5,
    ),
    m.StatusReport(re=2, report='{"ready": true}'),
    m.Began(re=3, attempt=2, held=[HELD]),
    m.Segments(re=4, segments=[HELD]),
    m.Granted(re=5, segment=HELD.segment, step=1000),
    m.Refused(re=5, reason="every slot is still being saved"),
    m.Sealed(re=6, durable=True),
    m.Done(re=7),
    m.Found(
        re=9,
        candidates=[
            m.RecoveryCandidate(attempt=2, step=1000, tag="step-00001000.a0002", source="memory")
        ],
        damaged=["step-00000900.a0002"],
    ),
    m.Fetched(re=10, ranks=[0, 1]),
    m.Lent(
        re=17,
        attempt=2,
        step=1000,
        tag="step-00001000.a0002",
        source="memory",
        ranks=[0, 1],
    ),
    m.Forgotten(re=13, refused={"best.a0001": "checkpoint gpt/best.a0001 is pinned"}),
    m.Progress(re=0, attempt=2, step=1000, state="failed", reason="disk full", code="storage"),
    m.Drained(
        re=21,
        saved=["gpt/step-00001000.a0002"],
        owed=[
            m.Due(
                job="bert",
                attempt=1,
                step=40,
                tag="step-00000040.a0001",
                state="saving",
                done=1 << 20,
                total=1 << 21,
            )
        ],
    ),
    m.Delivered(re=15, attempt=1, world_size=4, ranks=[2, 3]),
    m.Holds(
        re=0,
        attempt=2,
        holding=Holding(
            held=[900, 1000],
            done=1000,
            durable=800,
            failed={950: ("storage", "disk full (on node2)")},
        ),
    ),
    m.Uploads(re=0, attempt=2, uploaded=[900], waiting=[1000]),
    m.PeerReplicas(re=0, attempt=2, replicated=[900], alone="no room"),
    m.Waiting(re=0, attempt=2, step=1000, ranks=[1, 3]),
    m.Remark(re=0, text="job gpt: the root has room for 2 more of its checkpoints"),
    m.Error(re=4, code="quota", message="too much", retry=True),
)
MESSAGES: tuple[m.Request | m.Reply | m.Notification, ...] = REQUESTS + REPLIES
