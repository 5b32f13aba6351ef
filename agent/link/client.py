"""The agent's connection: requests from the training thread, replies and news on a thread of its own, a new connection when one is lost.

Blocks no longer than it is told to. The thread sleeps in `poll`, so it takes no time from the training while there is nothing to hear.
Whoever waits for a reply looks for it himself first: to hear of it from the thread takes two wake-ups.
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
from ckptd.shared import messages as m
from ckptd.shared.channel import Channel
from ckptd.shared.descriptor import Descriptor
from ckptd.shared.errors import CkptdError, DaemonUnreachable, Fenced, Forbidden, ProtocolError, from_wire

log = logging.getLogger("ckptd.agent")

R = TypeVar("R", bound=m.Reply)
Make = Callable[[int], m.Request]
CALL_SECONDS = 30.0
"""How long the daemon has to answer a request that takes no time."""
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 2.0  # between attempts to connect again, doubling


class Call:
    """A request under way. `answered`, where given, is called on the client's thread instead of waking a waiter; nobody waits for an
    `abandoned` one any more."""

    def __init__(self, answered: Callable[[m.Reply], None] | None = None) -> None:
        self.answered = answered
        self.abandoned = False
        self.done = Flag()
        self.reply: m.Reply | None = None
        self.descriptors: Sequence[Descriptor] = ()
        self.error: CkptdError | None = None


class Client:
    """`resume` runs after each new connection, `lost` once when this attempt is over; `news` gets every Progress, `late` every reply that
    came after its caller had given up."""

    def __init__(
        self,
        place: Place,
        *,
        resume: Callable[[], None],
        news: Callable[[m.Progress], None],
        lost: Callable[[CkptdError], None],
        late: Callable[[m.Reply], None],
    ) -> None:
        self._place, self._resume, self._news, self._lost, self._late = place, resume, news, lost, late
        self._calls: dict[int, Call] = {}
        self._lock = threading.RLock()
        self._posts: deque[tuple[Make, Call]] = deque()  # made inside a `_send` of the same thread, which sends them when it is done
        self._hearing = threading.RLock()  # so that messages are taken in the order in which they came
        self._unheard: CkptdError | None = None  # what a waiter's own look has ended the connection for
        self._closed = False
        self._up = Flag()
        self._down_since = 0.0
        self._silent = False  # a call has timed out and nothing was heard since
        self._channel = place.connect()
        self.welcome = self._channel.welcome
        self._up.set()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._listen, name="ckptd-agent", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self._silent

    @property
    def closed(self) -> bool:
        """For good: nothing is sent or heard any more."""
        return self._closed

    def wait_connected(self, budget: float) -> bool:
        """Wait for a lost connection to come back, `budget` seconds since it was lost: an outage costs that once, not at every call."""
        if self._silent:
            return False
        return self._up.wait(max(0.0, self._down_since + budget - time.monotonic()))

    def call(self, make: Make, kind: type[R], timeout: float | None) -> tuple[R, Sequence[Descriptor]]:
        """Send what `make(id)` gives and wait for its reply; the caller owns the descriptors.

        Raises what the daemon's Error says, or DaemonUnreachable.
        """
        return self.finish(self.begin(make), kind, timeout)

    def begin(self, make: Make, call: Call | None = None) -> Call:
        """Send what `make(id)` gives. `finish` waits for its reply; a call that nobody finishes is to be dropped.

        A caller that must not lose the reply to Ctrl-C makes the `call` itself, and keeps it from before it is sent.
        """
        call = call or Call()
        self._send(make, call)
        return call

    def finish(self, call: Call, kind: type[R], timeout: float | None) -> tuple[R, Sequence[Descriptor]]:
        """As `call`."""
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
            raise ProtocolError(f"the daemon answered with {type(call.reply).__name__}")
        return call.reply, call.descriptors

    def _look(self) -> None:
        """Take what is there; if the thread is about to, wait until it has.

        After Ctrl-C part of a message may be lost, so the connection ends too: the next one tells what was missed.
        """
        with self._hearing:
            channel = self._channel
            try:
                self._hear(channel)
            except BaseException as error:
                channel.end()  # the thread makes the next one
                if not isinstance(error, CkptdError):
                    raise
                self._unheard = error

    def _hear(self, channel: Channel) -> None:
        for message in channel.receive(wait=False):
            self._got(message)

    def drop(self, call: Call) -> None:
        """Nobody waits for it: what has been granted, now or later, is given back."""
        reply = self.abandon(call)
        if reply is not None:
            self.give_back(reply, call.descriptors)

    def abandon(self, call: Call) -> m.Reply | None:
        """Return the reply if it is there, for the caller to give back; if it comes later, it is given back then."""
        with self._lock:
            call.abandoned = True
            return call.reply

    def give_back(self, reply: m.Reply, descriptors: Sequence[Descriptor] = ()) -> None:
        """Close the descriptors of a reply that nobody wants, and give back the slot that it grants."""
        for descriptor in descriptors:
            descriptor.close()
        self._late(reply)

    def post(self, make: Make, answered: Callable[[m.Reply], None]) -> None:
        """Send without waiting. If the daemon is away nothing is sent and nothing raised: whoever takes up the session sends again."""
        self._post(make, Call(answered))
        while self._posts and not self._inside():
            try:
                self._post(*self._posts.popleft())
            except IndexError:
                pass  # another thread has sent it

    def _post(self, make: Make, call: Call) -> None:
        try:
            self._send(make, call)
        except Nested:
            self._posts.append((make, call))
        except DaemonUnreachable as error:
            log.debug("not sent: %s", error)

    def _inside(self) -> bool:
        """Return True if this thread is sending already: a signal handler, or a destructor, has come between."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _send(self, make: Make, call: Call) -> None:
        if self._inside():
            raise Nested("ckptd", "a request to the daemon")
        self._send_now(make, call)
        while self._posts and call.answered is None:  # of a handler that has come between
            try:
                self._post(*self._posts.popleft())
            except IndexError:
                pass

    def _send_now(self, make: Make, call: Call) -> None:
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                raise DaemonUnreachable(
                    "this agent is closed" if self._closed else "a forked process cannot use its parent's agent: make one here"
                )
            channel = self._channel
            number = channel.new_id()
            self._calls[number] = call
            try:
                channel.send(make(number))
            except ProtocolError as error:  # the connection is being made anew
                self._calls.pop(number, None)
                raise DaemonUnreachable(f"the daemon is gone for the moment: {error}") from None
            except BaseException as error:
                self._calls.pop(number, None)
                if not isinstance(error, CkptdError):  # Ctrl-C may have left half of a frame
                    channel.end()
                raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._up.clear()
            self._channel.end()  # the thread closes it
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def forget(self) -> None:
        """In a forked child: close the copies of the descriptors, touch nothing else."""
        self._closed = True
        self._channel.abandon()
        for call in tuple(self._calls.values()):
            for descriptor in call.descriptors:
                descriptor.close()

    # -- the thread

    def _listen(self) -> None:
        while True:
            try:
                while True:
                    self._channel.wait()
                    with self._hearing:
                        self._hear(self._channel)
            except Exception as error:
                if not isinstance(error, (CkptdError, OSError)):  # a bug: without this thread every call would wait for ever
                    log.exception("what the daemon said could not be taken in")
                gone = error if isinstance(error, CkptdError) else DaemonUnreachable(f"the daemon is gone: {error}")
                reason, self._unheard = self._unheard or gone, None
            if self._closed:
                self._channel.close()
                self._fail_calls(DaemonUnreachable("this agent is closed"))
                return
            self._down_since, self._silent = time.monotonic(), False
            self._up.clear()
            self._channel.close()
            log.warning("connection to the daemon lost (%s); connecting again", reason)
            self._fail_calls(DaemonUnreachable(f"the connection to the daemon was lost: {reason}"))
            if not self._connect_again():
                return

    def _got(self, message: m.Message) -> None:
        self._silent = False
        if isinstance(message, m.Progress):
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
        delay, said = _FIRST_DELAY, False
        while not self._closed:
            try:
                channel = self._place.connect()
            except CkptdError as error:
                strange, said = isinstance(error, Forbidden) and not said, said or isinstance(error, Forbidden)
                log.log(logging.WARNING if strange else logging.DEBUG, "no daemon yet: %s", error)
                time.sleep(delay)
                delay = min(2 * delay, _LONGEST_DELAY)
                continue
            with self._lock:
                if self._closed:
                    channel.close()
                    return False
                self._channel, self.welcome = channel, channel.welcome
            # The new session is taken up on a thread of its own, since this one has to hear the replies.
            threading.Thread(target=self._take_up, args=(channel,), name="ckptd-resume", daemon=True).start()
            return True
        return False

    def _take_up(self, channel: Channel) -> None:
        try:
            self._resume()
        except Fenced as error:
            self._lost(error)
            self.close()
        except CkptdError as error:
            log.warning("the daemon is back, but this rank could not take up its work: %s", error)
            channel.end()  # and again
        else:
            self._up.set()
            log.info("the daemon is back after %.1f s", time.monotonic() - self._down_since)


def _descriptors(channel: Channel, message: m.Reply) -> Sequence[Descriptor]:
    match message:
        case m.Segments():
            return channel.take(2 * len(message.segments))
        case m.Fetched():
            return channel.take(len(message.ranks))
    return ()
