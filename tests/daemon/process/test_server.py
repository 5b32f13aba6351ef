"""Tests hostile and broken clients against a real daemon: they get one sentence or
nothing, and other clients do not notice.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.copy.checked_copy import CheckedCopy, copy_bytes
from ckptd.agent.link.client import Client
from ckptd.daemon.memory.slots import Slot
from ckptd.daemon.process.server import Connection
from ckptd.shared import errors
from ckptd.shared.formats.manifest import Manifest
from ckptd.shared.formats.segment import read_check, read_header
from ckptd.shared.wire import frames
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.channel import Channel
from ckptd.shared.wire.session import SessionState
from tests.support.daemons import Daemon, Home, holds, running, until, warn_soon


def connect(daemon: Daemon) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(30)
    client.connect(str(daemon.home.socket))
    return client


def answers(client: socket.socket) -> list[Any]:
    """Return everything that comes until the daemon closes the connection."""
    decoder, found = frames.Decoder(), []
    try:
        while data := client.recv(65536):
            found += [m.decode(payload) for payload in decoder.feed(data)]
    except ConnectionResetError:
        pass
    return found


def still_serves(daemon: Daemon) -> None:
    assert daemon.status()["ready"]
    agent = Agent("witness", socket=daemon.home.socket)
    agent.snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
    agent.close()


def hello(number: int = 1) -> bytes:
    return frames.encode(m.encode(m.Hello(id=number, min_version=1, max_version=1)))


@pytest.mark.usefixtures("processes")
def test_a_rank_that_hangs_up_while_its_attempt_begins_is_not_connected(place: Home) -> None:
    with running(place, failpoints="attempt.claiming=sleep(1)", forked=True) as daemon:
        channel = Channel(place.socket, 30.0)
        channel.send(m.Begin(id=channel.new_id(), job="gpt", rank=0, world_size=1))
        channel.close()
        until(
            lambda: daemon.status()["jobs"] and daemon.status()["jobs"][0]["attempt"] == 1,
            "attempt",
        )
        until(lambda: daemon.status()["jobs"][0]["ranks_connected"] == 0, "end of the connection")


def next_of(channel: Channel, kind: type[Any]) -> tuple[Any, list[Any]]:
    """Return the next message of this type, and the messages before it."""
    before: list[Any] = []
    while True:
        for message in channel.receive():
            if isinstance(message, kind):
                return message, before
            before.append(message)


@pytest.mark.usefixtures("processes")
def test_a_client_that_does_not_know_waiting_does_not_get_it(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(place, forked=warn_soon):
        new = Channel(place.socket, 30.0)
        monkeypatch.setattr("ckptd.shared.wire.session.WAITING", "another feature")
        old = Channel(place.socket, 30.0)
        for rank, channel in enumerate((old, new)):
            channel.send(
                m.Begin(id=channel.new_id(), job="gpt", rank=rank, world_size=2, attempt=rank)
            )
            next_of(channel, m.Began)
        old.send(m.Replan(id=old.new_id(), step=5))
        assert next_of(new, m.Waiting) == (m.Waiting(re=0, attempt=1, step=5, ranks=[1]), [])
        old.send(m.Status(id=old.new_id()))
        assert [type(message) for message in next_of(old, m.StatusReport)[1]] == [m.Done]
        for channel in (old, new):
            channel.close()


@pytest.mark.usefixtures("processes")
def test_a_client_that_does_not_know_remarks_does_not_get_them(
    place: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(place, "--root-quota", "1", forked=True):
        monkeypatch.setattr("ckptd.shared.wire.session.REMARKS", "another feature")
        agent = Agent("old", socket=place.socket)
        agent.snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
        until(lambda: "more than its root_quota" in place.log_text(), "warning")
        agent.snapshot({"x": torch.ones(3)}, step=2).wait("durable", timeout=60)
        agent.close()
    assert "root_quota" not in caplog.text


def test_each_message_comes_once_however_many_attempts_a_connection_has_begun(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rollback begins an attempt on the same connection."""
    heard: list[m.Progress] = []
    got = Client._got

    def hear(self: Client, message: m.Message) -> None:
        if isinstance(message, m.Progress):
            heard.append(message)
        got(self, message)

    monkeypatch.setattr(Client, "_got", hear)
    agent = Agent("gpt", socket=daemon.home.socket)
    state = {"x": torch.ones(3)}
    for step in (1, 3, 5):
        agent.snapshot(state, step=step).wait("durable", timeout=60)
        agent.snapshot(state, step=step + 1).wait("durable", timeout=60)
        agent.recover(state, step=step)
    agent.snapshot(state, step=7).wait("durable", timeout=60)
    agent.close()
    assert {message.attempt for message in heard} == {1, 2, 3, 4}
    assert len(heard) == len(set(map(repr, heard)))


