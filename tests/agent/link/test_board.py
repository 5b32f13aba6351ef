"""The boards of several nodes over a real store."""

from __future__ import annotations

import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import msgspec
import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ckptd.agent.link import board as board_module
from ckptd.agent.link.board import Board, Silence
from ckptd.shared.system import machine
from ckptd.shared.wire.board import Answer, Holding
from tests.support.daemons import until


class Counted:
    """A client of a store that counts requests by their kind."""

    def __init__(self, store: TCPStore) -> None:
        self._store, self.counts = PrefixStore("ckptd", store.clone()), Counter[str]()  # type: ignore[attr-defined]

    @property
    def requests(self) -> int:
        return self.counts.total()

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        self.counts[name] += 1
        return getattr(self._store, name)


class Node:
    def __init__(self, store: TCPStore, rank: int, leaders: list[int]) -> None:
        self.heard: list[Answer] = []
        self.store = Counted(store)
        self.board = Board(self.store, "gpt/board/1", rank, leaders, self.heard.append)  # type: ignore[arg-type]


LEADERS = [0, 2, 5]


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


@pytest.fixture
def nodes(store: TCPStore) -> Iterator[list[Node]]:
    made = [Node(store, leader, LEADERS) for leader in LEADERS]
    yield made
    for node in made:
        node.board.end()


def hears(nodes: list[Node], wanted: Answer) -> Callable[[], bool]:
    return lambda: all(node.heard[-1:] == [wanted] for node in nodes)


def test_all_nodes_learn_that_all_hold_a_step(nodes: list[Node]) -> None:
    for node in nodes[:2]:
        node.board.show(Holding(held=[1], done=1))
    time.sleep(0.1)
    assert [node.heard for node in nodes] == [[], [], []]
    nodes[2].board.show(Holding(held=[1], done=1))
    until(hears(nodes, Answer(common=[1])), "answer")


def test_nodes_that_hold_a_step_learn_that_it_is_dead_from_a_node_that_does_not(
    nodes: list[Node],
) -> None:
    """Even rank 0's own node may not hold the step: it looks at the board all the same."""
    nodes[2].board.show(Holding(held=[1], done=1))
    nodes[1].board.show(Holding(held=[1], done=1))
    nodes[0].board.show(Holding(done=1, failed={1: ("storage", "rank 0: disk full (on node0)")}))
    until(hears(nodes, Answer(dead={1: ("storage", "rank 0: disk full (on node0)")})), "answer")


def test_the_last_answer_is_repeated_for_a_daemon_that_was_restarted(nodes: list[Node]) -> None:
    for node in nodes:
        node.board.show(Holding(held=[4], done=4))
    until(hears(nodes, Answer(common=[4])), "answer")
    nodes[1].board.repeat()
    assert nodes[1].heard[-2:] == [Answer(common=[4])] * 2


def test_a_node_with_nothing_open_asks_nothing(nodes: list[Node]) -> None:
    for node in nodes:
        node.board.show(Holding(held=[1], done=1))
    until(hears(nodes, Answer(common=[1])), "answer")
    time.sleep(0.5)
    before = [node.store.requests for node in nodes[1:]]
    time.sleep(1.0)
    assert [node.store.requests for node in nodes[1:]] == before


def test_a_step_costs_each_node_one_write(nodes: list[Node]) -> None:
    """A step that is durable and freed is not written by itself: the next step carries
    it.
    """
    for step in range(1, 6):
        for node in nodes:
            node.board.show(Holding(held=[step], done=step, durable=step - 1))
        until(hears(nodes, Answer(common=list(range(1, step + 1)))), "answer")
        for node in nodes:
            node.board.show(Holding(held=[], done=step, durable=step))
    # And one write when the attempt begins.
    assert [node.store.counts["set"] for node in nodes] == [5, 1 + 5, 1 + 5]


def test_a_step_that_a_node_has_lost_is_written_at_once(nodes: list[Node]) -> None:
    for node in nodes[1:]:
        node.board.show(Holding(held=[1], done=1))
    time.sleep(0.1)
    nodes[2].board.show(Holding(held=[], done=1))
    until(
        hears(
            nodes[:2],
            Answer(dead={1: ("snapshot-failed", "step 1 was not taken on the node of rank 5")}),
        ),
        "answer",
    )


