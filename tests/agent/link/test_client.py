"""The client against a daemon that answers what the test tells it to: late, wrong, out
of order, in pieces, or not at all.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ckptd.agent.link import client as client_module
from ckptd.agent.link.client import Call, Client
from ckptd.agent.link.launch import Place
from ckptd.agent.threads.call_lock import Nested
from ckptd.shared.errors import (
    AlreadyExists,
    Busy,
    CkptdError,
    DaemonUnreachable,
    Fenced,
    Forbidden,
    ForeignMemory,
    StorageError,
)
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.wire import frames
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel
from tests.support.clock import Clock
from tests.support.daemons import until
from tests.support.fake_daemon import SECONDS, Connection, FakeDaemon, fake_daemon


class Rank:
    """A client, and everything that it has reported to its owner."""

    def __init__(self, place: Place) -> None:
        self.news: list[int] = []
        self.lost: list[CkptdError] = []
        self.late: list[m.Reply] = []
        self.resume: Callable[[], None] = self.begin
        self.resumed = 0
        self.client = Client(
            place,
            resume=self._resume,
            news=self._news,
            lost=self.lost.append,
            late=self.late.append,
        )

    def _resume(self) -> None:
        self.resumed += 1
        self.resume()

    def _news(self, progress: m.Notification) -> None:
        assert isinstance(progress, m.Progress)
        self.news.append(progress.step)

    def begin(self) -> None:
        self.client.call(lambda n: m.Begin(id=n, job="gpt", rank=0, world_size=1), m.Began, SECONDS)

    def acquire(self, step: int) -> str:
        reply, _ = self.client.call(acquire(step), m.Granted, SECONDS)
        return reply.segment


def acquire(step: int) -> Callable[[int], m.Acquire]:
    return lambda n: m.Acquire(id=n, step=step, wait=0.0)


def granted(request: m.Acquire) -> m.Granted:
    return m.Granted(re=request.id, segment=f"segment of {request.step}", step=request.step)


def progress(step: int) -> m.Progress:
    return m.Progress(re=0, attempt=1, step=step, state="durable")


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with fake_daemon() as made:
        yield made


@pytest.fixture
def rank(daemon: FakeDaemon) -> Iterator[Rank]:
    made = Rank(daemon.place)
    yield made
    made.client.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture
def connection(daemon: FakeDaemon, rank: Rank, pool: ThreadPoolExecutor) -> Connection:
    """The daemon's end of the connection of `rank`, which has begun an attempt on it."""
    accepted = daemon.accepted()
    begun = pool.submit(rank.begin)
    accepted.attach()
    begun.result(SECONDS)
    return accepted


def error_of(call: Future[Any]) -> CkptdError:
    error = call.exception(SECONDS)
    assert isinstance(error, CkptdError), error
    return error


# -- replies


