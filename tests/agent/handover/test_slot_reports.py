"""Seals are reported, and slots given back, until the daemon has confirmed each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from ckptd.agent.handover.slot_reports import MAX_REASON, Returns, Seals
from ckptd.agent.link.client import Client
from ckptd.agent.pending import PendingSnapshot
from ckptd.shared.errors import CkptdError, Fenced, QuotaExceeded, SnapshotFailed, StorageError
from ckptd.shared.formats.segment import SlotState
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.lifecycle import Event


class Wire:
    """In the place of a Client: keeps what is posted; the test answers."""

    def __init__(self) -> None:
        self.welcome = m.Welcome(re=0, version=1)
        self.posted: list[tuple[m.Request, Callable[[m.Reply], None]]] = []

    def post(self, make: Callable[[int], m.Request], answered: Callable[[m.Reply], None]) -> None:
        self.posted.append((make(len(self.posted)), answered))


def sealed(step: int, segment: str = "a") -> PendingSnapshot:
    pending = PendingSnapshot(step, 1)
    pending.segment = segment
    for event in (Event.GRANT, Event.STAGE, Event.SEAL):
        pending.move(event)
    return pending


class World:
    def __init__(self, *snapshots: PendingSnapshot) -> None:
        self.wire = Wire()
        self.pending = {(snapshot.attempt, snapshot.step): snapshot for snapshot in snapshots}
        self.seals = Seals(cast(Client, self.wire), self.pending)


def test_a_seal_names_its_segment_and_step() -> None:
    one = sealed(5, "a.seg")
    one.unlocked = 77
    world = World(one)
    world.seals.hand_over(one)
    assert [request for request, _ in world.wire.posted] == [
        m.Seal(id=0, segment="a.seg", attempt=1, step=5, unlocked=77)
    ]
    one.uncompared = True
    world.seals.hand_over(one)
    assert world.wire.posted[1][0] == m.Seal(
        id=1, segment="a.seg", attempt=1, step=5, uncompared=True, unlocked=77
    )


@pytest.mark.parametrize(
    ("reply", "state", "error"),
    [
        (m.Sealed(re=0), "sealed", None),
        (m.Sealed(re=0, durable=True), "durable", None),
        (
            m.Error(re=0, code=Fenced.code, message="attempt 2 has begun"),
            "failed",
            "attempt 2 has begun",
        ),
        (m.Done(re=0), "sealed", None),
    ],
    ids=["taken", "committed already", "refused", "another reply"],
)
def test_the_reply_to_a_seal(reply: m.Reply, state: str, error: str | None) -> None:
    one = sealed(5)
    world = World(one)
    world.seals.hand_over(one)
    world.wire.posted[0][1](reply)
    assert (one.state, one.error and str(one.error)) == (state, error)
    assert list(world.pending) == ([(1, 5)] if state == "sealed" else [])


def test_after_a_lost_connection_what_is_sealed_is_reported_again() -> None:
    staged, one, durable = PendingSnapshot(7, 1), sealed(5), sealed(6)
    world = World(staged, one, durable)
    world.seals.finish(durable, None)
    world.seals.hand_over_again()
    world.seals.hand_over_again()
    assert [cast(m.Seal, request).step for request, _ in world.wire.posted] == [5, 5]


def test_the_first_outcome_counts() -> None:
    one = sealed(5)
    world = World(one)
    world.seals.finish(one, None)
    world.seals.finish(one, StorageError("late"))
    assert (one.state, one.error) == ("durable", None)


def test_every_snapshot_fails_when_the_attempt_is_lost() -> None:
    snapshots = [sealed(step) for step in range(3)]
    world = World(*snapshots)
    world.seals.fail_all(Fenced("attempt 2 has begun"))
    assert [type(snapshot.error) for snapshot in snapshots] == [Fenced] * 3
    assert world.pending == {}


# -- a daemon with a stage


def staged(*steps: int) -> tuple[World, list[PendingSnapshot]]:
    """Return a world whose daemon has a stage, and snapshots that are durable there."""
    pending = [sealed(step) for step in steps]
    world = World(*pending)
    world.wire.welcome = m.Welcome(re=0, version=1, stage="/nvme/stage")
    for one in pending:
        world.seals.finish(one, None)
    return world, pending


def test_a_durable_checkpoint_is_uploaded_once_the_daemon_says_so() -> None:
    world, (one, two) = staged(5, 6)
    assert [one.state, two.state] == ["durable", "durable"]
    world.seals.follow_uploads(m.Uploads(re=0, attempt=2, uploaded=[5, 6]))  # another attempt
    world.seals.follow_uploads(m.Uploads(re=0, attempt=1, waiting=[5, 6]))
    with pytest.raises(TimeoutError, match="step 5 is durable, not uploaded"):
        one.wait("uploaded", timeout=0)
    world.seals.follow_uploads(m.Uploads(re=0, attempt=1, uploaded=[5], waiting=[6]))
    assert [one.state, two.state] == ["uploaded", "durable"]
    one.wait("durable", timeout=0)
    one.wait("uploaded", timeout=0)


def test_a_checkpoint_that_no_longer_waits_and_is_not_in_the_root_is_not_called_uploaded() -> None:
    world, (one,) = staged(5)
    world.seals.follow_uploads(m.Uploads(re=0, attempt=1, uploaded=[6]))
    with pytest.raises(
        SnapshotFailed, match="step 5 is not in the root, and does not wait for its upload"
    ):
        one.wait("uploaded", timeout=0)
    one.wait("durable", timeout=0)
    assert one.state == "durable"


def test_an_upload_that_was_told_before_the_seal_was_confirmed_counts() -> None:
    """As after a restart of the daemon, which tells what is uploaded before it hears of
    the seal again.
    """
    world, _ = staged()
    late = sealed(5)
    world.seals.follow_uploads(m.Uploads(re=0, attempt=1, uploaded=[5]))
    world.seals.finish(late, None)
    assert late.state == "uploaded"


def test_nothing_waits_for_an_upload_after_the_agent_is_closed() -> None:
    world, (one,) = staged(5)
    world.seals.fail_all(Fenced("attempt 2 has begun"))
    with pytest.raises(Fenced, match="attempt 2 has begun"):
        one.wait("uploaded", timeout=0)
    assert one.state == "durable"


# -- copies in the memory of other nodes


def copying(*steps: int) -> tuple[World, list[PendingSnapshot]]:
    """Return a world whose snapshots are sealed, and are to be copied."""
    pending = [sealed(step, f"{step}.seg") for step in steps]
    world = World(*pending)
    for one in pending:
        one.expect_copy(None)
        world.seals.hand_over(one)
    return world, pending


def news(attempt: int = 1, **fields: Any) -> m.PeerReplicas:
    return m.PeerReplicas(re=0, attempt=attempt, **fields)


def told(pending: PendingSnapshot) -> str:
    try:
        pending.wait("replicated", timeout=0)
    except TimeoutError:
        return "waits"
    except CkptdError as error:
        return str(error)
    return "copied"


def test_a_snapshot_is_copied_once_all_nodes_have_copied_it() -> None:
    world, (five, six) = copying(5, 6)
    world.seals.follow_copies(news(attempt=2, replicated=[5, 6], alone="another attempt"))
    world.seals.follow_copies(news(replicating=5))
    assert [told(five), told(six)] == ["waits", "waits"]
    world.seals.follow_copies(news(replicating=6, replicated=[5]))
    assert [told(five), told(six)] == ["copied", "waits"]
    world.seals.finish(six, None)
    world.seals.follow_copies(news(replicated=[5, 6]))
    assert [told(five), told(six)] == ["copied", "copied"]


def test_a_step_that_was_passed_over_is_not_copied_any_more() -> None:
    world, (five, six, seven) = copying(5, 6, 7)
    world.seals.follow_copies(news(replicated=[6]))
    assert [told(five), told(six), told(seven)] == [
        "step 5 is not copied, because step 6 is",
        "copied",
        "waits",
    ]


def test_without_a_peer_nothing_is_copied_now_or_later() -> None:
    world, (five,) = copying(5)
    world.seals.follow_copies(news(alone="rank 3: no room (node-b)"))
    late = sealed(6)
    late.expect_copy(None)
    world.seals.hand_over(late)
    assert [told(five), told(late)] == [
        "step 5 is not copied: rank 3: no room (node-b)",
        "step 6 is not copied: rank 3: no room (node-b)",
    ]


def test_a_copy_that_was_told_before_it_was_handed_over_counts() -> None:
    """As on a rank that seals last, while its node is held up."""
    world, _ = copying()
    world.seals.follow_copies(news(replicated=[5]))
    late = sealed(5)
    late.expect_copy(None)
    world.seals.hand_over(late)
    assert told(late) == "copied"


def test_nothing_waits_for_a_copy_after_the_agent_is_closed() -> None:
    world, (five, six) = copying(5, 6)
    world.seals.finish(six, None)
    world.seals.stop_following(SnapshotFailed("this agent is closed"))
    world.seals.follow_copies(news(replicated=[5, 6]))
    assert [told(five), told(six)] == ["this agent is closed"] * 2
    assert [five.state, six.state] == ["sealed", "durable"]


REPLACED = "step 5 is not copied: a newer snapshot has replaced it in memory first"


@pytest.mark.parametrize(
    "before",
    [[], [news(replicating=4)], [news(replicating=6, replicated=[4])], [news(2, replicating=5)]],
)
def test_a_slot_that_is_filled_again_before_its_copy_has_begun_is_not_copied(
    before: list[m.PeerReplicas],
) -> None:
    world, (five, six) = copying(5, 6)
    for each in before:
        world.seals.follow_copies(each)
    world.seals.refill("5.seg")
    assert [told(five), told(six)] == [REPLACED, "waits"]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([], "waits"),
        ([news(replicated=[5])], "copied"),
        ([news(replicating=6)], REPLACED),
        ([news(replicated=[6])], "step 5 is not copied, because step 6 is"),
    ],
)
def test_a_slot_that_this_node_has_copied_may_be_filled_before_other_nodes_have(
    after: list[m.PeerReplicas], said: str
) -> None:
    world, (five,) = copying(5)
    world.seals.follow_copies(news(replicating=5))
    world.seals.refill("5.seg")
    for each in after:
        world.seals.follow_copies(each)
    assert told(five) == said


def test_nothing_waits_for_a_copy_after_the_attempt() -> None:
    world, (five, six) = copying(5, 6)
    world.seals.follow_copies(news(replicating=6, replicated=[5]))
    world.seals.stop_copying(SnapshotFailed("the next attempt has begun"))
    assert [told(five), told(six)] == ["copied", "the next attempt has begun"]


def test_a_snapshot_that_fails_after_its_seal_is_not_copied() -> None:
    world, (five,) = copying(5)
    world.seals.finish(five, StorageError("disk full"))
    assert told(five) == "disk full"


class SettledMeanwhile(PendingSnapshot):
    """A snapshot with which another thread settles the copies in the same moment."""

    seals: Seals

    def replicate(self, error: CkptdError | None) -> None:
        if not self.replicated:
            super().replicate(error)
            self.seals.follow_copies(m.PeerReplicas(re=0, attempt=1, replicated=[5]))


def test_two_threads_may_settle_the_same_copy() -> None:
    one = SettledMeanwhile(5, 1)
    world = World(one)
    one.seals = world.seals
    one.expect_copy(None)
    world.seals.hand_over(one)
    world.seals.follow_copies(m.PeerReplicas(re=0, attempt=1, replicated=[5]))
    assert one.replicated


# -- slots that are given back


def sent(wire: Wire) -> list[tuple[str, int | None, str, str]]:
    return [
        (r.segment, r.step, r.reason, r.code) for r, _ in wire.posted if isinstance(r, m.Abandon)
    ]


class FakeSlot:
    def __init__(self, step: int | None, state: SlotState, error: Exception | None = None) -> None:
        self.name = "segment"
        self.header = self
        self.step, self.state, self._error, self.cleared = step, state, error, 0

    def clear(self) -> None:
        self.cleared += 1
        if self._error is not None:
            raise self._error


def make() -> tuple[Wire, Returns]:
    wire = Wire()
    return wire, Returns(cast(Client, wire))


def test_an_unconfirmed_return_is_sent_again() -> None:
    wire, returns = make()
    returns.send("a", 1, QuotaExceeded("too small"))
    returns.send("b", 2)
    wire.posted[0][1](m.Done(re=0))
    returns.send_again()
    assert sent(wire) == [("a", 1, "too small", "quota"), ("b", 2, "", ""), ("b", 2, "", "")]
    wire.posted[2][1](m.Done(re=2))
    wire.posted[1][1](m.Done(re=1))  # the answer to the first one comes late
    returns.send_again()
    assert len(wire.posted) == 3


def test_nothing_is_sent_again_for_an_attempt_that_is_over() -> None:
    wire, returns = make()
    returns.send("a", 1)
    returns.clear()
    returns.send_again()
    assert len(wire.posted) == 1


def test_a_long_reason_is_cut() -> None:
    wire, returns = make()
    returns.send("a", 1, ValueError("x" * 10_000))
    assert sent(wire) == [("a", 1, "x" * MAX_REASON, "")]


def test_a_slot_is_cleared_only_if_it_still_belongs_to_the_step() -> None:
    for slot, times in (
        (FakeSlot(1, SlotState.FILLING), 1),
        (FakeSlot(1, SlotState.FREE), 0),
        (FakeSlot(2, SlotState.FILLING), 0),
        (FakeSlot(1, SlotState.FILLING, ValueError("descriptors are closed")), 1),
    ):
        wire, returns = make()
        returns.give_back(cast(Any, slot), 1, None)
        assert slot.cleared == times
        assert sent(wire) == [("segment", 1, "", "")]
