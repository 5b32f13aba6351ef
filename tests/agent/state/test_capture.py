"""Capturing a state changes nothing in it, and refuses by key what could not be
restored.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ckptd.agent.state.capture import (
    Habits,
    capture,
    expand_object,
    optimizer_bytes_to_come,
    rng_state,
    set_rng_state,
    values_document,
)
from ckptd.agent.state.naming import Names
from ckptd.agent.state.tensor_check import check_tensor
from ckptd.agent.state.tree import ObjectNode, TensorRef
from ckptd.agent.state.values import decode
from ckptd.shared.errors import UnsavableValue
from ckptd.shared.formats import bounds
from tests.support.cases import each_case


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("capturing loads nothing")


def test_tensors_are_taken_by_name_and_the_rest_is_encoded() -> None:
    tensor, inner = torch.ones(2), torch.zeros(3)
    found = capture({"w": tensor, "n": 5, "object": Stateful({"deep": [inner, "x"]})})
    assert list(found.tensors) == ["w", "object.deep.0"]
    assert found.tensors["w"] is tensor
    assert found.tensors["object.deep.0"] is inner
    assert decode(found.state) == {
        "w": TensorRef("w"), "n": 5, "object": ObjectNode("stateful",
        {"deep": [TensorRef("object.deep.0"), "x"]}, f"{__name__}.Stateful"),
    }  # fmt: skip


def test_an_optimizer_is_not_made_to_step() -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    tree = decode(capture({"model": module, "optim": optimizer}).state)
    assert tree["optim"].tree["state"] == {}
    assert tree["optim"].tree["param_groups"][0]["params"] == ["weight", "bias"]
    assert len(optimizer.state) == 0
    assert tree["model"] == ObjectNode(
        "module", {"weight": TensorRef("model.weight"), "bias": TensorRef("model.bias")}
    )


def test_only_objects_with_both_methods_are_expanded() -> None:
    class Half:
        def state_dict(self) -> dict[str, Any]:
            return {}

    assert expand_object(Stateful({"a": 1}), Names()) == ("stateful", {"a": 1})
    assert [expand_object(value, Names()) for value in (Half(), Stateful, 5, {"a": 1})] == [
        None
    ] * 4


def test_the_document_has_the_generators_if_they_are_wanted() -> None:
    found = capture({"n": 5})
    assert decode(values_document(found, rng=False)) == {"state": {"n": 5}, "rng": None}
    assert values_document(found, rng=False) == msgspec.msgpack.encode(
        {"state": {"n": 5}, "rng": None}
    )
    document = decode(values_document(found, rng=True))
    assert document["state"] == {"n": 5}
    assert {"python", "torch", "numpy"} <= document["rng"].keys()


# -- refusals


class Endless(Stateful):
    def state_dict(self) -> Any:
        return self.state_dict()


def nested(levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": nested(200)}, "a.0.0"),
        (
            {"a": Endless(None)},
            "the state: a state_dict in it is nested too deep, or contains itself; nest it less",
        ),
        ({"n": 10**5000}, "n: an integer of about"),
        ({"a": Stateful({"n": 10**5000})}, "a.n: an integer of about"),
    ],
)
def test_what_has_no_end_is_refused(state: Any, words: str) -> None:
    with pytest.raises(UnsavableValue) as caught:
        capture(state)
    assert str(caught.value).startswith(words)


class Log:
    """Writes what it has gathered to a list when its state is taken."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def state_dict(self) -> dict[str, Any]:
        self.losses[0] = 7.0
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def module_with(log: Log) -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    module._register_state_dict_hook(lambda *_: log.state_dict())
    return module


@each_case("make", [lambda log: log, lambda log: [log], module_with])
def test_a_list_that_a_state_dict_changes_is_saved_as_it_is_then(make: Any) -> None:
    for count in (3, 5000):
        for order in (1, -1):
            losses = [0.5] * count
            state = dict([("log", make(Log(losses))), ("losses", losses)][::order])
            assert decode(capture(state).state)["losses"] == [7.0, *losses[1:]]


