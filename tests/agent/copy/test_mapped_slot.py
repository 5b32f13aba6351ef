"""One slot in real shared memory: what its segment holds after each step of a snapshot,
as the daemon would read it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from crc32c import crc32c

from ckptd.agent.copy import lanes as lanes_module
from ckptd.agent.copy import mapped_slot as mapped_slot_module
from ckptd.agent.copy.checked_copy import CheckedCopy
from ckptd.agent.copy.fences import Transfer
from ckptd.agent.copy.mapped_slot import Documents, MappedSlot, batches, document_offsets
from ckptd.agent.plan.layout import Layout, layout_of, plan_locally
from ckptd.shared.errors import IntegrityError, QuotaExceeded
from ckptd.shared.formats.plan import Plan, align_region, chunk_ranges, signature, with_values
from ckptd.shared.formats.segment import (
    SlotState,
    read_check,
    read_document,
    read_header,
    write_header,
)
from tests.support.cases import each_case
from tests.support.daemons import until
from tests.support.tmpfs import Tmpfs, tmpfs

CUDA = torch.device("cuda", 3)
CAPACITY = 600_000


@pytest.fixture
def shm() -> Iterator[Tmpfs]:
    with tmpfs() as made:
        yield made


@pytest.fixture
def slot(shm: Tmpfs) -> Iterator[MappedSlot]:
    made = MappedSlot("a.seg", *shm.make("a.seg", CAPACITY))
    yield made
    made.forget()


def layout(tensors: dict[str, torch.Tensor], *, elsewhere: tuple[str, ...] = ()) -> Layout:
    """Return the layout of these tensors.

    Those named in `elsewhere` count as tensors on an accelerator.
    """
    local = plan_locally(tensors)
    rows = [
        msgspec.structs.replace(row, device="cuda") if row.fqn in elsewhere else row
        for row in local.rows
    ]
    return layout_of(rows, local.aliases, metadata=None, global_plan=bytes(32))


def sources(tensors: dict[str, torch.Tensor], found: Layout) -> list[torch.Tensor]:
    return [tensors[item.fqn] for item in found.plan.items]


def carry(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Transfer:
    raise AssertionError("no source is on an accelerator")


def test_views_that_were_cut_ahead_are_used_and_released(slot: MappedSlot) -> None:
    found = layout({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.int16)})
    slot.cut(found)
    views = slot._views
    slot.begin(found, 3)
    slot.copy(
        [torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.int16)], found, range(2), carry
    )
    assert slot._views is views
    assert [target.tolist() for target in views.targets.tensors] == [
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        [1, 1, 1],
    ]
    slot.forget()
    slot.cut(found)
    assert slot._views.targets.tensors == [], (
        "the memory of a slot that is gone must not stay mapped"
    )


def read(shm: Tmpfs, name: str = "a.seg") -> tuple[SlotState, int | None, dict[str, torch.Tensor]]:
    """Read as the daemon does: return the state and the step of the header, and the
    tensors of the plan if the slot is sealed.
    """
    descriptor = shm.opened(name)
    header = read_header(descriptor.fileno())
    tensors = {}
    if header.state is SlotState.SEALED:
        for item in Plan.decode(
            read_document(descriptor.fileno(), header, header.plan, "plan")
        ).items:
            data = bytearray(
                os.pread(descriptor.fileno(), item.length, header.data_offset + item.offset)
            )
            flat = (
                torch.frombuffer(data, dtype=getattr(torch, item.dtype))
                if data
                else torch.empty(0, dtype=getattr(torch, item.dtype))
            )
            tensors[item.fqn] = (
                flat.as_strided(item.sizes, item.stride)
                if item.stride is not None
                else flat.view(item.sizes)
            )
    descriptor.close()
    return header.state, header.step, tensors


STATE = {
    "floats": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6, dtype=torch.int64).reshape(2, 3).T,
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(7, dtype=torch.uint8),
    "unsigned": torch.tensor([0, 65535], dtype=torch.uint16),
    "halves": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}


def test_a_filled_and_sealed_slot_holds_every_tensor_and_document(
    shm: Tmpfs, slot: MappedSlot
) -> None:
    found, documents = layout(STATE), Documents(b"values", b"request")
    assert slot.fill(sources(STATE, found), found, 5, carry) is None
    assert read(shm) == (SlotState.FILLING, 5, {})
    slot.seal(found, documents)
    state, step, tensors = read(shm)
    assert (state, step) == (SlotState.SEALED, 5)
    assert tensors.keys() == STATE.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, STATE[name])] == []
    assert tensors["transposed"].stride() == STATE["transposed"].stride()
    fd = shm.opened("a.seg")
    read_back = {
        what: read_document(fd.fileno(), slot.header, getattr(slot.header, what), what)
        for what in ("values", "plan", "request")
    }
    fd.close()
    assert read_back == {"values": b"values", "plan": found.document, "request": b"request"}
    assert slot.header.signature == found.signature == signature(found.document)
    assert repr(slot) == "<MappedSlot a.seg SEALED step 5>"


@each_case("unlike", [[0], [1], [2], [3], [4], [0, 2], [1, 2, 3], [0, 1, 2, 3, 4]])
def test_each_source_of_another_dtype_is_converted_wherever_it_is_in_the_plan(
    unlike: list[int],
) -> None:
    state = {f"t{n}": torch.tensor([n + 0.5, -n]) for n in range(5)}
    found = layout(state)
    given = sources(state, found)
    for number in unlike:
        given[number] = given[number].double()
    with tmpfs() as shm:
        slot = MappedSlot("a.seg", *shm.make("a.seg", CAPACITY))
        slot.fill(given, found, 1, carry, unlike)
        slot.seal(found, Documents(b"", b""))
        state_read, _, tensors = read(shm)
        slot.forget()
    assert state_read is SlotState.SEALED
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }


def test_the_seal_has_the_checksum_of_every_chunk(shm: Tmpfs, slot: MappedSlot) -> None:
    state = STATE | {"more": torch.arange(60_000.0)}
    found, documents = layout(state), Documents(bytes(100_000), b"request")
    slot.fill(sources(state, found), found, 5, carry)
    fd = shm.opened("a.seg")
    assert read_check(fd.fileno(), slot.header) is None
    slot.seal(found, documents)
    header = slot.header
    ranges = chunk_ranges(
        with_values(found.plan.regions, (header.values.offset, header.values.length)),
        header.chunk_size,
    )
    data = [
        os.pread(fd.fileno(), chunk.length, header.data_offset + chunk.offset) for chunk in ranges
    ]
    fd.close()
    assert len(ranges) > len(found.plan.regions) + 1, "several chunks lie in one region"
    assert read_check(shm.opened("a.seg").fileno(), header) == list(map(crc32c, data))


def test_a_slot_that_an_accelerator_fills_is_sealed_without_checksums(
    shm: Tmpfs, slot: MappedSlot
) -> None:
    state = {"here": torch.ones(4), "there": torch.ones(4)}
    found = layout(state, elsewhere=("there",))
    slot.fill(sources(state, found), found, 1, lambda targets, sources: Transfer())
    slot.seal(found, Documents(b"", b""))
    assert read_check(shm.opened("a.seg").fileno(), slot.header) is None


def test_the_header_says_that_a_slot_is_filled_before_its_first_byte_changes(
    shm: Tmpfs, slot: MappedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older snapshot of the slot must not be taken for whole if the trainer dies
    during the copy.
    """
    seen: list[SlotState] = []
    monkeypatch.setattr(CheckedCopy, "copy", lambda self, *_: seen.append(read(shm)[0]))
    found = layout(STATE)
    slot.fill(sources(STATE, found), found, 1, carry)
    assert seen == [SlotState.FILLING, SlotState.FILLING]


