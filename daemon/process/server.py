"""The daemon's connections to its clients: accepts them, checks their users, and
answers their requests.

The engine takes all decisions. Sockets are raw, because descriptors travel beside the
bytes. A connection that breaks the protocol, stalls at the greeting or does not read
its replies is closed; the others do not notice. Descriptors that a client sends are
never received.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ckptd.daemon.composition import Components
from ckptd.daemon.job.ranks import Owner, Process
from ckptd.daemon.memory.slots import Slot
from ckptd.daemon.process import limits
from ckptd.daemon.process.drain import DrainUnderWay
from ckptd.daemon.process.peers import NOTHING_LEFT, Peer
from ckptd.daemon.process.service import Service, report_text
from ckptd.daemon.process.vitals import Vitals
from ckptd.daemon.tasks import watched
from ckptd.shared.errors import (
    Busy,
    CkptdError,
    Forbidden,
    InternalError,
    ProtocolError,
    StorageError,
    VersionMismatch,
)
from ckptd.shared.system.failpoints import failpoint
from ckptd.shared.wire import messages as m
from ckptd.shared.wire import session as s

log = logging.getLogger("ckptd.server")

HELLO_SECONDS = 10.0  # in which the first request must come
MAX_UNREAD = 4 << 20  # bytes of replies that a client may leave unread
# Between two tries to accept while descriptors or memory have run out, unless a
# connection closes before.
ACCEPT_SECONDS = 0.5
_THIS_CLIENT_ONLY = frozenset({errno.ECONNABORTED, errno.EINTR})

# A message, and the descriptors that go with it: they are closed once they are sent.
Outgoing = tuple[m.Reply, Sequence[int]]
_Result = TypeVar("_Result")


class Server:
    """The server of one daemon.

    The engine answers the requests of a rank about its own snapshots, and `service`
    answers the others.
    """

    def __init__(
        self,
        parts: Components,
        service: Service,
        vitals: Vitals,
        descriptors: limits.DescriptorPlan,
    ) -> None:
        self.parts, self.service = parts, service
        self.engine, self.orphans = parts.engine, parts.orphans
        self.vitals, self.descriptors = vitals, descriptors
        self.connections: set[Connection] = set()
        self.refused = self.pauses = 0
        # The reason why no client is accepted at the moment, or None.
        self.paused: str | None = None
        # The last client was refused: the refusals that follow are logged at debug
        # level.
        self._refusing = False
        self._closed = asyncio.Event()  # set when a connection closes

    async def serve(self, listener: socket.socket) -> None:
        """Accept clients until cancelled.

        While descriptors or memory have run out, clients wait in the socket's backlog.
        """
        while True:
            try:
                client, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                if error.errno in NOTHING_LEFT:
                    await self._pause(error)
                elif error.errno not in _THIS_CLIENT_ONLY:
                    raise
                continue
            if self.paused is not None:
                log.warning("clients are accepted again")
                self.paused = None
            self._accepted(client)

    async def _pause(self, error: OSError) -> None:
        """Wait until a connection closes, at most `ACCEPT_SECONDS`.

        Of several pauses in a row, only the first is logged.
        """
        if self.paused is None:
            self.paused = f"no client can be accepted: {os.strerror(error.errno or 0)}"
            self.pauses += 1
            log.error(
                "%s (%d descriptors are open, the limit is %d); clients wait until a connection "
                "closes or the limit is raised",
                self.paused, limits.used(), limits.soft_limit(),
            )  # fmt: skip
        self._closed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(ACCEPT_SECONDS):
                await self._closed.wait()

    def _accepted(self, client: socket.socket) -> None:
        client.setblocking(False)
        connection = Connection(self, client)
        problem = connection.refusal() or self._full()
        if problem is not None:
            log.log(
                logging.DEBUG if self._refusing else logging.WARNING,
                "%s is refused: %s",
                connection.peer,
                problem,
            )
            self.refused, self._refusing = self.refused + 1, True
            # A process of another user is none of the trainers of this daemon.
            if not isinstance(problem, Forbidden):
                self.note_refusal(connection.peer, "", -1, str(problem), problem.code)
            connection.send_last(problem)
            return
        self._refusing = False
        self.connections.add(connection)
        self.changed()
        connection.task = watched(connection.run(), f"the connection of {connection.peer}")

    def _full(self) -> Busy | None:
        """Return the error for one more client, or None if there is room.

        Clients are refused before the descriptors run out.
        """
        if len(self.connections) >= (most := self.parts.config.max_connections):
            return Busy(
                f"this daemon has {most} clients already; try again later, or raise max_connections"
            )
        limit, new = limits.soft_limit(), sum(connection.new for connection in self.connections)
        if self.descriptors.fits(limit, len(self.connections), new, len(self.engine.slots.slots)):
            return None
        return self.descriptors.refusal(limit, len(self.connections))

    def note_refusal(self, peer: Peer, job: str, rank: int, reason: str, code: str) -> None:
        self.vitals.refusals.note(
            peer.pid, job, rank, reason, code, time.monotonic(), peer.watch_if_possible
        )

    def was_closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._closed.set()
        self.changed()

    def changed(self) -> None:
        """Report that a client has come or gone, or that a rank has begun or ended."""
        if self.parts.uploader is not None:
            self.parts.uploader.wake()  # tells a rank that has just begun what is uploaded
        self.parts.events.changed()

    def report(self) -> dict[str, Any]:
        """Return the part of `ckptd status --json` that is about the clients."""
        limit = limits.soft_limit()
        return {
            "descriptors": {
                "used": limits.used(),
                "limit": limit,
                "per_rank": self.descriptors.per_rank,
                "clients": len(self.connections),
                "clients_fit": min(
                    self.parts.config.max_connections, self.descriptors.ranks(limit)
                ),
                "accepting_paused": self.paused,
            },
            "counters": {"connections_refused": self.refused, "accept_pauses": self.pauses},
        }

    async def close(self) -> None:
        tasks = [
            task for c in self.connections for task in (c.task, *c.requests) if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.vitals.refusals.close()


class Connection:
    """One client.

    `run` reads its requests until the connection ends; each request is answered by a
    task of its own.
    """

    def __init__(self, server: Server, client: socket.socket) -> None:
        self._server, self._socket = server, client
        self._session = s.Session(s.Role.DAEMON)
        self._out: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._untold: deque[m.Notification] = deque()  # what came while Begin was under way
        self._unread = 0
        self.requests: set[asyncio.Task[None]] = set()
        # Seals under way: Find, Fetch, Persist and Detach wait for them
        self._seals: set[asyncio.Task[None]] = set()
        # Requests that wait for something to happen: they end with the connection.
        self._waits: set[asyncio.Task[Any]] = set()
        self._owner: Owner | None = None
        self._features: frozenset[str] = frozenset()  # those of the client
        self.task: asyncio.Task[None] | None = None
        self.peer = Peer(client)

    @property
    def new(self) -> bool:
        """True if this client has begun no attempt, and so may still get slots."""
        return self._owner is None

    def __repr__(self) -> str:
        return f"<Connection {self.peer} {self._session!r}>"

    def refusal(self) -> CkptdError | None:
        if self.peer.uid not in (os.geteuid(), 0):
            return Forbidden(
                f"this daemon serves uid {os.geteuid()}, not uid {self.peer.uid}; run one of your "
                f"own"
            )
        if self.peer.lacks_descriptor:
            return Busy(
                "the daemon has no file descriptor left, and needs one to notice this client's "
                "death: try again later"
            )
        return None

    def send_last(self, error: CkptdError) -> None:
        """Send the error, then close the connection."""
        with suppress(CkptdError, OSError):
            self.send(m.Error(re=0, code=error.code, message=str(error), retry=error.retry))
        self._close()

    async def run(self) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS) as deadline:
                while data := await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16):
                    for message in self._session.receive(data):
                        assert isinstance(message, m.Request)
                        deadline.reschedule(None)
                        request = watched(
                            self._answer(message),
                            f"{self.peer}: {type(message).__name__}",
                            self._not_answered,
                        )
                        self.requests.add(request)
                        request.add_done_callback(self.requests.discard)
                        if isinstance(message, m.Seal):
                            self._seals.add(request)
                            request.add_done_callback(self._seals.discard)
        except ProtocolError as error:
            log.warning("%s: %s", self.peer, error)
            self.send_last(error)
        except TimeoutError:
            self.send_last(ProtocolError(f"no Hello within {HELLO_SECONDS:.0f} s"))
        except OSError as error:
            log.debug("%s: %s", self.peer, error)
        finally:
            self._close()

    def _not_answered(self, error: BaseException) -> None:
        """Close the connection after a request that ended without an answer: the client
        would wait for ever, and it can connect again.
        """
        self._close()

    async def _answer(self, request: m.Request) -> None:
        descriptors: Sequence[int] = ()
        if isinstance(request, (m.Find, m.Fetch, m.Persist, m.Deliver, m.Detach)) and self._seals:
            await asyncio.wait(self._seals)
        try:
            reply, descriptors = await self._handle(request)
        except CkptdError as error:
            reply = self._error(request, error)
        except OSError as error:
            reply = self._error(request, StorageError.of(f"answer {type(request).__name__}", error))
        except Exception as error:
            log.exception("%s: %s failed", self.peer, type(request).__name__)
            reply = self._error(
                request, InternalError(f"internal error: {error!r}; the daemon's log has more")
            )
        if self._session.state is s.SessionState.CLOSED:
            _close_all(descriptors)
            return
        self._note_refusal(request, reply)
        try:
            self.send(reply, descriptors)
        except ProtocolError as error:  # the reply is larger than a frame
            _close_all(descriptors)
            self.send(
                self._error(
                    request,
                    InternalError(
                        f"the answer to {type(request).__name__} cannot be sent: {error}"
                    ),
                )
            )
        while self._untold and self._session.state is s.SessionState.ATTACHED:
            self.send(self._untold.popleft())
        if isinstance(reply, m.Error) and isinstance(request, m.Hello):
            self._close()

    def _note_refusal(self, request: m.Request, reply: m.Reply) -> None:
        """Record whether a process may connect, or a rank resume its attempt.

        A run that begins is not recorded: the error ends it.
        """
        match request:
            case m.Hello():
                job, rank = "", -1
            case m.Begin():
                job, rank = request.job, request.rank
            case _:
                return
        if not isinstance(reply, m.Error):
            self._server.vitals.refusals.admit(self.peer.pid, job, rank)
        elif not isinstance(request, m.Begin) or request.attempt:
            self._server.note_refusal(self.peer, job, rank, reply.message, reply.code)

    def _error(self, request: m.Request, error: CkptdError) -> m.Error:
        log.info("%s: %s: %s", self.peer, type(request).__name__, error)
        return m.Error(re=request.id, code=error.code, message=str(error), retry=error.retry)

    async def _handle(self, request: m.Request) -> Outgoing:
        engine, service = self._server.engine, self._server.service
        match request:
            case m.Hello():
                version = min(request.max_version, s.MAX_VERSION)
                if version < max(request.min_version, s.MIN_VERSION):
                    raise VersionMismatch(
                        f"client speaks protocol {request.min_version} to {request.max_version}, "
                        f"this daemon {s.MIN_VERSION} to "
                        f"{s.MAX_VERSION}: install the same ckptd in both places"
                    )
                self._features = frozenset(request.features)
                return service.welcome(request), ()
            case m.Status():
                status = await service.status(self._server.vitals, self._server.report())
                return m.StatusReport(re=request.id, report=report_text(status)), ()
            case m.Forget():
                return m.Forgotten(
                    re=request.id, refused=await service.forget(request.job, request.tags)
                ), ()
            case m.Drain():
                drain = DrainUnderWay(self._server.parts, request.job, request.seconds)
                drained = await self._while_connected(drain.run())
                return msgspec.structs.replace(drained, re=request.id), ()
            case m.Lend():
                return await self._lend(request)
            case m.Begin():
                before = self._owner
                process = Process(self.peer.pid, self.peer.started(), request.run)
                pidfd = self.peer.watch()  # before the attempt begins, because this may fail
                try:
                    self._owner = await engine.begin(
                        request.job,
                        request.rank,
                        request.world_size,
                        request.attempt,
                        self._notify,
                        process,
                        request.wait,
                        request.node,
                        request.foreign_memory,
                        request.identity,
                    )
                except BaseException:
                    if pidfd >= 0:
                        os.close(pidfd)
                    raise
                if before is not None:
                    self._server.orphans.moved_on(before)
                self._server.orphans.cancel_timer(request.job)
                self._server.orphans.guard(self._owner, pidfd)
                if self._socket.fileno() < 0:  # the connection was closed meanwhile
                    self._server.orphans.connection_lost(self._owner)
                self._server.changed()
                engine.copies.tell(self._owner)
                held = [_held(slot) for slot in engine.slots.of(*self._owner.identity)]
                return m.Began(re=request.id, attempt=self._owner.attempt, held=held), ()
        owner = self._owner
        assert owner is not None  # the session allows all other requests only to an attached rank
        match request:
            case m.Allocate():
                return self._pass_on(
                    request.id,
                    await engine.allocate(owner, request.capacity, request.count, request.node),
                )
            case m.Replan():
                engine.plan(owner, request.step, request.why)
            case m.Acquire():
                slot = await engine.acquire(owner, request.step, request.name, request.wait)
                if isinstance(slot, str):
                    return m.Refused(re=request.id, reason=slot), ()
                return m.Granted(re=request.id, segment=slot.name, step=request.step), ()
            case m.Seal():
                durable = await engine.seal(
                    owner,
                    request.segment,
                    request.attempt,
                    request.step,
                    request.held,
                    request.cost,
                    request.unlocked,
                    uncompared=request.uncompared,
                )
                return m.Sealed(re=request.id, durable=durable), ()
            case m.Abandon():
                if request.segment:
                    engine.abandon(
                        owner, request.segment, request.step, request.reason, request.code
                    )
                elif request.step is not None:
                    engine.pass_over(owner, request.step, request.reason, request.code)
                else:
                    engine.refused(owner, request.reason)
            case m.Persist():
                await engine.persist(owner)
            case m.Heard():
                engine.take_answer(owner, request.attempt, request.answer)
            case m.Deliver():
                if request.copies:
                    ranks = await service.deliver_copies(owner.job)
                    return m.Delivered(re=request.id, ranks=ranks), ()
                earlier = await service.deliver(owner.job)
                return m.Delivered(
                    re=request.id,
                    attempt=earlier.attempt,
                    world_size=earlier.world_size,
                    ranks=list(earlier.ranks),
                ), ()
            case m.Find():
                return await self._find(request, owner), ()
            case m.Fetch():
                opened = await engine.fetch(
                    owner, request.attempt, request.step, check=request.check
                )
                return m.Fetched(re=request.id, ranks=[rank for rank, _ in opened]), [
                    fd for _, fd in opened
                ]
            case m.Host():
                hosted = await engine.copies.host(owner, request)
                if isinstance(hosted, str):
                    return m.Refused(re=request.id, reason=hosted), ()
                if hosted.name in request.mapped:
                    return m.Granted(re=request.id, segment=hosted.name), ()
                return self._pass_on(request.id, [hosted])
            case m.Hosted():
                await engine.copies.hosted(owner, request.segment)
            case m.CopyFailed():
                engine.copies.failed(owner, request.attempt, request.reason)
            case m.ReportRecovery():
                stored = engine.catalog.job(owner.job).durable(request.tag)
                self._server.parts.recoveries.add(
                    owner.job,
                    owner.rank,
                    request,
                    None if stored is None else stored.restored_bytes or None,
                )
            case m.Detach():
                engine.detach(owner)
                self._server.orphans.unguard(owner.identity)
                self._server.orphans.start_timer(engine.catalog.job(owner.job))
                self._owner = None
                self._server.changed()
        return m.Done(re=request.id), ()

    async def _find(self, request: m.Find, owner: Owner) -> m.Found:
        found = await self._server.service.find(owner.job, request.step, request.delivered)
        return msgspec.structs.replace(found, re=request.id)

    async def _while_connected(self, waiting: Coroutine[None, None, _Result]) -> _Result:
        """Return what a wait returns. Cancel it if the connection ends before."""
        task = asyncio.current_task()
        assert task is not None
        self._waits.add(task)
        try:
            return await waiting
        finally:
            self._waits.discard(task)

    async def _lend(self, request: m.Lend) -> Outgoing:
        readers = self._server.parts.readers
        after = (request.attempt, -1 if request.step is None else request.step)
        loan = await self._while_connected(readers.lend(request.job, after, request.wait))
        if loan is None:
            return m.Lent(re=request.id), ()
        stored = "storage" if self._server.parts.uploader is None else "stage"
        return m.Lent(
            re=request.id,
            attempt=loan.key[0],
            step=loan.key[1],
            tag=loan.tag,
            source=stored if loan.stored else "memory",
            ranks=list(loan.slots),
        ), list(loan.slots.values())

    def _pass_on(self, request_id: int, slots: list[Slot]) -> Outgoing:
        """Return the reply with two separately opened descriptors for each slot: one to
        map, and one to hold the trainer's lock on.
        """
        opened: list[int] = []
        failpoint("slot.passing")
        try:
            for slot in [slot for slot in slots for _ in range(2)]:
                # One by one, since any of them may fail.
                opened.append(self._server.engine.slots.open_again(slot, write=True))
        except BaseException:
            _close_all(opened)
            raise
        return m.Segments(
            re=request_id,
            segments=[_held(slot) for slot in slots],
            remark=self._server.service.remark(slots, self._server.vitals.disk_free),
        ), opened

    def _notify(self, message: m.Notification) -> None:
        """Send the message, or keep it until the rank has begun.

        Drop a Waiting, a Remark or a PeerReplicas that the client does not know.

        An error here would keep the caller from freeing slots.
        """
        if isinstance(message, m.Waiting) and s.WAITING not in self._features:
            return
        if isinstance(message, m.Remark) and s.REMARKS not in self._features:
            return
        if isinstance(message, m.PeerReplicas) and s.PEERS not in self._features:
            return
        if self._session.state in (s.SessionState.ATTACHED, s.SessionState.LEAVING):
            self.send(message)
        elif self._session.state in (
            s.SessionState.BEGINNING,
            s.SessionState.GREETED,
        ):  # GREETED: its Begin has failed
            self._untold.append(message)

    # -- sending

    def send(self, message: m.Reply | m.Notification, descriptors: Sequence[int] = ()) -> None:
        frame = (
            memoryview(self._session.send(message))
            if self._session.state is not s.SessionState.CLOSED
            else memoryview(b"")
        )
        self._out.append((frame, descriptors))
        self._unread += len(frame)
        if len(self._out) == 1:
            self._flush()
        if self._unread > MAX_UNREAD:
            log.warning("%s does not read its replies: its connection is closed", self.peer)
            self._close()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._out:
                frame, descriptors = self._out[0]
                rights = (
                    [
                        (
                            socket.SOL_SOCKET,
                            socket.SCM_RIGHTS,
                            struct.pack(f"{len(descriptors)}i", *descriptors),
                        )
                    ]
                    if descriptors
                    else []
                )
                sent = self._socket.sendmsg([frame], rights)
                self._unread -= sent
                _close_all(descriptors)
                if sent < len(frame):
                    self._out[0] = (frame[sent:], ())
                else:
                    self._out.popleft()
        except BlockingIOError:
            loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            self._close()
            return
        loop.remove_writer(self._socket)

    # -- closing

    def _close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._session.close()
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._socket)
        # Before the socket is closed, because the next client may get its number.
        loop.remove_reader(self._socket)
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self._socket.close()
        for _, descriptors in self._out:
            _close_all(descriptors)
        self._out.clear()
        self.peer.close()
        for wait in list(self._waits):
            wait.cancel()
        if self._owner is not None and self._owner.notify == self._notify:
            self._server.orphans.connection_lost(self._owner)
        self._server.was_closed(self)


def _held(slot: Slot) -> m.HeldSegment:
    header = slot.header
    return m.HeldSegment(
        segment=slot.name, slot=header.slot, capacity=header.capacity, generation=header.generation
    )


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)
