"""Tests what is lost in a conversion, and that every loss is refused by key before a
byte is written, with a call that works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn

from ckptd.agent.plan.structure import reach
from ckptd.agent.read.saved import Saved
from ckptd.agent.recover import conversions
from ckptd.agent.recover.conversions import converted_losses, lost, narrows, refused, sharing
from ckptd.shared.errors import StructureMismatch
from tests.oracle.prints import text
from tests.support.cases import each_case
from tests.support.refusals import exit_of, refusal, refuses
from tests.support.saved_states import Checkpoint

F16, F32, BF16, F64 = torch.float16, torch.float32, torch.bfloat16, torch.float64
UINT4: torch.dtype = vars(torch)["uint4"]


@each_case(
    ("saved", "own", "why"),
    [
        (torch.complex64, F32, "its imaginary parts would be lost"),
        (torch.complex64, torch.int64, "its imaginary parts would be lost"),
        (F32, torch.int64, "its fractions would be lost"),
        (F16, torch.bool, "its fractions would be lost"),
        (F32, torch.complex64, ""),
        (F64, BF16, ""),
        (torch.int64, F16, ""),
        (torch.int64, torch.uint8, ""),
        (torch.complex128, torch.complex64, ""),
        (UINT4, F32, "torch does not convert one to the other"),
        (UINT4, UINT4, ""),
    ],
)
def test_some_dtypes_never_fit(saved: torch.dtype, own: torch.dtype, why: str) -> None:
    assert refused(saved, own) == why


@each_case(
    ("saved", "own", "narrower"),
    [
        (F32, F32, False), (BF16, F32, False), (F32, BF16, True), (F16, BF16, True), (F32, F64,
        False), (torch.int64, torch.int32, True), (torch.int32, torch.int64, False), (torch.uint8,
        F32, False), (torch.int64, F32, True), (torch.int32, F32, True), (torch.int32, F64, False),
        (torch.bool, torch.uint8, False), (torch.complex128, torch.complex64, True),
        (torch.float8_e4m3fn, F32, False), (F32, torch.float8_e4m3fn, True), (torch.float8_e4m3fn,
        torch.float8_e5m2, True), (torch.float8_e5m2, BF16, False), (torch.uint16, torch.int16,
        True), (torch.uint16, torch.int32, False), (torch.uint16, torch.int64, False), (torch.int16,
        torch.uint16, True), (torch.float8_e4m3fn, torch.float8_e5m2fnuz, True), (torch.float8_e5m2,
        torch.float8_e5m2fnuz, True), (torch.float8_e5m2fnuz, F32, False), (torch.float8_e8m0fnu,
        F32, False), (torch.float8_e8m0fnu, BF16, False), (torch.float8_e8m0fnu, F16, True),
        (torch.float8_e5m2, torch.complex32, False), (torch.float8_e8m0fnu, torch.complex32, True),
    ],
)  # fmt: skip
def test_narrower_dtypes_are_known(saved: torch.dtype, own: torch.dtype, narrower: bool) -> None:
    assert narrows(saved, own) is narrower


@each_case(
    ("values", "own", "loss"),
    [
        (torch.tensor([1e5]), F16, "finite values would become infinite in float16"),
        (torch.tensor([65504.0]), F16, ""),
        (torch.tensor([float("inf"), float("nan"), 1.0]), F16, ""),
        (torch.tensor([1e39], dtype=F64), BF16, "finite values would become infinite in bfloat16"),
        (
            torch.tensor([1e39 + 1j], dtype=torch.complex128),
            torch.complex64,
            "finite values would become infinite in complex64",
        ),
        (
            torch.tensor([1e6]),
            torch.float8_e5m2,
            "finite values would become infinite in float8_e5m2",
        ),
        (torch.tensor([0.1]), BF16, ""),
        (torch.tensor([300]), torch.uint8, "integers would change in uint8"),
        (torch.tensor([-1]), torch.uint8, "integers would change in uint8"),
        (torch.tensor([-1], dtype=torch.int8), torch.uint8, "integers would change in uint8"),
        (torch.tensor([-5], dtype=torch.int8), torch.uint16, "integers would change in uint16"),
        (torch.tensor([200], dtype=torch.uint8), torch.int8, "integers would change in int8"),
        (torch.tensor([2**63], dtype=torch.uint64), torch.int64, "integers would change in int64"),
        (torch.tensor([5], dtype=torch.int8), torch.uint16, ""),
        (torch.tensor([100], dtype=torch.uint8), torch.int8, ""),
        (torch.tensor([-1], dtype=torch.int8), torch.bool, "integers would change in bool"),
        (torch.tensor([255]), torch.uint8, ""),
        (torch.tensor([2**24 + 1]), F32, "integers would change in float32"),
        (torch.tensor([2**24]), F32, ""),
        (torch.tensor([2]), torch.bool, "integers would change in bool"),
        (torch.tensor([], dtype=torch.int64), torch.uint8, ""),
    ],
)
def test_a_loss_depends_on_the_values(values: torch.Tensor, own: torch.dtype, loss: str) -> None:
    assert lost(values, own) == loss


INF, NAN = float("inf"), float("nan")


@each_case("wide", [F32, F64, BF16], ids=str)
@each_case(
    ("own", "fitting", "beyond", "loss"),
    [
        (torch.float8_e4m3fn, [448, -462, 0.1, 0, NAN], 466, "float8_e4m3fn holds no values beyond "
            "448"),
        (torch.float8_e4m3fnuz, [240, -247, 0.1, 0, NAN], 248, "float8_e4m3fnuz holds no values "
            "beyond 240"),
        (torch.float8_e5m2, [57344, -61184, INF, -INF, NAN], 61440, "finite values would become "
            "infinite in float8_e5m2"),
        (torch.float8_e5m2fnuz, [57344, -61184, 0.1, 0, NAN], 61440, "float8_e5m2fnuz holds no "
            "values beyond 57344"),
        (torch.float8_e8m0fnu, [2.0**127, 0.1, 0, NAN], 1.75 * 2.0**127, "float8_e8m0fnu holds no "
            "values beyond 1.70141e+38"),
    ],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else "",
)  # fmt: skip
def test_values_beyond_the_largest_one_are_lost_whatever_torch_makes_of_them(
    own: torch.dtype, fitting: list[float], beyond: float, loss: str, wide: torch.dtype
) -> None:
    """torch 2.13 makes the largest value of them in float8_e4m3fn, and NaN in the other
    types that have no infinity.
    """
    assert lost(torch.tensor(fitting, dtype=wide), own) == ""
    for value in (beyond, -beyond):
        assert lost(torch.tensor([1.0, value], dtype=wide), own) == loss
    infinite = "" if own == torch.float8_e5m2 else loss
    for value in (INF, -INF):
        assert lost(torch.tensor([1.0, value], dtype=wide), own) == infinite


def test_a_value_that_torch_rounds_twice_is_judged_by_the_result() -> None:
    """torch rounds it to float32 first, where it is half a step beyond the largest
    value.
    """
    value = torch.tensor([248 - 1e-9], dtype=F64)
    assert value.to(torch.float8_e4m3fnuz).to(F32).isnan()
    assert lost(value, torch.float8_e4m3fnuz) == "float8_e4m3fnuz holds no values beyond 240"


def test_negative_values_do_not_fit_into_a_dtype_without_a_sign() -> None:
    assert lost(torch.tensor([-0.0, 1.0]), torch.float8_e8m0fnu) == ""
    assert (
        lost(torch.tensor([1.0, -1.0]), torch.float8_e8m0fnu)
        == "negative values would lose their sign in float8_e8m0fnu"
    )


EIGHT_BITS = [
    dtype
    for name, dtype in vars(torch).items()
    if name.startswith("float8_") and isinstance(dtype, torch.dtype)
]


@each_case("saved", EIGHT_BITS, ids=str)
@each_case("own", EIGHT_BITS, ids=str)
def test_a_conversion_between_types_of_eight_bits_is_narrowing_if_it_changes_a_value(
    saved: torch.dtype, own: torch.dtype
) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(saved)
    before, after = values.to(F32), values.to(own).to(F32)
    assert narrows(saved, own) is not torch.equal(before.nan_to_num(-1e30), after.nan_to_num(-1e30))
    rounded = [
        (float(was), float(becomes))
        for value, was, becomes in zip(values, before, after, strict=True)
        if torch.isfinite(was) and lost(value, own) == ""
    ]
    assert len(rounded) > 64
    assert [
        pair
        for pair in rounded
        if not abs(pair[1] - pair[0]) <= max(abs(pair[0]) / 2, 2.0**-7)  # nor if it is NaN
    ] == []


def test_values_are_read_in_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tensors that are narrowed are read."""
    checkpoint = Checkpoint(
        {
            "a": torch.full((4,), 1e9),
            "b": torch.ones(4),
            "c": torch.full((4,), 1e9),
            "d": torch.ones(2, dtype=F16),
        }
    )
    wanted: dict[str, Any] = {
        name: (torch.zeros(checkpoint.tensors[name].shape, dtype=F16), F16) for name in "abcd"
    }
    read: list[list[str]] = []

    def reading(places: Mapping[str, torch.Tensor]) -> None:
        read.append(list(places))
        checkpoint.read(places)

    monkeypatch.setattr(conversions, "_BATCH", 20)
    found = list(converted_losses(cast(Saved, checkpoint), wanted, reading))
    assert found == [(name, "finite values would become infinite in float16") for name in "ac"]
    assert read == [["a", "b"], ["c"]]