def test_the_sources_may_change_once_the_slot_is_filled(shm: Tmpfs, slot: MappedSlot) -> None:
    state = {"w": torch.ones(100)}
    found = layout(state)
    slot.fill(sources(state, found), found, 1, carry)
    state["w"].zero_()
    slot.seal(found, Documents(b"", b""))
    assert torch.equal(read(shm)[2]["w"], torch.ones(100))


def test_views_are_made_once_for_each_layout(slot: MappedSlot) -> None:
    one, other = layout({"w": torch.ones(4)}), layout({"w": torch.ones(5)})
    views = [slot._views_of(found) for found in (one, one, other)]
    assert views[0] is views[1]
    assert [view.targets.shapes[0] for view in views] == [(4,), (4,), (5,)]


def test_documents_that_do_not_fit_are_refused_and_the_slot_is_not_sealed(
    shm: Tmpfs, slot: MappedSlot
) -> None:
    found = layout({"w": torch.ones(4)})
    slot.fill([torch.ones(4)], found, 1, carry)
    room = CAPACITY - document_offsets(found, 0, 0)[-1]
    with pytest.raises(
        QuotaExceeded, match="^the plain values of this state need 1 bytes more than the slot has$"
    ):
        slot.seal(found, Documents(b"", bytes(room + 1)))
    assert read(shm)[0] is SlotState.FILLING
    slot.seal(found, Documents(b"", bytes(room)))
    assert read(shm)[0] is SlotState.SEALED