@pytest.mark.usefixtures("processes")
def test_progress_after_a_failed_begin_is_kept_until_the_next_begin(place: Home) -> None:
    """A rank that begins its next attempt still waits for the snapshot of the attempt
    before.
    """
    with running(
        place, failpoints="persist.intended=sleep(1)@1,attempt.claiming=error(EIO)@2", forked=True
    ) as daemon:
        agent = Agent("gpt", socket=place.socket)
        pending = agent.snapshot({"x": torch.ones(3)}, step=1)
        with pytest.raises(errors.StorageError, match="cannot claim an attempt"):
            agent._link.begin_next()
        until(lambda: daemon.status()["counters"]["persisted"] == 1, "checkpoint")
        assert pending.state == "sealed"
        agent._link.begin_next()
        pending.wait("durable", timeout=60)
        agent.close()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "the peer does not speak ckptd's protocol"),
        (
            struct.pack("<I", 0xFFFFFFFF),
            "a frame has a length of 4294967295 bytes, and 1 to 1048576 are allowed",
        ),
        (struct.pack("<I", 0), "a frame has a length of 0 bytes"),
        (frames.encode(b"\xc1" * 10), "a message cannot be decoded"),
        (frames.encode(msgspec.msgpack.encode({"type": "begin"})), "a message cannot be decoded"),
        (
            frames.encode(msgspec.msgpack.encode({"type": "status", "id": 1})),
            "Status is not allowed in session state 'new'",
        ),
        (
            hello() + frames.encode(m.encode(m.Find(id=2))),
            "Find is not allowed in session state",
        ),
        (hello() + hello(2), "Hello is not allowed in session state"),
        (frames.encode(m.encode(m.Done(re=1))), "Done does not go from agent to daemon"),
    ],
)
def test_broken_protocol_ends_the_connection_with_a_sentence(
    daemon: Daemon, sent: bytes, words: str
) -> None:
    with connect(daemon) as client:
        client.sendall(sent)
        last = answers(client)[-1]
    assert isinstance(last, m.Error)
    assert (last.re, last.code) == (0, "protocol")
    assert words in last.message
    still_serves(daemon)


def test_another_protocol_version_is_refused_with_both_ranges(daemon: Daemon) -> None:
    with connect(daemon) as client:
        client.sendall(frames.encode(m.encode(m.Hello(id=1, min_version=7, max_version=9))))
        (answer,) = answers(client)
    assert isinstance(answer, m.Error)
    assert answer.code == "version"
    assert "client speaks protocol 7 to 9, this daemon 1 to 1" in answer.message


def without_uvloop() -> None:
    sys.modules["uvloop"] = None  # type: ignore[assignment]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