def test_long_lists_of_floats_come_back_bit_for_bit() -> None:
    """Lists that exist only while the state is captured, as those of deques, do not take
    one another's place.
    """
    bits = [0x7FF0DEADBEEF0001, 0xFFF8000000000000, 1 << 63, 1, 0x7FF0000000000000]
    special = list(struct.unpack("<5d", struct.pack("<5Q", *bits)))
    floats = [number / 7 for number in range(2000)]
    state = {
        "list": special + floats,
        "tuple": (special * 400, [True, *floats], [0.5, 1, *floats]),
        "deques": [deque(n + value for value in floats) for n in range(20)],
        "same": [floats, floats],
    }
    found = decode(capture(state).state)
    assert repr(found) == repr(state)
    for one, other in ((found["list"], state["list"]), (found["tuple"][0], special * 400)):
        assert struct.pack(f"<{len(one)}d", *one) == struct.pack(f"<{len(other)}d", *other)


def test_an_error_of_a_state_dict_is_told_with_its_key() -> None:
    class Failing(Stateful):
        def state_dict(self) -> Any:
            raise ValueError("not yet")

    with pytest.raises(
        UnsavableValue,
        match=r"^a: the state_dict\(\) of .*Failing raised ValueError\('not yet'\): ",
    ) as caught:
        capture({"a": Failing(None)})
    assert isinstance(caught.value.__cause__, ValueError)


class FailingModule(torch.nn.Linear):
    """A module whose extra state is not ready."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.asked = 0

    def get_extra_state(self) -> Any:
        self.asked += 1
        raise KeyError("not yet")

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("capturing loads nothing")


def test_an_error_of_a_modules_state_dict_is_told_with_its_key() -> None:
    words = (
        r"^net\.head: the state_dict\(\) of .*FailingModule raised KeyError\('not yet'\): "
        r"call "
        r"it "
        r"when it works, or leave it out$"
    )
    failing = FailingModule()
    with pytest.raises(UnsavableValue, match=words) as caught:
        capture({"net": {"head": failing}})
    assert isinstance(caught.value.__cause__, KeyError)
    # Once only, because a state_dict may wait for those of the other ranks.
    assert failing.asked == 1


def test_a_module_whose_state_dict_raises_can_be_left_out() -> None:
    unsaved: dict[str, str] = {}
    tensor = torch.ones(2)
    found = capture({"head": FailingModule(), "w": tensor}, unsaved=unsaved)
    assert found.tensors == {"w": tensor}
    assert list(unsaved) == ["head"]
    assert "FailingModule raised KeyError('not yet')" in unsaved["head"]


def test_a_state_that_a_reader_would_refuse_for_its_size_is_refused_whatever_was_captured_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of texts counts, not the length of the document."""
    monkeypatch.setattr(bounds, "MAX_OBJECTS", 10_000)
    habits = Habits()
    capture({"data": b"\x00" * 100_000}, habits=habits)
    for texts in (["ab"] * 9_990, ["ab"] * 20_000):
        with pytest.raises(
            UnsavableValue,
            match="^the state has more than .* maps and texts, the most that ckptd writes or "
            "reads: save ",
        ):
            capture({"texts": texts}, habits=habits)
    captured = capture({"texts": ["ab"] * 4_000, "numbers": [[1.5]] * 200_000}, habits=habits)
    decode(values_document(captured, rng=True))


def test_a_tensor_that_becomes_sparse_is_taken_apart_as_at_the_first_snapshot() -> None:
    habits = Habits()
    for now in ({"a": torch.ones(2)}, {"a": torch.ones(2).to_sparse()}):
        for state in ({"x": now}, {"x": {"inner": now}}):
            assert capture(state, habits=habits).tensors.keys() == capture(state).tensors.keys()


