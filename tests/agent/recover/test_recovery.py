"""Which candidate is recovered, and what damage, differences and errors do, without a
daemon and without other processes.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from crc32c import crc32c

from ckptd.agent.advice import Restart
from ckptd.agent.link.client import Client
from ckptd.agent.link.rounds import Alone, RankGroup
from ckptd.agent.read.loader import load, materialize
from ckptd.agent.recover import loading, recovery
from ckptd.agent.recover.loading import Loading
from ckptd.agent.recover.options import Options
from ckptd.agent.recover.recovery import Recovered, Recovery, restart
from ckptd.shared.errors import (
    CkptdError,
    ForeignMemory,
    IntegrityError,
    InternalError,
    InvalidRequest,
    NewerFormat,
    NotFound,
    RecoveryFailed,
    StorageError,
    StructureMismatch,
)
from ckptd.shared.formats.plan import chunk_ranges, with_values
from ckptd.shared.formats.segment import read_header, write_check
from ckptd.shared.system.descriptor import Descriptor
from ckptd.shared.wire import messages as m
from ckptd.shared.wire.session import PEERS
from tests.shared.samples import sample_plan, seal
from tests.support.cases import each_case
from tests.support.forged import forge
from tests.support.tmpfs import tmpfs


def candidate(step: int, source: str = "storage", attempt: int = 1) -> m.RecoveryCandidate:
    return m.RecoveryCandidate(
        attempt=attempt, step=step, tag=f"step-{step:08}.a{attempt:04}", source=source
    )


class FakeClient:
    """In the place of a Client: Find gets these candidates, Fetch the descriptors."""

    connected = True

    def __init__(
        self,
        *candidates: m.RecoveryCandidate,
        root: Path | str = "/ckpts",
        damaged: tuple[str, ...] = (),
    ) -> None:
        self.welcome = m.Welcome(re=0, version=1, root=str(root))
        self.found = m.Found(re=0, candidates=list(candidates), damaged=list(damaged))
        self.error: CkptdError | None = None
        self.descriptors: list[Descriptor] = []
        self.asked: list[m.Request] = []
        self.posted: list[m.Request] = []

    def post(self, make: Callable[[int], m.Request], answered: object) -> None:
        self.posted.append(make(0))
        if self.error is not None:
            raise self.error

    def call(
        self, make: Callable[[int], m.Request], kind: type[m.Reply], timeout: float
    ) -> tuple[m.Reply, list[Descriptor]]:
        self.asked.append(make(0))
        if self.error is not None:
            raise self.error
        return (
            (self.found, []) if kind is m.Found else (m.Fetched(re=0, ranks=[0]), self.descriptors)
        )


class FakeRanks:
    """In the place of an Exchange of rank 0.

    `others` makes what each other rank says in a round, from its topic and what rank 0
    says.
    """

    rank = 0

    def __init__(
        self,
        others: Callable[[str, dict[str, Any]], list[dict[str, Any] | CkptdError]],
        world_size: int = 2,
    ) -> None:
        self.others, self.world_size = others, world_size
        self.topics: list[str] = []

    def round(
        self,
        topic: str,
        mine: bytes | CkptdError,
        decide: Callable[[list[bytes]], list[bytes]],
        seconds: float,
    ) -> bytes:
        self.topics.append(topic)
        if isinstance(mine, CkptdError):
            raise type(mine)(f"rank 0: {mine}")
        said = self.others(topic.rpartition("/")[2], msgspec.msgpack.decode(mine))
        for number, other in enumerate(said):
            if isinstance(other, CkptdError):
                raise type(other)(f"rank {number + 1}: {other}")
        return decide([mine, *map(msgspec.msgpack.encode, said)])[0]


def same(topic: str, mine: dict[str, Any]) -> list[dict[str, Any] | CkptdError]:
    return [mine]


class Told(Recovery):
    """A recovery whose candidates are loaded as told.

    `told` has, by step and phase, the result of the phase, or its error.
    """

    def __init__(
        self,
        client: FakeClient,
        told: dict[tuple[int, str], Any] | None = None,
        ranks: Any = None,
        strict: bool = True,
        tag: str | None = None,
    ) -> None:
        options = Options(strict, tag=tag)
        super().__init__(cast(Client, client), ranks or Alone(), "gpt", "recover/1", options)
        self.told, self.done = told or {}, list[tuple[int, str]]()

    def _loading(self, candidate: m.RecoveryCandidate, topic: str) -> Any:
        return FakeLoading(self, candidate)


class FakeLoading:
    memory_bytes = peer_bytes = 0

    def __init__(self, of: Told, candidate: m.RecoveryCandidate) -> None:
        self._of, self._candidate = of, candidate
        self.left = ["new"]

    def _do(self, phase: str, result: dict[str, Any]) -> dict[str, Any]:
        assert self._candidate.step is not None
        self._of.done.append((self._candidate.step, phase))
        found = self._of.told.get((self._candidate.step, phase), result)
        if isinstance(found, Exception):
            raise found
        return cast(dict[str, Any], found)

    def open(self) -> dict[str, Any]:
        return self._do("open", {"damaged": ""})

    def bind(self, state: Any) -> dict[str, Any]:
        return self._do(
            "bind", {"unused": [], "kept": [], "lacking": [], "matched": 1, "damaged": ""}
        )

    def load(self, bound: object) -> dict[str, Any]:
        return self._do("load", {"damaged": "", "writing": True})

    def finish(self) -> dict[str, Any]:
        return self._do("finish", {})

    def close(self) -> None:
        self._do("close", {})

    @property
    def opened(self) -> Any:
        return SimpleNamespace(
            metrics={},
            user_content=None,
            created=math.nan,
            manifest=None,
            nbytes=500,
            writer={},
        )

    rng = None


ALL = ["open", "bind", "load", "finish", "close"]


@each_case(
    ("source", "own", "peers", "said"),
    [
        ("storage", 0, 0, ""),
        ("memory", 2_000_000, 0, ""),
        ("storage", 2_000_000, 0, ", 2.0 MB of it from the memory of this node"),
        ("storage", 0, 3_000_000, ", 3.0 MB of it from the memory of other nodes"),
        (
            "storage",
            2_000_000,
            3_000_000,
            ", 2.0 MB of it from the memory of this node, 3.0 MB from that of other nodes",
        ),
    ],
)
def test_the_log_says_how_much_came_from_which_memory(
    source: str, own: int, peers: int, said: str
) -> None:
    recovered = Recovered(
        step=5, attempt=1, tag="x", source=source, metrics={}, user_content=None, seconds=1.0,
        memory_bytes=own, peer_bytes=peers,
    )  # fmt: skip
    assert recovery._details(recovered) == said


# -- the candidates of all ranks


def said(*candidates: m.RecoveryCandidate, asked: int | None = None) -> dict[str, Any]:
    return {
        "candidates": [msgspec.to_builtins(one) for one in candidates],
        "asked": asked,
        "same_partition": False,
        "incomplete": [],
    }


def test_only_candidates_of_all_ranks_are_tried_in_the_order_of_rank_0() -> None:
    one, two, three, memory = candidate(1), candidate(2), candidate(3), candidate(3, "memory")
    assert recovery._common_candidates(
        [said(memory, three, two, one), said(three, one, two), said(memory, one, three)]
    ) == [three, one]
    assert recovery._common_candidates([said(memory, three)] * 3) == [memory, three]
    assert recovery._common_candidates([said(), said()]) == []


def test_the_newest_checkpoint_that_a_rank_does_not_see_is_named() -> None:
    one, two, memory = candidate(1), candidate(2), candidate(3, "memory")
    newest = said(memory, two, one) | {"damaged": []}
    older = said(one) | {"damaged": []}
    assert recovery._unseen([newest, newest]) == ""
    assert recovery._unseen([newest, older]) == recovery._unseen([older, newest]) == two.tag
    assert recovery._unseen([newest, older | {"damaged": [f"{two.tag}: rot"]}]) == ""
    assert recovery._unseen([newest, older | {"asked": 1}]) == ""


def test_a_checkpoint_that_a_rank_does_not_see_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(recovery, "_LOOKS", 3)
    late = 2

    def other(topic: str, mine: dict[str, Any]) -> list[Any]:
        if topic in ("find", "find-1", "find-2")[:late]:
            return [{**mine, "candidates": mine["candidates"][1:]}]
        return [mine]

    made = Told(FakeClient(candidate(2), candidate(1)), ranks=FakeRanks(other))
    recovered = made.run({}, step=None, last_step=3)
    assert recovered is not None
    assert recovered.step == 2
    late = 3
    made = Told(FakeClient(candidate(2), candidate(1)), ranks=FakeRanks(other))
    with pytest.raises(
        RecoveryFailed,
        match="^only some ranks see .*, the newest checkpoint: check that all nodes have the same "
        "storage",
    ):
        made.run({}, step=None, last_step=3)


class Deleting(FakeClient):
    """Retention deletes candidates between one Find and the next: each Find has the next
    list of candidates.
    """

    def __init__(self, *lists: list[m.RecoveryCandidate]) -> None:
        super().__init__()
        self.lists = list(lists)

    def call(self, make: Any, kind: type[m.Reply], timeout: float) -> Any:
        if kind is m.Found:
            self.found = m.Found(re=0, candidates=self.lists.pop(0) if self.lists else [])
        return super().call(make, kind, timeout)


GONE = {"damaged": "no checkpoint"}


def test_a_checkpoint_that_is_deleted_while_it_is_opened_is_no_damage() -> None:
    newer = [candidate(4), candidate(3)]
    made = Told(Deleting([candidate(2), candidate(1)], newer, newer), {(2, "open"): GONE})
    recovered = made.run({}, step=None, last_step=2)
    assert recovered is not None
    assert (recovered.step, recovered.passed_over) == (4, [])


def test_a_given_step_that_is_deleted_while_it_is_opened_is_not_found() -> None:
    made = Told(Deleting([candidate(2)]), {(2, "open"): GONE})
    with pytest.raises(NotFound, match="^job 'gpt' has no checkpoint of step 2$"):
        made.run({}, step=2, last_step=2)


def test_a_state_into_which_a_deleted_checkpoint_was_read_is_called_overwritten() -> None:
    made = Told(Deleting([candidate(2)]), {(2, "load"): {"damaged": "no part", "writing": True}})
    with pytest.raises(RecoveryFailed, match="deleted while it was read; the state is partly"):
        made.run({}, step=2, last_step=2)


def test_damage_is_told_once_when_another_checkpoint_is_deleted_meanwhile() -> None:
    three = [candidate(3), candidate(2), candidate(1)]
    made = Told(
        Deleting(three, three, [three[0], three[2]], [three[0], three[2]]),
        {(3, "open"): {"damaged": "rotten"}, (2, "open"): GONE},
    )
    recovered = made.run({}, step=None, last_step=3)
    assert recovered is not None
    assert (recovered.step, recovered.passed_over) == (
        1,
        ["gpt/step-00000003.a0001 in storage: rotten"],
    )


def test_candidates_that_no_two_ranks_share_are_an_error() -> None:
    """None would mean that the job has no checkpoint, and training would start from the
    beginning.
    """
    with pytest.raises(
        RecoveryFailed,
        match="^the ranks have found different checkpoints, because some were saved or deleted "
        "meanwhile",
    ):
        recovery._common_candidates([said(candidate(1)), said(candidate(2))])
    with pytest.raises(RecoveryFailed):
        recovery._common_candidates([said(), said(candidate(2))])


def test_the_same_step_of_another_attempt_is_another_candidate() -> None:
    newer, older = candidate(5, attempt=2), candidate(5, attempt=1)
    assert recovery._common_candidates([said(newer, older), said(older)]) == [older]


def test_ranks_that_want_different_steps_are_refused() -> None:
    with pytest.raises(
        InvalidRequest,
        match="^the ranks want to recover step 7 and None: pass the same step on all ranks$",
    ):
        recovery._common_candidates([said(candidate(7), asked=7), said(candidate(7))])


def test_nodes_have_long_to_save_what_they_hold_before_the_others_give_up() -> None:
    limits = dict[str, float]()

    class Patient(FakeClient):
        def call(
            self, make: Callable[[int], m.Request], kind: type[m.Reply], timeout: float
        ) -> tuple[m.Reply, list[Descriptor]]:
            limits[kind.__name__] = timeout
            return (
                (m.Delivered(re=0), [])
                if kind is m.Delivered
                else super().call(make, kind, timeout)
            )

    class Timed(FakeRanks):
        def round(
            self,
            topic: str,
            mine: bytes | CkptdError,
            decide: Callable[[list[bytes]], list[bytes]],
            seconds: float,
        ) -> bytes:
            limits[topic.rpartition("/")[2]] = seconds
            return super().round(topic, mine, decide, seconds)

    made = Recovery(
        cast(Client, Patient()),
        cast(RankGroup, Timed(same)),
        "gpt",
        "recover/1",
        Options(strict=True),
        nodes=True,
    )
    assert made.run({}, step=None, last_step=-1) is None
    hour = loading.DELIVER_SECONDS
    assert (limits["Delivered"], limits["deliver"]) == (hour, hour)
    assert max(limits["decide"], limits["find"]) < hour


@pytest.mark.parametrize(
    ("had", "rounds"), [([0, 1], ["deliver"]), ([0], ["deliver", "then/deliver-copies"])]
)
def test_a_job_on_one_node_has_the_attempt_before_delivered_too(
    had: list[int], rounds: list[str]
) -> None:
    """The attempt before may have been on several nodes, and this one alone is left."""
    asked = list[m.Request]()

    class Holder(FakeClient):
        def call(self, make: Any, kind: type[m.Reply], timeout: float) -> Any:
            if kind is not m.Delivered:
                return super().call(make, kind, timeout)
            asked.append(make(0))
            ranks = [1] if make(0).copies else had
            return m.Delivered(re=0, attempt=1, world_size=2, ranks=ranks), []

    client, ranks = Holder(), FakeRanks(same)
    client.welcome = m.Welcome(re=0, version=1, root="/ckpts", features=[PEERS])
    assert Told(client, ranks=ranks).run({}, step=None, last_step=-1) is None
    decided = ["then/decide"] if had == [0] else []
    assert ranks.topics == [f"recover/1/{each}" for each in [*rounds, *decided, "then/find"]]
    assert asked == [m.Deliver(id=0), m.Deliver(id=0, copies=True)][: len(rounds)]
    finds = [each for each in client.asked if isinstance(each, m.Find)]
    assert finds[0] == m.Find(id=0, delivered=1 if decided else 0)


def test_all_rounds_but_the_first_are_those_of_ranks_that_have_called(root: Path) -> None:
    ranks = FakeRanks(same)
    made = Told(FakeClient(candidate(2), root=root), ranks=ranks)
    assert made.run({}, step=None, last_step=-1) is not None
    assert ranks.topics == [
        "recover/1/find",
        *(f"recover/1/then/0/{step}" for step in ("open", "bind", "load", "finish")),
    ]


def test_steps_that_were_lost_with_a_node_are_told(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient(candidate(2), root=root)
    client.found = m.Found(
        re=0,
        candidates=[candidate(2)],
        incomplete=["gpt/step-00000003.a0001: rank 1 did not deliver"],
    )
    assert recover(client, {"w": torch.zeros(4)}) is not None
    assert (
        "gpt/step-00000003.a0001: rank 1 did not deliver: this step is not complete, and cannot "
        "be recovered" in caplog.messages
    )


def test_a_tag_chooses_among_the_candidates() -> None:
    """Damage to checkpoints of other tags means nothing for this one."""
    best = m.RecoveryCandidate(attempt=1, step=2, tag="best.a0001", source="storage")
    client = FakeClient(candidate(3, attempt=2), best, damaged=("best2.a0002: rot",))
    made = Told(client, tag="best")
    recovered = made.run({}, step=None, last_step=-1)
    assert recovered is not None
    assert (recovered.tag, recovered.passed_over) == ("best.a0001", [])
    assert recovered.left == ["new"]
    assert made.restart is None
    assert Told(client, tag="best3").run({}, step=None, last_step=-1) is None
    with pytest.raises(RecoveryFailed, match=r"is left: best2\.a0002: rot; the state is unchanged"):
        Told(client, tag="best2").run({}, step=None, last_step=-1)


# -- one candidate after the other


def test_the_first_candidate_is_recovered() -> None:
    client = FakeClient(candidate(2, "memory"), candidate(2), candidate(1))
    made = Told(client)
    found = made.run({}, step=None, last_step=4)
    assert found is not None
    assert (found.step, found.source, found.passed_over, made.last_step) == (2, "memory", [], 4)
    assert made.done == [(2, phase) for phase in ALL]
    assert client.asked == [m.Find(id=0, step=None)]


def test_a_damaged_candidate_is_passed_over_before_the_state_is_touched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Told(
        FakeClient(candidate(3), candidate(2), damaged=("gpt/step-4: no manifest",)),
        {(3, "open"): {"damaged": "bit rot"}},
    )
    found = made.run({}, step=None, last_step=-1)
    assert found is not None
    assert (found.step, found.passed_over) == (
        2,
        ["gpt/step-4: no manifest", "gpt/step-00000003.a0001 in storage: bit rot"],
    )
    assert made.done == [(3, "open"), (3, "close"), *((2, phase) for phase in ALL)]
    assert (
        "gpt/step-00000003.a0001 in storage cannot be recovered and is skipped: bit rot"
        in caplog.messages
    )


def test_damage_that_is_found_during_the_load_sends_all_ranks_to_the_next_candidate() -> None:
    def others(topic: str, mine: dict[str, Any]) -> list[dict[str, Any] | CkptdError]:
        return (
            [{**mine, "damaged": "rank 1 reads rot"}]
            if topic == "load" and mine["damaged"] == "" and not seen
            else [mine]
        )

    seen: list[str] = []

    class Once(Told):
        def _loading(self, candidate: m.RecoveryCandidate, topic: str) -> Any:
            if candidate.step == 2:
                seen.append(topic)
            return super()._loading(candidate, topic)

    made = Once(FakeClient(candidate(3), candidate(2)), ranks=FakeRanks(others))
    found = made.run({}, step=None, last_step=-1)
    assert found is not None
    assert (found.step, found.passed_over) == (
        2,
        ["gpt/step-00000003.a0001 in storage: rank 1 reads rot"],
    )
    assert made.done == [
        (3, "open"),
        (3, "bind"),
        (3, "load"),
        (3, "close"),
        *((2, phase) for phase in ALL),
    ]


@pytest.mark.parametrize(
    ("told", "overwritten", "words"),
    [
        ({(1, "open"): {"damaged": "rot"}}, False, "the state is unchanged"),
        ({(1, "load"): {"damaged": "rot", "writing": False}}, False, "the state is unchanged"),
        (
            {(1, "load"): {"damaged": "rot", "writing": True}},
            True,
            "the state is partly overwritten: rebuild it before training",
        ),
    ],
    ids=["at the open", "before the first write", "after it"],
)
def test_if_every_candidate_is_damaged_the_error_says_whether_the_state_is_whole(
    told: dict[tuple[int, str], Any], overwritten: bool, words: str
) -> None:
    with pytest.raises(RecoveryFailed) as caught:
        Told(FakeClient(candidate(1)), told).run({}, step=None, last_step=-1)
    assert (
        str(caught.value)
        == f"no sound checkpoint of job 'gpt' is left: gpt/step-00000001.a0001 in storage: rot; "
        f"{words}"
    )
    assert caught.value.overwritten == overwritten


def test_a_state_that_was_overwritten_once_is_not_whole_again() -> None:
    told = {
        (2, "load"): {"damaged": "rot", "writing": True},
        (1, "load"): {"damaged": "rot", "writing": False},
    }
    with pytest.raises(RecoveryFailed, match="partly overwritten") as caught:
        Told(FakeClient(candidate(2), candidate(1)), told).run({}, step=None, last_step=-1)
    assert caught.value.overwritten


def test_one_rank_that_has_begun_to_write_is_enough_for_a_state_that_is_not_whole() -> None:
    def others(topic: str, mine: dict[str, Any]) -> list[dict[str, Any] | CkptdError]:
        return [{**mine, "writing": True}] if topic == "load" else [mine]

    made = Told(
        FakeClient(candidate(1)),
        {(1, "load"): {"damaged": "rot", "writing": False}},
        ranks=FakeRanks(others),
    )
    with pytest.raises(RecoveryFailed, match="partly overwritten"):
        made.run({}, step=None, last_step=-1)


def test_without_a_candidate_there_is_nothing_to_recover() -> None:
    assert Told(FakeClient()).run({}, step=None, last_step=-1) is None
    with pytest.raises(NotFound, match="^job 'gpt' has no checkpoint of step 7$"):
        Told(FakeClient()).run({}, step=7, last_step=-1)
    with pytest.raises(
        RecoveryFailed,
        match="no sound checkpoint of job 'gpt' is left: gpt/step-1: rot; the state is unchanged",
    ):
        Told(FakeClient(damaged=("gpt/step-1: rot",))).run({}, step=7, last_step=-1)


@pytest.mark.parametrize("step", [-1, True, 1.5, "7"])
def test_a_step_that_cannot_be_is_refused(step: Any) -> None:
    client = FakeClient(candidate(1))
    with pytest.raises(
        InvalidRequest, match=r"^step is .*; expected an integer from 0 to 10\*\*18 - 1$"
    ):
        Told(client).run({}, step=step, last_step=-1)
    assert client.asked == []


def test_the_highest_step_of_any_rank_counts() -> None:
    """A rank that has captured less must begin the next attempt together with the
    others.
    """
    ranks = FakeRanks(lambda topic, mine: [{**mine, "last_step": 9}] if topic == "find" else [mine])
    made = Told(FakeClient(candidate(1)), ranks=ranks)
    made.run({}, step=None, last_step=3)
    assert made.last_step == 9


# -- differences and errors


@pytest.mark.parametrize("phase", ALL[:-1])
def test_an_error_ends_the_recovery_and_closes_the_candidate(phase: str) -> None:
    """It is no damage. An older checkpoint would lose one that may be sound."""
    made = Told(
        FakeClient(candidate(2), candidate(1)), {(2, phase): StorageError("the disk is gone")}
    )
    with pytest.raises(StorageError, match="^the disk is gone$"):
        made.run({}, step=None, last_step=-1)
    assert made.done[-2:] == [(2, phase), (2, "close")]


def test_an_error_of_another_rank_is_raised_here() -> None:
    def others(topic: str, mine: dict[str, Any]) -> list[dict[str, Any] | CkptdError]:
        return (
            [StructureMismatch("w: the checkpoint has shape [2], the state [3]")]
            if topic == "bind"
            else [mine]
        )

    made = Told(FakeClient(candidate(1)), ranks=FakeRanks(others))
    with pytest.raises(StructureMismatch, match="^rank 1: w: "):
        made.run({}, step=None, last_step=-1)
    assert made.done == [(1, "open"), (1, "bind"), (1, "close")]


def test_the_other_ranks_hear_of_a_bug_and_this_one_raises_it_as_it_is() -> None:
    heard: list[object] = []

    class Listening(FakeRanks):
        def round(self, topic: str, mine: bytes | CkptdError, *more: Any) -> bytes:
            heard.append(mine)
            return super().round(topic, mine, *more)

    made = Told(
        FakeClient(candidate(1)), {(1, "bind"): ZeroDivisionError("a bug")}, ranks=Listening(same)
    )
    with pytest.raises(ZeroDivisionError, match="^a bug$"):
        made.run({}, step=None, last_step=-1)
    assert (type(heard[-1]), str(heard[-1])) == (InternalError, "ZeroDivisionError: a bug")


def unused(*keys: str) -> dict[str, Any]:
    return {"unused": list(keys), "kept": [], "lacking": [], "matched": 1, "damaged": ""}


def test_a_key_must_have_a_place_on_some_rank() -> None:
    ranks = FakeRanks(lambda topic, mine: [unused("b", "c")] if topic == "bind" else [mine])
    assert (
        Told(FakeClient(candidate(1)), {(1, "bind"): unused("a")}, ranks).run(
            {}, step=None, last_step=-1
        )
        is not None
    )
    with pytest.raises(
        StructureMismatch,
        match=r"^2 keys \(b, c\) are in the checkpoint and not in the state; nothing was "
        r"written\. ",
    ):
        Told(FakeClient(candidate(1)), {(1, "bind"): unused("a", "b", "c")}, ranks).run(
            {}, step=None, last_step=-1
        )
    made = Told(FakeClient(candidate(1)), {(1, "bind"): unused("a", "b")}, ranks, strict=False)
    assert made.run({}, step=None, last_step=-1) is not None


def test_a_state_of_which_no_rank_has_a_key_in_the_checkpoint_is_refused() -> None:
    nothing = unused() | {"matched": 0}
    ranks = FakeRanks(lambda topic, mine: [nothing] if topic == "bind" else [mine])
    assert (
        Told(FakeClient(candidate(1)), {}, ranks, strict=False).run({}, step=None, last_step=-1)
        is not None
    )
    with pytest.raises(
        StructureMismatch,
        match="^no key of the state is in the checkpoint; nothing was written: compare the keys",
    ):
        Told(FakeClient(candidate(1)), {(1, "bind"): nothing}, ranks, strict=False).run(
            {}, step=None, last_step=-1
        )


def test_a_daemon_that_cannot_be_asked_is_an_error() -> None:
    client = FakeClient()
    client.error = StorageError("cannot list the root")
    with pytest.raises(StorageError, match="^cannot list the root$"):
        Told(client).run({}, step=None, last_step=-1)


# -- real sources


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        forge(tmp_path, (4,), [[((0,), (4,))]], step=step)
    return tmp_path


def recover(client: FakeClient, state: Any, **options: Any) -> Recovered | None:
    made = Recovery(cast(Client, client), Alone(), "gpt", "recover/1", Options(**options))
    return made.run(state, step=None, last_step=-1)


def part(root: Path, step: int) -> Path:
    (found,) = (root / "gpt" / candidate(step).tag).glob("*.ckpt")
    return found


def test_a_checkpoint_is_recovered_from_storage(root: Path) -> None:
    state = {"w": torch.zeros(4)}
    found = recover(FakeClient(candidate(2), candidate(1), root=root), state)
    assert found is not None
    assert (found.step, found.attempt, found.tag, found.source, found.metrics,
        found.user_content) == (
        2, 1, "step-00000002.a0001", "storage", {}, None,
    )  # fmt: skip
    assert state["w"].tolist() == [1.0] * 4


@pytest.mark.parametrize("connected", [True, False])
def test_a_daemon_that_answers_is_asked_for_the_slots_unchecked(
    root: Path, connected: bool
) -> None:
    """The checksums of a part say which slot is sound.

    So the daemon need not read the slots, and a busy one is not waited for.
    """
    client = FakeClient(candidate(2), root=root)
    client.connected = connected
    assert recover(client, {"w": torch.zeros(4)}) is not None
    assert [one for one in client.asked if isinstance(one, m.Fetch)] == [
        m.Fetch(id=0, attempt=1, step=2, check=False)
    ] * connected


@pytest.mark.parametrize("damage", ["a flipped bit", "a missing part", "a missing checkpoint"])
def test_damage_in_storage_is_passed_over(root: Path, damage: str) -> None:
    if damage == "a flipped bit":
        data = bytearray(part(root, 2).read_bytes())
        data[4096] ^= 1
        part(root, 2).write_bytes(data)
    elif damage == "a missing part":
        part(root, 2).unlink()
    else:
        (root / "gpt" / candidate(2).tag / "manifest.json").unlink()
    state = {"w": torch.zeros(4)}
    found = recover(FakeClient(candidate(2), candidate(1), root=root), state)
    assert found is not None
    assert (found.step, len(found.passed_over), state["w"].tolist()) == (1, 1, [1.0] * 4)


@pytest.mark.parametrize("problem", [errno.EMFILE, errno.EACCES, errno.EPERM])
def test_a_shortage_of_this_machine_or_a_lack_of_permission_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(loading, "open_checkpoint", fail)
    reason = os.strerror(problem)
    with pytest.raises(StorageError, match=rf"cannot read gpt/step-00000002\.a0001: {reason}"):
        recover(FakeClient(candidate(2), candidate(1), root=root), {"w": torch.zeros(4)})


def test_a_checkpoint_of_a_newer_ckptd_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NewerFormat("part was written by a newer ckptd")

    monkeypatch.setattr(loading, "open_checkpoint", refuse)
    with pytest.raises(
        NewerFormat,
        match=r"^gpt/step-00000002\.a0001: part was written by a newer ckptd; .* with step=$",
    ):
        recover(FakeClient(candidate(2), candidate(1), root=root), {"w": torch.zeros(4)})


def test_damage_that_the_load_finds_leaves_no_value_of_that_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of an older one overwrite all that was written before."""
    steps: list[int] = []

    def fail_first(saved: Any, destinations: dict[str, torch.Tensor], **options: Any) -> int:
        steps.append(1)
        for tensor in destinations.values():
            tensor.fill_(len(steps) * 100.0)
        if len(steps) == 1:
            raise IntegrityError("chunk 0 does not match its checksum")
        return load(saved, destinations, **options)

    monkeypatch.setattr(loading, "load", fail_first)
    state = {"w": torch.zeros(4)}
    found = recover(FakeClient(candidate(2), candidate(1), root=root), state)
    assert found is not None
    assert (found.step, state["w"].tolist()) == (1, [1.0] * 4)


