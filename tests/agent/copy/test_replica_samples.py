"""Equal tensors have equal digests, whatever their order in memory and their device,
and different ones do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.agent.copy import replica_samples
from ckptd.agent.copy.replica_samples import SAMPLE, ReplicaSamples, Sampled, _gather
from ckptd.agent.plan.layout import plan_locally
from ckptd.agent.plan.replica_groups import ReplicaGroup, grouped
from ckptd.shared.formats.membership import Membership
from ckptd.shared.formats.replicas import DIGEST, MOST_DIGESTS, ReplicaDigests, decode_keys
from tests.support.cases import each_case

State = dict[str, torch.Tensor]


def at_once(device: torch.device, work: Callable[[], None]) -> None:
    work()


def groups_of(
    tensors: State, ranks: tuple[int, ...] = (0, 1), scattered: list[str] | None = None
) -> tuple[list[ReplicaGroup], Any]:
    rows = plan_locally(tensors, world_size=2).rows
    out_of_order = [
        n
        for n, row in enumerate(rows)
        if (not row.in_order if scattered is None else row.fqn in scattered)
    ]
    return grouped(
        rows, ((n, ranks) for n, row in enumerate(rows) if row.digest and row.nbytes), out_of_order
    ), rows


def made(
    tensors: State,
    *,
    rank: int = 0,
    every: int = 1 << 30,
    node: Membership | None = None,
    scattered: list[str] | None = None,
) -> Any:
    groups, rows = groups_of(tensors, scattered=scattered)
    return ReplicaSamples(groups, rows, tensors, list(tensors.values()), rank, node, every)


def digests(
    samples: ReplicaSamples, tensors: State, step: int = 5, before: int = 4
) -> list[ReplicaDigests]:
    parts = list(tensors.values())
    sampled: Sampled = samples.take(
        parts, [part.data_ptr() for part in parts], step, before, at_once
    )
    return samples.digests(sampled)


def states() -> State:
    torch.manual_seed(3)
    return {
        "large": torch.randn(5000), "small": torch.randn(3), "scalar": torch.tensor(4.0),
        "bf16": torch.randn(77).bfloat16(), "bytes": torch.arange(100, dtype=torch.uint8),
        "complex": torch.randn(9, dtype=torch.complex128), "bools": torch.ones(2, dtype=torch.bool),
        "nan": torch.full((40,), torch.nan), "transposed": torch.randn(30, 20).t(),
        "gaps": torch.randn(64)[::2], "empty": torch.empty(0, 3),
        "channels": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "expanded": torch.randn(4, 1).expand(4, 50), "conj": torch.randn(6,
        dtype=torch.complex64).conj(), "long": torch.arange(1000),
    }  # fmt: skip


def test_a_gather_reads_the_bytes_at_the_addresses() -> None:
    source = torch.arange(1000, dtype=torch.int16)
    places = [0, 1, 7, 130]
    rows = _gather(np.array([source.data_ptr() + at for at in places], dtype=np.uint64), 10)
    whole = source.numpy().tobytes()
    assert [row.tobytes() for row in rows] == [whole[at : at + 10] for at in places]


@pytest.mark.parametrize("every", [1, 3, 1 << 30])
def test_copies_have_equal_digests(every: int) -> None:
    state = states()
    copies = {
        name: tensor.clone() if name != "conj" else tensor.conj().clone().conj()
        for name, tensor in state.items()
    }
    scattered = ["transposed", "gaps", "channels", "expanded"]
    one, other = (
        made(state, every=every, scattered=scattered),
        made(copies, every=every, rank=1, scattered=scattered),
    )
    for step in range(1, 8):
        mine, theirs = digests(one, state, step, step - 1), digests(other, copies, step, step - 1)
        assert [(each.group, each.digests) for each in mine] == [
            (each.group, each.digests) for each in theirs
        ]
        assert decode_keys(mine[0].keys) == sorted(name for name in state if name != "empty")
        assert theirs[0].keys == b""


def test_other_values_in_every_element_are_found_at_once() -> None:
    state = states()
    samples, before = made(state), digests(made(state), state)[0].runs()
    assert len(before) == len(state) - 1 > 5
    for place, name in enumerate(sorted(state.keys() - {"empty"})):
        other = dict(state)
        flat = state[name].clone() if name != "conj" else state[name].conj().clone()
        flat.view(
            torch.uint8
            if flat.element_size() == 1
            else torch.int16
            if flat.element_size() == 2
            else torch.int32
        ).bitwise_xor_(1)
        if name == "conj":
            flat = flat.conj()
        elif name in ("transposed", "gaps", "channels", "expanded"):
            flat = state[name].untyped_storage().clone() and _same_layout(state[name], flat)
        other[name] = flat
        after = digests(samples, other)[0].runs()
        assert [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [
            place
        ], name


def _same_layout(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the values in the order of memory of another tensor."""
    storage = torch.empty(
        like.untyped_storage().nbytes() // like.element_size(), dtype=like.dtype, device="cpu"
    )
    found = storage.as_strided(like.shape, like.stride(), like.storage_offset())
    if 0 in like.stride():
        found[:, 0] = values[:, 0]
    else:
        found.copy_(values)
    return found


