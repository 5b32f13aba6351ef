"""The agent's connection to the daemon: it sends requests, receives replies, and
reconnects when the connection is lost.

The training thread sends requests. A thread of the client's own receives messages and
reconnects. It sleeps in `poll`, so it takes no time from the training while no message
arrives. A caller that waits for a reply first tries to receive it itself: to get it
through the other thread takes two wake-ups. No call blocks for longer than its timeout.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptd.agent.link.launch import Place
from ckptd.agent.threads.call_lock import Nested
from ckptd.agent.threads.flag import Flag
from ckptd.shared.errors import (
    CkptdError,
    DaemonUnreachable,
    Fenced,
    ForeignMemory,
    ProtocolError,
    from_wire,
)
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel

log = logging.getLogger("ckptd.agent")

R = TypeVar("R", bound=m.Reply)
Make = Callable[[int], m.Request]
CALL_SECONDS = 30.0
"""Seconds that the daemon has to answer a short request."""
# Seconds between two tries to reconnect; doubled after each.
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 2.0
# Seconds between two looks whether the right root is back, and the most between two
# tries after another refusal.
_FOREIGN_DELAY = 5.0


class Call:
    """A request under way, and later its outcome.

    answered: if given, no caller waits. It is called with the reply, on the thread that
        receives the reply, unless the connection is lost first.
    abandoned: True once the caller has stopped waiting.
    done: set once `reply` or `error` is there. It is not set by a reply that goes to
        `answered` or that comes after `abandoned`.
    descriptors: the open descriptors that came with the reply. They belong to the
        caller that takes the reply.
    """

    def __init__(self, answered: Callable[[m.Reply], None] | None = None) -> None:
        self.answered = answered
        self.abandoned = False
        self.done = Flag()
        self.reply: m.Reply | None = None
        self.descriptors: Sequence[Descriptor] = ()
        self.error: CkptdError | None = None


class Client:
    """The connection of one rank to the daemon at `place`, maintained by a thread of
    its own.

    `welcome` is the daemon's greeting on the present connection. The callbacks may run
    on any thread:

    resume: called after each reconnection, to resume the attempt.
    news: called with every message that comes without a request, except an Error.
    lost: called with the error if `resume` finds that the attempt is over, because a
        newer attempt has begun. The client is then closed. Also called if the daemon
        serves another root than that for which the attempt was begun. The client then
        asks again until `resume` succeeds, because the root is back.
    late: called with every reply whose caller has stopped waiting.

    `refusal` is the error with which a daemon that answers refuses this rank now, or
    None. Calls raise it. Unless it is Fenced, the client asks again.
    """

    def __init__(
        self,
        place: Place,
        *,
        resume: Callable[[], None],
        news: Callable[[m.Notification], None],
        lost: Callable[[CkptdError], None],
        late: Callable[[m.Reply], None],
    ) -> None:
        self._place = place
        self._resume = resume
        self._news = news
        self._lost = lost
        self._late = late
        self._calls: dict[int, Call] = {}
        self._lock = threading.RLock()
        # Made while their thread was inside `_send`, which sends them at its end.
        self._posts: deque[tuple[Make, Call]] = deque()
        # Held by the thread that receives, so that messages are handled in order.
        self._receiving = threading.RLock()
        # The error that ended the connection while a waiting caller received.
        self._protocol_error: CkptdError | None = None
        # True once the client is closed for good: it sends and receives nothing any more.
        self.closed = False
        self.refusal: CkptdError | None = None
        self._delay = _FIRST_DELAY  # before the client asks again after the next refusal
        self._resumer: threading.Thread | None = None  # the thread that calls `resume`
        self._up = Flag()
        self._down_since = 0.0
        self._silent = False  # a call has timed out, and no message has arrived since
        self._gone: Channel | None = None  # the last connection that was lost
        self._channel = place.connect()
        self.welcome = self._channel.welcome
        self._up.set()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._listen, name="ckptd-agent", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """True if the connection is up, unless a call has timed out and no message has
        arrived since.
        """
        return self._up.is_set() and not self._silent

    def wait_connected(self, budget: float) -> bool:
        """Wait for a lost connection to come back.

        Return False if it is not back `budget` seconds after it was lost, or as soon as
        the next daemon refuses this rank for a reason that a retry does not help.

        The time counts from the loss, so that an outage costs the training `budget`
        seconds once, and not at every call. Returns False at once if a call has timed
        out and no message has arrived since.
        """
        return (
            not self._silent
            and not self._is_refused()
            and self._up.wait(
                max(0.0, self._down_since + budget - time.monotonic()), unless=self._is_refused
            )
        )

    def _is_refused(self) -> bool:
        """Return True if waiting does not help, because the daemon refuses this rank."""
        return self.refusal is not None and not self.refusal.retry

    def call(
        self, make: Make, kind: type[R], timeout: float | None
    ) -> tuple[R, Sequence[Descriptor]]:
        """Send the request that `make(id)` returns, and return its reply and
        descriptors. The caller must close the descriptors.

        `kind` is the type of the expected reply. `timeout` is in seconds; None waits
        without a limit. Raises the error that the daemon answers with,
        DaemonUnreachable if it does not answer in time or the connection is lost,
        ProtocolError for another type of reply, and Busy if this thread is already
        sending.
        """
        return self.finish(self.begin(make), kind, timeout)

    def begin(self, make: Make, call: Call | None = None) -> Call:
        """Send the request that `make(id)` returns, and return the call.

        The caller must then `finish`, `drop` or `abandon` it.

        A caller that must not lose the reply to Ctrl-C makes the `call` itself, and
        stores it before it is sent. Raises DaemonUnreachable if the connection is lost,
        and Busy if this thread is already sending.
        """
        call = call or Call()
        self._send(make, call)
        return call

    def finish(
        self, call: Call, kind: type[R], timeout: float | None
    ) -> tuple[R, Sequence[Descriptor]]:
        """Wait for the reply to a call that `begin` has sent, and return it.

        Returns and raises the same as `call`.
        """
        try:
            self._look()
            answered = call.done.wait(timeout)
        except BaseException:  # Ctrl-C
            self.drop(call)
            raise
        if not answered:
            with self._lock:
                if not call.done.is_set():
                    call.abandoned = self._silent = True
                    raise DaemonUnreachable(f"the daemon has not answered within {timeout:.1f} s")
        if call.error is not None:
            raise call.error
        if not isinstance(call.reply, kind):
            raise ProtocolError(
                f"the daemon answered with {type(call.reply).__name__}; expected {kind.__name__}"
            )
        return call.reply, call.descriptors

    def _look(self) -> None:
        """Receive and handle the messages that have arrived.

        If the client's thread is doing so, wait until it has finished.

        After Ctrl-C part of a message may be lost. So the connection is ended, and
        `resume` makes up for the loss on the next one.
        """
        with self._receiving:
            channel = self._channel
            try:
                self._receive(channel)
            except BaseException as error:
                self._end(channel)
                if not isinstance(error, CkptdError):
                    raise
                self._protocol_error = error

    def _receive(self, channel: Channel) -> None:
        for message in channel.receive(wait=False):
            self._got(message)

    def drop(self, call: Call) -> None:
        """Stop waiting for a call.

        A slot that it is granted, now or later, is given back.
        """
        reply = self.abandon(call)
        if reply is not None:
            self.give_back(reply, call.descriptors)

    def abandon(self, call: Call) -> m.Reply | None:
        """Stop waiting for a call.

        Return its reply if it has arrived, for the caller to give back, or else None.

        A reply that arrives later is given back on arrival.
        """
        with self._lock:
            call.abandoned = True
            return call.reply

    def give_back(self, reply: m.Reply, descriptors: Sequence[Descriptor] = ()) -> None:
        """Close the descriptors of an unwanted reply, and give back the slot that it
        grants.
        """
        for descriptor in descriptors:
            descriptor.close()
        self._late(reply)

    def post(self, make: Make, answered: Callable[[m.Reply], None]) -> None:
        """Send a request without waiting for its reply.

        `answered` is called with the reply.

        If the connection is lost, nothing is sent and nothing is raised: `resume` must
        send the request again.
        """
        self._post(make, Call(answered))
        while self._posts and not self._inside():
            try:
                self._post(*self._posts.popleft())
            except IndexError:
                pass  # another thread has taken it

    def _post(self, make: Make, call: Call) -> None:
        try:
            self._send(make, call)
        except Nested:
            self._posts.append((make, call))
        except CkptdError as error:  # the connection is lost, or the daemon refuses this rank
            log.debug("a message was not sent: %s", error)

    def _inside(self) -> bool:
        """Return True if this thread holds the lock already, because a signal handler
        or a destructor has interrupted it there.
        """
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _send(self, make: Make, call: Call) -> None:
        if self._inside():
            raise Nested("ckptd", "a request to the daemon")
        self._send_now(make, call)
        while self._posts and call.answered is None:  # made by a signal handler during the send
            try:
                self._post(*self._posts.popleft())
            except IndexError:
                pass

    def _send_now(self, make: Make, call: Call) -> None:
        with self._lock:
            if (
                self.refusal is not None
                and os.getpid() == self._pid
                and threading.current_thread() is not self._resumer
            ):
                raise from_wire(self.refusal.code, str(self.refusal))
            if self.closed or os.getpid() != self._pid:
                raise DaemonUnreachable(
                    "this agent is closed"
                    if self.closed
                    else "a forked process cannot use its parent's agent: make a new Agent in it"
                )
            channel = self._channel
            number = channel.new_id()
            self._calls[number] = call
            try:
                channel.send(make(number))
            except (
                ProtocolError
            ) as error:  # the session is closed, or not resumed yet: the client is reconnecting
                self._calls.pop(number, None)
                raise DaemonUnreachable(f"the daemon is gone for the moment: {error}") from None
            except BaseException as error:
                self._calls.pop(number, None)
                if not isinstance(error, CkptdError):  # Ctrl-C may have come after half of a frame
                    self._end(channel)
                raise

    def _end(self, channel: Channel) -> None:
        """End a connection on which a message may be lost.

        From now on `wait_connected` waits for the next one.
        """
        channel.end()
        with self._lock:
            if self._channel is channel:
                self._down_since = time.monotonic()
                self._up.clear()

    def close(self) -> None:
        """Close the connection for good, and wait up to 5 s for the client's thread to
        end. Calls under way fail with DaemonUnreachable.
        """
        with self._lock:
            self.closed = True
            self._up.clear()
            self._channel.end()  # the client's thread then closes the socket
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def forget(self) -> None:
        """Close the copies of the descriptors in a forked child, and leave the
        connection to the parent.
        """
        self.closed = True
        self._channel.abandon()
        for call in tuple(self._calls.values()):
            for descriptor in call.descriptors:
                descriptor.close()

    # -- the client's thread

    def _listen(self) -> None:
        while True:
            try:
                while True:
                    self._channel.wait()
                    with self._receiving:
                        self._receive(self._channel)
            except Exception as error:
                # A bug; the thread survives it, or every call would wait for ever.
                if not isinstance(error, (CkptdError, OSError)):
                    log.exception("a message from the daemon could not be handled")
                gone = (
                    error
                    if isinstance(error, CkptdError)
                    else DaemonUnreachable(f"the daemon is gone: {error}")
                )
                reason, self._protocol_error = self._protocol_error or gone, None
            with self._lock:  # no other thread may be sending on a socket that is being closed
                self._gone = self._channel
                self._channel.close()
                begins = self._up.is_set()  # else it was lost again before it was resumed
                if begins:
                    self._down_since = time.monotonic()
                self._up.clear()
            if self.closed:
                self._fail_calls(DaemonUnreachable("this agent is closed"))
                return
            self._silent = False
            if begins:
                log.warning("connection to the daemon lost (%s); reconnecting", reason)
            self._fail_calls(DaemonUnreachable(f"the connection to the daemon was lost: {reason}"))
            if not self._connect_again():
                return

    def _got(self, message: m.Message) -> None:
        self._silent = False
        if isinstance(message, m.Notification):
            self._news(message)
            return
        assert isinstance(message, m.Reply)
        descriptors = _descriptors(self._channel, message)
        with self._lock:
            call = self._calls.pop(message.re, None)
            if call is not None and call.answered is None and not call.abandoned:
                if isinstance(message, m.Error):
                    call.error = from_wire(message.code, message.message)
                else:
                    call.reply, call.descriptors = message, descriptors
                call.done.set()
                return
        if call is None:
            if isinstance(message, m.Error):
                raise from_wire(message.code, message.message)
        elif call.answered is not None:
            call.answered(message)
        else:
            self.give_back(message, descriptors)

    def _fail_calls(self, error: CkptdError) -> None:
        with self._lock:
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call.error = error
            call.done.set()

    def _connect_again(self) -> bool:
        delay, refused = _FIRST_DELAY, False
        while not self.closed:
            try:
                channel = self._place.connect()
            except CkptdError as error:
                refused = not isinstance(error, DaemonUnreachable)
                if refused:
                    self._refused(error)
                else:
                    self.refusal = None
                    log.debug("cannot reconnect to the daemon yet: %s", error)
                time.sleep(delay)
                delay = min(2 * delay, _LONGEST_DELAY)
                continue
            with self._lock:
                if self.closed:
                    channel.close()
                    return False
                self._channel, self.welcome = channel, channel.welcome
                if refused:
                    self.refusal = None
            # The session is resumed on a thread of its own, because this thread must
            # receive the replies.
            threading.Thread(
                target=self._take_up, args=(channel,), name="ckptd-resume", daemon=True
            ).start()
            return True
        return False

    def _take_up(self, channel: Channel) -> None:
        self._resumer = threading.current_thread()
        try:
            self._resume()
        except Fenced as error:
            self._refused(error)
            self._lost(error)
            self.close()
        except DaemonUnreachable as error:
            log.warning("the daemon is back, but this rank could not resume its session: %s", error)
            channel.end()  # the client's thread then reconnects once more
        except CkptdError as error:
            is_foreign = isinstance(error, ForeignMemory)
            if self._refused(error) and is_foreign:
                self._lost(error)
            # The reason may pass: the disk may be mounted later, and the next daemon then has
            # the right root.
            delay, self._delay = self._delay, min(2 * self._delay, _FOREIGN_DELAY)
            time.sleep(_FOREIGN_DELAY if is_foreign else delay)
            channel.end()
        except Exception:
            log.exception("the daemon is back, but this rank could not resume its session")
            channel.end()
        else:
            with self._lock:
                # It was lost again, and the next one is resumed by another thread.
                if self._gone is channel:
                    return
                self.refusal, self._delay = None, _FIRST_DELAY
                self._up.set()
            log.warning(
                "reconnected to the daemon after %.1f s", time.monotonic() - self._down_since
            )

    def _refused(self, error: CkptdError) -> bool:
        """Record that the daemon refuses this rank, and wake the threads that wait for a
        connection. Return True, and log the error, if it is another one than before.
        """
        before, self.refusal = self.refusal, error
        self._up.wake()
        new = type(error) is not type(before) or str(error) != str(before)
        if new:
            log.warning("the daemon refuses this rank: %s", error)
        return new


def _descriptors(channel: Channel, message: m.Reply) -> Sequence[Descriptor]:
    match message:
        case m.Segments():
            return channel.take(2 * len(message.segments))
        case m.Fetched():
            return channel.take(len(message.ranks))
    return ()