def test_the_first_look_comes_when_the_answer_was_there_before() -> None:
    """The answer to each step is there at the third look, then at the first."""

    class Answering:
        def __init__(self) -> None:
            self.answers: list[Answer] = []

        def set(self, name: str, value: bytes) -> None:
            pass

        def check(self, names: list[str]) -> bool:
            return True

        def get(self, name: str) -> bytes:
            return msgspec.msgpack.encode(
                self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            )

    store, heard = Answering(), list[Answer]()
    board = Board(store, "gpt/board/1", 1, [0, 1], heard.append)  # type: ignore[arg-type]
    board.end()
    board._thread.join()
    common: list[int] = []
    pauses = []
    for step, looks in [(1, 3), (2, 1), (3, 1), (4, 2)]:
        before, common = Answer(common=common), [*common, step]
        store.answers = [before] * (looks - 1) + [Answer(common=common)]
        board._write(Holding(held=[step], done=step))
        pauses.append(board._pause)
        for _ in range(looks):
            board._look()
        assert heard[-1].common == common
        assert board._next is None
    pauses.append(board._usual)
    assert pauses == pytest.approx([0.005, 0.02, 0.0198, 0.019602, 0.024602])


def test_news_that_come_fast_do_not_put_off_the_look_at_the_steps_before(store: TCPStore) -> None:
    board = Board(Counted(store), "b", 1, [0, 1], lambda answer: None)  # type: ignore[arg-type]
    board.end()
    board._thread.join()
    board._shown = Holding(held=[1], done=1)
    board._write(board._holding)
    first = board._next
    board._usual = 60.0
    board._write(Holding(held=[1], done=2))
    assert board._next == first


def test_a_step_that_has_become_durable_without_the_board_is_not_looked_for(
    store: TCPStore,
) -> None:
    board = Board(Counted(store), "b", 1, [0, 1], lambda answer: None)  # type: ignore[arg-type]
    board.end()
    board._thread.join()
    board._write(Holding(held=[1], done=1))
    board._shown = Holding(done=1, durable=1)
    board._look()
    assert board._next is None


def test_a_node_that_has_not_sealed_an_overdue_step_looks_for_its_missing_ranks(
    store: TCPStore,
) -> None:
    board = Board(Counted(store), "b", 1, [0, 1], lambda answer: None)  # type: ignore[arg-type]
    board.end()
    board._thread.join()
    looks = []
    for overdue in ([], [1]):
        board._shown = Holding(done=0, ranks=[1, 2], begun={1: [2]}, overdue=overdue)
        board._write(board._holding)
        looks.append(board._next is not None)
    assert looks == [False, True]


def test_rank_0_looks_seldom_while_no_node_waits_for_another(store: TCPStore) -> None:
    """A node that has sealed a step which rank 0 has skipped hears of it within a
    second, also if it was late.
    """
    heard: list[Answer] = []
    boards = [Board(Counted(store), "b", rank, [0, 1], heard.append) for rank in (0, 1)]  # type: ignore[arg-type]
    for board in boards:
        board.end()
        board._thread.join()

    def pause_of_rank_0(of_0: Holding, of_1: Holding) -> float:
        boards[1]._write(of_1)
        boards[0]._shown = of_0
        boards[0]._write(of_0)
        boards[0]._look()
        assert boards[0]._next is not None
        return boards[0]._next - time.monotonic()

    assert (
        pause_of_rank_0(Holding(held=[1], done=1), Holding(held=[1], done=1))
        > board_module._IDLE_LOOK
    )
    assert (
        pause_of_rank_0(Holding(held=[1], done=2), Holding(held=[1], done=1))
        <= board_module._IDLE_LOOK
    )
    assert (
        pause_of_rank_0(Holding(held=[1], done=2), Holding(held=[1, 2], done=2))
        > board_module._IDLE_LOOK
    )
    assert list(heard[-1].dead) == [2]