def test_the_next_client_with_the_same_descriptor_number_gets_answers(
    place: Home, event_loop: str
) -> None:
    """The daemon closes a connection while it waits for that client's next bytes.

    The next client gets the same descriptor number.
    """
    daemon = Daemon(place, forked=without_uvloop if event_loop == "asyncio" else True).wait_ready()
    try:
        for _ in range(3):
            with connect(daemon) as refused:
                refused.sendall(
                    frames.encode(m.encode(m.Hello(id=1, min_version=7, max_version=9)))
                )
                answers(refused)
            with connect(daemon) as client:
                client.sendall(hello())
                client.recv(65536)
                time.sleep(0.1)  # until the daemon waits again
                client.sendall(frames.encode(m.encode(m.Status(id=2))))
                assert client.recv(65536)
    finally:
        daemon.kill()


def test_random_bytes_and_mutated_frames_disturb_no_other_client(daemon: Daemon) -> None:
    chance = random.Random(7)
    valid = [
        hello(),
        frames.encode(m.encode(m.Begin(id=2, job="x", rank=0, world_size=1))),
        frames.encode(m.encode(m.Allocate(id=3, capacity=1000, count=2))),
        frames.encode(m.encode(m.Acquire(id=4, step=1, wait=0.0))),
        frames.encode(m.encode(m.Seal(id=5, segment="00", attempt=1, step=1))),
        frames.encode(m.encode(m.Fetch(id=6, attempt=1, step=1))),
        frames.encode(m.encode(m.Detach(id=7))),
    ]
    process = psutil.Process(daemon.process.pid)
    before = process.num_fds()
    for _ in range(300):
        data = bytearray(
            b"".join(chance.sample(valid, chance.randint(1, len(valid))))
            if chance.random() < 0.5
            else b"".join(valid)
        )
        for _ in range(chance.randint(0, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with connect(daemon) as client:
            client.sendall(bytes(data))
            client.shutdown(socket.SHUT_WR)
            answers(client)
    still_serves(daemon)
    # Only the segments that the mutated requests were granted.
    assert process.num_fds() <= before + 16


def test_descriptors_sent_along_are_dropped(daemon: Daemon) -> None:
    process = psutil.Process(daemon.process.pid)
    with connect(daemon) as client, open(os.devnull) as null:
        client.sendall(hello())
        client.recv(65536)
        before = process.num_fds()  # at most: the history may be open
        for number in range(1, 20):
            socket.send_fds(
                client, [frames.encode(m.encode(m.Status(id=number + 1)))], [null.fileno()] * 50
            )
        decoder, seen = frames.Decoder(), 0
        while seen < 19:
            seen += len(decoder.feed(client.recv(65536)))
        assert holds(lambda: process.num_fds() <= before, 60)
    still_serves(daemon)


def test_half_frames_and_silent_clients_do_not_delay_others(daemon: Daemon) -> None:
    silent = [connect(daemon) for _ in range(100)]
    for client in silent:
        client.sendall(b"\x10\x00")
    still_serves(daemon)
    for client in silent:
        client.close()


@pytest.mark.usefixtures("processes")
def test_connections_beyond_the_limit_get_an_error(place: Home) -> None:
    with running(place, environment={"CKPTD_MAX_CONNECTIONS": "3"}, forked=True) as daemon:
        held = [Channel(place.socket, 30) for _ in range(3)]
        with pytest.raises(errors.Busy, match="this daemon has 3 clients already; try again later"):
            Channel(place.socket, 30)
        for channel in held:
            channel.close()
        while True:
            try:
                assert daemon.status()["counters"]["connections_refused"] >= 1
                break
            except errors.Busy:
                continue


def test_a_rank_cannot_use_the_segments_of_other_ranks(daemon: Daemon) -> None:
    owner = Agent("mine", socket=daemon.home.socket)
    owner.snapshot({"x": torch.ones(3)}, step=1).wait("durable", timeout=60)
    name = daemon.home.segment_files()[0].name
    thief = Channel(daemon.home.socket, 30)
    thief.send(m.Begin(id=thief.new_id(), job="theirs", rank=0, world_size=1))
    thief.receive()
    for request in (
        m.Seal(id=thief.new_id(), segment=name, attempt=1, step=1),
        m.Abandon(id=thief.new_id(), segment=name),
        m.Seal(id=thief.new_id(), segment="../" * 30, attempt=1, step=1),
        m.Fetch(id=thief.new_id(), attempt=1, step=1),
    ):
        thief.send(request)
        (answer,) = thief.receive()
        assert isinstance(answer, m.Error)
        assert answer.code == "not-found"
    thief.close()
    owner.snapshot({"x": torch.ones(3)}, step=2).wait("durable", timeout=60)
    owner.close()


def test_a_client_cannot_seal_a_slot_whose_header_is_not_sealed(daemon: Daemon) -> None:
    liar = Channel(daemon.home.socket, 30)

    def ask(request: Any) -> Any:
        liar.send(request)
        return liar.receive()[0]

    ask(m.Begin(id=liar.new_id(), job="job", rank=0, world_size=1))
    segments = ask(m.Allocate(id=liar.new_id(), capacity=10_000, count=2))
    assert isinstance(segments, m.Segments)
    for descriptor in liar.take(4):
        descriptor.close()
    granted = ask(m.Acquire(id=liar.new_id(), step=1, wait=0.0))
    assert isinstance(granted, m.Granted)
    answer = ask(m.Seal(id=liar.new_id(), segment=granted.segment, attempt=1, step=1))
    assert isinstance(answer, m.Error)
    assert (answer.code, "does not hold a sealed snapshot of step 1" in answer.message) == (
        "invalid",
        True,
    )
    answer = ask(m.Acquire(id=liar.new_id(), step=2, name="../x", wait=0.0))
    assert isinstance(answer, m.Error)
    assert answer.code == "invalid"
    answer = ask(m.Begin(id=liar.new_id(), job="../x", rank=0, world_size=1))
    assert isinstance(answer, m.Error)
    assert answer.code == "invalid"
    liar.close()
    still_serves(daemon)


@pytest.mark.skipif(copy_bytes is None, reason="no compiler was found when ckptd was installed")
@pytest.mark.parametrize("persist", [True, False])
def test_a_copy_that_does_not_match_the_checksums_of_its_seal_is_not_used(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, persist: bool
) -> None:
    agent, state = Agent("job", socket=daemon.home.socket), {"x": torch.arange(100_000)}
    agent.snapshot(state, step=1).wait("durable", timeout=60)
    right = CheckedCopy.checks
    with monkeypatch.context() as patch:
        patch.setattr(
            CheckedCopy,
            "checks",
            lambda self, values: [crc ^ 1 for crc in right(self, values) or []],
        )
        pending = agent.snapshot(state, step=2, persist=persist)
        if persist:
            with pytest.raises(
                errors.CkptdError,
                match="chunk 0 of job step 2 has changed in memory since it was sealed",
            ):
                pending.wait("durable", timeout=60)
        else:
            pending.wait("sealed", timeout=60)
    found = agent.recover(state)
    assert found is not None
    assert found.step == 1
    agent.snapshot(state, step=3).wait("durable", timeout=60)


@pytest.mark.parametrize("damage", ["truncate", "unlink", "replace", "flip"])
def test_a_segment_that_is_tampered_with_is_noticed(daemon: Daemon, damage: str) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"x": torch.arange(100_000)}, step=1).wait("durable", timeout=60)
    agent.snapshot({"x": torch.arange(100_000) + 1}, step=2, persist=False).wait("sealed")
    victim = max(daemon.home.segment_files(), key=lambda path: path.stat().st_mtime_ns)
    with victim.open("rb") as file:
        # A change before the daemon has read the seal would make step 2 fail. One
        # before there are checksums is not noticed.
        until(lambda: daemon.status()["jobs"][0]["last_sealed"]["step"] == 2, "seal of step 2")
        until(lambda: read_check(file.fileno(), read_header(file.fileno())), "checksums")
    if damage == "unlink":
        victim.unlink()
    elif damage == "replace":
        data = victim.read_bytes()
        victim.unlink()
        victim.write_bytes(data)
    elif damage == "truncate":
        os.truncate(victim, 20_000)
    else:
        with victim.open("r+b") as file:
            file.seek(40_000)
            file.write(b"\xff\xfe")
    # A new attempt: the old trainer is fenced from now on.
    reader = Agent("job", socket=daemon.home.socket)
    state = {"x": torch.zeros(100_000, dtype=torch.int64)}
    recovered = reader.recover(state)
    assert recovered is not None
    assert (recovered.step, recovered.source) == (1, "storage")
    assert torch.equal(state["x"], torch.arange(100_000))
    assert len(recovered.passed_over) == 1
    reader.close()
    still_serves(daemon)


