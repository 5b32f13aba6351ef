"""Pairs of ranks over a real store: in threads of this process, and between processes
that end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ckptd.agent.peers.pair import Pair, finish
from ckptd.shared.errors import PeerLost
from tests.support import forks
from tests.support.daemons import until
from tests.support.scripts import Python

SECONDS = 60.0
"""Time enough for anything that is to succeed."""
LARGE = 1 << 25
"""More bytes than the buffers of two sockets hold: they cannot be sent unless the peer
receives.
"""


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS)
    )


def connect(port: int, name: str, first: bool, seconds: float = SECONDS) -> Pair:
    """Connect with the peer, through a client of the store that nothing else uses."""
    client = TCPStore("localhost", port, is_master=False)
    return Pair(client, name, first=first, seconds=seconds)


def both(port: int, name: str) -> tuple[Pair, Pair]:
    """Return both sides of a pair."""
    with ThreadPoolExecutor(2) as threads:
        sides = [threads.submit(connect, port, name, first) for first in (True, False)]
        return sides[0].result(), sides[1].result()


@pytest.fixture
def sides(store: TCPStore) -> tuple[Pair, Pair]:
    return both(store.port, "pair")


def noise(count: int, seed: int = 0) -> torch.Tensor:
    """Return `count` bytes that only this seed gives."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


