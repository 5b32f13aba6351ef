"""Exports every kind of content into every format, and reads it with the tools that the
format belongs to, bit for bit.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptd.agent import Agent
from ckptd.agent.convert import FORMATS, dcp_directory, export
from ckptd.agent.convert.contents import flat
from ckptd.shared.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidRequest,
    NotFound,
    StorageError,
    UnsavableValue,
)
from tests.agent.convert.saved import STATES, assert_same, loaded, one_process, random, save
from tests.support import sharded
from tests.support.cases import each_case
from tests.support.daemons import Daemon
from tests.support.forks import context


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns a checkpoint with a state of STATES as its model,
    by name.
    """
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = save(
                {"model": STATES[name], "epoch": 1}, tmp_path_factory.mktemp("saved") / "checkpoint"
            )
        return made[name]

    return checkpoint


def read(to: str, out: Path, scratch: Path) -> Any:
    """Read an export with the tool that its format belongs to, without ckptd."""
    if to == "torch":
        return torch.load(out, weights_only=True)
    if to == "dcp":
        with one_process():
            dcp_to_torch_save(out, scratch)
        return torch.load(scratch, weights_only=False)
    if to == "safetensors":
        return load_file(out)
    index = out / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.exists()
        else ["model.safetensors"]
    )
    return {name: tensor for file in files for name, tensor in load_file(out / file).items()}


@each_case("name", STATES)
@each_case("to", FORMATS)
def test_every_content_in_every_format(tmp_path: Path, saved: Any, to: str, name: str) -> None:
    path, out, written = saved(name), tmp_path / "out", list[int]()
    before = sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir())
    summary = export(path, to, out, only="model", max_shard_size=100, progress=written.append)
    assert os.listdir(tmp_path) == ["out"]
    found, expected = read(to, out, tmp_path / "scratch"), loaded(path)["model"]
    if to in ("torch", "dcp"):
        assert_same(found, expected)
    else:
        named = dict(flat(expected))
        tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        assert {*found, *summary.tied} == tensors.keys()
        assert_same({name: found[summary.tied.get(name, name)] for name in tensors}, tensors)
        assert all(
            any(name == part or name.startswith(f"{part}.") for part in summary.left_out)
            for name in named.keys() - tensors.keys()
        )
    assert sum(written) >= summary.nbytes
    assert before == sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir()), (
        "the checkpoint is not changed"
    )


@pytest.fixture
def tied(daemon: Daemon) -> Path:
    """Return a job with a state whose tensors share a storage.

    A DCP save would have stored them as copies.
    """
    agent = Agent("tied", socket=daemon.home.socket)
    agent.snapshot({"model": STATES["shared"]}, step=1)
    agent.close()
    return daemon.home.root / "tied"


@pytest.mark.parametrize("to", FORMATS)
def test_tensors_that_share_a_storage_are_in_every_format(
    tmp_path: Path, tied: Path, to: str
) -> None:
    summary = export(tied, to, tmp_path / "out", only="model")
    found = read(to, tmp_path / "out", tmp_path / "scratch")
    assert_same(
        {name: found[summary.tied.get(name, name)] for name in STATES["shared"]}, STATES["shared"]
    )


def test_tensors_that_share_a_storage_share_it_in_a_torch_file(tmp_path: Path, tied: Path) -> None:
    export(tied, "torch", tmp_path / "out", only="model")
    found = torch.load(tmp_path / "out", weights_only=True)
    assert (
        len({found[name].untyped_storage().data_ptr() for name in ("a", "b", "rows", "transposed")})
        == 1
    )
    assert found["transposed"].stride() == (1, 4)
    assert (tmp_path / "out").stat().st_size < 8000


def test_the_checksums_in_a_torch_file_are_right(tmp_path: Path, saved: Any) -> None:
    export(saved("shapes"), "torch", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "out") as archive:
        assert archive.testzip() is None


def test_tied_weights_are_stored_once_and_named(tmp_path: Path, tied: Path) -> None:
    summary = export(tied, "safetensors", tmp_path / "out", only="model")
    assert summary.tied == {"b": "a"}
    with safe_open(tmp_path / "out", "pt") as file:
        assert file.metadata() == {"format": "pt", "b": "a"}
        assert sorted(file.keys()) == ["a", "own", "rows", "transposed"]