@each_case("name", ["large", "small", "bf16", "long", "transposed", "channels"])
def test_a_flipped_bit_is_found_within_every_snapshots(name: str) -> None:
    state, every = states(), 7
    samples = made(state, every=every)
    before = [
        digests(samples, state, step, step - 10) for step in range(1000, 1000 + 10 * every, 10)
    ]
    state[name].view(-1 if state[name].is_contiguous() else state[name].shape).flatten()
    storage = state[name].untyped_storage()
    storage[storage.nbytes() // 2] ^= 16
    after = [
        digests(samples, state, step, step - 10) for step in range(1000, 1000 + 10 * every, 10)
    ]
    assert sum(a != b for a, b in zip(before, after, strict=True)) >= 1


def test_the_samples_change_from_step_to_step() -> None:
    state = {"w": torch.randn(100_000)}
    samples = made(state)
    assert len({digests(samples, state, step)[0].digests for step in range(20)}) == 20
    assert len({digests(samples, state, step)[0].group for step in range(20)}) == 20, (
        "digests of other places are not compared"
    )


def test_equal_values_in_another_order_of_memory_are_equal() -> None:
    torch.manual_seed(1)
    plain = {"w": torch.randn(4, 6, 5, 5)}
    other = {"w": plain["w"].contiguous(memory_format=torch.channels_last)}
    for every in (1, 1 << 30):
        one, two = (
            made(plain, every=every, scattered=["w"]),
            made(other, every=every, scattered=["w"]),
        )
        assert digests(one, plain)[0].digests == digests(two, other)[0].digests


def test_many_tensors_have_one_digest_for_several() -> None:
    state = {f"w{number:05d}": torch.full((2,), float(number)) for number in range(3000)}
    samples = made(state)
    (found,) = digests(samples, state)
    assert (found.each, len(found.digests)) == (3, DIGEST * 1000)
    assert len(found.runs()) <= MOST_DIGESTS
    assert decode_keys(found.keys)[:2] == ["w00000", "w00003"]
    state["w00004"].add_(1)
    (changed,) = digests(samples, state)
    assert [
        n for n, (a, b) in enumerate(zip(found.runs(), changed.runs(), strict=True)) if a != b
    ] == [1]


def test_the_lowest_rank_of_each_node_tells_the_keys() -> None:
    state = {"w": torch.ones(4)}
    node = Membership(run_id="0" * 32, ranks=[1, 2])
    assert decode_keys(digests(made(state, rank=1, node=node), state)[0].keys) == ["w"]
    assert digests(made(state, rank=1), state)[0].keys == b""


def test_the_room_is_enough() -> None:
    state = {f"a rather long name {number}": torch.ones(2) for number in range(50)}
    samples = made(state)
    found = digests(samples, state)
    assert sum(len(one.digests) + len(one.keys) + len(one.group) for one in found) < samples.room


@pytest.mark.parametrize("looks", [True, False], ids=["one kernel", "slices"])
def test_an_accelerator_gathers_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """The CPU stands in for a device, with all its memory as one tensor."""
    state = {name: tensor for name, tensor in states().items() if name != "conj"}
    scattered = ["transposed", "gaps", "channels", "expanded"]
    samples = made(state, scattered=scattered)
    wanted = [digests(samples, state, step)[0].digests for step in range(4)]

    def whole(device: torch.device, address: int, length: int) -> torch.Tensor | None:
        flat = np.asarray(_Bytes(address, length))
        return torch.from_numpy(flat) if looks else None

    pieces = samples._pieces.pop(torch.device("cpu"))
    for step in range(4):
        parts = list(state.values())
        addresses = np.array([part.data_ptr() for part in parts], dtype=np.uint64)[samples._picked]
        sampled: Sampled = samples.take(
            parts, [part.data_ptr() for part in parts], step, step - 1, at_once
        )
        replica_samples._sample_on(
            torch.device("cpu"), pieces, addresses, parts, samples._numbers, step, sampled, whole
        )
        assert samples.digests(sampled)[0].digests == wanted[step]


class _Bytes:
    def __init__(self, address: int, length: int) -> None:
        self.__array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def test_a_line_is_never_read_beyond_its_tensor() -> None:
    for nbytes in (1, 63, 64, SAMPLE, SAMPLE + 1, 1000):
        samples = made({"w": torch.zeros(nbytes, dtype=torch.uint8)})
        assert samples._pieces[torch.device("cpu")]
        for step in range(200):
            for pieces in samples._pieces[torch.device("cpu")]:
                assert int(pieces.offsets(step).max()) + pieces.width <= nbytes


@pytest.mark.skipif(
    replica_samples.digest_pieces is None, reason="`_checked_copy.c` is not compiled here"
)
@each_case("width", [1, 3, 8, 9, 63, 64, 127, SAMPLE])
def test_c_and_numpy_digest_alike(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    source = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    addresses = np.array([source.data_ptr() + at for at in range(0, 9000, 97)], dtype=np.uint64)
    compiled = replica_samples._digested_at(addresses, width)
    monkeypatch.setattr(replica_samples, "digest_pieces", None)
    assert compiled.tolist() == replica_samples._digested_at(addresses, width).tolist()
    assert len(set(compiled.tolist())) > (50 if width == 1 else 90)


@pytest.mark.skipif(
    replica_samples.digest_pieces is None, reason="`_checked_copy.c` is not compiled here"
)
@pytest.mark.parametrize("width", [0, -1, SAMPLE + 1])
def test_a_width_that_cannot_be_is_refused(width: int) -> None:
    some = np.zeros(1, dtype=np.uint64)
    assert replica_samples.digest_pieces is not None
    with pytest.raises(ValueError, match="expected a width of 1 to 128 bytes"):
        replica_samples.digest_pieces(
            some, width, np.zeros(16, dtype=np.uint64), np.zeros(1, dtype=np.uint64)
        )


def test_c_and_numpy_choose_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    state = states()
    samples = made(state, scattered=["transposed", "gaps", "channels", "expanded"])
    starts = np.array([part.data_ptr() for part in state.values()], dtype=np.uint64)[
        samples._picked
    ]
    chosen = [
        [each.addresses(starts, step).tolist() for each in samples._pieces[torch.device("cpu")]]
        for step in range(5)
    ]
    monkeypatch.setattr(replica_samples, "choose_pieces", None)
    assert chosen == [
        [each.addresses(starts, step).tolist() for each in samples._pieces[torch.device("cpu")]]
        for step in range(5)
    ]
