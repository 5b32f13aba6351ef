"""Each refusal names the key, and says what to save instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptd.agent import Agent
from ckptd.agent.state.refusals import check_text, digits, said, too_deep
from ckptd.shared.bounds import MAX_DEPTH
from ckptd.shared.errors import UnsavableValue
from tests.support.daemons import Daemon
from tests.support.ranks import Ranks


def test_text_that_utf_8_cannot_encode_is_refused() -> None:
    for text in ("", "plain", "é", "\U0001f600"):
        check_text(text, "a.b")
    with pytest.raises(UnsavableValue, match=r"^a\.b: a text or key holds surrogates, which UTF-8 cannot encode: 'x\\ud800'$"):
        check_text("x\ud800", "a.b")
    with pytest.raises(UnsavableValue, match="^the state: a text or key holds surrogates"):
        check_text("\udfff" * 100, "")


def test_a_container_that_contains_itself_is_told_from_deep_nesting() -> None:
    deep = [(number, "x" * number) for number in range(MAX_DEPTH)]
    assert str(too_deep(deep, "x" * 200)) == (
        f"{'x' * 80}...: it lies in more than {MAX_DEPTH} containers; nest the state less, or save the inner part under a key of its own"
    )
    assert str(too_deep([(1, "a"), (2, "a.b"), (1, "a.b.c")], "")) == (
        "a.b.c: it is the same object as a, which contains itself; save a copy, or leave it out"
    )
    assert str(too_deep([(1, ""), (1, "self")], "")).startswith("self: it is the same object as the state, which contains itself")


def test_an_integer_is_saved_with_as_many_digits_as_python_writes() -> None:
    most = sys.get_int_max_str_digits()
    assert digits(-(10**5), "n") == b"-100000"
    assert len(digits(10 ** (most - 1), "n")) == most
    with pytest.raises(
        UnsavableValue, match=r"^n: an integer of about [\d,]+ digits; expected at most 4,300, as many as Python converts to text"
    ):
        digits(10**most, "n")
    with pytest.raises(UnsavableValue, match="^the state: "):
        digits(10**most, "")


def test_a_value_that_python_cannot_write_is_named_by_its_type() -> None:
    assert (said(str, [1]), said(repr, "x"), said(str, [10 ** (sys.get_int_max_str_digits() + 1)])) == ("[1]", "'x'", "list")


class Quantized(torch.Tensor):
    """A tensor of codes and one scale, as an 8-bit optimizer keeps its moments."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
        made: Quantized = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale"], {}

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], context: Any, size: Any, stride: Any) -> Quantized:
        return Quantized(**parts)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls(args[0].codes, args[0].scale)  # of `detach` and `view`, the only functions that are called


def snapshot_of_quantized_shards(socket: Path) -> tuple[str, dict[str, str], list[float]]:
    """Runs on a rank. Return the refusal, what is left out with `unsavable`, and what comes back of the rest."""
    shard = Quantized(torch.ones(4, dtype=torch.int8), torch.ones(1))
    weight = torch.nn.Parameter(torch.full((4,), 3.0))
    optimizer = torch.optim.AdamW([weight])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)}
    agent, state = Agent("gpt", socket=socket), {"w": weight, "optim": optimizer}
    with pytest.raises(UnsavableValue) as caught:
        agent.snapshot(state, step=1)
    pending = agent.snapshot(state, step=2, unsavable="skip")
    pending.wait("durable", timeout=60)
    new = {"w": torch.zeros(4)}
    assert agent.recover(new, strict=False) is not None
    agent.close()
    return str(caught.value), dict(pending.unsaved or {}), new["w"].tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_dtensor_of_wrapper_subclasses_is_refused_at_the_first_snapshot(daemon: Daemon, world_size: int) -> None:
    with Ranks(world_size) as ranks:
        for refusal, unsaved, rest in ranks.call(snapshot_of_quantized_shards, daemon.home.socket):
            sentence = (
                f"optim.state.w.exp_avg: a DTensor whose shards are of class {__name__}.Quantized, which consist of several tensors, "
                "cannot be saved, because these need not be divided as the DTensor is: use plain tensors, such as an optimizer with a "
                "state that is not quantized, or leave such values out (unsavable='skip')"
            )
            assert refusal.removeprefix("rank 0: ").removeprefix("rank 1: ") == sentence
            assert unsaved == {"optim.state.w.exp_avg": sentence}
            assert rest == [3.0] * 4
