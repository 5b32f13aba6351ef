"""Imports every kind of content from every format, as the tools of the formats have
written it, and compares it bit for bit.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import weakref
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckptd.agent import Checkpoint, StorageReader
from ckptd.agent.convert import contents, export, stored
from ckptd.agent.convert.contents import flat, replaced
from ckptd.agent.convert.importing import import_checkpoint
from ckptd.agent.convert.safetensors_file import DTYPES as SAFE
from ckptd.shared.errors import (
    AlreadyExists,
    CkptdError,
    IntegrityError,
    InvalidRequest,
    NotFound,
    StorageError,
    UnsavableValue,
)
from ckptd.shared.formats.plan import HIDDEN
from ckptd.shared.system import fs
from tests.agent.convert.saved import DTYPES, STATES, assert_same, loaded, one_process, random, save
from tests.support.cases import each_case
from tests.support.forks import context

MIXED: dict[str, Any] = {
    **STATES,
    "expanded": {"e": torch.arange(3.0).expand(4, 3), "f": torch.ones(1)},
    "sparse": {"s": torch.eye(3).to_sparse(), "w": torch.ones(2)},
    "module": torch.nn.Linear(3, 4).state_dict(),
    "parameter": {"p": torch.nn.Parameter(torch.ones(3))},
    "overlapping": (
        lambda all_of_it: {"a": all_of_it[:6], "b": all_of_it[4:], "same": all_of_it[2:3].expand(5)}
    )(torch.arange(10.0)),
}


def dense(state: Any) -> Any:
    return replaced(
        state, torch.Tensor, lambda tensor: tensor.to_dense() if tensor.is_sparse else tensor
    )


def imported(source: Path, **options: Any) -> Any:
    out = source.with_name("imported")
    import_checkpoint(source, out, **options)
    with Checkpoint.open(out) as checkpoint:
        checkpoint.verify()
        return checkpoint.load()


@each_case("name", MIXED)
def test_every_content_of_torch_save(tmp_path: Path, name: str) -> None:
    torch.save({"model": MIXED[name], "epoch": 1}, tmp_path / "source")
    assert_same(dense(imported(tmp_path / "source")), {"model": dense(MIXED[name]), "epoch": 1})
    assert sorted(os.listdir(tmp_path)) == ["imported", "source"]


@each_case("name", STATES)
def test_every_content_of_dcp(tmp_path: Path, name: str) -> None:
    with one_process():
        dcp.save(
            {"model": STATES[name], "epoch": 1}, checkpoint_id=tmp_path / "source", no_dist=True
        )
    assert_same(imported(tmp_path / "source"), {"model": STATES[name], "epoch": 1})


@each_case("dtype", [dtype for dtype in DTYPES if dtype in SAFE], ids=str)
def test_every_dtype_of_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {
        "x": random(dtype, 5, 3),
        "empty": torch.empty(0, 2, dtype=dtype),
        "scalar": random(dtype),
        "ünï": random(dtype, 1),
    }
    save_file(state, tmp_path / "source")
    found = imported(tmp_path / "source")
    assert_same({name: found[name] for name in state}, state)


@each_case("to", ["dcp", "torch"])
@each_case("name", STATES)
def test_what_was_exported_comes_back_whole(tmp_path: Path, name: str, to: str) -> None:
    save({"model": STATES[name], "epoch": 1}, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", to, tmp_path / "source")
    assert_same(imported(tmp_path / "source"), {"model": STATES[name], "epoch": 1})


@each_case("to", ["hf", "safetensors"])
@each_case("name", STATES)
def test_the_tensors_that_were_exported_come_back(tmp_path: Path, name: str, to: str) -> None:
    save({"model": STATES[name]}, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", to, tmp_path / "source", only="model", max_shard_size=100)
    tensors = {name: value for name, value in flat(STATES[name]) if isinstance(value, torch.Tensor)}
    found = imported(tmp_path / "source", under="model")["model"]
    assert found.keys() == tensors.keys()
    assert_same({name: found[name] for name in tensors}, tensors)


def test_tensors_that_share_a_storage_share_it_again(tmp_path: Path) -> None:
    torch.save(STATES["shared"], tmp_path / "source")
    found = imported(tmp_path / "source")
    assert (
        len({found[name].untyped_storage().data_ptr() for name in ("a", "b", "rows", "transposed")})
        == 1
    )
    assert sum(file.stat().st_size for file in (tmp_path / "imported").iterdir()) < 30_000


def test_tied_names_of_a_safetensors_file_are_tied_again(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(2)},
        tmp_path / "source",
        metadata={"b": "a", "format": "pt", "author": "me"},
    )
    found = imported(tmp_path / "source")
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()
    with Checkpoint.open(tmp_path / "imported") as checkpoint:
        assert checkpoint.user_content == {"author": "me"}


def test_a_model_comes_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"w": torch.arange(4.0)}, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "source" / "merges.txt").write_text("a b\n")
    (tmp_path / "source" / "tokenizer.json").write_text(json.dumps({"vocab": "x" * (1 << 20)}))
    (tmp_path / "source" / "README.md").write_text("no file of the model")
    summary = import_checkpoint(tmp_path / "source", tmp_path / "out")
    assert (summary.format, summary.tensors, summary.nbytes, summary.left_out) == (
        "hf",
        1,
        16,
        ["tokenizer.json"],
    )
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert_same(checkpoint.load(), {"model": {"w": torch.arange(4.0)}})
        assert checkpoint.user_content == {
            "config.json": {"model_type": "gpt2"},
            "merges.txt": "a b\n",
        }
    export(tmp_path / "out", "hf", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == {"model_type": "gpt2"}


def test_part_names_and_dtype(tmp_path: Path) -> None:
    torch.save(
        {"model": {"module.w": torch.arange(4.0), "module.n": torch.arange(3)}, "epoch": 1},
        tmp_path / "source",
    )
    found = imported(
        tmp_path / "source",
        only="model",
        under="net",
        dtype=torch.bfloat16,
        rename=[("^module.", "")],
        names={"module.n": "k"},
    )
    assert_same(found, {"net": {"w": torch.arange(4.0).bfloat16(), "k": torch.arange(3)}})


def test_another_dtype_of_tensors_that_share_a_storage(tmp_path: Path) -> None:
    torch.save(STATES["shared"], tmp_path / "source")
    expected = {name: tensor.bfloat16() for name, tensor in STATES["shared"].items()}
    found = imported(tmp_path / "source", dtype=torch.bfloat16)
    assert_same(found, expected)
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()


def test_dcp_reads_what_was_imported(tmp_path: Path) -> None:
    torch.save({"model": OrderedDict(w=torch.arange(4.0)), "epoch": 7}, tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "out")
    state: dict[str, Any] = {"model": {"w": torch.zeros(4)}, "epoch": 0}
    with one_process():
        dcp.load(state, storage_reader=StorageReader(tmp_path / "out"), no_dist=True)
    assert_same(state, {"model": {"w": torch.arange(4.0)}, "epoch": 7})


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    summary = import_checkpoint(tmp_path / "source", tmp_path / "out", dry_run=True)
    assert (summary.out, summary.format, summary.tensors, summary.nbytes) == (
        tmp_path / "out",
        "torch",
        1,
        12,
    )
    assert os.listdir(tmp_path) == ["source"]


def test_progress_reaches_all_bytes(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(300), "half": torch.ones(7, dtype=torch.half)}, tmp_path / "source")
    begun, done = list[int](), list[int]()
    import_checkpoint(
        tmp_path / "source", tmp_path / "out", begin=begun.append, progress=done.append
    )
    assert sum(done) == 1214
    assert begun[0] >= 1214


def refused(
    tmp_path: Path, error: type[CkptdError], said: str, source: str = "source", **options: Any
) -> None:
    """Assert that an import is refused with this sentence, and that nothing is left of
    it.
    """
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(error, match=said):
        import_checkpoint(tmp_path / source, tmp_path / "out", **options)
    assert sorted(os.listdir(tmp_path)) == before


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/this-must-not-exist",)


def test_a_hostile_pickle_is_not_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Hostile()}, tmp_path / "source")
    refused(
        tmp_path,
        UnsavableValue,
        r"source can only be loaded by running pickled code, .*: it names (os|posix)\.system",
    )
    torch.save({"x": Hostile()}, tmp_path / "source", _use_new_zipfile_serialization=False)
    refused(tmp_path, UnsavableValue, "can only be loaded by running pickled code")
    assert not Path("/tmp/this-must-not-exist").exists()


def test_bad_input_is_refused_in_one_sentence(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / "source")
    refused(tmp_path, NotFound, "nothing is not there", "nothing")
    refused(
        tmp_path,
        InvalidRequest,
        "format: there is no 'onnx'; there are dcp, hf, safetensors, torch",
        format="onnx",
    )
    refused(
        tmp_path,
        NotFound,
        "source is a file; expected a directory that torch.distributed.checkpoint reads",
        format="dcp",
    )
    refused(
        tmp_path,
        IntegrityError,
        "source is no safetensors file, or cut short",
        format="safetensors",
    )
    refused(tmp_path, NotFound, "has no 'x'; at its top are w, v", only="x")
    refused(tmp_path, InvalidRequest, "w and v would both get the name 'z'", rename=[("[wv]", "z")])
    refused(tmp_path, InvalidRequest, "torch cannot convert to torch.int8", dtype=torch.int8)
    refused(tmp_path, CkptdError, "codec", codec="bzip9")
    (tmp_path / "empty").mkdir()
    refused(tmp_path, NotFound, "empty is in no format that can be imported", "empty")
    import_checkpoint(tmp_path / "source", tmp_path / "ours")
    refused(tmp_path, InvalidRequest, "ours is a checkpoint of ckptd already", "ours")
    (tmp_path / "out").mkdir()
    refused(tmp_path, AlreadyExists, "out exists already")


def rezipped(
    path: Path,
    compression: int = zipfile.ZIP_STORED,
    order: int = 1,
    changed: dict[str, bytes] | None = None,
) -> None:
    """Write the zip again: compressed or not, its files in another order, and some of
    them with other bytes.
    """
    with zipfile.ZipFile(path) as old:
        files = [
            (info.filename, (changed or {}).get(info.filename.rpartition("/")[2], old.read(info)))
            for info in old.infolist()
        ]
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in files[::order]:
            new.writestr(name, data)


def swapped(values: torch.Tensor) -> bytes:
    return values.numpy().byteswap().tobytes()


@pytest.mark.filterwarnings("ignore:The default load endianness")
def test_files_that_torch_has_not_laid_out_itself(tmp_path: Path) -> None:
    state = {"a": random(torch.float32, 50), "b": random(torch.float32, 50, seed=2)}
    for number, (compression, order) in enumerate(
        ((zipfile.ZIP_DEFLATED, 1), (zipfile.ZIP_STORED, 1), (zipfile.ZIP_STORED, -1))
    ):
        place = tmp_path / str(number)
        place.mkdir()
        torch.save(state, place / "source")
        rezipped(place / "source", compression, order)
        assert_same(torch.load(place / "source", weights_only=True), state)
        assert_same(imported(place / "source"), state)
    values = torch.arange(6.0)
    torch.save({"a": values}, tmp_path / "source")
    rezipped(tmp_path / "source", changed={"byteorder": b"big", "0": swapped(values)})
    assert_same(imported(tmp_path / "source"), {"a": values})


def test_conjugate_views_keep_their_values(tmp_path: Path) -> None:
    state = {"c": torch.tensor([1 + 2j, 3 - 4j]).conj(), "n": torch.tensor([1 + 2j]).conj().imag}
    resolved = {"c": torch.tensor([1 - 2j, 3 + 4j]), "n": torch.tensor([-2.0])}
    torch.save(state, tmp_path / "source")
    assert_same(imported(tmp_path / "source"), resolved)
    (tmp_path / "two").mkdir()
    with one_process():
        dcp.save({"c": state["c"]}, checkpoint_id=tmp_path / "two" / "source", no_dist=True)
    assert_same(imported(tmp_path / "two" / "source"), {"c": resolved["c"]})


def test_counters_are_not_multiplied(tmp_path: Path) -> None:
    torch.save({"c": Counter(a=3), "d": OrderedDict(b=1, a=2)}, tmp_path / "source")
    found = imported(tmp_path / "source")
    assert (found["c"], list(found["d"])) == (Counter(a=3), ["b", "a"])


def test_many_views_of_one_storage_are_read_with_it(tmp_path: Path) -> None:
    columns = torch.arange(250_000.0).reshape(500, 500).unbind(1)
    torch.save({"columns": list(columns)}, tmp_path / "source")
    with peak_of_reads() as read:
        found = imported(tmp_path / "source")
    assert all(
        torch.equal(one, other) for one, other in zip(found["columns"], columns, strict=True)
    )
    assert sum(read) <= 2 * 1_000_000


@contextmanager
def peak_of_reads() -> Iterator[list[int]]:
    """Context manager. Gives a list of the bytes of every read of a source."""
    read, right = list[int](), fs.read_exactly

    def counting(fd: int, buffer: memoryview, offset: int) -> int:
        read.append(len(buffer))
        return right(fd, buffer, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "read_exactly", counting)
        yield read


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    for new in (True, False):
        torch.save(
            {"m": torch.ones(2, device="meta")},
            tmp_path / "source",
            _use_new_zipfile_serialization=new,
        )
        refused(
            tmp_path,
            UnsavableValue,
            r"a tensor of shape \[2\] was saved on the meta device, so that it has no values",
        )


def test_a_value_that_cannot_be_made_again_is_not_published(tmp_path: Path) -> None:
    torch.save(
        {
            "s": torch.sparse_coo_tensor(
                torch.tensor([[5]]), torch.tensor([1.0]), (3,), check_invariants=False
            )
        },
        tmp_path / "source",
    )
    refused(
        tmp_path, IntegrityError, "a value of kind sparse cannot be made from its fields|damaged"
    )


def test_containers_that_would_never_end(tmp_path: Path) -> None:
    own: list[Any] = []
    own.append(own)
    deep: Any = 0
    for _ in range(150):
        deep = [deep]
    doubled: Any = 0
    for _ in range(30):
        doubled = [doubled, doubled]
    for value, said in (
        (own, "or contains itself"),
        (deep, "nested more than 100 levels deep"),
        (doubled, "more than 8,388,608 values"),
    ):
        torch.save({"x": value}, tmp_path / "source")
        refused(tmp_path, UnsavableValue, said)


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "source")
    for format in ("", "torch", "safetensors"):
        refused(tmp_path, NotFound, "source is neither a file nor a directory", format=format)


def test_the_output_is_not_inside_the_source(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(
        InvalidRequest,
        match="out is inside .*source, which an import does not change: choose another place",
    ):
        import_checkpoint(tmp_path / "source", tmp_path / "source" / "out")


def test_errors_of_torch_become_one_sentence(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 61)}, tmp_path / "source")
    refused(tmp_path, CkptdError, "^no room for 9223372.04 TB at ")
    header = b'{"x":{"dtype":"U8","shape":[4611686018427387904,4611686018427387904,0],"data_offsets":[0,0]}}'  # noqa: E501
    (tmp_path / "source").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(
        tmp_path,
        IntegrityError,
        "source cannot be read; it is damaged, or holds what torch cannot handle",
    )


def test_every_flipped_bit_around_the_data_is_harmless(tmp_path: Path) -> None:
    """The import is refused in one sentence, or has what torch.load has."""
    torch.save({"w": torch.arange(8.0), "b": torch.ones(3)}, tmp_path / "whole")
    data, chance, read = (tmp_path / "whole").read_bytes(), Random(1), 0
    for number in range(250):
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        place = tmp_path / str(number)
        place.mkdir()
        (place / "source").write_bytes(changed)
        try:
            found = imported(place / "source")
        except CkptdError:
            continue
        read += 1
        assert_same(found, torch.load(place / "source", weights_only=True, map_location="cpu"))
    assert 50 < read < 250, "some bits count, and some do not"


@each_case("length", [0, 1, 7, 100, 700])
def test_a_half_written_file_is_refused(tmp_path: Path, length: int) -> None:
    torch.save({"w": torch.ones(100)}, tmp_path / "whole")
    save_file({"w": torch.ones(100)}, tmp_path / "safe")
    (tmp_path / "source").write_bytes((tmp_path / "whole").read_bytes()[:length])
    refused(tmp_path, IntegrityError, "source is no file of torch.save, or damaged")
    (tmp_path / "source").write_bytes((tmp_path / "safe").read_bytes()[: length // 2])
    refused(tmp_path, IntegrityError, "source is no safetensors file, or", format="safetensors")


def test_a_value_that_ckptd_cannot_save_is_named(tmp_path: Path) -> None:
    torch.save({f"{HIDDEN}x": torch.ones(2)}, tmp_path / "source")
    refused(tmp_path, UnsavableValue, "x: keys may not begin with")


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1 << 20)}, tmp_path / "source")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Stands for a full disk: a write fails with EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        refused(tmp_path, StorageError, "import .*source to .*out: .*File too large", codec="raw")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("format", ["dcp", "hf", "safetensors", "torch"])
def test_tensors_are_read_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    state = {f"w{number}": random(torch.uint8, 2000, seed=number) for number in range(6)}
    export(
        save({"model": state}, tmp_path / "checkpoint"), format, tmp_path / "source", only="model"
    )
    monkeypatch.setattr(contents, "BATCH", 1000)
    alive, most, right = weakref.WeakSet[torch.Tensor](), [0], contents.Contents.read

    def read(self: contents.Contents, leaves: Any) -> Any:
        for leaf, tensor in right(self, leaves):
            alive.add(tensor)
            most[0] = max(most[0], len(alive))
            yield leaf, tensor

    monkeypatch.setattr(contents.Contents, "read", read)
    found = imported(tmp_path / "source", under="")
    assert_same({name: found[name] for name in state}, state)
    assert 1 <= most[0] <= 2


def slow(source: Path, out: Path) -> None:
    import_checkpoint(source, out, codec="raw", progress=lambda length: time.sleep(60))


@pytest.mark.usefixtures("processes")
def test_a_killed_import_leaves_no_checkpoint(tmp_path: Path) -> None:
    torch.save(
        {f"w{number}": random(torch.uint8, 1 << 20, seed=number) for number in range(4)},
        tmp_path / "source",
    )
    child = context().Process(target=slow, args=(tmp_path / "source", tmp_path / "out"))
    child.start()
    while not any(name.endswith(".partial") for name in os.listdir(tmp_path)):
        time.sleep(0.01)
    child.kill()
    child.join()
    assert not (tmp_path / "out").exists()
    import_checkpoint(tmp_path / "source", tmp_path / "out", codec="raw")
    assert_same(loaded(tmp_path / "out")["w3"], random(torch.uint8, 1 << 20, seed=3))
