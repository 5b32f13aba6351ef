"""Rounds between ranks over the job's store: each rank sends a value, rank 0 decides,
and each rank gets an answer.

An error of one rank, or of the decision, travels as a value and is raised on all ranks.
Every wait has a deadline. No collective and no process group is used, so that rounds
work while the trainer's groups are busy or broken. The store's client is a clone,
because a wait on the trainer's own client would block its other users.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckptd.agent.link.store_values import GONE_SECONDS, PREFIX, StoreValues, Unwanted, pieces
from ckptd.agent.threads.flag import Flag
from ckptd.shared.errors import CkptdError, InternalError, SnapshotFailed, from_wire
from ckptd.shared.units import rank_list

log = logging.getLogger("ckptd.agent")

# Seconds between looks of rank 0 for the ranks that it waits for: a share of the time that
# it has waited, by which a wait is longer at most, within these bounds.
_FIRST_LOOK, _LAST_LOOK, _SHARE = 0.001, 0.1, 1 / 32
# How often rank 0 takes the values of the ranks that have come, while others are
# missing.
_SWEEP_SECONDS = 0.5
_SHARED_BYTES = 1024  # an answer to several ranks that is larger than this is stored once
# The store must answer in this time; its own client would wait for minutes, or for
# ever.
SILENT_SECONDS = 5.0
# The same for a round that may take longer than this: while a job starts or recovers,
# its nodes may be busy.
PATIENT_SECONDS = 30.0
_LOOK_SECONDS = 0.1
WARN_SECONDS = 5.0
"""The seconds after which a waiting rank warns once, and names the ranks that have not
come.

The reason may be that only rank 0 has made the call.
"""
LATER = "/then/"
"""Part of the topics of all rounds of a call but the first one. A rank that does not come
to such a round has made the call, and is slower than the others.
"""
# Rank 0 decides this long before the deadline, so that the other ranks learn in time
# which rank is late.
_GRACE_SECONDS = 2.0


class Alone:
    """The rounds of a job of one rank, which has no other ranks to agree with."""

    rank, world_size, operations = 0, 1, 0
    scope = ""
    _others: Sequence[bytes | None] = ()
    _answer: bytes | None = None

    def round(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        seconds: float,
        unwanted: Callable[[], CkptdError | None] = lambda: None,
    ) -> bytes:
        """Decide on this rank's value alone, and return the answer.

        Raises `mine` if it is an error.
        """
        if isinstance(mine, CkptdError):
            raise mine
        said = [mine, *(mine if other is None else other for other in self._others)]
        return decide(said)[0] if self._answer is None else self._answer

    def broadcast(self, topic: str, say: Callable[[], bytes], seconds: float) -> bytes | None:
        """Return the result of `say`."""
        return say()


class Told(Alone):
    """The rounds of one rank in a save that DCP coordinates: DCP has already carried
    the values that the ranks would send each other.

    The coordinator, rank 0, passes the values of the `others`, with None for one that
    equals its own, and decides. The other ranks pass its `answer`, and get it in every
    round. `store` returns a new client of the job's store.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Callable[[], Store],
        *,
        others: Sequence[bytes | None] = (),
        answer: bytes | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.new_client = store
        self._others, self._answer = others, answer


