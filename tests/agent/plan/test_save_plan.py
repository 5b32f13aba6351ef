"""Items are resolved by the caller's planner, checked, and written as they are at the
time of the copy.
"""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckptd.agent.plan.save_plan import (
    Resolved,
    check_complete,
    load_weights,
    loads_as_weights,
    may_unpickle,
    plain_metadata,
    resolves_by_itself,
    stream,
    values_of,
)
from ckptd.agent.state.tree import TensorRef
from ckptd.agent.state.values import decode
from ckptd.shared.errors import InvalidRequest, UnsavableValue
from ckptd.shared.formats.plan import BLOB
from tests.support.cases import each_case

STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.float16)},
    "step": 5,
}


def planned(state: dict[str, Any], planner: DefaultSavePlanner) -> tuple[SavePlan, Metadata]:
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    return planner.finish_plan(plans[0]), metadata


def resolved(
    state: dict[str, Any], planner: DefaultSavePlanner | None = None, *, weights_only: bool = True
) -> Resolved:
    planner = planner or DefaultSavePlanner()
    return Resolved.of(planned(state, planner)[0], planner, weights_only=weights_only)


def refusal(planner: DefaultSavePlanner, state: dict[str, Any] = STATE) -> str:
    with pytest.raises((InvalidRequest, UnsavableValue)) as caught:
        resolved(state, planner)
    return str(caught.value)


def test_tensors_and_values_become_rows_in_the_order_of_the_plan() -> None:
    found = resolved(STATE)
    rows = {row.fqn: (row.dtype, row.sizes, row.offsets) for row in found.rows}
    assert (rows["model.w"], rows["model.half"]) == (
        ("float32", (2, 3), (0, 0)),
        ("float16", (3,), (0,)),
    )
    assert list(found.writes) == [row.key for row in found.rows]
    (blob,) = found.blobs.values()
    assert torch.load(io.BytesIO(bytes(blob.tolist())), weights_only=True) == 5


def test_the_slot_holds_each_item_as_it_is_when_it_is_copied() -> None:
    state = {"w": torch.zeros(4), "empty": torch.empty(0, 3)}
    found = resolved(state)
    layout = found.lay_out(global_plan=bytes(32))
    state["w"].fill_(7)
    assert (
        b"".join(bytes(piece) for piece in stream(layout, found))
        == torch.full((4,), 7.0).numpy().tobytes()
    )
    sources = found.sources_of(layout)
    assert [
        torch.equal(sources(number), state[item.fqn])
        for number, item in enumerate(layout.plan.items)
    ] == [True, True]