def test_a_status_report_fits_into_a_frame(daemon: Daemon) -> None:
    root = daemon.home.root
    for number in range(3000):
        (root / f"job-{number:04d}-{'x' * 90}" / "step-00000001.a0001").mkdir(parents=True)
    with running_again(daemon) as again:
        status = again.status()
        assert len(status["jobs"]) == 500
        assert status["jobs_not_shown"] == 2500


def test_a_huge_name_in_a_foreign_manifest_does_not_break_recover(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"x": torch.ones(1)}, step=1).wait("durable", timeout=60)
    source = daemon.home.root / "job" / "step-00000001.a0001" / "manifest.json"
    strange = Manifest.decode(source.read_bytes())
    place = daemon.home.root / "job" / "step-00000009.a0001"
    place.mkdir()
    (place / "manifest.json").write_bytes(
        msgspec.structs.replace(strange, job="j" * 2_000_000).encode()
    )
    recovered = agent.recover({"x": torch.zeros(1)})
    assert recovered is not None
    assert recovered.step == 1
    assert (
        "step-00000009.a0001: manifest cannot be read: Expected `str` of length <= 256"
        in recovered.passed_over[0]
    )
    agent.close()


def running_again(daemon: Daemon) -> Any:
    daemon.stop()
    return running(daemon.home, forked=True)