def test_an_empty_state_takes_the_tensors_that_were_saved(root: Path) -> None:
    state: dict[str, Any] = {}
    assert recover(FakeClient(candidate(2), root=root), state) is not None
    assert state["w"].tolist() == [1.0] * 4


def test_a_difference_leaves_the_state_and_the_checkpoint_as_they_were(root: Path) -> None:
    state = {"w": torch.zeros(5)}
    with pytest.raises(
        StructureMismatch, match=r"w: the checkpoint has shape \[4\], the state \[5\]"
    ):
        recover(FakeClient(candidate(2), candidate(1), root=root), state)
    assert state["w"].tolist() == [0.0] * 5


def test_generators_of_another_number_of_ranks_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Loading(cast(Client, FakeClient()), Alone(), "gpt", candidate(1), Options(), set())
    made._documents = [{"state": {}, "rng": {"torch": b""}}, {"state": {}, "rng": None}]
    assert (made._own_document(), made.rng) == (None, None)
    assert caplog.messages == [
        "random generators are left as they are: they were saved on 2 ranks, and this job has 1"
    ]
    made._documents = [{"state": {}, "rng": None}] * 2
    assert made._own_document() is None
    assert len(caplog.messages) == 1
    made._documents = [{"state": {}, "rng": {"torch": b"x"}}]
    assert (made._own_document(), made.rng) == (0, {"torch": b"x"})