@each_case(
    ("tensor", "problem"),
    [
        (torch.ones(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (
            torch.ones(2, dtype=torch.uint8).view(torch.qint8),
            "a view in the quantized dtype torch.qint8 cannot be saved",
        ),
        (torch.ones(2, device="meta"), "a tensor on the meta device, which has no values"),
        (
            torch.ones((1,) * 65),
            "a tensor of 65 dimensions cannot be saved; reshape() it to at most 64",
        ),
        (
            torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})),
            "a tensor of type tests.agent.state.test_capture.Own",
        ),
    ],
)
def test_a_tensor_whose_memory_does_not_hold_its_values_is_refused(
    tensor: torch.Tensor, problem: str
) -> None:
    with pytest.raises(UnsavableValue) as caught:
        check_tensor("w", tensor)
    assert str(caught.value).startswith(f"w: {problem}")


def test_lazy_views_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j])
    plain = check_tensor("w", tensor)
    assert plain is tensor
    for lazy in (tensor.conj(), tensor.conj().imag):
        found = check_tensor("w", lazy)
        assert (found.is_conj(), found.is_neg(), torch.equal(found, lazy.clone())) == (
            False,
            False,
            True,
        )


# -- generators


def draw() -> tuple[float, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        torch.rand(1).item(),
        float(np.random.rand()),
        float(np.random.standard_normal()),
    )


def test_generators_draw_again_what_they_drew() -> None:
    random.gauss(0, 1)  # keeps a second one for the next call
    np.random.standard_normal()
    state = rng_state()
    drawn = draw()
    assert draw() != drawn
    set_rng_state(state)
    assert draw() == drawn


@pytest.mark.parametrize("used", [False, True])
def test_devices_are_asked_only_if_this_process_uses_them(
    monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    """A question would make a context on each, and break children that are forked later."""
    asked: list[str] = []

    def states() -> list[torch.Tensor]:
        asked.append("states")
        return [torch.ones(2, dtype=torch.uint8)]

    module = SimpleNamespace(is_initialized=lambda: used, get_rng_state_all=states)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: asked.append("available"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    state = rng_state()
    assert (asked, state.get("devices")) == ((["states"], [b"\1\1"]) if used else ([], None))


def test_the_current_device_gets_the_state_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process may see all GPUs of a node, or its own only, as number 0."""
    current, states = 2, [torch.full((2,), n, dtype=torch.uint8) for n in range(3)]
    module = SimpleNamespace(
        is_initialized=lambda: True,
        get_rng_state_all=lambda: states,
        set_rng_state=lambda state, device: states.__setitem__(device, state),
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    saved = rng_state()
    current, states = 0, [torch.zeros(2, dtype=torch.uint8)]
    set_rng_state(saved)
    assert [state.tolist() for state in states] == [[2, 2]]
    current, states = 1, [torch.zeros(2, dtype=torch.uint8) for _ in range(3)]
    set_rng_state(saved)
    assert [state.tolist() for state in states] == [[0, 0], [2, 2], [2, 2]]


def test_numpys_generator_as_ckptd_0_1_0_saved_it() -> None:
    saved = {**rng_state(), "numpy": dict(np.random.get_state(legacy=False))}
    drawn = np.random.standard_normal(3).tobytes()
    set_rng_state(saved)
    assert np.random.standard_normal(3).tobytes() == drawn


def test_states_of_devices_that_are_not_there_are_ignored() -> None:
    state = {key: value for key, value in rng_state().items() if key != "numpy"}
    set_rng_state(
        {**state, "devices": [b"\0" * 16] * 8} if not torch.accelerator.is_available() else state
    )


# -- what is to come


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (lambda p: torch.optim.Adam(p), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (lambda p: torch.optim.SGD(p, lr=1, momentum=0.9), 1),
        (lambda p: torch.optim.SGD(p, lr=1), 0),
    ],
)
def test_room_for_the_first_step_of_an_optimizer(make: Any, moments: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = make([parameter])
    assert optimizer_bytes_to_come({"optim": optimizer}) == moments * (4000 + 512)
    assert optimizer_bytes_to_come({"optim": optimizer}, world_size=4) == moments * (1000 + 512)
    parameter.grad = torch.ones(1000)
    optimizer.step()
    if moments:
        assert optimizer_bytes_to_come({"optim": optimizer}) == 0