# -- refusals of values


def weight(value: torch.Tensor) -> dict[str, Any]:
    """Return a state with a module that has one parameter or buffer, and another value."""
    module = nn.Module()
    if value.is_floating_point() or value.is_complex():
        module.register_parameter("w", nn.Parameter(value))
    else:
        module.register_buffer("w", value)
    return {"net": module, "epoch": 0}


@each_case(
    ("saved", "own", "words"),
    [
        (torch.ones(2, dtype=torch.complex64), F32, "complex64, the state float32, and its "
            "imaginary parts would be lost"),
        (torch.ones(2), torch.int64, "float32, the state int64, and its fractions would be lost"),
        (torch.full((2,), 1e6), F16, "float32, the state float16, and finite values would become "
            "infinite in float16"),
        (torch.full((2,), 300), torch.uint8, "int64, the state uint8, and integers would change in "
            "uint8"),
        (torch.full((2,), 2**24 + 1), F32, "int64, the state float32, and integers would change in "
            "float32"),
        (torch.full((2,), 1e6), torch.float8_e4m3fn, "float32, the state float8_e4m3fn, and "
            "float8_e4m3fn holds no values beyond 448"),
    ],
)  # fmt: skip
def test_a_loss_is_refused_by_key_and_the_given_call_recovers_the_rest(
    saved: torch.Tensor, own: torch.dtype, words: str
) -> None:
    state = weight(torch.zeros(2, dtype=own))
    refuses(
        Checkpoint({**weight(saved), "epoch": 7}),
        state,
        f"net.w: the checkpoint has {words}",
        {"keep": ["net.w"]},
    )
    assert (state["net"].w.tolist(), state["epoch"]) == ([0, 0], 7)
    same = weight(torch.zeros(2, dtype=saved.dtype))
    Checkpoint(weight(saved)).recover(same)
    assert torch.equal(same["net"].w, saved)