def test_a_call_returns_the_reply_to_its_own_request(
    rank: Rank, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    first, second = pool.submit(rank.acquire, 1), pool.submit(rank.acquire, 2)
    one, other = connection.next(m.Acquire), connection.next(m.Acquire)
    connection.reply(granted(other), granted(one))
    assert (first.result(SECONDS), second.result(SECONDS)) == ("segment of 1", "segment of 2")


def test_many_threads_call_at_once(
    rank: Rank, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    """The daemon answers in batches, in a random order, with news in between."""
    calls = 8 * 40
    found = [pool.submit(rank.acquire, step) for step in range(calls)]
    chance, waiting, answered = random.Random(3), list[m.Acquire](), 0
    while answered < calls:
        if answered + len(waiting) < calls:
            waiting.append(connection.next(m.Acquire))
        if connection.requests.empty() and chance.random() < 0.7:
            chance.shuffle(waiting)
            connection.reply(progress(answered), *map(granted, waiting))
            answered += len(waiting)
            waiting = []
        elif len(waiting) == 8:  # every thread waits
            connection.reply(*map(granted, waiting))
            answered += 8
            waiting = []
        elif waiting and connection.requests.empty():
            connection.reply(granted(waiting.pop()))
            answered += 1
    assert [call.result(SECONDS) for call in found] == [
        f"segment of {step}" for step in range(calls)
    ]
    assert rank.news == sorted(rank.news)


def test_a_reply_may_arrive_in_pieces(
    rank: Rank, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    call = pool.submit(rank.acquire, 1)
    frame = connection.frame(granted(connection.next(m.Acquire)))
    for byte in frame:
        connection.send(bytes([byte]))
    assert call.result(SECONDS) == "segment of 1"


def test_an_error_is_raised_in_the_call_that_it_answers(
    rank: Rank, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    first, second = pool.submit(rank.acquire, 1), pool.submit(rank.acquire, 2)
    for request in (connection.next(m.Acquire), connection.next(m.Acquire)):
        if request.step == 1:
            connection.reply(
                m.Error(re=request.id, code=AlreadyExists.code, message="tag 'best' is taken")
            )
        else:
            connection.reply(granted(request))
    assert (type(error_of(first)), str(error_of(first))) == (AlreadyExists, "tag 'best' is taken")
    assert second.result(SECONDS) == "segment of 2"


def test_a_reply_of_another_type_than_expected_is_refused(
    rank: Rank, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    call = pool.submit(rank.acquire, 1)
    connection.reply(
        m.Refused(re=connection.next(m.Acquire).id, reason="every slot is still being saved")
    )
    assert str(error_of(call)) == "the daemon answered with Refused; expected Granted"
    assert (rank.client.connected, rank.resumed) == (True, 0)


def test_descriptors_belong_to_the_reply_that_they_came_with(
    rank: Rank, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    def fetch(step: int) -> list[bytes]:
        _, descriptors = rank.client.call(
            lambda n: m.Fetch(id=n, attempt=1, step=step), m.Fetched, SECONDS
        )
        try:
            return [os.pread(descriptor.fileno(), 10, 0) for descriptor in descriptors]
        finally:
            for descriptor in descriptors:
                descriptor.close()

    files = [os.memfd_create("ckptd-test") for _ in range(3)]
    for number, file in enumerate(files):
        os.pwrite(file, str(number).encode(), 0)
    calls = [pool.submit(fetch, step) for step in (1, 2)]
    for request in (connection.next(m.Fetch), connection.next(m.Fetch)):
        if request.step == 1:
            connection.reply(m.Fetched(re=request.id, ranks=[0, 1]), descriptors=files[:2])
        else:
            connection.reply(m.Fetched(re=request.id, ranks=[0]), descriptors=files[2:])
    assert [call.result(SECONDS) for call in calls] == [[b"0", b"1"], [b"2"]]
    for file in files:
        os.close(file)


def test_descriptors_that_were_announced_and_did_not_come_end_the_connection(
    rank: Rank, daemon: FakeDaemon, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    call = pool.submit(
        rank.client.call, lambda n: m.Fetch(id=n, attempt=1, step=1), m.Fetched, SECONDS
    )
    connection.reply(m.Fetched(re=connection.next(m.Fetch).id, ranks=[0, 1]))
    assert (
        str(error_of(call))
        == "the connection to the daemon was lost: the daemon announced 2 descriptors, and 0 "
        "have arrived"
    )
    daemon.accepted().attach()


# -- news


def test_news_that_came_before_a_reply_are_handled_before_the_call_returns(
    rank: Rank, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    for step in range(20):
        call = pool.submit(lambda step: (rank.acquire(step), list(rank.news))[1], step)
        connection.reply(progress(step), granted(connection.next(m.Acquire)))
        assert call.result(SECONDS)[-1] == step


def test_news_are_handled_in_the_order_in_which_they_came(
    rank: Rank, connection: Connection
) -> None:
    """The daemon's order need not be that of the steps."""
    steps = random.Random(5).sample(range(1000), 1000)
    for begin in range(0, 1000, 100):
        connection.reply(*map(progress, steps[begin : begin + 100]))
    until(lambda: len(rank.news) == 1000, "news")
    assert rank.news == steps


# -- replies that are late, or that nobody waits for


def time_out(rank: Rank, step: int) -> None:
    with pytest.raises(DaemonUnreachable, match=r"^the daemon has not answered within 0\.0 s$"):
        rank.client.call(acquire(step), m.Granted, 0.0)


def test_a_slot_that_is_granted_after_the_timeout_is_given_back(
    rank: Rank, connection: Connection
) -> None:
    time_out(rank, 1)
    assert rank.late == []
    late = granted(connection.next(m.Acquire))
    connection.reply(late)
    until(lambda: rank.late, "late reply")
    assert rank.late == [late]


def test_a_daemon_that_has_not_answered_counts_as_away_until_it_says_something(
    rank: Rank, connection: Connection
) -> None:
    time_out(rank, 1)
    assert (rank.client.connected, rank.client.wait_connected(SECONDS)) == (False, False)
    connection.reply(progress(1))
    until(lambda: rank.client.connected, "connection")
    assert rank.client.wait_connected(0.0)
    assert rank.resumed == 0


@pytest.mark.parametrize("answered", [False, True], ids=["before the reply", "after it"])
def test_a_dropped_call_gives_its_slot_back(
    rank: Rank, connection: Connection, answered: bool
) -> None:
    call = rank.client.begin(acquire(1))
    reply = granted(connection.next(m.Acquire))
    if not answered:
        rank.client.drop(call)
    connection.reply(reply)
    if answered:
        assert call.done.wait(SECONDS)
        rank.client.drop(call)
    until(lambda: rank.late, "late reply")
    assert rank.late == [reply]


def test_a_dropped_call_closes_its_descriptors(rank: Rank, connection: Connection) -> None:
    call = rank.client.begin(lambda n: m.Fetch(id=n, attempt=1, step=1))
    with open(os.devnull, "rb") as file:
        connection.reply(
            m.Fetched(re=connection.next(m.Fetch).id, ranks=[0]), descriptors=[file.fileno()]
        )
        assert call.done.wait(SECONDS)
        (descriptor,) = call.descriptors
        number = descriptor.fileno()
        rank.client.drop(call)
    with pytest.raises(OSError):
        os.fstat(number)


def test_an_abandoned_call_returns_the_reply_that_has_arrived(
    rank: Rank, connection: Connection
) -> None:
    early, late = rank.client.begin(acquire(1)), rank.client.begin(acquire(2))
    first, second = granted(connection.next(m.Acquire)), granted(connection.next(m.Acquire))
    connection.reply(first)
    assert early.done.wait(SECONDS)
    assert (rank.client.abandon(early), rank.client.abandon(late), rank.late) == (first, None, [])
    connection.reply(second)
    until(lambda: rank.late, "late reply")
    assert rank.late == [second]


def test_a_call_that_ctrl_c_interrupts_gives_its_slot_back(
    rank: Rank, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = rank.client.begin(acquire(1))

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(call.done, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.client.finish(call, m.Granted, SECONDS)
    reply = granted(connection.next(m.Acquire))
    connection.reply(reply)
    until(lambda: rank.late, "late reply")
    assert rank.late == [reply]


# -- lost connections


def test_a_hang_up_between_request_and_reply_fails_the_calls_and_is_made_up_for(
    rank: Rank, daemon: FakeDaemon, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    calls = [pool.submit(rank.acquire, step) for step in range(4)]
    for _ in calls:
        connection.next(m.Acquire)
    connection.hang_up()
    for call in calls:
        assert type(error_of(call)) is DaemonUnreachable
        assert (
            str(error_of(call))
            == "the connection to the daemon was lost: the daemon closed the connection"
        )
    again = daemon.accepted()
    again.attach()
    assert rank.client.wait_connected(SECONDS)
    call = pool.submit(rank.acquire, 9)
    again.reply(granted(again.next(m.Acquire)))
    assert (call.result(SECONDS), rank.resumed, rank.lost) == ("segment of 9", 1, [])


def test_no_request_is_sent_before_the_attempt_is_resumed(
    rank: Rank, daemon: FakeDaemon, connection: Connection
) -> None:
    connection.hang_up()
    again = daemon.accepted()
    begin = again.next(m.Begin)  # the client has sent Begin and has no reply
    with pytest.raises(
        DaemonUnreachable,
        match="^the daemon is gone for the moment: Acquire is not allowed in session state "
        "'beginning'$",
    ):
        rank.client.begin(acquire(1))
    assert not rank.client.connected
    again.reply(m.Began(re=begin.id, attempt=1))
    assert rank.client.wait_connected(SECONDS)
    rank.client.abandon(rank.client.begin(acquire(1)))
    assert again.next(m.Acquire).step == 1


def test_a_daemon_that_is_away_for_a_while_is_found_again(
    rank: Rank, daemon: FakeDaemon, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pauses(Clock):
        def sleep(self, seconds: float) -> None:
            if threading.current_thread() is not rank.client._thread:
                return time.sleep(seconds)  # a client of an earlier test that reconnects, too
            super().sleep(seconds)
            if len(self.slept) == 9:
                daemon.listen()
            return None

    clock = Pauses()
    daemon.refuse()
    monkeypatch.setattr(client_module, "time", clock)
    connection.hang_up()
    daemon.accepted().attach()
    assert rank.client.wait_connected(SECONDS)
    assert clock.slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


def test_an_outage_costs_the_training_its_budget_once(
    rank: Rank, daemon: FakeDaemon, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float | None] = []

    def wait(timeout: float, unless: Callable[[], bool]) -> bool:
        waited.append(timeout)
        return False

    clock = Clock(1000.0)
    monkeypatch.setattr(client_module, "time", clock)
    connection.hang_up()
    resuming = daemon.accepted()
    resuming.next(m.Begin)  # and never answers it
    monkeypatch.setattr(rank.client._up, "wait", wait)
    for clock.now in (1000.0, 1004.0, 1010.0, 5000.0):
        assert not rank.client.wait_connected(10.0)
    assert waited == [10.0, 6.0, 0.0, 0.0]


def test_a_rank_waits_no_longer_for_a_daemon_that_serves_another_root(
    rank: Rank, daemon: FakeDaemon, connection: Connection
) -> None:
    connection.hang_up()
    resuming, results = daemon.accepted(), list[bool]()
    begin = resuming.next(m.Begin)
    waiting = threading.Thread(
        target=lambda: results.append(rank.client.wait_connected(3600.0)), daemon=True
    )
    waiting.start()
    resuming.reply(m.Error(re=begin.id, code=ForeignMemory.code, message="of another root"))
    waiting.join(60)
    assert results == [False]
    assert "of another root" in str(rank.client.refusal)


def test_a_rank_goes_on_once_the_right_root_is_back(
    rank: Rank, daemon: FakeDaemon, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_FOREIGN_DELAY", 0.01)
    connection.hang_up()
    for _ in range(2):
        resuming = daemon.accepted()
        begin = resuming.next(m.Begin)
        resuming.reply(m.Error(re=begin.id, code=ForeignMemory.code, message="of another root"))
    until(lambda: len(rank.lost) == 1, "end of the pending snapshots")
    resuming = daemon.accepted()
    begin = resuming.next(m.Begin)
    with pytest.raises(ForeignMemory, match="of another root"):
        rank.acquire(1)
    resuming.reply(m.Began(re=begin.id, attempt=1))
    until(lambda: rank.client.connected, "connection")
    assert (rank.client.refusal, len(rank.lost), rank.resumed) == (None, 1, 3)


def test_a_rank_that_cannot_resume_connects_once_more(
    rank: Rank, daemon: FakeDaemon, connection: Connection
) -> None:
    connection.hang_up()
    refusing = daemon.accepted()
    refusing.reply(
        m.Error(re=refusing.next(m.Begin).id, code=StorageError.code, message="the disk is full")
    )
    daemon.accepted().attach()
    assert rank.client.wait_connected(SECONDS)
    assert (rank.resumed, rank.lost) == (2, [])


def test_a_bug_in_resuming_costs_one_connection(
    rank: Rank, daemon: FakeDaemon, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        rank.resume = rank.begin
        raise RuntimeError("a bug")

    rank.resume = fail
    connection.hang_up()
    daemon.accepted()
    daemon.accepted().attach()
    assert rank.client.wait_connected(SECONDS)
    assert "RuntimeError: a bug" in caplog.text


def test_an_outage_is_logged_at_its_begin_and_at_its_end(
    rank: Rank, daemon: FakeDaemon, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, also if the session can be resumed at a later connection only."""

    def fail() -> None:
        rank.resume = rank.begin
        raise DaemonUnreachable("not yet")

    rank.resume = fail
    with caplog.at_level(logging.WARNING, "ckptd.agent"):
        connection.hang_up()
        daemon.accepted()
        for _ in range(2):
            last = daemon.accepted()
            last.attach()
            assert rank.client.wait_connected(SECONDS)
            assert rank.client._resumer is not None
            rank.client._resumer.join(SECONDS)  # it logs the end once the connection is up
            last.hang_up()
        daemon.accepted()
    said = [text.partition("to the daemon")[0] for text in caplog.messages if "resume" not in text]
    assert said[:4] == ["connection ", "reconnected ", "connection ", "reconnected "]


def test_a_lost_connection_is_closed_under_the_lock_of_the_senders(
    rank: Rank, daemon: FakeDaemon, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a thread that is sending may write to the descriptor of another file,
    which has got the same number.
    """
    client, close, held = rank.client, Channel.close, list[bool]()

    def watched(channel: Channel) -> None:
        held.append(client._inside())
        close(channel)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "close", watched)
        connection.hang_up()
        daemon.accepted().attach()
        assert client.wait_connected(SECONDS)
    assert held == [True]


def test_a_resumed_connection_that_is_lost_meanwhile_does_not_count_as_up(
    rank: Rank, daemon: FakeDaemon, connection: Connection
) -> None:
    """The first thread learns that its attempt is resumed after the connection is gone."""
    may_return, returned = threading.Event(), threading.Event()

    def begin_and_wait() -> None:
        rank.resume = rank.begin
        rank.begin()
        may_return.wait(SECONDS)
        returned.set()

    rank.resume = begin_and_wait
    connection.hang_up()
    first = daemon.accepted()
    first.attach()
    first.hang_up()
    second = daemon.accepted()
    begin = second.next(m.Begin)  # and does not answer it yet
    may_return.set()
    assert returned.wait(SECONDS)
    until(
        lambda: not [t for t in threading.enumerate() if t.name == "ckptd-resume"][1:],
        "end of the first thread",
    )
    assert not rank.client.connected
    second.reply(m.Began(re=begin.id, attempt=1))
    assert rank.client.wait_connected(SECONDS)


def test_a_newer_attempt_closes_the_client(
    rank: Rank, daemon: FakeDaemon, connection: Connection
) -> None:
    connection.hang_up()
    again = daemon.accepted()
    again.reply(m.Error(re=again.next(m.Begin).id, code=Fenced.code, message="attempt 2 has begun"))
    until(lambda: rank.client.closed, "end")
    assert [(type(error), str(error)) for error in rank.lost] == [(Fenced, "attempt 2 has begun")]
    with pytest.raises(Fenced, match="^attempt 2 has begun$"):
        rank.client.begin(acquire(1))
    assert again.ended.wait(SECONDS)
    assert daemon.none_accepted()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (m.Error(re=0, code=Busy.code, message="the daemon is stopping"), "the daemon is stopping"),
        (m.Granted(re=77, segment="x"), "Granted answers request 77, which is not under way"),
        (m.Began(re=2, attempt=1), "Began is not a valid reply to Acquire"),
    ],
    ids=[
        "an error for the whole connection",
        "a reply to no request",
        "a reply that the request cannot have",
    ],
)
def test_a_message_that_ends_the_connection_is_the_reason_of_each_call(
    rank: Rank,
    daemon: FakeDaemon,
    connection: Connection,
    pool: ThreadPoolExecutor,
    reply: m.Reply,
    reason: str,
) -> None:
    call = pool.submit(rank.acquire, 1)
    request = connection.next(m.Acquire)
    connection.break_protocol(
        m.Began(re=request.id, attempt=1) if isinstance(reply, m.Began) else reply
    )
    assert str(error_of(call)) == f"the connection to the daemon was lost: {reason}"
    daemon.accepted().attach()
    assert rank.client.wait_connected(SECONDS)


def test_an_error_in_a_callback_is_logged_and_costs_the_connection_only(
    rank: Rank,
    daemon: FakeDaemon,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(message: m.Progress) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rank.client, "_news", fail)
    connection.reply(progress(1))
    daemon.accepted().attach()
    assert rank.client.wait_connected(SECONDS)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a bug"]


def test_ctrl_c_while_a_message_is_received_ends_the_connection(
    rank: Rank, daemon: FakeDaemon, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of a message may be lost. `resume` makes up for it on the next connection."""

    def interrupted(channel: Channel, *, wait: bool = True) -> list[m.Message]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.client.call(acquire(1), m.Granted, SECONDS)
    daemon.accepted().attach()
    assert rank.client.wait_connected(SECONDS)
    assert rank.resumed == 1


def test_ctrl_c_while_a_request_is_sent_ends_the_connection(
    rank: Rank, daemon: FakeDaemon, connection: Connection
) -> None:
    def interrupted(number: int) -> m.Request:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rank.client.begin(interrupted)
    daemon.accepted().attach()
    assert rank.client.wait_connected(SECONDS)
    assert rank.client._calls == {}


def test_a_daemon_of_another_user_is_reported_once(
    rank: Rank,
    daemon: FakeDaemon,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = 0

    def connect() -> Channel:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise Forbidden("the socket belongs to uid 65534")
        return Channel(daemon.socket, SECONDS)

    # Not `Place.connect`: a client of an earlier test may be reconnecting, too.
    monkeypatch.setattr(rank.client, "_place", Mock(connect=connect))
    monkeypatch.setattr(client_module, "_FIRST_DELAY", 0.001)
    with caplog.at_level(logging.WARNING, "ckptd.agent"):
        connection.hang_up()
        daemon.accepted().attach()
        assert rank.client.wait_connected(SECONDS)
    assert caplog.text.count("the socket belongs to uid 65534") == 1


# -- requests that nobody waits for


def test_a_posted_request_is_answered_in_its_callback(rank: Rank, connection: Connection) -> None:
    answers: list[m.Reply] = []
    rank.client.post(lambda n: m.Seal(id=n, segment="a", attempt=1, step=1), answers.append)
    rank.client.post(lambda n: m.Seal(id=n, segment="b", attempt=1, step=2), answers.append)
    first, second = connection.next(m.Seal), connection.next(m.Seal)
    connection.reply(
        m.Error(re=second.id, code=Busy.code, message="no"), m.Sealed(re=first.id, durable=True)
    )
    until(lambda: len(answers) == 2, "answers")
    assert answers == [
        m.Error(re=second.id, code=Busy.code, message="no"),
        m.Sealed(re=first.id, durable=True),
    ]


def test_a_posted_request_without_a_daemon_is_neither_an_error_nor_sent_later(
    rank: Rank, daemon: FakeDaemon, connection: Connection
) -> None:
    """`resume` sends again what still matters."""
    daemon.refuse()
    connection.hang_up()
    until(lambda: not rank.client.connected, "loss")
    rank.client.post(lambda n: m.Seal(id=n, segment="a", attempt=1, step=1), lambda reply: None)
    daemon.listen()
    again = daemon.accepted()
    again.attach()
    assert rank.client.wait_connected(SECONDS)
    assert again.requests.empty()


def test_a_request_made_inside_a_send_is_refused_and_a_posted_one_is_sent_after_it(
    rank: Rank, connection: Connection
) -> None:
    """As from a signal handler that interrupts the send."""
    answers: list[m.Reply] = []

    def interrupted(number: int) -> m.Request:
        with pytest.raises(
            Nested, match="a request to the daemon of the same thread is still running"
        ):
            rank.client.begin(acquire(9))
        rank.client.post(lambda n: m.Seal(id=n, segment="a", attempt=1, step=1), answers.append)
        rank.client.post(lambda n: m.Seal(id=n, segment="b", attempt=1, step=2), answers.append)
        return m.Acquire(id=number, step=1, wait=0.0)

    rank.client.abandon(rank.client.begin(interrupted))
    acquired = connection.next(m.Acquire)
    seals = [connection.next(m.Seal), connection.next(m.Seal)]
    assert (acquired.step, [seal.segment for seal in seals]) == (1, ["a", "b"])
    connection.reply(*(m.Sealed(re=seal.id) for seal in seals))
    until(lambda: len(answers) == 2, "answers")


def test_a_post_made_inside_a_post_is_sent_after_it(rank: Rank, connection: Connection) -> None:
    def interrupted(number: int) -> m.Request:
        rank.client.post(lambda n: m.Seal(id=n, segment="b", attempt=1, step=2), lambda reply: None)
        return m.Seal(id=number, segment="a", attempt=1, step=1)

    rank.client.post(interrupted, lambda reply: None)
    assert [connection.next(m.Seal).segment for _ in range(2)] == ["a", "b"]


def test_a_request_that_cannot_be_made_leaves_nothing_behind(
    rank: Rank, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    def impossible(number: int) -> m.Request:
        raise StorageError("no")

    with pytest.raises(StorageError):
        rank.client.begin(impossible)
    assert rank.client._calls == {}
    call = pool.submit(rank.acquire, 1)
    connection.reply(granted(connection.next(m.Acquire)))
    assert call.result(SECONDS) == "segment of 1"


# -- the end


def test_close_fails_the_calls_under_way(
    rank: Rank, daemon: FakeDaemon, connection: Connection, pool: ThreadPoolExecutor
) -> None:
    call = pool.submit(rank.acquire, 1)
    connection.next(m.Acquire)
    rank.client.close()
    rank.client.close()
    assert str(error_of(call)) == "this agent is closed"
    assert connection.ended.wait(SECONDS)
    assert (
        rank.client.closed,
        rank.client.connected,
        rank.client._thread.is_alive(),
        rank.resumed,
    ) == (True, False, False, 0)
    assert daemon.none_accepted()


def test_close_ends_the_search_for_a_daemon(
    rank: Rank, daemon: FakeDaemon, connection: Connection
) -> None:
    daemon.refuse()
    connection.hang_up()
    until(lambda: not rank.client.connected, "loss")
    rank.client.close()
    assert not rank.client._thread.is_alive()


def test_a_connection_that_is_made_during_close_is_closed(
    rank: Rank, daemon: FakeDaemon, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go = threading.Event(), threading.Event()

    def connect() -> Channel:
        channel = daemon.place.connect()
        inside.set()
        assert go.wait(SECONDS)
        return channel

    monkeypatch.setattr(rank.client, "_place", Mock(connect=connect))
    connection.hang_up()
    assert inside.wait(SECONDS)
    # As `close` does, which then waits for the thread that is connecting.
    rank.client.closed = True
    go.set()
    assert daemon.accepted().ended.wait(SECONDS)
    assert rank.resumed == 0


def test_the_first_connection_must_succeed(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="no daemon listens at"):
        Rank(Place(tmp_path / "s", None, private=False))


# -- forks


@contextmanager
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process number changes, as it does in a forked child."""
    child = os.getpid() + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child)
        yield


def test_a_forked_child_cannot_use_its_parents_connection(
    rank: Rank, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forked(monkeypatch):
        with pytest.raises(
            DaemonUnreachable,
            match="^a forked process cannot use its parent's agent: make a new Agent in it$",
        ):
            rank.client.begin(acquire(1))
        rank.client.post(acquire(2), lambda reply: None)
    assert connection.requests.empty()
    rank.client.abandon(rank.client.begin(acquire(3)))
    assert connection.next(m.Acquire).step == 3


def test_a_forked_child_closes_its_copies_and_leaves_the_connection_to_its_parent(
    daemon: FakeDaemon,
) -> None:
    rank = Rank(daemon.place)
    connection = daemon.accepted()
    parents = rank.client._channel._socket.dup()  # a fork duplicates every descriptor
    answered = Call()
    with open(os.devnull, "rb") as file:
        answered.descriptors = [Descriptor(os.dup(file.fileno()))]
    number = answered.descriptors[0].fileno()
    rank.client._calls[99] = answered
    rank.client.forget()
    with pytest.raises(OSError):
        os.fstat(number)
    assert rank.client.closed
    parents.sendall(frames.encode(m.encode(m.Status(id=5))))
    assert connection.next(m.Status).id == 5
    parents.close()
    connection.hang_up()
    until(lambda: not rank.client._thread.is_alive(), "end")


@pytest.mark.parametrize("during", ["send", "receive"])
def test_after_ctrl_c_the_next_call_waits_for_the_next_connection(
    rank: Rank,
    daemon: FakeDaemon,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    during: str,
) -> None:
    """Although the client's thread, which reconnects, has not noticed the end of this
    one yet.
    """
    ended: list[Channel] = []

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "end", lambda channel: ended.append(channel))
        if during == "receive":
            patch.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.client.begin(interrupted) if during == "send" else rank.client.call(
                acquire(1), m.Granted, SECONDS
            )
        assert not rank.client.connected
    for channel in ended:
        channel.end()
    daemon.accepted().attach()
    assert rank.client.wait_connected(SECONDS)
