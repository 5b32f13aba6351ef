"""Tests the reader without torch against the reader with torch, on the same
checkpoints, bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ckptd.agent import Agent, Checkpoint, per_rank
from ckptd.shared import array_checkpoint
from ckptd.shared.array_checkpoint import ArrayCheckpoint, numpy_dtype
from ckptd.shared.errors import IntegrityError, NewerFormat, NotFound, StorageError
from ckptd.shared.formats.part import PartReader
from tests.agent.convert.saved import DTYPES, STATES, bits, random
from tests.crash.hostile import forge
from tests.crash.nonsense import Case, lay_out, simple_case
from tests.support import sharded
from tests.support.daemons import Daemon
from tests.support.storage import part_in, source
from tests.vectors.refused import REFUSED


@dataclass
class Record:
    weight: torch.Tensor
    name: str


def saved(
    daemon: Daemon, state: Any, *, job: str = "job", step: int = 1, tag: str | None = None
) -> Path:
    agent = Agent(job, socket=daemon.home.socket)
    agent.snapshot(state, step=step, tag=tag).wait("durable", timeout=60)
    agent.close()
    return daemon.home.root / job


def assert_alike(found: Any, expected: Any, path: str = "") -> None:
    """Assert that a state without torch equals one with torch."""
    if isinstance(expected, torch.Tensor):
        assert found.shape == tuple(expected.shape), path
        assert found.tobytes() == bits(expected), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_alike(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, value in enumerate(expected):
            assert_alike(found[number], value, f"{path}.{number}")
    else:
        assert found == expected, path


@pytest.mark.parametrize("name", STATES)
def test_every_content(daemon: Daemon, name: str) -> None:
    path = saved(daemon, {"model": STATES[name], "epoch": 1})
    with ArrayCheckpoint.open(path) as found, Checkpoint.open(path) as expected:
        assert found.keys() == expected.keys()
        assert_alike(found.load(), expected.load())
        for key in expected.keys():  # noqa: SIM118 (a Checkpoint is no dict)
            assert found.array(key).tobytes() == bits(expected.tensor(key))
            assert (found.dtype(key), found.shape(key)) == (
                str(expected.metadata(key)[0])[6:],
                tuple(expected.metadata(key)[1]),
            )
        assert found.verify() == expected.verify()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", ["fsdp2", "2d", "pipeline"])
def test_shards_of_four_ranks(kind: str) -> None:
    with sharded.saved(kind, 4, "storage") as four:
        path = four.place.root / "job"
        with ArrayCheckpoint.open(path) as found, Checkpoint.open(path) as expected:
            assert sorted(found.keys()) == sorted(expected.keys())
            assert_alike(found.load(), expected.load())


def test_objects_come_as_plain_values(daemon: Daemon) -> None:
    model = torch.nn.Linear(3, 2)
    state = {
        "model": model,
        "optim": torch.optim.SGD(model.parameters(), lr=0.1),
        "record": Record(torch.ones(2), "x"),
        "own": per_rank({"position": 7}),
        "array": np.arange(3),
        "path": Path("/x"),
        "dtype": torch.float16,
        "layout": torch.strided,
        "sparse": torch.eye(2).to_sparse(),
    }
    with ArrayCheckpoint.open(saved(daemon, state)) as checkpoint:
        found = checkpoint.load()
    assert found["model"]["weight"].tolist() == model.weight.tolist()
    assert found["optim"]["param_groups"][0]["lr"] == 0.1
    assert (found["record"]["weight"].tolist(), found["record"]["name"]) == ([1, 1], "x")
    assert (found["own"], found["array"].tolist(), found["path"], found["dtype"]) == (
        {"position": 7},
        [0, 1, 2],
        "/x",
        "float16",
    )
    assert found["layout"] == "strided"
    assert any(isinstance(value, np.ndarray) for value in found["sparse"].values())


def test_a_step_and_a_tag_are_chosen(daemon: Daemon) -> None:
    path = saved(daemon, {"x": torch.tensor(1)}, step=1)
    saved(daemon, {"x": torch.tensor(2)}, step=2)
    saved(daemon, {"x": torch.tensor(3)}, step=1, tag="best")
    for which, expected in (("newest", 3), (1, 3), (2, 2), ("best", 3), ("step-00000002.a0002", 2)):
        with ArrayCheckpoint.open(path, which) as found:
            assert int(found.array("x")) == expected, which
    with ArrayCheckpoint.open(next(path.glob("step-00000001.*"))) as found:
        assert int(found.array("x")) == 1
    for where, which in ((path, 7), (path, "worst"), (path / "nothing", "newest")):
        with pytest.raises(NotFound, match="no checkpoint"):
            ArrayCheckpoint.open(where, which)
    with (
        ArrayCheckpoint.open(path) as found,
        pytest.raises(NotFound, match="no tensor 'y'; the checkpoint has 1, such as x"),
    ):
        found.array("y")


@pytest.fixture
def two(daemon: Daemon) -> Path:
    saved(daemon, {"x": torch.arange(3000)}, step=1)
    return saved(daemon, {"x": torch.arange(3000) + 1}, step=2)


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def chunk_of_integers(part: Path) -> int:
    """Return the place in the file of the chunk that holds the int64 tensors.

    Worker threads write the chunks in any order.
    """
    with part.open("rb") as file:
        reader = PartReader(
            source(file.fileno()),
            part.name,
            None,
            lambda name: source(os.open(part.with_name(name), os.O_RDONLY)),
        )
        [place] = [chunk.offset for chunk in reader.index.chunks if chunk.element_size == 8]
    return place


def test_damage_is_found(two: Path) -> None:
    newest = next(two.glob("step-00000002.*"))
    part = part_in(newest)
    damage(part, chunk_of_integers(part))
    with ArrayCheckpoint.open(two) as found:
        with pytest.raises(IntegrityError, match="does not match its checksum"):
            found.array("x")
        with pytest.raises(IntegrityError, match="does not match its checksum"):
            found.verify()
    damage(part, 100)
    with ArrayCheckpoint.open(two) as found:
        assert found.manifest.step == 1
    with pytest.raises(IntegrityError, match="part header"):
        ArrayCheckpoint.open(two, 2)
    damage(newest / "manifest.json", 50)
    with pytest.raises(IntegrityError, match="manifest does not match its digest"):
        ArrayCheckpoint.open(two, 2)


def test_a_part_that_is_missing_is_damage(two: Path) -> None:
    next(next(two.glob("step-00000002.*")).glob("*.ckpt")).unlink()
    with ArrayCheckpoint.open(two) as found:
        assert found.manifest.step == 1
    with pytest.raises(IntegrityError, match=r"rank-00000\.\w+\.ckpt is missing$"):
        ArrayCheckpoint.open(two, 2)


def test_each_chunk_is_read_once_however_many_tensors_are_in_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(6000.0)
    path = saved(
        daemon,
        {
            "views": [whole[at : at + 10] for at in range(0, 3000, 5)],
            "small": [torch.full((3,), n) for n in range(500)],
        },
    )
    read, right = list[int](), PartReader.read_chunk

    def counting(self: PartReader, number: int, raw: memoryview) -> None:
        read.append(number)
        right(self, number, raw)

    monkeypatch.setattr(PartReader, "read_chunk", counting)
    with ArrayCheckpoint.open(path) as found, Checkpoint.open(path) as expected:
        state = found.load()
        assert len(read) <= 2 * len(found._parts[0].ranges)
        assert_alike(state, expected.load())
    assert np.shares_memory(state["views"][0], state["views"][1])


def test_documents_that_cannot_be_merged_are_damage(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[Any] = [
        {},
        {"state": array_checkpoint._Reference("nothing")},
    ]
    for document in wrong:
        monkeypatch.setattr(
            array_checkpoint, "decode_plain", lambda data, resolve, document=document: document
        )
        with ArrayCheckpoint.open(two) as found, pytest.raises(IntegrityError):
            found.load()


def test_a_newer_checkpoint_is_not_passed_over(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = array_checkpoint._manifest

    def newer(directory: Path) -> Any:
        if directory.name.startswith("step-00000002"):
            raise NewerFormat("manifest was written by a newer ckptd")
        return right(directory)

    monkeypatch.setattr(array_checkpoint, "_manifest", newer)
    with pytest.raises(NewerFormat):
        ArrayCheckpoint.open(two)


def test_a_newer_checkpoint_with_a_tag_of_the_users_own_may_be_the_newest(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(daemon, {"x": torch.tensor(1)}, step=1, tag="best")
    right = array_checkpoint._manifest

    def newer(directory: Path) -> Any:
        if directory.name.startswith("best"):
            raise NewerFormat("manifest was written by a newer ckptd")
        return right(directory)

    monkeypatch.setattr(array_checkpoint, "_manifest", newer)
    saved(daemon, {"x": torch.tensor(2)}, step=2)
    with ArrayCheckpoint.open(path) as found:  # of a later attempt
        assert found.manifest.step == 2
    next(path.glob("step-*")).rename(path / "step-00000002.a0001")
    with pytest.raises(NewerFormat):
        ArrayCheckpoint.open(path)
    with ArrayCheckpoint.open(path, 2) as found:
        assert found.manifest.step == 2


@pytest.fixture
def without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    numpy_dtype.cache_clear()
    yield
    numpy_dtype.cache_clear()


def test_dtypes() -> None:
    assert numpy_dtype("bfloat16").name == "bfloat16"
    assert numpy_dtype("float8_e4m3fn").itemsize == 1
    assert numpy_dtype("complex32") == np.uint32
    assert numpy_dtype("other/16") == np.dtype("V16")
    for dtype in DTYPES:
        tensor = random(dtype, 4)
        values = np.frombuffer(bits(tensor), numpy_dtype(str(dtype)[6:]))
        wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64).tolist()
        np.testing.assert_array_equal(values.astype(complex if dtype.is_complex else float), wide)


def test_dtypes_without_ml_dtypes_come_as_their_bits(without_ml_dtypes: None) -> None:
    assert numpy_dtype("bfloat16") == np.uint16
    assert numpy_dtype("float8_e5m2") == np.uint8
    assert numpy_dtype("float32") == np.float32


_ELSEWHERE = """
import os, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "uvloop", "fcntl", "pwd", "resource", "aiofiles", "psutil", "ml_dtypes"}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
for name in ("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECT", "getuid", "geteuid", "sched_getaffinity", "pread",
             "preadv", "pwrite", "posix_fallocate", "posix_fadvise", "fork", "mkfifo"):
    delattr(os, name)