def test_documents_follow_the_tensors_in_order_and_do_not_overlap() -> None:
    found = layout({"w": torch.ones(1000)})
    values, plan, request, end = Documents(bytes(10), bytes(20)).offsets(found)
    assert values == align_region(found.plan.data_length)
    assert (plan, request, end) == (
        align_region(values + 10), align_region(plan + len(found.document)),
        align_region(plan + len(found.document)) + 20,
    )  # fmt: skip


# -- sources on an accelerator


def test_sources_on_an_accelerator_are_carried_and_the_others_copied(
    shm: Tmpfs, slot: MappedSlot
) -> None:
    state = {
        "here": torch.ones(4),
        "there": torch.full((4,), 2.0),
        "also here": torch.full((4,), 3.0),
    }
    found, transfer = layout(state, elsewhere=("there",)), Transfer()
    carried: list[tuple[torch.Tensor, torch.Tensor]] = []

    def enqueue(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Transfer:
        carried.extend(zip(targets, sources, strict=True))
        return transfer

    assert slot.fill(sources(state, found), found, 1, enqueue) is transfer
    ((target, source),) = carried
    assert source is state["there"]
    target.copy_(source)
    slot.seal(found, Documents(b"", b""))
    assert {name: tensor.tolist() for name, tensor in read(shm)[2].items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }


def test_a_batch_without_sources_on_an_accelerator_carries_nothing(slot: MappedSlot) -> None:
    state = {"here": torch.ones(4), "there": torch.ones(4)}
    found = layout(state, elsewhere=("there",))
    slot.begin(found, 1)
    (number,) = [number for number, item in enumerate(found.plan.items) if item.fqn == "here"]
    assert slot.copy([state["here"]], found, range(number, number + 1), carry) is None


def test_a_copy_that_fails_waits_for_no_device(
    slot: MappedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may hang. The caller gives the slot back once nothing can write into it."""

    class Carried(Transfer):
        waited = 0

        def wait(self) -> None:
            Carried.waited += 1

    state = {"here": torch.ones(4), "there": torch.ones(4)}
    found = layout(state, elsewhere=("there",))

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(CheckedCopy, "copy", fail)
    with pytest.raises(RuntimeError, match="^no$"):
        slot.fill(sources(state, found), found, 1, lambda targets, sources: Carried())
    assert Carried.waited == 0
    found = layout({"here": torch.ones(4)})
    with pytest.raises(RuntimeError, match="^no$"):
        slot.fill([torch.ones(4)], found, 1, carry)


# -- the header


def test_a_cleared_slot_is_free(shm: Tmpfs, slot: MappedSlot) -> None:
    slot.begin(layout({}), 3)
    slot.clear()
    assert (read(shm)[:2], slot.header.state) == ((SlotState.FREE, None), SlotState.FREE)


def test_a_header_that_was_written_and_not_noted_is_found_again(
    shm: Tmpfs, slot: MappedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C came in between."""
    found = layout({"w": torch.ones(4)})
    slot.fill([torch.ones(4)], found, 1, carry)

    def interrupted(fd: int, header: Any) -> None:
        write_header(fd, header)
        raise KeyboardInterrupt

    monkeypatch.setattr(mapped_slot_module, "write_header", interrupted)
    with pytest.raises(KeyboardInterrupt):
        slot.seal(found, Documents(b"", b""))
    assert slot.header.state is SlotState.FILLING
    found_again = slot.refresh()
    assert (found_again.state, slot.header) == (SlotState.SEALED, found_again)


# -- mapping and forgetting


def test_a_segment_that_is_too_short_is_refused_and_its_descriptors_stay_the_callers(
    shm: Tmpfs,
) -> None:
    data, lock = shm.make("a.seg", CAPACITY)
    os.ftruncate(data.fileno(), CAPACITY // 2)
    with pytest.raises(
        IntegrityError, match=r"^segment a\.seg has been cut short by another process$"
    ):
        MappedSlot("a.seg", data, lock)
    assert (data.closed, lock.closed) == (False, False)


def test_the_lock_is_held_until_the_slot_is_forgotten(shm: Tmpfs) -> None:
    slot = MappedSlot("a.seg", *shm.make("a.seg", CAPACITY))
    daemons = shm.opened("a.seg")
    with pytest.raises(BlockingIOError):
        fcntl.flock(daemons, fcntl.LOCK_EX | fcntl.LOCK_NB)
    slot.forget()
    fcntl.flock(daemons, fcntl.LOCK_EX | fcntl.LOCK_NB)
    slot.close_descriptors()
    with pytest.raises(ValueError, match="closed"):
        slot.begin(layout({}), 1)


class Pages:
    """In the place of the calls that fault in and lock pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.populated: list[tuple[int, int]] = []
        self.locked: list[tuple[int, int]] = []
        self.unlocked: list[int] = []
        self.threads: list[int] = []

        def populate(address: int, length: int, advice: int) -> int:
            self.populated.append((address, length))
            return error

        def lock(address: int, length: int, device: torch.device) -> bool:
            assert device == CUDA
            self.locked.append((address, length))
            return True

        def unlock(address: int, device: torch.device) -> None:
            maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
            shared = [found[0].split("-") for found in maps if found[-1].endswith(".seg")]
            assert any(int(start, 16) <= address < int(end, 16) for start, end in shared)
            self.threads.append(threading.get_ident())
            self.unlocked.append(address)

        monkeypatch.setattr(mapped_slot_module, "fault_threads", lambda: 1)
        monkeypatch.setattr(mapped_slot_module, "advise", populate)
        monkeypatch.setattr(mapped_slot_module, "lock_pages", lock)
        monkeypatch.setattr(lanes_module, "unlock_pages", unlock)


def test_all_memory_is_faulted_in_piece_by_piece_and_locked_once(
    slot: MappedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(monkeypatch)
    monkeypatch.setattr(mapped_slot_module, "_PIECE", 1 << 16)
    slot.populate(CUDA)
    start, length = pages.locked[0]
    assert length == slot.header.file_length
    assert pages.populated == [
        (start + at, min(1 << 16, length - at)) for at in range(0, length, 1 << 16)
    ]
    slot.forget()
    slot.forget()
    assert (len(pages.locked), pages.unlocked) == (1, [start])


def test_a_slot_may_be_locked_until_the_driver_has_unlocked_it(
    slot: MappedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    monkeypatch.setattr(mapped_slot_module, "lock_pages", lambda *_: True)
    monkeypatch.setattr(lanes_module, "unlock_pages", lambda *_: found.append(slot.may_be_locked))
    slot.populate(CUDA)
    slot.ready.set()
    slot.forget()
    assert (found, slot.may_be_locked) == ([True], False)


@pytest.mark.parametrize("refused", [False, True])
def test_a_large_slot_is_locked_in_pieces_as_far_as_the_driver_does(
    slot: MappedSlot, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    pages, most = Pages(monkeypatch), slot.header.capacity // 8192 * 4096
    lock = vars(mapped_slot_module)["lock_pages"]
    monkeypatch.setattr(lanes_module, "LOCKED", most)
    monkeypatch.setattr(
        mapped_slot_module,
        "lock_pages",
        lambda *given: lock(*given) and not (refused and len(pages.locked) == 2),
    )
    slot.populate(CUDA)
    (start, length), *rest = pages.locked
    assert length == slot.header.data_offset + most
    assert rest[0] == (start + length, most)
    assert len(rest) == (1 if refused else 2)
    assert slot.unlocked == (slot.header.file_length - length if refused else 0)
    slot.forget()
    unlocked = [start] if refused else [address for address, _ in pages.locked]
    assert sorted(pages.unlocked) == unlocked


def test_a_slot_for_an_accelerator_is_faulted_in_on_several_threads_and_locked_after_that(
    slot: MappedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, together, seen = Pages(monkeypatch), threading.Barrier(3, timeout=60), list[int]()

    def populate(address: int, length: int, advice: int) -> int:
        assert pages.locked == []
        pages.populated.append((address, length))
        if threading.get_ident() not in seen:
            seen.append(threading.get_ident())
            together.wait()
        return 0

    monkeypatch.setattr(mapped_slot_module, "fault_threads", lambda: 3)
    monkeypatch.setattr(mapped_slot_module, "advise", populate)
    monkeypatch.setattr(mapped_slot_module, "_PIECE", 1 << 16)
    slot.populate(CUDA)
    start, length = pages.locked[0]
    assert sorted(pages.populated) == [
        (start + at, min(1 << 16, length - at)) for at in range(0, length, 1 << 16)
    ]
    assert len(seen) == 3
    slot.forget()


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (8, 2), (17, 4), (128, 4)])
def test_slots_are_faulted_in_on_a_quarter_of_the_cpus_and_on_four_at_most(
    monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert mapped_slot_module.fault_threads() == threads


def test_memory_that_cannot_be_faulted_in_can_still_be_used(
    slot: MappedSlot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = Pages(monkeypatch, error=12)
    monkeypatch.setattr(mapped_slot_module, "_PIECE", 1 << 16)
    with caplog.at_level(logging.DEBUG, "ckptd.agent"):
        slot.populate(CUDA)
    assert (len(pages.populated), len(pages.locked)) == (1, 1)
    assert (
        "pages of a slot could not be faulted in before the first copy: Cannot allocate memory"
        in caplog.text
    )
    slot.forget()
    assert len(pages.unlocked) == 1


def test_a_slot_that_is_forgotten_meanwhile_is_not_locked(
    slot: MappedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(monkeypatch)
    monkeypatch.setattr(mapped_slot_module, "advise", lambda *_: cast(int, slot.forget()) or 0)
    slot.populate(CUDA)
    slot.populate(CUDA)
    assert (pages.locked, pages.unlocked) == ([], [])


def test_a_slot_of_tensors_on_the_cpu_is_not_locked(
    slot: MappedSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(monkeypatch)
    slot.populate()
    assert (len(pages.populated), pages.locked) == (1, [])


def test_a_slot_that_is_dropped_is_unlocked_before_it_is_unmapped(
    shm: Tmpfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would write to its old pages from the next slot at this address, too.

    It may wait for a device that hangs, and torch raises its last error at the next
    kernel of this thread, so another thread unlocks.
    """
    pages, data = Pages(monkeypatch), shm.make("a.seg", CAPACITY)
    slot = MappedSlot("a.seg", *data)
    slot.populate(CUDA)
    held = slot.data
    slot.close_descriptors()
    del slot
    assert pages.unlocked == []
    del held
    until(lambda: pages.unlocked, "slot is unlocked")
    assert pages.unlocked == [pages.locked[0][0]]
    assert threading.get_ident() not in pages.threads
    until(lambda: ".seg" not in Path("/proc/self/maps").read_text(), "slot is unmapped")


def test_a_forked_child_unlocks_nothing(slot: MappedSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch)
    slot.populate(CUDA)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        slot.forget()
    assert (len(pages.locked), pages.unlocked) == (1, [])


# -- batches


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [(0, 1), (1, 2), (2, 3), (3, 3)]), (800, [(0, 2), (2, 3)]), (10_000, [(0, 3)])],
)
def test_batches_have_every_item_once(most: int, expected: list[tuple[int, int]]) -> None:
    found = layout({name: torch.ones(100) for name in "abc"})
    assert [(batch.start, batch.stop) for batch in batches(found, most)] == expected