def test_a_second_name_does_not_hide_the_format_of_a_file(tmp_path: Path, daemon: Daemon) -> None:
    agent, weight = Agent("job", socket=daemon.home.socket), torch.ones(2)
    agent.snapshot({"weight": weight, "format": weight}, step=1)
    agent.close()
    with safe_open(_exported(daemon.home.root / "job", "safetensors", tmp_path), "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_stock_dcp_loads_into_a_template(tmp_path: Path, saved: Any) -> None:
    export(saved("nested"), "dcp", tmp_path / "out")
    state: dict[str, Any] = {"model": {"net": {"w": torch.zeros(2)}, "epoch": 0}}
    with one_process():
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(state, {"model": {"net": {"w": torch.ones(2)}, "epoch": 3}})


@pytest.mark.usefixtures("processes")
def test_a_checkpoint_of_four_ranks(tmp_path: Path) -> None:
    with sharded.saved("fsdp2", 4, "storage") as four:
        path = next((four.place.root).glob("job*"))
        expected = loaded(path)
        for to in FORMATS:
            export(path, to, tmp_path / to, only="model")
        model = expected["model"]
        assert_same(read("torch", tmp_path / "torch", tmp_path), model)
        assert_same(read("dcp", tmp_path / "dcp", tmp_path / "scratch"), model)
        assert_same(
            {name: read("hf", tmp_path / "hf", tmp_path)[name] for name in model}, dict(model)
        )
        assert_same(
            {name: read("safetensors", tmp_path / "safetensors", tmp_path)[name] for name in model},
            dict(model),
        )


def test_the_only_module_is_the_model(tmp_path: Path, daemon: Daemon) -> None:
    model = torch.nn.Linear(3, 2)
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot(
        {"trained": {"net": model}, "optim": torch.optim.SGD(model.parameters()), "epoch": 3},
        step=1,
    )
    agent.snapshot({"a": model, "b": torch.nn.Linear(1, 1)}, step=2)
    agent.close()
    export(daemon.home.root / "job", "hf", tmp_path / "out", which=1)
    assert_same(
        load_file(tmp_path / "out" / "model.safetensors"),
        {"weight": model.weight, "bias": model.bias},
    )
    with pytest.raises(
        InvalidRequest,
        match="^the state has the modules a, b: choose the part that is the model with `only`, "
        "like",
    ):
        export(daemon.home.root / "job", "hf", tmp_path / "other")


def test_files_of_the_model_come_from_user_content_and_a_directory(
    tmp_path: Path, daemon: Daemon
) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    content = {
        "config.json": {"model_type": "gpt2", "dtype": "float32"},
        "merges.txt": "a b",
        "notes": "not a file of a model",
    }
    agent.snapshot({"model": torch.nn.Linear(3, 2)}, step=1, user_content=content)
    agent.close()
    job, files = daemon.home.root / "job", tmp_path / "files"
    files.mkdir()
    (files / "merges.txt").write_text("c d")
    (files / "weights.bin").write_text("not carried")
    summary = export(job, "hf", tmp_path / "out", files=files, dtype=torch.bfloat16)
    assert summary.files == ["config.json", "merges.txt", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "out")) == summary.files
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "gpt2",
        "dtype": "bfloat16",
    }
    assert (tmp_path / "out" / "merges.txt").read_text() == "c d"
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].dtype is torch.bfloat16


def test_names_and_dtypes_change_on_request(tmp_path: Path, saved: Any) -> None:
    path = saved("float32")
    options: dict[str, Any] = {
        "only": "model",
        "dtype": torch.bfloat16,
        "names": {"x": "layer.x"},
        "rename": [("^y$", "layer.y")],
    }
    expected = {f"layer.{name}": tensor.bfloat16() for name, tensor in STATES["float32"].items()}
    for to in FORMATS:
        export(path, to, tmp_path / to, **options)
        assert_same(read(to, tmp_path / to, tmp_path / "scratch"), expected)


def test_a_dry_run_checks_and_writes_nothing(tmp_path: Path, saved: Any) -> None:
    summaries = [
        export(saved("float32"), to, tmp_path / "out", only="model", dry_run=True) for to in FORMATS
    ]
    assert [(each.tensors, each.nbytes) for each in summaries] == [(2, 4 * 22)] * len(FORMATS)
    assert os.listdir(tmp_path) == []


