"""Tests how tensors are shared out over files, and which files are carried over.

`test_export.py` reads whole directories.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptd.agent.convert import huggingface
from ckptd.agent.convert.contents import Leaf
from ckptd.agent.convert.huggingface import carried_files, is_carried, read_directory, shards_of
from ckptd.shared.errors import IntegrityError, InvalidRequest, NotFound
from tests.support.cases import each_case

OTHERS = (
    "tokenizer\0.json",
    "../config.json",
    "dir/config.json",
    "model.safetensors",
    "pytorch_model.bin",
    "train.py",
    "",
)
CONFIGS: tuple[Any, ...] = (
    ({}, {"dtype": "bfloat16"}),
    ({"torch_dtype": "float32", "n": 1}, {"torch_dtype": "bfloat16", "n": 1}),
)
NESTED = (
    {"text_config": {"dtype": "float32"}, "x": {}},
    {"text_config": {"dtype": "bfloat16"}, "x": {}, "dtype": "bfloat16"},
)
"""The configuration of a model with parts, before and after a change of dtype."""


def leaves(*sizes: int) -> dict[str, Leaf]:
    return {
        f"x{n}": Leaf(f"x{n}", torch.uint8, torch.uint8, (size,), (1,), 0, f"x{n}")
        for n, size in enumerate(sizes)
    }


@each_case(
    ("sizes", "expected"),
    [
        ((), [[]]),
        ((5, 5), [["x0", "x1"]]),
        ((5, 6), [["x0"], ["x1"]]),
        ((50, 1, 50), [["x0"], ["x1"], ["x2"]]),
        ((0, 10, 0, 1), [["x0", "x1", "x2"], ["x3"]]),
    ],
)
def test_no_file_is_longer_than_the_limit_unless_it_has_one_tensor(
    sizes: tuple[int, ...], expected: list[list[str]]
) -> None:
    found = shards_of(leaves(*sizes), 10)
    assert [list(shard) for shard in found.values()] == expected
    if len(expected) == 1:
        assert list(found) == ["model.safetensors"]
    else:
        assert next(iter(found)) == f"model-00001-of-{len(expected):05d}.safetensors"


@each_case(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"],
)
def test_files_of_a_model(name: str) -> None:
    assert is_carried(name)


@each_case("name", OTHERS)
def test_other_files_are_not_carried(name: str) -> None:
    assert not is_carried(name)
    assert carried_files(None, {name: "text"}, None) == {}


def test_the_dtype_goes_into_the_configuration(tmp_path: Path) -> None:
    for config, expected in (*CONFIGS, NESTED):
        found = carried_files(None, {"config.json": config}, torch.bfloat16)
        assert json.loads(found["config.json"]) == expected
    assert json.loads(
        carried_files(None, {"config.json": '{"dtype": "float32"}'}, None)["config.json"]
    ) == {"dtype": "float32"}


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        NotFound, match="has none of the files of a model, such as config.json or tokenizer.json$"
    ):
        carried_files(tmp_path, None, None)
    with pytest.raises(InvalidRequest, match="^config.json cannot be read: "):
        carried_files(None, {"config.json": "{"}, torch.float16)
    with pytest.raises(InvalidRequest, match="^config.json is no JSON object$"):
        carried_files(None, {"config.json": "[]"}, None)
    with pytest.raises(
        InvalidRequest, match="^user_content: merges.txt is a list; expected text or a JSON object$"
    ):
        carried_files(None, {"merges.txt": ["a b"]}, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model in two files."""
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(4)}, tmp_path / "two.safetensors")
    return index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})


def index(directory: Path, weight_map: Any) -> Path:
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return directory


def test_a_model_in_several_files(model: Path) -> None:
    contents, left_out = read_directory(model)
    assert left_out == []
    assert {
        leaf.name: tensor.numel() for leaf, tensor in contents.read(contents.tree.values())
    } == {"a": 2, "b": 3, "c": 4}


@each_case(
    ("weight_map", "said"),
    [
        (
            {"a": "../one.safetensors"},
            "names the file '../one.safetensors'; expected one beside it that ends in .safetensors",
        ),
        ({"a": "/one.safetensors"}, "names the file '/one.safetensors'; expected one beside it"),
        ({"a": "one.bin"}, "names the file 'one.bin'; expected one beside it"),
        ({"a": 3}, "names the file 3; expected one beside it"),
        (
            {"a": "three.safetensors"},
            "lacks three.safetensors, which its index names: the directory is not complete",
        ),
        (
            {"a": "one.safetensors", "x": "one.safetensors"},
            "one.safetensors lacks x, which the index says is there",
        ),
        ([1], "index.json cannot be read"),
        ({}, "index.json cannot be read: ValueError.'it names no tensor'."),
        (None, "index.json cannot be read"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(model: Path, weight_map: Any, said: str) -> None:
    with pytest.raises(IntegrityError, match=said):
        read_directory(index(model, weight_map))


def test_two_files_with_a_tensor_of_one_name_are_refused(model: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, model / "one.safetensors")
    with pytest.raises(IntegrityError, match="two files have a tensor with the name 'b'"):
        read_directory(model)


def test_an_index_that_is_no_json_is_refused(model: Path) -> None:
    for text in ("", "[" * 100_000, "{}"):
        (model / "model.safetensors.index.json").write_text(text)
        with pytest.raises(IntegrityError, match="index.json cannot be read"):
            read_directory(model)


@each_case(
    "text",
    [
        '{"a": NaN}',
        '{"a": 1e400}',
        '{"a": "\\ud800"}',
        '{"a":' * 100 + "1" + "}" * 100,
        "[1]",
        "text",
    ],
)
def test_a_file_that_is_no_json_object_stays_text(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    contents, _ = read_directory(model)
    assert contents.user_content == {"config.json": text}


def test_files_that_have_no_room_in_the_user_content_are_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "config.json").write_text('{"a": 1}')
    (model / "vocab.txt").write_text("x" * 50)
    (model / "tokenizer.model").write_bytes(b"\xff\xfe")
    (model / "tokenizer.json").write_text("[1]")
    monkeypatch.setattr(huggingface, "MOST_CARRIED", 40)
    contents, left_out = read_directory(model)
    assert (contents.user_content, left_out) == (
        {"config.json": {"a": 1}, "tokenizer.json": "[1]"},
        ["tokenizer.model", "vocab.txt"],
    )
