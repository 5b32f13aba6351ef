"""Tests rounds over the job's store: all ranks get one answer or one error with a
rank's name, within a deadline, and nothing is left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ckptd.agent.link import rounds, store_values
from ckptd.agent.link.rounds import Alone, Exchange, Told, pause_after
from ckptd.agent.threads.flag import Flag
from ckptd.shared.errors import (
    CkptdError,
    InternalError,
    SnapshotFailed,
    StructureChanged,
    UnsavableValue,
)
from tests.support.daemons import until

WORLD = 3
Answer = bytes | CkptdError


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


@pytest.fixture
def ranks(store: TCPStore) -> list[Exchange]:
    return [Exchange(store, rank, WORLD) for rank in range(WORLD)]


def attempt(call: Callable[[], bytes]) -> Answer:
    try:
        return call()
    except CkptdError as error:
        return error


def together(
    ranks: list[Exchange],
    mine: list[Any],
    decide: Callable[[list[bytes]], list[bytes]],
    **more: Any,
) -> list[Any]:
    """Return what each rank gets from a round. Ranks that give None do not take part."""

    def go(rank: Exchange, own: Answer) -> Answer:
        return attempt(lambda: rank.round("topic", own, decide, **{"seconds": 20.0, **more}))

    with ThreadPoolExecutor(WORLD) as pool:
        jobs = [
            None if own is None else pool.submit(go, rank, own)
            for rank, own in zip(ranks, mine, strict=True)
        ]
        return [None if job is None else job.result() for job in jobs]


def reverse(said: list[bytes]) -> list[bytes]:
    return said[::-1]


def test_each_gets_its_answer_and_the_store_is_empty_again(
    store: TCPStore, ranks: list[Exchange]
) -> None:
    together(ranks, [b""] * WORLD, reverse)  # each rank's last topic stays
    before = store.num_keys()
    large = bytes(range(256)) * 40_000  # longer than one piece
    assert together(ranks, [b"zero", b"", large], reverse) == [large, b"", b"zero"]
    assert together(ranks, [b"0", b"1", b"2"], reverse) == [b"2", b"1", b"0"]
    assert store.num_keys() == before
    assert all(rank.operations > 0 for rank in ranks)


def test_an_error_in_place_of_a_value_is_raised_on_all(ranks: list[Exchange]) -> None:
    found = together(ranks, [b"0", UnsavableValue("more: no"), b"2"], reverse)
    assert [type(error) for error in found] == [UnsavableValue] * WORLD
    assert {str(error) for error in found} == {"rank 1: more: no"}


def test_an_error_of_the_decision_is_raised_on_all(ranks: list[Exchange]) -> None:
    def decide(said: list[bytes]) -> list[bytes]:
        raise StructureChanged(f"{len(said)} differ")

    found = together(ranks, [b""] * WORLD, decide)
    assert [(type(error), str(error)) for error in found] == [
        (StructureChanged, "3 differ")
    ] * WORLD


@pytest.mark.parametrize("late", [1, 2])
def test_a_missing_rank_is_named_to_all(ranks: list[Exchange], late: int) -> None:
    found = together(
        ranks, [None if rank == late else b"" for rank in range(WORLD)], reverse, seconds=2.0
    )
    said = {str(error) for error in found if error is not None}
    assert len(said) == 1
    assert said.pop().startswith(f"rank {late} sent nothing within ")


def test_a_missing_rank_0_is_an_error_on_the_others(ranks: list[Exchange]) -> None:
    found = together(ranks, [None, b"", b""], reverse, seconds=0.2)
    assert [str(error) for error in found[1:]] == [
        "rank 0 has not answered within 0 s: every rank must call topic(), not only some of them"
    ] * 2


def test_ranks_in_different_calls_are_told_of_the_other_call(two: list[Exchange]) -> None:
    with started(round_of(two[1], "plan/1/40", b"1", 4.0)) as other:
        found = attempt(round_of(two[0], "plan/1/35", b"0", 1.5))
        assert str(found).startswith("rank 1 sent nothing within ")
        assert str(found).endswith(
            " s: its last call was snapshot(step=40), not snapshot(step=35); all ranks must make "
            "the same calls"
        )
    assert str(other.result(60)).endswith(
        " s: its last call was snapshot(step=35), not snapshot(step=40); all ranks must make the "
        "same calls"
    )


def test_an_unwanted_round_ends_at_once(ranks: list[Exchange]) -> None:
    over = threading.Event()

    def unwanted() -> CkptdError | None:
        return SnapshotFailed("given up") if over.is_set() else None

    threading.Timer(0.2, over.set).start()
    begun = time.monotonic()
    found = together(ranks, [b"", b"", None], reverse, seconds=300.0, unwanted=unwanted)
    assert [str(error) for error in found[:2]] == ["given up"] * 2
    assert time.monotonic() - begun < 100


def test_rounds_of_other_jobs_and_topics_do_not_mix(store: TCPStore) -> None:
    jobs = [[Exchange(store, rank, 2) for rank in range(2)] for _ in range(2)]
    for number, job in enumerate(jobs):
        for rank in job:
            rank.scope = f"job{number}"

    def go(number: int, rank: Exchange) -> list[bytes]:
        return [
            rank.round(topic, f"{number}{topic}".encode(), lambda said: [b"".join(said)] * 2, 20.0)
            for topic in ("a", "b")
        ]

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(go, number, rank) for number, job in enumerate(jobs) for rank in job]
        assert [job.result() for job in found] == [[b"0a0a", b"0b0b"]] * 2 + [
            [b"1a1a", b"1b1b"]
        ] * 2


def test_a_store_that_is_gone_is_an_error() -> None:
    store = TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1)
    )
    rank = Exchange(store, 1, 2)
    del store
    with pytest.raises(SnapshotFailed, match=r"^the job's store cannot be reached: "):
        rank.round("topic", b"", reverse, 0.2)


def serve(pipe: Any) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.mark.usefixtures("processes")
def test_a_store_that_is_stopped_blocks_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would wait as long as the store is stopped."""
    monkeypatch.setattr(rounds, "PATIENT_SECONDS", 1.0)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,), daemon=True)
    server.start()
    try:
        rank = Exchange(TCPStore("localhost", here.recv(), is_master=False), 1, 2)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(
                SnapshotFailed,
                match="^the job's store has not answered for 1 s: is the process that serves it "
                "stopped",
            ):
                rank.round("topic", b"", reverse, 300.0)
        os.kill(server.pid, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                rank.round("later", b"", reverse, 0.1)
            except SnapshotFailed as error:
                if "rank 0 has not answered" in str(error):
                    break
            time.sleep(0.1)
        else:
            pytest.fail("it is not asked again")
    finally:
        server.kill()


def test_a_single_rank_decides_alone() -> None:
    alone = Alone()
    assert alone.round("topic", b"mine", lambda said: [said[0] * 2], 1.0) == b"minemine"
    assert alone.operations == 0
    with pytest.raises(UnsavableValue, match="^no$"):
        alone.round("topic", UnsavableValue("no"), reverse, 1.0)


# -- a store that the test controls


class FakeStore(Store):
    """A store in this process.

    `held` keeps back keys that contain one of these texts: they are set later, or
    never.

    `topics` has the last topic of each rank, which is never removed, and `values`
    everything else.

    `silent`, while it is clear, makes every request wait, as a store does whose process
    is stopped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.topics: dict[str, bytes] = {}
        self.held: set[str] = set()
        self.kept_back: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.silent = threading.Event()
        self.silent.set()

    def clone(self) -> FakeStore:
        return self

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._ask(key)
        place = (
            self.kept_back
            if any(text in key for text in self.held)
            else self.topics
            if "/at/" in key
            else self.values
        )
        place[key] = bytes(value)

    def get(self, key: str) -> bytes:
        self._ask(key)
        return (self.values | self.topics)[key]

    def check(self, keys: list[str]) -> bool:
        self._ask(keys[0])
        return all(key in self.values or key in self.topics for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._ask(keys[0])
        return [self.values[key] for key in keys]

    def deleteKey(self, key: str) -> bool:  # the name that PrefixStore calls
        self._ask(key)
        return self.values.pop(key, None) is not None

    def _ask(self, key: str) -> None:
        self.asked.append(key)
        self.silent.wait(60)

    def let_go(self) -> None:
        self.held.clear()
        self.values |= self.kept_back
        self.kept_back.clear()


@pytest.fixture
def fake() -> FakeStore:
    return FakeStore()


@pytest.fixture
def two(fake: FakeStore) -> list[Exchange]:
    return [Exchange(fake, rank, 2) for rank in range(2)]


@contextmanager
def started(call: Callable[[], Any]) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(attempt, call)


def round_of(
    rank: Exchange, topic: str, mine: bytes = b"", seconds: float = 60.0
) -> Callable[[], bytes]:
    return lambda: rank.round(topic, mine, reverse, seconds)


@pytest.mark.parametrize(
    "key", ["/from/1", "/said/", "/to/"], ids=["the request", "the value", "the answer"]
)
def test_a_key_that_comes_late_is_waited_for(
    fake: FakeStore, two: list[Exchange], key: str
) -> None:
    fake.held = {key}
    with (
        started(round_of(two[0], "plan", b"0")) as first,
        started(round_of(two[1], "plan", b"1")) as second,
    ):
        until(lambda: fake.kept_back, "key that is kept back")
        assert not second.done()
        fake.let_go()
        assert (first.result(60), second.result(60)) == (b"1", b"0")
    assert fake.values == {}


def test_a_rank_whose_value_is_missing_has_not_come(fake: FakeStore, two: list[Exchange]) -> None:
    """Its request is there. It may have died in between."""
    fake.held = {"/said/"}
    with started(round_of(two[1], "plan", b"1", 0.5)):
        found = attempt(round_of(two[0], "plan", b"0", 0.4))
    assert str(found).startswith("rank 1 sent nothing within ")


def test_a_round_that_a_rank_has_left_is_not_answered_later(
    fake: FakeStore, two: list[Exchange]
) -> None:
    """Rank 1 leaves nothing behind, so rank 0 does not take its old request for one of
    the same topic.
    """
    assert (
        str(attempt(round_of(two[1], "plan", b"old", 0.0)))
        == "rank 0 has not answered within 0 s: every rank must call plan(), not only some of them"
    )
    assert fake.values == {}
    with started(round_of(two[0], "plan", b"0")) as first:
        assert attempt(round_of(two[1], "plan", b"new")) == b"0"
        assert first.result(60) == b"new"


def test_values_of_an_older_attempt_are_not_taken(fake: FakeStore, two: list[Exchange]) -> None:
    """A rank of attempt 1 was killed after its request.

    The topics of attempt 2 are others.
    """
    nonce = "0123456789abcdef"
    fake.values |= {
        "ckptd/gpt/plan/1/5/from/1/0": (1).to_bytes(4, "little") + nonce.encode(),
        f"ckptd/gpt/plan/1/5/said/{nonce}/0": (1).to_bytes(4, "little") + b"stale",
    }
    for rank in two:
        rank.scope = "gpt"
    with started(round_of(two[0], "plan/2/5", b"0")) as first:
        assert attempt(round_of(two[1], "plan/2/5", b"1")) == b"0"
        assert first.result(60) == b"1"


def test_an_error_of_rank_0_itself_is_raised_on_all(two: list[Exchange]) -> None:
    with started(lambda: two[0].round("plan", UnsavableValue("w: no"), reverse, 60.0)) as first:
        found = attempt(round_of(two[1], "plan"))
        assert (str(first.result(60)), str(found)) == ("rank 0: w: no", "rank 0: w: no")


def test_a_message_of_rank_0_is_heard_by_each_rank_once(
    fake: FakeStore, two: list[Exchange]
) -> None:
    assert two[1].broadcast("interval", lambda: b"", 0.0) is None
    assert two[0].broadcast("interval", lambda: b"every 7 steps", 0.0) == b"every 7 steps"
    assert two[1].broadcast("interval", lambda: b"", 60.0) == b"every 7 steps"
    assert (two[1].broadcast("interval", lambda: b"", 0.0), fake.values) == (None, {})


def test_a_store_that_does_not_answer_is_left_alone_until_it_does(
    fake: FakeStore, two: list[Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "PATIENT_SECONDS", 0.2)
    fake.silent.clear()
    for _ in range(3):
        with pytest.raises(
            SnapshotFailed,
            match="^the job's store has not answered for 0 s: is the process that serves it "
            "stopped",
        ):
            two[1].round("plan", b"", reverse, 300.0)
    assert len(fake.asked) == 1, "one thread waits for the store, however often a round is tried"
    fake.silent.set()
    until(two[1]._done.is_set, "end of the thread")
    assert (
        str(attempt(round_of(two[1], "plan", seconds=0.0)))
        == "rank 0 has not answered within 0 s: every rank must call plan(), not only some of them"
    )
    assert fake.values == {}


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "has not answered for 0 s"), (0.6, "has not answered for 1 s")]
)
def test_a_round_that_may_take_long_waits_longer_for_the_store(
    fake: FakeStore,
    two: list[Exchange],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    words: str,
) -> None:
    monkeypatch.setattr(rounds, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(rounds, "PATIENT_SECONDS", 0.55)
    fake.silent.clear()
    with pytest.raises(SnapshotFailed, match=words):
        two[1].round("plan", b"", reverse, seconds)
    fake.silent.set()
    until(two[1]._done.is_set, "end of the thread")


def test_ctrl_c_ends_the_thread_that_waits_for_the_other_ranks(
    fake: FakeStore, two: list[Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Flag):
        def wait(self, *_: object, **__: object) -> bool:
            raise KeyboardInterrupt

    before = two[1]._done
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "Flag", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            two[1].round("plan", b"", reverse, 300.0)
    assert two[1]._done is not before
    until(two[1]._done.is_set, "end of the thread")
    assert fake.values == {}


def test_a_round_of_another_thread_is_waited_for_a_moment_only(
    fake: FakeStore, two: list[Exchange]
) -> None:
    fake.silent.clear()
    with started(round_of(two[1], "plan", seconds=0.0)) as first:
        until(lambda: fake.asked, "request")
        assert str(attempt(round_of(two[1], "other"))).startswith(
            "the job's store has not answered"
        )
        fake.silent.set()
        assert (
            str(first.result(60))
            == "rank 0 has not answered within 0 s: every rank must call plan(), not only some "
            "of them"
        )


def test_a_bug_in_the_decision_is_raised_on_all(
    two: list[Exchange], caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks do not wait for an answer until the deadline."""

    def decide(said: list[bytes]) -> list[bytes]:
        raise ZeroDivisionError("a bug")

    with started(lambda: two[1].round("plan", b"", reverse, 60.0)) as second:
        found = [attempt(lambda: two[0].round("plan", b"", decide, 60.0)), second.result(60)]
    assert [(type(error), str(error)) for error in found] == [
        (InternalError, "rank 0: ZeroDivisionError('a bug')")
    ] * 2
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_rank_that_is_told_its_attempt_decides_nothing() -> None:
    coordinator, other = (
        Told(0, 3, Store, others=[b"other", None]),
        Told(1, 2, Store, answer=b"answer"),
    )
    assert (coordinator.rank, coordinator.world_size, other.rank, other.world_size) == (0, 3, 1, 2)
    assert (
        coordinator.round("begin", b"mine", lambda said: [b"+".join(said)], 1.0)
        == b"mine+other+mine"
    )
    assert other.round("begin", b"mine", reverse, 1.0) == b"answer"
    assert other.broadcast("interval", lambda: b"said", 1.0) == b"said"
    with pytest.raises(UnsavableValue, match="^no$"):
        other.round("begin", UnsavableValue("no"), reverse, 1.0)


def test_a_large_answer_to_several_ranks_is_stored_once_and_removed_by_the_next_round(
    fake: FakeStore,
) -> None:
    ranks = [Exchange(fake, rank, 4) for rank in range(4)]
    large, small = bytes(range(256)) * 16, b"for rank 3"

    def decide(said: list[bytes]) -> list[bytes]:
        return [large, large, large, small]

    def all_ranks(topic: str, decided: Callable[[list[bytes]], list[bytes]]) -> list[Any]:
        with ExitStack() as stack:
            calls = [
                stack.enter_context(started(partial(rank.round, topic, b"", decided, 60.0)))
                for rank in ranks
            ]
            return [call.result(60) for call in calls]

    assert all_ranks("plan/1/1", decide) == [large, large, large, small]
    assert [(key, len(value) > len(large)) for key, value in fake.values.items()] == [
        ("ckptd//plan/1/1/all/0/0", True)
    ]
    assert all_ranks("plan/1/2", lambda said: [b"1", b"2", b"3", b"4"]) == [b"1", b"2", b"3", b"4"]
    assert fake.values == {}


def test_a_round_in_which_a_rank_is_late_leaves_it_the_answer_before(fake: FakeStore) -> None:
    ranks, large = [Exchange(fake, rank, 3) for rank in range(3)], bytes(4096)
    with started(round_of(ranks[1], "plan/1/1")), started(round_of(ranks[2], "plan/1/1")):
        ranks[0].round("plan/1/1", b"", lambda said: [large] * 3, 60.0)
    (before,) = fake.values
    with pytest.raises(SnapshotFailed, match="ranks 1, 2 sent nothing"):
        ranks[0].round("plan/1/2", b"", reverse, 0.0)
    assert [*fake.values] == [before]


def test_rank_0_gets_the_values_of_all_ranks_in_few_requests(fake: FakeStore) -> None:
    ranks = [Exchange(fake, rank, 33) for rank in range(33)]
    with ExitStack() as stack:
        calls = [
            stack.enter_context(started(round_of(rank, "plan/1/1", b"mine"))) for rank in ranks[1:]
        ]
        while sum("/from/" in key for key in fake.values) < 32:
            time.sleep(0.001)
        assert (
            ranks[0].round(
                "plan/1/1", b"mine", lambda said: [str(len(said)).encode()] * len(said), 60.0
            )
            == b"33"
        )
        assert {call.result(60) for call in calls} == {b"33"}
    # Two removed keys and one answer for each rank, and a few requests for all.
    assert ranks[0].operations < 4 * 33


@pytest.mark.parametrize(
    ("waited", "pause"), [(0.0, 0.001), (0.032, 0.001), (0.64, 0.02), (3.2, 0.1), (60.0, 0.1)]
)
def test_rank_0_looks_again_after_a_small_share_of_the_wait(waited: float, pause: float) -> None:
    assert pause_after(waited) == pytest.approx(pause)


def test_a_rank_that_came_and_gave_up_is_not_called_late(ranks: list[Exchange]) -> None:
    """Rank 1 comes at once and leaves before rank 0 gives up. Rank 2 never comes."""
    with started(round_of(ranks[1], "recover/1", b"", 1.5)) as early:
        time.sleep(0.3)
        found = attempt(round_of(ranks[0], "recover/1", b"", 3.0))
        assert str(found).startswith("rank 2 sent nothing within ")
        assert isinstance(early.result(60), SnapshotFailed)


def test_ranks_that_give_up_at_once_do_not_block_rank_0(store: TCPStore) -> None:
    """Rank 0 must not wait in the store for a value that its rank removes at this
    moment: the store would wait for minutes.
    """
    ranks = [Exchange(store, rank, 40) for rank in range(40)]
    with ExitStack() as stack:
        calls = [
            stack.enter_context(started(round_of(rank, "plan/1/1", b"", 1.2 + number / 100)))
            for number, rank in enumerate(ranks[1:39])
        ]
        assert str(attempt(round_of(ranks[0], "plan/1/1", b"", 1.6))).startswith(
            "rank 39 sent nothing within "
        )
        assert all(isinstance(call.result(60), CkptdError) for call in calls)
    with ExitStack() as stack:
        calls = [
            stack.enter_context(started(round_of(rank, "plan/1/2", b"%02d" % number)))
            for number, rank in enumerate(ranks)
        ]
        assert [call.result(60) for call in calls] == [
            b"%02d" % number for number in reversed(range(40))
        ]


# -- clients for other threads


class Cloned(FakeStore):
    """A store that notes the timeout of the client whenever the client is cloned."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float] = []
        self.timeout_now = 0.0
        self.gone = False

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_now = timeout.total_seconds()

    def clone(self) -> FakeStore:
        if self.gone:
            raise RuntimeError("The client socket has timed out\nframe #0")
        self.timeouts.append(self.timeout_now)
        return self


def test_a_new_client_has_long_to_connect_because_a_job_that_starts_is_busy() -> None:
    store = Cloned()
    exchange = Exchange(store, 0, 2)
    assert store.timeout_now == store_values.GONE_SECONDS
    exchange.new_client()
    assert store.timeouts[1:] == [rounds.PATIENT_SECONDS]
    assert store.timeout_now == store_values.GONE_SECONDS
    store.gone = True
    with pytest.raises(
        SnapshotFailed, match="^the job's store cannot be reached: The client socket has timed out$"
    ):
        exchange.new_client()
    assert store.timeout_now == store_values.GONE_SECONDS


@pytest.mark.parametrize(("topic", "call"), [
    ("begin", "Agent(), snapshot() or "
        "recover()"), ("plan/3/40/classes", "snapshot(step=40)"), ("recover/1/find", "recover()"),
])  # fmt: skip
def test_ranks_that_have_not_called_are_named_once(
    ranks: list[Exchange],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    topic: str,
    call: str,
) -> None:
    monkeypatch.setattr(rounds, "WARN_SECONDS", 0.2)
    with pytest.raises(
        SnapshotFailed,
        match=r"ranks 1, 2 sent nothing within \d+ s: every rank must call " + re.escape(call),
    ):
        round_of(ranks[0], topic, seconds=1.2)()
    (said,) = [
        record.getMessage() for record in caplog.records if "not called" in record.getMessage()
    ]
    assert said == (
        f"ranks 1, 2 have not called {call} yet, and rank 0 has waited for 0.2 s: every rank must "
        f"call it, because each saves its part and "
        "waits for the others. Is it called on rank 0 only?"
    )


def test_ranks_that_are_slow_in_a_later_round_are_not_said_not_to_have_called(
    ranks: list[Exchange], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(round_of(ranks[1], "recover/1/then/3/open", seconds=0.1))
    monkeypatch.setattr(rounds, "WARN_SECONDS", 0.2)
    with pytest.raises(
        SnapshotFailed,
        match=r"^ranks 1, 2 sent nothing within \d+ s: the other ranks wait in recover\(\)$",
    ):
        round_of(ranks[0], "recover/1/then/3/load", seconds=1.2)()
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 has waited in recover() for 0.2 s for ranks 1, 2, which may have more to do"
    ]


def test_a_rank_that_has_made_another_call_meanwhile_is_told_in_a_later_round(
    two: list[Exchange], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(round_of(two[1], "plan/1/40", seconds=0.1))
    monkeypatch.setattr(rounds, "WARN_SECONDS", 0.2)
    other = ": its last call was snapshot(step=40), not recover(); all ranks must make the same"
    with pytest.raises(SnapshotFailed, match=re.escape(other)):
        round_of(two[0], "recover/1/then/3/load", seconds=1.2)()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"rank 0 has waited in recover() for 0.2 s for rank 1{other}")


def test_only_the_rank_that_has_not_called_is_named(
    ranks: list[Exchange], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits, too, but says nothing: rank 0 has come, and names rank 2."""
    monkeypatch.setattr(rounds, "WARN_SECONDS", 0.3)
    together(ranks, [b"", b"", None], reverse, seconds=1.6)
    (said,) = [
        record.getMessage() for record in caplog.records if "not called" in record.getMessage()
    ]
    assert said.startswith("rank 2 has not called ")
    assert "on rank 0 only" not in said


def test_a_rank_0_that_has_not_called_is_named(
    ranks: list[Exchange], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "WARN_SECONDS", 0.2)
    attempt(round_of(ranks[2], "recover/1/find", seconds=0.8))
    (said,) = [
        record.getMessage() for record in caplog.records if "not called" in record.getMessage()
    ]
    assert said.startswith(
        "rank 0 has not called recover() yet, and rank 2 has waited for 0.2 s: every rank must "
        "call it"
    )