def test_another_user_is_refused(daemon: Daemon) -> None:
    if os.getuid():
        pytest.skip("becoming another user needs root")
    os.chmod(daemon.home.path, 0o755)
    os.chmod(daemon.home.socket, 0o666)
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            with connect(daemon) as client:
                (answer,) = answers(client)
                os.write(tells, answer.code.encode())
        finally:
            os._exit(0)
    os.close(tells)
    os.waitpid(child, 0)
    with open(told, "rb") as words:
        assert words.read() == b"forbidden"
    still_serves(daemon)


def test_a_slot_that_cannot_be_passed_on_leaves_no_descriptor_open() -> None:
    opened: list[int] = []

    def open_again(slot: object, *, write: bool) -> int:
        if len(opened) == 3:
            raise errors.StorageError("Too many open files")
        opened.append(os.open("/dev/null", os.O_RDONLY))
        return opened[-1]

    connection = SimpleNamespace(
        _server=SimpleNamespace(
            engine=SimpleNamespace(slots=SimpleNamespace(open_again=open_again))
        )
    )
    with pytest.raises(errors.StorageError):
        Connection._pass_on(cast(Connection, connection), 1, cast(list[Slot], ["a", "b"]))
    assert len(opened) == 3
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_the_descriptors_for_a_client_that_has_hung_up_are_closed() -> None:
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]

    async def handle(request: m.Request) -> tuple[m.Reply, list[int]]:
        return m.Done(re=1), opened

    connection = SimpleNamespace(
        _seals=set(), _handle=handle, _session=SimpleNamespace(state=SessionState.CLOSED)
    )
    asyncio.run(Connection._answer(cast(Connection, connection), m.Status(id=1)))
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
