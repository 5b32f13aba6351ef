"""The protocol session of one connection, without I/O: one table says which message is
allowed in which state.

A session is NEW until the daemon has welcomed the client. It is then GREETED until a
rank of a job begins, and ATTACHED until that rank detaches. While Hello, Begin or
Detach is under way, the session is in a state in between (GREETING, BEGINNING, LEAVING)
and accepts no request. Otherwise requests may overlap, and each reply names its
request.

Agent and daemon use the same table, and both check each message: one before it sends
the message, the other when it has received it. A message that is not in the table
raises ProtocolError and changes nothing. After a ProtocolError, or an Error with `re` =
0, the connection must be closed.

`docs/reference/life-cycles.md` is drawn from `REQUESTS` and `ANSWERED`.
"""

from __future__ import annotations

import enum

from ckptd.shared.errors import ProtocolError
from ckptd.shared.wire import frames
from ckptd.shared.wire import messages as m

MIN_VERSION = MAX_VERSION = 1
NODES = "nodes"
"""The feature of a daemon that serves jobs of several nodes."""
STAGE = "stage"
"""The feature of a client that reads checkpoints from a stage, and of a daemon that has
one.
"""
REPLICAS = "replicas"
"""The feature of a daemon that compares tensors of several ranks (FORMAT.md, section
3).
"""
WAITING = "waiting"
"""The feature of a client that takes the message Waiting."""
REMARKS = "remarks"
"""The feature of a client that takes the message Remark."""
RECOVERIES = "recoveries"
"""The feature of a daemon that takes the message ReportRecovery."""
LENDING = "lending"
"""The feature of a daemon that takes the message Lend."""
DRAIN = "drain"
"""The feature of a daemon that takes the message Drain."""
PEERS = "peers"
"""The feature of a client that takes the message PeerReplicas, and of a daemon that
holds peer replicas.
"""
MAX_UNDER_WAY = 64


class Role(enum.Enum):
    AGENT = "agent"
    DAEMON = "daemon"


class SessionState(enum.Enum):
    NEW = "new"
    GREETING = "greeting"
    GREETED = "greeted"
    BEGINNING = "beginning"
    ATTACHED = "attached"
    LEAVING = "leaving"
    CLOSED = "closed"


_A = SessionState.ATTACHED
REQUESTS: dict[tuple[SessionState, type[m.Request]], SessionState] = {
    (SessionState.NEW, m.Hello): SessionState.GREETING,
    (SessionState.GREETED, m.Status): SessionState.GREETED,
    (SessionState.GREETED, m.Forget): SessionState.GREETED,
    (SessionState.GREETED, m.Drain): SessionState.GREETED,
    (SessionState.GREETED, m.Lend): SessionState.GREETED,
    (SessionState.GREETED, m.Begin): SessionState.BEGINNING,
    # A rank that has recovered an earlier step begins the next attempt.
    (SessionState.ATTACHED, m.Begin): SessionState.BEGINNING,
    **{
        (_A, request): _A
        for request in (
            m.Status, m.Allocate, m.Replan, m.Acquire, m.Seal, m.Abandon, m.Persist, m.Heard,
            m.Deliver, m.Find, m.Fetch, m.ReportRecovery, m.Forget, m.Drain, m.Lend, m.Host,
            m.Hosted, m.CopyFailed,
        )
    },
    (_A, m.Detach): SessionState.LEAVING,
}  # fmt: skip
"""The state after a request, by the state before it and the type of the request. A pair
that is missing is not allowed.
"""

REPLIES: dict[type[m.Request], type[m.Reply] | tuple[type[m.Reply], ...]] = {
    m.Hello: m.Welcome,
    m.Status: m.StatusReport,
    m.Begin: m.Began,
    m.Allocate: m.Segments,
    m.Replan: m.Done,
    m.Acquire: (m.Granted, m.Refused),
    m.Seal: m.Sealed,
    m.Abandon: m.Done,
    m.Persist: m.Done,
    m.Heard: m.Done,
    m.Deliver: m.Delivered,
    m.Find: m.Found,
    m.Fetch: m.Fetched,
    m.Drain: m.Drained,
    m.Lend: m.Lent,
    m.Host: (m.Granted, m.Segments, m.Refused),
    m.Hosted: m.Done,
    m.CopyFailed: m.Done,
    m.ReportRecovery: m.Done,
    m.Forget: m.Forgotten,
    m.Detach: m.Done,
}
"""The types of reply that may answer a request. An Error may answer any request."""