# -- bad input


@each_case(
    ("options", "error", "said"),
    [
        (
            {"to": "onnx"},
            InvalidRequest,
            "^to: there is no format 'onnx'; there are dcp, hf, safetensors, torch$",
        ),
        ({"only": "modl"}, NotFound, "^the checkpoint has no 'modl'; at its top are model, epoch$"),
        ({"which": 7}, NotFound, "no checkpoint"),
        (
            {"dtype": torch.float4_e2m1fn_x2},
            InvalidRequest,
            "^dtype: torch cannot convert to torch.float4_e2m1fn_x2; expected",
        ),
        (
            {"dtype": torch.int8},
            InvalidRequest,
            "^dtype: torch cannot convert to torch.int8; expected a floating-point dtype",
        ),
        (
            {"only": "model", "rename": [("(", "")]},
            InvalidRequest,
            r"^rename: '\(' is not a regular expression",
        ),
        (
            {"only": "model", "rename": [("[xy]", "z")]},
            InvalidRequest,
            "^x and y would both get the name 'z': give each tensor",
        ),
        (
            {"only": "model", "rename": [("x", r"\1")]},
            InvalidRequest,
            r"^rename: '\\\\1' cannot replace 'x': invalid group reference",
        ),
        (
            {"only": "model", "names": {"z": "x"}},
            InvalidRequest,
            "^names: there is no tensor 'z'; there are 2, such as x, y$",
        ),
        (
            {"rename": [("x", "z")], "to": "torch"},
            InvalidRequest,
            "^tensors can be renamed in a flat dict only",
        ),
        (
            {"files": "."},
            InvalidRequest,
            "^files: an export to 'safetensors' carries no files; only 'hf' does$",
        ),
        (
            {"to": "hf", "files": "/nowhere"},
            NotFound,
            "^files: /nowhere is not a directory; expected one with config.json$",
        ),
        ({"max_shard_size": 0}, InvalidRequest, "^max_shard_size: 0 is too small"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, saved: Any, options: Any, error: type[Exception], said: str
) -> None:
    path = saved("float32")
    with pytest.raises(error, match=said):
        export(path, **({"to": "safetensors", "out": tmp_path / "out"} | options))
    assert os.listdir(tmp_path) == []


def test_an_output_that_exists_is_not_touched(tmp_path: Path, saved: Any) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(
        AlreadyExists, match="out exists already: choose another name, or remove it first$"
    ):
        export(saved("float32"), "torch", out)
    assert out.read_text() == "mine"


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(StorageError, match="^no room for 88 B at .*out: 100 B are free there$"):
        export(saved("float32"), "torch", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_dtype_that_a_format_lacks_is_named(tmp_path: Path) -> None:
    path = save({"model": {"x": torch.zeros(2, dtype=torch.complex128)}}, tmp_path / "checkpoint")
    with pytest.raises(
        UnsavableValue,
        match="^x has the dtype torch.complex128, which safetensors cannot hold: choose a part "
        "without it",
    ):
        export(path, "hf", tmp_path / "out")
    assert_same(torch.load(_exported(path, "torch", tmp_path), weights_only=True), loaded(path))


def test_values_that_weights_only_refuses_are_named(tmp_path: Path, daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot(
        {"model": torch.nn.Linear(1, 1), "run": {"path": Path("/data"), "seed": 3}}, step=1
    )
    agent.close()
    job = daemon.home.root / "job"
    with pytest.raises(
        UnsavableValue,
        match=r"^run.path: a pathlib.\w*Path cannot be loaded with torch.load\(weights_only=True\)",
    ):
        export(job, "torch", tmp_path / "out")
    assert os.listdir(tmp_path) == []
    assert list(torch.load(_exported(job, "torch", tmp_path, only="model"), weights_only=True)) == [
        "weight",
        "bias",
    ]


def test_sparse_tensors_come_whole_where_the_format_can(tmp_path: Path, daemon: Daemon) -> None:
    agent, dense = Agent("job", socket=daemon.home.socket), torch.eye(3)
    agent.snapshot({"model": {"sparse": dense.to_sparse(), "x": dense}}, step=1)
    agent.close()
    job = daemon.home.root / "job"
    assert torch.equal(
        torch.load(_exported(job, "torch", tmp_path), weights_only=True)["model"][
            "sparse"
        ].to_dense(),
        dense,
    )
    for to in ("dcp", "hf", "safetensors"):
        with pytest.raises(
            UnsavableValue,
            match="sparse is a sparse tensor or one of a subclass, which the format cannot hold",
        ):
            export(job, to, tmp_path / "out")


def test_tensors_in_tuples_and_queues_are_not_lost(tmp_path: Path, daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    state: dict[str, Any] = {
        "pair": (torch.ones(2), {"x": torch.arange(3)}),
        "queue": deque([torch.ones(1), torch.zeros(2)], 5),
        "epoch": 3,
    }
    agent.snapshot(state, step=1)
    agent.close()
    job = daemon.home.root / "job"
    found = read("dcp", _exported(job, "dcp", tmp_path), tmp_path / "scratch")
    assert_same(found, {"pair": state["pair"], "queue": found["queue"], "epoch": 3})
    assert_same(list(found["queue"]), list(state["queue"]))
    assert sorted(load_file(_exported(job, "safetensors", tmp_path))) == [
        "pair.0",
        "pair.1.x",
        "queue.0",
        "queue.1",
    ]
    with pytest.raises(
        UnsavableValue, match="^queue: a collections.deque cannot be loaded with torch.load"
    ):
        export(job, "torch", tmp_path / "out")


def test_records_come_as_dicts_of_their_fields(tmp_path: Path, daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    state = {
        "run": Namespace(ema=torch.arange(3), seed=3),
        "inside": [SimpleNamespace(sparse=torch.eye(2).to_sparse(), where=slice(1, 2))],
    }
    agent.snapshot(state, step=1)
    agent.close()
    job = daemon.home.root / "job"
    found = torch.load(_exported(job, "torch", tmp_path), weights_only=True)
    assert_same(found["run"], {"ema": torch.arange(3), "seed": 3})
    assert torch.equal(found["inside"][0]["sparse"].to_dense(), torch.eye(2))
    assert found["inside"][0]["where"] == {"start": 1, "stop": 2, "step": None}
    assert_same(
        read("dcp", _exported(job, "dcp", tmp_path, only="run"), tmp_path / "scratch"),
        {"ema": torch.arange(3), "seed": 3},
    )
    assert_same(
        load_file(_exported(job, "safetensors", tmp_path, only="run")), {"ema": torch.arange(3)}
    )


@pytest.mark.parametrize("to", FORMATS)
def test_a_tensor_in_a_set_is_refused(tmp_path: Path, daemon: Daemon, to: str) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"model": {"x": {torch.ones(1)}, "y": torch.ones(2)}}, step=1)
    agent.close()
    with pytest.raises(
        UnsavableValue,
        match="^model.x.0 is a tensor in a set, which cannot be converted: save it in a list$",
    ):
        export(daemon.home.root / "job", to, tmp_path / "out")


def test_views_of_every_kind_come_back(tmp_path: Path, daemon: Daemon) -> None:
    base, other, third = torch.arange(32.0), torch.arange(8.0), torch.arange(9.0)
    state = {
        "window": base.as_strided((3, 4), (2, 1), 4), "bits": base.view(torch.int32),
        "tail": third[5:], "head": third[:6], "wide": other, "expanded": other[2:3].expand(4),
        "rows": other.view(2, 4)[:, :1].expand(2, 3),
    }  # fmt: skip
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"model": state}, step=1)
    agent.close()
    for to in FORMATS:
        out = _exported(daemon.home.root / "job", to, tmp_path, only="model")
        found = read(to, out, tmp_path / "scratch")
        assert_same({name: found[name] for name in state}, state)


def test_tensors_that_dcp_has_pickled_with_other_values(tmp_path: Path) -> None:
    whole, lazy = torch.arange(4.0), torch.tensor([1 + 2j]).conj()
    path = save(
        {"model": {"x": torch.ones(1), "pair": (lazy, whole, whole[1:], 1)}},
        tmp_path / "checkpoint",
    )
    expected = {"x": torch.ones(1), "pair": (lazy.resolve_conj(), whole, whole[1:], 1)}
    found = read("torch", _exported(path, "torch", tmp_path, only="model"), tmp_path)
    assert_same(found, expected)
    assert (
        found["pair"][1].untyped_storage().data_ptr()
        == found["pair"][2].untyped_storage().data_ptr()
    )
    assert_same(
        read("dcp", _exported(path, "dcp", tmp_path, only="model"), tmp_path / "scratch"), expected
    )
    tensors = load_file(_exported(path, "safetensors", tmp_path, only="model"))
    assert_same(
        dict(sorted(tensors.items())),
        {"pair.0": lazy.resolve_conj(), "pair.1": whole, "pair.2": whole[1:], "x": torch.ones(1)},
    )


def test_ties_beside_sparse_tensors_stay_tied(tmp_path: Path, daemon: Daemon) -> None:
    agent, weight = Agent("job", socket=daemon.home.socket), torch.ones(100)
    agent.snapshot(
        {"sparse": torch.eye(3).to_sparse(), "a": weight, "b": weight, "part": weight[5:10]}, step=1
    )
    agent.close()
    found = torch.load(_exported(daemon.home.root / "job", "torch", tmp_path), weights_only=True)
    assert len({found[name].untyped_storage().data_ptr() for name in ("a", "b", "part")}) == 1


def test_names_that_a_format_cannot_hold_are_refused(tmp_path: Path, daemon: Daemon) -> None:
    agent = Agent("job", socket=daemon.home.socket)
    agent.snapshot({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, step=1)
    agent.snapshot(
        {
            "model": {"a": torch.ones(1), "__metadata__": torch.ones(2)},
            1: torch.ones(3),
            "epoch": 3,
        },
        step=2,
    )
    agent.close()
    job, out = daemon.home.root / "job", tmp_path / "out"
    with pytest.raises(
        InvalidRequest,
        match="^DCP cannot name the values of the state: .*a.b.*: choose another part with `only`$",
    ):
        export(job, "dcp", out, which=1)
    with pytest.raises(
        InvalidRequest,
        match="^two tensors would have the name 'a.b': choose a part with one of them with `only`$",
    ):
        export(job, "safetensors", out, which=1)
    with pytest.raises(
        InvalidRequest,
        match="^__metadata__ is the name of no tensor in this format: rename the tensor$",
    ):
        export(job, "hf", out)
    with pytest.raises(
        InvalidRequest,
        match="^the chosen part of the state has no tensors, and the format holds nothing else",
    ):
        export(job, "safetensors", out, only="epoch")
    with pytest.raises(
        InvalidRequest,
        match="^a DCP checkpoint holds a dict, and the chosen part is a tensor: choose another",
    ):
        export(job, "dcp", out, only="model.a")
    assert os.listdir(tmp_path) == []
    assert load_file(_exported(job, "safetensors", tmp_path, only="model.a"))["a"].tolist() == [1.0]
    found = load_file(
        _exported(
            job,
            "safetensors",
            tmp_path,
            rename=[("model.__metadata__", "meta"), ("model.a", "format")],
        )
    )
    assert sorted(found) == ["1", "format", "meta"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(tmp_path: Path, to: str) -> None:
    path = save(
        {"model": {f"x{number}": torch.zeros(300_000) for number in range(10)}},
        tmp_path / "checkpoint",
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Stands for a full disk: a write fails with EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, before[1]))
    try:
        with pytest.raises(
            StorageError,
            match="File too large|torch could not write .*, maybe because the disk is full: ",
        ):
            export(path, to, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_dry_run_checks_the_output_too(tmp_path: Path, saved: Any) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(AlreadyExists):
        export(saved("float32"), "dcp", tmp_path / "out", dry_run=True)
    with pytest.raises(StorageError, match="nowhere is not a directory: make it first$"):
        export(saved("float32"), "dcp", tmp_path / "nowhere" / "out", dry_run=True)


def test_a_damaged_checkpoint_leaves_no_export(tmp_path: Path) -> None:
    path = save({"x": torch.arange(100_000)}, tmp_path / "checkpoint")
    part = next(path.glob("*.ckpt"))
    damaged = bytearray(part.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    part.write_bytes(damaged)
    for to in ("torch", "dcp", "safetensors"):
        with pytest.raises(IntegrityError):
            export(path, to, tmp_path / "out")
    assert os.listdir(tmp_path) == ["checkpoint"]


def _exported(path: Path, to: str, directory: Path, **options: Any) -> Path:
    """Export into a new file of this directory, and return it."""
    out = directory / f"out-{len(os.listdir(directory))}"
    export(path, to, out, **options)
    return out


_WITHOUT_CKPTD = """
import importlib.util, sys, warnings
warnings.simplefilter("ignore")
assert importlib.util.find_spec("ckptd") is None, "ckptd is installed here"
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from safetensors.torch import load_file

place = sys.argv[1]
state = {"model": {"net": {"w": torch.zeros(2)}, "epoch": 0}}
dcp.load(state, checkpoint_id=f"{place}/dcp")
dcp_to_torch_save(f"{place}/dcp", f"{place}/converted")
whole = torch.load(f"{place}/converted", weights_only=True)
print(state["model"]["net"]["w"].tolist(), state["model"]["epoch"], whole["model"]["groups"][0]["lr"])
print(torch.load(f"{place}/torch", weights_only=True)["model"]["net"]["w"].tolist())
print(load_file(f"{place}/safetensors")["model.net.w"].tolist(), load_file(f"{place}/hf/model.safetensors")["net.w"].tolist())
"""  # noqa: E501


@pytest.mark.usefixtures("processes")
def test_every_format_is_read_in_an_environment_without_ckptd(tmp_path: Path, saved: Any) -> None:
    """The environment has the packages of this one, except those that a .pth file adds,
    as an editable install does.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    packages = Path(torch.__file__).parents[1]
    if (packages / "ckptd").exists():
        pytest.skip("ckptd is installed among the other packages, and not from a source tree")
    own = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (own / "others.pth").write_text(f"{packages}\n")
    for to in FORMATS:
        export(saved("nested"), to, tmp_path / to, only="model" if to == "hf" else "")
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", _WITHOUT_CKPTD, str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1.0, 1.0] 3 0.1", "[1.0, 1.0]", "[1.0, 1.0] [1.0, 1.0]"]


def killed_in_the_second_file(source: Path, to: str, out: Path) -> None:
    done: list[int] = []

    def progress(length: int) -> None:
        done.append(length)
        if sum(done) > 3 << 20:
            os.kill(os.getpid(), signal.SIGKILL)

    dcp_directory._FILE_BYTES = 2 << 20
    export(source, to, out, only="model", max_shard_size=2 << 20, progress=progress)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_a_killed_export_is_continued(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{number}": random(torch.uint8, 1 << 20, seed=number) for number in range(5)}
    source, out = save({"model": state}, tmp_path / "source"), tmp_path / "out"
    child = context().Process(target=killed_in_the_second_file, args=(source, to, out))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not out.exists()
    [beside] = tmp_path.glob(".out.*.partial")
    first = {
        path.name: path.stat().st_ino
        for path in (beside / "made").iterdir()
        if (beside / f"{path.name}.result").exists()
    }
    assert len(first) == 1
    monkeypatch.setattr(dcp_directory, "_FILE_BYTES", 2 << 20)
    done: list[int] = []
    export(source, to, out, only="model", max_shard_size=2 << 20, progress=done.append)
    assert {name: (out / name).stat().st_ino for name in first} == first
    assert len([path for path in out.iterdir() if path.suffix in (".distcp", ".safetensors")]) == 3
    assert sum(done) >= 5 << 20
    assert_same(read(to, out, tmp_path / "read"), state)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "read") == [
        "out",
        "source",
    ]


def test_other_options_do_not_continue_an_export(tmp_path: Path) -> None:
    source, out = save({"model": {"w": torch.ones(4)}}, tmp_path / "source"), tmp_path / "out"
    keys = set()
    for options in (
        {},
        {"dtype": torch.bfloat16},
        {"rename": [("w", "x")]},
        {"names": {"w": "y"}},
        {"max_shard_size": 7},
    ):
        with pytest.raises(KeyboardInterrupt):
            export(source, "hf", out, progress=interrupt, **options)
        keys |= {path.name for path in tmp_path.glob(".out.*")}
    other = save({"model": {"w": torch.zeros(4)}}, tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        export(other, "hf", out, progress=interrupt)
    assert len(keys | {path.name for path in tmp_path.glob(".out.*")}) == 6


def interrupt(length: int) -> None:
    raise KeyboardInterrupt