class Exchange:
    """The rounds of one rank in a job of several.

    Every rank must take part in the same rounds, in the same order.

    A rank that comes to a round alone leaves nothing in the store but the topic of its
    last round. A large answer to several ranks stays until the next round. `scope` is
    the name of the job, and keeps its topics apart from those of other jobs.
    `operations` counts the requests to the store.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.scope = ""
        # The answers that rank 0 has stored once for several ranks: name and number of
        # pieces.
        self._shared: list[tuple[str, int]] = []
        self._client = store.clone()  # type: ignore[attr-defined]
        self._values = StoreValues(self._client, world_size)
        self._done = Flag()  # set when the thread of the last round has ended
        self._done.set()

    def round(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        seconds: float,
        unwanted: Callable[[], CkptdError | None] = lambda: None,
    ) -> bytes:
        """Send `mine` to rank 0, and return its answer for this rank.

        `decide` runs on rank 0 only. It gets the values of all ranks, in their order,
        and returns one answer for each of them. If `mine` is an error on one rank, or
        if `decide` raises one, it is raised on all ranks.

        Raises SnapshotFailed if a rank does not come within `seconds`, and names that
        rank. Raises SnapshotFailed also if the store does not answer. As soon as
        `unwanted` returns an error, the round is no longer wanted, and that error is
        raised.
        """
        deadline = time.monotonic() + seconds
        answer = self._held(
            lambda over: self._round(f"{self.scope}/{topic}", mine, decide, deadline, over),
            seconds,
            unwanted,
        )
        assert answer is not None
        return _decode(answer)

    @property
    def operations(self) -> int:
        return self._values.operations

    def new_client(self) -> Store:
        """Return a new client of the job's store, for a thread that must not wait for
        this one's requests.

        Raises SnapshotFailed if the store does not answer within `PATIENT_SECONDS`.
        """
        # A clone has the timeout of its client, also to connect.
        self._client.set_timeout(timedelta(seconds=PATIENT_SECONDS))
        try:
            client = self._client.clone()
        except RuntimeError as error:
            raise _unreachable(error) from None
        finally:
            self._client.set_timeout(timedelta(seconds=GONE_SECONDS))
        client.set_timeout(timedelta(seconds=GONE_SECONDS))
        return PrefixStore(PREFIX, client)

    def broadcast(self, topic: str, say: Callable[[], bytes], seconds: float) -> bytes | None:
        """Return the message of rank 0, which is the result of `say` there.

        Rank 0 does not wait for the other ranks.

        Another rank returns None if the message has not arrived within `seconds`, and
        may call this again later. Raises SnapshotFailed if the store does not answer.
        """
        return self._held(
            lambda over: self._broadcast(
                f"{self.scope}/{topic}", say, time.monotonic() + seconds, over
            ),
            seconds,
        )

    def _broadcast(
        self,
        topic: str,
        say: Callable[[], bytes],
        deadline: float,
        unwanted: Callable[[], CkptdError | None],
    ) -> bytes | None:
        if self.rank != 0:
            return self._values.take(f"{topic}/told/{self.rank}", deadline, unwanted)
        said = say()
        for rank in range(1, self.world_size):
            self._values.put(f"{topic}/told/{rank}", said)
        return said

    def _held(
        self,
        work: Callable[[Callable[[], CkptdError | None]], bytes | None],
        seconds: float,
        unwanted: Callable[[], CkptdError | None] = lambda: None,
    ) -> bytes | None:
        """Run `work` on a thread and return its result, because a store that does not
        answer blocks the thread that asks it.

        `work` gets a function that returns an error as soon as the result is unwanted.
        Raises the errors of `work`, and SnapshotFailed if the store cannot be reached,
        or does not answer a request within `SILENT_SECONDS`, or within
        `PATIENT_SECONDS` if the round has more `seconds` than that.
        """
        silent = SILENT_SECONDS if seconds <= PATIENT_SECONDS else PATIENT_SECONDS
        if not self._done.wait(_LOOK_SECONDS):  # a thread that Ctrl-C has left behind ends sooner
            raise _silent(silent)
        answers: list[bytes | BaseException | None] = []
        done, left = Flag(), Flag()

        def over() -> CkptdError | None:
            return (
                SnapshotFailed("the caller no longer waits for this round")
                if left.is_set()
                else unwanted()
            )

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
                asked_at = self._values.asked_at
                if asked_at is not None and time.monotonic() > asked_at + silent:
                    raise _silent(silent)
        except BaseException:
            left.set()
            raise
        match answers[0]:
            case RuntimeError() as error:  # raised by torch if the store's server is gone
                raise _unreachable(error) from None
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
        self._values.put(f"{self.scope}/at/{self.rank}", topic.encode())
        if self.rank == 0:
            answers, asked = self._decide(
                topic, mine, decide, deadline - min(_GRACE_SECONDS, seconds / 4), unwanted
            )
            self._answer(topic, answers, asked)
            return answers[0]
        nonce, said, begun, warned = secrets.token_hex(8), _encode(mine), time.monotonic(), False

        def over() -> CkptdError | None:
            nonlocal warned
            if not warned and time.monotonic() > begun + WARN_SECONDS:
                warned = True
                self._warn_of_rank_0(topic)
            return unwanted()

        self._values.put(f"{topic}/said/{nonce}", said)
        self._values.put(f"{topic}/from/{self.rank}", nonce.encode())
        found = None
        try:
            found = self._values.take(f"{topic}/to/{nonce}", deadline, over)
        finally:
            # Without this, rank 0 would take the request for one of a later round.
            if found is None:
                self._values.remove(f"{topic}/from/{self.rank}", 1)
                self._values.remove(f"{topic}/said/{nonce}", pieces(said))
        if found is None:
            raise SnapshotFailed(
                f"rank 0 has not answered within {seconds:.0f} "
                f"s{self._elsewhere(topic, [0]) or self._advice(topic)}"
            )
        return found

    def _advice(self, topic: str) -> str:
        call = _call(topic.removeprefix(f"{self.scope}/"))
        return (
            f": the other ranks wait in {call}"
            if LATER in topic
            else f": every rank must call {call}, not only some of them"
        )

    def _warn_of_rank_0(self, topic: str) -> None:
        """Warn that rank 0 has not come to this round.

        If rank 0 has come, it waits for another rank, and warns by itself. Each begin
        has the same topic, so that the last topic of rank 0 does not tell whether it
        has come to this begin. Only rank 1 warns then.
        """
        key = f"{self.scope}/at/0"
        came = self._values.there(key) and self._values.read(key) == topic.encode()
        if not came or (self.rank == 1 and topic.rpartition("/")[2] in _BEGINS):
            log.warning("%s", self._missing(topic, [0]))

    def _missing(self, topic: str, late: list[int]) -> str:
        """Return a sentence that names the ranks that have not come to a round."""
        call = _call(topic.removeprefix(f"{self.scope}/"))
        why = self._elsewhere(topic, late)
        if LATER in topic:
            return (
                f"rank {self.rank} has waited in {call} for {WARN_SECONDS:g} s for "
                f"{rank_list(late)}{why or ', which may have more to do'}"
            )
        return not_called(call, late, self.rank, self.world_size, WARN_SECONDS, why)

    def _elsewhere(self, topic: str, ranks: list[int]) -> str:
        """Return what to add to an error about late ranks: the last call of the first
        one, if it was another call. Otherwise "".
        """
        for rank in ranks:
            key = f"{self.scope}/at/{rank}"  # never removed, so `read` does not wait for it
            if self._values.there(key):
                last = self._values.read(key).decode()
                mine, other = (_call(each.removeprefix(f"{self.scope}/")) for each in (topic, last))
                if mine != other:
                    return (
                        f": its last call was {other}, not {mine}; all ranks must make the same "
                        f"calls"
                    )
        return ""

    def _decide(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        deadline: float,
        unwanted: Callable[[], CkptdError | None],
    ) -> tuple[list[bytes], dict[int, str]]:
        """Return the encoded answers of all ranks, and by rank the nonce under which
        each rank that has come expects its answer.

        A rank that fails or is late makes all answers the same error.
        """
        asked: dict[int, str] = {}
        found: dict[int, tuple[str, bytes]] = {}
        begun = time.monotonic()
        try:
            try:
                self._gather(topic, found, deadline, unwanted)
            finally:  # those that have come get the error, too
                asked = {rank: nonce for rank, (nonce, _) in sorted(found.items())}
            # So that every rank has read the answers of the round before.
            if len(asked) == self.world_size - 1:
                self._remove_shared()
            values = [
                _decode(_encode(mine), 0),
                *(_decode(said, rank) for rank, (_, said) in sorted(found.items())),
            ]
            if late := [rank for rank in range(1, self.world_size) if rank not in asked]:
                named = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late[:8]))}"
                why = self._elsewhere(topic, late) or self._advice(topic)
                raise SnapshotFailed(
                    f"{named} sent nothing within {time.monotonic() - begun:.0f} s{why}"
                )
            return [_encode(answer) for answer in _decided(decide, values)], asked
        except CkptdError as error:
            return [_encode(error)] * self.world_size, asked

    def _gather(
        self, topic: str, found: dict[int, tuple[str, bytes]], deadline: float, unwanted: Unwanted
    ) -> None:
        """Wait for nonce and value of each other rank, remove them from the store, and
        add them to `found`.

        Usually all ranks come within a moment, and a few requests get everything. A
        rank that waits for others may give up and remove its value, so that those that
        have come are taken from time to time. Returns after the deadline. Raises the
        error of `unwanted`.
        """
        begun = time.monotonic()
        sweep, warn_at = begun + _SWEEP_SECONDS, begun + WARN_SECONDS
        while missing := [rank for rank in range(1, self.world_size) if rank not in found]:
            now = time.monotonic()
            if self._values.there(*(f"{topic}/from/{rank}" for rank in missing)):
                self._take_those(topic, missing, found, deadline, unwanted)
                continue
            if now > deadline or now > sweep:
                for rank in missing:
                    if self._values.there(f"{topic}/from/{rank}"):
                        self._take_those(topic, [rank], found, deadline, unwanted)
                sweep = time.monotonic() + _SWEEP_SECONDS
            if now > deadline:
                return
            if now > warn_at:
                warn_at = math.inf
                if late := [r for r in missing if not self._values.there(f"{topic}/from/{r}")]:
                    log.warning("%s", self._missing(topic, late))
            if (error := unwanted()) is not None:
                raise error
            time.sleep(pause_after(now - begun))

    def _take_those(
        self,
        topic: str,
        ranks: list[int],
        found: dict[int, tuple[str, bytes]],
        deadline: float,
        unwanted: Unwanted,
    ) -> None:
        """Take nonce and value of ranks that have come.

        One that has just given up is left out.
        """
        with suppress(RuntimeError):
            nonces = [
                nonce.decode()
                for nonce in self._values.take_all([f"{topic}/from/{rank}" for rank in ranks])
            ]
            here = list(zip(ranks, nonces, strict=True))
            if not self._values.wait_for(
                [f"{topic}/said/{nonce}" for nonce in nonces], deadline, unwanted
            ):
                here = [
                    (rank, nonce)
                    for rank, nonce in here
                    if self._values.there(f"{topic}/said/{nonce}")
                ]
            said = self._values.take_all([f"{topic}/said/{nonce}" for _, nonce in here])
            found.update(
                (rank, (nonce, one)) for (rank, nonce), one in zip(here, said, strict=True)
            )

    def _answer(self, topic: str, answers: list[bytes], asked: dict[int, str]) -> None:
        """Store the answer of each rank that has asked.

        A large answer that several ranks get is stored once, and they get its name.
        """
        ranks: dict[bytes, list[int]] = {}
        for rank in asked:
            ranks.setdefault(answers[rank], []).append(rank)
        for number, (answer, those) in enumerate(ranks.items()):
            if len(those) > 1 and len(answer) > _SHARED_BYTES:
                name = f"{topic}/all/{number}"
                self._values.put(name, answer)
                self._shared.append((name, pieces(answer)))
                for rank in those:
                    self._values.put_name(f"{topic}/to/{asked[rank]}", name)
            else:
                for rank in those:
                    self._values.put(f"{topic}/to/{asked[rank]}", answer)

    def _remove_shared(self) -> None:
        while self._shared:
            self._values.remove(*self._shared.pop())


def pause_after(waited: float) -> float:
    """Return the seconds until the next look for a rank that was waited for so long."""
    return min(max(waited * _SHARE, _FIRST_LOOK), _LAST_LOOK)


def _decided(decide: Callable[[list[bytes]], list[bytes]], values: list[bytes]) -> list[bytes]:
    """Return the result of `decide`.

    Raises InternalError for a bug in it, because the other ranks must not wait for an
    answer in vain.
    """
    try:
        return decide(values)
    except CkptdError:
        raise
    except Exception as error:
        log.exception("a round between the ranks could not be decided")
        raise InternalError(f"rank 0: {error!r}") from error


def not_called(
    call: str, late: Sequence[int], rank: int, world_size: int, seconds: float, why: str = ""
) -> str:
    """Return the warning of a rank that has waited for `seconds`: the `late` ranks have
    not made a call.

    why: more that is known of the late ranks, or "".
    """
    has = f"{rank_list(late)} {'has' if len(late) == 1 else 'have'}"
    alone = rank == 0 and len(late) == world_size - 1 and not why
    only = " Is it called on rank 0 only?" if alone else ""
    return (
        f"{has} not called {call} yet, and rank {rank} has waited for {seconds:g} s: every rank "
        f"must call it, because each saves its part and waits for the others{why}.{only}"
    )


def _call(topic: str) -> str:
    """Return the public call that a topic belongs to."""
    if topic in _BEGINS:
        return "Agent(), snapshot() or recover()"
    planned = _PLANNED.match(topic)
    return f"snapshot(step={planned[1]})" if planned else f"{topic.partition('/')[0]}()"


def _unreachable(error: RuntimeError) -> SnapshotFailed:
    return SnapshotFailed(f"the job's store cannot be reached: {str(error).splitlines()[0]}")


def _silent(seconds: float) -> SnapshotFailed:
    return SnapshotFailed(
        f"the job's store has not answered for {seconds:.0f} s: is the process that serves it "
        f"stopped?"
    )


def _encode(said: bytes | CkptdError) -> bytes:
    if isinstance(said, CkptdError):
        return msgspec.msgpack.encode((said.code, str(said), b""))
    return msgspec.msgpack.encode(("", "", said))


def _decode(data: bytes, rank: int | None = None) -> bytes:
    """Return the value that another rank has sent, or raise its error.

    If `rank` is given, the error's message begins with it.
    """
    code, reason, value = _DECODER.decode(data)
    if code:
        raise from_wire(code, reason if rank is None else f"rank {rank}: {reason}")
    return value


RankGroup = Alone | Exchange


_BEGINS = ("begin", "joined")
"""The topics of the rounds that begin an attempt.

The first call of a rank makes its agent, which begins an attempt.
"""
_PLANNED = re.compile(r"plan/[0-9]+/([0-9]+)")
"""The topic of a round that plans a step of an attempt."""
_DECODER = msgspec.msgpack.Decoder(tuple[str, str, bytes])
