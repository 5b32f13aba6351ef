"""The answer to what the nodes hold."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from ckptd.shared.formats.replicas import Brief
from ckptd.shared.wire.board import (
    MOST_STEPS,
    Answer,
    Holding,
    answer,
    is_news,
    is_quiet,
    waits_for_copies,
)
from tests.support.cases import each_case

NOTHING = Answer()


def test_a_step_is_common_once_every_node_lists_it_and_stays_so() -> None:
    nodes = {"a": Holding(held=[1, 2], done=2), "b": Holding(held=[1], done=1)}
    first = answer(nodes, NOTHING)
    assert first == Answer(common=[1])
    assert answer(
        {"a": Holding(held=[2], done=2, durable=1), "b": Holding(held=[2], done=2, durable=1)},
        first,
    ) == Answer(common=[1, 2])


def test_a_step_is_dead_once_a_node_is_done_with_it() -> None:
    waiting = {"a": Holding(held=[1], done=1), "b": Holding(held=[], done=0)}
    assert answer(waiting, NOTHING) == NOTHING
    failed = waiting | {
        "b": Holding(held=[], done=1, failed={1: ("storage", "rank 1: disk full (on b)")})
    }
    dead = Answer(dead={1: ("storage", "rank 1: disk full (on b)")})
    assert answer(failed, NOTHING) == dead
    assert answer(waiting | {"b": Holding(held=[], done=5)}, NOTHING) == Answer(
        dead={1: ("snapshot-failed", "step 1 was not taken on b")}
    )
    assert answer(waiting, dead) == dead


def test_a_step_that_no_node_holds_is_neither() -> None:
    assert answer({"a": Holding(done=3), "b": Holding(done=2)}, NOTHING) == NOTHING


def test_what_is_durable_is_not_dead_on_nodes_that_have_freed_it() -> None:
    freed = Holding(held=[3], done=3, durable=1)
    assert answer({"a": freed, "b": Holding(held=[1, 3], done=3)}, NOTHING) == Answer(common=[3])


def test_a_node_that_has_shown_nothing_holds_nothing_up() -> None:
    assert answer({"a": Holding(held=[1], done=1), "b": Holding()}, NOTHING) == NOTHING
    assert answer({}, NOTHING) == NOTHING


def test_no_step_is_replicated_any_more_once_a_copy_has_failed() -> None:
    """Check that a later copy does not count: the slots of the step may be free by then."""
    before = Answer(common=[1, 2], replicating=2, replicated=[1])
    held: dict[str, Any] = {"held": [1, 2], "wanted": [1, 2], "done": 2}
    ended = answer(
        {"a": Holding(**held, ranks=[0], alone="rank 0: lost"), "b": Holding(**held, ranks=[1])},
        before,
    )
    assert ended == Answer(common=[1, 2], replicated=[1], alone="rank 0: lost")
    whole = {
        "a": Holding(**held, ranks=[0], hosted={2: [1]}),
        "b": Holding(**held, ranks=[1], hosted={2: [0]}),
    }
    assert answer(whole, ended) == ended


def test_an_answer_stays_small() -> None:
    found = NOTHING
    for step in range(3 * MOST_STEPS):
        dies = step % 2 == 0
        found = answer(
            {
                "a": Holding(held=[step], done=step),
                "b": Holding(held=[] if dies else [step], done=step),
            },
            found,
        )
    assert found.common == list(range(MOST_STEPS + 1, 3 * MOST_STEPS, 2))[-MOST_STEPS:]
    assert list(found.dead) == list(range(MOST_STEPS, 3 * MOST_STEPS, 2))[-MOST_STEPS:]


def test_no_step_is_both_common_and_dead() -> None:
    """Try all holdings of two steps on two nodes, one after the other."""
    ways = [
        Holding(held=list(held), done=done, durable=durable)
        for held in ([], [1], [2], [1, 2])
        for done in (-1, 1, 2)
        for durable in (-1, 1)
        if max(held, default=0) <= max(done, 0) or done == -1
    ]
    assert len(ways) > 10
    for one, other in itertools.product(ways, ways):
        first = answer({"a": one, "b": other}, NOTHING)
        assert not set(first.common) & first.dead.keys()
        for later in ways:
            second = answer({"a": later, "b": other}, first)
            assert not set(second.common) & second.dead.keys(), (one, other, later)
            assert set(first.common) <= set(second.common)
            assert first.dead.items() <= second.dead.items()


# -- missing ranks

CAME = Holding(held=[1, 2], done=2, ranks=[0, 1], overdue=[2])
"""A node that has sealed steps 1 and 2, and waits for step 2."""


@each_case(
    ("other", "missing"),
    [
        (Holding(held=[1], done=1, ranks=[2, 3]), {2: [2, 3]}),
        (Holding(held=[1], done=1, ranks=[2, 3], begun={2: [3]}), {2: [3]}),
        (Holding(held=[1], done=1, ranks=[2, 3], begun={2: []}), {}),  # its ranks still copy
        (Holding(held=[1], done=1), {}),  # an older daemon, which does not show what it has begun
        (Holding(held=[1, 2], done=2, ranks=[2, 3]), {}),
        (Holding(held=[1], done=2, ranks=[2, 3]), {}),  # the step is dead
        (Holding(held=[1], done=1, durable=2, ranks=[2, 3]), {}),
    ],
)
def test_the_ranks_of_a_node_that_shows_nothing_of_an_overdue_step_are_missing(
    other: Holding, missing: dict[int, list[int]]
) -> None:
    assert answer({"a": CAME, "b": other}, NOTHING).missing == missing


def test_ranks_of_all_nodes_are_missing_together() -> None:
    one = Holding(done=4, ranks=[0, 1], begun={5: [1]}, overdue=[5])
    others = {"b": Holding(done=4, ranks=[3, 5]), "c": Holding(done=4, ranks=[2, 4])}
    assert answer({"a": one, **others}, NOTHING).missing == {5: [1, 2, 3, 4, 5]}
    assert answer({"a": msgspec.structs.replace(one, overdue=[]), **others}, NOTHING).missing == {}


def test_only_the_first_step_that_misses_a_rank_is_named() -> None:
    node = Holding(done=4, ranks=[0, 1], begun={5: [], 6: [1], 7: [0, 1]}, overdue=[5, 6, 7])
    assert answer({"a": node}, NOTHING).missing == {6: [1]}
    assert answer({"a": node}, Answer(common=[6])).missing == {7: [0, 1]}


def test_old_nodes_get_the_answer_that_they_know() -> None:
    assert msgspec.msgpack.encode(Answer()) == msgspec.msgpack.encode({})
    assert msgspec.msgpack.encode(Answer(common=[1])) == msgspec.msgpack.encode({"common": [1]})


# -- news


@each_case(
    ("before", "after", "news"),
    [
        (None, Holding(), True),
        (Holding(), Holding(), False),
        (Holding(done=1), Holding(held=[2], done=2), True),
        (Holding(done=1), Holding(done=2), True),  # skipped: other nodes may hold it
        (Holding(held=[2], done=2), Holding(held=[], done=2), True),  # lost
        (Holding(held=[2], done=2), Holding(held=[], done=2, durable=2), False),
        (Holding(held=[1, 2], done=2), Holding(held=[2], done=2), False),  # 1 is common
        (Holding(held=[3], done=3), Holding(held=[], done=3), False),  # 3 is dead
        (Holding(), Holding(failed={4: ("storage", "full")}), True),
        (Holding(failed={4: ("storage", "full")}), Holding(), False),
        (Holding(), Holding(begun={2: [1]}), True),
        (Holding(begun={2: [1]}), Holding(begun={2: []}), True),  # rank 1 has come
        (Holding(begun={2: []}), Holding(begun={2: []}), False),
        (Holding(begun={2: []}), Holding(), False),  # another change says why
        (Holding(), Holding(overdue=[2]), True),
        (Holding(overdue=[2]), Holding(overdue=[2]), False),
        (Holding(overdue=[2]), Holding(), False),
        (Holding(), Holding(overdue=[1]), False),  # 1 is common
    ],
)
def test_only_what_another_node_may_wait_for_is_news(
    before: Holding | None, after: Holding, news: bool
) -> None:
    assert is_news(after, before, Answer(common=[1], dead={3: ("storage", "full")})) == news


# -- quiet


@each_case(
    ("one", "other", "quiet"),
    [
        (Holding(), Holding(), True),
        (Holding(held=[1], done=1), Holding(held=[1], done=1), True),  # 1 is common
        (Holding(held=[3], done=3), Holding(done=3), True),  # 3 is dead
        (Holding(held=[4], done=4, durable=4), Holding(done=4), True),  # freed on the other node
        (Holding(held=[4], done=4), Holding(done=4, durable=4), True),
        (Holding(done=4), Holding(held=[4], done=4), False),
        # The other node may still seal 4, which this one has skipped.
        (Holding(done=4), Holding(done=3), False),
        (Holding(held=[1], done=1), Holding(held=[1, 2], done=2), False),
    ],
)
def test_it_is_quiet_only_while_no_node_waits_for_another_one(
    one: Holding, other: Holding, quiet: bool
) -> None:
    given = Answer(common=[1], dead={3: ("storage", "full")})
    assert (
        is_quiet({"a": one, "b": other}, given) == is_quiet({"a": other, "b": one}, given) == quiet
    )


def brief(digest: bytes, ranks: str = "rank 0", key: str = "") -> Brief:
    return Brief(b"groupAAA", digest, ranks, key)


def test_a_step_in_which_nodes_differ_is_dead_instead_of_common() -> None:
    alike = {
        "a": Holding(held=[1], done=1, replicas={1: [brief(b"x")]}),
        "b": Holding(held=[1], done=1, replicas={1: [brief(b"x")]}),
    }
    assert answer(alike, NOTHING) == Answer(common=[1])
    older = alike | {"b": Holding(held=[1], done=1)}
    assert answer(older, NOTHING) == Answer(common=[1]), (
        "a node of an older version shows no digests"
    )
    unlike = alike | {
        "b": Holding(
            held=[1], done=1, replicas={1: [brief(b"y", "ranks 1, 2", "experts.0.weight")]}
        )
    }
    why = (
        "step 1 failed: at least one of the tensors that rank 0 and ranks 1, 2 share differs "
        "between them (the first of these tensors is "
        "experts.0.weight): mark what is each rank's own with per_rank(...)"
    )
    assert answer(unlike, NOTHING) == Answer(dead={1: ("snapshot-failed", why)})
    assert answer(alike, Answer(dead={1: ("snapshot-failed", why)})).common == [], "it stays so"


# -- copies in the memory of peers


def peer(rank: int, **fields: Any) -> Holding:
    """Return the holding of a node of one rank that holds steps 4 and 5."""
    given: dict[str, Any] = {"held": [4, 5], "done": 5, "ranks": [rank]}
    return Holding(**given | fields)


@each_case(
    ("wanted", "before", "expected"),
    [
        (([4, 5], [4, 5]), Answer(), 5),  # the newest that all are to copy
        (([4, 5], [4]), Answer(), 4),
        (([4], [5]), Answer(), -1),
        (([4, 5], [4, 5]), Answer(replicating=4), 4),  # until all have copied it
        (([5], [5]), Answer(replicating=4), 5),  # a node no longer holds step 4
        (([4, 5], [4, 5]), Answer(replicating=4, replicated=[4]), 5),
        (([4, 5], [4, 5]), Answer(replicated=[5]), -1),  # never an older step afterwards
        (([4, 5], [4, 5]), Answer(replicating=5, alone="rank 1: no room (node1)"), -1),
    ],
)
def test_all_nodes_copy_one_step_at_a_time(
    wanted: tuple[list[int], list[int]], before: Answer, expected: int
) -> None:
    nodes = {f"node{rank}": peer(rank, wanted=wanted[rank]) for rank in range(2)}
    assert answer(nodes, before).replicating == expected


def test_a_step_that_not_all_nodes_hold_is_not_copied() -> None:
    nodes = {"node0": peer(0, wanted=[5]), "node1": peer(1, held=[4], done=4, wanted=[])}
    assert answer(nodes, Answer()).replicating == -1


@each_case(
    ("hosted", "replicated"),
    [
        (({}, {5: [0]}), []),
        (({5: [1]}, {5: [0]}), [5]),
        (({5: [1]}, {4: [0]}), []),
        (({5: [1, 0]}, {}), [5]),
        (({6: [1]}, {6: [0]}), []),  # step 6 is not common
    ],
)
def test_a_step_is_replicated_once_every_node_has_a_whole_copy_elsewhere(
    hosted: tuple[dict[int, list[int]], dict[int, list[int]]], replicated: list[int]
) -> None:
    nodes = {f"node{rank}": peer(rank, hosted=hosted[rank]) for rank in range(2)}
    found = answer(nodes, Answer(common=[4, 5]))
    assert found.replicated == replicated
    assert answer({f"node{rank}": peer(rank) for rank in range(2)}, found).replicated == replicated


def test_one_node_without_a_peer_ends_the_copies_of_all() -> None:
    nodes = {"node0": peer(0, wanted=[5]), "node1": peer(1, wanted=[5], alone="rank 1: no room")}
    found = answer(nodes, Answer())
    assert (found.alone, found.replicating) == ("rank 1: no room", -1)
    assert answer({"node0": peer(0), "node1": peer(1)}, found).alone == found.alone


@pytest.mark.parametrize(
    ("changes", "news"),
    [
        ({"hosted": {5: [0]}}, True),
        ({"alone": "the peer is gone"}, True),
        ({"wanted": [5]}, False),  # the step itself is the news
    ],
)
def test_changes_of_copies_are_news(changes: dict[str, Any], news: bool) -> None:
    known = Answer(common=[4, 5])
    assert is_news(peer(1, **changes), peer(1), known) is news


@each_case(
    ("known", "copied"),
    [
        (Answer(common=[5]), False),
        (Answer(replicated=[4]), False),
        (Answer(replicated=[5]), True),
        (Answer(replicated=[6]), True),
        (Answer(alone="the peer is gone"), True),
        (Answer(dead={5: ("snapshot-failed", "")}), True),
    ],
)
def test_a_step_is_waited_for_until_it_is_replicated_or_will_not_be(
    known: Answer, copied: bool
) -> None:
    assert waits_for_copies(peer(1, wanted=[5]), known) is not copied
    nodes = {f"node{rank}": peer(rank, wanted=[5], durable=5) for rank in range(2)}
    assert is_quiet(nodes, known) is copied


def test_a_node_that_makes_no_copies_any_more_waits_until_all_know() -> None:
    alone = peer(1, alone="no room")
    assert waits_for_copies(alone, Answer())
    assert not waits_for_copies(alone, Answer(alone="no room (node1)"))
    assert not waits_for_copies(peer(1), Answer())


# -- a node is drained


def test_a_drained_step_is_told_to_all_nodes_once_they_all_hold_it() -> None:
    one, other = Holding(held=[5], done=5, drained=[5]), Holding(held=[5], done=5)
    assert answer({"a": one, "b": Holding(done=4)}, NOTHING) == NOTHING
    told = answer({"a": one, "b": other}, NOTHING)
    assert told == Answer(common=[5], drained=[5])
    freed = Holding(held=[6], done=6)
    assert answer({"a": freed, "b": freed}, told) == Answer(common=[5, 6], drained=[5])


@pytest.mark.parametrize(("before", "news"), [([], True), ([5], False), ([4, 5], False)])
def test_a_step_that_is_drained_is_news(before: list[int], news: bool) -> None:
    """The step itself is none, because all nodes hold it."""
    written = Holding(held=[4, 5], done=5, drained=before)
    now = Holding(held=[4, 5], done=5, drained=[5])
    assert is_news(now, written, Answer(common=[4, 5])) is news


@pytest.mark.parametrize(
    ("known", "durable", "quiet"),
    [
        (Answer(common=[5]), -1, False),
        (Answer(common=[5], drained=[5]), -1, True),
        (Answer(common=[5]), 5, True),
    ],
)
def test_nodes_wait_until_a_drained_step_is_told_or_durable(
    known: Answer, durable: int, quiet: bool
) -> None:
    one = Holding(held=[5], done=5, durable=durable, drained=[5])
    assert is_quiet({"a": one, "b": Holding(held=[5], done=5)}, known) is quiet