ANSWERED: dict[tuple[SessionState, bool], SessionState] = {
    (SessionState.GREETING, True): SessionState.GREETED,
    (SessionState.GREETING, False): SessionState.CLOSED,
    (SessionState.BEGINNING, True): SessionState.ATTACHED,
    (SessionState.BEGINNING, False): SessionState.GREETED,
    (SessionState.LEAVING, True): SessionState.GREETED,
    (SessionState.LEAVING, False): SessionState.ATTACHED,
}
"""The state after the answer to Hello, Begin or Detach, by the state before it. The key
holds False if the answer is an Error.
"""


class Session:
    """The state of one connection.

    Call `send` for each message to be sent, and `receive` for all bytes that have
    arrived.

    `state` is the state that the session is in. `under_way` maps the id of each request
    without an answer to the request.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.state = SessionState.NEW
        self.under_way: dict[int, m.Request] = {}
        self._last_id = 0
        self._decoder = frames.Decoder()

    def __repr__(self) -> str:
        return f"<Session {self.role.value} {self.state.value} under_way={len(self.under_way)}>"

    def send(self, message: m.Request | m.Reply | m.Notification) -> bytes:
        """Return the frame for `message`, and apply the message to the session.

        Raises ProtocolError if it may not be sent now.
        """
        frame = frames.encode(m.encode(message))
        self._apply(message, ours=True)
        return frame

    def receive(self, data: bytes) -> list[m.Message]:
        """Add received bytes, and return the messages that are complete now.

        Raises ProtocolError if one is broken or not allowed.
        """
        received = []
        for payload in self._decoder.feed(data):
            message = m.decode(payload)
            self._apply(message, ours=False)
            received.append(message)
        return received

    def close(self) -> None:
        """End the session. No request is under way any more, and none is accepted."""
        self.state = SessionState.CLOSED
        self.under_way.clear()

    def _apply(self, message: m.Request | m.Reply | m.Notification, *, ours: bool) -> None:
        if isinstance(message, m.Request) != (ours == (self.role is Role.AGENT)):
            raise ProtocolError(
                f"{_name(message)} does not go from "
                f"{'daemon to agent' if isinstance(message, m.Request) else 'agent to daemon'}"
            )
        if isinstance(message, m.Request):
            self._request(message)
        elif isinstance(message, m.Notification):
            self._notification(message)
        else:
            self._reply(message)

    def _request(self, request: m.Request) -> None:
        after = REQUESTS.get((self.state, type(request)))
        if after is None:
            raise ProtocolError(
                f"{_name(request)} is not allowed in session state {self.state.value!r}"
            )
        if request.id <= self._last_id:
            raise ProtocolError(
                f"{_name(request)} has the id {request.id}; it must be higher than {self._last_id}"
            )
        if len(self.under_way) >= MAX_UNDER_WAY:
            raise ProtocolError(f"more than {MAX_UNDER_WAY} requests under way")
        self._last_id = request.id
        self.under_way[request.id] = request
        self.state = after

    def _notification(self, message: m.Notification) -> None:
        if message.re != 0 or self.state not in (SessionState.ATTACHED, SessionState.LEAVING):
            raise ProtocolError(
                f"{_name(message)} is not allowed in session state {self.state.value!r}"
            )

    def _reply(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Error) and reply.re == 0:
            self.close()
            return
        request = self.under_way.get(reply.re)
        if request is None:
            raise ProtocolError(
                f"{_name(reply)} answers request {reply.re}, which is not under way"
            )
        if not isinstance(reply, (m.Error, REPLIES[type(request)])):
            raise ProtocolError(f"{_name(reply)} is not a valid reply to {_name(request)}")
        del self.under_way[reply.re]
        if isinstance(request, (m.Hello, m.Begin, m.Detach)):
            self.state = ANSWERED[self.state, not isinstance(reply, m.Error)]


def _name(message: object) -> str:
    return type(message).__name__