from ckptd.shared.array_checkpoint import ArrayCheckpoint
with ArrayCheckpoint.open(sys.argv[1]) as checkpoint:
    print(checkpoint.load()["x"][:3].tolist(), checkpoint.verify() > 24000)
assert not [name for name in sys.modules if name.startswith(("ckptd.agent", "ckptd.daemon", "torch"))]
"""  # noqa: E501


def test_no_torch_and_no_posix_is_needed(two: Path) -> None:
    """Run where nothing can be imported that other operating systems lack, and where
    `os` lacks what Windows lacks.
    """
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, str(two)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[1, 2, 3] True\n", "")


@pytest.mark.parametrize(
    "name", ["part-another-step", "part-another-count", "part-two-parts-of-one-rank"]
)
def test_a_part_that_the_manifest_does_not_describe_is_refused(name: str, tmp_path: Path) -> None:
    for file, data in REFUSED[name].files.items():
        (tmp_path / file).write_bytes(data)
    with pytest.raises(IntegrityError, match="is not the part that the manifest describes"):
        ArrayCheckpoint.open(tmp_path)


def pieces() -> Case:
    """A checkpoint in which one rank stores two shards of a tensor."""
    case = simple_case(("w", "float32", [5, 2]))
    part = case.parts[0]
    part.items = [
        ["w", "float32", [5, 2], [at, 0], [length, 2], None, 0, "cpu", False]
        for at, length in ((0, 3), (3, 2))
    ]
    assert part.metadata is not None
    part.metadata["w"]["chunks"] = [[[0, 0], [3, 2]], [[3, 0], [2, 2]]]
    lay_out(part)
    part.data = np.arange(10, dtype="f4").tobytes()
    return case


def test_one_part_may_have_several_shards_of_a_tensor(tmp_path: Path) -> None:
    assert forge(pieces(), tmp_path, 1)
    with ArrayCheckpoint.open(tmp_path / "gpt") as opened:
        opened.verify()
        for found in (opened.load()["w"], opened.array("w")):
            assert np.array_equal(found, np.arange(10, dtype="f4").reshape(5, 2))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (msgspec.msgpack.Ext(1, b"nobody"), "names the tensor 'nobody', which no part has"),
        (msgspec.msgpack.Ext(5, b"\x91\x92\x90\x01"), "values document cannot be read"),
    ],
)
def test_verify_finds_values_that_load_would_refuse(tmp_path: Path, value: Any, words: str) -> None:
    case = pieces()
    case.parts[0].values["state"]["odd"] = value
    assert forge(case, tmp_path, 1)
    for how in ("verify", "load"):
        with (
            pytest.raises(IntegrityError, match=words),
            ArrayCheckpoint.open(tmp_path / "gpt") as opened,
        ):
            getattr(opened, how)()


def test_two_dtypes_of_one_tensor_are_damage(tmp_path: Path) -> None:
    case = pieces()
    case.parts[0].items[1][1] = "int32"
    assert forge(case, tmp_path, 1)
    with pytest.raises(IntegrityError, match="w has two dtypes: int32 and float32"):
        ArrayCheckpoint.open(tmp_path / "gpt", 1)


def test_an_error_of_the_file_system_is_one_of_ckptd(tmp_path: Path) -> None:
    assert forge(pieces(), tmp_path, 1)
    (part,) = tmp_path.rglob("rank-*.ckpt")
    part.unlink()
    part.mkdir()
    with pytest.raises(StorageError, match="cannot read .*Is a directory"):
        ArrayCheckpoint.open(tmp_path / "gpt", 1)
