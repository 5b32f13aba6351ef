"""Loads models from checkpoints of every format: by name, into other dtypes, onto
meshes and from the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ckptd.agent import Agent
from ckptd.agent.convert.load_model import load_model
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound, StructureMismatch
from tests.agent.convert.saved import assert_same, one_process, save
from tests.support import sharded
from tests.support.cases import each_case
from tests.support.daemons import Daemon
from tests.support.ranks import HERE, Ranks


class Net(nn.Module):
    """A network with a tied head, a buffer that is saved and one that is not."""

    steps: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def trained(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net.steps.fill_(seed)
    return net


def as_job(net: Net, place: Path) -> Path:
    return save({"model": dict(net.state_dict()), "optim": {"lr": 0.1}}, place / "ckptd")


def as_safetensors(net: Net, place: Path) -> Path:
    save_file(
        {name: tensor for name, tensor in net.state_dict().items() if name != "head.weight"},
        place / "file.safetensors",
    )
    return place / "file.safetensors"


def as_model(net: Net, place: Path) -> Path:
    (place / "hf").mkdir()
    as_safetensors(net, place).rename(place / "hf" / "model.safetensors")
    return place / "hf"


def as_torch(net: Net, place: Path) -> Path:
    torch.save(net.state_dict(), place / "file.pt")
    return place / "file.pt"


def as_dcp(net: Net, place: Path) -> Path:
    with one_process():
        dcp.save({"model": net.state_dict(), "epoch": 1}, checkpoint_id=place / "dcp", no_dist=True)
    return place / "dcp"


FORMATS = (as_job, as_safetensors, as_model, as_torch, as_dcp)


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_format(
    tmp_path: Path,
    write: Callable[[Net, Path], Path],
    device: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = trained()
    path = write(source, tmp_path)
    with torch.device(device):
        net = Net()
    found = load_model(net, path)
    assert_same(dict(net.state_dict()), dict(source.state_dict()))
    assert net.head.weight is net.embedding.weight
    assert net.embedding.weight.requires_grad
    assert (found.missing, found.unexpected) == ([], [])
    if device == "meta":
        assert found.on_meta == ["scratch"]
        assert "still on the meta device, and without values: scratch" in caplog.text
    else:
        assert net.scratch.tolist() == [1.0, 1.0]


@each_case("write", FORMATS)
def test_names_dtype_and_missing_keys(tmp_path: Path, write: Callable[[Net, Path], Path]) -> None:
    class Larger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Net().bfloat16()
            self.adapter = nn.Linear(2, 2)

    source, net = trained(), Larger()
    before = net.adapter.weight.clone()
    with pytest.raises(
        StructureMismatch,
        match="checkpoint: base.steps, adapter.weight, adapter.bias; not in the model: steps; give "
        "the",
    ):
        load_model(net, write(source, tmp_path), rename=[("^(embedding|body|head)", r"base.\1")])
    path = next(iter(tmp_path.iterdir()))
    found = load_model(
        net,
        path,
        rename=[("^(?!own)", "base."), ("^base.own", "own")],
        names={"steps": "own.steps"},
        strict=False,
    )
    assert (found.missing, found.unexpected) == (
        ["base.steps", "adapter.weight", "adapter.bias"],
        ["own.steps"],
    )
    assert_same(net.base.body.weight, source.body.weight.bfloat16())
    assert torch.equal(net.adapter.weight, before)
    assert int(net.base.steps) == 3


def test_shapes_are_compared_before_anything_is_written(tmp_path: Path) -> None:
    net = Net(width=5)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(
        StructureMismatch,
        match=r"embedding.weight: the checkpoint has shape \[6, 4\], the model \[6, 5\]; "
        r"body.weight: ",
    ):
        load_model(net, as_torch(trained(), tmp_path), strict=False)
    assert_same(dict(net.state_dict()), before)


def test_a_step_of_a_job(daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    for step in (1, 2):
        agent.snapshot({"nets": {"g": trained(step)}, "epoch": step}, step=step).wait(
            "durable", timeout=60
        )
    agent.close()
    net = Net()
    load_model(net, daemon.home.root / "job", which=1)
    assert_same(dict(net.state_dict()), dict(trained(1).state_dict()))
    load_model(net, daemon.home.root / "job", only="nets.g")
    assert_same(dict(net.state_dict()), dict(trained(2).state_dict()))


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner, self.extra = nn.Linear(2, 2), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [{"v": 2}, {"scale": torch.ones(3)}, torch.ones(2)],
    ids=["plain", "with a tensor", "a tensor"],
)
def test_extra_states_are_loaded(tmp_path: Path, daemon: Daemon, extra: Any) -> None:
    source = nn.Sequential(WithExtra(extra))
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"model": source}, step=1)
    agent.close()
    torch.save(source.state_dict(), tmp_path / "file.pt")
    for path in (daemon.home.root / "job", tmp_path / "file.pt"):
        made = nn.Sequential(WithExtra(None))
        assert load_model(made, path).missing == []
        assert_same(made[0].extra, extra)
    torch.save(
        nn.Sequential(nn.Module()).state_dict() | {"0.inner.weight": torch.ones(2, 2)},
        tmp_path / "file.pt",
    )
    assert load_model(made, tmp_path / "file.pt", strict=False).missing == [
        "0.inner.bias",
        "0._extra_state",
    ]
    torch.save(source.state_dict(), tmp_path / "file.pt")
    assert (
        load_model(nn.Sequential(nn.Linear(2, 2)), tmp_path / "file.pt", strict=False).unexpected[
            -1
        ]
        == "0._extra_state"
    )


def test_values_that_the_model_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for wrong in (torch.ones(2, dtype=torch.complex64), torch.ones(2)):
        target = nn.Module()
        target.register_buffer(
            "b", torch.zeros(2) if wrong.is_complex() else torch.zeros(2, dtype=torch.int64)
        )
        torch.save({"b": wrong}, tmp_path / "file.pt")
        with pytest.raises(
            StructureMismatch,
            match=r"b: the checkpoint has torch\.\w+, the model torch\.\w+, which cannot hold its "
            r"values",
        ):
            load_model(target, tmp_path / "file.pt")
    torch.save(model.state_dict(), tmp_path / "file.pt")
    with torch.device("meta"):
        late = nn.Linear(2, 2)
    # Torch's own error, and not one about the file.
    with pytest.raises(RuntimeError, match="nonsense"):
        load_model(late, tmp_path / "file.pt", device="nonsense")


def test_the_part_model_comes_before_the_only_module(tmp_path: Path, daemon: Daemon) -> None:
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"model": model.state_dict(), "ema": average}, step=1)
    agent.close()
    made = nn.Linear(2, 2)
    load_model(made, daemon.home.root / "job")
    assert torch.equal(made.weight, model.weight)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no checkpoint"):
        load_model(Net(), tmp_path / "nothing")
    path = as_torch(trained(), tmp_path)
    with pytest.raises(NotFound, match="has no 'model'"):
        load_model(Net(), path, only="model")
    with pytest.raises(InvalidRequest, match="would both get the name 'x'"):
        load_model(Net(), path, rename=[("^.*$", "x")])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="is no file of torch.save, or damaged"):
        load_model(Net(), path)


def load_on_rank(path: Path) -> list[str]:
    """Load into the model of this rank, whose parameters are DTensors. Runs on a rank."""
    with torch.no_grad():
        for parameter in HERE["model"].parameters():
            parameter.zero_()
    return load_model(HERE["model"], path, strict=False).missing


def load_on_rank_from_meta(path: Path) -> list[str]:
    with torch.device("meta"):
        sharded.build("fsdp2", 5)
    missing = load_model(HERE["model"], path).missing
    HERE["optimizer"] = torch.optim.AdamW(HERE["model"].parameters(), lr=0.1)
    return missing


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", ["fsdp2", "2d", "tp"])
def test_onto_a_mesh(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(7)
    source = sharded.Net()
    paths = [save({"model": dict(source.state_dict())}, tmp_path / "ckptd"), tmp_path / "file.pt"]
    torch.save(source.state_dict(), paths[1])
    wanted = {
        f"model.{name}": sharded.plain(tensor) for name, tensor in source.state_dict().items()
    }
    with Ranks(4) as ranks:
        ranks.call(sharded.build, kind, 1)
        for path in paths:
            assert ranks.call(load_on_rank, path) == 4 * [[]]
            for found in ranks.call(sharded.whole):
                assert {name: value for name, value in found.items() if name in wanted} == wanted
        if kind == "fsdp2":
            assert ranks.call(load_on_rank_from_meta, paths[1]) == 4 * [[]]
            found = ranks.call(sharded.whole)[0]
            assert {name: value for name, value in found.items() if name in wanted} == wanted
            ranks.call(sharded.train, 2)  # FSDP2 has the new parameters, too
            assert ranks.call(sharded.whole)[0]["model.up.weight"] != found["model.up.weight"]


def load_flattened(path: Path) -> str:
    try:
        load_model(HERE["model"], path)
    except InvalidRequest as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("processes")
def test_a_model_that_fsdp1_has_flattened_is_refused(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        ranks.call(sharded.build, "fsdp1", 1)
        assert ranks.call(load_flattened, as_torch(trained(), tmp_path)) == 2 * [
            "FSDP1 has flattened parameters of this model: load the weights before it is wrapped, "
            "or use FSDP2"
        ]


def test_wrappers_on_either_side_leave_no_trace(tmp_path: Path) -> None:
    """Files of other tools, and checkpoints of earlier versions, have the names of the
    module that saved them, wrappers included.
    """

    def wrapped(net: Net) -> nn.Module:
        net.body = nn.DataParallel(net.body)  # type: ignore[assignment]
        return net

    source, raw = trained(), as_torch(wrapped(trained()), tmp_path)  # type: ignore[arg-type]
    plain = as_job(source, tmp_path)
    for net, path in (
        (wrapped(Net()), raw),
        (wrapped(Net()), plain),
        (torch.optim.swa_utils.AveragedModel(wrapped(Net())).module, plain),
    ):
        found = load_model(net, path)
        assert (found.missing, found.unexpected) == ([], [])
        assert_same(
            dict(zip(source.state_dict(), net.state_dict().values(), strict=True)),
            dict(source.state_dict()),
        )
