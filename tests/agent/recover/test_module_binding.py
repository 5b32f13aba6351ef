"""Tests that a module is given its saved state in its own way, and ends as after
torch's own round trip, bit for bit.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.agent.recover import module_binding
from ckptd.shared.errors import RecoveryFailed, StructureMismatch
from tests.oracle.prints import text
from tests.support.cases import each_case
from tests.support.refusals import exit_of, refusal, refuses
from tests.support.saved_states import Checkpoint


def linear(fill: float) -> nn.Linear:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, fill)
    nn.init.constant_(made.bias, fill + 0.5)
    return made


class Renames(nn.Module):
    """Loads a state of its former version too, which had the parameter under another
    name and half as large.
    """

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.full((2,), fill))
        self.register_load_state_dict_pre_hook(self._former)

    @staticmethod
    def _former(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}new"] = state.pop(f"{prefix}old") * 2


class Former(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.full((2,), fill))


class Halves(nn.Module):
    """Saves its parameters in another unit than it holds them."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.inner = linear(fill)
        self.register_state_dict_post_hook(self._times(0.5))
        self.register_load_state_dict_pre_hook(self._times(2.0))

    @staticmethod
    def _times(factor: float) -> Callable[..., None]:
        def hook(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
            state.update(
                {key: value * factor for key, value in state.items() if key.startswith(prefix)}
            )

        return hook


class Overrides(nn.Module):
    """Has a state dict of its own form."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.inner, self.note = linear(fill), fill

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"parts": [self.inner.state_dict()], "note": self.note}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.inner.load_state_dict(state_dict["parts"][0])
        self.note = state_dict["note"]


class Resizes(nn.Module):
    """Has a buffer whose size is that of the saved one."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.inner = linear(fill)
        self.register_buffer("seen", torch.full((int(fill) + 1,), fill))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.seen = torch.zeros_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *args)