@each_case(
    ("saved", "own", "words"),
    [
        (torch.full((2,), 1 + 2j), F32, "complex64, the state float32, and its imaginary parts "
            "would be lost"),
        (torch.full((2,), 1.5), torch.int64, "float32, the state int64, and its fractions would be "
            "lost"),
        (torch.full((2,), 1e6), F16, "float32, the state float16, and finite values would become "
            "infinite in float16"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@each_case(
    "of",
    [
        torch.Tensor.to_sparse,
        lambda plain: torch.diag(plain).to_sparse_csr(),
        lambda plain: torch.nested.nested_tensor([plain, plain[:1]], layout=torch.jagged),
    ],
)
def test_a_loss_in_the_values_of_a_tensor_of_tensors_is_refused(
    of: Callable[[torch.Tensor], torch.Tensor], saved: torch.Tensor, own: torch.dtype, words: str
) -> None:
    theirs, place = of(saved), of(torch.ones(2, dtype=own))
    state = {"x": place, "epoch": 0}
    refuses(
        Checkpoint({"x": theirs, "epoch": 7}),
        state,
        f"x: the checkpoint has {words}",
        {"keep": ["x"]},
    )
    assert state["x"] is place
    wider = {"x": of(torch.ones(2, dtype=torch.complex128))}
    Checkpoint({"x": theirs}).recover(wider)
    assert text(wider["x"]) == text(theirs.to(torch.complex128))


@each_case(
    ("saved", "own"),
    [
        ("float32", "float4_e2m1fn_x2"), ("int64", "uint4"), ("int64", "bits8"), ("uint8", "bits8"),
        ("bool", "int2"), ("bits8", "float32"), ("bits8", "uint8"), ("bits8", "bits1x8"),
        ("float4_e2m1fn_x2", "float8_e5m2"),
    ],
)  # fmt: skip
def test_dtypes_that_torch_does_not_convert_are_refused_by_key(saved: str, own: str) -> None:
    values, place = (
        torch.zeros(8, dtype=torch.uint8).view(getattr(torch, name))[:1] for name in (saved, own)
    )
    checkpoint = Checkpoint({"x": values, "epoch": 7})
    state: dict[str, Any] = {"x": place, "epoch": 0}
    with pytest.raises(StructureMismatch) as caught:
        checkpoint.recover(state)
    assert str(caught.value).startswith(
        f"x: the checkpoint has {saved}, the state {own}, and torch does not convert one to the "
        f"other;"
    )
    assert exit_of(caught.value) == {"keep": ["x"]}
    assert state["epoch"] == 0
    checkpoint.recover(state, keep=["x"])
    assert state["epoch"] == 7


def test_moments_that_would_become_infinite_are_refused_by_key() -> None:
    """The parameter fits into the new dtype, and its second moment does not."""

    def trained(dtype: torch.dtype, grad: float) -> dict[str, Any]:
        model = nn.Linear(1, 1, bias=False).to(dtype)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
        model.weight.grad = torch.full((1, 1), grad, dtype=dtype)
        optimizer.step()
        return {"model": model, "optim": optimizer}

    state = trained(F16, 1.0)
    words, call = refusal(Checkpoint(trained(F32, 1e5)), state)
    assert words == (
        "optim.state.weight.square_avg: the checkpoint has float32, the state float16, and finite "
        "values would become infinite in float16"
    )
    assert call == {"keep": ["optim.state.weight"]}
    before = state["optim"].state[state["model"].weight]["square_avg"].clone()
    saved = trained(F32, 1e5)
    Checkpoint(saved).recover(state, **call)
    assert torch.equal(state["optim"].state[state["model"].weight]["square_avg"], before)
    assert torch.equal(state["model"].weight, saved["model"].weight.half())


# -- one memory


class Pair(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if tied:
            self.b.weight = self.a.weight


def pair(*, tied: bool, optimizer: bool = False) -> dict[str, Any]:
    model = Pair(tied=tied)
    if not optimizer:
        return {"net": model}
    made = torch.optim.Adam(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    made.step()
    return {"net": model, "optim": made}


TIED = (
    "net.a.weight and net.b.weight share memory in the state, and differ in the checkpoint: untie "
    "them, or save them tied"
)


@pytest.mark.parametrize("optimizer", [False, True], ids=["model", "model and optimizer"])
def test_untied_into_tied_is_refused_with_both_keys(optimizer: bool) -> None:
    saved, state = pair(tied=False, optimizer=optimizer), pair(tied=True, optimizer=optimizer)
    refuses(Checkpoint(saved), state, TIED, {"keep": ["net.b.weight"]})
    assert torch.equal(state["net"].a.weight, saved["net"].a.weight)
    untied = pair(tied=False, optimizer=optimizer)
    Checkpoint(saved).recover(untied)
    assert torch.equal(untied["net"].b.weight, saved["net"].b.weight)


def test_equal_tensors_may_be_tied_and_tied_ones_untied() -> None:
    saved, state = pair(tied=False), pair(tied=True)
    saved["net"].b.load_state_dict(saved["net"].a.state_dict())
    Checkpoint(saved).recover(state)
    assert torch.equal(state["net"].b.weight, saved["net"].a.weight)
    tied, untied = pair(tied=True), pair(tied=False)
    Checkpoint(tied).recover(untied)
    assert torch.equal(untied["net"].a.weight, tied["net"].a.weight)
    assert torch.equal(untied["net"].b.weight, tied["net"].a.weight)


def test_views_that_overlap_are_refused_where_they_differ() -> None:
    """Two values of NaN with the same bits do not differ."""
    whole = torch.zeros(6)
    state = {"head": whole[:4], "tail": whole[2:], "apart": torch.zeros(1)}
    saved = {
        "head": torch.tensor([1.0, 2, torch.nan, 4]),
        "tail": torch.tensor([torch.nan, 4, 5, 6]),
        "apart": torch.ones(1),
    }
    Checkpoint(saved).recover(state)
    assert whole[[0, 1, 3, 4, 5]].tolist() == [1, 2, 4, 5, 6]
    saved["tail"][1] = 9
    words, call = refusal(Checkpoint(saved), state)
    assert (
        words
        == "head and tail share memory in the state, and differ in the checkpoint: untie them, "
        "or save them tied"
    )
    assert call == {"keep": ["tail"]}


def test_destinations_that_share_memory_are_found() -> None:
    memory = torch.zeros(4, 4)
    places = {
        "row": memory[1],
        "all": memory,
        "other": torch.zeros(3),
        "none": torch.zeros(0),
        "column": memory[:, 3],
        "last": memory[3],
    }
    assert [sorted(group) for group in sharing(places)] == [["all", "column", "last", "row"]]
    assert sharing({"a": memory[0], "b": memory[1]}) == []
    assert reach(memory[:, 3]) == 13 * 4
