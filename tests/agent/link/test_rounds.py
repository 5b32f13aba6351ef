"""Tests rounds over the job's store: all ranks get one answer or one error with a rank's name, within a deadline, and nothing is left
behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ckptd.agent.link.rounds import Alone, Exchange
from ckptd.shared.errors import CkptdError, SnapshotFailed, StructureChanged, UnsavableValue

WORLD = 3
Answer = bytes | CkptdError


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def ranks(store: TCPStore) -> list[Exchange]:
    return [Exchange(store, rank, WORLD) for rank in range(WORLD)]


def attempt(call: Callable[[], bytes]) -> Answer:
    try:
        return call()
    except CkptdError as error:
        return error


def together(ranks: list[Exchange], mine: list[Any], decide: Callable[[list[bytes]], list[bytes]], **more: Any) -> list[Any]:
    """Return what each rank gets from a round. Ranks that give None do not take part."""

    def go(rank: Exchange, own: Answer) -> Answer:
        return attempt(lambda: rank.round("topic", own, decide, **{"seconds": 20.0, **more}))

    with ThreadPoolExecutor(WORLD) as pool:
        jobs = [None if own is None else pool.submit(go, rank, own) for rank, own in zip(ranks, mine, strict=True)]
        return [None if job is None else job.result() for job in jobs]


def reverse(said: list[bytes]) -> list[bytes]:
    return said[::-1]


def test_each_gets_its_answer_and_the_store_is_empty_again(store: TCPStore, ranks: list[Exchange]) -> None:
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
    assert [(type(error), str(error)) for error in found] == [(StructureChanged, "3 differ")] * WORLD


@pytest.mark.parametrize("late", [1, 2])
def test_a_missing_rank_is_named_to_all(ranks: list[Exchange], late: int) -> None:
    found = together(ranks, [None if rank == late else b"" for rank in range(WORLD)], reverse, seconds=2.0)
    said = {str(error) for error in found if error is not None}
    assert len(said) == 1
    assert said.pop().startswith(f"rank {late} sent nothing within ")


def test_a_missing_rank_0_is_an_error_on_the_others(ranks: list[Exchange]) -> None:
    found = together(ranks, [None, b"", b""], reverse, seconds=0.2)
    assert [str(error) for error in found[1:]] == ["rank 0 has not answered within 0 s"] * 2


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
        return [rank.round(topic, f"{number}{topic}".encode(), lambda said: [b"".join(said)] * 2, 20.0) for topic in ("a", "b")]

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(go, number, rank) for number, job in enumerate(jobs) for rank in job]
        assert [job.result() for job in found] == [[b"0a0a", b"0b0b"]] * 2 + [[b"1a1a", b"1b1b"]] * 2


def test_a_store_that_is_gone_is_an_error() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    rank = Exchange(store, 1, 2)
    del store
    with pytest.raises(SnapshotFailed, match=r"^the job's store cannot be reached: "):
        rank.round("topic", b"", reverse, 0.2)


def serve(pipe: Any) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def test_a_store_that_is_stopped_blocks_no_rank() -> None:
    """Its client would wait as long as the store is stopped."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,), daemon=True)
    server.start()
    try:
        rank = Exchange(TCPStore("localhost", here.recv(), is_master=False), 1, 2)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        for _ in range(3):
            with pytest.raises(SnapshotFailed, match="^the job's store has not answered for 5 s: is the process that serves it stopped"):
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