def test_generators_are_set_last(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """`load_state_dict` of an object in the state may draw from them."""

    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            random.random()

    happened: list[str] = []
    monkeypatch.setattr(loading, "set_rng_state", lambda rng: happened.append(f"set {rng}"))
    monkeypatch.setattr(Drawing, "load_state_dict", lambda self, state: happened.append("loaded"))
    made = Loading(
        cast(Client, FakeClient(root=root)),
        Alone(),
        "gpt",
        candidate(2),
        Options(strict=False),
        set(),
    )
    assert made.open() == {"damaged": ""}
    made._documents[0]["state"]["loader"] = {}
    made._documents[0]["rng"] = "generators"
    made.bind({"w": torch.zeros(4), "loader": Drawing()})
    made.load([])
    made.finish()
    made.close()
    assert happened == ["loaded", "set generators"]


# -- from memory


@pytest.fixture
def slot() -> Iterator[Descriptor]:
    """A sealed slot of step 5 whose chunks the daemon has checked."""
    with tmpfs() as shm:
        plan = sample_plan()
        data, lock = shm.make("a.seg", 1 << 16)
        header = seal(data.fileno(), read_header(data.fileno()), plan)
        crcs = []
        for chunk in chunk_ranges(
            with_values(plan.regions, (header.values.offset, header.values.length)),
            header.chunk_size,
        ):
            with open(data.fileno(), "rb", closefd=False) as file:
                file.seek(header.data_offset + chunk.offset)
                crcs.append(crc32c(file.read(chunk.length)))
        write_check(data.fileno(), header, crcs)
        lock.close()
        yield data
        data.close()


def loading_of(slot: Descriptor, step: int = 5, attempt: int = 1) -> Loading:
    client = FakeClient()
    client.descriptors = [slot]
    return Loading(
        cast(Client, client), Alone(), "gpt", candidate(step, "memory", attempt), Options(), set()
    )


def opened(slot: Descriptor, step: int = 5, attempt: int = 1) -> str:
    """The damage that opening the slot finds."""
    made = loading_of(slot, step, attempt)
    try:
        return cast(str, made.open()["damaged"])
    finally:
        made.close()
        assert cast(Any, made._client).asked == [m.Fetch(id=0, attempt=attempt, step=step)]


def test_every_chunk_of_a_slot_is_verified_as_it_is_read(slot: Descriptor) -> None:
    made, header = loading_of(slot), read_header(slot.fileno())
    made.open()
    opened_slot = made.opened
    assert opened_slot is not None
    saved = opened_slot.saved
    assert materialize(saved, saved.names()).keys() == set(saved.names())
    with open(slot.fileno(), "r+b", closefd=False) as file:
        file.seek(header.data_offset + 70)
        file.write(b"!")
    with pytest.raises(
        IntegrityError, match="^chunk 1 of step 5 has changed in memory since it was sealed$"
    ):
        materialize(saved, saved.names())
    made.close()
    assert slot.closed


@pytest.mark.parametrize(("step", "attempt"), [(6, 1), (5, 2)])
def test_a_slot_that_holds_another_step_is_passed_over(
    slot: Descriptor, step: int, attempt: int
) -> None:
    assert opened(slot, step, attempt) == f"the slot of step {step} has been filled again"
    assert slot.closed


def test_where_a_training_begins_and_to_which_step_it_could_go_back() -> None:
    found = [
        candidate(85, attempt=3),
        candidate(79, "memory", 2),
        candidate(79, attempt=2),
        candidate(79),
        candidate(69),
    ]
    options = Options(strict=False)

    def back_to(step: int) -> str:
        return f"recover(state, step={step}, strict=False)"

    assert restart(found, 0, [], options) == Restart("step 85 of attempt 3", 3, back_to(79))
    # attempt 3 has left one that is damaged
    assert restart(found, 1, [], options) == Restart("step 79 of attempt 2", 3, back_to(69))
    assert restart(found[3:], 0, [], options) == Restart("step 79 of attempt 1", 1, back_to(69))
    damaged = ["step-00000085.a0005: its manifest is damaged", "x"]
    assert restart(found[3:], 0, damaged, options) == Restart(
        "step 79 of attempt 1", 5, back_to(69)
    )
    best = m.RecoveryCandidate(attempt=4, step=None, tag="best.a0004", source="storage")
    assert restart([best, *found], 0, [], options) == Restart(
        "checkpoint best.a0004", 4, back_to(85)
    )
    assert restart([best], 0, [], options) == Restart("checkpoint best.a0004", 4, "")


# -- the report to the daemon


def reported(*, features: list[str], rank: int = 0, error: CkptdError | None = None) -> Any:
    """Return what a rank sends to its daemon after it has recovered step 2."""
    client = FakeClient(candidate(2, "memory"))
    client.welcome = msgspec.structs.replace(client.welcome, features=features)
    ranks = FakeRanks(lambda topic, mine: [mine])
    ranks.rank = rank
    made = Told(client, ranks=ranks)
    recovered = made.run({}, step=None, last_step=2)
    assert recovered is not None
    client.error = error
    passed_over = ["gpt/step-00000003.a0001 in storage: it is damaged"]
    made.report(dataclasses.replace(recovered, seconds=1.5, passed_over=passed_over))
    return client.posted


@pytest.mark.parametrize("error", [None, ForeignMemory("another root")])
def test_rank_0_reports_a_recovery_and_minds_no_error(error: CkptdError | None) -> None:
    assert reported(features=["recoveries"], error=error) == [
        m.ReportRecovery(
            id=0,
            step=2,
            attempt=1,
            tag="step-00000002.a0001",
            source="memory",
            seconds=1.5,
            bytes=500,
            passed_over=["gpt/step-00000003.a0001 in storage: it is damaged"],
        )
    ]


def test_no_other_rank_reports_and_no_earlier_daemon_is_told() -> None:
    assert reported(features=["recoveries"], rank=1) == []
    assert reported(features=["nodes", "replicas"]) == []
