"""Reads and writes the board of an attempt of several nodes, on a thread of the lowest
rank of each node.

Each node overwrites one small value in the job's store, which lists the steps that the
node holds. Rank 0 reads these values and writes one answer, which the other nodes read.
`shared/wire/board.py` defines the values. A store that does not answer blocks only this
thread: the daemons then save the steps that they hold after a while, and the storage
decides which of them are complete.

A step costs each node one write and one or two reads. A node writes only changes that
another node may wait for. It reads for the first time when the answers to the steps
before were there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from ckptd.agent.threads.flag import Waiters
from ckptd.shared.system import machine
from ckptd.shared.wire.board import (
    MOST_TEXT,
    Answer,
    Holding,
    answer,
    is_news,
    is_open,
    is_quiet,
    waits_for_copies,
)

log = logging.getLogger("ckptd.agent")

_FIRST_LOOK, _LAST_LOOK = 0.005, 0.2
"""The least and the most seconds between two reads of the board while a step of this
node is open.
"""
_MOST_USUAL = 0.05
"""The most seconds before the first read for a step. The save of the step waits for
this read.
"""
_IDLE_LOOK = 1.0
"""Seconds between two reads of rank 0 while no step of its own node is open, if its
last read has shown that a node waits for another one.
"""
_QUIET_LOOK = 3.0
"""Seconds between these reads if no node waits for another one. The next step of its
own node makes rank 0 read at once.
"""
_SOONER = 0.99
"""The factor by which the first read for the next step comes sooner, if the first read
for this step has found the answer.
"""
SILENT_SECONDS = 120.0
"""Seconds for which the daemon of this node may be unreachable before the nodes make no
more peer replicas. The call that notices it has waited before.
"""
_WATCH_SECONDS = 3.0
"""The most seconds between two looks whether the daemon is reachable."""
_SILENT = "its daemon has not answered for 2 minutes: if it hangs, end it and start it again"


class Silence:
    """Watches how long a daemon has been unreachable. Once that has `lasted` too long,
    it stays so.
    """

    def __init__(self) -> None:
        self.lasted = False
        self._since: float | None = None

    def look(self, now: float, *, reachable: bool) -> None:
        """Take note of whether the daemon is reachable at the time `now`."""
        if reachable:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        self.lasted = self.lasted or now - self._since >= SILENT_SECONDS


class Board:
    """The board of one attempt, as one node sees it.

    store: a client of the job's store that nothing else uses. prefix: the prefix of the
    names in the store. leaders: the lowest rank of each node. tell: passes a new answer
    on to the daemon. reachable: returns True if the daemon of this node answers. A daemon
    that hangs shows nothing, so the board shows for it that this node makes no more peer
    replicas. None if the nodes make none.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        leaders: Sequence[int],
        tell: Callable[[Answer], None],
        reachable: Callable[[], bool] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._tell = tell
        self._holds = {leader: f"{prefix}/holds/{leader}" for leader in leaders}
        self._answer = f"{prefix}/answer"
        self._reachable = reachable
        self._silence = Silence()
        self._changed = Waiters()
        self._shown = Holding()  # the last holding of the daemon
        self._written: Holding | None = None
        self._known = Answer()
        self._complete = False  # True once all nodes have written something
        self._quiet = False  # True if the last read of rank 0 has shown no node that waits
        self._usual = _FIRST_LOOK  # seconds from the write of a step to the first read
        self._pause = _FIRST_LOOK  # seconds before the next read
        self._waited = 0.0  # seconds from the last write to the next read
        self._looks = 0  # the reads since the last write
        self._next: float | None = None  # the time of the next read
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="ckptd-board", daemon=True)
        self._thread.start()

    def show(self, holding: Holding) -> None:
        """Have the thread write this holding. Return at once.

        If the thread has not written the last holding yet, this one replaces it.
        """
        self._shown = holding
        self._changed.notify()

    @property
    def _holding(self) -> Holding:
        """The holding to write: that of the daemon, unless the daemon hangs."""
        shown = self._shown
        if not self._silence.lasted or shown.alone:
            return shown
        alone = f"rank {self._rank} on {machine.host()}: {_SILENT}"[:MOST_TEXT]
        return msgspec.structs.replace(shown, alone=alone)

    def repeat(self) -> None:
        """Tell the daemon the last answer again, because it may have been restarted."""
        self._tell(self._known)

    def end(self) -> None:
        """Ask the thread to end, and do not wait for it. May be called again."""
        if self._rank == 0 and not self._ended:
            _ended.append([*self._holds.values(), self._answer])
        self._ended = True
        self._changed.notify()

    def _run(self) -> None:
        failed = False
        while (holding := self._wait(failed=failed)) is not None:
            try:
                if is_news(holding, self._written, self._known):
                    self._write(holding)
                else:
                    self._look()
                failed = False
            # torch raises RuntimeError if the store's server is gone, as after the
            # death of rank 0
            except Exception as error:
                if not failed:
                    log.warning(
                        "the job's store does not answer, and every node saves what it holds: %s",
                        (str(error) or repr(error)).splitlines()[0],
                    )
                failed, self._next = True, time.monotonic() + _IDLE_LOOK

    def _wait(self, *, failed: bool) -> Holding | None:
        """Wait until there is a holding to write or it is time to read, and return the
        holding. Return None once the board has ended.

        failed: True if the store has not answered the last time. Then writes, too, wait
        for the time of the next read.
        """

        def has_news() -> bool:
            return not failed and is_news(self._holding, self._written, self._known)

        while not self._ended:
            now = time.monotonic()
            left = None if self._next is None else self._next - now
            if self._reachable is not None and not self._silence.lasted:
                self._silence.look(now, reachable=self._reachable())
                left = _WATCH_SECONDS if left is None else min(left, _WATCH_SECONDS)
            if (left is not None and left <= 0) or has_news():
                return self._holding
            self._changed.wait_for(lambda: self._ended or has_news(), left)
        return None

    def _write(self, holding: Holding) -> None:
        if self._rank == 0:  # no other node reads its holding
            _sweep(self._store, {*self._holds.values(), self._answer})
        else:
            self._store.set(self._holds[self._rank], msgspec.msgpack.encode(holding))  # type: ignore[arg-type]
        before = self._next
        self._written = holding
        self._looks = 0
        self._pause = self._usual
        self._waited = self._usual
        self._plan(news=True)
        if before is not None:  # steps that come fast must not delay the read for earlier ones
            self._next = before if self._next is None else min(before, self._next)

    def _plan(self, *, news: bool = False) -> None:
        """Choose the time of the next read.

        news: True if this node has just written. On rank 0 the news may be that a step
        is not taken. Other nodes that hold the step then wait for the answer.
        """
        holding = self._holding
        awaited = {*holding.held, *holding.overdue}
        if (
            (news and self._rank == 0)
            or any(is_open(step, holding, self._known) for step in awaited)
            or waits_for_copies(holding, self._known)
        ):
            self._next = time.monotonic() + self._pause
        else:
            idle = _QUIET_LOOK if self._quiet else _IDLE_LOOK
            self._next = time.monotonic() + idle if self._rank == 0 else None

    def _look(self) -> None:
        """Read the board, and pass on a new answer, which rank 0 also writes."""
        found = self._read()
        self._looks += 1
        if found is None or found == self._known:
            self._pause = _FIRST_LOOK if self._looks == 1 else min(2 * self._pause, _LAST_LOOK)
            self._waited += self._pause
        else:
            if self._rank == 0:
                self._store.set(self._answer, msgspec.msgpack.encode(found))  # type: ignore[arg-type]
            self._usual = self._usual * _SOONER if self._looks == 1 else self._waited
            self._usual = min(max(self._usual, _FIRST_LOOK), _MOST_USUAL)
            self._known = found
            self._tell(found)
        self._plan()

    def _read(self) -> Answer | None:
        """Return the answer, or None if it does not exist yet because a node has not
        written its first holding.
        """
        if self._rank != 0:
            self._complete = self._complete or self._store.check([self._answer])
            return _ANSWER.decode(self._store.get(self._answer)) if self._complete else None
        others = {rank: name for rank, name in self._holds.items() if rank != 0}
        self._complete = self._complete or not others or self._store.check(list(others.values()))
        if not self._complete:
            return None
        said = self._store.multi_get(list(others.values())) if others else []
        holdings = {"the node of rank 0": self._written or Holding()}
        holdings |= {
            f"the node of rank {rank}": _HOLDING.decode(value)
            for rank, value in zip(others, said, strict=True)
        }
        found = answer(holdings, self._known)
        self._quiet = is_quiet(holdings, found)
        return found


def _sweep(store: Store, used: Collection[str]) -> None:
    """Delete the keys of boards that have ended, but not of the last two, because another
    node may still read these, and a read of a missing key blocks.

    used: the keys of the board in use. They may have the names of an older board of
    this process in another store.
    """
    while len(_ended) > 2:
        for key in _ended.popleft():
            if key not in used:
                store.delete_key(key)


_ended: deque[list[str]] = deque()
"""The keys of the boards of rank 0 that have ended in this process."""
_HOLDING = msgspec.msgpack.Decoder(Holding)
_ANSWER = msgspec.msgpack.Decoder(Answer)
