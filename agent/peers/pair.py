"""Connects two ranks of a job through a gloo process group of their own.

Each pair of ranks has a group of two, so that a rank has as many connections as it has
peers, however many ranks the job has, and a peer that is lost breaks no other pair. The
group is not known to `torch.distributed`, whose collectives and names of groups it
leaves alone.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from ckptd.shared.errors import PeerLost

_TAG = 0
_LOOK_SECONDS = 0.02
"""Seconds between two polls for a message that may take long to come."""


class Pair:
    """A connection between this rank and one peer.

    Messages arrive in the order in which they were sent. A receiver must know the
    length of each message: gloo ends the process that gets a longer message than it
    expects, and a shorter one leaves the rest of the buffer as it was. After an error the
    pair cannot be used any more.
    """

    def __init__(self, store: Store, name: str, *, first: bool, seconds: float) -> None:
        """Connect with the peer, which makes the same pair with the other `first`.

        store: a client of the job's store that nothing else uses. name: the name of the
        pair in the store, which no earlier pair has had. seconds: how long to wait for
        the peer.

        Raises PeerLost if the peer does not come in time, or no connection can be made.
        """
        self._peer = 1 if first else 0
        self._ended = False
        limit = timedelta(seconds=seconds)
        store.set_timeout(limit)
        try:
            self._group = ProcessGroupGloo(PrefixStore(name, store), 0 if first else 1, 2, limit)
        except RuntimeError as error:
            raise _lost(error) from None

    def send(self, data: torch.Tensor, seconds: float) -> None:
        """Send the bytes of a contiguous uint8 tensor in CPU memory.

        Return once they may change. Raises PeerLost if that takes longer than `seconds`.
        """
        finish(self.begin_send(data), seconds)

    def receive(self, into: torch.Tensor, seconds: float) -> None:
        """Fill a contiguous uint8 tensor in CPU memory with the next bytes from the peer.

        Raises PeerLost if they have not all come within `seconds`.
        """
        finish(self.begin_receive(into), seconds)

    def receive_while(self, wanted: Callable[[], bool], into: torch.Tensor, seconds: float) -> None:
        """Fill `into` with the next message, however long it takes to come, as long as
        `wanted()` is True.

        The first byte of the message must not be 0. `seconds` is how long the message
        may take once it has begun to arrive. The end of the connection is not noticed
        before that.

        The thread does not wait inside gloo. CPython ends a thread that returns from
        there while the interpreter exits, and the process would abort.

        Raises PeerLost.
        """
        into.zero_()
        receiving = self.begin_receive(into)
        while not into[0]:
            if not wanted():
                raise PeerLost("no message is expected any more")
            time.sleep(_LOOK_SECONDS)
        finish(receiving, seconds)

    def end(self) -> None:
        """Begin no more messages: from now on, PeerLost is raised instead."""
        self._ended = True

    def close(self) -> None:
        """Close the connection. No other thread may use it."""
        self._ended = True
        held = [self._group]
        del self._group
        # Gloo takes 20 ms. The interpreter waits for this thread when it exits: a daemon thread
        # that came back from gloo then would abort the process.
        with suppress(RuntimeError):  # the interpreter ends, and gloo closes it here
            threading.Thread(target=held.clear, name="ckptd-disconnect").start()

    def begin_send(self, data: torch.Tensor) -> Work:
        """Begin to send, and return at once. `finish` waits for the end."""
        self._require_open()
        try:
            sending: Work = self._group.send([data], self._peer, _TAG)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise _lost(error) from None
        return sending

    def begin_receive(self, into: torch.Tensor) -> Work:
        """Begin to receive, and return at once. `finish` waits for the end."""
        self._require_open()
        try:
            receiving: Work = self._group.recv([into], self._peer, _TAG)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise _lost(error) from None
        return receiving

    def _require_open(self) -> None:
        if self._ended:
            raise PeerLost("this rank has ended the connection")


def finish(work: Work, seconds: float) -> None:
    """Wait until a message is sent or received. Raises PeerLost after `seconds`."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise _lost(error) from None


def _lost(error: RuntimeError) -> PeerLost:
    """Return an error with the message of gloo, without its place and its advice."""
    said = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).partition(". ")[0]
    return PeerLost(f"the connection with a peer has failed: {said}")