class Extra(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.inner, self.extra = linear(fill), {"fill": fill, "table": torch.full((2,), fill)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Counts(nn.Module):
    """Counts the times that it was loaded."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.inner = linear(fill)
        self.register_buffer("loads", torch.zeros(()))
        self.register_load_state_dict_post_hook(self._count)

    @staticmethod
    def _count(module: Any, keys: Any) -> None:
        module.loads += 1


class Versioned(nn.Module):
    """Knows by its version how its state was saved."""

    _version = 2

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.inner = linear(fill)
        self.found: Any = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.found = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


def round_trip(saved: nn.Module, into: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    into.load_state_dict(torch.load(file, weights_only=False))


def lazy(fill: float) -> nn.Module:
    return nn.LazyLinear(2) if fill == 0 else linear(fill)


KINDS: dict[str, tuple[Callable[[float], nn.Module], Callable[[float], nn.Module]]] = {
    "load hook that renames": (Former, Renames),
    "state-dict and load hooks": (Halves, Halves),
    "own loader that resizes a buffer": (Resizes, Resizes),
    "extra state": (Extra, Extra),
    "load post hook": (Counts, Counts),
    "version": (Versioned, Versioned),
    "lazy": (lazy, lazy),
    "plain": (linear, linear),
    "weight norm of an old version": (
        lambda fill: torch.nn.utils.weight_norm(linear(fill)),
        lambda fill: nn.utils.parametrizations.weight_norm(linear(fill + 1)),
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@each_case("inside", [False, True], ids=["alone", "inside of another"])
@each_case("kind", KINDS)
def test_a_module_that_loads_in_its_own_way_ends_as_after_torchs_round_trip(
    kind: str, inside: bool
) -> None:
    def wrapped(module: nn.Module, fill: float) -> nn.Module:
        return nn.Sequential(linear(fill), module, linear(fill + 1)) if inside else module

    saves, loads = KINDS[kind]
    saved, ours, theirs = (
        wrapped(saves(3.0), 3.0),
        wrapped(loads(0.0), 0.0),
        wrapped(loads(0.0), 0.0),
    )
    round_trip(saved, theirs)
    Checkpoint({"net": saved}).recover({"net": ours})
    assert text(ours) == text(theirs)
    assert list(map(type, ours.parameters())) == list(map(type, theirs.parameters()))
    assert [getattr(part, "found", None) for part in ours.modules()] == [
        getattr(part, "found", None) for part in theirs.modules()
    ]


def test_a_module_with_methods_of_its_own_gets_its_state_in_its_own_form() -> None:
    ours, theirs = Overrides(0.0), Overrides(0.0)
    round_trip(Overrides(3.0), theirs)
    Checkpoint({"net": Overrides(3.0)}).recover({"net": ours})
    assert (text(ours), ours.note) == (text(theirs), 3.0)


def test_what_is_kept_stays_in_a_module_that_loads_by_itself() -> None:
    for make in (Resizes, Extra, Counts):
        module: Any = nn.Sequential(make(0.0), linear(0.0))
        Checkpoint({"net": nn.Sequential(make(3.0), linear(3.0))}).recover(
            {"net": module}, keep=["net.0.inner.weight", "net.1.bias"]
        )
        assert (
            module[0].inner.weight.unique().tolist(),
            module[0].inner.bias.unique().tolist(),
        ) == ([0.0], [3.5])
        assert (module[1].weight.unique().tolist(), module[1].bias.unique().tolist()) == (
            [3.0],
            [0.5],
        )


def test_a_plain_module_is_written_in_place_and_its_method_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(module_binding, "load_into", lambda *args, **kwargs: called.append("load"))
    plain = linear(0.0)
    weight = plain.weight
    Checkpoint({"net": linear(3.0)}).recover({"net": plain})
    assert (called, plain.weight is weight, weight.unique().tolist()) == ([], True, [3.0])


def test_an_error_in_a_loader_of_the_caller_says_that_the_state_is_partly_overwritten() -> None:
    class Raises(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("not ready")

    with pytest.raises(
        RecoveryFailed,
        match=r"^net: load_state_dict\(\) of .*Raises raised ValueError\('not ready'\); "
        r".*keep=\['net'\]",
    ) as caught:
        Checkpoint({"net": nn.Linear(2, 2)}).recover({"net": Raises(2, 2)})
    assert caught.value.overwritten
    untouched = Raises(2, 2)
    Checkpoint({"net": nn.Linear(2, 2), "epoch": 3}).recover(
        state := {"net": untouched, "epoch": 0}, keep=["net"]
    )
    assert state["epoch"] == 3


# -- refusals


def test_a_module_whose_state_dict_raises_is_refused_by_its_key() -> None:
    class Unready(nn.Linear):
        def get_extra_state(self) -> Any:
            raise KeyError("not yet")

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError("it is not loaded")

    saved = Checkpoint({"net": linear(3.0), "epoch": 4})
    state: dict[str, Any] = {"net": Unready(2, 2), "epoch": 0}
    with pytest.raises(StructureMismatch) as caught:
        saved.recover(state)
    assert str(caught.value).startswith("net: the state_dict() of ")
    assert (
        "Unready raised KeyError('not yet'): call it when it works, or leave it out; nothing was "
        "written. To " in str(caught.value)
    )
    assert state["epoch"] == 0
    saved.recover(state, keep=["net"])
    assert state["epoch"] == 4


def test_a_module_without_a_match_is_refused_although_strict_is_off() -> None:
    saved, state = {"net": linear(3.0), "epoch": 4}, {"net": nn.Sequential(linear(0.0)), "epoch": 0}
    words = (
        "net: no key of the module is in the checkpoint, which has weight, bias, while the state "
        "has 0.weight, 0.bias"
    )
    refuses(Checkpoint(saved), state, words, {"strict": False, "keep": ["net"]}, strict=False)
    assert state["epoch"] == 4
    assert text(state["net"]) == text(nn.Sequential(linear(0.0)))


@pytest.mark.parametrize("made", [linear, Resizes])
def test_a_module_that_was_saved_without_state_does_not_match_one_with_parameters(
    made: Callable[[float], nn.Module],
) -> None:
    """The training would go on from random weights without a word."""
    saved, state = Checkpoint({"net": nn.Dropout(), "epoch": 4}), {"net": made(0.0), "epoch": 0}
    words, call = refusal(saved, state, strict=False)
    assert words.startswith(
        "net: no key of the module is in the checkpoint, which has none, while the state has "
    )
    assert call == {"strict": False, "keep": ["net"]}
    saved.recover(state, strict=False, keep=["net"])
    assert state["epoch"] == 4


def test_a_module_of_parts_with_loaders_without_a_match_is_refused_although_strict_is_off() -> None:
    saved = {"net": nn.ModuleDict({"first": Resizes(3.0)}), "epoch": 4}
    state = {"net": nn.ModuleDict({"renamed": Resizes(0.0)}), "epoch": 0}
    words = (
        "net: no key of the module is in the checkpoint, which has first.seen, "
        "first.inner.weight, first.inner.bias, "
        "while the state has renamed.seen, renamed.inner.weight, renamed.inner.bias"
    )
    refuses(Checkpoint(saved), state, words, {"strict": False, "keep": ["net"]}, strict=False)
    assert state["epoch"] == 4


def test_a_module_with_a_loader_without_a_match_is_refused_although_strict_is_off() -> None:
    saved, state = {"net": nn.ModuleDict({"first": Resizes(3.0)})}, {"net": Resizes(0.0)}
    words = (
        "net: no key of the module is in the checkpoint, which has first.seen, "
        "first.inner.weight, first.inner.bias, while the state has seen, inner.weight, inner.bias"
    )
    assert refusal(Checkpoint(saved), state, strict=False)[0] == words


def test_a_module_of_which_a_part_with_a_loader_matches_is_no_module_without_a_match() -> None:
    class Doubling(nn.Linear):
        """Saves its weight doubled, and halves it when it loads."""

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}double"] = self.weight.detach() * 2

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            with torch.no_grad():
                self.weight.copy_(state_dict[f"{prefix}double"] / 2)

    def of(name: str, fill: float) -> nn.ModuleDict:
        own = Doubling(2, 2, bias=False)
        nn.init.constant_(own.weight, fill)
        return nn.ModuleDict({"own": own, name: linear(fill)})

    state: dict[str, Any] = {"net": of("renamed", 0.0)}
    Checkpoint({"net": of("plain", 3.0)}).recover(state, strict=False)
    assert state["net"]["own"].weight.tolist() == [[3.0, 3.0]] * 2
    assert state["net"]["renamed"].weight.tolist() == [[0.0, 0.0]] * 2


def test_a_module_on_the_meta_device_is_refused_until_it_has_memory() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    say = (
        "the state's tensor is on the meta device; give it memory first "
        "(module.to_empty(device=...))"
    )
    refuses(
        Checkpoint({"net": linear(3.0)}),
        {"net": module},
        f"net.weight: {say}; net.bias: {say}",
        {"keep": ["net.weight", "net.bias"]},
    )
    module = module.to_empty(device="cpu")
    Checkpoint({"net": linear(3.0)}).recover({"net": module})
    assert text(module) == text(linear(3.0))


def test_a_freed_storage_is_refused_until_it_has_memory() -> None:
    module = linear(0.0)
    module.weight.untyped_storage().resize_(0)
    words, call = refusal(Checkpoint({"net": linear(3.0)}), {"net": module})
    assert (words, call) == (
        "net.weight: the tensor needs 16 bytes, and its storage has 0: give it memory first",
        {"keep": ["net.weight"]},
    )
    module.weight.untyped_storage().resize_(16)
    Checkpoint({"net": linear(3.0)}).recover({"net": module})
    assert text(module) == text(linear(3.0))


def test_a_view_beyond_its_storage_is_refused() -> None:
    memory = torch.zeros(8)
    state = {"view": memory[4:]}
    memory.untyped_storage().resize_(20)
    words, _ = refusal(Checkpoint({"view": torch.ones(4)}), state)
    assert words == "view: the tensor needs 32 bytes, and its storage has 20: give it memory first"


def test_a_fake_tensor_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module = nn.Linear(2, 2)
    with pytest.raises(StructureMismatch) as caught:
        Checkpoint({"net": linear(3.0)}).recover({"net": module})
    say = (
        "the state's tensor is a fake tensor, which has no memory; make it outside of "
        "FakeTensorMode"
    )
    assert str(caught.value).startswith(f"net.weight: {say}; net.bias: {say}; nothing was written")
    Checkpoint({"net": linear(3.0)}).recover({"net": module}, **exit_of(caught.value))


def test_an_uninitialized_parameter_is_refused_until_it_has_memory() -> None:
    """One in a lazy module is made by the module's own loader, as torch does it."""
    state = {"w": nn.UninitializedParameter(), "epoch": 0}
    words, call = refusal(Checkpoint({"w": torch.ones(2), "epoch": 1}), state)
    assert (words, call) == (
        "w: the state's tensor has no memory yet; run one forward pass of the lazy module first",
        {"keep": ["w"]},
    )
    state["w"].materialize((2,))  # type: ignore[attr-defined]
    Checkpoint({"w": torch.ones(2), "epoch": 1}).recover(state)
    assert (state["w"].tolist(), state["epoch"]) == ([1.0, 1.0], 1)  # type: ignore[attr-defined]


def test_another_shape_is_refused_whatever_strict_says() -> None:
    saved, state = {"net": linear(3.0)}, {"net": nn.Linear(2, 3)}
    for options in ({}, {"strict": False}):
        words, call = refusal(Checkpoint(saved), state, **options)
        assert (
            words == "net.weight: the checkpoint has shape [2, 2], the state [3, 2]; net.bias: the "
            "checkpoint has shape [2], the state [3]"
        )
        assert call == {**options, "keep": ["net.weight", "net.bias"]}
        Checkpoint(saved).recover(state, **call)
