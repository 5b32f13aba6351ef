"""Tests the table of the session: every transition in it, and every one that is not,
from both sides.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.errors import ProtocolError
from ckptd.shared.wire import frames
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.session import (
    ANSWERED,
    MAX_UNDER_WAY,
    REPLIES,
    REQUESTS,
    Role,
    Session,
    SessionState,
)
from tests.shared.samples import steady
from tests.shared.wire import samples as wire
from tests.support.cases import each_case

HELLO = m.Hello(id=1, min_version=1, max_version=1)
WELCOME = m.Welcome(re=1, version=1)
BEGIN = m.Begin(id=2, job="gpt", rank=0, world_size=1)
BEGAN = m.Began(re=2, attempt=1)
STEPS: dict[SessionState, tuple[m.Message, ...]] = {
    SessionState.NEW: (),
    SessionState.GREETING: (HELLO,),
    SessionState.GREETED: (HELLO, WELCOME),
    SessionState.BEGINNING: (HELLO, WELCOME, BEGIN),
    SessionState.ATTACHED: (HELLO, WELCOME, BEGIN, BEGAN),
    SessionState.LEAVING: (HELLO, WELCOME, BEGIN, BEGAN, m.Detach(id=3)),
    SessionState.CLOSED: (HELLO, m.Error(re=1, code="version", message="no")),
}
"""The messages that lead to each state."""

REQUEST_TYPES = {type(request): request for request in wire.REQUESTS}
REPLY_TYPES = {type(reply): reply for reply in wire.REPLIES}


def pair(state: SessionState) -> tuple[Session, Session]:
    """Return agent and daemon, both in `state`."""
    agent, daemon = Session(Role.AGENT), Session(Role.DAEMON)
    for message in STEPS[state]:
        deliver(agent, daemon, message)
    assert (agent.state, daemon.state) == (state, state)
    return agent, daemon


def deliver(agent: Session, daemon: Session, message: m.Request | m.Reply | m.Notification) -> None:
    sender, receiver = (agent, daemon) if isinstance(message, m.Request) else (daemon, agent)
    assert receiver.receive(sender.send(message)) == [message]


def unchanged(session: Session, step: Callable[[], object]) -> None:
    """Check that the call is a protocol error and changes nothing."""
    before = (session.state, dict(session.under_way), repr(session))
    with pytest.raises(ProtocolError):
        step()
    assert (session.state, dict(session.under_way), repr(session)) == before


def raw(message: m.Request | m.Reply | m.Notification) -> bytes:
    return frames.encode(m.encode(message))


# -- requests


PLAIN = (
    "Status",
    "Allocate",
    "Replan",
    "Acquire",
    "Seal",
    "Abandon",
    "Persist",
    "Find",
    "Fetch",
    "Forget",
)


def test_the_table_is_the_one_of_the_document() -> None:
    assert {(state, cls.__name__, after) for (state, cls), after in REQUESTS.items()} == {
        (SessionState.NEW, "Hello", SessionState.GREETING),
        (SessionState.GREETED, "Status", SessionState.GREETED),
        (SessionState.GREETED, "Forget", SessionState.GREETED),
        (SessionState.GREETED, "Drain", SessionState.GREETED),
        (SessionState.GREETED, "Lend", SessionState.GREETED),
        (SessionState.GREETED, "Begin", SessionState.BEGINNING),
        (SessionState.ATTACHED, "Begin", SessionState.BEGINNING),
        *(
            (SessionState.ATTACHED, n, SessionState.ATTACHED)
            for n in (
                *PLAIN,
                "Heard",
                "Deliver",
                "Drain",
                "Lend",
                "ReportRecovery",
                "Host",
                "Hosted",
                "CopyFailed",
            )
        ),
        (SessionState.ATTACHED, "Detach", SessionState.LEAVING),
    }


@each_case("state", SessionState)
@each_case("kind", REQUEST_TYPES)
def test_every_request_in_every_state(state: SessionState, kind: type[m.Request]) -> None:
    request = msgspec.structs.replace(REQUEST_TYPES[kind], id=50)
    agent, daemon = pair(state)
    after = REQUESTS.get((state, kind))
    if after is None:
        unchanged(agent, lambda: agent.send(request))
        unchanged(daemon, lambda: daemon.receive(raw(request)))
    else:
        deliver(agent, daemon, request)
        for session in (agent, daemon):
            assert session.state is after
            assert session.under_way[50] == request
            under_way = len(session.under_way)
            assert (
                repr(session)
                == f"<Session {session.role.value} {after.value} under_way={under_way}>"
            )


@each_case("state", SessionState)
def test_neither_side_may_send_the_messages_of_the_other(state: SessionState) -> None:
    agent, daemon = pair(state)
    for request in wire.REQUESTS:
        unchanged(daemon, lambda r=request: daemon.send(r))  # type: ignore[misc]
        unchanged(agent, lambda r=request: agent.receive(raw(r)))  # type: ignore[misc]
    for reply in wire.REPLIES:
        unchanged(agent, lambda r=reply: agent.send(r))  # type: ignore[misc]
        unchanged(daemon, lambda r=reply: daemon.receive(raw(r)))  # type: ignore[misc]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_request_ids_must_increase(number: int) -> None:
    agent, daemon = pair(SessionState.ATTACHED)
    unchanged(agent, lambda: agent.send(m.Find(id=number)))
    unchanged(daemon, lambda: daemon.receive(raw(m.Find(id=number))))
    deliver(agent, daemon, m.Find(id=3))
    unchanged(agent, lambda: agent.send(m.Find(id=3)))
    deliver(agent, daemon, m.Find(id=1000))
    deliver(agent, daemon, m.Found(re=1000, candidates=[]))
    unchanged(agent, lambda: agent.send(m.Find(id=1000)))


def test_a_request_id_of_zero_is_refused() -> None:
    agent, daemon = pair(SessionState.NEW)
    unchanged(agent, lambda: agent.send(m.Hello(id=0, min_version=1, max_version=1)))
    unchanged(daemon, lambda: daemon.receive(raw(m.Hello(id=0, min_version=1, max_version=1))))


def test_a_refused_request_does_not_use_up_its_id() -> None:
    agent, daemon = pair(SessionState.GREETED)
    unchanged(agent, lambda: agent.send(m.Persist(id=90)))
    unchanged(daemon, lambda: daemon.receive(raw(m.Persist(id=90))))
    deliver(agent, daemon, m.Begin(id=2, job="gpt", rank=0, world_size=1))


def test_requests_under_way_are_limited() -> None:
    agent, daemon = pair(SessionState.ATTACHED)
    for number in range(3, 3 + MAX_UNDER_WAY):
        deliver(agent, daemon, m.Find(id=number))
    assert MAX_UNDER_WAY == 64
    unchanged(agent, lambda: agent.send(m.Find(id=500)))
    unchanged(daemon, lambda: daemon.receive(raw(m.Find(id=500))))
    deliver(agent, daemon, m.Found(re=10, candidates=[]))
    deliver(agent, daemon, m.Find(id=500))


# -- replies


@each_case("asked", REQUEST_TYPES)
@each_case("answer", REPLY_TYPES)
def test_every_reply_to_every_request(asked: type[m.Request], answer: type[m.Reply]) -> None:
    state = next(state for state, kind in REQUESTS if kind is asked)
    agent, daemon = pair(state)
    deliver(agent, daemon, msgspec.structs.replace(REQUEST_TYPES[asked], id=50))
    reply = msgspec.structs.replace(REPLY_TYPES[answer], re=50)
    expected = REPLIES[asked]
    allowed = (expected if isinstance(expected, tuple) else (expected,)) + (m.Error,)
    if answer in allowed:
        between = agent.state
        deliver(agent, daemon, reply)
        for session in (agent, daemon):
            assert 50 not in session.under_way
            assert session.state is ANSWERED.get((between, answer is not m.Error), state)
    else:
        unchanged(daemon, lambda: daemon.send(reply))
        unchanged(agent, lambda: agent.receive(raw(reply)))


def test_replies_lead_to_the_states_of_the_document() -> None:
    assert ANSWERED == {
        (SessionState.GREETING, True): SessionState.GREETED,
        (SessionState.GREETING, False): SessionState.CLOSED,
        (SessionState.BEGINNING, True): SessionState.ATTACHED,
        (SessionState.BEGINNING, False): SessionState.GREETED,
        (SessionState.LEAVING, True): SessionState.GREETED,
        (SessionState.LEAVING, False): SessionState.ATTACHED,
    }
    assert {cls.__name__: [c.__name__ for c in (r if isinstance(r, tuple) else (r,))] for cls,
    r in REPLIES.items()} == {
        "Hello": ["Welcome"], "Status": ["StatusReport"], "Begin": ["Began"],
        "Allocate": ["Segments"], "Acquire": ["Granted", "Refused"], "Replan": ["Done"],
        "Seal": ["Sealed"], "Abandon": ["Done"], "Persist": ["Done"], "Find": ["Found"],
        "Fetch": ["Fetched"], "ReportRecovery": ["Done"], "Forget": ["Forgotten"],
            "Detach": ["Done"], "Heard": ["Done"], "Deliver": ["Delivered"], "Lend": ["Lent"],
        "Drain": ["Drained"], "Host": ["Granted", "Segments", "Refused"], "Hosted": ["Done"],
        "CopyFailed": ["Done"],
    }  # fmt: skip


@each_case("state", SessionState)
@each_case(
    "reply",
    [r for r in wire.REPLIES if not isinstance(r, m.Progress)],
    ids=lambda r: type(r).__name__,
)
def test_a_reply_to_nothing_is_refused(state: SessionState, reply: m.Reply) -> None:
    agent, daemon = pair(state)
    for number in (40, 1 << 61):
        unanswered = msgspec.structs.replace(reply, re=number)
        unchanged(daemon, lambda r=unanswered: daemon.send(r))  # type: ignore[misc]
        unchanged(agent, lambda r=unanswered: agent.receive(raw(r)))  # type: ignore[misc]


def test_a_request_is_answered_once() -> None:
    agent, daemon = pair(SessionState.ATTACHED)
    deliver(agent, daemon, m.Find(id=3))
    deliver(agent, daemon, m.Found(re=3, candidates=[]))
    unchanged(daemon, lambda: daemon.send(m.Found(re=3, candidates=[])))
    unchanged(agent, lambda: agent.receive(raw(m.Found(re=3, candidates=[]))))


def test_replies_may_come_in_any_order() -> None:
    agent, daemon = pair(SessionState.ATTACHED)
    for request in (m.Find(id=3), m.Status(id=4), m.Acquire(id=5, step=1, wait=1)):
        deliver(agent, daemon, request)
    for reply in (
        m.Refused(re=5, reason=""),
        m.Found(re=3, candidates=[]),
        m.StatusReport(re=4, report="{}"),
    ):
        deliver(agent, daemon, reply)
    assert (agent.under_way, daemon.under_way) == ({}, {})


def test_requests_under_way_at_a_detach_are_still_answered() -> None:
    agent, daemon = pair(SessionState.ATTACHED)
    deliver(agent, daemon, m.Seal(id=3, segment="x", attempt=1, step=1))
    deliver(agent, daemon, m.Detach(id=4))
    deliver(agent, daemon, m.Done(re=4))
    assert agent.state is SessionState.GREETED
    deliver(agent, daemon, m.Sealed(re=3, durable=True))
    assert (agent.state, agent.under_way) == (SessionState.GREETED, {})


def test_a_rank_that_goes_back_begins_again() -> None:
    agent, daemon = pair(SessionState.ATTACHED)
    deliver(agent, daemon, m.Seal(id=3, segment="x", attempt=1, step=1))
    deliver(agent, daemon, m.Begin(id=4, job="gpt", rank=0, world_size=1))
    unchanged(agent, lambda: agent.send(m.Find(id=5)))
    deliver(agent, daemon, m.Sealed(re=3))
    deliver(agent, daemon, m.Began(re=4, attempt=2))
    assert (agent.state, agent.under_way) == (SessionState.ATTACHED, {})


# -- Progress, and the end


@each_case("state", SessionState)
def test_progress_comes_without_a_request_to_attached_agents(state: SessionState) -> None:
    agent, daemon = pair(state)
    news = m.Progress(re=0, attempt=1, step=5, state="durable")
    if state in (SessionState.ATTACHED, SessionState.LEAVING):
        deliver(agent, daemon, news)
        assert agent.state is state
    else:
        unchanged(daemon, lambda: daemon.send(news))
        unchanged(agent, lambda: agent.receive(raw(news)))


def test_progress_does_not_answer_a_request() -> None:
    agent, daemon = pair(SessionState.ATTACHED)
    deliver(agent, daemon, m.Find(id=3))
    news = m.Progress(re=3, attempt=1, step=5, state="durable")
    unchanged(daemon, lambda: daemon.send(news))
    unchanged(agent, lambda: agent.receive(raw(news)))


@each_case("state", SessionState)
def test_an_error_without_a_request_ends_the_session(state: SessionState) -> None:
    agent, daemon = pair(state)
    deliver(agent, daemon, m.Error(re=0, code="protocol", message="that cannot be"))
    for session in (agent, daemon):
        assert (session.state, session.under_way) == (SessionState.CLOSED, {})


def test_close_forgets_requests_under_way() -> None:
    agent, _ = pair(SessionState.BEGINNING)
    agent.close()
    assert (agent.state, agent.under_way) == (SessionState.CLOSED, {})
    unchanged(agent, lambda: agent.receive(raw(BEGAN)))
    unchanged(agent, lambda: agent.send(m.Status(id=9)))


def test_a_message_too_large_is_not_sent_and_changes_nothing() -> None:
    agent, daemon = pair(SessionState.ATTACHED)
    deliver(agent, daemon, m.Status(id=3))
    unchanged(daemon, lambda: daemon.send(m.StatusReport(re=3, report="x" * (1 << 20))))
    deliver(agent, daemon, m.StatusReport(re=3, report="x"))


# -- noise


@each_case("role", Role)
@each_case("length", [0, (1 << 20) + 1, 0xFFFFFFFF])
def test_a_huge_length_is_refused(role: Role, length: int) -> None:
    session = Session(role)
    unchanged(session, lambda: session.receive(length.to_bytes(4, "little")))


@steady
@given(
    st.sampled_from(Role),
    st.sampled_from(SessionState),
    st.lists(st.binary(max_size=40), max_size=5),
)
def test_noise_is_no_more_than_a_protocol_error(
    role: Role, state: SessionState, pieces: list[bytes]
) -> None:
    session = pair(state)[role is Role.DAEMON]
    under_way = dict(session.under_way)
    try:
        for piece in pieces:
            assert session.receive(piece) == [], "noise is no message"
    except ProtocolError:
        pass  # the session is as it was, which the next line asserts
    assert (session.state, dict(session.under_way)) == (state, under_way)


@steady
@given(
    st.sampled_from(Role),
    st.sampled_from(SessionState),
    st.lists(
        st.tuples(st.sampled_from(wire.MESSAGES), st.integers(0, 1 << 62), st.integers(0, 60))
    ),
)
def test_framed_noise_is_no_more_than_a_protocol_error(
    role: Role, state: SessionState, sent: list[tuple[m.Message, int, int]]
) -> None:
    session = pair(state)[role is Role.DAEMON]
    for message, noise, at in sent:
        payload = bytearray(m.encode(message))
        if at % 3 == 0:
            payload[at % len(payload)] = noise & 0xFF
        before = session.state, dict(session.under_way)
        try:
            session.receive(frames.encode(bytes(payload)))
        except ProtocolError:
            assert (session.state, dict(session.under_way)) == before


@steady
@given(st.lists(st.tuples(st.sampled_from(wire.MESSAGES), st.integers(0, 8)), max_size=40))
def test_each_message_that_one_side_may_send_the_other_may_receive(
    sent: list[tuple[m.Message, int]],
) -> None:
    agent, daemon = Session(Role.AGENT), Session(Role.DAEMON)
    for message, number in sent:
        numbered = msgspec.structs.replace(
            message, **{"id" if isinstance(message, m.Request) else "re": number}
        )
        sender, receiver = (agent, daemon) if isinstance(message, m.Request) else (daemon, agent)
        try:
            data = sender.send(numbered)
        except ProtocolError:
            with pytest.raises(ProtocolError):
                receiver.receive(raw(numbered))
        else:
            assert receiver.receive(data) == [numbered]
        assert (agent.state, agent.under_way) == (daemon.state, daemon.under_way)