def blank(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


# -- bytes


@pytest.mark.parametrize("first_sends", [True, False])
@pytest.mark.parametrize("count", [0, 1, 16, 4097, LARGE])
def test_the_bytes_that_arrive_are_those_that_were_sent(
    sides: tuple[Pair, Pair], first_sends: bool, count: int
) -> None:
    sender, receiver = sides if first_sends else reversed(sides)
    into = blank(count)
    receiving = receiver.begin_receive(into)
    sender.send(noise(count), SECONDS)
    finish(receiving, SECONDS)
    assert into.equal(noise(count))


def test_messages_arrive_in_the_order_in_which_they_were_sent(sides: tuple[Pair, Pair]) -> None:
    """They are sent before any of them is received, and have different lengths."""
    sizes = [5, 100_000, 1, 0, 16, 70_000, 3]
    sending = [sides[0].begin_send(noise(size, seed)) for seed, size in enumerate(sizes)]
    arrived = [blank(size) for size in sizes]
    for into in arrived:
        sides[1].receive(into, SECONDS)
    for each in sending:
        finish(each, SECONDS)
    expected = [noise(size, seed) for seed, size in enumerate(sizes)]
    assert [into.tolist() for into in arrived] == [data.tolist() for data in expected]


def test_several_messages_are_under_way_at_once_in_both_directions(
    sides: tuple[Pair, Pair],
) -> None:
    """Neither side waits before all its messages have begun, and none fits the sockets."""
    count = 3
    arrived = [[blank(LARGE // 2) for _ in range(count)] for _ in sides]
    receiving = [
        side.begin_receive(into)
        for side, buffers in zip(sides, arrived, strict=True)
        for into in buffers
    ]
    sending = [
        side.begin_send(noise(LARGE // 2, 10 * number + message))
        for number, side in enumerate(sides)
        for message in range(count)
    ]
    for each in reversed(receiving + sending):
        finish(each, SECONDS)
    expected = [[noise(LARGE // 2, 10 * peer + each) for each in range(count)] for peer in (1, 0)]
    assert all(
        into.equal(data)
        for buffers, sent in zip(arrived, expected, strict=True)
        for into, data in zip(buffers, sent, strict=True)
    )


def test_bytes_arrive_in_the_part_of_a_buffer_that_is_named(sides: tuple[Pair, Pair]) -> None:
    whole = torch.full((48,), 7, dtype=torch.uint8)
    sending = sides[0].begin_send(noise(48)[16:32])
    sides[1].receive(whole[16:32], SECONDS)
    finish(sending, SECONDS)
    assert whole[16:32].equal(noise(48)[16:32])
    assert whole[:16].tolist() == whole[32:].tolist() == [7] * 16


def test_a_pair_is_no_group_of_torch_distributed(sides: tuple[Pair, Pair]) -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        sending = sides[0].begin_send(noise(16))
        into = blank(16)
        sides[1].receive(into, SECONDS)
        finish(sending, SECONDS)
    finally:
        dist.destroy_process_group()
    assert into.equal(noise(16))


# -- a peer that does not come, or does not go on

LOST = r"^the connection with a peer has failed: .+$"


@pytest.mark.parametrize("first", [True, False])
def test_a_peer_that_never_comes_is_lost(store: TCPStore, first: bool) -> None:
    with pytest.raises(PeerLost, match=LOST):
        connect(store.port, "nobody", first, seconds=0.5)


def test_a_store_that_has_ended_leaves_no_peer(store: TCPStore) -> None:
    client = TCPStore("localhost", store.port, is_master=False)
    del store
    with pytest.raises(PeerLost, match=LOST):
        Pair(client, "pair", first=True, seconds=0.5)


def receive(pair: Pair) -> None:
    pair.receive(blank(16), 0.2)


def send(pair: Pair) -> None:
    pair.send(noise(LARGE), 0.2)


@pytest.mark.parametrize("act", [receive, send])
def test_a_peer_that_does_nothing_is_lost(
    sides: tuple[Pair, Pair], act: Callable[[Pair], None]
) -> None:
    with pytest.raises(PeerLost, match=LOST):
        act(sides[0])


@pytest.mark.parametrize("act", [receive, send])
def test_a_pair_that_has_failed_stays_so_at_both_sides(
    sides: tuple[Pair, Pair], act: Callable[[Pair], None]
) -> None:
    with pytest.raises(PeerLost):
        sides[0].receive(blank(16), 0.2)
    with pytest.raises(PeerLost, match=LOST):
        act(sides[0])
    with pytest.raises(PeerLost, match=LOST):
        act(sides[1])


def test_a_lost_peer_breaks_no_other_pair(store: TCPStore, sides: tuple[Pair, Pair]) -> None:
    other = both(store.port, "other")
    with pytest.raises(PeerLost):
        sides[0].receive(blank(16), 0.2)
    sending = other[0].begin_send(noise(16))
    into = blank(16)
    other[1].receive(into, SECONDS)
    finish(sending, SECONDS)
    assert into.equal(noise(16))


# -- processes that end


def endless(port: int, act: Callable[[Pair, torch.Tensor], None]) -> None:
    """Send or receive until the process is killed."""
    repeat(act, connect(port, "pair", first=False), blank(LARGE))


def repeat(act: Callable[[Pair, torch.Tensor], None], pair: Pair, data: torch.Tensor) -> None:
    while True:
        act(pair, data)


def give(pair: Pair, data: torch.Tensor) -> None:
    pair.send(data, SECONDS)


def take(pair: Pair, into: torch.Tensor) -> None:
    pair.receive(into, SECONDS)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("act", "act_of_peer"), [(take, give), (give, take)])
def test_a_peer_that_is_killed_in_a_message_is_lost(
    store: TCPStore,
    act: Callable[[Pair, torch.Tensor], None],
    act_of_peer: Callable[[Pair, torch.Tensor], None],
) -> None:
    peer = forks.context().Process(target=endless, args=(store.port, act_of_peer), daemon=True)
    peer.start()
    try:
        pair, data = connect(store.port, "pair", first=True), blank(LARGE)
        act(pair, data)
        peer.kill()
        with pytest.raises(PeerLost, match=LOST):
            repeat(act, pair, data)  # a few more messages may have passed before the kill
    finally:
        peer.kill()
        peer.join()


def test_a_message_is_received_while_it_is_wanted(sides: tuple[Pair, Pair]) -> None:
    wanted, into = iter((True, True, False)), blank(3)
    with pytest.raises(PeerLost, match="no message is expected any more"):
        sides[1].receive_while(lambda: next(wanted), into, SECONDS)


def test_a_message_that_comes_late_is_received(sides: tuple[Pair, Pair]) -> None:
    sent, into = torch.tensor([1, 0, 2], dtype=torch.uint8), blank(3)
    looks = 0

    def wanted() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            sides[0].send(sent, SECONDS)
        return True

    sides[1].receive_while(wanted, into, SECONDS)
    assert into.equal(sent)
    assert looks >= 2


@pytest.mark.parametrize("act", [give, take])
def test_an_ended_pair_begins_no_message(
    sides: tuple[Pair, Pair], act: Callable[[Pair, torch.Tensor], None]
) -> None:
    sides[0].end()
    with pytest.raises(PeerLost, match="this rank has ended the connection"):
        act(sides[0], blank(3))


def test_a_closed_pair_begins_no_message_and_the_peer_is_lost(sides: tuple[Pair, Pair]) -> None:
    sides[0].close()
    with pytest.raises(PeerLost, match="this rank has ended the connection"):
        give(sides[0], blank(3))
    with pytest.raises(PeerLost, match=LOST):
        take(sides[1], blank(3))


EXIT = """
import sys, threading, torch
from datetime import timedelta
from torch.distributed import TCPStore
from ckptd.agent.peers.pair import Pair

port, act, code = sys.argv[1:]
store = TCPStore("localhost", int(port), is_master=False)
pair = Pair(store, "pair", first=False, seconds=60.0)
data = torch.zeros(1 << 25, dtype=torch.uint8)
threading.Thread(target=getattr(pair, act), args=(data, 366 * 86400.0), daemon=True).start()
print("waits", flush=True)
store.wait(["end"], timedelta(seconds=60))
sys.exit(int(code))
"""
"""A script whose thread receives or sends what never comes to its end."""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("act", "code"), [("receive", 3), ("send", 0)])
def test_a_message_under_way_does_not_keep_a_process_from_its_end(
    store: TCPStore, act: str, code: int, tmp_path: Path
) -> None:
    process = Python("-c", EXIT, store.port, act, code, place=tmp_path, finalized=True)
    pair = connect(store.port, "pair", first=True)
    until(lambda: process.out.exists() and process.out.read_text() == "waits\n", "the message")
    store.set("end", "")
    ended = process.communicate(SECONDS)
    assert (ended.returncode, ended.stderr) == (code, "")
    with pytest.raises(PeerLost, match=LOST):
        take(pair, blank(LARGE))
