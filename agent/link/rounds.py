"""Rounds over the job's own store: every rank says something, rank 0 decides, every rank hears its answer or the same error.

No collective and no process group is used, so that it works while the trainer's groups are busy or broken. The store is a clone: a wait on
the trainer's own client would hold up its other users. Every wait has a deadline, and one rank's failure is an error on all, as a value.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckptd.agent.threads.flag import Flag
from ckptd.shared.errors import CkptdError, SnapshotFailed, from_wire

_PIECE = 4 << 20  # the store's server takes values of at most 8 MiB (TCPStoreLibUvBackend.cpp)
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.03  # seconds between looks; a `wait` that times out prints warnings, and cannot be called off
SILENT_SECONDS = 5.0  # in which a store answers, or is not there: its client would wait for minutes, or for ever
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 2.0  # before the deadline: for rank 0's word that somebody was late to reach the others


class Alone:
    """A job of one rank: there is nobody to agree with."""

    rank, world_size, operations = 0, 1, 0
    scope = ""
    _answer: bytes | None = None

    def round(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        seconds: float,
        unwanted: Callable[[], CkptdError | None] = lambda: None,
    ) -> bytes:
        """As `Exchange.round`, at once."""
        if isinstance(mine, CkptdError):
            raise mine
        return decide([mine])[0] if self._answer is None else self._answer

    def hear(self, topic: str, say: Callable[[], bytes], seconds: float) -> bytes | None:
        """As `Exchange.hear`, at once."""
        return say()


class Told(Alone):
    """Ranks that somebody else has brought together: rank 0 claims an attempt (None), the others are told which."""

    def __init__(self, rank: int, world_size: int, attempt: int | None) -> None:
        self.rank, self.world_size = rank, world_size
        self._answer = None if attempt is None else msgspec.msgpack.encode(attempt)


class Exchange:
    """`operations` counts what was asked of the store; topics are within `scope`, the job. Every rank must come to the same rounds, one
    after the other; one that has come alone leaves no trace."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.scope = ""
        self.operations = 0
        self._store = PrefixStore("ckptd", store.clone())  # type: ignore[attr-defined]
        self._asked_at: float | None = None  # since when the store owes an answer
        self._done = Flag()  # whether the last round is over
        self._done.set()

    def round(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        seconds: float,
        unwanted: Callable[[], CkptdError | None] = lambda: None,
    ) -> bytes:
        """Every rank gives `mine`; `decide` runs on rank 0 alone, and gives one answer for each rank.

        An error in the place of `mine`, or raised by `decide`, is raised on all ranks. Raises SnapshotFailed naming who was late after
        `seconds`, or if the store does not answer; and what `unwanted` returns as soon as it does.
        """
        deadline = time.monotonic() + seconds
        answer = self._held(lambda over: self._round(f"{self.scope}/{topic}", mine, decide, deadline, over), unwanted)
        assert answer is not None
        return _decode(answer)

    def hear(self, topic: str, say: Callable[[], bytes], seconds: float) -> bytes | None:
        """What `say` gives on rank 0, which waits for nobody; None on others if it has not said it within `seconds`: ask again, later.

        Raises SnapshotFailed if the store does not answer.
        """
        return self._held(lambda over: self._hear(f"{self.scope}/{topic}", say, time.monotonic() + seconds, over))

    def _hear(self, topic: str, say: Callable[[], bytes], deadline: float, unwanted: Callable[[], CkptdError | None]) -> bytes | None:
        if self.rank != 0:
            return self._take(f"{topic}/told/{self.rank}", deadline, unwanted)
        said = say()
        for rank in range(1, self.world_size):
            self._put(f"{topic}/told/{rank}", said)
        return said

    def _held(
        self,
        work: Callable[[Callable[[], CkptdError | None]], bytes | None],
        unwanted: Callable[[], CkptdError | None] = lambda: None,
    ) -> bytes | None:
        """`work` on a thread, since a store that is not there holds up whoever asks it."""
        if not self._done.wait(_LOOK_SECONDS):  # one that was left by Ctrl-C ends in less
            raise _silent()
        answers: list[bytes | BaseException | None] = []
        done, left = Flag(), Flag()

        def over() -> CkptdError | None:
            return SnapshotFailed("nobody waits for it any more") if left.is_set() else unwanted()

        def run() -> None:
            try:
                answers.append(work(over))
            except BaseException as error:
                answers.append(error)
            done.set()

        self._done = done
        threading.Thread(target=run, name="ckptd-exchange", daemon=True).start()
        try:
            while not done.wait(_LOOK_SECONDS):
                asked_at = self._asked_at
                if asked_at is not None and time.monotonic() > asked_at + SILENT_SECONDS:
                    raise _silent()
        except BaseException:
            left.set()
            raise
        match answers[0]:
            case RuntimeError() as error:  # torch's, of a server that is gone
                raise SnapshotFailed(f"the job's store cannot be reached: {str(error).splitlines()[0]}") from None
            case BaseException() as error:
                raise error
            case answer:
                return answer

    def _round(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        deadline: float,
        unwanted: Callable[[], CkptdError | None],
    ) -> bytes:
        seconds = max(0.0, deadline - time.monotonic())
        if self.rank == 0:
            answers, asked = self._decide(topic, mine, decide, deadline - min(_GRACE_SECONDS, seconds / 4), unwanted)
            for rank, nonce in asked.items():
                self._put(f"{topic}/to/{nonce}", answers[rank])
            return answers[0]
        nonce, said = secrets.token_hex(8), _encode(mine)
        self._put(f"{topic}/said/{nonce}", said)
        self._put(f"{topic}/from/{self.rank}", nonce.encode())
        found = None
        try:
            found = self._take(f"{topic}/to/{nonce}", deadline, unwanted)
        finally:
            if found is None:  # who asks rank 0 later is not to be taken for this
                self._remove(f"{topic}/from/{self.rank}", 1)
                self._remove(f"{topic}/said/{nonce}", _count(said))
        if found is None:
            raise SnapshotFailed(f"rank 0 has not answered within {seconds:.0f} s")
        return found

    def _decide(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        deadline: float,
        unwanted: Callable[[], CkptdError | None],
    ) -> tuple[list[bytes], dict[int, str]]:
        """An answer for each rank, and what those that have come want it under."""
        asked: dict[int, str] = {}
        begun = time.monotonic()
        try:
            found = [_encode(mine)]
            for rank in range(1, self.world_size):
                nonce = self._take(f"{topic}/from/{rank}", deadline, unwanted)
                said = None if nonce is None else self._take(f"{topic}/said/{nonce.decode()}", deadline, unwanted)
                if nonce is not None and said is not None:
                    asked[rank] = nonce.decode()
                    found.append(said)
            values = [_decode(said, rank) for rank, said in zip([0, *asked], found, strict=True)]
            if late := [rank for rank in range(1, self.world_size) if rank not in asked]:
                raise SnapshotFailed(f"rank {', '.join(map(str, late[:8]))} has not come within {time.monotonic() - begun:.0f} s")
            return [_encode(answer) for answer in decide(values)], asked
        except CkptdError as error:
            return [_encode(error)] * self.world_size, asked

    def _put(self, key: str, value: bytes) -> None:
        count = _count(value)
        for number in reversed(range(count)):  # the first says how many there are, and is waited for
            head = count.to_bytes(4, "little") if number == 0 else b""
            with self._asking():
                self._store.set(f"{key}/{number}", head + value[number * _PIECE : (number + 1) * _PIECE])  # type: ignore[arg-type]

    def _remove(self, key: str, count: int) -> None:
        for number in range(count):
            with self._asking():
                self._store.delete_key(f"{key}/{number}")

    def _take(self, key: str, deadline: float, unwanted: Callable[[], CkptdError | None]) -> bytes | None:
        """The value, which is then gone from the store; None after the deadline."""
        pause = _FIRST_LOOK
        while not self._there(f"{key}/0"):
            if (error := unwanted()) is not None:
                raise error
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)
        first = self._get(f"{key}/0")
        return first[4:] + b"".join(self._get(f"{key}/{number}") for number in range(1, int.from_bytes(first[:4], "little")))

    def _there(self, key: str) -> bool:
        with self._asking():
            return bool(self._store.check([key]))

    def _get(self, key: str) -> bytes:
        with self._asking():
            value: bytes = self._store.get(key)
        with self._asking():
            self._store.delete_key(key)
        return value

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self.operations += 1
        self._asked_at = time.monotonic()
        try:
            yield
        finally:
            self._asked_at = None


def _silent() -> SnapshotFailed:
    return SnapshotFailed(f"the job's store has not answered for {SILENT_SECONDS:.0f} s: is the process that serves it stopped?")


def _count(value: bytes) -> int:
    """Of pieces that the store can take."""
    return -(-len(value) // _PIECE) or 1


def _encode(said: bytes | CkptdError) -> bytes:
    if isinstance(said, CkptdError):
        return msgspec.msgpack.encode((said.code, str(said), b""))
    return msgspec.msgpack.encode(("", "", said))


def _decode(data: bytes, rank: int | None = None) -> bytes:
    """Raises what the other side has said; `rank` names who it was."""
    code, reason, value = msgspec.msgpack.decode(data, type=tuple[str, str, bytes])
    if code:
        raise from_wire(code, reason if rank is None else f"rank {rank}: {reason}")
    return value


Ranks = Alone | Exchange
