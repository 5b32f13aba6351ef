"""One connection between agent and daemon, without I/O: bytes in, messages out, and one table that says what may come when.

Theory of operation. A session is NEW until the daemon has welcomed the client, GREETED until a rank of a job begins, ATTACHED until it
detaches. While a request that changes the state is under way the session is in between (GREETING, BEGINNING, LEAVING) and takes no other
request of that kind; all others may overlap, each reply naming its request. Both roles run this same table: the agent checks what it is
about to send, the daemon what it has got, and the other way round for replies. A step that is not in the table raises
ProtocolError and changes nothing. After an Error with `re` = 0, or any ProtocolError, the connection is to be closed.

`docs/reference/life-cycles.md` is drawn from `REQUESTS` and `REPLIES`.
"""

from __future__ import annotations

import enum

from ckptd.shared import frames
from ckptd.shared import messages as m
from ckptd.shared.errors import ProtocolError

MIN_VERSION = MAX_VERSION = 1
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
    (SessionState.GREETED, m.Begin): SessionState.BEGINNING,
    (SessionState.ATTACHED, m.Begin): SessionState.BEGINNING,  # a rank that went back begins the next attempt
    **{
        (_A, request): _A
        for request in (m.Status, m.Allocate, m.Replan, m.Acquire, m.Seal, m.Abandon, m.Persist, m.Find, m.Fetch, m.Forget)
    },
    (_A, m.Detach): SessionState.LEAVING,
}  # fmt: skip
"""What a request does to the session."""

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
    m.Find: m.Found,
    m.Fetch: m.Fetched,
    m.Forget: m.Forgotten,
    m.Detach: m.Done,
}
"""What answers a request, unless an Error does."""

ANSWERED: dict[tuple[SessionState, bool], SessionState] = {
    (SessionState.GREETING, True): SessionState.GREETED,
    (SessionState.GREETING, False): SessionState.CLOSED,
    (SessionState.BEGINNING, True): SessionState.ATTACHED,
    (SessionState.BEGINNING, False): SessionState.GREETED,
    (SessionState.LEAVING, True): SessionState.GREETED,
    (SessionState.LEAVING, False): SessionState.ATTACHED,
}
"""What the answer to a request that changes the state does: True for its reply, False for an Error."""


class Session:
    """Call `send` for what goes out and `receive` for what came in. `state` and `under_way` may be looked at."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.state = SessionState.NEW
        self.under_way: dict[int, m.Request] = {}
        self._last_id = 0
        self._decoder = frames.Decoder()

    def __repr__(self) -> str:
        return f"<Session {self.role.value} {self.state.value} under_way={len(self.under_way)}>"

    def send(self, message: m.Request | m.Reply) -> bytes:
        """The frame for `message`. Raises ProtocolError if it may not be sent now."""
        frame = frames.encode(m.encode(message))
        self._apply(message, ours=True)
        return frame

    def receive(self, data: bytes) -> list[m.Message]:
        """All messages that are complete now. Raises ProtocolError at the first that is broken or out of order."""
        received = []
        for payload in self._decoder.feed(data):
            message = m.decode(payload)
            self._apply(message, ours=False)
            received.append(message)
        return received

    def close(self) -> None:
        self.state = SessionState.CLOSED
        self.under_way.clear()

    def _apply(self, message: m.Request | m.Reply, *, ours: bool) -> None:
        if isinstance(message, m.Request) != (ours == (self.role is Role.AGENT)):
            raise ProtocolError(
                f"{_name(message)} does not go from {'daemon to agent' if isinstance(message, m.Request) else 'agent to daemon'}"
            )
        if isinstance(message, m.Request):
            self._request(message)
        else:
            self._reply(message)

    def _request(self, request: m.Request) -> None:
        after = REQUESTS.get((self.state, type(request)))
        if after is None:
            raise ProtocolError(f"{_name(request)} cannot come while the session is {self.state.value}")
        if request.id <= self._last_id:
            raise ProtocolError(f"{_name(request)} has the id {request.id}; it must be higher than {self._last_id}")
        if len(self.under_way) >= MAX_UNDER_WAY:
            raise ProtocolError(f"more than {MAX_UNDER_WAY} requests under way")
        self._last_id = request.id
        self.under_way[request.id] = request
        self.state = after

    def _reply(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Progress):
            if reply.re != 0 or self.state not in (SessionState.ATTACHED, SessionState.LEAVING):
                raise ProtocolError(f"Progress cannot come while the session is {self.state.value}")
            return
        if isinstance(reply, m.Error) and reply.re == 0:
            self.close()
            return
        request = self.under_way.get(reply.re)
        if request is None:
            raise ProtocolError(f"{_name(reply)} answers request {reply.re}, which is not under way")
        if not isinstance(reply, (m.Error, REPLIES[type(request)])):
            raise ProtocolError(f"{_name(reply)} does not answer {_name(request)}")
        del self.under_way[reply.re]
        if isinstance(request, (m.Hello, m.Begin, m.Detach)):
            self.state = ANSWERED[self.state, not isinstance(reply, m.Error)]


def _name(message: object) -> str:
    return type(message).__name__
