"""Each refusal of a tensor names its key, and says what to save instead."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptd.agent import Agent
from ckptd.agent.state.tensor_check import check_tensor, is_expanded
from ckptd.shared.errors import UnsavableValue
from tests.support.daemons import Daemon
from tests.support.ranks import Ranks


class Quantized(torch.Tensor):
    """A tensor of codes and one scale, as an 8-bit optimizer keeps its moments."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
        made: Quantized = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale"], {}

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Any], context: Any, size: Any, stride: Any
    ) -> Quantized:
        return Quantized(**parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Of `detach` and `view`, the only functions that are called.
        return cls(args[0].codes, args[0].scale)


def snapshot_of_quantized_shards(socket: Path) -> tuple[str, dict[str, str], list[float]]:
    """Runs on a rank.

    Return the refusal, what is left out with `unsavable`, and what comes back of the
    rest.
    """
    shard = Quantized(torch.ones(4, dtype=torch.int8), torch.ones(1))
    weight = torch.nn.Parameter(torch.full((4,), 3.0))
    optimizer = torch.optim.AdamW([weight])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    optimizer.state[weight] = {
        "step": torch.tensor(1.0),
        "exp_avg": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False),
    }
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
def test_a_dtensor_of_wrapper_subclasses_is_refused_at_the_first_snapshot(
    daemon: Daemon, world_size: int
) -> None:
    with Ranks(world_size) as ranks:
        for refusal, unsaved, rest in ranks.call(snapshot_of_quantized_shards, daemon.home.socket):
            sentence = (
                f"optim.state.w.exp_avg: cannot save this DTensor, because its shards are of class "
                f"{__name__}.Quantized, which consists of several tensors that may be divided "
                f"differently from the DTensor: use plain tensors (for example, an optimizer whose "
                f"state is not quantized), or leave such values out (unsavable='skip')"
            )
            assert refusal.removeprefix("rank 0: ").removeprefix("rank 1: ") == sentence
            assert unsaved == {"optim.state.w.exp_avg": sentence}
            assert rest == [3.0] * 4


def quantized(values: torch.Tensor, *, by_channel: bool) -> torch.Tensor:
    """Return a tensor of torch's deprecated quantized dtypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if by_channel:
            scales, zeros = (
                torch.full((len(values),), 0.5),
                torch.zeros(len(values), dtype=torch.int64),
            )
            return torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
        return torch.quantize_per_tensor(values, 0.5, 3, torch.quint8)


@pytest.mark.skipif(
    not hasattr(torch, "quantize_per_tensor"), reason="this torch has no quantized dtypes any more"
)
def test_a_quantized_tensor_is_refused_by_its_key_and_its_parts_can_be_saved(
    daemon: Daemon,
) -> None:
    tensor = quantized(torch.tensor([1.0, -1.5]), by_channel=False)
    model = torch.nn.Module()
    model.register_buffer("weight", tensor)
    state: dict[str, Any] = {"net": model, "epoch": 7}
    agent = Agent("gpt", socket=daemon.home.socket)
    with pytest.raises(UnsavableValue) as caught:
        agent.snapshot(state, step=1)
    sentence = (
        "net.weight: a quantized tensor (torch.quint8) cannot be saved: save its parts instead, "
        "which are int_repr(), q_scale() "
        "and q_zero_point(), or its values, dequantize(), or leave it out (unsavable='skip')"
    )
    assert str(caught.value) == sentence
    pending = agent.snapshot(state, step=2, unsavable="skip")
    pending.wait("durable", timeout=60)
    assert pending.unsaved == {"net.weight": sentence}
    parts = {"codes": tensor.int_repr(), "scale": tensor.q_scale(), "zero": tensor.q_zero_point()}
    agent.snapshot({"weight": parts, "values": tensor.dequantize()}, step=3).wait(
        "durable", timeout=60
    )
    found: dict[str, Any] = {"weight": {}, "values": torch.zeros(2)}
    assert agent.recover(found) is not None
    agent.close()
    assert (
        found["weight"]["codes"].tolist(),
        found["weight"]["scale"],
        found["weight"]["zero"],
    ) == ([5, 0], 0.5, 3)
    assert found["values"].tolist() == [1.0, -1.5]


@pytest.mark.skipif(
    not hasattr(torch, "quantize_per_channel"), reason="this torch has no quantized dtypes any more"
)
def test_the_parts_of_a_tensor_that_is_quantized_by_channel_are_named() -> None:
    tensor = quantized(torch.ones(2, 2), by_channel=True)
    with pytest.raises(UnsavableValue) as caught:
        check_tensor("w", tensor)
    assert str(caught.value) == (
        "w: a quantized tensor (torch.qint8) cannot be saved: save its parts instead, which are "
        "int_repr(), "
        "q_per_channel_scales(), q_per_channel_zero_points() and q_per_channel_axis(), or its "
        "values, dequantize(), or leave it out (unsavable='skip')"
    )
    for part in ("int_repr", "q_per_channel_scales", "q_per_channel_zero_points", "dequantize"):
        assert check_tensor("w", getattr(tensor, part)()).layout is torch.strided


class Own(torch.Tensor):
    """A class that ckptd does not know, without parts of its own."""


VIEW = torch.ones(2, dtype=torch.uint8).view(torch.qint8)


@pytest.mark.parametrize(
    ("tensor", "problem", "remedy"),
    [
        (VIEW, "a view in the quantized dtype torch.qint8", "the tensor that it is a view of"),
        (
            torch.ones(2, device="meta"),
            "a tensor on the meta device, which has no values,",
            "a tensor with values",
        ),
        (
            torch.ones(2).as_subclass(Own),
            f"a tensor of type {__name__}.Own",
            "a torch.Tensor of its values",
        ),
    ],
    ids=["view", "meta", "subclass"],
)
def test_a_tensor_that_cannot_be_saved_is_refused_with_what_to_save(
    tensor: torch.Tensor, problem: str, remedy: str
) -> None:
    with pytest.raises(UnsavableValue) as caught:
        check_tensor("w", tensor)
    assert (
        str(caught.value)
        == f"w: {problem} cannot be saved: save {remedy} instead, or leave it out "
        f"(unsavable='skip')"
    )


def test_a_tensor_is_expanded_if_elements_share_memory() -> None:
    one = torch.zeros(1)
    assert is_expanded(one.expand(3))
    assert is_expanded(torch.zeros(2, 1).expand(2, 3))
    for tensor in (one.expand(1), one.expand(0), torch.zeros(3)[::2], torch.eye(2).to_sparse()):
        assert not is_expanded(tensor)
