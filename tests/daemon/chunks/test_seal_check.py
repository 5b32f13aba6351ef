"""Tests what the daemon checks before it acknowledges a seal: the documents of a slot,
and those of all ranks together. Tests the checksums that are left in the segment, too;
`test_saver.py` has whole saves.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import msgspec
import pytest

from ckptd.agent import Checkpoint
from ckptd.daemon.chunks import seal_check
from ckptd.daemon.chunks.seal_check import SealCheck, SlotChecksums
from ckptd.daemon.chunks.sealed_slot import SealedSlot
from ckptd.daemon.job.snapshot import SlotContents
from ckptd.shared.errors import IntegrityError
from ckptd.shared.formats.plan import Item, Plan, Region
from ckptd.shared.formats.plan_check import check_plans
from ckptd.shared.formats.reuse import ChunkCheck
from ckptd.shared.formats.segment import read_check
from ckptd.shared.wire import messages as m
from tests.crash.nonsense import Case, Client, simple_case, sound_case
from tests.shared.samples import WRITER
from tests.support.daemons import Home, home, running
from tests.support.saving import World

Ext = msgspec.msgpack.Ext


def contents(
    name: str = "w", signature: bytes = b"one", named: tuple[str, ...] = ("w",), **changes: Any
) -> SlotContents:
    metadata: Any = {name: {"dtype": "float32", "size": [4], "chunks": [[[0], [4]]], **changes}}
    plan = Plan(
        [Region(0, 16, 4)],
        [Item(name, "float32", (4,), (0,), (4,), None, 0)],
        [],
        metadata,
        WRITER,
        bytes(32),
    )
    return SlotContents(signature, plan, set(named))


def test_values_may_name_only_what_is_stored() -> None:
    check = SealCheck()
    check.compare({0: contents()}, 1)
    for _ in range(2):  # the plan is known to be sound by then
        with pytest.raises(
            IntegrityError, match="the values of rank 0 name the tensor 'v', which no rank stores"
        ):
            check.compare({0: contents(named=("w", "v"))}, 1)


def test_a_plan_is_checked_once_and_a_wrong_one_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    check, calls = SealCheck(), list[int]()

    def counted(plans: Any, world_size: int) -> frozenset[str] | None:
        calls.append(world_size)
        return check_plans(plans, world_size)

    monkeypatch.setattr(seal_check, "check_plans", counted)
    for _ in range(3):
        check.compare({0: contents()}, 1)
    assert calls == [1]
    for number in range(2):
        with pytest.raises(IntegrityError, match="'w'"):
            check.compare({0: contents(signature=b"two", dtype="int32")}, 1)
        assert len(calls) == 2 + number
    for number in range(20):
        check.compare({0: contents(signature=b"%d" % number)}, 1)
    check.compare({0: contents()}, 1)  # it has been forgotten by then
    assert len(calls) == 24


@pytest.fixture
def place() -> Iterator[Home]:
    with home() as made:
        yield made


def answers(clients: list[Client], step: int, case: Case) -> list[Any]:
    """Seal a case as step `step`, and return what the daemon answers to each rank."""
    granted = [client.acquire(step) for client in clients]
    numbers = [
        client.seal(step, each.segment, part)
        for client, each, part in zip(clients, granted, case.parts, strict=True)
    ]
    return [client.outcome(number) for client, number in zip(clients, numbers, strict=True)]


def change(**changes: Any) -> Any:
    return lambda case: vars(case.parts[0]).update(changes)


REFUSED = [
    (lambda case: case.parts[0].items.pop(), "the metadata say that rank 0 stores the shard [4, 2] "
        "at [0, 0] of 'w'; the plan"),
    (lambda case: case.parts[0].items[0].__setitem__(4, [3, 2]), "w: only 6 of 8 elements are "
        "stored"),
    (change(metadata=None), "the metadata in the plan of rank 0 are missing: they must describe "
        "'w', which rank 0 stores"),
    (lambda case: case.parts[0].metadata["w"].update(size=[5, 2]), "the metadata say that 'w' has "
        "the dtype float32 and the size [5, 2]"),
    (lambda case: case.parts[0].metadata["w"].update(dtype="int32"), "the metadata say that 'w' "
        "has the dtype int32"),
    (lambda case: case.parts[0].metadata.update(v={"dtype": "bytes"}), "the metadata say that rank "
        "0 stores 'v'"),
    (change(raw_values=b"garbage"), "values document is not a map"),
    (change(values={"rng": None}), "values document has no member 'state'"),
    (change(values={"state": {"a": Ext(1, b"v")}}), "the values of rank 0 name the tensor 'v', "
        "which no rank stores"),
    (change(values={"state": {"a": [Ext(3, b"\x91\x90")]}}), "values document: 'state.a.0.0' has a "
        "list as an item of a set"),
]  # fmt: skip


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("wrong", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_seal_that_could_not_be_loaded_is_refused_in_one_sentence(
    place: Home, wrong: Any, words: str
) -> None:
    with running(place, forked=True) as daemon:
        client = Client(place, "job", 0, 1)
        case = simple_case(("w", "float32", [4, 2]))
        wrong(case)
        (answer,) = answers([client], 1, case)
        assert isinstance(answer, m.Error), answer
        assert (answer.code, "\n" in answer.message) == ("integrity", False)
        assert words in answer.message
        assert not list((place.root / "job").glob("step-*"))
        assert isinstance(answers([client], 2, simple_case(("w", "float32", [4, 2])))[0], m.Sealed)
        assert client.wait(2).state == "durable"
        assert daemon.status()["counters"]["persisted"] == 1
        client.close()


@pytest.mark.usefixtures("processes")
def test_the_ranks_of_a_step_are_compared_when_the_last_one_has_sealed(place: Home) -> None:
    with running(place, forked=True):
        first = Client(place, "job", 0, 2)
        clients = [first, Client(place, "job", 1, 2, first.attempt)]
        wrong = simple_case(("w", "float32", [4, 2]), ranks=2)
        wrong.parts[1].values = {"state": {"v": Ext(1, b"v")}}
        found = answers(clients, 1, wrong)
        assert any(
            isinstance(answer, m.Error)
            and "the values of rank 1 name the tensor 'v'" in answer.message
            for answer in found
        )
        assert [client.wait(1).state for client in clients] == ["failed"] * 2
        assert all(
            isinstance(answer, m.Sealed)
            for answer in answers(clients, 2, simple_case(("w", "float32", [4, 2]), ranks=2))
        )
        assert [client.wait(2).state for client in clients] == ["durable"] * 2
        for client in clients:
            client.close()


@pytest.mark.usefixtures("processes")
def test_a_sound_case_of_every_kind_is_loaded(place: Home) -> None:
    with running(place, forked=True):
        client = Client(place, "job", 0, 1)
        for number in range(5):
            (answer,) = answers([client], number, sound_case(Random(number), 1, large=number == 4))
            assert isinstance(answer, m.Sealed), answer
            assert client.wait(number).state == "durable"
            with Checkpoint.open(place.root / "job", number) as checkpoint:
                checkpoint.verify()
                assert checkpoint.load()["model"].keys() <= {*checkpoint.keys(), "blob"}
        client.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def check(world: World) -> None:
    asyncio.run(SlotChecksums(world.slots, world.pipeline).check(world.snapshot, {}))


def test_checksums_are_written_once_and_then_compared(world: World) -> None:
    check(world)
    seal, slot = world.snapshot.seals[0], world.held[0]
    assert seal.checks is not None
    crcs = [one.crc for one in seal.checks]
    assert read_check(slot.fd, slot.header) == crcs
    seal.checks = None
    check(world)
    again = world.snapshot.seals[0].checks
    assert again is not None
    assert [one.crc for one in again] == crcs


def test_several_callers_share_one_check(world: World) -> None:
    checks, read = SlotChecksums(world.slots, world.pipeline), list[object]()
    checksum = world.pipeline.checksum

    async def counting(sealed: SealedSlot, *, with_digests: bool) -> list[ChunkCheck]:
        read.append(sealed)
        return await checksum(sealed, with_digests=with_digests)

    async def several() -> None:
        await asyncio.gather(*(checks.check(world.snapshot, {}) for _ in range(4)))

    with mock.patch.object(world.pipeline, "checksum", counting):
        asyncio.run(several())
    assert len(read) == len(world.snapshot.seals)


def test_a_slot_that_has_changed_since_it_was_sealed_is_damaged(world: World) -> None:
    check(world)
    slot = world.held[0]
    os.pwrite(slot.fd, b"\xff", slot.header.data_offset)
    world.snapshot.seals[0].checks = None
    with pytest.raises(IntegrityError, match="has changed since it was sealed"):
        check(world)
