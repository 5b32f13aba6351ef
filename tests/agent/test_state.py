"""Tests that everything a state may hold comes back as it was, into the caller's own
objects and as a fresh tree.
"""

from __future__ import annotations

import collections
import enum
import math
import pathlib
import random
import warnings
from contextlib import closing
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from ckptd.agent import Agent, Checkpoint
from ckptd.agent.plan.layout import memory
from ckptd.shared import errors
from ckptd.shared.formats.plan import ITEM_SIZES
from tests.support.shared_daemon import LentDaemon

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bit"))
    },
    key=str,
)


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


def patterned(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return a tensor with all bit patterns that matter, NaN payloads included.

    A bool stays 0 or 1.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raw = (
            torch.arange(count * dtype.itemsize, dtype=torch.int64).mul(37).add(11).to(torch.uint8)
        )
        return (raw % 2 if dtype is torch.bool else raw).view(dtype)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements in C order, as bytes."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
        tensor.element_size()
    )
    plain = (
        tensor.detach().view(integer)
        if integer is not None
        else torch.view_as_real(tensor.detach())
    )
    # Flat, because an array of NumPy 1 has at most 32 dimensions.
    return plain.contiguous().flatten().numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """Return True if both are equal in value, type, dtype, shape and bits."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and raw_bytes(one) == raw_bytes(other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return (
            list(one) == list(other)
            and all(type(a) is type(b) for a, b in zip(one, other, strict=True))
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, np.ndarray):
        return bool(
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


@pytest.fixture
def daemon(shared_daemon: LentDaemon) -> LentDaemon:
    return shared_daemon


@pytest.fixture
def agent(daemon: LentDaemon) -> Any:
    made = Agent(daemon.job, socket=daemon.home.socket)
    yield made
    if not made.closed:
        made.close()


def saved(agent: Agent, daemon: LentDaemon, state: Any, step: int = 1, **options: Any) -> Any:
    """Save the state, and load it as a fresh tree."""
    agent.snapshot(state, step=step, **options).wait("durable", timeout=60)
    with Checkpoint.open(daemon.directory, step) as checkpoint:
        checkpoint.verify()
        return checkpoint.load()


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_comes_back(agent: Agent, daemon: LentDaemon) -> None:
    state = {str(dtype): patterned(dtype, 1003) for dtype in DTYPES}
    before = {key: raw_bytes(value) for key, value in state.items()}
    assert same(saved(agent, daemon, state), state)
    for value in state.values():
        memory(value, value.nbytes)[:] = bytes(value.nbytes)
    agent.recover(state)
    assert {key: raw_bytes(value) for key, value in state.items()} == before


@pytest.mark.parametrize(
    "name", ["int3", "float8_e5m2", "uint16", "complex32", "uint64", "complex128"]
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_a_dtype_that_the_format_does_not_list(
    agent: Agent, daemon: LentDaemon, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delitem(ITEM_SIZES, name)
    dtype = getattr(torch, name)
    whole = patterned(dtype, 1000)
    state = {
        "plain": patterned(dtype, 1003), "permuted": patterned(dtype, 24).view(2, 3, 4).permute(2,
        0, 1), "strided": patterned(dtype, 90).view(9, 10)[::2, 1:7], "whole": whole,
        "view": whole[10:20],
    }  # fmt: skip
    before = {key: raw_bytes(value) for key, value in state.items()}
    tree = saved(agent, daemon, state)
    assert {key: (value.dtype, raw_bytes(value)) for key, value in tree.items()} == {
        key: (dtype, found) for key, found in before.items()
    }
    with Checkpoint.open(daemon.directory) as checkpoint:
        assert (
            checkpoint.manifest.metadata["state_dict_metadata"]["plain"]["dtype"]
            == f"{name}/{dtype.itemsize}"
        )
        assert checkpoint.metadata("plain") == (dtype, torch.Size([1003]))
        assert raw_bytes(checkpoint.tensor("permuted", slices=(slice(1, 3),))) == raw_bytes(
            state["permuted"][1:3]
        )
    for value in (state["plain"], state["permuted"], state["whole"]):
        memory(value, value.nbytes)[:] = bytes(value.nbytes)
    agent.recover(state)
    assert {key: raw_bytes(value) for key, value in state.items()} == before


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_a_conjugate_view_of_a_dtype_that_torch_cannot_copy_everywhere(
    agent: Agent, daemon: LentDaemon
) -> None:
    original = patterned(torch.complex32, 5)
    tree = saved(agent, daemon, {"view": original.conj()})
    assert raw_bytes(tree["view"]) == raw_bytes(original.conj().resolve_conj())


def test_a_conjugate_view_that_torch_cannot_resolve(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.Tensor,
        "resolve_conj",
        mock.Mock(side_effect=NotImplementedError("as for bcomplex32 in torch 2.15")),
    )
    with pytest.raises(
        errors.UnsavableValue,
        match=r"^a\.view: a conjugate or negative view of dtype torch\.complex64 cannot be saved",
    ):
        agent.snapshot({"a": {"view": torch.ones(3, dtype=torch.complex64).conj()}}, step=1)
    with pytest.raises(
        errors.SnapshotFailed,
        match=r"^nothing of this run was saved: its only snapshot failed; .*a\.view",
    ):
        agent.close()


def test_shapes_and_strides_come_back(agent: Agent, daemon: LentDaemon) -> None:
    base = torch.arange(4 * 6 * 5 * 7, dtype=torch.float32).view(4, 6, 5, 7)
    state = {
        "zero_dim": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "transposed": base.clone().permute(3, 1, 0, 2),
        "channels_last": base.clone().to(memory_format=torch.channels_last),
        "strided": base.clone()[::2, :, 1:4:2],
        "expanded": torch.tensor([1.0, 2.0]).unsqueeze(1).expand(2, 9),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "grad": torch.ones(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    tree = saved(agent, daemon, state)
    assert {key: value.tolist() for key, value in tree.items()} == {
        key: value.tolist() for key, value in state.items()
    }
    assert tree["empty"].shape == (0, 3)
    assert tree["transposed"].stride() == state["transposed"].stride()
    assert tree["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert tree["grad"].requires_grad
    assert tree["parameter"].requires_grad
    assert not tree["zero_dim"].requires_grad
    blank = {key: torch.zeros_like(value) for key, value in state.items()}
    agent.recover(blank)
    assert {key: value.tolist() for key, value in blank.items()} == {
        key: value.tolist() for key, value in state.items()
    }


def test_shared_storage_is_stored_once_and_shared_again(agent: Agent, daemon: LentDaemon) -> None:
    big = torch.randn(1000, 100)
    buffer = torch.arange(20, dtype=torch.int32)
    state = {
        "whole": big, "same": big, "rows": big[10:20], "columns": big[:, ::3],
        "bits": big.view(torch.int32)[5], "evens": buffer[::2], "odds": buffer[1::2],
    }  # fmt: skip
    pending = agent.snapshot(state, step=1)
    pending.wait("durable", timeout=60)
    with Checkpoint.open(daemon.directory) as checkpoint:
        assert sum(part.raw_bytes for part in checkpoint.manifest.parts) < big.nbytes * 1.2
        tree = checkpoint.load()
        assert same(checkpoint.tensor("rows"), big[10:20])
        assert same(checkpoint.tensor("columns"), big[:, ::3])
        assert same(checkpoint.tensor("odds"), buffer[1::2])
        assert sorted(checkpoint.keys()) == sorted(state)
    assert same(tree, state)
    tree["whole"][10, 0] = 77.0
    assert tree["same"][10, 0] == tree["rows"][0, 0] == tree["columns"][10, 0] == 77.0
    tree["whole"].view(torch.int32)[5, 5] = 12345
    assert tree["bits"][5] == 12345
    assert tree["evens"].untyped_storage().data_ptr() == tree["odds"].untyped_storage().data_ptr()
    assert tree["whole"].untyped_storage().data_ptr() != tree["evens"].untyped_storage().data_ptr()


def test_sharing_that_changes_between_snapshots(agent: Agent, daemon: LentDaemon) -> None:
    one, two = torch.randn(50), torch.randn(50)
    assert same(saved(agent, daemon, {"a": one, "b": two}, 1), {"a": one, "b": two})
    assert same(saved(agent, daemon, {"a": one, "b": one}, 2), {"a": one, "b": one})
    base = torch.randn(80)
    assert same(
        saved(agent, daemon, {"a": base[:50], "b": base[30:]}, 3), {"a": base[:50], "b": base[30:]}
    )
    assert same(
        saved(agent, daemon, {"a": base[10:60], "b": base[5:55]}, 4),
        {"a": base[10:60], "b": base[5:55]},
    )
    assert same(saved(agent, daemon, {"a": one, "b": two}, 5), {"a": one, "b": two})


def test_plain_values_come_back_with_their_types(agent: Agent, daemon: LentDaemon) -> None:
    state: dict[Any, Any] = {
        "none": None, "true": True, "int": -(2**63), "big": 2**200, "float": 0.1, "nan": math.nan,
        "inf": -math.inf, "zero": -0.0, "text": "größer\n\0", "bytes": b"\0\xff",
        "bytearray": bytearray(b"ab"), "complex": 1 - 2j, "tuple": (1, (2, []), {}), "set": {1, 2},
        "frozen": frozenset({"a"}), "list": [1, [2.0, None]], 7: {"int key": 1, (1, 2): "tuple key",
        None: "none key", True: "bool key"}, "7": "text key",
        "ordered": collections.OrderedDict([("b", 1), ("a", torch.ones(2))]),
        "counter": collections.Counter("abca"), "deque": collections.deque([1, 2], maxlen=5),
        "enum": Colour.GREEN, "path": pathlib.PurePosixPath("/a/b"), "dtype": torch.bfloat16,
        "device": torch.device("cuda", 3), "size": torch.Size([2, 3]), "array": np.arange(12,
        dtype=np.int16).reshape(3, 4).T, "scalar": np.float32(1.5), "npbool": np.bool_(True),
        "datetime": np.datetime64("2026-01-02"), "structured": np.zeros(2, dtype=[("a", "<i4"),
        ("b", "<f8")]), "a.b": torch.ones(1), "a": {"b": torch.zeros(1)},
    }  # fmt: skip
    tree = saved(agent, daemon, state)
    assert set(map(repr, tree)) == set(map(repr, state))
    assert same(tree, state)
    assert math.copysign(1, tree["zero"]) == -1
    assert tree["deque"].maxlen == 5
    into: dict[Any, Any] = {}
    agent.recover(into)
    assert same(into, state)


def test_values_return_into_the_callers_own_containers(agent: Agent, daemon: LentDaemon) -> None:
    inner: dict[str, Any] = {"lr": 0.1, "t": torch.ones(2)}
    history = [1.0, 2.0]
    state = {"inner": inner, "history": history, "pair": (torch.ones(3), 5), "step": 10}
    agent.snapshot(state, step=1).wait("sealed")
    tensor = state["pair"][0]  # type: ignore[index]
    inner["lr"], state["step"] = 99.0, 0
    inner["t"].zero_()
    tensor.zero_()
    history[:] = [7.0, 8.0, 9.0]
    state["pair"] = (tensor, 6)
    agent.recover(state)
    assert state["inner"] is inner
    assert inner["lr"] == 0.1
    assert inner["t"].tolist() == [1.0, 1.0]
    assert state["history"] is history
    assert history == [1.0, 2.0]
    assert state["pair"][0] is tensor  # type: ignore[index]
    assert tensor.tolist() == [1.0] * 3
    assert state["pair"][1] == 5  # type: ignore[index]
    assert state["step"] == 10


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(x)))
        return out

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.loaded_extra = state


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randint(0, 20, (16,))).square().mean().backward()
        optimizer.step()


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "LBFGS": None,
}


@pytest.mark.parametrize("kind", [kind for kind, make in OPTIMIZERS.items() if make])
@pytest.mark.parametrize("fresh", [True, False])
def test_training_continues_bit_for_bit(
    agent: Agent, daemon: LentDaemon, kind: str, fresh: bool
) -> None:
    make = OPTIMIZERS[kind]
    assert make is not None
    torch.manual_seed(0)
    net = Net()
    optimizer = make(net.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    train(net, optimizer)
    scheduler.step()
    before = optimizer.state_dict()
    agent.snapshot({"net": net, "optim": optimizer, "sched": scheduler}, step=1).wait("sealed")
    assert str(optimizer.state_dict()) == str(before)
    train(net, optimizer)
    scheduler.step()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    wanted = {
        key: value.clone()
        for key, value in net.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    if fresh:
        torch.manual_seed(99)
        net = Net()
        optimizer = make(net.parameters())
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    recovered = agent.recover({"net": net, "optim": optimizer, "sched": scheduler})
    assert recovered is not None
    assert net.loaded_extra == {"version": 3}
    assert net.head.weight is net.embed.weight
    train(net, optimizer)
    scheduler.step()
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn
    assert len(wanted) > 3
    assert [key for key, value in wanted.items() if not same(net.state_dict()[key], value)] == []


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_numpys_generator_continues_its_sequence(agent: Agent, kind: Any) -> None:
    generators: Any = np.random
    before = generators.get_bit_generator()
    try:
        generators.set_bit_generator(kind(7))
        np.random.standard_normal()  # it keeps a second number for the next call, with MT19937
        agent.snapshot({"epoch": 1}, step=1).wait("sealed")
        drawn = np.random.standard_normal(3).tobytes()
        generators.set_bit_generator(kind(8))
        agent.recover({"epoch": 0})
        assert np.random.standard_normal(3).tobytes() == drawn
    finally:
        generators.set_bit_generator(before)


def test_an_optimizer_without_state_is_captured_as_empty(agent: Agent, daemon: LentDaemon) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    tree = saved(agent, daemon, {"net": net, "optim": optimizer})
    assert tree["optim"]["state"] == {}
    assert len(optimizer.state) == 0
    train(net, optimizer)
    agent.recover({"net": net, "optim": optimizer})
    assert len(optimizer.state) == 0


def test_optimizer_state_is_named_by_parameter(agent: Agent, daemon: LentDaemon) -> None:
    net = Net()
    groups: list[dict[str, Any]] = [
        {"params": [net.embed.weight]},
        {"params": list(net.norm.parameters()), "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    train(net, optimizer)
    agent.snapshot({"net": net, "optim": optimizer}, step=1).wait("durable", timeout=60)
    with Checkpoint.open(daemon.directory) as checkpoint:
        assert same(
            checkpoint.tensor("optim.state.norm.bias.exp_avg"),
            optimizer.state[net.norm.bias]["exp_avg"],
        )
        tree = checkpoint.load()
    assert [group["params"] for group in tree["optim"]["param_groups"]] == [
        ["embed.weight"],
        ["norm.weight", "norm.bias"],
    ]
    assert tree["optim"]["param_groups"][1]["lr"] == 0.5


def test_optimizer_of_foreign_parameters_keeps_its_numbers(
    agent: Agent, daemon: LentDaemon
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    tree = saved(agent, daemon, {"optim": optimizer})
    assert list(tree["optim"]["state"]) == [0]
    wanted = optimizer.state[parameter]["exp_avg"].clone()
    other = torch.optim.Adam([parameter])
    agent.recover({"optim": other})
    assert same(other.state[parameter]["exp_avg"], wanted)


def test_bf16_parameters_keep_fp32_state(agent: Agent, daemon: LentDaemon) -> None:
    parameter = torch.nn.Parameter(torch.ones(4).bfloat16())
    optimizer = torch.optim.Adam([parameter])
    moments = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.full((4,), 1 / 3),
        "exp_avg_sq": torch.full((4,), 1 / 7),
    }
    optimizer.state[parameter] = dict(moments)
    agent.snapshot({"optim": optimizer}, step=1).wait("sealed")
    other = torch.optim.Adam([parameter])
    agent.recover({"optim": other})
    assert same(dict(other.state[parameter]), moments)


def test_state_dicts_instead_of_objects(agent: Agent, daemon: LentDaemon) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    state = {"net": dict(net.state_dict()), "optim": optimizer.state_dict()}
    tree = saved(agent, daemon, state)
    assert same(tree["optim"], state["optim"])
    assert same(tree["net"]["embed.weight"], net.embed.weight.detach())
    wanted = net.embed.weight.detach().clone()
    with torch.no_grad():
        net.embed.weight.zero_()
    agent.recover({"net": net, "optim": optimizer})
    assert same(net.embed.weight.detach(), wanted)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_compiled_and_wrapped_modules_share_names(agent: Agent, daemon: LentDaemon) -> None:
    linear = torch.nn.Linear(3, 3)
    net = torch.nn.Sequential(linear)
    agent.snapshot({"net": torch.compile(net)}, step=1).wait("durable", timeout=60)
    with Checkpoint.open(daemon.directory) as checkpoint:
        assert checkpoint.keys() == ["net.0.weight", "net.0.bias"]
    wanted = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.zero_()
    agent.recover({"net": net})
    assert same(linear.weight.detach(), wanted)


def test_a_change_right_after_the_call_is_not_captured(agent: Agent, daemon: LentDaemon) -> None:
    weight = torch.ones(1_000_000)
    net = torch.nn.Linear(10, 10)
    for step in range(1, 4):
        weight.fill_(step)
        with torch.no_grad():
            net.weight.fill_(step)
        pending = agent.snapshot({"w": weight, "net": net}, step=step)
        weight.fill_(-1)
        with torch.no_grad():
            net.weight.fill_(-1)
        pending.wait("durable", timeout=60)
        with Checkpoint.open(daemon.directory, step) as checkpoint:
            assert checkpoint.tensor("w").unique().tolist() == [step]
            assert checkpoint.tensor("net.weight").unique().tolist() == [step]


def test_moved_storage_is_found_again(agent: Agent, daemon: LentDaemon) -> None:
    net = torch.nn.Linear(4, 4, bias=False)
    for step in range(1, 4):
        net.weight.data = torch.full((4, 4), float(step))
        agent.snapshot({"net": net}, step=step).wait("durable", timeout=60)
        with Checkpoint.open(daemon.directory, step) as checkpoint:
            assert checkpoint.tensor("net.weight").unique().tolist() == [step]


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"a": {"b": [1, object()]}}, "a.b.1"),
        ({"f": lambda: 0}, "f"),
        ({"m": torch.ones(2, device="meta")}, "m"),
        ({"o": np.array([object()])}, "o"),
        ({"u": {"x": "\ud800"}}, "u.x"),
        ({"~x": torch.ones(1)}, "~x"),
        ({"c": type("Own", (), {})()}, "c"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_cannot_be_restored_are_refused_by_key(
    agent: Agent, daemon: LentDaemon, state: Any, key: str
) -> None:
    agent.snapshot({"good": torch.ones(2)}, step=1).wait("durable", timeout=60)
    pending = agent.snapshot(state, step=2)
    assert pending.state == "failed"
    with pytest.raises(errors.UnsavableValue, match=rf"^{key.replace('.', chr(92) + '.')}: "):
        pending.wait("durable")
    assert (
        agent.snapshot({"good": torch.zeros(2)}, step=3).wait("durable", timeout=60).state
        == "durable"
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"w": torch.zeros(3), "n": {}}, "w: the checkpoint has shape \\[2\\], the state \\[3\\]"),
        ({"w": torch.zeros(2), "n": {}, "x": 1}, "key x is in the state and not in the checkpoint"),
        ({"w": torch.zeros(2)}, "key n is in the checkpoint and not in the state"),
        ({"w": torch.zeros(2), "n": {"b": 1}}, "key n.b is in the state"),
        (
            {"w": torch.zeros(2), "n": torch.zeros(1)},
            "n: the checkpoint has dict, the state a tensor",
        ),
        (
            {"w": torch.zeros(2), "n": torch.nn.Linear(1, 1)},
            r"n: no key of the module is in the checkpoint, .* the state has weight, bias",
        ),
        (
            {"w": torch.zeros(2, device="meta"), "n": {}},
            "w: the state's tensor is on the meta device",
        ),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_written(
    agent: Agent, daemon: LentDaemon, state: dict[str, Any], words: str
) -> None:
    agent.snapshot({"w": torch.ones(2), "n": {"a": 1}}, step=1).wait("sealed")
    before = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
    with pytest.raises(errors.StructureMismatch, match=words):
        agent.recover(state)
    assert {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)} == {
        k: v for k, v in before.items() if not isinstance(v, torch.Tensor)
    }
    if not state["w"].is_meta:
        assert state["w"].tolist() == [0.0] * len(state["w"])


def test_strict_false_recovers_the_keys_that_both_have(agent: Agent, daemon: LentDaemon) -> None:
    agent.snapshot({"w": torch.ones(2), "extra": 1}, step=1).wait("sealed")
    state = {"w": torch.zeros(2), "new": 5}
    recovered = agent.recover(state, strict=False)
    assert recovered is not None
    assert recovered.left == ["new"]
    assert state["w"].tolist() == [1.0, 1.0]  # type: ignore[attr-defined]
    assert state["new"] == 5


def test_one_tensor_by_name_in_another_dtype(agent: Agent, daemon: LentDaemon) -> None:
    weight = torch.randn(100, 30)
    agent.snapshot({"model": {"w": weight}, "other": torch.ones(10)}, step=1).wait(
        "durable", timeout=60
    )
    with Checkpoint.open(daemon.directory, "newest") as checkpoint:
        assert checkpoint.metadata("model.w") == (torch.float32, torch.Size([100, 30]))
        assert same(checkpoint.tensor("model.w", dtype=torch.float16), weight.half())
        with pytest.raises(
            errors.NotFound,
            match=r"no tensor 'nope'; the checkpoint has 2, such as model\.w, other",
        ):
            checkpoint.tensor("nope")


def test_metrics_user_content_and_tag_are_in_the_manifest(agent: Agent, daemon: LentDaemon) -> None:
    pending = agent.snapshot(
        {"w": torch.ones(1)},
        step=1,
        tag="best",
        metrics={"loss": 0.5, "bad": math.nan},
        user_content={"a": [1, None]},
    )
    pending.wait("durable", timeout=60)
    with Checkpoint.open(daemon.directory, "best") as checkpoint:
        assert checkpoint.tag == "best.a0001"
        assert checkpoint.user_content == {"a": [1, None]}
        assert checkpoint.metrics["loss"] == 0.5
        assert math.isnan(checkpoint.metrics["bad"])
    recovered = agent.recover({"w": torch.zeros(1)})
    assert recovered is not None
    assert (recovered.step, recovered.source, recovered.user_content) == (
        1,
        "memory",
        {"a": [1, None]},
    )


def test_a_view_that_becomes_negative_is_saved_right_by_a_kept_plan(
    agent: Agent, daemon: LentDaemon
) -> None:
    tensor = torch.arange(5000.0)
    for step, view in enumerate((tensor, tensor, torch._neg_view(tensor), tensor)):
        agent.snapshot({"w": view}, step=step).wait("durable", timeout=60)
        with Checkpoint.open(daemon.directory) as checkpoint:
            assert torch.equal(checkpoint.tensor("w"), -tensor if step == 2 else tensor), step


def test_lazy_conjugates_are_captured_and_restored(agent: Agent, daemon: LentDaemon) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    agent.snapshot({"a": x, "b": x}, step=1).wait("durable", timeout=60)
    agent.snapshot({"a": x, "b": x.conj()}, step=2).wait("durable", timeout=60)
    state = {
        "a": torch.zeros(2, dtype=torch.complex64),
        "b": torch.zeros(2, dtype=torch.complex64).conj(),
    }
    agent.recover(state)
    assert state["a"].tolist() == x.tolist()
    assert state["b"].tolist() == x.conj().tolist()


def test_expanded_destinations_are_refused_by_key(agent: Agent, daemon: LentDaemon) -> None:
    agent.snapshot({"w": torch.ones(4)}, step=1).wait("sealed")
    with pytest.raises(errors.StructureMismatch, match="^w: the state's tensor is expanded"):
        agent.recover({"w": torch.zeros(1).expand(4)})


def test_views_of_other_dtypes_at_odd_offsets_come_back(agent: Agent, daemon: LentDaemon) -> None:
    storage = torch.arange(64, dtype=torch.uint8)
    state = {
        "bytes": storage[1:40],
        "floats": storage[4:36].view(torch.float32),
        "longs": storage[8:48].view(torch.int64),
    }
    tree = saved(agent, daemon, state)
    assert same(tree, state)
    tree["longs"].zero_()
    assert tree["bytes"][7:39].tolist() == [0] * 32


def cyclic() -> dict[str, Any]:
    state: dict[str, Any] = {"a": {"b": [1, {}]}}
    state["a"]["b"][1]["back"] = state["a"]
    return state


def nested(levels: int) -> Any:
    value: Any = 1
    for number in range(levels):
        value = (value,) if number % 3 else {"x": [value]} if number % 2 else [value]
    return {"n": value}


class Endless:
    """An object whose state_dict contains itself."""

    def state_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        made["me"] = made
        return made

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (
            cyclic(),
            r"^a\.b\.1\.back: it is the same object as a, which contains itself; save a copy, or "
            r"leave it out$",
        ),
        ({"l": ITSELF}, r"^l\.0: it is the same object as l, which contains itself"),
        ({"e": Endless()}, r"^e\.me: it is the same object as e, which contains itself"),
        (
            nested(100),
            r"^n\.[x0.]*\.\.\.: it lies in more than 100 containers; nest the state less",
        ),
        (
            nested(5_000),
            r"^n\.[x0.]*\.\.\.: it lies in more than 100 containers; nest the state less",
        ),
        (
            {"i": [10**5_000]},
            r"^i\.0: an integer of about 5,001 digits; expected at most 4,300, as many as Python "
            r"converts to text: save it as bytes",
        ),
        ({"k": {10**5_000: 1}}, r"^k\.key int: an integer of about 5,001 digits"),
        ({"s": {(1, 10**5_000)}}, r"^s\.0\.1: an integer of about 5,001 digits"),
        (
            {"d": torch.ones((1,) * 65)},
            r"^d: a tensor of 65 dimensions cannot be saved; reshape\(\) it to at most 64$",
        ),
    ],
    ids=[
        "cycle",
        "list in itself",
        "state_dict in itself",
        "deep",
        "deeper",
        "digits",
        "key",
        "in a set",
        "dimensions",
    ],
)
def test_endless_and_too_deep_values_are_refused_by_key(
    agent: Agent, daemon: LentDaemon, state: Any, reason: str
) -> None:
    pending = agent.snapshot(state, step=2, on_error="log")
    with pytest.raises(errors.UnsavableValue, match=reason):
        pending.wait("durable")
    assert (
        agent.snapshot({"good": torch.zeros(2)}, step=3).wait("durable", timeout=60).state
        == "durable"
    )


def test_values_just_within_the_limits_come_back(agent: Agent, daemon: LentDaemon) -> None:
    shared = [1, 2]
    state = {
        "deep": nested(70),
        "i": 10**4_299,
        "d": torch.ones((1,) * 63 + (2,)),
        "twice": [shared, shared, {"again": shared}],
    }
    agent.snapshot(state, step=1).wait("durable", timeout=60)
    with Checkpoint.open(daemon.directory) as checkpoint:
        assert same(checkpoint.load(), state)
    into = {"deep": None, "i": 0, "d": torch.zeros((1,) * 63 + (2,)), "twice": None}
    agent.recover(into, strict=False)
    assert same(into["d"], state["d"])
    assert into["i"] == state["i"]


def deep_json(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"user_content": {"a": "\ud800"}},
            "^user_content has half of a surrogate pair in a text, which UTF-8 cannot encode; "
            "leave it out$",
        ),
        ({"user_content": {"\udfff": 1}}, "^user_content has half of a surrogate pair"),
        (
            {"user_content": cyclic()},
            "^user_content cannot be written as JSON: Circular reference detected$",
        ),
        (
            {"user_content": deep_json(101)},
            "^user_content is nested more than 100 levels deep; nest it less, or save it in the "
            "state$",
        ),
        ({"user_content": deep_json(50_000)}, "^user_content is nested more than 100 levels deep"),
        ({"user_content": 10**5_000}, "^user_content cannot be written as JSON: Exceeds the limit"),
        ({"metrics": {"\ud800": 1.0}}, "^metric '.ud800' has half of a surrogate pair in its name"),
        (
            {"metrics": {"m": 10**400}},
            "^metric 'm' is an integer too large for a float; expected a number that fits into "
            "one$",
        ),
    ],
    ids=["surrogate", "key", "cycle", "deep", "deeper", "digits", "metric", "large metric"],
)
def test_metrics_and_content_that_json_cannot_hold_are_refused_at_once(
    agent: Agent, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=reason):
        agent.snapshot({"w": torch.ones(1)}, step=1, **arguments).wait("durable")
    pending = agent.snapshot({"w": torch.ones(1)}, step=2, user_content={"é😀": deep_json(99)})
    assert pending.wait("durable", timeout=60).state == "durable"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_settings_of_an_optimizer_over_fsdp1_are_compared(
    daemon: LentDaemon, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(**settings: Any) -> dict[str, Any]:
        model = FullyShardedDataParallel(
            torch.nn.Linear(8, 8),
            device_id=torch.device("cpu"),
            use_orig_params=False,
            sharding_strategy=ShardingStrategy.NO_SHARD,
        )
        optimizer = torch.optim.Adam(model.parameters(), foreach=False, **settings)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return {"model": model, "optim": optimizer}

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        agent = Agent(daemon.job, socket=daemon.home.socket)
        agent.snapshot(made(amsgrad=True, lr=0.125), step=1).wait("durable", timeout=60)
        with pytest.raises(
            errors.StructureMismatch,
            match=r"optim\.param_groups\.0\.amsgrad: the checkpoint has True, the state False",
        ):
            agent.recover(made(lr=0.5))
        with caplog.at_level("INFO", "ckptd.agent"):
            assert (
                agent.recover(
                    made(amsgrad=True, lr=0.5, betas=(0.5, 0.5)),
                    keep=["optim.param_groups.*.betas"],
                )
                is not None
            )
        assert "optim.param_groups.0.lr 0.125 (was 0.5)" in caplog.text
        assert "betas" not in caplog.text
        agent.close()
    finally:
        dist.destroy_process_group()


# FSDP1 warns about its own deprecation
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_a_learning_rate_that_is_a_tensor_in_fsdp1_comes_back(
    daemon: LentDaemon, tmp_path: pathlib.Path, stepped: bool, warm: bool
) -> None:
    def made(rate: float, step: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = FullyShardedDataParallel(
            torch.nn.Linear(8, 8),
            device_id=torch.device("cpu"),
            use_orig_params=False,
            sharding_strategy=ShardingStrategy.NO_SHARD,
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(rate), foreach=False)
        if step:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return model, optimizer

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, optimizer = made(0.125, stepped)
        with closing(Agent(daemon.job, socket=daemon.home.socket)) as agent:
            state = {"model": model, "optim": optimizer}
            agent.snapshot(state, step=1).wait("durable", timeout=60)
        model, optimizer = made(0.5, warm)
        with closing(Agent(daemon.job, socket=daemon.home.socket)) as agent:
            assert agent.recover({"model": model, "optim": optimizer}) is not None
            assert optimizer.param_groups[0]["lr"] == 0.125
            assert bool(optimizer.state) is stepped
    finally:
        dist.destroy_process_group()