class Wrong(DefaultSavePlanner):
    """Resolves each tensor to `self.made` of it."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        return self.made(found) if write_item.type is not WriteItemType.BYTE_IO else found


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda t: t.flatten()[1:],
            "model.w: the planner's item has shape [2, 3], but resolves to a tensor of shape [5]",
        ),
        (lambda t: 5, "model.w: the planner's item is a tensor, but resolves to int"),
        (
            lambda t: t.to("meta"),
            "model.w: a tensor on the meta device, which has no values, cannot be saved",
        ),
    ],
)
def test_an_item_that_resolves_to_something_else_is_refused(made: Any, words: str) -> None:
    assert refusal(Wrong(made)).startswith(words)


def test_an_item_that_changes_between_layout_and_copy_is_refused() -> None:
    planner = Wrong(lambda tensor: tensor)
    found = resolved({"w": torch.ones(4)}, planner)
    layout = found.lay_out(global_plan=bytes(32))
    planner.made = lambda tensor: tensor.double()
    with pytest.raises(
        InvalidRequest,
        match="^w: the planner resolves it to another dtype or shape than it did when the save "
        "began$",
    ):
        found.sources_of(layout)(0)


def test_an_item_is_written_once_on_a_rank() -> None:
    class Twice(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return super().finish_plan(SavePlan([*new_plan.items, new_plan.items[0]]))

    assert (
        refusal(Twice(), {"w": torch.ones(2)})
        == "the planner writes w twice on one rank; each item belongs to one rank, once"
    )


# -- bytes


class Own:
    pass


def test_bytes_that_only_pickled_code_could_bring_back_are_refused_by_default() -> None:
    state = {"object": Own()}
    assert refusal(DefaultSavePlanner(), state).startswith(
        "object: the planner's bytes could not be loaded without running"
    )
    assert [row.fqn for row in resolved(state, weights_only=False).rows] == ["object"]
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(1)}, buffer)
    assert [loads_as_weights(data) for data in (buffer.getvalue(), b"", b"\x80")] == [
        True,
        False,
        False,
    ]


def test_a_planner_of_another_format_is_not_taken_for_pickle() -> None:
    class Foreign:
        pass

    data = {b"PK\x03\x04": True, b"\x80\x04": True, b"{}": False, b"": False}
    assert {start: may_unpickle(Foreign(), start) for start in data} == data  # type: ignore[arg-type]
    assert [
        may_unpickle(planner, b"{}") for planner in (DefaultSavePlanner(), DefaultLoadPlanner())
    ] == [True, True]


def test_dcps_own_planner_gives_the_tensors_of_the_state() -> None:
    class Flattening(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            return super().create_local_plan()

    assert [
        resolves_by_itself(planner) for planner in (DefaultSavePlanner(), Flattening(), Wrong(None))
    ] == [False, False, True]


# -- what all ranks write


def written(
    *items: tuple[str, tuple[int, ...] | None, tuple[int, ...]],
) -> list[tuple[MetadataIndex, tuple[int, ...]]]:
    return [
        (MetadataIndex(fqn, None if offset is None else torch.Size(offset)), sizes)
        for fqn, offset, sizes in items
    ]


INVENTED = "the planner has written items that its metadata lacks: x; nothing was saved"


@pytest.mark.parametrize(
    "items",
    [[("w", (0,), (4,)), ("n", None, (9,))], [("w", None, (4,)), ("n", None, (9,))]],
    ids=["with the offsets", "without offsets"],
)
def test_a_plan_that_writes_every_item_once_is_complete(items: Any) -> None:
    _, metadata = planned({"w": torch.ones(4), "n": 5}, DefaultSavePlanner())
    check_complete(metadata, written(*items))


@each_case(
    ("items", "words"),
    [
        ([("n", None, (9,))], "the planner has dropped w; nothing was saved"),
        (
            [("w", (0,), (4,)), ("n", None, (9,)), ("x", None, (1,))],
            INVENTED,
        ),
        (
            [("w", (0,), (4,)), ("w", (0,), (4,)), ("n", None, (9,))],
            "the planner writes more than once w; nothing was saved",
        ),
        (
            [("w", (0,), (3,)), ("n", None, (9,))],
            "the planner writes in another size than its metadata says: w; nothing was saved",
        ),
        ([("w", (2,), (4,)), ("n", None, (9,))], "the planner has dropped w; nothing was saved"),
    ],
)
def test_every_item_of_the_metadata_is_written_once(items: Any, words: str) -> None:
    _, metadata = planned({"w": torch.ones(4), "n": 5}, DefaultSavePlanner())
    with pytest.raises(InvalidRequest) as caught:
        check_complete(metadata, written(*items))
    assert str(caught.value) == words


def test_many_items_are_named_in_part() -> None:
    _, metadata = planned(
        {f"w{number}": torch.ones(1) for number in range(9)}, DefaultSavePlanner()
    )
    with pytest.raises(
        InvalidRequest, match="^the planner has dropped w0, w1, w2 and 6 more; nothing was saved$"
    ):
        check_complete(metadata, [])


def test_shards_that_leave_holes_are_refused() -> None:
    _, metadata = planned({"w": torch.ones(4)}, DefaultSavePlanner())
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([3])  # type: ignore[union-attr]
    with pytest.raises(
        InvalidRequest,
        match="^the planner's items do not make up whole tensors: .*; nothing was saved$",
    ):
        check_complete(metadata, written(("w", (0,), (3,))))


# -- documents


def test_the_metadata_is_written_as_plain_data() -> None:
    _, metadata = planned(STATE, DefaultSavePlanner())
    half = MetadataIndex("model.half"), "float16"
    found = plain_metadata(
        metadata,
        [
            [half],
            [
                (MetadataIndex("model.w", torch.Size([0, 0])), "bfloat16"),
                (MetadataIndex("step"), BLOB),
            ],
        ],
    )
    # As it was cast.
    assert found["model.w"] == {
        "dtype": "bfloat16",
        "size": [2, 3],
        "chunks": [[[0, 0], [2, 3]]],
        "ranks": [1],
    }
    assert "ranks" not in found["model.half"]
    assert found["step"] == {"dtype": BLOB, "ranks": [1]}
    assert msgspec.json.decode(msgspec.json.encode(found)) == found


def test_the_coordinators_document_has_the_nested_state() -> None:
    _, metadata = planned(STATE, DefaultSavePlanner())
    document = decode(values_of(metadata, save_id="abc"))
    assert document["state"] == {
        "model": {"w": TensorRef("model.w"), "half": TensorRef("model.half")},
        "step": TensorRef("step"),
    }
    assert (document["planner_data"], document["save_id"]) == (metadata.planner_data, "abc")
    assert decode(values_of(None, {"torch": b"x"})) == {"state": {}, "rng": {"torch": b"x"}}
    metadata.planner_data = None
    assert decode(values_of(metadata))["state"]["model.w"] == TensorRef("model.w")
    metadata.planner_data = {"w": torch.ones(1)}
    with pytest.raises(UnsavableValue, match="planner data cannot hold tensors"):
        values_of(metadata)


@pytest.mark.parametrize("known", [False, True])
def test_loading_a_buffer_leaves_the_classes_that_the_caller_has_added(known: bool) -> None:
    buffer = io.BytesIO()
    torch.save(io.BytesIO(b"x"), buffer)
    with torch.serialization.safe_globals([io.BytesIO] if known else []):
        assert load_weights(buffer.getvalue()).getvalue() == b"x"
        assert (io.BytesIO in torch.serialization.get_safe_globals()) == known