def test_keys_of_boards_that_have_ended_are_deleted(store: TCPStore) -> None:
    client = PrefixStore("ckptd", store.clone())  # type: ignore[attr-defined]
    for attempt in range(6):
        heard: list[Answer] = []
        boards = [
            Board(Counted(store), f"gpt/board/{attempt}", rank, [0, 1], heard.append)  # type: ignore[arg-type]
            for rank in (0, 1)
        ]
        for board in boards:
            board.show(Holding(held=[1], done=1))
        until(partial(operator.eq, [Answer(common=[1])] * 2, heard), "answer")
        for board in boards:
            board.end()
    there = [attempt for attempt in range(6) if client.check([f"gpt/board/{attempt}/answer"])]
    assert there == [3, 4, 5]


def test_keys_of_ended_boards_are_kept_if_a_board_in_another_store_has_their_names(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        board_module, "_ended", deque([["gpt/board/1/holds/1", "gpt/board/1/answer"]] * 3)
    )
    client = PrefixStore("ckptd", store.clone())  # type: ignore[attr-defined]
    client.set("gpt/board/1/holds/1", msgspec.msgpack.encode(Holding(held=[1], done=1)))  # type: ignore[arg-type]
    heard: list[Answer] = []
    board = Board(Counted(store), "gpt/board/1", 0, [0, 1], heard.append)  # type: ignore[arg-type]
    board.show(Holding(held=[1], done=1))
    until(lambda: heard == [Answer(common=[1])], "answer")
    board.end()


def test_boards_of_other_attempts_do_not_mix(store: TCPStore) -> None:
    first = Node(store, 0, [0, 1])
    second = Board(Counted(store), "gpt/board/2", 1, [0, 1], lambda answer: None)  # type: ignore[arg-type]
    second.show(Holding(held=[1], done=1))
    first.board.show(Holding(held=[1], done=1))
    time.sleep(0.3)
    assert first.heard == []
    first.board.end()
    second.end()


def test_a_store_that_fails_for_a_while_is_asked_again(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "_IDLE_LOOK", 0.01)
    good, failures = Counted(store), iter([True] * 5 + [False] * 1000)

    class Failing:
        def __getattr__(self, name: str) -> object:
            if next(failures):
                raise RuntimeError("Connection reset by peer\nmore")
            return getattr(good, name)

    heard: list[Answer] = []
    board = Board(Failing(), "gpt/board/1", 0, [0], heard.append)  # type: ignore[arg-type]
    board.show(Holding(held=[1], done=1))
    until(lambda: heard == [Answer(common=[1])], "answer")
    board.end()


# -- the daemon of a node that hangs


@pytest.mark.parametrize(
    ("reachable", "silent"),
    [
        ([(0.0, False), (119.9, False)], False),
        ([(0.0, False), (60.0, False), (120.0, False)], True),
        ([(0.0, False), (100.0, True), (101.0, False), (220.9, False)], False),
        ([(0.0, True), (500.0, True), (501.0, False)], False),
        ([(0.0, False), (120.0, False), (121.0, True)], True),
    ],
    ids=["not yet", "too long", "it answered meanwhile", "it has just stopped", "it came too late"],
)
def test_a_daemon_is_silent_once_it_was_unreachable_for_long_enough(
    reachable: list[tuple[float, bool]], silent: bool
) -> None:
    watch = Silence()
    for now, up in reachable:
        watch.look(now, reachable=up)
    assert watch.lasted == silent


@pytest.mark.parametrize("hung", [0, 1])
def test_a_node_whose_daemon_hangs_ends_the_copies_of_all(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, hung: int
) -> None:
    """No copy is under way, and the daemon shows nothing any more."""
    monkeypatch.setattr(board_module, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(board_module, "_WATCH_SECONDS", 0.01)
    heard: list[list[Answer]] = [[], []]
    up = [True, True]
    boards = [
        Board(
            Counted(store),  # type: ignore[arg-type]
            "gpt/board/1",
            rank,
            [0, 1],
            heard[rank].append,
            partial(up.__getitem__, rank),
        )
        for rank in (0, 1)
    ]
    for board in boards:
        board.show(Holding(held=[1], done=1))
    until(lambda: all(said[-1:] == [Answer(common=[1])] for said in heard), "answer")
    boards[1 - hung].show(Holding(held=[1, 2], done=2))
    up[hung] = False
    until(lambda: bool(heard[1 - hung][-1].alone), "the end of the copies")
    assert heard[1 - hung][-1].alone.startswith(
        f"rank {hung} on {machine.host()}: its daemon has not answered for 2 minutes: "
    )
    for board in boards:
        board.end()
